//! A range of addresses, as a pool's `spec.addresses` contains them.

use std::{fmt, net::IpAddr, str::FromStr};

use ipnet::{IpNet, Ipv4Subnets, Ipv6Subnets};

use crate::{
    family::Family,
    ip::{address, number, parse_ip, parse_network},
};

/// Consecutive addresses of one family, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AddressRange {
    family: Family,
    /// The first address as a number of 32 bits (IPv4) or 128 bits (IPv6).
    first: u128,
    /// The last address as a number of 32 bits (IPv4) or 128 bits (IPv6).
    last: u128,
}

/// Why a text is no range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    /// The text is neither a CIDR nor two addresses with a hyphen.
    #[error("must be a CIDR (192.0.2.0/24; 192.0.2.1/32 for one address) or a range (192.0.2.10-192.0.2.20)")]
    Syntax,
    /// First and last address are of different families.
    #[error("the first and the last address must be of one family")]
    Families,
    /// The first address is greater than the last.
    #[error("the first address must not be above the last")]
    Reversed,
}

impl AddressRange {
    /// The IP family of the addresses.
    pub const fn family(&self) -> Family {
        self.family
    }

    /// Whether the range contains the address.
    pub fn contains(&self, ip: IpAddr) -> bool {
        Family::of(ip) == self.family && (self.first..=self.last).contains(&number(ip))
    }

    /// Whether the ranges have an address in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.family == other.family && self.first <= other.last && other.first <= self.last
    }

    /// The lowest address of the range.
    pub fn first(&self) -> IpAddr {
        address(self.family, self.first)
    }

    /// The highest address of the range.
    pub fn last(&self) -> IpAddr {
        address(self.family, self.last)
    }

    /// Number of addresses in the range; for the range of all IPv6 addresses, one less than that (`u128::MAX`).
    pub const fn size(&self) -> u128 {
        (self.last - self.first).saturating_add(1)
    }

    /// Number of addresses in the range whose last byte is `value`.
    pub(super) fn count_with_last_byte(&self, value: u8) -> u128 {
        // The number of addresses below `end` whose last byte is `value`: one in each 256.
        let below = |end: u128| (end + 255 - u128::from(value)) / 256;
        below(self.last + 1) - below(self.first)
    }

    /// The smallest list of networks that make up the range, lowest first.
    pub fn networks(&self) -> impl Iterator<Item = IpNet> + use<> {
        let (first, last) = (self.first(), self.last());
        let v4 = if let (IpAddr::V4(first), IpAddr::V4(last)) = (first, last) {
            Some((first, last))
        } else {
            None
        };
        let v6 = if let (IpAddr::V6(first), IpAddr::V6(last)) = (first, last) {
            Some((first, last))
        } else {
            None
        };
        let v4 = v4.into_iter().flat_map(|(first, last)| Ipv4Subnets::new(first, last, 0)).map(IpNet::from);
        let v6 = v6.into_iter().flat_map(|(first, last)| Ipv6Subnets::new(first, last, 0)).map(IpNet::from);
        v4.chain(v6)
    }

    /// All addresses of the range, lowest first.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let family = self.family;
        (self.first..=self.last).map(move |number| address(family, number))
    }

    /// The addresses of the range above `ip`, lowest first. `ip` must be in the range.
    pub fn addresses_above(&self, ip: IpAddr) -> impl Iterator<Item = IpAddr> + use<> {
        let family = self.family;
        (number(ip).saturating_add(1)..=self.last).map(move |number| address(family, number))
    }
}

impl From<IpNet> for AddressRange {
    fn from(net: IpNet) -> Self {
        let (first, last) = (number(net.network()), number(net.broadcast()));
        Self { family: Family::of(net.addr()), first, last }
    }
}

impl FromStr for AddressRange {
    type Err = RangeError;

