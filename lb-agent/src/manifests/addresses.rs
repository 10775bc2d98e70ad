//! Cluster IPs and node ports for the Services of the folder.

use std::collections::BTreeMap;

use lb_core::{
    allocate::{Allocator, known_allocations},
    api,
    convert::{self, ConvertError, Converted},
    model::{Change, ObjectName, Service},
    plan::Contents,
};

use super::{condition::FieldError, options::ManifestsOptions};

/// The result of a request: the Service with its addresses (`None` for one without virtual addresses), or the error.
pub(super) type Outcome = Result<Option<Service>, FieldError>;

#[derive(Debug)]
pub(super) struct Addresses {
    allocator: Allocator,
}

impl Addresses {
    pub(super) fn new(options: &ManifestsOptions, contents: &Contents) -> Self {
        let known = known_allocations(contents);
        Self { allocator: Allocator::new(&options.cluster_ip_ranges, options.node_port_range.clone(), known) }
    }

    /// Releases all addresses and ports of Services that do not exist.
    pub(super) fn retain(&mut self, exists: impl Fn(&ObjectName) -> bool) {
        self.allocator.retain(exists);
    }

    /// Releases all addresses and ports of a deleted Service.
    pub(super) fn release(&mut self, service: &ObjectName) {
        self.allocator.release(service);
    }

    /// Allocates addresses to Services; their order does not matter. A rejected Service keeps its old addresses.
    pub(super) fn assign(&mut self, requests: &[&api::Service]) -> Vec<Outcome> {
        let mut services: Vec<api::Service> = requests.iter().map(|service| (*service).clone()).collect();
        let mut errors = self.allocator.assign_all(&mut services);
        self.assign_swapped(&mut services, &mut errors);
        let outcome = |(index, service): (usize, &api::Service)| match errors.remove(&index) {
            Some(error) => Err(field_error(error)),
            None => convert(service),
        };
        services.iter().enumerate().map(outcome).collect()
    }

    /// Allocates addresses to Services that exchange theirs: all of them first release their addresses.
    fn assign_swapped(&mut self, services: &mut [api::Service], errors: &mut BTreeMap<usize, ConvertError>) {
        let holds_addresses = |index: &usize| {
            let name = convert::object_name("Service", &services[*index].metadata);
            name.is_ok_and(|name| self.allocator.allocations().contains_key(&name))
        };
        let mut open: Vec<usize> = errors.keys().copied().filter(holds_addresses).collect();
        while open.len() > 1 {
            let mut trial = self.allocator.clone();
            let mut together: Vec<api::Service> = open.iter().map(|index| services[*index].clone()).collect();
            for service in &together {
                if let Ok(name) = convert::object_name("Service", &service.metadata) {
                    trial.release(&name);
                }
            }
            let refused = trial.assign_all(&mut together);
            if refused.is_empty() {
                for (index, service) in open.drain(..).zip(together) {
                    errors.remove(&index);
                    services[index] = service;
                }
                self.allocator = trial;
            }
            let mut location = 0..;
            open.retain(|_| location.next().is_some_and(|location| !refused.contains_key(&location)));
        }
    }
}

fn convert(service: &api::Service) -> Outcome {
    match convert::service(service).and_then(Converted::whole).map_err(field_error)? {
        Change::Service(_, service) => Ok(service),
        Change::EndpointSlice(..) => Ok(None),
    }
}

/// Converts the error of a field. Leaves out the object, which the condition names.
pub(super) fn field_error(error: ConvertError) -> FieldError {
    FieldError::new(error.field, error.why)
}
