//! The stages of a long task: progress, durations, and a table at the end.

use std::time::{Duration, Instant};

use anyhow::bail;

/// Runs stages one after the other and records the result of each.
#[derive(Default)]
pub(crate) struct Stages {
    done: Vec<Stage>,
}

struct Stage {
    name: &'static str,
    took: Duration,
    passed: bool,
}

impl Stages {
    /// Runs a stage. If it fails, prints its error, and [`Self::finish`] fails later. Returns whether the stage passed.
    pub(crate) fn run(&mut self, name: &'static str, stage: impl FnOnce() -> anyhow::Result<()>) -> bool {
        eprintln!("\n== {name}");
        let start = Instant::now();
        let result = stage();
        let took = start.elapsed();
        if let Err(error) = &result {
            eprintln!("error: {error:#}");
        }
        let passed = result.is_ok();
        eprintln!("== {name}: {} in {}", outcome(passed), seconds(took));
        self.done.push(Stage { name, took, passed });
        passed
    }

    /// Prints the table. Fails with the names of failed stages.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        eprintln!("\n{}", self.table());
        let failed: Vec<&str> =
            self.done.iter().filter(|stage| !stage.passed).map(|stage| stage.name).collect();
        if !failed.is_empty() {
            bail!("failed: {}", failed.join(", "));
        }
        Ok(())
    }

    fn table(&self) -> String {
        let width = self.done.iter().map(|stage| stage.name.len()).max().unwrap_or_default();
        let line = |stage: &Stage| {
            format!("{:<width$}  {:<6}  {:>9}", stage.name, outcome(stage.passed), seconds(stage.took))
        };
        self.done.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

fn outcome(passed: bool) -> &'static str {
    if passed { "ok" } else { "FAILED" }
}

fn seconds(took: Duration) -> String {
    format!("{:.1} s", took.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn failed_stage_fails_the_task_and_is_named() {
        let mut stages = Stages::default();
        assert!(stages.run("good", || Ok(())));
        assert!(!stages.run("bad", || bail!("broken")));
        let table = stages.table();
        assert!(table.contains("good  ok") && table.contains("bad   FAILED"), "{table}");
        assert_eq!(stages.finish().map_err(|error| error.to_string()), Err("failed: bad".to_owned()));
    }

    #[test]
    fn task_passes_if_all_stages_pass() {
        let mut stages = Stages::default();
        stages.run("good", || Ok(()));
        assert!(stages.finish().is_ok());
    }
}
