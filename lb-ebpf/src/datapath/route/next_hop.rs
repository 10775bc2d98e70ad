//! The next hops of packets that bypass the stack, cached for each destination and looked up about once a second. If
//! routes also depend on other fields of packets (policy routing, multipath routes), only packets of one flow share a
//! next hop.

use aya_ebpf::{btf_maps::PerCpuArray, macros::btf_map};
use lb_common::{
    capacity,
    conntrack::{CachedNextHop, NextHop, NextHopKey, RouteInputs, Tick, Tuple, next_hop_flags},
};
use lb_ebpf::rules::forwarding::next_hop_flags_of;

use super::{ANY_LENGTH, FibResult, found, lookup};
use crate::datapath::{context::HookContext, device, settings, words};

/// Next hops by [`NextHopKey::slot`]; a new one replaces an older one with the same slot.
///
/// Each CPU has its own next hops, so that no program reads a next hop while another one writes it.
#[btf_map]
static NEXT_HOPS: PerCpuArray<CachedNextHop, { capacity::NEXT_HOPS }> = PerCpuArray::new();

/// The next hop of packets that came in as `from` and become `to`; `None` if route or neighbour are unknown.
#[inline(always)]
pub(crate) fn find(
    context: &HookContext,
    from: &Tuple,
    to: &Tuple,
    now: Tick,
) -> Option<&'static mut NextHop> {
    let key = NextHopKey::new(to, context.device);
    let cached = cached(&key)?;
    let is_same = words::are_equal::<6>(bytemuck::must_cast(cached.key), bytemuck::must_cast(key));
    if !(is_same && cached.is_valid(|| RouteInputs::new(from, to, context.mark), now)) {
        renew(context, from, to, cached, now);
    }
    (cached.hop.flags & next_hop_flags::KNOWN != 0).then_some(&mut cached.hop)
}

/// The element in the slot of `key`. It may hold the next hop for another key.
#[inline(always)]
fn cached(key: &NextHopKey) -> Option<&'static mut CachedNextHop> {
    let cached = NEXT_HOPS.get_ptr_mut(key.slot())?;
    // SAFETY: the element belongs to this CPU alone and lives as long as the program runs. Programs on these hooks run
    // with bottom halves disabled, so no other program uses the element before this one ends. A program holds one such
    // reference at a time: the reference in `store` ends before `find` looks up the next hop of the packet. Every bit
    // pattern is valid.
    Some(unsafe { &mut *cached })
}

#[inline(never)]
fn renew(context: &HookContext, from: &Tuple, to: &Tuple, cached: &mut CachedNextHop, now: Tick) {
    let result = lookup(context, from, to, ANY_LENGTH, 0);
    replace(context, from, to, cached, result, now);
}

/// Replaces a cached next hop by the result of a route lookup for packets that came in as `from` and become `to`.
#[inline(always)]
fn replace(
    context: &HookContext,
    from: &Tuple,
    to: &Tuple,
    cached: &mut CachedNextHop,
    result: FibResult,
    now: Tick,
) {
    let key = NextHopKey::new(to, context.device);
    let is_same = words::are_equal::<6>(bytemuck::must_cast(cached.key), bytemuck::must_cast(key));
    let repeated = if is_same { cached.hop.repeated_at(now) } else { 0 };
    cached.key = key;
    cached.inputs = RouteInputs::new(from, to, context.mark);
    cached.hop.entrance = device::info(context.device).mac;
    note(result, &mut cached.hop, now);
    cached.hop.flags |= repeated;
}

/// Caches the result of a route lookup for packets that came in as `from` and become `to`.
#[inline(always)]
pub(crate) fn store(context: &HookContext, from: &Tuple, to: &Tuple, result: FibResult, now: Tick) {
    if let Some(cached) = cached(&NextHopKey::new(to, context.device)) {
        replace(context, from, to, cached, result, now);
    }
}

/// Stores the result of a route lookup. If the neighbour is not resolved yet, the current packet leaves through the
/// stack or `bpf_redirect_neigh`, either of which resolves the neighbour, and the program repeats the lookup for the
/// next packet.
#[inline(always)]
fn note(result: FibResult, hop: &mut NextHop, now: Tick) {
    hop.flags = if settings::routes_by_destination() { next_hop_flags::OF_DESTINATION } else { 0 };
    hop.resolved_at = if result == FibResult::WithoutNeighbour { Tick(0) } else { now };
    let Ok(route) = found() else { return };
    if result == FibResult::Route {
        (hop.destination, hop.source) = route.macs();
        (hop.device, hop.mtu) = (route.device, route.mtu());
        let of_device = next_hop_flags_of(device::info(route.device).flags);
        hop.flags |= next_hop_flags::KNOWN | next_hop_flags::FRESH | of_device;
    }
}
