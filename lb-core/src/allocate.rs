//! Allocates cluster IPs and node ports for Services that come from no API server, by the rules of an API server.

mod health_check;
mod range;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    ops::RangeInclusive,
};

use ipnet::IpNet;
use lb_common::FrontendKind;

use self::range::{IpRange, probe, static_band};
use crate::{
    api,
    convert::{self, ConvertError, Object},
    family::Family,
    fnv::fnv1a,
    model::ObjectName,
    plan::Contents,
    rules::{
        self, FieldError,
        cluster_ips::{self, FamilyPolicy, Requested},
        service_ports,
    },
};

/// The range of node ports that an API server uses by default.
pub const DEFAULT_NODE_PORTS: RangeInclusive<u16> = 30_000..=32_767;

/// Whether a Service gets a cluster IP outside the ranges if it requests one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutsideRanges {
    /// The Service gets it: the user has set no ranges, and the default ranges are a guess.
    Accepted,
    /// The Service does not get it, as with an API server.
    Refused,
}

/// The addresses and ports that one Service has been allocated.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Allocation {
    /// The cluster IPs, at most one of each family.
    pub cluster_ips: Vec<IpAddr>,
    /// Node ports, by the service port's name and its protocol as Kubernetes spells it.
    pub node_ports: BTreeMap<(String, String), u16>,
    /// The port for load balancers' health checks of the node. No map holds it: after a restart, the allocator computes
    /// it again from a hash of the Service's name, which usually gives the same port.
    pub health_check_node_port: Option<u16>,
}

impl Allocation {
    fn ports(&self) -> impl Iterator<Item = u16> {
        self.node_ports.values().copied().chain(self.health_check_node_port)
    }
}

/// The allocations of all Services, by name.
pub type Allocations = BTreeMap<ObjectName, Allocation>;

/// The allocations that an earlier run of the agent left in the maps.
pub fn known_allocations(contents: &Contents) -> Allocations {
    let mut known = Allocations::new();
    for labels in contents.service_labels.values() {
        let allocation = known.entry(labels.name.service.clone()).or_default();
        if let Some(node_port) = labels.node_port {
            let port = (labels.name.port.to_string(), labels.name.protocol.as_str().to_owned());
            allocation.node_ports.insert(port, node_port);
        }
    }
    for (service, ip) in contents.addresses(FrontendKind::ClusterIp) {
        let Some(allocation) = known.get_mut(service) else { continue };
        let another = |other: &IpAddr| other.is_ipv4() == ip.is_ipv4();
        if !allocation.cluster_ips.iter().any(another) {
            allocation.cluster_ips.push(ip);
        }
    }
    known
}

/// Allocates cluster IPs and node ports: the values that the Service requests, else the values that it has, else the
/// first free values, searched from a position that a hash of the Service's name determines. So
/// [`assign_all`](Self::assign_all) gives the same Services the same values even if no earlier allocation is known. No
/// two Services have the same value.
#[derive(Clone, Debug)]
pub struct Allocator {
    ranges: Vec<IpRange>,
    outside: OutsideRanges,
    node_ports: RangeInclusive<u16>,
    services: Allocations,
    ip_owner: BTreeMap<IpAddr, ObjectName>,
    port_owner: BTreeMap<u16, ObjectName>,
}

impl Allocator {
    /// An allocator of addresses from the first range of each family in `ranges`. A single-stack Service that requests
    /// no family gets the family of the first element of `ranges`. `known` holds the allocations of existing Services,
    /// see [`known_allocations`]. The allocator drops a port that is out of range. It also drops a cluster IP that is
    /// out of range, unless `outside` accepts it. If two Services have the same value, the first Service by name keeps
    /// it.
    pub fn new(
        ranges: &[IpNet],
        outside: OutsideRanges,
        node_ports: RangeInclusive<u16>,
        known: Allocations,
    ) -> Self {
        let mut allocator = Self {
            ranges: Vec::new(),
            outside,
            node_ports,
            services: Allocations::new(),
            ip_owner: BTreeMap::new(),
            port_owner: BTreeMap::new(),
        };
        for net in ranges {
            if allocator.range(Family::of(net.addr())).is_none() {
                allocator.ranges.push(IpRange::new(*net));
            }
        }
        for (service, mut allocation) in known {
            allocation.cluster_ips.retain(|ip| {
                let is_in_range = allocator.ranges.iter().any(|range| range.contains(*ip));
                is_in_range || outside == OutsideRanges::Accepted
            });
            allocation.node_ports.retain(|_, port| allocator.node_ports.contains(port));
            allocator.commit_free(&service, allocation);
        }
        allocator
    }

