//! Clients of the servers in [`crate::server`].

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream, UdpSocket},
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{JoinHandle, sleep, spawn},
    time::{Duration, Instant},
};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket, sockopt::ReuseAddr,
};

use crate::{netns::Netns, pattern, socket::connect_by_first_syn};

/// Timeout of each single operation of a client, on a fast machine.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// Timeout of each single operation on this machine: [`PATIENCE`] times [`crate::patience`], but at most five times,
/// because a client that expects no answer waits until the timeout ends.
pub fn limit() -> Duration {
    PATIENCE * crate::patience().min(5)
}

/// The kind of error that a refused connection or datagram gives.
pub const REFUSED: io::ErrorKind = io::ErrorKind::ConnectionRefused;

/// Maximum number of bytes that a slow download reads between two pauses, and the length of a pause.
const SLOW_PIECE: usize = 50_000;
const SLOW_PAUSE: Duration = Duration::from_millis(5);
/// A slow download leaves the last 1/`HELD_BACK` of its bytes unread until [`Transfer::hurry`], so that it does not end
/// earlier. In a download of 100 MB, socket buffers cannot hold this part, so the network must still transmit packets.
const HELD_BACK: u64 = 4;

/// The answer of a server of the testbed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Name of the server.
    pub server: String,
    /// The client's address as the server saw it; it differs from `local` if a node has masqueraded the packets.
    pub seen: SocketAddr,
    /// The client's own address: that of its socket.
    pub local: SocketAddr,
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("malformed answer {what:?}"))
}

impl Answer {
    fn parse(text: &str, local: SocketAddr) -> io::Result<Self> {
        let mut words = text.split_whitespace();
        let (Some(server), Some(seen)) = (words.next(), words.next()) else { return Err(malformed(text)) };
        let seen = seen.parse().map_err(|error| io::Error::other(format!("{text:?}: {error}")))?;
        Ok(Self { server: server.to_owned(), seen, local })
    }
}

/// The unspecified address of the family of `like`: `0.0.0.0` or `::`.
pub const fn any_address(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    }
}

/// A client's connection to an HTTP server, for any number of requests.
#[derive(Debug)]
pub struct Connection {
    reader: BufReader<TcpStream>,
    to: SocketAddr,
}

impl Connection {
    /// Connects to `to` from the namespace `netns`.
    pub fn open(netns: &Netns, to: SocketAddr) -> io::Result<Self> {
        netns.run(|| Self::open_here(to))
    }

    /// Connects to `to` from this thread's namespace.
    pub fn open_here(to: SocketAddr) -> io::Result<Self> {
        Self::on(TcpStream::connect_timeout(&to, limit())?, to)
    }

    /// Connects from a local port that other connections may also use.
    pub fn open_from_port(netns: &Netns, port: u16, to: SocketAddr) -> io::Result<Self> {
        Self::open_from(netns, SocketAddr::new(any_address(to.ip()), port), to)
    }

    /// Connects from a local address and port that other connections may also use.
    pub fn open_from(netns: &Netns, source: SocketAddr, to: SocketAddr) -> io::Result<Self> {
        let connect_from = || {
            let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
            let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
            setsockopt(&fd, ReuseAddr, &true)?;
            let stream = TcpStream::from(fd);
            bind(std::os::fd::AsRawFd::as_raw_fd(&stream), &SockaddrStorage::from(source))?;
            connect(std::os::fd::AsRawFd::as_raw_fd(&stream), &SockaddrStorage::from(to))?;
            Ok(stream)
        };
        Self::on(netns.run(connect_from)?, to)
    }

