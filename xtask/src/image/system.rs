//! The system that an image gets its agent and the agent's libraries from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::bail;
use clap::ValueEnum;
use object::Architecture;

use super::{AGENT, cross, in_image};
use crate::agent::{self, Profile};
use crate::{elf, release, user};

/// The processor of an image, by the name that Go and Debian give it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Arch {
    Amd64,
    Arm64,
}

impl Arch {
    /// The processor of this machine; `None` if it is neither amd64 nor arm64.
    fn of_this_machine() -> Option<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Some(Self::Amd64),
            "aarch64" => Some(Self::Arm64),
            _ => None,
        }
    }
}

/// The system that builds the agent, and whose libraries the agent needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum System {
    /// This machine.
    Native,
    /// Debian for arm64, on a machine with another processor.
    Arm64,
}

impl System {
    pub(super) fn of(arch: Option<Arch>) -> anyhow::Result<Self> {
        match arch {
            None => Ok(Self::Native),
            Some(arch) if Arch::of_this_machine() == Some(arch) => Ok(Self::Native),
            Some(Arch::Arm64) => Ok(Self::Arm64),
            Some(Arch::Amd64) => {
                bail!("only images for arm64 can be built for another processor: build this one on amd64")
            }
        }
    }

    /// Builds the agent; writes it, without its debug information, to the folder.
    pub(super) fn stripped_agent(self, folder: &Path) -> anyhow::Result<PathBuf> {
        match self {
            Self::Native => release::stripped(&agent::prepare(Profile::Release)?, folder),
            Self::Arm64 => cross::stripped_agent(folder),
        }
    }

    /// The processor that the agent must be for; `None` if the agent is built for this machine, and the agent's
    /// processor is not checked.
    pub(super) const fn architecture(self) -> Option<Architecture> {
        match self {
            Self::Native => None,
            Self::Arm64 => Some(Architecture::Aarch64),
        }
    }

    /// The loader and the shared libraries of a program, by their paths in the image, where the loader searches.
    pub(super) fn libraries(self, program: &Path) -> anyhow::Result<BTreeMap<String, PathBuf>> {
        match self {
            Self::Native => {
                let libraries = elf::libraries(program)?.into_iter();
                Ok(libraries.map(|library| (in_image(&library), library)).collect())
            }
            Self::Arm64 => cross::libraries(program),
        }
    }

    /// Licences of the libraries.
    pub(super) const fn copyrights(self) -> [&'static str; 2] {
        match self {
            Self::Native => ["/usr/share/doc/libc6/copyright", "/usr/share/doc/libgcc-s1/copyright"],
            Self::Arm64 => cross::COPYRIGHTS,
        }
    }

    /// The origin of the libraries, as a text for people in the history of the image.
    pub(super) const fn origin(self) -> &'static str {
        match self {
            Self::Native => "C library of the machine that built the agent",
            Self::Arm64 => "Debian's C library for arm64",
        }
    }

    /// How the name of the image's file ends, so that images of several processors lie beside each other.
    pub(super) const fn suffix(self) -> &'static str {
        match self {
            Self::Native => "",
            Self::Arm64 => "_arm64",
        }
    }

    /// Runs the agent of an unpacked image with the libraries of the image; returns its output for `--version`. An
    /// agent for this machine sees no other files than those of the image.
    pub(super) fn version_in(self, root: &Path) -> anyhow::Result<String> {
        match self {
            Self::Native => version_in(root),
            Self::Arm64 => cross::version_in(root),
        }
    }
}

fn version_in(root: &Path) -> anyhow::Result<String> {
    let mut command = Command::new("unshare");
    if !user::is_root()? {
        command.arg("--map-root-user");
    }
    let agent = PathBuf::from("/").join(AGENT);
    command.arg("--root").arg(root).arg(agent).arg("--version");
    release::output(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_for_this_machine_is_built_by_it() {
        assert_eq!(System::of(None).unwrap(), System::Native);
        assert_eq!(System::of(Arch::of_this_machine()).unwrap(), System::Native);
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn image_for_arm64_is_built_by_the_cross_compiler() {
        assert_eq!(System::of(Some(Arch::Arm64)).unwrap(), System::Arm64);
    }
}
