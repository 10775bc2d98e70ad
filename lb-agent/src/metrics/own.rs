//! The agent's metrics that kube-proxy does not have: `lb_sync_…`, `lb_map_…`, `lb_conntrack_…`, ….
//!
//! The names here lack the prefix `lb_`, which the registry adds, and a counter's suffix `_total`, which the library
//! adds.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::Registry,
};

use lb_core::load_balancer::PoolUsage;

use super::{Metrics, gauge};
use crate::{announce::bgp::Sessions, flow_log::FlowLogCounters};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Map {
    map: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Pool {
    pool: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Probe {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct End {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Health {
    health: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Session {
    state: &'static str,
}

#[derive(Debug)]
pub(super) struct Own {
    sync_latency: Histogram,
    sync_failures: Counter,
    pending: Gauge,
    service_ports: Gauge,
    backends: Gauge,
    map_entries: Family<Map, Gauge>,
    map_capacity: Family<Map, Gauge>,
    devices: Family<Kind, Gauge>,
    flows: Gauge,
    flows_expired: Counter,
    flows_expired_early: Counter,
    flows_ended: Family<End, Counter>,
    affinity_evicted: Counter,
    pins_restored: Counter,
    waiting: Family<Map, Gauge>,
    health_check_servers: Gauge,
    health_check_failures: Gauge,
    pool_addresses: Family<Pool, Gauge>,
    pool_addresses_used: Family<Pool, Gauge>,
    announce_wanted: Gauge,
    announced: Gauge,
    announce_uncovered: Gauge,
    announce_takeovers: Counter,
    bgp_routes: Gauge,
    bgp_fence: Gauge,
    bgp_sessions: Family<Session, Gauge>,
    bird_config_failed: Gauge,
    probes: Family<Probe, Counter>,
    probed_endpoints: Family<Health, Gauge>,
    flow_log: FlowLogCounters,
}

impl Default for Own {
    fn default() -> Self {
        Self {
            sync_latency: Histogram::new(exponential_buckets(0.001, 2.0, 15)),
            sync_failures: Counter::default(),
            pending: Gauge::default(),
            service_ports: Gauge::default(),
            backends: Gauge::default(),
            map_entries: Family::default(),
            map_capacity: Family::default(),
            devices: Family::default(),
            flows: Gauge::default(),
            flows_expired: Counter::default(),
            flows_expired_early: Counter::default(),
            flows_ended: Family::default(),
            affinity_evicted: Counter::default(),
            pins_restored: Counter::default(),
            waiting: Family::default(),
            health_check_servers: Gauge::default(),
            health_check_failures: Gauge::default(),
            pool_addresses: Family::default(),
            pool_addresses_used: Family::default(),
            announce_wanted: Gauge::default(),
            announced: Gauge::default(),
            announce_uncovered: Gauge::default(),
            announce_takeovers: Counter::default(),
            bgp_routes: Gauge::default(),
            bgp_fence: Gauge::default(),
            bgp_sessions: Family::default(),
            bird_config_failed: Gauge::default(),
            probes: Family::default(),
            probed_endpoints: Family::default(),
            flow_log: FlowLogCounters::default(),
        }
    }
}

impl Own {
    pub(super) fn register(&self, registry: &mut Registry) {
        self.register_synchronisation(registry);
        self.register_conntrack(registry);
        self.register_health_checks(registry);
        self.register_announcements(registry);
        self.register_flow_log(registry);
    }

    fn register_synchronisation(&self, registry: &mut Registry) {
        let name = "sync_latency_seconds";
        let help = "Time from the arrival of the first change of a batch until the batch is in the kernel";
        registry.register(name, help, self.sync_latency.clone());
        let help = "Synchronisations in which the kernel refused a map update";
        registry.register("sync_failures", help, self.sync_failures.clone());
        let help = "Steps of the last synchronisation that are not in the kernel, because it refused one of them, plus Services that \
                    were not planned for that reason, plus Services that wait for room in a map";
        registry.register("sync_pending_steps", help, self.pending.clone());
        registry.register("service_ports", "Service ports in the kernel", self.service_ports.clone());
        registry.register("backends", "Backends of all service ports in the kernel", self.backends.clone());
        registry.register("map_entries", "Used entries of a map", self.map_entries.clone());
        registry.register("map_capacity", "Capacity of a map in entries", self.map_capacity.clone());
        registry.register("devices", "Network interfaces that have the BPF programs", self.devices.clone());
        let help = "Services that keep their old state because a map has no room for the new one";
        registry.register("services_waiting", help, self.waiting.clone());
        let help =
            "Pins that other software or a person removed from the BPF file system and the agent restored";
        registry.register("pins_restored", help, self.pins_restored.clone());
    }

    fn register_conntrack(&self, registry: &mut Registry) {
        registry.register(
            "conntrack_flows",
            "Flows at the last garbage collection; a connection masqueraded through the stack counts as two",
            self.flows.clone(),
        );
        let help = "Connections that expired";
        registry.register("conntrack_expired", help, self.flows_expired.clone());
        let help = "Connections evicted before their timeout because the flow table was nearly full";
        registry.register("conntrack_expired_early", help, self.flows_expired_early.clone());
        let help = "Connections that the idle or drain timeout of their Service has ended";
        registry.register("conntrack_ended", help, self.flows_ended.clone());
        let help = "Clients whose session affinity was evicted before its timeout because the map was full";
        registry.register("affinity_evicted", help, self.affinity_evicted.clone());
    }

    fn register_health_checks(&self, registry: &mut Registry) {
        let help = "Listening sockets for healthCheckNodePorts";
        registry.register("health_check_servers", help, self.health_check_servers.clone());
        let help = "Listening sockets for healthCheckNodePorts that could not be opened";
        registry.register("health_check_servers_failed", help, self.health_check_failures.clone());
        let help = "Probes of endpoints with a health check, by their results";
        registry.register("probes", help, self.probes.clone());
        let help = "Endpoints with a health check, by what this node has found";
        registry.register("probed_endpoints", help, self.probed_endpoints.clone());
    }

    fn register_announcements(&self, registry: &mut Registry) {
        let help = "Addresses of a pool for load balancers; only the agent that gives addresses exports it";
        registry.register("pool_addresses", help, self.pool_addresses.clone());
        let help = "Addresses of a pool that Services have; only the agent that gives addresses exports it";
        registry.register("pool_addresses_used", help, self.pool_addresses_used.clone());
        let help = "Addresses of load balancers that some node should announce at layer 2, as far as this node knows";
        registry.register("announce_wanted_addresses", help, self.announce_wanted.clone());
        let help = "Addresses of load balancers that this node announces at layer 2";
        registry.register("announced_addresses", help, self.announced.clone());
        let help =
            "Addresses of load balancers in pools that no advertisement covers; 0 without advertisements";
        registry.register("announce_uncovered_addresses", help, self.announce_uncovered.clone());
        let help = "Addresses of load balancers that this node began to announce at layer 2";
        registry.register("announce_takeovers", help, self.announce_takeovers.clone());
        let help = "Routes that this node offers its BGP daemon";
        registry.register("bgp_routes", help, self.bgp_routes.clone());
        let help = "Whether a fence runs, which removes the routes if the agent hangs or dies";
        registry.register("bgp_fence", help, self.bgp_fence.clone());
        let help = "BGP sessions in the configuration that the agent writes for BIRD, by their state";
        registry.register("bgp_sessions", help, self.bgp_sessions.clone());
        let help = "Whether BIRD does not use the configuration that the agent has for it";
        registry.register("bird_config_failed", help, self.bird_config_failed.clone());
    }

    fn register_flow_log(&self, registry: &mut Registry) {
        let FlowLogCounters { lines, dropped_lines, lost_events } = &self.flow_log;
        registry.register("flow_log_lines", "Lines that were written to the flow log", lines.clone());
        let help = "Lines of the flow log that were dropped, because it was written too slowly or could not be written";
        registry.register("flow_log_dropped_lines", help, dropped_lines.clone());
        let help = "Events for the flow log that the BPF programs could not pass on, because the agent read them too slowly";
        registry.register("flow_log_lost_events", help, lost_events.clone());
    }
}

impl Metrics {
    /// Counters of the flow log, which the log increments.
    pub(crate) fn flow_log(&self) -> FlowLogCounters {
        self.own.flow_log.clone()
    }

    /// Records that a batch of changes is in the kernel, `latency` after the first of them arrived.
    pub(crate) fn observe_sync_latency(&self, latency: Duration) {
        self.own.sync_latency.observe(latency.as_secs_f64());
    }

    /// Counts a synchronisation in which the kernel refused a map update.
    pub(crate) fn count_sync_failure(&self) {
        self.own.sync_failures.inc();
    }

    pub(crate) fn set_services(&self, service_ports: usize, backends: usize, pending: usize) {
        self.own.service_ports.set(gauge(service_ports));
        self.own.backends.set(gauge(backends));
        self.own.pending.set(gauge(pending));
    }

    pub(crate) fn set_map(&self, map: &'static str, entries: usize, capacity: u32) {
        self.own.map_entries.get_or_create(&Map { map }).set(gauge(entries));
        self.own.map_capacity.get_or_create(&Map { map }).set(i64::from(capacity));
    }

    pub(crate) fn set_devices(&self, kind: &'static str, count: usize) {
        self.own.devices.get_or_create(&Kind { kind }).set(gauge(count));
    }

    /// Records a GC pass that left `flows` flows and deleted `expired` connections, `early` of those before their
    /// timeout.
    pub(crate) fn swept(&self, flows: usize, expired: usize, early: usize) {
        self.own.flows.set(gauge(flows));
        self.own.flows_expired.inc_by(expired as u64);
        self.own.flows_expired_early.inc_by(early as u64);
    }

    /// Counts connections that the agent has ended after a timeout of their Service: idle ones, and those whose backend
    /// the Service has lost.
    pub(crate) fn ended_connections(&self, idle: usize, drained: usize) {
        for (reason, connections) in [("idle", idle), ("drained", drained)] {
            self.own.flows_ended.get_or_create(&End { reason }).inc_by(connections as u64);
        }
    }

    /// Counts clients that were evicted from the map `AFFINITY`.
    pub(crate) fn count_evicted_clients(&self, clients: usize) {
        self.own.affinity_evicted.inc_by(clients as u64);
    }

    /// Counts missing pins that the agent has restored.
    pub(crate) fn count_restored_pins(&self, pins: usize) {
        self.own.pins_restored.inc_by(pins as u64);
    }

    /// Sets the number of Services that wait for room in the map `map`.
    pub(crate) fn set_waiting(&self, map: &'static str, services: usize) {
        self.own.waiting.get_or_create(&Map { map }).set(gauge(services));
    }

    /// Sets how many addresses each load balancer pool has, and how many of them are in use.
    pub(crate) fn set_pools(&self, pools: &[PoolUsage]) {
        let Own { pool_addresses, pool_addresses_used, .. } = &self.own;
        pool_addresses.clear();
        pool_addresses_used.clear();
        for PoolUsage { pool, used, total } in pools {
            let labels = Pool { pool: pool.to_string() };
            pool_addresses.get_or_create(&labels).set(i64::try_from(*total).unwrap_or(i64::MAX));
            pool_addresses_used.get_or_create(&labels).set(i64::try_from(*used).unwrap_or(i64::MAX));
        }
    }

    /// Sets how many addresses some node should announce at layer 2, and how many of them this node announces.
    pub(crate) fn set_announced(&self, wanted: usize, here: usize) {
        self.own.announce_wanted.set(gauge(wanted));
        self.own.announced.set(gauge(here));
    }

    /// Sets how many addresses of Services are in pools that no advertisement covers.
    pub(crate) fn set_uncovered(&self, addresses: usize) {
        self.own.announce_uncovered.set(gauge(addresses));
    }

    /// Sets how many routes this node offers its BGP daemon, and whether a fence runs. (A fence is a process that
    /// removes the routes if the agent's heartbeats stop.)
    pub(crate) fn set_routes(&self, routes: usize, fence: bool) {
        self.own.bgp_routes.set(gauge(routes));
        self.own.bgp_fence.set(i64::from(fence));
    }

    /// Sets how many sessions BIRD has established, and how many it has not.
    pub(crate) fn set_sessions(&self, Sessions { established, down }: Sessions) {
        for (state, count) in [("established", established), ("down", down)] {
            self.own.bgp_sessions.get_or_create(&Session { state }).set(gauge(count));
        }
    }

    /// Sets whether the agent has failed to make BIRD use the configuration that the agent wants.
    pub(crate) fn set_bird_failed(&self, failed: bool) {
        self.own.bird_config_failed.set(i64::from(failed));
    }

    /// Counts addresses that this node has begun to announce at layer 2.
    pub(crate) fn count_takeovers(&self, addresses: usize) {
        self.own.announce_takeovers.inc_by(addresses as u64);
    }

    /// Counts a probe of an endpoint with this result.
    pub(crate) fn count_probe(&self, result: &'static str) {
        self.own.probes.get_or_create(&Probe { result }).inc();
    }

    /// Sets the number of targets (endpoint and port) of health checks whose health on this node is `health`.
    pub(crate) fn set_probed_endpoints(&self, health: &'static str, count: usize) {
        self.own.probed_endpoints.get_or_create(&Health { health }).set(gauge(count));
    }

    /// Sets the numbers of listening sockets for health checks of Services (`serving`), and of those that could not be
    /// opened (`failed`).
    pub(crate) fn set_health_check_servers(&self, serving: usize, failed: usize) {
        self.own.health_check_servers.set(gauge(serving));
        self.own.health_check_failures.set(gauge(failed));
    }
}