    /// Wraps a stream that is already connected to `to`.
    pub fn on(stream: TcpStream, to: SocketAddr) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(limit()))?;
        stream.set_write_timeout(Some(limit()))?;
        Ok(Self { reader: BufReader::with_capacity(pattern::MAX_PIECE, stream), to })
    }

    /// The connection's socket.
    pub fn stream(&self) -> &TcpStream {
        self.reader.get_ref()
    }

    /// Requests the server's name.
    pub fn ask(&mut self) -> io::Result<Answer> {
        self.send_head("GET /", 0)?;
        self.receive_answer()
    }

    /// Closes the connection, and waits until the server has also closed it: afterwards no packet of the connection is
    /// under way.
    pub fn close(mut self) -> io::Result<()> {
        self.stream().shutdown(Shutdown::Write)?;
        match self.reader.read(&mut [0])? {
            0 => Ok(()),
            _ => Err(malformed("more bytes than the answer")),
        }
    }

    /// Sends this number of bytes of the [`pattern`]; the server compares all of them with the pattern.
    pub fn upload(&mut self, bytes: u64) -> io::Result<Answer> {
        self.send_head("PUT /upload", bytes)?;
        let mut sent = 0;
        while sent < bytes {
            let len = usize::try_from(bytes - sent).unwrap_or(usize::MAX).min(pattern::MAX_PIECE);
            self.reader.get_mut().write_all(pattern::at(sent, len))?;
            sent += len as u64;
        }
        self.receive_answer()
    }

    /// Sends a piece of the [`pattern`] and expects the same bytes back; returns the server's name.
    pub fn echo(&mut self, offset: u64, bytes: usize) -> io::Result<String> {
        let piece = pattern::at(offset, bytes);
        self.send_head("POST /echo", piece.len() as u64)?;
        self.reader.get_mut().write_all(piece)?;
        let (bytes, server) = self.receive_head()?;
        let mut answer = vec![0; piece.len()];
        self.reader.read_exact(&mut answer)?;
        if bytes == piece.len() as u64 && answer == piece {
            return Ok(server);
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "the bytes came back changed"))
    }

    /// Downloads this number of bytes, and compares all of them with the [`pattern`]; returns the server's name.
    pub fn download(&mut self, bytes: u64) -> io::Result<String> {
        self.receive_content(&format!("GET /download/{bytes}"), &Progress::default())
    }

    /// Requests this number of bytes of the [`pattern`]. Returns the server's name, the bytes that have arrived so far,
    /// and the stream on which the rest will arrive.
    pub(crate) fn begin_download(mut self, bytes: u64) -> io::Result<(String, Vec<u8>, TcpStream)> {
        self.send_head(&format!("GET /download/{bytes}"), 0)?;
        let (_, server) = self.receive_head()?;
        Ok((server, self.reader.buffer().to_vec(), self.reader.into_inner()))
    }

    /// Starts a download in the background, which reads at most 10 MB/s and, unless it fails, does not end before
    /// [`Transfer::hurry`].
    pub fn download_slowly(mut self, bytes: u64) -> Transfer {
        let progress = Arc::new(Progress::default());
        progress.slow.store(true, Ordering::Relaxed);
        let shared = Arc::clone(&progress);
        let thread = spawn(move || self.receive_content(&format!("GET /download/{bytes}"), &shared));
        Transfer { progress, bytes, thread }
    }

    fn receive_content(&mut self, request: &str, progress: &Progress) -> io::Result<String> {
        self.send_head(request, 0)?;
        let (bytes, server) = self.receive_head()?;
        let mut buffer = vec![0; pattern::MAX_PIECE];
        let mut offset = 0;
        while offset < bytes {
            let slow = progress.slow.load(Ordering::Relaxed);
            if slow && bytes - offset <= bytes / HELD_BACK {
                sleep(SLOW_PAUSE);
                continue;
            }
            let at_most = if slow { SLOW_PIECE } else { pattern::MAX_PIECE };
            let len = self.reader.read(&mut buffer[..at_most])?;
            if len == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            pattern::check(offset, &buffer[..len]).map_err(io::Error::other)?;
            offset += len as u64;
            progress.received.store(offset, Ordering::Relaxed);
            if slow {
                sleep(SLOW_PAUSE);
            }
        }
        Ok(server)
    }

    fn send_head(&mut self, request: &str, bytes: u64) -> io::Result<()> {
        let host = self.to;
        let head = format!("{request} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {bytes}\r\n\r\n");
        self.reader.get_mut().write_all(head.as_bytes())
    }

    /// Reads the head of the next answer; returns its content length and its field `Server`.
    fn receive_head(&mut self) -> io::Result<(u64, String)> {
        let (mut bytes, mut server) = (None, String::new());
        loop {
            let mut line = String::new();
            if self.reader.read_line(&mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            match line.trim_end().split_once(": ") {
                Some(("Content-Length", value)) => bytes = value.parse().ok(),
                Some(("Server", value)) => value.clone_into(&mut server),
                Some(_) => {}
                None if line == "\r\n" => return Ok((bytes.ok_or_else(|| malformed("no length"))?, server)),
                None => {}
            }
        }
    }

    fn receive_answer(&mut self) -> io::Result<Answer> {
        let (bytes, _server) = self.receive_head()?;
        let mut body = String::new();
        self.reader.by_ref().take(bytes).read_to_string(&mut body)?;
        Answer::parse(&body, self.stream().local_addr()?)
    }
}

/// State that a background download shares with its [`Transfer`].
#[derive(Debug, Default)]
struct Progress {
    received: AtomicU64,
    slow: AtomicBool,
}

/// Handle of a download in the background.
#[derive(Debug)]
pub struct Transfer {
    progress: Arc<Progress>,
    bytes: u64,
    thread: JoinHandle<io::Result<String>>,
}

impl Transfer {
    /// Number of bytes received so far.
    pub fn received(&self) -> u64 {
        self.progress.received.load(Ordering::Relaxed)
    }

    /// Makes the download receive the rest as fast as possible, so that it ends.
    pub fn hurry(&self) {
        self.progress.slow.store(false, Ordering::Relaxed);
    }

