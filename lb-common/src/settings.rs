use bytemuck::{Pod, Zeroable};

use crate::{Address, layout::describe};

/// How many networks fit into one list of [`Settings`].
pub const MAX_NETWORKS: usize = 16;

/// Value of `SETTINGS`: the settings of the node that may change while the programs run.
///
/// The map has two slots; `SETTINGS_SLOT` selects one of them. The agent writes the other slot, then switches, so that
/// no program reads half of a change.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Settings {
    /// Sources of internal clients: the traffic that kube-proxy's `--detect-local-mode` calls local.
    pub internal: Networks,
    /// Ranges of cluster IPs. The programs reject packets to a cluster IP in these ranges at a port that no Service
    /// has. They may drop packets to an address in these ranges that no Service has
    /// ([`settings_flags::DROP_UNKNOWN_VIPS`]).
    pub service_ranges: Networks,
    /// Nodes that may send packets through a tunnel to backends on this node, in addition to the nodes in `PEERS`.
    pub peers: Networks,
    /// Networks whose external clients may use no frontend: the networks of `--deny-source`, and the networks behind
    /// IPsec policies.
    pub denied: Networks,
    /// Source of masqueraded IPv4 packets if the routing table names none, and outer source of IPv4 packets in a
    /// tunnel. Also the client address of the node's sockets, by which the programs check source ranges and apply
    /// affinity.
    pub source_v4: Address,
    /// Source of masqueraded IPv6 packets if the routing table names none, and outer source of IPv6 packets in a
    /// tunnel. Also the client address of the node's sockets, by which the programs check source ranges and apply
    /// affinity.
    pub source_v6: Address,
    /// First source port of masqueraded packets, host byte order.
    pub first_port: u16,
    /// Number of source ports of masqueraded packets, from `first_port` on; 0 until the agent has written settings.
    pub ports: u16,
    /// Bits of [`settings_flags`].
    pub flags: u32,
}

/// Bits of [`Settings::flags`].
pub mod settings_flags {
    /// Packets to an address in [`service_ranges`](super::Settings::service_ranges) that is not in `VIPS` are dropped.
    pub const DROP_UNKNOWN_VIPS: u32 = 1;
    /// The tunnels of new flows are GUE (over UDP); without this bit, they are IP in IP.
    pub const GUE: u32 = 2;
    /// The next hop of a packet depends only on its destination, its protocol and the device that it came in through:
    /// all policy rules send all packets to the tables of the kernel's own rules, and no route is multipath or limited
    /// to a source or TOS.
    pub const ROUTES_BY_DESTINATION: u32 = 4;
}

const _: () = assert!(size_of::<Settings>() == 4 * size_of::<Networks>() + 40);

describe!(Settings {
    internal.count = "inside.count",
    internal.networks = "inside.networks",
    service_ranges.count,
    service_ranges.networks,
    peers.count,
    peers.networks,
    denied.count,
    denied.networks,
    source_v4,
    source_v6,
    first_port,
    ports,
    flags,
});

impl Settings {
    /// Whether the agent has written these settings; the map has zeros before.
    #[inline(always)]
    pub const fn is_written(&self) -> bool {
        self.ports != 0
    }

    /// Whether packets to unused addresses in the ranges of cluster IPs are dropped.
    #[inline(always)]
    pub const fn drops_unknown_vips(&self) -> bool {
        self.flags & settings_flags::DROP_UNKNOWN_VIPS != 0
    }

    /// [`Self::source_v4`] or [`Self::source_v6`]; [`Address::NONE`] if the agent has set no address of this family.
    #[inline(always)]
    pub const fn source(&self, is_v4: bool) -> &Address {
        if is_v4 { &self.source_v4 } else { &self.source_v6 }
    }
}

/// A short list of networks of both families.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Networks {
    /// How many elements of the array are in use.
    pub count: u32,
    /// The networks; zeros after the first `count`.
    pub networks: [Network; MAX_NETWORKS],
}

/// A network: address and mask.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Network {
    /// The network's address; v4-mapped for IPv4. Bits outside the mask are 0.
    pub address: Address,
    /// The mask; for IPv4 the upper 96 bits are all set.
    pub mask: Address,
}

const _: () = assert!(size_of::<Network>() == 32);

