use std::sync::atomic::{AtomicU64, Ordering, fence};

use bytemuck::{Zeroable as _, bytes_of_mut, cast_slice};
use lb_common::{
    conntrack::{Flow, Tuple},
    flow_table::{Control, Slot},
};

use super::READS;
use crate::{
    bpf::{description::Conversion, mapped::Mapped, raw_map::RawMap},
    error::DatapathError,
};

/// A function that is called with the key and the flow of each entry.
type See<'a> = dyn FnMut(&Tuple, &Flow) -> Result<(), DatapathError> + 'a;

/// The slots of a flow table with another layout, which programs of that layout are changing.
pub(crate) struct EarlierSlots {
    memory: Mapped<AtomicU64>,
    /// Size of a slot in words of 64 bits.
    words: usize,
    conversion: Conversion,
}

impl EarlierSlots {
    /// Maps the slots of `map`. `conversion` converts its values to our layout.
    pub(crate) fn new(map: &RawMap, conversion: Conversion) -> Result<Self, DatapathError> {
        Ok(Self { memory: map.mapped()?, words: map.shape.value_size as usize / 8, conversion })
    }

    /// Calls `see` for every entry that exists during the whole walk, and for some of the entries that programs insert
    /// or remove meanwhile. May miss an entry that changes at every attempt to read it.
    pub(crate) fn for_each(&self, see: &mut See<'_>) -> Result<(), DatapathError> {
        for slot in self.memory.values().chunks_exact(self.words) {
            if let Some(Slot { key, flow, .. }) = self.read(slot) {
                see(&key, &flow)?;
            }
        }
        Ok(())
    }

    /// Reads the entry in a slot, between two reads of the control word that must be equal. `None` if there is no
    /// entry, or if programs change the slot during each of several attempts.
    fn read(&self, slot: &[AtomicU64]) -> Option<Slot> {
        // A slot that was never used.
        if slot.iter().all(|word| word.load(Ordering::Relaxed) == 0) {
            return None;
        }
        let mut before = self.copy(slot);
        for _ in 0..READS {
            if !Control(before.control).is_live() {
                return None;
            }
            let (entry, after) = (self.copy(slot), self.copy(slot));
            if after.control == before.control {
                return Some(entry);
            }
            before = after;
        }
        None
    }

    /// Copies a slot. The loads are ordered after all earlier loads by this thread.
    fn copy(&self, slot: &[AtomicU64]) -> Slot {
        fence(Ordering::Acquire);
        let words: Vec<u64> = slot.iter().map(|word| word.load(Ordering::Relaxed)).collect();
        let mut copy = Slot::zeroed();
        self.conversion.apply(cast_slice(&words), bytes_of_mut(&mut copy));
        copy
    }
}
