//! Tests of the control plane in single situations.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use lb_common::{Address, ConnectionLimits, ConnectionRate, NAME_SIZE, Scheduler, SourceRangeKey, Vip};
use lb_core::{
    capacity::Capacity,
    earlier_flows::EarlierFlows,
    family::Families,
    model::{
        Change, Endpoint, EndpointPort, EndpointSlice, External, Member, NodeAddresses, ObjectName, Policy,
        Protocol, Service, ServicePort, ServiceSettings, TrafficPolicy,
    },
    plan::{Condition, Contents, Plan, Step},
};

use crate::{
    kernel::{Kernel, Node},
    objects,
};

fn name(text: &str) -> ObjectName {
    ObjectName::new("default", text)
}

fn service(of: &str, last: u8) -> Change {
    let port = ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 80, node_port: None };
    let service =
        Service { cluster_ips: vec![[10, 96, 0, last].into()], ports: vec![port], ..Service::default() };
    Change::Service(name(of), Some(service))
}

fn endpoint(last: u8) -> Endpoint {
    Endpoint { pod: Some(format!("pod-{last}").into()), ..objects::endpoint(last) }
}

fn slice(of: &str, endpoints: &[u8]) -> Change {
    slice_named(&format!("{of}-1"), of, endpoints)
}

fn slice_named(slice: &str, of: &str, endpoints: &[u8]) -> Change {
    let ports = vec![EndpointPort { name: "".into(), protocol: Protocol::Tcp, port: 8080 }];
    let endpoints = endpoints.iter().copied().map(endpoint).collect();
    Change::EndpointSlice(name(slice), Some(EndpointSlice { service: name(of), ports, endpoints }))
}

fn node(slots: u32, changes: Vec<Change>) -> Node {
    let mut node = Node::new(slots);
    node.reconciler.handle(changes);
    node.settle();
    node
}

fn kinds(plan: &Plan) -> Vec<&'static str> {
    let kind = |step: &Step| match step {
        Step::DeleteFrontend(_) => "delete frontend",
        Step::WriteBackends { .. } => "write backends",
        Step::PutServiceLabels(..) => "name service",
        Step::PutEndpointLabels(..) => "name address",
        Step::PutFrontend(..) => "put frontend",
        Step::PutVip(..) => "put address",
        Step::DeleteVip(_) => "delete address",
        Step::PutSourceRange(_) => "let in",
        Step::DeleteSourceRange(_) => "lock out",
        Step::ReleaseBackends { .. } => "release backends",
        Step::DeleteServiceLabels(_) => "unname service",
        Step::DeleteEndpointLabels(_) => "unname address",
        Step::WriteTable { .. } => "write table",
        Step::ReleaseTable { .. } => "release table",
        Step::PutLimits(..) => "limit",
        Step::DeleteLimits(_) => "unlimit",
    };
    plan.steps.iter().map(kind).collect()
}

#[test]
fn backends_are_switched_in_one_update_between_writing_and_releasing() {
    let mut node = node(100, vec![service("a", 1), slice("a", &[1, 2])]);
    node.reconciler.handle(vec![slice("a", &[2, 3])]);
    let expected = ["name address", "write backends", "put frontend", "release backends", "unname address"];
    assert_eq!(kinds(&node.sync()), expected);
}

/// A Service with the scheduler `wrr` and this weight for the first endpoint, 10.0.0.1.
fn weighted(of: &str, last: u8, weight: u32) -> Change {
    let Change::Service(name, Some(plain)) = service(of, last) else { panic!("a Service") };
    let settings = ServiceSettings {
        scheduler: Some(Scheduler::WeightedRoundRobin),
        weights: [(Member::Address([10, 0, 0, 1].into()), weight)].into(),
        ..ServiceSettings::default()
    };
    Change::Service(name, Some(Service { settings: Some(settings.into()), ..plain }))
}

#[test]
fn tables_are_switched_with_their_backends_and_kept_while_valid() {
    let mut node = node(100, vec![weighted("a", 1, 2), slice("a", &[1, 2])]);
    node.reconciler.handle(vec![slice("a", &[1, 3])]);
    let swapped = ["name address", "write backends", "put frontend", "release backends", "unname address"];
    assert_eq!(kinds(&node.sync()), swapped, "the places are the same");
    node.reconciler.handle(vec![weighted("a", 1, 3)]);
    let reweighted = ["write table", "write backends", "put frontend", "release backends", "release table"];
    assert_eq!(kinds(&node.sync()), reweighted);
    node.settle();
    let before = node.kernel.maps.clone();
    node.restart();
    node.reconciler.handle(vec![weighted("a", 1, 3), slice("a", &[1, 3])]);
    assert_eq!(kinds(&node.sync()), Vec::<&str>::new());
    assert_eq!(node.kernel.maps, before);
    node.reconciler.handle(vec![service("a", 1)]);
    node.settle();
    assert_eq!(node.reconciler.table_arena().used().count(), 0);
}

#[test]
fn service_without_table_slots_keeps_its_backends_until_slots_are_free() {
    let mut node = node(4, vec![weighted("a", 1, 150), slice("a", &[1, 2])]);
    let before = node.kernel.resolved();
    node.reconciler.handle(vec![weighted("a", 1, 200)]);
    node.settle();
    let problems: Vec<_> = node.reconciler.problems().collect();
    assert!(
        matches!(problems[..], [Condition::TablesFull { wanted: 201, free: 105, slots: 256, .. }]),
        "{problems:?}"
    );
    assert_eq!(node.kernel.resolved(), before);
    node.reconciler.handle(vec![weighted("a", 1, 100)]);
    node.settle();
    assert_eq!(node.reconciler.problems().count(), 0);
}

#[test]
fn deleted_service_loses_frontends_before_backends() {
    let mut node = node(100, vec![service("a", 1), slice("a", &[1])]);
    node.reconciler.handle(vec![Change::Service(name("a"), None)]);
    assert_eq!(
        kinds(&node.sync()),
        ["delete frontend", "delete address", "release backends", "unname service", "unname address"]
    );
}

