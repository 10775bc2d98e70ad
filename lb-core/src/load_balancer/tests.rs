use std::net::IpAddr;

use proptest::{collection, prelude::*, sample};
use serde_json::{Value, json};

use super::*;
use crate::api;

fn pool(name: &str, spec: Value) -> Pool {
    Pool::new(&read(json!({"metadata": {"name": name, "namespace": "metallb-system"}, "spec": spec})))
        .unwrap()
}

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn of_range(name: &str, addresses: &str) -> Pool {
    pool(name, json!({"addresses": [addresses]}))
}

fn with_pools(pools: Vec<Pool>) -> LoadBalancers {
    let mut all = LoadBalancers::default();
    assert_eq!(all.set_pools(pools, &[]), []);
    all
}

/// A Service of type LoadBalancer, into which `other` is merged.
fn service(name: &str, other: Value) -> api::Service {
    let mut service = json!({
        "metadata": {"name": name, "namespace": "default", "annotations": {}, "labels": {}},
        "spec": {"type": "LoadBalancer", "clusterIPs": ["10.96.0.1"], "ports": [{"port": 80}]},
    });
    for part in ["metadata", "spec"] {
        for (key, value) in other[part].as_object().into_iter().flatten() {
            service[part][key] = value.clone();
        }
    }
    read(service)
}

fn request(name: &str, other: Value) -> AddressRequest {
    AddressRequest::of(&service(name, other), None).unwrap().unwrap()
}

fn annotated(name: &str, annotations: Value) -> AddressRequest {
    request(name, json!({"metadata": {"annotations": annotations}}))
}

