//! Rebuilds ordered maps and sets, so that they need less memory.

use std::collections::{BTreeMap, BTreeSet};

/// Rebuilds a map with full B-tree nodes. Insertions in ascending order leave them little more than half full.
pub(crate) fn map<K: Ord, V>(map: &mut BTreeMap<K, V>) {
    *map = std::mem::take(map).into_iter().collect();
}

/// Rebuilds a set with full B-tree nodes.
pub(crate) fn set<K: Ord>(set: &mut BTreeSet<K>) {
    *set = std::mem::take(set).into_iter().collect();
}
