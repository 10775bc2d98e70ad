/// The verdict of a hook on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Lets the packet go on: to the next program on the hook, then to the stack (XDP, tc ingress) or out of the device
    /// (tc egress).
    Pass,
    /// Sends the packet out of the device that it came from (at the catch device: into the node again): a packet of a
    /// hairpin flow, or the answer that the program made of the packet (a rejection, an ICMP error, an echo reply).
    Bounce,
    /// Sends the packet out of the device that the routing table names, bypassing the stack.
    Route,
    /// Drops the packet.
    Drop,
    /// Stores a copy of the packet, a later fragment, and drops the packet. The copy enters the node again if the first
    /// fragment arrives in time.
    Hold,
}

/// Why a packet got its verdict, or a system call its result. The value is the index of the outcome's counter in
/// `STATS`, the name its metric label.
///
/// Add new outcomes at the end, as the values are indices. A larger `STATS` replaces the pinned map and starts from 0
/// (`GROWS` in lb-datapath); `LAYOUT_VERSION` stays.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// Neither IPv4 nor IPv6.
    NotIp = 0,
    /// A protocol without ports (an ICMP echo, ESP, …), or a first fragment of SCTP.
    NotTransport = 1,
    /// Headers that are truncated or contradict each other: left to the stack, which reports the error better.
    Malformed = 2,
    /// No flow and no Service; or a packet or system call for which the Service creates no flow, such as a SYN-ACK.
    NoService = 3,
    /// A packet of a flow that the other hook translates, or has already translated.
    OtherHook = 4,
    /// A later fragment that is not translated: its first fragment was not translated or not seen, or its flow has no
    /// entry any more. Also a later fragment of a routed or tunnelled flow that only an ICMP error could answer (hop
    /// limit used up, larger than the MTU).
    UnknownFragment = 5,
    /// An ICMP error about a packet of no tracked flow.
    UnknownIcmpError = 6,
    /// First packet of a flow through the stack: a backend was chosen.
    NewFlow = 7,
    /// A further packet from a client to its backend.
    Forward = 8,
    /// A packet from a backend to its client.
    Reply = 9,
    /// An ICMP error about a translated packet; the program has translated the error.
    IcmpError = 10,
    /// A packet of a hairpin flow (client and backend have the same address, such as a pod that reaches itself through
    /// a VIP), in either direction, or an ICMP error about such a packet: translated and sent back.
    Hairpin = 11,
    /// A TCP segment that is answered with RST: a segment to a service without backends, or to a port of a cluster IP
    /// that no service has; a segment of no tracked flow to a frontend with
    /// [`RESET_UNKNOWN`](crate::service_flags::RESET_UNKNOWN), unless it is a SYN, SYN-ACK or RST, or the frontend
    /// [requires a SYN](crate::Service::requires_syn); or a segment of a connection to the agent's DNS server, if that
    /// server no longer answers.
    RejectTcp = 12,
    /// A datagram or an SCTP packet to a service without backends, or to a port of a cluster IP that no service has,
    /// answered with ICMP port unreachable.
    RejectUdp = 13,
    /// Dropped: a TCP RST or SCTP ABORT of no tracked flow, sent to a VIP. There is no connection to reset.
    StrayReset = 14,
    /// Dropped: the flow table and its overflow (`CONNTRACK`) have no place for the flow; the kernel has no memory for
    /// another entry; another CPU has not yet finished inserting the same flow, or has already removed the flow; or a
    /// socket hook could not store its entry.
    ConntrackFull = 15,
    /// Dropped: no source port was free towards the chosen backend, or the node has no source address for masquerading.
    NoSourcePort = 16,
    /// Dropped: the agent changed the service record during each of several reads.
    TornService = 17,
    /// Dropped: a service record points at a slot outside `BACKENDS`. Only a bug can cause this.
    NoBackend = 18,
    /// Dropped: a kernel helper failed to rewrite or redirect the packet. Also a segment of a flow with a PROXY
    /// protocol header, if it is a fragment whose payload would have to be removed or replaced, or if the reverse entry
    /// of the flow is lost.
    RewriteFailed = 19,
    /// A packet of a masqueraded connection, on the way between this node and the backend: the client's address was
    /// translated. Also a packet of a connection of the node itself whose source port was translated.
    Masquerade = 20,
    /// An ICMP echo request to a VIP, answered.
    Echo = 21,
    /// Dropped: the traffic policy is `Local` and all endpoints are on other nodes.
    NoLocalBackend = 22,
    /// Dropped: a packet to an address that is in a range of cluster IPs, but that no Service has.
    UnknownVip = 23,
    /// Dropped: the source is in none of the service's `loadBalancerSourceRanges`; or the client is external, and is in
    /// `--deny-source` or behind an IPsec policy that replies would bypass.
    SourceNotAllowed = 24,
    /// Dropped: an ICMP redirect about a translated packet. It would make the sender of that packet bypass the VIP.
    IcmpRedirect = 25,
    /// First packet of a routed flow, whose client and backend are both beyond wire devices: a backend was chosen, and
    /// the packet was sent on.
    NewRoutedFlow = 26,
    /// A further packet of a routed flow, in either direction.
    Routed = 27,
    /// An ICMP error about a packet of a routed flow, translated and sent on.
    RoutedIcmpError = 28,
    /// A packet of a routed or tunnelled flow whose TTL or hop limit is used up: answered with ICMP time exceeded.
    TimeExceeded = 29,
    /// A packet of a routed or tunnelled flow that is larger than the MTU: answered with an ICMP error that names the
    /// MTU.
    TooBig = 30,
    /// Dropped: a packet of a routed or tunnelled flow without a route to its destination; a later fragment that is too
    /// large for the tunnel; or an ICMP error about a packet of a routed or tunnelled flow, if the error's own TTL or
    /// hop limit is used up.
    NoRoute = 31,
    /// First packet of a tunnelled flow (direct server return): a backend on another node was chosen, and the packet
    /// was sent there in a tunnel.
    NewTunnelledFlow = 32,
    /// A further packet of a tunnelled flow; or an ICMP error about a packet that the flow's backend has sent.
    Tunnelled = 33,
    /// A further packet that another node sent to this node in a tunnel, for a backend on this node. (The first such
    /// packet counts as `new_flow`.)
    Decapsulated = 34,
    /// Dropped: a packet in a tunnel for a backend on this node, from a machine that is neither a node of the cluster
    /// nor in `--dsr-peers`.
    TunnelRefused = 35,
    /// First packet of a flow that bypasses the stack (`--forwarding direct`) and is neither routed nor tunnelled: a
    /// backend was chosen.
    NewDirectFlow = 36,
    /// A further packet of a flow that bypasses the stack, in either direction.
    Direct = 37,
    /// During the handover from an earlier map layout: a packet of no flow in the maps of this layout, left to the
    /// programs of the earlier layout, which are next on the hook.
    LeftToEarlier = 38,
    /// Dropped without an answer: the node has reached its limit on ICMP errors.
    IcmpRateLimited = 39,
    /// Dropped: a TCP segment of a Service or flow with a combination of flags that no TCP implementation sends, such
    /// as FIN without ACK.
    InvalidFlags = 40,
    /// A frame for another host, for several hosts (broadcast, multicast), or of a VLAN: the stack forwards it on the
    /// link layer, takes it itself, hands it to the device of the VLAN, or drops it. (If [`crate::filter`] shows that
    /// the packet belongs to no flow and no Service, the frame counts as `no_service` instead.)
    OtherHost = 41,
    /// A packet to a backend on another node that was sent in a tunnel without a flow, because the flow table has no
    /// room for the flow. The Maglev table of the Service still chooses the same backend for each packet of a
    /// connection.
    Stateless = 42,
    /// A later fragment that has arrived before the first one of its datagram. The later fragment is kept until the
    /// first one arrives; then it enters the node again and counts again, unless another held fragment has overwritten
    /// it.
    FragmentHeld = 43,
    /// A packet of a caught flow, in either direction, or an ICMP error about such a packet. The client's device has no
    /// programs, so the programs at the catch device translate the flow.
    Caught = 44,
    /// Dropped: the programs at the catch device did not translate the packet, so the stack routed it to that device
    /// again. An example is a packet of a protocol without ports, sent to a cluster IP.
    Untranslated = 45,
    /// Dropped: a later fragment of a datagram whose first fragment was dropped or answered; or a later fragment that
    /// has waited for the first one, but whose datagram has no entry any more, usually because the datagram is
    /// complete.
    FragmentDropped = 46,
    /// Refused: a process of the node calls `connect(2)` for a Service with
    /// [`PROXY_PROTOCOL`](crate::service_flags::PROXY_PROTOCOL), at an address that is not a cluster IP. The packets of
    /// such a connection would bypass the programs that send the PROXY protocol header.
    NoProxyHeader = 47,
    /// Dropped: the first packet of a connection beyond a limit on new connections of its Service.
    ConnectionLimited = 48,
    /// A DNS query of a pod to the cluster IP of the DNS Service that is redirected to the agent on this node: a UDP
    /// datagram, or the SYN of a TCP connection. (Further segments of the connection count as `forward`.)
    DnsQuery = 49,
    /// A packet of the agent's answer to a redirected query ([`Self::DnsQuery`]). It leaves with the cluster IP as its
    /// source.
    DnsAnswer = 50,
    /// An ICMP error about a tunnelled packet, from a router or from the backend's node. The program turns it into an
    /// error about the inner packet, and sends that error to the client.
    TunnelError = 51,
}

