//! The limit on ICMP errors of the node. Without it, a sender of forged packets could make the node send as many
//! datagrams to the forged source as the sender sends to the node.
//!
//! The limit has the default values of the kernel's own limit for the whole node (`net.ipv4.icmp_msgs_per_sec` and
//! `icmp_msgs_burst`, net/ipv4/icmp.c, Linux 6.18). As in the kernel, RSTs have no limit: a RST is no larger than the
//! packet that it answers.

use super::token_bucket::TokenBucket;
use crate::reject::is_too_big;

/// 1,000 errors per second, and 50 at once.
pub const BUCKET: TokenBucket = TokenBucket { interval: 1_000_000, burst: 50 };

/// Whether the limit applies to an ICMP error that begins with `start`. It does not apply to errors that path MTU
/// discovery needs, as in the kernel: "fragmentation needed" (RFC 1191) and "packet too big" (RFC 4443 §3.2).
#[inline(always)]
pub const fn applies(start: &[u8; 8], is_v4: bool) -> bool {
    !is_too_big(start, is_v4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reject::{port_unreachable, time_exceeded, too_big};

    /// Number of tokens that a bucket gives away within `milliseconds` at `per_millisecond` requests.
    fn taken(milliseconds: u64, per_millisecond: u64) -> u64 {
        let start = 1_000_000_000_000;
        let (mut full_at, mut taken) = (0, 0);
        for millisecond in 0..milliseconds {
            for _ in 0..per_millisecond {
                if let Some(later) = BUCKET.take(full_at, start + millisecond * 1_000_000) {
                    (full_at, taken) = (later, taken + 1);
                }
            }
        }
        taken
    }

    #[test]
    fn a_full_bucket_allows_50_errors_at_once() {
        assert_eq!(taken(1, 1_000), 50);
    }

    #[test]
    fn a_flood_gets_1000_errors_per_second_after_the_burst() {
        assert_eq!(taken(10_001, 100), 50 + 10_000);
    }

    #[test]
    fn fewer_than_1000_per_second_are_all_allowed() {
        assert_eq!(taken(60_000, 1), 60_000);
    }

    #[test]
    fn path_mtu_discovery_is_not_limited() {
        for is_v4 in [true, false] {
            assert!(applies(&port_unreachable(is_v4), is_v4) && applies(&time_exceeded(is_v4), is_v4));
            assert!(!applies(&too_big(is_v4, 1400), is_v4));
        }
    }
}
