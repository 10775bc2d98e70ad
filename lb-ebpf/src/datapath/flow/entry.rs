//! Claims of a key that no other flow may have, by inserting the entry that `FlowSetup` holds.

use super::{conntrack::delete_if_over, table};
use crate::datapath::scratch::setup::{Claim, FlowSetup};

/// Claims the key of the entry that `setup` holds, if the key is free.
#[inline(always)]
pub(super) fn claim_if_free(setup: &FlowSetup) -> Claim {
    Claim::of(table::insert(&setup.key, &setup.flow))
}

/// Claims the key of the entry that `setup` holds, in place of the flow that has the key, if a new flow may take the
/// source port of that flow ([`delete_if_over`]).
#[inline(always)]
pub(super) fn claim_if_over(setup: &mut FlowSetup) -> Claim {
    if delete_if_over(&setup.key, setup.eager) { claim_if_free(setup) } else { Claim::Taken }
}
