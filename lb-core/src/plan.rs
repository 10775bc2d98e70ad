//! The plan from the kernel's contents to the desired state: an ordered list of steps.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use lb_common::{Backend, FrontendKind, Service, ServiceKey, SourceRangeKey, Vip, service_flags};

use crate::{
    arena::SlotRange,
    model::{AnnotationError, IgnoredAnnotation, ObjectName, Protocol, ServicePortName},
    tables::Digest,
};

/// Names of an endpoint, kept in the kernel with its address so that commands can show them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct EndpointLabels {
    /// Node the endpoint runs on.
    pub node: Option<Arc<str>>,
    /// Zone of that node.
    pub zone: Option<Arc<str>>,
    /// Name of the pod.
    pub pod: Option<Arc<str>>,
}

/// Names of a service port, kept in the kernel under its id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServiceLabels {
    /// The service port's name.
    pub name: ServicePortName,
    /// The service port's node port, so that an allocated one outlives the agent.
    pub node_port: Option<u16>,
}

/// One change of the maps. A step counts as applied only as a whole. Large values are boxed: the first plan of a large
/// cluster may have millions of steps, most of them names of endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Removes a frontend from `SERVICES`.
    DeleteFrontend(ServiceKey),
    /// Sets the flags of an address in `VIPS`.
    PutVip(IpAddr, Vip),
    /// Admits a network to a service port, in `SOURCE_RANGES`.
    PutSourceRange(SourceRangeKey),
    /// Removes a network from `SOURCE_RANGES`.
    DeleteSourceRange(SourceRangeKey),
    /// Removes an address from `VIPS`.
    DeleteVip(IpAddr),
    /// Writes backends to slots of `BACKENDS` that no frontend refers to.
    WriteBackends {
        /// First slot.
        base: u32,
        /// The values of the slots from `base` on; sorted.
        backends: Vec<Backend>,
    },
    /// Writes a scheduler's table to slots of `TABLES` that no frontend refers to.
    WriteTable {
        /// First slot.
        base: u32,
        /// The values of the slots from `base` on: positions in a slice of backends.
        entries: Vec<u32>,
    },
    /// Sets the name of a service port in `SERVICE_NAMES`.
    PutServiceLabels(u32, Box<ServiceLabels>),
    /// Sets the names of an address in `ENDPOINT_NAMES`.
    PutEndpointLabels(IpAddr, Arc<EndpointLabels>),
    /// Creates or switches a frontend in `SERVICES` in one atomic update.
    PutFrontend(ServiceKey, Box<Service>),
    /// Releases slots. Writes nothing: the slots may be reused only after a grace period, because running programs may
    /// still read them.
    ReleaseBackends {
        /// First slot.
        base: u32,
        /// Number of slots.
        count: u32,
    },
    /// Like [`Self::ReleaseBackends`], for slots of `TABLES`.
    ReleaseTable {
        /// First slot.
        base: u32,
        /// Number of slots.
        count: u32,
    },
    /// Removes the name of a service port that has no frontend any more.
    DeleteServiceLabels(u32),
    /// Removes the name of an address that no backend has any more.
    DeleteEndpointLabels(IpAddr),
}

const _: () = assert!(size_of::<Step>() == 32);

/// The contents of the maps of Services, as read back when the agent starts.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Contents {
    /// `SERVICES`
    pub frontends: BTreeMap<ServiceKey, Service>,
    /// The slots of `BACKENDS` that some frontend refers to, by index.
    pub backends: BTreeMap<u32, Backend>,
    /// The tables in the slots of `TABLES` that some frontend refers to, by their first slot.
    pub tables: BTreeMap<u32, Digest>,
    /// `SERVICE_NAMES`
    pub service_labels: BTreeMap<u32, ServiceLabels>,
    /// `ENDPOINT_NAMES`. The labels are shared, because a million of them take most of the agent's memory.
    pub endpoint_labels: BTreeMap<IpAddr, Arc<EndpointLabels>>,
    /// `VIPS`
    pub vips: BTreeMap<IpAddr, Vip>,
    /// `SOURCE_RANGES`
    pub source_ranges: BTreeSet<SourceRangeKey>,
}

impl Contents {
    /// The Service and the address of each frontend of this kind.
    pub fn addresses(&self, kind: FrontendKind) -> impl Iterator<Item = (&ObjectName, IpAddr)> {
        let of_kind = self.frontends.iter().filter(move |(_, record)| record.kind == kind as u8);
        of_kind.filter_map(|(key, record)| {
            let labels = self.service_labels.get(&record.id)?;
            Some((&labels.name.service, key.address.into()))
        })
    }
}

/// The slices of `BACKENDS` that a record refers to.
pub fn slices_of(record: &Service) -> impl Iterator<Item = SlotRange> + use<> {
    let external = SlotRange { base: record.backends_base, count: record.backends_count };
    let internal = SlotRange { base: record.internal_base, count: record.internal_count };
    let internal = (record.flags & service_flags::SHORT_CIRCUIT != 0).then_some(internal);
    std::iter::once(external).chain(internal).filter(|range| range.count > 0)
}

