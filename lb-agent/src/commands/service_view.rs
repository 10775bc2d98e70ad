//! The Services in the form that commands show, assembled from the contents of the maps.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use jiff::Timestamp;
use lb_common::{
    Backend, ConnectionLimits, ConnectionRate, FrontendKind, Outcome, Scheduler, Service, ServiceKey,
    SocketCounter, SocketCounts, SourceRangeKey, Verdict, backend_flags,
    conntrack::{Flow, Phase, Tuple},
    service_flags,
};
use lb_core::plan::{Contents, EndpointLabels, ServiceLabels, slices_of};
use lb_ebpf::rules::admission;
use serde::Serialize;

use lb_datapath::Connection;

use crate::{
    announce::{AnnouncedBy, AnnouncementReport},
    probe::CheckReport,
};

/// One service port, as `service` shows it. Scripts read the JSON: keys may be added, never renamed or removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ServiceView {
    /// `metadata.namespace` of the Service.
    pub(super) namespace: String,
    /// `metadata.name`
    pub(super) name: String,
    /// `spec.ports[].port`
    pub(super) port: u16,
    /// `spec.ports[].name`; empty for an unnamed port.
    pub(super) port_name: String,
    /// `TCP`, `UDP` or `SCTP`
    pub(super) protocol: &'static str,
    /// `spec.ports[].nodePort`
    pub(super) node_port: Option<u16>,
    /// The port's frontends (virtual addresses with ports), sorted.
    pub(super) frontends: Vec<FrontendView>,
    /// `Local` if external clients get backends of this node only, else `Cluster`; `None` if all frontends are cluster
    /// IPs.
    pub(super) external_traffic_policy: Option<&'static str>,
    /// How packets of external clients reach backends on other nodes, `snat` or `dsr`; `None` unless the external
    /// traffic policy is `Cluster`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) north_south_mode: Option<&'static str>,
    /// The version of the PROXY protocol header that backends get, `v2`; `None` if they get none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) proxy_protocol: Option<&'static str>,
    /// The limit on new connections of all clients together, on this node, such as `1000/s`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_connections: Option<String>,
    /// The limit on new connections of each client, on this node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_connections_per_client: Option<String>,
    /// Client networks that may use the Service's load balancer addresses; empty allows all.
    pub(super) source_ranges: Vec<String>,
    /// The distinct backends of all frontends, sorted.
    pub(super) backends: Vec<BackendView>,
    /// `None` or `ClientIP`
    pub(super) session_affinity: &'static str,
    /// Timeout of `ClientIP` affinity, in seconds.
    pub(super) session_affinity_seconds: Option<u32>,
    /// Name of the port's scheduler, as in `--scheduler`.
    pub(super) scheduler: &'static str,
    /// Weights of the backends whose weight is not 1, by `ADDRESS:PORT`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) weights: BTreeMap<SocketAddr, u32>,
    /// Results of the endpoints' health check. Present only in `service show` and on the web pages, while an agent
    /// runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) health_check: Option<CheckReport>,
    /// Id of the service port in the BPF maps.
    pub(super) id: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FrontendView {
    pub(super) address: IpAddr,
    /// The port that clients connect to.
    pub(super) port: u16,
    /// `ClusterIP`, `NodePort`, `LoadBalancer` or `ExternalIP`
    pub(super) kind: &'static str,
    /// First slot of the frontend in `BACKENDS`.
    pub(super) slot: u32,
    /// Number of consecutive slots of the frontend in `BACKENDS`.
    pub(super) slots: u32,
    /// First of the slots in `BACKENDS` that the frontend has for internal clients; `None` if internal clients use the
    /// same slots as external ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) internal_slot: Option<u32>,
    /// Number of the slots in `BACKENDS` that the frontend has for internal clients; `None` like `internal_slot`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) internal_slots: Option<u32>,
    /// Which clients are masqueraded: `all`, `outsiders` (external clients), or `none`.
    pub(super) masquerade: &'static str,
    /// The verdict on new connections without a backend: `reject` or `drop`.
    pub(super) without_backends: &'static str,
    /// Clients for which the frontend has no backend now.
    #[serde(skip)]
    pub(super) unserved: Vec<Unserved>,
    /// Which node announces the address at layer 2. Present only in `service show` and on the web page of one Service,
    /// while an agent runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) announced: Option<AnnouncedView>,
    /// Whether this node announces the address by BGP; `None` if the node should not announce it, for example because
    /// no BGPAdvertisement applies or no local endpoint exists. Present only in `service show` and on the web page of
    /// one Service, while an agent runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) announced_by_bgp: Option<AnnouncedView>,
}

