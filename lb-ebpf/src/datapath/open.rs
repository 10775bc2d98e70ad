//! The beginning of a flow: its backend, and the entries of both directions.

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_EXIST, BPF_NOEXIST},
    helpers::generated::{bpf_get_prandom_u32, bpf_loop},
};
use lb_common::{
    Address, Choice, Outcome, Service, backend_flags,
    conntrack::{Flow, Hop, Tuple, flow_flags},
};
use lb_ebpf::{packet::Packet, schedule};

use super::{
    affinity,
    conntrack::{Keys, forget_over, lookup, now},
    counts,
    maps::{CONNTRACK, Scratch, scratch},
    masquerade,
    place::Place,
    routed, services, tunnel,
};

/// Source ports tried towards a backend before a connection is given up.
const SOURCE_PORT_ATTEMPTS: u32 = 64;
/// Those after which ports are taken that their last connection may not be quite done with.
const CAUTIOUS_ATTEMPTS: u32 = 32;
/// The source ports that are tried in place of a client's own: all but the privileged ones.
const SOURCE_PORTS: Ports = Ports { first: 1024, count: 65_536 - 1024 };

pub(super) const EEXIST: i32 = -17;

/// Source ports to choose from.
#[derive(Clone, Copy)]
pub(super) struct Ports {
    pub(super) first: u32,
    pub(super) count: u32,
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
pub(super) struct Opening {
    /// What the client sends.
    pub(super) from: Tuple,
    /// What that becomes.
    pub(super) to: Tuple,
    /// The source that packets of a masqueraded flow leave the node with, if that is a flow of its own; else
    /// [`masquerade::NOBODY`].
    pub(super) node: Address,
    /// How packets go on: [`flow_flags::HAIRPIN`], [`flow_flags::ROUTED`], that with [`flow_flags::TUNNEL`],
    /// [`flow_flags::MASQUERADED`], or 0.
    pub(super) way: u8,
    /// How packets leave, if that is known.
    pub(super) hop: Hop,
    /// Whether a port may be taken that its last connection may not be quite done with.
    pub(super) eager: bool,
    /// [`Service::id`]
    pub(super) service: u32,
    /// Where the flow is counted: [`lb_common::Backend::counter`].
    pub(super) counter: u32,
    /// The source ports that `to` may have in place of the one that it has.
    pub(super) ports: Ports,
    /// What the backend's packets become.
    pub(super) back: Tuple,
    /// Key of the entry that is being made.
    pub(super) key: Tuple,
    /// The entry that is being made.
    pub(super) flow: Flow,
    claim: Claim,
    /// Of a connection whose port is being taken.
    pub(super) over: Keys,
}

/// Whether a flow has the entries that lead back to it.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Claim {
    /// Another flow has what they need: another source port may be free.
    Taken = 0,
    Made = 1,
    /// There is no room for them.
    NoRoom = 2,
}

/// A flow that somebody asks for.
#[derive(Clone, Copy)]
pub(super) struct Request {
    /// What it is for, as it is for this client.
    pub(super) service: Service,
    /// That of the backend.
    pub(super) slot: u32,
    /// Whether the client's address is to be the node's where the flow's packets leave it.
    pub(super) masquerade: bool,
    /// Whether its backend is to answer the client directly.
    pub(super) direct: bool,
    /// Why this backend.
    pub(super) choice: Choice,
}

