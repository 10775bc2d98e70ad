//! The fields of MetalLB's kinds for BGP: `BGPPeer` of `metallb.io/v1beta2`, and the other kinds of
//! `metallb.io/v1beta1`.

use serde::Deserialize;
use serde_json::Value;

use super::{LabelSelector, ObjectMeta, tolerant};

/// The API object `metallb.io/v1beta1 BGPAdvertisement`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct BgpAdvertisement {
    #[serde(deserialize_with = "tolerant::value")]
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "tolerant::value")]
    pub spec: BgpAdvertisementSpec,
}

/// `spec` of a BGPAdvertisement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BgpAdvertisementSpec {
    pub aggregation_length: Option<i64>,
    pub aggregation_length_v6: Option<i64>,
    pub local_pref: Option<i64>,
    #[serde(deserialize_with = "tolerant::list")]
    pub communities: Option<Vec<String>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub ip_address_pools: Option<Vec<String>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub ip_address_pool_selectors: Option<Vec<LabelSelector>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub node_selectors: Option<Vec<LabelSelector>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub peers: Option<Vec<String>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub service_selectors: Option<Vec<Value>>,
}

/// The API object `metallb.io/v1beta2 BGPPeer`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct BgpPeer {
    #[serde(deserialize_with = "tolerant::value")]
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "tolerant::value")]
    pub spec: BgpPeerSpec,
}

/// `spec` of a BGPPeer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BgpPeerSpec {
    #[serde(rename = "myASN")]
    pub my_asn: Option<i64>,
    #[serde(rename = "peerASN")]
    pub peer_asn: Option<i64>,
    #[serde(rename = "dynamicASN")]
    pub dynamic_asn: Option<String>,
    #[serde(rename = "localASN")]
    pub local_asn: Option<i64>,
    pub peer_address: Option<String>,
    pub interface: Option<String>,
    pub source_address: Option<String>,
    pub peer_port: Option<i64>,
    pub hold_time: Option<String>,
    pub keepalive_time: Option<String>,
    pub connect_time: Option<String>,
    #[serde(rename = "routerID")]
    pub router_id: Option<String>,
    #[serde(deserialize_with = "tolerant::list")]
    pub node_selectors: Option<Vec<LabelSelector>>,
    #[serde(deserialize_with = "tolerant::secret")]
    pub password: Option<String>,
    #[serde(deserialize_with = "tolerant::value")]
    pub password_secret: SecretReference,
    pub bfd_profile: Option<String>,
    pub enable_graceful_restart: Option<bool>,
    pub ebgp_multi_hop: Option<bool>,
    pub vrf: Option<String>,
    #[serde(rename = "disableMP")]
    pub disable_mp: Option<bool>,
    pub dual_stack_address_family: Option<bool>,
}

/// `spec.passwordSecret` of a BGPPeer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct SecretReference {
    #[serde(deserialize_with = "tolerant::lenient")]
    pub name: Option<String>,
    #[serde(deserialize_with = "tolerant::lenient")]
    pub namespace: Option<String>,
}

/// The API object `metallb.io/v1beta1 Community`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Community {
    #[serde(deserialize_with = "tolerant::value")]
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "tolerant::value")]
    pub spec: CommunitySpec,
}

/// `spec` of a Community.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CommunitySpec {
    #[serde(deserialize_with = "tolerant::list")]
    pub communities: Option<Vec<CommunityAlias>>,
}

/// One of `spec.communities` of a Community.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CommunityAlias {
    #[serde(deserialize_with = "tolerant::value")]
    pub name: String,
    #[serde(deserialize_with = "tolerant::value")]
    pub value: String,
}

/// The API object `metallb.io/v1beta1 BFDProfile`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct BfdProfile {
    #[serde(deserialize_with = "tolerant::value")]
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "tolerant::value")]
    pub spec: BfdProfileSpec,
}

/// `spec` of a BFDProfile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct BfdProfileSpec {
    pub receive_interval: Option<i64>,
    pub transmit_interval: Option<i64>,
    pub detect_multiplier: Option<i64>,
    pub echo_interval: Option<i64>,
    pub echo_mode: Option<bool>,
    pub passive_mode: Option<bool>,
    pub minimum_ttl: Option<i64>,
}
