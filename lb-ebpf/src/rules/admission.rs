//! Whether a flow may begin.
//!
//! For a packet, [`first_packet`] decides first, by the record of the frontend; then [`packet`], by the record [for the
//! client](super::client::for_client); then the [limits](super::limit).

use lb_common::{FrontendKind, Outcome, Service, conntrack::Segment, handover, protocol, service_flags};

use crate::parse::Body;

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
    /// The client is external and in a denied network (see [`source`]), or `loadBalancerSourceRanges` does not include
    /// the client.
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
    /// The programs on packets serve the connection, not the socket hooks.
    LeftToPackets = 10,
    /// The backend gets a PROXY protocol header, and no program on packets could send it.
    NoProxyHeader = 11,
    /// A later fragment whose flow has no entry any more, although the first fragment was translated: a later fragment
    /// begins no flow.
    UnknownFragment = 12,
    /// The programs of an earlier map layout, which run next on the hook, decide: the flow may be in their maps.
    LeftToEarlier = 13,
}

impl Admission {
    /// Whether the packet, or system call, is rejected.
    #[inline(always)]
    pub const fn is_rejected(self) -> bool {
        matches!(self, Self::NoBackends | Self::UnknownConnection)
    }

    /// The outcome of a packet, or system call, that may not begin a flow; `Ok` if it may.
    #[inline(always)]
    pub const fn allow(self, protocol: u8) -> Result<(), Outcome> {
        Err(match self {
            Self::Admitted => return Ok(()),
            Self::NotSyn | Self::SocketsOnly | Self::StraySynAck | Self::LeftToPackets => Outcome::NoService,
            Self::NoProxyHeader => Outcome::NoProxyHeader,
            Self::UnknownFragment => Outcome::UnknownFragment,
            Self::LeftToEarlier => Outcome::LeftToEarlier,
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

/// The first check of a packet of no flow: whether it may begin a flow of this service. It consists of
/// [`is_left_to_earlier`], [`first_segment`] and [`source`], in this order; none of them needs the record for the
/// client. A later fragment begins no flow. `handover` is the element of `HANDOVER`.
#[inline(always)]
pub fn first_packet(
    handover: u32,
    body: Body,
    segment: &Segment,
    service: &Service,
    is_denied: impl FnOnce() -> bool,
    is_internal: impl FnOnce() -> bool,
) -> Admission {
    let connection = matches!(body, Body::Tcp | Body::Sctp);
    if is_left_to_earlier(handover, connection, segment) {
        return Admission::LeftToEarlier;
    }
    let admission = match body {
        Body::LaterFragment => Admission::UnknownFragment,
        Body::Tcp | Body::Sctp => first_segment(segment, service),
        Body::Udp | Body::IcmpError | Body::Echo => Admission::Admitted,
    };
    if admission == Admission::Admitted { source(is_denied, is_internal) } else { admission }
}

/// The second check, for a packet that [`first_packet`] admits: whether it may begin a flow. It consists of
/// [`packets_of`] and [`handshake`], in this order. `service` is the record for this client.
#[inline(always)]
pub fn packet(
    segment: &Segment,
    protocol: u8,
    service: &Service,
    in_source_ranges: impl FnOnce() -> bool,
) -> Admission {
    let admission = packets_of(service, in_source_ranges);
    if admission == Admission::Admitted { handshake(segment, protocol, service) } else { admission }
}

/// Whether a TCP or SCTP flow may begin with this segment. (A UDP flow may begin with any datagram.)
///
/// Segments in the middle of a connection may begin a flow: the entries of the connection may be lost, or on another
/// node. If the service [requires a SYN](Service::requires_syn), only a SYN may: other segments may belong to a
/// connection that has the service's port as its source port, either a connection of the node itself or one that
/// netfilter masquerades.
#[inline(always)]
pub const fn first_segment(segment: &Segment, service: &Service) -> Admission {
    if service.requires_syn() && !segment.is_syn() { Admission::NotSyn } else { tunnelled_segment(segment) }
}

/// Whether a TCP or SCTP flow may begin with this segment, which another node has sent here through a tunnel. That node
/// has checked whether the service requires a SYN.
#[inline(always)]
pub const fn tunnelled_segment(segment: &Segment) -> Admission {
    if segment.is_rst() {
        Admission::StrayReset
    } else if !segment.is_valid() {
        Admission::InvalidFlags
    } else {
        Admission::Admitted
    }
}

/// Whether a client may use Services at all. An external client in a network of `--deny-source`, or behind an IPsec
/// policy, may use no frontend.
#[inline(always)]
pub fn source(is_denied: impl FnOnce() -> bool, is_internal: impl FnOnce() -> bool) -> Admission {
    if is_denied() && !is_internal() { Admission::SourceNotAllowed } else { Admission::Admitted }
}

/// Whether the service accepts packets of a client, and has a backend for them: the rule [`clients`], except that
/// frontends for sockets accept no packet. `service` is the record for this client.
#[inline(always)]
pub fn packets_of(service: &Service, in_source_ranges: impl FnOnce() -> bool) -> Admission {
    if service.flags & service_flags::SOCKETS_ONLY != 0 {
        return Admission::SocketsOnly;
    }
    clients(service, in_source_ranges)
}

/// Whether the service accepts a client, and has a backend for it: the rule for system calls, and part of the rule for
/// packets. `service` is the record for this client.
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
/// has source ranges or limits, or serves only processes of the node, or the settings deny some sources ([`source`]).
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

/// Whether a system call that names the frontend gets a backend. The rule consists of [`clients`] and, for a process of
/// the node (`on_node`), [`socket_of_node`]. For a socket of another network namespace, `is_left` is whether only the
/// programs on packets can serve it ([`is_left_to_packets`]). If [`clients`] does not admit such a socket, the call
/// does not fail: the programs on packets decide, because they know the client's address and can drop silently.
#[inline(always)]
pub fn system_call(
    service: &Service,
    on_node: bool,
    in_source_ranges: impl FnOnce() -> bool,
    is_left: impl FnOnce() -> bool,
) -> Admission {
    let admission = clients(service, in_source_ranges);
    let is_admitted = admission == Admission::Admitted;
    if on_node {
        return if is_admitted { socket_of_node(service) } else { admission };
    }
    if is_admitted && !is_left() { Admission::Admitted } else { Admission::LeftToPackets }
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
            assert_eq!(tunnelled_segment(&segment(flags)), anywhere, "{flags}");
            for record in [node_port, service(service_flags::SYN_ONLY, 1)] {
                assert_eq!(first_segment(&segment(flags), &record), at_node, "{flags}");
            }
        }
    }

    #[test]
    fn first_packets_are_checked_in_this_order() {
        use Admission::{Admitted, LeftToEarlier, NotSyn, SourceNotAllowed, StrayReset, UnknownFragment};
        use handover::{CREATES_FLOWS, EARLIER_CREATES_FLOWS, OVER};
        let syn_only = service_flags::SYN_ONLY;
        for (mode, body, flags, service_flags, denied, expected) in [
            (OVER, Body::Tcp, SYN, 0, false, Admitted),
            (OVER, Body::Tcp, SYN, 0, true, SourceNotAllowed),
            (OVER, Body::Tcp, RST, 0, true, StrayReset),
            (OVER, Body::Tcp, SYN | RST, 0, false, StrayReset),
            (OVER, Body::Tcp, RST, syn_only, true, NotSyn),
            (OVER, Body::Udp, 0, syn_only, false, Admitted),
            (OVER, Body::Udp, 0, syn_only, true, SourceNotAllowed),
            (OVER, Body::LaterFragment, 0, 0, true, UnknownFragment),
            (CREATES_FLOWS, Body::Tcp, RST, 0, true, LeftToEarlier),
            (CREATES_FLOWS, Body::Sctp, SYN, 0, true, SourceNotAllowed),
            (CREATES_FLOWS, Body::LaterFragment, 0, 0, true, UnknownFragment),
            (EARLIER_CREATES_FLOWS, Body::LaterFragment, 0, 0, true, LeftToEarlier),
        ] {
            let record = service(service_flags, 1);
            let found = first_packet(mode, body, &segment(flags), &record, || denied, || false);
            assert_eq!(found, expected, "{mode}, {body:?}, {flags}, {service_flags}, {denied}");
        }
    }

    #[test]
    fn packets_are_checked_by_client_before_handshake() {
        use Admission::{Admitted, NoBackends, SourceNotAllowed, StraySynAck, UnknownConnection};
        use service_flags::{RESET_UNKNOWN, SOURCE_RANGES};
        for (flags, service_flags, backends, expected) in [
            (SYN, SOURCE_RANGES, 1, SourceNotAllowed),
            (SYN | ACK, SOURCE_RANGES, 1, SourceNotAllowed),
            (SYN | ACK, 0, 0, NoBackends),
            (SYN | ACK, 0, 1, StraySynAck),
            (ACK, RESET_UNKNOWN, 0, NoBackends),
            (ACK, RESET_UNKNOWN, 1, UnknownConnection),
            (SYN, RESET_UNKNOWN, 1, Admitted),
        ] {
            let found = packet(&segment(flags), protocol::TCP, &service(service_flags, backends), || false);
            assert_eq!(found, expected, "{flags}, {service_flags}, {backends} backends");
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
    fn system_calls_of_the_node_fail_and_those_of_pods_are_left_to_packets() {
        use Admission::{Admitted, LeftToPackets, NoBackends, NoProxyHeader, SourceNotAllowed};
        use service_flags::{PROXY_PROTOCOL, SOURCE_RANGES};
        for (flags, backends, is_left, of_node, of_pod) in [
            (0, 1, false, Admitted, Admitted),
            (0, 1, true, Admitted, LeftToPackets),
            (0, 0, false, NoBackends, LeftToPackets),
            (SOURCE_RANGES, 1, false, SourceNotAllowed, LeftToPackets),
            (SOURCE_RANGES | PROXY_PROTOCOL, 1, true, SourceNotAllowed, LeftToPackets),
            (PROXY_PROTOCOL, 1, true, NoProxyHeader, LeftToPackets),
        ] {
            let found = |on_node| system_call(&service(flags, backends), on_node, || false, || is_left);
            assert_eq!(
                (found(true), found(false)),
                (of_node, of_pod),
                "{flags}, {backends} backends, {is_left}"
            );
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
            (Admission::UnknownFragment, Outcome::UnknownFragment, Outcome::UnknownFragment),
            (Admission::LeftToEarlier, Outcome::LeftToEarlier, Outcome::LeftToEarlier),
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
