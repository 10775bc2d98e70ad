//! `cargo xtask soak`: runs the churn test for a given time.

use crate::{agent::build_agent, process};

/// The churn test in the binary `netns`. If the name is wrong, libtest runs no test and passes.
const TEST: &str = "soak::churn_fails_no_request_and_leaks_nothing";

/// Options of `soak`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long to run, in minutes
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    minutes: u64,
    /// Seed of the random changes: the same seed makes the same changes
    #[arg(long, default_value_t = 5)]
    seed: u64,
}

/// Builds the agent and runs the test.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    process::run(build_agent())?;
    let mut command = process::cargo([
        "test",
        "--locked",
        "--package",
        "lb-tests",
        "--test",
        "netns",
        "--",
        "--test-threads=1",
        "--nocapture",
        "--exact",
        TEST,
    ]);
    command
        .env("LB_SOAK_SECONDS", (args.minutes * 60).to_string())
        .env("LB_SOAK_SEED", args.seed.to_string());
    process::run(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn churn_test_exists() {
        let path = ebpf_build::workspace_root().join("tests/tests/netns/soak.rs");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let name = TEST.trim_start_matches("soak::");
        assert!(text.contains(&format!("fn {name}(")), "{TEST}");
    }
}
