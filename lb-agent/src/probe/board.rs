//! The state of all probed targets, shared by the prober and the status socket.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use jiff::Timestamp;
use lb_core::{
    model::ObjectName,
    probe::{Check, Monitor, State, Target, Verdict},
};
use serde::{Deserialize, Serialize};

/// The state of all probed targets (endpoint ports), behind a lock. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Board(Arc<Mutex<Monitor>>);

/// The health check of one Service's endpoints, with its results on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckReport {
    /// `metadata.namespace` of the Service.
    pub namespace: String,
    /// `metadata.name` of the Service.
    pub name: String,
    /// The check, as in the annotation `lb.dev/health-check`.
    pub check: String,
    /// Milliseconds from one probe to the next.
    pub interval_milliseconds: u64,
    /// Time limit of a probe, in milliseconds.
    pub timeout_milliseconds: u64,
    /// Number of successful probes in a row that make an endpoint healthy.
    pub healthy_threshold: u8,
    /// Number of failed probes in a row that make an endpoint unhealthy.
    pub unhealthy_threshold: u8,
    /// Number of healthy targets.
    pub healthy: usize,
    /// Number of unhealthy targets.
    pub unhealthy: usize,
    /// Number of targets whose probes have shown nothing yet.
    pub unknown: usize,
    /// The targets that are unhealthy, or whose last probe has failed.
    pub failing: Vec<EndpointReport>,
}

/// A target (endpoint and port) whose probes fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointReport {
    /// The endpoint's address.
    pub address: IpAddr,
    /// The port that is probed.
    pub port: u16,
    /// The target's verdict: `healthy` or `unhealthy`.
    pub verdict: String,
    /// Since when the target has this verdict.
    pub since: Timestamp,
    /// Until when the target stays unhealthy although its probes succeed, because it flaps; `None` if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_until: Option<Timestamp>,
    /// Why the last failed probe failed.
    pub reason: String,
}

impl Board {
    /// Locks the state. Ignores poisoning, because a task that panics ends the agent.
    pub(super) fn lock(&self) -> MutexGuard<'_, Monitor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The health checks of all Services that have one, with results, sorted by the Services' names.
    pub fn report(&self) -> Vec<CheckReport> {
        let monitor = self.lock();
        let mut reports: BTreeMap<(&ObjectName, &Check), CheckReport> = BTreeMap::new();
        for (target, users, state) in monitor.targets() {
            for user in users {
                let report =
                    reports.entry((user, &target.check)).or_insert_with(|| report(user, &target.check));
                report.count(target, state);
            }
        }
        reports.into_values().collect()
    }
}

fn report(service: &ObjectName, check: &Check) -> CheckReport {
    let milliseconds = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    CheckReport {
        namespace: service.namespace.to_string(),
        name: service.name.to_string(),
        check: check.to_string(),
        interval_milliseconds: milliseconds(check.timing.interval),
        timeout_milliseconds: milliseconds(check.timing.timeout),
        healthy_threshold: check.timing.healthy,
        unhealthy_threshold: check.timing.unhealthy,
        healthy: 0,
        unhealthy: 0,
        unknown: 0,
        failing: Vec::new(),
    }
}

impl CheckReport {
    fn count(&mut self, target: &Target, state: &State) {
        match state.verdict {
            Verdict::Healthy => self.healthy += 1,
            Verdict::Unhealthy => self.unhealthy += 1,
            Verdict::Unknown => self.unknown += 1,
        }
        if let Some(reason) = &state.failure {
            self.failing.push(EndpointReport {
                address: target.address,
                port: target.port,
                verdict: state.verdict.as_str().to_owned(),
                since: timestamp(state.since),
                held_until: (state.held_until > 0).then(|| timestamp(state.held_until)),
                reason: reason.clone(),
            });
        }
    }
}

fn timestamp(unix: u64) -> Timestamp {
    i64::try_from(unix)
        .ok()
        .and_then(|seconds| Timestamp::from_second(seconds).ok())
        .unwrap_or(Timestamp::UNIX_EPOCH)
}
