//! Tests how the Node object and ServiceCIDRs affect the data plane, and which Events the agent creates.

use std::net::IpAddr;

use lb_common::{Address, Settings, settings_flags};
use lb_datapath::Pinned;
use serde_json::{Value, json};

use crate::bed::{A_WHILE, Bed, LIMIT, endpoint};

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

/// A node with two addresses, of which the Node object has only the second.
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
    let Settings { internal, service_ranges, source_v4, .. } = settings;
    *source_v4 == address("192.0.2.9")
        && (internal.count, service_ranges.count) == (1, 1)
        && internal.contains(&address("10.244.3.7"))
        && service_ranges.contains(&address("10.96.255.255"))
}

/// The clients that are masqueraded at the cluster IP, as `service list` names them.
fn masqueraded(bed: &Bed) -> Option<Value> {
    Some(bed.json(&["service", "list"])?[0]["frontends"][0]["masquerade"].clone())
}

fn node_ports(bed: &Bed) -> Option<Value> {
    Some(bed.json(&["status"])?["agent"]["node"]["nodePortAddresses"].clone())
}

#[test]
fn settings_follow_the_node_object_and_survive_without_the_api_server() {
    let mut bed = bed();
    bed.start_agent_with(&ARGUMENTS);
    bed.wait_until("settings", LIMIT, |bed| settings(bed).is_some_and(|now| are_from_the_api_server(&now)));
    bed.wait_until("node ports", LIMIT, |bed| node_ports(bed) == Some(json!(["192.0.2.9"])));
    bed.wait_served("the service", LIMIT, &["a 1"]);

    bed.kill_agent();
    bed.server_mut().stop();
    bed.start_agent_with(&ARGUMENTS);
    bed.wait_until("an agent without API server", LIMIT, |bed| node_ports(bed) == Some(json!(["192.0.2.9"])));
    assert!(are_from_the_api_server(&settings(&bed).unwrap()), "{:?}", settings(&bed));
    bed.assert_stays(&["a 1"], A_WHILE);
    assert!(are_from_the_api_server(&settings(&bed).unwrap()), "{:?}", settings(&bed));
}

#[test]
fn backends_follow_the_zone_label_of_the_node() {
    let mut bed = bed();
    let in_zone = |zone: &str| {
        let mut node = node(&["10.244.3.0/24"]);
        node["metadata"]["labels"] = json!({"topology.kubernetes.io/zone": zone});
        node
    };
    let endpoints = [(7, "z1"), (8, "z2")].map(|(number, zone)| {
        let mut endpoint = endpoint(number);
        endpoint["hints"] = json!({"forZones": [{"name": zone}]});
        endpoint
    });
    bed.server().put(bed.slice_of("a", "a", &endpoints));
    bed.server().put(in_zone("z1"));
    bed.start_agent_with(&ARGUMENTS);
    bed.wait_served("the endpoint of the zone", LIMIT, &["a 1 7"]);
    bed.server().put(in_zone("z2"));
    bed.wait_served("the endpoint of another zone", LIMIT, &["a 1 8"]);
    bed.server().put(in_zone("z3"));
    bed.wait_served("no hint names the zone", LIMIT, &["a 1 7 8"]);
}

/// The addresses from which the node accepts tunnelled packets, in addition to the networks of `--dsr-peers`.
fn peers(bed: &Bed) -> Vec<String> {
    let peers = Pinned::open(&bed.bpffs()).and_then(|pinned| pinned.peers()).unwrap_or_default();
    peers.into_iter().map(|address| IpAddr::from(address).to_string()).collect()
}

fn other_node(name: &str, addresses: &[&str]) -> Value {
    let internal = |address: &&str| json!({"type": "InternalIP", "address": address});
    let addresses: Vec<Value> = addresses.iter().map(internal).collect();
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": {"addresses": addresses},
    })
}

