//! Computes a sequence of turns: each backend occurs in proportion to its weight, as evenly mixed as possible.

/// Approximate maximum length of a sequence of turns; exceeded if there are more backends.
const LONGEST: usize = 4096;

/// A sequence in which each index of `weights` occurs in proportion to its weight and is spread evenly: the `k`-th turn
/// of a weight `w`, counted from 0, is at `(2k + 1) / 2w` of the sequence. Weights are divided by their greatest common
/// divisor; if the sequence would still be too long, they are reduced to shares of [`LONGEST`], or of the number of
/// backends if that is larger. Only backends of weight 0 are left out.
pub(super) fn turns(weights: &[u32]) -> Vec<u32> {
    let weights = reduced(weights);
    let mut turns: Vec<Turn> = Vec::new();
    for (place, weight) in (0..).zip(weights) {
        turns.extend((0..weight).map(|nth| Turn { at: 2 * nth + 1, of: weight, place }));
    }
    turns.sort_unstable_by(|a, b| {
        // Compares the fractions `a.at / a.of` and `b.at / b.of`.
        (a.at * b.of).cmp(&(b.at * a.of)).then_with(|| (b.of, a.place).cmp(&(a.of, b.place)))
    });
    turns.into_iter().map(|turn| turn.place).collect()
}

struct Turn {
    at: u64,
    of: u64,
    place: u32,
}

fn reduced(weights: &[u32]) -> Vec<u64> {
    let divisor = u64::from(weights.iter().copied().fold(0, greatest_common_divisor).max(1));
    let weights: Vec<u64> = weights.iter().map(|weight| u64::from(*weight) / divisor).collect();
    let total: u64 = weights.iter().sum();
    let room = LONGEST.max(weights.len()) as u64;
    if total <= room {
        return weights;
    }
    // Rounds to the nearest integer. The product of a u32 and a number of backends fits into 64 bits.
    let scaled = |weight: u64| (weight * room + total / 2) / total;
    weights.into_iter().map(|weight| if weight == 0 { 0 } else { scaled(weight).max(1) }).collect()
}

const fn greatest_common_divisor(a: u32, b: u32) -> u32 {
    let (mut a, mut b) = (a, b);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn share(turns: &[u32], place: u32) -> usize {
        turns.iter().filter(|turn| **turn == place).count()
    }

    #[test]
    fn turns_are_interleaved() {
        assert_eq!(turns(&[4, 3, 2]), [0, 1, 2, 0, 1, 0, 2, 1, 0]);
        assert_eq!(turns(&[5, 1, 1]), [0, 0, 0, 1, 2, 0, 0]);
        assert_eq!(turns(&[10, 0, 20]), [2, 0, 2]);
        assert_eq!(turns(&[7, 7]), [0, 1]);
        assert!(turns(&[0, 0]).is_empty());
    }

    #[test]
    fn large_weights_are_scaled_and_small_ones_kept() {
        let weights = [65_535, 65_534, 1, 0];
        let turns = turns(&weights);
        assert!(turns.len() <= LONGEST + weights.len(), "{}", turns.len());
        assert_eq!((share(&turns, 2), share(&turns, 3)), (1, 0));
        assert!(share(&turns, 0).abs_diff(share(&turns, 1)) <= 1);
    }

    #[test]
    fn more_backends_than_entries_all_get_a_turn() {
        let weights: Vec<u32> = (1..=6000).collect();
        let turns = turns(&weights);
        assert!((0..6000).all(|place| share(&turns, place) > 0));
        assert!(turns.len() < 2 * 6000);
    }

    proptest! {
        #[test]
        fn shares_are_those_of_the_weights(weights in proptest::collection::vec(0u32..50, 1..60)) {
            let turns = turns(&weights);
            let total: u32 = weights.iter().sum();
            for (place, weight) in (0..).zip(&weights) {
                let exact = u64::from(*weight) * turns.len() as u64;
                prop_assert_eq!(share(&turns, place) as u64 * u64::from(total), exact);
            }
        }

        /// In each part of the sequence, a backend's number of turns differs from its share by at most two.
        #[test]
        fn every_stretch_of_turns_is_fair(weights in proptest::collection::vec(1u32..20, 1..8), from: u16, length: u16) {
            let turns = turns(&weights);
            let from = usize::from(from) % turns.len();
            let length = usize::from(length) % turns.len();
            let stretch: Vec<u32> = turns.iter().cycle().skip(from).take(length).copied().collect();
            let total: u32 = weights.iter().sum();
            for (place, weight) in (0..).zip(&weights) {
                let fair = length as f64 * f64::from(*weight) / f64::from(total);
                prop_assert!((share(&stretch, place) as f64 - fair).abs() <= 2.0, "{} {:?}", fair, stretch);
            }
        }
    }
}
