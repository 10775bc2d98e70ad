//! State that the tasks of the agent share, such as the progress of synchronisation, conditions and shortages. Health
//! checks and `status` read it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::shortage::{ShortageReport, Shortages};
use crate::{
    announce::{AnnouncementReport, bgp::BgpReport},
    health::{Freshness, Health, Moment},
    probe::{Board, CheckReport},
};

/// The agent's part of `lb-agent status`, sent through the status socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Process id of the agent.
    pub pid: u32,
    /// Version of the agent.
    pub version: String,
    /// Name of the node.
    pub node_name: String,
    /// When the agent started.
    pub started: Timestamp,
    /// Whether at least one synchronisation has completed.
    pub synchronised: bool,
    /// Whether the agent has synchronised at least once, and no change has waited for too long. If the node is also
    /// eligible, `/healthz` answers 200.
    pub healthy: bool,
    /// Whether load balancers may send traffic to the node: it is neither being deleted nor about to be removed.
    #[serde(default = "yes")]
    pub node_eligible: bool,
    /// Time of the last complete synchronisation.
    pub last_sync: Option<Timestamp>,
    /// Number of service ports in the kernel.
    pub services: usize,
    /// Number of backends of all service ports in the kernel.
    pub endpoints: usize,
    /// Map updates that the last synchronisation left undone, plus Services that wait for room.
    pub pending: usize,
    /// When the oldest pending change arrived.
    pub pending_since: Option<Timestamp>,
    /// Errors of the last synchronisation.
    pub failures: Vec<String>,
    /// Conditions that need attention, such as invalid manifests, addresses that two Services claim, or a node that
    /// does not forward packets.
    pub problems: Vec<String>,
    /// The interfaces that are served.
    pub devices: Vec<DeviceReport>,
    /// Addresses and settings of the node.
    pub node: NodeReport,
    /// The addresses that are announced at layer 2. Older agents do not report them.
    #[serde(default)]
    pub announcements: Vec<AnnouncementReport>,
    /// What is announced by BGP; `None` without `--announce-table`. Older agents do not report it.
    #[serde(default)]
    pub bgp: Option<BgpReport>,
    /// Full or nearly full maps, exhausted ports, and lost pins. Older agents do not report them.
    #[serde(default)]
    pub shortages: Vec<ShortageReport>,
    /// State of the controller that assigns addresses to load balancers; `None` without `--load-balancer-controller`.
    /// Older agents do not report it.
    #[serde(default)]
    pub load_balancers: Option<LoadBalancerReport>,
    /// The DNS server; `None` without `--dns-bind-address`. Older agents do not report it.
    #[serde(default)]
    pub dns: Option<DnsReport>,
    /// The health checks of Services, and what they show on this node. Older agents do not report them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub health_checks: Vec<CheckReport>,
}

/// The DNS server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DnsReport {
    /// The addresses of `--dns-bind-address`.
    pub addresses: Vec<SocketAddr>,
    /// Those at which it cannot listen yet, and why.
    #[serde(default)]
    pub unserved: BTreeMap<SocketAddr, String>,
    /// The domain of the names of Services.
    pub domain: String,
    /// The servers that it asks for all other names.
    pub upstreams: Vec<SocketAddr>,
    /// Upstream servers that it does not ask, because they lead back to it.
    pub loops: Vec<SocketAddr>,
}

/// State of the controller that assigns addresses to the cluster's Services of type LoadBalancer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadBalancerReport {
    /// Node of the elected agent; `None` while no agent is elected.
    pub leader: Option<String>,
    /// Whether this agent is the elected one.
    pub is_here: bool,
    /// The pools; empty unless this agent is elected.
    pub pools: Vec<PoolReport>,
}

/// How many addresses of a pool are in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolReport {
    /// The name of the pool.
    pub name: String,
    /// Number of addresses that are assigned to Services.
    pub used: u64,
    /// Number of addresses that the pool can assign.
    pub total: u64,
}

