//! The ways on which packets of flows leave the hook: through the stack, past it ([`direct`], [`routed`]), or in a tunnel.

pub(crate) mod decapsulate;
pub(crate) mod direct;
pub(crate) mod next_hop;
pub(crate) mod route;
pub(crate) mod routed;
pub(crate) mod tunnel;

use lb_common::{
    Outcome,
    conntrack::{Flow, flow_flags},
};
use lb_ebpf::parse::Packet;

use super::{Hook, flow::conntrack, rewrite, skb::Skb};

/// What [`packet`] says of a packet of a routed flow whose way has to be found, which is left to the caller.
pub(super) const BY_ROUTE: Outcome = Outcome::NewRoutedFlow;

/// Follows the flow of a packet, rewrites it and sends it on.
#[inline(always)]
pub(super) fn packet(
    skb: &mut Skb,
    packet: &Packet,
    flow: &mut Flow,
    hook: Hook,
) -> Result<Outcome, Outcome> {
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
        rewrite::packet(skb, packet, flow, 1)?;
        direct::leave(skb, flow)?;
        return Ok(if is_routed { Outcome::Routed } else { Outcome::Direct });
    }
    through_stack(skb, packet, flow)
}

/// Follows the flow of a packet that goes on through the stack, and rewrites it.
#[inline(always)]
pub(super) fn through_stack(skb: &mut Skb, packet: &Packet, flow: &mut Flow) -> Result<Outcome, Outcome> {
    conntrack::observe(packet, flow);
    rewrite::packet(skb, packet, flow, 0)?;
    Ok(match flow.flags {
        flags if flags & flow_flags::MASQUERADE != 0 => Outcome::Masquerade,
        flags if flags & flow_flags::HAIRPIN != 0 => Outcome::Hairpin,
        flags if flags & flow_flags::REPLY != 0 => Outcome::Reply,
        _ => Outcome::Forward,
    })
}
