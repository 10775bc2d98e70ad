//! Fragments that enter the node before the first one of their datagram.
//!
//! The program stores these fragments in a ring, where each new fragment replaces the oldest: no agent is needed, the
//! memory is bounded, and a flood of forged fragments displaces only other early fragments. Each slot has a control
//! word, which all CPUs change atomically:
//!
//! | control word | the slot |
//! |---|---|
//! | ticket, `HELD` | has the fragment with this ticket |
//! | ticket, `BUSY` | a CPU writes or reads it |
//! | ticket, `TAKEN` | had that fragment, or is empty (ticket 0) |
//!
//! Tickets count fragments. The fragments with the same hash form a list: `heads` has the ticket of the latest one, and
//! each slot has the ticket of the previous one. A list ends at the first slot that has been overwritten, since all
//! earlier slots of the list have been overwritten by then.
//!
//! No fragment waits twice: the copies of fragments that have waited are marked, and no marked packet waits. So each
//! packet that enters the node has at most one copy.
//!
//! No fragment stays in the ring if the first fragment of its datagram arrives on another CPU at the same time. The CPU
//! with the first fragment writes `FRAGMENTS`, then reads the list, and skips busy slots. The CPU with the early
//! fragment adds it to the list, marks its slot as held, then looks into `FRAGMENTS` again, and takes the fragment
//! back if the datagram has an entry by now.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_CSUM_LEVEL_RESET, BPF_F_INGRESS},
    btf_maps::Array,
    helpers::generated::{bpf_clone_redirect, bpf_csum_level, bpf_loop},
    macros::btf_map,
};
use lb_common::{FragmentKey, FragmentedDatagram, conntrack::Tick};
use lb_ebpf::parse::{Packet, bounds::clamped, frame::Frame as _};

use crate::datapath::{
    checksum::Checksum,
    clock::now,
    maps::{FLOW_TABLE, FRAGMENTS},
    scratch::{MAX_FRAME, scratch},
    skb::Skb,
    words::{compare_exchange, exchange, fetch_add},
};

/// Slots in the ring.
const SLOTS: u32 = 1024;
/// Number of lists, a power of two.
const LISTS: u64 = 4096;
/// The longest IP packet that is held, in bytes: enough for an MTU of 1,500, and it makes each slot 2 KB large.
const MAX_BYTES: u32 = 1984;
/// The most slots of a list that are visited. A datagram of 64 KB has 45 fragments of 1,500 bytes.
const MAX_VISITS: u32 = 128;

/// `skb->tc_index` of a copy of a fragment that has waited. The field keeps its value until the packet leaves the
/// machine, and packets from outside do not have this value. (Qdiscs that read the field read its lower bits.)
const RELEASED: u32 = 0x8000;

/// State of a slot, in the lowest bits of its control word.
mod state {
    pub(super) const TAKEN: u64 = 0;
    pub(super) const HELD: u64 = 1;
    pub(super) const BUSY: u64 = 2;
    pub(super) const BITS: u32 = 2;
}

/// A slot in the ring.
#[repr(C)]
struct RingSlot {
    control: u64,
    /// Ticket of the previous fragment in its list.
    previous: u64,
    key: FragmentKey,
    seen: Tick,
    /// Length of the IP packet in bytes.
    length: u32,
    packet: [u8; MAX_BYTES as usize],
}

const _: () = assert!(size_of::<RingSlot>() == 2048);

#[repr(C)]
struct Lists {
    /// Number of tickets given out so far.
    tickets: u64,
    heads: [u64; LISTS as usize],
}

#[btf_map]
static EARLY_FRAGMENTS: Array<RingSlot, { SLOTS as usize }> = Array::new();

#[btf_map]
static EARLY_LISTS: Array<Lists, 1> = Array::new();

/// The result of [`hold`].
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Held {
    /// The fragment does not wait: it is empty, truncated or too long, or other CPUs use its slot or keep changing its
    /// list.
    No = 0,
    /// The fragment waits for the first one.
    Yes = 1,
    /// The first fragment has arrived meanwhile, and the fragment waits no longer.
    TakenBack = 2,
}

#[inline(always)]
fn slot(ticket: u64) -> Option<*mut RingSlot> {
    EARLY_FRAGMENTS.get_ptr_mut(ticket as u32 % SLOTS)
}

/// The head of the list of a datagram. (The seed of the flow table is secret, so an attacker cannot fill the list of
/// another datagram.)
#[inline(always)]
fn head(lists: *mut Lists, key: &FragmentKey) -> Option<*mut u64> {
    let table = FLOW_TABLE.get_ptr(0)?;
    // SAFETY: the pointer is that of an array element, which lives as long as the program runs. The agent writes the
    // seed before it attaches a program, and never again.
    let list = (key.hash(unsafe { &(*table).seed }) % LISTS) as usize;
    // SAFETY: the pointer is that of an array element, which lives as long as the program runs, and the list is one of
    // `heads`.
    Some(unsafe { (&raw mut (*lists).heads).cast::<u64>().add(list) })
}

