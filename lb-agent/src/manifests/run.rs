//! The task that delivers the objects of the folder of manifests to the rest of the agent.

use std::{
    collections::{BTreeSet, HashSet},
    ffi::OsString,
    io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use lb_core::{
    announce::advertisement::Advertised, dns::Unread, load_balancer::PoolUsage, model::SourceEvent,
    plan::Contents,
};
use lb_dns::Names;
use tokio::{
    sync::{mpsc, watch},
    task::spawn_blocking,
};
use tracing::{error, info, warn};

use super::{
    condition::{Condition, Severity},
    folder::{Content, Edit, Manifests, Update},
    options::ManifestsOptions,
    read,
    settle::Work,
    watch::Watch,
};
use crate::log_few;

/// How long, at most, the first load waits for files that are changing, for example because other processes write them.
const FIRST_LOAD: Duration = Duration::from_secs(1);
/// How long, at most, an object that has disappeared from its file stays while other files wait to be read.
const MOVE: Duration = Duration::from_millis(700);

/// Why the agent cannot use the folder of manifests at all.
#[derive(Debug, thiserror::Error)]
pub enum ManifestsError {
    /// The folder cannot be read at the start of the agent.
    #[error("cannot read the folder of manifests {}: {source}; create it, or give another one with --manifests", dir.display())]
    Folder {
        /// Path of the folder.
        dir: PathBuf,
        /// Error that the kernel returned.
        source: io::Error,
    },
    /// The folder cannot be watched for changes.
    #[error(
        "cannot watch the folder of manifests {}: {source}; if it is a limit, raise fs.inotify.max_user_instances \
         and fs.inotify.max_user_watches", dir.display()
    )]
    Watch {
        /// Path of the folder.
        dir: PathBuf,
        /// Error that the kernel returned.
        source: io::Error,
    },
    /// The thread that reads manifests has panicked: a bug.
    #[error("cannot read the manifests: {0}; this is a bug, please report it")]
    Panic(#[from] tokio::task::JoinError),
}

/// Reads the folder and then follows it, until the receiver of `events` is dropped. Sends changes. Sends
/// [`SourceEvent::Synchronised`] once, after the first read of all files; files that are open for writing delay this
/// event by about a second at most. Sends [`SourceEvent::Complete`] once, as soon as all files are read and none has an
/// error. Until then, some objects may be unknown. Conditions and advertisements go to `published`. `contents` is what
/// an earlier run has left in the maps.
///
/// # Errors
///
/// At the start, the folder cannot be read or watched; later, reading the inotify events fails or the reading thread
/// panics. A folder that becomes unreadable after the start is no error: its last good state stays in force.
pub async fn run(
    options: ManifestsOptions,
    contents: &Contents,
    events: mpsc::Sender<SourceEvent>,
    published: Published,
) -> Result<(), ManifestsError> {
    let dir = options.dir.clone();
    let manifests = Manifests::new(&options, contents);
    std::fs::read_dir(&dir).map_err(|source| ManifestsError::Folder { dir: dir.clone(), source })?;
    // The watch must exist before the first read, so that it reports changes after that read.
    let watch = Watch::new(&dir).map_err(|source| ManifestsError::Watch { dir: dir.clone(), source })?;
    let names = options.names;
    Follower { dir, watch, events, published, names, awaits_since: None }.follow(manifests).await
}

/// The channels through which this source publishes, in addition to the events for the writer. Each holds the latest
/// value.
#[derive(Debug)]
pub struct Published {
    /// All current conditions of the folder.
    pub problems: watch::Sender<Vec<Condition>>,
    /// The advertisements for layer 2 and BGP, and the pools in use.
    pub advertised: watch::Sender<Advertised>,
    /// How many addresses of each pool are in use.
    pub pools: watch::Sender<Vec<PoolUsage>>,
}

