//! Forwarding packets of flows: through the stack, bypassing it ([`direct`], [`routed`]), in a [`tunnel`] (ICMP errors
//! about tunnelled packets: [`tunnel_error`]), or with a PROXY protocol header ([`proxy_protocol`]).

pub(crate) mod decapsulate;
pub(crate) mod direct;
pub(crate) mod proxy_protocol;
pub(crate) mod routed;
pub(crate) mod tunnel;
pub(super) mod tunnel_error;

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
/// It fits into one register, which is all that a subprogram returns: variants without a field are values that
/// [`Outcome`] does not use.
#[derive(Clone, Copy)]
pub(super) enum Forwarded {
    /// The packet is handled, with this outcome.
    Done(Outcome),
    /// The packet is not forwarded yet: it belongs to a routed or tunnelled flow, and [`direct`] cannot send it on, but
    /// [`routed::forward`] can.
    NeedsRoute,
    /// The packet is not forwarded yet: its backend gets a PROXY protocol header, so [`proxy_protocol::change`] must
    /// come first.
    NeedsProxyHeader,
}

const _: () = assert!(size_of::<Forwarded>() == size_of::<Outcome>());

/// Updates the flow of a packet, rewrites the packet and sends it on. If the backend gets a PROXY protocol header, the
/// function first calls `change`, which changes the packet. If `change` returns an error, the packet is not forwarded,
/// and that error is the result.
#[inline(always)]
pub(super) fn packet(
    skb: &mut Skb,
    packet: &mut Packet,
    flow: &mut Flow,
    hook: Hook,
    change: impl FnOnce(&mut Skb, &mut Packet, &mut Flow) -> Result<(), Forwarded>,
) -> Forwarded {
    if hook == Hook::Ingress
        && let Some(hop) = direct::next_hop(skb, packet, flow)
    {
        return Forwarded::Done(either(direct::forward(skb, packet, flow, hop)));
    }
    if !hook.translates(flow) || of_node::is_of_other_flow(skb, packet.headers.l3, hook, flow) {
        return Forwarded::Done(Outcome::OtherHook);
    }
    if flow.flags & (flow_flags::ROUTED | flow_flags::PROXY_PROTOCOL) != 0 {
        if !flow.has_proxy_header() {
            return Forwarded::NeedsRoute;
        }
        if let Err(forwarded) = change(skb, packet, flow) {
            return forwarded;
        }
    }
    Forwarded::Done(either(translate_at_tc(skb, packet, flow)))
}

/// Translates a packet at tc, see [`rules::flow::translated_at_tc`].
#[inline(always)]
pub(super) fn translate_at_tc(skb: &mut Skb, packet: &Packet, flow: &mut Flow) -> Result<Outcome, Outcome> {
    conntrack::observe(packet, flow);
    rewrite::packet(skb, packet, flow, 0)?;
    Ok(rules::flow::translated_at_tc(flow))
}
