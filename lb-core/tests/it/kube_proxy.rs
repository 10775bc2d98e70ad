//! The tables of kube-proxy's own tests (`pkg/proxy/nftables/proxier_test.go`), named in the comments, and more cases.
//! Verdicts are those of kube-proxy 1.36, except for processes of the node: the socket hooks translate their calls
//! before there is a packet, so there is nothing to masquerade.

use lb_core::model::{Change, ObjectName};
use serde_json::Value;

use crate::{
    client::{
        Client::{self, Outside, Pod, Process},
        Decision::{self, Drop, Pass, Reject, To},
    },
    golden::{changes, node_of},
    kernel::Node,
};

const NODE_IP: &str = "192.168.0.2";
const POD: Client = Pod("10.0.0.2");
const OUTSIDE: Client = Outside("203.0.113.2");

fn node(settings: &str, objects: &str) -> Node {
    let this = format!(
        "kind: Node\nname: this\naddresses: [{NODE_IP}]\nnodePortAddresses: [{NODE_IP}, 127.0.0.1]\n{settings}\n---\n"
    );
    let (node, errors) = node_of(&(this + objects));
    assert!(errors.is_empty(), "{errors:?}");
    node
}

/// A Service of type LoadBalancer with a node port; `number` is part of its name and addresses.
fn service(number: u8, spec: &str) -> String {
    format!(
        "kind: Service
metadata: {{name: svc{number}}}
spec:
  type: LoadBalancer
  clusterIP: 172.30.0.4{number}
  ports: [{{name: p80, port: 80, nodePort: 3000{number}}}]
  {spec}
status: {{loadBalancer: {{ingress: [{{ip: 1.2.3.{number}}}]}}}}
---
"
    )
}

/// An EndpointSlice of Service `number`; each endpoint is an address and a state, such as `here ready`.
fn slice(number: u8, endpoints: &[(&str, &str)]) -> String {
    let endpoints: Vec<String> = endpoints
        .iter()
        .map(|(address, state)| {
            let has = |word| state.split(' ').any(|part| part == word);
            let node = if has("here") { "this" } else { "other" };
            let (ready, serving, terminating) =
                (has("ready"), has("ready") || has("serving"), has("terminating"));
            format!(
                "  - {{addresses: [{address}], nodeName: {node}, conditions: \
                 {{ready: {ready}, serving: {serving}, terminating: {terminating}}}}}"
            )
        })
        .collect();
    let endpoints = if endpoints.is_empty() {
        "endpoints: []".to_owned()
    } else {
        format!("endpoints:\n{}", endpoints.join("\n"))
    };
    format!(
        "kind: EndpointSlice
metadata: {{name: svc{number}-1, labels: {{kubernetes.io/service-name: svc{number}}}}}
addressType: IPv4
ports: [{{name: p80, port: 80}}]
{endpoints}
---
"
    )
}

fn to(backends: &[&str], masqueraded: bool) -> Decision {
    To { backends: backends.iter().map(|address| format!("{address}:80")).collect(), masqueraded }
}

fn cluster_ip(number: u8) -> (String, u16) {
    (format!("172.30.0.4{number}"), 80)
}

fn node_port(number: u8) -> (String, u16) {
    (NODE_IP.to_owned(), 30_000 + u16::from(number))
}

fn loopback(number: u8) -> (String, u16) {
    ("127.0.0.1".to_owned(), 30_000 + u16::from(number))
}

fn load_balancer(number: u8) -> (String, u16) {
    (format!("1.2.3.{number}"), 80)
}

fn check(node: &Node, client: Client, (address, port): (String, u16), expected: &Decision) {
    assert_eq!(node.connect(client, &address, port), *expected, "{client:?} to {address}:{port}");
}

