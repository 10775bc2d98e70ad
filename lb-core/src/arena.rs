//! Allocates ranges of slots in the maps `BACKENDS` and `TABLES`, best fit. Released ranges are reused only when no BPF
//! program can still read them.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

/// A period in which ranges were released. They are free again once every program that was running at the end of the
/// period has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(u64);

/// A range of consecutive slots in a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotRange {
    /// Number of the first slot.
    pub base: u32,
    /// Number of slots.
    pub count: u32,
}

impl SlotRange {
    /// The empty range.
    pub const NONE: Self = Self { base: 0, count: 0 };

    /// The numbers of the slots.
    pub const fn slots(self) -> Range<u32> {
        self.base..self.base.saturating_add(self.count)
    }
}

/// Slots `0..slots`. Every slot is either free, in use, or in quarantine: released, but a program may still read it.
/// Allocating, releasing and freeing a range take O(log n).
#[derive(Clone, Debug)]
pub struct Arena {
    slots: u32,
    /// Free ranges, by first slot, with their number of slots; neighbours are always merged.
    free: BTreeMap<u32, u32>,
    /// The free ranges as (number of slots, first slot), to find the best fit.
    by_count: BTreeSet<(u32, u32)>,
    free_slots: u32,
    used: BTreeMap<u32, u32>,
    released: Vec<SlotRange>,
    quarantine: BTreeMap<Epoch, Vec<SlotRange>>,
    next_epoch: u64,
}

impl Arena {
    /// Creates an arena with the slots `0..slots`, all of them free.
    pub fn new(slots: u32) -> Self {
        let mut arena = Self {
            slots,
            free: BTreeMap::new(),
            by_count: BTreeSet::new(),
            free_slots: 0,
            used: BTreeMap::new(),
            released: Vec::new(),
            quarantine: BTreeMap::new(),
            next_epoch: 0,
        };
        arena.give_back(SlotRange { base: 0, count: slots });
        arena
    }

    /// Total number of slots, whether free or not.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// Number of slots that can be allocated, though perhaps not as one range.
    pub const fn free_slots(&self) -> u32 {
        self.free_slots
    }

    /// The ranges in use, in order.
    pub fn used(&self) -> impl Iterator<Item = SlotRange> {
        self.used.iter().map(|(&base, &count)| SlotRange { base, count })
    }

    /// Whether the slot belongs to a range in use.
    pub fn is_used(&self, slot: u32) -> bool {
        self.used.range(..=slot).next_back().is_some_and(|(base, count)| slot - base < *count)
    }

    /// Allocates a range of `count` slots and returns its first slot; `None` if `count` is 0
    /// or no free range is large enough.
    pub fn allocate(&mut self, count: u32) -> Option<u32> {
        if count == 0 {
            return None;
        }
        let &(found, base) = self.by_count.range((count, 0)..).next()?;
        self.take(SlotRange { base, count: found }, SlotRange { base, count });
        self.used.insert(base, count);
        Some(base)
    }

    /// Marks exactly these slots as used, for a range that an earlier run of the agent allocated; false if the range is
    /// empty, or if one of its slots is not free or does not exist.
    pub fn claim(&mut self, range: SlotRange) -> bool {
        let Some((&base, &count)) = self.free.range(..=range.base).next_back() else { return false };
        let end = u64::from(range.base) + u64::from(range.count);
        if range.count == 0 || end > u64::from(base) + u64::from(count) {
            return false;
        }
        self.take(SlotRange { base, count }, range);
        self.used.insert(range.base, range.count);
        true
    }

    /// Marks all free slots of `range` as used; returns them as ranges.
    pub fn claim_rest(&mut self, range: SlotRange) -> Vec<SlotRange> {
        let end = range.slots().end.min(self.slots);
        let first = self.free.range(..=range.base).next_back().map_or(range.base, |(&base, _)| base);
        let pieces: Vec<SlotRange> = self
            .free
            .range(first..end.max(first))
            .map(|(&base, &count)| (base.max(range.base), (base + count).min(end)))
            .filter(|(from, to)| from < to)
            .map(|(from, to)| SlotRange { base: from, count: to - from })
            .collect();
        pieces.iter().for_each(|piece| {
            self.claim(*piece);
        });
        pieces
    }

