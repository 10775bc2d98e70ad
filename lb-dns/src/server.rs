//! The sockets of the server.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use hickory_proto::{
    op::{Message, ResponseCode},
    rr::Name,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, UdpSocket},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tracing::{debug, warn};

use crate::{
    forward::Forwarder,
    local::{self, Local},
    message::encode,
    names::Names,
    query::{self, Query, Refusal, our_edns},
    stats::Stats,
    upstream::Ask,
};

/// The largest query that is read over UDP.
const LARGEST_QUERY: usize = 4096;
/// TCP connections at a time.
const MOST_CONNECTIONS: usize = 256;
/// How long a TCP connection may be idle.
const IDLE: Duration = Duration::from_secs(10);
/// The pause after an error of a socket, such as too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers queries at one or more addresses.
#[derive(Debug)]
pub struct Server {
    names: Arc<Names>,
    forwarder: Arc<Forwarder>,
    stats: Stats,
    connections: Arc<Semaphore>,
    encode_error_logged: AtomicBool,
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

/// What became of a query without asking another server.
enum Begun {
    Dropped,
    Answered(Message),
    Outside(Message, Name),
}

impl Server {
    /// A server without sockets.
    pub fn new(names: Arc<Names>, forwarder: Arc<Forwarder>, stats: Stats) -> Self {
        let connections = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        Self { names, forwarder, stats, connections, encode_error_logged: AtomicBool::new(false) }
    }

    /// Listens at the address, over UDP and TCP, before it returns; the future serves both.
    ///
    /// # Errors
    ///
    /// An address that is not ours, or that another server has.
    pub async fn listen(
        self: Arc<Self>,
        address: SocketAddr,
    ) -> Result<impl Future<Output = Infallible>, BindError> {
        let error = |transport| move |source| BindError { address, transport, source };
        let udp = UdpSocket::bind(address).await.map_err(error("UDP"))?;
        let tcp = TcpListener::bind(address).await.map_err(error("TCP"))?;
        Ok(async move {
            tokio::select! {
                never = Arc::clone(&self).serve_udp(udp) => never,
                never = self.serve_tcp(tcp) => never,
            }
        })
    }

    async fn serve_udp(self: Arc<Self>, socket: UdpSocket) -> Infallible {
        let socket = Arc::new(socket);
        let mut buffer = vec![0; LARGEST_QUERY];
        loop {
            let (length, client) = match socket.recv_from(&mut buffer).await {
                Ok(received) => received,
                Err(error) => {
                    debug!("cannot receive a DNS query: {error}");
                    sleep(PAUSE).await;
                    continue;
                }
            };
            self.stats.count_query("udp");
            let bytes = buffer.get(..length).unwrap_or_default();
            // No client has port 0: the answer would go to a victim, or nowhere.
            let read = if client.port() == 0 { Err(Refusal::Drop) } else { query::read(bytes) };
            let limit = read.as_ref().map_or(u16::MAX, Query::udp_limit);
            match self.begin(&read) {
                Begun::Dropped => _ = self.stats.dropped.inc(),
                Begun::Answered(reply) => self.send(&socket, client, reply, limit).await,
                Begun::Outside(reply, name) => {
                    let (server, socket) = (Arc::clone(&self), Arc::clone(&socket));
                    let Ok(query) = read else { continue };
                    tokio::spawn(async move {
                        let reply = server.complete(&query, reply, name).await;
                        server.send(&socket, client, reply, limit).await;
                    });
                }
            }
        }
    }

    async fn send(&self, socket: &UdpSocket, client: SocketAddr, reply: Message, limit: u16) {
        let Some(bytes) = self.encode(reply, limit) else { return };
        if let Err(error) = socket.send_to(&bytes, client).await {
            debug!("cannot send a DNS answer to {client}: {error}");
        }
    }

