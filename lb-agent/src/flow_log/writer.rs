//! The thread that formats and writes lines of the flow log. A slow disk delays only this thread: lines wait in a
//! queue, and beyond its capacity they are dropped and counted.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    time::{Duration, Instant, SystemTime},
};

use jiff::{Timestamp, Unit};
use lb_core::protocol::Protocol;
use lb_datapath::monotonic_nanoseconds;
use prometheus_client::metrics::counter::Counter;
use tracing::{info, warn};

use super::{
    record::{LogLine, Record, StatsRecord, VERSION},
    sink::Sink,
    tracker::Line,
};

/// Maximum number of lines in the queue: two GC passes with a line for each of 131,072 connections.
pub(super) const CAPACITY: usize = 262_144;
/// Size in bytes at which the thread writes the lines that it has formatted, even if more lines wait.
const BATCH: usize = 64 << 10;
/// Interval at which the thread checks whether another program has renamed the file.
const IDLE: Duration = Duration::from_secs(1);
/// Minimum interval between two lines of statistics that report dropped lines or lost events. The line of statistics at
/// the end of the log is written even if less time has passed.
const STATS_INTERVAL: Duration = Duration::from_secs(60);

/// The counters of the flow log, which are metrics as well. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct FlowLogCounters {
    /// Number of lines that were written, without lines of statistics.
    pub(crate) lines: Counter,
    /// Number of lines that were dropped, because the queue was full or a write failed.
    pub(crate) dropped_lines: Counter,
    /// Number of events of the BPF programs that were lost, because the agent read them too slowly.
    pub(crate) lost_events: Counter,
}

/// The node whose agent writes the lines.
#[derive(Clone, Debug)]
pub(crate) struct LogNode {
    pub(crate) name: String,
    /// Whether all flows may bypass the stack (`--forwarding direct`).
    pub(crate) direct: bool,
}

/// The sending end of the queue of lines.
pub(super) struct Queue {
    lines: Sender<Line>,
    waiting: Arc<AtomicUsize>,
    capacity: usize,
    counters: FlowLogCounters,
}

impl Queue {
    /// Queues a line for the writer, or drops it if the queue is full.
    pub(super) fn push(&self, line: Line) {
        if self.waiting.load(Ordering::Relaxed) >= self.capacity {
            self.counters.dropped_lines.inc();
            return;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if self.lines.send(line).is_err() {
            self.counters.dropped_lines.inc();
        }
    }
}

/// The state of the writing thread.
pub(super) struct Writer {
    node: LogNode,
    sink: Sink,
    lines: Receiver<Line>,
    waiting: Arc<AtomicUsize>,
    counters: FlowLogCounters,
    /// Whether to reopen the file: the handler of SIGHUP sets this.
    reopen: Arc<AtomicBool>,
    /// Whether the last write has failed.
    failing: bool,
    reported: Option<Instant>,
    reported_loss: (u64, u64),
}

impl Writer {
    pub(super) fn new(
        node: LogNode,
        sink: Sink,
        capacity: usize,
        counters: FlowLogCounters,
        reopen: Arc<AtomicBool>,
    ) -> (Queue, Self) {
        let (sender, lines) = channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let queue =
            Queue { lines: sender, waiting: Arc::clone(&waiting), capacity, counters: counters.clone() };
        let (failing, reported, reported_loss) = (false, None, (0, 0));
        (queue, Self { node, sink, lines, waiting, counters, reopen, failing, reported, reported_loss })
    }

    /// Writes lines until the queue is closed; then writes a line of statistics, and returns.
    pub(super) fn run(mut self) {
        let mut followed = Instant::now();
        loop {
            let first = match self.lines.recv_timeout(IDLE) {
                Ok(line) => Some(line),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => break,
            };
            if self.reopen.swap(false, Ordering::Relaxed) {
                self.sink.reopen();
            } else if followed.elapsed() >= IDLE {
                self.sink.follow();
                followed = Instant::now();
            }
            if let Some(line) = first {
                self.write_batch(&line);
            }
            self.report_loss();
        }
        self.write_stats();
    }

