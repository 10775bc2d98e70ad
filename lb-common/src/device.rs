use bytemuck::{Pod, Zeroable};

use crate::layout::describe;

/// Value of `DEVICES`, keyed by interface index: which packets may bypass the stack on this device. A device that is
/// not in the map takes packets from a route and a neighbour, as any device does.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct DeviceInfo {
    /// MTU: the largest IP packet, in bytes.
    pub mtu: u32,
    /// Bits of [`device_flags`].
    pub flags: u32,
}

const _: () = assert!(size_of::<DeviceInfo>() == 8);

describe!(DeviceInfo { mtu, flags });

/// Bits of [`DeviceInfo::flags`].
pub mod device_flags {
    /// A wire device: it leads to other machines. Packets of routed flows pass between wire devices
    /// ([`crate::conntrack::flow_flags::ROUTED`]).
    pub const WIRE: u32 = 1;
    /// The device transmits frames that XDP programs on other devices redirect to it.
    pub const XDP_REDIRECT_TARGET: u32 = 2;
    /// The device is the host-side end of a pod's veth pair: packets may go straight to the pod's end
    /// (`bpf_redirect_peer`).
    pub const REDIRECT_PEER: u32 = 4;
}

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for DeviceInfo {}
