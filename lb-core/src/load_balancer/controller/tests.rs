use proptest::{collection, prelude::*};
use serde_json::{Value, json};

use super::*;

/// A mock API server with Services, which accepts a write only if it replaces the present version.
#[derive(Clone, Default)]
struct Server {
    version: u64,
    services: BTreeMap<ObjectName, Value>,
}

fn name(name: &str) -> ObjectName {
    ObjectName::new("default", name)
}

fn read<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

impl Server {
    /// Creates a Service of type LoadBalancer, or changes it: merges `spec` into its `spec`.
    fn put(&mut self, service: &str, spec: Value) {
        self.version += 1;
        let uid = self.version.to_string();
        let object = self.services.entry(name(service)).or_insert_with(|| {
            json!({
                "metadata": {"name": service, "namespace": "default", "uid": uid, "annotations": {}, "creationTimestamp": uid},
                "spec": {"type": "LoadBalancer", "clusterIPs": ["10.96.0.1"], "ports": [{"port": 80}]},
                "status": {"loadBalancer": {}},
            })
        });
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        for (key, value) in spec.as_object().into_iter().flatten() {
            object["spec"][key] = value.clone();
        }
    }

    /// Sets the status of a Service, as another controller would.
    fn set_ingress(&mut self, service: &str, ingress: Value) {
        self.put(service, json!({}));
        self.services.get_mut(&name(service)).unwrap()["status"]["loadBalancer"]["ingress"] = ingress;
    }

    /// Applies a write if the Service still has the version that the write replaces; returns whether it has applied the
    /// write.
    fn write(&mut self, write: &Write) -> bool {
        let Some(object) = self.services.get_mut(&write.service) else { return false };
        if object["metadata"]["resourceVersion"] != json!(write.version) {
            return false;
        }
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let annotations = object["metadata"]["annotations"].as_object_mut().unwrap();
        match &write.given {
            Some(given) => annotations.insert(GIVEN.to_owned(), json!(given)),
            None => annotations.remove(GIVEN),
        };
        if let Some(ingress) = &write.ingress {
            object["status"]["loadBalancer"]["ingress"] =
                ingress.iter().map(|ip| json!({"ip": ip})).collect();
        }
        true
    }

    fn ingress(&self, service: &str) -> String {
        let ingress = &self.services[&name(service)]["status"]["loadBalancer"]["ingress"];
        let text = |one: &Value| one["ip"].as_str().unwrap_or("a host name").to_owned();
        ingress.as_array().into_iter().flatten().map(text).collect::<Vec<_>>().join(",")
    }

    /// Passes all Services to the controller, as a list does.
    fn show(&self, controller: &mut Controller) {
        for (name, service) in &self.services {
            controller.set_service(name.clone(), Some(&read(service)));
        }
        let gone: Vec<_> =
            controller.services.keys().filter(|name| !self.services.contains_key(name)).cloned().collect();
        gone.into_iter().for_each(|name| controller.set_service(name, None));
    }

    /// Runs passes and applies their writes until a pass has none; returns the reasons of all Events.
    fn settle(&mut self, controller: &mut Controller) -> Vec<String> {
        let mut reasons = Vec::new();
        for _ in 0..10 {
            self.show(controller);
            let pass = controller.pass();
            let notice = |notice: &Notice| format!("{} {}", notice.service.name, notice.reason);
            reasons.extend(pass.notices.iter().map(notice));
            if pass.writes.is_empty() {
                return reasons;
            }
            for write in &pass.writes {
                assert!(self.write(write), "{write:?} {:?}", self.services[&write.service]);
                controller.written(write);
                reasons.extend(write.notices.iter().map(notice));
            }
        }
        panic!("no end of writes: {:?}", self.services);
    }
}

fn pool(addresses: &[&str]) -> Pool {
    pool_named("a", addresses)
}

fn pool_named(name: &str, addresses: &[&str]) -> Pool {
    let object = json!({"metadata": {"name": name, "namespace": "m"}, "spec": {"addresses": addresses}});
    Pool::new(&read(&object)).unwrap()
}

