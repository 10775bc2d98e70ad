//! The only task that writes Services to the kernel.
//!
//! The task receives changes from the source, lets the [`Reconciler`] plan, applies the steps, and waits for a grace
//! period before it reuses slots. Once the source has sent all readable objects, the task applies each change
//! immediately, unless the retry of a refused update is pending. Changes that arrive before the source has sent all
//! readable objects, during the pause before a retry, or while the task is busy, are applied together.

mod publish;

use std::{
    collections::BTreeSet,
    convert::Infallible,
    future,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use lb_core::{
    arena::Epoch,
    connection_rules::Rules,
    earlier_flows::EarlierFlows,
    family::Families,
    model::{Change, Policy, SourceEvent, Trigger},
    plan::{Condition, Contents, Plan, Step},
    reconciler::Reconciler,
    stale_udp::ServedUdp,
};
use tokio::{
    sync::{mpsc, watch},
    task::{self, JoinHandle},
};
use tracing::{debug, error, warn};

use super::{
    conntrack::UdpFrontends, environment, memory, published::Published, state::State, sync_log::SyncLog,
    waiting::Waiting,
};
use crate::{
    announce::{Completeness, HolderMap},
    flow_log::Policies,
    health::Checks,
    kubernetes::{Events, at},
    metrics::{Extent, Metrics},
    probe,
};
use lb_datapath::{ApplyError, Datapath, DatapathError, grace};

/// First and longest pause before the retry of a refused update. Each pause is twice as long as the previous one, up to
/// the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Maximum number of steps in one batch of map updates.
const BATCH: usize = 1 << 15;
/// Maximum number of follow-up plans directly after a plan. A follow-up plan is needed if the previous plan has made
/// room for waiting Services, or has left frontends to other Services.
const FOLLOW_UPS: usize = 4;
/// Maximum number of triggers (times of changes) that the writer keeps for the latency metric until the next complete
/// synchronisation.
const TRIGGERS: usize = 10_000;

/// The channels through which the writer publishes its results.
#[derive(Debug)]
pub(super) struct Listeners {
    /// UDP frontends that have lost endpoints.
    pub(super) stale_udp: mpsc::UnboundedSender<UdpFrontends>,
    /// The answers of the `healthCheckNodePort` servers.
    pub(super) checks: watch::Sender<Checks>,
    /// Gives the prober the endpoints to probe.
    pub(super) targets: mpsc::UnboundedSender<probe::Targets>,
    /// Sends Kubernetes Events about Services to the task that writes them.
    pub(super) events: Events,
    /// The Services that have load balancer addresses.
    pub(super) holders: watch::Sender<HolderMap>,
    /// Flow log annotations of Services; `None` without a flow log.
    pub(super) flow_log: Option<Policies>,
    /// Whether at least one synchronisation has completed: Services are in the kernel. `holders` is up to date before
    /// this becomes true.
    pub(super) synchronised: watch::Sender<bool>,
    /// The families with backends at addresses that this node does not have.
    pub(super) routed: watch::Sender<Families>,
    /// Which part of the source's objects the agent has read and written to the kernel. `holders` is up to date before
    /// this changes.
    pub(super) complete: watch::Sender<Completeness>,
}

/// The task that writes Services to the kernel.
#[derive(Debug)]
pub(super) struct Writer {
    datapath: Datapath,
    reconciler: Reconciler,
    state: Arc<State>,
    metrics: Arc<Metrics>,
    listeners: Listeners,
    served: Published<ServedUdp>,
    rules: Published<Arc<Rules>>,
    log: SyncLog,
    /// Whether the source has sent all readable objects. Before that, the writer applies no step.
    source_ready: bool,
    /// Whether the writer has made a plan; the first plan is due even without a change.
    planned: bool,
    /// The work that remained after the last synchronisation: the number of steps, plus the number of Services that it
    /// did not plan or that wait for room in a map.
    pending: usize,
    /// Which Services the next plan covers: the changed Services, or all Services.
    next_extent: Extent,
    /// Arrival time of the oldest change that is not yet in the kernel.
    waiting_since: Option<Instant>,
    /// Triggers (for the latency metric) of the changes that are not in the kernel yet.
    triggered: Vec<Trigger>,
    retry: Option<Retry>,
    grace: Option<JoinHandle<Result<Epoch, DatapathError>>>,
    /// When the writer was created; times of slow starts count from this instant.
    started: Instant,
    /// The conditions of the last report, without those of Services that wait for room in a map, which are logged as
    /// shortages. Only conditions that are not in this set are logged.
    logged: BTreeSet<String>,
    waiting: Waiting,
    /// Whether the writer has sent the prober its first list of targets, which may be empty.
    has_targets: bool,
}

/// The result of a synchronisation.
#[derive(Debug, Default)]
struct Applied {
    /// Number of steps of all parts that were planned.
    planned: usize,
    /// Number of these steps that are in the kernel.
    applied: usize,
    /// The error that kept the remaining steps out of the kernel; `None` if all steps are in the kernel.
    failure: Option<ApplyError>,
    /// Whether so many objects changed that the reconciler should release unused memory.
    is_large: bool,
}

#[derive(Clone, Copy, Debug)]
struct Retry {
    at: Instant,
    pause: Duration,
}

impl Writer {
    /// Creates the writer from the `contents` of the maps, which an earlier agent may have left.
    pub(super) fn new(
        datapath: Datapath,
        contents: Contents,
        policy: Policy,
        state: Arc<State>,
        metrics: Arc<Metrics>,
        listeners: Listeners,
    ) -> Self {
        let room = datapath.maps().room();
        Self {
            datapath,
            reconciler: Reconciler::new(contents, room, policy),
            state,
            metrics,
            listeners,
            served: Published::default(),
            rules: Published::default(),
            log: SyncLog::default(),
            source_ready: false,
            planned: false,
            pending: 0,
            next_extent: Extent::Full,
            waiting_since: None,
            triggered: Vec::new(),
            retry: None,
            grace: None,
            started: Instant::now(),
            logged: BTreeSet::new(),
            waiting: Waiting::default(),
            has_targets: false,
        }
    }

    /// The endpoints that serve each UDP frontend. The writer updates them before it executes the first step of a plan.
    pub(super) fn served(&self) -> Published<ServedUdp> {
        self.served.clone()
    }

    /// The timeouts after which the agent ends idle connections, and connections to backends that a Service has lost.
    pub(super) fn connection_rules(&self) -> Published<Arc<Rules>> {
        self.rules.clone()
    }

    /// Takes over the list of endpoints that an earlier agent has found unhealthy.
    pub(super) fn adopt_unhealthy(&mut self, remembered: probe::Remembered) {
        self.reconciler.adopt_unhealthy(remembered.into_keys());
    }

    /// Takes over from an earlier agent the slots of `ACTIVE` and the ids of service ports that flows and sockets refer
    /// to.
    pub(super) fn adopt_flows(&mut self, flows: EarlierFlows) {
        self.reconciler.adopt_flows(flows);
    }

    /// Runs the task. `counters` receives the slots of `ACTIVE` that flows and sockets referred to at the last GC pass.
    pub(super) async fn run(
        mut self,
        mut events: mpsc::Receiver<SourceEvent>,
        mut counters: watch::Receiver<BTreeSet<u32>>,
        mut environments: mpsc::Receiver<environment::VariablesRequest>,
    ) -> anyhow::Result<Infallible> {
        loop {
            let next_step = self.next_step_of_slow_start();
            tokio::select! {
                event = events.recv() => {
                    self.take(event.context("the source of Services has ended")?);
                    while let Ok(event) = events.try_recv() {
                        self.take(event);
                    }
                }
                swept = counters.changed() => {
                    swept.context("the task that counts flows has ended")?;
                    self.reconciler.free_unused_counters(&counters.borrow_and_update());
                }
                Some(request) = environments.recv() => self.answer(request),
                epoch = elapsed(&mut self.grace) => self.grace_elapsed(epoch?),
                () = at(self.retry.map(|retry| retry.at)) => {}
                () = at(next_step) => {}
                () = at(self.log.due()) => self.log.flush(),
            }
            self.work();
            self.start_grace();
        }
    }

    /// When a slow start needs its next plan; `None` without a slow start, or while a retry is pending.
    fn next_step_of_slow_start(&self) -> Option<Instant> {
        let step = self.reconciler.next_step_of_slow_start().filter(|_| self.retry.is_none());
        step.map(|step| self.started + step)
    }

    /// Answers a request of `lb-agent service env` or `lb-agent exec`. Ignores that the client may have gone.
    fn answer(&self, environment::VariablesRequest { namespace, reply }: environment::VariablesRequest) {
        let environment = self.source_ready.then(|| self.reconciler.store().environment(&namespace));
        drop(reply.send(environment));
    }

    fn take(&mut self, event: SourceEvent) {
        self.source_ready |= matches!(event, SourceEvent::Synchronised);
        // Until the source has sent all readable objects, the writer applies nothing, so no change counts as waiting.
        if self.source_ready {
            self.state.changed();
        }
        match event {
            SourceEvent::Changes(changes) => {
                let services = changes.iter().filter(|change| matches!(change, Change::Service(..))).count();
                self.metrics.count_changes(services, changes.len() - services);
                self.log.count_changes(changes.len());
                self.waiting_since.get_or_insert_with(Instant::now);
                if let Some(policies) = &self.listeners.flow_log {
                    policies.note(&changes);
                }
                self.reconciler.handle(changes);
            }
            SourceEvent::Triggered(triggers) => {
                self.triggered.extend(triggers);
                self.triggered.truncate(TRIGGERS);
            }
            SourceEvent::Zone(zone) => {
                self.next_extent = Extent::Full;
                self.reconciler.set_zone(zone);
            }
            SourceEvent::NodeAddresses(addresses) => {
                self.next_extent = Extent::Full;
                self.reconciler.set_addresses(addresses);
            }
            SourceEvent::DetectsInside(families) => {
                self.next_extent = Extent::Full;
                self.reconciler.set_detects_inside(families);
            }
            SourceEvent::Unhealthy(changes) => self.reconciler.set_unhealthy(changes),
            SourceEvent::Synchronised => {
                if let Some(policies) = &self.listeners.flow_log {
                    policies.set_complete();
                }
            }
            SourceEvent::CompleteBut(unread) => self.reconciler.set_complete_but(&unread),
            SourceEvent::Complete => self.reconciler.set_complete(),
        }
    }

    /// Synchronises if a plan is due and the source has sent all readable objects, except during the pause before a
    /// retry. Then publishes the [`Completeness`] if it has grown.
    fn work(&mut self) {
        self.reconciler.set_now(self.started.elapsed());
        let held_back = self.retry.is_some_and(|retry| retry.at > Instant::now());
        if !self.source_ready || held_back {
            return;
        }
        if !self.planned || self.reconciler.needs_plan() {
            self.planned = true;
            task::block_in_place(|| {
                self.synchronise();
                // Deleted entries may have made room for waiting Services, and Services that still wait may have left
                // frontends to other Services.
                for _ in 0..FOLLOW_UPS {
                    if self.retry.is_some() || !self.reconciler.needs_plan() {
                        break;
                    }
                    self.synchronise();
                }
            });
        } else if self.retry.is_none() {
            // Changes that need no map update, such as an unchanged object, must not count as pending.
            self.waiting_since = None;
            self.triggered.clear();
            self.metrics.nothing_pending();
            self.state.nothing_to_do();
        }
        if self.retry.is_none() {
            let now = self.completeness();
            self.listeners.complete.send_if_modified(|known| {
                let grows = *known < now;
                if grows {
                    *known = now;
                }
                grows
            });
        }
    }

    fn completeness(&self) -> Completeness {
        match (self.reconciler.is_complete(), self.reconciler.kept().is_empty()) {
            (false, _) => Completeness::Partial,
            (true, false) => Completeness::Readable,
            (true, true) => Completeness::Whole,
        }
    }

    /// Plans, and applies the plan's steps; the kernel may refuse some of them.
    fn synchronise(&mut self) {
        let started = Instant::now();
        let Applied { planned, applied, failure, is_large } = self.apply_parts();
        if is_large {
            self.reconciler.compact();
        }
        self.log.count_steps(applied);
        // Publishes the holders (Services with load balancer addresses) before the agent counts as synchronised: from
        // then on, the agent removes the routes and announcement records of an earlier agent that no holder needs.
        if self.reconciler.take_holders_changed() {
            self.listeners.holders.send_replace(Arc::new(self.reconciler.holders().clone()));
        }
        self.delete_stale_flows();
        // A Service that waits for slots counts as pending, but does not make the agent unhealthy: other nodes are
        // likely to have the same shortage, so load balancers should not avoid this node.
        let waits = |problem: &&Condition| problem.waits_for().is_some();
        let waiting = self.reconciler.problems().filter(waits).count();
        self.pending = planned - applied + self.reconciler.unplanned() + waiting;
        let extent = std::mem::replace(&mut self.next_extent, Extent::Partial);
        self.metrics.attempted(extent, started.elapsed());
        match &failure {
            Some(error) => self.put_off(error),
            None => self.succeeded(started),
        }
        self.report(failure.map(|error| error.to_string()));
        self.publish_health_checks();
        self.publish_targets();
        self.publish_routed();
        if is_large || extent == Extent::Full {
            memory::return_unused();
        }
    }

    /// Plans the Services part by part and applies the steps of each part, which limits the use of memory.
    fn apply_parts(&mut self) -> Applied {
        let mut all = Applied::default();
        loop {
            let Plan { steps, .. } = self.reconciler.plan_part(Reconciler::PART);
            // Publishes endpoints before the first step: a new endpoint must be in `ServedUdp` before it is in the
            // kernel.
            self.publish_rules();
            all.planned += steps.len();
            all.is_large |= self.reconciler.is_partial() || steps.len() > BATCH;
            let (applied, failure) = self.apply(steps);
            all.applied += applied;
            if failure.is_some() || !self.reconciler.is_partial() {
                return Applied { failure, ..all };
            }
            if self.reconciler.compact_if_grown() {
                memory::return_unused();
            }
        }
    }

    /// Applies the steps, a batch at a time, and frees each batch, which limits the use of memory. Returns how many
    /// steps are in the kernel, and the error that kept the remaining steps out of the kernel.
    fn apply(&mut self, steps: Vec<Step>) -> (usize, Option<ApplyError>) {
        let mut applied = 0;
        for batch in batches(steps).rev() {
            let result = self.datapath.maps().apply(&batch);
            let done = result.as_ref().map_or_else(|error| error.applied, |()| batch.len());
            batch[..done].iter().for_each(|step| self.reconciler.applied(step));
            applied += done;
            if let Err(error) = result {
                return (applied, Some(error));
            }
        }
        (applied, None)
    }

    fn succeeded(&mut self, started: Instant) {
        self.retry = None;
        let took = self.waiting_since.take().unwrap_or(started).elapsed();
        self.metrics.synchronised();
        self.metrics.observe_sync_latency(took);
        self.triggered.drain(..).for_each(|trigger| self.metrics.programmed(trigger));
        let contents = self.reconciler.contents();
        self.log.synchronised(took, contents.service_labels.len(), contents.backends.len());
        if !*self.listeners.synchronised.borrow() {
            self.complete_datapath();
            self.listeners.synchronised.send_replace(true);
        }
    }

    /// Attaches the programs on sockets, and removes data planes of other versions, after the first complete
    /// synchronisation.
    fn complete_datapath(&self) {
        if let Err(error) = self.datapath.attach_sockets() {
            error!("processes of the node do not reach Services: {error}");
        }
        if let Err(error) = self.datapath.retire_other_versions() {
            warn!("the data plane of another version stays behind: {error}");
        }
    }

    /// Schedules another plan after a pause, because the kernel has refused a step.
    fn put_off(&mut self, error: &ApplyError) {
        let pending = self.pending;
        self.reconciler.failed();
        self.publish_rules();
        self.metrics.count_sync_failure();
        let pause = self.retry.map_or(FIRST_PAUSE, |retry| LONGEST_PAUSE.min(retry.pause * 2));
        if self.retry.is_none() {
            error!(pending, "{error}; the remaining updates wait and are retried");
        } else {
            debug!(pending, ?pause, "{error}");
        }
        self.retry = Some(Retry { at: Instant::now() + pause, pause });
    }

    /// Starts a grace period in the background if slots were released. Only one grace period runs at a time; the next
    /// one covers all slots that are released meanwhile.
    fn start_grace(&mut self) {
        if self.grace.is_none()
            && let Some(epoch) = self.reconciler.end_epoch()
        {
            self.grace = Some(task::spawn_blocking(move || grace::wait().map(|()| epoch)));
        }
    }

    fn grace_elapsed(&mut self, epoch: Result<Epoch, DatapathError>) {
        self.grace = None;
        match epoch {
            Ok(epoch) => self.reconciler.grace_elapsed(epoch),
            // Slots that were released before this grace period cannot be reused until a later grace period succeeds.
            Err(error) => {
                error!("{error}; released slots of BACKENDS and TABLES cannot be reused yet");
            }
        }
    }
}

/// Splits the steps into batches, in reverse order. Each batch has its own allocation, which is freed as soon as the
/// batch is applied.
fn batches(mut steps: Vec<Step>) -> std::vec::IntoIter<Vec<Step>> {
    let mut batches = Vec::with_capacity(steps.len() / BATCH + 1);
    while !steps.is_empty() {
        let start = (steps.len() - 1) / BATCH * BATCH;
        batches.push(steps.split_off(start));
        steps.shrink_to_fit();
    }
    batches.into_iter()
}

/// Waits for the running grace period; forever if none is running. Cancel-safe.
async fn elapsed(
    grace: &mut Option<JoinHandle<Result<Epoch, DatapathError>>>,
) -> anyhow::Result<Result<Epoch, DatapathError>> {
    match grace {
        Some(handle) => handle.await.context("waiting for a grace period"),
        None => future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_keep_the_order_of_steps() {
        for count in [0, 1, BATCH, 2 * BATCH + 1] {
            let step = |id: usize| Step::DeleteServiceLabels(u32::try_from(id).unwrap_or_default());
            let steps: Vec<Step> = (0..count).map(step).collect();
            let again: Vec<Step> = batches(steps.clone()).rev().flatten().collect();
            assert!(again == steps, "{count} steps");
        }
    }
}
