//! Compares each candidate with its baseline, which was measured in the same rounds.

use lb_tests::bench::{Quantile, Samples};
use serde::Serialize;

use crate::{
    load::Measure,
    rounds::{Candidate, Outcome, Sample},
    system::System,
    way::Way,
};

/// Samples of a quantity, and of its ratio to the baseline of the same round.
#[derive(Debug, Serialize)]
pub(crate) struct Quantity {
    /// The samples, in the quantity's own unit.
    pub(crate) absolute: Samples,
    /// The ratio to the baseline, one sample per round.
    pub(crate) ratio: Samples,
}

impl Quantity {
    /// The median of the ratios to the baseline.
    pub(crate) fn typical(&self) -> f64 {
        self.ratio.at(Quantile::Median)
    }
}

/// The results of one workload for one candidate, compared with the baseline.
#[derive(Debug, Serialize)]
pub(crate) struct Comparison {
    #[serde(flatten)]
    pub(crate) candidate: Candidate,
    pub(crate) measure: Measure,
    /// CPU seconds of the measuring process and of ksoftirqd per transaction, datagram or byte.
    pub(crate) cpu: Quantity,
    /// CPU seconds of the whole machine per transaction, datagram or byte, in coarse steps.
    pub(crate) machine: Quantity,
    /// Transactions, datagrams or bytes per second.
    pub(crate) rate: Quantity,
    /// Median latency of a transaction in seconds; `None` for workloads without latencies.
    pub(crate) median: Option<Quantity>,
    /// 99th percentile of the latency in seconds; `None` for workloads without latencies.
    pub(crate) p99: Option<Quantity>,
}

/// Compares all candidates that have samples.
pub(crate) fn all(candidates: &[Candidate], outcome: &Outcome) -> Vec<Comparison> {
    let mut comparisons = Vec::new();
    for (candidate, samples) in candidates.iter().zip(&outcome.samples) {
        let is_baseline = |other: &Candidate| other.way == candidate.way && other.system == System::Nothing;
        let Some(baseline) = candidates.iter().position(is_baseline) else { continue };
        for measure in Measure::ALL {
            let pairs = pairs(measure, samples, &outcome.samples[baseline]);
            if !pairs.is_empty() {
                comparisons.push(compare(candidate, measure, &pairs));
            }
        }
    }
    comparisons
}

/// The comparisons of one path and one workload.
pub(crate) fn find(all: &[Comparison], way: Way, measure: Measure) -> impl Iterator<Item = &Comparison> {
    all.iter().filter(move |other| other.candidate.way == way && other.measure == measure)
}

/// Pairs of samples from the same round: candidate, baseline.
fn pairs<'a>(
    measure: Measure,
    samples: &'a [Sample],
    baseline: &'a [Sample],
) -> Vec<(&'a Sample, &'a Sample)> {
    let of_measure = samples.iter().filter(|sample| sample.measure == measure);
    let pair = |sample: &'a Sample| {
        let same = |base: &&Sample| base.measure == measure && base.round == sample.round;
        Some((sample, baseline.iter().find(same)?))
    };
    of_measure.filter_map(pair).collect()
}

fn compare(candidate: &Candidate, measure: Measure, pairs: &[(&Sample, &Sample)]) -> Comparison {
    let quantity = |of: fn(&Sample) -> Option<f64>| {
        let absolute: Option<Vec<f64>> = pairs.iter().map(|(sample, _)| of(sample)).collect();
        let ratio = pairs.iter().map(|(sample, base)| Some(of(sample)? / of(base)?));
        let ratio: Option<Vec<f64>> = ratio.collect();
        Some(Quantity { absolute: Samples::new(absolute?), ratio: Samples::new(ratio?) })
    };
    let always = |of: fn(&Sample) -> Option<f64>| {
        quantity(of).unwrap_or(Quantity { absolute: Samples::default(), ratio: Samples::default() })
    };
    Comparison {
        candidate: candidate.clone(),
        measure,
        cpu: always(|sample| Some(sample.cpu)),
        machine: always(|sample| Some(sample.machine)),
        rate: always(|sample| Some(sample.rate)),
        median: quantity(|sample| sample.median),
        p99: quantity(|sample| sample.p99),
    }
}
