use std::{
    collections::{BTreeMap, BTreeSet},
    future,
    time::{Duration, SystemTime},
};

use futures_util::{StreamExt as _, stream::BoxStream};
use kube::{
    Api, Client,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event, watcher},
    },
};
use lb_core::model::{ObjectName, Trigger};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout_at},
};
use tracing::debug;

use super::{
    client::{CONNECT, SILENCE},
    kind::Kind,
    objects::Objects,
    watched::Watched,
};

/// Time without a failure after which a watch counts as resumed, since no event reports that a watch has resumed. It is
/// longer than the time between two failures of a server that accepts connections and never answers.
const QUIET: Duration = Duration::from_secs(240);
/// Longest pause between two attempts ([`WatchStreamExt::default_backoff`]).
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
const _: () = assert!(QUIET.as_secs() > LONGEST_PAUSE.as_secs() + CONNECT.as_secs() + SILENCE.as_secs());

/// The watch of one kind of objects, with the state of its objects.
pub(super) struct Watch<K: Kind> {
    stream: BoxStream<'static, watcher::Result<Event<Watched<K>>>>,
    objects: Objects<K>,
    failure: Option<(Failure, Instant)>,
    settled: bool,
    presence: Presence,
}

/// Whether the API server has an optional kind, by its last answer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Presence {
    /// No answer of the API server has shown yet whether the kind exists.
    Unknown,
    /// The kind exists, at least since this time.
    Exists(Instant),
    /// The kind was missing at this time, when the API server last answered a request for it with 404.
    Missing(Instant),
}

/// Why the last attempt to watch a kind failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The API server does not answer, or answers with an error other than 403.
    Away(String),
    /// The API server forbids listing or watching these objects.
    Refused(String),
}

impl<K: Kind> Watch<K> {
    /// Creates a watch that sends no request before [`Self::next`]. Changes from before `beginning` have no trigger.
    pub(super) fn new(client: Client, config: watcher::Config, beginning: SystemTime) -> Self {
        Self::of(Api::all(client), config, beginning)
    }

    /// Like [`Self::new`], for the objects at the API path of `api`.
    pub(super) fn of(api: Api<Watched<K>>, config: watcher::Config, beginning: SystemTime) -> Self {
        let stream = watcher(api, config).default_backoff().boxed();
        Self {
            stream,
            objects: Objects::new(beginning),
            failure: None,
            settled: false,
            presence: Presence::Unknown,
        }
    }

    /// Waits for the next event; returns its changes, perhaps none. If no event follows a failure within [`QUIET`],
    /// clears the failure and returns no changes. `None` means that the watch has ended, which would be a bug.
    /// Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Vec<K::Change>> {
        let event = match &self.failure {
            Some((_, last)) => match timeout_at(*last + QUIET, self.stream.next()).await {
                Ok(event) => event?,
                Err(_elapsed) => {
                    self.failure = None;
                    return Some(Vec::new());
                }
            },
            None => self.stream.next().await?,
        };
        match event {
            Ok(event) => {
                // `Init` announces a list that the API server has not answered yet.
                if !matches!(event, Event::Init) {
                    self.failure = None;
                    if !matches!(self.presence, Presence::Exists(_)) {
                        self.presence = Presence::Exists(Instant::now());
                    }
                }
                let changes = self.objects.handle(event);
                self.settled |= self.objects.is_listed();
                Some(changes)
            }
            Err(error) => {
                self.failed(&error);
                Some(Vec::new())
            }
        }
    }

    fn failed(&mut self, error: &watcher::Error) {
        if is_routine(error) {
            debug!("the watch of {}s resumes after: {error}", K::NAME);
            return;
        }
        let why = format!("{}s: {}", K::NAME, chain(error));
        debug!("{why}");
        let (status, now) = (status(error), Instant::now());
        self.failure = match status {
            // An API server that is too old for this kind, or has no CRD of it, answers 404. The agent keeps asking,
            // because the kind may be added, and reports no error.
            Some(404) if K::OPTIONAL => {
                self.presence = Presence::Missing(now);
                None
            }
            Some(403) => Some((Failure::Refused(why), now)),
            Some(_) | None => Some((Failure::Away(why), now)),
        };
        self.settled |= status == Some(403);
    }

    /// Current conditions of objects, as sentences for `lb-agent status`.
    pub(super) fn problems(&self) -> impl Iterator<Item = &str> {
        self.objects.problems()
    }

    /// Whether the API server has sent at least one complete list.
    pub(super) const fn is_listed(&self) -> bool {
        self.objects.is_listed()
    }

    /// Whether the kind was listed, and the API server has no object of it.
    pub(super) fn is_missing(&self) -> bool {
        self.objects.is_listed() && self.objects.is_empty()
    }

    /// Whether the API server has the kind.
    pub(super) const fn presence(&self) -> Presence {
        self.presence
    }

    /// Whether the API server has listed the kind, or has refused to.
    pub(super) const fn is_settled(&self) -> bool {
        self.settled
    }

    /// The Services with an object that was never readable.
    pub(super) fn unread(&self) -> BTreeSet<ObjectName> {
        self.objects.unread()
    }

    /// Names of the objects of which no version was readable.
    pub(super) fn unread_names(&self) -> BTreeSet<ObjectName> {
        self.objects.unread_names()
    }

    /// Returns and removes the triggers of the changes since the last call.
    pub(super) fn take_triggered(&mut self) -> Vec<Trigger> {
        self.objects.take_triggered()
    }

    /// Why the kind cannot be watched; `None` if the watch works, or is not known to have failed.
    pub(super) fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref().map(|(failure, _)| failure)
    }
}

