//! Health checks of many endpoints: the rate of probes that one agent reaches, how regular the probes are, and the
//! agent's CPU time and memory. Then all endpoints fail at once, and return. One server in the same namespace has the
//! addresses of all endpoints.

mod outage;
mod report;
mod server;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, ValueEnum};
use lb_tests::{
    agent::{Agent, Settings},
    bench::{Machine, Resident, cpu_time, exit_code, write_json},
    cleanup::{self, Cleanup, Resource},
    manifests::Manifests,
    netns::{Netns, unique_prefix},
    wait_for,
};
use serde::Serialize;

use self::{
    outage::METRICS,
    report::{Results, Row, report},
    server::{PORT, Server, addresses},
};

/// Maximum number of endpoints of one Service, all in one EndpointSlice.
const PER_SERVICE: usize = 100;
/// How long all endpoints may take to get their first probe, beyond the interval.
const PATIENCE: Duration = Duration::from_secs(60);
/// Minimum share of the requested probe rate that the agent must reach.
const REACHED: f64 = 0.9;

/// Measure health checks of many endpoints
#[derive(Parser)]
struct Args {
    /// Number of endpoints
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    endpoints: u32,
    /// Seconds from one probe of an endpoint to the next
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// Number of intervals that each measurement lasts
    #[arg(long, default_value_t = 6, value_parser = clap::value_parser!(u32).range(2..))]
    intervals: u32,
    /// Write all figures to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the report to docs/runs/health.txt, which docs/health-checks.md refers to
    #[arg(long)]
    write_docs: bool,
    /// Ignored; `cargo bench` passes it
    #[arg(long, hide = true)]
    bench: bool,
}

/// How the agent checks the endpoints.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
enum Check {
    None,
    Tcp,
    Http,
}

impl Check {
    const ALL: [Self; 3] = [Self::None, Self::Tcp, Self::Http];

    const fn name(self) -> &'static str {
        match self {
            Self::None => "no check",
            Self::Tcp => "tcp",
            Self::Http => "http",
        }
    }
}

fn main() -> ExitCode {
    exit_code(run(&Args::parse()))
}

/// Runs the benchmark; returns whether the agent has reached the share [`REACHED`] of the requested probe rate.
fn run(args: &Args) -> Result<bool> {
    ensure!(nix::unistd::geteuid().is_root(), "this benchmark loads BPF programs: run it as root");
    cleanup::on_interrupt();
    let machine = Machine::read()?;
    let mut rows = Vec::new();
    for check in Check::ALL {
        eprintln!("· {}", check.name());
        rows.push(measure(args, check)?);
    }
    let text = report(args, &machine, &rows)?;
    println!("{text}");
    if let Some(file) = &args.json {
        write_json(
            file,
            &Results { endpoints: args.endpoints, interval: args.interval, machine, rows: &rows },
        )?;
    }
    if args.write_docs {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/runs/health.txt");
        fs::write(&file, text + "\n").with_context(|| format!("writing {}", file.display()))?;
    }
    let checked = rows.iter().filter(|row| row.check != Check::None);
    Ok(checked.map(|row| row.rate() / asked(args)).all(|share| share >= REACHED))
}

/// Probes per second that the interval asks for.
fn asked(args: &Args) -> f64 {
    f64::from(args.endpoints) / args.interval as f64
}

fn measure(args: &Args, check: Check) -> Result<Row> {
    let path = std::env::temp_dir().join(format!("lb-bench-health-{}", std::process::id()));
    let _guard = Cleanup::of(Resource::Folder(path.clone()));
    let netns = Netns::create(&unique_prefix())?;
    let interval = Duration::from_secs(args.interval);
    let most = 2 * args.endpoints as usize * args.intervals as usize;
    let server = Server::start(&netns, args.endpoints, check == Check::Http, most)?;
    let agent = start_agent(&netns, &path, args, check)?;
    if check != Check::None {
        let all = || (server.probed() == args.endpoints as usize).then_some(());
        wait_for(interval + PATIENCE, all).with_context(|| {
            format!("only {} endpoints were probed; log:\n{}", server.probed(), agent.log())
        })?;
    }
    // The agent makes each endpoint's second probe up to half an interval early or late; only later probes are regular.
    sleep(interval * 2);
    server.reset();
    let (start, before) = (Instant::now(), cpu_time(agent.pid())?);
    sleep(interval * args.intervals);
    let (seen, time) = (server.seen(start.elapsed()), start.elapsed());
    let cpu = cpu_time(agent.pid())?.saturating_sub(before).as_secs_f64();
    let resident = Resident::of(agent.pid())?;
    let outage = match check {
        Check::None => None,
        Check::Tcp | Check::Http => Some(
            outage::measure(&netns, agent.pid(), args.endpoints, interval)
                .with_context(|| format!("log of the agent:\n{}", agent.log()))?,
        ),
    };
    let peak = Resident::of(agent.pid())?.peak;
    ensure!(agent.terminate()?.success(), "the agent failed to stop");
    Ok(Row { check, seconds: time.as_secs_f64(), cpu, resident, seen, outage, peak })
}

fn start_agent(netns: &Netns, path: &Path, args: &Args, check: Check) -> Result<Agent> {
    fs::create_dir_all(path)?;
    let manifests = Manifests::create(path.join("manifests"))?;
    let endpoints: Vec<_> = addresses(args.endpoints).collect();
    for (number, addresses) in endpoints.chunks(PER_SERVICE).enumerate() {
        let name = format!("service-{number:04}");
        let annotations = match check {
            Check::None => String::new(),
            Check::Tcp | Check::Http => format!(
                ", annotations: {{lb.dev/health-check: {}, lb.dev/health-check-interval: {}s}}",
                check.name(),
                args.interval
            ),
        };
        let endpoints: String =
            addresses.iter().map(|address| format!("- {{addresses: [{address}]}}\n")).collect();
        let text = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}{annotations}}}\nspec: {{ports: [{{port: 80, targetPort: \
             {PORT}}}]}}\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {{name: {name}-1, labels: \
             {{kubernetes.io/service-name: {name}}}}}\naddressType: IPv4\nports: [{{port: \
             {PORT}}}]\nendpoints:\n{endpoints}"
        );
        manifests.write(&name, &text)?;
    }
    let settings = Settings {
        node_name: "bench".to_owned(),
        manifests: manifests.folder().to_owned(),
        bpffs: PathBuf::from(path).join("bpffs"),
        cgroup: None,
        log: path.join("log"),
        arguments: vec!["--metrics-bind-address".to_owned(), METRICS.to_string()],
        binary: None,
    };
    Agent::start(netns, settings)
}