fn with_pool(addresses: &[&str]) -> Controller {
    let mut controller = Controller::new(None);
    controller.set_pool(name("a"), Some((None, pool(addresses))));
    controller
}

#[test]
fn service_gets_an_address_and_one_event() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
    server.put("web", json!({}));
    assert_eq!(server.settle(&mut controller), ["web IPAllocated"]);
    assert_eq!(server.ingress("web"), "192.0.2.1");
    server.put("web", json!({"ports": [{"port": 81}]}));
    assert_eq!(server.settle(&mut controller), [""; 0]);
}

#[test]
fn exhausted_pool_is_told_once_and_the_next_free_address_is_given() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
    ["db", "web"].iter().for_each(|name| server.put(name, json!({})));
    assert_eq!(server.settle(&mut controller), ["web AllocationFailed", "db IPAllocated"]);
    assert_eq!(
        controller.conditions(),
        ["Service default/web: no address: no free address (IPv4) in pool \"a\""]
    );
    assert_eq!(server.settle(&mut controller), [""; 0]);
    server.services.remove(&name("db"));
    assert_eq!(server.settle(&mut controller), ["web IPAllocated"]);
    assert_eq!((server.ingress("web").as_str(), controller.conditions()), ("192.0.2.1", vec![]));
}

#[test]
fn another_leader_moves_no_service_although_a_rival_waits() {
    let mut server = Server::default();
    ["db", "web"].iter().for_each(|name| server.put(name, json!({})));
    server.settle(&mut with_pool(&["192.0.2.1/32", "192.0.2.2/32"]));
    // Both addresses are taken, so the Service "a" waits, although its name sorts before the names of the other
    // Services.
    server.put("a", json!({}));
    let mut next = with_pool(&["192.0.2.1/32", "192.0.2.2/32"]);
    assert_eq!(server.settle(&mut next), ["a AllocationFailed"]);
    assert_eq!([server.ingress("db"), server.ingress("web")], ["192.0.2.1", "192.0.2.2"]);
}

#[test]
fn service_keeps_its_address_when_its_pool_goes_also_under_another_leader() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
    server.put("web", json!({}));
    server.settle(&mut controller);
    controller.set_pool(name("a"), Some((None, pool(&["198.51.100.0/24"]))));
    assert_eq!(server.settle(&mut controller), ["web PoolGone"]);
    let mut next = with_pool(&["198.51.100.0/24"]);
    assert_eq!(server.settle(&mut next), ["web PoolGone"]);
    next.set_pool(name("a"), None);
    server.settle(&mut next);
    assert_eq!(server.ingress("web"), "192.0.2.1");
}

#[test]
fn address_is_taken_back_when_the_service_is_no_load_balancer() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
    server.put("web", json!({}));
    server.put("x", json!({}));
    server.settle(&mut controller);
    server.put("web", json!({"type": "ClusterIP"}));
    server.settle(&mut controller);
    assert_eq!([server.ingress("web"), server.ingress("x")], ["", "192.0.2.1"]);
    assert_eq!(server.services[&name("web")]["metadata"]["annotations"], json!({}));
}

#[test]
fn controllers_of_two_classes_leave_each_other_alone() {
    let mut server = Server::default();
    server.put("plain", json!({}));
    server.put("classed", json!({"loadBalancerClass": "example.com/lb"}));
    let mut plain = with_pool(&["192.0.2.1/32"]);
    let mut classed = Controller::new(Some("example.com/lb"));
    classed.set_pool(name("b"), Some((None, pool(&["198.51.100.1/32"]))));
    for _ in 0..3 {
        server.settle(&mut plain);
        server.settle(&mut classed);
        assert_eq!([server.ingress("plain"), server.ingress("classed")], ["192.0.2.1", "198.51.100.1"]);
    }
}