#[test]
fn tunnel_peers_follow_the_nodes_of_the_cluster_and_survive_without_the_api_server() {
    let mut bed = bed();
    bed.server().put(other_node("b", &["192.0.2.20", "2001:db8::20"]));
    let dsr = ["--north-south-mode", "dsr"];
    bed.start_agent_with(&dsr);
    bed.wait_until("the peer", LIMIT, |bed| peers(bed) == ["192.0.2.20", "2001:db8::20"]);
    bed.server().put(other_node("c", &["192.0.2.30"]));
    bed.wait_until("a new node", LIMIT, |bed| peers(bed) == ["192.0.2.20", "192.0.2.30", "2001:db8::20"]);
    bed.server().put(other_node("b", &["192.0.2.21"]));
    bed.wait_until("another address", LIMIT, |bed| peers(bed) == ["192.0.2.21", "192.0.2.30"]);
    bed.server().delete(&other_node("b", &[]));
    bed.wait_until("a deleted node", LIMIT, |bed| peers(bed) == ["192.0.2.30"]);
    let shown = |bed: &Bed| Some(bed.json(&["status"])?["agent"]["node"]["dsrPeers"].clone());
    bed.wait_until("the status", LIMIT, |bed| shown(bed) == Some(json!(["192.0.2.30"])));

    bed.kill_agent();
    bed.server_mut().stop();
    bed.start_agent_with(&dsr);
    bed.wait_until("an agent without API server", LIMIT, |bed| shown(bed).is_some());
    assert_eq!(peers(&bed), ["192.0.2.30"]);

    // Without `--north-south-mode dsr`, the agent decapsulates no packets and has no peers.
    bed.kill_agent();
    bed.start_agent_with(&[]);
    bed.wait_until("no peers", LIMIT, |bed| peers(bed).is_empty());
}

#[test]
fn no_client_is_external_before_the_node_has_a_pod_cidr() {
    let mut bed = bed();
    bed.server().put(node(&[]));
    bed.start_agent_with(&ARGUMENTS);
    bed.wait_served("the service", LIMIT, &["a 1"]);
    let complains = |bed: &Bed| bed.problems().contains("has no podCIDR of family IPv4");
    bed.wait_until("the problem", LIMIT, complains);
    assert_eq!(masqueraded(&bed), Some(json!("none")), "pods would be masqueraded as well");
    assert!(!bed.problems().contains("IPv6"), "no Service has that family: {}", bed.problems());

    bed.server().put(node(&["10.244.3.0/24"]));
    bed.wait_until("outsiders", LIMIT, |bed| masqueraded(bed) == Some(json!("outsiders")));
    assert!(
        settings(&bed).unwrap().internal.contains(&address("10.244.3.7")),
        "the settings are written before clients are masqueraded"
    );
    bed.wait_until("no problem", LIMIT, |bed| !complains(bed));

    // An agent that cannot reach the API server uses the node's addresses that its predecessor has stored.
    bed.kill_agent();
    bed.server_mut().stop();
    bed.start_agent_with(&ARGUMENTS);
    bed.wait_until("an agent without API server", LIMIT, |bed| node_ports(bed) == Some(json!(["192.0.2.9"])));
    bed.assert_stays(&["a 1"], A_WHILE);
    assert_eq!(masqueraded(&bed), Some(json!("outsiders")));
}

#[test]
fn agent_start_is_an_event() {
    let mut bed = bed();
    bed.start_agent();
    bed.wait_until("an event", LIMIT, |bed| !bed.server().events().is_empty());
    let events = bed.server().events();
    let [event] = &events[..] else { panic!("{events:?}") };
    assert_eq!(
        [&event["reason"], &event["type"], &event["regarding"]["kind"], &event["regarding"]["name"]],
        ["Starting", "Normal", "Node", "a"]
    );
}

/// Before the first complete write of the maps, another proxy may still serve addresses that the agent does not have
/// yet.
#[test]
fn unknown_cluster_ips_are_dropped_only_after_the_first_full_write() {
    let drops =
        |bed: &Bed| settings(bed).is_some_and(|now| now.flags & settings_flags::DROP_UNKNOWN_VIPS != 0);
    let ranges = ["--service-cluster-ip-range", "10.96.0.0/16"];
    let mut bed = bed();
    bed.server_mut().stop();
    bed.start_agent_with(&ranges);
    bed.wait_until("settings", LIMIT, |bed| settings(bed).is_some_and(|now| now.service_ranges.count == 1));
    bed.assert_stays(&[], A_WHILE);
    assert!(!drops(&bed), "the agent has read no Service yet");
    bed.server_mut().listen();
    bed.wait_served("the service", LIMIT, &["a 1"]);
    bed.wait_until("unknown addresses are dropped", LIMIT, drops);

    bed.kill_agent();
    bed.server_mut().stop();
    bed.start_agent_with(&ranges);
    bed.wait_until("an agent without API server", LIMIT, |bed| node_ports(bed).is_some());
    assert!(drops(&bed), "the maps are still complete");
}
