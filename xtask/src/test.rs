//! `cargo xtask test`: all tests that this machine can run.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::process::{cargo, run as run_command};
use crate::setup;
use crate::stages::Stages;
use crate::vm;

/// Arguments of `test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also run the short list of tests on older kernels, as `cargo xtask vm` does
    #[arg(long)]
    vm: bool,
}

/// Runs all stages. After a failed one, only those run that do not depend on it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut stages = Stages::default();
    if stages.run("setup", setup::run) {
        stages.run("unit tests", || run_command(cargo(["test", "--no-fail-fast"])));
        if stages.run("agent with another map layout", build_next_agent)
            && stages.run("agent", || run_command(build_agent()))
        {
            stages.run("kernel tests", kernel_tests);
            if args.vm {
                stages.run("older kernels", || vm::run(&vm::Args::of_ci()));
            }
        }
    }
    stages.finish()
}

/// Builds the agent that the kernel tests, the demo and the benchmarks run.
pub(crate) fn build_agent() -> Command {
    cargo(["build", "--release", "--package", "lb-agent"])
}

/// Builds an agent with another map layout, for tests of upgrades and downgrades. It uses the profile and dependencies of
/// the unit tests, since only its data plane must be fast. The copy in `target/next-layout` is safe from other builds.
pub(crate) fn build_next_agent() -> anyhow::Result<()> {
    run_command(cargo(["build", "--package", "lb-agent", "--features", "next-layout"]))?;
    let me = std::env::current_exe().context("cannot find the path of the xtask binary")?;
    let target = me.parent().and_then(Path::parent).context("xtask is not in a target folder")?;
    let (built, kept) = (target.join("debug/lb-agent"), target.join("next-layout/lb-agent"));
    fs::create_dir_all(target.join("next-layout"))?;
    fs::copy(&built, &kept).with_context(|| format!("copying {} to {}", built.display(), kept.display()))?;
    Ok(())
}

/// The tests that need root. They run one at a time, because they share the kernel's programs and namespaces.
fn kernel_tests() -> anyhow::Result<()> {
    ensure!(
        is_root()?,
        "the kernel tests create network namespaces and load BPF programs: run `cargo xtask test` as root"
    );
    run_command(cargo(["test", "--package", "lb-tests", "--no-fail-fast", "--", "--test-threads=1"]))
}

/// Whether the effective user is root: it owns `/proc/self`.
pub(crate) fn is_root() -> anyhow::Result<bool> {
    Ok(fs::metadata("/proc/self")?.uid() == 0)
}
