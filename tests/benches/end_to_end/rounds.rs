//! Bursts of all candidates in turn, again and again, and which of them count.
//!
//! The machine may change its speed within seconds. So bursts are short, each candidate is compared with the baseline of
//! its own round, the order is another one in each round, and a burst is repeated (a few times at most, then dropped) when
//! the machine was faster or slower than in the baseline's, or when something else ran on the CPU.

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

/// How often a burst is tried in a round.
const ATTEMPTS: u32 = 4;
/// How much the speed of the machine may differ from that in the baseline's burst.
const DRIFT: f64 = 0.06;
/// The share of the time that a CPU may do something else while a burst should have all of it.
const DISTURBANCE: f64 = 0.05;

/// Something to measure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Candidate {
    /// What balances.
    pub(crate) system: System,
    /// Who asks whom.
    pub(crate) way: Way,
    /// How many Services there are; `None` where nobody balances.
    pub(crate) size: Option<Size>,
    /// The node it is in.
    #[serde(skip)]
    pub(crate) node: usize,
}

impl Candidate {
    /// For people.
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

/// One burst of one candidate.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Sample {
    /// What was done.
    pub(crate) measure: Measure,
    /// The round.
    pub(crate) round: u32,
    /// Transactions, datagrams or bytes in a second.
    pub(crate) rate: f64,
    /// CPU seconds for each of them.
    pub(crate) cpu: f64,
    /// CPU seconds of the whole machine for each of them, in coarse steps.
    pub(crate) machine: f64,
    /// Seconds for half of the transactions at most.
    pub(crate) median: Option<f64>,
    /// Seconds for 99 of 100 transactions at most.
    pub(crate) p99: Option<f64>,
    /// Seconds that a piece of arithmetic took just before and after: how fast the machine was.
    pub(crate) probe: f64,
    /// Seconds of the burst.
    pub(crate) seconds: f64,
    #[serde(skip)]
    is_disturbed: bool,
}

/// Everything that takes part.
pub(crate) struct Field {
    /// IPv4 or IPv6.
    pub(crate) family: Family,
    /// The nodes, with whatever balances in them.
    pub(crate) nodes: Vec<Node>,
    /// What is compared.
    pub(crate) candidates: Vec<Candidate>,
    /// How long a burst takes.
    pub(crate) time: Duration,
    /// Where threads run.
    pub(crate) cpus: Cpus,
}

/// What was measured: the samples of each candidate, and how many bursts were repeated or dropped.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    /// By candidate; at most one for each measure and round.
    pub(crate) samples: Vec<Vec<Sample>>,
    /// Bursts that were done again.
    pub(crate) repeated: u32,
    /// Candidates that have no sample in a round.
    pub(crate) dropped: u32,
}

impl Field {
    /// Whether each candidate is what it is called: a connection arrives, and the client is masqueraded or not.
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

    /// So many rounds of these measures.
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

    /// One measure of all candidates of a way.
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

    /// Who asks, who answers, and whom the one asks for.
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

/// Seconds.
fn quantile(nanoseconds: &mut [u32], share: f64) -> Option<f64> {
    let last = nanoseconds.len().checked_sub(1)?;
    let place = (last as f64 * share).round();
    // A share of the length is within the length.
    let place = (0..=last).rev().find(|index| *index as f64 <= place).unwrap_or(0);
    Some(f64::from(*nanoseconds.select_nth_unstable(place).1) / 1e9)
}

/// Whose burst must be done again: disturbed ones, and those during which the machine had another speed than during the
/// baseline's; with the baseline, if most are among them.
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
