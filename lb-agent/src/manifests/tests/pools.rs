//! Tests of how Services of type LoadBalancer get addresses from pools.

use super::*;
use crate::manifests::Severity;

const POOL: &str =
    "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: a, namespace: metallb-system}\n";

fn pool(name: &str, addresses: &str) -> String {
    format!("{}spec: {{addresses: [{addresses}]}}\n", POOL.replace("name: a", &format!("name: {name}")))
}

fn balancer(name: &str) -> String {
    format!("{}  type: LoadBalancer\n", service(name, 80))
}

impl Folder {
    fn load_balancer(&self, name: &str) -> Vec<String> {
        self.service(name).external.load_balancer_ips.iter().map(ToString::to_string).collect()
    }
}

/// Contents of the maps after a run in which one Service of type LoadBalancer had this address.
fn contents_with(name: &str, address: &str) -> Contents {
    use lb_core::{capacity::Capacity, model::Policy, reconciler::Reconciler};

    let mut folder = Folder::of(&[(
        "a.yaml",
        &format!("{}status: {{loadBalancer: {{ingress: [{{ip: {address}}}]}}}}\n", balancer(name)),
    )]);
    let mut reconciler =
        Reconciler::new(Contents::default(), Capacity::of_arenas(1 << 10, 0), Policy::default());
    reconciler.handle(std::mem::take(&mut folder.update.changes));
    for step in reconciler.plan().steps {
        reconciler.applied(&step);
    }
    reconciler.contents().clone()
}

#[test]
fn load_balancer_gets_an_address_once_there_is_a_pool() {
    let mut folder = Folder::of(&[("web.yaml", &balancer("web"))]);
    assert_eq!((folder.load_balancer("web"), folder.problems()), (vec![], vec![]), "nobody asked for pools");
    folder.write(&[("pool.yaml", &pool("a", "192.0.2.0/30"))]);
    assert_eq!(folder.load_balancer("web"), ["192.0.2.0"]);
    folder.write(&[("db.yaml", &balancer("db"))]);
    assert_eq!(folder.load_balancer("db"), ["192.0.2.1"]);
    assert_eq!(folder.problems(), [""; 0]);
}

#[test]
fn pool_of_the_flag_needs_no_manifest() {
    let networks = vec!["192.0.2.8/30".parse().unwrap(), "2001:db8::/126".parse().unwrap()];
    let options = ManifestsOptions { load_balancer_pool: networks, ..options() };
    let mut folder = Folder::with(options, &Contents::default());
    let dual = format!("{}  ipFamilyPolicy: RequireDualStack\n", balancer("web"));
    folder.write(&[("web.yaml", &dual)]);
    assert_eq!(folder.load_balancer("web"), ["192.0.2.8", "2001:db8::"]);
    folder.write(&[("pool.yaml", &pool("a", "192.0.2.0/24"))]);
    let problems = folder.problems();
    assert!(
        matches!(&problems[..], [one] if one.contains("overlaps 192.0.2.8-192.0.2.11 of pool \"load-balancer-pool\"")),
        "{problems:?}"
    );
}

#[test]
fn member_warns_of_a_service_that_names_no_address() {
    let options = ManifestsOptions { has_members: true, ..options() };
    let mut folder = Folder::with(options, &Contents::default());
    folder.write(&[("web.yaml", &balancer("web")), ("pool.yaml", &pool("a", "192.0.2.0/30"))]);
    assert_eq!(folder.load_balancer("web"), ["192.0.2.0"]);
    let problems = folder.problems();
    assert!(matches!(&problems[..], [one] if one.contains("metallb.io/loadBalancerIPs")), "{problems:?}");
    folder.write(&[("web.yaml", &format!("{}  loadBalancerIP: 192.0.2.0\n", balancer("web")))]);
    assert_eq!((folder.load_balancer("web"), folder.problems()), (vec!["192.0.2.0".into()], vec![]));
}

