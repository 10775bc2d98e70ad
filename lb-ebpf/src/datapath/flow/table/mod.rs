//! The flow table and its overflow, as the programs use them: see [`lb_common::flow_table`].
//!
//! Most operations run in global functions, which the verifier checks once, not in every path to them. Arguments of a
//! global function are numbers or pointers to values of a known size, and its result is a number.

mod evict;
mod memory;
mod overflow;
mod place;

use core::arch::asm;

use lb_common::{
    conntrack::{Flow, Tuple},
    flow_table::{self, Control, Entry, Insert, Memory as _, Replace, Slot},
};

use self::{evict::Eviction, memory::Element, place::Location};
use crate::datapath::{filter, maps::FLOWS};

pub(super) use self::evict::{end_first_flow, end_other, remove_other};
pub(crate) use self::{
    memory::Table,
    overflow::has as is_in_overflow,
    place::{Inserted, Place},
};

/// The result of [`find`].
pub(crate) enum TableLookup {
    /// Neither the table nor the overflow has an entry with the key.
    Absent,
    /// The flow of the entry, which is in the table.
    Flow(&'static mut Flow),
    /// The table does not have the entry, but the overflow may.
    MayBeInOverflow,
}

/// Finds the entry with this key without a call: a call would take a tenth of the time that the programs take for a
/// packet of an established flow. Only the fast paths inline this function, because the verifier checks each copy; all
/// other callers use [`lookup`] or [`locate`].
#[inline(always)]
pub(crate) fn find(table: Table, key: &Tuple) -> TableLookup {
    match flow_table::find(&table, &table.places(key), key) {
        Some(entry) => TableLookup::Flow(entry.slot.flow()),
        None if table.has_overflow() => TableLookup::MayBeInOverflow,
        None => TableLookup::Absent,
    }
}

/// The flow of the entry with this key, in the table or in the overflow.
#[inline(always)]
pub(crate) fn lookup(key: &Tuple) -> Option<&'static mut Flow> {
    flow_in(Location::of(flow_find(key)), key)
}

/// Like [`lookup`], and also writes the place of the entry to `place`, for a caller that may [remove](remove_found)
/// exactly this entry.
#[inline(always)]
pub(crate) fn locate(key: &Tuple, place: &mut Place) -> Option<&'static mut Flow> {
    flow_in(Location::of(flow_locate(key, place)), key)
}

/// The flow of the entry with this key in this location.
#[inline(always)]
fn flow_in(location: Location, key: &Tuple) -> Option<&'static mut Flow> {
    match location {
        Location::Absent => None,
        Location::Slot(index) => Element::at(index).map(Element::flow),
        Location::MayBeInOverflow => overflow::get(key),
    }
}

/// Like [`flow_find`], and also writes the place of the entry to `place`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_locate(key: *const Tuple, place: *mut Place) -> u32 {
    let absent = Location::Absent.number();
    // SAFETY: the verifier accepts only callers whose pointers lead to initialised values, or are null.
    let (Some(key), Some(place)) = (unsafe { (key.as_ref(), place.as_mut()) }) else { return absent };
    let Some(table) = Table::get() else { return absent };
    let location = match flow_table::find(&table, &table.places(key), key) {
        Some(entry) => {
            *place = Place { control: entry.control.0, index: entry.slot.index, in_overflow: 0 };
            Location::Slot(entry.slot.index)
        }
        None if table.has_overflow() => {
            *place = Place::IN_OVERFLOW;
            Location::MayBeInOverflow
        }
        None => Location::Absent,
    };
    location.number()
}

/// The flow of the entry with this key, if it still has this place.
#[inline(always)]
pub(crate) fn flow_at(place: &Place, key: &Tuple) -> Option<&'static mut Flow> {
    if place.in_overflow != 0 {
        return overflow::get(key);
    }
    let (table, slot) = (Table::get()?, Element::at(place.index)?);
    (table.control_after(slot).0 == place.control).then(|| slot.flow())
}

/// Removes the entry with this key, if it still has this place; returns whether this call did.
#[inline(always)]
pub(crate) fn remove_found(place: &Place, key: &Tuple) -> bool {
    if place.in_overflow != 0 { remove(key) } else { flow_remove_found(place.index, place.control) != 0 }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_remove_found(index: u32, control: u64) -> u32 {
    let (Some(table), Some(slot)) = (Table::get(), Element::at(index)) else { return 0 };
    u32::from(flow_table::remove_entry(&table, &Entry { slot, control: Control(control) }))
}

/// The number of the [`Location`] of the entry with this key.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_find(key: *const Tuple) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Tuple`, or is null.
    let (Some(key), Some(table)) = (unsafe { key.as_ref() }, Table::get()) else {
        return Location::Absent.number();
    };
    let location = match flow_table::find(&table, &table.places(key), key) {
        Some(entry) => Location::Slot(entry.slot.index),
        None if table.has_overflow() => Location::MayBeInOverflow,
        None => Location::Absent,
    };
    location.number()
}

