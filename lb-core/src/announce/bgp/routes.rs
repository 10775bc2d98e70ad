//! Decides which routes a node offers its BGP daemon.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::super::{advertisement::Advertised, holders::Holder};
use crate::{load_balancer::Labels, model::ObjectName};

/// Why a node offers a route.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Offer {
    /// The addresses that the route leads to and that this node serves, each with the Services that the node serves
    /// there.
    pub addresses: BTreeMap<IpAddr, BTreeSet<ObjectName>>,
    /// The advertisements that announce the route.
    pub advertisements: BTreeSet<ObjectName>,
}

/// The routes that the node `this`, with these labels, offers. They lead to addresses that the node's kernel serves and
/// whose Service has an endpoint (under `externalTrafficPolicy: Local`, an endpoint on this node).
pub fn routes(
    advertised: &Advertised,
    holders: &BTreeMap<ObjectName, Holder>,
    this: &Arc<str>,
    labels: &Labels,
) -> BTreeMap<IpNet, Offer> {
    let pools = &advertised.pools;
    let selected = || advertised.bgp.advertisements.values().filter(|it| it.selects_node(labels));
    let announcing: Vec<Vec<_>> =
        pools.iter().map(|pool| selected().filter(|it| it.announces(pool, pools)).collect()).collect();
    let mut routes: BTreeMap<IpNet, Offer> = BTreeMap::new();
    for (service, holder) in holders {
        for address in holder.addresses.iter().filter(|address| serves(holder, this, **address)) {
            let Some(index) = advertised.index_of(*address) else { continue };
            for advertisement in &announcing[index] {
                let offer = routes.entry(advertisement.route(*address)).or_default();
                offer.addresses.entry(*address).or_default().insert(service.clone());
                offer.advertisements.insert(advertisement.name.clone());
            }
        }
    }
    routes
}

impl Offer {
    /// The Services that this node serves at addresses that the route leads to.
    pub fn services(&self) -> BTreeSet<&ObjectName> {
        self.addresses.values().flatten().collect()
    }
}

/// An address that a node announces by BGP.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct AnnouncedAddress {
    /// The Services that the node serves at the address.
    pub services: BTreeSet<ObjectName>,
    /// The routes that lead to the address.
    pub routes: BTreeSet<IpNet>,
    /// The advertisements that announce these routes.
    pub advertisements: BTreeSet<ObjectName>,
}

/// The addresses that a node with these routes announces.
pub fn announced(routes: &BTreeMap<IpNet, Offer>) -> BTreeMap<IpAddr, AnnouncedAddress> {
    let mut all: BTreeMap<IpAddr, AnnouncedAddress> = BTreeMap::new();
    for (route, Offer { addresses, advertisements }) in routes {
        for (address, services) in addresses {
            let announced = all.entry(*address).or_default();
            announced.services.extend(services.iter().cloned());
            announced.routes.insert(*route);
            announced.advertisements.extend(advertisements.iter().cloned());
        }
    }
    all
}

fn serves(holder: &Holder, this: &Arc<str>, address: IpAddr) -> bool {
    holder.is_served_at(address) && holder.here.contains(&address) && holder.lets_announce(this, address)
}

/// Whether the Services that have the address show that the node `this` must not announce it: at least one Service has
/// the address, and the node serves no such Service at the address.
pub fn is_refuted(holders: &BTreeMap<ObjectName, Holder>, this: &Arc<str>, address: IpAddr) -> bool {
    let mut of = holders.values().filter(|holder| holder.addresses.contains(&address)).peekable();
    of.peek().is_some() && !of.any(|holder| serves(holder, this, address))
}

/// Routes that an earlier agent has left in the table, and that this agent cannot judge yet: objects that it has not
/// read yet may call for these routes.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Adopted(BTreeSet<IpNet>);

impl Adopted {
    /// Starts with the routes that are in the table when the agent starts.
    pub const fn new(found: BTreeSet<IpNet>) -> Self {
        Self(found)
    }

    /// Removes the routes that this agent can now judge:
    ///
    /// - the routes that are `wanted`,
    /// - a route to a single address, if Services have the address and the node `this` serves no Service at the
    ///   address,
    /// - if `complete`, all routes: the agent has read every object, or the node may not announce.
    pub fn settle(
        &mut self,
        wanted: &BTreeMap<IpNet, Offer>,
        holders: &BTreeMap<ObjectName, Holder>,
        this: &Arc<str>,
        complete: bool,
    ) {
        let refuted = |address| is_refuted(holders, this, address);
        self.0.retain(|net| {
            let is_host = net.prefix_len() == net.max_prefix_len();
            !(complete || wanted.contains_key(net) || is_host && refuted(net.addr()))
        });
    }

    /// The routes that stay in the table although they are not wanted.
    pub const fn routes(&self) -> &BTreeSet<IpNet> {
        &self.0
    }
}