    /// Writes this line and others that wait in the queue.
    fn write_batch(&mut self, first: &Line) {
        let clock = Clock::read();
        let mut text = Vec::with_capacity(BATCH + 1024);
        let mut lines = 0;
        let mut append = |line: &Line, text: &mut Vec<u8>| {
            let begin = text.len();
            match serde_json::to_writer(&mut *text, &record(line, &self.node, &clock)) {
                Ok(()) => {
                    text.push(b'\n');
                    lines += 1;
                }
                // Cannot happen unless a type of the record has a bug: writing to memory never fails.
                Err(_invalid) => {
                    text.truncate(begin);
                    self.counters.dropped_lines.inc();
                }
            }
        };
        append(first, &mut text);
        let mut taken = 1;
        while text.len() < BATCH
            && let Ok(line) = self.lines.try_recv()
        {
            append(&line, &mut text);
            taken += 1;
        }
        self.waiting.fetch_sub(taken, Ordering::Relaxed);
        match self.sink.write(&text) {
            Ok(()) => {
                self.counters.lines.inc_by(lines);
                if std::mem::take(&mut self.failing) {
                    info!("the flow log is written again");
                }
            }
            Err(error) => {
                self.counters.dropped_lines.inc_by(taken as u64);
                if !std::mem::replace(&mut self.failing, true) {
                    warn!(
                        "cannot write the flow log: {error}; lines are dropped and counted, and the agent tries again"
                    );
                }
            }
        }
    }

    fn loss(&self) -> (u64, u64) {
        (self.counters.dropped_lines.get(), self.counters.lost_events.get())
    }

    /// Writes a line of statistics if lines or events were lost since the last such line, unless the last write has
    /// failed. Two such lines are at least [`STATS_INTERVAL`] apart.
    fn report_loss(&mut self) {
        let is_due = self.reported.is_none_or(|at| at.elapsed() >= STATS_INTERVAL);
        if is_due && !self.failing && self.loss() != self.reported_loss {
            self.write_stats();
        }
    }

    fn write_stats(&mut self) {
        let (dropped_lines, lost_events) = self.loss();
        let record = StatsRecord {
            version: VERSION,
            time: Timestamp::now(),
            node: self.node.name.as_str().into(),
            lines: self.counters.lines.get(),
            dropped_lines,
            lost_events,
        };
        if let Ok(mut text) = serde_json::to_vec(&LogLine::Stats(record)) {
            text.push(b'\n');
            if self.sink.write(&text).is_ok() {
                (self.reported, self.reported_loss) = (Some(Instant::now()), (dropped_lines, lost_events));
            }
        }
    }
}

/// The wall clock and the monotonic clock at one moment, to convert times from one to the other.
struct Clock {
    wall: SystemTime,
    monotonic: u64,
}

impl Clock {
    fn read() -> Self {
        Self { wall: SystemTime::now(), monotonic: monotonic_nanoseconds() }
    }

