//! Clients and servers: threads of this process with blocking sockets in the namespaces of a node.

mod connect;
mod datagrams;
mod request;
mod streams;

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result};
use lb_tests::netns::Netns;
use nix::sys::{
    socket::{
        setsockopt,
        sockopt::{Ipv4PacketInfo, Ipv6RecvPacketInfo, ReceiveTimeout},
    },
    time::TimeVal,
};
use serde::Serialize;

use crate::{
    cpu::{Cpus, Usage},
    family::Family,
    system::show_value,
};

/// Where pods serve TCP.
pub(crate) const TCP_PORT: u16 = 8080;
/// Where pods take datagrams.
pub(crate) const UDP_PORT: u16 = 5353;
/// How long anything on a socket may take before a burst has failed.
const PATIENCE: Duration = Duration::from_secs(2);
/// Requests a second of [`Measure::Paced`].
pub(crate) const PACE: u32 = 2000;
/// Connections of [`Measure::Streams`].
pub(crate) const STREAMS: usize = 4;

/// What is done in a burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Measure {
    /// One byte there and back over one TCP connection, again and again
    Request,
    /// Connect, one byte there and back, close
    Connect,
    /// UDP datagrams of 18 bytes, one way, in batches
    Datagrams,
    /// As much as one TCP connection carries, one way
    Stream,
    /// As much as four of them carry
    Streams,
    /// As `request`, but at a fixed rate that leaves the machine mostly idle
    Paced,
}

/// What a burst has done.
#[derive(Clone, Debug)]
pub(crate) struct Burst {
    /// Transactions, connections, datagrams or bytes.
    pub(crate) done: u64,
    /// What it took.
    pub(crate) usage: Usage,
    /// Of each transaction or connection, in nanoseconds.
    pub(crate) latencies: Vec<u32>,
}

/// The sockets of servers; they outlive bursts.
pub(crate) struct Servers {
    tcp: TcpListener,
    udp: UdpSocket,
}

impl Servers {
    /// Opens them on all addresses of a namespace.
    pub(crate) fn open(netns: &Netns, family: Family) -> Result<Self> {
        let any = family.pick(IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED));
        let open = || {
            let tcp = TcpListener::bind(SocketAddr::new(any, TCP_PORT))?;
            // accept() heeds it, and what is accepted inherits it.
            let patience = TimeVal::new(PATIENCE.as_secs().cast_signed(), 0);
            setsockopt(&tcp, ReceiveTimeout, &patience)?;
            let udp = UdpSocket::bind(SocketAddr::new(any, UDP_PORT))?;
            udp.set_nonblocking(true)?;
            match family {
                Family::V4 => setsockopt(&udp, Ipv4PacketInfo, &true)?,
                Family::V6 => setsockopt(&udp, Ipv6RecvPacketInfo, &true)?,
            }
            Ok(Self { tcp, udp })
        };
        netns.run(open).with_context(|| format!("opening servers in {}", netns.name()))
    }
}

/// Where a client connects to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Targets {
    /// For everything over TCP.
    pub(crate) tcp: SocketAddr,
    /// For datagrams.
    pub(crate) udp: SocketAddr,
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_value(self, f)
    }
}

impl Measure {
    /// All, in the order of reports.
    pub(crate) const ALL: [Self; 6] =
        [Self::Request, Self::Connect, Self::Datagrams, Self::Stream, Self::Streams, Self::Paced];

    /// For people.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Connect => "connect",
            Self::Datagrams => "datagram",
            Self::Stream => "1 stream",
            Self::Streams => "4 streams",
            Self::Paced => "fixed rate",
        }
    }

    /// Whether bytes are counted, not transactions or datagrams.
    pub(crate) const fn counts_bytes(self) -> bool {
        matches!(self, Self::Stream | Self::Streams)
    }

    /// Whether it takes all time that a CPU has.
    pub(crate) const fn saturates(self) -> bool {
        !matches!(self, Self::Paced)
    }

    /// Does it for so long, from a thread in the client's namespace.
    pub(crate) fn run(
        self,
        client: &Netns,
        servers: &Servers,
        to: Targets,
        cpus: Cpus,
        time: Duration,
    ) -> io::Result<Burst> {
        match self {
            Self::Request => request::run(client, &servers.tcp, to.tcp, cpus, time, None),
            Self::Paced => request::run(client, &servers.tcp, to.tcp, cpus, time, Some(PACE)),
            Self::Connect => connect::run(client, &servers.tcp, to.tcp, cpus, time),
            Self::Datagrams => datagrams::run(client, &servers.udp, to.udp, cpus, time),
            Self::Stream => streams::run(client, &servers.tcp, to.tcp, cpus, time, 1),
            Self::Streams => streams::run(client, &servers.tcp, to.tcp, cpus, time, STREAMS),
        }
    }
}

/// Connects and closes; whom the server saw.
pub(crate) fn peer(client: &Netns, servers: &Servers, to: Targets) -> io::Result<IpAddr> {
    let stream = client.run(|| TcpStream::connect_timeout(&to.tcp, PATIENCE))?;
    let (_, peer) = servers.tcp.accept()?;
    drop(stream);
    Ok(peer.ip())
}

/// Nanoseconds of something that takes less than four seconds.
fn nanoseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_nanos()).unwrap_or(u32::MAX)
}

/// What a thread has returned.
fn join<T>(thread: std::thread::ScopedJoinHandle<'_, io::Result<T>>) -> io::Result<T> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
