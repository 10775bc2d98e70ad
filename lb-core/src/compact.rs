//! Rebuilds ordered maps and sets, so that they need less memory.

use std::collections::{BTreeMap, BTreeSet};

/// Rebuilds a map with full B-tree nodes. Insertions in ascending order leave the nodes little more than half full.
///
/// `append` moves the entries from the old nodes to new ones one by one, and frees each old node on the way. A new map
/// from an iterator would first copy all entries to a list.
pub fn map<K: Ord, V>(map: &mut BTreeMap<K, V>) {
    if let Some(last) = map.pop_last() {
        map.append(&mut BTreeMap::from([last]));
    }
}

/// Rebuilds a set with full B-tree nodes, which saves memory, like [`map`].
pub fn set<K: Ord>(set: &mut BTreeSet<K>) {
    if let Some(last) = set.pop_last() {
        set.append(&mut BTreeSet::from([last]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compaction_keeps_every_entry() {
        for count in [0, 1, 2, 1000] {
            let entries: BTreeMap<u32, u32> = (0..count).map(|n| (n, n + 1)).collect();
            let keys: BTreeSet<u32> = entries.keys().copied().collect();
            let (mut rebuilt, mut rebuilt_keys) = (entries.clone(), keys.clone());
            map(&mut rebuilt);
            set(&mut rebuilt_keys);
            assert_eq!((rebuilt, rebuilt_keys), (entries, keys));
        }
    }
}
