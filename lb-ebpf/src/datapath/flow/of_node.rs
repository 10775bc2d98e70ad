//! Connections of the node's own sockets from a source port that a flow has towards the same endpoint: of a masqueraded
//! client, or of a hairpin. The endpoint's answers would reach that flow.
//!
//! As netfilter does, the later one gets another port: such a connection becomes a flow of its own, which exchanges the
//! source port where packets leave the node, and back where answers enter. (The other order is [`socket`]'s: a flow takes
//! no port that a socket has.)
//!
//! [`socket`]: crate::datapath::socket

use lb_common::{
    Outcome,
    conntrack::{Flow, Tuple, flow_flags},
};
use lb_ebpf::{
    parse::Packet,
    rules::{self, forwarding::is_catch},
};

use super::{
    create, masquerade,
    table::{Inserted, lookup},
};
use crate::datapath::{
    context::{Hook, HookContext},
    device,
    early_return::either,
    link,
    scratch::{scratch, setup::NO_ADDRESS},
    skb::Skb,
};

/// Whether a packet of no flow that leaves the node begins a connection whose source port a flow has. At the catch device
/// it does not leave: a flow to an endpoint begins where it enters the node again.
#[inline(always)]
pub(crate) fn begins(skb: &Skb, packet: &Packet) -> bool {
    rules::flow::may_begin_at_egress(packet.body, &packet.segment)
        && is_of_node(skb, packet.headers.l3)
        && flow_has_port(&packet.tuple) != 0
        && !is_catch(&device::info(skb.context().device))
}

/// Whether the packet only looks like one of this connection of the node: it belongs to the flow that has the source port, is
/// translated already, and bypasses the stack. `l3` is the offset of its network header.
#[inline(always)]
pub(crate) fn is_of_other_flow(skb: &Skb, l3: u32, hook: Hook, flow: &Flow) -> bool {
    rules::flow::is_of_other_flow(flow, hook == Hook::Egress, || is_of_node(skb, l3))
}

/// Whether a socket of the node has made the packet, for this device. A frame of a VLAN was made for the VLAN's device: its
/// programs have exchanged the source port if need be, and take the answers. Or that device, and the socket, are in another
/// network namespace.
#[inline(always)]
fn is_of_node(skb: &Skb, l3: u32) -> bool {
    skb.is_from_node() && !link::is_of_vlan(skb, l3)
}

/// Whether a flow expects the answers to packets of this tuple. (A global function: the verifier checks it once.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn flow_has_port(tuple: *const Tuple) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Tuple`, or is null.
    let Some(tuple) = (unsafe { tuple.as_ref() }) else { return 0 };
    let answers = tuple.reversed();
    u32::from(lookup(&answers).is_some_and(|flow| rules::flow::takes_answers_of_node(flow)))
}

/// Creates the flow that begins with this packet, in place of an `earlier` one; returns the outcome of its packets, or why
/// there is none.
#[inline(never)]
pub(crate) fn create(context: &HookContext, packet: &Packet, earlier: bool) -> Outcome {
    either(try_create(context, packet, earlier))
}

#[inline(always)]
fn try_create(context: &HookContext, packet: &Packet, earlier: bool) -> Result<Outcome, Outcome> {
    let setup = scratch()?.setup();
    (setup.from, setup.to) = (packet.tuple, packet.tuple);
    setup.ports = masquerade::ports()?;
    setup.to.source_port = setup.ports.random();
    setup.node = NO_ADDRESS;
    setup.flags = flow_flags::AT_EGRESS;
    (setup.service, setup.active_flows_slot) = (0, 0);
    match create::insert(context, earlier)? {
        Inserted::New | Inserted::Exists => Ok(Outcome::Masquerade),
        Inserted::Full => Err(Outcome::ConntrackFull),
    }
}
