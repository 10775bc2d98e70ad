//! Predicts the backend of a new flow, or the backends that it may get. Follows `flow::choose` of the BPF programs,
//! with the same arithmetic (`lb_ebpf::service::schedule`).

use std::collections::BTreeSet;

use lb_common::{
    Backend, Outcome, Scheduler, Service, ServiceClient,
    conntrack::{Flow, Tick},
};
use lb_ebpf::{
    rules::{admission::rejection, flow::may_be_retried},
    service::schedule::{self, Load},
};

use super::{
    frontend::AdmittedFlow,
    step::{AffinityState, Conclusion, Method, TraceStep, socket},
    tables::Tables,
    walk::{Stop, Walk, WalkResult},
};

/// Indices of backends within a service's slice of `BACKENDS`.
type Places = BTreeSet<u32>;

impl<T: Tables> Walk<'_, T> {
    /// The backends that the flow may get: exactly one if the client is pinned, or if the scheduler hashes only known
    /// fields.
    pub(super) fn choose(
        &mut self,
        request: &AdmittedFlow,
        earlier: Option<&Flow>,
    ) -> WalkResult<Vec<Backend>> {
        let service = &request.service;
        let slice = self.tables.backends(service.backends_base, service.backends_count)?;
        if slice.len() < service.backends_count as usize {
            self.steps.push(TraceStep::NoSuchBackend);
            return Err(Stop::With(Conclusion::Dropped { outcome: Outcome::NoBackend }));
        }
        let mut places = match self.of_client(service, &slice)? {
            Some(place) => Places::from([place]),
            None => self.scheduled(service, &slice)?,
        };
        if places.is_empty() {
            self.steps.push(TraceStep::NoBackends { elsewhere: false });
            return Err(Stop::With(Conclusion::of(rejection(self.question.tuple.protocol))));
        }
        let syn_retries = self.tables.globals().syn_retries;
        if let Some(flow) = earlier.filter(|_| may_be_retried(true, syn_retries)) {
            let others: Places = places.iter().map(|place| another(service, flow, &slice, *place)).collect();
            if others != places {
                self.steps.push(TraceStep::NextBackend);
                places = others;
            }
        }
        Ok(places.iter().filter_map(|place| slice.get(*place as usize)).copied().collect())
    }

    /// The index of the backend that the client is pinned to, as `affinity::find` looks it up.
    fn of_client(&mut self, service: &Service, slice: &[Backend]) -> WalkResult<Option<u32>> {
        if service.affinity_seconds == 0 {
            return Ok(None);
        }
        let key = ServiceClient { client: self.question.tuple.source, service: service.id };
        let Some(affinity) = self.tables.affinity(&key)? else {
            self.steps.push(TraceStep::Affinity { is: AffinityState::Nothing });
            return Ok(None);
        };
        let backend = socket(affinity.address, affinity.port);
        let now = self.question.now;
        let slot = |slot: u32| slice.get(slot.wrapping_sub(service.backends_base) as usize);
        let found = schedule::find(service, &affinity.address, affinity.port, slot);
        let (is, place) = match found {
            _ if !affinity.is_valid(now, service.affinity_seconds) => {
                (AffinityState::Expired { backend }, None)
            }
            None => (AffinityState::Gone { backend }, None),
            Some(slot) => {
                let end = affinity.last_used.0.saturating_add(Tick::ticks_in(service.affinity_seconds));
                let seconds_left = Tick(end).seconds_since(now);
                (
                    AffinityState::Backend { backend, seconds_left },
                    Some(slot.wrapping_sub(service.backends_base)),
                )
            }
        };
        self.steps.push(TraceStep::Affinity { is });
        Ok(place)
    }

    /// The index of every backend that the scheduler may pick, as `choose::scheduled` does.
    fn scheduled(&mut self, service: &Service, slice: &[Backend]) -> WalkResult<Places> {
        let scheduler = Scheduler::try_from(service.scheduler).unwrap_or_default();
        let of_hash = schedule::of_hash(scheduler, service);
        let how = match schedule::Method::of(scheduler) {
            schedule::Method::Random => Method::Chance,
            schedule::Method::Turn => Method::Turn,
            schedule::Method::Hash if of_hash == Scheduler::Maglev && !self.question.knows_port => {
                Method::HashOfPort
            }
            schedule::Method::Hash => Method::Hash,
            schedule::Method::Load => Method::Load,
        };
        let (of, table) = (service.backends_count, service.table_count);
        self.steps.push(TraceStep::Scheduler { scheduler, how, of, table });
        if how == Method::Load {
            return Ok(self.least(scheduler, slice));
        }
        let entries = self.tables.table_entries(service.table_base, service.table_count)?;
        let place = |nth| {
            let table = |slot: u32| entries.get(slot.wrapping_sub(service.table_base) as usize).copied();
            let slot = schedule::slot(service, nth, table);
            (slot != schedule::NONE).then(|| slot.wrapping_sub(service.backends_base))
        };
        let count = schedule::entries(service);
        Ok(if how == Method::Hash {
            let seed = self.tables.globals().hash_seed;
            place(schedule::hashed(of_hash, &self.question.tuple, seed, count)).into_iter().collect()
        } else {
            (0..count).filter_map(place).collect()
        })
    }

    /// The backends with the least load, as `choose::least` finds them; the program may pick any of them.
    fn least(&self, scheduler: Scheduler, slice: &[Backend]) -> Places {
        let load = |backend: &Backend| Load {
            active: self.active_flows(backend.active_flows_slot),
            weight: backend.weight,
        };
        let loads: Vec<(u32, Load)> =
            (0..).zip(slice).filter(|(_, b)| b.weight != 0).map(|(place, b)| (place, load(b))).collect();
        let best: Places =
            loads.iter().filter(|(_, load)| load.is_best(scheduler)).map(|(place, _)| *place).collect();
        if !best.is_empty() {
            return best;
        }
        let is_least = |load: &Load| !loads.iter().any(|(_, other)| other.is_less(load, scheduler));
        let Some((_, least)) = loads.iter().find(|(_, load)| is_least(load)) else { return Places::new() };
        let equal = |load: &Load| !load.is_less(least, scheduler) && !least.is_less(load, scheduler);
        loads.iter().filter(|(_, load)| equal(load)).map(|(place, _)| *place).collect()
    }

    /// The number of active flows in a slot, as `active_flows::active` reads it.
    fn active_flows(&self, slot: u32) -> u64 {
        if slot == 0 { 0 } else { u64::try_from(self.tables.active_flows(slot)).unwrap_or(0) }
    }
}

/// The index of the backend for another attempt of a client whose earlier connection is `flow`, as `choose::another`
/// finds it. The index is `place`, except if `flow` went to the backend at `place`, the client has not acknowledged an
/// answer of that backend, and the next backend (the first one follows the last one) takes new flows. In that case the
/// result is the index of the next backend.
fn another(service: &Service, flow: &Flow, slice: &[Backend], place: u32) -> u32 {
    let Some(backend) = slice.get(place as usize) else { return place };
    let slot = service.backends_base.wrapping_add(place);
    let index = |slot: u32| slot.wrapping_sub(service.backends_base);
    let weight = |slot| slice.get(index(slot) as usize).map_or(0, |backend| backend.weight);
    index(schedule::retried(service, flow, backend, slot, weight))
}
