//! The election of one agent that acts for the whole cluster, by a Lease of `coordination.k8s.io`.
//!
//! As in client-go's `leaderelection`, no agent compares its clock with the clock of another agent. A follower counts a
//! Lease as expired when it has read the same version for as long as the Lease lasts; the leader stops after a shorter
//! time, counted from the moment at which it *sent* its last successful renewal. All times here are readings of the
//! agent's own monotonic clock, as durations since any fixed moment.
//!
//! A Lease is no lock: a process that is paused between a look at the clock and a write may write too late. So every
//! write of a leader must also be a compare-and-swap.

use std::{ops::Range, time::Duration};

/// The intervals of the election: how long a Lease lasts, and how often it is renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The `spec.leaseDurationSeconds` that a leader writes: a follower bids for the Lease only when it has read the
    /// same version for this long.
    pub lease: Duration,
    /// How long the leader may act after it sent its last successful renewal; shorter than `lease`.
    pub act: Duration,
    /// Maximum pause before the next renewal of the leader, and before the next read of a follower.
    pub retry: Duration,
    /// Maximum time that a request of an agent may take. The leader starts no request that could outlast its term.
    pub request: Duration,
}

impl Default for Timing {
    /// Followers wait 15 s and read the Lease every 5 s, so a new leader takes over at most about 20 s after the old
    /// one has stopped.
    fn default() -> Self {
        let [lease, act, retry, request] = [15, 10, 5, 3].map(Duration::from_secs);
        Self { lease, act, retry, request }
    }
}

/// One version of the Lease object, as it was read or written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// `spec.holderIdentity`; `None` or empty if no agent holds the Lease.
    pub holder: Option<String>,
    /// `spec.leaseDurationSeconds`: how long the holder's lease lasts; without a holder, [`Release::lasts`].
    pub lasts: Duration,
    /// `spec.leaseTransitions`: how often the holder has changed.
    pub transitions: i32,
    /// `metadata.resourceVersion` of this version.
    pub version: String,
}

/// A write of the Lease that makes this agent its holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bid {
    /// `metadata.resourceVersion` of the version to replace; `None` to create the Lease.
    pub replaces: Option<String>,
    /// The `spec.leaseTransitions` to write.
    pub transitions: i32,
    /// Whether this agent is the holder already.
    pub is_renewal: bool,
    /// How long an earlier holder may still act, or its writes may still be on their way, after this write.
    wait: Duration,
}

/// A write of the Lease that leaves it without a holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// `metadata.resourceVersion` of the version to replace.
    pub replaces: String,
    /// The `spec.leaseDurationSeconds` to write: how long writes of this agent may still be on their way to the API
    /// server, or, if this agent's term has not begun, how long an earlier holder may still act.
    pub lasts: Duration,
    /// The `spec.leaseTransitions` to write.
    pub transitions: i32,
}

/// The state of one agent in the election. Times are durations since any fixed instant.
#[derive(Clone, Debug)]
pub struct Election {
    /// The identity of this process as a holder; no other process ever has the same identity.
    me: String,
    timing: Timing,
    /// The newest version of the Lease that this agent has read or written, and when it first did so.
    seen: Option<(Lease, Duration)>,
    /// The period in which this agent may act as the leader; `None` if there is no such period.
    term: Option<Range<Duration>>,
}

impl Election {
    /// Creates the state of an agent that has not read the Lease yet.
    pub fn new(me: &str, timing: Timing) -> Self {
        Self { me: me.to_owned(), timing, seen: None, term: None }
    }

    /// Records the version of the Lease that was read; `None` if there is no Lease.
    pub fn read(&mut self, lease: Option<Lease>, now: Duration) {
        if !lease.as_ref().is_some_and(|lease| self.holds(lease)) {
            self.term = None;
        }
        let is_known =
            |(seen, _): &(Lease, Duration)| Some(&seen.version) == lease.as_ref().map(|lease| &lease.version);
        if !self.seen.as_ref().is_some_and(is_known) {
            self.seen = lease.map(|lease| (lease, now));
        }
    }

