//! The kinds of objects that the load balancer controller watches.

use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1 as core;
use lb_core::{
    api,
    convert::{ConvertError, Converted},
    load_balancer::{Labels, Pool},
    model::ObjectName,
};
use serde::Deserialize;

use super::super::{
    kind::{Keyed, Kind},
    metallb::{MetalLb, ROUTES_AND_SESSIONS_STAY},
    node::{all_ips, pod_cidrs},
    watched::Read,
};

/// A Service of any type. The controller watches Services of all types, because a Service that is no longer of type
/// LoadBalancer may still have an address.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub(super) struct AnyService(pub(super) api::Service);

impl Read for AnyService {
    type Schema = core::Service;
}

impl Kind for AnyService {
    const NAME: &str = "Service";
    const NAMESPACED: bool = true;
    type Change = (ObjectName, Option<Box<api::Service>>);

    fn change(&self, name: &ObjectName) -> Result<Converted<Self::Change>, ConvertError> {
        Ok((name.clone(), Some(Box::new(self.0.clone()))).into())
    }

    fn gone(name: ObjectName) -> Self::Change {
        (name, None)
    }

    fn service(name: &ObjectName, _metadata: &api::ObjectMeta) -> Option<ObjectName> {
        Some(name.clone())
    }
}

/// A Namespace object, reduced to its labels.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Namespace {
    #[serde(default)]
    metadata: api::ObjectMeta,
}

impl Read for Namespace {
    type Schema = core::Namespace;
}

impl Keyed for Namespace {
    const NAME: &str = "Namespace";
    const NAMESPACED: bool = false;
    type Content = Labels;

    fn content(&self, _name: &ObjectName) -> Result<Converted<Self::Content>, ConvertError> {
        Ok(self.metadata.labels.clone().unwrap_or_default().into())
    }
}

/// A Node object, of which the controller needs only the addresses of the node and of its pods.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub(super) struct AnyNode(api::Node);

/// The addresses of a node and of its pods, which pools should not give to Services.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReservedByNode {
    /// Each `InternalIP` and `ExternalIP`: pools give such an address only to a Service that names the address.
    pub(super) own: Vec<IpAddr>,
    /// The networks of the node's pods, which no pool may overlap.
    pub(super) pods: Vec<IpNet>,
}

impl Read for AnyNode {
    type Schema = core::Node;
}

impl Keyed for AnyNode {
    const NAME: &str = "Node";
    const NAMESPACED: bool = false;
    type Content = ReservedByNode;

    fn content(&self, _name: &ObjectName) -> Result<Converted<Self::Content>, ConvertError> {
        Ok(ReservedByNode { own: all_ips(&self.0).collect(), pods: pod_cidrs(&self.0) }.into())
    }
}

impl MetalLb for api::IpAddressPool {
    const NAME: &str = "IPAddressPool";
    const PLURAL: &str = "ipaddresspools";
    const AFTER_RESTART: &str = ROUTES_AND_SESSIONS_STAY;
    /// The pool's `metadata.creationTimestamp` and content.
    type Content = (Option<String>, Pool);

    fn content(&self) -> Result<Converted<Self::Content>, ConvertError> {
        let created = self.metadata.creation_timestamp.clone();
        Ok((created, Pool::new(self)?).into())
    }
}
