//! The transport protocols of Service ports.

/// A transport protocol that a Service port can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// Transmission Control Protocol.
    Tcp,
    /// User Datagram Protocol.
    Udp,
    /// Stream Control Transmission Protocol.
    Sctp,
}

impl Protocol {
    /// All protocols, in the order of declaration.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// The protocol with this number in IP headers; `None` for others.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|protocol| protocol.number() == number)
    }

    /// The protocol's number in IP headers.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => lb_common::protocol::TCP,
            Self::Udp => lb_common::protocol::UDP,
            Self::Sctp => lb_common::protocol::SCTP,
        }
    }

    /// The protocol's name as Kubernetes spells it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}
