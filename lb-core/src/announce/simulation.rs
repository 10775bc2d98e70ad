//! Simulates members that pause, die and restart. Their clocks run at different rates, and their messages are lost,
//! delayed and reordered. A member may lose its connection to the API server, where Nodes are created and deleted and
//! the object with the voters changes. An attacker replays messages. Two members must never have the right to announce
//! one address at the same time.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    net::IpAddr,
    sync::Arc,
};

use proptest::prelude::*;

use super::{
    lease::{Answer, Ask, Leases, Nanos, Prefer, Right, Timing},
    voters::Voters,
};

const MILLISECOND: Nanos = 1_000_000;
const SECOND: Nanos = 1_000 * MILLISECOND;
const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

/// A generator of pseudo-random numbers (SplitMix64). Its seed determines the whole simulation.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

#[derive(Clone)]
enum Body {
    Ask(Ask),
    Answer(Answer),
}

/// A simulated member, and the right that its agent has written to the data plane of its node.
struct Member {
    leases: Leases,
    /// Offset of the member's clock, which shows `offset + time × (1000 + rate) / 1000`.
    offset: Nanos,
    rate: i64,
    /// Until this time the agent does nothing; what it has written to the data plane stays in force.
    paused_until: Nanos,
    alive: bool,
    next_tick: Nanos,
    written: Option<Right>,
    /// Whether the member can reach the API server.
    has_api: bool,
    /// When the member learns the candidates; `None` if it knows them.
    synchronises_at: Option<Nanos>,
}

impl Member {
    fn clock(&self, time: Nanos) -> Nanos {
        let skew = i64::try_from(time).unwrap() / 1_000 * self.rate;
        self.offset + time.wrapping_add_signed(skew)
    }

    fn write(&mut self, now: Nanos) {
        self.written =
            self.leases.rights(now).find(|(address, _)| *address == ADDRESS).map(|(_, right)| right);
    }

    fn answers(&self, time: Nanos) -> bool {
        self.written.is_some_and(|right| self.clock(time) < right.deadline)
    }
}

struct World {
    members: Vec<Member>,
    names: Vec<Arc<str>>,
    /// Messages in transit: time of arrival, number in `bodies`, receiver, sender.
    wire: BinaryHeap<Reverse<(Nanos, u64, usize, usize)>>,
    bodies: BTreeMap<u64, Body>,
    sent: u64,
    random: Random,
    /// Messages that an attacker without the key has recorded: receiver, sender, content. In each step the attacker
    /// replays `replays` of them.
    recorded: Vec<(usize, usize, Body)>,
    replays: usize,
    /// Percentage of messages that are lost; `delay` is the longest delay of the other messages.
    loss: u64,
    delay: Nanos,
    /// The side of the partition that each member is on. Members on different sides receive no messages from each
    /// other.
    side: Vec<u64>,
    /// The directions, from a sender to a receiver, in which all messages are lost.
    blocked: BTreeSet<(usize, usize)>,
    prefer: Prefer,
    /// The voters in the API server; `None` after their deletion.
    object: Option<Voters>,
    /// The newest voters that the API server has had; `history` has those of all generations.
    voters: Voters,
    history: Vec<Voters>,
    nodes: BTreeSet<Arc<str>>,
    time: Nanos,
}

const STEP: Nanos = 10 * MILLISECOND;

impl World {
    /// A simulation in which all `count` members vote from the beginning.
    fn new(count: usize, seed: u64, prefer: Prefer, rate: i64) -> Self {
        Self::with_voters(count, count, seed, prefer, rate)
    }