/// Makes the entries of both directions for the first packet of the flow that `SCRATCH` asks for, in place of those of an `earlier` connection of its
/// five-tuple; the outcome of the packet if it can be sent on. The flow is to be a routed one or none where that is all
/// that can be done (`only_routed`), as for the XDP program.
#[inline(always)]
pub(super) fn open(
    place: &Place,
    packet: &Packet,
    earlier: bool,
    only_routed: bool,
) -> Result<Outcome, Outcome> {
    let Scratch { request, opening, .. } = scratch()?;
    let backend = services::backend(request.slot).ok_or(Outcome::NoBackend)?;
    // What a backend on this node answers comes by here anyway.
    let masquerade = request.masquerade && !(request.direct && backend.flags & backend_flags::LOCAL != 0);
    (opening.from, opening.to) = (packet.tuple, packet.tuple);
    (opening.to.destination, opening.to.destination_port) = (backend.address, backend.port);
    opening.node = masquerade::NOBODY;
    opening.way = 0;
    opening.hop = Hop::UNKNOWN;
    opening.service = request.service.id;
    opening.counter = backend.counter;
    opening.ports = SOURCE_PORTS;
    if opening.to.destination == opening.to.source {
        // A pod does not answer itself through the network: the VIP stands for it.
        opening.to.source = opening.from.destination;
        opening.way = flow_flags::HAIRPIN;
    } else if tunnel::begin(opening, request, backend) {
        // Made there.
    } else if masquerade && !masquerade::is_here(backend) {
        opening.ports = masquerade::ports()?;
        opening.to.source_port = opening.ports.any();
        let node = routed::source(place, &opening.to);
        if node != masquerade::NOBODY {
            opening.to.source = node;
            opening.way = flow_flags::ROUTED;
        } else if !only_routed {
            opening.node = masquerade::source(place, &opening.to)?;
            opening.way = flow_flags::MASQUERADED;
        }
    }
    let way = scratch()?.opening.way;
    if only_routed && way & flow_flags::ROUTED == 0 {
        return Err(Outcome::OtherHook);
    }
    if way & flow_flags::TUNNEL == 0 {
        claim()?;
    }
    let opening = &mut scratch()?.opening;
    if earlier {
        forget_reply(opening);
    }
    insert_forward(opening, earlier)?;
    let Scratch { request, opening, .. } = scratch()?;
    if request.service.affinity_seconds > 0 {
        affinity::remember(&packet.tuple.source, request.service.id, backend);
    }
    let routed = opening.way & flow_flags::ROUTED != 0;
    Ok(if routed { Outcome::NewRoutedFlow } else { Outcome::NewFlow })
}

impl Opening {
    /// Whether the source port is one of the node's, which its last connection has to give up as a whole.
    #[inline(always)]
    fn has_port_of_node(&self) -> bool {
        self.way == flow_flags::ROUTED || self.node != masquerade::NOBODY
    }
}

/// Makes the entries that lead back to the flow in `SCRATCH`, with another source port where `to` has one that is taken.
/// (Takes no reference to the flow: `try_claim` changes it behind our back.)
#[inline(never)]
fn claim() -> Result<(), Outcome> {
    let opening = &mut scratch()?.opening;
    (opening.claim, opening.eager) = (Claim::Taken, false);
    // SAFETY: `try_claim` has the signature that the kernel calls it with, and needs no context.
    unsafe { bpf_loop(SOURCE_PORT_ATTEMPTS, try_claim as *mut _, core::ptr::null_mut(), 0) };
    match scratch()?.opening.claim {
        Claim::Made => Ok(()),
        Claim::Taken => Err(Outcome::NoSourcePort),
        Claim::NoRoom => Err(Outcome::ConntrackFull),
    }
}

/// Tries to make the entries that lead back; 1 ends the attempts. Called by the kernel, so that the verifier walks it
/// once, however many attempts there are.
extern "C" fn try_claim(attempt: u32, _context: *mut core::ffi::c_void) -> i64 {
    let Ok(scratch) = scratch() else { return 1 };
    let opening = &mut scratch.opening;
    opening.eager = attempt >= CAUTIOUS_ATTEMPTS;
    opening.claim = claim_both(opening);
    if opening.claim != Claim::Taken {
        return 1;
    }
    opening.to.source_port = opening.ports.any();
    0
}

#[inline(always)]
fn claim_both(opening: &mut Opening) -> Claim {
    if opening.node == masquerade::NOBODY {
        return claim_reply(opening);
    }
    let outer = masquerade::claim(opening);
    if outer != Claim::Made {
        return outer;
    }
    let inner = claim_reply(opening);
    if inner != Claim::Made {
        masquerade::release(opening);
    }
    inner
}

