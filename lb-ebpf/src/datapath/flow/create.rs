//! The creation of a flow: its backend, how its packets are forwarded, and the entries of both directions.

use lb_common::{
    Address, Backend, FlowEventKind, Outcome,
    conntrack::{Flow, flow_flags},
    settings_flags,
};
use lb_ebpf::{
    forward::tunnel::source_port,
    parse::Packet,
    rules::{
        self,
        forwarding::{
            Forwarding, flags_of, flags_of_service, forwarding, is_caught, may_be_routed, needs_no_entry,
        },
        source_port::hairpin_changes_port,
    },
};

use super::{
    active_flows, affinity, claim, flow_log, masquerade,
    table::{self, Inserted, lookup},
};
use crate::datapath::{
    clock::now,
    context::HookContext,
    device,
    scratch::{
        scratch,
        setup::{FlowSetup, Ports},
    },
    service, settings,
};

/// The source ports that a flow tries in place of the client's own, unless it needs a port reserved for masquerading:
/// all but the privileged ones.
const SOURCE_PORTS: Ports = Ports { first: 1024, count: 65_536 - 1024 };

/// The kind of a new flow, as far as callers distinguish it.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Created {
    /// Not routed. Only tc forwards its packets: through the stack, back out of their device (hairpin), or, with
    /// `--forwarding direct`, bypassing the stack.
    Unrouted = 0,
    /// [`flow_flags::ROUTED`]: where the flow's packets enter the node, the programs translate them or put them into a
    /// tunnel, and send them out, bypassing the stack.
    Routed = 1,
    /// No entry: the packet is forwarded with the flow that [`stateless`] returns.
    Stateless = 2,
}

/// The flow of one packet whose connection found no room for an entry: [`Created::Stateless`].
#[inline(always)]
pub(crate) fn stateless() -> Result<&'static mut Flow, Outcome> {
    Ok(&mut scratch()?.setup().flow)
}

/// Inserts the entries of the flow that `SCRATCH` requests and that begins with this packet. If `earlier` is true, they
/// replace the entries of an earlier connection with the same five-tuple. If `only_routed` is true, as in the XDP
/// program, the function inserts entries only if the flow is routed: tc creates all other flows.
#[inline(always)]
pub(crate) fn create(
    context: &HookContext,
    packet: &Packet,
    earlier: bool,
    only_routed: bool,
) -> Result<Created, Outcome> {
    let backend = plan(context, packet, only_routed)?;
    let flags = scratch()?.setup().flags;
    if only_routed && flags & flow_flags::ROUTED == 0 {
        return Err(Outcome::OtherHook);
    }
    let inserted = insert_entries(context, earlier)?;
    let scratch = scratch()?;
    let (request, setup) = (scratch.request(), scratch.setup());
    let is_stateless = inserted == Inserted::Full;
    if is_stateless && !needs_no_entry(setup.is_tunnelled(), &request.service) {
        return Err(Outcome::ConntrackFull);
    }
    if request.service.affinity_seconds > 0 {
        affinity::remember(&packet.tuple.source, request.service.id, backend);
    }
    Ok(match setup.flags & flow_flags::ROUTED {
        _ if is_stateless => Created::Stateless,
        0 => Created::Unrouted,
        _ => Created::Routed,
    })
}

/// Inserts the entries of the flow that is prepared in `SCRATCH`; returns the result for its forward entry.
#[inline(always)]
pub(super) fn insert_entries(context: &HookContext, earlier: bool) -> Result<Inserted, Outcome> {
    if !scratch()?.setup().is_tunnelled() {
        claim::claim(context)?;
    }
    let setup = scratch()?.setup();
    if earlier {
        delete_earlier(setup);
    }
    Ok(insert_forward(setup, earlier))
}

