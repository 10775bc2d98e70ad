//! A fake kernel, whose maps are ordered. It fails the test when a step breaks an invariant that the data plane needs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    net::{IpAddr, SocketAddr},
};

use lb_common::{
    Backend, ConnectionLimits, FrontendKind, Scheduler, Service, ServiceKey, SourceRangeKey, backend_flags,
    service_flags, vip_flags,
};
use lb_core::{
    arena::{Epoch, SlotRange},
    family::{Families, Family},
    health_checks::NoLocalEndpoints,
    model::{self, NodeAddresses, ObjectName, Policy},
    plan::{Contents, EndpointLabels, Plan, Step, slices_of, tables_of},
    tables::Digest,
    {capacity::Capacity, reconciler::Reconciler},
};

use crate::world;

/// Number of plans after which another plan must have no step.
const ROUNDS: usize = 10;
/// Maximum number of addresses of the node in these tests. The agent writes them to `VIPS` even if Services have used
/// up their capacity.
const OWN_ADDRESSES: u32 = 4;
/// Number of slots of `TABLES` per slot of `BACKENDS`.
const TABLE_SLOTS: u32 = 64;

#[derive(Clone, Debug, Default)]
pub(crate) struct Kernel {
    /// The contents of the maps; `backends` keeps the last value of every slot that was ever written, as an array does.
    pub(crate) maps: Contents,
    /// The entries of `TABLES`, an array; `maps.tables` has digests of the tables that can be read back.
    entries: BTreeMap<u32, u32>,
    /// Replaced or deleted records that running programs may still hold, each with the epoch of its removal; `None`
    /// while that epoch has not ended.
    stale: Vec<(Option<Epoch>, Service)>,
}

/// For each frontend, the backends that it leads to.
pub(crate) type Resolved = BTreeMap<ServiceKey, Lead>;

/// Where a frontend leads, independent of ids and slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lead {
    pub(crate) kind: u8,
    pub(crate) flags: u16,
    /// The backends that external clients get; without a short circuit, those of all clients.
    pub(crate) backends: Vec<Backend>,
    /// The backends that internal clients get, if there is a short circuit.
    pub(crate) inside: Vec<Backend>,
    pub(crate) scheduler: u8,
    /// The scheduler's table of positions in `backends`; empty if there is none.
    pub(crate) table: Vec<u32>,
    pub(crate) inside_table: Vec<u32>,
    /// The limits, if the frontend has the flag [`service_flags::LIMITED`].
    pub(crate) limits: Option<ConnectionLimits>,
}

/// Networks as address and prefix length; an IPv4 prefix length also counts the first 96 bits of a v4-mapped address,
/// as in the keys of `SOURCE_RANGES`.
pub(crate) type Networks = BTreeSet<(IpAddr, u32)>;

