//! Whether a flow may begin: with this packet, on this node, from this client.

use aya_ebpf::btf_maps::lpm_trie::Key;
use lb_common::{Address, Outcome, Service, SourceRange, handover::OVER};
use lb_ebpf::{
    parse::{Body, Packet},
    rules::admission::{self, Admission},
};

use crate::datapath::maps::{HANDOVER, SOURCE_RANGES};

/// Leaves a packet to the programs of an earlier map layout, which run next on the hook, if its flow may be in their
/// maps.
#[inline(always)]
pub(crate) fn handover(packet: &Packet) -> Result<(), Outcome> {
    let mode = HANDOVER.get(0).copied().unwrap_or(OVER);
    let connection = matches!(packet.body, Body::Tcp | Body::Sctp);
    if admission::is_left_to_earlier(mode, connection, &packet.segment) {
        return Err(Outcome::LeftToEarlier);
    }
    Ok(())
}

/// Checks whether a flow may begin with this packet.
#[inline(always)]
pub(crate) fn first_packet(packet: &Packet, service: &Service) -> Result<(), Outcome> {
    match packet.body {
        // The first fragment was not translated, so this one must not be.
        Body::LaterFragment => Err(Outcome::UnknownFragment),
        Body::Tcp | Body::Sctp => {
            admission::first_segment(&packet.segment, service).allow(packet.tuple.protocol)
        }
        Body::Udp | Body::IcmpError | Body::Echo => Ok(()),
    }
}

/// Whether the service accepts packets of this client; `service` is the record for the client.
#[inline(always)]
pub(crate) fn client(service: &Service, client: &Address) -> Admission {
    admission::packets_of(service, || is_in_source_range(service.id, client))
}

#[inline(never)]
pub(crate) fn is_in_source_range(service: u32, client: &Address) -> bool {
    SOURCE_RANGES.get(&Key::new(SourceRange::BITS, SourceRange::new(service, *client))).is_some()
}
