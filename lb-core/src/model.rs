//! The objects of the Kubernetes API, reduced to what a service proxy needs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use ipnet::IpNet;
use lb_common::Scheduler;

pub use crate::protocol::Protocol;
use crate::{
    family::{Families, Family},
    north_south::NorthSouthMode,
    probe::{check::Check, target::Target},
    slow_start::Shares,
    tables::{Maglev, TableSize},
};

/// `namespace/name` of a namespaced object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    /// `metadata.namespace`
    pub namespace: Arc<str>,
    /// `metadata.name`
    pub name: Arc<str>,
}

impl ObjectName {
    /// The name `namespace/name`.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One port of one Service: the unit that has frontends and backends.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServicePortName {
    /// The Service.
    pub service: ObjectName,
    /// `spec.ports[].name`; empty for an unnamed port.
    pub port: Arc<str>,
    /// `spec.ports[].protocol`
    pub protocol: Protocol,
}

impl ServicePortName {
    /// The name without its protocol: `default/web:http`, or `default/web` for an unnamed port.
    pub fn without_protocol(&self) -> impl fmt::Display {
        let Self { service, port, .. } = self;
        let separator = if port.is_empty() { "" } else { ":" };
        fmt::from_fn(move |f| write!(f, "{service}{separator}{port}"))
    }
}

impl fmt::Display for ServicePortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.without_protocol(), self.protocol.as_str())
    }
}

/// A Service that has virtual addresses. Headless and ExternalName Services are never converted to it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Service {
    /// `spec.clusterIPs`, at most one of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.ports`, in their order.
    pub ports: Vec<ServicePort>,
    /// `spec.sessionAffinityConfig.clientIP.timeoutSeconds` under `ClientIP` affinity.
    pub affinity_seconds: Option<u32>,
    /// How clients outside the cluster reach the Service, apart from node ports.
    pub external: External,
    /// `spec.internalTrafficPolicy`: which endpoints clients of cluster IPs get.
    pub internal_policy: TrafficPolicy,
    /// What its annotations set; `None` uses the settings of the node.
    pub settings: Option<Arc<ServiceSettings>>,
}

/// The settings of a Service that its annotations make.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ServiceSettings {
    /// Annotation `lb.dev/scheduler`.
    pub scheduler: Option<Scheduler>,
    /// Annotation `lb.dev/maglev-table-size`.
    pub table_size: Option<TableSize>,
    /// Annotation `lb.dev/north-south-mode`: how packets reach backends on other nodes.
    pub north_south: Option<NorthSouthMode>,
    /// Annotation `lb.dev/weights`.
    pub weights: BTreeMap<Member, u32>,
    /// Annotation `lb.dev/slow-start`: how long the share of an endpoint grows after it has become usable.
    pub slow_start: Option<Duration>,
    /// The annotation of AWS for cross-zone load balancing: `false` prefers endpoints in the zone of this node, `true` uses
    /// those of all zones, and both override hints.
    pub cross_zone: Option<bool>,
    /// Annotation `lb.dev/health-check` and those of clouds that mean the same.
    pub check: Option<Arc<Check>>,
    /// Annotation `lb.dev/fail-closed`: whether new connections are refused while all endpoints are unhealthy.
    pub fail_closed: bool,
    /// The annotations about access logs.
    pub flow_log: FlowLogPolicy,
    /// When the agent ends connections.
    pub timeouts: ConnectionTimeouts,
    /// Annotation `lb.dev/proxy-protocol` and those of AWS that mean the same: whether backends of TCP ports get a PROXY
    /// protocol header, version 2.
    pub proxy_protocol: bool,
    /// Invalid annotations.
    pub annotation_errors: Vec<AnnotationError>,
    /// Annotations of clouds that have no effect here.
    pub ignored: Vec<IgnoredAnnotation>,
}

/// What the annotations of a Service say about the flow log; `None` uses the settings of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct FlowLogPolicy {
    /// Whether the flow log has the connections of the Service.
    pub logged: Option<bool>,
    /// Time between two lines of a long connection.
    pub interval: Option<Duration>,
}

/// When the agent ends connections of a Service, as far as annotations set it; `None` is never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ConnectionTimeouts {
    /// Time without a packet in either direction.
    pub idle: Option<Duration>,
    /// Time after the Service has lost the connection's backend.
    pub drain: Option<Duration>,
}

impl ConnectionTimeouts {
    /// Whether no connection is ended.
    pub const fn is_unset(&self) -> bool {
        self.idle.is_none() && self.drain.is_none()
    }
}