#[test]
fn load_balancer_of_another_class_gets_no_address() {
    let classed = format!("{}  loadBalancerClass: example.com/lb\n", balancer("web"));
    let files = [("web.yaml", &*classed), ("pool.yaml", &*pool("a", "192.0.2.0/30"))];
    assert_eq!(Folder::of(&files).load_balancer("web"), [""; 0]);
    let options = ManifestsOptions { load_balancer_class: Some("example.com/lb".into()), ..options() };
    let mut folder = Folder::with(options, &Contents::default());
    folder.write(&files).write(&[("db.yaml", &balancer("db"))]);
    assert_eq!((folder.load_balancer("web"), folder.load_balancer("db")), (vec!["192.0.2.0".into()], vec![]));
}

#[test]
fn load_balancer_without_an_address_is_served_otherwise_and_gets_the_next_free_one() {
    let mut folder = Folder::of(&[
        ("pool.yaml", &pool("a", "192.0.2.7/32")),
        ("db.yaml", &balancer("db")),
        ("web.yaml", &balancer("web")),
    ]);
    assert_eq!((folder.load_balancer("db"), folder.load_balancer("web")), (vec!["192.0.2.7".into()], vec![]));
    assert_eq!(folder.service("web").cluster_ips.len(), 1);
    let why = "services/web.yaml, document 1 (line 1), Service default/web: status.loadBalancer: no address: no free \
               address (IPv4) in pool \"a\"";
    assert_eq!(folder.problems(), [why]);
    folder.remove("db.yaml");
    assert_eq!((folder.load_balancer("web"), folder.problems()), (vec!["192.0.2.7".into()], vec![]));
}

#[test]
fn service_that_is_no_load_balancer_any_more_releases_its_address() {
    let mut folder = Folder::of(&[("pool.yaml", &pool("a", "192.0.2.7/32")), ("db.yaml", &balancer("db"))]);
    folder.write(&[("db.yaml", &service("db", 80)), ("web.yaml", &balancer("web"))]);
    assert_eq!((folder.load_balancer("db"), folder.load_balancer("web")), (vec![], vec!["192.0.2.7".into()]));
}

#[test]
fn address_of_the_manifest_wins_and_goes_with_it() {
    let given = format!("{}status: {{loadBalancer: {{ingress: [{{ip: 192.0.2.0}}]}}}}\n", balancer("db"));
    let mut folder = Folder::of(&[("pool.yaml", &pool("a", "192.0.2.0/30")), ("db.yaml", &given)]);
    folder.write(&[("web.yaml", &balancer("web"))]);
    assert_eq!(
        (folder.load_balancer("db"), folder.load_balancer("web")),
        (vec!["192.0.2.0".into()], vec!["192.0.2.1".into()])
    );
    let [db, web] = ["db", "web"].map(|name| folder.service(name).external.given_ips.len());
    assert_eq!((db, web), (0, 1), "the agent gave the second one");
    folder.remove("pool.yaml").write(&[("db.yaml", &balancer("db"))]);
    assert_eq!(folder.load_balancer("db"), [""; 0]);
}

#[test]
fn address_survives_the_end_of_its_pool_and_a_restart() {
    let mut folder = Folder::of(&[("pool.yaml", &pool("a", "192.0.2.0/30")), ("db.yaml", &balancer("db"))]);
    folder.write(&[("pool.yaml", &pool("a", "198.51.100.0/30"))]);
    assert_eq!(folder.load_balancer("db"), ["192.0.2.0"]);
    assert!(folder.problems()[0].contains("192.0.2.0 is in no pool"), "{:?}", folder.problems());
    assert_eq!(folder.service("db").external.given_ips, ["192.0.2.0".parse::<IpAddr>().unwrap()]);
    folder.remove("pool.yaml");
    assert_eq!(folder.load_balancer("db"), ["192.0.2.0"]);

    let mut again = Folder::with(options(), &contents_with("db", "192.0.2.3"));
    again.write(&[
        ("pool.yaml", &pool("a", "192.0.2.0/30")),
        ("db.yaml", &balancer("db")),
        ("a.yaml", &balancer("a")),
    ]);
    assert_eq!(
        (again.load_balancer("db"), again.load_balancer("a")),
        (vec!["192.0.2.3".into()], vec!["192.0.2.0".into()])
    );
}