/// Defines [`Outcome::ALL`]. The compiler reports an outcome that is missing from the list, because the match must be
/// exhaustive.
macro_rules! list_outcomes {
    ($($outcome:ident,)*) => {
        impl Outcome {
            /// How many outcomes there are; the size of `STATS`.
            pub const COUNT: usize = Self::ALL.len();

            /// All outcomes, in the order of their values.
            pub const ALL: [Self; [$(Self::$outcome),*].len()] = [$(Self::$outcome),*];
        }

        const _: fn(Outcome) = |outcome| match outcome {
            $(Outcome::$outcome => {})*
        };
    };
}

list_outcomes! {
    NotIp,
    NotTransport,
    Malformed,
    NoService,
    OtherHook,
    UnknownFragment,
    UnknownIcmpError,
    NewFlow,
    Forward,
    Reply,
    IcmpError,
    Hairpin,
    RejectTcp,
    RejectUdp,
    StrayReset,
    ConntrackFull,
    NoSourcePort,
    TornService,
    NoBackend,
    RewriteFailed,
    Masquerade,
    Echo,
    NoLocalBackend,
    UnknownVip,
    SourceNotAllowed,
    IcmpRedirect,
    NewRoutedFlow,
    Routed,
    RoutedIcmpError,
    TimeExceeded,
    TooBig,
    NoRoute,
    NewTunnelledFlow,
    Tunnelled,
    Decapsulated,
    TunnelRefused,
    NewDirectFlow,
    Direct,
    LeftToEarlier,
    IcmpRateLimited,
    InvalidFlags,
    OtherHost,
    Stateless,
    FragmentHeld,
    Caught,
    Untranslated,
    FragmentDropped,
    NoProxyHeader,
    ConnectionLimited,
    DnsQuery,
    DnsAnswer,
    TunnelError,
}

