//! Tests which UDP flows the agent deletes.

use std::ops::{Deref, DerefMut};

use lb_common::{Address, ServiceKey};
use lb_core::{
    model::{
        Change, Endpoint, EndpointPort, EndpointSlice, Hints, ObjectName, Policy, Protocol, Service,
        ServicePort, TrafficPolicy,
    },
    plan::Plan,
    stale_udp::{ServedUdp, StaleFrontends},
};

use crate::{kernel::Node, objects};

const VIP: [u8; 4] = [10, 96, 0, 53];

fn name() -> ObjectName {
    ObjectName::new("kube-system", "dns")
}

fn service(protocol: Protocol, internal_policy: TrafficPolicy) -> Change {
    let port = ServicePort { name: "dns".into(), protocol, port: 53, node_port: None };
    let service =
        Service { cluster_ips: vec![VIP.into()], ports: vec![port], internal_policy, ..Service::default() };
    Change::Service(name(), Some(service))
}

fn endpoint(last: u8) -> Endpoint {
    Endpoint { node: Some("elsewhere".into()), ..objects::endpoint(last) }
}

fn terminating(last: u8) -> Endpoint {
    objects::terminating(endpoint(last))
}

fn slice(endpoints: Vec<Endpoint>) -> Change {
    let port = |protocol| EndpointPort { name: "dns".into(), protocol, port: 5353 };
    let ports = vec![port(Protocol::Udp), port(Protocol::Tcp)];
    Change::EndpointSlice(name(), Some(EndpointSlice { service: name(), ports, endpoints }))
}

/// A node, and the endpoints of its UDP frontends as another task of the agent knows them.
struct Dns {
    node: Node,
    served: ServedUdp,
}

impl Deref for Dns {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.node
    }
}

impl DerefMut for Dns {
    fn deref_mut(&mut self) -> &mut Node {
        &mut self.node
    }
}

impl Dns {
    /// Makes a plan and, as the agent does before the first step of a plan, applies the plan's changes to `ServedUdp`.
    fn plan(&mut self) -> Plan {
        let plan = self.reconciler.plan();
        self.apply_changes();
        plan
    }

    fn settle(&mut self) {
        self.node.settle();
        self.apply_changes();
    }

    fn apply_changes(&mut self) {
        let changes = self.node.reconciler.take_served_changes();
        changes.into_iter().for_each(|change| self.served.apply(change));
    }
}

/// For the only UDP frontend: the last bytes of the addresses whose flows stay; `None` if the reconciler does not
/// report the frontend.
fn kept(node: &mut Dns) -> Option<Vec<u8>> {
    node.settle();
    let moved: StaleFrontends = node.reconciler.take_stale_frontends();
    let key = frontend();
    assert!(moved.iter().all(|found| *found == key), "{moved:?}");
    let serving = moved.contains(&key).then(|| node.served.by(&key).expect("it is served"));
    serving.map(|serving| serving.iter().map(|(address, _)| last_octet(*address)).collect())
}

fn frontend() -> ServiceKey {
    ServiceKey::new(Address::from_v4(VIP), 53, Protocol::Udp.number())
}

fn last_octet(address: Address) -> u8 {
    match std::net::IpAddr::from(address) {
        std::net::IpAddr::V4(ip) => ip.octets()[3],
        std::net::IpAddr::V6(_) => panic!("there is none"),
    }
}

fn node(changes: Vec<Change>) -> Dns {
    let policy = Policy { node_name: "here".into(), ..Policy::default() };
    let mut node = Node::with_policy(100, policy);
    node.reconciler.handle(changes);
    Dns { node, served: ServedUdp::default() }
}

fn dns(endpoints: Vec<Endpoint>) -> Vec<Change> {
    vec![service(Protocol::Udp, TrafficPolicy::Cluster), slice(endpoints)]
}

fn after(node: &mut Dns, change: Change) -> Option<Vec<u8>> {
    node.reconciler.handle(vec![change]);
    kept(node)
}

#[test]
fn first_plan_and_lost_endpoints_make_flows_stale_and_added_ones_do_not() {
    let mut node = node(dns(vec![endpoint(1), endpoint(2)]));
    assert_eq!(kept(&mut node), Some(vec![1, 2]), "an earlier agent may have failed to delete them");
    assert_eq!(kept(&mut node), None, "the reconciler reports it once");
    assert_eq!(after(&mut node, slice(vec![endpoint(1), endpoint(2), endpoint(3)])), None);
    assert_eq!(after(&mut node, slice(vec![endpoint(2), endpoint(3)])), Some(vec![2, 3]));
}

#[test]
fn serving_terminating_endpoint_keeps_its_flows_until_removed() {
    let mut node = node(dns(vec![endpoint(1), endpoint(2)]));
    node.settle();
    node.reconciler.take_stale_frontends();
    assert_eq!(after(&mut node, slice(vec![terminating(1), endpoint(2)])), None);
    // No frontend refers to the endpoint any more, so its removal changes no map, but its flows must be deleted.
    assert_eq!(after(&mut node, slice(vec![endpoint(2)])), Some(vec![2]));
}

