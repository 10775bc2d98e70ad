use bytemuck::{Pod, Zeroable};

use crate::{Address, conntrack::Tick};

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
    /// When the first fragment was seen. Identifications come round, so the entry holds only for so long.
    pub seen: Tick,
}

const _: () = assert!(size_of::<FragmentPorts>() == 8);

impl FragmentPorts {
    /// Ticks within which the fragments of a datagram follow the first one: about 30 s, as Linux waits for them
    /// (`net.ipv4.ipfrag_time`).
    const LIFETIME: u32 = 28;

    /// Whether the entry still is about the datagram at hand.
    #[inline(always)]
    pub const fn holds(&self, now: Tick) -> bool {
        now.0.wrapping_sub(self.seen.0) <= Self::LIFETIME
    }
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::FragmentKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::FragmentPorts {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_holds_for_half_a_minute() {
        let ports = FragmentPorts { source: 1, destination: 2, seen: Tick::from_nanos(1_000_000_000_000) };
        let after = |seconds: u64| Tick::from_nanos((1_000 + seconds) * 1_000_000_000);
        assert!(ports.holds(after(0)) && ports.holds(after(29)));
        assert!(!ports.holds(after(32)) && !ports.holds(after(100_000)));
    }
}
