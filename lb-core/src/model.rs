//! The objects of the Kubernetes API, reduced to what a service proxy needs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use ipnet::IpNet;
use lb_common::{ConnectionLimits, Scheduler};

pub use crate::protocol::Protocol;
use crate::{
    family::{Families, Family},
    north_south::NorthSouthMode,
    probe::{check::Check, target::Target},
    slow_start::Shares,
    tables::{Maglev, TableSize},
};

/// Namespace and name of an object, displayed as `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    /// `metadata.namespace`
    pub namespace: Arc<str>,
    /// `metadata.name`
    pub name: Arc<str>,
}

impl ObjectName {
    /// Creates an object name from a namespace and a name within it.
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
    /// Name of the Service that has the port.
    pub service: ObjectName,
    /// `spec.ports[].name`; empty for an unnamed port.
    pub port: Arc<str>,
    /// `spec.ports[].protocol`
    pub protocol: Protocol,
}

impl ServicePortName {
    /// `namespace/name:port`, such as `default/web:http`, or `default/web` for an unnamed port.
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

/// A Service that has virtual addresses. Headless and ExternalName Services are never converted to this type.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Service {
    /// The cluster IPs, `spec.clusterIPs`, at most one of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// Whether another proxy serves the Service. If so, `cluster_ips` is the only other field that is set: the node
    /// leaves packets to these addresses untouched.
    pub is_foreign: bool,
    /// The ports, `spec.ports`, in their order.
    pub ports: Vec<ServicePort>,
    /// Timeout of `ClientIP` affinity in seconds, `spec.sessionAffinityConfig.clientIP.timeoutSeconds`; `None` without
    /// affinity.
    pub affinity_seconds: Option<u32>,
    /// How external clients reach the Service, apart from node ports.
    pub external: External,
    /// `spec.internalTrafficPolicy`: which endpoints clients of cluster IPs get.
    pub internal_policy: TrafficPolicy,
    /// The settings from the Service's annotations, and the errors in these; `None` if there are neither.
    pub settings: Option<Arc<ServiceSettings>>,
}

/// The settings of a Service that its annotations set.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ServiceSettings {
    /// Annotation `lb.dev/scheduler`.
    pub scheduler: Option<Scheduler>,
    /// Annotation `lb.dev/maglev-table-size`: entries of the scheduler's table.
    pub table_size: Option<TableSize>,
    /// Annotation `lb.dev/north-south-mode`: how packets reach backends on other nodes.
    pub north_south: Option<NorthSouthMode>,
    /// Annotation `lb.dev/weights`: the weight of each endpoint or group of endpoints that it names.
    pub weights: BTreeMap<Member, u32>,
    /// Annotation `lb.dev/slow-start`: how long the share of an endpoint grows after the endpoint has become usable.
    pub slow_start: Option<Duration>,
    /// AWS's annotation for cross-zone load balancing: `false` prefers endpoints in the zone of this node, `true` uses
    /// those of all zones. Without the annotation (`None`), topology hints apply.
    pub cross_zone: Option<bool>,
    /// How the endpoints' health is checked, from the annotation `lb.dev/health-check` or equivalent ones of clouds.
    pub check: Option<Arc<Check>>,
    /// Annotation `lb.dev/fail-closed`: whether new connections are rejected while all endpoints are unhealthy.
    pub fail_closed: bool,
    /// Settings from annotations about access logs.
    pub flow_log: FlowLogPolicy,
    /// The timeouts after which the agent ends connections.
    pub timeouts: ConnectionTimeouts,
    /// Annotations `lb.dev/max-connections` and `lb.dev/max-connections-per-client`: limits on new connections, on each
    /// node.
    pub limits: ConnectionLimits,
    /// Annotation `lb.dev/proxy-protocol` and those of AWS that mean the same: whether backends of TCP ports get a
    /// PROXY protocol header (version 2).
    pub proxy_protocol: bool,
    /// Invalid annotations.
    pub annotation_errors: Vec<AnnotationError>,
    /// Annotations of clouds that have no effect.
    pub ignored: Vec<IgnoredAnnotation>,
}

