//! Insertion of the entry that `FlowSetup` holds, under a key that no other flow may have.

use super::{conntrack::delete_if_over, table};
use crate::datapath::scratch::setup::{Claim, FlowSetup};

/// Inserts the entry that `setup` holds, if its key is free.
#[inline(always)]
pub(super) fn insert(setup: &FlowSetup) -> Claim {
    Claim::of(table::insert(&setup.key, &setup.flow))
}

/// Deletes the flow that has the key of the entry, if the port of that flow may be used again, and inserts the entry.
#[inline(always)]
pub(super) fn replace(setup: &mut FlowSetup) -> Claim {
    if delete_if_over(&setup.key, setup.eager) { insert(setup) } else { Claim::Taken }
}
