//! Sums of flows, packets and bytes of service ports and backends, from the counters of the flow entries.
//!
//! The agent walks through the entries periodically and passes each entry to the ledger. The ledger takes what the
//! entry has counted since the previous walk, and adds it to the sums of the entry's backend, so sums only grow. An
//! entry normally stays for at least ten seconds after its flow has ended, and an entry that a new flow reuses keeps
//! counting. So if walks are less than ten seconds apart, the sums miss only the last counts of entries that are
//! deleted sooner: entries of a closed connection whose masquerade port another connection takes, entries of flows that
//! the agent deletes before they expire (for example UDP flows to a removed backend, and connections that the agent
//! ends by the timeouts of their Service), and entries that a program evicts.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    hash::BuildHasher,
    ops::{AddAssign, Sub},
};

use lb_common::{
    SocketCounter, SocketCounts,
    conntrack::{Flow, Phase, Tuple},
};

use crate::active_flow_slots::ServiceEndpoint;

/// The sums of a backend expire after this number of walks that found neither an entry nor a socket counter of the
/// backend: after an hour, if walks are five seconds apart.
const SILENCE: u32 = 720;

/// Packets and bytes of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    /// Number of packets; a packet that a device will cut into segments (GSO) counts as one.
    pub packets: u64,
    /// Number of bytes in these packets, including IP headers.
    pub bytes: u64,
}

/// Traffic since the start, or between two points in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of flows (connections, or UDP flows) that have begun.
    pub flows: u64,
    /// Packets and bytes that clients have sent.
    pub sent: Volume,
    /// Packets and bytes that backends have sent.
    pub answered: Volume,
}

impl AddAssign for Volume {
    fn add_assign(&mut self, other: Self) {
        let Self { packets, bytes } = other;
        self.packets += packets;
        self.bytes += bytes;
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        let Self { flows, sent, answered } = other;
        self.flows += flows;
        self.sent += sent;
        self.answered += answered;
    }
}

impl Sub for Volume {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            packets: self.packets.saturating_sub(earlier.packets),
            bytes: self.bytes.saturating_sub(earlier.bytes),
        }
    }
}

impl Sub for Traffic {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            flows: self.flows.saturating_sub(earlier.flows),
            sent: self.sent - earlier.sent,
            answered: self.answered - earlier.answered,
        }
    }
}

/// The traffic of one backend of a service port, or of all its backends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Traffic since the ledger's first walk; for a backend whose sums have expired, since the backend appeared again.
    pub total: Traffic,
    /// Number of flows that were not over at the last walk.
    pub active: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        let Self { total, active } = other;
        self.total += total;
        self.active += active;
    }
}

/// Traffic sums of all backends. Its hasher shortens the keys of flow table entries to 64 bits; clients must not be
/// able to predict the results, because they could then provoke collisions.
#[derive(Debug, Default)]
pub struct Ledger<S> {
    hasher: S,
    seen: HashMap<u64, Seen>,
    /// For each counter that [`Self::note_sockets`] received in the last walk: number of connections that had begun.
    sockets: BTreeMap<SocketCounter, u64>,
    backends: BTreeMap<ServiceEndpoint, Backend>,
    /// Sums of expired backends, by service port, so that the sums of a service port with other backends never
    /// decrease.
    expired: BTreeMap<u32, Traffic>,
    walk: u32,
}

/// The counters of a flow table entry at the last walk that found it.
#[derive(Clone, Copy, Debug)]
struct Seen {
    packets: u32,
    walk: u32,
    traffic: u64,
}

#[derive(Debug, Default)]
struct Backend {
    tally: Tally,
    last_walk: u32,
}

impl<S: BuildHasher> Ledger<S> {
    /// Begins a walk through the flow table. The first walk only records the counters and adds nothing.
    pub fn begin(&mut self) {
        self.walk = self.walk.wrapping_add(1).max(1);
        self.backends.values_mut().for_each(|backend| backend.tally.active = 0);
    }

    /// Adds to the sums what an entry of a client's flow has counted since the last walk, and counts the flow as active
    /// unless the flow is over. Ignores the second flow of a masqueraded connection, and connections of the node.
    /// `reverse` is the entry of the opposite direction, if there is one. A walk may pass an entry twice.
    pub fn note(&mut self, key: &Tuple, flow: &Flow, reverse: Option<&Flow>) {
        if !flow.is_of_client() {
            return;
        }
        let now = Seen { packets: flow.packets, walk: self.walk, traffic: flow.traffic };
        let before = self.seen.insert(self.hasher.hash_one(key), now);
        let backend = self.backends.entry(endpoint_of(key, flow)).or_default();
        backend.last_walk = self.walk;
        let is_first_look = before.is_none_or(|seen| seen.walk != self.walk);
        if is_first_look && !flow.is_reply() && !Phase::of_entry(flow, reverse).is_over() {
            backend.tally.active += 1;
        }
        if self.walk > 1 {
            backend.tally.total += since(before.as_ref(), flow);
        }
    }

