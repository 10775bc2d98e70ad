use std::time::Duration;

use futures_util::{StreamExt as _, stream::BoxStream};
use kube::{
    Api, Client,
    core::DeserializeGuard,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event, watcher},
    },
};
use lb_core::model::Change;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use super::{
    kind::{Kind, LABELS},
    objects::Objects,
};

/// Objects of a list that are fetched at once, and so are in memory together as the API server has them.
const PAGE: u32 = 200;
/// Nothing tells that a watch goes on where it was broken off. It does if it has not failed for that long: longer than
/// the pause between two attempts and the time that an attempt may take, together.
const QUIET: Duration = Duration::from_secs(90);

/// The watch of one kind.
pub(super) struct Watch<K> {
    stream: BoxStream<'static, watcher::Result<Event<DeserializeGuard<K>>>>,
    objects: Objects<K>,
    failure: Option<Failure>,
}

/// Why the API server cannot be asked now.
struct Failure {
    why: String,
    last: Instant,
}

impl<K: Kind> Watch<K> {
    /// Nothing is asked before [`Self::next`].
    pub(super) fn new(client: Client) -> Self {
        let mut config = watcher::Config::default().labels(LABELS).page_size(PAGE);
        if let Some(fields) = K::FIELDS {
            config = config.fields(fields);
        }
        let stream = watcher(Api::all(client), config).default_backoff().boxed();
        Self { stream, objects: Objects::default(), failure: None }
    }

    /// Waits for news; what has changed, perhaps nothing. `None` is the end, which never comes. May be cancelled.
    pub(super) async fn next(&mut self) -> Option<Vec<Change>> {
        let event = match &self.failure {
            Some(failure) => match timeout_at(failure.last + QUIET, self.stream.next()).await {
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
                // The beginning of a list is no answer yet.
                if !matches!(event, Event::Init) {
                    self.failure = None;
                }
                Some(self.objects.handle(event))
            }
            Err(error) => {
                self.failed(&error);
                Some(Vec::new())
            }
        }
    }

    fn failed(&mut self, error: &watcher::Error) {
        if is_routine(error) {
            debug!("the watch of {}s goes on after: {error}", K::NAME);
            return;
        }
        let why = format!("{}s: {}", K::NAME, chain(error));
        debug!("{why}");
        self.failure = Some(Failure { why, last: Instant::now() });
    }

    /// What was seen so far.
    pub(super) const fn objects(&self) -> &Objects<K> {
        &self.objects
    }

    /// Why the API server cannot be asked now, if it cannot.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_ref().map(|failure| failure.why.as_str())
    }
}

/// Connections end, and versions expire: then the watch goes on by itself. If it cannot, the next error says so.
fn is_routine(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::WatchFailed(kube::Error::SerdeError(_)) => false,
        watcher::Error::WatchFailed(_) => true,
        watcher::Error::WatchError(status) => status.code == 410,
        watcher::Error::InitialListFailed(_)
        | watcher::Error::WatchStartFailed(_)
        | watcher::Error::NoResourceVersion => false,
    }
}

/// The error with its causes, each said once.
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
