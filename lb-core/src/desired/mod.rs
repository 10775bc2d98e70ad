//! The desired kernel state of one Service, a pure function of the Service, its EndpointSlices and the node.

mod categorize;
pub(crate) mod endpoints;
mod frontends;
mod probed;
mod source_ranges;

use std::{collections::BTreeSet, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use lb_common::{
    Backend, ConnectionLimits, FrontendKind, Scheduler, ServiceKey, backend_flags, service_flags,
};

use crate::{
    endpoint_key::EndpointKey,
    family::Family,
    model::{
        ConnectionTimeouts, EndpointSlice, Node, ObjectName, Protocol, Service, ServicePort, ServicePortName,
    },
    plan::{EndpointLabels, ServiceLabels},
    slow_start::{self, Shares},
    tables::Maglev,
};

use categorize::{Categories, Member};
pub use endpoints::Serving;
pub(crate) use endpoints::unique_labels;
pub(crate) use probed::{targets, usable};

/// The desired state of one port of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The name and node port of the service port.
    pub labels: ServiceLabels,
    /// `ClientIP` affinity timeout in seconds; 0 is no affinity.
    pub affinity_seconds: u32,
    /// How a backend is chosen.
    pub scheduler: Scheduler,
    /// Size and seed of the backends' tables, for the scheduler Maglev.
    pub maglev: Maglev,
    /// The frontends of the service port in order of their keys, each once.
    pub frontends: Vec<Frontend>,
    /// The backends of the frontends, as slices. Each slice is of one family, sorted and not empty, has no backend
    /// twice, and differs from all other slices.
    pub slices: Vec<Vec<Backend>>,
    /// When the agent ends connections.
    pub timeouts: ConnectionTimeouts,
    /// The limits on new connections, for the frontends with [`service_flags::LIMITED`].
    pub limits: ConnectionLimits,
    /// The networks that may use the frontends with [`service_flags::SOURCE_RANGES`].
    pub source_ranges: Vec<IpNet>,
    /// The endpoints of a UDP port that still serve, by family, regardless of policies, hints and termination.
    pub serving: [Serving; Family::ALL.len()],
    /// With a drain timeout, the endpoints that are ready and not unhealthy, including endpoints that traffic policies
    /// and hints exclude from new connections; else empty.
    pub ready: BTreeSet<EndpointKey>,
    /// The labels of the backends' addresses, also of addresses whose labels are all unset; sorted, each address once.
    pub endpoint_labels: Vec<(IpAddr, Arc<EndpointLabels>)>,
}

/// One address and port that clients connect to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frontend {
    /// The key in `SERVICES`.
    pub key: ServiceKey,
    /// The kind of its address.
    pub kind: FrontendKind,
    /// The slice of [`Port::slices`] that clients get; `None` is no backend.
    pub slice: Option<usize>,
    /// With [`service_flags::SHORT_CIRCUIT`], the slice that internal clients get.
    pub internal_slice: Option<usize>,
    /// See [`service_flags`].
    pub flags: u16,
}

impl Frontend {
    /// Whether the frontend has all of these flags.
    pub const fn has(&self, flags: u16) -> bool {
        self.flags & flags == flags
    }
}

impl Port {
    /// Whether a frontend refers to that slice.
    pub(crate) fn uses(&self, slice: usize) -> bool {
        self.frontends.iter().any(|f| f.slice == Some(slice) || f.internal_slice == Some(slice))
    }

    /// Whether a frontend limits new connections.
    pub(crate) fn is_limited(&self) -> bool {
        self.frontends.iter().any(|frontend| frontend.has(service_flags::LIMITED))
    }

    /// Whether a frontend of that family checks the source ranges.
    pub(crate) fn checks_sources(&self, family: Family) -> bool {
        let of_family = |f: &&Frontend| Family::of(f.key.address.into()) == family;
        self.frontends.iter().filter(of_family).any(|f| f.has(service_flags::SOURCE_RANGES))
    }
}

/// The desired state of each port of a Service, in order of their names.
pub fn desired<'a, S>(name: &ObjectName, service: &Service, slices: S, node: &Node) -> Vec<Port>
where
    S: Iterator<Item = &'a EndpointSlice> + Clone,
{
    let port = |port| desired_port(name, service, port, slices.clone(), node);
    let mut ports: Vec<Port> = service.ports.iter().map(port).collect();
    ports.sort_by(|a, b| a.labels.name.cmp(&b.labels.name));
    ports.dedup_by(|later, first| later.labels.name == first.labels.name);
    ports
}

