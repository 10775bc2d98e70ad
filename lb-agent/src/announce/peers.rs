//! The exchange of requests and answers with the other members (nodes that share addresses), over UDP.

use std::{
    collections::{BTreeMap, BTreeSet},
    future,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::Arc,
};

use anyhow::Context as _;
use futures_util::future::select_all;
use lb_core::{
    announce::{
        advertisement::labels_of,
        cluster::{Cluster, Member},
        election::Candidate,
        lease::{Ask, Leases, Nanos, Timing},
        voters::{Ballot, Voters},
    },
    load_balancer::Labels,
};
use lb_datapath::Announcements;
use rustix::net::sockopt;
use tokio::net;
use tracing::{debug, warn};

use super::{
    members::{Body, Key, Members, Message, Who, incarnation},
    missed::Missed,
};

/// Maximum size of a message that a member can receive, in bytes.
const LONGEST: usize = 2_048;
/// Size of the socket's receive buffer in bytes. The answers of 100 members about 1,000 addresses are 3,000 messages,
/// which arrive at once, and the kernel counts some 2 KiB for each message.
const WAITING: usize = 8 << 20;

/// The other members, and the state of this member in the election protocol.
#[derive(Debug)]
pub(super) struct Peers {
    node: Arc<str>,
    key: Key,
    /// UDP port of all members if these are the Nodes of the cluster; `None` if they are configured.
    port: Option<u16>,
    /// UDP addresses at which this member receives messages, at most one of each family; empty while the addresses of
    /// this member's Node are unknown.
    own: Vec<SocketAddr>,
    /// The UDP sockets, by the address in `own` to which each is bound.
    sockets: BTreeMap<SocketAddr, net::UdpSocket>,
    /// UDP addresses of the other members. Nodes may list their families in different orders.
    others: BTreeMap<Arc<str>, Vec<SocketAddr>>,
    leases: Leases,
    /// Why the last attempt to bind a socket failed; `None` if it did not fail.
    failure: Option<String>,
}

impl Peers {
    /// Creates the state. Opens the UDP sockets at once if the members are configured; else [`Self::tick`] opens them
    /// later.
    pub(super) fn open(node: Arc<str>, members: Members) -> anyhow::Result<Self> {
        let Members { who, key, prefer } = members;
        let (addresses, port) = match who {
            Who::Configured(addresses) => (addresses, None),
            Who::Nodes(port) => (BTreeMap::new(), Some(port)),
        };
        let voters = Voters { generation: 0, names: addresses.keys().cloned().collect() };
        let start = (Announcements::now(), incarnation()?);
        let leases = Leases::new(Arc::clone(&node), voters, prefer, Timing::DEFAULT, start);
        let (own, sockets, others) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
        let mut peers = Self { node, key, port, own, sockets, others, leases, failure: None };
        if port.is_none() {
            peers.set_addresses(addresses.into_iter().map(|(name, address)| (name, vec![address])).collect());
            peers.bind()?;
        }
        Ok(peers)
    }

    /// The nodes that may announce addresses; `devices` are those of this node. If the members are the cluster's Nodes,
    /// adopts addresses and voters from `cluster`.
    pub(super) fn nodes(
        &mut self,
        cluster: &Cluster,
        devices: Option<&BTreeSet<String>>,
        now: Nanos,
    ) -> BTreeMap<Arc<str>, Candidate> {
        let labels = self.labels(cluster, now);
        self.leases.set_devices(devices.cloned());
        let candidate = |(name, labels): (Arc<str>, Labels)| {
            let devices = if name == self.node { devices } else { self.leases.devices(&name) }.cloned();
            (name, Candidate { labels, devices })
        };
        labels.into_iter().map(candidate).collect()
    }

