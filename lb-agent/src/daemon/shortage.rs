//! Shortages: full or nearly full maps, exhausted ports, and lost pins.
//!
//! When a shortage begins, the agent logs it with advice, and again at most once a minute while the shortage lasts.
//! `status` shows the shortages.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Minimum interval between two log lines about one shortage, and minimum time that a shortage lasts after a call of
/// [`Shortages::refused`].
const MINUTE: Duration = Duration::from_secs(60);

/// A shortage, as `status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShortageReport {
    /// What is short: the name of a map, or `ports`, `bpffs` or `pins`.
    pub of: String,
    /// When the shortage began.
    pub since: Timestamp,
    /// Number of dropped packets, evicted entries or restored pins since `since`.
    pub refused: u64,
    /// What the shortage means, and advice.
    pub text: String,
}

/// The current shortages, and when each was last logged.
#[derive(Debug, Default)]
pub(super) struct Shortages {
    of: BTreeMap<&'static str, Shortage>,
    /// When each shortage was last logged. An entry stays after its shortage ends, so that a shortage that comes and
    /// goes is not logged each time.
    logged: BTreeMap<&'static str, Instant>,
}

#[derive(Debug)]
struct Shortage {
    since: Timestamp,
    /// When the shortage ends unless it is recorded again; `None` while it has no end, see [`Shortages::lasts`].
    until: Option<Instant>,
    refused: u64,
    /// The part of `refused` that the agent has not logged yet.
    unlogged: u64,
    text: String,
}

impl Shortages {
    /// Records `count` dropped packets, evicted entries or restored pins in the shortage `of`, which lasts at least
    /// another minute.
    pub(super) fn refused(&mut self, of: &'static str, count: u64, text: &str, now: Instant) {
        let shortage = self.note(of, text);
        shortage.refused += count;
        shortage.unlogged += count;
        if shortage.until.is_some() {
            shortage.until = Some(now + MINUTE);
        }
    }

    /// Sets whether the shortage `of` lasts. With a `text`, the shortage has no end until a call without a `text`. That
    /// call ends it: at once, or in a minute if the shortage has refused packets or entries.
    pub(super) fn lasts(&mut self, of: &'static str, text: Option<&str>, now: Instant) {
        match text {
            Some(text) => self.note(of, text).until = None,
            None => {
                if let Some(shortage) = self.of.get_mut(of)
                    && shortage.until.is_none()
                {
                    shortage.until = Some(if shortage.refused > 0 { now + MINUTE } else { now });
                }
            }
        }
    }

    fn note(&mut self, of: &'static str, text: &str) -> &mut Shortage {
        let new = || Shortage {
            since: Timestamp::now(),
            until: Some(Instant::now()),
            refused: 0,
            unlogged: 0,
            text: String::new(),
        };
        let shortage = self.of.entry(of).or_insert_with(new);
        text.clone_into(&mut shortage.text);
        shortage
    }

    /// The lines to log now. Drops shortages that have ended and have nothing left to log.
    pub(super) fn lines(&mut self, now: Instant) -> Vec<String> {
        self.of.retain(|_, shortage| shortage.until.is_none_or(|until| until > now) || shortage.unlogged > 0);
        let mut lines = Vec::new();
        for (of, shortage) in &mut self.of {
            let rests = self.logged.get(of).is_some_and(|logged| now < *logged + MINUTE);
            if rests {
                continue;
            }
            let refused = std::mem::take(&mut shortage.unlogged);
            let count =
                if refused > 0 { format!(" ({refused} since this was last logged)") } else { String::new() };
            lines.push(format!("{}{count}", shortage.text));
            self.logged.insert(of, now);
        }
        lines
    }

    /// The current shortages.
    pub(super) fn report(&self, now: Instant) -> Vec<ShortageReport> {
        let report = |(of, shortage): (&&str, &Shortage)| ShortageReport {
            of: (*of).to_owned(),
            since: shortage.since,
            refused: shortage.refused,
            text: shortage.text.clone(),
        };
        let lasts = |shortage: &Shortage| shortage.until.is_none_or(|until| until > now);
        self.of.iter().filter(|(_, shortage)| lasts(shortage)).map(report).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(begin: Instant, seconds: u64) -> Instant {
        begin + Duration::from_secs(seconds)
    }

    #[test]
    fn shortage_is_logged_when_it_begins_and_once_a_minute_while_it_lasts() {
        let (mut shortages, begin) = (Shortages::default(), Instant::now());
        shortages.lasts("BACKENDS", Some("no room"), begin);
        assert_eq!(shortages.lines(begin), ["no room"]);
        assert_eq!(shortages.lines(after(begin, 59)), [""; 0]);
        shortages.lasts("BACKENDS", Some("still no room"), after(begin, 59));
        assert_eq!(shortages.lines(after(begin, 60)), ["still no room"]);
        shortages.lasts("BACKENDS", None, after(begin, 61));
        assert_eq!(shortages.report(after(begin, 61)), []);
        assert_eq!(shortages.lines(after(begin, 200)), [""; 0]);
    }

    #[test]
    fn refusals_are_counted_between_two_lines_and_shown_for_a_minute() {
        let (mut shortages, begin) = (Shortages::default(), Instant::now());
        shortages.refused("CONNTRACK", 3, "full", begin);
        assert_eq!(shortages.lines(begin), ["full (3 since this was last logged)"]);
        for second in 1..=50 {
            shortages.refused("CONNTRACK", 2, "full", after(begin, second));
            assert_eq!(shortages.lines(after(begin, second)), [""; 0], "{second}");
        }
        assert_eq!(shortages.lines(after(begin, 60)), ["full (100 since this was last logged)"]);
        assert_eq!(shortages.report(after(begin, 60))[0].refused, 103);
        assert_eq!(shortages.lines(after(begin, 111)), [""; 0]);
        assert_eq!(shortages.report(after(begin, 111)), [], "over");
    }

    #[test]
    fn flapping_shortage_is_not_logged_each_time() {
        let (mut shortages, begin) = (Shortages::default(), Instant::now());
        for second in 0..30 {
            shortages.lasts("CONNTRACK", Some("nearly full"), after(begin, second));
            assert_eq!(shortages.lines(after(begin, second)).len(), usize::from(second == 0));
            shortages.lasts("CONNTRACK", None, after(begin, second));
            shortages.lines(after(begin, second));
        }
    }
}
