//! Starts the tasks that announce load balancers' addresses.

use anyhow::Result;
use lb_core::announce::{advertisement::Advertised, cluster::Cluster, voters::Ballot};
use lb_datapath::Network;
use tokio::sync::watch;

use super::opened::Opened;
use crate::{
    announce::{self, Announcer, HolderMap, Key, Members, Who},
    config::{AnnounceConfig, Config},
    daemon::{routes, tasks::Tasks},
};

/// What the announcers read.
pub(super) struct Inputs {
    pub(super) advertised: watch::Receiver<Advertised>,
    pub(super) cluster: watch::Receiver<Cluster>,
    pub(super) holders: watch::Receiver<HolderMap>,
    pub(super) network: watch::Receiver<Network>,
    pub(super) synchronised: watch::Receiver<bool>,
    pub(super) complete: watch::Receiver<bool>,
    /// Becomes true when the agent stops.
    pub(super) stop: watch::Receiver<bool>,
}

/// Spawns the tasks that announce at layer 2 and by BGP.
pub(super) fn spawn(
    config: &Config,
    opened: &Opened,
    inputs: Inputs,
    ballots: watch::Sender<Ballot>,
    tasks: &mut Tasks,
) -> Result<()> {
    let Inputs { advertised, cluster, holders, network, synchronised, complete, stop } = inputs;
    let by_bgp = routes::Inputs {
        advertised: advertised.clone(),
        holders: holders.clone(),
        synchronised: synchronised.clone(),
        complete,
    };
    let sources = announce::Sources { advertised, cluster, holders, network, synchronised, stop };
    spawn_at_layer_2(config, opened, sources, ballots, tasks)?;
    routes::spawn(config, by_bgp, opened.observers(), tasks)
}

fn spawn_at_layer_2(
    config: &Config,
    opened: &Opened,
    sources: announce::Sources,
    ballots: watch::Sender<Ballot>,
    tasks: &mut Tasks,
) -> Result<()> {
    let datapath = &opened.datapath;
    let AnnounceConfig { members, port, key_file, prefer } = config.announce.clone();
    let who = match port {
        Some(port) => Some(Who::Nodes(port)),
        None => (!members.is_empty()).then_some(Who::Configured(members)),
    };
    let members = match who.zip(key_file) {
        Some((who, file)) => Some(Members { who, key: Key::read(&file)?, prefer }),
        None => None,
    };
    let kernel = announce::Kernel::new(datapath.announce_attacher()?, datapath.announcements()?);
    let node = (config.node_name.as_str().into(), config.devices.clone());
    let announcer = Announcer::new(node, sources, kernel, (members, ballots), opened.observers())?;
    tasks.spawn("announcer", announcer.run());
    Ok(())
}
