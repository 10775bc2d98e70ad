//! Tests how API objects affect the Services in the kernel, with the mock or a real API server.

use serde_json::{Value, json};

use crate::{
    api_server::ApiServer,
    bed::{A_WHILE, Bed, LIMIT, endpoint},
    cluster::Cluster,
};

#[test]
fn listed_and_watched_objects_are_served() {
    let bed = Bed::new().with_a_and_b();
    bed.put("c", 3);
    bed.wait_served("an added Service", LIMIT, &["a 1", "b 2", "c 3"]);
    bed.cluster.apply(&bed.slice("a", 7));
    bed.wait_served("a changed EndpointSlice", LIMIT, &["a 1 7", "b 2", "c 3"]);
    bed.cluster.delete(&bed.slice("c", 3));
    bed.wait_served("no endpoints", LIMIT, &["a 1 7", "b 2", "c 3 without backends"]);
    bed.delete("b");
    bed.cluster.delete(&bed.service("c", 3));
    bed.wait_served("deleted Services", LIMIT, &["a 1 7"]);
    assert_eq!(bed.problems(), "[]");
}

#[test]
fn services_and_slices_may_come_in_any_order() {
    let bed = Bed::new().with_a_and_b();
    bed.cluster.apply(&bed.slice("c", 3));
    bed.cluster.apply(&bed.service("d", 4));
    bed.wait_served("a Service without slice", LIMIT, &["a 1", "b 2", "d 4 without backends"]);
    bed.cluster.apply(&bed.service("c", 3));
    bed.cluster.apply(&bed.slice("d", 4));
    bed.wait_served("Services with slices", LIMIT, &["a 1", "b 2", "c 3", "d 4"]);
    bed.cluster.delete(&bed.service("c", 3));
    bed.wait_served("a slice without Service", LIMIT, &["a 1", "b 2", "d 4"]);
}

#[test]
fn endpoint_moves_between_slices_without_a_gap() {
    let bed = Bed::new().with_a_and_b();
    let slice = |name: &str, numbers: &[u8]| {
        bed.slice_of(name, "a", &numbers.iter().map(|number| endpoint(*number)).collect::<Vec<_>>())
    };
    bed.cluster.apply(&slice("a", &[1, 7]));
    bed.wait_served("two endpoints", LIMIT, &["a 1 7", "b 2"]);
    // Like the EndpointSlice controller, adds the endpoint to the new slice before removing it from the old one.
    bed.cluster.apply(&slice("a-2", &[7]));
    bed.assert_stays(&["a 1 7", "b 2"], A_WHILE);
    bed.cluster.apply(&slice("a", &[1]));
    bed.assert_stays(&["a 1 7", "b 2"], A_WHILE);
    bed.cluster.delete(&slice("a-2", &[]));
    bed.wait_served("one endpoint", LIMIT, &["a 1", "b 2"]);
}

#[test]
fn ready_entry_of_an_endpoint_in_two_slices_counts() {
    let bed = Bed::new().with_a_and_b();
    let ending = json!({
        "addresses": ["198.51.100.7"],
        "conditions": {"ready": false, "serving": true, "terminating": true},
    });
    bed.cluster.apply(&bed.slice_of("a", "a", &[endpoint(1), ending.clone()]));
    bed.cluster.apply(&bed.slice_of("a-0", "a", &[endpoint(7)]));
    bed.wait_served("the ready entry in a later slice", LIMIT, &["a 1 7", "b 2"]);
    bed.cluster.apply(&bed.slice_of("a", "a", &[endpoint(1), endpoint(7)]));
    bed.cluster.apply(&bed.slice_of("a-0", "a", &[ending]));
    bed.assert_stays(&["a 1 7", "b 2"], A_WHILE);
    bed.cluster.apply(&bed.slice_of("a", "a", &[endpoint(1)]));
    bed.wait_served("only one ready entry", LIMIT, &["a 1", "b 2"]);
}

#[test]
fn service_type_can_change_and_change_back() {
    let bed = Bed::new().with_a_and_b();
    let typed = |type_: &str| {
        let mut service = bed.service("a", 1);
        service["spec"]["type"] = type_.into();
        service
    };
    let external_name = || {
        let mut service = typed("ExternalName");
        service["spec"] = json!({"type": "ExternalName", "externalName": "example.com"});
        service
    };
    for type_ in ["NodePort", "LoadBalancer", "ClusterIP"] {
        bed.cluster.apply(&typed(type_));
        bed.assert_stays(&["a 1", "b 2"], A_WHILE);
    }
    bed.cluster.apply(&external_name());
    bed.wait_served("an ExternalName has no address", LIMIT, &["b 2"]);
    bed.cluster.apply(&typed("ClusterIP"));
    bed.wait_served("it has an address again", LIMIT, &["a 1", "b 2"]);
    bed.cluster.apply(&external_name());
    bed.cluster.apply(&typed("NodePort"));
    bed.wait_served("an address of another type", LIMIT, &["a 1", "b 2"]);
}