/// What a Service's annotations say about the flow log; `None` leaves the node's settings in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct FlowLogPolicy {
    /// Whether the flow log has the Service's connections.
    pub logged: Option<bool>,
    /// Minimum time between two flow log lines of one open connection. A connection without a packet since its last
    /// line gets no line.
    pub interval: Option<Duration>,
}

/// The timeouts after which the agent ends connections of a Service, from its annotations; `None` means no timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct ConnectionTimeouts {
    /// Time without a packet in either direction.
    pub idle: Option<Duration>,
    /// Time since the Service lost the connection's backend.
    pub drain: Option<Duration>,
}

impl ConnectionTimeouts {
    /// Whether no timeout is set.
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

/// Which endpoints a weight applies to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Member {
    /// The endpoint with this address.
    Address(IpAddr),
    /// The endpoints of the pod with this name.
    Pod(Arc<str>),
    /// The endpoints on the node with this name.
    Node(Arc<str>),
    /// The endpoints in the zone with this name.
    Zone(Arc<str>),
}

/// A Service's annotation for a cloud's load balancer; it has no effect.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IgnoredAnnotation {
    /// The annotation's name.
    pub annotation: Arc<str>,
    /// The annotation's value.
    pub value: Arc<str>,
    /// Why the annotation has no effect; often also what to do instead.
    pub why: &'static str,
}

/// An annotation with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AnnotationError {
    /// The annotation's name.
    pub annotation: &'static str,
    /// The invalid value; if the annotation lists attributes, that of the invalid attribute.
    pub value: String,
    /// What is wrong with the value, or what would be valid.
    pub why: String,
}

impl Service {
    /// The health check of the Service's endpoints; `None` if they are not checked.
    pub fn check(&self) -> Option<&Arc<Check>> {
        self.settings.as_ref()?.check.as_ref()
    }

    /// The scheduler of the Service, by its annotation or else by the node's policy.
    pub fn scheduler(&self, policy: &Policy) -> Scheduler {
        self.settings.as_ref().and_then(|settings| settings.scheduler).unwrap_or(policy.scheduler)
    }

    /// The timeouts after which the agent ends connections of the Service.
    pub fn timeouts(&self) -> ConnectionTimeouts {
        self.settings.as_ref().map(|settings| settings.timeouts).unwrap_or_default()
    }

    /// The limits on new connections of each port.
    pub fn limits(&self) -> ConnectionLimits {
        self.settings.as_ref().map_or(ConnectionLimits::NONE, |settings| settings.limits)
    }

    /// Whether backends of a port of this protocol get a PROXY protocol header, which only a TCP connection can carry.
    pub fn has_proxy_protocol(&self, protocol: Protocol) -> bool {
        let asks = self.settings.as_ref().is_some_and(|settings| settings.proxy_protocol);
        asks && protocol == Protocol::Tcp
    }

    /// Duration of the slow start of the Service's endpoints; `None` without slow start.
    pub fn slow_start(&self) -> Option<Duration> {
        self.settings.as_ref()?.slow_start
    }

    /// Whether the Service has a cluster IP of this family. If it has none, the node serves none of the Service's
    /// addresses of this family.
    pub fn has(&self, family: Family) -> bool {
        self.cluster_ips.iter().any(|ip| Family::of(*ip) == family)
    }
}

