//! Flows whose backend gets a PROXY protocol header: what happens to each segment.
//!
//! The *base* is the sequence number of the client's first byte. The header occupies the sequence numbers from there
//! on, so the backend sees the client's bytes later in the sequence: the programs add the length of the header to
//! sequence numbers towards the backend, and subtract it from acknowledgements towards the client. The ACK that
//! completes the client's handshake has no payload, so the programs make the header the payload of this ACK. A backend
//! that speaks first thus also gets the header at once, and no segment that has a payload grows.
//!
//! TCP itself repairs a lost header. The backend then repeats its SYN-ACK, which the client answers with the same ACK;
//! or the client, whose first bytes stay unacknowledged, repeats them. Either segment carries the header again, until
//! the backend has acknowledged all of it.

use lb_common::conntrack::{Flow, Segment, seen, tcp_flags};

/// What the programs do with a segment towards the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ToBackend {
    /// Change nothing: the segment comes before the header, or is a RST to a backend that has probably not received the
    /// header.
    Unchanged = 0,
    /// Remove payload and TCP Fast Open: a SYN must not carry bytes that would come before the header.
    Bare = 1,
    /// Add the length of the header to the sequence number.
    Shift = 2,
    /// Send the header in place of the payload. If the segment has a payload or FIN, the client's bytes follow in a
    /// copy of the segment, or when the client repeats them.
    Header = 3,
}

/// What the programs do with a segment of the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ToClient {
    /// Change nothing: the segment acknowledges nothing, or less than the SYN.
    Unchanged = 0,
    /// Subtract the length of the header from the window, so that the client's first bytes fit behind the header.
    Accept = 1,
    /// The backend lacks the header, or part of it: acknowledge nothing but the SYN. Selective acknowledgements are
    /// removed, because the client would read them as acknowledgements of its own first bytes.
    AcknowledgeSyn = 2,
    /// The backend has the header: subtract the length of the header from the acknowledgement number and from selective
    /// acknowledgements.
    Shift = 3,
}

/// The sequence number of the client's first byte, as the client counts; valid until the backend has acknowledged the
/// header. The last acknowledgement towards the client has this value, because the programs acknowledge nothing but the
/// SYN as long as the backend lacks the header.
#[inline(always)]
const fn base(reply: &Flow) -> u32 {
    reply.last_ack
}

/// Whether the flow with this entry has lost its reverse entry. Then the programs no longer know whether the backend
/// has the header, and treat the next segment as one of an unknown connection.
#[inline(always)]
pub fn is_lost(flow: &Flow, has_reverse_entry: impl FnOnce() -> bool) -> bool {
    flow.has_proxy_header() && !flow.is_reply() && !has_reverse_entry()
}

/// What happens to a segment of the client, whose flow has the entries `forward` and `reply`.
#[inline(always)]
pub const fn to_backend(segment: &Segment, forward: &Flow, reply: &Flow) -> ToBackend {
    if segment.flags & tcp_flags::SYN != 0 {
        return ToBackend::Bare;
    }
    let is_accepted = reply.seen & seen::ACK != 0;
    let is_sent = forward.seen & seen::PROXY_HEADER != 0;
    let is_rst = segment.is_rst();
    if !is_accepted || is_rst && !is_sent {
        return ToBackend::Unchanged;
    }
    if reply.seen & seen::PROXY_HEADER != 0 || segment.seq != base(reply) {
        return ToBackend::Shift;
    }
    if is_rst {
        // The client has sent no bytes. Whether the backend has the header is unknown, and the backend accepts a RST
        // only with the exact sequence number. So the first RST assumes that the backend has the header. If not, the
        // backend answers with an ACK (RFC 5961 §3.2), which the client answers with the next RST.
        return if forward.seen & seen::RST == 0 { ToBackend::Shift } else { ToBackend::Unchanged };
    }
    if segment.flags & tcp_flags::ACK == 0 {
        return ToBackend::Shift;
    }
    let is_empty = segment.end() == segment.seq;
    let is_repeated = forward.next_seq != base(reply);
    if is_empty || is_repeated || !is_sent { ToBackend::Header } else { ToBackend::Shift }
}

