//! The figures, as a table and as data.

use std::path::PathBuf;

use comfy_table::{CellAlignment, Table, presets};
use serde::{Serialize, Serializer, ser::SerializeStruct as _};

use crate::{machine::Machine, workload::Size};

/// Everything that was measured; `--json` prints just this.
#[derive(Serialize)]
pub(crate) struct Report {
    size: Size,
    runs: u32,
    changes_per_run: u32,
    /// The program that was measured.
    agent: PathBuf,
    machine: Machine,
    /// Load of the last minute when the benchmark ended.
    pub(crate) load_after: f64,
    figures: Vec<Figure>,
}

/// What a figure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Unit {
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
    /// Just a number.
    Count,
}

/// One thing that was measured, several times.
pub(crate) struct Figure {
    /// Where it was measured.
    pub(crate) place: String,
    /// What it is.
    pub(crate) what: String,
    unit: Unit,
    /// In ascending order.
    samples: Vec<f64>,
    target: Option<Target>,
}

/// What a figure must stay below.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Target {
    /// Of all samples, the one that counts.
    pub(crate) quantile: Quantile,
    /// The limit, in the unit of the figure.
    pub(crate) below: f64,
}

/// A sample by its place in the order of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Quantile {
    /// The least.
    Min,
    /// The one in the middle.
    Median,
    /// Of 100 samples 99 are not above it.
    P99,
    /// The greatest.
    Max,
}

impl Figure {
    /// At least one sample.
    pub(crate) fn new(place: &str, what: &str, unit: Unit, mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        Self { place: place.to_owned(), what: what.to_owned(), unit, samples, target: None }
    }

    /// With a target.
    pub(crate) fn target(self, quantile: Quantile, below: f64) -> Self {
        Self { target: Some(Target { quantile, below }), ..self }
    }

    fn at(&self, quantile: Quantile) -> f64 {
        let count = self.samples.len();
        let rank = match quantile {
            Quantile::Min => 1,
            Quantile::Median => count.div_ceil(2),
            Quantile::P99 => (count * 99).div_ceil(100),
            Quantile::Max => count,
        };
        self.samples.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }

    /// Whether the target is met, if there is one.
    fn is_met(&self) -> Option<bool> {
        self.target.map(|target| self.at(target.quantile) < target.below)
    }

    fn verdict(&self) -> String {
        let (Some(target), Some(met)) = (self.target, self.is_met()) else { return String::new() };
        let mark = if met { "✓" } else { "✗" };
        format!("{mark} {} < {}", target.quantile.as_str(), self.unit.show(target.below))
    }
}

impl Serialize for Figure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Figure", 10)?;
        fields.serialize_field("place", &self.place)?;
        fields.serialize_field("what", &self.what)?;
        fields.serialize_field("unit", &self.unit)?;
        fields.serialize_field("samples", &self.samples.len())?;
        fields.serialize_field("min", &self.at(Quantile::Min))?;
        fields.serialize_field("median", &self.at(Quantile::Median))?;
        fields.serialize_field("p99", &self.at(Quantile::P99))?;
        fields.serialize_field("max", &self.at(Quantile::Max))?;
        fields.serialize_field("target", &self.target)?;
        fields.serialize_field("met", &self.is_met())?;
        fields.end()
    }
}

impl Quantile {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Min => "min",
            Self::Median => "median",
            Self::P99 => "p99",
            Self::Max => "max",
        }
    }
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Seconds if value >= 1.0 => format!("{value:.2} s"),
            Self::Seconds => format!("{:.2} ms", value * 1e3),
            Self::Bytes if value >= 1e5 => format!("{:.1} MB", value / 1e6),
            Self::Bytes => format!("{:.1} kB", value / 1e3),
            Self::Count => format!("{value}"),
        }
    }
}

impl Report {
    /// Without figures yet.
    pub(crate) fn new(size: Size, runs: u32, changes_per_run: u32, machine: Machine) -> Self {
        let load_after = machine.load_before;
        let agent = lb_tests::agent::binary();
        Self { size, runs, changes_per_run, agent, machine, load_after, figures: Vec::new() }
    }

    /// What is measured.
    pub(crate) const fn size(&self) -> Size {
        self.size
    }

    /// Adds a figure.
    pub(crate) fn add(&mut self, figure: Figure) {
        self.figures.push(figure);
    }

    /// Whether every target is met.
    pub(crate) fn targets_met(&self) -> bool {
        self.figures.iter().all(|figure| figure.is_met() != Some(false))
    }

    /// For people.
    pub(crate) fn text(&self) -> String {
        format!("{}\n\n{}", self.heading(), self.table())
    }

    fn heading(&self) -> String {
        let Self { size: Size { services, endpoints }, runs, changes_per_run, agent, .. } = self;
        let Machine { cpu, cpus, memory, kernel, load_before } = &self.machine;
        let (agent, gigabytes, load_after) = (agent.display(), *memory as f64 / 1e9, self.load_after);
        format!(
            "{services} Services with {endpoints} endpoints each; {runs} runs with {changes_per_run} changes each\n\
             {agent}\n\
             {cpus} x {cpu}, {gigabytes:.1} GB, Linux {kernel}; load {load_before} before, {load_after} after"
        )
    }

    /// A heading for each place, with its figures below.
    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING).force_no_tty();
        table.set_header(["", "samples", "min", "median", "p99", "max", "target"]);
        let mut place = "";
        for figure in &self.figures {
            if figure.place != place {
                place = &figure.place;
                table.add_row([place]);
            }
            let show = |quantile| figure.unit.show(figure.at(quantile));
            table.add_row([
                format!("  {}", figure.what),
                figure.samples.len().to_string(),
                show(Quantile::Min),
                show(Quantile::Median),
                show(Quantile::P99),
                show(Quantile::Max),
                figure.verdict(),
            ]);
        }
        for column in table.column_iter_mut().skip(1).take(5) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }
}
