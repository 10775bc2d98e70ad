//! What there is too little of: maps that are full, ports that have run out.
//!
//! Each is said when it begins and once a minute as long as it lasts, with what to do about it, and shown by `status`.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::Arc,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use lb_common::Outcome;
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, task, time};
use tracing::{debug, warn};

use super::state::State;
use crate::metrics::Metrics;
use lb_datapath::{AffinityReport, AffinityTable, Stats};

/// How far apart lines about one shortage are, and for how long something that was refused counts as one.
const MINUTE: Duration = Duration::from_secs(60);
/// How often the counters of packets are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// From one sweep through the clients with affinity to the next.
const AFFINITY: Duration = Duration::from_secs(5);

/// A shortage, as `status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShortageReport {
    /// The map, or what else there is too little of.
    pub of: String,
    /// When it began.
    pub since: Timestamp,
    /// How much was refused or forgotten for it since then; none where that is nothing to count.
    pub refused: u64,
    /// What it means, and what to do.
    pub text: String,
}

/// All shortages there are.
#[derive(Debug, Default)]
pub(super) struct Shortages {
    of: BTreeMap<&'static str, Shortage>,
    /// When each was last said; outlives the shortage, so that one that comes and goes is not said each time.
    said: BTreeMap<&'static str, Instant>,
}

#[derive(Debug)]
struct Shortage {
    since: Timestamp,
    /// It is over then, unless it is noted again; none as long as it certainly lasts.
    until: Option<Instant>,
    refused: u64,
    /// Of these, how much was not said yet.
    unsaid: u64,
    text: String,
}

impl Shortages {
    /// So much was refused, or forgotten too early: a shortage for the next minute.
    pub(super) fn refused(&mut self, of: &'static str, count: u64, text: &str, now: Instant) {
        let shortage = self.note(of, text);
        shortage.refused += count;
        shortage.unsaid += count;
        if shortage.until.is_some() {
            shortage.until = Some(now + MINUTE);
        }
    }

    /// There is a shortage until something else is said, or (with none) there is not; what was refused for it lately stays.
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
            unsaid: 0,
            text: String::new(),
        };
        let shortage = self.of.entry(of).or_insert_with(new);
        text.clone_into(&mut shortage.text);
        shortage
    }

    /// The lines to log now. Forgets what is over.
    fn lines(&mut self, now: Instant) -> Vec<String> {
        self.of.retain(|_, shortage| shortage.until.is_none_or(|until| until > now) || shortage.unsaid > 0);
        let mut lines = Vec::new();
        for (of, shortage) in &mut self.of {
            let rests = self.said.get(of).is_some_and(|said| now < *said + MINUTE);
            if rests {
                continue;
            }
            let refused = std::mem::take(&mut shortage.unsaid);
            let count =
                if refused > 0 { format!(" ({refused} since this was last said)") } else { String::new() };
            lines.push(format!("{}{count}", shortage.text));
            self.said.insert(of, now);
        }
        lines
    }

    /// Those that there are now.
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

/// Of the flows of this node: what tells the sweeps that there is something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) struct Tally {
    /// Flows that have begun since the maps were made.
    pub(super) begun: u64,
    /// Packets that were dropped because there was no room for another flow.
    pub(super) refused: u64,
}

impl Tally {
    fn of(packets: &[u64; Outcome::COUNT]) -> Self {
        let beginnings =
            [Outcome::NewFlow, Outcome::NewRoutedFlow, Outcome::NewTunnelledFlow, Outcome::NewDirectFlow];
        Self {
            begun: beginnings.iter().map(|outcome| packets[*outcome as usize]).sum(),
            refused: packets[Outcome::ConntrackFull as usize],
        }
    }
}

/// Drops that are a shortage, and what to say about them.
const DROPS: [(Outcome, &str, &str); 2] = [
    (
        Outcome::ConntrackFull,
        "CONNTRACK",
        "CONNTRACK is full: new connections are dropped, established ones stay; start anew with a larger --max-connections \
         (after `lb-agent cleanup`), or find out who opens so many (`lb-agent conntrack list`)",
    ),
    (
        Outcome::NoSourcePort,
        "ports",
        "no source port is free towards some backend: new connections to it are dropped; give masqueraded connections more \
         (--masquerade-ports), or the Service more endpoints",
    ),
];

