//! The task that assigns addresses to the cluster's Services of type LoadBalancer, and its report for `status` and
//! metrics.

use std::{convert::Infallible, sync::Arc};

use anyhow::{Context as _, anyhow};
use ipnet::IpNet;
use lb_core::lease::Timing;
use tokio::sync::watch;

use super::{
    report::{LoadBalancerReport, PoolReport},
    state::State,
    tasks::Tasks,
};
use crate::{
    config::{Config, Source},
    kubernetes::{
        Events,
        addresses::{self, AddressOptions, AddressReport},
    },
    metrics::Metrics,
};

/// Spawns the load balancer controller and the task that publishes its report, if `--load-balancer-controller` is set.
pub(super) fn spawn(
    config: &Config,
    service_cidrs: watch::Receiver<Vec<IpNet>>,
    events: Events,
    (state, metrics): (Arc<State>, Arc<Metrics>),
    stop: &watch::Sender<bool>,
    tasks: &mut Tasks,
) {
    let Source::ApiServer(server) = &config.source else { return };
    if !config.load_balancer_controller {
        return;
    }
    let (report_sender, report) = watch::channel(AddressReport::default());
    let (server, options, stop) = (server.clone(), options(config), stop.subscribe());
    tasks.spawn("load balancers", async move {
        addresses::run(server, options, service_cidrs, events, report_sender, stop).await?;
        Err(anyhow!("the controller of load balancers has ended"))
    });
    tasks.spawn("report of load balancers", follow(report, state, metrics));
}

fn options(config: &Config) -> AddressOptions {
    let pods = config.detect_local.pod_networks();
    AddressOptions {
        node_name: config.node_name.clone(),
        class: config.load_balancer_class.clone(),
        reassign: config.load_balancer_reassign,
        reserved: config.service_ranges.iter().flatten().chain(pods).copied().collect(),
        timing: Timing::default(),
    }
}

async fn follow(
    mut report: watch::Receiver<AddressReport>,
    state: Arc<State>,
    metrics: Arc<Metrics>,
) -> anyhow::Result<Infallible> {
    loop {
        let AddressReport { leader, is_here, conditions, pools } = report.borrow_and_update().clone();
        metrics.set_pools(&pools);
        let pool = |usage: lb_core::load_balancer::PoolUsage| PoolReport {
            name: usage.pool.to_string(),
            used: usage.used,
            total: usage.total,
        };
        let pools = pools.into_iter().map(pool).collect();
        state.set_load_balancers(LoadBalancerReport { leader, is_here, pools }, conditions);
        report.changed().await.context("the controller of load balancers has ended")?;
    }
}