    /// A simulation of `count` members, of which the first `first` vote from the beginning.
    fn with_voters(count: usize, first: usize, seed: u64, prefer: Prefer, rate: i64) -> Self {
        let names: Vec<Arc<str>> = (0..count).map(|index| format!("n{index}").into()).collect();
        let voters = Voters { generation: 1, names: names[..first].iter().cloned().collect() };
        let mut world = Self {
            members: Vec::new(),
            object: Some(voters.clone()),
            history: vec![voters.clone()],
            voters,
            nodes: names.iter().cloned().collect(),
            names,
            wire: BinaryHeap::new(),
            bodies: BTreeMap::new(),
            sent: 0,
            random: Random(seed),
            recorded: Vec::new(),
            replays: 0,
            loss: 0,
            delay: 5 * MILLISECOND,
            side: vec![0; count],
            blocked: BTreeSet::new(),
            prefer,
            time: 0,
        };
        for index in 0..count {
            let offset = world.random.below(1_000 * SECOND);
            let rate = if rate == 0 { 0 } else { i64::try_from(world.random.below(11)).unwrap() - 5 };
            let mut leases = world.leases(index, offset);
            leases.set_candidates(world.candidates(), offset);
            let next_tick = world.random.below(200 * MILLISECOND);
            world.members.push(Member {
                leases,
                offset,
                rate,
                paused_until: 0,
                alive: true,
                next_tick,
                written: None,
                has_api: true,
                synchronises_at: None,
            });
        }
        world
    }

    fn leases(&mut self, index: usize, now: Nanos) -> Leases {
        let this = self.names[index].clone();
        let start = (now, self.random.next());
        let mut leases = Leases::new(this, Voters::default(), self.prefer, Timing::DEFAULT, start);
        let has_api = self.members.get(index).is_none_or(|member| member.has_api);
        if let Some(voters) = self.object.clone().filter(|_| has_api) {
            leases.set_voters(voters, now);
        }
        leases.set_members(self.names.clone());
        leases
    }

    fn candidates(&self) -> BTreeMap<IpAddr, Vec<Arc<str>>> {
        BTreeMap::from([(ADDRESS, self.names.clone())])
    }

    fn restart(&mut self, index: usize) {
        self.restart_slowly(index, 0);
    }

    /// Starts the agent, which learns the candidates after `duration`.
    fn restart_slowly(&mut self, index: usize, duration: Nanos) {
        let now = self.members[index].clock(self.time);
        let leases = self.leases(index, now);
        let member = &mut self.members[index];
        (member.leases, member.alive, member.written) = (leases, true, None);
        member.synchronises_at = Some(self.time + duration);
        self.synchronise(index);
    }

    /// Tells the member the candidates, if it is time to.
    fn synchronise(&mut self, index: usize) {
        let (candidates, time) = (self.candidates(), self.time);
        let member = &mut self.members[index];
        if member.synchronises_at.take_if(|at| *at <= time).is_some() {
            let now = member.clock(time);
            member.leases.set_candidates(candidates, now);
        }
    }

    /// Kills the agent. The right that it has written to the data plane stays.
    fn kill(&mut self, index: usize) {
        self.members[index].alive = false;
    }

    /// Lets the machine die, so that its data plane answers nothing.
    fn die(&mut self, index: usize) {
        self.kill(index);
        self.members[index].written = None;
    }

    /// Stops the agent, which reports that to the other members.
    fn retire(&mut self, index: usize) {
        let member = &mut self.members[index];
        let now = member.clock(self.time);
        let asks = member.leases.retire(now);
        (member.alive, member.written) = (false, None);
        for to in (0..self.members.len()).filter(|to| *to != index) {
            self.ask(index, to, &asks);
        }
    }

    fn ask(&mut self, from: usize, to: usize, asks: &[Ask]) {
        for ask in asks {
            let addressed = self.members[from].leases.addressed(ask, &self.names[to]);
            self.send(from, to, Body::Ask(addressed));
        }
    }

    fn send(&mut self, from: usize, to: usize, body: Body) {
        self.recorded.push((to, from, body.clone()));
        let is_apart = self.side[from] != self.side[to] || self.blocked.contains(&(from, to));
        if is_apart || self.random.chance(self.loss) {
            return;
        }
        let at = self.time + self.random.below(self.delay.max(1));
        self.sent += 1;
        self.bodies.insert(self.sent, body);
        self.wire.push(Reverse((at, self.sent, to, from)));
    }

    fn deliver(&mut self) {
        while let Some(Reverse((at, number, to, from))) = self.wire.peek().copied() {
            if at > self.time {
                break;
            }
            self.wire.pop();
            if self.members[to].alive && self.members[to].paused_until > self.time {
                // The agent is paused, so the message waits in its socket.
                self.wire.push(Reverse((self.members[to].paused_until, number, to, from)));
                continue;
            }
            let Some(body) = self.bodies.remove(&number) else { continue };
            if self.members[to].alive {
                self.receive(to, from, body);
            }
        }
    }

