//! Health checks of endpoints: what to probe, and which endpoints get new flows.

use std::{collections::BTreeSet, sync::Arc};

use super::endpoints::{Endpoints, of_service};
use crate::{
    endpoint_key::EndpointKey,
    model::{EndpointSlice, Node, Protocol, Service},
    probe::{check::Check, target::Target},
};

/// The targets to probe for a Service: its endpoints that may get flows; none for a Service without a check.
pub(crate) fn targets(service: Option<&Service>, slices: &[EndpointSlice]) -> BTreeSet<Target> {
    let mut targets = BTreeSet::new();
    let Some((service, check)) = service.and_then(|service| Some((service, service.check()?))) else {
        return targets;
    };
    for (port, endpoints) in of_service(service, slices) {
        let may_serve = endpoints.iter().filter(|(_, it)| it.may_get_flows());
        targets.extend(may_serve.filter_map(|(key, _)| Target::of(check, port.protocol, *key)));
    }
    targets
}

/// The endpoints that may get flows because they are ready, and healthy as far as this node knows.
pub(crate) fn usable(service: &Service, slices: &[EndpointSlice], node: &Node) -> BTreeSet<EndpointKey> {
    let mut usable = BTreeSet::new();
    for (port, endpoints) in of_service(service, slices) {
        usable.extend(ready(&endpoints, &Health::of(service, port.protocol, node)));
    }
    usable
}

/// The endpoints that are ready and not unhealthy, regardless of traffic policies and hints.
pub(super) fn ready(endpoints: &Endpoints<'_>, health: &Health<'_>) -> impl Iterator<Item = EndpointKey> {
    endpoints.iter().filter(|(key, it)| it.ready && health.is_good(**key)).map(|(key, _)| *key)
}

/// What this node has found out about the endpoints of a service port.
#[derive(Clone, Copy)]
pub(super) struct Health<'a> {
    /// `None` if all endpoints count as healthy.
    check: Option<&'a Arc<Check>>,
    protocol: Protocol,
    unhealthy: &'a BTreeSet<Target>,
    /// Whether unhealthy endpoints get no new flows even if all endpoints are unhealthy.
    pub(super) fail_closed: bool,
}

impl<'a> Health<'a> {
    pub(super) fn of(service: &'a Service, protocol: Protocol, node: &'a Node) -> Self {
        let unhealthy = &node.unhealthy;
        Self {
            check: service.check().filter(|_| !unhealthy.is_empty()),
            protocol,
            unhealthy,
            fail_closed: service.settings.as_ref().is_some_and(|settings| settings.fail_closed),
        }
    }

    /// Whether every endpoint counts as healthy.
    pub(super) const fn is_unknown(&self) -> bool {
        self.check.is_none()
    }

    /// Whether the endpoint is healthy, or not checked.
    pub(super) fn is_good(&self, key: EndpointKey) -> bool {
        let target = self.check.and_then(|check| Target::of(check, self.protocol, key));
        target.is_none_or(|target| !self.unhealthy.contains(&target))
    }
}
