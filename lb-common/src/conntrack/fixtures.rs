//! Flows and segments for the tests of this module.

use super::{Flow, Segment, Tick, Tuple, flow_flags, tcp_flags};
use crate::{Address, protocol};

pub(super) const NOW: Tick = Tick(100);

pub(super) const SYN: u8 = tcp_flags::SYN;
pub(super) const ACK: u8 = tcp_flags::ACK;
pub(super) const FIN: u8 = tcp_flags::FIN;
pub(super) const RST: u8 = tcp_flags::RST;

/// The tuple of packets from the client to the VIP.
pub(super) fn tuple(protocol: u8) -> Tuple {
    Tuple::new(Address::from_v4([192, 0, 2, 1]), Address::from_v4([10, 96, 0, 1]), 40_000, 80, protocol)
}

/// Both entries of a flow that has not carried a packet yet.
pub(super) fn pair(protocol: u8) -> (Flow, Flow) {
    let from = tuple(protocol);
    let to = Tuple { destination: Address::from_v4([198, 51, 100, 7]), destination_port: 8080, ..from };
    let forward = Flow::new(&from, &to, 1, 0, NOW);
    let reply = Flow::new(&to.reversed(), &from.reversed(), 1, flow_flags::REPLY, NOW);
    (forward, reply)
}

pub(super) fn segment(flags: u8, seq: u32, ack: u32, payload: u32) -> Segment {
    Segment { flags, seq, ack, payload }
}

/// Both entries of a TCP connection after its handshake.
pub(super) fn established() -> (Flow, Flow) {
    let (mut forward, mut reply) = pair(protocol::TCP);
    forward.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
    reply.observe_segment(&segment(SYN | ACK, 5000, 1001, 0), NOW);
    forward.observe_segment(&segment(ACK, 1001, 5001, 0), NOW);
    (forward, reply)
}

/// The only entry of a flow through a tunnel.
pub(super) fn tunnelled(protocol: u8) -> Flow {
    let flags = flow_flags::ROUTED | flow_flags::TUNNEL;
    Flow::new(&tuple(protocol), &tuple(protocol), 1, flags, NOW)
}
