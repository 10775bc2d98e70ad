//! Tests of each kind of name, and of properties of random sets of objects.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::api;

/// Applies an API object, given as JSON, to the index.
fn apply(index: &mut Index, object: Value) {
    for change in changes(object) {
        index.apply(change);
    }
}

fn changes(object: Value) -> Vec<NameChange> {
    let kind = object["kind"].as_str().unwrap().to_owned();
    match kind.as_str() {
        "Service" => {
            let object: api::Service = serde_json::from_value(object).unwrap();
            vec![service(&object, None).unwrap()]
        }
        "EndpointSlice" => {
            let object: api::EndpointSlice = serde_json::from_value(object).unwrap();
            vec![endpoint_slice(&object).unwrap()]
        }
        _ => {
            let object: api::Endpoints = serde_json::from_value(object).unwrap();
            let slices = endpoints(&object).unwrap().into_iter();
            slices.map(|(name, slice)| NameChange::Slice(name, Some(slice))).collect()
        }
    }
}

fn a_service(name: &str, spec: Value) -> Value {
    json!({"kind": "Service", "metadata": {"namespace": "n", "name": name}, "spec": spec})
}

fn a_slice(name: &str, service: &str, family: &str, ports: Value, endpoints: Value) -> Value {
    json!({
        "kind": "EndpointSlice",
        "metadata": {"namespace": "n", "name": name, "labels": {
            "kubernetes.io/service-name": service, "service.kubernetes.io/headless": "",
        }},
        "addressType": family, "ports": ports, "endpoints": endpoints,
    })
}

fn ready(address: &str) -> Value {
    json!({"addresses": [address], "conditions": {"ready": true}})
}

fn index() -> Index {
    let zone = Zone::new("cluster.local.", 5).unwrap();
    let ranges = vec!["10.96.0.0/12".parse().unwrap(), "fd00:10:96::/112".parse().unwrap()];
    Index::new(zone.with_ranges(ranges).with_servers(vec!["192.0.2.1".parse().unwrap()]))
}

/// An index with Services of each kind.
fn world() -> Index {
    let mut index = index();
    let web_ports = json!([
        {"name": "http", "port": 80}, {"name": "dns", "port": 53, "protocol": "UDP"},
    ]);
    let db_port = json!([{"name": "sql", "port": 5432}]);
    for object in [
        a_service("web", json!({"clusterIPs": ["10.96.0.10", "fd00:10:96::a"], "ports": web_ports})),
        a_slice(
            "web-1",
            "web",
            "IPv4",
            json!([{"name": "http", "port": 8080}]),
            json!([ready("10.244.0.9")]),
        ),
        a_service("plain", json!({"clusterIP": "10.96.0.11", "ports": [{"port": 81}]})),
        a_service("db", json!({"clusterIP": "None", "ports": [{"name": "sql", "port": 1}]})),
        a_slice(
            "db-1",
            "db",
            "IPv4",
            db_port.clone(),
            json!([
                {"addresses": ["10.244.0.1"], "hostname": "db-0", "conditions": {}},
                ready("10.244.0.2"),
                {"addresses": ["10.244.0.3"], "hostname": "db-3", "conditions": {"ready": false}},
            ]),
        ),
        a_slice(
            "db-2",
            "db",
            "IPv6",
            db_port,
            json!([
                {"addresses": ["fd00::2"], "hostname": "db-0"}, ready("fd00::"),
            ]),
        ),
        a_service("empty", json!({"clusterIP": "None", "ports": [{"name": "x", "port": 1}]})),
        a_service("portless", json!({"clusterIP": "None"})),
        a_slice("portless-1", "portless", "IPv4", json!([]), json!([ready("10.244.0.2")])),
        a_service("away", json!({"type": "ExternalName", "externalName": "Example.COM."})),
        a_service("literal", json!({"type": "ExternalName", "externalName": "192.0.2.7"})),
        a_service("svc", json!({"clusterIP": "10.96.0.12", "ports": [{"port": 1}]})),
        a_service("pod", json!({"clusterIP": "10.96.0.13", "ports": [{"port": 1}]})),
    ] {
        apply(&mut index, object);
    }
    index
}

fn ask(index: &Index, name: &str, kind: Kind) -> Answer {
    let labels: Vec<&[u8]> = name.split('.').filter(|label| !label.is_empty()).map(str::as_bytes).collect();
    index.lookup(&labels, kind)
}

