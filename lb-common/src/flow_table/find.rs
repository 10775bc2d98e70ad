use super::{Control, Memory, PLACES, Places, Snapshot};

/// An entry of the flow table with the version that a reader has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<S> {
    /// The slot of the entry.
    pub slot: S,
    /// The control word that the reader has seen, which identifies this use of the slot.
    pub control: Control,
}

/// Finds the entry with this key in the table; does not search the overflow.
///
/// The slot may be reused for another flow at any time. A caller that must not act on another flow compares
/// [`Memory::control_after`] with [`Entry::control`] after it has read what it needs.
#[inline(always)]
pub fn find<M: Memory>(memory: &M, places: &Places, key: &M::Key) -> Option<Entry<M::Slot>> {
    let wanted = Control::live_tag(places.fingerprint());
    for place in 0..PLACES {
        let slot = memory.slot(places.slot(place))?;
        let control = memory.control(slot);
        if control.tag() == wanted {
            let slot = memory.acquire(slot, control);
            if memory.has_key(slot, key) {
                return Some(Entry { slot, control });
            }
        } else if control == Control::NEVER_USED {
            // An entry takes the first free place, so no entry is behind a slot that was never used.
            return None;
        }
    }
    None
}

/// Maximum number of attempts to read a slot: an attempt fails if the slot changes meanwhile.
const READS: u32 = 4;

/// A consistent copy of an entry: key and value are of the same flow.
#[derive(Clone, Copy, Debug)]
pub struct Copied<S, K, V> {
    /// The slot of the entry, and its control word at the time of the copy.
    pub entry: Entry<S>,
    /// The entry's key.
    pub key: K,
    /// The entry's value.
    pub value: V,
}

/// Reads the whole entry in a slot; `None` if there is none, or if it changes during every attempt.
pub fn read<M: Snapshot>(memory: &M, slot: M::Slot) -> Option<Copied<M::Slot, M::Key, M::Value>> {
    for _ in 0..READS {
        let control = memory.control(slot);
        if !control.is_live() {
            return None;
        }
        let (key, value) = memory.copy(memory.acquire(slot, control));
        if memory.control_after(slot) == control {
            return Some(Copied { entry: Entry { slot, control }, key, value });
        }
    }
    None
}
