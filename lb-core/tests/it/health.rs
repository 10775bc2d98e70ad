//! Tests which endpoints get new flows while this node finds some of them unhealthy.

use std::sync::Arc;

use lb_common::{FrontendKind, service_flags};
use lb_core::{
    convert::{self, Origin},
    desired::{Frontend, Port, desired},
    family::Family,
    model::{
        Change, Endpoint, EndpointPort, EndpointSlice, External, Hints, Node, ObjectName, Policy, Protocol,
        Service, ServicePort, ServiceSettings, TrafficPolicy,
    },
    probe::{Check, Kind, Target, Timing},
    reconciler::Reconciler,
};

use crate::objects;

const HERE: &str = "here";

fn check(interval: u64) -> Arc<Check> {
    let timing = Timing { interval: std::time::Duration::from_secs(interval), ..Timing::default() };
    Arc::new(Check { kind: Kind::Tcp, port: None, timing, proxy_header: false })
}

pub(super) fn target(last: u8) -> Target {
    Target { address: [10, 1, 0, last].into(), port: 8080, check: check(10) }
}

/// The endpoint `10.1.0.last`; endpoints with an odd number are on this node.
pub(super) fn endpoint(last: u8) -> Endpoint {
    let node = if last % 2 == 1 { HERE } else { "there" };
    Endpoint { address: [10, 1, 0, last].into(), node: Some(node.into()), ..objects::endpoint(last) }
}

pub(super) fn slice(endpoints: Vec<Endpoint>) -> EndpointSlice {
    let port = EndpointPort { name: "".into(), protocol: Protocol::Tcp, port: 8080 };
    EndpointSlice { service: name(), ports: vec![port], endpoints }
}

pub(super) fn name() -> ObjectName {
    ObjectName::new("default", "web")
}

pub(super) fn service(fail_closed: bool) -> Service {
    let settings = ServiceSettings { check: Some(check(10)), fail_closed, ..ServiceSettings::default() };
    Service {
        cluster_ips: vec![[10, 96, 0, 1].into()],
        ports: vec![ServicePort { name: "".into(), protocol: Protocol::Tcp, port: 80, node_port: None }],
        settings: Some(settings.into()),
        ..Service::default()
    }
}

fn node(unhealthy: &[u8]) -> Node {
    Node {
        policy: Policy { node_name: HERE.into(), ..Policy::default() },
        zone: Some("z".into()),
        unhealthy: unhealthy.iter().map(|last| target(*last)).collect(),
        ..Node::default()
    }
}

fn port(service: &Service, endpoints: Vec<Endpoint>, unhealthy: &[u8]) -> Port {
    desired(&name(), service, [&slice(endpoints)].into_iter(), &node(unhealthy)).remove(0)
}

/// The last bytes of the addresses of the backends that `slice` selects for the first frontend.
fn backends(port: &Port, slice: impl Fn(&Frontend) -> Option<usize>) -> Vec<u8> {
    let slice = port.frontends.first().and_then(slice);
    let backends = slice.map_or(&[][..], |slice| &port.slices[slice]);
    backends.iter().map(|backend| backend.address.v4_bytes()[3]).collect()
}

fn of_cluster_ip(service: &Service, endpoints: Vec<Endpoint>, unhealthy: &[u8]) -> Vec<u8> {
    backends(&port(service, endpoints, unhealthy), |frontend| frontend.slice)
}

#[test]
fn unhealthy_endpoint_gets_no_new_flows() {
    let all = || vec![endpoint(1), endpoint(2), endpoint(3)];
    assert_eq!(of_cluster_ip(&service(false), all(), &[2]), [1, 3]);
    let mut unchecked = service(false);
    unchecked.settings = None;
    assert_eq!(of_cluster_ip(&unchecked, all(), &[2]), [1, 2, 3]);
}

#[test]
fn all_are_used_when_all_are_unhealthy_unless_fail_closed() {
    let all = || vec![endpoint(1), endpoint(2)];
    assert_eq!(of_cluster_ip(&service(false), all(), &[1, 2]), [1, 2]);
    assert!(of_cluster_ip(&service(true), all(), &[1, 2]).is_empty());
    assert_eq!(of_cluster_ip(&service(true), all(), &[1]), [2]);
}

#[test]
fn health_never_turns_an_endpoint_on() {
    let endpoints = || vec![endpoint(1), Endpoint { ready: false, serving: false, ..endpoint(2) }];
    assert_eq!(of_cluster_ip(&service(false), endpoints(), &[1]), [1]);
}

