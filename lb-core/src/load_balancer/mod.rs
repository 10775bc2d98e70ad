//! Addresses for Services of type LoadBalancer, from pools as MetalLB's `IPAddressPool` defines them.
//!
//! MetalLB's rules hold, with these differences: a Service keeps its addresses, whatever happens to the pools of these
//! addresses, unless [`LoadBalancers::set_reassign`] says otherwise; selectors that select no namespace admit no
//! Service; pools of equal rank are tried in the order of their names.

mod controller;
mod error;
mod fresh;
mod pool;
mod range;
mod reassign;
mod request;
mod selector;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use lb_common::FrontendKind;

pub(crate) use self::controller::given_addresses;
use self::fresh::Fresh;
pub use self::{
    controller::{Controller, GIVEN, Notice, Pass, Write},
    error::{AddressError, Concern, NodesInPool, PoolError, Trouble},
    pool::{INTERNAL, Namespaces, Pool, PoolUsage},
    range::{AddressRange, RangeError},
    reassign::Withdrawal,
    request::{AddressRequest, SharingKey, Terms, is_relevant},
    selector::{Labels, Selector},
};
use crate::{family::Family, model::ObjectName, plan::Contents};

/// The pools, and which Service has which address.
///
/// [`assign`](Self::assign) gives two Services the same address only if they may share it. A Service keeps its
/// addresses while its request stays the same, unless another Service also has one of these addresses and the two may
/// not share it, or [`set_reassign`](Self::set_reassign) is on and the pools no longer allow the addresses.
#[derive(Clone, Debug, Default)]
pub struct LoadBalancers {
    /// The usable pools, in the order in which they are tried for Services that name no pool.
    pools: Vec<Pool>,
    /// The addresses of nodes, each with the name of its node. A pool gives such an address only to a Service that
    /// names the address.
    nodes: BTreeMap<IpAddr, Arc<str>>,
    namespaces: Namespaces,
    /// For each address, the Services that have it, with their terms for sharing. The terms are `None` for a remembered
    /// Service that has not requested addresses yet.
    holders: BTreeMap<IpAddr, BTreeMap<ObjectName, Option<Terms>>>,
    /// The addresses of each Service that has any: in the order in which the Service names them; if the Service names
    /// no address, usually in the order of the Service's families.
    services: BTreeMap<ObjectName, Vec<IpAddr>>,
    /// Released addresses, each with the sequence number of its release. Hosts may still send packets for the former
    /// Service to such an address, so a pool assigns released addresses last, the earliest released first, unless a
    /// Service names one of them.
    released: BTreeMap<IpAddr, u64>,
    releases: u64,
    /// Addresses that no Service has had yet, which are given before released ones.
    fresh: Fresh,
    /// Number of releases, and of changes of terms, pools, nodes, namespaces or the setting `reassign`, so far.
    changes: u64,
    /// Whether Services lose addresses that the pools no longer allow.
    reassign: bool,
    /// Whether the caller now lets Services lose addresses that the pools no longer allow; has no effect while
    /// `reassign` is false.
    may_reassign: bool,
    /// Whether all pools of the last [`set_pools`](Self::set_pools) are used.
    all_pools_used: bool,
}

impl LoadBalancers {
    /// Replaces the pools. A pool is not used if it overlaps a network of `reserved`, or has the name or an address of
    /// another used pool. Of two such pools, the one that was used before stays in use; otherwise, the first one in the
    /// list is used. Returns the index and the reason of each unused pool. Services keep their addresses.
    pub fn set_pools(&mut self, pools: Vec<Pool>, reserved: &[AddressRange]) -> Vec<(usize, PoolError)> {
        let mut errors = Vec::new();
        let mut used: Vec<Pool> = Vec::new();
        let mut listed: Vec<(usize, Pool)> = pools.into_iter().enumerate().collect();
        listed.sort_by_key(|(_, pool)| !self.pools.iter().any(|old| old.name == pool.name));
        for (index, pool) in listed {
            match PoolError::of(&pool, &used, reserved) {
                Some(error) => errors.push((index, error)),
                None => used.push(pool),
            }
        }
        used.sort_by_key(Pool::order);
        self.pools = used;
        self.all_pools_used = errors.is_empty();
        self.search();
        self.changes += 1;
        errors
    }