#[test]
fn namespaces_are_selected_by_their_labels() {
    let scoped = format!(
        "{POOL}spec:\n  addresses: [192.0.2.0/30]\n  serviceAllocation:\n    namespaceSelectors:\n    - matchLabels: {{team: \
         blue}}\n"
    );
    let mut folder = Folder::of(&[("pool.yaml", &scoped), ("web.yaml", &balancer("web"))]);
    assert!(
        folder.problems()[0].contains("no pool gives addresses to this Service"),
        "{:?}",
        folder.problems()
    );
    folder.write(&[(
        "namespace.yaml",
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: default, labels: {team: blue}}\n",
    )]);
    assert_eq!((folder.load_balancer("web"), folder.problems()), (vec!["192.0.2.0".into()], vec![]));
}

#[test]
fn bad_pools_are_reported_and_the_last_good_one_stays() {
    let mut folder = Folder::of(&[("pool.yaml", &pool("a", "192.0.2.0/30")), ("web.yaml", &balancer("web"))]);
    for (text, problem) in [
        (pool("a", "192.0.2.9"), "spec.addresses[0]"),
        (
            format!("{POOL}spec: {{addresses: [192.0.2.0/30], autoassign: false}}\n"),
            "spec.autoassign: unknown field",
        ),
        (POOL.replace("v1beta1", "v1beta2"), "apiVersion: metallb.io/v1beta1, kind: IPAddressPool is meant?"),
    ] {
        folder.write(&[("pool.yaml", &text)]);
        assert!(folder.problems().iter().any(|found| found.contains(problem)), "{:?}", folder.problems());
        folder.write(&[("db.yaml", &balancer("db"))]);
        assert_eq!(
            (folder.load_balancer("web"), folder.load_balancer("db")),
            (vec!["192.0.2.0".into()], vec!["192.0.2.1".into()])
        );
    }
    folder.write(&[("pool.yaml", &pool("a", "10.100.0.0/30"))]);
    assert!(
        folder.problems().iter().any(|found| found.contains("which is a network of cluster IPs or pods")),
        "{:?}",
        folder.problems()
    );
}

#[test]
fn pool_of_pod_addresses_is_not_used() {
    let networks = vec!["10.244.0.0/16".parse().unwrap()];
    let mut folder =
        Folder::with(ManifestsOptions { pod_networks: networks, ..options() }, &Contents::default());
    folder.write(&[("pool.yaml", &pool("a", "10.244.3.0/28")), ("web.yaml", &balancer("web"))]);
    let problems = folder.problems();
    let why = "overlaps 10.244.0.0-10.244.255.255, which is a network of cluster IPs or pods";
    assert!(problems.iter().any(|found| found.contains(why)), "{problems:?}");
    assert_eq!(folder.load_balancer("web"), [""; 0]);
}

#[test]
fn addresses_that_manifests_give_or_name_are_given_to_nobody_else_in_any_order() {
    let given = |name: &str| {
        format!("{}status: {{loadBalancer: {{ingress: [{{ip: 192.0.2.0}}]}}}}\n", balancer(name))
    };
    for other in ["a", "z"] {
        let folder = Folder::of(&[
            ("pool.yaml", &pool("a", "192.0.2.0/30")),
            ("db.yaml", &given("db")),
            ("named.yaml", &format!("{}  loadBalancerIP: 192.0.2.1\n", balancer("named"))),
            ("other.yaml", &balancer(other)),
        ]);
        assert_eq!(folder.load_balancer("db"), ["192.0.2.0"]);
        assert_eq!(folder.load_balancer("named"), ["192.0.2.1"]);
        assert_eq!(folder.load_balancer(other), ["192.0.2.2"]);
    }
}

#[test]
fn mistake_in_a_request_takes_no_address_away() {
    let mut folder = Folder::of(&[("pool.yaml", &pool("a", "192.0.2.0/30")), ("web.yaml", &balancer("web"))]);
    folder.write(&[("web.yaml", &format!("{}  loadBalancerIP: x\n", balancer("web")))]);
    assert_eq!(folder.load_balancer("web"), ["192.0.2.0"]);
    assert!(folder.problems()[0].contains("spec.loadBalancerIP"), "{:?}", folder.problems());
}

