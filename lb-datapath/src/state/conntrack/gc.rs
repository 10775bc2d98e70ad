//! Garbage collection (GC): a pass over the flow table that deletes the flows that have expired, evicts flows if the
//! table is nearly full, and restores lost entries.

use std::collections::BTreeMap;

use lb_common::{
    SocketCounter, SocketCounts,
    conntrack::{Flow, Pressure, Tick, Tuple, flow_flags, seconds_left, seconds_left_under, seen},
    filter::Mark,
    protocol,
};
use tracing::{debug, warn};

use super::{Conntrack, Ledger, index::EntryIndex, is_counted, is_of_service};
use crate::{error::DatapathError, state::active_flows::Recount};

/// Seconds without a packet after which GC deletes the second flow of a masqueraded connection whose first flow is
/// gone. (The backend has left the Service, or another connection of the client has taken the place of the first flow.)
/// No FIN or RST reaches such a flow, so without this rule the flow would keep a source port for a day and would never
/// be evicted.
const ABANDONED: u32 = 60;

/// Observes a GC pass, which reports all flows of Services.
pub trait FlowWalk {
    /// Called when a pass begins, at the tick `now`.
    fn begin(&mut self, now: Tick);
    /// Called for each flow, with both entries and the key of the forward entry. `reply` is `None` if the flow is
    /// tunnelled, or if its reverse entry is lost. Otherwise `reply` has the counters of the reverse entry and the
    /// fields that decide the flow's phase; the other fields of `reply` are copied from `forward`. A pass may report a
    /// flow twice.
    fn flow(&mut self, key: &Tuple, forward: &Flow, reply: Option<&Flow>);
    /// Called when the pass has deleted the flow with this forward entry: the flow has expired, or the pass has
    /// `evicted` the flow to make room. Not called for a flow whose reverse entry is lost: the pass deletes the forward
    /// entry of such a flow after [`Self::end`].
    fn deleted(&mut self, key: &Tuple, evicted: bool);
    /// Called when the pass has reported all flows; not called if the pass fails before that.
    fn end(&mut self);
}

/// The result of a GC pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct GcReport {
    /// Number of entries that the pass has read: one for a tunnelled flow, two for any other flow.
    pub entries: usize,
    /// Number of tunnelled flows that the pass has read.
    pub tunnelled: usize,
    /// Number of deleted flows: expired ones, evicted ones, and abandoned second flows of masqueraded connections.
    pub expired: usize,
    /// Number of tunnelled flows among the deleted ones.
    pub expired_tunnelled: usize,
    /// Number of connections among the deleted flows: all but the second flows of masqueraded connections.
    pub expired_connections: usize,
    /// Number of evicted connections: deleted before they expired, to make room.
    pub evicted: usize,
    /// How full the table was before the pass.
    pub pressure: Pressure,
    /// Number of entries of the overflow `CONNTRACK` after the pass.
    pub overflowed: usize,
    /// Number of flows whose lost entry was restored.
    pub restored: usize,
    /// Number of deleted entries whose counterpart was missing: expired ones, and reverse entries of a client port that
    /// now has a flow to another backend.
    pub orphans: usize,
}

impl GcReport {
    /// Number of entries that the pass has read and not deleted. Restored entries do not count.
    pub const fn entries_left(&self) -> usize {
        let gone = 2 * self.expired - self.expired_tunnelled + self.orphans;
        self.entries.saturating_sub(gone)
    }

    /// Number of flows that are left after the pass, from [`Self::entries_left`]: a tunnelled flow has one entry, any
    /// other flow two.
    pub const fn flows_left(&self) -> usize {
        (self.entries_left() + self.tunnelled.saturating_sub(self.expired_tunnelled)) / 2
    }
}

impl Conntrack {
    /// Runs a GC pass: deletes the flows that have expired at `now`, evicts flows if the table is nearly full, and
    /// restores lost entries.
    pub fn expire(&self, now: Tick) -> Result<GcReport, DatapathError> {
        self.expire_and_recount(now, &mut Recount::default(), None, None)
    }

