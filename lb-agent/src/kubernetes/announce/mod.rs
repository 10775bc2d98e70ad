//! Reads from the API server what is announced at layer 2: MetalLB's `L2Advertisement` and `IPAddressPool`, the nodes
//! of the cluster, and the [`Voters`], which agents also write. The module [`bgp`] reads what is announced by BGP.
//!
//! ```text
//! L2Advertisement, IPAddressPool ──▶ Advertised ──▶ announcer
//! Node, ConfigMap of the voters ───▶ Cluster ─────▶     │
//!                       ConfigMap ◀── Ballot ───────────┘
//! ```

mod bgp;
mod command;
mod kinds;
mod passwords;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use k8s_openapi::api::core::v1 as core;
use kube::{Api, Client, api::PostParams};
use lb_core::{
    announce::{
        advertisement::{Advertised, Advertisement},
        cluster::Cluster,
        voters::{Ballot, Voters},
    },
    api::{IpAddressPool, L2Advertisement},
    load_balancer::Pool,
    model::ObjectName,
};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tracing::{info, warn};

use self::kinds::{AnyNode, Found, VotersObject};
pub use self::{
    bgp::{BgpPublished, run_bgp},
    command::VotersObject as WrittenVoters,
};
use super::{
    client::{ApiServer, KubernetesError, own_namespace, watching_client},
    conditions::ServerConditions,
    crds::{Crd, MissingCrds},
    events::Events,
    kind,
    watch::{Watch, at, next, publish, replace},
};

/// Name of the ConfigMap with the voters: the nodes that vote on announcements.
pub(crate) const VOTERS: &str = "lb-agent-announce";
/// Time limit of a write of the voters, and the pause after each write.
const REQUEST: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_secs(2);
/// How long an agent that knows no voters waits to learn them from another agent before it writes the first voters.
const FOUNDING: Duration = Duration::from_secs(3);

/// The channels through which this source publishes. Each holds the latest value.
#[derive(Debug)]
pub struct Published {
    /// What to announce at layer 2: advertisements and pools.
    pub advertised: watch::Sender<Advertised>,
    /// The Nodes, and the voters of the highest generation that this agent has read from the API server; empty until
    /// there is an advertisement.
    pub cluster: watch::Sender<Cluster>,
    /// Current conditions of objects and of the API server, as sentences for `lb-agent status`.
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
    ballots: watch::Receiver<Ballot>,
    (published, events): (Published, Events),
) -> Result<(), KubernetesError> {
    let (client, config) = watching_client(server).await?;
    let namespace = own_namespace(&config).await;
    Follower::new(client, node, &namespace, ballots, (published, events)).follow().await
}

struct Follower {
    client: Client,
    node: Arc<str>,
    config_maps: Api<core::ConfigMap>,
    namespace: String,
    ballots: watch::Receiver<Ballot>,
    published: Published,
    events: Events,
    server: ServerConditions,
    missing_crds: MissingCrds,
    advertisements: Watch<L2Advertisement>,
    pools: Watch<IpAddressPool>,
    /// The watch of Nodes; `None` before the first advertisement, because clusters without announcements need no such
    /// watch.
    nodes: Option<Watch<AnyNode>>,
    voters: Option<Watch<VotersObject>>,
    known_advertisements: BTreeMap<ObjectName, Advertisement>,
    known_pools: BTreeMap<ObjectName, (Option<String>, Pool)>,
    cluster: Cluster,
    /// The ConfigMap of voters as the API server has it; `None` if there is none.
    found: Option<Found>,
    /// Whether the ConfigMap of voters was missing or unreadable when it last changed.
    is_vacant: bool,
    /// The sentence for `status` that too few voters have Nodes; `None` while a majority of the voters have Nodes.
    lost: Option<String>,
    /// The time before which the task writes no voters, with the error of the last write if it failed; `None` if the
    /// task may write at once.
    again: Option<(Instant, Option<String>)>,
}

