use bytemuck::{Pod, Zeroable};

use crate::{
    Address,
    conntrack::{Tick, Tuple},
    flow_table::Seed,
    hash,
    layout::describe,
};

/// Key of `FRAGMENTS`: the fields that all fragments of one datagram share (RFC 791 §3.2, RFC 8200 §4.5), and the hook.
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
    /// 1 where the fragments leave the node, 0 where they enter it. A datagram may pass one hook untouched and be
    /// translated at the other.
    pub egress: u8,
    zeros: u16,
}

const _: () = assert!(size_of::<FragmentKey>() == 40);

describe!(FragmentKey { source, destination, identification, protocol, egress, zeros });

impl FragmentKey {
    /// The key of a datagram at one hook. The key of an IPv6 datagram does not contain `protocol`.
    #[inline(always)]
    pub fn new(
        source: Address,
        destination: Address,
        identification: u32,
        protocol: u8,
        is_egress: bool,
    ) -> Self {
        let protocol = if source.is_v4() { protocol } else { 0 };
        Self { source, destination, identification, protocol, egress: u8::from(is_egress), zeros: 0 }
    }

    /// A number that spreads datagrams evenly. Senders that do not know the seed cannot choose datagrams with the same
    /// number.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "both halves of the identification")]
    pub fn hash(&self, seed: &Seed) -> u64 {
        let Self { source, destination, identification, protocol, .. } = *self;
        seed.hash(&Tuple {
            source,
            destination,
            source_port: (identification >> 16) as u16,
            destination_port: identification as u16,
            protocol,
            ..Tuple::zeroed()
        })
    }
}

/// Value of `FRAGMENTS`: what the first fragment of a datagram has shown; ports in host byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct FragmentedDatagram {
    /// Exclusive or of the [boundaries](Span::boundaries) of the fragments that have been seen at `device`. Programs
    /// change it atomically.
    pub boundaries: u64,
    /// Source port of the datagram.
    pub source: u16,
    /// Destination port of the datagram.
    pub destination: u16,
    /// When the first fragment was seen. Identifications are reused, so the entry expires: see [`Self::is_valid`].
    pub seen: Tick,
    /// Interface index of the last device at which the programs saw the first fragment. A packet may pass several
    /// devices with programs, such as a bridge and its port.
    pub device: u32,
    /// IP protocol number of the transport header (in IPv6 more extension headers may follow the fragment header),
    /// [`Self::UNTOUCHED`] or [`Self::DROPPED`].
    pub protocol: u8,
    zero: u8,
    zeros: u16,
}

const _: () = assert!(size_of::<FragmentedDatagram>() == 24);

describe!(FragmentedDatagram { boundaries, source, destination, seen, device, protocol, zero, zeros });

impl FragmentedDatagram {
    /// Ticks for which later fragments of a datagram may follow the first one: about 30 s, as long as Linux keeps an
    /// incomplete datagram (`net.ipv4.ipfrag_time`).
    const LIFETIME: u32 = 28;

    /// Ticks for which a later fragment waits for the first one, and for which later fragments are dropped once the
    /// first one was dropped: 1 to 2 s. The network reorders fragments within milliseconds. A longer time would only
    /// make it more likely that the programs take a fragment for part of another datagram with the same identification.
    const SHORT_LIFETIME: u32 = 1;

    /// The protocol of a datagram that no program translates at this hook: its fragments pass.
    pub const UNTOUCHED: u8 = 0;

    /// The protocol of a datagram whose first fragment was dropped or answered: its later fragments are dropped. (255
    /// is a reserved protocol number.)
    pub const DROPPED: u8 = 255;

    /// The datagram whose first fragment was seen at the tick `seen`.
    #[inline(always)]
    pub const fn new(
        source: u16,
        destination: u16,
        protocol: u8,
        boundaries: u64,
        seen: Tick,
        device: u32,
    ) -> Self {
        Self { boundaries, source, destination, seen, device, protocol, zero: 0, zeros: 0 }
    }

    /// Whether a later fragment may still belong to the same datagram.
    #[inline(always)]
    pub const fn is_valid(&self, now: Tick) -> bool {
        let lifetime = if self.protocol == Self::DROPPED { Self::SHORT_LIFETIME } else { Self::LIFETIME };
        is_within(lifetime, self.seen, now)
    }

    /// Whether a later fragment that arrived at the tick `seen` still waits for the first one.
    #[inline(always)]
    pub const fn may_wait(seen: Tick, now: Tick) -> bool {
        is_within(Self::SHORT_LIFETIME, seen, now)
    }
}

/// Whether at most `ticks` have passed since `seen`. `seen` may be slightly later than `now`, because two CPUs may have
/// read the clock.
#[inline(always)]
const fn is_within(ticks: u32, seen: Tick, now: Tick) -> bool {
    now.0.wrapping_sub(seen.0).cast_signed() <= ticks.cast_signed()
}

/// The part of a datagram that a fragment carries, in units of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first unit of 8 bytes that the fragment has.
    pub start: u16,
    /// The unit of 8 bytes after the last one that the fragment has.
    pub end: u32,
    /// Whether the datagram ends with this part.
    pub is_last: bool,
}

