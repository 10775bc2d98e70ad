//! The choice of a backend for a new flow: the arithmetic of each scheduler.
//!
//! Schedulers that do not count flows draw a number. It selects an entry of the service's table or, if the service has
//! no table, a backend. Schedulers that count flows compare the backends.

use core::cmp::Ordering;

use lb_common::{
    Address, Backend, Scheduler, Service,
    conntrack::{Flow, Tuple, seen},
    hash,
};

/// No slot: `BACKENDS` has far fewer slots.
pub const NONE: u32 = u32::MAX;

/// How a scheduler picks a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Method {
    /// An entry at random.
    Random = 0,
    /// The entries in turn.
    Turn = 1,
    /// The entry that a [hash](hashed) of the client's address, of the client's address and port, or of the virtual
    /// address selects.
    Hash = 2,
    /// The backend with the least [`Load`].
    Load = 3,
}

impl Method {
    /// The method of a scheduler.
    #[inline(always)]
    pub const fn of(scheduler: Scheduler) -> Self {
        match scheduler {
            Scheduler::Random => Self::Random,
            Scheduler::RoundRobin | Scheduler::WeightedRoundRobin => Self::Turn,
            Scheduler::SourceHash | Scheduler::DestinationHash | Scheduler::Maglev => Self::Hash,
            Scheduler::LeastConnection
            | Scheduler::WeightedLeastConnection
            | Scheduler::ShortestExpectedDelay
            | Scheduler::NeverQueue => Self::Load,
        }
    }
}

/// Whether the scheduler with this number takes its entries in turn ([`Method::Turn`]), so that each new flow advances
/// the service to its next entry.
#[inline(always)]
pub const fn takes_turns(scheduler: u8) -> bool {
    scheduler == Scheduler::RoundRobin as u8 || scheduler == Scheduler::WeightedRoundRobin as u8
}

/// The slot for another attempt of a client whose previous connection is `flow`. The scheduler has chosen `backend`,
/// which is in `slot`: the result is the next slot of the service if `flow` went to that backend, the client has not
/// acknowledged an answer of that backend, and the next backend takes new flows (`weight` reads its weight); else
/// `slot`.
#[inline(always)]
pub fn retried(
    service: &Service,
    flow: &Flow,
    backend: &Backend,
    slot: u32,
    weight: impl FnOnce(u32) -> u32,
) -> u32 {
    let client_acknowledged = flow.seen & seen::ACK != 0;
    let (address, port) = (&flow.to.destination, flow.to.destination_port);
    if client_acknowledged || (address, port) != (&backend.address, backend.port) {
        return slot;
    }
    let next = slot.wrapping_add(1);
    let is_last = next >= service.backends_base.wrapping_add(service.backends_count);
    let next = if is_last { service.backends_base } else { next };
    if weight(next) > 0 { next } else { slot }
}

/// The number of entries that a scheduler draws from.
#[inline(always)]
pub const fn entries(service: &Service) -> u32 {
    if service.table_count > 0 { service.table_count } else { service.backends_count }
}

/// The slot of `BACKENDS` that the `nth` entry selects; `table` reads `TABLES`. [`NONE`] if the entry selects no
/// backend of the service.
#[inline(always)]
pub fn slot(service: &Service, nth: u32, table: impl Fn(u32) -> Option<u32>) -> u32 {
    let place = if service.table_count > 0 {
        table(service.table_base.wrapping_add(nth)).unwrap_or(NONE)
    } else {
        nth
    };
    if place < service.backends_count { service.backends_base.wrapping_add(place) } else { NONE }
}

/// The scheduler whose hash chooses the entry. With ClientIP affinity, `mh` hashes only the client's address, as `sh`
/// does. A node that lacks a client's affinity entry then chooses the backend to which another node has pinned the
/// client.
#[inline(always)]
pub fn of_hash(scheduler: Scheduler, service: &Service) -> Scheduler {
    let by_address = scheduler == Scheduler::Maglev && service.affinity_seconds > 0;
    if by_address { Scheduler::SourceHash } else { scheduler }
}

