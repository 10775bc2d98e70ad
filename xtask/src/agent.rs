//! Builds of the agent.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::process::{cargo, run};
use crate::setup;

/// The variable that names the agent to use instead of one that a task builds.
const VARIABLE: &str = "LB_AGENT";

/// How the agent is compiled. Both builds contain the same BPF programs.
#[derive(Clone, Copy)]
pub(crate) enum Profile {
    /// For tests and the demo: built in a third of the time, from crates that the unit tests share.
    Debug,
    /// For benchmarks, packages and images.
    Release,
}

impl Profile {
    /// Builds the agent.
    pub(crate) fn build(self) -> anyhow::Result<()> {
        run(match self {
            Self::Debug => cargo(["build", "--package", "lb-agent"]),
            Self::Release => cargo(["build", "--package", "lb-agent", "--release"]),
        })
    }

    /// The path of the agent that [`Self::build`] builds.
    pub(crate) fn path(self) -> anyhow::Result<PathBuf> {
        let folder = match self {
            Self::Debug => "debug",
            Self::Release => "release",
        };
        Ok(target_dir()?.join(folder).join("lb-agent"))
    }
}

/// Installs the toolchain if it is missing and builds the agent, unless `$LB_AGENT` names one; returns the path of the
/// agent.
pub(crate) fn prepare(profile: Profile) -> anyhow::Result<PathBuf> {
    if let Some(given) = given() {
        return Ok(given);
    }
    setup::run()?;
    profile.build()?;
    profile.path()
}

/// The agent that `$LB_AGENT` names.
pub(crate) fn given() -> Option<PathBuf> {
    std::env::var_os(VARIABLE).map(PathBuf::from)
}

/// Lets a command of `lb-tests` run this agent.
pub(crate) fn with_agent<'a>(command: &'a mut Command, agent: &Path) -> &'a mut Command {
    command.env(VARIABLE, agent)
}

/// Builds the agent for debugging, and one with another map layout, `target/next-layout/lb-agent`, for tests of
/// upgrades and downgrades. Cargo writes both agents to the same path, so this function first builds and copies the
/// agent with the other layout.
pub(crate) fn build_debug_agents() -> anyhow::Result<()> {
    run(cargo(["build", "--package", "lb-agent", "--features", "next-layout"]))?;
    let (built, kept) = (Profile::Debug.path()?, target_dir()?.join("next-layout/lb-agent"));
    fs::create_dir_all(target_dir()?.join("next-layout"))?;
    fs::copy(&built, &kept).with_context(|| format!("copying {} to {}", built.display(), kept.display()))?;
    Profile::Debug.build()
}

/// Cargo's target folder, two levels above the xtask binary.
pub(crate) fn target_dir() -> anyhow::Result<PathBuf> {
    let me = std::env::current_exe().context("cannot find the path of the xtask binary")?;
    me.ancestors().nth(2).map(Path::to_owned).context("xtask is not in a target folder")
}