    fn receive(&mut self, to: usize, from: usize, body: Body) {
        let (name, now) = (self.names[from].clone(), self.members[to].clock(self.time));
        match body {
            Body::Ask(ask) => {
                for answer in self.members[to].leases.asked(&name, &ask, now) {
                    self.send(to, from, Body::Answer(answer));
                }
            }
            Body::Answer(answer) => self.members[to].leases.answered(&name, &answer, now),
        }
        self.members[to].write(now);
    }

    fn replay(&mut self) {
        for _ in 0..self.replays {
            let index = self.random.below(self.recorded.len().max(1) as u64);
            let Some((to, from, body)) = self.recorded.get(usize::try_from(index).unwrap()).cloned() else {
                return;
            };
            let member = &self.members[to];
            if member.alive && member.paused_until <= self.time {
                self.receive(to, from, body);
            }
        }
    }

    fn step(&mut self) {
        self.time += STEP;
        self.deliver();
        self.replay();
        for index in 0..self.members.len() {
            let member = &mut self.members[index];
            if !member.alive || member.paused_until > self.time || member.next_tick > self.time {
                continue;
            }
            member.next_tick = self.time + Timing::DEFAULT.interval;
            self.synchronise(index);
            let member = &mut self.members[index];
            let now = member.clock(self.time);
            if member.has_api {
                if let Some(voters) = self.object.clone() {
                    member.leases.set_voters(voters, now);
                }
                let restored = member.leases.voters().restored(self.object.as_ref());
                let generation = self.object.as_ref().map(|voters| voters.generation);
                let follows = |next: &Voters| generation.is_some_and(|known| next.generation == known + 1);
                let next = member.leases.proposal(|name| self.nodes.contains(name), now).filter(follows);
                // Writes the voters if the API server has those that the writer has read (compare and swap).
                if let Some(next) = restored.or(next) {
                    (self.object, self.voters) = (Some(next.clone()), next.clone());
                    self.history.push(next);
                }
            }
            let asks = member.leases.tick(now);
            member.write(now);
            for to in (0..self.members.len()).filter(|to| *to != index) {
                self.ask(index, to, &asks);
            }
        }
    }

    /// Whether a member that is not paused knows the newest voters and reaches the API server. Such a member restores
    /// the voters in the API server at once.
    fn voters_can_be_restored(&self) -> bool {
        let knows = |member: &Member| {
            let is_up = member.alive && member.paused_until <= self.time && member.has_api;
            is_up && *member.leases.voters() == self.voters
        };
        self.members.iter().any(knows)
    }

    fn answering(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|index| self.members[*index].answers(self.time)).collect()
    }

    /// Runs the simulation for `duration`; asserts that two members never answer at the same time.
    fn run(&mut self, duration: Nanos) {
        let end = self.time + duration;
        while self.time < end {
            self.step();
            let answering = self.answering();
            assert!(answering.len() < 2, "{answering:?} answer at {} ms", self.time / MILLISECOND);
        }
    }

    /// Runs until a member answers for the address, for at most `most`; returns how long that took.
    fn until_answered(&mut self, most: Nanos) -> Nanos {
        let start = self.time;
        while self.answering().is_empty() && self.time < start + most {
            self.run(STEP);
        }
        self.time - start
    }
}

#[test]
fn best_member_announces_soon_after_the_start() {
    for count in [2, 3, 5] {
        let mut world = World::new(count, 1, Prefer::Single, 0);
        assert!(world.until_answered(5 * SECOND) < 2 * SECOND);
        world.run(SECOND);
        assert_eq!(world.answering(), [0], "{count}");
    }
}

#[test]
fn dead_owner_is_replaced_within_two_seconds() {
    for seed in 0..50 {
        let mut world = World::new(3, seed, Prefer::Single, 5);
        world.run(5 * SECOND);
        world.die(0);
        assert!(world.until_answered(5 * SECOND) < 2 * SECOND, "seed {seed}");
        assert_eq!(world.answering(), [1]);
    }
}

