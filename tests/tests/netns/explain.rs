//! Tests that `lb-agent explain` on a node agrees with real connections. (`packet::explain` covers more kinds of
//! Services.)

use std::net::SocketAddr;

use lb_tests::{agent, client::Connection, cluster::CLIENT};
use serde_json::Value;

use crate::bed::{Bed, WEB, http, vips};

fn explained(bed: &Bed, arguments: &[&str]) -> Value {
    let arguments = [&["explain", "-o", "json"], arguments].concat();
    let settings = bed.cluster.agent_settings(1);
    let output = agent::ask(&bed.cluster.node1, &settings.bpffs, &arguments).unwrap();
    serde_json::from_slice(&output.stdout).unwrap()
}

fn names(page: &Value) -> Vec<&str> {
    page["steps"].as_array().unwrap().iter().map(|step| step["step"].as_str().unwrap()).collect()
}

#[test]
fn explain_predicts_the_backend_and_follows_an_established_connection() {
    let bed = Bed::with_web(&["pod1"]);
    for (client, vip) in CLIENT.into_iter().zip(WEB) {
        let to = http(vip).to_string();
        let backend = bed.cluster.pod("pod1").unwrap().http(vip).to_string();

        let page = explained(&bed, &["--from", &client.to_string(), "--to", &to]);
        assert_eq!((&page["at"], &page["verdict"]), (&"tc-ingress".into(), &"begins".into()), "{page:#}");
        assert_eq!(page["backends"][0]["backend"], backend.as_str(), "{page:#}");
        assert_eq!(page["backends"][0]["outcome"], "new_flow");
        assert_eq!(names(&page)[..3], ["attached", "noPort", "frontend"], "{page:#}");
        assert_eq!(page["steps"][0]["program"], true, "{page:#}");

        let mut connection = Connection::open(&bed.cluster.client, http(vip)).unwrap();
        connection.ask().unwrap();
        let from = connection.stream().local_addr().unwrap().to_string();
        let page = explained(&bed, &["--from", &from, "--to", &to]);
        assert_eq!(
            (&page["verdict"], &page["outcome"]),
            (&"translated".into(), &"forward".into()),
            "{page:#}"
        );
        assert_eq!(
            (&page["to"], &page["ends"]["from"], &page["ends"]["to"]),
            (&to.as_str().into(), &from.as_str().into(), &backend.as_str().into())
        );
        assert_eq!(page["steps"][1]["phase"], "established", "{page:#}");
        let answer = explained(&bed, &["--from", &backend, "--to", &from, "--at", "tc-egress"]);
        assert_eq!(
            (&answer["outcome"], &answer["ends"]["from"]),
            (&"reply".into(), &to.as_str().into()),
            "{answer:#}"
        );
    }
}

#[test]
fn explain_states_why_a_connection_is_rejected() {
    let mut bed = Bed::with_web(&[]);
    let client = CLIENT[0].to_string();
    let verdict = |bed: &Bed, to: SocketAddr, more: &[&str]| {
        let to = to.to_string();
        let page = explained(bed, &[&["--from", &client, "--to", &to], more].concat());
        format!("{} {}", page["verdict"].as_str().unwrap(), page["outcome"].as_str().unwrap())
    };
    assert_eq!(verdict(&bed, http(WEB[0]), &[]), "rejected reject_tcp");
    assert_eq!(verdict(&bed, http(WEB[0]), &["--protocol", "udp"]), "rejected reject_udp");
    assert_eq!(verdict(&bed, http(vips(99)[0]), &[]), "untouched no_service");
    // `explain` works without an agent.
    bed.agent.take().unwrap().kill().unwrap();
    assert_eq!(verdict(&bed, http(WEB[0]), &[]), "rejected reject_tcp");
    let node =
        explained(&bed, &["--from", "172.18.0.1", "--to", &http(WEB[0]).to_string(), "--at", "socket"]);
    assert_eq!(node["text"], "the call fails with ECONNREFUSED (reject_tcp)", "{node:#}");
    let settings = bed.cluster.agent_settings(1);
    let refused = |devices: &[&str]| {
        let to = http(WEB[0]).to_string();
        let arguments = [&["explain", "--from", &client, "--to", &to], devices].concat();
        agent::ask(&bed.cluster.node1, &settings.bpffs, &arguments).unwrap_err().to_string()
    };
    let unknown = refused(&["--device", "nowhere"]);
    assert!(unknown.contains("no device nowhere in this network namespace, only lo, "), "{unknown}");
    let two = refused(&["--device", "eth0", "--device", "pod1"]);
    assert!(two.contains("'--device <NAME>' cannot be used multiple times"), "{two}");
}
