//! The fields of Kubernetes API objects that this project reads, and no others.
//!
//! An API server may store anything that its version allows in the fields that are not listed here: `null` for a
//! required timestamp, values of enums that did not exist when this was written, fields of a newer API. None of these
//! values makes an object unreadable, because the agent does not parse them. A listed field reads `null` as the zero
//! value of its type, as the Go types of the API server do.
//!
//! Unknown fields are no errors for these types. In a folder of manifests, an unknown field is probably a typo, so the
//! agent checks for such fields before it reads an object of a manifest as one of these types.

#![expect(missing_docs, reason = "the fields have the names of the Kubernetes API, which documents them")]

mod defaults;
mod metallb;
mod metallb_bgp;
mod tolerant;

use std::collections::BTreeMap;

use serde::Deserialize;

pub use self::defaults::DEFAULT_NAMESPACE;
pub use self::metallb::{
    IpAddressPool, IpAddressPoolSpec, L2Advertisement, L2AdvertisementSpec, LabelSelector,
    LabelSelectorRequirement, ServiceAllocation,
};
pub use self::metallb_bgp::{
    BfdProfile, BfdProfileSpec, BgpAdvertisement, BgpAdvertisementSpec, BgpPeer, BgpPeerSpec, Community,
    CommunityAlias, CommunitySpec,
};

/// `metadata` of any object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ObjectMeta {
    #[serde(deserialize_with = "tolerant::lenient")]
    pub name: Option<String>,
    #[serde(deserialize_with = "tolerant::lenient")]
    pub namespace: Option<String>,
    #[serde(deserialize_with = "tolerant::lenient")]
    pub uid: Option<String>,
    #[serde(deserialize_with = "tolerant::lenient")]
    pub resource_version: Option<String>,
    #[serde(deserialize_with = "tolerant::text_map")]
    pub labels: Option<BTreeMap<String, String>>,
    #[serde(deserialize_with = "tolerant::text_map")]
    pub annotations: Option<BTreeMap<String, String>>,
    /// `creationTimestamp`; the API server writes it as RFC 3339 in UTC, so texts compare as times.
    #[serde(deserialize_with = "tolerant::lenient")]
    pub creation_timestamp: Option<String>,
    /// Whether `deletionTimestamp` is set: the object is being deleted.
    #[serde(rename = "deletionTimestamp", deserialize_with = "tolerant::is_present")]
    pub is_being_deleted: bool,
}

impl ObjectMeta {
    /// The value of the label with this name; `None` without it.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.as_ref()?.get(name).map(String::as_str)
    }

    /// The value of the annotation with this name; `None` without it.
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(name).map(String::as_str)
    }
}

/// The API object `v1 Service`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Service {
    #[serde(deserialize_with = "tolerant::value")]
    pub metadata: ObjectMeta,
    pub spec: Option<ServiceSpec>,
    pub status: Option<ServiceStatus>,
}

