//! `cargo xtask test`: every test that can run on this machine.

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
    /// Also run a choice of the tests on older kernels, as `cargo xtask vm` does
    #[arg(long)]
    vm: bool,
}

/// Runs all stages, also those after a failed one where they can still tell something.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut stages = Stages::default();
    if stages.run("setup", setup::run) {
        stages.run("unit tests", || run_command(cargo(["test", "--no-fail-fast"])));
        if stages.run("agent of another layout", build_next_agent)
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

/// Builds an agent whose maps have another layout, to which tests upgrade and from which they downgrade. With the profile and the
/// dependencies of the unit tests, since only its data plane has to be quick; and put aside, where no other build replaces it.
pub(crate) fn build_next_agent() -> anyhow::Result<()> {
    run_command(cargo(["build", "--package", "lb-agent", "--features", "next-layout"]))?;
    let me = std::env::current_exe().context("cannot tell where xtask itself is")?;
    let target = me.parent().and_then(Path::parent).context("xtask is in no target folder")?;
    let (built, kept) = (target.join("debug/lb-agent"), target.join("next-layout/lb-agent"));
    fs::create_dir_all(target.join("next-layout"))?;
    fs::copy(&built, &kept).with_context(|| format!("copying {} to {}", built.display(), kept.display()))?;
    Ok(())
}

/// The tests that need root: one at a time, as they share the kernel's program and namespace tables.
fn kernel_tests() -> anyhow::Result<()> {
    ensure!(
        is_root()?,
        "these tests make network namespaces and load BPF programs: run `cargo xtask test` as root"
    );
    run_command(cargo(["test", "--package", "lb-tests", "--no-fail-fast", "--", "--test-threads=1"]))
}

/// `/proc/self` belongs to the effective user of the process.
pub(crate) fn is_root() -> anyhow::Result<bool> {
    Ok(fs::metadata("/proc/self")?.uid() == 0)
}
