//! The right to announce an address, for nodes that share addresses: a lease that a majority of the
//! [voters](super::voters) grants.
//!
//! Each member is a candidate for the addresses that it should announce, and most are voters for all. A voter promises
//! an address to one candidate at a time, for [`Timing::promise`] from when the question *arrived*. The candidate's
//! right lasts for [`Timing::right`], which is shorter, from when it *sent* the question. So the right ends, on the
//! candidate's own clock and without any message, before a voter may promise the address to another candidate. A voter
//! that has just started does not know its earlier promises, so it promises nothing for [`Timing::promise`]. Any two
//! majorities share a voter, so at most one member has the right. (Two members under [`Prefer::Availability`] are the
//! exception.)
//!
//! This needs clocks that never stop and whose rates differ by less than [`Timing`]'s margin. A virtual machine that
//! was paused wakes up with a right that has expired for all other members; it loses that right when it receives the
//! new owner's announcement (`lb_ebpf::rules::announce`).
//!
//! The belief of a member about which others are alive only determines whether it asks. A wrong belief delays a
//! takeover, but never gives two members the right (apart from the exception above).

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::voters::Voters;

/// A time or a duration in nanoseconds.
pub type Nanos = u64;

const MILLISECOND: Nanos = 1_000_000;

/// Intervals of the protocol.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Between two questions of a candidate.
    pub interval: Nanos,
    /// How long a candidate has the right after it sent a question that a majority has granted.
    pub right: Nanos,
    /// How long a voter keeps its promise.
    pub promise: Nanos,
    /// How long a member counts as alive after its last question.
    pub silence: Nanos,
    /// How long a better member must have been alive before the owner of an address yields to it.
    pub settle: Nanos,
}

impl Timing {
    /// A right ends 300 ms before the promise: enough for clocks that differ by 1 %, and for the agent to be slow.
    pub const DEFAULT: Self = Self {
        interval: 200 * MILLISECOND,
        right: 900 * MILLISECOND,
        promise: 1_200 * MILLISECOND,
        silence: 700 * MILLISECOND,
        settle: 5_000 * MILLISECOND,
    };
}

/// The behaviour of two members that receive no messages from each other. (Of three or more, a majority continues.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Prefer {
    /// Each announces, so a dead node is replaced. If both are alive, both answer until each receives the other's
    /// announcements.
    #[default]
    Availability,
    /// Neither announces, so two nodes never answer at once, but a dead node is not replaced.
    Single,
}

/// A question of a candidate. (Messages carry field names, so that agents of different versions understand each other.)
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// Grows with each question, also over restarts of the candidate.
    pub number: u64,
    /// Addresses that the candidate asks for.
    pub wants: Vec<IpAddr>,
    /// Addresses that the candidate gives back.
    pub leaves: Vec<IpAddr>,
    /// [`Voters::generation`] that it knows.
    #[serde(default)]
    pub generation: u64,
    /// Whether it ends, and has given back everything: the others need not wait until they miss it.
    #[serde(default)]
    pub retires: bool,
}

/// The answer of a voter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// [`Ask::number`] of the question.
    pub number: u64,
    /// The addresses that the voter promises.
    pub grants: Vec<IpAddr>,
}

/// A right to announce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right {
    /// When the member got the right.
    pub since: Nanos,
    /// When the right ends, unless the member renews it.
    pub deadline: Nanos,
}

/// The most addresses in one question, which must fit into a packet.
const ADDRESSES: usize = 20;