/// `TestInternalExternalMasquerade`: which clients are masqueraded and which endpoints they get, by the client, the
/// kind of address, the traffic policies, whether the node can distinguish pods from other clients, and
/// `--masquerade-all`.
#[test]
fn internal_external_masquerade() {
    for (all, detects) in [(false, true), (false, false), (true, true), (true, false)] {
        let objects: String =
            [(1, ""), (2, "externalTrafficPolicy: Local"), (3, "internalTrafficPolicy: Local")]
                .into_iter()
                .chain([(4, "externalTrafficPolicy: Local\n  internalTrafficPolicy: Local")])
                .map(|(number, policy)| {
                    let (here, there) = (format!("10.180.0.{number}"), format!("10.180.1.{number}"));
                    service(number, policy) + &slice(number, &[(&here, "here ready"), (&there, "ready")])
                })
                .collect();
        let node = node(&format!("masqueradeAll: {all}\ndetectsInside: {detects}"), &objects);
        for number in 1..=4 {
            masquerade_of(&node, number, all, detects);
        }
    }
}

fn masquerade_of(node: &Node, number: u8, all: bool, detects: bool) {
    let (here, there) = (format!("10.180.0.{number}"), format!("10.180.1.{number}"));
    let both: &[&str] = &[&here, &there];
    let (external_local, internal_local) = (matches!(number, 2 | 4), matches!(number, 3 | 4));
    let internal = if internal_local { &both[..1] } else { both };
    check(node, POD, cluster_ip(number), &to(internal, all));
    check(node, Process, cluster_ip(number), &to(internal, false));
    check(node, OUTSIDE, cluster_ip(number), &to(internal, all || detects));
    // A client that is known to be a pod is internal, so `externalTrafficPolicy: Local` does not apply to it.
    let of_pod = if external_local && !detects { &both[..1] } else { both };
    let of_outside = if external_local { &both[..1] } else { both };
    for address in [node_port(number), load_balancer(number)] {
        check(node, POD, address.clone(), &to(of_pod, !external_local));
        check(node, Process, address.clone(), &to(both, false));
        check(node, OUTSIDE, address, &to(of_outside, !external_local));
    }
    check(node, Process, loopback(number), &to(both, false));
    check(node, POD, loopback(number), &Pass);
}

/// kube-proxy's `TestNoEndpointsReject`, with cluster IPs, node ports and load balancer addresses.
#[test]
fn no_endpoints_reject() {
    for policy in ["", "externalTrafficPolicy: Local", "internalTrafficPolicy: Local"] {
        for endpoints in [&[][..], &[("10.0.1.1", "here")], &[("10.0.1.1", "terminating")]] {
            let node = node("detectsInside: true", &(service(1, policy) + &slice(1, endpoints)));
            for client in [POD, Process, OUTSIDE] {
                for address in [cluster_ip(1), node_port(1), load_balancer(1)] {
                    check(&node, client, address, &Reject);
                }
            }
        }
    }
}

/// A case of the tests of terminating endpoints: the endpoints, and the verdicts on internal and external clients.
struct Line {
    endpoints: &'static [(&'static str, &'static str)],
    inside: Decision,
    outside: Decision,
}

fn lines(local: bool) -> Vec<Line> {
    let line = |endpoints, cluster: &[&str], here: Option<&[&str]>| {
        let verdict =
            |list: &[&str], masqueraded| if list.is_empty() { Reject } else { to(list, masqueraded) };
        let outside = match here {
            Some(here) if local && here.is_empty() && !cluster.is_empty() => Drop,
            Some(here) if local => verdict(here, false),
            Some(_) | None => verdict(cluster, true),
        };
        Line { endpoints, inside: verdict(cluster, !local), outside }
    };
    vec![
        // While there are ready endpoints, terminating ones are not used. Under Local each node decides for itself.
        line(
            &[
                ("10.0.1.1", "here ready"),
                ("10.0.1.2", "here ready"),
                ("10.0.1.3", "here serving terminating"),
                ("10.0.1.4", "here terminating"),
                ("10.0.1.5", "ready"),
            ],
            &["10.0.1.1", "10.0.1.2", "10.0.1.5"],
            Some(&["10.0.1.1", "10.0.1.2"]),
        ),
        line(
            &[
                ("10.0.1.1", "here serving terminating"),
                ("10.0.1.2", "here serving terminating"),
                ("10.0.1.5", "ready"),
            ],
            &["10.0.1.5"],
            Some(&["10.0.1.1", "10.0.1.2"]),
        ),
        line(
            &[("10.0.1.1", "here serving terminating"), ("10.0.1.5", "serving terminating")],
            &["10.0.1.1", "10.0.1.5"],
            Some(&["10.0.1.1"]),
        ),
        line(
            &[("10.0.1.1", "here terminating"), ("10.0.1.2", "here terminating"), ("10.0.1.5", "ready")],
            &["10.0.1.5"],
            Some(&[]),
        ),
        line(&[("10.0.1.5", "serving terminating")], &["10.0.1.5"], Some(&[])),
        line(&[("10.0.1.1", "here terminating"), ("10.0.1.5", "terminating")], &[], Some(&[])),
    ]
}