/// Clients for which a frontend has no backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Unserved {
    pub(super) clients: Clients,
    /// The data plane's outcome for their new connections.
    pub(super) outcome: Outcome,
}

/// Some or all clients of a frontend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Clients {
    All,
    External,
    Internal,
}

/// Which node announces an address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct AnnouncedView {
    /// Name of the announcing node, as far as the agent of this node knows; `None` if it knows of none.
    pub(super) node: Option<String>,
    /// Whether this node announces the address now.
    pub(super) here: bool,
    /// Since when this node announces the address; `None` if it does not. Stays set while the claim of another
    /// machine interrupts the announcement.
    pub(super) since: Option<Timestamp>,
    /// `namespace/name` of the advertisements that cover the address.
    pub(super) advertisements: Vec<String>,
}

/// Sets, for each load balancer address, which node announces it at layer 2, and whether this node announces it by BGP.
pub(super) fn name_announcers(services: &mut [ServiceView], announcements: &[AnnouncementReport]) {
    for frontend in services.iter_mut().flat_map(|service| &mut service.frontends) {
        let view = |by| {
            let mut of_address = announcements.iter().filter(|it| it.address == frontend.address);
            of_address.find(|it| it.by == by).map(|it| {
                let AnnouncementReport { node, here, since, advertisements, .. } = it.clone();
                AnnouncedView { node, here, since, advertisements }
            })
        };
        (frontend.announced, frontend.announced_by_bgp) = (view(AnnouncedBy::Layer2), view(AnnouncedBy::Bgp));
    }
}

/// Sets the health check of each Service, with its results on this node.
pub(super) fn add_health(services: &mut [ServiceView], checks: &[CheckReport]) {
    for service in services {
        let is_of = |check: &&CheckReport| check.namespace == service.namespace && check.name == service.name;
        service.health_check = checks.iter().find(is_of).cloned();
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct BackendView {
    pub(super) address: IpAddr,
    pub(super) port: u16,
    /// `active` or `terminating`
    pub(super) state: &'static str,
    pub(super) node: Option<String>,
    /// Zone of the backend's node.
    pub(super) zone: Option<String>,
    pub(super) pod: Option<String>,
    /// Number of live flows to the backend plus sockets of the node's processes that are connected to it. Present only
    /// in `service show`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) flows: Option<u64>,
    /// Traffic of all tracked flows to the backend, live or closed; only in `service show`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) traffic: Option<TrafficView>,
}

/// Packets and bytes of flows, including IP headers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct TrafficView {
    /// Packets from clients.
    pub(super) packets_sent: u64,
    /// Packets to clients.
    pub(super) packets_answered: u64,
    /// Bytes from clients.
    pub(super) bytes_sent: u64,
    /// Bytes to clients.
    pub(super) bytes_answered: u64,
}

impl TrafficView {
    fn add(&mut self, forward: &Flow, reply: Option<&Flow>) {
        self.packets_sent += u64::from(forward.packets);
        self.bytes_sent += forward.bytes();
        self.packets_answered += reply.map_or(0, |reply| u64::from(reply.packets));
        self.bytes_answered += reply.map_or(0, Flow::bytes);
    }
}

/// Every service port that has a frontend, sorted by namespace, name, port and protocol.
pub(super) fn services(contents: &Contents) -> Vec<ServiceView> {
    let mut frontends: BTreeMap<u32, Vec<(&ServiceKey, &Service)>> = BTreeMap::new();
    for (key, record) in &contents.frontends {
        frontends.entry(record.id).or_default().push((key, record));
    }
    let mut views: Vec<_> =
        frontends.iter().filter_map(|(id, of_port)| service(contents, *id, of_port)).collect();
    views.sort_by(|a, b| {
        let order = |view: &ServiceView| (view.port, view.protocol, view.id);
        (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)).then_with(|| order(a).cmp(&order(b)))
    });
    views
}