impl Follower {
    fn new(
        client: Client,
        node: Arc<str>,
        namespace: &str,
        ballots: watch::Receiver<Ballot>,
        (published, events): (Published, Events),
    ) -> Self {
        let beginning = SystemTime::UNIX_EPOCH;
        Self {
            node,
            config_maps: Api::namespaced(client.clone(), namespace),
            namespace: namespace.to_owned(),
            ballots,
            published,
            events,
            server: ServerConditions::default(),
            missing_crds: MissingCrds::new("an agent that starts now announces no address at layer 2"),
            advertisements: Watch::new(client.clone(), kind::all(), beginning),
            pools: Watch::new(client.clone(), kind::all(), beginning),
            nodes: None,
            voters: None,
            known_advertisements: BTreeMap::new(),
            known_pools: BTreeMap::new(),
            cluster: Cluster::default(),
            found: None,
            is_vacant: false,
            lost: None,
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
                changed = self.ballots.changed() => changed.or(Err(ENDED))?,
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

    fn voters_changes(&mut self, changes: Vec<Option<Found>>) {
        for change in changes {
            // The newest voters stay in force even if the ConfigMap is deleted, or replaced by one with an older
            // generation, because the grants that these voters have given still hold.
            if let Some(voters) = change.as_ref().and_then(|found| found.voters.as_ref())
                && self.cluster.voters.as_ref().is_none_or(|known| known.generation < voters.generation)
            {
                self.cluster.voters = Some(voters.clone());
            }
            self.found = change;
        }
        let is_listed = self.voters.as_ref().is_some_and(Watch::is_listed);
        let is_vacant = is_listed && self.readable().is_none();
        if is_vacant && !self.is_vacant && self.known().generation == 0 {
            self.again = Some((Instant::now() + FOUNDING, None));
        }
        self.is_vacant = is_vacant;
    }

    /// The voters in the API server; `None` if they are missing or unreadable.
    fn readable(&self) -> Option<&Voters> {
        self.found.as_ref()?.voters.as_ref()
    }

    /// The newest voters that this node knows, from the API server or, through the announcer, from another node.
    fn known(&self) -> Voters {
        let heard = self.ballots.borrow().known.clone();
        let read = self.cluster.voters.clone().unwrap_or_default();
        if heard.generation > read.generation { heard } else { read }
    }

    /// Checks whether at least a majority of the voters have Nodes. When fewer have, logs a warning and emits an Event.
    fn note_lost(&mut self) {
        let nodes = &self.cluster.nodes;
        let known = self.known();
        let lost = known.lost(|name| nodes.is_empty() || nodes.contains_key(name));
        let names = lost.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let text = format!(
            "{} of the {} voters on announcements have no Node any more ({names}), so the others have no majority: if no agent \
             of these nodes runs any more, run `lb-agent announce voters --replace`",
            lost.len(),
            known.names.len()
        );
        let now = (!lost.is_empty()).then_some(text);
        if let Some(why) = now.as_ref().filter(|_| self.lost.is_none()) {
            warn!("{why}");
            self.events.voters_lost(why.clone());
        }
        self.lost = now;
    }

    fn publish(&mut self) {
        self.note_lost();
        if self.advertisements.is_listed() && self.pools.is_listed() {
            let advertised = Advertised {
                advertisements: self.known_advertisements.values().cloned().collect(),
                pools: pools(&self.known_pools),
                ..Advertised::default()
            };
            publish(&self.published.advertised, advertised);
        }
        if self.nodes.as_ref().is_some_and(Watch::is_listed) {
            publish(&self.published.cluster, self.cluster.clone());
        }
        let Self { advertisements, pools, nodes, voters, .. } = self;
        let failures = [
            advertisements.failure(),
            pools.failure(),
            nodes.as_ref().and_then(Watch::failure),
            voters.as_ref().and_then(Watch::failure),
        ];
        let missing = self.missing_crds.update(&[Crd::of(advertisements), Crd::of(pools)]);
        let problems = advertisements.problems().chain(pools.problems());
        let problems = problems.chain(voters.iter().flat_map(Watch::problems));
        let problems = problems.chain(self.again.iter().filter_map(|(_, why)| why.as_deref()));
        let problems = problems.chain(self.lost.as_deref()).chain(missing.as_deref());
        let problems = self.server.update(failures.into_iter().flatten(), problems);
        publish(&self.published.problems, problems);
    }

    /// Writes the voters to the API server, if that is due.
    async fn write(&mut self) {
        let Some(next) = self.due() else { return };
        let version = self.found.as_ref().and_then(|found| found.version.clone());
        let object = kinds::object(&next, version);
        let parameters = PostParams::default();
        let write = async {
            if self.found.is_some() {
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
            // Another agent has written voters first; the watch will bring them.
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => return self.pause(None),
            Ok(Err(error)) => error.to_string(),
            Err(_elapsed) => "the API server does not answer".to_owned(),
        };
        let hint = "no other node gets a vote, and no address is announced before a node has one";
        self.pause(Some(format!("cannot write the ConfigMap {}/{VOTERS}: {why}; {hint}", self.namespace)));
    }

    /// Postpones the next write of the list of voters by [`AGAIN`], so that the watch first delivers the ConfigMap as
    /// it is now. `why` is the error if the last write has failed.
    fn pause(&mut self, why: Option<String>) {
        self.again = Some((Instant::now() + AGAIN, why));
    }

    /// The voters to write now; `None` if there is nothing to write. The first of these that applies:
    ///
    /// - The voters that this node knows, in a new generation, if the API server has no voters, older voters, or
    ///   different voters of the same generation.
    /// - This node alone, if neither this node nor the API server knows voters, and the Node object of this node
    ///   exists.
    /// - The announcer's proposal, if its generation directly follows the generation in the API server.
    fn due(&self) -> Option<Voters> {
        let can_write = self.voters.as_ref().is_some_and(Watch::is_listed) && self.again.is_none();
        let known = Some(self.known()).filter(|_| can_write)?;
        let found = self.readable();
        if let Some(restored) = known.restored(found) {
            return Some(restored);
        }
        if found.is_none_or(|found| found.names.is_empty()) {
            // The time makes the generation greater than that of a deleted ConfigMap which no agent knows any more.
            let seconds =
                SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
            let generation = known.generation.saturating_add(1).max(seconds);
            let exists = self.cluster.nodes.contains_key(&self.node);
            return exists.then(|| Voters { generation, names: [Arc::clone(&self.node)].into() });
        }
        let next = self.ballots.borrow().next.clone();
        next.filter(|next| {
            found.is_some_and(|found| next.generation.checked_sub(1) == Some(found.generation))
        })
    }
}

/// All pools, the oldest first: if two pools overlap, the older one is used.
fn pools(known: &BTreeMap<ObjectName, (Option<String>, Pool)>) -> Vec<Pool> {
    let mut pools: Vec<_> = known.iter().map(|(name, (created, pool))| (created, name, pool)).collect();
    pools.sort_by_key(|(created, name, _)| (*created, *name));
    pools.into_iter().map(|(.., pool)| pool.clone()).collect()
}
