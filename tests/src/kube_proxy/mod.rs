//! The rules that kube-proxy would have written into a node: for the benchmark, which measures them beside us, and for the test that
//! has an agent remove them.

pub mod iptables;
pub mod nftables;

use std::net::IpAddr;

/// A port of a Service.
#[derive(Clone, Copy, Debug)]
pub struct Port {
    /// `tcp` or `udp`, which is its name, too.
    pub protocol: &'static str,
    /// What clients speak to.
    pub port: u16,
    /// Where endpoints listen.
    pub target: u16,
    /// The port of the nodes, for a Service that has some.
    pub node_port: u16,
}

/// A Service.
#[derive(Clone, Debug)]
pub struct Service {
    /// `metadata.name`
    pub name: String,
    /// `spec.clusterIP`
    pub cluster_ip: IpAddr,
    /// The address of its load balancer; a Service that has one has node ports, too.
    pub load_balancer: Option<IpAddr>,
    /// `spec.ports`
    pub ports: &'static [Port],
    /// Addresses of its endpoints.
    pub endpoints: Vec<IpAddr>,
    /// Whether the endpoints are on this node.
    pub is_local: bool,
}

/// What kube-proxy knows of a cluster, in one family.
#[derive(Clone, Copy, Debug)]
pub struct Cluster<'a> {
    /// Whether the family is IPv6.
    pub is_ipv6: bool,
    /// All pods: `clusterCIDR` of its configuration.
    pub cluster_cidr: &'a str,
    /// All cluster IPs, as the API server's ServiceCIDR says.
    pub service_cidr: &'a str,
    /// Where the node accepts connections to node ports.
    pub node_addresses: &'a [IpAddr],
    /// In the order in which rules are tried where rules are tried one after the other.
    pub services: &'a [Service],
}