fn service(contents: &Contents, id: u32, of_port: &[(&ServiceKey, &Service)]) -> Option<ServiceView> {
    // The port of a NodePort frontend is the node port, not the service port.
    let is_node_port = |record: &Service| record.kind == FrontendKind::NodePort as u8;
    let (first_key, record) = of_port.iter().min_by_key(|(key, r)| (is_node_port(r), r.kind, **key))?;
    let (namespace, name, port_name, node_port) = match contents.service_labels.get(&id) {
        Some(ServiceLabels { name, node_port }) => {
            let service = &name.service;
            (service.namespace.to_string(), service.name.to_string(), name.port.to_string(), *node_port)
        }
        None => (String::new(), format!("#{id}"), String::new(), None),
    };
    let mut frontends: Vec<_> = of_port.iter().map(|(key, record)| frontend(key, record)).collect();
    frontends.sort_by_key(|view| (view.kind_order(), view.address, view.port));
    let backends: BTreeSet<&Backend> =
        of_port.iter().flat_map(|(_, record)| slots(contents, record)).collect();
    Some(ServiceView {
        namespace,
        name,
        port: first_key.port,
        port_name,
        protocol: protocol_name(first_key.protocol),
        node_port,
        frontends,
        external_traffic_policy: external_traffic_policy(of_port),
        north_south_mode: north_south_mode(of_port),
        proxy_protocol: proxy_protocol(of_port),
        max_connections: limit(contents, id, |limits| limits.service),
        max_connections_per_client: limit(contents, id, |limits| limits.client),
        source_ranges: source_ranges(contents, id),
        weights: backends.iter().filter(|backend| backend.weight != 1).map(|b| weight(b)).collect(),
        backends: backends.into_iter().map(|backend| self::backend(contents, backend)).collect(),
        session_affinity: if record.affinity_seconds == 0 { "None" } else { "ClientIP" },
        session_affinity_seconds: (record.affinity_seconds != 0).then_some(record.affinity_seconds),
        scheduler: Scheduler::try_from(record.scheduler).map_or("unknown", Scheduler::as_str),
        health_check: None,
        id,
    })
}

fn external_traffic_policy(of_port: &[(&ServiceKey, &Service)]) -> Option<&'static str> {
    let mut external = of_port.iter().filter(|(_, record)| record.kind != FrontendKind::ClusterIp as u8);
    external.next().map(|(_, record)| if record.has_internal_slice() { "Local" } else { "Cluster" })
}

fn north_south_mode(of_port: &[(&ServiceKey, &Service)]) -> Option<&'static str> {
    let leads_elsewhere =
        |record: &Service| record.kind != FrontendKind::ClusterIp as u8 && !record.has_internal_slice();
    let mut external = of_port.iter().filter(|(_, record)| leads_elsewhere(record));
    let uses_dsr = |record: &Service| record.flags & service_flags::DSR != 0;
    external.next().map(|(_, record)| if uses_dsr(record) { "dsr" } else { "snat" })
}

fn proxy_protocol(of_port: &[(&ServiceKey, &Service)]) -> Option<&'static str> {
    let has_header = |(_, record): &(_, &Service)| record.flags & service_flags::PROXY_PROTOCOL != 0;
    of_port.iter().any(has_header).then_some("v2")
}

fn limit(
    contents: &Contents,
    id: u32,
    which: impl FnOnce(&ConnectionLimits) -> ConnectionRate,
) -> Option<String> {
    contents.limits.get(&id).map(which).filter(ConnectionRate::is_limit).map(|rate| rate.to_string())
}

fn source_ranges(contents: &Contents, id: u32) -> Vec<String> {
    let of_port = contents.source_ranges.iter().filter(|key| key.range.service() == id);
    let networks: BTreeSet<(IpAddr, u32)> = of_port.map(network).collect();
    networks.into_iter().map(|(address, prefix)| format!("{address}/{prefix}")).collect()
}

/// Address and prefix length of a source range. (The prefix length in `key` also counts the 32 bits of service id and
/// family, and for IPv4 the 96 bits before the address.)
fn network(key: &SourceRangeKey) -> (IpAddr, u32) {
    let family = if key.range.address.is_v4() { 96 } else { 0 };
    (key.range.address.into(), key.prefix_length.saturating_sub(32 + family))
}

