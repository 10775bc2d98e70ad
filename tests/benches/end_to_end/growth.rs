//! The rate of new connections with two busy CPUs, by the number of idle flows in the table; and the memory of flows.
//!
//! Each CPU runs one client and one server. Every node exists before the first round. The order of the nodes is random
//! in each round.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use comfy_table::Table;
use lb_tests::{
    bench::{Bar, Machine, Plot, Quantile, Samples, machine},
    netns::unique_prefix,
};
use serde::Serialize;

use crate::{
    cpu::Cpus,
    family::Family,
    idle::{self, Pins},
    load::saturate,
    node::Node,
    system::{Backend, Running, Setup, System},
    way::Way,
    workload::{Size, Workload},
};

/// The plan of the measurement: numbers of idle flows, rounds, and length of bursts.
pub(crate) struct Plan {
    pub(crate) idle_flows: Vec<u32>,
    pub(crate) rounds: u32,
    pub(crate) time: Duration,
}

/// All results, as `--json` writes them.
#[derive(Serialize)]
pub(crate) struct Report {
    machine: Machine,
    load_after: f64,
    rounds: u32,
    /// Length of each burst in seconds.
    seconds: f64,
    rows: Vec<Row>,
    /// Bytes that all maps take per million of `--max-connections`, whether the flows exist or not.
    memory_per_million: f64,
}

#[derive(Serialize)]
struct Row {
    name: String,
    /// Number of idle flows in the table; `None` without a load balancer.
    idle_flows: Option<u32>,
    /// Connections per second of both CPUs together, by round.
    rate: Samples,
    /// Median latency of a connection in seconds, by round.
    median: Samples,
    /// 99th percentile of the latency in seconds, by round.
    p99: Samples,
}

/// A node with a certain number of idle flows, and its results.
struct Candidate {
    node: Node,
    running: Running,
    idle_flows: Option<u32>,
    rates: Vec<f64>,
    medians: Vec<f64>,
    p99s: Vec<f64>,
}

/// Room in the flow table beside the idle flows: connections in TIME_WAIT keep their flows for a while.
const ACTIVE: u32 = 300_000;
/// Size of a second, smaller flow table: the memory per flow is computed from the difference to the large table.
const SMALL: u32 = 100_000;

/// Measures without a load balancer, and with each number of idle flows in `plan`.
pub(crate) fn measure(plan: &Plan) -> Result<Report> {
    let machine = Machine::read()?;
    let apart = Cpus::choose(true)?;
    ensure!(!apart.is_one(), "this process may run on one CPU only: two are to be busy");
    let cpus = [apart.client, apart.server];
    let most = plan.idle_flows.iter().max().copied().unwrap_or(0);
    let connections = most + ACTIVE;
    let mut candidates = vec![Candidate::new(None, connections)?];
    for flows in &plan.idle_flows {
        candidates.push(Candidate::new(Some(*flows), connections)?);
    }
    let large = candidates.last().and_then(|candidate| candidate.running.bpffs()).map(Pins::find);
    let large = large.context("no agent runs")??.memory()?;
    let memory_per_million = memory_per_million(large, connections)?;
    for round in 1..=plan.rounds {
        eprintln!("round {round} of {}", plan.rounds);
        fastrand::shuffle(&mut candidates);
        for candidate in &mut candidates {
            candidate.burst(cpus, plan.time)?;
        }
    }
    candidates.sort_by_key(|candidate| candidate.idle_flows);
    Ok(Report {
        machine,
        load_after: machine::load()?,
        rounds: plan.rounds,
        seconds: plan.time.as_secs_f64(),
        rows: candidates.into_iter().map(Row::new).collect(),
        memory_per_million,
    })
}

/// Bytes per million connections, computed from the maps of two agents with tables of different sizes.
fn memory_per_million(large: u64, connections: u32) -> Result<f64> {
    let node = Node::create(&unique_prefix(), Family::V4)?;
    let running = start(&node, SMALL)?;
    let small = Pins::find(running.bpffs().context("no agent runs")?)?.memory()?;
    Ok((large as f64 - small as f64) / f64::from(connections - SMALL) * 1e6)
}

fn start(node: &Node, connections: u32) -> Result<Running> {
    let setup = Setup {
        iptables: Backend::Legacy,
        xdp: Some("off".to_owned()),
        cluster_cidr: Some(idle::CLIENTS),
        arguments: vec!["--max-connections".to_owned(), connections.to_string()],
    };
    setup.start(System::Tc, node, &Workload::new(Family::V4, Size { services: 1, endpoints: 1 }))
}

