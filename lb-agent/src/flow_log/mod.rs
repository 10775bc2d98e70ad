//! The flow log: one line for each logged connection that has ended. A long connection also gets a line in each
//! interval with traffic.
//!
//! ```text
//! programs ──events──▶ collector thread ─┐
//!                                        ├─▶ Tracker ──lines──▶ queue ──▶ writer thread ──▶ file, pipe, socket
//! GC pass ──every flow──────────────────┘
//! ```

mod names;
mod record;
mod sink;
mod tracker;
mod writer;

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use lb_common::{
    FlowEvent,
    conntrack::{Flow, Tick, Tuple},
};
use lb_datapath::{FlowEvents, FlowWalk, ServiceMaps, monotonic_nanoseconds};
use signal_hook::consts::SIGHUP;
use tracing::warn;

#[cfg(test)]
pub(crate) use self::sink::MODE;
use self::{
    names::MapNames,
    sink::Sink,
    tracker::Tracker,
    writer::{CAPACITY, Queue, Writer},
};
pub(crate) use self::{
    names::Policies,
    sink::rotated,
    writer::{FlowLogCounters, LogNode},
};
pub use self::{
    record::{EndReason, LogLine, Record, StatsRecord, VERSION, Volume},
    sink::{FlowLogTarget, Rotation},
};

/// Interval at which the collector reads events from the ring buffer.
const PERIOD: Duration = Duration::from_millis(50);
/// Maximum number of events that the collector processes before it releases its lock. Under a flood there is always
/// another event, but GC must also get the lock. The ring buffer counts the events for which it has no room.
const AT_ONCE: usize = 1 << 16;
/// Number of events after which the collector passes the complete lines on.
const PASS_ON_EACH: usize = 4096;
/// Number of flows that a GC pass finds between two readings of events.
const ROOM_EACH: u32 = 4096;
/// Maximum number of events that the collector keeps unprocessed; they take 64 MiB.
const MAX_UNREAD: usize = 1 << 19;
/// How long the log of a starting agent waits until the annotations of all Services are known. The annotations decide
/// which connections the agent logs.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a stopping agent waits for the last lines to be written.
const LAST_MOMENT: Duration = Duration::from_secs(2);

/// Settings of the flow log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowLogConfig {
    /// Where the agent writes the lines: file, standard output or socket.
    pub target: FlowLogTarget,
    /// Minimum time from one line of a connection to its next intermediate line, unless an annotation of its Service
    /// sets another interval. Without traffic since its last line, a connection gets no intermediate line. Its final
    /// line is written when it ends, whatever the interval.
    pub interval: Duration,
    /// How many of a million connections are logged, chosen by a hash.
    pub sample: u32,
    /// Whether the agent logs only the connections of Services whose annotation enables the flow log.
    pub only_annotated: bool,
    /// When the agent rotates the file, and how many rotated files stay.
    pub rotation: Rotation,
}

/// Handle of a running flow log. Clones share it.
#[derive(Clone)]
pub(crate) struct FlowLog {
    collector: Arc<Mutex<Collector>>,
    policies: Policies,
}

impl std::fmt::Debug for FlowLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FlowLog").finish_non_exhaustive()
    }
}

/// Handle of the flow log's threads. When dropped, it stops the log and waits until the last lines are written, at most
/// [`LAST_MOMENT`].
pub(crate) struct FlowLogThreads {
    stop: Arc<AtomicBool>,
    log: FlowLog,
    written: mpsc::Receiver<()>,
}

impl FlowLog {
    /// Opens the file and starts the threads.
    ///
    /// # Errors
    /// The file cannot be opened, or the kernel refuses a thread or a signal handler.
    pub(crate) fn start(
        config: &FlowLogConfig,
        node: LogNode,
        (events, maps): (FlowEvents, ServiceMaps),
        counters: FlowLogCounters,
    ) -> anyhow::Result<(Self, FlowLogThreads)> {
        let sink = open(config)?;
        let reopen = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGHUP, Arc::clone(&reopen)).context("cannot listen for SIGHUP")?;
        let (queue, writer) = Writer::new(node, sink, CAPACITY, counters.clone(), reopen);
        let names = MapNames::new(maps, config.only_annotated, config.interval);
        let policies = names.policies();
        let tracker = Tracker::new(config.sample);
        let (queue, unread, now) = (Some(queue), VecDeque::new(), (Tick(0), 0));
        let waits = Some((policies.clone(), Instant::now() + PATIENCE));
        let collector = Collector { waits, tracker, events, unread, found: 0, names, queue, counters, now };
        let log = Self { collector: Arc::new(Mutex::new(collector)), policies };
        let (sender, written) = mpsc::channel();
        spawn("flow-log-writer", move || {
            writer.run();
            drop(sender);
        })?;
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, stopping) = (log.clone(), Arc::clone(&stop));
        spawn("flow-log", move || {
            while !stopping.load(Ordering::Relaxed) {
                shared.lock().collect();
                thread::sleep(PERIOD);
            }
        })?;
        Ok((log.clone(), FlowLogThreads { stop, log, written }))
    }

    /// Checks that the file can be opened.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(crate) fn check(config: &FlowLogConfig) -> anyhow::Result<()> {
        open(config).map(drop)
    }

    /// The flow log policies of Services, which the writer of Services updates.
    pub(crate) fn policies(&self) -> Policies {
        self.policies.clone()
    }

    /// An observer for a GC pass, which reports each flow to the flow log.
    pub(crate) const fn pass(&self) -> Pass<'_> {
        Pass { log: self, collector: None }
    }

    fn lock(&self) -> MutexGuard<'_, Collector> {
        // A panic while the lock is held leaves every connection valid, so poisoning is ignored.
        self.collector.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for FlowLogThreads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        {
            let mut collector = self.log.lock();
            collector.waits = None;
            collector.collect();
            while !collector.unread.is_empty() {
                collector.collect();
            }
            collector.queue = None;
        }
        if self.written.recv_timeout(LAST_MOMENT) == Err(mpsc::RecvTimeoutError::Timeout) {
            warn!("the last lines of the flow log are lost: it is written too slowly");
        }
    }
}

