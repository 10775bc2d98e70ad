//! Servers that answer with their name and the client's address.
//!
//! HTTP/1.1, also for `curl`:
//! - `GET /` answers with `NAME PEER`: the server's name and the address from which the request came;
//! - `GET /download/BYTES` and `GET /download/BYTES/RATE` answer with BYTES bytes of [`crate::pattern`], at most RATE
//!   per second;
//! - `PUT /upload` compares the content with [`crate::pattern`] and answers `NAME PEER BYTES`;
//! - `POST /echo` answers with the content.
//!
//! UDP: the server returns every datagram after a line `NAME PEER`.

use std::{
    collections::BTreeMap,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::AsRawFd as _,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{JoinHandle, sleep, spawn},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

use crate::{netns::Netns, pattern, wait_for};

/// Interval at which a UDP server checks whether it must stop.
const POLL: Duration = Duration::from_millis(20);

/// How long [`bind`] tries to bind a socket.
const REBIND: Duration = Duration::from_secs(3);

/// A server that runs in the background until this is dropped.
#[derive(Debug)]
pub struct Server {
    stop: Arc<AtomicBool>,
    listener: Option<TcpListener>,
    connections: Connections,
    thread: Option<JoinHandle<()>>,
}

/// Open connections of a server, by number.
type Connections = Arc<Mutex<BTreeMap<u64, TcpStream>>>;

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(listener) = &self.listener {
            // `shutdown()` wakes the thread in `accept()`, which std cannot interrupt. It fails only if the socket no
            // longer listens.
            let _not_listening =
                nix::sys::socket::shutdown(listener.as_raw_fd(), nix::sys::socket::Shutdown::Both);
        }
        let connections = std::mem::take(&mut *lock(&self.connections));
        for connection in connections.into_values() {
            let _already_closed = connection.shutdown(Shutdown::Both);
        }
        if let Some(thread) = self.thread.take() {
            let _panicked = thread.join();
        }
    }
}

/// Binds a socket. If the address is in use, tries again for a while: a child that this process has forked holds
/// duplicates of all socket descriptors, also those of a server that has stopped, until the child executes its program.
pub fn bind<S>(bind: impl Fn() -> io::Result<S>) -> io::Result<S> {
    let in_use =
        |bound: &io::Result<S>| bound.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse);
    let bound = wait_for(REBIND, || Some(bind()).filter(|bound| !in_use(bound)));
    bound.unwrap_or_else(bind)
}

/// Starts an HTTP server on all addresses of a namespace.
pub fn http(netns: &Netns, name: &str, port: u16) -> Result<Server> {
    let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let listener = netns
        .run(|| bind(|| TcpListener::bind(address)))
        .with_context(|| format!("listening on TCP port {port} in {}", netns.name()))?;
    let stop = Arc::new(AtomicBool::new(false));
    let connections = Connections::default();
    let accepting = Acceptor {
        listener: listener.try_clone()?,
        name: name.into(),
        stop: Arc::clone(&stop),
        connections: Arc::clone(&connections),
    };
    let thread = spawn(move || accepting.run());
    Ok(Server { stop, listener: Some(listener), connections, thread: Some(thread) })
}

struct Acceptor {
    listener: TcpListener,
    name: Arc<str>,
    stop: Arc<AtomicBool>,
    connections: Connections,
}

impl Acceptor {
    fn run(self) {
        for number in 0.. {
            let accepted = self.listener.accept();
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            // `accept()` fails, for example, while this process has no free descriptors.
            let Ok((stream, peer)) = accepted else {
                sleep(POLL);
                continue;
            };
            if let Ok(clone) = stream.try_clone() {
                lock(&self.connections).insert(number, clone);
            }
            let (name, connections) = (Arc::clone(&self.name), Arc::clone(&self.connections));
            spawn(move || {
                // Ignores errors: a client may close its connection at any time.
                let _ended = serve_connection(stream, &name, canonical(peer));
                lock(&connections).remove(&number);
            });
        }
    }
}

fn lock(connections: &Connections) -> MutexGuard<'_, BTreeMap<u64, TcpStream>> {
    connections.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An IPv4-mapped address of a dual-stack socket (`::ffff:…`) as IPv4; any other address unchanged.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn serve_connection(stream: TcpStream, name: &str, peer: SocketAddr) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::with_capacity(pattern::MAX_PIECE, stream);
    while let Some(request) = read_request(&mut reader)? {
        let out = reader.get_mut();
        match request.path.split('/').collect::<Vec<_>>()[..] {
            ["", "download", bytes] => send_content(out, name, number(bytes)?, u64::MAX)?,
            ["", "download", bytes, rate] => send_content(out, name, number(bytes)?, number(rate)?)?,
            ["", "upload"] => {
                let bytes = receive_content(&mut reader, request.content_length)?;
                answer(reader.get_mut(), &format!("{name} {peer} {bytes}\n"))?;
            }
            ["", "echo"] => send_back(&mut reader, name, request.content_length)?,
            _ => answer(out, &format!("{name} {peer}\n"))?,
        }
    }
    Ok(())
}

