//! Packets and system calls to an address and port that no Service has.

use lb_common::{Outcome, Vip, vip_flags};

use super::admission::rejection;

/// The kind of an address at which no Service has the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Unlisted {
    /// Outside the ranges of cluster IPs: left untouched.
    OutOfRange = 0,
    /// In a range of cluster IPs, but of no Service: dropped.
    UnknownVip = 1,
    /// In a range of cluster IPs, but of no Service: left untouched, because the node does not drop such packets
    /// ([`settings_flags::DROP_UNKNOWN_VIPS`](lb_common::settings_flags::DROP_UNKNOWN_VIPS)).
    Unknown = 2,
    /// In a range of cluster IPs, but an address of the node or of a Service of type LoadBalancer, an external IP, or a
    /// cluster IP that another proxy serves: left untouched.
    NoClusterIp = 3,
    /// A cluster IP: rejected.
    ClusterIp = 4,
    /// A cluster IP, and the packet is a RST: dropped.
    StrayReset = 5,
}

impl Unlisted {
    /// Whether the packet, or system call, is rejected.
    #[inline(always)]
    pub const fn is_rejected(self) -> bool {
        matches!(self, Self::ClusterIp)
    }

    /// The outcome of a packet, or system call, to such an address.
    #[inline(always)]
    pub const fn outcome(self, protocol: u8) -> Outcome {
        match self {
            Self::OutOfRange | Self::Unknown | Self::NoClusterIp => Outcome::NoService,
            Self::UnknownVip => Outcome::UnknownVip,
            Self::StrayReset => Outcome::StrayReset,
            Self::ClusterIp => rejection(protocol),
        }
    }
}

/// The kind of an address at which no Service has the port. Packets to an unknown address in a range of cluster IPs are
/// dropped, if `drops_unknown` returns true, because they would follow the default route out of the cluster, or loop.
#[inline(always)]
pub fn unlisted(
    in_range: bool,
    vip: impl FnOnce() -> Option<Vip>,
    drops_unknown: impl FnOnce() -> bool,
    is_rst: bool,
) -> Unlisted {
    if !in_range {
        return Unlisted::OutOfRange;
    }
    match vip() {
        None if drops_unknown() => Unlisted::UnknownVip,
        None => Unlisted::Unknown,
        Some(vip) if vip.flags & vip_flags::CLUSTER_IP == 0 => Unlisted::NoClusterIp,
        Some(_) if is_rst => Unlisted::StrayReset,
        Some(_) => Unlisted::ClusterIp,
    }
}

#[cfg(test)]
mod tests {
    use lb_common::protocol::{TCP, UDP};

    use super::*;

    #[test]
    fn unlisted_addresses_are_dropped_rejected_or_passed() {
        let (cluster, other) =
            (Some(Vip { flags: vip_flags::CLUSTER_IP }), Some(Vip { flags: vip_flags::ECHO }));
        for (in_range, vip, drops, is_rst, expected, outcome) in [
            (false, cluster, true, false, Unlisted::OutOfRange, Outcome::NoService),
            (true, None, true, false, Unlisted::UnknownVip, Outcome::UnknownVip),
            (true, None, true, true, Unlisted::UnknownVip, Outcome::UnknownVip),
            (true, None, false, false, Unlisted::Unknown, Outcome::NoService),
            (true, other, true, false, Unlisted::NoClusterIp, Outcome::NoService),
            (true, other, true, true, Unlisted::NoClusterIp, Outcome::NoService),
            (true, cluster, true, false, Unlisted::ClusterIp, Outcome::RejectTcp),
            (true, cluster, false, true, Unlisted::StrayReset, Outcome::StrayReset),
        ] {
            let found = unlisted(in_range, || vip, || drops, is_rst);
            assert_eq!((found, found.outcome(TCP)), (expected, outcome));
        }
        assert_eq!(Unlisted::ClusterIp.outcome(UDP), Outcome::RejectUdp);
    }
}
