//! Limits how many probes of one Service, and of one namespace, run at once, so that endpoints which answer late or
//! never do not delay the probes of other endpoints.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use super::{monitor::Monitor, target::Target};
use crate::model::ObjectName;

/// A group of targets: only a certain number of their probes may run at once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Share {
    Service(ObjectName),
    Namespace(Arc<str>),
}

impl Share {
    /// How many probes of the group may run at once: half of all for a Service, three quarters for a namespace.
    const fn most(&self) -> usize {
        match self {
            Self::Service(_) => Monitor::MOST_PROBES / 2,
            Self::Namespace(_) => Monitor::MOST_PROBES / 4 * 3,
        }
    }

    fn of(service: &ObjectName) -> [Self; 2] {
        [Self::Service(service.clone()), Self::Namespace(service.namespace.clone())]
    }
}

/// The time when the next probe of a target is due, and the target: in this order, so that sets sort targets by time.
pub(super) type Due = (Duration, Target);

/// The probes that run, by [`Share`].
#[derive(Clone, Debug, Default)]
pub(super) struct Shares(BTreeMap<Share, Used>);

#[derive(Clone, Debug, Default)]
struct Used {
    probes: usize,
    /// Targets that are due and wait until another probe of the share ends, the longest waiting first.
    waiting: BTreeSet<Due>,
}

impl Shares {
    /// Counts a probe for a Service and for its namespace. If the maximum number of probes already run for one of the
    /// two, counts nothing; the error is the share that is used up.
    pub(super) fn take(&mut self, service: &ObjectName) -> Result<(), Share> {
        let shares = Share::of(service);
        let is_used_up = |share: &&Share| self.0.get(share).is_some_and(|used| used.probes >= share.most());
        if let Some(share) = shares.iter().find(is_used_up) {
            return Err(share.clone());
        }
        for share in shares {
            self.0.entry(share).or_default().probes += 1;
        }
        Ok(())
    }

    /// Lets a target wait until a probe of this share ends.
    pub(super) fn wait(&mut self, share: Share, due: Due) {
        self.0.entry(share).or_default().waiting.insert(due);
    }

    /// A target no longer waits.
    pub(super) fn leave(&mut self, share: &Share, due: &Due) {
        if let Some(used) = self.0.get_mut(share) {
            used.waiting.remove(due);
        }
    }

    /// Stops counting a probe for the Service, because the probe has ended. Returns the targets that no longer wait, at
    /// most one for each of the two shares; [`Self::take`] may then find that the other share is used up.
    pub(super) fn give_back(&mut self, service: &ObjectName) -> Vec<Due> {
        let mut next = Vec::new();
        for share in Share::of(service) {
            let Some(used) = self.0.get_mut(&share) else { continue };
            used.probes = used.probes.saturating_sub(1);
            next.extend(used.waiting.pop_first());
            if used.probes == 0 && used.waiting.is_empty() {
                self.0.remove(&share);
            }
        }
        next
    }
}