impl Outcome {
    /// The hook's verdict on a packet of this outcome.
    #[inline(always)]
    pub const fn verdict(self) -> Verdict {
        match self {
            Self::NotIp
            | Self::NotTransport
            | Self::Malformed
            | Self::NoService
            | Self::OtherHook
            | Self::UnknownFragment
            | Self::UnknownIcmpError
            | Self::NewFlow
            | Self::Forward
            | Self::Reply
            | Self::IcmpError
            | Self::Masquerade
            | Self::Decapsulated
            | Self::LeftToEarlier
            | Self::OtherHost
            | Self::Caught
            | Self::DnsQuery
            | Self::DnsAnswer => Verdict::Pass,
            Self::Hairpin
            | Self::RejectTcp
            | Self::RejectUdp
            | Self::Echo
            | Self::TimeExceeded
            | Self::TooBig => Verdict::Bounce,
            Self::NewRoutedFlow
            | Self::Routed
            | Self::RoutedIcmpError
            | Self::NewTunnelledFlow
            | Self::Tunnelled
            | Self::NewDirectFlow
            | Self::Direct
            | Self::Stateless
            | Self::TunnelError => Verdict::Route,
            Self::StrayReset
            | Self::ConntrackFull
            | Self::NoSourcePort
            | Self::TornService
            | Self::NoBackend
            | Self::RewriteFailed
            | Self::NoLocalBackend
            | Self::UnknownVip
            | Self::SourceNotAllowed
            | Self::IcmpRedirect
            | Self::NoRoute
            | Self::TunnelRefused
            | Self::IcmpRateLimited
            | Self::InvalidFlags
            | Self::Untranslated
            | Self::FragmentDropped
            | Self::NoProxyHeader
            | Self::ConnectionLimited => Verdict::Drop,
            Self::FragmentHeld => Verdict::Hold,
        }
    }

