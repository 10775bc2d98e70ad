use bytemuck::{Pod, Zeroable};

use crate::Address;

/// Key of `FRAGMENTS`: what all fragments of one datagram share (RFC 791 §3.2, RFC 8200 §4.5).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct FragmentKey {
    /// Source address as the packet shows it at this hook.
    pub source: Address,
    /// Destination address as the packet shows it at this hook.
    pub destination: Address,
    /// Identification field: 16 bits in IPv4, 32 in IPv6; as on the wire.
    pub identification: u32,
    /// IP protocol number of the datagram.
    pub protocol: u8,
    zero: u8,
    zeros: u16,
}

const _: () = assert!(size_of::<FragmentKey>() == 40);

impl FragmentKey {
    /// The key of a datagram.
    #[inline(always)]
    pub const fn new(source: Address, destination: Address, identification: u32, protocol: u8) -> Self {
        Self { source, destination, identification, protocol, zero: 0, zeros: 0 }
    }
}

/// Value of `FRAGMENTS`: the ports, which only the first fragment carries; host byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct FragmentPorts {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
}

const _: () = assert!(size_of::<FragmentPorts>() == 4);

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::FragmentKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::FragmentPorts {}
}
