//! Observation of flows, and deletion of flows that are over. The life cycle of flows is in `lb_common::conntrack`;
//! `create` inserts their entries, and `table` finds the entries.

use aya_ebpf::{Global, btf_maps::LruHashMap, macros::btf_map};
use lb_common::{
    Endpoint, FlowEventKind, capacity,
    conntrack::{Flow, Phase, Segment, Tick, Tuple, seen, tcp_flags},
};
use lb_ebpf::{
    parse::{Body, Packet},
    rules::flow::{self, Membership, Staleness},
};

use super::{
    active_flows, flow_log,
    table::{self, end_first_flow, end_other, remove_other},
};
use crate::datapath::{clock::now, context::HookContext, scratch::scratch, service, settings};

pub(crate) use super::table::lookup;

/// Checks whether the packet opens a new connection although its five-tuple has an entry: the packet is a SYN, and the
/// entry is stale ([`flow::staleness`]), for example because the connection of the entry has ended, or because the
/// backend of the entry has left the service and does not answer. If the entry is stale because the backend has left
/// too many SYNs unanswered, the function records the backend in `UNANSWERED`. Any other SYN counts as a retransmission
/// and goes to the same backend.
#[inline(always)]
pub(crate) fn check_new_connection(context: &HookContext, packet: &Packet, flow: &Flow) -> bool {
    flow::is_syn_of_client(&packet.segment, flow) && check_staleness(context, packet, flow)
}

/// Checks whether the connection that the SYN `packet` opens replaces the entry. If it does because the backend has
/// left too many SYNs unanswered, the function also records the backend in `UNANSWERED`.
#[inline(never)]
fn check_staleness(context: &HookContext, packet: &Packet, flow: &Flow) -> bool {
    let reply = if flow.is_tunnelled() { None } else { lookup(&flow.to.reversed()) };
    let reply = reply.map(|reply| &*reply);
    let membership = || membership(context, packet, flow);
    let staleness = flow::staleness(flow, reply, SYN_RETRIES.load(), now(), membership);
    if staleness == Staleness::Unanswered {
        let backend = Endpoint::new(flow.to.destination, flow.to.destination_port);
        // If the insert fails, the agent only misses a hint.
        UNANSWERED.insert(&backend, &1, 0).unwrap_or_default();
    }
    staleness != Staleness::Fresh
}

/// Backends that have left too many SYNs of a client unanswered: hints for the agent, which probes them. An LRU map, so
/// that it holds the latest ones if no agent reads it.
#[btf_map]
static UNANSWERED: LruHashMap<Endpoint, u32, { capacity::UNANSWERED }> = LruHashMap::new();

/// Number of retransmissions of an unanswered SYN to one backend before the programs try another backend; with 0 they
/// never try another backend. The agent sets the number when it loads the programs.
#[unsafe(no_mangle)]
static SYN_RETRIES: Global<u16> = Global::new(0);

/// Whether a new flow tries another backend in place of one that does not answer: [`flow::may_be_retried`].
#[inline(always)]
pub(crate) fn may_be_retried(earlier: bool) -> bool {
    flow::may_be_retried(earlier, SYN_RETRIES.load())
}

/// Whether the service of the packet still has the flow's backend.
#[inline(always)]
fn membership(context: &HookContext, packet: &Packet, flow: &Flow) -> Membership {
    let Ok(service) = service::lookup(&packet.tuple) else { return Membership::NoService };
    let (service, _) = settings::for_client(context, &packet.tuple.source, service);
    Membership::of(&service, || {
        service::find_backend(&service, &flow.to.destination, flow.to.destination_port)
    })
}

/// Deletes the flow with this reply entry if the packet, which has the flow's tuple, belongs to a connection that
/// bypasses the VIP: the packet is a SYN-ACK, and the connection through the VIP is over. (A new connection through the
/// VIP would have replaced the entry.) Returns whether the packet belongs to such a connection.
#[inline(always)]
pub(crate) fn delete_if_bypassed(packet: &Packet, flow: &Flow) -> bool {
    flow::is_syn_ack_of_backend(&packet.segment, flow) && delete_old_flow(packet, flow)
}

