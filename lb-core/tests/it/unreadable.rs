//! Tests what a restarted agent keeps of a Service while one of the Service's EndpointSlices cannot be read.

use std::collections::BTreeSet;

use lb_core::{
    capacity::Capacity,
    model::{
        Change, Endpoint, EndpointPort, EndpointSlice, External, ObjectName, Policy, Protocol, Service,
        ServicePort, TrafficPolicy,
    },
};

use crate::{
    kernel::Node,
    objects::{endpoint, terminating},
};

const HTTP: (&str, u16) = ("http", 8080);
const METRICS: (&str, u16) = ("metrics", 9090);

fn name(text: &str) -> ObjectName {
    ObjectName::new("default", text)
}

fn port(name: &str, port: u16) -> ServicePort {
    ServicePort { name: name.into(), protocol: Protocol::Tcp, port, node_port: None }
}

/// A Service with the ports `http` and `metrics`.
fn service(of: &str, last: u8) -> Change {
    let service = Service {
        cluster_ips: vec![[10, 96, 0, last].into()],
        ports: vec![port("http", 80), port("metrics", 90)],
        ..Service::default()
    };
    Change::Service(name(of), Some(service))
}

/// The slice `of-number`, which has one port.
fn slice(of: &str, number: u8, (port, target): (&str, u16), endpoints: Vec<Endpoint>) -> Change {
    let ports = vec![EndpointPort { name: port.into(), protocol: Protocol::Tcp, port: target }];
    let slice = EndpointSlice { service: name(of), ports, endpoints };
    Change::EndpointSlice(name(&format!("{of}-{number}")), Some(slice))
}

/// A node whose earlier agent wrote the state of `before`. The new agent has received only `read`, because it cannot
/// read a slice of Service `a`.
fn restarted(before: Vec<Change>, read: Vec<Change>) -> Node {
    let mut earlier = Node::new(100);
    earlier.reconciler.handle(before);
    earlier.settle();
    let mut node = Node::started_incomplete_on(earlier.kernel, 100);
    node.reconciler.handle(read);
    node.reconciler.set_complete_but(&[name("a")].into());
    node.sync();
    node
}

/// For each backend: the port of its frontend, the last byte of its address, and its port.
fn backends(node: &Node) -> BTreeSet<(u16, u8, u16)> {
    let frontends = node.kernel.resolved().into_iter();
    let of = |(key, lead): (lb_common::ServiceKey, crate::kernel::Lead)| {
        lead.backends.into_iter().map(move |it| (key.port, it.address.v4_bytes()[3], it.port))
    };
    frontends.flat_map(of).collect()
}

#[test]
fn slice_of_another_port_does_not_replace_an_unreadable_slice_with_the_same_addresses() {
    let http = slice("a", 1, HTTP, vec![endpoint(1)]);
    let before = vec![service("a", 1), http.clone(), slice("a", 2, METRICS, vec![endpoint(1)])];
    let node = restarted(before, vec![service("a", 1), http]);
    assert_eq!(backends(&node), [(80, 1, 8080), (90, 1, 9090)].into());
}

#[test]
fn one_server_of_an_address_does_not_replace_another_in_an_unreadable_slice() {
    let first = slice("a", 1, HTTP, vec![endpoint(1)]);
    let before = vec![service("a", 1), first.clone(), slice("a", 2, ("http", 8081), vec![endpoint(1)])];
    let node = restarted(before, vec![service("a", 1), first]);
    assert_eq!(backends(&node), [(80, 1, 8080), (80, 1, 8081)].into());
}

#[test]
fn slice_of_another_service_does_not_replace_an_unreadable_slice_with_the_same_addresses() {
    let read = vec![
        service("a", 1),
        service("b", 2),
        slice("a", 1, HTTP, vec![endpoint(1)]),
        slice("b", 1, HTTP, vec![endpoint(2)]),
    ];
    let before = [read.clone(), vec![slice("a", 2, HTTP, vec![endpoint(2)])]].concat();
    let node = restarted(before, read);
    let leads: Vec<usize> = node.kernel.resolved().values().map(|lead| lead.backends.len()).collect();
    assert_eq!(leads, [2, 0, 1, 0], "a http, a metrics, b http, b metrics");
}

