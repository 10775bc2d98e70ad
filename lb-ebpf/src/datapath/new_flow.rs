//! Packets of no flow: what they are for, and whether they may.

use aya_ebpf::btf_maps::lpm_trie::Key;
use lb_common::{Address, Choice, EventHook, Outcome, Service, SourceRange, handover, service_flags};
use lb_ebpf::{
    packet::{Body, Packet},
    schedule,
};

use super::{
    choice, conntrack, events, log,
    maps::{CONNTRACK, HANDOVER, SOURCE_RANGES, scratch},
    open::{self, Request},
    place::Place,
    services, settings,
};

/// A packet that is to be rejected; how depends on what it is.
pub(super) const REJECTED: Outcome = Outcome::RejectTcp;

/// What flow may begin.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Begin {
    /// Any.
    Any = 0,
    /// Only a routed one, as for the XDP program.
    OnlyRouted = 1,
    /// The one that `SCRATCH` asks for already.
    Asked = 2,
}

impl Begin {
    /// Where such flows begin.
    #[inline(always)]
    const fn hook(self) -> EventHook {
        match self {
            Self::Any | Self::Asked => EventHook::Ingress,
            Self::OnlyRouted => EventHook::Xdp,
        }
    }
}

/// A packet of no flow, or of one that is over (`earlier`). If it is for a service, a backend is chosen and the flow
/// exists from now on ([`Outcome::NewFlow`], [`Outcome::NewRoutedFlow`]), or the packet is to be dropped or [`REJECTED`].
#[inline(never)]
pub(super) fn new_flow(place: &Place, packet: &Packet, earlier: bool, begin: Begin) -> Outcome {
    match try_new_flow(place, packet, earlier, begin) {
        Ok(outcome) => {
            log::new_flow(place);
            events::new_flow(place, outcome, begin.hook());
            outcome
        }
        Err(early) => early,
    }
}

#[inline(always)]
fn try_new_flow(place: &Place, packet: &Packet, earlier: bool, begin: Begin) -> Result<Outcome, Outcome> {
    if begin != Begin::Asked {
        ask(place, packet, earlier)?;
    }
    let outcome = open::open(place, packet, earlier, begin == Begin::OnlyRouted)?;
    if begin != Begin::Asked {
        let Service { id, scheduler, .. } = scratch()?.request.service;
        choice::made(id, scheduler);
    }
    Ok(outcome)
}

/// Finds out what flow the packet begins, and leaves that in `SCRATCH`.
#[inline(always)]
fn ask(place: &Place, packet: &Packet, earlier: bool) -> Result<(), Outcome> {
    match prepare(place, packet) {
        Outcome::NewFlow => {}
        Outcome::LeftToEarlier => {
            // What follows is not of the flow that we knew. Nothing is lost if we knew none.
            CONNTRACK.remove(&packet.tuple).unwrap_or_default();
            return Err(Outcome::LeftToEarlier);
        }
        other => return Err(other),
    }
    let request = &mut scratch()?.request;
    let Request { service, choice, .. } = request;
    *choice = Choice::Scheduler;
    request.slot = choice::choose(&packet.tuple, service, || *choice = Choice::Affinity);
    if earlier && conntrack::tries_others() && request.slot != schedule::NONE {
        let slot = choice::another(&packet.tuple, &request.service, request.slot);
        if slot != request.slot {
            (request.slot, request.choice) = (slot, Choice::Retry);
        }
    }
    if request.slot == schedule::NONE { Err(REJECTED) } else { Ok(()) }
}

/// Finds out what the packet is for, and leaves that in `SCRATCH`; anything but [`Outcome::NewFlow`] is the end of it.
/// (With a frame of its own, which is gone before a backend is chosen and the flow is made.)
#[inline(never)]
fn prepare(place: &Place, packet: &Packet) -> Outcome {
    match try_prepare(place, packet) {
        Ok(()) => Outcome::NewFlow,
        Err(early) => early,
    }
}

#[inline(always)]
fn try_prepare(place: &Place, packet: &Packet) -> Result<(), Outcome> {
    let service = services::lookup(&packet.tuple)?;
    may_begin_here(packet)?;
    may_begin(packet, &service)?;
    let (service, inside) = settings::for_client(place, &packet.tuple.source, service);
    admit(&service, &packet.tuple.source)?;
    if service.backends_count == 0 {
        return Err(REJECTED);
    }
    if packet.segment.accepts() {
        // Whoever accepts a connection has been asked for it, past us.
        return Err(Outcome::NoService);
    }
    let masquerade = service.masquerades(inside);
    let direct = !inside && service.flags & service_flags::DSR != 0;
    scratch()?.request = Request { service, masquerade, direct, slot: schedule::NONE, choice: Choice::None };
    Ok(())
}

/// Whether a flow that begins with this packet, or is not known here, is ours. What is not goes on to the programs of an earlier
/// layout, which are next on the hook.
#[inline(always)]
fn may_begin_here(packet: &Packet) -> Result<(), Outcome> {
    let has_turns = matches!(packet.body, Body::Tcp | Body::Sctp);
    match HANDOVER.get(0) {
        Some(&handover::EARLIER_BEGINS) => Err(Outcome::LeftToEarlier),
        Some(&handover::BEGINS) if has_turns && !packet.segment.opens() => Err(Outcome::LeftToEarlier),
        _ => Ok(()),
    }
}

/// Whether a flow may begin with this packet.
///
/// Segments in the middle of a connection may: the entries of the connection may be lost, or another node's. But at an
/// address of the node itself, connections of the node and those that netfilter masquerades have ports, too: there only a SYN
/// can be for the service.
#[inline(always)]
fn may_begin(packet: &Packet, service: &Service) -> Result<(), Outcome> {
    match packet.body {
        // Its first fragment was not translated, so this one must not be.
        Body::LaterFragment => Err(Outcome::UnknownFragment),
        Body::Tcp | Body::Sctp if service.is_opened_only() && !packet.segment.opens() => {
            Err(Outcome::NoService)
        }
        Body::Tcp | Body::Sctp if packet.segment.resets() => Err(Outcome::StrayReset),
        Body::Tcp | Body::Udp | Body::Sctp | Body::IcmpError | Body::Echo => Ok(()),
    }
}

/// Whether the service takes this client.
#[inline(always)]
fn admit(service: &Service, client: &Address) -> Result<(), Outcome> {
    if service.flags & service_flags::SOCKETS_ONLY != 0 {
        return Err(Outcome::NoService);
    }
    if service.flags & service_flags::SOURCE_RANGES != 0 && !is_in_source_range(service.id, client) {
        return Err(Outcome::SourceNotAllowed);
    }
    if service.backends_count == 0 && service.flags & service_flags::DROP_WITHOUT_BACKENDS != 0 {
        return Err(Outcome::NoLocalBackend);
    }
    Ok(())
}

#[inline(never)]
pub(crate) fn is_in_source_range(service: u32, client: &Address) -> bool {
    SOURCE_RANGES.get(&Key::new(SourceRange::BITS, SourceRange::new(service, *client))).is_some()
}