    /// Releases the range that starts at `base`, without freeing it yet; `None` if no range in use starts there.
    pub fn release(&mut self, base: u32) -> Option<SlotRange> {
        let range = SlotRange { base, count: self.used.remove(&base)? };
        self.released.push(range);
        Some(range)
    }

    /// Frees the range that starts at `base` without a grace period, because no program has ever been able to find it;
    /// `None` if no range in use starts there.
    pub fn discard(&mut self, base: u32) -> Option<SlotRange> {
        let range = SlotRange { base, count: self.used.remove(&base)? };
        self.give_back(range);
        Some(range)
    }

    /// Whether a range has been released since the last epoch ended.
    pub const fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// Ends the current epoch and returns it. If two arenas always end their epochs together, their epochs are equal.
    pub fn end_epoch(&mut self) -> Epoch {
        let epoch = Epoch(self.next_epoch);
        self.next_epoch += 1;
        if self.has_released() {
            self.quarantine.insert(epoch, std::mem::take(&mut self.released));
        }
        epoch
    }

    /// Frees the ranges that were released in `epoch` or before. Must be called only after a grace period that began
    /// after the end of `epoch`.
    pub fn grace_elapsed(&mut self, epoch: Epoch) {
        let later = self.quarantine.split_off(&Epoch(epoch.0 + 1));
        for range in std::mem::replace(&mut self.quarantine, later).into_values().flatten() {
            self.give_back(range);
        }
    }

    /// Takes the range `wanted` out of the free range `from`, which contains it.
    fn take(&mut self, from: SlotRange, wanted: SlotRange) {
        self.remove_free(from);
        let before = wanted.base - from.base;
        let after = from.count - before - wanted.count;
        self.insert_free(SlotRange { base: from.base, count: before });
        self.insert_free(SlotRange { base: wanted.base + wanted.count, count: after });
    }

    /// Makes `range` free and merges it with its free neighbours.
    fn give_back(&mut self, range: SlotRange) {
        let mut merged = range;
        if let Some((&base, &count)) = self.free.range(..range.base).next_back()
            && base + count == range.base
        {
            self.remove_free(SlotRange { base, count });
            merged = SlotRange { base, count: count + merged.count };
        }
        let end = range.base + range.count;
        if let Some(&count) = self.free.get(&end) {
            self.remove_free(SlotRange { base: end, count });
            merged.count += count;
        }
        self.insert_free(merged);
    }

    fn insert_free(&mut self, SlotRange { base, count }: SlotRange) {
        if count > 0 {
            self.free.insert(base, count);
            self.by_count.insert((count, base));
            self.free_slots += count;
        }
    }

