//! XDP: receives packets of routed flows from a wire and sends them out again before the kernel allocates an skb. It
//! also drops packets that tc would drop for the same reason, for example those of clients that a Service does not
//! accept. All other packets pass to tc unchanged and uncounted, and tc decides about them: every packet is handled
//! once.

use lb_common::{
    Outcome, Verdict,
    conntrack::{Flow, NextHop, Tick, flow_flags, next_hop_flags},
};
use lb_ebpf::{
    parse::{Layer, Packet, frame::set_words, is_plain_and, parse, parse_plain},
    rewrite::{self, FrameMut as _},
    rules::{
        flow::{Relation, relation},
        forwarding::leaves_at_xdp,
    },
};

mod frame;
mod tunnel;

pub(crate) use self::frame::Xdp;
use self::frame::check;
use super::{
    clock,
    early_return::{either, outcome_of},
    fast_path::{FastPath, NoFlow, stored},
    filter::Filter,
    flow::{
        conntrack, create,
        new::{self, Begin, FlowCreation},
        table::{self, Table, TableLookup},
    },
    link, maps,
    route::next_hop,
    service, stats,
};

/// Decides about a frame and rewrites it. The caller counts only outcomes that drop or route the frame: tc decides
/// about all other frames, and counts them. `None`: the fast path has counted the frame, which leaves through its exit.
#[inline(always)]
pub(crate) fn process(xdp: &mut Xdp) -> Option<Outcome> {
    // (Not `is_some_and`: LLVM would compile its closure as a subprogram.)
    if let Some(filter) = Filter::get()
        && is_plain_and(xdp, NoFlow(filter))
    {
        return Some(Outcome::OtherHook);
    }
    match fast_path(xdp) {
        FastPath::Counted => None,
        FastPath::Done(outcome) => Some(outcome),
        known => Some(either(decide(xdp, known))),
    }
}

/// Decides about a frame that the fast path has not handled.
#[inline(always)]
fn decide(xdp: &mut Xdp, known: FastPath) -> Result<Outcome, Outcome> {
    if !link::is_for_node(xdp, xdp.context().device) {
        return Ok(Outcome::OtherHook);
    }
    let packet = maps::packet()?;
    let known = match known {
        // (`process` has handled `Done` and `Counted`.)
        FastPath::Done(_) | FastPath::Counted | FastPath::NoFlow => None,
        FastPath::HasFlow => conntrack::lookup(&packet.tuple),
        FastPath::NotPlain => {
            parse_routable(xdp, packet)?;
            conntrack::lookup(&packet.tuple)
        }
    };
    slow_path(xdp, packet, known)
}

/// The fast path of XDP. It handles plain packets of routed flows, except those that begin or end a flow, and leaves
/// plain packets that have neither a flow nor a Service to tc. The fields of these two kinds of packets stay in
/// registers; the function stores any other plain packet for the slow path.
#[inline(never)]
fn fast_path(xdp: &mut Xdp) -> FastPath {
    let Some(table) = Table::get() else { return FastPath::NotPlain };
    let Some(plain) = parse_plain(xdp) else { return FastPath::NotPlain };
    let known = match table::find(table, &plain.tuple) {
        TableLookup::Flow(flow) => Some(flow),
        // Few flows are in the overflow. The slow path handles them: if this function did, the verifier would check the
        // code below twice.
        TableLookup::MayBeInOverflow if table::is_in_overflow(&plain.tuple) => {
            return stored(&plain, FastPath::HasFlow);
        }
        TableLookup::MayBeInOverflow | TableLookup::Absent => None,
    };
    match known {
        Some(flow) if flow.flags & flow_flags::ROUTED != 0 && plain.continues_flow() => {
            counted(either(forward(xdp, &plain, flow, false)))
        }
        None if !service::exists(&plain.tuple) => FastPath::Done(Outcome::OtherHook),
        known => stored(&plain, if known.is_some() { FastPath::HasFlow } else { FastPath::NoFlow }),
    }
}

/// Counts a frame that is ready to be sent. For any other frame, the caller of [`process`] decides whether to count it.
#[inline(always)]
fn counted(outcome: Outcome) -> FastPath {
    if !matches!(outcome.verdict(), Verdict::Route) {
        return FastPath::Done(outcome);
    }
    stats::count(outcome);
    FastPath::Counted
}

