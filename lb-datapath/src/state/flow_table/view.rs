use std::cell::RefCell;

use lb_common::{
    conntrack::{Flow, Tuple},
    flow_table::{Evict, EvictionClass, Memory, OnSlots, Overflow, OverflowInsert, SharedSlots},
};

use super::header::SharedHeader;
use crate::{bpf::table::Table, error::DatapathError};

/// The flow table during one operation of the agent. Stores errors of the overflow, because the algorithms shared with
/// the programs return none.
pub(super) struct View<'a> {
    slots: SharedSlots<'a>,
    header: &'a SharedHeader,
    overflow: &'a Table<Tuple, Flow>,
    error: RefCell<Option<DatapathError>>,
}

impl<'a> View<'a> {
    pub(super) const fn new(
        slots: SharedSlots<'a>,
        header: &'a SharedHeader,
        overflow: &'a Table<Tuple, Flow>,
    ) -> Self {
        Self { slots, header, overflow, error: RefCell::new(None) }
    }

    /// The error of an operation on the overflow through this view, if one has failed.
    pub(super) fn result(self) -> Result<(), DatapathError> {
        self.error.into_inner().map_or(Ok(()), Err)
    }

    fn or<T>(&self, result: Result<T, DatapathError>, otherwise: T) -> T {
        result.unwrap_or_else(|error| {
            *self.error.borrow_mut() = Some(error);
            otherwise
        })
    }
}

impl<'a> OnSlots for View<'a> {
    type Slots = SharedSlots<'a>;

    const IS_AGENT: bool = SharedSlots::IS_AGENT;

    fn slots(&self) -> &SharedSlots<'a> {
        &self.slots
    }
}

impl Overflow for View<'_> {
    fn takes_all(&self) -> bool {
        self.header.takes_all()
    }

    fn count(&self) -> u64 {
        self.header.overflow()
    }

    fn add_to_count(&self, difference: i64) {
        self.header.add_to_overflow(difference);
    }

    fn has(&self, key: &Tuple) -> bool {
        self.or(self.overflow.get(key), None).is_some()
    }

    fn insert(&self, key: &Tuple, flow: &Flow) -> OverflowInsert {
        let inserted = self
            .overflow
            .insert_new(key, flow)
            .map(|is_new| if is_new { OverflowInsert::Inserted } else { OverflowInsert::Exists });
        self.or(inserted, OverflowInsert::Full)
    }

    fn replace(&self, key: &Tuple, flow: &Flow) -> bool {
        self.or(self.overflow.replace(key, flow), false)
    }

    fn remove(&self, key: &Tuple) -> bool {
        self.or(self.overflow.remove(key), false)
    }
}

/// The agent's policy of eviction: it evicts no flow to insert an entry, because it inserts only entries of flows that
/// exist already.
pub(super) struct KeepAll;

impl<M: Memory> Evict<M> for KeepAll {
    fn class(&mut self, _slot: M::Slot) -> EvictionClass {
        EvictionClass::Keep
    }

    fn evicted(&mut self, _slot: M::Slot) {}
}
