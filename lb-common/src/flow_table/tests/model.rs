//! Loom runs the threads of each test in all orders with up to [`PREEMPTIONS`] preemptions (fewer if there are three
//! threads), and lets every load return every value that the memory model allows.
//!
//! Loom follows the memory model of C++, which is weaker than those of x86 and arm64. Here each of BPF's fully ordered
//! operations is an atomic operation between two sequentially consistent fences; all other operations are relaxed.

use std::{sync::Arc, vec::Vec};

use loom::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering, fence},
    },
    thread,
};

use crate::flow_table::{
    Control, Evict, EvictionClass, Insert, Memory, Overflow, OverflowInsert, Places, Replace, Snapshot, find,
    insert_new, read, remove, replace,
};

const PREEMPTIONS: usize = 3;
/// The fingerprint of all keys, so that only the comparison of keys distinguishes them.
const FINGERPRINT: u32 = 0x10;

struct Cell {
    control: AtomicU64,
    key: AtomicU64,
    /// The value and its complement: a reader must never return the words of two values.
    value: [AtomicU64; 2],
}

impl Cell {
    fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self { control: zero(), key: zero(), value: [zero(), zero()] }
    }
}

struct World {
    cells: Vec<Cell>,
    overflow: Mutex<Vec<(u64, u64)>>,
    overflow_count: AtomicU64,
    overflow_capacity: usize,
}

/// The access of a program, or of the agent, to the world.
#[derive(Clone)]
struct View<const AGENT: bool>(Arc<World>);

type Program = View<false>;
type Agent = View<true>;

impl Program {
    fn new(slots: usize, overflow_capacity: usize) -> Self {
        Self(Arc::new(World {
            cells: (0..slots).map(|_| Cell::new()).collect(),
            overflow: Mutex::new(Vec::new()),
            overflow_count: AtomicU64::new(0),
            overflow_capacity,
        }))
    }

    fn agent(&self) -> Agent {
        View(Arc::clone(&self.0))
    }
}

impl<const AGENT: bool> Memory for View<AGENT> {
    type Slot = usize;
    type Key = u64;
    type Value = u64;

    const IS_AGENT: bool = AGENT;

    fn slot(&self, index: u32) -> Option<usize> {
        let index = index as usize;
        (index < self.0.cells.len()).then_some(index)
    }

    fn control(&self, slot: usize) -> Control {
        Control(self.0.cells[slot].control.load(Ordering::Relaxed))
    }

    fn acquire(&self, slot: usize, _control: Control) -> usize {
        fence(Ordering::Acquire);
        slot
    }

    fn control_after(&self, slot: usize) -> Control {
        fence(Ordering::Acquire);
        self.control(slot)
    }

    fn compare_exchange(&self, slot: usize, from: Control, to: Control) -> bool {
        fence(Ordering::SeqCst);
        let control = &self.0.cells[slot].control;
        let result = control.compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        result.is_ok()
    }

    fn set(&self, slot: usize, to: Control) {
        fence(Ordering::SeqCst);
        self.0.cells[slot].control.swap(to.0, Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }

    fn has_key(&self, slot: usize, key: &u64) -> bool {
        self.0.cells[slot].key.load(Ordering::Relaxed) == *key
    }

    fn write_key(&self, slot: usize, key: &u64) {
        self.0.cells[slot].key.store(*key, Ordering::Relaxed);
    }

    fn write_value(&self, slot: usize, value: &u64) {
        let [first, second] = &self.0.cells[slot].value;
        first.store(*value, Ordering::Relaxed);
        second.store(!*value, Ordering::Relaxed);
    }
}

impl<const AGENT: bool> Snapshot for View<AGENT> {
    /// A torn value becomes 0, which no test inserts.
    fn copy(&self, slot: usize) -> (u64, u64) {
        let cell = &self.0.cells[slot];
        let key = cell.key.load(Ordering::Relaxed);
        let [first, second] = [0, 1].map(|half| cell.value[half].load(Ordering::Relaxed));
        (key, if first == !second { first } else { 0 })
    }
}

impl<const AGENT: bool> Overflow for View<AGENT> {
    fn takes_all(&self) -> bool {
        false
    }

    fn count(&self) -> u64 {
        self.0.overflow_count.load(Ordering::Relaxed)
    }

    fn add_to_count(&self, difference: i64) {
        fence(Ordering::SeqCst);
        self.0.overflow_count.fetch_add(difference.cast_unsigned(), Ordering::AcqRel);
        fence(Ordering::SeqCst);
    }

    fn has(&self, key: &u64) -> bool {
        self.0.overflow.lock().expect("no test panics").iter().any(|entry| entry.0 == *key)
    }

    fn insert(&self, key: &u64, value: &u64) -> OverflowInsert {
        let mut entries = self.0.overflow.lock().expect("no test panics");
        if entries.iter().any(|entry| entry.0 == *key) {
            OverflowInsert::Exists
        } else if entries.len() == self.0.overflow_capacity {
            OverflowInsert::Full
        } else {
            entries.push((*key, *value));
            OverflowInsert::Inserted
        }
    }

