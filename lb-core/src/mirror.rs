//! The contents of the maps, according to the steps that were applied.

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    net::IpAddr,
    sync::Arc,
};

use lb_common::{Address, Backend, Service, ServiceKey, SourceRangeKey};

use crate::{
    arena::SlotRange,
    compact,
    plan::{Contents, EndpointLabels, Step},
    tables::Digest,
};

/// The contents of the maps, with an index of the frontends and source ranges by their service port, and with the
/// number of backends for each counter.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mirror {
    contents: Contents,
    by_id: BTreeSet<(u32, ServiceKey)>,
    ranges: BTreeMap<u32, BTreeSet<SourceRangeKey>>,
    /// For each slot of `ACTIVE` in use: the number of backends that have it as their counter of active flows.
    counters: BTreeMap<u32, u32>,
}

impl Mirror {
    pub(crate) fn new(contents: Contents) -> Self {
        let by_id = contents.frontends.iter().map(|(key, service)| (service.id, *key)).collect();
        let mut mirror = Self { by_id, ranges: BTreeMap::new(), counters: BTreeMap::new(), contents };
        for backend in mirror.contents.backends.values() {
            count(&mut mirror.counters, backend);
        }
        for range in &mirror.contents.source_ranges {
            mirror.ranges.entry(range.range.service()).or_default().insert(*range);
        }
        mirror
    }

