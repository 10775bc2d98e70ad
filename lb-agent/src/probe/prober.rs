//! The task that probes endpoints.

use std::{
    convert::Infallible,
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::Context as _;
use lb_core::{
    fnv::fnv1a,
    model::{ObjectName, SourceEvent},
    probe::{EndpointHealth, Failure, Monitor, State, Target},
};
use lb_datapath::UnansweredBackends;
use tokio::{
    sync::mpsc,
    task::{self, JoinSet},
    time::{MissedTickBehavior, interval},
};
use tracing::{debug, info, warn};

use super::{
    board::Board,
    memory::{self, File, Remembered},
    send::probe,
};
use crate::{kubernetes::Events, kubernetes::at, log_few, metrics::Metrics};

/// Minimum time between two writes of the file of unhealthy targets.
const WRITE_PAUSE: Duration = Duration::from_secs(1);
/// How long, after the first targets, the verdicts of an earlier agent are kept for targets that no Service uses yet:
/// an object of their Service may be unreadable at first.
const REMEMBERED: Duration = Duration::from_mins(10);
/// Interval at which the task looks for backends that leave SYNs unanswered.
const LOOK: Duration = Duration::from_millis(500);

/// Targets whose users have changed, each with the Services that use it now. A target without Services is no longer
/// probed.
pub(crate) type Targets = Vec<(Target, Vec<ObjectName>)>;

/// The receivers of verdicts in addition to the writer.
pub(crate) struct Observers {
    pub(crate) board: Board,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) events: Events,
}

/// The task that probes endpoints. Without targets it only waits.
pub(crate) struct Prober {
    node: String,
    targets: mpsc::UnboundedReceiver<Targets>,
    writer: mpsc::Sender<SourceEvent>,
    observers: Observers,
    file: File,
    /// When to write the file of unhealthy targets; `None` if it is up to date.
    write_at: Option<Instant>,
    /// When the file of unhealthy targets was last written.
    written: Option<Instant>,
    started: Instant,
    /// When the task removes the unhealthy targets of an earlier agent that no Service uses. `None` if there are none.
    /// Also `None` before the first targets: they come with the first plan, once the sources have sent all readable
    /// objects.
    forget_at: Option<Instant>,
    running: JoinSet<(Target, Result<(), Failure>)>,
    /// Backends that leave SYNs of clients unanswered; `None` without `--syn-retries`, because the programs record such
    /// backends only with that setting.
    unanswered: Option<UnansweredBackends>,
    /// Verdicts (true: unhealthy) that were not sent to the writer yet.
    verdicts: Vec<(Target, bool)>,
    notes: Vec<Note>,
}

/// The text about a new verdict, for the log and for Events.
struct Note {
    services: Vec<ObjectName>,
    text: String,
    is_unhealthy: bool,
}

impl Prober {
    /// Creates the task. Also returns the targets that an earlier agent has found unhealthy, which the writer must know
    /// before its first plan. `file` is the path of the file that keeps unhealthy targets.
    pub(crate) fn new(
        node: &str,
        file: PathBuf,
        (targets, writer): (mpsc::UnboundedReceiver<Targets>, mpsc::Sender<SourceEvent>),
        unanswered: Option<UnansweredBackends>,
        observers: Observers,
    ) -> (Self, Remembered) {
        let remembered = memory::read(&file);
        if !remembered.is_empty() {
            info!(endpoints = remembered.len(), "an earlier agent has found endpoints unhealthy");
        }
        *observers.board.lock() = Monitor::new(fnv1a(&[node]), remembered.clone());
        let prober = Self {
            node: node.to_owned(),
            targets,
            writer,
            observers,
            file: File::new(file),
            write_at: None,
            written: None,
            started: Instant::now(),
            forget_at: None,
            running: JoinSet::new(),
            unanswered,
            verdicts: Vec::new(),
            notes: Vec::new(),
        };
        (prober, remembered)
    }