#[test]
fn services_of_others_are_left_alone_and_their_addresses_are_given_to_nobody() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1-192.0.2.2"]));
    let classed = json!({"loadBalancerClass": "example.com/lb"});
    server.put("classed", classed);
    server.set_ingress("classed", json!([{"ip": "192.0.2.1"}]));
    server.set_ingress("cloud", json!([{"ip": "203.0.113.7", "ipMode": "Proxy"}]));
    server.set_ingress("named", json!([{"hostname": "lb.example.com"}]));
    server.put("waits", json!({"loadBalancerClass": "example.com/lb"}));
    let before = server.services.clone();
    assert_eq!(server.settle(&mut controller), [""; 0]);
    assert_eq!(server.services, before);
    server.put("web", json!({}));
    server.settle(&mut controller);
    assert_eq!(server.ingress("web"), "192.0.2.2");
}

#[test]
fn address_that_another_controller_adds_stays_and_never_counts_as_given() {
    let (ours, foreign) = (json!({"ip": "192.0.2.1"}), json!({"ip": "203.0.113.7"}));
    for status in [json!([ours, foreign]), json!([foreign, ours])] {
        // The pool exists, or is gone.
        for addresses in ["192.0.2.1/32", "198.51.100.0/24"] {
            let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
            server.put("web", json!({}));
            server.settle(&mut controller);
            controller.set_pool(name("a"), Some((None, pool(&[addresses]))));
            for mut controller in [controller, with_pool(&[addresses])] {
                server.set_ingress("web", status.clone());
                let events = server.settle(&mut controller);
                assert!(!events.contains(&"web IPAllocated".to_owned()), "{events:?}");
                assert_eq!(
                    server.services[&name("web")]["status"]["loadBalancer"]["ingress"],
                    status,
                    "{addresses}"
                );
                let annotations = &server.services[&name("web")]["metadata"]["annotations"];
                assert_eq!(annotations[GIVEN], "192.0.2.1");
            }
        }
    }
}

/// An administrator who has removed the other controller empties the status, so that a pool serves the Service.
#[test]
fn address_of_another_controller_does_not_come_back_when_the_status_is_emptied() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
    server.put("web", json!({}));
    server.set_ingress("web", json!([{"ip": "203.0.113.7"}]));
    server.settle(&mut controller);
    assert_eq!(server.ingress("web"), "203.0.113.7");
    for given in [json!([]), json!([{"ip": "192.0.2.1"}, {"ip": "203.0.113.7"}])] {
        server.set_ingress("web", given);
        server.settle(&mut controller);
        server.set_ingress("web", json!([]));
        server.settle(&mut controller);
        assert_eq!(server.ingress("web"), "192.0.2.1");
        assert_eq!(server.services[&name("web")]["metadata"]["annotations"][GIVEN], "192.0.2.1");
    }
}

#[test]
fn kept_address_of_an_earlier_controller_does_not_count_as_given() {
    let mut controller = Controller::new(Some("example.com/lb"));
    controller.set_pool(name("a"), Some((None, pool(&["192.0.2.1/32"]))));
    let mut server = Server::default();
    server.put("web", json!({"loadBalancerClass": "example.com/lb"}));
    server.set_ingress("web", json!([{"ip": "203.0.113.7"}]));
    assert_eq!(server.settle(&mut controller), ["web PoolGone"]);
    assert_eq!(server.ingress("web"), "203.0.113.7");
    assert_eq!(server.services[&name("web")]["metadata"]["annotations"], json!({}));
    controller.set_pool(name("b"), Some((None, pool_named("b", &["203.0.113.7/32"]))));
    server.settle(&mut controller);
    assert_eq!(server.services[&name("web")]["metadata"]["annotations"], json!({GIVEN: "203.0.113.7"}));
}

#[test]
fn nothing_is_written_without_a_pool() {
    let (mut server, mut controller) = (Server::default(), Controller::new(None));
    server.put("web", json!({}));
    assert_eq!((server.settle(&mut controller), controller.conditions()), (vec![], vec![]));
    controller.set_pool(name("a"), Some((None, pool(&["192.0.2.1/32"]))));
    assert_eq!(server.settle(&mut controller), ["web IPAllocated"]);
}

