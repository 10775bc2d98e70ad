//! State that the tasks of the agent share, such as the progress of synchronisation, conditions and shortages. Health
//! checks and `status` read it.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::shortage::{ShortageReport, Shortages};
use crate::{
    announce::{AnnouncementReport, bgp::BgpReport},
    health::{Freshness, Health, Moment},
    metrics::AgentState,
    probe::{Board, CheckReport},
};

/// The agent's answer at the status socket, which `lb-agent status` shows.
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
    /// Whether at least one synchronisation has completed: the Services are in the kernel.
    pub synchronised: bool,
    /// Whether the agent has synchronised at least once, and no change has waited for too long. If the node is also
    /// eligible, `/healthz` answers 200.
    pub healthy: bool,
    /// Whether no change has waited for too long: `/livez` answers 200. Older agents do not report it.
    #[serde(default = "yes")]
    pub alive: bool,
    /// State of the server of `/healthz` and `/livez`; `None` without `--healthz-bind-address`. Older agents do not
    /// report it.
    #[serde(default)]
    pub healthz: Option<HealthzReport>,
    /// Whether load balancers may send traffic to the node: it is neither being deleted nor about to be removed.
    #[serde(default = "yes")]
    pub node_eligible: bool,
    /// Time of the last complete synchronisation.
    pub last_sync: Option<Timestamp>,
    /// Number of service ports in the kernel.
    pub services: usize,
    /// Number of backends of all service ports in the kernel.
    pub endpoints: usize,
    /// The work that remained after the last synchronisation: the number of map updates, plus the number of Services
    /// that it did not plan or that wait for room in a map.
    pub pending: usize,
    /// Arrival time of the oldest change that is not in the kernel yet.
    pub pending_since: Option<Timestamp>,
    /// Errors of the last synchronisation.
    pub failures: Vec<String>,
    /// All conditions, such as invalid manifests, addresses that two Services claim, or a node that does not forward
    /// packets. Includes those of `advice`, which need no attention; `failures` and `shortages` are separate.
    pub problems: Vec<String>,
    /// Those of `problems` that only give advice: these can stay, and do not mean that anything is wrong. Older agents
    /// do not report which these are.
    #[serde(default)]
    pub advice: Vec<String>,
    /// The interfaces on which the agent keeps BPF programs, including those on which it cannot attach them now.
    pub devices: Vec<DeviceReport>,
    /// Addresses and settings of the node.
    pub node: NodeReport,
    /// The addresses that members announce, or should announce, at layer 2, and those that this node announces by BGP.
    /// Older agents do not report them.
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
    /// State of the DNS server; `None` without `--dns-bind-address` and `--dns-intercept`. Older agents do not report
    /// it.
    #[serde(default)]
    pub dns: Option<DnsReport>,
    /// The health checks of endpoints, with their results on this node. Older agents do not report them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub health_checks: Vec<CheckReport>,
}

/// State of the server of `/healthz` and `/livez`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthzReport {
    /// The address of `--healthz-bind-address`.
    pub address: SocketAddr,
    /// Whether this agent listens at the address.
    pub listens: bool,
    /// Why the agent cannot listen there, and what to do; `None` if it listens or has not tried yet.
    pub problem: Option<String>,
}

impl HealthzReport {
    /// The state before the first attempt to listen.
    pub(super) const fn untried(address: SocketAddr) -> Self {
        Self { address, listens: false, problem: None }
    }

    /// The state after an attempt to listen.
    pub(super) fn after(address: SocketAddr, attempt: Result<(), &io::Error>) -> Self {
        let problem = attempt.err().map(|error| Listener::Healthz.refused(address, error));
        Self { address, listens: problem.is_none(), problem }
    }
}

/// An HTTP server of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Listener {
    /// `/healthz` and `/livez`.
    Healthz,
    /// `/metrics`, and pages such as `/configz` at the same address.
    Metrics,
    /// The pages for a browser.
    Web,
}

