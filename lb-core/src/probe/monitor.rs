//! The state of every probed target: when its next probe is due, and what its results mean.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use lb_common::{Address, hash::of_endpoint};

use super::{
    failure::{Failure, Reason},
    shares::{Due, Share, Shares},
    target::{Target, alike},
};
use crate::model::ObjectName;

/// Percentage of the interval by which a probe may be early or late. (For the second probe of a target, it is
/// [`FIRST_JITTER`], because all first probes are close together when the agent starts.)
const JITTER: u64 = 10;
const FIRST_JITTER: u64 = 50;

/// A target flaps if it becomes unhealthy more than [`MOST_FALLS`] times within this time.
const FLAP_WINDOW: Duration = Duration::from_mins(10);
const MOST_FALLS: usize = 3;
/// How long a target that begins to flap is held unhealthy. The time doubles for each further change to unhealthy
/// within [`FLAP_WINDOW`], up to [`LONGEST_HOLD`].
const HOLD: Duration = Duration::from_mins(1);
const LONGEST_HOLD: Duration = Duration::from_mins(10);

/// The verdict of the probes about an endpoint, which decides whether the endpoint gets new flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum EndpointHealth {
    /// No result yet: the endpoint gets new flows, and the first result decides.
    #[default]
    Unknown,
    /// The endpoint gets new flows.
    Healthy,
    /// The endpoint gets no new flows, unless all endpoints that a frontend may choose are unhealthy and the Service is
    /// not `fail-closed`.
    Unhealthy,
}

impl EndpointHealth {
    /// The verdict's name in outputs and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Healthy => "healthy",
            Self::Unhealthy => "unhealthy",
        }
    }
}

/// What the probes of a target have shown so far.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct State {
    /// The verdict of the probes so far.
    pub verdict: EndpointHealth,
    /// When the verdict began, in seconds since the Unix epoch; 0 while it is unknown.
    pub since: u64,
    /// Text of the last failure; `None` if enough good results followed it.
    pub failure: Option<String>,
    /// Until when the target stays unhealthy although its probes succeed, because it flaps: in seconds since the Unix
    /// epoch, for display; 0 if the last change of the verdict began no such hold.
    pub held_until: u64,
    /// [`Self::held_until`] on the caller's clock.
    hold: Duration,
    /// Number of results in a row that contradict the verdict, up to the threshold; a hint of failure may count as one
    /// such result.
    contrary: u8,
    /// When the target changed from healthy to unhealthy: the last time, and the times within [`FLAP_WINDOW`] before
    /// it; oldest first.
    falls: VecDeque<Duration>,
}

/// What the next agent must know about an unhealthy target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// When the target became unhealthy, in seconds since the Unix epoch.
    pub since: u64,
    /// Text of the last failure.
    pub failure: String,
}

#[derive(Clone, Debug, Default)]
struct Watched {
    users: Vec<ObjectName>,
    state: State,
    round: u64,
    /// When the next probe is due; while a probe runs, when it began.
    at: Duration,
    stage: Stage,
    /// Whether a hint of failure has arrived since the last result.
    is_suspected: bool,
}

/// The present stage of a target's round of probes.
#[derive(Clone, Debug, Default)]
enum Stage {
    /// The next probe is due at [`Watched::at`]; [`Monitor::due`] has the target.
    #[default]
    Due,
    /// The next probe is due, and waits until another probe of this share has ended.
    Waits(Share),
    /// A probe runs, and counts for this Service.
    Probed(ObjectName),
}

/// The state of all targets. Times are durations since any fixed instant; the caller has the clock.
#[derive(Clone, Debug, Default)]
pub struct Monitor {
    /// A number that differs between nodes, so that they probe an endpoint at different times.
    seed: u64,
    watched: BTreeMap<Target, Watched>,
    due: BTreeSet<Due>,
    shares: Shares,
    /// Targets that an earlier agent found unhealthy, and that no Service of this agent has used yet.
    remembered: BTreeMap<Target, Memory>,
    /// Targets that an earlier agent found unhealthy, and whose state a target with another check has taken over.
    taken_over: Vec<Target>,
    /// Number of targets with each [`EndpointHealth`].
    counts: [usize; 3],
}

