//! CPU time of the BPF programs per packet, compared with minimal baseline programs. The kernel executes the programs
//! in test runs (`BPF_PROG_TEST_RUN`), without a network.
//!
//! `cargo xtask bench packets` runs it; docs/performance.md describes the method. Progress goes to stderr, the table to
//! stdout.

mod baselines;
mod caches;
mod candidate;
mod cases;
mod datapath;
mod flows;
mod frames;
mod goals;
mod report;
mod rounds;
mod two_cpus;
mod verifier;
mod world;

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use clap::Parser;
use lb_tests::{
    bench::{Machine, exit_code, machine, write_json},
    cleanup,
    netns::unique_prefix,
};

use self::{
    candidate::build,
    cases::Case,
    report::{Report, Row},
    rounds::{Contest, Plan, measure},
    world::{Build, Objects, Population, World},
};

/// Measure the nanoseconds that the BPF programs take per packet, against minimal baseline programs
#[derive(Parser)]
struct Args {
    /// Accepted rounds for each case; 12 for figures to publish
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Milliseconds that a program runs in each round
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    slice: u64,
    /// Measure only cases whose name contains this; skip the cases on two CPUs and the costs of the verifier
    #[arg(long, default_value = "")]
    only: String,
    /// Measure the programs of this BPF object instead of those that the agent ships
    #[arg(long)]
    object: Option<PathBuf>,
    /// Compare with the programs of this BPF object, in the same rounds; `cargo xtask bench compare` builds one of
    /// another revision
    #[arg(long)]
    against: Option<PathBuf>,
    /// Name of the measured build in reports
    #[arg(long, default_value = "this tree")]
    name: String,
    /// Name of the other build, of --against, in reports
    #[arg(long, default_value = "the other object")]
    against_name: String,
    /// Also write the results to this file, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also write plots (SVG) into this folder
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Write the report and the plots that docs/performance.md shows
    #[arg(long, conflicts_with_all = ["only", "object", "against"])]
    write_docs: bool,
    /// Ignored; `cargo bench` passes it
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    exit_code(run(&Args::parse()))
}

/// Runs the benchmark; returns whether every goal is met. A comparison returns `true`, whatever its results.
fn run(args: &Args) -> anyhow::Result<bool> {
    ensure!(nix::unistd::geteuid().is_root(), "this benchmark loads BPF programs: run it as root");
    cleanup::on_interrupt();
    let objects = objects(args)?;
    let netns = world::netns(&unique_prefix())?;
    let report = netns.run(|| in_netns(args, &objects).map_err(io::Error::other))?;
    println!("{}", report.text());
    if let Some(file) = &args.json {
        write_json(file, &report)?;
    }
    if let Some(folder) = &args.svg {
        report.write_plots(folder)?;
    }
    if args.write_docs {
        write_docs(&report)?;
    }
    Ok(report.goals_met() || args.against.is_some())
}

fn objects(args: &Args) -> anyhow::Result<Objects> {
    let object = args.object.clone().map_or_else(|| build(ebpf_build::DATAPATH), Ok)?;
    let mut builds = vec![Build { name: args.name.clone(), object }];
    builds.extend(args.against.clone().map(|object| Build { name: args.against_name.clone(), object }));
    Ok(Objects { builds, restore: build(ebpf_build::RESTORE)?, baselines: build(ebpf_build::BASELINES)? })
}

fn in_netns(args: &Args, objects: &Objects) -> anyhow::Result<Report> {
    let machine = Machine::read()?;
    let (cpu, second) = candidate::cpus()?;
    candidate::pin(cpu)?;
    let plan = Plan { rounds: args.rounds, slice: Duration::from_millis(args.slice) };
    let builds = objects.builds.iter().map(|build| build.name.clone()).collect();
    let mut report = Report::new(machine, cpu, plan, builds);
    for population in Population::ALL {
        report.cases.extend(measure_population(args, objects, population, plan, &report.builds)?);
    }
    if args.only.is_empty() {
        match second {
            Some(second) => report.two_cpus = two_cpus::measure(objects, plan, [cpu, second])?,
            None => eprintln!("· this process may run on one CPU only: skipping two CPUs on one table"),
        }
        eprintln!("· verifier");
        report.verifier = objects.builds.iter().map(verifier::costs).collect::<anyhow::Result<_>>()?;
    }
    report.load_after = machine::load()?;
    Ok(report)
}

/// Measures all cases for one population of flows.
fn measure_population(
    args: &Args,
    objects: &Objects,
    population: Population,
    plan: Plan,
    builds: &[String],
) -> anyhow::Result<Vec<Row>> {
    eprintln!("· {population}");
    let world = World::new(objects, population)?;
    let mut of_builds: Vec<_> = (0..objects.builds.len())
        .map(|build| Ok(cases::all(&world, build)?.into_iter()))
        .collect::<anyhow::Result<_>>()?;
    let mut contests = Vec::new();
    loop {
        // The same case of each build.
        let cases: Vec<Case> = of_builds.iter_mut().filter_map(Iterator::next).collect();
        let Some(case) = cases.first() else { break };
        if case.to_string().contains(&args.only) {
            contests.push(Contest::new(&world, cases, plan)?);
        }
    }
    measure(&mut contests, &world, plan)?;
    Ok(contests.iter().map(|contest| Row::new(contest, builds)).collect())
}

/// Writes the report and plots that docs/performance.md shows.
fn write_docs(report: &Report) -> anyhow::Result<()> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let file = docs.join("runs/packets.txt");
    fs::write(&file, report.text() + "\n").with_context(|| format!("writing {}", file.display()))?;
    report.write_plots(&docs.join("img"))
}
