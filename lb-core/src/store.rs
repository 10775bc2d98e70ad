//! The latest state of every object from the sources, and which Services have changed.

mod slice;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use self::slice::{Labels, StoredSlice};
use crate::{
    convert,
    environment::{self, Environment},
    model::{Change, EndpointSlice, ObjectName, Service},
    plan::EndpointLabels,
    strings::Strings,
};

/// Services and their EndpointSlices, stored slice by slice, so that a changed slice causes no work for the others.
#[derive(Clone, Debug, Default)]
pub struct Store {
    /// The Services, by name. Boxed, because the tree's nodes are often half empty, and each empty place would take as
    /// much memory as a Service.
    services: BTreeMap<ObjectName, Box<Service>>,
    /// The slices of each Service, sorted by their names. A list, because most Services have one slice, for which a map
    /// would take a kilobyte.
    slices: BTreeMap<ObjectName, Vec<StoredSlice>>,
    /// The Service that each slice belongs to.
    service_of: HashMap<ObjectName, ObjectName>,
    dirty: BTreeSet<ObjectName>,
    strings: Strings,
}

impl Store {
    /// Stores a change. An object that equals the stored one makes no Service dirty. To save memory, a stored endpoint
    /// shares the labels that `known` has for the endpoint's address, if they equal the endpoint's own labels.
    pub fn apply(&mut self, change: Change, known: &Labels) {
        match change {
            Change::Service(name, service) => self.apply_service(name, service),
            Change::EndpointSlice(name, slice) => self.apply_slice(name, slice, known),
        }
    }

    /// The Service with this name.
    pub fn service(&self, name: &ObjectName) -> Option<&Service> {
        self.services.get(name).map(AsRef::as_ref)
    }

    /// All Services, sorted by their names.
    pub fn services(&self) -> impl Iterator<Item = (&ObjectName, &Service)> {
        self.services.iter().map(|(name, service)| (name, &**service))
    }

    /// The cluster IPs of a Service that another proxy serves; none if this node serves it.
    pub(crate) fn foreign_ips(&self, name: &ObjectName) -> impl Iterator<Item = IpAddr> {
        let foreign = self.service(name).filter(|service| service.is_foreign);
        foreign.into_iter().flat_map(|service| service.cluster_ips.iter().copied())
    }

    /// The EndpointSlices of a Service, sorted by their names.
    pub fn slices(&self, service: &ObjectName) -> Vec<EndpointSlice> {
        self.stored_slices(service).iter().map(|slice| slice.read(service)).collect()
    }

    /// Whether there is an EndpointSlice of the Service.
    pub fn has_slices(&self, service: &ObjectName) -> bool {
        !self.stored_slices(service).is_empty()
    }

    /// To save memory, replaces each of the `labels`, which are sorted by address, by the stored labels of the
    /// Service's endpoint at the same address, if both are equal.
    pub(crate) fn share_labels(&self, service: &ObjectName, labels: &mut [(IpAddr, Arc<EndpointLabels>)]) {
        self.stored_slices(service).iter().for_each(|slice| slice.share_labels(labels));
    }

    /// Number of stored Services (all have virtual addresses), and number of EndpointSlices.
    pub fn len(&self) -> (usize, usize) {
        (self.services.len(), self.service_of.len())
    }

    /// The environment variables for processes in `namespace`.
    pub fn environment(&self, namespace: &str) -> Environment {
        let master = ObjectName::new(environment::MASTER.0, environment::MASTER.1);
        let first = ObjectName::new(namespace, "");
        let services = self.services.range(first..).take_while(|(name, _)| *name.namespace == *namespace);
        let master = self.services.get_key_value(&master);
        environment::environment(services.chain(master).map(|(name, service)| (name, &**service)), namespace)
    }

    /// Whether some Service is dirty, that is, must be planned.
    pub fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Marks a Service as dirty, so that the next plan covers it.
    pub fn mark_dirty(&mut self, service: ObjectName) {
        self.dirty.insert(service);
    }

