use proptest::{collection, prelude::*, sample};
use serde_json::{Value, json};

use super::*;
use crate::{
    convert::{self, Converted, Origin},
    model::{Change, Service},
    {capacity::Capacity, reconciler::Reconciler},
};

fn allocator(ranges: &[&str]) -> Allocator {
    let ranges: Vec<IpNet> = ranges.iter().map(|range| range.parse().unwrap()).collect();
    Allocator::new(&ranges, OutsideRanges::Refused, DEFAULT_NODE_PORTS, Allocations::new())
}

fn dual() -> Allocator {
    allocator(&["10.96.0.0/12", "fd00:10:96::/112"])
}

fn service(name: &str, mut spec: Value) -> api::Service {
    if spec.get("ports").is_none() {
        spec["ports"] = json!([{"port": 80}]);
    }
    serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
}

fn assign(allocator: &mut Allocator, name: &str, spec: Value) -> api::ServiceSpec {
    let mut service = service(name, spec);
    allocator.assign(&mut service).unwrap();
    service.spec.unwrap()
}

fn refused(allocator: &mut Allocator, name: &str, spec: Value) -> String {
    let mut asked = service(name, spec);
    let before = asked.clone();
    let error = allocator.assign(&mut asked).unwrap_err();
    assert_eq!(asked, before, "a refused Service is left alone");
    error.to_string()
}

fn cluster_ips(spec: &api::ServiceSpec) -> Vec<&str> {
    assert_eq!(spec.cluster_ip.as_ref(), spec.cluster_ips.as_ref().and_then(|ips| ips.first()));
    spec.cluster_ips.iter().flatten().map(String::as_str).collect()
}

fn node_ports(spec: &api::ServiceSpec) -> Vec<Option<i32>> {
    spec.ports.iter().flatten().map(|port| port.node_port).collect()
}

#[test]
fn service_without_requests_gets_one_address_of_the_first_family() {
    let spec = assign(&mut dual(), "web", json!({}));
    assert_eq!(cluster_ips(&spec).len(), 1);
    assert_eq!(spec.ip_families, Some(vec!["IPv4".to_owned()]));
    assert_eq!(spec.ip_family_policy.as_deref(), Some("SingleStack"));
    let spec = assign(&mut allocator(&["fd00::/112", "10.0.0.0/8"]), "web", json!({}));
    assert_eq!(spec.ip_families, Some(vec!["IPv6".to_owned()]));
}

#[test]
fn addresses_move_along_a_chain_in_any_name_order() {
    let mut all = allocator(&["10.96.0.0/24"]);
    let at = |last: u8| json!({"clusterIP": format!("10.96.0.{last}")});
    for (name, last) in [("a", 2), ("b", 3), ("c", 4), ("d", 5)] {
        assign(&mut all, name, at(last));
    }
    let mut services = [("a", 3), ("b", 4), ("c", 5), ("d", 6)].map(|(name, last)| service(name, at(last)));
    assert_eq!(all.assign_all(&mut services), BTreeMap::new());
}

#[test]
fn node_port_moves_to_another_service_in_one_update() {
    let http = json!({"name": "http", "port": 80, "nodePort": 30080});
    let metrics = json!({"name": "metrics", "port": 9090, "nodePort": 30090});
    let with = |ports: Value| json!({"type": "NodePort", "ports": ports});
    for other in ["a", "z"] {
        let mut all = dual();
        assign(&mut all, "web", with(json!([http, metrics])));
        let mut services = [service("web", with(json!([http]))), service(other, with(json!([metrics])))];
        assert_eq!(all.assign_all(&mut services), BTreeMap::new());
        assert_eq!(node_ports(services[1].spec.as_ref().unwrap()), [Some(30090)]);
    }
}

