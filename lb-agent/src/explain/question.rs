//! What can be asked.

use lb_common::{
    conntrack::{Segment, Tick, Tuple, chunk, tcp_flags},
    protocol,
};

/// The hook that explains a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookPoint {
    /// XDP: where it enters the node, before the kernel makes an skb.
    Xdp,
    /// tc ingress: where it enters the node.
    Ingress,
    /// tc egress: where it leaves the node.
    Egress,
    /// A system call (`connect`, `sendmsg`) in which a process of the node names the destination.
    Socket,
}

/// The part of its connection that a packet is. UDP datagrams have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketKind {
    /// It asks for a connection: SYN, INIT.
    Syn,
    /// It accepts one: SYN-ACK, INIT ACK.
    SynAck,
    /// It is in the middle of a connection.
    Data,
    /// Its sender ends the connection: FIN, SHUTDOWN.
    Fin,
    /// It resets the connection: RST, ABORT.
    Rst,
}

/// The packet to explain.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// Addresses and ports.
    pub tuple: Tuple,
    /// Whether the source port is known; without it `CONNTRACK` is not looked up, and the packet begins a connection.
    pub knows_port: bool,
    /// The part of its connection that the packet is.
    pub kind: PacketKind,
    /// The hook that it passes.
    pub hook: HookPoint,
    /// Interface index of its device; 0 is unknown.
    pub device: u32,
    /// The time at which it passes.
    pub now: Tick,
}

impl Question {
    /// The TCP header, or SCTP chunk, of such a packet.
    pub(super) fn segment(&self) -> Segment {
        const NOTHING: Segment = Segment { flags: 0, seq: 0, ack: 0, payload: 0 };
        let (flags, chunk) = match self.kind {
            PacketKind::Syn => (tcp_flags::SYN, chunk::INIT),
            PacketKind::SynAck => (tcp_flags::SYN | tcp_flags::ACK, chunk::INIT_ACK),
            PacketKind::Data => (tcp_flags::ACK, 0),
            PacketKind::Fin => (tcp_flags::FIN | tcp_flags::ACK, chunk::SHUTDOWN),
            PacketKind::Rst => (tcp_flags::RST, chunk::ABORT),
        };
        match self.tuple.protocol {
            protocol::TCP => Segment { flags, ..NOTHING },
            protocol::SCTP => Segment::of_chunk(chunk, 0, 0),
            _ => NOTHING,
        }
    }
}
