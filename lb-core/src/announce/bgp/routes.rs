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
    /// The Services with an address that the route leads to.
    pub services: BTreeSet<ObjectName>,
    /// The advertisements that announce the route.
    pub advertisements: BTreeSet<ObjectName>,
}

/// The routes that the node `this`, with these labels, offers: those to addresses that the kernel of the node serves,
/// of Services with an endpoint; under `externalTrafficPolicy: Local`, an endpoint on this node.
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
                offer.services.insert(service.clone());
                offer.advertisements.insert(advertisement.name.clone());
            }
        }
    }
    routes
}

fn serves(holder: &Holder, this: &Arc<str>, address: IpAddr) -> bool {
    holder.is_served
        && holder.here.contains(&address)
        && holder.nodes.as_ref().is_none_or(|nodes| nodes.contains(this))
}

/// Routes that an earlier agent has left in the table, as long as it is unknown whether this agent offers them: an
/// object that is not read yet may ask for them.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Adopted(BTreeSet<IpNet>);

impl Adopted {
    /// Starts with the routes that are in the table when the agent starts.
    pub const fn new(found: BTreeSet<IpNet>) -> Self {
        Self(found)
    }

    /// Drops the routes whose fate is now known: those that are `wanted`; those to a single address that some Services
    /// have, if the node `this` serves none of these Services at it; and all routes once every object has been read
    /// (`complete`).
    pub fn settle(
        &mut self,
        wanted: &BTreeMap<IpNet, Offer>,
        holders: &BTreeMap<ObjectName, Holder>,
        this: &Arc<str>,
        complete: bool,
    ) {
        let refuted = |address: IpAddr| {
            let mut of = holders.values().filter(|holder| holder.addresses.contains(&address)).peekable();
            of.peek().is_some() && !of.any(|holder| serves(holder, this, address))
        };
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
