//! The guest's results: one JSON object per line. The last line closes the report.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

/// One line of a guest's report.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Record {
    /// The guest has booted. This kernel may lack some of the requested modules.
    Started { missing_modules: Vec<String> },
    /// The output of `lb-agent check -o json`.
    Check(Vec<Probe>),
    /// A test has ended.
    Test(Test),
    /// The output of a failed test, or of a binary with failed tests.
    Output { name: String, output: String },
    /// All tests have ended.
    Closing { passed: usize, skipped: usize, failed: usize },
}

/// A probe of `lb-agent check`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Probe {
    pub(super) name: String,
    pub(super) result: String,
    pub(super) detail: String,
}

/// A test that has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Test {
    /// Binary and test name: `netns::sockets::…`.
    pub(super) name: String,
    pub(super) outcome: TestOutcome,
    pub(super) seconds: f64,
}

/// The result of a test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TestOutcome {
    /// The test passed. Parts of it may have been skipped, for these reasons.
    Passed { without: Vec<String> },
    /// The test cannot run in this guest.
    Skipped { reason: String },
    /// The test has failed. A [`Record::Output`] has its output.
    Failed,
}

impl Record {
    /// The lines to print while the guest runs; empty if there is nothing to print.
    pub(super) fn progress(&self, kernel: &str) -> String {
        match self {
            Self::Started { missing_modules } if missing_modules.is_empty() => {
                format!("  {kernel:<5} the guest is up\n")
            }
            Self::Started { missing_modules } => {
                format!("  {kernel:<5} the guest is up; this kernel has no {}\n", missing_modules.join(", "))
            }
            Self::Check(probes) => probes
                .iter()
                .filter(|probe| probe.result != "ok")
                .map(|Probe { result, name, detail }| {
                    format!("  {kernel:<5} {result}: {name}: {}\n", first_line(detail))
                })
                .collect(),
            Self::Test(Test { name, outcome, seconds }) => match outcome {
                TestOutcome::Passed { without } if without.is_empty() => {
                    format!("  {kernel:<5} ok       {seconds:6.1} s  {name}\n")
                }
                TestOutcome::Passed { without } => {
                    format!(
                        "  {kernel:<5} ok       {seconds:6.1} s  {name}, without: {}\n",
                        without.join("; ")
                    )
                }
                TestOutcome::Skipped { reason } => {
                    format!("  {kernel:<5} skipped            {name}: {reason}\n")
                }
                TestOutcome::Failed => format!("  {kernel:<5} FAILED   {seconds:6.1} s  {name}\n"),
            },
            Self::Output { name, output } => format!("  {kernel:<5} ---- {name} ----\n{output}\n"),
            Self::Closing { .. } => String::new(),
        }
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// The report of a guest that has run all its tests.
#[derive(Debug)]
pub(super) struct Report {
    records: Vec<Record>,
}

impl Report {
    /// Reads the records so far, without an incomplete last line.
    pub(super) fn read(path: &Path) -> anyhow::Result<Vec<Record>> {
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        parse(&String::from_utf8_lossy(&text)).with_context(|| format!("in {}", path.display()))
    }

    /// Checks that the report is complete: a single closing line, at the end, with matching counts.
    pub(super) fn new(records: Vec<Record>) -> anyhow::Result<Self> {
        let closings = records.iter().filter(|record| matches!(record, Record::Closing { .. })).count();
        ensure!(closings > 0, "the closing line is missing: the guest ended before its tests");
        ensure!(closings == 1, "there are {closings} closing lines");
        let report = Self { records };
        let counts = (report.passed(), report.skipped().count(), report.failed());
        let Some(Record::Closing { passed, skipped, failed }) = report.records.last() else {
            anyhow::bail!("there are records after the closing line");
        };
        ensure!(
            counts == (*passed, *skipped, *failed),
            "the closing line says {passed} passed, {skipped} skipped, {failed} failed; the records say {counts:?}"
        );
        ensure!(passed + failed > 0, "no test ran");
        Ok(report)
    }

    fn tests(&self) -> impl Iterator<Item = &Test> {
        self.records
            .iter()
            .filter_map(|record| if let Record::Test(test) = record { Some(test) } else { None })
    }

    fn passed(&self) -> usize {
        self.tests().filter(|test| matches!(test.outcome, TestOutcome::Passed { .. })).count()
    }

    pub(super) fn failed(&self) -> usize {
        self.tests().filter(|test| matches!(test.outcome, TestOutcome::Failed)).count()
    }

    /// The tests that did not run, with the reason of each.
    fn skipped(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tests().filter_map(|test| match &test.outcome {
            TestOutcome::Skipped { reason } => Some((test.name.as_str(), reason.as_str())),
            TestOutcome::Passed { .. } | TestOutcome::Failed => None,
        })
    }

    /// The results of `lb-agent check`.
    pub(super) fn probes(&self) -> &[Probe] {
        let probes = self
            .records
            .iter()
            .find_map(|record| if let Record::Check(probes) = record { Some(probes) } else { None });
        probes.map_or(&[], Vec::as_slice)
    }

    /// A summary line: number of passed tests, skipped tests with reasons, number of failed tests.
    pub(super) fn summary(&self, release: &str) -> String {
        let skipped: Vec<String> = self.skipped().map(|(name, reason)| format!("{name}: {reason}")).collect();
        let named = if skipped.is_empty() { String::new() } else { format!(" ({})", skipped.join("; ")) };
        let (passed, failed) = (self.passed(), self.failed());
        format!("vm {release}: {passed} passed, {} skipped{named}, {failed} failed", skipped.len())
    }
}

fn parse(text: &str) -> anyhow::Result<Vec<Record>> {
    let complete = text.rfind('\n').map_or("", |end| &text[..end]);
    let lines = complete.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_str(line).with_context(|| format!("not a record: {line}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test(name: &str, outcome: TestOutcome) -> Record {
        Record::Test(Test { name: name.to_owned(), outcome, seconds: 1.0 })
    }

    fn passed(name: &str) -> Record {
        test(name, TestOutcome::Passed { without: Vec::new() })
    }

    fn closing(passed: usize, skipped: usize, failed: usize) -> Record {
        Record::Closing { passed, skipped, failed }
    }

    fn error(records: Vec<Record>) -> String {
        Report::new(records).unwrap_err().to_string()
    }

    #[test]
    fn summary_names_skipped_tests() {
        let skipped = test("b", TestOutcome::Skipped { reason: "no SCTP".to_owned() });
        let report = Report::new(vec![passed("a"), skipped, closing(1, 1, 0)]).unwrap();
        assert_eq!(report.summary("6.1"), "vm 6.1: 1 passed, 1 skipped (b: no SCTP), 0 failed");
    }

    #[test]
    fn report_without_one_correct_closing_line_is_rejected() {
        assert!(error(vec![passed("a")]).contains("closing line is missing"));
        assert!(error(vec![passed("a"), closing(1, 0, 0), closing(1, 0, 0)]).contains("2 closing lines"));
        assert!(error(vec![closing(1, 0, 0), passed("a")]).contains("after the closing line"));
        assert!(error(vec![passed("a"), closing(2, 0, 0)]).contains("says 2 passed"));
        assert!(error(vec![closing(0, 0, 0)]).contains("no test ran"));
    }

    #[test]
    fn serial_port_line_ends_and_partial_lines_are_accepted() {
        let line = serde_json::to_string(&passed("a")).unwrap();
        let text = format!("{line}\r\n{line}\r\n{}", &line[..10]);
        assert_eq!(parse(&text).unwrap(), [passed("a"), passed("a")]);
        assert!(parse("noise\n").is_err());
    }
}
