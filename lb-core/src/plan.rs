//! The plan that leads from the contents of the maps to the desired state: an ordered list of steps.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use lb_common::{Backend, ConnectionLimits, FrontendKind, Service, ServiceKey, SourceRangeKey, Vip};

use crate::{
    arena::SlotRange,
    model::{AnnotationError, IgnoredAnnotation, ObjectName, Protocol, ServicePortName},
    tables::Digest,
};

/// Names of an endpoint's node, zone and pod, stored in the map `ENDPOINT_NAMES`. Commands show them, and the agent
/// reads them after a restart.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct EndpointLabels {
    /// Name of the endpoint's node.
    pub node: Option<Arc<str>>,
    /// Zone of the endpoint's node.
    pub zone: Option<Arc<str>>,
    /// Name of the endpoint's pod.
    pub pod: Option<Arc<str>>,
}

/// Names of a service port, stored in the map `SERVICE_NAMES` under its id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceLabels {
    /// Name of the Service and of the port.
    pub name: ServicePortName,
    /// The port's node port, stored so that an allocated node port stays the same when the agent restarts.
    pub node_port: Option<u16>,
}

/// One change of the maps. A step counts as applied only as a whole. Large values are boxed to keep a step small: the
/// first plan of a large cluster may have millions of steps, most of them names of endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Removes a frontend from `SERVICES`.
    DeleteFrontend(ServiceKey),
    /// Sets the flags of an address in `VIPS`.
    PutVip(IpAddr, Vip),
    /// Adds a source range of a service port to `SOURCE_RANGES`.
    PutSourceRange(SourceRangeKey),
    /// Removes a source range of a service port from `SOURCE_RANGES`.
    DeleteSourceRange(SourceRangeKey),
    /// Sets the limits of the service port with this id in `LIMITS`.
    PutLimits(u32, ConnectionLimits),
    /// Removes the limits of a service port from `LIMITS`.
    DeleteLimits(u32),
    /// Removes an address from `VIPS`.
    DeleteVip(IpAddr),
    /// Writes backends to slots of `BACKENDS` that no frontend refers to.
    WriteBackends {
        /// Number of the first slot of `BACKENDS`.
        base: u32,
        /// The sorted values of the slots from `base` on.
        backends: Vec<Backend>,
    },
    /// Writes a scheduler's table to slots of `TABLES` that no frontend refers to.
    WriteTable {
        /// Number of the first slot of `TABLES`.
        base: u32,
        /// The values of the slots from `base` on: each the position of a backend in its slice, or
        /// [`NOBODY`](crate::tables::NOBODY).
        entries: Vec<u32>,
    },
    /// Sets the names of the service port with this id in `SERVICE_NAMES`.
    PutServiceLabels(u32, Box<ServiceLabels>),
    /// Sets the names of the endpoint with this address in `ENDPOINT_NAMES`.
    PutEndpointLabels(IpAddr, Arc<EndpointLabels>),
    /// Creates or switches a frontend in `SERVICES` in one atomic update.
    PutFrontend(ServiceKey, Box<Service>),
    /// Releases slots of `BACKENDS`. Writes nothing: the slots may be reused only after a grace period, because running
    /// programs may still read them.
    ReleaseBackends {
        /// Number of the first slot.
        base: u32,
        /// Number of slots.
        count: u32,
    },
    /// Releases slots of `TABLES`, like [`Self::ReleaseBackends`].
    ReleaseTable {
        /// Number of the first slot.
        base: u32,
        /// Number of slots.
        count: u32,
    },
    /// Removes from `SERVICE_NAMES` the names of a service port that no longer has a frontend.
    DeleteServiceLabels(u32),
    /// Removes from `ENDPOINT_NAMES` the names of an address that no backend has any more.
    DeleteEndpointLabels(IpAddr),
}

const _: () = assert!(size_of::<Step>() == 32);

