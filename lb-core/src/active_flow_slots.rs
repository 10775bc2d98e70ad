//! Allocates counters of active flows (slots of the map `ACTIVE`), for schedulers that choose endpoints with few flows.

use std::collections::{BTreeMap, BTreeSet};

use lb_common::{Address, Backend, SocketCounter};

/// An endpoint in its role as a backend of a service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceEndpoint {
    /// Id of the service port.
    pub service: u32,
    /// The endpoint's address.
    pub address: Address,
    /// The endpoint's port.
    pub port: u16,
}

impl ServiceEndpoint {
    pub(crate) const fn new(service: u32, backend: &Backend) -> Self {
        Self { service, address: backend.address, port: backend.port }
    }
}

impl From<&SocketCounter> for ServiceEndpoint {
    fn from(SocketCounter { service, backend, .. }: &SocketCounter) -> Self {
        Self { service: *service, address: backend.address, port: backend.port }
    }
}

/// The endpoints that have a counter of active flows. A counter is a slot of the map `ACTIVE`; slot 0 means no counter.
/// An endpoint that is removed keeps its counter as long as it has flows, so that the count is right if the endpoint
/// returns. Another endpoint may get the counter only after these flows have ended.
#[derive(Clone, Debug)]
pub(crate) struct ActiveFlowSlots {
    capacity: u32,
    of: BTreeMap<ServiceEndpoint, u32>,
    taken: BTreeMap<u32, ServiceEndpoint>,
    next: u32,
    /// Counters that neither a backend nor a flow used at the last call of [`Self::free_unused`].
    idle: BTreeSet<u32>,
}

impl ActiveFlowSlots {
    /// Creates an allocator for a map `ACTIVE` with this number of slots.
    pub(crate) const fn new(capacity: u32) -> Self {
        Self { capacity, of: BTreeMap::new(), taken: BTreeMap::new(), next: 1, idle: BTreeSet::new() }
    }

    /// Takes over a counter that an earlier run of the agent allocated. Ignores the counter if it or the endpoint was
    /// taken over before, if it is 0, or if the map has no such slot.
    pub(crate) fn adopt(&mut self, counter: u32, counted: ServiceEndpoint) {
        let known = self.taken.contains_key(&counter) || self.of.contains_key(&counted);
        if counter > 0 && counter < self.capacity && !known {
            self.take(counter, counted);
        }
    }

    /// Returns the counter of an endpoint. Allocates one if the endpoint has none; `None` if all counters are taken.
    pub(crate) fn get_or_allocate(&mut self, counted: ServiceEndpoint) -> Option<u32> {
        if let Some(counter) = self.of.get(&counted) {
            return Some(*counter);
        }
        // Slot 0 is never allocated, so one slot less is available.
        if self.taken.len() + 1 >= self.capacity as usize {
            return None;
        }
        let mut counter = self.next;
        while counter == 0 || counter >= self.capacity || self.taken.contains_key(&counter) {
            counter = if counter >= self.capacity { 1 } else { counter + 1 };
        }
        self.next = counter + 1;
        self.take(counter, counted);
        Some(counter)
    }

    /// Frees each counter that was unused at the previous call and still is: neither a backend nor a flow uses it. One
    /// check is not enough: a program that still reads a removed backend may start a flow to this backend right after
    /// the check. Returns whether any counter was freed.
    pub(crate) fn free_unused(&mut self, is_used: impl Fn(u32) -> bool) -> bool {
        let before = self.taken.len();
        let unused: BTreeSet<u32> = self.taken.keys().copied().filter(|counter| !is_used(*counter)).collect();
        for counter in unused.intersection(&self.idle) {
            if let Some(counted) = self.taken.remove(counter) {
                self.of.remove(&counted);
            }
        }
        self.idle = unused;
        self.taken.len() < before
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.taken.is_empty()
    }

    fn take(&mut self, counter: u32, counted: ServiceEndpoint) {
        self.of.insert(counted, counter);
        self.taken.insert(counter, counted);
        self.idle.remove(&counter);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(last: u8) -> ServiceEndpoint {
        ServiceEndpoint { service: 1, address: Address::from_v4([10, 0, 0, last]), port: 80 }
    }

    #[test]
    fn endpoint_keeps_one_counter_while_it_is_used() {
        let mut counters = ActiveFlowSlots::new(10);
        assert_eq!(counters.get_or_allocate(endpoint(1)), Some(1));
        assert_eq!(counters.get_or_allocate(endpoint(2)), Some(2));
        assert_eq!(counters.get_or_allocate(endpoint(1)), Some(1));
        for _ in 0..3 {
            counters.free_unused(|counter| counter == 1);
        }
        assert_eq!(counters.get_or_allocate(endpoint(1)), Some(1));
        assert_eq!(counters.get_or_allocate(endpoint(2)), Some(3), "not the one that was just freed");
    }

    #[test]
    fn counter_is_freed_only_after_two_idle_checks() {
        let mut counters = ActiveFlowSlots::new(10);
        counters.get_or_allocate(endpoint(1));
        counters.free_unused(|_| false);
        counters.free_unused(|_| true);
        counters.free_unused(|_| false);
        assert_eq!(counters.get_or_allocate(endpoint(1)), Some(1));
        counters.free_unused(|_| false);
        assert!(counters.is_empty());
    }

    #[test]
    fn counter_0_is_never_allocated() {
        let mut counters = ActiveFlowSlots::new(4);
        counters.adopt(3, endpoint(3));
        counters.adopt(3, endpoint(9));
        counters.adopt(0, endpoint(9));
        counters.adopt(4, endpoint(9));
        let given: Vec<_> = (1..=4).map(|last| counters.get_or_allocate(endpoint(last))).collect();
        assert_eq!(given, [Some(1), Some(2), Some(3), None]);
        for _ in 0..2 {
            counters.free_unused(|counter| counter != 2);
        }
        assert_eq!(counters.get_or_allocate(endpoint(4)), Some(2), "around");
        assert_eq!(ActiveFlowSlots::new(0).get_or_allocate(endpoint(1)), None);
    }
}