impl Kernel {
    pub(crate) fn apply(&mut self, step: &Step) {
        match step {
            Step::DeleteFrontend(key) => {
                let gone = self.maps.frontends.remove(key).expect("only a frontend that exists is deleted");
                self.stale.push((None, gone));
            }
            Step::WriteBackends { base, backends } => {
                let end = base + u32::try_from(backends.len()).expect("fits");
                self.assert_unread(*base, end);
                assert!(backends.is_sorted() && !backends.is_empty());
                self.maps.backends.extend((*base..).zip(backends.iter().copied()));
            }
            Step::WriteTable { base, entries } => {
                let end = base + u32::try_from(entries.len()).expect("fits");
                let read = |record: &Service| table_ends(record).any(|range| overlap(range, (*base, end)));
                let mut records = self.maps.frontends.values().chain(self.stale.iter().map(|(_, r)| r));
                assert!(!entries.is_empty() && !records.any(read), "a table that may be read is written");
                self.entries.extend((*base..).zip(entries.iter().copied()));
                self.maps.tables.insert(*base, Digest::of(entries));
            }
            Step::ReleaseTable { base, count } => {
                let reads = |r: &Service| table_ends(r).any(|range| overlap(range, (*base, base + count)));
                assert!(!self.maps.frontends.values().any(reads), "released under a frontend");
                self.maps.tables.remove(base);
            }
            Step::PutServiceLabels(id, labels) => {
                assert_ne!(*id, 0);
                self.maps.service_labels.insert(*id, (**labels).clone());
            }
            Step::PutEndpointLabels(address, labels) => {
                self.maps.endpoint_labels.insert(*address, labels.clone());
            }
            Step::PutFrontend(key, record) => {
                assert!(record.is_sealed(key));
                assert!(self.maps.service_labels.contains_key(&record.id), "a frontend without a name");
                if let Some(old) = self.maps.frontends.insert(*key, **record) {
                    assert_ne!(old, **record, "a step that changes nothing");
                    self.stale.push((None, old));
                }
            }
            Step::ReleaseBackends { base, count } => {
                let reads = |r: &Service| ends_of(r).any(|range| overlap(range, (*base, base + count)));
                assert!(!self.maps.frontends.values().any(reads), "released under a frontend");
            }
            Step::PutVip(address, vip) => {
                assert_ne!(self.maps.vips.insert(*address, *vip), Some(*vip), "a step that changes nothing");
            }
            Step::DeleteVip(address) => {
                self.maps.vips.remove(address).expect("only an address that exists is deleted");
            }
            Step::PutSourceRange(range) => {
                assert!(self.maps.source_ranges.insert(*range), "a step that changes nothing");
            }
            Step::DeleteSourceRange(range) => {
                assert!(self.maps.source_ranges.remove(range), "only a range that exists is deleted");
            }
            Step::PutLimits(id, limits) => {
                assert!(self.maps.service_labels.contains_key(id), "limits without a name");
                assert_ne!(
                    self.maps.limits.insert(*id, *limits),
                    Some(*limits),
                    "a step that changes nothing"
                );
            }
            Step::DeleteLimits(id) => {
                let limited = |r: &Service| r.id == *id && r.flags & service_flags::LIMITED != 0;
                assert!(!self.maps.frontends.values().any(limited), "unlimited under a frontend");
                self.maps.limits.remove(id).expect("only limits that exist are deleted");
            }
            Step::DeleteServiceLabels(id) => {
                assert!(
                    !self.maps.frontends.values().any(|record| record.id == *id),
                    "unnamed under a frontend"
                );
                self.maps.service_labels.remove(id).expect("only a name that exists is deleted");
            }
            Step::DeleteEndpointLabels(address) => {
                self.maps.endpoint_labels.remove(address).expect("only a name that exists is deleted");
            }
        }
    }

    /// Asserts that no frontend refers to these slots, and that no running program may read them.
    fn assert_unread(&self, base: u32, end: u32) {
        let current = self.maps.frontends.values().flat_map(ends_of);
        let stale = self.stale.iter().flat_map(|(_, record)| ends_of(record));
        for range in current.chain(stale) {
            assert!(
                !overlap(range, (base, end)),
                "slots {base}..{end} are written while {range:?} may be read"
            );
        }
    }

    pub(crate) fn epoch_ended(&mut self, epoch: Epoch) {
        self.stale.iter_mut().for_each(|(of, ..)| *of = of.or(Some(epoch)));
    }

    pub(crate) fn grace_elapsed(&mut self, epoch: Epoch) {
        self.stale.retain(|(of, ..)| of.is_none_or(|of| of > epoch));
    }

