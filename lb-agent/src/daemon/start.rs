//! Starts the agent: opens the data plane, connects the tasks by channels, spawns them.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
};

use anyhow::{Context as _, anyhow};
use ipnet::IpNet;
use jiff::Timestamp;
use lb_common::Outcome;
use lb_core::{
    announce::{advertisement::Advertised, cluster::Cluster, voters::Ballot},
    load_balancer::PoolUsage,
    model::SourceEvent,
    plan::Contents,
    stale_udp::StaleFrontends,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::{mpsc, watch},
};
use tracing::{info, warn};

use super::{
    Pages, addresses,
    announced::Announced,
    bpffs, conntrack,
    devices::{Devices, Inside},
    dns,
    ends::Ends,
    environment, http,
    ipsec::Ipsec,
    node::{Facts, Kernel, Node, NodeOptions, Sources},
    routes,
    shortage_watch::{self, FlowCounts},
    socket,
    state::State,
    supervisor,
    tasks::Tasks,
    traffic::ServiceTraffic,
    writer::{Listeners, Writer},
};
use crate::{
    announce::{self, Announcer, HolderMap, Key, Members, Who},
    cli::{DsrEncapsulation, SocketLb},
    config::{AnnounceConfig, Config, Source, WebConfig},
    flow_log::FlowLog,
    health::{self, Checks, Servers},
    kubernetes::{self, Events, NodeInfo, Published, events},
    manifests::{self, ManifestsOptions},
    metrics::{self, Metrics, PacketCounters},
    probe::{self, Prober},
    zpages::{self, About},
};
use lb_datapath::{
    BpfLogger, CatchDevice, Datapath, Network, Options, SocketOptions, SocketScope, Stats, UnreachableRoutes,
    cgroup_root, detect_devices,
};
use lb_dns::Names;
use lb_web::{Access, Token};

/// Maximum number of events that wait for the writer.
const QUEUE: usize = 64;

/// Opens the data plane and spawns the tasks.
pub(super) fn start(
    config: Config,
    pages: Pages,
    stop: &watch::Sender<bool>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let opened = Opened::new(&config, tasks)?;
    spawn_pages(&config, pages, tasks)?;
    let (senders, receivers) = wire(known_peers(&config));
    spawn(config, opened, senders, receivers, stop, tasks)
}

/// The opened data plane, and what several tasks share.
struct Opened {
    datapath: Datapath,
    /// Services and backends that an earlier agent has left in the maps.
    contents: Contents,
    traffic: Option<ServiceTraffic>,
    flow_log: Option<FlowLog>,
    metrics: Arc<Metrics>,
    state: Arc<State>,
    /// The DNS names of Services; `None` without a DNS server.
    names: Option<Arc<Names>>,
}

impl Opened {
    fn new(config: &Config, tasks: &mut Tasks) -> anyhow::Result<Self> {
        let options = Options {
            bpf_log: config.bpf_log,
            capacities: config.capacities,
            sockets: sockets(config),
            xdp: config.xdp,
            forwarding: config.forwarding,
            decapsulate: config.decapsulates(),
            syn_retries: config.syn_retries,
            flow_log: config.flow_log.is_some(),
            hash_seed: config.maglev.seed,
            devices: detect_devices(&config.devices)?,
            ..Options::new(&config.kernel.bpffs)
        };
        let mut datapath = Datapath::open(&options)?;
        let contents = datapath.maps().contents()?;
        let adopted = contents.service_labels.len();
        info!(bpffs = %config.kernel.bpffs.display(), services = adopted, "opened the data plane");
        let traffic = ServiceTraffic::begin(config.service_metrics, &datapath)?;
        let metrics = Metrics::new(datapath.stats()?, traffic.clone());
        let flow_log = start_flow_log(config, &mut datapath, &metrics, tasks)?;
        Ok(Self {
            contents,
            metrics: Arc::new(metrics),
            traffic,
            flow_log,
            state: Arc::new(State::new(config.node_name.clone())),
            names: dns::names(&config.dns, config.service_ranges.as_deref()),
            datapath,
        })
    }
}

