//! Addresses of a bench node and its neighbours, in each family.
//!
//! | host | IPv4 | IPv6 |
//! |---|---|---|
//! | the client pod | 10.244.1.2 | fd00:10:244:1::2 |
//! | the server pod | 10.244.1.3 and 10.244.64.0/18 | fd00:10:244:1::3 and fd00:10:244:64::/64 |
//! | external client — node | 198.51.100.2 — .1 | fd00:198:51:100::2 — ::1 |
//! | node — the other node | 172.18.0.1 — .2 | fd00:172:18::1 — ::2 |
//! | pods of the other node | 10.244.128.0/18 | fd00:10:244:128::/64 |

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The IP family of a benchmark run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) enum Family {
    V4,
    V6,
}

/// The first addresses of a network, for IPv4 and IPv6.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Network(pub(crate) Ipv4Addr, pub(crate) Ipv6Addr);

/// Pods of the node: endpoints of the Service that internal clients use.
pub(crate) const PODS: Network =
    Network(Ipv4Addr::new(10, 244, 64, 0), Ipv6Addr::new(0xfd00, 0x10, 0x244, 0x64, 0, 0, 0, 0));
/// Pods of the other node: endpoints of the Service that external clients use.
pub(crate) const REMOTE_PODS: Network =
    Network(Ipv4Addr::new(10, 244, 128, 0), Ipv6Addr::new(0xfd00, 0x10, 0x244, 0x128, 0, 0, 0, 0));
pub(crate) const CLUSTER_IPS: Network =
    Network(Ipv4Addr::new(10, 96, 0, 0), Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0));
pub(crate) const LOAD_BALANCERS: Network =
    Network(Ipv4Addr::new(192, 0, 2, 0), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0));
/// Endpoints of the Services that no client uses.
pub(crate) const ELSEWHERE: Network =
    Network(Ipv4Addr::new(10, 245, 0, 0), Ipv6Addr::new(0xfd00, 0x10, 0x245, 0, 0, 0, 0, 0));
/// The node's addresses towards the external client and towards the other node.
pub(crate) const NODE: [Network; 2] = [
    Network(Ipv4Addr::new(198, 51, 100, 1), Ipv6Addr::new(0xfd00, 0x198, 0x51, 0x100, 0, 0, 0, 1)),
    Network(Ipv4Addr::new(172, 18, 0, 1), Ipv6Addr::new(0xfd00, 0x172, 0x18, 0, 0, 0, 0, 1)),
];

impl Network {
    /// Address number `n` of the network.
    pub(crate) fn at(self, family: Family, n: u32) -> IpAddr {
        match family {
            Family::V4 => Ipv4Addr::from(u32::from(self.0) + n).into(),
            Family::V6 => Ipv6Addr::from(u128::from(self.1) + u128::from(n)).into(),
        }
    }
}

impl Family {
    /// Selects the argument for this family.
    pub(crate) const fn pick<T: Copy>(self, v4: T, v6: T) -> T {
        match self {
            Self::V4 => v4,
            Self::V6 => v6,
        }
    }

    /// The name, `IPv4` or `IPv6`.
    pub(crate) const fn name(self) -> &'static str {
        self.pick("IPv4", "IPv6")
    }

    /// Network of all pods in the cluster, for `--cluster-cidr`.
    pub(crate) const fn cluster_cidr(self) -> &'static str {
        self.pick("10.244.0.0/16", "fd00:10:244::/48")
    }

    /// Range of all cluster IPs.
    pub(crate) const fn service_cidr(self) -> &'static str {
        self.pick("10.96.0.0/12", "fd00:10:96::/112")
    }
}
