//! Tests of health checks of endpoints, and of Events about annotations and full maps, in a cluster.

use std::net::{Ipv4Addr, TcpListener};

use serde_json::{Value, json};

use crate::bed::{Bed, LIMIT};

/// The Events about the Service `a` that have this reason.
fn events(bed: &Bed, reason: &str) -> Vec<Value> {
    let mut events = bed.server().events();
    events.retain(|event| event["reason"] == reason && event["regarding"]["name"] == "a");
    events
}

/// The backends of the Service `a` in the kernel.
fn backends(bed: &Bed) -> Vec<String> {
    let services = bed.json(&["service", "show", "a"]).unwrap_or_default();
    let backends = services[0]["backends"].as_array().cloned().unwrap_or_default();
    backends.iter().map(|backend| backend["address"].as_str().unwrap_or_default().to_owned()).collect()
}

fn annotated(bed: &Bed, annotations: &Value) {
    let mut service = bed.service("a", 1);
    service["metadata"]["annotations"] = annotations.clone();
    bed.server().put(service);
}

#[test]
fn unhealthy_endpoint_is_an_event_and_gets_no_new_flows_until_it_recovers() {
    let bed = Bed::with_faults().with_a_and_b();
    // There is no route to 198.51.100.1. The node has 198.51.100.7 on its loopback device, and the test listens there.
    bed.netns.ip("address add 198.51.100.7/32 dev lo").unwrap();
    let server = bed.netns.run(|| TcpListener::bind((Ipv4Addr::new(198, 51, 100, 7), 8080))).unwrap();
    let endpoints = [crate::bed::endpoint(1), crate::bed::endpoint(7)];
    bed.server().put(bed.slice_of("a", "a", &endpoints));
    bed.wait_served("without a check", LIMIT, &["a 1 7", "b 2"]);
    annotated(&bed, &json!({"lb.dev/health-check": "tcp", "lb.dev/health-check-interval": "400ms"}));
    bed.wait_until("198.51.100.1 gets no new flows", LIMIT, |bed| backends(bed) == ["198.51.100.7"]);
    bed.wait_until("an Event", LIMIT, |bed| !events(bed, "EndpointUnhealthy").is_empty());
    let event = events(&bed, "EndpointUnhealthy").remove(0);
    assert_eq!((&event["type"], &event["regarding"]["kind"]), (&"Warning".into(), &"Service".into()));
    let note = event["note"].as_str().unwrap();
    assert!(note.starts_with("endpoint 198.51.100.1:8080 is unhealthy for node a (tcp): "), "{note}");
    bed.netns.ip("address add 198.51.100.1/32 dev lo").unwrap();
    let recovered = bed.netns.run(|| TcpListener::bind((Ipv4Addr::new(198, 51, 100, 1), 8080))).unwrap();
    bed.wait_until("198.51.100.1 gets new flows again", LIMIT, |bed| backends(bed).len() == 2);
    bed.wait_until("another Event", LIMIT, |bed| !events(bed, "EndpointHealthy").is_empty());
    let event = events(&bed, "EndpointHealthy").remove(0);
    assert_eq!((&event["type"], &event["regarding"]["kind"]), (&"Normal".into(), &"Service".into()));
    let note = event["note"].as_str().unwrap();
    assert!(note.starts_with("endpoint 198.51.100.1:8080 is healthy again for node a (tcp)"), "{note}");
    drop((server, recovered));
}

#[test]
fn annotation_is_one_event_and_invalid_ones_keep_the_check() {
    let bed = Bed::with_faults().with_a_and_b();
    annotated(&bed, &json!({"lb.dev/health-check": "tcp"}));
    let check = |bed: &Bed| {
        let show = bed.json(&["service", "show", "a"]).unwrap_or_default();
        show[0]["healthCheck"]["check"].clone()
    };
    bed.wait_until("the check", LIMIT, |bed| check(bed) == "tcp");
    let cloud = "service.beta.kubernetes.io/aws-load-balancer-ssl-cert";
    annotated(&bed, &json!({"lb.dev/health-check": "icmp", cloud: "arn"}));
    bed.wait_until("both Events", LIMIT, |bed| {
        !events(bed, "AnnotationInvalid").is_empty() && !events(bed, "AnnotationIgnored").is_empty()
    });
    assert_eq!(check(&bed), "tcp", "the last valid check stays");
    let note = events(&bed, "AnnotationIgnored")[0]["note"].as_str().unwrap().to_owned();
    assert!(note.starts_with(&format!("annotation {cloud} of Service default/a is ignored")), "{note}");
    let note = events(&bed, "AnnotationInvalid")[0]["note"].as_str().unwrap().to_owned();
    assert!(note.contains("lb.dev/health-check") && note.contains("icmp"), "{note}");
    let mut service = bed.service("a", 1);
    service["metadata"]["annotations"] = json!({"lb.dev/health-check": "icmp", cloud: "arn", "other": "x"});
    bed.server().put(service);
    bed.put("c", 3);
    bed.wait_served("another Service", LIMIT, &["a 1", "b 2", "c 3"]);
    assert_eq!((events(&bed, "AnnotationIgnored").len(), events(&bed, "AnnotationInvalid").len()), (1, 1));
}