/// Addresses and settings of the node, as `status` shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    /// Addresses of the node on interfaces that are up, without loopback and IPv6 link-local ones.
    pub addresses: Vec<IpAddr>,
    /// Addresses that serve node ports; may include `127.0.0.1` and `::1`.
    #[serde(rename = "nodePortAddresses")]
    pub nodeport_addresses: Vec<IpAddr>,
    /// At most one address of each family: the source of masqueraded packets if the routing table names none.
    pub primary: Vec<IpAddr>,
    /// How the agent recognises internal clients: kube-proxy's name of the mode, or `none`.
    pub detect_local: String,
    /// Networks of internal clients.
    pub inside_networks: Vec<String>,
    /// Interfaces of internal clients.
    pub inside_devices: Vec<String>,
    /// Ranges of cluster IPs.
    pub service_ranges: Vec<String>,
    /// Whether packets to unassigned addresses in `service_ranges` are dropped.
    pub drops_unknown_vips: bool,
    /// How packets of external clients reach backends on other nodes by default: a value of `--north-south-mode`.
    pub north_south_mode: String,
    /// Tunnel of the modes dsr and hybrid: a value of `--dsr-encapsulation`.
    pub dsr_encapsulation: String,
    /// Networks of the nodes that may send packets to backends on this node through a tunnel.
    pub dsr_peers: Vec<String>,
    /// Networks whose external clients may use no frontend: those of `--deny-source`, and those behind IPsec policies
    /// that replies would bypass. Older agents do not report them.
    #[serde(default)]
    pub denied_sources: Vec<String>,
    /// First source port of masqueraded packets.
    pub masquerade_first_port: u16,
    /// Last source port of masqueraded packets.
    pub masquerade_last_port: u16,
}

/// The default of `node_eligible`, which older agents do not report.
const fn yes() -> bool {
    true
}

/// An interface that the agent serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceReport {
    /// Interface index in the agent's network namespace.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// `wire`, `workload` or `catch`
    pub kind: String,
    /// Mode of the XDP program: `native` (the driver runs it) or `generic` (the kernel's network stack runs it); `None`
    /// if the interface is served at tc only.
    pub xdp: Option<String>,
}

/// Result of a synchronisation.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) services: usize,
    pub(super) endpoints: usize,
    /// Number of map updates that are left undone, plus number of Services that wait for room.
    pub(super) pending: usize,
    pub(super) failures: Vec<String>,
    pub(super) conflicts: Vec<String>,
}

/// The shared state.
#[derive(Debug)]
pub struct State {
    node_name: String,
    started: Timestamp,
    inner: Mutex<Inner>,
    board: Board,
}

#[derive(Debug, Default)]
struct Inner {
    freshness: Freshness,
    progress: Progress,
    source_conditions: Vec<String>,
    node_conditions: Vec<String>,
    device_conditions: Vec<String>,
    address_conditions: Vec<String>,
    announce_conditions: Vec<String>,
    load_balancers: Option<LoadBalancerReport>,
    dns: Option<DnsReport>,
    devices: Vec<DeviceReport>,
    node: NodeReport,
    shortages: Shortages,
    announcements: Vec<AnnouncementReport>,
    bgp: Option<BgpReport>,
    bgp_conditions: Vec<String>,
}

impl Inner {
    /// The conditions of all kinds.
    fn conditions(&self) -> Vec<String> {
        let Self {
            progress,
            source_conditions,
            node_conditions,
            device_conditions,
            address_conditions,
            announce_conditions,
            bgp_conditions,
            ..
        } = self;
        let of_node = [&progress.conflicts, node_conditions, device_conditions].into_iter().flatten();
        let of_addresses = address_conditions.iter().chain(announce_conditions).chain(bgp_conditions);
        source_conditions.iter().chain(of_node).chain(of_addresses).cloned().collect()
    }
}

impl State {
    /// The state of an agent that has just started.
    pub fn new(node_name: String) -> Self {
        Self { node_name, started: Timestamp::now(), inner: Mutex::default(), board: Board::default() }
    }

    /// The state of health checks.
    pub(super) fn board(&self) -> Board {
        self.board.clone()
    }

    /// Ignores poisoning: a task that panics while it holds the lock ends the agent, and leaves the state valid.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that changes have arrived that are not in the kernel yet.
    pub(super) fn changed(&self) {
        self.lock().freshness.queued(Moment::now());
    }

    /// Records that the changes that have arrived need no map update.
    pub(super) fn nothing_to_do(&self) {
        self.lock().freshness.nothing_to_do();
    }

    /// Replaces the conditions of the source of Services, such as invalid objects.
    pub(super) fn set_source_conditions(&self, conditions: Vec<String>) {
        self.lock().source_conditions = conditions;
    }

