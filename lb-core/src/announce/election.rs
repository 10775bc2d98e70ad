//! The nodes that may announce an address, the best first.
//!
//! Rendezvous hashing ranks the nodes for each address, not for each Service, because Services that share an address
//! need one announcer. The hash is MetalLB's, so an address that is the only one of its Service stays on its node when
//! this agent replaces MetalLB.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use ring::digest::{SHA256, digest};

use super::{
    advertisement::{Advertised, Advertisement},
    holders::Holder,
};
use crate::{load_balancer::Labels, model::ObjectName};

/// An address that shall be announced, with the nodes that may announce it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidacy {
    /// The address to announce.
    pub address: IpAddr,
    /// Name of the pool that contains the address.
    pub pool: Arc<str>,
    /// The Services that have the address, and an endpoint of the address's family that may get new flows.
    pub services: Vec<ObjectName>,
    /// The L2Advertisements that cover the pool.
    pub advertisements: Vec<ObjectName>,
    /// The nodes that may announce the address, the best first; perhaps none. The first of them that is alive and
    /// serves the address requests the right to announce it.
    pub nodes: Vec<Arc<str>>,
    /// Whether this node's kernel leads external clients of one of the Services to endpoints. If not, the node must not
    /// announce the address, as it would drop the packets.
    pub is_served_here: bool,
    /// The devices on which this node would announce the address.
    pub interfaces: Interfaces,
}

/// What this agent knows about a node that may announce addresses.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Candidate {
    /// The labels of the node.
    pub labels: Labels,
    /// The devices on which the node can announce, as far as advertisements name them. `None` if the node has not
    /// reported them yet, or if the list is too long for a message; the node then counts as having every device.
    pub devices: Option<BTreeSet<String>>,
}

impl Candidate {
    /// Whether an advertisement selects this node, and names no device or one of the node's devices.
    fn serves(&self, advertisement: &Advertisement) -> bool {
        let has_device = self.devices.as_ref().is_none_or(|devices| advertisement.is_served_by(devices));
        has_device && advertisement.selects_node(&self.labels)
    }
}

/// On which devices a node announces an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Interfaces {
    /// All devices that suit the address.
    All,
    /// The devices with these names.
    Named(BTreeSet<String>),
}

/// The addresses that some node shall announce, as far as this node knows: those with an advertisement and an endpoint.
/// `nodes` are all nodes that may announce.
pub fn candidacies(
    advertised: &Advertised,
    holders: &BTreeMap<ObjectName, Holder>,
    nodes: &BTreeMap<Arc<str>, Candidate>,
    this: &str,
) -> Vec<Candidacy> {
    let mut by_address: BTreeMap<IpAddr, Vec<(&ObjectName, &Holder)>> = BTreeMap::new();
    for (service, holder) in holders {
        for address in holder.addresses.iter().filter(|address| holder.is_served_at(**address)) {
            by_address.entry(*address).or_default().push((service, holder));
        }
    }
    let candidacy = |(address, holders): (IpAddr, Vec<(&ObjectName, &Holder)>)| {
        let pool = advertised.pool_of(address)?;
        let has_endpoints =
            |node: &Arc<str>| holders.iter().all(|(_, holder)| holder.lets_announce(node, address));
        let serves =
            |node: &Candidate| advertised.of(address).any(|advertisement| node.serves(advertisement));
        let eligible = nodes.iter().filter(|(name, node)| serves(node) && has_endpoints(name));
        let nodes_ranked = ranked(eligible.map(|(node, _)| node), address);
        let nowhere = || Interfaces::Named(BTreeSet::new());
        let interfaces =
            nodes.get(this).map_or_else(nowhere, |node| interfaces(advertised, address, &node.labels));
        let services = holders.iter().map(|(service, _)| (*service).clone()).collect();
        let pool = pool.name.clone();
        let advertisements: Vec<ObjectName> = advertised.of(address).map(|it| it.name.clone()).collect();
        let is_advertised = !advertisements.is_empty();
        let is_served_here = holders.iter().any(|(_, holder)| holder.here.contains(&address));
        let nodes = nodes_ranked;
        let candidacy =
            Candidacy { address, pool, services, advertisements, nodes, is_served_here, interfaces };
        is_advertised.then_some(candidacy)
    };
    by_address.into_iter().filter_map(candidacy).collect()
}

/// The devices on which a node with these labels announces the address: those of all advertisements that select the
/// node.
fn interfaces(advertised: &Advertised, address: IpAddr, labels: &Labels) -> Interfaces {
    let mut named = BTreeSet::new();
    for advertisement in advertised.of(address).filter(|advertisement| advertisement.selects_node(labels)) {
        if advertisement.interfaces.is_empty() {
            return Interfaces::All;
        }
        named.extend(advertisement.interfaces.iter().cloned());
    }
    Interfaces::Named(named)
}

/// The nodes in order of the SHA-256 hash of `NODE#ADDRESS`, smallest first.
fn ranked<'a>(nodes: impl Iterator<Item = &'a Arc<str>>, address: IpAddr) -> Vec<Arc<str>> {
    let mut nodes: Vec<Arc<str>> = nodes.cloned().collect();
    nodes
        .sort_by_cached_key(|node| digest(&SHA256, format!("{node}#{address}").as_bytes()).as_ref().to_vec());
    nodes
}
