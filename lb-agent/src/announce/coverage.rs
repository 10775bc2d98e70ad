//! The task that reports load balancer addresses that no advertisement covers.

use std::{convert::Infallible, future, sync::Arc};

use anyhow::Context as _;
use lb_core::announce::{
    advertisement::Advertised,
    coverage::{Protocols, Unannounced, Uncovered, unannounced, uncovered},
};
use tokio::sync::watch;

use super::{AnnouncementReport, HolderMap};
use crate::{daemon::state::State, log_few::warn_new, metrics::Metrics};

/// The task that reports addresses which no advertisement covers, as conditions and as a metric.
#[derive(Debug)]
pub struct Coverage {
    /// Pools and advertisements at layer 2; `None` if this agent announces nothing at layer 2.
    pub layer_2: Option<watch::Receiver<Advertised>>,
    /// Pools and objects for BGP; `None` if this agent announces nothing by BGP.
    pub bgp: Option<watch::Receiver<Advertised>>,
    /// The Services that have a load balancer address.
    pub holders: watch::Receiver<HolderMap>,
}

impl Coverage {
    /// Runs the task.
    ///
    /// # Errors
    /// Another task has ended.
    pub async fn run(mut self, (state, metrics): (Arc<State>, Arc<Metrics>)) -> anyhow::Result<Infallible> {
        let mut conditions: Vec<String> = Vec::new();
        loop {
            let (found, unannounced) = self.find();
            metrics.set_uncovered(found.iter().map(|uncovered| uncovered.addresses.len()).sum());
            let now: Vec<String> = found.iter().map(ToString::to_string).collect();
            warn_new(&mut conditions, &now);
            state.set_coverage(now, unannounced.iter().map(AnnouncementReport::unannounced).collect());
            let Self { layer_2, bgp, holders } = &mut self;
            let changed = tokio::select! {
                changed = changed(layer_2) => changed,
                changed = changed(bgp) => changed,
                changed = holders.changed() => changed,
            };
            changed.context("the source of Services has ended")?;
        }
    }

    fn find(&mut self) -> (Vec<Uncovered>, Vec<Unannounced>) {
        let Self { layer_2, bgp, holders } = self;
        let layer_2 = layer_2.as_mut().map(watch::Receiver::borrow_and_update);
        let bgp = bgp.as_mut().map(watch::Receiver::borrow_and_update);
        let protocols = Protocols { layer_2: layer_2.as_deref(), bgp: bgp.as_deref() };
        let holders = holders.borrow_and_update();
        (uncovered(protocols, &holders), unannounced(protocols, &holders))
    }
}

/// Waits for a change of an optional channel; without a channel, forever.
async fn changed(channel: &mut Option<watch::Receiver<Advertised>>) -> Result<(), watch::error::RecvError> {
    match channel {
        Some(channel) => channel.changed().await,
        None => future::pending().await,
    }
}
