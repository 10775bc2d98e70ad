//! Why a probe has failed.

use std::fmt;

/// The failure of a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which kind of failure it is.
    pub reason: Reason,
    /// Details for people, such as `status 500`.
    pub text: String,
}

impl Failure {
    /// Creates a failure with these details.
    pub fn new(reason: Reason, text: impl Into<String>) -> Self {
        Self { reason, text: text.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The endpoint has refused, reset or closed the connection, or has rejected the UDP packet (ICMP port
    /// unreachable).
    Refused,
    /// The endpoint has not answered within the timeout.
    Timeout,
    /// This node has no route to the endpoint, or the kernel of this node reports another error.
    Unreachable,
    /// No TLS session could be established.
    Tls,
    /// The answer has an HTTP status outside 200 to 399, or in gRPC any status but 200.
    Status,
    /// The answer has a gRPC error status, or a health other than `SERVING`.
    Grpc,
    /// The answer has the DNS response code `SERVFAIL` or `REFUSED`.
    Dns,
    /// The answer does not follow the protocol of the probe.
    Protocol,
    /// This node could not send the probe, for example for lack of file descriptors. This failure does not count as a
    /// result.
    Local,
}

impl Reason {
    /// The kind of failure as the value of the metrics' label `result`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Timeout => "timeout",
            Self::Unreachable => "unreachable",
            Self::Tls => "tls",
            Self::Status => "status",
            Self::Grpc => "grpc",
            Self::Dns => "dns",
            Self::Protocol => "protocol",
            Self::Local => "local",
        }
    }
}