    /// The contents of the maps at the start of an agent. Programs hold no old records then, because an agent first
    /// waits for a grace period.
    pub(crate) fn read_back(&mut self) -> Contents {
        self.stale.clear();
        let mut contents = self.maps.clone();
        let referred = |slot: &u32| {
            let mut slices = self.maps.frontends.values().flat_map(ends_of);
            slices.any(|(base, end)| (base..end).contains(slot))
        };
        contents.backends.retain(|slot, _| referred(slot));
        let starts =
            |base: &u32| self.maps.frontends.values().flat_map(table_ends).any(|range| range.0 == *base);
        contents.tables.retain(|base, _| starts(base));
        contents
    }

    pub(crate) fn resolved(&self) -> Resolved {
        // Programs read the fields for internal clients only if the record has this flag.
        let inside = |record: &Service, count| {
            if record.flags & service_flags::SHORT_CIRCUIT != 0 { count } else { 0 }
        };
        let lead = |record: &Service| Lead {
            kind: record.kind,
            flags: record.flags,
            backends: self.backends(record.backends_base, record.backends_count),
            inside: self.backends(record.internal_base, inside(record, record.internal_count)),
            scheduler: record.scheduler,
            table: self.table(record.table_base, record.table_count),
            inside_table: self.table(record.internal_table_base, inside(record, record.internal_table_count)),
            limits: (record.flags & service_flags::LIMITED != 0).then(|| self.maps.limits[&record.id]),
        };
        self.maps.frontends.iter().map(|(key, record)| (*key, lead(record))).collect()
    }

    fn backends(&self, base: u32, count: u32) -> Vec<Backend> {
        (base..base + count)
            .map(|slot| *self.maps.backends.get(&slot).expect("a frontend refers to a slot never written"))
            // The numbers of counters are arbitrary; `assert_counters` checks them.
            .map(|backend| Backend { active_flows_slot: 0, ..backend })
            .collect()
    }

    fn table(&self, base: u32, count: u32) -> Vec<u32> {
        let entry = |slot| *self.entries.get(&slot).expect("a frontend refers to a slot never written");
        (base..base + count).map(entry).collect()
    }

    /// The source ranges of each frontend that has some.
    pub(crate) fn admitted(&self) -> BTreeMap<ServiceKey, Networks> {
        let filters = |record: &&Service| record.flags & service_flags::SOURCE_RANGES != 0;
        let frontends = self.maps.frontends.iter().filter(|(_, record)| filters(record));
        frontends.map(|(key, record)| (*key, self.ranges(key, record.id))).collect()
    }

    fn ranges(&self, key: &ServiceKey, id: u32) -> Networks {
        let of_service = |range: &&SourceRangeKey| {
            range.range.service_and_family == id << 1 | u32::from(key.address.is_v4())
        };
        let ranges = self.maps.source_ranges.iter().filter(of_service);
        ranges.map(|range| (range.range.address.into(), range.prefix_length - 32)).collect()
    }

    /// The contents of the maps except `LIMITS`, as text without ids and slots, in a stable order.
    pub(crate) fn dump(&self) -> String {
        let mut blocks: Vec<String> =
            self.maps.frontends.iter().map(|(key, record)| self.dump_frontend(key, record)).collect();
        blocks.sort();
        let mut text = blocks.concat();
        for (address, vip) in &self.maps.vips {
            let kind = if vip.flags & vip_flags::CLUSTER_IP != 0 { " of the cluster" } else { "" };
            let silent = if vip.flags & vip_flags::ECHO == 0 { ", which we do not speak for" } else { "" };
            writeln!(text, "virtual address {address}{kind}{silent}").expect("memory");
        }
        for (address, labels) in &self.maps.endpoint_labels {
            let EndpointLabels { node, zone, pod } = &**labels;
            let show = |label: &Option<std::sync::Arc<str>>| label.as_deref().unwrap_or("-").to_owned();
            writeln!(text, "address {address} node {} zone {} pod {}", show(node), show(zone), show(pod))
                .expect("memory");
        }
        text
    }

