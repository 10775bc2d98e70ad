//! Flows in the kernel: finding, following and opening them. Their life cycle is `lb_common::conntrack`.

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_NOEXIST},
    helpers::generated::{bpf_get_prandom_u32, bpf_ktime_get_coarse_ns},
};
use lb_common::{
    Outcome, Service,
    conntrack::{Flow, Phase, Tick, Tuple, flow_flags, seen},
};
use lb_ebpf::{
    packet::{Body, Packet},
    schedule,
};

use super::{
    affinity,
    maps::{CONNTRACK, scratch},
    services,
};

/// Source ports tried towards a backend before a connection is given up.
const SOURCE_PORT_ATTEMPTS: u32 = 16;
/// The lowest source port that is tried in place of the client's own.
const LOWEST_SOURCE_PORT: u32 = 1024;

const EEXIST: i32 = -17;

/// The moment that entries note.
#[inline(always)]
pub(super) fn now() -> Tick {
    // SAFETY: takes nothing and has no side effects. Coarse time is as good as its tick of a second and far cheaper.
    Tick::from_nanos(unsafe { bpf_ktime_get_coarse_ns() })
}

#[inline(always)]
fn random() -> u32 {
    // SAFETY: takes nothing and has no side effects.
    unsafe { bpf_get_prandom_u32() }
}

/// The entry of this direction.
#[inline(always)]
pub(super) fn lookup(tuple: &Tuple) -> Option<&'static mut Flow> {
    // SAFETY: the memory is that of an element of this map for as long as the program runs. Other CPUs may write the
    // counters of the same flow: plain integers of which any recent value will do. A deleted element may become that of
    // another flow at once; flows are deleted when they are long unused, replaced, or purged, so that takes a deletion
    // and an insertion within the nanoseconds of our use. The packet then has the wrong checksum, and is dropped by whom
    // it reaches.
    CONNTRACK.get_ptr_mut(tuple).map(|flow| unsafe { &mut *flow })
}

/// Whether the packet opens a connection of its own although its five-tuple has an entry: a SYN after the end of the
/// last connection, or one that no backend will answer any more. A SYN for which the entry stands is a
/// retransmission and goes where the first one went.
#[inline(always)]
pub(super) fn is_new_connection(packet: &Packet, flow: &Flow) -> bool {
    packet.body == Body::Tcp && packet.segment.opens() && !flow.is_reply() && is_stale(packet, flow)
}

/// Whether the entry has nothing to say to a SYN any more.
#[inline(never)]
fn is_stale(packet: &Packet, flow: &Flow) -> bool {
    match lookup(&flow.to.reversed()) {
        Some(reply) => {
            let phase = Phase::of(flow, reply);
            phase.is_over() || has_lost_its_backend(packet, flow, phase)
        }
        None => true,
    }
}

/// Whether the flow's backend is none of its service any more. A service without any backend loses only those flows that
/// nobody has answered yet: their next SYN is rejected.
#[inline(always)]
fn has_lost_its_backend(packet: &Packet, flow: &Flow, phase: Phase) -> bool {
    match services::lookup(&packet.tuple) {
        Ok(service) => {
            let (address, port) = (&flow.to.destination, flow.to.destination_port);
            (service.backends_count > 0 || phase == Phase::Opening)
                && !schedule::is_backend(&service, address, port, services::backend)
        }
        Err(_) => false,
    }
}

/// Whether the packet is of a connection that goes past the VIP although it has the tuple of a reply: a backend accepts a
/// connection, and that through the VIP is over. (A new one through the VIP would have replaced the entry.)
#[inline(always)]
pub(super) fn is_foreign(packet: &Packet, flow: &Flow) -> bool {
    packet.body == Body::Tcp && packet.segment.accepts() && flow.is_reply() && ends_here(packet, flow)
}

/// Forgets a flow that is over.
#[inline(never)]
fn ends_here(packet: &Packet, reply: &Flow) -> bool {
    let key = reply.to.reversed();
    match lookup(&key) {
        Some(forward) if Phase::of(forward, reply).is_over() => {
            // Nothing is lost if another CPU was faster.
            CONNTRACK.remove(&key).unwrap_or_default();
            CONNTRACK.remove(&packet.tuple).unwrap_or_default();
            true
        }
        _ => false,
    }
}

/// Notes what a packet says about the life of its flow.
#[inline(always)]
pub(super) fn observe(packet: &Packet, flow: &mut Flow) {
    match packet.body {
        Body::Tcp if packet.segment.resets() => observe_reset(packet, flow),
        Body::Tcp => flow.observe_segment(&packet.segment, now()),
        Body::Udp | Body::LaterFragment => flow.observe_datagram(now()),
        Body::IcmpError => {}
    }
}

#[inline(never)]
fn observe_reset(packet: &Packet, flow: &mut Flow) {
    if let Some(peer) = lookup(&flow.to.reversed())
        && flow.accepts_reset(&packet.segment, peer)
    {
        flow.seen |= seen::RST;
        flow.last_seen = now();
    }
}

