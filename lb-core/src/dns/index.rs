//! The index of all DNS names of Services, updated object by object.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    sync::Arc,
};

use super::{
    Answer, Data, Found, Kind, NameChange, NamedService, NamedSlice, Target, Unread, Zone,
    endpoint::{NamedEndpoint, undashed},
    published::{Addresses, PortRecords, Published},
    reverse::{self, Reverse},
    service::Owner,
    zone::{VERSION, VERSION_TTL},
};
use crate::model::ObjectName;

/// The namespace that exists even if the index knows no object in it.
pub(super) const DEFAULT_NAMESPACE: &str = "default";

/// All names of Services and their endpoints, with what they resolve to.
#[derive(Debug)]
pub struct Index {
    zone: Zone,
    namespaces: HashMap<Arc<str>, Namespace>,
    /// The Service that each slice belongs to.
    services: HashMap<ObjectName, ObjectName>,
    /// Each address with the Services that have it as a cluster IP, or that publish an endpoint with it. One set of
    /// pairs takes a fifth of the memory of a set for each address, as most addresses have one Service.
    reverse: BTreeSet<(IpAddr, ObjectName)>,
    unread: Unread,
}

#[derive(Debug, Default)]
struct Namespace {
    /// Whether a Namespace object exists.
    declared: bool,
    entries: HashMap<Arc<str>, Entry>,
}

/// A Service and its slices; the index may receive the slices before the Service.
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) service: Option<NamedService>,
    /// The slices, sorted by name. A map would take more memory: a Service has few slices, and one node of a `BTreeMap`
    /// has room for eleven.
    slices: Vec<(Arc<str>, NamedSlice)>,
    pub(super) published: Published,
}

impl Entry {
    fn is_empty(&self) -> bool {
        self.service.is_none() && self.slices.is_empty()
    }

    pub(super) fn target(&self) -> Option<&Target> {
        self.service.as_ref().map(|service| &service.target)
    }

    /// The endpoints that have names, each with the slice that contains it.
    pub(super) fn endpoints(&self) -> impl Iterator<Item = (&NamedSlice, &NamedEndpoint)> {
        let all = self.service.as_ref().is_some_and(|service| service.publishes_not_ready);
        let slices = self.slices.iter().map(|(_, slice)| slice);
        let pairs = slices.flat_map(|slice| slice.endpoints.iter().map(move |endpoint| (slice, endpoint)));
        pairs.filter(move |(_, endpoint)| endpoint.ready || all)
    }

    /// Adds, replaces or removes the slice with this name.
    fn set_slice(&mut self, name: Arc<str>, slice: Option<NamedSlice>) {
        match (self.slices.binary_search_by(|(other, _)| other.cmp(&name)), slice) {
            (Ok(index), Some(slice)) => self.slices[index].1 = slice,
            (Ok(index), None) => _ = self.slices.remove(index),
            (Err(index), Some(slice)) => {
                self.slices.reserve_exact(1);
                self.slices.insert(index, (name, slice));
            }
            (Err(_), None) => {}
        }
    }

    /// The addresses whose reverse names resolve to this Service or its endpoints.
    fn addresses(&self) -> BTreeSet<IpAddr> {
        let endpoints = || self.endpoints().map(|(_, endpoint)| endpoint.address);
        match self.target() {
            Some(Target::ClusterIps(ips)) => ips.iter().copied().chain(endpoints()).collect(),
            Some(Target::Endpoints) => endpoints().collect(),
            Some(Target::Name(_)) | None => BTreeSet::new(),
        }
    }
}

