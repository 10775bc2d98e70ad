//! The control plane at scale: time from parsed objects to programmed maps, time of one change, and memory.
//!
//! `cargo xtask bench` runs it. Progress goes to stderr; stdout has the table, or JSON.

mod agent;
mod api_server;
mod growth;
mod in_process;
mod kubernetes;
mod memory;
mod objects;
mod report;
mod start;
mod workload;

use std::{
    path::PathBuf,
    process::ExitCode,
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context as _, ensure};
use clap::Parser;
use lb_common::capacity;
use lb_tests::{
    bench::{Machine, exit_code, machine, write_json},
    cleanup::{self, Cleanup, Resource},
};

use self::{report::Report, workload::Size};

/// Numbers of manifest files that the same Services are split into, measured one after the other.
const FILES: [u32; 2] = [1, 100];

/// Numbers of EndpointSlices per Service, measured one after the other with the API server.
const SLICES: [u32; 2] = [1, 5];

/// Further sizes that the benchmark measures with the API server if `--large` is given.
const LARGE: [Size; 2] = [Size { services: 10_000, endpoints: 5 }, Size { services: 100_000, endpoints: 10 }];

/// Maximum number of endpoints in an EndpointSlice that an API server accepts.
const MOST_ENDPOINTS: i64 = 1000;

/// Measure the time and memory from API objects to BPF maps
#[derive(Parser)]
struct Args {
    /// Number of Services
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..))]
    services: u32,
    /// Number of endpoints of each Service
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=MOST_ENDPOINTS))]
    endpoints: u32,
    /// Number of Services of the API server; 0 skips that part
    #[arg(long, default_value_t = 5_000)]
    api_services: u32,
    /// Number of endpoints of each Service of the API server
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=MOST_ENDPOINTS))]
    api_endpoints: u32,
    /// Measure only the part with an API server
    #[arg(long)]
    only_api: bool,
    /// Measure only how long the agent takes to start with few Services
    #[arg(long, conflicts_with = "only_api")]
    only_start: bool,
    /// Number of starts with few Services, with and without maps from before
    #[arg(long, default_value_t = 11)]
    starts: u32,
    /// Another agent, whose starts are measured in turn with those of this one
    #[arg(long, value_name = "BINARY")]
    other_agent: Option<PathBuf>,
    /// Measure the API server also with 10,000 x 5 and 100,000 x 10; takes 2 GB of memory
    #[arg(long)]
    large: bool,
    /// Write plots to this folder: how times and memory grow with the number of Services
    #[arg(long, value_name = "FOLDER")]
    plots: Option<PathBuf>,
    /// Number of runs, each with empty maps
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Number of endpoints to change in each run, one after the other
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    changes: u32,
    /// Write all figures to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Ignored; `cargo bench` passes it
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    exit_code(run(&Args::parse()))
}

/// Runs the benchmark; returns whether every target is met.
fn run(args: &Args) -> anyhow::Result<bool> {
    let size = Size { services: args.services, endpoints: args.endpoints };
    // A change needs free slots: the agent writes all backends of a Service to new slots before it frees the old ones.
    let most = capacity::BACKENDS / 10 * 9;
    let api_size = Size { services: args.api_services, endpoints: args.api_endpoints };
    let backends = size.endpoints();
    ensure!(backends <= most as u64, "{backends} endpoints do not fit into BACKENDS: take at most {most}");
    ensure!(
        nix::unistd::geteuid().is_root(),
        "this benchmark loads BPF programs and creates a network namespace: run it as root"
    );
    cleanup::on_interrupt();

    let mut report = Report::new(size, args.runs, args.changes, Machine::read()?);
    if !args.only_api {
        start::measure(args.other_agent.as_deref(), args.starts, &mut report)?;
    }
    if !args.only_api && !args.only_start {
        in_process::measure(size, args.runs, args.changes, &mut report)?;
        for files in FILES {
            agent::measure(size, files.min(size.services), args.runs, args.changes, &mut report)?;
        }
    }
    let mut sizes = Vec::new();
    if api_size.services > 0 && !args.only_start {
        for slices in SLICES {
            let slices = slices.min(api_size.endpoints);
            let measured = kubernetes::measure(api_size, slices, args.runs, args.changes, &mut report)?;
            sizes.extend((slices == 1).then_some(measured));
        }
    }
    for size in LARGE.into_iter().filter(|_| args.large && !args.only_start) {
        sizes.push(kubernetes::measure(size, 1, args.runs, args.changes, &mut report)?);
    }
    if let Some(folder) = &args.plots {
        sizes.sort_by_key(|growth| growth.size.endpoints());
        growth::plot(&sizes, &Machine::read()?.to_string(), folder)?;
    }
    report.load_after = machine::load()?;
    println!("{}", report.text());
    if let Some(file) = &args.json {
        write_json(file, &report)?;
    }
    Ok(report.targets_met())
}

/// A temporary folder, and a guard that, when dropped, unmounts all file systems in the folder and removes the folder.
fn temporary_folder() -> anyhow::Result<(PathBuf, Cleanup)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("lb-bench-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = std::env::temp_dir().join(name);
    let guard = Cleanup::of(Resource::Folder(path.clone()));
    std::fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
    Ok((path, guard))
}
