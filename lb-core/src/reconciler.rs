//! The state machine that computes every write to the maps of Services; one task drives it.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use lb_common::{Backend, FrontendKind, Service, ServiceKey, SourceRangeKey, Vip, service_flags};

use crate::{
    active_flow_slots::{ActiveFlowSlots, ServiceEndpoint},
    adopt,
    announce::holders::{Holder, Holders},
    arena::{Arena, Epoch, SlotRange},
    capacity::{Capacity, Demand, Full, Remaining},
    claims::Claims,
    connection_rules::{RulesChange, RulesOfServices},
    convert::SLOW_START,
    desired::{self, Port},
    family::{Families, Family},
    health_checks::{HealthCheck, HealthChecks, NoLocalEndpoints},
    ids::Ids,
    kubelet_probes,
    last_good::{LastGood, Unread},
    mirror::Mirror,
    model::{
        self, AnnotationError, Change, EndpointSlice, IgnoredAnnotation, Node, NodeAddresses, ObjectName,
        Policy, Protocol,
    },
    per_address::{self, PerAddress},
    plan::{Condition, Contents, Draft, EndpointLabels, Plan, Step, slices_of, tables_of},
    probe::{self, Targets, target::alike},
    records::{Placement, count, frontends_of_ports, labels_of, record, source_ranges, vips_of},
    slices::Slices,
    slow_start::{self, SlowStarts},
    stale_udp::{ServedChange, StaleFrontends, StaleUdp},
    store::Store,
    tables::{self, Digest},
};

/// Turns changes of objects into steps for the kernel.
///
/// ```text
/// handle(changes)* → plan() → take_served_changes() → for each step: kernel, then applied(step) → end_epoch()
///                    or plan_part() in place of plan(), again while is_partial()
///                    if a step fails: failed() → take_served_changes()
///                    after a grace period: grace_elapsed(epoch)
/// ```
///
/// For a changed object, the plan recomputes only the object's Service and those that claim the same frontends. A
/// Service that the kernel holds when the agent starts stays there unchanged until the sources have shown it with an
/// EndpointSlice, or are complete ([`Self::sources_complete`]): a manifest that is invalid when the agent starts must
/// not delete the Service that it described.
#[derive(Clone, Debug)]
pub struct Reconciler {
    store: Store,
    claims: Claims,
    ids: Ids,
    /// The names (`ENDPOINT_NAMES`) that Services set for each address of a backend.
    labels: PerAddress<Arc<EndpointLabels>>,
    /// The flags (`VIPS`) that Services set for each virtual address.
    vips: PerAddress<Vip>,
    /// The slots of `BACKENDS`, and which service port owns them.
    slices: Slices,
    /// The slots of `TABLES`. Released slots of `TABLES` and `BACKENDS` become free after the same grace period.
    tables: Slices,
    counters: ActiveFlowSlots,
    capacity: Capacity,
    /// Whether map entries for which Services may wait (frontends, names, addresses, source ranges, limits) were
    /// deleted since the last [`Self::retry_waiting`].
    has_freed: bool,
    mirror: Mirror,
    /// Frontends found at the start whose records are invalid: the first plan replaces or deletes them.
    distrusted: BTreeSet<ServiceKey>,
    /// Invalid ids found at the start (0, and ids of a service port that already has another id): the first plan
    /// deletes their labels.
    stale_ids: BTreeSet<u32>,
    /// Source ranges, found at the start, of unknown service ports: the first plan deletes them.
    stale_ranges: BTreeSet<SourceRangeKey>,
    /// Ids found at the start in `LIMITS` without a service port: the first plan deletes their limits.
    stale_limits: BTreeSet<u32>,
    /// Services found at the start that the sources have not shown completely yet. Once the sources are complete, only
    /// those that the sources cannot read.
    earlier: BTreeSet<ObjectName>,
    /// Whether the sources have sent everything that they can read.
    complete: bool,
    unread: Unread,
    node: Node,
    last_good: LastGood,
    health_checks: HealthChecks,
    holders: Holders,
    targets: Targets,
    slow_starts: SlowStarts<ObjectName>,
    /// Time since the start of the agent, by which slow starts are scheduled.
    now: Duration,
    endings: StaleUdp,
    rules: RulesOfServices,
    problems: BTreeMap<ObjectName, Vec<Condition>>,
    /// The Services to plan, each with its ports. The ports are `None` if so many Services are due that storing them
    /// would take too much memory; the plan then computes them again.
    due: BTreeMap<ObjectName, Option<Vec<Port>>>,
    /// Whether the last plan covered only some of the Services, so that further plans follow.
    partial: bool,
    in_flight: InFlight,
    /// Services in `earlier` for which the maps may have elements that no frontend needs, because a plan of this run or
    /// of an earlier one was not applied completely. The next plan deletes such elements.
    unsettled: BTreeSet<ObjectName>,
    /// Number of addresses of endpoints when [`Self::compact`] last ran.
    compacted: usize,
}

/// Maximum number of dirty Services whose ports a plan keeps in memory; with more, it computes the ports of each
/// Service again when it needs them.
const FEW: usize = Reconciler::PART;

/// The Services that the last plan covers, and those that lose frontends by it, until all its steps are applied.
#[derive(Clone, Debug, Default)]
struct InFlight {
    steps: usize,
    services: Vec<ObjectName>,
}

/// Slots that are reserved for a Service whose plan is not complete yet.
#[derive(Default)]
struct Reserved {
    backends: Vec<u32>,
    tables: Vec<u32>,
}

/// A frontend, with the record that it should have in `SERVICES`.
struct Target {
    key: ServiceKey,
    record: Service,
}

/// The name under which `Reconciler::vips` has the node's own addresses; no Service can have it.
fn no_service() -> ObjectName {
    ObjectName { namespace: Arc::default(), name: Arc::default() }
}

/// The error about a Service that requests a slow start although its scheduler does not support it.
fn unsupported_slow_start(service: &model::Service, policy: &Policy) -> Option<AnnotationError> {
    let (period, scheduler) = (service.slow_start()?, service.scheduler(policy));
    let why = format!("the scheduler {scheduler} does not support it: use random, wrr, wlc, sed or nq");
    let value = format!("{period:?}");
    (!slow_start::is_supported(scheduler)).then_some(AnnotationError { annotation: SLOW_START, value, why })
}

