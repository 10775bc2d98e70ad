//! The agent itself: tasks around one writer.
//!
//! ```text
//! source ─────events──▶ writer ──steps──▶ SERVICES, BACKENDS, …      conntrack: expiry, stale UDP flows
//!     │                 ▲  └──moved UDP frontends──▶ conntrack       devices: programs on devices, INSIDE_DEVICES
//!     ├──Node object──▶ node ──▶ SETTINGS     node ◀──addresses── devices
//!     └──problems──▶   State  ◀── healthz, metrics, status socket
//! ```
//!
//! A task that ends takes the agent with it: nothing dies silently. The data plane does not care.

mod bpffs;
mod config_file;
mod conntrack;
mod devices;
mod http;
pub mod logging;
mod memory;
mod node;
pub mod shortage;
pub mod socket;
pub mod state;
mod sync_log;
mod traffic;
mod writer;

use std::{collections::BTreeSet, convert::Infallible, net::SocketAddr, sync::Arc, thread, time::Duration};

use anyhow::{Context as _, anyhow};
use jiff::Timestamp;
use lb_common::Outcome;
use lb_core::{model::SourceEvent, plan::Contents};
use tokio::{
    io::{Interest, unix::AsyncFd},
    runtime,
    signal::unix::{Signal, SignalKind, signal},
    sync::{mpsc, watch},
    task::JoinSet,
};
use tracing::{info, warn};

pub use self::config_file::ConfigFile;
use self::{
    devices::{Devices, Inside},
    node::{Kernel, Node, NodeOptions, Sources},
    shortage::Tally,
    state::State,
    traffic::ServiceTraffic,
    writer::{Listeners, Writer},
};
use crate::{
    cli::{DsrEncapsulation, SocketLb},
    config::{Config, Source},
    health::{self, Checks, Servers},
    kubernetes::{self, Events, NodeInfo, Published, events},
    leftovers,
    manifests::{self, ManifestsOptions},
    metrics::{self, Metrics, PacketCounters},
    zpages::{self, About},
};
use lb_datapath::{BpfLogger, Datapath, Options, SocketOptions, SocketScope, Stats, cgroup_root};

/// The tasks mostly wait; two threads let the health check answer while the writer writes.
const THREADS: usize = 2;
/// Batches of changes that may wait for the writer.
const QUEUE: usize = 64;
/// How long a thread may finish what it does when the agent stops.
const LAST_MOMENT: Duration = Duration::from_secs(2);

/// Runs the agent until a signal stops it. The data plane stays in place.
///
/// # Errors
/// The data plane cannot be opened, a task has failed, or the configuration file has changed.
pub fn run(config: Config, file: ConfigFile) -> anyhow::Result<()> {
    memory::use_one_heap();
    let runtime = runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_all()
        .build()
        .context("cannot start the threads of the agent")?;
    let result = runtime.block_on(serve(config, file));
    runtime.shutdown_timeout(LAST_MOMENT);
    result
}

async fn serve(config: Config, file: ConfigFile) -> anyhow::Result<()> {
    info!(version = env!("CARGO_PKG_VERSION"), node = config.node_name, "starting");
    if !config.without_effect.is_empty() {
        warn!(
            "of the KubeProxyConfiguration, these fields have no effect: {}",
            config.without_effect.join(", ")
        );
    }
    // In the background: it reads all rules there are, and nothing waits for it.
    thread::spawn(|| {
        if let Some(advice) = leftovers::advice(&leftovers::find()) {
            warn!("{advice}");
        }
    });
    let mut signals = StopSignals::listen()?;
    let mut tasks = Tasks::default();
    let bpffs = config.place.bpffs.clone();
    start(config.clone(), &mut tasks)?;
    let result = tokio::select! {
        name = signals.next() => {
            info!("{name}: stopping; the data plane stays in place");
            Ok(())
        }
        path = file.changed(&config) => {
            Err(anyhow!("{} has changed: start the agent again; the data plane stays in place", path.display()))
        }
        error = tasks.failure() => Err(error),
    };
    socket::unbind(&bpffs);
    result
}

