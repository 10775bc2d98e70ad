//! Opens the data plane for the agent.

use std::sync::Arc;

use lb_common::Outcome;
use lb_core::plan::Contents;
use lb_datapath::{
    Datapath, Forwarding, Options, SocketOptions, SocketScope, Stats, cgroup_root, detect_devices,
};
use lb_dns::Names;
use tracing::{info, warn};

use crate::{
    cli::SocketLb,
    config::Config,
    daemon::{dns, state::State, tasks::Tasks, traffic::ServiceTraffic},
    flow_log::{FlowLog, LogNode},
    metrics::{Metrics, PacketCounters},
};

/// The opened data plane, and what several tasks share.
pub(super) struct Opened {
    pub(super) datapath: Datapath,
    /// Services and backends that an earlier agent has left in the maps.
    pub(super) contents: Contents,
    pub(super) traffic: Option<ServiceTraffic>,
    pub(super) flow_log: Option<FlowLog>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) state: Arc<State>,
    /// The DNS names of Services; `None` without a DNS server.
    pub(super) names: Option<Arc<Names>>,
}

impl Opened {
    pub(super) fn new(config: &Config, tasks: &mut Tasks) -> anyhow::Result<Self> {
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
        let state = Arc::new(State::new(config.node_name.clone()));
        let metrics = Metrics::new(datapath.stats()?, traffic.clone()).with_state(Arc::clone(&state));
        let flow_log = start_flow_log(config, &mut datapath, &metrics, tasks)?;
        Ok(Self {
            contents,
            metrics: Arc::new(metrics),
            traffic,
            flow_log,
            state,
            names: dns::names(&config.dns, config.service_ranges.as_deref()),
            datapath,
        })
    }

    /// The state and the metrics, to which most tasks report.
    pub(super) fn observers(&self) -> (Arc<State>, Arc<Metrics>) {
        (Arc::clone(&self.state), Arc::clone(&self.metrics))
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
    let node = LogNode { name: config.node_name.clone(), direct: config.forwarding == Forwarding::Direct };
    let (log, threads) = FlowLog::start(options, node, input, metrics.flow_log())?;
    tasks.spawn("flow log", async move {
        let _threads = threads;
        std::future::pending().await
    });
    info!(target = %options.target, "keeping a flow log");
    Ok(Some(log))
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
