//! The agent's share of session affinity: forgetting the clients of services that are gone, and noticing clients that were forgotten
//! too early.
//!
//! `AFFINITY` is an LRU map: where there are more clients than room, the kernel takes the place of the one that has not come
//! for the longest time, and tells nobody. So whoever is gone from one sweep to the next without having been away for the
//! time of its service was pushed out. (Who came and went in between is not seen: the number is a lower bound.)

use std::collections::BTreeMap;

use lb_common::{Affinity, AffinityKey, conntrack::Tick};

use super::{
    bpffs::Folder, conntrack::Conntrack, error::DatapathError, layout, maps::ServiceMaps, table::Table,
};

pub(super) fn open(folder: &Folder) -> Result<Table<AffinityKey, Affinity>, DatapathError> {
    Table::open(&layout::AFFINITY, &folder.map(layout::AFFINITY.name))
}

/// The map `AFFINITY`, and who was in it.
#[derive(Debug)]
pub struct AffinityTable {
    table: Table<AffinityKey, Affinity>,
    maps: ServiceMaps,
    /// The clients of the last sweep.
    known: BTreeMap<AffinityKey, Affinity>,
}

/// What a sweep found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AffinitySweep {
    /// Clients that services remember.
    pub clients: usize,
    /// Clients that were forgotten because their service is gone.
    pub removed: usize,
    /// Clients that were pushed out by others since the last sweep.
    pub evicted: usize,
}

impl AffinityTable {
    pub(super) fn open(folder: &Folder, maps: ServiceMaps) -> Result<Self, DatapathError> {
        Ok(Self { table: open(folder)?, maps, known: BTreeMap::new() })
    }

    /// How many clients there is room for.
    pub fn capacity(&self) -> u32 {
        self.table.capacity()
    }

    /// Forgets the clients of services that are gone, and counts the others.
    pub fn sweep(&mut self) -> Result<AffinitySweep, DatapathError> {
        self.sweep_at(Conntrack::now())
    }

    fn sweep_at(&mut self, now: Tick) -> Result<AffinitySweep, DatapathError> {
        let mut found = BTreeMap::new();
        self.table.for_each(|key, affinity| {
            found.insert(*key, *affinity);
            Ok(())
        })?;
        if found.is_empty() && self.known.is_empty() {
            return Ok(AffinitySweep::default());
        }
        let timeouts = self.timeouts()?;
        let lives = |key: &AffinityKey, affinity: &Affinity| {
            timeouts.get(&key.service).is_some_and(|timeout| affinity.holds(now, *timeout))
        };
        let gone = self.known.iter().filter(|(key, _)| !found.contains_key(key));
        let evicted = gone.filter(|(key, affinity)| lives(key, affinity)).count();
        let mut removed = 0;
        for (key, _) in found.extract_if(.., |key, affinity| !lives(key, affinity)) {
            // One whose service is there may come back at this very moment, and there is no way to remove an entry only if it
            // is as it was. The map takes the place of those first that have been away for longest.
            if !timeouts.contains_key(&key.service) {
                removed += usize::from(self.table.remove(&key)?);
            }
        }
        self.known = found;
        Ok(AffinitySweep { clients: self.known.len(), removed, evicted })
    }

    /// For how many seconds each service port with affinity remembers a client.
    fn timeouts(&self) -> Result<BTreeMap<u32, u32>, DatapathError> {
        let mut timeouts = BTreeMap::new();
        self.maps.services.for_each(|_, service| {
            if service.affinity_seconds > 0 {
                timeouts.insert(service.id, service.affinity_seconds);
            }
            Ok(())
        })?;
        Ok(timeouts)
    }
}
