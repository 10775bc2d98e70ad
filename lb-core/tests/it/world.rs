//! Random sets of API objects, and the contents of the maps that the agent must derive from these objects, computed in
//! the simplest way.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;
use lb_common::{
    Address, Backend, ConnectionLimits, ConnectionRate, FrontendKind, Scheduler, ServiceKey, Vip,
    backend_flags, service_flags, vip_flags,
};
use lb_core::{
    family::{Families, Family},
    model::{
        Change, Endpoint, EndpointPort, EndpointSlice, External, Hints, Member, Node, NodeAddresses,
        ObjectName, Policy, Protocol, Service, ServicePort, ServicePortName, ServiceSettings, TrafficPolicy,
    },
    north_south::NorthSouthMode,
    tables::{self, Maglev, TableSize},
};
use proptest::{collection, prelude::*, sample};

use crate::kernel::{Lead, Networks, Resolved};

/// The API objects that exist.
#[derive(Clone, Debug, Default)]
pub(crate) struct World {
    services: BTreeMap<ObjectName, Service>,
    slices: BTreeMap<ObjectName, EndpointSlice>,
}

impl World {
    pub(crate) fn apply(&mut self, change: &Change) {
        match change.clone() {
            Change::Service(name, Some(service)) => {
                self.services.insert(name, service);
            }
            Change::Service(name, None) => {
                self.services.remove(&name);
            }
            Change::EndpointSlice(name, Some(slice)) => {
                self.slices.insert(name, slice);
            }
            Change::EndpointSlice(name, None) => {
                self.slices.remove(&name);
            }
        }
    }

    /// Every frontend of the Services for which `claims` returns true, also frontends that another service port owns.
    pub(crate) fn claimed(&self, node: &Node, claims: impl Fn(&ObjectName) -> bool) -> BTreeSet<ServiceKey> {
        let services = self.services.iter().filter(|(name, _)| claims(name));
        let places = services
            .flat_map(|(_, service)| service.ports.iter().flat_map(move |port| places(service, port, node)));
        places.map(|(_, key)| key).collect()
    }

    /// All objects, as the changes that a source sends at its start.
    pub(crate) fn changes(&self) -> Vec<Change> {
        let services = self.services.iter().map(|(name, s)| Change::Service(name.clone(), Some(s.clone())));
        let slices = self.slices.iter().map(|(name, s)| Change::EndpointSlice(name.clone(), Some(s.clone())));
        services.chain(slices).collect()
    }

    pub(crate) fn removal(&self) -> Vec<Change> {
        let services = self.services.keys().map(|name| Change::Service(name.clone(), None));
        services.chain(self.slices.keys().map(|name| Change::EndpointSlice(name.clone(), None))).collect()
    }

    /// The expected backends of each frontend, computed directly from the rules, without regard to speed.
    pub(crate) fn expected(&self, node: &Node) -> Resolved {
        let mut owners: BTreeMap<ServiceKey, (usize, ServicePortName)> = BTreeMap::new();
        let mut expected = Resolved::new();
        for (name, service) in &self.services {
            for port in &service.ports {
                let full = ServicePortName {
                    service: name.clone(),
                    port: port.name.clone(),
                    protocol: port.protocol,
                };
                for (kind, key) in places(service, port, node) {
                    let claim = (strength(kind), full.clone());
                    if owners.get(&key).is_none_or(|owner| claim < *owner) {
                        owners.insert(key, claim);
                        expected.insert(key, self.lead(name, service, port, kind, key, node));
                    }
                }
            }
        }
        expected
    }

