//! Keeps the pins: detects that the BPF file system was unmounted or covered, or that pins were removed, see
//! [`Anchor`].

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::bail;
use tokio::{sync::watch, task, time};

use super::state::State;
use crate::metrics::Metrics;
use lb_datapath::{Anchor, DatapathError, SocketAttacher};

/// Interval between two checks that the pins still exist.
const LOOK: Duration = Duration::from_secs(1);

/// The pins that this task restores. The task in `devices` restores the links of programs on devices.
#[derive(Debug)]
pub(super) struct Pins {
    pub(super) anchor: Anchor,
    pub(super) sockets: SocketAttacher,
    /// Whether the first synchronisation is complete, after which the programs on sockets are attached.
    pub(super) synchronised: watch::Receiver<bool>,
}

/// Restores removed pins while the BPF file system is in place. When that file system is gone, the task copies all pins
/// to the BPF file system that is at the path now. (If there is none, the task first mounts one.) Then the task ends
/// with an error, so that the supervisor restarts the agent. If copying fails, the task retries: without pins the data
/// plane ends with the agent.
pub(super) async fn run(pins: Pins, state: Arc<State>, metrics: Arc<Metrics>) -> anyhow::Result<Infallible> {
    let bpffs = pins.anchor.bpffs().display();
    loop {
        time::sleep(LOOK).await;
        let (mut unmounted, mut refused) = (None, None);
        if pins.anchor.holds() {
            match task::block_in_place(|| pins.restore()) {
                Ok(restored) => note(&restored, &state, &metrics),
                Err(error) => {
                    refused = Some(format!(
                        "pins were removed from {bpffs}, so that commands and the next agent do not find the data plane, and cannot \
                         be created again: {error}"
                    ));
                }
            }
        } else {
            match task::block_in_place(|| pins.anchor.rescue()) {
                Ok(rescued) => bail!(
                    "the BPF file system at {bpffs} was unmounted or covered; all {} pins were copied to the one that is there \
                     now: restart the agent; the data plane stays in place",
                    rescued.pins
                ),
                Err(error) => {
                    unmounted = Some(format!(
                        "the BPF file system at {bpffs} was unmounted or covered, and the data plane ends when this agent does: mount a \
                         BPF file system there (mount -t bpf bpf {bpffs}); {error}"
                    ));
                }
            }
        }
        state.with_shortages(|shortages| {
            shortages.lasts("bpffs", unmounted.as_deref(), Instant::now());
            shortages.lasts("pins", refused.as_deref(), Instant::now());
        });
    }
}

impl Pins {
    /// Restores the pins that are gone. Returns the names of the objects whose pins were restored.
    fn restore(&self) -> Result<Vec<&'static str>, DatapathError> {
        let mut restored = self.anchor.restore()?;
        if *self.synchronised.borrow() {
            restored.extend(self.sockets.restore()?);
        }
        Ok(restored)
    }
}

/// Reports restored pins: for a minute in `status`, in the log, and as a metric.
fn note(restored: &[&str], state: &State, metrics: &Metrics) {
    if restored.is_empty() {
        return;
    }
    metrics.count_restored_pins(restored.len());
    let text = format!(
        "pins were removed, and the agent has restored them: {}. Only `lb-agent cleanup` should remove pins",
        restored.join(", ")
    );
    let count = restored.len() as u64;
    state.with_shortages(|shortages| shortages.refused("pins", count, &text, Instant::now()));
}