    /// Like [`Self::expire`], and also corrects the counters of active flows. Before the pass may delete a flow, this
    /// function passes the flow to `ledger`, and a flow of a Service also to `walk`. `ledger` also gets the connections
    /// of sockets.
    pub fn expire_and_recount(
        &self,
        now: Tick,
        recount: &mut Recount,
        ledger: Option<&mut Ledger>,
        walk: Option<&mut dyn FlowWalk>,
    ) -> Result<GcReport, DatapathError> {
        let before = recount.read(&self.active_flows)?;
        let mut index = self.index()?;
        let sockets = self.correct(recount, &before, &mut index);
        let mut pass = Pass::begin(self, now, index, ledger, walk);
        self.table.for_each(|key, flow| pass.visit(key, flow))?;
        if let Some(sockets) = &sockets {
            self.note_sockets(sockets, recount, pass.ledger.as_deref_mut());
        }
        pass.end()
    }

    /// Compares the counters of active flows with the flows in the index and the connections of sockets, and corrects
    /// wrong counters. Returns these connections; if they cannot be read, returns `None` and leaves the counters as
    /// they are.
    fn correct(
        &self,
        recount: &mut Recount,
        before: &BTreeMap<u32, i64>,
        index: &mut EntryIndex,
    ) -> Option<BTreeMap<SocketCounter, SocketCounts>> {
        let sockets = self.sockets.get();
        let sockets =
            sockets.inspect_err(|error| warn!("cannot count connections of sockets: {error}")).ok()?;
        sockets.iter().for_each(|(counter, counts)| index.add_sockets(counter, counts));
        let corrected = recount.correct(&self.active_flows, before, &index.active_flows);
        if corrected > 0 {
            debug!(slots = corrected, "corrected numbers of active flows");
        }
        Some(sockets)
    }

    /// Adds the connections of sockets to `ledger`. Deletes the counters of backends to which no socket has been
    /// connected for many passes.
    fn note_sockets(
        &self,
        sockets: &BTreeMap<SocketCounter, SocketCounts>,
        recount: &mut Recount,
        ledger: Option<&mut Ledger>,
    ) {
        let deleted = self.sockets.delete_idle(sockets, &mut recount.idle_sockets);
        let deleted = deleted.inspect_err(|error| warn!("cannot delete unused counters: {error}"));
        if let Some(ledger) = ledger {
            ledger.note_sockets(sockets);
            ledger.forget_sockets(&deleted.unwrap_or_default());
        }
    }

    /// Deletes both entries of an expired or abandoned flow, unless a packet has refreshed the flow since the walk, or
    /// the first flow of its masqueraded connection still exists. An entry that belongs to another flow by now stays.
    fn delete_expired(
        &self,
        key: &Tuple,
        flow: &Flow,
        now: Tick,
        pressure: Pressure,
    ) -> Result<bool, DatapathError> {
        let Some(forward) = self.table.read(key)?.filter(|current| current.flow.to == flow.to) else {
            return Ok(false);
        };
        let Some(reply) = self.reverse_of(key, &forward.flow)? else { return Ok(false) };
        let is_over = seconds_left_under(pressure, &forward.flow, Some(&reply.flow), now) == 0;
        if !is_over && !is_silent_second(&forward.flow, &reply.flow, now)
            || self.is_behind_live_flow(key, &forward.flow)?
            || !self.table.remove_read(key, &forward)?
        {
            return Ok(false);
        }
        if is_counted(&forward.flow) {
            self.active_flows.add(forward.flow.active_flows_slot, -1);
        }
        self.table.remove_read(&forward.flow.to.reversed(), &reply)?;
        Ok(true)
    }

    /// Deletes the only entry of an expired tunnelled flow, unless a packet has refreshed it since the walk.
    fn delete_expired_tunnelled(
        &self,
        key: &Tuple,
        now: Tick,
        pressure: Pressure,
    ) -> Result<bool, DatapathError> {
        let Some(entry) = self.table.read(key)?.filter(|entry| entry.flow.is_tunnelled()) else {
            return Ok(false);
        };
        let flow = &entry.flow;
        if seconds_left_under(pressure, flow, None, now) > 0 || !self.table.remove_read(key, &entry)? {
            return Ok(false);
        }
        if is_counted(flow) {
            self.active_flows.add(flow.active_flows_slot, -1);
        }
        Ok(true)
    }

