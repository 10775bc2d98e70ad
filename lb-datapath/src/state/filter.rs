//! The agent's part of the filter: adds marks before it inserts entries and frontends, and rebuilds the filter.
//! [`lb_common::filter`] describes the rules, and why no mark is ever missing.

use std::{
    io,
    mem::offset_of,
    os::fd::BorrowedFd,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use lb_common::{
    DnsIntercept, Networks, Service, ServiceKey,
    filter::{self, Mark, Memory, OFF, ServiceRanges, WORDS, activated, copy_of, words_of},
    handover::OVER,
};

use crate::{
    bpf::{bpffs::Folder, grace, layout, mapped::Mapped, raw_map::RawMap, table::Table},
    error::DatapathError,
    state::flow_table::FlowTable,
};

/// Indices of fields in the map's value, in words of 64 bits.
const ACTIVE: usize = offset_of!(filter::Filter, active) / 8;
const RANGES: usize = offset_of!(filter::Filter, ranges) / 8;
const MARKS: usize = offset_of!(filter::Filter, words) / 8;

/// False-positive rate up to which the filter is not rebuilt. A false positive costs some 100 ns, so 0.4 % cost less
/// than half a nanosecond per packet without a flow, while a rebuild walks over all flows.
const MOST_FALSE_POSITIVES: f64 = 1.0 / 256.0;

/// Maximum number of times that [`pass_all`] clears the filter: under a flood of new flows, the function may never find
/// the filter empty.
const MOST_PASSES: u32 = 5;

/// The filter of this node. An agent has only one instance, because it contains the lock that keeps insertions and
/// rebuilding apart.
#[derive(Debug)]
pub struct Filter {
    memory: FilterMemory,
    services: Table<ServiceKey, Service>,
    intercepts: Table<ServiceKey, DnsIntercept>,
    flows: Arc<FlowTable>,
    handover: Table<u32, u32>,
    /// Held during each insertion with its marks, and while a rebuild zeroes a copy.
    insertion: Mutex<()>,
}

/// The fill of one copy of the filter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FilterFill {
    /// Number of bits that are set.
    pub bits: u32,
    /// Estimated false-positive rate: the share of packets without a flow that look as if they had a flow. It is the
    /// sum of the rates of the copy's two bit arrays, so it can exceed 1 if the filter is nearly full.
    pub false_positives: f64,
}

impl FilterFill {
    /// Number of bits that can be set.
    #[expect(clippy::cast_possible_truncation, reason = "4 million")]
    pub const CAPACITY: u32 = 2 * 64 * WORDS as u32;

    /// The fill of a filter without any mark.
    pub const EMPTY: Self = Self { bits: 0, false_positives: 0.0 };

    /// Whether a rebuild is due: false positives are frequent enough to matter, and so many marks may be obsolete that
    /// a rebuild is worthwhile, because more than twice as many bits are set as after the last rebuild.
    fn is_rebuild_due(self, rebuilt: Self) -> bool {
        self.false_positives > MOST_FALSE_POSITIVES && self.bits > rebuilt.bits.saturating_mul(2)
    }
}

/// The map `FILTER`, mapped into memory.
#[derive(Debug)]
pub struct FilterMemory(Mapped<AtomicU64>);

impl FilterMemory {
    /// Maps `FILTER`.
    ///
    /// # Errors
    ///
    /// The map is smaller than the filter, or cannot be mapped into memory.
    pub fn map(map: BorrowedFd<'_>) -> io::Result<Self> {
        Mapped::new(map, size_of::<filter::Filter>() / 8).map(Self)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.0.values()[index]
    }

    fn active(&self) -> u64 {
        self.word(ACTIVE).load(Ordering::SeqCst)
    }

    /// Makes the programs read a copy (0 or 1), or look up every packet (`None`).
    pub fn activate(&self, copy: Option<usize>) {
        self.word(ACTIVE).store(copy.map_or(OFF, activated), Ordering::SeqCst);
    }

    /// Clears all marks in a copy (0 or 1).
    pub fn zero(&self, copy: usize) {
        words_of(copy).for_each(|index| self.word(MARKS + index).store(0, Ordering::Relaxed));
    }

    /// Makes the programs pass all plain packets from now on, at all hooks at once, as if there were no Services: no
    /// endpoint is marked, and no range has cluster IPs. (For datagrams to the GUE port, for packets that are not
    /// plain, such as fragments, SCTP and ICMP errors, and on devices without an Ethernet header, the programs work as
    /// before.) No agent may run meanwhile, as it would add marks.
    pub fn pass_all(&self) {
        let other = 1 - copy_of(self.active());
        self.zero(other);
        self.set_ranges(&ServiceRanges::covering(&Networks::new([])));
        self.activate(Some(other));
    }

    /// Sets the ranges of cluster IPs. Writes only words that differ, so that programs always see unchanged ranges
    /// whole.
    pub fn set_ranges(&self, ranges: &ServiceRanges) {
        let words: &[u64] = bytemuck::cast_slice(std::slice::from_ref(ranges));
        for (index, word) in (RANGES..).zip(words) {
            if self.word(index).load(Ordering::Relaxed) != *word {
                self.word(index).store(*word, Ordering::SeqCst);
            }
        }
    }

    /// The fill of the copy that programs read; while the filter is off, of the first copy.
    fn fill(&self) -> FilterFill {
        let mut fill = FilterFill::EMPTY;
        for index in words_of(copy_of(self.active())) {
            let bits = self.load(index).count_ones();
            fill.bits += bits;
            // The probability that the mark of an endpoint without flows is in this word, and that other marks have set
            // both bits of this mark.
            fill.false_positives += (f64::from(bits) / 64.0).powi(2) / WORDS as f64;
        }
        fill
    }
}