/// Starts the flow log, if one is configured. Its threads end with the tasks.
fn start_flow_log(
    config: &Config,
    datapath: &mut Datapath,
    metrics: &Metrics,
    tasks: &mut Tasks,
) -> anyhow::Result<Option<FlowLog>> {
    let Some((options, events)) = config.flow_log.as_ref().zip(datapath.take_flow_events()) else {
        return Ok(None);
    };
    let input = (events, datapath.maps().clone());
    let (log, threads) = FlowLog::start(options, config.node_name.clone(), input, metrics.flow_log())?;
    tasks.spawn("flow log", async move {
        let _threads = threads;
        std::future::pending().await
    });
    info!(target = %options.target, "keeping a flow log");
    Ok(Some(log))
}

/// The sending ends of the channels between tasks.
struct Senders {
    /// The Node object: from the API server to the tasks that need it.
    node_info: watch::Sender<NodeInfo>,
    service_cidrs: watch::Sender<Vec<IpNet>>,
    /// Addresses of other nodes that may send tunnelled packets: from the API server to the node task.
    peers: watch::Sender<Option<BTreeSet<IpAddr>>>,
    /// Whether the first synchronisation is complete: from the writer to the tasks that wait for it.
    synchronised: watch::Sender<bool>,
    /// Whether every object was read and is in the kernel: from the writer to the task that announces by BGP.
    complete: watch::Sender<bool>,
    /// Listen addresses: from the node task to the `healthCheckNodePort` servers.
    listen: watch::Sender<BTreeSet<IpAddr>>,
    /// The node's own addresses: from the node task to connection tracking.
    own: watch::Sender<Vec<IpAddr>>,
    /// The Services with load balancers' addresses: from the writer to the announcers (layer 2 and BGP).
    holders: watch::Sender<HolderMap>,
    /// Advertisements and pools: from the directory of manifests or the API server to the announcers.
    advertised: watch::Sender<Advertised>,
    /// The cluster's Nodes and voters: from the API server to the announcer at layer 2.
    cluster: watch::Sender<Cluster>,
    /// Known and proposed voters: from the announcer to the task that writes voters to the API server.
    ballots: watch::Sender<Ballot>,
    /// What to answer: from the writer to the `healthCheckNodePort` servers.
    checks: watch::Sender<Checks>,
    /// UDP frontends that have lost endpoints: from the writer to connection tracking.
    stale_udp: mpsc::UnboundedSender<StaleFrontends>,
    /// Slots of `ACTIVE` that flows refer to: from connection tracking to the writer.
    counters: watch::Sender<BTreeSet<u32>>,
    /// Counters of new and refused flows: from the shortage task to connection tracking.
    flow_counts: watch::Sender<FlowCounts>,
    /// Targets of health checks: from the writer to the prober.
    targets: mpsc::UnboundedSender<probe::Targets>,
    /// Changes: from the source of Services and the node task to the writer.
    events: mpsc::Sender<SourceEvent>,
    /// From the environment socket to the writer.
    environments: mpsc::Sender<environment::Request>,
}

/// The receiving ends of the channels of [`Senders`].
struct Receivers {
    node_info: watch::Receiver<NodeInfo>,
    service_cidrs: watch::Receiver<Vec<IpNet>>,
    peers: watch::Receiver<Option<BTreeSet<IpAddr>>>,
    synchronised: watch::Receiver<bool>,
    complete: watch::Receiver<bool>,
    listen: watch::Receiver<BTreeSet<IpAddr>>,
    own: watch::Receiver<Vec<IpAddr>>,
    holders: watch::Receiver<HolderMap>,
    advertised: watch::Receiver<Advertised>,
    cluster: watch::Receiver<Cluster>,
    ballots: watch::Receiver<Ballot>,
    checks: watch::Receiver<Checks>,
    stale_udp: mpsc::UnboundedReceiver<StaleFrontends>,
    counters: watch::Receiver<BTreeSet<u32>>,
    flow_counts: watch::Receiver<FlowCounts>,
    targets: mpsc::UnboundedReceiver<probe::Targets>,
    events: mpsc::Receiver<SourceEvent>,
    environments: mpsc::Receiver<environment::Request>,
}

