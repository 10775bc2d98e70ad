//! Results of benchmarks: samples, quantiles and targets.

use std::fmt;

use comfy_table::{CellAlignment, Table, presets};
use serde::{Serialize, Serializer, ser::SerializeStruct as _};

/// The unit of a figure's samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
    /// A plain number, without a unit.
    Count,
}

/// A quantity that a benchmark has measured several times.
pub struct Figure {
    /// The part of the system, or the setup, that was measured.
    pub place: String,
    /// Name of the measured quantity.
    pub what: String,
    unit: Unit,
    samples: Samples,
    target: Option<Target>,
}

/// The upper limit of a figure.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Target {
    /// Which sample the limit applies to.
    pub quantile: Quantile,
    /// The sample must be less than this limit, which has the figure's unit.
    pub below: f64,
}

/// Selects a sample by its rank in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Quantile {
    /// The smallest sample.
    Min,
    /// The 25th percentile.
    P25,
    /// The median.
    Median,
    /// The 75th percentile.
    P75,
    /// The 99th percentile.
    P99,
    /// The greatest sample.
    Max,
}

/// Measured values in ascending order.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Sorts values, which may be in any order.
    pub fn new(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        Self(samples)
    }

    /// The sample with this rank; NaN if there are no samples.
    pub fn at(&self, quantile: Quantile) -> f64 {
        let count = self.0.len();
        let rank = match quantile {
            Quantile::Min => 1,
            Quantile::P25 => count.div_ceil(4),
            Quantile::Median => count.div_ceil(2),
            Quantile::P75 => (count * 3).div_ceil(4),
            Quantile::P99 => (count * 99).div_ceil(100),
            Quantile::Max => count,
        };
        self.0.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }

    /// The number of samples.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

/// Serialises the number of samples, minimum, quartiles and maximum.
impl Serialize for Samples {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Samples", 6)?;
        fields.serialize_field("samples", &self.count())?;
        fields.serialize_field("min", &self.at(Quantile::Min))?;
        fields.serialize_field("p25", &self.at(Quantile::P25))?;
        fields.serialize_field("median", &self.at(Quantile::Median))?;
        fields.serialize_field("p75", &self.at(Quantile::P75))?;
        fields.serialize_field("max", &self.at(Quantile::Max))?;
        fields.end()
    }
}

impl Figure {
    /// A figure without a target; `samples` has at least one value.
    pub fn new(place: &str, what: &str, unit: Unit, samples: Vec<f64>) -> Self {
        let samples = Samples::new(samples);
        Self { place: place.to_owned(), what: what.to_owned(), unit, samples, target: None }
    }

    /// Adds a target: the sample with this rank must be less than `below`.
    pub fn target(self, quantile: Quantile, below: f64) -> Self {
        Self { target: Some(Target { quantile, below }), ..self }
    }

    /// The sample with this rank.
    pub fn at(&self, quantile: Quantile) -> f64 {
        self.samples.at(quantile)
    }

    /// Whether the target is met; `None` without a target.
    pub fn is_met(&self) -> Option<bool> {
        self.target.map(|target| self.at(target.quantile) < target.below)
    }

    fn verdict(&self) -> String {
        let (Some(target), Some(met)) = (self.target, self.is_met()) else { return String::new() };
        format!("{} {} < {}", mark(met), target.quantile, self.unit.show(target.below))
    }
}

/// One character that shows whether a target is met.
pub const fn mark(met: bool) -> &'static str {
    if met { "✓" } else { "✗" }
}

impl Serialize for Figure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Figure", 10)?;
        fields.serialize_field("place", &self.place)?;
        fields.serialize_field("what", &self.what)?;
        fields.serialize_field("unit", &self.unit)?;
        fields.serialize_field("samples", &self.samples.count())?;
        fields.serialize_field("min", &self.at(Quantile::Min))?;
        fields.serialize_field("median", &self.at(Quantile::Median))?;
        fields.serialize_field("p99", &self.at(Quantile::P99))?;
        fields.serialize_field("max", &self.at(Quantile::Max))?;
        fields.serialize_field("target", &self.target)?;
        fields.serialize_field("met", &self.is_met())?;
        fields.end()
    }
}

impl fmt::Display for Quantile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Min => "min",
            Self::P25 => "p25",
            Self::Median => "median",
            Self::P75 => "p75",
            Self::P99 => "p99",
            Self::Max => "max",
        })
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

/// The figures as a table, with a heading for each place.
pub fn table(figures: &[Figure]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).force_no_tty();
    table.set_header(["", "samples", "min", "median", "p99", "max", "target"]);
    let mut place = "";
    for figure in figures {
        if figure.place != place {
            place = &figure.place;
            table.add_row([place]);
        }
        let show = |quantile| figure.unit.show(figure.at(quantile));
        table.add_row([
            format!("  {}", figure.what),
            figure.samples.count().to_string(),
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
