//! The exchange of questions and answers with the other members (nodes that share addresses), over UDP.

use std::{
    collections::{BTreeMap, BTreeSet},
    future,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::Arc,
};

use anyhow::Context as _;
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

use super::members::{Body, Key, Members, Message, Who, incarnation};

/// Bytes of the longest message that a member can receive.
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
    /// UDP address at which this member receives messages; `None` while the address of its Node is unknown.
    own: Option<SocketAddr>,
    /// The UDP socket bound to `own`; `None` until it is bound.
    socket: Option<net::UdpSocket>,
    others: BTreeMap<Arc<str>, SocketAddr>,
    leases: Leases,
    /// Why the last attempt to bind the socket failed; `None` if it did not fail.
    failure: Option<String>,
}

impl Peers {
    /// Creates the state. Opens the UDP socket at once if the members are configured; else [`Self::tick`] opens it
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
        let others = BTreeMap::new();
        let mut peers = Self { node, key, port, own: None, socket: None, others, leases, failure: None };
        if port.is_none() {
            peers.set_addresses(addresses);
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
        let address = |(name, node): (&Arc<str>, &Member)| {
            Some((Arc::clone(name), SocketAddr::new(node.address?, port)))
        };
        self.set_addresses(cluster.nodes.iter().filter_map(address).collect());
        if let Some(voters) = &cluster.voters {
            self.leases.set_voters(voters.clone(), now);
        }
        let may_announce = cluster.nodes.iter().filter(|(_, node)| node.may_announce);
        may_announce.map(|(name, node)| (Arc::clone(name), node.labels.clone())).collect()
    }

    fn set_addresses(&mut self, mut addresses: BTreeMap<Arc<str>, SocketAddr>) {
        let own = addresses.remove(&self.node);
        if own != self.own {
            (self.own, self.socket) = (own, None);
        }
        self.leases.set_members(addresses.keys().cloned());
        self.others = addresses;
    }

    /// Opens the UDP socket at the address of this node, unless it is open.
    fn bind(&mut self) -> anyhow::Result<()> {
        if let (Some(own), None) = (self.own, &self.socket) {
            let socket = UdpSocket::bind(own)
                .with_context(|| format!("cannot receive messages of other members at {own} (UDP)"))?;
            socket.set_nonblocking(true)?;
            // Needs CAP_NET_ADMIN, as most of the agent does. With a smaller buffer answers may get lost, and members
            // ask again.
            if let Err(error) = sockopt::set_socket_recv_buffer_size_force(&socket, WAITING) {
                debug!("cannot enlarge the receive buffer for messages of members: {error}");
            }
            self.socket = Some(net::UdpSocket::from_std(socket)?);
        }
        Ok(())
    }

    /// The voters that this node knows, and those that it proposes; `None` if the members are configured, and so never
    /// change.
    pub(super) fn ballot(&self, exists: impl Fn(&str) -> bool, now: Nanos) -> Option<Ballot> {
        let ballot =
            |_port| Ballot { known: self.leases.voters().clone(), next: self.leases.proposal(exists, now) };
        self.port.map(ballot)
    }

    /// Whether this member takes part in the election: its address is known.
    pub(super) const fn is_active(&self) -> bool {
        self.own.is_some()
    }

    pub(super) const fn leases(&mut self) -> &mut Leases {
        &mut self.leases
    }

    /// The member that should announce the address, as far as this node knows.
    pub(super) fn owner(&self, address: IpAddr, now: Nanos) -> Option<&Arc<str>> {
        self.leases.owner(address, now)
    }

    /// Opens the socket if necessary, and returns the questions that are due.
    pub(super) fn tick(&mut self, now: Nanos) -> Vec<Ask> {
        let failure = self.bind().err().map(|error| format!("{error:#}"));
        if let Some(why) = failure.as_ref().filter(|_| failure != self.failure) {
            warn!("{why}; retrying");
        }
        self.failure = failure;
        self.leases.tick(now)
    }

    /// Sends questions to all other members. The next tick repeats lost ones.
    pub(super) fn send(&self, questions: &[Ask]) {
        for (name, address) in &self.others {
            for question in questions {
                self.send_to(name, *address, Body::Ask(self.leases.addressed(question, name)));
            }
        }
    }

    fn send_to(&self, to: &Arc<str>, address: SocketAddr, body: Body) {
        let Some(socket) = &self.socket else { return };
        let message = Message { from: self.node.to_string(), to: to.to_string(), body };
        if let Err(error) = socket.try_send_to(&self.key.seal(&message), address) {
            debug!(member = &**to, "cannot send to the member: {error}");
        }
    }

    /// Waits for a message, then handles all that have arrived; without a socket, waits forever. Returns whether a
    /// member has given back its addresses because its agent stops.
    pub(super) async fn receive(peers: Option<&mut Self>) -> bool {
        let Some(peers) = peers else { return future::pending().await };
        let Some(socket) = &peers.socket else { return future::pending().await };
        let mut bytes = [0; LONGEST];
        if let Err(error) = socket.readable().await {
            debug!("cannot wait for messages of members: {error}");
        }
        let mut retires = false;
        while let Some(Ok(length)) = peers.socket.as_ref().map(|socket| socket.try_recv(&mut bytes)) {
            retires |= peers.handle(bytes.get(..length).unwrap_or_default());
        }
        retires
    }

    /// Handles one message; returns whether its sender is about to stop.
    fn handle(&mut self, bytes: &[u8]) -> bool {
        let Some(Message { from, to, body }) = self.key.open(bytes) else {
            debug!("a message has another key than the members");
            return false;
        };
        let Some((from, address)) = self.others.get_key_value(&*from).filter(|_| *to == *self.node) else {
            return false;
        };
        let (from, address) = (Arc::clone(from), *address);
        let now = Announcements::now();
        match body {
            Body::Ask(ask) => {
                let answers = self.leases.asked(&from, &ask, now);
                let is_new = answers.iter().any(|answer| answer.challenge.is_none());
                for answer in answers {
                    self.send_to(&from, address, Body::Answer(answer));
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