/// Waits for the changes of a watch; forever if it is `None`. Cancel-safe.
pub(super) async fn next<K: Kind>(watch: &mut Option<Watch<K>>) -> Option<Vec<K::Change>> {
    match watch {
        Some(watch) => watch.next().await,
        None => future::pending().await,
    }
}

/// Applies changes to the known objects; `None` removes one.
pub(super) fn replace<K: Ord, V>(
    known: &mut BTreeMap<K, V>,
    changes: impl IntoIterator<Item = (K, Option<V>)>,
) {
    for (name, value) in changes {
        match value {
            Some(value) => known.insert(name, value),
            None => known.remove(&name),
        };
    }
}

/// Sets the channel's value; wakes receivers only if the value changes.
pub(super) fn publish<T: PartialEq>(channel: &watch::Sender<T>, now: T) {
    channel.send_if_modified(|published| {
        let modified = *published != now;
        *published = now;
        modified
    });
}

/// Sleeps until `then`; forever if it is `None`. Cancel-safe.
pub(crate) async fn at(then: Option<impl Into<Instant>>) {
    match then {
        Some(then) => sleep_until(then.into()).await,
        None => future::pending().await,
    }
}

/// The HTTP status of the API server's answer; `None` without an answer.
fn status(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => Some(status.code),
        watcher::Error::InitialListFailed(_)
        | watcher::Error::WatchStartFailed(_)
        | watcher::Error::WatchFailed(_)
        | watcher::Error::NoResourceVersion => None,
    }
}

/// Whether the error is part of normal operation. Connections end and versions expire; the watch then resumes by
/// itself, and if it fails to, the next error reports that. A watch that cannot start because of an expired version is
/// not routine: it would request that version again.
fn is_routine(error: &watcher::Error) -> bool {
    let expired = status(error) == Some(410) && !matches!(error, watcher::Error::WatchStartFailed(_));
    expired
        || matches!(error, watcher::Error::WatchFailed(cause) if !matches!(cause, kube::Error::SerdeError(_)))
}

/// The text of an error with its causes, each text once.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn expired_version_is_routine_except_when_a_watch_starts() {
        let gone = || Box::new(Status::failure("too old resource version", "Expired").with_code(410));
        assert!(is_routine(&watcher::Error::WatchError(gone())));
        assert!(is_routine(&watcher::Error::InitialListFailed(kube::Error::Api(gone()))));
        assert!(!is_routine(&watcher::Error::WatchStartFailed(kube::Error::Api(gone()))));
    }
}