fn weight(backend: &Backend) -> (SocketAddr, u32) {
    (SocketAddr::new(backend.address.into(), backend.port), backend.weight)
}

/// All backends of a frontend, those for internal clients included.
fn slots<'a>(contents: &'a Contents, record: &Service) -> impl Iterator<Item = &'a Backend> {
    let slices = slices_of(record);
    slices.flat_map(|range| contents.backends.range(range.slots()).map(|(_, backend)| backend))
}

fn frontend(key: &ServiceKey, record: &Service) -> FrontendView {
    let has_internal = record.has_internal_slice();
    FrontendView {
        address: key.address.into(),
        port: key.port,
        kind: FrontendKind::try_from(record.kind).map_or("unknown", FrontendKind::as_str),
        slot: record.backends_base,
        slots: record.backends_count,
        internal_slot: has_internal.then_some(record.internal_base),
        internal_slots: has_internal.then_some(record.internal_count),
        masquerade: match (record.masquerades(true), record.masquerades(false)) {
            (true, _) => "all",
            (false, true) => "outsiders",
            (false, false) => "none",
        },
        without_backends: without_backends(key, record),
        unserved: unserved(key, record),
        announced: None,
        announced_by_bgp: None,
    }
}

/// The data plane's outcome for new connections of clients that the record is for; `None` if they get a backend.
fn refusal(key: &ServiceKey, record: &Service) -> Option<Outcome> {
    admission::clients(record, || true).allow(key.protocol).err()
}

fn without_backends(key: &ServiceKey, record: &Service) -> &'static str {
    let refusal = refusal(key, &Service { backends_count: 0, ..*record });
    if refusal.is_some_and(|outcome| outcome.verdict() == Verdict::Drop) { "drop" } else { "reject" }
}

fn unserved(key: &ServiceKey, record: &Service) -> Vec<Unserved> {
    let internal = refusal(key, &record.for_client(true));
    // Frontends for sockets have no external clients.
    let is_for_sockets = record.flags & service_flags::SOCKETS_ONLY != 0;
    let external = if is_for_sockets { internal } else { refusal(key, &record.for_client(false)) };
    let found = if internal == external {
        vec![(Clients::All, external)]
    } else {
        vec![(Clients::External, external), (Clients::Internal, internal)]
    };
    found.into_iter().filter_map(|(clients, outcome)| Some(Unserved { clients, outcome: outcome? })).collect()
}

impl FrontendView {
    /// Position of a frontend's kind in sorted output; cluster IPs come first.
    fn kind_order(&self) -> usize {
        ["ClusterIP", "NodePort", "LoadBalancer", "ExternalIP"]
            .iter()
            .position(|kind| *kind == self.kind)
            .unwrap_or(usize::MAX)
    }
}

fn backend(contents: &Contents, backend: &Backend) -> BackendView {
    let address = IpAddr::from(backend.address);
    let unknown = EndpointLabels::default();
    let labels = contents.endpoint_labels.get(&address).map_or(&unknown, AsRef::as_ref);
    let EndpointLabels { node, zone, pod } = labels;
    let text = |label: &Option<std::sync::Arc<str>>| label.as_deref().map(str::to_owned);
    BackendView {
        address,
        port: backend.port,
        state: if backend.flags & backend_flags::TERMINATING == 0 { "active" } else { "terminating" },
        node: text(node),
        zone: text(zone),
        pod: text(pod),
        flows: None,
        traffic: None,
    }
}

/// Sets each backend's number of live flows, from the tracked connections and the connections of sockets, and its
/// traffic, which only tracked connections have.
pub(super) fn count_flows(
    services: &mut [ServiceView],
    connections: &[Connection],
    sockets: &BTreeMap<SocketCounter, SocketCounts>,
) {
    let mut counts: BTreeMap<(u32, IpAddr, u16), (u64, TrafficView)> = BTreeMap::new();
    for Connection { forward, reply, .. } in connections {
        let Tuple { destination, destination_port, .. } = forward.to;
        let (flows, traffic) =
            counts.entry((forward.service, destination.into(), destination_port)).or_default();
        *flows += u64::from(!Phase::of_entry(forward, reply.as_ref()).is_over());
        traffic.add(forward, reply.as_ref());
    }
    for (SocketCounter { service, backend, .. }, socket_counts) in sockets {
        let (flows, _) = counts.entry((*service, backend.address.into(), backend.port)).or_default();
        *flows += socket_counts.active();
    }
    for service in services {
        for backend in &mut service.backends {
            let key = (service.id, backend.address, backend.port);
            let (flows, traffic) = counts.get(&key).copied().unwrap_or_default();
            (backend.flows, backend.traffic) = (Some(flows), Some(traffic));
        }
    }
}