/// The contents of the maps of Services: first as the agent reads them at its start, then with the steps that were
/// applied.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Contents {
    /// The map `SERVICES`: the record of each frontend.
    pub frontends: BTreeMap<ServiceKey, Service>,
    /// Those slots of `BACKENDS` that some frontend refers to, by slot number.
    pub backends: BTreeMap<u32, Backend>,
    /// Digests of those tables in `TABLES` that some frontend refers to, by their first slot.
    pub tables: BTreeMap<u32, Digest>,
    /// The map `SERVICE_NAMES`: names of service ports, by id.
    pub service_labels: BTreeMap<u32, ServiceLabels>,
    /// The map `ENDPOINT_NAMES`: names of endpoints, by address. The reconciler's stored slices share these `Arc`s,
    /// because a million of them take most of the agent's memory.
    pub endpoint_labels: BTreeMap<IpAddr, Arc<EndpointLabels>>,
    /// The map `VIPS`: flags of virtual addresses, and of the node's own addresses.
    pub vips: BTreeMap<IpAddr, Vip>,
    /// The map `SOURCE_RANGES`: source ranges of service ports.
    pub source_ranges: BTreeSet<SourceRangeKey>,
    /// The map `LIMITS`: limits on new connections of service ports, by id.
    pub limits: BTreeMap<u32, ConnectionLimits>,
}

impl Contents {
    /// For each frontend of this kind: its Service and its address.
    pub fn addresses(&self, kind: FrontendKind) -> impl Iterator<Item = (&ObjectName, IpAddr)> {
        let of_kind = self.frontends.iter().filter(move |(_, record)| record.kind == kind as u8);
        of_kind.filter_map(|(key, record)| {
            let labels = self.service_labels.get(&record.id)?;
            Some((&labels.name.service, key.address.into()))
        })
    }
}

/// The ranges of `BACKENDS` that a frontend's record refers to.
pub fn slices_of(record: &Service) -> impl Iterator<Item = SlotRange> + use<> {
    let external = SlotRange { base: record.backends_base, count: record.backends_count };
    let internal = SlotRange { base: record.internal_base, count: record.internal_count };
    let internal = record.has_internal_slice().then_some(internal);
    std::iter::once(external).chain(internal).filter(|range| range.count > 0)
}

/// The ranges of `TABLES` that a frontend's record refers to.
pub fn tables_of(record: &Service) -> impl Iterator<Item = SlotRange> + use<> {
    let external = SlotRange { base: record.table_base, count: record.table_count };
    let internal = SlotRange { base: record.internal_table_base, count: record.internal_table_count };
    let internal = record.has_internal_slice().then_some(internal);
    std::iter::once(external).chain(internal).filter(|range| range.count > 0)
}

/// Steps to apply in this order. After any number of steps, every frontend has a complete set of backends: the old set
/// or the new set.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Plan {
    /// The changes of the maps, in order.
    pub steps: Vec<Step>,
    /// The conditions of the Services that this plan covers.
    pub problems: Vec<Condition>,
}

