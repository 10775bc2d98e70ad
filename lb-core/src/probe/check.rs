//! The health check of a Service's endpoints: what to probe, and how results count.

use std::{fmt, num::NonZeroU16, str::FromStr, sync::Arc, time::Duration};

use crate::protocol::Protocol;

/// A health check of endpoints, as the annotations of a Service define it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Check {
    /// What a probe sends, and which answers count as good.
    pub kind: Kind,
    /// The port that probes go to. If the check has its own port, the check applies to every port of the Service. With
    /// `None`, probes go to the port of the endpoint, and the check applies to ports of one protocol only
    /// ([`Kind::protocol`]).
    pub port: Option<NonZeroU16>,
    /// When probes are sent, and how many results change the verdict.
    pub timing: Timing,
    /// Whether a probe over TCP begins with a PROXY protocol header (command LOCAL), because the endpoint expects a
    /// header on each connection.
    pub proxy_header: bool,
}

impl Check {
    /// The same check for endpoints that expect a PROXY protocol header, or that expect none if `is_sent` is false. A
    /// check with its own port never sends a header: the agent assumes that the endpoint expects no header at that
    /// port.
    #[must_use]
    pub fn with_proxy_header(self: Arc<Self>, is_sent: bool) -> Arc<Self> {
        let proxy_header = is_sent && self.port.is_none();
        if self.proxy_header == proxy_header {
            return self;
        }
        Arc::new(Self { proxy_header, ..(*self).clone() })
    }

    /// The port to probe for an endpoint that serves `port`; `None` if the check does not apply to that port.
    pub fn port_of(&self, protocol: Protocol, port: u16) -> Option<u16> {
        let own = || (self.kind.protocol() == protocol).then_some(port);
        self.port.map(NonZeroU16::get).or_else(own)
    }
}

/// What a probe sends, and which answers count as good.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A TCP connection; good if it is established.
    Tcp,
    /// An HTTP/1.1 request `GET` for this path; good with a status from 200 to 399.
    Http(Arc<str>),
    /// Like [`Self::Http`], over TLS. The certificate is not verified.
    Https(Arc<str>),
    /// A gRPC call `grpc.health.v1.Health/Check` for this service, empty for the whole server; good if the answer is
    /// `SERVING`.
    Grpc(Arc<str>),
    /// A DNS query for this name over UDP; an empty name asks for the name servers of the root. Every valid answer is
    /// good except `SERVFAIL` and `REFUSED`.
    Dns(Arc<str>),
}

impl Kind {
    /// If the check names no port, it probes all service ports of this protocol.
    pub const fn protocol(&self) -> Protocol {
        match self {
            Self::Tcp | Self::Http(_) | Self::Https(_) | Self::Grpc(_) => Protocol::Tcp,
            Self::Dns(_) => Protocol::Udp,
        }
    }

    const fn name(&self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Http(_) => "http",
            Self::Https(_) => "https",
            Self::Grpc(_) => "grpc",
            Self::Dns(_) => "dns",
        }
    }

    /// The text that follows the port in the annotation: path, service or name.
    fn path(&self) -> String {
        match self {
            Self::Tcp => String::new(),
            Self::Http(path) | Self::Https(path) => path.to_string(),
            Self::Grpc(name) | Self::Dns(name) if name.is_empty() => String::new(),
            Self::Grpc(name) | Self::Dns(name) => format!("/{name}"),
        }
    }
}

/// When probes are sent, and how many results change the verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timing {
    /// Usual time from the start of one probe to the start of the next. The monitor varies this time by up to 10 % (by
    /// up to 50 % before the second probe). While results contradict the verdict of a target, the monitor uses
    /// [`Self::fast`] instead, unless the target is held unhealthy because it flaps. After a hint of failure, it sends
    /// the next probe at once.
    pub interval: Duration,
    /// Time without an answer after which a probe has failed; less than `interval`.
    pub timeout: Duration,
    /// Number of good results in a row that make an unhealthy endpoint healthy, unless it is held because it flaps; at
    /// least 1.
    pub healthy: u8,
    /// Number of failures in a row that make a healthy endpoint unhealthy; at least 1. A hint of failure may count as
    /// one failure.
    pub unhealthy: u8,
}

impl Default for Timing {
    fn default() -> Self {
        Self { interval: Duration::from_secs(10), timeout: Duration::from_secs(5), healthy: 2, unhealthy: 3 }
    }
}

impl Timing {
    /// The interval while results contradict the verdict: shorter than usual, so that the verdict changes soon.
    pub fn fast(&self) -> Duration {
        self.interval.min(self.timeout)
    }
}