/// The answer to a question as text: its records, separated by commas, or the kind of an answer without records.
fn text(index: &Index, name: &str, kind: Kind) -> String {
    let full = if name.ends_with('.') { name.to_owned() } else { format!("{name}.cluster.local.") };
    match ask(index, &full, kind) {
        Answer::Found(found) => {
            let records = found.records.iter().map(|data| match data {
                Data::A(ip) => ip.to_string(),
                Data::Aaaa(ip) => ip.to_string(),
                Data::Cname(name) | Data::Ns(name) | Data::Ptr(name) => name.clone(),
                Data::Srv { weight, port, target } => format!("0 {weight} {port} {target}"),
                Data::Txt(text) => (*text).to_owned(),
                Data::Hinfo => "RFC8482".to_owned(),
                Data::Soa => "soa".to_owned(),
            });
            records.collect::<Vec<_>>().join(", ")
        }
        Answer::Alias(name) => format!("-> {name}"),
        Answer::NoData(zone) => format!("nodata {zone}"),
        Answer::NxDomain(zone) => format!("nxdomain {zone}"),
        Answer::Unknown => "unknown".to_owned(),
        Answer::NotOurs => "not ours".to_owned(),
    }
}

const NODATA: &str = "nodata cluster.local";
const NXDOMAIN: &str = "nxdomain cluster.local";

#[track_caller]
fn check(rows: &[(&str, Kind, &str)]) {
    let index = world();
    for (name, kind, wanted) in rows {
        assert_eq!(text(&index, name, *kind), *wanted, "{name} {kind:?}");
    }
}

#[test]
fn names_of_unread_objects_are_neither_found_nor_denied() {
    let mut index = world();
    let unread = |services: &[&str], text: &str| Unread {
        anything: false,
        services: services.iter().map(|name| ObjectName::new("m", name)).collect(),
        words: words(text).unwrap(),
    };
    let unknown = ["a.m.svc", "x.a.m.svc", "_p._tcp.a.m.svc", "m.svc", "m.pod", "10-0-0-1.m.pod"];
    for state in [unread(&["a"], ""), unread(&[], "{name: a, \"namespace\":'m'}")] {
        index.set_unread(state);
        for name in unknown {
            assert_eq!(ask(&index, &format!("{name}.cluster.local."), Kind::A), Answer::Unknown, "{name}");
        }
        assert_eq!(ask(&index, "9.0.96.10.in-addr.arpa.", Kind::Ptr), Answer::Unknown);
        for name in ["b.m.svc", "a.other.svc", "other.svc", "x.web.n.svc", "m", "a.m"] {
            let answer = ask(&index, &format!("{name}.cluster.local."), Kind::A);
            assert_eq!(answer, Answer::NxDomain("cluster.local".to_owned()), "{name}");
        }
        assert!(matches!(ask(&index, "web.n.svc.cluster.local.", Kind::A), Answer::Found(_)));
        assert_eq!(ask(&index, "9.0.0.10.in-addr.arpa.", Kind::Ptr), Answer::NotOurs);
    }
    index.set_unread(unread(&[], "name: a"));
    assert_eq!(ask(&index, "a.default.svc.cluster.local.", Kind::A), Answer::Unknown, "no namespace given");
    index.set_unread(Unread { anything: true, ..Unread::default() });
    assert_eq!(ask(&index, "b.other.svc.cluster.local.", Kind::A), Answer::Unknown);
}

#[test]
fn words_of_a_manifest_are_the_labels_that_it_may_spell() {
    let text = "kind: Service\nmetadata: {name: my-web, uid: 10.0.0.1, app.kubernetes.io/name: \"x\"}";
    let all = words(text).unwrap();
    assert_eq!(
        all.iter().map(|word| &**word).collect::<Vec<_>>(),
        ["kind", "metadata", "my-web", "name", "uid", "x"]
    );
    for hidden in ["\"\\x77eb\"", "\"\\u0077eb\"", "\"we\\\n  b\"", "!!binary d2Vi"] {
        assert_eq!(words(hidden), None, "{hidden}");
    }
}

