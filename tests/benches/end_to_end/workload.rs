//! The Services of a cluster: those that are measured, in the midst of those that are just there.

use std::net::{IpAddr, SocketAddr};

use lb_tests::manifests;
use serde::Serialize;

use crate::{
    family::{CLUSTER_IPS, ELSEWHERE, Family, LOAD_BALANCERS, PODS, REMOTE_PODS},
    load::{TCP_PORT, Targets, UDP_PORT},
    way::Way,
};

/// The port of every Service.
const PORT: u16 = 80;
/// The first address of a Service that is just there, in each range.
const FIRST: u32 = 256;
/// Endpoints begin here: below are the addresses that pods have of their own.
const FIRST_ENDPOINT: u32 = 16;

/// A port of a Service.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Port {
    /// `tcp` or `udp`, which is its name, too.
    pub(crate) protocol: &'static str,
    /// What clients speak to.
    pub(crate) port: u16,
    /// Where endpoints listen.
    pub(crate) target: u16,
    /// The port of the nodes, for a Service that has some.
    pub(crate) node_port: u16,
}

const TCP: Port = Port { protocol: "tcp", port: PORT, target: TCP_PORT, node_port: 30080 };
const UDP: Port = Port { protocol: "udp", port: PORT, target: UDP_PORT, node_port: 30053 };

/// A Service.
#[derive(Clone, Debug)]
pub(crate) struct Service {
    /// `metadata.name`
    pub(crate) name: String,
    /// `spec.clusterIP`
    pub(crate) cluster_ip: IpAddr,
    /// The address of its load balancer; a Service that has one has node ports, too.
    pub(crate) load_balancer: Option<IpAddr>,
    /// `spec.ports`
    pub(crate) ports: &'static [Port],
    /// Addresses of its endpoints.
    pub(crate) endpoints: Vec<IpAddr>,
    /// Whether the endpoints are on this node.
    pub(crate) is_local: bool,
}

/// How many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Size {
    /// Services, with the one that is measured; all others have one endpoint.
    pub(crate) services: u32,
    /// Endpoints of the Service that is measured.
    pub(crate) endpoints: u32,
}

/// All Services of a cluster.
pub(crate) struct Workload {
    /// IPv4 or IPv6.
    pub(crate) family: Family,
    /// In the order in which rules are tried where rules are tried one after the other.
    pub(crate) services: Vec<Service>,
}

impl Workload {
    /// Of this size.
    pub(crate) fn new(family: Family, size: Size) -> Self {
        let others = size.services.saturating_sub(1);
        let other = |n: u32| Service {
            name: format!("service-{n:05}"),
            cluster_ip: CLUSTER_IPS.at(family, FIRST + n),
            load_balancer: None,
            ports: &[TCP],
            endpoints: vec![ELSEWHERE.at(family, FIRST + n)],
            is_local: false,
        };
        // Of two measured Services each is used by ways of its own; they stand for one.
        let mut services: Vec<Service> = (0..others / 2).map(other).collect();
        services.extend([inside(family, size.endpoints), outside(family, size.endpoints)]);
        services.extend((others / 2..others).map(other));
        Self { family, services }
    }

    /// Where clients of this way connect to if there is a load balancer.
    pub(crate) fn targets(family: Family, way: Way) -> Targets {
        let address = match way {
            Way::Pod | Way::Node => CLUSTER_IPS.at(family, 10),
            Way::Outside => LOAD_BALANCERS.at(family, 10),
        };
        Targets { tcp: SocketAddr::new(address, PORT), udp: SocketAddr::new(address, PORT) }
    }

    /// Where they connect to if there is none.
    pub(crate) fn endpoint(family: Family, way: Way) -> Targets {
        let network = match way {
            Way::Pod | Way::Node => PODS,
            Way::Outside => REMOTE_PODS,
        };
        let address = network.at(family, FIRST_ENDPOINT);
        Targets { tcp: SocketAddr::new(address, TCP_PORT), udp: SocketAddr::new(address, UDP_PORT) }
    }

    /// As manifests for the agent.
    pub(crate) fn manifests(&self) -> String {
        let services: Vec<String> = self.services.iter().map(|service| service.manifest().yaml()).collect();
        services.join("---\n")
    }
}

/// What pods and processes of the node use: endpoints are pods of the node.
fn inside(family: Family, endpoints: u32) -> Service {
    Service {
        name: "inside".to_owned(),
        cluster_ip: CLUSTER_IPS.at(family, 10),
        load_balancer: None,
        ports: &[TCP, UDP],
        endpoints: (0..endpoints).map(|n| PODS.at(family, FIRST_ENDPOINT + n)).collect(),
        is_local: true,
    }
}

/// What clients outside use: endpoints are on another node, so they are masqueraded.
fn outside(family: Family, endpoints: u32) -> Service {
    Service {
        name: "outside".to_owned(),
        cluster_ip: CLUSTER_IPS.at(family, 11),
        load_balancer: Some(LOAD_BALANCERS.at(family, 10)),
        ports: &[TCP, UDP],
        endpoints: (0..endpoints).map(|n| REMOTE_PODS.at(family, FIRST_ENDPOINT + n)).collect(),
        is_local: false,
    }
}

impl Service {
    fn manifest(&self) -> manifests::Service {
        let node_port = |port: &Port| self.load_balancer.map(|_| port.node_port);
        let port = |port: &Port| manifests::Port {
            name: port.protocol,
            protocol: if port.protocol == "tcp" { "TCP" } else { "UDP" },
            port: port.port,
            target_port: port.target,
            node_port: node_port(port),
        };
        let endpoint = |(n, address): (usize, &IpAddr)| manifests::Endpoint {
            pod: format!("{}-{n:05}", self.name),
            node: if self.is_local { "node" } else { "other" }.to_owned(),
            addresses: vec![*address],
            ready: true,
            ..manifests::Endpoint::default()
        };
        let kind = match self.load_balancer {
            Some(_) => manifests::Type::LoadBalancer,
            None => manifests::Type::ClusterIP,
        };
        manifests::Service {
            annotations: Vec::new(),
            name: self.name.clone(),
            cluster_ips: vec![self.cluster_ip],
            ports: self.ports.iter().map(port).collect(),
            endpoints: self.endpoints.iter().enumerate().map(endpoint).collect(),
            exposure: manifests::Exposure {
                kind,
                load_balancer_ips: self.load_balancer.into_iter().collect(),
                ..manifests::Exposure::default()
            },
        }
    }
}