    fn lead(
        &self,
        name: &ObjectName,
        service: &Service,
        port: &ServicePort,
        kind: FrontendKind,
        key: ServiceKey,
        node: &Node,
    ) -> Lead {
        let endpoints = self.endpoints(name, port, key.address.is_v4());
        let (cluster, local) = (cluster(&endpoints, node), local(&endpoints, node));
        let internal = kind == FrontendKind::ClusterIp;
        let policy = if internal { service.internal_policy } else { service.external.policy };
        let is_local = policy == TrafficPolicy::Local;
        let family = Family::of(key.address.into());
        let mut flags = 0;
        let mut flag = |holds: bool, flag: u16| flags |= if holds { flag } else { 0 };
        flag(is_local && local.is_empty() && !cluster.is_empty(), service_flags::DROP_WITHOUT_BACKENDS);
        flag(!internal && is_local, service_flags::SHORT_CIRCUIT);
        flag(!internal && !is_local || internal && node.policy.masquerade_all, service_flags::MASQUERADE);
        flag(
            internal && !node.policy.masquerade_all && node.detects_inside.contains(family),
            service_flags::MASQUERADE_EXTERNAL,
        );
        flag(
            kind == FrontendKind::LoadBalancer && admitted(service, key, node).is_some(),
            service_flags::SOURCE_RANGES,
        );
        flag(
            kind == FrontendKind::NodePort && IpAddr::from(key.address).is_loopback(),
            service_flags::SOCKETS_ONLY,
        );
        flag(
            !internal
                && key.port >= 1024
                && (service.external.load_balancer_ips.iter().chain(external_ips(service, node)))
                    .any(|address| node.addresses.own.contains(address)),
            service_flags::SYN_ONLY,
        );
        let for_sockets = kind == FrontendKind::NodePort && IpAddr::from(key.address).is_loopback();
        flag(service.limits().is_any() && !for_sockets, service_flags::LIMITED);
        let inside = if !internal && is_local { cluster.clone() } else { Vec::new() };
        let settings = service.settings.as_deref();
        let mode = settings.and_then(|s| s.north_south).unwrap_or(node.policy.north_south);
        let dsr = mode.uses_dsr(port.protocol);
        let weight = |backends: Vec<Backend>| {
            let backends = weighted(backends, &endpoints, service);
            if dsr { peers(backends, &endpoints, node) } else { backends }
        };
        let hidden: Vec<Backend> =
            local.iter().filter(|backend| !cluster.contains(backend)).copied().collect();
        let (mut backends, inside) = (weight(if is_local { local } else { cluster }), weight(inside));
        if dsr && !internal && !is_local && !backends.is_empty() {
            flags |= service_flags::DSR;
            backends.extend(hidden.iter().map(|backend| Backend { weight: 0, ..*backend }));
            backends.sort();
        }
        let scheduler = settings.and_then(|s| s.scheduler).unwrap_or(node.policy.scheduler);
        let size = settings.and_then(|s| s.table_size).unwrap_or(node.policy.maglev.size);
        let table = |backends: &[Backend]| {
            tables::table(scheduler, Maglev { size, ..node.policy.maglev }, backends).unwrap_or_default()
        };
        let (table, inside_table) = (table(&backends), table(&inside));
        let scheduler = scheduler as u8;
        let limits = (flags & service_flags::LIMITED != 0).then(|| service.limits());
        Lead { kind: kind as u8, flags, backends, inside, scheduler, table, inside_table, limits }
    }

    /// The expected source ranges of each frontend that has some.
    pub(crate) fn admitted(&self, node: &Node) -> BTreeMap<ServiceKey, Networks> {
        let mut all = BTreeMap::new();
        for (key, lead) in self.expected(node) {
            if lead.flags & service_flags::SOURCE_RANGES != 0 {
                let owner = self.owner(key, node);
                all.insert(key, admitted(owner, key, node).expect("a filter"));
            }
        }
        all
    }

    /// The Service that owns this frontend with a load balancer address: the one with the smallest name.
    fn owner(&self, key: ServiceKey, node: &Node) -> &Service {
        let claims = self.services.iter().flat_map(|(name, service)| {
            service.ports.iter().map(move |port| {
                ((name.clone(), port.name.clone(), port.protocol), service, places(service, port, node))
            })
        });
        let claims = claims.filter(|(.., places)| places.contains(&(FrontendKind::LoadBalancer, key)));
        claims.min_by_key(|(name, ..)| name.clone()).expect("an owner").1
    }

