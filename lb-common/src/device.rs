use bytemuck::{Pod, Zeroable};

use crate::layout::describe;

/// Value of `DEVICES`, under its interface index: what packets may do there past the stack. Devices that are not in the map
/// take packets that come by a route and a neighbour, as any device does.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct DeviceInfo {
    /// Octets of the largest IP packet that it takes.
    pub mtu: u32,
    /// See [`device_flags`].
    pub flags: u32,
}

const _: () = assert!(size_of::<DeviceInfo>() == 8);

describe!(DeviceInfo { mtu, flags });

/// Bits of [`DeviceInfo::flags`].
pub mod device_flags {
    /// It leads to other machines, and packets of routed flows may pass between it and others of the kind
    /// ([`crate::conntrack::flow_flags::ROUTED`]).
    pub const WIRE: u32 = 1;
    /// It takes frames of XDP programs on other devices.
    pub const TAKES_FRAMES: u32 = 2;
    /// It is one end of a pair whose other end is a pod's: packets may go there without passing this one.
    pub const PEER: u32 = 4;
}

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for DeviceInfo {}