    fn dump_frontend(&self, key: &ServiceKey, record: &Service) -> String {
        let labels = &self.maps.service_labels[&record.id];
        let kind = FrontendKind::try_from(record.kind).expect("a kind we know").as_str();
        let socket = SocketAddr::new(key.address.into(), key.port);
        let mut text = format!("{} {kind} {socket}", labels.name);
        if let Some(node_port) = labels.node_port {
            write!(text, " node port {node_port}").expect("memory");
        }
        if record.affinity_seconds > 0 {
            write!(text, " affinity {} s", record.affinity_seconds).expect("memory");
        }
        if record.scheduler != 0 {
            let scheduler = Scheduler::try_from(record.scheduler).expect("a scheduler we know");
            write!(text, " scheduler {scheduler}").expect("memory");
        }
        for (flag, meaning) in FLAGS {
            if record.flags & flag != 0 {
                write!(text, ", {meaning}").expect("memory");
            }
        }
        text.push('\n');
        for (who, base, count) in [
            ("table", record.table_base, record.table_count),
            ("inside: table", record.internal_table_base, record.internal_table_count),
        ] {
            if count > 0 {
                writeln!(text, "  {who} of {}", self.dump_table(base, count)).expect("memory");
            }
        }
        for backend in self.backends(record.backends_base, record.backends_count) {
            writeln!(text, "  {}", shown(&backend)).expect("memory");
        }
        for backend in self.backends(record.internal_base, record.internal_count) {
            writeln!(text, "  inside: {}", shown(&backend)).expect("memory");
        }
        if record.flags & service_flags::SOURCE_RANGES != 0 {
            for (address, bits) in self.ranges(key, record.id) {
                let prefix = if address.is_ipv4() { bits - 96 } else { bits };
                writeln!(text, "  from {address}/{prefix}").expect("memory");
            }
        }
        text
    }
}

impl Kernel {
    /// A table as text: entry by entry if it is short, else as the share of each backend.
    fn dump_table(&self, base: u32, count: u32) -> String {
        let table = self.table(base, count);
        if table.len() < 32 {
            return format!("{table:?}");
        }
        let mut shares: BTreeMap<u32, u32> = BTreeMap::new();
        table.iter().for_each(|place| *shares.entry(*place).or_default() += 1);
        format!("{count}, by backend {shares:?}")
    }
}

const FLAGS: [(u16, &str); 11] = [
    (service_flags::MASQUERADE, "masquerade"),
    (service_flags::MASQUERADE_EXTERNAL, "masquerade outsiders"),
    (service_flags::SHORT_CIRCUIT, "short circuit"),
    (service_flags::DROP_WITHOUT_BACKENDS, "drop"),
    (service_flags::SOURCE_RANGES, "source ranges"),
    (service_flags::SOCKETS_ONLY, "sockets only"),
    (service_flags::DSR, "dsr"),
    (service_flags::SYN_ONLY, "opened only"),
    (service_flags::RESET_UNKNOWN, "reset unknown"),
    (service_flags::PROXY_PROTOCOL, "proxy protocol"),
    (service_flags::LIMITED, "limited"),
];

#[test]
fn each_flag_has_a_name() {
    for flag in service_flags::ALL {
        assert!(FLAGS.iter().any(|(named, _)| *named == flag), "{flag}");
    }
}

fn shown(backend: &Backend) -> String {
    let mut text = SocketAddr::new(backend.address.into(), backend.port).to_string();
    for (flag, meaning) in [
        (backend_flags::TERMINATING, "terminating"),
        (backend_flags::LOCAL, "local"),
        (backend_flags::HOST, "host"),
        (backend_flags::PEER, "peer"),
    ] {
        if backend.flags & flag != 0 {
            write!(text, " {meaning}").expect("memory");
        }
    }
    if backend.weight != 1 {
        write!(text, " weight {}", backend.weight).expect("memory");
    }
    text
}

