//! Clients and servers of the workloads: threads of this process with blocking sockets, in the namespaces of a node.

mod connect;
mod datagrams;
mod request;
pub(crate) mod saturate;
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

/// TCP port that the servers listen on.
pub(crate) const TCP_PORT: u16 = 8080;
/// UDP port that the servers receive on.
pub(crate) const UDP_PORT: u16 = 5353;
/// Timeout of socket operations that may block for long; a burst that reaches this timeout fails.
const PATIENCE: Duration = Duration::from_secs(2);
/// Number of requests per second in [`Measure::Paced`].
pub(crate) const PACE: u32 = 2000;
/// Number of connections in [`Measure::Streams`].
pub(crate) const STREAMS: usize = 4;

/// The workload of a burst: what clients and servers exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Measure {
    /// One byte there and back over one TCP connection, repeatedly
    Request,
    /// Connect, one byte there and back, close
    Connect,
    /// UDP datagrams of 18 bytes, one way, in batches
    Datagrams,
    /// One TCP connection at full speed, one way
    Stream,
    /// Four TCP connections at full speed, one way
    Streams,
    /// As `request`, at a fixed rate that leaves the machine mostly idle
    Paced,
}

/// The work that a burst has done, and the time that this took.
#[derive(Clone, Debug)]
pub(crate) struct Burst {
    /// Number of transactions, connections, datagrams or bytes in the burst.
    pub(crate) done: u64,
    /// Wall-clock and CPU time of the burst.
    pub(crate) usage: Usage,
    /// Latency of each transaction or connection, in nanoseconds; empty for datagrams and streams.
    pub(crate) latencies: Vec<u32>,
}

/// The servers' sockets, which stay open between bursts.
pub(crate) struct Servers {
    tcp: TcpListener,
    udp: UdpSocket,
}

impl Servers {
    /// Opens servers' sockets that listen on all addresses of a namespace.
    pub(crate) fn open(netns: &Netns, family: Family) -> Result<Self> {
        let any = family.pick(IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED));
        let open = || {
            let tcp = TcpListener::bind(SocketAddr::new(any, TCP_PORT))?;
            // Makes `accept()` time out; accepted sockets inherit the timeout.
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

/// The TCP and UDP addresses that a client connects to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Targets {
    pub(crate) tcp: SocketAddr,
    pub(crate) udp: SocketAddr,
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show_value(self, f)
    }
}

impl Measure {
    /// All workloads, in the order of reports.
    pub(crate) const ALL: [Self; 6] =
        [Self::Request, Self::Connect, Self::Datagrams, Self::Stream, Self::Streams, Self::Paced];

    /// Name of the workload in tables and plots.
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

    /// Whether the workload counts bytes instead of transactions or datagrams.
    pub(crate) const fn counts_bytes(self) -> bool {
        matches!(self, Self::Stream | Self::Streams)
    }

    /// Whether the workload keeps a CPU busy all the time.
    pub(crate) const fn saturates(self) -> bool {
        !matches!(self, Self::Paced)
    }

    /// Runs the workload for `time`; its client threads run in the namespace `client`.
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

/// Connects and closes; returns the client's address as the server has seen it.
pub(crate) fn peer(client: &Netns, servers: &Servers, to: Targets) -> io::Result<IpAddr> {
    let stream = client.run(|| TcpStream::connect_timeout(&to.tcp, PATIENCE))?;
    let (_, peer) = servers.tcp.accept()?;
    drop(stream);
    Ok(peer.ip())
}

/// Converts a duration to nanoseconds; more than 4.29 s become `u32::MAX`.
fn nanoseconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_nanos()).unwrap_or(u32::MAX)
}

/// Waits for a thread and returns its result; panics if the thread has panicked.
fn join<T>(thread: std::thread::ScopedJoinHandle<'_, io::Result<T>>) -> io::Result<T> {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
