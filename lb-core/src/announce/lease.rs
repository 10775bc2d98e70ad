//! The right to announce an address, for nodes that share addresses: a lease that a majority of the
//! [voters](super::voters) grants.
//!
//! Each member is a candidate for the addresses that it should announce. Most members are also voters, and each voter
//! votes on all addresses. A voter grants an address to one candidate at a time, for [`Timing::grant`] from when the
//! request *arrived*. The candidate's right lasts for [`Timing::right`], which is shorter, from when the candidate
//! *sent* the request. So the right ends, on the candidate's own clock and without any message, before a voter may
//! grant the address to another candidate. A voter that has just started does not know its earlier grants, so it grants
//! nothing for [`Timing::grant`]. Any two majorities share a voter, so at most one member has the right. (Two members
//! under [`Prefer::Availability`] are the exception.)
//!
//! The protocol needs clocks that never stop and whose rates differ by less than [`Timing`]'s margin. A virtual machine
//! that was paused wakes up with a right that has expired for all other members; it loses that right when it receives
//! the new owner's announcement (`lb_ebpf::rules::announce`).
//!
//! A member's view of which other members are alive determines only whether it requests an address, and which voters it
//! proposes. A wrong view delays a takeover, but never gives two members the right (apart from the exception above).

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::IpAddr,
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{
    evidence::Evidence,
    freshness::{Challenge, Challenges, Freshness, Novelty, RequestId},
    voters::{Part, Parts, Voters, chunks},
};

/// A time or a duration in nanoseconds.
pub type Nanos = u64;

const MILLISECOND: Nanos = 1_000_000;

/// The intervals of the protocol, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Maximum interval at which a member sends its requests; a change makes the member send its requests sooner.
    pub interval: Nanos,
    /// How long a right lasts, counted from when the candidate sent the request that a majority has granted.
    pub right: Nanos,
    /// How long a voter's grant lasts, counted from when the request arrived.
    pub grant: Nanos,
    /// How long a member counts as alive after its last request.
    pub silence: Nanos,
    /// How long a better member must have been alive before the owner of an address yields to it. Also how long a voter
    /// gives each live voter before it, in the order of names, to propose a change of the voters.
    pub settle: Nanos,
}

impl Timing {
    /// The right of a node ends 300 ms before the grants that it is based on. This covers clocks of which one runs 1 %
    /// faster than the other, and delays of the agent.
    pub const DEFAULT: Self = Self {
        interval: 200 * MILLISECOND,
        right: 900 * MILLISECOND,
        grant: 1_200 * MILLISECOND,
        silence: 700 * MILLISECOND,
        settle: 5_000 * MILLISECOND,
    };
}

/// What two members do if neither receives messages of the other. (Of three or more members, a majority continues.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Prefer {
    /// Each of the two announces, so a live member replaces a dead one. If both are alive, both answer until each
    /// receives the other's announcements.
    #[default]
    Availability,
    /// Neither of the two announces, so two nodes never answer at once, but no node replaces a dead one.
    Single,
}

/// A request of a candidate to a voter. (Messages carry field names, so that agents of different versions understand
/// each other.)
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// The id of the request.
    pub id: RequestId,
    /// The last challenge that the candidate has received from the voter.
    #[serde(default)]
    pub echo: Option<Challenge>,
    /// Addresses that the candidate asks the voter to grant.
    pub wants: Vec<IpAddr>,
    /// Addresses that the candidate gives back.
    pub leaves: Vec<IpAddr>,
    /// Addresses for which the candidate is the best one alive, but that its data plane does not serve. Until the
    /// candidate stops declining them, the next best candidate requests them. Agents of older versions wait for the
    /// candidate that declines.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub declines: Vec<IpAddr>,
    /// [`Voters::generation`] of the voters that the candidate knows.
    #[serde(default)]
    pub generation: u64,
    /// Whether the candidate is stopping and has given back all addresses, so that other members take the addresses
    /// over without waiting for [`Timing::silence`].
    #[serde(default)]
    pub retires: bool,
    /// The devices on which the candidate can announce, as far as advertisements name them; `None` if the request
    /// leaves them out.
    #[serde(default)]
    pub devices: Option<BTreeSet<String>>,
}

/// The answer of a voter to a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// [`Ask::id`] of the request, so that the candidate ignores a duplicate of an earlier answer.
    pub id: RequestId,
    /// The addresses that the voter grants to the candidate.
    pub grants: Vec<IpAddr>,
    /// The challenge, if the voter has not processed the request: the candidate must echo it in its next request.
    #[serde(default)]
    pub challenge: Option<Challenge>,
    /// Some of the voters, if the candidate knows only voters of an older generation.
    #[serde(default)]
    pub voters: Option<Part>,
}

/// A member's right to announce one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right {
    /// When the member got the right.
    pub since: Nanos,
    /// When the right ends unless the member renews it.
    pub deadline: Nanos,
}

/// Maximum length in bytes of the list of devices in a request; a longer list is left out.
const DEVICES: usize = 200;