/// A reconciler, and the fake kernel to which its plans are applied.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) reconciler: Reconciler,
    pub(crate) kernel: Kernel,
    capacity: Capacity,
    /// The state of the node that the reconciler has been given.
    pub(crate) node: model::Node,
    epochs: Vec<Epoch>,
}

impl Node {
    pub(crate) fn new(slots: u32) -> Self {
        Self::started_on(Kernel::default(), slots)
    }

    pub(crate) fn with_policy(slots: u32, policy: Policy) -> Self {
        Self::with_capacity(Capacity::of_arenas(slots, slots * TABLE_SLOTS), policy)
    }

    pub(crate) fn with_capacity(capacity: Capacity, policy: Policy) -> Self {
        let mut node = Self::incomplete(Kernel::default(), capacity, policy);
        node.reconciler.set_complete();
        node
    }

    pub(crate) fn started_on(kernel: Kernel, slots: u32) -> Self {
        let mut node = Self::started_incomplete_on(kernel, slots);
        node.reconciler.set_complete();
        node
    }

    /// A node whose sources have not sent all objects yet.
    pub(crate) fn started_incomplete_on(kernel: Kernel, slots: u32) -> Self {
        Self::incomplete(kernel, Capacity::of_arenas(slots, slots * TABLE_SLOTS), Policy::default())
    }

    /// Like [`Self::started_incomplete_on`], for any capacity and policy.
    pub(crate) fn incomplete(mut kernel: Kernel, capacity: Capacity, policy: Policy) -> Self {
        Self {
            reconciler: Reconciler::new(kernel.read_back(), capacity, policy.clone()),
            kernel,
            capacity,
            node: model::Node { policy, ..model::Node::default() },
            epochs: Vec::new(),
        }
    }

    /// Restarts the agent. The test must send every object again, but not the node's state.
    pub(crate) fn restart(&mut self) {
        let model::Node { policy, zone, addresses, detects_inside, unhealthy, warming: _ } =
            std::mem::take(&mut self.node);
        let kernel = std::mem::take(&mut self.kernel);
        *self = Self::incomplete(kernel, self.capacity, policy);
        self.reconciler.adopt_unhealthy(unhealthy);
        self.reconciler.set_complete();
        self.set_zone(zone.as_deref());
        self.set_addresses(addresses);
        self.set_detects_inside(detects_inside);
    }

    pub(crate) fn set_zone(&mut self, zone: Option<&str>) {
        self.node.zone = zone.map(Into::into);
        self.reconciler.set_zone(self.node.zone.clone());
    }

    pub(crate) fn set_addresses(&mut self, addresses: NodeAddresses) {
        self.node.addresses = addresses.clone();
        self.reconciler.set_addresses(addresses);
    }

    pub(crate) fn set_detects_inside(&mut self, families: Families) {
        self.node.detects_inside = families;
        self.reconciler.set_detects_inside(families);
    }

    /// Makes a plan and applies its first `steps` steps; the rest fails. Checks the invariants after each step.
    pub(crate) fn sync_some(&mut self, steps: usize) -> Plan {
        let plan = self.reconciler.plan();
        self.apply_some(plan, steps)
    }

    /// Plans this number of Services at a time, and applies each part; stops when the kernel has taken `steps` steps of
    /// a part that has more. Asserts that a frontend that exists before the first part and after the last one never
    /// disappears in between.
    pub(crate) fn sync_parts(&mut self, services: usize, steps: usize) {
        let lasting = self.lasting();
        loop {
            let plan = self.reconciler.plan_part(services);
            let count = self.apply_some(plan, steps).steps.len();
            let gone = lasting.iter().find(|key| !self.kernel.maps.frontends.contains_key(key));
            assert_eq!(gone, None, "a frontend that only changes its Service");
            if count > steps || !self.reconciler.is_partial() {
                return;
            }
        }
    }

