//! Flows in the kernel: finding and following them. Their life cycle is `lb_common::conntrack`, their beginning is in
//! `open`.

use aya_ebpf::{
    Global,
    helpers::generated::{bpf_jiffies64, bpf_ktime_get_coarse_ns},
};
use lb_common::conntrack::{Flow, Phase, Tick, Tuple, flow_flags, seen};
use lb_ebpf::{
    parse::{Body, Packet},
    service::schedule,
};

use super::active_flows;
use crate::datapath::{context::HookContext, maps::CONNTRACK, service, settings};

/// The lower half of the number of timer interrupts, above the moment of the last one.
static mut CLOCK: u64 = 0;

/// The moment that entries note.
///
/// Coarse time stands still between two timer interrupts, so it is asked for once after each; their number is read
/// without a call.
#[inline(always)]
pub(crate) fn now() -> Tick {
    // SAFETY: takes nothing and has no side effects.
    let interrupts = unsafe { bpf_jiffies64() } << 32;
    // SAFETY: one load. What another CPU stores meanwhile is as good.
    let clock = unsafe { (&raw const CLOCK).read_volatile() };
    if clock & (u64::MAX << 32) == interrupts { Tick(clock as u32) } else { ask(interrupts) }
}

#[inline(never)]
fn ask(interrupts: u64) -> Tick {
    // SAFETY: as above.
    let now = Tick::from_nanos(unsafe { bpf_ktime_get_coarse_ns() });
    // SAFETY: one store of a value that is whole. Should it be late, the next packet asks again.
    unsafe { (&raw mut CLOCK).write_volatile(interrupts | u64::from(now.0)) };
    now
}

/// The entry of this direction.
#[inline(always)]
pub(in crate::datapath) fn lookup(tuple: &Tuple) -> Option<&'static mut Flow> {
    // SAFETY: the memory is that of an element of this map for as long as the program runs. Other CPUs may write the
    // counters of the same flow: plain integers of which any recent value will do. A deleted element may become that of
    // another flow at once; flows are deleted when they are long unused, replaced, or purged, so that takes a deletion
    // and an insertion within the nanoseconds of our use. The packet then has the wrong checksum, and is dropped by
    // whom it reaches.
    CONNTRACK.get_ptr_mut(tuple).map(|flow| unsafe { &mut *flow })
}

/// Whether the packet opens a connection of its own although its five-tuple has an entry: a SYN after the end of the
/// last connection, or one that no backend will answer any more. A SYN for which the entry stands is a
/// retransmission and goes where the first one went.
#[inline(always)]
pub(in crate::datapath) fn is_new_connection(context: &HookContext, packet: &Packet, flow: &Flow) -> bool {
    packet.segment.is_syn() && !flow.is_reply() && is_stale(context, packet, flow)
}

/// Whether the entry has nothing to say to a SYN any more.
#[inline(never)]
fn is_stale(context: &HookContext, packet: &Packet, flow: &Flow) -> bool {
    let phase = if flow.is_tunnelled() {
        Phase::of_one_way(flow)
    } else {
        let Some(reply) = lookup(&flow.to.reversed()) else { return true };
        Phase::of(flow, reply)
    };
    phase.is_over() || gives_up(flow, phase) || has_lost_its_backend(context, packet, flow, phase)
}

/// How often a SYN that nobody answers is sent to the same backend again, before another one is tried; 0 is always. The
/// agent sets it when it loads the programs.
#[unsafe(no_mangle)]
static SYN_RETRIES: Global<u16> = Global::new(0);

/// Whether backends that do not answer are given up.
#[inline(always)]
pub(in crate::datapath) fn tries_others() -> bool {
    SYN_RETRIES.load() != 0
}

/// Whether the client has asked this backend often enough.
#[inline(always)]
fn gives_up(flow: &Flow, phase: Phase) -> bool {
    tries_others() && flow.is_unanswered(phase, SYN_RETRIES.load())
}

/// Whether the flow's backend is none of its service any more. A service without any backend loses only those flows
/// that nobody has answered yet: their next SYN is rejected.
#[inline(always)]
fn has_lost_its_backend(context: &HookContext, packet: &Packet, flow: &Flow, phase: Phase) -> bool {
    match service::lookup(&packet.tuple) {
        Ok(service) => {
            let (service, _) = settings::for_client(context, &packet.tuple.source, service);
            let (address, port) = (&flow.to.destination, flow.to.destination_port);
            (service.backends_count > 0 || phase == Phase::Opening)
                && service::find_backend(&service, address, port) == schedule::NONE
        }
        Err(_) => false,
    }
}

