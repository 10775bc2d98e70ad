//! `cargo xtask bench`: the benchmarks, each a bench target of `lb-tests`. Their tables go to standard output.

use std::ffi::OsString;

use anyhow::ensure;
use clap::ValueEnum;

use crate::process::{cargo, command_line};
use crate::stages::Stages;
use crate::test::is_root;

/// Arguments of `bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The benchmark to run; all of them where none is named
    bench: Option<Bench>,
    /// Arguments of that benchmark: `cargo xtask bench control-plane --help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// A benchmark.
#[derive(Clone, Copy, ValueEnum)]
enum Bench {
    /// From objects to maps: time and memory
    ControlPlane,
    /// What clients get and what it costs, against kube-proxy's rules and plain routing
    EndToEnd,
    /// Nanoseconds that the BPF programs take for a packet, against the least that programs could take
    Packets,
}

impl Bench {
    /// The stage it is, and the target of `lb-tests`.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::ControlPlane => ("control plane", "control_plane"),
            Self::EndToEnd => ("end to end", "end_to_end"),
            Self::Packets => ("packets", "packets"),
        }
    }

    /// Fails when a target is missed.
    fn run(self, args: &[OsString]) -> anyhow::Result<()> {
        let (_, target) = self.names();
        let mut command = cargo(["bench", "--package", "lb-tests", "--bench", target, "--"]);
        command.args(args);
        let line = command_line(&command);
        // What cargo says goes to stderr; stdout is that of the benchmark.
        let status = command.status()?;
        ensure!(status.success(), "`{line}` failed: {status}");
        Ok(())
    }
}

/// Runs one benchmark, or all; fails when a target is missed.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    ensure!(is_root()?, "the benchmarks load BPF programs and make network namespaces: run them as root");
    match args.bench {
        Some(bench) => bench.run(&args.args),
        None => run_all(),
    }
}

fn run_all() -> anyhow::Result<()> {
    let mut stages = Stages::default();
    for bench in Bench::value_variants() {
        let (name, _) = bench.names();
        stages.run(name, || bench.run(&[]));
    }
    stages.finish()
}
