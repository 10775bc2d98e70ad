//! Fragments: only the first fragment of a datagram has the ports. If IPv6 options follow the fragment header, only the
//! first fragment names the transport protocol.
//!
//! The programs record the ports and the protocol of a first fragment in `FRAGMENTS` until all fragments of the
//! datagram have been seen, for at most about 30 s. Later fragments that enter the node before the first one wait in
//! [`early`]. A translated fragment has the outcome of its flow: see
//! [`translate_at_tc`](super::forward::translate_at_tc).

mod early;

use aya_ebpf::bindings::__sk_buff;
use lb_common::{FragmentKey, FragmentedDatagram, Outcome, Span, conntrack::Tuple, protocol};
use lb_ebpf::{
    parse::{Packet, Part},
    rules::fragments::{Becomes, becomes},
};

use self::early::Held;
use super::{
    clock::now,
    context::Hook,
    maps::{ENDPOINT_NAMES, FRAGMENTS},
    service::vips,
    skb::Skb,
    words,
};

/// The point at which a program handles a fragment.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum At {
    /// The fragment enters the node.
    Ingress = 0,
    /// The fragment leaves the node.
    Egress = 1,
    /// The fragment enters the node in a tunnel. Such a fragment is not held: the node that sends into the tunnel holds
    /// fragments that arrive before the first fragment of their datagram, and sends them after the first fragment.
    Tunnel = 2,
}

impl From<Hook> for At {
    #[inline(always)]
    fn from(hook: Hook) -> Self {
        match hook {
            Hook::Ingress => Self::Ingress,
            Hook::Egress | Hook::Catch => Self::Egress,
        }
    }
}

/// Gives a later fragment the ports and the transport protocol of the first fragment of its datagram. Holds a later
/// fragment that may belong to a Service and that enters the node before the first fragment.
///
/// # Errors
///
/// [`Outcome::FragmentHeld`]; [`Outcome::FragmentDropped`]; or [`Outcome::UnknownFragment`] if the datagram is not
/// translated at this hook, or if its first fragment has not arrived and this fragment cannot be held.
#[inline(always)]
pub(super) fn complete(skb: &Skb, packet: &mut Packet, hook: Hook) -> Result<(), Outcome> {
    if packet.fragment.part != Part::Later {
        return Ok(());
    }
    match handle_later(skb, packet, At::from(hook)) {
        Later::Translated => Ok(()),
        Later::Held => Err(Outcome::FragmentHeld),
        Later::Dropped => Err(Outcome::FragmentDropped),
        Later::Unknown | Later::Untouched => Err(Outcome::UnknownFragment),
    }
}

/// As [`complete`], for a packet inside a tunnel; returns whether the packet has ports.
#[inline(always)]
pub(super) fn complete_inner(skb: &Skb, packet: &mut Packet) -> bool {
    packet.fragment.part != Part::Later || matches!(handle_later(skb, packet, At::Tunnel), Later::Translated)
}

/// The result of [`handle_later`].
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Later {
    /// `FRAGMENTS` has no valid entry for the datagram: its first fragment has not arrived, the datagram is complete,
    /// or the entry has expired or was evicted.
    Unknown = 0,
    /// The packet has the ports and the protocol of its datagram now.
    Translated = 1,
    /// The fragment passes: its datagram is not translated at this hook.
    Untouched = 2,
    /// The fragment waits for the first one.
    Held = 3,
    /// The fragment is dropped: the first fragment was dropped, or this fragment has waited and `FRAGMENTS` has no
    /// valid entry for its datagram any more, usually because the datagram is complete.
    Dropped = 4,
}

/// Handles a later fragment.
#[inline(always)]
fn handle_later(skb: &Skb, packet: &mut Packet, at: At) -> Later {
    match fragment_later(skb.ctx.skb.skb, packet, at as u32) {
        1 => Later::Translated,
        2 => Later::Untouched,
        3 => Later::Held,
        4 => Later::Dropped,
        _unknown => Later::Unknown,
    }
}

