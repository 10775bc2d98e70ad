//! The packet that `explain` explains, and the hook at which it explains the packet.

use clap::{ValueEnum, builder::PossibleValue};
use lb_common::{
    conntrack::{Segment, Tick, Tuple, chunk, tcp_flags},
    protocol,
};
use lb_ebpf::parse::Body;

/// The hook at which the packet is explained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookPoint {
    /// tc ingress: the packet enters the node.
    Ingress,
    /// tc egress: the packet leaves the node.
    Egress,
    /// XDP: the packet enters the node, and has not reached tc ingress yet.
    Xdp,
    /// A process of the node names the destination in a system call (`connect`, `sendmsg`).
    Socket,
}

impl HookPoint {
    /// The name of the hook in commands and their output.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ingress => "tc-ingress",
            Self::Egress => "tc-egress",
            Self::Xdp => "xdp",
            Self::Socket => "socket",
        }
    }
}

impl ValueEnum for HookPoint {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Ingress, Self::Egress, Self::Xdp, Self::Socket]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let help = match self {
            Self::Ingress => "The packet enters the node, at tc",
            Self::Egress => "The packet leaves the node",
            Self::Xdp => "The packet enters the node through a wire device with an XDP program",
            Self::Socket => "A process of this node calls connect() or sendmsg()",
        };
        Some(PossibleValue::new(self.as_str()).help(help))
    }
}

/// The role of a packet in its connection. Ignored for UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketKind {
    /// Requests a connection: SYN, INIT.
    Syn,
    /// Accepts a connection: SYN-ACK, INIT ACK.
    SynAck,
    /// Belongs to an established connection.
    Data,
    /// Closes the connection, or one direction of it: FIN, SHUTDOWN.
    Fin,
    /// Resets the connection: RST, ABORT.
    Rst,
}

/// The packet to explain.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// Addresses and ports of the packet.
    pub tuple: Tuple,
    /// Whether the source port is known. If not, `explain` treats the packet as the first one of a connection, without
    /// a lookup in the flow table.
    pub knows_port: bool,
    /// Whether the packet opens, continues or ends its connection.
    pub kind: PacketKind,
    /// The hook at which the packet is explained.
    pub hook: HookPoint,
    /// Whether the node itself sends the packet, rather than forwarding it. Matters only at [`HookPoint::Egress`].
    pub from_node: bool,
    /// Index of the interface at which the packet passes the hook; 0 if unknown.
    pub device: u32,
    /// The time at which the packet passes the hook.
    pub now: Tick,
}

impl Question {
    /// The header after the IP header, as the programs' parser would return it.
    pub(super) const fn body(&self) -> Body {
        match self.tuple.protocol {
            protocol::TCP => Body::Tcp,
            protocol::UDP => Body::Udp,
            _ => Body::Sctp,
        }
    }

    /// The TCP header, or SCTP chunk, of a packet of this kind.
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
