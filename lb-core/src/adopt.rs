//! Takes over the services and backends that an earlier run of the agent left in the maps.

use std::collections::BTreeSet;

use lb_common::{Service, ServiceKey, SourceRangeKey};

use crate::{
    active_flow_slots::{ActiveFlowSlots, ServiceEndpoint},
    arena::SlotRange,
    capacity::Capacity,
    ids::Ids,
    mirror::Mirror,
    plan::{Contents, slices_of, tables_of},
    slices::Slices,
};

/// The contents of the maps, split into what this run takes over and what it must delete.
pub(crate) struct Adopted {
    pub(crate) ids: Ids,
    pub(crate) slices: Slices,
    pub(crate) tables: Slices,
    pub(crate) counters: ActiveFlowSlots,
    pub(crate) mirror: Mirror,
    /// Frontends that must be replaced or deleted: their record is broken, has an unknown id, or refers to a slice or
    /// table that is unwritten or overlaps another one.
    pub(crate) distrusted: BTreeSet<ServiceKey>,
    /// Ids in `SERVICE_NAMES` that must be deleted: their name already has another id, or the id is 0, which is
    /// invalid.
    pub(crate) stale_ids: BTreeSet<u32>,
    /// Source ranges that must be deleted, because their service port is unknown.
    pub(crate) stale_ranges: BTreeSet<SourceRangeKey>,
    /// Ids in `LIMITS` that must be deleted, because their service port is unknown.
    pub(crate) stale_limits: BTreeSet<u32>,
}

pub(crate) fn adopt(mut contents: Contents, capacity: Capacity) -> Adopted {
    let mut ids = Ids::new();
    let stale_ids: BTreeSet<u32> = contents
        .service_labels
        .iter()
        .filter(|(id, labels)| !ids.adopt(**id, &labels.name))
        .map(|(id, _)| *id)
        .collect();
    let (mut slices, mut tables) = (Slices::new(capacity.backends), Slices::new(capacity.tables));
    let distrusted: BTreeSet<ServiceKey> = contents
        .frontends
        .iter()
        .filter(|(key, record)| !adopt_record(key, record, &contents, &ids, &mut slices, &mut tables))
        .map(|(key, _)| *key)
        .collect();
    for record in distrusted.iter().filter_map(|key| contents.frontends.get(key)) {
        slices_of(record).for_each(|range| slices.distrust(range));
        tables_of(record).for_each(|range| tables.distrust(range));
    }
    let counters = counters(&contents, &distrusted, capacity.backends);
    contents.backends.retain(|slot, _| slices.arena().is_used(*slot));
    contents.tables.retain(|base, _| tables.has(*base));
    let unknown = |range: &&SourceRangeKey| !ids.contains(range.range.service());
    let stale_ranges = contents.source_ranges.iter().filter(unknown).copied().collect();
    let stale_limits = contents.limits.keys().filter(|id| !ids.contains(**id)).copied().collect();
    let mut mirror = Mirror::new(contents);
    mirror.compact();
    Adopted { ids, slices, tables, counters, mirror, distrusted, stale_ids, stale_ranges, stale_limits }
}

/// The counters of active flows that the backends of trusted frontends use.
fn counters(contents: &Contents, distrusted: &BTreeSet<ServiceKey>, capacity: u32) -> ActiveFlowSlots {
    let mut counters = ActiveFlowSlots::new(capacity);
    let trusted = contents.frontends.iter().filter(|(key, _)| !distrusted.contains(key));
    for (_, record) in trusted {
        for range in slices_of(record) {
            for (_, backend) in contents.backends.range(range.slots()) {
                counters.adopt(backend.active_flows_slot, ServiceEndpoint::new(record.id, backend));
            }
        }
    }
    counters
}

/// Adopts the slots that a frontend's record refers to; returns whether the record is valid.
fn adopt_record(
    key: &ServiceKey,
    record: &Service,
    contents: &Contents,
    ids: &Ids,
    slices: &mut Slices,
    tables: &mut Slices,
) -> bool {
    let is_written =
        |range: &SlotRange| contents.backends.range(range.slots()).count() == range.count as usize;
    let is_table =
        |range: &SlotRange| contents.tables.get(&range.base).is_some_and(|table| table.count == range.count);
    record.is_sealed(key)
        && ids.contains(record.id)
        && slices_of(record).all(|range| is_written(&range) && slices.adopt(record.id, range))
        && tables_of(record).all(|range| is_table(&range) && tables.adopt(record.id, range))
}