/// Chooses a backend for the first packet of a flow and makes the entries of both directions, in place of those of an
/// `earlier` connection if there are any; returns the tuple with which packets go on.
#[inline(always)]
pub(super) fn open(packet: &Packet, service: &Service, earlier: bool) -> Result<Tuple, Outcome> {
    let backend = services::backend(choose(packet, service)).ok_or(Outcome::NoBackend)?;
    let mut to = Tuple { destination: backend.address, destination_port: backend.port, ..packet.tuple };
    if to.destination == to.source {
        // A pod does not answer itself through the network: the VIP stands for it.
        to.source = packet.tuple.destination;
    }
    claim(&packet.tuple, &mut to, service.id)?;
    if earlier {
        forget_reply(&packet.tuple, &to);
    }
    insert_forward(&packet.tuple, &to, service.id, earlier)?;
    if service.affinity_seconds > 0 {
        affinity::remember(&packet.tuple.source, service.id, backend);
    }
    Ok(to)
}

/// The slot of the backend for a new flow: the client's own where the service has affinity, else the scheduler's choice.
#[inline(always)]
fn choose(packet: &Packet, service: &Service) -> u32 {
    if service.affinity_seconds > 0 {
        let slot = affinity::find(&packet.tuple.source, service);
        if slot != affinity::NONE {
            return slot;
        }
    }
    schedule::choose(service, random())
}

/// Whether client and backend are the same pod, for which the VIP stands as the source.
#[inline(always)]
fn is_hairpin(tuple: &Tuple, to: &Tuple) -> bool {
    to.source == tuple.destination
}

/// Makes the entry of the reply direction. Its key must be free: that claims the source port towards the backend,
/// atomically against all other CPUs. The client's own port is taken where that is possible, else `to` gets another.
#[inline(never)]
fn claim(tuple: &Tuple, to: &mut Tuple, service: u32) -> Result<(), Outcome> {
    let place = if is_hairpin(tuple, to) { flow_flags::HAIRPIN } else { flow_flags::AT_EGRESS };
    for _ in 0..SOURCE_PORT_ATTEMPTS {
        let key = to.reversed();
        let reply = &mut scratch()?.flow;
        *reply = Flow::new(&key, &tuple.reversed(), service, flow_flags::REPLY | place, now());
        match CONNTRACK.insert(&key, &*reply, u64::from(BPF_NOEXIST)) {
            Ok(()) => return Ok(()),
            Err(EEXIST) => {}
            Err(_) => return Err(Outcome::ConntrackFull),
        }
        if reclaim(&key, reply) {
            return Ok(());
        }
        to.source_port = another_port();
    }
    Err(Outcome::NoSourcePort)
}

/// Takes over an entry of the reply direction that this very flow left behind.
#[inline(always)]
fn reclaim(key: &Tuple, reply: &Flow) -> bool {
    match lookup(key) {
        Some(existing) if existing.to == reply.to => {
            *existing = *reply;
            true
        }
        _ => false,
    }
}

#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "below 2^16 by construction")]
fn another_port() -> u16 {
    (LOWEST_SOURCE_PORT + schedule::scale(random(), 65_536 - LOWEST_SOURCE_PORT)) as u16
}

/// Removes the entry of the reply direction of an earlier connection of this client's port.
#[inline(never)]
fn forget_reply(tuple: &Tuple, to: &Tuple) {
    if let Some(earlier) = lookup(tuple) {
        let stale = earlier.to.reversed();
        if stale != to.reversed() {
            // Nothing is lost if another CPU was faster.
            CONNTRACK.remove(&stale).unwrap_or_default();
        }
    }
}

/// Makes the entry of the direction from the client. Where another CPU has just made one for another packet of this flow,
/// that one stands and our claim is given up.
#[inline(never)]
fn insert_forward(tuple: &Tuple, to: &Tuple, service: u32, replace: bool) -> Result<(), Outcome> {
    let place = if is_hairpin(tuple, to) { flow_flags::HAIRPIN } else { 0 };
    let flow = &mut scratch()?.flow;
    *flow = Flow::new(tuple, to, service, place, now());
    let flags = if replace { BPF_ANY } else { BPF_NOEXIST };
    let result = CONNTRACK.insert(tuple, &*flow, u64::from(flags));
    if result.is_err() && !leads_to(tuple, to) {
        CONNTRACK.remove(&to.reversed()).unwrap_or_default();
    }
    match result {
        Ok(()) | Err(EEXIST) => Ok(()),
        Err(_) => Err(Outcome::ConntrackFull),
    }
}

/// Whether the entry of the direction from the client leads to this backend by this source port.
#[inline(always)]
fn leads_to(tuple: &Tuple, to: &Tuple) -> bool {
    lookup(tuple).is_some_and(|flow| flow.to == *to)
}
