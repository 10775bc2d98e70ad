//! The flow table: the array `FLOWS`, mapped into memory, and its overflow, the hash map `CONNTRACK`.
//!
//! Programs and the agent run the same algorithms, [`lb_common::flow_table`], at the same time.

mod earlier;
mod header;
mod view;

use std::{io, ops::Range, sync::atomic::AtomicU64, thread, time::Duration};

use lb_common::{
    conntrack::{Flow, Tuple},
    flow_table::{
        self, Copied, Entry, Insert, Memory, Places, Replace, SharedSlots, read, release_abandoned,
    },
};

pub(crate) use self::earlier::EarlierSlots;
use self::{
    header::SharedHeader,
    view::{KeepAll, View},
};
use crate::{
    bpf::{
        bpffs::Folder,
        layout::{self, MapSpec},
        mapped::Mapped,
        raw_map::RawMap,
        table::Table,
    },
    error::DatapathError,
};

/// Number of attempts to read an entry that changes during each attempt, and the pause between attempts in
/// [`read_busy`]: a program writes for less than a microsecond, but a hypervisor may suspend the program's CPU.
const READS: u32 = 16;
const PAUSE: Duration = Duration::from_millis(1);

/// The flow table of the node. A flow has an entry for each direction; a tunnelled flow has only the forward one.
#[derive(Debug)]
pub struct FlowTable {
    slots: Mapped<AtomicU64>,
    header: SharedHeader,
    overflow: Table<Tuple, Flow>,
}

/// An entry of the flow table, and where it was read.
#[derive(Debug)]
pub struct ReadEntry<'a> {
    /// The flow as it was when the entry was read.
    pub flow: Flow,
    /// The slot, with the control word that identifies this use of it; `None` for an entry in the overflow.
    place: Option<Entry<<SharedSlots<'a> as Memory>::Slot>>,
}

impl<'a> From<Copied<<SharedSlots<'a> as Memory>::Slot, Tuple, Flow>> for ReadEntry<'a> {
    fn from(copied: Copied<<SharedSlots<'a> as Memory>::Slot, Tuple, Flow>) -> Self {
        Self { flow: copied.value, place: Some(copied.entry) }
    }
}

/// Whether two values of an entry in the overflow, read at different times, may be of the same flow: compares the
/// fields that packets do not change.
fn may_be_same(one: &Flow, other: &Flow) -> bool {
    let identity = |flow: &Flow| (flow.to, flow.service, flow.flags, flow.generation());
    identity(one) == identity(other)
}

/// Maps all elements of the pinned array with this layout into memory.
fn map(spec: &MapSpec, folder: &Folder) -> Result<Mapped<AtomicU64>, DatapathError> {
    let path = folder.map(spec.name);
    let map = RawMap::open(spec.name, &path)?.ok_or_else(|| DatapathError::Absent(path.clone()))?;
    spec.check(&path, &map.shape)?;
    map.mapped()
}

/// Reads the entry in a slot that a program may be writing, after the write has ended. `None` if the slot has no entry,
/// or if the entry keeps changing.
fn read_busy<'a>(
    slots: &SharedSlots<'a>,
    slot: <SharedSlots<'a> as Memory>::Slot,
) -> Option<Copied<<SharedSlots<'a> as Memory>::Slot, Tuple, Flow>> {
    for _ in 0..READS {
        match read(slots, slot) {
            None if !slots.control(slot).is_free() => thread::sleep(PAUSE),
            result => return result,
        }
    }
    None
}

