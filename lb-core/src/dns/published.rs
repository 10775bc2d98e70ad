//! The DNS records of a Service, computed when a question first needs them after the Service has changed.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::{Arc, OnceLock},
};

use super::{Data, Kind, NamedPort, Target, index::Entry};

/// Records of a Service and of the names below it, each group computed when first needed.
#[derive(Debug, Default)]
pub(super) struct Published {
    addresses: OnceLock<Addresses>,
    hosts: OnceLock<Hosts>,
    ports: OnceLock<Ports>,
}

/// The address records (A and AAAA) of a name, sorted by address.
#[derive(Clone, Debug, Default)]
pub(super) struct Addresses {
    v4: Arc<[Data]>,
    v6: Arc<[Data]>,
}

/// The names of a Service's endpoints below the Service.
#[derive(Debug, Default)]
pub(super) struct Hosts {
    by_label: HashMap<Box<str>, Addresses>,
    labels: HashMap<IpAddr, BTreeSet<Box<str>>>,
}

/// SRV records of a Service's ports.
#[derive(Debug, Default)]
pub(super) struct Ports {
    /// The SRV records of all ports, at the Service's own name.
    pub(super) all: PortRecords,
    /// SRV records of named ports, by protocol in lower case, then by port name.
    named: HashMap<String, HashMap<Box<str>, PortRecords>>,
}

/// The SRV records of one name, and the address records of their targets.
#[derive(Clone, Debug, Default)]
pub(super) struct PortRecords {
    pub(super) records: Arc<[Data]>,
    pub(super) additional: Arc<[(String, IpAddr)]>,
}

impl Published {
    /// The address records at the Service's own name.
    pub(super) fn addresses(&self, entry: &Entry) -> &Addresses {
        self.addresses.get_or_init(|| match entry.target() {
            Some(Target::ClusterIps(ips)) => Addresses::new(ips.iter().copied()),
            Some(Target::Endpoints) => {
                Addresses::new(entry.endpoints().map(|(_, endpoint)| endpoint.address))
            }
            Some(Target::Name(_)) | None => Addresses::default(),
        })
    }

    pub(super) fn hosts(&self, entry: &Entry) -> &Hosts {
        self.hosts.get_or_init(|| Hosts::new(entry))
    }

    /// The SRV records of the Service's ports; `service` returns the full name of the Service.
    pub(super) fn ports(&self, entry: &Entry, service: impl FnOnce() -> String) -> &Ports {
        self.ports.get_or_init(|| Ports::new(entry, &service()))
    }
}

impl Addresses {
    /// Address records for these addresses, without duplicates.
    pub(super) fn new(addresses: impl Iterator<Item = IpAddr>) -> Self {
        let addresses: BTreeSet<IpAddr> = addresses.collect();
        let of =
            |kind| addresses.iter().filter(|ip| Kind::of(**ip) == kind).copied().map(Data::from).collect();
        Self { v4: of(Kind::A), v6: of(Kind::Aaaa) }
    }

    /// The address records of one type, `A` or `AAAA`.
    pub(super) fn of(&self, kind: Kind) -> Arc<[Data]> {
        Arc::clone(if kind == Kind::A { &self.v4 } else { &self.v6 })
    }
}

impl Hosts {
    fn new(entry: &Entry) -> Self {
        let mut by_label: HashMap<Box<str>, Vec<IpAddr>> = HashMap::new();
        let mut labels: HashMap<IpAddr, BTreeSet<Box<str>>> = HashMap::new();
        for (_, endpoint) in entry.endpoints() {
            let label: Box<str> = endpoint.host().into();
            labels.entry(endpoint.address).or_default().insert(label.clone());
            by_label.entry(label).or_default().push(endpoint.address);
        }
        let by_label =
            by_label.into_iter().map(|(label, ips)| (label, Addresses::new(ips.into_iter()))).collect();
        Self { by_label, labels }
    }

