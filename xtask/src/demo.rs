//! `cargo xtask demo`.

/// Arguments of the demo.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs the demo.
pub(crate) fn run(_args: Args) -> anyhow::Result<()> {
    anyhow::bail!("there is no demo yet")
}
