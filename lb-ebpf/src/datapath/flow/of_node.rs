//! Connections of the node's own sockets whose source port a flow already uses towards the same endpoint: a masqueraded
//! flow or a hairpin flow. The endpoint's answers would reach that flow.
//!
//! As with netfilter, the later of the two gets another port. If the connection is later, it becomes a flow of its own:
//! the programs replace the source port where packets leave the node, and restore it where answers enter. If the flow
//! is later, it takes no port that a socket has: see [`socket`].
//!
//! [`socket`]: crate::datapath::socket

use lb_common::{
    Outcome,
    conntrack::{Flow, Tuple, flow_flags},
};
use lb_ebpf::{parse::Packet, rules};

use super::{
    create, masquerade,
    table::{Inserted, lookup},
};
use crate::datapath::{
    context::{Hook, HookContext},
    link,
    scratch::scratch,
    skb::Skb,
};

/// Whether this packet, which leaves the node and belongs to no flow, begins a connection whose source port a flow
/// already uses. False at the catch device: its packets enter the node again, and a flow to an endpoint begins only
/// then.
#[inline(always)]
pub(crate) fn begins(skb: &Skb, packet: &Packet, hook: Hook) -> bool {
    hook == Hook::Egress
        && rules::flow::may_begin_at_egress(packet.body, &packet.segment)
        && is_of_node(skb, packet.headers.l3)
        && flow_has_port(&packet.tuple) != 0
}

/// Whether `flow` is a connection of the node, but this packet, which has the tuple of that connection, belongs to the
/// other flow with the same source port. Such a packet is already translated, and bypasses the stack. `l3` is the
/// offset of the packet's network header.
#[inline(always)]
pub(crate) fn is_of_other_flow(skb: &Skb, l3: u32, hook: Hook, flow: &Flow) -> bool {
    rules::flow::is_of_other_flow(flow, hook.is_egress(), || is_of_node(skb, l3))
}

/// Whether a socket of this network namespace has sent the packet through this device. False for a frame of a VLAN,
/// which was sent through the VLAN's device. If that device is in this network namespace, its programs have replaced
/// the source port if necessary, and translate the answers; otherwise the socket is in another network namespace as
/// well.
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

/// Creates the flow that begins with this packet. If `earlier` is true, the flow replaces an earlier flow.
#[inline(never)]
pub(crate) fn create(context: &HookContext, packet: &Packet, earlier: bool) -> Result<(), Outcome> {
    let setup = scratch()?.setup();
    (setup.from, setup.to) = (packet.tuple, packet.tuple);
    setup.ports = masquerade::ports()?;
    setup.to.source_port = setup.ports.random();
    setup.flags = flow_flags::AT_EGRESS;
    (setup.service, setup.active_flows_slot) = (0, 0);
    match create::insert_entries(context, earlier)? {
        Inserted::New | Inserted::Exists => Ok(()),
        Inserted::Full => Err(Outcome::ConntrackFull),
    }
}
