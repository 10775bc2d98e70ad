//! The task that delivers Services, endpoints and the Node from the API server to the rest of the agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
    time::{Duration, SystemTime},
};

use ipnet::IpNet;
use kube::Client;
use lb_core::{
    api::{EndpointSlice, Node, Service, ServiceCidr},
    model::{Change, ObjectName, SourceEvent, Trigger},
};
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tracing::info;

use super::{
    client::{ApiServer, KubernetesError, watching_client},
    conditions::ServerConditions,
    kind,
    node::{NodeInfo, PeerNode},
    watch::{Watch, at, next, publish, replace},
};

/// Channels for values that the source publishes in addition to the events for the writer. Each holds the latest value.
#[derive(Debug)]
pub struct Published {
    /// The fields of the Node object of this node that the agent uses.
    pub node: watch::Sender<NodeInfo>,
    /// The ranges of cluster IPs: those of all ServiceCIDR objects, sorted. While there is no such object, the channel
    /// has its initial value.
    pub service_cidrs: watch::Sender<Vec<IpNet>>,
    /// The addresses of all other Nodes; the channel's value is `None` until they are listed. Without a channel, the
    /// source does not watch other Nodes.
    pub peers: Option<watch::Sender<Option<BTreeSet<IpAddr>>>>,
    /// Current conditions of objects and of the API server, as sentences for `lb-agent status`.
    pub problems: watch::Sender<Vec<String>>,
}

/// How long the first write of maps waits for the Node after Services and EndpointSlices were listed.
const NODE_PATIENCE: Duration = Duration::from_secs(5);

/// Watches the API server until the receiver of `events` is dropped. Sends changes. When all Services and
/// EndpointSlices are listed, sends [`SourceEvent::Complete`], or [`SourceEvent::CompleteBut`] with the Services that
/// have an object that was never readable, then [`SourceEvent::Synchronised`] once. Later, sends `CompleteBut` again
/// when the set of these Services changes, and `Complete` as soon as no such Service is left. `Synchronised` permits
/// the first write of maps. This task delays `Synchronised`, by a few seconds at most, until the API server has
/// returned the Node `node_name`, has answered that this Node does not exist, or has refused the request. If the Node
/// arrives in time, this task sends the Node's zone before `Synchronised`.
///
/// # Errors
///
/// A configuration without a usable API server. A server that does not answer is retried forever.
pub async fn run(
    server: ApiServer,
    node_name: &str,
    events: mpsc::Sender<SourceEvent>,
    published: Published,
) -> Result<(), KubernetesError> {
    let (client, config) = watching_client(server).await?;
    info!(server = %config.cluster_url, node = node_name, "watching Services and EndpointSlices");
    Follower::new(&client, node_name, events, published).follow().await
}

struct Follower {
    services: Watch<Service>,
    slices: Watch<EndpointSlice>,
    node: Watch<Node>,
    cidrs: Watch<ServiceCidr>,
    /// All Nodes; `None` if nothing needs their addresses.
    peers: Option<Watch<PeerNode>>,
    events: mpsc::Sender<SourceEvent>,
    published: Published,
    server: ServerConditions,
    node_name: Arc<str>,
    /// The condition that `status` shows while the API server has no Node of this name.
    no_node: String,
    /// The ranges of each ServiceCIDR object. Without such objects, `default_ranges` apply.
    ranges: BTreeMap<ObjectName, Vec<IpNet>>,
    /// The addresses of each other Node.
    known_peers: BTreeMap<ObjectName, Vec<IpAddr>>,
    default_ranges: Vec<IpNet>,
    /// When the first write of maps stops waiting for the Node; `None` if nothing waits.
    node_deadline: Option<Instant>,
    /// Whether [`SourceEvent::Synchronised`] has been sent.
    synchronised: bool,
    /// The Services in the last [`SourceEvent::CompleteBut`]; empty after [`SourceEvent::Complete`]; `None` as long as
    /// this task has sent neither of these events.
    unread: Option<BTreeSet<ObjectName>>,
}

impl Follower {
    fn new(
        client: &Client,
        node_name: &str,
        events: mpsc::Sender<SourceEvent>,
        published: Published,
    ) -> Self {
        let now = SystemTime::now();
        let default_ranges = published.service_cidrs.borrow().clone();
        Self {
            services: Watch::new(client.clone(), kind::services(), now),
            slices: Watch::new(client.clone(), kind::endpoint_slices(), now),
            node: Watch::new(client.clone(), kind::named_object(node_name), now),
            cidrs: Watch::new(client.clone(), kind::all(), now),
            peers: published.peers.as_ref().map(|_| Watch::new(client.clone(), kind::all(), now)),
            node_name: node_name.into(),
            events,
            published,
            server: ServerConditions::default(),
            no_node: format!(
                "the API server has no Node \"{node_name}\": give --node-name the name that endpoints on this node have"
            ),
            ranges: BTreeMap::new(),
            known_peers: BTreeMap::new(),
            default_ranges,
            node_deadline: None,
            synchronised: false,
            unread: None,
        }
    }