/// With `publishNotReadyAddresses`, an endpoint is ready although it does not serve.
#[test]
fn ready_endpoint_keeps_its_flows_while_it_does_not_serve() {
    let mut node = node(dns(vec![endpoint(1), endpoint(2)]));
    node.settle();
    node.reconciler.take_stale_frontends();
    let published = Endpoint { serving: false, ..endpoint(1) };
    assert_eq!(after(&mut node, slice(vec![published, endpoint(2)])), None);
    let unready = Endpoint { ready: false, serving: false, ..endpoint(1) };
    assert_eq!(after(&mut node, slice(vec![unready, endpoint(2)])), Some(vec![2]));
}

#[test]
fn hints_and_policies_make_no_flow_stale() {
    let mut node = node(dns(vec![endpoint(1), endpoint(2)]));
    assert_eq!(kept(&mut node), Some(vec![1, 2]));
    let elsewhere = Hints { nodes: vec!["elsewhere".into()], ..Hints::default() };
    let hinted = Endpoint { hints: Some(elsewhere.into()), ..endpoint(1) };
    let here = Hints { nodes: vec!["here".into()], ..Hints::default() };
    let meant = Endpoint { hints: Some(here.into()), ..endpoint(2) };
    assert_eq!(after(&mut node, slice(vec![hinted, meant])), None, "the hints select the second one");
    assert_eq!(after(&mut node, service(Protocol::Udp, TrafficPolicy::Local)), None, "none is local");
}

#[test]
fn frontend_without_endpoints_keeps_flows_until_it_has_others() {
    let mut node = node(dns(vec![endpoint(1)]));
    node.settle();
    node.reconciler.take_stale_frontends();
    assert_eq!(after(&mut node, slice(vec![])), None);
    assert_eq!(after(&mut node, slice(vec![endpoint(1)])), None, "the same one is back");
    assert_eq!(after(&mut node, slice(vec![])), None);
    assert_eq!(after(&mut node, slice(vec![endpoint(2)])), Some(vec![2]));
}

#[test]
fn recreated_service_makes_flows_of_the_old_one_stale() {
    let mut node = node(dns(vec![endpoint(1)]));
    assert_eq!(kept(&mut node), Some(vec![1]));
    assert_eq!(after(&mut node, Change::Service(name(), None)), None);
    assert_eq!(after(&mut node, service(Protocol::Udp, TrafficPolicy::Cluster)), Some(vec![1]));
}

#[test]
fn stale_frontends_of_a_failed_plan_are_reported_again() {
    let mut node = node(dns(vec![endpoint(1), endpoint(2)]));
    assert_eq!(kept(&mut node), Some(vec![1, 2]));
    node.reconciler.handle(vec![slice(vec![endpoint(2)])]);
    let plan = node.plan();
    assert!(!plan.steps.is_empty());
    assert_eq!(node.reconciler.take_stale_frontends().len(), 1);
    node.reconciler.failed();
    assert_eq!(kept(&mut node), Some(vec![2]), "until the switch, programs created flows to the first one");
}

#[test]
fn endpoint_added_during_deletion_of_stale_flows_keeps_its_flows() {
    let mut node = node(dns(vec![endpoint(1)]));
    assert_eq!(kept(&mut node), Some(vec![1]));
    assert_eq!(after(&mut node, slice(vec![endpoint(2)])), Some(vec![2]));
    // Another endpoint is added while the agent waits for the grace period before it deletes the flows.
    let lost =
        |node: &Dns, last| node.served.has_lost(&frontend(), (Address::from_v4([10, 0, 0, last]), 5353));
    assert!(lost(&node, 1) && !lost(&node, 2) && lost(&node, 3));
    node.reconciler.handle(vec![slice(vec![endpoint(2), endpoint(3)])]);
    assert!(!node.plan().steps.is_empty());
    assert!(lost(&node, 1) && !lost(&node, 2) && !lost(&node, 3), "known before programs create flows to it");
    node.settle();
    node.reconciler.handle(vec![slice(vec![])]);
    node.settle();
    assert!(lost(&node, 1) && !lost(&node, 3), "without other endpoints, the flows stay");
}

#[test]
fn frontend_taken_over_by_another_service_is_served_by_it() {
    for (old, new) in [("a", "b"), ("b", "a")] {
        let changes = |name: &str, last| {
            let Change::Service(_, Some(service)) = service(Protocol::Udp, TrafficPolicy::Cluster) else {
                unreachable!()
            };
            let Change::EndpointSlice(_, Some(slice)) = slice(vec![endpoint(last)]) else { unreachable!() };
            let name = ObjectName::new("kube-system", name);
            let slice = EndpointSlice { service: name.clone(), ..slice };
            [Change::Service(name.clone(), Some(service)), Change::EndpointSlice(name, Some(slice))]
        };
        let mut node = node(changes(old, 1).into());
        assert_eq!(kept(&mut node), Some(vec![1]));
        node.reconciler.handle(vec![Change::Service(ObjectName::new("kube-system", old), None)]);
        node.reconciler.handle(changes(new, 2).into());
        assert_eq!(kept(&mut node), Some(vec![2]), "from {old} to {new}");
        node.reconciler.handle(vec![Change::Service(ObjectName::new("kube-system", new), None)]);
        node.settle();
        assert_eq!(node.served.by(&frontend()), None);
    }
}

#[test]
fn tcp_flows_are_never_stale() {
    let mut node = node(vec![service(Protocol::Tcp, TrafficPolicy::Cluster), slice(vec![endpoint(1)])]);
    assert_eq!(kept(&mut node), None);
    assert_eq!(after(&mut node, slice(vec![endpoint(2)])), None);
}
