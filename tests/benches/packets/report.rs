//! The results as a table, JSON and plots.

use std::{fs, path::Path};

use anyhow::Context as _;
use comfy_table::{CellAlignment, Table, presets};
use lb_tests::bench::{Bar, Machine, Plot, Quantile, Samples, figure::mark};
use serde::Serialize;

use crate::{
    cases::Section,
    rounds::{Contest, Plan, Round},
};

/// All results, as `--json` writes them. Field names are those of earlier releases.
#[derive(Serialize)]
pub(crate) struct Report {
    machine: Machine,
    /// The CPU that all programs ran on.
    cpu: usize,
    /// Load average of the last minute at the end of the benchmark.
    load_after: f64,
    /// Accepted rounds wanted for each case.
    rounds: u32,
    /// Approximate seconds that a program ran in each round.
    slice: f64,
    /// The cases. Times are CPU time in nanoseconds per packet.
    cases: Vec<Row>,
}

/// One case.
#[derive(Serialize)]
struct Row {
    section: Section,
    program: String,
    packet: String,
    #[serde(rename = "floor_program")]
    baseline_program: &'static str,
    /// Time including the overhead of the test run.
    gross: Samples,
    #[serde(rename = "floor_gross")]
    baseline_gross: Samples,
    /// The overhead: a program that returns at once, with the same packets.
    #[serde(rename = "base")]
    overhead: Samples,
    /// Time without the overhead.
    net: Samples,
    #[serde(rename = "floor_net")]
    baseline_net: Samples,
    /// The program's net cost over that of its baseline.
    ratio: Samples,
    /// The program's gross cost over that of its baseline.
    gross_ratio: Samples,
    dropped: u32,
    target: Option<f64>,
    met: Option<bool>,
}

impl Row {
    fn new(contest: &Contest) -> Self {
        let samples = |value: fn(&Round) -> f64| Samples::new(contest.rounds.iter().map(value).collect());
        let ratio = samples(|round| round.net() / round.baseline_net());
        let case = &contest.case;
        Self {
            section: case.section,
            program: case.program.clone(),
            packet: case.packet.clone(),
            baseline_program: case.baseline.label(),
            gross: samples(|round| round.program),
            baseline_gross: samples(|round| round.baseline),
            overhead: samples(|round| round.program_overhead),
            net: samples(Round::net),
            baseline_net: samples(Round::baseline_net),
            gross_ratio: samples(|round| round.program / round.baseline),
            dropped: contest.dropped,
            target: case.target,
            met: case.target.map(|target| ratio.at(Quantile::Median) <= target),
            ratio,
        }
    }

    fn cells(&self) -> Vec<String> {
        let spread = |samples: &Samples, digits: usize| {
            [Quantile::Min, Quantile::Median, Quantile::Max]
                .map(|quantile| format!("{:.digits$}", samples.at(quantile)))
        };
        let median = |samples: &Samples, digits: usize| format!("{:.digits$}", samples.at(Quantile::Median));
        let mut cells = vec![format!("  {}, {}", self.program, self.packet)];
        cells.extend(spread(&self.net, 1));
        cells.push(median(&self.baseline_net, 1));
        cells.extend(spread(&self.ratio, 2));
        cells.extend([median(&self.overhead, 1), median(&self.gross_ratio, 2)]);
        cells.push(format!("{}-{}", self.ratio.count(), self.dropped));
        cells.push(match (self.target, self.met) {
            (Some(target), Some(met)) => format!("{} ≤ {target}", mark(met)),
            _ => String::new(),
        });
        cells
    }
}

impl Round {
    fn net(&self) -> f64 {
        self.program - self.program_overhead
    }

    fn baseline_net(&self) -> f64 {
        self.baseline - self.baseline_overhead
    }
}

const HEADER: [&str; 12] = [
    "ns per packet, net of overhead",
    "min",
    "median",
    "max",
    "baseline",
    "× min",
    "median",
    "max",
    "overhead",
    "× gross",
    "rounds",
    "target",
];

impl Report {
    pub(crate) fn new(
        machine: Machine,
        cpu: usize,
        load_after: f64,
        plan: Plan,
        contests: &[Contest],
    ) -> Self {
        let cases = contests.iter().map(Row::new).collect();
        Self { machine, cpu, load_after, rounds: plan.rounds, slice: plan.slice.as_secs_f64(), cases }
    }

    /// Whether every target is met.
    pub(crate) fn targets_met(&self) -> bool {
        self.cases.iter().all(|row| row.met != Some(false))
    }

    /// The table with its notes.
    pub(crate) fn text(&self) -> String {
        format!("{}\n\n{}", self.notes().join("\n"), self.table())
    }

    fn notes(&self) -> Vec<String> {
        let Self { machine, cpu, load_after, rounds, slice, .. } = self;
        vec![
            format!("{machine}, {load_after} after"),
            format!("{rounds} rounds of {:.0} ms per program, on CPU {cpu}", slice * 1e3),
        ]
    }

    fn rows(&self, section: Section) -> impl Iterator<Item = &Row> {
        self.cases.iter().filter(move |row| row.section == section)
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).force_no_tty().set_header(HEADER);
        for section in Section::ALL {
            let Some(first) = self.rows(section).next() else { continue };
            table.add_row([format!("{}; baseline: {}", section.label(), first.baseline_program)]);
            for row in self.rows(section) {
                table.add_row(row.cells());
            }
        }
        for column in table.column_iter_mut().skip(1).take(10) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }

    /// Writes all results as JSON.
    pub(crate) fn write_json(&self, file: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        fs::write(file, text).with_context(|| format!("writing the results to {}", file.display()))
    }

    /// Writes one plot per section into a folder.
    pub(crate) fn write_plots(&self, folder: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("creating the folder {}", folder.display()))?;
        for section in Section::ALL {
            let bars: Vec<Bar> = self.rows(section).flat_map(Row::bars).collect();
            if bars.is_empty() {
                continue;
            }
            let plot = Plot {
                title: format!("Nanoseconds per packet: {}", section.label()),
                notes: self.notes(),
                unit: "ns of CPU time, net of the overhead of a test run; median, line: min to max"
                    .to_owned(),
                bars,
            };
            plot.write(&folder.join(format!("{}.svg", section.file())))?;
        }
        Ok(())
    }
}

impl Row {
    /// The program and its baseline.
    fn bars(&self) -> [Bar; 2] {
        let bar = |label, samples: &Samples, is_reference| Bar {
            label,
            min: samples.at(Quantile::Min),
            median: samples.at(Quantile::Median),
            max: samples.at(Quantile::Max),
            is_reference,
        };
        [
            bar(format!("{}, {}", self.program, self.packet), &self.net, false),
            bar(format!("baseline: {}", self.baseline_program), &self.baseline_net, true),
        ]
    }
}
