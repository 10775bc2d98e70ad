use bytemuck::{Pod, Zeroable};

use super::{Tick, Tuple};
use crate::{Address, capacity};

/// The way out of the node for packets that bypass the stack: a cached answer of the routing table and the neighbour
/// table.
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
    /// The tick of the route lookup; 0 before the first lookup, and if the last one found no neighbour. The answer is
    /// valid in that tick only.
    pub resolved_at: Tick,
    /// Destination MAC address of frames for this node, on the device that the packets came in through.
    pub entrance: [u8; 6],
    /// Padding, always 0.
    pub reserved: [u8; 2],
}

const _: () = assert!(size_of::<NextHop>() == 32);

impl NextHop {
    /// Both MAC addresses as they lie in an Ethernet header, destination first, in words.
    #[inline(always)]
    pub fn macs(&self) -> [u32; 3] {
        let [a, b, c, ..]: &[u32; 8] = bytemuck::must_cast_ref(self);
        [*a, *b, *c]
    }

    /// The bit [`next_hop_flags::REPEATED`], or 0, for a lookup at `now` that repeats the one of this next hop.
    #[inline(always)]
    pub fn repeated_at(&self, now: Tick) -> u16 {
        if self.flags & next_hop_flags::KNOWN == 0 {
            0
        } else if self.resolved_at == now {
            self.flags & next_hop_flags::REPEATED
        } else {
            next_hop_flags::REPEATED
        }
    }
}

/// Bits of [`NextHop::flags`].
pub mod next_hop_flags {
    /// Route and neighbour are known. Without this bit `destination`, `source`, `device` and `mtu` mean nothing.
    pub const KNOWN: u16 = 1;
    /// The device transmits frames that XDP programs on other devices redirect to it.
    pub const XDP_REDIRECT_TARGET: u16 = 2;
    /// The device is one end of a veth or netkit pair, and packets go straight to the other end (`bpf_redirect_peer`).
    pub const REDIRECT_PEER: u16 = 4;
    /// The next packet that direct forwarding at tc sends to this next hop goes through the kernel's neighbour table,
    /// and clears this bit. A packet that goes straight to the other end ([`REDIRECT_PEER`]) leaves the bit set.
    pub const FRESH: u16 = 8;
    /// All packets with the same [`NextHopKey`](super::NextHopKey) have this next hop; without this bit, only those
    /// that also have the same [`RouteInputs`](super::RouteInputs).
    pub const OF_DESTINATION: u16 = 16;
    /// The device transmits frames that its own XDP program sends back.
    pub const XDP_TX: u16 = 32;
    /// The lookup has repeated an earlier one in a later tick. The XDP program leaves the next packet to tc, where
    /// [`FRESH`] sends it through the kernel's neighbour table, and clears this bit.
    pub const REPEATED: u16 = 64;
}

/// The inputs of a route lookup that always matter. Policy routing may look at more: [`RouteInputs`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct NextHopKey {
    /// Destination of the translated packets.
    pub destination: Address,
    /// Interface index of the device that the packets came in through.
    pub device: u32,
    /// IP protocol number of the packets.
    pub protocol: u32,
}

const _: () = assert!(size_of::<NextHopKey>() == 24);

impl NextHopKey {
    /// The key of packets with the translated tuple `to` that came in through `device`.
    #[inline(always)]
    pub const fn new(to: &Tuple, device: u32) -> Self {
        Self { destination: to.destination, device, protocol: to.protocol as u32 }
    }

    /// The slot of `NEXT_HOPS` that caches the answer for this key.
    ///
    /// A sender that chooses colliding addresses only makes the programs look up more routes. So one multiplication
    /// without a seed is enough.
    #[inline(always)]
    pub fn slot(&self) -> u32 {
        /// 2^64 divided by the golden ratio, as in Knuth's multiplicative hashing.
        const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
        const SHIFT: u32 = u64::BITS - capacity::NEXT_HOPS.ilog2();
        let [a, b, c, d] = self.destination.words().map(|word| u32::from_be(word) as u64);
        let address = (c << 32 | d) ^ (a << 32 | b).rotate_left(20);
        let mixed = address ^ (u64::from(self.device) << 40) ^ (u64::from(self.protocol) << 32);
        (mixed.wrapping_mul(MULTIPLIER) >> SHIFT) as u32
    }
}

/// Further inputs of a route lookup, if there are rules of policy routing (`ip rule`) or multipath routes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct RouteInputs {
    /// Source of the packets before their translation; of packets in a tunnel, the outer source.
    pub source: Address,
    /// Source port before the translation, host byte order.
    pub source_port: u16,
    /// Destination port after the translation, host byte order.
    pub destination_port: u16,
    /// The mark of the packets (`skb->mark`).
    pub mark: u32,
}

const _: () = assert!(size_of::<RouteInputs>() == 24);

