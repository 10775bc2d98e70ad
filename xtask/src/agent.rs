//! Builds of the agent.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;

use crate::process::{cargo, run};

/// The command that builds the agent which the kernel tests, the demo and the benchmarks run.
pub(crate) fn build_agent() -> Command {
    cargo(["build", "--release", "--package", "lb-agent"])
}

/// Builds an agent with another map layout, for tests of upgrades and downgrades. The debug profile suffices: it shares
/// dependencies with the unit tests, and every profile optimizes the BPF programs. Copies the agent to
/// `target/next-layout`, because the next debug build overwrites the original.
pub(crate) fn build_next_agent() -> anyhow::Result<()> {
    run(cargo(["build", "--package", "lb-agent", "--features", "next-layout"]))?;
    let target = target_dir()?;
    let (built, kept) = (target.join("debug/lb-agent"), target.join("next-layout/lb-agent"));
    fs::create_dir_all(target.join("next-layout"))?;
    fs::copy(&built, &kept).with_context(|| format!("copying {} to {}", built.display(), kept.display()))?;
    Ok(())
}

/// Cargo's target folder, two levels above the xtask binary.
pub(crate) fn target_dir() -> anyhow::Result<PathBuf> {
    let me = std::env::current_exe().context("cannot find the path of the xtask binary")?;
    me.ancestors().nth(2).map(Path::to_owned).context("xtask is not in a target folder")
}
