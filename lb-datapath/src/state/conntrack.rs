//! The agent's share of connection tracking: listing, expiry, and giving a flow back the half it has lost.
//!
//! Programs change `CONNTRACK` at any time. So an entry is read again right before it is deleted, and whatever a
//! race leaves behind (a flow with one half) the next sweep repairs.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
};

use lb_common::{
    conntrack::{Flow, Pressure, Tick, Tuple, flow_flags, seconds_left, seconds_left_under, seen},
    protocol,
};

use lb_core::{counters::Counted, traffic};
use tracing::debug;

use crate::{
    bpf::{bpffs::Folder, layout, table::Table},
    error::DatapathError,
    state::active_flows::{ActiveFlows, Recount},
};

/// What services and backends do; clients do not know how entries are named there.
pub type Ledger = traffic::Ledger<RandomState>;

/// The map `CONNTRACK`. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Conntrack {
    table: Table<Tuple, Flow>,
    active: Arc<ActiveFlows>,
}

/// A flow: both its directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// What the client sends: its address, and the virtual one.
    pub from: Tuple,
    /// The entry of that direction.
    pub forward: Flow,
    /// The entry of the opposite direction; absent only for moments, or for a flow in a tunnel, which has none.
    pub reply: Option<Flow>,
    /// Of a masqueraded connection, what leaves the node.
    pub masqueraded: Option<Tuple>,
}

/// What a sweep did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Sweep {
    /// Entries seen, two for each flow but those in tunnels.
    pub entries: usize,
    /// Flows in tunnels, of one entry each.
    pub tunnelled: usize,
    /// Flows whose time was over.
    pub expired: usize,
    /// How many of these were in tunnels.
    pub expired_tunnelled: usize,
    /// How many were forgotten before their time, to make room.
    pub early: usize,
    /// How little room there was.
    pub pressure: Pressure,
    /// Flows that got their lost half back.
    pub rebuilt: usize,
    /// Single halves whose time was over.
    pub orphans: usize,
}

impl Sweep {
    fn count_expired(&mut self, forward: &Flow, reply: &Flow, now: Tick) {
        self.expired += 1;
        self.early += usize::from(seconds_left(forward, reply, now) > 0);
    }

    /// Entries that are left.
    pub const fn entries_left(&self) -> usize {
        let gone = 2 * self.expired - self.expired_tunnelled + self.orphans;
        self.entries.saturating_sub(gone)
    }

    /// Flows that are left.
    pub const fn flows_left(&self) -> usize {
        (self.entries_left() + self.tunnelled.saturating_sub(self.expired_tunnelled)) / 2
    }
}

impl Conntrack {
    pub(crate) fn open(folder: &Folder) -> Result<Self, DatapathError> {
        let table = Table::open(&layout::CONNTRACK, &folder.map("CONNTRACK"))?;
        Ok(Self { table, active: Arc::new(ActiveFlows::open(folder)?) })
    }

    /// The map itself: entries by key.
    pub const fn table(&self) -> &Table<Tuple, Flow> {
        &self.table
    }

    /// The numbers of active flows.
    pub fn active(&self) -> &ActiveFlows {
        &self.active
    }

    /// Makes a counter say something else: for tests.
    pub fn set_active(&self, counter: u32, flows: i64) {
        self.active.add(counter, flows - self.active.get(counter));
    }

    /// The counters that flows have, and the endpoint of each.
    pub fn counters(&self) -> Result<BTreeMap<u32, Counted>, DatapathError> {
        let mut counters = BTreeMap::new();
        self.table.for_each(|_, flow| {
            if is_counted(flow) {
                let Tuple { destination: address, destination_port: port, .. } = flow.to;
                counters.insert(flow.active_flows_slot, Counted { service: flow.service, address, port });
            }
            Ok(())
        })?;
        Ok(counters)
    }

    /// The moment that programs of this moment note in entries.
    pub fn now() -> Tick {
        Tick::from_nanos(monotonic_nanoseconds())
    }

    /// All flows, sorted by what the client sends.
    pub fn list(&self) -> Result<Vec<Connection>, DatapathError> {
        let mut entries = BTreeMap::new();
        self.table.for_each(|key, flow| {
            entries.insert(*key, *flow);
            Ok(())
        })?;
        // The other end of a tunnel has no entry here: what looks like one is of another flow.
        let of_flow = |forward: &Flow, key: &Tuple| {
            if forward.is_tunnelled() { None } else { entries.get(key) }
        };
        let connections = entries
            .iter()
            .filter(|(_, flow)| !flow.is_reply() && !is_masquerade(flow))
            .map(|(from, forward)| Connection {
                from: *from,
                forward: *forward,
                reply: of_flow(forward, &forward.to.reversed()).copied(),
                masqueraded: of_flow(forward, &forward.to)
                    .filter(|flow| is_masquerade(flow))
                    .map(|flow| flow.to),
            })
            .collect();
        Ok(connections)
    }

