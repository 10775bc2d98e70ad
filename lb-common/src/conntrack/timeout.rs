//! The timeouts of idle TCP, UDP and SCTP flows. No setting changes them.

use super::Phase;

impl Phase {
    /// The timeout of a flow in this phase: seconds without a packet after which it expires.
    ///
    /// The timeouts of established and half-closed TCP connections are those that kube-proxy sets (24 h, 1 h). The
    /// others are nf_conntrack's defaults for TCP and UDP, except that of `Opening`, which is shorter: it limits how
    /// many entries a SYN flood can hold, and still spans the gap between two retransmissions of a SYN. SCTP has the
    /// timeouts of TCP.
    ///
    /// The UDP timeout of `Stream` also applies to the backends that UDP sockets keep:
    /// [`SocketBackend::is_valid`](crate::SocketBackend::is_valid). CONTRIBUTING.md has the recipe for a change.
    pub const fn timeout_seconds(self) -> u32 {
        match self {
            // TCP and SCTP.
            Self::Opening => 60,
            Self::Accepted => 60,
            Self::Established => 24 * 60 * 60,
            Self::HalfClosed => 60 * 60,
            Self::TimeWait => 120,
            Self::Closed => 10,
            // The UDP timeouts. Those of nf_conntrack are `nf_conntrack_udp_timeout` and `_udp_timeout_stream`.
            Self::Unreplied => 30,
            Self::Replied => 30,
            Self::Stream => 120,
        }
    }

    /// The timeout of an evictable flow in this phase under the highest pressure, in seconds. Clients retransmit a lost
    /// SYN after one second, and again two seconds later: 3 s span these gaps. A flow that seems to be in use has 10 s,
    /// because it may be silent for longer.
    pub const fn least_timeout_seconds(self) -> u32 {
        match self {
            Self::Established | Self::HalfClosed | Self::Stream => 10,
            Self::Opening
            | Self::Accepted
            | Self::TimeWait
            | Self::Closed
            | Self::Unreplied
            | Self::Replied => 3,
        }
    }
}

/// The least timeout without pressure: twice the 5 s between two GC runs. So at least one run, which also sums the
/// traffic of Services, reads each flow between its last packet and its expiry.
const LEAST_SECONDS: u32 = 10;

const _: () = {
    let mut index = 0;
    while index < Phase::ALL.len() {
        let phase = Phase::ALL[index];
        assert!(phase.timeout_seconds() >= LEAST_SECONDS, "a timeout is below LEAST_SECONDS");
        assert!(
            phase.timeout_seconds() > phase.least_timeout_seconds() || !phase.is_evictable(),
            "pressure does not shorten a timeout"
        );
        index += 1;
    }
};