/// How external clients reach a Service. The Service's node ports are in its [`ServicePort`]s; `policy` also applies to
/// node ports.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct External {
    /// `spec.externalIPs`: the valid ones, each once.
    pub ips: Vec<IpAddr>,
    /// `status.loadBalancer.ingress[].ip` of a `LoadBalancer` Service, only those of `ipMode: VIP` (the default).
    pub load_balancer_ips: Vec<IpAddr>,
    /// Those of `load_balancer_ips` that an agent gave to the Service, by the annotation
    /// [`GIVEN`](crate::load_balancer::GIVEN).
    pub given_ips: Vec<IpAddr>,
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
    /// Endpoints on all nodes.
    #[default]
    Cluster,
    /// Only endpoints on this node.
    Local,
}

/// One of `spec.ports` of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// `name`; empty for an unnamed port. Endpoint ports are matched by name and protocol, never by `targetPort`.
    pub name: Arc<str>,
    /// Transport protocol of the port.
    pub protocol: Protocol,
    /// The port's number at cluster IPs and external addresses.
    pub port: u16,
    /// The node port; `None` without one.
    pub node_port: Option<u16>,
}

/// An EndpointSlice of a Service; its endpoints are of one address family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// The Service of the slice: its namespace and the label `kubernetes.io/service-name`.
    pub service: ObjectName,
    /// The slice's ports whose `name` and `port` are set; the name may be empty.
    pub ports: Vec<EndpointPort>,
    /// The endpoints that have an address of the slice's family.
    pub endpoints: Vec<Endpoint>,
}

/// A port of an EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointPort {
    /// Name of the port, which is also the name of the Service port that it serves; empty for an unnamed port.
    pub name: Arc<str>,
    /// Transport protocol of the port.
    pub protocol: Protocol,
    /// The port's number at the endpoints.
    pub port: u16,
}

impl EndpointPort {
    /// Whether the endpoints serve the Service port `port` at this endpoint port.
    pub(crate) fn serves(&self, port: &ServicePort) -> bool {
        self.name == port.name && self.protocol == port.protocol
    }
}

/// An endpoint of an EndpointSlice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The endpoint's first address; others are ignored, as in kube-proxy.
    pub address: IpAddr,
    /// `conditions.ready`; true if unset.
    pub ready: bool,
    /// `conditions.serving`; true if unset.
    pub serving: bool,
    /// `conditions.terminating`; false if unset.
    pub terminating: bool,
    /// Name of the endpoint's node, from `nodeName`.
    pub node: Option<Arc<str>>,
    /// The endpoint's zone, from `zone`.
    pub zone: Option<Arc<str>>,
    /// Name of the endpoint's pod, from `targetRef`.
    pub pod: Option<Arc<str>>,
    /// The endpoint's `hints`; `None` for most endpoints, which have none.
    pub hints: Option<Arc<Hints>>,
}

impl Endpoint {
    /// Whether new flows may go to the endpoint: it is ready, or it is terminating and still serves.
    pub const fn may_get_flows(&self) -> bool {
        self.ready || self.serves_terminating()
    }

    /// Whether the endpoint is terminating and still serves (KEP-1669). Such endpoints get new flows while no endpoint
    /// is ready.
    pub const fn serves_terminating(&self) -> bool {
        self.serving && self.terminating
    }
}

/// Topology hints of an endpoint: the zones and nodes that should use it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Hints {
    /// Names of the zones, from `forZones[].name`.
    pub zones: Vec<Arc<str>>,
    /// Names of the nodes, from `forNodes[].name`.
    pub nodes: Vec<Arc<str>>,
}

/// The node's settings that never change while the agent runs.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Policy {
    /// Name of this node, as in `nodeName` of endpoints.
    pub node_name: Arc<str>,
    /// `--masquerade-all`: whether every client of a cluster IP is masqueraded.
    pub masquerade_all: bool,
    /// `--ignore-external-ips`: whether no external IP ([`External::ips`]) is served.
    pub ignore_external_ips: bool,
    /// `--scheduler`: the scheduler of Services without the annotation `lb.dev/scheduler`.
    pub scheduler: Scheduler,
    /// Parameters of Maglev tables: `--maglev-seed`, and `--maglev-table-size` for Services without the annotation
    /// `lb.dev/maglev-table-size`.
    pub maglev: Maglev,
    /// `--north-south-mode`: how packets reach other nodes, for Services without the annotation
    /// `lb.dev/north-south-mode`.
    pub north_south: NorthSouthMode,
}

