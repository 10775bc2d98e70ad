//! Traffic in the background, for tests that break something meanwhile: what went through, what failed and why.
//!
//! ```ignore
//! let traffic = Traffic::start([(&client, Kind::Connection, http(vip)), (&client, Kind::Questions, udp(vip))])?;
//! traffic.goes_on()?;             // every client has made some transactions
//! agent.kill()?;
//! traffic.goes_on()?;             // and some more
//! traffic.stop().assert_unharmed();
//! ```
//!
//! A transaction is a request with its whole answer, compared octet by octet. A client that fails notes why and goes on,
//! a [`Kind::Connection`] with a new connection. Nothing is asked twice: a lost datagram is a failure.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    net::{SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{JoinHandle, sleep, spawn},
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

use crate::{
    client::{Connection, ask_here, echo, udp_socket_here},
    netns::Netns,
    pattern, wait_for,
};

/// Transactions that [`Traffic::goes_on`] waits for, of each client.
const SOME: u64 = 20;
/// How long it waits for them.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two transactions of a client. With the time that they take it keeps a client below 100 a second, whose ports are
/// free again before the next round through all of them.
const PAUSE: Duration = Duration::from_millis(10);
/// After a failure, so that nobody counts the same one a thousand times.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(50);
/// Octets of a request and of its answer: they fill several segments.
const TCP_PIECE: usize = 5_000;
const UDP_PIECE: usize = 500;
/// Different failures that a client tells of.
const MAX_REASONS: usize = 8;

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// One TCP connection as long as the traffic lasts, over which octets go to the server and come back.
    Connection,
    /// A TCP connection for each request.
    Requests,
    /// One connected UDP socket as long as the traffic lasts; what is sent over it comes back.
    Datagrams,
    /// A UDP socket for each question.
    Questions,
}

impl Kind {
    /// Those over TCP.
    pub const TCP: [Self; 2] = [Self::Connection, Self::Requests];
    /// Those over UDP.
    pub const UDP: [Self; 2] = [Self::Datagrams, Self::Questions];
}

/// Clients that run until they are stopped.
#[derive(Debug)]
pub struct Traffic {
    shared: Arc<Shared>,
    clients: Vec<Client>,
}

/// What the clients and who watches them share.
#[derive(Debug)]
struct Shared {
    started: Instant,
    stop: AtomicBool,
}

#[derive(Debug)]
struct Client {
    name: String,
    /// How many transactions it has made so far.
    progress: Arc<AtomicU64>,
    thread: JoinHandle<Tally>,
}

/// What one client has seen.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Transactions that went well.
    pub transactions: u64,
    /// Transactions that did not.
    pub failures: u64,
    /// The first failures, each with the moment since the start of the traffic.
    pub reasons: Vec<(Duration, String)>,
    /// The one that took longest of those that went well.
    pub longest: Duration,
    /// Who has answered.
    pub servers: BTreeSet<String>,
}

/// What all clients have seen, by `KIND NAMESPACE → ADDRESS`.
#[derive(Clone, Debug, Default)]
pub struct Report(pub BTreeMap<String, Tally>);

impl Traffic {
    /// Starts a client for each of these: where it is, what it does and whom it speaks to. Fails if the first transaction of any
    /// of them does.
    pub fn start<'a>(clients: impl IntoIterator<Item = (&'a Netns, Kind, SocketAddr)>) -> Result<Self> {
        let shared = Arc::new(Shared { started: Instant::now(), stop: AtomicBool::new(false) });
        let mut traffic = Self { shared, clients: Vec::new() };
        for (netns, kind, to) in clients {
            traffic.add(netns, kind, to);
        }
        traffic.has_made(1)?;
        Ok(traffic)
    }

    /// Starts another client.
    pub fn add(&mut self, netns: &Netns, kind: Kind, to: SocketAddr) {
        let progress = Arc::new(AtomicU64::new(0));
        let worker = Worker {
            shared: Arc::clone(&self.shared),
            progress: Arc::clone(&progress),
            tally: Tally::default(),
            kind,
            to,
        };
        let name = format!("{kind:?} {} → {to}", netns.name());
        let netns = netns.clone();
        let thread = spawn(move || run_in(&netns, worker));
        self.clients.push(Client { name, progress, thread });
    }

    /// Waits until every client has made some more transactions.
    pub fn goes_on(&self) -> Result<()> {
        self.has_made(SOME)
    }

    /// Waits until every client has made so many more transactions.
    fn has_made(&self, more: u64) -> Result<()> {
        let wanted: Vec<u64> = self.clients.iter().map(|client| client.made() + more).collect();
        let late = || self.clients.iter().zip(&wanted).find(|(client, wanted)| client.made() < **wanted);
        if wait_for(PATIENCE, || late().is_none().then_some(())).is_none()
            && let Some((client, wanted)) = late()
        {
            bail!("{} has made {} transactions, not {wanted}", client.name, client.made());
        }
        Ok(())
    }

    /// Transactions so far, of all clients.
    pub fn transactions(&self) -> u64 {
        self.clients.iter().map(Client::made).sum()
    }

    /// Ends it.
    pub fn stop(mut self) -> Report {
        self.shared.stop.store(true, Ordering::Relaxed);
        let end = |client: Client| (client.name, client.thread.join().unwrap_or_else(|_| Tally::panicked()));
        Report(std::mem::take(&mut self.clients).into_iter().map(end).collect())
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for client in std::mem::take(&mut self.clients) {
            // Its namespace goes when it has ended, so it is waited for.
            if let Ok(tally) = client.thread.join()
                && std::thread::panicking()
            {
                eprintln!("{}: {tally}", client.name);
            }
        }
    }
}

