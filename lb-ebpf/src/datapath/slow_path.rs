//! The slow path: packets that the fast path does not handle. They have unusual headers, may begin or end a flow, are
//! for an address in a range of cluster IPs where no Service has the port, are in a tunnel, or have a flow that is in
//! the overflow or needs a route or a PROXY protocol header.

use lb_common::{Outcome, conntrack::Flow};
use lb_ebpf::{
    parse::{self, Body, Packet, frame::lengths},
    rules::{
        dns::{Query, may_be_query},
        flow::{Relation, begins_only_at_ingress, relation},
        forwarding::is_catch,
    },
};

use super::{
    context::Hook,
    device, dns,
    flow::{
        conntrack,
        new::{self, Begin, FlowCreation},
        of_node,
    },
    forward::{self, Forwarded, proxy_protocol, routed, tunnel, tunnel_error},
    fragments,
    icmp::{self, Translated},
    reject,
    service::vips,
    skb::Skb,
};

/// Parses a packet that the fast path could not parse, and decides about ICMP messages; `None` if the packet has ports
/// and still needs a decision.
#[inline(always)]
pub(super) fn parse(skb: &mut Skb, packet: &mut Packet, hook: Hook) -> Result<Option<Outcome>, Outcome> {
    parse_pulling(skb, packet)?;
    if hook == Hook::Ingress && packet.headers.l3 > lengths::ETHERNET {
        // The frame has a VLAN tag: it is for another device, stacked on this one.
        return Ok(Some(Outcome::OtherHost));
    }
    match packet.body {
        Body::IcmpError => Ok(Some(match icmp::translate(skb, &packet.headers, hook) {
            Translated::Done(Outcome::UnknownIcmpError) if hook == Hook::Ingress => {
                tunnel_error::relay(skb, packet)
            }
            Translated::Done(outcome) => outcome,
            Translated::ThroughTunnel => tunnel::send_error(skb, &packet.headers),
        })),
        Body::Echo if hook == Hook::Ingress => Ok(Some(vips::echo(skb, packet))),
        Body::Echo => Err(Outcome::NotTransport),
        Body::Tcp | Body::Udp | Body::Sctp | Body::LaterFragment => {
            fragments::complete(skb, packet, hook)?;
            Ok(None)
        }
    }
}

/// Parses the packet, after pulling headers that may lie outside the linear part of the buffer. (Pulling them only
/// after a first attempt to parse the packet would make the verifier check the parser twice.)
#[inline(never)]
fn parse_pulling(skb: &mut Skb, packet: &mut Packet) -> Result<(), Outcome> {
    skb.pull_headers();
    *packet = parse::parse(skb, skb.layer)?;
    Ok(())
}

/// Decides about a packet with ports; `known` is the entry of the packet's tuple, if there is such an entry. `Err` is
/// the outcome of a packet that no flow translates at this hook.
#[inline(always)]
pub(super) fn process(
    skb: &mut Skb,
    packet: &mut Packet,
    hook: Hook,
    known: Option<&'static mut Flow>,
) -> Result<Outcome, Outcome> {
    let earlier = known.is_some();
    if earlier && packet.has_invalid_flags() {
        return Err(Outcome::InvalidFlags);
    }
    let (flow, is_first) = match known {
        Some(flow) if check_same_flow(skb, packet, flow, hook)? => (flow, false),
        Some(flow) if begins_only_at_ingress(flow, hook.is_egress(), hook == Hook::Catch) => {
            return Err(Outcome::NoService);
        }
        _ if hook.is_egress() => (create_of_node(skb, packet, hook, earlier)?, false),
        _ => (create_flow(skb, packet, earlier)?, true),
    };
    let outcome = match translate_slow(skb, packet, flow, hook, is_first) {
        Forwarded::Done(outcome) => outcome,
        Forwarded::NeedsRoute | Forwarded::NeedsProxyHeader => routed::forward(skb, packet, flow),
    };
    Ok(if is_first { outcome.of_first_packet() } else { outcome })
}

