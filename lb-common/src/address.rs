use core::{
    cmp::Ordering,
    hash::{Hash, Hasher},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use bytemuck::{Pod, Zeroable};

/// An IP address of either family in network byte order; IPv4 is v4-mapped (`::ffff:a.b.c.d`, RFC 4291 §2.5.5.2),
/// so that one map and one code path serve both families.
///
/// Aligned to 4 bytes: BPF has no unaligned access to its stack, so LLVM would copy a less aligned value byte by byte.
#[repr(C, align(4))]
#[derive(Clone, Copy, Default, Pod, Zeroable)]
pub struct Address {
    bytes: [u8; 16],
}

const _: () = assert!(size_of::<Address>() == 16);

/// Third word of a v4-mapped address as it lies in memory.
const V4_MAPPED: u32 = u32::from_ne_bytes([0, 0, 0xff, 0xff]);

impl Address {
    /// No address: all bytes are 0. (An `Option` on the stack of a BPF program would hold undefined bytes, which the
    /// verifier refuses.)
    pub const NONE: Self = Self::from_v6([0; 16]);

    /// The v4-mapped form of four bytes in network byte order.
    #[inline(always)]
    pub fn from_v4(v4: [u8; 4]) -> Self {
        Self::from_v4_word(u32::from_ne_bytes(v4))
    }

    /// The v4-mapped form of an IPv4 address that was read from memory as one word.
    #[inline(always)]
    pub fn from_v4_word(word: u32) -> Self {
        Self { bytes: bytemuck::must_cast([0, 0, V4_MAPPED, word]) }
    }

    /// The address whose sixteen bytes were read from memory as four words.
    #[inline(always)]
    pub fn from_words(words: [u32; 4]) -> Self {
        Self { bytes: bytemuck::must_cast(words) }
    }

    /// The address with these sixteen bytes, in network byte order.
    #[inline(always)]
    pub const fn from_v6(bytes: [u8; 16]) -> Self {
        Self { bytes }
    }

    /// Whether this is an IPv4 address.
    #[inline(always)]
    pub fn is_v4(&self) -> bool {
        let [a, b, c, _]: [u32; 4] = bytemuck::must_cast(self.bytes);
        a | b == 0 && c == V4_MAPPED
    }

    /// The four bytes of an IPv4 address; meaningless when [`Self::is_v4`] is false.
    #[inline(always)]
    pub fn v4_bytes(&self) -> [u8; 4] {
        self.v4_word().to_ne_bytes()
    }

    /// An IPv4 address as it lies in memory; meaningless when [`Self::is_v4`] is false.
    #[inline(always)]
    pub fn v4_word(&self) -> u32 {
        let [_, _, _, word]: [u32; 4] = bytemuck::must_cast(self.bytes);
        word
    }

    /// The address as four words as they lie in memory.
    #[inline(always)]
    pub fn words(&self) -> [u32; 4] {
        bytemuck::must_cast(self.bytes)
    }

    /// All sixteen bytes, network byte order.
    #[inline(always)]
    pub const fn bytes(&self) -> &[u8; 16] {
        &self.bytes
    }
}

impl Address {
    /// The address as words that sort in the same order as addresses. Comparing words rather than bytes keeps the BPF
    /// programs free of calls to `memcmp`.
    #[inline(always)]
    fn order(&self) -> [u32; 4] {
        let words: [u32; 4] = bytemuck::must_cast(self.bytes);
        words.map(u32::from_be)
    }
}

impl PartialEq for Address {
    #[inline(always)]
    fn eq(&self, other: &Self) -> bool {
        let ([a, b, c, d], [e, f, g, h]) = (self.order(), other.order());
        (a ^ e) | (b ^ f) | (c ^ g) | (d ^ h) == 0
    }
}

impl Eq for Address {}

impl Hash for Address {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.bytes.hash(state);
    }
}

impl PartialOrd for Address {
    #[inline(always)]
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Address {
    #[inline(always)]
    fn cmp(&self, other: &Self) -> Ordering {
        let (left, right) = (self.order(), other.order());
        for index in 0..4 {
            if left[index] != right[index] {
                return left[index].cmp(&right[index]);
            }
        }
        Ordering::Equal
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
            Self::V4(Ipv4Addr::from(address.v4_bytes()))
        } else {
            Self::V6(Ipv6Addr::from(address.bytes))
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

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for Address {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_sort_as_their_bytes_do() {
        let sorted = ["192.0.2.1", "192.0.2.2", "198.51.100.0", "2001:db8::1", "2001:db8::1:0", "2001:db9::"];
        let addresses = sorted.map(|text| Address::from(text.parse::<IpAddr>().expect("a literal address")));
        for pair in addresses.windows(2) {
            assert!(pair[0] < pair[1] && pair[0].bytes() < pair[1].bytes(), "{:?}", pair);
        }
    }

    #[test]
    fn both_families_survive_a_round_trip() {
        for text in ["192.0.2.1", "0.0.0.0", "2001:db8::1", "::1", "::"] {
            let ip: IpAddr = text.parse().expect("a literal address");
            let address = Address::from(ip);
            assert_eq!(IpAddr::from(address), ip);
            assert_eq!(address.is_v4(), ip.is_ipv4());
        }
    }
}
