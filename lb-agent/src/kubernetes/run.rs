//! The task that keeps the rest of the agent in step with the API server.

use std::{
    collections::{BTreeMap, BTreeSet},
    future,
    time::{Duration, SystemTime},
};

use ipnet::IpNet;
use kube::{Client, client::ClientBuilder};
use lb_core::{
    api::{EndpointSlice, Node, Service, ServiceCidr},
    model::{Change, ObjectName, SourceEvent, Trigger},
};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};
use tower::layer::layer_fn;
use tracing::info;

use super::{
    client::{ApiServer, KubernetesError, client_config},
    kind,
    node::NodeInfo,
    pace::Paced,
    trouble::Trouble,
    watch::Watch,
};

/// What the source tells beside the events for the writer. Each channel has the newest state.
#[derive(Debug)]
pub struct Published {
    /// The Node object of this node.
    pub node: watch::Sender<NodeInfo>,
    /// The ranges of cluster IPs: those of all ServiceCIDR objects, sorted. Where the API server has no such API, what
    /// the channel was made with stays.
    pub service_cidrs: watch::Sender<Vec<IpNet>>,
    /// All that is wrong now.
    pub problems: watch::Sender<Vec<String>>,
}

/// How long the first write waits for the Node when everything else is there.
const NODE_PATIENCE: Duration = Duration::from_secs(5);
/// How long an API server may be silent before the connection counts as dead. A real one sends a bookmark a minute.
const SILENCE: Duration = Duration::from_secs(150);
const CONNECT: Duration = Duration::from_secs(10);

/// Watches the API server until the receiver of `events` is dropped. Sends what changes, [`SourceEvent::Synchronised`]
/// once when all Services and EndpointSlices were listed, and then which Services nobody can know:
/// [`SourceEvent::CompleteBut`] those with an object that could never be read, [`SourceEvent::Complete`] as soon as
/// there are none. `node_name` is the name of the own Node: its zone is sent before the first write, which waits for
/// the API server's word about the Node, that there is none included, but not for long.
///
/// # Errors
///
/// A configuration that leads to no API server. One that does not answer is asked until it does.
pub async fn run(
    server: ApiServer,
    node_name: &str,
    events: mpsc::Sender<SourceEvent>,
    published: Published,
) -> Result<(), KubernetesError> {
    let mut config = client_config(server).await?;
    (config.connect_timeout, config.read_timeout) = (Some(CONNECT), Some(SILENCE));
    config.reset_reader_on_write = true;
    info!(server = %config.cluster_url, node = node_name, "watching Services and EndpointSlices");
    let client = ClientBuilder::try_from(config).map_err(Box::new)?.with_layer(&layer_fn(Paced::new)).build();
    Follower::new(&client, node_name, events, published).follow().await
}

struct Follower {
    services: Watch<Service>,
    slices: Watch<EndpointSlice>,
    node: Watch<Node>,
    cidrs: Watch<ServiceCidr>,
    events: mpsc::Sender<SourceEvent>,
    published: Published,
    trouble: Trouble,
    /// What is wrong as long as there is no Node.
    no_node: String,
    /// The ranges of each ServiceCIDR, and those that hold where there is none.
    ranges: BTreeMap<ObjectName, Vec<IpNet>>,
    default_ranges: Vec<IpNet>,
    /// Until when the first write waits for the Node.
    node_deadline: Option<Instant>,
    /// Whether the rest of the agent was told so.
    synchronised: bool,
    /// The Services it was told nobody can know.
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
            node: Watch::new(client.clone(), kind::node(node_name), now),
            cidrs: Watch::new(client.clone(), kind::service_cidrs(), now),
            events,
            published,
            trouble: Trouble::default(),
            no_node: format!(
                "the API server has no Node \"{node_name}\": give --node-name the name that endpoints on this node have"
            ),
            ranges: BTreeMap::new(),
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
                () = at(self.node_deadline) => Vec::new(),
                () = self.events.closed() => return Ok(()),
            };
            self.tell_people();
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

    fn cidr_changes(&mut self, changes: Vec<(ObjectName, Vec<IpNet>)>) -> Vec<SourceEvent> {
        for (name, cidrs) in changes {
            if cidrs.is_empty() {
                self.ranges.remove(&name);
            } else {
                self.ranges.insert(name, cidrs);
            }
        }
        let ranges: BTreeSet<IpNet> = self.ranges.values().flatten().copied().collect();
        let ranges =
            if ranges.is_empty() { self.default_ranges.clone() } else { ranges.into_iter().collect() };
        publish(&self.published.service_cidrs, ranges);
        Vec::new()
    }

    /// What the rest of the agent is told of how far the lists are.
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
            self.synchronised = true;
            due.push(SourceEvent::Synchronised);
        }
        let unread: BTreeSet<_> = self.services.unread().into_iter().chain(self.slices.unread()).collect();
        if self.unread.as_ref() != Some(&unread) && self.unread.as_ref().is_none_or(|told| !told.is_empty()) {
            let all = unread.is_empty();
            due.push(if all { SourceEvent::Complete } else { SourceEvent::CompleteBut(unread.clone()) });
            self.unread = Some(unread);
        }
        due
    }

    fn tell_people(&mut self) {
        let Self { services, slices, node, cidrs, .. } = self;
        let failures = [services.failure(), slices.failure(), node.failure(), cidrs.failure()];
        let problems = services.problems().chain(slices.problems());
        let problems = problems.chain(node.problems()).chain(cidrs.problems());
        // One that was deleted made the agent ineligible. One that never was is a wrong name, or not registered yet: its
        // Services are served, and people are told.
        let no_node = node.is_missing().then_some(self.no_node.as_str());
        let problems = problems.chain(no_node);
        let now = self.trouble.update(failures.into_iter().flatten(), problems);
        publish(&self.published.problems, now);
    }
}

/// Whoever listens hears only of what is another state than before.
fn publish<T: PartialEq>(channel: &watch::Sender<T>, now: T) {
    channel.send_if_modified(|published| {
        let modified = *published != now;
        *published = now;
        modified
    });
}

/// Sleeps until then; for ever when there is no then.
async fn at(then: Option<Instant>) {
    match then {
        Some(then) => sleep_until(then).await,
        None => future::pending().await,
    }
}
