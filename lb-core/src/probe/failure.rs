//! Why a probe has failed.

use std::fmt;

/// Why a probe has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The kind of failure.
    pub reason: Reason,
    /// The details, such as `status 500`, for people.
    pub text: String,
}

impl Failure {
    /// A failure with these details.
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
    /// The endpoint has refused or reset the connection.
    Refused,
    /// No answer within the timeout.
    Timeout,
    /// This node has no route to the endpoint, or another error of its kernel.
    Unreachable,
    /// No TLS session.
    Tls,
    /// An HTTP status outside 200 to 399.
    Status,
    /// A gRPC status, or a server that does not serve.
    Grpc,
    /// A response code of DNS.
    Dns,
    /// An answer that is not of the protocol.
    Protocol,
    /// This node could not send the probe, for example for lack of file descriptors: no result.
    Local,
}

impl Reason {
    /// The value of the label `result` of metrics.
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
