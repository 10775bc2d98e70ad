//! The task that announces the addresses of Services of type LoadBalancer by BGP: it keeps routes for a BGP daemon, and
//! the configuration of BIRD.
//!
//! ```text
//! source ──Advertised──▶ task ──routes────────▶ kernel table ──▶ BIRD, FRR ──▶ routers
//! writer ──Holders─────▶  │ └───configuration─▶ file, BIRD's socket ──▲
//!                         └─────heartbeat─────▶ fence: removes the routes if heartbeats stop
//! ```

mod bird;
mod control;
pub mod fence;
mod report;
mod table;

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use lb_core::announce::{
    advertisement::Advertised,
    bgp::{AnnouncedAddress, Configuration, Offer, announced, configuration, routes, without_passwords},
    cluster::Member,
};
use lb_datapath::{AnnouncedRoutes, has_ipv4_address};
use tokio::{
    sync::watch,
    time::{self, Instant},
};
use tracing::{debug, info};

pub(crate) use self::bird::Sessions;
pub use self::report::{BgpReport, RouteReport};
use self::{
    bird::Bird,
    fence::Heart,
    table::{Known, Table},
};
use super::{AnnouncementReport, Completeness, HolderMap};
use crate::{
    daemon::{socket, state::State},
    log_few::warn_new,
    metrics::Metrics,
};

/// Interval of heartbeats to the fence, and of checks of the routing table. A change of the inputs causes another
/// heartbeat and check, and a slow answer of BIRD delays both. An unhealthy agent sends probes in place of heartbeats.
const TICK: Duration = Duration::from_secs(1);
/// Interval at which the agent reads the state of the sessions from BIRD.
const LOOK: Duration = Duration::from_secs(5);

/// Where the agent puts the announced routes and the configuration of BIRD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Number of the kernel's routing table that the announced routes are written to.
    pub table: u32,
    /// Paths of BIRD's files; `None` if the agent does not configure BIRD.
    pub bird: Option<BirdPaths>,
}

/// Paths through which the agent configures BIRD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BirdPaths {
    /// BIRD's configuration file, which the agent writes.
    pub file: PathBuf,
    /// BIRD's control socket, through which the agent makes BIRD read the configuration file.
    pub socket: PathBuf,
}

/// Channels from which the task reads what to announce.
#[derive(Debug)]
pub struct Sources {
    /// BGP and other advertisements, BGP peers, and address pools.
    pub advertised: watch::Receiver<Advertised>,
    /// The Services that have a load balancer address.
    pub holders: watch::Receiver<HolderMap>,
    /// Whether the Services are in the kernel; becomes true after `holders` has them.
    pub synchronised: watch::Receiver<bool>,
    /// Which part of the objects the agent has read and written to the kernel. When this changes, `holders` is up to
    /// date, and so is `advertised` if it comes from manifests.
    pub complete: watch::Receiver<Completeness>,
    /// Labels of this node, and whether it may announce; `None` until `advertised` has the objects of the API server.
    pub node: watch::Receiver<Option<Member>>,
    /// Conditions of objects in the API server, as sentences for `status`.
    pub problems: watch::Receiver<Vec<String>>,
}

/// The task that keeps the announced routes, and the configuration of BIRD, up to date.
#[derive(Debug)]
pub struct RouteAnnouncer {
    node: Arc<str>,
    sources: Sources,
    table: Table,
    bird: Option<Bird>,
    heart: Heart,
    state: Arc<State>,
    metrics: Arc<Metrics>,
    /// Whether `wanted` and `configuration` were computed from all objects that the agent can read.
    is_ready: bool,
    /// Which part of the objects the agent had read when it computed `wanted` and `configuration`.
    complete: Completeness,
    /// Whether this node may receive traffic to load balancer addresses: if not, it announces no route.
    is_eligible: bool,
    wanted: BTreeMap<IpNet, Offer>,
    /// The addresses that the routes in `wanted` announce, each with its pool.
    announced: BTreeMap<IpAddr, (Arc<str>, AnnouncedAddress)>,
    /// For each announced address with a route in the table: when this task first found the route.
    since: BTreeMap<IpAddr, Instant>,
    configuration: Configuration,
    /// Whether the router id is derived from the node's name; `None` until the node's addresses are known.
    derives_id: Option<bool>,
    /// When to read the state of the sessions from BIRD again.
    look_at: Instant,
    /// The conditions that `status` shows since the last update; only new conditions are logged.
    conditions: Vec<String>,
}

