//! Insertion of the entry that `FlowSetup` holds, under a key that no other flow may have.

use super::{conntrack::delete_if_over, table};
use crate::datapath::scratch::setup::{Claim, FlowSetup};

/// Inserts the entry that `setup` holds, if its key is free.
#[inline(always)]
pub(super) fn insert(setup: &FlowSetup) -> Claim {
    Claim::of(table::insert(&setup.key, &setup.flow))
}

/// Inserts the entry that `setup` holds in place of the flow that has its key, if a new flow may take the source port
/// of that flow ([`delete_if_over`]).
#[inline(always)]
pub(super) fn replace(setup: &mut FlowSetup) -> Claim {
    if delete_if_over(&setup.key, setup.eager) { insert(setup) } else { Claim::Taken }
}