#[test]
fn cluster_ips_have_addresses_of_each_family_and_ports_of_the_service() {
    check(&[
        ("web.n.svc", Kind::A, "10.96.0.10"),
        ("web.n.svc", Kind::Aaaa, "fd00:10:96::a"),
        ("plain.n.svc", Kind::A, "10.96.0.11"),
        ("plain.n.svc", Kind::Aaaa, NODATA),
        ("web.n.svc", Kind::Txt, NODATA),
        ("web.n.svc", Kind::Other, NODATA),
        ("web.n.svc", Kind::Cname, NODATA),
        ("web.n.svc", Kind::Soa, NODATA),
        ("web.n.svc", Kind::Ns, NODATA),
        ("web.n.svc", Kind::Any, "RFC8482"),
        ("_http._tcp.web.n.svc", Kind::Srv, "0 50 80 web.n.svc.cluster.local"),
        ("_dns._udp.web.n.svc", Kind::Srv, "0 50 53 web.n.svc.cluster.local"),
        ("web.n.svc", Kind::Srv, "0 25 53 web.n.svc.cluster.local, 0 25 80 web.n.svc.cluster.local"),
        ("plain.n.svc", Kind::Srv, "0 100 81 plain.n.svc.cluster.local"),
        ("_http._udp.web.n.svc", Kind::Srv, NXDOMAIN),
        ("_._tcp.plain.n.svc", Kind::Srv, NXDOMAIN),
        ("http.tcp.web.n.svc", Kind::Srv, NXDOMAIN),
        ("_http._tcp.web.n.svc", Kind::A, NODATA),
        ("10-244-0-9.web.n.svc", Kind::A, "10.244.0.9"),
        ("svc.n.svc", Kind::A, "10.96.0.12"),
        ("pod.n.svc", Kind::A, "10.96.0.13"),
        ("10-1-2-3.pod.n.svc", Kind::A, NXDOMAIN),
        ("svc.n.pod", Kind::A, NXDOMAIN),
    ]);
}

#[test]
fn headless_services_have_the_addresses_and_target_ports_of_ready_endpoints() {
    check(&[
        ("db.n.svc", Kind::A, "10.244.0.1, 10.244.0.2"),
        ("db.n.svc", Kind::Aaaa, "fd00::, fd00::2"),
        ("db-0.db.n.svc", Kind::A, "10.244.0.1"),
        ("db-0.db.n.svc", Kind::Aaaa, "fd00::2"),
        ("db-3.db.n.svc", Kind::A, NXDOMAIN),
        ("10-244-0-1.db.n.svc", Kind::A, NXDOMAIN),
        ("10-244-0-2.db.n.svc", Kind::A, "10.244.0.2"),
        ("10-244-0-2.db.n.svc", Kind::Aaaa, NODATA),
        ("fd00--0.db.n.svc", Kind::Aaaa, "fd00::"),
        ("fd00-0-0-0-0-0-0-0.db.n.svc", Kind::Aaaa, NXDOMAIN),
        (
            "_sql._tcp.db.n.svc",
            Kind::Srv,
            "0 25 5432 10-244-0-2.db.n.svc.cluster.local, 0 25 5432 db-0.db.n.svc.cluster.local, \
             0 25 5432 fd00--0.db.n.svc.cluster.local",
        ),
        ("_sql._udp.db.n.svc", Kind::Srv, NXDOMAIN),
        ("empty.n.svc", Kind::A, NXDOMAIN),
        ("_x._tcp.empty.n.svc", Kind::Srv, NXDOMAIN),
        ("portless.n.svc", Kind::A, "10.244.0.2"),
        ("portless.n.svc", Kind::Srv, NODATA),
        ("_tcp.portless.n.svc", Kind::A, NXDOMAIN),
    ]);
    let Answer::Found(found) = ask(&world(), "_sql._tcp.db.n.svc.cluster.local", Kind::Srv) else { panic!() };
    let db_0: Vec<String> = found
        .additional
        .iter()
        .filter(|(name, _)| name.starts_with("db-0."))
        .map(|(_, ip)| ip.to_string())
        .collect();
    assert_eq!(db_0, ["10.244.0.1", "fd00::2"], "SRV brings the addresses of its targets");
    assert_eq!(found.ttl, 5);
}

#[test]
fn empty_non_terminals_are_nodata_and_unknown_names_nxdomain() {
    check(&[
        ("svc", Kind::A, NODATA),
        ("pod", Kind::Ptr, NODATA),
        ("dns", Kind::A, NODATA),
        ("n.svc", Kind::A, NODATA),
        ("n.pod", Kind::A, NODATA),
        ("default.svc", Kind::A, NODATA),
        ("_tcp.web.n.svc", Kind::Srv, NODATA),
        ("_tcp.db.n.svc", Kind::A, NODATA),
        ("_sctp.web.n.svc", Kind::A, NXDOMAIN),
        ("_tcp.plain.n.svc", Kind::A, NXDOMAIN),
        ("other.svc", Kind::A, NXDOMAIN),
        ("node", Kind::A, NXDOMAIN),
        ("nothing.n.svc", Kind::Txt, NXDOMAIN),
        ("x.web.n.svc", Kind::A, NXDOMAIN),
        ("a.b.c.web.n.svc", Kind::A, NXDOMAIN),
        ("_http._tcp.x.web.n.svc", Kind::Srv, NXDOMAIN),
        ("google.com.n.svc", Kind::A, NXDOMAIN),
    ]);
}