/// The slices of `TABLES` that a record refers to.
pub fn tables_of(record: &Service) -> impl Iterator<Item = SlotRange> + use<> {
    let external = SlotRange { base: record.table_base, count: record.table_count };
    let internal = SlotRange { base: record.internal_table_base, count: record.internal_table_count };
    let internal = (record.flags & service_flags::SHORT_CIRCUIT != 0).then_some(internal);
    std::iter::once(external).chain(internal).filter(|range| range.count > 0)
}

/// Steps to apply in this order. After any number of steps, every frontend has a complete set of backends: the old or
/// the new one.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Plan {
    /// The changes of the maps.
    pub steps: Vec<Step>,
    /// The conditions of the Services that this plan covers.
    pub problems: Vec<Condition>,
}

/// Why the kernel does not serve a Service as the object demands; `lb-agent status` lists it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Condition {
    /// The new backends do not fit; the Service keeps its last good state, and the next plan after slots are freed
    /// tries again.
    #[error(
        "Service {service} needs {wanted} new slots of BACKENDS, but of {slots} slots {free} are free (perhaps not \
         in one piece); it keeps the backends it has: restart the agent with a larger --max-backends"
    )]
    ArenaFull {
        /// The Service.
        service: ObjectName,
        /// Slots that its new backends need.
        wanted: u32,
        /// Slots that are free now.
        free: u32,
        /// Total number of slots.
        slots: u32,
    },
    /// The new tables do not fit; as [`Self::ArenaFull`].
    #[error(
        "Service {service} needs {wanted} new slots of TABLES for its scheduler, but of {slots} slots {free} are free \
         (perhaps not in one piece); it keeps the backends it has: give it a smaller table, or restart the agent with a larger \
         --max-table-slots"
    )]
    TablesFull {
        /// The Service.
        service: ObjectName,
        /// Slots that its new tables need.
        wanted: u32,
        /// Slots that are free now.
        free: u32,
        /// Total number of slots.
        slots: u32,
    },
    /// The new backends have no counters for their active flows; as [`Self::ArenaFull`].
    #[error(
        "Service {service} has more backends than there are free slots of ACTIVE to count their flows in; it keeps the \
         backends it has: give it a scheduler that does not count, or restart the agent with a larger --max-backends"
    )]
    CountersFull {
        /// The Service.
        service: ObjectName,
    },
    /// The new frontends do not fit; as [`Self::ArenaFull`].
    #[error(
        "Service {service} needs room for {wanted} frontends in SERVICES, but of {slots} {free} are free; it keeps what it \
         has: restart the agent with a larger --max-frontends"
    )]
    FrontendsFull {
        /// The Service.
        service: ObjectName,
        /// Frontends it should have.
        wanted: usize,
        /// How many more frontends fit now.
        free: usize,
        /// Capacity of the map.
        slots: u32,
    },
    /// The networks that may use a load balancer do not fit; as [`Self::ArenaFull`].
    #[error(
        "Service {service} needs room for {wanted} networks in SOURCE_RANGES, but of {slots} {free} are free; it keeps what \
         it has: give it fewer loadBalancerSourceRanges"
    )]
    SourceRangesFull {
        /// The Service.
        service: ObjectName,
        /// Networks it should have.
        wanted: usize,
        /// How many more networks fit now.
        free: usize,
        /// Capacity of the map.
        slots: u32,
    },
    /// The virtual addresses do not fit; as [`Self::ArenaFull`].
    #[error(
        "Service {service} needs room for {wanted} addresses in VIPS, but of {slots} {free} are free; it keeps what it has: \
         restart the agent with a larger --max-frontends"
    )]
    VipsFull {
        /// The Service.
        service: ObjectName,
        /// Addresses it should have.
        wanted: usize,
        /// How many more addresses fit now.
        free: usize,
        /// While `VIPS` has fewer addresses than this, Services may add theirs.
        slots: u32,
    },
    /// An annotation is invalid; the Service is served as if the annotation were unset, or, if it is about health checks,
    /// with the last valid ones.
    #[error(
        "annotation {name} of Service {service} is ignored: its value {value:?} is invalid: {why}",
        name = .error.annotation, value = .error.value, why = .error.why
    )]
    BadAnnotation {
        /// The Service.
        service: ObjectName,
        /// The annotation, and its error.
        error: AnnotationError,
    },
    /// An annotation of a cloud has no effect here.
    #[error(
        "annotation {name} of Service {service} is ignored (value {value:?}): {why}",
        name = .ignored.annotation, value = .ignored.value, why = .ignored.why
    )]
    IgnoredAnnotation {
        /// The Service.
        service: ObjectName,
        /// The annotation, and why it has no effect.
        ignored: IgnoredAnnotation,
    },
    /// Two service ports claim one frontend. The stronger kind owns it (cluster IP, load balancer, external IP, node
    /// port); among equal kinds the smaller name does. The other one takes over when the owner no longer claims it.
    #[error("{frontend} of {loser} belongs to {owner} already: give one of them another address or port", frontend = Shown(.frontend))]
    FrontendConflict {
        /// The frontend.
        frontend: ServiceKey,
        /// The service port that owns the frontend.
        owner: ServicePortName,
        /// The service port that lost the claim.
        loser: ServicePortName,
    },
}