impl Reconciler {
    /// Starts from the present contents of the maps. The first plan replaces or deletes invalid elements (broken
    /// records, overlapping slices, unknown ids).
    pub fn new(contents: Contents, capacity: Capacity, policy: Policy) -> Self {
        let adopted = adopt::adopt(contents, capacity);
        let last_good = LastGood::found(adopted.mirror.contents(), &adopted.distrusted);
        let earlier: BTreeSet<ObjectName> = adopted.ids.names().map(|name| name.service.clone()).collect();
        let mut new = Self {
            store: Store::default(),
            claims: Claims::default(),
            ids: adopted.ids,
            labels: PerAddress::default(),
            vips: PerAddress::default(),
            slices: adopted.slices,
            tables: adopted.tables,
            counters: adopted.counters,
            capacity,
            has_freed: false,
            mirror: adopted.mirror,
            distrusted: adopted.distrusted,
            stale_ids: adopted.stale_ids,
            stale_ranges: adopted.stale_ranges,
            stale_limits: adopted.stale_limits,
            earlier,
            complete: false,
            unread: Unread::default(),
            node: Node { policy, ..Node::default() },
            last_good,
            health_checks: HealthChecks::default(),
            holders: Holders::default(),
            targets: Targets::default(),
            slow_starts: SlowStarts::default(),
            now: Duration::ZERO,
            endings: StaleUdp::default(),
            rules: RulesOfServices::default(),
            problems: BTreeMap::new(),
            due: BTreeMap::new(),
            partial: false,
            in_flight: InFlight::default(),
            unsettled: BTreeSet::new(),
            compacted: 0,
        };
        new.adopt_addresses();
        new
    }

    /// Lets the Services that an earlier run left in the maps keep their entries of `VIPS` and `ENDPOINT_NAMES`. The
    /// first complete plan deletes all others, so [`Self::set_addresses`] must precede it.
    fn adopt_addresses(&mut self) {
        let Contents { vips: known_vips, endpoint_labels: known_labels, .. } = self.mirror.contents();
        for service in &self.earlier {
            let all = self.frontends_of(service).collect();
            let (labels, mut vips) = (self.present_labels(service, &all), self.present_vips(service, &all));
            // Until `set_addresses`, only the map knows which addresses are the node's own.
            vips.iter_mut()
                .for_each(|(address, vip)| *vip = known_vips.get(address).copied().unwrap_or(*vip));
            self.labels.set(service, labels);
            self.vips.set(service, vips);
        }
        self.labels.skip_unchanged(known_labels);
        self.vips.skip_unchanged(known_vips);
        self.labels.remove_unclaimed();
        self.vips.remove_unclaimed();
    }

    /// Updates the flags of the addresses of Services that stay as the agent found them: no plan computes them, but an
    /// address of the node itself must not have flags.
    fn update_kept_vips(&mut self) {
        for service in &self.earlier {
            let all = self.frontends_of(service).collect();
            let vips = self.present_vips(service, &all);
            self.vips.set(service, vips);
        }
    }

    /// Stores changes of objects, for the next plan.
    pub fn handle(&mut self, changes: Vec<Change>) {
        let known = &self.mirror.contents().endpoint_labels;
        changes.into_iter().for_each(|change| self.store.apply(change, known));
    }

    /// Sets the zone of this node.
    pub fn set_zone(&mut self, zone: Option<Arc<str>>) {
        if self.node.zone != zone {
            self.node.zone = zone;
            self.store.mark_all_dirty();
        }
    }

    /// Sets the addresses of this node. If they differ from the known ones, the next plan covers every Service except
    /// those that are [`kept`](Self::kept).
    pub fn set_addresses(&mut self, addresses: NodeAddresses) {
        if self.node.addresses != addresses {
            // `VIPS` also has the node's own addresses, so that the programs never take one for an unassigned cluster
            // IP.
            let own = addresses.own.iter().map(|address| (*address, Vip { flags: 0 })).collect();
            self.vips.set(&no_service(), own);
            self.node.addresses = addresses;
            self.update_kept_vips();
            self.store.mark_all_dirty();
        }
    }

    /// Sets the families in which the node can distinguish internal clients from external ones. Before the first call
    /// there are none.
    pub fn set_detects_inside(&mut self, families: Families) {
        if self.node.detects_inside != families {
            self.node.detects_inside = families;
            self.store.mark_all_dirty();
        }
    }

    /// Takes over the targets that an earlier agent has found unhealthy. Must be called before the first plan.
    pub fn adopt_unhealthy(&mut self, targets: impl IntoIterator<Item = probe::Target>) {
        self.node.unhealthy.extend(targets);
    }

    /// Records which targets have become unhealthy (`true`) or usable again. The next plan covers the Services that use
    /// them.
    pub fn set_unhealthy(&mut self, changes: Vec<(probe::Target, bool)>) {
        for (target, is_unhealthy) in changes {
            let services = self.targets.users(&target);
            let is_change = match is_unhealthy {
                true => !services.is_empty() && self.node.unhealthy.insert(target.clone()),
                false => self.node.unhealthy.remove(&target),
            };
            if is_change {
                services.iter().cloned().for_each(|service| self.store.mark_dirty(service));
            }
        }
    }

    /// The health check targets whose set of Services has changed since the last call, with these Services; a target
    /// without Services is no longer probed.
    pub fn take_target_changes(&mut self) -> Vec<(probe::Target, Vec<ObjectName>)> {
        let changes = self.targets.take_changes();
        changes.iter().filter(|(_, users)| users.is_empty()).for_each(|(gone, _)| {
            self.node.unhealthy.remove(gone);
        });
        changes
    }

    /// Updates the health check targets of a Service. A new target starts unhealthy if an unhealthy one has the same
    /// address, port and kind of check, so that a changed interval changes no verdict.
    fn set_targets(&mut self, service: &ObjectName, slices: &[EndpointSlice]) {
        let targets = desired::targets(self.store.service(service), slices);
        for new in self.targets.set(service, targets) {
            let unhealthy = &self.node.unhealthy;
            if alike(unhealthy.range(..&new), unhealthy.range(&new..), &new).is_some() {
                self.node.unhealthy.insert(new);
            }
        }
    }

    /// Sets the time since the start of the agent. The next plan covers the Services whose slow starts have a step due.
    pub fn set_now(&mut self, now: Duration) {
        self.now = now;
        self.slow_starts.due(now).cloned().for_each(|service| self.store.mark_dirty(service));
    }

    /// The time since the start of the agent at which the next step of a slow start is due; `None` without slow starts.
    pub fn next_step_of_slow_start(&self) -> Option<Duration> {
        self.slow_starts.next_step()
    }

