//! When the agent is healthy. Pure: time is a parameter.

use std::{
    ops::Add,
    time::{Duration, Instant},
};

use jiff::Timestamp;

/// A change that waits as long as this makes the agent unhealthy: twice kube-proxy's period of synchronisation.
const STALE: Duration = Duration::from_secs(60);

/// A point in time: for the calendar, and for durations, which a clock that is put right must not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// What a calendar shows.
    pub timestamp: Timestamp,
    instant: Instant,
}

impl Moment {
    /// Now.
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

/// How far the kernel is behind what the sources say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Freshness {
    last_updated: Option<Moment>,
    /// When the oldest change came that is not in the kernel.
    oldest_queued: Option<Moment>,
}

/// How healthy the agent is at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Health {
    /// Alive, and synchronised once.
    pub healthy: bool,
    /// No change has been waiting for long: before the first synchronisation nothing waits but the source, which may
    /// be an API server that is away, and another agent would wait as well.
    pub alive: bool,
    /// When the kernel last was what it should be; `None` before the first time.
    pub last_updated: Option<Timestamp>,
    /// The moment.
    pub now: Timestamp,
}

impl Freshness {
    /// A change has come that is not in the kernel yet.
    pub fn queued(&mut self, now: Moment) {
        self.oldest_queued.get_or_insert(now);
    }

    /// The kernel is what it should be.
    pub const fn updated(&mut self, now: Moment) {
        *self = Self { last_updated: Some(now), oldest_queued: None };
    }

    /// What has come changes nothing: the kernel still is what it should be.
    pub const fn nothing_to_do(&mut self) {
        self.oldest_queued = None;
    }

    /// Whether the kernel has been what it should be once.
    pub const fn is_synchronised(&self) -> bool {
        self.last_updated.is_some()
    }

    /// When the kernel last was what it should be.
    pub fn last_updated(&self) -> Option<Timestamp> {
        self.last_updated.map(|moment| moment.timestamp)
    }

    /// Since when changes have been waiting.
    pub fn waiting_since(&self) -> Option<Timestamp> {
        self.oldest_queued.map(|moment| moment.timestamp)
    }

    /// How healthy that is. kube-proxy also calls itself healthy before its first synchronisation; whoever waits for
    /// a 200 of ours may rely on the data plane.
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
            "what waits is not in the kernel"
        );
        freshness.updated(now);
        assert!(freshness.health(now).healthy);
    }

    #[test]
    fn an_idle_agent_stays_healthy() {
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
    fn a_change_that_waits_for_long_makes_it_unhealthy_until_it_is_done() {
        let start = Moment::now();
        let mut freshness = Freshness::default();
        freshness.updated(start);
        freshness.queued(start);
        assert!(freshness.health(start + NOT_LATE).healthy);
        assert!(!freshness.health(start + LATE).healthy);
        freshness.queued(start + NOT_LATE);
        assert!(
            !freshness.health(start + LATE).healthy,
            "a later change does not make the first one younger"
        );
        freshness.updated(start + LATE);
        assert!(freshness.health(start + LATE).healthy);
        assert_eq!(freshness.waiting_since(), None);
    }

    #[test]
    fn a_change_without_consequences_does_not_wait() {
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
