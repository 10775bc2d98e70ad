//! The agent's part of connection tracking: listing flows, expiry (GC), and restoring lost entries.
//!
//! A flow has two entries, forward and reverse; a flow in a tunnel has one. Programs change the table at any time. So
//! the agent reads an entry again right before it deletes it, and if a race leaves a flow with one entry, the next GC
//! pass repairs it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    hash::{BuildHasher as _, RandomState},
    net::IpAddr,
    sync::Arc,
};

use lb_common::{
    Address, SocketCounter, SocketCounts,
    conntrack::{Flow, Pressure, Tick, Tuple, flow_flags, seconds_left, seconds_left_under, seen},
    filter::Mark,
    protocol,
};

use lb_core::{active_flow_slots::ServiceEndpoint, traffic};
use tracing::{debug, warn};

use crate::{
    bpf::bpffs::Folder,
    error::DatapathError,
    net::xfrm::OutPolicy,
    state::{
        active_flows::{ActiveFlows, Recount},
        filter::Filter,
        flow_table::{FlowTable, ReadEntry},
        socket_counts::SocketCountsMap,
    },
};

/// Traffic of Services and backends. Its hasher has a random seed, which clients cannot predict.
pub type Ledger = traffic::Ledger<RandomState>;

/// Observes a GC pass, which reports all flows of Services.
pub trait FlowWalk {
    /// Called when a pass begins, at the tick `now`.
    fn begin(&mut self, now: Tick);
    /// Called for each flow, with both entries and the key of the forward entry. `reply` is `None` if the flow is
    /// tunnelled, or if its reverse entry is lost. Otherwise `reply` has the counters of the reverse entry and the
    /// fields that decide the flow's phase; its other fields are those of `forward`. A pass may report a flow twice.
    fn flow(&mut self, key: &Tuple, forward: &Flow, reply: Option<&Flow>);
    /// Called when the pass has deleted the flow with this forward entry: it has expired, or was `evicted` before that
    /// to make room.
    fn deleted(&mut self, key: &Tuple, evicted: bool);
    /// Called when the pass has reported all flows; not called if the pass fails before that.
    fn end(&mut self);
}

/// Connection tracking: the flow table, the counters of active flows, the counts of the connections of sockets, and the
/// filter. Clones share all of them.
#[derive(Clone, Debug)]
pub struct Conntrack {
    table: Arc<FlowTable>,
    active_flows: Arc<ActiveFlows>,
    sockets: SocketCountsMap,
    filter: Arc<Filter>,
}

/// A flow with its entries in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Tuple of packets from the client to the virtual address.
    pub from: Tuple,
    /// The flow's forward entry.
    pub forward: Flow,
    /// The flow's reverse entry. A tunnelled flow has none; if another flow lacks it, a GC pass restores it.
    pub reply: Option<Flow>,
    /// Tuple with which packets of a masqueraded connection leave the node; `None` if they keep the client's address.
    pub masqueraded: Option<Tuple>,
}

