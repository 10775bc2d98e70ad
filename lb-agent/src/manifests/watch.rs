//! Watches the folder for events.
//!
//! The watch is on the folder, not on its files: editors replace files by new ones. The task polls a few times a second
//! for changes that inotify does not report (files behind links, a replaced folder).

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
    fs::{self, Metadata},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use inotify::{EventMask, Inotify, WatchDescriptor, WatchMask};
use tokio::io::unix::AsyncFd;

use super::{
    read::is_manifest,
    settle::{Unsettled, Work},
};

/// Interval between two polls of symbolic links and of the folder itself.
const POLL: Duration = Duration::from_millis(200);
const EVENT_BUFFER: usize = 64 * 1024;

pub(super) struct Watch {
    dir: PathBuf,
    inotify: AsyncFd<Inotify>,
    /// The watched folder: its device and inode number, and its inotify watch. `None` while no folder is watched.
    watched: Option<((u64, u64), WatchDescriptor)>,
    /// Whether the last attempt to watch the folder again failed, for example because there is no folder.
    is_gone: bool,
    unsettled: Unsettled,
    /// Names of files that have been written to and not closed since.
    drafts: BTreeSet<OsString>,
    links: BTreeMap<OsString, Link>,
    next_poll: Instant,
}

/// A manifest that is a symbolic link, which the agent polls: a write to a target outside the folder causes no event.
#[derive(Debug)]
struct Link {
    read: Option<Signature>,
    seen: Option<Signature>,
}

