//! The kernel's contents, according to the steps that were applied.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use lb_common::{Address, Backend, Service, ServiceKey, SourceRangeKey};

use crate::{
    arena::SlotRange,
    plan::{Contents, Step},
    tables::Digest,
};

/// The contents of the maps with an index of the frontends and source ranges by their service port.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mirror {
    contents: Contents,
    by_id: BTreeSet<(u32, ServiceKey)>,
    ranges: BTreeMap<u32, BTreeSet<SourceRangeKey>>,
}

impl Mirror {
    pub(crate) fn new(contents: Contents) -> Self {
        let by_id = contents.frontends.iter().map(|(key, service)| (service.id, *key)).collect();
        let mut mirror = Self { by_id, ranges: BTreeMap::new(), contents };
        for range in &mirror.contents.source_ranges {
            mirror.ranges.entry(service_of(range)).or_default().insert(*range);
        }
        mirror
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

    /// The networks that may use a service port.
    pub(crate) fn ranges_of(&self, id: u32) -> impl Iterator<Item = SourceRangeKey> {
        self.ranges.get(&id).into_iter().flatten().copied()
    }

    /// Whether the kernel holds anything under this id.
    pub(crate) fn mentions(&self, id: u32) -> bool {
        self.contents.service_labels.contains_key(&id) || self.ranges.contains_key(&id)
    }

    /// Whether the slots hold exactly these backends.
    pub(crate) fn holds(&self, range: SlotRange, backends: &[Backend]) -> bool {
        let end = range.base.saturating_add(range.count);
        range.count as usize == backends.len()
            && self.contents.backends.range(range.base..end).map(|(_, b)| b).eq(backends)
    }

    /// Whether that table is in the slots from `base` on.
    pub(crate) fn holds_table(&self, base: u32, table: Digest) -> bool {
        self.contents.tables.get(&base) == Some(&table)
    }

    pub(crate) fn delete_table(&mut self, range: SlotRange) {
        self.contents.tables.remove(&range.base);
    }

    pub(crate) fn delete_backends(&mut self, range: SlotRange) {
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
            Step::WriteTable { base, entries } => {
                self.contents.tables.insert(*base, Digest::of(entries));
            }
            Step::ReleaseTable { base, count } => {
                self.delete_table(SlotRange { base: *base, count: *count });
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
                self.delete_backends(SlotRange { base: *base, count: *count });
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
                self.ranges.entry(service_of(range)).or_default().insert(*range);
            }
            Step::DeleteSourceRange(range) => {
                self.contents.source_ranges.remove(range);
                if let Entry::Occupied(mut of_port) = self.ranges.entry(service_of(range)) {
                    of_port.get_mut().remove(range);
                    if of_port.get().is_empty() {
                        of_port.remove();
                    }
                }
            }
            Step::DeleteEndpointLabels(address) => {
                self.contents.endpoint_labels.remove(address);
            }
        }
    }
}

/// The id of the service port that a network may use.
pub(crate) const fn service_of(range: &SourceRangeKey) -> u32 {
    range.range.service_and_family >> 1
}
