//! The end of a tunnel: packets to backends on this node, from the node that has chosen the backend.
//!
//! The programs take a packet out of its tunnel if the tunnel leads to a backend on this node, and the packet is for a
//! service with this backend or belongs to a flow to this backend. They send the inner packet to the backend with the
//! address of the client, and never into another tunnel. They drop the packet if the node must not accept it, for
//! example because the tunnel does not begin at a node of the cluster. All other packets pass unchanged: this node may
//! only be a router on their path.

use aya_ebpf::{Global, bindings::BPF_F_ADJ_ROOM_FIXED_GSO};
use lb_common::{
    Address, Choice, FrontendKind, Outcome, Service, ServiceKey, backend_flags,
    conntrack::{Flow, Tuple},
    device_flags,
};
use lb_ebpf::{
    forward::tunnel::{self, Tunnel},
    parse::{Body, Packet, frame::lengths, parse_at, parse_quoted},
    rules::{self, admission},
    service::schedule,
};

use super::translate_at_tc;
use crate::datapath::{
    context::{Hook, HookContext},
    device,
    early_return::outcome_of,
    flow::{
        conntrack, masquerade,
        new::{self, Begin, FlowCreation},
    },
    fragments,
    icmp::{self, Translated},
    maps,
    scratch::{scratch, setup::FlowRequest},
    service::{self, admit},
    settings,
    skb::Skb,
};

/// Whether the programs look for tunnels; the agent sets it when it loads the programs. With 0 the verifier removes
/// this code.
#[unsafe(no_mangle)]
static DECAPSULATE: Global<u8> = Global::new(1);

/// Decapsulates a packet that enters the node, and sends it to its backend; `None` if the packet is in no tunnel that
/// ends at this node. (The program inlines this function: creating a flow takes seven of the eight stack frames that a
/// call chain may have.)
#[inline(always)]
pub(crate) fn process(skb: &mut Skb) -> Option<Outcome> {
    let packet = maps::inner_packet().ok()?;
    Some(match receive(skb, packet) {
        Received::NotOurs => return None,
        Received::Dropped(outcome) => reported(packet, outcome),
        Received::KnownFlow => forward(skb, packet),
        Received::IcmpError => match icmp::translate(skb, &packet.headers, Hook::Ingress) {
            Translated::Done(outcome) => outcome,
            // `receive` found a flow that leads to a backend on this node, so another CPU has replaced that flow since.
            Translated::ThroughTunnel => Outcome::UnknownIcmpError,
        },
        Received::FirstPacket => {
            let earlier = conntrack::lookup(&packet.tuple).is_some();
            match new::new_flow(&skb.context(), packet, earlier, Begin::Requested) {
                FlowCreation::Created | FlowCreation::CreatedRouted | FlowCreation::Stateless => {
                    forward(skb, packet).of_first_packet()
                }
                // Never happens: the request names a backend, and `new_flow` rejects no requested flow.
                FlowCreation::Reject => reported(packet, Outcome::NoBackend),
                FlowCreation::NotCreated(outcome) => reported(packet, outcome),
            }
        }
    })
}

/// Makes the event about a dropped packet show the packet as it is inside the tunnel.
#[inline(always)]
fn reported(packet: &Packet, outcome: Outcome) -> Outcome {
    if let Ok(reported) = maps::packet() {
        *reported = *packet;
    }
    outcome
}

/// Whether a packet that no flow translates may contain a tunnelled packet; `outcome` is the reason why no flow does.
#[inline(always)]
pub(crate) fn may_be_tunnel(outcome: Outcome, packet: &Packet) -> bool {
    rules::tunnel::may_be_tunnel(outcome, packet.body, &packet.tuple, || DECAPSULATE.load() != 0)
}

/// Whether a packet with this tuple may be in a GUE tunnel.
#[inline(always)]
pub(crate) fn may_be_gue(tuple: &Tuple) -> bool {
    rules::tunnel::may_be_gue(tuple, || DECAPSULATE.load() != 0)
}

/// The result of [`receive`].
///
/// It fits into one register, which is all that a subprogram returns: variants without a field are values that
/// [`Outcome`] does not use.
#[derive(Clone, Copy)]
enum Received {
    /// The packet is in no tunnel that ends at this node, and is unchanged. In all other cases it is decapsulated or
    /// dropped.
    NotOurs,
    /// The packet came in a tunnel and is dropped for this reason.
    Dropped(Outcome),
    /// A packet of a flow to the backend.
    KnownFlow,
    /// The first packet of a flow. [`target`] has written the request for this flow into `SCRATCH`.
    FirstPacket,
    /// An ICMP error about a packet of the backend.
    IcmpError,
}