impl Client {
    fn made(&self) -> u64 {
        self.progress.load(Ordering::Relaxed)
    }
}

impl Tally {
    fn panicked() -> Self {
        Self { failures: 1, reasons: vec![(Duration::ZERO, "the client panicked".into())], ..Self::default() }
    }

    fn note_failure(&mut self, at: Duration, reason: String) {
        self.failures += 1;
        if self.reasons.len() < MAX_REASONS {
            self.reasons.push((at, reason));
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { transactions, failures, longest, .. } = self;
        write!(f, "{transactions} transactions, the longest took {longest:?}, {failures} failures")?;
        self.reasons.iter().try_for_each(|(at, reason)| write!(f, "; after {at:?}: {reason}"))
    }
}

impl Report {
    /// Transactions of all clients that went well.
    pub fn transactions(&self) -> u64 {
        self.0.values().map(|tally| tally.transactions).sum()
    }

    /// Transactions of all clients that did not.
    pub fn failures(&self) -> u64 {
        self.0.values().map(|tally| tally.failures).sum()
    }

    /// The longest transaction of all.
    pub fn longest(&self) -> Duration {
        self.0.values().map(|tally| tally.longest).max().unwrap_or_default()
    }

    /// Asserts that nothing failed, that every client has done something, and prints what it was.
    ///
    /// # Panics
    /// If it does not hold.
    #[track_caller]
    pub fn assert_unharmed(&self) {
        assert!(!self.0.is_empty(), "there was no traffic");
        let idle = self.0.values().any(|tally| tally.transactions < SOME);
        assert!(self.failures() == 0 && !idle, "{self}");
        println!("{} transactions, 0 failures, the longest took {:?}", self.transactions(), self.longest());
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(name, tally)| writeln!(f, "{name}: {tally}"))
    }
}

/// A client at work.
struct Worker {
    shared: Arc<Shared>,
    progress: Arc<AtomicU64>,
    tally: Tally,
    kind: Kind,
    to: SocketAddr,
}

fn run_in(netns: &Netns, mut worker: Worker) -> Tally {
    let entered = netns.run(|| {
        worker.run();
        Ok(())
    });
    if let Err(error) = entered {
        worker.tally.note_failure(Duration::ZERO, format!("entering the namespace: {error}"));
    }
    worker.tally
}

impl Worker {
    fn run(&mut self) {
        let mut line = Line::Closed;
        while !self.shared.stop.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let made = line.transact(self.kind, self.to, self.tally.transactions);
            match made {
                Ok(server) => {
                    self.tally.transactions += 1;
                    self.tally.longest = self.tally.longest.max(begun.elapsed());
                    self.tally.servers.insert(server);
                    self.progress.fetch_add(1, Ordering::Relaxed);
                    sleep(PAUSE);
                }
                Err(error) => {
                    let after = begun.elapsed();
                    let reason = format!("{error} ({:?}, {after:?} after it began)", error.kind());
                    self.tally.note_failure(self.shared.started.elapsed(), reason);
                    line = Line::Closed;
                    sleep(PAUSE_AFTER_FAILURE);
                }
            }
        }
    }
}

/// What a client speaks over.
enum Line {
    Closed,
    /// With the server's name: a connection has one.
    Tcp(Connection, Option<String>),
    Udp(UdpSocket),
}

impl Line {
    /// Makes the transaction of this number; the server's name.
    fn transact(&mut self, kind: Kind, to: SocketAddr, number: u64) -> io::Result<String> {
        if matches!(self, Self::Closed) {
            *self = match kind {
                Kind::Connection => Self::Tcp(Connection::open_here(to)?, None),
                Kind::Datagrams => Self::Udp(udp_socket_here(to)?),
                Kind::Requests => return Ok(ask_here(to)?.server),
                Kind::Questions => return ask_with(&udp_socket_here(to)?, number),
            };
        }
        match self {
            Self::Tcp(connection, known) => {
                let server = connection.echo(number * TCP_PIECE as u64, TCP_PIECE)?;
                if known.get_or_insert_with(|| server.clone()) == &server {
                    return Ok(server);
                }
                Err(io::Error::other(format!("{server} goes on with what {known:?} began")))
            }
            Self::Udp(socket) => ask_with(socket, number),
            Self::Closed => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

/// Each question has octets of its own, so the answer to another one is noticed.
fn ask_with(socket: &UdpSocket, number: u64) -> io::Result<String> {
    Ok(echo(socket, pattern::at(number * UDP_PIECE as u64, UDP_PIECE))?.server)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_clients_and_failures_are_no_pass() {
        let report = |transactions, failures| {
            Report(BTreeMap::from([("it".to_owned(), Tally { transactions, failures, ..Tally::default() })]))
        };
        report(SOME, 0).assert_unharmed();
        for bad in [report(SOME, 1), report(SOME - 1, 0), Report::default()] {
            assert!(std::panic::catch_unwind(|| bad.assert_unharmed()).is_err(), "{bad}");
        }
    }
}
