//! The end of a tunnel: packets for backends on this node that the node which chose them has sent here.
//!
//! A packet is taken out of its tunnel if the tunnel leads to a backend on this node, and the packet is for a service that has
//! this backend, or for a flow that goes to it. Anything else is not ours and goes on as it is: this node may be nothing but a
//! router on its way. The packet then goes to that very backend, by its client's own address, and never into another tunnel.

use aya_ebpf::bindings::{BPF_F_ADJ_ROOM_FIXED_GSO, bpf_adj_room_mode::BPF_ADJ_ROOM_MAC};
use lb_common::{
    Address, Choice, FrontendKind, GUE_PORT, Outcome, Service, ServiceKey, backend_flags,
    conntrack::{Flow, Tuple},
};
use lb_ebpf::{
    forward::tunnel::{self, Tunnel},
    parse::{Body, Packet, frame::lengths, parse_at},
    service::schedule,
};

use crate::datapath::{
    Hook,
    context::HookContext,
    flow::{
        conntrack,
        create::Request,
        masquerade,
        new::{self, Begin},
    },
    forward::through_stack,
    fragments, icmp,
    maps::{self, scratch},
    service, settings,
    skb::Skb,
};

/// What is in no tunnel that ends here.
pub(in crate::datapath) const NOT_OURS: Outcome = Outcome::NotTransport;

/// Takes a packet that enters the node out of its tunnel, if that ends here, and leads it to its backend. Else it is
/// [`NOT_OURS`]. (Part of the program itself: the beginning of a flow needs all of the eight frames that there may be but
/// this one.)
#[inline(always)]
pub(in crate::datapath) fn process(skb: &mut Skb) -> Outcome {
    let Ok(packet) = maps::inner_packet() else { return NOT_OURS };
    match receive(skb, packet) {
        Outcome::NewFlow => {
            let earlier = conntrack::lookup(&packet.tuple).is_some();
            match new::new_flow(&skb.context(), packet, earlier, Begin::Asked) {
                Outcome::NewFlow => follow(skb, packet).of_first_packet(),
                other => told_of(packet, other),
            }
        }
        Outcome::Decapsulated => follow(skb, packet),
        Outcome::IcmpError => icmp::translate(skb, &packet.headers, Hook::Ingress),
        NOT_OURS => NOT_OURS,
        other => told_of(packet, other),
    }
}

/// A packet that is dropped is to be told of as it is in its tunnel.
#[inline(always)]
fn told_of(packet: &Packet, outcome: Outcome) -> Outcome {
    if let Ok(told) = maps::packet() {
        *told = *packet;
    }
    outcome
}

/// Whether a packet that is of no flow and for no service may be in a tunnel. (In datagrams only one of no service is looked
/// for: theirs is a port as any other.)
#[inline(always)]
pub(in crate::datapath) fn may_be_tunnel(outcome: Outcome, packet: &Packet) -> bool {
    match outcome {
        Outcome::NotTransport => true,
        Outcome::NoService => packet.body == Body::Udp && packet.tuple.destination_port == GUE_PORT,
        _ => false,
    }
}

/// Takes the packet out. It then goes on in its flow ([`Outcome::Decapsulated`]), or there is to be one
/// ([`Outcome::NewFlow`]), or it is an [`Outcome::IcmpError`]; anything else is what became of it.
#[inline(never)]
fn receive(skb: &mut Skb, packet: &mut Packet) -> Outcome {
    try_receive(skb, packet).unwrap_or_else(|early| early)
}

#[inline(always)]
fn try_receive(skb: &mut Skb, packet: &mut Packet) -> Result<Outcome, Outcome> {
    read(skb, packet)?;
    if fragments::complete(packet).is_err() {
        return Err(NOT_OURS);
    }
    let is_error = packet.body == Body::IcmpError;
    let slot = if is_error { error_destination(skb, packet) } else { destination(&skb.context(), packet) };
    if slot == schedule::NONE {
        return Err(NOT_OURS);
    }
    if !is_from_peer() {
        return Err(Outcome::TunnelRefused);
    }
    take_out(skb, packet)?;
    if is_error {
        return Ok(Outcome::IcmpError);
    }
    if slot == KNOWN_FLOW {
        return Ok(Outcome::Decapsulated);
    }
    if packet.segment.is_rst() { Err(Outcome::StrayReset) } else { Ok(Outcome::NewFlow) }
}

/// Finds the tunnel and parses the packet in it; where headers lie outside the linear part of the buffer, they are pulled in
/// first.
#[inline(always)]
fn read(skb: &mut Skb, packet: &mut Packet) -> Result<(), Outcome> {
    skb.pull_headers();
    if find(skb) != FOUND || parse(skb, packet) != FOUND {
        return Err(NOT_OURS);
    }
    Ok(())
}

/// There is a tunnel, or a packet in it.
const FOUND: Outcome = Outcome::Decapsulated;

/// Leaves the tunnel in `SCRATCH`.
#[inline(never)]
fn find(skb: &Skb) -> Outcome {
    match (scratch(), tunnel::find(skb, skb.layer)) {
        // What has a tag belongs to another device, on top of this one.
        (Ok(scratch), Ok(tunnel)) if tunnel.outer <= lengths::ETHERNET => {
            scratch.tunnel = tunnel;
            FOUND
        }
        _ => NOT_OURS,
    }
}

