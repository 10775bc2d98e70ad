//! MetalLB's `L2Advertisement`, and the set of advertisements, BGP objects and pools that determine which addresses
//! nodes announce.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use crate::{
    api,
    convert::{ConvertError, Object, object_name},
    load_balancer::{Labels, Pool},
    model::ObjectName,
};

use super::{bgp::Objects, scope::Scope};

/// An advertisement at layer 2: which pools are announced, by which nodes, on which devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advertisement {
    /// Namespace and name of the L2Advertisement object.
    pub name: ObjectName,
    scope: Scope,
    /// `spec.interfaces`: names of the devices to announce on; empty for all devices.
    pub interfaces: BTreeSet<String>,
}

/// The advertisements and the pools, which together determine the announced addresses.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Advertised {
    /// The valid advertisements at layer 2.
    pub advertisements: Vec<Advertisement>,
    /// The objects that say what is announced by BGP, and to whom.
    pub bgp: Objects,
    /// All usable pools of load balancers' addresses.
    pub pools: Vec<Pool>,
}

impl Advertisement {
    /// Reads an advertisement.
    ///
    /// # Errors
    ///
    /// The first field that is invalid or not supported.
    pub fn new(advertisement: &api::L2Advertisement) -> Result<Self, ConvertError> {
        let name = object_name("L2Advertisement", &advertisement.metadata)?;
        let object = Object::new("L2Advertisement", &name);
        let spec = &advertisement.spec;
        let unsupported = [
            ("serviceSelectors", &spec.service_selectors),
            ("preferredNodeSelectors", &spec.preferred_node_selectors),
        ];
        for (field, value) in unsupported {
            if value.as_ref().is_some_and(|list| !list.is_empty()) {
                let why = "not supported";
                return Err(object.error(format!("spec.{field}"), why.to_owned()));
            }
        }
        let scope = Scope::new(
            &object,
            spec.ip_address_pools.as_deref(),
            spec.ip_address_pool_selectors.as_deref(),
            spec.node_selectors.as_deref(),
        )?;
        let interfaces = spec.interfaces.iter().flatten().cloned().collect();
        Ok(Self { scope, interfaces, name })
    }

    /// Whether the advertisement covers the pool: it names the pool, selects the pool by a label selector, or has
    /// neither pool names nor pool selectors.
    pub fn covers(&self, pool: &Pool) -> bool {
        self.scope.covers(pool)
    }

    /// Whether nodes with these labels shall announce.
    pub fn selects_node(&self, labels: &Labels) -> bool {
        self.scope.selects_node(labels)
    }

    /// Whether a node with these devices can announce: the advertisement names no interfaces, or one of these devices.
    pub fn is_served_by(&self, devices: &BTreeSet<String>) -> bool {
        self.interfaces.is_empty() || !self.interfaces.is_disjoint(devices)
    }
}

impl Advertised {
    /// The pool that contains the address.
    pub fn pool_of(&self, ip: IpAddr) -> Option<&Pool> {
        self.index_of(ip).map(|index| &self.pools[index])
    }

    /// Index in `pools` of the pool that contains the address.
    pub(super) fn index_of(&self, ip: IpAddr) -> Option<usize> {
        self.pools.iter().position(|pool| pool.ranges.iter().any(|range| range.contains(ip)))
    }

    /// Whether some advertisement names this device.
    pub fn names_device(&self, device: &str) -> bool {
        self.advertisements.iter().any(|advertisement| advertisement.interfaces.contains(device))
    }

    /// The advertisements at layer 2 that cover the pool of the address.
    pub fn of(&self, ip: IpAddr) -> impl Iterator<Item = &Advertisement> {
        let pool = self.pool_of(ip);
        self.advertisements
            .iter()
            .filter(move |advertisement| pool.is_some_and(|pool| advertisement.covers(pool)))
    }
}

/// The labels of a node without a Node object: only `kubernetes.io/hostname`, with the node's name.
pub fn labels_of(node: &Arc<str>) -> Labels {
    Labels::from([("kubernetes.io/hostname".to_owned(), node.to_string())])
}