#[test]
fn local_policy_never_falls_back_to_other_nodes() {
    for (fail_closed, local) in [(false, vec![1, 3]), (true, vec![])] {
        let mut service = service(fail_closed);
        let lb = External {
            load_balancer_ips: vec![[192, 0, 2, 1].into()],
            policy: TrafficPolicy::Local,
            ..External::default()
        };
        service.external = lb;
        let port = port(&service, vec![endpoint(1), endpoint(2), endpoint(3)], &[1, 3]);
        let of_lb =
            port.frontends.iter().find(|frontend| frontend.kind == FrontendKind::LoadBalancer).unwrap();
        let shown = |slice: Option<usize>| -> Vec<u8> {
            let backends = slice.map_or(&[][..], |slice| &port.slices[slice]);
            backends.iter().map(|backend| backend.address.v4_bytes()[3]).collect()
        };
        assert_eq!((shown(of_lb.slice), shown(of_lb.internal_slice)), (local, vec![2]));
        assert_eq!(of_lb.has(service_flags::DROP_WITHOUT_BACKENDS), fail_closed);
    }
}

#[test]
fn endpoints_of_other_zones_take_over_from_unhealthy_ones() {
    let hinted = |last, zone: &str| Endpoint {
        hints: Some(Arc::new(Hints { zones: vec![zone.into()], nodes: Vec::new() })),
        ..endpoint(last)
    };
    let all = || vec![hinted(1, "z"), hinted(2, "y"), hinted(4, "y")];
    assert_eq!(of_cluster_ip(&service(false), all(), &[2]), [1]);
    assert_eq!(of_cluster_ip(&service(false), all(), &[1, 2]), [4]);
    assert_eq!(of_cluster_ip(&service(false), all(), &[1, 2, 4]), [1], "none is healthy: as the hints say");
}

#[test]
fn service_without_cross_zone_balancing_prefers_the_zone_of_the_node() {
    let in_zone = |last, zone: &str| Endpoint { zone: Some(zone.into()), ..endpoint(last) };
    let all = || vec![in_zone(1, "z"), in_zone(2, "y"), in_zone(4, "y")];
    let with = |cross_zone| {
        let mut service = service(false);
        let settings = ServiceSettings { check: Some(check(10)), cross_zone, ..ServiceSettings::default() };
        service.settings = Some(settings.into());
        service
    };
    assert_eq!(of_cluster_ip(&with(None), all(), &[]), [1, 2, 4]);
    assert_eq!(of_cluster_ip(&with(Some(false)), all(), &[]), [1]);
    assert_eq!(of_cluster_ip(&with(Some(false)), all()[1..].to_vec(), &[]), [2, 4], "none is in the zone");
    assert_eq!(of_cluster_ip(&with(Some(false)), all(), &[1]), [2, 4], "that of the zone is unhealthy");
    let hinted = |endpoint: Endpoint| Endpoint {
        hints: Some(Arc::new(Hints { zones: vec!["z".into()], nodes: Vec::new() })),
        ..endpoint
    };
    let hinted: Vec<Endpoint> =
        vec![hinted(in_zone(1, "y")), Endpoint { hints: None, ..hinted(in_zone(2, "z")) }];
    assert_eq!(of_cluster_ip(&with(Some(true)), hinted.clone(), &[]), [1, 2]);
    assert_eq!(of_cluster_ip(&with(Some(false)), hinted, &[]), [2]);
}

pub(super) fn reconciler(service: Service) -> Reconciler {
    let room = lb_core::capacity::Capacity::of_arenas(100, 1 << 20);
    let mut reconciler = Reconciler::new(lb_core::plan::Contents::default(), room, Policy::default());
    reconciler.handle(vec![
        Change::Service(name(), Some(service)),
        Change::EndpointSlice(
            ObjectName::new("default", "web-1"),
            Some(slice(vec![endpoint(1), endpoint(2)])),
        ),
    ]);
    reconciler
}

/// Makes a plan, and applies all its steps.
pub(super) fn plan(reconciler: &mut Reconciler) {
    reconciler.plan().steps.iter().for_each(|step| reconciler.applied(step));
}

#[test]
fn targets_follow_services_and_endpoints() {
    let mut reconciler = reconciler(service(false));
    reconciler.plan();
    assert_eq!(reconciler.take_target_changes(), [(target(1), vec![name()]), (target(2), vec![name()])]);
    assert_eq!(reconciler.take_target_changes(), []);
    let gone = Change::EndpointSlice(ObjectName::new("default", "web-1"), Some(slice(vec![endpoint(1)])));
    reconciler.handle(vec![gone]);
    reconciler.plan();
    assert_eq!(reconciler.take_target_changes(), [(target(2), vec![])]);
    reconciler.handle(vec![Change::Service(name(), None)]);
    reconciler.plan();
    assert_eq!(reconciler.take_target_changes(), [(target(1), vec![])]);
}

#[test]
fn service_without_a_check_has_no_targets() {
    let mut reconciler = reconciler(Service { settings: None, ..service(false) });
    reconciler.plan();
    assert_eq!(reconciler.take_target_changes(), []);
}

#[test]
fn changed_verdict_plans_the_services_of_the_target() {
    let mut reconciler = reconciler(service(false));
    reconciler.plan();
    reconciler.take_target_changes();
    reconciler.failed();
    plan(&mut reconciler);
    assert!(!reconciler.needs_plan());
    reconciler.set_unhealthy(vec![(target(9), true)]);
    assert!(!reconciler.needs_plan(), "no Service uses it");
    reconciler.set_unhealthy(vec![(target(1), true)]);
    assert!(reconciler.needs_plan());
    plan(&mut reconciler);
    reconciler.set_unhealthy(vec![(target(1), true)]);
    assert!(!reconciler.needs_plan(), "the verdict is the same");
}

