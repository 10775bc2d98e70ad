//! The hash by which schedulers place flows and backends in tables: the same on every node with the same seed,
//! independent of byte order. (The programs use it for other purposes as well, such as random choices and the source
//! ports of tunnels.)

use crate::Address;

/// The default seed. Nodes that serve the same clients of one service need the same seed.
pub const DEFAULT_SEED: u64 = 0x6c62_2d61_6765_6e74;

/// The multipliers of MurmurHash3's 64-bit finaliser (Austin Appleby, public domain).
const FIRST: u64 = 0xff51_afd7_ed55_8ccd;
const SECOND: u64 = 0xc4ce_b9fe_1a85_ec53;

/// A number in which every bit depends on every bit of `word` and `state`.
#[inline(always)]
pub(crate) const fn mix(state: u64, word: u64) -> u64 {
    let mut mixed = state ^ word;
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(FIRST);
    mixed = (mixed ^ (mixed >> 33)).wrapping_mul(SECOND);
    mixed ^ (mixed >> 33)
}

/// The hash of an address and a number, such as a port.
#[inline(always)]
pub fn of_endpoint(seed: u64, address: &Address, number: u32) -> u64 {
    let [a, b, c, d] = address.words().map(|word| u32::from_be(word) as u64);
    mix(mix(mix(seed, a << 32 | b), c << 32 | d), number as u64)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, vec};

    use super::*;

    #[test]
    fn hash_never_changes() {
        let v4 = of_endpoint(DEFAULT_SEED, &Address::from_v4([192, 0, 2, 1]), 8080);
        let v6 = of_endpoint(1, &Address::from_words([1, 2, 3, 4].map(u32::to_be)), 0);
        assert_eq!((v4, v6), (6_016_805_982_822_253_964, 11_418_744_938_668_715_926));
    }

    #[test]
    fn neighbouring_addresses_are_spread_evenly() {
        const BUCKETS: usize = 64;
        for seed in [0, 1, DEFAULT_SEED] {
            let mut upper = vec![0; BUCKETS];
            let mut all = BTreeSet::new();
            for host in 0..=255 {
                for port in 0..100 {
                    let hash = of_endpoint(seed, &Address::from_v4([10, 0, 0, host]), 40_000 + port);
                    upper[(hash >> 58) as usize] += 1;
                    all.insert(hash);
                }
            }
            assert_eq!(all.len(), 25_600);
            // 400 hits are expected, with a standard deviation of 20; the range allows six deviations.
            assert!(upper.iter().all(|count| (280..520).contains(count)), "seed {seed}: {upper:?}");
        }
    }
}