    /// Deletes every entry; how many there were.
    pub fn flush(&self) -> Result<usize, DatapathError> {
        let (mut keys, mut counters) = (Vec::new(), Vec::new());
        self.table.for_each(|key, flow| {
            keys.push(*key);
            counters.extend(is_counted(flow).then_some(flow.active_flows_slot));
            Ok(())
        })?;
        // Forward halves may have been made meanwhile: they are new flows and stay.
        self.table.delete(&keys).map_err(|(_, error)| error)?;
        self.count_down(&counters);
        Ok(keys.len())
    }

    /// Deletes the flows from a VIP to a backend that `unwanted` names; how many. What masquerades them stays until its
    /// time is over: nothing leads to it any more.
    pub fn purge(&self, mut unwanted: impl FnMut(&Tuple, &Flow) -> bool) -> Result<usize, DatapathError> {
        let (mut keys, mut counters) = (Vec::new(), Vec::new());
        let mut flows = 0;
        self.table.for_each(|key, flow| {
            if !flow.is_reply() && !is_masquerade(flow) && unwanted(key, flow) {
                keys.push(*key);
                keys.extend((!flow.is_tunnelled()).then(|| flow.to.reversed()));
                counters.extend(is_counted(flow).then_some(flow.active_flows_slot));
                flows += 1;
            }
            Ok(())
        })?;
        self.table.delete(&keys).map_err(|(_, error)| error)?;
        self.count_down(&counters);
        Ok(flows)
    }

    fn count_down(&self, counters: &[u32]) {
        counters.iter().for_each(|counter| self.active.add(*counter, -1));
    }

    /// Walks through the entries for a `ledger`.
    pub fn tally(&self, ledger: &mut Ledger) -> Result<(), DatapathError> {
        let halves = self.halves()?;
        ledger.begin();
        self.table.for_each(|key, flow| {
            ledger.note(key, flow, halves.peer_of(key, flow).as_ref());
            Ok(())
        })?;
        ledger.end();
        Ok(())
    }

    /// Forgets the flows whose time is over at `now` and repairs those that have lost a half.
    pub fn expire(&self, now: Tick) -> Result<Sweep, DatapathError> {
        self.expire_and_recount(now, &mut Recount::default(), None)
    }

    /// The same, counts the active flows anew, and has a `ledger` note every entry before it is forgotten.
    pub fn expire_and_recount(
        &self,
        now: Tick,
        recount: &mut Recount,
        mut ledger: Option<&mut Ledger>,
    ) -> Result<Sweep, DatapathError> {
        let before = recount.read(&self.active)?;
        let halves = self.halves()?;
        let corrected = recount.correct(&self.active, &before, &halves.counted);
        if corrected > 0 {
            debug!(corrected, "numbers of active flows were wrong");
        }
        let entries = halves.entries.len();
        let pressure = Pressure::of(entries, self.table.capacity());
        let mut sweep = Sweep { entries, pressure, ..Sweep::default() };
        // A program makes the two halves of a flow one after the other, so what looks alone now is looked at again
        // when the sweep is through.
        let mut alone = Vec::new();
        ledger.iter_mut().for_each(|ledger| ledger.begin());
        self.table.for_each(|key, flow| {
            let peer = halves.peer_of(key, flow);
            ledger.iter_mut().for_each(|ledger| ledger.note(key, flow, peer.as_ref()));
            if flow.is_tunnelled() {
                sweep.tunnelled += 1;
                if seconds_left_under(pressure, flow, flow, now) == 0
                    && self.forget_tunnelled(key, now, pressure)?
                {
                    sweep.expired_tunnelled += 1;
                    sweep.count_expired(flow, flow, now);
                }
                return Ok(());
            }
            match peer {
                Some(reply) if !flow.is_reply() && seconds_left_under(pressure, flow, &reply, now) == 0 => {
                    if self.forget(key, flow, now, pressure)? {
                        sweep.count_expired(flow, &reply, now);
                    }
                }
                Some(_) => {}
                None => alone.push(*key),
            }
            Ok(())
        })?;
        ledger.iter_mut().for_each(|ledger| ledger.end());
        for key in alone {
            self.mend(&key, now, &mut sweep)?;
        }
        Ok(sweep)
    }

    fn halves(&self) -> Result<Halves, DatapathError> {
        let mut halves = Halves::default();
        self.table.for_each(|key, flow| {
            halves.note(key, flow);
            Ok(())
        })?;
        Ok(halves)
    }

