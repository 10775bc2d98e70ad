//! kube-proxy's metrics: its names, types, labels and buckets (`pkg/proxy/metrics/metrics.go`).
//!
//! One task writes both address families together, so durations and times of synchronisations are recorded for both.

use std::{sync::atomic::AtomicU64, time::Duration};

use lb_core::{family::Family as IpFamily, model::Trigger};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets, linear_buckets},
    },
    registry::Registry,
};

use super::{Metrics, gauge, now};

/// A gauge that holds a time as seconds since 1970.
type Seconds = Gauge<f64, AtomicU64>;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Code {
    code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PerFamily {
    ip_family: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PerPolicy {
    ip_family: &'static str,
    traffic_policy: &'static str,
}

type Histograms = Family<PerFamily, Histogram, fn() -> Histogram>;

/// Which Services a synchronisation covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// All Services: at the first synchronisation, or because the node has changed.
    Full,
    /// The Services that have changed.
    Partial,
}

#[derive(Debug)]
pub(super) struct KubeProxy {
    sync: Histograms,
    full_sync: Histograms,
    partial_sync: Histograms,
    last_sync: Family<PerFamily, Seconds>,
    last_queued: Family<PerFamily, Seconds>,
    programming: Histograms,
    service_changes: Counter,
    service_changes_pending: Gauge,
    endpoint_changes: Counter,
    endpoint_changes_pending: Gauge,
    no_local_endpoints: Family<PerPolicy, Gauge>,
    conntrack_sync: Histograms,
    conntrack_deleted: Family<PerFamily, Counter>,
    healthz: Family<Code, Counter>,
    livez: Family<Code, Counter>,
}

fn durations() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

/// A histogram of seconds with kube-proxy's buckets from 0 to five minutes.
fn programming_times() -> Histogram {
    let coarse = linear_buckets(60.0, 5.0, 12).chain(linear_buckets(120.0, 30.0, 7));
    Histogram::new([0.0, 0.25, 0.5].into_iter().chain(linear_buckets(1.0, 1.0, 59)).chain(coarse))
}

fn both() -> [PerFamily; 2] {
    IpFamily::ALL.map(|family| PerFamily { ip_family: family.as_str() })
}

impl Default for KubeProxy {
    fn default() -> Self {
        let durations = || Histograms::new_with_constructor(durations);
        Self {
            sync: durations(),
            full_sync: durations(),
            partial_sync: durations(),
            last_sync: Family::default(),
            last_queued: Family::default(),
            programming: Histograms::new_with_constructor(programming_times),
            service_changes: Counter::default(),
            service_changes_pending: Gauge::default(),
            endpoint_changes: Counter::default(),
            endpoint_changes_pending: Gauge::default(),
            no_local_endpoints: Family::default(),
            conntrack_sync: durations(),
            conntrack_deleted: Family::default(),
            healthz: Family::default(),
            livez: Family::default(),
        }
    }
}

impl KubeProxy {
    pub(super) fn register(&self, registry: &mut Registry) {
        self.register_synchronisation(registry);
        self.register_changes(registry);
        let name = "sync_proxy_rules_no_local_endpoints_total";
        let help = "Service ports with traffic policy Local and no endpoint on this node";
        registry.register(name, help, self.no_local_endpoints.clone());
        let name = "conntrack_reconciler_sync_duration_seconds";
        let help = "Duration of a search for flows to removed endpoints";
        registry.register(name, help, self.conntrack_sync.clone());
        let name = "conntrack_reconciler_deleted_entries";
        registry.register(
            name,
            "Flows to removed endpoints that were deleted",
            self.conntrack_deleted.clone(),
        );
        registry.register("proxy_healthz", "Responses of /healthz by status code", self.healthz.clone());
        registry.register("proxy_livez", "Responses of /livez by status code", self.livez.clone());
        self.begin();
    }

    /// Creates series with the value 0 before their first event, so that a query sees their first increase.
    fn begin(&self) {
        let Self { sync, full_sync, partial_sync, programming, conntrack_sync, .. } = self;
        for family in both() {
            for histogram in [sync, full_sync, partial_sync, programming, conntrack_sync] {
                drop(histogram.get_or_create(&family));
            }
            drop(self.conntrack_deleted.get_or_create(&family));
        }
        for code in [200, 503] {
            drop(self.healthz.get_or_create(&Code { code }));
            drop(self.livez.get_or_create(&Code { code }));
        }
    }

    fn register_synchronisation(&self, registry: &mut Registry) {
        for (name, help, metric) in [
            ("sync_proxy_rules_duration_seconds", "Duration of a synchronisation", &self.sync),
            (
                "sync_full_proxy_rules_duration_seconds",
                "Duration of a synchronisation of all Services",
                &self.full_sync,
            ),
            (
                "sync_partial_proxy_rules_duration_seconds",
                "Duration of a synchronisation of changed Services",
                &self.partial_sync,
            ),
            (
                "network_programming_duration_seconds",
                "Time from a change in the cluster until it is in the kernel",
                &self.programming,
            ),
        ] {
            registry.register(name, help, metric.clone());
        }
        let name = "sync_proxy_rules_last_timestamp_seconds";
        registry.register(name, "Time of the last complete synchronisation", self.last_sync.clone());
        let name = "sync_proxy_rules_last_queued_timestamp_seconds";
        registry.register(name, "Time when the last change arrived", self.last_queued.clone());
    }

    fn register_changes(&self, registry: &mut Registry) {
        let name = "sync_proxy_rules_service_changes";
        registry.register(name, "Service changes received", self.service_changes.clone());
        let name = "sync_proxy_rules_service_changes_pending";
        let help = "Service changes that are not in the kernel yet";
        registry.register(name, help, self.service_changes_pending.clone());
        let name = "sync_proxy_rules_endpoint_changes";
        registry.register(name, "EndpointSlice changes received", self.endpoint_changes.clone());
        let name = "sync_proxy_rules_endpoint_changes_pending";
        let help = "EndpointSlice changes that are not in the kernel yet";
        registry.register(name, help, self.endpoint_changes_pending.clone());
    }
}

impl Metrics {
    pub(crate) fn count_healthz(&self, code: u16) {
        self.kube_proxy.healthz.get_or_create(&Code { code }).inc();
    }

    pub(crate) fn count_livez(&self, code: u16) {
        self.kube_proxy.livez.get_or_create(&Code { code }).inc();
    }

    /// Counts changes of Services and EndpointSlices that have arrived.
    pub(crate) fn count_changes(&self, services: usize, endpoint_slices: usize) {
        let metrics = &self.kube_proxy;
        metrics.service_changes.inc_by(services as u64);
        metrics.service_changes_pending.inc_by(gauge(services));
        metrics.endpoint_changes.inc_by(endpoint_slices as u64);
        metrics.endpoint_changes_pending.inc_by(gauge(endpoint_slices));
        for family in both() {
            metrics.last_queued.get_or_create(&family).set(now());
        }
    }

    /// Records the duration of a synchronisation that has ended, successfully or not.
    pub(crate) fn attempted(&self, extent: Extent, took: Duration) {
        let metrics = &self.kube_proxy;
        let of_extent = match extent {
            Extent::Full => &metrics.full_sync,
            Extent::Partial => &metrics.partial_sync,
        };
        for family in both() {
            metrics.sync.get_or_create(&family).observe(took.as_secs_f64());
            of_extent.get_or_create(&family).observe(took.as_secs_f64());
        }
    }

    /// Records the time of a synchronisation that is complete: the kernel has all changes.
    pub(crate) fn synchronised(&self) {
        for family in both() {
            self.kube_proxy.last_sync.get_or_create(&family).set(now());
        }
        self.nothing_pending();
    }

    /// Records that no received change is pending.
    pub(crate) fn nothing_pending(&self) {
        self.kube_proxy.service_changes_pending.set(0);
        self.kube_proxy.endpoint_changes_pending.set(0);
    }

    /// Records how long the change with this `trigger` took to reach the kernel.
    pub(crate) fn programmed(&self, trigger: Trigger) {
        let label = PerFamily { ip_family: trigger.family.as_str() };
        // `elapsed` fails if the clock of the machine that set the trigger is ahead of this one.
        let took = trigger.time.elapsed().unwrap_or(Duration::ZERO);
        self.kube_proxy.programming.get_or_create(&label).observe(took.as_secs_f64());
    }

    /// Sets, for one family, the numbers of service ports with traffic policy Local and endpoints only on other nodes.
    pub(crate) fn set_no_local_endpoints(&self, family: IpFamily, internal: usize, external: usize) {
        for (traffic_policy, ports) in [("internal", internal), ("external", external)] {
            let label = PerPolicy { ip_family: family.as_str(), traffic_policy };
            self.kube_proxy.no_local_endpoints.get_or_create(&label).set(gauge(ports));
        }
    }

    /// Records a search for flows to removed endpoints; `deleted` counts deleted IPv4 and IPv6 flows.
    pub(crate) fn conntrack_reconciled(&self, took: Duration, deleted: [usize; 2]) {
        for (family, deleted) in both().into_iter().zip(deleted) {
            self.kube_proxy.conntrack_sync.get_or_create(&family).observe(took.as_secs_f64());
            self.kube_proxy.conntrack_deleted.get_or_create(&family).inc_by(deleted as u64);
        }
    }
}
