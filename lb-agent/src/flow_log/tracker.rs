//! Decides which lines the flow log gets: a pure state machine. The BPF programs emit an event when a flow begins or
//! closes, and when they delete it; each GC pass shows every flow with its counters. Events and passes together give
//! exact lines, in whatever order they arrive.

use std::{collections::HashMap, sync::Arc};

use bytemuck::Zeroable as _;
use lb_common::{
    Address, Choice, FlowEvent, FlowEventKind, Outcome, Scheduler,
    conntrack::{Flow, Phase, Tick, Tuple},
    hash,
};
use lb_ebpf::rules::flow::outcome;

use super::record::{EndReason, Volume};

/// Seconds without a packet after which a closed connection is complete, so that its last ACK is counted.
const QUIET: u32 = 2;

/// The names of a connection's Service and backend, and how to log the connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Who {
    /// Namespace, Service name and port name; `None` if the Service is unknown.
    pub(super) service: Option<[Arc<str>; 3]>,
    pub(super) pod: Option<Arc<str>>,
    pub(super) node: Option<Arc<str>>,
    /// Whether connections of this Service are logged.
    pub(super) logged: bool,
    /// Minimum number of nanoseconds from one line of a connection to its next intermediate line. The final line does
    /// not wait.
    pub(super) interval: u64,
}

/// Looks up the names for a connection.
pub(super) trait Names {
    /// The names of the service port with the id `service`, and of the backend with this address.
    fn of(&mut self, service: u32, backend: &Address) -> Arc<Who>;
}

/// The content of a line, before it is formatted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Line {
    pub(super) from: Tuple,
    pub(super) to: Tuple,
    /// The [`lb_common::flow_flags`] of the forward entry.
    pub(super) flags: u8,
    pub(super) who: Arc<Who>,
    pub(super) choice: Option<(u8, u8)>,
    /// When the connection began, in nanoseconds of `CLOCK_MONOTONIC`; `None` if no event has reported it, because the
    /// connection is older than the log or the event was lost.
    pub(super) start: Option<u64>,
    /// In the connection's last line: time of its last packet, or of the packet that closed it. In an intermediate
    /// line: the current time. In nanoseconds of `CLOCK_MONOTONIC`.
    pub(super) until: u64,
    pub(super) end: Option<EndReason>,
    pub(super) total: Volume,
    pub(super) since_last: Option<Volume>,
}

impl Line {
    /// Id of the connection, the same in all its lines.
    pub(super) fn flow(&self) -> u64 {
        self.start.unwrap_or_default() ^ digest(&self.from)
    }

    /// A forward entry with only the fields that determine how it translates packets; all other fields are zero.
    fn translation(&self) -> Flow {
        Flow { to: self.to, flags: self.flags, ..Flow::zeroed() }
    }

    /// Whether packets reach the backend through a tunnel.
    pub(super) fn is_tunnelled(&self) -> bool {
        self.translation().is_tunnelled()
    }

    /// The outcome under which the programs count the client's packets. If a second flow masquerades the connection, it
    /// is the outcome of that second translation, [`Outcome::Masquerade`]. `direct` is whether all flows may bypass the
    /// stack (`--forwarding direct`); flows whose packets arrive in a tunnel never do.
    pub(super) fn verdict(&self, direct: bool) -> Outcome {
        let flow = self.translation();
        if flow.has_second() {
            return Outcome::Masquerade;
        }
        let is_from_tunnel = self.choice.is_some_and(|(choice, _)| choice == Choice::Peer as u8);
        let bypasses = flow.may_bypass_stack(direct) && !is_from_tunnel;
        outcome(&flow, bypasses)
    }

    /// Why the backend was chosen, as the log spells it.
    pub(super) fn reason(&self) -> Option<&'static str> {
        let (choice, scheduler) = self.choice?;
        match Choice::ALL.get(usize::from(choice))? {
            Choice::None => None,
            Choice::Scheduler => Scheduler::try_from(scheduler).ok().map(Scheduler::as_str),
            Choice::Affinity => Some("affinity"),
            Choice::Retry => Some("retry"),
            Choice::Peer => Some("peer"),
        }
    }
}

/// The two counters of a flow table entry: packets, and [`Flow::traffic`] (bytes with a generation).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counters {
    packets: u32,
    traffic: u64,
}

impl Counters {
    const fn of(flow: &Flow) -> Self {
        Self { packets: flow.packets, traffic: flow.traffic }
    }

    /// Number of packets and bytes that were counted between the counters `before` and these.
    fn since(self, before: Self) -> (u64, u64) {
        let bytes = Flow::bytes_in(self.traffic).saturating_sub(Flow::bytes_in(before.traffic));
        (u64::from(self.packets.wrapping_sub(before.packets)), bytes)
    }

