//! The maps of the control plane: read as [`Contents`], changed by [`Step`]s.

use std::{
    collections::{BTreeMap, HashSet, btree_map::Entry},
    net::IpAddr,
    sync::Arc,
};

use lb_common::{
    Address, Backend, ConnectionLimits, EndpointName, Service, ServiceKey, ServiceName, SourceRangeKey, Vip,
    capacity, filter::Mark, from_fixed, to_fixed,
};
use lb_core::{
    capacity::Capacity,
    model::{ObjectName, Protocol, ServicePortName},
    plan::{Contents, EndpointLabels, ServiceLabels, Step, slices_of, tables_of},
    tables::Digest,
};

use crate::{
    bpf::{bpffs::Folder, layout, table::Table},
    error::DatapathError,
    state::filter::Filter,
};

/// Two ranges of `BACKENDS` that are at most this many slots apart are read as one, to save a system call.
const GAP: u32 = 256;

/// A step could not be applied; the steps before it are in the kernel.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step}: {source}")]
pub struct ApplyError {
    /// Number of steps that were applied.
    pub applied: usize,
    /// Describes the step that failed, in words.
    pub step: String,
    /// Error of the operation on a map.
    #[source]
    pub source: Box<DatapathError>,
}

/// The maps that the control plane writes. Clones share the maps.
#[derive(Clone, Debug)]
pub struct ServiceMaps {
    pub(crate) services: Table<ServiceKey, Service>,
    pub(crate) backends: Table<u32, Backend>,
    pub(crate) tables: Table<u32, u32>,
    pub(crate) service_names: Table<u32, ServiceName>,
    pub(crate) endpoint_names: Table<Address, EndpointName>,
    pub(crate) vips: Table<Address, Vip>,
    pub(crate) source_ranges: Table<SourceRangeKey, u32>,
    pub(crate) limits: Table<u32, ConnectionLimits>,
    filter: Arc<Filter>,
}

impl ServiceMaps {
    pub(crate) fn open(folder: &Folder, filter: &Arc<Filter>) -> Result<Self, DatapathError> {
        Ok(Self {
            services: Table::open(&layout::SERVICES, &folder.map("SERVICES"))?,
            backends: Table::open(&layout::BACKENDS, &folder.map("BACKENDS"))?,
            tables: Table::open(&layout::TABLES, &folder.map("TABLES"))?,
            service_names: Table::open(&layout::SERVICE_NAMES, &folder.map("SERVICE_NAMES"))?,
            endpoint_names: Table::open(&layout::ENDPOINT_NAMES, &folder.map("ENDPOINT_NAMES"))?,
            vips: Table::open(&layout::VIPS, &folder.map("VIPS"))?,
            source_ranges: Table::open(&layout::SOURCE_RANGES, &folder.map("SOURCE_RANGES"))?,
            limits: Table::open(&layout::LIMITS, &folder.map("LIMITS"))?,
            filter: Arc::clone(filter),
        })
    }

    /// Sets whether to use the kernel's batch commands; on by default.
    pub fn use_batches(&self, yes: bool) {
        self.services.use_batches(yes);
        self.backends.use_batches(yes);
        self.tables.use_batches(yes);
        self.service_names.use_batches(yes);
        self.endpoint_names.use_batches(yes);
        self.vips.use_batches(yes);
        self.source_ranges.use_batches(yes);
        self.limits.use_batches(yes);
    }

    /// The map `SERVICES`: frontends.
    pub const fn services(&self) -> &Table<ServiceKey, Service> {
        &self.services
    }

    /// The array `BACKENDS`, an arena of slices of backends.
    pub const fn backends(&self) -> &Table<u32, Backend> {
        &self.backends
    }

    /// The array `TABLES`, an arena of schedulers' tables.
    pub const fn tables(&self) -> &Table<u32, u32> {
        &self.tables
    }

    /// The map `VIPS`: virtual addresses, and the node's own.
    pub const fn vips(&self) -> &Table<Address, Vip> {
        &self.vips
    }

