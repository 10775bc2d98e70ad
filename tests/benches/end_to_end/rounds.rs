//! Repeated bursts of all candidates in turn, and the choice of valid ones.
//!
//! A machine may change its speed within seconds. So bursts are short, each candidate is compared with the baseline of
//! its own round, and the order is random in each round. A burst is repeated if the machine's speed differs from that
//! during the baseline's burst. A burst that should keep its only CPU busy is also repeated if other processes used
//! this CPU for more than 5 % of the time. After a few attempts, a burst is dropped.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lb_tests::netns::Netns;
use serde::Serialize;

use crate::{
    cpu::Cpus,
    family::Family,
    load::{Burst, Measure, Servers, Targets, peer},
    node::{self, Node},
    system::System,
    way::Way,
    workload::{Size, Workload},
};

/// Number of attempts at a burst in one round.
const ATTEMPTS: u32 = 4;
/// Maximum relative difference of the machine's speed between a candidate's burst and the baseline's burst.
const DRIFT: f64 = 0.06;
/// Maximum share of a burst's time in which other processes may use the CPU.
const DISTURBANCE: f64 = 0.05;

/// A combination of load balancer, path and size that is measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Candidate {
    /// The load balancer of the candidate.
    pub(crate) system: System,
    /// The path of packets from client to server.
    pub(crate) way: Way,
    /// Number of Services and endpoints; `None` for the baseline without a load balancer.
    pub(crate) size: Option<Size>,
    /// Index in [`Field::nodes`] of the candidate's node.
    #[serde(skip)]
    pub(crate) node: usize,
}

impl Candidate {
    /// The candidate's label in tables and plots.
    pub(crate) fn label(&self) -> String {
        let name = self.system.name(self.way);
        match self.size {
            None => name.to_owned(),
            Some(Size { services, endpoints: 1 }) => format!("{name}, {services} Services"),
            Some(Size { services, endpoints }) => {
                format!("{name}, {services} Services, {endpoints} endpoints")
            }
        }
    }
}

/// The result of one accepted burst.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Sample {
    /// The workload of the burst.
    pub(crate) measure: Measure,
    pub(crate) round: u32,
    /// Transactions, datagrams or bytes per second.
    pub(crate) rate: f64,
    /// CPU seconds of the measuring process and of ksoftirqd per transaction, datagram or byte.
    pub(crate) cpu: f64,
    /// CPU seconds of the whole machine per transaction, datagram or byte, in coarse steps.
    pub(crate) machine: f64,
    /// Median latency in seconds; `None` for workloads without latencies.
    pub(crate) median: Option<f64>,
    /// 99th percentile of the latency in seconds; `None` for workloads without latencies.
    pub(crate) p99: Option<f64>,
    /// Duration in seconds of the calculation that shows the machine's speed: the mean of runs before and after the
    /// burst.
    pub(crate) probe: f64,
    /// Length of the burst in seconds.
    pub(crate) seconds: f64,
    #[serde(skip)]
    is_disturbed: bool,
}

/// Everything that rounds measure: the candidates, and their nodes.
pub(crate) struct Field {
    /// The IP family of all connections.
    pub(crate) family: Family,
    /// The nodes, each with a running load balancer or none.
    pub(crate) nodes: Vec<Node>,
    /// The combinations that are compared.
    pub(crate) candidates: Vec<Candidate>,
    /// Length of each burst.
    pub(crate) time: Duration,
    /// CPUs that the threads of clients and servers are pinned to.
    pub(crate) cpus: Cpus,
}

/// The accepted bursts of all candidates, and how many were repeated or dropped.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    /// For each candidate, its samples; at most one per workload and round.
    pub(crate) samples: Vec<Vec<Sample>>,
    /// Number of bursts that were repeated.
    pub(crate) repeated: u32,
    /// Number of bursts that were dropped after the last attempt. The candidate of a dropped burst has no sample of the
    /// workload for the round.
    pub(crate) dropped: u32,
}

impl Field {
    /// Checks for each candidate that a connection arrives, and that the server sees an address of the node as the
    /// client exactly if the candidate masquerades.
    pub(crate) fn check(&self) -> Result<()> {
        for candidate in &self.candidates {
            let (client, servers, to) = self.ends(candidate);
            let peer = peer(client, servers, to).with_context(|| format!("a connection by {candidate:?}"))?;
            let is_node = node::addresses(self.family).contains(&peer);
            let wanted = candidate.way == Way::Outside && candidate.system != System::Nothing;
            ensure!(is_node == wanted, "by {candidate:?} the server sees {peer}");
        }
        Ok(())
    }

