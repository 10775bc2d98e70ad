//! Routed flows: client and backend are both beyond the wire, so the node is only a router between them.
//!
//! A masqueraded flow whose packets come in and go out through wire devices needs neither sockets nor the stack. VIP
//! and client are exchanged for backend and node in one step where packets enter, and packets leave by the route that
//! the kernel would take. One pair of entries does it. The XDP program serves such packets before there is an skb.
//! This module serves those that XDP passes on: fragments, options that need the stack, neighbours that are not
//! resolved yet.

use aya_ebpf::bindings::{BPF_FIB_LOOKUP_SKIP_NEIGH, BPF_FIB_LOOKUP_SRC};
use lb_common::{
    Address, Outcome,
    conntrack::{Flow, NextHop, Tuple},
};
use lb_ebpf::{
    parse::{Body, Headers, Packet, frame::Frame as _},
    reject::{time_exceeded, too_big},
    rules::forwarding,
};

use super::{
    next_hop,
    route::{self, ANY_LENGTH, Found},
    tunnel,
};
use crate::datapath::{
    context::HookContext,
    flow::{
        conntrack,
        masquerade::{self, NO_ADDRESS},
    },
    fragments, outcome_of, reject, rewrite,
    skb::{Exit, Skb},
};

/// The node's address for a flow whose packets become `to`, if it can be routed: its packets come in and go out
/// through wires, and the way out takes every packet that the way in does. Else [`NO_ADDRESS`]. Its first packet uses
/// `next_hop`, which this lookup resolves.
#[inline(never)]
pub(crate) fn source(context: &HookContext, to: &Tuple, next_hop: &mut NextHop) -> Address {
    let entrance = next_hop::device(context.device);
    if !forwarding::is_wire(&entrance) {
        return NO_ADDRESS;
    }
    let length = u16::try_from(entrance.mtu).unwrap_or(u16::MAX);
    let found = route::lookup(context, to, length, BPF_FIB_LOOKUP_SRC);
    match found {
        Found::Route | Found::WithoutNeighbour => {}
        Found::TooNarrow | Found::Nothing => return NO_ADDRESS,
    }
    next_hop::note(found, next_hop, conntrack::now());
    let Ok(route) = route::found() else { return NO_ADDRESS };
    if !forwarding::is_routed(&entrance, &next_hop::device(route.device)) {
        return NO_ADDRESS;
    }
    match route.source() {
        Some(source) => source,
        None => masquerade::fallback(to.destination.is_v4()).unwrap_or(NO_ADDRESS),
    }
}

/// Sends on a packet of a routed flow: translated, or in the tunnel of its flow.
#[inline(never)]
pub(crate) fn forward(skb: &mut Skb, packet: &Packet, flow: &mut Flow) -> Outcome {
    outcome_of(|| {
        let mtu = resolve_route(skb, &flow.to)?;
        conntrack::observe(packet, flow);
        fragments::remember(packet);
        let is_v4 = packet.headers.is_v4;
        if hops_left(skb, &packet.headers)? <= 1 {
            return reject::icmp_error(skb, packet, &time_exceeded(is_v4), Outcome::TimeExceeded);
        }
        let overhead = if flow.is_tunnelled() { tunnel::overhead(flow) } else { 0 };
        let room = mtu.saturating_sub(overhead);
        if mtu != 0 && skb.largest(packet) > room {
            if flow.is_tunnelled() && packet.body == Body::LaterFragment {
                // Its sender could not tell what an answer is about; the first fragment was answered.
                return Err(Outcome::NoRoute);
            }
            return reject::icmp_error(skb, packet, &too_big(is_v4, room), Outcome::TooBig);
        }
        if flow.is_tunnelled() {
            tunnel::encapsulate(skb, &packet.headers, flow)?;
            return Ok(Outcome::Tunnelled);
        }
        rewrite::packet(skb, packet, flow, 1)?;
        Ok(Outcome::Routed)
    })
}

/// Finds the device through which packets leave that become `to`; returns the MTU on that way, or 0 if the kernel
/// does not report it.
#[inline(always)]
pub(crate) fn resolve_route(skb: &mut Skb, to: &Tuple) -> Result<u32, Outcome> {
    let found = route::lookup(&skb.context(), to, ANY_LENGTH, BPF_FIB_LOOKUP_SKIP_NEIGH);
    if found == Found::Nothing {
        return Err(Outcome::NoRoute);
    }
    let route = route::found()?;
    skb.exit = Exit::neighbour(route.device);
    // Kernels before 6.3 cannot skip the neighbour, and report no MTU without one.
    Ok(if found == Found::WithoutNeighbour { 0 } else { u32::from(route.mtu()) })
}

/// The hop limit of the packet, this hop included.
#[inline(always)]
pub(crate) fn hops_left(skb: &Skb, headers: &Headers) -> Result<u8, Outcome> {
    let at = headers.l3 + if headers.is_v4 { 8 } else { 7 };
    let [left, _] = *skb.header::<[u8; 2]>(at)?;
    Ok(left)
}
