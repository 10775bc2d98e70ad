//! Decides which clients get answers, and limits their rate.

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use ipnet::IpNet;
use quick_cache::unsync::Cache;

use crate::lock;

/// Maximum number of sources whose rate the server remembers.
const MOST_SOURCES: usize = 16_384;
/// A source may send at once as many queries as its rate allows in this time.
const BURST: Duration = Duration::from_secs(1);
/// Maximum number of TCP connections of a source at a time.
const MOST_CONNECTIONS: usize = 64;
/// Length of the IPv6 prefix that identifies a source: one client may have all addresses of a /64.
const V6_PREFIX: u8 = 64;

/// Which clients the server answers, and at what rate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The networks whose clients get answers.
    pub allowed: Vec<IpNet>,
    /// UDP queries per second that each source gets answers to; `None` for any number. A source is an IPv4 address or
    /// an IPv6 /64. Loopback addresses have no limit: no other machine can send from them.
    pub rate: Option<NonZeroU32>,
    /// The networks of pods, where many clients share a /64: each IPv6 address in them is a source of its own.
    pub hosts: Vec<IpNet>,
}

/// What to do with a query over UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Answer,
    /// The client is in no allowed network.
    Refuse,
    /// The source is over its rate: an empty answer with TC makes a client ask again over TCP, which proves its
    /// address.
    Slip,
    Drop,
}

/// Limits the queries of clients, as [`Access`] says.
#[derive(Debug)]
pub(crate) struct Clients {
    access: Access,
    sources: Mutex<Cache<IpAddr, Bucket>>,
    /// Address and port of the sockets from which this process queries itself.
    own: Mutex<BTreeSet<(IpAddr, u16)>>,
    connections: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// The rate of a source, as a leaky bucket.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// When the bucket will be empty.
    empty: Instant,
    /// How many queries exceeded the rate since the last query within the rate.
    excess: u32,
}

/// A TCP connection, which counts against the limit of its source until this value is dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    source: IpAddr,
    connections: Arc<Mutex<HashMap<IpAddr, usize>>>,
}

/// The exemption of a socket from the rate limit of its source, until this value is dropped.
#[derive(Debug)]
pub(crate) struct Exemption<'a> {
    clients: &'a Clients,
    socket: (IpAddr, u16),
}

impl Drop for Exemption<'_> {
    fn drop(&mut self) {
        lock(&self.clients.own).remove(&self.socket);
    }
}

impl Clients {
    pub(crate) fn new(access: Access) -> Self {
        let sources = Mutex::new(Cache::new(MOST_SOURCES));
        Self { access, sources, own: Mutex::default(), connections: Arc::default() }
    }

    pub(crate) fn is_allowed(&self, client: IpAddr) -> bool {
        self.access.allowed.iter().any(|network| network.contains(&client))
    }

    pub(crate) fn admit(&self, client: IpAddr, now: Instant) -> Admission {
        let is_allowed = self.is_allowed(client);
        let excess = match self.access.rate {
            Some(rate) if !client.is_loopback() => self.excess(self.source(client), rate, now),
            Some(_) | None => 0,
        };
        match (is_allowed, excess) {
            (true, 0) => Admission::Answer,
            (false, 0) => Admission::Refuse,
            // Every second query over the rate gets a truncated answer, as in BIND and NSD, so an attacker who forges
            // the source sends more packets than the victim receives.
            (true, excess) if excess % 2 == 0 => Admission::Slip,
            _ => Admission::Drop,
        }
    }

    /// Like [`Self::admit`], for a query from the socket `client`. The rate limit does not apply to a socket of this
    /// process that is exempt ([`Self::exempt`]).
    pub(crate) fn admit_from(&self, client: SocketAddr, now: Instant) -> Admission {
        let admission = self.admit(client.ip(), now);
        let is_over_its_rate = matches!(admission, Admission::Slip | Admission::Drop);
        if is_over_its_rate && lock(&self.own).contains(&(client.ip(), client.port())) {
            return Admission::Answer;
        }
        admission
    }