#[test]
fn hung_owner_stops_before_another_begins() {
    for seed in 0..50 {
        let mut world = World::new(3, seed, Prefer::Single, 5);
        world.run(5 * SECOND);
        let end = world.time + 20 * SECOND;
        world.members[0].paused_until = end;
        // `run` asserts that members 0 and 1 never answer at the same time.
        world.run(2 * SECOND);
        assert_eq!(world.answering(), [1], "seed {seed}");
        world.run(30 * SECOND);
        assert_eq!(world.answering(), [0], "the best one takes over again once it has settled");
    }
}

/// Tests the table of docs/announce.md: which member announces in which partition. Member 0 is the best candidate.
#[test]
fn partitions_leave_one_owner_with_a_majority_and_none_without() {
    for (count, sides, expected) in [
        (3, vec![0, 1, 1], vec![1]),
        (3, vec![0, 0, 1], vec![0]),
        (3, vec![0, 1, 2], vec![]),
        (4, vec![0, 0, 1, 1], vec![]),
        (5, vec![0, 0, 1, 1, 1], vec![2]),
        (5, vec![0, 1, 1, 2, 2], vec![]),
        (2, vec![0, 1], vec![]),
    ] {
        let mut world = World::new(count, 7, Prefer::Single, 5);
        world.run(5 * SECOND);
        world.side = sides.clone();
        world.run(5 * SECOND);
        assert_eq!(world.answering(), expected, "{sides:?}");
        world.side = vec![0; count];
        world.run(15 * SECOND);
        assert_eq!(world.answering(), [0], "after {sides:?}");
    }
}

/// Tests every combination of directions in which messages of three members are lost. Member 0, the best candidate,
/// announces if another member receives its requests and member 0 receives the answers of that member. Another member
/// replaces member 0 only if no member receives the requests of member 0: a member that receives them waits for member
/// 0, or has granted it the address.
#[test]
fn messages_lost_in_one_direction_leave_at_most_one_owner() {
    const LINKS: [(usize, usize); 6] = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)];
    for combination in 0..1_u64 << LINKS.len() {
        let is_blocked = |index: &usize| (combination >> index) & 1 == 1;
        let blocked: BTreeSet<_> = (0..LINKS.len()).filter(is_blocked).map(|index| LINKS[index]).collect();
        let reach_each_other = |a, b| !blocked.contains(&(a, b)) && !blocked.contains(&(b, a));
        let is_heard = !blocked.contains(&(0, 1)) || !blocked.contains(&(0, 2));
        let expected: &[usize] = if reach_each_other(0, 1) || reach_each_other(0, 2) {
            &[0]
        } else if !is_heard && reach_each_other(1, 2) {
            &[1]
        } else {
            &[]
        };
        let mut world = World::new(3, combination, Prefer::Single, 5);
        world.run(5 * SECOND);
        world.blocked = blocked.clone();
        world.run(5 * SECOND);
        assert_eq!(world.answering(), expected, "{blocked:?}");
        world.blocked.clear();
        world.run(15 * SECOND);
        assert_eq!(world.answering(), [0], "after {blocked:?}");
    }
}

#[test]
fn one_of_two_members_that_prefer_availability_announces_while_one_hears_the_other() {
    for (direction, expected) in [((0, 1), 1), ((1, 0), 0)] {
        let mut world = World::new(2, 3, Prefer::Availability, 5);
        world.run(5 * SECOND);
        world.blocked = BTreeSet::from([direction]);
        world.run(10 * SECOND);
        assert_eq!(world.answering(), [expected], "{direction:?}");
        world.blocked.clear();
        world.run(15 * SECOND);
        assert_eq!(world.answering(), [0], "after {direction:?}");
    }
}

#[test]
fn two_members_that_prefer_availability_both_announce_while_they_hear_nothing() {
    let mut world = World::new(2, 3, Prefer::Availability, 5);
    world.run(5 * SECOND);
    assert_eq!(world.answering(), [0]);
    world.side = vec![0, 1];
    for _ in 0..500 {
        world.step();
    }
    assert_eq!(world.answering(), [0, 1]);
    world.side = vec![0, 0];
    for _ in 0..300 {
        world.step();
    }
    world.run(15 * SECOND);
    assert_eq!(world.answering(), [0]);
    world.die(0);
    assert!(world.until_answered(5 * SECOND) < 2 * SECOND);
}

