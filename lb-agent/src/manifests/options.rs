use std::{ops::RangeInclusive, path::PathBuf};

use ipnet::IpNet;

/// What the source needs to know.
#[derive(Clone, Debug)]
pub struct ManifestsOptions {
    /// The folder.
    pub dir: PathBuf,
    /// Where cluster IPs are taken from; one range of each family at most. The family of the first is the one of
    /// Services that ask for none.
    pub cluster_ip_ranges: Vec<IpNet>,
    /// Where node ports are taken from; [`lb_core::allocate::DEFAULT_NODE_PORTS`] where nothing else is said.
    pub node_port_range: RangeInclusive<u16>,
}
