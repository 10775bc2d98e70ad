//! The way of packets that the fast path leaves: their headers are unusual, or a flow begins or ends with them.

use lb_common::{
    Outcome,
    conntrack::{Flow, flow_flags},
};
use lb_ebpf::parse::{Body, Packet, parse};

use super::{
    Hook, fast_path,
    flow::{
        conntrack,
        new::{self, Begin, REJECTED},
    },
    forward::{self, routed, tunnel},
    fragments, icmp, reject,
    service::vips,
    skb::Skb,
};

/// Decides about a packet of no tunnel.
#[inline(always)]
pub(super) fn process(skb: &mut Skb, packet: &mut Packet, hook: Hook) -> Result<Outcome, Outcome> {
    let known = match fast_path::process(skb, packet, hook) {
        fast_path::NO_FLOW => None,
        fast_path::OF_A_TURN => conntrack::lookup(&packet.tuple),
        fast_path::NOT_PLAIN => {
            parse_pulling(skb, packet)?;
            match packet.body {
                Body::IcmpError => {
                    return Ok(match icmp::translate(skb, &packet.headers, hook) {
                        icmp::ELSEWHERE => tunnel::send_error(skb, &packet.headers),
                        outcome => outcome,
                    });
                }
                Body::Echo if hook == Hook::Ingress => return Ok(vips::echo(skb, packet)),
                Body::Echo => return Err(Outcome::NotTransport),
                Body::Tcp | Body::Udp | Body::Sctp | Body::LaterFragment => {}
            }
            fragments::complete(packet)?;
            conntrack::lookup(&packet.tuple)
        }
        done => return Ok(done),
    };
    let earlier = known.is_some();
    let (flow, is_first) = match known {
        Some(flow) if is_same_flow(skb, packet, flow, hook)? => (flow, false),
        _ if hook == Hook::Egress => return Err(Outcome::NoService),
        _ => (create(skb, packet, earlier)?, true),
    };
    let outcome = match translate_slow(skb, packet, flow, hook) {
        forward::BY_ROUTE => routed::forward(skb, packet, flow),
        outcome => outcome,
    };
    Ok(if is_first { outcome.of_first_packet() } else { outcome })
}

/// The entry of a flow that begins with this packet, in place of an `earlier` one.
#[inline(always)]
fn create(skb: &mut Skb, packet: &Packet, earlier: bool) -> Result<&'static mut Flow, Outcome> {
    match new::new_flow(&skb.context(), packet, earlier, Begin::Any) {
        Outcome::NewFlow | Outcome::NewRoutedFlow => {
            conntrack::lookup(&packet.tuple).ok_or(Outcome::ConntrackFull)
        }
        Outcome::NoService => Err(vips::unlisted(skb, packet)),
        REJECTED => Err(reject::reject(skb, packet)),
        other => Err(other),
    }
}

/// Whether the packet belongs to the flow with this entry, rather than being the first one of another.
#[inline(always)]
fn is_same_flow(skb: &Skb, packet: &Packet, flow: &Flow, hook: Hook) -> Result<bool, Outcome> {
    if hook == Hook::Egress && !hook.translates(flow) {
        return Err(Outcome::OtherHook);
    }
    if flow.flags & flow_flags::MASQUERADE != 0 {
        return Ok(true);
    }
    if conntrack::is_foreign(packet, flow) {
        return Err(Outcome::NoService);
    }
    Ok(!conntrack::is_new_connection(&skb.context(), packet, flow))
}

/// Parses the packet; where headers lie outside the linear part of the buffer, they are pulled in first.
#[inline(never)]
fn parse_pulling(skb: &mut Skb, packet: &mut Packet) -> Result<(), Outcome> {
    for _ in 0..2 {
        match parse(skb, skb.layer) {
            Ok(parsed) => {
                *packet = parsed;
                return Ok(());
            }
            Err(Outcome::Malformed) if skb.pull_headers() => {}
            Err(outcome) => return Err(outcome),
        }
    }
    Err(Outcome::Malformed)
}

/// Follows the flow of a packet that takes the slow path.
#[inline(never)]
fn translate_slow(skb: &mut Skb, packet: &Packet, flow: &mut Flow, hook: Hook) -> Outcome {
    fragments::remember(packet);
    forward::packet(skb, packet, flow, hook).unwrap_or_else(|early| early)
}
