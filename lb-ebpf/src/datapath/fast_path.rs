//! The fast path: nearly every packet. Its headers are plain, and it belongs to a flow that neither begins nor ends
//! with it, or to none.
//!
//! Such a packet is parsed into registers and never stored. The slow path takes all others, and decides the same.

use lb_common::Outcome;
use lb_ebpf::parse::{Layer, Packet, parse_plain};

use super::{
    context::Hook,
    flow::conntrack,
    forward::{self, Forwarded, decapsulate},
    service, settings,
    skb::Skb,
};

/// The result of the fast path.
///
/// One register, which is all that a subprogram returns: variants without a field are values that [`Outcome`] does
/// not use.
#[derive(Clone, Copy)]
pub(super) enum FastPath {
    /// The packet is decided about, whatever the outcome: it must not be looked at, or counted, once more.
    Done(Outcome),
    /// The headers are unusual or cut short: the slow path has to parse them.
    NotPlain,
    /// Parsed and stored: no flow has its tuple.
    NoFlow,
    /// Parsed and stored: a flow has its tuple, and begins or ends with it, or needs a route.
    HasFlow,
}

const _: () = assert!(size_of::<FastPath>() == size_of::<Outcome>());

/// Decides about a packet, or leaves it to the slow path.
#[inline(never)]
pub(super) fn process(skb: &mut Skb, packet: &mut Packet, hook: Hook) -> FastPath {
    if skb.layer != Layer::Ethernet {
        return FastPath::NotPlain;
    }
    let Some(plain) = parse_plain(skb) else { return FastPath::NotPlain };
    match conntrack::lookup(&plain.tuple) {
        Some(flow) if !plain.segment.is_syn_or_rst() => match forward::packet(skb, &plain, flow, hook) {
            Forwarded::Done(outcome) => FastPath::Done(outcome),
            Forwarded::NeedsRoute => {
                *packet = plain;
                FastPath::HasFlow
            }
        },
        None if hook == Hook::Egress => FastPath::Done(Outcome::NoService),
        None if has_no_service(&plain) && !decapsulate::may_be_tunnel(Outcome::NoService, &plain) => {
            FastPath::Done(Outcome::NoService)
        }
        known => {
            *packet = plain;
            if known.is_some() { FastPath::HasFlow } else { FastPath::NoFlow }
        }
    }
}

/// Whether the destination is neither a frontend nor in the range of cluster IPs.
#[inline(always)]
fn has_no_service(packet: &Packet) -> bool {
    !service::exists(&packet.tuple) && !settings::is_in_service_range(&packet.tuple.destination)
}
