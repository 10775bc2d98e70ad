//! Looks up the names for the flow log in the maps, and decides which Services are logged.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use lb_common::Address;
use lb_core::model::{Change, FlowLogPolicy, ObjectName};
use lb_datapath::ServiceMaps;
use tracing::warn;

use super::tracker::{Names, Who};

/// The flow log policy of each Service whose annotations set one. Clones share the same map.
#[derive(Clone, Debug, Default)]
pub(crate) struct Policies(Arc<RwLock<BTreeMap<ObjectName, FlowLogPolicy>>>);

impl Policies {
    /// Updates the policies after changes of Services.
    pub(crate) fn note(&self, changes: &[Change]) {
        let mut policies = self.0.write().unwrap_or_else(PoisonError::into_inner);
        for change in changes {
            let Change::Service(name, service) = change else { continue };
            let settings = service.as_ref().and_then(|service| service.settings.as_ref());
            match settings.map(|settings| settings.flow_log) {
                Some(policy) if policy != FlowLogPolicy::default() => {
                    policies.insert(name.clone(), policy);
                }
                Some(_) | None => {
                    policies.remove(name);
                }
            }
        }
    }

    fn of(&self, name: &ObjectName) -> FlowLogPolicy {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(name).copied().unwrap_or_default()
    }
}

/// Looks names up in the maps; caches them until the next [`Self::refresh`].
pub(super) struct MapNames {
    maps: ServiceMaps,
    policies: Policies,
    /// Whether the agent logs only the connections of Services whose annotation enables the flow log.
    only_annotated: bool,
    interval: Duration,
    known: HashMap<(u32, Address), Arc<Who>>,
}

impl MapNames {
    pub(super) fn new(maps: ServiceMaps, only_annotated: bool, interval: Duration) -> Self {
        Self { maps, policies: Policies::default(), only_annotated, interval, known: HashMap::new() }
    }

    pub(super) fn policies(&self) -> Policies {
        self.policies.clone()
    }

    /// Empties the cache, as names may have changed. Known connections keep the names that they began with.
    pub(super) fn refresh(&mut self) {
        self.known.clear();
    }

    fn look_up(&self, service: u32, backend: &Address) -> Who {
        let failed = |error| warn!("the flow log lacks names: {error}");
        let labels = self.maps.labels_of(service).map_err(failed).ok().flatten();
        let endpoint =
            self.maps.endpoint_labels_of(backend).map_err(failed).ok().flatten().unwrap_or_default();
        let policy = labels.as_ref().map(|labels| self.policies.of(&labels.name.service)).unwrap_or_default();
        let interval = policy.interval.unwrap_or(self.interval);
        Who {
            service: labels.map(|labels| {
                let name = labels.name;
                [name.service.namespace, name.service.name, name.port]
            }),
            pod: endpoint.pod,
            node: endpoint.node,
            logged: policy.logged.unwrap_or(!self.only_annotated),
            interval: u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

impl Names for MapNames {
    fn of(&mut self, service: u32, backend: &Address) -> Arc<Who> {
        if let Some(known) = self.known.get(&(service, *backend)) {
            return Arc::clone(known);
        }
        let who = Arc::new(self.look_up(service, backend));
        self.known.insert((service, *backend), Arc::clone(&who));
        who
    }
}