#[test]
fn older_of_two_services_keeps_an_address_that_both_have_and_both_are_told() {
    let mut server = Server::default();
    ["old", "new"].iter().for_each(|name| server.set_ingress(name, json!([{"ip": "192.0.2.1"}])));
    let mut controller = with_pool(&["192.0.2.1-192.0.2.2"]);
    let mut told = server.settle(&mut controller);
    told.sort();
    assert_eq!(told, ["new AddressConflict", "new IPAllocated", "old AddressConflict"]);
    assert_eq!([server.ingress("old"), server.ingress("new")], ["192.0.2.1", "192.0.2.2"]);
    // The conflict is resolved, and stays listed for some minutes.
    let listed = controller.conditions();
    let [line] = &listed[..] else { panic!("{listed:?}") };
    assert!(
        line.starts_with("Services default/old and default/new both had 192.0.2.1")
            && line.contains("10 minutes"),
        "{line}"
    );
    let expiry = controller.next_expiry().unwrap();
    controller.set_time(expiry - Duration::from_secs(1));
    assert_eq!(controller.conditions(), listed);
    controller.set_time(expiry);
    assert_eq!((controller.conditions(), controller.next_expiry()), (vec![], None));
}

#[test]
fn older_of_two_services_keeps_an_address_that_both_have_even_if_the_younger_names_it() {
    let mut server = Server::default();
    ["old", "new"].iter().for_each(|name| server.set_ingress(name, json!([{"ip": "192.0.2.1"}])));
    server.put("new", json!({"loadBalancerIP": "192.0.2.1"}));
    let mut controller = with_pool(&["192.0.2.1-192.0.2.2"]);
    server.settle(&mut controller);
    assert_eq!([server.ingress("old"), server.ingress("new")], ["192.0.2.1", ""]);
    // If the older Service names another address, the younger Service keeps the address that it names.
    server.set_ingress("new", json!([{"ip": "192.0.2.1"}]));
    server.put("old", json!({"loadBalancerIP": "192.0.2.2"}));
    server.settle(&mut with_pool(&["192.0.2.1-192.0.2.2"]));
    assert_eq!([server.ingress("old"), server.ingress("new")], ["192.0.2.2", "192.0.2.1"]);
}

#[test]
fn last_holder_of_an_address_is_written_before_the_next_one() {
    let mut server = Server::default();
    let mut controller = with_pool(&["192.0.2.0-192.0.2.1"]);
    server.put("z", json!({}));
    server.settle(&mut controller);
    // `z` leaves 192.0.2.0, which is the only address for `a`.
    server.put("z", json!({"loadBalancerIP": "192.0.2.1"}));
    server.put("a", json!({}));
    server.show(&mut controller);
    let services = |pass: &Pass| pass.writes.iter().map(|it| it.service.name.to_string()).collect::<Vec<_>>();
    let pass = controller.pass();
    assert_eq!(services(&pass), ["z"]);
    pass.writes.iter().for_each(|write| controller.failed(&write.service));
    let pass = controller.pass();
    assert_eq!(services(&pass), ["z"], "the write of z has failed");
    assert!(server.write(&pass.writes[0]));
    controller.written(&pass.writes[0]);
    assert_eq!(services(&controller.pass()), ["a"]);
}

#[test]
fn conflict_stays_listed_while_its_write_fails_and_goes_with_a_deleted_service() {
    let mut server = Server::default();
    ["old", "new"].iter().for_each(|name| server.set_ingress(name, json!([{"ip": "192.0.2.1"}])));
    let mut controller = with_pool(&["192.0.2.1-192.0.2.2"]);
    server.show(&mut controller);
    for minute in 1..30 {
        controller.set_time(Duration::from_secs(60 * minute));
        controller.pass().writes.iter().for_each(|write| controller.failed(&write.service));
        assert_eq!(controller.conditions().len(), 1, "{:?}", controller.conditions());
    }
    server.services.remove(&name("new"));
    server.show(&mut controller);
    assert_eq!(controller.conditions(), [""; 0]);
}

