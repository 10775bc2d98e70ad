//! Starts the tasks that announce load balancer addresses.

use lb_core::announce::voters::Ballot;
use lb_datapath::Network;
use tokio::sync::watch;

use super::{channels::Channels, opened::Opened};
use crate::{
    announce::{self, Announcer, Coverage, Members, Who},
    config::{AnnounceConfig, Config, Source},
    daemon::{named_files, routes, tasks::Tasks},
};

/// Spawns the tasks that announce at layer 2 and by BGP, and the task that reports addresses that no advertisement
/// covers. `network` receives changes of the network.
pub(super) fn spawn(
    config: &Config,
    opened: &Opened,
    channels: &Channels,
    network: watch::Receiver<Network>,
    stop: &watch::Sender<bool>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let sources = announce::Sources {
        advertised: channels.advertised.receiver.clone(),
        cluster: channels.cluster.receiver.clone(),
        holders: channels.holders.receiver.clone(),
        network,
        synchronised: channels.synchronised.receiver.clone(),
        complete: channels.complete.receiver.clone(),
        stop: stop.subscribe(),
    };
    let by_bgp = routes::Inputs {
        advertised: sources.advertised.clone(),
        holders: sources.holders.clone(),
        synchronised: sources.synchronised.clone(),
        complete: sources.complete.clone(),
    };
    // With an API server, the agent reads advertisements at layer 2 only if `--announce` is set.
    let at_layer_2 = matches!(config.source, Source::Manifests(_)) || config.announce.port.is_some();
    let (holders, layer_2) = (sources.holders.clone(), at_layer_2.then(|| sources.advertised.clone()));
    spawn_at_layer_2(config, opened, sources, channels.ballots.sender.clone(), tasks)?;
    let bgp = routes::spawn(config, by_bgp, opened.observers(), tasks)?;
    tasks.spawn("advertised pools", Coverage { layer_2, bgp, holders }.run(opened.observers()));
    Ok(())
}

fn spawn_at_layer_2(
    config: &Config,
    opened: &Opened,
    sources: announce::Sources,
    ballots: watch::Sender<Ballot>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let datapath = &opened.datapath;
    let AnnounceConfig { members, port, key_file, prefer } = config.announce.clone();
    let who = match port {
        Some(port) => Some(Who::Nodes(port)),
        None => (!members.is_empty()).then_some(Who::Configured(members)),
    };
    let members = match who.zip(key_file) {
        Some((who, file)) => Some(Members { who, key: named_files::read_key(&file)?, prefer }),
        None => None,
    };
    let kernel = announce::Kernel::new(datapath.announce_attacher()?, datapath.announcements()?);
    let node = (config.node_name.as_str().into(), config.devices.clone());
    let announcer = Announcer::new(node, sources, kernel, (members, ballots), opened.observers())?;
    tasks.spawn("announcer", announcer.run());
    Ok(())
}
