//! The results of the benchmark as tables, JSON and plots.

use std::{fs, path::Path};

use anyhow::Context as _;
use comfy_table::{CellAlignment, Table, presets};
use lb_tests::bench::{Bar, Machine, Plot, Quantile, figure::mark};
use serde::Serialize;

use crate::{
    compare::{self, Comparison, Quantity, find},
    family::Family,
    load::Measure,
    prepare::Preparation,
    rounds::{Candidate, Outcome, Sample},
    system::System,
    targets::Target,
    way::Way,
};

/// All results, as `--json` writes them.
#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) machine: Machine,
    pub(crate) family: Family,
    /// Length of each burst in seconds.
    pub(crate) seconds: f64,
    pub(crate) rounds: u32,
    /// Whether clients and servers ran on different CPUs.
    pub(crate) apart: bool,
    /// Load average of the last minute, read at the end of the benchmark.
    pub(crate) load_after: f64,
    /// How long each load balancer took to set up.
    pub(crate) preparations: Vec<Preparation>,
    pub(crate) comparisons: Vec<Comparison>,
    pub(crate) targets: Vec<Target>,
    /// Number of bursts that were repeated because something disturbed them.
    pub(crate) repeated: u32,
    /// Number of bursts that were dropped after the last attempt. The candidate of a dropped burst has no sample of the
    /// workload for the round.
    pub(crate) dropped: u32,
    /// All accepted bursts, by candidate.
    pub(crate) bursts: Vec<Bursts>,
}

/// The accepted bursts of one candidate.
#[derive(Serialize)]
pub(crate) struct Bursts {
    #[serde(flatten)]
    candidate: Candidate,
    samples: Vec<Sample>,
}

/// A quantity that the tables show, and how they show it.
struct View {
    title: &'static str,
    /// Selects the quantity of a comparison; `None` if the workload of the comparison has no such quantity.
    quantity: fn(&Comparison) -> Option<&Quantity>,
    /// Formats the absolute value of the baseline.
    show: fn(&Comparison, f64) -> String,
}

const VIEWS: [View; 4] = [
    View { title: "CPU time", quantity: |comparison| Some(&comparison.cpu), show: show_cpu },
    View {
        title: "median latency",
        quantity: |comparison| comparison.median.as_ref(),
        show: |_, value| seconds(value),
    },
    View {
        title: "p99 latency",
        quantity: |comparison| comparison.p99.as_ref(),
        show: |_, value| seconds(value),
    },
    View { title: "rate", quantity: |comparison| Some(&comparison.rate), show: show_rate },
];

impl Report {
    /// The results as tables with notes.
    pub(crate) fn text(&self) -> String {
        let mut parts = vec![self.heading()];
        for way in Way::ALL {
            if self.comparisons.iter().any(|comparison| comparison.candidate.way == way) {
                parts.push(format!("## {}", way.title()));
                parts.extend(VIEWS.iter().map(|view| format!("{}\n{}", view.title, self.table(way, view))));
            }
        }
        parts.push(self.target_lines());
        parts.join("\n\n")
    }

    /// Adds the results of one group of sizes.
    pub(crate) fn add(&mut self, candidates: &[Candidate], outcome: Outcome) {
        // Compares with the baseline of the same group, which was measured in the same rounds.
        self.comparisons.extend(compare::all(candidates, &outcome));
        self.repeated += outcome.repeated;
        self.dropped += outcome.dropped;
        let bursts = candidates.iter().cloned().zip(outcome.samples);
        self.bursts.extend(bursts.map(|(candidate, samples)| Bursts { candidate, samples }));
    }

    pub(crate) fn targets_met(&self) -> bool {
        self.targets.iter().all(|target| target.is_met)
    }

    fn heading(&self) -> String {
        let Self { machine, seconds, rounds, load_after, repeated, dropped, family, .. } = self;
        let one = "client, node and server share one CPU, which has nothing else to do: a transaction takes as long as it costs";
        let cpus = if self.apart { "client and server have a CPU for each" } else { one };
        format!(
            "{machine}, {load_after} after\n\
             {}; {rounds} rounds of bursts of {seconds} s in random order; {repeated} bursts repeated, {dropped} dropped\n\
             {cpus}\n\
             CPU time is that of clients, servers and all soft interrupts; what is received from a veth is handled by its sender\n\
             Services that are just there have one endpoint; the one that is measured is in the middle of them\n\
             First row of each table: the baseline itself; below: ratio to it in the same round, median (quartiles)",
            family.name()
        )
    }