    /// The expected flags in `VIPS` of each virtual address, and of each of the node's own addresses.
    pub(crate) fn vips(&self, node: &Node) -> BTreeMap<IpAddr, Vip> {
        let foreign = self.services.values().filter(|service| service.is_foreign);
        let foreign = foreign.flat_map(|service| &service.cluster_ips).copied();
        vips(&self.expected(node), foreign, node)
    }

    /// The endpoints of a port in one family. If several slices contain an address, the [`best`] entry counts.
    fn endpoints(
        &self,
        service: &ObjectName,
        port: &ServicePort,
        v4: bool,
    ) -> Vec<(Address, u16, &Endpoint)> {
        let mut all: BTreeMap<(Address, u16), Vec<&Endpoint>> = BTreeMap::new();
        for slice in self.slices.values().filter(|slice| slice.service == *service) {
            for number in slice.ports.iter().filter(|p| p.name == port.name && p.protocol == port.protocol) {
                for endpoint in slice.endpoints.iter().filter(|e| e.address.is_ipv4() == v4) {
                    all.entry((Address::from(endpoint.address), number.port)).or_default().push(endpoint);
                }
            }
        }
        all.into_iter()
            .filter_map(|((address, port), versions)| Some((address, port, best(&versions)?)))
            .collect()
    }
}

/// The flags in `VIPS` of the addresses of these frontends, of the `foreign` addresses, which another proxy serves, and
/// of each of the node's own addresses.
pub(crate) fn vips(
    frontends: &Resolved,
    foreign: impl Iterator<Item = IpAddr>,
    node: &Node,
) -> BTreeMap<IpAddr, Vip> {
    let own = node.addresses.own.iter().copied();
    let mut vips: BTreeMap<IpAddr, Vip> =
        own.chain(foreign).map(|address| (address, Vip { flags: 0 })).collect();
    for (key, lead) in frontends {
        let address = IpAddr::from(key.address);
        if lead.kind != FrontendKind::NodePort as u8 {
            let flags = match (node.addresses.own.contains(&address), lead.kind) {
                (true, _) => 0,
                (false, kind) if kind == FrontendKind::ClusterIp as u8 => {
                    vip_flags::ECHO | vip_flags::CLUSTER_IP
                }
                (false, kind) if kind == FrontendKind::LoadBalancer as u8 => vip_flags::ECHO,
                (false, _) => 0,
            };
            vips.entry(address).or_insert(Vip { flags: 0 }).flags |= flags;
        }
    }
    vips
}

fn best<'a>(versions: &[&'a Endpoint]) -> Option<&'a Endpoint> {
    let order = |e: &&&Endpoint| {
        (!e.terminating, e.ready, e.serving, e.node.clone(), e.zone.clone(), e.pod.clone(), e.hints.clone())
    };
    versions.iter().max_by_key(order).copied()
}

/// The external IPs of a Service that the node serves.
fn external_ips<'a>(service: &'a Service, node: &Node) -> &'a [IpAddr] {
    if node.policy.ignore_external_ips { &[] } else { &service.external.ips }
}

/// Every address and port at which the node serves a service port, with the kind of address.
fn places(service: &Service, port: &ServicePort, node: &Node) -> Vec<(FrontendKind, ServiceKey)> {
    let external = &service.external;
    let node_ports: &[IpAddr] = if port.node_port.is_some() { &node.addresses.node_ports } else { &[] };
    let kinds: [(FrontendKind, &[IpAddr], u16); 4] = [
        (FrontendKind::ClusterIp, &service.cluster_ips, port.port),
        (FrontendKind::LoadBalancer, &external.load_balancer_ips, port.port),
        (FrontendKind::ExternalIp, external_ips(service, node), port.port),
        (FrontendKind::NodePort, node_ports, port.node_port.unwrap_or(0)),
    ];
    let is_left = |kind, ip: &IpAddr| kind == FrontendKind::ClusterIp && node.addresses.own.contains(ip);
    let has = |ip: &IpAddr| service.cluster_ips.iter().any(|own| own.is_ipv4() == ip.is_ipv4());
    let key = |ip: &IpAddr, number| ServiceKey::new(Address::from(*ip), number, port.protocol.number());
    kinds
        .into_iter()
        .flat_map(|(kind, ips, number)| {
            let ips = ips.iter().filter(|ip| has(ip) && !is_left(kind, ip));
            ips.map(move |ip| (kind, key(ip, number))).collect::<Vec<_>>()
        })
        .collect()
}

