//! New flows: the service of the packet, whether the packet may begin a flow, and the backend of the flow.

use lb_common::{Choice, EventHook, Outcome, Service};
use lb_ebpf::{parse::Packet, rules::client::uses_dsr, service::schedule};

use super::{
    choose, conntrack,
    create::{self, Created},
    flow_log, table,
};
use crate::datapath::{
    context::HookContext,
    events, log,
    scratch::{scratch, setup::FlowRequest},
    service::{self, admit, limit},
    settings,
};

/// The flows that may begin.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Begin {
    /// Any flow may begin.
    Any = 0,
    /// Only a routed flow may begin: the XDP program creates no other flows.
    OnlyRouted = 1,
    /// The flow that the [`FlowRequest`] in `SCRATCH` already describes.
    Requested = 2,
}

impl Begin {
    /// The hook to report in events about new flows.
    #[inline(always)]
    const fn hook(self) -> EventHook {
        match self {
            Self::Any | Self::Requested => EventHook::Ingress,
            Self::OnlyRouted => EventHook::Xdp,
        }
    }
}

/// The result of [`new_flow`].
///
/// It fits into one register, which is all that a subprogram returns: variants without a field are values that
/// [`Outcome`] does not use.
#[derive(Clone, Copy)]
pub(crate) enum FlowCreation {
    /// The packet has a flow now, whose packets tc forwards.
    Created,
    /// The packet has a routed flow now.
    CreatedRouted,
    /// The caller sends the packet with the flow that [`create::stateless`] returns, which has no entry in the flow
    /// table.
    Stateless,
    /// The caller rejects the packet: the service has no backend for it, or resets connections that have no flow.
    Reject,
    /// The packet gets no flow, for this reason.
    NotCreated(Outcome),
}

const _: () = assert!(size_of::<FlowCreation>() == size_of::<Outcome>());

/// Why a packet gets no flow.
#[derive(Clone, Copy)]
enum Refusal {
    /// The caller rejects the packet: the service has no backend for it, or resets connections that have no flow.
    Reject,
    Outcome(Outcome),
}

impl From<Outcome> for Refusal {
    #[inline(always)]
    fn from(outcome: Outcome) -> Self {
        Self::Outcome(outcome)
    }
}

/// Creates the flow of a packet that has none, or whose flow has to be replaced (`earlier`).
#[inline(never)]
pub(crate) fn new_flow(context: &HookContext, packet: &Packet, earlier: bool, begin: Begin) -> FlowCreation {
    match choose_and_create(context, packet, earlier, begin) {
        Ok(Created::Unrouted) => {
            log::new_flow(context);
            events::new_flow(context, Outcome::NewFlow, begin.hook());
            begin_flow_log();
            FlowCreation::Created
        }
        Ok(Created::Routed) => {
            log::new_flow(context);
            events::new_flow(context, Outcome::NewRoutedFlow, begin.hook());
            begin_flow_log();
            FlowCreation::CreatedRouted
        }
        // Neither logged nor reported, because every packet of the connection has this result.
        Ok(Created::Stateless) => FlowCreation::Stateless,
        Err(Refusal::Reject) => FlowCreation::Reject,
        Err(Refusal::Outcome(outcome)) => FlowCreation::NotCreated(outcome),
    }
}

/// Emits the beginning of the flow in `SCRATCH` for the flow log.
#[inline(always)]
fn begin_flow_log() {
    if flow_log::is_on() {
        flow_begun();
    }
}

#[inline(never)]
fn flow_begun() {
    let Ok(scratch) = scratch() else { return };
    let setup = scratch.setup();
    let reply = if setup.is_tunnelled() {
        None
    } else {
        setup.key = setup.to.reversed();
        table::lookup(&setup.key)
    };
    flow_log::begun(reply.map(|reply| &*reply));
}

#[inline(always)]
fn choose_and_create(
    context: &HookContext,
    packet: &Packet,
    earlier: bool,
    begin: Begin,
) -> Result<Created, Refusal> {
    let only_routed = begin == Begin::OnlyRouted;
    if begin != Begin::Requested {
        request(context, packet, earlier, only_routed)?;
    }
    let created = create::create(context, packet, earlier, only_routed)?;
    if begin != Begin::Requested {
        let Service { id, scheduler, .. } = scratch()?.request().service;
        choose::flow_began(id, scheduler);
    }
    Ok(created)
}

/// Writes into `SCRATCH` which flow the packet requests, with its backend.
#[inline(always)]
fn request(context: &HookContext, packet: &Packet, earlier: bool, only_routed: bool) -> Result<(), Refusal> {
    request_service(context, packet, only_routed).inspect_err(|reason| {
        if matches!(reason, Refusal::Outcome(Outcome::LeftToEarlier)) {
            // The programs of the earlier layout create the flow, so an entry in this layout's flow table does not
            // apply to the packets that follow. There may be no such entry.
            table::remove(&packet.tuple);
        }
    })?;
    let request = scratch()?.request();
    let FlowRequest { service, choice, .. } = request;
    *choice = Choice::Scheduler;
    request.slot = choose::choose(&packet.tuple, service, || *choice = Choice::Affinity);
    if conntrack::may_be_retried(earlier) && request.slot != schedule::NONE {
        let slot = choose::another(&packet.tuple, &request.service, request.slot);
        if slot != request.slot {
            (request.slot, request.choice) = (slot, Choice::Retry);
        }
    }
    if request.slot == schedule::NONE { Err(Refusal::Reject) } else { Ok(()) }
}

/// Writes the service of the packet into `SCRATCH`, if a flow may begin, and takes the tokens of the service's limits.
/// (A separate stack frame, which is freed before the program chooses a backend and creates the flow.)
#[inline(never)]
fn request_service(context: &HookContext, packet: &Packet, only_routed: bool) -> Result<(), Refusal> {
    let service = service::lookup(&packet.tuple)?;
    admit::first_packet(context, packet, &service).allow(packet.tuple.protocol)?;
    let (service, internal) = settings::for_client(context, &packet.tuple.source, service);
    let admission = admit::packet(packet, &service);
    if admission.is_rejected() {
        return Err(Refusal::Reject);
    }
    admission.allow(packet.tuple.protocol)?;
    limit::take_tokens(packet, &service, only_routed)?;
    let masquerade = service.masquerades(internal);
    let dsr = uses_dsr(&service, internal);
    *scratch()?.request() =
        FlowRequest { service, masquerade, dsr, slot: schedule::NONE, choice: Choice::None };
    Ok(())
}
