//! MetalLB's `BGPAdvertisement`: which routes to pools are announced to which peers.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::super::scope::Scope;
use crate::{
    api,
    convert::{ConvertError, Object, object_name},
    load_balancer::{AddressRange, Labels, Pool},
    model::ObjectName,
};

/// An advertisement by BGP: which pools are announced, as which routes, with which attributes, to which peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BgpAdvertisement {
    /// Namespace and name of the BGPAdvertisement object.
    pub name: ObjectName,
    scope: Scope,
    /// Prefix lengths of the routes for IPv4 and IPv6: `spec.aggregationLength` and `spec.aggregationLengthV6`.
    lengths: [u8; 2],
    /// `spec.localPref`: the local preference of the routes; 0 leaves it to BIRD.
    pub(super) local_pref: u32,
    /// `spec.communities`: communities of the routes, as values or as names of Community objects.
    pub(super) communities: Vec<String>,
    /// `spec.peers`: names of the peers that get the routes; empty for all peers.
    pub(super) peers: BTreeSet<String>,
}

/// All networks inside `network` with the prefix length `length`, which is at least the prefix length of `network`.
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
    /// The first field that is invalid or not supported.
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

    /// Names of the pools that the advertisement names.
    pub(super) fn pools(&self) -> &BTreeSet<String> {
        &self.scope.pools
    }

    /// Whether this peer gets the routes.
    pub(super) fn is_for(&self, peer: &str) -> bool {
        self.peers.is_empty() || self.peers.contains(peer)
    }

    /// Whether nodes with these labels shall announce.
    pub(super) fn selects_node(&self, labels: &Labels) -> bool {
        self.scope.selects_node(labels)
    }

    /// Whether `pool`, one of `pools`, is announced: it is in scope, and there is no [`Self::refusal`] of its routes.
    pub(in crate::announce) fn announces(&self, pool: &Pool, pools: &[Pool]) -> bool {
        self.scope.covers(pool) && self.refusal(pool, pools).is_none()
    }

    /// If `pool`, one of `pools`, gets no route although it is in scope: the name of the field that sets the prefix
    /// length, and the reason.
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

    /// The first range of the pool that is too small to contain even one route of the configured prefix length, if
    /// there is one.
    fn too_wide(&self, pool: &Pool) -> Option<AddressRange> {
        let fits = |range: &&AddressRange| {
            let length = self.length(range.first());
            range.networks().any(|network| network.prefix_len() <= length)
        };
        pool.ranges.iter().find(|range| !fits(range)).copied()
    }

    /// A route to `pool` that also covers addresses of another pool, which is out of scope; returned with that other
    /// pool. A route within a range of `pool` does not count, even if another pool overlaps the range.
    fn stray<'a>(&self, pool: &Pool, pools: &'a [Pool]) -> Option<(IpNet, &'a Pool)> {
        let is_within = |set: &RouteSet| {
            let route = AddressRange::from(set.network);
            pool.ranges.iter().any(|range| range.contains(route.first()) && range.contains(route.last()))
        };
        let mut routes = self.route_sets(pool);
        routes.retain(|set| !is_within(set));
        pools.iter().filter(|other| !self.scope.covers(other)).find_map(|other| {
            let overlaps = |set: &&RouteSet| {
                let route = AddressRange::from(set.network);
                other.ranges.iter().any(|range| range.overlaps(&route))
            };
            routes.iter().find(overlaps).map(|set| (set.network, other))
        })
    }

    /// The route by which the address is announced: the network of the configured prefix length that contains the
    /// address.
    pub(super) fn route(&self, address: IpAddr) -> IpNet {
        IpNet::new(address, self.length(address)).map_or_else(|_| address.into(), |net| net.trunc())
    }

    /// All routes by which addresses of the pool can be announced.
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