/// Kind and port of a check in the syntax of the annotation: `KIND[://[:PORT][/PATH]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The kind of probe, with its path, service or name.
    pub kind: Kind,
    /// The port to probe; `None` for the endpoint's own port.
    pub port: Option<NonZeroU16>,
}

const FORM: &str = "give none, tcp, http://:PORT/PATH, https://:PORT/PATH, grpc or dns; without :PORT probes go to the \
                    port of the endpoint";

impl FromStr for Probe {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text.split_once("://").unwrap_or((text, ""));
        let (port, path) = match rest.find('/') {
            Some(slash) => rest.split_at(slash),
            None => (rest, ""),
        };
        let port = match port.strip_prefix(':') {
            Some(port) => Some(port.parse().map_err(|_invalid| format!("{port:?} is not a port: {FORM}"))?),
            None if port.is_empty() => None,
            None => return Err(format!("a host is not possible: {FORM}")),
        };
        if !is_path(path) {
            return Err(format!(
                "a path has only visible ASCII characters, and none of {NOT_IN_PATHS}: {FORM}"
            ));
        }
        let url: Arc<str> = if path.is_empty() { "/".into() } else { path.into() };
        let inner: Arc<str> = path.strip_prefix('/').unwrap_or_default().into();
        let kind = match name {
            "tcp" if inner.is_empty() => Kind::Tcp,
            "http" => Kind::Http(url),
            "https" => Kind::Https(url),
            "grpc" => Kind::Grpc(inner),
            "dns" if is_name(&inner) => Kind::Dns(inner),
            _ => return Err(FORM.to_owned()),
        };
        Ok(Self { kind, port })
    }
}

/// Visible ASCII characters that the target of an HTTP request cannot have (RFC 3986 §3.3 and §3.4; `#` would begin a
/// fragment, which no client sends).
pub(crate) const NOT_IN_PATHS: &str = "\" # < > `";

/// Whether a probe can ask for the path, and outputs can show it: visible ASCII characters without [`NOT_IN_PATHS`].
pub(crate) fn is_path(path: &str) -> bool {
    path.chars().all(|c| c.is_ascii_graphic() && !NOT_IN_PATHS.contains(c))
}

/// Whether a DNS query can contain the name; the empty name is the root.
fn is_name(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    name.is_empty() || name.len() < 254 && name.split('.').all(|label| (1..64).contains(&label.len()))
}

impl fmt::Display for Check {
    /// Writes kind, port and path in the syntax of the annotation.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.kind.path();
        write!(f, "{}", self.kind.name())?;
        match (self.port, path.is_empty()) {
            (None, true) => Ok(()),
            (None, false) => write!(f, "://{path}"),
            (Some(port), _) => write!(f, "://:{port}{path}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> Result<String, String> {
        let Probe { kind, port } = text.parse()?;
        Ok(Check { kind, port, timing: Timing::default(), proxy_header: false }.to_string())
    }

    #[test]
    fn probe_is_shown_as_it_is_written() {
        for text in [
            "tcp",
            "tcp://:80",
            "http://:8080/healthz",
            "https:///ready?full=1",
            "grpc",
            "grpc://:9000/shop.Cart",
            "dns",
            "dns://:53/kubernetes.default.svc.cluster.local",
        ] {
            assert_eq!(shown(text).as_deref(), Ok(text));
        }
        assert_eq!(shown("http").as_deref(), Ok("http:///"));
        assert_eq!(shown("http://:80").as_deref(), Ok("http://:80/"));
    }

    #[test]
    fn invalid_probe_is_rejected_with_the_form() {
        for text in [
            "",
            "udp",
            "tcp://:0",
            "tcp://:65536",
            "tcp://:80/x",
            "http://host/",
            "http://host:80/",
            "http://:80/a b",
            "http://:80/ü",
            "http://:80/<a>",
            "http://:80/a#b",
            "http://:80/`",
            "dns://:53/a..b",
        ] {
            assert!(shown(text).is_err_and(|why| why.contains("give none, tcp")), "{text}");
        }
    }

    #[test]
    fn check_without_a_port_applies_to_ports_of_its_protocol() {
        let check = |text: &str| {
            let Probe { kind, port } = text.parse().unwrap();
            Check { kind, port, timing: Timing::default(), proxy_header: false }
        };
        assert_eq!(check("tcp").port_of(Protocol::Tcp, 80), Some(80));
        assert_eq!(check("tcp").port_of(Protocol::Udp, 80), None);
        assert_eq!(check("dns").port_of(Protocol::Udp, 53), Some(53));
        assert_eq!(check("dns").port_of(Protocol::Tcp, 53), None);
        assert_eq!(check("http://:9/").port_of(Protocol::Udp, 53), Some(9));
    }
}