    /// The map `SOURCE_RANGES`: `loadBalancerSourceRanges` of service ports.
    pub const fn source_ranges(&self) -> &Table<SourceRangeKey, u32> {
        &self.source_ranges
    }

    /// The map `LIMITS`: limits on new connections, by the id of the service port.
    pub const fn limits(&self) -> &Table<u32, ConnectionLimits> {
        &self.limits
    }

    /// The id of the service port that has this frontend; `None` if `SERVICES` has no such frontend.
    pub fn service_at(&self, key: &ServiceKey) -> Result<Option<u32>, DatapathError> {
        Ok(self.services.get(key)?.map(|service| service.id))
    }

    /// Name and node port of the service port with this id; `None` if the id is unknown, or if the port has a protocol
    /// that only newer agents know.
    pub fn labels_of(&self, id: u32) -> Result<Option<ServiceLabels>, DatapathError> {
        let name = self.service_names.get(&id)?;
        Ok(name.and_then(|name| service_labels(&name, &mut Strings::default())))
    }

    /// Names of node, zone and pod of the endpoint with this address; `None` if unknown.
    pub fn endpoint_labels_of(&self, address: &Address) -> Result<Option<EndpointLabels>, DatapathError> {
        let name = self.endpoint_names.get(address)?;
        Ok(name.map(|name| endpoint_labels(&name, &mut Strings::default())))
    }

    /// Capacities of the maps, which a plan must respect. The capacity of `VIPS` does not include the entries that are
    /// reserved for the node's own addresses ([`capacity::OWN_VIPS`]).
    pub fn room(&self) -> Capacity {
        Capacity {
            backends: self.backends.capacity(),
            tables: self.tables.capacity(),
            frontends: self.services.capacity(),
            names: self.service_names.capacity(),
            source_ranges: self.source_ranges.capacity(),
            limits: self.limits.capacity(),
            vips: self.vips.capacity().saturating_sub(capacity::OWN_VIPS),
        }
    }

    /// Maximum number of frontends in `SERVICES`.
    pub fn frontend_capacity(&self) -> u32 {
        self.services.capacity()
    }

    /// Reads the maps of the control plane: of `BACKENDS` only the slots that frontends refer to, and of each table in
    /// `TABLES` only a digest.
    pub fn contents(&self) -> Result<Contents, DatapathError> {
        let mut contents = Contents::default();
        self.services.for_each(|key, service| {
            contents.frontends.insert(*key, *service);
            Ok(())
        })?;
        contents.backends = self.referenced_backends(contents.frontends.values())?;
        for range in contents.frontends.values().flat_map(tables_of) {
            if let Entry::Vacant(entry) = contents.tables.entry(range.base) {
                entry.insert(Digest::of(&self.tables.read_range(range.base, range.count)?));
            }
        }
        let mut strings = Strings::default();
        self.service_names.for_each(|id, name| {
            if let Some(labels) = service_labels(name, &mut strings) {
                contents.service_labels.insert(*id, labels);
            }
            Ok(())
        })?;
        self.endpoint_names.for_each(|address, name| {
            let labels = endpoint_labels(name, &mut strings);
            contents.endpoint_labels.insert(IpAddr::from(*address), Arc::new(labels));
            Ok(())
        })?;
        self.vips.for_each(|address, vip| {
            contents.vips.insert(IpAddr::from(*address), *vip);
            Ok(())
        })?;
        self.source_ranges.for_each(|range, _| {
            contents.source_ranges.insert(*range);
            Ok(())
        })?;
        self.limits.for_each(|id, limits| {
            contents.limits.insert(*id, *limits);
            Ok(())
        })?;
        Ok(contents)
    }