fn desired_port<'a, S>(
    name: &ObjectName,
    service: &Service,
    port: &ServicePort,
    slices: S,
    node: &Node,
) -> Port
where
    S: Iterator<Item = &'a EndpointSlice> + Clone,
{
    let port_name =
        ServicePortName { service: name.clone(), port: port.name.clone(), protocol: port.protocol };
    let settings = service.settings.as_deref();
    let mut desired = Port {
        labels: ServiceLabels { name: port_name, node_port: port.node_port },
        affinity_seconds: service.affinity_seconds.unwrap_or(0),
        scheduler: service.scheduler(&node.policy),
        maglev: Maglev {
            size: settings.and_then(|s| s.table_size).unwrap_or(node.policy.maglev.size),
            ..node.policy.maglev
        },
        frontends: Vec::new(),
        slices: Vec::new(),
        timeouts: service.timeouts(),
        limits: service.limits(),
        source_ranges: source_ranges::source_ranges(service, node),
        serving: Default::default(),
        ready: BTreeSet::new(),
        endpoint_labels: Vec::new(),
    };
    for family in Family::ALL.into_iter().filter(|family| service.has(*family)) {
        let endpoints = endpoints::of_port(port, family, slices.clone());
        if port.protocol == Protocol::Udp {
            desired.serving[family as usize] = endpoints::serving(&endpoints);
        }
        let health = probed::Health::of(service, port.protocol, node);
        if desired.timeouts.drain.is_some() {
            desired.ready.extend(probed::ready(&endpoints, &health));
        }
        let cross_zone = settings.and_then(|settings| settings.cross_zone);
        let categories = categorize::categorize(&endpoints, node, cross_zone, &health);
        desired.add_family(service, port, family, &categories, node);
    }
    desired.frontends.sort_by_key(|frontend| frontend.key);
    unique_labels(&mut desired.endpoint_labels);
    desired
}

impl Port {
    fn add_family(
        &mut self,
        service: &Service,
        port: &ServicePort,
        family: Family,
        endpoints: &Categories<'_>,
        node: &Node,
    ) {
        let frontends = frontends::PortFrontends::new(service, port, family, node);
        let cluster = if frontends.use_cluster() { &endpoints.cluster[..] } else { &[] };
        let local = if frontends.use_local() { &endpoints.local[..] } else { &[] };
        let warming = node.warming.get(&self.labels.name.service);
        let backends = Backends { service, node, warming, dsr: uses_dsr(service, port, node) };
        let needs_dsr = backends.dsr && frontends.leads_elsewhere();
        let named = if needs_dsr { &endpoints.here[..] } else { local };
        let slices = frontends::Slices {
            cluster: self.slice(backends.of(cluster)),
            local: self.slice(backends.of(local)),
            dsr: if needs_dsr { self.slice(backends.with_hidden(endpoints)) } else { None },
            any: endpoints.any,
        };
        for (_, endpoint) in cluster.iter().chain(named) {
            // An endpoint without labels also gets an entry of `ENDPOINT_NAMES`: the programs recognise addresses of
            // endpoints by these entries.
            self.endpoint_labels.push((endpoint.address, Arc::new(endpoints::labels(endpoint))));
        }
        let has_ranges = source_ranges::has_ranges(&self.source_ranges, family);
        self.frontends.extend(frontends.frontends(&slices, has_ranges, node));
    }

    /// The index in `slices` of a slice with these backends, added if it is new; `None` if `backends` is empty.
    fn slice(&mut self, backends: Vec<Backend>) -> Option<usize> {
        if backends.is_empty() {
            return None;
        }
        let known = self.slices.iter().position(|slice| *slice == backends);
        Some(known.unwrap_or_else(|| {
            self.slices.push(backends);
            self.slices.len() - 1
        }))
    }
}

/// Whether backends of the port on other nodes answer external clients directly. Backends that get a PROXY protocol
/// header cannot answer directly: this node shifts the sequence numbers of their packets, so it must see these packets.
fn uses_dsr(service: &Service, port: &ServicePort, node: &Node) -> bool {
    if service.has_proxy_protocol(port.protocol) {
        return false;
    }
    let asked = service.settings.as_ref().and_then(|settings| settings.north_south);
    asked.unwrap_or(node.policy.north_south).uses_dsr(port.protocol)
}

/// Converts endpoints of a Service to backends.
#[derive(Clone, Copy)]
struct Backends<'a> {
    service: &'a Service,
    node: &'a Node,
    /// The endpoints of the Service in slow start, with their present shares; `None` if there are none.
    warming: Option<&'a Shares>,
    /// See [`uses_dsr`].
    dsr: bool,
}

impl Backends<'_> {
    fn of(&self, members: &[Member<'_>]) -> Vec<Backend> {
        let mut backends: Vec<Backend> = members.iter().map(|member| self.one(member)).collect();
        if let Some(shares) = self.warming {
            slow_start::apply(shares, &mut backends);
        }
        backends
    }

    fn one(&self, (key, endpoint): &Member<'_>) -> Backend {
        let settings = self.service.settings.as_deref();
        let mut backend = endpoints::backend(*key, endpoint, self.node);
        backend.weight = settings.map_or(1, |settings| settings.weight(endpoint));
        if self.dsr && endpoints::is_elsewhere(endpoint, self.node) {
            backend.flags |= backend_flags::PEER;
        }
        backend
    }

    /// The backends of `cluster`, and the other endpoints of `Categories::here` with weight 0: those whose hints name
    /// other nodes or zones, those that this node finds unhealthy, and, if no endpoint on this node is ready, those
    /// that still serve while they terminate. These endpoints are included because packets that other nodes send
    /// through a tunnel must find their backend.
    fn with_hidden(&self, endpoints: &Categories<'_>) -> Vec<Backend> {
        let mut backends = self.of(&endpoints.cluster);
        let in_cluster = |key| endpoints.cluster.binary_search_by_key(key, |(key, _)| *key).is_ok();
        let hidden = endpoints.here.iter().filter(|(key, _)| !in_cluster(key));
        backends.extend(hidden.map(|member| Backend { weight: 0, ..self.one(member) }));
        backends.sort_unstable();
        backends
    }
}
