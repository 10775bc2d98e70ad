//! The changes that a packet makes to the entry of its direction, and which RST ends a flow.

use super::{Flow, Segment, Tick, seen, tcp_flags};
use crate::protocol;

impl Flow {
    /// Ticks after which further datagrams make a stream: about 2 s, as in nf_conntrack.
    const STREAM_AFTER: u32 = 2;

    /// Maximum number of bytes that a direction may have sent without its entry counting them, such as those of later
    /// fragments.
    const UNSEEN: u32 = 65_536;

    /// Records a datagram of this direction.
    #[inline(always)]
    pub fn observe_datagram(&mut self, now: Tick) {
        self.last_seen = now;
        if self.seen & seen::PACKET == 0 {
            self.next_seq = now.0;
        } else if now.0.wrapping_sub(self.next_seq) > Self::STREAM_AFTER {
            self.seen |= seen::STREAM;
        }
        self.seen |= seen::PACKET;
    }

    /// The largest plausible distance between a segment's sequence or acknowledgement number and the last recorded one:
    /// more bytes than the buffers of Linux hold in flight (`tcp_rmem`, at most 32 MiB by default).
    const PLAUSIBLE: u32 = 1 << 26;

    /// Records a TCP segment of this direction other than a RST (for a RST see [`Self::accepts_reset`]).
    ///
    /// A segment without SYN is implausible if its sequence or acknowledgement number is far from the last recorded
    /// one. A SYN is implausible once the direction is synchronised, unless it [accepts a
    /// connection](Self::accepts_connection). An implausible segment changes nothing but the time of the last packet:
    /// it is forged, or it is outside the window and the receiver rejects it (RFC 9293 §3.10.7.4, RFC 5961 §4.2). A
    /// sender that is not on the path of the connection guesses both numbers with a probability of 1 in 1,024.
    #[inline(always)]
    pub fn observe_segment(&mut self, segment: &Segment, now: Tick) {
        self.last_seen = now;
        if self.seen & seen::PACKET != 0 && !self.is_plausible(segment) {
            return;
        }
        let end = segment.end();
        let first = self.seen & seen::PACKET == 0 || segment.flags & tcp_flags::SYN != 0;
        if first || is_after(end, self.next_seq) {
            self.next_seq = end;
        }
        self.note_flags(segment);
        if segment.flags & tcp_flags::SYN == 0 {
            self.seen |= seen::SYNCHRONISED;
        }
    }

    /// Whether the segment is a backend's first answer to a SYN: a SYN-ACK that is no late or repeated segment of the
    /// connection in this entry. (In a late or repeated segment, the sequence and acknowledgement numbers both lie a
    /// little behind the last recorded numbers.) If client and backend have closed the connection in this entry unseen
    /// by this node, the answer begins another connection. No client can forge the answer of a backend.
    #[inline(always)]
    pub const fn accepts_connection(&self, segment: &Segment) -> bool {
        // One comparison for both distances, as the limit is a power of two.
        let behind = self.next_seq.wrapping_sub(segment.end()) | self.last_ack.wrapping_sub(segment.ack);
        let is_new = self.seen & seen::PACKET == 0 || behind >= Self::PLAUSIBLE;
        self.is_reply() && segment.is_syn_ack() && is_new
    }

    /// Takes over the sequence number of the SYN that `answer` [accepts](Self::accepts_connection), if this entry has
    /// ignored that SYN as possibly forged. This is the entry of the client's direction.
    pub const fn begin_again(&mut self, answer: &Segment) {
        if self.seen & seen::SYNCHRONISED != 0 {
            self.next_seq = answer.ack;
            self.seen &= !(seen::SYNCHRONISED | seen::ACK | seen::FIN | seen::RST | seen::PROXY_HEADER);
        }
    }

    /// Whether a segment without SYN has sequence and acknowledgement numbers near the last recorded numbers of this
    /// direction. A SYN is plausible until the direction is synchronised; from then on it begins a new connection only
    /// if the backend accepts it. (After the end of the connection a SYN begins another flow. A late SYN must not undo
    /// a FIN: netfilter also ignores it, up to the state LAST_ACK.)
    #[inline(always)]
    const fn is_plausible(&self, segment: &Segment) -> bool {
        let is_synchronised = self.seen & seen::SYNCHRONISED != 0;
        if segment.flags & tcp_flags::SYN != 0 {
            return !is_synchronised || self.accepts_connection(segment);
        }
        // A client's SYN has no acknowledgement number, so after it `last_ack` may still be that of an earlier
        // connection. A backend's SYN-ACK has one.
        let has_acknowledged = self.seen & seen::ACK != 0 && (is_synchronised || self.is_reply());
        let acknowledges = has_acknowledged && segment.flags & tcp_flags::ACK != 0;
        is_near(segment.seq, self.next_seq) && (!acknowledges || is_near(segment.ack, self.last_ack))
    }

