use bytemuck::{Pod, Zeroable};

use super::Seed;
use crate::layout::describe;

/// Element of `FLOW_TABLE`, an array of one: what all slots share.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Header {
    /// The secret of the table. The agent sets the secret of a new table before it attaches a program to the table, and
    /// never changes it. A multiplier of 0 shows a new table.
    pub seed: Seed,
    /// At least the number of entries in the overflow. It also counts inserts that are still running, and unfinished
    /// inserts of an agent that was killed.
    pub overflow: u64,
    /// Whether new entries go to the overflow even if the table has a place for them: 1, or 0. The agent leaves it 0;
    /// tests set it.
    pub takes_all: u64,
}

const _: () = assert!(size_of::<Header>() == 64);

describe!(Header { seed.words, seed.multiplier, overflow, takes_all });

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for Header {}
