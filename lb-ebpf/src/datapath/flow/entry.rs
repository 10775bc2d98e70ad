//! Insertion of the entry that lies prepared in `FlowSetup`, under a key that must be free.

use aya_ebpf::bindings::BPF_NOEXIST;

use super::conntrack::delete_if_over;
use crate::datapath::{
    maps::CONNTRACK,
    scratch::setup::{Claim, FlowSetup},
};

/// Inserts the entry that lies prepared in `setup`, if its key is free.
#[inline(always)]
pub(super) fn insert(setup: &FlowSetup) -> Claim {
    Claim::of(CONNTRACK.insert(&setup.key, &setup.flow, u64::from(BPF_NOEXIST)))
}

/// Inserts the entry in place of the connection that has its key, if that one is over.
#[inline(always)]
pub(super) fn replace(setup: &mut FlowSetup) -> Claim {
    if delete_if_over(&setup.key, setup.eager, &mut setup.replaced) { insert(setup) } else { Claim::Taken }
}