/// Opens the data plane and starts every task.
fn start(config: Config, tasks: &mut Tasks) -> anyhow::Result<()> {
    let options = Options {
        bpf_log: config.bpf_log,
        capacities: config.capacities,
        sockets: sockets(&config),
        xdp: config.xdp,
        forwarding: config.forwarding,
        syn_retries: config.syn_retries,
        hash_seed: config.maglev.seed,
        ..Options::new(&config.place.bpffs)
    };
    let mut datapath = Datapath::open(&options)?;
    let contents = datapath.maps().contents()?;
    let adopted = contents.service_labels.len();
    info!(bpffs = %config.place.bpffs.display(), services = adopted, "opened the data plane");

    let traffic = ServiceTraffic::begin(config.service_metrics, &datapath)?;
    let metrics = Arc::new(Metrics::new(datapath.stats()?, traffic.clone()));
    let about = About {
        configz: config.configz(),
        flagz: config.flagz(),
        started: Timestamp::now(),
        metrics: Arc::clone(&metrics),
    };
    let policy = config.policy();
    let node_options = node_options(&config);
    let node_name = Arc::clone(&policy.node_name);
    let state = Arc::new(State::new(config.node_name));
    if let Some(logger) = datapath.take_logger() {
        tasks.spawn("log of the BPF programs", forward_log(logger));
    }

    let inside = Inside { detect: node_options.detect.clone(), map: datapath.internal_devices()? };
    let attachers = (datapath.attacher()?, datapath.xdp_attacher(), datapath.device_map()?);
    let mut devices =
        Devices::new(attachers, config.devices, inside, Arc::clone(&state), Arc::clone(&metrics))?;
    // Without an API server both stay as they are here.
    let (node_sender, node_info) = watch::channel(NodeInfo::default());
    let (service_cidr_sender, service_cidrs) = watch::channel(Vec::new());
    let (synchronised_sender, synchronised) = watch::channel(false);
    let sources =
        Sources { network: devices.network(), info: node_info.clone(), service_cidrs, synchronised };
    let (listen_sender, listen) = watch::channel(BTreeSet::new());
    let kernel = Kernel { settings: datapath.settings()?, reservation: datapath.port_reservation() };
    let mut node = Node::new(node_options, sources, kernel, listen_sender, Arc::clone(&state));
    let facts = node.update()?;
    // Before anything is served: whoever sees the agent healthy may rely on every device of that moment.
    devices.sync()?;
    datapath.finish_handover()?;
    tasks.spawn("devices", devices.run());

    tasks.spawn("BPF file system", bpffs::run(datapath.anchor()?, Arc::clone(&state)));
    serve_http((config.healthz, config.metrics), about, &state, node_info.clone(), tasks);
    tasks.spawn("status socket", socket::serve(config.place.bpffs, Arc::clone(&state), node_info));

    let (moved_sender, moved) = mpsc::unbounded_channel();
    let counted = datapath.conntrack().active_flows_slots()?;
    let (counters_sender, counters) = watch::channel(BTreeSet::new());
    let (tally_sender, tally) = watch::channel(Tally::default());
    let watch = (Arc::clone(&state), Arc::clone(&metrics));
    let affinity = datapath.affinity()?;
    tasks.spawn("shortages", shortage::run(datapath.stats()?, affinity, watch.0, watch.1, tally_sender));
    let observers = conntrack::Observers {
        metrics: Arc::clone(&metrics),
        state: Arc::clone(&state),
        counters: counters_sender,
        traffic,
    };
    let (flows, sockets) = (datapath.conntrack(), datapath.udp_sockets()?);

    let (checks, checks_receiver) = watch::channel(Checks::new());
    let events = tell_events(&config.source, &node_name, tasks);
    let report = health_report(events, &state, &metrics, &node_name);
    tasks.spawn("health checks of Services", Servers::new(checks_receiver, listen, report).run());

    let (event_sender, events) = mpsc::channel(QUEUE);
    for event in facts.events() {
        event_sender.try_send(event)?;
    }
    tasks.spawn("node", node.run(facts, event_sender.clone()));
    match config.source {
        Source::Manifests(dir) => {
            let options = ManifestsOptions {
                dir,
                cluster_ip_ranges: config.service_ranges.unwrap_or_default(),
                node_port_range: lb_core::allocate::DEFAULT_NODE_PORTS,
            };
            follow_manifests(options, &contents, event_sender, &state, tasks);
        }
        Source::ApiServer(server) => {
            let (problem_sender, problems) = watch::channel(Vec::new());
            tasks.spawn("problems", follow_problems(problems, Arc::clone(&state)));
            let published =
                Published { node: node_sender, service_cidrs: service_cidr_sender, problems: problem_sender };
            let node_name = Arc::clone(&node_name);
            tasks.spawn("kubernetes", async move {
                kubernetes::run(server, &node_name, event_sender, published).await?;
                Err(anyhow!("the writer does not listen"))
            });
        }
    }
    let listeners = Listeners { moved: moved_sender, checks, synchronised: synchronised_sender };
    let mut writer = Writer::new(datapath, contents, policy, state, metrics, listeners);
    writer.adopt_counters(counted);
    let udp = conntrack::Udp { sockets, moved, served: writer.served() };
    tasks.spawn("conntrack", conntrack::run(flows, udp, tally, observers));
    tasks.spawn("writer", writer.run(events, counters));
    Ok(())
}

/// Serves health and metrics, where somebody wants to see them.
fn serve_http(
    (healthz, metrics_address): (Option<SocketAddr>, Option<SocketAddr>),
    about: About,
    state: &Arc<State>,
    node_info: watch::Receiver<NodeInfo>,
    tasks: &mut Tasks,
) {
    if let Some(address) = healthz {
        let state = Arc::clone(state);
        let eligible = move || node_info.borrow().eligible;
        let router = health::router(move || state.health(), eligible, Arc::clone(&about.metrics));
        tasks.spawn("healthz", http::serve("/healthz", address, router));
    }
    if let Some(address) = metrics_address {
        let router = metrics::router(Arc::clone(&about.metrics)).merge(zpages::router(about));
        tasks.spawn("metrics", http::serve("/metrics", address, router));
    }
}