/// The number below `entries` that a hashing scheduler draws for the tuple of a client: the same number on all nodes
/// that have the same `seed` and `entries`.
#[inline(always)]
pub fn hashed(scheduler: Scheduler, tuple: &Tuple, seed: u64, entries: u32) -> u32 {
    let address = if scheduler == Scheduler::DestinationHash { &tuple.destination } else { &tuple.source };
    let port = if scheduler == Scheduler::Maglev { u32::from(tuple.source_port) } else { 0 };
    scale((hash::of_endpoint(seed, address, port) >> 32) as u32, entries)
}

/// The load of a backend, for schedulers that count flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Active flows, fewer than 2^32.
    pub active: u64,
    /// The [`Backend::weight`] of the backend, not 0.
    pub weight: u32,
}

impl Load {
    /// Whether this backend has less load than `other`, by the scheduler's measure.
    #[inline(always)]
    pub fn is_less(&self, other: &Self, scheduler: Scheduler) -> bool {
        if scheduler == Scheduler::LeastConnection {
            return self.active < other.active;
        }
        // The expected delay includes the new flow.
        let one = u64::from(scheduler != Scheduler::WeightedLeastConnection);
        // Compares `(active + one) / weight` of the two backends without a division.
        (self.active + one) * u64::from(other.weight) < (other.active + one) * u64::from(self.weight)
    }

    /// Whether the search ends with this backend: `nq` takes the first idle backend.
    #[inline(always)]
    pub fn is_best(&self, scheduler: Scheduler) -> bool {
        scheduler == Scheduler::NeverQueue && self.active == 0
    }
}

/// Maps 32 random bits nearly evenly to `0..count`, by a multiplication, which costs less than a division.
#[inline(always)]
pub fn scale(random: u32, count: u32) -> u32 {
    ((u64::from(random) * u64::from(count)) >> 32) as u32
}

/// A binary search for a backend of a service, step by step: the backends of a service are sorted by address and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendSearch {
    address: Address,
    port: u16,
    base: u32,
    count: u32,
    low: u32,
    high: u32,
}

impl BackendSearch {
    /// Steps that suffice for any number of backends.
    pub const STEPS: u32 = 32;

    /// A search for a backend, before its first step. Port 0 searches for the first backend with the address.
    #[inline(always)]
    pub const fn new(service: &Service, address: Address, port: u16) -> Self {
        let Service { backends_base: base, backends_count: count, .. } = *service;
        Self { address, port, base, count, low: 0, high: count }
    }

    /// The slot to compare next; `None` if the search is over.
    #[inline(always)]
    pub const fn next(&self) -> Option<u32> {
        if self.low < self.high { Some(self.base.wrapping_add(self.middle())) } else { None }
    }

    #[inline(always)]
    const fn middle(&self) -> u32 {
        self.low + (self.high - self.low) / 2
    }

    /// Continues the binary search below or above `backend`.
    #[inline(always)]
    pub fn note(&mut self, backend: &Backend) {
        let order = backend.address.cmp(&self.address);
        if order == Ordering::Less || (order == Ordering::Equal && backend.port < self.port) {
            self.low = self.middle() + 1;
        } else {
            self.high = self.middle();
        }
    }

    /// The slot at which the search ended: the only one that can have the backend, which the caller checks. [`NONE`] if
    /// the search ended behind the last backend.
    #[inline(always)]
    pub const fn slot(&self) -> u32 {
        if self.low < self.count { self.base.wrapping_add(self.low) } else { NONE }
    }
}

/// The slot of the backend `address:port` of `service`; `None` if the service has no such backend, or `slot` returns
/// `None`. (BPF programs let the kernel run the steps.)
pub fn find<'a>(
    service: &Service,
    address: &Address,
    port: u16,
    slot: impl Fn(u32) -> Option<&'a Backend>,
) -> Option<u32> {
    let mut search = BackendSearch::new(service, *address, port);
    for _ in 0..BackendSearch::STEPS {
        let Some(next) = search.next() else { break };
        search.note(slot(next)?);
    }
    let found = slot(search.slot())?;
    (found.address == *address && found.port == port).then(|| search.slot())
}

#[cfg(test)]
mod tests {
    use std::{vec, vec::Vec};

    use bytemuck::Zeroable as _;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn schedulers_that_take_turns_have_the_method_turn() {
        for scheduler in Scheduler::ALL {
            let is_turn = Method::of(scheduler) == Method::Turn;
            assert_eq!(takes_turns(scheduler as u8), is_turn, "{scheduler:?}");
        }
    }