/// The state of one member in the election protocol.
#[derive(Clone, Debug)]
pub struct Leases {
    this: Arc<str>,
    timing: Timing,
    prefer: Prefer,
    voters: Voters,
    /// When this member first knew the present voters.
    voters_since: Nanos,
    /// Parts of a newer generation of voters that other members have sent.
    parts: Parts,
    /// The other members, including those that are no voters.
    others: BTreeMap<Arc<str>, Peer>,
    /// The nodes that may announce each address, best first.
    candidates: BTreeMap<IpAddr, Vec<Arc<str>>>,
    /// When this member learned the candidates; `None` if it has just started and knows none. Until then it sends no
    /// requests: other members would count it as alive and wait for it, although it could not announce any address.
    asks_since: Option<Nanos>,
    /// The addresses that the data plane of this member does not serve.
    unserved: BTreeSet<IpAddr>,
    /// For each address, the better candidate that this member waits for, and since when that candidate has not
    /// requested the address.
    awaited: BTreeMap<IpAddr, (Arc<str>, Nanos)>,
    /// Until this time this member grants nothing, since it may have granted addresses before its start.
    mute_until: Nanos,
    grants: BTreeMap<IpAddr, Grant>,
    /// Id of the last request that this member sent.
    id: RequestId,
    challenges: Challenges,
    /// [`RequestId::number`] of each recent request, with the time at which this member sent it.
    sent: VecDeque<(u64, Nanos)>,
    evidence: Evidence,
    rights: BTreeMap<IpAddr, Right>,
    /// Whether this member is stopping, and no longer requests addresses.
    retired: bool,
    /// The devices of this member, as in [`Ask::devices`].
    devices: Option<BTreeSet<String>>,
    /// Whether the devices of another member have changed since the last [`Self::take_devices_changed`].
    devices_changed: bool,
}

#[derive(Clone, Debug)]
struct Peer {
    /// When this member last accepted a request from the peer; `None` if it never did.
    heard: Option<Nanos>,
    freshness: Freshness,
    /// The last challenge that the peer has given to this member.
    echo: Option<Challenge>,
    /// When the peer last became alive.
    since: Nanos,
    /// The generation of the voters that the peer knows, and when this member first received it from the peer.
    generation: (u64, Nanos),
    /// Whether the peer has announced that it stops.
    retired: bool,
    /// The last list of devices that the peer has sent ([`Ask::devices`]); `None` if it has sent none.
    devices: Option<BTreeSet<String>>,
    /// The addresses that the peer has declined ([`Ask::declines`]) within [`Timing::settle`], each with the time at
    /// which the peer last reported that to this member.
    declined: BTreeMap<IpAddr, Nanos>,
    /// The addresses for which this member has waited in vain for a request of the peer: see [`Leases::pass_over`].
    passed_over: BTreeSet<IpAddr>,
}

#[derive(Clone, Debug)]
struct Grant {
    to: Arc<str>,
    until: Nanos,
}

impl Peer {
    const fn new(challenges: &mut Challenges) -> Self {
        let freshness = Freshness::new(challenges);
        let (heard, echo, since, generation) = (None, None, 0, (0, 0));
        let declined = BTreeMap::new();
        let passed_over = BTreeSet::new();
        Self {
            heard,
            freshness,
            echo,
            since,
            generation,
            retired: false,
            devices: None,
            declined,
            passed_over,
        }
    }
}

impl Leases {
    /// Creates the state of the member `this`, which starts at `now`. `incarnation` is a random number that no earlier
    /// start of `this` has used.
    pub fn new(
        this: Arc<str>,
        voters: Voters,
        prefer: Prefer,
        timing: Timing,
        (now, incarnation): (Nanos, u64),
    ) -> Self {
        let mut leases = Self {
            others: BTreeMap::new(),
            this,
            timing,
            prefer,
            voters,
            voters_since: now,
            parts: Parts::default(),
            candidates: BTreeMap::new(),
            asks_since: None,
            unserved: BTreeSet::new(),
            awaited: BTreeMap::new(),
            mute_until: now + timing.grant,
            grants: BTreeMap::new(),
            id: RequestId { incarnation, number: 0 },
            challenges: Challenges::new(incarnation),
            sent: VecDeque::new(),
            evidence: Evidence::default(),
            rights: BTreeMap::new(),
            retired: false,
            devices: None,
            devices_changed: false,
        };
        leases.evidence.set_voters(&leases.voters.names);
        leases.set_members([]);
        leases
    }

    /// The voters that this member presently knows.
    pub const fn voters(&self) -> &Voters {
        &self.voters
    }

    /// Replaces the voters by those of a newer generation; ignores the same generation, an older generation, and a
    /// generation above [`Voters::LAST`].
    pub fn set_voters(&mut self, voters: Voters, now: Nanos) {
        if voters.generation > self.voters.generation && voters.generation <= Voters::LAST {
            self.evidence.set_voters(&voters.names);
            (self.voters, self.voters_since) = (voters, now);
            self.set_members(self.others.keys().cloned().collect::<Vec<_>>());
        }
    }

    /// Replaces the other members; voters always count as members.
    pub fn set_members(&mut self, names: impl IntoIterator<Item = Arc<str>>) {
        let names = names.into_iter().chain(self.voters.names.iter().cloned());
        let others = names.filter(|name| *name != self.this).map(|name| {
            let known = self.others.get(&name).cloned();
            (name, known.unwrap_or_else(|| Peer::new(&mut self.challenges)))
        });
        self.others = others.collect();
    }

    /// Whether a quorum of the voters has known the present voters for longer than a grant lasts. The grants of this
    /// quorum to members that know only older voters have then ended.
    pub fn may_change(&self, now: Nanos) -> bool {
        let Timing { grant, right, .. } = self.timing;
        let settled = |since: Nanos| now.saturating_sub(since) >= grant + (grant - right);
        let knows = |name: &&Arc<str>| match self.others.get(*name) {
            Some(Peer { generation: (generation, since), .. }) => {
                *generation >= self.voters.generation && settled(*since)
            }
            None => **name == self.this && settled(self.voters_since),
        };
        self.voters.names.iter().filter(knows).count() >= self.quorum(now)
    }