    /// Records an SCTP packet of this direction other than an ABORT.
    #[inline(always)]
    pub fn observe_chunk(&mut self, segment: &Segment, now: Tick) {
        self.last_seen = now;
        if !segment.is_syn() {
            // The verification tag of an INIT is always 0.
            self.next_seq = segment.seq;
        }
        self.note_flags(segment);
        if segment.flags & tcp_flags::SYN == 0 {
            self.seen |= seen::SYNCHRONISED;
        }
    }

    #[inline(always)]
    fn note_flags(&mut self, segment: &Segment) {
        self.seen |= seen::PACKET;
        if segment.flags & tcp_flags::SYN != 0 {
            // A new connection: the FIN or RST of the previous one is void, and so is its PROXY protocol header.
            let earlier = seen::FIN | seen::RST | seen::SYNCHRONISED | seen::PROXY_HEADER;
            self.seen = self.seen & !earlier | seen::SYN;
            self.syns = self.syns.saturating_add(1);
        }
        if segment.flags & tcp_flags::FIN != 0 {
            self.seen |= seen::FIN;
        }
        if segment.flags & tcp_flags::ACK != 0 {
            self.last_ack = segment.ack;
            self.seen |= seen::ACK;
        }
    }

    /// Whether this direction has acknowledged only data that the entry `reverse` has recorded as sent, and at most
    /// [`Self::UNSEEN`] bytes more. A sender with a forged address never receives the replies and can only guess the
    /// sequence number of the backend; without this check the sender's SYN and ACK would hold an entry for a day. (If
    /// it guesses too low a number, the backend answers with a RST, which ends the flow.)
    ///
    /// In SCTP, whether the backend has sent more than its INIT ACK. A sender with a forged address does not have the
    /// cookie in the INIT ACK, and the backend silently discards a packet with another cookie (RFC 9260 §5.1.5).
    #[inline(always)]
    pub(super) const fn acknowledges_only_sent(&self, reverse: &Self) -> bool {
        if self.to.protocol == protocol::SCTP {
            return reverse.seen & seen::SYNCHRONISED != 0;
        }
        !is_after(self.last_ack, reverse.next_seq.wrapping_add(Self::UNSEEN))
    }

    /// Whether the receiver will accept a RST of this direction, so that the flow is over.
    ///
    /// The sequence number of the RST must lie between what the other direction has acknowledged and what this
    /// direction has sent. This range is narrower than the receive window (RFC 9293 §3.10.7.4, RFC 5961 §3.2) and needs
    /// no window scale. The sequence number that the receiver expects is always accepted, even after a SYN with another
    /// sequence number: by such a RST, a client that no longer has the connection ends it at the backend. A RST that
    /// answers a SYN must acknowledge exactly that SYN.
    ///
    /// An SCTP ABORT must carry the verification tag of its direction, or reflect the tag of the other direction (RFC
    /// 9260 §8.5.1); any answer to an INIT is accepted.
    pub const fn accepts_reset(&self, segment: &Segment, reverse: &Self) -> bool {
        if self.to.protocol == protocol::SCTP {
            let unknown = self.seen & seen::PACKET == 0;
            return unknown || segment.seq == self.next_seq || segment.seq == reverse.next_seq;
        }
        if self.seen & seen::PACKET == 0 {
            return segment.flags & tcp_flags::ACK != 0 && segment.ack == reverse.next_seq;
        }
        let oldest = if reverse.seen & seen::ACK != 0 { reverse.last_ack } else { self.next_seq };
        segment.seq == oldest || !is_after(oldest, segment.seq) && !is_after(segment.seq, self.next_seq)
    }

    /// [`Self::accepts_reset`] for a flow without reverse entry: the RST must have the next sequence number exactly.
    #[inline(always)]
    pub const fn accepts_reset_alone(&self, segment: &Segment) -> bool {
        self.seen & seen::PACKET != 0 && segment.seq == self.next_seq
    }
}

