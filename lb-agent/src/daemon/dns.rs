//! The tasks around the DNS server: serving, upstream servers, ranges of cluster IPs.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    future, io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use ipnet::IpNet;
use lb_dns::{Forwarder, MOST_QUESTIONS, Names, Server, Stats, upstreams_of};
use tokio::{fs, sync::watch, time::sleep};
use tracing::{info, warn};

use super::{open_files, state::State, tasks::Tasks};
use crate::config::DnsConfig;

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// File in which systemd-resolved lists the upstream servers that it asks itself.
const RESOLVED_CONF: &str = "/run/systemd/resolve/resolv.conf";
/// Address of systemd-resolved's own DNS server, which `resolv.conf` names.
const RESOLVED: &str = "127.0.0.53:53";
/// Interval at which the agent reads `resolv.conf` again.
const REREAD: Duration = Duration::from_secs(5);
/// Interval at which the agent checks whether an upstream server leads back to the agent.
const PROBE: Duration = Duration::from_secs(30);
/// Pause before the next attempt to listen at an address that is taken or missing.
const RETRY: Duration = Duration::from_secs(5);

/// Creates the DNS names, which the source of Services fills; `None` without a DNS server.
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
    let forwarder = Arc::new(Forwarder::new(open_files::share(MOST_QUESTIONS), stats.clone()));
    let access = config.access.clone();
    let server = Arc::new(Server::new(Arc::clone(names), Arc::clone(&forwarder), access, stats));
    state.with_dns(|report| {
        (report.addresses, report.domain) = (config.bind.clone(), config.zone.name().to_owned());
    });
    for address in BTreeSet::from_iter(config.bind.iter().copied()) {
        tasks.spawn("DNS server", serve(Arc::clone(&server), address, Arc::clone(state)));
    }
    tasks.spawn("ranges of reverse names", follow_ranges(Arc::clone(names), ranges));
    tasks.spawn("upstream DNS servers", follow_upstreams(config, forwarder, Arc::clone(state)));
}

/// Answers queries at the address. An address that is taken or missing does not stop the agent, which also serves
/// packets: the agent logs one warning and retries.
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

/// Replaces the ranges of cluster IPs from the configuration by those that the API server names.
async fn follow_ranges(
    names: Arc<Names>,
    mut ranges: watch::Receiver<Vec<IpNet>>,
) -> anyhow::Result<Infallible> {
    while ranges.changed().await.is_ok() {
        names.set_ranges(ranges.borrow_and_update().clone());
    }
    // Manifests name no ranges: those of the configuration stay.
    future::pending().await
}

async fn follow_upstreams(
    config: DnsConfig,
    forwarder: Arc<Forwarder>,
    state: Arc<State>,
) -> anyhow::Result<Infallible> {
    let (mut known, mut warned) = (None, false);
    let (mut loops, mut probed) = (Vec::new(), Instant::now());
    loop {
        let servers = if config.upstreams.is_empty() {
            next(known.as_deref().unwrap_or_default(), host_servers().await, &mut warned)
        } else {
            config.upstreams.clone()
        };
        let is_new = known.as_ref() != Some(&servers);
        if is_new {
            forwarder.servers().set(&servers, &config.bind);
            known = Some(servers);
        }
        if is_new || probed.elapsed() >= PROBE {
            let found = forwarder.servers().find_loops().await;
            log_loops(&loops, &found);
            loops.clone_from(&found);
            probed = Instant::now();
            let upstreams = forwarder.servers().usable().to_vec();
            state.with_dns(|report| (report.upstreams, report.loops) = (upstreams, found));
        }
        sleep(REREAD).await;
    }
}

/// Logs which upstream servers lead back to this agent since the last check, and which no longer do.
fn log_loops(known: &[SocketAddr], found: &[SocketAddr]) {
    for server in found.iter().filter(|server| !known.contains(server)) {
        warn!("the upstream DNS server {server} leads back to this agent; it is not used while it does");
    }
    for server in known.iter().filter(|server| !found.contains(server)) {
        info!("the upstream DNS server {server} leads back to this agent no more");
    }
}

/// The DNS servers that the host uses.
async fn host_servers() -> Result<Vec<SocketAddr>, String> {
    let conf = fs::read(RESOLV_CONF).await;
    choose(conf, fs::read(RESOLVED_CONF).await)
}

/// The servers in `resolv.conf`. If it names none but systemd-resolved's stub, those in [`RESOLVED_CONF`], if there are
/// any.
fn choose(conf: io::Result<Vec<u8>>, resolved: io::Result<Vec<u8>>) -> Result<Vec<SocketAddr>, String> {
    let conf = conf.map_err(|error| format!("cannot read {RESOLV_CONF}: {error}"))?;
    let servers = upstreams_of(&conf);
    let is_stub = servers.iter().all(|server| server.to_string() == RESOLVED);
    let behind = if is_stub { upstreams_of(&resolved.unwrap_or_default()) } else { Vec::new() };
    match (behind.is_empty(), servers.is_empty()) {
        (false, _) => Ok(behind),
        (true, false) => Ok(servers),
        (true, true) => Err(format!("{RESOLV_CONF} names no server")),
    }
}

/// The servers to use next: those found, or the known ones if the file cannot be read or names no server
/// (half-written).
fn next(known: &[SocketAddr], found: Result<Vec<SocketAddr>, String>, warned: &mut bool) -> Vec<SocketAddr> {
    found.inspect(|_| *warned = false).unwrap_or_else(|error| {
        if !std::mem::replace(warned, true) {
            warn!("{error}; the upstream DNS servers stay as they were: {known:?}");
        }
        known.to_vec()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upstream_servers_stay_while_resolv_conf_names_none() {
        let known: Vec<SocketAddr> = vec!["192.0.2.1:53".parse().unwrap()];
        let missing = || Err(io::ErrorKind::NotFound.into());
        let mut warned = false;
        for conf in [missing(), Ok(Vec::new()), Ok(b"search a\n".to_vec())] {
            assert_eq!(next(&known, choose(conf, missing()), &mut warned), known);
            assert!(warned);
        }
        let found = choose(Ok(b"nameserver 192.0.2.2\n".to_vec()), missing());
        assert_eq!(next(&known, found, &mut warned), ["192.0.2.2:53".parse().unwrap()]);
        assert!(!warned);
    }

    #[test]
    fn servers_behind_the_stub_of_systemd_resolved_are_asked() {
        let [stub, behind] =
            ["127.0.0.53", "192.0.2.33"].map(|server| Ok(format!("nameserver {server}\n").into()));
        assert_eq!(choose(stub, behind), Ok(vec!["192.0.2.33:53".parse().unwrap()]));
    }
}
