//! The transport protocols of Service ports.

/// A transport protocol that a Service port can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    /// TCP
    Tcp,
    /// UDP
    Udp,
    /// SCTP
    Sctp,
}

impl Protocol {
    /// All protocols.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// The protocol with this IP protocol number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|protocol| protocol.number() == number)
    }

    /// The IP protocol number.
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => lb_common::protocol::TCP,
            Self::Udp => lb_common::protocol::UDP,
            Self::Sctp => lb_common::protocol::SCTP,
        }
    }

    /// The name as Kubernetes spells it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}
