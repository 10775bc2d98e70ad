//! The right to announce an address, for nodes that share addresses: a lease by a majority of the configured members.
//!
//! Each member is a candidate for the addresses that it should announce, and a voter for all. A voter promises an address to
//! one candidate at a time, for [`Timing::promise`] from when the question *arrived*. A candidate counts its right from when
//! it *sent* the question, for [`Timing::right`], which is shorter. So its right ends, on its own clock and without any
//! message, before a voter may promise the address to another. A voter that has just started has forgotten its promises, and
//! promises nothing for as long as one lasts. Two majorities have a voter in common: at most one member has the right.
//!
//! This needs clocks that run at the same rate within [`Timing`]'s margin and that never stop. A virtual machine that was
//! paused wakes up with a right that others believe over; it loses it when it hears the new owner's announcement
//! (`lb_ebpf::rules::announce`).
//!
//! Who is alive only decides who asks. Wrong beliefs cost time, and never make two answer.

use std::{
    collections::{BTreeMap, VecDeque},
    net::IpAddr,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

/// Nanoseconds.
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
    /// How long a member that is not heard counts as alive.
    pub silence: Nanos,
    /// How long a member must be heard before the owner of an address yields to it.
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

/// What two members do when they do not hear each other. (Of three or more, a majority goes on.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Prefer {
    /// Each announces: a dead node is replaced. If both live, both answer until they hear each other's announcements.
    #[default]
    Availability,
    /// None announces: never do two answer, and a dead node is not replaced.
    Single,
}

/// A question of a candidate. (Named fields travel between agents of different versions.)
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// Grows with each question, also over restarts of the candidate.
    pub number: u64,
    /// Addresses that the candidate asks for.
    pub wants: Vec<IpAddr>,
    /// Addresses that it gives back.
    pub leaves: Vec<IpAddr>,
}

/// The answer of a voter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// [`Ask::number`]
    pub number: u64,
    /// The addresses that the voter promises.
    pub grants: Vec<IpAddr>,
}

/// A right to announce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right {
    /// When the member got it.
    pub since: Nanos,
    /// When it ends, unless it is renewed.
    pub deadline: Nanos,
}

/// Addresses in one question, so that it fits into a packet.
const ADDRESSES: usize = 20;

/// One member's part in the protocol.
#[derive(Clone, Debug)]
pub struct Leases {
    this: Arc<str>,
    timing: Timing,
    prefer: Prefer,
    /// The other configured members.
    others: BTreeMap<Arc<str>, Peer>,
    /// The nodes that may announce each address, the best first.
    candidates: BTreeMap<IpAddr, Vec<Arc<str>>>,
    /// No promise is made before this time.
    mute_until: Nanos,
    promises: BTreeMap<IpAddr, Promise>,
    number: u64,
    /// When recent questions were sent.
    sent: VecDeque<(u64, Nanos)>,
    /// When the last question was sent that each member has granted, by address.
    evidence: BTreeMap<IpAddr, BTreeMap<Arc<str>, Nanos>>,
    rights: BTreeMap<IpAddr, Right>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Peer {
    heard: Option<Nanos>,
    /// The number of its last question.
    number: u64,
    /// Since when the member has been heard without a pause.
    since: Nanos,
}

#[derive(Clone, Debug)]
struct Promise {
    to: Arc<str>,
    until: Nanos,
}

impl Leases {
    /// The part of the member `this`, which starts at `now`; `others` are all other configured members. `first_number` is
    /// greater than those of its earlier questions: for example, the nanoseconds since boot.
    pub fn new(
        this: Arc<str>,
        others: impl IntoIterator<Item = Arc<str>>,
        prefer: Prefer,
        timing: Timing,
        (now, first_number): (Nanos, u64),
    ) -> Self {
        Self {
            this,
            timing,
            prefer,
            others: others.into_iter().map(|name| (name, Peer::default())).collect(),
            candidates: BTreeMap::new(),
            mute_until: now + timing.promise,
            promises: BTreeMap::new(),
            number: first_number,
            sent: VecDeque::new(),
            evidence: BTreeMap::new(),
            rights: BTreeMap::new(),
        }
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

    /// The member that should announce an address.
    pub fn owner(&self, address: IpAddr, now: Nanos) -> Option<&Arc<str>> {
        let is_alive = |node: &&Arc<str>| self.lives(node, now, 0);
        self.candidates.get(&address)?.iter().find(is_alive)
    }

    /// The rights that hold at `now`.
    pub fn rights(&self, now: Nanos) -> impl Iterator<Item = (IpAddr, Right)> {
        let rights = self.rights.iter().map(|(address, right)| (*address, *right));
        rights.filter(move |(_, right)| now < right.deadline)
    }

    /// The next questions, for all other members. Rights that it gives back end with this call: the caller must stop
    /// answering before it sends.
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
            // Answers to earlier questions may be about promises that are given back now.
            self.sent.clear();
        }
        self.sent.retain(|(_, at)| now.saturating_sub(*at) < self.timing.right);
        let parts = wants.chunks(ADDRESSES).map(<[IpAddr]>::to_vec).map(|wants| (wants, Vec::new()));
        let leaving = leaves.chunks(ADDRESSES).map(|leaves| (Vec::new(), leaves.to_vec()));
        let mut parts: Vec<(Vec<IpAddr>, Vec<IpAddr>)> = parts.chain(leaving).collect();
        if parts.is_empty() {
            // The others must know that this member lives.
            parts.push((Vec::new(), Vec::new()));
        }
        let asks = parts.into_iter().map(|(wants, leaves)| {
            self.number += 1;
            self.sent.push_back((self.number, now));
            Ask { number: self.number, wants, leaves }
        });
        let asks: Vec<Ask> = asks.collect();
        let this = self.this.clone();
        for ask in &asks {
            let answer = self.vote(&this, ask, now);
            self.count(&this, &answer, now);
        }
        asks
    }

