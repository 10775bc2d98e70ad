//! Types of flags and arguments whose values have a syntax of their own.

use std::{
    borrow::Cow,
    fmt,
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

use clap::ValueEnum;
use ipnet::IpNet;
use lb_common::conntrack::Phase;
use lb_core::model::Protocol;
use serde::Serialize;

/// The source of a packet: an address, optionally with a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    /// Source address.
    pub ip: IpAddr,
    /// Source port; `None` for the first packet of a new connection.
    pub port: Option<u16>,
}

impl FromStr for Client {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(ip) = text.trim_start_matches('[').trim_end_matches(']').parse() {
            return Ok(Self { ip, port: None });
        }
        match text.parse::<SocketAddr>() {
            Ok(socket) => Ok(Self { ip: socket.ip(), port: Some(socket.port()) }),
            Err(_) => Err("expected ADDR, ADDR:PORT or [ADDR]:PORT".to_owned()),
        }
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => SocketAddr::new(self.ip, port).fmt(f),
            None => self.ip.fmt(f),
        }
    }
}

/// The destination of a packet: an address and a port, optionally with the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Destination address and port.
    pub socket: SocketAddr,
    /// The protocol, if the user has named it here.
    pub protocol: Option<Protocol>,
}

impl FromStr for Destination {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (socket, protocol) = match text.split_once('/') {
            Some((socket, protocol)) => (socket, Some(parse_protocol(protocol)?)),
            None => (text, None),
        };
        let socket =
            socket.parse().map_err(|_error| "expected ADDR:PORT or [ADDR]:PORT, and /PROTO if you like")?;
        Ok(Self { socket, protocol })
    }
}

/// The text of an address and port, with `127.0.0.1` in place of the name `localhost`. Other names are not looked up,
/// because a name may have another address after the next restart.
pub(crate) fn without_localhost(text: &str) -> Cow<'_, str> {
    match text.strip_prefix("localhost") {
        Some(rest) if rest.is_empty() || rest.starts_with(':') => Cow::Owned(format!("127.0.0.1{rest}")),
        _ => Cow::Borrowed(text),
    }
}

pub(super) fn parse_listener(text: &str) -> Result<SocketAddr, String> {
    let address = without_localhost(text).parse();
    address.map_err(|_error| "expected ADDR:PORT or [ADDR]:PORT, such as 127.0.0.1:8088".to_owned())
}

/// The verdict of the data plane on a packet or system call, as `monitor` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum EventVerdict {
    /// First packets of flows, and new connections of sockets
    New,
    /// Packets that were rejected with an answer to the sender
    Reject,
    /// Dropped packets
    Drop,
}

/// A Service or a virtual address, optionally with one port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceFilter {
    /// A virtual address with any port.
    Vip(IpAddr),
    /// A virtual address with one port.
    Socket(SocketAddr),
    /// One Service, optionally with one of its ports.
    Named {
        /// `metadata.namespace`
        namespace: String,
        /// `metadata.name`
        name: String,
        /// Name or number of the service port.
        port: Option<String>,
    },
}

impl FromStr for ServiceFilter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(socket) = text.parse() {
            return Ok(Self::Socket(socket));
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::Vip(address));
        }
        let (service, port) =
            text.split_once(':').map_or((text, None), |(service, port)| (service, Some(port)));
        let (namespace, name) = split_name(service);
        if namespace.is_empty() || name.is_empty() || port == Some("") {
            return Err("expected [NAMESPACE/]NAME[:PORT] or ADDR[:PORT]".to_owned());
        }
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        Ok(Self::Named { namespace, name, port: port.map(str::to_owned) })
    }
}

/// Splits `NAMESPACE/NAME`; a name alone is in the namespace `default`.
pub fn split_name(name: &str) -> (&str, &str) {
    name.split_once('/').unwrap_or(("default", name))
}