/// The result of a GC pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct GcReport {
    /// Number of entries that the pass has read: one for a tunnelled flow, two for any other flow.
    pub entries: usize,
    /// Number of tunnelled flows that the pass has read.
    pub tunnelled: usize,
    /// Number of deleted flows, both expired and evicted ones.
    pub expired: usize,
    /// Number of tunnelled flows among the deleted ones.
    pub expired_tunnelled: usize,
    /// Number of evicted flows among the deleted ones: deleted before they expired, to make room.
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
    /// Counts a flow that was deleted; returns whether it was evicted before it expired.
    fn count_expired(&mut self, forward: &Flow, reply: Option<&Flow>, now: Tick) -> bool {
        let evicted = seconds_left(forward, reply, now) > 0;
        self.expired += 1;
        self.evicted += usize::from(evicted);
        evicted
    }

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
    pub(crate) fn open(folder: &Folder, filter: &Arc<Filter>) -> Result<Self, DatapathError> {
        Ok(Self {
            table: Arc::clone(filter.flows()),
            active_flows: Arc::new(ActiveFlows::open(folder)?),
            sockets: SocketCountsMap::open(folder)?,
            filter: Arc::clone(filter),
        })
    }

    /// The flow table, which has entries by tuple.
    pub fn table(&self) -> &FlowTable {
        &self.table
    }

    /// The filter that programs read before the flow table.
    pub fn filter(&self) -> &Filter {
        &self.filter
    }

    /// The counters of active flows.
    pub fn active_flows(&self) -> &ActiveFlows {
        &self.active_flows
    }

    /// Sets the counter of active flows in a slot, for tests.
    pub fn set_active_flows(&self, slot: u32, flows: i64) {
        self.active_flows.add(slot, flows - self.active_flows.get(slot));
    }

    /// Counts of the connections of sockets to each backend. Programs translate these connections in `connect(2)`, so
    /// the flow table has no flows for them.
    pub fn sockets(&self) -> Result<BTreeMap<SocketCounter, SocketCounts>, DatapathError> {
        self.sockets.get()
    }

    /// The slots of `ACTIVE` that flows and sockets refer to, each with the endpoint whose flows it counts.
    pub fn active_flows_slots(&self) -> Result<BTreeMap<u32, ServiceEndpoint>, DatapathError> {
        let mut slots = BTreeMap::new();
        self.table.for_each(|_, flow| {
            if is_counted(flow) {
                let Tuple { destination: address, destination_port: port, .. } = flow.to;
                slots
                    .insert(flow.active_flows_slot, ServiceEndpoint { service: flow.service, address, port });
            }
            Ok(())
        })?;
        let sockets = self.sockets.get()?.into_keys().filter(|counter| counter.active_flows_slot != 0);
        slots.extend(sockets.map(|counter| (counter.active_flows_slot, ServiceEndpoint::from(&counter))));
        Ok(slots)
    }

    /// The present time on the clock of the programs.
    pub fn now() -> Tick {
        Tick::from_nanos(monotonic_nanoseconds())
    }

    /// All flows, sorted by [`Connection::from`].
    pub fn list(&self) -> Result<Vec<Connection>, DatapathError> {
        let mut entries = BTreeMap::new();
        self.table.for_each(|key, flow| {
            entries.insert(*key, *flow);
            Ok(())
        })?;
        // A tunnelled flow has no reverse entry: an entry that is found at its `forward.to` belongs to another flow.
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
                masqueraded: masqueraded(from, forward, of_flow(forward, &forward.to)),
            })
            .collect();
        Ok(connections)
    }

    /// Calls `see` for each flow, in no particular order. Unlike [`Self::list`], it keeps no flow in memory.
    ///
    /// # Errors
    /// The table cannot be read.
    pub fn for_each_connection(&self, mut see: impl FnMut(Connection)) -> Result<(), DatapathError> {
        self.table.for_each(|key, forward| {
            if forward.is_reply() || is_masquerade(forward) {
                return Ok(());
            }
            // A tunnelled flow has only its forward entry.
            let (mut reply, mut second) = (None, None);
            if !forward.is_tunnelled() {
                reply = self.table.get(&forward.to.reversed())?;
                if forward.flags & flow_flags::MASQUERADED != 0 {
                    second = self.table.get(&forward.to)?;
                }
            }
            let masqueraded = masqueraded(key, forward, second.as_ref());
            see(Connection { from: *key, forward: *forward, reply, masqueraded });
            Ok(())
        })
    }

    /// Deletes every entry of the flow table; returns how many.
    pub fn flush(&self) -> Result<usize, DatapathError> {
        let mut entries = Vec::new();
        self.table.for_each_read(|key, entry| {
            entries.push((*key, entry));
            Ok(())
        })?;
        // Entries of flows that begin after the walk stay.
        let mut deleted = 0;
        for (key, entry) in entries {
            deleted += usize::from(self.delete_read(&key, &entry)?);
        }
        Ok(deleted)
    }

    /// Deletes the flows for which `unwanted`, given key and forward entry, is true; returns how many. The second flow
    /// of a masqueraded connection stays until it expires: no packet of the client reaches it any more.
    pub fn purge(&self, mut unwanted: impl FnMut(&Tuple, &Flow) -> bool) -> Result<usize, DatapathError> {
        let mut flows = 0;
        self.table.for_each_read(|key, forward| {
            let flow = &forward.flow;
            if !flow.is_reply() && !is_masquerade(flow) && unwanted(key, flow) {
                flows += usize::from(self.delete_flow(key, &forward)?);
            }
            Ok(())
        })?;
        Ok(flows)
    }

    /// Among the connections of the service ports whose id `concerns` selects, deletes those for which `ends` returns
    /// true, given the forward and the reverse entry. Also deletes the second flow of a masqueraded connection: then
    /// the node's stack answers packets that the backend still sends.
    pub fn end(
        &self,
        concerns: impl Fn(u32) -> bool,
        mut ends: impl FnMut(&Flow, Option<&Flow>) -> bool,
    ) -> Result<(), DatapathError> {
        self.table.for_each_read(|key, forward| {
            let flow = &forward.flow;
            if !is_of_service(flow) || !concerns(flow.service) {
                return Ok(());
            }
            let reply = if flow.is_tunnelled() { None } else { self.reverse_of(key, flow)? };
            if ends(flow, reply.as_ref().map(|reply| &reply.flow)) && self.delete_flow(key, &forward)? {
                self.delete_second(flow)?;
            }
            Ok(())
        })
    }

    /// Deletes the second flow of a masqueraded connection; `first` is the forward entry of the first flow.
    fn delete_second(&self, first: &Flow) -> Result<(), DatapathError> {
        if first.flags & flow_flags::MASQUERADED == 0 {
            return Ok(());
        }
        let second = self.table.read(&first.to)?.filter(|second| is_masquerade(&second.flow));
        second.map_or(Ok(false), |second| self.delete_flow(&first.to, &second)).map(drop)
    }

    /// Deletes the flow with this forward entry, unless another flow has replaced it since the entry was read. Returns
    /// whether the flow was deleted.
    fn delete_flow(&self, key: &Tuple, forward: &ReadEntry<'_>) -> Result<bool, DatapathError> {
        let flow = &forward.flow;
        let reply = if flow.is_tunnelled() { None } else { self.reverse_of(key, flow)? };
        if !self.delete_read(key, forward)? {
            return Ok(false);
        }
        if let Some(reply) = reply {
            self.table.remove_flow(&flow.to.reversed(), &reply)?;
        }
        Ok(true)
    }

    /// Deletes the entry if it still belongs to the flow that was read. If it is the forward entry of a flow that is
    /// counted in a slot of `ACTIVE`, also decrements that counter. Returns whether the entry was deleted.
    fn delete_read(&self, key: &Tuple, entry: &ReadEntry<'_>) -> Result<bool, DatapathError> {
        let Some(deleted) = self.table.remove_flow(key, entry)? else { return Ok(false) };
        if is_counted(&deleted) {
            self.active_flows.add(deleted.active_flows_slot, -1);
        }
        Ok(true)
    }

    /// The node's addresses that masqueraded packets have as their source.
    pub fn masquerade_sources(&self) -> Result<BTreeSet<IpAddr>, DatapathError> {
        let mut sources = BTreeSet::new();
        self.table.for_each(|key, flow| {
            sources.extend(masquerade_source(key, flow).map(IpAddr::from));
            Ok(())
        })?;
        Ok(sources)
    }

    /// Deletes the connections whose replies would bypass one of these IPsec policies, except those of internal
    /// clients. Returns how many.
    pub fn purge_unencrypted(
        &self,
        policies: &[OutPolicy],
        is_internal: impl Fn(IpAddr) -> bool,
    ) -> Result<usize, DatapathError> {
        let is_bypassed = |key: &Tuple| {
            let (vip, client) = (key.destination.into(), IpAddr::from(key.source));
            !is_internal(client) && policies.iter().any(|policy| policy.is_bypassed(vip, client))
        };
        self.purge(|key, _| is_bypassed(key))
    }

    /// Deletes the connections that are masqueraded with one of these addresses. Returns how many.
    pub fn purge_masqueraded(&self, sources: &BTreeSet<IpAddr>) -> Result<usize, DatapathError> {
        let is_one = |key: &Tuple, flow: &Flow| {
            masquerade_source(key, flow).is_some_and(|source| sources.contains(&source.into()))
        };
        let mut second_flows = HashSet::new();
        self.table.for_each(|key, flow| {
            second_flows.extend((is_masquerade(flow) && is_one(key, flow)).then_some(*key));
            Ok(())
        })?;
        self.purge(|key, flow| {
            let is_first = flow.flags & flow_flags::MASQUERADED != 0;
            is_first && second_flows.contains(&flow.to) || is_one(key, flow)
        })
    }

    /// Adds the traffic of every flow, and the connections of sockets, to `ledger`.
    pub fn tally(&self, ledger: &mut Ledger) -> Result<(), DatapathError> {
        let index = self.index()?;
        ledger.begin();
        self.table.for_each(|key, flow| {
            ledger.note(key, flow, index.reverse_of(key, flow).as_ref());
            Ok(())
        })?;
        ledger.note_sockets(&self.sockets.get()?);
        ledger.end();
        Ok(())
    }

    /// Runs a GC pass: deletes the flows that have expired at `now`, evicts flows if the table is nearly full, and
    /// restores lost entries.
    pub fn expire(&self, now: Tick) -> Result<GcReport, DatapathError> {
        self.expire_and_recount(now, &mut Recount::default(), None, None)
    }

    /// Like [`Self::expire`]; also corrects the counters of active flows, and passes every flow to `ledger`, and every
    /// flow of a Service to `walk`, before it may be deleted. `ledger` also gets the connections of sockets.
    pub fn expire_and_recount(
        &self,
        now: Tick,
        recount: &mut Recount,
        mut ledger: Option<&mut Ledger>,
        mut walk: Option<&mut dyn FlowWalk>,
    ) -> Result<GcReport, DatapathError> {
        let before = recount.read(&self.active_flows)?;
        let mut index = self.index()?;
        let sockets = self.correct(recount, &before, &mut index);
        let entries = index.entries.len();
        let pressure = Pressure::of(entries, self.table.capacity());
        let mut report = GcReport { entries, pressure, ..GcReport::default() };
        // A program inserts the two entries of a flow one after the other, so single entries are checked again after
        // the walk.
        let mut alone = Vec::new();
        ledger.iter_mut().for_each(|ledger| ledger.begin());
        walk.iter_mut().for_each(|walk| walk.begin(now));
        self.table.for_each(|key, flow| {
            let reverse = index.reverse_of(key, flow);
            ledger.iter_mut().for_each(|ledger| ledger.note(key, flow, reverse.as_ref()));
            let mut walk = walk.as_mut().filter(|_| is_of_service(flow));
            if let Some(walk) = &mut walk {
                walk.flow(key, flow, reverse.as_ref());
            }
            if flow.is_tunnelled() {
                report.tunnelled += 1;
                if seconds_left_under(pressure, flow, None, now) == 0
                    && self.delete_expired_tunnelled(key, now, pressure)?
                {
                    report.expired_tunnelled += 1;
                    let evicted = report.count_expired(flow, None, now);
                    if let Some(walk) = walk {
                        walk.deleted(key, evicted);
                    }
                }
                return Ok(());
            }
            match reverse {
                Some(reply)
                    if !flow.is_reply() && seconds_left_under(pressure, flow, Some(&reply), now) == 0 =>
                {
                    if self.delete_expired(key, flow, now, pressure)? {
                        let evicted = report.count_expired(flow, Some(&reply), now);
                        if let Some(walk) = walk {
                            walk.deleted(key, evicted);
                        }
                    }
                }
                Some(_) => {}
                None => alone.push(*key),
            }
            Ok(())
        })?;
        if let Some(sockets) = &sockets {
            self.note_sockets(sockets, recount, ledger.as_deref_mut());
        }
        ledger.iter_mut().for_each(|ledger| ledger.end());
        walk.iter_mut().for_each(|walk| walk.end());
        for key in alone {
            self.restore_or_delete(&key, now, &mut report)?;
        }
        report.overflowed = self.table.overflowed();
        Ok(report)
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

    fn index(&self) -> Result<EntryIndex, DatapathError> {
        let mut index = EntryIndex::default();
        self.table.for_each(|key, flow| {
            index.add(key, flow);
            Ok(())
        })?;
        Ok(index)
    }

    /// Reads the entry of the opposite direction of a flow.
    fn reverse_of(&self, key: &Tuple, flow: &Flow) -> Result<Option<ReadEntry<'_>>, DatapathError> {
        let reverse = self.table.read(&flow.to.reversed())?;
        Ok(reverse.filter(|reverse| reverse.flow.to.reversed() == *key))
    }

    /// Deletes both entries of an expired flow, unless a packet has refreshed the flow since the walk, or the first
    /// flow of its masqueraded connection still exists. An entry that belongs to another flow by now stays.
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
        if seconds_left_under(pressure, &forward.flow, Some(&reply.flow), now) > 0
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
        if !is_masquerade(forward) {
            return Ok(false);
        }
        let reply_of_first = key.reversed();
        match self.table.get(&reply_of_first)? {
            Some(reply) => Ok(self.reverse_of(&reply_of_first, &reply)?.is_some()),
            None => Ok(false),
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

/// A digest of every entry, so that a GC pass finds reverse entries without a lookup of each in the flow table: a
/// lookup in the overflow takes a system call. The index shows only which flows may have expired: the agent reads the
/// entries again before a deletion.
#[derive(Default)]
struct EntryIndex {
    hasher: RandomState,
    /// Entries that the walk has found, by the digest of their key.
    entries: HashMap<u64, IndexedEntry>,
    /// Number of active flows that the walk has found, by slot of `ACTIVE`.
    active_flows: BTreeMap<u32, i64>,
}

struct IndexedEntry {
    /// Digest of the key of the entry for the opposite direction.
    reverse_key: u64,
    last_seen: Tick,
    next_seq: u32,
    packets: u32,
    traffic: u64,
    seen: u8,
}

impl EntryIndex {
    fn add(&mut self, key: &Tuple, flow: &Flow) {
        let reverse_key = self.hasher.hash_one(flow.to.reversed());
        let Flow { last_seen, next_seq, packets, traffic, seen, .. } = *flow;
        let entry = IndexedEntry { reverse_key, last_seen, next_seq, packets, traffic, seen };
        // A walk may return an entry twice; it must be counted once.
        let known = self.entries.insert(self.hasher.hash_one(key), entry).is_some();
        if is_counted(flow) && !known {
            *self.active_flows.entry(flow.active_flows_slot).or_default() += 1;
        }
    }

    /// Counts the connections of sockets to a backend, which have no entries.
    fn add_sockets(&mut self, counter: &SocketCounter, counts: &SocketCounts) {
        let active = i64::try_from(counts.active()).unwrap_or(i64::MAX);
        if counter.active_flows_slot != 0 && active > 0 {
            *self.active_flows.entry(counter.active_flows_slot).or_default() += active;
        }
    }

    /// The reverse entry, with its counters and the fields that decide the flow's phase; the other fields are those of
    /// `flow`.
    fn reverse_of(&self, key: &Tuple, flow: &Flow) -> Option<Flow> {
        let entry = self.entries.get(&self.hasher.hash_one(flow.to.reversed()))?;
        let is_reverse = entry.reverse_key == self.hasher.hash_one(key);
        let IndexedEntry { last_seen, next_seq, packets, traffic, seen, .. } = *entry;
        is_reverse.then_some(Flow { last_seen, next_seq, packets, traffic, seen, ..*flow })
    }
}

/// Whether the entry belongs to the second flow of a masqueraded connection, which replaces the source address.
const fn is_masquerade(flow: &Flow) -> bool {
    flow.flags & flow_flags::SECOND_OF_MASQUERADED != 0
}

/// Whether this is the forward entry of a [client's flow](Flow::is_of_client).
const fn is_of_service(flow: &Flow) -> bool {
    !flow.is_reply() && flow.is_of_client()
}

/// [`Connection::masqueraded`] of the flow with this forward entry; `second` is the entry of its translated tuple, if
/// any. A routed flow has no second flow: its forward entry replaces both addresses.
fn masqueraded(from: &Tuple, forward: &Flow, second: Option<&Flow>) -> Option<Tuple> {
    let is_by_second = second.filter(|flow| is_masquerade(flow));
    is_by_second.or_else(|| masquerade_source(from, forward).map(|_| forward)).map(|flow| flow.to)
}

/// The node's address that this entry puts in place of the client's; `None` if it does not masquerade, or is a reverse
/// entry.
fn masquerade_source(key: &Tuple, flow: &Flow) -> Option<Address> {
    if flow.is_reply() {
        return None;
    }
    key.masqueraded_as(&flow.to, flow.flags).map(|(address, _port)| address)
}

/// Whether this is the forward entry of a flow that is counted in a slot of `ACTIVE`.
const fn is_counted(flow: &Flow) -> bool {
    flow.active_flows_slot != 0 && !flow.is_reply()
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

/// Nanoseconds of `CLOCK_MONOTONIC`, the clock of the programs, which does not change when the time of day is set.
pub fn monotonic_nanoseconds() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // `CLOCK_MONOTONIC` starts at boot and is never negative.
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use lb_common::conntrack::{Phase, Segment, tcp_flags};

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

    /// GC restores the lost entry of a flow. [`Phase::of_entry`] gives readers the same phase before that as after it.
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
