//! Allocates the ids that identify service ports in the maps.

use std::{collections::BTreeMap, sync::Arc};

use crate::model::{ObjectName, Protocol, ServicePortName};

/// One id for each service port. Ids ascend and start again at 1 only after `u32::MAX`, so that map entries which still
/// carry the id of a deleted service port do not match a new service port. After a restart, the agent continues after
/// the highest id that has a name ([`Self::adopt`]), or that a flow or a socket carries ([`Self::skip`]). Otherwise a
/// new service port could get the id of an old flow: the agent would count that flow for the new port, and end it by
/// the timeouts of that port. Ids in entries of `AFFINITY` and `LIMIT_BUCKETS` do not count. An `AFFINITY` entry with
/// the id of a new service port applies only if its backend is also a backend of that port, and a bucket soon fills
/// again.
#[derive(Clone, Debug)]
pub(crate) struct Ids {
    by_name: BTreeMap<ServicePortName, u32>,
    names: BTreeMap<u32, ServicePortName>,
    next: u32,
}

impl Ids {
    pub(crate) const fn new() -> Self {
        Self { by_name: BTreeMap::new(), names: BTreeMap::new(), next: 1 }
    }

    /// Takes over an id of an earlier run. False if the id is 0 or taken, or if the name has an id already.
    pub(crate) fn adopt(&mut self, id: u32, name: &ServicePortName) -> bool {
        if id == 0 || self.by_name.contains_key(name) || self.names.contains_key(&id) {
            return false;
        }
        self.by_name.insert(name.clone(), id);
        self.names.insert(id, name.clone());
        self.skip(id);
        true
    }

    /// Makes new ids begin after this id of an earlier run, unless they already begin after a higher id.
    pub(crate) fn skip(&mut self, id: u32) {
        self.next = self.next.max(id.checked_add(1).unwrap_or(1));
    }

    pub(crate) fn contains(&self, id: u32) -> bool {
        self.names.contains_key(&id)
    }

    /// The id of a service port. If it has none, allocates one for which `taken` returns false.
    pub(crate) fn get_or_allocate(&mut self, name: &ServicePortName, taken: impl Fn(u32) -> bool) -> u32 {
        if let Some(id) = self.by_name.get(name) {
            return *id;
        }
        let mut id = self.next;
        while id == 0 || self.names.contains_key(&id) || taken(id) {
            id = id.wrapping_add(1);
        }
        self.next = id.wrapping_add(1);
        self.by_name.insert(name.clone(), id);
        self.names.insert(id, name.clone());
        id
    }

    pub(crate) fn free(&mut self, id: u32) {
        if let Some(name) = self.names.remove(&id) {
            self.by_name.remove(&name);
        }
    }

    /// The ports of a Service that have an id, each with its id.
    pub(crate) fn of_service(&self, service: &ObjectName) -> impl Iterator<Item = (&ServicePortName, u32)> {
        let first =
            ServicePortName { service: service.clone(), port: Arc::default(), protocol: Protocol::Tcp };
        self.by_name
            .range(first..)
            .take_while(move |(name, _)| name.service == *service)
            .map(|(name, id)| (name, *id))
    }

    /// The Service that the port with this id belongs to; `None` for an unknown id.
    pub(crate) fn service(&self, id: u32) -> Option<&ObjectName> {
        self.names.get(&id).map(|name| &name.service)
    }

    /// The names of all service ports that have an id.
    pub(crate) fn names(&self) -> impl Iterator<Item = &ServicePortName> {
        self.by_name.keys()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(service: &str, port: &str) -> ServicePortName {
        ServicePortName {
            service: ObjectName::new("ns", service),
            port: port.into(),
            protocol: Protocol::Tcp,
        }
    }

    #[test]
    fn freed_id_is_reused_last() {
        let mut ids = Ids::new();
        let first = ids.get_or_allocate(&port("a", ""), |_| false);
        ids.free(first);
        assert_eq!(first, 1);
        assert_eq!(ids.get_or_allocate(&port("a", ""), |_| false), 2);
    }

    #[test]
    fn ids_wrap_around_and_skip_zero_and_used_ones() {
        let mut ids = Ids::new();
        assert!(ids.adopt(u32::MAX - 1, &port("a", "")));
        assert!(ids.adopt(1, &port("b", "")));
        assert_eq!(ids.get_or_allocate(&port("c", ""), |_| false), u32::MAX);
        assert_eq!(ids.get_or_allocate(&port("d", ""), |id| id == 2), 3);
    }

    #[test]
    fn id_is_adopted_for_one_name_only() {
        let mut ids = Ids::new();
        assert!(!ids.adopt(0, &port("a", "")));
        assert!(ids.adopt(7, &port("a", "")));
        assert!(!ids.adopt(7, &port("b", "")));
        assert!(!ids.adopt(8, &port("a", "")));
    }

    #[test]
    fn ids_belong_to_ports_of_one_service() {
        let mut ids = Ids::new();
        for name in [port("a", "x"), port("b", ""), port("b", "x"), port("c", "")] {
            ids.get_or_allocate(&name, |_| false);
        }
        let found: Vec<u32> = ids.of_service(&ObjectName::new("ns", "b")).map(|(_, id)| id).collect();
        assert_eq!(found, [2, 3]);
    }
}
