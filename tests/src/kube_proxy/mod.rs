//! The rules that kube-proxy would write on a node: for the benchmark that compares them with the agent, and for the
//! test in which the agent removes them.

pub mod iptables;
pub mod nftables;

use std::net::IpAddr;

/// A port of a Service.
#[derive(Clone, Copy, Debug)]
pub struct Port {
    /// `tcp` or `udp`; also the name of the port.
    pub protocol: &'static str,
    /// The port to which clients connect.
    pub port: u16,
    /// The port on which endpoints listen.
    pub target: u16,
    /// The node port, if the Service has node ports.
    pub node_port: u16,
}

/// A Service, as kube-proxy's rules need it.
#[derive(Clone, Debug)]
pub struct Service {
    /// `metadata.name`
    pub name: String,
    /// `spec.clusterIP`
    pub cluster_ip: IpAddr,
    /// The address of the Service's load balancer; a Service with one also has node ports.
    pub load_balancer: Option<IpAddr>,
    /// `spec.ports`
    pub ports: &'static [Port],
    /// Addresses of the Service's endpoints.
    pub endpoints: Vec<IpAddr>,
    /// Whether the endpoints are on this node.
    pub is_local: bool,
}

/// The state of a cluster for which kube-proxy writes rules, in one address family.
#[derive(Clone, Copy, Debug)]
pub struct Cluster<'a> {
    /// Whether the family is IPv6.
    pub is_ipv6: bool,
    /// All pods: `clusterCIDR` of kube-proxy's configuration.
    pub cluster_cidr: &'a str,
    /// All cluster IPs: the API server's ServiceCIDR.
    pub service_cidr: &'a str,
    /// Addresses at which the node accepts connections to node ports.
    pub node_addresses: &'a [IpAddr],
    /// The Services, in the order in which mode `iptables` tries their rules.
    pub services: &'a [Service],
}
