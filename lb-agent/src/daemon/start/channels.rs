//! The channels between the tasks of the agent.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use lb_core::{
    announce::{advertisement::Advertised, cluster::Cluster, voters::Ballot},
    family::Families,
    model::{NodeAddresses, SourceEvent},
};
use tokio::sync::{mpsc, watch};

use crate::{
    announce::{Completeness, HolderMap},
    daemon::{conntrack::UdpFrontends, environment, shortage_watch::FlowCounts},
    health::Checks,
    kubernetes::NodeInfo,
};

/// Maximum number of events that wait for the writer.
const QUEUE: usize = 64;

/// Both ends of a channel.
pub(super) struct Channel<S, R> {
    pub(super) sender: S,
    pub(super) receiver: R,
}

/// A channel that holds the latest value.
type Latest<T> = Channel<watch::Sender<T>, watch::Receiver<T>>;
/// A channel that holds every value until it is received.
type Queue<T> = Channel<mpsc::Sender<T>, mpsc::Receiver<T>>;
/// A [`Queue`] without a maximum length.
type Unbounded<T> = Channel<mpsc::UnboundedSender<T>, mpsc::UnboundedReceiver<T>>;

impl<S, R> From<(S, R)> for Channel<S, R> {
    fn from((sender, receiver): (S, R)) -> Self {
        Self { sender, receiver }
    }
}

/// All channels. Without an API server the values of `node_info`, `service_cidrs` and `peers` never change.
pub(super) struct Channels {
    /// The Node object: from the API server to the tasks that need it.
    pub(super) node_info: Latest<NodeInfo>,
    /// Ranges of cluster IPs: from the API server to the tasks that need them.
    pub(super) service_cidrs: Latest<Vec<IpNet>>,
    /// Addresses of other nodes that may send tunnelled packets: from the API server to the node task.
    pub(super) peers: Latest<Option<BTreeSet<IpAddr>>>,
    /// Whether the first synchronisation is complete: from the writer to the tasks that wait for it.
    pub(super) synchronised: Latest<bool>,
    /// The families with backends at addresses that this node does not have: from the writer to the node task.
    pub(super) routed: Latest<Families>,
    /// Which part of the objects is in the kernel: from the writer to the announcers (layer 2 and BGP).
    pub(super) complete: Latest<Completeness>,
    /// Listen addresses: from the node task to the `healthCheckNodePort` servers.
    pub(super) listen: Latest<BTreeSet<IpAddr>>,
    /// The node's addresses: from the node task to connection tracking and node-local DNS.
    pub(super) addresses: Latest<NodeAddresses>,
    /// The Services with load balancer addresses: from the writer to the announcers (layer 2 and BGP).
    pub(super) holders: Latest<HolderMap>,
    /// Advertisements and pools: from the folder of manifests to the announcers, or from the API server to the
    /// announcer at layer 2. (With an API server, the task that announces by BGP has its own channel.)
    pub(super) advertised: Latest<Advertised>,
    /// The cluster's Nodes and voters: from the API server to the announcer at layer 2.
    pub(super) cluster: Latest<Cluster>,
    /// Known and proposed voters: from the announcer to the task that writes voters to the API server.
    pub(super) ballots: Latest<Ballot>,
    /// The answers of the `healthCheckNodePort` servers: from the writer to these servers.
    pub(super) checks: Latest<Checks>,
    /// UDP frontends that have lost endpoints: from the writer to connection tracking.
    pub(super) stale_udp: Unbounded<UdpFrontends>,
    /// Slots of `ACTIVE` that flows and sockets refer to: from connection tracking to the writer.
    pub(super) counters: Latest<BTreeSet<u32>>,
    /// Counters of new and refused flows: from the shortage task to connection tracking.
    pub(super) flow_counts: Latest<FlowCounts>,
    /// Changes: from the source of Services and the node task to the writer.
    pub(super) events: Queue<SourceEvent>,
    /// Requests: from the environment socket to the writer.
    pub(super) environments: Queue<environment::VariablesRequest>,
}

impl Channels {
    /// Creates the channels; `peers` are the other nodes that the configuration names.
    pub(super) fn new(peers: Option<BTreeSet<IpAddr>>) -> Self {
        Self {
            node_info: latest(),
            service_cidrs: latest(),
            peers: watch::channel(peers).into(),
            synchronised: latest(),
            routed: latest(),
            complete: latest(),
            listen: latest(),
            addresses: latest(),
            holders: latest(),
            advertised: latest(),
            cluster: latest(),
            ballots: latest(),
            checks: latest(),
            stale_udp: mpsc::unbounded_channel().into(),
            counters: latest(),
            flow_counts: latest(),
            events: mpsc::channel(QUEUE).into(),
            environments: mpsc::channel(1).into(),
        }
    }
}

fn latest<T: Default>() -> Latest<T> {
    watch::channel(T::default()).into()
}
