//! Insertion into `CONNTRACK`: of any entry, and of the one that lies prepared in `FlowSetup`, under a key that must be
//! free.

use aya_ebpf::bindings::BPF_NOEXIST;
use lb_common::conntrack::{Flow, Tuple};

use super::conntrack::delete_if_over;
use crate::datapath::{
    filter,
    maps::CONNTRACK,
    scratch::setup::{Claim, FlowSetup},
};

/// Inserts an entry, and marks it in the filter before: no other code of the programs inserts entries. `flags` are those
/// of `bpf_map_update_elem`.
#[inline(always)]
pub(super) fn put(key: &Tuple, flow: &Flow, flags: u32) -> Result<(), i32> {
    filter::mark(key, flow.flags);
    CONNTRACK.insert(key, flow, u64::from(flags))
}

/// Inserts the entry that is prepared in `setup`, if its key is free.
#[inline(always)]
pub(super) fn insert(setup: &FlowSetup) -> Claim {
    Claim::of(put(&setup.key, &setup.flow, BPF_NOEXIST))
}

/// Inserts the entry in place of the connection that has its key, if that one is over.
#[inline(always)]
pub(super) fn replace(setup: &mut FlowSetup) -> Claim {
    if delete_if_over(&setup.key, setup.eager, &mut setup.replaced) { insert(setup) } else { Claim::Taken }
}
