//! What the tasks of the agent know of each other: how far synchronisation is. Read by health, metrics and `status`.

use std::{
    net::IpAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::shortage::{ShortageReport, Shortages};
use crate::health::{Freshness, Health, Moment};

/// The agent's side of `lb-agent status`; what the status socket hands out.
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
    /// Whether everything that existed at the start is in the kernel.
    pub synchronised: bool,
    /// Whether everything is in the kernel, or has not waited for long. `/healthz` says 200 then, if the node is eligible.
    pub healthy: bool,
    /// Whether load balancers may send to the node: it is neither being deleted nor about to be removed.
    #[serde(default = "yes")]
    pub node_eligible: bool,
    /// When the kernel last was what it should be.
    pub last_sync: Option<Timestamp>,
    /// Service ports in the kernel.
    pub services: usize,
    /// Backends of all service ports in the kernel.
    pub endpoints: usize,
    /// Changes that are not in the kernel yet.
    pub pending: usize,
    /// Since when changes have been waiting.
    pub pending_since: Option<Timestamp>,
    /// What the kernel refused at the last attempt.
    pub failures: Vec<String>,
    /// What is wrong: bad documents, addresses that two Services claim, a node that does not forward packets.
    pub problems: Vec<String>,
    /// The devices that are served.
    pub devices: Vec<DeviceReport>,
    /// What is known of the node.
    pub node: NodeReport,
    /// What there is too little of. (An agent of another version may not tell.)
    #[serde(default)]
    pub shortages: Vec<ShortageReport>,
}

/// What the agent knows of its node, and makes of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    /// All of its addresses, without those of loopback scope.
    pub addresses: Vec<IpAddr>,
    /// Those that serve node ports; `127.0.0.1` and `::1` may be among them.
    pub node_port_addresses: Vec<IpAddr>,
    /// The one of each family that masqueraded packets come from where the routing table names none.
    pub primary: Vec<IpAddr>,
    /// How clients inside the cluster are told from others: kube-proxy's name of the mode, or `none`.
    pub detect_local: String,
    /// Networks of the clients inside the cluster.
    pub inside_networks: Vec<String>,
    /// Devices that clients inside the cluster send through.
    pub inside_devices: Vec<String>,
    /// Ranges of cluster IPs.
    pub service_ranges: Vec<String>,
    /// Whether packets to an address of these ranges that nobody has are dropped.
    pub drops_unknown_vips: bool,
    /// How clients from outside reach backends on other nodes where a Service says nothing: a name of `--north-south-mode`.
    pub north_south_mode: String,
    /// Through which tunnel, if so: a name of `--dsr-encapsulation`.
    pub dsr_encapsulation: String,
    /// Networks of the nodes that may send packets through a tunnel to backends here.
    pub dsr_peers: Vec<String>,
    /// First source port of masqueraded packets.
    pub masquerade_first_port: u16,
    /// Last source port of masqueraded packets.
    pub masquerade_last_port: u16,
}

/// An agent of before did not say; no other would be.
const fn yes() -> bool {
    true
}

/// A device that the agent serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceReport {
    /// Interface index in the agent's network namespace.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// `wire` or `workload`
    pub kind: String,
    /// Who runs the XDP program, `native` (the driver) or `generic` (the kernel); none where everything is served at tc.
    pub xdp: Option<String>,
}

/// What the writer has to say after an attempt to bring the kernel up to date.
#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) services: usize,
    pub(super) endpoints: usize,
    /// Steps that the kernel refused, and Services that wait for room.
    pub(super) pending: usize,
    pub(super) failures: Vec<String>,
    pub(super) conflicts: Vec<String>,
}

/// Shared by all tasks.
#[derive(Debug)]
pub struct State {
    node_name: String,
    started: Timestamp,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    freshness: Freshness,
    progress: Progress,
    source_problems: Vec<String>,
    node_problems: Vec<String>,
    devices: Vec<DeviceReport>,
    node: NodeReport,
    shortages: Shortages,
}

impl State {
    /// The state of an agent that has just started.
    pub fn new(node_name: String) -> Self {
        Self { node_name, started: Timestamp::now(), inner: Mutex::default() }
    }

    /// A panic while the lock is held ends the process anyway; what is inside is valid at any time.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes have come that are not in the kernel yet.
    pub(super) fn changed(&self) {
        self.lock().freshness.queued(Moment::now());
    }

    /// The changes that have come are without consequences for the kernel.
    pub(super) fn nothing_to_do(&self) {
        self.lock().freshness.nothing_to_do();
    }

    /// What is wrong with the objects, as their source sees it; replaces what it said before.
    pub(super) fn set_source_problems(&self, problems: Vec<String>) {
        self.lock().source_problems = problems;
    }

    /// What is wrong with the node; replaces what was wrong before.
    pub(super) fn set_node_problems(&self, problems: Vec<String>) {
        self.lock().node_problems = problems;
    }

    /// What is known of the node.
    pub(super) fn set_node(&self, node: NodeReport) {
        self.lock().node = node;
    }

    /// The devices that are served; replaces those before.
    pub(super) fn set_devices(&self, devices: Vec<DeviceReport>) {
        self.lock().devices = devices;
    }

    /// Looks at what there is too little of, or changes it.
    pub(super) fn with_shortages<T>(&self, with: impl FnOnce(&mut Shortages) -> T) -> T {
        with(&mut self.lock().shortages)
    }

    /// The kernel has been brought as far as possible.
    pub(super) fn progressed(&self, progress: Progress) {
        let mut inner = self.lock();
        if progress.failures.is_empty() {
            inner.freshness.updated(Moment::now());
        }
        inner.progress = progress;
    }

    /// How healthy the agent is.
    pub fn health(&self) -> Health {
        self.lock().freshness.health(Moment::now())
    }

    /// Everything `status` shows.
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
            problems: [&*inner.source_problems, &progress.conflicts, &inner.node_problems].concat(),
            devices: inner.devices.clone(),
            node: inner.node.clone(),
            shortages: inner.shortages.report(Instant::now()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn healthy_only_after_everything_was_in_the_kernel_once() {
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
    fn a_service_that_waits_for_room_does_not_make_the_agent_unhealthy() {
        let state = State::new("a".to_owned());
        state.changed();
        state.progressed(Progress { pending: 1, ..Progress::default() });
        assert!(state.health().healthy);
        let report = state.report(true);
        assert_eq!((report.pending, report.pending_since), (1, None));
    }
}
