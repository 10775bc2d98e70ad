//! Asks upstream servers for the names that are not ours.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use hickory_proto::{
    op::{Message, Query as Question, ResponseCode},
    rr::{Name, RecordType},
};
use tokio::{sync::Semaphore, time::timeout};
use tracing::warn;

use crate::{
    cache::{Cache, Cached, Key},
    stats::Stats,
    upstream::{Ask, exchange},
};

/// Questions that may wait for upstream servers at a time, as in the Corefile of most clusters.
const MOST_WAITING: usize = 1000;
/// How long the first round waits for each server, if there are several: glibc gives all of us 5 s.
const FIRST_ROUND: Duration = Duration::from_millis(500);
/// How long the second round, or the only server, may take.
const SECOND_ROUND: Duration = Duration::from_secs(2);
/// How long a question may take in all: a little less than glibc waits.
const PATIENCE: Duration = Duration::from_millis(4500);
/// How long a client waits for an upstream server while there is an expired answer (RFC 8767).
const STALE_PATIENCE: Duration = Duration::from_millis(1800);

/// Asks upstream servers, and keeps their answers.
#[derive(Debug)]
pub struct Forwarder {
    servers: Mutex<Arc<[SocketAddr]>>,
    cache: Mutex<Cache>,
    waiting: Semaphore,
    /// Questions that look for a loop, and the server that each was sent to.
    probes: Mutex<Vec<Probe>>,
    stats: Stats,
}

/// A question with a name that nobody else asks for. If it comes back to us, its server leads to us.
#[derive(Debug)]
struct Probe {
    name: Name,
    server: SocketAddr,
    has_returned: bool,
}

impl Forwarder {
    /// Asks no server yet.
    pub fn new(stats: Stats) -> Self {
        Self {
            servers: Mutex::new(Arc::new([])),
            cache: Mutex::default(),
            waiting: Semaphore::new(MOST_WAITING),
            probes: Mutex::default(),
            stats,
        }
    }

    /// Replaces the servers. Leaves out those among `own`, the addresses that we listen at.
    pub fn set_servers(&self, servers: &[SocketAddr], own: &[SocketAddr]) {
        let (ours, others): (Vec<_>, Vec<_>) = servers.iter().partition(|server| own.contains(server));
        for server in ours {
            warn!("the upstream DNS server {server} is this agent itself; it is not used");
        }
        *lock(&self.servers) = others.into();
    }

    /// The servers in use.
    pub fn servers(&self) -> Arc<[SocketAddr]> {
        Arc::clone(&lock(&self.servers))
    }

    /// Sends each server a question that comes back only if the server, or one that it asks, asks us. Drops the servers
    /// that do; returns them.
    pub async fn drop_loops(&self) -> Vec<SocketAddr> {
        for server in self.servers().iter().copied() {
            let [one, other]: [u64; 2] = rand::random();
            let Ok(name) = Name::from_ascii(format!("{one:016x}.{other:016x}.")) else { continue };
            lock(&self.probes).push(Probe { name: name.clone(), server, has_returned: false });
            let question = Question::query(name, RecordType::HINFO);
            let ask = Ask { question, dnssec_ok: false, checking_disabled: false };
            // Only whether the question comes back matters.
            drop(timeout(SECOND_ROUND, exchange(server, &ask)).await);
        }
        let probes = std::mem::take(&mut *lock(&self.probes));
        let loops: Vec<_> =
            probes.iter().filter(|probe| probe.has_returned).map(|probe| probe.server).collect();
        let mut servers = lock(&self.servers);
        *servers = servers.iter().filter(|server| !loops.contains(server)).copied().collect();
        loops
    }

    /// Whether the question is one of our own that looks for a loop.
    pub(crate) fn is_probe(&self, question: &Question) -> bool {
        if question.query_type != RecordType::HINFO {
            return false;
        }
        let mut probes = lock(&self.probes);
        let probe = probes.iter_mut().find(|probe| probe.name == question.name);
        probe.map(|probe| probe.has_returned = true).is_some()
    }

    /// The answer from the cache or from a server; `None` if no server answers.
    pub(crate) async fn resolve(&self, ask: &Ask) -> Option<Message> {
        let key = Key::new(&ask.question, ask.dnssec_ok, ask.checking_disabled);
        let cached = lock(&self.cache).get(&key, Instant::now());
        let patience = match cached {
            Cached::Fresh(message) => {
                self.stats.cache_hits.inc();
                return Some(message);
            }
            Cached::Stale(message) => {
                self.stats.stale_answers.inc();
                return Some(message);
            }
            Cached::Expired => STALE_PATIENCE,
            Cached::Unknown => PATIENCE,
        };
        let asked = timeout(patience, self.ask_all(ask)).await.ok().flatten();
        let has_failed = |message: &Message| message.metadata.response_code == ResponseCode::ServFail;
        match asked {
            Some(message) if !has_failed(&message) => {
                lock(&self.cache).insert(key, &message, Instant::now());
                Some(message)
            }
            failed => {
                self.stats.upstream_failures.inc();
                let stale = lock(&self.cache).failed(&key, Instant::now());
                stale.inspect(|_| _ = self.stats.stale_answers.inc()).or(failed)
            }
        }
    }

    /// Asks one server after the other, beginning with a random one, in two rounds; the second is for those that have
    /// not answered.
    async fn ask_all(&self, ask: &Ask) -> Option<Message> {
        let _permit = self.waiting.try_acquire().ok()?;
        let mut silent = self.servers().to_vec();
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
}

/// Whether another server would say the same.
fn is_answer(message: &Message) -> bool {
    use ResponseCode::{FormErr, NotImp, Refused, ServFail};
    ![ServFail, Refused, NotImp, FormErr].contains(&message.metadata.response_code)
}

fn note_failure(server: SocketAddr, error: &io::Error) {
    tracing::debug!("the upstream DNS server {server} did not answer: {error}");
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
