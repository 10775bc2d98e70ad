//! Masquerading: the client address becomes the node address if the backend could not answer the client directly, or
//! not through this node.
//!
//! As in netfilter this is a translation of its own, after the one from the VIP to the backend: the source is
//! exchanged where packets leave the node towards the backend, and back where packets of the backend enter. In
//! between, the stack, its reverse path filter and any network policy see the client address. So a masqueraded
//! connection is two flows. The first one gives the packets of the client a source port that the second one owns on
//! the node address.

use aya_ebpf::bindings::{BPF_FIB_LOOKUP_SKIP_NEIGH, BPF_FIB_LOOKUP_SRC, BPF_NOEXIST};
use lb_common::{
    Address, Outcome,
    conntrack::{Tuple, flow_flags},
};

use super::{
    claim::{self, Claim},
    conntrack::now,
    create::{FlowSetup, Ports},
};
use crate::datapath::{
    context::HookContext,
    forward::route::{self, ANY_LENGTH, Found},
    maps::CONNTRACK,
    settings,
};

/// No address. (An `Option` on the stack would hold undefined bytes, which the verifier refuses.)
pub(crate) const NO_ADDRESS: Address = Address::from_v6([0; 16]);

/// The source ports of masqueraded connections.
#[inline(always)]
pub(super) fn ports() -> Result<Ports, Outcome> {
    let settings = settings::current().ok_or(Outcome::NoSourcePort)?;
    Ok(Ports { first: u32::from(settings.first_port), count: u32::from(settings.ports) })
}

/// The source that packets of `to` get: the address from which the node itself would connect to the backend, as
/// MASQUERADE does. Kernels before 6.7 do not report it; then it is the address that the agent sets.
#[inline(never)]
pub(crate) fn source(context: &HookContext, to: &Tuple) -> Result<Address, Outcome> {
    let found = route::lookup(context, to, ANY_LENGTH, BPF_FIB_LOOKUP_SRC | BPF_FIB_LOOKUP_SKIP_NEIGH);
    match route::found()?.source() {
        Some(source) if found == Found::Route => Ok(source),
        _ => fallback(to.destination.is_v4()),
    }
}

/// The address that the agent sets.
#[inline(always)]
pub(crate) fn fallback(is_v4: bool) -> Result<Address, Outcome> {
    let settings = settings::current().ok_or(Outcome::NoSourcePort)?;
    let source = *settings.source(is_v4);
    if source == NO_ADDRESS { Err(Outcome::NoSourcePort) } else { Ok(source) }
}

/// Inserts the two entries that exchange the client's address in `to` for the node's. The key of the one for packets
/// of the backend must be free: that claims the source port.
#[inline(never)]
pub(super) fn claim(setup: &mut FlowSetup) -> Claim {
    prepare_reverse(setup);
    let reverse = match claim::insert(setup) {
        Claim::Taken => claim::replace(setup),
        claim => claim,
    };
    if reverse != Claim::Made {
        return reverse;
    }
    prepare_forward(setup);
    let forward = Claim::of(CONNTRACK.insert(&setup.to, &setup.flow, u64::from(BPF_NOEXIST)));
    if forward != Claim::Made {
        // Only our own: the entry of the other direction may be that of a flow that leaves by another address.
        CONNTRACK.remove(&setup.key).unwrap_or_default();
    }
    forward
}

/// Prepares the entry of the direction from the backend.
#[inline(never)]
fn prepare_reverse(setup: &mut FlowSetup) {
    setup.key = from_backend(setup);
    setup.back = setup.to.reversed();
    let flags = flow_flags::MASQUERADE | flow_flags::REPLY;
    setup.flow.init(&setup.key, &setup.back, setup.service, flags, now());
}

/// Prepares the entry of the direction to the backend.
#[inline(never)]
fn prepare_forward(setup: &mut FlowSetup) {
    setup.back = setup.to;
    setup.back.source = setup.node;
    let flags = flow_flags::MASQUERADE | flow_flags::AT_EGRESS;
    setup.flow.init(&setup.to, &setup.back, setup.service, flags, now());
}

/// The tuple of packets that the backend sends.
#[inline(always)]
fn from_backend(setup: &FlowSetup) -> Tuple {
    Tuple { destination: setup.node, ..setup.to.reversed() }
}

/// Deletes the entries that [`claim`] has inserted.
#[inline(never)]
pub(super) fn release(setup: &mut FlowSetup) {
    // They may be gone already.
    CONNTRACK.remove(&setup.to).unwrap_or_default();
    setup.key = from_backend(setup);
    CONNTRACK.remove(&setup.key).unwrap_or_default();
}