    /// Updates the slow starts of a Service's endpoints.
    fn set_warming(&mut self, name: &ObjectName, slices: &[EndpointSlice]) {
        let supports =
            |service: &&model::Service| slow_start::is_supported(service.scheduler(&self.node.policy));
        let service = self.store.service(name).filter(supports);
        let Some((service, period)) = service.and_then(|service| Some((service, service.slow_start()?)))
        else {
            self.slow_starts.remove(name);
            self.node.warming.remove(name);
            return;
        };
        let usable = desired::usable(service, slices, &self.node);
        let shares = self.slow_starts.set(name, period, usable, self.now);
        if shares.is_empty() {
            self.node.warming.remove(name);
        } else {
            self.node.warming.insert(name.clone(), shares);
        }
    }

    /// Records that the sources have sent all objects: the next plan deletes everything else from the maps.
    pub fn sources_complete(&mut self) {
        self.sources_complete_but(&BTreeSet::new());
    }

    /// Records that the sources have shown everything except some objects of these Services, which they cannot read. A
    /// Service of which they can read nothing stays as the agent found it in the kernel. If they can read some of its
    /// slices, the Service also keeps the other endpoints that the agent found. The next plan deletes everything else
    /// that the sources have not shown. Call it before the first plan if there are such Services.
    pub fn sources_complete_but(&mut self, unread: &BTreeSet<ObjectName>) {
        if !self.complete {
            let found: BTreeSet<ObjectName> = self.earlier.intersection(unread).cloned().collect();
            self.unread = Unread::found(self.mirror.contents(), &self.distrusted, &found);
        }
        self.unread.retain(unread).into_iter().for_each(|service| self.store.mark_dirty(service));
        for service in self.earlier.extract_if(.., |service| !unread.contains(service)) {
            self.store.mark_dirty(service);
        }
        if !self.complete {
            self.unsettled.extend(self.earlier.iter().cloned());
        }
        self.complete = true;
    }

    /// The Services that stay as the agent found them at its start, because the sources have not shown them completely
    /// yet, or cannot read them.
    pub const fn kept(&self) -> &BTreeSet<ObjectName> {
        &self.earlier
    }

    /// Whether [`Self::plan`] may return steps: for example, an object has changed, a plan has failed, slots that a
    /// Service waits for have become free, or the agent found invalid elements at its start.
    pub fn needs_plan(&self) -> bool {
        self.store.is_dirty()
            || self.partial
            || !self.due.is_empty()
            || self.labels.is_dirty()
            || self.vips.is_dirty()
            || self.in_flight.steps > 0
            || !self.unsettled.is_empty()
            || !self.distrusted.is_empty()
            || !self.stale_ids.is_empty()
            || !self.stale_ranges.is_empty()
            || !self.stale_limits.is_empty()
            || self.slices.garbage().next().is_some()
            || self.tables.garbage().next().is_some()
    }

    /// The steps that lead from the contents of the maps to the desired state. Steps of the previous plan that were not
    /// applied count as failed.
    pub fn plan(&mut self) -> Plan {
        self.plan_part(usize::MAX)
    }

    /// A good number of Services for [`Self::plan_part`].
    pub const PART: usize = 4096;

    /// Like [`Self::plan`], but to limit the use of memory, plans at most `services` of the Services that are due, and
    /// also those that take over frontends of these. If [`Self::is_partial`] is then true, call this function again
    /// once the steps are applied: the last part removes what no Service needs any more. A frontend goes to another
    /// Service in one step, as with [`Self::plan`].
    pub fn plan_part(&mut self, services: usize) -> Plan {
        self.failed();
        self.update_due();
        self.partial = self.due.len() > services;
        self.labels.keep_unclaimed(self.partial);
        self.vips.keep_unclaimed(self.partial);
        let mut draft = Draft::default();
        let mut planned = Vec::new();
        let mut wanted = BTreeSet::new();
        let mut given_up = BTreeSet::new();
        let mut stuck = Vec::new();
        let contents = self.mirror.contents();
        let mut left = Remaining::new(self.capacity, contents, self.vips.size_after_changes(&contents.vips));
        let mut heirs = Vec::new();
        while let Some((service, ports)) = self.next_due(&mut heirs, planned.len() < services) {
            let ports = ports.unwrap_or_else(|| self.ports(&service));
            self.note_annotations(&service);
            if self.partial {
                heirs.extend(self.heirs(&service));
            }
            match self.plan_service(&service, ports, &mut left, &mut draft) {
                Some(keys) => {
                    given_up.extend(self.frontends_of(&service));
                    wanted.extend(keys);
                }
                None => stuck.push(service.clone()),
            }
            draft.problems.extend(self.problems.get(&service).into_iter().flatten().cloned());
            planned.push(service);
        }
        if !self.partial {
            given_up.extend(&self.distrusted);
        }
        draft.delete_frontends = given_up.difference(&wanted).copied().collect();
        let mut losers = self.losers(wanted.union(&draft.delete_frontends), &planned);
        losers.extend(std::mem::take(&mut self.unsettled).intersection(&self.earlier).cloned());
        planned.extend(losers.iter().cloned());
        stuck.extend(losers);
        stuck.iter().for_each(|service| self.keep_present(service, &wanted, &mut draft));
        if !self.partial {
            draft.release.extend(self.slices.garbage());
            draft.release_tables.extend(self.tables.garbage());
            draft.delete_service_labels.extend(&self.stale_ids);
            draft.delete_source_ranges.extend(&self.stale_ranges);
            draft.delete_limits.extend(&self.stale_limits);
        }
        self.plan_addresses(&mut draft);
        let plan = draft.finish();
        if !plan.steps.is_empty() {
            self.in_flight = InFlight { steps: plan.steps.len(), services: planned };
        }
        plan
    }

    /// Whether the last plan covered only some of the Services, so that further plans follow.
    pub const fn is_partial(&self) -> bool {
        self.partial
    }

    /// Number of Services that the last partial plan did not include: later parts plan them.
    pub fn unplanned(&self) -> usize {
        self.due.len()
    }

    /// The next Service to plan: one of `heirs`, else any that is due if the plan has room for it (`is_room`).
    fn next_due(
        &mut self,
        heirs: &mut Vec<ObjectName>,
        is_room: bool,
    ) -> Option<(ObjectName, Option<Vec<Port>>)> {
        while let Some(heir) = heirs.pop() {
            if let Some(due) = self.due.remove_entry(&heir) {
                return Some(due);
            }
        }
        if is_room { self.due.pop_first() } else { None }
    }