/// Deletes the flow with this reply entry if the flow is over; returns whether it was over.
#[inline(never)]
fn delete_old_flow(packet: &Packet, reply: &Flow) -> bool {
    let key = reply.to.reversed();
    match lookup(&key) {
        Some(forward) if flow::has_ended(forward, reply) => {
            active_flows::end(forward);
            flow_log::ended(&key, forward, Some(reply), FlowEventKind::Replaced);
            // Another CPU may have deleted the two entries already.
            table::remove(&key);
            table::remove(&packet.tuple);
            true
        }
        _ => false,
    }
}

/// Deletes the connection whose reverse entry has this key, if its source port may be used again:
/// [`flow::may_be_replaced`]. Without this reuse, a busy client would run out of ports towards a backend long before
/// entries expire. Returns whether the key is free for this CPU: this CPU has deleted the entry, or has found none. Of
/// several CPUs that find the entry, only one deletes it. No CPU deletes a later entry with the same key, except in the
/// overflow, which does not distinguish the two entries.
#[inline(always)]
pub(crate) fn delete_if_over(key: &Tuple, eager: bool) -> bool {
    let over = match Over::of(flow_over(key, u32::from(eager))) {
        Over::NoFlow => return true,
        Over::No => return false,
        over => over,
    };
    if !remove_judged(key) {
        return false;
    }
    end_other(FlowEventKind::Replaced);
    remove_other();
    if over == Over::SecondOfMasqueraded {
        end_first_flow(FlowEventKind::Replaced);
    }
    true
}

/// Removes the reverse entry that [`flow_over`] has found; returns whether this call did.
#[inline(always)]
fn remove_judged(key: &Tuple) -> bool {
    scratch().is_ok_and(|scratch| table::remove_found(&scratch.keys().place, key))
}

/// Whether a new flow may take the source port of the flow whose reverse entry has the given key.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Over {
    /// The flow keeps its port.
    No = 0,
    /// No entry has the key.
    NoFlow = 1,
    /// A new flow may take the port. `SCRATCH` has the places of both entries of the flow that has the port now.
    Yes = 2,
    /// As [`Self::Yes`], and the flow is the second one of a masqueraded connection. `SCRATCH` has the key of the first
    /// flow's reverse entry.
    SecondOfMasqueraded = 3,
}

impl Over {
    /// The result of [`flow_over`] with this number.
    #[inline(always)]
    const fn of(number: u32) -> Self {
        match number {
            1 => Self::NoFlow,
            2 => Self::Yes,
            3 => Self::SecondOfMasqueraded,
            _no => Self::No,
        }
    }
}

/// Whether a new flow may take the source port of the flow whose reverse entry has this key: the number of an [`Over`].
/// (A global function: the verifier checks it once.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_over(key: *const Tuple, eager: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Tuple`, or is null.
    unsafe { key.as_ref() }.map_or(Over::No, |key| over(key, eager != 0)) as u32
}

#[inline(always)]
fn over(key: &Tuple, eager: bool) -> Over {
    let Ok(scratch) = scratch() else { return Over::No };
    let keys = scratch.keys();
    let Some(reply) = table::locate(key, &mut keys.place) else { return Over::NoFlow };
    (keys.other, keys.first_reply) = (reply.to.reversed(), reply.to);
    flow_log::keep(reply, &mut keys.reply);
    // If the forward entry is missing, another CPU may be creating it.
    let Some(forward) = table::locate(&keys.other, &mut keys.other_place) else { return Over::No };
    if !flow::may_be_replaced(forward, reply, eager, now) {
        Over::No
    } else if reply.is_second() {
        Over::SecondOfMasqueraded
    } else {
        Over::Yes
    }
}

/// Updates the flow with this packet.
#[inline(always)]
pub(crate) fn observe(packet: &Packet, flow: &mut Flow) {
    observe_at(packet, flow, now());
}

/// Updates the flow with this packet, which was received at `now`.
#[inline(always)]
pub(crate) fn observe_at(packet: &Packet, flow: &mut Flow, now: Tick) {
    flow.count_packet(packet.length);
    match packet.body {
        Body::Tcp | Body::Sctp if packet.segment.is_rst() => {
            flow_observe_reset(&packet.segment, flow);
        }
        Body::Sctp => flow.observe_chunk(&packet.segment, now),
        Body::Tcp => flow.observe_segment(&packet.segment, now),
        Body::Udp | Body::LaterFragment => flow.observe_datagram(now),
        Body::IcmpError | Body::Echo => {}
    }
    if matches!(packet.body, Body::Tcp | Body::Sctp) {
        observe_end(packet, flow);
    }
}