    /// The frontends that the maps have both now and after a complete plan; none if a map is too full for that plan.
    fn lasting(&self) -> BTreeSet<ServiceKey> {
        let plan = self.reconciler.clone().plan();
        if plan.problems.iter().any(|problem| problem.waits_for().is_some()) {
            return BTreeSet::new();
        }
        let mut whole = self.kernel.clone();
        plan.steps.iter().for_each(|step| whole.apply(step));
        let is_there = |key: &&ServiceKey| whole.maps.frontends.contains_key(key);
        self.kernel.maps.frontends.keys().filter(is_there).copied().collect()
    }

    fn apply_some(&mut self, plan: Plan, steps: usize) -> Plan {
        let before = (self.kernel.resolved(), self.kernel.admitted());
        let mut whole = self.kernel.clone();
        plan.steps.iter().for_each(|step| whole.apply(step));
        let after = (whole.resolved(), whole.admitted());
        let limits = [self.kernel.maps.limits.clone(), whole.maps.limits];
        for step in plan.steps.iter().take(steps) {
            self.kernel.apply(step);
            self.reconciler.applied(step);
            self.assert_each_is_old_or_new(&before, &after);
            self.assert_limits_are_old_or_new(&limits);
            self.assert_room();
        }
        if steps < plan.steps.len() {
            self.reconciler.failed();
        }
        plan
    }

    /// Asserts that the maps of frontends, service port names, source ranges, limits and virtual addresses have no more
    /// entries than they have room for.
    fn assert_room(&self) {
        let Contents { frontends, service_labels, source_ranges, limits, vips, .. } = &self.kernel.maps;
        for (entries, capacity) in [
            (frontends.len(), self.capacity.frontends),
            (service_labels.len(), self.capacity.names),
            (source_ranges.len(), self.capacity.source_ranges),
            (limits.len(), self.capacity.limits),
            (vips.len(), self.capacity.vips.saturating_add(OWN_ADDRESSES)),
        ] {
            assert!(entries <= capacity as usize, "{entries} entries where there is room for {capacity}");
        }
    }

    fn assert_each_is_old_or_new(&self, before: &Admitted, after: &Admitted) {
        let now = self.kernel.resolved();
        for key in before.0.keys().chain(after.0.keys()) {
            let (state, old, new) = (now.get(key), before.0.get(key), after.0.get(key));
            // Compares only whether a frontend has limits; `assert_limits_are_old_or_new` compares the limits
            // themselves.
            let with_any = |limits: Option<ConnectionLimits>| limits.map(|_| ConnectionLimits::default());
            let reduced =
                |lead: Option<&Lead>| lead.map(|lead| Lead { limits: with_any(lead.limits), ..lead.clone() });
            let [state, old, new] = [state, old, new].map(reduced);
            assert!(state == old || state == new, "{key:?} is neither what it was nor what it becomes");
        }
        for (key, networks) in self.kernel.admitted() {
            let holds = |all: &Admitted| all.1.get(&key).is_some_and(|those| networks.is_superset(those));
            assert!(holds(before) || holds(after), "{key:?} admits only {networks:?}");
        }
    }

    /// Asserts that every frontend with limits has either the limits that its service port had before the plan, or the
    /// limits that the service port has after the plan. (A plan writes the limits of a port before it writes the port's
    /// frontends.)
    fn assert_limits_are_old_or_new(&self, [before, after]: &[BTreeMap<u32, ConnectionLimits>; 2]) {
        let maps = &self.kernel.maps;
        let is_limited = |(_, record): &(_, &Service)| record.flags & service_flags::LIMITED != 0;
        for (key, record) in maps.frontends.iter().filter(is_limited) {
            let limits = maps.limits.get(&record.id);
            let (old, new) = (before.get(&record.id), after.get(&record.id));
            assert!(limits.is_some() && (limits == old || limits == new), "{key:?} has limits {limits:?}");
        }
    }

    pub(crate) fn sync(&mut self) -> Plan {
        self.sync_some(usize::MAX)
    }

