//! The page `/metrics`. `docs/metrics.md` describes each metric; a test keeps it complete.
//!
//! ```text
//! kube_proxy   kubeproxy_…               those of kube-proxy, under its names
//! packets      lb_packets_total          packets by outcome
//! conditions   lb_conditions lb_healthy  the conditions that the agent reports, and its health
//! traffic      lb_service_… lb_backend_… flows, packets and bytes of Services
//! own          lb_…                      all others, except those of the DNS server (crate lb-dns)
//! slis         kubernetes_healthcheck…   the page /metrics/slis
//! ```

mod conditions;
mod exposition;
mod kube_proxy;
mod own;
mod packets;
mod serve;
mod slis;
mod traffic;

use std::fmt;

use jiff::Timestamp;
use lb_dns::Stats;
use prometheus_client::{encoding::text, registry::Registry};

pub(crate) use self::conditions::AgentState;
pub(crate) use self::kube_proxy::Extent;
pub(crate) use self::traffic::{TrafficLabels, TrafficSource};
use self::{kube_proxy::KubeProxy, own::Own, slis::Slis};
pub use self::{packets::PacketCounters, serve::router};

/// All metrics of the agent. Tasks set most values; packet counters, sums of traffic and numbers of conditions are read
/// at each scrape.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    kube_proxy: KubeProxy,
    own: Own,
    dns: Stats,
    slis: Slis,
}

impl Metrics {
    /// Registers all metrics. `packets` reads the packet counters, `traffic` the traffic of service ports and backends
    /// (`None` under `--service-metrics none`).
    pub(crate) fn new(packets: impl PacketCounters, traffic: Option<impl TrafficSource>) -> Self {
        let (kube_proxy, own) = (KubeProxy::default(), Own::default());
        let mut registry = Registry::default();
        kube_proxy.register(registry.sub_registry_with_prefix("kubeproxy"));
        own.register(registry.sub_registry_with_prefix("lb"));
        let dns = Stats::default();
        dns.register(registry.sub_registry_with_prefix("lb"));
        registry.register_collector(Box::new(packets::Packets(packets)));
        if let Some(traffic) = traffic {
            registry.register_collector(Box::new(traffic::Traffic(traffic)));
        }
        Self { registry, kube_proxy, own, dns, slis: Slis::new() }
    }

    /// Adds the agent's health and the numbers of its conditions, which are read at each scrape.
    pub(crate) fn with_state(mut self, state: impl AgentState) -> Self {
        self.registry.register_collector(Box::new(conditions::Conditions(state)));
        self
    }

    /// Counters of the DNS server, which the server increments.
    pub(crate) fn dns(&self) -> Stats {
        self.dns.clone()
    }

    /// Counts a request for `/healthz` or `/healthz/ping` at `--metrics-bind-address`, and its result.
    pub(crate) fn record_health_check(&self, success: bool) {
        self.slis.record(success);
    }

    /// All metrics in the OpenMetrics text format.
    #[cfg(test)]
    pub(crate) fn text(&self) -> Result<String, fmt::Error> {
        encode(&self.registry)
    }
}

fn encode(registry: &Registry) -> Result<String, fmt::Error> {
    let mut text = String::new();
    text::encode(&mut text, registry)?;
    Ok(text)
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// The present time as seconds since 1970.
fn now() -> f64 {
    Timestamp::now().as_duration().as_secs_f64()
}

/// A source without packet counters or traffic, for a test without a data plane.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct NoPackets;

#[cfg(test)]
impl PacketCounters for NoPackets {
    fn packets(&self) -> Option<[u64; lb_common::Outcome::COUNT]> {
        None
    }
}

#[cfg(test)]
impl TrafficSource for NoPackets {
    fn traffic(&self) -> Vec<(TrafficLabels, lb_core::traffic::Tally)> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests;
