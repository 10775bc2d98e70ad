//! Answers queries, over UDP and TCP.

use std::{
    convert::Infallible,
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use hickory_proto::{
    op::{Message, ResponseCode},
    rr::Name,
};
use tokio::{
    net::{TcpListener, UdpSocket},
    sync::Semaphore,
};
use tracing::warn;

use crate::{
    clients::{Access, Clients},
    forward::{Forwarder, is_answer},
    local::{self, Local},
    message::{encode, is_truncated},
    names::Names,
    query::{Query, Refusal, our_edns},
    stats::Stats,
    tcp, udp,
    upstream::{self, Ask, ServerCode},
};

/// Maximum number of TCP connections at a time.
const MOST_CONNECTIONS: usize = 256;
/// The pause after an error of a socket, such as too many open files.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

/// Answers queries at one or more addresses.
#[derive(Debug)]
pub struct Server {
    names: Arc<Names>,
    forwarder: Arc<Forwarder>,
    pub(crate) stats: Stats,
    pub(crate) clients: Clients,
    /// Places for TCP connections.
    pub(crate) connections: Arc<Semaphore>,
    encode_error_logged: AtomicBool,
    /// Number of datagrams and connections of allowed clients, without those that come from the server's own address.
    pub(crate) received: AtomicU64,
}

/// Why the server cannot listen.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot serve DNS at {address} over {transport}: {source}; if another server holds the port, see ss -lunpt \
     'sport = :{}', or give another address with --dns-bind-address", address.port()
)]
pub struct BindError {
    address: SocketAddr,
    transport: &'static str,
    source: io::Error,
}

/// The result of a query before another server is asked.
pub(crate) enum Begun {
    Dropped,
    Answered(Message),
    /// Another server has to answer for this name; the caller has to append that server's records to the records of the
    /// message.
    Outside(Message, Name),
}

impl Server {
    /// A server without sockets.
    pub fn new(names: Arc<Names>, forwarder: Arc<Forwarder>, access: Access, stats: Stats) -> Self {
        let (clients, connections) = (Clients::new(access), Arc::new(Semaphore::new(MOST_CONNECTIONS)));
        let (encode_error_logged, received) = (AtomicBool::new(false), AtomicU64::new(0));
        Self { names, forwarder, stats, clients, connections, encode_error_logged, received }
    }

    /// Listens at the address, over UDP and TCP, before this function returns; the returned future serves both.
    ///
    /// # Errors
    ///
    /// The machine does not have the address, another server listens at it, or this process may not use the port.
    pub async fn listen(
        self: Arc<Self>,
        address: SocketAddr,
    ) -> Result<impl Future<Output = Infallible>, BindError> {
        let error = |transport| move |source| BindError { address, transport, source };
        let udp_socket = UdpSocket::bind(address).await.map_err(error("UDP"))?;
        udp::enlarge_buffers(&udp_socket);
        let tcp_listener = TcpListener::bind(address).await.map_err(error("TCP"))?;
        Ok(async move {
            tokio::select! {
                never = udp::serve(Arc::clone(&self), udp_socket) => never,
                never = tcp::serve(self, tcp_listener) => never,
            }
        })
    }

    /// Asks this server, which listens at `address`, over UDP for an address of `name`. The rate limit of the query's
    /// source, the node's address, does not apply: the server must not look dead if other senders use up the rate of
    /// that source.
    ///
    /// # Errors
    /// An invalid name, and errors of the socket. The caller must limit the time: this function has no timeout.
    pub async fn ask_itself(&self, address: SocketAddr, name: &str) -> io::Result<ServerCode> {
        let socket = upstream::connect(address).await?;
        let _exemption = self.clients.exempt(socket.local_addr()?);
        upstream::code_over(&socket, name).await
    }

    /// How many datagrams and connections of allowed clients have come from other addresses than the one that the
    /// server listens at.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Counts a datagram or connection to the address `own`, unless the client has that address itself.
    pub(crate) fn count_received(&self, client: IpAddr, own: Option<IpAddr>) {
        self.received.fetch_add(u64::from(Some(client) != own), Ordering::Relaxed);
    }

