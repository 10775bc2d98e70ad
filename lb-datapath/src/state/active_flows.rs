//! The number of active flows of each backend: the map `ACTIVE`.
//!
//! Programs change it at any time, so it is mapped and changed by atomic additions, as they do it. What it should say can
//! be counted in `CONNTRACK`; a difference that stays is put right.

use std::{
    collections::{BTreeMap, BTreeSet},
    io, ptr, slice,
    sync::atomic::{AtomicI64, Ordering},
};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::{
    bpf::{bpffs::Folder, layout, table::Table},
    error::DatapathError,
};

/// The map `ACTIVE`, mapped.
#[derive(Debug)]
pub struct ActiveFlows {
    table: Table<u32, i64>,
    memory: Memory,
}

impl ActiveFlows {
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        let table = Table::open(&layout::ACTIVE, &folder.map("ACTIVE"))?;
        let mapped = Memory::map(&table);
        let memory = mapped.map_err(|source| DatapathError::Map { action: "map", map: "ACTIVE", source })?;
        Ok(Self { table, memory })
    }

    /// What the counter says; nothing for one that is not there.
    pub fn get(&self, counter: u32) -> i64 {
        self.memory.counters().get(counter as usize).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Changes a counter; 0 is none.
    pub(crate) fn add(&self, counter: u32, difference: i64) {
        if counter != 0
            && let Some(count) = self.memory.counters().get(counter as usize)
        {
            count.fetch_add(difference, Ordering::Relaxed);
        }
    }

    /// Every counter that says something.
    fn said(&self) -> Result<BTreeSet<u32>, DatapathError> {
        let mut counters = BTreeSet::new();
        self.table.for_each(|counter, count| {
            if *count != 0 {
                counters.insert(*counter);
            }
            Ok(())
        })?;
        Ok(counters)
    }
}

/// The values of an array map in our address space.
#[derive(Debug)]
struct Memory {
    start: ptr::NonNull<AtomicI64>,
    count: usize,
}

// SAFETY: it is nothing but memory of atomic integers, which any thread may use.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn map(table: &Table<u32, i64>) -> io::Result<Self> {
        let count = table.capacity() as usize;
        let length = count * size_of::<AtomicI64>();
        let (access, sharing) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping, at a place that the kernel chooses.
        let start = unsafe { mmap(ptr::null_mut(), length, access, sharing, table.fd(), 0) }?;
        let start =
            ptr::NonNull::new(start.cast()).ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        Ok(Self { start, count })
    }

    const fn counters(&self) -> &[AtomicI64] {
        // SAFETY: the mapping is as long as the map's values (8 octets each, aligned), lives as long as this, and is changed
        // by atomic operations only.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let length = self.count * size_of::<AtomicI64>();
        // SAFETY: what `map` made; nobody has a reference into it any more. It can fail only for another range than that.
        unsafe { munmap(self.start.as_ptr().cast(), length) }.unwrap_or_default();
    }
}

/// Finds the counters that are wrong, over several sweeps.
///
/// Flows begin and end while they are counted. So a number between what the counter said before and after is right, and
/// one beyond that is wrong only if the next sweep says so, too.
#[derive(Debug, Default)]
pub struct Recount {
    /// Those to look at: the ones that flows had or that said something. `None` before the first sweep.
    known: Option<BTreeSet<u32>>,
    suspects: BTreeMap<u32, i64>,
    in_flows: BTreeSet<u32>,
}

impl Recount {
    /// The counters that flows had when they were last counted.
    pub const fn in_flows(&self) -> &BTreeSet<u32> {
        &self.in_flows
    }

    /// What the counters say now.
    pub(crate) fn read(&mut self, active: &ActiveFlows) -> Result<BTreeMap<u32, i64>, DatapathError> {
        if self.known.is_none() {
            self.known = Some(active.said()?);
        }
        Ok(self.known.iter().flatten().map(|counter| (*counter, active.get(*counter))).collect())
    }

    /// What to add to which counter, where there were so many `flows`, and the counters were so `before` they were counted
    /// and are so `now`.
    fn corrections(
        &mut self,
        before: &BTreeMap<u32, i64>,
        flows: &BTreeMap<u32, i64>,
        now: impl Fn(u32) -> i64,
    ) -> Vec<(u32, i64)> {
        let mut corrections = Vec::new();
        let mut suspects = BTreeMap::new();
        for (counter, before) in before {
            let now = now(*counter);
            let flows = flows.get(counter).copied().unwrap_or(0);
            let error = flows - flows.clamp(now.min(*before), now.max(*before));
            let earlier = self.suspects.get(counter).copied().unwrap_or(0);
            if error != 0 && error.signum() == earlier.signum() {
                let sure = error.abs().min(earlier.abs()) * error.signum();
                corrections.push((*counter, sure));
            } else if error != 0 {
                suspects.insert(*counter, error);
            }
        }
        self.suspects = suspects;
        self.in_flows = flows.keys().copied().collect();
        let says_something = |counter: &u32| now(*counter) != 0;
        let known = before.keys().copied().filter(says_something).chain(flows.keys().copied());
        self.known = Some(known.collect());
        corrections
    }

    /// Puts right what is wrong for certain; how many counters.
    pub(crate) fn correct(
        &mut self,
        active: &ActiveFlows,
        before: &BTreeMap<u32, i64>,
        flows: &BTreeMap<u32, i64>,
    ) -> usize {
        let corrections = self.corrections(before, flows, |counter| active.get(counter));
        corrections.iter().for_each(|(counter, difference)| active.add(*counter, *difference));
        corrections.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corrected(recount: &mut Recount, before: i64, flows: i64, now: i64) -> Vec<(u32, i64)> {
        let flows = if flows == 0 { BTreeMap::new() } else { BTreeMap::from([(7, flows)]) };
        recount.corrections(&BTreeMap::from([(7, before)]), &flows, |_| now)
    }

    #[test]
    fn what_changes_while_it_is_counted_is_not_wrong() {
        let mut recount = Recount::default();
        for (before, flows, now) in [(5, 5, 5), (5, 7, 9), (9, 5, 5), (5, 9, 9)] {
            assert_eq!(corrected(&mut recount, before, flows, now), []);
            assert!(recount.suspects.is_empty());
        }
    }

    #[test]
    fn what_is_wrong_twice_is_put_right_by_what_is_certain() {
        let mut recount = Recount::default();
        assert_eq!(corrected(&mut recount, 5, 8, 5), []);
        assert_eq!(corrected(&mut recount, 5, 7, 5), [(7, 2)]);
        assert_eq!(corrected(&mut recount, 7, 7, 7), []);
        assert_eq!(corrected(&mut recount, 7, 0, 7), []);
        assert_eq!(corrected(&mut recount, 7, 0, 7), [(7, -7)]);
        assert_eq!(corrected(&mut recount, 3, 4, 3), []);
        assert_eq!(corrected(&mut recount, 5, 4, 5), [], "the other way round");
    }

    #[test]
    fn counters_are_looked_at_as_long_as_they_or_flows_say_something() {
        let mut recount = Recount::default();
        corrected(&mut recount, 0, 1, 1);
        assert_eq!(recount.known, Some(BTreeSet::from([7])));
        assert_eq!(recount.in_flows(), &BTreeSet::from([7]));
        corrected(&mut recount, 1, 0, 1);
        assert_eq!((recount.known.as_ref().map(BTreeSet::len), recount.in_flows().len()), (Some(1), 0));
        corrected(&mut recount, 0, 0, 0);
        assert_eq!(recount.known, Some(BTreeSet::new()));
    }
}