/// The API server stores a condition that has no `lastTransitionTime`, and returns it with `lastTransitionTime: null`.
#[test]
fn null_transition_time_of_a_condition_does_not_stop_updates_of_a_service() {
    let mut bed = Bed::new().with_a_and_b();
    let at_port = |bed: &Bed, port: u16| {
        let mut service = bed.service("a", 1);
        service["spec"]["ports"][0]["port"] = port.into();
        service["status"]["conditions"] =
            json!([{"type": "Ready", "status": "True", "reason": "R", "message": ""}]);
        service
    };
    let serves = |bed: &Bed, port: u16| {
        let services = bed.json(&["service", "list"]).unwrap_or_default();
        let of_a = services.as_array().into_iter().flatten().filter(|service| service["name"] == "a");
        let ports = of_a.flat_map(|service| service["frontends"].as_array().unwrap());
        ports.map(|frontend| &frontend["port"]).eq([port])
    };
    assert!(serves(&bed, 80));
    bed.cluster.apply(&at_port(&bed, 81));
    bed.cluster.apply(&at_port(&bed, 82));
    bed.wait_until("the port set beside the condition", LIMIT, |bed| serves(bed, 82));
    assert_eq!(bed.problems(), "[]");

    bed.kill_agent();
    bed.cluster.apply(&at_port(&bed, 83));
    bed.start_agent();
    bed.wait_until("the port that the first list shows", LIMIT, |bed| serves(bed, 83));
    assert_eq!(bed.problems(), "[]");
}

#[test]
fn headless_service_is_ignored() {
    let bed = Bed::new().with_a_and_b();
    let headless = |name: &str| {
        let mut service = bed.service(name, 0);
        service["spec"]["clusterIP"] = "None".into();
        service
    };
    bed.cluster.apply(&headless("c"));
    bed.cluster.apply(&bed.slice("c", 3));
    bed.assert_stays(&["a 1", "b 2"], A_WHILE);
    // `clusterIP` is immutable, so to become headless, a Service must be deleted and created again.
    bed.cluster.delete(&bed.service("a", 1));
    bed.cluster.apply(&headless("a"));
    bed.wait_served("it has become headless", LIMIT, &["b 2"]);
    bed.cluster.delete(&bed.service("a", 1));
    bed.cluster.apply(&bed.service("a", 1));
    bed.wait_served("it has an address again", LIMIT, &["a 1", "b 2"]);
}

#[test]
fn service_of_another_proxy_is_ignored_while_labelled() {
    let bed = Bed::new().with_a_and_b();
    let labelled = |mut object: Value, label: &str| {
        object["metadata"]["labels"][label] = "another".into();
        object
    };
    // The programs still know the address of the Service, so they do not drop packets to this address, but leave them
    // to the other proxy.
    let addresses = |bed: &Bed| {
        let maps = bed.json(&["status"]).unwrap()["maps"].clone();
        let vips = maps.as_array().unwrap().iter().find(|map| map["name"] == "VIPS").cloned().unwrap();
        vips["entries"].as_u64().unwrap()
    };
    let before = addresses(&bed);
    bed.cluster.apply(&labelled(bed.service("a", 1), "service.kubernetes.io/service-proxy-name"));
    bed.wait_served("a belongs to another proxy", LIMIT, &["b 2"]);
    assert_eq!(addresses(&bed), before);
    bed.cluster.apply(&bed.service("a", 1));
    bed.wait_served("a is ours again", LIMIT, &["a 1", "b 2"]);
    bed.cluster.apply(&labelled(bed.slice("b", 2), "service.kubernetes.io/headless"));
    bed.wait_served("a slice of a headless Service", LIMIT, &["a 1", "b 2 without backends"]);
    bed.cluster.apply(&bed.slice("b", 2));
    bed.wait_served("the slice is back", LIMIT, &["a 1", "b 2"]);
}

#[test]
fn restarted_agent_catches_up() {
    let mut bed = Bed::new().with_a_and_b();
    bed.kill_agent();
    bed.delete("a");
    bed.put("c", 3);
    bed.cluster.apply(&bed.slice("b", 7));
    assert_eq!(bed.served(), ["a 1", "b 2"]);
    bed.start_agent();
    bed.wait_served("changes made without an agent", LIMIT, &["b 2 7", "c 3"]);
}

/// Uses the mock like a real server: through a forwarder in the agent's namespace, and only through the API.
#[test]
fn api_server_outside_the_node_is_reached() {
    let mut server = ApiServer::start(None);
    {
        let bed = Bed::with(Some(Cluster::outside(&server.kubeconfig()))).with_a_and_b();
        bed.cluster.apply(&bed.slice("a", 7));
        bed.wait_served("a changed EndpointSlice", LIMIT, &["a 1 7", "b 2"]);
        bed.delete("b");
        bed.wait_served("a deleted Service", LIMIT, &["a 1 7"]);
    }
    server.stop();
}
