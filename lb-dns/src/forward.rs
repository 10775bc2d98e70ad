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

/// Maximum number of different questions that wait for upstream servers at a time: the value of `max_concurrent` in the
/// Corefile of most clusters. Each question holds a socket.
pub const MOST_QUESTIONS: usize = 1000;
/// Maximum number of clients' queries that wait for upstream servers at a time. If several of them have the same
/// question, the forwarder sends it only once, but each query counts towards this limit.
const MOST_CLIENTS: usize = 10_000;
/// How long the first round waits for each server, if there are several. (glibc waits 5 s for the answer.)
const FIRST_ROUND: Duration = Duration::from_millis(500);
/// How long the second round waits for each server. If there is only one server, both rounds wait this long.
const SECOND_ROUND: Duration = Duration::from_secs(2);
/// How long a question may take in all: a little less than glibc waits.
const PATIENCE: Duration = Duration::from_millis(4500);
/// How long a client waits for an upstream server if the cache has an expired answer (RFC 8767).
const STALE_PATIENCE: Duration = Duration::from_millis(1800);

/// Asks upstream servers, and keeps their answers.
#[derive(Debug)]
pub struct Forwarder {
    servers: Servers,
    cache: Mutex<Cache>,
    questions: Semaphore,
    clients: Semaphore,
    /// The questions that wait for upstream servers. Each receiver gets `Some` with the result.
    waiting: Mutex<HashMap<Key, watch::Receiver<Option<Resolution>>>>,
    stats: Stats,
}

/// What the upstream servers have answered; `None` if none has.
type Resolution = Option<Arc<Message>>;

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

    /// The answer from the cache or from a server. If there is no fresh answer, the result is the expired answer (RFC
    /// 8767). Without an expired answer, the result is the response in which a server reports a failure; `None` if no
    /// server answers, if the last attempt failed a moment ago, or if too many clients or questions are waiting.
    pub(crate) async fn resolve(self: &Arc<Self>, ask: &Ask) -> Resolution {
        let key = Key::new(&ask.question, ask.dnssec_ok, ask.checking_disabled);
        let cached = lock(&self.cache).get(&key, Instant::now());
        let expired = match cached {
            Cached::Fresh(message) => {
                self.stats.cache_hits.inc();
                return Some(Arc::new(message));
            }
            Cached::Stale(message) => return self.stale(message),
            Cached::Failed => {
                self.stats.failure_hits.inc();
                return None;
            }
            Cached::Expired(answer) => Some(answer),
            Cached::Unknown => None,
        };
        let outcome = match &expired {
            Some(_) => self.wait_briefly(&key, ask).await,
            None => self.wait(&key, ask).await,
        };
        if outcome.as_deref().is_some_and(is_answer) {
            return outcome;
        }
        // The client gets the expired answer, if there is one, for whatever reason there is no new one: a limit, no
        // server, no response, or a failure. `expired` was read before the wait, because the cache may evict the answer
        // meanwhile.
        expired.and_then(|answer| answer.stale()).map_or(outcome, |message| self.stale(message))
    }

    /// Counts an expired answer that a client gets.
    fn stale(&self, message: Message) -> Resolution {
        self.stats.stale_answers.inc();
        Some(Arc::new(message))
    }

    /// Like [`Self::wait`], but not longer than [`STALE_PATIENCE`]. The question goes on after that, so that a slow
    /// answer still replaces the expired one; until then, other clients get the expired one at once.
    async fn wait_briefly(self: &Arc<Self>, key: &Key, ask: &Ask) -> Resolution {
        let outcome = timeout(STALE_PATIENCE, self.wait(key, ask)).await;
        outcome.unwrap_or_else(|_elapsed| {
            lock(&self.cache).failed(key, Instant::now());
            None
        })
    }

    /// What the upstream servers answer; `None` if none does, or if too many clients or questions are waiting.
    async fn wait(self: &Arc<Self>, key: &Key, ask: &Ask) -> Resolution {
        let _client = self.clients.try_acquire().ok()?;
        let mut outcome = self.ask_once(key, ask);
        // The sender is dropped without an outcome only if its task panics.
        outcome.wait_for(Option::is_some).await.ok()?.clone().flatten()
    }

    /// A receiver for the outcome of a question. Equal questions that wait at the same time share one outcome.
    fn ask_once(self: &Arc<Self>, key: &Key, ask: &Ask) -> watch::Receiver<Option<Resolution>> {
        let mut waiting = lock(&self.waiting);
        if let Some(outcome) = waiting.get(key).filter(|outcome| outcome.has_changed().is_ok()) {
            self.stats.merged.inc();
            return outcome.clone();
        }
        let (sender, outcome) = watch::channel(None);
        waiting.insert(key.clone(), outcome.clone());
        drop(waiting);
        let (forwarder, key, ask) = (Arc::clone(self), key.clone(), ask.clone());
        // Asks in a separate task, because the task of the first client may end while other clients wait for the
        // outcome.
        tokio::spawn(async move {
            let found = forwarder.fetch(&key, &ask).await;
            lock(&forwarder.waiting).remove(&key);
            sender.send_replace(Some(found.map(Arc::new)));
        });
        outcome
    }

    /// Asks upstream, and remembers the answer or the failure. Remembers nothing if there is no server to ask, or if
    /// too many questions are waiting.
    async fn fetch(&self, key: &Key, ask: &Ask) -> Option<Message> {
        let servers = self.servers.usable();
        let place = self.questions.try_acquire().ok().filter(|_| !servers.is_empty());
        let Some(_place) = place else {
            self.stats.upstream_failures.inc();
            return None;
        };
        let found = timeout(PATIENCE, ask_all(&servers, ask)).await.ok().flatten();
        match found.as_ref().filter(|message| is_answer(message)) {
            Some(answer) => lock(&self.cache).insert(key.clone(), answer, Instant::now()),
            None => {
                self.stats.upstream_failures.inc();
                lock(&self.cache).failed(key, Instant::now());
            }
        }
        found
    }
}