#[test]
fn two_members_that_start_together_have_one_owner_whenever_they_learn_the_candidates() {
    for seed in 0..50 {
        for apart in [0, 50, 100, 200, 400, 1_100, 1_200, 1_300, 3_000] {
            let mut world = World::new(2, seed, Prefer::Availability, 5);
            world.restart_slowly(0, 3 * SECOND);
            world.restart_slowly(1, 3 * SECOND + apart * MILLISECOND);
            world.run(9 * SECOND);
            assert_eq!(world.answering(), [0], "seed {seed}, {apart} ms apart");
        }
    }
}

#[test]
fn owner_stays_until_a_better_member_that_has_restarted_knows_the_candidates() {
    for count in [2, 3] {
        let mut world = World::new(count, 5, Prefer::Availability, 5);
        world.run(8 * SECOND);
        assert_eq!(world.answering(), [0]);
        world.die(0);
        world.run(4 * SECOND);
        assert_eq!(world.answering(), [1]);
        world.restart_slowly(0, 20 * SECOND);
        for _ in 0..1_900 {
            world.run(STEP);
            assert_eq!(world.answering(), [1], "{count} members, at {} ms", world.time / MILLISECOND);
        }
        world.run(8 * SECOND);
        assert_eq!(world.answering(), [0]);
    }
}

/// The best member restarts. It does not know that it may announce the address, because it cannot read the pool.
#[test]
fn owner_stays_while_a_better_member_does_not_ask_for_the_address() {
    for seed in 0..20 {
        let mut world = World::new(3, seed, Prefer::Single, 5);
        world.run(8 * SECOND);
        world.die(0);
        world.run(4 * SECOND);
        assert_eq!(world.answering(), [1]);
        world.restart(0);
        let now = world.members[0].clock(world.time);
        world.members[0].leases.set_candidates(BTreeMap::new(), now);
        for _ in 0..1_500 {
            world.run(STEP);
            assert_eq!(world.answering(), [1], "seed {seed}, at {} ms", world.time / MILLISECOND);
        }
        let (now, candidates) = (world.members[0].clock(world.time), world.candidates());
        world.members[0].leases.set_candidates(candidates, now);
        world.run(2 * SECOND);
        assert_eq!(world.answering(), [0], "seed {seed}");
    }
}

/// All members start at once, and the best member cannot read the pool.
#[test]
fn next_member_announces_soon_if_the_best_one_does_not_ask() {
    for seed in 0..50 {
        let mut world = World::new(3, seed, Prefer::Single, 5);
        let now = world.members[0].clock(0);
        world.members[0].leases.set_candidates(BTreeMap::new(), now);
        assert!(world.until_answered(10 * SECOND) < 4 * SECOND, "seed {seed}");
        world.run(2 * SECOND);
        assert_eq!(world.answering(), [1], "seed {seed}");
    }
}

#[test]
fn planned_handover_takes_less_than_a_second() {
    let mut world = World::new(3, 9, Prefer::Single, 0);
    world.run(8 * SECOND);
    for member in &mut world.members {
        let now = member.clock(world.time);
        member.leases.set_candidates(BTreeMap::from([(ADDRESS, vec!["n2".into(), "n1".into()])]), now);
    }
    world.run(SECOND);
    assert_eq!(world.answering(), [2]);
}

#[test]
fn retired_owner_is_replaced_at_its_successor_s_next_request() {
    for (count, prefer) in [(3, Prefer::Single), (5, Prefer::Single), (2, Prefer::Availability)] {
        for seed in 0..50 {
            let mut world = World::new(count, seed, prefer, 5);
            world.run(8 * SECOND);
            assert_eq!(world.answering(), [0]);
            world.retire(0);
            assert!(world.until_answered(SECOND) <= 230 * MILLISECOND, "seed {seed}");
            assert_eq!(world.answering(), [1]);
        }
    }
}

