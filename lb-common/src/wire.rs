use bytemuck::{Pod, Zeroable};

/// Value of `WIRES`, under its interface index: a device that leads to other machines and between which packets of
/// routed flows may pass ([`crate::conntrack::flow_flags::ROUTED`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Wire {
    /// Octets of the largest IP packet that it takes.
    pub mtu: u32,
    /// See [`wire_flags`].
    pub flags: u32,
}

const _: () = assert!(size_of::<Wire>() == 8);

/// Bits of [`Wire::flags`].
pub mod wire_flags {
    /// It takes frames of XDP programs on other devices.
    pub const TAKES_FRAMES: u32 = 1;
}

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for Wire {}