/// The state of one member.
#[derive(Clone, Debug)]
pub struct Leases {
    this: Arc<str>,
    timing: Timing,
    prefer: Prefer,
    voters: Voters,
    /// When this member got to know the voters.
    voters_since: Nanos,
    /// The other members; not all are voters.
    others: BTreeMap<Arc<str>, Peer>,
    /// The nodes that may announce each address, the best first.
    candidates: BTreeMap<IpAddr, Vec<Arc<str>>>,
    /// This member promises nothing before this time.
    mute_until: Nanos,
    promises: BTreeMap<IpAddr, Promise>,
    number: u64,
    /// Numbers of recent questions, and when they were sent.
    sent: VecDeque<(u64, Nanos)>,
    /// For each address and each member that has granted it: when the latest granted question was sent.
    evidence: BTreeMap<IpAddr, BTreeMap<Arc<str>, Nanos>>,
    rights: BTreeMap<IpAddr, Right>,
    /// Whether this member ends.
    retired: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Peer {
    /// When this member last accepted a question of it.
    heard: Option<Nanos>,
    /// The number of the member's last question.
    number: u64,
    /// When the member last became alive.
    since: Nanos,
    /// The generation of the voters that it knows, and since when it is known to know it.
    generation: (u64, Nanos),
    /// Whether it has ended.
    retired: bool,
}

#[derive(Clone, Debug)]
struct Promise {
    to: Arc<str>,
    until: Nanos,
}

impl Leases {
    /// The state of the member `this`, which starts at `now`. `first_number` is greater than the numbers of all earlier
    /// questions of `this`: for example, the nanoseconds since boot.
    pub fn new(
        this: Arc<str>,
        voters: Voters,
        prefer: Prefer,
        timing: Timing,
        (now, first_number): (Nanos, u64),
    ) -> Self {
        let others = voters.names.iter().filter(|name| **name != this);
        Self {
            others: others.map(|name| (name.clone(), Peer::default())).collect(),
            this,
            timing,
            prefer,
            voters,
            voters_since: now,
            candidates: BTreeMap::new(),
            mute_until: now + timing.promise,
            promises: BTreeMap::new(),
            number: first_number,
            sent: VecDeque::new(),
            evidence: BTreeMap::new(),
            rights: BTreeMap::new(),
            retired: false,
        }
    }

    /// The voters that this member knows.
    pub const fn voters(&self) -> &Voters {
        &self.voters
    }

    /// Replaces the voters, unless this member knows a newer generation.
    pub fn set_voters(&mut self, voters: Voters, now: Nanos) {
        if voters.generation > self.voters.generation {
            (self.voters, self.voters_since) = (voters, now);
            self.set_members(self.others.keys().cloned().collect::<Vec<_>>());
        }
    }

    /// Replaces the other members; voters always are members.
    pub fn set_members(&mut self, names: impl IntoIterator<Item = Arc<str>>) {
        let names = names.into_iter().chain(self.voters.names.iter().cloned());
        let known = |name: Arc<str>| (name.clone(), self.others.get(&name).copied().unwrap_or_default());
        self.others = names.filter(|name| *name != self.this).map(known).collect();
    }

    /// Whether a majority of the voters has known the present ones for longer than a promise lasts. Its promises to
    /// members that know older ones have ended then.
    pub fn may_change(&self, now: Nanos) -> bool {
        let Timing { promise, right, .. } = self.timing;
        let settled = |since: Nanos| now.saturating_sub(since) >= promise + (promise - right);
        let knows = |name: &&Arc<str>| match self.others.get(*name) {
            Some(Peer { generation: (generation, since), .. }) => {
                *generation >= self.voters.generation && settled(*since)
            }
            None => **name == self.this && settled(self.voters_since),
        };
        self.voters.names.iter().filter(knows).count() >= self.quorum(now)
    }

    /// The voters that this member proposes. Voters propose one after the other, so that most proposals meet no rival.
    pub fn proposal(&self, exists: impl Fn(&str) -> bool, now: Nanos) -> Option<Voters> {
        let mut alive = self.voters.names.iter().filter(|name| self.lives(name, now, 0));
        let rank = u64::try_from(alive.position(|name| *name == self.this)?).ok()?;
        let is_due = now.saturating_sub(self.voters_since) >= rank * self.timing.settle;
        // A member that has just started promises nothing yet.
        let others = self.others.keys().filter(|name| self.lives(name, now, self.timing.promise));
        let next = self.voters.next(exists, others.chain([&self.this]))?;
        let is_due = is_due && !self.retired && !self.is_behind(now);
        (is_due && self.may_change(now)).then_some(next)
    }

    /// Ends this member: it gives back all addresses. Returns the questions that tell the others; the caller must stop
    /// answering before it sends them.
    pub fn retire(&mut self, now: Nanos) -> Vec<Ask> {
        self.retired = true;
        self.tick(now)
    }

