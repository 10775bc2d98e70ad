//! Active flows of each backend, counted for services whose scheduler uses the number.
//!
//! A flow counts from its creation to its end: a RST, both FINs (of a tunnelled flow, the client's), its replacement,
//! or its eviction by a program. The agent subtracts the flows that it deletes. The forward entry holds the index of
//! the counter (`Flow::active_flows_slot`). The CPU that ends the flow clears this index in one atomic exchange, so
//! each flow is subtracted once.
//!
//! `connect(2)` to a Service also begins an active flow, which ends when the socket is closed or connected again.

use core::arch::asm;

use aya_ebpf::{bindings::BPF_F_MMAPABLE, btf_maps::Array, macros::btf_map};
use lb_common::{capacity, conntrack::Flow};

use crate::datapath::words;

/// Active flows by [`lb_common::Backend::active_flows_slot`]. The programs and the agent, which maps the array, change
/// the numbers atomically.
#[btf_map]
static ACTIVE: Array<i64, { capacity::BACKENDS }, { BPF_F_MMAPABLE as usize }> = Array::new();

/// Adds to a counter in one step.
#[inline(always)]
fn add(number: u32, difference: i64) {
    if number != 0
        && let Some(count) = ACTIVE.get_ptr_mut(number)
    {
        // SAFETY: `count` points to an element of the array, which lives as long as the program runs, and is aligned
        // to 8 bytes. All CPUs and the agent change it atomically.
        unsafe { words::add(count.cast(), difference.cast_unsigned()) };
    }
}

/// Reads a word and sets it to 0, in one step.
#[inline(always)]
fn take(word: &mut u32) -> u32 {
    let mut taken = 0u32;
    // SAFETY: `word` is borrowed mutably, and a `u32` has the alignment that the instruction needs.
    unsafe {
        asm!("{1} = xchg32_32({0} + 0, {1})", in(reg) &raw mut *word, inout(wreg) taken, options(nostack));
    }
    taken
}

/// The value of a counter of active flows.
#[inline(always)]
#[expect(clippy::cast_sign_loss, reason = "a negative count means no flows")]
pub(crate) fn active(number: u32) -> u64 {
    // SAFETY: `count` points to an aligned element of the array, which lives as long as the program runs. Aligned
    // 64-bit loads are atomic on 64-bit CPUs, and volatile ones are not split.
    ACTIVE.get_ptr(number).map_or(0, |count| unsafe { count.read_volatile() }.max(0) as u64)
}

/// Counts a flow that begins.
#[inline(always)]
pub(crate) fn begin(number: u32) {
    add(number, 1);
}

/// Subtracts the connection of a socket. (Such a connection has no entry in the flow table.)
#[inline(always)]
pub(crate) fn connection_ended(number: u32) {
    add(number, -1);
}

/// Subtracts the flow with this forward entry, unless an earlier call has subtracted the flow.
#[inline(always)]
pub(crate) fn end(forward: &mut Flow) {
    if forward.active_flows_slot != 0 {
        count_down(forward);
    }
}

#[inline(never)]
fn count_down(forward: &mut Flow) {
    add(take(&mut forward.active_flows_slot), -1);
}
