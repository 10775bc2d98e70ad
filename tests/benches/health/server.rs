//! A server at many addresses, which records when each of them is probed.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use lb_tests::netns::Netns;
use nix::sys::socket::{Backlog, listen};
use serde::Serialize;

/// The first address of the server.
const FIRST: u32 = u32::from_be_bytes([11, 0, 0, 1]);
pub(crate) const PORT: u16 = 8080;
/// Number of threads that accept connections.
const THREADS: usize = 2;
/// Number of connections that may wait for a thread: more than the agent has open at a time.
const BACKLOG: i32 = 4096;
/// How long a request may take to arrive.
const PATIENCE: Duration = Duration::from_secs(5);

/// The addresses of the endpoints.
pub(crate) fn addresses(endpoints: u32) -> impl Iterator<Item = Ipv4Addr> {
    (FIRST..FIRST + endpoints).map(Ipv4Addr::from)
}

/// A server, which runs until the process ends.
pub(crate) struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    start: Instant,
    /// When each address was last probed, in microseconds since `start`; 0 means never.
    probed: Vec<AtomicU64>,
    /// Whether the server answers with an HTTP response.
    is_http: bool,
    /// Microseconds from the previous probe of the same address to each probe; 0 for the first probe of an address.
    gaps: Vec<AtomicU64>,
    /// Number of probes since the last [`Server::reset`], which is also the next index in `gaps`.
    probes: AtomicU64,
}

/// The probes that the server has seen since [`Server::reset`].
#[derive(Serialize)]
pub(crate) struct Seen {
    /// Number of probes.
    pub(crate) probes: u64,
    /// Times in seconds between two probes of the same address.
    pub(crate) gaps: Vec<f64>,
    /// Number of addresses that were not probed at all.
    pub(crate) missed: usize,
}

impl Server {
    /// Gives the namespace the addresses of the endpoints and starts to listen at all of them. Records the gaps of the
    /// first `most` probes.
    pub(crate) fn start(netns: &Netns, endpoints: u32, is_http: bool, most: usize) -> Result<Self> {
        Self::plug(netns)?;
        let listener = netns.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)))?;
        // The standard library's backlog is too short.
        listen(&listener, Backlog::new(BACKLOG)?).context("enlarging the backlog")?;
        let probed = (0..endpoints).map(|_| AtomicU64::new(0)).collect();
        let gaps = (0..most).map(|_| AtomicU64::new(0)).collect();
        let shared = Shared { start: Instant::now(), probed, is_http, gaps, probes: AtomicU64::new(0) };
        let shared = Arc::new(shared);
        for _ in 0..THREADS {
            let (listener, shared) = (listener.try_clone()?, Arc::clone(&shared));
            thread::spawn(move || listener.incoming().flatten().for_each(|stream| shared.serve(stream)));
        }
        Ok(Self { shared })
    }

    /// Gives the namespace the addresses of all endpoints.
    pub(crate) fn plug(netns: &Netns) -> Result<()> {
        netns.ip("route add local 11.0.0.0/8 dev lo")
    }

    /// Removes the addresses of all endpoints from the namespace.
    pub(crate) fn unplug(netns: &Netns) -> Result<()> {
        netns.ip("route del local 11.0.0.0/8 dev lo")
    }

    /// Number of addresses that were probed at least once.
    pub(crate) fn probed(&self) -> usize {
        self.shared.probed.iter().filter(|last| last.load(Ordering::Relaxed) > 0).count()
    }

    /// Begins a new measurement.
    pub(crate) fn reset(&self) {
        self.shared.probes.store(0, Ordering::Relaxed);
        self.shared.gaps.iter().for_each(|gap| gap.store(0, Ordering::Relaxed));
    }

    /// The probes that the server has seen since [`Self::reset`]; `time` must be the time since then.
    pub(crate) fn seen(&self, time: Duration) -> Seen {
        let probes = self.shared.probes.load(Ordering::Relaxed);
        let gaps = self.shared.gaps.iter().map(|gap| gap.load(Ordering::Relaxed)).filter(|gap| *gap > 0);
        let begin = self.shared.now().saturating_sub(micros(time));
        let is_missed = |last: &&AtomicU64| last.load(Ordering::Relaxed) < begin;
        Seen {
            probes,
            gaps: gaps.map(|gap| gap as f64 * 1e-6).collect(),
            missed: self.shared.probed.iter().filter(is_missed).count(),
        }
    }
}

impl Shared {
    fn now(&self) -> u64 {
        micros(self.start.elapsed())
    }

    fn serve(&self, stream: TcpStream) {
        // The listener is bound to IPv4 only. If `local_addr` fails, the probe is not counted.
        if let Ok(SocketAddr::V4(address)) = stream.local_addr() {
            self.note(*address.ip());
        }
        if self.is_http {
            answer(stream);
        }
    }

    fn note(&self, address: Ipv4Addr) {
        let Some(last) = address.to_bits().checked_sub(FIRST).and_then(|n| self.probed.get(n as usize))
        else {
            return;
        };
        let now = self.now();
        let before = last.swap(now, Ordering::Relaxed);
        let index = self.probes.fetch_add(1, Ordering::Relaxed);
        if before > 0
            && let Some(gap) = usize::try_from(index).ok().and_then(|index| self.gaps.get(index))
        {
            gap.store(now.saturating_sub(before), Ordering::Relaxed);
        }
    }
}

/// Reads a request and answers it. A client that has gone is no error.
fn answer(mut stream: TcpStream) {
    _ = stream.set_read_timeout(Some(PATIENCE));
    if stream.read(&mut [0; 1024]).is_ok_and(|length| length > 0) {
        _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