    fn table(&self, way: Way, view: &View) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).force_no_tty();
        let measures: Vec<Measure> = Measure::ALL
            .into_iter()
            .filter(|measure| {
                find(&self.comparisons, way, *measure).any(|found| (view.quantity)(found).is_some())
            })
            .collect();
        let names = measures.iter().map(|measure| measure.name().to_owned());
        let heads = ["", "Services", "endpoints"].into_iter().map(str::to_owned).chain(names);
        table.set_header(heads);
        for row in self.rows(way) {
            let size = row.candidate.size;
            let number =
                |number: Option<u32>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
            let mut cells = vec![
                row.candidate.system.name(way).to_owned(),
                number(size.map(|size| size.services)),
                number(size.map(|size| size.endpoints)),
            ];
            for measure in &measures {
                let same = |other: &&Comparison| other.candidate == row.candidate;
                let found = find(&self.comparisons, way, *measure).find(same);
                cells.push(found.map_or_else(String::new, |found| cell(found, view)));
            }
            table.add_row(cells);
        }
        for column in table.column_iter_mut().skip(1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }

    /// For each candidate of the path, one of its comparisons.
    fn rows(&self, way: Way) -> Vec<&Comparison> {
        let mut rows: Vec<&Comparison> = Vec::new();
        for comparison in self.comparisons.iter().filter(|comparison| comparison.candidate.way == way) {
            if rows.iter().all(|row| row.candidate != comparison.candidate) {
                rows.push(comparison);
            }
        }
        rows.sort_by_key(|row| {
            (row.candidate.size.map(|size| size.endpoints), row.candidate.system, row.candidate.size)
        });
        rows
    }

    fn target_lines(&self) -> String {
        let line = |target: &Target| {
            let Target { what, value, limit, is_met } = target;
            format!("{} {value:.3} ≤ {limit:.2}  {what}", mark(*is_met))
        };
        let mut lines: Vec<String> = vec!["Targets".to_owned()];
        lines.extend(self.targets.iter().map(line));
        lines.join("\n")
    }

    /// Writes a plot for each path, for each of the workloads `request` and `connect`.
    pub(crate) fn plot(&self, folder: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
        for way in Way::ALL {
            for measure in [Measure::Request, Measure::Connect] {
                let bars: Vec<Bar> = find(&self.comparisons, way, measure).map(bar).collect();
                if bars.is_empty() {
                    continue;
                }
                let plot = Plot {
                    title: format!("{}: {}", measure.name(), way.title()),
                    notes: vec![self.machine.to_string(), "bar: median; line: quartiles".to_owned()],
                    unit: format!("CPU time per {}, as a ratio to {}", measure.name(), way.baseline()),
                    bars,
                };
                plot.write(&folder.join(format!("end-to-end-{}-{}.svg", way, measure)))?;
            }
        }
        Ok(())
    }
}

fn bar(comparison: &Comparison) -> Bar {
    let ratio = &comparison.cpu.ratio;
    Bar {
        label: comparison.candidate.label(),
        min: ratio.at(Quantile::P25),
        median: ratio.at(Quantile::Median),
        max: ratio.at(Quantile::P75),
        is_reference: !comparison.candidate.system.is_ours(),
    }
}

fn cell(comparison: &Comparison, view: &View) -> String {
    let Some(Quantity { absolute, ratio }) = (view.quantity)(comparison) else { return String::new() };
    if comparison.candidate.system == System::Nothing {
        return (view.show)(comparison, absolute.at(Quantile::Median));
    }
    let [low, middle, high] = [Quantile::P25, Quantile::Median, Quantile::P75].map(|at| ratio.at(at));
    format!("{middle:.3} ({low:.3}–{high:.3})")
}

fn seconds(value: f64) -> String {
    format!("{:.2} µs", value * 1e6)
}

fn show_cpu(comparison: &Comparison, value: f64) -> String {
    if comparison.measure.counts_bytes() { format!("{:.3} ns/byte", value * 1e9) } else { seconds(value) }
}

fn show_rate(comparison: &Comparison, value: f64) -> String {
    if comparison.measure.counts_bytes() {
        format!("{:.2} Gbit/s", value * 8.0 / 1e9)
    } else {
        format!("{value:.0} /s")
    }
}