/// The name of an IP protocol as Kubernetes spells it; `unknown` unless it is TCP, UDP or SCTP.
pub(super) fn protocol_name(number: u8) -> &'static str {
    lb_core::model::Protocol::from_number(number).map_or("unknown", lb_core::model::Protocol::as_str)
}

/// Test data: contents of the maps, and a flow.
#[cfg(test)]
pub(super) mod testdata {
    use bytemuck::Zeroable as _;
    use lb_common::{
        Address,
        conntrack::{Flow, Tick, flow_flags, seen},
        protocol,
    };
    use lb_core::model::{ObjectName, Protocol, ServicePortName};

    use super::*;

    fn key(address: &str, port: u16, protocol: u8) -> ServiceKey {
        ServiceKey::new(ip(address), port, protocol)
    }

    fn ip(text: &str) -> Address {
        text.parse::<IpAddr>().unwrap().into()
    }

    fn labels(
        namespace: &str,
        name: &str,
        port: &str,
        protocol: Protocol,
        node_port: Option<u16>,
    ) -> ServiceLabels {
        let name = ServicePortName { service: ObjectName::new(namespace, name), port: port.into(), protocol };
        ServiceLabels { name, node_port }
    }

    pub(in crate::commands) fn contents() -> Contents {
        let web = Service {
            id: 7,
            backends_base: 64,
            backends_count: 2,
            affinity_seconds: 10800,
            ..Service::zeroed()
        };
        let web_v6 = Service { backends_base: 80, backends_count: 1, ..web };
        let dns = Service { id: 9, ..Service::zeroed() };
        let backend = |address, flags| Backend {
            address: ip(address),
            port: 8080,
            flags,
            weight: 1,
            active_flows_slot: 0,
        };
        let pod =
            EndpointLabels { node: Some("a".into()), zone: Some("z1".into()), pod: Some("web-0".into()) };
        Contents {
            frontends: BTreeMap::from([
                (key("10.96.0.10", 80, protocol::TCP), web),
                (key("fd00:10:96::a", 80, protocol::TCP), web_v6),
                (key("10.96.0.53", 53, protocol::UDP), dns),
            ]),
            backends: BTreeMap::from([
                (64, backend("10.1.0.5", 0)),
                (65, backend("10.1.0.6", backend_flags::TERMINATING)),
                (80, backend("fd00::5", 0)),
                (90, backend("10.1.0.9", 0)),
            ]),
            service_labels: BTreeMap::from([
                (7, labels("default", "web", "http", Protocol::Tcp, Some(30_080))),
                (9, labels("kube-system", "dns", "", Protocol::Udp, None)),
            ]),
            endpoint_labels: BTreeMap::from([("10.1.0.5".parse().unwrap(), pod.into())]),
            ..Contents::default()
        }
    }

    /// A Service with external addresses of every kind, under `externalTrafficPolicy: Local`.
    pub(in crate::commands) fn exposed() -> Contents {
        let internal = Service {
            id: 7,
            backends_base: 64,
            backends_count: 1,
            flags: service_flags::MASQUERADE_EXTERNAL,
            ..Service::zeroed()
        };
        let flags = service_flags::SHORT_CIRCUIT | service_flags::DROP_WITHOUT_BACKENDS;
        let external = |kind: FrontendKind| Service {
            internal_base: 65,
            internal_count: 2,
            kind: kind as u8,
            flags,
            ..internal
        };
        let backend = |address, flags| Backend {
            address: ip(address),
            port: 8080,
            flags,
            weight: 1,
            active_flows_slot: 0,
        };
        let here = backend("10.1.0.5", backend_flags::LOCAL);
        Contents {
            frontends: BTreeMap::from([
                (key("10.96.0.10", 80, protocol::TCP), internal),
                (key("192.0.2.1", 30_080, protocol::TCP), external(FrontendKind::NodePort)),
                (key("198.51.100.1", 80, protocol::TCP), external(FrontendKind::LoadBalancer)),
                (key("203.0.113.7", 80, protocol::TCP), external(FrontendKind::ExternalIp)),
            ]),
            backends: BTreeMap::from([(64, here), (65, here), (66, backend("10.1.0.6", 0))]),
            service_labels: BTreeMap::from([(
                7,
                labels("default", "web", "http", Protocol::Tcp, Some(30_080)),
            )]),
            source_ranges: [
                SourceRangeKey::new(7, ip("192.0.2.0"), 24),
                SourceRangeKey::new(7, ip("2001:db8::"), 32),
            ]
            .into(),
            ..Contents::default()
        }
    }

