//! The endpoints of the ports of a Service in each family, merged from its EndpointSlices.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::IpAddr,
    sync::Arc,
};

use lb_common::{Address, Backend, NAME_SIZE, ZONE_SIZE, backend_flags};

use crate::{
    endpoint_key::EndpointKey,
    family::Family,
    model::{Endpoint, EndpointSlice, Hints, Node, Service, ServicePort},
    plan::EndpointLabels,
};

/// Address and port of endpoints that still serve.
pub type Serving = Arc<BTreeSet<EndpointKey>>;

/// The endpoints that have a port, each address and port once, in order.
pub(crate) type Endpoints<'a> = BTreeMap<EndpointKey, &'a Endpoint>;

/// The endpoints of each port of a Service, in each family in which the Service is served.
pub(crate) fn of_service<'a>(
    service: &'a Service,
    slices: &'a [EndpointSlice],
) -> impl Iterator<Item = (&'a ServicePort, Endpoints<'a>)> {
    service.ports.iter().flat_map(move |port| {
        let families = Family::ALL.into_iter().filter(|family| service.has(*family));
        families.map(move |family| (port, of_port(port, family, slices.iter())))
    })
}

/// The endpoints that have this port. If several slices contain one endpoint, as they may while it moves from one slice
/// to another, the entry with the greater [`preference`] counts, for example an entry that is not terminating rather
/// than a terminating entry.
pub(super) fn of_port<'a>(
    port: &ServicePort,
    family: Family,
    slices: impl Iterator<Item = &'a EndpointSlice>,
) -> Endpoints<'a> {
    let mut endpoints = Endpoints::new();
    for slice in slices {
        let numbers = slice.ports.iter().filter(|p| p.serves(port));
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

type Name = Option<Arc<str>>;
type Preference<'a> = (bool, bool, bool, &'a Name, &'a Name, &'a Name, &'a Option<Arc<Hints>>);

/// Orders several entries of one endpoint: the greatest counts. The order is total, so the order of the slices does not
/// matter.
pub(crate) fn preference(endpoint: &Endpoint) -> Preference<'_> {
    let Endpoint { address: _, ready, serving, terminating, node, zone, pod, hints } = endpoint;
    (!terminating, *ready, *serving, node, zone, pod, hints)
}

/// Whether the endpoint is on this node; false if this node's name is unknown.
pub(crate) fn is_local(endpoint: &Endpoint, node: &Node) -> bool {
    let name = &node.policy.node_name;
    !name.is_empty() && endpoint.node.as_ref() == Some(name)
}

/// The endpoints that still serve, including those that are ready only by `publishNotReadyAddresses`.
pub(super) fn serving(endpoints: &Endpoints<'_>) -> Serving {
    let serves = |endpoint: &Endpoint| endpoint.ready || endpoint.serving;
    Arc::new(endpoints.iter().filter(|(_, endpoint)| serves(endpoint)).map(|(key, _)| *key).collect())
}

/// The element of `BACKENDS` for the endpoint, with weight 1 and no counter of active flows, which the caller sets.
pub(super) fn backend((address, port): EndpointKey, endpoint: &Endpoint, node: &Node) -> Backend {
    let mut flags = 0;
    if !endpoint.ready {
        flags |= backend_flags::TERMINATING;
    }
    if is_local(endpoint, node) {
        flags |= backend_flags::LOCAL;
    }
    if node.addresses.is_own(&endpoint.address) {
        flags |= backend_flags::HOST;
    }
    Backend { address, port, flags, weight: 1, active_flows_slot: 0 }
}

/// Whether the endpoint is on another node of the cluster; false if the name of its node or of this node is unknown.
pub(super) fn is_elsewhere(endpoint: &Endpoint, node: &Node) -> bool {
    endpoint.node.is_some() && !node.policy.node_name.is_empty() && !is_local(endpoint, node)
}

/// The labels of the endpoint. Commands show them, and the agent reads them from the maps after a restart.
pub(super) fn labels(endpoint: &Endpoint) -> EndpointLabels {
    EndpointLabels {
        node: endpoint.node.as_ref().and_then(as_kept::<NAME_SIZE>),
        zone: endpoint.zone.as_ref().and_then(as_kept::<ZONE_SIZE>),
        pod: endpoint.pod.as_ref().and_then(as_kept::<NAME_SIZE>),
    }
}

/// The text as the map stores it: cut to `N` bytes; `None` if it is empty. Without the cut, a restarted agent would
/// write long names again, because they would differ from those in the map.
fn as_kept<const N: usize>(text: &Arc<str>) -> Option<Arc<str>> {
    if text.is_empty() {
        return None;
    }
    if text.len() <= N {
        return Some(text.clone());
    }
    Some(lb_common::from_fixed(&lb_common::to_fixed::<N>(text)).into())
}

/// Keeps one entry for each address: the greatest, so that the order of events does not matter, and a set label is kept
/// rather than an unset one.
pub(crate) fn unique_labels(labels: &mut Vec<(IpAddr, Arc<EndpointLabels>)>) {
    labels.sort_by(|a, b| a.0.cmp(&b.0).then_with(|| b.1.cmp(&a.1)));
    labels.dedup_by_key(|(address, _)| *address);
}
