//! Flows whose backend is on another node and answers the client directly: their packets go there in a tunnel, untouched.
//!
//! Such a flow has one entry, since nothing comes back this way. What leaves is sent on as packets of routed flows are, by
//! the route to the backend. The other end is `decapsulate`.

use aya_ebpf::bindings::{
    BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6, BPF_F_ADJ_ROOM_ENCAP_L4_UDP,
    BPF_F_ADJ_ROOM_FIXED_GSO, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
};
use lb_common::{
    Backend, Outcome, backend_flags,
    conntrack::{Flow, flow_flags},
    settings_flags,
};
use lb_ebpf::{
    forward::tunnel::{self, Outer},
    parse::{
        Body, Headers, Packet,
        frame::{Frame as _, lengths},
    },
    reject::{time_exceeded, too_big},
};

use super::routed;
use crate::datapath::{
    flow::{
        conntrack,
        create::{FlowSetup, Request},
        masquerade,
    },
    fragments,
    maps::scratch,
    reject, rewrite, settings,
    skb::Skb,
};

/// Makes the flow that begins one through a tunnel, if it is to be one: to the peer that has the backend, from a client that
/// is answered directly.
#[inline(always)]
pub(in crate::datapath) fn begin(setup: &mut FlowSetup, request: &Request, backend: &Backend) -> bool {
    request.direct && backend.flags & backend_flags::PEER != 0 && prepare(setup)
}

/// What leaves the node; false as long as the node does not know from which address.
#[inline(never)]
fn prepare(setup: &mut FlowSetup) -> bool {
    let is_v4 = setup.from.source.is_v4();
    let (Some(settings), Ok(source)) = (settings::current(), masquerade::fallback(is_v4)) else {
        return false;
    };
    setup.to.source = source;
    setup.to.source_port = tunnel::source_port(&setup.from);
    setup.way = flow_flags::ROUTED | flow_flags::TUNNEL;
    if settings.flags & settings_flags::GUE != 0 {
        setup.way |= flow_flags::GUE;
    }
    true
}

/// Octets by which packets of the flow grow.
#[inline(always)]
pub(in crate::datapath) fn overhead(flow: &Flow) -> u32 {
    tunnel::overhead(flow.to.destination.is_v4(), flow.flags & flow_flags::GUE != 0)
}

/// That of a packet which goes through a tunnel, where it begins a flow or goes on.
#[inline(always)]
pub(in crate::datapath) fn outcome(outcome: Outcome) -> Outcome {
    if matches!(outcome, Outcome::NewRoutedFlow) { Outcome::NewTunnelledFlow } else { Outcome::Tunnelled }
}

/// Sends a packet of such a flow to its backend's node.
#[inline(never)]
pub(in crate::datapath) fn forward(skb: &mut Skb, packet: &Packet, flow: &mut Flow) -> Outcome {
    try_forward(skb, packet, flow).unwrap_or_else(|early| early)
}

#[inline(always)]
fn try_forward(skb: &mut Skb, packet: &Packet, flow: &mut Flow) -> Result<Outcome, Outcome> {
    let mtu = routed::way_out(skb, &flow.to)?;
    conntrack::observe(packet, flow);
    fragments::remember(packet);
    let is_v4 = packet.headers.is_v4;
    if routed::hops_left(skb, &packet.headers)? <= 1 {
        return reject::icmp_error(skb, packet, &time_exceeded(is_v4), Outcome::TimeExceeded);
    }
    let room = mtu.saturating_sub(overhead(flow));
    if mtu != 0 && skb.largest(packet) > room {
        if packet.body == Body::LaterFragment {
            // There is nothing in it by which its sender would know what an answer is about; the first one was answered.
            return Err(Outcome::NoRoute);
        }
        return reject::icmp_error(skb, packet, &too_big(is_v4, room), Outcome::TooBig);
    }
    encapsulate(skb, &packet.headers, flow)?;
    Ok(Outcome::Tunnelled)
}

/// Sends an ICMP error to the backend's node, about what the backend has sent: in answer to the flow that `icmp` has found.
#[inline(never)]
pub(in crate::datapath) fn send_error(skb: &mut Skb, headers: &Headers) -> Outcome {
    try_send_error(skb, headers).unwrap_or_else(|early| early)
}

#[inline(always)]
fn try_send_error(skb: &mut Skb, headers: &Headers) -> Result<Outcome, Outcome> {
    let flow = conntrack::lookup(&scratch()?.of_error).ok_or(Outcome::UnknownIcmpError)?;
    routed::way_out(skb, &flow.to)?;
    if routed::hops_left(skb, headers)? <= 1 {
        // Nobody answers an error with an error.
        return Err(Outcome::NoRoute);
    }
    encapsulate(skb, headers, flow)?;
    Ok(Outcome::Tunnelled)
}

/// Puts the headers of the tunnel before the packet. Checksums that are left to the device stay so, and so do the segments
/// that it is to make.
#[inline(always)]
fn encapsulate(skb: &mut Skb, headers: &Headers, flow: &Flow) -> Result<(), Outcome> {
    rewrite::take_hop(skb, headers)?;
    let start = *skb.header::<[u8; 8]>(headers.l3)?;
    let [a, b, c, d, ..] = start;
    let outer = Outer::new(flow, [a, b, c, d], tunnel::length(&start, headers.is_v4));
    make_room(skb, overhead(flow), headers.is_v4, outer.is_gue())?;
    let mut end = headers.l3;
    if headers.is_v4 {
        skb.store_anew(end, &outer.ipv4())?;
        end += lengths::IPV4;
    } else {
        skb.store_anew(end, &outer.ipv6())?;
        end += lengths::IPV6;
    }
    if outer.is_gue() { skb.store_anew(end, &outer.udp()) } else { Ok(()) }
}

#[inline(always)]
fn make_room(skb: &mut Skb, octets: u32, is_v4: bool, is_gue: bool) -> Result<(), Outcome> {
    let network = if is_v4 { BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 } else { BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 };
    let transport = if is_gue { BPF_F_ADJ_ROOM_ENCAP_L4_UDP } else { 0 };
    let flags = u64::from(network | transport | BPF_F_ADJ_ROOM_FIXED_GSO);
    skb.ctx.adjust_room(octets as i32, BPF_ADJ_ROOM_MAC, flags).map_err(|_| Outcome::RewriteFailed)
}
