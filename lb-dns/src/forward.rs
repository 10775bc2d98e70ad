//! Asks upstream servers about names outside of this server's zones.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use hickory_proto::op::{Message, ResponseCode};
use tokio::{
    sync::{Semaphore, watch},
    time::timeout,
};

use crate::{
    cache::{Cache, Cached, Key},
    lock,
    servers::Servers,
    stats::Stats,
    upstream::{Ask, exchange},
};

/// Maximum number of questions that wait for upstream servers at a time: `max_concurrent` in the Corefile of most
/// clusters. Each holds a socket.
pub const MOST_QUESTIONS: usize = 1000;
/// Questions of clients that may wait for answers of upstream servers at a time. The forwarder sends equal questions
/// only once, but each of them counts towards this limit.
const MOST_CLIENTS: usize = 10_000;
/// How long the first round waits for each server, if there are several. (glibc waits 5 s for the answer.)
const FIRST_ROUND: Duration = Duration::from_millis(500);
/// How long the second round waits for each server. If there is only one server, both rounds wait this long.
const SECOND_ROUND: Duration = Duration::from_secs(2);
/// How long a question may take in all: a little less than glibc waits.
const PATIENCE: Duration = Duration::from_millis(4500);
/// How long a client waits for an upstream server while there is an expired answer (RFC 8767).
const STALE_PATIENCE: Duration = Duration::from_millis(1800);

/// Asks upstream servers, and keeps their answers.
#[derive(Debug)]
pub struct Forwarder {
    servers: Servers,
    cache: Mutex<Cache>,
    questions: Semaphore,
    clients: Semaphore,
    /// The questions that wait for upstream servers. Each receiver gets `Some` with the result.
    waiting: Mutex<HashMap<Key, watch::Receiver<Option<Outcome>>>>,
    stats: Stats,
}

/// What the upstream servers have answered; `None` if none has.
type Outcome = Option<Arc<Message>>;

impl Forwarder {
    /// A forwarder without servers; it forwards at most `questions` questions at a time.
    pub fn new(questions: usize, stats: Stats) -> Self {
        Self {
            servers: Servers::default(),
            cache: Mutex::default(),
            questions: Semaphore::new(questions),
            clients: Semaphore::new(MOST_CLIENTS),
            waiting: Mutex::default(),
            stats,
        }
    }

    /// The upstream servers.
    pub const fn servers(&self) -> &Servers {
        &self.servers
    }

    /// The answer from the cache or from a server; `None` if no server answers, if the last attempt failed a moment
    /// ago, or if too many questions are waiting.
    pub(crate) async fn resolve(self: &Arc<Self>, ask: &Ask) -> Outcome {
        let key = Key::new(&ask.question, ask.dnssec_ok, ask.checking_disabled);
        let cached = lock(&self.cache).get(&key, Instant::now());
        let patience = match cached {
            Cached::Fresh(message) => {
                self.stats.cache_hits.inc();
                return Some(Arc::new(message));
            }
            Cached::Stale(message) => {
                self.stats.stale_answers.inc();
                return Some(Arc::new(message));
            }
            Cached::Failed => {
                self.stats.failure_hits.inc();
                return None;
            }
            Cached::Expired => STALE_PATIENCE,
            Cached::Unknown => PATIENCE,
        };
        let _client = self.clients.try_acquire().ok()?;
        let mut outcome = self.ask_once(key, ask, patience);
        // The sender is dropped without an outcome only if its task panics.
        outcome.wait_for(Option::is_some).await.ok()?.clone().flatten()
    }

    /// A receiver for the outcome of a question. Equal questions that wait at the same time share one outcome.
    fn ask_once(
        self: &Arc<Self>,
        key: Key,
        ask: &Ask,
        patience: Duration,
    ) -> watch::Receiver<Option<Outcome>> {
        let mut waiting = lock(&self.waiting);
        if let Some(outcome) = waiting.get(&key).filter(|outcome| outcome.has_changed().is_ok()) {
            self.stats.merged.inc();
            return outcome.clone();
        }
        let (sender, outcome) = watch::channel(None);
        waiting.insert(key.clone(), outcome.clone());
        drop(waiting);
        let (forwarder, ask) = (Arc::clone(self), ask.clone());
        // In a task of its own, because the task of the first client may end while other clients wait for the outcome.
        tokio::spawn(async move {
            let found = forwarder.fetch(&key, &ask, patience).await;
            lock(&forwarder.waiting).remove(&key);
            sender.send_replace(Some(found.map(Arc::new)));
        });
        outcome
    }

    /// Asks upstream, and remembers the answer or the failure. There is nothing to remember if it asks no server.
    async fn fetch(&self, key: &Key, ask: &Ask, patience: Duration) -> Option<Message> {
        let servers = self.servers.usable();
        let place = self.questions.try_acquire().ok().filter(|_| !servers.is_empty());
        let Some(_place) = place else {
            self.stats.upstream_failures.inc();
            return None;
        };
        match timeout(patience, ask_all(&servers, ask)).await.ok().flatten() {
            Some(message) if is_answer(&message) => {
                lock(&self.cache).insert(key.clone(), &message, Instant::now());
                Some(message)
            }
            failed => {
                self.stats.upstream_failures.inc();
                let stale = lock(&self.cache).failed(key, Instant::now());
                stale.inspect(|_| _ = self.stats.stale_answers.inc()).or(failed)
            }
        }
    }
}

/// Asks one server after the other, beginning with a random one, in two rounds; the second is for those that have
/// not answered.
async fn ask_all(servers: &[SocketAddr], ask: &Ask) -> Option<Message> {
    let mut silent = servers.to_vec();
    let first = if silent.len() > 1 { FIRST_ROUND } else { SECOND_ROUND };
    let start = rand::random_range(0..silent.len().max(1));
    silent.rotate_left(start);
    let mut failure = None;
    for patience in [first, SECOND_ROUND] {
        // A server that has answered would answer the same again; a slow one may know more.
        for server in std::mem::take(&mut silent) {
            match timeout(patience, exchange(server, ask)).await {
                Ok(Ok(message)) if is_answer(&message) => return Some(message),
                Ok(Ok(message)) => failure = Some(message),
                Ok(Err(error)) => {
                    note_failure(server, &error);
                    silent.push(server);
                }
                Err(_elapsed) => silent.push(server),
            }
        }
    }
    failure
}

/// Whether the response code makes the message final. After SERVFAIL, NOTIMP, REFUSED or FORMERR, another server may
/// still know the answer.
fn is_answer(message: &Message) -> bool {
    use ResponseCode::{FormErr, NotImp, Refused, ServFail};
    ![ServFail, Refused, NotImp, FormErr].contains(&message.metadata.response_code)
}

fn note_failure(server: SocketAddr, error: &io::Error) {
    tracing::debug!("the upstream DNS server {server} did not answer: {error}");
}