#[test]
fn mistakes_in_pools_and_namespaces_are_warnings() {
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: default}\n";
    let folder = Folder::of(&[
        ("one.yaml", namespace),
        ("two.yaml", namespace),
        ("pool.yaml", &pool("a", "192.0.2.0/30")),
        ("twin.yaml", &pool("b", "192.0.2.0/30")),
    ]);
    assert_eq!(folder.update.problems.len(), 2);
    assert!(folder.update.problems.iter().all(|problem| problem.severity == Severity::Warning));
}

#[test]
fn second_family_comes_as_soon_as_there_is_an_address() {
    let dual = |name: &str, policy: &str| format!("{}  ipFamilyPolicy: {policy}\n", balancer(name));
    let mut folder = Folder::of(&[
        ("pool.yaml", &pool("a", "192.0.2.0/30, '2001:db8::/128'")),
        ("db.yaml", &dual("db", "RequireDualStack")),
    ]);
    folder.write(&[("web.yaml", &dual("web", "PreferDualStack"))]);
    assert_eq!(folder.load_balancer("web"), ["192.0.2.1"]);
    folder.remove("db.yaml");
    assert_eq!(folder.load_balancer("web"), ["192.0.2.1", "2001:db8::"]);
}

#[test]
fn addresses_in_use_are_counted_by_pool() {
    let mut folder = Folder::of(&[("pool.yaml", &pool("a", "192.0.2.0/30")), ("web.yaml", &balancer("web"))]);
    let usage = |folder: &Folder| {
        let usage = folder.manifests.pool_usage().into_iter();
        usage.map(|pool| (pool.pool.to_string(), pool.used, pool.total)).collect::<Vec<_>>()
    };
    assert_eq!(usage(&folder), [("a".to_owned(), 1, 4)]);
    folder.remove("web.yaml");
    assert_eq!(usage(&folder), [("a".to_owned(), 0, 4)]);
}

#[test]
fn advertisements_name_pools_that_are_in_use() {
    let head = "apiVersion: metallb.io/v1beta1\nkind: L2Advertisement\nmetadata: {name: a}\n";
    let mut folder =
        Folder::of(&[("pool.yaml", &pool("a", "192.0.2.0/30")), ("b.yaml", &pool("b", "192.0.2.0/24"))]);
    let advertised = folder.manifests.advertised();
    assert_eq!((advertised.advertisements.len(), advertised.pools.len()), (0, 1), "pool b overlaps a");
    folder.write(&[("advertisement.yaml", head)]);
    assert_eq!(folder.manifests.advertised().advertisements.len(), 1);
    folder.write(&[("advertisement.yaml", &format!("{head}spec: {{serviceSelectors: [{{}}]}}\n"))]);
    assert_eq!(folder.manifests.advertised().advertisements.len(), 1, "the last good state stays");
    let mistake =
        &folder.update.problems.iter().find(|problem| problem.field.contains("serviceSelectors")).unwrap();
    assert_eq!(mistake.severity, Severity::Warning, "no Service depends on an advertisement");
    folder.remove("advertisement.yaml");
    assert_eq!(folder.manifests.advertised().advertisements.len(), 0);
}

#[test]
fn reassign_gives_another_address_once_all_pools_can_be_read() {
    let options = ManifestsOptions { load_balancer_reassign: true, ..options() };
    let mut folder = Folder::with(options, &contents_with("web", "192.0.2.1"));
    folder.write(&[("web.yaml", &balancer("web")), ("pool.yaml", &pool("a", "192.0.2.0/30"))]);
    assert_eq!(folder.load_balancer("web"), ["192.0.2.1"]);
    folder.write(&[("pool.yaml", &pool("a", "198.51.100.0/30")), ("bad.yaml", &pool("b", "x"))]);
    assert_eq!(folder.load_balancer("web"), ["192.0.2.1"], "a pool is unreadable");
    folder.write(&[("bad.yaml", &pool("b", "203.0.113.0/30"))]);
    assert_eq!(folder.load_balancer("web"), ["198.51.100.0"]);
    assert_eq!(folder.problems(), [""; 0]);
}
