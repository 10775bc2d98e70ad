//! The choice of a backend for a new flow: the one place that knows of schedulers.

use core::cmp::Ordering;

use lb_common::{Address, Backend, Scheduler, Service};

/// The slot of `BACKENDS` for a new flow; `random` are 32 random bits. The service must have backends.
#[inline(always)]
pub fn choose(service: &Service, random: u32) -> u32 {
    match Scheduler::try_from(service.scheduler) {
        // An unknown scheduler is one of a newer agent: any backend is better than none.
        Ok(Scheduler::Random) | Err(_) => service.backends_base + scale(random, service.backends_count),
    }
}

/// Maps 32 random bits evenly to `0..count`, by a multiplication where a remainder would cost a division.
#[inline(always)]
pub fn scale(random: u32, count: u32) -> u32 {
    ((u64::from(random) * u64::from(count)) >> 32) as u32
}

/// Steps of a binary search over the largest possible slice.
const MAX_STEPS: u32 = 32;

/// Whether `address:port` is one of the backends of `service`.
#[inline(always)]
pub fn is_backend<'a>(
    service: &Service,
    address: &Address,
    port: u16,
    slot: impl Fn(u32) -> Option<&'a Backend>,
) -> bool {
    find(service, address, port, slot).is_some()
}

/// The slot of the backend `address:port` of `service`, by binary search: a slice is sorted.
#[inline(always)]
pub fn find<'a>(
    service: &Service,
    address: &Address,
    port: u16,
    slot: impl Fn(u32) -> Option<&'a Backend>,
) -> Option<u32> {
    let (mut low, mut high) = (0, service.backends_count);
    for _ in 0..MAX_STEPS {
        if low >= high {
            break;
        }
        let middle = low + (high - low) / 2;
        let index = service.backends_base.wrapping_add(middle);
        let backend = slot(index)?;
        let order = match backend.address.cmp(address) {
            Ordering::Equal => backend.port.cmp(&port),
            unequal @ (Ordering::Less | Ordering::Greater) => unequal,
        };
        match order {
            Ordering::Equal => return Some(index),
            Ordering::Less => low = middle + 1,
            Ordering::Greater => high = middle,
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::{vec, vec::Vec};

    use bytemuck::Zeroable as _;
    use proptest::prelude::*;

    use super::*;

    fn service(base: u32, count: u32) -> Service {
        Service { backends_base: base, backends_count: count, ..Service::zeroed() }
    }

    fn backend(index: u32) -> Backend {
        let [_, a, b, c] = (index / 2).to_be_bytes();
        Backend {
            address: Address::from_v4([10, a, b, c]),
            port: 80 + (index % 2) as u16,
            flags: 0,
            weight: 1,
        }
    }

    #[test]
    fn random_reaches_every_backend_evenly() {
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
    fn scaling_keeps_the_ends() {
        for count in [1, 2, 3, 1 << 16, u32::MAX] {
            assert_eq!((scale(0, count), scale(u32::MAX, count)), (0, count - 1), "count {count}");
        }
        assert_eq!(scale(u32::MAX, 0), 0);
    }

    #[test]
    fn a_newer_scheduler_still_chooses() {
        let service = Service { scheduler: 200, ..service(7, 1) };
        assert_eq!(choose(&service, u32::MAX), 7);
    }

    #[test]
    fn a_slot_that_is_not_there_ends_the_search() {
        let Backend { address, port, .. } = backend(0);
        for service in [service(0, u32::MAX), service(u32::MAX, 9)] {
            assert!(!is_backend(&service, &address, port, |_| None));
        }
    }

    proptest! {
        #[test]
        fn a_choice_never_leaves_the_slice(base in 0u32..1 << 20, count in 1u32..1 << 20, random: u32) {
            let slot = choose(&service(base, count), random);
            prop_assert!(slot >= base && slot - base < count);
        }

        #[test]
        fn a_search_finds_exactly_the_members(members in proptest::collection::btree_set(0u32..400, 0..200)) {
            let slots: Vec<Backend> = members.iter().map(|index| backend(*index)).collect();
            let service = service(5, u32::try_from(slots.len()).unwrap_or(u32::MAX));
            for index in 0..400 {
                let Backend { address, port, .. } = backend(index);
                let found = is_backend(&service, &address, port, |slot| slots.get(slot as usize - 5));
                prop_assert_eq!(found, members.contains(&index));
            }
        }
    }
}
