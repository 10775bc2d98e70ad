//! Which pools an advertisement announces, from which nodes.

use std::collections::BTreeSet;

use crate::{
    api,
    convert::{ConvertError, Object},
    load_balancer::{Labels, Pool, Selector},
};

/// The fields that L2Advertisements and BGPAdvertisements have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Scope {
    /// `spec.ipAddressPools`: names of the announced pools.
    pub(super) pools: BTreeSet<String>,
    /// `spec.ipAddressPoolSelectors`: label selectors of the announced pools.
    pool_selectors: Vec<Selector>,
    nodes: Nodes,
}

/// `spec.nodeSelectors`: the nodes that announce. Without selectors these are all nodes, otherwise the nodes that at
/// least one selector selects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Nodes(Vec<Selector>);

impl Scope {
    pub(super) fn new(
        object: &Object,
        pools: Option<&[String]>,
        pool_selectors: Option<&[api::LabelSelector]>,
        node_selectors: Option<&[api::LabelSelector]>,
    ) -> Result<Self, ConvertError> {
        Ok(Self {
            pools: pools.unwrap_or_default().iter().cloned().collect(),
            pool_selectors: selectors(object, "ipAddressPoolSelectors", pool_selectors)?,
            nodes: Nodes::new(object, node_selectors)?,
        })
    }

    /// Whether the advertisement covers the pool: it names the pool, selects the pool by a label selector, or has
    /// neither pool names nor pool selectors.
    pub(super) fn covers(&self, pool: &Pool) -> bool {
        let all = self.pools.is_empty() && self.pool_selectors.is_empty();
        all || self.pools.contains(&*pool.name)
            || self.pool_selectors.iter().any(|selector| selector.selects(&pool.labels))
    }

    /// Whether nodes with these labels shall announce.
    pub(super) fn selects_node(&self, labels: &Labels) -> bool {
        self.nodes.select(labels)
    }
}

impl Nodes {
    pub(super) fn new(
        object: &Object,
        node_selectors: Option<&[api::LabelSelector]>,
    ) -> Result<Self, ConvertError> {
        selectors(object, "nodeSelectors", node_selectors).map(Self)
    }

    pub(super) fn select(&self, labels: &Labels) -> bool {
        self.0.is_empty() || self.0.iter().any(|selector| selector.selects(labels))
    }
}

fn selectors(
    object: &Object,
    name: &str,
    list: Option<&[api::LabelSelector]>,
) -> Result<Vec<Selector>, ConvertError> {
    let one = |(index, selector)| {
        Selector::new(selector)
            .map_err(|(field, why)| object.error(format!("spec.{name}[{index}].{field}"), why))
    };
    list.unwrap_or_default().iter().enumerate().map(one).collect()
}
