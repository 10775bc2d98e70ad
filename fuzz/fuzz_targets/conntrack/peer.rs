//! One end of a TCP connection, after RFC 9293 §3.10 with the stricter rules of RFC 5961 for RST and SYN: an
//! independent model, which shares only the type [`Segment`] and the TCP flags with connection tracking.
#![expect(clippy::wildcard_enum_match_arm, reason = "in most states an event changes nothing")]

use lb_common::conntrack::{
    Segment,
    tcp_flags::{ACK, FIN, RST, SYN},
};

/// The receive window of each end, in bytes.
const WINDOW: u32 = 0xffff;

/// The states of RFC 9293 §3.3.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Closed,
    Listen,
    SynSent,
    SynReceived,
    Established,
    FinWait1,
    FinWait2,
    CloseWait,
    Closing,
    LastAck,
    TimeWait,
}

impl State {
    /// Whether the application may still send data.
    pub(crate) fn can_send(self) -> bool {
        matches!(self, Self::Established | Self::CloseWait)
    }

    /// Whether RFC 9293 calls this state synchronized: both ends have agreed on the initial sequence numbers.
    pub(crate) fn is_synchronized(self) -> bool {
        !matches!(self, Self::Closed | Self::Listen | Self::SynSent | Self::SynReceived)
    }
}

/// One end of a connection.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) state: State,
    /// Whether the last connection ended with FINs of both ends.
    pub(crate) ended_orderly: bool,
    /// The initial sequence number.
    pub(crate) first: u32,
    /// The oldest sequence number that is not acknowledged (`SND.UNA`).
    oldest: u32,
    /// The next sequence number (`SND.NXT`).
    pub(crate) next: u32,
    /// The next sequence number of the other end (`RCV.NXT`).
    pub(crate) expected: u32,
}

impl Peer {
    pub(crate) fn new(state: State) -> Self {
        Self { state, ended_orderly: false, first: 0, oldest: 0, next: 0, expected: 0 }
    }

    /// Begins a connection with this initial sequence number.
    fn begin(&mut self, first: u32, state: State) {
        (self.first, self.oldest, self.next) = (first, first, first.wrapping_add(1));
        (self.state, self.ended_orderly) = (state, false);
    }

    pub(crate) fn connect(&mut self, first: u32) -> Segment {
        self.begin(first, State::SynSent);
        segment(SYN, first, 0, 0)
    }

    /// Sends data, if the state allows that.
    pub(crate) fn send(&mut self, payload: u16) -> Option<Segment> {
        self.state.can_send().then(|| {
            let sent = segment(ACK, self.next, self.expected, payload.into());
            self.next = sent.end();
            sent
        })
    }

    /// Sends a FIN: there will be no more data.
    pub(crate) fn close(&mut self) -> Option<Segment> {
        self.state = match self.state {
            State::Established => State::FinWait1,
            State::CloseWait => State::LastAck,
            _ => return None,
        };
        let sent = segment(FIN | ACK, self.next, self.expected, 0);
        self.next = sent.end();
        Some(sent)
    }

    /// Drops the connection. Sends a RST if the connection is at least in state SYN-RECEIVED.
    pub(crate) fn abort(&mut self) -> Option<Segment> {
        let was = std::mem::replace(&mut self.state, State::Closed);
        self.ended_orderly = false;
        (was.is_synchronized() || was == State::SynReceived).then(|| segment(RST, self.next, 0, 0))
    }

    /// Sends again everything that is not acknowledged, or a bare ACK if everything is acknowledged. Sends nothing
    /// without a connection.
    pub(crate) fn retransmit(&self) -> Option<Segment> {
        let unacknowledged = self.next.wrapping_sub(self.oldest);
        match self.state {
            State::SynSent => Some(segment(SYN, self.first, 0, 0)),
            State::SynReceived => Some(segment(SYN | ACK, self.first, self.expected, 0)),
            State::FinWait1 | State::Closing | State::LastAck => {
                Some(segment(FIN | ACK, self.oldest, self.expected, unacknowledged.saturating_sub(1)))
            }
            state if state.is_synchronized() => {
                Some(segment(ACK, self.oldest, self.expected, unacknowledged))
            }
            _ => None,
        }
    }

    /// Receives a segment; returns the answer. `first` is the initial sequence number with which a listener accepts.
    pub(crate) fn receive(&mut self, segment: &Segment, first: u32) -> Option<Segment> {
        match self.state {
            State::Closed => refuse(segment),
            State::Listen => self.receive_listening(segment, first),
            State::SynSent => self.receive_syn_sent(segment),
            _ => self.receive_synchronized(segment),
        }
    }

