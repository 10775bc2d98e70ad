//! The servers of `healthCheckNodePort`: one for each Service and address.

use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    fmt, future,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use axum::{Router, extract::State as Shared, response::IntoResponse};
use futures_util::future::join_all;
use lb_core::{family::Family, health_checks::HealthCheck, model::ObjectName};
use tokio::{
    sync::{oneshot, watch},
    task::JoinHandle,
    time::{self, Instant},
};
use tracing::{debug, info, warn};

use super::{answer::answer, listen::listen};
use crate::{http_server, metrics::Metrics};

/// Pause after the first failed attempt to listen. Each further pause is twice as long, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How long a closing server waits for responses that are still being sent.
const LAST_MOMENT: Duration = Duration::from_secs(1);

/// For each Service with a `healthCheckNodePort`: this port, and for each family the number of the Service's endpoints
/// on this node.
pub type Checks = BTreeMap<ObjectName, HealthCheck>;

/// Callback that reports a Service whose server cannot be started, and why.
pub type ReportFailure = dyn Fn(&ObjectName, &str) + Send + Sync;

/// The servers' view of the agent: its health, its node's name, and where the servers report failures and metrics.
pub struct Report {
    /// Returns whether the agent is healthy.
    pub healthy: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Called with the reason when a server cannot be started, except when the previous attempt had the same reason.
    pub failed: Box<ReportFailure>,
    /// The metrics that receive the numbers of running and of failed servers.
    pub metrics: Arc<Metrics>,
    /// Name of this node.
    pub node_name: Arc<str>,
}

impl fmt::Debug for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Report").finish_non_exhaustive()
    }
}

/// A server's Service, and the address that it listens on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ListenAddress {
    service: ObjectName,
    address: SocketAddr,
}

/// Starts and stops servers as Services and addresses change.
#[derive(Debug)]
pub struct Servers {
    checks: watch::Receiver<Checks>,
    addresses: watch::Receiver<BTreeSet<IpAddr>>,
    report: Report,
    running: BTreeMap<ListenAddress, Server>,
    failing: BTreeMap<ListenAddress, Failure>,
}

#[derive(Debug)]
struct Server {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

/// Why a server could not be started, and when to try again.
#[derive(Debug)]
struct Failure {
    error: String,
    retry: Instant,
    pause: Duration,
}

impl Servers {
    /// Prepares the servers of `checks` on `addresses`; [`Self::run`] starts them. An unspecified address stands for
    /// all addresses of its family.
    pub const fn new(
        checks: watch::Receiver<Checks>,
        addresses: watch::Receiver<BTreeSet<IpAddr>>,
        report: Report,
    ) -> Self {
        Self { checks, addresses, report, running: BTreeMap::new(), failing: BTreeMap::new() }
    }

    /// Runs forever.
    ///
    /// # Errors
    /// All senders of checks are closed.
    pub async fn run(mut self) -> anyhow::Result<Infallible> {
        loop {
            self.keep_up().await;
            let retry = self.failing.values().map(|failure| failure.retry).min();
            tokio::select! {
                changed = self.checks.changed() => changed.context("the writer has ended")?,
                () = change(&mut self.addresses) => {}
                () = at(retry) => {}
            }
        }
    }

    /// Closes servers that are no longer wanted, and starts missing ones.
    async fn keep_up(&mut self) {
        let wanted = wanted(&self.checks.borrow_and_update(), &self.addresses.borrow_and_update());
        self.failing.retain(|place, _| wanted.contains(place));
        let closing: Vec<_> = self.running.extract_if(.., |place, _| !wanted.contains(place)).collect();
        if !closing.is_empty() {
            // Retries failed servers at once, because a server that is closing may free the port that they need.
            self.failing.values_mut().for_each(|failure| failure.retry = Instant::now());
            join_all(closing.into_iter().map(|(place, server)| server.close(place))).await;
        }
        for place in wanted {
            let waits = self.failing.get(&place).is_some_and(|failure| failure.retry > Instant::now());
            if !waits && !self.running.contains_key(&place) {
                self.open(place);
            }
        }
        self.report.metrics.set_health_check_servers(self.running.len(), self.failing.len());
    }