/// Handles announced routes when a signal stops the agent. Without a fence process, removes the routes at once. With a
/// fence, leaves the routes: the fence removes them unless an agent sends a heartbeat within the fence's `--lifetime`,
/// so a restart withdraws nothing.
///
/// # Errors
/// The socket for a probe of the fence cannot be opened, or the kernel refuses to list or to remove a route.
pub fn stop(options: Option<&Options>) -> anyhow::Result<()> {
    let Some(&Options { table, .. }) = options else { return Ok(()) };
    if Heart::new(table)?.beat(false) {
        info!(table, "the announced routes stay for the next agent, until the fence removes them");
        return Ok(());
    }
    let removed = AnnouncedRoutes::new(table).release()?;
    info!(removed, table, "withdrew the announced routes");
    Ok(())
}

/// Removes the routes that the earlier agent of this data plane announced, if they are in another table than that of
/// this agent, or if this agent has no table. `bpffs` is the BPF file system of the data plane.
///
/// # Errors
/// The directory of pins cannot be read, or the kernel refuses to list or to remove a route.
pub fn leave_other_table(bpffs: &Path, options: Option<&Options>) -> anyhow::Result<()> {
    table::leave(&socket::record(bpffs, "announce-table")?, options.map(|options| options.table))
}

impl RouteAnnouncer {
    /// The task of a node.
    ///
    /// # Errors
    /// A socket cannot be opened.
    pub fn new(
        node: Arc<str>,
        options: Options,
        sources: Sources,
        (state, metrics): (Arc<State>, Arc<Metrics>),
    ) -> anyhow::Result<Self> {
        let Options { table, bird } = options;
        Ok(Self {
            node,
            sources,
            table: Table::new(table),
            bird: bird.map(|BirdPaths { file, socket }| Bird::new(file, socket)),
            heart: Heart::new(table)?,
            state,
            metrics,
            is_ready: false,
            complete: Completeness::default(),
            is_eligible: false,
            wanted: BTreeMap::new(),
            announced: BTreeMap::new(),
            since: BTreeMap::new(),
            configuration: Configuration::default(),
            derives_id: None,
            look_at: Instant::now(),
            conditions: Vec::new(),
        })
    }

    /// Runs the task.
    ///
    /// # Errors
    /// Another task has ended.
    pub async fn run(mut self) -> anyhow::Result<Infallible> {
        let mut tick = time::interval(TICK);
        tick.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
        self.compute();
        loop {
            self.update().await;
            let Sources { advertised, holders, synchronised, complete, node, problems: _ } =
                &mut self.sources;
            tokio::select! {
                // Once the sender of `advertised` or `node` is closed, as without an API server, `changed` fails:
                // `select!` then disables the branch, and the value never changes.
                Ok(()) = advertised.changed() => {}
                Ok(()) = node.changed() => {}
                changed = holders.changed() => changed?,
                changed = synchronised.changed() => changed?,
                changed = complete.changed() => changed?,
                _ = tick.tick() => continue,
            }
            self.compute();
        }
    }

    /// Brings routes and configuration up to date. Sends the heartbeat first, so that the fence does not remove new
    /// routes. An unhealthy agent sends no heartbeat and adds no routes: the fence may have removed the missing routes
    /// because heartbeats stopped.
    async fn update(&mut self) {
        let mut conditions = Vec::new();
        let is_healthy = self.state.health().healthy;
        let fence = self.heart.beat(is_healthy);
        if !fence {
            let why = "no fence runs, so the routes would outlive an agent that hangs or dies";
            let table = self.table.number;
            conditions.push(format!(
                "{why}: run `lb-agent announce fence --announce-table {table}` beside the agent"
            ));
        }
        let objects = self.configuration.errors.iter().chain(&self.configuration.warnings);
        conditions.extend(objects.map(ToString::to_string));
        conditions.extend(self.sources.problems.borrow().iter().cloned());
        // Until this agent has read the objects, the routes and the configuration of an earlier agent stay.
        if self.is_ready {
            let holders = Arc::clone(&self.sources.holders.borrow());
            let known = Known {
                wanted: &self.wanted,
                holders: &holders,
                node: &self.node,
                is_complete: self.complete == Completeness::Whole || !self.is_eligible,
            };
            conditions.extend(self.table.update(&known, is_healthy));
            if let Some(bird) = &mut self.bird {
                conditions
                    .extend(bird.update(&self.configuration, self.complete >= Completeness::Readable).await);
            }
        }
        self.look_at_sessions().await;
        self.report(fence, conditions);
    }

