use super::{Control, Places, insert};

/// The slots of a table, as one user of it (a program, the agent, a test) reaches them.
///
/// *Fully ordered* means: on every CPU, all loads and stores before the operation in program order happen before all
/// loads and stores after the operation. BPF atomic operations that return a value are fully ordered, except a
/// compare-and-swap that fails. Every other load and store may be reordered with its neighbours, unless the method's
/// documentation excludes that.
pub trait Memory: Sized {
    /// The type that names one slot of this memory.
    type Slot: Copy;
    /// The key of an entry.
    type Key;
    /// The value of an entry.
    type Value;

    /// Whether this user of the table is the agent: if the agent is killed, its unfinished claims stay in the slots.
    /// Programs always finish.
    const IS_AGENT: bool;

    /// The slot with this index; `None` beyond the end of the table.
    fn slot(&self, index: u32) -> Option<Self::Slot>;

    /// Loads the control word, whole.
    fn control(&self, slot: Self::Slot) -> Control;

    /// Returns the same slot. Loads through the result happen after `control` was loaded. (An address dependency
    /// suffices. x86 loads in order.)
    fn acquire(&self, slot: Self::Slot, control: Control) -> Self::Slot;

    /// Loads the control word again, after all earlier loads from the slot.
    fn control_after(&self, slot: Self::Slot) -> Control;

    /// Replaces the control word by `to` if it is `from`; returns whether it was `from`. Fully ordered if so.
    fn compare_exchange(&self, slot: Self::Slot, from: Control, to: Control) -> bool;

    /// Sets the control word by an atomic exchange. Fully ordered.
    fn set(&self, slot: Self::Slot, to: Control);

    /// Whether the slot holds this key.
    fn has_key(&self, slot: Self::Slot, key: &Self::Key) -> bool;

    /// Writes the key of a slot.
    fn write_key(&self, slot: Self::Slot, key: &Self::Key);

    /// Writes the value of a slot.
    fn write_value(&self, slot: Self::Slot, value: &Self::Value);

    /// Calls [`insert::win_place`]. The BPF programs override this with a global function; otherwise the verifier
    /// would check the loop once for each pair of places.
    fn win_place(&self, slot: Self::Slot, places: &Places, key: &Self::Key, comes_first: bool) -> bool {
        insert::win_place(self, slot, places, key, comes_first)
    }
}

/// A memory that adds an overflow to the slots of another memory.
#[cfg(any(test, feature = "user"))]
pub trait OnSlots {
    /// The type of the memory that holds the slots.
    type Slots: Memory;

    /// See [`Memory::IS_AGENT`].
    const IS_AGENT: bool;

    /// The memory that holds the slots.
    fn slots(&self) -> &Self::Slots;
}

#[cfg(any(test, feature = "user"))]
impl<T: OnSlots> Memory for T {
    type Slot = <T::Slots as Memory>::Slot;
    type Key = <T::Slots as Memory>::Key;
    type Value = <T::Slots as Memory>::Value;

    const IS_AGENT: bool = T::IS_AGENT;

    fn slot(&self, index: u32) -> Option<Self::Slot> {
        self.slots().slot(index)
    }

    fn control(&self, slot: Self::Slot) -> Control {
        self.slots().control(slot)
    }

    fn acquire(&self, slot: Self::Slot, control: Control) -> Self::Slot {
        self.slots().acquire(slot, control)
    }

    fn control_after(&self, slot: Self::Slot) -> Control {
        self.slots().control_after(slot)
    }

    fn compare_exchange(&self, slot: Self::Slot, from: Control, to: Control) -> bool {
        self.slots().compare_exchange(slot, from, to)
    }

    fn set(&self, slot: Self::Slot, to: Control) {
        self.slots().set(slot, to);
    }

    fn has_key(&self, slot: Self::Slot, key: &Self::Key) -> bool {
        self.slots().has_key(slot, key)
    }

    fn write_key(&self, slot: Self::Slot, key: &Self::Key) {
        self.slots().write_key(slot, key);
    }

    fn write_value(&self, slot: Self::Slot, value: &Self::Value) {
        self.slots().write_value(slot, value);
    }
}

/// A memory from which entries can be copied.
pub trait Snapshot: Memory {
    /// Copies key and value, which may come from two different flows if the slot changes meanwhile.
    fn copy(&self, slot: Self::Slot) -> (Self::Key, Self::Value);
}

/// The map that holds the entries for which the table had no place.
pub trait Overflow: Memory {
    /// Whether new entries go to the overflow even if the table has a place: see [`Header::takes_all`](super::Header).
    fn takes_all(&self) -> bool;

    /// At least the number of entries: see [`Header::overflow`](super::Header::overflow). While it is 0, the algorithms
    /// do not search the overflow.
    fn count(&self) -> u64;

    /// Adds to the number of entries. Fully ordered.
    fn add_to_count(&self, difference: i64);

    /// Whether the overflow has an entry with this key.
    fn has(&self, key: &Self::Key) -> bool;

    /// Inserts an entry if the key is new (`BPF_NOEXIST`).
    fn insert(&self, key: &Self::Key, value: &Self::Value) -> OverflowInsert;

    /// Replaces the value of an entry (`BPF_EXIST`); returns whether there was one.
    fn replace(&self, key: &Self::Key, value: &Self::Value) -> bool;

    /// Deletes an entry; returns whether there was one.
    fn remove(&self, key: &Self::Key) -> bool;
}

/// The result of [`Overflow::insert`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum OverflowInsert {
    /// The entry is new.
    Inserted = 0,
    /// The key has an entry.
    Exists = 1,
    /// The overflow has no room, or the kernel no memory.
    Full = 2,
}

/// Decides which entries may be evicted for a new flow.
pub trait Evict<M: Memory> {
    /// Whether the entry in this slot may be evicted. If the slot changes meanwhile, the caller does not evict the
    /// entry.
    fn class(&mut self, slot: M::Slot) -> EvictionClass;

    /// Called after an insert has claimed the slot of an entry to evict it. Until this method returns, the slot still
    /// holds key and value, so that the method can delete the reverse entry and count the flow as ended.
    fn evicted(&mut self, slot: M::Slot);
}

/// Whether an entry may be evicted, in the order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum EvictionClass {
    /// The entry has expired.
    Expired = 0,
    /// A sender with a forged address may have begun the flow, or the connection is closing or over; and the flow has
    /// been idle for long enough.
    Unproven = 1,
    /// The entry stays.
    Keep = 2,
}
