//! `cargo xtask soak`: the test of churn, for as long as is asked for.

use crate::{process, test::build_agent};

/// Options of `soak`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    minutes: u64,
    /// Where chance begins: the same number makes the same changes
    #[arg(long, default_value_t = 5)]
    seed: u64,
}

/// Builds the agent and runs the test.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    process::run(build_agent())?;
    let test = "soak::churn_fails_no_request_and_leaks_nothing";
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
        test,
    ]);
    command
        .env("LB_SOAK_SECONDS", (args.minutes * 60).to_string())
        .env("LB_SOAK_SEED", args.seed.to_string());
    process::run(command)
}
