//! What the demo found: data, and its presentation as text.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

/// Length of the longest bar, in characters.
const BAR: usize = 16;

/// Everything the demo prints; `--json` prints just this.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    /// Who answered how many requests, for each client and virtual address.
    pub(super) traffic: Vec<Traffic>,
    /// What was promised, and whether it held.
    pub(super) checks: Vec<Check>,
}

/// Requests of one client to one virtual address.
#[derive(Debug, Serialize)]
pub(super) struct Traffic {
    /// `namespace/name` of the service.
    pub(super) service: String,
    /// What the client spoke to.
    pub(super) address: SocketAddr,
    /// `TCP` or `UDP`
    pub(super) protocol: &'static str,
    /// Where the requests came from.
    pub(super) client: String,
    /// Number of requests.
    pub(super) requests: u32,
    /// Answers by pod; also of pods that should and did not answer.
    pub(super) answers: BTreeMap<String, u32>,
    /// Requests without an answer, by what went wrong.
    pub(super) failures: BTreeMap<String, u32>,
    /// Answers that came from a pod which saw another address than the client's.
    pub(super) address_changed: u32,
}

/// A promise.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    /// What should be.
    pub(super) promise: String,
    /// Whether it was.
    pub(super) kept: bool,
    /// What was seen.
    pub(super) seen: String,
}

impl Report {
    /// Notes whether a promise was kept.
    pub(super) fn check(&mut self, promise: &str, kept: bool, seen: impl Into<String>) {
        self.checks.push(Check { promise: promise.to_owned(), kept, seen: seen.into() });
    }

    /// An error if a promise was not kept.
    pub(super) fn verdict(&self) -> anyhow::Result<()> {
        let broken: Vec<&str> =
            self.checks.iter().filter(|check| !check.kept).map(|check| check.promise.as_str()).collect();
        anyhow::ensure!(broken.is_empty(), "not as promised: {}", broken.join("; "));
        Ok(())
    }

    /// A table of the traffic, and the checks.
    pub(super) fn text(&self, colours: bool) -> String {
        let checks: Vec<String> = self.checks.iter().map(|check| check.line(colours)).collect();
        format!("{}\n\n{}\n", self.table(), checks.join("\n"))
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY).force_no_tty();
        table.set_header(["service", "virtual address", "pod", "answers", ""]);
        for traffic in &self.traffic {
            // One row for each virtual address, with one line for each pod.
            let lines = |line: &dyn Fn((&String, &u32)) -> String| {
                traffic.answers.iter().map(line).collect::<Vec<_>>().join("\n")
            };
            let most = traffic.answers.values().copied().max().unwrap_or_default();
            table.add_row([
                traffic.service.clone(),
                format!("{}\n{} from {}", traffic.address, traffic.protocol, traffic.client),
                lines(&|(pod, _)| pod.clone()),
                lines(&|(_, answers)| answers.to_string()),
                lines(&|(_, answers)| bar(*answers, most)),
            ]);
        }
        if let Some(column) = table.column_mut(3) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }
}

impl Check {
    fn line(&self, colours: bool) -> String {
        let (mark, colour) = if self.kept { ("✓", "\x1b[32m") } else { ("✗", "\x1b[31m") };
        let (on, off) = if colours { (colour, "\x1b[0m") } else { ("", "") };
        format!("{on}{mark}{off} {} ({})", self.promise, self.seen)
    }
}

/// A bar of [`BAR`] characters for `most`, and shorter in proportion; any answer at all shows.
fn bar(answers: u32, most: u32) -> String {
    let length = (answers as usize * BAR).div_ceil(most.max(1) as usize);
    "█".repeat(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let answers = [("pod1", 30), ("pod2", 60), ("pod3", 0)];
        let traffic = Traffic {
            service: "default/web".to_owned(),
            address: SocketAddr::from(([10, 96, 0, 20], 80)),
            protocol: "TCP",
            client: "client".to_owned(),
            requests: 90,
            answers: answers.map(|(pod, count)| (pod.to_owned(), count)).into(),
            failures: BTreeMap::new(),
            address_changed: 0,
        };
        Report { traffic: vec![traffic], checks: Vec::new() }
    }

    #[test]
    fn bars_are_in_proportion() {
        let text = report().text(false);
        let bars: Vec<usize> = text
            .lines()
            .filter(|line| line.contains("pod") && !line.contains("answers"))
            .map(|line| line.matches('█').count())
            .collect();
        assert_eq!(bars, [BAR / 2, BAR, 0], "{text}");
    }

    #[test]
    fn a_broken_promise_is_shown_and_fails() {
        let mut report = report();
        report.check("requests are answered", true, "90 of 90");
        assert!(report.verdict().is_ok());
        report.check("pods share the work", false, "pod3 has nothing to do");
        assert!(report.verdict().is_err());
        let text = report.text(false);
        assert!(
            text.contains("✓ requests are answered (90 of 90)") && text.contains("✗ pods share"),
            "{text}"
        );
        assert!(report.text(true).contains("\x1b[31m✗"));
    }
}
