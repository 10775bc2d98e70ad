use super::{Control, Entry, Memory, Overflow, Places, find, insert::ATTEMPTS};

/// The result of [`replace`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replace<S> {
    /// The entry in this slot has the new value.
    Replaced(S),
    /// The entry in the overflow has the new value.
    ReplacedInOverflow,
    /// There is no entry with this key, or another CPU is replacing it.
    Absent,
}

/// Replaces the value of an entry. Readers find the earlier value, then for a moment no entry, then the new value.
#[inline(always)]
pub fn replace<M: Overflow>(table: &M, places: &Places, key: &M::Key, value: &M::Value) -> Replace<M::Slot> {
    for _ in 0..ATTEMPTS {
        let Some(entry) = find(table, places, key) else { break };
        let changing = entry.control.changing(M::IS_AGENT);
        if table.compare_exchange(entry.slot, entry.control, changing) {
            table.write_value(entry.slot, value);
            table.set(entry.slot, changing.live());
            return Replace::Replaced(entry.slot);
        }
    }
    if table.count() != 0 && table.replace(key, value) {
        Replace::ReplacedInOverflow
    } else {
        Replace::Absent
    }
}

/// Removes the entry with this key, from the table or the overflow. Returns whether this call removed it: of several
/// concurrent calls only one does.
#[inline(always)]
pub fn remove<M: Overflow>(table: &M, places: &Places, key: &M::Key) -> bool {
    for _ in 0..ATTEMPTS {
        let Some(entry) = find(table, places, key) else { break };
        if remove_entry(table, &entry) {
            return true;
        }
    }
    let removed = table.count() != 0 && table.remove(key);
    if removed {
        table.add_to_count(-1);
    }
    removed
}

/// Removes exactly this entry, and not a later entry in the same slot. Returns whether this call has removed the entry.
#[inline(always)]
pub fn remove_entry<M: Memory>(memory: &M, entry: &Entry<M::Slot>) -> bool {
    memory.compare_exchange(entry.slot, entry.control, entry.control.freed())
}

/// Frees the slot if an agent that was killed has left its claim there; returns whether there was such a claim. Only
/// the agent of the node may call this, at its start: the claims of a running agent look the same.
pub fn release_abandoned<M: Memory>(memory: &M, slot: M::Slot) -> bool {
    let control: Control = memory.control(slot);
    control.is_agents() && memory.compare_exchange(slot, control, control.freed())
}
