//! `/metrics` and `/proxyMode`: the names of kube-proxy where it has the same thing, `lb_` for what is our own.

use std::{
    fmt,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use axum::{
    Router,
    extract::State as Shared,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use jiff::Timestamp;
use lb_common::Outcome;
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text},
    metrics::{
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};

/// What `/proxyMode` says.
pub const PROXY_MODE: &str = "ebpf";

/// A point in time as seconds since 1970.
type Seconds = Gauge<f64, AtomicU64>;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Code {
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Map {
    map: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

/// Everything the tasks count. Values that live in the kernel are read when somebody asks.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    sync_duration: Histogram,
    last_sync: Seconds,
    last_queued: Seconds,
    service_changes: Counter,
    endpoint_changes: Counter,
    pending: Gauge,
    healthz: Family<Code, Counter>,
    livez: Family<Code, Counter>,
    sync_failures: Counter,
    service_ports: Gauge,
    backends: Gauge,
    map_entries: Family<Map, Gauge>,
    map_capacity: Family<Map, Gauge>,
    devices: Family<Kind, Gauge>,
    flows: Gauge,
    flows_expired: Counter,
}

impl Metrics {
    /// All metrics, those of the kernel read through `packets`.
    pub fn new(packets: impl PacketCounters) -> Self {
        let mut metrics = Self {
            registry: Registry::default(),
            // The buckets of kube-proxy.
            sync_duration: Histogram::new(exponential_buckets(0.001, 2.0, 15)),
            last_sync: Seconds::default(),
            last_queued: Seconds::default(),
            service_changes: Counter::default(),
            endpoint_changes: Counter::default(),
            pending: Gauge::default(),
            healthz: Family::default(),
            livez: Family::default(),
            sync_failures: Counter::default(),
            service_ports: Gauge::default(),
            backends: Gauge::default(),
            map_entries: Family::default(),
            map_capacity: Family::default(),
            devices: Family::default(),
            flows: Gauge::default(),
            flows_expired: Counter::default(),
        };
        let mut registry = Registry::default();
        metrics.register_kube_proxy(registry.sub_registry_with_prefix("kubeproxy"));
        metrics.register_own(registry.sub_registry_with_prefix("lb"));
        registry.register_collector(Box::new(Packets(packets)));
        metrics.registry = registry;
        metrics
    }

    fn register_kube_proxy(&self, registry: &mut Registry) {
        registry.register_with_unit(
            "sync_proxy_rules_duration",
            "Time from the first change of a batch to its presence in the kernel",
            Unit::Seconds,
            self.sync_duration.clone(),
        );
        registry.register_with_unit(
            "sync_proxy_rules_last_timestamp",
            "When the kernel last was what it should be",
            Unit::Seconds,
            self.last_sync.clone(),
        );
        registry.register_with_unit(
            "sync_proxy_rules_last_queued_timestamp",
            "When a change last arrived",
            Unit::Seconds,
            self.last_queued.clone(),
        );
        let changes = "sync_proxy_rules_service_changes";
        registry.register(changes, "Changes of Services that arrived", self.service_changes.clone());
        let changes = "sync_proxy_rules_endpoint_changes";
        registry.register(changes, "Changes of EndpointSlices that arrived", self.endpoint_changes.clone());
        registry.register("proxy_healthz", "Answers of /healthz by their code", self.healthz.clone());
        registry.register("proxy_livez", "Answers of /livez by their code", self.livez.clone());
    }

    fn register_own(&self, registry: &mut Registry) {
        registry.register(
            "sync_failures",
            "Attempts that the kernel refused in part",
            self.sync_failures.clone(),
        );
        registry.register(
            "sync_pending_steps",
            "Changes of maps that are not in the kernel yet",
            self.pending.clone(),
        );
        registry.register("service_ports", "Service ports in the kernel", self.service_ports.clone());
        registry.register("backends", "Backends of all service ports in the kernel", self.backends.clone());
        registry.register("map_entries", "Entries of a map that are in use", self.map_entries.clone());
        registry.register("map_capacity", "Entries a map can hold", self.map_capacity.clone());
        registry.register("devices", "Devices with our programs", self.devices.clone());
        registry.register("conntrack_flows", "Connections tracked at the last sweep", self.flows.clone());
        registry.register(
            "conntrack_expired",
            "Connections forgotten after their timeout",
            self.flows_expired.clone(),
        );
    }

    pub(crate) fn count_healthz(&self, code: u16) {
        self.healthz.get_or_create(&Code { code }).inc();
    }

    pub(crate) fn count_livez(&self, code: u16) {
        self.livez.get_or_create(&Code { code }).inc();
    }

    /// Changes have arrived.
    pub(crate) fn count_changes(&self, services: usize, endpoint_slices: usize) {
        self.service_changes.inc_by(services as u64);
        self.endpoint_changes.inc_by(endpoint_slices as u64);
        self.last_queued.set(now());
    }

    /// The kernel is what it should be again, this long after the first change.
    pub(crate) fn synchronised(&self, took: Duration) {
        self.sync_duration.observe(took.as_secs_f64());
        self.last_sync.set(now());
    }

    /// The kernel has refused something.
    pub(crate) fn count_sync_failure(&self) {
        self.sync_failures.inc();
    }

    pub(crate) fn set_services(&self, service_ports: usize, backends: usize, pending: usize) {
        self.service_ports.set(gauge(service_ports));
        self.backends.set(gauge(backends));
        self.pending.set(gauge(pending));
    }

    pub(crate) fn set_map(&self, map: &'static str, entries: usize, capacity: u32) {
        self.map_entries.get_or_create(&Map { map }).set(gauge(entries));
        self.map_capacity.get_or_create(&Map { map }).set(i64::from(capacity));
    }

    pub(crate) fn set_devices(&self, kind: &'static str, count: usize) {
        self.devices.get_or_create(&Kind { kind }).set(gauge(count));
    }

    /// A sweep through the tracked connections is over.
    pub(crate) fn swept(&self, flows: usize, expired: usize) {
        self.flows.set(gauge(flows));
        self.flows_expired.inc_by(expired as u64);
    }

    /// All metrics in the OpenMetrics text format.
    fn text(&self) -> Result<String, fmt::Error> {
        let mut text = String::new();
        text::encode(&mut text, &self.registry)?;
        Ok(text)
    }
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn now() -> f64 {
    Timestamp::now().as_duration().as_secs_f64()
}

/// Where the counters of the data plane are read; `None` where they cannot be at this moment.
pub trait PacketCounters: fmt::Debug + Send + Sync + 'static {
    /// Packets by [`Outcome`] since the maps were made.
    fn packets(&self) -> Option<[u64; Outcome::COUNT]>;
}

#[derive(Debug)]
struct Packets<C>(C);

impl<C: PacketCounters> Collector for Packets<C> {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Some(packets) = self.0.packets() else { return Ok(()) };
        let kind = ConstCounter::new(0u64).metric_type();
        let mut family =
            encoder.encode_descriptor("lb_packets", "Packets by what became of them", None, kind)?;
        for (outcome, count) in Outcome::ALL.into_iter().zip(packets) {
            let label = [("outcome", outcome.as_str())];
            ConstCounter::new(count).encode(family.encode_family(&label)?)?;
        }
        Ok(())
    }
}

/// The service of `--metrics-bind-address`.
pub fn router(metrics: Arc<Metrics>) -> Router {
    Router::new()
        .route("/metrics", get(scrape))
        .route("/healthz", get(|| async { "ok" }))
        .route("/proxyMode", get(|| async { PROXY_MODE }))
        .with_state(metrics)
}

async fn scrape(Shared(metrics): Shared<Arc<Metrics>>) -> Response {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match metrics.text() {
        Ok(text) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(fmt::Error) => {
            (StatusCode::INTERNAL_SERVER_ERROR, "cannot write the metrics as text").into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Fixed;

    impl PacketCounters for Fixed {
        fn packets(&self) -> Option<[u64; Outcome::COUNT]> {
            let mut packets = [0; Outcome::COUNT];
            packets[Outcome::NewFlow as usize] = 7;
            Some(packets)
        }
    }

    #[test]
    fn every_metric_has_its_full_name() {
        let metrics = Metrics::new(Fixed);
        metrics.count_healthz(503);
        metrics.count_changes(2, 3);
        metrics.synchronised(Duration::from_millis(3));
        metrics.set_services(1, 2, 0);
        metrics.set_map("SERVICES", 1, 10);
        metrics.swept(4, 1);
        let text = metrics.text().unwrap();
        for line in [
            "lb_packets_total{outcome=\"new_flow\"} 7",
            "lb_packets_total{outcome=\"no_backend\"} 0",
            "kubeproxy_sync_proxy_rules_duration_seconds_count 1",
            "kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"0.004\"} 1",
            "kubeproxy_sync_proxy_rules_service_changes_total 2",
            "kubeproxy_sync_proxy_rules_endpoint_changes_total 3",
            "kubeproxy_proxy_healthz_total{code=\"503\"} 1",
            "lb_service_ports 1",
            "lb_backends 2",
            "lb_sync_pending_steps 0",
            "lb_map_entries{map=\"SERVICES\"} 1",
            "lb_map_capacity{map=\"SERVICES\"} 10",
            "lb_conntrack_flows 4",
            "lb_conntrack_expired_total 1",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in:\n{text}");
        }
        assert!(text.contains("kubeproxy_sync_proxy_rules_last_timestamp_seconds 1"), "{text}");
    }
}