/// Stores a later fragment until the first one of its datagram enters the node, or another early fragment takes its
/// slot in the ring.
#[inline(always)]
pub(super) fn hold(skb: &Skb, packet: &Packet, key: &FragmentKey) -> Held {
    let (l3, length) = (packet.headers.l3, packet.length);
    if length == 0 || length > MAX_BYTES || l3 + length > skb.length() {
        return Held::No;
    }
    let Some(lists) = EARLY_LISTS.get_ptr_mut(0) else { return Held::No };
    let Some(head) = head(lists, key) else { return Held::No };
    // SAFETY: as in `head`; programs change the word atomically.
    let ticket = unsafe { fetch_add(&raw mut (*lists).tickets, 1) } + 1;
    let Some(slot) = slot(ticket) else { return Held::No };
    let (busy, held, taken) = controls(ticket);
    // SAFETY: the pointer is that of an array element, which lives as long as the program runs. Control words are
    // aligned and changed atomically. A CPU that has made a slot busy is the only one that writes the rest.
    unsafe {
        let control = &raw mut (*slot).control;
        let before = control.read_volatile();
        // If this CPU was interrupted after it took the ticket, a fragment with a higher ticket may have the slot
        // already, and keeps it.
        let is_mine = before & state::BUSY == 0 && before >> state::BITS < ticket;
        if !is_mine || !compare_exchange(control, before, busy) {
            return Held::No;
        }
        (*slot).key = *key;
        (*slot).seen = now();
        (*slot).length = length;
        let bytes = &mut (*slot).packet;
        if skb.load_bytes(l3, bytes, clamped::<1, MAX_BYTES>(length)).is_err() {
            exchange(control, taken);
            return Held::No;
        }
        if !add_to_list(head, slot, ticket) {
            exchange(control, taken);
            return Held::No;
        }
        exchange(control, held);
        // The exchange is a full barrier, so this lookup comes after it.
        if FRAGMENTS.get(key).is_some_and(|known| known.is_valid(now()))
            && compare_exchange(control, held, taken)
        {
            return Held::TakenBack;
        }
    }
    Held::Yes
}

/// The control words of a slot with this ticket: busy, held and taken.
#[inline(always)]
const fn controls(ticket: u64) -> (u64, u64, u64) {
    let word = ticket << state::BITS;
    (word | state::BUSY, word | state::HELD, word | state::TAKEN)
}

/// Makes a slot the head of a list. Fails if other CPUs add to the same list again and again.
///
/// # Safety
///
/// The pointers are those of array elements, and the caller has made the slot busy.
#[inline(always)]
unsafe fn add_to_list(head: *mut u64, slot: *mut RingSlot, ticket: u64) -> bool {
    for _ in 0..4 {
        // SAFETY: see above.
        unsafe {
            let latest = head.read_volatile();
            (&raw mut (*slot).previous).write_volatile(latest);
            if compare_exchange(head, latest, ticket) {
                return true;
            }
        }
    }
    false
}

/// The walk along a list.
struct Walk {
    skb: *mut __sk_buff,
    device: u32,
    l3: u32,
    /// The ticket of the slot to visit next.
    ticket: u64,
    key: FragmentKey,
    now: Tick,
    /// Length in bytes of the first fragment's frame while `SCRATCH` holds a copy of the frame; 0 while `SCRATCH` holds
    /// no copy.
    aside: u32,
}

/// Makes the early fragments of a datagram, whose first fragment is in `skb`, enter the node again, now after the first
/// one. For each of them, the function writes the fragment into the frame, and sends a copy of the frame into the
/// device. Then it restores the first fragment. If the frame cannot carry other packets, because the device is to
/// complete it (checksum, segments) or because it is longer than [`MAX_FRAME`], the early fragments stay in the ring.
///
/// Returns false if the frame could not be restored. (A subprogram, as is the insertion before it, so that their stack
/// frames do not add up.)
#[inline(never)]
pub(super) fn release(skb: &mut Skb, packet: &Packet, key: &FragmentKey) -> bool {
    let Some(ticket) = latest(key) else { return true };
    // If the device computes the checksum of the frame or cuts it into segments, the frame cannot carry other packets.
    let is_offloaded = skb.checksum() == Checksum::LeftToDevice || skb.segment_size().is_some();
    if is_offloaded || skb.length() as usize > MAX_FRAME {
        return true;
    }
    let (raw, l3, device) = (skb.ctx.skb.skb, packet.headers.l3, skb.context().device);
    let mut walk = Walk { skb: raw, device, l3, ticket, key: *key, now: now(), aside: 0 };
    let mark = mark(raw);
    set_mark(raw, RELEASED);
    // SAFETY: `step` has the signature that the kernel calls it with, and `walk` outlives the call and is not used
    // during it.
    unsafe { bpf_loop(MAX_VISITS, step as *mut _, (&raw mut walk).cast(), 0) };
    set_mark(raw, mark);
    walk.aside == 0 || restore(skb, walk.aside)
}