/// Makes the entry of the reply direction. Its key must be free: that claims the source port towards the backend,
/// atomically against all other CPUs.
#[inline(never)]
fn claim_reply(opening: &mut Opening) -> Claim {
    prepare_reply(opening);
    let mut result = CONNTRACK.insert(&opening.key, &opening.flow, u64::from(BPF_NOEXIST));
    if result == Err(EEXIST) && reclaim(opening) {
        return Claim::Made;
    }
    if result == Err(EEXIST)
        && opening.has_port_of_node()
        && forget_over(&opening.key, opening.eager, &mut opening.over)
    {
        result = CONNTRACK.insert(&opening.key, &opening.flow, u64::from(BPF_NOEXIST));
    }
    match result {
        Ok(()) => Claim::Made,
        Err(EEXIST) => Claim::Taken,
        Err(_) => Claim::NoRoom,
    }
}

/// The entry of the reply direction. (With a frame of its own, which is gone before the next one begins.)
#[inline(never)]
fn prepare_reply(opening: &mut Opening) {
    opening.key = opening.to.reversed();
    opening.back = opening.from.reversed();
    let flags = flow_flags::peer(opening.way);
    opening.flow.begin(&opening.key, &opening.back, opening.service, flags, now());
    opening.flow.counter = opening.counter;
}

/// Takes over an entry of the reply direction that this very flow left behind.
#[inline(always)]
fn reclaim(opening: &mut Opening) -> bool {
    match lookup(&opening.key) {
        Some(existing) if existing.to == opening.flow.to => {
            opening.flow.succeed(existing);
            CONNTRACK.insert(&opening.key, &opening.flow, u64::from(BPF_EXIST)).is_ok()
        }
        _ => false,
    }
}

/// Removes the entry of the reply direction of an earlier connection of this client's port.
#[inline(never)]
fn forget_reply(opening: &mut Opening) {
    if let Some(earlier) = lookup(&opening.from) {
        counts::end(earlier);
        if earlier.is_tunnelled() {
            return;
        }
        opening.key = earlier.to.reversed();
        if opening.key != opening.to.reversed() {
            // Nothing is lost if another CPU was faster.
            CONNTRACK.remove(&opening.key).unwrap_or_default();
        }
    }
}

/// Makes the entry of the direction from the client. Where another CPU has just made one for another packet of this flow,
/// that one stands and our claim is given up.
#[inline(never)]
fn insert_forward(opening: &mut Opening, replace: bool) -> Result<(), Outcome> {
    opening.flow.begin(&opening.from, &opening.to, opening.service, opening.way, now());
    opening.flow.hop = opening.hop;
    opening.flow.counter = opening.counter;
    if replace && let Some(earlier) = lookup(&opening.from) {
        opening.flow.succeed(earlier);
    }
    let flags = if replace { BPF_ANY } else { BPF_NOEXIST };
    let result = CONNTRACK.insert(&opening.from, &opening.flow, u64::from(flags));
    if result.is_err() && opening.way & flow_flags::TUNNEL == 0 && !leads_to(opening) {
        give_up(opening);
    }
    match result {
        Ok(()) => {
            counts::begin(opening.counter);
            Ok(())
        }
        Err(EEXIST) => Ok(()),
        Err(_) => Err(Outcome::ConntrackFull),
    }
}

/// Whether the entry of the direction from the client leads to this backend by this source port.
#[inline(always)]
fn leads_to(opening: &Opening) -> bool {
    lookup(&opening.from).is_some_and(|flow| flow.to == opening.to)
}

/// Removes the entries that lead back. Nothing is lost if they are gone already.
#[inline(always)]
fn give_up(opening: &mut Opening) {
    opening.key = opening.to.reversed();
    CONNTRACK.remove(&opening.key).unwrap_or_default();
    if opening.node != masquerade::NOBODY {
        masquerade::release(opening);
    }
}