const EVICTED: &str = "AFFINITY is full: clients of Services with session affinity are balanced anew before their time; \
                       start anew with a larger --max-affinity-clients (after `lb-agent cleanup`)";

/// Watches over the counters of packets and over AFFINITY, and says what there is too little of. Runs for ever.
pub(super) async fn run(
    stats: Stats,
    mut affinity: AffinityTable,
    state: Arc<State>,
    metrics: Arc<Metrics>,
    tally: watch::Sender<Tally>,
) -> anyhow::Result<Infallible> {
    let mut before = None;
    let mut look = time::interval(LOOK);
    look.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
    let mut next_sweep = Instant::now();
    loop {
        look.tick().await;
        match stats.read() {
            Ok(packets) => {
                tally.send_replace(Tally::of(&packets));
                note_drops(&state, &packets, before.as_ref());
                before = Some(packets);
            }
            Err(error) => debug!("{error}"),
        }
        if next_sweep <= Instant::now() {
            affinity = sweep_affinity(affinity, &state, &metrics).await?;
            next_sweep = Instant::now() + AFFINITY;
        }
        for line in state.with_shortages(|shortages| shortages.lines(Instant::now())) {
            warn!("{line}");
        }
    }
}

/// What was dropped before this agent began to look is no news.
fn note_drops(state: &State, packets: &[u64; Outcome::COUNT], before: Option<&[u64; Outcome::COUNT]>) {
    for (outcome, of, text) in DROPS {
        let dropped = packets[outcome as usize];
        let new = dropped.saturating_sub(before.map_or(dropped, |before| before[outcome as usize]));
        if new > 0 {
            state.with_shortages(|shortages| shortages.refused(of, new, text, Instant::now()));
        }
    }
}

async fn sweep_affinity(
    mut affinity: AffinityTable,
    state: &State,
    metrics: &Metrics,
) -> anyhow::Result<AffinityTable> {
    let (affinity, swept) = task::spawn_blocking(move || {
        let swept = affinity.collect_garbage();
        (affinity, swept)
    })
    .await?;
    match swept {
        Ok(AffinityReport { clients, removed, evicted }) => {
            metrics.set_map("AFFINITY", clients, affinity.capacity());
            metrics.count_evicted_clients(evicted);
            if evicted > 0 {
                let count = evicted as u64;
                state.with_shortages(|shortages| {
                    shortages.refused("AFFINITY", count, EVICTED, Instant::now());
                });
            }
            debug!(clients, removed, evicted, "swept the clients with affinity");
        }
        Err(error) => debug!("clients with affinity cannot be forgotten: {error}"),
    }
    Ok(affinity)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(begin: Instant, seconds: u64) -> Instant {
        begin + Duration::from_secs(seconds)
    }

    #[test]
    fn a_shortage_is_said_when_it_begins_and_once_a_minute_while_it_lasts() {
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
    fn what_was_refused_is_counted_between_two_lines_and_shown_for_a_minute() {
        let (mut shortages, begin) = (Shortages::default(), Instant::now());
        shortages.refused("CONNTRACK", 3, "full", begin);
        assert_eq!(shortages.lines(begin), ["full (3 since this was last said)"]);
        for second in 1..=50 {
            shortages.refused("CONNTRACK", 2, "full", after(begin, second));
            assert_eq!(shortages.lines(after(begin, second)), [""; 0], "{second}");
        }
        assert_eq!(shortages.lines(after(begin, 60)), ["full (100 since this was last said)"]);
        assert_eq!(shortages.report(after(begin, 60))[0].refused, 103);
        assert_eq!(shortages.lines(after(begin, 111)), [""; 0]);
        assert_eq!(shortages.report(after(begin, 111)), [], "over");
    }

    #[test]
    fn one_that_comes_and_goes_is_not_said_each_time() {
        let (mut shortages, begin) = (Shortages::default(), Instant::now());
        for second in 0..30 {
            shortages.lasts("CONNTRACK", Some("nearly full"), after(begin, second));
            assert_eq!(shortages.lines(after(begin, second)).len(), usize::from(second == 0));
            shortages.lasts("CONNTRACK", None, after(begin, second));
            shortages.lines(after(begin, second));
        }
    }
}
