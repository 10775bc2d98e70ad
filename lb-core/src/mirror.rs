//! What the kernel holds, as far as steps have told us.

use std::collections::BTreeSet;

use lb_common::{Address, Backend, Service, ServiceKey};

use crate::{
    arena::SlotRange,
    plan::{Contents, Step},
};

/// The contents of the maps with an index of the frontends by their service port.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mirror {
    contents: Contents,
    by_id: BTreeSet<(u32, ServiceKey)>,
}

impl Mirror {
    pub(crate) fn new(contents: Contents) -> Self {
        let by_id = contents.frontends.iter().map(|(key, service)| (service.id, *key)).collect();
        Self { contents, by_id }
    }

    pub(crate) const fn contents(&self) -> &Contents {
        &self.contents
    }

    pub(crate) fn frontend(&self, key: &ServiceKey) -> Option<&Service> {
        self.contents.frontends.get(key)
    }

    pub(crate) fn frontends_of(&self, id: u32) -> impl Iterator<Item = ServiceKey> {
        let first = ServiceKey::new(Address::from_v6([0; 16]), 0, 0);
        let from = self.by_id.range((id, first)..);
        from.take_while(move |(of, _)| *of == id).map(|(_, key)| *key)
    }

    /// Whether the slots hold exactly these backends.
    pub(crate) fn holds(&self, range: SlotRange, backends: &[Backend]) -> bool {
        let end = range.base.saturating_add(range.count);
        range.count as usize == backends.len()
            && self.contents.backends.range(range.base..end).map(|(_, b)| b).eq(backends)
    }

    pub(crate) fn forget_backends(&mut self, range: SlotRange) {
        for slot in range.base..range.base.saturating_add(range.count) {
            self.contents.backends.remove(&slot);
        }
    }

    pub(crate) fn apply(&mut self, step: &Step) {
        match step {
            Step::DeleteFrontend(key) => {
                if let Some(gone) = self.contents.frontends.remove(key) {
                    self.by_id.remove(&(gone.id, *key));
                }
            }
            Step::WriteBackends { base, backends } => {
                self.contents.backends.extend((*base..).zip(backends.iter().copied()));
            }
            Step::PutServiceLabels(id, labels) => {
                self.contents.service_labels.insert(*id, labels.clone());
            }
            Step::PutEndpointLabels(address, labels) => {
                self.contents.endpoint_labels.insert(*address, labels.clone());
            }
            Step::PutFrontend(key, service) => {
                if let Some(before) = self.contents.frontends.insert(*key, *service) {
                    self.by_id.remove(&(before.id, *key));
                }
                self.by_id.insert((service.id, *key));
            }
            Step::ReleaseBackends { base, count } => {
                self.forget_backends(SlotRange { base: *base, count: *count });
            }
            Step::DeleteServiceLabels(id) => {
                self.contents.service_labels.remove(id);
            }
            Step::PutVip(address, vip) => {
                self.contents.vips.insert(*address, *vip);
            }
            Step::DeleteVip(address) => {
                self.contents.vips.remove(address);
            }
            Step::PutSourceRange(range) => {
                self.contents.source_ranges.insert(*range);
            }
            Step::DeleteSourceRange(range) => {
                self.contents.source_ranges.remove(range);
            }
            Step::DeleteEndpointLabels(address) => {
                self.contents.endpoint_labels.remove(address);
            }
        }
    }
}
