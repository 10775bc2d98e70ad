//! Direct forwarding: packets of flows leave where they enter, past the stack, once the way is known.
//!
//! Those of routed flows may always, all others only where the agent was asked for that (`--forwarding direct`): what the
//! stack does to packets between ingress and egress, netfilter above all, does not happen to them. Where no way is known
//! (yet), for packets that do not fit, that have come too far, or that have to be looked at, there is the stack.

use aya_ebpf::Global;
use lb_common::{
    Outcome,
    conntrack::{Flow, flow_flags, next_hop_flags},
};
use lb_ebpf::{
    parse::{Body, Packet, Part, frame::lengths},
    rewrite::FrameMut as _,
};

use super::{next_hop, routed};
use crate::datapath::{
    flow::conntrack,
    skb::{Exit, Skb},
};

/// Whether packets of all flows are forwarded so; written by the agent before it loads the programs.
#[unsafe(no_mangle)]
static DIRECT: Global<u8> = Global::new(0);

/// Whether a packet that enters the node leaves at once; how is in the hop of its flow.
#[inline(always)]
pub(in crate::datapath) fn leaves(skb: &Skb, packet: &Packet, flow: &mut Flow) -> bool {
    flow.may_bypass_stack(DIRECT.load() != 0) && leads_out(skb, packet, flow)
}

/// Whether there is a way that takes the packet as it is.
#[inline(always)]
fn leads_out(skb: &Skb, packet: &Packet, flow: &mut Flow) -> bool {
    let now = conntrack::now();
    if flow.next_hop.resolved_at != now {
        next_hop::renew(&skb.context(), &flow.to, &mut flow.next_hop, now);
    }
    flow.next_hop.flags & next_hop_flags::KNOWN != 0 && is_plain(packet) && fits(skb, packet, flow)
}

/// Whether it is a whole packet behind an Ethernet header, with ports and checksum where they always are.
#[inline(always)]
fn is_plain(packet: &Packet) -> bool {
    let transport = matches!(packet.body, Body::Tcp | Body::Udp);
    transport && packet.headers.l3 == lengths::ETHERNET && packet.fragment.part == Part::Whole
}

/// Whether the packet, or the largest segment that the device will make of it, fits, and has hops left.
#[inline(always)]
fn fits(skb: &Skb, packet: &Packet, flow: &Flow) -> bool {
    let hops = routed::hops_left(skb, &packet.headers).unwrap_or_default();
    hops > 1 && !skb.is_tagged() && skb.largest(packet) <= u32::from(flow.next_hop.mtu)
}

/// Sends a translated packet to its next hop, which [`leaves`] has found.
///
/// Where that has just been asked for, once in a while, the packet takes the kernel's own way to the neighbour, which keeps
/// the kernel looking whether it is still there.
#[inline(always)]
pub(in crate::datapath) fn leave(skb: &mut Skb, flow: &mut Flow) -> Result<(), Outcome> {
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

/// Packets of such flows are translated once more at the egress of their device, so they have to get there.
const EGRESS_TOO: u8 = flow_flags::MASQUERADE | flow_flags::MASQUERADED;
