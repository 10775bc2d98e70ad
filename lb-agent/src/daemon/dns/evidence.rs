//! Detects that queries which the programs redirect to the server do not reach it: a firewall of the node may drop
//! them, but let the agent's own queries pass.

use std::time::{Duration, Instant};

/// Time in which at least one redirected query must reach the server; else the queries count as lost.
const WINDOW: Duration = Duration::from_secs(1);
/// Redirected queries count as lost only after the programs have redirected this many, and the server has received none
/// of them.
const ENOUGH: u64 = 4;
/// How long the programs redirect no queries to the server after redirected queries were lost.
const PAUSE: Duration = Duration::from_secs(60);

/// Compares how many queries the programs have redirected to the server with how many it has received.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    window: Option<Window>,
    blocked_until: Option<Instant>,
}

/// The period in which the server has received no query although the programs redirected some: when the period began,
/// and the numbers of redirected and received queries at that time.
#[derive(Clone, Copy, Debug)]
struct Window {
    begin: Instant,
    led: u64,
    received: u64,
}

impl Evidence {
    /// Whether redirected queries are lost. `led` is the number of queries that the programs have redirected so far
    /// (`None` if unknown), and `received` the number that the server has received. Once the programs have redirected
    /// [`ENOUGH`] queries over [`WINDOW`] or longer, and the server has received none of them, returns true for
    /// [`PAUSE`].
    pub(super) fn blocked(&mut self, led: Option<u64>, received: u64, now: Instant) -> bool {
        if self.blocked_until.is_some_and(|until| now < until) {
            self.window = None;
            return true;
        }
        let Some(led) = led else { return false };
        let window = *self.window.get_or_insert(Window { begin: now, led, received });
        if received != window.received || led == window.led {
            self.window = Some(Window { begin: now, led, received });
            return false;
        }
        let is_lost = now.duration_since(window.begin) >= WINDOW && led.saturating_sub(window.led) >= ENOUGH;
        self.blocked_until = is_lost.then(|| now + PAUSE);
        is_lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `blocked` every 100 ms, `calls` times, and returns the results; `counts` gives the two counts for each
    /// call.
    fn run(counts: impl Fn(u64) -> (Option<u64>, u64), calls: u64) -> Vec<bool> {
        let (start, mut evidence) = (Instant::now(), Evidence::default());
        let at = |call| start + Duration::from_millis(100 * call);
        (0..calls).map(|call| evidence.blocked(counts(call).0, counts(call).1, at(call))).collect()
    }

    #[test]
    fn server_that_no_query_reaches_gets_none_for_a_minute() {
        let results = run(|call| (Some(call), 0), 700);
        assert_eq!(results.iter().position(|blocked| *blocked), Some(10), "after a second");
        assert!(results[10..610].iter().all(|blocked| *blocked));
        assert!(!results[610], "then the programs try again");
        assert!(results[640], "and the queries are lost again");
    }

    #[test]
    fn few_clients_are_enough_to_notice() {
        let results = run(|call| (Some(call / 10), 0), 100);
        assert_eq!(results.iter().position(|blocked| *blocked), Some(40), "one query per second");
    }

    #[test]
    fn server_that_receives_queries_is_never_blocked() {
        for late in [0, 1, 3] {
            let results = run(|call| (Some(2 * call), (2 * call).saturating_sub(late)), 200);
            assert!(!results.contains(&true), "{late} on their way");
        }
        assert!(!run(|call| (Some(call), call / 9), 200).contains(&true), "some are lost");
    }

    #[test]
    fn silence_proves_nothing() {
        assert!(!run(|_| (Some(7), 3), 100).contains(&true), "no queries");
        assert!(!run(|call| (Some(call.min(3)), 0), 100).contains(&true), "few queries");
        assert!(!run(|_| (None, 0), 100).contains(&true), "unknown");
    }
}
