use std::time::Duration;

use lb_common::{
    conntrack::{flow_flags, seen},
    protocol,
};

use super::*;

const SECOND: u64 = 1_000_000_000;

/// Gives all connections the same names.
struct Everyone(Arc<Who>);

impl Names for Everyone {
    fn of(&mut self, _service: u32, _backend: &Address) -> Arc<Who> {
        Arc::clone(&self.0)
    }
}

fn everyone(logged: bool) -> Everyone {
    let interval = u64::try_from(Duration::from_secs(60).as_nanos()).unwrap();
    let service = Some(["default", "web", "http"].map(Arc::from));
    Everyone(Arc::new(Who { service, pod: None, node: None, logged, interval }))
}

/// A tracker, and the flow table's entries of one connection.
struct World {
    tracker: Tracker,
    names: Everyone,
    from: Tuple,
    forward: Flow,
    reply: Flow,
}

fn tick(nanoseconds: u64) -> Tick {
    Tick::from_nanos(nanoseconds)
}

impl World {
    /// A tracker whose first GC pass is over and has found nothing.
    fn new() -> Self {
        let (client, vip) = (Address::from_v4([192, 0, 2, 1]), Address::from_v4([10, 96, 0, 1]));
        let from = Tuple::new(client, vip, 40_000, 80, protocol::TCP);
        let to = Tuple { destination: Address::from_v4([10, 1, 0, 5]), destination_port: 8080, ..from };
        let forward = Flow::new(&from, &to, 7, 0, Tick(0));
        let reply = Flow::new(&to.reversed(), &from.reversed(), 7, flow_flags::reverse(0), Tick(0));
        let mut tracker = Tracker::new(1_000_000);
        tracker.begin_pass();
        tracker.end_pass(0);
        Self { tracker, names: everyone(true), from, forward, reply }
    }

    /// Passes an event to the tracker; the flow's last packet came at the time of the event.
    fn event(&mut self, kind: FlowEventKind, time: u64) {
        self.late_event(kind, time, time);
    }

    /// Passes an event to the tracker; the flow's last packet came at `last_seen`.
    fn late_event(&mut self, kind: FlowEventKind, time: u64, last_seen: u64) {
        let event = FlowEvent {
            time,
            from: self.from,
            to: self.forward.to,
            traffic: [self.forward.traffic, self.reply.traffic],
            packets: [self.forward.packets, self.reply.packets],
            service: 7,
            last_seen: tick(last_seen),
            kind: kind as u8,
            choice: Choice::Affinity as u8,
            scheduler: 0,
            flags: self.forward.flags,
            phase: Phase::of(&self.forward, &self.reply) as u8,
            zero: 0,
            zeros: 0,
        };
        self.tracker.event(&event, &mut self.names);
    }

    fn send(&mut self, bytes: u32, answered: u32, at: u64) {
        self.forward.count_packet(bytes);
        self.reply.count_packet(answered);
        (self.forward.last_seen, self.reply.last_seen) = (tick(at), tick(at));
    }

    fn close(&mut self) {
        self.forward.seen = seen::PACKET | seen::SYN | seen::ACK | seen::FIN;
        self.reply.seen = self.forward.seen;
    }

    /// Runs a GC pass that finds the connection.
    fn pass(&mut self, now: u64) {
        self.tracker.begin_pass();
        let flow = (&self.forward, Some(&self.reply));
        self.tracker.found(&self.from, flow, (tick(now), now), &mut self.names);
        self.tracker.end_pass(now);
    }

    fn empty_pass(&mut self, now: u64) {
        self.tracker.begin_pass();
        self.tracker.end_pass(now);
    }

    fn lines(&mut self) -> Vec<Line> {
        self.tracker.lines().collect()
    }

    /// The lines since the last call, each as its end reason and the packets and bytes that the client and the backend
    /// sent.
    fn ends(&mut self) -> Vec<(Option<EndReason>, u64, u64, u64, u64)> {
        let short = |line: &Line| {
            let Volume { packets_sent, bytes_sent, packets_answered, bytes_answered } = line.total;
            (line.end, packets_sent, bytes_sent, packets_answered, bytes_answered)
        };
        self.lines().iter().map(short).collect()
    }
}

