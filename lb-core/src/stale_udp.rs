//! Finds stale UDP flows: flows to an endpoint that their service port has lost. No packet closes them, so the agent
//! deletes them (as kube-proxy does in `pkg/proxy/conntrack/cleanup.go`).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use lb_common::{ServiceKey, protocol};

use crate::{
    desired::{Port, Serving},
    endpoint_key::EndpointKey,
    family::Family,
    model::ObjectName,
};

/// UDP frontends that may have stale flows: those that have lost endpoints, and those that have endpoints and are new
/// to their Service. A flow of such a frontend is stale if the flow's endpoint no longer serves the frontend, see
/// [`ServedUdp`].
pub type StaleFrontends = BTreeSet<ServiceKey>;

/// The endpoints that serve each UDP frontend.
///
/// The owner applies the [changes](crate::reconciler::Reconciler::take_served_changes) of a plan before the first step
/// of the plan, so this map has a new endpoint before any program can choose it. A flow is therefore stale if the map
/// has the flow's frontend, but does not list the flow's endpoint among the endpoints of that frontend.
#[derive(Clone, Debug, Default)]
pub struct ServedUdp(Frontends);

impl ServedUdp {
    /// Whether flows of the frontend to this endpoint are stale. False for a deleted frontend.
    pub fn has_lost(&self, frontend: &ServiceKey, endpoint: EndpointKey) -> bool {
        self.by(frontend).is_some_and(|serving| !serving.contains(&endpoint))
    }

    /// The endpoints that serve this frontend at present, or, if there are none, that served it last. `None` if the
    /// frontend is not in this map, for example because it was deleted.
    pub fn by(&self, frontend: &ServiceKey) -> Option<&Serving> {
        self.0.get(frontend)
    }

    /// Replaces the frontends of a Service. Frontends that another Service has taken over stay.
    pub fn apply(&mut self, ServedChange { before, now }: ServedChange) {
        for (frontend, serving) in before {
            if self.0.get(&frontend).is_some_and(|known| Arc::ptr_eq(known, &serving)) {
                self.0.remove(&frontend);
            }
        }
        self.0.extend(now);
    }
}

impl FromIterator<(ServiceKey, Serving)> for ServedUdp {
    fn from_iter<I: IntoIterator<Item = (ServiceKey, Serving)>>(frontends: I) -> Self {
        Self(frontends.into_iter().collect())
    }
}

/// A change of [`ServedUdp`]: the UDP frontends of one Service, with their endpoints, before and after a plan.
#[derive(Clone, Debug)]
pub struct ServedChange {
    before: Frontends,
    now: Frontends,
}

type Frontends = BTreeMap<ServiceKey, Serving>;

/// Finds the frontends that have lost endpoints.
///
/// An endpoint counts as long as it serves, regardless of policies, hints and termination: established flows stay, only
/// new flows go elsewhere. A frontend without any endpoint keeps its flows, because they could go nowhere else; the
/// flows become stale when the frontend gets other endpoints.
#[derive(Clone, Debug, Default)]
pub(crate) struct StaleUdp {
    known: BTreeMap<ObjectName, Frontends>,
    changes: Vec<ServedChange>,
    moved: StaleFrontends,
    begun: StaleFrontends,
}

impl StaleUdp {
    /// Sets the ports of a Service, without the frontends that another Service owns. A UDP frontend that has endpoints
    /// and is new to the Service counts as having lost endpoints: under an earlier agent or another Service, the
    /// programs may have created flows to other endpoints.
    pub(crate) fn set(&mut self, service: &ObjectName, ports: &[Port]) {
        let before = self.known.remove(service).unwrap_or_default();
        let mut now = Frontends::new();
        for port in ports.iter().filter(|port| port.labels.name.protocol.number() == protocol::UDP) {
            for frontend in &port.frontends {
                let serving = &port.serving[Family::of(frontend.key.address.into()) as usize];
                let known = before.get(&frontend.key);
                if serving.is_empty() {
                    now.extend(known.map(|known| (frontend.key, Arc::clone(known))));
                    continue;
                }
                if known.is_none_or(|known| !known.is_subset(serving)) {
                    self.moved.insert(frontend.key);
                }
                if known.is_none() {
                    self.begun.insert(frontend.key);
                }
                now.insert(frontend.key, Arc::clone(serving));
            }
        }
        if !now.is_empty() {
            self.known.insert(service.clone(), now.clone());
        }
        if !before.is_empty() || !now.is_empty() {
            self.changes.push(ServedChange { before, now });
        }
    }

    /// Records that the Service is not in the maps as planned, so that new flows may still go to endpoints that it has
    /// lost.
    pub(crate) fn failed(&mut self, service: &ObjectName) {
        if let Some(before) = self.known.remove(service) {
            self.changes.push(ServedChange { before, now: Frontends::new() });
        }
    }

    /// Returns the frontends that have lost endpoints since the last call.
    pub(crate) fn take(&mut self) -> StaleFrontends {
        std::mem::take(&mut self.moved)
    }

    /// Returns the frontends that have endpoints and that Services have gained since the last call.
    pub(crate) fn take_begun(&mut self) -> StaleFrontends {
        std::mem::take(&mut self.begun)
    }

    /// Returns the changes of [`ServedUdp`] since the last call, in their order.
    pub(crate) fn take_changes(&mut self) -> Vec<ServedChange> {
        std::mem::take(&mut self.changes)
    }
}
