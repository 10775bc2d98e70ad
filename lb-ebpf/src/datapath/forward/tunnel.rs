//! Flows whose backend is on another node and answers the client directly (DSR): the programs send their packets to
//! that node in a tunnel, untranslated.
//!
//! Such a flow has one entry, since replies bypass this node. Like packets of routed flows, its packets leave by the
//! route to the backend. The receiving end of the tunnel is [`super::decapsulate`].

use aya_ebpf::bindings::{
    __sk_buff, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6, BPF_F_ADJ_ROOM_ENCAP_L4_UDP,
    BPF_F_ADJ_ROOM_FIXED_GSO,
};
use lb_common::{
    Outcome,
    conntrack::{Flow, flow_flags},
};
use lb_ebpf::{
    forward::tunnel::{self, Outer},
    parse::{
        Headers, Packet,
        frame::{Frame as _, lengths},
    },
    rules::forwarding::is_last_hop,
};

use super::routed;
use crate::datapath::{
    early_return::{number_of, outcome_of, rewritten},
    flow::{conntrack, create},
    rewrite, route,
    scratch::scratch,
    skb::Skb,
};

/// Number of bytes that the tunnel adds to each packet of the flow.
#[inline(always)]
pub(crate) fn overhead(flow: &Flow) -> u32 {
    tunnel::overhead(flow.to.destination.is_v4(), flow.flags & flow_flags::GUE != 0)
}

/// Forwards a packet whose flow has no entry.
#[inline(never)]
pub(crate) fn send_stateless(skb: &mut Skb, packet: &Packet) -> Outcome {
    outcome_of(|| Ok(routed::forward(skb, packet, create::stateless()?).without_entry()))
}

/// Sends an ICMP error about a packet of a backend through a tunnel to the node of that backend. `icmp` has left the
/// key of the packet's flow in `SCRATCH`.
#[inline(never)]
pub(crate) fn send_error(skb: &mut Skb, headers: &Headers) -> Outcome {
    outcome_of(|| {
        let flow = conntrack::lookup(scratch()?.error_key()).ok_or(Outcome::UnknownIcmpError)?;
        route::resolve(skb, &flow.to, &flow.to)?;
        if is_last_hop(rewrite::hops_left(skb, headers)?) {
            // An ICMP error is never answered with an ICMP error (RFC 1122 §3.2.2).
            return Err(Outcome::NoRoute);
        }
        encapsulate(skb, headers, flow)?;
        Ok(Outcome::Tunnelled)
    })
}

/// Puts the headers of the tunnel before the packet. Checksums and segmentation that are left to the device stay so.
#[inline(always)]
pub(super) fn encapsulate(skb: &mut Skb, headers: &Headers, flow: &Flow) -> Result<(), Outcome> {
    rewritten(tunnel_encapsulate(skb.ctx.skb.skb, headers, flow))
}

/// [`encapsulate`], as a global function: the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn tunnel_encapsulate(raw: *mut __sk_buff, headers: *const Headers, flow: *const Flow) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointers lead to initialised values, or are null.
    let (Some(headers), Some(flow)) = (unsafe { (headers.as_ref(), flow.as_ref()) }) else { return 0 };
    number_of(add_headers(&mut Skb::new_unknown(raw), headers, flow))
}

#[inline(always)]
fn add_headers(skb: &mut Skb, headers: &Headers, flow: &Flow) -> Result<(), Outcome> {
    rewrite::take_hop(skb, headers)?;
    let start = *skb.header::<[u8; 8]>(headers.l3)?;
    let [a, b, c, d, ..] = start;
    let outer = Outer::new(flow, [a, b, c, d], tunnel::length(&start, headers.is_v4));
    make_room(skb, overhead(flow), headers.is_v4, outer.is_gue())?;
    let mut end = headers.l3;
    if headers.is_v4 {
        skb.store_summed(end, &outer.ipv4())?;
        end += lengths::IPV4;
    } else {
        skb.store_summed(end, &outer.ipv6())?;
        end += lengths::IPV6;
    }
    if outer.is_gue() { skb.store_summed(end, &outer.udp()) } else { Ok(()) }
}

#[inline(always)]
fn make_room(skb: &mut Skb, bytes: u32, is_v4: bool, is_gue: bool) -> Result<(), Outcome> {
    let network = if is_v4 { BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 } else { BPF_F_ADJ_ROOM_ENCAP_L3_IPV6 };
    let transport = if is_gue { BPF_F_ADJ_ROOM_ENCAP_L4_UDP } else { 0 };
    skb.adjust_room(bytes.cast_signed(), network | transport | BPF_F_ADJ_ROOM_FIXED_GSO)
}
