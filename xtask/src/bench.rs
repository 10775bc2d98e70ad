//! `cargo xtask bench`.

/// Arguments of the benchmarks.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the benchmarks.
pub(crate) fn run(_args: Args) -> anyhow::Result<()> {
    anyhow::bail!("there are no benchmarks yet")
}
