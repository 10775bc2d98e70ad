//! State that the tasks of the agent share, such as the progress of synchronisation, conditions and shortages. Health
//! checks and `status` read it.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use jiff::Timestamp;

use super::{
    report::{DeviceReport, DnsReport, HealthzReport, Listener, LoadBalancerReport, NodeReport, Report},
    shortage::Shortages,
};
use crate::{
    announce::{AnnouncementReport, bgp::BgpReport},
    health::{Freshness, Health, Moment},
    metrics::AgentState,
    probe::Board,
};

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
    announcer_conditions: Vec<String>,
    coverage_conditions: Vec<String>,
    unannounced: Vec<AnnouncementReport>,
}

impl Inner {
    /// All conditions, grouped by what they are about; the name of a group is a label of the metric `lb_conditions`.
    fn conditions_by_subject(&self) -> [(&'static str, Vec<&String>); 10] {
        let Self {
            progress,
            source_conditions,
            node_conditions,
            device_conditions,
            address_conditions,
            announce_conditions,
            bgp_conditions,
            bound_conditions,
            announcer_conditions,
            healthz,
            unserved,
            dns,
            ..
        } = self;
        [
            ("services", source_conditions.iter().chain(&progress.conflicts).collect()),
            ("advice", self.advice().collect()),
            ("node", node_conditions.iter().collect()),
            ("devices", device_conditions.iter().collect()),
            ("addresses", address_conditions.iter().collect()),
            (
                "layer2",
                announce_conditions.iter().chain(bound_conditions).chain(announcer_conditions).collect(),
            ),
            ("bgp", bgp_conditions.iter().collect()),
            ("healthz", healthz.iter().filter_map(|healthz| healthz.problem.as_ref()).collect()),
            ("listeners", unserved.values().collect()),
            ("dns", dns.iter().flat_map(DnsReport::conditions).collect()),
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

    /// Replaces the conditions of interfaces: the programs that cannot be attached, and the wire devices that are not
    /// served at XDP for a reason that the administrator can remove.
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

    /// Replaces the conditions about what keeps this node from announcing addresses at layer 2.
    pub(crate) fn set_announcer_conditions(&self, conditions: Vec<String>) {
        self.lock().announcer_conditions = conditions;
    }

    /// Replaces the conditions about addresses that no advertisement covers, and the reports on these addresses.
    pub(crate) fn set_coverage(&self, conditions: Vec<String>, unannounced: Vec<AnnouncementReport>) {
        let mut inner = self.lock();
        (inner.coverage_conditions, inner.unannounced) = (conditions, unannounced);
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
            unannounced: inner.unannounced.clone(),
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
