//! What a monitor is told of: flows that begin, packets that are dropped or rejected. Nothing of this is on the way of packets
//! of flows that go on, and where it is, it is a look at one word as long as nobody listens.

use aya_ebpf::{
    btf_maps::{Array, RingBuf},
    helpers::generated::bpf_ktime_get_ns,
    macros::btf_map,
};
use bytemuck::Zeroable as _;
use lb_common::{
    Choice, Event, EventHook, Outcome, capacity,
    conntrack::{Tick, Tuple},
    monitor,
};

use super::{
    context::HookContext,
    flow::masquerade,
    maps::{self, Scratch, scratch},
    stats,
};

/// Events for the one who listens.
#[btf_map]
static EVENTS: RingBuf<Event, { capacity::EVENTS }> = RingBuf::new();

/// Whether somebody listens, and what he has missed: see [`monitor`].
#[btf_map]
static MONITOR: Array<u64, { monitor::SIZE }> = Array::new();

/// Whether somebody listens, or did so when it was killed: then [`tell`] says nothing.
#[inline(always)]
pub(crate) fn is_watched() -> bool {
    until() != 0
}

/// The tick until which somebody listens.
#[inline(always)]
fn until() -> u64 {
    // SAFETY: array elements live as long as the map, and words are read whole.
    MONITOR.get_ptr(monitor::UNTIL).map_or(0, |until| unsafe { until.read_volatile() })
}

/// Tells of the flow that `SCRATCH` has just begun.
#[inline(always)]
pub(super) fn new_flow(context: &HookContext, outcome: Outcome, hook: EventHook) {
    if is_watched() {
        tell_new_flow(context.device, outcome, hook);
    }
}

#[inline(never)]
fn tell_new_flow(device: u32, outcome: Outcome, hook: EventHook) {
    let Ok(Scratch { request, setup, .. }) = scratch() else { return };
    tell(|event| {
        (event.from, event.to) = (setup.from, setup.to);
        if setup.node != masquerade::NOBODY {
            event.to.source = setup.node;
        }
        event.service = setup.service;
        event.origin = device;
        (event.outcome, event.hook) = (outcome as u8, hook as u8);
        (event.choice, event.scheduler) = (request.choice as u8, request.service.scheduler);
        event.flags = setup.way;
    });
}

/// Tells of the packet at hand, which is dropped.
#[inline(always)]
pub(crate) fn dropped(context: &HookContext, outcome: Outcome, hook: EventHook) {
    if is_watched() {
        tell_dropped(context.device, outcome, hook);
    }
}

#[inline(never)]
fn tell_dropped(device: u32, outcome: Outcome, hook: EventHook) {
    match maps::packet() {
        // Packets on the short way are never written down, and that is the only thing that can happen to them.
        Ok(packet) if !matches!(outcome, Outcome::RewriteFailed) => {
            tell_refused(&packet.tuple, device, outcome, hook);
        }
        _ => tell(|event| {
            (event.from, event.to) = (Tuple::zeroed(), Tuple::zeroed());
            without_backend(event, device, outcome, hook);
        }),
    }
}

/// Tells of a packet that was answered in place of a backend, or of a system call that fails.
#[inline(always)]
pub(crate) fn refused(context: &HookContext, from: &Tuple, outcome: Outcome, hook: EventHook) {
    if is_watched() {
        tell_refused(from, context.device, outcome, hook);
    }
}

#[inline(never)]
pub(crate) fn tell_refused(from: &Tuple, origin: u32, outcome: Outcome, hook: EventHook) {
    tell(|event| {
        (event.from, event.to) = (*from, Tuple::zeroed());
        without_backend(event, origin, outcome, hook);
    });
}

#[inline(always)]
fn without_backend(event: &mut Event, origin: u32, outcome: Outcome, hook: EventHook) {
    event.service = 0;
    event.origin = origin;
    (event.outcome, event.hook) = (outcome as u8, hook as u8);
    (event.choice, event.scheduler, event.flags) = (Choice::None as u8, 0, 0);
}

/// Makes an event where it is to lie: `fill` writes all of it but the time.
#[inline(always)]
pub(crate) fn tell(fill: impl FnOnce(&mut Event)) {
    // SAFETY: takes nothing and has no side effects.
    let time = unsafe { bpf_ktime_get_ns() };
    if u64::from(Tick::from_nanos(time).0) >= until() {
        return;
    }
    let Some(mut entry) = EVENTS.reserve(0) else {
        if let Some(lost) = MONITOR.get_ptr_mut(monitor::LOST) {
            // SAFETY: array elements live as long as the map.
            unsafe { stats::add_one(lost) };
        }
        return;
    };
    // SAFETY: the memory is ours until it is submitted. It may hold anything, of which an event is a valid one.
    let event = unsafe { &mut *entry.as_mut_ptr() };
    event.time = time;
    event.zeros = [0; 3];
    fill(event);
    entry.submit(0);
}