    /// The bid to send after a [`read`](Self::read); `None` while another agent holds a Lease that has not expired.
    pub fn bid(&self, now: Duration) -> Option<Bid> {
        let Some((lease, since)) = &self.seen else {
            let wait = self.timing.lease;
            return Some(Bid { replaces: None, transitions: 0, is_renewal: false, wait });
        };
        let is_renewal = self.holds(lease);
        let is_free = lease.holder.as_deref().is_none_or(str::is_empty);
        if !is_renewal && !is_free && now < since.saturating_add(lease.lasts) {
            return None;
        }
        let transitions = lease.transitions.saturating_add(i32::from(!is_renewal));
        let wait = match &self.term {
            // The last holder has given the Lease up; `lasts` is how long the last holder's writes may still be on
            // their way, or an earlier holder may still act (see `Release::lasts`).
            _ if is_free => lease.lasts.min(self.timing.lease),
            // This agent holds the Lease without a term, for example because the answer to its bid was lost, so the
            // previous holder may still act.
            None if is_renewal => self.timing.lease,
            Some(_) | None => Duration::ZERO,
        };
        Some(Bid { replaces: Some(lease.version.clone()), transitions, is_renewal, wait })
    }

    /// The write that gives the Lease up; `None` if this agent does not hold it. The term ends with this call: the
    /// agent must send no other write after this one, but need not wait for the answers to earlier writes.
    pub fn release(&mut self, now: Duration) -> Option<Release> {
        let has_led = self.term.take().is_some_and(|term| term.start <= now);
        let (lease, _) = self.seen.as_ref().filter(|(lease, _)| self.holds(lease))?;
        let (replaces, transitions) = (lease.version.clone(), lease.transitions);
        // If this agent's term has not begun, an earlier holder may still act.
        let lasts = if has_led { self.timing.request } else { self.timing.lease };
        Some(Release { replaces, lasts, transitions })
    }

    /// Records that the API server has accepted a bid, sent at `sent`, and that the Lease now has this
    /// `resourceVersion`.
    pub fn accepted(&mut self, bid: &Bid, version: &str, sent: Duration) {
        let end = sent.saturating_add(self.timing.act);
        let begin = match &self.term {
            Some(term) if bid.is_renewal => term.start,
            _ => sent.saturating_add(bid.wait),
        };
        let holder = Some(self.me.clone());
        let lease = Lease {
            holder,
            lasts: self.timing.lease,
            transitions: bid.transitions,
            version: version.to_owned(),
        };
        self.seen = Some((lease, sent));
        self.term = Some(begin..end);
    }

    /// The period in which this agent may act as the leader; `None` if there is no such period.
    pub const fn term(&self) -> Option<&Range<Duration>> {
        self.term.as_ref()
    }

    /// The holder in the newest known version of the Lease; `None` if no agent holds it.
    pub fn holder(&self) -> Option<&str> {
        let (lease, _) = self.seen.as_ref()?;
        lease.holder.as_deref().filter(|holder| !holder.is_empty())
    }

    /// How long to wait until the next [`read`](Self::read).
    pub fn pause(&self, now: Duration) -> Duration {
        let expires = self.seen.as_ref().filter(|(lease, _)| !self.holds(lease));
        let left = expires.map(|(lease, since)| since.saturating_add(lease.lasts).saturating_sub(now));
        left.map_or(self.timing.retry, |left| left.min(self.timing.retry))
    }

    fn holds(&self, lease: &Lease) -> bool {
        lease.holder.as_deref() == Some(&*self.me)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection, prelude::*};

    use super::*;

    const TIMING: Timing = Timing {
        lease: Duration::from_secs(15),
        act: Duration::from_secs(10),
        retry: Duration::from_secs(5),
        request: Duration::from_secs(3),
    };

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn held_by(holder: &str, version: &str) -> Option<Lease> {
        let holder = Some(holder.to_owned());
        Some(Lease { holder, lasts: TIMING.lease, transitions: 4, version: version.to_owned() })
    }