impl Monitor {
    /// Maximum number of probes that the caller runs at once. Of these, one Service gets at most half, and one
    /// namespace at most three quarters.
    pub const MOST_PROBES: usize = 512;

    /// Creates a monitor without targets. `remembered` are the targets that were unhealthy when an earlier agent
    /// stopped: they stay unhealthy until good results follow. [`Self::forget_unused`] drops the targets that no
    /// Service uses.
    pub fn new(seed: u64, remembered: BTreeMap<Target, Memory>) -> Self {
        Self { seed, remembered, ..Self::default() }
    }

    /// Sets the Services that use a target; a target without users is no longer probed. A new target begins with the
    /// state of a known target that has the same address, port and kind of check, so that a changed interval changes no
    /// verdict. Pass new targets before targets without users, so that the new ones can take over the state of the
    /// others. Returns whether a new target is unhealthy; `None` if it is not new.
    pub fn set(&mut self, target: &Target, users: Vec<ObjectName>, now: Duration) -> Option<bool> {
        if users.is_empty() {
            self.remove(target);
            return None;
        }
        if let Some(watched) = self.watched.get_mut(target) {
            if let Stage::Waits(share) = &watched.stage
                && watched.users.first() != users.first()
            {
                // The target has waited for another probe of its first Service to end, but now has another first
                // Service.
                let due = (watched.at, target.clone());
                self.shares.leave(share, &due);
                self.due.insert(due);
                watched.stage = Stage::Due;
            }
            watched.users = users;
            return None;
        }
        let state = self.first_state(target);
        let verdict = state.verdict;
        self.counts[verdict as usize] += 1;
        let at = now + part(hash(self.seed, target, 0), target.check.timing.fast());
        self.watched.insert(target.clone(), Watched { users, state, at, ..Watched::default() });
        self.due.insert((at, target.clone()));
        Some(verdict == EndpointHealth::Unhealthy)
    }

    fn first_state(&mut self, target: &Target) -> State {
        let before = self.remembered.range(..target).map(|(other, _)| other);
        let alike_one =
            || alike(before, self.remembered.range(target..).map(|(other, _)| other), target).cloned();
        let known = if self.remembered.contains_key(target) { Some(target.clone()) } else { alike_one() };
        if let Some((known, Memory { since, failure })) =
            known.and_then(|known| self.remembered.remove_entry(&known))
        {
            if known != *target {
                self.taken_over.push(known);
            }
            let failure = Some(failure);
            return State { verdict: EndpointHealth::Unhealthy, since, failure, ..State::default() };
        }
        let before = self.watched.range(..target).map(|(other, _)| other);
        let same = alike(before, self.watched.range(target..).map(|(other, _)| other), target);
        same.and_then(|same| self.watched.get(same)).map(|watched| watched.state.clone()).unwrap_or_default()
    }

    /// Whether an earlier agent found targets unhealthy that no Service of this agent has used yet.
    pub fn remembers(&self) -> bool {
        !self.remembered.is_empty()
    }

    /// Removes the state of those targets of an earlier agent that no Service uses, and returns these targets. If an
    /// endpoint gets the address of such a target later, it is a different endpoint, to which the old state does not
    /// apply.
    pub fn forget_unused(&mut self) -> Vec<Target> {
        let unused = std::mem::take(&mut self.remembered).into_keys();
        let gone = unused.chain(std::mem::take(&mut self.taken_over));
        gone.filter(|target| !self.watched.contains_key(target)).collect()
    }

    fn remove(&mut self, target: &Target) {
        if let Some(watched) = self.watched.remove(target) {
            self.counts[watched.state.verdict as usize] -= 1;
            let due = (watched.at, target.clone());
            match &watched.stage {
                Stage::Due => drop(self.due.remove(&due)),
                Stage::Waits(share) => self.shares.leave(share, &due),
                Stage::Probed(service) => self.end_of_probe(service),
            }
        }
    }

    /// Gives back the shares of a probe for this Service. Targets that have waited for them are due again.
    fn end_of_probe(&mut self, service: &ObjectName) {
        for (at, target) in self.shares.give_back(service) {
            if let Some(watched) = self.watched.get_mut(&target) {
                watched.stage = Stage::Due;
                self.due.insert((at, target));
            }
        }
    }

    /// When the next probe is due; `None` without targets, or while all targets are being probed or wait for other
    /// probes to end.
    pub fn next_due(&self) -> Option<Duration> {
        self.due.first().map(|(at, _)| *at)
    }

