//! The agent's part of connection tracking: listing flows, ending them, and garbage collection.
//!
//! A flow has two entries, forward and reverse; a flow in a tunnel has one. Programs change the table at any time. So
//! the agent reads an entry again right before deleting the entry. If a race leaves a flow with one entry, the next GC
//! pass repairs the flow.

mod gc;
mod index;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    hash::RandomState,
    net::IpAddr,
    sync::Arc,
};

use lb_common::{
    Address, SocketCounter, SocketCounts,
    conntrack::{Flow, Tick, Tuple},
};

use lb_core::{active_flow_slots::ServiceEndpoint, earlier_flows::EarlierFlows, traffic};

pub use self::gc::{FlowWalk, GcReport};
use self::index::EntryIndex;
use crate::{
    bpf::bpffs::Folder,
    error::DatapathError,
    net::xfrm::OutPolicy,
    state::{
        active_flows::ActiveFlows,
        filter::Filter,
        flow_table::{FlowTable, ReadEntry},
        socket_counts::SocketCountsMap,
    },
};

/// Traffic of Services and backends. Its hasher has a random seed, which clients cannot predict.
pub type Ledger = traffic::Ledger<RandomState>;

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
    /// The flow's reverse entry. A tunnelled flow has no reverse entry; if the reverse entry of any other flow is
    /// missing, a GC pass restores this entry.
    pub reply: Option<Flow>,
    /// Tuple with which packets of a masqueraded connection leave the node; `None` if they keep the client's address.
    pub masqueraded: Option<Tuple>,
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

    /// The slots of `ACTIVE` in which present flows and sockets are counted, each with its endpoint, and the highest id
    /// of a service port of these flows and sockets.
    pub fn earlier_flows(&self) -> Result<EarlierFlows, DatapathError> {
        let mut earlier = EarlierFlows::default();
        let EarlierFlows { active_flows_slots, highest_service } = &mut earlier;
        self.table.for_each(|_, flow| {
            *highest_service = flow.service.max(*highest_service);
            if is_counted(flow) {
                let Tuple { destination: address, destination_port: port, .. } = flow.to;
                let endpoint = ServiceEndpoint { service: flow.service, address, port };
                active_flows_slots.insert(flow.active_flows_slot, endpoint);
            }
            Ok(())
        })?;
        for counter in self.sockets.get()?.into_keys() {
            *highest_service = counter.service.max(*highest_service);
            if counter.active_flows_slot != 0 {
                active_flows_slots.insert(counter.active_flows_slot, ServiceEndpoint::from(&counter));
            }
        }
        Ok(earlier)
    }

    /// The present time on the clock of the programs.
    pub fn now() -> Tick {
        Tick::from_nanos(monotonic_nanoseconds())
    }

    /// All flows, sorted by [`Connection::from`], without the second flows of masqueraded connections, which are in
    /// [`Connection::masqueraded`].
    pub fn list(&self) -> Result<Vec<Connection>, DatapathError> {
        let mut entries = BTreeMap::new();
        self.table.for_each(|key, flow| {
            entries.insert(*key, *flow);
            Ok(())
        })?;
        // A tunnelled flow has no reverse entry and no second flow: an entry with the key `forward.to`, or with the
        // reversed key, belongs to another flow.
        let of_flow = |forward: &Flow, key: &Tuple| {
            if forward.is_tunnelled() { None } else { entries.get(key) }
        };
        let connections = entries
            .iter()
            .filter(|(_, flow)| !flow.is_reply() && !flow.is_second())
            .map(|(from, forward)| Connection {
                from: *from,
                forward: *forward,
                reply: of_flow(forward, &forward.to.reversed()).copied(),
                masqueraded: masqueraded(from, forward, of_flow(forward, &forward.to)),
            })
            .collect();
        Ok(connections)
    }

    /// Calls `see` for each flow that [`Self::list`] returns, in no particular order. Unlike `list`, it keeps no flow
    /// in memory, and it may pass a flow twice.
    ///
    /// # Errors
    /// The table cannot be read.
    pub fn for_each_connection(&self, mut see: impl FnMut(Connection)) -> Result<(), DatapathError> {
        self.table.for_each(|key, forward| {
            if forward.is_reply() || forward.is_second() {
                return Ok(());
            }
            // A tunnelled flow has only its forward entry.
            let (mut reply, mut second) = (None, None);
            if !forward.is_tunnelled() {
                reply = self.table.get(&forward.to.reversed())?;
                if forward.has_second() {
                    second = self.table.get(&forward.to)?;
                }
            }
            let masqueraded = masqueraded(key, forward, second.as_ref());
            see(Connection { from: *key, forward: *forward, reply, masqueraded });
            Ok(())
        })
    }

    /// Deletes every entry that a walk over the flow table finds; returns how many. Entries of flows that begin later
    /// stay.
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

    /// Deletes the flows for whose key and forward entry `unwanted` returns true. Returns the number of deleted flows.
    /// The second flow of a masqueraded connection stays. GC deletes it when it expires: about a minute after its last
    /// packet at the latest.
    pub fn purge(&self, mut unwanted: impl FnMut(&Tuple, &Flow) -> bool) -> Result<usize, DatapathError> {
        let mut flows = 0;
        self.table.for_each_read(|key, forward| {
            let flow = &forward.flow;
            if !flow.is_reply() && !flow.is_second() && unwanted(key, flow) {
                flows += usize::from(self.delete_flow(key, &forward)?);
            }
            Ok(())
        })?;
        Ok(flows)
    }

    /// Ends connections of the service ports that `concerns` selects by their id: passes the forward entry of each
    /// connection, and its reverse entry if there is one, to `ends`, and deletes the connection if `ends` returns true.
    /// Also deletes the second flow of a masqueraded connection, so that the node's stack answers packets that the
    /// backend still sends.
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
        if !first.has_second() {
            return Ok(());
        }
        let second = self.table.read(&first.to)?.filter(|second| second.flow.is_second());
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

    /// Deletes the entry if it still belongs to the flow that was read. If this is the forward entry of a flow that is
    /// counted in a slot of `ACTIVE`, also decrements the counter in this slot. Returns whether the entry was deleted.
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

    /// Deletes the connections whose replies would bypass one of these IPsec policies, except connections of internal
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
            second_flows.extend((flow.is_second() && is_one(key, flow)).then_some(*key));
            Ok(())
        })?;
        self.purge(|key, flow| {
            let is_first = flow.has_second();
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

    fn index(&self) -> Result<EntryIndex, DatapathError> {
        let mut index = EntryIndex::default();
        self.table.for_each(|key, flow| {
            index.add(key, flow);
            Ok(())
        })?;
        Ok(index)
    }

    /// Reads the entry for the opposite direction of the entry `flow` with this key; `None` if the other entry is
    /// missing.
    fn reverse_of(&self, key: &Tuple, flow: &Flow) -> Result<Option<ReadEntry<'_>>, DatapathError> {
        let reverse = self.table.read(&flow.to.reversed())?;
        Ok(reverse.filter(|reverse| reverse.flow.leads_back_to(key)))
    }
}