    /// Whether the flow with these counters can have the counters `later` at a later time: `later` has the same
    /// generation and no fewer bytes.
    const fn leads_to(self, later: Self) -> bool {
        Flow::generation_in(self.traffic) == Flow::generation_in(later.traffic)
            && self.traffic <= later.traffic
    }
}

/// The counters of a flow's forward entry, then those of its reverse entry.
type Pair = [Counters; 2];

fn volume(now: Pair, before: Pair) -> Volume {
    let ((packets_sent, bytes_sent), (packets_answered, bytes_answered)) =
        (now[0].since(before[0]), now[1].since(before[1]));
    Volume { packets_sent, bytes_sent, packets_answered, bytes_answered }
}

/// The state of a connection that the tracker has seen.
#[derive(Debug)]
struct Known {
    to: Tuple,
    flags: u8,
    choice: Option<(u8, u8)>,
    start: Option<u64>,
    /// The counters when the connection began; the connection's traffic is the difference between `now` and these
    /// counters. If the connection is older than the log: the counters in the first GC pass. If no event has reported
    /// the beginning of a newer connection: zero packets and bytes.
    base: Pair,
    now: Pair,
    /// The counters in the connection's last line; `None` before the first line.
    reported: Option<Pair>,
    /// Time of the connection's last line, or, before the first line, of the event or GC pass that first showed the
    /// connection, in nanoseconds of `CLOCK_MONOTONIC`.
    reported_at: u64,
    last_seen: Tick,
    /// When the programs saw the packet that closed the connection; `None` if no event has reported one.
    closed: Option<u64>,
    phase: Phase,
    /// Whether the connection gets no more lines. The connection stays here while its entries are in the flow table.
    done: bool,
    /// Number of the last GC pass that showed the connection.
    pass: u32,
    /// Number of the first GC pass that showed another flow in the connection's entries; 0 if none has.
    replaced_in: u32,
    who: Arc<Who>,
}

impl Known {
    fn line(&self, from: &Tuple, end: Option<EndReason>, now: u64) -> Line {
        let start = self.start;
        let last_packet = self.closed.unwrap_or_else(|| nanoseconds(self.last_seen));
        let until = if end.is_some() { last_packet } else { now };
        Line {
            from: *from,
            to: self.to,
            flags: self.flags,
            who: Arc::clone(&self.who),
            choice: self.choice,
            start,
            until: until.max(start.unwrap_or_default()),
            end,
            total: volume(self.now, self.base),
            since_last: self.reported.map(|last| volume(self.now, last)),
        }
    }

    /// Counts for the `later` connection only the traffic after the end of this one, in each direction whose entry has
    /// continued the counters: see [`Flow::continue_counters`].
    fn continue_into(&self, later: &mut Self) {
        for (direction, earlier) in self.now.into_iter().enumerate() {
            if Flow::generation_in(earlier.traffic) < Flow::generation_in(later.now[direction].traffic) {
                later.base[direction] = earlier;
            }
        }
    }

    /// Why the connection has ended: closed or reset, if its phase says so, else `gone`, the reason why its entries
    /// were deleted.
    const fn end_reason(&self, gone: EndReason) -> EndReason {
        match self.phase {
            Phase::Closed => EndReason::Reset,
            Phase::TimeWait => EndReason::Closed,
            Phase::Opening
            | Phase::Accepted
            | Phase::Established
            | Phase::HalfClosed
            | Phase::Unreplied
            | Phase::Replied
            | Phase::Stream => gone,
        }
    }
}

/// The time at which a tick begins, in nanoseconds of `CLOCK_MONOTONIC`.
fn nanoseconds(Tick(tick): Tick) -> u64 {
    u64::from(tick) << 30
}

/// The state of all logged connections in the flow table, and the lines that the log has not taken yet.
#[derive(Debug)]
pub(super) struct Tracker {
    flows: HashMap<Tuple, Known>,
    pass: u32,
    /// Connections with a [`digest`] above this number are not logged.
    sample: u64,
    lines: Vec<Line>,
}

impl Tracker {
    /// Creates an empty tracker. `sample` is how many of a million connections are logged.
    pub(super) fn new(sample: u32) -> Self {
        let sample = u64::try_from(u128::from(u64::MAX) * u128::from(sample) / 1_000_000).unwrap_or(u64::MAX);
        Self { flows: HashMap::new(), pass: 0, sample, lines: Vec::new() }
    }

    /// Returns the lines that were completed since the last call.
    pub(super) fn lines(&mut self) -> impl Iterator<Item = Line> {
        self.lines.drain(..)
    }

