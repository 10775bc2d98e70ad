use std::{ops::RangeInclusive, path::PathBuf, sync::Arc};

use ipnet::IpNet;
use lb_dns::Names;

/// Settings of the source that reads manifests.
#[derive(Clone, Debug)]
pub struct ManifestsOptions {
    /// The folder.
    pub dir: PathBuf,
    /// The ranges of cluster IPs, at most one of each family. The family of the first one is the default of Services.
    pub cluster_ip_ranges: Vec<IpNet>,
    /// The networks of pods, as far as they are known. No pool of load balancers' addresses may overlap them.
    pub pod_networks: Vec<IpNet>,
    /// Networks of load balancers' addresses, in addition to the pools of the folder; empty for none.
    pub load_balancer_pool: Vec<IpNet>,
    /// The class of the load balancers that get addresses; `None` for those without a class.
    pub load_balancer_class: Option<String>,
    /// The index that gets the DNS names of Services; `None` without a DNS server.
    pub names: Option<Arc<Names>>,
    /// The range of node ports; [`lb_core::allocate::DEFAULT_NODE_PORTS`] by default.
    pub node_port_range: RangeInclusive<u16>,
}
