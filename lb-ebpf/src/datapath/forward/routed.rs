//! Routed flows: wire devices lead to both client and backend, so the node is only a router between them.
//!
//! A masqueraded flow whose packets come in and go out through wire devices needs neither sockets nor the stack. Where
//! packets enter, the programs replace the addresses of client and VIP by those of node and backend in one step, and
//! packets leave by the route that the kernel would take. The flow needs only one pair of entries. The XDP program
//! serves such packets before there is an skb. This module serves the packets that neither XDP nor [`super::direct`]
//! sends on, for example fragments, packets with options, and packets whose neighbour is not resolved yet.

use lb_common::{Outcome, conntrack::Flow};
use lb_ebpf::{
    parse::{Body, Packet},
    reject::{time_exceeded, too_big},
    rules::forwarding::is_last_hop,
};

use super::tunnel;
use crate::datapath::{early_return::outcome_of, flow::conntrack, reject, rewrite, route, skb::Skb};

/// Forwards a packet of a routed flow: translated, or in the tunnel of its flow.
#[inline(never)]
pub(crate) fn forward(skb: &mut Skb, packet: &Packet, flow: &mut Flow) -> Outcome {
    outcome_of(|| {
        let mtu = route::resolve(skb, flow.routed_from(&packet.tuple), &flow.to)?;
        conntrack::observe(packet, flow);
        let is_v4 = packet.headers.is_v4;
        if is_last_hop(rewrite::hops_left(skb, &packet.headers)?) {
            return reject::icmp_error(skb, packet, &time_exceeded(is_v4), Outcome::TimeExceeded);
        }
        let overhead = if flow.is_tunnelled() { tunnel::overhead(flow) } else { 0 };
        let room = mtu.saturating_sub(overhead);
        if mtu != 0 && skb.largest(packet) > room {
            if flow.is_tunnelled() && packet.body == Body::LaterFragment {
                // The sender could not match an ICMP error to this fragment; the first fragment was answered.
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
