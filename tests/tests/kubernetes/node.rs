//! What the Node object and the ServiceCIDRs mean to the data plane, and what the API server hears of the agent.

use std::net::IpAddr;

use lb_common::{Address, Settings, settings_flags};
use lb_datapath::Pinned;
use serde_json::{Value, json};

use crate::bed::{A_WHILE, Bed, PATIENCE, SOON};

const ARGUMENTS: [&str; 4] = ["--detect-local-mode", "NodeCIDR", "--nodeport-addresses", "primary"];

fn address(text: &str) -> Address {
    text.parse::<IpAddr>().unwrap().into()
}

fn node(pod_cidrs: &[&str]) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"},
        "spec": {"podCIDR": pod_cidrs.first(), "podCIDRs": pod_cidrs},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.9"}]},
    })
}

/// A node with two addresses, of which the API server does not name the first.
fn bed() -> Bed {
    let bed = Bed::with_faults();
    bed.netns.ip("address add 192.0.2.1/24 dev lo\naddress add 192.0.2.9/32 dev lo\n").unwrap();
    bed.server().put(node(&["10.244.3.0/24"]));
    bed.server().put(json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": "kubernetes"},
        "spec": {"cidrs": ["10.96.0.0/16"]},
    }));
    bed.put("a", 1);
    bed
}

fn settings(bed: &Bed) -> Option<Settings> {
    Pinned::open(&bed.bpffs()).ok()?.settings().ok()
}

fn are_from_the_api_server(settings: &Settings) -> bool {
    let Settings { internal: inside, service_ranges, source_v4, .. } = settings;
    *source_v4 == address("192.0.2.9")
        && (inside.count, service_ranges.count) == (1, 1)
        && inside.contains(&address("10.244.3.7"))
        && service_ranges.contains(&address("10.96.255.255"))
}

/// Who is masqueraded at the cluster IP.
fn masqueraded(bed: &Bed) -> Option<Value> {
    Some(bed.json(&["service", "list"])?[0]["frontends"][0]["masquerade"].clone())
}

fn node_ports(bed: &Bed) -> Option<Value> {
    Some(bed.json(&["status"])?["agent"]["node"]["nodePortAddresses"].clone())
}

#[test]
fn the_settings_are_those_of_the_node_object_and_outlive_the_api_server() {
    let mut bed = bed();
    bed.start_agent_with(&ARGUMENTS);
    bed.wait_until("settings", SOON, |bed| settings(bed).is_some_and(|now| are_from_the_api_server(&now)));
    bed.wait_until("node ports", SOON, |bed| node_ports(bed) == Some(json!(["192.0.2.9"])));
    bed.wait_served("the service", SOON, &["a 1"]);

    bed.kill_agent();
    bed.server_mut().stop();
    bed.start_agent_with(&ARGUMENTS);
    bed.wait_until("an agent without API server", SOON, |bed| node_ports(bed) == Some(json!(["192.0.2.9"])));
    assert!(are_from_the_api_server(&settings(&bed).unwrap()), "{:?}", settings(&bed));
    bed.assert_stays(&["a 1"], A_WHILE);
    assert!(are_from_the_api_server(&settings(&bed).unwrap()), "{:?}", settings(&bed));
}

#[test]
fn nobody_is_an_outsider_until_the_node_has_networks_of_pods() {
    let mut bed = bed();
    bed.server().put(node(&[]));
    bed.start_agent_with(&ARGUMENTS);
    bed.wait_served("the service", SOON, &["a 1"]);
    let complains = |bed: &Bed| bed.problems().contains("has no podCIDR of family IPv4");
    bed.wait_until("the problem", SOON, complains);
    assert_eq!(masqueraded(&bed), Some(json!("none")), "pods would be, too");
    assert!(!bed.problems().contains("IPv6"), "no Service can have it: {}", bed.problems());

    bed.server().put(node(&["10.244.3.0/24"]));
    bed.wait_until("outsiders", SOON, |bed| masqueraded(bed) == Some(json!("outsiders")));
    assert!(
        settings(&bed).unwrap().internal.contains(&address("10.244.3.7")),
        "before anybody is masqueraded"
    );
    bed.wait_until("no problem", SOON, |bed| !complains(bed));

    // What an agent without the API server knows of the node, it knows from the one before.
    bed.kill_agent();
    bed.server_mut().stop();
    bed.start_agent_with(&ARGUMENTS);
    bed.wait_until("an agent without API server", SOON, |bed| node_ports(bed) == Some(json!(["192.0.2.9"])));
    bed.assert_stays(&["a 1"], A_WHILE);
    assert_eq!(masqueraded(&bed), Some(json!("outsiders")));
}

#[test]
fn the_api_server_hears_that_the_agent_starts() {
    let mut bed = bed();
    bed.start_agent();
    bed.wait_until("an event", SOON, |bed| !bed.server().events().is_empty());
    let events = bed.server().events();
    let [event] = &events[..] else { panic!("{events:?}") };
    assert_eq!(
        [&event["reason"], &event["type"], &event["regarding"]["kind"], &event["regarding"]["name"]],
        ["Starting", "Normal", "Node", "a"]
    );
}

/// Until then, what another proxy still serves would be dropped.
#[test]
fn unknown_addresses_are_dropped_only_once_all_known_ones_are_in_the_kernel() {
    let drops =
        |bed: &Bed| settings(bed).is_some_and(|now| now.flags & settings_flags::DROP_UNKNOWN_VIPS != 0);
    let ranges = ["--service-cluster-ip-range", "10.96.0.0/16"];
    let mut bed = bed();
    bed.server_mut().stop();
    bed.start_agent_with(&ranges);
    bed.wait_until("settings", SOON, |bed| settings(bed).is_some_and(|now| now.service_ranges.count == 1));
    bed.assert_stays(&[], A_WHILE);
    assert!(!drops(&bed), "the agent knows of no Service yet");
    bed.server_mut().listen();
    bed.wait_served("the service", PATIENCE, &["a 1"]);
    bed.wait_until("unknown addresses are dropped", SOON, drops);

    bed.kill_agent();
    bed.server_mut().stop();
    bed.start_agent_with(&ranges);
    bed.wait_until("an agent without API server", SOON, |bed| node_ports(bed).is_some());
    assert!(drops(&bed), "the maps are as complete as they were");
}
