//! Fuzzes connection tracking on a node between two ends that follow RFC 9293 ([`peer`]): segments are lost before and
//! after the node, delayed, repeated, and forged by an off-path attacker.
#![no_main]

use std::collections::VecDeque;

use lb_common::{
    Address,
    conntrack::{
        Flow, Phase, Pressure, Segment, Tick, Tuple, flow_flags, seconds_left, seconds_left_under, seen,
        tcp_flags::{ACK, RST, SYN},
    },
    protocol,
};
use lb_ebpf::rules::flow;
use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};

mod peer;

use self::peer::{Peer, State, segment};

#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Client,
    Server,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Act {
    Send(u16),
    Close,
    Abort,
    Retransmit,
}

/// The fate of the segment at the front of `World::wire`.
#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Arrives,
    /// The segment arrives, and a copy follows.
    Twice,
    /// The segment passes the node, and is lost before it reaches the other end.
    LostAfterNode,
    /// This segment is lost before it reaches the node.
    LostBeforeNode,
    /// Segments that were sent later overtake this one.
    Later,
}

/// A sequence number that an attacker guesses.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Guess {
    Any(u32),
    /// An offset from the sequence or acknowledgement number that the imitated end would use now.
    Near(i32),
}

#[derive(Arbitrary, Debug)]
enum Step {
    Open { first: u32 },
    Act(Side, Act),
    Move(Fate),
    Forge { from: Side, flags: u8, seq: Guess, ack: Guess, payload: u16 },
    Wait { ticks: u16, under_pressure: bool },
}

/// The latest sequence and acknowledgement numbers of one end's segments that passed the node, forged ones left out.
#[derive(Clone, Copy, Debug, Default)]
struct Passed {
    /// Whether any segment passed.
    any: bool,
    /// The sequence number after the last byte that passed.
    end: u32,
    /// The last acknowledgement number that passed.
    ack: Option<u32>,
}

struct World {
    client: Peer,
    server: Peer,
    /// Segments on their way, each with its sender. The segment at the front moves next.
    wire: VecDeque<(Side, Segment)>,
    /// The two entries of the flow.
    entries: Option<(Flow, Flow)>,
    now: Tick,
    idle_since: Tick,
    server_first: u32,
    /// Indexed by sender: `Side as usize`.
    passed: [Passed; 2],
    /// Whether the node's view of the connection may differ from that of its ends; most checks stop then. Reasons:
    ///
    /// - The attacker forged a segment other than a RST, or a RST that the node takes for a RST of an end.
    /// - A late SYN replaced a flow that was over, or began one after the node had deleted such a flow.
    /// - The node may have misjudged a SYN-ACK of the server.
    /// - The flow expired.
    is_mixed: bool,
    /// Whether a forged segment may have established a flow: its acknowledgement number was plausible, it had the
    /// server's address as its source, or a RST was lost before the node, perhaps the RST that refused the forged
    /// segment.
    is_guessed: bool,
    client_is_real: bool,
}

fuzz_target!(|steps: Vec<Step>| {
    let mut world = World::new();
    for step in steps.iter().take(64) {
        world.step(step);
        world.check();
    }
    world.settle();
});

fn tuples() -> (Tuple, Tuple) {
    let from = Tuple::new(
        Address::from_v4([192, 0, 2, 1]),
        Address::from_v4([10, 96, 0, 1]),
        40_000,
        80,
        protocol::TCP,
    );
    (from, Tuple { destination: Address::from_v4([198, 51, 100, 7]), destination_port: 8080, ..from })
}

impl World {
    fn new() -> Self {
        Self {
            client: Peer::new(State::Closed),
            server: Peer::new(State::Listen),
            wire: VecDeque::new(),
            entries: None,
            now: Tick(1000),
            idle_since: Tick(1000),
            server_first: 0xffff_fff0,
            passed: [Passed::default(); 2],
            is_mixed: false,
            is_guessed: false,
            client_is_real: false,
        }
    }