/// Asks one server after the other, beginning with a random one, in two rounds; the second round asks only the servers
/// that have not answered in the first.
async fn ask_all(servers: &[SocketAddr], ask: &Ask) -> Option<Message> {
    let mut silent = servers.to_vec();
    let first = if silent.len() > 1 { FIRST_ROUND } else { SECOND_ROUND };
    let start = rand::random_range(0..silent.len().max(1));
    silent.rotate_left(start);
    let mut failure = None;
    for patience in [first, SECOND_ROUND] {
        // Each round asks only servers that have not answered before. A server whose answer was a failure would repeat
        // this failure; a slow server may know the answer.
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

/// Whether the response code makes the message final. NOERROR and NXDOMAIN replace an expired answer (RFC 8767, section
/// 4), as does YXDOMAIN: a DNAME record makes the name too long (RFC 6672). After any other code, another server may
/// still know the answer, and an expired answer stays in use.
pub(crate) fn is_answer(message: &Message) -> bool {
    use ResponseCode::{NXDomain, NoError, YXDomain};
    [NoError, NXDomain, YXDomain].contains(&message.metadata.response_code)
}

fn note_failure(server: SocketAddr, error: &io::Error) {
    tracing::debug!("the upstream DNS server {server} did not answer: {error}");
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use hickory_proto::{
        op::{OpCode, Query as Question},
        rr::{Name, RData, Record, RecordType, rdata::A},
    };
    use tokio::{net::UdpSocket, time::sleep};

    use super::*;
    use crate::tests::late_upstream;

    fn ask() -> Ask {
        let question = Question::query(Name::from_ascii("www.example.com.").unwrap(), RecordType::A);
        Ask { question, dnssec_ok: false, checking_disabled: false }
    }

    fn key() -> Key {
        Key::new(&ask().question, false, false)
    }

    /// A forwarder whose cache has an expired answer to [`ask`].
    fn forwarder(questions: usize) -> Arc<Forwarder> {
        let forwarder = Forwarder::new(questions, Stats::default());
        let mut message = Message::response(1, OpCode::Query);
        let data = RData::A(A([192, 0, 2, 1].into()));
        message.add_answer(Record::from_rdata(ask().question.name, 1, data));
        let stored = Instant::now().checked_sub(Duration::from_secs(2)).unwrap();
        lock(&forwarder.cache).insert(key(), &message, stored);
        Arc::new(forwarder)
    }

    /// The response code and the addresses that a client gets.
    async fn resolve(forwarder: &Arc<Forwarder>) -> Option<(ResponseCode, Vec<String>)> {
        let message = forwarder.resolve(&ask()).await?;
        let addresses = message.answers.iter().map(|record| record.data.to_string()).collect();
        Some((message.metadata.response_code, addresses))
    }

    fn found(address: &str) -> Option<(ResponseCode, Vec<String>)> {
        Some((ResponseCode::NoError, vec![address.to_owned()]))
    }

    fn expired() -> Option<(ResponseCode, Vec<String>)> {
        found("192.0.2.1")
    }

    /// Gives the forwarder an upstream server that answers at once with this code.
    async fn set_upstream(forwarder: &Forwarder, code: ResponseCode) {
        let upstream = late_upstream(Duration::ZERO, code).await;
        forwarder.servers().set(&[upstream], &[]);
    }

    /// Gives the forwarder an upstream server that does not answer, for as long as the socket exists.
    async fn set_silent_upstream(forwarder: &Forwarder) -> UdpSocket {
        let upstream = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        forwarder.servers().set(&[upstream.local_addr().unwrap()], &[]);
        upstream
    }

    #[tokio::test]
    async fn expired_answer_serves_while_too_many_clients_wait() {
        let forwarder = forwarder(1);
        set_upstream(&forwarder, ResponseCode::NoError).await;
        let others = forwarder.clients.try_acquire_many(u32::try_from(MOST_CLIENTS).unwrap()).unwrap();
        assert_eq!(resolve(&forwarder).await, expired());
        drop(others);
        assert_eq!(resolve(&forwarder).await, found("192.0.2.9"), "no pause: no server has failed");
    }

    #[tokio::test]
    async fn expired_answer_serves_while_too_many_questions_wait() {
        let forwarder = forwarder(1);
        set_upstream(&forwarder, ResponseCode::NoError).await;
        let other = forwarder.questions.try_acquire().unwrap();
        assert_eq!(resolve(&forwarder).await, expired());
        drop(other);
        assert_eq!(resolve(&forwarder).await, found("192.0.2.9"), "no pause: no server has failed");
    }

    #[tokio::test]
    async fn expired_answer_serves_without_upstream_servers() {
        let forwarder = forwarder(1);
        assert_eq!(resolve(&forwarder).await, expired());
        set_upstream(&forwarder, ResponseCode::NoError).await;
        assert_eq!(resolve(&forwarder).await, found("192.0.2.9"), "no pause: no server has failed");
    }

    #[tokio::test]
    async fn expired_answer_serves_if_the_task_of_the_question_panics() {
        let forwarder = forwarder(1);
        let (sender, outcome) = watch::channel(None);
        lock(&forwarder.waiting).insert(key(), outcome);
        let (answer, ()) = tokio::join!(resolve(&forwarder), async { drop(sender) });
        assert_eq!(answer, expired());
    }

    #[tokio::test]
    async fn expired_answer_serves_if_the_cache_evicts_it_while_its_client_waits() {
        let forwarder = forwarder(1);
        let _upstream = set_silent_upstream(&forwarder).await;
        let evict = async { *lock(&forwarder.cache) = Cache::default() };
        let (answer, ()) = tokio::join!(resolve(&forwarder), evict);
        assert_eq!(answer, expired());
    }

    #[tokio::test]
    async fn expired_answer_serves_if_the_upstream_reports_any_failure() {
        for code in [ResponseCode::ServFail, ResponseCode::Refused, ResponseCode::NotAuth] {
            let forwarder = forwarder(1);
            set_upstream(&forwarder, code).await;
            assert_eq!(resolve(&forwarder).await, expired(), "{code}");
            assert_eq!(resolve(&forwarder).await, expired(), "{code}: for the next client");
        }
    }

    #[tokio::test]
    async fn stale_answers_count_for_each_client() {
        let forwarder = forwarder(1);
        let _upstream = set_silent_upstream(&forwarder).await;
        let answers = tokio::join!(resolve(&forwarder), resolve(&forwarder));
        assert_eq!(answers, (expired(), expired()));
        assert_eq!((forwarder.stats.stale_answers.get(), forwarder.stats.merged.get()), (2, 1));
        assert_eq!(resolve(&forwarder).await, expired(), "at once, while the question goes on");
        assert_eq!((forwarder.stats.stale_answers.get(), forwarder.stats.merged.get()), (3, 1));
    }

    #[tokio::test]
    async fn answer_that_comes_after_the_client_got_the_expired_one_replaces_it() {
        let forwarder = forwarder(1);
        let late = STALE_PATIENCE + Duration::from_millis(100);
        forwarder.servers().set(&[late_upstream(late, ResponseCode::NoError).await], &[]);
        assert_eq!(resolve(&forwarder).await, expired());
        let refreshed = async {
            while resolve(&forwarder).await != found("192.0.2.9") {
                sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(PATIENCE * 2, refreshed).await.expect("the late answer replaces the expired one");
    }

    #[tokio::test]
    async fn denial_replaces_an_expired_answer() {
        let forwarder = forwarder(1);
        set_upstream(&forwarder, ResponseCode::NXDomain).await;
        assert_eq!(resolve(&forwarder).await, Some((ResponseCode::NXDomain, Vec::new())));
        forwarder.servers().set(&[], &[]);
        assert_eq!(resolve(&forwarder).await, None, "the answer is gone");
    }
}