    fn referenced_backends<'a>(
        &self,
        services: impl Iterator<Item = &'a Service>,
    ) -> Result<BTreeMap<u32, Backend>, DatapathError> {
        let mut slices: Vec<(u32, u32)> = services
            .flat_map(slices_of)
            .map(|range| range.slots())
            .map(|slots| (slots.start, slots.end))
            .filter(|(base, end)| base < end)
            .collect();
        slices.sort_unstable();
        slices.dedup();
        let mut backends = BTreeMap::new();
        for (base, end) in merged(&slices) {
            let read = self.backends.read_range(base, end - base)?;
            let wanted =
                slices.partition_point(|slice| slice.0 < base)..slices.partition_point(|slice| slice.0 < end);
            for slot in slices[wanted].iter().flat_map(|slice| slice.0..slice.1) {
                if let Some(backend) = read.get((slot - base) as usize) {
                    backends.insert(slot, *backend);
                }
            }
        }
        Ok(backends)
    }

    /// Applies the steps in order. Consecutive steps of one kind share system calls; the kernel executes such a batch
    /// element by element, so at any time the maps show the effect of a prefix of the steps, and perhaps a part of the
    /// elements that the next step writes.
    pub fn apply(&self, steps: &[Step]) -> Result<(), ApplyError> {
        let mut applied = 0;
        for run in steps.chunk_by(|a, b| std::mem::discriminant(a) == std::mem::discriminant(b)) {
            self.apply_run(run).map_err(|(done, source)| ApplyError {
                applied: applied + done,
                step: run.get(done).map_or_else(String::new, describe),
                source: Box::new(source),
            })?;
            applied += run.len();
        }
        Ok(())
    }

    /// Applies steps that are all of one kind. An error comes with the number of steps that were applied.
    fn apply_run(&self, run: &[Step]) -> Result<(), (usize, DatapathError)> {
        let Some(first) = run.first() else { return Ok(()) };
        match first {
            Step::DeleteFrontend(_) => self.services.delete(&gather(run, |step| {
                if let Step::DeleteFrontend(key) = step { Some(*key) } else { None }
            })),
            Step::WriteBackends { .. } => self.write_backends(run),
            Step::WriteTable { .. } => self.write_tables(run),
            Step::PutServiceLabels(..) => put(&self.service_names, run, |step| {
                if let Step::PutServiceLabels(id, labels) = step {
                    Some((*id, service_name(labels)))
                } else {
                    None
                }
            }),
            Step::PutEndpointLabels(..) => put(&self.endpoint_names, run, |step| {
                if let Step::PutEndpointLabels(ip, labels) = step {
                    Some((Address::from(*ip), endpoint_name(labels)))
                } else {
                    None
                }
            }),
            Step::PutFrontend(..) => {
                let pick = |step: &Step| {
                    if let Step::PutFrontend(key, service) = step { Some((*key, **service)) } else { None }
                };
                let marks = run.iter().filter_map(pick).map(|(key, _)| Mark::of_frontend(&key));
                self.filter.insert_after(marks, || put(&self.services, run, pick))
            }
            Step::PutVip(..) => put(&self.vips, run, |step| {
                if let Step::PutVip(ip, vip) = step { Some((Address::from(*ip), *vip)) } else { None }
            }),
            Step::DeleteVip(_) => self.vips.delete(&gather(run, |step| {
                if let Step::DeleteVip(ip) = step { Some(Address::from(*ip)) } else { None }
            })),
            Step::PutSourceRange(_) => put(&self.source_ranges, run, |step| {
                if let Step::PutSourceRange(range) = step { Some((*range, 1)) } else { None }
            }),
            Step::DeleteSourceRange(_) => self.source_ranges.delete(&gather(run, |step| {
                if let Step::DeleteSourceRange(range) = step { Some(*range) } else { None }
            })),
            Step::PutLimits(..) => put(&self.limits, run, |step| {
                if let Step::PutLimits(id, limits) = step { Some((*id, *limits)) } else { None }
            }),
            Step::DeleteLimits(_) => self.limits.delete(&gather(run, |step| {
                if let Step::DeleteLimits(id) = step { Some(*id) } else { None }
            })),
            Step::ReleaseBackends { .. } | Step::ReleaseTable { .. } => Ok(()),
            Step::DeleteServiceLabels(_) => self.service_names.delete(&gather(run, |step| {
                if let Step::DeleteServiceLabels(id) = step { Some(*id) } else { None }
            })),
            Step::DeleteEndpointLabels(_) => self.endpoint_names.delete(&gather(run, |step| {
                if let Step::DeleteEndpointLabels(ip) = step { Some(Address::from(*ip)) } else { None }
            })),
        }
    }

    fn write_backends(&self, run: &[Step]) -> Result<(), (usize, DatapathError)> {
        let slices = run.iter().filter_map(|step| {
            if let Step::WriteBackends { base, backends } = step { Some((*base, &**backends)) } else { None }
        });
        write_slices(&self.backends, slices)
    }

    fn write_tables(&self, run: &[Step]) -> Result<(), (usize, DatapathError)> {
        let slices = run.iter().filter_map(|step| {
            if let Step::WriteTable { base, entries } = step { Some((*base, &**entries)) } else { None }
        });
        write_slices(&self.tables, slices)
    }
}

