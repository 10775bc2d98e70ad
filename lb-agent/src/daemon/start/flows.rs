//! Starts the writer of Services, connection tracking, and the task that detects shortages.

use std::sync::Arc;

use lb_core::model::Policy;
use tokio::sync::mpsc;

use super::{channels::Channels, opened::Opened};
use crate::{
    daemon::{
        conntrack,
        ends::Ends,
        shortage_watch,
        tasks::Tasks,
        writer::{Listeners, Writer},
    },
    flow_log::FlowLog,
    kubernetes::Events,
    probe,
};

/// Spawns the writer, connection tracking, and the task that detects shortages. The writer gives the prober its
/// targets; `unhealthy` are the endpoints that an earlier agent has found unhealthy. `emitted` receives Events about
/// Services.
pub(super) fn spawn(
    opened: Opened,
    policy: Policy,
    channels: Channels,
    (targets, unhealthy): (mpsc::UnboundedSender<probe::Targets>, probe::Remembered),
    emitted: Events,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let Channels { events, environments, addresses, stale_udp, counters, flow_counts, .. } = channels;
    let listeners = Listeners {
        stale_udp: stale_udp.sender,
        checks: channels.checks.sender,
        targets,
        events: emitted,
        holders: channels.holders.sender,
        flow_log: opened.flow_log.as_ref().map(FlowLog::policies),
        synchronised: channels.synchronised.sender,
        routed: channels.routed.sender,
        complete: channels.complete.sender,
    };
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
    let udp = conntrack::Udp { sockets, stale_udp: stale_udp.receiver, served: writer.served() };
    let conntrack = conntrack::run(flows, (udp, ends), addresses.receiver, flow_counts.receiver, observers);
    tasks.spawn("conntrack", conntrack);
    tasks.spawn("writer", writer.run(events.receiver, counters.receiver, environments.receiver));
    Ok(())
}