#[test]
fn apex_version_and_name_server_have_their_records() {
    check(&[
        ("cluster.local.", Kind::Soa, "soa"),
        ("cluster.local.", Kind::Ns, "ns.dns.cluster.local"),
        ("cluster.local.", Kind::A, NODATA),
        ("cluster.local.", Kind::Srv, NODATA),
        ("ns.dns", Kind::A, "192.0.2.1"),
        ("ns.dns", Kind::Aaaa, NODATA),
        ("dns-version", Kind::Txt, "1.1.0"),
        ("dns-version", Kind::A, NODATA),
        ("x.dns-version", Kind::Txt, NXDOMAIN),
    ]);
    let Answer::Found(version) = ask(&world(), "dns-version.cluster.local", Kind::Txt) else { panic!() };
    assert_eq!(version.ttl, 28_800);
    let mut index = index();
    let kube_dns = json!({"kind": "Service", "metadata": {"namespace": "kube-system", "name": "kube-dns"},
        "spec": {"clusterIP": "10.96.0.53", "ports": [{"port": 53}]}});
    apply(&mut index, kube_dns);
    assert_eq!(text(&index, "ns.dns", Kind::A), "10.96.0.53");
}

#[test]
fn name_server_has_the_addresses_of_the_dns_service() {
    let zone = Zone::new("cluster.local", 5).unwrap().with_dns_service(ObjectName::new("n", "rke2-coredns"));
    let mut index = Index::new(zone);
    apply(&mut index, a_service("kube-dns", json!({"clusterIP": "10.96.0.52", "ports": [{"port": 53}]})));
    assert_eq!(text(&index, "ns.dns", Kind::A), NODATA);
    apply(&mut index, a_service("rke2-coredns", json!({"clusterIP": "10.96.0.53", "ports": [{"port": 53}]})));
    assert_eq!(text(&index, "ns.dns", Kind::A), "10.96.0.53");
    let Answer::Found(found) = ask(&index, "cluster.local", Kind::Ns) else { panic!() };
    assert_eq!(*found.additional, [("ns.dns.cluster.local".to_owned(), "10.96.0.53".parse().unwrap())]);
}

#[test]
fn reverse_name_prefers_the_service_with_the_cluster_ip() {
    let mut index = world();
    let endpoints = json!([ready("10.96.0.10")]);
    apply(&mut index, a_slice("portless-2", "portless", "IPv4", json!([]), endpoints));
    assert_eq!(text(&index, "10-96-0-10.portless.n.svc", Kind::A), "10.96.0.10");
    assert_eq!(text(&index, "10.0.96.10.in-addr.arpa.", Kind::Ptr), "web.n.svc.cluster.local");
}

#[test]
fn headless_service_has_an_srv_record_for_each_endpoint_and_port() {
    let mut index = index();
    apply(&mut index, a_service("db", json!({"clusterIP": "None"})));
    let ports = json!([
        {"name": "sql", "port": 5432}, {"name": "s", "port": 7, "protocol": "SCTP"},
    ]);
    let endpoints = json!([ready("10.0.0.1"), ready("10.0.0.2")]);
    apply(&mut index, a_slice("db-1", "db", "IPv4", ports, endpoints));
    let records = |weight: u16, ports: &[u16]| {
        let hosts =
            |port: &u16| [1, 2].map(|host| format!("0 {weight} {port} 10-0-0-{host}.db.n.svc.cluster.local"));
        ports.iter().flat_map(hosts).collect::<Vec<_>>().join(", ")
    };
    assert_eq!(text(&index, "db.n.svc", Kind::Srv), records(25, &[7, 5432]));
    assert_eq!(text(&index, "_sql._tcp.db.n.svc", Kind::Srv), records(50, &[5432]));
    assert_eq!(text(&index, "_s._sctp.db.n.svc", Kind::Srv), records(50, &[7]));
    assert_eq!(text(&index, "_sctp.db.n.svc", Kind::A), NODATA);
    assert_eq!(text(&index, "_s._tcp.db.n.svc", Kind::Srv), NXDOMAIN);
}

#[test]
fn weight_of_an_srv_record_is_at_least_1() {
    let mut index = index();
    apply(&mut index, a_service("db", json!({"clusterIP": "None"})));
    let endpoints = (1..=101).map(|last| ready(&format!("10.0.0.{last}"))).collect();
    apply(&mut index, a_slice("db-1", "db", "IPv4", json!([{"name": "sql", "port": 1}]), endpoints));
    let Answer::Found(found) = ask(&index, "_sql._tcp.db.n.svc.cluster.local", Kind::Srv) else { panic!() };
    assert_eq!(found.records.len(), 101);
    assert!(found.records.iter().all(|record| matches!(record, Data::Srv { weight: 1, .. })));
}

