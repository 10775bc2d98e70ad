//! Reads Node objects: the one of this node, and the addresses of the others.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use lb_core::api::{Node, NodeStatus};
use serde::Deserialize;

/// Label of a Node that names its zone.
const ZONE: &str = "topology.kubernetes.io/zone";
/// Taint of a Node that the cluster autoscaler is about to remove.
const ABOUT_TO_GO: &str = "ToBeDeletedByClusterAutoscaler";

/// The Node object of this node, reduced to the fields that the agent uses.
///
/// The default applies until the API server has returned the Node, and without an API server: all fields are unknown,
/// and the node is eligible. When the Node is deleted, the node becomes ineligible but keeps its zone and addresses: it
/// is still running.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// Whether load balancers may send traffic to this node, by kube-proxy's rules: its Node has not been deleted, is
    /// not being deleted, and is not about to be removed by the cluster autoscaler. True until the API server has
    /// returned the Node.
    pub eligible: bool,
    /// The node's zone, from the label `topology.kubernetes.io/zone`.
    pub zone: Option<Arc<str>>,
    /// Pod networks from `spec.podCIDRs`, or `spec.podCIDR` without such a list; invalid ones are left out. `None`
    /// until the API server has returned the Node.
    pub pod_cidrs: Option<Vec<IpNet>>,
    /// The node's address of each family, the primary family first: the first `InternalIP` of `status.addresses`, else
    /// the first `ExternalIP`.
    pub internal_ips: Vec<IpAddr>,
}

impl Default for NodeInfo {
    fn default() -> Self {
        Self { eligible: true, zone: None, pod_cidrs: None, internal_ips: Vec::new() }
    }
}

impl NodeInfo {
    /// Takes what the agent needs from a Node object.
    pub(super) fn new(node: &Node) -> Self {
        let zone = node.metadata.label(ZONE);
        Self {
            eligible: is_eligible(node),
            zone: zone.filter(|zone| !zone.is_empty()).map(Arc::from),
            pod_cidrs: Some(pod_cidrs(node)),
            internal_ips: node_ips(&node.status),
        }
    }
}

/// Any Node, for the addresses from which that node may send tunnelled packets.
#[derive(Clone, Debug, Deserialize)]
#[serde(transparent)]
pub(super) struct PeerNode(Node);

impl PeerNode {
    /// All `InternalIP`s; for a family without an `InternalIP`, the first `ExternalIP`.
    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        let status = &self.0.status;
        let addresses: BTreeSet<IpAddr> = of_type(status, "InternalIP").chain(node_ips(status)).collect();
        addresses.into_iter().collect()
    }
}

fn is_eligible(node: &Node) -> bool {
    let mut taints = node.spec.taints.iter().flatten();
    !node.metadata.is_being_deleted && !taints.any(|taint| taint.key == ABOUT_TO_GO)
}

/// The networks of the node's pods: `spec.podCIDRs`, or `spec.podCIDR` without such a list; invalid ones are left out.
pub(super) fn pod_cidrs(node: &Node) -> Vec<IpNet> {
    let spec = &node.spec;
    let list = spec.pod_cidrs.iter().flatten();
    let single = spec.pod_cidr.iter().filter(|_| spec.pod_cidrs.as_ref().is_none_or(Vec::is_empty));
    list.chain(single).filter_map(|text| text.parse().ok()).map(|cidr: IpNet| cidr.trunc()).collect()
}

/// The first `InternalIP` of each family, else the first `ExternalIP`, the primary family first.
pub(super) fn node_ips(status: &NodeStatus) -> Vec<IpAddr> {
    let mut ips: Vec<IpAddr> = Vec::new();
    for ip in of_type(status, "InternalIP").chain(of_type(status, "ExternalIP")) {
        if ips.iter().all(|other| other.is_ipv4() != ip.is_ipv4()) {
            ips.push(ip);
        }
    }
    ips
}

/// All addresses of the Node: each `InternalIP` and `ExternalIP`.
pub(super) fn all_ips(node: &Node) -> impl Iterator<Item = IpAddr> {
    ["InternalIP", "ExternalIP"].into_iter().flat_map(move |type_| of_type(&node.status, type_))
}

