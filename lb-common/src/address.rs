use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bytemuck::{Pod, Zeroable};

/// An IP address of either family in network byte order; IPv4 is v4-mapped (`::ffff:a.b.c.d`, RFC 4291 §2.5.5.2),
/// so that one map and one code path serve both families.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Pod, Zeroable)]
pub struct Address {
    octets: [u8; 16],
}

const _: () = assert!(size_of::<Address>() == 16);

impl Address {
    /// The v4-mapped form of four octets in network byte order.
    #[inline(always)]
    pub const fn from_v4(v4: [u8; 4]) -> Self {
        Self { octets: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, v4[0], v4[1], v4[2], v4[3]] }
    }

    /// Sixteen octets in network byte order.
    #[inline(always)]
    pub const fn from_v6(octets: [u8; 16]) -> Self {
        Self { octets }
    }

    /// Whether this is an IPv4 address.
    #[inline(always)]
    pub fn is_v4(&self) -> bool {
        let o = &self.octets;
        u64::from_ne_bytes([o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]]) == 0
            && u32::from_ne_bytes([o[8], o[9], o[10], o[11]]) == u32::from_ne_bytes([0, 0, 0xff, 0xff])
    }

    /// The four octets of an IPv4 address; meaningless when [`Self::is_v4`] is false.
    #[inline(always)]
    pub const fn v4_octets(&self) -> [u8; 4] {
        [self.octets[12], self.octets[13], self.octets[14], self.octets[15]]
    }

    /// All sixteen octets, network byte order.
    #[inline(always)]
    pub const fn octets(&self) -> &[u8; 16] {
        &self.octets
    }
}

impl From<IpAddr> for Address {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => Self::from_v4(v4.octets()),
            IpAddr::V6(v6) => Self::from_v6(v6.octets()),
        }
    }
}

impl From<Address> for IpAddr {
    fn from(address: Address) -> Self {
        if address.is_v4() {
            Self::V4(Ipv4Addr::from(address.v4_octets()))
        } else {
            Self::V6(Ipv6Addr::from(address.octets))
        }
    }
}

impl core::fmt::Display for Address {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        IpAddr::from(*self).fmt(f)
    }
}

impl core::fmt::Debug for Address {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        core::fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_survive_the_round_trip() {
        for text in ["192.0.2.1", "0.0.0.0", "2001:db8::1", "::1", "::"] {
            let ip: IpAddr = text.parse().expect("a literal address");
            let address = Address::from(ip);
            assert_eq!(IpAddr::from(address), ip);
            assert_eq!(address.is_v4(), ip.is_ipv4());
        }
    }
}

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for Address {}