#[test]
fn unchanged_object_plans_no_step() {
    let mut node = node(100, vec![service("a", 1), slice("a", &[1, 2])]);
    node.reconciler.handle(vec![service("a", 1), slice("a", &[1, 2])]);
    assert!(!node.reconciler.needs_plan());
    node.reconciler.handle(vec![slice("a", &[2, 1])]);
    assert_eq!(kinds(&node.sync()), Vec::<&str>::new(), "another order of the same endpoints");
}

#[test]
fn restart_with_the_same_objects_plans_no_step_and_keeps_ids() {
    let objects = vec![service("a", 1), service("b", 2), slice("a", &[1, 2]), slice("b", &[3])];
    let mut node = node(100, objects.clone());
    let before = node.kernel.maps.clone();
    node.restart();
    node.reconciler.handle(objects);
    assert_eq!(kinds(&node.sync()), Vec::<&str>::new());
    assert_eq!(node.kernel.maps, before);
}

#[test]
fn first_plan_deletes_unknown_services() {
    let mut node = node(100, vec![service("a", 1), service("b", 2), slice("a", &[1]), slice("b", &[2])]);
    node.restart();
    node.reconciler.handle(vec![service("b", 2), slice("b", &[2])]);
    assert_eq!(
        kinds(&node.sync()),
        ["delete frontend", "delete address", "release backends", "unname service", "unname address"]
    );
    node.settle();
}

#[test]
fn services_not_shown_yet_stay_until_the_sources_are_complete() {
    let objects = vec![service("a", 1), service("b", 2), slice("a", &[1]), slice("b", &[2])];
    let first = node(100, objects);
    let before = first.kernel.maps.clone();
    let mut node = Node::started_incomplete_on(first.kernel, 100);
    // So far the sources have sent Service `b` without its endpoints, and not Service `a`.
    node.reconciler.handle(vec![service("b", 2)]);
    assert_eq!(kinds(&node.sync()), Vec::<&str>::new());
    assert_eq!(node.kernel.maps, before);
    assert_eq!(node.reconciler.kept().len(), 2);
    // Once a Service has been sent with its endpoints, it is planned like any other.
    node.reconciler.handle(vec![slice("b", &[3])]);
    node.sync();
    node.reconciler.handle(vec![slice("b", &[])]);
    node.sync();
    assert_eq!(node.kernel.resolved().values().map(|lead| lead.backends.len()).collect::<Vec<_>>(), [1, 0]);
    node.reconciler.set_complete();
    node.sync();
    assert_eq!(node.kernel.resolved().len(), 1);
    node.settle();
}

#[test]
fn unreadable_service_keeps_only_its_own_state() {
    let objects = ["a", "b", "c"].into_iter().zip(1..);
    let objects = objects.flat_map(|(name, n)| [service(name, n), slice(name, &[n])]).collect();
    let mut node = Node::started_incomplete_on(node(100, objects).kernel, 100);
    let of = |node: &Node| node.kernel.resolved().len();
    node.reconciler.handle(vec![service("b", 2), slice("b", &[2])]);
    node.sync();
    assert_eq!(of(&node), 3);
    node.reconciler.set_complete_but(&[name("a")].into());
    node.sync();
    assert_eq!(of(&node), 2, "c no longer exists; a may exist, because it cannot be read");
    let Contents { vips, endpoint_labels, .. } = &node.kernel.maps;
    assert_eq!((vips.len(), endpoint_labels.len()), (2, 2), "the addresses of c go with it");
    node.reconciler.set_complete();
    node.sync();
    assert_eq!(of(&node), 1);
    node.settle();
}

#[test]
fn unreadable_service_has_no_flags_on_an_address_that_the_node_now_has() {
    let Change::Service(of, Some(plain)) = service("a", 1) else { unreachable!() };
    let address = IpAddr::from([203, 0, 113, 1]);
    let external = External { load_balancer_ips: vec![address], ..External::default() };
    let balancer = Change::Service(of, Some(Service { external, ..plain }));
    let earlier = node(100, vec![balancer, slice("a", &[1])]);
    let flags = |node: &Node| node.kernel.maps.vips[&address].flags;
    let is_service = |node: &Node| flags(node) != 0;
    assert!(is_service(&earlier));
    let mut node = Node::started_incomplete_on(earlier.kernel, 100);
    let owning = |own: &[IpAddr]| NodeAddresses { own: own.to_vec(), ..NodeAddresses::default() };
    node.set_addresses(owning(&[address]));
    node.reconciler.set_complete_but(&[name("a")].into());
    node.sync();
    assert!(!is_service(&node), "programs leave unlisted ports of the node's own addresses to its stack");
    node.set_addresses(owning(&[]));
    node.sync();
    assert!(is_service(&node));
}

/// A node whose earlier agent served Service `a`, which the new agent cannot read; `spoil` changes the maps in between.
fn restarted_without_a(spoil: impl Fn(&mut Kernel), changes: Vec<Change>) -> Node {
    let mut kernel = node(100, vec![service("a", 1), slice("a", &[1])]).kernel;
    spoil(&mut kernel);
    restarted_on(kernel, changes)
}

/// A node whose agent has just started. The sources have sent `changes`, and cannot read Service `a`.
fn restarted_on(kernel: Kernel, changes: Vec<Change>) -> Node {
    let mut node = Node::started_incomplete_on(kernel, 100);
    node.reconciler.handle(changes);
    node.reconciler.set_complete_but(&[name("a")].into());
    node
}

#[test]
fn unreadable_service_leaves_nothing_when_another_takes_its_frontend_over() {
    let taker = || vec![service("b", 1), slice("b", &[2])];
    let all = restarted_without_a(|_| {}, taker()).sync().steps.len();
    for (failing_after, crashes) in (0..=all).flat_map(|steps| [(steps, false), (steps, true)]) {
        let mut node = restarted_without_a(|_| {}, taker());
        node.sync_some(failing_after);
        if crashes {
            node = restarted_on(node.kernel, taker());
        }
        node.settle();
        assert!(crashes || node.reconciler.kept().contains(&name("a")));
        let expected = "default/b/TCP ClusterIP 10.96.0.1:80\n  10.0.0.2:8080\n";
        assert!(node.kernel.dump().starts_with(expected), "{}", node.kernel.dump());
    }
}