#[test]
fn external_names_are_aliases_without_names_below() {
    check(&[
        ("away.n.svc", Kind::Cname, "Example.COM"),
        ("away.n.svc", Kind::A, "-> Example.COM"),
        ("away.n.svc", Kind::Txt, "-> Example.COM"),
        ("away.n.svc", Kind::Any, "RFC8482"),
        ("x.away.n.svc", Kind::A, NXDOMAIN),
        ("_http._tcp.away.n.svc", Kind::Srv, NXDOMAIN),
        ("literal.n.svc", Kind::A, NXDOMAIN),
    ]);
}

#[test]
fn type_change_switches_a_name_in_one_step() {
    let mut index = world();
    apply(&mut index, a_service("away", json!({"clusterIP": "10.96.0.20", "ports": [{"port": 1}]})));
    assert_eq!(text(&index, "away.n.svc", Kind::A), "10.96.0.20");
    assert_eq!(text(&index, "away.n.svc", Kind::Cname), NODATA);
    apply(&mut index, a_service("away", json!({"clusterIP": "None"})));
    assert_eq!(text(&index, "away.n.svc", Kind::A), NXDOMAIN);
    assert_eq!(text(&index, "20.0.96.10.in-addr.arpa.", Kind::Ptr), "nxdomain 96.10.in-addr.arpa");
}

#[test]
fn reverse_names_of_known_addresses_are_ours_and_others_only_in_the_ranges() {
    check(&[
        ("10.0.96.10.in-addr.arpa.", Kind::Ptr, "web.n.svc.cluster.local"),
        ("10.0.96.10.in-addr.arpa.", Kind::A, "nodata 96.10.in-addr.arpa"),
        ("10.0.96.10.in-addr.arpa.", Kind::Any, "RFC8482"),
        ("1.0.244.10.in-addr.arpa.", Kind::Ptr, "db-0.db.n.svc.cluster.local"),
        (
            "2.0.244.10.in-addr.arpa.",
            Kind::Ptr,
            "10-244-0-2.db.n.svc.cluster.local, 10-244-0-2.portless.n.svc.cluster.local",
        ),
        ("9.0.244.10.in-addr.arpa.", Kind::Ptr, "10-244-0-9.web.n.svc.cluster.local"),
        ("3.0.244.10.in-addr.arpa.", Kind::Ptr, "not ours"),
        ("99.0.96.10.in-addr.arpa.", Kind::Ptr, "nxdomain 96.10.in-addr.arpa"),
        ("96.10.in-addr.arpa.", Kind::Soa, "soa"),
        ("96.10.in-addr.arpa.", Kind::Ns, "ns.dns.cluster.local"),
        ("96.10.in-addr.arpa.", Kind::Any, "RFC8482"),
        ("0.96.10.in-addr.arpa.", Kind::Any, "RFC8482"),
        ("96.10.in-addr.arpa.", Kind::Ptr, "nodata 96.10.in-addr.arpa"),
        ("0.96.10.in-addr.arpa.", Kind::Soa, "nodata 96.10.in-addr.arpa"),
        ("0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.6.9.0.0.0.1.0.0.0.0.d.f.ip6.arpa.", Kind::Soa, "soa"),
        ("0.97.10.in-addr.arpa.", Kind::Ptr, "nodata 97.10.in-addr.arpa"),
        ("10.in-addr.arpa.", Kind::Ns, "not ours"),
        ("in-addr.arpa.", Kind::Ns, "not ours"),
        ("8.8.8.8.in-addr.arpa.", Kind::Ptr, "not ours"),
        ("256.0.96.10.in-addr.arpa.", Kind::Ptr, "nxdomain 96.10.in-addr.arpa"),
        ("0x1.0.96.10.in-addr.arpa.", Kind::Ptr, "nxdomain 96.10.in-addr.arpa"),
        ("1.1.0.96.10.in-addr.arpa.", Kind::Ptr, "nxdomain 96.10.in-addr.arpa"),
        ("x.8.8.8.in-addr.arpa.", Kind::Ptr, "not ours"),
        (
            "a.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.6.9.0.0.0.1.0.0.0.0.d.f.ip6.arpa.",
            Kind::Ptr,
            "web.n.svc.cluster.local",
        ),
        (
            "b.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.6.9.0.0.0.1.0.0.0.0.d.f.ip6.arpa.",
            Kind::Ptr,
            "nxdomain 0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.6.9.0.0.0.1.0.0.0.0.d.f.ip6.arpa",
        ),
        ("0.0.d.f.ip6.arpa.", Kind::Ptr, "not ours"),
    ]);
}