impl Listener {
    /// The name of what the server serves, for messages.
    pub(super) const fn served(self) -> &'static str {
        match self {
            Self::Healthz => "/healthz",
            Self::Metrics => "/metrics",
            Self::Web => "the pages for a browser",
        }
    }

    /// The flag that sets the server's address.
    const fn flag(self) -> &'static str {
        match self {
            Self::Healthz => "--healthz-bind-address",
            Self::Metrics => "--metrics-bind-address",
            Self::Web => "--web-bind-address",
        }
    }

    /// Why the server does not listen at the address, and what to do.
    fn refused(self, address: SocketAddr, error: &io::Error) -> String {
        let (what, flag) = (self.served(), self.flag());
        let kind = error.kind();
        let advice = if kind == io::ErrorKind::AddrInUse {
            format!(
                "another process, for example kube-proxy, has the port: stop it, or set {flag} to a free port"
            )
        } else if kind == io::ErrorKind::AddrNotAvailable {
            format!("set {flag} to an address of this node")
        } else {
            format!("set {flag} to a port that this process may use")
        };
        format!("{what}: cannot listen on {address}: {error}: {advice}; the agent keeps trying")
    }
}

/// State of the DNS server, as `status` shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DnsReport {
    /// The addresses of `--dns-bind-address`. The server listens at those that are not in `unserved`.
    pub addresses: Vec<SocketAddr>,
    /// The addresses of `--dns-bind-address` at which the server cannot listen, each with the error.
    #[serde(default)]
    pub unserved: BTreeMap<SocketAddr, String>,
    /// The DNS domain that contains the names of Services.
    pub domain: String,
    /// The upstream servers that the agent asks for names outside `domain`.
    pub upstreams: Vec<SocketAddr>,
    /// Upstream servers that the agent does not ask, because they lead back to the agent.
    pub loops: Vec<SocketAddr>,
    /// State of node-local DNS; `None` without `--dns-intercept`. Older agents do not report it.
    #[serde(default)]
    pub intercept: Option<InterceptReport>,
}

/// State of node-local DNS, as `status` shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InterceptReport {
    /// The DNS Service, as `NAMESPACE/NAME`.
    pub service: String,
    /// The cluster IPs of the Service, if it has a UDP port 53; else none.
    pub cluster_ips: Vec<IpAddr>,
    /// The addresses of this agent to which the programs redirect queries now; without any, queries go to the endpoints
    /// of the Service.
    pub servers: Vec<SocketAddr>,
    /// Why queries, or those to one of the node's addresses, do not go to this agent, and what to do; `None` if no
    /// reason is known.
    pub problem: Option<String>,
}

/// State of the controller that assigns addresses to the cluster's Services of type LoadBalancer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadBalancerReport {
    /// Node of the elected agent; `None` while no agent is elected.
    pub leader: Option<String>,
    /// Whether the reporting agent is the elected one.
    pub is_here: bool,
    /// Use of each address pool; empty unless the reporting agent is elected.
    pub pools: Vec<PoolReport>,
}

/// How many addresses of a pool are in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolReport {
    /// The name of the pool.
    pub name: String,
    /// Number of the pool's addresses that are assigned to Services.
    pub used: u64,
    /// Number of addresses that the pool can assign.
    pub total: u64,
}

/// Addresses and settings of the node, as `status` shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    /// Addresses of the node on interfaces that are up, without loopback and IPv6 link-local ones, and without those of
    /// an interface that kube-proxy (mode ipvs) or kube-router has left.
    pub addresses: Vec<IpAddr>,
    /// Addresses that serve node ports; may include `127.0.0.1` and `::1`.
    #[serde(rename = "nodePortAddresses")]
    pub nodeport_addresses: Vec<IpAddr>,
    /// Source of masqueraded packets if the routing table names none; at most one address of each family.
    pub primary: Vec<IpAddr>,
    /// How the agent recognises internal clients: kube-proxy's name of the mode, or `none`.
    pub detect_local: String,
    /// Networks whose clients are internal.
    pub internal_networks: Vec<String>,
    /// Interfaces through which packets of internal clients enter.
    pub internal_devices: Vec<String>,
    /// Ranges of cluster IPs.
    pub service_ranges: Vec<String>,
    /// Whether packets to unassigned addresses in `service_ranges` are dropped.
    pub drops_unknown_vips: bool,
    /// How packets of external clients reach backends on other nodes by default: a value of `--north-south-mode`.
    pub north_south_mode: String,
    /// Tunnel of the modes dsr and hybrid: a value of `--dsr-encapsulation`.
    pub dsr_encapsulation: String,
    /// Networks and addresses of the machines that may send tunnelled packets to backends on this node.
    pub dsr_peers: Vec<String>,
    /// Networks whose external clients may use no frontend: those of `--deny-source`, and those behind IPsec policies
    /// that replies would bypass. Older agents do not report them.
    #[serde(default)]
    pub denied_sources: Vec<String>,
    /// First port of the range of source ports for masqueraded packets.
    pub masquerade_first_port: u16,
    /// Last port of the range of source ports for masqueraded packets.
    pub masquerade_last_port: u16,
}