    fn open(&mut self, place: ListenAddress) {
        match listen(place.address) {
            Ok(listener) => {
                info!(service = %place.service, address = %place.address, "serving the health of a Service");
                self.failing.remove(&place);
                let asked = Asked {
                    service: place.service.clone(),
                    family: Family::of(place.address.ip()),
                    checks: self.checks.clone(),
                    healthy: Arc::clone(&self.report.healthy),
                };
                let router = Router::new().fallback(respond).with_state(asked);
                let (stop, stopped) = oneshot::channel();
                // The server begins to stop when the sender `stop` is dropped; nothing is ever sent.
                let stop_requested = async move {
                    let (Ok(()) | Err(_)) = stopped.await;
                };
                let most = http_server::MOST_OF_PROBES;
                let task = tokio::spawn(http_server::serve_until(listener, router, most, stop_requested));
                self.running.insert(place, Server { stop, task });
            }
            Err(error) => self.failed(place, error.to_string()),
        }
    }

    /// Records that a server cannot be started, and schedules a retry. Reports a reason only if it is new.
    fn failed(&mut self, place: ListenAddress, error: String) {
        let earlier = self.failing.get(&place);
        let ListenAddress { service, address } = &place;
        if earlier.is_some_and(|earlier| earlier.error == error) {
            debug!(%service, %address, error, "still cannot serve the health of a Service");
        } else {
            warn!(
                %service, %address, error,
                "cannot serve the health of a Service: load balancers will not send its traffic here; free the port \
                 or change the Service's healthCheckNodePort; trying again"
            );
            let (node, port) = (&self.report.node_name, address.port());
            let service_name = service.to_string();
            (self.report.failed)(
                service,
                &format!(
                    "node {node} failed to start healthcheck {service_name:?} on port {port}: listen tcp {address}: {error}"
                ),
            );
        }
        let pause = earlier.map_or(FIRST_PAUSE, |earlier| LONGEST_PAUSE.min(earlier.pause * 2));
        self.failing.insert(place, Failure { error, retry: Instant::now() + pause, pause });
    }
}

impl Server {
    /// Closes the server's socket. Waits for pending responses, for [`LAST_MOMENT`] at most.
    async fn close(mut self, place: ListenAddress) {
        info!(service = %place.service, address = %place.address, "closing the server of a Service's health");
        drop(self.stop);
        if time::timeout(LAST_MOMENT, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

/// The servers that must run: for each Service, one at each listen address that belongs to a family of the Service.
fn wanted(checks: &Checks, addresses: &BTreeSet<IpAddr>) -> BTreeSet<ListenAddress> {
    let places = |(service, check): (&ObjectName, &HealthCheck)| {
        let (service, check) = (service.clone(), *check);
        let served = addresses.iter().filter(move |ip| check.local_endpoints(Family::of(**ip)).is_some());
        served.map(move |ip| ListenAddress {
            service: service.clone(),
            address: SocketAddr::new(*ip, check.port),
        })
    };
    checks.iter().flat_map(places).collect()
}

/// The data from which a server answers a request.
#[derive(Clone)]
struct Asked {
    service: ObjectName,
    family: Family,
    checks: watch::Receiver<Checks>,
    healthy: Arc<dyn Fn() -> bool + Send + Sync>,
}

async fn respond(Shared(asked): Shared<Asked>) -> impl IntoResponse {
    // `None` if the Service was deleted while the connection was open.
    let check = asked.checks.borrow().get(&asked.service).copied();
    let local_endpoints = check.and_then(|check| check.local_endpoints(asked.family)).unwrap_or(0);
    answer(&asked.service, local_endpoints, (asked.healthy)())
}

/// Waits for the next change of the watched value; forever if the channel's sender is closed.
async fn change<T>(watched: &mut watch::Receiver<T>) {
    if watched.changed().await.is_err() {
        future::pending::<()>().await;
    }
}

/// Sleeps until `then`; forever if it is `None`.
async fn at(then: Option<Instant>) {
    match then {
        Some(then) => time::sleep_until(then).await,
        None => future::pending().await,
    }
}

#[cfg(test)]
mod tests;
