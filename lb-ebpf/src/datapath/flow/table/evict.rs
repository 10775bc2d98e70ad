//! The entries that a new flow may evict, and the other entries that the programs delete with them.

use lb_common::{
    FlowEventKind,
    conntrack::{Flow, Tuple},
    flow_table::{Evict, EvictionClass, Slot},
};
use lb_ebpf::rules::flow;

use super::{
    flow_at, locate, lookup,
    memory::{Element, Table},
    remove, remove_found, slot,
};
use crate::datapath::{
    clock::now,
    flow::{active_flows, flow_log},
    scratch::scratch,
};

/// The programs' part in evictions: the verdict on an entry, and the deletion of what depends on it.
pub(super) struct Eviction;

impl Evict<Table> for Eviction {
    #[inline(always)]
    fn class(&mut self, slot: Element) -> EvictionClass {
        const EXPIRED: u32 = EvictionClass::Expired as u32;
        const UNPROVEN: u32 = EvictionClass::Unproven as u32;
        match flow_eviction_class(slot.index) {
            EXPIRED => EvictionClass::Expired,
            UNPROVEN => EvictionClass::Unproven,
            _keep => EvictionClass::Keep,
        }
    }

    #[inline(always)]
    fn evicted(&mut self, slot: Element) {
        let evicted = flow_evicted(slot.index);
        if evicted & HAS_REVERSE != 0 {
            if evicted & IS_REPLY != 0 {
                end_other(FlowEventKind::Evicted);
            }
            remove_other();
        }
        // Necessary even if the reverse entry was not found: another CPU may be evicting it, and that CPU no longer
        // finds this entry.
        if evicted & IS_SECOND != 0 {
            end_first_flow(FlowEventKind::Evicted);
        }
    }
}

/// The [`EvictionClass`] of the entry in this slot.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_eviction_class(index: u32) -> u32 {
    let Some(slot) = slot(index) else { return EvictionClass::Keep as u32 };
    // SAFETY: the pointer is that of an array element, which lives as long as the program runs. Other CPUs may change
    // the entry; the caller evicts it only if its control word is still the same.
    class(unsafe { &*slot }) as u32
}

#[inline(always)]
fn class(Slot { key, flow, .. }: &Slot) -> EvictionClass {
    if flow.is_tunnelled() {
        return flow::eviction(flow, None, now());
    }
    let reverse = lookup(&flow.to.reversed()).filter(|reverse| leads_back(reverse, key));
    flow::eviction(flow, reverse.as_deref(), now())
}

/// Bit of the result of [`flow_evicted`]: the flow has another entry, whose key is in `SCRATCH`.
const HAS_REVERSE: u32 = 1;
/// Bit of the result of [`flow_evicted`]: the entry is a reverse entry, so the other entry is the forward entry.
const IS_REPLY: u32 = 2;
/// Bit of the result of [`flow_evicted`]: the flow is the second one of a masqueraded connection. `SCRATCH` has the key
/// of the first flow's reverse entry.
const IS_SECOND: u32 = 4;

/// Subtracts the flow of the evicted entry in this slot from the active flows, if this is the flow's forward entry.
/// Returns bits for the other entries that the caller has to delete.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_evicted(index: u32) -> u32 {
    let (Some(slot), Ok(scratch)) = (slot(index), scratch()) else { return 0 };
    let keys = scratch.keys();
    // SAFETY: the pointer is that of an array element, which lives as long as the program runs. This CPU has claimed
    // the slot.
    let Slot { key, flow, .. } = unsafe { &mut *slot };
    if !flow.is_reply() {
        active_flows::end(flow);
    }
    if flow.is_tunnelled() {
        flow_log::ended(key, flow, None, FlowEventKind::Evicted);
        return 0;
    }
    keys.other = flow.to.reversed();
    keys.first_reply = if flow.is_reply() { flow.to } else { key.reversed() };
    let mut rest = 0;
    if let Some(reverse) =
        locate(&keys.other, &mut keys.other_place).filter(|reverse| leads_back(reverse, key))
    {
        rest |= HAS_REVERSE;
        if !flow.is_reply() {
            flow_log::ended(key, flow, Some(reverse), FlowEventKind::Evicted);
        }
    }
    if flow.is_reply() {
        rest |= IS_REPLY;
        flow_log::keep(flow, &mut keys.reply);
    }
    if flow.is_second() {
        rest |= IS_SECOND;
    }
    rest
}

/// Whether `reverse` is the other entry of the flow whose entry has this key.
#[inline(always)]
fn leads_back(reverse: &Flow, key: &Tuple) -> bool {
    let Tuple { source, destination, source_port, destination_port, .. } = &reverse.to;
    *source == key.destination
        && *destination == key.source
        && *source_port == key.destination_port
        && *destination_port == key.source_port
}

/// Deletes the first flow of a masqueraded connection whose second flow is gone, so that no packet of the connection
/// leaves with the client address. `SCRATCH` has the key of the first flow's reverse entry.
#[inline(always)]
pub(in crate::datapath::flow) fn end_first_flow(kind: FlowEventKind) {
    let found = flow_find_first();
    if found == NO_FIRST {
        return;
    }
    if found == WHOLE {
        end_other(kind);
        remove_other();
    }
    if let Ok(scratch) = scratch() {
        // Another CPU may have deleted the entry already.
        remove(&scratch.keys().first_reply);
    }
}

/// Result of [`flow_find_first`]: the first flow is gone. Another connection of the client may have the key of the
/// first flow's reverse entry.
const NO_FIRST: u32 = 0;
/// Result of [`flow_find_first`]: only the reverse entry exists.
const ONLY_REPLY: u32 = 1;
/// Result of [`flow_find_first`]: both entries exist.
const WHOLE: u32 = 2;

/// Ends the flow whose forward entry is the `other` entry in `SCRATCH`: subtracts it from the active flows, and emits
/// its end for the flow log.
#[inline(always)]
pub(in crate::datapath::flow) fn end_other(kind: FlowEventKind) {
    flow_end(kind as u32);
}

/// Removes the `other` entry in `SCRATCH`, unless it is gone already.
#[inline(always)]
pub(in crate::datapath::flow) fn remove_other() {
    if let Ok(scratch) = scratch() {
        let keys = scratch.keys();
        remove_found(&keys.other_place, &keys.other);
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_end(kind: u32) -> u32 {
    let Ok(scratch) = scratch() else { return 0 };
    let keys = scratch.keys();
    if let Some(forward) = flow_at(&keys.other_place, &keys.other) {
        active_flows::end(forward);
        flow_log::ended(&keys.other, forward, Some(&keys.reply), flow_log::kind_of_end(kind));
    }
    1
}

/// Writes the key and the place of the first flow's forward entry to `SCRATCH`, as the `other` entry. `SCRATCH` has the
/// key of the flow's reverse entry. Returns which entries exist.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_find_first() -> u32 {
    let Ok(scratch) = scratch() else { return NO_FIRST };
    let keys = scratch.keys();
    let Some(reply) = lookup(&keys.first_reply).filter(|reply| reply.has_second()) else { return NO_FIRST };
    flow_log::keep(reply, &mut keys.reply);
    keys.other = reply.to.reversed();
    if locate(&keys.other, &mut keys.other_place).is_some() { WHOLE } else { ONLY_REPLY }
}
