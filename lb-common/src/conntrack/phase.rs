use super::{Flow, Tick, seen};
use crate::protocol;

/// The state of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The client has sent packets, and no backend has answered yet. (This and all phases up to [`Self::Closed`] are
    /// for TCP and SCTP.)
    Opening,
    /// The backend has answered, and the client has sent no valid acknowledgement yet.
    Accepted,
    /// The handshake is complete.
    Established,
    /// One direction has sent FIN.
    HalfClosed,
    /// Both directions have sent FIN; in a tunnelled flow, only the client needs to have sent it.
    TimeWait,
    /// A RST has ended the connection.
    Closed,
    /// UDP: the backend has not answered yet. A tunnelled flow, whose replies bypass this node, stays in this phase
    /// until it becomes a [`Self::Stream`].
    Unreplied,
    /// UDP: the backend has answered, and the datagrams of neither direction span more than about 2 s.
    Replied,
    /// UDP: the datagrams of at least one direction span more than about 2 s, and the backend has answered. (A
    /// tunnelled flow needs no answer, because this node does not see it.)
    Stream,
}

impl Phase {
    /// All phases.
    pub const ALL: [Self; 9] = [
        Self::Opening,
        Self::Accepted,
        Self::Established,
        Self::HalfClosed,
        Self::TimeWait,
        Self::Closed,
        Self::Unreplied,
        Self::Replied,
        Self::Stream,
    ];

    /// The phase of the flow with these two entries. A flow through a tunnel has only the forward entry: see
    /// [`Self::of_one_way`].
    pub const fn of(forward: &Flow, reply: &Flow) -> Self {
        if forward.is_tunnelled() {
            return Self::of_one_way(forward);
        }
        let either = forward.seen | reply.seen;
        let both = forward.seen & reply.seen;
        let replied = reply.seen & seen::PACKET != 0;
        if forward.to.protocol == protocol::UDP {
            return match (replied, either & seen::STREAM != 0) {
                (false, _) => Self::Unreplied,
                (true, false) => Self::Replied,
                (true, true) => Self::Stream,
            };
        }
        if either & seen::RST != 0 {
            Self::Closed
        } else if !replied {
            // An unanswered flow must not hold an entry for longer than a SYN does, whatever the client sends.
            Self::Opening
        } else if forward.seen & seen::ACK == 0 || !forward.acknowledges_only_sent(reply) {
            // The client has not completed the handshake, so whatever else it has sent may be forged.
            Self::Accepted
        } else if both & seen::FIN != 0 {
            Self::TimeWait
        } else if either & seen::FIN != 0 {
            Self::HalfClosed
        } else {
            Self::Established
        }
    }

    /// The phase of the flow with this entry and, if the flow table has it, its `other` entry: the reverse entry of a
    /// forward entry, or the other way round.
    #[inline(always)]
    pub const fn of_entry(entry: &Flow, other: Option<&Flow>) -> Self {
        match other {
            Some(reply) if !entry.is_reply() => Self::of(entry, reply),
            Some(forward) => Self::of(forward, entry),
            None if entry.is_tunnelled() => Self::of_one_way(entry),
            None => Self::of_half(entry),
        }
    }

    /// The phase of a flow whose other entry is lost, as far as this entry determines it. When a GC pass has restored
    /// the other entry from this one, [`Self::of`] returns the same phase. A TCP connection with an ACK counts as
    /// established, even if its backend has only accepted it: one entry alone may not show whether the handshake is
    /// complete, and no client can cause the loss of the other entry.
    const fn of_half(entry: &Flow) -> Self {
        let is_replied = entry.is_reply() && entry.seen & seen::PACKET != 0;
        if entry.to.protocol == protocol::UDP {
            return match (is_replied, entry.seen & seen::STREAM != 0) {
                (false, _) => Self::Unreplied,
                (true, false) => Self::Replied,
                (true, true) => Self::Stream,
            };
        }
        if entry.seen & seen::RST != 0 {
            return Self::Closed;
        }
        // In TCP, an ACK shows that the other side has sent a SYN.
        match (entry.to.protocol == protocol::TCP && entry.seen & seen::ACK != 0, is_replied) {
            (true, _) if entry.seen & seen::FIN != 0 => Self::HalfClosed,
            (true, _) => Self::Established,
            (false, true) => Self::Accepted,
            (false, false) => Self::Opening,
        }
    }

    /// The phase of a flow whose replies bypass this node. An ACK after a SYN stands for the backend's answer, and the
    /// client's FIN for both FINs.
    pub const fn of_one_way(forward: &Flow) -> Self {
        const BEGUN: u8 = seen::SYN | seen::ACK;
        if forward.to.protocol == protocol::UDP {
            return if forward.seen & seen::STREAM != 0 { Self::Stream } else { Self::Unreplied };
        }
        if forward.seen & seen::RST != 0 {
            Self::Closed
        } else if forward.seen & seen::FIN != 0 {
            Self::TimeWait
        } else if forward.seen & BEGUN == BEGUN {
            Self::Established
        } else {
            Self::Opening
        }
    }