    /// Runs the task forever. Returns an error if the writer has ended or a probe has panicked.
    pub(crate) async fn run(mut self) -> anyhow::Result<Infallible> {
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let next = self.start_due();
            tokio::select! {
                targets = self.targets.recv() => self.set(targets.context("the writer has ended")?),
                Some(done) = self.running.join_next() => {
                    self.finish(done.context("probing an endpoint")?);
                    while let Some(done) = self.running.try_join_next() {
                        self.finish(done.context("probing an endpoint")?);
                    }
                }
                () = at(next) => {}
                () = at(self.write_at) => {}
                () = at(self.forget_at) => self.forget_unused(),
                _ = look.tick(), if self.unanswered.is_some() => self.suspect(),
            }
            self.publish().await?;
            self.count();
            self.write();
        }
    }

    /// Starts the probes that are due. Returns when the next one is due; `None` if [`Monitor::MOST_PROBES`] are
    /// running, or no other probe is scheduled.
    fn start_due(&mut self) -> Option<Instant> {
        let now = self.started.elapsed();
        let mut monitor = self.observers.board.lock();
        while self.running.len() < Monitor::MOST_PROBES {
            let Some(target) = monitor.start(now) else {
                return monitor.next_due().map(|due| self.started + due);
            };
            self.running.spawn(async move {
                let result = probe(&target).await;
                (target, result)
            });
        }
        None
    }

    fn set(&mut self, targets: Targets) {
        let now = self.started.elapsed();
        let mut monitor = self.observers.board.lock();
        if monitor.remembers() {
            self.forget_at.get_or_insert_with(|| Instant::now() + REMEMBERED);
        }
        let (new, gone): (Targets, Targets) = targets.into_iter().partition(|(_, users)| !users.is_empty());
        for (target, users) in new.into_iter().chain(gone) {
            // A new target may begin with the verdict of a known one that has the same address, port and kind of check,
            // so the writer needs the verdict now.
            if let Some(is_unhealthy) = monitor.set(&target, users, now) {
                self.verdicts.push((target, is_unhealthy));
            }
        }
        drop(monitor);
        self.changed();
    }

    /// Removes the unhealthy targets of an earlier agent that no Service uses. Withdraws their verdicts at the writer,
    /// because new endpoints may get their addresses.
    fn forget_unused(&mut self) {
        self.forget_at = None;
        let unused = self.observers.board.lock().forget_unused();
        self.verdicts.extend(unused.into_iter().map(|target| (target, false)));
    }

    /// Schedules an immediate probe of each healthy endpoint that has left SYNs unanswered: see [`Monitor::suspect`].
    fn suspect(&mut self) {
        let Some(unanswered) = &mut self.unanswered else { return };
        if self.observers.board.lock().is_empty() {
            return;
        }
        match unanswered.take() {
            Ok(silent) if silent.is_empty() => {}
            Ok(silent) => {
                let silent =
                    silent.iter().map(|backend| SocketAddr::new(backend.address.into(), backend.port));
                self.observers.board.lock().suspect(&silent.collect(), self.started.elapsed());
            }
            Err(error) => debug!("no hints of unanswered SYNs: {error}"),
        }
    }

    fn finish(&mut self, (target, result): (Target, Result<(), Failure>)) {
        let reason = result.as_ref().err().map(|failure| failure.reason);
        self.observers.metrics.count_probe(reason.map_or("success", |reason| reason.as_str()));
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut monitor = self.observers.board.lock();
        let changed = monitor.finish(&target, result, self.started.elapsed(), unix).cloned();
        if let Some(state) = changed {
            let services = monitor.users(&target).to_vec();
            let is_unhealthy = state.verdict == EndpointHealth::Unhealthy;
            self.notes.push(Note { services, text: self.text(&target, &state), is_unhealthy });
            self.verdicts.push((target, is_unhealthy));
        }
    }

    fn text(&self, target: &Target, state: &State) -> String {
        let (socket, check, node) = (target.socket(), &target.check, &self.node);
        match &state.failure {
            Some(failure) if state.verdict == EndpointHealth::Unhealthy => {
                format!("endpoint {socket} is unhealthy for node {node} ({check}): {failure}")
            }
            Some(_) | None => format!("endpoint {socket} is healthy again for node {node} ({check})"),
        }
    }

    /// Sends new verdicts to the writer, and reports them in the log and as Events.
    async fn publish(&mut self) -> anyhow::Result<()> {
        if !self.verdicts.is_empty() {
            let verdicts = std::mem::take(&mut self.verdicts);
            self.writer.send(SourceEvent::Unhealthy(verdicts)).await.context("the writer has ended")?;
            self.changed();
        }
        let notes = std::mem::take(&mut self.notes);
        let services =
            |note: &Note| note.services.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let more = log_few::few(&notes, |note| {
            if note.is_unhealthy {
                warn!("Service {}: {}", services(note), note.text);
            } else {
                info!("Service {}: {}", services(note), note.text);
            }
        });
        log_few::warn_of_more(more);
        for note in notes {
            for service in note.services {
                self.observers.events.endpoint_health(service, note.is_unhealthy, note.text.clone());
            }
        }
        Ok(())
    }

    /// Schedules a write of the file of unhealthy targets.
    fn changed(&mut self) {
        let earliest = self.written.map_or_else(Instant::now, |written| written + WRITE_PAUSE);
        self.write_at.get_or_insert(earliest);
    }

    fn count(&self) {
        let monitor = self.observers.board.lock();
        for verdict in [EndpointHealth::Unknown, EndpointHealth::Healthy, EndpointHealth::Unhealthy] {
            self.observers.metrics.set_probed_endpoints(verdict.as_str(), monitor.count(verdict));
        }
    }

    fn write(&mut self) {
        if self.write_at.is_some_and(|at| at <= Instant::now()) {
            let unhealthy = self.observers.board.lock().unhealthy();
            task::block_in_place(|| self.file.write(&unhealthy));
            (self.write_at, self.written) = (None, Some(Instant::now()));
        }
    }
}