    fn labels(&mut self, cluster: &Cluster, now: Nanos) -> BTreeMap<Arc<str>, Labels> {
        let Some(port) = self.port else {
            let names = self.others.keys().chain([&self.node]);
            return names.map(|name| (Arc::clone(name), labels_of(name))).collect();
        };
        let addresses = |(name, node): (&Arc<str>, &Member)| {
            let addresses = node.addresses.iter().map(|ip| SocketAddr::new(*ip, port));
            (Arc::clone(name), addresses.collect())
        };
        let with_address = cluster.nodes.iter().filter(|(_, node)| !node.addresses.is_empty());
        self.set_addresses(with_address.map(addresses).collect());
        if let Some(voters) = &cluster.voters {
            self.leases.set_voters(voters.clone(), now);
        }
        let may_announce = cluster.nodes.iter().filter(|(_, node)| node.may_announce);
        may_announce.map(|(name, node)| (Arc::clone(name), node.labels.clone())).collect()
    }

    fn set_addresses(&mut self, mut addresses: BTreeMap<Arc<str>, Vec<SocketAddr>>) {
        self.own = addresses.remove(&self.node).unwrap_or_default();
        self.sockets.retain(|address, _| self.own.contains(address));
        self.leases.set_members(addresses.keys().cloned());
        self.others = addresses;
    }

