//! Runs two threads with the atomic operations of this CPU, and checks the invariants of the table between rounds.

use std::{
    env, println,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    vec::Vec,
};

use super::super::{
    Evict, EvictionClass, Insert, Memory, OnSlots, Overflow, OverflowInsert, Places, Replace, SharedSlots,
    Slot, Snapshot, find, insert_new, read, remove, remove_entry, replace,
};
use crate::{
    Address,
    conntrack::{Flow, Tick, Tuple},
    protocol::TCP,
};

/// Number of slots. This number and [`KEYS`] are small, so that almost all operations of the two threads collide.
const SLOTS: usize = 16;
const KEYS: u64 = 12;
const WORDS: usize = SLOTS * size_of::<Slot>() / 8;

/// The overflow of the test has one element for each key. This is the value of a free element.
const NONE: u64 = 0;

/// The table, and how many entries of each key the successful operations have inserted and removed.
struct Bed {
    words: Vec<AtomicU64>,
    overflow: Vec<AtomicU64>,
    overflow_count: AtomicU64,
    inserted: Vec<AtomicU64>,
    removed: Vec<AtomicU64>,
}

impl Bed {
    fn new() -> Self {
        let zeros = |count: usize| (0..count).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        let keys = usize::try_from(KEYS).expect("few");
        Self {
            words: zeros(WORDS),
            overflow: zeros(keys),
            overflow_count: AtomicU64::new(0),
            inserted: zeros(keys),
            removed: zeros(keys),
        }
    }
}

/// The access of a program, or of the agent, to the bed.
#[derive(Clone, Copy)]
struct View<'a, const AGENT: bool> {
    bed: &'a Bed,
    slots: SharedSlots<'a>,
}

impl<'a, const AGENT: bool> View<'a, AGENT> {
    fn new(bed: &'a Bed) -> Self {
        Self { bed, slots: SharedSlots::new(&bed.words) }
    }
}

impl<'a, const AGENT: bool> OnSlots for View<'a, AGENT> {
    type Slots = SharedSlots<'a>;

    const IS_AGENT: bool = AGENT;

    fn slots(&self) -> &SharedSlots<'a> {
        &self.slots
    }
}

impl<const AGENT: bool> Snapshot for View<'_, AGENT> {
    fn copy(&self, slot: Self::Slot) -> (Tuple, Flow) {
        self.slots.copy(slot)
    }
}

/// A map with one element for each key.
impl<const AGENT: bool> Overflow for View<'_, AGENT> {
    fn takes_all(&self) -> bool {
        false
    }

    fn count(&self) -> u64 {
        self.bed.overflow_count.load(Ordering::Relaxed)
    }

    fn add_to_count(&self, difference: i64) {
        self.bed.overflow_count.fetch_add(difference.cast_unsigned(), Ordering::SeqCst);
    }

    fn has(&self, key: &Tuple) -> bool {
        self.bed.overflow[index(key)].load(Ordering::SeqCst) != NONE
    }

    fn insert(&self, key: &Tuple, value: &Flow) -> OverflowInsert {
        let element = &self.bed.overflow[index(key)];
        match element.compare_exchange(NONE, value.traffic, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => OverflowInsert::Inserted,
            Err(_) => OverflowInsert::Exists,
        }
    }

    fn replace(&self, key: &Tuple, value: &Flow) -> bool {
        let element = &self.bed.overflow[index(key)];
        let found = element.load(Ordering::SeqCst);
        found != NONE
            && element.compare_exchange(found, value.traffic, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    fn remove(&self, key: &Tuple) -> bool {
        self.bed.overflow[index(key)].swap(NONE, Ordering::SeqCst) != NONE
    }
}

fn tuple(key: u64) -> Tuple {
    let port = u16::try_from(key).expect("few keys");
    Tuple::new(Address::from_v4([192, 0, 2, 1]), Address::from_v4([192, 0, 2, 2]), port, 80, TCP)
}

fn index(key: &Tuple) -> usize {
    usize::from(key.source_port)
}

/// A flow with this key. Its other fields are derived from `number`, so that [`is_whole`] detects a mixture of two
/// flows.
fn flow(key: u64, number: u64) -> Flow {
    let low = u32::try_from(number & 0xffff_ffff).expect("32 bits");
    let mut flow = Flow::new(&tuple(key), &tuple(key), low, 0, Tick(low));
    (flow.next_seq, flow.last_ack, flow.packets) = (!low, low, !low);
    flow.traffic = number;
    flow
}

fn is_whole(key: &Tuple, found: &Flow) -> bool {
    *found == flow(u64::from(key.source_port), found.traffic)
}

/// Places of a key. Some keys share the first four places, some the last four. All keys have the same fingerprint.
fn places(key: u64) -> Places {
    let position = |number: u64| u32::try_from(number % 4).expect("small") * 4;
    let (first, second) = (position(key), position(key / 4 + key + 1));
    Places::at(first, if first == second { (second + 4) % 16 } else { second }, 0x10)
}

/// Xorshift64 (Marsaglia, "Xorshift RNGs", 2003).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

/// Returns random eviction classes, of which one in two allows an eviction, and counts each evicted entry as removed.
struct OneInTwo<'a> {
    bed: &'a Bed,
    random: &'a mut Random,
}

