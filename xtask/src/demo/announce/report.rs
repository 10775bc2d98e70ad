//! The report of the demo: how the clients' downloads fared in each scene, as JSON and as text.

use std::time::{Duration, Instant};

use comfy_table::{Table, presets};
use lb_tests::transfers::{Download, Sample};
use serde::Serialize;

/// The time that a line of the timeline covers.
const STEP: Duration = Duration::from_millis(250);
/// Width of the bars in a line of the timeline, in characters: half of it for the bar of each client.
const BAR: usize = 40;

/// All results, as `--json` prints them.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    /// The number of the node that dies.
    pub(super) dead: u8,
    pub(super) scenes: Vec<Outcome>,
}

/// The results of one scene of the demo.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Outcome {
    pub(super) tallies: Vec<Tally>,
    pub(super) events: Vec<Event>,
    pub(super) timeline: Vec<Line>,
}

/// The effect of a node's death on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Fate {
    /// Neither its pod nor the node that its packets reach first has died.
    Untouched,
    /// Another node can serve it: only the node that its packets reached first has died.
    NodeDied,
    /// No node can serve it: its pod is on the dead node.
    PodDied,
}

/// Connections of one client with one fate.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Tally {
    client: &'static str,
    fate: Fate,
    connections: usize,
    /// How many downloads received every byte.
    complete: usize,
    /// The longest pause in a complete download, in ms.
    longest_pause_ms: u64,
    /// The errors of the first three downloads that were not complete.
    errors: Vec<String>,
}

/// Something that happened during a scene.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Event {
    /// Time since the downloads began.
    pub(super) at_ms: u64,
    pub(super) what: String,
}

/// The progress of the clients' downloads in one [`STEP`].
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Line {
    at_ms: u64,
    /// Bytes that each client received: near, far.
    bytes: [u64; 2],
    /// Number of downloads of each client that have failed so far.
    failed: [usize; 2],
}

impl Tally {
    /// Counts a download.
    pub(super) fn add(all: &mut Vec<Self>, client: &'static str, fate: Fate, download: &Download) {
        let index = all.iter().position(|it| it.client == client && it.fate == fate).unwrap_or_else(|| {
            all.push(Self {
                client,
                fate,
                connections: 0,
                complete: 0,
                longest_pause_ms: 0,
                errors: Vec::new(),
            });
            all.len() - 1
        });
        let tally = &mut all[index];
        tally.connections += 1;
        if download.is_complete() {
            tally.complete += 1;
            tally.longest_pause_ms = tally.longest_pause_ms.max(millis(download.longest_pause));
        } else if tally.errors.len() < 3 {
            let why =
                download.end.clone().and_then(Result::err).unwrap_or_else(|| "no more bytes".to_owned());
            tally.errors.push(why);
        }
    }

    /// Number of connections that ended although a node could serve them.
    fn broken(&self) -> usize {
        if self.fate == Fate::PodDied { 0 } else { self.connections - self.complete }
    }
}

/// The received bytes in steps of [`STEP`]; the samples are those of the near and of the far client.
pub(super) fn timeline(start: Instant, samples: &[Vec<Sample>; 2]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for (client, samples) in samples.iter().enumerate() {
        for sample in samples {
            let at = sample.at.saturating_duration_since(start);
            let index = usize::try_from(at.as_millis() / STEP.as_millis()).unwrap_or_default();
            while lines.len() <= index {
                let at_ms = millis(STEP) * lines.len() as u64;
                lines.push(Line { at_ms, ..Line::default() });
            }
            lines[index].bytes[client] += sample.bytes;
            lines[index].failed[client] = sample.failed;
        }
    }
    // A step without a sample of a client has the failures of the step before.
    let mut failed = [0; 2];
    for line in &mut lines {
        failed = [0, 1].map(|client| failed[client].max(line.failed[client]));
        line.failed = failed;
    }
    lines
}

impl Report {
    /// Number of connections that ended although a node could serve them.
    pub(super) fn broken(&self) -> usize {
        self.scenes.iter().flat_map(|scene| &scene.tallies).map(Tally::broken).sum()
    }

    /// The tables and timelines of all scenes, as text.
    pub(super) fn text(&self) -> String {
        self.scenes.iter().map(|scene| scene.text(self.dead)).collect::<Vec<_>>().join("\n\n")
    }
}

impl Outcome {
    fn text(&self, dead: u8) -> String {
        let title = format!("node{dead} dies under downloads");
        let mut table = Table::new();
        table.load_preset(presets::UTF8_HORIZONTAL_ONLY).force_no_tty();
        table.set_header(["client", "connections", "", "all bytes", "longest pause", "broken"]);
        for tally in &self.tallies {
            table.add_row([
                tally.client.to_owned(),
                of(tally.fate, dead),
                tally.connections.to_string(),
                tally.complete.to_string(),
                format!("{} ms", tally.longest_pause_ms),
                broken(tally),
            ]);
        }
        format!("{title}\n{table}\n{}", self.lines())
    }