/// What happens to a segment of the backend; `header` is the length of the PROXY protocol header in bytes.
#[inline(always)]
pub const fn to_client(segment: &Segment, reply: &Flow, header: u32) -> ToClient {
    if segment.flags & tcp_flags::ACK == 0 {
        return ToClient::Unchanged;
    }
    if segment.flags & tcp_flags::SYN != 0 {
        return ToClient::Accept;
    }
    // Either the backend has not accepted the connection, so `base` is not known yet: the segment refuses the
    // connection, or answers for an earlier connection. Or the flow is an earlier connection of the client's port, and
    // the segment refuses a new connection: a RST that answers a SYN has the sequence number 0 (RFC 9293 §3.10.7.1),
    // and the client checks the acknowledgement number of that RST.
    if reply.seen & seen::SYN == 0 || segment.is_rst() && segment.seq == 0 {
        return ToClient::Unchanged;
    }
    let bytes = segment.ack.wrapping_sub(base(reply));
    if reply.seen & seen::PROXY_HEADER != 0 || bytes >= header && bytes.cast_signed() > 0 {
        ToClient::Shift
    } else if bytes < header {
        ToClient::AcknowledgeSyn
    } else {
        ToClient::Unchanged
    }
}

#[cfg(test)]
mod tests {
    use lb_common::{
        Address,
        conntrack::{
            Tick, Tuple, flow_flags,
            tcp_flags::{ACK, FIN, RST, SYN},
        },
        protocol::TCP,
    };

    use super::*;

    const HEADER: u32 = 28;
    /// The sequence number of the client's first byte: sequence numbers wrap around within the header.
    const BASE: u32 = 0xffff_fff0;
    const NOW: Tick = Tick(1);

    /// The entries after SYN and SYN-ACK, with these further bits of `seen`.
    fn accepted(forward_seen: u8, reply_seen: u8) -> (Flow, Flow) {
        let address = |last| Address::from_v4([192, 0, 2, last]);
        let from = Tuple::new(address(1), address(2), 40_000, 80, TCP);
        let to = Tuple { destination: address(3), ..from };
        let flags = flow_flags::PROXY_PROTOCOL;
        let mut forward = Flow::new(&from, &to, 1, flags, NOW);
        let mut reply = Flow::new(&to.reversed(), &from.reversed(), 1, flow_flags::reverse(flags), NOW);
        forward.observe_segment(&segment(SYN, BASE.wrapping_sub(1), 0, 0), NOW);
        reply.observe_segment(&segment(SYN | ACK, 5000, BASE, 0), NOW);
        forward.seen |= forward_seen;
        reply.seen |= reply_seen;
        (forward, reply)
    }

    const fn segment(flags: u8, seq: u32, ack: u32, payload: u32) -> Segment {
        Segment { flags, seq, ack, payload }
    }

    #[test]
    fn flow_without_reverse_entry_is_lost() {
        let (forward, reply) = accepted(0, 0);
        assert!(is_lost(&forward, || false) && !is_lost(&forward, || true) && !is_lost(&reply, || false));
        assert!(!is_lost(&Flow { flags: 0, ..forward }, || false));
    }

    #[test]
    fn segments_before_the_answer_of_the_backend_stay() {
        let (forward, mut reply) = accepted(0, 0);
        reply.seen = 0;
        assert_eq!(to_backend(&segment(SYN, BASE.wrapping_sub(1), 0, 0), &forward, &reply), ToBackend::Bare);
        for flags in [RST, ACK, RST | ACK] {
            let found = to_backend(&segment(flags, BASE, 5001, 0), &forward, &reply);
            assert_eq!(found, ToBackend::Unchanged, "{flags}");
        }
    }

    #[test]
    fn empty_segment_at_the_base_carries_the_header_until_it_is_acknowledged() {
        use ToBackend::{Header, Shift};
        for (sent, acknowledged, expected) in [(0, 0, Header), (1, 0, Header), (1, 1, Shift)] {
            let (forward, reply) = accepted(sent * seen::PROXY_HEADER, acknowledged * seen::PROXY_HEADER);
            let found = to_backend(&segment(ACK, BASE, 5001, 0), &forward, &reply);
            assert_eq!(found, expected, "sent {sent}, acknowledged {acknowledged}");
        }
    }