#[test]
fn endpoint_that_leaves_a_readable_slice_does_not_come_back() {
    let both = slice("a", 1, HTTP, vec![endpoint(1), endpoint(2)]);
    let before = vec![service("a", 1), both.clone(), slice("a", 2, HTTP, vec![endpoint(3)])];
    let mut node = restarted(before, vec![service("a", 1), both]);
    node.reconciler.handle(vec![slice("a", 1, HTTP, vec![endpoint(1)])]);
    node.sync();
    assert_eq!(backends(&node), [(80, 1, 8080), (80, 3, 8080)].into());
    node.reconciler.handle(vec![slice("a", 1, ("http", 8000), vec![endpoint(1)])]);
    node.sync();
    assert_eq!(backends(&node), [(80, 1, 8000), (80, 3, 8080)].into(), "its old port does not stay");
}

#[test]
fn terminating_endpoint_of_an_unreadable_slice_is_not_ready_after_the_restart() {
    let old = slice("a", 1, HTTP, vec![terminating(endpoint(1))]);
    let before = vec![service("a", 1), old, slice("a", 2, HTTP, vec![terminating(endpoint(2))])];
    let node = restarted(before, vec![service("a", 1), slice("a", 1, HTTP, vec![endpoint(3)])]);
    assert_eq!(backends(&node), [(80, 3, 8080)].into(), "a ready endpoint precedes terminating ones");
}

/// The Service `a` with these ports, a load balancer address, and `externalTrafficPolicy: Local`.
fn local_balancer(ports: &[&str]) -> Change {
    let Change::Service(_, Some(service)) = service("a", 1) else { unreachable!() };
    let external = External {
        load_balancer_ips: vec![[203, 0, 113, 1].into()],
        policy: TrafficPolicy::Local,
        health_check_node_port: Some(32000),
        ..External::default()
    };
    let ports = ports.iter().zip(80..).map(|(name, number)| port(name, number)).collect();
    Change::Service(name("a"), Some(Service { external, ports, ..service }))
}

/// An endpoint on the node `here`.
fn local(last: u8) -> Vec<Endpoint> {
    vec![Endpoint { node: Some("here".into()), ..endpoint(last) }]
}

/// As [`restarted`], on the node `here`.
fn restarted_here(before: Vec<Change>, read: Vec<Change>) -> Node {
    let capacity = Capacity::of_arenas(100, 0);
    let policy = Policy { node_name: "here".into(), ..Policy::default() };
    let mut earlier = Node::with_capacity(capacity, policy.clone());
    earlier.reconciler.handle(before);
    earlier.settle();
    assert!(earlier.dump_health().contains("on 32000: IPv4 1"), "{}", earlier.dump_health());
    let mut node = Node::incomplete(earlier.kernel, capacity, policy);
    node.reconciler.handle(read);
    node.reconciler.set_complete_but(&[name("a")].into());
    node.sync();
    node
}

#[test]
fn health_check_counts_local_endpoints_of_an_unreadable_slice() {
    let read = vec![local_balancer(&["http"]), slice("a", 1, HTTP, vec![endpoint(2)])];
    let node = restarted_here([read.clone(), vec![slice("a", 2, HTTP, local(1))]].concat(), read);
    assert!(node.dump_health().contains("on 32000: IPv4 1"), "{}", node.dump_health());
}

#[test]
fn health_check_counts_no_endpoint_of_a_port_that_the_service_no_longer_has() {
    let before = vec![
        local_balancer(&["http", "metrics"]),
        slice("a", 1, HTTP, local(1)),
        slice("a", 2, METRICS, vec![endpoint(2)]),
    ];
    let renamed = |endpoints| slice("a", 1, ("web", 8080), endpoints);
    let mut node = restarted_here(before, vec![local_balancer(&["web"]), renamed(local(1))]);
    assert!(node.dump_health().contains("on 32000: IPv4 1"), "{}", node.dump_health());
    node.reconciler.handle(vec![renamed(Vec::new())]);
    node.sync();
    assert!(node.dump_health().contains("on 32000: IPv4 0"), "{}", node.dump_health());
}
