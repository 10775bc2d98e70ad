//! Slow start: an endpoint that has become usable gets a growing share of the new flows.
//!
//! The weight of a warming endpoint grows in steps from 1 to 100 percent of the weight that the Service sets for it.
//! Every node measures the time by its own clock.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use lb_common::{Backend, Scheduler};

use crate::endpoint_key::EndpointKey;

/// The endpoints of a Service in slow start, each with the percentage of its weight that it has now, 1 to 99.
pub type Shares = BTreeMap<EndpointKey, u32>;

/// The percentage of its weight that an endpoint has if it is not in slow start.
const FULL: u32 = 100;

/// Number of steps of a slow start; a step takes at least [`SHORTEST_STEP`], so a short slow start has fewer steps.
const STEPS: u32 = 20;
const SHORTEST_STEP: Duration = Duration::from_secs(1);

/// Whether the scheduler supports slow start: it must choose by weight, and without a hash. With a hash, each change of
/// the weights would move clients from one backend to another.
pub(crate) const fn is_supported(scheduler: Scheduler) -> bool {
    scheduler.is_weighted() && !matches!(scheduler, Scheduler::SourceHash | Scheduler::Maglev)
}

/// Multiplies the weights of backends by their percentages; leaves the weights unchanged if all or none of the backends
/// with a weight above 0 are in slow start.
pub(crate) fn apply(shares: &Shares, backends: &mut [Backend]) {
    let share = |backend: &Backend| shares.get(&(backend.address, backend.port)).copied().unwrap_or(FULL);
    let used = || backends.iter().filter(|backend| backend.weight != 0);
    let warming = used().filter(|backend| share(backend) < FULL).count();
    if warming != 0 && warming != used().count() {
        backends.iter_mut().for_each(|backend| backend.weight *= share(backend));
    }
}

/// The slow starts of all Services, by Service. Times are durations since the start of the agent.
#[derive(Clone, Debug)]
pub(crate) struct SlowStarts<Name> {
    services: BTreeMap<Name, Known>,
    /// When the next step of each Service with a slow start is due.
    steps: BTreeSet<(Duration, Name)>,
}

/// The endpoints of a Service that are usable, and those of them that are in slow start.
#[derive(Clone, Debug, Default)]
struct Known {
    usable: BTreeSet<EndpointKey>,
    /// When each endpoint in slow start became usable.
    since: BTreeMap<EndpointKey, Duration>,
    next_step: Option<Duration>,
}

impl<Name> Default for SlowStarts<Name> {
    fn default() -> Self {
        Self { services: BTreeMap::new(), steps: BTreeSet::new() }
    }
}

impl<Name: Ord + Clone> SlowStarts<Name> {
    /// Sets which endpoints of a Service are usable at `now`; returns the shares of those in slow start. An endpoint
    /// that becomes usable begins a slow start if the Service had usable endpoints at the previous call; otherwise it
    /// has full weight at once.
    pub(crate) fn set(
        &mut self,
        service: &Name,
        period: Duration,
        usable: BTreeSet<EndpointKey>,
        now: Duration,
    ) -> Shares {
        let known = self.services.entry(service.clone()).or_default();
        if !known.usable.is_empty() {
            known.since.extend(usable.difference(&known.usable).map(|new| (*new, now)));
        }
        let age = |since: Duration| now.saturating_sub(since);
        known.since.retain(|key, since| usable.contains(key) && age(*since) < period);
        known.usable = usable;
        let next_step = (!known.since.is_empty()).then(|| now + SHORTEST_STEP.max(period / STEPS));
        if let Some(step) = std::mem::replace(&mut known.next_step, next_step) {
            self.steps.remove(&(step, service.clone()));
        }
        self.steps.extend(next_step.map(|step| (step, service.clone())));
        known.since.iter().map(|(key, since)| (*key, percentage(age(*since), period))).collect()
    }

    /// Removes a Service that was deleted or has no slow start any more.
    pub(crate) fn remove(&mut self, service: &Name) {
        if let Some(Known { next_step: Some(step), .. }) = self.services.remove(service) {
            self.steps.remove(&(step, service.clone()));
        }
    }

    /// When the next step of any Service is due; `None` without slow starts.
    pub(crate) fn next_step(&self) -> Option<Duration> {
        self.steps.first().map(|(step, _)| *step)
    }

    /// The Services with a step that is due at `now`; the caller must call [`Self::set`] for each.
    pub(crate) fn due(&self, now: Duration) -> impl Iterator<Item = &Name> {
        self.steps.iter().take_while(move |(step, _)| *step <= now).map(|(_, service)| service)
    }
}

/// The percentage of its weight that an endpoint has at `age` of a slow start that takes `period`.
fn percentage(age: Duration, period: Duration) -> u32 {
    let percent = u128::from(FULL) * age.as_millis() / period.as_millis().max(1);
    u32::try_from(percent).unwrap_or(FULL).clamp(1, FULL - 1)
}