#[test]
fn verdict_is_the_outcome_of_the_packets_of_the_client() {
    use flow_flags::{CAUGHT, GUE, HAIRPIN, MASQUERADED, PROXY_PROTOCOL, ROUTED, TUNNEL};
    for (flags, through_stack, direct) in [
        (0, Outcome::Forward, Outcome::Direct),
        (PROXY_PROTOCOL, Outcome::Forward, Outcome::Forward),
        (MASQUERADED, Outcome::Masquerade, Outcome::Masquerade),
        (MASQUERADED | PROXY_PROTOCOL, Outcome::Masquerade, Outcome::Masquerade),
        (HAIRPIN, Outcome::Hairpin, Outcome::Hairpin),
        (CAUGHT, Outcome::Caught, Outcome::Caught),
        (CAUGHT | MASQUERADED, Outcome::Masquerade, Outcome::Masquerade),
        (ROUTED, Outcome::Routed, Outcome::Routed),
        (ROUTED | TUNNEL, Outcome::Tunnelled, Outcome::Tunnelled),
        (ROUTED | TUNNEL | GUE, Outcome::Tunnelled, Outcome::Tunnelled),
    ] {
        let mut world = World::new();
        world.forward.flags = flags;
        world.event(FlowEventKind::Begun, 10 * SECOND);
        world.event(FlowEventKind::Evicted, 11 * SECOND);
        let [line] = &world.lines()[..] else { panic!("one line for {flags}") };
        assert_eq!((line.verdict(false), line.verdict(true)), (through_stack, direct), "{flags}");
        assert_eq!(line.is_tunnelled(), flags & TUNNEL != 0, "{flags}");
    }
    let mut world = World::new();
    (world.from.protocol, world.forward.to.protocol) = (protocol::SCTP, protocol::SCTP);
    world.event(FlowEventKind::Begun, 10 * SECOND);
    world.event(FlowEventKind::Evicted, 11 * SECOND);
    assert_eq!(world.lines()[0].verdict(true), Outcome::Forward, "SCTP never bypasses the stack");
}

#[test]
fn closed_connection_has_one_line_with_its_last_packets() {
    let mut world = World::new();
    world.event(FlowEventKind::Begun, 10 * SECOND);
    world.send(100, 1000, 10 * SECOND);
    world.close();
    world.event(FlowEventKind::Closed, 12 * SECOND);
    world.send(40, 0, 12 * SECOND);
    world.pass(12 * SECOND + SECOND / 2);
    assert_eq!(world.lines(), [], "the last ACK may be under way");
    world.pass(17 * SECOND);
    let lines = world.lines();
    let total = Volume { packets_sent: 2, bytes_sent: 140, packets_answered: 2, bytes_answered: 1000 };
    assert_eq!(
        lines.iter().map(|line| (line.end, line.total)).collect::<Vec<_>>(),
        [(Some(EndReason::Closed), total)]
    );
    let line = &lines[0];
    assert_eq!((line.start, line.until, line.reason()), (Some(10 * SECOND), 12 * SECOND, Some("affinity")));
    assert_eq!(line.since_last, None);
    world.pass(22 * SECOND);
    world.event(FlowEventKind::Evicted, 23 * SECOND);
    world.empty_pass(27 * SECOND);
    world.empty_pass(32 * SECOND);
    assert_eq!(world.lines(), [], "it was logged");
}

#[test]
fn reset_connection_ends_as_reset() {
    let mut world = World::new();
    world.event(FlowEventKind::Begun, 10 * SECOND);
    world.send(60, 60, 10 * SECOND);
    world.forward.seen |= seen::RST;
    world.pass(15 * SECOND);
    assert_eq!(world.ends(), [(Some(EndReason::Reset), 1, 60, 1, 60)]);
}

#[test]
fn eviction_by_a_program_has_exact_counts() {
    let mut world = World::new();
    world.event(FlowEventKind::Begun, 10 * SECOND);
    world.send(60, 60, 10 * SECOND);
    world.pass(10 * SECOND);
    world.send(40, 40, 11 * SECOND);
    world.event(FlowEventKind::Evicted, 12 * SECOND);
    assert_eq!(world.ends(), [(Some(EndReason::Evicted), 2, 100, 2, 100)]);
    // A connection that is closed before it is evicted has the end reason `Closed`.
    world.event(FlowEventKind::Begun, 13 * SECOND);
    world.close();
    world.event(FlowEventKind::Closed, 14 * SECOND);
    world.event(FlowEventKind::Evicted, 14 * SECOND);
    assert_eq!(world.ends(), [(Some(EndReason::Closed), 0, 0, 0, 0)]);
}

