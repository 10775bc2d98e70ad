//! Direct forwarding: packets bypass the stack once the next hop is known.
//!
//! Packets of routed flows may bypass the stack in this way, unless they need a tunnel; packets of other flows, only
//! with `--forwarding direct`, because netfilter does not see packets that bypass the stack. A packet takes the stack
//! (or [`super::routed`] if its flow is routed) if its next hop is unknown, if it exceeds the MTU, if its TTL or hop
//! limit would expire, or if its headers are unusual.

use aya_ebpf::Global;
use lb_common::{
    Outcome,
    conntrack::{Flow, NextHop, flow_flags, next_hop_flags},
};
use lb_ebpf::{
    parse::{Packet, frame::set_words},
    rewrite::FrameMut as _,
    rules::{flow::bypassing, forwarding::is_last_hop},
};

use crate::datapath::{
    clock,
    flow::conntrack,
    rewrite,
    route::{self, next_hop},
    skb::{Exit, Skb},
};

/// Whether packets of flows that are not routed may bypass the stack as well; the agent sets it when it loads the
/// programs.
#[unsafe(no_mangle)]
static DIRECT: Global<u8> = Global::new(0);

/// The next hop of a packet that enters the node and can bypass the stack.
#[inline(always)]
pub(super) fn next_hop(skb: &Skb, packet: &Packet, flow: &Flow) -> Option<&'static mut NextHop> {
    if !flow.may_bypass_stack(DIRECT.load() != 0) {
        return None;
    }
    let hop = next_hop::find(&skb.context(), flow.routed_from(&packet.tuple), &flow.to, clock::now())?;
    (packet.may_bypass_stack() && fits(skb, packet, hop)).then_some(hop)
}

/// Whether the packet, or the largest segment that the device will make of it, fits into the MTU. The packet must also
/// have hops left, and its skb must hold no VLAN tag outside the frame.
#[inline(always)]
fn fits(skb: &Skb, packet: &Packet, hop: &NextHop) -> bool {
    let hops = rewrite::hops_left(skb, &packet.headers).unwrap_or_default();
    !is_last_hop(hops) && !skb.is_tagged() && skb.largest(packet) <= u32::from(hop.mtu)
}

/// Rewrites a packet and sends it to the next hop that [`next_hop`] has found.
#[inline(always)]
pub(super) fn forward(
    skb: &mut Skb,
    packet: &Packet,
    flow: &mut Flow,
    hop: &mut NextHop,
) -> Result<Outcome, Outcome> {
    conntrack::observe(packet, flow);
    rewrite::packet(skb, packet, flow, 1)?;
    send(skb, packet, flow, hop)?;
    Ok(bypassing(flow))
}

/// Sends a rewritten packet to its next hop.
///
/// The first packet after each lookup of the next hop, about one per second on each CPU, goes through the kernel's
/// neighbour table, so that the kernel keeps checking that the neighbour is reachable. (A packet that goes straight to
/// the other end of a veth or netkit pair needs no neighbour.)
#[inline(always)]
fn send(skb: &mut Skb, packet: &Packet, flow: &Flow, hop: &mut NextHop) -> Result<(), Outcome> {
    let device = hop.device;
    if hop.flags & next_hop_flags::REDIRECT_PEER != 0 && flow.flags & EGRESS_TOO == 0 {
        skb.exit = Exit::peer_of(device);
    } else if hop.flags & next_hop_flags::FRESH != 0 {
        hop.flags &= !next_hop_flags::FRESH;
        find_neighbour(skb, packet, flow)?;
    } else {
        set_words(skb.header_mut(0)?, hop.macs());
        skb.exit = Exit::device(device);
    }
    Ok(())
}

/// Makes the packet leave through the kernel's neighbour table. (A subprogram: inlined, LLVM would read the context
/// through a pointer into it, which the verifier refuses.)
#[inline(never)]
fn find_neighbour(skb: &mut Skb, packet: &Packet, flow: &Flow) -> Result<(), Outcome> {
    route::resolve(skb, flow.routed_from(&packet.tuple), &flow.to).map(drop)
}

/// Flags of flows whose packets the egress program of the next device may translate again, so the packets must not
/// bypass that program.
const EGRESS_TOO: u8 = flow_flags::SECOND_OF_MASQUERADED | flow_flags::MASQUERADED;
