//! The DNS names of one Service, and the names of its ports and endpoints below it.

use std::net::IpAddr;

use super::{
    NamedService, Target, Zone,
    index::{Entry, Node},
    published::{Addresses, Ports},
};

/// A Service that exists, with its name and records.
#[derive(Clone, Copy)]
pub(super) struct Owner<'a> {
    pub(super) zone: &'a Zone,
    pub(super) namespace: &'a str,
    pub(super) name: &'a str,
    pub(super) service: &'a NamedService,
    pub(super) entry: &'a Entry,
}

impl<'a> Owner<'a> {
    /// What exists at the name that consists of `labels` and the Service's name. Empty `labels` mean the Service's name
    /// itself.
    pub(super) fn node(self, labels: &[&str]) -> Option<Node<'a>> {
        match (&self.service.target, labels) {
            (Target::Name(target), []) => Some(Node::Alias(target)),
            (Target::Name(_), _) => None,
            (Target::ClusterIps(_), []) => Some(Node::Service(self)),
            (Target::Endpoints, []) => self.entry.endpoints().next().map(|_| Node::Service(self)),
            (_, [label]) => match label.strip_prefix('_') {
                Some(protocol) => self.ports().has(protocol).then_some(Node::Empty),
                None => self.entry.published.hosts(self.entry).get(label).cloned().map(Node::Host),
            },
            (_, [port, protocol]) => {
                let name = port.strip_prefix('_').filter(|name| !name.is_empty())?;
                self.ports().get(protocol.strip_prefix('_')?, name).map(Node::Ports)
            }
            _ => None,
        }
    }

    /// The full name of the Service, without a dot at its end.
    pub(super) fn full_name(&self) -> String {
        format!("{}.{}.svc.{}", self.name, self.namespace, self.zone.name())
    }

    pub(super) fn addresses(self) -> &'a Addresses {
        self.entry.published.addresses(self.entry)
    }

    pub(super) fn ports(self) -> &'a Ports {
        self.entry.published.ports(self.entry, || self.full_name())
    }

    pub(super) fn has_cluster_ip(&self, address: IpAddr) -> bool {
        matches!(&self.service.target, Target::ClusterIps(ips) if ips.contains(&address))
    }

    /// The full names of the endpoints that have this address.
    pub(super) fn hosts_of(&self, address: IpAddr) -> impl Iterator<Item = String> {
        let labels = self.entry.published.hosts(self.entry).labels(address);
        labels.map(|label| format!("{label}.{}", self.full_name()))
    }
}