/// Whether sequence number `a` comes after `b`, modulo 2^32 (RFC 9293 §3.4).
#[inline(always)]
pub(super) const fn is_after(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) > 0
}

/// Whether two sequence numbers are at most [`Flow::PLAUSIBLE`] apart.
#[inline(always)]
const fn is_near(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).wrapping_add(Flow::PLAUSIBLE) <= 2 * Flow::PLAUSIBLE
}

#[cfg(test)]
mod tests {
    use super::super::{
        Phase, Tick,
        fixtures::{ACK, FIN, NOW, RST, SYN, established, pair, segment},
    };
    use super::{Flow, seen};
    use crate::protocol;

    #[test]
    fn reset_between_acknowledged_and_sent_is_accepted() {
        let (forward, mut reply) = established();
        reply.observe_segment(&segment(ACK, 5001, 1001, 3000), NOW);
        for seq in [5001, 6500, 8001] {
            assert!(reply.accepts_reset(&segment(RST, seq, 0, 0), &forward), "seq {seq}");
        }
        for seq in [5000, 8002, 5001u32.wrapping_add(1 << 31)] {
            assert!(!reply.accepts_reset(&segment(RST, seq, 0, 0), &forward), "seq {seq}");
        }
    }

    #[test]
    fn reset_that_refuses_a_connection_must_acknowledge_its_syn() {
        let (mut forward, reply) = pair(protocol::TCP);
        forward.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        assert!(reply.accepts_reset(&segment(RST | ACK, 0, 1001, 0), &forward));
        assert!(!reply.accepts_reset(&segment(RST | ACK, 0, 1000, 0), &forward));
        assert!(!reply.accepts_reset(&segment(RST, 0, 1001, 0), &forward));
    }

    #[test]
    fn client_may_reset_its_own_unanswered_syn() {
        let (mut forward, reply) = pair(protocol::TCP);
        forward.observe_segment(&segment(SYN, u32::MAX, 0, 0), NOW);
        assert!(forward.accepts_reset(&segment(RST, 0, 0, 0), &reply));
        assert!(!forward.accepts_reset(&segment(RST, 1, 0, 0), &reply));
    }

    /// RFC 9293 §3.5.1: the server answers the SYN with an ACK, and the client answers that with a RST.
    #[test]
    fn client_that_has_forgotten_a_connection_resets_it() {
        for first in [0, 900, 4_000_000_000] {
            let (mut forward, mut reply) = established();
            forward.observe_segment(&segment(SYN, first, 0, 0), NOW);
            reply.observe_segment(&segment(ACK, 5001, 1001, 0), NOW);
            assert!(forward.accepts_reset(&segment(RST, 1001, 0, 0), &reply), "{first}");
            assert!(!forward.accepts_reset(&segment(RST, 1002, 0, 0), &reply) || first > 1 << 31, "{first}");
        }
    }

    #[test]
    fn sequence_numbers_wrap() {
        let (mut forward, _) = established();
        forward.next_seq = u32::MAX - 10;
        forward.observe_segment(&segment(ACK, u32::MAX - 10, 5001, 100), NOW);
        assert_eq!(forward.next_seq, 89);
        forward.observe_segment(&segment(ACK, u32::MAX - 10, 5001, 50), NOW);
        assert_eq!(forward.next_seq, 89, "a retransmission takes nothing back");
    }

    /// A connection after data in both directions.
    fn synchronised() -> (Flow, Flow) {
        let (mut forward, mut reply) = established();
        reply.observe_segment(&segment(ACK, 5001, 1001, 3000), NOW);
        forward.observe_segment(&segment(ACK, 1001, 8001, 500), NOW);
        (forward, reply)
    }

