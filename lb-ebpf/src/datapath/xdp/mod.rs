//! The way of packets of routed flows through the XDP program: from the wire and out again, before there is an skb.
//!
//! Whatever is not plain goes on to tc as it came, uncounted, and is decided there: every packet is handled once.

use aya_ebpf::{bindings::xdp_action, helpers::generated::bpf_redirect, programs::XdpContext};
use lb_common::{
    Outcome,
    conntrack::{Flow, flow_flags, next_hop_flags},
};
use lb_ebpf::{
    parse::{
        Body, Layer, Packet, Part,
        bounds::bounded,
        frame::{Frame, Header, MAX_OFFSET, lengths},
        parse, parse_plain,
    },
    rewrite::{self, FrameMut, lacks_checksum},
};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

mod tunnel;

use super::{
    context::HookContext,
    flow::{conntrack, new},
    forward::next_hop,
    maps, service,
};

/// A frame of a device.
pub(crate) struct Xdp {
    pub(in crate::datapath) ctx: XdpContext,
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

impl FrameMut for Xdp {
    #[inline(always)]
    fn header_mut<T: Header>(&mut self, offset: u32) -> Result<&mut T, Outcome> {
        // SAFETY: within bounds, and borrowed as mutably as the frame.
        Ok(unsafe { &mut *(self.bounds::<T>(offset)? as *mut T) })
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
    pub(in crate::datapath) fn find_again(&mut self) {
        (self.data, self.data_end) = (self.ctx.data(), self.ctx.data_end());
    }

    /// The address of a header that lies within the frame.
    #[inline(always)]
    fn bounds<T: Header>(&self, offset: u32) -> Result<usize, Outcome> {
        const { assert!(align_of::<T>() == 1) };
        if offset > MAX_OFFSET {
            return Err(Outcome::Malformed);
        }
        let start = self.data + bounded(offset) as usize;
        if start + size_of::<T>() > self.data_end {
            return Err(Outcome::Malformed);
        }
        Ok(start)
    }

    #[inline(always)]
    pub(crate) fn context(&self) -> HookContext {
        // SAFETY: the context is valid for the whole run of the program.
        let device = unsafe { (*self.ctx.ctx).ingress_ifindex };
        HookContext { raw: self.ctx.ctx.cast(), device }
    }

    /// Sends the frame to its next hop.
    #[inline(always)]
    pub(crate) fn leave(&self) -> u32 {
        if self.exit == self.context().device {
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
        if !conntrack::is_new_connection(&xdp.context(), packet, flow) {
            return Ok(follow(xdp, packet, Outcome::Routed));
        }
    }
    match new::new_flow(&xdp.context(), packet, earlier, new::Begin::OnlyRouted) {
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
        None if !service::exists(&plain.tuple) => Outcome::OtherHook,
        known => {
            *packet = plain;
            if known.is_some() { OF_A_TURN } else { NO_FLOW }
        }
    }
}

/// Whether the packet belongs to a routed flow that neither begins nor ends with it.
#[inline(always)]
fn goes_on(packet: &Packet, flow: &Flow) -> bool {
    flow.flags & flow_flags::ROUTED != 0 && !packet.segment.is_syn_or_rst()
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
    if flow.next_hop.resolved_at != now {
        next_hop::renew(&xdp.context(), &flow.to, &mut flow.next_hop, now);
    }
    let exit = flow.next_hop.device;
    let takes_frames =
        exit == xdp.context().device || flow.next_hop.flags & next_hop_flags::XDP_REDIRECT_TARGET != 0;
    if flow.next_hop.flags & next_hop_flags::KNOWN == 0 || !takes_frames {
        return Err(Outcome::OtherHook);
    }
    xdp.exit = exit;
    if flow.is_tunnelled() {
        return Ok(tunnel::forward(xdp, packet, flow, outcome));
    }
    check(xdp, packet, u32::from(flow.next_hop.mtu))?;
    conntrack::observe_at(packet, flow, now);
    rewrite::transport(xdp, packet, flow)?;
    rewrite::network(xdp, &packet.headers, flow, 1)?;
    *xdp.header_mut::<[[u8; 6]; 2]>(0)? = [flow.next_hop.destination, flow.next_hop.source];
    Ok(outcome)
}

/// Whether the packet may go on as it is: it fits, has hops left, and has its checksum.
#[inline(always)]
pub(in crate::datapath) fn check(xdp: &Xdp, packet: &Packet, mtu: u32) -> Result<(), Outcome> {
    let length = packet.length;
    let hops = if packet.headers.is_v4 {
        xdp.header::<Ipv4Hdr>(lengths::ETHERNET)?.ttl
    } else {
        xdp.header::<Ipv6Hdr>(lengths::ETHERNET)?.hop_limit
    };
    if length > mtu || length < lengths::IPV4 || hops <= 1 {
        return Err(Outcome::OtherHook);
    }
    if lacks_checksum(xdp, packet, length)? {
        return Err(Outcome::OtherHook);
    }
    Ok(())
}
