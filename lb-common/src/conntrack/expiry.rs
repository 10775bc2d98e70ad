//! Seconds until an idle flow expires: the timeout of its [`Phase`], longer for the second flow of a masqueraded
//! connection, shorter under [`Pressure`].

use super::{Flow, Phase, Tick};

/// How full the flow table is: no pressure up to three quarters of its capacity, the most from fifteen sixteenths on.
///
/// The higher the pressure, the shorter the timeout of flows that may be evicted ([`Phase::is_evictable`]). In a flood
/// of SYNs, connections without a completed handshake expire within seconds. Established connections keep their
/// timeout, unless they are tunnelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Pressure(u8);

impl Pressure {
    /// Every flow has its full timeout.
    pub const NONE: Self = Self(0);
    /// Evictable flows have the shortest timeout.
    pub const MOST: Self = Self(Self::STEPS);
    const STEPS: u8 = 48;

    /// The pressure in a flow table with `entries` out of `capacity`.
    pub fn of(entries: usize, capacity: u32) -> Self {
        let sixteenths = |count: u32| u64::from(capacity) * u64::from(count) / 16;
        let (begin, end) = (sixteenths(12), sixteenths(15));
        let over = (entries as u64).clamp(begin, end) - begin;
        let steps = over * u64::from(Self::STEPS) / (end - begin).max(1);
        Self(u8::try_from(steps).unwrap_or(Self::STEPS))
    }

    /// A timeout of `seconds`, shortened according to this pressure, down to `least`.
    fn shorten(self, seconds: u32, least: u32) -> u32 {
        let removable = seconds.saturating_sub(least);
        seconds - removable * u32::from(self.0) / u32::from(Self::STEPS)
    }
}

/// Seconds by which the second flow of a masqueraded connection outlives the first while there is no pressure: without
/// the second flow, packets would go to the backend with the client's address. Under pressure both may expire at the
/// same time: GC keeps the second flow as long as the first one exists, and a program that evicts the second flow
/// deletes the first one.
const MASQUERADE_EXTRA_SECONDS: u32 = 15;

/// Seconds until the idle flow expires without pressure; 0 when it has expired. `entry` and `other` are as in
/// [`Phase::of_entry`].
pub fn seconds_left(entry: &Flow, other: Option<&Flow>, now: Tick) -> u32 {
    seconds_left_under(Pressure::NONE, entry, other, now)
}

