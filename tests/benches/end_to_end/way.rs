//! The paths of packets from client to server.

use std::fmt;

use serde::Serialize;

use crate::system::show_value;

/// A path of packets through the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Way {
    /// From a pod to a cluster IP; endpoints are pods of the same node
    Pod,
    /// From an external client to a load balancer address; endpoints are pods of another node, so the client is
    /// masqueraded
    Outside,
    /// From a process of the node to a cluster IP; endpoints are pods of the node
    Node,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_value(self, f)
    }
}

impl Way {
    /// All paths, in the order of reports.
    pub(crate) const ALL: [Self; 3] = [Self::Pod, Self::Outside, Self::Node];

    /// Name of the path's baseline, which has no load balancer.
    pub(crate) const fn baseline(self) -> &'static str {
        match self {
            Self::Pod | Self::Outside => "plain routing",
            Self::Node => "direct connection",
        }
    }

    /// Title of the path in reports.
    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::Pod => "pod to pod, through a cluster IP",
            Self::Outside => {
                "client outside to pod of another node, through a load balancer's address, masqueraded"
            }
            Self::Node => "process of the node to pod, through a cluster IP",
        }
    }
}
