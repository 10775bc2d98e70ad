//! Forwarding packets of flows: through the stack, bypassing it ([`direct`], [`routed`]), or in a [`tunnel`].

pub(crate) mod decapsulate;
pub(crate) mod direct;
pub(crate) mod routed;
pub(crate) mod tunnel;

use lb_common::{
    Outcome,
    conntrack::{Flow, flow_flags},
};
use lb_ebpf::{parse::Packet, rules};

use super::{
    context::Hook,
    early_return::either,
    flow::{conntrack, of_node},
    rewrite,
    skb::Skb,
};

/// The result of [`packet`].
///
/// It fits into one register, which is all that a subprogram returns: the variant without a field is a value that
/// [`Outcome`] does not use.
#[derive(Clone, Copy)]
pub(super) enum Forwarded {
    /// The packet is handled, with this outcome.
    Done(Outcome),
    /// The packet is not forwarded yet: it belongs to a routed flow whose route is unknown ([`routed::forward`]).
    NeedsRoute,
}

const _: () = assert!(size_of::<Forwarded>() == size_of::<Outcome>());

/// Updates the flow of a packet, rewrites the packet and sends it on.
#[inline(always)]
pub(super) fn packet(skb: &mut Skb, packet: &Packet, flow: &mut Flow, hook: Hook) -> Forwarded {
    if hook == Hook::Ingress
        && let Some(hop) = direct::next_hop(skb, packet, flow)
    {
        return Forwarded::Done(either(direct::forward(skb, packet, flow, hop)));
    }
    if !hook.translates(flow) || of_node::is_of_other_flow(skb, packet.headers.l3, hook, flow) {
        return Forwarded::Done(Outcome::OtherHook);
    }
    if flow.flags & flow_flags::ROUTED != 0 {
        return Forwarded::NeedsRoute;
    }
    Forwarded::Done(either(through_stack(skb, packet, flow)))
}

/// Forwards a packet through the stack.
#[inline(always)]
pub(super) fn through_stack(skb: &mut Skb, packet: &Packet, flow: &mut Flow) -> Result<Outcome, Outcome> {
    conntrack::observe(packet, flow);
    rewrite::packet(skb, packet, flow, 0)?;
    Ok(rules::flow::translated(flow))
}