#[test]
fn other_domains_are_not_ours_even_if_their_text_ends_alike() {
    check(&[
        ("example.com.", Kind::A, "not ours"),
        ("xcluster.local.", Kind::A, "not ours"),
        ("local.", Kind::A, "not ours"),
        (".", Kind::Ns, "not ours"),
        ("web.n.svc.cluster.local.example.com.", Kind::A, "not ours"),
        ("cluster.local.cluster.local.", Kind::A, NXDOMAIN),
    ]);
    let dotted: [&[u8]; 3] = [b"web.n.svc", b"cluster", b"local"];
    assert_eq!(
        world().lookup(&dotted, Kind::A),
        Answer::NxDomain("cluster.local".into()),
        "a dot in a label"
    );
    let binary: [&[u8]; 3] = [&[0xff], b"cluster", b"local"];
    assert_eq!(world().lookup(&binary, Kind::A), Answer::NxDomain("cluster.local".into()));
}

#[test]
fn pod_names_spell_their_address_in_a_namespace_that_exists() {
    check(&[
        ("10-1-2-3.n.pod", Kind::A, "10.1.2.3"),
        ("10-1-2-3.n.pod", Kind::Aaaa, NODATA),
        ("fd00--1.n.pod", Kind::Aaaa, "fd00::1"),
        ("fd00--1.n.pod", Kind::A, NODATA),
        ("10-1-2-3.other.pod", Kind::A, NXDOMAIN),
        ("10-1-2-3.default.pod", Kind::A, "10.1.2.3"),
        ("10-1-2.n.pod", Kind::A, NXDOMAIN),
        ("10-1-2-256.n.pod", Kind::A, NXDOMAIN),
        ("web.n.pod", Kind::A, NXDOMAIN),
        ("x.10-1-2-3.n.pod", Kind::A, NXDOMAIN),
    ]);
    let mut index = world();
    index.apply(NameChange::Namespace(ObjectName::new("", "bare"), true));
    assert_eq!(text(&index, "10-1-2-3.bare.pod", Kind::A), "10.1.2.3");
    assert_eq!(text(&index, "bare.svc", Kind::A), NODATA);
    index.apply(NameChange::Namespace(ObjectName::new("", "bare"), false));
    assert_eq!(text(&index, "bare.svc", Kind::A), NXDOMAIN);
}

#[test]
fn endpoints_that_are_not_ready_have_names_only_if_their_service_publishes_them() {
    let mut index = index();
    let endpoints = json!({"kind": "Endpoints", "metadata": {"namespace": "n", "name": "db"}, "subsets": [{
        "addresses": [{"ip": "10.0.0.1", "hostname": "one"}], "notReadyAddresses": [{"ip": "10.0.0.2"}],
        "ports": [{"name": "sql", "port": 5432}],
    }]});
    apply(&mut index, endpoints);
    assert_eq!(text(&index, "db.n.svc", Kind::A), NXDOMAIN, "slices alone have no names");
    apply(&mut index, a_service("db", json!({"clusterIP": "None"})));
    assert_eq!(text(&index, "db.n.svc", Kind::A), "10.0.0.1");
    assert_eq!(text(&index, "one.db.n.svc", Kind::A), "10.0.0.1");
    assert_eq!(text(&index, "2.0.0.10.in-addr.arpa.", Kind::Ptr), "not ours");
    apply(&mut index, a_service("db", json!({"clusterIP": "None", "publishNotReadyAddresses": true})));
    assert_eq!(text(&index, "db.n.svc", Kind::A), "10.0.0.1, 10.0.0.2");
    assert_eq!(text(&index, "2.0.0.10.in-addr.arpa.", Kind::Ptr), "10-0-0-2.db.n.svc.cluster.local");
    let mut old = a_service("db", json!({"clusterIP": "None"}));
    old["metadata"]["annotations"] = json!({TOLERATE_UNREADY: "true"});
    apply(&mut index, old);
    assert_eq!(text(&index, "db.n.svc", Kind::A), "10.0.0.1, 10.0.0.2");
}

/// The API server stores addresses that it would no longer accept. DNS reads them as the proxy does.
#[test]
fn names_have_the_stored_addresses_that_the_proxy_accepts() {
    let mut index = index();
    apply(&mut index, a_service("db", json!({"clusterIP": "None"})));
    apply(&mut index, a_service("web", json!({"clusterIP": "10.96.0.010", "ports": [{"port": 1}]})));
    apply(&mut index, a_slice("v4", "db", "IPv4", json!([]), json!([ready("10.0.0.01")])));
    apply(
        &mut index,
        a_slice("v6", "db", "IPv6", json!([]), json!([ready("::ffff:10.0.0.2"), ready("fd00::2")])),
    );
    assert_eq!(text(&index, "web.n.svc", Kind::A), "10.96.0.10");
    assert_eq!(text(&index, "db.n.svc", Kind::A), "10.0.0.1");
    assert_eq!(text(&index, "db.n.svc", Kind::Aaaa), "fd00::2");
}

