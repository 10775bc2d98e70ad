//! `cargo xtask soak`: runs a churn test for a given time.

use std::path::Path;

use crate::agent::with_agent;
use crate::process;

/// The tests in the binary `netns`. If a name is wrong, libtest runs no test and passes.
const CHURN: &str = "soak::no_request_fails_and_nothing_leaks_under_churn";
const WITHOUT_AGENT: &str = "soak_without_agent::churn_and_floods_without_an_agent_break_no_connection";

/// Options of `soak`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long to run, in minutes
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    minutes: u64,
    /// Seed of the random changes: the same seed makes the same changes
    #[arg(long, default_value_t = 5)]
    seed: u64,
    /// Instead of changing Services, kill the agent under floods and churn, and leave it dead for this part of the time
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100), conflicts_with = "seed")]
    agent_dead: Option<u8>,
}

/// Runs the test with this agent.
pub(crate) fn run(args: &Args, agent: &Path) -> anyhow::Result<()> {
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
        if args.agent_dead.is_some() { WITHOUT_AGENT } else { CHURN },
    ]);
    with_agent(&mut command, agent)
        .env("LB_SOAK_SECONDS", (args.minutes * 60).to_string())
        .env("LB_SOAK_SEED", args.seed.to_string());
    if let Some(percent) = args.agent_dead {
        command.env("LB_SOAK_AGENT_DEAD", percent.to_string());
    }
    process::run(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_of_the_names_exist() {
        for test in [CHURN, WITHOUT_AGENT] {
            let (module, name) = test.split_once("::").unwrap_or_default();
            let path = ebpf_build::workspace_root().join(format!("tests/tests/netns/{module}.rs"));
            let text = std::fs::read_to_string(path).unwrap_or_default();
            assert!(text.contains(&format!("fn {name}(")), "{test}");
        }
    }
}