impl Candidate {
    fn new(idle_flows: Option<u32>, connections: u32) -> Result<Self> {
        let node = Node::create(&unique_prefix(), Family::V4)?;
        let running = match idle_flows {
            Some(flows) => {
                let running = start(&node, connections)?;
                eprintln!("opening {flows} idle flows");
                idle::open(&node, running.bpffs().context("no agent runs")?, flows)?;
                running
            }
            None => Running::none(),
        };
        Ok(Self { node, running, idle_flows, rates: Vec::new(), medians: Vec::new(), p99s: Vec::new() })
    }

    fn burst(&mut self, cpus: [usize; 2], time: Duration) -> Result<()> {
        let to = match self.idle_flows {
            Some(_) => Workload::targets(Family::V4, Way::Pod),
            None => Workload::endpoint(Family::V4, Way::Pod),
        };
        let [local, _] = self.node.servers();
        let burst = saturate::run(&self.node.pod, local, to.tcp, cpus, time)
            .with_context(|| format!("connections with {:?} idle flows", self.idle_flows))?;
        let latencies = Samples::new(burst.latencies);
        self.rates.push(burst.rate);
        self.medians.push(latencies.at(Quantile::Median));
        self.p99s.push(latencies.at(Quantile::P99));
        Ok(())
    }
}

impl Row {
    fn new(candidate: Candidate) -> Self {
        let name = match candidate.idle_flows {
            Some(flows) => format!("lb-agent, tc, {flows} idle flows"),
            None => "plain routing".to_owned(),
        };
        let Candidate { idle_flows, rates, medians, p99s, .. } = candidate;
        let [rate, median, p99] = [rates, medians, p99s].map(Samples::new);
        Self { name, idle_flows, rate, median, p99 }
    }

    fn cells(&self) -> Vec<String> {
        let show = |samples: &Samples, factor: f64, digits: usize| {
            let [low, middle, high] = [Quantile::Min, Quantile::Median, Quantile::Max]
                .map(|quantile| format!("{:.digits$}", samples.at(quantile) * factor));
            format!("{middle} ({low} to {high})")
        };
        vec![self.name.clone(), show(&self.rate, 1.0, 0), show(&self.median, 1e6, 1), show(&self.p99, 1e6, 1)]
    }

    fn bar(&self, samples: &Samples, factor: f64) -> Bar {
        let at = |quantile| samples.at(quantile) * factor;
        Bar {
            label: self.name.clone(),
            min: at(Quantile::Min),
            median: at(Quantile::Median),
            max: at(Quantile::Max),
            is_reference: self.idle_flows.is_none(),
        }
    }
}

impl Report {
    pub(crate) fn text(&self) -> String {
        let Self { machine, load_after, rounds, seconds, rows, memory_per_million } = self;
        let mut table = Table::new();
        table.load_preset(comfy_table::presets::NOTHING).force_no_tty();
        table.set_header(["", "connections/s", "median latency, µs", "p99, µs"]);
        table.add_rows(rows.iter().map(Row::cells));
        format!(
            "{machine}, {load_after} after\n\
             {rounds} rounds of bursts of {seconds} s; a client and a server on each of two CPUs: connect, a byte there \
             and back, close; pod to pod through a cluster IP; median (min to max) of the rounds\n\n\
             {table}\n\n\
             memory: {:.0} MB of maps per million flows (--max-connections)",
            memory_per_million / 1e6
        )
    }

    /// Writes a plot of the rates and one of the latencies.
    pub(crate) fn plot(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        let plot = |title: &str, unit: &str, bars| Plot {
            title: title.to_owned(),
            notes: vec![self.machine.to_string(), "bar: median of the rounds; line: min to max".to_owned()],
            unit: unit.to_owned(),
            bars,
        };
        let rates = self.rows.iter().map(|row| row.bar(&row.rate, 1.0)).collect();
        plot("New connections with both CPUs busy, by idle flows", "connections per second", rates)
            .write(&folder.join("growth-rate.svg"))?;
        let latencies = self.rows.iter().map(|row| row.bar(&row.p99, 1e6)).collect();
        plot("p99 latency of a connection with both CPUs busy, by idle flows", "µs", latencies)
            .write(&folder.join("growth-p99.svg"))
    }
}