    pub(crate) fn end_epoch(&mut self) {
        if let Some(epoch) = self.reconciler.end_epoch() {
            self.kernel.epoch_ended(epoch);
            self.epochs.push(epoch);
        }
    }

    pub(crate) fn grace(&mut self) {
        if !self.epochs.is_empty() {
            let epoch = self.epochs.remove(0);
            self.kernel.grace_elapsed(epoch);
            self.reconciler.grace_elapsed(epoch);
        }
    }

    /// Makes and applies [`ROUNDS`] plans, then asserts that another plan has no step and that no slot or id leaked.
    pub(crate) fn settle(&mut self) {
        for _ in 0..ROUNDS {
            self.sync();
            self.end_epoch();
            while !self.epochs.is_empty() {
                self.grace();
            }
        }
        assert_eq!(self.reconciler.plan().steps, Vec::new(), "a plan after everything is applied");
        let stuck = self.reconciler.problems().next().is_some();
        assert!(stuck || !self.reconciler.needs_plan());
        self.assert_no_leak();
        self.assert_counters();
        self.assert_mirror();
    }

    /// Asserts that every endpoint of a service port whose scheduler counts flows has a counter of its own.
    fn assert_counters(&self) {
        let mut counters = BTreeMap::new();
        for record in self.kernel.maps.frontends.values() {
            let counts = Scheduler::try_from(record.scheduler).is_ok_and(Scheduler::uses_active_flows);
            for slot in slices_of(record).flat_map(SlotRange::slots) {
                let backend = self.kernel.maps.backends[&slot];
                assert_eq!(backend.active_flows_slot != 0, counts, "{backend:?}");
                if counts {
                    let counted = (record.id, backend.address, backend.port);
                    assert_eq!(*counters.entry(backend.active_flows_slot).or_insert(counted), counted);
                }
            }
        }
        let endpoints: BTreeSet<_> = counters.values().collect();
        assert_eq!(endpoints.len(), counters.len(), "an endpoint with two counters");
    }

    /// Whether the Service keeps its old state because a map is full.
    pub(crate) fn waits(&self, service: &ObjectName) -> bool {
        let mut waiting = self.reconciler.problems().filter(|problem| problem.waits_for().is_some());
        waiting.any(|problem| problem.service() == service)
    }

    /// Asserts that the maps contain exactly what their frontends need.
    fn assert_no_leak(&self) {
        self.assert_slots();
        let maps = &self.kernel.maps;
        let needed = |flags: u16| -> BTreeSet<u32> {
            let records = maps.frontends.values().filter(|record| record.flags & flags == flags);
            records.map(|record| record.id).collect()
        };
        let named: BTreeSet<u32> = maps.service_labels.keys().copied().collect();
        assert_eq!(named, needed(0), "names of service ports");
        let limited: BTreeSet<u32> = maps.limits.keys().copied().collect();
        assert_eq!(limited, needed(service_flags::LIMITED), "limits of service ports");
        assert_eq!(maps.source_ranges, self.needed_source_ranges(), "source ranges");
        let foreign = self.foreign_ips();
        let vips = world::vips(&self.kernel.resolved(), foreign, &self.node);
        assert_eq!(maps.vips, vips, "virtual addresses");
        let slots = maps.frontends.values().flat_map(slices_of).flat_map(SlotRange::slots);
        let used: BTreeSet<IpAddr> = slots.map(|slot| maps.backends[&slot].address.into()).collect();
        let named: BTreeSet<IpAddr> = maps.endpoint_labels.keys().copied().collect();
        assert_eq!(named, used, "names of addresses");
    }

