use core::{cell::RefCell, net::IpAddr};
use std::{
    collections::{BTreeMap, BTreeSet},
    vec,
    vec::Vec,
};

use proptest::prelude::*;

use super::*;
use crate::{MAX_NETWORKS, protocol};

/// The words of a filter; a word that is not in the map is 0.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Words(RefCell<BTreeMap<usize, u64>>);

impl Memory for Words {
    fn load(&self, index: usize) -> u64 {
        self.0.borrow().get(&index).copied().unwrap_or(0)
    }

    fn set(&self, index: usize, bits: u64) {
        *self.0.borrow_mut().entry(index).or_default() |= bits;
    }
}

impl Words {
    fn zero(&self, copy: usize) {
        self.0.borrow_mut().retain(|index, _| !words_of(copy).contains(index));
    }
}

fn ip(text: &str) -> Address {
    text.parse::<IpAddr>().expect("a literal address").into()
}

#[test]
fn both_directions_of_every_kind_of_flow_are_found() {
    let (client, vip, node, backend) = (ip("192.0.2.1"), ip("10.96.0.1"), ip("198.51.100.1"), ip("10.1.0.7"));
    let from = Tuple::new(client, vip, 40_000, 80, protocol::TCP);
    let plain = Tuple { destination: backend, destination_port: 8080, ..from };
    let hairpin = Tuple { source: vip, ..plain };
    let routed = Tuple { source: node, source_port: 10_001, ..plain };
    for to in [plain, hairpin, routed] {
        for (key, flags) in [(from, 0), (to.reversed(), flow_flags::REPLY)] {
            let memory = Words::default();
            assert!(!may_have_flow(&memory, activated(0), &key));
            Mark::of_entry(&key, flags).iter().for_each(|mark| mark.set(&memory));
            assert!(may_have_flow(&memory, activated(0), &key), "{key:?}");
            assert!(may_have_flow(&memory, activated(1), &key), "{key:?}");
            assert!(!may_have_flow(&memory, activated(0), &key.reversed()), "marks are of one direction");
        }
    }
}

#[test]
fn packets_of_sockets_that_share_the_address_of_a_flow_are_found() {
    let (node, backend) = (ip("198.51.100.1"), ip("10.1.0.7"));
    let sent = Tuple::new(node, backend, 10_001, 8080, protocol::TCP);
    for (flags, found) in [(0, false), (flow_flags::ROUTED, true), (flow_flags::HAIRPIN, true)] {
        let memory = Words::default();
        let flags = flags | flow_flags::REPLY;
        Mark::of_entry(&sent.reversed(), flags).iter().for_each(|mark| mark.set(&memory));
        assert_eq!(may_have_flow(&memory, activated(0), &sent), found, "{flags}");
    }
}

#[test]
fn zeroed_filter_excludes_nothing() {
    let memory = Words::default();
    let tuple = Tuple::new(ip("192.0.2.1"), ip("10.96.0.1"), 40_000, 80, protocol::TCP);
    assert!(may_have_flow(&memory, OFF, &tuple));
    let ranges: ServiceRanges = Zeroable::zeroed();
    assert!(ranges.contains(&ip("192.0.2.1")) && ranges.contains(&ip("2001:db8::1")));
}

/// The share of random endpoints that look like one of `marks` frontends.
fn false_positives(marks: u32, frontend: impl Fn(u32) -> Address) -> f64 {
    let memory = Words::default();
    for nth in 0..marks {
        let port = [80, 443, 8080][nth as usize % 3];
        Mark::new(Side::Front, &frontend(nth), port, protocol::TCP).set(&memory);
    }
    let others = 100_000u32;
    let wrong = (0..others).filter(|nth| {
        let (address, port) = (Address::from_v4((0x0a40_0000 + nth / 50).to_be_bytes()), 30_000 + nth % 50);
        let port = u16::try_from(port).expect("a port");
        Mark::new(Side::Front, &address, port, protocol::TCP).is_set(&memory, 0)
    });
    wrong.count() as f64 / f64::from(others)
}

