//! Decides whether the agent is healthy, from the time that changes have waited. [`Freshness`] reads no clock: callers
//! pass the time.

use std::{
    ops::Add,
    time::{Duration, Instant},
};

use jiff::Timestamp;

/// How long a change may wait before the agent becomes unhealthy: twice kube-proxy's default `syncPeriod`.
const STALE: Duration = Duration::from_secs(60);

/// A point in time on two clocks: the wall clock, and the monotonic clock, which clock adjustments do not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// Time of the wall clock.
    pub timestamp: Timestamp,
    instant: Instant,
}

impl Moment {
    /// The current time.
    pub fn now() -> Self {
        Self { timestamp: Timestamp::now(), instant: Instant::now() }
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self { timestamp: self.timestamp + duration, instant: self.instant + duration }
    }
}

/// How far the maps are behind the sources of Services.
#[derive(Clone, Copy, Debug, Default)]
pub struct Freshness {
    last_updated: Option<Moment>,
    /// Arrival time of the oldest change that is not in the kernel yet; `None` if no change waits.
    oldest_queued: Option<Moment>,
}

/// Health of the agent at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// Whether the agent is alive, and has synchronised at least once.
    pub healthy: bool,
    /// Whether no change has waited for [`STALE`] or longer. Changes count only after the source has sent all readable
    /// objects: until then, they may wait because the API server is unreachable, and a restart does not help.
    pub alive: bool,
    /// Time of the last complete synchronisation; `None` before the first one.
    pub last_updated: Option<Timestamp>,
    /// The moment at which the agent has this health.
    pub now: Timestamp,
}

impl Freshness {
    /// Records that a change has arrived.
    pub fn queued(&mut self, now: Moment) {
        self.oldest_queued.get_or_insert(now);
    }

    /// Records that all changes so far are in the kernel.
    pub const fn updated(&mut self, now: Moment) {
        *self = Self { last_updated: Some(now), oldest_queued: None };
    }

    /// Records that the changes that arrived need no map update.
    pub const fn nothing_to_do(&mut self) {
        self.oldest_queued = None;
    }

    /// Whether at least one synchronisation has completed.
    pub const fn is_synchronised(&self) -> bool {
        self.last_updated.is_some()
    }

    /// Time of the last complete synchronisation.
    pub fn last_updated(&self) -> Option<Timestamp> {
        self.last_updated.map(|moment| moment.timestamp)
    }

    /// Arrival time of the oldest change that is not in the kernel yet; `None` if no change waits.
    pub fn waiting_since(&self) -> Option<Timestamp> {
        self.oldest_queued.map(|moment| moment.timestamp)
    }

    /// The health at `now`. Unlike kube-proxy, the agent is unhealthy before its first synchronisation, so that a 200
    /// means a complete data plane.
    pub fn health(&self, now: Moment) -> Health {
        let is_stale = |since: Moment| now.instant.saturating_duration_since(since.instant) >= STALE;
        let alive = !self.oldest_queued.is_some_and(is_stale);
        let healthy = alive && self.is_synchronised();
        Health { healthy, alive, last_updated: self.last_updated(), now: now.timestamp }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATE: Duration = Duration::from_secs(60);
    const NOT_LATE: Duration = Duration::from_millis(59_999);

    #[test]
    fn unhealthy_until_the_first_synchronisation() {
        let now = Moment::now();
        let mut freshness = Freshness::default();
        assert!(!freshness.health(now).healthy);
        freshness.queued(now);
        assert_eq!(
            freshness.health(now),
            Health { healthy: false, alive: true, last_updated: None, now: now.timestamp },
            "the change is not in the kernel"
        );
        freshness.updated(now);
        assert!(freshness.health(now).healthy);
    }

    #[test]
    fn idle_agent_stays_healthy() {
        let start = Moment::now();
        let mut freshness = Freshness::default();
        freshness.updated(start);
        let tomorrow = start + Duration::from_hours(24);
        assert_eq!(
            freshness.health(tomorrow),
            Health {
                healthy: true,
                alive: true,
                last_updated: Some(start.timestamp),
                now: tomorrow.timestamp
            }
        );
    }

    #[test]
    fn change_that_waits_too_long_makes_it_unhealthy_until_written() {
        let start = Moment::now();
        let mut freshness = Freshness::default();
        freshness.updated(start);
        freshness.queued(start);
        assert!(freshness.health(start + NOT_LATE).healthy);
        assert!(!freshness.health(start + LATE).healthy);
        freshness.queued(start + NOT_LATE);
        assert!(!freshness.health(start + LATE).healthy, "the oldest change counts");
        freshness.updated(start + LATE);
        assert!(freshness.health(start + LATE).healthy);
        assert_eq!(freshness.waiting_since(), None);
    }

    #[test]
    fn change_without_map_update_does_not_wait() {
        let start = Moment::now();
        let mut freshness = Freshness::default();
        freshness.updated(start);
        freshness.queued(start + LATE);
        freshness.nothing_to_do();
        let later = start + LATE + LATE;
        let health =
            Health { healthy: true, alive: true, last_updated: Some(start.timestamp), now: later.timestamp };
        assert_eq!(freshness.health(later), health);
    }
}