    fn replace(&self, key: &u64, value: &u64) -> bool {
        let mut entries = self.0.overflow.lock().expect("no test panics");
        let entry = entries.iter_mut().find(|entry| entry.0 == *key);
        entry.map(|entry| entry.1 = *value).is_some()
    }

    fn remove(&self, key: &u64) -> bool {
        let mut entries = self.0.overflow.lock().expect("no test panics");
        let length = entries.len();
        entries.retain(|entry| entry.0 != *key);
        entries.len() != length
    }
}

/// Puts every entry into the same eviction class.
struct All(EvictionClass);

impl<const AGENT: bool> Evict<View<AGENT>> for All {
    fn class(&mut self, _: usize) -> EvictionClass {
        self.0
    }

    fn evicted(&mut self, _: usize) {}
}

const PLACES: Places = Places::at(0, 4, FINGERPRINT);

impl<const AGENT: bool> View<AGENT> {
    fn insert_key(&self, key: u64, value: u64) -> Insert<usize> {
        insert_new(self, &mut All(EvictionClass::Keep), &PLACES, &key, &value)
    }

    fn insert_evicting(&self, key: u64, value: u64) -> Insert<usize> {
        insert_new(self, &mut All(EvictionClass::Expired), &PLACES, &key, &value)
    }

    fn remove_key(&self, key: u64) -> bool {
        remove(self, &PLACES, &key)
    }

    /// The value that one lookup of a reader finds.
    fn get(&self, key: u64) -> Option<u64> {
        let entry = find(self, &PLACES, &key)?;
        let (found, value) = self.copy(entry.slot);
        (self.control_after(entry.slot) == entry.control).then(|| {
            assert_eq!(found, key);
            value
        })
    }

    /// The values of all entries with this key, once the threads have ended.
    fn values(&self, key: u64) -> Vec<u64> {
        let in_table = (0..self.0.cells.len()).filter_map(|slot| read(self, slot));
        let mut values: Vec<u64> =
            in_table.filter(|found| found.key == key).map(|found| found.value).collect();
        let overflow = self.0.overflow.lock().expect("no test panics");
        values.extend(overflow.iter().filter(|entry| entry.0 == key).map(|entry| entry.1));
        values
    }

