//! Internet checksums (RFC 1071) and their incremental update (RFC 1624).
//!
//! Everything here works on words *as they lie in memory*: one's complement sums do not depend on byte order
//! (RFC 1071 §2 (B)), so no value is ever swapped, and a sum may be stored into a packet as it is.

/// An unfolded one's complement sum; [`Sum::fold`] makes the 16-bit word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Sum(u64);

impl Sum {
    /// The empty sum.
    pub const ZERO: Self = Self(0);

    /// Adds 16 bytes.
    #[inline(always)]
    #[must_use]
    pub fn add_16(self, bytes: &[u8; 16]) -> Self {
        let [a, b, c, d]: [u32; 4] = bytemuck::must_cast(*bytes);
        Self(self.0 + u64::from(a) + u64::from(b) + u64::from(c) + u64::from(d))
    }

    /// Subtracts 16 bytes: adds their complement.
    #[inline(always)]
    #[must_use]
    pub fn sub_16(self, bytes: &[u8; 16]) -> Self {
        let [a, b, c, d]: [u32; 4] = bytemuck::must_cast(*bytes);
        Self(self.0 + u64::from(!a) + u64::from(!b) + u64::from(!c) + u64::from(!d))
    }

    /// Adds one 16-bit word in network byte order.
    #[inline(always)]
    #[must_use]
    pub fn add_word(self, word: u16) -> Self {
        Self(self.0 + u64::from(word))
    }

    /// Adds two 16-bit words in network byte order at once.
    #[inline(always)]
    #[must_use]
    pub fn add_wide(self, words: u32) -> Self {
        Self(self.0 + u64::from(words))
    }

    /// Subtracts one 16-bit word in network byte order.
    #[inline(always)]
    #[must_use]
    pub fn sub_word(self, word: u16) -> Self {
        Self(self.0 + u64::from(!word))
    }

    /// The sum as one 16-bit word in network byte order, not complemented.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "folded to 16 bits before")]
    pub const fn fold(self) -> u16 {
        let sum = (self.0 & 0xffff_ffff) + (self.0 >> 32);
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = (sum & 0xffff) + (sum >> 16);
        sum as u16
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The sum of an even number of bytes, as RFC 1071 defines it.
    fn sum(bytes: &[u8]) -> Sum {
        bytes
            .chunks_exact(2)
            .fold(Sum::ZERO, |sum, pair| sum.add_word(u16::from_ne_bytes([pair[0], pair[1]])))
    }

    #[test]
    fn sum_of_the_example_of_rfc_1071() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(sum(&bytes).fold().to_ne_bytes(), [0xdd, 0xf2]);
    }

    proptest! {
        #[test]
        fn delta_updates_the_old_sum_to_the_new_one(
            old in any::<[u8; 16]>(), new in any::<[u8; 16]>(), rest in proptest::collection::vec(1u8.., 2..64),
        ) {
            let delta = Sum::ZERO.sub_16(&old).add_16(&new).fold();
            let sum = |head: &[u8; 16]| sum(&[head, &rest[..rest.len() & !1]].concat());
            prop_assert_eq!(sum(&old).add_word(delta).fold(), sum(&new).fold());
        }

        #[test]
        fn wide_and_narrow_words_give_the_same_sum(bytes in any::<[u8; 16]>()) {
            prop_assert_eq!(Sum::ZERO.add_16(&bytes).fold(), sum(&bytes).fold());
        }
    }
}
