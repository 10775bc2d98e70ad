//! Fragments: only the first fragment of a datagram has the ports. Behind IPv6 options, only the first one shows the
//! protocol.
//!
//! The programs note in `FRAGMENTS` what a first fragment has shown, until the whole datagram was seen. Later fragments
//! that enter the node before the first one wait in [`early`].

mod early;

use aya_ebpf::bindings::__sk_buff;
use lb_common::{FragmentKey, FragmentedDatagram, Outcome, Span, conntrack::Tuple, protocol};
use lb_ebpf::parse::{Packet, Part};

use self::early::Held;
pub(super) use self::early::MAX_FRAME;
use super::{
    clock::now,
    context::Hook,
    maps::{ENDPOINT_NAMES, FRAGMENTS},
    service::vips,
    skb::Skb,
    words,
};

/// Where the program meets a fragment.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum At {
    /// It enters the node.
    Ingress = 0,
    /// It leaves the node.
    Egress = 1,
    /// It enters the node in a tunnel. The node at the other end has sent the fragments in order.
    Tunnel = 2,
}

impl From<Hook> for At {
    #[inline(always)]
    fn from(hook: Hook) -> Self {
        match hook {
            Hook::Ingress => Self::Ingress,
            Hook::Egress => Self::Egress,
        }
    }
}

/// Sets ports and transport protocol of a later fragment to those of the first fragment of its datagram. A fragment
/// that enters the node before the first one is held.
///
/// # Errors
///
/// [`Outcome::FragmentHeld`], or [`Outcome::UnknownFragment`] if the datagram is not translated here, or its first
/// fragment has not arrived and this one cannot be held.
#[inline(always)]
pub(super) fn complete(skb: &Skb, packet: &mut Packet, hook: Hook) -> Result<(), Outcome> {
    if packet.fragment.part != Part::Later {
        return Ok(());
    }
    match fragment_later(skb.ctx.skb.skb, packet, At::from(hook) as u32) {
        TRANSLATED => Ok(()),
        HELD => Err(Outcome::FragmentHeld),
        _unknown => Err(Outcome::UnknownFragment),
    }
}

/// As [`complete`], for a packet inside a tunnel; returns whether the packet has ports.
#[inline(always)]
pub(super) fn complete_inner(skb: &Skb, packet: &mut Packet) -> bool {
    packet.fragment.part != Part::Later
        || fragment_later(skb.ctx.skb.skb, packet, At::Tunnel as u32) == TRANSLATED
}

/// A result of [`fragment_later`]: the packet passes untouched.
const UNKNOWN: u32 = 0;
/// A result of [`fragment_later`]: the packet has its ports now.
const TRANSLATED: u32 = 1;
/// A result of [`fragment_later`]: the packet waits for the first fragment.
const HELD: u32 = 2;

/// Handles a later fragment, `at` an [`At`]. (A global function: the verifier checks it once.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn fragment_later(raw: *mut __sk_buff, packet: *mut Packet, at: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Packet`, or is null.
    let Some(packet) = (unsafe { packet.as_mut() }) else { return UNKNOWN };
    let skb = Skb::new_unknown(raw);
    let key = key(packet, at == At::Egress as u32);
    let mut known = find(&skb, packet, &key);
    if known == Known::No && at == At::Ingress as u32 && may_be_held(packet) {
        match early::hold(&skb, packet, &key) {
            Held::Yes => return HELD,
            Held::No => return UNKNOWN,
            // The first fragment has arrived meanwhile.
            Held::TakenBack => known = find(&skb, packet, &key),
        }
    }
    if known == Known::Translated { TRANSLATED } else { UNKNOWN }
}

/// What is known of the datagram of a later fragment.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Known {
    /// Nothing: the first fragment has not arrived, or the datagram is complete.
    No = 0,
    /// Its ports and protocol, which are now those of the packet.
    Translated = 1,
    /// It is not translated at this hook.
    Untouched = 2,
}

