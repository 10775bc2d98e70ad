//! Fragments: only the first fragment of a datagram has the ports. Behind IPv6 options, only the first one shows the
//! protocol.

use lb_common::{FragmentKey, FragmentPorts, Outcome, conntrack::Tuple};
use lb_ebpf::parse::{Packet, Part};

use super::{clock::now, maps::FRAGMENTS};

/// Sets ports and transport protocol of a later fragment to those of the first fragment of its datagram.
///
/// # Errors
///
/// [`Outcome::UnknownFragment`] if the first fragment belonged to no flow, or has not arrived yet.
#[inline(always)]
pub(super) fn complete(packet: &mut Packet) -> Result<(), Outcome> {
    let known = packet.fragment.part != Part::Later || find(packet);
    if known { Ok(()) } else { Err(Outcome::UnknownFragment) }
}

#[inline(never)]
fn find(packet: &mut Packet) -> bool {
    // SAFETY: the memory of an element stays mapped while the program runs, and the value is copied at once. An LRU
    // map may reuse the element only for another fragmented datagram.
    match unsafe { FRAGMENTS.get(&key(packet)) } {
        Some(ports) if ports.is_valid(now()) => {
            packet.tuple.source_port = ports.source;
            packet.tuple.destination_port = ports.destination;
            packet.tuple.protocol = ports.protocol;
            true
        }
        Some(_) | None => false,
    }
}

/// Remembers the ports of a first fragment for the fragments that follow.
#[inline(always)]
pub(super) fn remember(packet: &Packet) {
    if packet.fragment.part == Part::First {
        insert(packet);
    }
}

#[inline(never)]
fn insert(packet: &Packet) {
    let Tuple { source_port, destination_port, protocol, .. } = packet.tuple;
    let ports = FragmentPorts::new(source_port, destination_port, protocol, now());
    // An LRU map evicts another entry if it is full. If the insertion fails all the same, later fragments count as
    // unknown.
    FRAGMENTS.insert(&key(packet), &ports, 0).unwrap_or_default();
}

#[inline(always)]
fn key(packet: &Packet) -> FragmentKey {
    let tuple = &packet.tuple;
    FragmentKey::new(tuple.source, tuple.destination, packet.fragment.identification, tuple.protocol)
}
