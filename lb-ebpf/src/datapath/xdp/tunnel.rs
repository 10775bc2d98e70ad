//! XDP forwarding of tunnelled flows: as for routed flows, but the packet gets tunnel headers instead of a translation.

use aya_ebpf::helpers::generated::bpf_xdp_adjust_head;
use lb_common::{
    Outcome,
    conntrack::{Flow, NextHop, Tick},
};
use lb_ebpf::{
    forward::tunnel::{self as headers, Outer},
    parse::{
        Packet,
        frame::{Frame as _, lengths, set_words},
    },
    rewrite::{self, FrameMut as _},
};

use super::frame::{Xdp, check};
use crate::datapath::{flow::conntrack, forward::tunnel};

/// Encapsulates a packet of a tunnelled flow for its next hop.
#[inline(never)]
pub(crate) fn forward(xdp: &mut Xdp, packet: &Packet, flow: &mut Flow, hop: &NextHop) -> Outcome {
    let room = u32::from(hop.mtu).saturating_sub(tunnel::overhead(flow));
    if let Err(early) = check(xdp, packet, room) {
        return early;
    }
    observe(packet, flow, hop.resolved_at);
    match encapsulate(xdp, flow, hop) {
        Ok(()) => Outcome::Tunnelled,
        // The flow has counted the packet, which may be partly rewritten: tc must not get the packet.
        Err(_) => Outcome::RewriteFailed,
    }
}

/// Updates the flow. (A subprogram: its stack frame is freed before [`encapsulate`] begins.)
#[inline(never)]
fn observe(packet: &Packet, flow: &mut Flow, now: Tick) {
    conntrack::observe_at(packet, flow, now);
}

/// Adds the headers of the tunnel. (A subprogram, to have a stack frame of its own.)
#[inline(never)]
fn encapsulate(xdp: &mut Xdp, flow: &Flow, hop: &NextHop) -> Result<(), Outcome> {
    let is_v4 = flow.to.destination.is_v4();
    let start = *xdp.header::<[u8; 8]>(lengths::ETHERNET)?;
    let [a, b, c, d, ..] = start;
    let outer = Outer::new(flow, [a, b, c, d], headers::length(&start, is_v4));
    let ether_type = *xdp.header::<[u8; 2]>(lengths::ETHERNET - 2)?;
    rewrite::take_hop(xdp, lengths::ETHERNET, is_v4)?;
    grow(xdp, tunnel::overhead(flow))?;
    set_words(xdp.header_mut(0)?, hop.macs());
    *xdp.header_mut::<[u8; 2]>(lengths::ETHERNET - 2)? = ether_type;
    write(xdp, is_v4, &outer)
}

/// Makes room before the frame. Drivers keep 192 or 256 bytes free there, more than a tunnel needs.
#[inline(always)]
fn grow(xdp: &mut Xdp, bytes: u32) -> Result<(), Outcome> {
    // SAFETY: the context is that of this program. The call may move the frame, so the program reads its bounds again
    // before it uses them, and `&mut self` excludes borrowed headers.
    let result = unsafe { bpf_xdp_adjust_head(xdp.ctx.ctx, -(bytes as i32)) };
    xdp.reload();
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
