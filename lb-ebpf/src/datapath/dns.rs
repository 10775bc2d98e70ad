//! Node-local DNS: queries of the node's pods to the cluster IP of the DNS Service go to the DNS server of the agent,
//! whose answers leave with that cluster IP as source. The rule is [`lb_ebpf::rules::dns`].
//!
//! Such packets have no flow: for each cluster IP and protocol, one entry of `DNS_INTERCEPT` translates queries and one
//! translates answers, each packet by itself. Without the entries, or if the server does not answer, new queries are
//! packets to a Service like any other.

use aya_ebpf::helpers::generated::bpf_ktime_get_coarse_ns;
use lb_common::{
    DnsIntercept, Outcome, ServiceKey,
    conntrack::{Tick, Tuple},
};
use lb_ebpf::{
    parse::Packet,
    rules::{
        dns::{self, Query},
        forwarding::is_workload,
    },
};

use super::{
    device, early_return::outcome_of, flow::create, maps::DNS_INTERCEPT, rewrite, scratch::scratch, skb::Skb,
    socket,
};

/// Decides what happens to a packet that may be a query ([`dns::may_be_query`]). The packet has no flow, or a flow that
/// has to be replaced (`earlier` is true). If the packet goes to the DNS server of the agent, this function deletes the
/// earlier flow, and the caller calls [`to_server`].
#[inline(never)]
pub(super) fn query(skb: &Skb, packet: &Packet, earlier: bool) -> Query {
    let from = &packet.tuple;
    let key = ServiceKey::new(from.destination, from.destination_port, from.protocol);
    let (Some(server), Ok(scratch)) = (lookup(&key), scratch()) else { return Query::Service };
    if !is_of_pod(skb) {
        return Query::Service;
    }
    let setup = scratch.setup();
    (setup.from, setup.to) = (*from, *from);
    (setup.to.destination, setup.to.destination_port) = (server.address, server.port);
    // SAFETY: the helper takes nothing and only returns a number.
    let now = unsafe { bpf_ktime_get_coarse_ns() };
    let found = socket::of_server(&skb.context(), &setup.to);
    let query = dns::query(from.protocol, &packet.segment, server.lease(now), found);
    if query == Query::Local && earlier {
        create::delete(setup);
    }
    query
}

/// Rewrites a query so that it goes to the server that [`query`] has found.
#[inline(never)]
pub(super) fn to_server(skb: &mut Skb, packet: &Packet) -> Outcome {
    outcome_of(|| translate(skb, packet, dns::outcome(packet.tuple.protocol, &packet.segment)))
}

/// Whether a packet that leaves the node without a flow is an answer of the DNS server. (Calls a global function: the
/// verifier checks it once.)
#[inline(always)]
pub(super) fn is_answer(skb: &Skb, tuple: &Tuple) -> bool {
    dns_is_answer(tuple) != 0 && is_of_pod(skb)
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn dns_is_answer(tuple: *const Tuple) -> u32 {
    // SAFETY: the verifier accepts only callers whose pointer leads to an initialised `Tuple`, or is null.
    let Some(tuple) = (unsafe { tuple.as_ref() }) else { return 0 };
    u32::from(answered_by(tuple).is_some())
}

/// Gives an answer of the DNS server the cluster IP as its source.
#[inline(never)]
pub(super) fn answer(skb: &mut Skb, packet: &Packet) -> Outcome {
    outcome_of(|| {
        let client = answered_by(&packet.tuple).ok_or(Outcome::NoService)?;
        let setup = scratch()?.setup();
        (setup.from, setup.to) = (packet.tuple, packet.tuple);
        (setup.to.source, setup.to.source_port) = (client.address, client.port);
        translate(skb, packet, Outcome::DnsAnswer)
    })
}

/// Whether queries to this endpoint may go to the DNS server of the agent.
#[inline(always)]
pub(crate) fn has_server(key: &ServiceKey) -> bool {
    lookup(key).is_some()
}

/// Rewrites the packet as the setup in `SCRATCH` says.
#[inline(always)]
fn translate(skb: &mut Skb, packet: &Packet, outcome: Outcome) -> Result<Outcome, Outcome> {
    let setup = scratch()?.setup();
    setup.flow.init(&setup.from, &setup.to, 0, 0, Tick(0));
    rewrite::packet(skb, packet, &setup.flow, 0)?;
    Ok(outcome)
}

/// The entry for answers from the source of `tuple`.
#[inline(always)]
fn answered_by(tuple: &Tuple) -> Option<DnsIntercept> {
    lookup(&ServiceKey::new(tuple.source, tuple.source_port, tuple.protocol))
        .filter(DnsIntercept::is_of_answers)
}

#[inline(always)]
fn lookup(key: &ServiceKey) -> Option<DnsIntercept> {
    // SAFETY: the memory of an element stays mapped while the program runs, and the value is copied at once. If the map
    // reuses the memory meanwhile, the copy is that of another endpoint of the same server.
    unsafe { DNS_INTERCEPT.get(key) }.copied()
}

/// Whether the packet's device is the host-side interface of a pod.
#[inline(always)]
fn is_of_pod(skb: &Skb) -> bool {
    is_workload(&device::info(skb.context().device))
}