#[test]
fn load_balancer_with_a_local_policy_gets_a_health_check_node_port() {
    let mut all = dual();
    let local = json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local"});
    let port = assign(&mut all, "web", local.clone()).health_check_node_port.unwrap();
    assert!(DEFAULT_NODE_PORTS.contains(&u16::try_from(port).unwrap()));
    assert_eq!(assign(&mut all, "web", local.clone()).health_check_node_port, Some(port), "it stays");
    assert_eq!(
        refused(&mut all, "other", json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": port}]})),
        format!(
            "Service \"default/other\" is invalid: spec.ports[0].nodePort: Invalid value: {port}: \
             provided port is already allocated to Service \"default/web\""
        )
    );
    for without in
        [json!({"type": "LoadBalancer"}), json!({"type": "NodePort", "externalTrafficPolicy": "Local"})]
    {
        assert_eq!(assign(&mut all, "web", without).health_check_node_port, None);
    }
    let taken = json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": port}]});
    assign(&mut all, "other", taken);
    assert_ne!(
        assign(&mut all, "web", local).health_check_node_port,
        Some(port),
        "another Service has it now"
    );
}

#[test]
fn health_check_node_port_can_be_requested() {
    let mut all = dual();
    let asking = |port: i32, node_port: i32| {
        json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": port,
            "ports": [{"port": 80, "nodePort": node_port}]})
    };
    assert_eq!(assign(&mut all, "web", asking(32_000, 0)).health_check_node_port, Some(32_000));
    assert!(
        refused(&mut all, "other", asking(32_000, 0))
            .contains("already allocated to Service \"default/web\"")
    );
    assert!(refused(&mut all, "other", asking(80, 0)).contains("not in the valid range"));
    assert!(refused(&mut all, "other", asking(32_001, 32_001)).ends_with("Duplicate value: 32001"));
    all.release(&ObjectName::new("default", "web"));
    assert_eq!(assign(&mut all, "other", asking(32_000, 0)).health_check_node_port, Some(32_000));
}

#[test]
fn ip_family_policy_selects_the_families() {
    let mut both = dual();
    let families = |spec: api::ServiceSpec| spec.ip_families.unwrap();
    assert_eq!(
        families(assign(&mut both, "a", json!({"ipFamilyPolicy": "PreferDualStack"}))),
        ["IPv4", "IPv6"]
    );
    let asked = json!({"ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv6"]});
    assert_eq!(families(assign(&mut both, "b", asked.clone())), ["IPv6", "IPv4"]);
    assert_eq!(families(assign(&mut both, "c", json!({"ipFamilies": ["IPv6"]}))), ["IPv6"]);
    assert_eq!(families(assign(&mut both, "d", json!({"ipFamilies": ["IPv6", "IPv4"]}))), ["IPv6", "IPv4"]);
    let mut v4 = allocator(&["10.96.0.0/12"]);
    assert_eq!(families(assign(&mut v4, "a", json!({"ipFamilyPolicy": "PreferDualStack"}))), ["IPv4"]);
    assert!(
        refused(&mut v4, "b", json!({"ipFamilyPolicy": "RequireDualStack"})).contains("spec.ipFamilyPolicy")
    );
    assert!(refused(&mut v4, "b", asked).contains("spec.ipFamilies[0]: Invalid value: \"IPv6\""));
}

#[test]
fn requested_address_is_assigned_and_implies_its_family() {
    let spec = assign(&mut dual(), "web", json!({"clusterIP": "fd00:10:96::5"}));
    assert_eq!(
        (cluster_ips(&spec), spec.ip_families.clone()),
        (vec!["fd00:10:96::5"], Some(vec!["IPv6".to_owned()]))
    );
    let both = json!({"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9", "fd00:10:96::9"]});
    let spec = assign(&mut dual(), "web", both);
    assert_eq!(cluster_ips(&spec), ["10.96.0.9", "fd00:10:96::9"]);
    assert_eq!(spec.ip_family_policy.as_deref(), Some("RequireDualStack"));
    let one =
        assign(&mut dual(), "web", json!({"clusterIP": "10.96.0.9", "ipFamilyPolicy": "PreferDualStack"}));
    assert_eq!((cluster_ips(&one)[0], cluster_ips(&one).len()), ("10.96.0.9", 2));
}

