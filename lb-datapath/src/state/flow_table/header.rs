use std::{
    hash::{BuildHasher as _, RandomState},
    mem::offset_of,
    sync::atomic::{AtomicU64, Ordering},
};

use bytemuck::must_cast;
use lb_common::flow_table::{Header, Seed};

use crate::bpf::mapped::Mapped;

const SEED_WORDS: usize = size_of::<Seed>() / 8;
/// Indices of fields in the map's value, in words of 64 bits.
const MULTIPLIER: usize = offset_of!(Seed, multiplier) / 8;
const OVERFLOW: usize = offset_of!(Header, overflow) / 8;
const TAKES_ALL: usize = offset_of!(Header, takes_all) / 8;

const _: () = assert!(offset_of!(Header, seed) == 0);

/// The map `FLOW_TABLE`, mapped into memory: the table's seed, the number of entries in its overflow, and a switch by
/// which tests send all new entries to the overflow.
#[derive(Debug)]
pub(super) struct SharedHeader(Mapped<AtomicU64>);

impl SharedHeader {
    pub(super) const fn new(memory: Mapped<AtomicU64>) -> Self {
        Self(memory)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        &self.0.values()[index]
    }

    /// Whether the table has no seed yet.
    pub(super) fn is_new(&self) -> bool {
        self.word(MULTIPLIER).load(Ordering::SeqCst) == 0
    }

    /// Gives a new table a random seed, and records how many entries its overflow has already.
    pub(super) fn begin(&self, overflow: u64) {
        self.word(OVERFLOW).store(overflow, Ordering::SeqCst);
        let random = RandomState::new();
        for index in 0..SEED_WORDS {
            // A multiplier of 0 marks a new table, so the multiplier is made odd. The other words may have any value.
            self.word(index).store(random.hash_one(index) | u64::from(index == MULTIPLIER), Ordering::SeqCst);
        }
    }

    pub(super) fn seed(&self) -> Seed {
        let words: [u64; SEED_WORDS] = core::array::from_fn(|index| self.word(index).load(Ordering::Relaxed));
        must_cast(words)
    }

    /// Number of entries in the overflow, plus number of inserts into it that are in progress, or that an agent did not
    /// finish because it was killed.
    pub(super) fn overflow(&self) -> u64 {
        self.word(OVERFLOW).load(Ordering::SeqCst)
    }

    pub(super) fn add_to_overflow(&self, difference: i64) {
        self.word(OVERFLOW).fetch_add(difference.cast_unsigned(), Ordering::SeqCst);
    }

    pub(super) fn takes_all(&self) -> bool {
        self.word(TAKES_ALL).load(Ordering::SeqCst) != 0
    }
}
