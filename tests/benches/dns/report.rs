//! The results, as a table.

use comfy_table::{CellAlignment, Table, presets};
use lb_tests::bench::{Machine, Quantile, Samples, machine};
use serde::Serialize;

use crate::{
    load::Burst,
    workload::{Kind, Workload},
};

/// All results, as `--json` writes them.
#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) workload: Workload,
    pub(crate) rounds: u32,
    pub(crate) seconds: f64,
    pub(crate) machine: Machine,
    /// Path of the measured agent, and version of unbound.
    pub(crate) servers: [String; 2],
    pub(crate) memory: Memory,
    pub(crate) rows: Vec<Row>,
}

/// Resident memory in bytes, one sample for each start.
#[derive(Default, Serialize)]
pub(crate) struct Memory {
    /// Memory of the agent without DNS, and of unbound with a zone of two Services.
    pub(crate) baseline: [Vec<f64>; 2],
    /// Memory of the agent with its DNS server, and of unbound, both with the names of all Services, before the first
    /// burst.
    pub(crate) begin: [Vec<f64>; 2],
    /// Memory of the same servers as in `begin`, after the last burst.
    pub(crate) end: [Vec<f64>; 2],
}

/// The bursts of one kind of query: in each round, one to the agent and one to unbound.
#[derive(Serialize)]
pub(crate) struct Row {
    pub(crate) kind: Kind,
    pub(crate) rounds: Vec<[Burst; 2]>,
}

impl Report {
    pub(crate) fn text(&self) -> anyhow::Result<String> {
        let Self { workload: Workload { services, endpoints }, rounds, seconds, machine, servers, .. } = self;
        let after = machine::load()?;
        Ok(format!(
            "{services} Services with {endpoints} endpoints each, half of them headless; {rounds} rounds of {seconds} s for \
             each server and kind of query, by dnsperf\n{}\n{}\n{machine}, {after} after\n\n{}\n\n{}",
            servers[0],
            servers[1],
            self.rates(),
            self.memory.table()
        ))
    }

    fn rates(&self) -> Table {
        let mut table = table([
            "",
            "agent, queries/s",
            "unbound, queries/s",
            "ratio",
            "agent, CPU/query",
            "unbound, CPU/query",
            "ratio",
            "bytes of an answer",
        ]);
        for row in &self.rows {
            let rate = |server: usize| row.spread(|round| round[server].rate, 1.0, 0, "");
            let cpu = |server: usize| row.spread(|round| round[server].cpu, 1e6, 1, " µs");
            let size = [0, 1].map(|server| row.median(|round| round[server].size));
            table.add_row([
                row.kind.to_string(),
                rate(0),
                rate(1),
                row.spread(|[agent, unbound]| agent.rate / unbound.rate, 1.0, 2, ""),
                cpu(0),
                cpu(1),
                row.spread(|[agent, unbound]| agent.cpu / unbound.cpu, 1.0, 2, ""),
                format!("{:.0} / {:.0}", size[0], size[1]),
            ]);
        }
        table
    }
}

impl Row {
    fn samples(&self, get: impl Fn(&[Burst; 2]) -> f64) -> Samples {
        Samples::new(self.rounds.iter().map(get).collect())
    }

    fn median(&self, get: impl Fn(&[Burst; 2]) -> f64) -> f64 {
        self.samples(get).at(Quantile::Median)
    }

    /// Median, minimum and maximum as text.
    fn spread(&self, get: impl Fn(&[Burst; 2]) -> f64, scale: f64, digits: usize, unit: &str) -> String {
        spread(&self.samples(get), scale, digits, unit)
    }
}

impl Memory {
    fn table(&self) -> Table {
        let mut table = table(["resident memory", "agent", "unbound"]);
        let show = |samples: &[f64]| spread(&Samples::new(samples.to_vec()), 1e-6, 1, " MB");
        let mut add = |what: &str, of: &dyn Fn(usize) -> Vec<f64>| {
            table.add_row([what.to_owned(), show(&of(0)), show(&of(1))]);
        };
        add("without DNS; with an empty zone", &|server| self.baseline[server].clone());
        add("with the names, before the first query", &|server| self.begin[server].clone());
        add("after the last query", &|server| self.end[server].clone());
        add("for the names, after the last query", &|server| {
            self.end[server]
                .iter()
                .zip(&self.baseline[server])
                .map(|(end, baseline)| end - baseline)
                .collect()
        });
        table
    }
}

fn spread(samples: &Samples, scale: f64, digits: usize, unit: &str) -> String {
    let [median, min, max] =
        [Quantile::Median, Quantile::Min, Quantile::Max].map(|quantile| samples.at(quantile) * scale);
    format!("{median:.digits$}{unit} ({min:.digits$} to {max:.digits$})")
}

fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).force_no_tty().set_header(header);
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}