    /// An established connection to the first backend of the first Service, idle for 39 s at tick 100.
    pub(in crate::commands) fn flow() -> Connection {
        let from = Tuple::new(ip("192.0.2.1"), ip("10.96.0.10"), 40_000, 80, protocol::TCP);
        let to = Tuple { destination: ip("10.1.0.5"), destination_port: 8080, ..from };
        let then = Tick(63);
        let mut forward = Flow::new(&from, &to, 7, 0, then);
        let mut reply = Flow::new(&to.reversed(), &from.reversed(), 7, flow_flags::reverse(0), then);
        forward.seen = seen::PACKET | seen::SYN | seen::ACK;
        reply.seen = forward.seen;
        Connection { from, forward, reply: Some(reply), masqueraded: None }
    }
}

#[cfg(test)]
mod tests {
    use lb_common::{
        Endpoint,
        conntrack::{flow_flags, seen},
    };
    use serde_json::json;

    use super::*;

    #[test]
    fn json_has_the_documented_fields() {
        let services = services(&testdata::contents());
        let backend = |address, state, node, zone, pod| {
            let nothing = serde_json::Value::Null;
            let text = |text: Option<&str>| text.map_or(nothing.clone(), Into::into);
            json!({"address": address, "port": 8080, "state": state,
                "node": text(node), "zone": text(zone), "pod": text(pod)})
        };
        let expected = json!({
            "namespace": "default", "name": "web", "port": 80, "portName": "http", "protocol": "TCP", "nodePort": 30080,
            "frontends": [
                {"address": "10.96.0.10", "port": 80, "kind": "ClusterIP", "slot": 64, "slots": 2,
                    "masquerade": "none", "withoutBackends": "reject"},
                {"address": "fd00:10:96::a", "port": 80, "kind": "ClusterIP", "slot": 80, "slots": 1,
                    "masquerade": "none", "withoutBackends": "reject"},
            ],
            "externalTrafficPolicy": null, "sourceRanges": [],
            "backends": [
                backend("10.1.0.5", "active", Some("a"), Some("z1"), Some("web-0")),
                backend("10.1.0.6", "terminating", None, None, None),
                backend("fd00::5", "active", None, None, None),
            ],
            "sessionAffinity": "ClientIP", "sessionAffinitySeconds": 10800, "scheduler": "random", "id": 7,
        });
        assert_eq!(serde_json::to_value(&services).unwrap()[0], expected);
        assert_eq!(services.len(), 2);
    }

    #[test]
    fn every_kind_of_frontend_shows_its_policy_and_both_lists_of_backends() {
        let contents = testdata::exposed();
        let services = services(&contents);
        let view = serde_json::to_value(&services).unwrap();
        let frontend = |address: &str, port: u16, kind: &str| {
            json!({"address": address, "port": port, "kind": kind, "slot": 64, "slots": 1, "internalSlot": 65,
                "internalSlots": 2, "masquerade": "none", "withoutBackends": "drop"})
        };
        let cluster_ip = json!({"address": "10.96.0.10", "port": 80, "kind": "ClusterIP", "slot": 64, "slots": 1,
            "masquerade": "outsiders", "withoutBackends": "reject"});
        let expected = json!([
            cluster_ip,
            frontend("192.0.2.1", 30080, "NodePort"),
            frontend("198.51.100.1", 80, "LoadBalancer"),
            frontend("203.0.113.7", 80, "ExternalIP"),
        ]);
        assert_eq!(view[0]["frontends"], expected);
        assert_eq!((services.len(), &view[0]["port"]), (1, &json!(80)));
        assert_eq!(view[0]["externalTrafficPolicy"], "Local");
        assert_eq!(view[0]["sourceRanges"], json!(["192.0.2.0/24", "2001:db8::/32"]));
        let backends: Vec<_> =
            services[0].backends.iter().map(|backend| backend.address.to_string()).collect();
        assert_eq!(backends, ["10.1.0.5", "10.1.0.6"]);
    }

