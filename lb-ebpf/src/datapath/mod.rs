//! A packet's way through the maps.
//!
//! Both hooks run [`process`]. The device through which a client's packets enter the node owns the translation:
//! they are DNATed at its ingress, before the stack routes them, and replies are translated back at its egress,
//! after the stack has routed them. So neither a backend's device nor reverse path filters ever see an address
//! that does not belong there. Where the client's address itself must not reach the backend, a second translation
//! exchanges it at the other end: see [`masquerade`].
//!
//! The common path is one function; the rarer ones are subprograms (`#[inline(never)]`), because all frames of a call
//! chain share 512 octets of stack. A subprogram returns one register, hence a plain [`Outcome`].

pub(crate) mod affinity;
mod answer;
pub(crate) mod choice;
pub(crate) mod conntrack;
mod counts;
mod decapsulate;
mod direct;
pub(crate) mod events;
mod fragments;
mod hop;
mod icmp;
mod log;
mod maps;
mod masquerade;
pub(crate) mod new_flow;
mod open;
mod place;
mod route;
mod routed;
pub(crate) mod services;
pub(crate) mod settings;
mod short_way;
mod skb;
pub(crate) mod stats;
mod translate;
mod tunnel;
mod tunnel_frames;
pub(crate) mod vips;
pub(crate) mod xdp;

use lb_common::{
    EventHook, Outcome,
    conntrack::{Flow, flow_flags},
};
use lb_ebpf::packet::{Body, Packet, parse};

use self::new_flow::{Begin, REJECTED};
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
    /// The same, for events.
    #[inline(always)]
    pub(crate) const fn of_event(self) -> EventHook {
        match self {
            Self::Ingress => EventHook::Ingress,
            Self::Egress => EventHook::Egress,
        }
    }

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
    match lead(skb, packet, hook) {
        Err(outcome) if hook == Hook::Ingress && decapsulate::may_be_tunnel(outcome, packet) => {
            match decapsulate::process(skb) {
                decapsulate::NOT_OURS => Err(outcome),
                done => Ok(done),
            }
        }
        done => done,
    }
}

/// The same for a packet that no tunnel ends with.
#[inline(always)]
fn lead(skb: &mut Skb, packet: &mut Packet, hook: Hook) -> Result<Outcome, Outcome> {
    let known = match short_way::process(skb, packet, hook) {
        short_way::NO_FLOW => None,
        short_way::OF_A_TURN => conntrack::lookup(&packet.tuple),
        short_way::NOT_PLAIN => {
            read(skb, packet)?;
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
        Some(flow) if goes_on(skb, packet, flow, hook)? => (flow, false),
        _ if hook == Hook::Egress => return Err(Outcome::NoService),
        _ => (begin(skb, packet, earlier)?, true),
    };
    let outcome = match follow_any(skb, packet, flow, hook) {
        BY_ROUTE => routed::forward(skb, packet, flow),
        outcome => outcome,
    };
    Ok(if is_first { outcome.of_first_packet() } else { outcome })
}

/// The entry of a flow that begins with this packet, in place of an `earlier` one.
#[inline(always)]
fn begin(skb: &mut Skb, packet: &Packet, earlier: bool) -> Result<&'static mut Flow, Outcome> {
    match new_flow::new_flow(&skb.place(), packet, earlier, Begin::Any) {
        Outcome::NewFlow | Outcome::NewRoutedFlow => {
            conntrack::lookup(&packet.tuple).ok_or(Outcome::ConntrackFull)
        }
        Outcome::NoService => Err(vips::unlisted(skb, packet)),
        REJECTED => Err(answer::reject(skb, packet)),
        other => Err(other),
    }
}

/// Whether the packet belongs to the flow with this entry, rather than being the first one of another.
#[inline(always)]
fn goes_on(skb: &Skb, packet: &Packet, flow: &Flow, hook: Hook) -> Result<bool, Outcome> {
    if hook == Hook::Egress && !hook.translates(flow) {
        return Err(Outcome::OtherHook);
    }
    if flow.flags & flow_flags::MASQUERADE != 0 {
        return Ok(true);
    }
    if conntrack::is_foreign(packet, flow) {
        return Err(Outcome::NoService);
    }
    Ok(!conntrack::is_new_connection(&skb.place(), packet, flow))
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

/// Follows the flow of a packet that takes the long way.
#[inline(never)]
fn follow_any(skb: &mut Skb, packet: &Packet, flow: &mut Flow, hook: Hook) -> Outcome {
    fragments::remember(packet);
    follow(skb, packet, flow, hook).unwrap_or_else(|early| early)
}

/// What [`follow`] says of a packet of a routed flow whose way has to be found, which is left to the caller.
const BY_ROUTE: Outcome = Outcome::NewRoutedFlow;

/// Follows the flow of a packet, rewrites it and sends it on.
#[inline(always)]
fn follow(skb: &mut Skb, packet: &Packet, flow: &mut Flow, hook: Hook) -> Result<Outcome, Outcome> {
    let is_routed = flow.flags & flow_flags::ROUTED != 0;
    let leaves = hook == Hook::Ingress && direct::leaves(skb, packet, flow);
    if !leaves && !hook.translates(flow) {
        return Err(Outcome::OtherHook);
    }
    if !leaves && is_routed {
        return Err(BY_ROUTE);
    }
    if leaves {
        conntrack::observe(packet, flow);
        translate::packet(skb, packet, flow, 1)?;
        direct::leave(skb, flow)?;
        return Ok(if is_routed { Outcome::Routed } else { Outcome::Direct });
    }
    through_stack(skb, packet, flow)
}

/// Follows the flow of a packet that goes on through the stack, and rewrites it.
#[inline(always)]
fn through_stack(skb: &mut Skb, packet: &Packet, flow: &mut Flow) -> Result<Outcome, Outcome> {
    conntrack::observe(packet, flow);
    translate::packet(skb, packet, flow, 0)?;
    Ok(match flow.flags {
        flags if flags & flow_flags::MASQUERADE != 0 => Outcome::Masquerade,
        flags if flags & flow_flags::HAIRPIN != 0 => Outcome::Hairpin,
        flags if flags & flow_flags::REPLY != 0 => Outcome::Reply,
        _ => Outcome::Forward,
    })
}
