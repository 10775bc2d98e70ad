//! Runs many slow downloads at once, to see which of them survive changes of the network.

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

/// Size in bytes of each connection's receive buffer. It is small, so that most bytes that a download has not read yet
/// are not buffered at the client, but must still cross the network.
const BUFFER: usize = 16 * 1024;
/// Number of bytes after which a slow download stops reading for one [`ROUND`].
const SLOW_PIECE: usize = 2 * 1024;
/// Pause between two reads of all connections, while downloads are slow.
const ROUND: Duration = Duration::from_millis(100);
/// Pause between two reads of all connections, once downloads run at full speed.
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

/// The state of a download, as its client knows it.
#[derive(Clone, Debug)]
pub struct Download {
    /// Address and port of the client.
    pub local: SocketAddr,
    /// Address and port that the client has connected to.
    pub to: SocketAddr,
    /// Name of the server that has answered.
    pub server: String,
    /// Number of bytes received so far; each was compared with the [`pattern`].
    pub received: u64,
    /// The longest time in which no byte arrived.
    pub longest_pause: Duration,
    /// How the download ended: successfully, or with an error; `None` while it runs.
    pub end: Option<Result<(), String>>,
}

impl Download {
    /// Whether the download has ended with all its bytes.
    pub const fn is_complete(&self) -> bool {
        matches!(self.end, Some(Ok(())))
    }
}

/// The progress of all downloads together in one round.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Time at which the round ended.
    pub at: Instant,
    /// Number of bytes that all downloads received in the round.
    pub bytes: u64,
    /// Number of downloads that received at least one byte in the round, or have ended successfully.
    pub moving: usize,
    /// Number of downloads that have failed so far.
    pub failed: usize,
}

impl Transfers {
    /// Opens `count` connections from `netns`, to the addresses in turn, and slowly downloads `bytes` bytes over each
    /// connection: about 20 kB/s.
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

    /// The progress of the downloads, round by round.
    pub fn samples(&self) -> Vec<Sample> {
        lock(&self.shared.samples).clone()
    }

    /// Makes all downloads receive the rest as fast as possible. Waits until all have ended, except those for which
    /// `is_lost` is true, or until no download has received a byte for `limit`. Then closes the connections and
    /// returns the final states.
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

/// A connection of a download, with the download's state.
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

    /// Reads until at least `limit` bytes have arrived, the socket has no more bytes for now, or the download has
    /// ended; returns how many bytes arrived.
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
