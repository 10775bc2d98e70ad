//! The fields of MetalLB's IPAddressPool and L2Advertisement (`metallb.io/v1beta1`), and of the label selectors of
//! Kubernetes that MetalLB's kinds use.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{ObjectMeta, tolerant};

/// The API object `metallb.io/v1beta1 IPAddressPool`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct IpAddressPool {
    #[serde(deserialize_with = "tolerant::value")]
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "tolerant::value")]
    pub spec: IpAddressPoolSpec,
}

/// `spec` of an IPAddressPool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct IpAddressPoolSpec {
    #[serde(deserialize_with = "tolerant::texts")]
    pub addresses: Vec<String>,
    pub auto_assign: Option<bool>,
    #[serde(rename = "avoidBuggyIPs")]
    pub avoid_buggy_ips: Option<bool>,
    pub service_allocation: Option<ServiceAllocation>,
}

/// `spec.serviceAllocation` of an IPAddressPool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceAllocation {
    pub priority: Option<i64>,
    #[serde(deserialize_with = "tolerant::list")]
    pub namespaces: Option<Vec<String>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub namespace_selectors: Option<Vec<LabelSelector>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub service_selectors: Option<Vec<LabelSelector>>,
}

/// The API object `metallb.io/v1beta1 L2Advertisement`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct L2Advertisement {
    #[serde(deserialize_with = "tolerant::value")]
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "tolerant::value")]
    pub spec: L2AdvertisementSpec,
}

/// `spec` of an L2Advertisement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct L2AdvertisementSpec {
    #[serde(deserialize_with = "tolerant::list")]
    pub ip_address_pools: Option<Vec<String>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub ip_address_pool_selectors: Option<Vec<LabelSelector>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub node_selectors: Option<Vec<LabelSelector>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub interfaces: Option<Vec<String>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub service_selectors: Option<Vec<serde_json::Value>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub preferred_node_selectors: Option<Vec<serde_json::Value>>,
}

/// A label selector of Kubernetes, `meta/v1 LabelSelector`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LabelSelector {
    pub match_labels: Option<BTreeMap<String, String>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub match_expressions: Option<Vec<LabelSelectorRequirement>>,
}

/// One of `matchExpressions` of a LabelSelector.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct LabelSelectorRequirement {
    #[serde(deserialize_with = "tolerant::value")]
    pub key: String,
    #[serde(deserialize_with = "tolerant::value")]
    pub operator: String,
    #[serde(deserialize_with = "tolerant::list")]
    pub values: Option<Vec<String>>,
}