    fn remove_free(&mut self, SlotRange { base, count }: SlotRange) {
        self.free.remove(&base);
        self.by_count.remove(&(count, base));
        self.free_slots -= count;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(base: u32, count: u32) -> SlotRange {
        SlotRange { base, count }
    }

    #[test]
    fn smallest_fitting_range_is_allocated() {
        let mut arena = Arena::new(100);
        assert!(arena.claim(range(10, 5)) && arena.claim(range(18, 72)));
        assert_eq!(arena.allocate(3), Some(15));
        assert_eq!(arena.allocate(10), Some(0));
        assert_eq!(arena.allocate(11), None);
        assert_eq!(arena.free_slots(), 10);
    }

    #[test]
    fn released_slots_are_unused_until_their_grace_period_ends() {
        let mut arena = Arena::new(4);
        let base = arena.allocate(4).unwrap();
        arena.release(base);
        let epoch = arena.end_epoch();
        assert_eq!(arena.allocate(1), None);
        assert!(!arena.has_released());
        arena.grace_elapsed(epoch);
        assert_eq!(arena.allocate(4), Some(0));
    }

    #[test]
    fn grace_period_covers_earlier_epochs() {
        let mut arena = Arena::new(2);
        let (a, b) = (arena.allocate(1).unwrap(), arena.allocate(1).unwrap());
        arena.release(a);
        arena.end_epoch();
        arena.release(b);
        let second = arena.end_epoch();
        arena.grace_elapsed(second);
        assert_eq!(arena.free_slots(), 2);
    }

    #[test]
    fn claim_of_used_or_missing_slots_is_rejected() {
        let mut arena = Arena::new(10);
        assert!(arena.claim(range(4, 2)));
        assert!(!arena.claim(range(3, 2)));
        assert!(!arena.claim(range(5, 1)));
        assert!(!arena.claim(range(9, 2)));
        assert!(!arena.claim(range(u32::MAX, u32::MAX)));
        assert_eq!(arena.claim_rest(range(2, u32::MAX)), vec![range(2, 2), range(6, 4)]);
        assert_eq!(arena.free_slots(), 2);
    }

    #[derive(Clone, Debug)]
    enum Operation {
        Allocate(u32),
        Release(usize),
        Discard(usize),
        EndEpoch,
        Grace,
    }

    fn operations() -> impl Strategy<Value = Vec<Operation>> {
        let operation = prop_oneof![
            4 => (1..20_u32).prop_map(Operation::Allocate),
            3 => any::<usize>().prop_map(Operation::Release),
            1 => any::<usize>().prop_map(Operation::Discard),
            1 => Just(Operation::EndEpoch),
            1 => Just(Operation::Grace),
        ];
        prop::collection::vec(operation, 0..200)
    }

    /// What an arena should contain. `busy` are the slots that are in use or in quarantine: none of them may be
    /// allocated.
    #[derive(Default)]
    struct Model {
        busy: BTreeSet<u32>,
        live: Vec<SlotRange>,
        resting: Vec<(Option<Epoch>, SlotRange)>,
        epochs: Vec<Epoch>,
    }

    impl Model {
        fn run(&mut self, arena: &mut Arena, operation: &Operation) {
            match *operation {
                Operation::Allocate(count) => {
                    if let Some(base) = arena.allocate(count) {
                        assert!((base..base + count).all(|slot| self.busy.insert(slot)), "handed out twice");
                        self.live.push(range(base, count));
                    }
                }
                Operation::Release(nth) if !self.live.is_empty() => {
                    let gone = self.live.swap_remove(nth % self.live.len());
                    assert_eq!(arena.release(gone.base), Some(gone));
                    self.resting.push((None, gone));
                }
                Operation::Discard(nth) if !self.live.is_empty() => {
                    let gone = self.live.swap_remove(nth % self.live.len());
                    assert_eq!(arena.discard(gone.base), Some(gone));
                    self.free(gone);
                }
                Operation::Release(_) | Operation::Discard(_) => {}
                Operation::EndEpoch => self.end_epoch(arena),
                Operation::Grace => self.grace(arena),
            }
        }

        fn end_epoch(&mut self, arena: &mut Arena) {
            if !arena.has_released() {
                return;
            }
            let epoch = arena.end_epoch();
            self.epochs.push(epoch);
            self.resting.iter_mut().for_each(|(of, _)| *of = of.or(Some(epoch)));
        }

        fn grace(&mut self, arena: &mut Arena) {
            if self.epochs.is_empty() {
                return;
            }
            let epoch = self.epochs.remove(0);
            arena.grace_elapsed(epoch);
            let (over, resting) =
                std::mem::take(&mut self.resting).into_iter().partition(|(of, _)| *of == Some(epoch));
            self.resting = resting;
            let over: Vec<(Option<Epoch>, SlotRange)> = over;
            over.into_iter().for_each(|(_, range)| self.free(range));
        }

        fn free(&mut self, range: SlotRange) {
            (range.base..range.base + range.count).for_each(|slot| assert!(self.busy.remove(&slot)));
        }
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_never_leak(operations in operations()) {
            let mut arena = Arena::new(256);
            let mut model = Model::default();
            for operation in &operations {
                model.run(&mut arena, operation);
                prop_assert_eq!(arena.free_slots() as usize, 256 - model.busy.len());
            }
            for live in std::mem::take(&mut model.live) {
                arena.release(live.base);
            }
            arena.end_epoch();
            arena.grace_elapsed(Epoch(u64::MAX - 1));
            prop_assert_eq!(arena.allocate(256), Some(0), "everything is one free range again");
        }
    }
}
