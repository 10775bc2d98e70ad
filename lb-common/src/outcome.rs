/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Goes on: to the next program on the hook, then to the stack.
    Pass,
    /// Leaves again through the device it came from.
    Bounce,
    /// Leaves through the device that the routing table says, past the stack.
    Route,
    /// Is dropped.
    Drop,
}

/// Why a packet got its verdict. The value is the index of its counter in `STATS`, the name its metric label.
///
/// Add new ones at the end: the counters are pinned.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// Neither IPv4 nor IPv6.
    NotIp = 0,
    /// No protocol with ports (an ICMP echo, ESP, …).
    NotTransport = 1,
    /// Headers cut short or contradicting each other: left to the stack, which knows more about what is wrong.
    Malformed = 2,
    /// No flow and no service: not ours.
    NoService = 3,
    /// Belongs to a flow that is translated at the other hook (or already was).
    OtherHook = 4,
    /// A later fragment of a datagram whose first fragment was not ours or was not seen.
    UnknownFragment = 5,
    /// An ICMP error about a packet of no flow of ours.
    UnknownIcmpError = 6,
    /// First packet of a flow: a backend was chosen.
    NewFlow = 7,
    /// A further packet from a client to its backend.
    Forward = 8,
    /// A packet from a backend to its client.
    Reply = 9,
    /// An ICMP error about a translated packet, itself translated.
    IcmpError = 10,
    /// A packet between a pod and itself through a VIP, sent back to it translated.
    Hairpin = 11,
    /// A TCP segment to a service without backends, answered with RST.
    RejectTcp = 12,
    /// A datagram to a service without backends, answered with ICMP port unreachable.
    RejectUdp = 13,
    /// Dropped: a TCP RST to a VIP that belongs to no flow; there is nobody to reset.
    StrayReset = 14,
    /// Dropped: `CONNTRACK` is full, or the kernel has no memory for another entry.
    ConntrackFull = 15,
    /// Dropped: no source port was free towards the chosen backend.
    NoSourcePort = 16,
    /// Dropped: the service record changed at every one of several reads.
    TornService = 17,
    /// Dropped: a service points at a slot that `BACKENDS` has not. This counter should never be anything but 0.
    NoBackend = 18,
    /// Dropped: the kernel refused to rewrite the packet.
    RewriteFailed = 19,
    /// A packet of a masqueraded connection between this node and the backend: its client's address was exchanged.
    Masquerade = 20,
    /// An ICMP echo request to a VIP, answered.
    Echo = 21,
    /// Dropped: the traffic policy is `Local` and all endpoints are on other nodes.
    NoLocalBackend = 22,
    /// Dropped: an address of the service range that no Service has.
    UnknownVip = 23,
    /// Dropped: the source is in none of the service's `loadBalancerSourceRanges`.
    SourceNotAllowed = 24,
    /// Dropped: an ICMP redirect about a translated packet, which would lead its sender past the VIP.
    IcmpRedirect = 25,
    /// First packet of a flow between a client and a backend beyond the wire: a backend was chosen, and it was sent on.
    NewRoutedFlow = 26,
    /// A further packet of such a flow, in either direction.
    Routed = 27,
    /// An ICMP error about a packet of such a flow, translated and sent on.
    RoutedIcmpError = 28,
    /// A packet of such a flow that has come too far: answered with ICMP time exceeded.
    TimeExceeded = 29,
    /// A packet of such a flow that is too large for its way: answered with its MTU.
    TooBig = 30,
    /// Dropped: there is no route for a packet of such a flow any more, or none for a fragment of its size.
    NoRoute = 31,
    /// First packet of a flow to a backend on another node that answers directly: a backend was chosen, and the packet was
    /// sent there in a tunnel.
    NewTunnelledFlow = 32,
    /// A further packet of such a flow, or an ICMP error about what its backend has sent.
    Tunnelled = 33,
    /// A further packet for a backend on this node that another node has sent here in a tunnel. (The first one counts as any
    /// new flow.)
    Decapsulated = 34,
    /// Dropped: a packet in a tunnel for a backend on this node, from a machine that is no peer.
    TunnelRefused = 35,
    /// First packet of any other flow, sent on at once past the stack (`--forwarding direct`): a backend was chosen.
    NewDirectFlow = 36,
    /// A further packet of such a flow, in either direction.
    Direct = 37,
    /// Of no flow that is known here while another layout of the maps is being taken over: left to its programs, which are next
    /// on the hook.
    LeftToEarlier = 38,
}

impl Outcome {
    /// How many there are; the size of `STATS`.
    pub const COUNT: usize = Self::ALL.len();

    /// All of them, in the order of their values.
    pub const ALL: [Self; 39] = [
        Self::NotIp,
        Self::NotTransport,
        Self::Malformed,
        Self::NoService,
        Self::OtherHook,
        Self::UnknownFragment,
        Self::UnknownIcmpError,
        Self::NewFlow,
        Self::Forward,
        Self::Reply,
        Self::IcmpError,
        Self::Hairpin,
        Self::RejectTcp,
        Self::RejectUdp,
        Self::StrayReset,
        Self::ConntrackFull,
        Self::NoSourcePort,
        Self::TornService,
        Self::NoBackend,
        Self::RewriteFailed,
        Self::Masquerade,
        Self::Echo,
        Self::NoLocalBackend,
        Self::UnknownVip,
        Self::SourceNotAllowed,
        Self::IcmpRedirect,
        Self::NewRoutedFlow,
        Self::Routed,
        Self::RoutedIcmpError,
        Self::TimeExceeded,
        Self::TooBig,
        Self::NoRoute,
        Self::NewTunnelledFlow,
        Self::Tunnelled,
        Self::Decapsulated,
        Self::TunnelRefused,
        Self::NewDirectFlow,
        Self::Direct,
        Self::LeftToEarlier,
    ];

    /// What becomes of the packet.
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
            | Self::LeftToEarlier => Verdict::Pass,
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
            | Self::Direct => Verdict::Route,
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
            | Self::TunnelRefused => Verdict::Drop,
        }
    }

    /// What it is of the first packet of a flow, where it is this of the others.
    #[inline(always)]
    #[must_use]
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "an outcome is that of all packets unless something else is said"
    )]
    pub const fn of_first_packet(self) -> Self {
        match self {
            Self::Forward => Self::NewFlow,
            Self::Routed => Self::NewRoutedFlow,
            Self::Tunnelled => Self::NewTunnelledFlow,
            Self::Decapsulated => Self::NewFlow,
            Self::Direct => Self::NewDirectFlow,
            other => other,
        }
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
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_in_all_is_the_value() {
        for (index, outcome) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, index, "{}", outcome.as_str());
        }
    }
}