    /// Allocates what a Service needs and writes it to `spec.clusterIP`, `clusterIPs`, `ipFamilies`, `ipFamilyPolicy`,
    /// `ports[].nodePort` and `healthCheckNodePort`. On an error the Service keeps what it had.
    ///
    /// # Errors
    ///
    /// A Service without a valid name or without `spec`; a request that is malformed, out of range, taken, or for a
    /// family without a range; or a full range. The texts have the form of an API server's errors.
    pub fn assign(&mut self, service: &mut api::Service) -> Result<(), ConvertError> {
        let name = convert::object_name("Service", &service.metadata)?;
        let object = Object::new("Service", &name);
        let Some(spec) = &mut service.spec else {
            return Err(object.required("spec", "a Service needs a spec"));
        };
        let request = Computation { allocator: self, name: &name, object: &object };
        let (ips, node_ports) = (request.cluster_ips(spec)?, request.node_ports(spec)?);
        let health_check_node_port = request.health_check_node_port(spec, &node_ports)?;
        write_ips(spec, &ips);
        spec.health_check_node_port = health_check_node_port.map(i32::from);
        write_node_ports(spec, &node_ports);
        let ports = spec.ports.iter().flatten().zip(node_ports);
        let node_ports = ports.filter_map(|(port, node_port)| Some((port_name(port), node_port?))).collect();
        self.commit(&name, Allocation { cluster_ips: ips.given, node_ports, health_check_node_port });
        Ok(())
    }

    /// Assigns to many Services at once, independent of their order: first reserves all requested values, then
    /// allocates the others in order of the names. Returns each error by the index of its Service, and does not change
    /// the objects of Services with an error. Such a Service keeps what it had, except what another Service has got in
    /// this call.
    pub fn assign_all(&mut self, services: &mut [api::Service]) -> BTreeMap<usize, ConvertError> {
        let names = services.iter().map(|service| convert::object_name("Service", &service.metadata).ok());
        let before: Vec<Option<(ObjectName, Allocation)>> =
            names.map(|name| name.map(|name| (name.clone(), self.allocation(&name)))).collect();
        let mut order: Vec<usize> = (0..services.len()).collect();
        order.sort_by_key(|index| {
            let metadata = &services[*index].metadata;
            (metadata.namespace_or_default().to_owned(), metadata.name.clone())
        });
        let mut errors = BTreeMap::new();
        order.iter().for_each(|index| self.record(*index, &mut errors, |s| s.reserve(&services[*index])));
        // A Service may request a value that another Service releases in this call, and the other Service may be
        // waiting for a third. So the loop repeats until no further Service succeeds.
        let mut refused = usize::MAX;
        while errors.len() < refused {
            refused = errors.len();
            for index in order.iter().filter(|index| errors.contains_key(*index)).copied().collect::<Vec<_>>()
            {
                self.record(index, &mut errors, |s| s.reserve(&services[index]));
            }
        }
        for index in order {
            if !errors.contains_key(&index) {
                self.record(index, &mut errors, |s| s.assign(&mut services[index]));
            }
        }
        // A refused Service may have reserved other values than it had.
        let refused: Vec<_> = errors.keys().filter_map(|index| before[*index].clone()).collect();
        refused.iter().for_each(|(name, _)| self.release(name));
        for (name, allocation) in refused {
            self.commit_free(&name, allocation);
        }
        errors
    }

    /// The cluster IPs and ports that the Service has now; empty if it has none.
    fn allocation(&self, service: &ObjectName) -> Allocation {
        self.services.get(service).cloned().unwrap_or_default()
    }

    /// Gives the Service those values of `allocation` that no other Service has. The Service must not have any values
    /// yet.
    fn commit_free(&mut self, service: &ObjectName, mut allocation: Allocation) {
        let is_free = |port: &u16| !self.port_owner.contains_key(port);
        allocation.cluster_ips.retain(|ip| !self.ip_owner.contains_key(ip));
        allocation.node_ports.retain(|_, port| is_free(port));
        allocation.health_check_node_port = allocation.health_check_node_port.filter(is_free);
        self.commit(service, allocation);
    }

    /// Releases all addresses and ports of a deleted Service.
    pub fn release(&mut self, service: &ObjectName) {
        let Some(gone) = self.services.remove(service) else { return };
        gone.cluster_ips.iter().for_each(|ip| {
            self.ip_owner.remove(ip);
        });
        gone.ports().for_each(|port| {
            self.port_owner.remove(&port);
        });
    }