    /// The wall-clock time at `monotonic` nanoseconds of the monotonic clock, rounded to milliseconds.
    fn at(&self, monotonic: u64) -> Option<Timestamp> {
        let age = Duration::from_nanos(self.monotonic.saturating_sub(monotonic));
        let time = Timestamp::try_from(self.wall.checked_sub(age)?).ok()?;
        time.round(Unit::Millisecond).ok()
    }
}

fn record<'a>(line: &'a Line, node: &'a LogNode, clock: &Clock) -> LogLine<'a> {
    let Line { from, to, who, .. } = line;
    let [namespace, service, port] = match &who.service {
        Some(names) => names.each_ref().map(|name| Some((&**name).into())),
        None => [None, None, None],
    };
    let record = Box::new(Record {
        version: VERSION,
        time: clock.at(clock.monotonic).unwrap_or_else(Timestamp::now),
        node: node.name.as_str().into(),
        flow: format!("{:016x}", line.flow()).into(),
        protocol: Protocol::from_number(from.protocol).map_or("unknown", Protocol::as_str).into(),
        client: from.source.into(),
        client_port: from.source_port,
        vip: from.destination.into(),
        vip_port: from.destination_port,
        namespace,
        service,
        port,
        backend: to.destination.into(),
        backend_port: to.destination_port,
        pod: who.pod.as_deref().map(Into::into),
        backend_node: who.node.as_deref().map(Into::into),
        masqueraded_as: from.masqueraded_as(to, line.flags),
        tunnel: line.is_tunnelled(),
        verdict: Some(line.verdict(node.direct).as_str().into()),
        reason: line.reason().map(Into::into),
        start: line.start.and_then(|start| clock.at(start)),
        duration: line.start.map(|start| seconds(line.until.saturating_sub(start))),
        end: line.end,
        total: line.total,
        since_last: line.since_last,
    });
    if line.end.is_some() { LogLine::End(record) } else { LogLine::Open(record) }
}

/// Nanoseconds as seconds, rounded down to milliseconds.
fn seconds(nanoseconds: u64) -> f64 {
    (nanoseconds / 1_000_000) as f64 / 1000.0
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    use lb_common::{Address, Choice, conntrack::Tuple, protocol};

    use super::{
        super::{
            record::{EndReason, Volume},
            sink::{FlowLogTarget, Rotation},
            tracker::Who,
        },
        *,
    };

    fn line(start: u64) -> Line {
        let (client, vip) = (Address::from_v4([192, 0, 2, 1]), Address::from_v4([10, 96, 0, 1]));
        let from = Tuple::new(client, vip, 40_000, 80, protocol::TCP);
        let to = Tuple { destination: Address::from_v4([10, 1, 0, 5]), destination_port: 8080, ..from };
        Line {
            from,
            to,
            flags: 0,
            who: Arc::new(Who::default()),
            choice: Some((Choice::Scheduler as u8, 0)),
            start: Some(start),
            until: start + 1_500_000_000,
            end: Some(EndReason::Closed),
            total: Volume { packets_sent: 2, bytes_sent: 100, ..Volume::default() },
            since_last: None,
        }
    }

    fn written(target: FlowLogTarget, lines: u64) -> (FlowLogCounters, AtomicUsize) {
        let counters = FlowLogCounters::default();
        let node = LogNode { name: "a".to_owned(), direct: true };
        let sink = Sink::new(target, Rotation { max_size: 0, keep: 0 });
        let (queue, writer) = Writer::new(node, sink, 3, counters.clone(), Arc::new(AtomicBool::new(false)));
        (0..lines).for_each(|start| queue.push(line(start)));
        let waiting = AtomicUsize::new(queue.waiting.load(Ordering::Relaxed));
        drop(queue);
        thread::spawn(move || writer.run()).join().unwrap();
        (counters, waiting)
    }

    #[test]
    fn lines_beyond_the_capacity_are_dropped_and_the_last_line_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("flows.json");
        let (counters, waiting) = written(FlowLogTarget::File(file.clone()), 10);
        assert_eq!((counters.lines.get(), counters.dropped_lines.get()), (3, 7));
        assert_eq!(waiting.into_inner(), 3);
        let text = fs::read_to_string(file).unwrap();
        let lines: Vec<LogLine<'_>> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let [LogLine::End(first), .., LogLine::Stats(stats)] = &lines[..] else { panic!("{text}") };
        assert_eq!((first.duration, first.reason.as_deref()), (Some(1.5), Some("random")));
        assert_eq!((&*first.node, first.verdict.as_deref()), ("a", Some("direct")));
        assert_eq!((stats.lines, stats.dropped_lines, stats.lost_events), (3, 7, 0));
    }

    #[test]
    fn lines_that_a_full_disk_refuses_are_counted() {
        let (counters, _) = written(FlowLogTarget::File("/dev/full".into()), 2);
        assert_eq!((counters.lines.get(), counters.dropped_lines.get()), (0, 2));
    }

    #[test]
    fn flow_that_began_a_minute_ago_has_that_start() {
        let clock = Clock::read();
        let start = clock.at(clock.monotonic).unwrap();
        let before = clock.at(clock.monotonic.saturating_sub(60_000_000_000)).unwrap();
        assert_eq!((start - before).total(Unit::Second).unwrap(), 60.0);
    }
}
