//! The fields of kinds that `k8s_openapi` does not have, so that a misspelt field in a manifest is an error.

#![expect(dead_code, reason = "only the names and types of the fields count")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde::Deserialize;
use serde_json::Value;

/// The fields of `metallb.io/v1beta1 IPAddressPool`.
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

/// The fields of `metallb.io/v1beta1 L2Advertisement`.
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

/// The fields of `metallb.io/v1beta1 BGPAdvertisement`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct BgpAdvertisement {
    api_version: Option<String>,
    kind: Option<String>,
    metadata: ObjectMeta,
    spec: Option<BgpAdvertisementSpec>,
    status: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BgpAdvertisementSpec {
    aggregation_length: Option<i64>,
    aggregation_length_v6: Option<i64>,
    local_pref: Option<i64>,
    communities: Option<Vec<String>>,
    ip_address_pools: Option<Vec<String>>,
    ip_address_pool_selectors: Option<Vec<LabelSelector>>,
    node_selectors: Option<Vec<LabelSelector>>,
    peers: Option<Vec<String>>,
    service_selectors: Option<Vec<LabelSelector>>,
}

/// The fields of `metallb.io/v1beta2 BGPPeer`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct BgpPeer {
    api_version: Option<String>,
    kind: Option<String>,
    metadata: ObjectMeta,
    spec: BgpPeerSpec,
    status: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BgpPeerSpec {
    #[serde(rename = "myASN")]
    my_asn: i64,
    #[serde(rename = "peerASN")]
    peer_asn: Option<i64>,
    #[serde(rename = "dynamicASN")]
    dynamic_asn: Option<String>,
    #[serde(rename = "localASN")]
    local_asn: Option<i64>,
    peer_address: Option<String>,
    interface: Option<String>,
    source_address: Option<String>,
    peer_port: Option<i64>,
    hold_time: Option<String>,
    keepalive_time: Option<String>,
    connect_time: Option<String>,
    #[serde(rename = "routerID")]
    router_id: Option<String>,
    node_selectors: Option<Vec<LabelSelector>>,
    password: Option<String>,
    password_secret: Option<SecretReference>,
    bfd_profile: Option<String>,
    enable_graceful_restart: Option<bool>,
    ebgp_multi_hop: Option<bool>,
    vrf: Option<String>,
    #[serde(rename = "disableMP")]
    disable_mp: Option<bool>,
    dual_stack_address_family: Option<bool>,
}

#[derive(Deserialize)]
struct SecretReference {
    name: Option<String>,
    namespace: Option<String>,
}

/// The fields of `metallb.io/v1beta1 Community`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Community {
    api_version: Option<String>,
    kind: Option<String>,
    metadata: ObjectMeta,
    spec: Option<CommunitySpec>,
    status: Option<Value>,
}

#[derive(Deserialize)]
struct CommunitySpec {
    communities: Option<Vec<CommunityAlias>>,
}

#[derive(Deserialize)]
struct CommunityAlias {
    name: Option<String>,
    value: Option<String>,
}

/// The fields of `metallb.io/v1beta1 BFDProfile`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct BfdProfile {
    api_version: Option<String>,
    kind: Option<String>,
    metadata: ObjectMeta,
    spec: Option<BfdProfileSpec>,
    status: Option<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BfdProfileSpec {
    receive_interval: Option<i64>,
    transmit_interval: Option<i64>,
    detect_multiplier: Option<i64>,
    echo_interval: Option<i64>,
    echo_mode: Option<bool>,
    passive_mode: Option<bool>,
    minimum_ttl: Option<i64>,
}
