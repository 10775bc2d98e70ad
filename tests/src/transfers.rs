//! Many slow downloads at once, to see which of them survive while the network changes.

use std::{
    io::{self, Read as _},
    net::{SocketAddr, TcpStream},
    os::fd::AsRawFd as _,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{JoinHandle, sleep, spawn},
    time::{Duration, Instant},
};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, connect, setsockopt, socket, sockopt::RcvBuf,
};

use crate::{client::Connection, netns::Netns, pattern, stopwatch::Stopwatch};

/// Receive buffer of each connection, in bytes: what a download has not read must still cross the network.
const BUFFER: usize = 16 * 1024;
/// Bytes that a slow download reads in each [`ROUND`].
const SLOW_PIECE: usize = 2 * 1024;
/// Pause between two looks at all connections.
const ROUND: Duration = Duration::from_millis(100);
/// The same, once the downloads hurry.
const SHORT_ROUND: Duration = Duration::from_millis(5);

/// Downloads that run at the same time, each over its own connection. One thread reads all of them.
#[derive(Debug)]
pub struct Transfers {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Shared {
    hurry: AtomicBool,
    stop: AtomicBool,
    downloads: Mutex<Vec<Download>>,
    samples: Mutex<Vec<Sample>>,
}

/// What a client knows of a download.
#[derive(Clone, Debug)]
pub struct Download {
    /// The client's address.
    pub local: SocketAddr,
    /// The address to which it connected.
    pub to: SocketAddr,
    /// The name of the server that answered.
    pub server: String,
    /// Bytes received so far; each was compared with [`pattern`].
    pub received: u64,
    /// The longest time without a byte.
    pub longest_pause: Duration,
    /// How it ended; `None` while it runs.
    pub end: Option<Result<(), String>>,
}

impl Download {
    /// Whether all bytes have arrived.
    pub const fn is_complete(&self) -> bool {
        matches!(self.end, Some(Ok(())))
    }
}

/// What all downloads received in one round.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// The end of the round.
    pub at: Instant,
    /// Bytes received.
    pub bytes: u64,
    /// Downloads that received at least one byte, or had ended well before.
    pub moving: usize,
    /// Downloads that have failed.
    pub failed: usize,
}

impl Transfers {
    /// Opens `count` connections from `netns`, to each of the addresses in turn, and downloads `bytes` over each of them
    /// slowly: at most 20 kB/s.
    ///
    /// # Errors
    /// A connection cannot be opened, or its server does not begin to answer.
    pub fn begin(netns: &Netns, to: &[SocketAddr], count: usize, bytes: u64) -> io::Result<Self> {
        let open = || (0..count).map(|number| Reader::open(to[number % to.len()], bytes)).collect();
        let readers: Vec<Reader> = netns.run(open)?;
        let downloads = readers.iter().map(|reader| reader.download.clone()).collect();
        let shared = Arc::new(Shared { downloads: Mutex::new(downloads), ..Shared::default() });
        let thread = spawn({
            let shared = Arc::clone(&shared);
            move || read_all(readers, &shared)
        });
        Ok(Self { shared, thread })
    }

    /// The downloads as they are now.
    pub fn downloads(&self) -> Vec<Download> {
        lock(&self.shared.downloads).clone()
    }

    /// What the downloads have received over time.
    pub fn samples(&self) -> Vec<Sample> {
        lock(&self.shared.samples).clone()
    }

    /// Receives the rest as fast as possible, until each download has ended, or has had no byte for `limit`, and closes
    /// the connections. `is_lost` are downloads that need not end.
    pub fn finish(self, limit: Duration, is_lost: impl Fn(&Download) -> bool) -> Vec<Download> {
        self.shared.hurry.store(true, Ordering::Relaxed);
        let received = |downloads: &[Download]| downloads.iter().map(|it| it.received).sum::<u64>();
        let mut last = 0;
        let mut stopwatch = Stopwatch::start();
        loop {
            let downloads = self.downloads();
            if received(&downloads) != last {
                (last, stopwatch) = (received(&downloads), Stopwatch::start());
            }
            let has_ended = |download: &Download| download.end.is_some() || is_lost(download);
            if downloads.iter().all(has_ended) || stopwatch.elapsed() > limit {
                break;
            }
            sleep(ROUND);
        }
        self.shared.stop.store(true, Ordering::Relaxed);
        let _panicked = self.thread.join();
        lock(&self.shared.downloads).clone()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection, and what it has received.
struct Reader {
    stream: TcpStream,
    bytes: u64,
    last: Instant,
    download: Download,
}

impl Reader {
    fn open(to: SocketAddr, bytes: u64) -> io::Result<Self> {
        let connection = Connection::on(connect_with_small_buffer(to)?, to)?;
        let (server, begun, stream) = connection.begin_download(bytes)?;
        stream.set_nonblocking(true)?;
        let local = stream.local_addr()?;
        let download = Download { local, to, server, received: 0, longest_pause: Duration::ZERO, end: None };
        let mut reader = Self { stream, bytes, last: Instant::now(), download };
        reader.take(&begun);
        Ok(reader)
    }

    /// Reads at most `limit` bytes; returns how many arrived.
    fn read(&mut self, buffer: &mut [u8], limit: u64) -> u64 {
        let before = self.download.received;
        while self.download.end.is_none() && self.download.received - before < limit {
            let wanted = (self.bytes - self.download.received).min(buffer.len() as u64);
            let piece = &mut buffer[..usize::try_from(wanted).unwrap_or_default()];
            match self.stream.read(piece) {
                Ok(0) => self.download.end = Some(Err("the connection was closed".to_owned())),
                Ok(len) => self.take(&piece[..len]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => self.download.end = Some(Err(error.to_string())),
            }
        }
        let pause = self.last.elapsed();
        self.download.longest_pause = self.download.longest_pause.max(pause);
        self.download.received - before
    }

    fn take(&mut self, piece: &[u8]) {
        let download = &mut self.download;
        download.longest_pause = download.longest_pause.max(self.last.elapsed());
        self.last = Instant::now();
        if let Err(error) = pattern::check(download.received, piece) {
            download.end = Some(Err(error));
        }
        download.received += piece.len() as u64;
        if download.received == self.bytes && download.end.is_none() {
            download.end = Some(Ok(()));
        }
    }
}

fn connect_with_small_buffer(to: SocketAddr) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, RcvBuf, &BUFFER)?;
    connect(fd.as_raw_fd(), &SockaddrStorage::from(to))?;
    Ok(TcpStream::from(fd))
}

fn read_all(mut readers: Vec<Reader>, shared: &Shared) {
    let mut buffer = vec![0; pattern::MAX_PIECE];
    while !shared.stop.load(Ordering::Relaxed) {
        let hurry = shared.hurry.load(Ordering::Relaxed);
        let (len, round) = if hurry { (buffer.len(), SHORT_ROUND) } else { (SLOW_PIECE, ROUND) };
        let (mut bytes, mut moving) = (0, 0);
        for reader in readers.iter_mut().filter(|reader| reader.download.end.is_none()) {
            let received = reader.read(&mut buffer[..len], len as u64);
            bytes += received;
            moving += usize::from(received > 0 && reader.download.end.is_none());
        }
        let downloads: Vec<Download> = readers.iter().map(|reader| reader.download.clone()).collect();
        moving += downloads.iter().filter(|download| download.is_complete()).count();
        let failed = downloads.iter().filter(|it| matches!(it.end, Some(Err(_)))).count();
        *lock(&shared.downloads) = downloads;
        lock(&shared.samples).push(Sample { at: Instant::now(), bytes, moving, failed });
        sleep(round);
    }
}
