//! The state machine that computes every write to the maps of Services; one task drives it.

mod annotations;
mod kept;
mod service;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
    time::Duration,
};

use lb_common::{ServiceKey, SourceRangeKey, Vip};

use crate::{
    active_flow_slots::ActiveFlowSlots,
    adopt,
    announce::holders::{Holder, Holders},
    arena::{Arena, Epoch},
    capacity::{Capacity, Remaining},
    claims::Claims,
    connection_rules::{RulesChange, RulesOfServices},
    desired::{self, Port},
    earlier_flows::EarlierFlows,
    family::{Families, Family},
    health_checks::{HealthCheck, HealthChecks, NoLocalEndpoints},
    ids::Ids,
    last_good::{LastGood, Unread},
    mirror::Mirror,
    model::{self, Change, EndpointSlice, Node, NodeAddresses, ObjectName, Policy},
    per_address::PerAddress,
    plan::{Condition, Contents, Draft, EndpointLabels, Plan, Step, slices_of, tables_of},
    probe::{self, Targets, target::alike},
    slices::Slices,
    slow_start::{self, SlowStarts},
    stale_udp::{ServedChange, StaleFrontends, StaleUdp},
    store::Store,
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
/// For a changed object, the plan recomputes only the object's Service and the Services that claim the same frontends.
/// A Service that is in the maps when the agent starts stays there unchanged until the sources have sent it with an
/// EndpointSlice, or are complete ([`Self::set_complete`]): a manifest that is invalid when the agent starts must not
/// delete the Service that it described.
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
    /// Services found at the start that the sources have not sent completely yet. Once the sources are complete, this
    /// set has only the Services that the sources cannot read.
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
    /// The Services to plan, each with its ports. The ports are `None` if so many Services are due that storing their
    /// ports would take too much memory; the reconciler then computes the ports again when it plans the Service.
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

/// Maximum number of dirty Services whose ports the reconciler keeps in memory. If more Services are dirty, it computes
/// the ports of each Service again when it plans that Service.
const FEW: usize = Reconciler::PART;

/// The Services that the last plan covers or takes frontends from, until all steps of that plan are applied.
#[derive(Clone, Debug, Default)]
struct InFlight {
    steps: usize,
    services: Vec<ObjectName>,
}

/// A Service to plan, with its ports as in [`Reconciler::due`].
type Due = (ObjectName, Option<Vec<Port>>);

/// The name under which `Reconciler::vips` has the node's own addresses; no Service can have this name.
fn no_service() -> ObjectName {
    ObjectName { namespace: Arc::default(), name: Arc::default() }
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
    pub fn set_complete(&mut self) {
        self.set_complete_but(&BTreeSet::new());
    }

    /// Records that the sources have sent everything except some objects of these Services, which they cannot read. A
    /// Service of which the sources can read nothing stays as the agent found it in the maps. If the sources can read
    /// only some slices of a Service, the Service also keeps the other endpoints that the agent found in the maps. The
    /// next plan deletes everything else that the sources have not sent. Must be called before the first plan if there
    /// are such Services.
    pub fn set_complete_but(&mut self, unread: &BTreeSet<ObjectName>) {
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

    /// The Services that stay as the agent found them at its start, because the sources have not sent them completely
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

    /// Like [`Self::plan`], but plans only a part of the due Services, to limit the use of memory: at most `services`
    /// of them, and in addition the Services that take over frontends from these. If [`Self::is_partial`] is then true,
    /// call this function again once the steps are applied: the last part removes what no Service needs any more. A
    /// frontend goes to another Service in one step, as with [`Self::plan`].
    pub fn plan_part(&mut self, services: usize) -> Plan {
        self.failed();
        self.update_due();
        let is_first_part = !self.partial;
        self.partial = self.due.len() > services;
        self.labels.keep_unclaimed(self.partial);
        self.vips.keep_unclaimed(self.partial);
        if is_first_part && self.vips.removes_unclaimed() {
            self.adopt_foreign_vips();
        }
        let mut draft = Draft::default();
        let mut planned = Vec::new();
        let mut wanted = BTreeSet::new();
        let mut given_up = BTreeSet::new();
        let mut stuck = Vec::new();
        let contents = self.mirror.contents();
        let mut left = Remaining::new(self.capacity, contents, self.vips.size_after_changes(&contents.vips));
        let mut held_back = Vec::new();
        while let Some((service, ports)) = self.next_due(&mut held_back, planned.len() < services) {
            let ports = ports.unwrap_or_else(|| self.ports(&service));
            self.note_annotations(&service);
            match self.plan_service(&service, ports, &mut left, &mut draft) {
                Some(keys) => {
                    given_up.extend(self.frontends_of(&service));
                    wanted.extend(keys);
                }
                None => {
                    self.claim_only_present(&service, &held_back);
                    stuck.push(service.clone());
                }
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

    /// Returns the next Service to plan. Takes another due Service only if the plan has room for it (`is_room`). Before
    /// a Service, this function returns the due Services that take over its frontends, even if the plan has no room for
    /// them: then the plan knows whether these new owners fit, and moves each frontend to its new owner in one step.
    /// `held_back` has the Services that wait for their new owners.
    fn next_due(&mut self, held_back: &mut Vec<Due>, is_room: bool) -> Option<Due> {
        if held_back.is_empty() && is_room {
            held_back.extend(self.due.pop_first());
        }
        loop {
            let (service, _) = held_back.last()?;
            let heirs = self.heirs(service);
            let mut due = heirs.iter().filter_map(|heir| self.due.remove_entry(heir)).peekable();
            if due.peek().is_none() {
                return held_back.pop();
            }
            held_back.extend(due);
        }
    }

    /// The other Services that now own frontends which the maps still have for this Service.
    fn heirs(&self, service: &ObjectName) -> Vec<ObjectName> {
        let owners = self.frontends_of(service).filter_map(|key| self.claims.owner(key));
        owners.map(|owner| &owner.service).filter(|owner| *owner != service).cloned().collect()
    }

    /// Lets a Service that does not fit claim only the frontends that it has in the maps, until it is dirty again: it
    /// must not take other frontends from the Services that have them. If another Service claims a frontend that this
    /// Service no longer claims, the other Service becomes dirty, unless this plan or a later part of it will still
    /// cover the other Service.
    fn claim_only_present(&mut self, service: &ObjectName, held_back: &[Due]) {
        let is_valid = |key: &ServiceKey| !self.distrusted.contains(key);
        let present: BTreeSet<ServiceKey> = self.frontends_of(service).filter(is_valid).collect();
        let mut others = self.claims.retain(service, |key| present.contains(key));
        others.retain(|other| !self.due.contains_key(other) && held_back.iter().all(|(it, _)| it != other));
        others.into_iter().for_each(|other| self.store.mark_dirty(other));
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

    /// Returns the UDP frontends that have lost endpoints, or that Services have gained, since the last call. Call this
    /// function after the steps of a plan: until the steps are applied, new flows may still go to the lost endpoints.
    /// If a step has failed, a later plan of the same Services adds their frontends again.
    pub fn take_stale_frontends(&mut self) -> StaleFrontends {
        self.endings.take()
    }

    /// Returns the UDP frontends that Services have gained since the last call: processes of the node may have connected
    /// sockets to them before.
    pub fn take_begun_frontends(&mut self) -> StaleFrontends {
        self.endings.take_begun()
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

    /// Takes over the assignment of flow counters to endpoints from an earlier run, and gives no new service port an id
    /// that a flow carries. Must be called before the first plan.
    pub fn adopt_flows(&mut self, flows: EarlierFlows) {
        let EarlierFlows { active_flows_slots, highest_service } = flows;
        active_flows_slots.into_iter().for_each(|(counter, counted)| self.counters.adopt(counter, counted));
        self.ids.skip(highest_service);
    }

    /// Frees the flow counters that neither a backend nor a flow has used at this call and at the previous one;
    /// `counters` are all counters that existing flows use.
    pub fn free_unused_counters(&mut self, counters: &BTreeSet<u32>) {
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

    /// The Services that have load balancer addresses, as of the last [`Self::plan`] and
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

    /// Whether the Service keeps its present state because a map is full, as of the last [`Self::plan`].
    fn waits(&self, service: &ObjectName) -> bool {
        self.problems.get(service).into_iter().flatten().any(|problem| problem.waits_for().is_some())
    }

    /// Adds the dirty Services to those that are due, and also the Services that may gain or lose a frontend because of
    /// the dirty ones.
    fn update_due(&mut self) {
        let mut dirty = self.store.take_dirty();
        dirty.retain(|service| self.admit_to_plan(service));
        let are_few = dirty.len() <= FEW;
        let mut concerned = BTreeSet::new();
        while let Some(service) = dirty.pop_first() {
            let slices = self.endpoint_slices(&service);
            self.set_targets(&service, &slices);
            self.set_warming(&service, &slices);
            let ports = self.desired_ports(&service, &slices);
            let known = self.store.service(&service);
            self.holders.set(&service, known, &slices);
            self.health_checks.set(&service, known, slices.iter(), &ports, &self.node);
            let mut others = self.claims.set(&service, &ports);
            self.due.insert(service, are_few.then_some(ports));
            others.retain(|other| !self.due.contains_key(other));
            // Services that wait for room claim less than they want (`claim_only_present`), so their claims are
            // computed again.
            dirty.extend(others.extract_if(.., |other| self.waits(other)));
            concerned.append(&mut others);
        }
        concerned.retain(|service| !self.due.contains_key(service));
        for service in concerned {
            self.holders.outdate(&service);
            let ports = are_few.then(|| self.ports(&service));
            self.due.insert(service, ports);
        }
    }

    /// Removes the Service from `earlier` if the sources have sent it with an EndpointSlice. Returns whether it may be
    /// planned, that is, whether it is no longer in `earlier`.
    fn admit_to_plan(&mut self, name: &ObjectName) -> bool {
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

    /// The frontends that a Service has in the maps.
    fn frontends_of(&self, service: &ObjectName) -> impl Iterator<Item = ServiceKey> {
        self.ids.of_service(service).flat_map(|(_, id)| self.mirror.frontends_of(id))
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