    /// Exempts the queries of a socket of this process from the rate limit of their source. Other senders with this
    /// source cannot use the exemption: other processes of the node cannot send from the socket's port, and an IPv6
    /// neighbour that forges the node's address does not know the port.
    pub(crate) fn exempt(&self, socket: SocketAddr) -> Exemption<'_> {
        let socket = (socket.ip(), socket.port());
        lock(&self.own).insert(socket);
        Exemption { clients: self, socket }
    }

    /// Counts a query of the source. Returns how many queries in a row, with this one, have exceeded the rate; 0 if
    /// this query is within the rate.
    fn excess(&self, source: IpAddr, rate: NonZeroU32, now: Instant) -> u32 {
        let mut sources = lock(&self.sources);
        let mut bucket = sources.get(&source).copied().unwrap_or(Bucket { empty: now, excess: 0 });
        let full = bucket.empty.max(now);
        if full.saturating_duration_since(now) < BURST {
            bucket = Bucket { empty: full + Duration::from_secs(1) / rate.get(), excess: 0 };
        } else {
            bucket.excess = bucket.excess.wrapping_add(1).max(1);
        }
        sources.insert(source, bucket);
        bucket.excess
    }

    /// Counts a new connection of the client; `None` if its source already has [`MOST_CONNECTIONS`].
    pub(crate) fn connect(&self, client: IpAddr) -> Option<Connection> {
        let source = self.source(client);
        let mut connections = lock(&self.connections);
        let count = connections.entry(source).or_default();
        if *count == MOST_CONNECTIONS {
            return None;
        }
        *count += 1;
        Some(Connection { source, connections: Arc::clone(&self.connections) })
    }

    /// The address that stands for all addresses of the client's source.
    fn source(&self, client: IpAddr) -> IpAddr {
        if client.is_ipv4() || self.access.hosts.iter().any(|network| network.contains(&client)) {
            return client;
        }
        IpNet::new(client, V6_PREFIX).map_or(client, |network| network.network())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut connections = lock(&self.connections);
        if let Some(count) = connections.get_mut(&self.source) {
            *count -= 1;
            if *count == 0 {
                connections.remove(&self.source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clients(rate: u32) -> Clients {
        let allowed =
            vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap(), "127.0.0.0/8".parse().unwrap()];
        let hosts = vec!["fd00:0:0:2::/64".parse().unwrap()];
        Clients::new(Access { allowed, rate: NonZeroU32::new(rate), hosts })
    }

    fn admit(clients: &Clients, client: &str, now: Instant) -> Admission {
        clients.admit(client.parse().unwrap(), now)
    }

    #[test]
    fn clients_outside_of_the_allowed_networks_are_refused() {
        let (clients, now) = (clients(10), Instant::now());
        for (client, wanted) in [
            ("10.1.2.3", Admission::Answer),
            ("192.0.2.1", Admission::Refuse),
            ("fd00::1", Admission::Answer),
            ("2001:db8::1", Admission::Refuse),
        ] {
            assert_eq!(admit(&clients, client, now), wanted, "{client}");
        }
    }

    #[test]
    fn source_over_its_rate_gets_every_second_answer_truncated() {
        let (clients, start) = (clients(10), Instant::now());
        let counts = |client: &str, now| {
            let all: Vec<_> = (0..30).map(|_| admit(&clients, client, now)).collect();
            [Admission::Answer, Admission::Slip, Admission::Drop]
                .map(|wanted| all.iter().filter(|admission| **admission == wanted).count())
        };
        assert_eq!(counts("10.0.0.1", start), [10, 10, 10], "a burst of one second");
        assert_eq!(
            counts("10.0.0.1", start + Duration::from_millis(500)),
            [5, 12, 13],
            "half a second later"
        );
        assert_eq!(counts("10.0.0.2", start), [10, 10, 10], "another source");
        assert_eq!(counts("127.0.0.1", start), [30, 0, 0], "the loopback");
        assert_eq!(counts("fd00::1", start), [10, 10, 10]);
        assert_eq!(counts("fd00::2", start)[0], 0, "the same /64");
        assert_eq!(counts("fd00:0:0:1::1", start)[0], 10, "another /64");
        assert_eq!(counts("fd00:0:0:2::1", start)[0], 10, "a pod");
        assert_eq!(counts("fd00:0:0:2::2", start)[0], 10, "another pod of the same /64");
        let refused = (0..30).filter(|_| admit(&clients, "192.0.2.1", start) == Admission::Refuse).count();
        assert_eq!(refused, 10, "a stranger gets no answer over its rate");
    }

    #[test]
    fn socket_of_this_process_is_answered_although_its_source_is_over_its_rate() {
        let (clients, now) = (clients(10), Instant::now());
        let is_answered = |socket: &str| {
            let admit = || clients.admit_from(socket.parse().unwrap(), now);
            (0..4).all(|_| admit() == Admission::Answer)
        };
        let exemption = clients.exempt("10.0.0.1:40000".parse().unwrap());
        while is_answered("10.0.0.1:50000") {}
        assert!(is_answered("10.0.0.1:40000"));
        assert!(!is_answered("10.0.0.1:40001"), "another process");
        drop(exemption);
        assert!(!is_answered("10.0.0.1:40000"));
    }

    #[test]
    fn memory_of_sources_is_bounded_and_keeps_the_busy_one() {
        let (clients, now) = (clients(10), Instant::now());
        let busy = || (0..30).fold(Admission::Answer, |_, _| admit(&clients, "10.255.0.1", now));
        busy();
        for number in 0..200_000_u32 {
            clients.admit(IpAddr::from((0x0a00_0000 + number).to_be_bytes()), now);
            if number % 1000 == 0 {
                assert_ne!(busy(), Admission::Answer, "{number}");
            }
        }
        assert!(lock(&clients.sources).len() <= MOST_SOURCES);
    }

    #[test]
    fn source_has_a_limit_of_connections() {
        let clients = clients(10);
        let connect = |client: &str| clients.connect(client.parse().unwrap());
        let mut held: Vec<_> = (0..MOST_CONNECTIONS).map(|_| connect("fd00::1").unwrap()).collect();
        assert!(connect("fd00::2").is_none(), "the same /64");
        assert!(connect("10.0.0.1").is_some());
        let pods: Vec<_> = (0..MOST_CONNECTIONS).map(|_| connect("fd00:0:0:2::1").unwrap()).collect();
        assert!(connect("fd00:0:0:2::2").is_some(), "another pod of the same /64");
        drop(pods);
        held.pop();
        assert!(connect("fd00::2").is_some());
        drop(held);
        assert!(lock(&clients.connections).is_empty());
    }
}