    /// Processes an event of the programs.
    pub(super) fn event(&mut self, event: &FlowEvent, names: &mut dyn Names) {
        if digest(&event.from) > self.sample {
            return;
        }
        match FlowEventKind::ALL.get(usize::from(event.kind)) {
            Some(FlowEventKind::Begun) => self.begun(event, names),
            Some(FlowEventKind::Closed) => self.closed(event),
            Some(FlowEventKind::Evicted) => self.gone(event, EndReason::Evicted, names),
            Some(FlowEventKind::Replaced) => self.gone(event, EndReason::Replaced, names),
            None => {}
        }
    }

    fn begun(&mut self, event: &FlowEvent, names: &mut dyn Names) {
        let mut known = new(event, names, self.pass);
        if !known.who.logged {
            return;
        }
        known.start = Some(event.time);
        known.choice = Some((event.choice, event.scheduler));
        known.base = known.now;
        match self.flows.remove(&event.from) {
            // A GC pass has shown this connection before this event was read.
            Some(shown) if shown.start.is_none() && shown.to.destination == event.to.destination => {
                (known.now, known.last_seen, known.phase) = (shown.now, shown.last_seen, shown.phase);
                // The first pass takes every connection for one that is older than the log, and marks those that are
                // over as done. This connection began during that pass, so the mark is wrong.
                (known.closed, known.done) = (shown.closed, shown.done && shown.pass > 1);
            }
            // The end of an earlier connection of this tuple was not seen: the event was lost.
            Some(earlier) if !earlier.done => {
                let reason = earlier.end_reason(EndReason::Replaced);
                self.lines.push(earlier.line(&event.from, Some(reason), event.time));
            }
            Some(_) | None => {}
        }
        self.flows.insert(event.from, known);
    }

    fn closed(&mut self, event: &FlowEvent) {
        if let Some(known) = self.flows.get_mut(&event.from) {
            known.closed.get_or_insert(event.time);
            known.phase = phase(event);
        }
    }

    fn gone(&mut self, event: &FlowEvent, reason: EndReason, names: &mut dyn Names) {
        let mut known = self.flows.remove(&event.from).unwrap_or_else(|| new(event, names, self.pass));
        if known.done || !known.who.logged {
            return;
        }
        (known.now, known.last_seen) = (counters(event), event.last_seen.max(known.last_seen));
        if !known.phase.is_over() {
            known.phase = phase(event);
        }
        let idle = Tick::from_nanos(event.time).seconds_since(known.last_seen);
        let has_expired = idle >= known.phase.timeout_seconds();
        let reason = if has_expired { EndReason::Expired } else { reason };
        self.lines.push(known.line(&event.from, Some(known.end_reason(reason)), event.time));
    }

    /// Must be called at the beginning of a GC pass.
    pub(super) const fn begin_pass(&mut self) {
        self.pass += 1;
    }

    /// Processes a flow that the GC pass has found. `tick` and `now` are the time of the pass, in ticks of the programs
    /// and in nanoseconds of `CLOCK_MONOTONIC`.
    pub(super) fn found(
        &mut self,
        from: &Tuple,
        (forward, reply): (&Flow, Option<&Flow>),
        (tick, now): (Tick, u64),
        names: &mut dyn Names,
    ) {
        if digest(from) > self.sample {
            return;
        }
        let counters = [Counters::of(forward), reply.map(Counters::of).unwrap_or_default()];
        if self.missed_replacement(from, forward, counters, reply.is_some())
            && let Some(earlier) = self.flows.remove(from)
        {
            self.adopt(from, (forward, reply), counters, Some(&earlier), now, names);
            if !earlier.done {
                let reason = earlier.end_reason(EndReason::Replaced);
                self.lines.push(earlier.line(from, Some(reason), now));
            }
        } else if !self.flows.contains_key(from) {
            self.adopt(from, (forward, reply), counters, None, now, names);
        }
        let Some(known) = self.flows.get_mut(from) else { return };
        known.pass = self.pass;
        if known.done || known.replaced_in > 0 {
            return;
        }
        known.now[0] = counters[0];
        if reply.is_some() {
            known.now[1] = counters[1];
        }
        known.phase = Phase::of_entry(forward, reply);
        known.last_seen = known.phase.last_used(forward, reply);
        if known.phase.is_over() {
            if tick.seconds_since(known.last_seen) >= QUIET {
                known.done = true;
                self.lines.push(known.line(from, Some(known.end_reason(EndReason::Closed)), now));
            }
            return;
        }
        let last = known.reported.unwrap_or(known.base);
        if now.saturating_sub(known.reported_at) >= known.who.interval && known.now != last {
            self.lines.push(known.line(from, None, now));
            (known.reported, known.reported_at) = (Some(known.now), now);
        }
    }