/// While a manifest has an error, the sources are never complete.
#[test]
fn invalid_record_leaves_nothing_before_the_sources_are_complete() {
    let mut kernel = node(100, vec![service("a", 1), slice("a", &[1])]).kernel;
    kernel.maps.frontends.values_mut().for_each(|record| record.seal ^= 1);
    let mut node = Node::started_incomplete_on(kernel, 100);
    node.settle();
    assert_eq!(node.kernel.maps.frontends.len(), 0);
}

/// The record is valid, but `SERVICE_NAMES` has no entry for its id. The agent gives the service port the same id
/// again.
#[test]
fn record_that_becomes_valid_by_itself_is_trusted() {
    let mut kernel = node(100, vec![service("a", 1)]).kernel;
    kernel.maps.service_labels.clear();
    let mut node = Node::started_on(kernel, 100);
    node.reconciler.handle(vec![service("a", 1)]);
    node.settle();
    assert!(!node.reconciler.needs_plan());
}

#[test]
fn unreadable_service_with_an_invalid_record_leaves_nothing() {
    let spoil = |kernel: &mut Kernel| kernel.maps.frontends.values_mut().for_each(|record| record.seal ^= 1);
    let all = restarted_without_a(spoil, vec![]).sync().steps.len();
    assert!(all > 0);
    for failing_after in 0..=all {
        let mut node = restarted_without_a(spoil, vec![]);
        node.sync_some(failing_after);
        node.settle();
        assert_eq!(node.kernel.maps.frontends.len(), 0);
    }
}

#[test]
fn service_with_an_unreadable_slice_keeps_the_endpoints_of_that_slice() {
    let two_slices = [slice_named("a-1", "a", &[1, 2]), slice_named("a-2", "a", &[3, 4])];
    let objects = [service("a", 1)].into_iter().chain(two_slices).collect();
    let mut node = Node::started_incomplete_on(node(100, objects).kernel, 100);
    let backends = |node: &Node| {
        let mut frontends = node.kernel.resolved().into_values();
        frontends
            .next()
            .unwrap()
            .backends
            .iter()
            .map(|backend| backend.address.v4_bytes()[3])
            .collect::<Vec<_>>()
    };
    // Meanwhile endpoint 2 has left its slice; the other slice cannot be read.
    node.reconciler.handle(vec![service("a", 1), slice_named("a-1", "a", &[1, 5])]);
    node.reconciler.set_complete_but(&[name("a")].into());
    node.sync();
    assert_eq!(backends(&node), [1, 2, 3, 4, 5], "endpoint 2 may be in the slice that cannot be read");
    node.reconciler.handle(vec![slice_named("a-2", "a", &[3, 4])]);
    node.reconciler.set_complete();
    node.sync();
    assert_eq!(backends(&node), [1, 3, 4, 5]);
    node.settle();
}

#[test]
fn service_without_endpoints_keeps_its_frontend() {
    let mut node = node(100, vec![service("a", 1), slice("a", &[1])]);
    node.reconciler.handle(vec![slice("a", &[])]);
    assert_eq!(kinds(&node.sync()), ["put frontend", "release backends", "unname address"]);
    assert!(node.kernel.resolved().values().all(|lead| lead.backends.is_empty()));
}

#[test]
fn conflicting_frontend_belongs_to_the_smaller_name_until_that_is_deleted() {
    for order in [["a", "b"], ["b", "a"]] {
        let mut node = Node::new(100);
        node.reconciler.handle(vec![slice("a", &[1]), slice("b", &[2])]);
        for of in order {
            node.reconciler.handle(vec![service(of, 1)]);
            node.sync();
        }
        let problem = node.reconciler.problems().next().expect("a conflict");
        assert_eq!(
            problem.to_string(),
            "10.96.0.1:80/TCP of default/b/TCP belongs to default/a/TCP already: give one of them another address or port"
        );
        assert_eq!(problem.service(), &name("b"));
        assert!(node.kernel.dump().starts_with("default/a/TCP ClusterIP 10.96.0.1:80\n  10.0.0.1:8080\n"));
        node.reconciler.handle(vec![Change::Service(name("a"), None)]);
        let plan = node.sync();
        assert!(!kinds(&plan).contains(&"delete frontend"), "the frontend passes on in one update");
        assert!(node.kernel.dump().starts_with("default/b/TCP ClusterIP 10.96.0.1:80\n  10.0.0.2:8080\n"));
        assert_eq!(node.reconciler.problems().count(), 0);
        node.settle();
    }
}

#[test]
fn service_that_does_not_fit_keeps_its_backends_until_slots_are_free() {
    let mut node = node(4, vec![service("a", 1), service("b", 2), slice("a", &[1, 2]), slice("b", &[3])]);
    node.reconciler.handle(vec![slice("a", &[4, 5]), slice("b", &[6])]);
    let plan = node.sync();
    let full = Condition::ArenaFull { service: name("a"), wanted: 2, free: 1, slots: 4 };
    assert_eq!(plan.problems, [full]);
    assert!(node.kernel.dump().contains("10.0.0.1:8080\n  10.0.0.2:8080"), "the last good state");
    node.end_epoch();
    node.grace();
    assert!(node.reconciler.needs_plan(), "one slot came back");
    assert_eq!(node.sync().steps, Vec::new());
    assert_eq!(node.reconciler.problems().count(), 1, "the free slots are not in one piece");
    node.reconciler.handle(vec![slice("b", &[])]);
    node.settle();
    assert!(node.kernel.dump().contains("10.0.0.4:8080\n  10.0.0.5:8080"));
    assert_eq!(node.reconciler.problems().count(), 0);
}

