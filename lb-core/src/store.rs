//! The latest state of every object from the sources, and the Services that changed.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use crate::{
    convert,
    environment::{self, Environment},
    model::{Change, Endpoint, EndpointSlice, Hints, ObjectName, Scheduling, Service},
};

/// Services and their EndpointSlices, stored slice by slice, so that a changed slice causes no work for the others.
#[derive(Clone, Debug, Default)]
pub struct Store {
    /// Boxed, because the nodes of the tree are half empty.
    services: BTreeMap<ObjectName, Box<Service>>,
    /// Slices by their Service, sorted by their own name. Most Services have one, for which a map would cost a
    /// kilobyte.
    slices: BTreeMap<ObjectName, Vec<(ObjectName, EndpointSlice)>>,
    /// The Service of each slice.
    service_of: HashMap<ObjectName, ObjectName>,
    dirty: BTreeSet<ObjectName>,
    strings: Interner,
}

impl Store {
    /// Stores a change. An object that equals the stored one makes nothing dirty.
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Service(name, service) => self.apply_service(name, service),
            Change::EndpointSlice(name, slice) => self.apply_slice(name, slice),
        }
    }

    /// The Service of that name.
    pub fn service(&self, name: &ObjectName) -> Option<&Service> {
        self.services.get(name).map(AsRef::as_ref)
    }

    /// The EndpointSlices of a Service, sorted by their names.
    pub fn slices(&self, service: &ObjectName) -> impl Iterator<Item = &EndpointSlice> + Clone {
        self.slices.get(service).into_iter().flatten().map(|(_, slice)| slice)
    }

    /// Number of Services with virtual addresses, and number of EndpointSlices.
    pub fn len(&self) -> (usize, usize) {
        (self.services.len(), self.service_of.len())
    }

    /// The environment variables of processes in `namespace`.
    pub fn environment(&self, namespace: &str) -> Environment {
        let master = ObjectName::new(environment::MASTER.0, environment::MASTER.1);
        let first = ObjectName::new(namespace, "");
        let services = self.services.range(first..).take_while(|(name, _)| *name.namespace == *namespace);
        let master = self.services.get_key_value(&master);
        environment::environment(services.chain(master).map(|(name, service)| (name, &**service)), namespace)
    }

    /// Whether some Service is dirty.
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Marks a Service as dirty.
    pub fn mark_dirty(&mut self, service: ObjectName) {
        self.dirty.insert(service);
    }

    /// Marks every Service as dirty.
    pub fn mark_all_dirty(&mut self) {
        self.dirty.extend(self.services.keys().cloned());
    }

    /// Returns the dirty Services, each once, and clears the marks.
    pub fn take_dirty(&mut self) -> BTreeSet<ObjectName> {
        std::mem::take(&mut self.dirty)
    }

    fn apply_service(&mut self, name: ObjectName, service: Option<Service>) {
        let name = self.strings.object_name(name);
        let service = service.map(|service| self.with_last_good_check(&name, service));
        if self.service(&name) == service.as_ref() {
            return;
        }
        match service {
            Some(mut service) => {
                for port in &mut service.ports {
                    port.name = self.strings.intern(&port.name);
                }
                service.ports.shrink_to_fit();
                self.services.insert(name.clone(), Box::new(service));
            }
            None => {
                self.services.remove(&name);
            }
        }
        self.dirty.insert(name);
    }

    /// The Service; if its annotations about health checks are invalid, with the last valid check.
    fn with_last_good_check(&self, name: &ObjectName, mut service: Service) -> Service {
        let is_invalid = |scheduling: &&mut Arc<Scheduling>| {
            scheduling.annotation_errors.iter().any(|error| convert::is_about_health(error.annotation))
        };
        if let Some(scheduling) = service.scheduling.as_mut().filter(is_invalid)
            && let Some(before) = self.service(name)
        {
            let before = before.scheduling.as_deref();
            let scheduling = Arc::make_mut(scheduling);
            scheduling.check = before.and_then(|before| before.check.clone());
            scheduling.fail_closed = before.is_some_and(|before| before.fail_closed);
        }
        service
    }

    fn apply_slice(&mut self, name: ObjectName, slice: Option<EndpointSlice>) {
        let before = self.service_of.get(&name);
        if before == slice.as_ref().map(|slice| &slice.service)
            && before.and_then(|service| self.slice(service, &name)) == slice.as_ref()
        {
            return;
        }
        self.remove_slice(&name);
        if let Some(slice) = slice {
            self.insert_slice(name, slice);
        }
    }

    fn insert_slice(&mut self, name: ObjectName, mut slice: EndpointSlice) {
        let name = self.strings.object_name(name);
        slice.service = self.strings.object_name(slice.service);
        for port in &mut slice.ports {
            port.name = self.strings.intern(&port.name);
        }
        for endpoint in &mut slice.endpoints {
            self.strings.endpoint(endpoint);
        }
        slice.endpoints.shrink_to_fit();
        self.dirty.insert(slice.service.clone());
        self.service_of.insert(name.clone(), slice.service.clone());
        let slices = self.slices.entry(slice.service.clone()).or_default();
        let place = slices.partition_point(|(known, _)| *known < name);
        slices.reserve_exact(1);
        slices.insert(place, (name, slice));
    }

    fn slice(&self, service: &ObjectName, name: &ObjectName) -> Option<&EndpointSlice> {
        let slices = self.slices.get(service)?;
        let place = slices.binary_search_by(|(known, _)| known.cmp(name)).ok()?;
        Some(&slices[place].1)
    }

    fn remove_slice(&mut self, name: &ObjectName) {
        let Some(service) = self.service_of.remove(name) else { return };
        if let Some(slices) = self.slices.get_mut(&service) {
            slices.retain(|(known, _)| known != name);
            if slices.is_empty() {
                self.slices.remove(&service);
            }
        }
        self.dirty.insert(service);
    }
}