/// kube-proxy's `TestTerminatingEndpointsTrafficPolicyLocal` and `…Cluster`.
#[test]
fn terminating_endpoints_by_traffic_policy() {
    for (local, policy) in [(true, "externalTrafficPolicy: Local"), (false, "externalTrafficPolicy: Cluster")]
    {
        for Line { endpoints, inside, outside } in lines(local) {
            let node = node("detectsInside: true", &(service(1, policy) + &slice(1, endpoints)));
            for address in [node_port(1), load_balancer(1)] {
                check(&node, POD, address.clone(), &inside);
                check(&node, OUTSIDE, address, &outside);
            }
        }
    }
}

/// kube-proxy's `TestInternalTrafficPolicy`.
#[test]
fn internal_traffic_policy() {
    let endpoints = &[("10.0.1.1", "here ready"), ("10.0.1.2", "ready"), ("10.0.1.3", "ready")];
    let all: &[&str] = &["10.0.1.1", "10.0.1.2", "10.0.1.3"];
    for (policy, endpoints, expected) in [
        ("", &endpoints[..], to(all, false)),
        ("internalTrafficPolicy: Cluster", &endpoints[..], to(all, false)),
        ("internalTrafficPolicy: Local", &endpoints[..], to(&all[..1], false)),
        ("internalTrafficPolicy: Local", &endpoints[1..], Drop),
        ("internalTrafficPolicy: Local", &[], Reject),
    ] {
        let node = node("detectsInside: true", &(service(1, policy) + &slice(1, endpoints)));
        check(&node, POD, cluster_ip(1), &expected);
    }
}

/// kube-proxy's `TestExternalTrafficPolicyLocal` and `…Cluster`.
#[test]
fn external_traffic_policy() {
    let endpoints = slice(1, &[("10.180.0.1", "ready"), ("10.180.2.1", "here ready")]);
    let both: &[&str] = &["10.180.0.1", "10.180.2.1"];
    for (policy, outside, pod) in [
        ("externalTrafficPolicy: Local", to(&both[1..], false), to(both, false)),
        ("externalTrafficPolicy: Cluster", to(both, true), to(both, true)),
    ] {
        let node = node(
            "detectsInside: true",
            &(service(1, &format!("externalIPs: [192.168.99.11]\n  {policy}")) + &endpoints),
        );
        for address in [node_port(1), load_balancer(1), ("192.168.99.11".to_owned(), 80)] {
            check(&node, OUTSIDE, address.clone(), &outside);
            check(&node, POD, address.clone(), &pod);
            check(&node, Process, address, &to(both, false));
        }
        check(&node, POD, cluster_ip(1), &to(both, false));
    }
}

/// kube-proxy's `TestLoadBalancerIngressRouteTypeProxy`.
#[test]
fn load_balancer_ingress_route_type() {
    for (mode, expected) in [
        ("", to(&["10.180.0.1"], true)),
        (", ipMode: VIP", to(&["10.180.0.1"], true)),
        (", ipMode: Proxy", Pass),
    ] {
        let service = service(1, "").replace("{ip: 1.2.3.1}", &format!("{{ip: 1.2.3.1{mode}}}"));
        let node = node("", &(service + &slice(1, &[("10.180.0.1", "ready")])));
        check(&node, OUTSIDE, load_balancer(1), &expected);
        check(&node, OUTSIDE, node_port(1), &to(&["10.180.0.1"], true));
    }
}

