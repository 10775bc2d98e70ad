//! Token buckets: how often something may happen.
//!
//! The state of a bucket is one number: the time at which the bucket will be full again. A bucket without state is
//! full, and CPUs share a bucket by atomic operations on one word.

/// The size of a bucket, and how fast tokens return to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucket {
    /// Time in which one token returns, in ns.
    pub interval: u64,
    /// Tokens in a full bucket.
    pub burst: u64,
}

/// The difference between the clocks of two CPUs that a bucket tolerates, in ns: a CPU whose clock is ahead may have
/// stored a state that another CPU would otherwise consider too late.
const SLACK: u64 = 1_000_000_000;

impl TokenBucket {
    /// Takes a token at `now` (ns) from a bucket that will be full at `full_at` (0 for a bucket without state). Returns
    /// the time at which the bucket will be full after that, or `None` if the bucket has no token.
    #[inline(always)]
    pub const fn take(&self, full_at: u64, now: u64) -> Option<u64> {
        let from = if self.is_missing_tokens(full_at, now) { full_at } else { now };
        let full_at = from + self.interval;
        if full_at - now > self.burst * self.interval { None } else { Some(full_at) }
    }

    /// Whether the bucket is not full. A state that is too late for this bucket comes from an earlier, slower limit.
    /// The bucket then counts as full: otherwise it could have no token for up to the whole period of that limit.
    const fn is_missing_tokens(&self, full_at: u64, now: u64) -> bool {
        full_at > now && full_at - now <= self.burst * self.interval + SLACK
    }

    /// Number of tokens in the bucket at `now`.
    pub const fn left(&self, full_at: u64, now: u64) -> u64 {
        if !self.is_missing_tokens(full_at, now) {
            return self.burst;
        }
        self.burst.saturating_sub((full_at - now).div_ceil(self.interval))
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// The times in `attempts` (ns from a start) at which the bucket had a token.
    fn taken(bucket: TokenBucket, attempts: impl Iterator<Item = u64>) -> Vec<u64> {
        let (start, mut full_at) = (77 * SECOND, 0);
        let mut had_token = |at: &u64| match bucket.take(full_at, start + at) {
            Some(later) => {
                full_at = later;
                true
            }
            None => false,
        };
        attempts.filter(|at| had_token(at)).collect()
    }

    #[test]
    fn full_bucket_has_as_many_tokens_as_its_burst() {
        let bucket = TokenBucket { interval: SECOND / 3, burst: 3 };
        assert_eq!(taken(bucket, std::iter::repeat_n(5, 10)), [5; 3]);
    }

    #[test]
    fn bucket_that_a_slower_limit_has_emptied_is_full() {
        let bucket = TokenBucket { interval: SECOND / 1000, burst: 1000 };
        let now = 77 * SECOND;
        assert_eq!(bucket.left(now + 60 * SECOND, now), 1000);
        assert_eq!(bucket.take(now + 60 * SECOND, now), Some(now + SECOND / 1000));
        // Another CPU, whose clock is ahead, has just taken the last token.
        assert_eq!((bucket.left(now + SECOND + 1, now), bucket.take(now + SECOND + 1, now)), (0, None));
    }

    #[test]
    fn tokens_return_one_by_one() {
        let bucket = TokenBucket { interval: SECOND, burst: 2 };
        let attempts = (0..50).map(|tenth| tenth * SECOND / 10);
        assert_eq!(taken(bucket, attempts), [0, 1, 10, 20, 30, 40].map(|tenth| tenth * SECOND / 10));
    }

    #[test]
    fn tokens_that_are_left_can_be_taken() {
        let bucket = TokenBucket { interval: SECOND, burst: 3 };
        let now = 77 * SECOND;
        for since in [0, 1, SECOND - 1, SECOND, SECOND + 1, 2 * SECOND, 3 * SECOND, 3 * SECOND + 1] {
            let mut full_at = now + since;
            let left = bucket.left(full_at, now);
            for _ in 0..left {
                full_at = bucket.take(full_at, now).expect("a token is left");
            }
            assert_eq!(bucket.take(full_at, now), None, "{since} ns until the bucket is full");
        }
    }

    #[test]
    fn unused_bucket_gets_no_more_tokens_than_its_burst() {
        let bucket = TokenBucket { interval: SECOND, burst: 2 };
        let attempts = [0, 0, 0].into_iter().chain(std::iter::repeat_n(100 * SECOND, 5));
        assert_eq!(taken(bucket, attempts), [0, 0, 100 * SECOND, 100 * SECOND]);
    }
}
