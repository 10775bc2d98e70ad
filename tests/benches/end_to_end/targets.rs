//! Targets for the results, as ratios within one run.

use serde::Serialize;

use crate::{
    compare::{Comparison, Quantity, find},
    load::Measure,
    way::Way,
};

/// Maximum ratio of a candidate's cost to that of plain routing.
const ROUTING: f64 = 1.0;
/// Maximum ratio of a candidate's cost to that of a direct connection.
const DIRECT: f64 = 1.02;
/// Maximum ratio of a candidate's cost with the most Services to that with the fewest: 1, plus the remaining noise.
const FLAT: f64 = 1.02;

/// A target for a ratio, and whether the results meet it.
#[derive(Debug, Serialize)]
pub(crate) struct Target {
    /// The subject of the target, as the report shows it.
    pub(crate) what: String,
    /// The ratio: a median over all rounds, or the quotient of two such medians.
    pub(crate) value: f64,
    pub(crate) limit: f64,
    /// Whether the ratio is within the limit.
    pub(crate) is_met: bool,
}

impl Target {
    fn new(what: String, value: f64, limit: f64) -> Self {
        Self { what, value, limit, is_met: value <= limit }
    }
}

/// The targets of this project's own candidates.
pub(crate) fn all(comparisons: &[Comparison]) -> Vec<Target> {
    let ours: Vec<&Comparison> =
        comparisons.iter().filter(|comparison| comparison.candidate.system.is_ours()).collect();
    let mut targets: Vec<Target> = ours.iter().flat_map(|comparison| of_candidate(comparison)).collect();
    targets.extend(ours.iter().filter_map(|comparison| flat(comparisons, comparison)));
    targets
}

fn of_candidate(comparison: &Comparison) -> Vec<Target> {
    let name = name(comparison);
    let target = |what: &str, quantity: &Quantity, limit| {
        Target::new(format!("{name}: {what}"), quantity.typical(), limit)
    };
    let cpu = |limit| target("CPU time", &comparison.cpu, limit);
    let is_node = comparison.candidate.way == Way::Node;
    match comparison.measure {
        Measure::Request | Measure::Connect if !is_node => {
            let latency = comparison.median.iter().map(|median| target("median latency", median, ROUTING));
            std::iter::once(cpu(ROUTING)).chain(latency).collect()
        }
        Measure::Request | Measure::Stream | Measure::Streams if is_node => vec![cpu(DIRECT)],
        Measure::Request
        | Measure::Connect
        | Measure::Datagrams
        | Measure::Stream
        | Measure::Streams
        | Measure::Paced => Vec::new(),
    }
}

/// The target that compares the most Services with the fewest, at the same number of endpoints.
fn flat(all: &[Comparison], most: &Comparison) -> Option<Target> {
    if !matches!(most.measure, Measure::Request | Measure::Connect) {
        return None;
    }
    let size = most.candidate.size?;
    let same = |other: &&Comparison| {
        let endpoints = other.candidate.size.map(|other| other.endpoints);
        other.candidate.system == most.candidate.system && endpoints == Some(size.endpoints)
    };
    let services = |comparison: &&Comparison| comparison.candidate.size.map(|size| size.services);
    let others: Vec<&Comparison> = find(all, most.candidate.way, most.measure).filter(same).collect();
    let fewest = others.iter().copied().min_by_key(services)?;
    let is_most =
        others.iter().copied().max_by_key(services).and_then(|other| other.candidate.size) == Some(size);
    if !is_most || fewest.candidate.size == most.candidate.size {
        return None;
    }
    let few = fewest.candidate.size?.services;
    let what = format!("{}: CPU time, against {few} Services", name(most));
    Some(Target::new(what, most.cpu.typical() / fewest.cpu.typical(), FLAT))
}

/// Names candidate and workload of a comparison.
fn name(comparison: &Comparison) -> String {
    let candidate = &comparison.candidate;
    format!("{}: {}, {}", candidate.way, candidate.label(), comparison.measure.name())
}
