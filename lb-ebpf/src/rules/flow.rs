//! Whether an entry applies to a packet, and whether another flow may replace or evict it.

use lb_common::{
    Outcome, Service,
    conntrack::{Flow, Phase, Pressure, Segment, Tick, Tuple, flow_flags, seconds_left_under, seen},
    flow_table::EvictionClass,
};

use crate::{parse::Body, service::schedule};

/// Whether an entry is stale for a SYN, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Staleness {
    /// The entry is valid: the SYN is a retransmission and goes to the same backend.
    Fresh = 0,
    /// The reverse entry is lost.
    HalfLost = 1,
    /// The connection has ended.
    Over = 2,
    /// The backend has left too many SYNs unanswered.
    Unanswered = 3,
    /// The service no longer has the flow's backend, and that backend has not answered: not yet, or
    /// [not any more](is_silent). A tunnelled flow counts as unanswered, because this node sees no answers.
    BackendGone = 4,
}

/// Whether the service of a flow still has the flow's backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Membership {
    /// The service has the backend.
    Member = 0,
    /// The service has backends, but no longer the flow's backend.
    Gone = 1,
    /// The service has no backends.
    NoBackends = 2,
    /// There is no such service, or the agent is replacing its record.
    NoService = 3,
}

impl Membership {
    /// Whether `service`, the record for the flow's client, still has the flow's backend; `find` returns the backend's
    /// slot, or [`schedule::NONE`]. (If the service has no record, the caller uses [`Self::NoService`].)
    #[inline(always)]
    pub fn of(service: &Service, find: impl FnOnce() -> u32) -> Self {
        if service.backends_count == 0 {
            return Self::NoBackends;
        }
        match find() {
            schedule::NONE => Self::Gone,
            _ => Self::Member,
        }
    }
}

/// How a packet relates to the flow that has its tuple.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Relation {
    /// The packet belongs to the flow.
    Same = 0,
    /// The packet belongs to the flow, which is translated at the other tc hook.
    OtherHook = 1,
    /// The packet belongs to a connection that bypasses the VIP.
    Foreign = 2,
    /// The packet begins a new flow.
    New = 3,
}

/// How a packet at tc egress (or at tc ingress, if `egress` is false) relates to the flow that has its tuple. The
/// function calls `bypasses_vip` and `is_new`, in this order, only if no earlier condition decides.
#[inline(always)]
pub fn relation(
    flow: &Flow,
    egress: bool,
    bypasses_vip: impl FnOnce() -> bool,
    is_new: impl FnOnce() -> bool,
) -> Relation {
    if egress && !is_translated_at(flow, egress) {
        Relation::OtherHook
    } else if flow.is_second() {
        // A masqueraded connection has two flows. The programs decide by the first flow whether a packet begins a new
        // connection.
        Relation::Same
    } else if bypasses_vip() {
        Relation::Foreign
    } else if is_new() {
        Relation::New
    } else {
        Relation::Same
    }
}

/// Whether a flow that replaces `flow` begins only at tc ingress. The caller has a packet that is [`Relation::New`] for
/// `flow`. At egress, `flow` is then either a connection of the node itself or a caught flow. No flow replaces a caught
/// flow at egress, and none begins at the egress of the catch device (`catch`): `tc_catch` makes the packet enter the
/// node again, and the program at ingress then creates the new flow.
#[inline(always)]
pub const fn begins_only_at_ingress(flow: &Flow, egress: bool, catch: bool) -> bool {
    catch || egress && !flow_flags::is_of_node(flow.flags)
}

/// Whether the packet is a SYN from the client. The flow can be stale only for such a packet.
#[inline(always)]
pub const fn is_syn_of_client(segment: &Segment, flow: &Flow) -> bool {
    segment.is_syn() && !flow.is_reply()
}

