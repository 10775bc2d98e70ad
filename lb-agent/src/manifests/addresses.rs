//! Allocates cluster IPs and node ports to the Services of the folder, and addresses from pools to those of type
//! LoadBalancer.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;

use lb_core::{
    allocate::{Allocator, known_allocations},
    api,
    convert::{self, ConvertError, Converted, Origin},
    load_balancer::{
        self, AddressRange, AddressRequest, GIVEN, LoadBalancers, Namespaces, Pool, PoolError, PoolUsage,
    },
    model::{Change, ObjectName, Service},
    plan::Contents,
};

use super::{condition::FieldError, options::ManifestsOptions};

/// Name of the pool that `--load-balancer-pool` defines; a Service may request it by this name.
const POOL_OF_FLAG: &str = "load-balancer-pool";

/// The annotation by which a Service requests addresses.
const LOAD_BALANCER_IPS: &str = "metallb.io/loadBalancerIPs";

/// A Service with its addresses, or the error because of which the Service keeps its last good state.
pub(super) type Assignment = Result<Assigned, FieldError>;

/// A Service after the allocation of its addresses.
#[derive(Debug)]
pub(super) struct Assigned {
    /// The Service with its addresses; `None` for a Service without virtual addresses.
    pub(super) service: Option<Service>,
    /// Whether the Service, if it is of type LoadBalancer, waits for addresses.
    pub(super) waits: Waits,
}

/// Whether and why a Service of type LoadBalancer waits for addresses. By default, it does not wait.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// Why the Service's addresses are not as they should be: it has none or too few, it has an address that it did not
    /// request or should not have, or other members may give it a different one.
    pub(super) warning: Option<FieldError>,
    /// Whether the Service has fewer addresses than families, so that its request is repeated when an address may have
    /// become free.
    pub(super) for_more: bool,
}

/// Allocates cluster IPs, node ports and, to Services of type LoadBalancer, addresses from pools. Records which
/// addresses and node ports each Service has.
#[derive(Debug)]
pub(super) struct Addresses {
    allocator: Allocator,
    load_balancers: LoadBalancers,
    /// Services whose manifest itself has addresses in `status.loadBalancer.ingress`.
    given: BTreeSet<ObjectName>,
    /// The pool that `--load-balancer-pool` defines; `None` without that setting.
    pool_of_flag: Option<Pool>,
    /// The `loadBalancerClass` of the Services that get addresses, from `--load-balancer-class`.
    class: Option<String>,
    /// Whether Services lose addresses that the pools do not give them any more, from `--load-balancer-reassign`.
    reassign: bool,
    /// The networks of cluster IPs and pods, which no pool may overlap.
    reserved: Vec<AddressRange>,
    /// Whether other nodes announce the same addresses (`--announce-member`).
    has_members: bool,
}

impl Addresses {
    pub(super) fn new(options: &ManifestsOptions, contents: &Contents) -> Self {
        let known = known_allocations(contents);
        let mut load_balancers = LoadBalancers::default();
        for (service, addresses) in load_balancer::known_addresses(contents) {
            load_balancers.remember(&service, &addresses);
        }
        let networks = &options.load_balancer_pool;
        let reserved = options.cluster_ip_ranges.iter().chain(&options.pod_networks);
        let allocator = Allocator::new(
            &options.cluster_ip_ranges,
            options.other_cluster_ips,
            options.node_port_range.clone(),
            known,
        );
        let mut addresses = Self {
            allocator,
            load_balancers,
            given: BTreeSet::new(),
            pool_of_flag: (!networks.is_empty()).then(|| Pool::of_networks(POOL_OF_FLAG, networks)),
            class: options.load_balancer_class.clone(),
            reassign: options.load_balancer_reassign,
            reserved: reserved.map(|network: &IpNet| (*network).into()).collect(),
            has_members: options.has_members,
        };
        addresses.set_pools(Vec::new(), Namespaces::default(), false);
        addresses
    }