    /// Whether this is the second flow of a masqueraded connection whose first flow still exists. Such a flow stays,
    /// however old its last packet is: packets of the client may be lost between the two translations, and without
    /// this flow the next packet would leave with the client's address.
    fn is_behind_live_flow(&self, key: &Tuple, forward: &Flow) -> Result<bool, DatapathError> {
        if !forward.is_second() {
            return Ok(false);
        }
        let reply_of_first = key.reversed();
        match self.table.get(&reply_of_first)? {
            Some(reply) if reply.has_second() => Ok(self.reverse_of(&reply_of_first, &reply)?.is_some()),
            // The first flow is gone. The entry may be that of another connection of the client.
            Some(_) | None => Ok(false),
        }
    }

    /// Restores the missing entry of a flow of which only the entry with this key exists. Instead deletes the existing
    /// entry if the flow has expired, or if it is a reverse entry whose client port now has a flow to another backend.
    fn restore_or_delete(&self, key: &Tuple, now: Tick, report: &mut GcReport) -> Result<(), DatapathError> {
        let Some(entry) = self.table.read(key)? else { return Ok(()) };
        let flow = entry.flow;
        if self.reverse_of(key, &flow)?.is_some() {
            return Ok(());
        }
        let (lost_key, lost) = lost_entry(key, &flow);
        let (from, forward) = if flow.is_reply() { (&lost_key, &lost) } else { (key, &flow) };
        let is_expired = seconds_left_under(report.pressure, &flow, None, now) == 0;
        if is_expired && !self.is_behind_live_flow(from, forward)? {
            report.orphans += usize::from(self.table.remove_read(key, &entry)?);
        } else {
            let marks = Mark::of_entry(&lost_key, lost.flags);
            let restored = self.filter.insert_after(marks, || self.table.insert_new(&lost_key, &lost))?;
            report.restored += usize::from(restored);
            // If the client's port now has a flow to another backend, no forward entry refers to this reverse entry.
            if !restored && flow.is_reply() && self.reverse_of(key, &flow)?.is_none() {
                report.orphans += usize::from(self.table.remove_read(key, &entry)?);
            }
        }
        Ok(())
    }
}

/// A GC pass.
struct Pass<'a, 'w> {
    conntrack: &'a Conntrack,
    now: Tick,
    index: EntryIndex,
    ledger: Option<&'a mut Ledger>,
    walk: Option<&'a mut (dyn FlowWalk + 'w)>,
    report: GcReport,
    /// Keys of the entries whose counterpart is not in the index. A program inserts the two entries of a flow one after
    /// the other, so the pass checks these keys again after its walk.
    alone: Vec<Tuple>,
    /// Key and forward entry of second flows that may be abandoned. The pass checks these flows again after it has
    /// restored the lost entries of their first flows.
    silent: Vec<(Tuple, Flow)>,
}