/// What the configuration says of the node.
fn node_options(config: &Config) -> NodeOptions {
    let has_api_server = matches!(config.source, Source::ApiServer(_));
    NodeOptions {
        name: config.node_name.as_str().into(),
        node_ip: config.node_ip(),
        node_ports: config.node_port_addresses.clone(),
        detect: config.detect_local.clone(),
        service_ranges: config.service_ranges.clone(),
        drops_unknown_vips: config.drops_unknown_vips,
        ports: config.masquerade_ports.clone(),
        peers: config.dsr_peers.clone(),
        north_south: config.north_south,
        gue: config.dsr_encapsulation == DsrEncapsulation::Gue,
        has_api_server,
    }
}

/// Whom the servers of `healthCheckNodePort` ask and tell.
fn health_report(
    events: Events,
    state: &Arc<State>,
    metrics: &Arc<Metrics>,
    node_name: &Arc<str>,
) -> health::Report {
    let state = Arc::clone(state);
    health::Report {
        healthy: Arc::new(move || state.health().healthy),
        failed: Box::new(move |service, why| events.health_check_failed(service.clone(), why)),
        metrics: Arc::clone(metrics),
        node_name: Arc::clone(node_name),
    }
}

/// Where events are told; without an API server nobody hears them.
fn tell_events(source: &Source, node_name: &Arc<str>, tasks: &mut Tasks) -> Events {
    let Source::ApiServer(server) = source else { return Events::default() };
    let (events, outbox) = Events::channel();
    let (server, node_name) = (server.clone(), Arc::clone(node_name));
    tasks.spawn("events", async move { Ok(events::run(server, &node_name, outbox).await?) });
    events.starting();
    events
}

/// Which sockets are served. Without cgroup2 there is no way to.
fn sockets(config: &Config) -> Option<SocketOptions> {
    let scope = match config.socket_lb {
        SocketLb::Host => SocketScope::Node,
        SocketLb::All => SocketScope::All,
        SocketLb::Off => return None,
    };
    if let Some(cgroup) = config.place.cgroup.clone() {
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

fn follow_manifests(
    options: ManifestsOptions,
    contents: &Contents,
    events: mpsc::Sender<SourceEvent>,
    state: &Arc<State>,
    tasks: &mut Tasks,
) {
    let (problem_sender, problems) = watch::channel(Vec::new());
    tasks.spawn("problems", follow_problems(problems, Arc::clone(state)));
    // What the source needs of it: which addresses and node ports were given out.
    let given_out = Contents {
        frontends: contents.frontends.clone(),
        service_labels: contents.service_labels.clone(),
        ..Contents::default()
    };
    tasks.spawn("manifests", async move {
        manifests::run(options, &given_out, events, problem_sender).await?;
        Err(anyhow!("the writer does not listen"))
    });
}

/// The tasks of the agent. None of them ever ends well.
#[derive(Default)]
struct Tasks(JoinSet<(&'static str, anyhow::Error)>);

impl Tasks {
    fn spawn(
        &mut self,
        name: &'static str,
        task: impl Future<Output = anyhow::Result<Infallible>> + Send + 'static,
    ) {
        self.0.spawn(async move {
            let Err(error) = task.await;
            (name, error)
        });
    }

    /// Why the first task has ended.
    async fn failure(&mut self) -> anyhow::Error {
        match self.0.join_next().await {
            Some(Ok((name, error))) => error.context(format!("the task `{name}` has failed")),
            Some(Err(panic)) => anyhow!(panic).context("a task has panicked, which is a bug"),
            None => anyhow!("there is no task, which is a bug"),
        }
    }
}

/// The signals that stop the agent.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    fn listen() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    /// The name of the next one.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

async fn follow_problems<P: ToString + Send + Sync + 'static>(
    mut problems: watch::Receiver<Vec<P>>,
    state: Arc<State>,
) -> anyhow::Result<Infallible> {
    loop {
        problems.changed().await.context("the source of Services has ended")?;
        let texts = problems.borrow_and_update().iter().map(ToString::to_string).collect();
        state.set_source_problems(texts);
    }
}

async fn forward_log(logger: BpfLogger) -> anyhow::Result<Infallible> {
    // SAFETY: the logger owns the descriptor of its ring buffer and keeps it open as long as it lives.
    let mut logger = unsafe { AsyncFd::register_with_interest(logger, Interest::READABLE) }
        .map_err(|refused| refused.into_parts().1)?;
    loop {
        let mut ready = logger.readable_mut().await?;
        ready.get_inner_mut().flush();
        ready.clear_ready();
    }
}

impl PacketCounters for Stats {
    fn packets(&self) -> Option<[u64; Outcome::COUNT]> {
        self.read().inspect_err(|error| warn!("a scrape goes without packet counters: {error}")).ok()
    }
}