impl RouteInputs {
    /// The inputs of packets that came in as `from` with this mark and become `to`.
    #[inline(always)]
    pub const fn new(from: &Tuple, to: &Tuple, mark: u32) -> Self {
        Self {
            source: from.source,
            source_port: from.source_port,
            destination_port: to.destination_port,
            mark,
        }
    }
}

/// Value of `NEXT_HOPS`: the result of the latest route lookup for any of the keys that share this slot.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct CachedNextHop {
    /// The key that the next hop was looked up for.
    pub key: NextHopKey,
    /// The further inputs of the route lookup.
    pub inputs: RouteInputs,
    /// The next hop that the lookup has found.
    pub hop: NextHop,
}

const _: () = assert!(size_of::<CachedNextHop>() == 80);
const _: () = assert!(capacity::NEXT_HOPS.is_power_of_two());

impl CachedNextHop {
    /// Whether the answer is from this tick and applies to `inputs`. The caller has compared [`Self::key`] with the key
    /// of the packet.
    #[inline(always)]
    pub fn is_valid(&self, inputs: impl FnOnce() -> RouteInputs, now: Tick) -> bool {
        let of_destination = self.hop.flags & next_hop_flags::OF_DESTINATION != 0;
        self.hop.resolved_at == now && (of_destination || self.inputs == inputs())
    }
}

#[cfg(feature = "user")]
// SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
unsafe impl aya::Pod for CachedNextHop {}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, vec};

    use super::super::fixtures::{NOW, tuple};
    use super::*;
    use crate::protocol;

    fn key(destination: Address, device: u32) -> NextHopKey {
        NextHopKey::new(&Tuple { destination, ..tuple(protocol::TCP) }, device)
    }

    #[test]
    fn answer_is_valid_for_its_key_in_its_tick() {
        let wanted = NextHopKey::new(&tuple(protocol::TCP), 2);
        let mut cached = CachedNextHop::zeroed();
        assert!(!cached.is_valid(RouteInputs::zeroed, NOW), "an empty slot");
        cached.key = wanted;
        cached.hop.resolved_at = NOW;
        assert!(cached.is_valid(RouteInputs::zeroed, NOW));
        assert!(!cached.is_valid(RouteInputs::zeroed, Tick(NOW.0 + 1)));
        for other in [
            NextHopKey::new(&tuple(protocol::UDP), 2),
            NextHopKey::new(&tuple(protocol::TCP), 3),
            NextHopKey::new(&tuple(protocol::TCP).reversed(), 2),
        ] {
            assert_ne!(cached.key, other);
        }
    }

    #[test]
    fn flows_to_one_destination_share_an_answer_only_if_routes_depend_on_nothing_else() {
        let (from, to) = (tuple(protocol::TCP), tuple(protocol::TCP));
        let inputs = RouteInputs::new(&from, &to, 0);
        let others = [
            RouteInputs::new(&Tuple { source: Address::from_v4([10, 9, 9, 9]), ..from }, &to, 0),
            RouteInputs::new(&Tuple { source_port: 9, ..from }, &to, 0),
            RouteInputs::new(&from, &Tuple { destination_port: 9, ..to }, 0),
            RouteInputs::new(&from, &to, 1),
        ];
        let key = NextHopKey::new(&to, 7);
        let hop = NextHop { resolved_at: NOW, ..NextHop::zeroed() };
        let mut cached = CachedNextHop { key, inputs, hop };
        for (flags, shared) in [(0, false), (next_hop_flags::OF_DESTINATION, true)] {
            cached.hop.flags = flags;
            assert!(cached.is_valid(|| inputs, NOW));
            for other in others {
                assert_eq!(cached.is_valid(|| other, NOW), shared, "{other:?}");
            }
        }
    }

    #[test]
    fn neighbouring_destinations_are_spread_evenly_over_the_slots() {
        let v4 = |[high, low]: [u8; 2]| Address::from_v4([10, 0, high, low]);
        let v6 =
            |[high, low]: [u8; 2]| Address::from_v6([0xfd, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0, high, low]);
        let subnets = |[high, low]: [u8; 2]| {
            Address::from_v6([0x20, 1, 0xd, 0xb8, 0, 0, high, low, 0, 0, 0, 0, 0, 0, 0, 1])
        };
        for address in [&v4 as &dyn Fn([u8; 2]) -> Address, &v6, &subnets] {
            let mut hits = vec![0; capacity::NEXT_HOPS];
            for number in 0..u16::try_from(4 * capacity::NEXT_HOPS).unwrap() {
                hits[key(address(number.to_be_bytes()), 2).slot() as usize] += 1;
            }
            let most = hits.iter().max().unwrap();
            assert!(*most <= 16, "{most} of 4 on average");
        }
        let mut devices = BTreeMap::new();
        for device in 0..64 {
            *devices.entry(key(v4([0, 1]), device).slot()).or_insert(0) += 1;
        }
        assert!(devices.len() > 32, "{devices:?}");
    }
}