const _: () = assert!(size_of::<Received>() == size_of::<Outcome>());

/// Decapsulates the packet if its tunnel ends at this node, or decides to drop it.
#[inline(never)]
fn receive(skb: &mut Skb, packet: &mut Packet) -> Received {
    if !ends_tunnels(skb.context().device) {
        return Received::NotOurs;
    }
    skb.pull_headers();
    if !find(skb) || !parse(skb, packet) || !fragments::complete_inner(skb, packet) {
        return Received::NotOurs;
    }
    let is_error = packet.body == Body::IcmpError;
    let target = if is_error { error_target(skb, packet) } else { target(&skb.context(), packet) };
    let received = match target {
        Target::None => return Received::NotOurs,
        Target::KnownFlow if is_error => Received::IcmpError,
        Target::KnownFlow => Received::KnownFlow,
        Target::FirstPacket => Received::FirstPacket,
    };
    if !is_from_peer() {
        return Received::Dropped(Outcome::TunnelRefused);
    }
    if target == Target::FirstPacket && !accepts_client(&packet.tuple.source) {
        return Received::Dropped(Outcome::SourceNotAllowed);
    }
    let Ok(scratch) = scratch() else { return Received::NotOurs };
    let Tunnel { outer, inner, .. } = *scratch.tunnel();
    match take_out(skb, packet, inner.wrapping_sub(outer)) {
        Ok(()) => inner_segment(packet, target).map_or_else(Received::Dropped, |()| received),
        Err(outcome) => Received::Dropped(outcome),
    }
}

/// Checks the flags of the inner segment: whether the segment may begin the flow, or may belong to the known flow.
#[inline(always)]
fn inner_segment(packet: &Packet, target: Target) -> Result<(), Outcome> {
    if target == Target::FirstPacket && matches!(packet.body, Body::Tcp | Body::Sctp) {
        return admission::tunnelled_segment(&packet.segment).allow(packet.tuple.protocol);
    }
    if packet.has_invalid_flags() { Err(Outcome::InvalidFlags) } else { Ok(()) }
}

/// Whether tunnels of peers end at this device. Pods could forge the address of a peer, so no tunnel ends at a device
/// with pods behind it.
#[inline(always)]
pub(super) fn ends_tunnels(device: u32) -> bool {
    device::info(device).flags & device_flags::TUNNELS != 0
}

/// Whether the requested service accepts this client. (The node that has chosen the backend applies the same rule. But
/// for a moment, the source ranges of that node may differ from the source ranges of this node, and in a network that
/// does not filter the peers' addresses the packet may be forged.)
#[inline(always)]
fn accepts_client(client: &Address) -> bool {
    let Ok(scratch) = scratch() else { return false };
    let service = &scratch.request().service;
    !admission::is_outside_source_ranges(service, || admit::is_in_source_range(service.id, client))
}

/// Writes the tunnel into `SCRATCH`; returns false if there is none.
#[inline(never)]
fn find(skb: &Skb) -> bool {
    match (scratch(), tunnel::find(skb, skb.layer)) {
        // A packet with a VLAN tag is for another device, stacked on this one.
        (Ok(scratch), Ok(tunnel)) if tunnel.outer <= lengths::ETHERNET => {
            *scratch.tunnel() = tunnel;
            true
        }
        _ => false,
    }
}

/// Parses the packet inside the tunnel; returns false if that fails. (The offset is read from `SCRATCH`, so that the
/// verifier checks this code once, not once for each possible offset.)
#[inline(never)]
fn parse(skb: &Skb, packet: &mut Packet) -> bool {
    let Ok(scratch) = scratch() else { return false };
    match parse_at(skb, scratch.tunnel().inner) {
        Ok(parsed) => {
            *packet = parsed;
            true
        }
        Err(_) => false,
    }
}

/// Whether a packet in a tunnel belongs to a flow to the backend that the tunnel leads to.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Target {
    /// The packet neither belongs to a flow to the backend, nor begins one.
    None = 0,
    /// The packet belongs to an existing flow to the backend.
    KnownFlow = 1,
    /// The packet begins a flow to the backend.
    FirstPacket = 2,
}