/// The metadata by which a poll finds out whether a file has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Signature {
    file: (u64, u64),
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Signature {
    fn of(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        Some(Self {
            file: identity(&metadata),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

impl Watch {
    /// Starts to watch the folder: changes after this call are reported.
    pub(super) fn new(dir: &Path) -> io::Result<Self> {
        // SAFETY: Inotify owns its descriptor until it is dropped, and always returns the same one.
        let inotify = unsafe { AsyncFd::register(Inotify::init()?) }?;
        let mut watch = Self {
            dir: dir.to_owned(),
            inotify,
            watched: None,
            is_gone: false,
            unsettled: Unsettled::default(),
            drafts: BTreeSet::new(),
            links: BTreeMap::new(),
            next_poll: Instant::now() + POLL,
        };
        watch.attach()?;
        Ok(watch)
    }

    /// Watches the folder at the path. Reads the folder's identity (device, inode) before the watch starts: if another
    /// folder replaces the folder between the two steps, the next check of the identity shows that.
    fn attach(&mut self) -> io::Result<()> {
        self.detach();
        let mask = WatchMask::CLOSE_WRITE
            | WatchMask::MODIFY
            | WatchMask::CREATE
            | WatchMask::MOVE
            | WatchMask::DELETE
            | WatchMask::ATTRIB
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            // Otherwise writes to an unlinked file would count for the next file with the same name.
            | WatchMask::EXCL_UNLINK
            | WatchMask::ONLYDIR;
        let folder = identity(&fs::metadata(&self.dir)?);
        let descriptor = self.inotify.get_ref().watches().add(&self.dir, mask)?;
        self.watched = Some((folder, descriptor));
        Ok(())
    }

    fn detach(&mut self) {
        self.drafts.clear();
        if let Some((_, descriptor)) = self.watched.take() {
            // Fails harmlessly for a removed folder, whose watch the kernel has dropped.
            self.inotify.get_ref().watches().remove(descriptor).ok();
        }
    }

    /// Waits until some file must be read; returns what to read.
    pub(super) async fn next(&mut self) -> io::Result<Work> {
        loop {
            self.drain()?;
            let now = Instant::now();
            if now >= self.next_poll {
                self.poll();
                self.next_poll = now + POLL;
            }
            if let Some(work) = self.unsettled.take_due(now) {
                return Ok(self.all_if_replaced(work));
            }
            let wake = self.unsettled.next_due(now).map_or(self.next_poll, |due| due.min(self.next_poll));
            tokio::select! {
                ready = self.inotify.readable() => ready?.clear_ready(),
                () = tokio::time::sleep_until(wake.into()) => {}
            }
        }
    }

    /// If the folder was replaced, turns the work into a read of all files: files that vanished with the old folder
    /// cause no events of their own.
    fn all_if_replaced(&mut self, work: Work) -> Work {
        if self.is_attached() { work } else { Work::Everything }
    }

    /// Whether the folder that is now at the path is the watched one.
    pub(super) fn is_attached(&self) -> bool {
        let there = fs::metadata(&self.dir).ok().map(|metadata| identity(&metadata));
        there.is_some() && there == self.watched.as_ref().map(|(folder, _)| *folder)
    }

    /// Handles all inotify events that are pending.
    pub(super) fn drain(&mut self) -> io::Result<()> {
        let mut buffer = [0; EVENT_BUFFER];
        loop {
            let events = match self.inotify.get_mut().read_events(&mut buffer) {
                Ok(events) => events,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            };
            let now = Instant::now();
            for event in events {
                let current = self.watched.as_ref().is_some_and(|(_, watch)| *watch == event.wd);
                if event.mask.contains(EventMask::Q_OVERFLOW) {
                    // The kernel has dropped events, perhaps also close events, without which files would stay in
                    // `drafts`.
                    self.drafts.clear();
                    self.unsettled.everything();
                } else if current && event.name.is_none() {
                    // The event is about the folder itself. Once the kernel has removed the watch (`IGNORED`),
                    // `watched` must not stay: a new folder may get the same inode number, and [`Self::is_attached`]
                    // could not tell the two apart.
                    self.watched = self.watched.take_if(|_| !event.mask.contains(EventMask::IGNORED));
                    self.next_poll = now;
                } else if current {
                    note(&mut self.unsettled, event.mask, event.name, now);
                    note_draft(&mut self.drafts, event.mask, event.name);
                }
            }
        }
    }

    /// Checks for changes that inotify does not report.
    pub(super) fn poll(&mut self) {
        if !self.is_attached() {
            self.detach();
            let attached = self.attach().is_ok();
            if attached || !self.is_gone {
                self.unsettled.everything();
            }
            self.is_gone = !attached;
        }
        for (name, link) in &mut self.links {
            let signature = Signature::of(&self.dir.join(name));
            // Two equal signatures in a row: the writer has probably finished.
            if signature != link.read && signature == link.seen {
                self.unsettled.finished(name, Instant::now());
            }
            link.seen = signature;
        }
    }

    /// Records the state of a symbolic link whose file is about to be read. Must be called before each read.
    pub(super) fn before_read(&mut self, name: &OsStr) {
        let path = self.dir.join(name);
        if fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_symlink()) {
            let read = Signature::of(&path);
            self.links.insert(name.to_owned(), Link { read, seen: read });
        } else {
            self.links.remove(name);
        }
    }

    /// Whether the file waits to be read.
    pub(super) fn is_unsettled(&self, name: &OsStr) -> bool {
        self.unsettled.contains(name)
    }

    /// Whether the file has been written to and not closed since.
    pub(super) fn is_draft(&self, name: &OsStr) -> bool {
        self.drafts.contains(name)
    }

    /// Whether any file has been written to and not closed since.
    pub(super) fn has_drafts(&self) -> bool {
        !self.drafts.is_empty()
    }

    /// Whether no file waits to be read.
    pub(super) fn is_settled(&self) -> bool {
        self.unsettled.is_empty()
    }
}

fn note(unsettled: &mut Unsettled, mask: EventMask, name: Option<&OsStr>, now: Instant) {
    let Some(name) = name else { return };
    // The kubelet replaces the link `..data`, through which all files of a ConfigMap are reached.
    if name == "..data" && mask.intersects(EventMask::MOVED_TO | EventMask::CREATE) {
        unsettled.everything();
    }
    if !is_manifest(name) {
        return;
    }
    if mask.intersects(EventMask::CLOSE_WRITE | EventMask::MOVED_TO | EventMask::ATTRIB) {
        unsettled.finished(name, now);
    } else if mask.contains(EventMask::MODIFY) {
        unsettled.writing(name, now);
    } else if mask.intersects(EventMask::CREATE | EventMask::DELETE | EventMask::MOVED_FROM) {
        unsettled.came_or_went(name, now);
    }
}

/// Updates `drafts`, the names of files that have been written to and not closed since. (After `truncate(2)`, which
/// causes no close event, a file stays a draft until a later writer closes it.)
fn note_draft(drafts: &mut BTreeSet<OsString>, mask: EventMask, name: Option<&OsStr>) {
    let Some(name) = name.filter(|name| is_manifest(name)) else { return };
    if mask.contains(EventMask::MODIFY) {
        drafts.insert(name.to_owned());
    } else if mask.intersects(
        EventMask::CLOSE_WRITE
            | EventMask::MOVED_TO
            | EventMask::MOVED_FROM
            | EventMask::DELETE
            | EventMask::CREATE,
    ) {
        drafts.remove(name);
    }
}
