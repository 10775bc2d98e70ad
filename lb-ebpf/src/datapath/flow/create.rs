//! The beginning of a flow: its backend, and the entries of both directions.

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_EXIST, BPF_NOEXIST},
    helpers::generated::{bpf_get_prandom_u32, bpf_loop},
};
use lb_common::{
    Address, Choice, Outcome, Service, backend_flags,
    conntrack::{Flow, NextHop, Tuple, flow_flags},
};
use lb_ebpf::{parse::Packet, service::schedule};

use super::{
    active_flows, affinity,
    conntrack::{Keys, forget_over, lookup, now},
    masquerade,
};
use crate::datapath::{
    context::HookContext,
    forward::{routed, tunnel},
    maps::{CONNTRACK, Scratch, scratch},
    service,
};

/// Source ports tried towards a backend before a connection is given up.
const SOURCE_PORT_ATTEMPTS: u32 = 64;
/// Those after which ports are taken that their last connection may not be quite done with.
const CAUTIOUS_ATTEMPTS: u32 = 32;
/// The source ports that are tried in place of a client's own: all but the privileged ones.
const SOURCE_PORTS: Ports = Ports { first: 1024, count: 65_536 - 1024 };

pub(in crate::datapath) const EEXIST: i32 = -17;

/// Source ports to choose from.
#[derive(Clone, Copy)]
pub(in crate::datapath) struct Ports {
    pub(in crate::datapath) first: u32,
    pub(in crate::datapath) count: u32,
}

impl Ports {
    /// One of them.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the agent gives no range that goes beyond 2^16")]
    fn any(self) -> u16 {
        (self.first + schedule::scale(random(), self.count)) as u16
    }
}

#[inline(always)]
pub(crate) fn random() -> u32 {
    // SAFETY: takes nothing and has no side effects.
    unsafe { bpf_get_prandom_u32() }
}

/// A flow that begins. It lies in `SCRATCH`, because the stack has no room for so many tuples.
pub(in crate::datapath) struct FlowSetup {
    /// What the client sends.
    pub(in crate::datapath) from: Tuple,
    /// What that becomes.
    pub(in crate::datapath) to: Tuple,
    /// The source that packets of a masqueraded flow leave the node with, if that is a flow of its own; else
    /// [`masquerade::NOBODY`].
    pub(in crate::datapath) node: Address,
    /// How packets go on: [`flow_flags::HAIRPIN`], [`flow_flags::ROUTED`], that with [`flow_flags::TUNNEL`],
    /// [`flow_flags::MASQUERADED`], or 0.
    pub(in crate::datapath) way: u8,
    /// How packets leave, if that is known.
    pub(in crate::datapath) hop: NextHop,
    /// Whether a port may be taken that its last connection may not be quite done with.
    pub(in crate::datapath) eager: bool,
    /// [`Service::id`]
    pub(in crate::datapath) service: u32,
    /// Where the flow is counted: [`lb_common::Backend::active_flows_slot`].
    pub(in crate::datapath) counter: u32,
    /// The source ports that `to` may have in place of the one that it has.
    pub(in crate::datapath) ports: Ports,
    /// What the backend's packets become.
    pub(in crate::datapath) back: Tuple,
    /// Key of the entry that is being made.
    pub(in crate::datapath) key: Tuple,
    /// The entry that is being made.
    pub(in crate::datapath) flow: Flow,
    claim: Claim,
    /// Of a connection whose port is being taken.
    pub(in crate::datapath) over: Keys,
}

/// Whether a flow has the entries that lead back to it.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(in crate::datapath) enum Claim {
    /// Another flow has what they need: another source port may be free.
    Taken = 0,
    Made = 1,
    /// There is no room for them.
    NoRoom = 2,
}

/// A flow that somebody asks for.
#[derive(Clone, Copy)]
pub(in crate::datapath) struct Request {
    /// What it is for, as it is for this client.
    pub(in crate::datapath) service: Service,
    /// That of the backend.
    pub(in crate::datapath) slot: u32,
    /// Whether the client's address is to be the node's where the flow's packets leave it.
    pub(in crate::datapath) masquerade: bool,
    /// Whether its backend is to answer the client directly.
    pub(in crate::datapath) direct: bool,
    /// Why this backend.
    pub(in crate::datapath) choice: Choice,
}

