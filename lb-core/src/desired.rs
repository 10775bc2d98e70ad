//! What the kernel should hold for one Service: pure, from the Service and its EndpointSlices alone.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    net::IpAddr,
    sync::Arc,
};

use lb_common::{Address, BACKEND_NAME_SIZE, Backend, FrontendKind, Scheduler, ServiceKey, backend_flags};

use crate::{
    model::{Endpoint, EndpointSlice, ObjectName, Service, ServicePort, ServicePortName},
    plan::{EndpointLabels, ServiceLabels},
};

/// What one port of a Service should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its name and node port.
    pub labels: ServiceLabels,
    /// `ClientIP` affinity timeout in seconds; 0 is no affinity.
    pub affinity_seconds: u32,
    /// How a backend is chosen.
    pub scheduler: Scheduler,
    /// Frontends with the backends they share. One for each family of the Service.
    pub groups: Vec<Group>,
}

/// Frontends that share one set of backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// What clients speak to.
    pub frontends: Vec<Frontend>,
    /// Where packets go: sorted, each once, of the frontends' family. Empty where no endpoint is usable.
    pub backends: Vec<Backend>,
    /// What the backends' addresses are called; sorted, each address once, none without any label.
    pub labels: Vec<(IpAddr, EndpointLabels)>,
}

/// One address and port that clients speak to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frontend {
    /// The key in `SERVICES`.
    pub key: ServiceKey,
    /// What kind of address it is.
    pub kind: FrontendKind,
}

/// The ports of a Service, in order of their names.
pub fn desired<'a, S>(name: &ObjectName, service: &Service, slices: S) -> Vec<Port>
where
    S: Iterator<Item = &'a EndpointSlice> + Clone,
{
    let mut ports: Vec<Port> =
        service.ports.iter().map(|port| desired_port(name, service, port, slices.clone())).collect();
    ports.sort_by(|a, b| a.labels.name.cmp(&b.labels.name));
    ports.dedup_by(|later, first| later.labels.name == first.labels.name);
    ports
}

fn desired_port<'a, S>(name: &ObjectName, service: &Service, port: &ServicePort, slices: S) -> Port
where
    S: Iterator<Item = &'a EndpointSlice> + Clone,
{
    let port_name =
        ServicePortName { service: name.clone(), port: port.name.clone(), protocol: port.protocol };
    let group = |family| {
        let frontends = frontends(service, port, family);
        (!frontends.is_empty()).then(|| {
            let (backends, labels) = backends(port, family, slices.clone());
            Group { frontends, backends, labels }
        })
    };
    Port {
        labels: ServiceLabels { name: port_name, node_port: port.node_port },
        affinity_seconds: service.affinity_seconds.unwrap_or(0),
        scheduler: Scheduler::Random,
        groups: [Family::V4, Family::V6].into_iter().filter_map(group).collect(),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    V4,
    V6,
}

impl Family {
    const fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }
}

/// The frontends of one family. Other kinds of frontends join here.
fn frontends(service: &Service, port: &ServicePort, family: Family) -> Vec<Frontend> {
    service
        .cluster_ips
        .iter()
        .filter(|ip| Family::of(**ip) == family)
        .map(|ip| Frontend {
            key: ServiceKey::new(Address::from(*ip), port.port, port.protocol.number()),
            kind: FrontendKind::ClusterIp,
        })
        .collect()
}

/// Every ready endpoint; where there is none, those that still serve while they terminate (KEP-1669).
fn backends<'a>(
    port: &ServicePort,
    family: Family,
    slices: impl Iterator<Item = &'a EndpointSlice>,
) -> (Vec<Backend>, Vec<(IpAddr, EndpointLabels)>) {
    let endpoints = endpoints(port, family, slices);
    let ready = endpoints.values().any(|endpoint| endpoint.ready);
    let usable =
        |endpoint: &Endpoint| if ready { endpoint.ready } else { endpoint.serving && endpoint.terminating };
    let flags = if ready { 0 } else { backend_flags::TERMINATING };
    let chosen = endpoints.iter().filter(|(_, endpoint)| usable(endpoint));
    let mut backends = Vec::new();
    let mut labels: Vec<(IpAddr, EndpointLabels)> = Vec::new();
    for ((address, port), endpoint) in chosen {
        backends.push(Backend { address: *address, port: *port, flags, weight: 1 });
        let label = endpoint_labels(endpoint);
        if label != EndpointLabels::default() {
            labels.push((endpoint.address, label));
        }
    }
    unique_labels(&mut labels);
    (backends, labels)
}

/// One label for each address, whatever the order; the greatest, because that is one that says something.
pub(crate) fn unique_labels(labels: &mut Vec<(IpAddr, EndpointLabels)>) {
    labels.sort_by(|a, b| a.0.cmp(&b.0).then_with(|| b.1.cmp(&a.1)));
    labels.dedup_by_key(|(address, _)| *address);
}

/// The endpoints that have this port, each address and port once. Where several slices speak about one, as they may
/// while an endpoint moves from one slice to another, the one that runs beats the one that terminates.
fn endpoints<'a>(
    port: &ServicePort,
    family: Family,
    slices: impl Iterator<Item = &'a EndpointSlice>,
) -> BTreeMap<(Address, u16), &'a Endpoint> {
    let mut endpoints: BTreeMap<(Address, u16), &Endpoint> = BTreeMap::new();
    for slice in slices {
        let numbers = slice.ports.iter().filter(|p| p.name == port.name && p.protocol == port.protocol);
        for number in numbers.map(|p| p.port) {
            for endpoint in slice.endpoints.iter().filter(|e| Family::of(e.address) == family) {
                match endpoints.entry((Address::from(endpoint.address), number)) {
                    Entry::Vacant(entry) => {
                        entry.insert(endpoint);
                    }
                    Entry::Occupied(mut entry) => {
                        if preference(endpoint) > preference(entry.get()) {
                            entry.insert(endpoint);
                        }
                    }
                }
            }
        }
    }
    endpoints
}

type Preference<'a> = (bool, bool, bool, &'a Option<Arc<str>>, &'a Option<Arc<str>>, &'a Option<Arc<str>>);

/// A total order, so that the order of the slices does not matter.
fn preference(endpoint: &Endpoint) -> Preference<'_> {
    let Endpoint { address: _, ready, serving, terminating, node, zone, pod, hints: _ } = endpoint;
    (!terminating, *ready, *serving, node, zone, pod)
}

fn endpoint_labels(endpoint: &Endpoint) -> EndpointLabels {
    EndpointLabels {
        node: endpoint.node.as_ref().and_then(as_kept),
        zone: endpoint.zone.as_ref().and_then(as_kept),
        pod: endpoint.pod.as_ref().and_then(as_kept),
    }
}

/// The text as the kernel will give it back, so that a long name is not written anew by every start of the agent.
fn as_kept(text: &Arc<str>) -> Option<Arc<str>> {
    if text.is_empty() {
        return None;
    }
    if text.len() < BACKEND_NAME_SIZE {
        return Some(text.clone());
    }
    Some(lb_common::from_fixed(&lb_common::to_fixed::<BACKEND_NAME_SIZE>(text)).into())
}
