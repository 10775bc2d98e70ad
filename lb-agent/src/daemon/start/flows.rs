//! Starts the writer of Services, connection tracking, and the task that detects shortages.

use std::{collections::BTreeSet, sync::Arc};

use lb_core::{
    model::{NodeAddresses, Policy, SourceEvent},
    stale_udp::StaleFrontends,
};
use tokio::sync::{mpsc, watch};

use super::{channels::Latest, opened::Opened};
use crate::{
    daemon::{
        conntrack,
        ends::Ends,
        environment,
        shortage_watch::{self, FlowCounts},
        tasks::Tasks,
        writer::{Listeners, Writer},
    },
    probe,
};

/// The channels to the tasks of this module and between them. ([`Listeners`] has the channels from the writer.)
pub(super) struct FlowChannels {
    pub(super) events: mpsc::Receiver<SourceEvent>,
    pub(super) environments: mpsc::Receiver<environment::VariablesRequest>,
    pub(super) addresses: watch::Receiver<NodeAddresses>,
    pub(super) stale_udp: mpsc::UnboundedReceiver<StaleFrontends>,
    pub(super) counters: Latest<BTreeSet<u32>>,
    pub(super) flow_counts: Latest<FlowCounts>,
}

/// Spawns the writer, connection tracking, and the task that detects shortages. `unhealthy` are the endpoints that an
/// earlier agent has found unhealthy.
pub(super) fn spawn(
    opened: Opened,
    policy: Policy,
    unhealthy: probe::Remembered,
    (channels, listeners): (FlowChannels, Listeners),
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let FlowChannels { events, environments, addresses, stale_udp, counters, flow_counts } = channels;
    let (state, metrics) = opened.observers();
    let Opened { datapath, contents, traffic, flow_log, .. } = opened;
    let (flows, sockets) = (datapath.conntrack(), datapath.node_sockets()?);
    let (stats, affinity) = (datapath.stats()?, datapath.affinity()?);
    let earlier = flows.earlier_flows()?;

    let shortages =
        shortage_watch::run(stats, affinity, Arc::clone(&state), Arc::clone(&metrics), flow_counts.sender);
    tasks.spawn("shortages", shortages);
    let observers = conntrack::Observers {
        metrics: Arc::clone(&metrics),
        state: Arc::clone(&state),
        counters: counters.sender,
        traffic,
        flow_log,
    };
    let mut writer = Writer::new(datapath, contents, policy, state, metrics, listeners);
    writer.adopt_flows(earlier);
    writer.adopt_unhealthy(unhealthy);
    let ends = Ends::new(writer.connection_rules(), sockets.clone());
    let udp = conntrack::Udp { sockets, stale_udp, served: writer.served() };
    let conntrack = conntrack::run(flows, (udp, ends), addresses, flow_counts.receiver, observers);
    tasks.spawn("conntrack", conntrack);
    tasks.spawn("writer", writer.run(events, counters.receiver, environments));
    Ok(())
}