impl<'a, const AGENT: bool> Evict<View<'a, AGENT>> for OneInTwo<'a> {
    fn class(&mut self, _: <View<'a, AGENT> as Memory>::Slot) -> EvictionClass {
        match self.random.below(4) {
            0 => EvictionClass::Expired,
            1 => EvictionClass::Unproven,
            _ => EvictionClass::Keep,
        }
    }

    fn evicted(&mut self, slot: <View<'a, AGENT> as Memory>::Slot) {
        let (key, found) = View::<AGENT>::new(self.bed).copy(slot);
        assert!(is_whole(&key, &found), "evicted a torn flow: {key:?} {found:?}");
        self.bed.removed[index(&key)].fetch_add(1, Ordering::SeqCst);
    }
}

/// Runs one random operation.
fn step<const AGENT: bool>(view: &View<'_, AGENT>, random: &mut Random, number: u64) {
    let key = random.below(KEYS);
    let (tuple, places) = (tuple(key), places(key));
    let bed = view.bed;
    match random.below(8) {
        0..3 => {
            let mut evict = OneInTwo { bed, random };
            match insert_new(view, &mut evict, &places, &tuple, &flow(key, number)) {
                Insert::Inserted(_) | Insert::Overflowed => {
                    bed.inserted[index(&tuple)].fetch_add(1, Ordering::SeqCst);
                }
                Insert::Exists => {}
                Insert::Full => panic!("the overflow has room for every key"),
            }
        }
        3 => {
            if remove(view, &places, &tuple) {
                bed.removed[index(&tuple)].fetch_add(1, Ordering::SeqCst);
            }
        }
        4 => {
            let entry = find(view, &places, &tuple);
            if entry.is_some_and(|entry| remove_entry(view, &entry)) {
                bed.removed[index(&tuple)].fetch_add(1, Ordering::SeqCst);
            }
        }
        5 => match replace(view, &places, &tuple, &flow(key, number)) {
            Replace::Replaced(_) | Replace::ReplacedInOverflow | Replace::Absent => {}
        },
        _ => {
            if let Some(entry) = find(view, &places, &tuple) {
                let (found, value) = view.copy(entry.slot);
                if view.control_after(entry.slot) == entry.control {
                    assert!(found == tuple && is_whole(&found, &value), "torn: {found:?} {value:?}");
                }
            }
        }
    }
}