    /// The voters that this member proposes now, if any. Voters propose one after the other, so that most proposals
    /// have no rival.
    pub fn proposal(&self, exists: impl Fn(&str) -> bool, now: Nanos) -> Option<Voters> {
        let mut alive = self.voters.names.iter().filter(|name| self.lives(name, now, 0));
        let rank = u64::try_from(alive.position(|name| *name == self.this)?).ok()?;
        let is_due = now.saturating_sub(self.voters_since) >= rank * self.timing.settle;
        // A member that has just started does not count as alive: it grants nothing yet.
        let others = self.others.keys().filter(|name| self.lives(name, now, self.timing.grant));
        let next = self.voters.next(exists, others.chain([&self.this]))?;
        let is_due = is_due && !self.leaves_a_pair_apart(&next, now);
        (is_due && !self.retired && self.may_change(now)).then_some(next)
    }

    /// Under [`Prefer::Availability`]: whether `next` reduces more than two voters to two, and this member does not
    /// hear both of these two. One of the two could then announce alone, while the other one, in another part of the
    /// network, still has a majority of the present voters.
    fn leaves_a_pair_apart(&self, next: &Voters, now: Nanos) -> bool {
        let becomes_pair = next.names.len() == 2 && self.voters.names.len() > 2;
        let is_apart = !next.names.iter().all(|name| self.lives(name, now, 0));
        self.prefer == Prefer::Availability && becomes_pair && is_apart
    }

    /// Stops this member, which gives back all addresses. Returns the requests that report this to the other members;
    /// the caller must stop answering for the addresses before it sends them.
    pub fn retire(&mut self, now: Nanos) -> Vec<Ask> {
        self.retired = true;
        self.tick(now)
    }

    /// Replaces the nodes that may announce each address. Before the first call this member sends no requests, so the
    /// other members do not count it as alive.
    pub fn set_candidates(&mut self, candidates: BTreeMap<IpAddr, Vec<Arc<str>>>, now: Nanos) {
        self.candidates = candidates;
        self.asks_since.get_or_insert(now);
    }

    /// Replaces the addresses that the data plane of this member does not serve: this member does not request these
    /// addresses.
    pub fn set_unserved(&mut self, addresses: BTreeSet<IpAddr>) {
        self.unserved = addresses;
    }

    /// Replaces the devices on which this member can announce; `None` while they are unknown. A list that is too long
    /// for a request counts as `None`.
    pub fn set_devices(&mut self, devices: Option<BTreeSet<String>>) {
        let fits = |devices: &BTreeSet<String>| {
            devices.iter().map(|device| device.len() + 3).sum::<usize>() <= DEVICES
        };
        self.devices = devices.filter(fits);
    }

    /// The devices on which another member can announce, as it has reported; `None` if it has not.
    pub fn devices(&self, member: &str) -> Option<&BTreeSet<String>> {
        self.others.get(member)?.devices.as_ref()
    }

    /// Whether the devices of another member have changed since the last call of this function.
    pub const fn take_devices_changed(&mut self) -> bool {
        std::mem::replace(&mut self.devices_changed, false)
    }

    /// The members that are alive, as far as this member knows.
    pub fn alive(&self, now: Nanos) -> impl Iterator<Item = &Arc<str>> {
        let others = self.others.iter().filter(move |(_, peer)| self.hears(peer, now)).map(|(name, _)| name);
        std::iter::once(&self.this).chain(others)
    }

    /// The voters that keep this member from getting a right: those that it does not hear, and those that have missed a
    /// change of the voters. Empty if the other voters suffice, or if the member has a right. (A voter that sends no
    /// requests, because its agent cannot announce, still grants rights.)
    pub fn missed_voters(&self, now: Nanos) -> Vec<&Arc<str>> {
        let (alive, missed): (Vec<_>, Vec<_>) =
            self.voters.names.iter().partition(|name| self.lives(name, now, 0));
        let has_right = self.rights(now).next().is_some();
        if alive.len() < self.quorum(now) && !has_right { missed } else { Vec::new() }
    }

    /// The member that should announce the address: the best candidate that is alive and serves the address; `None` if
    /// there is none.
    pub fn owner(&self, address: IpAddr, now: Nanos) -> Option<&Arc<str>> {
        let declines = |node: &Arc<str>| *node == self.this && self.unserved.contains(&address);
        let is_owner = |node: &&Arc<str>| self.is_available(node, address, now, 0) && !declines(node);
        self.candidates.get(&address)?.iter().find(is_owner)
    }

    /// The rights of this member that are valid at `now`.
    pub fn rights(&self, now: Nanos) -> impl Iterator<Item = (IpAddr, Right)> {
        let rights = self.rights.iter().map(|(address, right)| (*address, *right));
        rights.filter(move |(_, right)| now < right.deadline)
    }

