//! Background traffic for tests that cause faults: counts transactions and failures, with reasons.
//!
//! ```ignore
//! let traffic = Traffic::start([(&client, Kind::Connection, http(vip)), (&client, Kind::Questions, udp(vip))])?;
//! traffic.progresses()?;          // every client has made some transactions
//! agent.kill()?;
//! traffic.progresses()?;          // and some more
//! traffic.stop().assert_unharmed();
//! ```
//!
//! A transaction is a request with its whole answer, compared byte by byte. A client that fails records why, and
//! continues with a new connection or socket. No request is repeated: a lost datagram is a failure. So is an answer
//! that takes longer than [`limit`], without the time in which tasks waited for a CPU, I/O or memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, io,
    net::{SocketAddr, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{JoinHandle, sleep, spawn},
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

use crate::{
    client::{Connection, echo, limit, udp_socket_here},
    netns::Netns,
    pattern,
    stopwatch::Stopwatch,
    wait_for,
};

/// Number of transactions of each client that [`Traffic::progresses`] waits for.
const SOME: u64 = 20;
/// How long [`Traffic::start`] and [`Traffic::progresses`] wait for the transactions of all clients.
const PATIENCE: Duration = Duration::from_secs(30);
/// How much longer than [`limit`] a client waits in each operation, as the machine may be busy. An answer within
/// [`limit`] must not count as lost only because the client, the server or a program waited for a CPU.
const GRACE: Duration = Duration::from_secs(12);
/// Age at which a client replaces its [`Stopwatch`]. (A client does not replace the stopwatch before each transaction,
/// because the kernel takes tens of microseconds to sum up how long tasks have waited.)
const STOPWATCH_AGE: Duration = Duration::from_secs(1);
/// Pause between two transactions of a client. It keeps a client below 100 transactions per second, so that its ports
/// are free again before it has used all of them.
const PAUSE: Duration = Duration::from_millis(10);
/// Pause of a client after a failure, so that a persistent failure is not counted thousands of times.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(50);
/// Number of bytes that a server echoes in one transaction; over TCP, these are several segments.
const TCP_PIECE: usize = 5_000;
const UDP_PIECE: usize = 500;
/// Maximum number of failures whose reasons are recorded per client.
const MAX_REASONS: usize = 8;

/// The activity that a client repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// One TCP connection for the whole time, on which the server echoes the client's bytes.
    Connection,
    /// A new TCP connection for each request.
    Requests,
    /// One connected UDP socket for the whole time; the server echoes its datagrams.
    Datagrams,
    /// A new UDP socket for each datagram.
    Questions,
}

impl Kind {
    /// The kinds of clients that use TCP.
    pub const TCP: [Self; 2] = [Self::Connection, Self::Requests];
    /// The kinds of clients that use UDP.
    pub const UDP: [Self; 2] = [Self::Datagrams, Self::Questions];
}

/// Clients that run in the background until they are stopped.
#[derive(Debug)]
pub struct Traffic {
    shared: Arc<Shared>,
    clients: Vec<Client>,
}

/// State that clients share with their [`Traffic`].
#[derive(Debug)]
struct Shared {
    started: Instant,
    stop: AtomicBool,
}

#[derive(Debug)]
struct Client {
    name: String,
    /// Number of successful transactions so far.
    progress: Arc<AtomicU64>,
    thread: JoinHandle<Tally>,
}

/// Results of one client.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Number of successful transactions.
    pub transactions: u64,
    /// Number of failed transactions.
    pub failures: u64,
    /// Reasons of the first failures, each with its time since the start of the traffic.
    pub reasons: Vec<(Duration, String)>,
    /// Duration of the longest successful transaction.
    pub longest: Duration,
    /// Names of the servers that have answered.
    pub servers: BTreeSet<String>,
}

/// Results of all clients, by the text `KIND NAMESPACE → ADDRESS`.
#[derive(Clone, Debug, Default)]
pub struct Report(pub BTreeMap<String, Tally>);

impl Traffic {
    /// Starts a client for each item: its namespace, what it does, and its destination. Returns an error unless each
    /// client completes a transaction within [`PATIENCE`].
    pub fn start<'a>(clients: impl IntoIterator<Item = (&'a Netns, Kind, SocketAddr)>) -> Result<Self> {
        let shared = Arc::new(Shared { started: Instant::now(), stop: AtomicBool::new(false) });
        let mut traffic = Self { shared, clients: Vec::new() };
        for (netns, kind, to) in clients {
            traffic.add(netns, kind, to);
        }
        traffic.has_made(1)?;
        Ok(traffic)
    }

    /// Starts one more client.
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

    /// Waits until every client has made [`SOME`] more transactions.
    pub fn progresses(&self) -> Result<()> {
        self.has_made(SOME)
    }

    /// Waits until every client has completed `more` further transactions; returns an error after [`PATIENCE`].
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

    /// Number of successful transactions of all clients so far.
    pub fn transactions(&self) -> u64 {
        self.clients.iter().map(Client::made).sum()
    }

    /// Stops the clients and returns their results.
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
            // Waits for the thread to end, because it keeps the client's network namespace open.
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
    /// Number of successful transactions of all clients.
    pub fn transactions(&self) -> u64 {
        self.0.values().map(|tally| tally.transactions).sum()
    }

    /// Number of failed transactions of all clients.
    pub fn failures(&self) -> u64 {
        self.0.values().map(|tally| tally.failures).sum()
    }

    /// Duration of the longest successful transaction of any client.
    pub fn longest(&self) -> Duration {
        self.0.values().map(|tally| tally.longest).max().unwrap_or_default()
    }

    /// Asserts that no transaction failed and that each client made at least [`SOME`] of them, and prints the totals.
    ///
    /// # Panics
    /// If a transaction failed, a client made fewer than [`SOME`], or there was no client.
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