#[test]
fn connections_of_one_client_port_have_lines_of_their_own() {
    let mut world = World::new();
    world.event(FlowEventKind::Begun, 10 * SECOND);
    for (number, bytes) in [(1_u64, 100), (2, 200), (3, 300)] {
        world.send(bytes, bytes, (10 + number) * SECOND);
        world.close();
        world.event(FlowEventKind::Closed, (10 + number) * SECOND);
        world.event(FlowEventKind::Replaced, (10 + number) * SECOND);
        for flow in [&mut world.forward, &mut world.reply] {
            let earlier = *flow;
            flow.continue_counters(&earlier);
            flow.seen = 0;
        }
        world.event(FlowEventKind::Begun, (10 + number) * SECOND);
    }
    let ended = |bytes| (Some(EndReason::Closed), 1, bytes, 1, bytes);
    assert_eq!(world.ends(), [ended(100), ended(200), ended(300)]);
}

#[test]
fn pass_before_the_events_changes_nothing() {
    let mut world = World::new();
    world.send(60, 60, 10 * SECOND);
    world.pass(10 * SECOND);
    world.event(FlowEventKind::Begun, 10 * SECOND);
    // No line: the event is about the connection that the pass has already found.
    assert_eq!(world.lines(), []);
    let mut world = World::new();
    world.event(FlowEventKind::Begun, 10 * SECOND);
    world.send(60, 60, 10 * SECOND);
    let (forward, reply) = (world.forward, world.reply);
    for flow in [&mut world.forward, &mut world.reply] {
        let earlier = *flow;
        flow.continue_counters(&earlier);
        flow.count_packet(1);
    }
    // The pass finds the next connection of this tuple before the tracker gets the event about the end of the earlier
    // one.
    world.pass(11 * SECOND);
    let next = (world.forward, world.reply);
    (world.forward, world.reply) = (forward, reply);
    world.event(FlowEventKind::Replaced, 11 * SECOND);
    assert_eq!(world.ends(), [(Some(EndReason::Replaced), 1, 60, 1, 60)]);
    world.forward = Flow { packets: 1, traffic: 1 << 48 | 60, ..next.0 };
    world.reply = Flow { packets: 1, traffic: 1 << 48 | 60, ..next.1 };
    world.event(FlowEventKind::Begun, 11 * SECOND);
    (world.forward, world.reply) = next;
    world.pass(12 * SECOND);
    world.event(FlowEventKind::Evicted, 13 * SECOND);
    assert_eq!(world.ends(), [(Some(EndReason::Evicted), 1, 1, 1, 1)]);
}

#[test]
fn long_connection_has_a_line_for_each_interval_with_traffic() {
    let mut world = World::new();
    world.event(FlowEventKind::Begun, 10 * SECOND);
    world.send(100, 0, 10 * SECOND);
    world.pass(60 * SECOND);
    assert_eq!(world.lines(), []);
    world.pass(70 * SECOND);
    let first = world.lines();
    assert_eq!(first.iter().map(|line| (line.end, line.since_last)).collect::<Vec<_>>(), [(None, None)]);
    world.pass(200 * SECOND);
    assert_eq!(world.lines(), [], "nothing was sent");
    world.send(50, 0, 201 * SECOND);
    world.pass(205 * SECOND);
    let second = world.lines();
    assert_eq!(second.len(), 1);
    assert_eq!((second[0].total.bytes_sent, second[0].since_last.unwrap().bytes_sent), (150, 50));
    world.tracker.deleted(&world.from, false, 400 * SECOND);
    let last = world.lines();
    assert_eq!((last[0].end, last[0].since_last), (Some(EndReason::Expired), Some(Volume::default())));
    assert!(first[0].flow() == second[0].flow() && first[0].flow() == last[0].flow());
}

#[test]
fn flow_that_two_passes_miss_was_deleted() {
    let mut world = World::new();
    world.event(FlowEventKind::Begun, 10 * SECOND);
    world.send(60, 60, 10 * SECOND);
    world.pass(11 * SECOND);
    world.empty_pass(16 * SECOND);
    assert_eq!(world.lines(), []);
    world.empty_pass(21 * SECOND);
    assert_eq!(world.ends(), [(Some(EndReason::Deleted), 1, 60, 1, 60)]);
}

/// The entries of an expired flow stay until GC or a program deletes them. If a program replaces or evicts such a flow,
/// its end reason is still `Expired`.
#[test]
fn flow_that_had_expired_is_not_replaced_or_evicted() {
    for (kind, reason) in
        [(FlowEventKind::Evicted, EndReason::Evicted), (FlowEventKind::Replaced, EndReason::Replaced)]
    {
        // The client has got no answer: the timeout is 60 s.
        for (idle, expected) in [(30, reason), (90, EndReason::Expired)] {
            let mut world = World::new();
            world.event(FlowEventKind::Begun, 10 * SECOND);
            world.late_event(kind, (10 + idle) * SECOND, 10 * SECOND);
            assert_eq!(world.lines()[0].end, Some(expected), "{kind:?} after {idle} s");
        }
    }
}