    /// Whether a flow in this phase may be evicted when the flow table is nearly full: true for every phase but
    /// [`Self::Established`]. (Tunnelled flows may be evicted in every phase.) A sender with a forged address can begin
    /// flows that never complete a handshake, and UDP flows: UDP has no handshake, and a stream is two datagrams and an
    /// answer. A connection that is closing may be evicted as in nf_conntrack (`tcp_can_early_drop`).
    pub const fn is_evictable(self) -> bool {
        !matches!(self, Self::Established)
    }

    /// Whether the connection is over, so that a SYN from the same client port begins a new one and is no
    /// retransmission.
    pub const fn is_over(self) -> bool {
        matches!(self, Self::TimeWait | Self::Closed)
    }

    /// Tick of the last packet that shows that the client is there; the flow has been idle since then. Until the
    /// handshake is complete, only packets of the client show that: the backend of a forged SYN repeats its SYN-ACK for
    /// half a minute. `entry` and `other` are as in [`Self::of_entry`].
    #[inline(always)]
    pub fn last_used(self, entry: &Flow, other: Option<&Flow>) -> Tick {
        let is_unproven = matches!(self, Self::Opening | Self::Accepted);
        match other {
            None => entry.last_seen,
            Some(reply) if !is_unproven => entry.last_seen.max(reply.last_seen),
            Some(forward) if entry.is_reply() => forward.last_seen,
            Some(_) => entry.last_seen,
        }
    }

    /// The name used in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Accepted => "accepted",
            Self::Established => "established",
            Self::HalfClosed => "half-closed",
            Self::TimeWait => "time-wait",
            Self::Closed => "closed",
            Self::Unreplied => "unreplied",
            Self::Replied => "replied",
            Self::Stream => "stream",
        }
    }
}

impl Flow {
    /// Whether this is the only entry that is left of a flow with two entries; `other` is as in [`Phase::of_entry`].
    /// False for a tunnelled flow, which never has two.
    pub const fn is_half(&self, other: Option<&Self>) -> bool {
        other.is_none() && !self.is_tunnelled()
    }

    /// Whether the backend has left the client's SYN and `retries` retransmissions of it unanswered.
    #[inline(always)]
    pub fn is_unanswered(&self, phase: Phase, retries: u16) -> bool {
        phase == Phase::Opening && self.syns > retries
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        Segment, chunk,
        fixtures::{ACK, FIN, NOW, RST, SYN, pair, segment, tunnelled},
    };
    use super::*;

    #[test]
    fn ack_for_unsent_data_never_establishes_a_flow() {
        for (guess, phase) in
            [(5001, Phase::Established), (80_000, Phase::Accepted), (1 << 30, Phase::Accepted)]
        {
            let (mut forward, mut reply) = pair(protocol::TCP);
            forward.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
            reply.observe_segment(&segment(SYN | ACK, 5000, 1001, 0), NOW);
            forward.observe_segment(&segment(ACK, 1001, guess, 0), NOW);
            assert_eq!(Phase::of(&forward, &reply), phase, "{guess}");
        }
    }

    #[test]
    fn phase_of_a_tunnelled_flow_depends_on_the_client_alone() {
        let mut flow = tunnelled(protocol::TCP);
        let phase = |flow: &Flow| Phase::of(flow, &pair(protocol::TCP).1);
        assert_eq!(phase(&flow), Phase::Opening);
        flow.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        flow.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        assert_eq!(phase(&flow), Phase::Opening, "not answered yet");
        flow.observe_segment(&segment(ACK, 1001, 5001, 7), NOW);
        assert_eq!(phase(&flow), Phase::Established);
        for (seq, accepted) in [(1007, false), (1008, true), (1009, false), (5001, false)] {
            assert_eq!(flow.accepts_reset_alone(&segment(RST, seq, 0, 0)), accepted, "{seq}");
        }
        flow.observe_segment(&segment(FIN | ACK, 1008, 5001, 0), NOW);
        assert_eq!(phase(&flow), Phase::TimeWait);
        flow.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        assert_eq!(phase(&flow), Phase::TimeWait, "a late SYN; that of a new connection begins another flow");
        flow.seen |= seen::RST;
        assert_eq!(phase(&flow), Phase::Closed);
    }

    /// If packets without a SYN established a flow, one forged packet would hold an entry for a day.
    #[test]
    fn tunnelled_flow_without_a_syn_is_never_established() {
        let mut flow = tunnelled(protocol::TCP);
        assert!(!flow.accepts_reset_alone(&segment(RST, 0, 0, 0)), "nothing was sent");
        flow.observe_segment(&segment(ACK, 1001, 5001, 7), NOW);
        assert_eq!(Phase::of(&flow, &flow), Phase::Opening);
        flow.observe_segment(&segment(FIN | ACK, 1008, 5001, 0), NOW);
        assert_eq!(Phase::of(&flow, &flow), Phase::TimeWait);
    }

