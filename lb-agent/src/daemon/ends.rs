//! Ends idle connections, and connections to backends that a Service has lost, if the Service sets a timeout for such
//! connections.

use std::sync::Arc;

use lb_core::connection_rules::{Drains, End, Rules};
use tokio::task;
use tracing::info;

use super::published::Published;
use crate::metrics::Metrics;
use lb_datapath::{Conntrack, DatapathError, NodeSockets, ServiceConnection};

/// The state by which [`Self::pass`] selects the connections to end: the timeouts of Services, and which backends each
/// Service has lost, and when.
#[derive(Debug)]
pub(super) struct Ends {
    rules: Published<Arc<Rules>>,
    sockets: NodeSockets,
    drains: Drains,
}

/// Number of connections that one pass has ended: idle connections, and connections to lost backends.
#[derive(Clone, Copy, Debug, Default)]
struct Ended {
    idle: usize,
    drained: usize,
}

impl Ends {
    pub(super) fn new(rules: Published<Arc<Rules>>, sockets: NodeSockets) -> Self {
        Self { rules, sockets, drains: Drains::default() }
    }

    /// Ends the connections whose timeout has passed: deletes their flows, after which the programs answer the client's
    /// next TCP segment with a RST, and lets the kernel close TCP sockets of the node. (UDP sockets wait for no
    /// timeout: the connection tracking task closes them as soon as their backend is gone.)
    pub(super) async fn pass(
        &mut self,
        conntrack: Conntrack,
        metrics: &Metrics,
    ) -> anyhow::Result<Result<(), DatapathError>> {
        let rules = Arc::clone(&self.rules.read());
        if rules.is_empty() {
            self.drains = Drains::default();
            return Ok(Ok(()));
        }
        let (mut drains, sockets) = (std::mem::take(&mut self.drains), self.sockets.clone());
        let (result, drains, ended) = task::spawn_blocking(move || {
            let now = Conntrack::now();
            let mut ended = Ended::default();
            let result = conntrack.end(
                |service| rules.contains_key(&service),
                |forward, reply| {
                    let end = drains.end(&rules, forward, reply, now);
                    ended.count(end);
                    end.is_some()
                },
            );
            let mut of_sockets = Vec::new();
            let end = |connection: &ServiceConnection| {
                let ServiceConnection { service, backend, idle } = *connection;
                drains.end_of(&rules, (service, (backend.address, backend.port)), idle, now)
            };
            let closed = sockets.destroy_tcp(end, &mut of_sockets);
            of_sockets.into_iter().for_each(|end| ended.count(Some(end)));
            // If the walk over the flows failed, it may not have found all connections, so the pass is not complete.
            // (`closed` does not count, because closing sockets always fails on kernels that do not support it.)
            if result.is_ok() {
                drains.end_pass(now);
            }
            let result = result.and(closed);
            (result, drains, ended)
        })
        .await?;
        self.drains = drains;
        let Ended { idle, drained } = ended;
        metrics.ended_connections(idle, drained);
        if idle + drained > 0 {
            info!(idle, drained, "ended connections by the timeouts of their Services");
        }
        Ok(result)
    }
}

impl Ended {
    fn count(&mut self, end: Option<End>) {
        match end {
            Some(End::Idle) => self.idle += 1,
            Some(End::Drained) => self.drained += 1,
            None => {}
        }
    }
}