#[test]
fn connection_older_than_the_log_counts_from_its_start() {
    let mut world = World::new();
    world.tracker = Tracker::new(1_000_000);
    world.send(500, 500, 10 * SECOND);
    world.pass(10 * SECOND);
    world.send(60, 60, 11 * SECOND);
    world.event(FlowEventKind::Evicted, 12 * SECOND);
    let lines = world.lines();
    assert_eq!((lines[0].start, lines[0].reason(), lines[0].total.bytes_sent), (None, None, 60));
    // A connection that is over when the log starts has no line, because the earlier agent has logged it.
    let mut world = World::new();
    world.tracker = Tracker::new(1_000_000);
    world.close();
    world.pass(10 * SECOND);
    world.pass(20 * SECOND);
    assert_eq!(world.lines(), []);
}

#[test]
fn connection_that_begins_and_ends_during_the_first_pass_has_a_line() {
    let mut world = World::new();
    world.tracker = Tracker::new(1_000_000);
    // The pass finds the connection before the tracker gets the events about it.
    let begun = (world.forward, world.reply);
    world.send(60, 60, 10 * SECOND);
    world.close();
    world.pass(10 * SECOND);
    let ended = (world.forward, world.reply);
    (world.forward, world.reply) = begun;
    world.event(FlowEventKind::Begun, 10 * SECOND);
    (world.forward, world.reply) = ended;
    world.event(FlowEventKind::Closed, 10 * SECOND);
    world.pass(15 * SECOND);
    assert_eq!(world.ends(), [(Some(EndReason::Closed), 1, 60, 1, 60)]);
    world.pass(20 * SECOND);
    assert_eq!(world.lines(), [], "it was logged");
}

/// The client uses its port again, and the events about the end of the first connection and the beginning of the second
/// one are lost.
#[test]
fn connection_whose_beginning_was_lost_has_a_line() {
    // With another backend the reverse entry is a new one, whose counters begin with 0.
    for (first_is_logged, same_backend) in [(true, true), (false, true), (false, false)] {
        let mut world = World::new();
        world.event(FlowEventKind::Begun, 10 * SECOND);
        world.send(100, 200, 10 * SECOND);
        if first_is_logged {
            world.close();
        }
        world.pass(15 * SECOND);
        let closed = (Some(EndReason::Closed), 1, 100, 1, 200);
        assert_eq!(world.ends(), if first_is_logged { vec![closed] } else { vec![] });

        for flow in [&mut world.forward, &mut world.reply] {
            let earlier = *flow;
            flow.continue_counters(&earlier);
            flow.seen = 0;
        }
        if !same_backend {
            let to = Tuple { destination: Address::from_v4([10, 1, 0, 6]), ..world.forward.to };
            world.forward.to = to;
            let flags = flow_flags::reverse(0);
            world.reply = Flow::new(&to.reversed(), &world.from.reversed(), 7, flags, Tick(0));
        }
        world.send(60, 70, 16 * SECOND);
        world.pass(20 * SECOND);
        assert_eq!(world.lines(), [], "the events may still come");
        world.pass(25 * SECOND);
        let replaced = (Some(EndReason::Replaced), 1, 100, 1, 200);
        assert_eq!(world.ends(), if first_is_logged { vec![] } else { vec![replaced] });
        world.tracker.deleted(&world.from, false, 400 * SECOND);
        assert_eq!(world.ends(), [(Some(EndReason::Expired), 1, 60, 1, 70)]);
    }
}

#[test]
fn unlogged_services_have_no_lines() {
    let mut world = World::new();
    world.names = everyone(false);
    world.event(FlowEventKind::Begun, 10 * SECOND);
    world.pass(11 * SECOND);
    world.event(FlowEventKind::Evicted, 12 * SECOND);
    assert!(world.lines().is_empty() && world.tracker.flows.is_empty());
}

#[test]
fn sample_takes_that_part_and_whole_connections() {
    let mut world = World::new();
    world.tracker = Tracker::new(100_000);
    for port in 1..=10_000 {
        world.from.source_port = port;
        world.event(FlowEventKind::Begun, 10 * SECOND);
        world.event(FlowEventKind::Evicted, 11 * SECOND);
    }
    // 1,000 lines are expected, with a standard deviation of 30.
    let lines = world.lines().len();
    assert!((820..1180).contains(&lines), "{lines}");
    assert!(world.tracker.flows.is_empty());
}