#[test]
fn service_that_begins_to_require_both_families_of_a_pool_with_one_keeps_its_address() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
    server.put("web", json!({"ipFamilyPolicy": "SingleStack"}));
    server.settle(&mut controller);
    server.put("web", json!({"ipFamilyPolicy": "RequireDualStack", "clusterIPs": ["10.96.0.1", "fd00::1"]}));
    assert_eq!(server.settle(&mut controller), ["web AllocationFailed"]);
    assert_eq!(server.ingress("web"), "192.0.2.1");
    let conditions = controller.conditions();
    assert!(conditions[0].ends_with("; the Service keeps the address that it has"), "{conditions:?}");
    controller.set_pool(name("a"), Some((None, pool(&["192.0.2.1/32", "2001:db8::1/128"]))));
    assert_eq!(server.settle(&mut controller), ["web IPAllocated"]);
    assert_eq!(server.ingress("web"), "192.0.2.1,2001:db8::1");
}

#[test]
fn version_from_before_a_write_does_not_undo_it() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1-192.0.2.9"]));
    server.put("web", json!({"loadBalancerIP": "192.0.2.5"}));
    server.settle(&mut controller);
    server.put("web", json!({"loadBalancerIP": null}));
    controller.set_service(name("web"), Some(&read(&server.services[&name("web")])));
    let old: api::Service = read(&server.services[&name("web")]);
    server.put("web", json!({"loadBalancerIP": "192.0.2.7"}));
    server.show(&mut controller);
    let [write] = &controller.pass().writes[..] else { panic!("one write") };
    assert!(server.write(write));
    controller.written(write);
    controller.set_service(name("web"), Some(&old));
    let stale = controller.pass().writes;
    assert!(stale.iter().all(|write| !server.write(write)), "{stale:?}");
    server.settle(&mut controller);
    assert_eq!(server.ingress("web"), "192.0.2.7");
}

#[test]
fn failed_write_is_computed_again_from_the_newest_version() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
    server.put("web", json!({}));
    server.show(&mut controller);
    let [write] = &controller.pass().writes[..] else { panic!("one write") };
    server.put("web", json!({"ports": [{"port": 81}]}));
    assert!(!server.write(write), "the version is old");
    controller.failed(&write.service);
    assert_eq!(server.settle(&mut controller), ["web IPAllocated"]);
}

#[test]
fn emptied_status_is_filled_again_with_the_same_address() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1-192.0.2.9"]));
    server.put("web", json!({}));
    server.settle(&mut controller);
    server.set_ingress("web", json!([]));
    server.settle(&mut controller);
    assert_eq!(server.ingress("web"), "192.0.2.1");
}

#[test]
fn annotation_alone_gives_no_address() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
    server.put("web", json!({}));
    server.services.get_mut(&name("web")).unwrap()["metadata"]["annotations"] = json!({GIVEN: "203.0.113.1"});
    server.settle(&mut controller);
    assert_eq!(server.ingress("web"), "192.0.2.1");
}

#[test]
fn older_pool_stays_in_use_beside_a_new_one_that_overlaps() {
    let mut controller = Controller::new(None);
    let mut set = |pool: &str, created: &str, addresses| {
        let created = Some(created.to_owned());
        controller.set_pool(name(pool), Some((created, pool_named(pool, &[addresses]))));
    };
    set("z", "2026-01-01T00:00:00Z", "192.0.2.0/24");
    set("a", "2026-01-02T00:00:00Z", "192.0.2.0/30");
    controller.set_reserved(vec!["10.96.0.0/12".parse().unwrap()]);
    controller.pass();
    assert_eq!(controller.usage(), [PoolUsage { pool: "z".into(), used: 0, total: 256 }]);
    assert!(
        controller.conditions()[0].starts_with("pool \"a\" is not used: its 192.0.2.0-192.0.2.3 overlaps")
    );
}

#[test]
fn pool_of_cluster_ips_or_pods_is_not_used() {
    for (reserved, addresses) in
        [("10.96.0.0/12", "10.97.0.0/28"), ("10.244.0.0/16", "10.244.3.0/28"), ("fd00::/48", "fd00::/112")]
    {
        let (mut server, mut controller) = (Server::default(), with_pool(&[addresses]));
        controller.set_reserved(vec![reserved.parse().unwrap()]);
        server.put("web", json!({"clusterIPs": ["10.96.0.1"]}));
        server.settle(&mut controller);
        let conditions = controller.conditions();
        let why = "which is a network of cluster IPs or pods";
        assert!(
            conditions[0].starts_with("pool \"a\" is not used") && conditions[0].ends_with(why),
            "{conditions:?}"
        );
        assert_eq!(server.ingress("web"), "");
    }
}

