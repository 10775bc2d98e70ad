//! Empties the CPU's caches before a measurement.

use std::hint::black_box;

/// Size in bytes of the memory that is read: larger than the last-level caches of servers.
const SIZE: usize = 1 << 30;
/// Size in bytes of a cache line.
const LINE: usize = 64;

/// Memory that is larger than the CPU's caches.
pub(crate) struct Caches {
    memory: Vec<u8>,
}

impl Caches {
    pub(crate) fn new() -> Self {
        // Not zero: the kernel maps one page of zeros for all memory that was never written.
        Self { memory: vec![1; SIZE] }
    }

    /// Reads the memory, which evicts what the caches have held.
    pub(crate) fn empty(&self) {
        let sum: u64 = self.memory.iter().step_by(LINE).map(|byte| u64::from(*byte)).sum();
        black_box(sum);
    }
}
