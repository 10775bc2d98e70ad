//! Which UDP flows are stale: those to an endpoint that its service port has lost, since no closing packet ever ends
//! them (`pkg/proxy/conntrack/cleanup.go`).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use lb_common::{Address, ServiceKey, protocol};

use crate::{desired::Port, family::Family, model::ObjectName};

/// Address and port of endpoints that still serve.
pub type Serving = Arc<BTreeSet<(Address, u16)>>;

/// UDP frontends that have lost endpoints, with those they have now: flows to any other are stale.
pub type Moved = BTreeMap<ServiceKey, Serving>;

/// Finds the frontends that have lost endpoints.
///
/// An endpoint counts as long as it serves, whatever policies, hints and its own end say: who has a flow to it keeps
/// it, only new flows go elsewhere. A frontend without any endpoint loses nothing, for there is nowhere else to go;
/// it has lost them when it gets others.
#[derive(Clone, Debug, Default)]
pub(crate) struct Endings {
    known: BTreeMap<ObjectName, Moved>,
    moved: Moved,
}

impl Endings {
    /// These are the ports of the Service now, without frontends that are another's. The first time, whatever flows to
    /// other endpoints there are is stale: they are of an agent, or a Service, that was here before.
    pub(crate) fn set(&mut self, service: &ObjectName, ports: &[Port]) {
        let before = self.known.remove(service).unwrap_or_default();
        let mut now = Moved::new();
        for port in ports.iter().filter(|port| port.labels.name.protocol.number() == protocol::UDP) {
            for frontend in &port.frontends {
                let serving = &port.serving[Family::of(frontend.key.address.into()) as usize];
                let known = before.get(&frontend.key);
                if serving.is_empty() {
                    now.extend(known.map(|known| (frontend.key, Arc::clone(known))));
                    continue;
                }
                if known.is_none_or(|known| !known.is_subset(serving)) {
                    self.moved.insert(frontend.key, Arc::clone(serving));
                }
                now.insert(frontend.key, Arc::clone(serving));
            }
        }
        if !now.is_empty() {
            self.known.insert(service.clone(), now);
        }
    }

    /// What is in the kernel of the Service is not what it should be: new flows may still go to endpoints that it has
    /// lost.
    pub(crate) fn failed(&mut self, service: &ObjectName) {
        self.known.remove(service);
    }

    /// What was found since the last call.
    pub(crate) fn take(&mut self) -> Moved {
        std::mem::take(&mut self.moved)
    }
}
