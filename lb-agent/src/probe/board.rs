//! The state of all probed targets, shared by the prober and the status socket.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use jiff::Timestamp;
use lb_core::{
    model::ObjectName,
    probe::{Check, EndpointHealth, Monitor, State, Target, check::Probe},
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
    /// Milliseconds from one probe to the next, on average. While the results of a target contradict its verdict, the
    /// agent uses the timeout as the interval if the timeout is shorter, except for a target that is held because it
    /// flaps.
    pub interval_milliseconds: u64,
    /// Time limit of a probe, in milliseconds.
    pub timeout_milliseconds: u64,
    /// Number of successful probes in a row that make an unhealthy endpoint healthy, unless it is held because it
    /// flaps. The first result of an endpoint decides alone.
    pub healthy_threshold: u8,
    /// Number of failed probes in a row that make a healthy endpoint unhealthy. The first result of an endpoint decides
    /// alone.
    pub unhealthy_threshold: u8,
    /// Number of healthy targets.
    pub healthy: usize,
    /// Number of unhealthy targets.
    pub unhealthy: usize,
    /// Number of targets that have no verdict yet.
    pub unknown: usize,
    /// The targets that are unhealthy, or whose last probe has failed.
    pub failing: Vec<EndpointReport>,
    /// All other targets. Older agents do not report them.
    #[serde(default)]
    pub passing: Vec<PassingReport>,
}

/// A target (endpoint and port) that is unhealthy, or whose last probe has failed.
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
    /// Until when the target stays unhealthy, even if its probes succeed, because it flaps; `None` if nothing holds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_until: Option<Timestamp>,
    /// Why the last failed probe failed.
    pub reason: String,
}

/// A target (endpoint and port) that is healthy and whose last probe succeeded, or that has no result yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PassingReport {
    /// The endpoint's address.
    pub address: IpAddr,
    /// The port that is probed.
    pub port: u16,
    /// The target's verdict: `healthy`, or `unknown` before the first result.
    pub verdict: String,
    /// Since when the target is healthy; `None` before the first result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
}

impl Board {
    /// Locks the state. Ignores poisoning, because a task that panics ends the agent.
    pub(super) fn lock(&self) -> MutexGuard<'_, Monitor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The health checks of all Services that have one, with results, sorted by the Services' names.
    pub fn report(&self) -> Vec<CheckReport> {
        self.report_at(Timestamp::now())
    }

