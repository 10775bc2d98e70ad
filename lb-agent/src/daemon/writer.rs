//! The one task that writes Services to the kernel.
//!
//! It takes changes from the source, lets the [`Reconciler`] plan, applies the steps, and waits for a grace period
//! before slots are used again. A lone change is applied at once; what has arrived meanwhile is applied together.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    future,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use lb_core::{
    arena::Epoch,
    counters::Counted,
    family::Family,
    health_checks::NoLocalEndpoints,
    model::{Change, Policy, SourceEvent, Trigger},
    plan::{Condition, Contents, Plan},
    reconciler::Reconciler,
    stale_udp::{ServedUdp, StaleFrontends},
};
use tokio::{
    sync::{mpsc, watch},
    task::{self, JoinHandle},
    time::sleep_until,
};
use tracing::{debug, error, warn};

use super::{
    state::{Progress, State},
    sync_log::SyncLog,
};
use crate::{
    health::Checks,
    metrics::{Extent, Metrics},
    tell::warn_few,
};
use lb_datapath::{ApplyError, Datapath, DatapathError, grace};

/// Pauses between attempts at what the kernel refused, doubled every time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// As many causes of changes are remembered, for the latency that is measured, however long the kernel refuses them.
const TRIGGERS: usize = 10_000;

/// Whom the writer tells what it has done.
#[derive(Debug)]
pub(super) struct Listeners {
    /// UDP frontends that have lost endpoints.
    pub(super) moved: mpsc::UnboundedSender<StaleFrontends>,
    /// What `healthCheckNodePort` says.
    pub(super) checks: watch::Sender<Checks>,
    /// Whether everything was in the kernel once.
    pub(super) synchronised: watch::Sender<bool>,
}

/// State of the task.
#[derive(Debug)]
pub(super) struct Writer {
    datapath: Datapath,
    reconciler: Reconciler,
    state: Arc<State>,
    metrics: Arc<Metrics>,
    listeners: Listeners,
    log: SyncLog,
    /// Whether the source has sent everything there is. Nothing is written before.
    source_ready: bool,
    /// Whether there was a plan; the first one is due even if nothing has changed.
    planned: bool,
    /// What the last attempt left to do.
    pending: usize,
    /// How much the next plan looks at.
    next_extent: Extent,
    /// When the first change arrived that is not in the kernel yet.
    waiting_since: Option<Instant>,
    /// What the changes that wait are the consequence of.
    triggered: Vec<Trigger>,
    retry: Option<Retry>,
    grace: Option<JoinHandle<Result<Epoch, DatapathError>>>,
    /// Problems that were logged, so that each is said once.
    said: BTreeSet<String>,
}

#[derive(Clone, Copy, Debug)]
struct Retry {
    at: Instant,
    pause: Duration,
}