    /// Replaces the addresses of nodes, each with the name of its node. Only a Service that names such an address gets
    /// it, because from then on the other machines of the network reach the Service at this address, and no longer the
    /// node. Services keep their addresses.
    pub fn set_nodes(&mut self, nodes: BTreeMap<IpAddr, Arc<str>>) {
        if self.nodes != nodes {
            self.nodes = nodes;
            self.search();
            self.changes += 1;
        }
    }

    /// The usable pools that contain addresses of nodes.
    pub fn pools_with_nodes(&self) -> Vec<NodesInPool> {
        let in_pool = |pool: &Pool| {
            let nodes = self.nodes.iter().filter(|(ip, _)| pool.has(**ip));
            nodes.map(|(ip, node)| (*ip, Arc::clone(node))).collect::<Vec<_>>()
        };
        let with_nodes = self.pools.iter().map(|pool| (&pool.name, in_pool(pool)));
        let with_nodes = with_nodes.filter(|(_, nodes)| !nodes.is_empty());
        with_nodes.map(|(pool, nodes)| NodesInPool { pool: Arc::clone(pool), nodes }).collect()
    }

    /// Replaces the labels of namespaces, by which pools admit Services.
    pub fn set_namespaces(&mut self, namespaces: Namespaces) {
        self.namespaces = namespaces;
        self.changes += 1;
    }

    /// A number that grows whenever a Service that waits for an address may get one.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// The pools that can be used.
    pub fn pools(&self) -> &[Pool] {
        &self.pools
    }

    /// The addresses that a Service has.
    pub fn addresses(&self, service: &ObjectName) -> &[IpAddr] {
        self.services.get(service).map_or(&[], Vec::as_slice)
    }