/// Parses a network such as `10.0.0.0/8`; a single address is a network of that address only.
pub(super) fn parse_network(text: &str) -> Result<IpNet, String> {
    text.parse()
        .or_else(|_error| text.parse::<IpAddr>().map(IpNet::from))
        .map_err(|_error| "expected an address or a network such as 192.0.2.0/24".to_owned())
}

pub(super) fn parse_interval(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.ok_or_else(|| "expected a number from 0.1 to 3600".to_owned())
}

pub(super) fn parse_protocol(text: &str) -> Result<Protocol, String> {
    match text.to_ascii_lowercase().as_str() {
        "tcp" => Ok(Protocol::Tcp),
        "udp" => Ok(Protocol::Udp),
        "sctp" => Ok(Protocol::Sctp),
        _ => Err("expected tcp, udp or sctp".to_owned()),
    }
}

pub(super) fn parse_phase(text: &str) -> Result<Phase, String> {
    let phase = Phase::ALL.into_iter().find(|phase| phase.as_str() == text);
    phase.ok_or_else(|| format!("expected {}", Phase::ALL.map(Phase::as_str).join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_port_is_optional() {
        let parsed = |text: &str| text.parse::<Client>().map(|client| client.to_string());
        for (text, said) in [
            ("10.0.0.1", "10.0.0.1"),
            ("10.0.0.1:80", "10.0.0.1:80"),
            ("fd00::1", "fd00::1"),
            ("[fd00::1]", "fd00::1"),
            ("[fd00::1]:80", "[fd00::1]:80"),
        ] {
            assert_eq!(parsed(text).as_deref(), Ok(said));
        }
        assert!(parsed("web:80").is_err() && parsed("10.0.0.1:").is_err());
    }

    #[test]
    fn protocol_follows_the_destination_after_a_slash() {
        let parsed = |text: &str| text.parse::<Destination>().map(|to| (to.socket.to_string(), to.protocol));
        assert_eq!(parsed("10.96.0.10:80"), Ok(("10.96.0.10:80".to_owned(), None)));
        assert_eq!(parsed("10.96.0.10:53/udp"), Ok(("10.96.0.10:53".to_owned(), Some(Protocol::Udp))));
        assert_eq!(parsed("[fd00::a]:53/TCP"), Ok(("[fd00::a]:53".to_owned(), Some(Protocol::Tcp))));
        for wrong in ["10.96.0.10", "10.96.0.10/udp", "10.96.0.10:53/", "10.96.0.10:53/icmp", "web:80/tcp"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn localhost_is_the_loopback_address() {
        assert_eq!(parse_listener("localhost:8088").unwrap().to_string(), "127.0.0.1:8088");
        assert_eq!(without_localhost("localhost"), "127.0.0.1");
        assert_eq!(without_localhost("localhosts:80"), "localhosts:80");
        assert!(parse_listener("example.com:80").is_err());
    }

    #[test]
    fn service_name_without_namespace_is_in_default() {
        assert_eq!(split_name("web"), ("default", "web"));
        assert_eq!(split_name("shop/web"), ("shop", "web"));
    }

    #[test]
    fn malformed_filters_are_rejected() {
        for text in ["", "/web", "web:", "default/"] {
            assert!(text.parse::<ServiceFilter>().is_err(), "{text}");
        }
        assert!(parse_network("192.0.2.0/33").is_err() && parse_network("here").is_err());
    }

    #[test]
    fn phases_have_the_names_that_conntrack_shows() {
        assert_eq!(parse_phase("established"), Ok(Phase::Established));
        assert!(parse_phase("open").unwrap_err().starts_with("expected opening, accepted, "));
    }

    #[test]
    fn networks_are_given_as_cidrs_or_addresses() {
        let parsed = |text| parse_network(text).map(|network| network.to_string());
        assert_eq!(parsed("192.0.2.0/24").as_deref(), Ok("192.0.2.0/24"));
        assert_eq!(parsed("192.0.2.1").as_deref(), Ok("192.0.2.1/32"));
        assert_eq!(parsed("2001:db8::/32").as_deref(), Ok("2001:db8::/32"));
    }
}
