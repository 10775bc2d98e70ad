//! The agent's part of session affinity: deleting the clients of Service ports that were deleted or no longer have
//! affinity, and counting evicted clients.
//!
//! `AFFINITY` is an LRU map: when it is full, the kernel evicts clients that have long been idle, and reports nothing.
//! So a client was evicted if it was in the map in the previous GC pass, is missing in this pass, and has not reached
//! the timeout of its Service. A client that is added and evicted between two passes is not counted: the number is a
//! lower bound.

use std::collections::BTreeMap;

use lb_common::{Affinity, ServiceClient, conntrack::Tick};

use crate::{
    bpf::{bpffs::Folder, layout, table::Table},
    error::DatapathError,
    state::{conntrack::Conntrack, maps::ServiceMaps},
};

/// Opens the map `AFFINITY`.
pub(crate) fn open(folder: &Folder) -> Result<Table<ServiceClient, Affinity>, DatapathError> {
    Table::open(&layout::AFFINITY, &folder.map(layout::AFFINITY.name))
}

/// The map `AFFINITY`, and the clients that the last GC pass found. Only one instance may be used at a time.
#[derive(Debug)]
pub struct AffinityTable {
    table: Table<ServiceClient, Affinity>,
    maps: ServiceMaps,
    census: Census,
}

/// The unexpired clients that the last GC pass found. If one of these clients is missing in the next pass and has not
/// reached its timeout, that pass counts the client as evicted.
#[derive(Debug, Default)]
struct Census {
    known: BTreeMap<ServiceClient, Affinity>,
}

/// How a GC pass accesses the map. Programs change the map at any time, between any two of these calls.
trait Clients {
    fn all(&self) -> Result<BTreeMap<ServiceClient, Affinity>, DatapathError>;
    /// Deletes the entry of a client. Returns whether it existed.
    fn delete(&self, key: &ServiceClient) -> Result<bool, DatapathError>;
}

/// The result of a GC pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AffinityReport {
    /// Number of clients that are pinned to a backend after the pass.
    pub clients: usize,
    /// Number of clients that were deleted, because their Service port was deleted or no longer has affinity.
    pub removed: usize,
    /// Number of clients that were evicted since the last pass, to make room for others; a lower bound.
    pub evicted: usize,
}

impl AffinityTable {
    /// Opens the map `AFFINITY`.
    pub(crate) fn open(folder: &Folder, maps: ServiceMaps) -> Result<Self, DatapathError> {
        Ok(Self { table: open(folder)?, maps, census: Census::default() })
    }

    /// Maximum number of clients in the map.
    pub fn capacity(&self) -> u32 {
        self.table.capacity()
    }

    /// Deletes the clients of Service ports that were deleted or no longer have affinity. Counts the clients that are
    /// still pinned to a backend (expired ones stay in the map), and those that were evicted since the last pass.
    pub fn collect_garbage(&mut self) -> Result<AffinityReport, DatapathError> {
        self.census.collect_garbage(&self.table, || timeouts(&self.maps), Conntrack::now())
    }
}

impl Clients for Table<ServiceClient, Affinity> {
    fn all(&self) -> Result<BTreeMap<ServiceClient, Affinity>, DatapathError> {
        self.entries()
    }

    fn delete(&self, key: &ServiceClient) -> Result<bool, DatapathError> {
        self.remove(key)
    }
}

