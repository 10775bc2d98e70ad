//! The way of packets of flows through a tunnel at XDP: as that of routed flows, with headers before the packet in place of
//! a translation.

use aya_ebpf::helpers::generated::bpf_xdp_adjust_head;
use lb_common::{Outcome, conntrack::Flow};
use lb_ebpf::{
    forward::tunnel::{self as headers, Outer},
    parse::{
        Packet,
        frame::{Frame as _, lengths},
    },
    rewrite::{self, FrameMut as _},
};

use super::{Xdp, check};
use crate::datapath::{flow::conntrack, forward::tunnel};

/// Sends a packet of such a flow, whose next hop is known, to its backend's node.
#[inline(never)]
pub(in crate::datapath) fn forward(
    xdp: &mut Xdp,
    packet: &Packet,
    flow: &mut Flow,
    outcome: Outcome,
) -> Outcome {
    let room = u32::from(flow.next_hop.mtu).saturating_sub(tunnel::overhead(flow));
    if let Err(early) = check(xdp, packet, room) {
        return early;
    }
    conntrack::observe_at(packet, flow, flow.next_hop.resolved_at);
    match encapsulate(xdp, flow) {
        ENCAPSULATED => tunnel::outcome(outcome),
        early => early,
    }
}

/// Anything else than the reason why it did not work.
const ENCAPSULATED: Outcome = Outcome::Tunnelled;

/// Puts the headers of the tunnel before the packet. (With a frame of its own on the stack.)
#[inline(never)]
fn encapsulate(xdp: &mut Xdp, flow: &Flow) -> Outcome {
    match try_encapsulate(xdp, flow) {
        Ok(()) => ENCAPSULATED,
        Err(early) => early,
    }
}

#[inline(always)]
fn try_encapsulate(xdp: &mut Xdp, flow: &Flow) -> Result<(), Outcome> {
    let is_v4 = flow.to.destination.is_v4();
    let start = *xdp.header::<[u8; 8]>(lengths::ETHERNET)?;
    let [a, b, c, d, ..] = start;
    let outer = Outer::new(flow, [a, b, c, d], headers::length(&start, is_v4));
    let ether_type = *xdp.header::<[u8; 2]>(lengths::ETHERNET - 2)?;
    rewrite::take_hop(xdp, lengths::ETHERNET, is_v4)?;
    grow(xdp, tunnel::overhead(flow))?;
    *xdp.header_mut::<[[u8; 6]; 2]>(0)? = [flow.next_hop.destination, flow.next_hop.source];
    *xdp.header_mut::<[u8; 2]>(lengths::ETHERNET - 2)? = ether_type;
    write(xdp, is_v4, &outer)
}

/// Makes room before the frame. That there is none is a fault of the driver: it keeps 192 octets free.
#[inline(always)]
fn grow(xdp: &mut Xdp, octets: u32) -> Result<(), Outcome> {
    // SAFETY: the context is this program's; where the frame lies is read again before it is used.
    let result = unsafe { bpf_xdp_adjust_head(xdp.ctx.ctx, -(octets as i32)) };
    xdp.find_again();
    if result == 0 { Ok(()) } else { Err(Outcome::RewriteFailed) }
}

#[inline(always)]
fn write(xdp: &mut Xdp, is_v4: bool, outer: &Outer) -> Result<(), Outcome> {
    let mut end = lengths::ETHERNET;
    if is_v4 {
        *xdp.header_mut(end)? = outer.ipv4();
        end += lengths::IPV4;
    } else {
        *xdp.header_mut(end)? = outer.ipv6();
        end += lengths::IPV6;
    }
    if outer.is_gue() {
        *xdp.header_mut(end)? = outer.udp();
    }
    Ok(())
}
