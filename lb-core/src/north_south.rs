//! How external clients reach backends on other nodes.

use std::{fmt, str::FromStr};

use crate::protocol::Protocol;

/// How this node sends packets of external clients to backends on other nodes, under `externalTrafficPolicy: Cluster`.
/// TCP ports of Services with the PROXY protocol, and backends whose node is unknown, always have [`Self::Snat`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NorthSouthMode {
    /// Masqueraded with the node's address, as by kube-proxy: the backend's replies return through this node.
    #[default]
    Snat,
    /// With the client's address, through a tunnel: the backend replies directly to the client (direct server return).
    Dsr,
    /// TCP as in [`Self::Dsr`], other protocols as in [`Self::Snat`].
    Hybrid,
}

impl NorthSouthMode {
    /// All modes, in the order of declaration.
    pub const ALL: [Self; 3] = [Self::Snat, Self::Dsr, Self::Hybrid];

    /// The mode's name in flags and annotations.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Snat => "snat",
            Self::Dsr => "dsr",
            Self::Hybrid => "hybrid",
        }
    }

    /// Whether backends reply directly to clients of this protocol.
    pub const fn uses_dsr(self, protocol: Protocol) -> bool {
        match self {
            Self::Snat => false,
            Self::Dsr => true,
            Self::Hybrid => matches!(protocol, Protocol::Tcp),
        }
    }
}

impl fmt::Display for NorthSouthMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The error for a text that is not the name of a mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownMode;

impl fmt::Display for UnknownMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("give one of")?;
        NorthSouthMode::ALL.into_iter().try_for_each(|mode| write!(f, " {mode}"))
    }
}

impl std::error::Error for UnknownMode {}

impl FromStr for NorthSouthMode {
    type Err = UnknownMode;

    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        Self::ALL.into_iter().find(|mode| mode.as_str() == text).ok_or(UnknownMode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_a_round_trip() {
        for mode in NorthSouthMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert_eq!("DSR".parse::<NorthSouthMode>(), Err(UnknownMode));
        assert_eq!(UnknownMode.to_string(), "give one of snat dsr hybrid");
    }

    #[test]
    fn hybrid_uses_dsr_for_tcp_alone() {
        let dsr = |mode: NorthSouthMode| {
            [Protocol::Tcp, Protocol::Udp, Protocol::Sctp].map(|protocol| mode.uses_dsr(protocol))
        };
        assert_eq!(dsr(NorthSouthMode::Snat), [false; 3]);
        assert_eq!(dsr(NorthSouthMode::Dsr), [true; 3]);
        assert_eq!(dsr(NorthSouthMode::Hybrid), [true, false, false]);
    }
}
