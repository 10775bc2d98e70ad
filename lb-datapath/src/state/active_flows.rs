//! The number of active flows of each backend: the map `ACTIVE`.
//!
//! Programs change the counters at any time, so the agent maps them into memory and changes them by atomic additions,
//! as the programs do. The agent also counts the flows in the flow table, and corrects a counter that differs from this
//! count in two passes in a row.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicI64, Ordering},
};

use crate::{
    bpf::{bpffs::Folder, layout, mapped::Mapped, table::Table},
    error::DatapathError,
    state::socket_counts::IdleBackends,
};

/// The map `ACTIVE`, mapped into memory: one counter of active flows per slot.
#[derive(Debug)]
pub struct ActiveFlows {
    table: Table<u32, i64>,
    memory: Mapped<AtomicI64>,
}

impl ActiveFlows {
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        let table = Table::open(&layout::ACTIVE_FLOWS, &folder.map("ACTIVE"))?;
        let mapped = Mapped::new(table.fd(), table.capacity() as usize);
        let memory = mapped.map_err(|source| DatapathError::Map { action: "map", map: "ACTIVE", source })?;
        Ok(Self { table, memory })
    }

    /// The counter of a slot; 0 for a slot beyond the end of the map.
    pub fn get(&self, slot: u32) -> i64 {
        self.memory.values().get(slot as usize).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Adds `difference` to the counter of a slot. Does nothing for slot 0, which stands for flows that are not
    /// counted.
    pub(crate) fn add(&self, slot: u32, difference: i64) {
        if slot != 0
            && let Some(count) = self.memory.values().get(slot as usize)
        {
            count.fetch_add(difference, Ordering::Relaxed);
        }
    }

    /// The slots whose counter is not 0.
    fn slots_in_use(&self) -> Result<BTreeSet<u32>, DatapathError> {
        let mut slots = BTreeSet::new();
        self.table.for_each(|slot, count| {
            if *count != 0 {
                slots.insert(*slot);
            }
            Ok(())
        })?;
        Ok(slots)
    }
}

/// Finds slots with wrong counts, over several GC passes.
///
/// Flows begin and end while the agent counts them. So a counter is right if the number of flows that the walk finds
/// lies between the values of the counter before and after the walk. If the number lies outside this range, the counter
/// is wrong only if the next pass finds a difference in the same direction.
#[derive(Debug, Default)]
pub struct Recount {
    /// Slots to check: slots that flows refer to, and slots whose counter is not 0. `None` before the first pass.
    known: Option<BTreeSet<u32>>,
    /// Slots whose counter was wrong in the last pass, with the difference to add.
    suspects: BTreeMap<u32, i64>,
    in_flows: BTreeSet<u32>,
    /// Backends to which no socket was connected in the last pass.
    pub(crate) idle_sockets: IdleBackends,
}

impl Recount {
    /// The slots to which flows and sockets referred in the last pass.
    pub const fn in_flows(&self) -> &BTreeSet<u32> {
        &self.in_flows
    }

    /// Reads the present counters of the slots to check.
    pub(crate) fn read(&mut self, active_flows: &ActiveFlows) -> Result<BTreeMap<u32, i64>, DatapathError> {
        if self.known.is_none() {
            self.known = Some(active_flows.slots_in_use()?);
        }
        Ok(self.known.iter().flatten().map(|slot| (*slot, active_flows.get(*slot))).collect())
    }

    /// The slots to correct, each with the difference to add. `flows` is the number of flows that the walk found per
    /// slot, `before` has the counters before the walk, and `now` returns the counters after the walk.
    fn corrections(
        &mut self,
        before: &BTreeMap<u32, i64>,
        flows: &BTreeMap<u32, i64>,
        now: impl Fn(u32) -> i64,
    ) -> Vec<(u32, i64)> {
        let mut corrections = Vec::new();
        let mut suspects = BTreeMap::new();
        for (slot, before) in before {
            let now = now(*slot);
            let flows = flows.get(slot).copied().unwrap_or(0);
            let error = flows - flows.clamp(now.min(*before), now.max(*before));
            let earlier = self.suspects.get(slot).copied().unwrap_or(0);
            if error != 0 && error.signum() == earlier.signum() {
                // Only the smaller of the two errors is certain; the rest of the larger error may be flows that began
                // or ended meanwhile.
                let certain = error.abs().min(earlier.abs()) * error.signum();
                corrections.push((*slot, certain));
            } else if error != 0 {
                suspects.insert(*slot, error);
            }
        }
        self.suspects = suspects;
        self.in_flows = flows.keys().copied().collect();
        let is_in_use = |slot: &u32| now(*slot) != 0;
        let known = before.keys().copied().filter(is_in_use).chain(flows.keys().copied());
        self.known = Some(known.collect());
        corrections
    }

    /// Corrects counters by the errors that are certain. Returns the number of corrected slots.
    pub(crate) fn correct(
        &mut self,
        active_flows: &ActiveFlows,
        before: &BTreeMap<u32, i64>,
        flows: &BTreeMap<u32, i64>,
    ) -> usize {
        let corrections = self.corrections(before, flows, |slot| active_flows.get(slot));
        corrections.iter().for_each(|(slot, difference)| active_flows.add(*slot, *difference));
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
    fn flows_that_change_during_the_count_are_not_an_error() {
        let mut recount = Recount::default();
        for (before, flows, now) in [(5, 5, 5), (5, 7, 9), (9, 5, 5), (5, 9, 9)] {
            assert_eq!(corrected(&mut recount, before, flows, now), []);
            assert!(recount.suspects.is_empty());
        }
    }

    #[test]
    fn error_found_twice_is_corrected_by_its_certain_part() {
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
    fn slots_are_checked_while_they_or_flows_are_in_use() {
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