    /// The other half of the flow of this entry.
    fn peer_of(&self, key: &Tuple, flow: &Flow) -> Result<Option<Flow>, DatapathError> {
        let peer = self.table.get(&flow.to.reversed())?;
        Ok(peer.filter(|peer| peer.to.reversed() == *key))
    }

    /// Deletes both halves, unless a packet has come meanwhile.
    fn forget(&self, key: &Tuple, flow: &Flow, now: Tick, pressure: Pressure) -> Result<bool, DatapathError> {
        let Some(forward) = self.table.get(key)?.filter(|current| current.to == flow.to) else {
            return Ok(false);
        };
        let Some(reply) = self.peer_of(key, &forward)? else { return Ok(false) };
        if seconds_left_under(pressure, &forward, &reply, now) > 0 || self.is_led_to(key, &forward)? {
            return Ok(false);
        }
        if self.table.remove(key)? && is_counted(&forward) {
            self.active.add(forward.active_flows_slot, -1);
        }
        // The same client port may have opened a new flow to the same backend since.
        let reply_key = forward.to.reversed();
        if self.table.get(&reply_key)? == Some(reply) {
            self.table.remove(&reply_key)?;
        }
        Ok(true)
    }

    /// Deletes the only entry of a flow in a tunnel, unless a packet has come meanwhile.
    fn forget_tunnelled(&self, key: &Tuple, now: Tick, pressure: Pressure) -> Result<bool, DatapathError> {
        let Some(flow) = self.table.get(key)?.filter(Flow::is_tunnelled) else { return Ok(false) };
        if seconds_left_under(pressure, &flow, &flow, now) > 0 || !self.table.remove(key)? {
            return Ok(false);
        }
        if is_counted(&flow) {
            self.active.add(flow.active_flows_slot, -1);
        }
        Ok(true)
    }

    /// Whether this is the second flow of a masqueraded connection whose first one still lives. How long ago its own
    /// packets were does not matter then: those of the client may be lost in between, and the first of them that is not
    /// would leave with the client's address.
    fn is_led_to(&self, key: &Tuple, forward: &Flow) -> Result<bool, DatapathError> {
        if !is_masquerade(forward) {
            return Ok(false);
        }
        let reply_of_first = key.reversed();
        match self.table.get(&reply_of_first)? {
            Some(reply) => Ok(self.peer_of(&reply_of_first, &reply)?.is_some()),
            None => Ok(false),
        }
    }

    /// Gives a half that is alone its other half back, or deletes it when its time is over.
    fn mend(&self, key: &Tuple, now: Tick, sweep: &mut Sweep) -> Result<(), DatapathError> {
        let Some(flow) = self.table.get(key)? else { return Ok(()) };
        if self.peer_of(key, &flow)?.is_some() {
            return Ok(());
        }
        let (peer_key, peer) = lost_half(key, &flow);
        let (from, forward, reply) =
            if flow.is_reply() { (&peer_key, &peer, &flow) } else { (key, &flow, &peer) };
        if seconds_left_under(sweep.pressure, forward, reply, now) == 0 && !self.is_led_to(from, forward)? {
            sweep.orphans += usize::from(self.table.remove(key)?);
        } else {
            let rebuilt = self.table.insert_new(&peer_key, &peer)?;
            sweep.rebuilt += usize::from(rebuilt);
            // The client's port has a flow to another backend: nothing leads to this reply any more.
            if !rebuilt && flow.is_reply() && self.peer_of(key, &flow)?.is_none() {
                sweep.orphans += usize::from(self.table.remove(key)?);
            }
        }
        Ok(())
    }
}

/// What a sweep must know of every entry to judge its peer, in a fraction of the room; a system call for each entry
/// would make a sweep many times as long. Tells only where to look: what is done rests on entries read afresh.
#[derive(Default)]
struct Halves {
    hasher: RandomState,
    entries: HashMap<u64, Half>,
    /// Active flows by their counter.
    counted: BTreeMap<u32, i64>,
}

struct Half {
    /// Digest of the key of its peer.
    peer: u64,
    last_seen: Tick,
    next_seq: u32,
    seen: u8,
}

impl Halves {
    fn note(&mut self, key: &Tuple, flow: &Flow) {
        let peer = self.hasher.hash_one(flow.to.reversed());
        let Flow { last_seen, next_seq, seen, .. } = *flow;
        let half = Half { peer, last_seen, next_seq, seen };
        let known = self.entries.insert(self.hasher.hash_one(key), half).is_some();
        if is_counted(flow) && !known {
            *self.counted.entry(flow.active_flows_slot).or_default() += 1;
        }
    }