    /// The next requests, for all other members; none before the candidates are known. Rights that this member gives
    /// back end with this call, so the caller must stop answering for these addresses before it sends the requests.
    pub fn tick(&mut self, now: Nanos) -> Vec<Ask> {
        if self.asks_since.is_none() {
            return Vec::new();
        }
        self.pass_over(now);
        let wants: Vec<IpAddr> =
            self.candidates.keys().copied().filter(|address| self.wants(*address, now)).collect();
        let declined = self.unserved.iter().copied().filter(|address| self.is_best(*address, now));
        let declines: Vec<IpAddr> = declined.collect();
        let left = |address: &&IpAddr| wants.binary_search(address).is_err();
        let leaves: Vec<IpAddr> = self.evidence.addresses().filter(left).copied().collect();
        for address in &leaves {
            self.evidence.remove(*address);
            self.rights.remove(address);
        }
        if !leaves.is_empty() {
            // Answers to earlier requests no longer count: they may grant addresses that this member now gives back.
            self.sent.clear();
        }
        self.sent.retain(|(_, at)| now.saturating_sub(*at) < self.timing.right);
        let asks = self.requests([&wants, &leaves, &declines], now);
        let this = self.this.clone();
        for ask in &asks {
            let answer = self.vote(&this, ask, now);
            self.count(&this, &answer, now);
        }
        asks
    }

    /// Passes over each better candidate that has been alive for twice [`Timing::silence`] without requesting its
    /// address. Such a candidate does not know that it should request the address: for example, it has started while a
    /// pool could not be read, and the others have the pool's last good state. If it requests the address later, the
    /// owner yields to it.
    fn pass_over(&mut self, now: Nanos) {
        let awaits = |(address, candidates): (&IpAddr, &Vec<Arc<str>>)| {
            let best = candidates.iter().find(|node| self.is_available(node, *address, now, 0))?;
            let since =
                self.awaited.get(address).filter(|(node, _)| node == best).map_or(now, |(_, since)| *since);
            (*best != self.this).then(|| (*address, (Arc::clone(best), since)))
        };
        self.awaited = self.candidates.iter().filter_map(awaits).collect();
        let patience = 2 * self.timing.silence;
        for (address, (node, since)) in &self.awaited {
            if now.saturating_sub(*since) >= patience
                && let Some(peer) = self.others.get_mut(node)
            {
                peer.passed_over.insert(*address);
            }
        }
    }

    /// Splits the addresses to request, to give back and to decline into requests that fit into a packet each.
    fn requests(&mut self, [wants, leaves, declines]: [&[IpAddr]; 3], now: Nanos) -> Vec<Ask> {
        let split = |addresses: &[IpAddr]| chunks(addresses, |address| address.to_string().len()).into_iter();
        let empty = Ask {
            id: self.id,
            echo: None,
            wants: Vec::new(),
            leaves: Vec::new(),
            declines: Vec::new(),
            generation: self.voters.generation,
            retires: self.retired,
            devices: None,
        };
        let wants = split(wants).map(|wants| Ask { wants, ..empty.clone() });
        let leaves = split(leaves).map(|leaves| Ask { leaves, ..empty.clone() });
        let declines = split(declines).map(|declines| Ask { declines, ..empty.clone() });
        let mut asks: Vec<Ask> = wants.chain(leaves).chain(declines).collect();
        if asks.is_empty() {
            // Without addresses, an empty request still shows the other members that this member is alive.
            asks.push(empty);
        }
        if let Some(first) = asks.first_mut() {
            first.devices.clone_from(&self.devices);
        }
        for ask in &mut asks {
            self.id.number += 1;
            self.sent.push_back((self.id.number, now));
            ask.id = self.id;
        }
        asks
    }

    /// Returns the request as it is sent to the member `to`: with the last challenge that `to` has given.
    pub fn addressed(&self, ask: &Ask, to: &str) -> Ask {
        Ask { echo: self.others.get(to).and_then(|peer| peer.echo), ..ask.clone() }
    }

    /// Answers the request of another member. Ignores a sender that is no member, and a request that is a duplicate or
    /// that a later request has overtaken. An incarnation that has not echoed the challenge gets the challenge and
    /// nothing else, and its request has no effect. For a member that has missed a change of the voters, more answers
    /// follow with parts of the list of voters.
    pub fn asked(&mut self, from: &Arc<str>, ask: &Ask, now: Nanos) -> Vec<Answer> {
        let Some(peer) = self.others.get_mut(from) else { return Vec::new() };
        let empty = Answer { id: ask.id, grants: Vec::new(), challenge: None, voters: None };
        match peer.freshness.judge(ask.id, ask.echo, &mut self.challenges) {
            Novelty::New => {}
            Novelty::Old => return Vec::new(),
            Novelty::Unknown => {
                return vec![Answer { challenge: Some(peer.freshness.challenge), ..empty }];
            }
        }
        peer.retired = ask.retires;
        let settle = self.timing.settle;
        peer.declined.retain(|_, at| now.saturating_sub(*at) < settle);
        peer.declined.extend(ask.declines.iter().map(|address| (*address, now)));
        for address in &ask.wants {
            peer.passed_over.remove(address);
            if let Some((_, since)) = self.awaited.get_mut(address).filter(|(node, _)| node == from) {
                *since = now;
            }
        }
        if peer.generation.0 != ask.generation {
            peer.generation = (ask.generation, now);
        }
        if ask.devices.is_some() && peer.devices != ask.devices {
            peer.devices.clone_from(&ask.devices);
            self.devices_changed = true;
        }
        self.hear(from, now);
        let answer = self.vote(from, ask, now);
        // A candidate with generation 0 has just started and must read the voters from the API server.
        let is_behind = (1..self.voters.generation).contains(&ask.generation);
        let news = self
            .voters
            .parts()
            .filter(|_| is_behind)
            .map(|part| Answer { voters: Some(part), ..empty.clone() });
        std::iter::once(answer).chain(news).collect()
    }