/// Why a Service is not served as its object demands, or what the Service's administrator must know. `lb-agent status`
/// lists each condition.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Condition {
    /// `BACKENDS` has no room for the new backends. The Service keeps its last good state; the next plan after slots
    /// were freed tries again.
    #[error(
        "Service {service} needs {wanted} slots of BACKENDS in all, but of {slots} slots {free} are free (perhaps not \
         in one piece); it keeps the backends it has: restart the agent with a larger --max-backends"
    )]
    ArenaFull {
        /// The Service whose backends do not fit.
        service: ObjectName,
        /// Number of slots that all backends of the Service need, including those that have slots already.
        wanted: u32,
        /// Number of slots that are free now.
        free: u32,
        /// Number of all slots of `BACKENDS`.
        slots: u32,
    },
    /// `TABLES` has no room for the scheduler's new tables; otherwise as [`Self::ArenaFull`].
    #[error(
        "Service {service} needs {wanted} slots of TABLES in all for its scheduler, but of {slots} slots {free} are free \
         (perhaps not in one piece); it keeps the backends it has: give it a smaller table, or restart the agent with a larger \
         --max-table-slots"
    )]
    TablesFull {
        /// The Service whose tables do not fit.
        service: ObjectName,
        /// Number of slots that all tables of the Service need, including those that have slots already.
        wanted: u32,
        /// Number of slots that are free now.
        free: u32,
        /// Number of all slots of `TABLES`.
        slots: u32,
    },
    /// `ACTIVE` has no counters for the active flows of the new backends; otherwise as [`Self::ArenaFull`].
    #[error(
        "Service {service} has more backends than there are free slots of ACTIVE to count their flows in; it keeps the \
         backends it has: give it a scheduler that does not count, or restart the agent with a larger --max-backends"
    )]
    CountersFull {
        /// The Service whose backends get no counters.
        service: ObjectName,
    },
    /// `SERVICES` has no room for the new frontends; otherwise as [`Self::ArenaFull`].
    #[error(
        "Service {service} needs room for {wanted} frontends in SERVICES, but of {slots} {free} are free; it keeps what it \
         has: restart the agent with a larger --max-frontends"
    )]
    FrontendsFull {
        /// The Service whose frontends do not fit.
        service: ObjectName,
        /// Number of frontends that the Service should have.
        wanted: usize,
        /// Number of further frontends that fit now.
        free: usize,
        /// Capacity of `SERVICES`.
        slots: u32,
    },
    /// `SERVICE_NAMES` has no room for the names of new service ports; otherwise as [`Self::ArenaFull`].
    #[error(
        "Service {service} needs room for the names of {wanted} ports in SERVICE_NAMES, but of {slots} {free} are free; it \
         keeps what it has: restart the agent with a larger --max-frontends"
    )]
    NamesFull {
        /// The Service whose ports do not fit.
        service: ObjectName,
        /// Number of ports with a frontend that the Service should have.
        wanted: usize,
        /// Number of further ports whose names fit now.
        free: usize,
        /// Capacity of `SERVICE_NAMES`.
        slots: u32,
    },
    /// `SOURCE_RANGES` has no room for the `loadBalancerSourceRanges` of the Service; otherwise as [`Self::ArenaFull`].
    #[error(
        "Service {service} needs room for {wanted} networks in SOURCE_RANGES, but of {slots} {free} are free; it keeps what \
         it has: give it fewer loadBalancerSourceRanges"
    )]
    SourceRangesFull {
        /// The Service whose source ranges do not fit.
        service: ObjectName,
        /// Number of source ranges that the Service should have.
        wanted: usize,
        /// Number of further source ranges that fit now.
        free: usize,
        /// Capacity of `SOURCE_RANGES`.
        slots: u32,
    },
    /// `LIMITS` has no room for the limits of the Service's ports; otherwise as [`Self::ArenaFull`].
    #[error(
        "Service {service} needs room for the limits of {wanted} ports in LIMITS, but of {slots} {free} are free; it keeps \
         what it has: remove lb.dev/max-connections and lb.dev/max-connections-per-client from other Services"
    )]
    LimitsFull {
        /// The Service whose limits do not fit.
        service: ObjectName,
        /// Number of ports with limits that the Service should have.
        wanted: usize,
        /// Number of further ports whose limits fit now.
        free: usize,
        /// Capacity of `LIMITS`.
        slots: u32,
    },
    /// `VIPS` has no room for the new virtual addresses; otherwise as [`Self::ArenaFull`].
    #[error(
        "Service {service} needs room for {wanted} addresses in VIPS, but of {slots} {free} are free; it keeps what it has: \
         restart the agent with a larger --max-frontends"
    )]
    VipsFull {
        /// The Service whose addresses do not fit.
        service: ObjectName,
        /// Number of addresses that the Service should have.
        wanted: usize,
        /// Number of further addresses that fit now.
        free: usize,
        /// Services add no address once `VIPS` has this many: its capacity without the entries reserved for the node.
        slots: u32,
    },
    /// An annotation is invalid. The Service is served as if the annotation were unset, or, if the annotation is about
    /// health checks, with the last valid health check or `lb.dev/fail-closed`.
    #[error(
        "annotation {name} of Service {service} is ignored: its value {value:?} is invalid: {why}",
        name = .error.annotation, value = .error.value, why = .error.why
    )]
    BadAnnotation {
        /// The Service with the annotation.
        service: ObjectName,
        /// The annotation, and what is wrong with its value.
        error: AnnotationError,
    },
    /// An annotation for a cloud's load balancer has no effect.
    #[error(
        "annotation {name} of Service {service} is ignored (value {value:?}): {why}",
        name = .ignored.annotation, value = .ignored.value, why = .ignored.why
    )]
    IgnoredAnnotation {
        /// The Service with the annotation.
        service: ObjectName,
        /// The annotation, and why it has no effect.
        ignored: IgnoredAnnotation,
    },
    /// Pods of the Service must read a PROXY protocol header, which kubelet's probes do not send. The Service is served
    /// as demanded; but if kubelet probes these ports, the probes fail unless the server accepts connections without a
    /// header.
    #[error(
        "Service {service} begins connections with a PROXY protocol header, and kubelet's probes of its pods do not: if one goes \
         to TCP port {ports}, it fails unless the server accepts connections without a header; let probes use another port",
        ports = .ports.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    ProbesWithoutHeader {
        /// The Service with the PROXY protocol.
        service: ObjectName,
        /// The ports of its pods that must read a header.
        ports: BTreeSet<u16>,
    },
    /// Two service ports claim the same frontend. The port with the stronger kind of address owns it (from strongest to
    /// weakest: cluster IP, load balancer, external IP, node port); between equal kinds, the port with the smaller
    /// name. The other port takes over when the owner no longer claims the frontend.
    #[error("{frontend} of {loser} belongs to {owner} already: give one of them another address or port", frontend = Shown(.frontend))]
    FrontendConflict {
        /// The frontend that both claim.
        frontend: ServiceKey,
        /// The service port that gets the frontend.
        owner: ServicePortName,
        /// The service port that does not get the frontend.
        loser: ServicePortName,
    },
}