    /// Parses a CIDR, or two addresses with a hyphen between them. As in MetalLB, a CIDR stands for its whole network:
    /// `198.51.100.10/24` has 256 addresses.
    fn from_str(text: &str) -> Result<Self, RangeError> {
        if let Some(net) = parse_network(text.trim()) {
            return Ok(net.into());
        }
        let ends = text.split_once('-').and_then(|(first, last)| {
            let (first, last) = (parse_ip(first.trim())?, parse_ip(last.trim())?);
            Some((first, last))
        });
        let (first, last) = ends.ok_or(RangeError::Syntax)?;
        let family = Family::of(first);
        if family != Family::of(last) {
            return Err(RangeError::Families);
        }
        let (first, last) = (number(first), number(last));
        if first > last { Err(RangeError::Reversed) } else { Ok(Self { family, first, last }) }
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first(), self.last())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_has_the_addresses_that_its_text_says() {
        for (text, size, first, last) in [
            ("192.0.2.0/24", 256, "192.0.2.0", "192.0.2.255"),
            ("198.51.100.10/24", 256, "198.51.100.0", "198.51.100.255"),
            ("192.0.2.7/32", 1, "192.0.2.7", "192.0.2.7"),
            ("192.0.2.10-192.0.2.20", 11, "192.0.2.10", "192.0.2.20"),
            (" 192.0.2.10 - 192.0.2.10 ", 1, "192.0.2.10", "192.0.2.10"),
            ("2001:db8::/126", 4, "2001:db8::", "2001:db8::3"),
            ("2001:db8::a-2001:db8::f", 6, "2001:db8::a", "2001:db8::f"),
        ] {
            let range: AddressRange = text.parse().unwrap();
            let (first, last): (IpAddr, IpAddr) = (first.parse().unwrap(), last.parse().unwrap());
            assert_eq!((range.addresses().count(), range.addresses().next()), (size, Some(first)), "{text}");
            assert_eq!(range.addresses().last(), Some(last), "{text}");
            assert!(range.contains(first) && range.contains(last), "{text}");
        }
    }

    #[test]
    fn networks_make_up_the_range() {
        for (text, networks) in [
            ("192.0.2.0/24", "192.0.2.0/24"),
            ("192.0.2.10-192.0.2.20", "192.0.2.10/31 192.0.2.12/30 192.0.2.16/30 192.0.2.20/32"),
            ("2001:db8::1-2001:db8::4", "2001:db8::1/128 2001:db8::2/127 2001:db8::4/128"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("::/0", "::/0"),
        ] {
            let range: AddressRange = text.parse().unwrap();
            let found: Vec<String> = range.networks().map(|network| network.to_string()).collect();
            assert_eq!(found.join(" "), networks);
        }
    }

    #[test]
    fn addresses_with_a_last_byte_are_counted() {
        for (text, zeros, all_ones) in [
            ("192.0.2.0/24", 1, 1),
            ("192.0.2.1-192.0.2.254", 0, 0),
            ("192.0.2.254-192.0.3.1", 1, 1),
            ("192.0.2.255/32", 0, 1),
            ("10.0.0.0/16", 256, 256),
        ] {
            let range: AddressRange = text.parse().unwrap();
            assert_eq!(
                (range.count_with_last_byte(0), range.count_with_last_byte(255)),
                (zeros, all_ones),
                "{text}"
            );
        }
    }

    #[test]
    fn other_texts_are_refused_with_the_reason() {
        for (text, why) in [
            ("192.0.2.1", RangeError::Syntax),
            ("192.0.2.0/33", RangeError::Syntax),
            ("192.0.2.1-", RangeError::Syntax),
            ("", RangeError::Syntax),
            ("192.0.2.1-2001:db8::1", RangeError::Families),
            ("192.0.2.9-192.0.2.1", RangeError::Reversed),
        ] {
            assert_eq!(text.parse::<AddressRange>(), Err(why), "{text}");
        }
    }

    #[test]
    fn ranges_overlap_only_within_a_family() {
        let range = |text: &str| text.parse::<AddressRange>().unwrap();
        assert!(range("192.0.2.0/24").overlaps(&range("192.0.2.255-192.0.3.1")));
        assert!(!range("192.0.2.0/24").overlaps(&range("192.0.3.0/24")));
        // As numbers, the addresses of these two ranges overlap.
        assert!(!range("0.0.0.0/0").overlaps(&range("::/96")));
    }
}