/// Looks up the datagram of a later fragment, and notes that the fragment has been seen. The datagram ends with the last
/// one, so that its entry does not apply to another datagram with the same identification.
#[inline(never)]
fn find(skb: &Skb, packet: &mut Packet, key: &FragmentKey) -> Known {
    let Some(datagram) = FRAGMENTS.get_ptr_mut(key) else { return Known::No };
    // SAFETY: the memory of an element stays mapped while the program runs, and the value is copied at once. An LRU map
    // may reuse the element only for another fragmented datagram, which then seems incomplete.
    let (known, boundaries) = unsafe { (*datagram, &raw mut (*datagram).boundaries) };
    if !known.is_valid(now()) {
        return Known::No;
    }
    if known.device == skb.context().device {
        let part = boundaries_of(skb, packet);
        // SAFETY: the pointer is that of an aligned word of an element, see above, which programs change atomically.
        let before = unsafe { words::fetch_xor(boundaries, part) };
        if before ^ part == Span::WHOLE {
            // An error means that the LRU map has evicted the entry.
            FRAGMENTS.remove(key).unwrap_or_default();
        }
    }
    if known.protocol == FragmentedDatagram::UNTOUCHED {
        return Known::Untouched;
    }
    packet.tuple.source_port = known.source;
    packet.tuple.destination_port = known.destination;
    packet.tuple.protocol = known.protocol;
    Known::Translated
}

/// [`Span::boundaries`] of a fragment; 0 if they are unknown, which makes the datagram seem incomplete.
#[inline(always)]
fn boundaries_of(skb: &Skb, packet: &Packet) -> u64 {
    packet.span(skb).map_or(0, Span::boundaries)
}

/// Whether a later fragment may be one of a Service, and its first fragment can show that.
#[inline(always)]
fn may_be_held(packet: &Packet) -> bool {
    matches!(packet.tuple.protocol, protocol::TCP | protocol::UDP) && may_be_of_service(&packet.tuple)
}

/// Whether packets between these addresses may belong to a Service: they are for a virtual address or the node, or from
/// an endpoint.
#[inline(always)]
fn may_be_of_service(tuple: &Tuple) -> bool {
    // SAFETY: the program does not read the element.
    vips::lookup(&tuple.destination).is_some() || unsafe { ENDPOINT_NAMES.get(&tuple.source) }.is_some()
}

/// Remembers the ports of a first fragment for the fragments that follow, and sends on those that came before it.
///
/// # Errors
///
/// [`Outcome::RewriteFailed`] if the packet is not what it was.
#[inline(always)]
pub(super) fn remember(skb: &mut Skb, packet: &Packet, hook: Hook) -> Result<(), Outcome> {
    if packet.fragment.part != Part::First || first(skb, packet, At::from(hook), true) {
        return Ok(());
    }
    Err(Outcome::RewriteFailed)
}

/// As [`remember`], for a packet that came in a tunnel.
#[inline(always)]
pub(super) fn remember_inner(skb: &mut Skb, packet: &Packet) {
    if packet.fragment.part == Part::First {
        first(skb, packet, At::Tunnel, true);
    }
}

/// Remembers that a datagram whose first fragment passes untouched is not translated where it enters the node, and sends
/// on the fragments that came before it. Returns the outcome of the packet, given that of a packet of no flow.
#[inline(always)]
pub(super) fn remember_untouched(skb: &mut Skb, packet: &Packet, hook: Hook, outcome: Outcome) -> Outcome {
    // Other packets that pass are no first fragments with ports, or were never parsed.
    let passes = matches!(outcome, Outcome::NoService | Outcome::OtherHook | Outcome::LeftToEarlier);
    if hook == Hook::Egress || !passes || packet.fragment.part != Part::First {
        return outcome;
    }
    if first(skb, packet, At::Ingress, false) { outcome } else { Outcome::RewriteFailed }
}

/// Handles a first fragment; returns false if the packet is not what it was.
#[inline(always)]
fn first(skb: &mut Skb, packet: &Packet, at: At, is_translated: bool) -> bool {
    fragment_first(skb.ctx.skb.skb, packet, at as u32, u32::from(is_translated)) != 0
}

/// [`first`], as a global function: the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn fragment_first(raw: *mut __sk_buff, packet: *const Packet, at: u32, is_translated: u32) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Packet`, or is null.
    let Some(packet) = (unsafe { packet.as_ref() }) else { return 1 };
    if is_translated == 0 && !may_be_of_service(&packet.tuple) {
        return 1;
    }
    let mut skb = Skb::new_unknown(raw);
    let key = key(packet, at == At::Egress as u32);
    insert(&skb, packet, &key, is_translated != 0);
    u32::from(at != At::Ingress as u32 || early::release(&mut skb, packet, &key))
}

#[inline(never)]
fn insert(skb: &Skb, packet: &Packet, key: &FragmentKey, is_translated: bool) {
    let Tuple { source_port, destination_port, protocol, .. } = packet.tuple;
    let protocol = if is_translated { protocol } else { FragmentedDatagram::UNTOUCHED };
    let (boundaries, device) = (boundaries_of(skb, packet), skb.context().device);
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
