//! Tests of the DNS names of objects in an API server.

use lb_tests::resolver::Resolver;
use serde_json::json;

use crate::bed::{Bed, DNS, LIMIT, headless};

#[test]
fn services_that_the_proxy_ignores_have_names() {
    let mut bed = Bed::with_faults();
    bed.put("a", 1);
    let mut slice = bed.slice("peers", 3);
    slice["metadata"]["labels"]["service.kubernetes.io/headless"] = "".into();
    bed.cluster.apply(&headless(&bed, "peers"));
    bed.cluster.apply(&slice);
    let mut other = bed.service("other", 9);
    other["metadata"]["labels"] = json!({"service.kubernetes.io/service-proxy-name": "another"});
    bed.cluster.apply(&other);
    let mut outside = bed.service("outside", 8);
    outside["spec"] = json!({"type": "ExternalName", "externalName": "db.example.com"});
    bed.cluster.apply(&outside);
    bed.start_agent_with(&DNS);
    let resolver = Resolver::new(bed.netns.clone(), bed.bpffs().parent().unwrap()).unwrap();
    let has = |name: &str, wanted: &[String]| {
        let addresses = || resolver.addresses("ahosts", name).unwrap();
        bed.wait_until(name, LIMIT, |_| addresses() == wanted);
    };
    let ip = |name: &str, number| {
        vec![bed.service(name, number)["spec"]["clusterIP"].as_str().unwrap().to_owned()]
    };
    has("a", &ip("a", 1));
    has("other", &ip("other", 9));
    has("peers", &["198.51.100.3".to_owned()]);
    let alias = resolver.dig(&["outside.default.svc.cluster.local", "CNAME", "+short"]).unwrap();
    assert_eq!(alias.trim(), "db.example.com.");
    bed.wait_until("the proxy serves only a", LIMIT, |bed| bed.served() == ["a 1"]);
    bed.cluster.delete(&slice);
    has("peers", &[]);
    bed.cluster.apply(&bed.slice("peers", 4));
    has("peers", &["198.51.100.4".to_owned()]);
}

#[test]
fn names_of_unreadable_objects_are_not_denied() {
    let mut bed = Bed::with_faults();
    bed.put("a", 1);
    let mut service = bed.service("bad", 2);
    service["spec"]["ports"] = "many".into();
    bed.cluster.apply(&service);
    bed.cluster.apply(&headless(&bed, "peers"));
    let mut slice = bed.slice("peers", 3);
    slice["endpoints"] = "many".into();
    bed.cluster.apply(&slice);
    bed.start_agent_with(&DNS);
    let resolver = Resolver::new(bed.netns.clone(), bed.bpffs().parent().unwrap()).unwrap();
    let has = |name: &str, status: &str| {
        let full = format!("{name}.default.svc.cluster.local");
        let text = || resolver.dig(&[&*full]).unwrap();
        bed.wait_until(name, LIMIT, |_| text().contains(&format!("status: {status},")));
    };
    has("a", "NOERROR");
    has("bad", "SERVFAIL");
    has("x.peers", "SERVFAIL");
    has("other", "NXDOMAIN");
    bed.cluster.apply(&bed.slice("peers", 3));
    has("x.peers", "NXDOMAIN");
}

#[test]
fn empty_namespace_exists() {
    let mut bed = Bed::with_faults();
    bed.put("a", 1);
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "empty"}});
    bed.cluster.apply(&namespace);
    bed.start_agent_with(&DNS);
    let resolver = Resolver::new(bed.netns.clone(), bed.bpffs().parent().unwrap()).unwrap();
    let answers = |name: &str, wanted: &str| {
        let full = format!("{name}.cluster.local");
        let text = || resolver.dig(&[&*full]).unwrap();
        bed.wait_until(&format!("{name}: {wanted}"), LIMIT, |_| text().contains(wanted));
    };
    answers("a.default.svc", "status: NOERROR,");
    answers("empty.svc", "status: NOERROR,");
    answers("10-1-2-3.empty.pod", "10.1.2.3");
    answers("missing.svc", "status: NXDOMAIN,");
    answers("10-1-2-3.missing.pod", "status: NXDOMAIN,");
    bed.cluster.delete(&namespace);
    answers("empty.svc", "status: NXDOMAIN,");
}