#[test]
fn changed_interval_keeps_the_verdict() {
    let mut reconciler = reconciler(service(false));
    plan(&mut reconciler);
    reconciler.take_target_changes();
    reconciler.set_unhealthy(vec![(target(1), true)]);
    plan(&mut reconciler);
    let used = |reconciler: &Reconciler| -> Vec<u8> {
        reconciler
            .contents()
            .frontends
            .values()
            .map(|record| u8::try_from(record.backends_count).unwrap())
            .collect()
    };
    assert_eq!(used(&reconciler), [1]);
    let settings = ServiceSettings { check: Some(check(20)), ..ServiceSettings::default() };
    let changed = Service { settings: Some(settings.into()), ..service(false) };
    reconciler.handle(vec![Change::Service(name(), Some(changed))]);
    plan(&mut reconciler);
    reconciler.take_target_changes();
    assert_eq!(used(&reconciler), [1]);
}

#[test]
fn invalid_annotation_keeps_the_last_valid_check() {
    let object = |annotations: &str| {
        let text = format!(
            r#"{{"metadata": {{"name": "web", "annotations": {{{annotations}}}}},
                "spec": {{"clusterIP": "10.96.0.1", "ports": [{{"port": 80}}]}}}}"#
        );
        convert::service(&serde_json::from_str(&text).unwrap(), Origin::Cluster).unwrap().value
    };
    let mut reconciler = reconciler(service(false));
    let check = |reconciler: &mut Reconciler, annotations: &str| {
        reconciler.handle(vec![object(annotations)]);
        reconciler.plan();
        let problems = reconciler.problems().map(ToString::to_string).collect::<Vec<_>>();
        let check = reconciler.store().service(&name()).unwrap().check().map(ToString::to_string);
        (check, problems)
    };
    assert_eq!(
        check(&mut reconciler, r#""lb.dev/health-check": "http://:1/""#),
        (Some("http://:1/".to_owned()), vec![])
    );
    let (kept, problems) = check(&mut reconciler, r#""lb.dev/health-check": "icmp""#);
    assert_eq!((kept.as_deref(), problems.len()), (Some("http://:1/"), 1));
    assert!(
        problems[0].starts_with("annotation lb.dev/health-check of Service default/web is ignored"),
        "{problems:?}"
    );
    assert_eq!(check(&mut reconciler, ""), (None, vec![]));
    // If the annotation with the check is removed, an annotation for its timing does not keep the check.
    let timing = r#""lb.dev/health-check-interval": "5s""#;
    assert_eq!(
        check(&mut reconciler, &format!(r#""lb.dev/health-check": "http://:1/", {timing}"#)).1,
        [""; 0]
    );
    let (kept, problems) = check(&mut reconciler, timing);
    assert_eq!((kept, problems.len()), (None, 1), "{problems:?}");
    // A kept check sends the header that the endpoints expect now.
    let with_header =
        |reconciler: &Reconciler| reconciler.store().service(&name()).unwrap().check().unwrap().proxy_header;
    let proxy = r#""lb.dev/proxy-protocol": "v2""#;
    check(&mut reconciler, &format!(r#""lb.dev/health-check": "tcp", {proxy}"#));
    check(&mut reconciler, &format!(r#""lb.dev/health-check": "icmp", {proxy}"#));
    assert!(with_header(&reconciler));
    check(&mut reconciler, r#""lb.dev/health-check": "icmp""#);
    assert!(!with_header(&reconciler));
    let ssl = "service.beta.kubernetes.io/aws-load-balancer-ssl-cert";
    let (_, problems) = check(&mut reconciler, &format!(r#""{ssl}": "arn""#));
    assert!(problems[0].contains(ssl) && problems[0].contains("TLS is not terminated"), "{problems:?}");
}

#[test]
fn families_are_checked_apart() {
    let mut service = service(false);
    service.cluster_ips.push("fd00::1".parse().unwrap());
    let six = Endpoint { address: "fd00:1::1".parse().unwrap(), ..endpoint(1) };
    let mut node = node(&[]);
    node.unhealthy = [Target { address: six.address, port: 8080, check: check(10) }].into();
    let slices = [
        slice(vec![endpoint(1)]),
        slice(vec![six, Endpoint { address: "fd00:1::2".parse().unwrap(), ..endpoint(1) }]),
    ];
    let port = desired(&name(), &service, slices.iter(), &node).remove(0);
    let counts = port.frontends.iter().map(|frontend| {
        (Family::of(frontend.key.address.into()), frontend.slice.map_or(0, |slice| port.slices[slice].len()))
    });
    assert_eq!(counts.collect::<Vec<_>>(), [(Family::V4, 1), (Family::V6, 1)]);
}
