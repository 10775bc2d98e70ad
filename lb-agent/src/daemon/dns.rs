//! The tasks of the DNS server.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    future,
    net::{IpAddr, SocketAddr},
    path::Path,
    sync::Arc,
    time::Duration,
};

use ipnet::IpNet;
use lb_dns::{Forwarder, Names, Server, Stats, upstreams_of};
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};

use super::{state::State, tasks::Tasks};
use crate::config::DnsConfig;

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The servers that systemd-resolved itself asks.
const RESOLVED_CONF: &str = "/run/systemd/resolve/resolv.conf";
/// Where systemd-resolved listens.
const RESOLVED: &str = "127.0.0.53:53";
/// How often `resolv.conf` is read again.
const REREAD: Duration = Duration::from_secs(5);
/// Pause before the next attempt to listen at an address.
const RETRY: Duration = Duration::from_secs(5);

/// The names that the source of Services fills; `None` without a DNS server.
pub(super) fn names(config: &DnsConfig, ranges: Option<&[IpNet]>) -> Option<Arc<Names>> {
    if config.bind.is_empty() {
        return None;
    }
    let servers: Vec<IpAddr> =
        config.bind.iter().map(SocketAddr::ip).filter(|address| !address.is_loopback()).collect();
    let zone = config.zone.clone().with_servers(servers).with_ranges(ranges.unwrap_or_default().to_vec());
    Some(Arc::new(Names::new(zone)))
}

/// Spawns the server and the tasks that follow the upstream servers and the ranges of cluster IPs.
pub(super) fn spawn(
    config: DnsConfig,
    names: &Arc<Names>,
    ranges: watch::Receiver<Vec<IpNet>>,
    stats: Stats,
    state: &Arc<State>,
    tasks: &mut Tasks,
) {
    let forwarder = Arc::new(Forwarder::new(stats.clone()));
    let server = Arc::new(Server::new(Arc::clone(names), Arc::clone(&forwarder), stats));
    state.with_dns(|report| {
        (report.addresses, report.domain) = (config.bind.clone(), config.zone.name().to_owned());
    });
    for address in BTreeSet::from_iter(config.bind.iter().copied()) {
        tasks.spawn("DNS server", serve(Arc::clone(&server), address, Arc::clone(state)));
    }
    tasks.spawn("ranges of reverse names", follow_ranges(Arc::clone(names), ranges));
    tasks.spawn("upstream DNS servers", follow_upstreams(config, forwarder, Arc::clone(state)));
}

/// Answers queries at the address. One that is taken or missing does not stop the agent, which serves packets as well:
/// the agent logs one warning and retries.
async fn serve(server: Arc<Server>, address: SocketAddr, state: Arc<State>) -> anyhow::Result<Infallible> {
    let mut warned = false;
    loop {
        match Arc::clone(&server).listen(address).await {
            Ok(serving) => {
                info!(%address, "answering DNS queries");
                state.with_dns(|report| _ = report.unserved.remove(&address));
                return Ok(serving.await);
            }
            Err(error) => {
                if !warned {
                    warn!("{error}; retrying");
                }
                warned = true;
                state.with_dns(|report| _ = report.unserved.insert(address, error.to_string()));
            }
        }
        sleep(RETRY).await;
    }
}

/// Ranges that the API server names replace those of the configuration.
async fn follow_ranges(
    names: Arc<Names>,
    mut ranges: watch::Receiver<Vec<IpNet>>,
) -> anyhow::Result<Infallible> {
    while ranges.changed().await.is_ok() {
        names.set_ranges(ranges.borrow_and_update().clone());
    }
    // With manifests, the configuration has the ranges.
    future::pending().await
}

async fn follow_upstreams(
    config: DnsConfig,
    forwarder: Arc<Forwarder>,
    state: Arc<State>,
) -> anyhow::Result<Infallible> {
    let mut known = None;
    loop {
        let servers =
            if config.upstreams.is_empty() { host_servers().await } else { config.upstreams.clone() };
        if known.as_ref() != Some(&servers) {
            forwarder.set_servers(&servers, &config.bind);
            let loops = forwarder.drop_loops().await;
            for server in &loops {
                warn!("the upstream DNS server {server} leads back to this agent; it is not used");
            }
            state.with_dns(|report| {
                (report.upstreams, report.loops) = (forwarder.servers().to_vec(), loops);
            });
            known = Some(servers);
        }
        sleep(REREAD).await;
    }
}

/// The servers of the host. A host with only systemd-resolved's stub has the real ones in another file.
async fn host_servers() -> Vec<SocketAddr> {
    let servers = read(RESOLV_CONF.as_ref()).await;
    let is_stub = servers.iter().all(|server| server.to_string() == RESOLVED);
    let behind = if is_stub { read(RESOLVED_CONF.as_ref()).await } else { Vec::new() };
    if behind.is_empty() { servers } else { behind }
}

async fn read(file: &Path) -> Vec<SocketAddr> {
    upstreams_of(&tokio::fs::read_to_string(file).await.unwrap_or_default())
}