impl ServiceSettings {
    /// The weight of an endpoint: that of its address, else of its pod, its node, its zone, else 1.
    pub fn weight(&self, endpoint: &Endpoint) -> u32 {
        let Endpoint { address, pod, node, zone, .. } = endpoint;
        let names = [
            Some(Member::Address(*address)),
            pod.clone().map(Member::Pod),
            node.clone().map(Member::Node),
            zone.clone().map(Member::Zone),
        ];
        names.iter().flatten().find_map(|name| self.weights.get(name)).copied().unwrap_or(1)
    }
}

/// The endpoints that a weight applies to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Member {
    /// The endpoint with this address.
    Address(IpAddr),
    /// The endpoints of the pod of this name.
    Pod(Arc<str>),
    /// The endpoints on the node of this name.
    Node(Arc<str>),
    /// The endpoints in the zone of this name.
    Zone(Arc<str>),
}

/// An annotation of a cloud that has no effect here.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IgnoredAnnotation {
    /// The annotation's name.
    pub annotation: Arc<str>,
    /// The annotation's value.
    pub value: Arc<str>,
    /// Why it has no effect, and what to do instead.
    pub why: &'static str,
}

/// An invalid annotation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AnnotationError {
    /// The annotation's name.
    pub annotation: &'static str,
    /// The annotation's value.
    pub value: String,
    /// The error in the value, and what would be valid.
    pub why: String,
}

impl Service {
    /// The health check of its endpoints.
    pub fn check(&self) -> Option<&Arc<Check>> {
        self.settings.as_ref()?.check.as_ref()
    }

    /// How its backends are chosen, on a node with this policy.
    pub fn scheduler(&self, policy: &Policy) -> Scheduler {
        self.settings.as_ref().and_then(|settings| settings.scheduler).unwrap_or(policy.scheduler)
    }

    /// When the agent ends its connections.
    pub fn timeouts(&self) -> ConnectionTimeouts {
        self.settings.as_ref().map(|settings| settings.timeouts).unwrap_or_default()
    }

    /// Whether backends of a port get a PROXY protocol header. Only TCP has a connection that it could precede.
    pub fn has_proxy_protocol(&self, protocol: Protocol) -> bool {
        let asks = self.settings.as_ref().is_some_and(|settings| settings.proxy_protocol);
        asks && protocol == Protocol::Tcp
    }

    /// The slow start that it asks for.
    pub fn slow_start(&self) -> Option<Duration> {
        self.settings.as_ref()?.slow_start
    }

    /// Whether the Service has that family. Addresses of other families are not served, including external ones.
    pub fn has(&self, family: Family) -> bool {
        self.cluster_ips.iter().any(|ip| Family::of(*ip) == family)
    }
}

/// How clients outside the cluster reach a Service. Its node ports are in its [`ServicePort`]s; `policy` applies to them,
/// too.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct External {
    /// `spec.externalIPs`: the valid ones, each once.
    pub ips: Vec<IpAddr>,
    /// `status.loadBalancer.ingress[].ip` of a `LoadBalancer` Service, without those of `ipMode: Proxy`.
    pub load_balancer_ips: Vec<IpAddr>,
    /// `spec.loadBalancerSourceRanges`: the sources that may use `load_balancer_ips`; empty means all.
    pub source_ranges: Vec<IpNet>,
    /// `spec.externalTrafficPolicy`: which endpoints external clients get.
    pub policy: TrafficPolicy,
    /// `spec.healthCheckNodePort` of a `LoadBalancer` Service with `externalTrafficPolicy: Local`.
    pub health_check_node_port: Option<u16>,
}

/// Which endpoints clients get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TrafficPolicy {
    /// The endpoints of the whole cluster.
    #[default]
    Cluster,
    /// The endpoints on this node.
    Local,
}

/// One of `spec.ports` of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// `name`; empty for an unnamed port. Endpoint ports are matched by name and protocol, never by `targetPort`.
    pub name: Arc<str>,
    /// `protocol`
    pub protocol: Protocol,
    /// `port`
    pub port: u16,
    /// `nodePort`
    pub node_port: Option<u16>,
}

/// An EndpointSlice of a Service; one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// The Service of the slice: its namespace and the label `kubernetes.io/service-name`.
    pub service: ObjectName,
    /// `ports`, those with a name and a number.
    pub ports: Vec<EndpointPort>,
    /// `endpoints`, those with an address of the slice's family.
    pub endpoints: Vec<Endpoint>,
}

/// One of `ports` of an EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointPort {
    /// `name`; empty for an unnamed port.
    pub name: Arc<str>,
    /// `protocol`
    pub protocol: Protocol,
    /// `port`
    pub port: u16,
}

