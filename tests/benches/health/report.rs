//! The results, as tables.

use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use lb_tests::{
    agent,
    bench::{Machine, Quantile, Resident, Samples, machine},
};
use serde::Serialize;

use crate::{Args, Check, PER_SERVICE, asked, outage::Turn, server::Seen};

/// The part of the interval by which the agent may start a round of probes early or late, see docs/health-checks.md.
const JITTER: f64 = 0.10;

/// All results, as `--json` writes them.
#[derive(Serialize)]
pub(crate) struct Results<'a> {
    pub(crate) endpoints: u32,
    /// Seconds from one probe of an endpoint to the next.
    pub(crate) interval: u64,
    pub(crate) machine: Machine,
    pub(crate) rows: &'a [Row],
}

/// The measurements with one kind of check.
#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) check: Check,
    pub(crate) seconds: f64,
    /// CPU seconds of the agent.
    pub(crate) cpu: f64,
    pub(crate) resident: Resident,
    pub(crate) seen: Seen,
    /// The time and the agent's CPU time until the agent has noticed that all endpoints have failed, then until the
    /// agent has noticed that all have returned; `None` without a check.
    pub(crate) outage: Option<[Turn; 2]>,
    /// Peak memory of the agent in bytes, including the outage.
    pub(crate) peak: u64,
}

impl Row {
    /// Probes per second.
    pub(crate) fn rate(&self) -> f64 {
        self.seen.probes as f64 / self.seconds
    }

    fn cells(&self, interval: f64) -> Vec<String> {
        let mut cells = vec![
            self.check.name().to_owned(),
            format!("{:.1} %", 100.0 * self.cpu / self.seconds),
            format!("{:.0} MB ({:.0})", self.resident.now as f64 * 1e-6, self.resident.peak as f64 * 1e-6),
        ];
        if self.check == Check::None {
            return cells;
        }
        let late = self.seen.gaps.iter().filter(|gap| **gap > interval * (1.0 + JITTER) + 0.01).count();
        let samples = Samples::new(self.seen.gaps.clone());
        let at = |quantile| format!("{:.2}", samples.at(quantile));
        cells.extend([
            format!("{:.0}", self.rate()),
            format!("{:.0} µs", self.cpu / self.seen.probes.max(1) as f64 * 1e6),
            [Quantile::Min, Quantile::P25, Quantile::Median, Quantile::P75, Quantile::P99, Quantile::Max]
                .map(at)
                .join(" "),
            format!("{:.2} %", 100.0 * late as f64 / samples.count().max(1) as f64),
            self.seen.missed.to_string(),
        ]);
        cells
    }

    fn outage_cells(&self) -> Option<Vec<String>> {
        let cell =
            |turn: Turn| format!("{:.1} s, {:.0} % CPU", turn.seconds, 100.0 * turn.cpu / turn.seconds);
        let [fall, rise] = self.outage?.map(cell);
        Some(vec![self.check.name().to_owned(), fall, rise, format!("{:.0} MB", self.peak as f64 * 1e-6)])
    }
}

/// The results as text.
pub(crate) fn report(args: &Args, machine: &Machine, rows: &[Row]) -> Result<String> {
    let mut regular = table([
        "",
        "CPU of the agent",
        "memory (peak)",
        "probes/s",
        "CPU/probe",
        "seconds between two probes: min p25 median p75 p99 max",
        "late",
        "missed",
    ]);
    regular.add_rows(rows.iter().map(|row| row.cells(args.interval as f64)));
    let mut outage = table([
        "all endpoints at once",
        "until all are unhealthy",
        "until all are healthy",
        "memory at its highest",
    ]);
    outage.add_rows(rows.iter().filter_map(Row::outage_cells));
    align(&mut regular);
    align(&mut outage);
    Ok(format!(
        "{} endpoints of {} Services, probed every {} s: {:.0} probes/s asked; {} intervals for each kind of check\n\
         late: more than {:.0} % and 10 ms after the last probe's interval; missed: endpoints without a probe\n\
         {}\n{machine}, {} after\n\n{regular}\n\n{outage}",
        args.endpoints,
        (args.endpoints as usize).div_ceil(PER_SERVICE),
        args.interval,
        asked(args),
        args.intervals,
        100.0 * JITTER,
        agent::binary().display(),
        machine::load()?
    ))
}

fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).force_no_tty().set_header(header);
    table
}

/// Aligns all columns except the first to the right.
fn align(table: &mut Table) {
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
}
