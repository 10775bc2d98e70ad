//! The packet rates and map fill of the last fifteen minutes.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use lb_common::{Outcome, Verdict};
use serde::Serialize;

use crate::source::Fill;

/// Time between two points; longer if a reading takes longer.
pub(crate) const STEP: Duration = Duration::from_secs(2);
/// Maximum number of points, which covers fifteen minutes.
pub(crate) const POINTS: usize = 450;

/// A ring of points.
#[derive(Debug, Default)]
pub(crate) struct History {
    points: VecDeque<Point>,
    last: Option<Reading>,
}

/// The counters at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    /// When the counters were read, in milliseconds since 1970.
    pub(crate) time: u64,
    /// The same moment, by a monotonic clock.
    pub(crate) at: Instant,
    pub(crate) packets: [u64; Outcome::COUNT],
    pub(crate) fill: Arc<Vec<Fill>>,
}

/// A point of the charts: packet rates since the previous reading, and the fill of the maps.
#[derive(Debug)]
struct Point {
    time: u64,
    /// Packets per second by outcome; `None` if the counters could not be read.
    rates: Option<[f64; Outcome::COUNT]>,
    fill: Arc<Vec<Fill>>,
}

impl History {
    /// Adds a reading, and a point with the rates since the previous reading. The first reading, and the first one
    /// after a gap, add no point.
    pub(crate) fn push(&mut self, reading: Reading) {
        if let Some(last) = &self.last {
            let seconds = reading.at.duration_since(last.at).as_secs_f64();
            let rate = |outcome: usize| {
                // The counters begin at 0 again if the agent has recreated the map.
                to_f64(reading.packets[outcome].saturating_sub(last.packets[outcome])) / seconds.max(0.001)
            };
            let rates = Some(std::array::from_fn(rate));
            self.add(Point { time: reading.time, rates, fill: Arc::clone(&reading.fill) });
        }
        self.last = Some(reading);
    }

    /// Adds a gap: the counters could not be read at this moment (milliseconds since 1970).
    pub(crate) fn push_gap(&mut self, time: u64) {
        self.last = None;
        self.add(Point { time, rates: None, fill: Arc::default() });
    }

    fn add(&mut self, point: Point) {
        // If the clock was set back, the earlier points would come after this one.
        if self.points.back().is_some_and(|last| last.time >= point.time) {
            self.points.clear();
        }
        if self.points.len() == POINTS {
            self.points.pop_front();
        }
        self.points.push_back(point);
    }

    /// The points as lines to draw. An outcome that drops or rejects packets has a line only if at least one point has
    /// packets with this outcome.
    pub(crate) fn plots(&self) -> Plots {
        let sum = |of: fn(Outcome) -> bool| -> Vec<Option<f64>> {
            let chosen = |rates: &[f64; Outcome::COUNT]| {
                Outcome::ALL
                    .into_iter()
                    .zip(rates)
                    .filter(|(outcome, _)| of(*outcome))
                    .map(|(_, rate)| rate)
                    .sum()
            };
            self.points.iter().map(|point| point.rates.as_ref().map(chosen).map(short)).collect()
        };
        let refused = Outcome::ALL.into_iter().enumerate().filter(|(_, outcome)| is_refused(*outcome));
        let line = |index: usize| -> Vec<Option<f64>> {
            self.points.iter().map(|point| point.rates.map(|rates| short(rates[index]))).collect()
        };
        let happened = |line: &[Option<f64>]| line.iter().flatten().any(|rate| *rate > 0.0);
        Plots {
            step: STEP.as_secs(),
            points: POINTS,
            times: self.points.iter().map(|point| point.time / 1000).collect(),
            translated: sum(is_translated),
            untouched: sum(is_untouched),
            new_flows: sum(Outcome::begins_flow),
            refused: refused
                .map(|(index, outcome)| (outcome.as_str(), line(index)))
                .filter(|(_, line)| happened(line))
                .collect(),
            fill: self.fill_lines(),
        }
    }

    fn fill_lines(&self) -> BTreeMap<&'static str, Vec<Option<f64>>> {
        let names = self.points.back().map_or_else(Arc::default, |point| Arc::clone(&point.fill));
        let percent = |fill: &Fill| short(to_f64(fill.entries) * 100.0 / to_f64(fill.capacity).max(1.0));
        let of_point =
            |name: &str, point: &Point| point.fill.iter().find(|fill| fill.name == name).map(percent);
        let line =
            |fill: &Fill| (fill.name, self.points.iter().map(|point| of_point(fill.name, point)).collect());
        names.iter().map(line).collect()
    }
}

/// The lines of the plots, one value for each time; `None` where the counters or the fill could not be read. A system
/// call that a socket hook counts is a packet here.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Plots {
    /// Seconds between two points.
    step: u64,
    /// Points of a full plot.
    points: usize,
    /// The moments of the plot, in seconds since 1970.
    times: Vec<u64>,
    /// Packets per second that were neither left untouched nor dropped or rejected: for example packets of flows to
    /// Services, echo requests to virtual addresses, and connections of the node whose source port was replaced.
    translated: Vec<Option<f64>>,
    /// Packets per second that the programs left as they were, for example because they belong to no Service.
    untouched: Vec<Option<f64>>,
    /// New flows per second, including connections of the node's sockets. Hairpin and caught flows are missing, because
    /// their first packets have no outcome of their own.
    new_flows: Vec<Option<f64>>,
    /// Packets per second that were dropped or rejected, by outcome.
    refused: BTreeMap<&'static str, Vec<Option<f64>>>,
    /// Fill of each map in percent of its capacity. There is a line for each map in the newest point.
    fill: BTreeMap<&'static str, Vec<Option<f64>>>,
}

