use bytemuck::{Pod, Zeroable};

use crate::{Address, layout::describe};

/// Networks in one list of [`Settings`].
pub const MAX_NETWORKS: usize = 16;

/// Value of `SETTINGS`: what holds for every packet of the node.
///
/// The map has two slots; `SETTINGS_SLOT` says which of them counts. The agent writes the other one, then switches: no
/// program sees half of a change.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Settings {
    /// Sources inside the cluster: what kube-proxy's `--detect-local-mode` calls local traffic.
    pub inside: Networks,
    /// Ranges of cluster IPs: where ports that no service has may be rejected, and addresses that nobody has dropped.
    pub service_ranges: Networks,
    /// Who may send packets through a tunnel to backends on this node.
    pub peers: Networks,
    /// Source of masqueraded IPv4 packets where the routing table names none, and of those in a tunnel.
    pub source_v4: Address,
    /// Source of masqueraded IPv6 packets where the routing table names none, and of those in a tunnel.
    pub source_v6: Address,
    /// First source port of masqueraded packets, host byte order.
    pub first_port: u16,
    /// Number of source ports of masqueraded packets, from `first_port` on; 0 as long as there are no settings.
    pub ports: u16,
    /// See [`settings_flags`].
    pub flags: u32,
}

/// Bits of [`Settings::flags`].
pub mod settings_flags {
    /// What is sent to an address of [`service_ranges`](super::Settings::service_ranges) that is not in `VIPS` is dropped.
    pub const DROP_UNKNOWN_VIPS: u32 = 1;
    /// New flows through a tunnel to other nodes take UDP (GUE), else IP in IP.
    pub const GUE: u32 = 2;
}

const _: () = assert!(size_of::<Settings>() == 3 * size_of::<Networks>() + 40);

describe!(Settings {
    inside.count,
    inside.networks,
    service_ranges.count,
    service_ranges.networks,
    peers.count,
    peers.networks,
    source_v4,
    source_v6,
    first_port,
    ports,
    flags,
});

/// A short list of networks of both families.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Networks {
    /// How many there are.
    pub count: u32,
    /// The networks; zeros after the first `count`.
    pub networks: [Network; MAX_NETWORKS],
}

/// A network: address and mask.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Network {
    /// The network's address; v4-mapped for IPv4. Bits outside of the mask are 0.
    pub address: Address,
    /// The bits that count; the upper 96 all do for IPv4.
    pub mask: Address,
}

const _: () = assert!(size_of::<Network>() == 32);

impl Network {
    /// The network `address/prefix`; the prefix counts in the address's own family.
    pub fn new(address: Address, prefix: u8) -> Self {
        let family = if address.is_v4() { 96 } else { 0 };
        let bits = u32::from(prefix) + family;
        let mask = u128::MAX.checked_shl(128_u32.saturating_sub(bits)).unwrap_or(0);
        let address = u128::from_be_bytes(*address.octets()) & mask;
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
    pub fn contain(&self, address: &Address) -> bool {
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
    fn a_network_contains_what_has_its_prefix() {
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
    fn bits_outside_of_the_prefix_do_not_count() {
        assert_eq!(Network::new(ip("10.96.3.4"), 16), Network::new(ip("10.96.0.0"), 16));
    }

    #[test]
    fn an_empty_list_contains_nothing() {
        assert!(!Networks::new([]).contain(&ip("::")));
        let list = Networks::new([Network::new(ip("10.0.0.0"), 8), Network::new(ip("fd00::"), 8)]);
        assert!(
            list.contain(&ip("10.1.2.3")) && list.contain(&ip("fdff::1")) && !list.contain(&ip("11.0.0.1"))
        );
        let many = Networks::new((0..40).map(|n| Network::new(Address::from_v4([n, 0, 0, 0]), 8)));
        assert_eq!(many.count as usize, MAX_NETWORKS);
    }
}
