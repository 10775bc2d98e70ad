//! Which service port owns which slots of an arena, for backends or scheduler tables.

use std::collections::{BTreeMap, BTreeSet};

use crate::arena::{Arena, Epoch, SlotRange};

/// Which service port owns which slots. A slice is reserved, then published by the first frontend that refers to
/// it, then released when no frontend does.
#[derive(Clone, Debug)]
pub(crate) struct Slices {
    arena: Arena,
    slices: BTreeMap<u32, Slice>,
    by_id: BTreeSet<(u32, u32)>,
    unpublished: BTreeSet<u32>,
    /// Slots that an invalid record refers to. They are used again only after the record is gone and no program can
    /// still read them.
    garbage: BTreeSet<SlotRange>,
}

#[derive(Clone, Copy, Debug)]
struct Slice {
    id: u32,
    count: u32,
}

impl Slices {
    pub(crate) fn new(slots: u32) -> Self {
        Self {
            arena: Arena::new(slots),
            slices: BTreeMap::new(),
            by_id: BTreeSet::new(),
            unpublished: BTreeSet::new(),
            garbage: BTreeSet::new(),
        }
    }

    /// Takes over a slice of an earlier run. Returns true also for a slice that was taken over before; false if some of
    /// its slots do not exist, or if another slice uses them.
    pub(crate) fn adopt(&mut self, id: u32, range: SlotRange) -> bool {
        let SlotRange { base, count } = range;
        if let Some(known) = self.slices.get(&base) {
            return known.id == id && known.count == count;
        }
        let free = self.arena.claim(range);
        if free {
            self.slices.insert(base, Slice { id, count });
            self.by_id.insert((id, base));
        }
        free
    }

    /// Whether a slice of some service port starts at `base`.
    pub(crate) fn has(&self, base: u32) -> bool {
        self.slices.contains_key(&base)
    }

    /// Prevents the allocation of slots that an invalid record refers to.
    pub(crate) fn distrust(&mut self, range: SlotRange) {
        self.garbage.extend(self.arena.claim_rest(range));
    }

    /// The slots that invalid records refer to, to be released when these records are gone.
    pub(crate) fn garbage(&self) -> impl Iterator<Item = SlotRange> {
        self.garbage.iter().copied()
    }

    /// Reserves slots for a new slice of a service port; `None` if no free range is large enough.
    pub(crate) fn reserve(&mut self, id: u32, count: u32) -> Option<u32> {
        let base = self.arena.allocate(count)?;
        self.slices.insert(base, Slice { id, count });
        self.by_id.insert((id, base));
        self.unpublished.insert(base);
        Some(base)
    }

    pub(crate) fn of_id(&self, id: u32) -> impl Iterator<Item = SlotRange> {
        let bases = self.by_id.range((id, 0)..=(id, u32::MAX)).map(|(_, base)| *base);
        bases.filter_map(|base| Some(SlotRange { base, count: self.slices.get(&base)?.count }))
    }

    /// Records that a frontend now refers to the slice, so that programs may read it.
    pub(crate) fn publish(&mut self, base: u32) {
        self.unpublished.remove(&base);
    }

    /// Releases a slice that no frontend refers to any more; its slots are free after a grace period.
    pub(crate) fn release(&mut self, base: u32) {
        if let Some(range) = self.arena.release(base) {
            self.garbage.remove(&range);
            self.remove(base);
        }
    }

    /// Frees a reserved slice at once, because no frontend has ever referred to it.
    pub(crate) fn discard(&mut self, base: u32) {
        if self.unpublished.contains(&base) {
            self.arena.discard(base);
            self.remove(base);
        }
    }

    /// Frees all reserved slices that no frontend has ever referred to; returns them.
    pub(crate) fn discard_unpublished(&mut self) -> Vec<SlotRange> {
        let bases = std::mem::take(&mut self.unpublished);
        let discarded = bases.into_iter().filter_map(|base| {
            self.remove(base);
            self.arena.discard(base)
        });
        discarded.collect()
    }

    pub(crate) fn end_epoch(&mut self) -> Epoch {
        self.arena.end_epoch()
    }

    pub(crate) fn grace_elapsed(&mut self, epoch: Epoch) {
        self.arena.grace_elapsed(epoch);
    }

    pub(crate) const fn arena(&self) -> &Arena {
        &self.arena
    }

    fn remove(&mut self, base: u32) {
        self.unpublished.remove(&base);
        if let Some(slice) = self.slices.remove(&base) {
            self.by_id.remove(&(slice.id, base));
        }
    }
}