/// Updates the client's entry if the packet is a backend's first answer to the client's SYN. `flow` is the entry of the
/// packet: callers call this function before [`observe`] updates that entry. Only the slow path handles such packets.
#[inline(always)]
pub(crate) fn observe_answer(packet: &Packet, flow: &Flow) {
    if matches!(packet.body, Body::Tcp) && flow.accepts_connection(&packet.segment) {
        flow_accept_connection(&packet.segment, flow);
    }
}

/// Updates the client's entry with the SYN that the backend's segment accepts ([`Flow::begin_again`]); returns 1, or 0
/// if the flow has no such entry. (A global function: the verifier checks it once.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_accept_connection(answer: *const Segment, reply: *const Flow) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointers lead to initialised values, or are null.
    let (Some(answer), Some(reply)) = (unsafe { (answer.as_ref(), reply.as_ref()) }) else { return 0 };
    let Some(forward) = lookup(&reply.to.reversed()) else { return 0 };
    forward.begin_again(answer);
    1
}

/// Records a RST if the receiver will accept it; returns 1 if so, else 0. (A global function: the verifier checks it
/// once.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_observe_reset(segment: *const Segment, flow: *mut Flow) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointers lead to initialised values, or are null.
    let (Some(segment), Some(flow)) = (unsafe { (segment.as_ref(), flow.as_mut()) }) else { return 0 };
    let accepted = if flow.is_tunnelled() {
        flow.accepts_reset_alone(segment)
    } else {
        lookup(&flow.to.reversed()).is_some_and(|reverse| flow.accepts_reset(segment, reverse))
    };
    if accepted {
        flow.seen |= seen::RST;
        flow.last_seen = now();
    }
    u32::from(accepted)
}

/// If the segment has FIN or RST and the flow is over, subtracts the flow from its backend's active flows, unless an
/// earlier call has subtracted it, and emits the end for the flow log. (A repeated FIN or RST emits the end again.)
#[inline(always)]
fn observe_end(packet: &Packet, flow: &mut Flow) {
    if packet.segment.flags & (tcp_flags::FIN | tcp_flags::RST) != 0
        && (flow.active_flows_slot != 0 || flow_log::is_on())
    {
        let number = flow_end_if_over(flow);
        if flow_log::is_on()
            && let Some(phase) = phase_of_end(number)
        {
            flow_log::closed(&packet.tuple, flow, phase);
        }
    }
}

/// Subtracts the flow from its backend's active flows if it is over; returns [`number_of_end`] of its phase. (A global
/// function: the verifier checks it once.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_end_if_over(flow: *mut Flow) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Flow`, or is null.
    let Some(flow) = (unsafe { flow.as_mut() }) else { return 0 };
    let phase = if flow.is_tunnelled() {
        let phase = Phase::of_one_way(flow);
        if phase.is_over() {
            active_flows::end(flow);
        }
        phase
    } else {
        let Some(reverse) = lookup(&flow.to.reversed()) else { return 0 };
        let (forward, reply) = if flow.is_reply() { (reverse, flow) } else { (flow, reverse) };
        let phase = Phase::of(forward, reply);
        if phase.is_over() {
            active_flows::end(forward);
        }
        phase
    };
    number_of_end(phase)
}

/// The number of the phase in which a flow has ended; 0 if it has not ended.
#[inline(always)]
const fn number_of_end(phase: Phase) -> u32 {
    match phase {
        Phase::TimeWait => 1,
        Phase::Closed => 2,
        _ => 0,
    }
}

const _: () = {
    let mut index = 0;
    while index < Phase::ALL.len() {
        let phase = Phase::ALL[index];
        let number = number_of_end(phase);
        assert!(phase.is_over() == (number != 0));
        assert!(match phase_of_end(number) {
            Some(ended) => ended as u32 == phase as u32,
            None => !phase.is_over(),
        });
        index += 1;
    }
};

/// The phase in which a flow has ended, by its number: the inverse of [`number_of_end`].
#[inline(always)]
const fn phase_of_end(number: u32) -> Option<Phase> {
    match number {
        1 => Some(Phase::TimeWait),
        2 => Some(Phase::Closed),
        _ => None,
    }
}