impl Condition {
    /// Names of the maps that [`Self::waits_for`] can return.
    pub const MAPS: [&str; 8] =
        ["BACKENDS", "TABLES", "ACTIVE", "SERVICES", "SERVICE_NAMES", "SOURCE_RANGES", "LIMITS", "VIPS"];

    /// Name of the full map, if the condition is that a map is full. The condition may end when other Services free
    /// entries of this map.
    pub const fn waits_for(&self) -> Option<&'static str> {
        match self {
            Self::ArenaFull { .. } => Some("BACKENDS"),
            Self::TablesFull { .. } => Some("TABLES"),
            Self::CountersFull { .. } => Some("ACTIVE"),
            Self::FrontendsFull { .. } => Some("SERVICES"),
            Self::NamesFull { .. } => Some("SERVICE_NAMES"),
            Self::SourceRangesFull { .. } => Some("SOURCE_RANGES"),
            Self::LimitsFull { .. } => Some("LIMITS"),
            Self::VipsFull { .. } => Some("VIPS"),
            Self::BadAnnotation { .. }
            | Self::IgnoredAnnotation { .. }
            | Self::ProbesWithoutHeader { .. }
            | Self::FrontendConflict { .. } => None,
        }
    }

    /// Whether the condition is only advice: it is listed although the Service is served as demanded.
    pub const fn is_advice(&self) -> bool {
        matches!(self, Self::ProbesWithoutHeader { .. })
    }

    /// The reason of the Kubernetes Event about the condition; `None` if the condition is not about an annotation.
    pub const fn annotation_event(&self) -> Option<&'static str> {
        match self {
            Self::BadAnnotation { .. } => Some("AnnotationInvalid"),
            Self::IgnoredAnnotation { .. } => Some("AnnotationIgnored"),
            Self::ProbesWithoutHeader { .. } => Some("ProbesWithoutHeader"),
            Self::ArenaFull { .. }
            | Self::TablesFull { .. }
            | Self::CountersFull { .. }
            | Self::FrontendsFull { .. }
            | Self::NamesFull { .. }
            | Self::SourceRangesFull { .. }
            | Self::LimitsFull { .. }
            | Self::VipsFull { .. }
            | Self::FrontendConflict { .. } => None,
        }
    }

    /// Whether the condition may end when slots of `BACKENDS`, `TABLES` or `ACTIVE` become free.
    pub(crate) const fn waits_for_slots(&self) -> bool {
        matches!(self, Self::ArenaFull { .. } | Self::TablesFull { .. } | Self::CountersFull { .. })
    }

    /// Whether the condition may end when frontends, names of service ports, source ranges, limits or virtual addresses
    /// are deleted from their maps.
    pub(crate) const fn waits_for_entries(&self) -> bool {
        matches!(
            self,
            Self::FrontendsFull { .. }
                | Self::NamesFull { .. }
                | Self::SourceRangesFull { .. }
                | Self::LimitsFull { .. }
                | Self::VipsFull { .. }
        )
    }

    /// The Service that the condition is about.
    pub const fn service(&self) -> &ObjectName {
        match self {
            Self::ArenaFull { service, .. }
            | Self::TablesFull { service, .. }
            | Self::CountersFull { service }
            | Self::FrontendsFull { service, .. }
            | Self::NamesFull { service, .. }
            | Self::SourceRangesFull { service, .. }
            | Self::LimitsFull { service, .. }
            | Self::VipsFull { service, .. }
            | Self::BadAnnotation { service, .. }
            | Self::IgnoredAnnotation { service, .. }
            | Self::ProbesWithoutHeader { service, .. } => service,
            Self::FrontendConflict { loser, .. } => &loser.service,
        }
    }
}