/// Decides how the packets are translated and forwarded to the backend; returns the backend.
#[inline(always)]
fn plan(context: &HookContext, packet: &Packet, only_routed: bool) -> Result<&'static Backend, Outcome> {
    let scratch = scratch()?;
    let (request, setup) = (scratch.request(), scratch.setup());
    let backend = service::backend(request.slot).ok_or(Outcome::NoBackend)?;
    (setup.from, setup.to) = (packet.tuple, packet.tuple);
    (setup.to.destination, setup.to.destination_port) = (backend.address, backend.port);
    setup.flags = 0;
    setup.service = request.service.id;
    setup.active_flows_slot = backend.active_flows_slot;
    setup.ports = SOURCE_PORTS;
    let flags_of_service = flags_of_service(&request.service);
    let client = &packet.tuple.source;
    let caught = begins_caught(context.device, &packet.tuple.destination);
    match forwarding(client, backend, request.masquerade, request.dsr, caught, || set_tunnel_ends(setup)) {
        Forwarding::Hairpin => {
            setup.to.source = setup.from.destination;
            setup.flags = flags_of(Forwarding::Hairpin, false);
            // Without settings, the range of ports for masquerading is unknown.
            if hairpin_changes_port(&request.service)
                && let Ok(ports) = masquerade::ports()
            {
                (setup.ports, setup.to.source_port) = (ports, ports.random());
            }
        }
        // For a tunnel, `forwarding` has called `set_tunnel_ends`, which has filled in the setup.
        Forwarding::Tunnel | Forwarding::Plain | Forwarding::PlainOnNode => {}
        Forwarding::Masquerade => {
            setup.ports = masquerade::ports()?;
            setup.to.source_port = first_port(setup);
            let node = if may_be_routed(flags_of_service) {
                masquerade::routed_source(context, &setup.from, &setup.to)
            } else {
                Address::NONE
            };
            if node != Address::NONE {
                setup.to.source = node;
                setup.flags = flags_of(Forwarding::Masquerade, true);
            } else if !only_routed {
                setup.node = masquerade::source(context, &setup.from, &setup.to)?;
                setup.flags = flags_of(Forwarding::Masquerade, false);
            }
        }
        Forwarding::Caught => set_caught(setup),
        Forwarding::CaughtAndMasquerade => {
            set_caught(setup);
            masquerade_caught(context, setup)?;
        }
    }
    setup.flags |= flags_of_service;
    Ok(backend)
}

/// The source port that a masqueraded flow tries first: a random one, or that of the client's last connection to this
/// backend if the client has reset that connection.
///
/// The backend may still have an old connection from the port that the client's SYN gets, for example one that a forged
/// packet has begun. Then the backend answers the SYN with an ACK, the client sends a RST, which ends the old
/// connection, and repeats its SYN. From the same port the repeated SYN succeeds; from another port it might meet
/// another old connection.
#[inline(never)]
fn first_port(setup: &FlowSetup) -> u16 {
    match lookup(&setup.from) {
        Some(last)
            if rules::flow::frees_port_by_reset(last, &setup.to)
                && setup.ports.contains(last.to.source_port) =>
        {
            last.to.source_port
        }
        _ => setup.ports.random(),
    }
}

/// Whether a flow to this VIP that begins at this device is caught. (A subprogram, so that its stack frame is freed
/// when it returns: the frames of a call chain share the stack.)
#[inline(never)]
fn begins_caught(device: u32, vip: &Address) -> bool {
    is_caught(&device::info(device), || settings::is_in_service_range(vip))
}

/// Makes the flow a caught one, which gets the VIP as source.
#[inline(always)]
fn set_caught(setup: &mut FlowSetup) {
    setup.to.source = setup.from.destination;
    setup.flags = flags_of(Forwarding::Caught, false);
}

/// Masquerades a caught flow where it leaves the node.
#[inline(never)]
fn masquerade_caught(context: &HookContext, setup: &mut FlowSetup) -> Result<(), Outcome> {
    setup.ports = masquerade::ports()?;
    setup.to.source_port = setup.ports.random();
    setup.node = masquerade::source(context, &setup.from, &setup.to)?;
    setup.flags = flags_of(Forwarding::CaughtAndMasquerade, false);
    Ok(())
}