/// Makes the entries of both directions for the first packet of the flow that `SCRATCH` asks for, in place of those of
/// an `earlier` connection of its five-tuple; the outcome of the packet if it can be sent on. The flow is to be a
/// routed one or none where that is all that can be done (`only_routed`), as for the XDP program.
#[inline(always)]
pub(in crate::datapath) fn create(
    context: &HookContext,
    packet: &Packet,
    earlier: bool,
    only_routed: bool,
) -> Result<Outcome, Outcome> {
    let Scratch { request, setup, .. } = scratch()?;
    let backend = service::backend(request.slot).ok_or(Outcome::NoBackend)?;
    // What a backend on this node answers comes by here anyway.
    let masquerade = request.masquerade && !(request.direct && backend.flags & backend_flags::LOCAL != 0);
    (setup.from, setup.to) = (packet.tuple, packet.tuple);
    (setup.to.destination, setup.to.destination_port) = (backend.address, backend.port);
    setup.node = masquerade::NOBODY;
    setup.way = 0;
    setup.hop = NextHop::UNKNOWN;
    setup.service = request.service.id;
    setup.counter = backend.active_flows_slot;
    setup.ports = SOURCE_PORTS;
    if setup.to.destination == setup.to.source {
        // A pod does not answer itself through the network: the VIP stands for it.
        setup.to.source = setup.from.destination;
        setup.way = flow_flags::HAIRPIN;
    } else if tunnel::begin(setup, request, backend) {
        // Made there.
    } else if masquerade && !masquerade::is_here(backend) {
        setup.ports = masquerade::ports()?;
        setup.to.source_port = setup.ports.any();
        let node = routed::source(context, &setup.to);
        if node != masquerade::NOBODY {
            setup.to.source = node;
            setup.way = flow_flags::ROUTED;
        } else if !only_routed {
            setup.node = masquerade::source(context, &setup.to)?;
            setup.way = flow_flags::MASQUERADED;
        }
    }
    let way = scratch()?.setup.way;
    if only_routed && way & flow_flags::ROUTED == 0 {
        return Err(Outcome::OtherHook);
    }
    if way & flow_flags::TUNNEL == 0 {
        claim()?;
    }
    let setup = &mut scratch()?.setup;
    if earlier {
        forget_reply(setup);
    }
    insert_forward(setup, earlier)?;
    let Scratch { request, setup, .. } = scratch()?;
    if request.service.affinity_seconds > 0 {
        affinity::remember(&packet.tuple.source, request.service.id, backend);
    }
    let routed = setup.way & flow_flags::ROUTED != 0;
    Ok(if routed { Outcome::NewRoutedFlow } else { Outcome::NewFlow })
}

impl FlowSetup {
    /// Whether the source port is one of the node's, which its last connection has to give up as a whole.
    #[inline(always)]
    fn has_port_of_node(&self) -> bool {
        self.way == flow_flags::ROUTED || self.node != masquerade::NOBODY
    }
}

/// Makes the entries that lead back to the flow in `SCRATCH`, with another source port where `to` has one that is
/// taken. (Takes no reference to the flow: `try_claim` changes it behind our back.)
#[inline(never)]
fn claim() -> Result<(), Outcome> {
    let setup = &mut scratch()?.setup;
    (setup.claim, setup.eager) = (Claim::Taken, false);
    // SAFETY: `try_claim` has the signature that the kernel calls it with, and needs no context.
    unsafe { bpf_loop(SOURCE_PORT_ATTEMPTS, try_claim as *mut _, core::ptr::null_mut(), 0) };
    match scratch()?.setup.claim {
        Claim::Made => Ok(()),
        Claim::Taken => Err(Outcome::NoSourcePort),
        Claim::NoRoom => Err(Outcome::ConntrackFull),
    }
}

/// Tries to make the entries that lead back; 1 ends the attempts. Called by the kernel, so that the verifier walks it
/// once, however many attempts there are.
extern "C" fn try_claim(attempt: u32, _context: *mut core::ffi::c_void) -> i64 {
    let Ok(scratch) = scratch() else { return 1 };
    let setup = &mut scratch.setup;
    setup.eager = attempt >= CAUTIOUS_ATTEMPTS;
    setup.claim = claim_both(setup);
    if setup.claim != Claim::Taken {
        return 1;
    }
    setup.to.source_port = setup.ports.any();
    0
}