    #[test]
    fn north_south_mode_of_remote_backends_is_shown() {
        let mode = |change: fn(&mut Service)| {
            let mut contents = testdata::exposed();
            contents.frontends.values_mut().for_each(change);
            services(&contents)[0].north_south_mode
        };
        assert_eq!(mode(|_| {}), None, "a Local policy");
        assert_eq!(mode(|record| record.flags &= !service_flags::SHORT_CIRCUIT), Some("snat"));
        assert_eq!(mode(|record| record.flags = service_flags::DSR), Some("dsr"));
    }

    #[test]
    fn proxy_protocol_header_is_shown() {
        let shown = |flags| {
            let mut contents = testdata::exposed();
            contents.frontends.values_mut().for_each(|record| record.flags |= flags);
            services(&contents)[0].proxy_protocol
        };
        assert_eq!((shown(0), shown(service_flags::PROXY_PROTOCOL)), (None, Some("v2")));
    }

    #[test]
    fn weights_are_shown_only_if_the_scheduler_uses_them() {
        let mut contents = testdata::contents();
        contents.backends.get_mut(&65).unwrap().weight = 0;
        contents.frontends.values_mut().for_each(|record| record.scheduler = Scheduler::Maglev as u8);
        let view = serde_json::to_value(services(&contents)).unwrap();
        assert_eq!(
            (&view[0]["scheduler"], &view[0]["weights"]),
            (&json!("mh"), &json!({"10.1.0.6:8080": 0}))
        );
        assert_eq!(view[1].get("weights"), None);
    }

    #[test]
    fn service_port_is_shown_without_a_cluster_ip_frontend() {
        let mut contents = testdata::exposed();
        contents.frontends.retain(|_, record| record.kind != FrontendKind::ClusterIp as u8);
        assert_eq!(services(&contents)[0].port, 80);
    }

    #[test]
    fn unnamed_service_port_is_shown() {
        let mut contents = testdata::contents();
        contents.service_labels.clear();
        let names: Vec<_> = services(&contents).into_iter().map(|service| service.name).collect();
        assert_eq!(names, ["#7", "#9"]);
    }

    #[test]
    fn flow_count_includes_flows_with_one_entry() {
        let tunnelled = |seen| {
            let mut flow = testdata::flow();
            flow.forward.flags = flow_flags::ROUTED | flow_flags::TUNNEL;
            (flow.forward.seen, flow.reply) = (seen, None);
            flow
        };
        let mut half = testdata::flow();
        half.reply = None;
        let mut services = services(&testdata::contents());
        count_flows(
            &mut services,
            &[tunnelled(seen::SYN | seen::ACK), tunnelled(seen::SYN | seen::RST), half],
            &BTreeMap::new(),
        );
        let traffic = services[0].backends[0].traffic.unwrap();
        assert_eq!((services[0].backends[0].flows, traffic.packets_answered), (Some(2), 0));
    }

    #[test]
    fn flow_count_includes_only_live_flows_of_the_service() {
        let mut services = services(&testdata::contents());
        let mut over = testdata::flow();
        over.forward.seen |= seen::RST;
        let mut other = testdata::flow();
        other.forward.service = 9;
        let BackendView { address, port, .. } = services[0].backends[0];
        let counter = |service| SocketCounter {
            service,
            active_flows_slot: 0,
            backend: Endpoint::new(address.into(), port),
        };
        let [own, others] = [services[0].id, 9].map(counter);
        let counts = SocketCounts { begun: 5, ended: 2 };
        let sockets = BTreeMap::from([(own, counts), (others, counts)]);
        count_flows(&mut services, &[testdata::flow(), over, other], &sockets);
        assert_eq!(
            services[0].backends.iter().map(|backend| backend.flows).collect::<Vec<_>>(),
            [Some(4), Some(0), Some(0)]
        );
    }
}
