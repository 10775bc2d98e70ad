//! The rules of the API server for single values, and for fields that depend on each other (`pkg/apis/core/validation`,
//! `pkg/apis/discovery/validation`), and the texts of its errors (`k8s.io/apimachinery/pkg/util/validation/field`).
//! Both sources use them: the folder of manifests rejects an object that breaks a rule; the source of API objects
//! leaves out an invalid part that kube-proxy also leaves out, and rejects the object for any other error.

pub mod cluster_ips;
pub mod names;
pub mod service_ports;

use std::{
    fmt::{Debug, Display},
    net::IpAddr,
};

use ipnet::IpNet;

use crate::{
    ip::{parse_ip, parse_network},
    protocol::Protocol,
};

/// The valid values of `spec.type` of a Service.
pub const SERVICE_TYPES: [&str; 4] = ["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"];
/// The valid values of `protocol` of a port.
pub const PROTOCOLS: [&str; 3] = ["SCTP", "TCP", "UDP"];
/// The valid values of `spec.internalTrafficPolicy` and `spec.externalTrafficPolicy` of a Service.
pub const TRAFFIC_POLICIES: [&str; 2] = ["Cluster", "Local"];
/// The valid values of `spec.sessionAffinity` of a Service.
pub const SESSION_AFFINITIES: [&str; 2] = ["ClientIP", "None"];
/// The valid values of `status.loadBalancer.ingress[].ipMode` of a Service.
pub const IP_MODES: [&str; 2] = ["Proxy", "VIP"];
/// The valid values of `addressType` of an EndpointSlice.
pub const ADDRESS_TYPES: [&str; 3] = ["FQDN", "IPv4", "IPv6"];

/// The error for a text that is no IP address.
pub const NO_IP: &str = "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)";
const NO_CIDR: &str = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)";

const MAPPED_IP: &str = "must not be an IPv4-mapped IPv6 address";
const PORT_RANGE: &str = "must be between 1 and 65535, inclusive";
const AFFINITY_RANGE: &str = "must be greater than 0 and less than 86400";
const MAX_AFFINITY_SECONDS: i32 = 86_400;

/// An error in a field of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// Path of the field, such as `spec.ports[0].port`.
    pub field: String,
    /// The error text, in the format of the API server's.
    pub why: String,
}

impl FieldError {
    fn new(field: impl Into<String>, why: String) -> Self {
        Self { field: field.into(), why }
    }
}

/// Checks that a value is set and is one of the supported ones.
///
/// # Errors
///
/// The API server's error text.
pub fn one_of(value: &str, supported: &[&str]) -> Result<(), String> {
    if value.is_empty() {
        Err(required(""))
    } else if supported.contains(&value) {
        Ok(())
    } else {
        Err(unsupported(value, supported))
    }
}

/// Checks the number of a port.
///
/// # Errors
///
/// Why the number is no port.
pub fn port_number(number: i32) -> Result<u16, &'static str> {
    u16::try_from(number).ok().filter(|port| *port > 0).ok_or(PORT_RANGE)
}

/// Checks the timeout of `ClientIP` affinity. 86400 seconds are valid, although the error text of the API server says
/// "less than 86400".
///
/// # Errors
///
/// Why the timeout is invalid.
pub fn affinity_seconds(seconds: i32) -> Result<u32, &'static str> {
    let valid = u32::try_from(seconds).ok().filter(|_| (1..=MAX_AFFINITY_SECONDS).contains(&seconds));
    valid.ok_or(AFFINITY_RANGE)
}

/// The transport protocol with this name; `None` if there is none.
pub fn protocol(name: &str) -> Option<Protocol> {
    Protocol::ALL.into_iter().find(|protocol| protocol.as_str() == name)
}

/// Parses one of `spec.loadBalancerSourceRanges`. Space around it and leading zeros are allowed, and the host bits are
/// dropped.
///
/// # Errors
///
/// Why the text is no network.
pub fn source_range(text: &str) -> Result<IpNet, &'static str> {
    parse_network(text.trim()).ok_or(NO_CIDR)
}

/// Parses an address of a stored object: leading zeros are allowed, IPv4 in IPv6 notation is not.
///
/// # Errors
///
/// Why the text is no address.
pub fn stored_ip(text: &str) -> Result<IpAddr, &'static str> {
    match parse_ip(text) {
        Some(IpAddr::V4(_)) if text.contains(':') => Err(MAPPED_IP),
        Some(ip) => Ok(ip),
        None => Err(NO_IP),
    }
}

/// Parses an address of a new object: neither leading zeros nor IPv4 in IPv6 notation are allowed.
///
/// # Errors
///
/// Why the text is no address.
pub fn new_ip(text: &str) -> Result<IpAddr, &'static str> {
    match text.parse() {
        Ok(IpAddr::V6(address)) if address.to_ipv4_mapped().is_some() => Err(MAPPED_IP),
        Ok(address) => Ok(address),
        Err(_) => Err(NO_IP),
    }
}