impl Census {
    /// Deletes the clients of Service ports that are not in `timeouts`. Calls `timeouts` only if there are clients,
    /// because there may be many Services.
    fn collect_garbage(
        &mut self,
        clients: &impl Clients,
        timeouts: impl FnOnce() -> Result<BTreeMap<u32, u32>, DatapathError>,
        now: Tick,
    ) -> Result<AffinityReport, DatapathError> {
        let mut found = clients.all()?;
        if found.is_empty() && self.known.is_empty() {
            return Ok(AffinityReport::default());
        }
        let timeouts = timeouts()?;
        let lives = |key: &ServiceClient, affinity: &Affinity| {
            timeouts.get(&key.service).is_some_and(|timeout| affinity.is_valid(now, *timeout))
        };
        let gone = self.known.iter().filter(|(key, _)| !found.contains_key(key));
        let evicted = gone.filter(|(key, affinity)| lives(key, affinity)).count();
        let mut removed = 0;
        for (key, _) in found.extract_if(.., |key, affinity| !lives(key, affinity)) {
            // An expired client whose Service still has affinity is kept: it may connect again at this moment, and the
            // kernel has no command that deletes an entry only if it is unchanged. When the map is full, the kernel
            // evicts clients that have long been idle.
            if !timeouts.contains_key(&key.service) {
                removed += usize::from(clients.delete(&key)?);
            }
        }
        self.known = found;
        Ok(AffinityReport { clients: self.known.len(), removed, evicted })
    }
}

/// The affinity timeout in seconds of each Service port that has one, by the port's id.
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
    /// Id of a Service port with an affinity timeout of ten seconds.
    const SERVICE: u32 = 7;

    fn client(last: u8, service: u32) -> ServiceClient {
        ServiceClient { client: Address::from_v4([192, 0, 2, last]), service }
    }

    fn seen(seconds_ago: u32) -> Affinity {
        let address = Address::from_v4([10, 1, 0, 5]);
        Affinity { address, port: 8080, zeros: 0, last_used: Tick(NOW.0 - Tick::ticks_in(seconds_ago)) }
    }

    /// A map in which clients connect again between two steps of a GC pass.
    struct Race {
        entries: RefCell<BTreeMap<ServiceClient, Affinity>>,
        /// A client that connects again after the pass has read all clients.
        early: Option<ServiceClient>,
        /// A client that connects again after the pass has decided to delete it.
        late: Option<ServiceClient>,
    }

    impl Clients for Race {
        fn all(&self) -> Result<BTreeMap<ServiceClient, Affinity>, DatapathError> {
            let all = self.entries.borrow().clone();
            self.entries.borrow_mut().extend(self.early.map(|key| (key, seen(0))));
            Ok(all)
        }

        fn delete(&self, key: &ServiceClient) -> Result<bool, DatapathError> {
            let mut entries = self.entries.borrow_mut();
            entries.extend(self.late.filter(|late| late == key).map(|key| (key, seen(0))));
            Ok(entries.remove(key).is_some())
        }
    }

    fn collected(census: &mut Census, clients: &Race) -> AffinityReport {
        census.collect_garbage(clients, || Ok(BTreeMap::from([(SERVICE, 10)])), NOW).unwrap()
    }

    #[test]
    fn client_that_returns_during_gc_keeps_its_backend() {
        let (early, late) = (client(1, SERVICE), client(2, SERVICE));
        let entries = RefCell::new(BTreeMap::from([(early, seen(11)), (late, seen(11))]));
        let clients = Race { entries, early: Some(early), late: Some(late) };
        let report = collected(&mut Census::default(), &clients);
        let left = clients.entries.borrow();
        assert!(left.contains_key(&early) && left.contains_key(&late), "{left:?}");
        assert_eq!(report, AffinityReport { clients: 0, removed: 0, evicted: 0 });
    }

    #[test]
    fn clients_of_deleted_services_are_deleted_and_evicted_clients_are_counted() {
        let (gone, evicted, old) = (client(1, 8), client(2, SERVICE), client(3, SERVICE));
        let entries = [(gone, seen(1)), (evicted, seen(1)), (old, seen(11))];
        let clients = Race { entries: RefCell::new(BTreeMap::from(entries)), early: None, late: None };
        let mut census = Census::default();
        assert_eq!(collected(&mut census, &clients), AffinityReport { clients: 1, removed: 1, evicted: 0 });
        clients.entries.borrow_mut().retain(|key, _| *key != evicted && *key != old);
        assert_eq!(collected(&mut census, &clients), AffinityReport { clients: 0, removed: 0, evicted: 1 });
    }
}
