//! The nodes of a cluster, as members that share announced addresses.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use super::{advertisement::labels_of, voters::Voters};
use crate::{api, load_balancer::Labels};

/// Label of a Node that must not announce addresses, whatever the label's value.
const EXCLUDED: &str = "node.kubernetes.io/exclude-from-external-load-balancers";
/// Type of the condition of a Node whose network is not set up.
const NO_NETWORK: &str = "NetworkUnavailable";

/// The nodes of a cluster, and the voters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    /// All nodes, by name.
    pub nodes: BTreeMap<Arc<str>, Member>,
    /// The nodes that vote on announcements; `None` while they are unknown.
    pub voters: Option<Voters>,
}

/// A node of a cluster, as a member that may announce addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Member {
    /// The labels of the Node object.
    pub labels: Labels,
    /// The addresses at which the node receives the other members' messages: at most one of each family, none if the
    /// Node has none.
    pub addresses: Vec<IpAddr>,
    /// Whether the node may announce addresses. A node that has the label `exclude-from-external-load-balancers`, is
    /// being deleted, or has no network may not announce, but still votes. A cordoned or tainted node may announce, as
    /// in MetalLB.
    pub may_announce: bool,
}

impl Member {
    /// A node without a Node object; it may announce.
    pub fn alone(name: &Arc<str>) -> Self {
        Self { labels: labels_of(name), addresses: Vec::new(), may_announce: true }
    }

    /// Creates the member for a Node that has these addresses.
    pub fn new(node: &api::Node, addresses: Vec<IpAddr>) -> Self {
        let mut conditions = node.status.conditions.iter().flatten();
        let has_network =
            !conditions.any(|condition| condition.type_ == NO_NETWORK && condition.status == "True");
        let is_excluded = node.metadata.label(EXCLUDED).is_some();
        Self {
            labels: node.metadata.labels.clone().unwrap_or_default(),
            addresses,
            may_announce: has_network && !is_excluded && !node.metadata.is_being_deleted,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn excluded_deleted_and_unreachable_nodes_do_not_announce() {
        let may = |node: Value| Member::new(&serde_json::from_value(node).unwrap(), Vec::new()).may_announce;
        let network =
            |status| json!({"status": {"conditions": [{"type": "NetworkUnavailable", "status": status}]}});
        for (node, expected) in [
            (json!({}), true),
            (json!({"metadata": {"labels": {EXCLUDED: ""}}}), false),
            (json!({"metadata": {"labels": {EXCLUDED: "false"}}}), false),
            (json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), false),
            (network("True"), false),
            (network("False"), true),
            (json!({"spec": {"unschedulable": true}}), true),
            (json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}), true),
        ] {
            assert_eq!(may(node.clone()), expected, "{node}");
        }
    }
}