/// Seconds until the idle flow expires under `pressure`; 0 when it has expired. `entry` and `other` are as in
/// [`Phase::of_entry`].
pub fn seconds_left_under(pressure: Pressure, entry: &Flow, other: Option<&Flow>, now: Tick) -> u32 {
    let extra = if entry.is_second() { MASQUERADE_EXTRA_SECONDS } else { 0 };
    let phase = Phase::of_entry(entry, other);
    let full = phase.timeout_seconds() + extra;
    // A tunnelled flow counts as evictable even when established: the replies bypass this node, so the handshake may be
    // forged.
    let timeout = if phase.is_evictable() || entry.is_tunnelled() {
        pressure.shorten(full, phase.least_timeout_seconds())
    } else {
        full
    };
    timeout.saturating_sub(now.seconds_since(phase.last_used(entry, other)))
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{ACK, FIN, NOW, SYN, established, pair, segment, tunnelled};
    use super::*;
    use crate::{conntrack::flow_flags, protocol};

    #[test]
    fn pressure_rises_from_three_quarters_to_fifteen_sixteenths() {
        for capacity in [16, 2_000, 524_288, u32::MAX] {
            let at = |sixteenths: u64| {
                Pressure::of(usize::try_from(u64::from(capacity) * sixteenths / 16).unwrap(), capacity)
            };
            assert_eq!(
                [at(0), at(12), at(15), at(16)],
                [Pressure::NONE, Pressure::NONE, Pressure::MOST, Pressure::MOST]
            );
            assert!(at(13) > at(12) && at(14) > at(13) && at(14) < at(15));
        }
        assert_eq!(Pressure::of(0, 0), Pressure::NONE);
    }

    #[test]
    fn all_flows_but_established_connections_expire_early_under_pressure() {
        for phase in [
            Phase::Opening,
            Phase::Accepted,
            Phase::TimeWait,
            Phase::Closed,
            Phase::Unreplied,
            Phase::Replied,
            Phase::HalfClosed,
            Phase::Stream,
        ] {
            assert!(phase.is_evictable(), "{}", phase.as_str());
        }
        assert!(!Phase::Established.is_evictable());
        let (mut forward, reply) = pair(protocol::TCP);
        forward.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        let half = Pressure(Pressure::STEPS / 2);
        let left = |pressure| seconds_left_under(pressure, &forward, Some(&reply), NOW);
        assert_eq!([Pressure::NONE, half, Pressure::MOST].map(left), [60, 32, 3]);
        let (mut forward, reply) = established();
        assert_eq!(
            seconds_left_under(Pressure::MOST, &forward, Some(&reply), NOW),
            Phase::Established.timeout_seconds()
        );
        forward.observe_segment(&segment(FIN | ACK, 1001, 5001, 0), NOW);
        assert_eq!(seconds_left_under(Pressure::MOST, &forward, Some(&reply), NOW), 10, "half-closed");
    }

    /// This node does not see the replies, so a forged SYN and any ACK look like a handshake. Without pressure, such a
    /// flow holds its entry for a day.
    #[test]
    fn one_way_flows_give_way_under_pressure() {
        let mut flow = tunnelled(protocol::TCP);
        flow.observe_segment(&segment(SYN, 1000, 0, 0), NOW);
        flow.observe_segment(&segment(ACK, 1001, 77, 0), NOW);
        assert_eq!(Phase::of_one_way(&flow), Phase::Established);
        assert_eq!(seconds_left_under(Pressure::NONE, &flow, None, NOW), 24 * 60 * 60);
        assert_eq!(seconds_left_under(Pressure::MOST, &flow, None, NOW), 10);
    }

    #[test]
    fn udp_streams_shrink_under_pressure() {
        let (mut forward, mut reply) = pair(protocol::UDP);
        forward.observe_datagram(NOW);
        reply.observe_datagram(NOW);
        let later = Tick(NOW.0 + 3);
        forward.observe_datagram(later);
        let left = |pressure| seconds_left_under(pressure, &forward, Some(&reply), later);
        assert_eq!([Pressure::NONE, Pressure(Pressure::STEPS / 2), Pressure::MOST].map(left), [120, 65, 10]);
    }

    #[test]
    fn second_flow_of_a_masqueraded_connection_outlives_the_first() {
        let (forward, reply) = pair(protocol::UDP);
        let second = Flow { flags: flow_flags::SECOND_OF_MASQUERADED | flow_flags::AT_EGRESS, ..forward };
        assert!(
            seconds_left(&second, Some(&reply), NOW) > seconds_left(&forward, Some(&reply), NOW) + 5,
            "one or two runs of the garbage collection"
        );
    }

    #[test]
    fn idle_established_connections_live_24_hours_as_with_kube_proxy() {
        let (forward, reply) = established();
        let Tick(day_in_ticks) = Tick::from_nanos(24 * 60 * 60 * 1_000_000_000);
        assert!(
            seconds_left_under(Pressure::MOST, &forward, Some(&reply), Tick(NOW.0 + day_in_ticks - 2)) > 0
        );
        assert_eq!(seconds_left(&forward, Some(&reply), Tick(NOW.0 + day_in_ticks + 2)), 0);
    }

    #[test]
    fn idle_udp_flows_expire_after_30_or_120_seconds_as_in_nf_conntrack() {
        let (mut forward, mut reply) = pair(protocol::UDP);
        forward.observe_datagram(NOW);
        assert_eq!(seconds_left(&forward, Some(&reply), NOW), 30, "unreplied");
        reply.observe_datagram(NOW);
        assert_eq!(seconds_left(&forward, Some(&reply), NOW), 30, "replied");
        let later = Tick(NOW.0 + 3);
        reply.observe_datagram(later);
        assert_eq!(seconds_left(&forward, Some(&reply), later), 120, "stream");
        let Tick(timeout_in_ticks) = Tick::from_nanos(120 * 1_000_000_000);
        assert!(seconds_left(&forward, Some(&reply), Tick(later.0 + timeout_in_ticks - 2)) > 0);
        assert_eq!(seconds_left(&forward, Some(&reply), Tick(later.0 + timeout_in_ticks + 2)), 0);
    }
}