    /// Replaces the pools of the folder, and the labels of namespaces. `are_all` is whether all pools and namespaces of
    /// the folder are readable. Returns the errors of the pools that cannot be used, each with the index of its pool in
    /// `pools`.
    pub(super) fn set_pools(
        &mut self,
        pools: Vec<Pool>,
        namespaces: Namespaces,
        are_all: bool,
    ) -> Vec<(usize, PoolError)> {
        self.load_balancers.set_reassign(self.reassign, are_all);
        self.load_balancers.set_namespaces(namespaces);
        let of_flag = usize::from(self.pool_of_flag.is_some());
        let all = self.pool_of_flag.iter().cloned().chain(pools).collect();
        let errors = self.load_balancers.set_pools(all, &self.reserved).into_iter();
        errors.filter_map(|(index, error)| Some((index.checked_sub(of_flag)?, error))).collect()
    }

    /// Whether Services lose addresses that the pools do not give them any more. This is only the setting: while some
    /// pool cannot be read, Services lose none.
    pub(super) const fn reassigns(&self) -> bool {
        self.reassign
    }

    /// The pools that can be used, including that of the flag.
    pub(super) fn pools(&self) -> &[Pool] {
        self.load_balancers.pools()
    }

    /// How many addresses of each pool are in use.
    pub(super) fn pool_usage(&self) -> Vec<PoolUsage> {
        self.load_balancers.usage()
    }

    /// A counter that changes whenever a Service that waits for an address may get one.
    pub(super) fn changes(&self) -> u64 {
        self.load_balancers.changes()
    }

    /// Releases all addresses and ports of Services for which `exists` is false.
    pub(super) fn retain(&mut self, exists: impl Fn(&ObjectName) -> bool) {
        self.allocator.retain(&exists);
        self.load_balancers.retain(exists);
    }

    /// Releases all addresses and ports of a deleted Service.
    pub(super) fn release(&mut self, service: &ObjectName) {
        self.allocator.release(service);
        self.load_balancers.release(service);
        self.given.remove(service);
    }

    /// Allocates addresses and ports to Services. A rejected Service keeps its old addresses and ports.
    pub(super) fn assign(&mut self, requests: &[&api::Service]) -> Vec<Assignment> {
        let mut services: Vec<api::Service> = requests.iter().map(|service| (*service).clone()).collect();
        let mut errors = self.allocator.assign_all(&mut services);
        self.assign_swapped(&mut services, &mut errors);
        let mut waits = self.assign_load_balancers(&mut services, &errors);
        let outcome = |(index, service): (usize, &api::Service)| match errors.remove(&index) {
            Some(error) => Err(field_error(error)),
            None => {
                Ok(Assigned { service: convert(service)?, waits: waits.remove(&index).unwrap_or_default() })
            }
        };
        services.iter().enumerate().map(outcome).collect()
    }

    /// Requests addresses from pools for the Services without an error. For each Service whose manifest has no
    /// addresses in `status.loadBalancer.ingress`, writes the addresses from pools there. Returns, by the index of the
    /// Service, whether and why it waits for addresses.
    fn assign_load_balancers(
        &mut self,
        services: &mut [api::Service],
        errors: &BTreeMap<usize, ConvertError>,
    ) -> BTreeMap<usize, Waits> {
        let mut waits = BTreeMap::new();
        let mut requests = Vec::new();
        let mut indexes = Vec::new();
        for (index, service) in services.iter().enumerate().filter(|(index, _)| !errors.contains_key(index)) {
            match self.request(service) {
                Ok(Some(request)) => {
                    requests.push(request);
                    indexes.push(index);
                }
                Ok(None) => {}
                Err(error) => {
                    waits.insert(index, Waits { warning: Some(field_error(error)), for_more: false });
                }
            }
        }
        let has_pools = !self.load_balancers.pools().is_empty();
        let none = vec![None; requests.len()];
        let refused = if has_pools { self.load_balancers.assign_all(&requests) } else { none };
        for ((index, request), error) in indexes.into_iter().zip(&requests).zip(refused) {
            let has = self.load_balancers.addresses(&request.service);
            let trouble = self.load_balancers.trouble(request, error.as_ref());
            let warning = trouble.map(|why| FieldError::new("status.loadBalancer", why));
            let warning = warning.or_else(|| self.unnamed(request, has));
            let for_more = has_pools && has.len() < request.families.len();
            waits.insert(index, Waits { warning, for_more });
        }
        for service in services.iter_mut().filter(|service| given_by_manifest(service).is_empty()) {
            if let Ok(name) = convert::object_name("Service", &service.metadata) {
                set_ingress(service, self.load_balancers.addresses(&name));
            }
        }
        waits
    }