    /// What the phase of the flow depends on, in the shape of an entry.
    fn peer_of(&self, key: &Tuple, flow: &Flow) -> Option<Flow> {
        let half = self.entries.get(&self.hasher.hash_one(flow.to.reversed()))?;
        let is_peer = half.peer == self.hasher.hash_one(key);
        let Half { last_seen, next_seq, seen, .. } = *half;
        is_peer.then_some(Flow { last_seen, next_seq, seen, ..*flow })
    }
}

/// Whether it is of the second translation of a masqueraded connection.
const fn is_masquerade(flow: &Flow) -> bool {
    flow.flags & flow_flags::MASQUERADE != 0
}

/// Whether it is the entry that says where an active flow is counted.
const fn is_counted(flow: &Flow) -> bool {
    flow.active_flows_slot != 0 && !flow.is_reply()
}

/// What the other half of a flow must have been, as far as this one tells.
fn lost_half(key: &Tuple, flow: &Flow) -> (Tuple, Flow) {
    let peer_key = flow.to.reversed();
    let flags = flow_flags::reverse(flow.flags);
    let mut peer = Flow::new(&peer_key, &key.reversed(), flow.service, flags, flow.last_seen);
    peer.active_flows_slot = flow.active_flows_slot;
    if key.protocol == protocol::TCP {
        // Who acknowledges has heard the other side; what it acknowledged is where the other side stands.
        if flow.seen & seen::ACK != 0 {
            peer.seen = seen::PACKET | seen::SYN | seen::ACK;
            peer.next_seq = flow.last_ack;
            peer.last_ack = flow.next_seq;
        }
    } else if flow.is_reply() {
        peer.seen = seen::PACKET;
    }
    (peer_key, peer)
}

/// The clock of the programs, which nobody sets: `CLOCK_MONOTONIC`.
pub fn monotonic_nanoseconds() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use lb_common::{
        Address,
        conntrack::{Phase, Segment, tcp_flags},
    };

    use super::*;

    fn pair(protocol: u8, flags: u8) -> (Tuple, Flow, Flow) {
        let (client, vip) = (Address::from_v4([192, 0, 2, 1]), Address::from_v4([10, 96, 0, 1]));
        let from = Tuple::new(client, vip, 40_000, 80, protocol);
        let to = Tuple { destination: Address::from_v4([198, 51, 100, 7]), destination_port: 8080, ..from };
        let forward = Flow::new(&from, &to, 7, flags, Tick(50));
        let reply = Flow::new(&to.reversed(), &from.reversed(), 7, flow_flags::reverse(flags), Tick(50));
        (from, forward, reply)
    }

    #[test]
    fn a_lost_half_is_what_it_was() {
        for protocol in [protocol::TCP, protocol::UDP] {
            for flags in [0, flow_flags::HAIRPIN, flow_flags::MASQUERADE | flow_flags::AT_EGRESS] {
                let (from, forward, reply) = pair(protocol, flags);
                assert_eq!(lost_half(&from, &forward), (forward.to.reversed(), reply));
                let (key, mut rebuilt) = lost_half(&forward.to.reversed(), &reply);
                rebuilt.seen = 0;
                assert_eq!((key, rebuilt), (from, forward));
            }
        }
    }

    #[test]
    fn what_is_left_counts_flows_in_tunnels_once() {
        let sweep = Sweep {
            entries: 11,
            tunnelled: 3,
            expired: 3,
            expired_tunnelled: 1,
            orphans: 1,
            ..Sweep::default()
        };
        assert_eq!((sweep.entries_left(), sweep.flows_left()), (5, 3), "two in tunnels, another, and a half");
    }

    #[test]
    fn an_established_connection_stays_established() {
        let (from, mut forward, mut reply) = pair(protocol::TCP, 0);
        let segment = |flags, seq, ack| Segment { flags, seq, ack, payload: 0 };
        forward.observe_segment(&segment(tcp_flags::SYN, 1000, 0), Tick(50));
        reply.observe_segment(&segment(tcp_flags::SYN | tcp_flags::ACK, 5000, 1001), Tick(50));
        forward.observe_segment(&segment(tcp_flags::ACK, 1001, 5001), Tick(50));
        let (_, lost_reply) = lost_half(&from, &forward);
        let (_, lost_forward) = lost_half(&forward.to.reversed(), &reply);
        assert_eq!(Phase::of(&forward, &lost_reply), Phase::Established);
        assert_eq!(Phase::of(&lost_forward, &reply), Phase::Established);
        assert!(lost_reply.accepts_reset(&segment(tcp_flags::RST, 5001, 0), &forward));
        assert!(lost_forward.accepts_reset(&segment(tcp_flags::RST, 1001, 0), &reply));
    }
}