/// The default of `alive` and `node_eligible`, which older agents do not report.
const fn yes() -> bool {
    true
}

/// An interface of the node on which the agent keeps BPF programs. It may lack some of them while the agent cannot
/// attach them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceReport {
    /// Interface index in the agent's network namespace.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// Kind of the interface: `wire`, `workload` or `catch`.
    pub kind: String,
    /// Mode of the XDP program: `native` (the driver runs it) or `generic` (the kernel's network stack runs it); `None`
    /// if the interface is served at tc only.
    pub xdp: Option<String>,
}

/// Result of one synchronisation of the kernel with the Services.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) services: usize,
    pub(super) endpoints: usize,
    /// The work that remains: the number of map updates, plus the number of Services that were not planned or that wait
    /// for room in a map.
    pub(super) pending: usize,
    pub(super) failures: Vec<String>,
    pub(super) conflicts: Vec<String>,
    /// Conditions that only give advice about Services. They can stay permanently, and do not mean that anything is
    /// wrong.
    pub(super) advice: Vec<String>,
}

/// The state that tasks of the agent share.
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
    healthz: Option<HealthzReport>,
    /// Why a server other than that of `/healthz` does not listen.
    unserved: BTreeMap<Listener, String>,
    load_balancers: Option<LoadBalancerReport>,
    dns: Option<DnsReport>,
    devices: Vec<DeviceReport>,
    node: NodeReport,
    shortages: Shortages,
    announcements: Vec<AnnouncementReport>,
    bgp: Option<BgpReport>,
    bgp_announcements: Vec<AnnouncementReport>,
    bgp_conditions: Vec<String>,
    bound_conditions: Vec<String>,
    coverage_conditions: Vec<String>,
}

impl Inner {
    /// All conditions, grouped by what they are about; the name of a group is a label of the metric `lb_conditions`.
    fn conditions_by_subject(&self) -> [(&'static str, Vec<&String>); 9] {
        let Self {
            progress,
            source_conditions,
            node_conditions,
            device_conditions,
            address_conditions,
            announce_conditions,
            bgp_conditions,
            bound_conditions,
            healthz,
            unserved,
            ..
        } = self;
        [
            ("services", source_conditions.iter().chain(&progress.conflicts).collect()),
            ("advice", self.advice().collect()),
            ("node", node_conditions.iter().collect()),
            ("devices", device_conditions.iter().collect()),
            ("addresses", address_conditions.iter().collect()),
            ("layer2", announce_conditions.iter().chain(bound_conditions).collect()),
            ("bgp", bgp_conditions.iter().collect()),
            ("healthz", healthz.iter().filter_map(|healthz| healthz.problem.as_ref()).collect()),
            ("listeners", unserved.values().collect()),
        ]
    }

    /// The conditions that only give advice.
    fn advice(&self) -> impl Iterator<Item = &String> {
        self.progress.advice.iter().chain(&self.coverage_conditions)
    }

    /// The reports on all announced addresses, by address; layer 2 comes before BGP.
    fn all_announcements(&self) -> Vec<AnnouncementReport> {
        let mut all: Vec<_> = self.announcements.iter().chain(&self.bgp_announcements).cloned().collect();
        all.sort_by_key(|report| (report.address, report.by));
        all
    }

    /// All conditions, each once: several tasks report a pool that cannot be read.
    fn conditions(&self) -> Vec<String> {
        let mut known = BTreeSet::new();
        let all = self.conditions_by_subject().into_iter().flat_map(|(_, conditions)| conditions);
        all.filter(|condition| known.insert(*condition)).cloned().collect()
    }
}

impl State {
    /// Creates the state of an agent that has just started.
    pub fn new(node_name: String) -> Self {
        Self { node_name, started: Timestamp::now(), inner: Mutex::default(), board: Board::default() }
    }