impl Default for Published {
    fn default() -> Self {
        Self {
            problems: watch::channel(Vec::new()).0,
            advertised: watch::channel(Advertised::default()).0,
            pools: watch::channel(Vec::new()).0,
        }
    }
}

struct Follower {
    dir: PathBuf,
    watch: Watch,
    events: mpsc::Sender<SourceEvent>,
    published: Published,
    names: Option<Arc<Names>>,
    /// Since when objects that have disappeared from their files stay, because other files wait to be read; `None` if
    /// the last load has removed such objects.
    awaits_since: Option<Instant>,
}

impl Follower {
    async fn follow(mut self, mut manifests: Manifests) -> Result<(), ManifestsError> {
        let started = Instant::now();
        let mut synchronised = false;
        let mut complete = false;
        let mut work = Work::Everything;
        loop {
            let mut update;
            (manifests, update) = self.load(manifests, work).await?;
            set(&self.published.advertised, manifests.advertised());
            set(&self.published.pools, manifests.pool_usage());
            let unread = std::mem::take(&mut update.unread);
            let sound = !update.problems.iter().any(|problem| problem.severity == Severity::Error);
            let mut events = Vec::from_iter(self.publish(update));
            if !complete && let Some(names) = &self.names {
                names.set_unread(unread);
            }
            if !synchronised && (self.watch.is_settled() || started.elapsed() > FIRST_LOAD) {
                synchronised = true;
                events.push(SourceEvent::Synchronised);
                self.names.iter().for_each(|names| names.set_synchronised());
            }
            if synchronised && sound && !complete && self.watch.is_settled() && !self.watch.has_drafts() {
                complete = true;
                events.push(SourceEvent::Complete);
                // From now on, no DNS name counts as unreadable: if a manifest becomes invalid, the folder keeps the
                // last good state of its objects.
                self.names.iter().for_each(|names| names.set_unread(Unread::default()));
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

    /// Reads files and applies their content, on blocking threads because both may take long.
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
        self.distrust(&mut edits)?;
        let expects_more = !self.watch.is_settled();
        manifests.set_expects_more(expects_more);
        let since = *self.awaits_since.get_or_insert_with(Instant::now);
        let awaits_moves = expects_more && since.elapsed() < MOVE;
        if !awaits_moves {
            self.awaits_since = None;
        }
        manifests.set_awaits_moves(awaits_moves);
        let apply = move || {
            let update = manifests.apply(&edits);
            (manifests, update)
        };
        Ok(spawn_blocking(apply).await?)
    }

    /// Drops the content of files that changed while they were read; the task soon reads these files again. Marks the
    /// text of files that are open for writing as drafts.
    fn distrust(&mut self, edits: &mut Vec<Edit>) -> Result<(), ManifestsError> {
        self.watch.drain().map_err(|source| self.watch_error(source))?;
        edits.retain(|edit| !self.watch.is_unsettled(&edit.file));
        if !self.watch.is_attached() {
            // Another folder has replaced this one: a file that seems to be deleted may be in the new folder.
            edits.retain(|edit| edit.content != Content::Gone);
            self.watch.poll();
        }
        for edit in edits.iter_mut().filter(|edit| self.watch.is_draft(&edit.file)) {
            if let Content::Text(text) = &mut edit.content {
                edit.content = Content::Draft(std::mem::take(text));
            }
        }
        Ok(())
    }

    /// The names of the files that must be read for this work.
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

    /// Publishes the update and logs new conditions; returns the event for the writer, if Services or EndpointSlices
    /// have changed.
    fn publish(&self, update: Update) -> Option<SourceEvent> {
        if let Some(names) = &self.names {
            names.apply(update.names);
        }
        for (location, kind) in update.ignored {
            info!("{location}: ignoring objects of kind {kind}: they define no load balancing");
        }
        self.published.problems.send_if_modified(|problems| {
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

/// Sets the channel's value; wakes receivers only if the value changes.
fn set<T: PartialEq>(channel: &watch::Sender<T>, now: T) {
    channel.send_if_modified(|known| {
        let modified = *known != now;
        *known = now;
        modified
    });
}

/// Logs new and resolved conditions; if there are many, only the first few. A condition that only moved to another line
/// counts as the same.
fn log_difference(old: &[Condition], new: &[Condition]) {
    let identity = |problem: &Condition| {
        let Condition { severity, location, object, field, message } = problem.clone();
        (severity, location.file, object, field, message)
    };
    let (known, now): (HashSet<_>, HashSet<_>) =
        (old.iter().map(identity).collect(), new.iter().map(identity).collect());
    let come = new.iter().filter(|problem| !known.contains(&identity(problem)));
    let more = log_few::few(come, |problem| match problem.severity {
        Severity::Error => error!("{problem}"),
        Severity::Warning => warn!("{problem}"),
    });
    log_few::warn_of_more(more);
    let gone = old.iter().filter(|problem| !now.contains(&identity(problem)));
    let more = log_few::few(gone, |problem| info!("resolved: {problem}"));
    if more > 0 {
        info!("resolved: {more} more problems");
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lb_core::allocate::{DEFAULT_NODE_PORTS, OutsideRanges};
    use tempfile::TempDir;

    use super::*;

    const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {ports: [{port: 1}]}\n";

    /// A folder with one Service, a follower of it that has not started, and its state.
    fn bed() -> (TempDir, Follower, Manifests) {
        let root = TempDir::new().unwrap();
        let dir = root.path().join("dir");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("a.yaml"), SERVICE).unwrap();
        let options = ManifestsOptions {
            dir: dir.clone(),
            cluster_ip_ranges: vec!["10.96.0.0/12".parse().unwrap()],
            other_cluster_ips: OutsideRanges::Refused,
            pod_networks: Vec::new(),
            load_balancer_pool: Vec::new(),
            load_balancer_reassign: false,
            load_balancer_class: None,
            has_members: false,
            names: None,
            node_port_range: DEFAULT_NODE_PORTS,
        };
        let watch = Watch::new(&dir).unwrap();
        let events = mpsc::channel(8).0;
        let manifests = Manifests::new(&options, &Contents::default());
        let published = Published::default();
        (root, Follower { dir, watch, events, published, names: None, awaits_since: None }, manifests)
    }

    fn swap(root: &TempDir) {
        fs::rename(root.path().join("dir"), root.path().join("old")).unwrap();
        fs::create_dir(root.path().join("dir")).unwrap();
    }

    #[tokio::test]
    async fn folder_swapped_during_the_first_read_is_not_complete() {
        let (root, mut follower, manifests) = bed();
        swap(&root);
        let (manifests, _) = follower.load(manifests, Work::Files(["a.yaml".into()].into())).await.unwrap();
        assert!(!follower.watch.is_settled(), "the files of the new folder are unread");
        let next = follower.watch.next().await.unwrap();
        assert_eq!(next, Work::Everything);
        follower.load(manifests, next).await.unwrap();
        assert!(follower.watch.is_settled());
    }

    #[tokio::test]
    async fn folder_swapped_during_a_read_loses_no_object() {
        let (root, mut follower, manifests) = bed();
        let (manifests, update) = follower.load(manifests, Work::Everything).await.unwrap();
        assert_eq!(update.changes.len(), 1);
        // Replaces the folder after the follower has listed its files and before it reads them.
        swap(&root);
        let (manifests, update) =
            follower.load(manifests, Work::Files(["a.yaml".into()].into())).await.unwrap();
        assert_eq!(update.changes, []);
        let next = follower.watch.next().await.unwrap();
        assert_eq!(next, Work::Everything);
        let (_, update) = follower.load(manifests, next).await.unwrap();
        assert_eq!(update.changes.len(), 1, "the new folder has no such file");
    }
}