#[test]
fn service_that_does_not_fit_takes_no_frontend_from_another() {
    let shared = vec![[198, 51, 100, 1].into()];
    let with = |change: Change, external: External| {
        let Change::Service(of, Some(service)) = change else { unreachable!() };
        Change::Service(of, Some(Service { external, ..service }))
    };
    let has = External { ips: shared.clone(), ..External::default() };
    let mut node = node(3, vec![with(service("a", 1), has), slice("a", &[1])]);
    let maps = node.kernel.maps.clone();
    // A load balancer address has precedence over an equal external IP.
    let takes = External { load_balancer_ips: shared, ..External::default() };
    node.reconciler.handle(vec![with(service("b", 2), takes), slice("b", &[2, 3, 4])]);
    let plan = node.sync();
    let full = Condition::ArenaFull { service: name("b"), wanted: 3, free: 2, slots: 3 };
    assert_eq!((plan.steps, plan.problems), (Vec::new(), vec![full]));
    node.settle();
    assert_eq!(node.kernel.maps, maps);
    node.reconciler.handle(vec![slice("b", &[2, 3])]);
    let plan = node.sync();
    assert!(!kinds(&plan).contains(&"delete frontend"), "the frontend passes on in one update");
    assert!(node.kernel.dump().contains("b/TCP LoadBalancer 198.51.100.1:80"), "{}", node.kernel.dump());
    node.settle();
}

#[test]
fn service_that_does_not_fit_keeps_its_addresses_when_the_agent_restarts() {
    let mut node = node(4, vec![service("a", 1), service("b", 2), slice("a", &[1, 2]), slice("b", &[3])]);
    let maps = node.kernel.maps.clone();
    node.restart();
    node.reconciler.handle(vec![service("a", 1), service("b", 2), slice("a", &[4, 5]), slice("b", &[3])]);
    let plan = node.sync();
    assert_eq!(plan.problems.len(), 1, "{:?}", plan.problems);
    assert_eq!(node.kernel.maps, maps);
    node.settle();
}

#[test]
fn service_that_does_not_fit_releases_source_ranges_of_a_failed_plan() {
    let capacity = Capacity { source_ranges: 1, ..Capacity::of_arenas(8, 0) };
    let mut node = Node::with_capacity(capacity, Policy::default());
    let balancer = |ranges: &[&str]| {
        let Change::Service(of, Some(service)) = service("a", 1) else { unreachable!() };
        let source_ranges = ranges.iter().map(|range| range.parse().expect("a network")).collect();
        let load_balancer_ips = vec![[203, 0, 113, 1].into()];
        let external = External { load_balancer_ips, source_ranges, ..External::default() };
        Change::Service(of, Some(Service { external, ..service }))
    };
    node.reconciler.handle(vec![balancer(&["192.0.2.0/24"])]);
    let plan = node.sync_some(3);
    let steps = ["name service", "let in", "put frontend", "put frontend", "put address", "put address"];
    assert_eq!(kinds(&plan), steps, "the last three fail");
    node.reconciler.handle(vec![balancer(&["192.0.2.0/24", "198.51.100.0/24"])]);
    node.settle();
    assert_eq!(node.reconciler.problems().count(), 1);
    assert_eq!(node.kernel.maps.source_ranges.len(), 0);
}

#[test]
fn endpoint_that_no_frontend_leads_to_has_no_name() {
    let mut node = node(100, vec![service("a", 1), service("b", 1), slice("a", &[1]), slice("b", &[2])]);
    let named = |node: &Node| node.kernel.maps.endpoint_labels.keys().copied().collect::<Vec<_>>();
    assert_eq!(named(&node), [IpAddr::from([10, 0, 0, 1])], "a has the frontend that both claim");
    node.reconciler.handle(vec![dual("b", 1), slice("a", &[1])]);
    node.settle();
    assert_eq!(named(&node), [IpAddr::from([10, 0, 0, 1])], "b has only a frontend without endpoints");
}

/// Like [`service`], but the Service also has the IPv6 cluster IP `fd00::last`.
fn dual(of: &str, last: u8) -> Change {
    let Change::Service(of, Some(mut service)) = service(of, last) else { unreachable!() };
    service.cluster_ips.push([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(last)].into());
    Change::Service(of, Some(service))
}

#[test]
fn service_is_here_at_the_addresses_that_the_kernel_serves() {
    let balancer = |of: &str, last: u8| {
        let Change::Service(_, Some(service)) = service(of, last) else { unreachable!() };
        let external =
            External { load_balancer_ips: vec![[203, 0, 113, last].into()], ..External::default() };
        Change::Service(name(of), Some(Service { external, ..service }))
    };
    let here = |node: &mut Node, of: &str| -> Vec<String> {
        node.reconciler.take_holders_changed();
        node.reconciler.holders()[&name(of)].here.iter().map(ToString::to_string).collect()
    };
    let objects = |of: &'static str, last, endpoints: &[u8]| [balancer(of, last), slice(of, endpoints)];
    let mut node = node(3, [objects("a", 1, &[1, 2]), objects("b", 2, &[3, 4])].concat());
    assert_eq!(here(&mut node, "a"), ["203.0.113.1"]);
    assert_eq!(here(&mut node, "b"), [""; 0], "two slots are taken, and one is too few");
    // The kernel refuses the first step of the update that makes room for the Service.
    node.reconciler.handle(vec![slice("a", &[]), slice("b", &[3])]);
    node.sync_some(0);
    assert_eq!((here(&mut node, "a"), here(&mut node, "b")), (vec!["203.0.113.1".to_owned()], Vec::new()));
    node.settle();
    assert_eq!((here(&mut node, "a"), here(&mut node, "b")), (Vec::new(), vec!["203.0.113.2".to_owned()]));
    // After a restart the agent finds the Service in the maps.
    node.restart();
    node.reconciler.handle(objects("b", 2, &[3]).to_vec());
    node.reconciler.plan();
    assert_eq!(here(&mut node, "b"), ["203.0.113.2"]);
}