impl<'a, 'w> Pass<'a, 'w> {
    fn begin(
        conntrack: &'a Conntrack,
        now: Tick,
        index: EntryIndex,
        mut ledger: Option<&'a mut Ledger>,
        mut walk: Option<&'a mut (dyn FlowWalk + 'w)>,
    ) -> Self {
        ledger.iter_mut().for_each(|ledger| ledger.begin());
        walk.iter_mut().for_each(|walk| walk.begin(now));
        let entries = index.entries.len();
        let pressure = Pressure::of(entries, conntrack.table.capacity());
        let report = GcReport { entries, pressure, ..GcReport::default() };
        Self { conntrack, now, index, ledger, walk, report, alone: Vec::new(), silent: Vec::new() }
    }

    /// Reports the entry to the observers. Also deletes the flow if this is the flow's forward entry and the flow has
    /// expired or is to be evicted.
    fn visit(&mut self, key: &Tuple, flow: &Flow) -> Result<(), DatapathError> {
        let reverse = self.index.reverse_of(key, flow);
        self.ledger.iter_mut().for_each(|ledger| ledger.note(key, flow, reverse.as_ref()));
        if let Some(walk) = self.walk.as_mut().filter(|_| is_of_service(flow)) {
            walk.flow(key, flow, reverse.as_ref());
        }
        if flow.is_tunnelled() {
            self.report.tunnelled += 1;
            return self.delete_if_expired(key, flow, None);
        }
        match reverse {
            None => self.alone.push(*key),
            Some(reply) if !flow.is_reply() => return self.delete_if_expired(key, flow, Some(&reply)),
            Some(_) => {}
        }
        Ok(())
    }

    /// Deletes the flow with this forward entry if the flow has expired or is to be evicted; a tunnelled flow has no
    /// `reply`.
    fn delete_if_expired(
        &mut self,
        key: &Tuple,
        flow: &Flow,
        reply: Option<&Flow>,
    ) -> Result<(), DatapathError> {
        let Self { conntrack, now, index, report, walk, silent, .. } = self;
        let pressure = report.pressure;
        if seconds_left_under(pressure, flow, reply, *now) > 0 {
            let is_silent = reply.is_some_and(|reply| is_silent_second(flow, reply, *now));
            if is_silent && !index.has(&key.reversed()) {
                silent.push((*key, *flow));
            }
            return Ok(());
        }
        let deleted = match reply {
            Some(_) => conntrack.delete_expired(key, flow, *now, pressure)?,
            None => conntrack.delete_expired_tunnelled(key, *now, pressure)?,
        };
        if deleted {
            report.expired_tunnelled += usize::from(reply.is_none());
            let evicted = seconds_left(flow, reply, *now) > 0;
            report.expired += 1;
            report.expired_connections += usize::from(!flow.is_second());
            report.evicted += usize::from(evicted && !flow.is_second());
            if let Some(walk) = walk.as_mut().filter(|_| is_of_service(flow)) {
                walk.deleted(key, evicted);
            }
        }
        Ok(())
    }

    /// Ends the walk, restores or deletes the entries whose counterpart is lost, and deletes abandoned second flows.
    fn end(mut self) -> Result<GcReport, DatapathError> {
        self.ledger.iter_mut().for_each(|ledger| ledger.end());
        self.walk.iter_mut().for_each(|walk| walk.end());
        for key in self.alone {
            self.conntrack.restore_or_delete(&key, self.now, &mut self.report)?;
        }
        for (key, flow) in self.silent {
            let deleted = self.conntrack.delete_expired(&key, &flow, self.now, self.report.pressure)?;
            self.report.expired += usize::from(deleted);
        }
        self.report.overflowed = self.conntrack.table.overflowed();
        Ok(self.report)
    }
}

/// Whether this is the second flow of a masqueraded connection, without a packet for [`ABANDONED`] seconds. If the
/// first flow is gone as well, the second flow is abandoned.
fn is_silent_second(forward: &Flow, reply: &Flow, now: Tick) -> bool {
    forward.is_second() && now.seconds_since(forward.last_seen.max(reply.last_seen)) >= ABANDONED
}