    /// Replaces the nodes that may announce each address.
    pub fn set_candidates(&mut self, candidates: BTreeMap<IpAddr, Vec<Arc<str>>>) {
        self.candidates = candidates;
    }

    /// The members that are alive, as far as this one knows.
    pub fn alive(&self, now: Nanos) -> impl Iterator<Item = &Arc<str>> {
        let others = self.others.iter().filter(move |(_, peer)| self.hears(peer, now)).map(|(name, _)| name);
        std::iter::once(&self.this).chain(others)
    }

    /// The member that should announce an address; `None` if no candidate is alive.
    pub fn owner(&self, address: IpAddr, now: Nanos) -> Option<&Arc<str>> {
        let is_alive = |node: &&Arc<str>| self.lives(node, now, 0);
        self.candidates.get(&address)?.iter().find(is_alive)
    }

    /// The rights that hold at `now`.
    pub fn rights(&self, now: Nanos) -> impl Iterator<Item = (IpAddr, Right)> {
        let rights = self.rights.iter().map(|(address, right)| (*address, *right));
        rights.filter(move |(_, right)| now < right.deadline)
    }

    /// The next questions, for all other members. Rights that this member gives back end with this call, so the caller
    /// must stop answering for these addresses before it sends the questions.
    pub fn tick(&mut self, now: Nanos) -> Vec<Ask> {
        let wants: Vec<IpAddr> =
            self.candidates.keys().copied().filter(|address| self.wants(*address, now)).collect();
        let left = |address: &&IpAddr| wants.binary_search(address).is_err();
        let leaves: Vec<IpAddr> = self.evidence.keys().filter(left).copied().collect();
        for address in &leaves {
            self.evidence.remove(address);
            self.rights.remove(address);
        }
        if !leaves.is_empty() {
            // Answers to earlier questions may grant addresses that this member gives back now.
            self.sent.clear();
        }
        self.sent.retain(|(_, at)| now.saturating_sub(*at) < self.timing.right);
        let parts = wants.chunks(ADDRESSES).map(<[IpAddr]>::to_vec).map(|wants| (wants, Vec::new()));
        let leaving = leaves.chunks(ADDRESSES).map(|leaves| (Vec::new(), leaves.to_vec()));
        let mut parts: Vec<(Vec<IpAddr>, Vec<IpAddr>)> = parts.chain(leaving).collect();
        if parts.is_empty() {
            // An empty question shows the other members that this one is alive.
            parts.push((Vec::new(), Vec::new()));
        }
        let asks = parts.into_iter().map(|(wants, leaves)| {
            self.number += 1;
            self.sent.push_back((self.number, now));
            let (generation, retires) = (self.voters.generation, self.retired);
            Ask { number: self.number, wants, leaves, generation, retires }
        });
        let asks: Vec<Ask> = asks.collect();
        let this = self.this.clone();
        for ask in &asks {
            let answer = self.vote(&this, ask, now);
            self.count(&this, &answer, now);
        }
        asks
    }

    /// Answers the question of another member. `None` for a member that is not configured, and for a question that is
    /// older than one already answered, because it might give back what the newer one asked for. (Once the member was
    /// silent for [`Timing::promise`], no promise to it is left, so any of its questions is answered.)
    pub fn asked(&mut self, from: &Arc<str>, ask: &Ask, now: Nanos) -> Option<Answer> {
        let promise = self.timing.promise;
        let peer = self.others.get_mut(from)?;
        let was_silent = peer.heard.is_none_or(|heard| now.saturating_sub(heard) >= promise);
        if ask.number <= peer.number && !was_silent {
            return None;
        }
        peer.number = ask.number;
        peer.retired = ask.retires;
        if peer.generation.0 != ask.generation {
            peer.generation = (ask.generation, now);
        }
        self.hear(from, now)?;
        Some(self.vote(from, ask, now))
    }

    /// Processes the answer of another member. Only questions show that a member is alive: one that cannot announce
    /// answers as well, and so does one whose questions are refused because it has rebooted.
    pub fn answered(&mut self, from: &Arc<str>, answer: &Answer, now: Nanos) {
        if self.others.contains_key(from) {
            self.count(from, answer, now);
        }
    }

