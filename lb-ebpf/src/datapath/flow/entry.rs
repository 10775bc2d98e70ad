//! Claims of a key that no other flow may have, by inserting the entry that `FlowSetup` holds.

use super::{conntrack::delete_if_over, table};
use crate::datapath::scratch::setup::{Claim, FlowSetup};

/// Claims the key of the entry that `setup` holds, if the key is free.
#[inline(always)]
pub(super) fn claim_if_free(setup: &FlowSetup) -> Claim {
    Claim::of(table::insert(&setup.key, &setup.flow))
}

/// Claims the key of the entry that `setup` holds. First deletes the flow that has this key now, if a new flow may take
/// that flow's source port ([`delete_if_over`]).
#[inline(always)]
pub(super) fn claim_if_over(setup: &mut FlowSetup) -> Claim {
    if delete_if_over(&setup.key, setup.eager) { claim_if_free(setup) } else { Claim::Taken }
}
