//! What is announced at layer 2, from the API server: MetalLB's `L2Advertisement` and `IPAddressPool`, the nodes of the
//! cluster, and the [`Voters`].
//!
//! ```text
//! L2Advertisement, IPAddressPool ──▶ Advertised ──▶ announcer
//! Node, ConfigMap of the voters ───▶ Cluster ─────▶     │
//!                       ConfigMap ◀── proposal ─────────┘
//! ```

mod kinds;

use std::{
    collections::BTreeMap,
    future,
    sync::Arc,
    time::{Duration, SystemTime},
};

use k8s_openapi::api::core::v1 as core;
use kube::{Api, Client, api::PostParams};
use lb_core::{
    announce::{
        advertisement::{Advertised, Advertisement},
        cluster::Cluster,
        voters::Voters,
    },
    api::{IpAddressPool, L2Advertisement},
    load_balancer::Pool,
    model::ObjectName,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};
use tracing::info;

use self::kinds::{AnyNode, VotersObject};
use super::{
    client::{ApiServer, KubernetesError, own_namespace, watching_client},
    conditions::ServerConditions,
    kind::{self, Kind},
    watch::Watch,
};

/// The ConfigMap with the voters.
pub(crate) const VOTERS: &str = "lb-agent-announce";
/// How long a write of the voters may take, and the pause after one that has failed.
const REQUEST: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_secs(2);

/// Channels for what the source publishes. Each holds the latest value.
#[derive(Debug)]
pub struct Published {
    /// What is announced.
    pub advertised: watch::Sender<Advertised>,
    /// Nodes and voters; empty until there is an advertisement.
    pub cluster: watch::Sender<Cluster>,
    /// All current problems, for `lb-agent status`.
    pub problems: watch::Sender<Vec<String>>,
}

/// Watches what is announced, and writes the voters that the announcer proposes. Runs forever.
///
/// # Errors
///
/// A configuration without a usable API server. A server that does not answer is retried forever.
pub async fn run(
    server: ApiServer,
    node: Arc<str>,
    proposals: watch::Receiver<Option<Voters>>,
    published: Published,
) -> Result<(), KubernetesError> {
    let (client, config) = watching_client(server).await?;
    let namespace = own_namespace(&config).await;
    Follower::new(client, node, &namespace, proposals, published).follow().await
}

struct Follower {
    client: Client,
    node: Arc<str>,
    config_maps: Api<core::ConfigMap>,
    namespace: String,
    proposals: watch::Receiver<Option<Voters>>,
    published: Published,
    server: ServerConditions,
    advertisements: Watch<L2Advertisement>,
    pools: Watch<IpAddressPool>,
    /// Watched from the first advertisement on: without one, the announcer costs the API server nothing.
    nodes: Option<Watch<AnyNode>>,
    voters: Option<Watch<VotersObject>>,
    known_advertisements: BTreeMap<ObjectName, Advertisement>,
    known_pools: BTreeMap<ObjectName, (Option<String>, Pool)>,
    cluster: Cluster,
    /// The version of the voters' object.
    version: Option<String>,
    /// When a write that has failed is tried again, and why it has failed.
    again: Option<(Instant, Option<String>)>,
}

impl Follower {
    fn new(
        client: Client,
        node: Arc<str>,
        namespace: &str,
        proposals: watch::Receiver<Option<Voters>>,
        published: Published,
    ) -> Self {
        let beginning = SystemTime::UNIX_EPOCH;
        Self {
            node,
            config_maps: Api::namespaced(client.clone(), namespace),
            namespace: namespace.to_owned(),
            proposals,
            published,
            server: ServerConditions::default(),
            advertisements: Watch::new(client.clone(), kind::all(), beginning),
            pools: Watch::new(client.clone(), kind::all(), beginning),
            nodes: None,
            voters: None,
            known_advertisements: BTreeMap::new(),
            known_pools: BTreeMap::new(),
            cluster: Cluster::default(),
            version: None,
            again: None,
            client,
        }
    }

    async fn follow(mut self) -> Result<(), KubernetesError> {
        const ENDED: KubernetesError = KubernetesError::Ended;
        loop {
            tokio::select! {
                changes = self.advertisements.next() => {
                    replace(&mut self.known_advertisements, changes.ok_or(ENDED)?);
                    self.watch_cluster();
                }
                changes = self.pools.next() => replace(&mut self.known_pools, changes.ok_or(ENDED)?),
                changes = next(&mut self.nodes) => {
                    let changes = changes.ok_or(ENDED)?.into_iter();
                    replace(&mut self.cluster.nodes, changes.map(|(name, node)| (name.name, node)));
                }
                changes = next(&mut self.voters) => self.voters_changes(changes.ok_or(ENDED)?),
                changed = self.proposals.changed() => changed.or(Err(ENDED))?,
                () = at(self.again.as_ref().map(|(then, _)| *then)) => self.again = None,
            }
            self.publish();
            self.write().await;
        }
    }

    fn watch_cluster(&mut self) {
        if self.nodes.is_none() && !self.known_advertisements.is_empty() {
            let beginning = SystemTime::UNIX_EPOCH;
            let voters = Api::namespaced(self.client.clone(), &self.namespace);
            self.nodes = Some(Watch::new(self.client.clone(), kind::all(), beginning));
            self.voters = Some(Watch::of(voters, kind::named_object(VOTERS), beginning));
        }
    }