    /// The next target whose probe is due, if any. The caller must probe it, and pass the result to [`Self::finish`]. A
    /// target waits while too many probes of its Service or namespace run.
    pub fn start(&mut self, now: Duration) -> Option<Target> {
        while self.due.first().is_some_and(|(at, _)| *at <= now) {
            let (at, target) = self.due.pop_first()?;
            let Some(watched) = self.watched.get_mut(&target) else { continue };
            let Some(service) = watched.users.first() else { continue };
            match self.shares.take(service) {
                Ok(()) => {
                    (watched.at, watched.stage) = (now, Stage::Probed(service.clone()));
                    return Some(target);
                }
                Err(share) => {
                    watched.stage = Stage::Waits(share.clone());
                    self.shares.wait(share, (at, target));
                }
            }
        }
        None
    }

    /// Records the result of a probe, and schedules the next one. Returns the new state if the target has begun or
    /// ceased to get new flows. `unix` is the time in seconds since the Unix epoch.
    pub fn finish(
        &mut self,
        target: &Target,
        result: Result<(), Failure>,
        now: Duration,
        unix: u64,
    ) -> Option<&State> {
        let seed = self.seed;
        // The target may have been removed, and perhaps added again, since the probe began.
        let watched = self.watched.get_mut(target)?;
        let Stage::Probed(service) = &watched.stage else { return None };
        let service = service.clone();
        let before = watched.state.verdict;
        if !matches!(&result, Err(failure) if failure.reason == Reason::Local) {
            watched.state.take(result, target, now, unix);
        }
        let after = watched.state.verdict;
        watched.round += 1;
        watched.is_suspected = false;
        let timing = &target.check.timing;
        // While a target is held, no result changes its verdict.
        let is_changing = watched.state.contrary > 0 && watched.state.hold <= now;
        let pause = if is_changing { timing.fast() } else { timing.interval };
        let jitter = if watched.round == 1 { FIRST_JITTER } else { JITTER };
        let pause = jittered(pause, jitter, hash(seed, target, watched.round));
        (watched.at, watched.stage) = ((watched.at + pause).max(now), Stage::Due);
        self.due.insert((watched.at, target.clone()));
        self.counts[before as usize] -= 1;
        self.counts[after as usize] += 1;
        let is_used = |verdict| verdict != EndpointHealth::Unhealthy;
        self.end_of_probe(&service);
        self.watched.get(target).filter(|_| is_used(before) != is_used(after)).map(|watched| &watched.state)
    }

    /// Takes hints that these endpoints leave SYNs unanswered. (A hint about any port of an address also concerns the
    /// targets of this address whose check has its own port.) For a healthy target that is not being probed and does
    /// not wait for other probes, the first hint since its last result makes the next probe due at once. The hint also
    /// counts as a failed probe, unless that would make the target unhealthy.
    pub fn suspect(&mut self, silent: &BTreeSet<SocketAddr>, now: Duration) {
        let addresses: BTreeSet<IpAddr> = silent.iter().map(SocketAddr::ip).collect();
        for (target, watched) in &mut self.watched {
            let is_meant = match target.check.port {
                Some(_) => addresses.contains(&target.address),
                None => silent.contains(&target.socket()),
            };
            let is_first = matches!(watched.stage, Stage::Due) && !watched.is_suspected;
            if watched.state.verdict != EndpointHealth::Healthy || !is_first || !is_meant {
                continue;
            }
            watched.is_suspected = true;
            let most = target.check.timing.unhealthy.saturating_sub(1);
            watched.state.contrary = watched.state.contrary.saturating_add(1).min(most);
            self.due.remove(&(watched.at, target.clone()));
            watched.at = watched.at.min(now);
            self.due.insert((watched.at, target.clone()));
        }
    }

    /// Whether nothing is probed.
    pub fn is_empty(&self) -> bool {
        self.watched.is_empty()
    }

    /// The number of targets with this verdict.
    pub const fn count(&self, verdict: EndpointHealth) -> usize {
        self.counts[verdict as usize]
    }

    /// Every target, with the Services that use it, and with its state.
    pub fn targets(&self) -> impl Iterator<Item = (&Target, &[ObjectName], &State)> {
        self.watched.iter().map(|(target, watched)| (target, &watched.users[..], &watched.state))
    }