impl Writer {
    /// Takes over what the kernel holds.
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
            log: SyncLog::default(),
            source_ready: false,
            planned: false,
            pending: 0,
            next_extent: Extent::Full,
            waiting_since: None,
            triggered: Vec::new(),
            retry: None,
            grace: None,
            said: BTreeSet::new(),
        }
    }

    /// What serves each UDP frontend, whenever that is asked.
    pub(super) fn served(&self) -> ServedUdp {
        self.reconciler.served().clone()
    }

    /// The counters of flows that an earlier life has left.
    pub(super) fn adopt_counters(&mut self, counters: BTreeMap<u32, Counted>) {
        self.reconciler.adopt_counters(counters);
    }

    /// Runs for ever. `counters` are those that flows have, as of the last sweep.
    pub(super) async fn run(
        mut self,
        mut events: mpsc::Receiver<SourceEvent>,
        mut counters: watch::Receiver<BTreeSet<u32>>,
    ) -> anyhow::Result<Infallible> {
        loop {
            tokio::select! {
                event = events.recv() => {
                    self.take(event.context("the source of Services has ended")?);
                    while let Ok(event) = events.try_recv() {
                        self.take(event);
                    }
                }
                swept = counters.changed() => {
                    swept.context("nobody counts flows any more")?;
                    self.reconciler.flows_are_counted_by(&counters.borrow_and_update());
                }
                epoch = elapsed(&mut self.grace) => self.grace_elapsed(epoch?),
                () = at(self.retry.map(|retry| retry.at)) => {}
                () = at(self.log.due()) => self.log.flush(),
            }
            self.work();
            self.start_grace();
        }
    }

    fn take(&mut self, event: SourceEvent) {
        self.source_ready |= matches!(event, SourceEvent::Synchronised);
        // What comes before waits for its source, not for us.
        if self.source_ready {
            self.state.changed();
        }
        match event {
            SourceEvent::Changes(changes) => {
                let services = changes.iter().filter(|change| matches!(change, Change::Service(..))).count();
                self.metrics.count_changes(services, changes.len() - services);
                self.log.count_changes(changes.len());
                self.waiting_since.get_or_insert_with(Instant::now);
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
            SourceEvent::Synchronised => {}
            SourceEvent::CompleteBut(unread) => self.reconciler.sources_complete_but(&unread),
            SourceEvent::Complete => self.reconciler.sources_complete(),
        }
    }

    /// Brings the kernel up to date if something has changed, and it is time.
    fn work(&mut self) {
        let held_back = self.retry.is_some_and(|retry| retry.at > Instant::now());
        if !self.source_ready || held_back {
            return;
        }
        if !self.planned || self.reconciler.needs_plan() {
            self.planned = true;
            task::block_in_place(|| {
                self.synchronise();
                // What is gone now may have made room for what waits.
                if self.retry.is_none() && self.reconciler.needs_plan() {
                    self.synchronise();
                }
            });
        } else if self.retry.is_none() {
            // What has come changes nothing, such as an object that is what it was. It must not seem to wait.
            self.waiting_since = None;
            self.triggered.clear();
            self.metrics.nothing_pending();
            self.state.nothing_to_do();
        }
    }

    /// Brings the kernel up to date as far as it lets us.
    fn synchronise(&mut self) {
        let started = Instant::now();
        let Plan { steps, .. } = self.reconciler.plan();
        let result = self.datapath.maps().apply(&steps);
        let applied = result.as_ref().map_or_else(|error| error.applied, |()| steps.len());
        for step in &steps[..applied] {
            self.reconciler.applied(step);
        }
        self.log.count_steps(applied);
        self.forget_moved_flows();
        let failure = result.err();
        // A Service that waits for slots is not in the kernel as it should be either. That is a problem of this Service,
        // not of an agent that is behind: all nodes have it at once, and none may call itself unhealthy for it.
        let waits = |problem: &&Condition| problem.waits_for().is_some();
        self.pending = steps.len() - applied + self.reconciler.problems().filter(waits).count();
        let extent = std::mem::replace(&mut self.next_extent, Extent::Partial);
        self.metrics.attempted(extent, started.elapsed());
        match &failure {
            Some(error) => self.put_off(error),
            None => self.succeeded(started),
        }
        self.tell(failure.map(|error| error.to_string()));
        self.tell_health_checks();
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

    /// What has to wait until the maps are complete for the first time.
    fn complete_datapath(&self) {
        if let Err(error) = self.datapath.attach_sockets() {
            error!("processes of the node do not reach Services: {error}");
        }
        if let Err(error) = self.datapath.retire_other_versions() {
            warn!("the data plane of another version stays behind: {error}");
        }
    }

    /// What the kernel refuses is planned anew after a pause.
    fn put_off(&mut self, error: &ApplyError) {
        let pending = self.pending;
        self.reconciler.failed();
        self.metrics.count_sync_failure();
        let pause = self.retry.map_or(FIRST_PAUSE, |retry| LONGEST_PAUSE.min(retry.pause * 2));
        if self.retry.is_none() {
            error!(pending, "{error}; the rest waits and is tried again");
        } else {
            debug!(pending, ?pause, "{error}");
        }
        self.retry = Some(Retry { at: Instant::now() + pause, pause });
    }

    /// Tells everyone how far we are.
    fn tell(&mut self, failure: Option<String>) {
        let pending = self.pending;
        let contents = self.reconciler.contents();
        let (services, endpoints) = (contents.service_labels.len(), contents.backends.len());
        let maps = self.datapath.maps();
        let arena = self.reconciler.arena();
        self.metrics.set_services(services, endpoints, pending);
        self.metrics.set_map("SERVICES", contents.frontends.len(), maps.frontend_capacity());
        let tables = self.reconciler.table_arena();
        for (map, arena) in [("BACKENDS", arena), ("TABLES", tables)] {
            self.metrics.set_map(map, (arena.slots() - arena.free_slots()) as usize, arena.slots());
        }
        self.tell_shortages();
        let said = self.reconciler.problems().filter(|problem| problem.waits_for().is_none());
        let said: BTreeSet<String> = said.map(ToString::to_string).collect();
        warn_few(said.difference(&self.said));
        self.said = said;
        let conflicts: Vec<String> = self.reconciler.problems().map(ToString::to_string).collect();
        let failures = failure.into_iter().collect();
        self.state.progressed(Progress { services, endpoints, pending, failures, conflicts });
    }

    /// Tells which maps have no room for some Service.
    fn tell_shortages(&self) {
        let mut waiting: BTreeMap<&str, Vec<&Condition>> =
            Condition::MAPS.into_iter().map(|map| (map, Vec::new())).collect();
        for problem in self.reconciler.problems() {
            if let Some(map) = problem.waits_for() {
                waiting.entry(map).or_default().push(problem);
            }
        }
        for (map, problems) in waiting {
            self.metrics.set_waiting(map, problems.len());
            let text = problems.first().map(|first| match problems.len() - 1 {
                0 => first.to_string(),
                more => format!("{first}; {more} more wait for room in {map}"),
            });
            self.state.with_shortages(|shortages| shortages.lasts(map, text.as_deref(), Instant::now()));
        }
    }

    /// Tells load balancers and administrators which endpoints are on this node: also where the kernel refused
    /// something, since that makes the agent unhealthy soon, and no reason to let all other Services be out of date.
    fn tell_health_checks(&self) {
        let checks = self.reconciler.health_checks();
        self.listeners.checks.send_if_modified(|told| {
            let news = told != checks;
            if news {
                told.clone_from(checks);
            }
            news
        });
        for family in Family::ALL {
            let NoLocalEndpoints { internal, external } = self.reconciler.no_local_endpoints(family);
            self.metrics.set_no_local_endpoints(family, internal, external);
        }
    }

    /// Lets UDP flows be forgotten whose backend is gone; once, when the agent starts, those of all frontends, because
    /// an agent before this one may have been killed before it could.
    fn forget_moved_flows(&mut self) {
        let moved = self.reconciler.take_stale_frontends();
        if !moved.is_empty() && self.listeners.moved.send(moved).is_err() {
            debug!("nobody forgets flows any more: the agent is stopping");
        }
    }

    /// Waits for a grace period in the background if slots were released; one at a time, so that under churn the
    /// next one serves all that was released meanwhile.
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
            // The slots of this epoch stay in quarantine until a later grace period succeeds.
            Err(error) => {
                error!("{error}; slots of BACKENDS and TABLES that were released cannot be used again yet");
            }
        }
    }
}

/// The outcome of the grace period that is under way, if any. May be cancelled.
async fn elapsed(
    grace: &mut Option<JoinHandle<Result<Epoch, DatapathError>>>,
) -> anyhow::Result<Result<Epoch, DatapathError>> {
    match grace {
        Some(handle) => handle.await.context("waiting for a grace period"),
        None => future::pending().await,
    }
}

/// Sleeps until then; for ever when there is no then.
async fn at(then: Option<Instant>) {
    match then {
        Some(then) => sleep_until(then.into()).await,
        None => future::pending().await,
    }
}