/// Key and value of the lost entry of a flow, as far as the other entry determines them.
fn lost_entry(key: &Tuple, flow: &Flow) -> (Tuple, Flow) {
    let lost_key = flow.to.reversed();
    let flags = flow_flags::reverse(flow.flags);
    let mut lost = Flow::new(&lost_key, &key.reversed(), flow.service, flags, flow.last_seen);
    lost.active_flows_slot = flow.active_flows_slot;
    if key.protocol == protocol::TCP {
        // An ACK proves that the other side has sent a SYN; its acknowledgement number is the other side's next
        // sequence number.
        if flow.seen & seen::ACK != 0 {
            lost.seen = seen::PACKET | seen::SYN | seen::ACK;
            lost.next_seq = flow.last_ack;
            lost.last_ack = flow.next_seq;
        }
    } else if flow.is_reply() {
        lost.seen = seen::PACKET;
    }
    (lost_key, lost)
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
    fn restored_entry_equals_the_lost_one() {
        for protocol in [protocol::TCP, protocol::UDP] {
            for flags in [0, flow_flags::HAIRPIN, flow_flags::SECOND_OF_MASQUERADED | flow_flags::AT_EGRESS] {
                let (from, forward, reply) = pair(protocol, flags);
                assert_eq!(lost_entry(&from, &forward), (forward.to.reversed(), reply));
                let (key, mut restored) = lost_entry(&forward.to.reversed(), &reply);
                restored.seen = 0;
                assert_eq!((key, restored), (from, forward));
            }
        }
    }

    /// While an entry of a flow is lost, [`Phase::of_entry`] returns the phase that the flow has after GC has restored
    /// that entry.
    #[test]
    fn restored_entry_changes_neither_phase_nor_remaining_time() {
        const UDP: [u8; 3] = [0, seen::PACKET, seen::PACKET | seen::STREAM];
        let tcp = (0..1u8 << 4).map(|bits| {
            let bit = |number: u8, flag: u8| if bits & (1 << number) != 0 { flag } else { 0 };
            seen::PACKET | bit(0, seen::SYN) | bit(1, seen::ACK) | bit(2, seen::FIN) | bit(3, seen::RST)
        });
        let histories = tcp.chain([0]).flat_map(|seen| [(protocol::TCP, seen), (protocol::SCTP, seen)]);
        for (protocol, seen) in histories.chain(UDP.map(|seen| (protocol::UDP, seen))) {
            let (from, mut forward, mut reply) = pair(protocol, flow_flags::SECOND_OF_MASQUERADED);
            (forward.seen, reply.seen) = (seen, seen);
            let now = Tick(55);
            let (_, lost) = lost_entry(&from, &forward);
            assert_eq!(Phase::of_entry(&forward, None), Phase::of(&forward, &lost), "{protocol} {seen:#x}");
            assert_eq!(seconds_left(&forward, None, now), seconds_left(&forward, Some(&lost), now));
            let (_, lost) = lost_entry(&forward.to.reversed(), &reply);
            assert_eq!(
                Phase::of_entry(&reply, None),
                Phase::of(&lost, &reply),
                "{protocol} {seen:#x}, reply"
            );
            assert_eq!(seconds_left(&reply, None, now), seconds_left(&lost, Some(&reply), now));
        }
    }

    #[test]
    fn flows_left_counts_a_tunnelled_flow_as_one_entry() {
        let report = GcReport {
            entries: 11,
            tunnelled: 3,
            expired: 3,
            expired_tunnelled: 1,
            orphans: 1,
            ..GcReport::default()
        };
        assert_eq!(
            (report.entries_left(), report.flows_left()),
            (5, 3),
            "two in tunnels, another, and a half"
        );
    }

    #[test]
    fn restored_entry_keeps_a_connection_established() {
        let (from, mut forward, mut reply) = pair(protocol::TCP, 0);
        let segment = |flags, seq, ack| Segment { flags, seq, ack, payload: 0 };
        forward.observe_segment(&segment(tcp_flags::SYN, 1000, 0), Tick(50));
        reply.observe_segment(&segment(tcp_flags::SYN | tcp_flags::ACK, 5000, 1001), Tick(50));
        forward.observe_segment(&segment(tcp_flags::ACK, 1001, 5001), Tick(50));
        let (_, lost_reply) = lost_entry(&from, &forward);
        let (_, lost_forward) = lost_entry(&forward.to.reversed(), &reply);
        assert_eq!(Phase::of(&forward, &lost_reply), Phase::Established);
        assert_eq!(Phase::of(&lost_forward, &reply), Phase::Established);
        assert!(lost_reply.accepts_reset(&segment(tcp_flags::RST, 5001, 0), &forward));
        assert!(lost_forward.accepts_reset(&segment(tcp_flags::RST, 1001, 0), &reply));
    }
}
