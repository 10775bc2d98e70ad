//! CPU time of the BPF programs per packet, against minimal baseline programs: test runs in the kernel, no network.
//!
//! `cargo xtask bench packets` runs it; docs/performance.md describes the method. Progress goes to stderr, the table to
//! stdout.

mod baselines;
mod candidate;
mod cases;
mod datapath;
mod frames;
mod report;
mod rounds;
mod world;

use std::{io, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context as _, ensure};
use clap::Parser;
use lb_tests::{
    bench::{Machine, exit_code, machine},
    cleanup,
    netns::unique_prefix,
};

use self::{
    report::Report,
    rounds::{Contest, Plan, measure},
    world::{Objects, World},
};

/// Measure the nanoseconds that the BPF programs take per packet, against minimal baseline programs
#[derive(Parser)]
struct Args {
    /// Accepted rounds for each case
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Milliseconds that a program runs in each round
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    slice: u64,
    /// Measure only cases whose name contains this
    #[arg(long, default_value = "")]
    only: String,
    /// Measure the programs of this BPF object instead of those that the agent ships
    #[arg(long)]
    object: Option<PathBuf>,
    /// Also write the results to this file, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also write plots (SVG) into this folder
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Ignored; `cargo bench` passes it
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    exit_code(run(&Args::parse()))
}

/// Runs the benchmark; returns whether every target is met.
fn run(args: &Args) -> anyhow::Result<bool> {
    ensure!(nix::unistd::geteuid().is_root(), "this benchmark loads BPF programs: run it as root");
    cleanup::on_interrupt();
    let objects = Objects {
        datapath: args.object.clone().map_or_else(|| build(ebpf_build::DATAPATH), Ok)?,
        restore: build(ebpf_build::RESTORE)?,
        baselines: build(ebpf_build::BASELINES)?,
    };
    let netns = world::netns(&unique_prefix())?;
    let report = netns.run(|| in_netns(args, objects).map_err(io::Error::other))?;
    println!("{}", report.text());
    if let Some(file) = &args.json {
        report.write_json(file)?;
    }
    if let Some(folder) = &args.svg {
        report.write_plots(folder)?;
    }
    Ok(report.targets_met())
}

fn in_netns(args: &Args, objects: Objects) -> anyhow::Result<Report> {
    let machine = Machine::read()?;
    let cpu = candidate::pin()?;
    let plan = Plan { rounds: args.rounds, slice: Duration::from_millis(args.slice) };
    eprintln!("· loading the programs and opening {} flows", 2 * world::MANY);
    let mut world = World::new(objects)?;
    let mut contests = Vec::new();
    for case in cases::all(&world)? {
        if case.to_string().contains(&args.only) {
            contests.push(Contest::new(&mut world, case, plan)?);
        }
    }
    measure(&mut contests, &mut world, plan)?;
    Ok(Report::new(machine, cpu, machine::load()?, plan, &contests))
}

/// Builds a BPF object in the folder of the workspace's other objects.
fn build(binary: ebpf_build::Binary) -> anyhow::Result<PathBuf> {
    let me = std::env::current_exe().context("cannot tell where the benchmark itself is")?;
    // The path of the benchmark is target/release/deps/packets-….
    let profile_dir = me.ancestors().nth(2).context("the benchmark is not in a target folder")?;
    let target_dir = ebpf_build::target_dir(profile_dir);
    Ok(ebpf_build::build(binary, &target_dir, std::env::consts::ARCH)?.path)
}