    /// Measures all candidates in this number of rounds.
    pub(crate) fn run(&self, measures: &[Measure], ways: &[Way], rounds: u32) -> Result<Outcome> {
        let mut outcome =
            Outcome { samples: vec![Vec::new(); self.candidates.len()], repeated: 0, dropped: 0 };
        for round in 1..=rounds {
            eprintln!("round {round} of {rounds}");
            let mut measures = measures.to_vec();
            fastrand::shuffle(&mut measures);
            for measure in measures {
                for way in ways {
                    self.group(measure, *way, round, &mut outcome)?;
                }
            }
        }
        Ok(outcome)
    }

    /// Runs one workload with all candidates of one path, in one round.
    fn group(&self, measure: Measure, way: Way, round: u32, outcome: &mut Outcome) -> Result<()> {
        let of_way = |index: &usize| self.candidates[*index].way == way;
        let group: Vec<usize> = (0..self.candidates.len()).filter(of_way).collect();
        let is_baseline = |index: &&usize| self.candidates[**index].system == System::Nothing;
        let Some(baseline) = group.iter().find(is_baseline).copied() else { return Ok(()) };
        let mut samples: Vec<Option<Sample>> = vec![None; self.candidates.len()];
        let mut missing = group.clone();
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                outcome.repeated += u32::try_from(missing.len())?;
            }
            fastrand::shuffle(&mut missing);
            for &index in &missing {
                samples[index] = Some(self.burst(index, measure, round)?);
            }
            missing = misfits(&samples, &group, baseline);
            if missing.is_empty() {
                break;
            }
        }
        outcome.dropped += u32::try_from(missing.len())?;
        if missing.contains(&baseline) {
            return Ok(());
        }
        for index in group.into_iter().filter(|index| !missing.contains(index)) {
            outcome.samples[index].extend(samples[index].take());
        }
        Ok(())
    }

    fn burst(&self, index: usize, measure: Measure, round: u32) -> Result<Sample> {
        let candidate = &self.candidates[index];
        let (client, servers, to) = self.ends(candidate);
        let burst = measure
            .run(client, servers, to, self.cpus, self.time)
            .with_context(|| format!("{measure:?} by {candidate:?}"))?;
        let may_idle = !measure.saturates() || !self.cpus.is_one();
        Ok(Sample::new(measure, round, burst, may_idle))
    }

    /// The namespace of the client, the servers, and the address that the client connects to.
    fn ends(&self, candidate: &Candidate) -> (&Netns, &Servers, Targets) {
        let node = &self.nodes[candidate.node];
        let [local, remote] = node.servers();
        let (client, servers) = match candidate.way {
            Way::Pod => (&node.pod, local),
            Way::Outside => (&node.outside, remote),
            Way::Node => (&node.node, local),
        };
        let to = match candidate.size {
            None => Workload::endpoint(self.family, candidate.way),
            Some(_) => Workload::targets(self.family, candidate.way),
        };
        (client, servers, to)
    }
}

impl Sample {
    fn new(measure: Measure, round: u32, mut burst: Burst, may_idle: bool) -> Self {
        let usage = burst.usage;
        let (done, seconds) = (burst.done as f64, usage.wall.as_secs_f64());
        let mut quantile = |share: f64| quantile(&mut burst.latencies, share);
        Self {
            measure,
            round,
            rate: done / seconds,
            cpu: usage.cpu.as_secs_f64() / done,
            machine: usage.machine.as_secs_f64() / done,
            median: quantile(0.5),
            p99: quantile(0.99),
            probe: usage.probe.as_secs_f64(),
            seconds,
            is_disturbed: !may_idle && usage.cpu.as_secs_f64() < (1.0 - DISTURBANCE) * seconds,
        }
    }
}

/// The quantile `share` (such as 0.99) of nanoseconds, in seconds.
fn quantile(nanoseconds: &mut [u32], share: f64) -> Option<f64> {
    let last = nanoseconds.len().checked_sub(1)?;
    let rank = (last as f64 * share).round();
    // `rank` is below the length, because `share` is below 1.
    let index = (0..=last).rev().find(|index| *index as f64 <= rank).unwrap_or(0);
    Some(f64::from(*nanoseconds.select_nth_unstable(index).1) / 1e9)
}

/// Candidates whose burst must be repeated, because the burst was disturbed or because the machine's speed differed
/// from that during the baseline's burst. If most bursts must be repeated, the baseline's burst must also be repeated.
fn misfits(samples: &[Option<Sample>], group: &[usize], baseline: usize) -> Vec<usize> {
    let Some(speed) = samples[baseline].as_ref().map(|sample| sample.probe) else { return group.to_vec() };
    let fits = |index: &usize| {
        let drift = |sample: &Sample| (sample.probe / speed - 1.0).abs();
        samples[*index].as_ref().is_some_and(|sample| !sample.is_disturbed && drift(sample) <= DRIFT)
    };
    let mut misfits: Vec<usize> = group.iter().copied().filter(|index| !fits(index)).collect();
    if misfits.len() * 2 > group.len() && !misfits.contains(&baseline) {
        misfits.push(baseline);
    }
    misfits
}
