//! Keeps entries in the maps for Services without a plan of their own: Services that an earlier run has left, Services
//! that do not fit, and Services that a plan does not cover.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use lb_common::{FrontendKind, Service, ServiceKey, SourceRangeKey, Vip, service_flags};

use super::Reconciler;
use crate::{
    model::ObjectName,
    per_address,
    plan::{Contents, Draft, EndpointLabels, slices_of, tables_of},
    records::vips_of,
};

impl Reconciler {
    /// Lets the Services that an earlier run left in the maps keep their entries of `VIPS` and `ENDPOINT_NAMES`. The
    /// first complete plan deletes all other entries, so [`Self::set_addresses`] must be called before that plan.
    pub(super) fn adopt_addresses(&mut self) {
        let Contents { vips: known_vips, endpoint_labels: known_labels, .. } = self.mirror.contents();
        for service in &self.earlier {
            let all = self.frontends_of(service).collect();
            let (labels, mut vips) = (self.present_labels(service, &all), self.present_vips(service, &all));
            // Until `set_addresses`, only the map knows which addresses are the node's own.
            vips.iter_mut()
                .for_each(|(address, vip)| *vip = known_vips.get(address).copied().unwrap_or(*vip));
            self.labels.set(service, labels);
            self.vips.set(service, vips);
        }
        self.labels.skip_unchanged(known_labels);
        self.vips.skip_unchanged(known_vips);
        self.labels.remove_unclaimed();
        self.vips.remove_unclaimed();
    }

    /// Lets the Services of other proxies keep the cluster IPs that an earlier run wrote to `VIPS`. Such a Service has no
    /// frontends in the maps, so [`Self::adopt_addresses`] cannot find it before the store has it. Without this, a plan
    /// would give the room of these addresses to a Service that comes first, although the addresses stay.
    pub(super) fn adopt_foreign_vips(&mut self) {
        let foreign = self.store.services().filter(|(_, service)| service.is_foreign);
        let unclaimed = foreign.map(|(name, _)| name).filter(|name| self.vips.of(name).is_empty());
        let unclaimed: Vec<ObjectName> = unclaimed.cloned().collect();
        for service in unclaimed {
            let known = &self.mirror.contents().vips;
            let present = self.store.foreign_ips(&service).filter(|address| known.contains_key(address));
            let vips = vips_of(std::iter::empty(), present, &self.node);
            self.vips.set(&service, vips);
        }
    }

    /// Updates the flags of the addresses of Services that stay as the agent found them: no plan computes them, but an
    /// address of the node itself must not have flags.
    pub(super) fn update_kept_vips(&mut self) {
        for service in &self.earlier {
            let all = self.frontends_of(service).collect();
            let vips = self.present_vips(service, &all);
            self.vips.set(service, vips);
        }
    }

    /// For a Service that keeps its state in the maps, because it does not fit or this plan does not cover it: keeps
    /// what its frontends in the maps need. The Service loses the `taken` frontends, which other Services take over,
    /// and those that the plan deletes.
    pub(super) fn keep_present(
        &mut self,
        service: &ObjectName,
        taken: &BTreeSet<ServiceKey>,
        draft: &mut Draft,
    ) {
        let stays = |key: &ServiceKey| !taken.contains(key) && !draft.delete_frontends.contains(key);
        let kept: BTreeSet<ServiceKey> = self.frontends_of(service).filter(stays).collect();
        self.release_idle(service, &kept, draft);
        self.keep_addresses(service, &kept);
    }