    fn hear(&mut self, from: &Arc<str>, now: Nanos) -> Option<()> {
        let silence = self.timing.silence;
        let peer = self.others.get_mut(from)?;
        if peer.heard.is_none_or(|heard| now.saturating_sub(heard) >= silence) {
            peer.since = now;
        }
        peer.heard = Some(now);
        Some(())
    }

    fn hears(&self, peer: &Peer, now: Nanos) -> bool {
        !peer.retired && peer.heard.is_some_and(|heard| now.saturating_sub(heard) < self.timing.silence)
    }

    /// Whether a member has been alive for at least `settled`.
    fn lives(&self, node: &Arc<str>, now: Nanos, settled: Nanos) -> bool {
        let heard = |peer: &Peer| {
            let is_settled = now.saturating_sub(peer.since) >= settled;
            is_settled && self.hears(peer, now) && !self.is_outdated(peer, now)
        };
        *node == self.this || self.others.get(node).is_some_and(heard)
    }

    /// Whether this member has missed a change of the voters, as others tell. It votes, but asks for nothing: its own
    /// promise to itself would only keep others from a majority.
    fn is_behind(&self, now: Nanos) -> bool {
        let knows_more = |peer: &Peer| {
            let (generation, since) = peer.generation;
            let had_time = now.saturating_sub(since) >= self.timing.promise;
            generation > self.voters.generation && had_time && self.hears(peer, now)
        };
        self.others.values().any(knows_more)
    }

    /// Whether a member has missed a change of the voters: nobody grants it anything.
    fn is_outdated(&self, peer: &Peer, now: Nanos) -> bool {
        let had_time = now.saturating_sub(self.voters_since) >= self.timing.promise;
        had_time && peer.generation.0 < self.voters.generation
    }

    /// Whether this member asks for the address: it is the best candidate alive. If this member has the right, a better
    /// candidate must have been alive for [`Timing::settle`] first.
    fn wants(&self, address: IpAddr, now: Nanos) -> bool {
        // A late answer may grant an address that is no candidate any more.
        let Some(candidates) = self.candidates.get(&address) else { return false };
        let has_right = self.rights.get(&address).is_some_and(|right| now < right.deadline);
        let settled = if has_right { self.timing.settle } else { 0 };
        let best = candidates.iter().find(|node| self.lives(node, now, settled));
        !self.retired && !self.is_behind(now) && best.is_some_and(|best| *best == self.this)
    }

    fn vote(&mut self, from: &Arc<str>, ask: &Ask, now: Nanos) -> Answer {
        for address in &ask.leaves {
            self.withdraw(*address, from);
        }
        let mut grants = Vec::new();
        // An agent that has just started does not know which generation it had before: it waits for the present one.
        let refuses = self.voters.names.is_empty() || ask.generation < self.voters.generation;
        for address in ask.wants.iter().filter(|_| !refuses) {
            let taken =
                self.promises.get(address).is_some_and(|promise| promise.to != *from && now < promise.until);
            if now >= self.mute_until && !taken {
                self.promises
                    .insert(*address, Promise { to: from.clone(), until: now + self.timing.promise });
                grants.push(*address);
            }
        }
        self.promises.retain(|_, promise| now < promise.until);
        Answer { number: ask.number, grants }
    }

    fn withdraw(&mut self, address: IpAddr, from: &Arc<str>) {
        if self.promises.get(&address).is_some_and(|promise| promise.to == *from) {
            self.promises.remove(&address);
        }
    }