/// The [`Target`] of the packet. If the packet may begin a flow, the function writes the request into `SCRATCH`.
#[inline(never)]
fn target(context: &HookContext, packet: &Packet) -> Target {
    let Ok(scratch) = scratch() else { return Target::None };
    let backend = &scratch.tunnel().destination;
    let known = conntrack::lookup(&packet.tuple).filter(|flow| leads_to(flow, backend));
    if known.is_some() && !packet.segment.is_syn() {
        return Target::KnownFlow;
    }
    let is_new = request(packet) && find_local_backend();
    match known {
        Some(flow) if !is_new || !conntrack::check_new_connection(context, packet, flow) => Target::KnownFlow,
        _ if is_new => Target::FirstPacket,
        _ => Target::None,
    }
}

/// Whether the flow leads to the backend, and not through another tunnel.
#[inline(always)]
fn leads_to(flow: &Flow, backend: &Address) -> bool {
    !flow.is_reply() && !flow.is_tunnelled() && flow.to.destination == *backend
}

/// Requests in `SCRATCH` a flow of the packet's service; returns false if the packet is for no service.
#[inline(never)]
fn request(packet: &Packet) -> bool {
    match (scratch(), service(&packet.tuple)) {
        (Ok(scratch), Ok(service)) => {
            *scratch.request() = FlowRequest {
                service,
                masquerade: false,
                dsr: false,
                slot: schedule::NONE,
                choice: Choice::Peer,
            };
            true
        }
        _ => false,
    }
}

/// The service of the packet. Node ports are the same on all nodes, so the function replaces an address of a peer node
/// by an address of this node.
#[inline(always)]
fn service(tuple: &Tuple) -> Result<Service, Outcome> {
    match service::lookup(tuple) {
        Err(Outcome::NoService) if is_peer(&tuple.destination) => {}
        found => return found,
    }
    let own = masquerade::fallback(tuple.destination.is_v4())?;
    let service = service::find(&ServiceKey::new(own, tuple.destination_port, tuple.protocol))?;
    if service.kind == FrontendKind::NodePort as u8 { Ok(service) } else { Err(Outcome::NoService) }
}

/// Finds the backend of the tunnel in the service in `SCRATCH`; returns false if the backend is not on this node.
#[inline(never)]
fn find_local_backend() -> bool {
    let Ok(scratch) = scratch() else { return false };
    let (request, address) = (scratch.request(), &scratch.tunnel().destination);
    request.slot = service::search(&request.service, address, 0);
    service::backend(request.slot)
        .is_some_and(|backend| backend.address == *address && backend.flags & backend_flags::LOCAL != 0)
}

/// [`Target::KnownFlow`] if the ICMP error is about a packet of the backend that the tunnel leads to.
#[inline(never)]
fn error_target(skb: &Skb, packet: &Packet) -> Target {
    let Ok(quoted) = parse_quoted(skb, &packet.headers) else { return Target::None };
    let Ok(scratch) = scratch() else { return Target::None };
    match conntrack::lookup(&quoted.tuple.reversed()) {
        Some(flow) if leads_to(flow, &scratch.tunnel().destination) => Target::KnownFlow,
        _ => Target::None,
    }
}

/// Whether the tunnel begins at a peer node.
#[inline(always)]
fn is_from_peer() -> bool {
    scratch().is_ok_and(|scratch| is_peer(&scratch.tunnel().source))
}

#[inline(always)]
fn is_peer(address: &Address) -> bool {
    settings::is_peer(address)
}

/// Removes the `bytes` of headers before the inner packet. (The inner packet is of the same family, so the kernel needs
/// no `BPF_F_ADJ_ROOM_DECAP_L3_*`, which exist since Linux 6.3.)
#[inline(always)]
pub(super) fn take_out(skb: &mut Skb, packet: &mut Packet, bytes: u32) -> Result<(), Outcome> {
    skb.adjust_room(-bytes.cast_signed(), BPF_F_ADJ_ROOM_FIXED_GSO)?;
    packet.headers.l3 = packet.headers.l3.wrapping_sub(bytes);
    packet.headers.l4 = packet.headers.l4.wrapping_sub(bytes);
    Ok(())
}

/// Sends the packet to its backend.
#[inline(never)]
fn forward(skb: &mut Skb, packet: &Packet) -> Outcome {
    outcome_of(|| {
        let flow = conntrack::lookup(&packet.tuple).ok_or(Outcome::ConntrackFull)?;
        fragments::remember_inner(skb, packet);
        match translate_at_tc(skb, packet, flow)? {
            Outcome::Forward => Ok(Outcome::Decapsulated),
            outcome => Ok(outcome),
        }
    })
}