/// Whether the entry `flow` of a client is stale for a SYN that arrives `now`; `reply` is its reverse entry.
/// `syn_retries` is the number of retransmissions after which the programs choose another backend; 0 means never.
///
/// A connection whose backend answers stays with that backend after the service has lost it: otherwise a forged SYN of
/// the client would end the connection. A tunnelled flow does not stay, because this node sees no answers. If the
/// service has no backends, the SYN of a stale flow is rejected, or dropped if the service has
/// [`DROP_WITHOUT_BACKENDS`](lb_common::service_flags::DROP_WITHOUT_BACKENDS).
#[inline(always)]
pub fn staleness(
    flow: &Flow,
    reply: Option<&Flow>,
    syn_retries: u16,
    now: Tick,
    membership: impl FnOnce() -> Membership,
) -> Staleness {
    let phase = match reply {
        _ if flow.is_tunnelled() => Phase::of_one_way(flow),
        Some(reply) => Phase::of(flow, reply),
        None => return Staleness::HalfLost,
    };
    if phase.is_over() {
        return Staleness::Over;
    }
    if syn_retries != 0 && flow.is_unanswered(phase, syn_retries) {
        return Staleness::Unanswered;
    }
    match membership() {
        Membership::Member | Membership::NoService => Staleness::Fresh,
        Membership::Gone | Membership::NoBackends => {
            // The node sees no replies of a tunnelled flow.
            let is_silent = reply.is_none_or(|reply| is_silent(flow, reply, now));
            if is_silent { Staleness::BackendGone } else { Staleness::Fresh }
        }
    }
}

/// A minimum time in ticks: from the backend's last packet to the client's last packet, and from that packet to the SYN
/// that arrives now. A difference of 2 means more than one whole tick (1.07 s). A live backend takes less time to
/// answer a SYN with a challenge ACK (RFC 5961 §4), of which Linux sends at most one in 0.5 s.
const SILENCE: u32 = 2;

/// Whether the backend of a connection is silent: it has never answered; or it has left the client's last packet
/// unanswered, and was already silent before that packet. So a client that uses a port again reaches another backend
/// with its third or fourth SYN, while forged SYNs of a connection whose backend lives change nothing: the backend
/// answers the first of these SYNs.
const fn is_silent(forward: &Flow, reply: &Flow, now: Tick) -> bool {
    // Each of the two differences is negative (as a signed number) if the time in question was shorter than `SILENCE`.
    // One comparison checks all conditions, because the verifier follows each branch.
    let before = forward.last_seen.0.wrapping_sub(reply.last_seen.0).wrapping_sub(SILENCE);
    let since = now.0.wrapping_sub(forward.last_seen.0).wrapping_sub(SILENCE);
    let has_answered = (reply.seen & seen::PACKET) as u32;
    ((before | since) & has_answered.wrapping_neg()).cast_signed() >= 0
}

/// Whether a new flow may get another backend than the scheduler has chosen, if the chosen backend has left the
/// client's earlier SYN unanswered ([`schedule::retried`] decides whether it has). `earlier` is whether the new flow
/// replaces an entry; `syn_retries` is as for [`staleness`].
#[inline(always)]
pub const fn may_be_retried(earlier: bool, syn_retries: u16) -> bool {
    earlier && syn_retries != 0
}

/// Whether the segment is a SYN-ACK in the direction of replies. If the flow [has ended](has_ended), the segment
/// belongs to a connection that bypasses the VIP. (A new connection through the VIP would have replaced the entry.)
#[inline(always)]
pub const fn is_syn_ack_of_backend(segment: &Segment, flow: &Flow) -> bool {
    segment.is_syn_ack() && flow.is_reply()
}

/// Whether the flow of these two entries has ended.
#[inline(always)]
pub const fn has_ended(forward: &Flow, reply: &Flow) -> bool {
    Phase::of(forward, reply).is_over()
}

/// Whether a packet that leaves the node and has no flow may begin a connection of the node itself. (Such a connection
/// needs a flow if another flow [has](takes_answers_of_node) its source port.)
#[inline(always)]
pub const fn may_begin_at_egress(body: Body, segment: &Segment) -> bool {
    match body {
        Body::Tcp => segment.is_syn(),
        Body::Udp => true,
        Body::Sctp | Body::LaterFragment | Body::IcmpError | Body::Echo => false,
    }
}

/// Whether this flow would take the answers to packets of the node itself. `flow` is the entry that has the tuple of
/// these answers. A plain flow would not take them: its replies go to the client's own address, which no socket of the
/// node has.
#[inline(always)]
pub const fn takes_answers_of_node(flow: &Flow) -> bool {
    flow.is_reply() && flow.flags & flow_flags::AT_EGRESS == 0
}