/// Keeps one copy of each string: thousands of endpoints share a few nodes, zones, hints and namespaces.
#[derive(Clone, Debug, Default)]
struct Interner {
    strings: HashSet<Arc<str>>,
    /// The next removal of unused strings starts at this number of strings.
    sweep_at: usize,
    hints: BTreeSet<Arc<Hints>>,
    /// The next removal of unused hints starts at this number of hints.
    sweep_hints_at: usize,
}

impl Interner {
    fn intern(&mut self, text: &Arc<str>) -> Arc<str> {
        if let Some(known) = self.strings.get(text) {
            return known.clone();
        }
        if self.strings.len() >= self.sweep_at {
            self.strings.retain(|text| Arc::strong_count(text) > 1);
            self.sweep_at = 1024.max(2 * self.strings.len());
        }
        self.strings.insert(text.clone());
        text.clone()
    }

    fn object_name(&mut self, name: ObjectName) -> ObjectName {
        ObjectName { namespace: self.intern(&name.namespace), name: self.intern(&name.name) }
    }

    /// Interns node, zone and hints. Pod names are unique, so interning them would only cost memory.
    fn endpoint(&mut self, endpoint: &mut Endpoint) {
        endpoint.node = endpoint.node.as_ref().map(|node| self.intern(node));
        endpoint.zone = endpoint.zone.as_ref().map(|zone| self.intern(zone));
        endpoint.hints = endpoint.hints.take().map(|hints| self.hints(hints));
    }

    fn hints(&mut self, hints: Arc<Hints>) -> Arc<Hints> {
        if let Some(known) = self.hints.get(&hints) {
            return known.clone();
        }
        if self.hints.len() >= self.sweep_hints_at {
            self.hints.retain(|hints| Arc::strong_count(hints) > 1);
            self.sweep_hints_at = 1024.max(2 * self.hints.len());
        }
        self.hints.insert(hints.clone());
        hints
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> ObjectName {
        ObjectName::new("default", text)
    }

    fn slice(service: &str, node: &str) -> EndpointSlice {
        let endpoint = Endpoint {
            address: [10, 0, 0, 1].into(),
            ready: true,
            serving: true,
            terminating: false,
            node: Some(node.into()),
            zone: None,
            pod: None,
            hints: None,
        };
        EndpointSlice { service: name(service), ports: Vec::new(), endpoints: vec![endpoint] }
    }

    fn dirty(store: &mut Store, change: Change) -> Vec<String> {
        store.apply(change);
        store.take_dirty().iter().map(|name| name.name.to_string()).collect()
    }

    #[test]
    fn unchanged_object_is_not_dirty() {
        let mut store = Store::default();
        let change = Change::EndpointSlice(name("web-1"), Some(slice("web", "n1")));
        assert_eq!(dirty(&mut store, change.clone()), ["web"]);
        assert!(dirty(&mut store, change).is_empty());
        let service = Service::default();
        let change = Change::Service(name("web"), Some(service));
        assert_eq!(dirty(&mut store, change.clone()), ["web"]);
        assert!(dirty(&mut store, change).is_empty());
    }

    #[test]
    fn removing_an_unknown_object_is_not_dirty() {
        let mut store = Store::default();
        assert!(dirty(&mut store, Change::Service(name("web"), None)).is_empty());
        assert!(dirty(&mut store, Change::EndpointSlice(name("web-1"), None)).is_empty());
    }

    #[test]
    fn slice_that_moves_makes_both_services_dirty() {
        let mut store = Store::default();
        dirty(&mut store, Change::EndpointSlice(name("s"), Some(slice("a", "n1"))));
        assert_eq!(dirty(&mut store, Change::EndpointSlice(name("s"), Some(slice("b", "n1")))), ["a", "b"]);
        assert_eq!(store.slices(&name("a")).count(), 0);
        assert_eq!(store.slices(&name("b")).count(), 1);
    }

    #[test]
    fn slices_of_a_service_are_in_order_and_change_alone() {
        let mut store = Store::default();
        for name_of_slice in ["s2", "s3", "s1"] {
            dirty(&mut store, Change::EndpointSlice(name(name_of_slice), Some(slice("a", name_of_slice))));
        }
        dirty(&mut store, Change::EndpointSlice(name("s2"), Some(slice("a", "moved"))));
        let nodes = |store: &Store| -> Vec<String> {
            let service = name("a");
            let endpoints = store.slices(&service).flat_map(|slice| &slice.endpoints);
            endpoints.filter_map(|endpoint| endpoint.node.as_deref().map(str::to_owned)).collect()
        };
        assert_eq!(nodes(&store), ["s1", "moved", "s3"]);
        dirty(&mut store, Change::EndpointSlice(name("s1"), None));
        assert_eq!(nodes(&store), ["moved", "s3"]);
        assert_eq!(store.len(), (0, 2));
    }

    #[test]
    fn equal_strings_are_stored_once() {
        let mut store = Store::default();
        dirty(&mut store, Change::EndpointSlice(name("s1"), Some(slice("a", "node"))));
        dirty(&mut store, Change::EndpointSlice(name("s2"), Some(slice("a", "node"))));
        let nodes: Vec<Arc<str>> =
            store.slices(&name("a")).flat_map(|s| &s.endpoints).filter_map(|e| e.node.clone()).collect();
        assert!(Arc::ptr_eq(&nodes[0], &nodes[1]));
    }
}
