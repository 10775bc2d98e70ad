//! Direct forwarding: packets bypass the stack once the next hop is known.
//!
//! Packets of routed flows always may; all others only with `--forwarding direct`, because then the stack, above all
//! netfilter, does not see them between ingress and egress. Packets still go through the stack if their next hop is
//! unknown, they exceed the MTU, have no hops left, or have to be inspected.

use aya_ebpf::Global;
use lb_common::{
    Outcome,
    conntrack::{Flow, flow_flags, next_hop_flags},
};
use lb_ebpf::{
    parse::{Body, Packet, Part, frame::lengths},
    rewrite::FrameMut as _,
};

use crate::datapath::{
    clock,
    flow::conntrack,
    rewrite,
    route::next_hop,
    skb::{Exit, Skb},
};

/// Whether packets of all flows may bypass the stack; the agent sets it when it loads the programs.
#[unsafe(no_mangle)]
static DIRECT: Global<u8> = Global::new(0);

/// Whether a packet that enters the node can bypass the stack. If so, the next hop is stored in its flow.
#[inline(always)]
pub(super) fn is_possible(skb: &Skb, packet: &Packet, flow: &mut Flow) -> bool {
    flow.may_bypass_stack(DIRECT.load() != 0) && has_next_hop(skb, packet, flow)
}

/// Whether there is a next hop that takes the packet as it is.
#[inline(always)]
fn has_next_hop(skb: &Skb, packet: &Packet, flow: &mut Flow) -> bool {
    let now = clock::now();
    if flow.next_hop.resolved_at != now {
        next_hop::renew(&skb.context(), &flow.to, &mut flow.next_hop, now);
    }
    flow.next_hop.flags & next_hop_flags::KNOWN != 0 && is_plain(packet) && fits(skb, packet, flow)
}

/// Whether the packet is unfragmented behind an Ethernet header, with ports and checksum at fixed offsets.
#[inline(always)]
fn is_plain(packet: &Packet) -> bool {
    let transport = matches!(packet.body, Body::Tcp | Body::Udp);
    transport && packet.headers.l3 == lengths::ETHERNET && packet.fragment.part == Part::Whole
}

/// Whether the packet, or the largest segment that the device will make of it, fits into the MTU and has hops left.
#[inline(always)]
fn fits(skb: &Skb, packet: &Packet, flow: &Flow) -> bool {
    let hops = rewrite::hops_left(skb, &packet.headers).unwrap_or_default();
    hops > 1 && !skb.is_tagged() && skb.largest(packet) <= u32::from(flow.next_hop.mtu)
}

/// Rewrites a packet and sends it to its next hop, which [`is_possible`] has found.
#[inline(always)]
pub(super) fn forward(skb: &mut Skb, packet: &Packet, flow: &mut Flow) -> Result<Outcome, Outcome> {
    conntrack::observe(packet, flow);
    rewrite::packet(skb, packet, flow, 1)?;
    send(skb, flow)?;
    Ok(if flow.flags & flow_flags::ROUTED != 0 { Outcome::Routed } else { Outcome::Direct })
}

/// Sends a rewritten packet to its next hop.
///
/// The first packet after each lookup of the next hop, about one per second, goes through the kernel's neighbour table,
/// so that the kernel keeps checking that the neighbour is reachable.
#[inline(always)]
fn send(skb: &mut Skb, flow: &mut Flow) -> Result<(), Outcome> {
    let device = flow.next_hop.device;
    skb.exit = if flow.next_hop.flags & next_hop_flags::REDIRECT_PEER != 0 && flow.flags & EGRESS_TOO == 0 {
        Exit::peer_of(device)
    } else if flow.next_hop.flags & next_hop_flags::FRESH != 0 {
        flow.next_hop.flags &= !next_hop_flags::FRESH;
        Exit::neighbour(device)
    } else {
        *skb.header_mut::<[[u8; 6]; 2]>(0)? = [flow.next_hop.destination, flow.next_hop.source];
        Exit::device(device)
    };
    Ok(())
}

/// Packets of such flows are translated again at the egress of their device, so they must not skip it.
const EGRESS_TOO: u8 = flow_flags::MASQUERADE | flow_flags::MASQUERADED;