/// Decides about a packet that the fast path has not handled; `known` is the entry of the packet's tuple, if there is
/// such an entry.
#[inline(always)]
fn slow_path(xdp: &mut Xdp, packet: &Packet, known: Option<&'static mut Flow>) -> Result<Outcome, Outcome> {
    let earlier = known.is_some();
    if earlier && packet.has_invalid_flags() {
        return Err(Outcome::InvalidFlags);
    }
    if let Some(flow) = known {
        if flow.flags & flow_flags::ROUTED == 0 {
            return Err(Outcome::OtherHook);
        }
        let bypasses_vip = || conntrack::delete_if_bypassed(packet, flow);
        let is_new = || conntrack::check_new_connection(&xdp.context(), packet, flow);
        match relation(flow, false, bypasses_vip, is_new) {
            Relation::Same => return Ok(forward_slow(xdp, packet, false)),
            Relation::New => {}
            Relation::OtherHook | Relation::Foreign => return Err(Outcome::OtherHook),
        }
    }
    match new::new_flow(&xdp.context(), packet, earlier, Begin::OnlyRouted) {
        FlowCreation::CreatedRouted => Ok(forward_slow(xdp, packet, true).of_first_packet()),
        FlowCreation::Stateless => Ok(send_stateless(xdp, packet)),
        // tc decides about these packets: it creates all other flows, and sends rejections.
        FlowCreation::Created | FlowCreation::Reject => Err(Outcome::OtherHook),
        FlowCreation::NotCreated(outcome) => Err(outcome),
    }
}

/// Forwards a packet of an existing flow, or the packet that has begun it (`is_first`). (A subprogram, to have a stack
/// frame of its own.)
#[inline(never)]
fn forward_slow(xdp: &mut Xdp, packet: &Packet, is_first: bool) -> Outcome {
    outcome_of(|| {
        let flow = conntrack::lookup(&packet.tuple).ok_or(Outcome::ConntrackFull)?;
        conntrack::observe_answer(packet, flow);
        forward(xdp, packet, flow, is_first)
    })
}

/// Sends a packet of a flow without entry through the flow's tunnel. (A subprogram, to have a stack frame of its own.)
#[inline(never)]
fn send_stateless(xdp: &mut Xdp, packet: &Packet) -> Outcome {
    outcome_of(|| {
        let flow = create::stateless()?;
        let hop = find_exit(xdp, packet, flow, clock::now(), false)?;
        Ok(tunnel::forward(xdp, packet, flow, hop).without_entry())
    })
}

/// Parses a packet that is not plain; returns an error if XDP must leave the packet to tc.
#[inline(never)]
fn parse_routable(xdp: &Xdp, packet: &mut Packet) -> Result<(), Outcome> {
    *packet = parse(xdp, Layer::Ethernet)?;
    if packet.may_bypass_stack() { Ok(()) } else { Err(Outcome::OtherHook) }
}

/// Updates the flow of a packet, and rewrites the packet for its next hop.
#[inline(always)]
fn forward(xdp: &mut Xdp, packet: &Packet, flow: &mut Flow, is_first: bool) -> Result<Outcome, Outcome> {
    let now = clock::now();
    let hop = find_exit(xdp, packet, flow, now, is_first)?;
    if flow.is_tunnelled() {
        return Ok(tunnel::forward(xdp, packet, flow, hop));
    }
    check(xdp, packet, u32::from(hop.mtu))?;
    conntrack::observe_at(packet, flow, now);
    // The flow has counted the packet, which may be partly rewritten: tc must not get the packet.
    write(xdp, packet, flow, hop).map_err(|_| Outcome::RewriteFailed)?;
    Ok(Outcome::Routed)
}

/// The next hop of the packet, if its frame is for this node and frames may leave from XDP through the hop's device.
///
/// About once per second on each CPU, a packet to each next hop goes to tc instead, which sends it through the kernel's
/// neighbour table: a route lookup alone would never make the kernel check that the neighbour is still reachable. This is
/// never the first packet of a flow (`is_first`), which tc would count as a further one.
#[inline(always)]
fn find_exit(
    xdp: &mut Xdp,
    packet: &Packet,
    flow: &Flow,
    now: Tick,
    is_first: bool,
) -> Result<&'static NextHop, Outcome> {
    let context = xdp.context();
    let from = flow.routed_from(&packet.tuple);
    let hop = next_hop::find(&context, from, &flow.to, now).ok_or(Outcome::OtherHook)?;
    if !leaves_at_xdp(hop.flags, hop.device == context.device) || !link::is_to(xdp, &hop.entrance) {
        return Err(Outcome::OtherHook);
    }
    if !is_first && hop.flags & next_hop_flags::REPEATED != 0 {
        hop.flags &= !next_hop_flags::REPEATED;
        return Err(Outcome::OtherHook);
    }
    xdp.exit = hop.device;
    Ok(hop)
}

#[inline(always)]
fn write(xdp: &mut Xdp, packet: &Packet, flow: &Flow, hop: &NextHop) -> Result<(), Outcome> {
    rewrite::transport(xdp, packet, flow)?;
    rewrite::network(xdp, &packet.headers, flow, 1)?;
    set_words(xdp.header_mut(0)?, hop.macs());
    Ok(())
}
