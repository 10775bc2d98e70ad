//! MetalLB's `BGPAdvertisement`.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::super::scope::Scope;
use crate::{
    api,
    convert::{ConvertError, Object, object_name},
    load_balancer::{AddressRange, Labels, Pool},
    model::ObjectName,
};

/// Which pools are announced, as which routes, with which attributes, to which peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BgpAdvertisement {
    /// Namespace and name of the object.
    pub name: ObjectName,
    scope: Scope,
    /// `spec.aggregationLength` and `spec.aggregationLengthV6`: the prefix lengths of the routes.
    lengths: [u8; 2],
    /// `spec.localPref`
    pub(super) local_pref: u32,
    /// `spec.communities`: values and names.
    pub(super) communities: Vec<String>,
    /// `spec.peers`: names of peers; empty for all.
    pub(super) peers: BTreeSet<String>,
}

/// A set of routes: those with the prefix length `length` within `network`, whose own prefix is not longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RouteSet {
    pub(super) network: IpNet,
    pub(super) length: u8,
}

impl BgpAdvertisement {
    /// Reads an advertisement.
    ///
    /// # Errors
    ///
    /// The first invalid field, or one that is not supported.
    pub fn new(advertisement: &api::BgpAdvertisement) -> Result<Self, ConvertError> {
        let name = object_name("BGPAdvertisement", &advertisement.metadata)?;
        let object = Object::new("BGPAdvertisement", &name);
        let spec = &advertisement.spec;
        if spec.service_selectors.as_ref().is_some_and(|list| !list.is_empty()) {
            let why = "not supported: the agent announces nothing by this object";
            return Err(object.error("spec.serviceSelectors", why.to_owned()));
        }
        let length = |given: Option<i64>, field: &str, most: u8| {
            let length = given.unwrap_or(most.into());
            let valid = u8::try_from(length).ok().filter(|length| (1..=most).contains(length));
            valid.ok_or_else(|| {
                object.invalid(format!("spec.{field}"), length, &format!("must be from 1 to {most}"))
            })
        };
        let local_pref = spec.local_pref.unwrap_or(0);
        Ok(Self {
            scope: Scope::new(
                &object,
                spec.ip_address_pools.as_deref(),
                spec.ip_address_pool_selectors.as_deref(),
                spec.node_selectors.as_deref(),
            )?,
            lengths: [
                length(spec.aggregation_length, "aggregationLength", 32)?,
                length(spec.aggregation_length_v6, "aggregationLengthV6", 128)?,
            ],
            local_pref: u32::try_from(local_pref)
                .map_err(|error| object.invalid("spec.localPref", local_pref, &error.to_string()))?,
            communities: spec.communities.clone().unwrap_or_default(),
            peers: spec.peers.iter().flatten().cloned().collect(),
            name,
        })
    }

    /// The names of pools that the advertisement gives.
    pub(super) fn pools(&self) -> &BTreeSet<String> {
        &self.scope.pools
    }

    /// Whether the pools are announced to this peer.
    pub(super) fn is_for(&self, peer: &str) -> bool {
        self.peers.is_empty() || self.peers.contains(peer)
    }

    /// Whether a node with these labels announces.
    pub(super) fn selects_node(&self, labels: &Labels) -> bool {
        self.scope.selects_node(labels)
    }

    /// Whether `pool`, one of `pools`, is announced: it is in scope, and its routes are not refused.
    pub(super) fn announces(&self, pool: &Pool, pools: &[Pool]) -> bool {
        self.scope.covers(pool) && self.refusal(pool, pools).is_none()
    }

    /// Why no route leads to `pool`, one of `pools`, although it is in scope; with the field of the length.
    pub(super) fn refusal(&self, pool: &Pool, pools: &[Pool]) -> Option<(&'static str, String)> {
        if !self.scope.covers(pool) {
            return None;
        }
        let field = |v4: bool| if v4 { "spec.aggregationLength" } else { "spec.aggregationLengthV6" };
        if let Some(range) = self.too_wide(pool) {
            let why = format!("the routes are wider than {range} of IPAddressPool {}", pool.name);
            return Some((field(range.first().is_ipv4()), why));
        }
        let (net, other) = self.stray(pool, pools)?;
        let why =
            format!("the route {net} has addresses of IPAddressPool {}, which is not announced", other.name);
        Some((field(net.addr().is_ipv4()), why))
    }

    /// A range of a pool that each route to its addresses would exceed.
    fn too_wide(&self, pool: &Pool) -> Option<AddressRange> {
        let fits = |range: &&AddressRange| {
            let length = self.length(range.first());
            range.networks().any(|network| network.prefix_len() <= length)
        };
        pool.ranges.iter().find(|range| !fits(range)).copied()
    }

    /// A route to `pool` that has addresses of a pool out of scope.
    fn stray<'a>(&self, pool: &Pool, pools: &'a [Pool]) -> Option<(IpNet, &'a Pool)> {
        let routes = self.route_sets(pool);
        pools.iter().filter(|other| !self.scope.covers(other)).find_map(|other| {
            let overlaps = |set: &&RouteSet| {
                let route = AddressRange::from(set.network);
                other.ranges.iter().any(|range| range.overlaps(&route))
            };
            routes.iter().find(overlaps).map(|set| (set.network, other))
        })
    }

    /// The route by which the address is announced.
    pub(super) fn route(&self, address: IpAddr) -> IpNet {
        IpNet::new(address, self.length(address)).map_or_else(|_| address.into(), |net| net.trunc())
    }

    /// All routes by which addresses of the pool may be announced.
    pub(super) fn route_sets(&self, pool: &Pool) -> BTreeSet<RouteSet> {
        let all = pool.ranges.iter().flat_map(AddressRange::networks);
        all.map(|network| {
            let length = self.length(network.addr());
            let around = IpNet::new(network.addr(), length.min(network.prefix_len()));
            RouteSet { network: around.map_or(network, |net| net.trunc()), length }
        })
        .collect()
    }

    const fn length(&self, address: IpAddr) -> u8 {
        if address.is_ipv4() { self.lengths[0] } else { self.lengths[1] }
    }
}