    fn encode(&self, reply: Message, limit: u16) -> Option<Vec<u8>> {
        match encode(reply, limit) {
            Ok(bytes) => {
                let is_truncated = bytes.get(2).is_some_and(|flags| flags & 2 != 0);
                self.stats.truncated.inc_by(is_truncated.into());
                Some(bytes)
            }
            Err(error) => {
                // Any client may cause many of these.
                if !self.encode_error_logged.swap(true, Ordering::Relaxed) {
                    warn!(
                        "cannot encode a DNS answer: {error}; this is a bug, please report it (logged once)"
                    );
                }
                None
            }
        }
    }

    async fn serve_tcp(self: Arc<Self>, listener: TcpListener) -> Infallible {
        loop {
            // The permit comes first: connections beyond the limit wait in the backlog.
            let permit = Arc::clone(&self.connections).acquire_owned().await;
            match listener.accept().await {
                Ok((stream, _)) => {
                    let server = Arc::clone(&self);
                    tokio::spawn(async move {
                        let _permit = permit;
                        if let Err(error) = server.serve_connection(stream).await {
                            debug!("a DNS connection has ended: {error}");
                        }
                    });
                }
                Err(error) => {
                    debug!("cannot accept a DNS connection: {error}");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// Answers the queries of a connection one by one, until the client closes it or is idle.
    async fn serve_connection(&self, mut stream: TcpStream) -> io::Result<()> {
        loop {
            let mut query = vec![0; timeout(IDLE, stream.read_u16()).await??.into()];
            timeout(IDLE, stream.read_exact(&mut query)).await??;
            self.stats.count_query("tcp");
            let read = query::read(&query);
            let reply = match (self.begin(&read), &read) {
                (Begun::Answered(reply), _) => reply,
                (Begun::Outside(reply, name), Ok(query)) => self.complete(query, reply, name).await,
                (Begun::Dropped | Begun::Outside(..), _) => {
                    self.stats.dropped.inc();
                    return Ok(());
                }
            };
            let Some(reply) = self.encode(reply, u16::MAX) else { return Ok(()) };
            let length = u16::try_from(reply.len()).map_err(io::Error::other)?;
            let bytes = [&length.to_be_bytes()[..], &reply].concat();
            timeout(IDLE, stream.write_all(&bytes)).await??;
        }
    }

    /// Answers what needs no other server.
    fn begin(&self, read: &Result<Query, Refusal>) -> Begun {
        let query = match read {
            Ok(query) => query,
            Err(Refusal::Drop) => return Begun::Dropped,
            Err(Refusal::Reply(reply)) => return self.answered("refusal", (**reply).clone()),
        };
        if self.forwarder.is_probe(&query.question) {
            return self.answered("refusal", query.reply(ResponseCode::ServFail));
        }
        match local::answer(&self.names, query) {
            Local::Done(reply) => self.answered("local", reply),
            Local::Outside(_, _) if !query.recursion_desired => {
                self.answered("refusal", query.reply(ResponseCode::Refused))
            }
            Local::Outside(reply, name) => Begun::Outside(reply, name),
        }
    }

    fn answered(&self, by: &'static str, reply: Message) -> Begun {
        self.count(by, &reply);
        Begun::Answered(reply)
    }

    fn count(&self, by: &'static str, reply: &Message) {
        self.stats.count_answer(by, reply.metadata.response_code);
    }

    /// Adds the records that another server has for `name`.
    async fn complete(&self, query: &Query, mut reply: Message, name: Name) -> Message {
        let mut question = query.question.clone();
        question.name = name;
        let (dnssec_ok, checking_disabled) = (query.dnssec_ok(), query.checking_disabled);
        let answer = self.forwarder.resolve(&Ask { question, dnssec_ok, checking_disabled }).await;
        match answer {
            Some(answer) => append(&mut reply, query, answer),
            None => reply = query.reply(ResponseCode::ServFail),
        }
        self.count("upstream", &reply);
        reply
    }
}

/// Puts an upstream answer behind our own records, which are the aliases that lead to it.
fn append(reply: &mut Message, query: &Query, mut answer: Message) {
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
