//! The fast path handles nearly every packet: one with plain headers that belongs to no flow, or to a flow that neither
//! begins nor ends with it.
//!
//! The fast path parses such a packet into registers and never stores it. The slow path handles all other packets by
//! the same rules.

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
/// It fits into one register, which is all that a subprogram returns: variants without a field are values that
/// [`Outcome`] does not use.
#[derive(Clone, Copy)]
pub(super) enum FastPath {
    /// The fast path has decided about the packet: the caller must neither parse nor count it again.
    Done(Outcome),
    /// The headers are unusual or truncated: the slow path has to parse them.
    NotPlain,
    /// The fast path has parsed and stored the packet; no flow has its tuple.
    NoFlow,
    /// The fast path has parsed and stored the packet; the flow with its tuple begins or ends with it, or needs a
    /// route.
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