fn given(all: &mut LoadBalancers, request: &AddressRequest) -> String {
    let addresses = all.assign(request).unwrap();
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn refused(all: &mut LoadBalancers, request: &AddressRequest) -> String {
    let before = all.addresses(&request.service).to_vec();
    let error = all.assign(request).unwrap_err().to_string();
    assert_eq!(all.addresses(&request.service), before, "the Service keeps what it has");
    error
}

#[test]
fn services_get_the_lowest_addresses_and_keep_them() {
    let mut all = with_pools(vec![of_range("a", "192.0.2.10-192.0.2.12")]);
    let [web, db, api] = ["web", "db", "api"].map(|name| request(name, json!({})));
    assert_eq!(given(&mut all, &web), "192.0.2.10");
    assert_eq!(given(&mut all, &db), "192.0.2.11");
    assert_eq!(given(&mut all, &web), "192.0.2.10");
    assert_eq!(given(&mut all, &api), "192.0.2.12");
    let more = request("more", json!({}));
    assert_eq!(refused(&mut all, &more), "no free address (IPv4) in pool \"a\"");
    all.release(&db.service);
    assert_eq!(given(&mut all, &more), "192.0.2.11");
}

#[test]
fn released_addresses_come_last_and_the_earliest_first() {
    let mut all = with_pools(vec![of_range("a", "192.0.2.1-192.0.2.3")]);
    let services = ["a", "b"].map(|name| request(name, json!({})));
    services.iter().for_each(|service| _ = all.assign(service).unwrap());
    all.release(&services[1].service);
    all.release(&services[0].service);
    let next = ["c", "d", "e"].map(|name| given(&mut all, &request(name, json!({}))));
    assert_eq!(next, ["192.0.2.3", "192.0.2.2", "192.0.2.1"]);
}

#[test]
fn pools_are_asked_by_priority_then_by_name_and_not_without_auto_assign() {
    let mut all = with_pools(vec![
        of_range("z", "192.0.2.0/32"),
        of_range("y", "192.0.2.1/32"),
        pool("last", json!({"addresses": ["192.0.2.2/32"], "serviceAllocation": {"priority": 0}})),
        pool("second", json!({"addresses": ["192.0.2.3/32"], "serviceAllocation": {"priority": 20}})),
        pool("first", json!({"addresses": ["192.0.2.4/32"], "serviceAllocation": {"priority": 10}})),
        pool("manual", json!({"addresses": ["192.0.2.5/32"], "autoAssign": false})),
        // Of two pools with the same priority, the one whose name sorts first is tried first.
        pool("fourth", json!({"addresses": ["192.0.2.7/32"], "serviceAllocation": {"priority": 30}})),
        pool("a-third", json!({"addresses": ["192.0.2.8/32"], "serviceAllocation": {"priority": 30}})),
    ]);
    let order: Vec<String> = (0..7).map(|n| given(&mut all, &request(&format!("s{n}"), json!({})))).collect();
    assert_eq!(
        order,
        ["192.0.2.4", "192.0.2.3", "192.0.2.8", "192.0.2.7", "192.0.2.2", "192.0.2.1", "192.0.2.0"]
    );
    assert!(refused(&mut all, &request("more", json!({}))).contains("no free address"));
    let named = annotated("named", json!({"metallb.io/address-pool": "manual"}));
    assert_eq!(given(&mut all, &named), "192.0.2.5");
}

#[test]
fn service_allocation_admits_by_namespace_and_by_labels() {
    let scoped = |scope: Value| {
        let mut all =
            with_pools(vec![pool("a", json!({"addresses": ["192.0.2.0/28"], "serviceAllocation": scope}))]);
        let labels = Labels::from([("team".to_owned(), "blue".to_owned())]);
        all.set_namespaces(Namespaces([("prod".to_owned(), labels)].into()));
        let of = |namespace: &str, app: &str| {
            request(app, json!({"metadata": {"namespace": namespace, "labels": {"app": app}}}))
        };
        [of("prod", "web"), of("prod", "db"), of("test", "web")].map(|request| all.assign(&request).is_ok())
    };
    for (scope, admitted) in [
        (json!({"priority": 1}), [true, true, true]),
        (json!({"namespaces": ["prod"]}), [true, true, false]),
        (json!({"namespaceSelectors": [{"matchLabels": {"team": "blue"}}]}), [true, true, false]),
        (json!({"namespaceSelectors": [{"matchLabels": {"team": "red"}}]}), [false, false, false]),
        (
            json!({"namespaceSelectors": [{"matchLabels": {"kubernetes.io/metadata.name": "test"}}]}),
            [false, false, true],
        ),
        (
            json!({"namespaces": ["test"], "namespaceSelectors": [{"matchLabels": {"team": "blue"}}]}),
            [true, true, true],
        ),
        (
            json!({"namespaces": ["prod"], "serviceSelectors": [{"matchLabels": {"app": "web"}}]}),
            [true, false, false],
        ),
        (
            json!({"serviceSelectors": [
                {"matchLabels": {"app": "x"}},
                {"matchExpressions": [{"key": "app", "operator": "In", "values": ["db"]}]},
            ]}),
            [false, true, false],
        ),
    ] {
        assert_eq!(scoped(scope.clone()), admitted, "{scope}");
    }
    let scope = json!({"addresses": ["192.0.2.0/28"], "serviceAllocation": {"namespaces": ["prod"]}});
    let mut all = with_pools(vec![pool("a", scope)]);
    let named = annotated("web", json!({"metallb.io/address-pool": "a"}));
    assert_eq!(refused(&mut all, &named), "serviceAllocation of pool \"a\" does not admit this Service");
}

#[test]
fn buggy_addresses_are_avoided_on_request() {
    let spec = json!({"addresses": ["192.0.2.254-192.0.3.1"], "avoidBuggyIPs": true});
    let mut all = with_pools(vec![pool("a", spec)]);
    assert_eq!(given(&mut all, &request("web", json!({}))), "192.0.2.254");
    assert_eq!(given(&mut all, &request("db", json!({}))), "192.0.3.1");
    let named = request("named", json!({"spec": {"loadBalancerIP": "192.0.3.0"}}));
    assert_eq!(refused(&mut all, &named), "192.0.3.0 is in no pool");
}

#[test]
fn usage_leaves_out_avoided_addresses_that_services_keep() {
    let addresses = json!(["192.0.2.254-192.0.3.1"]);
    let mut all = with_pools(vec![pool("a", json!({"addresses": addresses}))]);
    let used = |all: &LoadBalancers| all.usage().into_iter().map(|it| (it.used, it.total)).next().unwrap();
    for number in 0..4 {
        given(&mut all, &request(&format!("s{number}"), json!({})));
    }
    assert_eq!(used(&all), (4, 4));
    all.set_pools(vec![pool("a", json!({"addresses": addresses, "avoidBuggyIPs": true}))], &[]);
    assert_eq!(used(&all), (2, 2));
}

#[test]
fn buggy_addresses_are_those_of_ipv4_only() {
    let spec = json!({"addresses": ["2001:db8::ff-2001:db8::100"], "avoidBuggyIPs": true});
    let mut all = with_pools(vec![pool("a", spec)]);
    let v6 = |name| request(name, json!({"spec": {"clusterIPs": ["fd00::1"]}}));
    assert_eq!(all.usage()[0].total, 2);
    assert_eq!([given(&mut all, &v6("web")), given(&mut all, &v6("db"))], ["2001:db8::ff", "2001:db8::100"]);
}

#[test]
fn empty_annotation_hides_the_one_with_the_old_prefix() {
    let old = ("metallb.universe.tf/loadBalancerIPs", "192.0.2.8");
    for (new, named) in
        [(None, vec!["192.0.2.8"]), (Some(""), vec![]), (Some("192.0.2.9"), vec!["192.0.2.9"])]
    {
        let new = new.map(|text| ("metallb.io/loadBalancerIPs", text));
        let annotations: BTreeMap<_, _> = new.into_iter().chain([old]).collect();
        let addresses = annotated("web", json!(annotations)).addresses;
        assert_eq!(addresses.iter().map(ToString::to_string).collect::<Vec<_>>(), named);
    }
}

#[test]
fn named_addresses_are_given_or_refused_with_the_reason() {
    let mut all = with_pools(vec![of_range("a", "192.0.2.0/28"), of_range("b", "198.51.100.0/28")]);
    let field = request("field", json!({"spec": {"loadBalancerIP": "192.0.2.9"}}));
    assert_eq!(given(&mut all, &field), "192.0.2.9");
    let old = annotated("old", json!({"metallb.universe.tf/loadBalancerIPs": " 192.0.2.8"}));
    assert_eq!(given(&mut all, &old), "192.0.2.8");
    for (annotations, why) in [
        (json!({"metallb.io/loadBalancerIPs": "203.0.113.1"}), "203.0.113.1 is in no pool"),
        (
            json!({"metallb.io/loadBalancerIPs": "192.0.2.1", "metallb.io/address-pool": "b"}),
            "192.0.2.1 is in pool \"a\", and the Service names pool \"b\"",
        ),
        (json!({"metallb.io/address-pool": "c"}), "there is no pool \"c\""),
    ] {
        assert_eq!(refused(&mut all, &annotated("other", annotations)), why);
    }
    let taken = refused(&mut all, &annotated("other", json!({"metallb.io/loadBalancerIPs": "192.0.2.9"})));
    assert!(taken.starts_with("Service default/field has 192.0.2.9: to share it, both need"), "{taken}");
}

#[test]
fn contradictory_requests_are_refused_with_their_field() {
    let both = json!({
        "metadata": {"annotations": {"metallb.io/loadBalancerIPs": "192.0.2.1"}},
        "spec": {"loadBalancerIP": "192.0.2.1"},
    });
    let named = |text: &str| json!({"metadata": {"annotations": {"metallb.io/loadBalancerIPs": text}}});
    for (other, field) in [
        (both, "spec.loadBalancerIP"),
        (named("192.0.2.1,192.0.2.2"), "metadata.annotations[metallb.io/loadBalancerIPs]"),
        (named("2001:db8::1"), "metadata.annotations[metallb.io/loadBalancerIPs]"),
        (named("x"), "metadata.annotations[metallb.io/loadBalancerIPs]"),
    ] {
        assert_eq!(AddressRequest::of(&service("web", other), None).unwrap_err().field, field);
    }
}

#[test]
fn class_decides_whose_services_get_addresses() {
    let classed = |class: Value| service("web", json!({"spec": {"loadBalancerClass": class}}));
    let is_ours =
        |class: Value, ours: Option<&str>| AddressRequest::of(&classed(class), ours).unwrap().is_some();
    assert!(is_ours(Value::Null, None) && !is_ours(json!("x"), None));
    assert!(
        !is_ours(Value::Null, Some("x")) && is_ours(json!("x"), Some("x")) && !is_ours(json!("y"), Some("x"))
    );
    let node_port = service("web", json!({"spec": {"type": "NodePort"}}));
    assert_eq!(AddressRequest::of(&node_port, None), Ok(None));
}

#[test]
fn annotations_of_clouds_select_internal_pools() {
    let internal = json!({"metadata": {"name": "in", "labels": {"lb.dev/internal": "true"}},
        "spec": {"addresses": ["10.0.0.1/32"]}});
    let mut all = with_pools(vec![Pool::new(&read(internal)).unwrap(), of_range("out", "192.0.2.0/28")]);
    assert_eq!(given(&mut all, &request("public", json!({}))), "192.0.2.0");
    for (name, value, is_internal) in [
        ("networking.gke.io/load-balancer-type", "Internal", true),
        ("cloud.google.com/load-balancer-type", "Internal", true),
        ("cloud.google.com/load-balancer-type", "internal", true),
        ("cloud.google.com/load-balancer-type", "External", false),
        ("service.beta.kubernetes.io/aws-load-balancer-internal", "true", true),
        ("service.beta.kubernetes.io/aws-load-balancer-internal", "0.0.0.0/0", true),
        ("service.beta.kubernetes.io/aws-load-balancer-internal", "10.0.0.0/8", true),
        ("service.beta.kubernetes.io/aws-load-balancer-internal", "false", false),
        ("networking.gke.io/load-balancer-type", "internal", true),
        ("service.beta.kubernetes.io/azure-load-balancer-internal", "true", true),
        ("service.beta.kubernetes.io/azure-load-balancer-internal", "false", false),
        ("service.beta.kubernetes.io/openstack-internal-load-balancer", "true", true),
        ("service.beta.kubernetes.io/cce-load-balancer-internal-vpc", "true", true),
        ("service.kubernetes.io/qcloud-loadbalancer-internal-subnetid", "subnet-xxxxx", true),
        ("service.kubernetes.io/qcloud-loadbalancer-internal-subnetid", "", false),
    ] {
        let request = annotated("web", json!({name: value}));
        assert_eq!(request.internal, is_internal, "{name}: {value}");
        assert_eq!(given(&mut all, &request) == "10.0.0.1", is_internal, "{name}: {value}");
        all.release(&request.service);
    }
    let more = ["a", "b"].map(|name| {
        annotated(name, json!({"service.beta.kubernetes.io/aws-load-balancer-internal": "true"}))
    });
    assert_eq!(given(&mut all, &more[0]), "10.0.0.1");
    assert!(refused(&mut all, &more[1]).starts_with("no free address"));
}

#[test]
fn services_share_an_address_only_on_equal_terms() {
    let shared = |name: &str, key: &str, port: u16, more: Value| {
        let mut spec = json!({"ports": [{"port": port}], "loadBalancerIP": "192.0.2.1"});
        more.as_object().into_iter().flatten().for_each(|(key, value)| spec[key] = value.clone());
        request(name, json!({"metadata": {"annotations": {"metallb.io/allow-shared-ip": key}}, "spec": spec}))
    };
    let local = |app: &str| json!({"externalTrafficPolicy": "Local", "selector": {"app": app}});
    let bare = json!({"externalTrafficPolicy": "Local"});
    for (one, other, allowed) in [
        (shared("a", "k", 80, json!({})), shared("b", "k", 443, json!({})), true),
        (shared("a", "k", 80, json!({})), shared("b", "k", 80, json!({})), false),
        (shared("a", "k", 80, json!({})), shared("b", "l", 443, json!({})), false),
        (shared("a", "", 80, json!({})), shared("b", "", 443, json!({})), false),
        (shared("a", "k", 80, local("x")), shared("b", "k", 443, local("x")), true),
        (shared("a", "k", 80, local("x")), shared("b", "k", 443, local("y")), false),
        (shared("a", "k", 80, local("x")), shared("b", "k", 443, json!({})), false),
        (shared("a", "k", 80, json!({})), shared("b", "k", 443, bare), false),
        (
            shared("a", "k", 53, json!({"ports": [{"port": 53, "protocol": "UDP"}]})),
            shared("b", "k", 53, json!({})),
            true,
        ),
    ] {
        let mut all = with_pools(vec![of_range("a", "192.0.2.0/28")]);
        all.assign(&one).unwrap();
        assert_eq!(all.assign(&other).is_ok(), allowed, "{one:?} {other:?}");
        if allowed {
            all.release(&one.service);
            assert_eq!(all.addresses(&other.service).len(), 1, "the other sharer keeps it");
            let third = request("c", json!({"spec": {"loadBalancerIP": "192.0.2.1"}}));
            assert!(all.assign(&third).is_err());
        }
    }
}

#[test]
fn service_moves_if_it_ends_its_sharing() {
    let mut all = with_pools(vec![of_range("a", "192.0.2.0/28")]);
    let shared = |name: &str, port: u16, annotations: Value| {
        let spec = json!({"ports": [{"port": port}]});
        request(name, json!({"metadata": {"annotations": annotations}, "spec": spec}))
    };
    let key = json!({"metallb.io/allow-shared-ip": "k"});
    assert_eq!(given(&mut all, &shared("a", 80, key.clone())), "192.0.2.0");
    assert_eq!(given(&mut all, &shared("b", 81, key)), "192.0.2.0");
    assert_eq!(given(&mut all, &shared("b", 81, json!({}))), "192.0.2.1");
}

fn dual(policy: &str, ips: &[&str]) -> AddressRequest {
    request("web", json!({"spec": {"ipFamilyPolicy": policy, "clusterIPs": ips}}))
}

#[test]
fn dual_stack_services_get_both_addresses_from_one_pool() {
    let both = || pool("both", json!({"addresses": ["192.0.2.0/28", "2001:db8::/124"]}));
    let v4 = || of_range("a4", "198.51.100.0/28");
    let v6 = || of_range("a6", "2001:db8:1::/124");
    let require = dual("RequireDualStack", &["10.96.0.1", "fd00::1"]);
    let prefer = dual("PreferDualStack", &["fd00::1", "10.96.0.1"]);
    assert_eq!(given(&mut with_pools(vec![v4(), both()]), &require), "192.0.2.0,2001:db8::");
    assert_eq!(given(&mut with_pools(vec![v4(), both()]), &prefer), "2001:db8::,192.0.2.0");
    let mut apart = with_pools(vec![v4(), v6()]);
    let why = "no free address (IPv4 and IPv6) in any one of the pools \"a4\", \"a6\"";
    assert_eq!(refused(&mut apart, &require), why);
    assert_eq!(given(&mut apart, &prefer), "2001:db8:1::");
    let mut one = with_pools(vec![v4()]);
    assert_eq!(given(&mut one, &prefer), "198.51.100.0");
    // The pool gets addresses of the other family: the Service keeps its address and gets a second one.
    let wider = pool("a4", json!({"addresses": ["198.51.100.0/28", "2001:db8:1::/124"]}));
    assert_eq!(one.set_pools(vec![wider, both()], &[]), []);
    assert_eq!(given(&mut one, &prefer), "2001:db8:1::,198.51.100.0");
    let single = dual("SingleStack", &["fd00::1"]);
    assert_eq!(given(&mut one, &single), "2001:db8:1::");
}

#[test]
fn changed_pools_take_no_address_away() {
    let mut all = with_pools(vec![of_range("a", "192.0.2.0/28")]);
    let web = request("web", json!({}));
    assert_eq!(given(&mut all, &web), "192.0.2.0");
    for pools in [vec![], vec![of_range("b", "198.51.100.0/28")], vec![of_range("a", "192.0.2.8/29")]] {
        assert_eq!(all.set_pools(pools, &[]), []);
        assert_eq!(given(&mut all, &web), "192.0.2.0");
        assert!(all.pool_of("192.0.2.0".parse().unwrap()).is_none());
    }
    all.release(&web.service);
    assert_eq!(given(&mut all, &web), "192.0.2.8", "a released address is given only by a pool that has it");
}

#[test]
fn service_that_names_another_pool_moves_once_that_has_an_address() {
    let mut all = with_pools(vec![of_range("a", "192.0.2.0/28"), of_range("b", "198.51.100.0/32")]);
    let other = annotated("other", json!({"metallb.io/address-pool": "b"}));
    assert_eq!(given(&mut all, &other), "198.51.100.0");
    assert_eq!(given(&mut all, &request("web", json!({}))), "192.0.2.0");
    let moves = annotated("web", json!({"metallb.io/address-pool": "b"}));
    assert!(refused(&mut all, &moves).starts_with("no free address"));
    all.release(&other.service);
    assert_eq!(given(&mut all, &moves), "198.51.100.0");
}

#[test]
fn pool_that_overlaps_is_not_used_and_the_others_are() {
    let mut all = LoadBalancers::default();
    let reserved: Vec<AddressRange> = vec!["10.96.0.0/12".parse().unwrap()];
    let pools = vec![
        of_range("a", "192.0.2.0/24"),
        of_range("b", "192.0.2.200-192.0.3.1"),
        of_range("c", "10.97.0.0/24"),
        of_range("d", "198.51.100.0/24"),
    ];
    let errors = all.set_pools(pools, &reserved);
    assert_eq!(errors.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(
        errors[0].1.to_string(),
        "pool \"b\" is not used: its 192.0.2.200-192.0.3.1 overlaps 192.0.2.0-192.0.2.255 of pool \"a\""
    );
    assert_eq!(all.pools().iter().map(|pool| &*pool.name).collect::<Vec<_>>(), ["a", "d"]);
}

#[test]
fn invalid_pools_are_refused_with_their_field() {
    for (spec, field) in [
        (json!({}), "spec.addresses"),
        (json!({"addresses": ["192.0.2.1"]}), "spec.addresses[0]"),
        (json!({"addresses": ["192.0.2.0/24", "192.0.2.9-192.0.2.1"]}), "spec.addresses[1]"),
        (json!({"addresses": ["192.0.2.0/24", "192.0.2.7/32"]}), "spec.addresses[1]"),
        (
            json!({"addresses": ["192.0.2.0/24"], "serviceAllocation": {"priority": -1}}),
            "spec.serviceAllocation.priority",
        ),
        (
            json!({"addresses": ["192.0.2.0/24"], "serviceAllocation": {"namespaces": ["a", "a"]}}),
            "spec.serviceAllocation.namespaces[1]",
        ),
        (
            json!({"addresses": ["192.0.2.0/24"], "serviceAllocation": {"serviceSelectors":
                [{"matchExpressions": [{"key": "a", "operator": "x"}]}]}}),
            "spec.serviceAllocation.serviceSelectors[0].matchExpressions[0].operator",
        ),
    ] {
        let error = Pool::new(&read(json!({"metadata": {"name": "a"}, "spec": spec}))).unwrap_err();
        assert_eq!(error.field, field);
    }
}

#[test]
fn remembered_addresses_are_given_to_nobody_else() {
    let mut all = with_pools(vec![of_range("a", "192.0.2.0-192.0.2.1")]);
    let [old, twin, new] = ["old", "twin", "new"].map(|name| request(name, json!({})));
    let first: IpAddr = "192.0.2.0".parse().unwrap();
    all.remember(&old.service, &[first]);
    all.remember(&twin.service, &[first]);
    assert_eq!(given(&mut all, &new), "192.0.2.1");
    assert_eq!(given(&mut all, &old), "192.0.2.0", "the first that asks keeps it");
    assert!(all.assign(&twin).is_err() && all.addresses(&twin.service).is_empty());
    all.release(&new.service);
    assert_eq!(given(&mut all, &twin), "192.0.2.1");
}

/// The request of a Service that names the address `ip`.
fn named(name: &str, ip: &str) -> AddressRequest {
    annotated(name, json!({"metallb.io/loadBalancerIPs": ip}))
}

#[test]
fn named_addresses_are_assigned_before_others_and_move_along_chains() {
    let mut all = with_pools(vec![of_range("a", "192.0.2.0/29")]);
    let first = [request("a", json!({})), named("web", "192.0.2.0")];
    assert_eq!(all.assign_all(&first), [None, None]);
    assert_eq!(all.addresses(&first[1].service), ["192.0.2.0".parse::<IpAddr>().unwrap()]);
    assert_eq!(all.assign_all(&[named("b", "192.0.2.3"), named("c", "192.0.2.4")]), [None, None]);
    let chain = [named("b", "192.0.2.4"), named("c", "192.0.2.5")];
    assert_eq!(all.assign_all(&chain), [None, None]);
    let swap = [named("b", "192.0.2.5"), named("c", "192.0.2.4")];
    assert_eq!(all.assign_all(&swap), [None, None]);
    assert_eq!(all.addresses(&swap[0].service), ["192.0.2.5".parse::<IpAddr>().unwrap()]);
    let clash = [named("b", "192.0.2.0"), named("c", "192.0.2.5")];
    assert!(all.assign_all(&clash)[0].is_some());
}

#[test]
fn pool_that_shrinks_moves_no_service_that_names_it() {
    let mut all = with_pools(vec![of_range("a", "192.0.2.0/29")]);
    let web = annotated("web", json!({"metallb.io/address-pool": "a"}));
    assert_eq!(given(&mut all, &web), "192.0.2.0");
    assert_eq!(all.set_pools(vec![of_range("a", "192.0.2.4/30")], &[]), []);
    assert_eq!(given(&mut all, &web), "192.0.2.0");
}

fn reassigning(pools: Vec<Pool>) -> LoadBalancers {
    let mut all = with_pools(pools);
    all.set_reassign(true, true);
    all
}

#[test]
fn service_whose_address_is_in_no_pool_gets_another_one_only_with_reassign() {
    for (reassign, expected) in [(false, "192.0.2.0"), (true, "192.0.2.4")] {
        let mut all = with_pools(vec![of_range("a", "192.0.2.0/29")]);
        all.set_reassign(reassign, true);
        let web = request("web", json!({}));
        assert_eq!(given(&mut all, &web), "192.0.2.0");
        assert_eq!(all.set_pools(vec![of_range("a", "192.0.2.4/30")], &[]), []);
        assert_eq!(given(&mut all, &web), expected);
        assert_eq!(all.trouble(&web, None).is_none(), reassign);
    }
}

#[test]
fn reassign_moves_services_that_their_pool_may_not_serve_any_more() {
    let spec = |scope: Value| json!({"addresses": ["192.0.2.0/31"], "serviceAllocation": scope});
    let other = || of_range("z", "198.51.100.1/32");
    let internal = json!({"metadata": {"name": "a", "labels": {"lb.dev/internal": "true"}},
        "spec": {"addresses": ["192.0.2.0/31"]}});
    let manual = json!({"addresses": ["192.0.2.0/31"], "autoAssign": false});
    let avoiding = json!({"addresses": ["192.0.2.0/31"], "avoidBuggyIPs": true});
    for (changed, expected) in [
        (pool("a", spec(json!({"namespaces": ["default"]}))), "192.0.2.0"),
        (pool("a", spec(json!({"namespaces": ["prod"]}))), "198.51.100.1"),
        (pool("a", spec(json!({"serviceSelectors": [{"matchLabels": {"x": "y"}}]}))), "198.51.100.1"),
        (Pool::new(&read(internal)).unwrap(), "198.51.100.1"),
        (pool("a", avoiding), "192.0.2.1"),
        // As with MetalLB, `autoAssign` only concerns Services that have no address yet.
        (pool("a", manual), "192.0.2.0"),
    ] {
        let mut all = reassigning(vec![of_range("a", "192.0.2.0/31")]);
        let web = request("web", json!({}));
        assert_eq!(given(&mut all, &web), "192.0.2.0");
        let shown = format!("{changed:?}");
        assert_eq!(all.set_pools(vec![changed, other()], &[]), []);
        assert_eq!(given(&mut all, &web), expected, "{shown}");
    }
}

#[test]
fn reassign_without_a_free_address_takes_the_old_one_away() {
    let mut all = reassigning(vec![of_range("a", "192.0.2.0/31")]);
    let [web, db] = ["web", "db"].map(|name| request(name, json!({})));
    let named = request("named", json!({"spec": {"loadBalancerIP": "192.0.2.1"}}));
    assert_eq!((given(&mut all, &web), given(&mut all, &named)), ("192.0.2.0".into(), "192.0.2.1".into()));
    assert_eq!(all.set_pools(vec![of_range("a", "198.51.100.1/32")], &[]), []);
    assert_eq!(given(&mut all, &db), "198.51.100.1");
    let errors = all.assign_all(&[web.clone(), named.clone()]);
    let errors: Vec<String> = errors.into_iter().map(|error| error.unwrap().to_string()).collect();
    assert_eq!(errors, ["no free address (IPv4) in pool \"a\"", "192.0.2.1 is in no pool"]);
    assert_eq!([&web, &named].map(|request| all.addresses(&request.service).len()), [0, 0]);
}

#[test]
fn reassign_keeps_the_address_of_the_family_that_the_pool_still_has() {
    let dual_pool = |v4: &str| pool("a", json!({"addresses": [v4, "2001:db8::/126"]}));
    let mut all = reassigning(vec![dual_pool("192.0.2.0/30")]);
    let web = dual("RequireDualStack", &["10.96.0.1", "fd00::1"]);
    assert_eq!(given(&mut all, &web), "192.0.2.0,2001:db8::");
    assert_eq!(all.set_pools(vec![dual_pool("198.51.100.0/30")], &[]), []);
    assert_eq!(given(&mut all, &web), "198.51.100.0,2001:db8::");
}

#[test]
fn reassign_moves_no_service_while_a_pool_cannot_be_used_or_none_exists() {
    let web = request("web", json!({}));
    let b = || of_range("b", "198.51.100.0/30");
    for (pools, unused) in [
        (vec![], 0),
        (vec![b(), of_range("a", "10.96.0.0/30")], 1),
        (vec![b(), of_range("c", "198.51.100.0/24")], 1),
    ] {
        let mut all = reassigning(vec![of_range("a", "192.0.2.0/30")]);
        assert_eq!(given(&mut all, &web), "192.0.2.0");
        let errors = all.set_pools(pools, &["10.96.0.0/12".parse::<ipnet::IpNet>().unwrap().into()]);
        assert_eq!(errors.len(), unused);
        assert_eq!(given(&mut all, &web), "192.0.2.0");
        let concern = all.trouble(&web, None).unwrap().to_string();
        assert!(concern.ends_with("until there are pools and all of them can be read and used"), "{concern}");
        assert_eq!(all.set_pools(vec![b()], &[]), []);
        all.set_reassign(true, false);
        assert_eq!(given(&mut all, &web), "192.0.2.0", "a pool cannot be read");
        all.set_reassign(true, true);
        assert_eq!(given(&mut all, &web), "198.51.100.0", "all pools can be read and used");
    }
}

#[test]
fn addresses_of_nodes_are_given_only_to_services_that_name_them() {
    let mut all = with_pools(vec![of_range("a", "192.0.2.1-192.0.2.5")]);
    let [web, db, more] = ["web", "db", "more"].map(|name| request(name, json!({})));
    assert_eq!(given(&mut all, &web), "192.0.2.1");
    let nodes = |last: &[u8]| -> BTreeMap<IpAddr, Arc<str>> {
        let node = |last: &u8| (IpAddr::from([192, 0, 2, *last]), format!("node-{last}").into());
        last.iter().map(node).collect()
    };
    // The first node has the address of a Service, which keeps it.
    all.set_nodes(nodes(&[1, 2, 4, 200]));
    assert_eq!(
        [given(&mut all, &web), given(&mut all, &db), given(&mut all, &more)],
        ["192.0.2.1", "192.0.2.3", "192.0.2.5"]
    );
    let texts: Vec<String> = all.pools_with_nodes().iter().map(ToString::to_string).collect();
    let nodes_of_pool = "192.0.2.1 (node-1), 192.0.2.2 (node-2), 192.0.2.4 (node-4); a Service gets";
    assert!(
        texts.len() == 1 && texts[0].starts_with("pool \"a\"") && texts[0].contains(nodes_of_pool),
        "{texts:?}"
    );
    all.release(&web.service);
    let last = request("last", json!({}));
    assert_eq!(refused(&mut all, &last), "no free address (IPv4) in pool \"a\"", "not even a released one");
    assert_eq!(given(&mut all, &named("named", "192.0.2.2")), "192.0.2.2");
    let changes = all.changes();
    all.set_nodes(nodes(&[1, 2]));
    assert!(all.changes() > changes, "a Service that waits may get an address");
    assert_eq!(given(&mut all, &last), "192.0.2.4");
    all.set_nodes(nodes(&[]));
    assert_eq!(all.pools_with_nodes(), []);
}

#[test]
fn addresses_of_nodes_are_not_shared_by_chance() {
    let mut all = with_pools(vec![of_range("a", "192.0.2.1-192.0.2.2")]);
    let shared = |name: &str, port: u16, ip: Option<&str>| {
        let metadata = json!({"annotations": {"metallb.io/allow-shared-ip": "k"}});
        request(
            name,
            json!({"metadata": metadata, "spec": {"ports": [{"port": port}], "loadBalancerIP": ip}}),
        )
    };
    all.set_nodes([("192.0.2.1".parse().unwrap(), "node-1".into())].into());
    assert_eq!(given(&mut all, &shared("web", 80, Some("192.0.2.1"))), "192.0.2.1");
    assert_eq!(given(&mut all, &shared("db", 81, None)), "192.0.2.2");
    assert_eq!(given(&mut all, &shared("dns", 82, Some("192.0.2.1"))), "192.0.2.1");
}

#[test]
fn pool_in_use_stays_in_use_beside_a_new_one_that_overlaps() {
    let mut all = with_pools(vec![of_range("b", "192.0.2.0/29")]);
    let errors = all.set_pools(vec![of_range("a", "192.0.2.7/32"), of_range("b", "192.0.2.0/29")], &[]);
    assert_eq!(errors.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0]);
}

#[test]
fn terms_of_a_refused_request_count() {
    let mut all = with_pools(vec![of_range("a", "192.0.2.0/32")]);
    let shared = |name: &str, port: u16| {
        let metadata = json!({"annotations": {"metallb.io/allow-shared-ip": "k"}});
        request(name, json!({"metadata": metadata, "spec": {"ports": [{"port": port}]}}))
    };
    assert_eq!(
        (given(&mut all, &shared("a", 80)), given(&mut all, &shared("b", 443))),
        ("192.0.2.0".into(), "192.0.2.0".into())
    );
    // The two Services now have a port in common, and the pool has no other address.
    assert!(all.assign(&shared("a", 443)).is_err());
    assert_eq!(all.addresses(&shared("a", 443).service), [] as [IpAddr; 0]);
}

#[test]
fn large_pool_costs_nothing() {
    let mut all = with_pools(vec![of_range("a", "2001:db8::/64")]);
    let web = request("web", json!({"spec": {"clusterIPs": ["fd00::1"]}}));
    assert_eq!(given(&mut all, &web), "2001:db8::");
}

#[test]
fn first_load_of_a_large_pool_passes_each_address_once() {
    const SERVICES: usize = 5_000;
    let spec = json!({"addresses": ["10.0.0.0/16"], "avoidBuggyIPs": true});
    let mut all = with_pools(vec![pool("a", spec)]);
    let requests: Vec<AddressRequest> =
        (0..SERVICES).map(|n| request(&format!("s{n:05}"), json!({}))).collect();
    assert!(all.assign_all(&requests).iter().all(Option::is_none));
    assert_eq!(all.addresses(&requests[255].service), ["10.0.1.2".parse::<IpAddr>().unwrap()]);
    assert!(all.fresh.steps < SERVICES * 102 / 100, "{} steps", all.fresh.steps);
}

#[test]
fn service_that_asks_for_another_kind_keeps_its_address_and_causes_concern() {
    let mut all = with_pools(vec![of_range("out", "192.0.2.0/28")]);
    let public = request("web", json!({}));
    given(&mut all, &public);
    assert_eq!(all.trouble(&public, None), None);
    let internal = annotated("web", json!({"networking.gke.io/load-balancer-type": "Internal"}));
    assert_eq!(given(&mut all, &internal), "192.0.2.0");
    let concern = all.trouble(&internal, None).unwrap().to_string();
    assert!(concern.contains("asks for an internal load balancer and keeps 192.0.2.0"), "{concern}");
    let named = json!({"networking.gke.io/load-balancer-type": "Internal", "metallb.io/address-pool": "out"});
    assert_eq!(all.trouble(&annotated("web", named), None), None);
}

#[derive(Clone, Debug)]
enum Operation {
    Assign { name: usize, key: Option<&'static str>, port: u16, named: Option<u8>, dual: bool },
    Release(usize),
    Pools(Vec<(u8, u8)>),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let assign = (0..6usize, sample::select(vec![None, Some("k"), Some("l")]), 1..4u16);
    let assign = (assign, proptest::option::weighted(0.3, 0..16u8), any::<bool>());
    let assign = assign.prop_map(|((name, key, port), named, dual)| Operation::Assign {
        name,
        key,
        port,
        named,
        dual,
    });
    let pools = collection::vec((0..16u8, 0..6u8), 0..3).prop_map(Operation::Pools);
    let operation = prop_oneof![6 => assign, 2 => (0..6usize).prop_map(Operation::Release), 1 => pools];
    collection::vec(operation, 1..40)
}

fn random_request(
    name: usize,
    key: Option<&str>,
    port: u16,
    named: Option<u8>,
    dual: bool,
) -> AddressRequest {
    let mut annotations = json!({});
    if let Some(key) = key {
        annotations["metallb.io/allow-shared-ip"] = json!(key);
    }
    let named = named.filter(|_| !dual);
    let ips = if dual { json!(["10.96.0.1", "fd00::1"]) } else { json!(["10.96.0.1"]) };
    let mut spec = json!({"ports": [{"port": port}], "clusterIPs": ips, "ipFamilyPolicy": "PreferDualStack"});
    if let Some(named) = named {
        spec["loadBalancerIP"] = json!(format!("192.0.2.{named}"));
    }
    request(&format!("s{name}"), json!({"metadata": {"annotations": annotations}, "spec": spec}))
}

/// The requests of one to seven random Services. Each Service may name an address, may share its address, and may have
/// both families.
fn random_requests() -> impl Strategy<Value = Vec<AddressRequest>> {
    let one = (
        sample::select(vec![None, Some("k")]),
        1..4u16,
        proptest::option::weighted(0.2, 0..16u8),
        any::<bool>(),
    );
    collection::vec(one, 1..8).prop_map(|all| {
        let request = |(name, (key, port, named, dual))| random_request(name, key, port, named, dual);
        all.into_iter().enumerate().map(request).collect()
    })
}

fn random_pools(ranges: &[(u8, u8)]) -> Vec<Pool> {
    let pool = |(n, (first, more)): (usize, &(u8, u8))| {
        let v4 = format!("192.0.2.{first}-192.0.2.{}", first + more);
        pool(&format!("p{n}"), json!({"addresses": [v4, format!("2001:db8:{n}::/126")]}))
    };
    ranges.iter().enumerate().map(pool).collect()
}

proptest! {
    /// After a change of the pools that leaves at least one pool, with all of them usable, no Service has an address
    /// that is in no pool. A Service that neither names nor shares an address keeps its addresses if all of them are
    /// still in pools. Another assignment changes nothing.
    #[test]
    fn reassign_moves_only_services_whose_addresses_are_in_no_pool(
        requests in random_requests(),
        changes in collection::vec(collection::vec((0..16u8, 0..6u8), 0..3), 1..4),
    ) {
        let mut all = reassigning(random_pools(&[(0, 8)]));
        all.assign_all(&requests);
        for ranges in changes {
            let before = all.services.clone();
            let errors = all.set_pools(random_pools(&ranges), &[]);
            let moves = errors.is_empty() && !ranges.is_empty();
            if !ranges.is_empty() {
                all.assign_all(&requests);
            }
            for request in &requests {
                let had = before.get(&request.service).map_or(&[][..], Vec::as_slice);
                let has = all.addresses(&request.service);
                prop_assert!(!moves || has.iter().all(|ip| all.pool_of(*ip).is_some()), "{has:?}");
                let stays = !moves || had.iter().all(|ip| all.pool_of(*ip).is_some());
                let asks = !request.addresses.is_empty() || request.terms.key.is_some();
                prop_assert!(!stays || asks || had.iter().all(|ip| has.contains(ip)), "{had:?} {has:?}");
            }
            let settled = all.services.clone();
            if !ranges.is_empty() {
                all.assign_all(&requests);
            }
            prop_assert_eq!(&settled, &all.services);
        }
    }

    /// In any history, Services share an address only if their terms allow it, only a Service's own requests change its
    /// addresses, and both indexes agree. After a restart that remembers all addresses, in any order, every Service
    /// that names no address keeps its addresses, if its request succeeds.
    #[test]
    fn random_histories_give_no_address_twice_and_survive_restarts(history in operations(), seed: usize) {
        let mut all = with_pools(random_pools(&[(0, 5)]));
        let mut pools = random_pools(&[(0, 5)]);
        let mut requests: BTreeMap<ObjectName, AddressRequest> = BTreeMap::new();
        for operation in history {
            let before: BTreeMap<ObjectName, Vec<IpAddr>> =
                all.services.clone();
            let mut touched = None;
            match operation {
                Operation::Assign { name, key, port, named, dual } => {
                    let request = random_request(name, key, port, named, dual);
                    _ = all.assign(&request);
                    requests.insert(request.service.clone(), request.clone());
                    touched = Some(request.service);
                }
                Operation::Release(name) => {
                    let name = ObjectName::new("default", &format!("s{name}"));
                    all.release(&name);
                    requests.remove(&name);
                    prop_assert!(all.addresses(&name).is_empty());
                    touched = Some(name);
                }
                Operation::Pools(ranges) => {
                    pools = random_pools(&ranges);
                    all.set_pools(pools.clone(), &[]);
                }
            }
            for (name, ips) in before.iter().filter(|(name, _)| Some(*name) != touched.as_ref()) {
                prop_assert_eq!(all.addresses(name), ips.as_slice(), "{} did not ask", name);
            }
            for (name, ips) in all.services.iter() {
                for (other, other_ips) in all.services.iter().filter(|(other, _)| *other != name) {
                    let meet = ips.iter().any(|ip| other_ips.contains(ip));
                    prop_assert!(!meet || requests[name].terms.allow(&requests[other].terms));
                }
            }
            let pairs: BTreeSet<(IpAddr, &ObjectName)> =
                all.services.iter().flat_map(|(name, ips)| ips.iter().map(move |ip| (*ip, name))).collect();
            let held: BTreeSet<(IpAddr, &ObjectName)> =
                all.holders.iter().flat_map(|(ip, names)| names.keys().map(move |name| (*ip, name))).collect();
            prop_assert_eq!(pairs, held);
            prop_assert!(all.released.keys().all(|ip| !all.holders.contains_key(ip)));
        }
        let mut again = LoadBalancers::default();
        again.set_pools(pools, &[]);
        let mut order: Vec<&ObjectName> = requests.keys().collect();
        if !order.is_empty() {
            let middle = seed % order.len();
            order.rotate_left(middle);
        }
        for name in &order {
            again.remember(name, all.addresses(name));
        }
        for name in &order {
            let before = all.addresses(name);
            // After the restart, a request that failed before may succeed, as may one for a second family.
            if before.is_empty() || again.assign(&requests[*name]).is_err() {
                continue;
            }
            let after = again.addresses(name);
            let named = !requests[*name].addresses.is_empty();
            prop_assert!(named || before.iter().all(|ip| after.contains(ip)), "{:?} before, {:?} after", before, after);
        }
    }
}