fn number(text: &str) -> io::Result<u64> {
    text.parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, format!("{text:?}: {error}")))
}

struct Request {
    path: String,
    content_length: u64,
}

/// Reads the head of the next HTTP request; `None` at the end of the connection.
fn read_request(reader: &mut BufReader<TcpStream>) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let path = line.split(' ').nth(1).unwrap_or("/").to_owned();
    let mut content_length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        if header.trim_end().is_empty() {
            return Ok(Some(Request { path, content_length }));
        }
        if let Some((name, value)) = header.split_once(':') {
            if name.eq_ignore_ascii_case("content-length") {
                content_length = number(value.trim())?;
            } else if name.eq_ignore_ascii_case("expect") {
                reader.get_mut().write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
            }
        }
    }
}

fn answer(out: &mut TcpStream, body: &str) -> io::Result<()> {
    let len = body.len();
    // A single write, so that the answer is one segment.
    out.write_all(
        format!("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len}\r\n\r\n{body}")
            .as_bytes(),
    )
}

/// Answers with `bytes` bytes of the [`pattern`], at most `rate` of them per second.
fn send_content(out: &mut TcpStream, name: &str, bytes: u64, rate: u64) -> io::Result<()> {
    out.write_all(
        format!("HTTP/1.1 200 OK\r\nServer: {name}\r\nContent-Length: {bytes}\r\n\r\n").as_bytes(),
    )?;
    let start = Instant::now();
    // At a low rate, sends about twenty pieces per second.
    let piece = usize::try_from(rate / 20).unwrap_or(usize::MAX).clamp(1, pattern::MAX_PIECE) as u64;
    let mut sent = 0;
    while sent < bytes {
        let len = piece.min(bytes - sent);
        out.write_all(pattern::at(sent, usize::try_from(len).unwrap_or(usize::MAX)))?;
        sent += len;
        if rate != u64::MAX {
            let due = Duration::from_secs_f64(sent as f64 / rate as f64);
            sleep(due.saturating_sub(start.elapsed()));
        }
    }
    Ok(())
}

fn receive_content(reader: &mut BufReader<TcpStream>, bytes: u64) -> io::Result<u64> {
    let mut buffer = vec![0; pattern::MAX_PIECE];
    let mut received = 0;
    while received < bytes {
        let len = reader.read(&mut buffer)?;
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        pattern::check(received, &buffer[..len]).map_err(io::Error::other)?;
        received += len as u64;
    }
    Ok(received)
}

/// Answers with the request's content, which is at most one piece of the [`pattern`].
fn send_back(reader: &mut BufReader<TcpStream>, name: &str, bytes: u64) -> io::Result<()> {
    let len = usize::try_from(bytes).unwrap_or(usize::MAX).min(pattern::MAX_PIECE);
    let mut message =
        format!("HTTP/1.1 200 OK\r\nServer: {name}\r\nContent-Length: {len}\r\n\r\n").into_bytes();
    let head = message.len();
    message.resize(head + len, 0);
    reader.read_exact(&mut message[head..])?;
    reader.get_mut().write_all(&message)
}

/// Starts a server that echoes UDP datagrams, on all addresses of a namespace.
pub fn udp_echo(netns: &Netns, name: &str, port: u16) -> Result<Server> {
    udp_echo_at(netns, name, SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))
}

/// Starts a server that echoes UDP datagrams on one address, which is also the source of its replies. (On an
/// unspecified address, the route to the client determines the source, which on a host with several addresses may
/// differ from the address that the client used.)
pub fn udp_echo_at(netns: &Netns, name: &str, address: SocketAddr) -> Result<Server> {
    let socket = netns
        .run(|| bind(|| UdpSocket::bind(address)))
        .with_context(|| format!("binding {address}/UDP in {}", netns.name()))?;
    socket.set_read_timeout(Some(POLL))?;
    let stop = Arc::new(AtomicBool::new(false));
    let name = name.to_owned();
    let stopping = Arc::clone(&stop);
    let thread = spawn(move || echo(&socket, &name, &stopping));
    Ok(Server { stop, listener: None, connections: Connections::default(), thread: Some(thread) })
}

fn echo(socket: &UdpSocket, name: &str, stop: &AtomicBool) {
    let mut buffer = vec![0; 65_536];
    while !stop.load(Ordering::Relaxed) {
        // Errors are timeouts, or ICMP errors of earlier answers; neither matters for the next datagram.
        let Ok((len, peer)) = socket.recv_from(&mut buffer) else { continue };
        let mut reply = format!("{name} {}\n", canonical(peer)).into_bytes();
        reply.extend_from_slice(&buffer[..len]);
        let _client_gone = socket.send_to(&reply, peer);
    }
}