/// One of `endpoints` of an EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// `addresses[0]`; the others are ignored, as in kube-proxy.
    pub address: IpAddr,
    /// `conditions.ready`; absent is true.
    pub ready: bool,
    /// `conditions.serving`; absent is true.
    pub serving: bool,
    /// `conditions.terminating`; absent is false.
    pub terminating: bool,
    /// `nodeName`
    pub node: Option<Arc<str>>,
    /// `zone`
    pub zone: Option<Arc<str>>,
    /// `targetRef.name` of a Pod.
    pub pod: Option<Arc<str>>,
    /// `hints`; `None` without any, as for most endpoints.
    pub hints: Option<Arc<Hints>>,
}

/// `hints` of an endpoint: the zones and nodes that should use it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Hints {
    /// `forZones[].name`
    pub zones: Vec<Arc<str>>,
    /// `forNodes[].name`
    pub nodes: Vec<Arc<str>>,
}

/// Settings that never change while the agent runs.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Policy {
    /// Name of this node, as endpoints name it.
    pub node_name: Arc<str>,
    /// `--masquerade-all`: every client of a cluster IP is masqueraded.
    pub masquerade_all: bool,
    /// `--scheduler`: how backends are chosen for Services without the annotation.
    pub scheduler: Scheduler,
    /// `--maglev-seed`, and `--maglev-table-size` for Services without the annotation.
    pub maglev: Maglev,
    /// `--north-south-mode`, for Services without the annotation.
    pub north_south: NorthSouthMode,
}

/// The state of this node.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Node {
    /// The settings from the start of the agent.
    pub policy: Policy,
    /// The node's zone.
    pub zone: Option<Arc<str>>,
    /// The node's addresses.
    pub addresses: NodeAddresses,
    /// The families in which the node can currently distinguish internal clients from external ones
    /// (`--detect-local-mode`). Without `masquerade_all`, clients of cluster IPs are masqueraded only in these.
    pub detects_inside: Families,
    /// The targets that this node has found unhealthy.
    pub unhealthy: BTreeSet<Target>,
    /// The Services with warming endpoints.
    pub warming: BTreeMap<ObjectName, Shares>,
}

/// Addresses of this node; each list sorted, each address once.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct NodeAddresses {
    /// All addresses of the node except loopback (`127.0.0.0/8`, `::1`) and IPv6 link-local ones.
    pub own: Vec<IpAddr>,
    /// The address of each family that other nodes use for this one; it is one of `own`.
    pub primary: Vec<IpAddr>,
    /// The addresses that serve node ports (`--nodeport-addresses`); loopback addresses may be among them.
    pub node_ports: Vec<IpAddr>,
}

impl NodeAddresses {
    /// Whether the node has the address; false for loopback and IPv6 link-local addresses.
    pub fn is_own(&self, address: &IpAddr) -> bool {
        self.own.binary_search(address).is_ok()
    }
}

/// A change from a source to the store. `None` stands for a deleted object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A Service has these properties, or no longer has virtual addresses.
    Service(ObjectName, Option<Service>),
    /// An EndpointSlice has these contents, or is deleted; the name is the slice's own.
    EndpointSlice(ObjectName, Option<EndpointSlice>),
}

/// The event in the cluster that triggered a change of an EndpointSlice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trigger {
    /// The family of the slice.
    pub family: Family,
    /// Annotation `endpoints.kubernetes.io/last-change-trigger-time`.
    pub time: SystemTime,
}

/// An event from a source to the task that writes to the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// Changes to apply together.
    Changes(Vec<Change>),
    /// The triggers of the next `Changes`: one for each EndpointSlice with the annotation.
    Triggered(Vec<Trigger>),
    /// The zone of this node: label `topology.kubernetes.io/zone` of its Node.
    Zone(Option<Arc<str>>),
    /// The new addresses of this node.
    NodeAddresses(NodeAddresses),
    /// The families in which the node can now distinguish internal clients from external ones.
    DetectsInside(Families),
    /// Endpoints have become unhealthy (`true`), or usable again (`false`).
    Unhealthy(Vec<(Target, bool)>),
    /// The source has sent every readable object at least once.
    Synchronised,
    /// The source has sent everything except objects of these Services, which it could not read: the agent may delete
    /// all else in the kernel. Comes right before `Synchronised`, and perhaps again later with fewer and fewer
    /// Services.
    CompleteBut(BTreeSet<ObjectName>),
    /// The source has sent everything: the agent may delete all else in the kernel. Comes once, right before
    /// `Synchronised` or later.
    Complete,
}