    /// Releases the allocations of Services that do not exist. Must be called once all existing Services are known;
    /// until then, no other Service gets these values.
    pub fn retain(&mut self, exists: impl Fn(&ObjectName) -> bool) {
        let gone: Vec<ObjectName> =
            self.services.keys().filter(|service| !exists(service)).cloned().collect();
        gone.iter().for_each(|service| self.release(service));
    }

    /// The allocations of all Services.
    pub const fn allocations(&self) -> &Allocations {
        &self.services
    }

    fn range(&self, family: Family) -> Option<&IpRange> {
        self.ranges.iter().find(|range| range.family() == family)
    }

    fn record(
        &mut self,
        index: usize,
        errors: &mut BTreeMap<usize, ConvertError>,
        run: impl FnOnce(&mut Self) -> Result<(), ConvertError>,
    ) {
        match run(self) {
            Ok(()) => errors.remove(&index),
            Err(error) => errors.insert(index, error),
        };
    }

    /// Reserves the values that a Service requests, and the values that it has and still needs, but allocates no new
    /// values.
    fn reserve(&mut self, service: &api::Service) -> Result<(), ConvertError> {
        let name = convert::object_name("Service", &service.metadata)?;
        let object = Object::new("Service", &name);
        let Some(spec) = &service.spec else { return Ok(()) };
        let request = Computation { allocator: self, name: &name, object: &object };
        let Requested { families, ips: mut explicit, .. } = request.requested(spec)?;
        let mut node_ports = request.explicit_node_ports(spec)?;
        let mut health_check_node_port = request.explicit_health_check_node_port(spec)?;
        let before = self.allocation(&name);
        for ip in before.cluster_ips.into_iter().filter(|ip| families.contains(&Family::of(*ip))) {
            if !explicit.iter().any(|other| Family::of(*other) == Family::of(ip)) {
                explicit.push(ip);
            }
        }
        if spec.wants_node_ports() {
            let kept: BTreeSet<_> = spec.ports.iter().flatten().map(port_name).collect();
            for (port, number) in before.node_ports.into_iter().filter(|(port, _)| kept.contains(port)) {
                node_ports.entry(port).or_insert(number);
            }
        }
        if spec.has_health_check_port() {
            health_check_node_port = health_check_node_port.or(before.health_check_node_port);
        }
        self.commit(&name, Allocation { cluster_ips: explicit, node_ports, health_check_node_port });
        Ok(())
    }

    fn commit(&mut self, service: &ObjectName, allocation: Allocation) {
        self.release(service);
        if allocation == Allocation::default() {
            return;
        }
        self.ip_owner.extend(allocation.cluster_ips.iter().map(|ip| (*ip, service.clone())));
        self.port_owner.extend(allocation.ports().map(|port| (port, service.clone())));
        self.services.insert(service.clone(), allocation);
    }
}

/// The cluster IPs of a Service, and the `ipFamilyPolicy` that goes with them.
struct ClusterIps {
    given: Vec<IpAddr>,
    policy: FamilyPolicy,
    headless: bool,
}

/// A computation of the allocation of one Service. It does not change the allocator.
struct Computation<'a> {
    allocator: &'a Allocator,
    name: &'a ObjectName,
    object: &'a Object,
}