/// Checks that other machines can send packets to an address (`ValidateNonSpecialIP`).
///
/// # Errors
///
/// Why other machines cannot send packets to the address.
pub fn usable_ip(address: IpAddr) -> Result<(), &'static str> {
    if address.is_unspecified() {
        Err("may not be unspecified (0.0.0.0 or ::)")
    } else if address.is_loopback() {
        Err("may not be in the loopback range (127.0.0.0/8, ::1/128)")
    } else if is_link_local(address) {
        Err("may not be in the link-local range (169.254.0.0/16, fe80::/10)")
    } else if is_link_local_multicast(address) {
        Err("may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)")
    } else {
        Ok(())
    }
}

/// Checks that one endpoint can have an address. The API server accepts a multicast address, but packets to it would
/// not go to a single endpoint.
///
/// # Errors
///
/// Why no endpoint can have the address.
pub fn endpoint_ip(address: IpAddr) -> Result<(), &'static str> {
    usable_ip(address)?;
    if address.is_multicast() {
        return Err("may not be a multicast address (224.0.0.0/4, ff00::/8)");
    }
    Ok(())
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// Whether the address is in `224.0.0.0/24`, or in `ff02::/16` with any flags, as in Go's `IsLinkLocalMulticast`.
fn is_link_local_multicast(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.octets()[..3] == [224, 0, 0],
        IpAddr::V6(address) => address.octets()[0] == 0xff && address.octets()[1] & 0x0f == 0x02,
    }
}

/// The API server's error text for a value that breaks a rule. Strings are quoted, numbers are not.
pub fn invalid(value: impl Debug, why: impl Display) -> String {
    format!("Invalid value: {value:?}: {why}")
}

/// The API server's error text for a required field that is not set; `why` may be empty.
pub fn required(why: &str) -> String {
    let colon = if why.is_empty() { "" } else { ": " };
    format!("Required value{colon}{why}")
}

/// The API server's error text for an unknown value of an enum.
pub fn unsupported(value: &str, supported: &[&str]) -> String {
    let supported: Vec<_> = supported.iter().map(|value| format!("{value:?}")).collect();
    format!("Unsupported value: {value:?}: supported values: {}", supported.join(", "))
}

/// The API server's error text for the second of two values that must differ.
pub fn duplicate(value: impl Debug) -> String {
    format!("Duplicate value: {value:?}")
}

/// The API server's error text for the second of two ports with the same number and protocol.
pub fn duplicate_port(number: i32, protocol: &str) -> String {
    format!("Duplicate value: port {number}, protocol {protocol}")
}

/// The API server's error text for a field that may not be set on this object.
pub fn forbidden(why: impl Display) -> String {
    format!("Forbidden: {why}")
}

/// The API server's error text for a list that is too long.
pub fn too_many(count: usize, limit: usize) -> String {
    format!("Too many: {count}: must have at most {limit} items")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_those_of_the_api_server() {
        assert_eq!((port_number(1), port_number(65_535)), (Ok(1), Ok(65_535)));
        assert_eq!([0, -1, 65_536].map(|port| port_number(port).is_err()), [true; 3]);
        assert_eq!((affinity_seconds(1), affinity_seconds(86_400)), (Ok(1), Ok(86_400)));
        assert_eq!([0, -1, 86_401].map(|seconds| affinity_seconds(seconds).is_err()), [true; 3]);
        assert_eq!(PROTOCOLS.map(|name| protocol(name).map(Protocol::as_str)), PROTOCOLS.map(Some));
        assert_eq!(protocol("tcp"), None);
    }

    #[test]
    fn errors_quote_texts_and_enum_values_but_no_numbers() {
        assert_eq!(invalid(0, "bad"), "Invalid value: 0: bad");
        assert_eq!(invalid("x", "bad"), "Invalid value: \"x\": bad");
        assert_eq!(unsupported("x", &["A", "B"]), "Unsupported value: \"x\": supported values: \"A\", \"B\"");
        assert_eq!(
            (required(""), required("why")),
            ("Required value".to_owned(), "Required value: why".to_owned())
        );
    }

    #[test]
    fn only_stored_addresses_may_have_leading_zeros() {
        assert!(stored_ip("10.0.0.01").is_ok() && new_ip("10.0.0.01").is_err());
        assert_eq!((stored_ip("::ffff:1.2.3.4"), new_ip("::ffff:1.2.3.4")), (Err(MAPPED_IP), Err(MAPPED_IP)));
    }

    #[test]
    fn endpoints_have_unicast_addresses() {
        for (text, usable, endpoint) in [
            ("192.0.2.1", true, true),
            ("224.0.1.5", true, false),
            ("224.0.0.1", false, false),
            ("ff02::1", false, false),
            ("169.254.1.1", false, false),
            ("fe80::1", false, false),
            ("127.0.0.1", false, false),
            ("::", false, false),
        ] {
            let ip = text.parse().unwrap();
            assert_eq!((usable_ip(ip).is_ok(), endpoint_ip(ip).is_ok()), (usable, endpoint), "{text}");
        }
    }
}
