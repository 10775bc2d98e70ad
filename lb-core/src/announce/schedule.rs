//! When a node that announces an address repeats its announcement.
//!
//! Linux ignores an update of a neighbour entry within 1 s of the last one (`locktime`), so repetitions are further
//! apart. Switches expire MAC addresses sooner than most routers expire neighbours, so the node announces every minute.

/// Times of the first announcements, in nanoseconds after the node took the address over.
const BURST: [u64; 5] = [0, 1_100_000_000, 2_200_000_000, 3_300_000_000, 5_000_000_000];
/// Nanoseconds between two announcements after those of [`BURST`].
const REPEAT: u64 = 60_000_000_000;

/// Number of announcements that are due `elapsed` nanoseconds after the node took the address over.
pub fn due(elapsed: u64) -> u64 {
    let burst = BURST.iter().filter(|at| **at <= elapsed).count() as u64;
    let last = BURST[BURST.len() - 1];
    burst + elapsed.saturating_sub(last) / REPEAT
}
