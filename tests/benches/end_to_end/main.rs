//! End to end: throughput, latency and CPU time of clients, over veth in network namespaces of this machine.
//!
//! `cargo xtask bench end-to-end` runs it; docs/performance.md describes the method. Progress goes to stderr, the
//! tables to stdout.

#[path = "../packets/candidate.rs"]
#[expect(dead_code, reason = "shared with the packet benchmark")]
mod candidate;
mod compare;
mod cpu;
mod family;
#[path = "../packets/frames.rs"]
#[expect(dead_code, reason = "shared with the packet benchmark")]
mod frames;
mod growth;
mod idle;
mod load;
mod node;
mod prepare;
mod report;
mod rounds;
mod system;
mod targets;
mod way;
mod workload;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::ensure;
use clap::Parser;
use lb_tests::{
    bench::{Machine, exit_code, machine, write_json},
    cleanup,
};

use self::{
    cpu::Cpus,
    family::Family,
    load::Measure,
    prepare::Plan,
    report::Report,
    system::{Backend, Setup, System, agent_knows},
    way::Way,
    workload::Size,
};

/// Numbers of Services that `--full` measures.
const ALL_SERVICES: [u32; 4] = [1, 1_000, 10_000, 30_000];
const ALL_ENDPOINTS: [u32; 3] = [1, 100, 5_000];

/// Measure throughput, latency and CPU time of clients, against kube-proxy's rules and plain routing
#[derive(Parser)]
struct Args {
    /// Numbers of Services; the two measured ones, for internal and for external clients, count as one
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10_000], value_parser = clap::value_parser!(u32).range(1..=60_000))]
    services: Vec<u32>,
    /// Numbers of endpoints of each measured Service; all others have one
    #[arg(long, value_delimiter = ',', default_values_t = [1], value_parser = clap::value_parser!(u32).range(1..=10_000))]
    endpoints: Vec<u32>,
    /// Measure 1, 1000, 10000 and 30000 Services with 1, 100 and 5000 endpoints
    #[arg(long, conflicts_with_all = ["services", "endpoints"])]
    full: bool,
    /// Paths from client to server to measure
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Way::ALL)]
    ways: Vec<Way>,
    /// Workloads to measure
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Measure::ALL)]
    measures: Vec<Measure>,
    /// Load balancers to measure
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = System::ALL)]
    systems: Vec<System>,
    /// Number of rounds; each round measures every combination once
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Length of each burst in seconds
    #[arg(long, default_value_t = 0.1)]
    seconds: f64,
    /// Use IPv6 instead of IPv4
    #[arg(long)]
    ipv6: bool,
    /// Run clients and servers on different CPUs: more realistic, with the noise of CPUs that wake up
    #[arg(long)]
    apart: bool,
    /// Kernel backend of iptables; the rules are the same
    #[arg(long, value_enum, default_value = "legacy")]
    iptables: Backend,
    /// Mode of XDP
    #[arg(long, default_value = "native", value_parser = ["native", "generic"])]
    xdp: String,
    /// Measure the rate and latency of new connections with two busy CPUs, with each number of idle flows, and the
    /// memory of flows, instead of comparing load balancers
    #[arg(long, conflicts_with_all = ["ipv6", "full"])]
    growth: bool,
    /// Numbers of idle flows for `--growth`
    #[arg(long, value_delimiter = ',', default_values_t = [0, 100_000, 1_000_000], value_parser = clap::value_parser!(u32).range(0..=4_000_000))]
    idle_flows: Vec<u32>,
    /// Also write the results, with every burst, to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write plots (SVG) into this folder
    #[arg(long, value_name = "DIR")]
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
    ensure!(
        nix::unistd::geteuid().is_root(),
        "this benchmark loads BPF programs and creates network namespaces: run it as root"
    );
    ensure!((0.01..=10.0).contains(&args.seconds), "--seconds must be from 0.01 to 10, not {}", args.seconds);
    cleanup::on_interrupt();
    cleanup::remove_stale()?;
    if args.growth {
        return measure_growth(args);
    }
    let report = measure(args)?;
    println!("{}", report.text());
    if let Some(file) = &args.json {
        write_json(file, &report)?;
    }
    if let Some(folder) = &args.svg {
        report.plot(folder)?;
    }
    Ok(report.targets_met())
}

/// Measures new connections with idle flows in the table. There are no targets for the results yet.
fn measure_growth(args: &Args) -> anyhow::Result<bool> {
    let plan = growth::Plan {
        idle_flows: args.idle_flows.clone(),
        rounds: args.rounds,
        time: Duration::from_secs_f64(args.seconds),
    };
    let report = growth::measure(&plan)?;
    println!("{}", report.text());
    if let Some(file) = &args.json {
        write_json(file, &report)?;
    }
    if let Some(folder) = &args.svg {
        report.plot(folder)?;
    }
    Ok(true)
}

fn measure(args: &Args) -> anyhow::Result<Report> {
    let machine = Machine::read()?;
    let cpus = Cpus::choose(args.apart)?;
    let mut report = Report {
        load_after: machine.load_before,
        machine,
        family: family(args),
        seconds: args.seconds,
        rounds: args.rounds,
        apart: !cpus.is_one(),
        preparations: Vec::new(),
        comparisons: Vec::new(),
        targets: Vec::new(),
        repeated: 0,
        dropped: 0,
        bursts: Vec::new(),
    };
    // Measures one group of sizes after the other: most machines have too little memory for all nodes at once.
    for sizes in sizes(args) {
        let prepared = plan(args, cpus, sizes)?.prepare()?;
        prepared.field.check()?;
        let outcome = prepared.field.run(&args.measures, &args.ways, args.rounds)?;
        report.add(&prepared.field.candidates, outcome);
        report.preparations.extend(prepared.preparations);
    }
    report.targets = targets::all(&report.comparisons);
    report.load_after = machine::load()?;
    Ok(report)
}

const fn family(args: &Args) -> Family {
    if args.ipv6 { Family::V6 } else { Family::V4 }
}

fn plan(args: &Args, cpus: Cpus, sizes: Vec<Size>) -> anyhow::Result<Plan> {
    let xdp = agent_knows("--xdp")?.then(|| args.xdp.clone());
    let mut systems = args.systems.clone();
    if xdp.is_none() && systems.contains(&System::Xdp) {
        eprintln!("this agent has no --xdp: skipping XDP");
        systems.retain(|system| *system != System::Xdp);
    }
    Ok(Plan {
        family: family(args),
        ways: args.ways.clone(),
        systems,
        sizes,
        setup: Setup { iptables: args.iptables, xdp, cluster_cidr: None, arguments: Vec::new() },
        cpus,
        time: Duration::from_secs_f64(args.seconds),
    })
}

/// The sizes in groups that are measured together. A group has one number of endpoints, and every number of Services.
fn sizes(args: &Args) -> Vec<Vec<Size>> {
    let (services, endpoints) = if args.full {
        (&ALL_SERVICES[..], &ALL_ENDPOINTS[..])
    } else {
        (&args.services[..], &args.endpoints[..])
    };
    let of = |endpoints: &u32| {
        services.iter().map(|services| Size { services: *services, endpoints: *endpoints }).collect()
    };
    endpoints.iter().map(of).collect()
}
