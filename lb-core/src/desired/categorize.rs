//! Selects usable endpoints: `CategorizeEndpoints` of kube-proxy (`pkg/proxy/topology.go`), and then the healthy ones.

use super::{
    endpoints::{Endpoints, is_local},
    probed::Health,
};
use crate::endpoint_key::EndpointKey;
use crate::model::{Endpoint, Node};

/// An endpoint with its address and port.
pub(super) type Member<'a> = (EndpointKey, &'a Endpoint);

/// The usable endpoints of a port, sorted by address and port.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Categories<'a> {
    /// The endpoints for clients under the traffic policy `Cluster`. The candidates are the ready endpoints that
    /// [`Topology`] selects; if no endpoint is ready, the endpoints that still serve while they terminate. [`healthy`]
    /// selects among the candidates. If all candidates are unhealthy, healthy ready endpoints that [`Topology`] does
    /// not select take over.
    pub(super) cluster: Vec<Member<'a>>,
    /// The endpoints for clients under the traffic policy `Local`. The candidates are the ready endpoints on this node;
    /// if this node has none, its endpoints that still serve while they terminate. [`healthy`] selects among the
    /// candidates.
    pub(super) local: Vec<Member<'a>>,
    /// The endpoints of `local`, and those that `local` lacks because this node finds them unhealthy: other nodes may
    /// find them healthy and send flows to them.
    pub(super) here: Vec<Member<'a>>,
    /// Whether there is a usable endpoint anywhere in the cluster.
    pub(super) any: bool,
}

/// Which ready endpoints the hints or the Service select: at least one, if any endpoint is ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Topology {
    Anywhere,
    /// The ready endpoints with a hint for the zone of this node.
    SameZone,
    /// The ready endpoints with a hint for this node.
    SameNode,
    /// The ready endpoints in the zone of this node.
    OwnZone,
}

pub(super) fn categorize<'a>(
    endpoints: &Endpoints<'a>,
    node: &Node,
    cross_zone: Option<bool>,
    health: &Health<'_>,
) -> Categories<'a> {
    let topology = match cross_zone {
        Some(true) => Topology::Anywhere,
        Some(false) => own_zone(endpoints, node),
        None => topology(endpoints, node),
    };
    let members = |usable: &dyn Fn(&Endpoint) -> bool| -> Vec<Member<'a>> {
        let all = endpoints.iter().map(|(key, endpoint)| (*key, *endpoint));
        all.filter(|(_, endpoint)| usable(endpoint)).collect()
    };
    let first = |preferred: &dyn Fn(&Endpoint) -> bool, fallback: &dyn Fn(&Endpoint) -> bool| {
        let chosen = members(preferred);
        if chosen.is_empty() { members(fallback) } else { chosen }
    };
    let cluster = first(
        &|endpoint| endpoint.ready && is_meant(endpoint, topology, node),
        &Endpoint::serves_terminating,
    );
    let here = first(&|endpoint| endpoint.ready && is_local(endpoint, node), &|endpoint| {
        endpoint.serves_terminating() && is_local(endpoint, node)
    });
    // Hints and zones are a preference: if all endpoints that they select are unhealthy, healthy endpoints elsewhere
    // take over. The policy `Local` is a restriction: no endpoint on another node takes over.
    let elsewhere = || if topology == Topology::Anywhere { Vec::new() } else { members(&|it| it.ready) };
    let cluster = healthy(cluster, elsewhere, health);
    let local = healthy(here.clone(), Vec::new, health);
    let any = !cluster.is_empty();
    Categories { cluster, local, here, any }
}

/// The healthy endpoints of `members`; if there are none, the healthy endpoints of `others`. If neither list has a
/// healthy endpoint, all of `members`, because the checks may be wrong; under `fail-closed`, none.
fn healthy<'a>(
    members: Vec<Member<'a>>,
    others: impl FnOnce() -> Vec<Member<'a>>,
    health: &Health<'_>,
) -> Vec<Member<'a>> {
    if health.is_unknown() {
        return members;
    }
    let good = |members: &[Member<'a>]| -> Vec<Member<'a>> {
        members.iter().filter(|(key, _)| health.is_good(*key)).copied().collect()
    };
    let mut chosen = good(&members);
    if chosen.is_empty() {
        chosen = good(&others());
    }
    if chosen.is_empty() && !health.fail_closed { members } else { chosen }
}

/// Hints for nodes apply if every ready endpoint has such a hint and at least one of these hints names this node.
/// Otherwise, hints for zones apply under the same condition.
fn topology(endpoints: &Endpoints<'_>, node: &Node) -> Topology {
    let mut ready = endpoints.values().filter(|endpoint| endpoint.ready).peekable();
    if ready.peek().is_none() {
        return Topology::Anywhere;
    }
    let (mut nodes, mut zones) = (Coverage::default(), Coverage::default());
    for endpoint in ready {
        let hints = endpoint.hints.as_deref();
        nodes.count(hints.is_some_and(|h| !h.nodes.is_empty()), is_for_node(endpoint, node));
        zones.count(hints.is_some_and(|h| !h.zones.is_empty()), is_for_zone(endpoint, node));
    }
    match (nodes.applies(), zones.applies()) {
        (true, _) => Topology::SameNode,
        (false, true) => Topology::SameZone,
        (false, false) => Topology::Anywhere,
    }
}

/// Whether hints of one kind, for nodes or for zones, apply.
#[derive(Default)]
struct Coverage {
    some_without: bool,
    some_for_us: bool,
}

impl Coverage {
    const fn count(&mut self, has_hints: bool, is_for_us: bool) {
        self.some_without |= !has_hints;
        self.some_for_us |= is_for_us;
    }

    const fn applies(&self) -> bool {
        !self.some_without && self.some_for_us
    }
}

fn is_meant(endpoint: &Endpoint, topology: Topology, node: &Node) -> bool {
    match topology {
        Topology::Anywhere => true,
        Topology::SameNode => is_for_node(endpoint, node),
        Topology::SameZone => is_for_zone(endpoint, node),
        Topology::OwnZone => is_in_zone(endpoint, node),
    }
}

/// Selects the endpoints in the zone of this node if at least one of them is ready, else those of all zones.
fn own_zone(endpoints: &Endpoints<'_>, node: &Node) -> Topology {
    let has_endpoint = endpoints.values().any(|endpoint| endpoint.ready && is_in_zone(endpoint, node));
    if has_endpoint { Topology::OwnZone } else { Topology::Anywhere }
}

fn is_in_zone(endpoint: &Endpoint, node: &Node) -> bool {
    node.zone.is_some() && endpoint.zone == node.zone
}

fn is_for_node(endpoint: &Endpoint, node: &Node) -> bool {
    endpoint.hints.as_ref().is_some_and(|hints| hints.nodes.contains(&node.policy.node_name))
}

fn is_for_zone(endpoint: &Endpoint, node: &Node) -> bool {
    let zone = node.zone.as_ref();
    zone.is_some_and(|zone| endpoint.hints.as_ref().is_some_and(|hints| hints.zones.contains(zone)))
}
