//! The DNS server of the cluster: the Service whose clients node-local DNS serves.

use std::net::{IpAddr, SocketAddr};

use lb_common::dns::PORT;

use super::{Index, NamedPort, NamedService, Target};
use crate::{model::ObjectName, protocol::Protocol};

/// The DNS Service of the cluster, as node-local DNS needs it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterDns {
    /// The cluster IPs of the Service if it has a UDP port 53, else none.
    pub cluster_ips: Vec<IpAddr>,
    /// The endpoints of the UDP port 53 that have DNS names: the ready ones, or all under `publishNotReadyAddresses`.
    pub endpoints: Vec<SocketAddr>,
}

impl Index {
    /// The Service of this name, as a DNS server. Both lists are empty unless the Service exists, is neither headless
    /// nor `ExternalName`, and has a UDP port 53.
    pub fn cluster_dns(&self, name: &ObjectName) -> ClusterDns {
        let Some(entry) = self.entry(name) else { return ClusterDns::default() };
        let Some((cluster_ips, port)) = entry.service.as_ref().and_then(server) else {
            return ClusterDns::default();
        };
        let mut endpoints: Vec<SocketAddr> = entry
            .endpoints()
            .filter_map(|(slice, endpoint)| {
                let target = slice.ports.iter().find(|target| is_target(target, port))?;
                Some(SocketAddr::new(endpoint.address, target.port))
            })
            .collect();
        endpoints.sort_unstable();
        endpoints.dedup();
        ClusterDns { cluster_ips: cluster_ips.to_vec(), endpoints }
    }
}

/// The cluster IPs and the UDP port 53 of a Service that has both.
fn server(service: &NamedService) -> Option<(&[IpAddr], &NamedPort)> {
    let Target::ClusterIps(cluster_ips) = &service.target else { return None };
    let port = service.ports.iter().find(|port| port.port == PORT && port.protocol == Protocol::Udp)?;
    Some((cluster_ips, port))
}

/// Whether a port of a slice is the target of a port of the Service.
fn is_target(target: &NamedPort, port: &NamedPort) -> bool {
    target.name == port.name && target.protocol == port.protocol
}