#[test]
fn false_positives_are_as_rare_as_documented() {
    let v4 = |nth: u32| Address::from_v4((0x0a60_0000 + nth).to_be_bytes());
    let v6 = |nth: u32| Address::from_words([0xfd00, 0, 0, nth].map(u32::to_be));
    for (marks, most) in [(20_000, 0.002), (65_536, 0.01)] {
        let shares = [false_positives(marks, v4), false_positives(marks, v6)];
        assert!(shares.iter().all(|share| *share < most), "{marks}: {shares:?}");
    }
}

#[test]
fn neighbouring_endpoints_have_different_marks() {
    let mut marks = BTreeSet::new();
    for host in 0..=255u8 {
        for port in 0..16u16 {
            for address in [
                Address::from_v4([10, 0, 0, host]),
                Address::from_words([0xfd, 0, 0, u32::from(host).to_be()]),
            ] {
                for protocol in [protocol::TCP, protocol::UDP] {
                    let mark = Mark::new(Side::Back, &address, port, protocol);
                    assert!(mark.word < WORDS);
                    marks.insert((mark.word, mark.bits));
                }
            }
        }
    }
    assert!(marks.len() > 16_380, "{} of 16,384", marks.len());
}

#[test]
fn ranges_are_exact_for_two_networks_of_a_family() {
    let networks = [("10.96.0.0", 12), ("10.244.0.0", 16), ("fd00:10:96::", 112), ("2001:db8::", 64)];
    let ranges = ServiceRanges::covering(&Networks::new(
        networks.map(|(text, length)| Network::new(ip(text), length)),
    ));
    for inside in ["10.96.0.1", "10.111.255.255", "10.244.7.7", "fd00:10:96::ffff", "2001:db8::1"] {
        assert!(ranges.contains(&ip(inside)), "{inside}");
    }
    for outside in
        ["10.112.0.0", "10.243.0.1", "0.0.0.0", "0.0.0.1", "fd00:10:96::1:0", "2001:db8:0:1::", "::", "::1"]
    {
        assert!(!ranges.contains(&ip(outside)), "{outside}");
    }
    let none = ServiceRanges::covering(&Networks::new([]));
    assert!(!none.contains(&ip("10.96.0.1")) && !none.contains(&ip("::")) && !none.contains(&ip("0.0.0.1")));
}

proptest! {
    #[test]
    fn ranges_cover_every_address_of_every_network(
        networks in prop::collection::vec((any::<u128>(), any::<bool>(), 0u8..=128), 0..=MAX_NETWORKS),
        bits: u128,
    ) {
        let networks = Networks::new(networks.into_iter().map(|(bits, is_v4, length)| {
            if is_v4 {
                let [a, b, c, d, ..] = bits.to_be_bytes();
                Network::new(Address::from_v4([a, b, c, d]), length % 33)
            } else {
                Network::new(Address::from_v6(bits.to_be_bytes()), length)
            }
        }));
        let ranges = ServiceRanges::covering(&networks);
        let listed = || networks.networks.iter().take(networks.count as usize);
        for network in listed() {
            let (address, mask) = (network.address, network.mask);
            let [address, mask] = [address, mask].map(|part| u128::from_be_bytes(*part.bytes()));
            let inside = Address::from_v6((address | bits & !mask).to_be_bytes());
            prop_assert!(ranges.contains(&inside), "{inside} of {network:?}");
        }
    }

    /// Inserts and deletes entries and frontends at random: at every step, the filter hides no visible entry or
    /// frontend.
    #[test]
    fn whatever_is_visible_is_found_in_random_histories(steps in prop::collection::vec((0u8..10, 0u8..40), 1..200)) {
        let memory = Words::default();
        let (mut active, mut visible) = (activated(0), BTreeMap::new());
        for (step, nth) in steps {
            let address = Address::from_v4([10, 0, nth / 8, nth % 8]);
            let tuple = Tuple::new(ip("192.0.2.1"), address, 1000, u16::from(nth), protocol::TCP);
            let flags = if nth % 2 == 0 { 0 } else { flow_flags::REPLY };
            let key = if flags == 0 { tuple } else { tuple.reversed() };
            match step {
                0 => {
                    let other = 1 - copy_of(active);
                    memory.zero(other);
                    let marks = visible.iter().flat_map(|(key, flags)| Mark::of_entry(key, *flags));
                    marks.for_each(|mark| mark.set_in(&memory, other));
                    active = activated(other);
                }
                1..4 => drop(visible.remove(&key)),
                _ => {
                    Mark::of_entry(&key, flags).iter().for_each(|mark| mark.set(&memory));
                    visible.insert(key, flags);
                }
            }
            prop_assert!(visible.keys().all(|key| may_have_flow(&memory, active, key)));
        }
    }
}