    fn voters_changes(&mut self, changes: Vec<Option<(Voters, Option<String>)>>) {
        for change in changes {
            // A deleted object does not end the voters' promises: they stay in force until there is a new one.
            self.version = change.as_ref().and_then(|(_, version)| version.clone());
            if let Some((voters, _)) = change {
                self.cluster.voters = Some(voters);
            }
        }
    }

    fn publish(&mut self) {
        if self.advertisements.is_listed() && self.pools.is_listed() {
            let advertised = Advertised {
                advertisements: self.known_advertisements.values().cloned().collect(),
                pools: pools(&self.known_pools),
                ..Advertised::default()
            };
            set(&self.published.advertised, advertised);
        }
        if self.nodes.as_ref().is_some_and(Watch::is_listed) {
            set(&self.published.cluster, self.cluster.clone());
        }
        let Self { advertisements, pools, nodes, voters, .. } = self;
        let failures = [
            advertisements.failure(),
            pools.failure(),
            nodes.as_ref().and_then(Watch::failure),
            voters.as_ref().and_then(Watch::failure),
        ];
        // The controller reports the problems of pools.
        let problems = advertisements.problems().chain(voters.iter().flat_map(Watch::problems));
        let problems = problems.chain(self.again.iter().filter_map(|(_, why)| why.as_deref()));
        let problems = self.server.update(failures.into_iter().flatten(), problems);
        set(&self.published.problems, problems);
    }

    /// Writes the voters if that is due.
    async fn write(&mut self) {
        let Some(next) = self.due() else { return };
        let object = kinds::object(&next, self.version.clone());
        let parameters = PostParams::default();
        let write = async {
            if self.version.is_some() {
                self.config_maps.replace(VOTERS, &parameters, &object).await
            } else {
                self.config_maps.create(&parameters, &object).await
            }
        };
        let why = match timeout(REQUEST, write).await {
            Ok(Ok(_)) => {
                let (generation, voters) = (next.generation, next.names.len());
                info!(generation, voters, "changed who votes on announcements");
                return self.pause(None);
            }
            // Another agent was faster; the watch brings what it has written.
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => return self.pause(None),
            Ok(Err(error)) => error.to_string(),
            Err(_elapsed) => "the API server does not answer".to_owned(),
        };
        let hint = "no other node gets a vote, and no address is announced before a node has one";
        self.pause(Some(format!("cannot write the ConfigMap {}/{VOTERS}: {why}; {hint}", self.namespace)));
    }

    /// Allows no write for [`AGAIN`], so that the watch can bring what was written. `why` is the error of a failed
    /// write.
    fn pause(&mut self, why: Option<String>) {
        self.again = Some((Instant::now() + AGAIN, why));
    }

    /// The voters to write: the proposal, if its generation follows that of the known voters; if there is no ConfigMap,
    /// this node alone.
    fn due(&self) -> Option<Voters> {
        let watch = self.voters.as_ref().filter(|_| self.again.is_none())?;
        let known = self.cluster.voters.as_ref();
        if watch.is_missing() {
            // Greater than the generations of a ConfigMap that was deleted.
            let seconds =
                SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
            let generation = known.map_or(0, |known| known.generation + 1).max(seconds);
            let exists = self.cluster.nodes.contains_key(&self.node);
            return exists.then(|| Voters { generation, names: [Arc::clone(&self.node)].into() });
        }
        let follows = |next: &Voters| known.is_some_and(|known| next.generation == known.generation + 1);
        self.proposals.borrow().clone().filter(|next| follows(next) && self.version.is_some())
    }
}

/// The pools, the oldest first: of two pools that overlap, the older one is used.
fn pools(known: &BTreeMap<ObjectName, (Option<String>, Pool)>) -> Vec<Pool> {
    let mut pools: Vec<_> = known.iter().map(|(name, (created, pool))| (created, name, pool)).collect();
    pools.sort_by_key(|(created, name, _)| (*created, *name));
    pools.into_iter().map(|(.., pool)| pool.clone()).collect()
}

fn replace<K: Ord, V>(known: &mut BTreeMap<K, V>, changes: impl IntoIterator<Item = (K, Option<V>)>) {
    for (name, value) in changes {
        match value {
            Some(value) => known.insert(name, value),
            None => known.remove(&name),
        };
    }
}

/// Updates the channel; receivers wake up only if the value differs.
fn set<T: PartialEq>(channel: &watch::Sender<T>, now: T) {
    channel.send_if_modified(|known| {
        let modified = *known != now;
        *known = now;
        modified
    });
}

/// Waits for changes of a watch; forever if it is `None`.
async fn next<K: Kind>(watch: &mut Option<Watch<K>>) -> Option<Vec<K::Change>> {
    match watch {
        Some(watch) => watch.next().await,
        None => future::pending().await,
    }
}

async fn at(then: Option<Instant>) {
    match then {
        Some(then) => sleep_until(then).await,
        None => future::pending().await,
    }
}
