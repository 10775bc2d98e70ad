//! Insertion of the entry that lies prepared in `FlowSetup`, under a key that must be free.

use super::{conntrack::delete_if_over, table};
use crate::datapath::scratch::setup::{Claim, FlowSetup};

/// Inserts the entry that is prepared in `setup`, if its key is free.
#[inline(always)]
pub(super) fn insert(setup: &FlowSetup) -> Claim {
    Claim::of(table::insert(&setup.key, &setup.flow))
}

/// Inserts the entry in place of the connection that has its key, if that one is over.
#[inline(always)]
pub(super) fn replace(setup: &mut FlowSetup) -> Claim {
    if delete_if_over(&setup.key, setup.eager) { insert(setup) } else { Claim::Taken }
}