/// Whether the packet is of a connection that goes past the VIP although it has the tuple of a reply: a backend accepts
/// a connection, and that through the VIP is over. (A new one through the VIP would have replaced the entry.)
#[inline(always)]
pub(in crate::datapath) fn is_foreign(packet: &Packet, flow: &Flow) -> bool {
    packet.segment.is_syn_ack() && flow.is_reply() && ends_here(packet, flow)
}

/// Forgets a flow that is over.
#[inline(never)]
fn ends_here(packet: &Packet, reply: &Flow) -> bool {
    let key = reply.to.reversed();
    match lookup(&key) {
        Some(forward) if Phase::of(forward, reply).is_over() => {
            active_flows::end(forward);
            // Nothing is lost if another CPU was faster.
            CONNTRACK.remove(&key).unwrap_or_default();
            CONNTRACK.remove(&packet.tuple).unwrap_or_default();
            true
        }
        _ => false,
    }
}

/// Removes the connection whose reply direction has this key if its source port may be used again: if it is over, else
/// a busy client would have used all ports towards a backend long before the first of them comes back. The backend may
/// still wait for stray segments of one that was closed, and nothing says that datagrams have ended, so those are taken
/// only by who is `eager`. True for the one CPU that did it.
#[inline(never)]
pub(in crate::datapath) fn forget_over(key: &Tuple, eager: bool, keys: &mut Keys) -> bool {
    let Some(reply) = lookup(key) else { return true };
    let masqueraded = reply.flags & flow_flags::MASQUERADE != 0;
    *keys = Keys { forward: reply.to.reversed(), first_reply: reply.to };
    // One without the other direction may be in the making, on another CPU.
    let Some(forward) = lookup(&keys.forward) else { return false };
    if !may_be_replaced(forward, reply, eager) || CONNTRACK.remove(key).is_err() {
        return false;
    }
    active_flows::end(forward);
    CONNTRACK.remove(&keys.forward).unwrap_or_default();
    if masqueraded {
        forget_first(keys);
    }
    true
}

/// Keys of entries that go with another; the stack has no room for them.
pub(in crate::datapath) struct Keys {
    forward: Tuple,
    first_reply: Tuple,
}

/// Removes the first flow of a masqueraded connection whose second one is gone, so that none of its packets leaves with
/// the client's own address.
#[inline(never)]
fn forget_first(keys: &mut Keys) {
    let Some(reply) = lookup(&keys.first_reply) else { return };
    keys.forward = reply.to.reversed();
    if let Some(forward) = lookup(&keys.forward) {
        active_flows::end(forward);
    }
    // Nothing is lost if they are gone already.
    CONNTRACK.remove(&keys.forward).unwrap_or_default();
    CONNTRACK.remove(&keys.first_reply).unwrap_or_default();
}

/// Ticks after which a UDP flow that was no stream may be replaced: a resolver has given up by then.
const UDP_IDLE: u32 = 5;

#[inline(always)]
fn may_be_replaced(forward: &Flow, reply: &Flow, eager: bool) -> bool {
    match Phase::of(forward, reply) {
        Phase::Closed => true,
        Phase::TimeWait => eager,
        Phase::Unreplied | Phase::Replied => {
            let Tick(last_seen) = forward.last_seen.max(reply.last_seen);
            eager && now().0.saturating_sub(last_seen) > UDP_IDLE
        }
        Phase::Opening | Phase::Accepted | Phase::Established | Phase::HalfClosed | Phase::Stream => false,
    }
}

/// Notes what a packet says about the life of its flow.
#[inline(always)]
pub(in crate::datapath) fn observe(packet: &Packet, flow: &mut Flow) {
    observe_at(packet, flow, now());
}

/// The same, where the moment is known.
#[inline(always)]
pub(in crate::datapath) fn observe_at(packet: &Packet, flow: &mut Flow, now: Tick) {
    flow.count_packet(packet.length);
    match packet.body {
        Body::Tcp | Body::Sctp if packet.segment.is_rst() => observe_reset(packet, flow),
        Body::Sctp => flow.observe_chunk(&packet.segment, now),
        Body::Tcp => flow.observe_segment(&packet.segment, now),
        Body::Udp | Body::LaterFragment => flow.observe_datagram(now),
        Body::IcmpError | Body::Echo => {}
    }
    if matches!(packet.body, Body::Tcp | Body::Sctp) {
        active_flows::observe(&packet.segment, flow);
    }
}

#[inline(never)]
fn observe_reset(packet: &Packet, flow: &mut Flow) {
    if flow.is_tunnelled() {
        if flow.accepts_reset_alone(&packet.segment) {
            flow.seen |= seen::RST;
            flow.last_seen = now();
        }
        return;
    }
    if let Some(peer) = lookup(&flow.to.reversed())
        && flow.accepts_reset(&packet.segment, peer)
    {
        flow.seen |= seen::RST;
        flow.last_seen = now();
    }
}