/// Displays a frontend as `address:port/PROTOCOL`, with an IPv6 address in brackets.
struct Shown<'a>(&'a ServiceKey);

impl std::fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let socket = std::net::SocketAddr::new(self.0.address.into(), self.0.port);
        match Protocol::from_number(self.0.protocol) {
            Some(protocol) => write!(f, "{socket}/{}", protocol.as_str()),
            None => write!(f, "{socket}/{}", self.0.protocol),
        }
    }
}

/// Collects steps in any order and returns them in a safe one:
///
/// 1. deletion of frontends, so that no frontend refers to what the later steps delete or release;
/// 2. names of endpoints; then for each Service its names and limits, its tables and backends in slots that no frontend
///    refers to yet, the networks that may now use it, and last the switch of its frontends, each in one atomic update;
/// 3. deletion of addresses that no Service has any more, then flags of addresses: after the frontends, so that the
///    programs never reject a port that this plan is about to serve;
/// 4. deletion of networks that may no longer use a service port (until then, both the old and the new networks may),
///    and of limits that no frontend has any more;
/// 5. release of slots that no frontend refers to any more;
/// 6. deletion of names that are no longer needed.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    pub(crate) delete_frontends: BTreeSet<ServiceKey>,
    pub(crate) put_endpoint_labels: Vec<(IpAddr, Arc<EndpointLabels>)>,
    /// The steps of item 2, except those for names of endpoints.
    pub(crate) services: Vec<Step>,
    pub(crate) put_vips: Vec<(IpAddr, Vip)>,
    pub(crate) delete_source_ranges: BTreeSet<SourceRangeKey>,
    pub(crate) delete_limits: BTreeSet<u32>,
    pub(crate) release: BTreeSet<SlotRange>,
    pub(crate) release_tables: BTreeSet<SlotRange>,
    pub(crate) delete_vips: Vec<IpAddr>,
    pub(crate) delete_service_labels: BTreeSet<u32>,
    pub(crate) delete_endpoint_labels: Vec<IpAddr>,
    pub(crate) problems: Vec<Condition>,
}

impl Draft {
    fn len(&self) -> usize {
        let names = self.put_endpoint_labels.len() + self.delete_endpoint_labels.len();
        let vips = self.put_vips.len() + self.delete_vips.len();
        let services = self.services.len() + self.delete_frontends.len() + self.delete_service_labels.len();
        let slots = self.release.len() + self.release_tables.len();
        names + vips + services + slots + self.delete_source_ranges.len() + self.delete_limits.len()
    }

    pub(crate) fn finish(self) -> Plan {
        let mut steps = Vec::with_capacity(self.len());
        steps.extend(self.delete_frontends.into_iter().map(Step::DeleteFrontend));
        steps.extend(
            self.put_endpoint_labels.into_iter().map(|(ip, labels)| Step::PutEndpointLabels(ip, labels)),
        );
        steps.extend(self.services);
        // Deletions come first, so that new addresses fit into a full map. No frontend has the deleted addresses any
        // more.
        steps.extend(self.delete_vips.into_iter().map(Step::DeleteVip));
        steps.extend(self.put_vips.into_iter().map(|(ip, vip)| Step::PutVip(ip, vip)));
        steps.extend(self.delete_source_ranges.into_iter().map(Step::DeleteSourceRange));
        steps.extend(self.delete_limits.into_iter().map(Step::DeleteLimits));
        let release = |SlotRange { base, count }| Step::ReleaseBackends { base, count };
        steps.extend(self.release.into_iter().map(release));
        let release = |SlotRange { base, count }| Step::ReleaseTable { base, count };
        steps.extend(self.release_tables.into_iter().map(release));
        steps.extend(self.delete_service_labels.into_iter().map(Step::DeleteServiceLabels));
        steps.extend(self.delete_endpoint_labels.into_iter().map(Step::DeleteEndpointLabels));
        Plan { steps, problems: self.problems }
    }
}
