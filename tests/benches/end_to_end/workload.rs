//! The Services of a cluster: the measured ones among others that no client uses.

use std::net::{IpAddr, SocketAddr};

use lb_tests::{
    kube_proxy::{Cluster, Port, Service},
    manifests,
};
use serde::Serialize;

use crate::{
    family::{CLUSTER_IPS, ELSEWHERE, Family, LOAD_BALANCERS, PODS, REMOTE_PODS},
    load::{TCP_PORT, Targets, UDP_PORT},
    node,
    way::Way,
};

/// The port number of every Service.
const PORT: u16 = 80;
/// Index, in each range of addresses, of the first Service that no client uses.
const FIRST: u32 = 256;
/// Index of the first endpoint's address in its network.
const FIRST_ENDPOINT: u32 = 16;

const TCP: Port = Port { protocol: "tcp", port: PORT, target: TCP_PORT, node_port: 30080 };
const UDP: Port = Port { protocol: "udp", port: PORT, target: UDP_PORT, node_port: 30053 };

/// Size of a cluster: number of Services, and number of endpoints of each measured Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Size {
    /// Number of Services. The two measured Services count as one.
    pub(crate) services: u32,
    /// Number of endpoints of each measured Service; all other Services have one endpoint.
    pub(crate) endpoints: u32,
}

/// All Services of a cluster.
pub(crate) struct Workload {
    /// The IP family of all addresses.
    pub(crate) family: Family,
    /// The Services, in the order in which the rules of iptables try them.
    services: Vec<Service>,
    node_addresses: [IpAddr; 2],
}

impl Workload {
    /// Creates the Services of a cluster of this size.
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
        // The two measured Services, one for each kind of client, count as one.
        let mut services: Vec<Service> = (0..others / 2).map(other).collect();
        services.extend([inside(family, size.endpoints), outside(family, size.endpoints)]);
        services.extend((others / 2..others).map(other));
        Self { family, services, node_addresses: node::addresses(family) }
    }

    /// The virtual address that clients on this path use.
    pub(crate) fn targets(family: Family, way: Way) -> Targets {
        let address = match way {
            Way::Pod | Way::Node => CLUSTER_IPS.at(family, 10),
            Way::Outside => LOAD_BALANCERS.at(family, 10),
        };
        Targets { tcp: SocketAddr::new(address, PORT), udp: SocketAddr::new(address, PORT) }
    }

    /// The endpoint that clients on this path use without a load balancer.
    pub(crate) fn endpoint(family: Family, way: Way) -> Targets {
        let network = match way {
            Way::Pod | Way::Node => PODS,
            Way::Outside => REMOTE_PODS,
        };
        let address = network.at(family, FIRST_ENDPOINT);
        Targets { tcp: SocketAddr::new(address, TCP_PORT), udp: SocketAddr::new(address, UDP_PORT) }
    }

    /// The Services, as input for the generator of kube-proxy's rules.
    pub(crate) fn cluster(&self) -> Cluster<'_> {
        Cluster {
            is_ipv6: self.family.pick(false, true),
            cluster_cidr: self.family.cluster_cidr(),
            service_cidr: self.family.service_cidr(),
            node_addresses: &self.node_addresses,
            services: &self.services,
        }
    }

    /// The Services as manifests for the agent.
    pub(crate) fn manifests(&self) -> String {
        let services: Vec<String> = self.services.iter().map(|service| manifest(service).yaml()).collect();
        services.join("---\n")
    }
}

/// The Service that internal clients use; its endpoints are pods of the node.
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

/// The Service that external clients use; its endpoints are on another node, so clients are masqueraded.
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

fn manifest(service: &Service) -> manifests::Service {
    let node_port = |port: &Port| service.load_balancer.map(|_| port.node_port);
    let port = |port: &Port| manifests::Port {
        name: port.protocol,
        protocol: if port.protocol == "tcp" { "TCP" } else { "UDP" },
        port: port.port,
        target_port: port.target,
        node_port: node_port(port),
    };
    let endpoint = |(n, address): (usize, &IpAddr)| manifests::Endpoint {
        pod: format!("{}-{n:05}", service.name),
        node: if service.is_local { "node" } else { "other" }.to_owned(),
        addresses: vec![*address],
        ready: true,
        ..manifests::Endpoint::default()
    };
    let kind = match service.load_balancer {
        Some(_) => manifests::Type::LoadBalancer,
        None => manifests::Type::ClusterIP,
    };
    manifests::Service {
        annotations: Vec::new(),
        name: service.name.clone(),
        cluster_ips: vec![service.cluster_ip],
        ports: service.ports.iter().map(port).collect(),
        endpoints: service.endpoints.iter().enumerate().map(endpoint).collect(),
        exposure: manifests::Exposure {
            kind,
            load_balancer_ips: service.load_balancer.into_iter().collect(),
            ..manifests::Exposure::default()
        },
    }
}