/// `spec` of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceSpec {
    #[serde(rename = "type")]
    pub type_: Option<String>,
    #[serde(rename = "clusterIP")]
    pub cluster_ip: Option<String>,
    #[serde(rename = "clusterIPs", deserialize_with = "tolerant::list")]
    pub cluster_ips: Option<Vec<String>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub ports: Option<Vec<ServicePort>>,
    pub session_affinity: Option<String>,
    pub session_affinity_config: Option<SessionAffinityConfig>,
    pub internal_traffic_policy: Option<String>,
    pub external_traffic_policy: Option<String>,
    #[serde(rename = "externalIPs", deserialize_with = "tolerant::list")]
    pub external_ips: Option<Vec<String>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub load_balancer_source_ranges: Option<Vec<String>>,
    pub health_check_node_port: Option<i32>,
    /// `ipFamilies`; only for validation and for the allocation of cluster IPs.
    #[serde(deserialize_with = "tolerant::lenient")]
    pub ip_families: Option<Vec<String>>,
    /// `ipFamilyPolicy`; only for validation and for the allocation of cluster IPs and load balancers' addresses.
    #[serde(deserialize_with = "tolerant::lenient")]
    pub ip_family_policy: Option<String>,
    /// `allocateLoadBalancerNodePorts`; only for the allocation of node ports.
    #[serde(deserialize_with = "tolerant::lenient")]
    pub allocate_load_balancer_node_ports: Option<bool>,
    /// `selector`; only to decide whether two Services may share a load balancer's address.
    #[serde(deserialize_with = "tolerant::text_map")]
    pub selector: Option<BTreeMap<String, String>>,
    /// `loadBalancerIP`; only for the allocation of load balancers' addresses.
    #[serde(rename = "loadBalancerIP", deserialize_with = "tolerant::lenient")]
    pub load_balancer_ip: Option<String>,
    /// `loadBalancerClass`; only for the allocation of load balancers' addresses.
    #[serde(deserialize_with = "tolerant::lenient")]
    pub load_balancer_class: Option<String>,
    /// `externalName`; only for validation and DNS names.
    #[serde(deserialize_with = "tolerant::lenient")]
    pub external_name: Option<String>,
    /// `publishNotReadyAddresses`; only for DNS names.
    #[serde(deserialize_with = "tolerant::lenient")]
    pub publish_not_ready_addresses: Option<bool>,
}

/// One of `spec.ports` of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServicePort {
    pub name: Option<String>,
    pub protocol: Option<String>,
    #[serde(deserialize_with = "tolerant::value")]
    pub port: i32,
    pub node_port: Option<i32>,
    /// `targetPort`; only for validation.
    #[serde(deserialize_with = "tolerant::lenient")]
    pub target_port: Option<IntOrString>,
}

/// A port, by its number or its name.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum IntOrString {
    Int(i32),
    String(String),
}

/// `spec.sessionAffinityConfig` of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct SessionAffinityConfig {
    #[serde(rename = "clientIP")]
    pub client_ip: Option<ClientIpConfig>,
}

/// `spec.sessionAffinityConfig.clientIP` of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClientIpConfig {
    pub timeout_seconds: Option<i32>,
}

/// `status` of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ServiceStatus {
    pub load_balancer: Option<LoadBalancerStatus>,
}

/// `status.loadBalancer` of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LoadBalancerStatus {
    #[serde(deserialize_with = "tolerant::list")]
    pub ingress: Option<Vec<LoadBalancerIngress>>,
}

/// One of `status.loadBalancer.ingress` of a Service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LoadBalancerIngress {
    pub ip: Option<String>,
    pub ip_mode: Option<String>,
    /// `hostname`; only to find the Services that the load balancer of a cloud serves.
    #[serde(deserialize_with = "tolerant::lenient")]
    pub hostname: Option<String>,
}

/// The API object `discovery.k8s.io/v1 EndpointSlice`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndpointSlice {
    #[serde(deserialize_with = "tolerant::value")]
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "tolerant::value")]
    pub address_type: String,
    #[serde(deserialize_with = "tolerant::list")]
    pub ports: Option<Vec<EndpointPort>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub endpoints: Option<Vec<Endpoint>>,
}

/// One of `ports` of an EndpointSlice, or of `subsets[].ports` of Endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct EndpointPort {
    pub name: Option<String>,
    pub protocol: Option<String>,
    pub port: Option<i32>,
}

/// One of `endpoints` of an EndpointSlice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Endpoint {
    /// `addresses`; like kube-proxy, this project serves only the first one.
    #[serde(deserialize_with = "tolerant::texts")]
    pub addresses: Vec<String>,
    #[serde(deserialize_with = "tolerant::value")]
    pub conditions: EndpointConditions,
    /// `hostname`; only for DNS names.
    #[serde(deserialize_with = "tolerant::lenient")]
    pub hostname: Option<String>,
    pub node_name: Option<String>,
    pub zone: Option<String>,
    #[serde(deserialize_with = "tolerant::value")]
    pub target_ref: ObjectReference,
    #[serde(deserialize_with = "tolerant::value")]
    pub hints: EndpointHints,
}