    fn peer(&mut self, side: Side) -> &mut Peer {
        match side {
            Side::Client => &mut self.client,
            Side::Server => &mut self.server,
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Open { first } => self.open(first),
            Step::Act(side, act) => {
                let peer = self.peer(side);
                let sent = match act {
                    Act::Send(payload) => peer.send(payload),
                    Act::Close => peer.close(),
                    Act::Abort => peer.abort(),
                    Act::Retransmit => peer.retransmit(),
                };
                self.wire.extend(sent.map(|sent| (side, sent)));
            }
            Step::Move(fate) => self.move_one(fate),
            Step::Forge { from, flags, seq, ack, payload } => self.forge(from, flags, seq, ack, payload),
            Step::Wait { ticks, under_pressure } => self.wait(ticks, under_pressure),
        }
        if self.server.state == State::Closed || self.server.state == State::TimeWait {
            // The server accepts the next connection on the same port.
            self.server.state = State::Listen;
            self.server_first = self.server_first.wrapping_mul(0x9e37_79b1).wrapping_add(1);
        }
    }

    /// The client connects, unless it has a connection. If it connects, all segments on the wire are lost. A client never
    /// uses the sequence numbers of its last connection again (RFC 9293 §3.4.1).
    fn open(&mut self, first: u32) {
        /// More than any connection of this model uses.
        const CONNECTION: u32 = 1 << 24;
        if matches!(self.client.state, State::Closed | State::TimeWait) {
            self.wire.clear();
            let last = self.client.first;
            let is_used = first.wrapping_sub(last).cast_signed().unsigned_abs() <= CONNECTION;
            let first = if is_used { last.wrapping_add(2 * CONNECTION) } else { first };
            self.client_is_real = true;
            let syn = self.client.connect(first);
            self.wire.push_back((Side::Client, syn));
        }
    }

    fn move_one(&mut self, fate: Fate) {
        let Some((from, segment)) = self.wire.pop_front() else { return };
        match fate {
            Fate::Later => self.wire.push_back((from, segment)),
            Fate::LostBeforeNode => {
                // A lost RST may be the one that refuses a forged connection: the node then keeps that connection.
                self.is_guessed |= segment.flags & RST != 0;
            }
            Fate::LostAfterNode => self.pass(from, &segment, false),
            Fate::Arrives => self.pass(from, &segment, true),
            Fate::Twice => {
                self.pass(from, &segment, true);
                self.wire.push_back((from, segment));
            }
        }
    }

    /// An end's own segment reaches the node, and then perhaps the other end.
    fn pass(&mut self, from: Side, segment: &Segment, arrives: bool) {
        let sent = self.peer(from).next;
        // A late SYN begins a flow in place of a flow that is over, or that the node has deleted because of a late
        // SYN-ACK.
        self.is_mixed |= segment.is_syn() && segment.end() != sent && self.phase().is_none_or(Phase::is_over);
        self.is_mixed |= self.is_mistaken(from, segment);
        if !self.observe(from, segment) {
            return;
        }
        let passed = &mut self.passed[from as usize];
        // A late SYN, which arrives after segments that its sender sent later, does not change `passed`.
        let later = passed.end.wrapping_sub(segment.end());
        let is_late = passed.any && later != 0 && later <= sent.wrapping_sub(segment.end());
        let is_first = !passed.any || segment.flags & SYN != 0;
        if segment.flags & RST == 0 && !(is_late && segment.flags & SYN != 0) {
            if is_first || segment.end().wrapping_sub(passed.end) < 1 << 31 {
                passed.end = segment.end();
            }
            passed.any = true;
            passed.ack = (segment.flags & ACK != 0).then_some(segment.ack).or(passed.ack);
        }
        if arrives {
            self.arrive(from, segment);
        }
    }