    /// Receives a segment in state LISTEN (RFC 9293 §3.10.7.2).
    fn receive_listening(&mut self, segment: &Segment, first: u32) -> Option<Segment> {
        if segment.flags & (RST | ACK | SYN) != SYN {
            return refuse(segment);
        }
        self.begin(first, State::SynReceived);
        self.expected = segment.seq.wrapping_add(1);
        self.retransmit()
    }

    /// Receives a segment in state SYN-SENT (RFC 9293 §3.10.7.3), without simultaneous opens: the server of this model
    /// never connects.
    fn receive_syn_sent(&mut self, segment: &Segment) -> Option<Segment> {
        let acknowledges = segment.flags & ACK != 0;
        if acknowledges && segment.ack != self.next {
            return refuse(segment);
        }
        if segment.flags & RST != 0 {
            self.state = if acknowledges { State::Closed } else { self.state };
            return None;
        }
        if segment.flags & SYN == 0 || !acknowledges {
            return None;
        }
        (self.state, self.oldest) = (State::Established, segment.ack);
        self.expected = segment.seq.wrapping_add(1);
        Some(self.acknowledgement())
    }

    /// Receives a segment in any later state (RFC 9293 §3.10.7.4).
    fn receive_synchronized(&mut self, segment: &Segment) -> Option<Segment> {
        let last = segment.end().wrapping_sub(u32::from(segment.end() != segment.seq));
        let is_within = |seq: u32| seq.wrapping_sub(self.expected) < WINDOW;
        if !is_within(segment.seq) && !is_within(last) {
            return (segment.flags & RST == 0).then(|| self.acknowledgement());
        }
        if segment.flags & RST != 0 {
            if segment.seq != self.expected {
                return Some(self.acknowledgement());
            }
            (self.state, self.ended_orderly) = (State::Closed, false);
            return None;
        }
        if segment.flags & SYN != 0 {
            return Some(self.acknowledgement());
        }
        if segment.flags & ACK == 0 {
            return None;
        }
        if self.state == State::SynReceived {
            if segment.ack != self.next {
                return refuse(segment);
            }
            self.state = State::Established;
        }
        if segment.ack.wrapping_sub(self.oldest) > self.next.wrapping_sub(self.oldest) {
            // The ACK is old, or acknowledges data that was never sent.
            return Some(self.acknowledgement());
        }
        self.acknowledged(segment.ack);
        self.take(segment)
    }

    /// Records that everything before `ack` has arrived at the other end. Changes the state if the FIN of this end has
    /// arrived there.
    fn acknowledged(&mut self, ack: u32) {
        self.oldest = ack;
        if ack == self.next {
            self.state = match self.state {
                State::FinWait1 => State::FinWait2,
                State::Closing => State::TimeWait,
                State::LastAck => State::Closed,
                state => state,
            };
            self.ended_orderly |= matches!(self.state, State::TimeWait | State::Closed);
        }
    }

    /// Takes data and FIN, if nothing before them is missing.
    fn take(&mut self, segment: &Segment) -> Option<Segment> {
        let empty = segment.end() == segment.seq;
        let known = self.expected.wrapping_sub(segment.seq);
        if empty || known >= segment.end().wrapping_sub(segment.seq) {
            return (!empty).then(|| self.acknowledgement());
        }
        self.expected = segment.end();
        if segment.flags & FIN != 0 {
            self.state = match self.state {
                State::Established => State::CloseWait,
                State::FinWait1 => State::Closing,
                State::FinWait2 => State::TimeWait,
                state => state,
            };
            self.ended_orderly |= self.state == State::TimeWait;
        }
        Some(self.acknowledgement())
    }

    fn acknowledgement(&self) -> Segment {
        segment(ACK, self.next, self.expected, 0)
    }
}

/// The RST that answers an unacceptable segment (RFC 9293 §3.10.7.1); `None` if that segment is itself a RST.
fn refuse(segment: &Segment) -> Option<Segment> {
    if segment.flags & RST != 0 {
        None
    } else if segment.flags & ACK != 0 {
        Some(self::segment(RST, segment.ack, 0, 0))
    } else {
        Some(self::segment(RST | ACK, 0, segment.end(), 0))
    }
}

pub(crate) fn segment(flags: u8, seq: u32, ack: u32, payload: u32) -> Segment {
    Segment { flags, seq, ack, payload }
}