impl Memory for FilterMemory {
    fn load(&self, index: usize) -> u64 {
        self.word(MARKS + index).load(Ordering::SeqCst)
    }

    fn set(&self, index: usize, bits: u64) {
        self.word(MARKS + index).fetch_or(bits, Ordering::SeqCst);
    }
}

impl Filter {
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        let (spec, path) = (&layout::FILTER, folder.map("FILTER"));
        let map = RawMap::open(spec.name, &path)?.ok_or_else(|| DatapathError::Absent(path.clone()))?;
        spec.check(&path, &map.shape)?;
        Ok(Self {
            memory: FilterMemory::map(map.fd()).map_err(|error| map.error("map", error))?,
            services: Table::open(&layout::SERVICES, &folder.map("SERVICES"))?,
            intercepts: Table::open(&layout::DNS_INTERCEPT, &folder.map("DNS_INTERCEPT"))?,
            flows: Arc::new(FlowTable::open(folder)?),
            handover: Table::open(&layout::HANDOVER, &folder.map("HANDOVER"))?,
            insertion: Mutex::new(()),
        })
    }

    /// The flow table, whose entries have marks in the filter.
    pub(crate) const fn flows(&self) -> &Arc<FlowTable> {
        &self.flows
    }

    fn insertion(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data that a panic could leave inconsistent.
        self.insertion.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the marks of entries or frontends to the filter, then calls `insert`, which makes the entries or frontends
    /// visible to programs.
    pub(crate) fn insert_after<R>(
        &self,
        marks: impl IntoIterator<Item = Mark>,
        insert: impl FnOnce() -> R,
    ) -> R {
        let _insertion = self.insertion();
        marks.into_iter().for_each(|mark| mark.set(&self.memory));
        insert()
    }

    /// Makes the programs look up every packet, without the filter, until the next rebuild.
    pub(crate) fn turn_off(&self) {
        self.memory.activate(None);
    }

    /// Sets the ranges of cluster IPs, whose packets the programs always look up.
    pub(crate) fn set_ranges(&self, ranges: &ServiceRanges) {
        self.memory.set_ranges(ranges);
    }

    /// Whether the programs use the filter.
    pub fn is_on(&self) -> bool {
        self.memory.active() != OFF
    }

    /// The fill of the copy that programs read; while the filter is off, of the first copy.
    pub fn fill(&self) -> FilterFill {
        self.memory.fill()
    }

    /// Rebuilds the filter if it is off, or if too many marks may be obsolete, but never during a handover. `rebuilt`
    /// is the fill after the last rebuild. Returns the new fill if this call has rebuilt the filter. A rebuild blocks
    /// for two grace periods and a walk over all flows.
    pub fn rebuild_if_due(&self, rebuilt: FilterFill) -> Result<Option<FilterFill>, DatapathError> {
        if self.is_on() && !self.fill().is_rebuild_due(rebuilt) {
            return Ok(None);
        }
        // During a handover, programs of another layout insert entries without marks, and the handover is still copying
        // their entries.
        if self.handover.get(&0)? != Some(OVER) {
            return Ok(None);
        }
        self.rebuild()?;
        Ok(Some(self.fill()))
    }

    /// Removes obsolete marks and turns the filter on, see [`lb_common::filter`].
    pub fn rebuild(&self) -> Result<(), DatapathError> {
        let other = 1 - copy_of(self.memory.active());
        grace::wait()?;
        {
            let _insertion = self.insertion();
            self.memory.zero(other);
        }
        grace::wait()?;
        self.services.for_each(|key, _| {
            Mark::of_frontend(key).set_in(&self.memory, other);
            Ok(())
        })?;
        self.intercepts.for_each(|key, _| {
            Mark::of_intercept(key).iter().for_each(|mark| mark.set_in(&self.memory, other));
            Ok(())
        })?;
        self.flows.for_each(|key, flow| {
            Mark::of_entry(key, flow.flags).iter().for_each(|mark| mark.set_in(&self.memory, other));
            Ok(())
        })?;
        self.memory.activate(Some(other));
        Ok(())
    }
}

/// Makes the programs of the data plane in this folder (`DIR/lb/vN`) pass all plain packets:
/// [`FilterMemory::pass_all`]. Does nothing if the folder has no filter of this layout.
pub(crate) fn pass_all(version: &Path) -> Result<(), DatapathError> {
    let (spec, path) = (&layout::FILTER, version.join("FILTER"));
    let Some(map) = RawMap::open(spec.name, &path)?.filter(|map| spec.check(&path, &map.shape).is_ok())
    else {
        return Ok(());
    };
    let memory = FilterMemory::map(map.fd()).map_err(|error| map.error("map", error))?;
    // A program that has read the filter before this change may still create a flow. The marks of that flow lead all
    // packets of its frontend to the lookups again.
    for _ in 0..MOST_PASSES {
        memory.pass_all();
        grace::wait()?;
        if memory.fill() == FilterFill::EMPTY {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rebuild_is_due_when_old_marks_cost_something() {
        let fill = |bits, false_positives| FilterFill { bits, false_positives };
        let rebuilt = fill(100_000, 0.003);
        assert!(fill(210_000, 0.012).is_rebuild_due(rebuilt));
        assert!(!fill(190_000, 0.01).is_rebuild_due(rebuilt), "most of the marks may be in use");
        assert!(!fill(3_000, 0.000_01).is_rebuild_due(fill(10, 0.0)), "they cost nothing");
    }
}
