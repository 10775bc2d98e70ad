//! The programs on packets, at tc ingress, tc egress and XDP.
//!
//! Both tc hooks run [`process`]. The programs translate a client's packets at the ingress of the device through which
//! the packets enter the node (DNAT), before the stack routes them. They translate replies back at the egress of that
//! device, after the stack has routed them. So packets at the device of a backend have the backend's own address, and
//! reverse path filters never see a virtual address. (Flows that begin at the catch device, or to a cluster IP at a
//! bridge of pods, are [caught](lb_common::conntrack::flow_flags::CAUGHT) instead.) If the client address must not
//! reach the backend, a second translation replaces it where packets leave the node towards the backend: see
//! [`flow::masquerade`].
//!
//! Nearly every packet takes the [`fast_path`], which is one function. All others take the [`slow_path`]. Rare parts of
//! the slow path are subprograms (`#[inline(never)]`), because all frames of a call chain share 512 bytes of stack. A
//! subprogram that decides about a packet returns one register: a plain [`Outcome`], or an enum that encodes its other
//! variants in values that `Outcome` does not use.

pub(crate) mod announce;
mod checksum;
pub(crate) mod clock;
mod context;
mod device;
pub(crate) mod dns;
mod early_return;
pub(crate) mod events;
pub(crate) mod fast_path;
mod filter;
pub(crate) mod flow;
mod forward;
mod fragments;
mod icmp;
pub(crate) mod link;
mod log;
mod maps;
mod reject;
mod rewrite;
mod route;
mod scratch;
pub(crate) mod service;
pub(crate) mod settings;
mod skb;
mod slow_path;
mod socket;
pub(crate) mod stats;
pub(crate) mod words;
pub(crate) mod xdp;

use lb_common::Outcome;

use lb_ebpf::parse::Packet;

pub(crate) use self::{context::Hook, skb::Skb};
use self::{fast_path::FastPath, flow::conntrack, forward::decapsulate};

/// Decides about a packet and rewrites it accordingly. `None`: the fast path has counted the packet, which passes the
/// hook.
#[inline(always)]
pub(crate) fn process(skb: &mut Skb, hook: Hook) -> Option<Outcome> {
    match fast_path::process(skb, hook) {
        FastPath::Counted => None,
        FastPath::Done(outcome) => Some(outcome),
        known => Some(process_slow(skb, hook, known)),
    }
}

/// Decides about a packet that the fast path has not handled.
#[inline(always)]
fn process_slow(skb: &mut Skb, hook: Hook, known: FastPath) -> Outcome {
    let packet = match maps::packet() {
        Ok(packet) => packet,
        Err(outcome) => return outcome,
    };
    let outcome = match process_outside_tunnel(skb, packet, hook, known) {
        Ok(outcome) => return outcome,
        Err(outcome) => outcome,
    };
    if hook == Hook::Ingress
        && decapsulate::may_be_tunnel(outcome, packet)
        && let Some(outcome) = decapsulate::process(skb)
    {
        return outcome;
    }
    fragments::remember_outcome(skb, packet, hook, outcome)
}

/// Decides about a packet by its outermost headers, after the fast path. `Err` is the outcome of a packet that no flow
/// translates at this hook; the packet may be in a tunnel.
#[inline(always)]
fn process_outside_tunnel(
    skb: &mut Skb,
    packet: &mut Packet,
    hook: Hook,
    known: FastPath,
) -> Result<Outcome, Outcome> {
    let known = match known {
        // (`process` has handled `Done` and `Counted`.)
        FastPath::Done(_) | FastPath::Counted | FastPath::NoFlow => None,
        FastPath::HasFlow => conntrack::lookup(&packet.tuple),
        FastPath::NotPlain => match slow_path::parse(skb, packet, hook)? {
            Some(outcome) => return Ok(outcome),
            None => conntrack::lookup(&packet.tuple),
        },
    };
    slow_path::process(skb, packet, hook, known)
}
