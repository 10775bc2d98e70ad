//! Taking over what an earlier life of the agent left in the kernel.

use std::collections::BTreeSet;

use lb_common::{Service, ServiceKey};

use crate::{arena::SlotRange, ids::Ids, mirror::Mirror, plan::Contents, slices::Slices};

/// The contents of the kernel, sorted into what can be built upon and what cannot.
pub(crate) struct Adopted {
    pub(crate) ids: Ids,
    pub(crate) slices: Slices,
    pub(crate) mirror: Mirror,
    /// Frontends whose record is broken or refers to something that is not theirs.
    pub(crate) distrusted: BTreeSet<ServiceKey>,
    /// Ids with a name that has another id already.
    pub(crate) stale_ids: BTreeSet<u32>,
}

pub(crate) fn adopt(mut contents: Contents, slots: u32) -> Adopted {
    let mut ids = Ids::new();
    let stale_ids: BTreeSet<u32> = contents
        .service_labels
        .iter()
        .filter(|(id, labels)| !ids.adopt(**id, &labels.name))
        .map(|(id, _)| *id)
        .collect();
    let mut slices = Slices::new(slots);
    let distrusted: BTreeSet<ServiceKey> = contents
        .frontends
        .iter()
        .filter(|(key, record)| !is_trusted(key, record, &contents, &ids, &mut slices))
        .map(|(key, _)| *key)
        .collect();
    for record in distrusted.iter().filter_map(|key| contents.frontends.get(key)) {
        slices.distrust(slots_of(record));
    }
    contents.backends.retain(|slot, _| slices.arena().is_used(*slot));
    Adopted { ids, slices, mirror: Mirror::new(contents), distrusted, stale_ids }
}

fn is_trusted(
    key: &ServiceKey,
    record: &Service,
    contents: &Contents,
    ids: &Ids,
    slices: &mut Slices,
) -> bool {
    let range = slots_of(record);
    let end = range.base.saturating_add(range.count);
    record.is_sealed(key)
        && ids.contains(record.id)
        && (range.count == 0
            || contents.backends.range(range.base..end).count() == range.count as usize
                && slices.adopt(record.id, range))
}

const fn slots_of(record: &Service) -> SlotRange {
    SlotRange { base: record.backends_base, count: record.backends_count }
}
