//! The reverse entry of a new flow. Its key must be free: inserting it claims the source port towards the backend,
//! atomically against all other CPUs.

use aya_ebpf::{bindings::BPF_EXIST, helpers::generated::bpf_loop};
use lb_common::{Outcome, conntrack::flow_flags};

use super::{
    conntrack::lookup,
    entry::{insert, put, replace},
    masquerade,
};
use crate::datapath::{
    clock::now,
    maps::CONNTRACK,
    scratch::{
        scratch,
        setup::{Claim, FlowSetup},
    },
};

/// Source ports tried towards a backend before a connection is given up.
const SOURCE_PORT_ATTEMPTS: u32 = 64;
/// Attempts after which a port is taken even if the other end may still expect packets of its last connection.
const CAUTIOUS_ATTEMPTS: u32 = 32;

/// Inserts the reverse entries of the flow in `SCRATCH`, with another source port where that of `to` is taken.
/// (Holds no reference to the flow: `try_claim` takes one of its own.)
#[inline(never)]
pub(super) fn claim() -> Result<(), Outcome> {
    let setup = scratch()?.setup();
    (setup.claim, setup.eager) = (Claim::Taken, false);
    // SAFETY: `try_claim` has the signature that the kernel calls it with, and uses no context.
    unsafe { bpf_loop(SOURCE_PORT_ATTEMPTS, try_claim as *mut _, core::ptr::null_mut(), 0) };
    match scratch()?.setup().claim {
        Claim::Made => Ok(()),
        Claim::Taken => Err(Outcome::NoSourcePort),
        Claim::NoRoom => Err(Outcome::ConntrackFull),
    }
}

/// One attempt; 1 ends the loop. Called by the kernel, so that the verifier walks it once, however many attempts
/// there are.
extern "C" fn try_claim(attempt: u32, _context: *mut core::ffi::c_void) -> i64 {
    let Ok(scratch) = scratch() else { return 1 };
    let setup = scratch.setup();
    setup.eager = attempt >= CAUTIOUS_ATTEMPTS;
    setup.claim = claim_entries(setup);
    if setup.claim != Claim::Taken {
        return 1;
    }
    setup.to.source_port = setup.ports.random();
    0
}

#[inline(always)]
fn claim_entries(setup: &mut FlowSetup) -> Claim {
    if !setup.is_masqueraded() {
        return claim_reverse(setup);
    }
    let masqueraded = masquerade::claim(setup);
    if masqueraded != Claim::Made {
        return masqueraded;
    }
    let reverse = claim_reverse(setup);
    if reverse != Claim::Made {
        masquerade::release(setup);
    }
    reverse
}

#[inline(never)]
fn claim_reverse(setup: &mut FlowSetup) -> Claim {
    prepare_reverse(setup);
    match insert(setup) {
        Claim::Taken if reclaim(setup) => Claim::Made,
        Claim::Taken if setup.has_port_of_node() => replace(setup),
        claim => claim,
    }
}

/// Prepares the reverse entry. (With a stack frame of its own, which is gone before the next one begins.)
#[inline(never)]
fn prepare_reverse(setup: &mut FlowSetup) {
    setup.key = setup.to.reversed();
    setup.back = setup.from.reversed();
    let flags = flow_flags::reverse(setup.flags);
    setup.flow.init(&setup.key, &setup.back, setup.service, flags, now());
    setup.flow.active_flows_slot = setup.active_flows_slot;
}

/// Takes over a reverse entry that this very flow left behind.
#[inline(always)]
fn reclaim(setup: &mut FlowSetup) -> bool {
    match lookup(&setup.key) {
        Some(existing) if existing.to == setup.flow.to => {
            setup.flow.continue_counters(existing);
            put(&setup.key, &setup.flow, BPF_EXIST).is_ok()
        }
        _ => false,
    }
}

/// Deletes the reverse entries that [`claim`] has inserted. Nothing is lost if they are gone already.
#[inline(always)]
pub(super) fn release(setup: &mut FlowSetup) {
    setup.key = setup.to.reversed();
    CONNTRACK.remove(&setup.key).unwrap_or_default();
    if setup.is_masqueraded() {
        masquerade::release(setup);
    }
}
