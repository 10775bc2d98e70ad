use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, SystemTime},
};

use lb_common::Outcome;
use lb_core::{
    family::Family,
    model::{ObjectName, Protocol, ServicePortName, Trigger},
    traffic::{Tally, Traffic, Volume},
};

use super::{kube_proxy::Extent, *};
use crate::http_test::Server;

mod monitoring;

#[derive(Debug)]
struct Fixed;

impl PacketCounters for Fixed {
    fn packets(&self) -> Option<[u64; Outcome::COUNT]> {
        let mut packets = [0; Outcome::COUNT];
        packets[Outcome::NewFlow as usize] = 7;
        Some(packets)
    }
}

impl TrafficSource for Fixed {
    fn traffic(&self) -> Vec<(TrafficLabels, Tally)> {
        let service = ServicePortName {
            service: ObjectName::new("default", "web"),
            port: "http".into(),
            protocol: Protocol::Tcp,
        };
        let (sent, answered) = (Volume { packets: 4, bytes: 400 }, Volume { packets: 3, bytes: 3000 });
        let tally = Tally { total: Traffic { flows: 2, sent, answered }, active: 1 };
        let backend = Some("10.1.0.5:8080".parse().unwrap());
        vec![
            (TrafficLabels { service: service.clone(), backend: None }, tally),
            (TrafficLabels { service, backend }, tally),
        ]
    }
}

impl AgentState for Fixed {
    fn is_healthy(&self) -> bool {
        true
    }

    fn condition_counts(&self) -> Vec<(&'static str, usize)> {
        vec![("bgp", 3)]
    }
}

