//! `cargo xtask bench`: the benchmarks, each a bench target of `lb-tests`. Their tables go to standard output.

mod compare;

use std::ffi::OsString;
use std::fs;
use std::path::{self, Path, PathBuf};

use anyhow::{Context as _, ensure};
use clap::ValueEnum;

use crate::agent::with_agent;
use crate::process::{cargo, command_line};
use crate::stages::Stages;
use crate::user::is_root;

/// Arguments of `bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The benchmark to run [default: all]
    bench: Option<Bench>,
    /// Write the figures of all benchmarks to this folder, as NAME.json
    #[arg(long, value_name = "FOLDER", conflicts_with = "bench")]
    json: Option<PathBuf>,
    /// Arguments of the benchmark; `cargo xtask bench NAME -- --help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Bench {
    /// Time and memory from API objects to BPF maps
    ControlPlane,
    /// Queries per second and memory of the DNS server, beside unbound
    Dns,
    /// Throughput, latency and CPU time of clients, against kube-proxy's rules and plain routing
    EndToEnd,
    /// Rate, CPU time and memory of health checks of 50,000 endpoints
    Health,
    /// Nanoseconds that the BPF programs take per packet, against minimal baseline programs
    Packets,
    /// The packet benchmark of this tree against another revision, in one run: `compare REV [options of packets]`
    Compare,
}

impl Bench {
    /// The benchmarks that a run of all benchmarks includes.
    const ALL: [Self; 5] = [Self::ControlPlane, Self::Dns, Self::EndToEnd, Self::Health, Self::Packets];

    /// Name of the stage, and of the bench target of `lb-tests`.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::ControlPlane => ("control plane", "control_plane"),
            Self::Dns => ("DNS", "dns"),
            Self::EndToEnd => ("end to end", "end_to_end"),
            Self::Health => ("health checks", "health"),
            Self::Packets => ("packets", "packets"),
            Self::Compare => ("compare", "packets"),
        }
    }

    /// Runs the benchmark of this agent; fails if the agent misses a performance target.
    fn run(self, args: &[OsString], agent: &Path) -> anyhow::Result<()> {
        let (_, target) = self.names();
        let mut command = cargo(["bench", "--package", "lb-tests", "--bench", target, "--"]);
        with_agent(&mut command, agent);
        match self {
            Self::Compare => command.args(compare::prepare(args)?),
            Self::ControlPlane | Self::Dns | Self::EndToEnd | Self::Health | Self::Packets => {
                command.args(args)
            }
        };
        let line = command_line(&command);
        // Cargo writes to stderr, so stdout has the benchmark's output only.
        let status = command.status()?;
        ensure!(status.success(), "`{line}` failed: {status}");
        Ok(())
    }
}

/// Runs one benchmark of this agent, or all; fails if the agent misses a performance target.
pub(crate) fn run(args: &Args, agent: &Path) -> anyhow::Result<()> {
    ensure!(is_root()?, "the benchmarks load BPF programs and make network namespaces: run them as root");
    match args.bench {
        Some(bench) => bench.run(&args.args, agent),
        None => run_all(args.json.as_deref(), agent),
    }
}

fn run_all(json: Option<&Path>, agent: &Path) -> anyhow::Result<()> {
    // Cargo runs each benchmark in the folder of its package.
    let json = json.map(path::absolute).transpose()?;
    if let Some(folder) = &json {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let mut stages = Stages::default();
    for bench in Bench::ALL {
        let (name, target) = bench.names();
        let file = json.as_ref().map(|folder| folder.join(target).with_extension("json"));
        let args: Vec<OsString> = file.map_or_else(Vec::new, |file| vec!["--json".into(), file.into()]);
        stages.run(name, || bench.run(&args, agent));
    }
    stages.finish()
}