    /// The results of the endpoints' health checks.
    pub(super) fn board(&self) -> Board {
        self.board.clone()
    }

    /// Ignores poisoning of the lock: a task that panics ends the agent, and leaves the state valid.
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

    /// Replaces the conditions of the node, such as that it does not forward packets.
    pub(super) fn set_node_conditions(&self, conditions: Vec<String>) {
        self.lock().node_conditions = conditions;
    }

    /// Replaces the conditions of interfaces: the wire devices that are not served at XDP for a reason that the
    /// administrator can remove.
    pub(super) fn set_device_conditions(&self, conditions: Vec<String>) {
        self.lock().device_conditions = conditions;
    }

    /// Replaces the conditions of announcements, such as invalid L2Advertisements.
    pub(super) fn set_announce_conditions(&self, conditions: Vec<String>) {
        self.lock().announce_conditions = conditions;
    }

    /// Replaces the state of the server of `/healthz`.
    pub(super) fn set_healthz(&self, healthz: HealthzReport) {
        self.lock().healthz = Some(healthz);
    }

    /// Records whether the server listens at its address.
    pub(super) fn record_attempt(
        &self,
        listener: Listener,
        address: SocketAddr,
        attempt: Result<(), &io::Error>,
    ) {
        let mut inner = self.lock();
        match (listener, attempt) {
            (Listener::Healthz, _) => inner.healthz = Some(HealthzReport::after(address, attempt)),
            (Listener::Metrics | Listener::Web, Ok(())) => drop(inner.unserved.remove(&listener)),
            (Listener::Metrics | Listener::Web, Err(error)) => {
                inner.unserved.insert(listener, listener.refused(address, error));
            }
        }
    }

    /// Replaces the addresses and settings of the node.
    pub(super) fn set_node(&self, node: NodeReport) {
        self.lock().node = node;
    }

    /// Replaces the report on the addresses that are announced at layer 2.
    pub(crate) fn set_announcements(&self, announcements: Vec<AnnouncementReport>) {
        self.lock().announcements = announcements;
    }

    /// Replaces the conditions about announced addresses that are also assigned to a device of this node.
    pub(crate) fn set_bound_conditions(&self, conditions: Vec<String>) {
        self.lock().bound_conditions = conditions;
    }

    /// Replaces the conditions about addresses that no advertisement covers.
    pub(crate) fn set_coverage_conditions(&self, conditions: Vec<String>) {
        self.lock().coverage_conditions = conditions;
    }

    /// Replaces the report on BGP, the reports on the addresses that this node announces by BGP, and the conditions
    /// about BGP.
    pub(crate) fn set_bgp(
        &self,
        report: BgpReport,
        announcements: Vec<AnnouncementReport>,
        conditions: Vec<String>,
    ) {
        let mut inner = self.lock();
        (inner.bgp, inner.bgp_announcements) = (Some(report), announcements);
        inner.bgp_conditions = conditions;
    }

    /// Replaces the list of interfaces on which the agent keeps BPF programs.
    pub(super) fn set_devices(&self, devices: Vec<DeviceReport>) {
        self.lock().devices = devices;
    }

    /// Replaces the report of the load balancer controller, and its conditions.
    pub(super) fn set_load_balancers(&self, report: LoadBalancerReport, conditions: Vec<String>) {
        let mut inner = self.lock();
        (inner.load_balancers, inner.address_conditions) = (Some(report), conditions);
    }

    /// Changes the report on the DNS server.
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

    /// Whether the agent is healthy and alive, as of now.
    pub fn health(&self) -> Health {
        self.lock().freshness.health(Moment::now())
    }