#[test]
fn reassign_moves_the_service_of_a_deleted_pool_and_emits_both_events() {
    for (reassign, events, ingress) in [
        (false, vec!["web PoolGone"], "192.0.2.1"),
        (true, vec!["web ClearAssignment", "web IPAllocated"], "198.51.100.1"),
    ] {
        let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
        controller.set_reassign(reassign, true);
        server.put("web", json!({}));
        server.settle(&mut controller);
        controller.set_pool(name("a"), None);
        controller.set_pool(name("b"), Some((None, pool_named("b", &["198.51.100.1/32"]))));
        assert_eq!(server.settle(&mut controller), events);
        assert_eq!(server.ingress("web"), ingress);
        let mut next = Controller::new(None);
        next.set_reassign(reassign, true);
        next.set_pool(name("b"), Some((None, pool_named("b", &["198.51.100.1/32"]))));
        server.settle(&mut next);
        assert_eq!(server.ingress("web"), ingress, "the next leader agrees");
    }
}

#[test]
fn reassign_leaves_addresses_of_other_controllers() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
    controller.set_reassign(true, true);
    server.set_ingress("cloud", json!([{"ip": "203.0.113.1"}]));
    assert_eq!(server.settle(&mut controller), [""; 0]);
    assert_eq!(server.ingress("cloud"), "203.0.113.1");
}

#[test]
fn reassign_without_a_free_address_clears_the_status_and_says_so() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
    controller.set_reassign(true, true);
    server.put("web", json!({}));
    server.settle(&mut controller);
    let other = json!({"metadata": {"name": "a", "namespace": "m"},
        "spec": {"addresses": ["198.51.100.1/32"], "serviceAllocation": {"namespaces": ["prod"]}}});
    controller.set_pool(name("a"), Some((None, Pool::new(&read(&other)).unwrap())));
    assert_eq!(server.settle(&mut controller), ["web AllocationFailed", "web ClearAssignment"]);
    assert_eq!(server.ingress("web"), "");
    controller.set_pool(name("a"), Some((None, pool(&["192.0.2.1/32"]))));
    assert_eq!(server.settle(&mut controller), ["web IPAllocated"]);
    assert_eq!(server.ingress("web"), "192.0.2.1");
}

#[test]
fn sharers_with_a_port_in_common_get_an_event() {
    let (mut server, mut controller) = (Server::default(), with_pool(&["192.0.2.1/32"]));
    for service in ["db", "web"] {
        server.put(service, json!({"loadBalancerIP": "192.0.2.1"}));
        let annotations = &mut server.services.get_mut(&name(service)).unwrap()["metadata"]["annotations"];
        annotations["metallb.io/allow-shared-ip"] = json!("key");
    }
    server.show(&mut controller);
    let pass = controller.pass();
    let [notice] = &pass.notices[..] else { panic!("{:?}", pass.notices) };
    assert_eq!((&*notice.service.name, notice.reason), ("web", "AllocationFailed"));
    assert!(
        notice.note.contains("Service default/db has 192.0.2.1: they have a port in common"),
        "{}",
        notice.note
    );
    let [write] = &pass.writes[..] else { panic!("{:?}", pass.writes) };
    assert_eq!(&*write.service.name, "db");
}

#[derive(Clone, Debug)]
enum Happens {
    Put {
        service: usize,
        named: Option<u8>,
        shared: bool,
        port: u16,
    },
    ClusterIp(usize),
    Delete(usize),
    Pool(u8, u8),
    NextLeader,
    /// The leader computes writes for all Services, but only this many of them arrive.
    Writes(usize),
}

