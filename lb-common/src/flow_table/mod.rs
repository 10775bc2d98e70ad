//! The flow table: flows by tuple in an array of slots (`FLOWS`) that programs and the agent change at the same time,
//! without locks.
//!
//! Every tuple has eight places: four neighbouring slots at each of two positions that a keyed hash determines. An
//! entry takes the first free place. If no place is free, a program evicts an expired or unproven entry from one of the
//! places; if no entry can be evicted, the new entry goes to the *overflow*, the hash map `CONNTRACK`. The agent evicts
//! nothing to insert an entry.
//!
//! ```text
//! slot     what the array holds                  find     lookup, and reading a flow whole
//! control  the first word of a slot: its state   insert   a flow whose key must be new
//! place    seed, hash and places of a tuple      change   replacing and removing flows
//! header   what all slots share (`FLOW_TABLE`)
//! memory   what these algorithms need of the     shared   the memory of the agent: a mapped array
//!          memory and of the overflow
//! ```
//!
//! The algorithms run on any [`Memory`]: map values in programs, mapped memory in the agent, a simulated machine in the
//! tests. `docs/datapath.md`, "Flow table", says why each step is safe.

mod change;
mod control;
mod find;
mod header;
mod insert;
mod memory;
#[cfg(feature = "next-layout")]
mod next_layout;
mod place;
#[cfg(any(test, feature = "user"))]
mod shared;
mod slot;
#[cfg(test)]
mod tests;

pub use self::{
    change::{Replace, release_abandoned, remove, remove_entry, replace},
    control::Control,
    find::{Copied, Entry, find, read},
    header::Header,
    insert::{Insert, insert_free, insert_into_overflow, insert_new, make_room, win_place},
    memory::{Evict, EvictionClass, Memory, Overflow, OverflowInsert, Snapshot},
    place::{PLACES, Places, Seed},
    slot::Slot,
};
#[cfg(any(test, feature = "user"))]
pub use self::{memory::OnSlots, shared::SharedSlots};