    /// The timeline: bytes of both clients as bars, and the events between them.
    fn lines(&self) -> String {
        let most =
            self.timeline.iter().map(|line| line.bytes[0].max(line.bytes[1])).max().unwrap_or(0).max(1);
        let bar = |bytes: u64| {
            let length = usize::try_from(bytes * (BAR as u64 / 2) / most).unwrap_or_default();
            "█".repeat(length.max(usize::from(bytes > 0)))
        };
        let mut text = format!("{:>7}  {:<w$}  {:<w$}\n", "ms", "near", "far", w = BAR / 2);
        let mut events = self.events.iter().peekable();
        for line in &self.timeline {
            while let Some(event) = events.next_if(|event| event.at_ms < line.at_ms) {
                text += &format!("{:>7}  ▶ {}\n", event.at_ms, event.what);
            }
            let [near, far] = line.bytes.map(bar);
            text += &format!("{:>7}  {near:<w$}  {far:<w$}\n", line.at_ms, w = BAR / 2);
        }
        for event in events {
            text += &format!("{:>7}  ▶ {}\n", event.at_ms, event.what);
        }
        text
    }
}

fn of(fate: Fate, dead: u8) -> String {
    match fate {
        Fate::Untouched => "through other nodes".to_owned(),
        Fate::NodeDied => format!("through node{dead}, to pods elsewhere"),
        Fate::PodDied => format!("to pods of node{dead}"),
    }
}

fn broken(tally: &Tally) -> String {
    if tally.fate == Fate::PodDied {
        return format!("{} (no node can serve them)", tally.connections - tally.complete);
    }
    let errors = tally.errors.join(", ");
    if errors.is_empty() { "0".to_owned() } else { format!("{}: {errors}", tally.broken()) }
}

/// The whole milliseconds of a duration.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    fn download(end: Result<(), String>) -> Download {
        let address = SocketAddr::from(([192, 0, 2, 1], 80));
        Download {
            local: address,
            to: address,
            server: "pod1".to_owned(),
            received: 1,
            longest_pause: Duration::from_millis(20),
            end: Some(end),
        }
    }

    #[test]
    fn only_connections_that_a_node_could_serve_count_as_broken() {
        let mut tallies = Vec::new();
        let reset = || download(Err("reset".to_owned()));
        Tally::add(&mut tallies, "near", Fate::PodDied, &reset());
        Tally::add(&mut tallies, "near", Fate::NodeDied, &download(Ok(())));
        let scene = |tallies| Outcome { tallies, events: Vec::new(), timeline: Vec::new() };
        assert_eq!(Report { dead: 2, scenes: vec![scene(tallies)] }.broken(), 0);
        let mut tallies = Vec::new();
        Tally::add(&mut tallies, "near", Fate::NodeDied, &reset());
        let report = Report { dead: 2, scenes: vec![scene(tallies)] };
        assert_eq!(report.broken(), 1);
        assert!(report.text().contains("1: reset"), "{}", report.text());
    }

    #[test]
    fn steps_without_a_sample_have_the_failures_so_far() {
        let start = Instant::now();
        let sample =
            |ms, failed| Sample { at: start + Duration::from_millis(ms), bytes: 5, moving: 1, failed };
        let samples = [vec![sample(10, 0), sample(300, 2)], vec![sample(10, 1), sample(900, 3)]];
        let failed: Vec<[usize; 2]> = timeline(start, &samples).iter().map(|line| line.failed).collect();
        assert_eq!(failed, [[0, 1], [2, 1], [2, 1], [2, 3]]);
    }

    #[test]
    fn timeline_shows_events_where_they_happened() {
        let start = Instant::now();
        let sample =
            |ms, bytes| Sample { at: start + Duration::from_millis(ms), bytes, moving: 1, failed: 0 };
        let samples = [vec![sample(10, 5), sample(20, 5)], vec![sample(600, 40)]];
        let scene = Outcome {
            tallies: Vec::new(),
            events: vec![Event { at_ms: 300, what: "node2 dies".to_owned() }],
            timeline: timeline(start, &samples),
        };
        let bytes: Vec<[u64; 2]> = scene.timeline.iter().map(|line| line.bytes).collect();
        assert_eq!(bytes, [[10, 0], [0, 0], [0, 40]]);
        let text = scene.lines();
        let position = |what: &str| text.find(what).unwrap();
        assert!(
            position("▶ node2 dies") < position("    500") && position("    250") < position("▶"),
            "{text}"
        );
    }
}