/// `loadBalancerSourceRanges` apply to clients of every kind, but only at the load balancer address.
#[test]
fn load_balancer_source_ranges() {
    let endpoints = slice(1, &[("10.180.0.1", "ready")]);
    let served = to(&["10.180.0.1"], true);
    for (ranges, pod, process, outside, vip) in [
        ("[203.0.113.0/24]", false, false, true, false),
        ("[' 203.0.113.0/25 ', 10.0.0.0/8]", true, false, true, false),
        ("[192.168.0.0/24]", false, true, false, true),
        ("[203.0.113.2/32, 0.0.0.0/0]", true, true, true, true),
        ("['2001:db8::/32']", true, true, true, true),
    ] {
        let service = service(1, &format!("loadBalancerSourceRanges: {ranges}"));
        let node = node("detectsInside: true", &(service + &endpoints));
        let expected = |may: bool, client| match (may, client) {
            (false, _) => Drop,
            (true, Process) => to(&["10.180.0.1"], false),
            (true, _) => served.clone(),
        };
        for (client, may) in [(POD, pod), (Process, process), (OUTSIDE, outside), (Outside("1.2.3.1"), vip)] {
            check(&node, client, load_balancer(1), &expected(may, client));
            check(&node, client, node_port(1), &expected(true, client));
        }
    }
}

/// Connections to a port that no Service has are rejected at a cluster IP; at other virtual addresses they pass.
#[test]
fn unlisted_ports() {
    let node = node("", &service(1, "externalIPs: [192.168.99.11]"));
    assert_eq!(node.connect(POD, "172.30.0.41", 81), Reject);
    assert_eq!(node.connect(POD, "1.2.3.1", 81), Pass);
    assert_eq!(node.connect(POD, "192.168.99.11", 81), Pass);
    assert_eq!(node.connect(POD, "172.30.0.99", 80), Pass);
}

/// kube-proxy's `TestHealthCheckNodePortWhenTerminating` and `TestNoEndpointsMetric`.
#[test]
fn health_checks_and_missing_local_endpoints() {
    let local = "externalTrafficPolicy: Local\n  healthCheckNodePort: 32000";
    let both = "externalTrafficPolicy: Local\n  internalTrafficPolicy: Local\n  healthCheckNodePort: 32000";
    let here: &[(&str, &str)] =
        &[("10.0.1.1", "here ready"), ("10.0.1.2", "here ready"), ("10.0.1.3", "ready")];
    let terminating: &[(&str, &str)] = &[("10.0.1.1", "here serving terminating"), ("10.0.1.3", "ready")];
    for (policy, endpoints, count, (internal, external)) in [
        (local, here, 2, (0, 0)),
        (local, terminating, 0, (0, 0)),
        (local, &here[2..], 0, (0, 1)),
        (both, &here[2..], 0, (1, 1)),
        (both, &[], 0, (0, 0)),
    ] {
        let node = node("", &(service(1, policy) + &slice(1, endpoints)));
        let mut expected = format!("health check of default/svc1 on 32000: IPv4 {count}\n");
        if internal + external > 0 {
            expected += &format!("no local endpoints IPv4: {internal} internal, {external} external\n");
        }
        assert_eq!(node.dump_health(), expected);
    }
}

/// When a Service has changed from any type to any other, the maps are those of a Service that has had the last type
/// from the start.
#[test]
fn type_transitions() {
    let types = ["ClusterIP", "NodePort", "LoadBalancer", "ExternalName", "headless"];
    let of_type = |kind: &str| {
        let spec = match kind {
            "ExternalName" => {
                "type: ExternalName\n  externalName: example.org\n  ports: [{name: p80, port: 80}]".to_owned()
            }
            "headless" => "clusterIP: None\n  ports: [{name: p80, port: 80}]".to_owned(),
            kind => format!(
                "type: {kind}\n  clusterIP: 172.30.0.41\n  ports: [{{name: p80, port: 80, nodePort: 30001}}]"
            ),
        };
        let status =
            if kind == "LoadBalancer" { "status: {loadBalancer: {ingress: [{ip: 1.2.3.1}]}}" } else { "" };
        format!("kind: Service\nmetadata: {{name: svc1}}\nspec:\n  {spec}\n{status}\n---\n")
    };
    let endpoints = slice(1, &[("10.180.0.1", "ready")]);
    for from in types {
        for into in types {
            let mut node = node("", &(of_type(from) + &endpoints));
            let document: Vec<Value> = serde_saphyr::from_multiple(&of_type(into)).expect("YAML");
            node.reconciler.handle(changes(document[0].clone()).expect("a Service"));
            node.settle();
            let fresh = self::node("", &(of_type(into) + &endpoints));
            assert_eq!(node.kernel.dump(), fresh.kernel.dump(), "{from} → {into}");
            let frontends = match into {
                "ClusterIP" => 1,
                "NodePort" => 3,
                "LoadBalancer" => 4,
                _ => 0,
            };
            assert_eq!(node.kernel.maps.frontends.len(), frontends, "{from} → {into}");
        }
    }
}