    /// Processes another member's answer. An answer does not show that the member is alive, only a request does: a
    /// member that cannot announce sends no requests, but still answers. Such a member fails to update its data plane,
    /// or does not know the candidates yet.
    pub fn answered(&mut self, from: &Arc<str>, answer: &Answer, now: Nanos) {
        let is_recent = self.sent_at(answer).is_some();
        let Some(peer) = self.others.get_mut(from).filter(|_| is_recent) else { return };
        peer.echo = answer.challenge.or(peer.echo);
        self.learn(answer, now);
        self.count(from, answer, now);
    }

    /// Adopts voters of a newer generation from an answer. A member that has just started must first read the voters
    /// from the API server, because the voters in an answer could be older than those that it knew before its start.
    fn learn(&mut self, answer: &Answer, now: Nanos) {
        let Some(part) = answer.voters.as_ref().filter(|_| self.voters.generation > 0) else { return };
        if let Some(voters) = self.parts.add(part).cloned() {
            self.set_voters(voters, now);
        }
    }

    /// When this member sent the request of `answer`; `None` if it sent no such request, or no longer counts answers to
    /// that request.
    fn sent_at(&self, answer: &Answer) -> Option<Nanos> {
        let sent = self.sent.iter().filter(|_| answer.id.incarnation == self.id.incarnation);
        sent.copied().find(|(number, _)| *number == answer.id.number).map(|(_, at)| at)
    }

    fn hear(&mut self, from: &Arc<str>, now: Nanos) {
        let silence = self.timing.silence;
        let Some(peer) = self.others.get_mut(from) else { return };
        if peer.heard.is_none_or(|heard| now.saturating_sub(heard) >= silence) {
            peer.since = now;
            peer.passed_over.clear();
        }
        peer.heard = Some(now);
    }

    fn hears(&self, peer: &Peer, now: Nanos) -> bool {
        !peer.retired && peer.heard.is_some_and(|heard| now.saturating_sub(heard) < self.timing.silence)
    }

    /// Whether the member `node` has been alive for at least `settled` nanoseconds. The local member always counts as
    /// alive, and a member that has missed a change of the voters never does.
    fn lives(&self, node: &Arc<str>, now: Nanos, settled: Nanos) -> bool {
        let heard = |peer: &Peer| {
            let is_settled = now.saturating_sub(peer.since) >= settled;
            is_settled && self.hears(peer, now) && !self.is_outdated(peer, now)
        };
        *node == self.this || self.others.get(node).is_some_and(heard)
    }

    /// Whether a peer has missed a change of the voters, so that no member that knows the change grants it anything.
    fn is_outdated(&self, peer: &Peer, now: Nanos) -> bool {
        let had_time = now.saturating_sub(self.voters_since) >= self.timing.grant;
        had_time && peer.generation.0 < self.voters.generation
    }

    /// Whether the member `node` may become the owner of the address:
    ///
    /// - it has been alive for `settled` nanoseconds ([`Self::lives`]),
    /// - it has not declined the address in that time, or in [`Timing::silence`] if that is longer (its requests repeat
    ///   what it declines),
    /// - this member has not passed it over.
    fn is_available(&self, node: &Arc<str>, address: IpAddr, now: Nanos, settled: Nanos) -> bool {
        let patience = settled.max(self.timing.silence);
        let refuses = |peer: &Peer| {
            let declined = peer.declined.get(&address);
            declined.is_some_and(|at| now.saturating_sub(*at) < patience)
                || peer.passed_over.contains(&address)
        };
        self.lives(node, now, settled) && !self.others.get(node).is_some_and(refuses)
    }

    /// Whether this member requests the address: it is the best candidate, and serves the address.
    fn wants(&self, address: IpAddr, now: Nanos) -> bool {
        self.is_best(address, now) && !self.unserved.contains(&address)
    }

    /// Whether this member is the best candidate that is alive and has not declined the address. If it has the right
    /// already, it yields to a better candidate only after that candidate has been available for [`Timing::settle`].
    fn is_best(&self, address: IpAddr, now: Nanos) -> bool {
        // A late answer may grant an address that no longer has candidates.
        let Some(candidates) = self.candidates.get(&address) else { return false };
        let has_right = self.rights.get(&address).is_some_and(|right| now < right.deadline);
        let settled = if has_right { self.timing.settle } else { 0 };
        let best = candidates.iter().find(|node| self.is_available(node, address, now, settled));
        !self.retired && best.is_some_and(|best| *best == self.this)
    }

    fn vote(&mut self, from: &Arc<str>, ask: &Ask, now: Nanos) -> Answer {
        for address in &ask.leaves {
            self.withdraw(*address, from);
        }
        let mut grants = Vec::new();
        // A candidate that has just started does not know which generation it knew before its start, so it must first
        // learn the present generation.
        let refuses = self.voters.names.is_empty() || ask.generation < self.voters.generation;
        for address in ask.wants.iter().filter(|_| !refuses) {
            let taken = self.grants.get(address).is_some_and(|grant| grant.to != *from && now < grant.until);
            if now >= self.mute_until && !taken {
                self.grants.insert(*address, Grant { to: from.clone(), until: now + self.timing.grant });
                grants.push(*address);
            }
        }
        self.grants.retain(|_, grant| now < grant.until);
        Answer { id: ask.id, grants, challenge: None, voters: None }
    }

    fn withdraw(&mut self, address: IpAddr, from: &Arc<str>) {
        if self.grants.get(&address).is_some_and(|grant| grant.to == *from) {
            self.grants.remove(&address);
        }
    }