/// Makes the flow a tunnelled one. Returns false if the client is a node, or if the agent has set no address of this
/// node in the client's IP family. (If the client is the backend's own node, a tunnel would bring that node a packet
/// from its own address, and the answer would not pass a program that restores the virtual address.)
#[inline(never)]
fn set_tunnel_ends(setup: &mut FlowSetup) -> bool {
    if settings::is_node(&setup.from.source) {
        return false;
    }
    let is_v4 = setup.from.source.is_v4();
    let (Some(settings), Ok(source)) = (settings::current(), masquerade::fallback(is_v4)) else {
        return false;
    };
    setup.to.source = source;
    setup.to.source_port = source_port(&setup.from);
    setup.flags = flags_of(Forwarding::Tunnel, false);
    if settings.flags & settings_flags::GUE != 0 {
        setup.flags |= flow_flags::GUE;
    }
    true
}

/// Deletes the flow whose forward entry has the key `setup.from`.
#[inline(always)]
pub(crate) fn delete(setup: &mut FlowSetup) {
    delete_earlier(setup);
    table::remove(&setup.from);
}

/// Ends the earlier connection from this client port. Also deletes the connection's reverse entry, unless the new
/// flow's reverse entry has the same key.
#[inline(never)]
fn delete_earlier(setup: &mut FlowSetup) {
    if let Some(earlier) = lookup(&setup.from) {
        active_flows::end(earlier);
        if earlier.is_tunnelled() {
            flow_log::ended(&setup.from, earlier, None, FlowEventKind::Replaced);
            return;
        }
        setup.key = earlier.to.reversed();
        if flow_log::is_on() {
            // If the new flow has taken over this reverse entry, the entry still has the counts of the earlier flow.
            let reply = lookup(&setup.key).map(|reply| &*reply);
            flow_log::ended(&setup.from, earlier, reply, FlowEventKind::Replaced);
        }
        if setup.key != setup.to.reversed() {
            // Another CPU may have deleted the entry already.
            table::remove(&setup.key);
        }
    }
}

/// Inserts the forward entry. If another CPU has just inserted a forward entry for another packet of this flow, that
/// entry stays. The function then deletes the reverse entries that this CPU has inserted, unless the existing forward
/// entry has the same backend and source port. It also deletes them if there is no room for the forward entry.
#[inline(never)]
fn insert_forward(setup: &mut FlowSetup, replace: bool) -> Inserted {
    prepare_forward(setup, replace);
    let inserted = if replace && table::replace(&setup.from, &setup.flow) {
        Inserted::New
    } else {
        table::insert(&setup.from, &setup.flow)
    };
    let keeps_reverse = match inserted {
        Inserted::New => true,
        Inserted::Exists => has_same_target(setup),
        Inserted::Full => false,
    };
    if !keeps_reverse && !setup.is_tunnelled() {
        claim::release(setup);
    }
    if inserted == Inserted::New {
        active_flows::begin(setup.active_flows_slot);
    }
    inserted
}

/// Prepares the entry of the direction from the client. (A subprogram, to have a stack frame of its own.)
#[inline(never)]
fn prepare_forward(setup: &mut FlowSetup, replace: bool) {
    setup.flow.init(&setup.from, &setup.to, setup.service, setup.flags, now());
    setup.flow.active_flows_slot = setup.active_flows_slot;
    if replace && let Some(earlier) = lookup(&setup.from) {
        setup.flow.continue_counters(earlier);
    }
}

/// Whether the existing forward entry translates to the same backend and source port, so that it can use the reverse
/// entries that this CPU has inserted. Also true if there is no forward entry, because another CPU may be inserting it:
/// unused reverse entries expire, but without them the flow's replies would not be translated.
#[inline(always)]
fn has_same_target(setup: &FlowSetup) -> bool {
    lookup(&setup.from).is_none_or(|flow| flow.to == setup.to)
}