/// Nodes announce an address that counts as served, so an address at which they drop or reject all clients must not
/// count. The cases include an endpoint that is serving, but neither ready nor terminating: that is how the agent reads
/// an endpoint for which the EndpointSlice sets only `ready: false`.
#[test]
fn address_counts_as_served_exactly_if_its_frontend_has_backends() {
    const ADDRESS: [u8; 4] = [203, 0, 113, 1];
    let balancer = |policy| {
        let Change::Service(_, Some(service)) = service("a", 1) else { unreachable!() };
        let external = External { load_balancer_ips: vec![ADDRESS.into()], policy, ..External::default() };
        Change::Service(name("a"), Some(Service { external, ..service }))
    };
    let node_name: Arc<str> = "n1".into();
    for policy in [TrafficPolicy::Cluster, TrafficPolicy::Local] {
        for (case, port) in (0..8_u8).flat_map(|case| [(case, ""), (case, "other")]) {
            let [ready, serving, terminating] = [1, 2, 4].map(|bit| case & bit != 0);
            let node = Some(Arc::clone(&node_name));
            let only = Endpoint { ready, serving, terminating, node, ..endpoint(1) };
            // The Service has no cluster IP of this endpoint's family.
            let other = Endpoint { address: "fd00::1".parse().unwrap(), ..only.clone() };
            let ports = vec![EndpointPort { name: port.into(), protocol: Protocol::Tcp, port: 8080 }];
            let slice = EndpointSlice { service: name("a"), ports, endpoints: vec![only, other] };
            let on_n1 = Policy { node_name: Arc::clone(&node_name), ..Policy::default() };
            let mut node = Node::with_policy(9, on_n1);
            let slice = Change::EndpointSlice(name("a-1"), Some(slice));
            node.reconciler.handle(vec![balancer(policy), slice]);
            node.settle();
            let frontends = &node.kernel.maps.frontends;
            let (_, frontend) =
                frontends.iter().find(|(key, _)| key.address == Address::from_v4(ADDRESS)).unwrap();
            let has_backends = frontend.backends_count > 0;
            let context = format!("{policy:?} {ready} {serving} {terminating} {port:?}");
            let holder = &node.reconciler.holders()[&name("a")];
            assert_eq!(holder.served, Families { v4: has_backends, v6: false }, "{context}");
            let nodes = has_backends.then(|| Arc::clone(&node_name)).into_iter().collect();
            let expected = (policy == TrafficPolicy::Local).then_some([nodes, BTreeSet::new()]);
            assert_eq!(holder.nodes, expected, "{context}");
        }
    }
}

#[test]
fn service_without_free_frontend_entry_delays_no_other() {
    let capacity = Capacity { frontends: 2, names: 2, ..Capacity::of_arenas(100, 0) };
    let mut node = Node::with_capacity(capacity, Policy::default());
    let all = |of: &'static str, n| [service(of, n), slice(of, &[n])];
    node.reconciler.handle([all("a", 1), all("b", 2), all("c", 3)].concat());
    let plan = node.sync();
    let full = |service| Condition::FrontendsFull { service, wanted: 1, free: 0, slots: 2 };
    assert_eq!(plan.problems, [full(name("c"))]);
    assert_eq!(node.kernel.resolved().len(), 2);
    // Services that have an entry can still change their endpoints and their address.
    node.reconciler.handle(vec![slice("b", &[4]), service("a", 5)]);
    node.settle();
    let dump = node.kernel.dump();
    assert!(dump.contains("a/TCP ClusterIP 10.96.0.5:80") && dump.contains("10.0.0.4:8080"), "{dump}");
    node.reconciler.handle(vec![Change::Service(name("b"), None)]);
    node.sync();
    assert!(node.reconciler.needs_plan(), "there is capacity now");
    node.settle();
    assert!(node.kernel.dump().contains("c/TCP ClusterIP 10.96.0.3:80"), "{}", node.kernel.dump());
    assert_eq!(node.reconciler.problems().count(), 0);
}

#[test]
fn condition_about_a_full_map_of_names_says_which_map_is_full() {
    let capacity = Capacity { frontends: 3, names: 2, ..Capacity::of_arenas(100, 0) };
    let mut node = Node::with_capacity(capacity, Policy::default());
    let all = |of: &'static str, n| [service(of, n), slice(of, &[n])];
    node.reconciler.handle([all("a", 1), all("b", 2), all("c", 3)].concat());
    let plan = node.sync();
    let full = Condition::NamesFull { service: name("c"), wanted: 1, free: 0, slots: 2 };
    assert_eq!(plan.problems, std::slice::from_ref(&full));
    assert_eq!(full.waits_for(), Some("SERVICE_NAMES"));
    assert!(full.to_string().ends_with("restart the agent with a larger --max-frontends"), "{full}");
    node.reconciler.handle(vec![Change::Service(name("b"), None)]);
    node.settle();
    assert!(node.kernel.dump().contains("c/TCP ClusterIP 10.96.0.3:80"), "{}", node.kernel.dump());
}

#[test]
fn service_whose_address_does_not_fit_delays_no_other() {
    let capacity = Capacity { vips: 2, ..Capacity::of_arenas(100, 0) };
    let mut node = Node::with_capacity(capacity, Policy::default());
    let all = |of: &'static str, n| [service(of, n), slice(of, &[n])];
    node.reconciler.handle([all("a", 1), all("b", 2), all("c", 3)].concat());
    let plan = node.sync();
    let full = |service| Condition::VipsFull { service, wanted: 1, free: 0, slots: 2 };
    assert_eq!(plan.problems, [full(name("c"))]);
    assert_eq!(node.kernel.resolved().len(), 2);
    // An address that replaces another one of the same Service needs no further entry.
    node.reconciler.handle(vec![service("a", 5)]);
    node.settle();
    assert!(node.kernel.dump().contains("a/TCP ClusterIP 10.96.0.5:80"), "{}", node.kernel.dump());
    node.reconciler.handle(vec![Change::Service(name("b"), None)]);
    node.settle();
    assert!(node.kernel.dump().contains("c/TCP ClusterIP 10.96.0.3:80"), "{}", node.kernel.dump());
    assert_eq!(node.reconciler.problems().count(), 0);
}

fn foreign(of: &str, last: u8) -> Change {
    let cluster_ips = vec![[10, 96, 0, last].into()];
    Change::Service(name(of), Some(Service { cluster_ips, is_foreign: true, ..Service::default() }))
}

