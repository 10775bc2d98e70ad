//! Plans one Service: adds its steps to the plan, or records the condition because of which the Service stays as it is.

use std::{borrow::Cow, collections::BTreeSet, net::IpAddr};

use lb_common::{Backend, Service, ServiceKey, SourceRangeKey, Vip, service_flags};

use super::Reconciler;
use crate::{
    active_flow_slots::ServiceEndpoint,
    arena::{Arena, SlotRange},
    capacity::{Demand, Full, Remaining},
    desired::Port,
    model::ObjectName,
    plan::{Condition, Draft, Step, slices_of, tables_of},
    records::{Placement, count, frontends_of_ports, labels_of, record, source_ranges, vips_of},
    tables::{self, Digest},
};

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

impl Reconciler {
    /// Plans one Service; returns the frontends that it owns. `None` if the Service keeps its present state.
    pub(super) fn plan_service(
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
                Err(full) => return self.give_up((full, *left), service, &owned, reserved),
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
            return self.give_up((full, *left), service, &owned, reserved);
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
                // The record's id may have been unknown at the start. Now everything that the record refers to is
                // valid.
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

    /// Gives up the plan of a Service, which keeps its present state because a map is full: frees the slots reserved
    /// for it, and records the condition. Always returns `None`.
    fn give_up<T>(
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
            Full::Names => {
                let wanted = owned.len();
                Condition::NamesFull { service, wanted, free: left.names, slots: self.capacity.names }
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
                Condition::VipsFull { service, wanted, free: left.free_vips(), slots: self.capacity.vips }
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
}
