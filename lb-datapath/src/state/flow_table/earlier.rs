use std::sync::atomic::{AtomicU64, Ordering, fence};

use bytemuck::{Zeroable as _, bytes_of_mut, cast_slice};
use lb_common::{
    conntrack::{Flow, Tuple},
    flow_table::{Control, Slot},
};
use lb_core::layout::Conversion;

use super::READS;
use crate::{
    bpf::{mapped::Mapped, raw_map::RawMap},
    error::DatapathError,
};

/// A function that is called with each entry.
type See<'a> = dyn FnMut(&Tuple, &Flow) -> Result<(), DatapathError> + 'a;

/// The slots of the flow table of another layout, which the programs of that layout change.
pub(crate) struct EarlierSlots {
    memory: Mapped<AtomicU64>,
    /// Words of 64 bits in a slot.
    words: usize,
    conversion: Conversion,
}

impl EarlierSlots {
    /// `conversion` converts values of this map to our layout.
    pub(crate) fn new(map: &RawMap, conversion: Conversion) -> Result<Self, DatapathError> {
        Ok(Self { memory: map.mapped()?, words: map.shape.value_size as usize / 8, conversion })
    }

    /// Calls `see` for every entry that no program replaces during the walk, and for some of the others.
    pub(crate) fn for_each(&self, see: &mut See<'_>) -> Result<(), DatapathError> {
        for slot in self.memory.values().chunks_exact(self.words) {
            if let Some(Slot { key, flow, .. }) = self.read(slot) {
                see(&key, &flow)?;
            }
        }
        Ok(())
    }

    /// The entry in a slot, read between two equal control words; `None` if there is none, or if programs change the
    /// slot during each of several reads.
    fn read(&self, slot: &[AtomicU64]) -> Option<Slot> {
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

    /// Copies a slot, after all earlier loads.
    fn copy(&self, slot: &[AtomicU64]) -> Slot {
        fence(Ordering::Acquire);
        let words: Vec<u64> = slot.iter().map(|word| word.load(Ordering::Relaxed)).collect();
        let mut copy = Slot::zeroed();
        self.conversion.apply(cast_slice(&words), bytes_of_mut(&mut copy));
        copy
    }
}