    /// Turns an outcome of further packets of a flow into the outcome of the first packet. Returns all other outcomes
    /// unchanged.
    #[inline(always)]
    #[must_use]
    pub const fn of_first_packet(self) -> Self {
        match self {
            Self::Forward => Self::NewFlow,
            Self::Routed => Self::NewRoutedFlow,
            Self::Tunnelled => Self::NewTunnelledFlow,
            Self::Decapsulated => Self::NewFlow,
            Self::Direct => Self::NewDirectFlow,
            Self::NotIp
            | Self::NotTransport
            | Self::Malformed
            | Self::NoService
            | Self::OtherHook
            | Self::UnknownFragment
            | Self::UnknownIcmpError
            | Self::NewFlow
            | Self::Reply
            | Self::IcmpError
            | Self::Hairpin
            | Self::RejectTcp
            | Self::RejectUdp
            | Self::StrayReset
            | Self::ConntrackFull
            | Self::NoSourcePort
            | Self::TornService
            | Self::NoBackend
            | Self::RewriteFailed
            | Self::Masquerade
            | Self::Echo
            | Self::NoLocalBackend
            | Self::UnknownVip
            | Self::SourceNotAllowed
            | Self::IcmpRedirect
            | Self::NewRoutedFlow
            | Self::RoutedIcmpError
            | Self::TimeExceeded
            | Self::TooBig
            | Self::NoRoute
            | Self::NewTunnelledFlow
            | Self::TunnelRefused
            | Self::NewDirectFlow
            | Self::LeftToEarlier
            | Self::IcmpRateLimited
            | Self::InvalidFlags
            | Self::OtherHost
            | Self::Stateless
            | Self::FragmentHeld
            | Self::Caught
            | Self::Untranslated
            | Self::FragmentDropped
            | Self::NoProxyHeader
            | Self::ConnectionLimited
            | Self::DnsQuery
            | Self::DnsAnswer
            | Self::TunnelError => self,
        }
    }

    /// The outcome of a packet whose flow has no entry, if a packet with an entry would have this outcome: see
    /// [`Self::Stateless`].
    #[inline(always)]
    pub const fn without_entry(self) -> Self {
        if matches!(self, Self::Tunnelled) { Self::Stateless } else { self }
    }

    /// Whether each packet of this outcome begins a flow. (The first packet of a hairpin or caught flow counts as
    /// `Hairpin` or `Caught`, like all its other packets.)
    pub const fn begins_flow(self) -> bool {
        matches!(self, Self::NewFlow | Self::NewRoutedFlow | Self::NewTunnelledFlow | Self::NewDirectFlow)
    }

