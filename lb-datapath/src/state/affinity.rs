//! The agent's share of session affinity: forgetting the clients of services that are gone, and noticing clients that were forgotten
//! too early.
//!
//! `AFFINITY` is an LRU map: where there are more clients than room, the kernel takes the place of the one that has not come
//! for the longest time, and tells nobody. So whoever is gone from one sweep to the next without having been away for the
//! time of its service was pushed out. (Who came and went in between is not seen: the number is a lower bound.)

use std::collections::BTreeMap;

use lb_common::{Affinity, AffinityKey, conntrack::Tick};

use crate::{
    bpf::{bpffs::Folder, layout, table::Table},
    error::DatapathError,
    state::{conntrack::Conntrack, maps::ServiceMaps},
};

pub(crate) fn open(folder: &Folder) -> Result<Table<AffinityKey, Affinity>, DatapathError> {
    Table::open(&layout::AFFINITY, &folder.map(layout::AFFINITY.name))
}

/// The map `AFFINITY`, and who was in it.
#[derive(Debug)]
pub struct AffinityTable {
    table: Table<AffinityKey, Affinity>,
    maps: ServiceMaps,
    census: Census,
}

/// The clients of the last sweep.
#[derive(Debug, Default)]
struct Census {
    known: BTreeMap<AffinityKey, Affinity>,
}

/// What a sweep does to the map. Programs change that at any time, between any two of these steps.
trait Clients {
    fn all(&self) -> Result<BTreeMap<AffinityKey, Affinity>, DatapathError>;
    /// Forgets a client; whether it was there.
    fn forget(&self, key: &AffinityKey) -> Result<bool, DatapathError>;
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
    pub(crate) fn open(folder: &Folder, maps: ServiceMaps) -> Result<Self, DatapathError> {
        Ok(Self { table: open(folder)?, maps, census: Census::default() })
    }

    /// How many clients there is room for.
    pub fn capacity(&self) -> u32 {
        self.table.capacity()
    }

    /// Forgets the clients of services that are gone, and counts the others.
    pub fn sweep(&mut self) -> Result<AffinitySweep, DatapathError> {
        self.census.sweep(&self.table, || timeouts(&self.maps), Conntrack::now())
    }
}

impl Clients for Table<AffinityKey, Affinity> {
    fn all(&self) -> Result<BTreeMap<AffinityKey, Affinity>, DatapathError> {
        let mut all = BTreeMap::new();
        self.for_each(|key, affinity| {
            all.insert(*key, *affinity);
            Ok(())
        })?;
        Ok(all)
    }

    fn forget(&self, key: &AffinityKey) -> Result<bool, DatapathError> {
        self.remove(key)
    }
}

impl Census {
    /// `timeouts` are asked for only where there are clients: there may be many services.
    fn sweep(
        &mut self,
        clients: &impl Clients,
        timeouts: impl FnOnce() -> Result<BTreeMap<u32, u32>, DatapathError>,
        now: Tick,
    ) -> Result<AffinitySweep, DatapathError> {
        let mut found = clients.all()?;
        if found.is_empty() && self.known.is_empty() {
            return Ok(AffinitySweep::default());
        }
        let timeouts = timeouts()?;
        let lives = |key: &AffinityKey, affinity: &Affinity| {
            timeouts.get(&key.service).is_some_and(|timeout| affinity.is_valid(now, *timeout))
        };
        let gone = self.known.iter().filter(|(key, _)| !found.contains_key(key));
        let evicted = gone.filter(|(key, affinity)| lives(key, affinity)).count();
        let mut removed = 0;
        for (key, _) in found.extract_if(.., |key, affinity| !lives(key, affinity)) {
            // One whose service is there may come back at this very moment, and there is no way to remove an entry only if it
            // is as it was. The map takes the place of those first that have been away for longest.
            if !timeouts.contains_key(&key.service) {
                removed += usize::from(clients.forget(&key)?);
            }
        }
        self.known = found;
        Ok(AffinitySweep { clients: self.known.len(), removed, evicted })
    }
}

/// For how many seconds each service port with affinity remembers a client.
fn timeouts(maps: &ServiceMaps) -> Result<BTreeMap<u32, u32>, DatapathError> {
    let mut timeouts = BTreeMap::new();
    maps.services.for_each(|_, service| {
        if service.affinity_seconds > 0 {
            timeouts.insert(service.id, service.affinity_seconds);
        }
        Ok(())
    })?;
    Ok(timeouts)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use lb_common::Address;

    use super::*;

    const NOW: Tick = Tick(100_000);
    /// One service port that remembers clients for ten seconds.
    const SERVICE: u32 = 7;

    fn client(last: u8, service: u32) -> AffinityKey {
        AffinityKey { client: Address::from_v4([192, 0, 2, last]), service }
    }

    fn seen(seconds_ago: u32) -> Affinity {
        let address = Address::from_v4([10, 1, 0, 5]);
        Affinity { address, port: 8080, zeros: 0, last_used: Tick(NOW.0 - Tick::ticks_in(seconds_ago)) }
    }

    /// A map to which clients come back at the worst moment.
    struct Race {
        entries: RefCell<BTreeMap<AffinityKey, Affinity>>,
        /// Who comes when the sweep has looked at all.
        early: Option<AffinityKey>,
        /// Who comes when the sweep has decided to forget just that one.
        late: Option<AffinityKey>,
    }

    impl Clients for Race {
        fn all(&self) -> Result<BTreeMap<AffinityKey, Affinity>, DatapathError> {
            let all = self.entries.borrow().clone();
            self.entries.borrow_mut().extend(self.early.map(|key| (key, seen(0))));
            Ok(all)
        }

        fn forget(&self, key: &AffinityKey) -> Result<bool, DatapathError> {
            let mut entries = self.entries.borrow_mut();
            entries.extend(self.late.filter(|late| late == key).map(|key| (key, seen(0))));
            Ok(entries.remove(key).is_some())
        }
    }

    fn swept(census: &mut Census, clients: &Race) -> AffinitySweep {
        census.sweep(clients, || Ok(BTreeMap::from([(SERVICE, 10)])), NOW).unwrap()
    }

    #[test]
    fn a_client_that_comes_back_while_a_sweep_looks_keeps_its_backend() {
        let (early, late) = (client(1, SERVICE), client(2, SERVICE));
        let entries = RefCell::new(BTreeMap::from([(early, seen(11)), (late, seen(11))]));
        let clients = Race { entries, early: Some(early), late: Some(late) };
        let sweep = swept(&mut Census::default(), &clients);
        let left = clients.entries.borrow();
        assert!(left.contains_key(&early) && left.contains_key(&late), "{left:?}");
        assert_eq!(sweep, AffinitySweep { clients: 0, removed: 0, evicted: 0 });
    }

    #[test]
    fn clients_of_services_that_are_gone_are_forgotten_and_who_is_pushed_out_is_counted() {
        let (gone, pushed_out, old) = (client(1, 8), client(2, SERVICE), client(3, SERVICE));
        let entries = [(gone, seen(1)), (pushed_out, seen(1)), (old, seen(11))];
        let clients = Race { entries: RefCell::new(BTreeMap::from(entries)), early: None, late: None };
        let mut census = Census::default();
        assert_eq!(swept(&mut census, &clients), AffinitySweep { clients: 1, removed: 1, evicted: 0 });
        clients.entries.borrow_mut().retain(|key, _| *key != pushed_out && *key != old);
        assert_eq!(swept(&mut census, &clients), AffinitySweep { clients: 0, removed: 0, evicted: 1 });
    }
}