/// Whether the packet is a copy of a fragment that has waited.
#[inline(always)]
pub(super) fn has_waited(raw: *const __sk_buff) -> bool {
    mark(raw) == RELEASED
}

#[inline(always)]
fn mark(raw: *const __sk_buff) -> u32 {
    // SAFETY: the context is that of this program.
    unsafe { (&raw const (*raw).tc_index).read_volatile() }
}

#[inline(always)]
fn set_mark(raw: *mut __sk_buff, mark: u32) {
    // SAFETY: the context is that of this program, which may write this field of it.
    unsafe { (&raw mut (*raw).tc_index).write_volatile(mark) };
}

/// The ticket of the latest fragment in the list of a datagram; `None` if the list is empty.
#[inline(always)]
fn latest(key: &FragmentKey) -> Option<u64> {
    let lists = EARLY_LISTS.get_ptr_mut(0)?;
    // The head of the list must be read after the insertion into `FRAGMENTS`. An atomic operation ensures this order:
    // BPF has no other barrier before Linux 6.15.
    // SAFETY: as in `head`; programs change the word atomically.
    let ticket = unsafe { fetch_add(head(lists, key)?, 0) };
    let slot = slot(ticket)?;
    // SAFETY: the pointer is that of an array element, which lives as long as the program runs.
    let control = unsafe { (&raw const (*slot).control).read_volatile() };
    (ticket != 0 && control >> state::BITS == ticket).then_some(ticket)
}

/// Visits one slot; returns 1 to end the walk. The kernel calls this function, so the verifier checks it once.
extern "C" fn step(_index: u32, context: *mut core::ffi::c_void) -> i64 {
    // SAFETY: `release` gave `bpf_loop` a pointer to its own value, which nothing else uses during the call.
    let walk = unsafe { &mut *context.cast::<Walk>() };
    let ticket = walk.ticket;
    let Some(slot) = slot(ticket) else { return 1 };
    let (busy, held, taken) = controls(ticket);
    // SAFETY: as in `hold`. Key, length and bytes may be those of another fragment until this CPU has made the slot
    // busy, which works only while the ticket is the same.
    unsafe {
        let control = &raw mut (*slot).control;
        if ticket == 0 || control.read_volatile() >> state::BITS != ticket {
            return 1;
        }
        walk.ticket = (&raw const (*slot).previous).read_volatile();
        if !FragmentedDatagram::may_wait((*slot).seen, walk.now) {
            // This fragment is too old, and all previous ones of the list are even older.
            return 1;
        }
        if (*slot).key != walk.key || !compare_exchange(control, held, busy) {
            return 0;
        }
        let goes_on = send(walk, &(*slot).packet, (*slot).length);
        exchange(control, taken);
        i64::from(!goes_on)
    }
}

/// Sends a copy of the frame, with `packet` in place of the frame's own packet, into the device. If memory is short,
/// only this fragment is lost. Returns false if the frame cannot be set aside.
#[inline(always)]
fn send(walk: &mut Walk, packet: &[u8; MAX_BYTES as usize], length: u32) -> bool {
    let mut skb = Skb::new_unknown(walk.skb);
    if walk.aside == 0 {
        let Some(length) = set_aside(&skb) else { return false };
        walk.aside = length;
    }
    let length = clamped::<1, MAX_BYTES>(length);
    if skb.resize(walk.l3 + length).is_ok() && skb.store_bytes(walk.l3, packet, length).is_ok() {
        // SAFETY: the context is that of this program. If the queue is full, the fragment is lost, as in a full queue
        // of a device.
        let _result = unsafe { bpf_clone_redirect(walk.skb, walk.device, u64::from(BPF_F_INGRESS)) };
    }
    true
}

/// Copies the frame to `SCRATCH`; returns its length.
#[inline(always)]
fn set_aside(skb: &Skb) -> Option<u32> {
    let length = skb.length();
    if length == 0 || length as usize > MAX_FRAME {
        return None;
    }
    // The device may have verified the checksum of this packet. The result says nothing about the fragments that the
    // frame carries next, so the program makes the kernel drop the result.
    // SAFETY: the context is that of this program, and the helper does not move packet data.
    let _result = unsafe { bpf_csum_level(skb.ctx.skb.skb, u64::from(BPF_CSUM_LEVEL_RESET)) };
    let frame = scratch().ok()?.frame();
    skb.load_bytes(0, frame, clamped::<1, { MAX_FRAME as u32 }>(length)).ok()?;
    Some(length)
}

/// Restores the frame that was set aside.
#[inline(always)]
fn restore(skb: &mut Skb, length: u32) -> bool {
    let Ok(scratch) = scratch() else { return false };
    let length = clamped::<1, { MAX_FRAME as u32 }>(length);
    skb.resize(length).is_ok() && skb.store_bytes(0, scratch.frame(), length).is_ok()
}