impl Condition {
    /// The maps that may be full.
    pub const MAPS: [&str; 6] = ["BACKENDS", "TABLES", "ACTIVE", "SERVICES", "SOURCE_RANGES", "VIPS"];

    /// The map that is full, if the condition is a full map. Such a condition may end when other Services free entries
    /// of the map.
    pub const fn waits_for(&self) -> Option<&'static str> {
        match self {
            Self::ArenaFull { .. } => Some("BACKENDS"),
            Self::TablesFull { .. } => Some("TABLES"),
            Self::CountersFull { .. } => Some("ACTIVE"),
            Self::FrontendsFull { .. } => Some("SERVICES"),
            Self::SourceRangesFull { .. } => Some("SOURCE_RANGES"),
            Self::VipsFull { .. } => Some("VIPS"),
            Self::BadAnnotation { .. } | Self::IgnoredAnnotation { .. } | Self::FrontendConflict { .. } => {
                None
            }
        }
    }

    /// Whether the condition may end when slots are released.
    pub(crate) const fn waits_for_slots(&self) -> bool {
        matches!(self, Self::ArenaFull { .. } | Self::TablesFull { .. } | Self::CountersFull { .. })
    }

    /// Whether the condition may end when frontends, names, networks or addresses are deleted.
    pub(crate) const fn waits_for_entries(&self) -> bool {
        matches!(self, Self::FrontendsFull { .. } | Self::SourceRangesFull { .. } | Self::VipsFull { .. })
    }

    /// The Service that is not served as the object demands.
    pub const fn service(&self) -> &ObjectName {
        match self {
            Self::ArenaFull { service, .. }
            | Self::TablesFull { service, .. }
            | Self::CountersFull { service }
            | Self::FrontendsFull { service, .. }
            | Self::SourceRangesFull { service, .. }
            | Self::VipsFull { service, .. }
            | Self::BadAnnotation { service, .. }
            | Self::IgnoredAnnotation { service, .. } => service,
            Self::FrontendConflict { loser, .. } => &loser.service,
        }
    }
}

/// `address:port/PROTOCOL`, with an IPv6 address in brackets.
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
/// 1. deletion of frontends, so that no record refers to the elements that are deleted with them;
/// 2. names of addresses; then for each Service its names, its backends and tables in slots that no frontend refers to
///    yet, the networks that may now use it, and last the switch of its frontends, each in one atomic update;
/// 3. deletion of addresses that no Service has any more, then flags of addresses: after the frontends, so that no port
///    is rejected that is just about to be served;
/// 4. deletion of networks that may no longer use a service port: for a moment, both the old and the new ones may;
/// 5. release of slots that no frontend refers to any more;
/// 6. deletion of names that are no longer needed.
#[derive(Debug, Default)]
pub(crate) struct Draft {
    pub(crate) delete_frontends: BTreeSet<ServiceKey>,
    pub(crate) put_endpoint_labels: Vec<(IpAddr, Arc<EndpointLabels>)>,
    /// The steps of item 2, except the names of addresses.
    pub(crate) services: Vec<Step>,
    pub(crate) put_vips: Vec<(IpAddr, Vip)>,
    pub(crate) delete_source_ranges: BTreeSet<SourceRangeKey>,
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
        names + vips + services + slots + self.delete_source_ranges.len()
    }

    pub(crate) fn finish(self) -> Plan {
        let mut steps = Vec::with_capacity(self.len());
        steps.extend(self.delete_frontends.into_iter().map(Step::DeleteFrontend));
        steps.extend(
            self.put_endpoint_labels.into_iter().map(|(ip, labels)| Step::PutEndpointLabels(ip, labels)),
        );
        steps.extend(self.services);
        // Deleted first, so that new addresses fit into a full map. No frontend has the deleted ones any more.
        steps.extend(self.delete_vips.into_iter().map(Step::DeleteVip));
        steps.extend(self.put_vips.into_iter().map(|(ip, vip)| Step::PutVip(ip, vip)));
        steps.extend(self.delete_source_ranges.into_iter().map(Step::DeleteSourceRange));
        let release = |SlotRange { base, count }| Step::ReleaseBackends { base, count };
        steps.extend(self.release.into_iter().map(release));
        let release = |SlotRange { base, count }| Step::ReleaseTable { base, count };
        steps.extend(self.release_tables.into_iter().map(release));
        steps.extend(self.delete_service_labels.into_iter().map(Step::DeleteServiceLabels));
        steps.extend(self.delete_endpoint_labels.into_iter().map(Step::DeleteEndpointLabels));
        Plan { steps, problems: self.problems }
    }
}