/// `conditions` of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct EndpointConditions {
    pub ready: Option<bool>,
    pub serving: Option<bool>,
    pub terminating: Option<bool>,
}

/// The object behind an endpoint, such as a Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ObjectReference {
    pub kind: Option<String>,
    pub name: Option<String>,
}

/// `hints` of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndpointHints {
    #[serde(deserialize_with = "tolerant::list")]
    pub for_zones: Option<Vec<Named>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub for_nodes: Option<Vec<Named>>,
}

/// A zone or a node in the hints of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Named {
    #[serde(deserialize_with = "tolerant::value")]
    pub name: String,
}

/// `v1 Endpoints`; the agent reads them only from a folder of manifests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Endpoints {
    #[serde(deserialize_with = "tolerant::value")]
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "tolerant::list")]
    pub subsets: Option<Vec<EndpointSubset>>,
}

/// One of `subsets` of Endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndpointSubset {
    #[serde(deserialize_with = "tolerant::list")]
    pub addresses: Option<Vec<EndpointAddress>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub not_ready_addresses: Option<Vec<EndpointAddress>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub ports: Option<Vec<EndpointPort>>,
}

/// One of the addresses of a subset of Endpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct EndpointAddress {
    #[serde(deserialize_with = "tolerant::value")]
    pub ip: String,
    /// `hostname`; only for DNS names.
    #[serde(deserialize_with = "tolerant::lenient")]
    pub hostname: Option<String>,
    pub node_name: Option<String>,
    #[serde(deserialize_with = "tolerant::value")]
    pub target_ref: ObjectReference,
}

/// The API object `v1 Node`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Node {
    #[serde(deserialize_with = "tolerant::value")]
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "tolerant::value")]
    pub spec: NodeSpec,
    #[serde(deserialize_with = "tolerant::value")]
    pub status: NodeStatus,
}

/// `spec` of a Node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NodeSpec {
    #[serde(rename = "podCIDR")]
    pub pod_cidr: Option<String>,
    #[serde(rename = "podCIDRs", deserialize_with = "tolerant::list")]
    pub pod_cidrs: Option<Vec<String>>,
    #[serde(deserialize_with = "tolerant::list")]
    pub taints: Option<Vec<Taint>>,
}

/// One of `spec.taints` of a Node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Taint {
    #[serde(deserialize_with = "tolerant::value")]
    pub key: String,
}

/// `status` of a Node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    #[serde(deserialize_with = "tolerant::list")]
    pub addresses: Option<Vec<NodeAddress>>,
    #[serde(deserialize_with = "tolerant::lenient")]
    pub conditions: Option<Vec<NodeCondition>>,
}

/// One of `status.conditions` of a Node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct NodeCondition {
    #[serde(rename = "type", deserialize_with = "tolerant::value")]
    pub type_: String,
    #[serde(deserialize_with = "tolerant::value")]
    pub status: String,
}

/// One of `status.addresses` of a Node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct NodeAddress {
    #[serde(rename = "type", deserialize_with = "tolerant::value")]
    pub type_: String,
    #[serde(deserialize_with = "tolerant::value")]
    pub address: String,
}

/// The API object `networking.k8s.io/v1 ServiceCIDR`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ServiceCidr {
    #[serde(deserialize_with = "tolerant::value")]
    pub metadata: ObjectMeta,
    #[serde(deserialize_with = "tolerant::value")]
    pub spec: ServiceCidrSpec,
}

/// `spec` of a ServiceCIDR.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ServiceCidrSpec {
    #[serde(deserialize_with = "tolerant::list")]
    pub cidrs: Option<Vec<String>>,
}