#[test]
fn rejected_address_has_the_error_text_of_an_api_server() {
    let mut all = dual();
    assert_eq!(
        refused(&mut all, "my-service", json!({"clusterIP": "10.0.171.239"})),
        "Service \"default/my-service\" is invalid: spec.clusterIPs: Invalid value: \"10.0.171.239\": failed to \
         allocate IP 10.0.171.239: the provided IP is not in the valid range 10.96.0.0/12 (10.96.0.1 to 10.111.255.254)"
    );
    for edge in ["10.96.0.0", "10.111.255.255", "fd00:10:96::", "fd00:10:96::1:0"] {
        assert!(
            refused(&mut all, "edge", json!({"clusterIP": edge})).contains("not in the valid range"),
            "{edge}"
        );
    }
    assign(&mut all, "edge", json!({"clusterIP": "fd00:10:96::ffff"}));
    assign(&mut all, "first", json!({"clusterIP": "10.96.0.9"}));
    assert!(
        refused(&mut all, "second", json!({"clusterIP": "10.96.0.9"}))
            .ends_with("provided IP is already allocated to Service \"default/first\"")
    );
    assert!(
        refused(&mut all, "typo", json!({"clusterIP": "10.96.0"})).contains("must be a valid IP address")
    );
    let mismatch = json!({"clusterIP": "10.96.0.7", "ipFamilies": ["IPv6"]});
    assert!(
        refused(&mut all, "mismatch", mismatch)
            .contains("expected an IPv6 value as indicated by `ipFamilies[0]`")
    );
}