/// Parses the packet in the tunnel. (Where it begins comes from `SCRATCH`, so that the verifier does not walk this once for
/// each place where it may begin.)
#[inline(never)]
fn parse(skb: &Skb, packet: &mut Packet) -> Outcome {
    let Ok(scratch) = scratch() else { return NOT_OURS };
    match parse_at(skb, scratch.tunnel.inner) {
        Ok(parsed) => {
            *packet = parsed;
            FOUND
        }
        Err(_) => NOT_OURS,
    }
}

/// In place of a slot: the packet is of a flow to the backend.
const KNOWN_FLOW: u32 = schedule::NONE - 1;

/// The slot of the backend that the tunnel leads to, with what asks for a flow there in `SCRATCH`; [`KNOWN_FLOW`]; or
/// [`schedule::NONE`] where there is no such backend on this node.
#[inline(never)]
fn destination(context: &HookContext, packet: &Packet) -> u32 {
    let Ok(scratch) = scratch() else { return schedule::NONE };
    let backend = &scratch.tunnel.destination;
    let known = conntrack::lookup(&packet.tuple).filter(|flow| leads_to(flow, backend));
    if known.is_some() && !packet.segment.is_syn() {
        return KNOWN_FLOW;
    }
    let slot = if ask(packet) { local() } else { schedule::NONE };
    match known {
        Some(flow) if slot == schedule::NONE || !conntrack::is_new_connection(context, packet, flow) => {
            KNOWN_FLOW
        }
        _ => slot,
    }
}

/// Whether the flow leads to the backend, on this node.
#[inline(always)]
fn leads_to(flow: &Flow, backend: &Address) -> bool {
    !flow.is_reply() && !flow.is_tunnelled() && flow.to.destination == *backend
}

/// Asks for a flow of the service that the packet is for, if it is for any.
#[inline(never)]
fn ask(packet: &Packet) -> bool {
    match (scratch(), service(&packet.tuple)) {
        (Ok(scratch), Ok(service)) => {
            scratch.request = Request {
                service,
                masquerade: false,
                direct: false,
                slot: schedule::NONE,
                choice: Choice::Peer,
            };
            true
        }
        _ => false,
    }
}

/// The service that the packet is for. Node ports are the same on all nodes: that of a peer stands for this node's.
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

/// The slot of the backend, of the service that `SCRATCH` asks for, that the tunnel leads to, if it is on this node.
#[inline(never)]
fn local() -> u32 {
    let Ok(scratch) = scratch() else { return schedule::NONE };
    let address = &scratch.tunnel.destination;
    let slot = service::search(&scratch.request.service, address, 0);
    scratch.request.slot = slot;
    match service::backend(slot) {
        Some(backend) if backend.address == *address && backend.flags & backend_flags::LOCAL != 0 => slot,
        _ => schedule::NONE,
    }
}

/// [`KNOWN_FLOW`] if the ICMP error is about what the backend that the tunnel leads to has sent.
#[inline(never)]
fn error_destination(skb: &mut Skb, packet: &Packet) -> u32 {
    let Ok(quoted) = icmp::read_quoted(skb, &packet.headers) else { return schedule::NONE };
    let Ok(scratch) = scratch() else { return schedule::NONE };
    match conntrack::lookup(&quoted.tuple.reversed()) {
        Some(flow) if leads_to(flow, &scratch.tunnel.destination) => KNOWN_FLOW,
        _ => schedule::NONE,
    }
}

/// Whether the tunnel begins at a peer.
#[inline(always)]
fn is_from_peer() -> bool {
    scratch().is_ok_and(|scratch| is_peer(&scratch.tunnel.source))
}

#[inline(never)]
fn is_peer(address: &Address) -> bool {
    settings::current().is_some_and(|settings| settings.peers.contains(address))
}

/// Takes the headers of the tunnel away. (What is within is of the same family, so that the kernel need not be told it by
/// `BPF_F_ADJ_ROOM_DECAP_L3_*`, which is of Linux 6.3.)
#[inline(always)]
fn take_out(skb: &mut Skb, packet: &mut Packet) -> Result<(), Outcome> {
    let Tunnel { outer, inner, .. } = scratch()?.tunnel;
    let octets = inner.wrapping_sub(outer);
    let flags = u64::from(BPF_F_ADJ_ROOM_FIXED_GSO);
    skb.ctx.adjust_room(-(octets as i32), BPF_ADJ_ROOM_MAC, flags).map_err(|_| Outcome::RewriteFailed)?;
    packet.headers.l3 = packet.headers.l3.wrapping_sub(octets);
    packet.headers.l4 = packet.headers.l4.wrapping_sub(octets);
    Ok(())
}

/// Leads the packet to its backend.
#[inline(never)]
fn follow(skb: &mut Skb, packet: &Packet) -> Outcome {
    let Some(flow) = conntrack::lookup(&packet.tuple) else { return Outcome::ConntrackFull };
    fragments::remember(packet);
    match through_stack(skb, packet, flow) {
        Ok(Outcome::Forward) => Outcome::Decapsulated,
        Ok(outcome) | Err(outcome) => outcome,
    }
}
