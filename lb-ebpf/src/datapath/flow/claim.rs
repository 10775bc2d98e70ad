//! The reverse entry of a new flow. The key of the entry must be free: inserting the entry claims the source port
//! towards the backend, atomically against all other CPUs.

use aya_ebpf::{btf_maps::Array, helpers::generated::bpf_loop, macros::btf_map};
use lb_common::{
    Outcome,
    conntrack::{Tuple, flow_flags},
    hash,
};
use lb_ebpf::rules::source_port;

use super::{
    entry::{claim_if_free, claim_if_over},
    masquerade,
    table::{self, lookup},
};
use crate::datapath::{
    clock::now,
    context::HookContext,
    scratch::{
        scratch,
        setup::{Claim, FlowSetup},
    },
    socket,
};

/// Backends whose source ports have run out: see [`source_port::exhausted`]. An array suffices, because it only saves
/// time: two backends with the same element overwrite each other's record.
#[btf_map]
static EXHAUSTED: Array<u64, EXHAUSTED_SLOTS> = Array::new();
const EXHAUSTED_SLOTS: usize = 1024;

/// Inserts the reverse entries of the flow in `SCRATCH`. If another flow or a socket of the node has the source port of
/// `to`, the flow in `SCRATCH` gets another source port. (Holds no reference to the [`FlowSetup`] while `try_claim`
/// runs, because `try_claim` takes a reference of its own. Inlined: on Linux 6.1 another stack frame would be too much
/// for `tc_ingress`.)
#[inline(always)]
pub(super) fn claim(context: &HookContext) -> Result<(), Outcome> {
    let setup = scratch()?.setup();
    (setup.claim, setup.ran_out) = (Claim::Taken, has_run_out(setup));
    // A copy on this stack frame. `try_claim` loads the program's context pointer from it, and the verifier tracks the
    // type of that pointer only if the program itself has stored it there.
    let mut context = *context;
    let argument = (&raw mut context).cast();
    // SAFETY: `try_claim` has the signature that the kernel calls it with, and `context` outlives the call.
    unsafe { bpf_loop(source_port::attempts(setup.ran_out), try_claim as *mut _, argument, 0) };
    let setup = scratch()?.setup();
    match setup.claim {
        Claim::Made => Ok(()),
        Claim::Taken => {
            note_run_out(setup);
            Err(Outcome::NoSourcePort)
        }
        Claim::NoRoom => Err(Outcome::ConntrackFull),
    }
}

/// Whether the ports towards the backend have run out in this tick.
#[inline(never)]
fn has_run_out(setup: &FlowSetup) -> bool {
    let hash = backend_hash(setup);
    EXHAUSTED.get(slot(hash)).is_some_and(|word| *word == source_port::exhausted(hash, now()))
}

#[inline(never)]
fn note_run_out(setup: &FlowSetup) {
    let hash = backend_hash(setup);
    if let Some(word) = EXHAUSTED.get_ptr_mut(slot(hash)) {
        // SAFETY: the pointer is that of an aligned element, which lives as long as the program runs. Another CPU may
        // store another backend, which is harmless.
        unsafe { word.write_volatile(source_port::exhausted(hash, now())) };
    }
}

#[inline(always)]
fn backend_hash(setup: &FlowSetup) -> u64 {
    let Tuple { destination_port, protocol, .. } = setup.to;
    hash::of_endpoint(0, &setup.to.destination, u32::from(destination_port) << 8 | u32::from(protocol))
}

#[inline(always)]
fn slot(hash: u64) -> u32 {
    hash as u32 % EXHAUSTED_SLOTS as u32
}

/// One attempt; returns 1 to end the loop. The kernel calls this function, so the verifier checks it once, however many
/// attempts there are.
extern "C" fn try_claim(attempt: u32, context: *mut core::ffi::c_void) -> i64 {
    // SAFETY: `claim` gave `bpf_loop` a pointer to its context, which nothing changes during the call.
    let context = unsafe { &*context.cast::<HookContext>() };
    let Ok(scratch) = scratch() else { return 1 };
    let setup = scratch.setup();
    setup.eager = source_port::is_eager(attempt, setup.ran_out);
    setup.claim = if socket_has_port(context, setup) { Claim::Taken } else { claim_entries(setup) };
    if setup.claim != Claim::Taken {
        return 1;
    }
    setup.to.source_port = setup.ports.after(setup.to.source_port);
    0
}

/// Whether a socket of the node has the source port, so that it would receive the backend's packets. Overwrites
/// `setup.key`.
#[inline(always)]
fn socket_has_port(context: &HookContext, setup: &mut FlowSetup) -> bool {
    source_port::is_of_node(setup.flags) && {
        setup.key = setup.from_backend();
        socket::awaits(context, &setup.key)
    }
}

#[inline(always)]
fn claim_entries(setup: &mut FlowSetup) -> Claim {
    if setup.is_masqueraded() {
        let masqueraded = masquerade::claim(setup);
        if masqueraded != Claim::Made {
            return masqueraded;
        }
    } else if has_leftover_second(setup) {
        return Claim::Taken;
    }
    let reverse = claim_reverse(setup);
    if reverse != Claim::Made && setup.is_masqueraded() {
        masquerade::release(setup);
    }
    reverse
}

/// Whether the second flow of an earlier masqueraded connection would replace the source of the packets, because this
/// second flow has outlived the first flow of that connection. (A second flow has one of the ports for masquerading, so
/// few clients need the lookup.)
#[inline(never)]
fn has_leftover_second(setup: &FlowSetup) -> bool {
    !source_port::is_of_node(setup.flags)
        && masquerade::ports().is_ok_and(|ports| ports.contains(setup.to.source_port))
        && lookup(&setup.to).is_some_and(|flow| flow.is_second())
}

/// Inserts the reverse entry of the client's flow. (A subprogram: its own stack frame is smaller than what inlining it
/// would add to the frame of `try_claim`.)
#[inline(never)]
fn claim_reverse(setup: &mut FlowSetup) -> Claim {
    prepare_reverse(setup);
    match claim_if_free(setup) {
        Claim::Taken if reclaim(setup) => Claim::Made,
        Claim::Taken if source_port::is_of_node(setup.flags) => claim_if_over(setup),
        claim => claim,
    }
}

/// Prepares the reverse entry. (A subprogram: its stack frame is freed before the next subprogram begins.)
#[inline(never)]
fn prepare_reverse(setup: &mut FlowSetup) {
    setup.key = setup.to.reversed();
    setup.back = setup.from.reversed();
    let flags = flow_flags::reverse(setup.flags);
    setup.flow.init(&setup.key, &setup.back, setup.service, flags, now());
    setup.flow.active_flows_slot = setup.active_flows_slot;
}

/// Takes over a reverse entry with the same translation, which an earlier flow of this client to this backend has left.
#[inline(always)]
fn reclaim(setup: &mut FlowSetup) -> bool {
    match lookup(&setup.key) {
        Some(existing) if existing.to == setup.flow.to => {
            setup.flow.continue_counters(existing);
            table::replace(&setup.key, &setup.flow)
        }
        _ => false,
    }
}

/// Deletes the reverse entries that [`claim`] has inserted. The entries may be gone already.
#[inline(always)]
pub(super) fn release(setup: &mut FlowSetup) {
    setup.key = setup.to.reversed();
    table::remove(&setup.key);
    if setup.is_masqueraded() {
        masquerade::release(setup);
    }
}
