//! The tasks around the DNS server: serving, node-local DNS, upstream servers, ranges of cluster IPs.

mod evidence;
mod intercept;
mod upstreams;

use std::{
    collections::BTreeSet,
    convert::Infallible,
    future,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use ipnet::{IpNet, Ipv6Net};
use lb_core::{dns::Zone, model::NodeAddresses};
use lb_datapath::DnsIntercepts;
use lb_dns::{Access, Forwarder, MOST_QUESTIONS, Names, Server, Stats};
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};

use self::{intercept::Intercept, upstreams::Upstreams};
use super::{open_files, state::State, tasks::Tasks};
use crate::config::{DnsConfig, InterceptConfig};

/// All IPv6 addresses.
const ALL_IPV6: Ipv6Net = Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0);
/// Pause before the next attempt to listen at an address that is taken or missing.
const RETRY: Duration = Duration::from_secs(5);

/// Channels that the tasks read.
pub(super) struct Sources {
    /// Ranges of cluster IPs that the API server names.
    pub(super) ranges: watch::Receiver<Vec<IpNet>>,
    /// The node's addresses.
    pub(super) addresses: watch::Receiver<NodeAddresses>,
    /// Whether the agent stops.
    pub(super) stop: watch::Receiver<bool>,
}

/// The maps that node-local DNS writes and reads.
pub(super) struct Kernel {
    pub(super) intercepts: DnsIntercepts,
    pub(super) packets: lb_datapath::Stats,
}

/// Creates the index of DNS names, into which the source of Services writes; `None` without a DNS server.
pub(super) fn names(config: &DnsConfig, ranges: Option<&[IpNet]>) -> Option<Arc<Names>> {
    if config.bind.is_empty() && config.intercept.is_none() {
        return None;
    }
    Some(Arc::new(Names::new(zone(config, ranges.unwrap_or_default()))))
}

/// The zones that the server answers for.
fn zone(config: &DnsConfig, ranges: &[IpNet]) -> Zone {
    let servers: Vec<IpAddr> =
        config.bind.iter().map(SocketAddr::ip).filter(|address| !address.is_loopback()).collect();
    let zone = config.zone.clone().with_servers(servers).with_ranges(ranges.to_vec());
    match &config.intercept {
        Some(intercept) => zone.with_dns_service(intercept.service.clone()),
        None => zone,
    }
}

/// Spawns the servers, node-local DNS if it is configured, and the tasks that follow the upstream servers and the
/// ranges of cluster IPs.
pub(super) fn spawn(
    config: &DnsConfig,
    names: &Arc<Names>,
    sources: Sources,
    kernel: Kernel,
    stats: Stats,
    state: &Arc<State>,
    tasks: &mut Tasks,
) {
    let forwarder = Arc::new(Forwarder::new(open_files::share(MOST_QUESTIONS), stats.clone()));
    let server = {
        let (names, forwarder) = (Arc::clone(names), Arc::clone(&forwarder));
        move |access| Server::new(Arc::clone(&names), Arc::clone(&forwarder), access, stats.clone())
    };
    state.with_dns(|report| {
        (report.addresses, report.domain) = (config.bind.clone(), config.zone.name().to_owned());
    });
    let at_fixed_addresses = Arc::new(server(config.access.clone()));
    for address in BTreeSet::from_iter(config.bind.iter().copied()) {
        tasks.spawn("DNS server", serve(Arc::clone(&at_fixed_addresses), address, Arc::clone(state)));
    }
    let upstreams = Upstreams::of(config, names);
    let of_cluster = matches!(upstreams, Upstreams::Cluster(..)).then(|| Arc::clone(&forwarder));
    tasks.spawn("ranges of reverse names", follow_ranges(Arc::clone(names), sources.ranges));
    tasks.spawn(
        "upstream DNS servers",
        upstreams::follow(upstreams, config.bind.clone(), forwarder, Arc::clone(state)),
    );
    let Some(InterceptConfig { service, port }) = config.intercept.clone() else { return };
    let intercept = Intercept {
        service,
        port,
        domain: config.zone.name().to_owned(),
        names: Arc::clone(names),
        forwarder: of_cluster,
        own: config.bind.clone(),
        map: kernel.intercepts,
        packets: kernel.packets,
        addresses: sources.addresses,
        stop: sources.stop,
        state: Arc::clone(state),
    };
    let access = config.access.clone();
    tasks.spawn("node-local DNS", intercept.run(move |own| server(access_of_pods(access.clone(), own))));
}

/// Which clients the node-local server at `own` answers: those of `access`, and the agent itself, which queries from
/// `own`. The rate limit applies to each IPv6 address instead of each /64, because all pods of a node share one /64.
fn access_of_pods(mut access: Access, own: IpAddr) -> Access {
    access.allowed.push(own.into());
    access.hosts.push(ALL_IPV6.into());
    access
}

/// Answers queries at the address. If the address is taken or missing, the agent logs one warning and retries. The
/// agent does not stop, because Services work without the DNS server.
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
    // The sender is dropped when Services come from manifests. Then the ranges of the configuration stay.
    future::pending().await
}

#[cfg(test)]
mod tests {
    use lb_core::model::ObjectName;

    use super::*;

    #[test]
    fn intercepted_service_is_the_dns_service_of_the_zone() {
        let service = ObjectName::new("kube-system", "rke2-coredns");
        let plain = Zone::new("cluster.local", 5).unwrap();
        let config = DnsConfig {
            bind: Vec::new(),
            zone: plain.clone(),
            upstreams: Vec::new(),
            access: Access { allowed: Vec::new(), rate: None, hosts: Vec::new() },
            intercept: Some(InterceptConfig { service: service.clone(), port: 9053 }),
        };
        assert_eq!(zone(&config, &[]), plain.with_dns_service(service));
    }
}