impl FlowTable {
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        Ok(Self {
            slots: map(&layout::FLOWS, folder)?,
            header: SharedHeader::new(map(&layout::FLOW_TABLE, folder)?),
            overflow: Table::open(&layout::CONNTRACK, &folder.map("CONNTRACK"))?,
        })
    }

    /// Makes a new table usable, and frees slots that an earlier agent had claimed when it was killed. Only the node's
    /// agent may call this, before it changes the table, and, if the table is new, before it attaches programs.
    pub(crate) fn prepare(&self) -> Result<(), DatapathError> {
        if self.header.is_new() {
            // Programs of builds without this table may have left entries in the overflow.
            self.header.begin(self.overflow.count()? as u64);
        }
        let slots = self.shared();
        for slot in self.indices().filter_map(|index| slots.slot(index)) {
            release_abandoned(&slots, slot);
        }
        Ok(())
    }

    /// Number of entries for which the table was made: two for each connection of `--max-connections`. It has room for
    /// more entries, but counts as *nearly full* from three quarters of this number on, see
    /// [`lb_common::conntrack::Pressure`].
    pub fn capacity(&self) -> u32 {
        self.overflow.capacity()
    }

    /// Number of slots of `FLOWS`.
    #[expect(clippy::cast_possible_truncation, reason = "an array has fewer than 2^32 elements")]
    pub fn slots(&self) -> u32 {
        self.shared().len() as u32
    }

    /// Number of entries in the overflow `CONNTRACK`, for which `FLOWS` had no room.
    pub fn overflowed(&self) -> usize {
        usize::try_from(self.header.overflow()).unwrap_or(usize::MAX)
    }

    /// Number of entries in `FLOWS` and `CONNTRACK`. Reads every slot.
    pub fn count(&self) -> Result<usize, DatapathError> {
        let mut count = 0;
        self.for_each(|_, _| {
            count += 1;
            Ok(())
        })?;
        Ok(count)
    }

    /// Sets whether to use the kernel's batch commands for `CONNTRACK`; on by default.
    pub fn use_batches(&self, yes: bool) {
        self.overflow.use_batches(yes);
    }

    /// The entry of a tuple; `None` if there is none, or if a program is replacing it.
    pub fn get(&self, key: &Tuple) -> Result<Option<Flow>, DatapathError> {
        Ok(self.read(key)?.map(|entry| entry.flow))
    }

    /// Like [`Self::get`], for a caller that may [remove](Self::remove_read) the entry afterwards.
    pub fn read(&self, key: &Tuple) -> Result<Option<ReadEntry<'_>>, DatapathError> {
        let (slots, places) = (self.shared(), self.places(key));
        for _ in 0..READS {
            let Some(entry) = flow_table::find(&slots, &places, key) else { break };
            // Another entry may be in the slot by now.
            if let Some(copied) = read(&slots, entry.slot)
                && copied.key == *key
            {
                return Ok(Some(copied.into()));
            }
        }
        if self.header.overflow() == 0 {
            return Ok(None);
        }
        Ok(self.overflow.get(key)?.map(|flow| ReadEntry { flow, place: None }))
    }

    /// Inserts an entry unless the tuple has one. Returns whether the entry was inserted.
    pub fn insert_new(&self, key: &Tuple, flow: &Flow) -> Result<bool, DatapathError> {
        let view = self.view();
        let inserted = flow_table::insert_new(&view, &mut KeepAll, &self.places(key), key, flow);
        view.result()?;
        match inserted {
            Insert::Inserted(_) | Insert::Overflowed => Ok(true),
            Insert::Exists => Ok(false),
            Insert::Full => {
                let source = io::Error::from_raw_os_error(libc::E2BIG);
                Err(DatapathError::Map { action: "write to", map: layout::CONNTRACK.name, source })
            }
        }
    }

    /// Updates the copy of an entry with what packets have changed in the `original` since the copy was made, unless
    /// the tuple has another flow by now. Lookups never miss the copy meanwhile.
    pub(crate) fn merge(&self, key: &Tuple, original: &Flow) -> Result<(), DatapathError> {
        let Some(copy) = self.read(key)? else { return Ok(()) };
        if let Some(place) = &copy.place {
            // Fails only if the entry is gone, or if our programs have seen a packet of the flow during each attempt.
            self.shared().change(place, |flow| flow.merge(original));
            return Ok(());
        }
        let mut whole = copy.flow;
        whole.merge(original);
        // If the merge has changed nothing, a replacement would only undo what packets have changed since the entry was
        // read.
        if whole == copy.flow { Ok(()) } else { self.replace(key, &whole).map(drop) }
    }

    /// Replaces the entry of a tuple. Returns whether the tuple had one. Meanwhile, lookups find no entry, unless it is
    /// in the overflow.
    pub(crate) fn replace(&self, key: &Tuple, flow: &Flow) -> Result<bool, DatapathError> {
        let view = self.view();
        let replaced = flow_table::replace(&view, &self.places(key), key, flow);
        view.result()?;
        Ok(!matches!(replaced, Replace::Absent))
    }

    /// Removes the entry of a tuple. Returns whether the tuple had one.
    pub fn remove(&self, key: &Tuple) -> Result<bool, DatapathError> {
        let view = self.view();
        let removed = flow_table::remove(&view, &self.places(key), key);
        view.result().map(|()| removed)
    }

    /// Removes the entry if it is still the one that was read. Returns whether it was removed.
    pub fn remove_read(&self, key: &Tuple, entry: &ReadEntry<'_>) -> Result<bool, DatapathError> {
        match &entry.place {
            Some(place) => Ok(flow_table::remove_entry(&self.shared(), place)),
            None => Ok(self.take_from_overflow(key, |flow| *flow == entry.flow)?.is_some()),
        }
    }

    /// Removes the entry if it still belongs to the flow that was read, whatever packets have changed in it since.
    /// Returns the flow at the time of removal.
    pub(crate) fn remove_flow(
        &self,
        key: &Tuple,
        entry: &ReadEntry<'_>,
    ) -> Result<Option<Flow>, DatapathError> {
        let Some(place) = &entry.place else {
            return self.take_from_overflow(key, |flow| may_be_same(flow, &entry.flow));
        };
        let slots = self.shared();
        let current = read(&slots, place.slot).filter(|current| current.entry.control == place.control);
        Ok(current.filter(|_| flow_table::remove_entry(&slots, place)).map(|current| current.value))
    }

    /// Removes the entry from the overflow if `is_meant` returns true for its flow; returns the removed flow. The
    /// overflow has no generations, so the function removes the entry first, and inserts it again if `is_meant` returns
    /// false: lookups do not find the entry meanwhile. If it cannot be inserted again, it counts as removed.
    fn take_from_overflow(
        &self,
        key: &Tuple,
        is_meant: impl Fn(&Flow) -> bool,
    ) -> Result<Option<Flow>, DatapathError> {
        let Some(taken) = self.overflow.take(key)? else { return Ok(None) };
        self.header.add_to_overflow(-1);
        if is_meant(&taken) {
            return Ok(Some(taken));
        }
        let view = self.view();
        let inserted = flow_table::insert_into_overflow(&view, &self.places(key), key, &taken);
        view.result()?;
        // Meanwhile a program may have inserted another entry with this key, which stays, or have filled the overflow.
        Ok((!matches!(inserted, Insert::Overflowed)).then_some(taken))
    }

    /// Calls `see` at least once for every entry that exists during the whole walk. May miss an entry that programs
    /// keep changing, or that is in the overflow while batch commands are off. `see` may change the table.
    pub fn for_each(
        &self,
        mut see: impl FnMut(&Tuple, &Flow) -> Result<(), DatapathError>,
    ) -> Result<(), DatapathError> {
        self.for_each_read(|key, entry| see(key, &entry.flow))
    }

    /// Like [`Self::for_each`], for a caller that may remove the entries afterwards.
    pub(crate) fn for_each_read<'a>(
        &'a self,
        mut see: impl FnMut(&Tuple, ReadEntry<'a>) -> Result<(), DatapathError>,
    ) -> Result<(), DatapathError> {
        let slots = self.shared();
        let mut busy = Vec::new();
        for slot in self.indices().filter_map(|index| slots.slot(index)) {
            if let Some(copied) = read(&slots, slot) {
                see(&copied.key, copied.into())?;
            } else if !slots.control(slot).is_free() {
                busy.push(slot);
            }
        }
        self.overflow.for_each(|key, flow| see(key, ReadEntry { flow: *flow, place: None }))?;
        for copied in busy.into_iter().filter_map(|slot| read_busy(&slots, slot)) {
            see(&copied.key, copied.into())?;
        }
        Ok(())
    }

    const fn shared(&self) -> SharedSlots<'_> {
        SharedSlots::new(self.slots.values())
    }

    fn indices(&self) -> Range<u32> {
        0..self.slots()
    }

    fn places(&self, key: &Tuple) -> Places {
        Places::new(self.header.seed().hash(key), self.slots())
    }

    const fn view(&self) -> View<'_> {
        View::new(self.shared(), &self.header, &self.overflow)
    }
}