    /// Whether the node may misjudge a SYN-ACK of the server. The node takes a new SYN-ACK for a late one if the
    /// sequence number and the acknowledgement number of the new SYN-ACK both lie shortly before the numbers that
    /// passed last. The node takes a late SYN-ACK for a new one, as netfilter does, if the server has since ended the
    /// connection of that SYN-ACK and accepted another connection.
    fn is_mistaken(&self, from: Side, segment: &Segment) -> bool {
        let Some((_, reply)) = &self.entries else { return false };
        if from == Side::Client || !segment.is_syn_ack() {
            return false;
        }
        let is_of_earlier = segment.seq != self.server.first;
        let is_new = segment.end() == self.server.next && segment.end() != self.passed[from as usize].end;
        is_of_earlier || is_new && !reply.accepts_connection(segment)
    }

    fn arrive(&mut self, from: Side, segment: &Segment) {
        let (to, first) = match from {
            Side::Client => (Side::Server, self.server_first),
            Side::Server => (Side::Client, 0),
        };
        let receiver = self.peer(to);
        let was_synchronized = receiver.state.is_synchronized();
        let answer = receiver.receive(segment, first);
        let is_reset = was_synchronized && segment.flags & RST != 0 && receiver.state == State::Closed;
        self.wire.extend(answer.map(|answer| (to, answer)));
        if is_reset && !self.is_mixed {
            assert_ne!(self.phase(), Some(Phase::Established), "the receiver took this RST: {segment:x?}");
        }
    }

    /// Does what the programs do with a segment of this direction: see `conntrack.rs` and `new.rs` in
    /// `lb-ebpf/src/datapath/flow`. Returns whether the segment passes.
    fn observe(&mut self, from: Side, segment: &Segment) -> bool {
        if !segment.is_valid() {
            return false;
        }
        let is_over = self.entries.as_ref().is_none_or(|(forward, reply)| flow::has_ended(forward, reply));
        if from == Side::Client && segment.is_syn() && is_over {
            let (tuple, to) = tuples();
            let forward = Flow::new(&tuple, &to, 1, 0, self.now);
            let reply = Flow::new(&to.reversed(), &tuple.reversed(), 1, flow_flags::reverse(0), self.now);
            self.entries = Some((forward, reply));
            self.passed = [Passed::default(); 2];
        }
        let Some((forward, reply)) = &mut self.entries else { return false };
        if from == Side::Server && flow::is_syn_ack_of_backend(segment, reply) && is_over {
            self.entries = None;
            return false;
        }
        let (own, reverse) = match from {
            Side::Client => (forward, reply),
            Side::Server => (reply, forward),
        };
        if own.accepts_connection(segment) {
            reverse.begin_again(segment);
        }
        if !segment.is_rst() {
            own.observe_segment(segment, self.now);
        } else if own.accepts_reset(segment, reverse) {
            own.seen |= seen::RST;
            own.last_seen = self.now;
        } else {
            return true;
        }
        self.idle_since = self.now;
        true
    }

    fn forge(&mut self, from: Side, flags: u8, seq: Guess, ack: Guess, payload: u16) {
        let number = |guess, near: u32| match guess {
            Guess::Any(number) => number,
            Guess::Near(offset) => near.wrapping_add_signed(offset),
        };
        let (next, expected) = (self.peer(from).next, self.peer(from).expected);
        let forged = segment(flags, number(seq, next), number(ack, expected), payload.into());
        let before = self.phase();
        let may_reset = self.may_reset(from, &forged);
        if !forged.is_rst() || may_reset {
            self.is_mixed = true;
        }
        self.is_guessed |= from == Side::Server || self.is_lucky(&forged);
        if !self.observe(from, &forged) {
            // If the flow is over, a SYN-ACK of the server is dropped, and the node deletes the flow.
            let is_deleted = self.entries.is_none() && before.is_none_or(Phase::is_over);
            assert!(is_deleted || self.phase() == before, "dropped, but the phase changed: {forged:x?}");
            return;
        }
        if forged.is_rst() && !may_reset && !self.is_mixed {
            assert_eq!(self.phase(), before, "outside the window: {forged:x?}");
        }
        self.arrive(from, &forged);
    }