/// Compares the table with the numbers of successful operations: if they differ, a flow is lost or exists twice.
fn check(bed: &Bed) {
    let view = View::<false>::new(bed);
    for key in 0..KEYS {
        let tuple = tuple(key);
        let index = index(&tuple);
        let slots = (0..u32::try_from(SLOTS).expect("few")).filter_map(|slot| view.slot(slot));
        let entries = slots.filter_map(|slot| read(&view, slot)).filter(|found| {
            assert!(is_whole(&found.key, &found.value), "torn: {found:?}");
            found.key == tuple
        });
        let entries = entries.count() as u64 + u64::from(bed.overflow[index].load(Ordering::SeqCst) != NONE);
        let [inserted, removed] =
            [&bed.inserted, &bed.removed].map(|list| list[index].load(Ordering::SeqCst));
        assert!(entries <= 1, "key {key} has {entries} entries");
        assert_eq!(inserted - removed, entries, "key {key}: {inserted} inserted, {removed} removed");
    }
    let in_overflow = bed.overflow.iter().filter(|entry| entry.load(Ordering::SeqCst) != NONE).count();
    assert_eq!(view.count(), in_overflow as u64);
    for slot in (0..u32::try_from(SLOTS).expect("few")).filter_map(|slot| view.slot(slot)) {
        let control = view.control(slot);
        assert!(control.is_free() || control.is_live(), "abandoned: {control:?}");
    }
}

/// The agent changes the entry in place. If it replaced the entry instead, a lookup could miss the entry, and a program
/// would take the next packet for the first one of a new flow.
#[test]
fn entry_that_the_agent_changes_is_found_all_the_time() {
    const CHANGES: u32 = 50_000;
    let bed = Bed::new();
    let view = View::<false>::new(&bed);
    let (tuple, places) = (tuple(1), places(1));
    let mut random = Random(1);
    let inserted =
        insert_new(&view, &mut OneInTwo { bed: &bed, random: &mut random }, &places, &tuple, &flow(1, 0));
    assert!(matches!(inserted, Insert::Inserted(_)));
    let entry = find(&view, &places, &tuple).expect("inserted");
    // Both fields are in one word, so the threads' compare-and-swaps fail at times.
    let change = |set: fn(&mut Flow, u32)| {
        for number in 1..=CHANGES {
            while !view.slots.change(&entry, |flow| set(flow, number)) {}
        }
    };
    thread::scope(|scope| {
        let one = scope.spawn(|| change(|flow, number| flow.next_seq = number));
        let other = scope.spawn(|| change(|flow, number| flow.last_ack = number));
        while !one.is_finished() || !other.is_finished() {
            assert!(find(&view, &places, &tuple).is_some_and(|found| found.control == entry.control));
        }
    });
    let (_, changed) = view.copy(entry.slot);
    assert_eq!((changed.next_seq, changed.last_ack), (CHANGES, CHANGES), "no change is lost");
    assert!(remove_entry(&view, &entry));
    assert!(!view.slots.change(&entry, |flow| flow.next_seq = 0), "the entry is gone");
    assert_eq!(view.copy(entry.slot).1, changed);
}

fn run<const AGENT: bool>(bed: &Bed, seed: u64, operations: u64) {
    let view = View::<AGENT>::new(bed);
    let mut random = Random(seed);
    for number in 1..=operations {
        step(&view, &mut random, number << 8 | seed & 0xff);
    }
}

/// Operations between two checks, on both threads together.
const ROUND: u64 = 200_000;

/// `FLOW_TABLE_OPERATIONS=1000000000 cargo test --release -p lb-common flow_table::tests::stress` runs 10^9 operations.
#[test]
fn two_cpus_never_lose_duplicate_or_tear_a_flow() {
    let wanted = env::var("FLOW_TABLE_OPERATIONS").map_or(4 * ROUND, |text| text.parse().expect("a number"));
    let bed = Bed::new();
    for round in 0..wanted.div_ceil(ROUND) {
        thread::scope(|scope| {
            scope.spawn(|| run::<false>(&bed, 2 * round + 1, ROUND / 2));
            // Every other round the second thread is the agent.
            scope.spawn(|| match round % 2 {
                0 => run::<false>(&bed, 2 * round + 2, ROUND / 2),
                _ => run::<true>(&bed, 2 * round + 2, ROUND / 2),
            });
        });
        check(&bed);
    }
    println!("{} operations", wanted.div_ceil(ROUND) * ROUND);
}
