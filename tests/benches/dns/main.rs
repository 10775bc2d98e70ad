//! Compares the agent's DNS server with unbound, which serves a static zone with the same records: queries per second,
//! CPU time for each query, memory. dnsperf sends the queries.
//!
//! Each server runs in a namespace of its own. In each round both servers get one burst for each kind of query; which
//! server is first is random.

mod load;
mod report;
mod servers;
mod workload;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use lb_tests::{
    agent,
    bench::{Machine, exit_code, write_json},
    cleanup::{self, Cleanup, Resource},
    netns::{Netns, unique_prefix},
};

use self::{
    report::{Memory, Report, Row},
    servers::{AGENT, UNBOUND, Unbound, dig, folder, settled_memory, start_agent},
    workload::{Kind, Workload},
};

/// Programs that the benchmark runs, with their Debian packages.
const PROGRAMS: [(&str, &str); 3] =
    [("unbound", "unbound"), ("dnsperf", "dnsperf"), ("dig", "bind9-dnsutils")];
/// Number of names of each kind for which the answers of both servers are compared before the first round.
const COMPARED: usize = 10;

/// Measure the agent's DNS server beside unbound
#[derive(Parser)]
struct Args {
    /// Number of Services; half of them are headless
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(2..))]
    services: u32,
    /// Number of endpoints of each Service
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    endpoints: u32,
    /// Number of rounds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Seconds of each burst
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Number of starts of each server, for its memory
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    starts: u32,
    /// Write all figures to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report to docs/runs/dns.txt, which docs/dns.md refers to
    #[arg(long)]
    write_docs: bool,
    /// Ignored; `cargo bench` passes it
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    exit_code(run(&Args::parse()).map(|()| true))
}

fn run(args: &Args) -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "this benchmark creates network namespaces: run it as root");
    check_programs()?;
    cleanup::on_interrupt();
    let path = std::env::temp_dir().join(format!("lb-bench-dns-{}", std::process::id()));
    let _guard = Cleanup::of(Resource::Folder(path.clone()));
    let workload = Workload { services: args.services, endpoints: args.endpoints };
    let mut report = Report {
        workload,
        rounds: args.rounds,
        seconds: args.seconds,
        machine: Machine::read()?,
        servers: [agent::binary().display().to_string(), unbound_version()?],
        memory: Memory::default(),
        rows: Kind::ALL.map(|kind| Row { kind, rounds: Vec::new() }).into(),
    };
    measure_baselines(args, &path, &mut report.memory)?;
    for start in 0..args.starts {
        // The rounds are divided among the starts.
        let rounds = args.rounds / args.starts + u32::from(start < args.rounds % args.starts);
        eprintln!("start {} of {}, {rounds} rounds", start + 1, args.starts);
        measure(args, rounds, &path, &mut report)?;
    }
    let text = report.text()?;
    println!("{text}");
    if let Some(file) = &args.json {
        write_json(file, &report)?;
    }
    if args.write_docs {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/runs/dns.txt");
        fs::write(&file, text + "\n").with_context(|| format!("writing {}", file.display()))?;
    }
    Ok(())
}

/// Fails if a program is missing. The benchmark does not install missing ones, because Debian's package also starts
/// unbound as a service of the machine.
fn check_programs() -> Result<()> {
    let paths: Vec<PathBuf> = std::env::var_os("PATH").iter().flat_map(std::env::split_paths).collect();
    let is_missing = |program: &str| !paths.iter().any(|path| path.join(program).exists());
    let missing: Vec<&str> =
        PROGRAMS.into_iter().filter(|(program, _)| is_missing(program)).map(|(_, package)| package).collect();
    ensure!(
        missing.is_empty(),
        "this machine lacks {0}: run `apt-get install --no-install-recommends {0}`, and then, if this installs unbound, \
         `systemctl disable --now unbound`, as Debian starts it as a resolver of the machine",
        missing.join(" ")
    );
    Ok(())
}

fn unbound_version() -> Result<String> {
    let output = Command::new("unbound").arg("-V").output().context("running unbound -V")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().next().unwrap_or("unbound of an unknown version").replace("Version", "unbound"))
}

/// Measures the memory of the agent with the Services but without DNS, and the memory of unbound with a zone of two
/// Services.
fn measure_baselines(args: &Args, path: &Path, memory: &mut Memory) -> Result<()> {
    let workload = Workload { services: args.services, endpoints: args.endpoints };
    for start in 0..args.starts {
        let netns = Netns::create(&unique_prefix())?;
        let agent = start_agent(&netns, &folder(path, &format!("without-{start}")), workload, false)?;
        memory.baseline[0].push(settled_memory(agent.pid())?);
        drop(agent);
        let few = Workload { services: 2, ..workload };
        let unbound = Unbound::start(&netns, &folder(path, "empty"), few)?;
        memory.baseline[1].push(settled_memory(unbound.pid())?);
    }
    Ok(())
}

/// Starts both servers, and measures this many rounds.
fn measure(args: &Args, rounds: u32, path: &Path, report: &mut Report) -> Result<()> {
    let workload = report.workload;
    let netns = [Netns::create(&unique_prefix())?, Netns::create(&unique_prefix())?];
    let agent = start_agent(&netns[0], &folder(path, &unique_prefix()), workload, true)?;
    let unbound = Unbound::start(&netns[1], &folder(path, "unbound"), workload)?;
    let servers = [(AGENT, agent.pid()), (UNBOUND, unbound.pid())];
    for (begin, (_, pid)) in report.memory.begin.iter_mut().zip(servers) {
        begin.push(settled_memory(pid)?);
    }
    compare_answers(&netns, workload)?;
    let time = Duration::from_secs_f64(args.seconds);
    for _ in 0..rounds {
        for row in &mut report.rows {
            let queries = path.join("queries");
            fs::write(&queries, workload.queries(row.kind))?;
            let burst =
                |server: usize| load::burst(&netns[server], servers[server], &queries, row.kind, time);
            let bursts = if fastrand::bool() {
                [burst(0)?, burst(1)?]
            } else {
                let second = burst(1)?;
                [burst(0)?, second]
            };
            row.rounds.push(bursts);
        }
    }
    for (end, (_, pid)) in report.memory.end.iter_mut().zip(servers) {
        end.push(settled_memory(pid)?);
    }
    Ok(())
}

/// Fails unless both servers give the same answers for some names of each kind.
fn compare_answers(netns: &[Netns; 2], workload: Workload) -> Result<()> {
    for kind in Kind::ALL {
        for number in workload.asked(kind).take(COMPARED) {
            let (name, record) = (kind.name(number), kind.record());
            let answers = [dig(&netns[0], AGENT, &name, record)?, dig(&netns[1], UNBOUND, &name, record)?];
            let has_records = !matches!(kind, Kind::NoData | Kind::Negative);
            ensure!(
                answers[0] == answers[1] && has_records != answers[0].is_empty(),
                "{name} {record}: the agent answers {:?}, unbound {:?}",
                answers[0],
                answers[1]
            );
        }
    }
    Ok(())
}
