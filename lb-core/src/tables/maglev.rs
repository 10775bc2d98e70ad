//! Consistent hashing (D. Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load Balancer", NSDI 2016,
//! §3.4): backends take turns in claiming the next free entry of their own permutation of the table.

use lb_common::{Backend, hash};

use super::Maglev;

/// The Maglev table of `backends`. Each element of `turns` is the position of a backend; the sequence repeats until the
/// table is full. The result depends on the order of `backends`, which every node sorts by address, so all nodes build
/// the same table.
pub(super) fn table(maglev: Maglev, backends: &[Backend], turns: &[u32]) -> Vec<u32> {
    const FREE: u32 = super::NOBODY;
    let size = maglev.size.holding(backends.len()).get();
    let mut walks: Vec<Walk> = backends.iter().map(|backend| Walk::new(backend, size, maglev.seed)).collect();
    let mut table = vec![FREE; size as usize];
    let mut order = turns.iter().cycle();
    for _ in 0..size {
        let Some((place, walk)) = order.next().and_then(|&p| Some((p, walks.get_mut(p as usize)?))) else {
            break;
        };
        while table[walk.at as usize] != FREE {
            walk.step(size);
        }
        table[walk.at as usize] = place;
    }
    table
}

/// A walk through a backend's permutation of the table's entries. The table's size is a prime, so a walk by steps of
/// any length visits every entry.
struct Walk {
    at: u32,
    step: u32,
}

impl Walk {
    #[expect(clippy::cast_possible_truncation, reason = "each half of the hash by itself")]
    fn new(backend: &Backend, size: u32, seed: u64) -> Self {
        let hash = hash::of_endpoint(seed, &backend.address, u32::from(backend.port));
        Self { at: hash as u32 % size, step: (hash >> 32) as u32 % (size - 1) + 1 }
    }

    const fn step(&mut self, size: u32) {
        self.at += self.step;
        if self.at >= size {
            self.at -= size;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use lb_common::{Address, Scheduler};
    use proptest::prelude::*;

    use super::super::{TableSize, table};
    use super::*;

    fn backend(number: u32, weight: u32) -> Backend {
        let [_, a, b, c] = number.to_be_bytes();
        Backend {
            address: Address::from_v4([10, a, b, c]),
            port: 8080,
            flags: 0,
            weight,
            active_flows_slot: 0,
        }
    }

    fn even(count: u32) -> Vec<Backend> {
        (0..count).map(|number| backend(number, 1)).collect()
    }

    fn sized(size: TableSize) -> Maglev {
        Maglev { size, ..Maglev::default() }
    }

    /// The backend that each entry of the table leads to.
    fn chosen(maglev: Maglev, backends: &[Backend]) -> Vec<Backend> {
        let table = table(Scheduler::Maglev, maglev, backends).unwrap();
        table.into_iter().map(|place| backends[place as usize]).collect()
    }

    fn shares(table: &[Backend]) -> BTreeMap<Backend, usize> {
        let mut shares = BTreeMap::new();
        for backend in table {
            *shares.entry(*backend).or_default() += 1;
        }
        shares
    }

    /// The algorithm must never change: nodes with different versions must have the same table.
    #[test]
    fn table_never_changes() {
        let table = table(Scheduler::Maglev, sized(TableSize::ALL[0]), &even(3)).unwrap();
        assert_eq!(table.len(), 251);
        assert_eq!(table[..20], [2, 1, 1, 2, 0, 0, 2, 2, 1, 0, 2, 1, 1, 0, 2, 1, 1, 1, 0, 1]);
    }

    #[test]
    fn hundred_entries_per_backend_limit_the_excess_to_one_percent() {
        for size in TableSize::ALL {
            let backends = even(size.get() / 100);
            let shares = shares(&chosen(sized(size), &backends));
            let average = f64::from(size.get()) / backends.len() as f64;
            let most = *shares.values().max().unwrap() as f64;
            assert_eq!(shares.len(), backends.len());
            assert!(most / average <= 1.01, "size {size}: {most} of {average}");
        }
    }

    /// The share of the table's entries that lead to another backend after one of `count` backends is removed, although
    /// their old backend is not the removed one.
    fn disruption(size: TableSize, count: u32, removed: u32) -> f64 {
        let mut backends = even(count);
        let before = chosen(sized(size), &backends);
        let gone = backends.remove(removed as usize);
        let after = chosen(sized(size), &backends);
        let moved = before.iter().zip(&after).filter(|(was, is)| **was != gone && was != is).count();
        moved as f64 / f64::from(size.get())
    }

    #[test]
    fn removing_a_backend_moves_few_flows_of_others() {
        for (size, count, limit) in [(6, 10, 0.01), (6, 100, 0.02), (8, 100, 0.01), (8, 500, 0.02)] {
            let size = TableSize::ALL[size];
            let moved: Vec<f64> = (0..10).map(|nth| disruption(size, count, nth * count / 10)).collect();
            let (mean, most) = (moved.iter().sum::<f64>() / 10.0, moved.iter().copied().fold(0.0, f64::max));
            println!(
                "{size} entries, {count} backends: {:.2} % moved on average, {:.2} % at most",
                mean * 100.0,
                most * 100.0
            );
            assert!(most <= limit, "{size} entries, {count} backends: {moved:?}");
        }
    }

    #[test]
    fn weights_are_shares() {
        let weights = [1, 2, 3, 10, 100, 0];
        let backends: Vec<Backend> =
            (0..).zip(weights).map(|(number, weight)| backend(number, weight)).collect();
        let shares = shares(&chosen(Maglev::default(), &backends));
        for backend in &backends {
            let fair = 16_381.0 * f64::from(backend.weight) / 116.0;
            let share = shares.get(backend).copied().unwrap_or(0) as f64;
            assert!((share - fair).abs() <= 2.0, "{} has {share} of {fair}", backend.weight);
        }
    }

    #[test]
    fn more_backends_than_entries_use_the_next_size() {
        let table = table(Scheduler::Maglev, sized(TableSize::ALL[0]), &even(300)).unwrap();
        assert_eq!(table.len(), 509);
    }

    #[test]
    fn tables_differ_by_seed() {
        let with = |seed| table(Scheduler::Maglev, Maglev { seed, ..sized(TableSize::ALL[0]) }, &even(5));
        assert_ne!(with(1), with(2));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_backends_share_a_full_table(weights in proptest::collection::vec(0u32..200, 2..40), seed: u64) {
            prop_assume!(weights.iter().any(|weight| *weight > 0));
            let backends: Vec<Backend> = (0..).zip(&weights).map(|(number, weight)| backend(number, *weight)).collect();
            let maglev = Maglev { size: TableSize::ALL[3], seed };
            let table = table(Scheduler::Maglev, maglev, &backends).unwrap();
            let total: u32 = weights.iter().sum();
            for (place, weight) in (0..).zip(&weights) {
                let share = table.iter().filter(|entry| **entry == place).count() as f64;
                let fair = 2039.0 * f64::from(*weight) / f64::from(total);
                // Long sequences of turns are reduced to about 4096 entries, and the table cuts the last repetition.
                prop_assert!((share - fair).abs() <= 3.0, "place {} of weight {}: {} of {}", place, weight, share, fair);
            }
        }
    }
}
