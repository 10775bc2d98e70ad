//! The task that reads the packet counters and runs the garbage collection of `AFFINITY`, to detect shortages of flows,
//! source ports and affinity entries. It also logs the shortages that other tasks detect.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use lb_common::Outcome;
use tokio::{sync::watch, task, time};
use tracing::{debug, warn};

use super::state::State;
use crate::metrics::Metrics;
use lb_datapath::{AffinityReport, AffinityTable, Stats};

/// Interval between two reads of the packet counters.
const LOOK: Duration = Duration::from_secs(1);
/// Interval between two garbage collections of the map `AFFINITY`.
const AFFINITY: Duration = Duration::from_secs(5);

/// Counters of new and refused flows. If they show that the flow table may be nearly full, its garbage collection runs
/// early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct FlowCounts {
    /// Number of new flows since the map `STATS` was created, including connections of the node's sockets. Hairpin and
    /// caught flows are missing, because their first packets have no outcome of their own.
    pub(super) begun: u64,
    /// Number of packets with the outcome [`Outcome::ConntrackFull`] or [`Outcome::Stateless`] since the map `STATS`
    /// was created: usually, their new flow did not fit into the flow table.
    pub(super) refused: u64,
}

impl FlowCounts {
    fn of(packets: &[u64; Outcome::COUNT]) -> Self {
        let beginnings = Outcome::ALL.into_iter().filter(|outcome| outcome.begins_flow());
        let refused = [Outcome::ConntrackFull, Outcome::Stateless];
        Self {
            begun: beginnings.map(|outcome| packets[outcome as usize]).sum(),
            refused: refused.map(|outcome| packets[outcome as usize]).iter().sum(),
        }
    }
}

/// Outcomes of packets that show a shortage: the outcome, the shortage's name, and its text.
const DROPS: [(Outcome, &str, &str); 2] = [
    (
        Outcome::ConntrackFull,
        "CONNTRACK",
        "the flow table is full: new connections are dropped, established ones stay. Find the clients that \
         open so many (`lb-agent conntrack list`), or run `lb-agent cleanup`, which cuts all connections, and restart with a larger \
         --max-connections",
    ),
    (
        Outcome::NoSourcePort,
        "ports",
        "no source port is free for masqueraded connections to some backend: new ones are dropped. Configure more ports \
         (--masquerade-ports), or add endpoints to the Service",
    ),
];

const EVICTED: &str = "AFFINITY is full: clients of Services with session affinity are evicted before their timeout and rebalanced. \
                       Run `lb-agent cleanup`, which cuts all connections, and restart with a larger --max-affinity-clients";

/// Runs the task. Sends the counts of flows to `flow_counts` after each read of the packet counters.
pub(super) async fn run(
    stats: Stats,
    mut affinity: AffinityTable,
    state: Arc<State>,
    metrics: Arc<Metrics>,
    flow_counts: watch::Sender<FlowCounts>,
) -> anyhow::Result<Infallible> {
    let mut before = None;
    let mut look = time::interval(LOOK);
    look.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
    let mut next_sweep = Instant::now();
    loop {
        look.tick().await;
        match stats.read() {
            Ok(packets) => {
                flow_counts.send_replace(FlowCounts::of(&packets));
                note_drops(&state, &packets, before.as_ref());
                before = Some(packets);
            }
            Err(error) => debug!("{error}"),
        }
        if next_sweep <= Instant::now() {
            affinity = sweep_affinity(affinity, &state, &metrics).await?;
            next_sweep = Instant::now() + AFFINITY;
        }
        for line in state.with_shortages(|shortages| shortages.lines(Instant::now())) {
            warn!("{line}");
        }
    }
}

/// Records the drops since the last read of the counters as shortages. The first read records nothing.
fn note_drops(state: &State, packets: &[u64; Outcome::COUNT], before: Option<&[u64; Outcome::COUNT]>) {
    for (outcome, of, text) in DROPS {
        let dropped = packets[outcome as usize];
        let new = dropped.saturating_sub(before.map_or(dropped, |before| before[outcome as usize]));
        if new > 0 {
            state.with_shortages(|shortages| shortages.refused(of, new, text, Instant::now()));
        }
    }
}

async fn sweep_affinity(
    mut affinity: AffinityTable,
    state: &State,
    metrics: &Metrics,
) -> anyhow::Result<AffinityTable> {
    let (affinity, swept) = task::spawn_blocking(move || {
        let swept = affinity.collect_garbage();
        (affinity, swept)
    })
    .await?;
    match swept {
        Ok(AffinityReport { clients, removed, evicted }) => {
            metrics.set_map("AFFINITY", clients, affinity.capacity());
            metrics.count_evicted_clients(evicted);
            if evicted > 0 {
                let count = evicted as u64;
                state.with_shortages(|shortages| {
                    shortages.refused("AFFINITY", count, EVICTED, Instant::now());
                });
            }
            debug!(clients, removed, evicted, "deleted expired clients from AFFINITY");
        }
        Err(error) => debug!("cannot delete expired clients from AFFINITY: {error}"),
    }
    Ok(affinity)
}