/// Creates the channels. Without an API server the values of `node_info`, `service_cidrs` and `peers` never change.
fn wire(known_peers: Option<BTreeSet<IpAddr>>) -> (Senders, Receivers) {
    let (node_info_sender, node_info) = watch::channel(NodeInfo::default());
    let (service_cidrs_sender, service_cidrs) = watch::channel(Vec::new());
    let (peers_sender, peers) = watch::channel(known_peers);
    let (synchronised_sender, synchronised) = watch::channel(false);
    let (complete_sender, complete) = watch::channel(false);
    let (listen_sender, listen) = watch::channel(BTreeSet::new());
    let (own_sender, own) = watch::channel(Vec::new());
    let (holders_sender, holders) = watch::channel(HolderMap::default());
    let (advertised_sender, advertised) = watch::channel(Advertised::default());
    let (cluster_sender, cluster) = watch::channel(Cluster::default());
    let (ballots_sender, ballots) = watch::channel(Ballot::default());
    let (checks_sender, checks) = watch::channel(Checks::new());
    let (stale_udp_sender, stale_udp) = mpsc::unbounded_channel();
    let (counters_sender, counters) = watch::channel(BTreeSet::new());
    let (flow_counts_sender, flow_counts) = watch::channel(FlowCounts::default());
    let (targets_sender, targets) = mpsc::unbounded_channel();
    let (events_sender, events) = mpsc::channel(QUEUE);
    let (environments_sender, environments) = mpsc::channel(1);
    let senders = Senders {
        node_info: node_info_sender,
        service_cidrs: service_cidrs_sender,
        peers: peers_sender,
        synchronised: synchronised_sender,
        complete: complete_sender,
        listen: listen_sender,
        own: own_sender,
        holders: holders_sender,
        advertised: advertised_sender,
        cluster: cluster_sender,
        ballots: ballots_sender,
        checks: checks_sender,
        stale_udp: stale_udp_sender,
        counters: counters_sender,
        flow_counts: flow_counts_sender,
        targets: targets_sender,
        events: events_sender,
        environments: environments_sender,
    };
    let receivers = Receivers {
        node_info,
        service_cidrs,
        peers,
        synchronised,
        complete,
        listen,
        own,
        holders,
        advertised,
        cluster,
        ballots,
        checks,
        stale_udp,
        counters,
        flow_counts,
        targets,
        events,
        environments,
    };
    (senders, receivers)
}

/// The other nodes that may send tunnelled packets, as far as the configuration names them, besides `--dsr-peers`: the
/// members that announce addresses. `None` if the API server will name them.
fn known_peers(config: &Config) -> Option<BTreeSet<IpAddr>> {
    match &config.source {
        _ if !config.decapsulates() => Some(BTreeSet::new()),
        Source::Manifests(_) => Some(config.announce.members.values().map(SocketAddr::ip).collect()),
        Source::ApiServer(_) => None,
    }
}

/// The channels of what only the API server names.
type FromApiServer =
    (watch::Sender<NodeInfo>, watch::Sender<Vec<IpNet>>, watch::Sender<Option<BTreeSet<IpAddr>>>);

