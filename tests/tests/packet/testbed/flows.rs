//! Flows, affinity, counts of active flows, and the packet counters.

use std::{collections::BTreeMap, net::SocketAddr};

use aya::{
    maps::{Array, HashMap, PerCpuArray, PerCpuValues},
    util::nr_cpus,
};
use bytemuck::Zeroable as _;
use lb_common::{
    Affinity, Outcome, ServiceClient,
    conntrack::{CachedNextHop, Flow, Phase, Tick, Tuple, flow_flags},
    filter::Mark,
};

use super::{super::packets::Packet, Testbed, services::COUNTER};

impl Testbed {
    /// The backend of the flow of the packet `sent`.
    pub(crate) fn backend_of(&self, sent: &Packet) -> SocketAddr {
        let to = self.flow(&sent.tuple()).unwrap().to;
        to.destination_socket()
    }

    /// All entries. Asserts that both copies of the filter have the marks of each entry.
    #[track_caller]
    pub(crate) fn flows(&self) -> BTreeMap<Tuple, Flow> {
        let flows = self.entries();
        for (key, flow) in &flows {
            for (mark, copy) in
                Mark::of_entry(key, flow.flags).into_iter().flat_map(|mark| [(mark, 0), (mark, 1)])
            {
                assert!(mark.is_set(&self.filter, copy), "{}: no mark of {key:?}", self.context());
            }
        }
        flows
    }

    /// Inserts an entry, or replaces its flow, and sets its marks in the filter.
    pub(crate) fn insert_entry(&mut self, key: &Tuple, flow: &Flow) {
        Mark::of_entry(key, flow.flags).iter().for_each(|mark| mark.set(&self.filter));
        self.put_entry(key, flow);
    }

    /// Deletes the `nth` entry, if it exists.
    pub(crate) fn delete_nth_entry(&mut self, nth: usize) {
        let key = self.flows().into_keys().nth(nth);
        key.into_iter().for_each(|key| self.remove_entry(&key));
    }

    /// Replaces all entries.
    pub(crate) fn restore_flows(&mut self, flows: &BTreeMap<Tuple, Flow>) {
        self.clear_flows();
        for (key, flow) in flows {
            self.insert_entry(key, flow);
        }
    }

    /// Empties the cache of next hops, which otherwise expire after a tick (1.07 s).
    pub(crate) fn expire_next_hops(&mut self) {
        let mut map: PerCpuArray<_, CachedNextHop> =
            self.object.map_mut("NEXT_HOPS").unwrap().try_into().unwrap();
        let empty = CachedNextHop::zeroed();
        for slot in 0..map.len() {
            if map.get(&slot, 0).unwrap().iter().any(|cached| *cached != empty) {
                let empty = PerCpuValues::try_from(vec![empty; nr_cpus().unwrap()]).unwrap();
                map.set(slot, empty, 0).unwrap();
            }
        }
    }

    /// Clears `EXHAUSTED`, which records the backends whose source ports have run out in this tick.
    pub(crate) fn forget_exhausted_ports(&mut self) {
        let mut map: Array<_, u64> = self.object.map_mut("EXHAUSTED").unwrap().try_into().unwrap();
        for slot in 0..map.len() {
            if map.get(&slot, 0).unwrap() != 0 {
                map.set(slot, 0, 0).unwrap();
            }
        }
    }

    /// Asserts that there is exactly this number of flows, with two entries each.
    #[track_caller]
    pub(crate) fn assert_flows(&self, count: usize) {
        let flows = self.flows();
        assert_eq!(flows.len(), 2 * count, "{}: {flows:#?}", self.context());
    }

    /// Asserts that both entries of the flow that translates `sent` to `translated` exist, have the flags of a plain or
    /// a hairpin flow, and that the flow is in this phase.
    #[track_caller]
    pub(crate) fn assert_flow(&self, sent: &Packet, translated: &Packet, phase: Phase) {
        let flows = self.flows();
        let (from, to) = (sent.tuple(), translated.tuple());
        let context = format!("{}: {from:?} -> {to:?} in {flows:#?}", self.context());
        let (Some(forward), Some(reply)) = (flows.get(&from), flows.get(&to.reversed())) else {
            panic!("{context}");
        };
        assert_eq!(forward.to, to, "{context}");
        assert_eq!(reply.to, from.reversed(), "{context}");
        let hairpin = to.source == from.destination;
        let (sends, answers) = if hairpin {
            (flow_flags::HAIRPIN, flow_flags::REPLY | flow_flags::HAIRPIN)
        } else {
            (0, flow_flags::REPLY | flow_flags::AT_EGRESS)
        };
        assert_eq!((forward.flags, reply.flags), (sends, answers), "{context}");
        assert_eq!(Phase::of(forward, reply), phase, "{context}");
    }

    /// Ages the affinity of all clients by this number of ticks.
    pub(crate) fn age_affinity(&mut self, ticks: u32) {
        let mut map: HashMap<_, ServiceClient, Affinity> =
            self.object.map_mut("AFFINITY").unwrap().try_into().unwrap();
        let mut entries: Vec<_> = map.iter().map(Result::unwrap).collect();
        for (_, affinity) in &mut entries {
            affinity.last_used = Tick(affinity.last_used.0.wrapping_sub(ticks));
        }
        for (key, affinity) in &entries {
            map.insert(key, affinity, 0).unwrap();
        }
    }

    /// The number of active flows of each backend, for Services whose scheduler counts them. The nth backends of all
    /// these Services have the same counter.
    pub(crate) fn active_flows(&self, backends: u32) -> Vec<i64> {
        let map: Array<_, i64> = self.object.map("ACTIVE").unwrap().try_into().unwrap();
        (COUNTER..COUNTER + backends).map(|counter| map.get(&counter, 0).unwrap()).collect()
    }

    /// Sets the counts that [`Self::active_flows`] returns.
    pub(crate) fn set_active_flows(&mut self, counts: &[i64]) {
        let mut map: Array<_, i64> = self.object.map_mut("ACTIVE").unwrap().try_into().unwrap();
        (COUNTER..).zip(counts).for_each(|(counter, count)| map.set(counter, count, 0).unwrap());
    }

    pub(crate) fn counters(&self) -> Vec<u64> {
        let stats: PerCpuArray<_, u64> = self.object.map("STATS").unwrap().try_into().unwrap();
        let total = |outcome: Outcome| stats.get(&(outcome as u32), 0).unwrap().iter().sum();
        Outcome::ALL.into_iter().map(total).collect()
    }

    /// The counters that differ from `before`, and by how much.
    pub(crate) fn moved_since(&self, before: &[u64]) -> Vec<(Outcome, u64)> {
        let moved = Outcome::ALL.into_iter().zip(before.iter().zip(self.counters()));
        let moved = moved.map(|(outcome, (before, after))| (outcome, after - before));
        moved.filter(|(_, difference)| *difference != 0).collect()
    }

    pub(super) fn clear_counters(&mut self) {
        let mut stats: PerCpuArray<_, u64> = self.object.map_mut("STATS").unwrap().try_into().unwrap();
        for outcome in Outcome::ALL {
            let zeros = PerCpuValues::try_from(vec![0; nr_cpus().unwrap()]).unwrap();
            stats.set(outcome as u32, zeros, 0).unwrap();
        }
    }
}