fn histories() -> impl Strategy<Value = Vec<Happens>> {
    let put = (0..5usize, proptest::option::weighted(0.2, 0..8u8), any::<bool>(), 1..3u16);
    let put = put.prop_map(|(service, named, shared, port)| Happens::Put { service, named, shared, port });
    let one = prop_oneof![
        6 => put,
        1 => (0..5usize).prop_map(Happens::ClusterIp),
        2 => (0..5usize).prop_map(Happens::Delete),
        1 => (0..8u8, 0..5u8).prop_map(|(first, more)| Happens::Pool(first, more)),
        2 => Just(Happens::NextLeader),
        5 => (0..4usize).prop_map(Happens::Writes),
    ];
    collection::vec(one, 1..40)
}

proptest! {
    /// Under random changes, lost writes and changes of the leader, a Service of type LoadBalancer keeps its address if
    /// it has never requested a specific address or had a sharing key. In the end, no address belongs to two Services
    /// that may not share it.
    #[test]
    fn no_history_gives_an_address_twice_or_moves_an_idle_service(history in histories()) {
        let mut server = Server::default();
        let mut addresses = "192.0.2.0-192.0.2.5".to_owned();
        let leader = |addresses: &String| with_pool(&[addresses.as_str()]);
        let mut controller = leader(&addresses);
        // Services that have named or shared an address at some time, so that their addresses may move.
        let mut askers = BTreeSet::new();
        for happens in history {
            let before = server.clone();
            let mut touched = BTreeSet::new();
            match happens {
                Happens::Put { service, named, shared, port } => {
                    let service = format!("s{service}");
                    if named.is_some() || shared {
                        askers.insert(name(&service));
                    }
                    let named = named.map(|last| format!("192.0.2.{last}"));
                    server.put(&service, json!({"type": "LoadBalancer", "loadBalancerIP": named, "ports": [{"port": port}]}));
                    let annotations = &mut server.services.get_mut(&name(&service)).unwrap()["metadata"]["annotations"];
                    annotations["metallb.io/allow-shared-ip"] = if shared { json!("k") } else { json!("") };
                }
                Happens::ClusterIp(service) if server.services.contains_key(&name(&format!("s{service}"))) => {
                    server.put(&format!("s{service}"), json!({"type": "ClusterIP"}));
                }
                Happens::ClusterIp(_) => {}
                Happens::Delete(service) => _ = server.services.remove(&name(&format!("s{service}"))),
                Happens::Pool(first, more) => {
                    addresses = format!("192.0.2.{first}-192.0.2.{}", first + more);
                    controller.set_pool(name("a"), Some((None, pool(&[&addresses]))));
                }
                Happens::NextLeader => controller = leader(&addresses),
                Happens::Writes(count) => {
                    server.show(&mut controller);
                    let pass = controller.pass();
                    for (index, write) in pass.writes.iter().enumerate() {
                        if index < count && server.write(write) {
                            controller.written(write);
                            touched.insert(write.service.clone());
                        } else {
                            controller.failed(&write.service);
                        }
                    }
                }
            }
            // If a `LoadBalancer` Service has addresses, a write changes them only if the Service is in `askers`.
            for service in touched {
                let (old, new) = (&before.services[&service], &server.services[&service]);
                let had = old["status"]["loadBalancer"]["ingress"].as_array().is_some_and(|list| !list.is_empty());
                let asks = askers.contains(&service);
                let is_served = old["spec"]["type"] == "LoadBalancer";
                prop_assert!(!had || asks || !is_served || old["status"] == new["status"], "{old} {new}");
            }
        }
        // In the end everything settles, and no address belongs to two Services that may not share it.
        server.settle(&mut controller);
        let mut holders: BTreeMap<String, Vec<AddressRequest>> = BTreeMap::new();
        for object in server.services.values() {
            let seen = Seen::new(&read(object), None);
            prop_assert!(seen.request.as_ref().unwrap().is_some() || seen.has.is_empty(), "{object}");
            for ip in &seen.has {
                let others = holders.entry(ip.to_string()).or_default();
                let request = seen.request.clone().unwrap().unwrap();
                prop_assert!(others.iter().all(|other| other.terms.allow(&request.terms)), "{ip}");
                others.push(request);
            }
        }
    }
}
