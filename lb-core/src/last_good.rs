//! Keeps endpoints that the agent does not get from the API server now: the last usable endpoints of
//! `default/kubernetes`, and, for Services with a slice that cannot be read, the endpoints that an earlier run of the
//! agent left in the maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use lb_common::{Address, Backend, ServiceKey, backend_flags};

use crate::{
    environment,
    family::Family,
    model::{Endpoint, EndpointPort, EndpointSlice, ObjectName, Protocol, ServicePort, ServicePortName},
    plan::{Contents, EndpointLabels, slices_of},
};

/// For each IP family, the EndpointSlices of `default/kubernetes` from the last time that this Service had a usable
/// endpoint. The agent may reach the API server through the Service: without the Service's endpoints, the agent would
/// never receive new ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastGood {
    slices: [Vec<EndpointSlice>; 2],
}

impl LastGood {
    /// Takes the endpoints of `default/kubernetes` from what an earlier run left in the maps. Ignores the `distrusted`
    /// frontends.
    pub(crate) fn found(contents: &Contents, distrusted: &BTreeSet<ServiceKey>) -> Self {
        let found = found_slices(contents, distrusted, Self::concerns);
        Self { slices: Family::ALL.map(|family| slices_of_family(&found, family)) }
    }

    /// Whether this is the API server's Service, `default/kubernetes`.
    pub(crate) fn concerns(name: &ObjectName) -> bool {
        (&*name.namespace, &*name.name) == environment::MASTER
    }

    /// The slices to use. In each family, these are `slices` if they have a usable endpoint, otherwise the last slices
    /// that had one.
    pub(crate) fn choose(&mut self, slices: &[EndpointSlice]) -> Vec<EndpointSlice> {
        let mut chosen = Vec::new();
        for (family, kept) in Family::ALL.into_iter().zip(&mut self.slices) {
            let now = slices_of_family(slices, family);
            if now.iter().any(is_usable) {
                kept.clone_from(&now);
            }
            chosen.extend(kept.iter().cloned());
        }
        chosen
    }
}

/// The endpoints that an earlier run left in the maps, for each Service with a slice that the agent has not been able
/// to read since it started. Contains only endpoints that may be in the unread slice, each as a slice with one
/// endpoint. Without these endpoints, the Service would lose the endpoints of the unread slice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unread(BTreeMap<ObjectName, Vec<EndpointSlice>>);

impl Unread {
    /// Takes the endpoints of `services` from what an earlier run left in the maps. Ignores the `distrusted` frontends.
    pub(crate) fn found(
        contents: &Contents,
        distrusted: &BTreeSet<ServiceKey>,
        services: &BTreeSet<ObjectName>,
    ) -> Self {
        let mut found = Self::default();
        for slice in found_slices(contents, distrusted, |service| services.contains(service)) {
            found.0.entry(slice.service.clone()).or_default().push(slice);
        }
        found
    }

    /// Drops the endpoints of all Services that are not in `services`; returns the Services whose endpoints it dropped.
    pub(crate) fn retain(&mut self, services: &BTreeSet<ObjectName>) -> Vec<ObjectName> {
        self.0.extract_if(.., |service, _| !services.contains(service)).map(|(service, _)| service).collect()
    }

    /// `read` has the slices of a Service that the agent could read. Adds the endpoints from the maps that have been
    /// missing from `read` at every call of this function: they may be in the unread slices. An endpoint that was in
    /// `read` at an earlier call, and no longer is, has left the Service.
    ///
    /// Endpoints are the same only if their addresses and ports are equal: one address may serve several ports of the
    /// Service, or (in different slices) one port of the Service at several port numbers. Leaves out endpoints of ports
    /// that the Service no longer has; `ports` are its present ports.
    pub(crate) fn complete(
        &mut self,
        service: &ObjectName,
        ports: &[ServicePort],
        mut read: Vec<EndpointSlice>,
    ) -> Vec<EndpointSlice> {
        let of_port =
            |slice: &&EndpointSlice| slice.ports.iter().any(|of| ports.iter().any(|port| of.serves(port)));
        if let Some(found) = self.0.get_mut(service) {
            let known: BTreeSet<EndpointOfPort<'_>> = read.iter().flat_map(endpoints_of_ports).collect();
            found.retain(|slice| endpoints_of_ports(slice).all(|endpoint| !known.contains(&endpoint)));
            read.extend(found.iter().filter(of_port).cloned());
        }
        read
    }
}