    fn count(&mut self, from: &Arc<str>, answer: &Answer, now: Nanos) {
        let Some((_, sent)) = self.sent.iter().find(|(number, _)| *number == answer.number).copied() else {
            return;
        };
        for address in &answer.grants {
            if !self.wants(*address, now) {
                continue;
            }
            let evidence = self.evidence.entry(*address).or_default();
            let latest = evidence.entry(from.clone()).or_insert(sent);
            *latest = sent.max(*latest);
            let of_voters = evidence.iter().filter(|(name, _)| self.voters.names.contains(*name));
            let mut times: Vec<Nanos> = of_voters.map(|(_, sent)| *sent).collect();
            times.sort_unstable_by(|left, right| right.cmp(left));
            let Some(since_majority) = times.get(self.quorum(now) - 1) else { continue };
            let deadline = since_majority + self.timing.right;
            if now < deadline {
                let known = self.rights.get(address).filter(|right| now < right.deadline);
                let since = known.map_or(now, |right| right.since);
                self.rights.insert(*address, Right { since, deadline });
            }
        }
    }

    /// The number of voters that must agree.
    fn quorum(&self, now: Nanos) -> usize {
        let is_gone = |peer: &Peer| {
            let silence = |heard| now.saturating_sub(heard) >= self.timing.promise;
            peer.retired || peer.heard.is_none_or(silence)
        };
        let is_alone = |name: &Arc<str>| *name == self.this || self.others.get(name).is_none_or(is_gone);
        let names = &self.voters.names;
        let pair = names.len() == 2 && names.contains(&self.this) && self.prefer == Prefer::Availability;
        if pair && names.iter().all(is_alone) { 1 } else { self.voters.majority() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const SECOND: Nanos = 1_000 * MILLISECOND;

    fn name(name: &str) -> Arc<str> {
        name.into()
    }

    /// The member `b` of `a`, `b` and `c`, of which `a` is the best candidate for [`A`]; long after its start.
    fn second_of_three() -> Leases {
        let names = ["a", "b", "c"].map(name);
        let voters = Voters { generation: 1, names: names.clone().into() };
        let mut leases = Leases::new(name("b"), voters, Prefer::Single, Timing::DEFAULT, (0, 1));
        leases.set_candidates(BTreeMap::from([(A, names.into())]));
        leases
    }

    fn ask(number: u64) -> Ask {
        Ask { number, wants: vec![A], leaves: vec![], generation: 1, retires: false }
    }

    #[test]
    fn question_of_a_rebooted_member_is_answered_although_its_numbers_begin_anew() {
        let mut leases = second_of_three();
        assert!(leases.asked(&name("a"), &ask(1_000_000), 10 * SECOND).is_some());
        let back = 13 * SECOND;
        // The rebooted member answers questions before its own arrive.
        leases.answered(&name("a"), &Answer { number: 1, grants: vec![] }, back);
        let answer = leases.asked(&name("a"), &ask(5), back + 1).expect("an answer");
        assert_eq!(answer.grants, [A]);
    }

    #[test]
    fn member_that_only_answers_is_replaced() {
        let mut leases = second_of_three();
        let mut now = 10 * SECOND;
        drop(leases.asked(&name("a"), &ask(7), now));
        assert_eq!(leases.owner(A, now), Some(&name("a")));
        for _ in 0..10 {
            now += Timing::DEFAULT.interval;
            leases.answered(&name("a"), &Answer { number: 0, grants: vec![] }, now);
        }
        assert_eq!(leases.owner(A, now), Some(&name("b")));
        assert_eq!(leases.tick(now)[0].wants, [A]);
    }

    #[test]
    fn late_grant_of_an_address_that_is_gone_changes_nothing() {
        let mut leases = second_of_three();
        let now = 10 * SECOND;
        let number = leases.tick(now)[0].number;
        leases.set_candidates(BTreeMap::new());
        leases.answered(&name("c"), &Answer { number, grants: vec![A] }, now + 1);
        assert_eq!(leases.rights(now + 2).count(), 0);
    }

    #[test]
    fn member_whose_right_has_expired_yields_to_a_better_one_at_once() {
        let mut leases = second_of_three();
        let mut now = 10 * SECOND;
        let number = leases.tick(now)[0].number;
        leases.answered(&name("c"), &Answer { number, grants: vec![A] }, now + 1);
        assert_eq!(leases.rights(now + 2).count(), 1);
        now += Timing::DEFAULT.right + 1;
        drop(leases.asked(&name("a"), &ask(9), now));
        assert_eq!(leases.tick(now)[0].wants, [] as [IpAddr; 0]);
    }
}