fn strength(kind: FrontendKind) -> usize {
    use FrontendKind::{ClusterIp, ExternalIp, LoadBalancer, NodePort};
    [ClusterIp, LoadBalancer, ExternalIp, NodePort].iter().position(|k| *k == kind).expect("a kind")
}

/// The source ranges of a load balancer address; `None` means that all clients are admitted.
pub(crate) fn admitted(service: &Service, key: ServiceKey, node: &Node) -> Option<Networks> {
    let v4 = key.address.is_v4();
    let ranges: Vec<IpNet> =
        service.external.source_ranges.iter().filter(|range| range.addr().is_ipv4() == v4).copied().collect();
    if ranges.is_empty() || ranges.iter().any(|range| range.prefix_len() == 0) {
        return None;
    }
    let extra = if v4 { 96 } else { 0 };
    let mut networks: Networks =
        ranges.iter().map(|range| (range.network(), u32::from(range.prefix_len()) + extra)).collect();
    if node.addresses.primary.iter().any(|ip| ranges.iter().any(|range| range.contains(ip))) {
        let vips = service.external.load_balancer_ips.iter().filter(|ip| ip.is_ipv4() == v4);
        networks.extend(vips.map(|ip| (*ip, 128)));
    }
    Some(networks)
}

type Found<'a> = (Address, u16, &'a Endpoint);

/// The backends that the traffic policy `Cluster` selects.
fn cluster(endpoints: &[Found<'_>], node: &Node) -> Vec<Backend> {
    let ready: Vec<&Found<'_>> = endpoints.iter().filter(|(.., e)| e.ready).collect();
    let for_node = |e: &Endpoint| e.hints.as_ref().is_some_and(|h| h.nodes.contains(&node.policy.node_name));
    let for_zone = |e: &Endpoint| {
        e.hints.as_ref().is_some_and(|h| node.zone.as_ref().is_some_and(|zone| h.zones.contains(zone)))
    };
    let all_nodes = ready.iter().all(|(.., e)| e.hints.as_ref().is_some_and(|h| !h.nodes.is_empty()));
    let all_zones = ready.iter().all(|(.., e)| e.hints.as_ref().is_some_and(|h| !h.zones.is_empty()));
    let chosen: Vec<&Found<'_>> = if ready.is_empty() {
        endpoints.iter().filter(|(.., e)| e.serving && e.terminating).collect()
    } else if all_nodes && ready.iter().any(|(.., e)| for_node(e)) {
        ready.into_iter().filter(|(.., e)| for_node(e)).collect()
    } else if all_zones && ready.iter().any(|(.., e)| for_zone(e)) {
        ready.into_iter().filter(|(.., e)| for_zone(e)).collect()
    } else {
        ready
    };
    chosen.into_iter().map(|found| backend(found, node)).collect()
}