    /// Frees memory that is allocated but unused.
    pub(crate) fn compact(&mut self) {
        let Contents { frontends, backends, service_labels, endpoint_labels, vips, .. } = &mut self.contents;
        compact::map(frontends);
        compact::map(backends);
        compact::map(service_labels);
        compact::map(endpoint_labels);
        compact::map(vips);
        compact::set(&mut self.by_id);
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

    /// The source ranges of the service port with this id.
    pub(crate) fn ranges_of(&self, id: u32) -> impl Iterator<Item = SourceRangeKey> {
        self.ranges.get(&id).into_iter().flatten().copied()
    }

    /// The id, if `LIMITS` has an entry for it.
    pub(crate) fn limited(&self, id: u32) -> Option<u32> {
        self.contents.limits.contains_key(&id).then_some(id)
    }

    /// Whether the maps have labels, source ranges or limits of the service port with this id.
    pub(crate) fn mentions(&self, id: u32) -> bool {
        self.contents.service_labels.contains_key(&id)
            || self.ranges.contains_key(&id)
            || self.limited(id).is_some()
    }

    /// Replaces labels by equal ones that the mirror already has for the same address, so that memory holds them once.
    pub(crate) fn share_labels(&self, labels: &mut [(IpAddr, Arc<EndpointLabels>)]) {
        for (address, labels) in labels {
            if let Some(known) = self.contents.endpoint_labels.get(address).filter(|known| *known == labels) {
                labels.clone_from(known);
            }
        }
    }

    /// Whether these slots of `BACKENDS` hold exactly these backends.
    pub(crate) fn holds(&self, range: SlotRange, backends: &[Backend]) -> bool {
        range.count as usize == backends.len()
            && self.contents.backends.range(range.slots()).map(|(_, b)| b).eq(backends)
    }

    /// Whether the slots of `TABLES` from `base` on hold a table with this digest.
    pub(crate) fn holds_table(&self, base: u32, table: Digest) -> bool {
        self.contents.tables.get(&base) == Some(&table)
    }

    pub(crate) fn delete_table(&mut self, range: SlotRange) {
        self.contents.tables.remove(&range.base);
    }

    pub(crate) fn delete_backends(&mut self, range: SlotRange) {
        for slot in range.slots() {
            if let Some(backend) = self.contents.backends.remove(&slot) {
                discount(&mut self.counters, &backend);
            }
        }
    }

    /// Whether some backend uses this slot of `ACTIVE`.
    pub(crate) fn is_counter_used(&self, counter: u32) -> bool {
        self.counters.contains_key(&counter)
    }

    pub(crate) fn apply(&mut self, step: &Step) {
        match step {
            Step::DeleteFrontend(key) => self.delete_frontend(key),
            Step::WriteBackends { base, backends } => self.write_backends(*base, backends),
            Step::WriteTable { base, entries } => {
                self.contents.tables.insert(*base, Digest::of(entries));
            }
            Step::ReleaseTable { base, count } => {
                self.delete_table(SlotRange { base: *base, count: *count });
            }
            Step::PutServiceLabels(id, labels) => {
                self.contents.service_labels.insert(*id, (**labels).clone());
            }
            Step::PutEndpointLabels(address, labels) => {
                self.contents.endpoint_labels.insert(*address, labels.clone());
            }
            Step::PutFrontend(key, service) => self.put_frontend(*key, **service),
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
            Step::PutSourceRange(range) => self.put_source_range(*range),
            Step::DeleteSourceRange(range) => self.delete_source_range(range),
            Step::PutLimits(id, limits) => {
                self.contents.limits.insert(*id, *limits);
            }
            Step::DeleteLimits(id) => {
                self.contents.limits.remove(id);
            }
            Step::DeleteEndpointLabels(address) => {
                self.contents.endpoint_labels.remove(address);
            }
        }
    }

    fn put_frontend(&mut self, key: ServiceKey, service: Service) {
        if let Some(before) = self.contents.frontends.insert(key, service) {
            self.by_id.remove(&(before.id, key));
        }
        self.by_id.insert((service.id, key));
    }

    fn delete_frontend(&mut self, key: &ServiceKey) {
        if let Some(gone) = self.contents.frontends.remove(key) {
            self.by_id.remove(&(gone.id, *key));
        }
    }

    fn write_backends(&mut self, base: u32, backends: &[Backend]) {
        for (slot, backend) in (base..).zip(backends) {
            if let Some(before) = self.contents.backends.insert(slot, *backend) {
                discount(&mut self.counters, &before);
            }
            count(&mut self.counters, backend);
        }
    }

    fn put_source_range(&mut self, range: SourceRangeKey) {
        self.contents.source_ranges.insert(range);
        self.ranges.entry(range.range.service()).or_default().insert(range);
    }

    fn delete_source_range(&mut self, range: &SourceRangeKey) {
        self.contents.source_ranges.remove(range);
        if let Entry::Occupied(mut of_port) = self.ranges.entry(range.range.service()) {
            of_port.get_mut().remove(range);
            if of_port.get().is_empty() {
                of_port.remove();
            }
        }
    }
}

fn count(counters: &mut BTreeMap<u32, u32>, backend: &Backend) {
    if backend.active_flows_slot > 0 {
        *counters.entry(backend.active_flows_slot).or_default() += 1;
    }
}

fn discount(counters: &mut BTreeMap<u32, u32>, backend: &Backend) {
    if let Entry::Occupied(mut backends) = counters.entry(backend.active_flows_slot) {
        *backends.get_mut() -= 1;
        if *backends.get() == 0 {
            backends.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_is_used_until_its_last_backend_is_deleted() {
        let backend = |active_flows_slot| Backend {
            address: Address::from_v4([10, 0, 0, 1]),
            port: 80,
            flags: 0,
            weight: 1,
            active_flows_slot,
        };
        let mut mirror = Mirror::new(Contents { backends: [(0, backend(7))].into(), ..Contents::default() });
        mirror.apply(&Step::WriteBackends { base: 1, backends: vec![backend(7), backend(0)] });
        assert!(mirror.is_counter_used(7) && !mirror.is_counter_used(0));
        mirror.delete_backends(SlotRange { base: 0, count: 1 });
        assert!(mirror.is_counter_used(7));
        mirror.apply(&Step::ReleaseBackends { base: 1, count: 2 });
        assert!(!mirror.is_counter_used(7));
    }
}
