//! Starts the agent: opens the data plane, connects the tasks by channels, spawns them.
//!
//! ```text
//! opened       the data plane, and what many tasks share
//! channels     the channels between the tasks
//! devices      the node: devices and their programs, addresses, settings
//! servers      /healthz, /metrics, sockets of commands, pages
//! announcers   load balancer addresses, at layer 2 and by BGP
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

use lb_datapath::BpfLogger;
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{mpsc, watch},
};

use self::{channels::Channels, opened::Opened};
use super::{Pages, addresses, dns, socket, tasks::Tasks};
use crate::{
    config::Config,
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
    let network = devices::spawn(config, &mut opened, &channels, tasks)?;
    let emitted = source::spawn_events(config, tasks);
    servers::spawn(config, &opened, &channels, emitted.clone(), tasks)?;
    let ranges = channels.service_cidrs.receiver.clone();
    addresses::spawn(config, ranges, emitted.clone(), opened.observers(), stop, tasks);
    announcers::spawn(config, &opened, &channels, network, stop, tasks)?;
    spawn_dns(config, &opened, &channels, stop, tasks)?;
    let prober = spawn_prober(config, &opened, &channels, emitted.clone(), tasks)?;
    source::spawn(config, &opened, &channels, emitted.clone(), tasks);
    flows::spawn(opened, config.policy(), channels, prober, emitted, tasks)
}

/// Spawns the tasks of the DNS server, if the agent has one.
fn spawn_dns(
    config: &Config,
    opened: &Opened,
    channels: &Channels,
    stop: &watch::Sender<bool>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let Opened { datapath, metrics, state, .. } = opened;
    let kernel = dns::Kernel { intercepts: datapath.dns_intercepts()?, packets: datapath.stats()? };
    if config.dns.intercept.is_none() {
        // Removes the entries of an earlier agent that had node-local DNS.
        kernel.intercepts.set(&BTreeMap::new())?;
    }
    if let Some(names) = &opened.names {
        let sources = dns::Sources {
            ranges: channels.service_cidrs.receiver.clone(),
            addresses: channels.addresses.receiver.clone(),
            stop: stop.subscribe(),
        };
        dns::spawn(&config.dns, names, sources, kernel, metrics.dns(), state, tasks);
    }
    Ok(())
}

/// Spawns the task that probes endpoints. Returns the channel to this task for the endpoints to probe, and the
/// endpoints that an earlier agent has found unhealthy.
fn spawn_prober(
    config: &Config,
    opened: &Opened,
    channels: &Channels,
    emitted: Events,
    tasks: &mut Tasks,
) -> anyhow::Result<(mpsc::UnboundedSender<probe::Targets>, probe::Remembered)> {
    let (sender, targets) = mpsc::unbounded_channel();
    let (state, metrics) = opened.observers();
    let observers = probe::Observers { board: state.board(), metrics, events: emitted };
    let file = socket::record(&config.kernel.bpffs, "unhealthy")?;
    let unanswered = (config.syn_retries > 0).then(|| opened.datapath.unanswered()).transpose()?;
    let channels = (targets, channels.events.sender.clone());
    let (prober, unhealthy) = Prober::new(&config.node_name, file, channels, unanswered, observers);
    tasks.spawn("health checks of endpoints", prober.run());
    Ok((sender, unhealthy))
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