/// The backends that the traffic policy `Local` selects.
fn local(endpoints: &[Found<'_>], node: &Node) -> Vec<Backend> {
    let here: Vec<&Found<'_>> = endpoints.iter().filter(|(.., e)| is_here(e, node)).collect();
    let mut chosen: Vec<&Found<'_>> = here.iter().filter(|(.., e)| e.ready).copied().collect();
    if chosen.is_empty() {
        chosen = here.into_iter().filter(|(.., e)| e.serving && e.terminating).collect();
    }
    chosen.into_iter().map(|found| backend(found, node)).collect()
}

fn is_here(endpoint: &Endpoint, node: &Node) -> bool {
    !node.policy.node_name.is_empty() && endpoint.node.as_deref() == Some(&*node.policy.node_name)
}

fn backend((address, port, endpoint): &Found<'_>, node: &Node) -> Backend {
    let mut flags = 0;
    for (holds, flag) in [
        (!endpoint.ready, backend_flags::TERMINATING),
        (is_here(endpoint, node), backend_flags::LOCAL),
        (node.addresses.own.contains(&endpoint.address), backend_flags::HOST),
    ] {
        flags |= if holds { flag } else { 0 };
    }
    Backend { address: *address, port: *port, flags, weight: 1, active_flows_slot: 0 }
}

/// The backends with the weights that the Service's annotation sets.
fn weighted(backends: Vec<Backend>, endpoints: &[Found<'_>], service: &Service) -> Vec<Backend> {
    let Some(ServiceSettings { weights, .. }) = service.settings.as_deref() else { return backends };
    let weight = |backend: &Backend| {
        let (.., endpoint) = endpoints
            .iter()
            .find(|(address, port, _)| (*address, *port) == (backend.address, backend.port))?;
        let by = |name: Option<Member>| name.and_then(|name| weights.get(&name)).copied();
        by(Some(Member::Address(endpoint.address)))
            .or_else(|| by(endpoint.pod.clone().map(Member::Pod)))
            .or_else(|| by(endpoint.node.clone().map(Member::Node)))
    };
    backends.into_iter().map(|b| Backend { weight: weight(&b).unwrap_or(1), ..b }).collect()
}

/// Sets the flag `PEER` on backends that are on other nodes with a known name.
fn peers(backends: Vec<Backend>, endpoints: &[Found<'_>], node: &Node) -> Vec<Backend> {
    let own = &node.policy.node_name;
    let is_peer = |b: &Backend| {
        let found = endpoints.iter().find(|(address, port, _)| (*address, *port) == (b.address, b.port));
        let name = found.and_then(|(.., endpoint)| endpoint.node.as_ref());
        !own.is_empty() && name.is_some_and(|name| name != own)
    };
    let marked =
        |b: Backend| Backend { flags: b.flags | if is_peer(&b) { backend_flags::PEER } else { 0 }, ..b };
    backends.into_iter().map(marked).collect()
}

fn name(text: String) -> ObjectName {
    ObjectName::new("ns", &text)
}

fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![3 => Just(Protocol::Tcp), 1 => Just(Protocol::Udp)]
}

fn port_name() -> impl Strategy<Value = &'static str> {
    sample::select(vec!["", "http", "dns"])
}

fn service_port() -> impl Strategy<Value = ServicePort> {
    (
        port_name(),
        protocol(),
        prop_oneof![4 => 80..82_u16, 1 => Just(30_000)],
        prop::option::of(30_000..30_002_u16),
    )
        .prop_map(|(name, protocol, port, node_port)| ServicePort {
            name: name.into(),
            protocol,
            port,
            node_port,
        })
}

fn traffic_policy() -> impl Strategy<Value = TrafficPolicy> {
    sample::select(vec![TrafficPolicy::Cluster, TrafficPolicy::Local])
}

/// A random subset of these values, parsed, in their order.
fn some_of<T: std::str::FromStr<Err: std::fmt::Debug> + Clone + std::fmt::Debug + 'static>(
    values: &[&str],
) -> impl Strategy<Value = Vec<T>> {
    let values: Vec<T> = values.iter().map(|text| text.parse().expect("a value")).collect();
    sample::subsequence(values.clone(), 0..=values.len())
}