/// The data plane of the best member stops serving the address, then those of the next two members; later two of the
/// data planes recover.
#[test]
fn owner_whose_data_plane_does_not_serve_the_address_is_replaced_within_two_seconds() {
    for seed in 0..50 {
        let mut world = World::new(3, seed, Prefer::Single, 5);
        world.run(8 * SECOND);
        for (index, expected) in [(0, vec![1]), (1, vec![2]), (2, vec![])] {
            world.members[index].leases.set_unserved([ADDRESS].into());
            world.run(2 * SECOND);
            assert_eq!(world.answering(), expected, "seed {seed}");
        }
        world.members[1].leases.set_unserved(BTreeSet::new());
        assert!(world.until_answered(5 * SECOND) < SECOND, "seed {seed}");
        assert_eq!(world.answering(), [1]);
        world.members[0].leases.set_unserved(BTreeSet::new());
        world.run(4 * SECOND);
        assert_eq!(world.answering(), [1], "the best one has not settled yet");
        world.run(3 * SECOND);
        assert_eq!(world.answering(), [0]);
    }
}

#[test]
fn voters_follow_the_nodes() {
    let mut world = World::with_voters(7, 1, 5, Prefer::Single, 5);
    world.run(20 * SECOND);
    assert_eq!(world.voters.names, world.nodes, "each member that lives gets a vote");
    for gone in [2, 3, 4, 5, 6] {
        world.die(gone);
        world.nodes.remove(&world.names[gone]);
        world.run(4 * SECOND);
        assert_eq!(world.answering(), [0], "{gone} is gone");
    }
    world.run(20 * SECOND);
    assert_eq!(world.voters.names, world.nodes, "one by one, so two of seven are a majority in the end");
}

/// Tests the rest of the table of docs/announce.md: partitions while nodes come and go.
#[test]
fn side_without_a_majority_of_the_voters_never_gets_one_by_nodes_that_come_and_go() {
    // n0 and n1, two of the three voters, lose contact with the other members and the API server; in the second run,
    // their Nodes are deleted as well. The other members must neither remove n0 and n1 from the voters nor add voters,
    // which would make n0 and n1 a minority.
    for deleted in [false, true] {
        let mut world = World::with_voters(9, 3, 17, Prefer::Single, 5);
        world.side = vec![0, 0, 1, 1, 1, 1, 1, 1, 1];
        (0..2).for_each(|index| world.members[index].has_api = false);
        if deleted {
            (0..2).for_each(|index| assert!(world.nodes.remove(&world.names[index])));
        }
        world.run(30 * SECOND);
        assert_eq!(world.answering(), [0], "two of the three voters go on, whatever the API server says");
        assert_eq!(world.voters.generation, 1, "n2 cannot change the voters alone");
        world.side = vec![0; 9];
        (0..2).for_each(|index| world.members[index].has_api = true);
        world.run(40 * SECOND);
        assert_eq!(world.voters.names, world.nodes);
    }
    // n0 loses contact only with the API server, and the three voters become nine. Then n0 and n1, a majority of the
    // former three, lose contact with the other members.
    let mut world = World::with_voters(9, 3, 17, Prefer::Single, 5);
    world.members[0].has_api = false;
    world.run(40 * SECOND);
    assert_eq!(world.voters.names.len(), 9);
    assert_eq!(world.answering(), [0], "n0 has learned the change from the others");
    world.side = vec![0, 0, 1, 1, 1, 1, 1, 1, 1];
    world.run(10 * SECOND);
    assert_eq!(world.answering(), [2]);
    // n0 loses contact only with the API server, and the three voters become nine. Then n0 and n1 lose contact with the
    // other members, and n1 restarts without access to the API server. n1 does not know the voters, so it must not give
    // n0 a majority of the former three.
    let mut world = World::with_voters(9, 3, 17, Prefer::Single, 5);
    world.members[0].has_api = false;
    world.run(40 * SECOND);
    world.side = vec![0, 0, 1, 1, 1, 1, 1, 1, 1];
    world.members[1].has_api = false;
    world.restart(1);
    world.run(10 * SECOND);
    assert_eq!(world.answering(), [2]);
    assert_eq!(world.members[1].leases.voters(), &Voters::default(), "it waits for the API server");
    // n0 loses the API server and the other members. The majority still reaches the API server, so it elects a new
    // announcer and changes the voters.
    let mut world = World::with_voters(9, 3, 17, Prefer::Single, 5);
    world.side = vec![0, 1, 1, 1, 1, 1, 1, 1, 1];
    world.members[0].has_api = false;
    world.run(40 * SECOND);
    assert_eq!(world.answering(), [1]);
    assert_eq!(world.voters.names.len(), 9);
}

