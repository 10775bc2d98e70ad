//! What the guest tells: one JSON object per line, of which the last one closes the report.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Record {
    /// The guest is up; modules that were asked for and that this kernel has not.
    Started { missing_modules: Vec<String> },
    /// What `lb-agent check -o json` printed.
    Check(Vec<Probe>),
    /// A test is over.
    Test(Test),
    /// What a failed test printed, or a binary with failed tests.
    Output { name: String, output: String },
    /// All tests are over.
    Closing { passed: usize, skipped: usize, failed: usize },
}

/// What `lb-agent check` found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Probe {
    pub(super) name: String,
    pub(super) result: String,
    pub(super) detail: String,
}

/// A test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Test {
    /// The binary and the name in it: `netns::sockets::…`.
    pub(super) name: String,
    pub(super) outcome: TestOutcome,
    pub(super) seconds: f64,
}

/// How a test ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum TestOutcome {
    /// It passed; parts of it were skipped for these reasons, none as a rule.
    Passed { without: Vec<String> },
    /// It says that it cannot run here, or the plan says so.
    Skipped { reason: String },
    /// It failed; an [`Record::Output`] has what it printed.
    Failed,
}

impl Record {
    /// What is shown while the guest with this `kernel` runs.
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

/// A whole report.
#[derive(Debug)]
pub(super) struct Report {
    records: Vec<Record>,
}

impl Report {
    /// Reads what was written; an incomplete last line is none.
    pub(super) fn read(path: &Path) -> anyhow::Result<Vec<Record>> {
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        parse(&String::from_utf8_lossy(&text)).with_context(|| format!("in {}", path.display()))
    }

    /// A report that is whole: one closing line, at the end, which counts what there is.
    pub(super) fn new(records: Vec<Record>) -> anyhow::Result<Self> {
        let closings = records.iter().filter(|record| matches!(record, Record::Closing { .. })).count();
        ensure!(closings > 0, "the closing line is missing: the guest ended before its tests did");
        ensure!(closings == 1, "there are {closings} closing lines");
        let report = Self { records };
        let counts = (report.passed(), report.skipped().count(), report.failed());
        let Some(Record::Closing { passed, skipped, failed }) = report.records.last() else {
            anyhow::bail!("there is more behind the closing line");
        };
        ensure!(
            counts == (*passed, *skipped, *failed),
            "the closing line says {passed} passed, {skipped} skipped, {failed} failed; reported were {counts:?}"
        );
        ensure!(passed + failed > 0, "no test has run");
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

    /// Tests that did not run, or not whole, with the reason.
    fn skipped(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tests().filter_map(|test| match &test.outcome {
            TestOutcome::Skipped { reason } => Some((test.name.as_str(), reason.as_str())),
            TestOutcome::Passed { .. } | TestOutcome::Failed => None,
        })
    }

    /// What `lb-agent check` found.
    pub(super) fn probes(&self) -> &[Probe] {
        let probes = self
            .records
            .iter()
            .find_map(|record| if let Record::Check(probes) = record { Some(probes) } else { None });
        probes.map_or(&[], Vec::as_slice)
    }

    /// One line: how many tests passed, which did not run and why, how many failed.
    pub(super) fn closing_line(&self, release: &str) -> String {
        let skipped: Vec<String> = self.skipped().map(|(name, reason)| format!("{name}: {reason}")).collect();
        let named = if skipped.is_empty() { String::new() } else { format!(" ({})", skipped.join("; ")) };
        let (passed, failed) = (self.passed(), self.failed());
        format!("vm {release}: {passed} passed, {} skipped{named}, {failed} failed", skipped.len())
    }
}

fn parse(text: &str) -> anyhow::Result<Vec<Record>> {
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let lines = whole.lines().map(str::trim).filter(|line| !line.is_empty());
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
    fn the_closing_line_names_what_was_skipped() {
        let skipped = test("b", TestOutcome::Skipped { reason: "no SCTP".to_owned() });
        let report = Report::new(vec![passed("a"), skipped, closing(1, 1, 0)]).unwrap();
        assert_eq!(report.closing_line("6.1"), "vm 6.1: 1 passed, 1 skipped (b: no SCTP), 0 failed");
    }

    #[test]
    fn a_report_without_end_or_with_two_or_a_wrong_one_is_refused() {
        assert!(error(vec![passed("a")]).contains("closing line is missing"));
        assert!(error(vec![passed("a"), closing(1, 0, 0), closing(1, 0, 0)]).contains("2 closing lines"));
        assert!(error(vec![closing(1, 0, 0), passed("a")]).contains("behind"));
        assert!(error(vec![passed("a"), closing(2, 0, 0)]).contains("says 2 passed"));
        assert!(error(vec![closing(0, 0, 0)]).contains("no test has run"));
    }

    #[test]
    fn lines_come_through_a_serial_port() {
        let line = serde_json::to_string(&passed("a")).unwrap();
        let text = format!("{line}\r\n{line}\r\n{}", &line[..10]);
        assert_eq!(parse(&text).unwrap(), [passed("a"), passed("a")]);
        assert!(parse("noise\n").is_err());
    }
}