    /// Exports how many BGP sessions are established and how many are down, if the agent configures BIRD and is ready,
    /// at most once per [`LOOK`].
    async fn look_at_sessions(&mut self) {
        let Some(bird) = self.bird.as_ref().filter(|_| self.is_ready && self.look_at <= Instant::now())
        else {
            return;
        };
        let sessions = bird.sessions(&self.configuration, self.complete >= Completeness::Readable).await;
        self.metrics.set_sessions(sessions);
        self.look_at = Instant::now() + LOOK;
    }

    fn compute(&mut self) {
        let Sources { advertised, holders, synchronised, complete, node, problems: _ } = &mut self.sources;
        // `node`, `synchronised` and `complete` are read first: the objects read after them are at least as new.
        let node = node.borrow_and_update();
        self.is_ready = *synchronised.borrow_and_update() && node.is_some();
        self.complete = *complete.borrow_and_update();
        let Some(Member { labels, may_announce, .. }) = &*node else { return };
        let (advertised, holders) = (advertised.borrow_and_update(), holders.borrow_and_update());
        // An unread object may, in its last good state, have asked for routes that an earlier agent announced. This
        // agent does not know that state.
        if advertised.bgp.unread.may_ask_for_routes() {
            self.complete = self.complete.min(Completeness::Readable);
        }
        self.wanted = routes(&advertised, &holders, &self.node, labels);
        self.is_eligible = *may_announce;
        if !self.is_eligible {
            self.wanted.clear();
        }
        let with_pool = |(address, announced): (IpAddr, AnnouncedAddress)| {
            Some((address, (Arc::clone(&advertised.pool_of(address)?.name), announced)))
        };
        self.announced = announced(&self.wanted).into_iter().filter_map(with_pool).collect();
        let configuration = configuration(&advertised, self.table.number, labels);
        self.configuration = if derives_id(&mut self.derives_id) {
            configuration.with_derived_id(&self.node)
        } else {
            configuration
        };
    }

    /// The reports on the addresses that this node announces, or would announce if their routes were in the table.
    fn announcements(&mut self) -> Vec<AnnouncementReport> {
        let has_route = |it: &AnnouncedAddress| it.routes.iter().any(|route| self.table.has(route));
        let is_here = |address: &IpAddr| self.announced.get(address).is_some_and(|(_, it)| has_route(it));
        self.since.retain(|address, _| is_here(address));
        let now = Instant::now();
        for address in self.announced.keys().filter(|address| is_here(address)) {
            self.since.entry(*address).or_insert(now);
        }
        let report = |(address, (pool, announced)): (&IpAddr, &(Arc<str>, AnnouncedAddress))| {
            let age = self.since.get(address).map(|since| now.duration_since(*since));
            AnnouncementReport::by_bgp((*address, pool), announced, &self.node, age)
        };
        self.announced.iter().map(report).collect()
    }

    /// Updates what `status`, `announce list` and `announce routes` show, and logs conditions that the last update did
    /// not have.
    fn report(&mut self, fence: bool, conditions: Vec<String>) {
        warn_new(&mut self.conditions, &conditions);
        let routes = self.wanted.iter().map(|(net, offer)| RouteReport {
            route: net.to_string(),
            services: offer.services().into_iter().map(ToString::to_string).collect(),
            advertisements: offer.advertisements.iter().map(ToString::to_string).collect(),
        });
        let bird_config = match &self.bird {
            Some(bird) => bird.text(&self.configuration, self.complete >= Completeness::Readable),
            None => self.configuration.text("", true),
        };
        let bird_config = without_passwords(&bird_config);
        self.metrics.set_routes(self.wanted.len(), fence);
        self.metrics.set_bird_failed(self.bird.as_ref().is_some_and(Bird::has_failed));
        let report = BgpReport { table: self.table.number, fence, routes: routes.collect(), bird_config };
        let announcements = self.announcements();
        self.state.set_bgp(report, announcements, conditions);
    }
}

/// Whether BIRD needs a router id, because the node has no IPv4 address. Decided once: another id ends all sessions.
fn derives_id(decided: &mut Option<bool>) -> bool {
    if decided.is_none() {
        match has_ipv4_address() {
            Ok(found) => *decided = Some(!found),
            Err(error) => debug!("cannot tell whether BIRD needs a router id: {error}"),
        }
    }
    decided.unwrap_or(false)
}