#[test]
fn node_that_is_apart_from_two_of_three_voters_never_becomes_one_of_two() {
    for prefer in [Prefer::Availability, Prefer::Single] {
        let mut world = World::new(3, 5, prefer, 5);
        world.run(8 * SECOND);
        world.side = vec![0, 0, 1];
        (0..2).for_each(|index| world.members[index].has_api = false);
        (0..2).for_each(|index| assert!(world.nodes.remove(&world.names[index])));
        world.run(60 * SECOND);
        assert_eq!(world.answering(), [0], "{prefer:?}");
    }
    // n0 dies and its Node is deleted. n1 and n2 still hear each other, so they may become the only two voters.
    let mut world = World::new(3, 5, Prefer::Availability, 5);
    world.run(8 * SECOND);
    world.die(0);
    world.nodes.remove("n0");
    world.run(10 * SECOND);
    assert_eq!((world.voters.names.len(), world.answering()), (2, vec![1]));
}

#[test]
fn change_of_the_voters_that_only_nodes_without_addresses_see_stops_no_others() {
    for (count, apart) in [(6, 3), (6, 2), (9, 4)] {
        let mut world = World::with_voters(count, count - 1, 5, Prefer::Single, 5);
        for index in 0..count {
            world.members[index].has_api = index >= apart;
            let candidates = BTreeMap::from([(ADDRESS, world.names[..apart].to_vec())]);
            let now = world.members[index].clock(0);
            world.members[index].leases.set_candidates(candidates, now);
        }
        world.run(40 * SECOND);
        assert_eq!(world.voters.names, world.nodes, "the last one votes");
        assert_eq!(world.answering(), [0]);
        world.die(0);
        assert!(world.until_answered(5 * SECOND) < 2 * SECOND);
        assert_eq!(world.answering(), [1], "{apart} of {count}");
    }
}

#[test]
fn member_that_has_missed_a_change_of_the_voters_learns_it_from_others() {
    let mut world = World::with_voters(3, 2, 5, Prefer::Single, 5);
    world.members[1].has_api = false;
    world.run(8 * SECOND);
    assert_eq!((world.voters.names.len(), world.answering()), (3, vec![0]));
    assert_eq!(*world.members[1].leases.voters(), world.voters);
    world.die(0);
    world.run(4 * SECOND);
    assert_eq!(world.answering(), [1]);
}

#[test]
fn voters_that_were_deleted_or_replaced_by_older_ones_return_and_the_owner_stays() {
    for older in [None, Some(0)] {
        let mut world = World::with_voters(7, 1, 5, Prefer::Single, 5);
        world.run(20 * SECOND);
        assert_eq!((world.voters.names.len(), world.answering()), (7, vec![0]));
        let generation = world.voters.generation;
        world.object = older.map(|index| world.history[index].clone());
        world.run(SECOND);
        assert_eq!((world.voters.generation, world.voters.names.len()), (generation + 1, 7));
        // n0, the only voter of the older generation, restarts.
        world.restart(0);
        world.run(10 * SECOND);
        assert_eq!(world.answering(), [0]);
        world.nodes.remove("n6");
        world.kill(6);
        world.run(10 * SECOND);
        assert_eq!(world.object.as_ref().map(|voters| voters.names.len()), Some(6), "changes go on");
    }
}

#[test]
fn hundred_members_agree_on_one_owner_under_loss_and_pauses() {
    let mut world = World::new(100, 11, Prefer::Single, 5);
    (world.loss, world.delay) = (10, 50 * MILLISECOND);
    world.run(3 * SECOND);
    assert_eq!(world.answering().len(), 1);
    for index in 0..10 {
        world.members[index].paused_until = world.time + 2 * SECOND;
    }
    world.run(3 * SECOND);
    assert_eq!(world.answering().len(), 1);
}

