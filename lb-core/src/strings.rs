//! Keeps one copy of equal strings: thousands of endpoints share a few nodes, zones, hints and namespaces.

use std::{
    collections::{BTreeSet, HashSet},
    sync::Arc,
};

use crate::model::{Change, Endpoint, EndpointSlice, Hints, ObjectName, Service};

/// Strings and topology hints that many objects have in common.
#[derive(Clone, Debug, Default)]
pub struct Strings {
    strings: HashSet<Arc<str>>,
    /// With this number of strings or more, unused ones are removed before another is added.
    sweep_at: usize,
    hints: BTreeSet<Arc<Hints>>,
    /// With this number of hints or more, unused ones are removed before another is added.
    sweep_hints_at: usize,
}

impl Strings {
    /// Replaces strings of a change by equal ones of earlier objects: names of ports, and all strings of endpoints
    /// except names of pods.
    pub fn share(&mut self, change: &mut Change) {
        match change {
            Change::Service(_, service) => service.iter_mut().for_each(|service| self.service(service)),
            Change::EndpointSlice(_, slice) => slice.iter_mut().for_each(|slice| self.slice(slice)),
        }
    }

    /// Replaces the namespace in a name by an equal string of earlier names.
    pub fn share_namespace(&mut self, name: ObjectName) -> ObjectName {
        ObjectName { namespace: self.intern(&name.namespace), name: name.name }
    }

    pub(crate) fn object_name(&mut self, name: ObjectName) -> ObjectName {
        ObjectName { namespace: self.intern(&name.namespace), name: self.intern(&name.name) }
    }

    pub(crate) fn service(&mut self, service: &mut Service) {
        for port in &mut service.ports {
            port.name = self.intern(&port.name);
        }
    }

    /// Shares the strings of a slice's ports and endpoints. The name of its Service stays as it is.
    pub(crate) fn slice(&mut self, slice: &mut EndpointSlice) {
        for port in &mut slice.ports {
            port.name = self.intern(&port.name);
        }
        slice.endpoints.iter_mut().for_each(|endpoint| self.endpoint(endpoint));
    }

    /// Shares the strings of an endpoint, except for the pod's name: no other endpoint has the same pod name, so an
    /// entry in the set would only cost memory.
    fn endpoint(&mut self, endpoint: &mut Endpoint) {
        endpoint.node = endpoint.node.as_ref().map(|node| self.intern(node));
        endpoint.zone = endpoint.zone.as_ref().map(|zone| self.intern(zone));
        endpoint.hints = endpoint.hints.take().map(|hints| self.hints(hints));
    }

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

    #[test]
    fn equal_namespaces_are_stored_once() {
        let mut strings = Strings::default();
        let names = ["a", "b"].map(|name| strings.share_namespace(ObjectName::new("default", name)));
        assert!(Arc::ptr_eq(&names[0].namespace, &names[1].namespace));
        assert_eq!(names, ["a", "b"].map(|name| ObjectName::new("default", name)));
    }
}