    /// The metric label.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NotIp => "not_ip",
            Self::NotTransport => "not_transport",
            Self::Malformed => "malformed",
            Self::NoService => "no_service",
            Self::OtherHook => "other_hook",
            Self::UnknownFragment => "unknown_fragment",
            Self::UnknownIcmpError => "unknown_icmp_error",
            Self::NewFlow => "new_flow",
            Self::Forward => "forward",
            Self::Reply => "reply",
            Self::IcmpError => "icmp_error",
            Self::Hairpin => "hairpin",
            Self::RejectTcp => "reject_tcp",
            Self::RejectUdp => "reject_udp",
            Self::StrayReset => "stray_reset",
            Self::ConntrackFull => "conntrack_full",
            Self::NoSourcePort => "no_source_port",
            Self::TornService => "torn_service",
            Self::NoBackend => "no_backend",
            Self::RewriteFailed => "rewrite_failed",
            Self::Masquerade => "masquerade",
            Self::Echo => "echo",
            Self::NoLocalBackend => "no_local_backend",
            Self::UnknownVip => "unknown_vip",
            Self::SourceNotAllowed => "source_not_allowed",
            Self::IcmpRedirect => "icmp_redirect",
            Self::NewRoutedFlow => "new_routed_flow",
            Self::Routed => "routed",
            Self::RoutedIcmpError => "routed_icmp_error",
            Self::TimeExceeded => "time_exceeded",
            Self::TooBig => "too_big",
            Self::NoRoute => "no_route",
            Self::NewTunnelledFlow => "new_tunnelled_flow",
            Self::Tunnelled => "tunnelled",
            Self::Decapsulated => "decapsulated",
            Self::TunnelRefused => "tunnel_refused",
            Self::NewDirectFlow => "new_direct_flow",
            Self::Direct => "direct",
            Self::LeftToEarlier => "left_to_earlier",
            Self::IcmpRateLimited => "icmp_rate_limited",
            Self::InvalidFlags => "invalid_flags",
            Self::OtherHost => "other_host",
            Self::Stateless => "stateless",
            Self::FragmentHeld => "fragment_held",
            Self::Caught => "caught",
            Self::Untranslated => "untranslated",
            Self::FragmentDropped => "fragment_dropped",
            Self::NoProxyHeader => "no_proxy_header",
            Self::ConnectionLimited => "connection_limited",
            Self::DnsQuery => "dns_query",
            Self::DnsAnswer => "dns_answer",
            Self::TunnelError => "tunnel_error",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn index_in_all_is_the_value() {
        for (index, outcome) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, index, "{}", outcome.as_str());
        }
    }

    #[test]
    fn names_are_unique() {
        let names: BTreeSet<&str> = Outcome::ALL.into_iter().map(Outcome::as_str).collect();
        assert_eq!(names.len(), Outcome::COUNT);
    }

    #[test]
    fn first_packets_have_the_outcomes_that_begin_flows() {
        for (further, first) in [
            (Outcome::Forward, Outcome::NewFlow),
            (Outcome::Decapsulated, Outcome::NewFlow),
            (Outcome::Routed, Outcome::NewRoutedFlow),
            (Outcome::Tunnelled, Outcome::NewTunnelledFlow),
            (Outcome::Direct, Outcome::NewDirectFlow),
            (Outcome::Hairpin, Outcome::Hairpin),
            (Outcome::Caught, Outcome::Caught),
            (Outcome::RewriteFailed, Outcome::RewriteFailed),
        ] {
            assert_eq!(further.of_first_packet(), first, "{}", further.as_str());
        }
        let changed = Outcome::ALL.into_iter().filter(|outcome| outcome.of_first_packet() != *outcome);
        let first: BTreeSet<Outcome> = changed.map(Outcome::of_first_packet).collect();
        let beginnings: BTreeSet<Outcome> =
            Outcome::ALL.into_iter().filter(|outcome| outcome.begins_flow()).collect();
        assert_eq!(first, beginnings);
    }
}
