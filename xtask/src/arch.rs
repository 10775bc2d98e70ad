//! Processors of nodes.

use clap::ValueEnum;

/// A processor, by the name that Go and Debian give it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arch {
    Amd64,
    Arm64,
}

impl Arch {
    /// The processor of this machine; `None` if it is neither amd64 nor arm64.
    pub(crate) fn of_this_machine() -> Option<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Some(Self::Amd64),
            "aarch64" => Some(Self::Arm64),
            _ => None,
        }
    }
}
