//! Whether a flow may begin.

use lb_common::{FrontendKind, Outcome, Service, conntrack::Segment, handover, protocol, service_flags};

/// Whether a flow may begin, or why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Admission {
    /// The flow may begin.
    Admitted = 0,
    /// Only a SYN begins a flow of this service, and the packet is no SYN.
    NotSyn = 1,
    /// A RST of no flow: there is no connection to reset.
    StrayReset = 2,
    /// The frontend serves only processes of the node.
    SocketsOnly = 3,
    /// `--deny-source` includes the client, or `loadBalancerSourceRanges` does not include it.
    SourceNotAllowed = 4,
    /// The traffic policy is `Local`, and all backends are on other nodes.
    NoLocalBackend = 5,
    /// The service has no backend that takes new connections.
    NoBackends = 6,
    /// A SYN-ACK of no flow: its SYN bypassed the data plane.
    StraySynAck = 7,
    /// A TCP segment with flags that no TCP sends together.
    InvalidFlags = 8,
    /// A TCP segment of no flow, for a Service that resets such connections.
    UnknownConnection = 9,
    /// The backend gets a PROXY protocol header, so the programs on packets serve the connection, not the socket hooks.
    LeftToPackets = 10,
    /// The backend gets a PROXY protocol header, and no program on packets could send it.
    NoProxyHeader = 11,
}

impl Admission {
    /// The outcome of a packet, or system call, that may not begin a flow; `Ok` if it may.
    #[inline(always)]
    pub const fn allow(self, protocol: u8) -> Result<(), Outcome> {
        Err(match self {
            Self::Admitted => return Ok(()),
            Self::NotSyn | Self::SocketsOnly | Self::StraySynAck | Self::LeftToPackets => Outcome::NoService,
            Self::NoProxyHeader => Outcome::NoProxyHeader,
            Self::StrayReset => Outcome::StrayReset,
            Self::InvalidFlags => Outcome::InvalidFlags,
            Self::SourceNotAllowed => Outcome::SourceNotAllowed,
            Self::NoLocalBackend => Outcome::NoLocalBackend,
            Self::NoBackends | Self::UnknownConnection => rejection(protocol),
        })
    }
}

/// The outcome of rejecting a packet: RST for TCP, ICMP port unreachable for the others.
#[inline(always)]
pub const fn rejection(protocol: u8) -> Outcome {
    if protocol == protocol::TCP { Outcome::RejectTcp } else { Outcome::RejectUdp }
}

/// Whether a TCP or SCTP flow may begin with this segment. (A UDP flow may begin with any datagram.)
///
/// Segments in the middle of a connection may begin a flow: the entries of the connection may be lost, or on another
/// node. If the service [requires a SYN](Service::requires_syn), only a SYN may: other segments may belong to a
/// connection of the node, or one that netfilter masquerades, whose source port is the service's port.
#[inline(always)]
pub const fn first_segment(segment: &Segment, service: &Service) -> Admission {
    if service.requires_syn() && !segment.is_syn() {
        Admission::NotSyn
    } else if segment.is_rst() {
        Admission::StrayReset
    } else if !segment.is_valid() {
        Admission::InvalidFlags
    } else {
        Admission::Admitted
    }
}

/// Whether a client may use Services at all: `--deny-source` applies to external clients, at every frontend.
#[inline(always)]
pub fn source(is_denied: impl FnOnce() -> bool, is_internal: impl FnOnce() -> bool) -> Admission {
    if is_denied() && !is_internal() { Admission::SourceNotAllowed } else { Admission::Admitted }
}

/// Whether the service accepts packets of a client: the rule [`clients`], except that frontends for sockets accept no
/// packet. `service` is the record for this client.
#[inline(always)]
pub fn packets_of(service: &Service, in_source_ranges: impl FnOnce() -> bool) -> Admission {
    if service.flags & service_flags::SOCKETS_ONLY != 0 {
        return Admission::SocketsOnly;
    }
    clients(service, in_source_ranges)
}

