//! Starts the agent: opens the data plane, connects the tasks by channels, spawns them.
//!
//! ```text
//! opened       the data plane, and what many tasks share
//! channels     the channels between the tasks
//! devices      the node: devices and their programs, addresses, settings
//! servers      /healthz, /metrics, sockets of commands, pages
//! announcers   load balancers' addresses, at layer 2 and by BGP
//! source       Services: from the folder of manifests or the API server
//! flows        the writer of Services, connection tracking
//! ```

mod announcers;
mod channels;
mod devices;
mod flows;
mod opened;
mod servers;
mod source;

use std::{collections::BTreeMap, convert::Infallible};

use lb_core::model::SourceEvent;
use lb_datapath::BpfLogger;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{mpsc, watch},
};

use self::{channels::Channels, opened::Opened};
use super::{Pages, addresses, dns, environment, node::Sources, socket, tasks::Tasks, writer::Listeners};
use crate::{
    announce,
    config::Config,
    flow_log::FlowLog,
    health::Servers,
    kubernetes::Events,
    probe::{self, Prober},
};

/// Opens the data plane and spawns the tasks. The servers, except that of the web pages, start after the first
/// attachment of programs to devices: `/healthz` does not answer before.
pub(super) fn start(
    config: Config,
    pages: Pages,
    stop: &watch::Sender<bool>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let mut opened = Opened::new(&config, tasks)?;
    servers::spawn_pages(&config, pages, &opened.state, tasks)?;
    if let Some(logger) = opened.datapath.take_logger() {
        tasks.spawn("log of the BPF programs", forward_log(logger));
    }
    let channels = Channels::new(devices::known_peers(&config));
    spawn(&config, opened, channels, stop, tasks)
}

/// Spawns the tasks, each with its ends of the channels.
fn spawn(
    config: &Config,
    mut opened: Opened,
    channels: Channels,
    stop: &watch::Sender<bool>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let Channels { node_info, service_cidrs, peers, synchronised, complete, routed, .. } = channels;
    let Channels { listen, addresses, holders, advertised, cluster, ballots, .. } = channels;
    let Channels { checks, stale_udp, counters, flow_counts, targets, events, environments, .. } = channels;

    let sources = |network, catch| Sources {
        network,
        catch,
        info: node_info.receiver.clone(),
        service_cidrs: service_cidrs.receiver.clone(),
        peers: peers.receiver,
        synchronised: synchronised.receiver.clone(),
        routed: routed.receiver,
    };
    let (node, facts, network) =
        devices::spawn(config, &mut opened, sources, (listen.sender, addresses.sender), tasks)?;
    servers::spawn(config, &opened, node_info.receiver, synchronised.receiver.clone(), tasks)?;
    tasks.spawn("environment socket", environment::serve(config.kernel.bpffs.clone(), environments.sender));
    let emitted = source::spawn_events(config, tasks);
    let ranges = service_cidrs.receiver;
    addresses::spawn(config, ranges.clone(), emitted.clone(), opened.observers(), stop, tasks);
    let report = servers::health_report(emitted.clone(), config, &opened);
    tasks.spawn("health checks of Services", Servers::new(checks.receiver, listen.receiver, report).run());
    let zone = config.zone.as_deref().map(|zone| SourceEvent::Zone(Some(zone.into())));
    for event in facts.events().into_iter().chain(zone) {
        events.sender.try_send(event)?;
    }
    tasks.spawn("node", node.run(facts, events.sender.clone()));

    let sources = announce::Sources {
        advertised: advertised.receiver,
        cluster: cluster.receiver,
        holders: holders.receiver,
        network,
        synchronised: synchronised.receiver,
        stop: stop.subscribe(),
    };
    announcers::spawn(config, &opened, sources, complete.receiver, ballots.sender, tasks)?;
    let sources = dns::Sources { ranges, addresses: addresses.receiver.clone(), stop: stop.subscribe() };
    spawn_dns(config, &opened, sources, tasks)?;
    let probed = (targets.receiver, events.sender.clone());
    let unhealthy = spawn_prober(config, &opened, probed, emitted.clone(), tasks)?;

    let of_source = source::SourceChannels {
        node_info: node_info.sender,
        service_cidrs: service_cidrs.sender,
        peers: peers.sender,
        advertised: advertised.sender,
        cluster: cluster.sender,
        ballots: ballots.receiver,
        events: events.sender,
        emitted: emitted.clone(),
    };
    source::spawn(config, &opened, of_source, tasks);

    let listeners = Listeners {
        stale_udp: stale_udp.sender,
        checks: checks.sender,
        targets: targets.sender,
        events: emitted,
        holders: holders.sender,
        flow_log: opened.flow_log.as_ref().map(FlowLog::policies),
        synchronised: synchronised.sender,
        routed: routed.sender,
        complete: complete.sender,
    };
    let channels = flows::FlowChannels {
        events: events.receiver,
        environments: environments.receiver,
        addresses: addresses.receiver,
        stale_udp: stale_udp.receiver,
        counters,
        flow_counts,
    };
    flows::spawn(opened, config.policy(), unhealthy, (channels, listeners), tasks)
}

/// Spawns the tasks of the DNS server, if the agent has one.
fn spawn_dns(
    config: &Config,
    opened: &Opened,
    sources: dns::Sources,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let Opened { datapath, metrics, state, .. } = opened;
    let kernel = dns::Kernel { intercepts: datapath.dns_intercepts()?, packets: datapath.stats()? };
    if config.dns.intercept.is_none() {
        // Removes the entries of an earlier agent that had node-local DNS.
        kernel.intercepts.set(&BTreeMap::new())?;
    }
    if let Some(names) = &opened.names {
        dns::spawn(&config.dns, names, sources, kernel, metrics.dns(), state, tasks);
    }
    Ok(())
}

/// Spawns the task that probes endpoints. Returns those that an earlier agent has found unhealthy.
fn spawn_prober(
    config: &Config,
    opened: &Opened,
    channels: (mpsc::UnboundedReceiver<probe::Targets>, mpsc::Sender<SourceEvent>),
    events: Events,
    tasks: &mut Tasks,
) -> anyhow::Result<probe::Remembered> {
    let (state, metrics) = opened.observers();
    let observers = probe::Observers { board: state.board(), metrics, events };
    let file = socket::record(&config.kernel.bpffs, "unhealthy")?;
    let unanswered = (config.syn_retries > 0).then(|| opened.datapath.unanswered()).transpose()?;
    let (prober, unhealthy) = Prober::new(&config.node_name, file, channels, unanswered, observers);
    tasks.spawn("health checks of endpoints", prober.run());
    Ok(unhealthy)
}

async fn forward_log(logger: BpfLogger) -> anyhow::Result<Infallible> {
    // SAFETY: the logger owns the descriptor of its ring buffer and keeps it open as long as it exists.
    let mut logger = unsafe { AsyncFd::register_with_interest(logger, Interest::READABLE) }
        .map_err(|refused| refused.into_parts().1)?;
    loop {
        let mut ready = logger.readable_mut().await?;
        ready.get_inner_mut().flush();
        ready.clear_ready();
    }
}
