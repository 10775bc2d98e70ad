//! Decides when to read a file after an event.
//!
//! After a completed write, a rename to the file's name or a change of attributes, the file is read immediately. Any
//! other event may be the first half of a change: an editor moves a file away before it writes the new file, and a
//! shell truncates a file before it fills the file. Such files are read a moment later, so that Services do not
//! disappear in between.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
    time::{Duration, Instant},
};

/// Pause between the creation or removal of a file and its read.
const SETTLE: Duration = Duration::from_millis(50);
/// Pause between the last write to a file and its read, if the writer does not close the file.
const QUIET: Duration = Duration::from_millis(400);
/// Maximum time between the first event of a file and its read.
const PATIENCE: Duration = Duration::from_millis(700);

/// Files that have not been read since their last event.
#[derive(Debug, Default)]
pub(super) struct Unsettled {
    files: BTreeMap<OsString, Due>,
    everything: bool,
}

#[derive(Debug)]
struct Due {
    since: Instant,
    at: Instant,
}

/// The files that must be read now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// The files with these names.
    Files(BTreeSet<OsString>),
    /// All files of the folder, after listing the folder again.
    Everything,
}

impl Unsettled {
    /// Records that a file was completely written, so that it can be read at once.
    pub(super) fn finished(&mut self, file: &OsStr, now: Instant) {
        self.set(file, now, Duration::ZERO);
    }

    /// Records that a file was created or removed.
    pub(super) fn came_or_went(&mut self, file: &OsStr, now: Instant) {
        self.set(file, now, SETTLE);
    }

    /// Records that a file is being written.
    pub(super) fn writing(&mut self, file: &OsStr, now: Instant) {
        self.set(file, now, QUIET);
    }

    /// Records that any file may have changed, so that the whole folder must be read.
    pub(super) fn everything(&mut self) {
        self.everything = true;
    }

    fn set(&mut self, file: &OsStr, now: Instant, wait: Duration) {
        let due = self.files.entry(file.to_owned()).or_insert(Due { since: now, at: now });
        let at = if wait.is_zero() { now } else { due.at.max(now + wait) };
        due.at = at.min(due.since + PATIENCE);
    }

    /// Whether no file waits to be read.
    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty() && !self.everything
    }

    /// Whether the file waits to be read.
    pub(super) fn contains(&self, file: &OsStr) -> bool {
        self.files.contains_key(file)
    }

    /// When the next file must be read; `None` if none waits.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        if self.everything { Some(now) } else { self.files.values().map(|due| due.at).min() }
    }

    /// Removes and returns what must be read now.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Work> {
        let due: BTreeSet<_> =
            self.files.extract_if(.., |_, due| due.at <= now).map(|(file, _)| file).collect();
        if std::mem::take(&mut self.everything) {
            return Some(Work::Everything);
        }
        (!due.is_empty()).then_some(Work::Files(due))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: Instant, millis: u64) -> Instant {
        start + Duration::from_millis(millis)
    }

    fn file(name: &str) -> Option<Work> {
        Some(Work::Files([name.into()].into()))
    }

    #[test]
    fn closed_file_is_read_at_once() {
        let (mut unsettled, start) = (Unsettled::default(), Instant::now());
        unsettled.writing(OsStr::new("a"), start);
        assert_eq!(unsettled.take_due(at(start, 100)), None);
        unsettled.finished(OsStr::new("a"), at(start, 100));
        assert_eq!(unsettled.take_due(at(start, 100)), file("a"));
        assert!(unsettled.is_empty());
    }

    #[test]
    fn removal_takes_effect_unless_the_file_returns_soon() {
        let (mut unsettled, start) = (Unsettled::default(), Instant::now());
        unsettled.came_or_went(OsStr::new("a"), start);
        assert_eq!(unsettled.next_due(start), Some(at(start, 50)));
        assert_eq!(unsettled.take_due(at(start, 49)), None);
        assert_eq!(unsettled.take_due(at(start, 50)), file("a"));
    }

    #[test]
    fn endless_writing_delays_by_less_than_a_second() {
        let (mut unsettled, start) = (Unsettled::default(), Instant::now());
        for millis in 0..700 {
            unsettled.writing(OsStr::new("a"), at(start, millis));
            assert_eq!(unsettled.take_due(at(start, millis)), None);
        }
        unsettled.writing(OsStr::new("a"), at(start, 700));
        assert_eq!(unsettled.take_due(at(start, 700)), file("a"));
    }

    #[test]
    fn closed_file_does_not_wait_for_an_open_one() {
        let (mut unsettled, start) = (Unsettled::default(), Instant::now());
        unsettled.writing(OsStr::new("slow"), start);
        unsettled.finished(OsStr::new("a"), start);
        assert_eq!(unsettled.take_due(start), file("a"));
        assert!(unsettled.contains(OsStr::new("slow")) && !unsettled.contains(OsStr::new("a")));
    }
}