    fn report_at(&self, now: Timestamp) -> Vec<CheckReport> {
        let monitor = self.lock();
        let mut reports: BTreeMap<(&ObjectName, &Check), CheckReport> = BTreeMap::new();
        for (target, users, state) in monitor.targets() {
            for user in users {
                let report =
                    reports.entry((user, &target.check)).or_insert_with(|| report(user, &target.check));
                report.count(target, state, now);
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
        passing: Vec::new(),
    }
}

impl CheckReport {
    /// Whether the check applies to service ports of this protocol. A check of a kind that this version does not know
    /// applies to no protocol.
    pub fn covers(&self, protocol: &str) -> bool {
        let probe = self.check.parse::<Probe>();
        probe.is_ok_and(|Probe { kind, port }| port.is_some() || kind.protocol().as_str() == protocol)
    }

    /// Whether the check names the port to probe. Then its targets have this port, whichever port serves clients.
    pub fn names_port(&self) -> bool {
        self.check.parse::<Probe>().is_ok_and(|probe| probe.port.is_some())
    }

    fn count(&mut self, target: &Target, state: &State, now: Timestamp) {
        match state.verdict {
            EndpointHealth::Healthy => self.healthy += 1,
            EndpointHealth::Unhealthy => self.unhealthy += 1,
            EndpointHealth::Unknown => self.unknown += 1,
        }
        let Target { address, port, .. } = *target;
        let verdict = state.verdict.as_str().to_owned();
        match &state.failure {
            Some(reason) => self.failing.push(EndpointReport {
                address,
                port,
                verdict,
                since: timestamp(state.since),
                held_until: Some(timestamp(state.held_until)).filter(|until| *until > now),
                reason: reason.clone(),
            }),
            None => self.passing.push(PassingReport {
                address,
                port,
                verdict,
                since: (state.since > 0).then(|| timestamp(state.since)),
            }),
        }
    }
}

fn timestamp(unix: u64) -> Timestamp {
    i64::try_from(unix)
        .ok()
        .and_then(|seconds| Timestamp::from_second(seconds).ok())
        .unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lb_core::probe::{Failure, Reason, Timing};

    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    fn check(text: &str) -> Arc<Check> {
        let Probe { kind, port } = text.parse().unwrap();
        Arc::new(Check { kind, port, timing: Timing::default(), proxy_header: false })
    }

    /// The report on a healthy target, an unhealthy one and one without a result.
    fn reported() -> CheckReport {
        let board = Board::default();
        let web = ObjectName::new("default", "web");
        let mut monitor = board.lock();
        let targets =
            [5, 6, 7].map(|last| Target { address: [10, 1, 0, last].into(), port: 80, check: check("tcp") });
        for target in &targets {
            monitor.set(target, vec![web.clone()], Duration::ZERO);
        }
        while monitor.start(NOW).is_some() {}
        monitor.finish(&targets[0], Ok(()), NOW, 1_000);
        let failure = Failure::new(Reason::Refused, "connection refused");
        monitor.finish(&targets[1], Err(failure), NOW, 2_000);
        drop(monitor);
        let [report] = <[CheckReport; 1]>::try_from(board.report()).unwrap();
        report
    }

    #[test]
    fn every_target_is_reported_with_its_verdict() {
        let CheckReport { healthy, unhealthy, unknown, failing, passing, .. } = reported();
        assert_eq!((healthy, unhealthy, unknown), (1, 1, 1));
        let [failed] = &failing[..] else { panic!("{failing:?}") };
        assert_eq!((&*failed.verdict, &*failed.reason), ("unhealthy", "connection refused"));
        let passing = passing.iter().map(|it| (it.address.to_string(), &*it.verdict, it.since));
        let since = Timestamp::from_second(1_000).ok();
        assert_eq!(
            passing.collect::<Vec<_>>(),
            [("10.1.0.5".to_owned(), "healthy", since), ("10.1.0.7".to_owned(), "unknown", None)]
        );
    }

    #[test]
    fn hold_of_a_flapping_target_is_reported_until_it_ends() {
        let board = Board::default();
        let target = Target { address: [10, 1, 0, 5].into(), port: 80, check: check("tcp") };
        let mut monitor = board.lock();
        monitor.set(&target, vec![ObjectName::new("default", "web")], Duration::ZERO);
        let results = (0..4).flat_map(|_| [true, false].into_iter().flat_map(|passes| [passes; 5]));
        for (number, passes) in (10..).zip(results) {
            let now = Duration::from_secs(12 * number);
            assert_eq!(monitor.start(now).as_ref(), Some(&target));
            let failure = Failure::new(Reason::Refused, "connection refused");
            monitor.finish(&target, if passes { Ok(()) } else { Err(failure) }, now, 1_000);
        }
        let until = monitor.targets().next().unwrap().2.held_until;
        drop(monitor);
        let at = |unix| board.report_at(timestamp(unix))[0].failing[0].held_until;
        assert!(until > 1_000, "four falls within ten minutes begin a hold");
        assert_eq!(
            [at(1_000), at(until - 1), at(until)],
            [Some(timestamp(until)), Some(timestamp(until)), None]
        );
    }

    #[test]
    fn report_of_an_older_agent_is_read() {
        let mut report = serde_json::to_value(reported()).unwrap();
        report.as_object_mut().unwrap().remove("passing");
        let report: CheckReport = serde_json::from_value(report).unwrap();
        assert_eq!((report.passing.len(), report.failing.len()), (0, 1));
    }

    #[test]
    fn check_covers_the_ports_that_it_probes() {
        let covers = |text: &str| {
            let report = CheckReport { check: text.to_owned(), ..reported() };
            ["TCP", "UDP", "SCTP"].map(|protocol| report.covers(protocol))
        };
        assert_eq!(covers("http:///healthz"), [true, false, false]);
        assert_eq!(covers("dns"), [false, true, false]);
        assert_eq!(covers("tcp://:9000"), [true, true, true]);
        assert_eq!(covers("of-a-later-version"), [false, false, false]);
    }
}
