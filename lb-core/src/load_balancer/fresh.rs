//! Finds fresh addresses in pools: those that no Service has had since the agent started, and no node has.

use std::{collections::BTreeMap, net::IpAddr};

use super::{AddressRange, Pool};

/// For each range, the lowest address that no Service has had since the agent started, that no node has, and that the
/// pool does not exclude (`avoidBuggyIPs`).
///
/// An address that was given once is never fresh again, so that each search begins where the last one ended: while the
/// pools stay the same, assigning all addresses of a range costs as many steps as the range has addresses.
#[derive(Clone, Debug, Default)]
pub(super) struct Fresh {
    /// The lowest fresh address of each range; a range without one has no entry.
    lowest: BTreeMap<AddressRange, IpAddr>,
    /// Number of addresses that all searches have checked, for a test.
    #[cfg(test)]
    pub(super) steps: usize,
}

impl Fresh {
    /// Searches all ranges of the pools again. `is_excluded` says whether a Service has or had an address, or a node
    /// has it.
    pub(super) fn set_pools(&mut self, pools: &[Pool], is_excluded: impl Fn(IpAddr) -> bool) {
        self.lowest.clear();
        for pool in pools {
            for range in &pool.ranges {
                self.search(pool, *range, range.addresses(), &is_excluded);
            }
        }
    }

    /// Records that a Service got the address, and finds the next fresh address of the same range.
    pub(super) fn given(&mut self, pools: &[Pool], ip: IpAddr, is_excluded: impl Fn(IpAddr) -> bool) {
        let ranges = pools.iter().flat_map(|pool| pool.ranges.iter().map(move |range| (pool, *range)));
        let found = ranges.into_iter().find(|(_, range)| range.contains(ip));
        if let Some((pool, range)) = found
            && self.lowest.get(&range) == Some(&ip)
        {
            self.search(pool, range, range.addresses_above(ip), is_excluded);
        }
    }

    /// The lowest fresh address of the range; `None` if there is none.
    pub(super) fn lowest(&self, range: &AddressRange) -> Option<IpAddr> {
        self.lowest.get(range).copied()
    }

    fn search(
        &mut self,
        pool: &Pool,
        range: AddressRange,
        mut addresses: impl Iterator<Item = IpAddr>,
        is_excluded: impl Fn(IpAddr) -> bool,
    ) {
        let found = addresses.find(|ip| {
            #[cfg(test)]
            {
                self.steps += 1;
            }
            !pool.avoids(*ip) && !is_excluded(*ip)
        });
        match found {
            Some(ip) => self.lowest.insert(range, ip),
            None => self.lowest.remove(&range),
        };
    }
}
