//! The task that announces load balancers' addresses by BGP: it keeps routes for a BGP daemon, and the configuration of
//! BIRD.
//!
//! ```text
//! source ──Advertised──▶ task ──routes────────▶ kernel table ──▶ BIRD, FRR ──▶ routers
//! writer ──Holders─────▶  │ └───configuration─▶ file, BIRD's socket ──▲
//!                         └─────heartbeat─────▶ fence: removes the routes if heartbeats stop
//! ```

mod bird;
pub mod fence;
mod report;
mod table;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use lb_core::announce::{
    advertisement::Advertised,
    bgp::{Configuration, Offer, configuration, routes, without_passwords},
    cluster::Member,
};
use lb_datapath::AnnouncedRoutes;
use tokio::{sync::watch, time};
use tracing::{info, warn};

pub use self::report::{BgpReport, RouteReport};
use self::{
    bird::Bird,
    fence::Heart,
    table::{Known, Table},
};
use super::HolderMap;
use crate::{
    daemon::{socket, state::State},
    metrics::Metrics,
};

/// Interval of heartbeats, and of looks at the table.
const TICK: Duration = Duration::from_secs(1);

/// Where routes and configuration go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The kernel's table.
    pub table: u32,
    /// BIRD, if the agent configures it.
    pub bird: Option<BirdPaths>,
}

/// The files of BIRD.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BirdPaths {
    /// The configuration.
    pub file: PathBuf,
    /// The control socket.
    pub socket: PathBuf,
}

/// What the task reads.
#[derive(Debug)]
pub struct Sources {
    /// Advertisements, peers and pools.
    pub advertised: watch::Receiver<Advertised>,
    /// Services with addresses.
    pub holders: watch::Receiver<HolderMap>,
    /// Whether the Services are in the kernel. Becomes true after `holders` has them.
    pub synchronised: watch::Receiver<bool>,
    /// Whether every object has been read. Becomes true after `advertised` and `holders` have them.
    pub complete: watch::Receiver<bool>,
    /// The labels of the node, and whether it may announce; `None` until `advertised` has what the API server has.
    pub node: watch::Receiver<Option<Member>>,
    /// The problems of objects in the API server.
    pub problems: watch::Receiver<Vec<String>>,
}

/// The task that keeps the routes, and the configuration of BIRD, up to date.
#[derive(Debug)]
pub struct RouteAnnouncer {
    node: Arc<str>,
    sources: Sources,
    table: Table,
    bird: Option<Bird>,
    heart: Heart,
    state: Arc<State>,
    metrics: Arc<Metrics>,
    /// Whether `wanted` and `configuration` come from all objects that can be read.
    is_ready: bool,
    /// Whether they come from all objects.
    is_complete: bool,
    /// Whether the node may get traffic of load balancers.
    is_eligible: bool,
    wanted: BTreeMap<IpNet, Offer>,
    configuration: Configuration,
    /// What needs attention, as it was logged.
    conditions: Vec<String>,
}

/// Handles announced routes when a signal stops the agent. Without a fence process, removes the routes at once. With
/// one, leaves them: the fence removes them if no agent has started within its lifetime, so a restart withdraws nothing.
///
/// # Errors
/// The kernel refuses to list or to remove a route.
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

/// Removes the routes of the earlier agent of this data plane if it had another table, or if this one has none. `bpffs`
/// is its BPF file system.
///
/// # Errors
/// The kernel refuses to list or to remove a route.
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
            is_complete: false,
            is_eligible: false,
            wanted: BTreeMap::new(),
            configuration: Configuration::default(),
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
                // These two fail if their senders are closed, as without an API server; then they never change.
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

    /// Brings routes and configuration up to date. The heartbeat comes first, so that the fence lets new routes be. An
    /// agent that does not follow its Services sends none, and adds no routes: the fence may have removed them.
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
        // Until the agent has read the objects, routes and configuration of an earlier one stay.
        if self.is_ready {
            let holders = Arc::clone(&self.sources.holders.borrow());
            let known = Known {
                wanted: &self.wanted,
                holders: &holders,
                node: &self.node,
                is_complete: self.is_complete || !self.is_eligible,
            };
            conditions.extend(self.table.update(&known, is_healthy));
            if let Some(bird) = &mut self.bird {
                conditions.extend(bird.update(&self.configuration, self.is_complete).await);
            }
        }
        self.report(fence, conditions);
    }

    fn compute(&mut self) {
        let Sources { advertised, holders, synchronised, complete, node, problems: _ } = &mut self.sources;
        // These come first: what is read after them is at least as new.
        let node = node.borrow_and_update();
        self.is_ready = *synchronised.borrow_and_update() && node.is_some();
        self.is_complete = *complete.borrow_and_update();
        let Some(Member { labels, may_announce, .. }) = &*node else { return };
        let (advertised, holders) = (advertised.borrow_and_update(), holders.borrow_and_update());
        self.wanted = routes(&advertised, &holders, &self.node, labels);
        self.is_eligible = *may_announce;
        if !self.is_eligible {
            self.wanted.clear();
        }
        self.configuration = configuration(&advertised, self.table.number, labels);
    }

    /// Updates what `status` and `announce routes` show, and logs new conditions.
    fn report(&mut self, fence: bool, conditions: Vec<String>) {
        for condition in conditions.iter().filter(|condition| !self.conditions.contains(condition)) {
            warn!("{condition}");
        }
        self.conditions.clone_from(&conditions);
        let texts = |names: &BTreeSet<_>| names.iter().map(ToString::to_string).collect();
        let routes = self.wanted.iter().map(|(net, Offer { services, advertisements })| RouteReport {
            route: net.to_string(),
            services: texts(services),
            advertisements: texts(advertisements),
        });
        let bird_config = match &self.bird {
            Some(bird) => bird.text(&self.configuration, self.is_complete),
            None => self.configuration.text("", true),
        };
        let bird_config = without_passwords(&bird_config);
        self.metrics.set_routes(self.wanted.len(), fence);
        let report = BgpReport { table: self.table.number, fence, routes: routes.collect(), bird_config };
        self.state.set_bgp(report, conditions);
    }
}
