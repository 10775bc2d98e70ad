//! Finds load balancers' addresses that no advertisement covers, so that no node announces them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    sync::Arc,
};

use super::{advertisement::Advertised, holders::Holder};
use crate::{listing::first_few, load_balancer::Pool, model::ObjectName};

/// Maximum number of addresses that the text of an [`Uncovered`] names.
const NAMED: usize = 5;

/// The objects that decide what this agent announces at layer 2, and those for BGP; `None` for a protocol by which the
/// agent announces nothing. The agent may have read the objects of one protocol later than those of the other.
#[derive(Clone, Copy, Debug)]
pub struct Protocols<'a> {
    /// The pools and the advertisements at layer 2.
    pub layer_2: Option<&'a Advertised>,
    /// The pools and the objects for BGP.
    pub bgp: Option<&'a Advertised>,
}

/// A pool that no advertisement covers, with the addresses of the pool that Services have. Or, without a pool, the
/// addresses that an agent gave to Services and that are in no pool any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uncovered {
    /// Name of the pool; `None` for addresses in no pool.
    pub pool: Option<Arc<str>>,
    /// The addresses, each with its Services.
    pub addresses: BTreeMap<IpAddr, BTreeSet<ObjectName>>,
    /// The kind of advertisement that is missing, in words.
    missing: &'static str,
}

/// The pools that no advertisement covers, with their addresses that Services have, and the addresses in no pool that
/// an agent gave. Empty if there are no advertisements, because then nothing shall be announced. Leaves out addresses
/// in no pool that other software may have given. Also leaves out pools that the agent has not read yet for one of the
/// protocols.
pub fn uncovered(protocols: Protocols<'_>, holders: &BTreeMap<ObjectName, Holder>) -> Vec<Uncovered> {
    if !protocols.advertise() {
        return Vec::new();
    }
    let known = protocols.known();
    let mut pools: BTreeMap<Option<Arc<str>>, BTreeMap<IpAddr, BTreeSet<ObjectName>>> = BTreeMap::new();
    for (service, holder) in holders {
        for address in &holder.addresses {
            let is_lost = || holder.given.contains(address) && is_in_no_pool(&known, *address);
            let pool = uncovered_pool(&known, *address).cloned();
            if pool.is_none() && !is_lost() {
                continue;
            }
            let addresses = pools.entry(pool).or_default();
            addresses.entry(*address).or_default().insert(service.clone());
        }
    }
    let missing = protocols.missing();
    pools.into_iter().map(|(pool, addresses)| Uncovered { pool, addresses, missing }).collect()
}

/// A load balancer's address that no advertisement covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unannounced {
    /// The address.
    pub address: IpAddr,
    /// Name of the pool that contains the address; `None` if the agent knows no such pool.
    pub pool: Option<Arc<str>>,
    /// The Services that have the address.
    pub services: BTreeSet<ObjectName>,
}

/// The load balancers' addresses that no advertisement covers, in ascending order. Unlike [`uncovered`], this includes
/// addresses in no pool, and all addresses if there are no advertisements. Empty if the agent announces by no protocol.
pub fn unannounced(protocols: Protocols<'_>, holders: &BTreeMap<ObjectName, Holder>) -> Vec<Unannounced> {
    let known = protocols.known();
    if known.is_empty() {
        return Vec::new();
    }
    let mut services: BTreeMap<IpAddr, BTreeSet<ObjectName>> = BTreeMap::new();
    for (service, holder) in holders {
        for address in &holder.addresses {
            services.entry(*address).or_default().insert(service.clone());
        }
    }
    let found = services.into_iter().filter_map(|(address, services)| {
        let mut pools = known.iter().filter_map(|it| Some((it, it.advertised.index_of(address)?)));
        if pools.clone().any(|(it, index)| it.is_covered[index]) {
            return None;
        }
        let pool = pools.next().map(|(it, index)| Arc::clone(&it.advertised.pools[index].name));
        Some(Unannounced { address, pool, services })
    });
    found.collect()
}

/// The pools and advertisements of one protocol, as this agent has read them.
struct Known<'a> {
    advertised: &'a Advertised,
    /// For each pool of `advertised`, whether an advertisement of the protocol covers it.
    is_covered: Vec<bool>,
}

/// Name of the pool that contains the address, if every protocol knows that pool and none announces it.
fn uncovered_pool<'a>(known: &[Known<'a>], address: IpAddr) -> Option<&'a Arc<str>> {
    let mut pool = None;
    for Known { advertised, is_covered } in known {
        let index = advertised.index_of(address)?;
        if is_covered[index] {
            return None;
        }
        pool = Some(&advertised.pools[index].name);
    }
    pool
}

/// Whether no protocol knows a pool that contains the address. (If the agent has read the advertisements of a protocol,
/// it has also read all pools for that protocol.)
fn is_in_no_pool(known: &[Known<'_>], address: IpAddr) -> bool {
    known.iter().all(|Known { advertised, .. }| advertised.index_of(address).is_none())
}

impl<'a> Protocols<'a> {
    /// Whether there is any advertisement.
    fn advertise(&self) -> bool {
        let at_layer_2 = self.layer_2.is_some_and(|known| !known.advertisements.is_empty());
        at_layer_2 || self.bgp.is_some_and(|known| !known.bgp.advertisements.is_empty())
    }

    fn known(&self) -> Vec<Known<'a>> {
        let of = |advertised: &'a Advertised, covers: &dyn Fn(&Pool) -> bool| Known {
            advertised,
            is_covered: advertised.pools.iter().map(covers).collect(),
        };
        let layer_2 = self
            .layer_2
            .map(|known| of(known, &|pool| known.advertisements.iter().any(|it| it.covers(pool))));
        let bgp = self.bgp.map(|known| {
            let all = &known.bgp.advertisements;
            of(known, &|pool| all.values().any(|it| it.announces(pool, &known.pools)))
        });
        layer_2.into_iter().chain(bgp).collect()
    }

    const fn missing(&self) -> &'static str {
        match (self.layer_2, self.bgp) {
            (Some(_), Some(_)) => "no L2Advertisement and no BGPAdvertisement",
            (None, Some(_)) => "no BGPAdvertisement",
            (Some(_) | None, None) => "no L2Advertisement",
        }
    }
}

impl fmt::Display for Uncovered {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pool, addresses, missing } = self;
        let named = |(ip, services): (&IpAddr, &BTreeSet<ObjectName>)| {
            let services: Vec<String> = services.iter().map(ToString::to_string).collect();
            format!("{ip} ({})", services.join(", "))
        };
        let (what, advice) = match pool {
            Some(pool) => (
                format!("pool \"{pool}\": {missing} covers it"),
                "name the pool in an advertisement, unless routers have routes to it",
            ),
            None => (
                "addresses in no pool: no advertisement covers them".to_owned(),
                "restore their pool, unless routers have routes to them",
            ),
        };
        let addresses = first_few(addresses.iter().map(named), NAMED);
        write!(formatter, "{what}, so no node with these settings announces {addresses}: {advice}")
    }
}