#[test]
fn sums_of_services_and_backends_have_their_labels() {
    let text = exposition::prometheus(&everything().text().unwrap());
    let labels = r#"namespace="default",service="web",port="http",protocol="TCP""#;
    for line in [
        format!("lb_service_new_flows_total{{{labels}}} 2"),
        format!("lb_service_active_flows{{{labels}}} 1"),
        format!(r#"lb_service_packets_total{{{labels},direction="sent"}} 4"#),
        format!(r#"lb_service_bytes_total{{{labels},direction="answered"}} 3000"#),
        format!(r#"lb_backend_bytes_total{{{labels},backend="10.1.0.5:8080",direction="sent"}} 400"#),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
}

/// Metrics in which every series that these tests look for has a value.
fn everything() -> Metrics {
    let metrics = Metrics::new(Fixed, Some(Fixed)).with_state(Fixed);
    metrics.count_healthz(503);
    metrics.count_livez(200);
    metrics.count_changes(2, 3);
    metrics.attempted(Extent::Full, Duration::from_millis(3));
    metrics.attempted(Extent::Partial, Duration::from_millis(5));
    metrics.synchronised();
    metrics.count_changes(1, 0);
    metrics.observe_sync_latency(Duration::from_secs(2));
    metrics.set_services(1, 2, 0);
    metrics.set_map("SERVICES", 1, 10);
    metrics.set_devices("wire", 1);
    metrics.swept(4, 3, 2);
    metrics.ended_connections(8, 9);
    metrics.count_evicted_clients(5);
    metrics.set_waiting("BACKENDS", 1);
    metrics.set_health_check_servers(2, 1);
    metrics.set_pools(&[lb_core::load_balancer::PoolUsage { pool: "a".into(), used: 3, total: 256 }]);
    metrics.set_announced(3, 2);
    metrics.set_uncovered(1);
    metrics.count_takeovers(4);
    metrics.set_routes(5, true);
    metrics.set_sessions(crate::announce::bgp::Sessions { established: 2, down: 1 });
    metrics.set_bird_failed(true);
    metrics.count_probe("success");
    metrics.set_probed_endpoints("healthy", 6);
    for family in Family::ALL {
        metrics.programmed(Trigger { family, time: SystemTime::now() - Duration::from_secs(90) });
        metrics.set_no_local_endpoints(family, 1, 2);
    }
    metrics.conntrack_reconciled(Duration::from_millis(1), [5, 6]);
    metrics
}

/// Type, label names and histogram buckets of one metric, as the page shows them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Described {
    kind: String,
    labels: BTreeSet<String>,
    buckets: Vec<String>,
}

/// The metrics that a page in Prometheus' format describes, by name.
fn described(text: &str) -> BTreeMap<String, Described> {
    let mut metrics: BTreeMap<String, Described> = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            metrics.insert(name.to_owned(), Described { kind: kind.to_owned(), ..Described::default() });
        } else if !line.starts_with('#') {
            let name = line.split(['{', ' ']).next().unwrap();
            let of_histogram =
                ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
            let name = of_histogram.filter(|name| metrics.contains_key(*name)).unwrap_or(name);
            let metric = metrics.get_mut(name).unwrap_or_else(|| panic!("{line} has no type"));
            let labels = line.split_once('{').map_or("", |(_, rest)| rest.split_once('}').unwrap().0);
            for (key, value) in labels.split(',').filter_map(|label| label.split_once('=')) {
                if key != "le" {
                    metric.labels.insert(key.to_owned());
                } else if !metric.buckets.iter().any(|bucket| bucket == value.trim_matches('"')) {
                    metric.buckets.push(value.trim_matches('"').to_owned());
                }
            }
        }
    }
    metrics
}

fn all_described() -> BTreeMap<String, Described> {
    described(&exposition::prometheus(&everything().text().unwrap()))
}

fn buckets(bounds: impl IntoIterator<Item = f64>) -> Vec<String> {
    let mut buckets: Vec<String> = bounds.into_iter().map(|bound| format!("{bound:?}")).collect();
    buckets.push("+Inf".to_owned());
    buckets
}

/// kube-proxy 1.36's metrics, with type and labels, without those for iptables, nftables and feature gates.
const KUBE_PROXY: [(&str, &str, &[&str]); 15] = [
    ("sync_proxy_rules_duration_seconds", "histogram", &["ip_family"]),
    ("sync_full_proxy_rules_duration_seconds", "histogram", &["ip_family"]),
    ("sync_partial_proxy_rules_duration_seconds", "histogram", &["ip_family"]),
    ("sync_proxy_rules_last_timestamp_seconds", "gauge", &["ip_family"]),
    ("sync_proxy_rules_last_queued_timestamp_seconds", "gauge", &["ip_family"]),
    ("network_programming_duration_seconds", "histogram", &["ip_family"]),
    ("sync_proxy_rules_endpoint_changes_pending", "gauge", &[]),
    ("sync_proxy_rules_endpoint_changes_total", "counter", &[]),
    ("sync_proxy_rules_service_changes_pending", "gauge", &[]),
    ("sync_proxy_rules_service_changes_total", "counter", &[]),
    ("proxy_healthz_total", "counter", &["code"]),
    ("proxy_livez_total", "counter", &["code"]),
    ("sync_proxy_rules_no_local_endpoints_total", "gauge", &["ip_family", "traffic_policy"]),
    ("conntrack_reconciler_sync_duration_seconds", "histogram", &["ip_family"]),
    ("conntrack_reconciler_deleted_entries_total", "counter", &["ip_family"]),
];

#[test]
fn kube_proxys_metrics_have_its_names_types_labels_and_buckets() {
    let found = all_described();
    let ours = found.keys().filter_map(|name| name.strip_prefix("kubeproxy_"));
    assert_eq!(ours.collect::<BTreeSet<_>>(), KUBE_PROXY.map(|(name, ..)| name).into());
    let durations = buckets((0..15).map(|power| 0.001 * f64::from(1 << power)));
    let steps = |first: u32, step: u32, count: u32| (0..count).map(move |n| f64::from(first + n * step));
    let fine = [0.0, 0.25, 0.5].into_iter().chain(steps(1, 1, 59));
    let programming = buckets(fine.chain(steps(60, 5, 12)).chain(steps(120, 30, 7)));
    for (name, kind, labels) in KUBE_PROXY {
        let buckets = match (kind, name) {
            ("histogram", "network_programming_duration_seconds") => programming.clone(),
            ("histogram", _) => durations.clone(),
            _ => Vec::new(),
        };
        let labels = labels.iter().map(|label| (*label).to_owned()).collect();
        let expected = Described { kind: kind.to_owned(), labels, buckets };
        assert_eq!(found[&format!("kubeproxy_{name}")], expected, "{name}");
    }
}

#[test]
fn metrics_page_describes_exactly_the_exported_metrics() {
    let page = include_str!("../../../docs/metrics.md");
    let mut on_page = BTreeMap::new();
    for row in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [name, kind, labels, meaning] = cells[..] else { panic!("not four cells: {row}") };
        let labels = labels.split(", ").filter(|label| !label.is_empty());
        let labels: BTreeSet<String> = labels.map(|label| label.trim_matches('`').to_owned()).collect();
        assert!(!meaning.is_empty(), "{row}");
        let earlier = on_page.insert(name.trim_matches('`').to_owned(), (kind.to_owned(), labels));
        assert_eq!(earlier, None, "twice: {row}");
    }
    let mut found = all_described();
    let slis = Metrics::new(NoPackets, Some(NoPackets));
    slis.record_health_check(true);
    found.append(&mut described(&exposition::prometheus(&encode(&slis.slis.registry).unwrap())));
    let found: BTreeMap<_, _> =
        found.into_iter().map(|(name, metric)| (name, (metric.kind, metric.labels))).collect();
    assert_eq!(on_page, found);
}