    /// Replaces the conditions of the node.
    pub(super) fn set_node_conditions(&self, conditions: Vec<String>) {
        self.lock().node_conditions = conditions;
    }

    /// Replaces the conditions of the interfaces that are served.
    pub(super) fn set_device_conditions(&self, conditions: Vec<String>) {
        self.lock().device_conditions = conditions;
    }

    /// Replaces the conditions of announcements, such as invalid L2Advertisements.
    pub(super) fn set_announce_conditions(&self, conditions: Vec<String>) {
        self.lock().announce_conditions = conditions;
    }

    /// Replaces the addresses and settings of the node.
    pub(super) fn set_node(&self, node: NodeReport) {
        self.lock().node = node;
    }

    /// Replaces the addresses that are announced.
    pub(crate) fn set_announcements(&self, announcements: Vec<AnnouncementReport>) {
        self.lock().announcements = announcements;
    }

    /// Replaces what is announced by BGP.
    pub(crate) fn set_bgp(&self, report: BgpReport, conditions: Vec<String>) {
        let mut inner = self.lock();
        (inner.bgp, inner.bgp_conditions) = (Some(report), conditions);
    }

    /// Replaces the interfaces that are served.
    pub(super) fn set_devices(&self, devices: Vec<DeviceReport>) {
        self.lock().devices = devices;
    }

    /// Replaces what the controller of load balancers reports.
    pub(super) fn set_load_balancers(&self, report: LoadBalancerReport, conditions: Vec<String>) {
        let mut inner = self.lock();
        (inner.load_balancers, inner.address_conditions) = (Some(report), conditions);
    }

    /// Changes what the DNS server reports.
    pub(super) fn with_dns(&self, change: impl FnOnce(&mut DnsReport)) {
        change(self.lock().dns.get_or_insert_default());
    }

    /// Reads or changes the shortages.
    pub(super) fn with_shortages<T>(&self, with: impl FnOnce(&mut Shortages) -> T) -> T {
        with(&mut self.lock().shortages)
    }

    /// Records the result of a synchronisation.
    pub(super) fn progressed(&self, progress: Progress) {
        let mut inner = self.lock();
        if progress.failures.is_empty() {
            inner.freshness.updated(Moment::now());
        }
        inner.progress = progress;
    }

    /// The health of the agent.
    pub fn health(&self) -> Health {
        self.lock().freshness.health(Moment::now())
    }

    /// The report that `status` shows.
    pub fn report(&self, node_eligible: bool) -> Report {
        let inner = self.lock();
        let Inner { freshness, progress, .. } = &*inner;
        Report {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node_name: self.node_name.clone(),
            started: self.started,
            synchronised: freshness.is_synchronised(),
            healthy: freshness.health(Moment::now()).healthy,
            node_eligible,
            last_sync: freshness.last_updated(),
            services: progress.services,
            endpoints: progress.endpoints,
            pending: progress.pending,
            pending_since: freshness.waiting_since(),
            failures: progress.failures.clone(),
            problems: inner.conditions(),
            devices: inner.devices.clone(),
            node: inner.node.clone(),
            announcements: inner.announcements.clone(),
            bgp: inner.bgp.clone(),
            shortages: inner.shortages.report(Instant::now()),
            load_balancers: inner.load_balancers.clone(),
            dns: inner.dns.clone(),
            health_checks: self.board.report(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_is_unhealthy_until_its_first_complete_synchronisation() {
        let refused = || Progress { pending: 3, failures: vec!["no".to_owned()], ..Progress::default() };
        let state = State::new("a".to_owned());
        assert!(!state.health().healthy);
        state.changed();
        state.progressed(refused());
        assert!(!state.health().healthy);
        assert!(state.report(true).pending_since.is_some());
        state.progressed(Progress::default());
        assert!(state.health().healthy);
        assert!(state.report(true).last_sync.is_some());
        assert_eq!(state.report(true).pending_since, None);
    }

    #[test]
    fn service_that_waits_for_room_does_not_make_the_agent_unhealthy() {
        let state = State::new("a".to_owned());
        state.changed();
        state.progressed(Progress { pending: 1, ..Progress::default() });
        assert!(state.health().healthy);
        let report = state.report(true);
        assert_eq!((report.pending, report.pending_since), (1, None));
    }
}