impl Network {
    /// The network `address/prefix`; `prefix` is at most 32 for IPv4, although the address is v4-mapped.
    pub fn new(address: Address, prefix: u8) -> Self {
        let family = if address.is_v4() { 96 } else { 0 };
        let bits = u32::from(prefix) + family;
        let mask = u128::MAX.checked_shl(128_u32.saturating_sub(bits)).unwrap_or(0);
        let address = u128::from_be_bytes(*address.bytes()) & mask;
        Self { address: Address::from_v6(address.to_be_bytes()), mask: Address::from_v6(mask.to_be_bytes()) }
    }

    /// Whether the address is in the network.
    #[inline(always)]
    pub fn contains(&self, address: &Address) -> bool {
        let [a, b, c, d] = address.words();
        let [e, f, g, h] = self.address.words();
        let [i, j, k, l] = self.mask.words();
        ((a & i) ^ e) | ((b & j) ^ f) | ((c & k) ^ g) | ((d & l) ^ h) == 0
    }

    /// Whether the network contains IPv4 addresses only.
    pub(crate) fn is_v4(&self) -> bool {
        self.address.is_v4() && self.mask.words()[..3] == [u32::MAX; 3]
    }

    /// Whether the network contains IPv4 addresses: it is an IPv4 network, or an IPv6 network that contains all
    /// v4-mapped addresses.
    pub(crate) fn reaches_v4(&self) -> bool {
        self.is_v4() || self.contains(&Address::from_v4([0; 4]))
    }

    /// The smallest network that contains both networks.
    pub(crate) fn union(&self, other: &Self) -> Self {
        let bits = |address: &Address| u128::from_be_bytes(*address.bytes());
        let differs = bits(&self.address) ^ bits(&other.address);
        let equal = u128::MAX.checked_shl(128 - differs.leading_zeros()).unwrap_or(0);
        let mask = bits(&self.mask) & bits(&other.mask) & equal;
        let address = bits(&self.address) & mask;
        Self { address: Address::from_v6(address.to_be_bytes()), mask: Address::from_v6(mask.to_be_bytes()) }
    }
}

impl Networks {
    /// The first [`MAX_NETWORKS`] of these networks.
    pub fn new(networks: impl IntoIterator<Item = Network>) -> Self {
        let mut list = Self::zeroed();
        for (place, network) in list.networks.iter_mut().zip(networks) {
            *place = network;
            list.count += 1;
        }
        list
    }

    /// Whether the address is in one of the networks.
    #[inline(always)]
    pub fn contains(&self, address: &Address) -> bool {
        let mut left = self.count;
        for network in &self.networks {
            if left == 0 {
                return false;
            }
            if network.contains(address) {
                return true;
            }
            left -= 1;
        }
        false
    }
}

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for Settings {}

#[cfg(test)]
mod tests {
    use core::net::IpAddr;

    use super::*;

    fn ip(text: &str) -> Address {
        text.parse::<IpAddr>().expect("a literal address").into()
    }

    #[test]
    fn network_contains_addresses_with_its_prefix() {
        for (network, prefix, inside, outside) in [
            ("10.96.0.0", 12, "10.111.255.255", "10.112.0.0"),
            ("10.96.0.7", 32, "10.96.0.7", "10.96.0.6"),
            ("0.0.0.0", 0, "192.0.2.1", "::1"),
            ("fd00:10:96::", 112, "fd00:10:96::ffff", "fd00:10:96::1:0"),
            ("::", 0, "2001:db8::1", "fd00:10:96::"),
        ] {
            let network = Network::new(ip(network), prefix);
            assert!(network.contains(&ip(inside)), "{inside}");
            assert_eq!(
                network.contains(&ip(outside)),
                prefix == 0 && !ip(outside).is_v4() && inside.contains(':')
            );
        }
    }

    #[test]
    fn bits_after_the_prefix_are_ignored() {
        assert_eq!(Network::new(ip("10.96.3.4"), 16), Network::new(ip("10.96.0.0"), 16));
    }

    #[test]
    fn empty_list_contains_nothing() {
        assert!(!Networks::new([]).contains(&ip("::")));
        let list = Networks::new([Network::new(ip("10.0.0.0"), 8), Network::new(ip("fd00::"), 8)]);
        assert!(
            list.contains(&ip("10.1.2.3"))
                && list.contains(&ip("fdff::1"))
                && !list.contains(&ip("11.0.0.1"))
        );
        let many = Networks::new((0..40).map(|n| Network::new(Address::from_v4([n, 0, 0, 0]), 8)));
        assert_eq!(many.count as usize, MAX_NETWORKS);
    }
}