    /// Answers the question of another member; `None` for a stranger, and for a question that is older than one before: it
    /// may give back what that one asked for. (A member that was silent for as long as a promise has none.)
    pub fn asked(&mut self, from: &Arc<str>, ask: &Ask, now: Nanos) -> Option<Answer> {
        let promise = self.timing.promise;
        let peer = self.others.get_mut(from)?;
        let was_silent = peer.heard.is_none_or(|heard| now.saturating_sub(heard) >= promise);
        if ask.number <= peer.number && !was_silent {
            return None;
        }
        peer.number = ask.number;
        self.hear(from, now)?;
        Some(self.vote(from, ask, now))
    }

    /// Takes the answer of another member.
    pub fn answered(&mut self, from: &Arc<str>, answer: &Answer, now: Nanos) {
        if self.hear(from, now).is_some() {
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
        peer.heard.is_some_and(|heard| now.saturating_sub(heard) < self.timing.silence)
    }

    /// Whether a member has been alive for at least `settled`.
    fn lives(&self, node: &Arc<str>, now: Nanos, settled: Nanos) -> bool {
        let heard = |peer: &Peer| self.hears(peer, now) && now.saturating_sub(peer.since) >= settled;
        *node == self.this || self.others.get(node).is_some_and(heard)
    }

    /// Whether this member asks for the address: it is the best one alive. If it has the address, a better one must have
    /// settled first.
    fn wants(&self, address: IpAddr, now: Nanos) -> bool {
        let settled = if self.rights.contains_key(&address) { self.timing.settle } else { 0 };
        let best = self.candidates[&address].iter().find(|node| self.lives(node, now, settled));
        best.is_some_and(|best| *best == self.this)
    }

    fn vote(&mut self, from: &Arc<str>, ask: &Ask, now: Nanos) -> Answer {
        for address in &ask.leaves {
            self.withdraw(*address, from);
        }
        let mut grants = Vec::new();
        for address in &ask.wants {
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
            let mut times: Vec<Nanos> = evidence.values().copied().collect();
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

    /// The number of members that must agree, this one included.
    fn quorum(&self, now: Nanos) -> usize {
        let majority = self.others.len().div_ceil(2) + 1;
        let alone = self
            .others
            .values()
            .all(|peer| peer.heard.is_none_or(|heard| now.saturating_sub(heard) >= self.timing.promise));
        if self.others.len() == 1 && self.prefer == Prefer::Availability && alone { 1 } else { majority }
    }
}