/// Whether the packet has the tuple of `flow`, a connection of the node, but belongs to the other flow with the same
/// source port: the node only forwards the packet, and did not originate it. Such a packet is already translated, and
/// bypasses the stack.
#[inline(always)]
pub fn is_of_other_flow(flow: &Flow, egress: bool, from_node: impl FnOnce() -> bool) -> bool {
    egress && flow.flags == flow_flags::AT_EGRESS && !from_node()
}

/// Whether packets of the flow are translated at tc egress (or at tc ingress, if `egress` is false).
#[inline(always)]
pub const fn is_translated_at(flow: &Flow, egress: bool) -> bool {
    (flow.flags & flow_flags::AT_EGRESS != 0) == egress
}

/// The outcome of a packet of this flow at the hook that translates it. `bypasses_stack` is whether the packet leaves
/// at once because of `--forwarding direct`. For the first packet of the flow, see [`Outcome::of_first_packet`].
#[inline(always)]
pub const fn outcome(flow: &Flow, bypasses_stack: bool) -> Outcome {
    match flow.flags {
        _ if flow.is_tunnelled() => Outcome::Tunnelled,
        flags if flags & flow_flags::ROUTED != 0 || bypasses_stack => bypassing(flow),
        _ => translated_at_tc(flow),
    }
}

/// The outcome of a packet of this flow that bypasses the stack, in no tunnel.
#[inline(always)]
pub const fn bypassing(flow: &Flow) -> Outcome {
    if flow.flags & flow_flags::ROUTED != 0 { Outcome::Routed } else { Outcome::Direct }
}

/// The outcome of a packet of this flow that the programs translate at tc: they pass it to the stack, or send a hairpin
/// back through its device.
#[inline(always)]
pub const fn translated_at_tc(flow: &Flow) -> Outcome {
    match flow.flags {
        _ if flow.is_second() => Outcome::Masquerade,
        flags if flow_flags::is_of_node(flags) => Outcome::Masquerade,
        flags if flags & flow_flags::HAIRPIN != 0 => turned(flow),
        flags if flags & flow_flags::REPLY != 0 => Outcome::Reply,
        _ => Outcome::Forward,
    }
}

/// The outcome of a packet of a flow with [`flow_flags::HAIRPIN`]: both directions are translated at one hook.
#[inline(always)]
pub const fn turned(flow: &Flow) -> Outcome {
    if flow.flags & flow_flags::AT_EGRESS != 0 { Outcome::Caught } else { Outcome::Hairpin }
}

/// Ticks without a datagram after which another connection may take over the source port of a UDP flow that never
/// became a [stream](Phase::Stream). By then, a DNS resolver has stopped waiting for an answer. The flow itself expires
/// later ([`Phase::timeout_seconds`]).
const PORT_REUSE_AFTER_IDLE: u32 = 5;

/// Ticks without a segment of the client after which another connection may take over the source port of a connection
/// without a complete handshake: by then the client has retransmitted a segment, unless the client's address is forged.
/// (Clients retransmit a SYN after one second, and again two seconds later.)
const PORT_REUSE_UNPROVEN: u32 = 2;

/// Whether a new connection may take the source port of the connection with these two entries. Without such reuse, a
/// busy client or a SYN flood would use up all ports towards a backend long before the first flow expires. After an
/// orderly end the backend may still expect late segments, and a backend that has answered a datagram may get another
/// datagram of the flow, so only an `eager` caller takes the ports of such flows.
#[inline(always)]
pub fn may_be_replaced(forward: &Flow, reply: &Flow, eager: bool, now: impl FnOnce() -> Tick) -> bool {
    let phase = Phase::of(forward, reply);
    let idle_for = |ticks| now().0.saturating_sub(phase.last_used(forward, Some(reply)).0) > ticks;
    match phase {
        Phase::Closed => true,
        Phase::TimeWait => eager,
        Phase::Opening | Phase::Accepted => idle_for(PORT_REUSE_UNPROVEN),
        Phase::Unreplied => idle_for(PORT_REUSE_AFTER_IDLE),
        Phase::Replied => eager && idle_for(PORT_REUSE_AFTER_IDLE),
        Phase::Established | Phase::HalfClosed | Phase::Stream => false,
    }
}

