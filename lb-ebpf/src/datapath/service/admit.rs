//! Whether a flow may begin: with this packet, on this node, from this client.

use aya_ebpf::btf_maps::lpm_trie::Key;
use lb_common::{Address, Service, SourceRange, handover::OVER};
use lb_ebpf::{
    parse::Packet,
    rules::admission::{self, Admission},
};

use crate::datapath::{
    context::HookContext,
    maps::{HANDOVER, SOURCE_RANGES},
    settings,
};

/// Whether a flow may begin with a packet like this one: [`admission::first_packet`].
#[inline(always)]
pub(crate) fn first_packet(context: &HookContext, packet: &Packet, service: &Service) -> Admission {
    let mode = HANDOVER.get(0).copied().unwrap_or(OVER);
    let client = &packet.tuple.source;
    let is_denied = || settings::is_denied(client);
    let is_internal = || settings::is_internal(context, client);
    admission::first_packet(mode, packet.body, &packet.segment, service, is_denied, is_internal)
}

/// Whether the service lets this packet begin a flow; `service` is the record for the client.
#[inline(always)]
pub(crate) fn packet(packet: &Packet, service: &Service) -> Admission {
    let in_source_ranges = || is_in_source_range(service.id, &packet.tuple.source);
    admission::packet(&packet.segment, packet.tuple.protocol, service, in_source_ranges)
}

#[inline(never)]
pub(crate) fn is_in_source_range(service: u32, client: &Address) -> bool {
    SOURCE_RANGES.get(&Key::new(SourceRange::BITS, SourceRange::new(service, *client))).is_some()
}
