//! The task that announces load balancers' addresses by BGP: it keeps routes for a BGP daemon, and the configuration of BIRD.
//!
//! ```text
//! folder ──Advertised──▶ task ──routes────────▶ kernel table ──▶ BIRD, FRR ──▶ routers
//! writer ──Holders─────▶  │ └───configuration─▶ file, BIRD's socket ──▲
//!                         └─────heartbeat─────▶ fence: removes the routes if heartbeats stop
//! ```

mod bird;
pub mod fence;
mod report;

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    net::IpAddr,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use lb_core::announce::{
    advertisement::{Advertised, labels_of},
    bgp::{Configuration, Offer, configuration, routes, without_passwords},
};
use lb_datapath::AnnouncedRoutes;
use tokio::{sync::watch, time};
use tracing::{info, warn};

pub use self::report::{BgpReport, RouteReport};
use self::{bird::Bird, fence::Heart};
use super::HolderMap;
use crate::{daemon::state::State, kubernetes::NodeInfo};

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
    /// Whether the Services are in the kernel.
    pub synchronised: watch::Receiver<bool>,
    /// Whether the node may get traffic of load balancers.
    pub node: watch::Receiver<NodeInfo>,
}

/// The task.
#[derive(Debug)]
pub struct RouteAnnouncer {
    node: Arc<str>,
    table: u32,
    sources: Sources,
    routes: AnnouncedRoutes,
    bird: Option<Bird>,
    heart: Heart,
    state: Arc<State>,
    wanted: BTreeMap<IpNet, Offer>,
    configuration: Configuration,
    /// What needs attention, as it was logged.
    conditions: Vec<String>,
}

/// Withdraws all routes of an agent that a signal stops.
///
/// # Errors
/// The kernel refuses to remove a route.
pub fn withdraw(options: Option<&Options>) -> anyhow::Result<()> {
    let Some(options) = options else { return Ok(()) };
    let (_, removed) = AnnouncedRoutes::new(options.table).keep(&BTreeSet::new())?;
    info!(removed, table = options.table, "withdrew the announced routes");
    Ok(())
}

impl RouteAnnouncer {
    /// The task of a node.
    ///
    /// # Errors
    /// A socket cannot be opened, or routes of an earlier table cannot be removed.
    pub fn new(
        node: Arc<str>,
        options: Options,
        sources: Sources,
        state: Arc<State>,
    ) -> anyhow::Result<Self> {
        let Options { table, bird } = options;
        AnnouncedRoutes::remove_others(Some(table))?;
        Ok(Self {
            node,
            table,
            sources,
            routes: AnnouncedRoutes::new(table),
            bird: bird.map(|BirdPaths { file, socket }| Bird::new(file, socket)),
            heart: Heart::new(table)?,
            state,
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
            let Sources { advertised, holders, synchronised, node } = &mut self.sources;
            tokio::select! {
                // These two fail where there is no such source, and then never change.
                Ok(()) = advertised.changed() => {}
                Ok(()) = node.changed() => {}
                changed = holders.changed() => changed?,
                changed = synchronised.changed() => changed?,
                _ = tick.tick() => continue,
            }
            self.compute();
        }
    }

    /// Brings routes and configuration up to date. The heartbeat comes first, so that the fence lets new routes be; an agent
    /// that does not follow its Services sends none.
    async fn update(&mut self) {
        let mut conditions = Vec::new();
        let fence = self.heart.beat(self.state.health().healthy);
        if !fence {
            let why = "no fence runs, so the routes would outlive an agent that hangs or dies";
            let table = self.table;
            conditions.push(format!(
                "{why}: run `lb-agent announce fence --announce-table {table}` beside the agent"
            ));
        }
        let objects = self.configuration.errors.iter().chain(&self.configuration.warnings);
        conditions.extend(objects.map(ToString::to_string));
        // Until the agent knows all objects, routes and configuration of an earlier one stay.
        if *self.sources.synchronised.borrow() {
            conditions.extend(self.keep());
            if let Some(bird) = &mut self.bird {
                conditions.extend(bird.update(&self.configuration).await);
            }
        }
        self.report(fence, conditions);
    }

    fn compute(&mut self) {
        let Sources { advertised, holders, synchronised, node } = &mut self.sources;
        let (advertised, holders) = (advertised.borrow_and_update(), holders.borrow_and_update());
        let (_, eligible) = (synchronised.borrow_and_update(), node.borrow_and_update().eligible);
        let labels = labels_of(&self.node);
        self.wanted = routes(&advertised, &holders, &self.node, &labels);
        if !eligible {
            self.wanted.clear();
        }
        self.configuration = configuration(&advertised, self.table, &labels);
    }

    /// Brings the table up to date; returns why that failed.
    fn keep(&self) -> Option<String> {
        let ranges: BTreeSet<(IpAddr, u8)> =
            self.wanted.keys().map(|net| (net.addr(), net.prefix_len())).collect();
        match self.routes.keep(&ranges) {
            Ok((0, 0)) => None,
            Ok((added, removed)) => {
                info!(added, removed, table = self.table, "updated the announced routes");
                None
            }
            Err(error) => Some(error.to_string()),
        }
    }

    /// Tells `status` and `announce routes`, and logs what is new.
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
        let bird_config = without_passwords(&self.configuration.text);
        let report = BgpReport { table: self.table, fence, routes: routes.collect(), bird_config };
        self.state.set_bgp(report, conditions);
    }
}
