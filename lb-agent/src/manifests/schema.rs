//! All fields of the kinds that `k8s_openapi` lacks, so that the reader finds misspelt fields in manifests.

#![expect(dead_code, reason = "only the names and types of the fields count")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde::Deserialize;
use serde_json::Value;

/// `metallb.io/v1beta1 IPAddressPool`
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct IpAddressPool {
    api_version: Option<String>,
    kind: Option<String>,
    metadata: ObjectMeta,
    spec: IpAddressPoolSpec,
    status: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct IpAddressPoolSpec {
    addresses: Vec<String>,
    auto_assign: Option<bool>,
    #[serde(rename = "avoidBuggyIPs")]
    avoid_buggy_ips: Option<bool>,
    service_allocation: Option<ServiceAllocation>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ServiceAllocation {
    priority: Option<i64>,
    namespaces: Option<Vec<String>>,
    namespace_selectors: Option<Vec<LabelSelector>>,
    service_selectors: Option<Vec<LabelSelector>>,
}

/// `metallb.io/v1beta1 L2Advertisement`
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct L2Advertisement {
    api_version: Option<String>,
    kind: Option<String>,
    metadata: ObjectMeta,
    spec: Option<L2AdvertisementSpec>,
    status: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct L2AdvertisementSpec {
    ip_address_pools: Option<Vec<String>>,
    ip_address_pool_selectors: Option<Vec<LabelSelector>>,
    node_selectors: Option<Vec<LabelSelector>>,
    interfaces: Option<Vec<String>>,
    service_selectors: Option<Vec<LabelSelector>>,
    preferred_node_selectors: Option<Vec<Value>>,
}