/// A client that is running: what it does, and its state.
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
        let (mut line, mut stopwatch) = (Line::Closed, Stopwatch::start());
        while !self.shared.stop.load(Ordering::Relaxed) {
            if stopwatch.wall() > STOPWATCH_AGE {
                stopwatch = Stopwatch::start();
            }
            let begun = Instant::now();
            let made = line.transact(self.kind, self.to, self.tally.transactions);
            let took = begun.elapsed();
            match made.and_then(|server| in_time(server, took, || stopwatch.waited())) {
                Ok(server) => {
                    self.tally.transactions += 1;
                    self.tally.longest = self.tally.longest.max(took);
                    self.tally.servers.insert(server);
                    self.progress.fetch_add(1, Ordering::Relaxed);
                    sleep(PAUSE);
                }
                Err(error) => {
                    let reason = format!("{error} ({:?}, {took:?} after it began)", error.kind());
                    self.tally.note_failure(self.shared.started.elapsed(), reason);
                    line = Line::Closed;
                    sleep(PAUSE_AFTER_FAILURE);
                }
            }
        }
    }
}

/// Returns the server of a transaction, or an error if the transaction took longer than [`limit`]. `waited` returns how
/// much of that time does not count, because tasks may have waited for a CPU, I/O or memory.
fn in_time(server: String, took: Duration, waited: impl FnOnce() -> Duration) -> io::Result<String> {
    if took <= limit() || took.saturating_sub(waited()) <= limit() {
        return Ok(server);
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, format!("{server} answers late")))
}

/// The connection or socket that a client sends on.
enum Line {
    Closed,
    /// A TCP connection, and the name of its server, which must not change.
    Tcp(Connection, Option<String>),
    Udp(UdpSocket),
}

impl Line {
    /// Completes transaction number `number`; returns the server's name.
    fn transact(&mut self, kind: Kind, to: SocketAddr, number: u64) -> io::Result<String> {
        if matches!(self, Self::Closed) {
            *self = match kind {
                Kind::Connection => Self::Tcp(connect(to)?, None),
                Kind::Datagrams => Self::Udp(udp_socket(to)?),
                Kind::Requests => return Ok(connect(to)?.ask()?.server),
                Kind::Questions => return ask_with(&udp_socket(to)?, number),
            };
        }
        match self {
            Self::Tcp(connection, known) => {
                let server = connection.echo(number * TCP_PIECE as u64, TCP_PIECE)?;
                if known.get_or_insert_with(|| server.clone()) == &server {
                    return Ok(server);
                }
                Err(io::Error::other(format!("{server} answers on a connection to {known:?}")))
            }
            Self::Udp(socket) => ask_with(socket, number),
            Self::Closed => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}

/// Opens a connection whose operations wait [`GRACE`] longer than [`limit`].
fn connect(to: SocketAddr) -> io::Result<Connection> {
    let longest = limit() + GRACE;
    let connection = Connection::on(TcpStream::connect_timeout(&to, longest)?, to)?;
    connection.stream().set_read_timeout(Some(longest))?;
    connection.stream().set_write_timeout(Some(longest))?;
    Ok(connection)
}

/// A connected socket that waits for an answer [`GRACE`] longer than [`limit`].
fn udp_socket(to: SocketAddr) -> io::Result<UdpSocket> {
    let socket = udp_socket_here(to)?;
    socket.set_read_timeout(Some(limit() + GRACE))?;
    Ok(socket)
}

/// Sends a datagram and waits for its echo; returns the server's name. The content depends on `number`, so that the
/// answer to another datagram is noticed.
fn ask_with(socket: &UdpSocket, number: u64) -> io::Result<String> {
    Ok(echo(socket, pattern::at(number * UDP_PIECE as u64, UDP_PIECE))?.server)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_answers_are_failures_unless_tasks_waited_for_a_cpu() {
        let second = Duration::from_secs(1);
        let answer = |took, waited| in_time("pod1".to_owned(), took, || waited).is_ok();
        assert!(answer(limit(), Duration::ZERO));
        assert!(!answer(limit() + second, Duration::ZERO));
        assert!(answer(limit() + second, second));
        assert!(answer(second, 2 * second));
    }

    #[test]
    fn idle_clients_and_failures_fail_the_assertion() {
        let report = |transactions, failures| {
            Report(BTreeMap::from([("it".to_owned(), Tally { transactions, failures, ..Tally::default() })]))
        };
        report(SOME, 0).assert_unharmed();
        for bad in [report(SOME, 1), report(SOME - 1, 0), Report::default()] {
            assert!(std::panic::catch_unwind(|| bad.assert_unharmed()).is_err(), "{bad}");
        }
    }
}
