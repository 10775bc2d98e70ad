//! Starts the writer of Services, and the tasks that look after flows.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use lb_core::{
    model::{Policy, SourceEvent},
    stale_udp::StaleFrontends,
};
use tokio::sync::{mpsc, watch};

use super::{
    channels::{Latest, Unbounded},
    opened::Opened,
};
use crate::{
    announce::HolderMap,
    daemon::{
        conntrack,
        ends::Ends,
        environment,
        shortage_watch::{self, FlowCounts},
        tasks::Tasks,
        writer::{Listeners, Writer},
    },
    flow_log::FlowLog,
    health::Checks,
    kubernetes::Events,
    probe,
};

/// The channels from, to and between these tasks.
pub(super) struct FlowChannels {
    pub(super) events: mpsc::Receiver<SourceEvent>,
    pub(super) environments: mpsc::Receiver<environment::Request>,
    pub(super) own: watch::Receiver<Vec<IpAddr>>,
    pub(super) stale_udp: Unbounded<StaleFrontends>,
    pub(super) counters: Latest<BTreeSet<u32>>,
    pub(super) flow_counts: Latest<FlowCounts>,
    pub(super) checks: watch::Sender<Checks>,
    pub(super) targets: mpsc::UnboundedSender<probe::Targets>,
    pub(super) holders: watch::Sender<HolderMap>,
    pub(super) synchronised: watch::Sender<bool>,
    pub(super) complete: watch::Sender<bool>,
    /// Kubernetes Events, to the task that writes them.
    pub(super) emitted: Events,
}

/// Spawns the writer, connection tracking, and the task that finds full maps. `unhealthy` are the endpoints that an
/// earlier agent has found unhealthy.
pub(super) fn spawn(
    opened: Opened,
    policy: Policy,
    unhealthy: probe::Remembered,
    channels: FlowChannels,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let FlowChannels { events, environments, own, stale_udp, counters, flow_counts, .. } = channels;
    let (state, metrics) = opened.observers();
    let Opened { datapath, contents, traffic, flow_log, .. } = opened;
    let (flows, sockets) = (datapath.conntrack(), datapath.node_sockets()?);
    let (stats, affinity) = (datapath.stats()?, datapath.affinity()?);
    let counted = flows.active_flows_slots()?;

    let policies = flow_log.as_ref().map(FlowLog::policies);
    let observers = (Arc::clone(&state), Arc::clone(&metrics));
    tasks.spawn(
        "shortages",
        shortage_watch::run(stats, affinity, observers.0, observers.1, flow_counts.sender),
    );

    let observers = conntrack::Observers {
        metrics: Arc::clone(&metrics),
        state: Arc::clone(&state),
        counters: counters.sender,
        traffic,
        flow_log,
    };
    let listeners = Listeners {
        stale_udp: stale_udp.sender,
        checks: channels.checks,
        targets: channels.targets,
        events: channels.emitted,
        holders: channels.holders,
        flow_log: policies,
        synchronised: channels.synchronised,
        complete: channels.complete,
    };
    let mut writer = Writer::new(datapath, contents, policy, state, metrics, listeners);
    writer.adopt_counters(counted);
    writer.adopt_unhealthy(unhealthy);
    let udp = conntrack::Udp { sockets, stale_udp: stale_udp.receiver, served: writer.served() };
    let ends = Ends::new(writer.connection_rules());
    let conntrack = conntrack::run(flows, (udp, ends), own, flow_counts.receiver, observers);
    tasks.spawn("conntrack", conntrack);
    tasks.spawn("writer", writer.run(events, counters.receiver, environments));
    Ok(())
}