/// Whether the service accepts a client: the rule for system calls, and part of the rule for packets. `service` is the
/// record for this client.
#[inline(always)]
pub fn clients(service: &Service, in_source_ranges: impl FnOnce() -> bool) -> Admission {
    if is_outside_source_ranges(service, in_source_ranges) {
        Admission::SourceNotAllowed
    } else if service.backends_count > 0 {
        Admission::Admitted
    } else if service.flags & service_flags::DROP_WITHOUT_BACKENDS != 0 {
        Admission::NoLocalBackend
    } else {
        Admission::NoBackends
    }
}

/// Whether only the programs on packets can serve a socket of another network namespace. They must if the backend gets
/// a PROXY protocol header, or if a rule depends on the source address, which the socket does not have yet: the service
/// has source ranges or limits, or serves only processes of the node, or `--deny-source` excludes some clients.
#[inline(always)]
pub fn is_left_to_packets(service: &Service, denies_sources: impl FnOnce() -> bool) -> bool {
    use service_flags::{LIMITED, PROXY_PROTOCOL, SOCKETS_ONLY, SOURCE_RANGES};

    service.flags & (SOCKETS_ONLY | SOURCE_RANGES | PROXY_PROTOCOL | LIMITED) != 0 || denies_sources()
}

/// Whether a socket of the node gets a backend. If the backend gets a PROXY protocol header, the socket connects to the
/// cluster IP, and the programs at the catch device serve the socket's packets; connections to the Service's other
/// addresses fail.
#[inline(always)]
pub const fn socket_of_node(service: &Service) -> Admission {
    if service.flags & service_flags::PROXY_PROTOCOL == 0 {
        Admission::Admitted
    } else if service.kind == FrontendKind::ClusterIp as u8 {
        Admission::LeftToPackets
    } else {
        Admission::NoProxyHeader
    }
}

/// Whether a packet that the service accepts may begin a flow. A SYN-ACK may not, because its SYN bypassed the data
/// plane. With [`service_flags::RESET_UNKNOWN`], only a SYN begins a TCP flow: the agent may have ended the connection
/// of any other segment.
#[inline(always)]
pub const fn handshake(segment: &Segment, protocol: u8, service: &Service) -> Admission {
    if segment.is_syn_ack() {
        Admission::StraySynAck
    } else if protocol == protocol::TCP
        && service.flags & service_flags::RESET_UNKNOWN != 0
        && !segment.is_syn()
    {
        Admission::UnknownConnection
    } else {
        Admission::Admitted
    }
}

/// Whether a packet of no flow is left to the programs of an earlier map layout; `mode` is the element of `HANDOVER`.
/// `connection` is whether the protocol of the packet has a handshake: TCP and SCTP.
#[inline(always)]
pub const fn is_left_to_earlier(mode: u32, connection: bool, segment: &Segment) -> bool {
    match mode {
        handover::EARLIER_CREATES_FLOWS => true,
        handover::CREATES_FLOWS => connection && !segment.is_syn(),
        _ => false,
    }
}