    /// Marks every Service as dirty, so that the next plan covers all.
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
                self.strings.service(&mut service);
                service.ports.shrink_to_fit();
                self.services.insert(name.clone(), Box::new(service));
            }
            None => {
                self.services.remove(&name);
            }
        }
        self.dirty.insert(name);
    }

    /// The Service with its last valid health check, if an annotation that defines the check is now invalid, and
    /// likewise with its last valid `fail_closed`.
    fn with_last_good_check(&self, name: &ObjectName, mut service: Service) -> Service {
        let Some(settings) = &mut service.settings else { return service };
        let Some(before) = self.service(name) else { return service };
        let before = before.settings.as_deref();
        if convert::has_invalid_check(settings) {
            let settings = Arc::make_mut(settings);
            let check = before.and_then(|before| before.check.clone());
            settings.check = check.map(|check| check.with_proxy_header(settings.proxy_protocol));
        }
        if convert::has_invalid_fail_closed(settings) {
            Arc::make_mut(settings).fail_closed = before.is_some_and(|before| before.fail_closed);
        }
        service
    }

    fn apply_slice(&mut self, name: ObjectName, slice: Option<EndpointSlice>, known: &Labels) {
        let before = self.service_of.get(&name);
        if before == slice.as_ref().map(|slice| &slice.service)
            && before.and_then(|service| self.slice(service, &name)) == slice
        {
            return;
        }
        self.remove_slice(&name);
        if let Some(slice) = slice {
            self.insert_slice(name, slice, known);
        }
    }

    fn insert_slice(&mut self, name: ObjectName, mut slice: EndpointSlice, known: &Labels) {
        let name = self.strings.object_name(name);
        slice.service = self.strings.object_name(slice.service);
        self.strings.slice(&mut slice);
        self.dirty.insert(slice.service.clone());
        self.service_of.insert(name.clone(), slice.service.clone());
        let slices = self.slices.entry(slice.service.clone()).or_default();
        let place = slices.partition_point(|known| known.name < name);
        slices.reserve_exact(1);
        slices.insert(place, StoredSlice::new(name, slice, known));
    }

    fn stored_slices(&self, service: &ObjectName) -> &[StoredSlice] {
        self.slices.get(service).map_or(&[], |slices| slices)
    }

    fn slice(&self, service: &ObjectName, name: &ObjectName) -> Option<EndpointSlice> {
        let slices = self.stored_slices(service);
        let place = slices.binary_search_by(|known| known.name.cmp(name)).ok()?;
        Some(slices[place].read(service))
    }

    fn remove_slice(&mut self, name: &ObjectName) {
        let Some(service) = self.service_of.remove(name) else { return };
        if let Some(slices) = self.slices.get_mut(&service) {
            slices.retain(|known| known.name != *name);
            if slices.is_empty() {
                self.slices.remove(&service);
            }
        }
        self.dirty.insert(service);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Endpoint;

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
        store.apply(change, &Labels::new());
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
        assert_eq!(store.slices(&name("a")).len(), 0);
        assert_eq!(store.slices(&name("b")).len(), 1);
    }

    #[test]
    fn slices_of_a_service_are_in_order_and_change_alone() {
        let mut store = Store::default();
        for name_of_slice in ["s2", "s3", "s1"] {
            dirty(&mut store, Change::EndpointSlice(name(name_of_slice), Some(slice("a", name_of_slice))));
        }
        dirty(&mut store, Change::EndpointSlice(name("s2"), Some(slice("a", "moved"))));
        let nodes = |store: &Store| -> Vec<String> {
            let endpoints = store.slices(&name("a")).into_iter().flat_map(|slice| slice.endpoints);
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
        let endpoints = store.slices(&name("a")).into_iter().flat_map(|slice| slice.endpoints);
        let nodes: Vec<Arc<str>> = endpoints.filter_map(|endpoint| endpoint.node).collect();
        assert!(Arc::ptr_eq(&nodes[0], &nodes[1]));
    }
}
