//! The routes that a node offers its BGP daemon.

use std::{
    collections::{BTreeMap, BTreeSet},
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

/// The routes that the node `this`, which has these labels, offers: to addresses of Services that have an endpoint, under
/// `externalTrafficPolicy: Local` one on this node.
pub fn routes(
    advertised: &Advertised,
    holders: &BTreeMap<ObjectName, Holder>,
    this: &Arc<str>,
    labels: &Labels,
) -> BTreeMap<IpNet, Offer> {
    let selected: Vec<_> = advertised
        .bgp
        .advertisements
        .values()
        .filter(|advertisement| advertisement.selects_node(labels))
        .collect();
    let mut routes: BTreeMap<IpNet, Offer> = BTreeMap::new();
    let serves =
        |holder: &Holder| holder.is_served && holder.nodes.as_ref().is_none_or(|nodes| nodes.contains(this));
    for (service, holder) in holders.iter().filter(|(_, holder)| serves(holder)) {
        for address in &holder.addresses {
            let Some(pool) = advertised.pool_of(*address) else { continue };
            for advertisement in selected.iter().filter(|advertisement| advertisement.announces(pool)) {
                let offer = routes.entry(advertisement.route(*address)).or_default();
                offer.services.insert(service.clone());
                offer.advertisements.insert(advertisement.name.clone());
            }
        }
    }
    routes
}