/// Without an entry in `VIPS`, the programs would drop packets to the address, which the other proxy serves.
#[test]
fn cluster_ip_of_another_proxy_is_known_but_has_no_flags() {
    let untouched = BTreeMap::from([([10, 96, 0, 1].into(), Vip { flags: 0 })]);
    let mut node = Node::new(100);
    node.reconciler.handle(vec![service("a", 1), slice("a", &[1])]);
    node.settle();
    assert_ne!(node.kernel.maps.vips, untouched);
    node.reconciler.handle(vec![foreign("a", 1)]);
    node.settle();
    assert_eq!((&node.kernel.maps.vips, node.kernel.maps.frontends.len()), (&untouched, 0));
    node.restart();
    node.reconciler.handle(vec![foreign("a", 1), slice("a", &[1])]);
    assert_eq!(node.sync().steps, [], "a restarted agent keeps the address");
    node.reconciler.handle(vec![Change::Service(name("a"), None)]);
    node.settle();
    assert_eq!(node.kernel.maps.vips, BTreeMap::new());
}

#[test]
fn full_map_delays_the_address_of_another_proxy() {
    let capacity = Capacity { vips: 1, ..Capacity::of_arenas(100, 0) };
    let mut node = Node::with_capacity(capacity, Policy::default());
    node.reconciler.handle(vec![service("a", 1), foreign("b", 2)]);
    node.settle();
    let full = Condition::VipsFull { service: name("b"), wanted: 1, free: 0, slots: 1 };
    assert!(node.reconciler.problems().eq([&full]));
    node.reconciler.handle(vec![Change::Service(name("a"), None)]);
    node.settle();
    let untouched = BTreeMap::from([([10, 96, 0, 2].into(), Vip { flags: 0 })]);
    assert_eq!(node.kernel.maps.vips, untouched);
    assert_eq!(node.reconciler.problems().count(), 0);
}

/// The node's own addresses may exceed the limit of `VIPS`, and a Service may share one of them. The limit still holds
/// for what Services add after the node has lost the address.
#[test]
fn addresses_that_services_shared_with_the_node_do_not_raise_the_limit() {
    let capacity = Capacity { vips: 3, ..Capacity::of_arenas(100, 0) };
    let mut node = Node::with_capacity(capacity, Policy::default());
    let [first, second, third]: [IpAddr; 3] = [1, 2, 3].map(|last| [192, 0, 2, last].into());
    let own = |own: &[IpAddr]| NodeAddresses { own: own.to_vec(), ..NodeAddresses::default() };
    let at = |of: &str, last, external: IpAddr| {
        let Change::Service(name, Some(service)) = service(of, last) else { unreachable!("a Service") };
        let external = External { ips: vec![external], ..service.external };
        Change::Service(name, Some(Service { external, ..service }))
    };
    node.set_addresses(own(&[first, second]));
    node.reconciler.handle(vec![at("a", 1, first), at("b", 2, second)]);
    node.settle();
    assert_eq!(node.reconciler.problems().count(), 1, "b has no room for its cluster IP");
    node.set_addresses(own(&[first]));
    node.reconciler.handle(vec![at("b", 2, first)]);
    node.settle();
    node.set_addresses(own(&[first, second]));
    node.reconciler.handle(vec![at("b", 2, second)]);
    node.settle();
    assert_eq!(node.reconciler.problems().count(), 0, "b needs no further entry");
    node.set_addresses(own(&[]));
    node.reconciler.handle(vec![at("b", 2, third)]);
    node.settle();
    assert_eq!(node.reconciler.problems().count(), 1, "b would need an entry above the limit");
    assert_eq!(node.kernel.maps.vips.len(), 4);
    assert!(node.kernel.maps.vips.contains_key(&second), "b keeps the address that it has");
    node.reconciler.handle(vec![Change::Service(name("a"), None)]);
    node.settle();
    assert_eq!(node.reconciler.problems().count(), 0);
    assert!(node.kernel.maps.vips.keys().eq([&[10, 96, 0, 2].into(), &third]));
}

#[test]
fn full_map_delays_another_proxy_that_gets_an_address_of_ours() {
    let capacity = Capacity { vips: 1, ..Capacity::of_arenas(100, 0) };
    let mut node = Node::with_capacity(capacity, Policy::default());
    node.reconciler.handle(vec![service("a", 1)]);
    node.settle();
    node.reconciler.handle(vec![service("a", 2), foreign("b", 1)]);
    node.settle();
    let full = Condition::VipsFull { service: name("b"), wanted: 1, free: 0, slots: 1 };
    assert!(node.reconciler.problems().eq([&full]));
    assert!(node.kernel.maps.vips.keys().eq([&IpAddr::from([10, 96, 0, 2])]));
}

#[test]
fn full_map_keeps_the_addresses_of_another_proxy_across_a_restart() {
    let capacity = Capacity { vips: 2, ..Capacity::of_arenas(100, 0) };
    let mut node = Node::with_capacity(capacity, Policy::default());
    node.reconciler.handle(vec![foreign("b", 1)]);
    node.reconciler.handle(vec![foreign("c", 2)]);
    node.settle();
    node.restart();
    node.reconciler.handle(vec![service("a", 3), foreign("b", 1), foreign("c", 2)]);
    node.settle();
    let full = Condition::VipsFull { service: name("a"), wanted: 1, free: 0, slots: 2 };
    assert!(node.reconciler.problems().eq([&full]));
    let vips: Vec<IpAddr> = node.kernel.maps.vips.keys().copied().collect();
    assert_eq!(vips, [IpAddr::from([10, 96, 0, 1]), [10, 96, 0, 2].into()]);
}

#[test]
fn failed_plan_releases_its_slots_and_is_retried() {
    let mut node = Node::new(2);
    node.reconciler.handle(vec![service("a", 1), slice("a", &[1, 2])]);
    let first = node.sync_some(3);
    assert_eq!(node.reconciler.arena().free_slots(), 2);
    assert!(node.reconciler.needs_plan());
    let second = node.sync();
    assert_eq!(
        kinds(&first),
        ["name address", "name address", "name service", "write backends", "put frontend", "put address"]
    );
    assert_eq!(
        kinds(&second),
        ["write backends", "put frontend", "put address"],
        "what was applied is not done again"
    );
    node.settle();
}

/// The id in the record of the only frontend.
fn only_id(node: &Node) -> u32 {
    let ids: Vec<u32> = node.kernel.maps.frontends.values().map(|record| record.id).collect();
    let [id] = ids[..] else { panic!("{ids:?}") };
    id
}

