//! The state of all targets, as the prober and the status socket share it.

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

/// The state of all targets. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Board(Arc<Mutex<Monitor>>);

/// The health check of a Service, and what it shows on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckReport {
    /// `metadata.namespace` of the Service.
    pub namespace: String,
    /// `metadata.name`
    pub name: String,
    /// The check, as in the annotation `lb.dev/health-check`.
    pub check: String,
    /// Milliseconds from one probe to the next.
    pub interval_milliseconds: u64,
    /// Milliseconds that a probe may take.
    pub timeout_milliseconds: u64,
    /// Good results in a row that make an endpoint healthy.
    pub healthy_threshold: u8,
    /// Failures in a row that make an endpoint unhealthy.
    pub unhealthy_threshold: u8,
    /// Number of healthy targets.
    pub healthy: usize,
    /// Number of unhealthy targets.
    pub unhealthy: usize,
    /// Number of targets without a result yet.
    pub unknown: usize,
    /// The targets that are unhealthy, or whose last probe has failed.
    pub failing: Vec<EndpointReport>,
}

/// A target whose probes fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointReport {
    /// The endpoint's address.
    pub address: IpAddr,
    /// The port that is probed.
    pub port: u16,
    /// `healthy` or `unhealthy`
    pub verdict: String,
    /// Since when.
    pub since: Timestamp,
    /// The last failure.
    pub reason: String,
}

impl Board {
    /// Ignores poisoning: a task that panics while it holds the lock ends the agent.
    pub(super) fn lock(&self) -> MutexGuard<'_, Monitor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The health checks of all Services that have one, sorted by their names.
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
                since: since(state),
                reason: reason.clone(),
            });
        }
    }
}

fn since(state: &State) -> Timestamp {
    i64::try_from(state.since)
        .ok()
        .and_then(|seconds| Timestamp::from_second(seconds).ok())
        .unwrap_or(Timestamp::UNIX_EPOCH)
}
