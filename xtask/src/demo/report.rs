//! The results of the demo, as data and as text.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

/// Length of the longest bar, in characters.
const BAR: usize = 16;

/// All results, as `--json` prints them.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    /// Answers by pod, for each client and virtual address.
    pub(super) traffic: Vec<Traffic>,
    /// The claims about the load balancer that the demo has checked, with the results.
    pub(super) checks: Vec<Check>,
}

/// Requests of one client to one virtual address.
#[derive(Debug, Serialize)]
pub(super) struct Traffic {
    /// `namespace/name` of the Service.
    pub(super) service: String,
    /// The virtual address that the requests were sent to.
    pub(super) address: SocketAddr,
    /// The protocol of the requests, `TCP` or `UDP`.
    pub(super) protocol: &'static str,
    /// The namespace that the requests came from.
    pub(super) client: String,
    pub(super) requests: u32,
    /// Answers by pod, 0 for a backend that did not answer.
    pub(super) answers: BTreeMap<String, u32>,
    /// Requests without an answer, by error.
    pub(super) failures: BTreeMap<String, u32>,
    /// Answers to requests that reached the pod with another source address than the client's. Requests that a pod
    /// sends to itself do not count.
    pub(super) address_changed: u32,
}

/// A claim about the load balancer that the demo has checked.
#[derive(Debug, Serialize)]
pub(super) struct Check {
    /// The claim.
    pub(super) promise: String,
    /// Whether the observation agrees with the claim.
    pub(super) kept: bool,
    /// The observation.
    pub(super) seen: String,
}

impl Report {
    /// Adds a claim and whether it was confirmed.
    pub(super) fn check(&mut self, promise: &str, kept: bool, seen: impl Into<String>) {
        self.checks.push(Check { promise: promise.to_owned(), kept, seen: seen.into() });
    }

    /// Fails if a claim was not confirmed.
    pub(super) fn verdict(&self) -> anyhow::Result<()> {
        let broken: Vec<&str> =
            self.checks.iter().filter(|check| !check.kept).map(|check| check.promise.as_str()).collect();
        anyhow::ensure!(broken.is_empty(), "not as promised: {}", broken.join("; "));
        Ok(())
    }

    /// The traffic as a table, and the checks.
    pub(super) fn text(&self, colours: bool) -> String {
        let checks: Vec<String> = self.checks.iter().map(|check| check.line(colours)).collect();
        format!("{}\n\n{}\n", self.table(), checks.join("\n"))
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY).force_no_tty();
        table.set_header(["service", "virtual address", "pod", "answers", ""]);
        for traffic in &self.traffic {
            // One row per virtual address, with one line per pod.
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

/// A bar with [`BAR`] characters for `most`, proportionally shorter for fewer answers, with at least one character for
/// any answer.
fn bar(answers: u32, most: u32) -> String {
    let length = (answers as usize * BAR).div_ceil(most.max(1) as usize);
    "█".repeat(length)
}

/// Prints progress to standard error: standard output has the results only.
pub(super) fn say(what: &str) {
    eprintln!("· {what}");
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
    fn bars_are_proportional() {
        let text = report().text(false);
        let bars: Vec<usize> = text
            .lines()
            .filter(|line| line.contains("pod") && !line.contains("answers"))
            .map(|line| line.matches('█').count())
            .collect();
        assert_eq!(bars, [BAR / 2, BAR, 0], "{text}");
    }

    #[test]
    fn broken_promise_is_shown_and_fails() {
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
