use bytemuck::{Pod, Zeroable};

use super::Tick;

/// Where packets of one direction leave the node: a cached answer of the routing table and the neighbour table. Only
/// flows that bypass the stack have one.
///
/// Two CPUs that renew it at once while the route changes may mix two answers. A packet that leaves by such a mixture
/// is lost on the wire, as packets are while routes change.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct NextHop {
    /// MAC address of the next hop.
    pub destination: [u8; 6],
    /// MAC address of the device that the packets leave through.
    pub source: [u8; 6],
    /// Interface index of the device that the packets leave through.
    pub device: u32,
    /// MTU of the route: the largest IP packet, in bytes.
    pub mtu: u16,
    /// Bits of [`next_hop_flags`].
    pub flags: u16,
    /// When the kernel gave this answer. The programs look the route up again once per tick; 0 means never.
    pub resolved_at: Tick,
}

const _: () = assert!(size_of::<NextHop>() == 24);

impl NextHop {
    /// A next hop that has not been looked up yet.
    pub const UNKNOWN: Self =
        Self { destination: [0; 6], source: [0; 6], device: 0, mtu: 0, flags: 0, resolved_at: Tick(0) };
}

/// Bits of [`NextHop::flags`].
pub mod next_hop_flags {
    /// Route and neighbour are known. Without this bit packets go through the stack, and the other fields mean nothing.
    pub const KNOWN: u16 = 1;
    /// The device transmits frames that XDP programs on other devices redirect to it.
    pub const XDP_REDIRECT_TARGET: u16 = 2;
    /// The device is one end of a veth pair, and packets go straight to the other end (`bpf_redirect_peer`).
    pub const REDIRECT_PEER: u16 = 4;
    /// No packet has used this answer yet.
    pub const FRESH: u16 = 8;
}