    #[test]
    fn first_bytes_wait_for_the_header_and_repeated_ones_send_it_again() {
        use ToBackend::{Header, Shift};
        let (unsent, reply) = accepted(0, 0);
        let (sent, _) = accepted(seen::PROXY_HEADER, 0);
        let mut repeated = sent;
        repeated.observe_segment(&segment(ACK, BASE, 5001, 100), NOW);
        for (forward, at_base, later) in
            [(unsent, Header, Shift), (sent, Shift, Shift), (repeated, Header, Shift)]
        {
            for flags in [ACK, ACK | FIN] {
                let at = |seq: u32| to_backend(&segment(flags, seq, 5001, 100), &forward, &reply);
                assert_eq!((at(BASE), at(BASE.wrapping_add(100))), (at_base, later), "{flags}");
            }
        }
        let fin = to_backend(&segment(ACK | FIN, BASE, 5001, 0), &unsent, &reply);
        assert_eq!(fin, Header, "a client that closes at once");
        let keepalive = to_backend(&segment(ACK, BASE.wrapping_sub(1), 5001, 0), &sent, &reply);
        assert_eq!(keepalive, Shift);
    }

    #[test]
    fn reset_of_a_client_without_bytes_tries_both_numbers() {
        use ToBackend::{Shift, Unchanged};
        for (sent, acknowledged, reset, expected) in
            [(0, 0, 0, Unchanged), (1, 0, 0, Shift), (1, 0, 1, Unchanged), (1, 1, 0, Shift), (1, 1, 1, Shift)]
        {
            let seen = (sent * seen::PROXY_HEADER) | (reset * seen::RST);
            let (forward, reply) = accepted(seen, acknowledged * seen::PROXY_HEADER);
            let found = to_backend(&segment(RST, BASE, 0, 0), &forward, &reply);
            assert_eq!(found, expected, "sent {sent}, acknowledged {acknowledged}, reset {reset}");
        }
    }

    #[test]
    fn backend_acknowledges_header_and_bytes() {
        use ToClient::{Accept, AcknowledgeSyn, Shift, Unchanged};
        let (_, waiting) = accepted(0, 0);
        let (_, whole) = accepted(0, seen::PROXY_HEADER);
        for (flags, ack, before, after) in [
            (SYN | ACK, 0, Accept, Accept),
            (RST, 0, Unchanged, Unchanged),
            (ACK, 0, AcknowledgeSyn, Shift),
            (RST | ACK, 0, AcknowledgeSyn, Shift),
            (ACK, 0_u32.wrapping_sub(1), Unchanged, Shift),
            (ACK, HEADER - 1, AcknowledgeSyn, Shift),
            (ACK, HEADER, Shift, Shift),
            (ACK | FIN, HEADER + 100, Shift, Shift),
        ] {
            let segment = segment(flags, 5001, BASE.wrapping_add(ack), 0);
            let found = (to_client(&segment, &waiting, HEADER), to_client(&segment, &whole, HEADER));
            assert_eq!(found, (before, after), "{flags}, {ack}");
        }
    }

    #[test]
    fn refusal_of_a_new_connection_stays_as_it_is() {
        for seen in [0, seen::PROXY_HEADER] {
            let (_, reply) = accepted(0, seen);
            for ack in [1001, BASE, BASE.wrapping_add(HEADER)] {
                let found = to_client(&segment(RST | ACK, 0, ack, 0), &reply, HEADER);
                assert_eq!(found, ToClient::Unchanged, "{seen}, {ack}");
            }
        }
    }

    #[test]
    fn segments_of_a_backend_that_has_not_accepted_stay_as_they_are() {
        let (_, accepted) = accepted(0, 0);
        let fresh = Flow { seen: 0, next_seq: 0, last_ack: 0, ..accepted };
        // The backend has answered for an earlier connection of the client's port.
        let challenged = Flow { seen: seen::PACKET | seen::ACK, last_ack: 77, ..fresh };
        for (flags, ack) in [(RST | ACK, 1001), (ACK, 1001), (RST | ACK, 5), (ACK, 0x9000_0000)] {
            for reply in [fresh, challenged] {
                let found = to_client(&segment(flags, 0, ack, 0), &reply, HEADER);
                assert_eq!(found, ToClient::Unchanged, "{flags}, {ack}");
            }
        }
    }
}
