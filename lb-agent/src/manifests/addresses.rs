//! Cluster IPs, node ports and load balancers' addresses for the Services of the folder.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;

use lb_core::{
    allocate::{Allocator, known_allocations},
    api,
    convert::{self, ConvertError, Converted},
    load_balancer::{self, AddressRange, LoadBalancers, Namespaces, Pool, PoolError, Request},
    model::{Change, ObjectName, Service},
    plan::Contents,
};

use super::{condition::FieldError, options::ManifestsOptions};

/// The result of a request, or the error for which the Service keeps its last good state.
pub(super) type Outcome = Result<Assigned, FieldError>;

/// A Service with its addresses.
#[derive(Debug)]
pub(super) struct Assigned {
    /// `None` for a Service without virtual addresses.
    pub(super) service: Option<Service>,
    /// Why a load balancer has no address, or one that its pool has no more.
    pub(super) warning: Option<FieldError>,
}

/// Who has which cluster IPs, node ports and load balancers' addresses.
#[derive(Debug)]
pub(super) struct Addresses {
    allocator: Allocator,
    load_balancers: LoadBalancers,
    /// Services whose manifest gives the address of their load balancer.
    given: BTreeSet<ObjectName>,
    /// The pool of `--load-balancer-pool`.
    pool_of_flag: Option<Pool>,
    /// `--load-balancer-class`
    class: Option<String>,
    /// The networks of cluster IPs, which no pool may contain.
    reserved: Vec<AddressRange>,
}

impl Addresses {
    pub(super) fn new(options: &ManifestsOptions, contents: &Contents) -> Self {
        let known = known_allocations(contents);
        let mut load_balancers = LoadBalancers::default();
        for (service, addresses) in load_balancer::known_addresses(contents) {
            load_balancers.remember(&service, &addresses);
        }
        let networks = &options.load_balancer_pool;
        let mut addresses = Self {
            allocator: Allocator::new(&options.cluster_ip_ranges, options.node_port_range.clone(), known),
            load_balancers,
            given: BTreeSet::new(),
            pool_of_flag: (!networks.is_empty()).then(|| Pool::of_networks(POOL_OF_FLAG, networks)),
            class: options.load_balancer_class.clone(),
            reserved: options.cluster_ip_ranges.iter().map(|range: &IpNet| (*range).into()).collect(),
        };
        addresses.set_pools(Vec::new(), Namespaces::default());
        addresses
    }

    /// Replaces the pools of the folder and the labels of namespaces; returns why some pools are not used.
    pub(super) fn set_pools(&mut self, pools: Vec<Pool>, namespaces: Namespaces) -> Vec<PoolError> {
        self.load_balancers.set_namespaces(namespaces);
        let all = self.pool_of_flag.iter().cloned().chain(pools).collect();
        self.load_balancers.set_pools(all, &self.reserved)
    }

    /// Releases all addresses and ports of Services that do not exist.
    pub(super) fn retain(&mut self, exists: impl Fn(&ObjectName) -> bool) {
        self.allocator.retain(&exists);
        self.load_balancers.retain(exists);
    }

    /// Releases all addresses and ports of a deleted Service.
    pub(super) fn release(&mut self, service: &ObjectName) {
        self.allocator.release(service);
        self.load_balancers.release(service);
    }

    /// Allocates addresses to Services; their order does not matter. A rejected Service keeps its old addresses.
    pub(super) fn assign(&mut self, requests: &[&api::Service]) -> Vec<Outcome> {
        let mut services: Vec<api::Service> = requests.iter().map(|service| (*service).clone()).collect();
        let mut errors = self.allocator.assign_all(&mut services);
        self.assign_swapped(&mut services, &mut errors);
        // Releases come first, so that the order of the Services does not matter.
        services.iter().enumerate().filter(|(index, _)| !errors.contains_key(index)).for_each(
            |(_, service)| {
                self.release_unasked(service);
            },
        );
        let outcome = |(index, service): (usize, &mut api::Service)| match errors.remove(&index) {
            Some(error) => Err(field_error(error)),
            None => {
                let warning = self.assign_load_balancer(service);
                Ok(Assigned { service: convert(service)?, warning })
            }
        };
        services.iter_mut().enumerate().map(outcome).collect()
    }

    /// Releases the address of a Service that is no load balancer of this class any more, or whose manifest gave it and
    /// gives none now.
    fn release_unasked(&mut self, service: &api::Service) {
        let Ok(name) = convert::object_name("Service", &service.metadata) else { return };
        if !given_by_manifest(service).is_empty() {
            self.given.insert(name);
        } else if self.given.remove(&name) || Request::of(service, self.class.as_deref()) == Ok(None) {
            self.load_balancers.release(&name);
        }
    }

    /// Writes the address from a pool to `status.loadBalancer.ingress`, unless the manifest has one there. Returns a
    /// warning for a Service that gets none, or whose address is in no pool.
    fn assign_load_balancer(&mut self, service: &mut api::Service) -> Option<FieldError> {
        let given = given_by_manifest(service);
        let request = match Request::of(service, self.class.as_deref()) {
            Ok(Some(request)) => request,
            Ok(None) => return None,
            Err(error) => return Some(field_error(error)),
        };
        if !given.is_empty() {
            self.load_balancers.remember(&request.service, &given);
            return None;
        }
        let has_pools = !self.load_balancers.pools().is_empty();
        let refused = has_pools.then(|| self.load_balancers.assign(&request).err()).flatten();
        let addresses = self.load_balancers.addresses(&request.service);
        let why = match (refused, addresses) {
            (Some(error), []) => Some(format!("no address: {error}")),
            (Some(error), [..]) => Some(format!("{error}; the Service keeps the address that it has")),
            (None, _) => {
                let lost = addresses.iter().find(|ip| self.load_balancers.pool_of(**ip).is_none());
                lost.map(|ip| format!("{ip} is in no pool; the Service keeps it until it is deleted"))
            }
        };
        set_ingress(service, addresses);
        why.map(|why| FieldError::new("status.loadBalancer", why))
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

/// The name of the pool of `--load-balancer-pool`, by which Services may name it.
const POOL_OF_FLAG: &str = "load-balancer-pool";

/// The addresses in `status.loadBalancer.ingress` of the manifest.
fn given_by_manifest(service: &api::Service) -> Vec<IpAddr> {
    let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = status.and_then(|status| status.ingress.as_deref()).unwrap_or_default();
    ingress.iter().filter_map(|ingress| ingress.ip.as_deref()?.parse().ok()).collect()
}

fn set_ingress(service: &mut api::Service, addresses: &[IpAddr]) {
    let ingress = |ip: &IpAddr| api::LoadBalancerIngress { ip: Some(ip.to_string()), ip_mode: None };
    let status = service.status.get_or_insert_default().load_balancer.get_or_insert_default();
    status.ingress = Some(addresses.iter().map(ingress).collect());
}

fn convert(service: &api::Service) -> Result<Option<Service>, FieldError> {
    match convert::service(service).and_then(Converted::whole).map_err(field_error)? {
        Change::Service(_, service) => Ok(service),
        Change::EndpointSlice(..) => Ok(None),
    }
}

/// Converts the error of a field. Leaves out the object, which the condition names.
pub(super) fn field_error(error: ConvertError) -> FieldError {
    FieldError::new(error.field, error.why)
}