/// Labels that exclude a Service (because another proxy serves it) or a slice (because its Service is headless) take
/// effect when they are added and when they are removed.
#[test]
fn labels_exclude_services() {
    let visible = service(1, "") + &slice(1, &[("10.180.0.1", "ready")]);
    let another = "{name: svc1, labels: {service.kubernetes.io/service-proxy-name: another}}";
    let headless = "service.kubernetes.io/headless: '', kubernetes.io/service-name: svc1";
    let mut node = node("", &visible);
    for (hidden, expected) in [
        (visible.replace("{name: svc1}", another), Pass),
        (visible.clone(), to(&["10.180.0.1"], true)),
        (visible.replace("kubernetes.io/service-name: svc1", headless), Reject),
        (visible.clone(), to(&["10.180.0.1"], true)),
    ] {
        for document in serde_saphyr::from_multiple::<Value>(&hidden).expect("YAML") {
            if !document.is_null() {
                node.reconciler.handle(changes(document).expect("an object"));
            }
        }
        node.settle();
        check(&node, OUTSIDE, load_balancer(1), &expected);
    }
}

/// The agent may reach the API server through `default/kubernetes`, so the last endpoints of this Service stay, even
/// after a restart.
#[test]
fn api_server_endpoints_survive_an_empty_update() {
    api_server_endpoints_survive(str::to_owned);
    api_server_endpoints_survive(|text| {
        let replaced = [
            ("IPv4", "IPv6"),
            ("172.30.0.4", "fd00:30::4"),
            ("1.2.3.", "2001:db8:1::"),
            ("192.0.2.", "2001:db8:2::"),
        ];
        replaced.iter().fold(text.to_owned(), |text, (v4, v6)| text.replace(v4, v6))
    });
}

/// `in_family` converts texts with IPv4 addresses to the family under test.
fn api_server_endpoints_survive(in_family: impl Fn(&str) -> String) {
    let name = |text: &str| in_family(&text.replace("svc1", "kubernetes"));
    let service = name(&service(1, ""));
    let slice = |endpoints: &[(&str, &str)]| name(&slice(1, endpoints));
    let mut node = node("", &(service.clone() + &slice(&[("192.0.2.5", "ready"), ("192.0.2.6", "ready")])));
    let say = |node: &mut Node, text: &str| {
        let documents: Vec<Value> = serde_saphyr::from_multiple(text).expect("YAML");
        for document in documents.into_iter().filter(|document| !document.is_null()) {
            node.reconciler.handle(changes(document).expect("an object"));
        }
        node.settle();
    };
    let leads_to = |node: &Node, backends: &[&str]| {
        let backends: Vec<String> = backends.iter().map(|backend| in_family(backend)).collect();
        let backends: Vec<&str> = backends.iter().map(String::as_str).collect();
        let (address, port) = load_balancer(1);
        check(node, OUTSIDE, (in_family(&address), port), &to(&backends, true));
    };
    let both = ["192.0.2.5", "192.0.2.6"];
    say(&mut node, &slice(&[("192.0.2.5", ""), ("192.0.2.6", "")]));
    leads_to(&node, &both);
    say(&mut node, &slice(&[]));
    leads_to(&node, &both);
    let slice_name = ObjectName::new("default", "kubernetes-1");
    node.reconciler.handle(vec![Change::EndpointSlice(slice_name, None)]);
    node.settle();
    leads_to(&node, &both);
    node.restart();
    say(&mut node, &(service + &slice(&[])));
    leads_to(&node, &both);
    say(&mut node, &slice(&[("192.0.2.6", "ready")]));
    leads_to(&node, &["192.0.2.6"]);
    say(&mut node, &slice(&[]));
    leads_to(&node, &["192.0.2.6"]);
}
