//! The results of the benchmark, as a table and as JSON.

use std::path::PathBuf;

use lb_tests::bench::{Figure, Machine, Quantile, figure};
use serde::Serialize;

use crate::workload::Size;

/// Maximum seconds from parsed objects to programmed maps.
pub(crate) const FULL_SYNC_LIMIT: f64 = 0.5;

/// All results, as `--json` prints them.
#[derive(Serialize)]
pub(crate) struct Report {
    size: Size,
    runs: u32,
    changes_per_run: u32,
    /// Path of the measured agent.
    agent: PathBuf,
    machine: Machine,
    /// Load average of the last minute, read at the end of the benchmark.
    pub(crate) load_after: f64,
    figures: Vec<Figure>,
}

impl Report {
    /// A report without results.
    pub(crate) fn new(size: Size, runs: u32, changes_per_run: u32, machine: Machine) -> Self {
        let load_after = machine.load_before;
        let agent = lb_tests::agent::binary();
        Self { size, runs, changes_per_run, agent, machine, load_after, figures: Vec::new() }
    }

    pub(crate) fn add(&mut self, figure: Figure) {
        self.figures.push(figure);
    }

    /// Adds a result whose maximum must be less than `limit`. The limit applies only to sizes that
    /// [`Size::is_ordinary`] accepts, because the result grows with the size.
    pub(crate) fn add_limited(&mut self, figure: Figure, limit: f64) {
        let has_limit = self.size.is_ordinary();
        self.add(if has_limit { figure.target(Quantile::Max, limit) } else { figure });
    }

    pub(crate) fn targets_met(&self) -> bool {
        self.figures.iter().all(|figure| figure.is_met() != Some(false))
    }

    /// The results as a table, with a heading.
    pub(crate) fn text(&self) -> String {
        format!("{}\n\n{}", self.heading(), figure::table(&self.figures))
    }

    fn heading(&self) -> String {
        let Self {
            size: Size { services, endpoints },
            runs,
            changes_per_run,
            agent,
            machine,
            load_after,
            ..
        } = self;
        format!(
            "{services} Services with {endpoints} endpoints each; {runs} runs with {changes_per_run} changes each\n\
             {}\n\
             {machine}, {load_after} after",
            agent.display()
        )
    }
}
