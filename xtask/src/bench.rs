//! `cargo xtask bench`: the benchmarks, as a table or JSON.

use anyhow::{Context as _, ensure};

use crate::{process::cargo, test::is_root};

/// Arguments of the benchmarks.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of Services
    #[arg(long, default_value_t = 10_000)]
    services: u32,
    /// Endpoints of each Service
    #[arg(long, default_value_t = 5)]
    endpoints: u32,
    /// Number of Services that come from an API server; 0 leaves that part out
    #[arg(long, default_value_t = 5_000)]
    api_services: u32,
    /// Endpoints of each of them
    #[arg(long, default_value_t = 50)]
    api_endpoints: u32,
    /// Leave out everything but what comes from an API server
    #[arg(long)]
    only_api: bool,
    /// How often to start from nothing
    #[arg(long, default_value_t = 5)]
    runs: u32,
    /// How many endpoints to change in each run, one after the other
    #[arg(long, default_value_t = 200)]
    changes: u32,
    /// Print the results as JSON, and nothing else, on standard output
    #[arg(long)]
    json: bool,
}

/// Runs the benchmarks; fails when a target is missed.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    ensure!(is_root()?, "the benchmarks load BPF programs and make network namespaces: run them as root");
    let Args { services, endpoints, api_services, api_endpoints, only_api, runs, changes, json } = args;
    let mut command = cargo(["bench", "--package", "lb-tests", "--bench", "control_plane", "--"]);
    let numbers = [
        ("--services", services),
        ("--endpoints", endpoints),
        ("--api-services", api_services),
        ("--api-endpoints", api_endpoints),
        ("--runs", runs),
        ("--changes", changes),
    ];
    for (name, value) in numbers {
        command.arg(name).arg(value.to_string());
    }
    if only_api {
        command.arg("--only-api");
    }
    if json {
        command.arg("--json");
    }
    // What cargo says goes to stderr; stdout is that of the benchmark.
    let status = command.status().context("cannot start cargo")?;
    ensure!(status.success(), "the benchmarks have failed: {status}");
    Ok(())
}
