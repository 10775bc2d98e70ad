//! The way of packets of routed flows through the XDP program: from the wire and out again, before there is an skb.
//!
//! Whatever is not plain goes on to tc as it came, uncounted, and is decided there: every packet is handled once.

use aya_ebpf::{bindings::xdp_action, helpers::generated::bpf_redirect, programs::XdpContext};
use lb_common::{
    Outcome,
    checksum::Sum,
    conntrack::{Flow, Hop, Tick, Tuple, flow_flags, tcp_flags},
};
use lb_ebpf::{
    frame::{Frame, Header, MAX_OFFSET, TcpHeader, half_word, lengths},
    packet::{Body, Layer, Packet, Part, parse, parse_plain},
    reject::pseudo_header,
};
use network_types::{
    ip::{Ipv4Hdr, Ipv6Hdr},
    udp::UdpHdr,
};

use super::{
    conntrack, maps, new_flow,
    place::Place,
    route::{self, Found},
    routed, tunnel_frames,
};

/// A frame of a device.
pub(crate) struct Xdp {
    pub(super) ctx: XdpContext,
    /// Where it begins and ends; see [`Self::find_again`].
    data: usize,
    data_end: usize,
    /// The device that it leaves through.
    exit: u32,
}

impl Frame for Xdp {
    #[inline(always)]
    fn length(&self) -> u32 {
        (self.data_end - self.data) as u32
    }

    #[inline(always)]
    fn header<T: Header>(&self, offset: u32) -> Result<&T, Outcome> {
        // SAFETY: within bounds; see `Skb::header`.
        Ok(unsafe { &*(self.bounds::<T>(offset)? as *const T) })
    }
}

impl Xdp {
    #[inline(always)]
    pub(crate) fn new(ctx: XdpContext) -> Self {
        let (data, data_end) = (ctx.data(), ctx.data_end());
        Self { ctx, data, data_end, exit: 0 }
    }

    /// Finds out where the frame lies after a helper may have moved it.
    #[inline(always)]
    pub(super) fn find_again(&mut self) {
        (self.data, self.data_end) = (self.ctx.data(), self.ctx.data_end());
    }

    /// The address of a header that lies within the frame.
    #[inline(always)]
    fn bounds<T: Header>(&self, offset: u32) -> Result<usize, Outcome> {
        const { assert!(align_of::<T>() == 1) };
        if offset > MAX_OFFSET {
            return Err(Outcome::Malformed);
        }
        let start = self.data + offset as usize;
        if start + size_of::<T>() > self.data_end {
            return Err(Outcome::Malformed);
        }
        Ok(start)
    }

    #[inline(always)]
    pub(super) fn header_mut<T: Header>(&mut self, offset: u32) -> Result<&mut T, Outcome> {
        // SAFETY: within bounds, and borrowed as mutably as the frame.
        Ok(unsafe { &mut *(self.bounds::<T>(offset)? as *mut T) })
    }

    #[inline(always)]
    fn place(&self) -> Place {
        // SAFETY: the context is valid for the whole run of the program.
        let device = unsafe { (*self.ctx.ctx).ingress_ifindex };
        Place { context: self.ctx.ctx.cast(), device }
    }

    /// Sends the frame to its next hop.
    #[inline(always)]
    pub(crate) fn leave(&self) -> u32 {
        if self.exit == self.place().device {
            return xdp_action::XDP_TX;
        }
        // SAFETY: the helper takes plain numbers.
        unsafe { bpf_redirect(self.exit, 0) as u32 }
    }
}

/// Decides about a frame and rewrites it. Of the outcomes only those that drop or route it count: everything else is left
/// to tc.
#[inline(always)]
pub(crate) fn process(xdp: &mut Xdp) -> Result<Outcome, Outcome> {
    let packet = maps::packet()?;
    let known = match short_way(xdp, packet) {
        NO_FLOW => None,
        NOT_PLAIN => {
            read(xdp, packet)?;
            conntrack::lookup(&packet.tuple)
        }
        OF_A_TURN => conntrack::lookup(&packet.tuple),
        done => return Ok(done),
    };
    let earlier = known.is_some();
    if let Some(flow) = known {
        if flow.flags & flow_flags::ROUTED == 0 || conntrack::is_foreign(packet, flow) {
            return Err(Outcome::OtherHook);
        }
        if !conntrack::is_new_connection(&xdp.place(), packet, flow) {
            return Ok(follow(xdp, packet, Outcome::Routed));
        }
    }
    match new_flow::new_flow(&xdp.place(), packet, earlier, new_flow::Begin::OnlyRouted) {
        Outcome::NewRoutedFlow => Ok(follow(xdp, packet, Outcome::NewRoutedFlow)),
        other => Err(other),
    }
}

