//! Flows in the kernel: finding and following them. Their life cycle is `lb_common::conntrack`, their beginning is in
//! `open`.

use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use lb_common::conntrack::{Flow, Phase, Tick, Tuple, seen};
use lb_ebpf::{
    packet::{Body, Packet},
    schedule,
};

use super::{maps::CONNTRACK, services, settings, skb::Skb};

/// The moment that entries note.
#[inline(always)]
pub(crate) fn now() -> Tick {
    // SAFETY: takes nothing and has no side effects. Coarse time is as good as its tick of a second and far cheaper.
    Tick::from_nanos(unsafe { bpf_ktime_get_coarse_ns() })
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
pub(super) fn is_new_connection(skb: &Skb, packet: &Packet, flow: &Flow) -> bool {
    packet.segment.opens() && !flow.is_reply() && is_stale(skb, packet, flow)
}

/// Whether the entry has nothing to say to a SYN any more.
#[inline(never)]
fn is_stale(skb: &Skb, packet: &Packet, flow: &Flow) -> bool {
    match lookup(&flow.to.reversed()) {
        Some(reply) => {
            let phase = Phase::of(flow, reply);
            phase.is_over() || has_lost_its_backend(skb, packet, flow, phase)
        }
        None => true,
    }
}

/// Whether the flow's backend is none of its service any more. A service without any backend loses only those flows that
/// nobody has answered yet: their next SYN is rejected.
#[inline(always)]
fn has_lost_its_backend(skb: &Skb, packet: &Packet, flow: &Flow, phase: Phase) -> bool {
    match services::lookup(&packet.tuple) {
        Ok(service) => {
            let (service, _) = settings::for_client(skb, &packet.tuple.source, service);
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
    packet.segment.accepts() && flow.is_reply() && ends_here(packet, flow)
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

/// Removes the connection whose reply direction has this key if it is over, so that its source port may be used at once:
/// otherwise a busy client would have used all ports towards a backend long before the first of them comes back. True
/// for the one CPU that did it.
#[inline(never)]
pub(super) fn forget_over(key: &Tuple) -> bool {
    let Some(reply) = lookup(key) else { return true };
    let from = reply.to.reversed();
    // One without the other direction may be in the making, on another CPU.
    let over = lookup(&from).is_some_and(|forward| Phase::of(forward, reply).is_over());
    if !over || CONNTRACK.remove(key).is_err() {
        return false;
    }
    CONNTRACK.remove(&from).unwrap_or_default();
    true
}

/// Notes what a packet says about the life of its flow.
#[inline(always)]
pub(super) fn observe(packet: &Packet, flow: &mut Flow) {
    match packet.body {
        Body::Tcp | Body::Sctp if packet.segment.resets() => observe_reset(packet, flow),
        Body::Sctp => flow.observe_chunk(&packet.segment, now()),
        Body::Tcp => flow.observe_segment(&packet.segment, now()),
        Body::Udp | Body::LaterFragment => flow.observe_datagram(now()),
        Body::IcmpError | Body::Echo => {}
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
