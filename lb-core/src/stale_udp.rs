//! Which UDP flows are stale: those to an endpoint that its service port has lost, since no closing packet ever ends
//! them (`pkg/proxy/conntrack/cleanup.go`).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, PoisonError, RwLock},
};

use lb_common::{Address, ServiceKey, protocol};

use crate::{
    desired::{Port, Serving},
    family::Family,
    model::ObjectName,
};

/// UDP frontends that have lost endpoints: flows to any that does not serve them now are stale, see [`ServedUdp`].
pub type StaleFrontends = BTreeSet<ServiceKey>;

/// The endpoints that serve each UDP frontend, as of the last plan. Clones share it.
///
/// An endpoint that comes is in here before it is in the kernel. So a flow to one that is not in here has lost it, whenever that is
/// asked; a copy would tell of one that has come meanwhile that its flows are stale.
#[derive(Clone, Debug, Default)]
pub struct ServedUdp(Arc<RwLock<BTreeMap<ServiceKey, Serving>>>);

impl ServedUdp {
    /// Whether flows of the frontend to this endpoint are stale. Nothing is known of those of a frontend that is gone.
    pub fn has_lost(&self, frontend: &ServiceKey, endpoint: (Address, u16)) -> bool {
        self.by(frontend).is_some_and(|serving| !serving.contains(&endpoint))
    }

    /// The endpoints that serve this frontend; `None` of one that is gone.
    pub fn by(&self, frontend: &ServiceKey) -> Option<Serving> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(frontend).cloned()
    }

    /// Frontends of a Service that had those of `before` have these `now`. Another Service may have got one of its.
    fn replace(&self, before: &Frontends, now: &Frontends) {
        let mut served = self.0.write().unwrap_or_else(PoisonError::into_inner);
        for (frontend, serving) in before {
            if served.get(frontend).is_some_and(|known| Arc::ptr_eq(known, serving)) {
                served.remove(frontend);
            }
        }
        served.extend(now.iter().map(|(frontend, serving)| (*frontend, Arc::clone(serving))));
    }
}

impl FromIterator<(ServiceKey, Serving)> for ServedUdp {
    fn from_iter<I: IntoIterator<Item = (ServiceKey, Serving)>>(frontends: I) -> Self {
        Self(Arc::new(RwLock::new(frontends.into_iter().collect())))
    }
}

type Frontends = BTreeMap<ServiceKey, Serving>;

/// Finds the frontends that have lost endpoints.
///
/// An endpoint counts as long as it serves, whatever policies, hints and its own end say: who has a flow to it keeps
/// it, only new flows go elsewhere. A frontend without any endpoint loses nothing, for there is nowhere else to go;
/// it has lost them when it gets others.
#[derive(Clone, Debug, Default)]
pub(crate) struct StaleUdp {
    known: BTreeMap<ObjectName, Frontends>,
    served: ServedUdp,
    moved: StaleFrontends,
}

impl StaleUdp {
    /// These are the ports of the Service now, without frontends that are another's. The first time, whatever flows to
    /// other endpoints there are is stale: they are of an agent, or a Service, that was here before.
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
                now.insert(frontend.key, Arc::clone(serving));
            }
        }
        self.served.replace(&before, &now);
        if !now.is_empty() {
            self.known.insert(service.clone(), now);
        }
    }

    /// What is in the kernel of the Service is not what it should be: new flows may still go to endpoints that it has
    /// lost.
    pub(crate) fn failed(&mut self, service: &ObjectName) {
        if let Some(before) = self.known.remove(service) {
            self.served.replace(&before, &Frontends::new());
        }
    }

    /// What was found since the last call.
    pub(crate) fn take(&mut self) -> StaleFrontends {
        std::mem::take(&mut self.moved)
    }

    /// What serves each of them.
    pub(crate) const fn served(&self) -> &ServedUdp {
        &self.served
    }
}
