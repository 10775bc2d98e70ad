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

/// A set of routes: those of this length within the network. A shorter length is that of the one route around the network.
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

    /// Whether the pool is announced to this peer from a node with these labels.
    pub(super) fn is_for(&self, peer: &str) -> bool {
        self.peers.is_empty() || self.peers.contains(peer)
    }

    /// Whether a node with these labels announces.
    pub(super) fn selects_node(&self, labels: &Labels) -> bool {
        self.scope.selects_node(labels)
    }

    /// Whether the pool is announced: it is in scope, and no route is wider than its ranges.
    pub(super) fn announces(&self, pool: &Pool) -> bool {
        self.scope.covers(pool) && self.too_wide(pool).is_none()
    }

    /// A range of a pool in scope that a route would exceed, with the field of the length.
    pub(super) fn too_wide(&self, pool: &Pool) -> Option<(&'static str, AddressRange)> {
        let fits = |range: &&AddressRange| {
            let length = self.length(range.first());
            range.networks().any(|network| network.prefix_len() <= length)
        };
        let range = self.scope.covers(pool).then(|| pool.ranges.iter().find(|range| !fits(range)))??;
        let field =
            if range.first().is_ipv4() { "spec.aggregationLength" } else { "spec.aggregationLengthV6" };
        Some((field, *range))
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