#[test]
fn services_of_other_proxies_have_names() {
    let mut index = index();
    let mut service = a_service("web", json!({"clusterIP": "10.96.0.1", "ports": [{"port": 1}]}));
    service["metadata"]["labels"] = json!({crate::convert::SERVICE_PROXY_NAME: "other"});
    apply(&mut index, service);
    assert_eq!(text(&index, "web.n.svc", Kind::A), "10.96.0.1");
}

#[test]
fn slice_that_moves_to_another_service_moves_its_names() {
    let mut index = index();
    for name in ["a", "b"] {
        apply(&mut index, a_service(name, json!({"clusterIP": "None"})));
    }
    apply(&mut index, a_slice("s", "a", "IPv4", json!([]), json!([ready("10.0.0.1")])));
    apply(&mut index, a_slice("s", "b", "IPv4", json!([]), json!([ready("10.0.0.1")])));
    assert_eq!(text(&index, "a.n.svc", Kind::A), NXDOMAIN);
    assert_eq!(text(&index, "b.n.svc", Kind::A), "10.0.0.1");
    assert_eq!(text(&index, "1.0.0.10.in-addr.arpa.", Kind::Ptr), "10-0-0-1.b.n.svc.cluster.local");
    index.apply(NameChange::Slice(ObjectName::new("n", "s"), None));
    assert_eq!(text(&index, "1.0.0.10.in-addr.arpa.", Kind::Ptr), "not ours");
}

#[test]
fn cluster_domain_may_have_one_label_and_a_dot_at_its_end() {
    let index = Index::new(Zone::new("Local.", 5).unwrap());
    assert_eq!(ask(&index, "svc.local", Kind::A), Answer::NoData("local".into()));
    for bad in ["", ".", "a..b", "a b", "x\u{e4}.local", &"a".repeat(64)] {
        assert!(Zone::new(bad, 5).is_err(), "{bad:?}");
    }
}

#[test]
fn rejected_cluster_domain_names_the_characters_and_the_length_that_are_accepted() {
    let longest = format!("{}a", "a.".repeat(126));
    for good in ["A1-b_c.local", &longest] {
        assert!(Zone::new(good, 5).is_ok(), "{good:?}");
    }
    let error = Zone::new(&format!("{longest}b"), 5).unwrap_err().to_string();
    assert!(error.contains("letters, digits, hyphens and underscores"), "{error}");
    assert!(error.contains("at most 253 characters"), "{error}");
}

/// Random objects with only a few different names, so that they affect each other.
fn objects() -> impl Strategy<Value = Vec<NameChange>> {
    let name = prop_oneof![Just("a"), Just("b"), Just("svc")];
    let target = prop_oneof![
        Just(Some(Target::Endpoints)),
        Just(Some(Target::ClusterIps(vec!["10.96.0.1".parse().unwrap()]))),
        Just(Some(Target::ClusterIps(vec!["fd00:10:96::1".parse().unwrap()]))),
        Just(Some(Target::Name("example.com".into()))),
        Just(None),
    ];
    let port = prop_oneof![Just(""), Just("x")];
    let ports = prop::collection::vec(port, 0..2).prop_map(|ports| {
        let port = |name: &str| NamedPort { name: name.into(), protocol: Protocol::Tcp, port: 80 };
        ports.into_iter().map(port).collect::<Vec<_>>()
    });
    let endpoint = (0_u8..3, prop::option::of(Just("h")), any::<bool>(), any::<bool>());
    let endpoints = prop::collection::vec(endpoint, 0..3).prop_map(|endpoints| {
        let endpoint = |(last, host, ready, v4): (u8, Option<&str>, bool, bool)| NamedEndpoint {
            address: if v4 {
                [10, 0, 0, last].into()
            } else {
                [0xfd00, 0, 0, 0, 0, 0, 0, last.into()].into()
            },
            hostname: host.map(Into::into),
            ready,
        };
        endpoints.into_iter().map(endpoint).collect::<Vec<_>>()
    });
    let a_service =
        (name.clone(), target, ports.clone(), any::<bool>()).prop_map(|(name, target, ports, all)| {
            let service = target.map(|target| NamedService { target, ports, publishes_not_ready: all });
            NameChange::Service(ObjectName::new("n", name), service)
        });
    let a_slice =
        (0_u8..3, prop::option::of(name), ports, endpoints).prop_map(|(slice, service, ports, endpoints)| {
            let service = service.map(|name| ObjectName::new("n", name));
            let content = service.map(|service| NamedSlice { service, ports, endpoints });
            NameChange::Slice(ObjectName::new("n", &slice.to_string()), content)
        });
    prop::collection::vec(prop_oneof![a_service, a_slice], 0..12)
}