/// Opens the file of the log.
fn open(config: &FlowLogConfig) -> anyhow::Result<Sink> {
    let mut sink = Sink::new(config.target.clone(), config.rotation);
    sink.check().with_context(|| format!("cannot open the file of --flow-log, {}", config.target))?;
    Ok(sink)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

/// All state for turning events and flows into lines, behind one lock.
struct Collector {
    /// The policies for which the log waits, and until when; `None` once it does not wait.
    waits: Option<(Policies, Instant)>,
    tracker: Tracker,
    events: FlowEvents,
    /// Events that the collector has read but not processed, because the log waits for the policies or because a GC
    /// pass runs. A GC pass may still show counters that are older than the events read during it, so the collector
    /// processes these events after the pass.
    unread: VecDeque<FlowEvent>,
    /// Number of flows that GC passes have found; wraps around.
    found: u32,
    names: MapNames,
    /// Queue of the writing thread; `None` once the log is stopped.
    queue: Option<Queue>,
    counters: FlowLogCounters,
    /// The time of the GC pass: as a tick of the programs, and in nanoseconds of the monotonic clock.
    now: (Tick, u64),
}

impl Collector {
    /// Whether to wait for the policies of Services before events and passes are processed.
    fn waits(&mut self) -> bool {
        let Some((policies, until)) = &self.waits else { return false };
        if policies.are_complete() {
            self.waits = None;
        } else if *until <= Instant::now() {
            warn!(
                "the Services are not known yet: until they are, the flow log takes connections as if no Service had an \
                 annotation"
            );
            self.waits = None;
        }
        self.waits.is_some()
    }

    /// Processes the events that wait, but at most [`AT_ONCE`], and queues the complete lines for the writer.
    fn collect(&mut self) {
        if self.waits() {
            return self.keep_events();
        }
        for number in 1..=AT_ONCE {
            let Some(event) = self.unread.pop_front().or_else(|| self.events.next_event()) else { break };
            self.tracker.event(&event, &mut self.names);
            if number.is_multiple_of(PASS_ON_EACH) {
                self.pass_on();
            }
        }
        self.pass_on();
        match self.events.lost() {
            Ok(lost) => {
                self.counters.lost_events.inc_by(lost.saturating_sub(self.counters.lost_events.get()));
            }
            Err(error) => warn!("cannot count lost events of the flow log: {error}"),
        }
    }

    /// Processes a flow that a GC pass has found. After every [`ROOM_EACH`] flows, empties the ring buffer, because a
    /// pass may take seconds.
    fn found(&mut self, key: &Tuple, forward: &Flow, reply: Option<&Flow>) {
        self.tracker.found(key, (forward, reply), self.now, &mut self.names);
        self.found = self.found.wrapping_add(1);
        if self.found.is_multiple_of(ROOM_EACH) {
            self.pass_on();
            self.keep_events();
        }
    }

    /// Empties the ring buffer without processing the events.
    fn keep_events(&mut self) {
        while self.unread.len() < MAX_UNREAD
            && let Some(event) = self.events.next_event()
        {
            self.unread.push_back(event);
        }
    }

    fn pass_on(&mut self) {
        for line in self.tracker.lines() {
            if let Some(queue) = &self.queue {
                queue.push(line);
            }
        }
    }
}

/// Receives the flows of one GC pass. Holds the collector's lock from the beginning of the pass to its end. Ignores the
/// pass while the log waits for the policies.
pub(crate) struct Pass<'a> {
    log: &'a FlowLog,
    collector: Option<MutexGuard<'a, Collector>>,
}

impl FlowWalk for Pass<'_> {
    fn begin(&mut self, now: Tick) {
        let mut collector = self.log.lock();
        if collector.waits() {
            return;
        }
        let collector = self.collector.insert(collector);
        collector.names.refresh();
        collector.collect();
        collector.tracker.begin_pass();
        collector.now = (now, monotonic_nanoseconds());
    }

    fn flow(&mut self, key: &Tuple, forward: &Flow, reply: Option<&Flow>) {
        if let Some(collector) = &mut self.collector {
            collector.found(key, forward, reply);
        }
    }

    fn deleted(&mut self, key: &Tuple, evicted: bool) {
        if let Some(Collector { tracker, now, .. }) = self.collector.as_deref_mut() {
            tracker.deleted(key, evicted, now.1);
        }
    }

    fn end(&mut self) {
        if let Some(mut collector) = self.collector.take() {
            let now = collector.now.1;
            collector.tracker.end_pass(now);
            collector.pass_on();
        }
    }
}
