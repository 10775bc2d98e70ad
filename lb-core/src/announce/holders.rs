//! The Services that have load balancers' addresses, and the state that determines which nodes may announce these
//! addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use crate::{
    desired::endpoints::of_service,
    family::{Families, Family},
    model::{Endpoint, EndpointSlice, ObjectName, Service, TrafficPolicy},
};

/// A Service that has load balancers' addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The load balancers' addresses of the Service.
    pub addresses: Vec<IpAddr>,
    /// The elements of `addresses` that an agent gave; other software gave the rest.
    pub given: BTreeSet<IpAddr>,
    /// The families in which the Service has an endpoint, on any node, that may get new flows.
    pub served: Families,
    /// Under `externalTrafficPolicy: Local`, the nodes with an endpoint that may get new flows, for IPv4 and for IPv6:
    /// only these nodes may announce addresses of the family. `None` under `Cluster`, where all nodes may.
    pub nodes: Option<[BTreeSet<Arc<str>>; 2]>,
    /// The addresses at which this node's kernel leads external clients to endpoints. Addresses without endpoints are
    /// missing. Other addresses may be missing if the Service waits for room in a map, or if the kernel has refused an
    /// update of the Service.
    pub here: BTreeSet<IpAddr>,
}

impl Holder {
    /// Whether some node can lead packets for the address to an endpoint.
    pub fn is_served_at(&self, address: IpAddr) -> bool {
        self.served.contains(Family::of(address))
    }

    /// Whether the traffic policy lets the node announce the address.
    pub fn lets_announce(&self, node: &str, address: IpAddr) -> bool {
        let of_family = |nodes: &[BTreeSet<Arc<str>>; 2]| nodes[Family::of(address) as usize].contains(node);
        self.nodes.as_ref().is_none_or(of_family)
    }
}

/// All Services that have load balancers' addresses, by name; updated Service by Service.
#[derive(Clone, Debug, Default)]
pub struct Holders {
    services: BTreeMap<ObjectName, Holder>,
    /// The Services whose [`Holder::here`] may be out of date.
    outdated: BTreeSet<ObjectName>,
    changed: bool,
}

impl Holders {
    /// All Services that have load balancers' addresses, by name.
    pub const fn services(&self) -> &BTreeMap<ObjectName, Holder> {
        &self.services
    }

    /// Whether [`Self::services`] has changed since the last call of this function.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Marks [`Holder::here`] of a Service as out of date.
    pub(crate) fn outdate(&mut self, name: &ObjectName) {
        if self.services.contains_key(name) {
            self.outdated.insert(name.clone());
        }
    }

    /// Returns, and removes from the list, the Services whose [`Holder::here`] the caller must set.
    pub(crate) fn take_outdated(&mut self) -> BTreeSet<ObjectName> {
        std::mem::take(&mut self.outdated)
    }

    /// Sets [`Holder::here`] from the addresses at which the kernel serves the Service.
    pub(crate) fn set_here(&mut self, name: &ObjectName, served: &BTreeSet<IpAddr>) {
        let Some(holder) = self.services.get_mut(name) else { return };
        let here = holder.addresses.iter().copied().filter(|address| served.contains(address)).collect();
        self.changed |= holder.here != here;
        holder.here = here;
    }

    /// Sets the addresses and endpoints of a Service, or removes a Service that has no addresses.
    pub(crate) fn set(&mut self, name: &ObjectName, service: Option<&Service>, slices: &[EndpointSlice]) {
        let with_addresses = service.filter(|service| !service.external.load_balancer_ips.is_empty());
        let holder = with_addresses.map(|service| {
            let external = &service.external;
            let endpoints = of_service(service, slices).flat_map(|(_, endpoints)| endpoints.into_values());
            let usable: Vec<&Endpoint> = endpoints.filter(|endpoint| endpoint.may_get_flows()).collect();
            let family = |endpoint: &Endpoint| Family::of(endpoint.address);
            let nodes = || {
                Family::ALL.map(|wanted| {
                    let of_family = usable.iter().filter(|endpoint| family(endpoint) == wanted);
                    of_family.filter_map(|endpoint| endpoint.node.clone()).collect()
                })
            };
            Holder {
                addresses: external.load_balancer_ips.clone(),
                given: external.given_ips.iter().copied().collect(),
                served: usable.iter().map(|endpoint| family(endpoint)).collect(),
                nodes: (external.policy == TrafficPolicy::Local).then(nodes),
                here: self.services.get(name).map(|known| known.here.clone()).unwrap_or_default(),
            }
        });
        let known = match &holder {
            Some(holder) => self.services.insert(name.clone(), holder.clone()),
            None => self.services.remove(name),
        };
        self.changed |= known != holder;
        self.outdate(name);
    }
}