/// Writes slices to an arena. An error comes with the number of slices that were written completely.
fn write_slices<'a, V: bytemuck::Pod>(
    arena: &Table<u32, V>,
    slices: impl Iterator<Item = (u32, &'a [V])>,
) -> Result<(), (usize, DatapathError)> {
    let (mut slots, mut values, mut ends) = (Vec::new(), Vec::new(), Vec::new());
    for (base, slice) in slices {
        slots.extend((base..).take(slice.len()));
        values.extend_from_slice(slice);
        ends.push(slots.len());
    }
    let whole = |(written, error)| (ends.partition_point(|end| *end <= written), error);
    arena.update(&slots, &values).map_err(whole)
}

fn gather<T>(run: &[Step], pick: impl Fn(&Step) -> Option<T>) -> Vec<T> {
    run.iter().filter_map(pick).collect()
}

fn put<K: bytemuck::Pod, V: bytemuck::Pod>(
    table: &Table<K, V>,
    run: &[Step],
    pick: impl Fn(&Step) -> Option<(K, V)>,
) -> Result<(), (usize, DatapathError)> {
    let (keys, values): (Vec<K>, Vec<V>) = run.iter().filter_map(pick).unzip();
    table.update(&keys, &values)
}

/// Ranges `(base, end)` that cover all `slices`, which have the same form and must be sorted.
fn merged(slices: &[(u32, u32)]) -> Vec<(u32, u32)> {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for (base, end) in slices {
        match ranges.last_mut() {
            Some(last) if *base <= last.1.saturating_add(GAP) => last.1 = last.1.max(*end),
            _ => ranges.push((*base, *end)),
        }
    }
    ranges
}

fn service_name(labels: &ServiceLabels) -> ServiceName {
    let ServicePortName { service, port, protocol } = &labels.name;
    ServiceName {
        namespace: to_fixed(&service.namespace),
        name: to_fixed(&service.name),
        port_name: to_fixed(port),
        protocol: protocol.number(),
        node_port: labels.node_port.unwrap_or(0),
    }
}

/// Converts a value of `SERVICE_NAMES`; `None` if it has a protocol that only newer agents know.
fn service_labels(name: &ServiceName, strings: &mut Strings) -> Option<ServiceLabels> {
    let protocol = Protocol::from_number(name.protocol)?;
    let namespace = strings.shared(&name.namespace).unwrap_or_default();
    Some(ServiceLabels {
        name: ServicePortName {
            service: ObjectName { namespace, name: from_fixed(&name.name).into() },
            port: strings.shared(&name.port_name).unwrap_or_default(),
            protocol,
        },
        node_port: (name.node_port != 0).then_some(name.node_port),
    })
}

fn endpoint_name(labels: &EndpointLabels) -> EndpointName {
    EndpointName { node: fixed(&labels.node), zone: fixed(&labels.zone), pod: fixed(&labels.pod) }
}