    /// Takes the connections that the socket hooks have translated, which have no flow table entries: adds those that
    /// have begun since the last walk to the sums, and counts those that have not ended as active flows. Must be called
    /// once in each walk.
    pub fn note_sockets(&mut self, counts: &BTreeMap<SocketCounter, SocketCounts>) {
        for (counter, counts) in counts {
            let backend = self.backends.entry(counter.into()).or_default();
            backend.last_walk = self.walk;
            backend.tally.active += counts.active();
            if self.walk > 1 {
                let before = self.sockets.get(counter).copied().unwrap_or(0);
                // If the count is smaller than before, the agent has deleted the counter in between, and the new one
                // began at 0.
                backend.tally.total.flows += counts.begun.checked_sub(before).unwrap_or(counts.begun);
            }
        }
        self.sockets = counts.iter().map(|(counter, counts)| (*counter, counts.begun)).collect();
    }

    /// Drops the counts that [`Self::note_sockets`] stored for these counters, because the agent deletes the counters:
    /// a counter that is created again counts from 0.
    pub fn forget_sockets(&mut self, deleted: &[SocketCounter]) {
        for counter in deleted {
            self.sockets.remove(counter);
        }
    }

    /// Ends a walk: drops the counters of entries that it has not found, as these no longer exist, and expires each
    /// backend of which the last `SILENCE` walks have found neither an entry nor a socket counter. The service port
    /// keeps the sums of expired backends as long as it has a backend that has not expired.
    pub fn end(&mut self) {
        let walk = self.walk;
        self.seen.retain(|_, seen| seen.walk == walk);
        let is_silent = |backend: &Backend| walk.wrapping_sub(backend.last_walk) >= SILENCE;
        for (endpoint, backend) in self.backends.extract_if(.., |_, backend| is_silent(backend)) {
            *self.expired.entry(endpoint.service).or_default() += backend.tally.total;
        }
        if !self.expired.is_empty() {
            let left: BTreeSet<u32> = self.backends.keys().map(|endpoint| endpoint.service).collect();
            self.expired.retain(|service, _| left.contains(service));
        }
    }

    /// The sums of each backend that has not expired.
    pub fn backends(&self) -> impl Iterator<Item = (&ServiceEndpoint, &Tally)> {
        self.backends.iter().map(|(endpoint, backend)| (endpoint, &backend.tally))
    }

    /// The sums of each service port, by the port's id.
    pub fn services(&self) -> BTreeMap<u32, Tally> {
        let of_expired = |(id, total): (&u32, &Traffic)| (*id, Tally { total: *total, active: 0 });
        let mut services: BTreeMap<u32, Tally> = self.expired.iter().map(of_expired).collect();
        for (endpoint, tally) in self.backends() {
            *services.entry(endpoint.service).or_default() += *tally;
        }
        services
    }
}

/// The backend, and the id of its service port, that an entry belongs to.
const fn endpoint_of(key: &Tuple, flow: &Flow) -> ServiceEndpoint {
    let (address, port) = if flow.is_reply() {
        (key.source, key.source_port)
    } else {
        (flow.to.destination, flow.to.destination_port)
    };
    ServiceEndpoint { service: flow.service, address, port }
}