#[test]
fn new_service_never_reuses_the_id_of_a_deleted_one() {
    let mut node = node(100, vec![service("a", 1)]);
    let first = only_id(&node);
    node.reconciler.handle(vec![Change::Service(name("a"), None)]);
    node.settle();
    node.reconciler.handle(vec![service("b", 1)]);
    node.settle();
    assert_ne!(only_id(&node), first);
}

#[test]
fn new_service_after_a_restart_never_reuses_the_id_of_a_flow() {
    let mut node = node(100, vec![service("a", 1)]);
    let first = only_id(&node);
    node.reconciler.handle(vec![Change::Service(name("a"), None)]);
    node.settle();
    node.restart();
    node.reconciler.adopt_flows(EarlierFlows { highest_service: first, ..EarlierFlows::default() });
    node.reconciler.handle(vec![service("b", 1)]);
    node.settle();
    assert_ne!(only_id(&node), first);
}

#[test]
fn node_port_added_later_is_written_beside_the_name() {
    let mut node = node(100, vec![service("a", 1)]);
    let Change::Service(of, Some(mut changed)) = service("a", 1) else { unreachable!() };
    changed.ports[0].node_port = Some(30080);
    node.reconciler.handle(vec![Change::Service(of, Some(changed))]);
    let plan = node.sync();
    assert_eq!(kinds(&plan), ["name service"]);
    assert!(matches!(&plan.steps[0], Step::PutServiceLabels(_, labels) if labels.node_port == Some(30080)));
}

/// A Service of type LoadBalancer with a node port, the external address 198.51.100.1 and these source ranges.
fn load_balancer(of: &str, ranges: &[&str]) -> Change {
    let Change::Service(of, Some(mut service)) = service(of, 1) else { unreachable!() };
    service.ports[0].node_port = Some(30_080);
    service.external.load_balancer_ips = vec![[198, 51, 100, 1].into()];
    service.external.source_ranges = ranges.iter().map(|range| range.parse().expect("a network")).collect();
    Change::Service(of, Some(service))
}

#[test]
fn source_ranges_are_complete_while_a_frontend_uses_them() {
    let mut node = node(100, vec![load_balancer("a", &[]), slice("a", &[1])]);
    for (ranges, steps) in [
        (&["192.0.2.0/24", "203.0.113.0/24"][..], &["let in", "let in", "put frontend"][..]),
        (&["192.0.2.0/24", "10.0.0.0/8"], &["let in", "lock out"]),
        (&["0.0.0.0/0", "10.0.0.0/8"], &["put frontend", "lock out", "lock out"]),
    ] {
        node.reconciler.handle(vec![load_balancer("a", ranges)]);
        assert_eq!(kinds(&node.sync()), steps, "{ranges:?}");
    }
    node.settle();
}

/// A Service with a limit on each client; 0 is none.
fn limited(of: &str, connections: u32) -> Change {
    let Change::Service(name, Some(plain)) = service(of, 1) else { panic!("a Service") };
    let client = ConnectionRate { connections, seconds: 1 };
    let limits = ConnectionLimits { client, ..ConnectionLimits::NONE };
    let settings = ServiceSettings { limits, ..ServiceSettings::default() };
    Change::Service(name, Some(Service { settings: Some(settings.into()), ..plain }))
}

#[test]
fn limits_exist_while_a_frontend_uses_them() {
    let mut node = node(100, vec![service("a", 1), slice("a", &[1])]);
    for (connections, steps) in
        [(5, &["limit", "put frontend"][..]), (6, &["limit"]), (6, &[]), (0, &["put frontend", "unlimit"])]
    {
        node.reconciler.handle(vec![limited("a", connections)]);
        assert_eq!(kinds(&node.sync()), steps, "{connections}");
    }
    node.reconciler.handle(vec![limited("a", 7)]);
    node.sync();
    node.restart();
    node.settle();
    assert_eq!(node.kernel.read_back(), Contents::default());
}

#[test]
fn limits_of_an_unknown_service_are_deleted() {
    let mut kernel = Kernel::default();
    kernel.maps.limits.insert(1, ConnectionLimits::NONE);
    let mut node = Node::started_on(kernel, 100);
    node.reconciler.handle(vec![limited("a", 5), slice("a", &[1])]);
    node.sync();
    assert_eq!(node.kernel.maps.limits.len(), 1);
    assert!(node.kernel.maps.frontends.values().all(|record| record.id != 1));
    node.settle();
}

#[test]
fn deleted_load_balancer_leaves_no_map_entry() {
    let mut node = node(100, vec![load_balancer("a", &["192.0.2.0/24"]), slice("a", &[1])]);
    node.restart();
    node.settle();
    assert_eq!(node.kernel.read_back(), Contents::default());
}

#[test]
fn source_ranges_of_an_unknown_service_are_deleted() {
    let mut kernel = Kernel::default();
    let left = ["10.0.0.0", "203.0.113.0"]
        .map(|address| SourceRangeKey::new(1, address.parse::<IpAddr>().expect("an address").into(), 24));
    kernel.maps.source_ranges = left.into();
    let mut node = Node::started_on(kernel, 100);
    node.reconciler.handle(vec![load_balancer("a", &["10.0.0.0/24"]), slice("a", &[1])]);
    node.sync();
    let admitted: Vec<_> = node.kernel.admitted().into_values().collect();
    assert_eq!(admitted, [[([10, 0, 0, 0].into(), 96 + 24)].into()]);
    assert!(node.kernel.maps.frontends.values().all(|record| record.id != 1));
    node.settle();
}

#[test]
fn node_ports_follow_the_addresses_of_the_node() {
    let mut node = node(100, vec![load_balancer("a", &[]), slice("a", &[1])]);
    let addresses = |list: &[u8]| {
        let list: Vec<IpAddr> = list.iter().map(|last| [192, 0, 2, *last].into()).collect();
        NodeAddresses { own: list.clone(), primary: list.iter().take(1).copied().collect(), node_ports: list }
    };
    node.set_addresses(addresses(&[1, 2]));
    assert_eq!(kinds(&node.sync()), ["put frontend", "put frontend", "put address", "put address"]);
    node.set_addresses(addresses(&[2, 3]));
    assert_eq!(
        kinds(&node.sync()),
        ["delete frontend", "put frontend", "delete address", "put address"],
        "a deleted address makes room for a new one"
    );
    node.set_addresses(addresses(&[2, 3]));
    assert!(!node.reconciler.needs_plan());
    node.settle();
}

