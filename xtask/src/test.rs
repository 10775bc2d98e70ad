//! `cargo xtask test`: all tests that this machine can run.

use anyhow::ensure;

use crate::agent::{build_agent, build_next_agent};
use crate::busy::beside_busy_loops;
use crate::fuzz;
use crate::process::{cargo, run as run_command};
use crate::setup;
use crate::stages::Stages;
use crate::user::is_root;
use crate::vm;

/// Arguments of `test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Also run the short list of tests on older kernels, as `cargo xtask vm` does
    #[arg(long)]
    vm: bool,
    /// Run the tests twice beside one busy loop for each CPU, as on an overloaded machine
    #[arg(long)]
    busy: bool,
}

/// Runs all stages. After a failure, skips the stages that depend on the failed one.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut stages = Stages::default();
    if stages.run("setup", setup::run) {
        stages.run("unit tests", || run_command(cargo(["test", "--no-fail-fast"])));
        stages.run("fuzz targets", || fuzz::run(&fuzz::Args::of_ci()));
        if stages.run("agent with another map layout", build_next_agent)
            && stages.run("agent", || run_command(build_agent()))
        {
            if args.busy {
                stages.run("kernel tests beside busy loops", || beside_busy_loops(kernel_tests));
                stages.run("kernel tests beside busy loops, again", || beside_busy_loops(kernel_tests));
            } else {
                stages.run("kernel tests", kernel_tests);
            }
            if args.vm {
                stages.run("older kernels", || vm::run(&vm::Args::of_ci()));
            }
        }
    }
    stages.finish()
}

/// Runs the tests that need root. They run one at a time, because they share the kernel's programs and namespaces.
fn kernel_tests() -> anyhow::Result<()> {
    ensure!(
        is_root()?,
        "the kernel tests create network namespaces and load BPF programs: run `cargo xtask test` as root"
    );
    run_command(cargo(["test", "--package", "lb-tests", "--no-fail-fast", "--", "--test-threads=1"]))
}
