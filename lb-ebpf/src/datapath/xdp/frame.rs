//! The frame that an XDP program runs on.

use aya_ebpf::{bindings::xdp_action, helpers::generated::bpf_redirect, programs::XdpContext};
use lb_common::Outcome;
use lb_ebpf::{
    parse::{
        Packet,
        bounds::bounded,
        frame::{Frame, Header, MAX_OFFSET, lengths},
    },
    rewrite::{FrameMut, lacks_checksum},
    rules::forwarding::is_last_hop,
};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

use crate::datapath::context::HookContext;

/// A frame of a device.
pub(crate) struct Xdp {
    pub(crate) ctx: XdpContext,
    /// Start and end of the linear part; see [`Self::reload`].
    data: usize,
    data_end: usize,
    /// Interface index of the device that the frame leaves through.
    pub(super) exit: u32,
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
        HookContext { raw: self.ctx.ctx.cast(), device, mark: 0 }
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

/// Checks that the packet can be sent as it is: it fits `mtu`, its TTL or hop limit allows another hop, and its
/// checksum is complete (not left to the device). tc handles all other packets.
#[inline(always)]
pub(super) fn check(xdp: &Xdp, packet: &Packet, mtu: u32) -> Result<(), Outcome> {
    let length = packet.length;
    let hops = if packet.headers.is_v4 {
        xdp.header::<Ipv4Hdr>(lengths::ETHERNET)?.ttl
    } else {
        xdp.header::<Ipv6Hdr>(lengths::ETHERNET)?.hop_limit
    };
    if length > mtu || length < lengths::IPV4 || is_last_hop(hops) {
        return Err(Outcome::OtherHook);
    }
    if lacks_checksum(xdp, packet, length)? {
        return Err(Outcome::OtherHook);
    }
    Ok(())
}
