use std::{ops::RangeInclusive, path::PathBuf, sync::Arc};

use ipnet::IpNet;
use lb_core::allocate::OutsideRanges;
use lb_dns::Names;

/// Settings of the source that reads a folder of manifests.
#[derive(Clone, Debug)]
pub struct ManifestsOptions {
    /// Path of the folder.
    pub dir: PathBuf,
    /// Ranges of cluster IPs, at most one per family. The family of the first range is the default of Services.
    pub cluster_ip_ranges: Vec<IpNet>,
    /// Whether a Service that requests a cluster IP outside `cluster_ip_ranges` gets it.
    pub other_cluster_ips: OutsideRanges,
    /// Networks of pods, as far as they are known; no address pool may overlap them.
    pub pod_networks: Vec<IpNet>,
    /// Networks from which Services of type LoadBalancer get addresses, in addition to the folder's pools; empty for
    /// none.
    pub load_balancer_pool: Vec<IpNet>,
    /// The `loadBalancerClass` of the Services that get addresses; `None` for Services without a class.
    pub load_balancer_class: Option<String>,
    /// Whether Services lose addresses that the pools do not give them any more.
    pub load_balancer_reassign: bool,
    /// Whether other nodes announce the addresses of the same Services.
    pub has_members: bool,
    /// The index to which the source adds the DNS names of Services; `None` without a DNS server.
    pub names: Option<Arc<Names>>,
    /// Range of node ports to allocate from. The agent always gives [`lb_core::allocate::DEFAULT_NODE_PORTS`].
    pub node_port_range: RangeInclusive<u16>,
}