fn fixed<const N: usize>(label: &Option<Arc<str>>) -> [u8; N] {
    to_fixed(label.as_deref().unwrap_or(""))
}

fn endpoint_labels(name: &EndpointName, strings: &mut Strings) -> EndpointLabels {
    EndpointLabels {
        node: strings.shared(&name.node),
        zone: strings.shared(&name.zone),
        pod: text(&name.pod).map(Arc::from),
    }
}

/// Strings that were read (names of nodes, zones, namespaces and ports), one copy of each.
#[derive(Default)]
struct Strings(HashSet<Arc<str>>);

impl Strings {
    fn shared(&mut self, fixed: &[u8]) -> Option<Arc<str>> {
        let text = text(fixed)?;
        if let Some(known) = self.0.get(text) {
            return Some(known.clone());
        }
        let new: Arc<str> = text.into();
        self.0.insert(new.clone());
        Some(new)
    }
}

/// The text in a zero-padded field; `None` for an empty one.
fn text(fixed: &[u8]) -> Option<&str> {
    Some(from_fixed(fixed)).filter(|text| !text.is_empty())
}

/// Describes a step so that the text continues "cannot …" in an error.
fn describe(step: &Step) -> String {
    let frontend = |key: &ServiceKey| {
        let address = IpAddr::from(key.address);
        let protocol = Protocol::from_number(key.protocol).map_or("unknown", Protocol::as_str);
        format!("{}/{protocol}", std::net::SocketAddr::new(address, key.port))
    };
    match step {
        Step::DeleteFrontend(key) => format!("delete frontend {}", frontend(key)),
        Step::WriteBackends { base, backends } => format!("write {} backends at slot {base}", backends.len()),
        Step::WriteTable { base, entries } => {
            format!("write a table of {} entries at slot {base}", entries.len())
        }
        Step::ReleaseTable { base, count } => format!("release a table of {count} entries at slot {base}"),
        Step::PutServiceLabels(id, labels) => format!("name service {id} {}", labels.name),
        Step::PutEndpointLabels(ip, _) => format!("name endpoint {ip}"),
        Step::PutFrontend(key, service) => {
            format!("put frontend {} of service {}", frontend(key), service.id)
        }
        Step::ReleaseBackends { base, count } => format!("release {count} backends at slot {base}"),
        Step::DeleteServiceLabels(id) => format!("delete the name of service {id}"),
        Step::DeleteEndpointLabels(ip) => format!("delete the name of endpoint {ip}"),
        Step::PutVip(ip, _) => format!("put virtual address {ip}"),
        Step::DeleteVip(ip) => format!("delete virtual address {ip}"),
        Step::PutLimits(id, _) => format!("limit new connections of service {id}"),
        Step::DeleteLimits(id) => format!("end the limits of service {id}"),
        Step::PutSourceRange(range) => {
            format!("allow a source range of service {}", range.range.service())
        }
        Step::DeleteSourceRange(range) => {
            format!("delete a source range of service {}", range.range.service())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_slices_are_read_together() {
        assert_eq!(merged(&[(0, 4), (4, 9), (9 + GAP, 500), (5000, 5001)]), [(0, 500), (5000, 5001)]);
        assert_eq!(merged(&[(0, 100), (10, 20)]), [(0, 100)]);
        assert_eq!(merged(&[]), []);
    }

    #[test]
    fn labels_survive_a_round_trip_through_the_kernel() {
        let labels = ServiceLabels {
            name: ServicePortName {
                service: ObjectName::new("default", "web"),
                port: "https".into(),
                protocol: Protocol::Udp,
            },
            node_port: Some(30_443),
        };
        let read = service_labels(&service_name(&labels), &mut Strings::default());
        assert_eq!(read, Some(labels));
        let labels = EndpointLabels { node: Some("a".into()), zone: None, pod: Some("web-0".into()) };
        assert_eq!(endpoint_labels(&endpoint_name(&labels), &mut Strings::default()), labels);
    }
}