    async fn follow(mut self) -> Result<(), KubernetesError> {
        const ENDED: KubernetesError = KubernetesError::Ended;
        loop {
            let mut due = tokio::select! {
                changes = self.services.next() => Self::changes(changes.ok_or(ENDED)?, Vec::new()),
                changes = self.slices.next() => {
                    Self::changes(changes.ok_or(ENDED)?, self.slices.take_triggered())
                }
                changes = self.node.next() => self.node_changes(changes.ok_or(ENDED)?),
                changes = self.cidrs.next() => self.cidr_changes(changes.ok_or(ENDED)?),
                changes = next(&mut self.peers) => self.peer_changes(changes.ok_or(ENDED)?),
                () = at(self.node_deadline) => Vec::new(),
                () = self.events.closed() => return Ok(()),
            };
            self.publish_problems();
            due.extend(self.progress());
            for event in due {
                if self.events.send(event).await.is_err() {
                    return Ok(());
                }
            }
        }
    }

    fn changes(changes: Vec<Change>, triggered: Vec<Trigger>) -> Vec<SourceEvent> {
        let triggered = (!triggered.is_empty()).then_some(SourceEvent::Triggered(triggered));
        let changes = (!changes.is_empty()).then_some(SourceEvent::Changes(changes));
        triggered.into_iter().chain(changes).collect()
    }

    fn node_changes(&self, changes: Vec<Option<NodeInfo>>) -> Vec<SourceEvent> {
        let mut due = Vec::new();
        for change in changes {
            let known = self.published.node.borrow().clone();
            let now = change.unwrap_or_else(|| NodeInfo { eligible: false, ..known.clone() });
            if now.zone != known.zone {
                due.push(SourceEvent::Zone(now.zone.clone()));
            }
            publish(&self.published.node, now);
        }
        due
    }

    fn cidr_changes(&mut self, changes: Vec<(ObjectName, Option<Vec<IpNet>>)>) -> Vec<SourceEvent> {
        replace(&mut self.ranges, changes);
        let ranges: BTreeSet<IpNet> = self.ranges.values().flatten().copied().collect();
        let ranges =
            if ranges.is_empty() { self.default_ranges.clone() } else { ranges.into_iter().collect() };
        publish(&self.published.service_cidrs, ranges);
        Vec::new()
    }

    fn peer_changes(&mut self, changes: Vec<(ObjectName, Option<Vec<IpAddr>>)>) -> Vec<SourceEvent> {
        let others = changes.into_iter().filter(|(name, _)| name.name != self.node_name);
        replace(&mut self.known_peers, others);
        if self.peers.as_ref().is_some_and(Watch::is_listed)
            && let Some(published) = &self.published.peers
        {
            publish(published, Some(self.known_peers.values().flatten().copied().collect()));
        }
        Vec::new()
    }

    /// The events to send now about the completeness of the sent objects: `Complete`, `CompleteBut`, `Synchronised`.
    fn progress(&mut self) -> Vec<SourceEvent> {
        let mut due = Vec::new();
        if !self.services.is_listed() || !self.slices.is_listed() {
            return due;
        }
        if !self.synchronised {
            let deadline = *self.node_deadline.get_or_insert_with(|| Instant::now() + NODE_PATIENCE);
            if !self.node.is_settled() && Instant::now() < deadline {
                return due;
            }
            self.node_deadline = None;
        }
        let unread: BTreeSet<_> = self.services.unread().into_iter().chain(self.slices.unread()).collect();
        if self.unread.as_ref() != Some(&unread) && self.unread.as_ref().is_none_or(|told| !told.is_empty()) {
            let all = unread.is_empty();
            due.push(if all { SourceEvent::Complete } else { SourceEvent::CompleteBut(unread.clone()) });
            self.unread = Some(unread);
        }
        // `Synchronised` comes last: it permits the first write of maps. `Complete` or `CompleteBut` tells the writer
        // before that write which Services it must not delete: those with an object that was never readable.
        if !self.synchronised {
            self.synchronised = true;
            due.push(SourceEvent::Synchronised);
        }
        due
    }

    fn publish_problems(&mut self) {
        let Self { services, slices, node, cidrs, peers, .. } = self;
        let peer_failure = peers.as_ref().and_then(Watch::failure);
        let failures = [services.failure(), slices.failure(), node.failure(), cidrs.failure(), peer_failure];
        let problems = services.problems().chain(slices.problems());
        let problems = problems.chain(node.problems()).chain(cidrs.problems());
        let problems = problems.chain(peers.iter().flat_map(Watch::problems));
        // `status` shows that there is no Node. If the Node was deleted, this node is also ineligible. If the API
        // server never had it, the name is wrong or the node is not registered yet, and the node stays eligible.
        let no_node = node.is_missing().then_some(self.no_node.as_str());
        let problems = problems.chain(no_node);
        let now = self.server.update(failures.into_iter().flatten(), problems);
        publish(&self.published.problems, now);
    }
}
