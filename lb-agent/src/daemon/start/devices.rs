//! Starts the tasks that watch the node's devices and addresses, and update the programs and the settings.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    thread,
    time::Duration,
};

use lb_core::model::SourceEvent;
use lb_datapath::{CatchDevice, DatapathError, Network, UnreachableRoutes};
use tokio::sync::watch;
use tracing::warn;

use super::{channels::Channels, opened::Opened};
use crate::{
    cli::DsrEncapsulation,
    config::{Config, Source},
    daemon::{
        devices::{Devices, Inside},
        ipsec::Ipsec,
        node::{Facts, Kernel, Node, NodeOptions, Sources},
        tasks::Tasks,
    },
};

/// Maximum number of attempts to attach the programs while there is a data plane with another map layout, and the pause
/// between two attempts. After the last attempt the agent goes on without the programs that it could not attach.
const ATTEMPTS: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// Brings the settings and the programs on devices up to date, completes the handover from an earlier agent, sends the
/// first facts about the node to the writer, and spawns the tasks that keep all of this up to date. Returns the
/// receiver of network changes.
pub(super) fn spawn(
    config: &Config,
    opened: &mut Opened,
    channels: &Channels,
    tasks: &mut Tasks,
) -> anyhow::Result<watch::Receiver<Network>> {
    let (node, facts, network) = attach(config, opened, channels, tasks)?;
    let zone = config.zone.as_deref().map(|zone| SourceEvent::Zone(Some(zone.into())));
    let events = &channels.events.sender;
    facts.events().into_iter().chain(zone).try_for_each(|event| events.try_send(event))?;
    tasks.spawn("node", node.run(facts, events.clone()));
    Ok(network)
}

/// Brings the settings and the programs on devices up to date, completes the handover from an earlier agent, and spawns
/// the task that keeps the programs attached. Returns the node task, its first facts, and the receiver of network
/// changes.
fn attach(
    config: &Config,
    opened: &mut Opened,
    channels: &Channels,
    tasks: &mut Tasks,
) -> anyhow::Result<(Node, Facts, watch::Receiver<Network>)> {
    let Opened { datapath, metrics, state, .. } = opened;
    let inside = Inside { detect: config.detect_local.clone(), map: datapath.internal_devices()? };
    let attachers = (datapath.attacher()?, datapath.xdp_attacher(), datapath.device_map()?);
    let patterns = config.devices.clone();
    let mut devices = Devices::new(attachers, patterns, inside, Arc::clone(state), Arc::clone(metrics))?;
    let kernel = Kernel {
        settings: datapath.settings()?,
        peers: datapath.peers()?,
        reservation: datapath.port_reservation(),
        unreachable: UnreachableRoutes::default(),
        ipsec: Ipsec::new(config.kernel.bpffs.clone(), datapath.conntrack())?,
        catch: CatchDevice::default(),
    };
    let network = devices.network();
    let sources = Sources {
        network: devices.network(),
        catch: devices.catch(),
        info: channels.node_info.receiver.clone(),
        service_cidrs: channels.service_cidrs.receiver.clone(),
        peers: channels.peers.receiver.clone(),
        synchronised: channels.synchronised.receiver.clone(),
        routed: channels.routed.receiver.clone(),
    };
    let addresses = (channels.listen.sender.clone(), channels.addresses.sender.clone());
    let mut node = Node::new(node_options(config), sources, kernel, addresses, Arc::clone(state));
    let facts = node.update()?;
    let attempts = if datapath.replaces_another()? { ATTEMPTS } else { 1 };
    if !sync_repeatedly(attempts, || devices.sync())? {
        warn!(
            "some devices have no programs of this agent (see the warnings above); packets through these devices reach \
             no Service until the agent can attach its programs"
        );
    }
    datapath.finish_handover()?;
    tasks.spawn("devices", devices.run());
    Ok((node, facts, network))
}

/// Calls `sync` until it has attached all programs at tc, at most `attempts` times. Returns whether all these programs
/// are attached. Soon after the last call, the agent removes the programs of an earlier agent with another map layout:
/// a device that refused the new programs for a moment (for example while it was being renamed) would then have no
/// program until the devices task tries again.
///
/// # Errors
/// `sync` returns an error; this function then makes no further attempt.
fn sync_repeatedly(
    attempts: u32,
    mut sync: impl FnMut() -> Result<bool, DatapathError>,
) -> Result<bool, DatapathError> {
    for _ in 1..attempts {
        if sync()? {
            return Ok(true);
        }
        thread::sleep(PAUSE);
    }
    sync()
}

/// The parts of the configuration that the node task uses.
fn node_options(config: &Config) -> NodeOptions {
    NodeOptions {
        name: config.node_name.as_str().into(),
        node_ip: config.node_ip(),
        nodeport_addresses: config.nodeport_addresses.clone(),
        detect: config.detect_local.clone(),
        service_ranges: config.service_ranges.clone(),
        drops_unknown_vips: config.drops_unknown_vips,
        ports: config.masquerade_ports.clone(),
        peers: config.dsr_peers.clone(),
        denied_sources: config.denied_sources.clone(),
        north_south: config.north_south,
        gue: config.dsr_encapsulation == DsrEncapsulation::Gue,
        has_api_server: matches!(config.source, Source::ApiServer(_)),
    }
}

/// The nodes that may send tunnelled packets, in addition to `--dsr-peers`: the members that announce addresses.
/// Empty if the programs do not decapsulate; `None` if the API server will name the nodes.
pub(super) fn known_peers(config: &Config) -> Option<BTreeSet<IpAddr>> {
    match &config.source {
        _ if !config.decapsulates() => Some(BTreeSet::new()),
        Source::Manifests(_) => Some(config.announce.members.values().map(SocketAddr::ip).collect()),
        Source::ApiServer(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_fail_for_a_moment_are_attached_before_the_start_goes_on() {
        for (attached_at, expected) in [(1, (true, 1)), (3, (true, 3)), (99, (false, ATTEMPTS))] {
            let mut attempts = 0;
            let attached = sync_repeatedly(ATTEMPTS, || {
                attempts += 1;
                Ok(attempts >= attached_at)
            });
            assert_eq!((attached.unwrap(), attempts), expected);
        }
    }
}