#[inline(always)]
fn claim_both(setup: &mut FlowSetup) -> Claim {
    if setup.node == masquerade::NOBODY {
        return claim_reply(setup);
    }
    let outer = masquerade::claim(setup);
    if outer != Claim::Made {
        return outer;
    }
    let inner = claim_reply(setup);
    if inner != Claim::Made {
        masquerade::release(setup);
    }
    inner
}

/// Makes the entry of the reply direction. Its key must be free: that claims the source port towards the backend,
/// atomically against all other CPUs.
#[inline(never)]
fn claim_reply(setup: &mut FlowSetup) -> Claim {
    prepare_reply(setup);
    let mut result = CONNTRACK.insert(&setup.key, &setup.flow, u64::from(BPF_NOEXIST));
    if result == Err(EEXIST) && reclaim(setup) {
        return Claim::Made;
    }
    if result == Err(EEXIST)
        && setup.has_port_of_node()
        && forget_over(&setup.key, setup.eager, &mut setup.over)
    {
        result = CONNTRACK.insert(&setup.key, &setup.flow, u64::from(BPF_NOEXIST));
    }
    match result {
        Ok(()) => Claim::Made,
        Err(EEXIST) => Claim::Taken,
        Err(_) => Claim::NoRoom,
    }
}

/// The entry of the reply direction. (With a frame of its own, which is gone before the next one begins.)
#[inline(never)]
fn prepare_reply(setup: &mut FlowSetup) {
    setup.key = setup.to.reversed();
    setup.back = setup.from.reversed();
    let flags = flow_flags::reverse(setup.way);
    setup.flow.init(&setup.key, &setup.back, setup.service, flags, now());
    setup.flow.active_flows_slot = setup.counter;
}

/// Takes over an entry of the reply direction that this very flow left behind.
#[inline(always)]
fn reclaim(setup: &mut FlowSetup) -> bool {
    match lookup(&setup.key) {
        Some(existing) if existing.to == setup.flow.to => {
            setup.flow.continue_counters(existing);
            CONNTRACK.insert(&setup.key, &setup.flow, u64::from(BPF_EXIST)).is_ok()
        }
        _ => false,
    }
}

/// Removes the entry of the reply direction of an earlier connection of this client's port.
#[inline(never)]
fn forget_reply(setup: &mut FlowSetup) {
    if let Some(earlier) = lookup(&setup.from) {
        active_flows::end(earlier);
        if earlier.is_tunnelled() {
            return;
        }
        setup.key = earlier.to.reversed();
        if setup.key != setup.to.reversed() {
            // Nothing is lost if another CPU was faster.
            CONNTRACK.remove(&setup.key).unwrap_or_default();
        }
    }
}

/// Makes the entry of the direction from the client. Where another CPU has just made one for another packet of this
/// flow, that one stands and our claim is given up.
#[inline(never)]
fn insert_forward(setup: &mut FlowSetup, replace: bool) -> Result<(), Outcome> {
    setup.flow.init(&setup.from, &setup.to, setup.service, setup.way, now());
    setup.flow.next_hop = setup.hop;
    setup.flow.active_flows_slot = setup.counter;
    if replace && let Some(earlier) = lookup(&setup.from) {
        setup.flow.continue_counters(earlier);
    }
    let flags = if replace { BPF_ANY } else { BPF_NOEXIST };
    let result = CONNTRACK.insert(&setup.from, &setup.flow, u64::from(flags));
    if result.is_err() && setup.way & flow_flags::TUNNEL == 0 && !leads_to(setup) {
        give_up(setup);
    }
    match result {
        Ok(()) => {
            active_flows::begin(setup.counter);
            Ok(())
        }
        Err(EEXIST) => Ok(()),
        Err(_) => Err(Outcome::ConntrackFull),
    }
}

/// Whether the entry of the direction from the client leads to this backend by this source port.
#[inline(always)]
fn leads_to(setup: &FlowSetup) -> bool {
    lookup(&setup.from).is_some_and(|flow| flow.to == setup.to)
}

/// Removes the entries that lead back. Nothing is lost if they are gone already.
#[inline(always)]
fn give_up(setup: &mut FlowSetup) {
    setup.key = setup.to.reversed();
    CONNTRACK.remove(&setup.key).unwrap_or_default();
    if setup.node != masquerade::NOBODY {
        masquerade::release(setup);
    }
}
