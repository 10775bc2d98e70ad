//! The overflow: the hash map `CONNTRACK`.
//!
//! The verifier of Linux 6.1 rejects a helper call whose key or value is a pointer that a global function got as its
//! argument. So the functions copy both to `SCRATCH`.

use aya_ebpf::bindings::{BPF_EXIST, BPF_NOEXIST};
use lb_common::{
    conntrack::{Flow, Tuple},
    flow_table::OverflowInsert,
};

use crate::datapath::{
    maps::CONNTRACK,
    scratch::{scratch, setup::EEXIST},
    words,
};

#[inline(always)]
pub(super) fn get(key: &Tuple) -> Option<&'static mut Flow> {
    // SAFETY: as in `Element::flow`; the memory of a deleted element stays mapped while the program runs.
    CONNTRACK.get_ptr_mut(scratch_key(key)?).map(|flow| unsafe { &mut *flow })
}

#[inline(always)]
pub(crate) fn has(key: &Tuple) -> bool {
    overflow_has(key) != 0
}

/// Inserts an entry if its key is new.
#[inline(always)]
pub(super) fn insert(key: &Tuple, flow: &Flow) -> OverflowInsert {
    match overflow_insert(key, flow) {
        0 => OverflowInsert::Inserted,
        1 => OverflowInsert::Exists,
        _full => OverflowInsert::Full,
    }
}

/// Replaces the flow of an entry; returns whether there was one.
#[inline(always)]
pub(super) fn replace(key: &Tuple, flow: &Flow) -> bool {
    overflow_replace(key, flow) != 0
}

/// Deletes the entry with the key; returns false if there was none.
#[inline(always)]
pub(super) fn remove(key: &Tuple) -> bool {
    overflow_remove(key) != 0
}

#[inline(always)]
fn scratch_key(key: &Tuple) -> Option<&'static Tuple> {
    let copy = scratch().ok()?.overflow_key();
    *copy = *key;
    Some(copy)
}

#[inline(always)]
fn scratch_flow(flow: &Flow) -> Option<&'static Flow> {
    let copy = scratch().ok()?.overflow_flow();
    // SAFETY: `copy` is a value of a map, and borrowed mutably.
    unsafe { words::copy(flow, copy) };
    Some(copy)
}

// The functions below are global, so that the verifier checks them once. It accepts only callers whose pointers lead to
// initialised values, or are null.

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn overflow_has(key: *const Tuple) -> u32 {
    // SAFETY: see above.
    let key = unsafe { key.as_ref() }.and_then(scratch_key);
    u32::from(key.is_some_and(|key| CONNTRACK.get_ptr(key).is_some()))
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn overflow_insert(key: *const Tuple, flow: *const Flow) -> u32 {
    match update(key, flow, BPF_NOEXIST) {
        0 => OverflowInsert::Inserted as u32,
        EEXIST => OverflowInsert::Exists as u32,
        _ => OverflowInsert::Full as u32,
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn overflow_replace(key: *const Tuple, flow: *const Flow) -> u32 {
    u32::from(update(key, flow, BPF_EXIST) == 0)
}

/// Calls `bpf_map_update_elem`; returns 0, or a negative error number.
#[inline(always)]
fn update(key: *const Tuple, flow: *const Flow, flags: u32) -> i32 {
    // SAFETY: see above.
    let (key, flow) = unsafe { (key.as_ref(), flow.as_ref()) };
    let (Some(key), Some(flow)) = (key.and_then(scratch_key), flow.and_then(scratch_flow)) else {
        return -1;
    };
    CONNTRACK.insert(key, flow, u64::from(flags)).err().unwrap_or(0)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn overflow_remove(key: *const Tuple) -> u32 {
    // SAFETY: see above.
    let key = unsafe { key.as_ref() }.and_then(scratch_key);
    u32::from(key.is_some_and(|key| CONNTRACK.remove(key).is_ok()))
}
