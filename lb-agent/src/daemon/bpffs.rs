//! Noticing that the BPF file system is not where it was, see [`Anchor`].

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::bail;
use tokio::{task, time};

use super::state::State;
use lb_datapath::Anchor;

/// How often that is looked at: two system calls.
const LOOK: Duration = Duration::from_secs(1);

/// Runs as long as it is there. Where it is not, the agent pins everything anew and ends, to be started again as after a crash. As
/// long as it cannot do that it must not end: the data plane would end with it.
pub(super) async fn run(anchor: Anchor, state: Arc<State>) -> anyhow::Result<Infallible> {
    let bpffs = anchor.bpffs().display();
    loop {
        time::sleep(LOOK).await;
        let text = if anchor.holds() {
            None
        } else {
            match task::block_in_place(|| anchor.rescue()) {
                Ok(rescued) => bail!(
                    "the BPF file system at {bpffs} was unmounted or covered; all {} pins are on the one that is there now: start the agent \
                     again; the data plane stays in place",
                    rescued.pins
                ),
                Err(error) => Some(format!(
                    "the BPF file system at {bpffs} was unmounted or covered, and the data plane ends when this agent does: have a BPF file \
                     system there that it can pin everything on; {error}"
                )),
            }
        };
        state.with_shortages(|shortages| shortages.lasts("bpffs", text.as_deref(), Instant::now()));
    }
}