/// [`handle_later`], as a global function: the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn fragment_later(raw: *mut __sk_buff, packet: *mut Packet, at: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Packet`, or is null.
    let Some(packet) = (unsafe { packet.as_mut() }) else { return Later::Unknown as u32 };
    let skb = Skb::new_unknown(raw);
    let key = key(packet, at == At::Egress as u32);
    let later = match find(&skb, packet, &key) {
        Later::Unknown if at == At::Ingress as u32 => early(&skb, packet, &key),
        known => known,
    };
    later as u32
}

/// Handles a later fragment of an unknown datagram at ingress.
#[inline(always)]
fn early(skb: &Skb, packet: &mut Packet, key: &FragmentKey) -> Later {
    if !may_be_held(packet.tuple.protocol, key) {
        return Later::Unknown;
    }
    if early::has_waited(skb.ctx.skb.skb) {
        return Later::Dropped;
    }
    match early::hold(skb, packet, key) {
        Held::Yes => Later::Held,
        Held::No => Later::Unknown,
        // The first fragment has arrived meanwhile.
        Held::TakenBack => match find(skb, packet, key) {
            Later::Unknown => Later::Dropped,
            known => known,
        },
    }
}

/// Looks up the datagram of a later fragment, and records that the fragment has been seen. When all fragments have been
/// seen, the function deletes the datagram's entry in `FRAGMENTS`, so that the entry does not apply to another datagram
/// with the same identification.
#[inline(never)]
fn find(skb: &Skb, packet: &mut Packet, key: &FragmentKey) -> Later {
    let Some(datagram) = FRAGMENTS.get_ptr_mut(key) else { return Later::Unknown };
    // SAFETY: the memory of an element stays mapped while the program runs, and the value is copied at once. If the LRU
    // map reuses the element meanwhile, a write to `boundaries` changes the boundaries of another fragmented datagram,
    // and that datagram then seems incomplete.
    let (known, boundaries) = unsafe { (*datagram, &raw mut (*datagram).boundaries) };
    if !known.is_valid(now()) {
        return Later::Unknown;
    }
    if known.device == skb.context().device {
        let part = boundaries_of(skb, packet);
        // SAFETY: the pointer leads to an aligned word of an element, which stays mapped (see above). Programs change
        // this word only atomically.
        let before = unsafe { words::fetch_xor(boundaries, part) };
        if before ^ part == Span::WHOLE {
            // An error means that the entry is gone already: evicted, or deleted by another CPU.
            FRAGMENTS.remove(key).unwrap_or_default();
        }
    }
    match known.protocol {
        FragmentedDatagram::UNTOUCHED => return Later::Untouched,
        FragmentedDatagram::DROPPED => return Later::Dropped,
        _ => {}
    }
    packet.tuple.source_port = known.source;
    packet.tuple.destination_port = known.destination;
    packet.tuple.protocol = known.protocol;
    Later::Translated
}

/// [`Span::boundaries`] of a fragment; 0 if the boundaries are unknown: the datagram then seems incomplete.
#[inline(always)]
fn boundaries_of(skb: &Skb, packet: &Packet) -> u64 {
    packet.span(skb).map_or(0, Span::boundaries)
}

/// Whether a later fragment may belong to a Service, and its header names TCP or UDP. (The programs do not translate
/// fragments of SCTP.)
#[inline(always)]
fn may_be_held(protocol: u8, key: &FragmentKey) -> bool {
    matches!(protocol, protocol::TCP | protocol::UDP) && may_be_of_service(key)
}

/// Whether packets between these addresses may belong to a Service: the destination is a virtual address or an address
/// of the node, or the source is an endpoint. (The lookups use the addresses in the fragment's key, which is on the
/// stack. Linux 6.1 rejects a lookup if its key is in memory that a caller has passed to a global function.)
#[inline(always)]
fn may_be_of_service(key: &FragmentKey) -> bool {
    // SAFETY: the program does not read the element.
    vips::lookup(&key.destination).is_some() || unsafe { ENDPOINT_NAMES.get(&key.source) }.is_some()
}

