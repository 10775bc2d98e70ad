//! A DNS server that answers queries for every name with the same address.

use std::{
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use lb_tests::netns::Netns;
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};

/// Interval at which the UDP thread checks whether it must end.
const LOOK: Duration = Duration::from_millis(50);
/// Size of the receive buffer in bytes: enough for the queries that arrive while the thread waits some seconds for a
/// CPU.
const BUFFER: usize = 4 << 20;

/// The server, over UDP and TCP; it ends when it is dropped.
pub(super) struct Stub {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Stub {
    pub(super) const PORT: u16 = 1053;

    pub(super) fn start(netns: &Netns, address: Ipv4Addr) -> io::Result<Self> {
        let (udp, tcp) = netns.run(|| {
            let any = ("::", Self::PORT);
            Ok((UdpSocket::bind(any)?, TcpListener::bind(any)?))
        })?;
        setsockopt(&udp, RcvBufForce, &BUFFER)?;
        udp.set_read_timeout(Some(LOOK))?;
        tcp.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let (udp_stop, tcp_stop) = (Arc::clone(&stop), Arc::clone(&stop));
        let threads = vec![
            thread::spawn(move || serve_udp(&udp, address, &udp_stop)),
            thread::spawn(move || serve_tcp(&tcp, address, &tcp_stop)),
        ];
        Ok(Self { stop, threads })
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

fn serve_udp(socket: &UdpSocket, address: Ipv4Addr, stop: &AtomicBool) {
    let mut buffer = [0; 1500];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((length, client)) = socket.recv_from(&mut buffer)
            && let Some(reply) = reply(&buffer[..length], address)
        {
            drop(socket.send_to(&reply, client));
        }
    }
}

fn serve_tcp(listener: &TcpListener, address: Ipv4Addr, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => drop(answer_once(stream, address)),
            Err(_) => thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// Answers the first query of a connection.
fn answer_once(mut stream: TcpStream, address: Ipv4Addr) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    let mut length = [0; 2];
    stream.read_exact(&mut length)?;
    let mut query = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut query)?;
    let reply = reply(&query, address).unwrap_or_default();
    let length = u16::try_from(reply.len()).unwrap_or_default().to_be_bytes();
    stream.write_all(&[&length[..], &reply].concat())
}

/// The answer to a query with one question: the address for type A, nothing for other types.
fn reply(query: &[u8], address: Ipv4Addr) -> Option<Vec<u8>> {
    let name = query.get(12..)?.iter().position(|byte| *byte == 0)?;
    let question = query.get(12..12 + name + 5)?;
    let is_a = question.get(name + 1..name + 3)? == [0, 1];
    let mut reply = query.get(..2)?.to_vec();
    reply.extend([0x81, 0x80, 0, 1, 0, u8::from(is_a), 0, 0, 0, 0]);
    reply.extend(question);
    if is_a {
        // A pointer to the name, type A, class IN, a TTL of 1 s, a data length of 4 bytes.
        reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
        reply.extend(address.octets());
    }
    Some(reply)
}