/// The records at a name, of all types. Whether a name exists does not depend on the type in the question: the type
/// only selects among these records.
pub(super) enum Node<'a> {
    /// There are names below this name, but no records.
    Empty,
    Apex,
    Version,
    /// The addresses of a host: an endpoint, a pod, or the name server `ns.dns`.
    Host(Addresses),
    /// A Service that resolves to addresses.
    Service(Owner<'a>),
    /// The name is an alias of this name, the target of an `ExternalName` Service.
    Alias(&'a str),
    /// SRV records of ports of a Service.
    Ports(&'a PortRecords),
}

impl Index {
    /// Creates an index without any object.
    pub fn new(zone: Zone) -> Self {
        let (namespaces, services, reverse) = (HashMap::new(), HashMap::new(), BTreeSet::new());
        Self { zone, namespaces, services, reverse, unread: Unread::default() }
    }

    /// The zones that the index answers for.
    pub const fn zone(&self) -> &Zone {
        &self.zone
    }

    /// The zones that the index answers for, to change the ranges of reverse names.
    pub const fn zone_mut(&mut self) -> &mut Zone {
        &mut self.zone
    }

    /// Replaces the names that unreadable objects may have; the index does not deny them.
    pub fn set_unread(&mut self, unread: Unread) {
        self.unread = unread;
    }

    /// Applies a change. The cost depends only on the Service that the change affects.
    pub fn apply(&mut self, change: NameChange) {
        match change {
            NameChange::Service(name, service) => self.change(&name, |entry| entry.service = service),
            NameChange::Slice(name, slice) => self.apply_slice(name, slice),
            NameChange::Namespace(name, exists) => {
                self.namespaces.entry(name.name.clone()).or_default().declared = exists;
                self.drop_unused(&name.name);
            }
        }
    }

    fn apply_slice(&mut self, name: ObjectName, slice: Option<NamedSlice>) {
        let service = slice.as_ref().map(|slice| slice.service.clone());
        let before = match &service {
            Some(service) => self.services.insert(name.clone(), service.clone()),
            None => self.services.remove(&name),
        };
        if let Some(before) = before.filter(|before| Some(before) != service.as_ref()) {
            self.change(&before, |entry| entry.set_slice(name.name.clone(), None));
        }
        if let Some(slice) = slice {
            let service = slice.service.clone();
            self.change(&service, |entry| entry.set_slice(name.name, Some(slice)));
        }
    }

    /// Changes the entry of a Service, and updates the reverse names that depend on it.
    fn change(&mut self, name: &ObjectName, change: impl FnOnce(&mut Entry)) {
        let namespace = self.namespaces.entry(name.namespace.clone()).or_default();
        let entry = namespace.entries.entry(name.name.clone()).or_default();
        let old = entry.addresses();
        change(entry);
        entry.published = Published::default();
        let new = entry.addresses();
        if entry.is_empty() {
            namespace.entries.remove(&name.name);
            self.drop_unused(&name.namespace);
        }
        for gone in old.difference(&new) {
            self.reverse.remove(&(*gone, name.clone()));
        }
        self.reverse.extend(new.difference(&old).map(|added| (*added, name.clone())));
    }

    fn drop_unused(&mut self, name: &str) {
        if self.namespaces.get(name).is_some_and(|known| !known.declared && known.entries.is_empty()) {
            self.namespaces.remove(name);
        }
    }

    /// Answers a question for the name that these labels form; they must be in lower case.
    pub fn lookup(&self, labels: &[&[u8]], kind: Kind) -> Answer {
        if let Some(labels) = self.zone.strip(labels) {
            let labels: Option<Vec<&str>> =
                labels.iter().map(|label| std::str::from_utf8(label).ok()).collect();
            let Some(labels) = labels else { return Answer::NxDomain(self.zone.name().to_owned()) };
            return match self.node(&labels) {
                Some(node) => self.select(node, kind),
                None if self.unread.may_have(&labels) => Answer::Unknown,
                None => Answer::NxDomain(self.zone.name().to_owned()),
            };
        }
        Reverse::parse(labels).map_or(Answer::NotOurs, |name| self.reverse(&name, kind))
    }

    /// What exists at a name of the cluster domain; `None` if neither the name nor any name below it exists.
    fn node(&self, labels: &[&str]) -> Option<Node<'_>> {
        match labels {
            [] => Some(Node::Apex),
            ["dns-version"] => Some(Node::Version),
            ["dns" | "svc" | "pod"] => Some(Node::Empty),
            ["ns", "dns"] => Some(Node::Host(Addresses::new(self.name_servers().into_iter()))),
            [namespace, "svc" | "pod"] => self.has_namespace(namespace).then_some(Node::Empty),
            [label, namespace, "pod"] if self.has_namespace(namespace) => {
                undashed(label).map(|address| Node::Host(Addresses::new([address].into_iter())))
            }
            [rest @ .., service, namespace, "svc"] => self.owner(namespace, service)?.node(rest),
            _ => None,
        }
    }

    fn has_namespace(&self, name: &str) -> bool {
        name == DEFAULT_NAMESPACE || self.namespaces.contains_key(name)
    }

    fn owner(&self, namespace: &str, service: &str) -> Option<Owner<'_>> {
        let (namespace, known) = self.namespaces.get_key_value(namespace)?;
        let (name, entry) = known.entries.get_key_value(service)?;
        let service = entry.service.as_ref()?;
        Some(Owner { zone: &self.zone, namespace, name, service, entry })
    }

    /// The entry of a Service, which may exist before the Service itself.
    pub(super) fn entry(&self, name: &ObjectName) -> Option<&Entry> {
        self.namespaces.get(&name.namespace)?.entries.get(&name.name)
    }

    /// The addresses of the name `ns.dns`.
    fn name_servers(&self) -> Vec<IpAddr> {
        let ObjectName { namespace, name } = self.zone.dns_service();
        let service = self.owner(namespace, name).map(|owner| owner.service);
        match service.map(|service| &service.target) {
            Some(Target::ClusterIps(ips)) if !ips.is_empty() => ips.clone(),
            Some(_) | None => self.zone.servers().to_vec(),
        }
    }

    /// The records of type `kind` at a name of the cluster domain.
    fn select(&self, node: Node<'_>, kind: Kind) -> Answer {
        let ttl = self.zone.ttl();
        let with = |records: Arc<[Data]>| Found { ttl, records, ..Found::default() };
        let plain = |records: Vec<Data>| with(records.into());
        let srv = |ports: &PortRecords| {
            let PortRecords { records, additional } = ports.clone();
            Found { ttl, records, additional }
        };
        let found = match (node, kind) {
            (_, Kind::Any) => plain(vec![Data::Hinfo]),
            (Node::Apex, kind) => self.apex(kind),
            (Node::Version, Kind::Txt) => Found { ttl: VERSION_TTL, ..plain(vec![Data::Txt(VERSION)]) },
            (Node::Host(addresses), Kind::A | Kind::Aaaa) => with(addresses.of(kind)),
            (Node::Service(owner), Kind::A | Kind::Aaaa) => with(owner.addresses().of(kind)),
            (Node::Service(owner), Kind::Srv) => srv(&owner.ports().all),
            (Node::Ports(ports), Kind::Srv) => srv(ports),
            (Node::Alias(target), Kind::Cname) => plain(vec![Data::Cname(target.to_owned())]),
            (Node::Alias(target), _) => return Answer::Alias(target.to_owned()),
            _ => Found::default(),
        };
        answer(found, || self.zone.name().to_owned())
    }

    /// The records of type `kind` at the apex of any zone: the cluster domain, or a zone of reverse names.
    fn apex(&self, kind: Kind) -> Found {
        match kind {
            Kind::Soa => Found { ttl: self.zone.soa_ttl(), records: [Data::Soa].into(), ..Found::default() },
            Kind::Ns => {
                let server = format!("ns.dns.{}", self.zone.name());
                let additional = self.name_servers().into_iter().map(|ip| (server.clone(), ip)).collect();
                Found { ttl: self.zone.ttl(), records: [Data::Ns(server)].into(), additional }
            }
            Kind::A
            | Kind::Aaaa
            | Kind::Cname
            | Kind::Ptr
            | Kind::Srv
            | Kind::Txt
            | Kind::Any
            | Kind::Other => Found::default(),
        }
    }

    fn reverse(&self, name: &Reverse, kind: Kind) -> Answer {
        if let Reverse::Address(address) = name {
            let names = self.names_of(*address);
            if !names.is_empty() {
                let ptr = || names.into_iter().map(Data::Ptr).collect();
                let records = if kind == Kind::Ptr { ptr() } else { any(kind).into() };
                let found = Found { ttl: self.zone.ttl(), records, ..Found::default() };
                let zone = || self.zone.reverse_zone(name);
                return answer(found, || zone().unwrap_or_else(|| reverse::zone(&(*address).into(), name)));
            }
        }
        match (self.zone.reverse_zone(name), name) {
            // A name with too few labels may have names below it. A denial would hide these names from a resolver that
            // asks label by label.
            (Some(zone), Reverse::Network(network)) => {
                let is_apex = reverse::zone(network, name) == zone;
                let found = if is_apex && kind != Kind::Any {
                    self.apex(kind)
                } else {
                    Found { ttl: self.zone.ttl(), records: any(kind).into(), ..Found::default() }
                };
                answer(found, || zone)
            }
            (Some(_), Reverse::Address(_)) if !self.unread.is_empty() => Answer::Unknown,
            (Some(zone), Reverse::Address(_) | Reverse::Malformed(_)) => Answer::NxDomain(zone),
            (None, _) => Answer::NotOurs,
        }
    }

    /// The full name of the Service with this cluster IP, else the full names of the endpoints with this address.
    fn names_of(&self, address: IpAddr) -> Vec<String> {
        let first = (address, ObjectName::new("", ""));
        let services = self.reverse.range(first..).take_while(|(other, _)| *other == address);
        let owners: Vec<Owner<'_>> =
            services.filter_map(|(_, name)| self.owner(&name.namespace, &name.name)).collect();
        if let Some(owner) = owners.iter().find(|owner| owner.has_cluster_ip(address)) {
            return vec![owner.full_name()];
        }
        let names: BTreeSet<String> = owners.iter().flat_map(|owner| owner.hosts_of(address)).collect();
        names.into_iter().collect()
    }
}

/// The answer to a question of type `ANY`: one `HINFO` record (RFC 8482). Empty for other types.
fn any(kind: Kind) -> Vec<Data> {
    Vec::from_iter((kind == Kind::Any).then_some(Data::Hinfo))
}

/// An answer with the records; if there are none, [`Answer::NoData`] with `zone`.
fn answer(found: Found, zone: impl FnOnce() -> String) -> Answer {
    if found.records.is_empty() { Answer::NoData(zone()) } else { Answer::Found(found) }
}
