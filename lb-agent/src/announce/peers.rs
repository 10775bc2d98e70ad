//! The exchange of questions and answers with the other members, over UDP.

use std::{
    collections::BTreeMap,
    future,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::Arc,
};

use anyhow::Context as _;
use lb_core::announce::lease::{Ask, Leases, Nanos, Timing};
use lb_datapath::Announcements;
use tokio::net;
use tracing::debug;

use super::members::{Body, Key, Members, Message};

/// Size of the receive buffer, in bytes.
const LONGEST: usize = 2_048;

/// The other members, and the state of this member in the protocol.
#[derive(Debug)]
pub(super) struct Peers {
    node: Arc<str>,
    key: Key,
    socket: net::UdpSocket,
    others: BTreeMap<Arc<str>, SocketAddr>,
    leases: Leases,
}

impl Peers {
    /// Opens the UDP socket at the address of this node.
    pub(super) fn open(node: Arc<str>, members: Members) -> anyhow::Result<Self> {
        let Members { mut addresses, key, prefer } = members;
        let own = addresses.remove(&node).context("this node is not among the members")?;
        let socket = UdpSocket::bind(own)
            .with_context(|| format!("cannot receive messages of other members at {own} (UDP)"))?;
        socket.set_nonblocking(true)?;
        // Nanoseconds since boot are greater than the number of any question of an earlier agent. After a reboot they
        // are smaller, which the other members accept, because they promise an address for a shorter time than a reboot
        // takes.
        let now = Announcements::now();
        let start = (now, now);
        let leases =
            Leases::new(Arc::clone(&node), addresses.keys().cloned(), prefer, Timing::DEFAULT, start);
        Ok(Self { node, key, socket: net::UdpSocket::from_std(socket)?, others: addresses, leases })
    }

    /// The names of all members.
    pub(super) fn members(&self) -> impl Iterator<Item = Arc<str>> {
        self.others.keys().cloned().chain([Arc::clone(&self.node)])
    }

    pub(super) const fn leases(&mut self) -> &mut Leases {
        &mut self.leases
    }

    /// The member that should announce the address.
    pub(super) fn owner(&self, address: IpAddr, now: Nanos) -> Option<&Arc<str>> {
        self.leases.owner(address, now)
    }

    /// The questions that are due.
    pub(super) fn tick(&mut self, now: Nanos) -> Vec<Ask> {
        self.leases.tick(now)
    }

    /// Sends questions to all other members. The next tick repeats lost ones.
    pub(super) fn send(&self, questions: &[Ask]) {
        for (name, address) in &self.others {
            for question in questions {
                self.send_to(name, *address, Body::Ask(question.clone()));
            }
        }
    }

    fn send_to(&self, to: &Arc<str>, address: SocketAddr, body: Body) {
        let message = Message { from: self.node.to_string(), to: to.to_string(), body };
        if let Err(error) = self.socket.try_send_to(&self.key.seal(&message), address) {
            debug!(member = &**to, "cannot send to the member: {error}");
        }
    }

    /// Handles the next messages; waits forever without members.
    pub(super) async fn receive(peers: Option<&mut Self>) {
        let Some(peers) = peers else { return future::pending().await };
        let mut bytes = [0; LONGEST];
        if let Err(error) = peers.socket.readable().await {
            debug!("cannot wait for messages of members: {error}");
        }
        while let Ok(length) = peers.socket.try_recv(&mut bytes) {
            peers.handle(bytes.get(..length).unwrap_or_default());
        }
    }

    fn handle(&mut self, bytes: &[u8]) {
        let Some(Message { from, to, body }) = self.key.open(bytes) else {
            debug!("a message has another key than the members");
            return;
        };
        let Some((from, address)) = self.others.get_key_value(&*from).filter(|_| *to == *self.node) else {
            return;
        };
        let (from, address) = (Arc::clone(from), *address);
        let now = Announcements::now();
        match body {
            Body::Ask(ask) => {
                if let Some(answer) = self.leases.asked(&from, &ask, now) {
                    self.send_to(&from, address, Body::Answer(answer));
                }
            }
            Body::Answer(answer) => self.leases.answered(&from, &answer, now),
        }
    }
}
