//! The tasks that announce load balancer addresses by BGP: one task keeps routes and BIRD's configuration up to date.
//! With an API server, another task reads what to announce.

use std::sync::Arc;

use anyhow::anyhow;
use lb_core::announce::{advertisement::Advertised, cluster::Member};
use tokio::sync::watch;

use super::{state::State, tasks::Tasks};
use crate::{
    announce::{
        Completeness, HolderMap,
        bgp::{self, RouteAnnouncer},
    },
    config::{Config, Source},
    kubernetes::announce::{BgpPublished, run_bgp},
    metrics::Metrics,
};

/// Receivers of what the source of Services and the writer publish for the BGP task.
pub(super) struct Inputs {
    /// Advertisements in the folder of manifests. With an API server, this channel has only those for layer 2, so the
    /// BGP task does not use it.
    pub(super) advertised: watch::Receiver<Advertised>,
    pub(super) holders: watch::Receiver<HolderMap>,
    pub(super) synchronised: watch::Receiver<bool>,
    pub(super) complete: watch::Receiver<Completeness>,
}

/// Removes the routes that the earlier agent of this data plane announced, unless they are in the routing table in
/// which this agent announces. Then spawns the tasks if announcements by BGP are configured. Returns the channel with
/// the pools and objects for BGP; `None` if this agent announces nothing by BGP.
pub(super) fn spawn(
    config: &Config,
    inputs: Inputs,
    (state, metrics): (Arc<State>, Arc<Metrics>),
    tasks: &mut Tasks,
) -> anyhow::Result<Option<watch::Receiver<Advertised>>> {
    bgp::leave_other_table(&config.kernel.bpffs, config.bgp.as_ref())?;
    let Some(options) = config.bgp.clone() else { return Ok(None) };
    let name: Arc<str> = config.node_name.as_str().into();
    let Inputs { advertised, holders, synchronised, complete } = inputs;
    let (problem_sender, problems) = watch::channel(Vec::new());
    let (node_sender, node) = watch::channel(None);
    let advertised = match &config.source {
        Source::Manifests(_) => {
            node_sender.send_replace(Some(Member::alone(&name)));
            advertised
        }
        Source::ApiServer(server) => {
            let (advertised_sender, advertised) = watch::channel(Advertised::default());
            let published =
                BgpPublished { advertised: advertised_sender, node: node_sender, problems: problem_sender };
            let (server, name) = (server.clone(), Arc::clone(&name));
            tasks.spawn("objects for BGP", async move {
                run_bgp(server, name, published).await?;
                Err(anyhow!("the watch of what is announced by BGP has ended"))
            });
            advertised
        }
    };
    let sources =
        bgp::Sources { advertised: advertised.clone(), holders, synchronised, complete, node, problems };
    let announcer = RouteAnnouncer::new(name, options, sources, (state, metrics))?;
    tasks.spawn("routes for BGP", announcer.run());
    Ok(Some(advertised))
}