    /// The usable pool that contains the address.
    pub fn pool_of(&self, ip: IpAddr) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.ranges.iter().any(|range| range.contains(ip)))
    }

    /// The Services that have the address.
    pub fn holders(&self, ip: IpAddr) -> impl Iterator<Item = &ObjectName> {
        self.holders.get(&ip).into_iter().flat_map(BTreeMap::keys)
    }

    /// How many addresses of each usable pool are in use.
    pub fn usage(&self) -> Vec<PoolUsage> {
        let used = |pool: &Pool| {
            let held = pool.ranges.iter().flat_map(|range| self.holders.range(range.first()..=range.last()));
            held.filter(|(ip, _)| !pool.avoids(**ip)).count() as u64
        };
        let usage = |pool| PoolUsage::new(pool, used(pool));
        self.pools.iter().map(usage).collect()
    }

    /// The problem with a Service's addresses, if any; `refused` is the error of the Service's last request, if that
    /// request failed.
    pub fn trouble(&self, request: &AddressRequest, refused: Option<&AddressError>) -> Option<Trouble> {
        match refused {
            Some(error) => {
                let keeps = !self.addresses(&request.service).is_empty();
                Some(Trouble::Refused { why: error.to_string(), keeps })
            }
            None => self.concern(request).map(Trouble::Concern),
        }
    }

    /// The problem with the addresses that a Service keeps, if any.
    fn concern(&self, request: &AddressRequest) -> Option<Concern> {
        let has = self.addresses(&request.service);
        for ip in has {
            let Some(pool) = self.pool_of(*ip) else {
                return Some(Concern::NoPool { ip: *ip, held: self.reassign });
            };
            if !request.names_pool_or_address() && pool.internal != request.internal {
                let pool = pool.name.to_string();
                return Some(Concern::OtherKind { ip: *ip, pool, internal: request.internal });
            }
        }
        None
    }

    /// Records the addresses that a Service already has, in place of the addresses that were recorded for the Service
    /// before. Call this for all Services before the first [`assign`](Self::assign), so that no other Service gets
    /// these addresses. If several Services have an address, the first one to request addresses keeps it (in
    /// [`assign_all`](Self::assign_all) the oldest one), and the others keep it only if they may share it.
    pub fn remember(&mut self, service: &ObjectName, addresses: &[IpAddr]) {
        self.replace(service, addresses.to_vec(), None);
    }

    /// Assigns addresses to many Services at once, first to the Services that name addresses, then to the others.
    /// Within each of these two groups, older Services come first; the name decides between Services of the same age.
    /// Returns the error of each request.
    pub fn assign_all(&mut self, requests: &[AddressRequest]) -> Vec<Option<AddressError>> {
        let mut errors = vec![None; requests.len()];
        let mut order: Vec<usize> = (0..requests.len()).collect();
        order.sort_by_key(|index| (&requests[*index].created, &requests[*index].service));
        order.iter().for_each(|index| self.confirm(&requests[*index]));
        let (named, others): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(|index| !requests[*index].addresses.is_empty());
        let open = self.assign_in_turn(requests, named, &mut errors);
        self.exchange(requests, &open, &mut errors);
        self.assign_in_turn(requests, others, &mut errors);
        errors
    }

    /// Records a Service's terms for sharing at each remembered address that the Service keeps. From now on, another
    /// remembered Service keeps such an address only if the two Services may share it, even if the other Service names
    /// the address.
    fn confirm(&mut self, request: &AddressRequest) {
        let service = &request.service;
        let is_remembered =
            |ip: &IpAddr| self.holders.get(ip).and_then(|all| all.get(service)) == Some(&None);
        let mut kept: Vec<IpAddr> = self.addresses(service).to_vec();
        kept.retain(|ip| is_remembered(ip) && self.keeps(request, *ip) && self.is_free(request, *ip));
        kept.into_iter().for_each(|ip| self.hold(ip, service, Some(&request.terms)));
    }

    /// Repeats assignments until no further Service gets its addresses, because one Service may release what another
    /// requests. Returns the indices of the requests that failed.
    fn assign_in_turn(
        &mut self,
        requests: &[AddressRequest],
        mut open: Vec<usize>,
        errors: &mut [Option<AddressError>],
    ) -> Vec<usize> {
        let mut before = usize::MAX;
        while open.len() < before {
            before = open.len();
            open.retain(|index| {
                errors[*index] = self.assign(&requests[*index]).err();
                errors[*index].is_some()
            });
        }
        open
    }

    /// Lets Services that name each other's addresses exchange these addresses. `open` are the indices of the requests
    /// that failed. Among the Services that made these requests, each one that has addresses releases them, and then
    /// gets the addresses that it names. Changes nothing unless all these Services get the addresses that they name.
    fn exchange(&mut self, requests: &[AddressRequest], open: &[usize], errors: &mut [Option<AddressError>]) {
        let holders: Vec<usize> = open
            .iter()
            .copied()
            .filter(|index| !self.addresses(&requests[*index].service).is_empty())
            .collect();
        if holders.len() < 2 {
            return;
        }
        let mut trial = self.clone();
        holders.iter().for_each(|index| trial.release(&requests[*index].service));
        if holders.iter().all(|index| trial.assign(&requests[*index]).is_ok()) {
            *self = trial;
            holders.iter().for_each(|index| errors[*index] = None);
        }
    }

    /// Assigns addresses for a request. On an error the Service keeps what it has, as far as its families, its terms
    /// for sharing and [`set_reassign`](Self::set_reassign) allow that.
    ///
    /// # Errors
    ///
    /// Why no pool gives the Service an address, or the address that the Service names.
    pub fn assign(&mut self, request: &AddressRequest) -> Result<&[IpAddr], AddressError> {
        let chosen = match self.choose(request) {
            Ok(chosen) => chosen,
            Err(AddressError::NoClusterIp) => return Err(AddressError::NoClusterIp),
            Err(error) => {
                let has = self.addresses(&request.service).iter().copied();
                let kept = has.filter(|ip| self.keeps(request, *ip) && self.is_free(request, *ip));
                self.replace(&request.service, kept.collect(), Some(&request.terms));
                return Err(error);
            }
        };
        self.replace(&request.service, chosen, Some(&request.terms));
        Ok(self.addresses(&request.service))
    }

    /// Releases the addresses of a Service that was deleted, or is no longer of type LoadBalancer.
    pub fn release(&mut self, service: &ObjectName) {
        for ip in self.services.remove(service).unwrap_or_default() {
            self.leave(ip, service);
        }
    }

    /// Releases the addresses of all Services for which `exists` is false.
    pub fn retain(&mut self, exists: impl Fn(&ObjectName) -> bool) {
        let gone: Vec<ObjectName> = self.services.keys().filter(|name| !exists(name)).cloned().collect();
        gone.iter().for_each(|service| self.release(service));
    }

    fn choose(&self, request: &AddressRequest) -> Result<Vec<IpAddr>, AddressError> {
        if request.families.is_empty() {
            return Err(AddressError::NoClusterIp);
        }
        if !request.addresses.is_empty() {
            return self.named(request);
        }
        if let Some(kept) = self.kept(request) {
            return Ok(kept);
        }
        let pools = self.candidates(request)?;
        let both = pools.iter().find_map(|pool| self.free(pool, request, &request.families));
        let first = || {
            let families = request.one_family_is_enough.then(|| request.families.iter())?;
            let one = |family: &Family| pools.iter().find_map(|pool| self.free(pool, request, &[*family]));
            families.into_iter().find_map(one)
        };
        let families = request.families.clone();
        both.or_else(first).ok_or_else(|| AddressError::Exhausted {
            pools: pools.iter().map(|pool| pool.name.to_string()).collect(),
            families,
        })
    }

    /// The addresses that the Service names, if it may have them; an error if not.
    fn named(&self, request: &AddressRequest) -> Result<Vec<IpAddr>, AddressError> {
        let current = self.addresses(&request.service);
        for ip in &request.addresses {
            self.check_free(request, *ip)?;
            if current.contains(ip) && self.withdrawal(request, *ip).is_none() {
                continue;
            }
            let pool = self.pools.iter().find(|pool| pool.has(*ip));
            let pool = pool.ok_or(AddressError::InNoPool(*ip))?;
            if let Some(name) = &request.pool
                && **name != *pool.name
            {
                return Err(AddressError::InOtherPool {
                    ip: *ip,
                    named: name.clone(),
                    pool: pool.name.to_string(),
                });
            }
            self.check_admitted(request, pool)?;
        }
        Ok(request.addresses.clone())
    }

    /// Whether the Service may keep `ip`, which is one of its addresses. Does not check whether another Service also
    /// has it.
    fn keeps(&self, request: &AddressRequest, ip: IpAddr) -> bool {
        request.families.contains(&Family::of(ip)) && self.withdrawal(request, ip).is_none()
    }

    /// The addresses that the Service keeps, and an address of the same pool for each family that lacks one. `None` if
    /// the Service has no address to keep, names another pool, has an address that it may not share any more, or needs
    /// both families but the pool has no address for the missing family.
    fn kept(&self, request: &AddressRequest) -> Option<Vec<IpAddr>> {
        let mut kept: Vec<IpAddr> = self.addresses(&request.service).to_vec();
        kept.retain(|ip| self.keeps(request, *ip));
        let first = *kept.first()?;
        let pool = self.pool_of(first);
        // A Service may also keep an address that no pool contains any more.
        let names_other = |name: &String| pool.is_some_and(|pool| *pool.name != **name);
        if request.pool.as_ref().is_some_and(names_other) || !kept.iter().all(|ip| self.is_free(request, *ip))
        {
            return None;
        }
        let missing: Vec<Family> = request
            .families
            .iter()
            .copied()
            .filter(|family| !kept.iter().any(|ip| Family::of(*ip) == *family))
            .collect();
        if !missing.is_empty() {
            let added = pool.and_then(|pool| self.free(pool, request, &missing));
            match added {
                Some(added) => kept.extend(added),
                None if request.one_family_is_enough => {}
                None => return None,
            }
        }
        kept.sort_by_key(|ip| request.families.iter().position(|family| *family == Family::of(*ip)));
        Some(kept)
    }

    /// The pools to try, in order, for a Service that names no address.
    fn candidates(&self, request: &AddressRequest) -> Result<Vec<&Pool>, AddressError> {
        if let Some(name) = &request.pool {
            let pool = self.pools.iter().find(|pool| *pool.name == **name);
            let pool = pool.ok_or_else(|| AddressError::UnknownPool(name.clone()))?;
            self.check_admitted(request, pool)?;
            return Ok(vec![pool]);
        }
        let suits = |pool: &&Pool| {
            pool.auto_assign
                && pool.internal == request.internal
                && pool.admits(&request.service, &request.labels, &self.namespaces)
        };
        let pools: Vec<&Pool> = self.pools.iter().filter(suits).collect();
        if pools.is_empty() { Err(AddressError::NoPool { internal: request.internal }) } else { Ok(pools) }
    }

    fn check_admitted(&self, request: &AddressRequest, pool: &Pool) -> Result<(), AddressError> {
        if pool.admits(&request.service, &request.labels, &self.namespaces) {
            Ok(())
        } else {
            Err(AddressError::NotAdmitted(pool.name.to_string()))
        }
    }

    /// Whether the Service may have the address: no other Service has it, or the Service may share it with all Services
    /// that have it.
    fn is_free(&self, request: &AddressRequest, ip: IpAddr) -> bool {
        self.opponent(request, ip).is_none()
    }

    /// Like [`is_free`](Self::is_free); the error says why the Service may not have the address.
    fn check_free(&self, request: &AddressRequest, ip: IpAddr) -> Result<(), AddressError> {
        let Some((by, terms)) = self.opponent(request, ip) else { return Ok(()) };
        let why = match terms {
            Some(terms) => error::refusal(terms, &request.terms),
            None => "it has the address from its manifest or from before",
        };
        Err(AddressError::Taken { ip, by: by.clone(), why })
    }

    /// Another Service that has the address and may not share it with the requesting Service. A remembered Service
    /// whose terms are not known yet may share the address only if the requesting Service also has the address.
    fn opponent(&self, request: &AddressRequest, ip: IpAddr) -> Option<(&ObjectName, Option<&Terms>)> {
        let holders = self.holders.get(&ip)?;
        let has_it = holders.contains_key(&request.service);
        let opposes = |(name, terms): &(&ObjectName, &Option<Terms>)| {
            let shares = terms.as_ref().map_or(has_it, |terms| terms.allow(&request.terms));
            **name != request.service && !shares
        };
        holders.iter().find(opposes).map(|(name, terms)| (name, terms.as_ref()))
    }

    /// One address of each of these families from a pool. The first range with an address that no Service has had, or
    /// that the Service may share, gives the lowest such address; if no range has one, the pool gives the address that
    /// was released first. `None` if the pool has no such address in one of the families.
    fn free(&self, pool: &Pool, request: &AddressRequest, families: &[Family]) -> Option<Vec<IpAddr>> {
        let one = |family: &Family| {
            let ranges = pool.ranges.iter().filter(|range| range.family() == *family);
            let lowest = |range| {
                let (fresh, shared) = (self.fresh.lowest(range), self.shared(pool, range, request));
                fresh.into_iter().chain(shared).min()
            };
            let released = || {
                let is_free =
                    |ip: &IpAddr| Family::of(*ip) == *family && pool.has(*ip) && !self.nodes.contains_key(ip);
                let free = self.released.iter().filter(|(ip, _)| is_free(ip));
                free.min_by_key(|(_, number)| **number).map(|(ip, _)| *ip)
            };
            ranges.into_iter().find_map(lowest).or_else(released)
        };
        families.iter().map(one).collect()
    }

    /// The lowest address in use that the Service may share.
    fn shared(&self, pool: &Pool, range: &AddressRange, request: &AddressRequest) -> Option<IpAddr> {
        // Without a sharing key, the Service shares no address. Most Services have no key and need no search.
        request.terms.key.as_ref()?;
        let held = self.holders.range(range.first()..=range.last()).map(|(ip, _)| *ip);
        let suits =
            |ip: &IpAddr| !pool.avoids(*ip) && !self.nodes.contains_key(ip) && self.is_free(request, *ip);
        held.into_iter().find(suits)
    }

    /// Gives these addresses to the Service, and releases its other addresses.
    fn replace(&mut self, service: &ObjectName, addresses: Vec<IpAddr>, terms: Option<&Terms>) {
        let now: BTreeSet<IpAddr> = addresses.iter().copied().collect();
        let before = if addresses.is_empty() {
            self.services.remove(service)
        } else {
            self.services.insert(service.clone(), addresses)
        };
        for ip in before.unwrap_or_default().into_iter().filter(|ip| !now.contains(ip)) {
            self.leave(ip, service);
        }
        for ip in now {
            self.released.remove(&ip);
            self.hold(ip, service, terms);
            let is_excluded = is_excluded(&self.holders, &self.released, &self.nodes);
            self.fresh.given(&self.pools, ip, is_excluded);
        }
    }

    /// Records that the Service has the address, on these terms for sharing.
    fn hold(&mut self, ip: IpAddr, service: &ObjectName, terms: Option<&Terms>) {
        let earlier = self.holders.entry(ip).or_default().insert(service.clone(), terms.cloned());
        if earlier.is_some_and(|earlier| earlier.as_ref() != terms) {
            self.changes += 1;
        }
    }

    /// Finds the fresh addresses of all pools again.
    fn search(&mut self) {
        let is_excluded = is_excluded(&self.holders, &self.released, &self.nodes);
        self.fresh.set_pools(&self.pools, is_excluded);
    }

    fn leave(&mut self, ip: IpAddr, service: &ObjectName) {
        let Some(holders) = self.holders.get_mut(&ip) else { return };
        holders.remove(service);
        self.changes += 1;
        if holders.is_empty() {
            self.holders.remove(&ip);
            self.released.insert(ip, self.releases);
            self.releases += 1;
        }
    }
}

/// Returns a function that says whether any Service has, or has had, the address in its argument, or a node has it.
fn is_excluded<H, N>(
    holders: &BTreeMap<IpAddr, H>,
    released: &BTreeMap<IpAddr, u64>,
    nodes: &BTreeMap<IpAddr, N>,
) -> impl Fn(IpAddr) -> bool {
    |ip| holders.contains_key(&ip) || released.contains_key(&ip) || nodes.contains_key(&ip)
}

/// For each Service, the load balancer addresses that an earlier run of the agent left in the maps.
pub fn known_addresses(contents: &Contents) -> BTreeMap<ObjectName, Vec<IpAddr>> {
    let mut known: BTreeMap<ObjectName, Vec<IpAddr>> = BTreeMap::new();
    for (service, ip) in contents.addresses(FrontendKind::LoadBalancer) {
        let addresses = known.entry(service.clone()).or_default();
        if !addresses.contains(&ip) {
            addresses.push(ip);
        }
    }
    known
}