    /// A warning for a Service that has an address but requests none by name, if other members exist. Each member
    /// allocates addresses by itself, so another member may give the Service a different one.
    fn unnamed(&self, request: &AddressRequest, has: &[IpAddr]) -> Option<FieldError> {
        let first = has.first().filter(|_| self.has_members && request.addresses.is_empty())?;
        let why = format!(
            "no address is named, so the other members may give the Service another one than {first}: name its \
             addresses with the annotation {LOAD_BALANCER_IPS}"
        );
        Some(FieldError::new("status.loadBalancer", why))
    }

    /// The request of a Service to the pools. `None` if the manifest contains addresses; this function then records
    /// them. Also `None` if the Service gets no addresses from pools; this function then releases the addresses that
    /// the Service had.
    fn request(&mut self, service: &api::Service) -> Result<Option<AddressRequest>, ConvertError> {
        let name = convert::object_name("Service", &service.metadata)?;
        let given = given_by_manifest(service);
        if !given.is_empty() {
            self.load_balancers.remember(&name, &given);
            self.given.insert(name);
            return Ok(None);
        }
        if self.given.remove(&name) {
            self.load_balancers.release(&name);
        }
        let request = AddressRequest::of(service, self.class.as_deref())?;
        if request.is_none() {
            self.load_balancers.release(&name);
        }
        Ok(request)
    }

    /// Tries again to allocate addresses and ports to the rejected Services that hold some. All these Services first
    /// release what they hold, so that they can exchange addresses. Repeats the attempt without the Services that the
    /// allocator still rejects, until it accepts all that are left, or fewer than two are left.
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

/// The addresses that the manifest of a Service itself has in `status.loadBalancer.ingress`.
fn given_by_manifest(service: &api::Service) -> Vec<IpAddr> {
    let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let ingress = status.and_then(|status| status.ingress.as_deref()).unwrap_or_default();
    ingress.iter().filter_map(|ingress| ingress.ip.as_deref()?.parse().ok()).collect()
}

/// Sets the addresses in `status.loadBalancer.ingress`, after the host names that the manifest may have there, and
/// marks them as given by the agent.
fn set_ingress(service: &mut api::Service, addresses: &[IpAddr]) {
    if addresses.is_empty() {
        return;
    }
    let ingress = |ip: &IpAddr| api::LoadBalancerIngress { ip: Some(ip.to_string()), ..Default::default() };
    let status = service.status.get_or_insert_default().load_balancer.get_or_insert_default();
    status.ingress.get_or_insert_default().extend(addresses.iter().map(ingress));
    let given = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    service.metadata.annotations.get_or_insert_default().insert(GIVEN.to_owned(), given);
}

fn convert(service: &api::Service) -> Result<Option<Service>, FieldError> {
    match convert::service(service, Origin::Manifests).and_then(Converted::whole).map_err(field_error)? {
        Change::Service(_, service) => Ok(service),
        Change::EndpointSlice(..) => Ok(None),
    }
}

/// Converts an error of a field. Drops the object's name, because the condition already contains it.
pub(super) fn field_error(error: ConvertError) -> FieldError {
    FieldError::new(error.field, error.why)
}
