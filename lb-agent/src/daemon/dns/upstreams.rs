//! The upstream DNS servers, which answer queries for names outside the cluster domain.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use lb_core::model::ObjectName;
use lb_dns::{Forwarder, Names, upstreams_of};
use tokio::{fs, time::sleep};
use tracing::{info, warn};

use crate::{config::DnsConfig, daemon::state::State};

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// File in which systemd-resolved lists its own upstream servers.
const RESOLVED_CONF: &str = "/run/systemd/resolve/resolv.conf";
/// Address of systemd-resolved's own DNS server, its stub, which `resolv.conf` names if the host uses systemd-resolved.
const RESOLVED: &str = "127.0.0.53:53";
/// Interval at which the agent reads `resolv.conf` again.
const REREAD: Duration = Duration::from_secs(5);
/// Interval at which the agent checks whether the endpoints of the DNS Service have changed. If they have changed, the
/// agent probes at once whether the new endpoints lead back to this agent. (The forwarder uses new endpoints even
/// sooner: the task of node-local DNS sets them.)
const FOLLOW: Duration = Duration::from_secs(1);
/// Time after which the agent checks again whether an upstream server leads back to the agent. A change of the servers
/// causes a check at once.
const PROBE: Duration = Duration::from_secs(30);

/// The source of the list of upstream servers.
pub(super) enum Upstreams {
    /// `--dns-upstream`
    Fixed(Vec<SocketAddr>),
    /// The endpoints of the DNS Service, if node-local DNS answers the clients of that Service.
    Cluster(Arc<Names>, ObjectName),
    /// `/etc/resolv.conf`
    Host,
}

impl Upstreams {
    /// The source that the configuration selects.
    pub(super) fn of(config: &DnsConfig, names: &Arc<Names>) -> Self {
        match &config.intercept {
            _ if !config.upstreams.is_empty() => Self::Fixed(config.upstreams.clone()),
            Some(intercept) => Self::Cluster(Arc::clone(names), intercept.service.clone()),
            None => Self::Host,
        }
    }

    /// The servers to use now; `known` are those in use.
    async fn now(&self, known: &[SocketAddr], warned: &mut bool) -> Vec<SocketAddr> {
        match self {
            Self::Fixed(servers) => servers.clone(),
            Self::Cluster(names, service) => names.cluster_dns(service).endpoints,
            Self::Host => next(known, host_servers().await, warned),
        }
    }

    /// Interval between two calls of [`Self::now`].
    const fn interval(&self) -> Duration {
        match self {
            Self::Cluster(..) => FOLLOW,
            Self::Fixed(_) | Self::Host => REREAD,
        }
    }
}

/// Keeps the servers of the forwarder up to date; `own` are addresses that the agent listens at itself.
pub(super) async fn follow(
    upstreams: Upstreams,
    own: Vec<SocketAddr>,
    forwarder: Arc<Forwarder>,
    state: Arc<State>,
) -> anyhow::Result<Infallible> {
    let (mut known, mut warned) = (None, false);
    let (mut loops, mut probed) = (Vec::new(), Instant::now());
    loop {
        let servers = upstreams.now(known.as_deref().unwrap_or_default(), &mut warned).await;
        let is_new = known.as_ref() != Some(&servers);
        if is_new {
            forwarder.servers().set(&servers, &own);
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
        sleep(upstreams.interval()).await;
    }
}

/// Logs the upstream servers that have begun to lead back to this agent since the last check, and those that no longer
/// do.
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

/// The servers in `resolv.conf`; or the servers in [`RESOLVED_CONF`], if that file names any, and `resolv.conf` names
/// no server other than systemd-resolved's stub.
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

/// The servers to use next: those in `found`, or `known` if the file cannot be read or names no server, as a
/// half-written file may.
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