/// The notes of the Events `AnnotationIgnored` about this annotation, whichever Service has it.
fn notes_about(bed: &Bed, annotation: &str) -> Vec<String> {
    let events = bed.server().events();
    let ignored = events.iter().filter(|event| event["reason"] == "AnnotationIgnored");
    let notes = ignored.map(|event| event["note"].as_str().unwrap_or_default().to_owned());
    let start = format!("annotation {annotation} of Service ");
    notes.filter(|note| note.starts_with(&start)).collect()
}

#[test]
fn every_annotation_without_effect_is_one_event_that_names_it() {
    let bed = Bed::with_faults().with_a_and_b();
    let unknown = "service.beta.kubernetes.io/of-another-cloud";
    let names: Vec<&str> = lb_core::convert::ignored_names().chain([unknown]).collect();
    let put_all = |other: &str| {
        for (number, name) in (10_u8..).zip(names.iter().copied()) {
            let mut service = bed.service(&format!("s{number}"), number);
            service["metadata"]["annotations"] = json!({name: "x", "other": other});
            bed.server().put(service);
        }
    };
    put_all("1");
    for (number, name) in (10_u8..).zip(names.iter().copied()) {
        bed.wait_until(name, LIMIT, |bed| !notes_about(bed, name).is_empty());
        let note = notes_about(&bed, name).remove(0);
        let start = format!("annotation {name} of Service default/s{number} is ignored (value \"x\"): ");
        assert!(note.len() > start.len() && note.starts_with(&start), "{note}");
    }
    put_all("2");
    bed.put("c", 3);
    bed.wait_until("another Service", LIMIT, |bed| bed.served().contains(&"c 3".to_owned()));
    for name in names {
        assert_eq!(notes_about(&bed, name).len(), 1, "{name}");
    }
}

#[test]
fn service_without_room_in_a_map_is_one_event() {
    let mut bed = Bed::with_faults();
    bed.put("b", 2);
    bed.start_agent_with(&["--max-frontends", "1"]);
    bed.wait_served("b has the only entry", LIMIT, &["b 2"]);
    bed.put("a", 1);
    bed.wait_until("an Event", LIMIT, |bed| !events(bed, "MapFull").is_empty());
    let note = events(&bed, "MapFull")[0]["note"].as_str().unwrap().to_owned();
    assert!(note.starts_with("Service default/a needs room for 1 frontends in SERVICES"), "{note}");
    bed.server().put(bed.slice("a", 7));
    bed.server().put(bed.slice("b", 3));
    bed.wait_served("a later change", LIMIT, &["b 2 3"]);
    assert_eq!(events(&bed, "MapFull").len(), 1);
}

#[test]
fn proxy_protocol_of_pods_is_one_event_about_kubelet_probes() {
    let bed = Bed::with_faults().with_a_and_b();
    let mut endpoint = crate::bed::endpoint(1);
    endpoint["targetRef"] = json!({"kind": "Pod", "namespace": "default", "name": "a-0"});
    bed.server().put(bed.slice_of("a", "a", &[endpoint]));
    annotated(&bed, &json!({"lb.dev/proxy-protocol": "v2"}));
    bed.wait_until("an Event", LIMIT, |bed| !events(bed, "ProbesWithoutHeader").is_empty());
    let event = events(&bed, "ProbesWithoutHeader").remove(0);
    assert_eq!((&event["type"], &event["regarding"]["kind"]), (&"Warning".into(), &"Service".into()));
    let note = event["note"].as_str().unwrap();
    assert!(note.contains("TCP port 8080") && note.contains("let probes use another port"), "{note}");
    assert!(bed.problems().contains(note), "{}", bed.problems());
    annotated(&bed, &json!({"lb.dev/proxy-protocol": "v2", "other": "x"}));
    bed.put("c", 3);
    bed.wait_served("another Service", LIMIT, &["a 1", "b 2", "c 3"]);
    assert_eq!(events(&bed, "ProbesWithoutHeader").len(), 1, "another change repeats no Event");
}