/// An endpoint of one port of a Service: the port's name and protocol, the endpoint's address and port number.
type EndpointOfPort<'a> = (&'a str, Protocol, IpAddr, u16);

fn endpoints_of_ports(slice: &EndpointSlice) -> impl Iterator<Item = EndpointOfPort<'_>> {
    slice.ports.iter().flat_map(|EndpointPort { name, protocol, port }| {
        slice.endpoints.iter().map(move |endpoint| (&**name, *protocol, endpoint.address, *port))
    })
}

/// A backend of a service port in the maps: name of the port, address and port of the backend, and whether it
/// terminates.
type Found<'a> = (&'a ServicePortName, Address, u16, bool);

/// The backends of the `wanted` Services in the maps, each as a slice with one endpoint. Leaves out the `distrusted`
/// frontends.
fn found_slices(
    contents: &Contents,
    distrusted: &BTreeSet<ServiceKey>,
    wanted: impl Fn(&ObjectName) -> bool,
) -> Vec<EndpointSlice> {
    let mut backends: BTreeSet<Found<'_>> = BTreeSet::new();
    for (_, record) in contents.frontends.iter().filter(|(key, _)| !distrusted.contains(key)) {
        let Some(labels) = contents.service_labels.get(&record.id) else { continue };
        if !wanted(&labels.name.service) {
            continue;
        }
        for range in slices_of(record) {
            let slots = contents.backends.range(range.slots());
            let is_terminating = |backend: &Backend| backend.flags & backend_flags::TERMINATING != 0;
            let found =
                |backend: &Backend| (&labels.name, backend.address, backend.port, is_terminating(backend));
            backends.extend(slots.map(|(_, backend)| found(backend)));
        }
    }
    backends.into_iter().map(|found| slice(found, contents)).collect()
}

/// A slice with only this endpoint. A terminating endpoint counts as serving, because the maps contain terminating
/// endpoints only while they serve.
fn slice((name, address, port, terminating): Found<'_>, contents: &Contents) -> EndpointSlice {
    let address = IpAddr::from(address);
    let labels = contents
        .endpoint_labels
        .get(&address)
        .map(|labels| EndpointLabels::clone(labels))
        .unwrap_or_default();
    let endpoint = Endpoint {
        address,
        ready: !terminating,
        serving: true,
        terminating,
        node: labels.node,
        zone: labels.zone,
        pod: labels.pod,
        hints: None,
    };
    EndpointSlice {
        service: name.service.clone(),
        ports: vec![EndpointPort { name: name.port.clone(), protocol: name.protocol, port }],
        endpoints: vec![endpoint],
    }
}

fn slices_of_family(slices: &[EndpointSlice], family: Family) -> Vec<EndpointSlice> {
    slices.iter().filter_map(|slice| of_family(slice, family)).collect()
}

fn of_family(slice: &EndpointSlice, family: Family) -> Option<EndpointSlice> {
    let endpoints = slice.endpoints.iter().filter(|endpoint| Family::of(endpoint.address) == family);
    let slice = EndpointSlice {
        service: slice.service.clone(),
        ports: slice.ports.clone(),
        endpoints: endpoints.cloned().collect(),
    };
    (!slice.endpoints.is_empty()).then_some(slice)
}

fn is_usable(slice: &EndpointSlice) -> bool {
    !slice.ports.is_empty() && slice.endpoints.iter().any(Endpoint::may_get_flows)
}