/// The facts about this node that decide which endpoints it uses.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Node {
    /// The settings that never change while the agent runs.
    pub policy: Policy,
    /// The zone of this node; `None` if unknown.
    pub zone: Option<Arc<str>>,
    /// The addresses of this node.
    pub addresses: NodeAddresses,
    /// The families in which the node can currently distinguish internal clients from external ones
    /// (`--detect-local-mode`). In these families, external clients of cluster IPs are masqueraded even without
    /// `masquerade_all`.
    pub detects_inside: Families,
    /// The health check targets that this node has found unhealthy.
    pub unhealthy: BTreeSet<Target>,
    /// The Services with endpoints in slow start, with these endpoints' present shares.
    pub warming: BTreeMap<ObjectName, Shares>,
}

/// Addresses of this node. Each list is sorted and has each address once.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct NodeAddresses {
    /// The addresses of the node's devices that are up, except loopback (`127.0.0.0/8`, `::1`) and IPv6 link-local
    /// ones, and except those of devices on which IPVS software left cluster IPs.
    pub own: Vec<IpAddr>,
    /// The primary address of this node in each family in which it has one, the default source of masqueraded packets;
    /// `own` also has these addresses.
    pub primary: Vec<IpAddr>,
    /// The addresses that serve node ports (`--nodeport-addresses`); loopback addresses may be among them.
    pub node_ports: Vec<IpAddr>,
}

impl NodeAddresses {
    /// Whether the address is in [`Self::own`].
    pub fn is_own(&self, address: &IpAddr) -> bool {
        self.own.binary_search(address).is_ok()
    }
}

/// A change of an object, from a source to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The Service now has this content; `None` if it was deleted or has no virtual addresses.
    Service(ObjectName, Option<Service>),
    /// The EndpointSlice now has this content; `None` if it was deleted, or if the proxy does not need it, for example
    /// because its Service is headless. The name is that of the slice.
    EndpointSlice(ObjectName, Option<EndpointSlice>),
}

/// When the event that caused a change of an EndpointSlice happened in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trigger {
    /// Address family of the slice.
    pub family: Family,
    /// Time of the event, from the annotation `endpoints.kubernetes.io/last-change-trigger-time`.
    pub time: SystemTime,
}

/// An event from a source to the task that writes to the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// Objects have changed; the changes must be applied together.
    Changes(Vec<Change>),
    /// The triggers of the `Changes` that follow: one for each EndpointSlice with the annotation that
    /// [`Trigger::time`] names.
    Triggered(Vec<Trigger>),
    /// This node is in this zone, by the label `topology.kubernetes.io/zone` of its Node.
    Zone(Option<Arc<str>>),
    /// This node now has these addresses.
    NodeAddresses(NodeAddresses),
    /// The node can now distinguish internal clients from external ones in these families.
    DetectsInside(Families),
    /// Endpoints have become unhealthy (`true`), or usable again (`false`).
    Unhealthy(Vec<(Target, bool)>),
    /// The source has sent every readable object at least once. (A folder of manifests sends this event after about a
    /// second even if files in it are still changing and have not been read.)
    Synchronised,
    /// The source has sent every object that it could read. The objects that it could not read belong to these
    /// Services. The agent may delete from the maps what belongs neither to these Services nor to an object that was
    /// sent. If there are such Services, the source sends this event right before `Synchronised`, and again whenever
    /// their set changes; once the set is empty, it sends `Complete` instead.
    CompleteBut(BTreeSet<ObjectName>),
    /// The source has sent every object, so the agent may delete all others from the maps. The source sends this event
    /// at most once: right before `Synchronised`, or later.
    Complete,
}