    /// The Services that use the target; empty for an unknown target.
    pub fn users(&self, target: &Target) -> &[ObjectName] {
        self.watched.get(target).map_or(&[], |watched| &watched.users)
    }

    /// All unhealthy targets, for the next agent: also those of an earlier agent that no Service has used yet.
    pub fn unhealthy(&self) -> BTreeMap<Target, Memory> {
        let unhealthy = self.watched.iter().filter(|(_, it)| it.state.verdict == EndpointHealth::Unhealthy);
        let memory =
            |state: &State| Memory { since: state.since, failure: state.failure.clone().unwrap_or_default() };
        let watched = unhealthy.map(|(target, watched)| (target.clone(), memory(&watched.state)));
        let unused = self.remembered.iter().map(|(target, memory)| (target.clone(), memory.clone()));
        unused.chain(watched).collect()
    }
}

impl State {
    fn take(&mut self, result: Result<(), Failure>, target: &Target, now: Duration, unix: u64) {
        let timing = &target.check.timing;
        let (says, threshold) = match &result {
            Ok(()) => (EndpointHealth::Healthy, timing.healthy),
            Err(_) => (EndpointHealth::Unhealthy, timing.unhealthy),
        };
        if says == self.verdict {
            self.contrary = 0;
        } else {
            self.contrary = self.contrary.saturating_add(1).min(threshold);
            let is_held = says == EndpointHealth::Healthy && now < self.hold;
            if self.verdict == EndpointHealth::Unknown || self.contrary >= threshold && !is_held {
                self.change(says, now, unix);
            }
        }
        match result {
            Err(failure) => self.failure = Some(failure.text),
            Ok(()) if self.verdict == EndpointHealth::Healthy => self.failure = None,
            Ok(()) => {}
        }
    }
}

impl State {
    /// Changes the verdict, and holds a target that flaps.
    fn change(&mut self, verdict: EndpointHealth, now: Duration, unix: u64) {
        let falls = self.verdict == EndpointHealth::Healthy && verdict == EndpointHealth::Unhealthy;
        (self.verdict, self.since, self.contrary) = (verdict, unix, 0);
        (self.hold, self.held_until) = (Duration::ZERO, 0);
        if !falls {
            return;
        }
        self.falls.push_back(now);
        while self.falls.front().is_some_and(|fall| *fall + FLAP_WINDOW <= now) {
            self.falls.pop_front();
        }
        if let Some(further) = self.falls.len().checked_sub(MOST_FALLS + 1) {
            let factor = u32::try_from(further).ok().and_then(|further| 1_u32.checked_shl(further));
            let hold = factor.map_or(LONGEST_HOLD, |factor| (HOLD * factor).min(LONGEST_HOLD));
            (self.hold, self.held_until) = (now + hold, unix + hold.as_secs());
        }
    }
}

fn hash(seed: u64, target: &Target, round: u64) -> u64 {
    of_endpoint(seed.wrapping_add(round), &Address::from(target.address), target.port.into())
}

/// A part of the duration `whole`, chosen by the hash.
fn part(hash: u64, whole: Duration) -> Duration {
    whole.mul_f64((hash >> 11) as f64 / (1_u64 << 53) as f64)
}