    /// The address records of the endpoints with this label.
    pub(super) fn get(&self, label: &str) -> Option<&Addresses> {
        self.by_label.get(label)
    }

    /// The labels of the endpoints that have this address.
    pub(super) fn labels(&self, address: IpAddr) -> impl Iterator<Item = &str> {
        self.labels.get(&address).into_iter().flatten().map(|label| &**label)
    }
}

impl Ports {
    fn new(entry: &Entry, service: &str) -> Self {
        let mut drafts = Drafts::default();
        match entry.target() {
            Some(Target::ClusterIps(ips)) => {
                for port in entry.service.iter().flat_map(|service| &service.ports) {
                    drafts.add(port, service, Hosted::ClusterIps(ips));
                }
            }
            Some(Target::Endpoints) => {
                for (slice, endpoint) in entry.endpoints() {
                    let host = format!("{}.{service}", endpoint.host());
                    for port in &slice.ports {
                        drafts.add(port, &host, Hosted::Endpoint(&endpoint.address));
                    }
                }
            }
            Some(Target::Name(_)) | None => {}
        }
        drafts.finish()
    }

    /// The SRV records of a named port. `protocol` and `name` must be in lower case.
    pub(super) fn get(&self, protocol: &str, name: &str) -> Option<&PortRecords> {
        self.named.get(protocol)?.get(name)
    }

    /// Whether a named port has this protocol, so that names below `_protocol` exist.
    pub(super) fn has(&self, protocol: &str) -> bool {
        self.named.contains_key(protocol)
    }
}

/// The addresses of the host that an SRV record names.
#[derive(Clone, Copy)]
enum Hosted<'a> {
    ClusterIps(&'a [IpAddr]),
    Endpoint(&'a IpAddr),
}

#[derive(Default)]
struct Drafts {
    all: Draft,
    named: HashMap<String, HashMap<Box<str>, Draft>>,
}

/// The SRV records of one name, while their weight is still unknown.
#[derive(Default)]
struct Draft {
    targets: BTreeSet<(u16, String)>,
    /// Number of pairs of port and address, among which the total weight of 100 is divided.
    pairs: usize,
    additional: BTreeSet<(String, IpAddr)>,
}

impl Drafts {
    fn add(&mut self, port: &NamedPort, host: &str, addresses: Hosted<'_>) {
        self.all.add(port.port, host, addresses);
        if !port.name.is_empty() {
            let protocol = self.named.entry(port.protocol.as_str().to_ascii_lowercase()).or_default();
            protocol.entry(port.name.clone()).or_default().add(port.port, host, addresses);
        }
    }

    fn finish(self) -> Ports {
        let finish = |(name, draft): (Box<str>, Draft)| (name, draft.finish());
        let named = self
            .named
            .into_iter()
            .map(|(protocol, names)| (protocol, names.into_iter().map(finish).collect()));
        Ports { all: self.all.finish(), named: named.collect() }
    }
}

impl Draft {
    /// Adds the records of a port. Counts pairs as CoreDNS does: with cluster IPs, ports with the same number count
    /// once per address; with endpoints, each port of each endpoint counts.
    fn add(&mut self, port: u16, host: &str, addresses: Hosted<'_>) {
        let is_new = self.targets.insert((port, host.to_owned()));
        let (addresses, counts) = match addresses {
            Hosted::ClusterIps(ips) => (ips, is_new),
            Hosted::Endpoint(address) => (std::slice::from_ref(address), true),
        };
        self.additional.extend(addresses.iter().map(|ip| (host.to_owned(), *ip)));
        self.pairs += if counts { addresses.len().max(1) } else { 0 };
    }

    fn finish(self) -> PortRecords {
        // Each record's share of 100, at least 1, as in CoreDNS.
        let weight = u16::try_from(100 / self.pairs.max(1)).unwrap_or(1).max(1);
        let records = self.targets.into_iter().map(|(port, target)| Data::Srv { weight, port, target });
        PortRecords { records: records.collect(), additional: self.additional.into_iter().collect() }
    }
}
