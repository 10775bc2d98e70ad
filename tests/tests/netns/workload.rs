//! What the generator of kube-proxy's rules, which the end-to-end benchmark has, wants to know of a cluster.

use std::net::IpAddr;

pub(crate) struct Family(pub(crate) &'static str);

impl Family {
    pub(crate) const fn cluster_cidr(&self) -> &'static str {
        self.0
    }
}

pub(crate) struct Port {
    pub(crate) protocol: &'static str,
    pub(crate) port: u16,
    pub(crate) target: u16,
    pub(crate) node_port: u16,
}

pub(crate) struct Service {
    pub(crate) name: String,
    pub(crate) cluster_ip: IpAddr,
    pub(crate) load_balancer: Option<IpAddr>,
    pub(crate) ports: &'static [Port],
    pub(crate) endpoints: Vec<IpAddr>,
}

pub(crate) struct Workload {
    pub(crate) family: Family,
    pub(crate) services: Vec<Service>,
}