    #[test]
    fn follower_takes_over_after_a_whole_lease_without_a_renewal() {
        let mut election = Election::new("b", TIMING);
        election.read(held_by("a", "1"), at(100));
        assert_eq!((election.bid(at(100)), election.holder()), (None, Some("a")));
        election.read(held_by("a", "2"), at(110));
        election.read(held_by("a", "2"), at(120));
        assert_eq!(election.bid(at(124)), None);
        assert_eq!(election.pause(at(124)), at(1));
        let bid = election.bid(at(125)).unwrap();
        assert_eq!((bid.replaces.as_deref(), bid.transitions, bid.is_renewal), (Some("2"), 5, false));
        election.accepted(&bid, "3", at(125));
        assert_eq!(election.term(), Some(&(at(125)..at(135))));
    }

    #[test]
    fn leader_stops_before_its_lease_ends_and_at_once_when_another_holds_it() {
        let mut election = Election::new("a", TIMING);
        election.read(held_by("b", "1"), at(0));
        election.read(held_by("b", "1"), at(15));
        election.accepted(&election.bid(at(15)).unwrap(), "2", at(15));
        election.read(held_by("a", "2"), at(20));
        let bid = election.bid(at(20)).unwrap();
        assert!(bid.is_renewal);
        election.accepted(&bid, "3", at(20));
        assert_eq!(election.term(), Some(&(at(15)..at(30))), "renewed at 20, acts until 30");
        election.read(held_by("b", "4"), at(22));
        assert_eq!(election.term(), None);
    }

    #[test]
    fn new_lease_is_waited_out_because_an_old_holder_may_still_act() {
        for lease in [None, held_by("", "1")] {
            let mut election = Election::new("a", TIMING);
            election.read(lease, at(0));
            let bid = election.bid(at(0)).unwrap();
            election.accepted(&bid, "2", at(0));
            assert_eq!(election.term(), Some(&(at(15)..at(10))), "not yet");
            election.read(held_by("a", "2"), at(10));
            election.accepted(&election.bid(at(10)).unwrap(), "3", at(10));
            assert_eq!(election.term(), Some(&(at(15)..at(20))));
        }
    }

    #[test]
    fn released_lease_is_taken_over_after_the_last_request_of_its_holder() {
        let mut leader = Election::new("a", TIMING);
        leader.read(held_by("a", "1"), at(0));
        let bid = leader.bid(at(0)).unwrap();
        leader.accepted(&bid, "2", at(0));
        let release = leader.release(at(400)).unwrap();
        assert_eq!((release.replaces.as_str(), release.lasts, leader.term()), ("2", TIMING.request, None));
        assert_eq!(Election::new("b", TIMING).release(at(400)), None, "it does not hold the Lease");
        let mut next = Election::new("b", TIMING);
        let (holder, lasts) = (Some(String::new()), release.lasts);
        next.read(Some(Lease { holder, lasts, transitions: 1, version: "3".into() }), at(500));
        next.accepted(&next.bid(at(500)).unwrap(), "4", at(500));
        assert_eq!(next.term(), Some(&(at(503)..at(510))));
    }

    /// A leader's Lease is deleted. Another agent creates a new one, and gives it up before its own term begins.
    #[test]
    fn lease_that_is_released_before_its_term_is_waited_out() {
        let mut second = Election::new("b", TIMING);
        second.read(None, at(0));
        second.accepted(&second.bid(at(0)).unwrap(), "1", at(0));
        let Release { lasts, transitions, .. } = second.release(at(1)).unwrap();
        let mut third = Election::new("c", TIMING);
        third.read(
            Some(Lease { holder: Some(String::new()), lasts, transitions, version: "2".into() }),
            at(1),
        );
        third.accepted(&third.bid(at(1)).unwrap(), "3", at(1));
        assert_eq!(
            third.term().unwrap().start,
            at(16),
            "the deleted leader may act for 10 s from its last renewal"
        );
    }

