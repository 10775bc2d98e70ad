//! The task that keeps the rest of the agent in step with the folder.

use std::{
    collections::{BTreeSet, HashSet},
    ffi::OsString,
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

use lb_core::{model::SourceEvent, plan::Contents};
use tokio::{
    sync::{mpsc, watch},
    task::spawn_blocking,
};
use tracing::{error, info, warn};

use super::{
    ManifestsOptions,
    folder::{Edit, Manifests, Update},
    problem::{Problem, Severity},
    read,
    settle::Work,
    watch::Watch,
};

/// How long the first load waits for files that somebody writes to at that moment.
const FIRST_LOAD: Duration = Duration::from_secs(1);

/// Why the source cannot work at all.
#[derive(Debug, thiserror::Error)]
pub enum ManifestsError {
    /// The folder cannot be read when the agent starts.
    #[error("cannot read the folder of manifests {}: {source}; create it, or give another one with --manifests", dir.display())]
    Folder {
        /// The folder.
        dir: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The kernel does not tell what happens in the folder.
    #[error(
        "cannot watch the folder of manifests {}: {source}; if it is a limit, raise fs.inotify.max_user_instances \
         and fs.inotify.max_user_watches", dir.display()
    )]
    Watch {
        /// The folder.
        dir: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A bug: the thread that reads manifests has ended.
    #[error("reading the manifests has failed: {0}; this is a bug, please report it")]
    Panic(#[from] tokio::task::JoinError),
}

/// Reads the folder and then follows it, until the receiver of `events` is dropped. Sends what changes, and
/// [`SourceEvent::Synchronised`] once after everything was read for the first time, also when some of it is bad, and
/// [`SourceEvent::Complete`] as soon as none of it is: until then nobody knows what the bad documents describe.
/// `problems` always has all that is wrong now. `contents` is what the kernel holds from an earlier run.
///
/// # Errors
///
/// A folder that cannot be read or watched at the start. Later on the last good state stays.
pub async fn run(
    options: ManifestsOptions,
    contents: &Contents,
    events: mpsc::Sender<SourceEvent>,
    problems: watch::Sender<Vec<Problem>>,
) -> Result<(), ManifestsError> {
    let dir = options.dir.clone();
    let manifests = Manifests::new(&options, contents);
    std::fs::read_dir(&dir).map_err(|source| ManifestsError::Folder { dir: dir.clone(), source })?;
    // Before the first read, so that nothing is missed in between.
    let watch = Watch::new(&dir).map_err(|source| ManifestsError::Watch { dir: dir.clone(), source })?;
    Follower { dir, watch, events, problems }.follow(manifests).await
}

struct Follower {
    dir: PathBuf,
    watch: Watch,
    events: mpsc::Sender<SourceEvent>,
    problems: watch::Sender<Vec<Problem>>,
}

impl Follower {
    async fn follow(mut self, mut manifests: Manifests) -> Result<(), ManifestsError> {
        let started = Instant::now();
        let mut synchronised = false;
        let mut complete = false;
        let mut work = Work::Everything;
        loop {
            let update;
            (manifests, update) = self.load(manifests, work).await?;
            let sound = !update.problems.iter().any(|problem| problem.severity == Severity::Error);
            let mut events = Vec::from_iter(self.tell(update));
            if !synchronised && (self.watch.is_settled() || started.elapsed() > FIRST_LOAD) {
                synchronised = true;
                events.push(SourceEvent::Synchronised);
            }
            if synchronised && sound && !complete {
                complete = true;
                events.push(SourceEvent::Complete);
            }
            for event in events {
                if self.events.send(event).await.is_err() {
                    return Ok(());
                }
            }
            let next = tokio::select! {
                next = self.watch.next() => next,
                () = self.events.closed() => return Ok(()),
            };
            work = next.map_err(|source| self.watch_error(source))?;
        }
    }

    /// Reads files and takes over what is in them. Both may take a while, so other threads do it.
    async fn load(
        &mut self,
        mut manifests: Manifests,
        work: Work,
    ) -> Result<(Manifests, Update), ManifestsError> {
        let files = self.files(&mut manifests, work);
        for file in &files {
            self.watch.before_read(file);
        }
        let dir = self.dir.clone();
        let read = move || files.iter().map(|file| read::edit(&dir, file)).collect();
        let mut edits: Vec<Edit> = spawn_blocking(read).await?;
        // What changed while it was read is read again soon.
        self.watch.drain().map_err(|source| self.watch_error(source))?;
        edits.retain(|edit| !self.watch.is_unsettled(&edit.file));
        let apply = move || {
            let update = manifests.apply(&edits);
            (manifests, update)
        };
        Ok(spawn_blocking(apply).await?)
    }

    /// The files that the work is about.
    fn files(&self, manifests: &mut Manifests, work: Work) -> BTreeSet<OsString> {
        match work {
            Work::Files(files) => files,
            Work::Everything => match read::list(&self.dir) {
                Ok(mut files) => {
                    manifests.set_unreadable(None);
                    files.extend(manifests.files().map(ToOwned::to_owned));
                    files
                }
                Err(error) => {
                    let why = format!("cannot be read: {error}; what it defined stays in force");
                    manifests.set_unreadable(Some(why));
                    BTreeSet::new()
                }
            },
        }
    }

    /// Tells people what is wrong; the event for the rest of the agent.
    fn tell(&self, update: Update) -> Option<SourceEvent> {
        for (place, kind) in update.ignored {
            info!("{place}: {kind} is of no concern for load balancing; objects of this kind are ignored");
        }
        self.problems.send_if_modified(|problems| {
            let modified = *problems != update.problems;
            if modified {
                log_difference(problems, &update.problems);
                *problems = update.problems;
            }
            modified
        });
        (!update.changes.is_empty()).then_some(SourceEvent::Changes(update.changes))
    }

    fn watch_error(&self, source: io::Error) -> ManifestsError {
        ManifestsError::Watch { dir: self.dir.clone(), source }
    }
}

/// Logs each problem when it comes and when it goes. One that only moved to another line is the same.
fn log_difference(old: &[Problem], new: &[Problem]) {
    let identity = |problem: &Problem| {
        let Problem { severity, place, object, field, message } = problem.clone();
        (severity, place.file, object, field, message)
    };
    let (known, now): (HashSet<_>, HashSet<_>) =
        (old.iter().map(identity).collect(), new.iter().map(identity).collect());
    for problem in new.iter().filter(|problem| !known.contains(&identity(problem))) {
        match problem.severity {
            Severity::Error => error!("{problem}"),
            Severity::Warning => warn!("{problem}"),
        }
    }
    for problem in old.iter().filter(|problem| !now.contains(&identity(problem))) {
        info!("put right: {problem}");
    }
}