    /// The cluster IPs of other proxies' Services that `VIPS` should have. For a Service that waits for room, or stays
    /// as the agent found it, these are the ones that the map has.
    fn foreign_ips(&self) -> impl Iterator<Item = IpAddr> {
        let known = &self.kernel.maps.vips;
        let foreign = self.reconciler.store().services().filter(|(_, service)| service.is_foreign);
        foreign.flat_map(move |(name, service)| {
            let waits = self.waits(name) || self.reconciler.kept().contains(name);
            service.cluster_ips.iter().copied().filter(move |ip| !waits || known.contains_key(ip))
        })
    }

    /// Asserts that the slots in use are exactly those that frontends refer to, and that all others are free.
    fn assert_slots(&self) {
        let frontends = || self.kernel.maps.frontends.values();
        let (backends, tables) = (frontends().flat_map(slices_of), frontends().flat_map(tables_of));
        let (arenas, capacity) = ([self.reconciler.arena(), self.reconciler.table_arena()], self.capacity);
        for (arena, referred, slots) in [
            (arenas[0], backends.collect::<BTreeSet<SlotRange>>(), capacity.backends),
            (arenas[1], tables.collect(), capacity.tables),
        ] {
            let taken: u32 = referred.iter().map(|range| range.count).sum();
            assert_eq!(arena.used().collect::<BTreeSet<_>>(), referred);
            assert_eq!(arena.free_slots(), slots - taken);
        }
    }

    /// The source ranges that the frontends need, computed from the Services. For a Service that waits for room, or
    /// that the sources have not sent, these are the ones that the map has.
    fn needed_source_ranges(&self) -> BTreeSet<SourceRangeKey> {
        let maps = &self.kernel.maps;
        let mut needed = BTreeSet::new();
        for (key, record) in &maps.frontends {
            if record.flags & service_flags::SOURCE_RANGES == 0 {
                continue;
            }
            let name = &maps.service_labels[&record.id].name.service;
            let service = self.reconciler.store().service(name).filter(|_| !self.waits(name));
            let networks = service.and_then(|service| world::admitted(service, *key, &self.node));
            let networks = networks.unwrap_or_else(|| self.kernel.ranges(key, record.id));
            needed.extend(networks.into_iter().map(|(address, bits)| {
                let bits = if address.is_ipv4() { bits - 96 } else { bits };
                SourceRangeKey::new(record.id, address.into(), u8::try_from(bits).expect("a prefix"))
            }));
        }
        needed
    }

    /// The results of all health checks, as text.
    pub(crate) fn dump_health(&self) -> String {
        let mut text = String::new();
        for (name, check) in self.reconciler.health_checks() {
            write!(text, "health check of {name} on {}:", check.port).expect("memory");
            for family in Family::ALL {
                if let Some(count) = check.local_endpoints(family) {
                    write!(text, " {} {count}", family.as_str()).expect("memory");
                }
            }
            text.push('\n');
        }
        for family in Family::ALL {
            let NoLocalEndpoints { internal, external } = self.reconciler.no_local_endpoints(family);
            if internal + external > 0 {
                let family = family.as_str();
                writeln!(text, "no local endpoints {family}: {internal} internal, {external} external")
                    .expect("memory");
            }
        }
        text
    }

    /// Asserts that the reconciler's mirror equals the fake kernel's maps.
    fn assert_mirror(&self) {
        assert_eq!(*self.reconciler.contents(), self.kernel.clone().read_back());
    }
}

type Admitted = (Resolved, BTreeMap<ServiceKey, Networks>);

/// First slot, and slot after the last one, of each slice of backends that a record refers to.
fn ends_of(record: &Service) -> impl Iterator<Item = (u32, u32)> {
    slices_of(record).map(|range| (range.base, range.base.saturating_add(range.count)))
}

/// First slot, and slot after the last one, of each table that a record refers to.
fn table_ends(record: &Service) -> impl Iterator<Item = (u32, u32)> {
    tables_of(record).map(|range| (range.base, range.base.saturating_add(range.count)))
}

fn overlap(a: (u32, u32), b: (u32, u32)) -> bool {
    a.0.max(b.0) < a.1.min(b.1)
}
