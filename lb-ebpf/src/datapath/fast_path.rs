//! The way of nearly every packet through the tc programs: its headers are plain, and it belongs to a flow that goes on, or to
//! none.
//!
//! Such a packet is never written down. Whatever else there is takes the slow path, which decides the same.

use lb_common::Outcome;
use lb_ebpf::parse::{Layer, Packet, parse_plain};

use super::{
    Hook,
    flow::conntrack,
    forward::{self, BY_ROUTE, decapsulate},
    service, settings,
    skb::Skb,
};

/// What the fast path says of a packet that has to take the long one.
pub(super) const NOT_PLAIN: Outcome = Outcome::Malformed;
/// The same, of a plain packet, which is written down, and of which it is known that it has no flow.
pub(super) const NO_FLOW: Outcome = Outcome::NewFlow;
/// The same, of a plain packet that has a flow.
pub(super) const OF_A_TURN: Outcome = Outcome::ConntrackFull;

/// Decides about a packet, or says that it has to take the slow path.
#[inline(never)]
pub(super) fn process(skb: &mut Skb, packet: &mut Packet, hook: Hook) -> Outcome {
    if skb.layer != Layer::Ethernet {
        return NOT_PLAIN;
    }
    let Ok(plain) = parse_plain(skb) else { return NOT_PLAIN };
    match conntrack::lookup(&plain.tuple) {
        Some(flow) if !plain.segment.is_syn_or_rst() => match forward::packet(skb, &plain, flow, hook) {
            Err(BY_ROUTE) => {
                *packet = plain;
                OF_A_TURN
            }
            Ok(outcome) | Err(outcome) => outcome,
        },
        None if hook == Hook::Egress => Outcome::NoService,
        None if has_no_service(&plain) && !decapsulate::may_be_tunnel(Outcome::NoService, &plain) => {
            Outcome::NoService
        }
        known => {
            *packet = plain;
            if known.is_some() { OF_A_TURN } else { NO_FLOW }
        }
    }
}

/// Whether neither a service nor the range of cluster IPs has the destination.
#[inline(always)]
fn has_no_service(packet: &Packet) -> bool {
    !service::exists(&packet.tuple) && !settings::is_in_service_range(&packet.tuple.destination)
}
