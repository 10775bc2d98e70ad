//! Node-local DNS (`--dns-intercept`): while this agent answers, the programs redirect to it the queries that this
//! node's pods send to the cluster IP of the DNS Service.
//!
//! The server listens at the node's addresses, on a port of its own. Every [`ROUND`] the task sends each
//! address a query. If the answer comes within [`PATIENCE`], the task renews the map entry that makes the programs
//! redirect queries; the entry expires [`LEASE`] after the task's query was sent. So a server that hangs gets no more
//! queries after that time. (If the agent has crashed, its socket is gone; the programs notice this at the next
//! packet.)

use std::{
    collections::BTreeMap,
    convert::Infallible,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use lb_common::{Address, DnsIntercept, Outcome, ServiceKey, dns, protocol};
use lb_core::{
    dns::ClusterDns,
    model::{NodeAddresses, ObjectName},
};
use lb_datapath::{DnsIntercepts, Stats, monotonic_nanoseconds};
use lb_dns::{BindError, Forwarder, Names, Server};
use tokio::{
    sync::watch,
    task::{JoinHandle, block_in_place},
    time::{MissedTickBehavior, interval, sleep, timeout},
};
use tracing::{debug, info, warn};

use super::{RETRY, evidence::Evidence};
use crate::daemon::{report::InterceptReport, state::State};

/// Interval of the agent's own queries.
const ROUND: Duration = Duration::from_millis(100);
/// How long the agent waits for the answer to one of its own queries.
const PATIENCE: Duration = Duration::from_millis(200);
/// How long the programs redirect queries to the server after the agent sent the last query that the server answered.
const LEASE: Duration = Duration::from_millis(300);
/// A longer pause between two rounds means that the agent's process was stopped.
const STOPPED: Duration = Duration::from_millis(500);
/// How long an agent that was stopped waits until it renews entries again: first it has to learn what has changed.
const CATCH_UP: Duration = Duration::from_secs(1);
/// How long the server still answers when the agent stops, for queries that are on their way.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

/// The task of node-local DNS.
pub(super) struct Intercept {
    pub(super) service: ObjectName,
    pub(super) port: u16,
    /// The cluster domain.
    pub(super) domain: String,
    pub(super) names: Arc<Names>,
    /// The forwarder, if its upstream servers are the endpoints of the Service.
    pub(super) forwarder: Option<Arc<Forwarder>>,
    /// The addresses of `--dns-bind-address`, at which the agent answers as well.
    pub(super) own: Vec<SocketAddr>,
    pub(super) map: DnsIntercepts,
    /// The programs' counters, one of which counts the queries that they redirect to this agent.
    pub(super) packets: Stats,
    pub(super) addresses: watch::Receiver<NodeAddresses>,
    pub(super) stop: watch::Receiver<bool>,
    pub(super) state: Arc<State>,
}

/// A server at one address of the node.
struct Listener {
    address: SocketAddr,
    server: Arc<Server>,
    task: JoinHandle<Infallible>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Intercept {
    /// Runs the task. `server_for` makes the server for an address of the node. This server also accepts queries from
    /// that address, because the agent's own queries come from there.
    pub(super) async fn run(self, server_for: impl Fn(IpAddr) -> Server) -> anyhow::Result<Infallible> {
        let mut listeners = Listeners::default();
        let mut until = BTreeMap::new();
        let mut queries = FuturesUnordered::new();
        let mut evidence = Evidence::default();
        let mut endpoints = Vec::new();
        let mut rounds = interval(ROUND);
        rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut last, mut caught_up) = (Instant::now(), Instant::now());
        while !*self.stop.borrow() {
            rounds.tick().await;
            let now = Instant::now();
            if now.duration_since(last) > STOPPED {
                caught_up = now + CATCH_UP;
            }
            last = now;
            let primary = self.addresses.borrow().primary.clone();
            let wanted = primary.iter().map(|ip| SocketAddr::new(*ip, self.port)).collect();
            listeners.keep(wanted, &server_for).await;
            until.retain(|address, _| listeners.serves(*address));
            let led = block_in_place(|| self.led());
            let blocked = evidence.blocked(led, listeners.received(), now);
            let dns = self.names.cluster_dns(&self.service);
            self.follow_endpoints(&dns, &mut endpoints);
            let may_renew = now >= caught_up && !blocked;
            if !may_renew || !self.renew(&dns.cluster_ips, &listeners, &mut queries, &mut until).await {
                self.write(&entries(&dns.cluster_ips, &until));
            }
            self.report(&dns, &until, &listeners, blocked);
        }
        self.write(&entries(&self.names.cluster_dns(&self.service).cluster_ips, &withdrawn(&until)));
        sleep(LAST_ANSWERS).await;
        drop(self.stop);
        std::future::pending().await
    }

    /// Sets the forwarder's upstream servers to the endpoints of the Service, if these have changed. Does nothing if
    /// the forwarder uses other upstream servers.
    fn follow_endpoints(&self, dns: &ClusterDns, known: &mut Vec<SocketAddr>) {
        if let Some(forwarder) = self.forwarder.as_ref().filter(|_| *known != dns.endpoints) {
            forwarder.servers().set(&dns.endpoints, &self.own);
            known.clone_from(&dns.endpoints);
        }
    }

    /// Writes the entries of the map `DNS_INTERCEPT`. If that fails, the present leases expire, and the next round
    /// tries again.
    fn write(&self, entries: &BTreeMap<ServiceKey, DnsIntercept>) {
        if let Err(error) = block_in_place(|| self.map.set(entries)) {
            debug!("cannot renew the leases of node-local DNS: {error}; trying again");
        }
    }

    /// Sends each listener a query, and renews the lease of each listener as soon as it answers. Takes answers for one
    /// [`ROUND`], also late ones to earlier queries, so that a listener that does not answer delays no other lease.
    /// Returns whether it has renewed a lease, and so written all entries.
    async fn renew(
        &self,
        cluster_ips: &[IpAddr],
        listeners: &Listeners,
        queries: &mut FuturesUnordered<BoxFuture<'static, Option<(SocketAddr, u64)>>>,
        until: &mut BTreeMap<SocketAddr, u64>,
    ) -> bool {
        let now = monotonic_nanoseconds();
        for Listener { address, server, .. } in &listeners.all {
            let name = format!("dns-version.{}.", self.domain);
            queries.push(lease(Arc::clone(server), *address, name, now).boxed());
        }
        let mut has_written = false;
        let answers = async {
            while let Some(answered) = queries.next().await {
                if let Some((address, lease)) = answered.filter(|(address, _)| listeners.serves(*address)) {
                    let known = until.entry(address).or_default();
                    *known = lease.max(*known);
                    self.write(&entries(cluster_ips, until));
                    has_written = true;
                }
            }
        };
        let (Ok(()) | Err(_)) = timeout(ROUND, answers).await;
        has_written
    }

    /// How many queries the programs have redirected to this agent; `None` if the counter cannot be read.
    fn led(&self) -> Option<u64> {
        self.packets.read_one(Outcome::DnsQuery).ok()
    }

    fn report(
        &self,
        dns: &ClusterDns,
        until: &BTreeMap<SocketAddr, u64>,
        listeners: &Listeners,
        blocked: bool,
    ) {
        let now = monotonic_nanoseconds();
        let servers = until.iter().filter(|(_, until)| now < **until).map(|(address, _)| *address).collect();
        let problem = if blocked {
            Some(format!(
                "queries of pods are not answered at port {} of this node: a firewall seems to drop them, or --dns-allow \
                 lacks the pods' network; accept UDP and TCP there (until then the endpoints of {} answer)",
                self.port, self.service
            ))
        } else if dns.cluster_ips.is_empty() && self.names.is_synchronised() {
            Some(format!("the Service {} has no cluster IP with UDP port 53", self.service))
        } else {
            listeners.problem.clone()
        };
        let report = InterceptReport {
            service: self.service.to_string(),
            cluster_ips: dns.cluster_ips.clone(),
            servers,
            problem,
        };
        self.state.with_dns(|dns| {
            let known = dns.intercept.as_ref().and_then(|known| known.problem.as_ref());
            if let Some(problem) = report.problem.as_ref().filter(|problem| Some(*problem) != known) {
                warn!("{problem}");
            }
            dns.intercept = Some(report);
        });
    }
}

/// The servers at the addresses of the node.
#[derive(Default)]
struct Listeners {
    all: Vec<Listener>,
    /// Why the server does not listen at an address.
    problem: Option<String>,
    /// Time of the next attempt to listen after a failure.
    retry: Option<Instant>,
}

impl Listeners {
    /// Listens at exactly these addresses, as far as possible.
    async fn keep(&mut self, wanted: Vec<SocketAddr>, server_for: &impl Fn(IpAddr) -> Server) {
        self.all.retain(|listener| wanted.contains(&listener.address) && !listener.task.is_finished());
        let missing = wanted.into_iter().filter(|address| !self.serves(*address)).collect::<Vec<_>>();
        if missing.is_empty() {
            self.problem = None;
            return;
        }
        if self.retry.is_some_and(|retry| Instant::now() < retry) {
            return;
        }
        (self.problem, self.retry) = (None, None);
        for address in missing {
            match Listener::open(address, server_for(address.ip())).await {
                Ok(listener) => self.all.push(listener),
                Err(error) => {
                    self.problem = Some(error.to_string());
                    self.retry = Some(Instant::now() + RETRY);
                }
            }
        }
    }

    fn serves(&self, address: SocketAddr) -> bool {
        self.all.iter().any(|listener| listener.address == address)
    }

    /// Number of datagrams and connections that the servers have received from allowed clients. Excludes those from a
    /// server's own address, from which the agent sends its queries.
    fn received(&self) -> u64 {
        self.all.iter().map(|listener| listener.server.received()).sum()
    }
}

impl Listener {
    async fn open(address: SocketAddr, server: Server) -> Result<Self, BindError> {
        let server = Arc::new(server);
        let task = tokio::spawn(Arc::clone(&server).listen(address).await?);
        info!(%address, "answering the DNS queries of this node's pods");
        Ok(Self { address, server, task })
    }
}

/// The entries of the map `DNS_INTERCEPT`: two for each protocol and each server whose address family has a cluster IP.
/// One entry redirects queries for that IP to the server until the lease expires. The other makes the IP the source
/// address of the server's answers.
fn entries(cluster_ips: &[IpAddr], until: &BTreeMap<SocketAddr, u64>) -> BTreeMap<ServiceKey, DnsIntercept> {
    let mut entries = BTreeMap::new();
    for (server, until) in until {
        let Some(cluster_ip) = cluster_ips.iter().find(|ip| ip.is_ipv4() == server.is_ipv4()) else {
            continue;
        };
        let (virtual_address, address) = (Address::from(*cluster_ip), Address::from(server.ip()));
        for protocol in [protocol::UDP, protocol::TCP] {
            let query = ServiceKey::new(virtual_address, dns::PORT, protocol);
            entries.insert(query, DnsIntercept::to_server(address, server.port(), *until));
            let answer = ServiceKey::new(address, server.port(), protocol);
            entries.insert(answer, DnsIntercept::to_client(virtual_address));
        }
    }
    entries
}

/// Asks the server at the address for `name` at the time `now`; returns the address and the end of its lease if a
/// usable answer arrives within [`PATIENCE`].
async fn lease(
    server: Arc<Server>,
    address: SocketAddr,
    name: String,
    now: u64,
) -> Option<(SocketAddr, u64)> {
    let answer = timeout(PATIENCE, server.ask_itself(address, &name)).await;
    let answers = answer.is_ok_and(|answer| answer.is_ok_and(|code| code.is_usable));
    answers.then_some((address, now + nanoseconds(LEASE)))
}

/// The servers in `until`, each with [`dns::WITHDRAWN`], which tells the programs that the server is stopping.
fn withdrawn(until: &BTreeMap<SocketAddr, u64>) -> BTreeMap<SocketAddr, u64> {
    until.keys().map(|address| (*address, dns::WITHDRAWN)).collect()
}

/// The duration in nanoseconds; at most `u64::MAX`.
fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