    /// The report that `status` shows. `node_eligible`: whether load balancers may send traffic to the node.
    pub fn report(&self, node_eligible: bool) -> Report {
        let inner = self.lock();
        let Inner { freshness, progress, .. } = &*inner;
        let health = freshness.health(Moment::now());
        Report {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node_name: self.node_name.clone(),
            started: self.started,
            synchronised: freshness.is_synchronised(),
            healthy: health.healthy,
            alive: health.alive,
            healthz: inner.healthz.clone(),
            node_eligible,
            last_sync: freshness.last_updated(),
            services: progress.services,
            endpoints: progress.endpoints,
            pending: progress.pending,
            pending_since: freshness.waiting_since(),
            failures: progress.failures.clone(),
            problems: inner.conditions(),
            advice: inner.advice().cloned().collect(),
            devices: inner.devices.clone(),
            node: inner.node.clone(),
            announcements: inner.all_announcements(),
            bgp: inner.bgp.clone(),
            shortages: inner.shortages.report(Instant::now()),
            load_balancers: inner.load_balancers.clone(),
            dns: inner.dns.clone(),
            health_checks: self.board.report(),
        }
    }
}

impl AgentState for Arc<State> {
    fn is_healthy(&self) -> bool {
        self.health().healthy
    }

    fn condition_counts(&self) -> Vec<(&'static str, usize)> {
        let inner = self.lock();
        let by_subject = inner.conditions_by_subject().into_iter();
        by_subject.map(|(about, conditions)| (about, conditions.len())).collect()
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
    fn failure_to_serve_healthz_is_a_condition_until_the_agent_listens() {
        let address = "0.0.0.0:10256".parse().unwrap();
        let state = Arc::new(State::new("a".to_owned()));
        let conditions = || {
            let counted =
                state.condition_counts().into_iter().find(|(about, _)| *about == "healthz").unwrap();
            (state.report(true).problems, counted.1)
        };
        assert_eq!(state.report(true).healthz, None);
        state.set_healthz(HealthzReport::untried(address));
        assert_eq!(conditions(), (vec![], 0));
        for (kind, parts) in [
            (io::ErrorKind::AddrInUse, ["kube-proxy", "stop it", "free port"]),
            (io::ErrorKind::AddrNotAvailable, ["not available", "an address of this node", "keeps trying"]),
        ] {
            state.set_healthz(HealthzReport::after(address, Err(&kind.into())));
            let (problems, count) = conditions();
            let [problem] = &problems[..] else { panic!("{problems:?}") };
            assert_eq!(count, 1);
            for part in ["/healthz", "0.0.0.0:10256"].iter().chain(&parts) {
                assert!(problem.contains(part), "{part}: {problem}");
            }
        }
        state.set_healthz(HealthzReport::after(address, Ok(())));
        assert_eq!(conditions(), (vec![], 0));
    }

    #[test]
    fn server_that_cannot_listen_is_a_condition_until_it_does() {
        let address = "127.0.0.1:10249".parse().unwrap();
        let state = Arc::new(State::new("a".to_owned()));
        state.record_attempt(Listener::Metrics, address, Err(&io::ErrorKind::AddrInUse.into()));
        let problems = state.report(true).problems;
        let [problem] = &problems[..] else { panic!("{problems:?}") };
        for part in ["/metrics", "127.0.0.1:10249", "--metrics-bind-address to a free port"] {
            assert!(problem.contains(part), "{part}: {problem}");
        }
        assert!(state.condition_counts().contains(&("listeners", 1)));
        state.record_attempt(Listener::Web, address, Err(&io::ErrorKind::AddrNotAvailable.into()));
        assert_eq!(state.report(true).problems.len(), 2);
        state.record_attempt(Listener::Metrics, address, Ok(()));
        let problems = state.report(true).problems;
        assert!(problems[0].contains("--web-bind-address to an address of this node"), "{problems:?}");
    }

    #[test]
    fn condition_that_several_tasks_report_is_listed_once() {
        let state = State::new("a".to_owned());
        let texts = |texts: [&str; 2]| texts.map(str::to_owned).to_vec();
        state.set_node_conditions(texts(["node", "pool"]));
        state.set_announce_conditions(texts(["pool", "advertisement"]));
        assert_eq!(state.report(true).problems, ["node", "pool", "advertisement"]);
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