    /// Begins to follow a connection that the GC pass has found before any event, unless its Service is not logged.
    /// `earlier` is the known connection that this connection has replaced, if there is one.
    fn adopt(
        &mut self,
        from: &Tuple,
        (forward, reply): (&Flow, Option<&Flow>),
        counters: Pair,
        earlier: Option<&Known>,
        now: u64,
        names: &mut dyn Names,
    ) {
        let who = names.of(forward.service, &forward.to.destination);
        if !who.logged {
            return;
        }
        let mut known = adopted(forward, counters, who, now);
        if let Some(earlier) = earlier {
            earlier.continue_into(&mut known);
        }
        if self.pass == 1 {
            // Takes the connection for one that is older than the log, so only its traffic from now on counts. If it is
            // over, it gets no line, because it ended before the log began.
            known.base = counters;
            known.done = Phase::of_entry(forward, reply).is_over();
        }
        self.flows.insert(*from, known);
    }

    /// Whether the entries have belonged to another flow than the known connection since an earlier GC pass. If so, the
    /// events about the end of the connection and the beginning of the other flow were lost: the tracker reads events
    /// before each pass. The first pass that finds another flow only notes it, because the events may come later.
    fn missed_replacement(&mut self, from: &Tuple, forward: &Flow, counters: Pair, has_reply: bool) -> bool {
        let Some(known) = self.flows.get_mut(from) else { return false };
        let is_same = known.to.destination == forward.to.destination
            && known.now[0].leads_to(counters[0])
            && (!has_reply || known.now[1].leads_to(counters[1]));
        if is_same {
            known.replaced_in = 0;
        } else if known.replaced_in == 0 {
            known.replaced_in = self.pass;
        }
        known.replaced_in != 0 && known.replaced_in < self.pass
    }

    /// Handles the deletion of a flow by the GC pass.
    pub(super) fn deleted(&mut self, from: &Tuple, evicted: bool, now: u64) {
        let Some(known) = self.flows.remove(from).filter(|known| !known.done) else { return };
        let reason = known.end_reason(if evicted { EndReason::Evicted } else { EndReason::Expired });
        self.lines.push(known.line(from, Some(reason), now));
    }

    /// Ends a GC pass. A connection that two passes in a row have not shown gets its last line; the reason is
    /// [`EndReason::Deleted`], unless the connection was closed or reset before.
    pub(super) fn end_pass(&mut self, now: u64) {
        let (pass, lines) = (self.pass, &mut self.lines);
        self.flows.retain(|from, known| {
            let is_there = pass.saturating_sub(known.pass) < 2;
            if !is_there && !known.done {
                lines.push(known.line(from, Some(known.end_reason(EndReason::Deleted)), now));
            }
            is_there
        });
    }
}

/// A connection that a GC pass has shown before any event: it is older than the log, or the event about its beginning
/// is still to be read or was lost.
fn adopted(forward: &Flow, counters: Pair, who: Arc<Who>, now: u64) -> Known {
    // The counters may include traffic of earlier flows with the same entries. How much is unknown, so all of it counts
    // for this connection.
    let base =
        counters.map(|now| Counters { packets: 0, traffic: now.traffic - Flow::bytes_in(now.traffic) });
    Known {
        to: forward.to,
        flags: forward.flags,
        choice: None,
        start: None,
        base,
        now: counters,
        reported: None,
        reported_at: now,
        last_seen: forward.last_seen,
        closed: None,
        phase: Phase::Opening,
        done: false,
        pass: 0,
        replaced_in: 0,
        who,
    }
}

/// A new connection with the data of an event.
fn new(event: &FlowEvent, names: &mut dyn Names, pass: u32) -> Known {
    Known {
        to: event.to,
        flags: event.flags,
        choice: None,
        start: None,
        base: Pair::default(),
        now: counters(event),
        reported: None,
        reported_at: event.time,
        last_seen: event.last_seen,
        closed: None,
        phase: Phase::Opening,
        done: false,
        pass,
        replaced_in: 0,
        who: names.of(event.service, &event.to.destination),
    }
}

fn counters(event: &FlowEvent) -> Pair {
    [0, 1].map(|at| Counters { packets: event.packets[at], traffic: event.traffic[at] })
}

fn phase(event: &FlowEvent) -> Phase {
    Phase::ALL.get(usize::from(event.phase)).copied().unwrap_or(Phase::Opening)
}

/// A hash of the client's side of a flow, equal for all lines of one connection, on every node and in every run.
fn digest(from: &Tuple) -> u64 {
    let Tuple { source, destination, source_port, destination_port, protocol, .. } = from;
    let client = hash::of_endpoint(hash::DEFAULT_SEED, source, u32::from(*source_port));
    hash::of_endpoint(client, destination, u32::from(*destination_port) << 8 | u32::from(*protocol))
}

#[cfg(test)]
mod tests;