    /// If the entry recorded these segments, each would end an established connection, shorten its timeout, or widen
    /// the range of accepted RSTs.
    #[test]
    fn forged_segments_far_from_the_window_change_nothing() {
        const FAR: u32 = 1 << 30;
        let later = Tick(NOW.0 + 9);
        for (what, flags, seq, ack) in [
            ("data", ACK, 1501 + FAR, 8001),
            ("data from the past", ACK, 1501_u32.wrapping_sub(FAR), 8001),
            ("acknowledgement", ACK, 1501, 8001 + FAR),
            ("acknowledgement of the past", ACK, 1501, 8001_u32.wrapping_sub(FAR)),
            ("end", FIN | ACK, 1501 + FAR, 8001),
            ("end with a wrong acknowledgement", FIN | ACK, 1501, 8001 + FAR),
            ("new connection", SYN, 77, 0),
            ("answer to a new connection", SYN | ACK, 77, 8001),
        ] {
            let (before, reply) = synchronised();
            let mut forward = before;
            forward.observe_segment(&segment(flags, seq, ack, 10), later);
            assert_eq!(forward, Flow { last_seen: later, ..before }, "{what}");
            assert_eq!(Phase::of(&forward, &reply), Phase::Established, "{what}");
            let reset = segment(RST, seq.wrapping_add(10), 0, 0);
            assert!(!forward.accepts_reset(&reset, &reply), "{what}, and a RST after it");
        }
    }

    #[test]
    fn segments_near_the_window_are_recorded() {
        for (flags, seq, ack) in
            [(ACK, 1501 + (32 << 20), 8001), (ACK, 1501, 8001 + (32 << 20)), (FIN | ACK, 1501, 8001)]
        {
            let (mut forward, _) = synchronised();
            forward.observe_segment(&segment(flags, seq, ack, 10), NOW);
            assert_eq!((forward.last_ack, forward.seen & seen::FIN != 0), (ack, flags & FIN != 0));
            assert_eq!(forward.next_seq, seq + 10 + u32::from(flags & FIN != 0));
        }
    }

    /// The client has reused a port, and the node has not seen the end of the earlier connection.
    #[test]
    fn new_connection_from_the_port_of_an_open_flow_is_accepted() {
        let (before, mut reply) = synchronised();
        for first in [1 << 30, 1_400] {
            let mut forward = before;
            forward.observe_segment(&segment(SYN, first, 0, 0), NOW);
            assert_eq!(forward, before, "the backend decides");
            let answer = segment(SYN | ACK, 77, first + 1, 0);
            assert!(reply.accepts_connection(&answer) && !forward.accepts_connection(&answer));
            forward.begin_again(&answer);
            reply.observe_segment(&answer, NOW);
            assert!(!reply.accepts_connection(&answer), "a repetition");
            forward.observe_segment(&segment(ACK, first + 1, 78, 5), NOW);
            assert_eq!((forward.next_seq, forward.last_ack, reply.next_seq), (first + 6, 78, 78));
            assert_eq!(Phase::of(&forward, &reply), Phase::Established);
            reply.observe_segment(&segment(ACK, 78, first + 6, 9), NOW);
        }
    }

    /// The client has closed its side of the old connection, which the backend no longer has.
    #[test]
    fn connection_may_begin_again_after_the_end_of_the_client() {
        for reset in [0, seen::RST] {
            let (mut forward, mut reply) = synchronised();
            forward.observe_segment(&segment(FIN | ACK, 1501, 8001, 0), NOW);
            forward.seen |= reset;
            forward.observe_segment(&segment(SYN, 1 << 30, 0, 0), NOW);
            let answer = segment(SYN | ACK, 77, (1 << 30) + 1, 0);
            assert!(reply.accepts_connection(&answer));
            forward.begin_again(&answer);
            reply.observe_segment(&answer, NOW);
            forward.observe_segment(&segment(ACK, (1 << 30) + 1, 78, 0), NOW);
            assert_eq!((forward.next_seq, forward.last_ack), ((1 << 30) + 1, 78));
            assert_eq!(forward.seen & (seen::FIN | seen::RST), 0);
            assert_eq!(Phase::of(&forward, &reply), Phase::Established);
        }
    }

    /// The network has delayed these SYNs. If the entry recorded one, the connection would look established for a day.
    #[test]
    fn late_syns_undo_no_end() {
        let (mut forward, mut reply) = synchronised();
        forward.observe_segment(&segment(FIN | ACK, 1501, 8001, 0), NOW);
        let ended = forward;
        forward.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        assert_eq!(forward, ended, "of the client");
        reply.observe_segment(&segment(FIN | ACK, 8001, 1502, 0), NOW);
        let ended = reply;
        let answer = segment(SYN | ACK, 5000, 1001, 0);
        assert!(!reply.accepts_connection(&answer));
        reply.observe_segment(&answer, NOW);
        assert_eq!(reply, ended, "of the backend");
        assert_eq!(Phase::of(&forward, &reply), Phase::TimeWait);
    }
}
