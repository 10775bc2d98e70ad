//! The probed targets of all Services.

use std::collections::{BTreeMap, BTreeSet};

use super::target::Target;
use crate::model::ObjectName;

/// Which Services use which targets, updated Service by Service. Services without a health check take no memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Targets {
    of_service: BTreeMap<ObjectName, BTreeSet<Target>>,
    users: BTreeMap<Target, Vec<ObjectName>>,
    /// The targets whose set of Services changed since the last [`Self::take_changes`].
    changed: BTreeSet<Target>,
}

impl Targets {
    /// Replaces the targets of a Service; a Service that has no health check, or was deleted, has none. Returns the new
    /// targets that no Service used before.
    pub(crate) fn set(&mut self, service: &ObjectName, targets: BTreeSet<Target>) -> Vec<Target> {
        let before = if targets.is_empty() {
            self.of_service.remove(service)
        } else {
            self.of_service.insert(service.clone(), targets.clone())
        };
        let before = before.unwrap_or_default();
        for target in before.difference(&targets) {
            let users = self.users.entry(target.clone()).or_default();
            users.retain(|user| user != service);
            if users.is_empty() {
                self.users.remove(target);
            }
            self.changed.insert(target.clone());
        }
        let mut new = Vec::new();
        for target in targets.difference(&before) {
            if !self.users.contains_key(target) {
                new.push(target.clone());
            }
            let users = self.users.entry(target.clone()).or_default();
            users.insert(users.partition_point(|user| user < service), service.clone());
            self.changed.insert(target.clone());
        }
        new
    }

    /// The Services that use the target.
    pub(crate) fn users(&self, target: &Target) -> &[ObjectName] {
        self.users.get(target).map_or(&[], Vec::as_slice)
    }

    /// The targets whose set of Services has changed since the last call, with these Services. An empty list means that
    /// no Service uses the target any more.
    pub(crate) fn take_changes(&mut self) -> Vec<(Target, Vec<ObjectName>)> {
        let changed = std::mem::take(&mut self.changed);
        changed.into_iter().map(|target| (target.clone(), self.users(&target).to_vec())).collect()
    }
}