/// External addresses, some of which may also be cluster IPs or the node's own addresses.
fn external() -> impl Strategy<Value = External> {
    let ips = some_of(&["10.96.0.1", "192.0.2.1", "198.51.100.1", "fd02::1"]);
    let load_balancer_ips = some_of(&["198.51.100.1", "198.51.100.2", "fd02::1"]);
    let source_ranges = prop_oneof![
        Just(Vec::new()),
        some_of(&["192.0.2.0/24", "10.0.0.0/8", "fd01::/64"]),
        some_of(&["0.0.0.0/0", "203.0.113.7/32", "::/0"]),
    ];
    let health_check_node_port = prop::option::of(Just(32_000));
    (ips, load_balancer_ips, source_ranges, traffic_policy(), health_check_node_port).prop_map(
        |(ips, load_balancer_ips, source_ranges, policy, health_check_node_port)| External {
            ips,
            load_balancer_ips,
            source_ranges,
            policy,
            health_check_node_port,
            ..External::default()
        },
    )
}

/// A random Service of this proxy or, less often, of another one.
fn service() -> impl Strategy<Value = Service> {
    let foreign =
        cluster_ips().prop_map(|cluster_ips| Service { cluster_ips, is_foreign: true, ..Service::default() });
    prop_oneof![6 => own_service(), 1 => foreign]
}

fn cluster_ips() -> impl Strategy<Value = Vec<IpAddr>> {
    let v4 = prop::option::of((1..4_u8).prop_map(|last| IpAddr::from([10, 96, 0, last])));
    let v6 = prop::option::of((1..3_u16).prop_map(|last| IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, last])));
    (v4, v6).prop_map(|(v4, v6)| v4.into_iter().chain(v6).collect())
}

fn own_service() -> impl Strategy<Value = Service> {
    let ports = collection::vec(service_port(), 1..3).prop_map(|mut ports: Vec<ServicePort>| {
        let mut seen = BTreeSet::new();
        ports.retain(|port| seen.insert((port.name.clone(), port.protocol)));
        ports
    });
    let external = prop_oneof![Just(External::default()), external()];
    let settings = prop::option::weighted(0.3, settings());
    (cluster_ips(), ports, prop::option::of(1..3_u32), external, traffic_policy(), settings).prop_map(
        |(cluster_ips, ports, affinity_seconds, external, internal_policy, settings)| Service {
            cluster_ips,
            is_foreign: false,
            ports,
            affinity_seconds,
            external,
            internal_policy,
            settings,
        },
    )
}

fn scheduler() -> impl Strategy<Value = Scheduler> {
    sample::select(Scheduler::ALL.to_vec())
}

fn settings() -> impl Strategy<Value = std::sync::Arc<ServiceSettings>> {
    let members = vec![
        Member::Address([10, 0, 0, 1].into()),
        Member::Address([10, 0, 0, 2].into()),
        Member::Pod("x".into()),
        Member::Node("y".into()),
    ];
    let weights = collection::btree_map(sample::select(members), 0..4_u32, 0..4);
    let limits = prop_oneof![3 => Just(ConnectionLimits::NONE), 1 => (0..3_u32, 0..3_u32).prop_map(limits)];
    (prop::option::of(scheduler()), weights, prop::option::of(mode()), limits).prop_map(
        |(scheduler, weights, north_south, limits)| {
            // The smallest table size, because the test checks all entries after every step.
            let table_size = Some(TableSize::ALL[0]);
            ServiceSettings {
                scheduler,
                table_size,
                north_south,
                weights,
                limits,
                ..ServiceSettings::default()
            }
            .into()
        },
    )
}

/// Limits of these numbers of connections per second, for all clients together and for each client; 0 sets none.
fn limits((service, client): (u32, u32)) -> ConnectionLimits {
    let rate = |connections| match connections {
        0 => ConnectionRate::NONE,
        connections => ConnectionRate { connections, seconds: 1 },
    };
    ConnectionLimits { service: rate(service), client: rate(client) }
}

fn mode() -> impl Strategy<Value = NorthSouthMode> {
    sample::select(NorthSouthMode::ALL.to_vec())
}

fn names() -> impl Strategy<Value = Vec<std::sync::Arc<str>>> {
    sample::subsequence(vec!["x".into(), "y".into()], 0..=2)
}