#[test]
fn external_clients_are_masqueraded_in_the_families_that_detect_them() {
    let Change::Service(of, Some(both)) = service("a", 1) else { panic!("a Service") };
    let cluster_ips = vec![[10, 96, 0, 1].into(), IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1])];
    let both = Change::Service(of, Some(Service { cluster_ips, ..both }));
    let mut node = node(100, vec![both, slice("a", &[1])]);
    let masquerading = |node: &Node| {
        let masquerades = |record: &&lb_common::Service| record.masquerades(false);
        let frontends = node.kernel.maps.frontends.iter().filter(|(_, record)| masquerades(record));
        frontends.map(|(key, _)| key.address.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(masquerading(&node), [""; 0], "nothing is known of the node");
    for (families, expected) in [
        (Families { v4: true, v6: false }, &["10.96.0.1"][..]),
        (Families { v4: false, v6: true }, &["fd00::1"]),
        (Families::NONE, &[]),
    ] {
        node.set_detects_inside(families);
        node.settle();
        assert_eq!(masquerading(&node), expected, "{families:?}");
    }
    node.set_detects_inside(Families::NONE);
    assert!(!node.reconciler.needs_plan());
}

#[test]
fn adopted_service_keeps_its_addresses_and_source_ranges() {
    let first = node(100, vec![load_balancer("a", &["192.0.2.0/24"]), slice("a", &[1])]);
    let before = first.kernel.maps.clone();
    let mut node = Node::started_incomplete_on(first.kernel, 100);
    node.reconciler.set_complete_but(&[name("a")].into());
    node.sync();
    assert_eq!(node.kernel.maps, before);
    node.reconciler.handle(vec![load_balancer("a", &[]), slice("a", &[1])]);
    assert_eq!(kinds(&node.sync()), ["put frontend", "lock out"]);
    node.settle();
}

#[test]
fn pod_renamed_on_its_address_changes_only_labels() {
    let mut node = node(100, vec![service("a", 1), slice("a", &[1])]);
    let Change::EndpointSlice(of, Some(mut changed)) = slice("a", &[1]) else { unreachable!() };
    changed.endpoints[0].pod = Some("p".repeat(200).into());
    let changed = Change::EndpointSlice(of, Some(changed));
    node.reconciler.handle(vec![changed.clone()]);
    let plan = node.sync();
    assert_eq!(kinds(&plan), ["name address"]);
    let Step::PutEndpointLabels(_, labels) = &plan.steps[0] else { unreachable!() };
    let pod = labels.pod.as_deref().unwrap_or_default();
    assert_eq!(
        pod.len(),
        NAME_SIZE,
        "cut to the length that the kernel keeps, so that a restart finds it unchanged"
    );
}

#[test]
fn families_of_backends_that_are_not_the_node_itself_are_routed() {
    let v6 = |of: &str| {
        let Change::EndpointSlice(of, Some(mut slice)) = slice_named("a-2", of, &[1]) else { unreachable!() };
        slice.endpoints[0].address = "2001:db8::1".parse().unwrap();
        Change::EndpointSlice(of, Some(slice))
    };
    let mut node = node(100, vec![service("a", 1)]);
    let own = vec![[10, 0, 0, 1].into(), [10, 0, 0, 2].into()];
    node.set_addresses(NodeAddresses { own, ..NodeAddresses::default() });
    let mut routed = |changes| {
        node.reconciler.handle(changes);
        node.settle();
        node.reconciler.routed()
    };
    assert_eq!(routed(vec![]), Families::NONE, "without endpoints");
    assert_eq!(routed(vec![slice("a", &[1, 2])]), Families::NONE, "own addresses");
    assert_eq!(routed(vec![slice("a", &[1, 2, 3])]), Families { v4: true, v6: false });
    assert_eq!(routed(vec![dual("a", 1), v6("a")]), Families::BOTH);
    assert_eq!(routed(vec![slice("a", &[1])]), Families { v4: false, v6: true });
}

#[test]
fn proxy_protocol_warns_of_kubelet_probes_of_its_pods() {
    let with_header = |last| {
        let Change::Service(of, Some(mut service)) = service("a", last) else { unreachable!() };
        let settings = ServiceSettings { proxy_protocol: true, ..ServiceSettings::default() };
        service.settings = Some(settings.into());
        let udp = ServicePort { name: "dns".into(), protocol: Protocol::Udp, port: 53, node_port: None };
        service.ports.push(udp);
        Change::Service(of, Some(service))
    };
    let endpoints = |pod: Option<&str>| {
        let Change::EndpointSlice(of, Some(mut slice)) = slice("a", &[1]) else { unreachable!() };
        slice.endpoints[0].pod = pod.map(Into::into);
        for (name, protocol, port) in [("dns", Protocol::Udp, 5353), ("other", Protocol::Tcp, 9090)] {
            slice.ports.push(EndpointPort { name: name.into(), protocol, port });
        }
        Change::EndpointSlice(of, Some(slice))
    };
    let mut node = node(8, vec![service("a", 1), endpoints(Some("pod-1"))]);
    let mut problems = |changes| {
        node.reconciler.handle(changes);
        node.settle();
        node.reconciler.problems().cloned().collect::<Vec<_>>()
    };
    assert_eq!(problems(vec![]), [], "without the PROXY protocol");
    let warning = Condition::ProbesWithoutHeader { service: name("a"), ports: [8080].into() };
    assert_eq!(problems(vec![with_header(1)]), std::slice::from_ref(&warning));
    assert!(warning.to_string().contains("TCP port 8080"), "{warning}");
    assert_eq!(warning.annotation_event(), Some("ProbesWithoutHeader"));
    assert_eq!(problems(vec![endpoints(None)]), [], "no kubelet probes an endpoint without a pod");
    assert_eq!(problems(vec![endpoints(Some("pod-1"))]), [warning]);
    assert_eq!(problems(vec![service("a", 1)]), []);
}