#[cfg(test)]
mod tests {
    use lb_common::Address;

    use super::*;

    const WEB: &str = "web";
    const PERIOD: Duration = Duration::from_secs(60);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn key(last: u8) -> EndpointKey {
        (Address::from_v4([10, 1, 0, last]), 80)
    }

    /// Calls [`SlowStarts::set`]; returns the last byte of each address in slow start, and its percentage.
    fn set(starts: &mut SlowStarts<&'static str>, usable: &[u8], seconds: u64) -> Vec<(u8, u32)> {
        let usable: BTreeSet<EndpointKey> = usable.iter().map(|last| key(*last)).collect();
        let shares = starts.set(&WEB, PERIOD, usable.clone(), at(seconds));
        let named = usable.iter().filter_map(|key| Some((key.0.v4_bytes()[3], *shares.get(key)?)));
        assert!(shares.keys().all(|key| usable.contains(key)));
        named.collect()
    }

    #[test]
    fn first_endpoints_are_at_full_weight() {
        let mut starts = SlowStarts::default();
        assert_eq!(set(&mut starts, &[], 0), []);
        assert_eq!(set(&mut starts, &[1, 2], 1), []);
        assert_eq!(starts.next_step(), None);
        assert_eq!(set(&mut starts, &[], 2), []);
        assert_eq!(set(&mut starts, &[1], 3), [], "after a time without any");
    }

    #[test]
    fn new_endpoint_warms_in_steps() {
        let mut starts = SlowStarts::default();
        set(&mut starts, &[1], 100);
        assert_eq!(set(&mut starts, &[1, 2], 101), [(2, 1)]);
        assert_eq!(starts.next_step(), Some(at(104)), "a twentieth of a minute later");
        assert_eq!(starts.due(at(103)).count(), 0);
        assert_eq!(starts.due(at(104)).collect::<Vec<_>>(), [&WEB]);
        assert_eq!(set(&mut starts, &[1, 2], 104), [(2, 5)]);
        assert_eq!(set(&mut starts, &[1, 2, 3], 131), [(2, 50), (3, 1)]);
        assert_eq!(set(&mut starts, &[1, 2, 3], 160), [(2, 98), (3, 48)]);
        assert_eq!(set(&mut starts, &[1, 2, 3], 161), [(3, 50)], "the slow start of 2 is over");
        assert_eq!(set(&mut starts, &[1, 2, 3], 200), []);
        assert_eq!(starts.next_step(), None);
    }

    #[test]
    fn endpoint_that_was_down_warms_again() {
        let mut starts = SlowStarts::default();
        set(&mut starts, &[1, 2], 0);
        assert_eq!(set(&mut starts, &[1], 10), []);
        assert_eq!(set(&mut starts, &[1, 2], 20), [(2, 1)]);
        assert_eq!(set(&mut starts, &[1], 50), []);
        assert_eq!(starts.next_step(), None);
        assert_eq!(set(&mut starts, &[1, 2], 55), [(2, 1)]);
    }

    #[test]
    fn removed_service_has_no_step() {
        let mut starts = SlowStarts::default();
        set(&mut starts, &[1], 0);
        set(&mut starts, &[1, 2], 1);
        starts.remove(&WEB);
        assert_eq!((starts.next_step(), starts.services.len()), (None, 0));
    }

    #[test]
    fn weights_are_multiplied_while_some_backends_warm() {
        let weights = |before: &[u32], shares: &[(u8, u32)]| -> Vec<u32> {
            let shares = shares.iter().map(|(last, share)| (key(*last), *share)).collect();
            let backend = |(last, weight): (u8, &u32)| {
                let (address, port) = key(last);
                Backend { address, port, flags: 0, weight: *weight, active_flows_slot: 0 }
            };
            let mut backends: Vec<Backend> = (1..).zip(before).map(backend).collect();
            apply(&shares, &mut backends);
            backends.iter().map(|backend| backend.weight).collect()
        };
        assert_eq!(weights(&[1, 1], &[]), [1, 1]);
        assert_eq!(weights(&[1, 1], &[(2, 5)]), [100, 5]);
        assert_eq!(weights(&[2, 3, 0], &[(2, 5)]), [200, 15, 0]);
        assert_eq!(weights(&[1, 3], &[(1, 5), (2, 50)]), [1, 3], "all are warming");
        assert_eq!(weights(&[1, 3, 0], &[(1, 5), (2, 50)]), [1, 3, 0], "all that are used are warming");
        assert_eq!(weights(&[1, 1], &[(3, 5)]), [1, 1], "of another port");
    }

    #[test]
    fn schedulers_by_weight_but_not_by_hash_support_it() {
        let supported = Scheduler::ALL.into_iter().filter(|scheduler| is_supported(*scheduler));
        let names: Vec<&str> = supported.map(Scheduler::as_str).collect();
        assert_eq!(names, ["random", "wrr", "wlc", "sed", "nq"]);
    }
}