    fn service(base: u32, count: u32) -> Service {
        Service { backends_base: base, backends_count: count, ..Service::zeroed() }
    }

    /// Chooses a backend of a service without a table.
    fn choose(service: &Service, random: u32) -> u32 {
        slot(service, scale(random, entries(service)), |_| None)
    }

    fn backend(index: u32) -> Backend {
        let [_, a, b, c] = (index / 2).to_be_bytes();
        Backend {
            address: Address::from_v4([10, a, b, c]),
            port: 80 + (index % 2) as u16,
            flags: 0,
            weight: 1,
            active_flows_slot: 0,
        }
    }

    #[test]
    fn unanswered_client_gets_the_next_backend() {
        let service = service(8, 3);
        let backend = backend(0);
        let to = Tuple::new(Address::default(), backend.address, 1, backend.port, 6);
        let other = Tuple { destination_port: 1, ..to };
        for (to, seen, slot, weight, expected) in [
            (to, seen::PACKET | seen::SYN, 8, 1, 9),
            (to, seen::PACKET | seen::SYN, 10, 1, 8),
            (to, seen::PACKET | seen::SYN, 8, 0, 8),
            (to, seen::PACKET | seen::SYN | seen::ACK, 8, 1, 8),
            (other, seen::PACKET | seen::SYN, 8, 1, 8),
        ] {
            let flow = Flow { seen, to, ..Flow::zeroed() };
            let weight_of_next = |next| {
                assert_eq!(next, if slot == 10 { 8 } else { slot + 1 });
                weight
            };
            let retried = retried(&service, &flow, &backend, slot, weight_of_next);
            assert_eq!(retried, expected, "seen {seen}, slot {slot}, weight {weight}");
        }
    }

    #[test]
    fn schedulers_that_use_active_flows_pick_by_load() {
        for scheduler in Scheduler::ALL {
            assert_eq!(Method::of(scheduler) == Method::Load, scheduler.uses_active_flows(), "{scheduler}");
        }
    }

    #[test]
    fn random_numbers_reach_every_backend_evenly() {
        let service = service(100, 7);
        let mut hits = vec![0u32; 7];
        for step in 0..70_000u32 {
            let slot = choose(&service, step.wrapping_mul(0x9e37_79b9));
            hits[(slot - 100) as usize] += 1;
        }
        for hit in hits {
            assert!((9_500..10_500).contains(&hit), "{hit} of an expected 10000");
        }
    }

    #[test]
    fn each_scheduler_compares_loads_by_its_own_rule() {
        use Scheduler::{LeastConnection, NeverQueue, ShortestExpectedDelay, WeightedLeastConnection};
        let load = |active, weight| Load { active, weight };
        for (a, b, lc, wlc, sed) in [
            (load(1, 1), load(2, 1), true, true, true),
            (load(2, 4), load(1, 1), false, true, true),
            // Both backends are idle: only the delay of the new flow makes a difference.
            (load(0, 3), load(0, 1), false, false, true),
            (load(0, 1), load(1, 3), true, true, false),
            (load(5, 5), load(1, 1), false, false, true),
            (load(u64::from(u32::MAX), u32::MAX), load(1, 1), false, false, true),
        ] {
            for (scheduler, less) in [
                (LeastConnection, lc),
                (WeightedLeastConnection, wlc),
                (ShortestExpectedDelay, sed),
                (NeverQueue, sed),
            ] {
                assert_eq!(a.is_less(&b, scheduler), less, "{scheduler}: {a:?} {b:?}");
            }
            assert!(!a.is_less(&a, ShortestExpectedDelay));
        }
        assert!(load(0, 1).is_best(NeverQueue) && !load(0, 1).is_best(ShortestExpectedDelay));
        assert!(!load(1, 9).is_best(NeverQueue));
    }

    #[test]
    fn scale_covers_the_whole_range() {
        for count in [1, 2, 3, 1 << 16, u32::MAX] {
            assert_eq!((scale(0, count), scale(u32::MAX, count)), (0, count - 1), "count {count}");
        }
        assert_eq!(scale(u32::MAX, 0), 0);
    }