impl Computation<'_> {
    /// The Service's cluster IPs: one of each family that it should have, in the order of the families.
    fn cluster_ips(&self, spec: &api::ServiceSpec) -> Result<ClusterIps, ConvertError> {
        let Requested { families, ips, policy } = self.requested(spec)?;
        let before = self.allocator.services.get(self.name).map_or(&[][..], |known| &known.cluster_ips);
        let mut given = Vec::new();
        for family in families {
            let known = ips.iter().chain(before).find(|ip| Family::of(**ip) == family);
            given.push(match known {
                Some(ip) => *ip,
                None => self.automatic_ip(family)?,
            });
        }
        Ok(ClusterIps { given, policy, headless: spec.is_headless() })
    }

    /// The cluster IPs that the Service requests, all in range and not taken, and the families in which it should have
    /// an address. Both are empty for `ExternalName` and headless Services.
    fn requested(&self, spec: &api::ServiceSpec) -> Result<Requested, ConvertError> {
        let mut requested = self.valid(cluster_ips::requested(spec))?;
        if spec.is_external_name() || spec.is_headless() {
            requested.families.clear();
            return Ok(requested);
        }
        self.check_families(spec)?;
        let dual = requested.policy != FamilyPolicy::SingleStack;
        if requested.policy == FamilyPolicy::RequireDualStack && self.allocator.ranges.len() < 2 {
            let why = "this node is not configured for dual-stack services";
            return Err(self.object.invalid("spec.ipFamilyPolicy", requested.policy.as_str(), why));
        }
        let families = &mut requested.families;
        for range in &self.allocator.ranges {
            if !families.contains(&range.family()) && (dual || families.is_empty()) {
                families.push(range.family());
            }
        }
        for (index, ip) in requested.ips.iter().enumerate() {
            self.check_ip(spec, index, *ip)?;
        }
        Ok(requested)
    }

    /// Returns what a Service requests; fails with the first of the errors, if there are any.
    fn valid<T>(&self, (requested, errors): (T, Vec<FieldError>)) -> Result<T, ConvertError> {
        let first = errors.into_iter().next();
        first.map_or(Ok(requested), |FieldError { field, why }| Err(self.object.error(field, why)))
    }

    /// Checks that this node has a range of each family that `ipFamilies` names.
    fn check_families(&self, spec: &api::ServiceSpec) -> Result<(), ConvertError> {
        for (index, name) in spec.ip_families.iter().flatten().enumerate() {
            if !self.allocator.ranges.iter().any(|range| range.family().as_str() == name) {
                let why = "not configured on this node: no service range of that family";
                return Err(self.object.invalid(format!("spec.ipFamilies[{index}]"), name, why));
            }
        }
        Ok(())
    }

    fn check_ip(&self, spec: &api::ServiceSpec, index: usize, ip: IpAddr) -> Result<(), ConvertError> {
        let refuse = |why: String| {
            let asked = ip.to_string();
            Err(self.object.invalid(
                ip_field(spec, index),
                asked,
                &format!("failed to allocate IP {ip}: {why}"),
            ))
        };
        let Some(range) = self.allocator.range(Family::of(ip)) else {
            return refuse("no service range of that family is configured".to_owned());
        };
        if !range.contains(ip) {
            let (net, bounds) = (range.net, range.bounds());
            match (self.allocator.outside, rules::endpoint_ip(ip)) {
                (OutsideRanges::Accepted, Ok(())) => {}
                (OutsideRanges::Accepted, Err(why)) => return refuse(why.to_owned()),
                (OutsideRanges::Refused, _) => {
                    return refuse(format!("the provided IP is not in the valid range {net} ({bounds})"));
                }
            }
        }
        match self.allocator.ip_owner.get(&ip) {
            Some(owner) if owner != self.name => {
                refuse(format!("provided IP is already allocated to Service \"{owner}\""))
            }
            Some(_) | None => Ok(()),
        }
    }

    fn automatic_ip(&self, family: Family) -> Result<IpAddr, ConvertError> {
        let Some(range) = self.allocator.range(family) else {
            return Err(self
                .object
                .required("spec.clusterIPs", "no service range of that family is configured"));
        };
        let hash = fnv1a(&[&self.name.namespace, &self.name.name, family.as_str()]);
        let is_free = |offset| !self.allocator.ip_owner.contains_key(&range.nth(offset));
        match probe(hash.into(), range.size(), range.static_band(), is_free) {
            Some(offset) => Ok(range.nth(offset)),
            None => Err(self.object.required("spec.clusterIPs", &format!("range {} is full", range.net))),
        }
    }

    /// The node port that each of `spec.ports` should have, in the same order; `None` for a port without one.
    fn node_ports(&self, spec: &api::ServiceSpec) -> Result<Vec<Option<u16>>, ConvertError> {
        let explicit = self.explicit_node_ports(spec)?;
        let ports = spec.ports.as_deref().unwrap_or_default();
        if !spec.wants_node_ports() {
            return Ok(ports.iter().map(|port| explicit.get(&port_name(port)).copied()).collect());
        }
        let empty = BTreeMap::new();
        let before = self.allocator.services.get(self.name).map_or(&empty, |known| &known.node_ports);
        let mut uses: BTreeSet<(u16, String)> =
            explicit.iter().map(|((_, protocol), port)| (*port, protocol.clone())).collect();
        let mut by_port: BTreeMap<i32, u16> = BTreeMap::new();
        let mut given = Vec::new();
        for port in ports {
            let (name, protocol) = port_name(port);
            let is_mine = |number: &u16| !uses.contains(&(*number, protocol.clone()));
            let key = (name, protocol.clone());
            let number = match explicit.get(&key) {
                Some(number) => *number,
                None => match before
                    .get(&key)
                    .filter(|n| is_mine(n))
                    .or_else(|| by_port.get(&port.port).filter(|n| is_mine(n)))
                {
                    Some(number) => *number,
                    None => self.automatic_node_port(port, &uses)?,
                },
            };
            uses.insert((number, protocol));
            by_port.entry(port.port).or_insert(number);
            given.push(Some(number));
        }
        Ok(given)
    }

    /// Checks the node ports that the Service requests: valid, in range and not taken. Returns them.
    fn explicit_node_ports(
        &self,
        spec: &api::ServiceSpec,
    ) -> Result<BTreeMap<(String, String), u16>, ConvertError> {
        let mut explicit = BTreeMap::new();
        let requested = self.valid(service_ports::node_ports(spec))?;
        for (index, (port, number)) in spec.ports.iter().flatten().zip(requested).enumerate() {
            let Some(number) = number else { continue };
            let number = self.valid_node_port(format!("spec.ports[{index}].nodePort"), number.into())?;
            explicit.insert(port_name(port), number);
        }
        Ok(explicit)
    }

    /// Checks that a requested node port is in range and not taken by another Service.
    fn valid_node_port(&self, field: String, number: i32) -> Result<u16, ConvertError> {
        let range = &self.allocator.node_ports;
        let Some(valid) = u16::try_from(number).ok().filter(|number| range.contains(number)) else {
            let (first, last) = (range.start(), range.end());
            let why = format!(
                "provided port is not in the valid range. The range of valid ports is {first}-{last}"
            );
            return Err(self.object.invalid(field, number, &why));
        };
        match self.allocator.port_owner.get(&valid).filter(|owner| *owner != self.name) {
            Some(owner) => {
                let why = format!("provided port is already allocated to Service \"{owner}\"");
                Err(self.object.invalid(field, number, &why))
            }
            None => Ok(valid),
        }
    }

    fn automatic_node_port(
        &self,
        port: &api::ServicePort,
        uses: &BTreeSet<(u16, String)>,
    ) -> Result<u16, ConvertError> {
        let hash = fnv1a(&[&self.name.namespace, &self.name.name, &port.port.to_string()]);
        self.free_node_port(hash, |number| uses.iter().any(|(used, _)| *used == number), "spec.ports")
    }

    /// The first free node port in the order of [`probe`]; `is_used` says whether this Service already uses a port for
    /// another purpose.
    fn free_node_port(
        &self,
        hash: u64,
        is_used: impl Fn(u16) -> bool,
        field: &str,
    ) -> Result<u16, ConvertError> {
        let (first, last) = (*self.allocator.node_ports.start(), *self.allocator.node_ports.end());
        let size = u128::from(last.saturating_sub(first)) + 1;
        let nth = |offset: u128| u16::try_from(u128::from(first) + offset).unwrap_or(last);
        let is_free = |offset| {
            let number = nth(offset);
            !self.allocator.port_owner.contains_key(&number) && !is_used(number)
        };
        match probe(hash.into(), size, static_band(size, 32, 128), is_free) {
            Some(offset) => Ok(nth(offset)),
            None => Err(self.object.required(field, &format!("range {first}-{last} of node ports is full"))),
        }
    }
}