    /// The other Services that now own frontends which the maps still have for this Service. If they are due, they
    /// belong in the same plan, which then moves each frontend to its owner in one step.
    fn heirs(&self, service: &ObjectName) -> Vec<ObjectName> {
        let owners = self.frontends_of(service).filter_map(|key| self.claims.owner(key));
        owners.map(|owner| &owner.service).filter(|owner| *owner != service).cloned().collect()
    }

    /// The Services that have some of the `changed` frontends in the maps, but that neither this plan nor a later part
    /// of it covers. Each loses these frontends, and otherwise stays as it is in the maps.
    fn losers<'a>(
        &self,
        changed: impl Iterator<Item = &'a ServiceKey>,
        planned: &[ObjectName],
    ) -> BTreeSet<ObjectName> {
        let planned: BTreeSet<&ObjectName> = planned.iter().collect();
        let holders = changed.filter_map(|key| self.ids.service(self.mirror.frontend(key)?.id));
        let stays = |service: &&ObjectName| !planned.contains(service) && !self.due.contains_key(*service);
        holders.filter(stays).cloned().collect()
    }

    /// Frees memory that is allocated but unused. Takes time in proportion to the number of objects, so it should be
    /// called only when most of them have changed.
    pub fn compact(&mut self) {
        self.labels.compact();
        self.vips.compact();
        self.mirror.compact();
        self.compacted = self.labels.len();
    }

    /// Calls [`Self::compact`] if the number of endpoint addresses has grown by more than half since `compact` last
    /// ran. Returns whether it called `compact`.
    pub fn compact_if_grown(&mut self) -> bool {
        let has_grown = self.labels.len() > self.compacted + self.compacted / 2;
        if has_grown {
            self.compact();
        }
        has_grown
    }

    /// Records that a step of the last plan was applied.
    pub fn applied(&mut self, step: &Step) {
        self.mirror.apply(step);
        match step {
            Step::DeleteFrontend(key) => {
                self.distrusted.remove(key);
                self.has_freed = true;
            }
            Step::PutFrontend(key, record) => {
                self.distrusted.remove(key);
                slices_of(record).for_each(|range| self.slices.publish(range.base));
                tables_of(record).for_each(|range| self.tables.publish(range.base));
            }
            Step::ReleaseBackends { base, .. } => self.slices.release(*base),
            Step::ReleaseTable { base, .. } => self.tables.release(*base),
            Step::DeleteServiceLabels(id) => {
                self.stale_ids.remove(id);
                self.ids.free(*id);
                self.has_freed = true;
            }
            Step::DeleteVip(_) => self.has_freed = true,
            Step::DeleteSourceRange(range) => {
                self.stale_ranges.remove(range);
                self.has_freed = true;
            }
            Step::DeleteLimits(id) => {
                self.stale_limits.remove(id);
                self.has_freed = true;
            }
            Step::WriteBackends { .. }
            | Step::WriteTable { .. }
            | Step::PutServiceLabels(..)
            | Step::PutEndpointLabels(..)
            | Step::DeleteEndpointLabels(_)
            | Step::PutVip(..)
            | Step::PutSourceRange(_)
            | Step::PutLimits(..) => {}
        }
        self.in_flight.steps = self.in_flight.steps.saturating_sub(1);
        if self.in_flight.steps == 0 {
            self.in_flight = InFlight::default();
            self.labels.applied();
            self.vips.applied();
            self.retry_waiting();
        }
    }

    /// Records that the remaining steps of the last plan will not be applied. The next plan covers that plan's Services
    /// again, and slots that were reserved for them are free again.
    pub fn failed(&mut self) {
        let InFlight { steps, services } = std::mem::take(&mut self.in_flight);
        if steps == 0 {
            return;
        }
        self.retry_waiting();
        for range in self.slices.discard_unpublished() {
            self.mirror.delete_backends(range);
        }
        for range in self.tables.discard_unpublished() {
            self.mirror.delete_table(range);
        }
        self.labels.failed();
        self.vips.failed();
        for service in services {
            self.endings.failed(&service);
            let all = self.frontends_of(&service).collect();
            self.keep_addresses(&service, &all);
            if self.earlier.contains(&service) {
                self.unsettled.insert(service);
            } else {
                self.store.mark_dirty(service);
            }
        }
    }

    /// Returns the UDP frontends that have lost endpoints, or that Services have gained, since the last call. Call it
    /// after the steps of a plan: until they are applied, new flows may still go to the lost endpoints. If a step has
    /// failed, a later plan of the same Services adds their frontends again.
    pub fn take_stale_frontends(&mut self) -> StaleFrontends {
        self.endings.take()
    }

    /// Returns the changes to the endpoints of UDP frontends since the last call: those that the last plan makes, and
    /// the removals for Services whose plan failed. The caller must apply the changes before the first step of the
    /// plan.
    pub fn take_served_changes(&mut self) -> Vec<ServedChange> {
        self.endings.take_changes()
    }

    /// Returns the changes that the plans since the last call make to the rules by which the agent ends connections.
    pub fn take_rules_changes(&mut self) -> Vec<RulesChange> {
        self.rules.take_changes()
    }

    /// Puts the slots that were released since the last call into quarantine. Returns the epoch to pass to
    /// [`Self::grace_elapsed`] after a grace period that begins now; `None` if no slots were released.
    pub fn end_epoch(&mut self) -> Option<Epoch> {
        if !self.slices.arena().has_released() && !self.tables.arena().has_released() {
            return None;
        }
        self.tables.end_epoch();
        Some(self.slices.end_epoch())
    }

    /// Frees the slots that were released up to the end of `epoch`, because no program can still read them, and lets
    /// the next plan cover the Services that wait for slots.
    pub fn grace_elapsed(&mut self, epoch: Epoch) {
        self.slices.grace_elapsed(epoch);
        self.tables.grace_elapsed(epoch);
        self.wake(Condition::waits_for_slots);
    }

    /// If map entries (other than slots of arenas) were deleted since the last call, lets the next plan cover the
    /// Services that wait for such entries.
    fn retry_waiting(&mut self) {
        if std::mem::take(&mut self.has_freed) {
            self.wake(Condition::waits_for_entries);
        }
    }

    /// Lets the next plan cover the Services that have a condition for which `waits` returns true.
    fn wake(&mut self, waits: fn(&Condition) -> bool) {
        for (service, problems) in &self.problems {
            if problems.iter().any(waits) {
                self.store.mark_dirty(service.clone());
            }
        }
    }

    /// Takes over the assignment of flow counters to endpoints from an earlier run. Must be called before the first
    /// plan.
    pub fn adopt_counters(&mut self, counters: impl IntoIterator<Item = (u32, ServiceEndpoint)>) {
        counters.into_iter().for_each(|(counter, counted)| self.counters.adopt(counter, counted));
    }

    /// Frees the flow counters that neither a backend nor a flow has used at this call and at the previous one;
    /// `counters` are all those that existing flows use.
    pub fn flows_are_counted_by(&mut self, counters: &BTreeSet<u32>) {
        if self.counters.is_empty() {
            return;
        }
        let is_used = |counter| counters.contains(&counter) || self.mirror.is_counter_used(counter);
        if self.counters.free_unused(is_used) {
            self.wake(Condition::waits_for_slots);
        }
    }

    /// The contents of the maps, as far as steps were applied.
    pub const fn contents(&self) -> &Contents {
        self.mirror.contents()
    }

    /// Which slots of `BACKENDS` are in use.
    pub const fn arena(&self) -> &Arena {
        self.slices.arena()
    }

    /// Which slots of `TABLES` are in use.
    pub const fn table_arena(&self) -> &Arena {
        self.tables.arena()
    }

    /// The objects that the sources have sent.
    pub const fn store(&self) -> &Store {
        &self.store
    }

    /// The Services with a `healthCheckNodePort`, with the number of their endpoints on this node, as of the last
    /// [`Self::plan`].
    pub const fn health_checks(&self) -> &BTreeMap<ObjectName, HealthCheck> {
        self.health_checks.checks()
    }

    /// The Services that have load balancers' addresses, as of the last [`Self::plan`] and
    /// [`Self::take_holders_changed`].
    pub const fn holders(&self) -> &BTreeMap<ObjectName, Holder> {
        self.holders.services()
    }

    /// Updates [`Holder::here`] of the Services in the last plans from the contents of the maps. Returns whether
    /// [`Self::holders`] has changed since the last call.
    pub fn take_holders_changed(&mut self) -> bool {
        for service in self.holders.take_outdated() {
            let leads = |key: &ServiceKey| self.mirror.frontend(key).is_some_and(|it| it.backends_count > 0);
            let served = self.frontends_of(&service).filter(leads).map(|key| IpAddr::from(key.address));
            let served = served.collect();
            self.holders.set_here(&service, &served);
        }
        self.holders.take_changed()
    }

    /// The families in which a backend in the maps has an address that this node does not have, so that the kernel must
    /// route packets to it.
    pub fn routed(&self) -> Families {
        // The map is sorted, IPv4 first, and has few addresses of the node itself, so both searches end early.
        let known = &self.mirror.contents().endpoint_labels;
        let first_v6 = IpAddr::from(Ipv6Addr::UNSPECIFIED);
        let is_elsewhere = |(address, _): (&IpAddr, &_)| !self.node.addresses.is_own(address);
        Families {
            v4: known.range(..first_v6).any(is_elsewhere),
            v6: known.range(first_v6..).any(is_elsewhere),
        }
    }

    /// Whether the sources have sent everything that they can read.
    pub const fn is_complete(&self) -> bool {
        self.complete
    }

    /// Whether [`Self::health_checks`] has changed since the last call.
    pub fn take_health_checks_changed(&mut self) -> bool {
        self.health_checks.take_changed()
    }

    /// Number of service ports that drop packets because they have no endpoint on this node, for one family, as of the
    /// last [`Self::plan`].
    pub const fn no_local_endpoints(&self, family: Family) -> NoLocalEndpoints {
        self.health_checks.no_local_endpoints(family)
    }

    /// The conditions of all Services, as of the last [`Self::plan`].
    pub fn problems(&self) -> impl Iterator<Item = &Condition> {
        self.problems.values().flatten()
    }

    /// Adds the dirty Services to those that are due, and also the Services that may gain or lose a frontend because of
    /// the dirty ones.
    fn update_due(&mut self) {
        let mut dirty = self.store.take_dirty();
        dirty.retain(|service| self.is_shown(service));
        let are_few = dirty.len() <= FEW;
        let mut concerned = BTreeSet::new();
        for service in dirty {
            let slices = self.endpoint_slices(&service);
            self.set_targets(&service, &slices);
            self.set_warming(&service, &slices);
            let ports = self.desired_ports(&service, &slices);
            let known = self.store.service(&service);
            self.holders.set(&service, known, &slices);
            self.health_checks.set(&service, known, slices.iter(), &ports, &self.node);
            concerned.append(&mut self.claims.set(&service, &ports));
            self.due.insert(service, are_few.then_some(ports));
        }
        concerned.retain(|service| !self.due.contains_key(service));
        for service in concerned {
            self.holders.outdate(&service);
            let ports = are_few.then(|| self.ports(&service));
            self.due.insert(service, ports);
        }
    }

    /// Whether the Service may be planned: the sources have sent it with an EndpointSlice (this function then removes
    /// it from `earlier`), or it is not in `earlier`.
    fn is_shown(&mut self, name: &ObjectName) -> bool {
        let whole = self.store.service(name).is_some() && self.store.has_slices(name);
        if whole {
            self.earlier.remove(name);
        }
        whole || !self.earlier.contains(name)
    }

    /// The desired state of each port of a Service.
    fn ports(&mut self, name: &ObjectName) -> Vec<Port> {
        let slices = self.endpoint_slices(name);
        self.desired_ports(name, &slices)
    }

    fn desired_ports(&self, name: &ObjectName, slices: &[EndpointSlice]) -> Vec<Port> {
        let Some(service) = self.store.service(name) else { return Vec::new() };
        desired::desired(name, service, slices.iter(), &self.node)
    }

    /// The slices from which a Service is planned: those from the sources, and those that the agent keeps in place of
    /// slices that it does not get from the sources.
    fn endpoint_slices(&mut self, name: &ObjectName) -> Vec<EndpointSlice> {
        let slices = self.store.slices(name);
        if LastGood::concerns(name) {
            self.last_good.choose(&slices)
        } else {
            let ports = self.store.service(name).map_or(&[][..], |service| &service.ports);
            self.unread.complete(name, ports, slices)
        }
    }

    /// Plans one Service; returns the frontends that it owns. `None` if the Service keeps its present state.
    fn plan_service(
        &mut self,
        service: &ObjectName,
        ports: Vec<Port>,
        left: &mut Remaining,
        draft: &mut Draft,
    ) -> Option<Vec<ServiceKey>> {
        let owned = self.owned(service, ports);
        let mut steps = Vec::new();
        let mut targets = Vec::new();
        let mut reserved = Reserved::default();
        let mut ranges = BTreeSet::new();
        let mut ids = Vec::new();
        for port in &owned {
            let id = self.id(port, &mut steps);
            ids.push(id);
            self.limit(id, port, &mut steps);
            let places = match self.place(id, port, &mut steps, &mut reserved) {
                Ok(places) => places,
                Err(full) => return self.is_full((full, *left), service, &owned, reserved),
            };
            ranges.extend(source_ranges(id, port));
            targets.extend(
                port.frontends.iter().map(|frontend| Target {
                    key: frontend.key,
                    record: record(id, &places, port, frontend),
                }),
            );
        }
        let vips = self.vips(service, &owned);
        let (new_vips, vips_gone) = self.vips.growth(service, &vips, &self.mirror.contents().vips);
        let demand = Demand { vips: new_vips, vips_gone, ..self.demand(service, &targets, &ranges, &steps) };
        if let Err(full) = left.take(demand) {
            return self.is_full((full, *left), service, &owned, reserved);
        }
        self.endings.set(service, &owned);
        self.rules.set(service, ids.into_iter().zip(&owned));
        let mut labels = labels_of(&owned);
        self.store.share_labels(service, &mut labels);
        self.mirror.share_labels(&mut labels);
        self.labels.set(service, labels);
        self.vips.set(service, vips);
        self.retire(service, &targets, &ranges, draft);
        let known = &self.mirror.contents().source_ranges;
        steps.extend(ranges.difference(known).copied().map(Step::PutSourceRange));
        draft.services.append(&mut steps);
        for target in &targets {
            if self.mirror.frontend(&target.key) == Some(&target.record) {
                // Its id may have been unknown at the start. Now everything that the record refers to is valid.
                self.distrusted.remove(&target.key);
            } else {
                draft.services.push(Step::PutFrontend(target.key, Box::new(target.record)));
            }
        }
        Some(targets.into_iter().map(|target| target.key).collect())
    }

    /// The entries of `VIPS` that a Service with these ports needs: each address once, in ascending order.
    fn vips(&self, name: &ObjectName, ports: &[Port]) -> Vec<(IpAddr, Vip)> {
        vips_of(frontends_of_ports(ports), self.store.foreign_ips(name), &self.node)
    }

    /// How many map entries a Service with these targets adds, not counting those of `VIPS` and slots of arenas, and
    /// how many frontends it frees; `steps` set the names and limits of its ports.
    fn demand(
        &self,
        service: &ObjectName,
        targets: &[Target],
        ranges: &BTreeSet<SourceRangeKey>,
        steps: &[Step],
    ) -> Demand {
        let contents = self.mirror.contents();
        let wanted: BTreeSet<ServiceKey> = targets.iter().map(|target| target.key).collect();
        let goes = |key: &ServiceKey| !wanted.contains(key) && self.claims.owner(*key).is_none();
        let is_new_name = |step: &&Step| matches!(step, Step::PutServiceLabels(id, _) if !contents.service_labels.contains_key(id));
        let is_new_limit =
            |step: &&Step| matches!(step, Step::PutLimits(id, _) if !contents.limits.contains_key(id));
        Demand {
            frontends: wanted.iter().filter(|key| self.mirror.frontend(key).is_none()).count(),
            frontends_gone: self.frontends_of(service).filter(goes).count(),
            names: steps.iter().filter(is_new_name).count(),
            source_ranges: ranges.difference(&contents.source_ranges).count(),
            limits: steps.iter().filter(is_new_limit).count(),
            ..Demand::default()
        }
    }

    /// Starts the list of conditions of a Service with those of its annotations: invalid ones, those without effect,
    /// and the PROXY protocol if it may break kubelet's probes.
    fn note_annotations(&mut self, service: &ObjectName) {
        let known = self.store.service(service);
        let settings = known.and_then(|service| service.settings.as_ref());
        let bad = |error: &AnnotationError| Condition::BadAnnotation {
            service: service.clone(),
            error: error.clone(),
        };
        let ignored = |ignored: &IgnoredAnnotation| Condition::IgnoredAnnotation {
            service: service.clone(),
            ignored: ignored.clone(),
        };
        let slow_start = known.and_then(|service| unsupported_slow_start(service, &self.node.policy));
        let probes = known.and_then(|known| self.probes_without_header(service, known));
        let problems: Vec<Condition> = settings.map_or_else(Vec::new, |settings| {
            let of_clouds = settings.ignored.iter().map(ignored);
            let bad = settings.annotation_errors.iter().chain(&slow_start).map(bad);
            bad.chain(of_clouds).chain(probes).collect()
        });
        if problems.is_empty() {
            self.problems.remove(service);
        } else {
            self.problems.insert(service.clone(), problems);
        }
    }

    /// The condition of a Service whose pods must read a PROXY protocol header; `None` if no port of its pods expects
    /// one.
    fn probes_without_header(&self, service: &ObjectName, known: &model::Service) -> Option<Condition> {
        if !known.has_proxy_protocol(Protocol::Tcp) {
            return None;
        }
        let ports = kubelet_probes::ports_of_pods(known, &self.store.slices(service));
        (!ports.is_empty()).then(|| Condition::ProbesWithoutHeader { service: service.clone(), ports })
    }

    /// Removes from `ports` the frontends that other service ports own, and adds a condition for each of them. Leaves
    /// out ports without any frontend.
    fn owned(&mut self, service: &ObjectName, mut ports: Vec<Port>) -> Vec<Port> {
        for port in &mut ports {
            port.frontends.retain(|frontend| match self.claims.owner(frontend.key) {
                Some(owner) if *owner != port.labels.name => {
                    self.problems.entry(service.clone()).or_default().push(Condition::FrontendConflict {
                        frontend: frontend.key,
                        owner: owner.clone(),
                        loser: port.labels.name.clone(),
                    });
                    false
                }
                Some(_) | None => true,
            });
        }
        ports.retain(|port| !port.frontends.is_empty());
        ports
    }

    /// The id of a service port; adds a step that sets the port's labels in `SERVICE_NAMES`, unless the map has them
    /// already.
    fn id(&mut self, port: &Port, steps: &mut Vec<Step>) -> u32 {
        let id = self.ids.get_or_allocate(&port.labels.name, |id| self.mirror.mentions(id));
        if self.mirror.contents().service_labels.get(&id) != Some(&port.labels) {
            steps.push(Step::PutServiceLabels(id, Box::new(port.labels.clone())));
        }
        id
    }

    /// Adds a step that sets the limits of the service port with this id in `LIMITS`, if a frontend uses limits and the
    /// map does not have these limits.
    fn limit(&self, id: u32, port: &Port, steps: &mut Vec<Step>) {
        if port.is_limited() && self.mirror.contents().limits.get(&id) != Some(&port.limits) {
            steps.push(Step::PutLimits(id, port.limits));
        }
    }

    /// For each slice of a port, if some frontend refers to the slice: finds the slots that already hold its backends
    /// and table, or reserves new slots and adds the steps that fill these.
    fn place(
        &mut self,
        id: u32,
        port: &Port,
        steps: &mut Vec<Step>,
        reserved: &mut Reserved,
    ) -> Result<Vec<Placement>, Full> {
        let mut places = Vec::with_capacity(port.slices.len());
        for (number, backends) in port.slices.iter().enumerate() {
            if !port.uses(number) {
                places.push(Placement::NOWHERE);
                continue;
            }
            let table = match tables::table(port.scheduler, port.maglev, backends) {
                Some(entries) => self.place_table(id, entries, steps, reserved)?,
                None => SlotRange::NONE,
            };
            let backends = self.counted(id, port, backends)?;
            let backends = self.place_backends(id, &backends, steps, reserved)?;
            places.push(Placement { backends, table });
        }
        Ok(places)
    }

    /// The backends with their counters of active flows, if the scheduler needs these.
    fn counted<'a>(
        &mut self,
        id: u32,
        port: &Port,
        backends: &'a [Backend],
    ) -> Result<Cow<'a, [Backend]>, Full> {
        if !port.scheduler.uses_active_flows() {
            return Ok(Cow::Borrowed(backends));
        }
        let counted = backends.iter().map(|backend| {
            let counter =
                self.counters.get_or_allocate(ServiceEndpoint::new(id, backend)).ok_or(Full::Counters)?;
            Ok(Backend { active_flows_slot: counter, ..*backend })
        });
        counted.collect()
    }

    fn place_backends(
        &mut self,
        id: u32,
        backends: &[Backend],
        steps: &mut Vec<Step>,
        reserved: &mut Reserved,
    ) -> Result<SlotRange, Full> {
        let holds = |range: &SlotRange| self.mirror.holds(*range, backends);
        if let Some(range) = self.slices.of_id(id).find(holds) {
            return Ok(range);
        }
        let count = count(backends);
        let base = self.slices.reserve(id, count).ok_or(Full::Backends)?;
        reserved.backends.push(base);
        steps.push(Step::WriteBackends { base, backends: backends.to_vec() });
        Ok(SlotRange { base, count })
    }

    fn place_table(
        &mut self,
        id: u32,
        entries: Vec<u32>,
        steps: &mut Vec<Step>,
        reserved: &mut Reserved,
    ) -> Result<SlotRange, Full> {
        let table = Digest::of(&entries);
        let holds = |range: &SlotRange| self.mirror.holds_table(range.base, table);
        if let Some(range) = self.tables.of_id(id).find(holds) {
            return Ok(range);
        }
        let base = self.tables.reserve(id, table.count).ok_or(Full::Tables)?;
        reserved.tables.push(base);
        steps.push(Step::WriteTable { base, entries });
        Ok(SlotRange { base, count: table.count })
    }

    /// Frees the slots reserved for a Service that keeps its present state because a map is full, and records the
    /// condition. Always returns `None`.
    fn is_full<T>(
        &mut self,
        full: (Full, Remaining),
        service: &ObjectName,
        owned: &[Port],
        reserved: Reserved,
    ) -> Option<T> {
        reserved.backends.into_iter().for_each(|base| self.slices.discard(base));
        reserved.tables.into_iter().for_each(|base| self.tables.discard(base));
        let problem = self.fullness(full, service, owned);
        self.problems.entry(service.clone()).or_default().push(problem);
        None
    }

    fn fullness(&self, (full, left): (Full, Remaining), service: &ObjectName, owned: &[Port]) -> Condition {
        let slots = |of: &dyn Fn(&Port, &[Backend]) -> u32| {
            let of_port = |port: &Port| {
                let used = port.slices.iter().enumerate().filter(|(number, _)| port.uses(*number));
                used.map(|(_, slice)| of(port, slice)).fold(0, u32::saturating_add)
            };
            owned.iter().map(of_port).fold(0, u32::saturating_add)
        };
        let capacity = |arena: &Arena| (arena.free_slots(), arena.slots());
        let service = service.clone();
        match full {
            Full::Backends => {
                let wanted = slots(&|_, slice| count(slice));
                let (free, slots) = capacity(self.slices.arena());
                Condition::ArenaFull { service, wanted, free, slots }
            }
            Full::Tables => {
                let wanted = slots(&|port, slice| {
                    let table = tables::table(port.scheduler, port.maglev, slice);
                    table.map_or(0, |table| u32::try_from(table.len()).unwrap_or(u32::MAX))
                });
                let (free, slots) = capacity(self.tables.arena());
                Condition::TablesFull { service, wanted, free, slots }
            }
            Full::Counters => Condition::CountersFull { service },
            Full::Frontends => {
                let wanted = owned.iter().map(|port| port.frontends.len()).sum();
                Condition::FrontendsFull {
                    service,
                    wanted,
                    free: left.frontends,
                    slots: self.capacity.frontends,
                }
            }
            Full::SourceRanges => {
                let wanted = owned.iter().map(|port| source_ranges(0, port).count()).sum();
                let free = left.source_ranges;
                Condition::SourceRangesFull { service, wanted, free, slots: self.capacity.source_ranges }
            }
            Full::Limits => {
                let wanted = owned.iter().filter(|port| port.is_limited()).count();
                Condition::LimitsFull { service, wanted, free: left.limits, slots: self.capacity.limits }
            }
            Full::Vips => {
                let wanted = self.vips(&service, owned).len();
                Condition::VipsFull { service, wanted, free: left.vips, slots: self.capacity.vips }
            }
        }
    }

    /// Adds the steps that release or delete what a Service has in the maps and no longer needs once its targets are
    /// written.
    fn retire(
        &mut self,
        service: &ObjectName,
        targets: &[Target],
        ranges: &BTreeSet<SourceRangeKey>,
        draft: &mut Draft,
    ) {
        let used: BTreeSet<u32> =
            targets.iter().flat_map(|t| slices_of(&t.record)).map(|range| range.base).collect();
        let used_tables: BTreeSet<u32> =
            targets.iter().flat_map(|t| tables_of(&t.record)).map(|range| range.base).collect();
        let of_id = |id: u32| targets.iter().filter(move |target| target.record.id == id);
        let is_limited = |target: &Target| target.record.flags & service_flags::LIMITED != 0;
        let mut nameless = Vec::new();
        for (_, id) in self.ids.of_service(service) {
            draft.release.extend(self.slices.of_id(id).filter(|range| !used.contains(&range.base)));
            let idle = |range: &SlotRange| !used_tables.contains(&range.base);
            draft.release_tables.extend(self.tables.of_id(id).filter(idle));
            draft
                .delete_source_ranges
                .extend(self.mirror.ranges_of(id).filter(|range| !ranges.contains(range)));
            if !of_id(id).any(is_limited) {
                draft.delete_limits.extend(self.mirror.limited(id));
            }
            if of_id(id).next().is_some() {
                continue;
            }
            match self.mirror.contents().service_labels.contains_key(&id) {
                true => {
                    draft.delete_service_labels.insert(id);
                }
                false => nameless.push(id),
            }
        }
        nameless.into_iter().for_each(|id| self.ids.free(id));
    }

    /// The frontends that a Service has in the maps.
    fn frontends_of(&self, service: &ObjectName) -> impl Iterator<Item = ServiceKey> {
        self.ids.of_service(service).flat_map(|(_, id)| self.mirror.frontends_of(id))
    }

    /// For a Service that keeps its state in the maps, because it does not fit or this plan does not cover it: keeps
    /// what its frontends in the maps need. The Service loses the `taken` frontends, which other Services take over,
    /// and those that the plan deletes.
    fn keep_present(&mut self, service: &ObjectName, taken: &BTreeSet<ServiceKey>, draft: &mut Draft) {
        let stays = |key: &ServiceKey| !taken.contains(key) && !draft.delete_frontends.contains(key);
        let kept: BTreeSet<ServiceKey> = self.frontends_of(service).filter(stays).collect();
        self.release_idle(service, &kept, draft);
        self.keep_addresses(service, &kept);
    }

    /// Releases the elements of a Service that none of the `kept` frontends refers to: an earlier plan may have failed
    /// in the middle, or the Service loses frontends by this plan. The Service itself may be waiting for these
    /// elements.
    fn release_idle(&self, service: &ObjectName, kept: &BTreeSet<ServiceKey>, draft: &mut Draft) {
        for (_, id) in self.ids.of_service(service) {
            let keys = self.mirror.frontends_of(id).filter(|key| kept.contains(key));
            let frontends: Vec<(ServiceKey, &Service)> =
                keys.filter_map(|key| Some((key, self.mirror.frontend(&key)?))).collect();
            let records = || frontends.iter().map(|(_, record)| *record);
            let leads_to = |base: u32| records().flat_map(slices_of).any(|range| range.base == base);
            draft.release.extend(self.slices.of_id(id).filter(|range| !leads_to(range.base)));
            let reads = |base: u32| records().flat_map(tables_of).any(|range| range.base == base);
            draft.release_tables.extend(self.tables.of_id(id).filter(|range| !reads(range.base)));
            let checks = |range: &SourceRangeKey| {
                let of_family = |key: &ServiceKey| key.address.is_v4() == range.range.is_v4();
                let has = |record: &Service| record.flags & service_flags::SOURCE_RANGES != 0;
                frontends.iter().any(|(key, record)| of_family(key) && has(record))
            };
            draft.delete_source_ranges.extend(self.mirror.ranges_of(id).filter(|range| !checks(range)));
            if !records().any(|record| record.flags & service_flags::LIMITED != 0) {
                draft.delete_limits.extend(self.mirror.limited(id));
            }
            if frontends.is_empty() && self.mirror.contents().service_labels.contains_key(&id) {
                draft.delete_service_labels.insert(id);
            }
        }
    }

    /// Lets a Service keep the entries of `VIPS` and `ENDPOINT_NAMES` that its `kept` frontends in the maps need.
    fn keep_addresses(&mut self, service: &ObjectName, kept: &BTreeSet<ServiceKey>) {
        let (labels, vips) = (self.present_labels(service, kept), self.present_vips(service, kept));
        self.labels.set(service, labels);
        self.vips.set(service, vips);
    }

    /// The entries of `VIPS` that these frontends of a Service in the maps need and, if another proxy serves the
    /// Service, the entries of its cluster IPs: each address once, in ascending order.
    fn present_vips(&self, service: &ObjectName, frontends: &BTreeSet<ServiceKey>) -> Vec<(IpAddr, Vip)> {
        let kinds = self.valid_records(frontends).filter_map(|(key, record)| {
            Some((IpAddr::from(key.address), FrontendKind::try_from(record.kind).ok()?))
        });
        let known = &self.mirror.contents().vips;
        let foreign = self.store.foreign_ips(service).filter(|address| known.contains_key(address));
        vips_of(kinds, foreign, &self.node)
    }

    /// The entries of `ENDPOINT_NAMES` that these frontends of a Service in the maps need: each address once, in
    /// ascending order.
    fn present_labels(
        &self,
        service: &ObjectName,
        frontends: &BTreeSet<ServiceKey>,
    ) -> Vec<(IpAddr, Arc<EndpointLabels>)> {
        let contents = self.mirror.contents();
        let ranges = self.valid_records(frontends).flat_map(|(_, record)| slices_of(record));
        let backends = ranges.flat_map(|range| contents.backends.range(range.slots()));
        let addresses: BTreeSet<IpAddr> = backends.map(|(_, backend)| backend.address.into()).collect();
        let set = self.labels.of(service);
        let labels = addresses.into_iter().map(|address| {
            let known = per_address::find(set, address).or_else(|| contents.endpoint_labels.get(&address));
            (address, known.cloned().unwrap_or_default())
        });
        labels.collect()
    }

    /// The records of these frontends in the maps, except invalid ones, which the agent will replace or delete.
    fn valid_records<'a>(
        &'a self,
        frontends: &'a BTreeSet<ServiceKey>,
    ) -> impl Iterator<Item = (&'a ServiceKey, &'a Service)> {
        let valid = frontends.difference(&self.distrusted);
        valid.filter_map(|key| Some((key, self.mirror.frontend(key)?)))
    }

    fn plan_addresses(&mut self, draft: &mut Draft) {
        for (address, labels) in self.labels.changes(&self.mirror.contents().endpoint_labels) {
            match labels {
                Some(labels) => draft.put_endpoint_labels.push((address, labels)),
                None => draft.delete_endpoint_labels.push(address),
            }
        }
        for (address, vip) in self.vips.changes(&self.mirror.contents().vips) {
            match vip {
                Some(vip) => draft.put_vips.push((address, vip)),
                None => draft.delete_vips.push(address),
            }
        }
    }
}
