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