#[test]
fn malformed_request_is_rejected_as_in_a_manifest() {
    let mut all = dual();
    for (spec, why) in [
        (json!({"clusterIPs": ["10.96.0.1", "10.96.0.2"]}), "no more than one IP for each IP family"),
        (json!({"clusterIPs": ["10.96.0.1", "fd00:10:96::1", "10.96.0.2"]}), "may only hold up to 2 values"),
        (json!({"clusterIPs": ["None", "10.96.0.1"]}), "'None' must be the first and only value"),
        (json!({"type": "NodePort", "clusterIP": "None"}), "may not be set to 'None' for NodePort services"),
        (
            json!({"type": "ExternalName", "clusterIP": "10.96.0.1"}),
            "may not be set for ExternalName services",
        ),
        (json!({"clusterIP": "None", "ipFamilies": ["IPv5"]}), "Unsupported value: \"IPv5\""),
        (json!({"clusterIP": "10.96.0.01"}), "must be a valid IP address"),
    ] {
        let error = refused(&mut all, "web", spec);
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn headless_and_external_name_services_release_their_addresses() {
    let mut all = dual();
    assign(&mut all, "web", json!({"type": "NodePort"}));
    assert_eq!(all.allocations().len(), 1);
    let spec = assign(&mut all, "web", json!({"clusterIP": "None"}));
    assert_eq!((spec.cluster_ip.as_deref(), all.allocations().len()), (Some("None"), 0));
    assign(&mut all, "web", json!({}));
    let spec = assign(&mut all, "web", json!({"type": "ExternalName", "externalName": "example.org"}));
    assert_eq!((spec.cluster_ip, spec.cluster_ips, all.allocations().len()), (None, None, 0));
}

#[test]
fn service_type_decides_about_node_ports() {
    let mut all = dual();
    assert_eq!(node_ports(&assign(&mut all, "a", json!({}))), [None]);
    assert!(node_ports(&assign(&mut all, "a", json!({"type": "NodePort"})))[0].is_some());
    assert!(node_ports(&assign(&mut all, "b", json!({"type": "LoadBalancer"})))[0].is_some());
    let without = json!({"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false});
    assert_eq!(node_ports(&assign(&mut all, "c", without)), [None]);
    assert_eq!(node_ports(&assign(&mut all, "a", json!({"type": "ClusterIP"}))), [None]);
    assert_eq!(all.port_owner.len(), 1, "only b has one");
    let forbidden = refused(&mut all, "a", json!({"ports": [{"port": 80, "nodePort": 30080}]}));
    assert!(
        forbidden.contains("spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'")
    );
}

#[test]
fn requested_node_port_is_assigned_or_rejected() {
    let mut all = dual();
    let asks = |port: i32| json!({"type": "NodePort", "ports": [{"port": 80, "nodePort": port}]});
    assert_eq!(node_ports(&assign(&mut all, "a", asks(30080))), [Some(30080)]);
    assert!(refused(&mut all, "b", asks(30080)).ends_with(
        "spec.ports[0].nodePort: Invalid value: 30080: provided port is already allocated to Service \"default/a\""
    ));
    assert!(refused(&mut all, "b", asks(80)).ends_with("The range of valid ports is 30000-32767"));
    assert!(refused(&mut all, "b", asks(-1)).contains("must be between 1 and 65535"));
    let twice =
        json!([{"name": "x", "port": 1, "nodePort": 30001}, {"name": "y", "port": 2, "nodePort": 30001}]);
    let error = refused(&mut all, "b", json!({"type": "NodePort", "ports": twice}));
    assert!(error.contains("spec.ports[1].nodePort: Duplicate value"));
}

#[test]
fn one_port_with_two_protocols_has_one_node_port() {
    let dns = json!([{"name": "tcp", "port": 53}, {"name": "udp", "port": 53, "protocol": "UDP"}, {"name": "web", "port": 80}]);
    let spec = assign(&mut dual(), "dns", json!({"type": "NodePort", "ports": dns}));
    let ports = node_ports(&spec);
    assert!(ports[0].is_some() && ports[0] == ports[1] && ports[1] != ports[2]);
}

#[test]
fn service_keeps_its_allocations_while_other_fields_change() {
    let mut all = dual();
    let before = assign(&mut all, "web", json!({"type": "NodePort", "clusterIP": "10.100.0.1"}));
    let after = assign(&mut all, "web", json!({"type": "NodePort", "sessionAffinity": "ClientIP"}));
    assert_eq!((cluster_ips(&before), node_ports(&before)), (cluster_ips(&after), node_ports(&after)));
    refused(&mut all, "web", json!({"clusterIP": "1.2.3.4"}));
    assert_eq!(all.ip_owner.len(), 1);
    let moved = assign(&mut all, "web", json!({"clusterIP": "10.100.0.2"}));
    assert_eq!(cluster_ips(&moved), ["10.100.0.2"]);
    assign(&mut all, "other", json!({"clusterIP": "10.100.0.1"}));
}

#[test]
fn full_range_is_an_error_until_an_address_is_released() {
    let mut tiny = allocator(&["10.0.0.0/30"]);
    assign(&mut tiny, "a", json!({}));
    assign(&mut tiny, "b", json!({}));
    assert!(refused(&mut tiny, "c", json!({})).ends_with("range 10.0.0.0/30 is full"));
    tiny.release(&ObjectName::new("default", "a"));
    assign(&mut tiny, "c", json!({}));
    assert!(refused(&mut allocator(&["10.0.0.0/31"]), "a", json!({})).ends_with("is full"));
}

#[test]
fn low_addresses_are_allocated_last() {
    let mut small = allocator(&["10.0.0.0/26"]);
    let low = |spec: &api::ServiceSpec| {
        cluster_ips(spec)[0].parse::<std::net::Ipv4Addr>().unwrap().octets()[3] <= 16
    };
    let given: Vec<bool> = (0..62).map(|n| low(&assign(&mut small, &format!("s{n}"), json!({})))).collect();
    assert!(given[..46].iter().all(|low| !low) && given[46..].iter().all(|low| *low));
}

#[test]
fn largest_ranges_need_no_memory() {
    let mut huge = allocator(&["0.0.0.0/0", "::/0"]);
    let spec = assign(&mut huge, "web", json!({"ipFamilyPolicy": "RequireDualStack"}));
    assert_eq!(cluster_ips(&spec).len(), 2);
}

#[test]
fn explicit_requests_precede_allocations_in_any_name_order() {
    let automatic = cluster_ips(&assign(&mut dual(), "a", json!({})))[0].to_owned();
    let mut services = [service("a", json!({})), service("z", json!({"clusterIP": automatic}))];
    let mut all = dual();
    assert!(all.assign_all(&mut services).is_empty());
    assert_eq!(services[1].spec.as_ref().unwrap().cluster_ip.as_ref(), Some(&automatic));
    assert_ne!(services[0].spec.as_ref().unwrap().cluster_ip.as_ref(), Some(&automatic));
}

#[test]
fn services_can_exchange_their_requests() {
    let ask =
        |a: &str, b: &str| [service("a", json!({"clusterIP": a})), service("b", json!({"clusterIP": b}))];
    let mut all = dual();
    assert!(all.assign_all(&mut ask("10.96.0.1", "10.96.0.2")).is_empty());
    assert!(all.assign_all(&mut ask("10.96.0.2", "10.96.0.3")).is_empty());
}

#[test]
fn refused_service_keeps_what_it_had() {
    let spec = |ip: &str, node_port: u16, health_check: u16| {
        json!({
            "type": "LoadBalancer", "externalTrafficPolicy": "Local", "clusterIP": ip,
            "ports": [{"port": 80, "nodePort": node_port}], "healthCheckNodePort": health_check,
        })
    };
    let mut all = dual();
    assign(&mut all, "web", spec("10.96.0.10", 30080, 30081));
    let before = all.allocations().clone();
    // The request has one port number for two purposes.
    let errors = all.assign_all(&mut [service("web", spec("10.96.0.20", 31000, 31000))]);
    assert_eq!(errors.len(), 1);
    assert_eq!(*all.allocations(), before);
    // Another Service gets an address that the refused Service asked for, but not an address that the refused Service
    // still has.
    let error = refused(&mut all, "db", json!({"clusterIP": "10.96.0.10"}));
    assert!(error.contains("already allocated"), "{error}");
    assign(&mut all, "db", json!({"clusterIP": "10.96.0.20"}));
}

#[test]
fn smaller_name_wins_a_disputed_address() {
    let mut services =
        [service("b", json!({"clusterIP": "10.96.0.1"})), service("a", json!({"clusterIP": "10.96.0.1"}))];
    let errors = dual().assign_all(&mut services);
    assert_eq!(errors.keys().copied().collect::<Vec<_>>(), [0]);
}

/// An allocator after a restart, which knows only those allocations of the Services that the maps keep.
fn restarted(services: &[api::Service]) -> Allocator {
    let mut reconciler =
        Reconciler::new(Contents::default(), Capacity::of_arenas(100, 0), crate::model::Policy::default());
    let changes = services.iter().filter_map(|service| convert::service(service, Origin::Manifests).ok());
    reconciler.handle(changes.map(|converted| converted.value).collect());
    reconciler.plan().steps.iter().for_each(|step| reconciler.applied(step));
    let ranges = ["10.96.0.0/12".parse().unwrap(), "fd00:10:96::/112".parse().unwrap()];
    let known = known_allocations(reconciler.contents());
    Allocator::new(&ranges, OutsideRanges::Refused, DEFAULT_NODE_PORTS, known)
}

#[test]
fn known_allocations_win_over_the_hash() {
    let mut all = dual();
    let first = service(
        "web",
        json!({"type": "NodePort", "clusterIP": "10.99.99.99", "ports": [{"port": 80, "nodePort": 31999}]}),
    );
    let mut services = [first];
    assert!(all.assign_all(&mut services).is_empty());
    let mut all = restarted(&services);
    let spec = assign(&mut all, "web", json!({"type": "NodePort"}));
    assert_eq!((cluster_ips(&spec), node_ports(&spec)), (vec!["10.99.99.99"], vec![Some(31999)]));
    let mut all = restarted(&services);
    all.retain(|_| false);
    assign(&mut all, "other", json!({"clusterIP": "10.99.99.99"}));
}

fn spec() -> impl Strategy<Value = Value> {
    let kind = sample::select(vec!["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"]);
    let ip = prop::option::weighted(
        0.3,
        sample::select(vec!["10.96.0.1", "10.96.0.2", "fd00:10:96::1", "None", "9.9.9.9"]),
    );
    let policy = prop::option::of(sample::select(vec!["SingleStack", "PreferDualStack", "RequireDualStack"]));
    let node_port = prop::option::weighted(0.3, 30_000..30_003);
    (kind, ip, policy, node_port).prop_map(|(kind, ip, policy, node_port)| {
        let mut spec = json!({"type": kind, "ports": [
            {"name": "a", "port": 53, "nodePort": node_port}, {"name": "b", "port": 53, "protocol": "UDP"},
        ]});
        if let Some(ip) = ip {
            spec["clusterIP"] = ip.into();
        }
        if let Some(policy) = policy {
            spec["ipFamilyPolicy"] = policy.into();
        }
        spec
    })
}

/// Services with random names and random requests for addresses and ports.
fn manifests() -> impl Strategy<Value = Vec<api::Service>> {
    let manifests = collection::btree_map(0..8_u8, spec(), 0..8);
    manifests.prop_map(|all| all.into_iter().map(|(name, spec)| service(&format!("s{name}"), spec)).collect())
}

fn converted(services: &[api::Service]) -> Vec<Service> {
    let convert = |s: &api::Service| match convert::service(s, Origin::Manifests).and_then(Converted::whole) {
        Ok(Change::Service(_, service)) => service,
        Ok(Change::EndpointSlice(..)) | Err(_) => None,
    };
    services.iter().filter_map(convert).collect()
}

proptest! {
    #[test]
    fn allocations_are_unique_and_never_leak(generations in collection::vec(manifests(), 1..5)) {
        let mut all = dual();
        for mut services in generations {
            all.assign_all(&mut services);
            let ips: Vec<&IpAddr> = all.services.values().flat_map(|given| &given.cluster_ips).collect();
            let owned: BTreeSet<&IpAddr> = all.ip_owner.keys().collect();
            prop_assert_eq!(ips.len(), owned.len(), "one owner each");
            prop_assert_eq!(ips.into_iter().collect::<BTreeSet<_>>(), owned);
            let ports: BTreeSet<u16> = all.services.values().flat_map(|given| given.node_ports.values().copied()).collect();
            prop_assert_eq!(ports, all.port_owner.keys().copied().collect::<BTreeSet<_>>());
            for (name, given) in &all.services {
                prop_assert!(given.node_ports.values().all(|port| all.port_owner[port] == *name));
            }
        }
        let names: Vec<ObjectName> = all.services.keys().cloned().collect();
        names.iter().for_each(|name| all.release(name));
        prop_assert!(all.ip_owner.is_empty() && all.port_owner.is_empty());
    }

    #[test]
    fn order_of_manifests_does_not_matter(mut services in manifests(), other in any::<u64>()) {
        let mut shuffled = services.clone();
        let length = shuffled.len().max(1) as u64;
        shuffled.rotate_left(usize::try_from(other % length).unwrap());
        dual().assign_all(&mut services);
        dual().assign_all(&mut shuffled);
        services.sort_by_key(|service| service.metadata.name.clone());
        shuffled.sort_by_key(|service| service.metadata.name.clone());
        prop_assert_eq!(services, shuffled);
    }

    #[test]
    fn restart_changes_no_allocation(services in manifests()) {
        let mut first = services.clone();
        let errors = dual().assign_all(&mut first);
        let mut kept: Vec<api::Service> =
            services.iter().enumerate().filter(|(index, _)| !errors.contains_key(index)).map(|(_, s)| s.clone()).collect();
        let given: Vec<api::Service> =
            first.into_iter().enumerate().filter(|(index, _)| !errors.contains_key(index)).map(|(_, s)| s).collect();
        let mut again = restarted(&given);
        prop_assert!(again.assign_all(&mut kept).is_empty());
        prop_assert_eq!(converted(&kept), converted(&given));
    }
}

#[test]
fn cluster_ip_outside_ranges_that_nobody_has_set_is_kept_and_given_once() {
    let ranges = ["10.96.0.0/12".parse().unwrap()];
    let new = |known| Allocator::new(&ranges, OutsideRanges::Accepted, DEFAULT_NODE_PORTS, known);
    let mut all = new(Allocations::new());
    let mut first = service("first", json!({"clusterIP": "10.0.171.239"}));
    all.assign(&mut first).unwrap();
    assert!(refused(&mut all, "second", json!({"clusterIP": "10.0.171.239"})).contains("already allocated"));
    // The Service keeps the address without requesting it again, also after a restart.
    let mut again = new(all.allocations().clone());
    let mut edited = service("first", json!({}));
    again.assign(&mut edited).unwrap();
    assert_eq!(edited.spec.unwrap().cluster_ip.as_deref(), Some("10.0.171.239"));
    for special in ["127.0.0.1", "0.0.0.0", "169.254.1.1", "224.0.0.1", "239.1.2.3"] {
        assert!(
            refused(&mut all, "special", json!({"clusterIP": special})).contains("may not be"),
            "{special}"
        );
    }
}
