//! An index of the entries of the flow table, for one walk over them.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher as _, RandomState},
};

use lb_common::{
    SocketCounter, SocketCounts,
    conntrack::{Flow, Tick, Tuple},
};

use super::is_counted;

/// A digest of every entry, so that a GC pass finds reverse entries without a lookup of each in the flow table: a
/// lookup in the overflow takes a system call. The index shows only which flows may have expired: the agent reads the
/// entries again before a deletion.
#[derive(Default)]
pub(super) struct EntryIndex {
    hasher: RandomState,
    /// Entries that the walk has found, by the digest of their key.
    pub(super) entries: HashMap<u64, IndexedEntry>,
    /// Number of active flows that the walk has found, by slot of `ACTIVE`.
    pub(super) active_flows: BTreeMap<u32, i64>,
}

pub(super) struct IndexedEntry {
    /// Digest of the key of the entry for the opposite direction.
    reverse_key: u64,
    last_seen: Tick,
    next_seq: u32,
    packets: u32,
    traffic: u64,
    seen: u8,
}

impl EntryIndex {
    pub(super) fn add(&mut self, key: &Tuple, flow: &Flow) {
        let reverse_key = self.hasher.hash_one(flow.to.reversed());
        let Flow { last_seen, next_seq, packets, traffic, seen, .. } = *flow;
        let entry = IndexedEntry { reverse_key, last_seen, next_seq, packets, traffic, seen };
        // A walk may return an entry twice; it must be counted once.
        let known = self.entries.insert(self.hasher.hash_one(key), entry).is_some();
        if is_counted(flow) && !known {
            *self.active_flows.entry(flow.active_flows_slot).or_default() += 1;
        }
    }

    /// Whether the walk has found an entry with this key.
    pub(super) fn has(&self, key: &Tuple) -> bool {
        self.entries.contains_key(&self.hasher.hash_one(key))
    }

    /// Counts the connections of sockets to a backend, which have no entries.
    pub(super) fn add_sockets(&mut self, counter: &SocketCounter, counts: &SocketCounts) {
        let active = i64::try_from(counts.active()).unwrap_or(i64::MAX);
        if counter.active_flows_slot != 0 && active > 0 {
            *self.active_flows.entry(counter.active_flows_slot).or_default() += active;
        }
    }

    /// The reverse entry, if the walk has found it: with the time of its last packet, its counters, and the fields that
    /// decide the flow's phase. The other fields are copied from `flow`.
    pub(super) fn reverse_of(&self, key: &Tuple, flow: &Flow) -> Option<Flow> {
        let entry = self.entries.get(&self.hasher.hash_one(flow.to.reversed()))?;
        let is_reverse = entry.reverse_key == self.hasher.hash_one(key);
        let IndexedEntry { last_seen, next_seq, packets, traffic, seen, .. } = *entry;
        is_reverse.then_some(Flow { last_seen, next_seq, packets, traffic, seen, ..*flow })
    }
}
