//! Events for `lb-agent monitor`: see [`Event`]. The programs emit no event for a further packet of a flow, unless they
//! drop or reject the packet. While no monitor runs, an event costs one load from a map.

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

use super::{context::HookContext, maps, scratch::scratch, words};

/// Events for the monitor.
#[btf_map]
static EVENTS: RingBuf<Event, { capacity::EVENTS }> = RingBuf::new();

/// The tick until which the programs emit events, and how many events were lost: see [`monitor`].
#[btf_map]
static MONITOR: Array<u64, { monitor::SIZE }> = Array::new();

/// Whether a monitor has set the tick until which the programs emit events. The answer stays true if the monitor is
/// killed, but from that tick on [`emit`] emits nothing.
#[inline(always)]
pub(crate) fn is_watched() -> bool {
    until() != 0
}

/// The tick until which the programs emit events; 0 is off.
#[inline(always)]
fn until() -> u64 {
    // SAFETY: `until` points to an element of the array, which lives as long as the program runs. A volatile load of
    // an aligned `u64` is not split.
    MONITOR.get_ptr(monitor::UNTIL).map_or(0, |until| unsafe { until.read_volatile() })
}

/// Emits an event about the flow in `SCRATCH`, which was just created.
#[inline(always)]
pub(super) fn new_flow(context: &HookContext, outcome: Outcome, hook: EventHook) {
    if is_watched() {
        emit_new_flow(context.device, outcome, hook);
    }
}

#[inline(never)]
fn emit_new_flow(device: u32, outcome: Outcome, hook: EventHook) {
    let Ok(scratch) = scratch() else { return };
    let (request, setup) = (scratch.request(), scratch.setup());
    emit(|event| {
        (event.from, event.to) = (setup.from, setup.to);
        if setup.is_masqueraded() {
            event.to.source = setup.node;
        }
        event.service = setup.service;
        event.origin = device;
        (event.outcome, event.hook) = (outcome as u8, hook as u8);
        (event.choice, event.scheduler) = (request.choice as u8, request.service.scheduler);
        event.flags = setup.flags;
    });
}

/// Emits an event about the current packet, which is dropped.
#[inline(always)]
pub(crate) fn dropped(context: &HookContext, outcome: Outcome, hook: EventHook) {
    if is_watched() {
        emit_dropped(context.device, outcome, hook);
    }
}

#[inline(never)]
fn emit_dropped(device: u32, outcome: Outcome, hook: EventHook) {
    match maps::packet() {
        // After `RewriteFailed`, the stored packet may be an earlier one, because the fast path does not store a packet
        // that it forwards. `RewriteFailed` is the only outcome with which the fast path drops a packet that it has not
        // stored.
        Ok(packet) if !matches!(outcome, Outcome::RewriteFailed) => {
            emit_rejected(&packet.tuple, device, outcome, hook);
        }
        _ => emit(|event| {
            (event.from, event.to) = (Tuple::zeroed(), Tuple::zeroed());
            without_backend(event, device, outcome, hook);
        }),
    }
}

/// Emits an event about a packet that is rejected.
#[inline(always)]
pub(crate) fn rejected(context: &HookContext, from: &Tuple, outcome: Outcome, hook: EventHook) {
    if is_watched() {
        emit_rejected(from, context.device, outcome, hook);
    }
}

/// Emits an event about a packet that is rejected or dropped, or a system call that fails; `origin` as in
/// [`Event::origin`].
#[inline(never)]
pub(crate) fn emit_rejected(from: &Tuple, origin: u32, outcome: Outcome, hook: EventHook) {
    emit(|event| {
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

/// Emits an event: `fill` writes all of its fields except `time` and `zeros`, straight into the ring buffer.
#[inline(always)]
pub(crate) fn emit(fill: impl FnOnce(&mut Event)) {
    // SAFETY: the helper takes nothing and only returns a number.
    let time = unsafe { bpf_ktime_get_ns() };
    if u64::from(Tick::from_nanos(time).0) >= until() {
        return;
    }
    let Some(mut entry) = EVENTS.reserve(0) else {
        if let Some(lost) = MONITOR.get_ptr_mut(monitor::LOST) {
            // SAFETY: `lost` points to an element of the array, which lives as long as the program runs.
            unsafe { words::add(lost, 1) };
        }
        return;
    };
    // SAFETY: the entry is reserved for this program until it is submitted, and `entry` is not used while `event` is.
    // Every bit pattern of its memory is a valid `Event`.
    let event = unsafe { &mut *entry.as_mut_ptr() };
    event.time = time;
    event.zeros = [0; 3];
    fill(event);
    entry.submit(0);
}