    /// Whether the sequence number of a RST lies, modulo 2^32, between what the other end has acknowledged and what the
    /// sender of the RST has sent. A RST from an end of which no segment has passed must acknowledge what the other end
    /// sent.
    fn may_reset(&self, from: Side, rst: &Segment) -> bool {
        let (own, other) = match from {
            Side::Client => (&self.passed[0], &self.passed[1]),
            Side::Server => (&self.passed[1], &self.passed[0]),
        };
        if !own.any {
            return rst.flags & ACK != 0 && rst.ack == other.end;
        }
        let oldest = other.ack.unwrap_or(own.end);
        rst.seq.wrapping_sub(oldest) <= own.end.wrapping_sub(oldest)
    }

    /// Whether a forged segment acknowledges all that the server has sent, or up to 64 KiB more; a listening server
    /// counts as having sent its SYN-ACK. The node must accept such a segment: the server may have sent data that the
    /// node has not seen, in fragments or on a path that bypasses the node.
    fn is_lucky(&self, forged: &Segment) -> bool {
        let is_listening = self.server.state == State::Listen;
        let sent = if is_listening { self.server_first.wrapping_add(1) } else { self.server.next };
        forged.ack.wrapping_sub(sent) <= 1 << 16
    }

    fn wait(&mut self, ticks: u16, under_pressure: bool) {
        self.now.0 += u32::from(ticks);
        let pressure = if under_pressure { Pressure::MOST } else { Pressure::NONE };
        let Some((forward, reply)) = &self.entries else { return };
        assert!(
            seconds_left_under(pressure, forward, Some(reply), self.now)
                <= seconds_left(forward, Some(reply), self.now)
        );
        if seconds_left_under(pressure, forward, Some(reply), self.now) == 0 {
            // The ends may continue, but the node drops their segments: most other checks no longer apply.
            self.check_gone();
            self.entries = None;
            self.is_mixed = true;
        }
    }

    /// Checks that an established connection expires only after about a day without a segment, even under pressure.
    fn check_gone(&self) {
        let established = [self.client.state, self.server.state] == [State::Established; 2];
        let idle = self.now.seconds_since(self.idle_since);
        assert!(self.is_mixed || !established || idle >= 86_000, "expired after {idle} s");
    }

    fn phase(&self) -> Option<Phase> {
        self.entries.as_ref().map(|(forward, reply)| Phase::of(forward, reply))
    }

    /// Checks that the phase of the flow fits the states of its ends.
    fn check(&self) {
        if self.is_mixed {
            return;
        }
        let (client, server) = (self.client.state, self.server.state);
        if client == State::Established && server == State::Established {
            assert_eq!(self.phase(), Some(Phase::Established));
        }
        let both = client.is_synchronized() && server.is_synchronized();
        if both && (client.can_send() || server.can_send()) && self.entries.is_some() {
            assert!(self.phase().is_some_and(|phase| !phase.is_over()), "{client:?}, {server:?}");
        }
        if self.client.ended_orderly && self.server.ended_orderly && self.entries.is_some() {
            assert!(self.phase().is_some_and(Phase::is_over), "both ends are done: {:?}", self.phase());
        }
    }

    /// Delivers up to 1000 segments. Then checks that no flow is established if the client never connected and no
    /// forged segment was plausible: the ends must have answered the attacker's segments with RSTs.
    fn settle(&mut self) {
        for _ in 0..1000 {
            self.move_one(Fate::Arrives);
            self.check();
        }
        if !self.client_is_real && !self.is_guessed {
            assert_ne!(self.phase(), Some(Phase::Established), "the client has opened no connection");
        }
    }
}
