//! XDP: packets of routed flows, from the wire and out again before there is an skb.
//!
//! All others go on to tc unchanged and uncounted, and tc decides about them: every packet is handled once.

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
    either,
    fast_path::FastPath,
    flow::{
        conntrack,
        new::{self, Begin, NewFlow},
    },
    forward::next_hop,
    maps, outcome_of, service,
};

/// A frame of a device.
pub(crate) struct Xdp {
    pub(crate) ctx: XdpContext,
    /// Start and end of the linear part; see [`Self::reload`].
    data: usize,
    data_end: usize,
    /// Interface index of the device that the frame leaves through.
    exit: u32,
}

impl Frame for Xdp {
    #[inline(always)]
    fn length(&self) -> u32 {
        (self.data_end - self.data) as u32
    }

    #[inline(always)]
    fn header<T: Header>(&self, offset: u32) -> Result<&T, Outcome> {
        // SAFETY: `bounds` has checked that the whole header lies between `data` and `data_end`, which the kernel
        // guarantees to be readable until a helper moves the frame. A function that calls such a helper takes `&mut
        // self`, which this borrow excludes. A `Header` has alignment 1 and is valid for every bit pattern.
        Ok(unsafe { &*(self.bounds::<T>(offset)? as *const T) })
    }
}

impl FrameMut for Xdp {
    #[inline(always)]
    fn header_mut<T: Header>(&mut self, offset: u32) -> Result<&mut T, Outcome> {
        // SAFETY: `bounds` has checked that the whole header lies between `data` and `data_end`, which the kernel
        // guarantees to be writable until a helper moves the frame. The borrow is mutable, so no other header is
        // borrowed.
        Ok(unsafe { &mut *(self.bounds::<T>(offset)? as *mut T) })
    }
}

impl Xdp {
    #[inline(always)]
    pub(crate) fn new(ctx: XdpContext) -> Self {
        let (data, data_end) = (ctx.data(), ctx.data_end());
        Self { ctx, data, data_end, exit: 0 }
    }

    /// Reads the bounds again after a helper that may have moved the frame.
    #[inline(always)]
    pub(crate) fn reload(&mut self) {
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
    pub(crate) fn send(&self) -> u32 {
        if self.exit == self.context().device {
            return xdp_action::XDP_TX;
        }
        // SAFETY: the helper takes two numbers, and reports a bad one in its result.
        unsafe { bpf_redirect(self.exit, 0) as u32 }
    }
}

/// Decides about a frame and rewrites it. Only outcomes that drop or route it count here: tc decides about all
/// others.
#[inline(always)]
pub(crate) fn process(xdp: &mut Xdp) -> Outcome {
    either(decide(xdp))
}

#[inline(always)]
fn decide(xdp: &mut Xdp) -> Result<Outcome, Outcome> {
    let packet = maps::packet()?;
    let known = match fast_path(xdp, packet) {
        FastPath::Done(outcome) => return Ok(outcome),
        FastPath::NoFlow => None,
        FastPath::HasFlow => conntrack::lookup(&packet.tuple),
        FastPath::NotPlain => {
            parse_routable(xdp, packet)?;
            conntrack::lookup(&packet.tuple)
        }
    };
    slow_path(xdp, packet, known)
}

/// The way of nearly every packet: plain, and of a routed flow that neither begins nor ends with it. Such a packet is
/// parsed into registers and never stored; any other plain one is.
#[inline(never)]
fn fast_path(xdp: &mut Xdp, packet: &mut Packet) -> FastPath {
    let Some(plain) = parse_plain(xdp) else { return FastPath::NotPlain };
    match conntrack::lookup(&plain.tuple) {
        Some(flow) if flow.flags & flow_flags::ROUTED != 0 && !plain.segment.is_syn_or_rst() => {
            FastPath::Done(either(forward(xdp, &plain, flow, Outcome::Routed)))
        }
        None if !service::exists(&plain.tuple) => FastPath::Done(Outcome::OtherHook),
        known => {
            *packet = plain;
            if known.is_some() { FastPath::HasFlow } else { FastPath::NoFlow }
        }
    }
}

/// Decides about a packet with which a routed flow begins or ends, or that is not plain.
#[inline(always)]
fn slow_path(xdp: &mut Xdp, packet: &Packet, known: Option<&'static mut Flow>) -> Result<Outcome, Outcome> {
    let earlier = known.is_some();
    if let Some(flow) = known {
        if flow.flags & flow_flags::ROUTED == 0 || conntrack::bypasses_vip(packet, flow) {
            return Err(Outcome::OtherHook);
        }
        if !conntrack::is_new_connection(&xdp.context(), packet, flow) {
            return Ok(forward_slow(xdp, packet, Outcome::Routed));
        }
    }
    match new::new_flow(&xdp.context(), packet, earlier, Begin::OnlyRouted) {
        NewFlow::CreatedRouted => Ok(forward_slow(xdp, packet, Outcome::NewRoutedFlow)),
        // tc decides: it begins other flows, and rejects.
        NewFlow::Created | NewFlow::Reject => Err(Outcome::OtherHook),
        NewFlow::Refused(outcome) => Err(outcome),
    }
}

/// Forwards a packet by the flow that it has. (With a frame of its own on the stack.)
#[inline(never)]
fn forward_slow(xdp: &mut Xdp, packet: &Packet, outcome: Outcome) -> Outcome {
    outcome_of(|| {
        let flow = conntrack::lookup(&packet.tuple).ok_or(Outcome::ConntrackFull)?;
        forward(xdp, packet, flow, outcome)
    })
}

/// Parses a packet that is not plain, if XDP may send it on.
#[inline(never)]
fn parse_routable(xdp: &Xdp, packet: &mut Packet) -> Result<(), Outcome> {
    *packet = parse(xdp, Layer::Ethernet)?;
    // A tagged packet belongs to another device of the node, on top of this one.
    let untagged = packet.headers.l3 == lengths::ETHERNET;
    let transport = matches!(packet.body, Body::Tcp | Body::Udp);
    if untagged && transport && packet.fragment.part == Part::Whole {
        Ok(())
    } else {
        Err(Outcome::OtherHook)
    }
}

/// Updates the flow of a packet, and rewrites the packet for its next hop.
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
    // The flow has counted the packet and parts of it may be written: tc must not see it.
    write(xdp, packet, flow).map_err(|_| Outcome::RewriteFailed)?;
    Ok(outcome)
}

#[inline(always)]
fn write(xdp: &mut Xdp, packet: &Packet, flow: &Flow) -> Result<(), Outcome> {
    rewrite::transport(xdp, packet, flow)?;
    rewrite::network(xdp, &packet.headers, flow, 1)?;
    *xdp.header_mut::<[[u8; 6]; 2]>(0)? = [flow.next_hop.destination, flow.next_hop.source];
    Ok(())
}

/// Checks that the packet can be sent as it is: it fits, has hops left, and has its checksum. tc handles all others.
#[inline(always)]
pub(crate) fn check(xdp: &Xdp, packet: &Packet, mtu: u32) -> Result<(), Outcome> {
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