/// Spawns the tasks. The servers start after the first attachment of programs to devices: `/healthz` does not answer
/// before.
fn spawn(
    config: Config,
    mut opened: Opened,
    senders: Senders,
    receivers: Receivers,
    stop: &watch::Sender<bool>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    if let Some(logger) = opened.datapath.take_logger() {
        tasks.spawn("log of the BPF programs", forward_log(logger));
    }
    let synchronised = receivers.synchronised.clone();
    let node_sources = |network, catch| Sources {
        network,
        catch,
        info: receivers.node_info.clone(),
        service_cidrs: receivers.service_cidrs.clone(),
        peers: receivers.peers,
        synchronised: receivers.synchronised.clone(),
    };
    let (node, facts, network) =
        spawn_devices(&config, &mut opened, node_sources, (senders.listen, senders.own), tasks)?;
    spawn_servers(&config, &opened, receivers.node_info.clone(), synchronised, tasks)?;
    let environment = environment::serve(config.kernel.bpffs.clone(), senders.environments);
    tasks.spawn("environment socket", environment);
    let events = spawn_events(&config, tasks);
    let observers = (Arc::clone(&opened.state), Arc::clone(&opened.metrics));
    addresses::spawn(&config, receivers.service_cidrs.clone(), events.clone(), observers, stop, tasks);
    let report = health_report(events.clone(), &config, &opened);
    tasks.spawn("health checks of Services", Servers::new(receivers.checks, receivers.listen, report).run());
    for event in facts.events() {
        senders.events.try_send(event)?;
    }
    tasks.spawn("node", node.run(facts, senders.events.clone()));
    let by_bgp = routes::Inputs {
        advertised: receivers.advertised.clone(),
        holders: receivers.holders.clone(),
        synchronised: receivers.synchronised.clone(),
        complete: receivers.complete,
    };
    let announced = announce::Sources {
        advertised: receivers.advertised,
        cluster: receivers.cluster,
        holders: receivers.holders,
        network,
        synchronised: receivers.synchronised,
        stop: stop.subscribe(),
    };
    spawn_announcer(&config, &opened, announced, senders.ballots, tasks)?;
    let observers = (Arc::clone(&opened.state), Arc::clone(&opened.metrics));
    routes::spawn(&config, by_bgp, observers, tasks)?;
    if let Some(names) = &opened.names {
        let stats = opened.metrics.dns();
        let ranges = receivers.service_cidrs.clone();
        dns::spawn(config.dns.clone(), names, ranges, stats, &opened.state, tasks);
    }
    let observers = probe::Observers {
        board: opened.state.board(),
        metrics: Arc::clone(&opened.metrics),
        events: events.clone(),
    };
    let file = socket::record(&config.kernel.bpffs, "unhealthy")?;
    let prober = (receivers.targets, senders.events.clone());
    let (prober, unhealthy) = Prober::new(&config.node_name, file, prober, observers);
    tasks.spawn("health checks of endpoints", prober.run());
    let policy = config.policy();
    let from_api_server = (senders.node_info, senders.service_cidrs, senders.peers);
    let announced = Announced {
        advertised: senders.advertised,
        cluster: senders.cluster,
        ballots: receivers.ballots,
        events: events.clone(),
    };
    spawn_source(config, &opened, (senders.events, announced), from_api_server, tasks);

    let counted = opened.datapath.conntrack().active_flows_slots()?;
    let (stats, affinity) = (opened.datapath.stats()?, opened.datapath.affinity()?);
    let (flows, sockets) = (opened.datapath.conntrack(), opened.datapath.node_sockets()?);
    let Opened { datapath, contents, traffic, flow_log, metrics, state, names: _ } = opened;
    let shortages =
        shortage_watch::run(stats, affinity, Arc::clone(&state), Arc::clone(&metrics), senders.flow_counts);
    tasks.spawn("shortages", shortages);
    let observers = conntrack::Observers {
        metrics: Arc::clone(&metrics),
        state: Arc::clone(&state),
        counters: senders.counters,
        traffic,
        flow_log: flow_log.clone(),
    };
    let listeners = Listeners {
        stale_udp: senders.stale_udp,
        checks: senders.checks,
        targets: senders.targets,
        events,
        holders: senders.holders,
        flow_log: flow_log.as_ref().map(FlowLog::policies),
        synchronised: senders.synchronised,
        complete: senders.complete,
    };
    let mut writer = Writer::new(datapath, contents, policy, state, metrics, listeners);
    writer.adopt_counters(counted);
    writer.adopt_unhealthy(unhealthy);
    let udp = conntrack::Udp { sockets, stale_udp: receivers.stale_udp, served: writer.served() };
    let ends = Ends::new(writer.connection_rules());
    tasks.spawn(
        "conntrack",
        conntrack::run(flows, (udp, ends), receivers.own, receivers.flow_counts, observers),
    );
    tasks.spawn("writer", writer.run(receivers.events, receivers.counters, receivers.environments));
    Ok(())
}