    /// An event in a random history of the election.
    #[derive(Clone, Debug)]
    enum Happens {
        /// An agent reads the Lease and bids. `there` and `back` are the delays of request and answer, in seconds.
        Turn { agent: usize, there: u64, back: u64, lost: bool },
        /// An agent gives the Lease up; its last writes may still be on their way.
        Released(usize),
        /// This many seconds pass.
        Pass(u64),
        /// The Lease object is deleted.
        Deleted,
    }

    fn histories() -> impl Strategy<Value = Vec<Happens>> {
        let turn = (0..3usize, 0..4u64, 0..4u64, proptest::bool::weighted(0.2));
        let turn = turn.prop_map(|(agent, there, back, lost)| Happens::Turn { agent, there, back, lost });
        let one = prop_oneof![
            10 => turn,
            5 => (1..20u64).prop_map(Happens::Pass),
            1 => (0..3usize).prop_map(Happens::Released),
            1 => Just(Happens::Deleted),
        ];
        collection::vec(one, 1..80)
    }

    proptest! {
        /// Two agents never act at once, although their clocks differ (but run at the same rate), requests are slow or
        /// lost, and the Lease is sometimes deleted.
        #[test]
        fn no_two_agents_act_at_once(history in histories()) {
            let mut agents: Vec<Election> = ["a", "b", "c"].map(|name| Election::new(name, TIMING)).into();
            // How many seconds the clock of each agent is ahead of `now`.
            let ahead = [0, 1_000, 77];
            let (mut lease, mut version, mut now): (Option<Lease>, u32, u64) = (None, 0, 0);
            let mut writing = [0; 3];
            for happens in history {
                match happens {
                    Happens::Pass(seconds) => now += seconds,
                    Happens::Deleted => lease = None,
                    Happens::Released(agent) => {
                        let led = agents[agent].term().is_some_and(|term| term.contains(&at(now + ahead[agent])));
                        let Some(release) = agents[agent].release(at(now + ahead[agent])) else { continue };
                        if led {
                            writing[agent] = now + TIMING.request.as_secs();
                        }
                        if lease.as_ref().is_some_and(|lease| lease.version == release.replaces) {
                            version += 1;
                            let Release { lasts, transitions, .. } = release;
                            let (holder, version) = (Some(String::new()), version.to_string());
                            lease = Some(Lease { holder, lasts, transitions, version });
                        }
                    }
                    Happens::Turn { agent, there, back, lost } => {
                        let read_at = at(now + ahead[agent]);
                        agents[agent].read(lease.clone(), read_at);
                        let Some(bid) = agents[agent].bid(read_at) else { continue };
                        now += there;
                        if bid.replaces.as_ref() == lease.as_ref().map(|lease| &lease.version) {
                            version += 1;
                            let holder = Some(agents[agent].me.clone());
                            let (transitions, version) = (bid.transitions, version.to_string());
                            lease = Some(Lease { holder, lasts: TIMING.lease, transitions, version: version.clone() });
                            now += back;
                            if !lost {
                                agents[agent].accepted(&bid, &version, read_at);
                            }
                        }
                    }
                }
                let leads = |agent: usize| agents[agent].term().is_some_and(|term| term.contains(&at(now + ahead[agent])));
                let acts = |agent: &usize| leads(*agent) || now < writing[*agent];
                prop_assert!((0..3).filter(acts).count() <= 1);
            }
        }

        /// A single agent whose requests all succeed gets a term and keeps it.
        #[test]
        fn agent_alone_keeps_its_term(turns in 4..50u64) {
            let mut election = Election::new("a", TIMING);
            let (mut lease, mut now) = (None, Duration::ZERO);
            for turn in 0..turns {
                election.read(lease.take(), now);
                let bid = election.bid(now).unwrap();
                election.accepted(&bid, &turn.to_string(), now);
                lease = held_by("a", &turn.to_string());
                prop_assert!(turn < 3 || election.term().unwrap().contains(&now));
                now += election.pause(now);
            }
        }
    }
}
