//! Events for the agent's flow log: see [`FlowEvent`]. If the agent keeps no flow log, the verifier removes this code.

use aya_ebpf::{
    Global,
    btf_maps::{Array, RingBuf},
    helpers::generated::bpf_ktime_get_ns,
    macros::btf_map,
};
use lb_common::{
    FlowEvent, FlowEventKind,
    conntrack::{Flow, Phase, Tuple},
};

use crate::datapath::{scratch::scratch, words};

/// Events for the flow log. If the agent keeps a flow log, it enlarges the ring buffer to `capacity::FLOW_EVENTS`.
#[btf_map]
static FLOW_EVENTS: RingBuf<FlowEvent, 4096> = RingBuf::new();

/// How many events were lost, because the ring buffer was full.
#[btf_map]
static FLOW_EVENTS_LOST: Array<u64, 1> = Array::new();

/// Not 0 if the agent keeps a flow log. The agent sets it when it loads the programs.
#[unsafe(no_mangle)]
static FLOW_LOG: Global<u8> = Global::new(0);

/// Flag of a submission that does not wake the reader: the agent reads the ring buffer several times a second.
const NO_WAKEUP: u64 = aya_ebpf::bindings::BPF_RB_NO_WAKEUP as u64;

#[inline(always)]
pub(super) fn is_on() -> bool {
    FLOW_LOG.load() != 0
}

/// Copies an entry to `kept`, which is in a map: the flow log needs the entry after its removal.
#[inline(always)]
pub(super) fn keep(flow: &Flow, kept: &mut Flow) {
    if is_on() {
        // SAFETY: `kept` is a value of a map, and borrowed mutably.
        unsafe { words::copy(flow, kept) };
    }
}

/// Emits an event about the beginning of the flow in `SCRATCH`, which was just created; `reply` is its reverse entry.
/// The counters of both entries may include packets of earlier flows.
#[inline(always)]
pub(super) fn begun(reply: Option<&Flow>) {
    let Ok(scratch) = scratch() else { return };
    let (request, setup) = (scratch.request(), scratch.setup());
    emit(FlowEventKind::Begun, |event| {
        (event.from, event.to) = (setup.from, setup.to);
        if setup.is_masqueraded() {
            event.to.source = setup.node;
        }
        fill(event, &setup.flow, reply);
        (event.phase, event.last_seen) = (Phase::Opening as u8, setup.flow.last_seen);
        (event.choice, event.scheduler) = (request.choice as u8, request.service.scheduler);
    });
}

/// Emits an event: a packet with this tuple has closed the connection with this entry, which is in `phase` now.
#[inline(always)]
pub(super) fn closed(tuple: &Tuple, flow: &Flow, phase: Phase) {
    flow_log_closed(tuple, flow, phase as u32);
}

/// [`closed`] as a global function: the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_log_closed(tuple: *const Tuple, flow: *const Flow, phase: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointers lead to initialised values, or are null.
    let (Some(tuple), Some(flow)) = (unsafe { (tuple.as_ref(), flow.as_ref()) }) else { return 0 };
    if !flow.is_of_client() {
        return 0;
    }
    emit(FlowEventKind::Closed, |event| {
        event.from = if flow.is_reply() { flow.to.reversed() } else { *tuple };
        event.to = flow.to;
        fill(event, flow, None);
        (event.phase, event.last_seen) = (phase as u8, flow.last_seen);
        (event.choice, event.scheduler) = (0, 0);
    });
    1
}

/// The kind of event with this number: `Evicted` or `Replaced`. A program emits no other kind for a flow that it
/// deletes.
#[inline(always)]
pub(super) const fn kind_of_end(number: u32) -> FlowEventKind {
    const EVICTED: u32 = FlowEventKind::Evicted as u32;
    match number {
        EVICTED => FlowEventKind::Evicted,
        _ => FlowEventKind::Replaced,
    }
}

/// Emits the event of this kind for a flow that a program deletes; `forward` is its forward entry.
#[inline(always)]
pub(super) fn ended(from: &Tuple, forward: &Flow, reply: Option<&Flow>, kind: FlowEventKind) {
    if is_on() {
        let reply = reply.map_or(core::ptr::null(), core::ptr::from_ref);
        flow_log_ended(from, forward, reply, kind as u32);
    }
}

/// [`ended`] as a global function: the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_log_ended(from: *const Tuple, forward: *const Flow, reply: *const Flow, kind: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointers lead to initialised values, or are null.
    let (Some(from), Some(forward)) = (unsafe { (from.as_ref(), forward.as_ref()) }) else { return 0 };
    // SAFETY: as above.
    let reply = unsafe { reply.as_ref() };
    if !forward.is_of_client() {
        return 0;
    }
    emit(kind_of_end(kind), |event| {
        (event.from, event.to) = (*from, forward.to);
        fill(event, forward, reply);
        let phase = Phase::of_entry(forward, reply);
        (event.phase, event.last_seen) = (phase as u8, phase.last_used(forward, reply));
        (event.choice, event.scheduler) = (0, 0);
    });
    1
}

/// Writes the fields of the event that come from the flow's entries, except those that depend on its phase.
#[inline(always)]
fn fill(event: &mut FlowEvent, forward: &Flow, reply: Option<&Flow>) {
    (event.traffic[0], event.packets[0]) = (forward.traffic, forward.packets);
    (event.traffic[1], event.packets[1]) = (0, 0);
    if let Some(reply) = reply {
        (event.traffic[1], event.packets[1]) = (reply.traffic, reply.packets);
    }
    (event.service, event.flags) = (forward.service, forward.flags);
}

/// Emits an event: `fill` writes its fields except time and kind, straight into the ring buffer.
#[inline(always)]
fn emit(kind: FlowEventKind, fill: impl FnOnce(&mut FlowEvent)) {
    let Some(mut entry) = FLOW_EVENTS.reserve(0) else {
        if let Some(lost) = FLOW_EVENTS_LOST.get_ptr_mut(0) {
            // SAFETY: `lost` points to an element of the array, which lives as long as the program runs.
            unsafe { words::add(lost, 1) };
        }
        return;
    };
    // SAFETY: the entry is reserved for this program until it is submitted, and `entry` is not used while `event` is.
    // Every bit pattern of its memory is a valid `FlowEvent`.
    let event = unsafe { &mut *entry.as_mut_ptr() };
    // SAFETY: the helper takes nothing and only returns a number.
    event.time = unsafe { bpf_ktime_get_ns() };
    event.kind = kind as u8;
    (event.zero, event.zeros) = (0, 0);
    fill(event);
    entry.submit(NO_WAKEUP);
}