fn ip_field(spec: &api::ServiceSpec, index: usize) -> String {
    match &spec.cluster_ips {
        Some(list) if list.len() > 1 => format!("spec.clusterIPs[{index}]"),
        Some(_) | None => "spec.clusterIPs".to_owned(),
    }
}

fn port_name(port: &api::ServicePort) -> (String, String) {
    (port.name.clone().unwrap_or_default(), port.protocol_or_default().to_owned())
}

fn write_ips(spec: &mut api::ServiceSpec, ips: &ClusterIps) {
    if ips.headless {
        return;
    }
    if ips.given.is_empty() {
        (spec.cluster_ip, spec.cluster_ips) = (None, None);
        return;
    }
    let texts: Vec<String> = ips.given.iter().map(ToString::to_string).collect();
    let family = |ip: &IpAddr| Family::of(*ip).as_str().to_owned();
    spec.cluster_ip = texts.first().cloned();
    spec.cluster_ips = Some(texts);
    spec.ip_families = Some(ips.given.iter().map(family).collect());
    spec.ip_family_policy = Some(ips.policy.as_str().to_owned());
}

fn write_node_ports(spec: &mut api::ServiceSpec, node_ports: &[Option<u16>]) {
    for (port, node_port) in spec.ports.iter_mut().flatten().zip(node_ports) {
        port.node_port = node_port.map(i32::from);
    }
}

#[cfg(test)]
mod tests;