fn hints() -> impl Strategy<Value = Option<std::sync::Arc<Hints>>> {
    prop::option::weighted(0.7, (names(), names()).prop_map(|(zones, nodes)| Hints { zones, nodes }.into()))
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    let flags = (prop::bool::weighted(0.6), any::<bool>(), prop::bool::weighted(0.3));
    let label = || prop::option::of(sample::select(vec!["x", "y"]).prop_map(Into::into));
    (any::<bool>(), 1..6_u8, flags, label(), label(), hints()).prop_map(
        |(v4, last, (ready, serving, terminating), node, pod, hints)| {
            let address = if v4 {
                IpAddr::from([10, 0, 0, last])
            } else {
                IpAddr::from([0xfd01, 0, 0, 0, 0, 0, 0, last.into()])
            };
            Endpoint { address, ready, serving, terminating, node, zone: None, pod, hints }
        },
    )
}

/// A random policy. Its node name is that of some endpoints (`x`), of none, or empty.
pub(crate) fn policy() -> impl Strategy<Value = Policy> {
    let node_name = sample::select(vec!["x", "z", ""]);
    let scheduler = prop_oneof![3 => Just(Scheduler::Random), 1 => scheduler()];
    let ignore_external_ips = prop::bool::weighted(0.2);
    (node_name, any::<bool>(), ignore_external_ips, scheduler, mode()).prop_map(
        |(node_name, masquerade_all, ignore_external_ips, scheduler, north_south)| Policy {
            node_name: node_name.into(),
            masquerade_all,
            ignore_external_ips,
            scheduler,
            maglev: Maglev { size: TableSize::ALL[0], seed: 1 },
            north_south,
        },
    )
}

pub(crate) fn families() -> impl Strategy<Value = Families> {
    (any::<bool>(), any::<bool>()).prop_map(|(v4, v6)| Families { v4, v6 })
}

pub(crate) fn zone() -> impl Strategy<Value = Option<&'static str>> {
    prop::option::of(sample::select(vec!["x", "z"]))
}

pub(crate) fn addresses() -> impl Strategy<Value = NodeAddresses> {
    let own = some_of(&["10.0.0.1", "10.96.0.2", "192.0.2.1", "fd01::1"]);
    let node_ports = some_of(&["10.0.0.1", "127.0.0.1", "192.0.2.1", "::1", "fd01::1"]);
    (own, any::<sample::Index>(), node_ports).prop_map(|(own, chosen, node_ports)| {
        let primary = Family::ALL.into_iter().filter_map(|family| {
            let of_family: Vec<&IpAddr> = own.iter().filter(|ip| Family::of(**ip) == family).collect();
            (!of_family.is_empty()).then(|| **chosen.get(&of_family))
        });
        NodeAddresses { primary: primary.collect(), own, node_ports }
    })
}

fn endpoint_port() -> impl Strategy<Value = EndpointPort> {
    (port_name(), protocol(), 8080..8082_u16).prop_map(|(name, protocol, port)| EndpointPort {
        name: name.into(),
        protocol,
        port,
    })
}

fn slice() -> impl Strategy<Value = EndpointSlice> {
    let service = sample::select(vec!["a", "b", "c", "d"]);
    (service, collection::vec(endpoint_port(), 0..3), collection::vec(endpoint(), 0..6)).prop_map(
        |(service, ports, endpoints)| EndpointSlice { service: name(service.to_owned()), ports, endpoints },
    )
}

/// A random change of one object.
pub(crate) fn change() -> impl Strategy<Value = Change> {
    let services = sample::select(vec!["a", "b", "c"]);
    let service_change = (services, prop::option::weighted(0.8, service()))
        .prop_map(|(of, service)| Change::Service(name(of.to_owned()), service));
    let slice_change = (0..5_u8, prop::option::weighted(0.8, slice()))
        .prop_map(|(number, slice)| Change::EndpointSlice(name(format!("slice-{number}")), slice));
    prop_oneof![2 => service_change, 3 => slice_change]
}
