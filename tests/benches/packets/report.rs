//! The figures: a table, JSON, plots.

use std::{fs, path::Path};

use anyhow::Context as _;
use comfy_table::{CellAlignment, Table, presets};
use lb_tests::bench::{Bar, Machine, Plot, Quantile, Samples, figure::mark};
use serde::Serialize;

use crate::{
    cases::Section,
    rounds::{Contest, Plan, Round},
};

/// Everything that was measured; `--json` writes just this.
#[derive(Serialize)]
pub(crate) struct Report {
    machine: Machine,
    /// The CPU that everything ran on.
    cpu: usize,
    /// Load of the last minute when the benchmark ended.
    load_after: f64,
    /// Rounds that should count, for each case.
    rounds: u32,
    /// Seconds that a program ran in each of them, about.
    slice: f64,
    /// All times are of this CPU, in nanoseconds for a packet.
    cases: Vec<Row>,
}

/// One case.
#[derive(Serialize)]
struct Row {
    section: Section,
    program: String,
    packet: String,
    floor_program: &'static str,
    /// With everything around it.
    gross: Samples,
    floor_gross: Samples,
    /// The program that returns at once, with the same packets.
    base: Samples,
    /// Over the program that returns at once.
    net: Samples,
    floor_net: Samples,
    /// The program to its floor, both over the program that returns at once.
    ratio: Samples,
    /// The same with everything around them.
    gross_ratio: Samples,
    dropped: u32,
    target: Option<f64>,
    met: Option<bool>,
}

impl Row {
    fn new(contest: &Contest) -> Self {
        let samples = |value: fn(&Round) -> f64| Samples::new(contest.rounds.iter().map(value).collect());
        let ratio = samples(|round| round.net() / round.floor_net());
        let case = &contest.case;
        Self {
            section: case.section,
            program: case.program.clone(),
            packet: case.what.clone(),
            floor_program: case.floor.label(),
            gross: samples(|round| round.program),
            floor_gross: samples(|round| round.floor),
            base: samples(|round| round.program_base),
            net: samples(Round::net),
            floor_net: samples(Round::floor_net),
            gross_ratio: samples(|round| round.program / round.floor),
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
        cells.push(median(&self.floor_net, 1));
        cells.extend(spread(&self.ratio, 2));
        cells.extend([median(&self.base, 1), median(&self.gross_ratio, 2)]);
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
        self.program - self.program_base
    }

    fn floor_net(&self) -> f64 {
        self.floor - self.floor_base
    }
}

const HEADER: [&str; 12] = [
    "ns for a packet, over returning at once",
    "min",
    "median",
    "max",
    "floor",
    "× min",
    "median",
    "max",
    "base",
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

    /// For people.
    pub(crate) fn text(&self) -> String {
        format!("{}\n\n{}", self.notes().join("\n"), self.table())
    }

    fn notes(&self) -> Vec<String> {
        let Self { machine, cpu, load_after, rounds, slice, .. } = self;
        vec![
            format!("{machine}, {load_after} after"),
            format!("{rounds} rounds of {:.0} ms for each program, on CPU {cpu}", slice * 1e3),
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
            table.add_row([format!("{}; floor: {}", section.label(), first.floor_program)]);
            for row in self.rows(section) {
                table.add_row(row.cells());
            }
        }
        for column in table.column_iter_mut().skip(1).take(10) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }

    /// Writes all figures as JSON.
    pub(crate) fn write_json(&self, file: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        fs::write(file, text).with_context(|| format!("writing the figures to {}", file.display()))
    }

    /// Writes a plot for each section into a folder.
    pub(crate) fn write_plots(&self, folder: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("making the folder {}", folder.display()))?;
        for section in Section::ALL {
            let bars: Vec<Bar> = self.rows(section).flat_map(Row::bars).collect();
            if bars.is_empty() {
                continue;
            }
            let plot = Plot {
                title: format!("Nanoseconds for a packet: {}", section.label()),
                notes: self.notes(),
                unit: "ns of CPU time over a program that returns at once; median, line: min to max"
                    .to_owned(),
                bars,
            };
            plot.write(&folder.join(format!("{}.svg", section.file())))?;
        }
        Ok(())
    }
}

impl Row {
    /// The program and its floor.
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
            bar(format!("floor: {}", self.floor_program), &self.floor_net, true),
        ]
    }
}
