//! Answers to health checks of load balancers (`spec.healthCheckNodePort`), and the service ports that drop packets
//! because they have no endpoint on this node.

use std::{collections::BTreeMap, net::IpAddr};

use lb_common::{FrontendKind, service_flags};

use crate::{
    desired::{
        Port,
        endpoints::{is_local, preference},
    },
    family::Family,
    model::{Endpoint, EndpointSlice, Node, ObjectName, Service},
};

/// What a load balancer's health check of this node (`healthCheckNodePort`) reports about a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// `spec.healthCheckNodePort`: the port that answers.
    pub port: u16,
    /// Number of addresses of ready IPv4 endpoints on this node; `None` if the Service has no IPv4 cluster IP, and so
    /// no IPv4 health check.
    pub v4: Option<usize>,
    /// Number of addresses of ready IPv6 endpoints on this node; `None` if the Service has no IPv6 cluster IP, and so
    /// no IPv6 health check.
    pub v6: Option<usize>,
}

impl HealthCheck {
    /// Number of ready endpoints of one family on this node; `None` without a health check for the family.
    pub const fn local_endpoints(&self, family: Family) -> Option<usize> {
        match family {
            Family::V4 => self.v4,
            Family::V6 => self.v6,
        }
    }
}

/// Number of service ports that have endpoints, but none on this node, under a traffic policy `Local`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct NoLocalEndpoints {
    /// Number of ports under `internalTrafficPolicy: Local` that have endpoints, but none on this node.
    pub internal: usize,
    /// Number of ports under `externalTrafficPolicy: Local` that have endpoints, but none on this node; only ports of
    /// Services with external addresses or node ports.
    pub external: usize,
}

/// The `healthCheckNodePort` answers of all Services, updated Service by Service.
#[derive(Clone, Debug, Default)]
pub(crate) struct HealthChecks {
    checks: BTreeMap<ObjectName, HealthCheck>,
    /// Whether `checks` changed since the last [`Self::take_changed`].
    changed: bool,
    /// Services with ports that drop packets for lack of a local endpoint, with the number of such ports for IPv4 and
    /// IPv6.
    no_local: BTreeMap<ObjectName, [NoLocalEndpoints; 2]>,
    total: [NoLocalEndpoints; 2],
}

impl HealthChecks {
    pub(crate) const fn checks(&self) -> &BTreeMap<ObjectName, HealthCheck> {
        &self.checks
    }

    /// Whether [`Self::checks`] has changed since the last call.
    pub(crate) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    pub(crate) const fn no_local_endpoints(&self, family: Family) -> NoLocalEndpoints {
        self.total[family as usize]
    }

    /// Sets the health check of a Service and its numbers of ports without local endpoints. For a deleted Service,
    /// `service` is `None` and `ports` is empty.
    pub(crate) fn set<'a>(
        &mut self,
        name: &ObjectName,
        service: Option<&Service>,
        slices: impl Iterator<Item = &'a EndpointSlice>,
        ports: &[Port],
        node: &Node,
    ) {
        let check = service.and_then(|service| health_check(service, slices, node));
        let known = match check {
            Some(check) => self.checks.insert(name.clone(), check),
            None => self.checks.remove(name),
        };
        self.changed |= known != check;
        let after = Family::ALL.map(|family| no_local_endpoints(ports, family));
        let before = if after == [NoLocalEndpoints::default(); 2] {
            self.no_local.remove(name)
        } else {
            self.no_local.insert(name.clone(), after)
        };
        let before = before.unwrap_or_default();
        for (total, (before, after)) in self.total.iter_mut().zip(before.into_iter().zip(after)) {
            total.internal = total.internal - before.internal + after.internal;
            total.external = total.external - before.external + after.external;
        }
    }
}

fn health_check<'a>(
    service: &Service,
    slices: impl Iterator<Item = &'a EndpointSlice>,
    node: &Node,
) -> Option<HealthCheck> {
    let port = service.external.health_check_node_port?;
    let local = local_ready(slices, node);
    let count = |family| {
        service.has(family).then(|| local.iter().filter(|address| Family::of(**address) == family).count())
    };
    Some(HealthCheck { port, v4: count(Family::V4), v6: count(Family::V6) })
}

/// Addresses of ready endpoints on this node, from slices that have a port. A terminating endpoint is not ready (unless
/// `publishNotReadyAddresses` is set): this node may still use it, but the load balancer should choose another node.
fn local_ready<'a>(slices: impl Iterator<Item = &'a EndpointSlice>, node: &Node) -> Vec<IpAddr> {
    let mut endpoints: BTreeMap<IpAddr, &Endpoint> = BTreeMap::new();
    for endpoint in slices.filter(|slice| !slice.ports.is_empty()).flat_map(|slice| &slice.endpoints) {
        let known = endpoints.entry(endpoint.address).or_insert(endpoint);
        if preference(endpoint) > preference(known) {
            *known = endpoint;
        }
    }
    let counts = |endpoint: &&&Endpoint| endpoint.ready && is_local(endpoint, node);
    endpoints.values().filter(counts).map(|endpoint| endpoint.address).collect()
}

fn no_local_endpoints(ports: &[Port], family: Family) -> NoLocalEndpoints {
    let drops = |port: &Port, internal: bool| {
        port.frontends.iter().any(|frontend| {
            Family::of(frontend.key.address.into()) == family
                && frontend.has(service_flags::DROP_WITHOUT_BACKENDS)
                && (frontend.kind == FrontendKind::ClusterIp) == internal
        })
    };
    NoLocalEndpoints {
        internal: ports.iter().filter(|port| drops(port, true)).count(),
        external: ports.iter().filter(|port| drops(port, false)).count(),
    }
}
