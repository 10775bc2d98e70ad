use bytemuck::{Pod, Zeroable};

use crate::conntrack::Tuple;

/// Places of a tuple: [`NEIGHBOURS`] slots at each of two positions.
pub const PLACES: u32 = 8;
/// Number of neighbouring slots at one position.
const NEIGHBOURS: u32 = 4;

/// The secret of a table, which determines the places of its tuples. Clients that do not know the secret cannot choose
/// tuples that share places. Any random words make a good seed. A table keeps its seed, because another seed yields
/// other places.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Seed {
    /// Numbers that the hash adds to the words of a tuple.
    pub words: [u32; 10],
    /// The factor of the sum; the hash makes it odd.
    pub multiplier: u64,
}

const _: () = assert!(size_of::<Seed>() == 48);

impl Seed {
    /// The hash of a tuple: NH (the universal hash of UMAC, RFC 4418 §5.2.2), then a multiplication that spreads the
    /// sum over the upper bits.
    ///
    /// For two tuples that are chosen without knowledge of the seed, the sums are equal with a probability of at most
    /// 2^-32. An IPv4 tuple costs three multiplications, an IPv6 tuple six.
    #[inline(always)]
    pub fn hash(&self, key: &Tuple) -> u64 {
        let [a, b, c, d] = key.source.words();
        let [e, f, g, h] = key.destination.words();
        let ports = u32::from(key.source_port) << 16 | u32::from(key.destination_port);
        let mut sum = self.product(0, d, h).wrapping_add(self.product(2, ports, u32::from(key.protocol)));
        if !key.source.is_v4() {
            sum = sum
                .wrapping_add(self.product(4, a, e))
                .wrapping_add(self.product(6, b, f))
                .wrapping_add(self.product(8, c, g));
        }
        let spread = (sum ^ (sum >> 32)).wrapping_mul(self.multiplier | 1);
        spread ^ (spread >> 32)
    }

    #[inline(always)]
    const fn product(&self, first: usize, a: u32, b: u32) -> u64 {
        let (left, right) = (a.wrapping_add(self.words[first]), b.wrapping_add(self.words[first + 1]));
        (left as u64).wrapping_mul(right as u64)
    }
}

/// The places in which the entry of a tuple may be, and its fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    first: u32,
    second: u32,
    fingerprint: u32,
}

/// The lowest of the hash bits that determine the second position. The first position comes from the bits from bit 0
/// on.
const SECOND_POSITION_SHIFT: u32 = 22;

impl Places {
    /// The places in a table of `slots` slots, a power of two of at least [`PLACES`], for a tuple with this hash.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "some bits of the hash")]
    pub const fn new(hash: u64, slots: u32) -> Self {
        let mask = slots.wrapping_sub(NEIGHBOURS) & !(NEIGHBOURS - 1);
        let first = ((hash as u32) << 2) & mask;
        let mut second = (((hash >> SECOND_POSITION_SHIFT) as u32) << 2) & mask;
        if second == first {
            second ^= NEIGHBOURS;
        }
        Self { first, second, fingerprint: (hash >> 32) as u32 & !0xf }
    }

    /// Places that a test chooses: four from `first` and four from `second` on.
    #[cfg(test)]
    pub(super) const fn at(first: u32, second: u32, fingerprint: u32) -> Self {
        Self { first, second, fingerprint }
    }

    /// The index of the slot of `place`, a number below [`PLACES`].
    #[inline(always)]
    pub const fn slot(&self, place: u32) -> u32 {
        if place < NEIGHBOURS { self.first + place } else { self.second + (place - NEIGHBOURS) }
    }

    /// The fingerprint at its position in the control word.
    #[inline(always)]
    pub(super) const fn fingerprint(&self) -> u32 {
        self.fingerprint
    }
}
