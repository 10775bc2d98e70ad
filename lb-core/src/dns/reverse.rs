//! Names for addresses, below `in-addr.arpa` and `ip6.arpa`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

/// A name below `in-addr.arpa` or `ip6.arpa`, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reverse {
    /// The name of one address.
    Address(IpAddr),
    /// The name of a network: it has too few labels for an address.
    Network(IpNet),
    /// Not a valid reverse name: a label is no valid number, or there are too many labels. The network is that of the
    /// valid labels at the end of the name.
    Malformed(IpNet),
}

impl Reverse {
    /// Parses a name whose labels are in lower case; `None` if it is below neither `in-addr.arpa` nor `ip6.arpa`.
    pub(super) fn parse(labels: &[&[u8]]) -> Option<Self> {
        match labels {
            [rest @ .., b"in-addr", b"arpa"] => Some(Self::read(rest, 4, octet, v4)),
            [rest @ .., b"ip6", b"arpa"] => Some(Self::read(rest, 32, nibble, v6)),
            _ => None,
        }
    }

    /// Reads up to `most` labels as numbers, from the right.
    fn read(
        labels: &[&[u8]],
        most: usize,
        digit: fn(&[u8]) -> Option<u8>,
        network: fn(&[u8]) -> Option<IpNet>,
    ) -> Self {
        let digits: Vec<u8> = labels.iter().rev().map_while(|label| digit(label)).take(most).collect();
        let Some(network) = network(&digits) else { return Self::Malformed(IpNet::default()) };
        if digits.len() < labels.len() {
            Self::Malformed(network)
        } else if digits.len() == most {
            Self::Address(network.addr())
        } else {
            Self::Network(network)
        }
    }

    const fn network(&self) -> Option<IpNet> {
        match self {
            Self::Address(_) => None,
            Self::Network(network) | Self::Malformed(network) => Some(*network),
        }
    }

    /// Whether the range contains the addresses of this name and of all names below it.
    pub(super) fn is_within(&self, range: &IpNet) -> bool {
        match self {
            Self::Address(address) => range.contains(address),
            Self::Network(network) | Self::Malformed(network) => range.contains(network),
        }
    }
}

/// The largest zone that contains the name and lies inside the range, without a dot at its end. A range whose prefix
/// ends inside a label, such as a /12, consists of several zones.
pub(super) fn zone(range: &IpNet, name: &Reverse) -> String {
    let address = match name {
        Reverse::Address(address) => *address,
        Reverse::Network(_) | Reverse::Malformed(_) => name.network().map_or(range.addr(), |net| net.addr()),
    };
    match address {
        IpAddr::V4(address) => {
            let labels = usize::from(range.prefix_len()).div_ceil(8);
            let octets = address.octets();
            let labels: String = octets.iter().take(labels).rev().map(|octet| format!("{octet}.")).collect();
            format!("{labels}in-addr.arpa")
        }
        IpAddr::V6(address) => {
            let labels = usize::from(range.prefix_len()).div_ceil(4);
            let nibbles = address.octets().into_iter().flat_map(|byte| [byte >> 4, byte & 15]);
            let labels: Vec<String> = nibbles.take(labels).map(|nibble| format!("{nibble:x}.")).collect();
            format!("{}ip6.arpa", labels.into_iter().rev().collect::<String>())
        }
    }
}

/// Parses a decimal number of at most 255, without leading zeros.
fn octet(label: &[u8]) -> Option<u8> {
    let text = std::str::from_utf8(label).ok()?;
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}

/// Parses one hexadecimal digit.
fn nibble(label: &[u8]) -> Option<u8> {
    let [digit] = label else { return None };
    char::from(*digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok())
}

fn v4(octets: &[u8]) -> Option<IpNet> {
    let mut address = [0; 4];
    address.iter_mut().zip(octets).for_each(|(byte, octet)| *byte = *octet);
    let prefix = u8::try_from(octets.len() * 8).ok()?;
    IpNet::new(Ipv4Addr::from(address).into(), prefix).ok()
}

fn v6(nibbles: &[u8]) -> Option<IpNet> {
    let mut address = [0_u8; 16];
    for (index, nibble) in nibbles.iter().enumerate() {
        let shift = if index % 2 == 0 { 4 } else { 0 };
        *address.get_mut(index / 2)? |= nibble << shift;
    }
    let prefix = u8::try_from(nibbles.len() * 4).ok()?;
    IpNet::new(Ipv6Addr::from(address).into(), prefix).ok()
}