/// Whether the client has reset its `last` connection, and that connection went to the endpoint in `to`: then the
/// endpoint no longer has a connection from the source port of `last`.
#[inline(always)]
pub fn frees_port_by_reset(last: &Flow, to: &Tuple) -> bool {
    last.seen & seen::RST != 0
        && last.to.destination == to.destination
        && last.to.destination_port == to.destination_port
}

/// Whether a new flow may take the place of this flow, if all other places are occupied: it may if this flow has
/// expired, or would have expired under the most pressure. `entry` and `other` are as for [`Phase::of_entry`].
#[inline(always)]
pub fn eviction(entry: &Flow, other: Option<&Flow>, now: Tick) -> EvictionClass {
    let has_expired = |pressure| seconds_left_under(pressure, entry, other, now) == 0;
    if !has_expired(Pressure::MOST) {
        EvictionClass::Keep
    } else if has_expired(Pressure::NONE) {
        EvictionClass::Expired
    } else {
        EvictionClass::Unproven
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;
    use lb_common::{
        Address,
        conntrack::tcp_flags::{ACK, RST, SYN},
        protocol::{TCP, UDP},
    };

    use super::*;

    const NOW: Tick = Tick(100);

    fn pair(protocol: u8, seen: [u8; 2]) -> (Flow, Flow) {
        let address = |last| Address::from_v4([192, 0, 2, last]);
        let from = Tuple::new(address(1), address(2), 40_000, 80, protocol);
        let to = Tuple { destination: address(3), ..from };
        let forward = Flow::new(&from, &to, 1, 0, NOW);
        let reply = Flow::new(&to.reversed(), &from.reversed(), 1, flow_flags::reverse(0), NOW);
        (Flow { seen: seen[0], ..forward }, Flow { seen: seen[1], ..reply })
    }

    const OPENING: [u8; 2] = [seen::PACKET | seen::SYN, 0];
    const ESTABLISHED: [u8; 2] = [seen::PACKET | seen::SYN | seen::ACK, seen::PACKET | seen::SYN | seen::ACK];
    const TIME_WAIT: [u8; 2] = [ESTABLISHED[0] | seen::FIN, ESTABLISHED[1] | seen::FIN];
    const CLOSED: [u8; 2] = [ESTABLISHED[0] | seen::RST, ESTABLISHED[1]];

    #[test]
    fn entries_are_stale_for_these_reasons() {
        use Membership::{Gone, Member, NoBackends, NoService};
        use Staleness::{BackendGone, Fresh, Over, Unanswered};
        for (seen, syns, retries, membership, expected) in [
            (ESTABLISHED, 1, 0, Member, Fresh),
            (ESTABLISHED, 1, 0, NoService, Fresh),
            (ESTABLISHED, 1, 0, NoBackends, Fresh),
            (ESTABLISHED, 1, 0, Gone, Fresh),
            (OPENING, 1, 0, Gone, BackendGone),
            (OPENING, 1, 0, NoBackends, BackendGone),
            (OPENING, 1, 0, NoService, Fresh),
            (OPENING, 9, 0, Member, Fresh),
            (OPENING, 3, 3, Member, Fresh),
            (OPENING, 4, 3, Member, Unanswered),
            (ESTABLISHED, 4, 3, Member, Fresh),
            (TIME_WAIT, 1, 0, Member, Over),
            (CLOSED, 1, 0, Member, Over),
        ] {
            let (mut forward, reply) = pair(TCP, seen);
            forward.syns = syns;
            let found = staleness(&forward, Some(&reply), retries, NOW, || membership);
            assert_eq!(found, expected, "seen {seen:?}, {syns} SYNs of {retries}, {membership:?}");
        }
    }

    #[test]
    fn connection_leaves_a_lost_backend_only_after_it_has_left_a_packet_unanswered() {
        let (forward, reply) = pair(TCP, ESTABLISHED);
        for (client, backend, expected) in [
            // Client and backend were idle: this is the first SYN, which the backend answers if it lives.
            (10, 10, Staleness::Fresh),
            // The backend has answered the previous SYN.
            (98, 98, Staleness::Fresh),
            // The previous SYN came just now.
            (99, 10, Staleness::Fresh),
            // The backend is silent, but was not when the client's last packet came: it answers few forged SYNs.
            (98, 97, Staleness::Fresh),
            (98, 96, Staleness::BackendGone),
            (98, 10, Staleness::BackendGone),
        ] {
            let forward = Flow { last_seen: Tick(client), ..forward };
            let reply = Flow { last_seen: Tick(backend), ..reply };
            for (membership, expected) in [
                (Membership::Gone, expected),
                (Membership::NoBackends, expected),
                (Membership::Member, Staleness::Fresh),
                (Membership::NoService, Staleness::Fresh),
            ] {
                let found = staleness(&forward, Some(&reply), 0, NOW, || membership);
                assert_eq!(found, expected, "client {client}, backend {backend}, {membership:?}");
            }
        }
    }

    #[test]
    fn membership_follows_from_the_backends_of_the_service() {
        use Membership::{Gone, Member, NoBackends};
        for (backends_count, slot, expected) in
            [(0, schedule::NONE, NoBackends), (2, 7, Member), (2, 0, Member), (2, schedule::NONE, Gone)]
        {
            let service = Service { backends_count, ..Service::zeroed() };
            assert_eq!(Membership::of(&service, || slot), expected, "{backends_count}, {slot}");
        }
    }

    #[test]
    fn only_flows_that_replace_others_try_another_backend() {
        for (earlier, syn_retries, expected) in
            [(true, 3, true), (true, 0, false), (false, 3, false), (false, 0, false)]
        {
            assert_eq!(may_be_retried(earlier, syn_retries), expected, "{earlier} {syn_retries}");
        }
    }

    #[test]
    fn lost_reverse_entry_makes_a_flow_stale_unless_it_is_tunnelled() {
        let (mut forward, _) = pair(TCP, OPENING);
        assert_eq!(staleness(&forward, None, 0, NOW, || Membership::Member), Staleness::HalfLost);
        forward.flags = flow_flags::ROUTED | flow_flags::TUNNEL;
        assert_eq!(staleness(&forward, None, 0, NOW, || Membership::Member), Staleness::Fresh);
        for lost in [Membership::Gone, Membership::NoBackends] {
            assert_eq!(staleness(&forward, None, 0, NOW, || lost), Staleness::BackendGone);
        }
    }

    #[test]
    fn syn_and_syn_ack_count_in_their_direction_only() {
        let (forward, reply) = pair(TCP, ESTABLISHED);
        for (flags, syn, syn_ack) in
            [(SYN, true, false), (SYN | ACK, false, true), (ACK, false, false), (SYN | RST, false, false)]
        {
            let segment = Segment { flags, seq: 0, ack: 0, payload: 0 };
            assert_eq!(is_syn_of_client(&segment, &forward), syn);
            assert!(!is_syn_of_client(&segment, &reply));
            assert_eq!(is_syn_ack_of_backend(&segment, &reply), syn_ack);
            assert!(!is_syn_ack_of_backend(&segment, &forward));
        }
    }

    #[test]
    fn packets_relate_to_their_flow() {
        use Relation::{Foreign, New, OtherHook, Same};
        use flow_flags::{AT_EGRESS, CAUGHT, REPLY, SECOND_OF_MASQUERADED};
        for (flags, egress, bypasses_vip, is_new, expected) in [
            (0, false, false, false, Same),
            (0, false, false, true, New),
            (0, true, false, true, OtherHook),
            (REPLY | AT_EGRESS, true, false, false, Same),
            (REPLY | AT_EGRESS, true, true, false, Foreign),
            (REPLY | AT_EGRESS, false, true, false, Foreign),
            (CAUGHT, true, false, true, New),
            (CAUGHT, false, false, false, Same),
            (SECOND_OF_MASQUERADED | AT_EGRESS, true, true, true, Same),
            (SECOND_OF_MASQUERADED | AT_EGRESS, false, true, true, Same),
            (SECOND_OF_MASQUERADED | REPLY, true, false, false, OtherHook),
        ] {
            let flow = Flow { flags, ..pair(TCP, OPENING).0 };
            assert_eq!(relation(&flow, egress, || bypasses_vip, || is_new), expected, "{flags}, {egress}");
        }
    }

    #[test]
    fn only_caught_flows_are_replaced_at_the_other_hook() {
        use flow_flags::{AT_EGRESS, CAUGHT};
        for (flags, egress, expected) in
            [(CAUGHT, true, true), (CAUGHT, false, false), (AT_EGRESS, true, false), (0, false, false)]
        {
            let flow = Flow { flags, ..pair(TCP, OPENING).0 };
            assert_eq!(begins_only_at_ingress(&flow, egress, false), expected, "{flags}, {egress}");
            assert!(begins_only_at_ingress(&flow, true, true), "{flags}, at the catch device");
        }
    }

    #[test]
    fn flows_end_with_both_fins_or_a_reset() {
        for (seen, expected) in [(OPENING, false), (ESTABLISHED, false), (TIME_WAIT, true), (CLOSED, true)] {
            let (forward, reply) = pair(TCP, seen);
            assert_eq!(has_ended(&forward, &reply), expected, "{seen:?}");
        }
    }

    #[test]
    fn outcomes_and_hooks_follow_from_the_flags() {
        use flow_flags::{AT_EGRESS, CAUGHT, HAIRPIN, REPLY, ROUTED, SECOND_OF_MASQUERADED, TUNNEL};
        for (flags, expected, egress) in [
            (0, Outcome::Forward, false),
            (REPLY | AT_EGRESS, Outcome::Reply, true),
            (HAIRPIN, Outcome::Hairpin, false),
            (HAIRPIN | REPLY, Outcome::Hairpin, false),
            (CAUGHT, Outcome::Caught, true),
            (CAUGHT | REPLY, Outcome::Caught, true),
            (AT_EGRESS, Outcome::Masquerade, true),
            (REPLY, Outcome::Masquerade, false),
            (SECOND_OF_MASQUERADED | AT_EGRESS, Outcome::Masquerade, true),
            (SECOND_OF_MASQUERADED | REPLY, Outcome::Masquerade, false),
        ] {
            let flow = Flow { flags, ..pair(TCP, OPENING).0 };
            assert_eq!(
                (translated_at_tc(&flow), is_translated_at(&flow, true)),
                (expected, egress),
                "{flags}"
            );
            assert_ne!(is_translated_at(&flow, true), is_translated_at(&flow, false));
            assert_eq!(outcome(&flow, false), expected, "{flags}");
        }
        let of = |flags, bypasses| outcome(&Flow { flags, ..pair(TCP, OPENING).0 }, bypasses);
        for bypasses in [false, true] {
            assert_eq!(of(ROUTED, bypasses), Outcome::Routed);
            assert_eq!(of(ROUTED | TUNNEL, bypasses), Outcome::Tunnelled);
        }
        assert_eq!(of(0, true), Outcome::Direct);
    }

    #[test]
    fn connections_of_the_node_meet_only_flows_with_an_address_of_the_node() {
        use flow_flags::{AT_EGRESS, HAIRPIN, REPLY, ROUTED, SECOND_OF_MASQUERADED};
        for (flags, takes_answers, is_of_node) in [
            (0, false, false),
            (REPLY | AT_EGRESS, false, false),
            (AT_EGRESS, false, true),
            (REPLY, true, false),
            (REPLY | HAIRPIN, true, false),
            (REPLY | ROUTED, true, false),
            (REPLY | SECOND_OF_MASQUERADED, true, false),
            (AT_EGRESS | SECOND_OF_MASQUERADED, false, false),
        ] {
            let flow = Flow { flags, ..pair(TCP, OPENING).0 };
            assert_eq!(takes_answers_of_node(&flow), takes_answers, "{flags}");
            assert_eq!(is_of_other_flow(&flow, true, || false), is_of_node, "{flags}");
            assert!(
                !is_of_other_flow(&flow, true, || true) && !is_of_other_flow(&flow, false, || false),
                "{flags}"
            );
        }
    }

    #[test]
    fn flows_give_way_to_new_ones_once_idle_unless_established() {
        use EvictionClass::{Expired, Keep, Unproven};
        for (protocol, seen, phase) in [
            (TCP, OPENING, Phase::Opening),
            (TCP, TIME_WAIT, Phase::TimeWait),
            (TCP, CLOSED, Phase::Closed),
            (TCP, ESTABLISHED, Phase::Established),
            (TCP, [ESTABLISHED[0] | seen::FIN, ESTABLISHED[1]], Phase::HalfClosed),
            (UDP, [seen::PACKET, 0], Phase::Unreplied),
            (UDP, [seen::PACKET | seen::STREAM, seen::PACKET], Phase::Stream),
        ] {
            let expires = phase.timeout_seconds();
            let keeps = if phase == Phase::Established { expires } else { phase.least_timeout_seconds() };
            let (forward, reply) = pair(protocol, seen);
            let after = |seconds: u32| {
                eviction(
                    &forward,
                    Some(&reply),
                    Tick::from_nanos((u64::from(NOW.0) << 30) + u64::from(seconds) * 1_000_000_000),
                )
            };
            assert_eq!(after(keeps - 2), Keep, "{phase:?}");
            if expires > keeps {
                assert_eq!((after(keeps + 2), after(expires - 2)), (Unproven, Unproven), "{phase:?}");
            }
            assert_eq!(after(expires + 2), Expired, "{phase:?}");
        }
    }

    /// The reverse entry of an established connection can be lost: a GC pass restores it, unless the forward entry is
    /// gone by then.
    #[test]
    fn half_of_an_established_connection_is_not_evicted() {
        let (forward, reply) = pair(TCP, ESTABLISHED);
        for half in [&forward, &reply] {
            assert_eq!(eviction(half, None, NOW), EvictionClass::Keep);
            let later = Tick(NOW.0 + 3600);
            assert_eq!(eviction(half, None, later), EvictionClass::Keep);
        }
    }

    #[test]
    fn only_a_reset_by_the_client_frees_the_port_towards_the_same_endpoint() {
        let (forward, _) = pair(TCP, CLOSED);
        let elsewhere = Tuple { destination_port: 81, ..forward.to };
        assert!(frees_port_by_reset(&forward, &Tuple { source_port: 1, ..forward.to }));
        assert!(!frees_port_by_reset(&forward, &elsewhere));
        assert!(!frees_port_by_reset(&pair(TCP, TIME_WAIT).0, &forward.to));
    }

    #[test]
    fn ports_are_taken_over_from_these_flows() {
        const REPLIED: [u8; 2] = [seen::PACKET, seen::PACKET];
        const UNREPLIED: [u8; 2] = [seen::PACKET, 0];
        const ACCEPTED: [u8; 2] = [OPENING[0], seen::PACKET | seen::SYN | seen::ACK];
        const HALF_CLOSED: [u8; 2] = [ESTABLISHED[0] | seen::FIN, ESTABLISHED[1]];
        const STREAM: [u8; 2] = [seen::PACKET | seen::STREAM, seen::PACKET];
        for (protocol, seen, idle, cautious, eager) in [
            (TCP, OPENING, PORT_REUSE_UNPROVEN, false, false),
            (TCP, OPENING, PORT_REUSE_UNPROVEN + 1, true, true),
            (TCP, ACCEPTED, PORT_REUSE_UNPROVEN, false, false),
            (TCP, ACCEPTED, PORT_REUSE_UNPROVEN + 1, true, true),
            (TCP, HALF_CLOSED, 1000, false, false),
            (UDP, UNREPLIED, PORT_REUSE_AFTER_IDLE, false, false),
            (UDP, UNREPLIED, PORT_REUSE_AFTER_IDLE + 1, true, true),
            (TCP, ESTABLISHED, 1000, false, false),
            (TCP, TIME_WAIT, 0, false, true),
            (TCP, CLOSED, 0, true, true),
            (UDP, REPLIED, PORT_REUSE_AFTER_IDLE, false, false),
            (UDP, REPLIED, PORT_REUSE_AFTER_IDLE + 1, false, true),
            (UDP, STREAM, 1000, false, false),
        ] {
            let (forward, reply) = pair(protocol, seen);
            let replaced = |eager| may_be_replaced(&forward, &reply, eager, || Tick(NOW.0 + idle));
            assert_eq!((replaced(false), replaced(true)), (cautious, eager), "{seen:?} idle {idle}");
        }
    }
}
