//! Detects that the BPF file system was unmounted or covered, see [`Anchor`].

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::bail;
use tokio::{task, time};

use super::state::State;
use lb_datapath::Anchor;

/// Interval between two checks, of two system calls each.
const LOOK: Duration = Duration::from_secs(1);

/// Runs while the BPF file system is in place. When it is gone, the task pins everything on the file system that is at
/// the path then, and ends, so that the agent is restarted. If that fails, the task keeps trying: without pins the data
/// plane ends with the agent.
pub(super) async fn run(anchor: Anchor, state: Arc<State>) -> anyhow::Result<Infallible> {
    let bpffs = anchor.bpffs().display();
    loop {
        time::sleep(LOOK).await;
        let text = if anchor.holds() {
            None
        } else {
            match task::block_in_place(|| anchor.rescue()) {
                Ok(rescued) => bail!(
                    "the BPF file system at {bpffs} was unmounted or covered; all {} pins were copied to the one that is there \
                     now: restart the agent; the data plane stays in place",
                    rescued.pins
                ),
                Err(error) => Some(format!(
                    "the BPF file system at {bpffs} was unmounted or covered, and the data plane ends when this agent does: mount a \
                     BPF file system there (mount -t bpf bpf {bpffs}); {error}"
                )),
            }
        };
        state.with_shortages(|shortages| shortages.lasts("bpffs", text.as_deref(), Instant::now()));
    }
}