/// Follows the flow that the packet has. (With a frame of its own on the stack.)
#[inline(never)]
fn follow(xdp: &mut Xdp, packet: &Packet, outcome: Outcome) -> Outcome {
    match conntrack::lookup(&packet.tuple) {
        Some(flow) => forward(xdp, packet, flow, outcome).unwrap_or_else(|early| early),
        None => Outcome::ConntrackFull,
    }
}

/// A plain packet of no flow.
const NO_FLOW: Outcome = Outcome::NoService;
/// A plain packet of a flow that begins or ends with it, or that tc follows.
const OF_A_TURN: Outcome = Outcome::NewFlow;
/// A packet that has to be looked at closely.
const NOT_PLAIN: Outcome = Outcome::Malformed;

/// The way of nearly every packet: plain, and of a routed flow that goes on. Such a packet is never written down; any other
/// plain one is, and what it is is the answer.
#[inline(never)]
fn short_way(xdp: &mut Xdp, packet: &mut Packet) -> Outcome {
    let Ok(plain) = parse_plain(xdp) else { return NOT_PLAIN };
    match conntrack::lookup(&plain.tuple) {
        Some(flow) if goes_on(&plain, flow) => {
            forward(xdp, &plain, flow, Outcome::Routed).unwrap_or_else(|early| early)
        }
        known => {
            *packet = plain;
            if known.is_some() { OF_A_TURN } else { NO_FLOW }
        }
    }
}

/// Whether the packet belongs to a routed flow that neither begins nor ends with it.
#[inline(always)]
fn goes_on(packet: &Packet, flow: &Flow) -> bool {
    const TURN: u8 = tcp_flags::SYN | tcp_flags::RST;
    flow.flags & flow_flags::ROUTED != 0 && packet.segment.flags & TURN == 0
}

/// Any packet that XDP may send on.
#[inline(never)]
fn read(xdp: &Xdp, packet: &mut Packet) -> Result<(), Outcome> {
    *packet = parse(xdp, Layer::Ethernet)?;
    // A tag belongs to another device of the node, on top of this one.
    let untagged = packet.headers.l3 == lengths::ETHERNET;
    let transport = matches!(packet.body, Body::Tcp | Body::Udp);
    if untagged && transport && packet.fragment.part == Part::Whole {
        Ok(())
    } else {
        Err(Outcome::OtherHook)
    }
}

/// Follows the flow of a packet, rewrites it and sends it on.
#[inline(always)]
fn forward(xdp: &mut Xdp, packet: &Packet, flow: &mut Flow, outcome: Outcome) -> Result<Outcome, Outcome> {
    let now = conntrack::now();
    if flow.hop.asked != now && !renew(&xdp.place(), &flow.to, &mut flow.hop, now) {
        return Err(Outcome::OtherHook);
    }
    let exit = flow.hop.device;
    if exit != xdp.place().device && !routed::takes_frames(exit) {
        return Err(Outcome::OtherHook);
    }
    xdp.exit = exit;
    if flow.is_tunnelled() {
        return Ok(tunnel_frames::forward(xdp, packet, flow, outcome));
    }
    check(xdp, packet, flow.hop.mtu)?;
    conntrack::observe_at(packet, flow, now);
    transport(xdp, packet, flow)?;
    network(xdp, packet.headers.is_v4, flow)?;
    *xdp.header_mut::<[[u8; 6]; 2]>(0)? = [flow.hop.destination, flow.hop.source];
    Ok(outcome)
}

/// Asks for the way again; false where tc has to find it.
#[inline(never)]
fn renew(place: &Place, to: &Tuple, hop: &mut Hop, now: Tick) -> bool {
    /// So short that it always fits: what we want is to be told the MTU.
    const ANY: u16 = 1;
    if route::look_up(place, to, ANY, 0) != Found::Route {
        return false;
    }
    let Ok(route) = route::found() else { return false };
    let (destination, source) = route.macs();
    *hop = Hop { destination, source, device: route.device, mtu: route.mtu(), asked: now };
    true
}

