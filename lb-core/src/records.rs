//! Creates elements of maps from a desired service port, its id and its slots.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use lb_common::{Address, Backend, FrontendKind, Service, SourceRangeKey, Vip, vip_flags};

use crate::{
    arena::SlotRange,
    desired::{self, Frontend, Port},
    family::Family,
    model::Node,
    plan::EndpointLabels,
};

/// Where one slice of a service port is in the maps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placement {
    /// Slots of `BACKENDS` that hold the slice's backends.
    pub(crate) backends: SlotRange,
    /// Slots of `TABLES` that hold the scheduler's table for these backends.
    pub(crate) table: SlotRange,
}

impl Placement {
    /// No slots: for a slice that no frontend refers to, or a frontend without backends.
    pub(crate) const NOWHERE: Self = Self { backends: SlotRange::NONE, table: SlotRange::NONE };
}

/// The record of a frontend for `SERVICES`; `places` are the slots of its port's slices.
pub(crate) fn record(id: u32, places: &[Placement], port: &Port, frontend: &Frontend) -> Service {
    let place = |slice: Option<usize>| {
        slice.and_then(|slice| places.get(slice)).copied().unwrap_or(Placement::NOWHERE)
    };
    let (external, internal) = (place(frontend.slice), place(frontend.internal_slice));
    let record = Service {
        id,
        backends_base: external.backends.base,
        backends_count: external.backends.count,
        internal_base: internal.backends.base,
        internal_count: internal.backends.count,
        table_base: external.table.base,
        table_count: external.table.count,
        internal_table_base: internal.table.base,
        internal_table_count: internal.table.count,
        affinity_seconds: port.affinity_seconds,
        scheduler: port.scheduler as u8,
        kind: frontend.kind as u8,
        flags: frontend.flags,
        seal: 0,
    };
    record.sealed(&frontend.key)
}

pub(crate) fn count(backends: &[Backend]) -> u32 {
    u32::try_from(backends.len()).unwrap_or(u32::MAX)
}

/// The source ranges of a port, only of the families in which some frontend admits only clients in these ranges.
pub(crate) fn source_ranges(id: u32, port: &Port) -> impl Iterator<Item = SourceRangeKey> {
    let ranges = port.source_ranges.iter().filter(|range| port.checks_sources(Family::of(range.addr())));
    ranges.map(move |range| SourceRangeKey::new(id, Address::from(range.addr()), range.prefix_len()))
}

/// The labels of the addresses of a Service's backends: each address once, in ascending order. Leaves out addresses
/// that are only in slices that no frontend refers to.
pub(crate) fn labels_of(ports: &[Port]) -> Vec<(IpAddr, Arc<EndpointLabels>)> {
    let mut labels = ports.iter().flat_map(used_labels).collect();
    desired::unique_labels(&mut labels);
    labels
}

fn used_labels(port: &Port) -> impl Iterator<Item = (IpAddr, Arc<EndpointLabels>)> {
    let used: Vec<&[Backend]> =
        (0..).zip(&port.slices).filter(|(number, _)| port.uses(*number)).map(|(_, slice)| &**slice).collect();
    let are_all = used.len() == port.slices.len();
    let has =
        |slice: &[Backend], address| slice.binary_search_by_key(&address, |backend| backend.address).is_ok();
    let is_used =
        move |address: IpAddr| are_all || used.iter().any(|slice| has(slice, Address::from(address)));
    port.endpoint_labels.iter().filter(move |(address, _)| is_used(*address)).cloned()
}

/// Address and kind of each frontend of these ports.
pub(crate) fn frontends_of_ports(ports: &[Port]) -> impl Iterator<Item = (IpAddr, FrontendKind)> {
    let frontends = ports.iter().flat_map(|port| &port.frontends);
    frontends.map(|frontend| (IpAddr::from(frontend.key.address), frontend.kind))
}

/// The flags of the virtual addresses of a Service with these frontends: each address once, in ascending order. An
/// address of the node itself gets no flags, so that the programs pass a packet to the node's stack if no Service has
/// the packet's destination port. The `foreign` addresses, which another proxy serves, get no flags either: the
/// programs leave packets to them untouched. Without an entry for such an address, the programs would drop the packets
/// as packets to an unassigned cluster IP.
pub(crate) fn vips_of(
    frontends: impl Iterator<Item = (IpAddr, FrontendKind)>,
    foreign: impl Iterator<Item = IpAddr>,
    node: &Node,
) -> Vec<(IpAddr, Vip)> {
    let mut vips: BTreeMap<IpAddr, Vip> = foreign.map(|address| (address, Vip { flags: 0 })).collect();
    for (address, kind) in frontends.filter(|(_, kind)| *kind != FrontendKind::NodePort) {
        let flags = match kind {
            _ if node.addresses.is_own(&address) => 0,
            FrontendKind::ClusterIp => vip_flags::ECHO | vip_flags::CLUSTER_IP,
            FrontendKind::LoadBalancer => vip_flags::ECHO,
            // An external IP often belongs to another node or machine, which itself answers at ports that no Service
            // has.
            FrontendKind::ExternalIp | FrontendKind::NodePort => 0,
        };
        vips.entry(address).or_insert(Vip { flags: 0 }).flags |= flags;
    }
    vips.into_iter().collect()
}
