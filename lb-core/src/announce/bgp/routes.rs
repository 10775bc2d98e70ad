//! The routes that a node offers its BGP daemon.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ipnet::IpNet;

use super::super::{advertisement::Advertised, holders::Holder};
use crate::{load_balancer::Labels, model::ObjectName};

/// Why a route is offered.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Offer {
    /// The Services that it leads to.
    pub services: BTreeSet<ObjectName>,
    /// The advertisements that ask for it.
    pub advertisements: BTreeSet<ObjectName>,
}

/// The routes that the node `this`, which has these labels, offers: to addresses of Services that have an endpoint,
/// under `externalTrafficPolicy: Local` one on this node, and that the kernel of the node serves.
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

/// The routes of an earlier agent that this one has found, and of which it does not know yet whether it offers them: an
/// object that cannot be read may be the one that asks for them.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Adopted(BTreeSet<IpNet>);

impl Adopted {
    /// The routes that are in the table when the agent starts.
    pub const fn new(found: BTreeSet<IpNet>) -> Self {
        Self(found)
    }

    /// Drops the routes whose fate is known: those that are `wanted`, those to single addresses of Services none of
    /// which the node `this` serves, and all once every object has been read.
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

    /// The routes that stay although they are not wanted.
    pub const fn routes(&self) -> &BTreeSet<IpNet> {
        &self.0
    }
}
