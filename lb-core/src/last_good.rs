//! Keeps the endpoints of the API server when the API server reports none.

use std::{collections::BTreeSet, net::IpAddr};

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
    /// Reads the endpoints from what an earlier run of the agent left in the kernel, except frontends with invalid
    /// records.
    pub(crate) fn found(contents: &Contents, distrusted: &BTreeSet<ServiceKey>) -> Self {
        let mut backends: BTreeSet<(&ServicePortName, Address, u16)> = BTreeSet::new();
        for (_, record) in contents.frontends.iter().filter(|(key, _)| !distrusted.contains(key)) {
            let Some(labels) = contents.service_labels.get(&record.id) else { continue };
            if !Self::concerns(&labels.name.service) {
                continue;
            }
            for range in slices_of(record) {
                let slots = contents.backends.range(range.base..range.base.saturating_add(range.count));
                backends.extend(slots.map(|(_, backend)| (&labels.name, backend.address, backend.port)));
            }
        }
        let mut found = Self::default();
        for (name, address, port) in backends {
            let address = IpAddr::from(address);
            found.slices[Family::of(address) as usize].push(slice(name, address, port, contents));
        }
        found
    }

    /// Whether this is the Service of the API servers.
    pub(crate) fn concerns(name: &ObjectName) -> bool {
        (&*name.namespace, &*name.name) == ("default", "kubernetes")
    }

    /// The slices to use: the current ones, but in a family without a usable endpoint the last good ones.
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

/// A slice with this one endpoint.
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
    let usable = |endpoint: &Endpoint| endpoint.ready || endpoint.serving && endpoint.terminating;
    !slice.ports.is_empty() && slice.endpoints.iter().any(usable)
}
