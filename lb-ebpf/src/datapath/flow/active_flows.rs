//! How many flows of each backend are active, for services whose scheduler asks for that.
//!
//! A flow is counted from its beginning to its end: a RST or both FINs, or what replaces it; the agent counts down
//! those that it forgets. The entry of the direction from the client knows where (`Flow::active_flows_slot`), and gives
//! that up in one atomic exchange, so that no flow ends twice.

use core::arch::asm;

use aya_ebpf::{bindings::BPF_F_MMAPABLE, btf_maps::Array, macros::btf_map};
use lb_common::{
    capacity,
    conntrack::{Flow, Phase, Segment, tcp_flags},
};

use super::conntrack::lookup;

/// Active flows by [`lb_common::Backend::active_flows_slot`]. The agent maps it, to count without losing what programs
/// count.
#[btf_map]
static ACTIVE: Array<i64, { capacity::BACKENDS }, { BPF_F_MMAPABLE as usize }> = Array::new();

/// Adds to a counter in one step: `core` has no such operation for BPF.
#[inline(always)]
fn add(number: u32, difference: i64) {
    if number != 0
        && let Some(count) = ACTIVE.get_ptr_mut(number)
    {
        // SAFETY: array elements live as long as the map and are aligned.
        unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) count, in(reg) difference, options(nostack)) };
    }
}

/// Takes what is in a word and leaves 0, in one step.
#[inline(always)]
fn take(word: &mut u32) -> u32 {
    let mut taken = 0u32;
    // SAFETY: a word is aligned.
    unsafe {
        asm!("{1} = xchg32_32({0} + 0, {1})", in(reg) &raw mut *word, inout(wreg) taken, options(nostack));
    }
    taken
}

/// The number of active flows.
#[inline(always)]
#[expect(clippy::cast_sign_loss, reason = "what is below 0 is none")]
pub(in crate::datapath) fn active(number: u32) -> u64 {
    // SAFETY: as for `add`; words are read whole.
    ACTIVE.get_ptr(number).map_or(0, |count| unsafe { count.read_volatile() }.max(0) as u64)
}

/// A flow has begun.
#[inline(always)]
pub(in crate::datapath) fn begin(number: u32) {
    add(number, 1);
}

/// The flow with this entry of the direction from the client has ended, if it had not before.
#[inline(always)]
pub(in crate::datapath) fn end(forward: &mut Flow) {
    if forward.active_flows_slot != 0 {
        count_down(forward);
    }
}

#[inline(never)]
fn count_down(forward: &mut Flow) {
    add(take(&mut forward.active_flows_slot), -1);
}

/// Looks at what may be the end of a flow.
#[inline(always)]
pub(in crate::datapath) fn observe(segment: &Segment, flow: &mut Flow) {
    if segment.flags & (tcp_flags::FIN | tcp_flags::RST) != 0 && flow.active_flows_slot != 0 {
        end_if_over(flow);
    }
}

#[inline(never)]
fn end_if_over(flow: &mut Flow) {
    if flow.is_tunnelled() {
        if Phase::of_one_way(flow).is_over() {
            end(flow);
        }
        return;
    }
    let Some(peer) = lookup(&flow.to.reversed()) else { return };
    let (forward, reply) = if flow.is_reply() { (peer, flow) } else { (flow, peer) };
    if Phase::of(forward, reply).is_over() {
        end(forward);
    }
}
