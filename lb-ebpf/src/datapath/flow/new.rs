//! Packets of no flow: what they are for, and whether they may.

use lb_common::{Choice, EventHook, Outcome, Service, service_flags};
use lb_ebpf::{parse::Packet, service::schedule};

use super::{
    conntrack,
    create::{self, Request},
};
use crate::datapath::{
    context::HookContext,
    events, log,
    maps::{CONNTRACK, scratch},
    service::{self, admit, choose},
    settings,
};

/// A packet that is to be rejected; how depends on what it is.
pub(in crate::datapath) const REJECTED: Outcome = Outcome::RejectTcp;

/// What flow may begin.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(in crate::datapath) enum Begin {
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
/// exists from now on ([`Outcome::NewFlow`], [`Outcome::NewRoutedFlow`]), or the packet is to be dropped or
/// [`REJECTED`].
#[inline(never)]
pub(in crate::datapath) fn new_flow(
    context: &HookContext,
    packet: &Packet,
    earlier: bool,
    begin: Begin,
) -> Outcome {
    match try_new_flow(context, packet, earlier, begin) {
        Ok(outcome) => {
            log::new_flow(context);
            events::new_flow(context, outcome, begin.hook());
            outcome
        }
        Err(early) => early,
    }
}

#[inline(always)]
fn try_new_flow(
    context: &HookContext,
    packet: &Packet,
    earlier: bool,
    begin: Begin,
) -> Result<Outcome, Outcome> {
    if begin != Begin::Asked {
        ask(context, packet, earlier)?;
    }
    let outcome = create::create(context, packet, earlier, begin == Begin::OnlyRouted)?;
    if begin != Begin::Asked {
        let Service { id, scheduler, .. } = scratch()?.request.service;
        choose::made(id, scheduler);
    }
    Ok(outcome)
}

/// Finds out what flow the packet begins, and leaves that in `SCRATCH`.
#[inline(always)]
fn ask(context: &HookContext, packet: &Packet, earlier: bool) -> Result<(), Outcome> {
    match prepare(context, packet) {
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
    request.slot = choose::choose(&packet.tuple, service, || *choice = Choice::Affinity);
    if earlier && conntrack::tries_others() && request.slot != schedule::NONE {
        let slot = choose::another(&packet.tuple, &request.service, request.slot);
        if slot != request.slot {
            (request.slot, request.choice) = (slot, Choice::Retry);
        }
    }
    if request.slot == schedule::NONE { Err(REJECTED) } else { Ok(()) }
}

/// Finds out what the packet is for, and leaves that in `SCRATCH`; anything but [`Outcome::NewFlow`] is the end of it.
/// (With a frame of its own, which is gone before a backend is chosen and the flow is made.)
#[inline(never)]
fn prepare(context: &HookContext, packet: &Packet) -> Outcome {
    match try_prepare(context, packet) {
        Ok(()) => Outcome::NewFlow,
        Err(early) => early,
    }
}

#[inline(always)]
fn try_prepare(context: &HookContext, packet: &Packet) -> Result<(), Outcome> {
    let service = service::lookup(&packet.tuple)?;
    admit::handover(packet)?;
    admit::first_packet(packet, &service)?;
    let (service, inside) = settings::for_client(context, &packet.tuple.source, service);
    admit::client(&service, &packet.tuple.source)?;
    if service.backends_count == 0 {
        return Err(REJECTED);
    }
    if packet.segment.is_syn_ack() {
        // Whoever accepts a connection has been asked for it, past us.
        return Err(Outcome::NoService);
    }
    let masquerade = service.masquerades(inside);
    let direct = !inside && service.flags & service_flags::DSR != 0;
    scratch()?.request = Request { service, masquerade, direct, slot: schedule::NONE, choice: Choice::None };
    Ok(())
}
