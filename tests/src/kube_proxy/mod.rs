//! Generates the rules that kube-proxy would write on a node: for a benchmark that compares them with the agent, and
//! for a test in which the agent removes them.

pub mod iptables;
pub mod nftables;

use std::net::IpAddr;

/// A port of a Service, as rules need it.
#[derive(Clone, Copy, Debug)]
pub struct Port {
    /// The protocol, `tcp` or `udp`, which is also the port's name.
    pub protocol: &'static str,
    /// Port number that clients connect to.
    pub port: u16,
    /// Port number that endpoints listen on.
    pub target: u16,
    /// The node port; used only if the Service has a load balancer.
    pub node_port: u16,
}

/// A Service, as rules need it.
#[derive(Clone, Debug)]
pub struct Service {
    /// Name of the Service.
    pub name: String,
    /// The only cluster IP of the Service.
    pub cluster_ip: IpAddr,
    /// Address of the Service's load balancer; with it, the Service also has node ports.
    pub load_balancer: Option<IpAddr>,
    /// Ports of the Service.
    pub ports: &'static [Port],
    /// Addresses of the Service's endpoints.
    pub endpoints: Vec<IpAddr>,
    /// Whether all endpoints are on this node.
    pub is_local: bool,
}

/// The input of kube-proxy's rules, for one IP family.
#[derive(Clone, Copy, Debug)]
pub struct Cluster<'a> {
    /// Whether the family is IPv6 (else IPv4).
    pub is_ipv6: bool,
    /// Network of all pods: `clusterCIDR` in kube-proxy's configuration.
    pub cluster_cidr: &'a str,
    /// Range of all cluster IPs: the API server's ServiceCIDR.
    pub service_cidr: &'a str,
    /// Addresses of the node that serve node ports.
    pub node_addresses: &'a [IpAddr],
    /// The Services; mode `iptables` tries their rules in this order.
    pub services: &'a [Service],
}
