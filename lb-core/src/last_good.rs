//! Keeps endpoints that the agent does not get from the API server now: the last usable endpoints of
//! `default/kubernetes`, and, for Services with a slice that cannot be read, the endpoints that an earlier run of the
//! agent left in the maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use lb_common::{Address, ServiceKey};

use crate::{
    family::Family,
    model::{Endpoint, EndpointPort, EndpointSlice, ObjectName, ServicePortName},
    plan::{Contents, EndpointLabels, slices_of},
};

/// The EndpointSlices of `default/kubernetes` from the last time that it had a usable endpoint, for each family. The
/// agent may reach the API server through this Service: without its endpoints the agent would never receive new ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastGood {
    slices: [Vec<EndpointSlice>; 2],
}

impl LastGood {
    /// Takes the endpoints of `default/kubernetes` from what an earlier run left in the maps. Ignores frontends with
    /// invalid records.
    pub(crate) fn found(contents: &Contents, distrusted: &BTreeSet<ServiceKey>) -> Self {
        let mut found = Self::default();
        for (address, slice) in found_slices(contents, distrusted, Self::concerns) {
            found.slices[Family::of(address) as usize].push(slice);
        }
        found
    }

    /// Whether this is the API server's Service, `default/kubernetes`.
    pub(crate) fn concerns(name: &ObjectName) -> bool {
        (&*name.namespace, &*name.name) == ("default", "kubernetes")
    }

    /// The slices to use: the present ones, but in a family without a usable endpoint the last good ones.
    pub(crate) fn choose<'a>(
        &mut self,
        slices: impl Iterator<Item = &'a EndpointSlice> + Clone,
    ) -> Vec<EndpointSlice> {
        let mut chosen = Vec::new();
        for (family, kept) in Family::ALL.into_iter().zip(&mut self.slices) {
            let of_family = slices.clone().filter_map(|slice| of_family(slice, family));
            let now: Vec<EndpointSlice> = of_family.collect();
            if now.iter().any(is_usable) {
                kept.clone_from(&now);
            }
            chosen.extend(kept.iter().cloned());
        }
        chosen
    }
}

/// For each Service with a slice that the agent has not been able to read since it started: the endpoints that an
/// earlier run left in the maps. Without them, the Service would lose the endpoints of the unread slice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unread(BTreeMap<ObjectName, Vec<(IpAddr, EndpointSlice)>>);

impl Unread {
    /// Takes the endpoints of these Services from what an earlier run left in the maps.
    pub(crate) fn found(
        contents: &Contents,
        distrusted: &BTreeSet<ServiceKey>,
        services: &BTreeSet<ObjectName>,
    ) -> Self {
        let mut found = Self::default();
        for (address, slice) in found_slices(contents, distrusted, |service| services.contains(service)) {
            found.0.entry(slice.service.clone()).or_default().push((address, slice));
        }
        found
    }

    /// Drops the endpoints of all Services that are not in `services`; returns the Services whose endpoints it dropped.
    pub(crate) fn retain(&mut self, services: &BTreeSet<ObjectName>) -> Vec<ObjectName> {
        self.0.extract_if(.., |service, _| !services.contains(service)).map(|(service, _)| service).collect()
    }

    /// The slices of a Service that were read, completed by the endpoints from the maps whose address is in none of
    /// these slices. `None` if all slices of the Service were read, or if the maps had no endpoints of the Service.
    pub(crate) fn complete<'a>(
        &self,
        service: &ObjectName,
        read: impl Iterator<Item = &'a EndpointSlice> + Clone,
    ) -> Option<Vec<EndpointSlice>> {
        let found = self.0.get(service)?;
        let known: BTreeSet<IpAddr> =
            read.clone().flat_map(|slice| &slice.endpoints).map(|endpoint| endpoint.address).collect();
        let missing = found.iter().filter(|(address, _)| !known.contains(address)).map(|(_, slice)| slice);
        Some(read.cloned().chain(missing.cloned()).collect())
    }
}

/// The backends of the `wanted` Services in the maps, each as its address and a slice with only this endpoint. Leaves
/// out frontends with invalid records.
fn found_slices(
    contents: &Contents,
    distrusted: &BTreeSet<ServiceKey>,
    wanted: impl Fn(&ObjectName) -> bool,
) -> Vec<(IpAddr, EndpointSlice)> {
    let mut backends: BTreeSet<(&ServicePortName, Address, u16)> = BTreeSet::new();
    for (_, record) in contents.frontends.iter().filter(|(key, _)| !distrusted.contains(key)) {
        let Some(labels) = contents.service_labels.get(&record.id) else { continue };
        if !wanted(&labels.name.service) {
            continue;
        }
        for range in slices_of(record) {
            let slots = contents.backends.range(range.base..range.base.saturating_add(range.count));
            backends.extend(slots.map(|(_, backend)| (&labels.name, backend.address, backend.port)));
        }
    }
    let slice = |(name, address, port)| {
        let address = IpAddr::from(address);
        (address, slice(name, address, port, contents))
    };
    backends.into_iter().map(slice).collect()
}

/// A slice with only this endpoint.
fn slice(name: &ServicePortName, address: IpAddr, port: u16, contents: &Contents) -> EndpointSlice {
    let labels = contents
        .endpoint_labels
        .get(&address)
        .map(|labels| EndpointLabels::clone(labels))
        .unwrap_or_default();
    let endpoint = Endpoint {
        address,
        ready: true,
        serving: true,
        terminating: false,
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
