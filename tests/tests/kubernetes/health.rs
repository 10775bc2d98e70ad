//! Tests of the health endpoints, metrics and Events of a node in a cluster.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    thread::sleep,
    time::Duration,
};

use lb_tests::http::{self, Answer};
use serde_json::{Value, json};

use crate::bed::{Bed, LIMIT};

const HEALTHZ: u16 = 10_256;
const METRICS: u16 = 10_249;
const CHECK: u16 = 32_000;

fn get(bed: &Bed, port: u16, path: &str) -> Answer {
    http::get(&bed.netns, SocketAddr::from((Ipv4Addr::LOCALHOST, port)), path).unwrap()
}

fn metric(bed: &Bed, name: &str) -> f64 {
    let page = get(bed, METRICS, "/metrics");
    page.metric(name).unwrap_or_else(|| panic!("{name} is missing in {page:?}"))
}

fn node(metadata: &Value, taints: &Value) -> Value {
    let mut node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}, "spec": {"taints": taints},
    });
    node["metadata"].as_object_mut().unwrap().extend(metadata.as_object().unwrap().clone());
    node
}

#[test]
fn node_being_deleted_is_not_eligible() {
    let bed = Bed::with_faults();
    let nothing = json!({});
    bed.server().put(node(&nothing, &json!([])));
    let bed = bed.with_a_and_b();
    let assert_eligible = |what: &str, eligible: bool| {
        let code = if eligible { 200 } else { 503 };
        bed.wait_until(what, LIMIT, |bed| {
            let answer = get(bed, HEALTHZ, "/healthz");
            let body: Value = serde_json::from_str(&answer.body).unwrap();
            answer.code == code && body["nodeEligible"] == eligible && body["healthy"] == true
        });
        assert_eq!(get(&bed, HEALTHZ, "/livez").code, 200, "{what}: the agent is alive");
        assert_eq!(bed.json(&["status"]).unwrap()["agent"]["nodeEligible"], eligible, "{what}");
    };
    assert_eligible("a node like any other", true);
    let taint = |key: &str| json!([{"key": key, "effect": "NoSchedule"}]);
    bed.server().put(node(&nothing, &taint("ToBeDeletedByClusterAutoscaler")));
    assert_eligible("the autoscaler removes the node", false);
    bed.server().put(node(&nothing, &taint("node.kubernetes.io/unschedulable")));
    assert_eligible("another taint", true);
    bed.server().put(node(&json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}), &json!([])));
    assert_eligible("the node is being deleted", false);
    bed.server().put(node(&nothing, &json!([])));
    assert_eligible("another node of that name", true);
    bed.server().delete(&node(&nothing, &json!([])));
    assert_eligible("no node", false);
}

#[test]
fn change_without_effect_is_not_pending() {
    let bed = Bed::with_faults().with_a_and_b();
    let changes = "kubeproxy_sync_proxy_rules_service_changes_total";
    let before = metric(&bed, changes);
    let mut service = bed.service("a", 1);
    service["metadata"]["annotations"] = json!({"unimportant": "yes"});
    bed.server().put(service);
    bed.wait_until("the change arrives", LIMIT, |bed| metric(bed, changes) > before);
    bed.wait_until("nothing waits", LIMIT, |bed| {
        metric(bed, "kubeproxy_sync_proxy_rules_service_changes_pending") == 0.0
            && bed.json(&["status"]).unwrap()["agent"]["pendingSince"] == Value::Null
    });
}

#[test]
fn programming_latency_of_a_trigger_is_measured_once() {
    let bed = Bed::with_faults().with_a_and_b();
    let count = |family: &str| {
        metric(
            &bed,
            &format!("kubeproxy_network_programming_duration_seconds_count{{ip_family=\"{family}\"}}"),
        )
    };
    assert_eq!(count("IPv4"), 0.0, "triggers before the agent's start do not count");
    let mut slice = bed.slice("a", 9);
    let triggered = "endpoints.kubernetes.io/last-change-trigger-time";
    slice["metadata"]["annotations"] = json!({ triggered: "2100-01-01T00:00:00Z" });
    bed.server().put(slice.clone());
    bed.wait_until("it is measured", LIMIT, |_| count("IPv4") == 1.0);
    slice["endpoints"] = json!([]);
    bed.server().put(slice);
    bed.wait_served("the slice is empty", LIMIT, &["a 1 without backends", "b 2"]);
    assert_eq!((count("IPv4"), count("IPv6")), (1.0, 0.0));
}

#[test]
fn unserved_health_check_is_reported_as_an_event() {
    let bed = Bed::with_faults().with_a_and_b();
    let taken = bed.netns.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, CHECK))).unwrap();
    let mut service = bed.service("a", 1);
    service["spec"].as_object_mut().unwrap().extend([
        ("type".to_owned(), "LoadBalancer".into()),
        ("externalTrafficPolicy".to_owned(), "Local".into()),
        ("healthCheckNodePort".to_owned(), CHECK.into()),
    ]);
    bed.server().put(service);
    let failures = || {
        let mut events = bed.server().events();
        events.retain(|event| event["reason"] == "FailedToStartServiceHealthcheck");
        events
    };
    bed.wait_until("an event", LIMIT, |_| !failures().is_empty());
    let event = failures().remove(0);
    assert_eq!(event["type"], "Warning");
    assert_eq!((&event["regarding"]["kind"], &event["regarding"]["name"]), (&"Service".into(), &"a".into()));
    let note = event["note"].as_str().unwrap();
    let begin = "node a failed to start healthcheck \"default/a\" on port 32000: listen tcp 0.0.0.0:32000: ";
    assert!(note.starts_with(begin), "{note}");
    // Waits longer than the pause before the next attempt, which must report nothing new.
    sleep(Duration::from_millis(1_500));
    assert_eq!(failures().len(), 1);
    drop(taken);
    bed.wait_until("it is served", LIMIT, |bed| {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, CHECK));
        http::get(&bed.netns, address, "/").is_ok_and(|answer| answer.code == 503)
    });
}
