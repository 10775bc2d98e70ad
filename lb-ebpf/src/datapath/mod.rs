//! A packet's way through the maps.
//!
//! Both hooks run [`process`]. The device through which a client's packets enter the node owns the translation:
//! they are DNATed at its ingress, before the stack routes them, and replies are translated back at its egress,
//! after the stack has routed them. So neither a backend's device nor reverse path filters ever see an address
//! that does not belong there.
//!
//! The common path is one function; the rarer ones are subprograms (`#[inline(never)]`), because all frames of a call
//! chain share 512 octets of stack. A subprogram returns one register, hence a plain [`Outcome`].

mod affinity;
mod answer;
mod conntrack;
mod fragments;
mod icmp;
mod log;
mod maps;
mod services;
mod skb;
pub(crate) mod stats;
mod translate;

use lb_common::{
    Outcome,
    conntrack::{Flow, flow_flags},
};
use lb_ebpf::packet::{Body, Packet, parse};

pub(crate) use self::skb::Skb;

/// Where a packet is on its way through the node.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hook {
    /// It enters.
    Ingress,
    /// It leaves.
    Egress,
}

impl Hook {
    /// Whether packets of `flow` are translated here.
    #[inline(always)]
    fn translates(self, flow: &Flow) -> bool {
        (flow.flags & flow_flags::AT_EGRESS != 0) == (self == Self::Egress)
    }
}

/// Decides about a packet and rewrites it accordingly. `Ok` and `Err` both carry the outcome; `Err` is the early way
/// out.
#[inline(always)]
pub(crate) fn process(skb: &mut Skb, hook: Hook) -> Result<Outcome, Outcome> {
    let packet = maps::packet()?;
    read(skb, packet)?;
    if packet.body == Body::IcmpError {
        return Ok(icmp::translate(skb, &packet.headers, hook));
    }
    fragments::complete(packet)?;
    let known = conntrack::lookup(&packet.tuple);
    let earlier = known.is_some();
    if let Some(flow) = known {
        if !hook.translates(flow) {
            return Err(Outcome::OtherHook);
        }
        if conntrack::is_foreign(packet, flow) {
            return Err(Outcome::NoService);
        }
        if !conntrack::is_new_connection(packet, flow) {
            return forward(skb, packet, flow, Outcome::Forward);
        }
    }
    if hook == Hook::Egress {
        return Err(Outcome::NoService);
    }
    match new_flow(skb, packet, earlier) {
        Outcome::NewFlow => {
            let flow = conntrack::lookup(&packet.tuple).ok_or(Outcome::ConntrackFull)?;
            forward(skb, packet, flow, Outcome::NewFlow)
        }
        other => Err(other),
    }
}

/// Parses the packet; where headers lie outside the linear part of the buffer, they are pulled in first.
#[inline(never)]
fn read(skb: &mut Skb, packet: &mut Packet) -> Result<(), Outcome> {
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

/// A packet of no flow, or of one that is over (`earlier`). If it is for a service, a backend is chosen and the flow exists from now on
/// ([`Outcome::NewFlow`]), or the packet is rejected.
#[inline(never)]
fn new_flow(skb: &mut Skb, packet: &Packet, earlier: bool) -> Outcome {
    try_new_flow(skb, packet, earlier).unwrap_or_else(|early| early)
}

#[inline(always)]
fn try_new_flow(skb: &mut Skb, packet: &Packet, earlier: bool) -> Result<Outcome, Outcome> {
    let service = services::lookup(&packet.tuple)?;
    match packet.body {
        // Its first fragment was not translated, so this one must not be.
        Body::LaterFragment => return Err(Outcome::UnknownFragment),
        Body::Tcp if packet.segment.resets() => return Err(Outcome::StrayReset),
        Body::Tcp | Body::Udp | Body::IcmpError => {}
    }
    if service.backends_count == 0 {
        return Ok(answer::reject(skb, packet));
    }
    let to = conntrack::open(packet, &service, earlier)?;
    log::new_flow(skb, packet, &to);
    Ok(Outcome::NewFlow)
}

/// Follows the flow of a packet, rewrites it and sends it on.
#[inline(always)]
fn forward(skb: &mut Skb, packet: &Packet, flow: &mut Flow, outcome: Outcome) -> Result<Outcome, Outcome> {
    conntrack::observe(packet, flow);
    fragments::remember(packet);
    translate::packet(skb, packet, flow)?;
    if flow.flags & flow_flags::HAIRPIN != 0 {
        return Ok(Outcome::Hairpin);
    }
    Ok(if flow.is_reply() { Outcome::Reply } else { outcome })
}