    /// Encodes an answer; `None` if that fails, which is a bug.
    pub(crate) fn encode(&self, reply: &Message, limit: u16) -> Option<Vec<u8>> {
        match encode(reply, limit) {
            Ok(bytes) => {
                self.stats.truncated.inc_by(is_truncated(&bytes).into());
                Some(bytes)
            }
            Err(error) => {
                // Any client may cause many of these errors, so only the first one is logged.
                if !self.encode_error_logged.swap(true, Ordering::Relaxed) {
                    warn!(
                        "cannot encode a DNS answer: {error}; this is a bug, please report it (logged once)"
                    );
                }
                None
            }
        }
    }

    /// Answers a query as far as possible without another server. `limit` bounds the number of records: see
    /// [`local::answer`].
    pub(crate) fn begin(&self, read: &Result<Query, Refusal>, limit: u16) -> Begun {
        let query = match read {
            Ok(query) => query,
            Err(Refusal::Drop) => return Begun::Dropped,
            Err(Refusal::Reply(reply)) => return self.refused((**reply).clone()),
        };
        if self.forwarder.servers().is_probe(&query.question) {
            return self.refused(query.reply(ResponseCode::ServFail));
        }
        match local::answer(&self.names, query, limit) {
            Local::Outside(reply, name) if query.recursion_desired => Begun::Outside(reply, name),
            Local::Outside(reply, _) if reply.answers.is_empty() => {
                self.refused(query.reply(ResponseCode::Refused))
            }
            // An alias is ours even if its target is not: the client asks others for the target (RFC 1034 §4.3.2).
            Local::Done(reply) | Local::Outside(reply, _) => {
                self.count("local", &reply);
                Begun::Answered(reply)
            }
        }
    }

    /// Counts an answer that refuses a query.
    pub(crate) fn refused(&self, reply: Message) -> Begun {
        self.count("refusal", &reply);
        Begun::Answered(reply)
    }

    fn count(&self, by: &'static str, reply: &Message) {
        self.stats.count_answer(by, reply.metadata.response_code);
    }

    /// Adds the records that another server has for `name`. If no server answers, the result is SERVFAIL. It is also
    /// SERVFAIL if `name` is the target of an alias and a server reports a failure: passed on, that server's code would
    /// say that this server has failed, or refused, to resolve the alias.
    pub(crate) async fn complete(&self, query: &Query, mut reply: Message, name: Name) -> Message {
        let mut question = query.question.clone();
        question.name = name;
        let (dnssec_ok, checking_disabled) = (query.dnssec_ok(), query.checking_disabled);
        let answer = self.forwarder.resolve(&Ask { question, dnssec_ok, checking_disabled }).await;
        match answer {
            Some(answer) if reply.answers.is_empty() || is_answer(&answer) => {
                append(&mut reply, query, Arc::unwrap_or_clone(answer));
            }
            Some(_) | None => reply = query.reply(ResponseCode::ServFail),
        }
        self.count("upstream", &reply);
        reply
    }
}

/// Appends the records of an upstream answer to `reply`, which has the aliases that lead to the name asked upstream.
pub(crate) fn append(reply: &mut Message, query: &Query, mut answer: Message) {
    let asked = query.name();
    let Message { answers, authorities, .. } = &mut answer;
    for record in answers.iter_mut().chain(authorities).filter(|record| record.name == *asked) {
        record.name = asked.clone();
    }
    let wants_authentic = query.authentic_data || query.dnssec_ok();
    reply.metadata.authentic_data =
        answer.metadata.authentic_data && wants_authentic && reply.answers.is_empty();
    reply.metadata.response_code = answer.metadata.response_code;
    reply.metadata.truncation = answer.metadata.truncation;
    reply.answers.append(&mut answer.answers);
    reply.authorities.append(&mut answer.authorities);
    reply.additionals.append(&mut answer.additionals);
    reply.edns = query.edns.map(|edns| our_edns(edns.dnssec_ok));
}