/// Brings the settings and the programs on devices up to date, and spawns the task that keeps the programs there.
/// Returns the node task with its first facts, and the network. The caller spawns the node task once the writer's
/// channel has the facts.
fn spawn_devices(
    config: &Config,
    opened: &mut Opened,
    sources: impl FnOnce(watch::Receiver<Network>, watch::Receiver<Option<u32>>) -> Sources,
    addresses: (watch::Sender<BTreeSet<IpAddr>>, watch::Sender<Vec<IpAddr>>),
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
    let sources = sources(devices.network(), devices.catch());
    let mut node = Node::new(node_options(config), sources, kernel, addresses, Arc::clone(state));
    let facts = node.update()?;
    devices.sync()?;
    datapath.finish_handover()?;
    tasks.spawn("devices", devices.run());
    Ok((node, facts, network))
}

/// Spawns the task that announces load balancers' addresses at layer 2.
fn spawn_announcer(
    config: &Config,
    opened: &Opened,
    sources: announce::Sources,
    ballots: watch::Sender<Ballot>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let Opened { datapath, state, metrics, .. } = opened;
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
    let observers = (Arc::clone(state), Arc::clone(metrics));
    let announcer = Announcer::new(node, sources, kernel, (members, ballots), observers)?;
    tasks.spawn("announcer", announcer.run());
    Ok(())
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

/// Spawns the servers of `/healthz`, `/metrics` and the status socket, the reports to the supervisor, and the watch over
/// the BPF file system.
fn spawn_servers(
    config: &Config,
    opened: &Opened,
    node_info: watch::Receiver<NodeInfo>,
    synchronised: watch::Receiver<bool>,
    tasks: &mut Tasks,
) -> anyhow::Result<()> {
    let Opened { datapath, metrics, state, .. } = opened;
    let pins = bpffs::Pins { anchor: datapath.anchor()?, sockets: datapath.socket_attacher(), synchronised };
    tasks.spawn("BPF file system", bpffs::run(pins, Arc::clone(state), Arc::clone(metrics)));
    if let Some(address) = config.healthz {
        let (state, node_info) = (Arc::clone(state), node_info.clone());
        let eligible = move || node_info.borrow().eligible;
        let router = health::router(move || state.health(), eligible, Arc::clone(metrics));
        tasks.spawn("healthz", http::serve("/healthz", address, router));
    }
    if let Some(address) = config.metrics {
        let about = About {
            configz: config.configz(),
            flagz: config.flagz(),
            started: Timestamp::now(),
            metrics: Arc::clone(metrics),
        };
        let router = metrics::router(Arc::clone(metrics)).merge(zpages::router(about));
        tasks.spawn("metrics", http::serve("/metrics", address, router));
    }
    let socket = socket::serve(config.kernel.bpffs.clone(), Arc::clone(state), node_info);
    tasks.spawn("status socket", socket);
    supervisor::spawn(Arc::clone(state), tasks);
    Ok(())
}

/// Spawns the server of the web pages, if it is configured.
fn spawn_pages(config: &Config, pages: Pages, tasks: &mut Tasks) -> anyhow::Result<()> {
    let Some(WebConfig { address, token_file }) = &config.web else { return Ok(()) };
    let read = |file: &PathBuf| -> anyhow::Result<Token> {
        let text = fs::read_to_string(file)
            .with_context(|| format!("cannot read the file of --web-token-file, {}", file.display()))?;
        Token::new(&text).with_context(|| format!("--web-token-file {}", file.display()))
    };
    let token = token_file.as_ref().map(read).transpose()?;
    let access = Access::new(*address, token)
        .with_context(|| format!("--web-bind-address {address} needs --web-token-file"))?;
    let router = pages(config.kernel.clone(), access);
    tasks.spawn("pages for a browser", http::serve("the pages for a browser", *address, router));
    Ok(())
}

/// Spawns the task that writes Events to the API server. Without an API server, the agent drops Events.
fn spawn_events(config: &Config, tasks: &mut Tasks) -> Events {
    let Source::ApiServer(server) = &config.source else { return Events::default() };
    let (events, outbox) = Events::channel();
    let (server, node_name) = (server.clone(), config.node_name.clone());
    tasks.spawn("events", async move { Ok(events::run(server, &node_name, outbox).await?) });
    events.starting();
    events
}

/// What the `healthCheckNodePort` servers need to answer, and where they report their errors.
fn health_report(events: Events, config: &Config, opened: &Opened) -> health::Report {
    let state = Arc::clone(&opened.state);
    health::Report {
        healthy: Arc::new(move || state.health().healthy),
        failed: Box::new(move |service, why| events.health_check_failed(service.clone(), why)),
        metrics: Arc::clone(&opened.metrics),
        node_name: config.node_name.as_str().into(),
    }
}

/// Spawns the source of Services: the manifests or the API server. With an API server, also the tasks that read
/// announcements and DNS names, if they are configured.
fn spawn_source(
    config: Config,
    opened: &Opened,
    (events, announced): (mpsc::Sender<SourceEvent>, Announced),
    (node, service_cidrs, peers): FromApiServer,
    tasks: &mut Tasks,
) {
    let state = Arc::clone(&opened.state);
    let decapsulates = config.decapsulates();
    let pod_networks = config.detect_local.pod_networks().to_vec();
    match config.source {
        Source::Manifests(dir) => {
            let options = ManifestsOptions {
                dir,
                cluster_ip_ranges: config.service_ranges.unwrap_or_default(),
                pod_networks,
                load_balancer_pool: config.load_balancer_pool,
                load_balancer_class: config.load_balancer_class,
                names: opened.names.clone(),
                node_port_range: lb_core::allocate::DEFAULT_NODE_PORTS,
            };
            // From the maps, the allocator learns which addresses and node ports an earlier agent has allocated.
            let given_out = Contents {
                frontends: opened.contents.frontends.clone(),
                service_labels: opened.contents.service_labels.clone(),
                ..Contents::default()
            };
            let (problem_sender, problems) = watch::channel(Vec::new());
            let (pool_sender, pools) = watch::channel(Vec::new());
            let advertised = announced.advertised;
            let published = manifests::Published { problems: problem_sender, advertised, pools: pool_sender };
            tasks.spawn("conditions", follow_conditions(problems, state));
            tasks.spawn("pools", follow_pools(pools, Arc::clone(&opened.metrics)));
            tasks.spawn("manifests", async move {
                manifests::run(options, &given_out, events, published).await?;
                Err(anyhow!("the writer has ended"))
            });
        }
        Source::ApiServer(server) => {
            let (problem_sender, problems) = watch::channel(Vec::new());
            tasks.spawn("conditions", follow_conditions(problems, Arc::clone(&state)));
            let peers = decapsulates.then_some(peers);
            let published = Published { node, service_cidrs, peers, problems: problem_sender };
            if config.announce.port.is_some() {
                announced.spawn(server.clone(), config.node_name.as_str().into(), state, tasks);
            }
            let node_name = config.node_name;
            if let Some(names) = opened.names.clone() {
                let server = server.clone();
                tasks.spawn("DNS names", async move { Ok(kubernetes::follow_names(server, names).await?) });
            }
            tasks.spawn("kubernetes", async move {
                kubernetes::run(server, &node_name, events, published).await?;
                Err(anyhow!("the writer has ended"))
            });
        }
    }
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

/// The cgroup whose sockets the agent serves; `None` if socket load balancing is off, or no cgroup2 mount is found.
fn sockets(config: &Config) -> Option<SocketOptions> {
    let scope = match config.socket_lb {
        SocketLb::Host => SocketScope::Node,
        SocketLb::All => SocketScope::All,
        SocketLb::Off => return None,
    };
    if let Some(cgroup) = config.kernel.cgroup.clone() {
        return Some(SocketOptions { cgroup, scope });
    }
    let reason = match cgroup_root() {
        Ok(Some(cgroup)) => return Some(SocketOptions { cgroup, scope }),
        Ok(None) => "no cgroup2 is mounted (mount -t cgroup2 none /sys/fs/cgroup/unified)".to_owned(),
        Err(error) => format!("cannot find the cgroup2 mount: {error}"),
    };
    warn!("processes of the node do not reach Services: {reason}");
    None
}

impl PacketCounters for Stats {
    fn packets(&self) -> Option<[u64; Outcome::COUNT]> {
        self.read().inspect_err(|error| warn!("a scrape lacks the packet counters: {error}")).ok()
    }
}