/// Every interleaving of programs that insert entries and read the filter with an agent that rebuilds it.
mod interleavings {
    use super::*;

    /// A step of the agent that rebuilds the filter; [`PROTOCOL`] lists the steps in their order.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    enum Agent {
        Grace,
        Zero,
        MarkAll,
        Flip,
    }

    const PROTOCOL: [Agent; 5] = [Agent::Grace, Agent::Zero, Agent::Grace, Agent::MarkAll, Agent::Flip];

    /// The next step of a program that inserts an entry: it looks at a copy and then adds the mark there, if missing.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    enum Inserter {
        Look(usize),
        Add(usize),
        Publish,
        End,
        Ended,
    }

    /// The next step of a program that looks for an entry that was visible before the program began.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    enum Asker {
        Begin,
        Ask { active: u64, entry: usize },
        Ended,
    }

    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
    struct World {
        memory: Words,
        active: u64,
        /// For each of the three entries, whether the flow table has it.
        visible: [bool; 3],
        inserters: [Inserter; 2],
        asker: Asker,
        /// Steps of the agent so far.
        agent: usize,
        /// Which programs the agent's grace period waits for: the two programs that insert entries, and the program
        /// that looks for an entry.
        waits_for: Option<[bool; 3]>,
    }

    /// The mark of an entry. Entry 0 is visible from the start. Entry 1 was deleted before: its marks are left over in
    /// both copies.
    fn mark(entry: usize) -> Mark {
        let port = u16::try_from(entry).expect("a small number");
        Mark::new(Side::Back, &ip("10.1.0.7"), port, protocol::TCP)
    }

    fn begin() -> World {
        let memory = Words::default();
        mark(0).set(&memory);
        mark(1).set(&memory);
        World {
            memory,
            active: activated(0),
            visible: [true, false, false],
            inserters: [Inserter::Look(0); 2],
            asker: Asker::Begin,
            agent: 0,
            waits_for: None,
        }
    }

    impl World {
        /// Programs that have begun and not ended.
        fn running(&self) -> [bool; 3] {
            let inserts = |nth: usize| !matches!(self.inserters[nth], Inserter::Look(0) | Inserter::Ended);
            [inserts(0), inserts(1), matches!(self.asker, Asker::Ask { .. })]
        }

        /// Adds to `next` the worlds after one step of the program that inserts entry `nth + 1`.
        fn insert(&self, nth: usize, next: &mut Vec<Self>) {
            let mut world = self.clone();
            let mark = mark(nth + 1);
            let after = |copy| if copy == 0 { Inserter::Look(1) } else { Inserter::Publish };
            world.inserters[nth] = match self.inserters[nth] {
                Inserter::Look(copy) if mark.is_set(&world.memory, copy) => after(copy),
                Inserter::Look(copy) => Inserter::Add(copy),
                Inserter::Add(copy) => {
                    world.memory.set(mark.index(copy), mark.bits);
                    after(copy)
                }
                Inserter::Publish => {
                    world.visible[nth + 1] = true;
                    Inserter::End
                }
                Inserter::End => Inserter::Ended,
                Inserter::Ended => return,
            };
            next.push(world);
        }

        /// Adds to `next` the worlds after one step of the asker; `Err` if it does not find a visible entry.
        fn ask(&self, next: &mut Vec<Self>) -> Result<(), ()> {
            match self.asker {
                Asker::Begin => {
                    for entry in (0..3).filter(|entry| self.visible[*entry]) {
                        next.push(Self { asker: Asker::Ask { active: self.active, entry }, ..self.clone() });
                    }
                }
                Asker::Ask { active, entry } => {
                    if !mark(entry).is_set(&self.memory, copy_of(active)) {
                        return Err(());
                    }
                    next.push(Self { asker: Asker::Ended, ..self.clone() });
                }
                // Another asker may begin at any time after one has ended.
                Asker::Ended => next.push(Self { asker: Asker::Begin, ..self.clone() }),
            }
            Ok(())
        }

        /// Adds to `next` the worlds after one step of the agent.
        fn rebuild(&self, steps: &[Agent], next: &mut Vec<Self>) {
            if self.agent == 2 * steps.len() {
                return;
            }
            let mut world = self.clone();
            let other = 1 - copy_of(self.active);
            match steps[self.agent % steps.len()] {
                Agent::Grace => match self.waits_for {
                    None => {
                        world.waits_for = Some(self.running());
                        next.push(world);
                        return;
                    }
                    Some(waits_for) if waits_for.contains(&true) => return,
                    Some(_) => world.waits_for = None,
                },
                Agent::Zero => world.memory.zero(other),
                Agent::MarkAll => {
                    (0..3)
                        .filter(|entry| self.visible[*entry])
                        .for_each(|entry| mark(entry).set_in(&world.memory, other));
                }
                Agent::Flip => world.active = activated(other),
            }
            world.agent += 1;
            next.push(world);
        }
    }

    /// Whether some interleaving of the programs with an agent that takes these steps hides a visible entry.
    fn hides_an_entry(steps: &[Agent]) -> bool {
        let (mut seen, mut open) = (BTreeSet::new(), vec![begin()]);
        while let Some(mut world) = open.pop() {
            // A grace period ends when the programs that ran at its beginning have ended, whichever programs have begun
            // meanwhile.
            if let Some(waits_for) = &mut world.waits_for {
                let running = [0, 1].map(|nth| world.inserters[nth] != Inserter::Ended);
                waits_for[0] &= running[0];
                waits_for[1] &= running[1];
                waits_for[2] &= matches!(world.asker, Asker::Ask { .. });
            }
            if !seen.insert(world.clone()) {
                continue;
            }
            if world.ask(&mut open).is_err() {
                return true;
            }
            world.insert(0, &mut open);
            world.insert(1, &mut open);
            world.rebuild(steps, &mut open);
        }
        assert!(seen.len() > 1000, "{} states were explored", seen.len());
        false
    }

    #[test]
    fn no_interleaving_with_a_rebuild_hides_an_entry() {
        assert!(!hides_an_entry(&PROTOCOL));
    }

    #[test]
    fn rebuild_needs_both_grace_periods_and_its_order() {
        use Agent::{Flip, Grace, MarkAll, Zero};
        let without_the_second = [Grace, Zero, MarkAll, Flip];
        let without_the_first = [Zero, Grace, MarkAll, Flip];
        let marked_before_the_grace_period = [Grace, Zero, MarkAll, Grace, Flip];
        let flipped_too_early = [Grace, Zero, Grace, Flip, MarkAll];
        for steps in [
            &without_the_second,
            &without_the_first,
            &marked_before_the_grace_period[..],
            &flipped_too_early[..],
        ] {
            assert!(hides_an_entry(steps));
        }
    }
}
