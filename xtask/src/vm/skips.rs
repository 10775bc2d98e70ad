//! The reasons of skips, which tests write to a file: see `lb_tests::skip`.

use std::fs::{File, OpenOptions};
use std::io::Read as _;

use anyhow::Context as _;

use super::report::TestOutcome;

/// The file. Each line has the name of a test, a tab, and a reason.
pub(super) const SKIPS: &str = "/tmp/skips";

/// The file, and the lines read from it for tests that have no outcome yet. (When the guest reads the lines of a test
/// that has ended, the next test may have written some already.)
pub(super) struct Skips {
    file: File,
    lines: Lines,
}

impl Skips {
    pub(super) fn open() -> anyhow::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).read(true).open(SKIPS);
        let file = file.with_context(|| format!("cannot open {SKIPS}"))?;
        Ok(Self { file, lines: Lines::default() })
    }

    /// The outcome of a test that libtest reports as passed. The file tells whether the test skipped some of its parts,
    /// or was skipped as a whole.
    pub(super) fn outcome_of(&mut self, test: &str) -> anyhow::Result<TestOutcome> {
        let mut text = String::new();
        self.file.read_to_string(&mut text).with_context(|| format!("cannot read {SKIPS}"))?;
        self.lines.add(&text);
        Ok(self.lines.outcome_of(test))
    }
}

/// Names of tests that were skipped, as a whole or in part, each with a reason.
#[derive(Default)]
struct Lines(Vec<(String, String)>);

impl Lines {
    fn add(&mut self, text: &str) {
        let lines = text.lines().filter_map(|line| line.split_once('\t'));
        self.0.extend(lines.map(|(test, reason)| (test.to_owned(), reason.to_owned())));
    }

    /// Returns the outcome of this test, which has passed or was skipped, and removes its lines.
    fn outcome_of(&mut self, test: &str) -> TestOutcome {
        let mut without: Vec<String> =
            self.0.extract_if(.., |(name, _)| name == test).map(|(_, reason)| reason).collect();
        without.sort_unstable();
        without.dedup();
        // `lb_tests::skip` marks a test that is skipped as a whole.
        match without.iter().find_map(|reason| reason.strip_prefix("WHOLE ")) {
            Some(reason) => TestOutcome::Skipped { reason: reason.to_owned() },
            None => TestOutcome::Passed { without },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skip_of_the_next_test_is_not_that_of_the_last_one() {
        let mut lines = Lines::default();
        lines.add("a\tno IPv6\na\tno IPv6\nb\tWHOLE no SCTP\n");
        assert_eq!(lines.outcome_of("a"), TestOutcome::Passed { without: vec!["no IPv6".to_owned()] });
        assert_eq!(lines.outcome_of("b"), TestOutcome::Skipped { reason: "no SCTP".to_owned() });
        assert_eq!(lines.outcome_of("c"), TestOutcome::Passed { without: vec![] });
        assert!(lines.0.is_empty());
    }
}