#[test]
fn replayed_messages_neither_prolong_the_life_of_a_dead_member_nor_end_the_right_of_a_rebooted_one() {
    for seed in 0..20 {
        let mut world = World::new(3, seed, Prefer::Single, 5);
        world.run(8 * SECOND);
        assert_eq!(world.answering(), [0]);
        world.replays = 10;
        world.die(0);
        assert!(world.until_answered(5 * SECOND) < 2 * SECOND, "seed {seed}");
        assert_eq!(world.answering(), [1]);
        world.restart(0);
        world.run(10 * SECOND);
        assert_eq!(world.answering(), [0], "seed {seed}");
        for _ in 0..500 {
            world.run(STEP);
            assert_eq!(world.answering(), [0], "seed {seed}");
        }
        // All other members restart, one after the other: none takes a recorded message for a new message.
        for index in [1, 2] {
            world.restart(index);
            world.run(3 * SECOND);
            assert_eq!(world.answering(), [0], "seed {seed}");
        }
        world.die(0);
        assert!(world.until_answered(5 * SECOND) < 2 * SECOND, "seed {seed}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn never_do_two_members_have_the_right(
        count in 2usize..8,
        first in 1usize..8,
        seed: u64,
        loss in 0u64..60,
        delay in 1u64..600,
        trouble in 5u64..60,
        replays in 0usize..5,
    ) {
        let mut world = World::with_voters(count, first.min(count), seed, Prefer::Single, 5);
        (world.loss, world.delay, world.replays) = (loss, delay * MILLISECOND, replays);
        for _ in 0..120 {
            world.run(250 * MILLISECOND);
            if !world.random.chance(trouble) {
                continue;
            }
            let index = usize::try_from(world.random.below(count as u64)).unwrap();
            match world.random.below(12) {
                0 => world.kill(index),
                1 if !world.members[index].alive || world.members[index].paused_until <= world.time => {
                    // `restart` empties the data plane's map, as a restarted agent does first.
                    let duration = world.random.below(4) * world.random.below(2 * SECOND);
                    world.restart_slowly(index, duration);
                }
                2 | 3 => world.members[index].paused_until = world.time + world.random.below(4 * SECOND),
                4 => world.side[index] = world.random.below(3),
                5 if world.members[index].alive => world.retire(index),
                // The member loses or regains the API server. It may miss all changes, and after a restart not even
                // know the voters.
                6 => world.members[index].has_api = world.random.chance(50),
                7 => {
                    let name = world.names[index].clone();
                    if !world.nodes.remove(&name) {
                        world.nodes.insert(name);
                    }
                }
                // Deletes the voters in the API server, or replaces them by older voters, only while a member can write
                // the newest voters back at once. Otherwise an agent that starts in between, and reaches no other
                // member, would believe the older voters.
                8 if world.voters_can_be_restored() => world.object = None,
                9 if world.voters_can_be_restored() => {
                    let old = world.random.below(world.history.len() as u64);
                    world.object = world.history.get(usize::try_from(old).unwrap()).cloned();
                }
                10 => {
                    // From now on all messages in this direction are lost; if they were lost before, they are delivered
                    // again.
                    let to = usize::try_from(world.random.below(count as u64)).unwrap();
                    if !world.blocked.remove(&(index, to)) {
                        world.blocked.insert((index, to));
                    }
                }
                _ => {
                    world.side = vec![0; count];
                    world.blocked.clear();
                }
            }
            if world.random.chance(20) {
                // Members learn of changed candidates at different times.
                let mut order = world.names.clone();
                order.rotate_left(index);
                let candidates = BTreeMap::from([(ADDRESS, order)]);
                let of = usize::try_from(world.random.below(count as u64)).unwrap();
                let now = world.members[of].clock(world.time);
                world.members[of].leases.set_candidates(candidates, now);
            }
            if world.random.chance(20) {
                // The data plane of a member stops serving the address, or serves it again.
                let unserved = [ADDRESS].into_iter().filter(|_| world.random.chance(50)).collect();
                world.members[index].leases.set_unserved(unserved);
            }
        }
    }
}
