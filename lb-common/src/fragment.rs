use bytemuck::{Pod, Zeroable};

use crate::{Address, conntrack::Tick, layout::describe};

/// Key of `FRAGMENTS`: the fields that all fragments of one datagram share (RFC 791 §3.2, RFC 8200 §4.5).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct FragmentKey {
    /// Source address as the packet shows it at this hook.
    pub source: Address,
    /// Destination address as the packet shows it at this hook.
    pub destination: Address,
    /// Identification field: 16 bits in IPv4, 32 in IPv6; as on the wire.
    pub identification: u32,
    /// IPv4: the IP protocol number. IPv6: 0, since only the first fragment is sure to carry it.
    pub protocol: u8,
    zero: u8,
    zeros: u16,
}

const _: () = assert!(size_of::<FragmentKey>() == 40);

describe!(FragmentKey { source, destination, identification, protocol, zero, zeros });

impl FragmentKey {
    /// The key of a datagram of this protocol.
    #[inline(always)]
    pub fn new(source: Address, destination: Address, identification: u32, protocol: u8) -> Self {
        let protocol = if source.is_v4() { protocol } else { 0 };
        Self { source, destination, identification, protocol, zero: 0, zeros: 0 }
    }
}

/// Value of `FRAGMENTS`: the fields that only the first fragment carries; ports in host byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct FragmentPorts {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
    /// When the first fragment was seen. Identifications are reused, so the entry expires: see [`Self::is_valid`].
    pub seen: Tick,
    /// IP protocol number of the transport header. (In IPv6 more extension headers may follow the fragment header.)
    pub protocol: u8,
    zero: u8,
    zeros: u16,
}

const _: () = assert!(size_of::<FragmentPorts>() == 12);

describe!(FragmentPorts { source, destination, seen, protocol, zero, zeros });

impl FragmentPorts {
    /// Ticks within which the fragments of a datagram follow the first one: about 30 s, as Linux waits for them
    /// (`net.ipv4.ipfrag_time`).
    const LIFETIME: u32 = 28;

    /// The fields of the first fragment of a datagram.
    #[inline(always)]
    pub const fn new(source: u16, destination: u16, protocol: u8, seen: Tick) -> Self {
        Self { source, destination, seen, protocol, zero: 0, zeros: 0 }
    }

    /// Whether a later fragment may still belong to the same datagram.
    #[inline(always)]
    pub const fn is_valid(&self, now: Tick) -> bool {
        now.0.wrapping_sub(self.seen.0) <= Self::LIFETIME
    }
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::FragmentKey {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::FragmentPorts {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_is_valid_for_30_seconds() {
        let ports = FragmentPorts::new(1, 2, 17, Tick::from_nanos(1_000_000_000_000));
        let after = |seconds: u64| Tick::from_nanos((1_000 + seconds) * 1_000_000_000);
        assert!(ports.is_valid(after(0)) && ports.is_valid(after(29)));
        assert!(!ports.is_valid(after(32)) && !ports.is_valid(after(100_000)));
    }
}
