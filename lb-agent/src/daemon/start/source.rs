//! Starts the source of Services, and the other tasks that read from the API server or write to it.

use std::{collections::BTreeSet, convert::Infallible, net::IpAddr, path::PathBuf, sync::Arc};

use anyhow::{Context as _, anyhow};
use ipnet::IpNet;
use lb_core::{
    announce::{advertisement::Advertised, cluster::Cluster, voters::Ballot},
    load_balancer::PoolUsage,
    model::SourceEvent,
    plan::Contents,
};
use tokio::sync::{mpsc, watch};

use super::{channels::Channels, opened::Opened};
use crate::{
    config::{Config, Source},
    daemon::{announced::Announced, state::State, tasks::Tasks},
    kubernetes::{self, ApiServer, Events, NodeInfo, Published, events},
    manifests::{self, ManifestsOptions},
    metrics::Metrics,
};

/// The channels of the source of Services. The source reads from `ballots` and sends to all other channels.
struct SourceChannels {
    node_info: watch::Sender<NodeInfo>,
    service_cidrs: watch::Sender<Vec<IpNet>>,
    peers: watch::Sender<Option<BTreeSet<IpAddr>>>,
    advertised: watch::Sender<Advertised>,
    cluster: watch::Sender<Cluster>,
    /// Receives from the announcer the voters to write to the API server.
    ballots: watch::Receiver<Ballot>,
    /// Sends changes to the writer.
    events: mpsc::Sender<SourceEvent>,
    /// Sends Kubernetes Events to the task that writes them to the API server.
    emitted: Events,
}

/// Spawns the task that writes Events to the API server. Without an API server, the agent drops Events.
pub(super) fn spawn_events(config: &Config, tasks: &mut Tasks) -> Events {
    let Source::ApiServer(server) = &config.source else { return Events::default() };
    let (events, outbox) = Events::channel();
    let (server, node_name) = (server.clone(), config.node_name.clone());
    tasks.spawn("events", async move { Ok(events::run(server, &node_name, outbox).await?) });
    events.starting();
    events
}

/// Spawns the source of Services: the manifests or the API server. `emitted` receives Events.
pub(super) fn spawn(
    config: &Config,
    opened: &Opened,
    channels: &Channels,
    emitted: Events,
    tasks: &mut Tasks,
) {
    let channels = SourceChannels {
        node_info: channels.node_info.sender.clone(),
        service_cidrs: channels.service_cidrs.sender.clone(),
        peers: channels.peers.sender.clone(),
        advertised: channels.advertised.sender.clone(),
        cluster: channels.cluster.sender.clone(),
        ballots: channels.ballots.receiver.clone(),
        events: channels.events.sender.clone(),
        emitted,
    };
    match &config.source {
        Source::Manifests(dir) => {
            let options = manifests_options(dir.clone(), config, opened);
            spawn_manifests(options, opened, channels, tasks);
        }
        Source::ApiServer(server) => spawn_api_server(server.clone(), config, opened, channels, tasks),
    }
}

fn manifests_options(dir: PathBuf, config: &Config, opened: &Opened) -> ManifestsOptions {
    ManifestsOptions {
        dir,
        cluster_ip_ranges: config.service_ranges.clone().unwrap_or_default(),
        other_cluster_ips: config.other_cluster_ips,
        pod_networks: config.detect_local.pod_networks().to_vec(),
        load_balancer_pool: config.load_balancer_pool.clone(),
        load_balancer_class: config.load_balancer_class.clone(),
        load_balancer_reassign: config.load_balancer_reassign,
        has_members: config.announce.members.len() > 1,
        names: opened.names.clone(),
        node_port_range: lb_core::allocate::DEFAULT_NODE_PORTS,
    }
}

fn spawn_manifests(options: ManifestsOptions, opened: &Opened, channels: SourceChannels, tasks: &mut Tasks) {
    let SourceChannels { advertised, events, .. } = channels;
    // From the maps, the allocator learns which addresses and node ports an earlier agent has allocated.
    let given_out = Contents {
        frontends: opened.contents.frontends.clone(),
        service_labels: opened.contents.service_labels.clone(),
        ..Contents::default()
    };
    let (problem_sender, problems) = watch::channel(Vec::new());
    let (pool_sender, pools) = watch::channel(Vec::new());
    let published = manifests::Published { problems: problem_sender, advertised, pools: pool_sender };
    tasks.spawn("conditions", follow_conditions(problems, Arc::clone(&opened.state)));
    tasks.spawn("pools", follow_pools(pools, Arc::clone(&opened.metrics)));
    tasks.spawn("manifests", async move {
        manifests::run(options, &given_out, events, published).await?;
        Err(anyhow!("the writer has ended"))
    });
}

/// Spawns the task that reads Services from the API server, and the tasks that read announcements and DNS names, as far
/// as these are configured.
fn spawn_api_server(
    server: ApiServer,
    config: &Config,
    opened: &Opened,
    channels: SourceChannels,
    tasks: &mut Tasks,
) {
    let SourceChannels { node_info, service_cidrs, peers, advertised, cluster, ballots, events, emitted } =
        channels;
    let (problem_sender, problems) = watch::channel(Vec::new());
    tasks.spawn("conditions", follow_conditions(problems, Arc::clone(&opened.state)));
    if config.announce.port.is_some() {
        let announced = Announced { advertised, cluster, ballots, events: emitted };
        let node = config.node_name.as_str().into();
        announced.spawn(server.clone(), node, Arc::clone(&opened.state), tasks);
    }
    if let Some(names) = opened.names.clone() {
        let server = server.clone();
        tasks.spawn("DNS names", async move { Ok(kubernetes::follow_names(server, names).await?) });
    }
    let published = Published {
        node: node_info,
        service_cidrs,
        peers: config.decapsulates().then_some(peers),
        problems: problem_sender,
    };
    let node_name = config.node_name.clone();
    tasks.spawn("kubernetes", async move {
        kubernetes::run(server, &node_name, events, published).await?;
        Err(anyhow!("the writer has ended"))
    });
}

async fn follow_conditions<P: ToString + Send + Sync + 'static>(
    mut problems: watch::Receiver<Vec<P>>,
    state: Arc<State>,
) -> anyhow::Result<Infallible> {
    loop {
        problems.changed().await.context("the source of Services has ended")?;
        let texts = problems.borrow_and_update().iter().map(ToString::to_string).collect();
        state.set_source_conditions(texts);
    }
}

async fn follow_pools(
    mut pools: watch::Receiver<Vec<PoolUsage>>,
    metrics: Arc<Metrics>,
) -> anyhow::Result<Infallible> {
    loop {
        pools.changed().await.context("the source of Services has ended")?;
        metrics.set_pools(&pools.borrow_and_update());
    }
}