/// Records the ports of a first fragment for the fragments that follow. At ingress, also makes the fragments that came
/// before it, which wait in [`early`], enter the node again.
///
/// # Errors
///
/// [`Outcome::RewriteFailed`] if the frame, which carried the waiting fragments meanwhile, could not be turned into the
/// first fragment again.
#[inline(always)]
pub(super) fn remember(skb: &mut Skb, packet: &Packet, hook: Hook) -> Result<(), Outcome> {
    if packet.fragment.part != Part::First || handle_first(skb, packet, At::from(hook), Becomes::Translated) {
        return Ok(());
    }
    Err(Outcome::RewriteFailed)
}

/// As [`remember`], for a packet that came in a tunnel.
#[inline(always)]
pub(super) fn remember_inner(skb: &mut Skb, packet: &Packet) {
    if packet.fragment.part == Part::First {
        handle_first(skb, packet, At::Tunnel, Becomes::Translated);
    }
}

/// Records the treatment of a datagram whose first fragment enters the node and gets no flow. If the first fragment
/// passes, the function also makes the fragments that came before it enter the node again. `outcome` is the outcome of
/// the first fragment. Returns `outcome`, or [`Outcome::RewriteFailed`] as [`remember`].
#[inline(always)]
pub(super) fn remember_outcome(skb: &mut Skb, packet: &Packet, hook: Hook, outcome: Outcome) -> Outcome {
    if hook.is_egress() || packet.fragment.part != Part::First {
        return outcome;
    }
    let Some(becomes) = becomes(outcome) else { return outcome };
    if handle_first(skb, packet, At::Ingress, becomes) { outcome } else { Outcome::RewriteFailed }
}

/// Handles a first fragment; returns false if the frame could not be turned into the first fragment again, as in
/// [`remember`].
#[inline(always)]
fn handle_first(skb: &mut Skb, packet: &Packet, at: At, becomes: Becomes) -> bool {
    fragment_first(skb.ctx.skb.skb, packet, at as u32, becomes as u32) != 0
}

/// [`handle_first`], as a global function: the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn fragment_first(raw: *mut __sk_buff, packet: *const Packet, at: u32, becomes: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Packet`, or is null.
    let Some(packet) = (unsafe { packet.as_ref() }) else { return 1 };
    let key = key(packet, at == At::Egress as u32);
    if becomes == Becomes::Untouched as u32 && !may_be_of_service(&key) {
        return 1;
    }
    let mut skb = Skb::new_unknown(raw);
    insert(&skb, packet, &key, becomes);
    let releases = at == At::Ingress as u32 && becomes != Becomes::Dropped as u32;
    u32::from(!releases || early::release(&mut skb, packet, &key))
}

/// Inserts an entry that says what happens to the other fragments of this datagram; `becomes` is a [`Becomes`].
#[inline(never)]
fn insert(skb: &Skb, packet: &Packet, key: &FragmentKey, becomes: u32) {
    let Tuple { source_port, destination_port, mut protocol, .. } = packet.tuple;
    let (mut boundaries, device) = (boundaries_of(skb, packet), skb.context().device);
    if becomes == Becomes::Untouched as u32 {
        protocol = FragmentedDatagram::UNTOUCHED;
    } else if becomes == Becomes::Dropped as u32 {
        // By now the buffer may hold the answer to the packet, or the packet in a tunnel, so the boundaries may be
        // wrong.
        (protocol, boundaries) = (FragmentedDatagram::DROPPED, 0);
    }
    let datagram =
        FragmentedDatagram::new(source_port, destination_port, protocol, boundaries, now(), device);
    // An LRU map evicts another entry if it is full. If the insertion fails all the same, later fragments count as
    // unknown.
    FRAGMENTS.insert(key, &datagram, 0).unwrap_or_default();
}

#[inline(always)]
fn key(packet: &Packet, is_egress: bool) -> FragmentKey {
    let Tuple { source, destination, protocol, .. } = packet.tuple;
    FragmentKey::new(source, destination, packet.fragment.identification, protocol, is_egress)
}
