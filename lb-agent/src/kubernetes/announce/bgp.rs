//! Reads from the API server what is announced by BGP: MetalLB's kinds, and the Node of this agent.

use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

use kube::Client;
use lb_core::{
    announce::{
        advertisement::Advertised,
        bgp::{Objects, Unread},
        cluster::Member,
    },
    api::{BfdProfile, BgpAdvertisement, BgpPeer, Community, IpAddressPool},
    load_balancer::Pool,
    model::ObjectName,
};
use tokio::sync::watch;

use super::{kinds::AnyNode, passwords::Passwords, pools};
use crate::kubernetes::{
    client::{ApiServer, KubernetesError, watching_client},
    conditions::ServerConditions,
    crds::{Crd, MissingCrds},
    kind::{self, Kind},
    watch::{Watch, at, publish, replace},
};

/// The channels through which this source publishes. Each holds the latest value.
#[derive(Debug)]
pub struct BgpPublished {
    /// The advertisements, pools and peers.
    pub advertised: watch::Sender<Advertised>,
    /// The Node of this agent; `None` until every kind has been listed.
    pub node: watch::Sender<Option<Member>>,
    /// Current conditions of objects and of the API server, as sentences for `lb-agent status`.
    pub problems: watch::Sender<Vec<String>>,
}

/// Watches what is announced by BGP. Runs forever.
///
/// # Errors
///
/// A configuration without a usable API server. A server that does not answer is retried forever.
pub async fn run_bgp(
    server: ApiServer,
    node: Arc<str>,
    published: BgpPublished,
) -> Result<(), KubernetesError> {
    let (client, _) = watching_client(server).await?;
    Follower::new(&client, &node, published).follow().await
}

struct Follower {
    published: BgpPublished,
    server: ServerConditions,
    missing_crds: MissingCrds,
    advertisements: Watch<BgpAdvertisement>,
    peers: Watch<BgpPeer>,
    communities: Watch<Community>,
    profiles: Watch<BfdProfile>,
    pools: Watch<IpAddressPool>,
    node: Watch<AnyNode>,
    passwords: Passwords,
    objects: Objects,
    known_pools: BTreeMap<ObjectName, (Option<String>, Pool)>,
    known_node: Option<Member>,
}

/// A watch of all objects of the kind `K`.
fn every<K: Kind>(client: &Client) -> Watch<K> {
    Watch::new(client.clone(), kind::all(), SystemTime::UNIX_EPOCH)
}

impl Follower {
    fn new(client: &Client, node: &str, published: BgpPublished) -> Self {
        Self {
            published,
            server: ServerConditions::default(),
            missing_crds: MissingCrds::new("an agent that starts now begins to announce no route by BGP"),
            advertisements: every(client),
            peers: every(client),
            communities: every(client),
            profiles: every(client),
            pools: every(client),
            node: Watch::new(client.clone(), kind::named_object(node), SystemTime::UNIX_EPOCH),
            passwords: Passwords::new(client.clone()),
            objects: Objects::default(),
            known_pools: BTreeMap::new(),
            known_node: None,
        }
    }

    async fn follow(mut self) -> Result<(), KubernetesError> {
        const ENDED: KubernetesError = KubernetesError::Ended;
        loop {
            tokio::select! {
                changes = self.advertisements.next() => {
                    replace(&mut self.objects.advertisements, changes.ok_or(ENDED)?);
                }
                changes = self.peers.next() => {
                    replace(&mut self.objects.peers, changes.ok_or(ENDED)?);
                }
                changes = self.communities.next() => {
                    replace(&mut self.objects.communities, changes.ok_or(ENDED)?);
                }
                changes = self.profiles.next() => {
                    replace(&mut self.objects.profiles, changes.ok_or(ENDED)?);
                }
                changes = self.pools.next() => replace(&mut self.known_pools, changes.ok_or(ENDED)?),
                changes = self.node.next() => {
                    // A deleted Node becomes `None`, so that this node announces nothing.
                    for (_, member) in changes.ok_or(ENDED)? {
                        self.known_node = member;
                    }
                }
                () = at(self.passwords.due()) => {}
            }
            self.passwords.read(&self.objects.peers).await;
            self.publish();
        }
    }

    /// Whether the API server has sent a complete list of each kind. False as long as it has never had the CRD of a
    /// kind.
    fn is_listed(&self) -> bool {
        self.pools.is_listed()
            && self.node.is_listed()
            && self.advertisements.is_listed()
            && self.peers.is_listed()
            && self.communities.is_listed()
            && self.profiles.is_listed()
    }

    /// The objects that routes or sessions of an earlier agent may come from. (An unread Community or BFDProfile counts
    /// as missing, which holds back the sessions that refer to it.)
    fn unread(&self) -> Unread {
        Unread {
            advertisements: self.advertisements.unread_names(),
            peers: self.peers.unread_names(),
            pools: self.pools.unread_names(),
        }
    }

    fn publish(&mut self) {
        let mut bgp = Objects { unread: self.unread(), ..self.objects.clone() };
        let of_passwords = self.passwords.fill(&mut bgp.peers);
        if self.is_listed() {
            let pools = pools(&self.known_pools);
            // `advertised` must come first: the announcer reads it once `node` is known.
            publish(&self.published.advertised, Advertised { bgp, pools, ..Advertised::default() });
            let gone = Member { may_announce: false, ..Member::default() };
            publish(&self.published.node, Some(self.known_node.clone().unwrap_or(gone)));
        }
        let Self { advertisements, peers, communities, profiles, pools, node, .. } = self;
        let failures = [
            advertisements.failure(),
            peers.failure(),
            communities.failure(),
            profiles.failure(),
            pools.failure(),
            node.failure(),
        ];
        let crds = [
            Crd::of(advertisements),
            Crd::of(peers),
            Crd::of(communities),
            Crd::of(profiles),
            Crd::of(pools),
        ];
        let missing = self.missing_crds.update(&crds);
        let problems = advertisements.problems().chain(pools.problems()).chain(peers.problems());
        let problems = problems.chain(communities.problems()).chain(profiles.problems());
        let problems = problems.chain(of_passwords.iter().map(String::as_str)).chain(missing.as_deref());
        let problems = self.server.update(failures.into_iter().flatten(), problems);
        publish(&self.published.problems, problems);
    }
}