/// Checks whether the packet belongs to the flow with this entry, rather than being the first packet of another flow.
/// Deletes the flow if the packet belongs to a connection that bypasses the VIP.
#[inline(always)]
fn check_same_flow(skb: &Skb, packet: &Packet, flow: &Flow, hook: Hook) -> Result<bool, Outcome> {
    if of_node::is_of_other_flow(skb, packet.headers.l3, hook, flow) {
        return Err(Outcome::OtherHook);
    }
    let bypasses_vip = || conntrack::delete_if_bypassed(packet, flow);
    let is_new =
        || conntrack::check_new_connection(&skb.context(), packet, flow) || proxy_protocol::is_lost(flow);
    match relation(flow, hook.is_egress(), bypasses_vip, is_new) {
        Relation::Same => Ok(true),
        Relation::New => Ok(false),
        Relation::OtherHook => Err(Outcome::OtherHook),
        Relation::Foreign => Err(Outcome::NoService),
    }
}

/// Creates the flow that begins with this packet, and returns the flow's entry. If `earlier` is true, the new flow
/// replaces an earlier flow with the same tuple.
#[inline(always)]
fn create_flow(skb: &mut Skb, packet: &Packet, earlier: bool) -> Result<&'static mut Flow, Outcome> {
    if may_be_query(&packet.tuple, packet.fragment.part) {
        match dns::query(skb, packet, earlier) {
            Query::Service => {}
            Query::Local => return Err(dns::to_server(skb, packet)),
            Query::Reset => return Err(reject::reject(skb, packet)),
        }
    }
    match new::new_flow(&skb.context(), packet, earlier, Begin::Any) {
        FlowCreation::Created | FlowCreation::CreatedRouted => {
            conntrack::lookup(&packet.tuple).ok_or(Outcome::ConntrackFull)
        }
        FlowCreation::Stateless => Err(tunnel::send_stateless(skb, packet)),
        FlowCreation::Reject => Err(reject::reject(skb, packet)),
        FlowCreation::NotCreated(Outcome::NoService) => Err(vips::unlisted(skb, packet)),
        FlowCreation::NotCreated(outcome) => Err(outcome),
    }
}

/// Creates the flow of a connection of the node itself that begins with this packet, and returns the flow's entry. The
/// connection needs a flow if another flow already has the connection's source port, or if an earlier connection with
/// the same tuple had a flow (`earlier`). Answers of the DNS server are translated without a flow.
#[inline(always)]
fn create_of_node(
    skb: &mut Skb,
    packet: &Packet,
    hook: Hook,
    earlier: bool,
) -> Result<&'static mut Flow, Outcome> {
    if !earlier && !of_node::begins(skb, packet, hook) {
        let is_answer = dns::is_answer(skb, &packet.tuple);
        return Err(if is_answer { dns::answer(skb, packet) } else { Outcome::NoService });
    }
    of_node::create(&skb.context(), packet, earlier)?;
    conntrack::lookup(&packet.tuple).ok_or(Outcome::ConntrackFull)
}

/// Rewrites a packet and sends it on, as the fast path does; also records the ports of a first fragment, and observes
/// the answer to a SYN.
#[inline(never)]
fn translate_slow(
    skb: &mut Skb,
    packet: &mut Packet,
    flow: &mut Flow,
    hook: Hook,
    is_first: bool,
) -> Forwarded {
    // A caught flow is translated at the egress of the catch device. If the flow begins at that device, its first
    // packet has already passed the egress hook, so this hook, at ingress, translates the packet as the egress hook
    // would.
    let hook = if is_first && is_catch(&device::info(skb.context().device)) { Hook::Egress } else { hook };
    if let Err(outcome) = fragments::remember(skb, packet, hook) {
        return Forwarded::Done(outcome);
    }
    conntrack::observe_answer(packet, flow);
    forward::packet(skb, packet, flow, hook, |skb, packet, flow| {
        proxy_protocol::change(skb, packet, flow, hook).map_err(Forwarded::Done)
    })
}