/// Whether this is the forward entry of a [client's flow](Flow::is_of_client).
const fn is_of_service(flow: &Flow) -> bool {
    !flow.is_reply() && flow.is_of_client()
}

/// [`Connection::masqueraded`] of the flow with this forward entry; `second` is the entry, if any, whose key is the
/// tuple that the forward entry translates to. A routed flow has no second flow: its forward entry replaces both
/// addresses.
fn masqueraded(from: &Tuple, forward: &Flow, second: Option<&Flow>) -> Option<Tuple> {
    let is_by_second = second.filter(|flow| flow.is_second());
    is_by_second.or_else(|| masquerade_source(from, forward).map(|_| forward)).map(|flow| flow.to)
}

/// The node's address that this entry puts in place of the client's; `None` if it does not masquerade, or is a reverse
/// entry.
fn masquerade_source(key: &Tuple, flow: &Flow) -> Option<Address> {
    if flow.is_reply() {
        return None;
    }
    key.masqueraded_as(&flow.to, flow.flags).map(|_| flow.to.source)
}

/// Whether this is the forward entry of a flow that is counted in a slot of `ACTIVE`.
const fn is_counted(flow: &Flow) -> bool {
    flow.active_flows_slot != 0 && !flow.is_reply()
}

/// Nanoseconds of `CLOCK_MONOTONIC`, the clock of the programs, which does not change when the time of day is set.
pub fn monotonic_nanoseconds() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // `CLOCK_MONOTONIC` starts at boot and is never negative.
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0))
}