/// The addresses of this type in the Node's status; invalid ones are left out.
fn of_type(status: &NodeStatus, type_: &'static str) -> impl Iterator<Item = IpAddr> {
    let addresses = status.addresses.iter().flatten().filter(move |address| address.type_ == type_);
    addresses.filter_map(|address| address.address.parse().ok())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn info(node: Value) -> NodeInfo {
        NodeInfo::new(&serde_json::from_value(node).unwrap())
    }

    #[test]
    fn all_used_fields_are_read() {
        let info = info(json!({
            "metadata": {"name": "a", "labels": {"topology.kubernetes.io/zone": "z1", "other": "x"}},
            "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"]},
            "status": {"addresses": [
                {"type": "Hostname", "address": "a"},
                {"type": "ExternalIP", "address": "203.0.113.1"},
                {"type": "InternalIP", "address": "fd00::1"},
                {"type": "InternalIP", "address": "192.0.2.1"},
                {"type": "InternalIP", "address": "192.0.2.2"},
            ]},
        }));
        assert!(info.eligible);
        assert_eq!(info.zone.as_deref(), Some("z1"));
        let cidrs = ["10.244.1.0/24", "fd00:10:244:1::/64"].map(|text| text.parse().unwrap());
        assert_eq!(info.pod_cidrs.unwrap(), cidrs);
        let ips: [IpAddr; 2] = ["fd00::1".parse().unwrap(), "192.0.2.1".parse().unwrap()];
        assert_eq!(info.internal_ips, ips, "one of each family, the first family first");
    }

    #[test]
    fn node_without_any_field_is_eligible() {
        let shown = NodeInfo { pod_cidrs: Some(Vec::new()), ..NodeInfo::default() };
        assert_eq!(info(json!({"metadata": {"name": "a"}})), shown);
    }

    #[test]
    fn external_address_stands_in_for_a_missing_internal_one() {
        let addresses = json!([{"type": "ExternalIP", "address": "203.0.113.1"}]);
        let info = info(json!({"metadata": {"name": "a"}, "status": {"addresses": addresses}}));
        assert_eq!(info.internal_ips, ["203.0.113.1".parse::<IpAddr>().unwrap()]);
    }

    #[test]
    fn peer_may_send_with_all_its_internal_addresses() {
        let peer = |addresses: Value| -> Vec<String> {
            let node = json!({"metadata": {"name": "a"}, "status": {"addresses": addresses}});
            let node: PeerNode = serde_json::from_value(node).unwrap();
            node.addresses().iter().map(ToString::to_string).collect()
        };
        let (internal, external) = ("InternalIP", "ExternalIP");
        let both = json!([
            {"type": internal, "address": "192.0.2.1"},
            {"type": internal, "address": "192.0.2.2"},
            {"type": external, "address": "203.0.113.1"},
            {"type": external, "address": "2001:db8::1"},
            {"type": "Hostname", "address": "a"},
            {"type": internal, "address": "no address"},
        ]);
        assert_eq!(peer(both), ["192.0.2.1", "192.0.2.2", "2001:db8::1"]);
        assert_eq!(peer(Value::Null), [""; 0]);
    }

    #[test]
    fn invalid_pod_cidr_is_left_out() {
        let info = info(json!({"metadata": {"name": "a"}, "spec": {"podCIDRs": ["ten", "10.244.1.9/24"]}}));
        assert_eq!(info.pod_cidrs.unwrap(), ["10.244.1.0/24".parse().unwrap()]);
        let info = self::info(json!({"metadata": {"name": "a"}, "spec": {"podCIDR": "10.1.0.0/24"}}));
        assert_eq!(info.pod_cidrs.unwrap(), ["10.1.0.0/24".parse().unwrap()]);
    }

    #[test]
    fn node_about_to_be_removed_is_not_eligible() {
        let deleted = json!({"metadata": {"name": "a", "deletionTimestamp": "2026-01-01T00:00:00Z"}});
        assert!(!info(deleted).eligible);
        let tainted = |key: &str| json!({"metadata": {"name": "a"}, "spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}});
        assert!(!info(tainted("ToBeDeletedByClusterAutoscaler")).eligible);
        assert!(info(tainted("node.kubernetes.io/unschedulable")).eligible);
    }
}
