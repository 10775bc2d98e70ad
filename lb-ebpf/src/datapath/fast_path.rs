//! The fast path handles nearly all packets: those that have plain headers, and either need no flow or belong to an
//! existing flow and do not end it.
//!
//! The fast path parses such a packet into registers and never stores it. The slow path handles all other packets by
//! the same rules.

use lb_common::{
    Outcome, Verdict,
    conntrack::{Flow, Tuple},
};
use lb_ebpf::parse::{Layer, Packet, TupleRule, is_plain_and, parse_plain};

use super::{
    context::Hook,
    dns,
    filter::Filter,
    flow::{
        of_node,
        table::{self, Table, TableLookup},
    },
    forward::{self, Forwarded, decapsulate},
    maps, service, settings,
    skb::Skb,
    stats,
};

/// The result of the fast path.
///
/// It fits into one register, which is all that a subprogram returns: variants without a field are values that
/// [`Outcome`] does not use.
#[derive(Clone, Copy)]
pub(super) enum FastPath {
    /// The fast path has decided about the packet, and rewritten it if necessary: the caller must not process it again.
    Done(Outcome),
    /// The fast path has translated and counted the packet, which passes the hook. (In the XDP program, the caller then
    /// sends the frame to its next hop.) The fast path counts the packet because counting it after the return would
    /// cost several nanoseconds: the CPU would wait for the memory of the counter, and have nothing else to do.
    Counted,
    /// The headers are unusual or truncated, or there is no Ethernet header: the slow path has to parse the packet.
    NotPlain,
    /// The fast path has parsed and stored the packet; no flow has its tuple.
    NoFlow,
    /// The fast path has parsed and stored the packet. A flow has the packet's tuple, but the slow path has to decide:
    /// the packet may begin another flow or end this flow; or the flow needs a route or a PROXY protocol header, or is
    /// in the overflow. (In the XDP program also if the flow is not routed.)
    HasFlow,
}

const _: () = assert!(size_of::<FastPath>() == size_of::<Outcome>());

/// Decides about a packet, or leaves it to the slow path.
#[inline(never)]
pub(super) fn process(skb: &mut Skb, hook: Hook) -> FastPath {
    if skb.layer != Layer::Ethernet {
        return FastPath::NotPlain;
    }
    // This comes before parsing, so that the CPU loads the address of the table while it parses the packet.
    let Some(table) = Table::get() else { return FastPath::NotPlain };
    let Some(mut plain) = parse_plain(skb) else { return FastPath::NotPlain };
    let known = match table::find(table, &plain.tuple) {
        TableLookup::Flow(flow) => Some(flow),
        // Few flows are in the overflow. The slow path handles these flows: if this function handled them, the verifier
        // would check the code below twice.
        TableLookup::MayBeInOverflow if table::is_in_overflow(&plain.tuple) => {
            return stored(&plain, FastPath::HasFlow);
        }
        TableLookup::MayBeInOverflow | TableLookup::Absent => None,
    };
    match known {
        Some(flow) if plain.continues_flow() => {
            let slow = |_: &mut Skb, _: &mut Packet, _: &mut Flow| Err(Forwarded::NeedsProxyHeader);
            match forward::packet(skb, &mut plain, flow, hook, slow) {
                Forwarded::Done(outcome) => counted(outcome),
                Forwarded::NeedsRoute | Forwarded::NeedsProxyHeader => stored(&plain, FastPath::HasFlow),
            }
        }
        None if hook.is_egress() && !needs_slow_path(skb, &plain, hook) => FastPath::Done(Outcome::NoService),
        None if hook.is_egress() => stored(&plain, FastPath::NoFlow),
        None if has_no_service(&plain) && !decapsulate::may_be_tunnel(Outcome::NoService, &plain) => {
            FastPath::Done(Outcome::NoService)
        }
        Some(_) => stored(&plain, FastPath::HasFlow),
        None => stored(&plain, FastPath::NoFlow),
    }
}

/// Whether the filter shows that a plain packet has the outcome [`Outcome::NoService`], as most packets have. The
/// function is inlined, and the caller calls it before all else. It parses few fields. [`process`] parses them again:
/// passing them on would cost more.
#[inline(always)]
pub(crate) fn has_no_service_by_filter(skb: &Skb, hook: Hook) -> bool {
    let Some(filter) = Filter::get().filter(|_| skb.layer == Layer::Ethernet) else { return false };
    match hook {
        Hook::Ingress => is_plain_and(skb, NotAtIngress(filter)),
        Hook::Egress | Hook::Catch => is_plain_and(skb, NoFlow(filter)),
    }
}

/// The rule that the packet has no flow and no frontend.
pub(super) struct NoFlow(pub(super) Filter);

impl TupleRule for NoFlow {
    #[inline(always)]
    fn applies(&self, tuple: &Tuple) -> bool {
        !self.0.may_have_flow(tuple)
    }
}

/// The rule that the packet has no flow and no frontend, is for no cluster IP, and is in no tunnel.
struct NotAtIngress(Filter);

impl TupleRule for NotAtIngress {
    #[inline(always)]
    fn applies(&self, tuple: &Tuple) -> bool {
        !self.0.may_have_flow(tuple)
            && !self.0.may_be_in_service_range(&tuple.destination)
            && !decapsulate::may_be_gue(tuple)
    }
}

/// Whether a packet that leaves the node without a flow is translated nevertheless.
#[inline(always)]
fn needs_slow_path(skb: &Skb, packet: &Packet, hook: Hook) -> bool {
    of_node::begins(skb, packet, hook) || dns::is_answer(skb, &packet.tuple)
}

/// Counts a packet that passes the hook. The caller handles and counts all other packets.
#[inline(always)]
fn counted(outcome: Outcome) -> FastPath {
    if !matches!(outcome.verdict(), Verdict::Pass) {
        return FastPath::Done(outcome);
    }
    stats::count(outcome);
    FastPath::Counted
}

/// Stores the packet for the slow path.
#[inline(always)]
pub(super) fn stored(packet: &Packet, next: FastPath) -> FastPath {
    match maps::packet() {
        Ok(place) => {
            *place = *packet;
            next
        }
        Err(outcome) => FastPath::Done(outcome),
    }
}

/// Whether the destination is neither a frontend nor in the range of cluster IPs.
#[inline(always)]
fn has_no_service(packet: &Packet) -> bool {
    !service::exists(&packet.tuple) && !settings::is_in_service_range(&packet.tuple.destination)
}