impl Span {
    /// The position that stands for the end of every datagram, larger than that of any unit.
    const END: u64 = 1 << 32;

    /// [`Self::boundaries`] of all fragments of a datagram together.
    pub const WHOLE: u64 = boundary(0) ^ boundary(Self::END);

    /// The exclusive or of the numbers of two positions: where the fragment begins, and where it ends. Where two
    /// fragments meet, the number of that position cancels out, so the exclusive or over all fragments that were seen
    /// is [`Self::WHOLE`] if they cover the datagram. A fragment that is seen twice before the datagram is complete
    /// cancels itself, and the datagram then never seems complete. A duplicate that arrives after the datagram is
    /// complete may be held like an early fragment. It then counts as a part of the next datagram with the same key, if
    /// that datagram follows within 2 s.
    #[inline(always)]
    pub const fn boundaries(self) -> u64 {
        boundary(self.start as u64) ^ boundary(if self.is_last { Self::END } else { self.end as u64 })
    }
}

/// A number in which every bit depends on every bit of the position, so that only equal boundaries cancel each other.
#[inline(always)]
const fn boundary(position: u64) -> u64 {
    hash::mix(hash::DEFAULT_SEED, position)
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::FragmentKey {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::FragmentedDatagram {}
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, vec::Vec};

    use super::*;

    const START: u64 = 1_000;

    fn at(seconds: u64) -> Tick {
        Tick::from_nanos((START + seconds) * 1_000_000_000)
    }

    fn datagram(protocol: u8) -> FragmentedDatagram {
        let first = Span { start: 0, end: 185, is_last: false };
        FragmentedDatagram::new(1, 2, protocol, first.boundaries(), at(0), 1)
    }

    #[test]
    fn entry_is_valid_for_30_seconds() {
        for protocol in [17, FragmentedDatagram::UNTOUCHED] {
            let datagram = datagram(protocol);
            assert!(datagram.is_valid(at(0)) && datagram.is_valid(at(29)));
            assert!(!datagram.is_valid(at(32)) && !datagram.is_valid(at(100_000)));
        }
    }

    #[test]
    fn fragments_wait_and_are_dropped_for_no_longer_than_2_seconds() {
        let dropped = datagram(FragmentedDatagram::DROPPED);
        for (seconds, expected) in [(0, true), (1, true), (3, false), (29, false), (100_000, false)] {
            assert_eq!(dropped.is_valid(at(seconds)), expected, "{seconds} s");
            assert_eq!(FragmentedDatagram::may_wait(at(0), at(seconds)), expected, "{seconds} s");
        }
    }

    #[test]
    fn fragment_that_another_cpu_has_seen_a_moment_later_is_not_old() {
        let (seen, now) = (at(0), Tick(at(0).0 - 1));
        assert!(FragmentedDatagram::may_wait(seen, now) && datagram(17).is_valid(now));
    }

    #[test]
    fn datagrams_are_spread_by_the_seed() {
        let seed = |word| Seed { words: [word; 10], multiplier: 0x9e37_79b9_7f4a_7c15 };
        for (source, destination) in [
            (Address::from_v4([192, 0, 2, 1]), Address::from_v4([192, 0, 2, 2])),
            (Address::from_words([1, 2, 3, 4]), Address::from_words([5, 6, 7, 8])),
        ] {
            let hashes = |seed: Seed| -> BTreeSet<u64> {
                let key = |number: u32| FragmentKey::new(source, destination, number << 12, 17, false);
                (0..1_000).map(|number| key(number).hash(&seed) % 4_096).collect()
            };
            // 1,000 random numbers below 4,096 have 887 different values on average, with a standard deviation of 10.
            let (one, other) = (hashes(seed(0x1234_5679)), hashes(seed(0x9abc_def1)));
            assert!(one.len() > 800 && one != other, "{} {}", one.len(), other.len());
        }
    }

    /// The parts of a datagram of `count` fragments with `size` units each.
    fn spans(count: u16, size: u16) -> Vec<Span> {
        let span =
            |n| Span { start: n * size, end: u32::from(n + 1) * u32::from(size), is_last: n + 1 == count };
        (0..count).map(span).collect()
    }

    #[test]
    fn datagram_is_complete_when_every_fragment_was_seen_once() {
        for (count, size) in [(2, 1), (3, 185), (11, 185), (16, 128)] {
            let spans = spans(count, size);
            for seen in 0_u32..1 << count {
                let of = |n: usize| if seen >> n & 1 == 1 { spans[n].boundaries() } else { 0 };
                let boundaries = (0..spans.len()).fold(0, |sum, n| sum ^ of(n));
                let all = seen.count_ones() == u32::from(count);
                assert_eq!(boundaries == Span::WHOLE, all, "{count} fragments, seen {seen:b}");
            }
        }
    }

    #[test]
    fn datagram_with_a_repeated_fragment_is_never_complete() {
        let spans = spans(3, 185);
        for twice in 0..3 {
            let sum = spans.iter().fold(spans[twice].boundaries(), |sum, span| sum ^ span.boundaries());
            assert_ne!(sum, Span::WHOLE);
        }
    }
}
