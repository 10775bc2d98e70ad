//! Whether a flow may begin: with this packet, on this node, from this client.

use aya_ebpf::btf_maps::lpm_trie::Key;
use lb_common::{Address, Outcome, Service, SourceRange, handover, service_flags};
use lb_ebpf::parse::{Body, Packet};

use crate::datapath::maps::{HANDOVER, SOURCE_RANGES};

/// Leaves to the programs of an earlier layout, which are next on the hook, the packets that they may have flows of:
/// see [`handover`].
#[inline(always)]
pub(crate) fn handover(packet: &Packet) -> Result<(), Outcome> {
    let has_turns = matches!(packet.body, Body::Tcp | Body::Sctp);
    match HANDOVER.get(0) {
        Some(&handover::EARLIER_CREATES_FLOWS) => Err(Outcome::LeftToEarlier),
        Some(&handover::CREATES_FLOWS) if has_turns && !packet.segment.is_syn() => {
            Err(Outcome::LeftToEarlier)
        }
        _ => Ok(()),
    }
}

/// Whether a flow may begin with this packet.
///
/// Segments in the middle of a connection may begin one: the entries of the connection may be lost, or on another
/// node. But connections of the node itself and those that netfilter masquerades use ports of the node address as
/// well. There only a SYN can be for the service.
#[inline(always)]
pub(crate) fn first_packet(packet: &Packet, service: &Service) -> Result<(), Outcome> {
    match packet.body {
        // Its first fragment was not translated, so this one must not be.
        Body::LaterFragment => Err(Outcome::UnknownFragment),
        Body::Tcp | Body::Sctp if service.requires_syn() && !packet.segment.is_syn() => {
            Err(Outcome::NoService)
        }
        Body::Tcp | Body::Sctp if packet.segment.is_rst() => Err(Outcome::StrayReset),
        Body::Tcp | Body::Udp | Body::Sctp | Body::IcmpError | Body::Echo => Ok(()),
    }
}

/// Whether the service accepts this client.
#[inline(always)]
pub(crate) fn client(service: &Service, client: &Address) -> Result<(), Outcome> {
    if service.flags & service_flags::SOCKETS_ONLY != 0 {
        return Err(Outcome::NoService);
    }
    if service.flags & service_flags::SOURCE_RANGES != 0 && !is_in_source_range(service.id, client) {
        return Err(Outcome::SourceNotAllowed);
    }
    if service.backends_count == 0 && service.flags & service_flags::DROP_WITHOUT_BACKENDS != 0 {
        return Err(Outcome::NoLocalBackend);
    }
    Ok(())
}

#[inline(never)]
pub(crate) fn is_in_source_range(service: u32, client: &Address) -> bool {
    SOURCE_RANGES.get(&Key::new(SourceRange::BITS, SourceRange::new(service, *client))).is_some()
}