    #[test]
    fn tunnelled_datagrams_become_a_stream_after_a_while() {
        let mut flow = tunnelled(protocol::UDP);
        flow.observe_datagram(NOW);
        assert_eq!(Phase::of(&flow, &flow), Phase::Unreplied);
        flow.observe_datagram(Tick(NOW.0 + 5));
        assert_eq!(Phase::of(&flow, &flow), Phase::Stream);
    }

    #[test]
    fn tcp_connection_passes_through_its_phases() {
        let (mut forward, mut reply) = pair(protocol::TCP);
        forward.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Opening);
        reply.observe_segment(&segment(SYN | ACK, 5000, 1001, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Accepted);
        forward.observe_segment(&segment(ACK, 1001, 5001, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Established);
        forward.observe_segment(&segment(FIN | ACK, 1001, 5001, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::HalfClosed);
        reply.observe_segment(&segment(FIN | ACK, 5001, 1002, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::TimeWait);
        assert!(Phase::of(&forward, &reply).is_over());
    }

    #[test]
    fn fin_before_the_handshake_is_complete_closes_nothing() {
        for (flags, ack) in [(FIN, 0), (FIN | ACK, 0x4000_0000)] {
            let (mut forward, mut reply) = pair(protocol::TCP);
            forward.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
            reply.observe_segment(&segment(SYN | ACK, 5000, 1001, 0), NOW);
            forward.observe_segment(&segment(flags, 1001, ack, 0), NOW);
            assert_eq!(Phase::of(&forward, &reply), Phase::Accepted, "{flags:#x}");
            reply.observe_segment(&segment(FIN | ACK, 5001, 1001, 0), NOW);
            assert_eq!(Phase::of(&forward, &reply), Phase::Accepted, "{flags:#x}");
        }
    }

    #[test]
    fn retransmitted_syn_ack_does_not_renew_an_unproven_flow() {
        let (mut forward, mut reply) = pair(protocol::TCP);
        let later = Tick(NOW.0 + 3);
        forward.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        reply.observe_segment(&segment(SYN | ACK, 5000, 1001, 0), later);
        let last_used =
            |forward: &Flow, reply: &Flow| Phase::of(forward, reply).last_used(forward, Some(reply));
        assert_eq!(last_used(&forward, &reply), NOW);
        forward.observe_segment(&segment(ACK, 1001, 5001, 0), NOW);
        assert_eq!(last_used(&forward, &reply), later, "established");
    }

    #[test]
    fn unanswered_fin_holds_an_entry_no_longer_than_a_syn() {
        let (mut forward, reply) = pair(protocol::TCP);
        forward.observe_segment(&segment(FIN | ACK, 1000, 1, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Opening);
    }

    #[test]
    fn udp_flow_is_replied_once_the_backend_has_answered() {
        let (mut forward, mut reply) = pair(protocol::UDP);
        forward.observe_datagram(NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Unreplied);
        reply.observe_datagram(NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Replied);
        forward.observe_datagram(Tick(NOW.0 + 1));
        assert_eq!(Phase::of(&forward, &reply), Phase::Replied, "within 2 s");
        forward.observe_datagram(Tick(NOW.0 + 3));
        assert_eq!(Phase::of(&forward, &reply), Phase::Stream);
    }

    #[test]
    fn sctp_association_passes_through_its_phases() {
        let (mut forward, mut reply) = pair(protocol::SCTP);
        let packet = |kind, tag| Segment::of_chunk(kind, tag, 20);
        const COOKIE_ECHO: u8 = 10;
        const COOKIE_ACK: u8 = 11;
        forward.observe_chunk(&packet(chunk::INIT, 0), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Opening);
        reply.observe_chunk(&packet(chunk::INIT_ACK, 0xc11e), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Accepted);
        forward.observe_chunk(&packet(COOKIE_ECHO, 0x5e4e), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Accepted, "the cookie may be forged");
        reply.observe_chunk(&packet(COOKIE_ACK, 0xc11e), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::Established);
        for (tag, accepted) in [(0xc11e, true), (0x5e4e, true), (0xbad, false), (0, false)] {
            assert_eq!(reply.accepts_reset(&packet(chunk::ABORT, tag), &forward), accepted, "{tag:x}");
        }
        forward.observe_chunk(&packet(chunk::SHUTDOWN, 0x5e4e), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::HalfClosed);
        reply.observe_chunk(&packet(chunk::SHUTDOWN_ACK, 0xc11e), NOW);
        assert_eq!(Phase::of(&forward, &reply), Phase::TimeWait);
    }
}