    /// Checks what holds whenever no operation runs.
    fn check(&self) {
        for cell in &self.0.cells {
            let control = Control(cell.control.load(Ordering::Relaxed));
            assert!(control.is_free() || control.is_live(), "abandoned: {control:?}");
        }
        let overflow = self.0.overflow.lock().expect("no test panics").len();
        assert_eq!(self.count(), overflow as u64);
    }
}

const fn is_new(result: Insert<usize>) -> bool {
    matches!(result, Insert::Inserted(_) | Insert::Overflowed)
}

fn explore(test: impl Fn() + Send + Sync + 'static) {
    explore_with(PREEMPTIONS, test);
}

fn explore_with(preemptions: usize, test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(test);
}

const KEY: u64 = 7;
const OTHER: u64 = 8;

#[test]
fn one_of_two_inserts_of_a_key_wins() {
    explore(|| {
        let table = Program::new(2, 1);
        let second = table.clone();
        let second = thread::spawn(move || second.insert_key(KEY, 2));
        let first = table.insert_key(KEY, 1);
        let second = second.join().expect("no test panics");
        assert_eq!([first, second].into_iter().filter(|result| is_new(*result)).count(), 1);
        assert_eq!(table.values(KEY), [if is_new(first) { 1 } else { 2 }]);
        table.check();
    });
}

#[test]
fn one_of_two_inserts_of_a_key_wins_when_an_earlier_place_becomes_free() {
    explore(|| {
        let table = Program::new(3, 1);
        table.insert_key(OTHER, 9);
        let second = table.clone();
        let second = thread::spawn(move || {
            second.remove_key(OTHER);
            second.insert_key(KEY, 2)
        });
        let first = table.insert_key(KEY, 1);
        let second = second.join().expect("no test panics");
        assert_eq!([first, second].into_iter().filter(|result| is_new(*result)).count(), 1);
        assert_eq!(table.values(KEY), [if is_new(first) { 1 } else { 2 }]);
        table.check();
    });
}

#[test]
fn one_of_three_inserts_of_a_key_wins() {
    explore_with(1, || {
        let table = Program::new(3, 1);
        let others = [2, 3].map(|value| {
            let table = table.clone();
            thread::spawn(move || table.insert_key(KEY, value))
        });
        let mut results = std::vec![table.insert_key(KEY, 1)];
        results.extend(others.map(|thread| thread.join().expect("no test panics")));
        assert_eq!(results.iter().filter(|result| is_new(**result)).count(), 1);
        assert_eq!(table.values(KEY).len(), 1);
        table.check();
    });
}

#[test]
fn program_wins_over_the_agent_or_finds_its_entry() {
    explore(|| {
        let table = Program::new(2, 1);
        let agent = table.agent();
        let agent = thread::spawn(move || agent.insert_key(KEY, 2));
        let program = table.insert_key(KEY, 1);
        let agent = agent.join().expect("no test panics");
        assert_eq!([program, agent].into_iter().filter(|result| is_new(*result)).count(), 1);
        assert_eq!(table.values(KEY).len(), 1);
        table.check();
    });
}

#[test]
fn table_and_overflow_never_both_take_a_key() {
    explore(|| {
        let table = Program::new(1, 2);
        table.insert_key(OTHER, 9);
        let second = table.clone();
        let second = thread::spawn(move || {
            second.remove_key(OTHER);
            second.insert_key(KEY, 2)
        });
        let first = table.insert_key(KEY, 1);
        let second = second.join().expect("no test panics");
        assert_eq!([first, second].into_iter().filter(|result| is_new(*result)).count(), 1);
        assert_eq!(table.values(KEY), [if is_new(first) { 1 } else { 2 }]);
        table.check();
    });
}

#[test]
fn insert_succeeds_against_a_remove_only_after_it() {
    explore(|| {
        let table = Program::new(2, 1);
        table.insert_key(KEY, 1);
        let second = table.clone();
        let second = thread::spawn(move || second.remove_key(KEY));
        let inserted = is_new(table.insert_key(KEY, 2));
        let removed = second.join().expect("no test panics");
        let expected: &[u64] = match (inserted, removed) {
            (false, true) => &[],
            (false, false) => &[1],
            // The insert succeeded, so it came after the remove of the first entry.
            (true, _) => &[2],
        };
        assert!(removed);
        assert_eq!(table.values(KEY), expected);
        table.check();
    });
}

#[test]
fn one_of_two_removes_succeeds() {
    explore(|| {
        let table = Program::new(2, 1);
        table.insert_key(KEY, 1);
        let second = table.clone();
        let second = thread::spawn(move || second.remove_key(KEY));
        assert_ne!(table.remove_key(KEY), second.join().expect("no test panics"));
        assert!(table.values(KEY).is_empty());
        table.check();
    });
}

#[test]
fn insert_never_succeeds_against_a_replace() {
    explore(|| {
        let table = Program::new(2, 1);
        table.insert_key(KEY, 1);
        let second = table.clone();
        let second = thread::spawn(move || replace(&second, &PLACES, &KEY, &2));
        assert_eq!(table.insert_key(KEY, 3), Insert::Exists);
        assert_eq!(second.join().expect("no test panics"), Replace::Replaced(0));
        assert_eq!(table.values(KEY), [2]);
        table.check();
    });
}

#[test]
fn reader_sees_a_replaced_value_whole() {
    explore(|| {
        let table = Program::new(2, 1);
        table.insert_key(KEY, 1);
        let second = table.clone();
        let second = thread::spawn(move || replace(&second, &PLACES, &KEY, &2));
        let found = table.get(KEY);
        assert!(matches!(found, None | Some(1 | 2)), "{found:?}");
        second.join().expect("no test panics");
        table.check();
    });
}

#[test]
fn two_keys_that_want_one_place_both_get_one() {
    explore(|| {
        let table = Program::new(2, 1);
        let second = table.clone();
        let second = thread::spawn(move || second.insert_key(OTHER, 2));
        assert!(is_new(table.insert_key(KEY, 1)));
        assert!(is_new(second.join().expect("no test panics")));
        assert_eq!([table.values(KEY), table.values(OTHER)], [[1], [2]]);
        table.check();
    });
}

#[test]
fn second_key_overflows_when_there_is_one_place() {
    explore(|| {
        let table = Program::new(1, 1);
        let second = table.clone();
        let second = thread::spawn(move || second.insert_key(OTHER, 2));
        let first = table.insert_key(KEY, 1);
        let second = second.join().expect("no test panics");
        assert!(matches!(
            (first, second),
            (Insert::Inserted(0), Insert::Overflowed) | (Insert::Overflowed, Insert::Inserted(0))
        ));
        assert_eq!([table.values(KEY), table.values(OTHER)], [[1], [2]]);
        table.check();
    });
}

#[test]
fn reader_never_sees_the_flow_that_took_over_an_evicted_place() {
    explore(|| {
        let table = Program::new(1, 0);
        table.insert_key(KEY, 1);
        let second = table.clone();
        let second = thread::spawn(move || second.insert_evicting(OTHER, 2));
        let [found, other] = [KEY, OTHER].map(|key| table.get(key));
        assert!(matches!(found, None | Some(1)), "{found:?}");
        assert!(matches!(other, None | Some(2)), "{other:?}");
        assert!(matches!(second.join().expect("no test panics"), Insert::Inserted(0)));
        assert_eq!([table.values(KEY), table.values(OTHER)], [Vec::new(), std::vec![2]]);
        table.check();
    });
}

#[test]
fn evicted_place_is_taken_once() {
    explore(|| {
        let table = Program::new(1, 2);
        table.insert_key(1, 1);
        let second = table.clone();
        let second = thread::spawn(move || second.insert_evicting(OTHER, 2));
        let first = table.insert_evicting(KEY, 3);
        let second = second.join().expect("no test panics");
        assert!(is_new(first) && is_new(second));
        assert!(table.values(1).is_empty());
        table.check();
    });
}
