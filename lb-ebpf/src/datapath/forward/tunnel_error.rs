//! ICMP errors about tunnelled packets, from the node at the other end of the tunnel or from a router on the way to it.
//!
//! Such an error quotes the outer header, so it comes to this node, whose stack has no use for it. The program takes
//! the client's packet out of the quote, and turns that packet into an ICMP error whose source is the packet's
//! destination, the VIP, as if this node had met the obstacle itself. So a client discovers the MTU of the path that
//! the tunnel takes.

use lb_common::{Outcome, conntrack::Tuple};
use lb_ebpf::{
    forward::tunnel::{self, Tunnel},
    headers::icmp_protocol,
    parse::{
        Body, Headers, Packet,
        frame::{Frame as _, lengths},
        parse_quoted,
    },
};

use super::decapsulate;
use crate::datapath::{
    early_return::outcome_of, flow::conntrack, maps, reject, route, scratch::scratch, skb::Skb,
};

/// Turns an ICMP `error` about a tunnelled packet into an ICMP error for the client that has sent the packet inside the
/// tunnel. Returns [`Outcome::UnknownIcmpError`] and changes nothing if the error quotes no tunnelled packet, says
/// nothing usable about the path, or may come from a pod.
#[inline(never)]
pub(crate) fn relay(skb: &mut Skb, error: &Packet) -> Outcome {
    outcome_of(|| {
        let headers = &error.headers;
        let packet = maps::inner_packet()?;
        if !decapsulate::ends_tunnels(skb.context().device)
            || !find(skb, headers)
            || !parse(skb, error, packet)
        {
            return Err(Outcome::UnknownIcmpError);
        }
        let Tunnel { outer, inner, .. } = *scratch()?.tunnel();
        let about_tunnel = *skb.header::<[u8; 8]>(headers.l4)?;
        let start = tunnel::error_for_sender(&about_tunnel, headers.is_v4, inner.wrapping_sub(outer))
            .ok_or(Outcome::UnknownIcmpError)?;
        let from = packet.tuple.reversed();
        route::resolve(skb, &from, &Tuple { protocol: icmp_protocol(headers.is_v4), ..from })?;
        decapsulate::take_out(skb, packet, inner.wrapping_sub(headers.l3))?;
        reject::icmp_error(skb, packet, &start, Outcome::TunnelError)
    })
}

/// Writes the tunnel that the ICMP error is about into `SCRATCH`; returns false if the error is about no tunnel.
#[inline(never)]
fn find(skb: &Skb, headers: &Headers) -> bool {
    match (scratch(), tunnel::find_at(skb, headers.l4 + lengths::ICMP)) {
        (Ok(scratch), Ok(tunnel)) => {
            *scratch.tunnel() = tunnel;
            true
        }
        _ => false,
    }
}

/// Parses the packet inside the tunnel in `SCRATCH`. Returns false unless the packet's flow leads through the tunnel
/// and the error is for the node that began the tunnel: any machine can send an ICMP error.
#[inline(never)]
fn parse(skb: &Skb, error: &Packet, packet: &mut Packet) -> bool {
    let Ok(scratch) = scratch() else { return false };
    let tunnel = scratch.tunnel();
    // `parse_quoted` expects an ICMP header before the packet, so these headers place one there.
    let message = Headers { l4: tunnel.inner.wrapping_sub(lengths::ICMP), ..error.headers };
    let Ok(quoted) = parse_quoted(skb, &message) else { return false };
    // The answer quotes 8 bytes of the transport header.
    if skb.header::<[u8; 8]>(quoted.headers.l4).is_err() {
        return false;
    }
    packet.tuple = quoted.tuple;
    packet.headers = quoted.headers;
    // Any body except that of a later fragment will do: `icmp_error` checks for nothing else, and `parse_quoted`
    // accepts no quote of a later fragment.
    packet.body = Body::Udp;
    error.tuple.destination == tunnel.source
        && conntrack::lookup(&quoted.tuple).is_some_and(|flow| {
            flow.is_tunnelled()
                && flow.to.source == tunnel.source
                && flow.to.destination == tunnel.destination
        })
}