/// The duration `pause`, made longer or shorter by at most `percent` percent, chosen by the hash.
fn jittered(pause: Duration, percent: u64, hash: u64) -> Duration {
    let most = pause.mul_f64(percent as f64 / 100.0);
    pause.saturating_sub(most) + part(hash, most * 2)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use super::*;
    use crate::probe::{Check, Kind, Timing};

    const S: Duration = Duration::from_secs(1);

    fn target(host: u8, interval: u64) -> Target {
        let timing = Timing { interval: S * u32::try_from(interval).unwrap(), ..Timing::default() };
        let check = Check { kind: Kind::Tcp, port: None, timing, proxy_header: false };
        Target { address: [10, 1, 0, host].into(), port: 80, check: Arc::new(check) }
    }

    fn users() -> Vec<ObjectName> {
        vec![ObjectName::new("default", "web")]
    }

    fn refused() -> Result<(), Failure> {
        Err(Failure::new(Reason::Refused, "connection refused"))
    }

    /// A monitor with one target, which the test probes round by round.
    struct Bed {
        monitor: Monitor,
        target: Target,
        now: Duration,
    }

    impl Bed {
        fn new(remembered: BTreeMap<Target, Memory>) -> Self {
            let mut monitor = Monitor::new(7, remembered);
            monitor.set(&target(1, 10), users(), S);
            Self { monitor, target: target(1, 10), now: S }
        }

        /// Probes the target once, with this result. Returns the new verdict if [`Monitor::finish`] reports a change,
        /// and the time since the last probe.
        fn round(&mut self, result: Result<(), Failure>) -> (Option<EndpointHealth>, Duration) {
            let due = self.monitor.next_due().unwrap();
            let pause = due - self.now;
            assert_eq!(self.monitor.start(due.saturating_sub(Duration::from_nanos(1))), None);
            assert_eq!(self.monitor.start(due).as_ref(), Some(&self.target));
            assert_eq!(self.monitor.next_due(), None, "one probe of a target at a time");
            self.now = due;
            let state = self.monitor.finish(&self.target, result, due, due.as_secs());
            (state.map(|state| state.verdict), pause)
        }

        fn verdict(&self) -> EndpointHealth {
            self.monitor.targets().next().unwrap().2.verdict
        }
    }

    /// A monitor with this many targets of each of the Services, all of them due.
    fn due(services: &[(&str, &str, u16)]) -> Monitor {
        let mut monitor = Monitor::default();
        for (index, (namespace, name, count)) in services.iter().enumerate() {
            for port in 1..=*count {
                let host = u8::try_from(index).unwrap();
                let target = Target { port, ..target(host, 10) };
                monitor.set(&target, vec![ObjectName::new(namespace, name)], Duration::ZERO);
            }
        }
        monitor
    }

    /// Starts all probes that may run; returns their targets.
    fn start_all(monitor: &mut Monitor, now: Duration) -> Vec<Target> {
        std::iter::from_fn(|| monitor.start(now)).collect()
    }

    /// Ends the running probes, and those that begin meanwhile. Returns the number of different targets.
    fn probe_all(monitor: &mut Monitor, mut running: Vec<Target>, now: Duration) -> usize {
        let mut probed = BTreeSet::new();
        while let Some(target) = running.pop() {
            probed.insert(target.clone());
            monitor.finish(&target, Ok(()), now, 0);
            running.extend(start_all(monitor, now));
        }
        probed.len()
    }

    fn count_of(targets: &[Target], host: u8) -> usize {
        targets.iter().filter(|it| it.address == target(host, 10).address).count()
    }

    #[test]
    fn service_whose_endpoints_never_answer_leaves_probes_to_others() {
        let mut monitor = due(&[("a", "slow", 1_000), ("a", "quick", 1), ("b", "quick", 1)]);
        let running = start_all(&mut monitor, 60 * S);
        assert_eq!([0, 1, 2].map(|host| count_of(&running, host)), [256, 1, 1]);
        assert_eq!(monitor.next_due(), None, "the others wait");
        let ended = running.iter().find(|it| it.address == target(0, 10).address).unwrap();
        monitor.finish(ended, refused(), 60 * S, 0);
        let next = start_all(&mut monitor, 60 * S);
        assert_eq!(next.len(), 1, "one of those that have waited");
        assert_ne!(next[0], *ended);
    }

    #[test]
    fn services_of_one_namespace_leave_probes_to_other_namespaces() {
        let services: Vec<(&str, String, u16)> = (0..9).map(|n| ("a", n.to_string(), 200)).collect();
        let mut services: Vec<_> =
            services.iter().map(|(ns, name, count)| (*ns, name.as_str(), *count)).collect();
        services.push(("b", "quick", 1));
        let mut monitor = due(&services);
        let running = start_all(&mut monitor, 60 * S);
        assert_eq!((running.len(), count_of(&running, 9)), (385, 1));
        assert_eq!(probe_all(&mut monitor, running, 60 * S), 9 * 200 + 1, "all get their turn");
    }

    #[test]
    fn waiting_target_is_probed_although_its_first_service_has_changed() {
        let mut monitor = due(&[("a", "one", 600)]);
        let all: Vec<Target> = monitor.targets().map(|(target, ..)| target.clone()).collect();
        let mut running = start_all(&mut monitor, 60 * S);
        for target in &all {
            monitor.set(target, vec![ObjectName::new("a", "two")], 60 * S);
        }
        running.extend(start_all(&mut monitor, 60 * S));
        assert_eq!(probe_all(&mut monitor, running, 60 * S), 600);
    }

    #[test]
    fn removed_target_gives_its_share_back_and_waits_no_longer() {
        let mut monitor = due(&[("a", "slow", 300)]);
        let running = start_all(&mut monitor, 60 * S);
        assert_eq!(running.len(), 256);
        let waiting: Vec<Target> =
            monitor.targets().map(|(target, ..)| target.clone()).filter(|it| !running.contains(it)).collect();
        for target in waiting[1..].iter().chain(&running[..2]) {
            monitor.set(target, Vec::new(), 60 * S);
        }
        assert_eq!(start_all(&mut monitor, 60 * S), [waiting[0].clone()]);
        assert_eq!(monitor.finish(&running[0], Ok(()), 60 * S, 0), None, "it was removed");
        // A target that is added again is probed again.
        monitor.set(&running[0], users(), 60 * S);
        assert_eq!(start_all(&mut monitor, 120 * S), [running[0].clone()]);
    }

    #[test]
    fn targets_of_an_earlier_agent_are_forgotten_unless_a_service_uses_them() {
        let memory = || Memory { since: 5, failure: "refused".to_owned() };
        let remembered = BTreeMap::from([(target(1, 10), memory()), (target(2, 10), memory())]);
        let mut bed = Bed::new(remembered.clone());
        assert_eq!(bed.monitor.unhealthy(), remembered, "the next agent must know both");
        assert_eq!(bed.monitor.forget_unused(), [target(2, 10)]);
        assert_eq!(bed.monitor.unhealthy().into_keys().collect::<Vec<_>>(), [target(1, 10)]);
        assert_eq!(bed.monitor.set(&target(2, 10), users(), S), Some(false), "a new endpoint");
        // A check with another interval takes the state over; `forget_unused` returns the earlier target all the same.
        let mut monitor = Monitor::new(7, remembered);
        assert_eq!(monitor.set(&target(1, 20), users(), S), Some(true));
        assert_eq!(monitor.forget_unused(), [target(2, 10), target(1, 10)]);
        // Both checks are in use, so `forget_unused` returns neither target.
        let mut monitor = Monitor::new(7, BTreeMap::from([(target(1, 10), memory())]));
        assert_eq!(monitor.set(&target(1, 5), users(), S), Some(true));
        assert_eq!(monitor.set(&target(1, 10), users(), S), Some(true));
        assert_eq!(monitor.forget_unused(), []);
        // A target takes over its own memory rather than that of another check.
        let mut monitor =
            Monitor::new(7, BTreeMap::from([(target(1, 10), memory()), (target(1, 20), memory())]));
        assert_eq!(monitor.set(&target(1, 20), users(), S), Some(true));
        assert_eq!(monitor.forget_unused(), [target(1, 10)]);
    }

    #[test]
    fn first_result_decides() {
        let mut bed = Bed::new(BTreeMap::new());
        assert_eq!(bed.verdict(), EndpointHealth::Unknown);
        let (changed, pause) = bed.round(refused());
        assert_eq!(changed, Some(EndpointHealth::Unhealthy));
        assert!(pause <= 5 * S, "{pause:?}");
        let mut bed = Bed::new(BTreeMap::new());
        assert_eq!(bed.round(Ok(())).0, None, "it was used already");
        assert_eq!(bed.verdict(), EndpointHealth::Healthy);
    }

    #[test]
    fn thresholds_count_results_in_a_row() {
        let mut bed = Bed::new(BTreeMap::new());
        let results = [true, false, false, true, false, false, false, true, false, true, true];
        let changes: Vec<_> = results.map(|good| bed.round(if good { Ok(()) } else { refused() }).0).into();
        let mut expected = vec![None; results.len()];
        (expected[6], expected[10]) = (Some(EndpointHealth::Unhealthy), Some(EndpointHealth::Healthy));
        assert_eq!(changes, expected);
        let (_, users_of, state) = bed.monitor.targets().next().unwrap();
        assert_eq!((users_of, state.failure.as_deref()), (&users()[..], None));
    }

    #[test]
    fn transition_uses_the_fast_interval() {
        let mut bed = Bed::new(BTreeMap::new());
        let mut pauses = |results: &[bool]| -> Vec<f64> {
            let round = |good: &bool| bed.round(if *good { Ok(()) } else { refused() }).1.as_secs_f64();
            results.iter().map(round).collect()
        };
        let pauses = pauses(&[true, true, true, false, false, false, false, true, true, true]);
        for (round, (least, most)) in [
            (0.0, 5.0),
            (5.0, 15.0),
            (9.0, 11.0),
            (9.0, 11.0),
            (4.5, 5.5),
            (4.5, 5.5),
            (9.0, 11.0),
            (9.0, 11.0),
            (4.5, 5.5),
            (9.0, 11.0),
        ]
        .into_iter()
        .enumerate()
        {
            assert!((least..=most).contains(&pauses[round]), "round {round}: {pauses:?}");
        }
    }

    #[test]
    fn flapping_target_is_held_unhealthy_longer_and_longer() {
        let mut bed = Bed::new(BTreeMap::new());
        // Probes the target, with good or bad results, until its verdict agrees with them. Returns how many seconds
        // this took, for how many seconds the target is then held, and the longest pause between two probes.
        let mut until = |good: bool| {
            let begun = bed.now;
            let mut longest = Duration::ZERO;
            loop {
                let (_, pause) = bed.round(if good { Ok(()) } else { refused() });
                longest = longest.max(pause);
                if (bed.verdict() == EndpointHealth::Healthy) == good {
                    let (_, _, state) = bed.monitor.targets().next().unwrap();
                    let hold = state.held_until.saturating_sub(bed.now.as_secs());
                    return ((bed.now - begun).as_secs(), hold, longest.as_secs());
                }
            }
        };
        until(true);
        for _ in 0..3 {
            assert_eq!(until(false).1, 0);
            let (took, ..) = until(true);
            assert!(took < 20, "{took}");
        }
        for hold in [60, 120, 240, 480] {
            assert_eq!(until(false).1, hold);
            let (took, left, pause) = until(true);
            assert!((hold..hold + 30).contains(&took) && left == 0, "{took} of {hold}");
            assert!(pause >= 9, "a held target is probed at the interval, not after {pause} s");
        }
        // By now, the first changes to unhealthy are more than ten minutes ago and no longer count.
        assert!(until(false).1 < 480);
    }

    #[test]
    fn hint_of_failure_brings_a_probe_forward_and_counts_once() {
        let hint = |bed: &mut Bed, endpoint: SocketAddr| {
            let now = bed.now;
            bed.monitor.suspect(&[endpoint].into(), now);
            bed.monitor.next_due().unwrap() - now
        };
        let (its, other) = (target(1, 10).socket(), target(2, 10).socket());
        let mut bed = Bed::new(BTreeMap::new());
        assert!(hint(&mut bed, its) > Duration::ZERO, "no result yet");
        bed.round(Ok(()));
        assert!(hint(&mut bed, other) > Duration::ZERO);
        assert!(hint(&mut bed, SocketAddr::new(its.ip(), 81)) > Duration::ZERO, "another port");
        // Any number of hints counts as one of three failures.
        assert_eq!([hint(&mut bed, its), hint(&mut bed, its), hint(&mut bed, its)], [Duration::ZERO; 3]);
        assert_eq!(bed.round(refused()).0, None);
        assert_eq!(bed.round(refused()).0, Some(EndpointHealth::Unhealthy));
        assert!(hint(&mut bed, its) > Duration::ZERO, "unhealthy already");
        // A good result refutes the hint.
        let mut bed = Bed::new(BTreeMap::new());
        bed.round(Ok(()));
        hint(&mut bed, its);
        let changes = [bed.round(Ok(())), bed.round(refused()), bed.round(refused())];
        assert_eq!(changes.map(|(change, _)| change), [None; 3]);
        // Hints alone never make a target unhealthy.
        for _ in 0..5 {
            hint(&mut bed, its);
        }
        assert_eq!(bed.verdict(), EndpointHealth::Healthy);
    }

    #[test]
    fn verdict_of_an_earlier_agent_stays_until_enough_good_results() {
        let memory = Memory { since: 42, failure: "status 500".into() };
        let mut bed = Bed::new([(target(1, 10), memory.clone())].into());
        assert_eq!(bed.verdict(), EndpointHealth::Unhealthy);
        assert_eq!(bed.monitor.unhealthy(), [(target(1, 10), memory)].into());
        assert_eq!(bed.round(Ok(())).0, None);
        assert_eq!(bed.round(Ok(())).0, Some(EndpointHealth::Healthy));
        assert!(bed.monitor.unhealthy().is_empty());
    }

    #[test]
    fn verdict_of_an_earlier_agent_stays_although_the_interval_has_changed() {
        let memory = Memory { since: 42, failure: "status 500".into() };
        for before in [5, 20] {
            let bed = Bed::new([(target(1, before), memory.clone()), (target(2, 10), memory.clone())].into());
            assert_eq!(bed.verdict(), EndpointHealth::Unhealthy);
        }
        assert_eq!(
            Bed::new([(target(2, 5), memory)].into()).verdict(),
            EndpointHealth::Unknown,
            "another address"
        );
    }

    #[test]
    fn changed_interval_keeps_the_verdict() {
        let mut bed = Bed::new(BTreeMap::new());
        bed.round(refused());
        for (interval, is_unhealthy) in [(5, true), (20, true)] {
            assert_eq!(bed.monitor.set(&target(1, interval), users(), bed.now), Some(is_unhealthy));
        }
        assert_eq!(bed.monitor.set(&target(2, 5), users(), bed.now), Some(false), "another address");
        assert_eq!(bed.monitor.set(&target(2, 5), users(), bed.now), None, "it is known");
        bed.monitor.set(&target(1, 10), Vec::new(), bed.now);
        assert_eq!(bed.monitor.targets().count(), 3);
        assert_eq!(bed.monitor.count(EndpointHealth::Unhealthy), 2);
    }

    #[test]
    fn result_for_a_target_that_has_gone_is_ignored() {
        let mut bed = Bed::new(BTreeMap::new());
        let due = bed.monitor.next_due().unwrap();
        bed.monitor.start(due).unwrap();
        bed.monitor.set(&target(1, 10), Vec::new(), due);
        assert_eq!(bed.monitor.finish(&target(1, 10), refused(), due, 0), None);
        bed.monitor.set(&target(1, 10), users(), due);
        assert_eq!(bed.monitor.finish(&target(1, 10), refused(), due, 0), None, "a probe of the earlier one");
        assert_eq!(bed.verdict(), EndpointHealth::Unknown);
        assert!(bed.monitor.next_due().is_some());
    }

    #[test]
    fn failure_of_this_node_is_no_result() {
        let mut bed = Bed::new(BTreeMap::new());
        let local = || Err(Failure::new(Reason::Local, "too many open files"));
        assert_eq!(bed.round(local()).0, None);
        assert_eq!(bed.verdict(), EndpointHealth::Unknown);
        assert!(bed.monitor.targets().all(|(_, _, state)| state.failure.is_none()));
    }

    #[test]
    fn slow_probe_delays_the_next_one() {
        let mut bed = Bed::new(BTreeMap::new());
        let due = bed.monitor.next_due().unwrap();
        bed.monitor.start(due).unwrap();
        bed.monitor.finish(&bed.target, refused(), due + 60 * S, 0);
        assert_eq!(bed.monitor.next_due(), Some(due + 60 * S));
    }

    #[test]
    fn rounds_of_many_targets_spread_evenly() {
        let mut monitor = Monitor::new(1, BTreeMap::new());
        let count = 10_000_u32;
        for number in 0..count {
            let mut one = target(1, 10);
            one.address = std::net::Ipv4Addr::from(0x0a00_0000 + number).into();
            monitor.set(&one, users(), Duration::ZERO);
        }
        let mut starts = vec![0; 60];
        while let Some(due) = monitor.next_due().filter(|due| due.as_secs() < 60) {
            starts[usize::try_from(due.as_secs()).unwrap()] += 1;
            let target = monitor.start(due).unwrap();
            monitor.finish(&target, Ok(()), due, 0);
        }
        // On average, 1000 probes start in each second.
        assert!(starts[30..].iter().all(|starts| (500..1500).contains(starts)), "{starts:?}");
        assert_eq!(monitor.count(EndpointHealth::Healthy), 10_000);
    }
}