/// Whether packets of the outcome are dropped, or rejected with a RST or an ICMP port unreachable.
fn is_refused(outcome: Outcome) -> bool {
    matches!(outcome, Outcome::RejectTcp | Outcome::RejectUdp) || outcome.verdict() == Verdict::Drop
}

/// Whether the programs leave packets with this outcome unchanged. This includes held fragments, which enter the node
/// again later and then count again.
fn is_untouched(outcome: Outcome) -> bool {
    matches!(
        outcome,
        Outcome::NotIp
            | Outcome::NotTransport
            | Outcome::Malformed
            | Outcome::NoService
            | Outcome::OtherHook
            | Outcome::UnknownFragment
            | Outcome::UnknownIcmpError
            | Outcome::LeftToEarlier
            | Outcome::OtherHost
            | Outcome::FragmentHeld
    )
}

fn is_translated(outcome: Outcome) -> bool {
    !is_refused(outcome) && !is_untouched(outcome)
}

/// Rounds to three decimals: more digits would only make the answer longer.
fn short(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[expect(clippy::cast_precision_loss, reason = "plots show at most three digits")]
pub(crate) fn to_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use super::*;

    fn reading(time: u64, counts: &[(Outcome, u64)]) -> Reading {
        static BEGUN: LazyLock<Instant> = LazyLock::new(Instant::now);
        let at = *BEGUN + Duration::from_millis(time);
        let mut packets = [0; Outcome::COUNT];
        for (outcome, count) in counts {
            packets[*outcome as usize] = *count;
        }
        let fill = vec![Fill { name: "FLOWS", entries: time / 1000, capacity: 200 }];
        Reading { time, at, packets, fill: Arc::new(fill) }
    }

    #[test]
    fn rates_are_differences_by_time() {
        let mut history = History::default();
        history.push(reading(10_000, &[(Outcome::NewFlow, 100), (Outcome::NoService, 7)]));
        history.push(reading(
            12_000,
            &[(Outcome::NewFlow, 120), (Outcome::Forward, 60), (Outcome::UnknownVip, 4)],
        ));
        let plots = history.plots();
        assert_eq!((plots.times, plots.new_flows), (vec![12], vec![Some(10.0)]));
        assert_eq!((plots.translated, plots.untouched), (vec![Some(40.0)], vec![Some(0.0)]));
        assert_eq!(plots.refused, BTreeMap::from([("unknown_vip", vec![Some(2.0)])]));
        assert_eq!(plots.fill, BTreeMap::from([("FLOWS", vec![Some(6.0)])]));
    }

    #[test]
    fn clock_that_is_set_back_changes_no_rate_and_begins_new_plots() {
        let mut history = History::default();
        history.push(reading(10_000, &[]));
        history.push(reading(12_000, &[(Outcome::NewFlow, 20)]));
        let later = reading(14_000, &[(Outcome::NewFlow, 60)]);
        history.push(Reading { time: 5000, ..later });
        let plots = history.plots();
        assert_eq!((plots.times, plots.new_flows), (vec![5], vec![Some(20.0)]));
    }

    #[test]
    fn counters_that_begin_again_are_no_negative_rate() {
        let mut history = History::default();
        history.push(reading(0, &[(Outcome::NewFlow, 100)]));
        history.push(reading(2000, &[(Outcome::NewFlow, 4)]));
        assert_eq!(history.plots().new_flows, [Some(0.0)]);
    }

    #[test]
    fn unreadable_data_plane_leaves_a_gap() {
        let mut history = History::default();
        history.push(reading(0, &[]));
        history.push(reading(2000, &[(Outcome::NewFlow, 2)]));
        history.push_gap(4000);
        history.push(reading(6000, &[(Outcome::NewFlow, 1000)]));
        history.push(reading(8000, &[(Outcome::NewFlow, 1002)]));
        assert_eq!(history.plots().new_flows, [Some(1.0), None, Some(1.0)]);
    }

    #[test]
    fn history_keeps_fifteen_minutes() {
        let mut history = History::default();
        (0..2 * POINTS as u64).for_each(|step| history.push(reading(step * 2000, &[])));
        let plots = history.plots();
        assert_eq!(plots.times.len(), POINTS);
        assert_eq!(STEP * u32::try_from(POINTS).unwrap(), Duration::from_secs(15 * 60));
        assert_eq!(plots.times.last().unwrap() - plots.times[0], 2 * (POINTS as u64 - 1));
    }

    #[test]
    fn every_outcome_is_on_one_plot() {
        for outcome in Outcome::ALL {
            let groups = [is_refused(outcome), is_untouched(outcome), is_translated(outcome)];
            assert_eq!(groups.iter().filter(|is| **is).count(), 1, "{outcome:?}");
            assert!(!outcome.begins_flow() || is_translated(outcome), "{outcome:?}");
        }
    }
}
