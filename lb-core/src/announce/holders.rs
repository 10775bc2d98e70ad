//! The Services that have load balancers' addresses.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use crate::model::{EndpointSlice, ObjectName, Service, TrafficPolicy};

/// A Service with addresses of load balancers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The load balancers' addresses of the Service.
    pub addresses: Vec<IpAddr>,
    /// Whether any endpoint on any node is ready or serving.
    pub is_served: bool,
    /// The nodes with a ready or serving endpoint, also a terminating one: only they may announce under
    /// `externalTrafficPolicy: Local`. `None` under `Cluster`: all nodes may.
    pub nodes: Option<BTreeSet<Arc<str>>>,
}

/// The Services that have load balancers' addresses, by name; updated Service by Service.
#[derive(Clone, Debug, Default)]
pub struct Holders {
    services: BTreeMap<ObjectName, Holder>,
    changed: bool,
}

impl Holders {
    /// The Services, by name.
    pub const fn services(&self) -> &BTreeMap<ObjectName, Holder> {
        &self.services
    }

    /// Whether [`Self::services`] has changed since the last call.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Sets the state of a Service, or removes a deleted one.
    pub(crate) fn set<'a>(
        &mut self,
        name: &ObjectName,
        service: Option<&Service>,
        slices: impl Iterator<Item = &'a EndpointSlice>,
    ) {
        let external = service.map(|service| &service.external);
        let holder = external.filter(|external| !external.load_balancer_ips.is_empty()).map(|external| {
            let serving: Vec<_> = slices
                .flat_map(|slice| &slice.endpoints)
                .filter(|endpoint| endpoint.ready || endpoint.serving)
                .collect();
            let nodes = || serving.iter().filter_map(|endpoint| endpoint.node.clone()).collect();
            Holder {
                addresses: external.load_balancer_ips.clone(),
                is_served: !serving.is_empty(),
                nodes: (external.policy == TrafficPolicy::Local).then(nodes),
            }
        });
        let known = match &holder {
            Some(holder) => self.services.insert(name.clone(), holder.clone()),
            None => self.services.remove(name),
        };
        self.changed |= known != holder;
    }
}