    #[test]
    fn table_entries_map_to_slots() {
        let service = Service { table_base: 50, table_count: 4, ..service(100, 3) };
        let table = [2, 0, 7, u32::MAX];
        let read = |index: u32| table.get(index as usize - 50).copied();
        assert_eq!(entries(&service), 4);
        let slots: Vec<u32> = (0..5).map(|nth| slot(&service, nth, read)).collect();
        assert_eq!(slots, [102, 100, NONE, NONE, NONE], "nobody, where the table does not fit the backends");
        assert_eq!(slot(&Service { table_base: u32::MAX, ..service }, 1, |_| None), NONE);
    }

    fn tuple(client: u8, port: u16, vip: u8) -> Tuple {
        Tuple::new(Address::from_v4([192, 0, 2, client]), Address::from_v4([10, 96, 0, vip]), port, 80, 6)
    }

    #[test]
    fn each_hashing_scheduler_uses_its_own_fields() {
        use Scheduler::{DestinationHash, Maglev, SourceHash};
        let number = |scheduler, client, port, vip| hashed(scheduler, &tuple(client, port, vip), 1, 1 << 31);
        let first = |scheduler| number(scheduler, 1, 1000, 1);
        for (scheduler, by_client, by_port, by_vip) in [
            (SourceHash, true, false, false),
            (DestinationHash, false, false, true),
            (Maglev, true, true, false),
        ] {
            assert_eq!(number(scheduler, 2, 1000, 1) != first(scheduler), by_client, "{scheduler}");
            assert_eq!(number(scheduler, 1, 1001, 1) != first(scheduler), by_port, "{scheduler}");
            assert_eq!(number(scheduler, 1, 1000, 2) != first(scheduler), by_vip, "{scheduler}");
        }
        assert_ne!(first(Maglev), hashed(Maglev, &tuple(1, 1000, 1), 2, 1 << 31), "another seed");
    }

    #[test]
    fn affinity_makes_maglev_hash_the_address_only() {
        use Scheduler::{DestinationHash, Maglev, SourceHash};
        let pinned = Service { affinity_seconds: 1, ..service(0, 0) };
        assert_eq!(of_hash(Maglev, &pinned), SourceHash);
        assert_eq!(of_hash(Maglev, &service(0, 0)), Maglev);
        assert_eq!(of_hash(DestinationHash, &pinned), DestinationHash);
    }

    #[test]
    fn hashes_reach_every_entry_evenly() {
        let mut hits = vec![0u32; 251];
        for port in 0..50_200 {
            hits[hashed(Scheduler::Maglev, &tuple(1, port, 1), 7, 251) as usize] += 1;
        }
        // About 200 hits are expected for each entry, with a standard deviation of 14; the range allows six deviations.
        assert!(hits.iter().all(|hits| (115..285).contains(hits)), "{hits:?}");
    }

    #[test]
    fn missing_slot_ends_the_search() {
        let Backend { address, port, .. } = backend(0);
        for service in [service(0, u32::MAX), service(u32::MAX, 9)] {
            assert_eq!(find(&service, &address, port, |_| None), None);
        }
    }

    proptest! {
        #[test]
        fn choice_never_leaves_the_slice(base in 0u32..1 << 20, count in 1u32..1 << 20, random: u32) {
            let slot = choose(&service(base, count), random);
            prop_assert!(slot >= base && slot - base < count);
        }

        #[test]
        fn search_finds_exactly_the_members(members in proptest::collection::btree_set(0u32..400, 0..200)) {
            let slots: Vec<Backend> = members.iter().map(|index| backend(*index)).collect();
            let service = service(5, u32::try_from(slots.len()).unwrap_or(u32::MAX));
            for index in 0..400 {
                let Backend { address, port, .. } = backend(index);
                let slot = |slot: u32| slots.get((slot as usize).wrapping_sub(5));
                let found = find(&service, &address, port, slot);
                prop_assert_eq!(found.is_some(), members.contains(&index));
                prop_assert!(found.and_then(slot).is_none_or(|found| *found == backend(index)));
                let first = members.iter().position(|member| member / 2 == index / 2);
                let first = first.map(|place| 5 + u32::try_from(place).unwrap());
                let mut search = BackendSearch::new(&service, address, 0);
                while let Some(next) = search.next() {
                    search.note(slot(next).unwrap());
                }
                let found = slot(search.slot());
                let found = found.filter(|backend| backend.address == address).map(|_| search.slot());
                prop_assert_eq!(found, first);
            }
        }
    }
}
