//! Records which voters have granted which addresses to a candidate.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use super::lease::Nanos;

/// The grants that a candidate has received from the voters.
#[derive(Clone, Debug, Default)]
pub(super) struct Evidence {
    /// Names of the voters, in ascending order. The elements of each list in `times` are in the same order.
    voters: Vec<Arc<str>>,
    /// For each address and voter: when the candidate sent the latest request that the voter has granted.
    times: BTreeMap<IpAddr, Vec<Option<Nanos>>>,
}

impl Evidence {
    /// Replaces the voters. Grants of voters that stay continue to count.
    pub(super) fn set_voters(&mut self, names: &BTreeSet<Arc<str>>) {
        let positions: Vec<Option<usize>> = names.iter().map(|name| self.voter(name)).collect();
        for times in self.times.values_mut() {
            let time =
                |position: &Option<usize>| position.and_then(|position| times.get(position).copied()?);
            *times = positions.iter().map(time).collect();
        }
        self.voters = names.iter().cloned().collect();
    }

    /// The index of a voter; `None` for a member that is no voter.
    pub(super) fn voter(&self, name: &Arc<str>) -> Option<usize> {
        self.voters.binary_search(name).ok()
    }

    /// Records that the voter with this index has granted `address` in answer to a request that was sent at `sent`.
    pub(super) fn add(&mut self, address: IpAddr, voter: usize, sent: Nanos) {
        let times = self.times.entry(address).or_insert_with(|| vec![None; self.voters.len()]);
        if let Some(time) = times.get_mut(voter) {
            *time = (*time).max(Some(sent));
        }
    }

    /// The latest time such that at least `quorum` voters have granted a request sent at that time or later; `None` if
    /// fewer voters have granted a request.
    pub(super) fn since(&self, address: IpAddr, quorum: usize) -> Option<Nanos> {
        let mut times = self.times.get(&address)?.clone();
        let rank = times.len().checked_sub(quorum)?;
        (rank < times.len()).then(|| *times.select_nth_unstable(rank).1)?
    }

    /// The addresses that at least one voter, perhaps a former one, has granted, in ascending order.
    pub(super) fn addresses(&self) -> impl Iterator<Item = &IpAddr> {
        self.times.keys()
    }

    pub(super) fn remove(&mut self, address: IpAddr) {
        self.times.remove(&address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    fn names(names: &[&str]) -> BTreeSet<Arc<str>> {
        names.iter().map(|name| Arc::from(*name)).collect()
    }

    #[test]
    fn majority_counts_from_its_oldest_grant() {
        let mut evidence = Evidence::default();
        evidence.set_voters(&names(&["a", "b", "c"]));
        assert_eq!(evidence.voter(&"d".into()), None);
        for (voter, sent, of_two, of_three) in [
            (0, 5, None, None),
            (1, 9, Some(5), None),
            // A late answer to an earlier request changes nothing.
            (1, 3, Some(5), None),
            (2, 7, Some(7), Some(5)),
            (0, 8, Some(8), Some(7)),
        ] {
            evidence.add(A, voter, sent);
            assert_eq!((evidence.since(A, 2), evidence.since(A, 3)), (of_two, of_three), "{voter} {sent}");
        }
        assert_eq!((evidence.since(A, 0), evidence.since(A, 4)), (None, None));
        evidence.remove(A);
        assert_eq!((evidence.addresses().count(), evidence.since(A, 1)), (0, None));
    }

    #[test]
    fn grants_of_voters_that_stay_count_on() {
        let mut evidence = Evidence::default();
        evidence.set_voters(&names(&["a", "b", "c"]));
        (0..3).for_each(|voter| evidence.add(A, voter, 5 + voter as u64));
        evidence.set_voters(&names(&["b", "c", "d"]));
        assert_eq!((evidence.since(A, 2), evidence.since(A, 3)), (Some(6), None));
    }
}