/// Whether the packet may go on as it is: it fits, has hops left, and has its checksum.
#[inline(always)]
pub(super) fn check(xdp: &Xdp, packet: &Packet, mtu: u32) -> Result<(), Outcome> {
    let (length, hops) = if packet.headers.is_v4 {
        let header: &Ipv4Hdr = xdp.header(lengths::ETHERNET)?;
        (u32::from(u16::from_be(half_word(&header.tot_len))), header.ttl)
    } else {
        let header: &Ipv6Hdr = xdp.header(lengths::ETHERNET)?;
        (u32::from(u16::from_be(half_word(&header.payload_len))) + lengths::IPV6, header.hop_limit)
    };
    if length > mtu || length < lengths::IPV4 || hops <= 1 {
        return Err(Outcome::OtherHook);
    }
    if lacks_checksum(xdp, packet, length)? {
        return Err(Outcome::OtherHook);
    }
    Ok(())
}

/// Whether the checksum is still to be computed, which frames of the same machine leave to the device: on veth, on virtio,
/// and wherever the program runs on skbs. XDP does not tell; but then the field holds the sum over the pseudo header. (Of the
/// checksums that are right, one in 65,536 looks like that, and takes the way through tc for nothing.)
#[inline(always)]
fn lacks_checksum(xdp: &Xdp, packet: &Packet, length: u32) -> Result<bool, Outcome> {
    let headers = &packet.headers;
    let length = length.saturating_sub(headers.l4 - headers.l3) as u16;
    let found = half_word(xdp.header(headers.l4 + checksum_offset(packet))?);
    Ok(found == pseudo_header(&packet.tuple, length).fold())
}

/// Where the checksum is, in octets from the transport header.
#[inline(always)]
fn checksum_offset(packet: &Packet) -> u32 {
    if packet.body == Body::Tcp { 16 } else { 6 }
}

/// Writes ports and checksum of the transport header.
#[inline(always)]
fn transport(xdp: &mut Xdp, packet: &Packet, flow: &Flow) -> Result<(), Outcome> {
    let l4 = packet.headers.l4;
    let ports = [flow.to.source_port.to_be_bytes(), flow.to.destination_port.to_be_bytes()];
    if packet.body == Body::Tcp {
        let header: &mut TcpHeader = xdp.header_mut(l4)?;
        [header.source, header.destination] = ports;
        let checksum = updated(half_word(&header.checksum), flow.address_delta, flow.port_delta);
        header.checksum = checksum.to_ne_bytes();
        return Ok(());
    }
    let header: &mut UdpHdr = xdp.header_mut(l4)?;
    [header.src, header.dst] = ports;
    // A checksum of 0 is none and stays so; one that becomes 0 is written as 0xffff (RFC 768).
    let before = half_word(&header.check);
    if before != 0 {
        let after = updated(before, flow.address_delta, flow.port_delta);
        header.check = if after == 0 { u16::MAX } else { after }.to_ne_bytes();
    }
    Ok(())
}

/// Writes the addresses, and takes a hop from the packet's life.
#[inline(always)]
fn network(xdp: &mut Xdp, is_v4: bool, flow: &Flow) -> Result<(), Outcome> {
    let to = &flow.to;
    if is_v4 {
        let header: &mut Ipv4Hdr = xdp.header_mut(lengths::ETHERNET)?;
        (header.src_addr, header.dst_addr) = (to.source.v4_octets(), to.destination.v4_octets());
        // One less in the upper octet of a word in network byte order.
        let hop = Sum::ZERO.sub_word(0x0100_u16.to_be()).fold();
        header.check = updated(half_word(&header.check), flow.address_delta, hop).to_ne_bytes();
        header.ttl -= 1;
    } else {
        let header: &mut Ipv6Hdr = xdp.header_mut(lengths::ETHERNET)?;
        (header.src_addr, header.dst_addr) = (*to.source.octets(), *to.destination.octets());
        header.hop_limit -= 1;
    }
    Ok(())
}

/// The checksum after two changes (RFC 1624).
#[inline(always)]
pub(super) fn updated(checksum: u16, one: u16, other: u16) -> u16 {
    !Sum::ZERO.add_word(!checksum).add_word(one).add_word(other).fold()
}
