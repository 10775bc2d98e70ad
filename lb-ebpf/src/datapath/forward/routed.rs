//! Routed flows: client and backend are both beyond the wire, so the node is a router between them and nothing else.
//!
//! A masqueraded flow whose packets come in and go out through wire devices needs neither sockets nor the stack: VIP and
//! client are exchanged for backend and node in one step where packets enter, and packets leave by the route that the
//! kernel would take. One pair of entries does it. The XDP program serves such packets before there is an skb; what it
//! leaves alone (fragments, options that need the stack, neighbours that are not known yet) takes the same way here.

use aya_ebpf::bindings::{BPF_FIB_LOOKUP_SKIP_NEIGH, BPF_FIB_LOOKUP_SRC};
use lb_common::{
    Address, DeviceInfo, Outcome,
    conntrack::{Flow, Tuple},
    device_flags,
};
use lb_ebpf::{
    parse::{Headers, Packet, frame::Frame as _},
    reject::{time_exceeded, too_big},
};

use super::{
    next_hop,
    route::{self, Found},
    tunnel,
};
use crate::datapath::{
    context::HookContext,
    flow::{conntrack, masquerade},
    fragments,
    maps::scratch,
    reject, rewrite,
    skb::{Exit, Skb},
};

/// The device, if it is a wire.
#[inline(always)]
fn wire(device: u32) -> Option<DeviceInfo> {
    Some(next_hop::device(device)).filter(|device| device.flags & device_flags::WIRE != 0)
}

/// The node's address for a flow whose packets become `to`, if it is to be a routed one: it comes in and goes out through
/// wires, and the way out takes whatever the way in does. Else [`masquerade::NOBODY`].
#[inline(never)]
pub(in crate::datapath) fn source(context: &HookContext, to: &Tuple) -> Address {
    try_source(context, to).unwrap_or(masquerade::NOBODY)
}

#[inline(always)]
fn try_source(context: &HookContext, to: &Tuple) -> Option<Address> {
    let entrance = wire(context.device)?;
    let length = u16::try_from(entrance.mtu).unwrap_or(u16::MAX);
    let found = route::look_up(context, to, length, BPF_FIB_LOOKUP_SRC);
    match found {
        Found::Route | Found::WithoutNeighbour => {}
        Found::TooNarrow | Found::Nothing => return None,
    }
    // The first packet need not ask again.
    next_hop::note(found, &mut scratch().ok()?.setup.hop, conntrack::now());
    let route = route::found().ok()?;
    // Replies, too, must fit.
    if wire(route.device)?.mtu > entrance.mtu {
        return None;
    }
    match route.source() {
        Some(source) => Some(source),
        None => masquerade::fallback(to.destination.is_v4()).ok(),
    }
}

/// Translates a packet of a routed flow and sends it on.
#[inline(never)]
pub(in crate::datapath) fn forward(skb: &mut Skb, packet: &Packet, flow: &mut Flow) -> Outcome {
    if flow.is_tunnelled() {
        return tunnel::forward(skb, packet, flow);
    }
    try_forward(skb, packet, flow).unwrap_or_else(|early| early)
}

#[inline(always)]
fn try_forward(skb: &mut Skb, packet: &Packet, flow: &mut Flow) -> Result<Outcome, Outcome> {
    let mtu = way_out(skb, &flow.to)?;
    conntrack::observe(packet, flow);
    fragments::remember(packet);
    let is_v4 = packet.headers.is_v4;
    if hops_left(skb, &packet.headers)? <= 1 {
        return reject::icmp_error(skb, packet, &time_exceeded(is_v4), Outcome::TimeExceeded);
    }
    if mtu != 0 && skb.largest(packet) > mtu {
        return reject::icmp_error(skb, packet, &too_big(is_v4, mtu), Outcome::TooBig);
    }
    rewrite::packet(skb, packet, flow, 1)?;
    Ok(Outcome::Routed)
}

/// Finds the device through which packets leave that become `to`; the MTU on that way, or 0 where the kernel does not tell.
#[inline(always)]
pub(in crate::datapath) fn way_out(skb: &mut Skb, to: &Tuple) -> Result<u32, Outcome> {
    // So short that it always fits: what we want is to be told the MTU.
    const ANY: u16 = 1;
    let found = route::look_up(&skb.context(), to, ANY, BPF_FIB_LOOKUP_SKIP_NEIGH);
    if found == Found::Nothing {
        return Err(Outcome::NoRoute);
    }
    let route = route::found()?;
    skb.exit = Exit::neighbour(route.device);
    // Before Linux 6.3 nobody skips the neighbour, and without one the MTU is not told.
    Ok(if found == Found::WithoutNeighbour { 0 } else { u32::from(route.mtu()) })
}

/// Hops that the packet may still go, the one from here included.
#[inline(always)]
pub(in crate::datapath) fn hops_left(skb: &Skb, headers: &Headers) -> Result<u8, Outcome> {
    let at = headers.l3 + if headers.is_v4 { 8 } else { 7 };
    let [left, _] = *skb.header::<[u8; 2]>(at)?;
    Ok(left)
}

/// Sends a translated ICMP error about a packet of a routed flow on to `destination`.
#[inline(always)]
pub(in crate::datapath) fn send_error(skb: &mut Skb, to: &Tuple) -> Result<Outcome, Outcome> {
    way_out(skb, to)?;
    Ok(Outcome::RoutedIcmpError)
}