/// The traffic that an entry has counted since the walk that recorded `before`.
fn since(before: Option<&Seen>, flow: &Flow) -> Traffic {
    let whole = Volume { packets: u64::from(flow.packets), bytes: flow.bytes() };
    let begun = u64::from(flow.generation()) + 1;
    // If the counter is smaller than before, the entry was created again, or its counters began again at 0.
    let (volume, flows) = match before.filter(|before| before.traffic <= flow.traffic) {
        None => (whole, begun),
        Some(before) => {
            let before = Flow { packets: before.packets, traffic: before.traffic, ..*flow };
            let packets = u64::from(flow.packets.wrapping_sub(before.packets));
            let bytes = flow.bytes().saturating_sub(before.bytes());
            (Volume { packets, bytes }, begun.saturating_sub(u64::from(before.generation()) + 1))
        }
    };
    if flow.is_reply() {
        Traffic { answered: volume, ..Traffic::default() }
    } else {
        Traffic { flows, sent: volume, ..Traffic::default() }
    }
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasherDefault, DefaultHasher};

    use lb_common::{
        Address, Endpoint,
        conntrack::{Tick, flow_flags, seen},
        protocol,
    };

    use super::*;

    type Sums = Ledger<BuildHasherDefault<DefaultHasher>>;

    /// The forward key, and the forward and reverse entries, of a flow from this client port to this backend.
    fn pair(port: u16, backend: u8) -> (Tuple, Flow, Flow) {
        let (client, vip) = (Address::from_v4([192, 0, 2, 1]), Address::from_v4([10, 96, 0, 1]));
        let from = Tuple::new(client, vip, port, 80, protocol::TCP);
        let to = Tuple { destination: Address::from_v4([10, 1, 0, backend]), destination_port: 8080, ..from };
        let forward = Flow::new(&from, &to, 7, 0, Tick(50));
        let reply = Flow::new(&to.reversed(), &from.reversed(), 7, flow_flags::reverse(0), Tick(50));
        (from, forward, reply)
    }

    fn walk(ledger: &mut Sums, flows: &[(Tuple, Flow, Flow)]) {
        ledger.begin();
        for (from, forward, reply) in flows {
            ledger.note(from, forward, Some(reply));
            ledger.note(&forward.to.reversed(), reply, Some(forward));
        }
        ledger.end();
    }

    fn all(ledger: &Sums) -> Tally {
        ledger.services().get(&7).copied().unwrap_or_default()
    }

    fn volume(packets: u64, bytes: u64) -> Volume {
        Volume { packets, bytes }
    }

    #[test]
    fn traffic_before_the_first_pass_is_not_counted() {
        let mut ledger = Sums::default();
        let (from, mut forward, mut reply) = pair(1, 5);
        forward.count_packet(1000);
        walk(&mut ledger, &[(from, forward, reply)]);
        assert_eq!(all(&ledger), Tally { active: 1, ..Tally::default() });
        forward.count_packet(100);
        reply.count_packet(60);
        reply.count_packet(40);
        let mut other = pair(2, 6);
        other.1.count_packet(44);
        walk(&mut ledger, &[(from, forward, reply), other]);
        let total = Traffic { flows: 1, sent: volume(2, 144), answered: volume(2, 100) };
        assert_eq!(all(&ledger), Tally { total, active: 2 });
        let of: Vec<u64> = ledger.backends().map(|(_, tally)| tally.total.sent.bytes).collect();
        assert_eq!(of, [100, 44]);
    }

    #[test]
    fn connections_of_sockets_count_as_flows_of_their_backend() {
        let mut ledger = Sums::default();
        let counter = |backend: u8, active_flows_slot| SocketCounter {
            service: 7,
            active_flows_slot,
            backend: Endpoint::new(Address::from_v4([10, 1, 0, backend]), 8080),
        };
        let walk = |ledger: &mut Sums, flow: bool, counts: &[(SocketCounter, [u64; 2])]| {
            ledger.begin();
            if flow {
                let (from, forward, reply) = pair(1, 5);
                ledger.note(&from, &forward, Some(&reply));
            }
            let counts = counts
                .iter()
                .map(|(counter, [begun, ended])| (*counter, SocketCounts { begun: *begun, ended: *ended }));
            ledger.note_sockets(&counts.collect());
            ledger.end();
            let tally = all(ledger);
            (tally.total.flows, tally.active)
        };
        let (first, second) = (counter(5, 0), counter(5, 3));
        assert_eq!(
            walk(&mut ledger, true, &[(first, [10, 8])]),
            (0, 3),
            "what began before the first walk is not counted"
        );
        assert_eq!(walk(&mut ledger, true, &[(first, [14, 14]), (second, [2, 1])]), (6, 2));
        assert_eq!(walk(&mut ledger, false, &[(second, [2, 2])]), (6, 0));
        assert_eq!(walk(&mut ledger, false, &[(first, [3, 4])]), (9, 0), "counted again from 0");
        ledger.forget_sockets(&[first]);
        ledger.begin();
        ledger.note_sockets(&BTreeMap::from([(first, SocketCounts { begun: 3, ended: 3 })]));
        ledger.end();
        assert_eq!(all(&ledger).total.flows, 12, "the counter was deleted, and grew to the same number");
    }

    #[test]
    fn sums_include_deleted_flows() {
        let mut ledger = Sums::default();
        walk(&mut ledger, &[]);
        let mut flow = pair(1, 5);
        flow.1.count_packet(500);
        walk(&mut ledger, &[flow]);
        let before = all(&ledger);
        walk(&mut ledger, &[]);
        assert_eq!(all(&ledger), Tally { active: 0, ..before });
        // A new flow uses the port of the first one again.
        walk(&mut ledger, &[flow]);
        assert_eq!(all(&ledger).total, Traffic { flows: 2, sent: volume(2, 1000), ..Traffic::default() });
    }

    #[test]
    fn flows_that_replace_each_other_are_all_counted() {
        let mut ledger = Sums::default();
        walk(&mut ledger, &[]);
        let mut flow = pair(1, 5);
        flow.1.count_packet(100);
        walk(&mut ledger, &[flow]);
        for _ in 0..3 {
            let earlier = flow.1;
            flow = pair(1, 5);
            flow.1.continue_counters(&earlier);
            flow.1.count_packet(100);
        }
        walk(&mut ledger, &[flow]);
        assert_eq!(all(&ledger).total, Traffic { flows: 4, sent: volume(4, 400), ..Traffic::default() });
    }

    #[test]
    fn recreated_entry_counts_from_zero() {
        let mut ledger = Sums::default();
        walk(&mut ledger, &[]);
        let mut flow = pair(1, 5);
        flow.1.count_packet(1000);
        walk(&mut ledger, &[flow]);
        let mut anew = pair(1, 5);
        anew.1.count_packet(10);
        walk(&mut ledger, &[anew]);
        assert_eq!(all(&ledger).total, Traffic { flows: 2, sent: volume(2, 1010), ..Traffic::default() });
    }

    #[test]
    fn wrapping_counters_continue() {
        let mut ledger = Sums::default();
        walk(&mut ledger, &[]);
        let mut flow = pair(1, 5);
        flow.1.packets = u32::MAX;
        walk(&mut ledger, &[flow]);
        flow.1.count_packet(1);
        assert_eq!(flow.1.packets, 0);
        walk(&mut ledger, &[flow]);
        assert_eq!(all(&ledger).total.sent.packets, u64::from(u32::MAX) + 1);
    }

    #[test]
    fn entry_read_twice_is_counted_once() {
        let mut ledger = Sums::default();
        walk(&mut ledger, &[]);
        let mut flow = pair(1, 5);
        flow.1.count_packet(100);
        walk(&mut ledger, &[flow, flow]);
        assert_eq!((all(&ledger).active, all(&ledger).total.sent), (1, volume(1, 100)));
    }

    #[test]
    fn ended_flows_and_second_flows_are_not_active() {
        let mut ledger = Sums::default();
        let mut over = pair(1, 5);
        (over.1.seen, over.2.seen) = (seen::PACKET | seen::ACK | seen::FIN, seen::PACKET | seen::FIN);
        let mut masquerade = pair(2, 5);
        masquerade.1.flags |= flow_flags::SECOND_OF_MASQUERADED;
        masquerade.2.flags |= flow_flags::SECOND_OF_MASQUERADED;
        walk(&mut ledger, &[over, masquerade, pair(3, 5)]);
        assert_eq!(all(&ledger).active, 1);
    }

    #[test]
    fn silent_backends_expire() {
        let mut ledger = Sums::default();
        walk(&mut ledger, &[pair(1, 5)]);
        (1..SILENCE).for_each(|_| walk(&mut ledger, &[]));
        assert_eq!(ledger.backends().count(), 1);
        walk(&mut ledger, &[]);
        assert_eq!(ledger.backends().count(), 0);
    }

    #[test]
    fn sums_of_a_service_never_fall_when_a_backend_expires() {
        let mut ledger = Sums::default();
        walk(&mut ledger, &[]);
        let (mut old, mut new) = (pair(1, 5), pair(2, 6));
        old.1.count_packet(900);
        new.1.count_packet(100);
        walk(&mut ledger, &[old, new]);
        let before = all(&ledger);
        assert_eq!(before.total.sent, volume(2, 1000));
        (0..SILENCE).for_each(|_| walk(&mut ledger, &[new]));
        assert_eq!(ledger.backends().count(), 1);
        assert_eq!(all(&ledger), Tally { active: 1, ..before });
        (0..SILENCE).for_each(|_| walk(&mut ledger, &[]));
        assert_eq!(all(&ledger), Tally::default(), "no backend has a flow: the sums end");
    }
}