    /// Total number of bytes of the download.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the download has ended, successfully or not.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Receives the rest as fast as possible and returns the server's name.
    pub fn join(self) -> io::Result<String> {
        self.hurry();
        self.thread.join().unwrap_or_else(|_panic| Err(io::Error::other("the transfer's thread panicked")))
    }
}

/// Opens a connection, requests the server's name, and closes the connection.
pub fn ask_http(netns: &Netns, to: SocketAddr) -> io::Result<Answer> {
    Connection::open(netns, to)?.ask()
}

/// Like [`ask_http`], but fails if the kernel had to retransmit the SYN, see [`connect_by_first_syn`].
pub fn ask_http_by_first_syn(netns: &Netns, to: SocketAddr) -> io::Result<Answer> {
    Connection::on(netns.run(|| connect_by_first_syn(to, limit()))?, to)?.ask()
}

/// Like [`ask_http`], from the namespace of this thread.
pub fn ask_here(to: SocketAddr) -> io::Result<Answer> {
    Connection::open_here(to)?.ask()
}

/// Asks over a new connection from `netns` each `interval`, one at a time, until `stop` is set. (If an answer takes
/// longer than `interval`, the next connections follow at once, until the schedule is met again.) Returns the number of
/// connections, and the errors of those that failed.
pub fn ask_until(
    netns: &Netns,
    to: SocketAddr,
    interval: Duration,
    stop: &AtomicBool,
) -> io::Result<(usize, Vec<String>)> {
    netns.run(|| {
        let (mut count, mut lost) = (0, Vec::new());
        let start = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            if let Err(error) = ask_here(to) {
                lost.push(format!("{to} after {:?}: {error}", start.elapsed()));
            }
            count += 1;
            sleep((start + count * interval).saturating_duration_since(Instant::now()));
        }
        Ok((count as usize, lost))
    })
}

/// A UDP socket in `netns`, connected to `to`, with the read timeout [`limit`].
pub fn udp_socket(netns: &Netns, to: SocketAddr) -> io::Result<UdpSocket> {
    // Above the kernel's default range of ephemeral ports: sockets get such a port only if they bind it.
    static PORTS: PortsInTurn = PortsInTurn::new(61_000..=65_535);
    PORTS.udp_socket(netns, to)
}

/// Gives UDP client sockets ports in turn. A UDP flow outlives its socket, so with a random port a new socket might
/// continue the flow of an earlier one.
#[derive(Debug)]
pub struct PortsInTurn {
    ports: RangeInclusive<u16>,
    taken: AtomicUsize,
}

impl PortsInTurn {
    /// A source of the ports in this range.
    pub const fn new(ports: RangeInclusive<u16>) -> Self {
        Self { ports, taken: AtomicUsize::new(0) }
    }

    /// A UDP socket in `netns` that is bound to the next free port and connected to `to`, with the read timeout
    /// [`limit`].
    pub fn udp_socket(&self, netns: &Netns, to: SocketAddr) -> io::Result<UdpSocket> {
        netns.run(|| {
            for _ in self.ports.clone() {
                match udp_socket_from(SocketAddr::new(any_address(to.ip()), self.next()), to) {
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                    socket => return socket,
                }
            }
            Err(io::ErrorKind::AddrInUse.into())
        })
    }

    fn next(&self) -> u16 {
        let place = self.taken.fetch_add(1, Ordering::Relaxed) % self.ports.len();
        self.ports.clone().nth(place).unwrap_or(*self.ports.start())
    }
}

/// Like [`udp_socket`], but in this thread's namespace and from any port.
pub fn udp_socket_here(to: SocketAddr) -> io::Result<UdpSocket> {
    udp_socket_from(SocketAddr::new(any_address(to.ip()), 0), to)
}

/// Like [`udp_socket_here`], from the address and port `source`.
pub fn udp_socket_from(source: SocketAddr, to: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(source)?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(limit()))?;
    Ok(socket)
}

/// Receives a datagram. Begins again when the kernel has interrupted the call, as it does when it freezes all processes.
pub(crate) fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match socket.recv(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// Sends `payload` on a connected socket and expects it back. The socket receives replies from the connected address
/// only.
pub fn echo(socket: &UdpSocket, payload: &[u8]) -> io::Result<Answer> {
    socket.send(payload)?;
    let mut buffer = vec![0; 65_536];
    let len = receive(socket, &mut buffer)?;
    let line = buffer[..len].iter().position(|byte| *byte == b'\n').ok_or_else(|| malformed("no line"))?;
    if buffer[line + 1..len] != *payload {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the payload came back changed"));
    }
    Answer::parse(&String::from_utf8_lossy(&buffer[..line]), socket.local_addr()?)
}

/// Sends a datagram with `bytes` bytes of the [`pattern`] from a new socket, and expects it back.
pub fn ask_udp(netns: &Netns, to: SocketAddr, bytes: usize) -> io::Result<Answer> {
    echo(&udp_socket(netns, to)?, pattern::at(0, bytes))
}
