//! Masquerading: the node's address replaces the client's where the Service requires it, because the backend's replies
//! might not come back through this node otherwise.
//!
//! As in netfilter, this is a second translation, after the one from the VIP to the backend. The programs replace the
//! source where packets leave the node towards the backend, and restore the client's address where the backend's
//! packets enter. In between, packets have the client's address, for the stack, its reverse path filter and any network
//! policy. So a masqueraded connection is two flows, unless it is routed. The first flow gives the client's packets a
//! source port that the second flow has claimed at the node's address.

use aya_ebpf::bindings::{BPF_FIB_LOOKUP_SKIP_NEIGH, BPF_FIB_LOOKUP_SRC};
use lb_common::{
    Address, Outcome,
    conntrack::{Tuple, flow_flags},
};
use lb_ebpf::rules::forwarding;

use super::{
    entry::{claim_if_free, claim_if_over},
    table,
};
use crate::datapath::{
    clock::now,
    context::HookContext,
    device,
    route::{self, ANY_LENGTH, FibResult, next_hop},
    scratch::setup::{Claim, FlowSetup, Ports},
    settings,
};

/// The source ports of masqueraded connections.
#[inline(always)]
pub(super) fn ports() -> Result<Ports, Outcome> {
    let settings = settings::current().ok_or(Outcome::NoSourcePort)?;
    Ok(Ports { first: u32::from(settings.first_port), count: u32::from(settings.ports) })
}

/// The node's address for packets that come in as `from` and become `to`: the address from which the node itself would
/// connect to the backend, as with netfilter's MASQUERADE. If there is no route, or the kernel does not report the
/// address (before 6.7), the result is the address that the agent has set.
#[inline(never)]
pub(crate) fn source(context: &HookContext, from: &Tuple, to: &Tuple) -> Result<Address, Outcome> {
    let found = route::lookup(context, from, to, ANY_LENGTH, BPF_FIB_LOOKUP_SRC | BPF_FIB_LOOKUP_SKIP_NEIGH);
    match route::found()?.source(to.destination.is_v4()) {
        Some(source) if found == FibResult::Route => Ok(source),
        _ => fallback(to.destination.is_v4()),
    }
}

/// The node's address for a flow whose packets come in as `from` and become `to`, if the flow can be routed: its
/// packets enter and leave through wire devices, and every packet that one of the two devices receives fits the MTU of
/// the other. Otherwise [`Address::NONE`]. The function caches the next hop that it finds, for the first packet of the
/// flow.
#[inline(never)]
pub(super) fn routed_source(context: &HookContext, from: &Tuple, to: &Tuple) -> Address {
    let entrance = device::info(context.device);
    if !forwarding::is_wire(&entrance) {
        return Address::NONE;
    }
    let length = u16::try_from(entrance.mtu).unwrap_or(u16::MAX);
    let found = route::lookup(context, from, to, length, BPF_FIB_LOOKUP_SRC);
    match found {
        FibResult::Route | FibResult::WithoutNeighbour => {}
        FibResult::TooNarrow | FibResult::Nothing => return Address::NONE,
    }
    next_hop::store(context, from, to, found, now());
    let Ok(route) = route::found() else { return Address::NONE };
    if !forwarding::is_routed(&entrance, &device::info(route.device)) {
        return Address::NONE;
    }
    match route.source(to.destination.is_v4()) {
        Some(source) => source,
        None => fallback(to.destination.is_v4()).unwrap_or(Address::NONE),
    }
}

/// The node's address that the agent has set.
#[inline(always)]
pub(crate) fn fallback(is_v4: bool) -> Result<Address, Outcome> {
    let settings = settings::current().ok_or(Outcome::NoSourcePort)?;
    let source = *settings.source(is_v4);
    if source == Address::NONE { Err(Outcome::NoSourcePort) } else { Ok(source) }
}

/// Inserts the two entries that exchange the client's address in `to` for the node's. Inserting the entry for the
/// backend's packets claims the source port. The result is [`Claim::Taken`] if another flow has the key of that entry
/// and cannot be replaced, or if another flow has the key of the entry for the client's packets.
#[inline(never)]
pub(super) fn claim(setup: &mut FlowSetup) -> Claim {
    prepare_reverse(setup);
    let reverse = match claim_if_free(setup) {
        Claim::Taken => claim_if_over(setup),
        claim => claim,
    };
    if reverse != Claim::Made {
        return reverse;
    }
    prepare_forward(setup);
    let forward = Claim::of(table::insert(&setup.to, &setup.flow));
    if forward != Claim::Made {
        // Removes only the entry inserted above. If there is an entry with the key `to`, it belongs to another flow,
        // whose packets may leave with another address of the node.
        table::remove(&setup.key);
    }
    forward
}

/// Prepares the entry of the direction from the backend.
#[inline(never)]
fn prepare_reverse(setup: &mut FlowSetup) {
    setup.key = setup.from_backend();
    setup.back = setup.to.reversed();
    let flags = flow_flags::SECOND_OF_MASQUERADED | flow_flags::REPLY;
    setup.flow.init(&setup.key, &setup.back, setup.service, flags, now());
}

/// Prepares the entry of the direction to the backend.
#[inline(never)]
fn prepare_forward(setup: &mut FlowSetup) {
    setup.back = setup.to;
    setup.back.source = setup.node;
    let flags = flow_flags::SECOND_OF_MASQUERADED | flow_flags::AT_EGRESS;
    setup.flow.init(&setup.to, &setup.back, setup.service, flags, now());
}

/// Deletes the entries that [`claim`] has inserted.
#[inline(never)]
pub(super) fn release(setup: &mut FlowSetup) {
    // Another CPU or GC may have deleted either entry already; `remove` ignores a missing entry.
    table::remove(&setup.to);
    setup.key = setup.from_backend();
    table::remove(&setup.key);
}