    /// Opens the UDP sockets at the addresses of this node that are not open yet.
    ///
    /// # Errors
    ///
    /// An address has no socket.
    fn bind(&mut self) -> anyhow::Result<()> {
        let mut failure = None;
        for address in &self.own {
            if !self.sockets.contains_key(address) {
                match open(*address) {
                    Ok(socket) => _ = self.sockets.insert(*address, socket),
                    Err(error) => failure = Some(error),
                }
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// The voters that this node knows, and those that it proposes; `None` if the members are configured, and so never
    /// change.
    pub(super) fn ballot(&self, exists: impl Fn(&str) -> bool, now: Nanos) -> Option<Ballot> {
        let ballot =
            |_port| Ballot { known: self.leases.voters().clone(), next: self.leases.proposal(exists, now) };
        self.port.map(ballot)
    }

    /// The condition that too many voters are missing; `None` also before the addresses of this node are known.
    pub(super) fn missed(&self, missed: &mut Missed, now: Nanos) -> Option<String> {
        let names = if self.is_active() { self.leases.missed_voters(now) } else { Vec::new() };
        missed.update((&names, self.leases.voters().names.len()), self.port.is_some(), now)
    }

    /// Whether this member takes part in the election: its addresses are known.
    pub(super) const fn is_active(&self) -> bool {
        !self.own.is_empty()
    }

    pub(super) const fn leases(&mut self) -> &mut Leases {
        &mut self.leases
    }

    /// The member that should announce the address, as far as this node knows.
    pub(super) fn owner(&self, address: IpAddr, now: Nanos) -> Option<&Arc<str>> {
        self.leases.owner(address, now)
    }

    /// Opens sockets if necessary, and returns the requests that are due.
    pub(super) fn tick(&mut self, now: Nanos) -> Vec<Ask> {
        let failure = self.bind().err().map(|error| format!("{error:#}"));
        if let Some(why) = failure.as_ref().filter(|_| failure != self.failure) {
            warn!("{why}; retrying");
        }
        self.failure = failure;
        self.leases.tick(now)
    }

    /// Sends requests to all other members. If a message is lost, the next tick requests its addresses again. But an
    /// address that this member gives back is in the messages of only one tick: if the message to a voter is lost, the
    /// grant of that voter ends only when it expires.
    pub(super) fn send(&self, requests: &[Ask]) {
        for name in self.others.keys() {
            for request in requests {
                self.send_to(name, Body::Ask(self.leases.addressed(request, name)));
            }
        }
    }

    fn send_to(&self, to: &Arc<str>, body: Body) {
        let Some((socket, address)) = self.way_to(to) else { return };
        let message = Message { from: self.node.to_string(), to: to.to_string(), body };
        if let Err(error) = socket.try_send_to(&self.key.seal(&message), address) {
            debug!(member = &**to, "cannot send to the member: {error}");
        }
    }

    /// The first address of another member for which this member has a socket of the same family, and that socket.
    fn way_to(&self, member: &str) -> Option<(&net::UdpSocket, SocketAddr)> {
        self.others.get(member)?.iter().find_map(|address| {
            let (_, socket) = self.sockets.iter().find(|(own, _)| own.is_ipv4() == address.is_ipv4())?;
            Some((socket, *address))
        })
    }

    /// Waits for a message, then handles all that have arrived; without a socket, waits forever. Returns whether a
    /// member has given back its addresses because its agent stops.
    pub(super) async fn receive(peers: Option<&mut Self>) -> bool {
        let Some(peers) = peers else { return future::pending().await };
        if peers.sockets.is_empty() {
            return future::pending().await;
        }
        let (result, ..) = select_all(peers.sockets.values().map(|socket| Box::pin(socket.readable()))).await;
        if let Err(error) = result {
            debug!("cannot wait for messages of members: {error}");
        }
        let mut bytes = [0; LONGEST];
        let mut retires = false;
        for own in peers.own.clone() {
            while let Some(Ok(length)) = peers.sockets.get(&own).map(|socket| socket.try_recv(&mut bytes)) {
                retires |= peers.handle(bytes.get(..length).unwrap_or_default());
            }
        }
        retires
    }

    /// Handles one message; returns whether its sender is about to stop.
    fn handle(&mut self, bytes: &[u8]) -> bool {
        let Some(Message { from, to, body }) = self.key.open(bytes) else {
            debug!("a message has another key than the members");
            return false;
        };
        let Some((from, _)) = self.others.get_key_value(&*from).filter(|_| *to == *self.node) else {
            return false;
        };
        let from = Arc::clone(from);
        let now = Announcements::now();
        match body {
            Body::Ask(ask) => {
                let answers = self.leases.asked(&from, &ask, now);
                let is_new = answers.iter().any(|answer| answer.challenge.is_none());
                for answer in answers {
                    self.send_to(&from, Body::Answer(answer));
                }
                is_new && ask.retires
            }
            Body::Answer(answer) => {
                self.leases.answered(&from, &answer, now);
                false
            }
        }
    }
}

/// Opens a UDP socket at an address of this node.
fn open(address: SocketAddr) -> anyhow::Result<net::UdpSocket> {
    let socket = UdpSocket::bind(address)
        .with_context(|| format!("cannot receive messages of other members at {address} (UDP)"))?;
    socket.set_nonblocking(true)?;
    // Needs CAP_NET_ADMIN, as most of the agent does. With a smaller buffer answers may get lost, and members ask
    // again.
    if let Err(error) = sockopt::set_socket_recv_buffer_size_force(&socket, WAITING) {
        debug!("cannot enlarge the receive buffer for messages of members: {error}");
    }
    Ok(net::UdpSocket::from_std(socket)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lb_core::announce::lease::Prefer;

    use super::*;

    /// Each Node lists another family first. An address that this machine does not have gets no socket, so the test
    /// needs no IPv6.
    #[tokio::test]
    async fn nodes_exchange_messages_in_a_family_that_both_have() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "0123456789abcdef").unwrap();
        let key = Key::read(file.path()).unwrap();
        let port = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let node = |addresses: [&str; 2]| Member {
            addresses: addresses.map(|ip| ip.parse().unwrap()).to_vec(),
            ..Member::default()
        };
        let nodes = [("a", node(["127.0.0.1", "2001:db8::1"])), ("b", node(["::1", "127.0.0.2"]))];
        let nodes = BTreeMap::from(nodes.map(|(name, node)| (name.into(), node)));
        let cluster = Cluster { nodes, voters: None };
        let peers = ["a", "b"].map(|name| {
            let members = Members { who: Who::Nodes(port), key: key.clone(), prefer: Prefer::Single };
            let mut peers = Peers::open(name.into(), members).unwrap();
            peers.nodes(&cluster, None, 0);
            assert_eq!(peers.bind().is_err(), name == "a", "2001:db8::1 is no address of this machine");
            peers
        });
        let ways = [("b", "127.0.0.2"), ("a", "127.0.0.1")];
        for (peers, (other, expected)) in peers.iter().zip(ways) {
            let (_, address) = peers.way_to(other).unwrap();
            assert_eq!(address, SocketAddr::new(expected.parse().unwrap(), port));
        }
    }
}