/// Whether the service has source ranges, and the client is in none of them.
#[inline(always)]
pub fn is_outside_source_ranges(service: &Service, in_source_ranges: impl FnOnce() -> bool) -> bool {
    service.flags & service_flags::SOURCE_RANGES != 0 && !in_source_ranges()
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;
    use lb_common::conntrack::tcp_flags::{ACK, FIN, RST, SYN};

    use super::*;

    const fn segment(flags: u8) -> Segment {
        Segment { flags, seq: 0, ack: 0, payload: 0 }
    }

    fn service(flags: u16, backends_count: u32) -> Service {
        let kind = FrontendKind::LoadBalancer as u8;
        Service { flags, backends_count, kind, ..Service::zeroed() }
    }

    #[test]
    fn first_segments_are_classified() {
        use Admission::{Admitted, InvalidFlags, NotSyn, StrayReset};
        let node_port = Service { kind: FrontendKind::NodePort as u8, ..service(0, 1) };
        for (flags, anywhere, at_node) in [
            (SYN, Admitted, Admitted),
            (ACK, Admitted, NotSyn),
            (SYN | ACK, Admitted, NotSyn),
            (FIN | ACK, Admitted, NotSyn),
            (RST, StrayReset, NotSyn),
            (RST | ACK, StrayReset, NotSyn),
            (0, InvalidFlags, NotSyn),
            (FIN, InvalidFlags, NotSyn),
            (SYN | FIN, InvalidFlags, InvalidFlags),
        ] {
            assert_eq!(first_segment(&segment(flags), &service(0, 1)), anywhere, "{flags}");
            for record in [node_port, service(service_flags::SYN_ONLY, 1)] {
                assert_eq!(first_segment(&segment(flags), &record), at_node, "{flags}");
            }
        }
    }

    #[test]
    fn clients_are_checked_by_policy_and_source_range() {
        use Admission::{Admitted, NoBackends, NoLocalBackend, SocketsOnly, SourceNotAllowed};
        use service_flags::{DROP_WITHOUT_BACKENDS, SOCKETS_ONLY, SOURCE_RANGES};
        for (flags, backends, in_ranges, packets, calls) in [
            (0, 1, false, Admitted, Admitted),
            (0, 0, true, NoBackends, NoBackends),
            (SOURCE_RANGES, 1, true, Admitted, Admitted),
            (SOURCE_RANGES, 1, false, SourceNotAllowed, SourceNotAllowed),
            (SOURCE_RANGES, 0, false, SourceNotAllowed, SourceNotAllowed),
            (DROP_WITHOUT_BACKENDS, 1, true, Admitted, Admitted),
            (DROP_WITHOUT_BACKENDS, 0, true, NoLocalBackend, NoLocalBackend),
            (DROP_WITHOUT_BACKENDS | SOURCE_RANGES, 0, false, SourceNotAllowed, SourceNotAllowed),
            (SOCKETS_ONLY, 1, true, SocketsOnly, Admitted),
            (SOCKETS_ONLY | SOURCE_RANGES, 1, false, SocketsOnly, SourceNotAllowed),
        ] {
            let record = service(flags, backends);
            assert_eq!(packets_of(&record, || in_ranges), packets, "flags {flags}, {backends} backends");
            assert_eq!(clients(&record, || in_ranges), calls, "flags {flags}, {backends} backends");
        }
    }

    #[test]
    fn denied_sources_are_external_clients_only() {
        use Admission::{Admitted, SourceNotAllowed};
        for (denied, internal, expected) in [
            (false, false, Admitted),
            (false, true, Admitted),
            (true, false, SourceNotAllowed),
            (true, true, Admitted),
        ] {
            assert_eq!(source(|| denied, || internal), expected, "denied {denied}, internal {internal}");
        }
    }

    #[test]
    fn source_ranges_are_checked_per_packet_for_sockets_of_other_namespaces() {
        use service_flags::{DROP_WITHOUT_BACKENDS, SOCKETS_ONLY, SOURCE_RANGES};
        for (flags, left) in
            [(0, false), (DROP_WITHOUT_BACKENDS, false), (SOURCE_RANGES, true), (SOCKETS_ONLY, true)]
        {
            assert_eq!(is_left_to_packets(&service(flags, 1), || false), left, "flags {flags}");
            assert!(is_left_to_packets(&service(flags, 1), || true), "flags {flags}");
        }
    }

    #[test]
    fn source_ranges_are_looked_up_only_where_there_are_any() {
        assert_eq!(packets_of(&service(0, 1), || unreachable!()), Admission::Admitted);
    }

    #[test]
    fn syn_ack_begins_no_flow() {
        for (flags, expected) in
            [(SYN, Admission::Admitted), (SYN | ACK, Admission::StraySynAck), (ACK, Admission::Admitted)]
        {
            assert_eq!(handshake(&segment(flags), protocol::TCP, &service(0, 1)), expected);
        }
    }

    #[test]
    fn only_tcp_segments_of_unknown_connections_are_reset() {
        use Admission::{Admitted, StraySynAck, UnknownConnection};
        let resets = service(service_flags::RESET_UNKNOWN, 1);
        for (flags, tcp) in [
            (SYN, Admitted),
            (SYN | ACK, StraySynAck),
            (ACK, UnknownConnection),
            (FIN | ACK, UnknownConnection),
        ] {
            assert_eq!(handshake(&segment(flags), protocol::TCP, &resets), tcp);
        }
        for protocol in [protocol::UDP, protocol::SCTP] {
            assert_eq!(handshake(&segment(0), protocol, &resets), Admitted);
        }
    }

    #[test]
    fn packets_left_to_the_earlier_layout() {
        for (mode, of_syn, of_ack, of_datagram) in [
            (handover::OVER, false, false, false),
            (handover::EARLIER_CREATES_FLOWS, true, true, true),
            (handover::CREATES_FLOWS, false, true, false),
        ] {
            let left = |connection, flags| is_left_to_earlier(mode, connection, &segment(flags));
            assert_eq!((left(true, SYN), left(true, ACK), left(false, 0)), (of_syn, of_ack, of_datagram));
        }
    }

    #[test]
    fn refusals_have_outcomes() {
        for (admission, tcp, udp) in [
            (Admission::NotSyn, Outcome::NoService, Outcome::NoService),
            (Admission::StrayReset, Outcome::StrayReset, Outcome::StrayReset),
            (Admission::InvalidFlags, Outcome::InvalidFlags, Outcome::InvalidFlags),
            (Admission::SocketsOnly, Outcome::NoService, Outcome::NoService),
            (Admission::SourceNotAllowed, Outcome::SourceNotAllowed, Outcome::SourceNotAllowed),
            (Admission::NoLocalBackend, Outcome::NoLocalBackend, Outcome::NoLocalBackend),
            (Admission::NoBackends, Outcome::RejectTcp, Outcome::RejectUdp),
            (Admission::StraySynAck, Outcome::NoService, Outcome::NoService),
            (Admission::UnknownConnection, Outcome::RejectTcp, Outcome::RejectUdp),
        ] {
            assert_eq!(admission.allow(protocol::TCP), Err(tcp));
            assert_eq!(admission.allow(protocol::UDP), Err(udp));
        }
        assert_eq!(Admission::Admitted.allow(protocol::TCP), Ok(()));
    }

    #[test]
    fn sockets_of_the_node_reach_services_with_proxy_protocol_by_cluster_ip_only() {
        use Admission::{Admitted, LeftToPackets, NoProxyHeader};
        use FrontendKind::{ClusterIp, ExternalIp, LoadBalancer, NodePort};
        for (kind, expected) in [
            (ClusterIp, LeftToPackets),
            (NodePort, NoProxyHeader),
            (LoadBalancer, NoProxyHeader),
            (ExternalIp, NoProxyHeader),
        ] {
            let of = |flags| Service { kind: kind as u8, ..service(flags, 1) };
            assert_eq!(socket_of_node(&of(service_flags::PROXY_PROTOCOL)), expected, "{kind:?}");
            assert_eq!(socket_of_node(&of(0)), Admitted, "{kind:?}");
        }
        assert_eq!(LeftToPackets.allow(protocol::TCP), Err(Outcome::NoService));
        assert_eq!(NoProxyHeader.allow(protocol::TCP), Err(Outcome::NoProxyHeader));
        assert!(is_left_to_packets(&service(service_flags::PROXY_PROTOCOL, 1), || false));
    }
}
