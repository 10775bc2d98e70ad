//! The names of one Service, and of its ports and endpoints below it.

use std::{collections::BTreeSet, net::IpAddr};

use super::{
    Data, Found, NamedPort, NamedService, Target, Zone,
    endpoint::undashed,
    index::{Entry, Node},
};

/// A Service that exists.
#[derive(Clone, Copy)]
pub(super) struct Owner<'a> {
    pub(super) zone: &'a Zone,
    pub(super) namespace: &'a str,
    pub(super) name: &'a str,
    pub(super) service: &'a NamedService,
    pub(super) entry: &'a Entry,
}

/// The name and protocol in `_NAME._protocol`.
type PortName<'a> = (&'a str, &'a str);

impl<'a> Owner<'a> {
    /// What exists at the name with these labels before the Service's own name.
    pub(super) fn node(self, labels: &[&str]) -> Option<Node<'a>> {
        match (&self.service.target, labels) {
            (Target::Name(target), []) => Some(Node::Alias(target)),
            (Target::Name(_), _) => None,
            (Target::ClusterIps(_), []) => Some(Node::Service(self)),
            (Target::Endpoints, []) => self.entry.endpoints().next().map(|_| Node::Service(self)),
            (_, [label]) => match label.strip_prefix('_') {
                Some(protocol) => self.has_port(protocol).then_some(Node::Empty),
                None => self.host(label),
            },
            (_, [port, protocol]) => {
                let name = port.strip_prefix('_').filter(|name| !name.is_empty())?;
                let found = self.ports(Some((name, protocol.strip_prefix('_')?)));
                (!found.records.is_empty()).then_some(Node::Ports(found))
            }
            _ => None,
        }
    }

    /// The name, without a dot at its end.
    pub(super) fn full_name(&self) -> String {
        format!("{}.{}.svc.{}", self.name, self.namespace, self.zone.name())
    }

    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        match &self.service.target {
            Target::ClusterIps(ips) => ips.clone(),
            Target::Endpoints => unique(self.entry.endpoints().map(|(_, endpoint)| endpoint.address)),
            Target::Name(_) => Vec::new(),
        }
    }

    pub(super) fn has_cluster_ip(&self, address: IpAddr) -> bool {
        matches!(&self.service.target, Target::ClusterIps(ips) if ips.contains(&address))
    }

    /// The names of the endpoints with this address.
    pub(super) fn hosts_of(&self, address: IpAddr) -> impl Iterator<Item = String> {
        let endpoints = self.entry.endpoints().filter(move |(_, endpoint)| endpoint.address == address);
        endpoints.map(|(_, endpoint)| format!("{}.{}", endpoint.host(), self.full_name()))
    }

    fn host(&self, label: &str) -> Option<Node<'a>> {
        let address = undashed(label);
        let endpoints = self.entry.endpoints().filter(|(_, endpoint)| endpoint.is_host(label, address));
        let addresses = unique(endpoints.map(|(_, endpoint)| endpoint.address));
        (!addresses.is_empty()).then_some(Node::Host(addresses))
    }

    /// Whether a named port has this protocol, so that there is a name below `_protocol`.
    fn has_port(&self, protocol: &str) -> bool {
        let matches = |port: &NamedPort| !port.name.is_empty() && is_protocol(port, protocol);
        match &self.service.target {
            Target::ClusterIps(_) => self.service.ports.iter().any(matches),
            Target::Endpoints => self.entry.endpoints().any(|(slice, _)| slice.ports.iter().any(matches)),
            Target::Name(_) => false,
        }
    }

    /// The SRV records of one port, or of all. A cluster IP has the ports of the Service, an endpoint its own.
    pub(super) fn ports(&self, wanted: Option<PortName<'_>>) -> Found {
        let matches = |port: &&NamedPort| {
            wanted.is_none_or(|(name, protocol)| *port.name == *name && is_protocol(port, protocol))
        };
        let service = self.full_name();
        let mut count = 0;
        let mut targets: BTreeSet<(u16, String)> = BTreeSet::new();
        let mut additional: BTreeSet<(String, IpAddr)> = BTreeSet::new();
        match &self.service.target {
            Target::ClusterIps(ips) => {
                targets.extend(
                    self.service.ports.iter().filter(matches).map(|port| (port.port, service.clone())),
                );
                // CoreDNS counts each port once per address.
                count = targets.len() * ips.len().max(1);
                additional.extend(ips.iter().map(|ip| (service.clone(), *ip)));
            }
            Target::Endpoints => {
                for (slice, endpoint) in self.entry.endpoints() {
                    for port in slice.ports.iter().filter(matches) {
                        let host = format!("{}.{service}", endpoint.host());
                        count += 1;
                        additional.insert((host.clone(), endpoint.address));
                        targets.insert((port.port, host));
                    }
                }
            }
            Target::Name(_) => {}
        }
        let weight = weight(count);
        let records = targets.into_iter().map(|(port, target)| Data::Srv { weight, port, target }).collect();
        Found { ttl: self.zone.ttl(), records, additional: additional.into_iter().collect() }
    }
}

fn is_protocol(port: &NamedPort, protocol: &str) -> bool {
    port.protocol.as_str().eq_ignore_ascii_case(protocol)
}

/// The weight of each of `count` records, as in CoreDNS: their share of 100, at least 1.
fn weight(count: usize) -> u16 {
    u16::try_from(100 / count.max(1)).unwrap_or(1).max(1)
}

/// The addresses without duplicates.
fn unique(addresses: impl Iterator<Item = IpAddr>) -> Vec<IpAddr> {
    addresses.collect::<BTreeSet<_>>().into_iter().collect()
}
