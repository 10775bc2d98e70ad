//! Computes tables for schedulers that need more than the list of backends. A table is a list of positions in a slice
//! of backends, so that the choice of a backend is one lookup.

mod maglev;
mod shares;

use std::{
    fmt,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    str::FromStr,
};

use lb_common::{Backend, Scheduler, hash::DEFAULT_SEED};

/// The only entry of the table if all backends have weight 0: a position that no backend has.
pub const NOBODY: u32 = u32::MAX;

/// Number of entries of a Maglev table. It is a prime, so each backend's walk through the table visits every entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TableSize(u32);

impl TableSize {
    /// The allowed sizes: those that IPVS and Cilium have.
    pub const ALL: [Self; 10] = [
        Self(251),
        Self(509),
        Self(1021),
        Self(2039),
        Self(4093),
        Self(8191),
        Self(16_381),
        Self(32_749),
        Self(65_521),
        Self(131_071),
    ];

    /// The number of entries.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// This size or, if there are more backends than entries, the next size that has enough entries, else the largest
    /// size.
    fn holding(self, backends: usize) -> Self {
        let holds = |size: &Self| *size >= self && size.0 as usize >= backends;
        Self::ALL.into_iter().find(holds).unwrap_or(Self(131_071))
    }
}

impl Default for TableSize {
    /// With up to 163 backends of equal weight, no backend's share exceeds the average by more than 1 % at this size.
    fn default() -> Self {
        Self(16_381)
    }
}

impl fmt::Display for TableSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The error for a number that is not an allowed size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownSize;

impl fmt::Display for UnknownSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("give one of")?;
        TableSize::ALL.into_iter().try_for_each(|size| write!(f, " {size}"))
    }
}

impl std::error::Error for UnknownSize {}

impl FromStr for TableSize {
    type Err = UnknownSize;

    fn from_str(text: &str) -> Result<Self, UnknownSize> {
        Self::ALL.into_iter().find(|size| text.parse() == Ok(size.0)).ok_or(UnknownSize)
    }
}

/// Parameters of Maglev tables. Nodes that serve the same Service must have the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Maglev {
    /// Number of entries of a table; [`table`] uses a larger size for more backends than this.
    pub size: TableSize,
    /// Seed of the hash that places backends in the table.
    pub seed: u64,
}

impl Default for Maglev {
    fn default() -> Self {
        Self { size: TableSize::default(), seed: DEFAULT_SEED }
    }
}

/// The table of `scheduler`: positions in `backends`, or [`NOBODY`]. `None` if the scheduler needs no table to choose
/// from these backends. Depends only on its arguments, so every node has the same table for the same backends.
pub fn table(scheduler: Scheduler, maglev: Maglev, backends: &[Backend]) -> Option<Vec<u32>> {
    if scheduler.uses_active_flows() {
        return None;
    }
    let weight = |backend: &Backend| {
        if scheduler.is_weighted() { backend.weight } else { backend.weight.min(1) }
    };
    let first = weight(backends.first()?);
    let is_even = backends.iter().all(|backend| weight(backend) == first);
    let is_consistent = scheduler == Scheduler::Maglev && backends.len() > 1;
    if is_even && first == 0 {
        return Some(vec![NOBODY]);
    }
    if is_even && !is_consistent {
        return None;
    }
    let turns = shares::turns(&backends.iter().map(weight).collect::<Vec<u32>>());
    Some(if is_consistent { maglev::table(maglev, backends, &turns) } else { turns })
}

/// Size and hash of a table, to compare tables without storing them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    /// Number of entries of the table.
    pub count: u32,
    digest: u64,
}

impl Digest {
    /// Computes the digest of a table. Digests can be compared only within one process.
    pub fn of(table: &[u32]) -> Self {
        let mut hasher = DefaultHasher::new();
        table.hash(&mut hasher);
        Self { count: u32::try_from(table.len()).unwrap_or(u32::MAX), digest: hasher.finish() }
    }
}

#[cfg(test)]
mod tests {
    use lb_common::Address;

    use super::*;

    fn backends(weights: &[u32]) -> Vec<Backend> {
        let backend = |(host, weight): (u8, &u32)| Backend {
            address: Address::from_v4([10, 0, 0, host]),
            port: 80,
            flags: 0,
            weight: *weight,
            active_flows_slot: 0,
        };
        (1..).zip(weights).map(backend).collect()
    }

    fn of(scheduler: Scheduler, weights: &[u32]) -> Option<Vec<u32>> {
        table(scheduler, Maglev::default(), &backends(weights))
    }

    #[test]
    fn equal_weights_need_no_table() {
        for scheduler in Scheduler::ALL {
            assert_eq!(of(scheduler, &[]), None);
            assert_eq!(of(scheduler, &[7]), None, "{scheduler}");
            assert_eq!(of(scheduler, &[3, 3]).is_some(), scheduler == Scheduler::Maglev, "{scheduler}");
        }
    }

    #[test]
    fn weights_apply_and_weight_0_gets_no_entry() {
        for scheduler in Scheduler::ALL {
            let found = of(scheduler, &[1, 0, 2]);
            if scheduler == Scheduler::Maglev {
                assert!(!found.unwrap().contains(&1));
                continue;
            }
            let wanted = if scheduler.is_weighted() { vec![2, 0, 2] } else { vec![0, 2] };
            assert_eq!(found, (!scheduler.uses_active_flows()).then_some(wanted), "{scheduler}");
        }
    }

    #[test]
    fn no_backend_is_chosen_if_all_weights_are_0() {
        for scheduler in Scheduler::ALL.into_iter().filter(|scheduler| !scheduler.uses_active_flows()) {
            for weights in [&[0][..], &[0, 0, 0]] {
                assert_eq!(of(scheduler, weights), Some(vec![NOBODY]), "{scheduler}");
            }
        }
    }

    #[test]
    fn table_size_is_one_of_the_primes() {
        assert_eq!("16381".parse(), Ok(TableSize::default()));
        for text in ["16384", "", "-1", "0x10"] {
            assert_eq!(text.parse::<TableSize>(), Err(UnknownSize));
        }
        for size in TableSize::ALL {
            let divides = |factor: u32| size.get().is_multiple_of(factor);
            assert!((2..=362).filter(|factor| *factor < size.get()).all(|factor| !divides(factor)), "{size}");
        }
        assert_eq!(TableSize::ALL[0].holding(252), TableSize::ALL[1]);
        assert_eq!(TableSize::ALL[9].holding(1_000_000), TableSize::ALL[9]);
    }

    #[test]
    fn digest_differs_between_tables() {
        assert_eq!(Digest::of(&[1, 2]), Digest::of(&[1, 2]));
        assert_ne!(Digest::of(&[1, 2]), Digest::of(&[2, 1]));
    }
}
