//! The beginning of a flow: its backend, and the entries of both directions.

use aya_ebpf::{
    bindings::{BPF_ANY, BPF_NOEXIST},
    helpers::generated::{bpf_get_prandom_u32, bpf_loop},
};
use lb_common::{
    Address, Outcome, Service,
    conntrack::{Flow, Tuple, flow_flags},
};
use lb_ebpf::{packet::Packet, schedule};

use super::{
    affinity,
    conntrack::{forget_over, lookup, now},
    maps::{CONNTRACK, scratch},
    masquerade, services,
    skb::Skb,
};

/// Source ports tried towards a backend before a connection is given up.
const SOURCE_PORT_ATTEMPTS: u32 = 64;
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
fn random() -> u32 {
    // SAFETY: takes nothing and has no side effects.
    unsafe { bpf_get_prandom_u32() }
}

/// A flow that begins. It lies in `SCRATCH`, because the stack has no room for so many tuples.
pub(super) struct Opening {
    /// What the client sends.
    pub(super) from: Tuple,
    /// What that becomes.
    pub(super) to: Tuple,
    /// The source that packets of a masqueraded flow leave the node with; else [`masquerade::NOBODY`].
    pub(super) node: Address,
    /// [`Service::id`]
    pub(super) service: u32,
    /// The source ports that `to` may have in place of the one that it has.
    pub(super) ports: Ports,
    /// Key of the entry that is being made.
    pub(super) key: Tuple,
    /// The entry that is being made.
    pub(super) flow: Flow,
    claim: Claim,
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

/// Chooses a backend for the first packet of a flow and makes the entries of both directions, in place of those of an
/// `earlier` connection if there are any. `masquerade` says whether the client's address is to be the node's where the
/// flow's packets leave it.
#[inline(always)]
pub(super) fn open(
    skb: &Skb,
    packet: &Packet,
    service: &Service,
    masquerade: bool,
    earlier: bool,
) -> Result<(), Outcome> {
    let backend = services::backend(choose(packet, service)).ok_or(Outcome::NoBackend)?;
    let opening = &mut scratch()?.opening;
    opening.from = packet.tuple;
    opening.to = Tuple { destination: backend.address, destination_port: backend.port, ..packet.tuple };
    opening.node = masquerade::NOBODY;
    opening.service = service.id;
    opening.ports = SOURCE_PORTS;
    if opening.to.destination == opening.to.source {
        // A pod does not answer itself through the network: the VIP stands for it.
        opening.to.source = opening.from.destination;
    } else if masquerade && !masquerade::is_here(backend) {
        opening.node = masquerade::source(skb, &opening.to)?;
        opening.ports = masquerade::ports()?;
        opening.to.source_port = opening.ports.any();
    }
    claim()?;
    let opening = &mut scratch()?.opening;
    if earlier {
        forget_reply(opening);
    }
    insert_forward(opening, earlier)?;
    if service.affinity_seconds > 0 {
        affinity::remember(&packet.tuple.source, service.id, backend);
    }
    Ok(())
}

/// The slot of the backend for a new flow: the client's own where the service has affinity, else the scheduler's choice.
#[inline(always)]
fn choose(packet: &Packet, service: &Service) -> u32 {
    if service.affinity_seconds > 0 {
        let slot = affinity::find(&packet.tuple.source, service);
        if slot != affinity::NONE {
            return slot;
        }
    }
    schedule::choose(service, random())
}

impl Opening {
    /// Whether client and backend are the same pod, for which the VIP stands as the source.
    #[inline(always)]
    fn is_hairpin(&self) -> bool {
        self.to.source == self.from.destination
    }
}

/// Makes the entries that lead back to the flow in `SCRATCH`, with another source port where `to` has one that is taken.
/// (Takes no reference to the flow: `try_claim` changes it behind our back.)
#[inline(never)]
fn claim() -> Result<(), Outcome> {
    scratch()?.opening.claim = Claim::Taken;
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
extern "C" fn try_claim(_attempt: u32, _context: *mut core::ffi::c_void) -> i64 {
    let Ok(scratch) = scratch() else { return 1 };
    let opening = &mut scratch.opening;
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
    let place = if opening.is_hairpin() { flow_flags::HAIRPIN } else { flow_flags::AT_EGRESS };
    opening.key = opening.to.reversed();
    let to = opening.from.reversed();
    opening.flow = Flow::new(&opening.key, &to, opening.service, flow_flags::REPLY | place, now());
    let mut result = CONNTRACK.insert(&opening.key, &opening.flow, u64::from(BPF_NOEXIST));
    if result == Err(EEXIST) && reclaim(opening) {
        return Claim::Made;
    }
    // A masqueraded connection has both of its flows to give up.
    if result == Err(EEXIST) && opening.node != masquerade::NOBODY && forget_over(&opening.key) {
        result = CONNTRACK.insert(&opening.key, &opening.flow, u64::from(BPF_NOEXIST));
    }
    match result {
        Ok(()) => Claim::Made,
        Err(EEXIST) => Claim::Taken,
        Err(_) => Claim::NoRoom,
    }
}

/// Takes over an entry of the reply direction that this very flow left behind.
#[inline(always)]
fn reclaim(opening: &Opening) -> bool {
    match lookup(&opening.key) {
        Some(existing) if existing.to == opening.flow.to => {
            *existing = opening.flow;
            true
        }
        _ => false,
    }
}

/// Removes the entry of the reply direction of an earlier connection of this client's port.
#[inline(never)]
fn forget_reply(opening: &mut Opening) {
    if let Some(earlier) = lookup(&opening.from) {
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
    let place = if opening.is_hairpin() { flow_flags::HAIRPIN } else { 0 };
    opening.flow = Flow::new(&opening.from, &opening.to, opening.service, place, now());
    let flags = if replace { BPF_ANY } else { BPF_NOEXIST };
    let result = CONNTRACK.insert(&opening.from, &opening.flow, u64::from(flags));
    if result.is_err() && !leads_to(opening) {
        give_up(opening);
    }
    match result {
        Ok(()) | Err(EEXIST) => Ok(()),
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