    fn count(&mut self, from: &Arc<str>, answer: &Answer, now: Nanos) {
        let Some(sent) = self.sent_at(answer) else { return };
        let Some(voter) = self.evidence.voter(from) else { return };
        let quorum = self.quorum(now);
        for address in &answer.grants {
            if !self.wants(*address, now) {
                continue;
            }
            self.evidence.add(*address, voter, sent);
            let known = self.rights.get(address).filter(|right| now < right.deadline);
            if known.is_some_and(|right| right.deadline >= sent + self.timing.right) {
                // A majority has already granted the same request or a later one.
                continue;
            }
            let since = known.map_or(now, |right| right.since);
            let Some(since_majority) = self.evidence.since(*address, quorum) else { continue };
            let deadline = since_majority + self.timing.right;
            if now < deadline {
                self.rights.insert(*address, Right { since, deadline });
            }
        }
    }

    /// The number of voters that must grant a request: a majority. Under [`Prefer::Availability`], one of two voters
    /// needs only its own grant if two conditions hold: the other voter has been silent for [`Timing::grant`] or has
    /// retired, and this voter has sent requests for that long. (Two voters that begin to send requests at the same
    /// time must hear each other first.)
    fn quorum(&self, now: Nanos) -> usize {
        let grant_has_passed = |since: Nanos| now.saturating_sub(since) >= self.timing.grant;
        let is_gone = |peer: &Peer| peer.retired || peer.heard.is_none_or(grant_has_passed);
        let is_alone = |name: &Arc<str>| *name == self.this || self.others.get(name).is_none_or(is_gone);
        let names = &self.voters.names;
        let pair = names.len() == 2 && names.contains(&self.this) && self.prefer == Prefer::Availability;
        if pair && self.asks_since.is_some_and(grant_has_passed) && names.iter().all(is_alone) {
            1
        } else {
            self.voters.majority()
        }
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

    /// The state of `b`, which starts at the time 0 and is one of the members `a`, `b` and `c`. `a` is the best
    /// candidate for [`A`].
    fn second_of_three() -> Leases {
        let names = ["a", "b", "c"].map(name);
        let voters = Voters { generation: 1, names: names.clone().into() };
        let mut leases = Leases::new(name("b"), voters, Prefer::Single, Timing::DEFAULT, (0, 1));
        leases.set_candidates(BTreeMap::from([(A, names.into())]), 0);
        leases
    }

    fn ask(incarnation: u64, number: u64, echo: Option<Challenge>) -> Ask {
        let id = RequestId { incarnation, number };
        Ask {
            id,
            echo,
            wants: vec![A],
            leaves: vec![],
            declines: vec![],
            generation: 1,
            retires: false,
            devices: None,
        }
    }

    /// The answer to a request of `a`; `None` if the member does not answer.
    fn asked(leases: &mut Leases, ask: &Ask, now: Nanos) -> Option<Answer> {
        leases.asked(&name("a"), ask, now).pop()
    }

    /// Makes the member accept a request that echoes the challenge, from a new incarnation of `a`. Returns the answer.
    fn ask_of_a(leases: &mut Leases, incarnation: u64, now: Nanos) -> Answer {
        let refused = asked(leases, &ask(incarnation, 1, None), now).expect("an answer");
        assert_eq!(refused.grants, [] as [IpAddr; 0]);
        assert!(refused.challenge.is_some());
        asked(leases, &ask(incarnation, 2, refused.challenge), now).expect("an answer")
    }

    fn answer(id: RequestId, grants: Vec<IpAddr>) -> Answer {
        Answer { id, grants, challenge: None, voters: None }
    }

    #[test]
    fn request_of_a_rebooted_member_is_answered_after_the_challenge() {
        let mut leases = second_of_three();
        assert_eq!(ask_of_a(&mut leases, 7, 10 * SECOND).grants, [A]);
        assert_eq!(ask_of_a(&mut leases, 6, 13 * SECOND).grants, [A]);
    }

    #[test]
    fn recorded_request_shows_no_life_and_gives_nothing_back() {
        let mut leases = second_of_three();
        let mut now = 10 * SECOND;
        ask_of_a(&mut leases, 7, now);
        let recorded = ask(7, 3, None);
        let retiring = Ask { wants: vec![], leaves: vec![A], retires: true, ..ask(7, 4, None) };
        assert!(asked(&mut leases, &recorded, now).is_some());
        assert!(asked(&mut leases, &retiring, now).is_some());
        // `a` restarts, with a new incarnation.
        now += SECOND;
        assert_eq!(ask_of_a(&mut leases, 8, now).grants, [A]);
        let copy = asked(&mut leases, &retiring, now).expect("a challenge");
        assert!(copy.grants.is_empty() && copy.challenge.is_some());
        assert_eq!(leases.owner(A, now), Some(&name("a")));
        now += 2 * SECOND;
        drop(asked(&mut leases, &recorded, now));
        drop(asked(&mut leases, &ask(8, 2, None), now));
        assert_eq!(leases.owner(A, now), Some(&name("b")), "a is dead");
    }

    #[test]
    fn member_that_is_gone_for_a_moment_gets_another_challenge() {
        let mut leases = second_of_three();
        leases.set_voters(Voters { generation: 2, names: [name("b"), name("c")].into() }, 0);
        leases.set_members([name("a")]);
        let challenge = asked(&mut leases, &ask(7, 1, None), SECOND).unwrap().challenge;
        leases.set_members([]);
        leases.set_members([name("a")]);
        let copy = asked(&mut leases, &ask(7, 1, challenge), SECOND).unwrap();
        assert!(copy.challenge.is_some() && copy.challenge != challenge);
    }

    #[test]
    fn answer_to_a_request_of_an_earlier_start_counts_for_nothing() {
        let mut leases = second_of_three();
        let now = 10 * SECOND;
        let id = leases.tick(now)[0].id;
        let earlier = RequestId { incarnation: id.incarnation + 1, ..id };
        let copy = Answer { challenge: Some(9), ..answer(earlier, vec![A]) };
        leases.answered(&name("c"), &copy, now + 1);
        assert_eq!(leases.rights(now + 2).count(), 0);
        let next = &leases.tick(now + 3)[0];
        assert_eq!(leases.addressed(next, "c").echo, None);
        let real = Answer { challenge: Some(9), ..answer(next.id, vec![]) };
        leases.answered(&name("c"), &real, now + 4);
        assert_eq!(leases.addressed(next, "c").echo, Some(9));
        assert_eq!(leases.addressed(next, "a").echo, None);
    }

    #[test]
    fn member_that_only_answers_is_replaced() {
        let mut leases = second_of_three();
        let mut now = 10 * SECOND;
        ask_of_a(&mut leases, 7, now);
        assert_eq!(leases.owner(A, now), Some(&name("a")));
        for _ in 0..10 {
            now += Timing::DEFAULT.interval;
            let id = leases.tick(now)[0].id;
            leases.answered(&name("a"), &answer(id, vec![]), now);
        }
        assert_eq!(leases.owner(A, now), Some(&name("b")));
        assert_eq!(leases.tick(now)[0].wants, [A]);
    }

    /// If a better candidate declines an address, the next candidate requests it at once. The next candidate yields
    /// once the better candidate has not declined the address for [`Timing::settle`].
    #[test]
    fn declined_address_goes_to_the_next_candidate_until_the_better_one_has_served_it_for_a_while() {
        let mut leases = second_of_three();
        let begin = 10 * SECOND;
        ask_of_a(&mut leases, 7, begin);
        assert_eq!(leases.owner(A, begin), Some(&name("a")));
        assert!(leases.tick(begin)[0].wants.is_empty());
        let declining = Ask { wants: vec![], leaves: vec![A], declines: vec![A], ..ask(7, 3, None) };
        asked(&mut leases, &declining, begin).unwrap();
        assert_eq!(leases.owner(A, begin), Some(&name("b")));
        let mut last_wanted = 0;
        for number in 4..40 {
            let now = begin + (number - 4) * Timing::DEFAULT.interval;
            let request = leases.tick(now)[0].clone();
            if request.wants == [A] {
                last_wanted = now;
                leases.answered(&name("c"), &answer(request.id, vec![A]), now + 1);
                assert_eq!(leases.rights(now + 2).count(), 1, "request {number}");
            }
            // `a` serves the address again, and requests it.
            asked(&mut leases, &ask(7, number, None), now + 3).unwrap();
        }
        assert_eq!(last_wanted, begin + Timing::DEFAULT.settle - Timing::DEFAULT.interval);
    }

    #[test]
    fn member_declines_only_unserved_addresses_that_it_would_ask_for() {
        let mut leases = second_of_three();
        let now = 10 * SECOND;
        leases.set_unserved([A].into());
        let lists = |ask: &Ask| (ask.wants.clone(), ask.declines.clone());
        assert_eq!(lists(&leases.tick(now)[0]), (vec![], vec![A]), "the best candidate, a, is not alive");
        ask_of_a(&mut leases, 7, now);
        assert_eq!(lists(&leases.tick(now)[0]), (vec![], vec![]), "a is alive");
        asked(&mut leases, &Ask { wants: vec![], declines: vec![A], ..ask(7, 3, None) }, now).unwrap();
        assert_eq!(lists(&leases.tick(now)[0]), (vec![], vec![A]), "a declines it as well");
        assert_eq!(leases.owner(A, now), None, "c is not alive");
        leases.set_unserved(BTreeSet::new());
        assert_eq!(lists(&leases.tick(now)[0]), (vec![A], vec![]));
    }

    #[test]
    fn request_of_an_older_agent_declines_nothing_and_an_older_agent_reads_a_new_one() {
        let declining = Ask { declines: vec![A], ..ask(7, 3, None) };
        let mut json = serde_json::to_value(&declining).unwrap();
        assert_eq!(serde_json::from_value::<Ask>(json.clone()).unwrap(), declining);
        json.as_object_mut().unwrap().remove("declines");
        let older: Ask = serde_json::from_value(json.clone()).unwrap();
        assert_eq!(older.declines, [] as [IpAddr; 0]);
        // Every version of the agent, including the first one, ignores fields of later versions.
        json["later"] = serde_json::json!([1]);
        assert_eq!(serde_json::from_value::<Ask>(json).unwrap(), older);
    }

    #[test]
    fn late_grant_of_an_address_that_is_gone_changes_nothing() {
        let mut leases = second_of_three();
        let now = 10 * SECOND;
        let id = leases.tick(now)[0].id;
        leases.set_candidates(BTreeMap::new(), now);
        leases.answered(&name("c"), &answer(id, vec![A]), now + 1);
        assert_eq!(leases.rights(now + 2).count(), 0);
    }

    #[test]
    fn member_whose_right_has_expired_yields_to_a_better_one_at_once() {
        let mut leases = second_of_three();
        let mut now = 10 * SECOND;
        let id = leases.tick(now)[0].id;
        leases.answered(&name("c"), &answer(id, vec![A]), now + 1);
        assert_eq!(leases.rights(now + 2).count(), 1);
        now += Timing::DEFAULT.right + 1;
        ask_of_a(&mut leases, 9, now);
        assert_eq!(leases.tick(now)[0].wants, [] as [IpAddr; 0]);
    }

    #[test]
    fn devices_that_a_member_has_not_stated_again_stay_known() {
        let mut leases = second_of_three();
        ask_of_a(&mut leases, 7, SECOND);
        assert_eq!((leases.take_devices_changed(), leases.devices("a")), (false, None));
        let eth0 = BTreeSet::from(["eth0".to_owned()]);
        for (number, stated, changed) in
            [(3, Some(eth0.clone()), true), (4, None, false), (5, Some(eth0.clone()), false)]
        {
            asked(&mut leases, &Ask { devices: stated, ..ask(7, number, None) }, SECOND).unwrap();
            assert_eq!(
                (leases.take_devices_changed(), leases.devices("a")),
                (changed, Some(&eth0)),
                "{number}"
            );
        }
    }

    #[test]
    fn member_without_candidates_answers_and_asks_nothing() {
        let voters = Voters { generation: 1, names: ["a", "b", "c"].map(name).into() };
        let mut leases = Leases::new(name("b"), voters, Prefer::Single, Timing::DEFAULT, (0, 1));
        assert_eq!(leases.tick(10 * SECOND), []);
        assert_eq!(ask_of_a(&mut leases, 7, 10 * SECOND).grants, [A]);
        leases.set_candidates(BTreeMap::new(), 10 * SECOND);
        assert_eq!(leases.tick(10 * SECOND).len(), 1, "an empty request shows that it is alive");
    }

    #[test]
    fn only_the_first_request_states_devices() {
        let mut leases = second_of_three();
        let addresses = (0..100).map(|last| [192, 0, 2, last].into());
        leases.set_candidates(addresses.map(|address: IpAddr| (address, vec![name("b")])).collect(), 0);
        let eth0 = BTreeSet::from(["eth0".to_owned()]);
        leases.set_devices(Some(eth0.clone()));
        let stated = |asks: &[Ask]| asks.iter().map(|ask| ask.devices.clone()).collect::<Vec<_>>();
        assert_eq!(stated(&leases.tick(SECOND)), [Some(eth0), None, None]);
        leases.set_devices(Some((0..100).map(|number| format!("eth{number}")).collect()));
        assert_eq!(stated(&leases.tick(SECOND)), [None, None, None], "too many for a packet");
    }

    #[test]
    fn member_that_has_just_started_learns_no_voters_from_others() {
        let voters = Voters { generation: 2, names: [name("a"), name("b")].into() };
        for (known, expected) in [(0, 0), (1, 2)] {
            let names = [name("b")].into();
            let before = Voters { generation: known, names };
            let mut leases = Leases::new(name("b"), before, Prefer::Single, Timing::DEFAULT, (0, 1));
            leases.set_members([name("a")]);
            leases.set_candidates(BTreeMap::new(), 0);
            let id = leases.tick(SECOND)[0].id;
            let answer = Answer { voters: voters.parts().next(), ..answer(id, vec![]) };
            leases.answered(&name("a"), &answer, SECOND);
            assert_eq!(leases.voters().generation, expected);
        }
    }

    /// CPU time of this thread, with a resolution of 10 ms.
    fn cpu_time() -> std::time::Duration {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        let ticks = |index: usize| fields[index].parse::<u64>().unwrap();
        std::time::Duration::from_millis(10 * (ticks(11) + ticks(12)))
    }

    /// CPU time that an owner of this many addresses needs for one second of the protocol, in which a hundred voters
    /// grant the addresses.
    fn cpu_time_of_owner(addresses: u32) -> std::time::Duration {
        let names: Vec<Arc<str>> = (0..100).map(|number| format!("node-{number}").into()).collect();
        let voters = Voters { generation: 1, names: names.iter().cloned().collect() };
        let mut leases = Leases::new(names[0].clone(), voters, Prefer::Single, Timing::DEFAULT, (0, 1));
        let address = |number: u32| IpAddr::V4((0xc612_0000 + number).into());
        let candidates = (0..addresses).map(|number| (address(number), vec![names[0].clone()]));
        leases.set_candidates(candidates.collect(), 0);
        let begin = cpu_time();
        for round in 0..5 {
            let now = 10 * SECOND + round * Timing::DEFAULT.interval;
            let asks = leases.tick(now);
            assert!(asks.len() <= 30, "{} datagrams for each member", asks.len());
            for name in &names[1..] {
                for ask in &asks {
                    leases.answered(name, &answer(ask.id, ask.wants.clone()), now + 1);
                }
            }
            assert_eq!(leases.rights(now + 2).count(), addresses as usize);
        }
        cpu_time() - begin
    }

    /// With ten times as many addresses, an owner needs about ten times as much CPU time. In a debug build, a thousand
    /// addresses take some 2 s of CPU time for each second of the protocol, depending on the machine.
    #[test]
    fn work_of_an_owner_grows_with_its_addresses_only_linearly() {
        let [few, many] = [100, 1_000].map(cpu_time_of_owner);
        println!("{few:?} of CPU for a second with 100 addresses, {many:?} with 1,000");
        assert!(many < 25 * few, "{few:?} with 100 addresses, {many:?} with 1,000");
    }
}
