//! Masquerading: a client that a backend could not answer directly, or not through this node, gets the node's address.
//!
//! As in netfilter this is a translation of its own, behind the one from the VIP to the backend: the source is
//! exchanged where packets leave the node towards the backend, and back where the backend's packets enter. In between,
//! the stack, its reverse path filter and any network policy see the client's own address. So a masqueraded connection
//! is two flows; the first one gives the client's packets a source port that the second one owns on the node's address.

use aya_ebpf::bindings::{BPF_FIB_LOOKUP_SKIP_NEIGH, BPF_FIB_LOOKUP_SRC, BPF_NOEXIST};
use lb_common::{
    Address, Backend, Outcome, backend_flags,
    conntrack::{Tuple, flow_flags},
};

use super::{
    conntrack::{forget_over, now},
    create::{Claim, EEXIST, FlowSetup, Ports},
};
use crate::datapath::{
    context::HookContext,
    forward::route::{self, Found},
    maps::CONNTRACK,
    settings,
};

/// The source of a connection that is not masqueraded. (An `Option` on the stack would hold undefined octets.)
pub(in crate::datapath) const NOBODY: Address = Address::from_v6([0; 16]);

/// Whether the backend is the node itself: packets to it never leave.
#[inline(always)]
pub(in crate::datapath) fn is_here(backend: &Backend) -> bool {
    backend.flags & backend_flags::HOST != 0
}

/// The ports that masqueraded connections have.
#[inline(always)]
pub(in crate::datapath) fn ports() -> Result<Ports, Outcome> {
    let settings = settings::current().ok_or(Outcome::NoSourcePort)?;
    Ok(Ports { first: u32::from(settings.first_port), count: u32::from(settings.ports) })
}

/// The address that packets of `to` get: the one that the node itself would speak to the backend from (as MASQUERADE
/// does), or where the kernel does not tell that (before 6.7), the one that the agent gives.
#[inline(never)]
pub(in crate::datapath) fn source(context: &HookContext, to: &Tuple) -> Result<Address, Outcome> {
    // So short that it always fits: the packet's size does not matter here.
    const ANY: u16 = 1;
    let found = route::look_up(context, to, ANY, BPF_FIB_LOOKUP_SRC | BPF_FIB_LOOKUP_SKIP_NEIGH);
    match route::found()?.source() {
        Some(source) if found == Found::Route => Ok(source),
        _ => fallback(to.destination.is_v4()),
    }
}

/// The address that the agent gives.
#[inline(always)]
pub(in crate::datapath) fn fallback(is_v4: bool) -> Result<Address, Outcome> {
    let settings = settings::current().ok_or(Outcome::NoSourcePort)?;
    let source = if is_v4 { settings.source_v4 } else { settings.source_v6 };
    if source == NOBODY { Err(Outcome::NoSourcePort) } else { Ok(source) }
}

/// Makes the two entries that exchange the client's address in `to` for the node's. The one for packets of the backend
/// must be free: that claims the source port.
#[inline(never)]
pub(in crate::datapath) fn claim(setup: &mut FlowSetup) -> Claim {
    prepare_reply(setup);
    let mut result = CONNTRACK.insert(&setup.key, &setup.flow, u64::from(BPF_NOEXIST));
    if result == Err(EEXIST) && forget_over(&setup.key, setup.eager, &mut setup.over) {
        result = CONNTRACK.insert(&setup.key, &setup.flow, u64::from(BPF_NOEXIST));
    }
    match result {
        Ok(()) => {}
        Err(EEXIST) => return Claim::Taken,
        Err(_) => return Claim::NoRoom,
    }
    prepare_forward(setup);
    let result = CONNTRACK.insert(&setup.to, &setup.flow, u64::from(BPF_NOEXIST));
    if result.is_err() {
        // Only what is ours: the other half may be that of a flow that leaves by another address.
        CONNTRACK.remove(&setup.key).unwrap_or_default();
    }
    match result {
        Ok(()) => Claim::Made,
        Err(EEXIST) => Claim::Taken,
        Err(_) => Claim::NoRoom,
    }
}

/// The entry of the direction from the backend.
#[inline(never)]
fn prepare_reply(setup: &mut FlowSetup) {
    setup.key = from_backend(setup);
    setup.back = setup.to.reversed();
    let flags = flow_flags::MASQUERADE | flow_flags::REPLY;
    setup.flow.init(&setup.key, &setup.back, setup.service, flags, now());
}

/// The entry of the direction to the backend.
#[inline(never)]
fn prepare_forward(setup: &mut FlowSetup) {
    setup.back = setup.to;
    setup.back.source = setup.node;
    let flags = flow_flags::MASQUERADE | flow_flags::AT_EGRESS;
    setup.flow.init(&setup.to, &setup.back, setup.service, flags, now());
}

/// What the backend sends.
#[inline(always)]
fn from_backend(setup: &FlowSetup) -> Tuple {
    Tuple { destination: setup.node, ..setup.to.reversed() }
}

/// Gives up what [`claim`] made.
#[inline(never)]
pub(in crate::datapath) fn release(setup: &mut FlowSetup) {
    // Nothing is lost if they are gone already.
    CONNTRACK.remove(&setup.to).unwrap_or_default();
    setup.key = from_backend(setup);
    CONNTRACK.remove(&setup.key).unwrap_or_default();
}