/// Names of each kind that may exist with the random [`objects`], and some that never exist.
fn candidates() -> Vec<String> {
    let mut names: Vec<String> =
        ["", "svc", "pod", "n.svc", "n.pod", "dns", "ns.dns", "dns-version", "10-0-0-1.n.pod", "x"]
            .map(str::to_owned)
            .into();
    for service in ["a", "b", "svc", "c"] {
        for below in ["", "_tcp.", "_udp.", "_x._tcp.", "_y._tcp.", "h.", "10-0-0-1.", "fd00--2.", "z.h."] {
            names.push(format!("{below}{service}.n.svc"));
        }
    }
    names
}

fn exists(index: &Index, name: &str, kind: Kind) -> bool {
    !matches!(ask(index, &format!("{name}.cluster.local"), kind), Answer::NxDomain(_))
}

proptest! {
    #[test]
    fn name_that_exists_for_one_type_exists_for_all(changes in objects()) {
        let mut index = index();
        changes.into_iter().for_each(|change| index.apply(change));
        for name in candidates() {
            let found = Kind::ALL.map(|kind| exists(&index, &name, kind));
            prop_assert!(found.iter().all(|one| *one == found[0]), "{name}: {found:?}");
        }
    }

    #[test]
    fn name_above_an_existing_name_exists(changes in objects()) {
        let mut index = index();
        changes.into_iter().for_each(|change| index.apply(change));
        for name in candidates().iter().filter(|name| exists(&index, name, Kind::A)) {
            if let Some((_, above)) = name.split_once('.') {
                prop_assert!(exists(&index, above, Kind::A), "{name} exists, {above} does not");
            }
        }
    }

    #[test]
    fn order_of_changes_and_deleted_objects_leave_no_trace(changes in objects()) {
        let mut once = index();
        let mut last = BTreeMap::new();
        for change in &changes {
            once.apply(change.clone());
            let key = match change {
                NameChange::Service(name, _) | NameChange::Namespace(name, _) => (0, name.clone()),
                NameChange::Slice(name, _) => (1, name.clone()),
            };
            last.insert(key, change.clone());
        }
        let mut again = index();
        last.into_values().rev().for_each(|change| again.apply(change));
        let reverse = (0..3).map(|last| format!("{last}.0.0.10.in-addr.arpa."));
        for name in candidates().into_iter().chain(reverse).chain(["1.0.96.10.in-addr.arpa.".to_owned()]) {
            for kind in Kind::ALL {
                prop_assert_eq!(text(&once, &name, kind), text(&again, &name, kind), "{} {:?}", name, kind);
            }
        }
    }
}

#[test]
fn cluster_dns_is_a_service_with_udp_port_53_and_its_ready_endpoints() {
    let mut index = index();
    let name = ObjectName::new("n", "kube-dns");
    assert_eq!(index.cluster_dns(&name), ClusterDns::default(), "no such Service");
    let ports = json!([
        {"name": "metrics", "port": 9153}, {"name": "dns-tcp", "port": 53},
        {"name": "dns", "port": 53, "protocol": "UDP"},
    ]);
    let targets = json!([
        {"name": "dns", "port": 1053, "protocol": "UDP"}, {"name": "dns-tcp", "port": 1054},
    ]);
    let endpoints = json!([
        ready("10.244.0.3"), ready("10.244.0.2"), {"addresses": ["10.244.0.4"], "conditions": {"ready": false}},
    ]);
    apply(&mut index, a_slice("kube-dns-1", "kube-dns", "IPv4", targets, endpoints));
    assert_eq!(index.cluster_dns(&name), ClusterDns::default(), "slices without their Service");
    apply(&mut index, a_service("kube-dns", json!({"clusterIPs": ["10.96.0.53"], "ports": ports})));
    let expected = ClusterDns {
        cluster_ips: vec!["10.96.0.53".parse().unwrap()],
        endpoints: vec!["10.244.0.2:1053".parse().unwrap(), "10.244.0.3:1053".parse().unwrap()],
    };
    assert_eq!(index.cluster_dns(&name), expected);
    apply(&mut index, a_service("kube-dns", json!({"clusterIP": "None", "ports": ports})));
    assert_eq!(index.cluster_dns(&name), ClusterDns::default(), "a headless Service");
    let tcp = json!([{"name": "dns-tcp", "port": 53}]);
    apply(&mut index, a_service("kube-dns", json!({"clusterIP": "10.96.0.53", "ports": tcp})));
    assert_eq!(index.cluster_dns(&name), ClusterDns::default(), "no UDP port");
}