    /// Releases the elements of a Service that none of the `kept` frontends refers to: an earlier plan may have failed
    /// in the middle, or the Service loses frontends by this plan. The Service itself may be waiting for these
    /// elements.
    fn release_idle(&self, service: &ObjectName, kept: &BTreeSet<ServiceKey>, draft: &mut Draft) {
        for (_, id) in self.ids.of_service(service) {
            let keys = self.mirror.frontends_of(id).filter(|key| kept.contains(key));
            let frontends: Vec<(ServiceKey, &Service)> =
                keys.filter_map(|key| Some((key, self.mirror.frontend(&key)?))).collect();
            let records = || frontends.iter().map(|(_, record)| *record);
            let leads_to = |base: u32| records().flat_map(slices_of).any(|range| range.base == base);
            draft.release.extend(self.slices.of_id(id).filter(|range| !leads_to(range.base)));
            let reads = |base: u32| records().flat_map(tables_of).any(|range| range.base == base);
            draft.release_tables.extend(self.tables.of_id(id).filter(|range| !reads(range.base)));
            let checks = |range: &SourceRangeKey| {
                let of_family = |key: &ServiceKey| key.address.is_v4() == range.range.is_v4();
                let has = |record: &Service| record.flags & service_flags::SOURCE_RANGES != 0;
                frontends.iter().any(|(key, record)| of_family(key) && has(record))
            };
            draft.delete_source_ranges.extend(self.mirror.ranges_of(id).filter(|range| !checks(range)));
            if !records().any(|record| record.flags & service_flags::LIMITED != 0) {
                draft.delete_limits.extend(self.mirror.limited(id));
            }
            if frontends.is_empty() && self.mirror.contents().service_labels.contains_key(&id) {
                draft.delete_service_labels.insert(id);
            }
        }
    }

    /// Lets a Service keep the entries of `VIPS` and `ENDPOINT_NAMES` that its `kept` frontends in the maps need.
    pub(super) fn keep_addresses(&mut self, service: &ObjectName, kept: &BTreeSet<ServiceKey>) {
        let (labels, vips) = (self.present_labels(service, kept), self.present_vips(service, kept));
        self.labels.set(service, labels);
        self.vips.set(service, vips);
    }

    /// The entries of `VIPS` that these frontends of a Service in the maps need and, if another proxy serves the
    /// Service, the entries of its cluster IPs that the Service itself or another one claims already: each address once,
    /// in ascending order. An unclaimed entry is about to be removed, and this plan may have given its room away.
    fn present_vips(&self, service: &ObjectName, frontends: &BTreeSet<ServiceKey>) -> Vec<(IpAddr, Vip)> {
        let kinds = self.valid_records(frontends).filter_map(|(key, record)| {
            Some((IpAddr::from(key.address), FrontendKind::try_from(record.kind).ok()?))
        });
        let is_claimed = |address: &IpAddr| self.vips.wanted(*address).is_some();
        let foreign = self.store.foreign_ips(service).filter(is_claimed);
        vips_of(kinds, foreign, &self.node)
    }

    /// The entries of `ENDPOINT_NAMES` that these frontends of a Service in the maps need: each address once, in
    /// ascending order.
    fn present_labels(
        &self,
        service: &ObjectName,
        frontends: &BTreeSet<ServiceKey>,
    ) -> Vec<(IpAddr, Arc<EndpointLabels>)> {
        let contents = self.mirror.contents();
        let ranges = self.valid_records(frontends).flat_map(|(_, record)| slices_of(record));
        let backends = ranges.flat_map(|range| contents.backends.range(range.slots()));
        let addresses: BTreeSet<IpAddr> = backends.map(|(_, backend)| backend.address.into()).collect();
        let set = self.labels.of(service);
        let labels = addresses.into_iter().map(|address| {
            let known = per_address::find(set, address).or_else(|| contents.endpoint_labels.get(&address));
            (address, known.cloned().unwrap_or_default())
        });
        labels.collect()
    }

    /// The records of these frontends in the maps, except invalid ones, which the agent will replace or delete.
    fn valid_records<'a>(
        &'a self,
        frontends: &'a BTreeSet<ServiceKey>,
    ) -> impl Iterator<Item = (&'a ServiceKey, &'a Service)> {
        let valid = frontends.difference(&self.distrusted);
        valid.filter_map(|key| Some((key, self.mirror.frontend(key)?)))
    }
}