/// Marks an entry in the filter, then inserts it if its key is new. No other code of the programs inserts entries.
#[inline(always)]
pub(crate) fn insert(key: &Tuple, flow: &Flow) -> Inserted {
    filter::mark(key, flow.flags);
    let inserted = Inserted::of(flow_insert(key, flow, 0)).or_else(|| {
        flow_make_room(key);
        Inserted::of(flow_insert(key, flow, 1))
    });
    inserted.unwrap_or(Inserted::Full)
}

/// Inserts an entry if its key is new. If no place is free and `anywhere` is not 0, the entry goes to the overflow. The
/// result is [`Inserted::number`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_insert(key: *const Tuple, flow: *const Flow, anywhere: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointers lead to initialised values, or are null.
    let (Some(key), Some(flow)) = (unsafe { (key.as_ref(), flow.as_ref()) }) else {
        return Inserted::number(Some(Inserted::Full));
    };
    let Some(table) = Table::get() else { return Inserted::number(Some(Inserted::Full)) };
    let places = table.places(key);
    let inserted = match flow_table::insert_free(&table, &places, key, flow) {
        None if anywhere != 0 => flow_table::insert_into_overflow(&table, &places, key, flow),
        None => return Inserted::number(None),
        Some(inserted) => inserted,
    };
    let inserted = match inserted {
        Insert::Inserted(_) | Insert::Overflowed => Inserted::New,
        Insert::Exists => {
            await_entry(key);
            Inserted::Exists
        }
        Insert::Full => Inserted::Full,
    };
    Inserted::number(Some(inserted))
}

/// Number of attempts to find an entry that another CPU is inserting. All attempts together take some microseconds; an
/// insertion takes about a tenth of a microsecond.
const ATTEMPTS: u32 = 64;

/// Waits until a lookup finds the entry that another CPU is inserting, but for at most [`ATTEMPTS`] lookups.
#[inline(always)]
fn await_entry(key: &Tuple) {
    for _ in 0..ATTEMPTS {
        if flow_find(key) != Location::Absent.number() {
            break;
        }
    }
}

/// Evicts an entry, if its flow may be evicted, from one of the places that an entry with this key could take.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_make_room(key: *const Tuple) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Tuple`, or is null.
    let (Some(key), Some(table)) = (unsafe { key.as_ref() }, Table::get()) else { return 0 };
    flow_table::make_room(&table, &mut Eviction, &table.places(key));
    1
}

/// Replaces the flow of an entry; returns false if there is no such entry.
#[inline(always)]
pub(crate) fn replace(key: &Tuple, flow: &Flow) -> bool {
    filter::mark(key, flow.flags);
    flow_replace(key, flow) != 0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_replace(key: *const Tuple, flow: *const Flow) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointers lead to initialised values, or are null.
    let (Some(key), Some(flow)) = (unsafe { (key.as_ref(), flow.as_ref()) }) else { return 0 };
    let Some(table) = Table::get() else { return 0 };
    u32::from(!matches!(flow_table::replace(&table, &table.places(key), key, flow), Replace::Absent))
}

/// Removes the entry with this key; returns whether this call did. Of several calls at the same time, only one removes
/// the entry.
#[inline(always)]
pub(crate) fn remove(key: &Tuple) -> bool {
    flow_remove(key) != 0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_remove(key: *const Tuple) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Tuple`, or is null.
    let (Some(key), Some(table)) = (unsafe { key.as_ref() }, Table::get()) else { return 0 };
    u32::from(flow_table::remove(&table, &table.places(key), key))
}

/// The element of `FLOWS` with this index; no other function looks up elements of `FLOWS`.
#[inline(always)]
fn slot(index: u32) -> Option<*mut Slot> {
    FLOWS.get_ptr_mut(index).map(|mut slot| {
        // SAFETY: the pointer stays the same. LLVM must not compute the address of a field before it knows that there
        // is a slot: the verifier refuses that. (A block without instruction yields line numbers that the kernel
        // refuses.)
        unsafe { asm!("{0} += 0", inout(reg) slot, options(nomem, nostack, preserves_flags)) };
        slot
    })
}
