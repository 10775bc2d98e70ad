//! Looks up the names for the flow log in the maps, and decides which Services are logged.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
    time::Duration,
};

use lb_common::Address;
use lb_core::model::{Change, FlowLogPolicy, ObjectName};
use lb_datapath::ServiceMaps;
use tracing::warn;

use super::tracker::{Names, Who};

/// The flow log policy of each Service whose annotations set one. Clones share the same map.
#[derive(Clone, Debug, Default)]
pub(crate) struct Policies(Arc<RwLock<KnownPolicies>>);

#[derive(Debug, Default)]
struct KnownPolicies {
    policies: BTreeMap<ObjectName, FlowLogPolicy>,
    /// Whether the policies of all Services are known.
    is_complete: bool,
    /// Number of changes so far.
    changes: u64,
}

impl Policies {
    /// Updates the policies after changes of Services.
    pub(crate) fn note(&self, changes: &[Change]) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.changes += 1;
        let policies = &mut known.policies;
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

    /// Must be called once all Services have been read.
    pub(crate) fn set_complete(&self) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).is_complete = true;
    }

    /// Whether the policies of all Services are known.
    pub(super) fn are_complete(&self) -> bool {
        self.read().is_complete
    }

    fn of(&self, name: &ObjectName) -> FlowLogPolicy {
        self.read().policies.get(name).copied().unwrap_or_default()
    }

    fn read(&self) -> RwLockReadGuard<'_, KnownPolicies> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Looks names up in the maps. Caches them until the policies change or [`Self::refresh`] is called.
pub(super) struct MapNames {
    maps: ServiceMaps,
    policies: Policies,
    /// Whether the agent logs only the connections of Services whose annotation enables the flow log.
    only_annotated: bool,
    interval: Duration,
    known: HashMap<(u32, Address), Arc<Who>>,
    /// Number of changes of the policies that `known` takes into account.
    changes: u64,
}

impl MapNames {
    pub(super) fn new(maps: ServiceMaps, only_annotated: bool, interval: Duration) -> Self {
        let policies = Policies::default();
        Self { maps, policies, only_annotated, interval, known: HashMap::new(), changes: 0 }
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
        let changes = self.policies.read().changes;
        if changes != self.changes {
            self.refresh();
            self.changes = changes;
        }
        if let Some(known) = self.known.get(&(service, *backend)) {
            return Arc::clone(known);
        }
        let who = Arc::new(self.look_up(service, backend));
        self.known.insert((service, *backend), Arc::clone(&who));
        who
    }
}