#[test]
fn recorded_values_are_exported() {
    let text = everything().text().unwrap();
    for line in [
        "lb_packets_total{outcome=\"new_flow\"} 7",
        "lb_packets_total{outcome=\"no_backend\"} 0",
        "kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"} 2",
        "kubeproxy_sync_proxy_rules_duration_seconds_bucket{le=\"0.004\",ip_family=\"IPv6\"} 1",
        "kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"} 1",
        "kubeproxy_network_programming_duration_seconds_bucket{le=\"85.0\",ip_family=\"IPv4\"} 0",
        "kubeproxy_network_programming_duration_seconds_bucket{le=\"95.0\",ip_family=\"IPv4\"} 1",
        "kubeproxy_sync_proxy_rules_service_changes_total 3",
        "kubeproxy_sync_proxy_rules_service_changes_pending 1",
        "kubeproxy_sync_proxy_rules_endpoint_changes_total 3",
        "kubeproxy_sync_proxy_rules_endpoint_changes_pending 0",
        "kubeproxy_proxy_healthz_total{code=\"503\"} 1",
        "kubeproxy_conntrack_reconciler_deleted_entries_total{ip_family=\"IPv6\"} 6",
        "lb_sync_latency_seconds_sum 2.0",
        "lb_service_ports 1",
        "lb_backends 2",
        "lb_sync_pending_steps 0",
        "lb_map_entries{map=\"SERVICES\"} 1",
        "lb_map_capacity{map=\"SERVICES\"} 10",
        "lb_conntrack_flows 4",
        "lb_conntrack_expired_total 3",
        "lb_conntrack_expired_early_total 2",
        "lb_conntrack_ended_total{reason=\"drained\"} 9",
        "lb_affinity_evicted_total 5",
        "lb_services_waiting{map=\"BACKENDS\"} 1",
        "lb_health_check_servers 2",
        "lb_pool_addresses{pool=\"a\"} 256",
        "lb_pool_addresses_used{pool=\"a\"} 3",
        "lb_conditions{about=\"bgp\"} 3",
        "lb_healthy 1",
        "lb_bgp_sessions{state=\"established\"} 2",
        "lb_bgp_sessions{state=\"down\"} 1",
        "lb_bird_config_failed 1",
        "# EOF",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is missing in:\n{text}");
    }
    let policy = "kubeproxy_sync_proxy_rules_no_local_endpoints_total{ip_family=\"IPv4\",traffic_policy=\"external\"} 2";
    assert!(text.contains(policy), "{text}");
    assert!(
        text.contains("kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"} 1"),
        "{text}"
    );
}

#[tokio::test]
async fn format_is_prometheus_text_unless_open_metrics_is_requested() {
    let metrics = std::sync::Arc::new(everything());
    let server = Server::start(router(std::sync::Arc::clone(&metrics))).await;
    let plain = server.get("/metrics").await;
    assert_eq!(plain.code, 200);
    assert_eq!(plain.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    assert!(plain.body.contains("# TYPE kubeproxy_proxy_livez_total counter\n"), "{}", plain.body);
    assert!(!plain.body.contains("# EOF"));
    let accept =
        "Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
    let open = server.get_with("/metrics", accept).await;
    assert!(open.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    assert!(open.body.ends_with("# EOF\n"), "{}", open.body);

    metrics.record_health_check(true);
    let slis = server.get("/metrics/slis").await.body;
    assert!(slis.contains("kubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1"), "{slis}");
    assert!(
        slis.contains("kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"healthz\"} 1")
    );
}
