//! Parses addresses and networks as Kubernetes does for stored objects: numbers with leading zeros are decimal, because
//! API servers accepted such addresses for years. Also converts addresses to numbers and back.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use crate::family::Family;

/// An address as a number: of 32 bits for IPv4, of 128 bits for IPv6.
pub(crate) fn number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(v4) => u32::from(v4).into(),
        IpAddr::V6(v6) => v6.into(),
    }
}

/// The inverse of [`number`] for a family. A number of more than 32 bits always gives an IPv6 address.
pub(crate) fn address(family: Family, number: u128) -> IpAddr {
    match (family, u32::try_from(number)) {
        (Family::V4, Ok(v4)) => Ipv4Addr::from(v4).into(),
        (Family::V4, Err(_)) | (Family::V6, _) => Ipv6Addr::from(number).into(),
    }
}

/// Parses an address as Go's `ParseIPSloppy` does: an IPv4-mapped IPv6 address becomes IPv4.
pub(crate) fn parse_ip(text: &str) -> Option<IpAddr> {
    match text.parse::<IpAddr>() {
        Ok(ip) => Some(ip.to_canonical()),
        Err(_) => parse_v4(text).map(IpAddr::V4),
    }
}

/// Parses a network as Go's `ParseCIDRSloppy` does, and drops the host bits.
pub(crate) fn parse_network(text: &str) -> Option<IpNet> {
    let (address, prefix) = text.split_once('/')?;
    let address = address.parse::<IpAddr>().ok().or_else(|| parse_v4(address).map(IpAddr::V4))?;
    Some(IpNet::new(address, decimal(prefix)?).ok()?.trunc())
}

fn parse_v4(text: &str) -> Option<Ipv4Addr> {
    let mut bytes = [0; 4];
    let mut parts = text.split('.');
    for byte in &mut bytes {
        *byte = decimal(parts.next()?)?;
    }
    parts.next().is_none().then(|| bytes.into())
}

fn decimal(text: &str) -> Option<u8> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if digits { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leading_zeros_are_decimal() {
        for (text, ip) in [
            ("10.9.8.7", Some("10.9.8.7")),
            ("172.030.099.011", Some("172.30.99.11")),
            ("::ffff:1.2.3.4", Some("1.2.3.4")),
            ("2001:db8::0f", Some("2001:db8::f")),
            ("1.2.3", None),
            ("1.2.3.4.5", None),
            ("1.2.3.256", None),
            ("1.2.+3.4", None),
            ("1.2..4", None),
            ("", None),
        ] {
            assert_eq!(parse_ip(text), ip.map(|ip| ip.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn networks_lose_their_host_part() {
        for (text, network) in [
            ("203.0.113.007/025", Some("203.0.113.0/25")),
            ("0.0.0.0/0", Some("0.0.0.0/0")),
            ("2001:db8::1/64", Some("2001:db8::/64")),
            ("10.0.0.0/33", None),
            ("10.0.0.0", None),
            ("10.0.0.0/+8", None),
            ("10.0.0/8", None),
        ] {
            assert_eq!(parse_network(text), network.map(|network| network.parse().unwrap()), "{text}");
        }
    }
}
