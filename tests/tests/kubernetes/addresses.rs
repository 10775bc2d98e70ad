//! Tests of the controller that assigns addresses to Services of type `LoadBalancer`. It runs as a library in this
//! process, with a short Lease; one test runs a whole agent.

use std::{fs, path::PathBuf, thread, time::Duration};

use lb_agent::kubernetes::{
    self,
    addresses::{AddressOptions, AddressReport},
    events,
};
use lb_core::lease::Timing;
use lb_tests::{
    cleanup::{Cleanup, Resource},
    netns::unique_prefix,
    wait_for,
};
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};

use crate::{
    api_server::{ApiServer, Fault},
    bed::{A_WHILE, Bed, LIMIT},
    cluster::Cluster,
};

const TIMING: Timing = Timing {
    lease: Duration::from_secs(2),
    act: Duration::from_millis(1500),
    retry: Duration::from_millis(300),
    request: Duration::from_millis(700),
};

/// A mock API server, and what controllers need to assign addresses.
struct World {
    server: ApiServer,
    cluster: Cluster,
    kubeconfig: PathBuf,
    /// Whether controllers run with `--load-balancer-reassign`.
    reassign: bool,
    _folder: Cleanup,
}

/// A controller that runs in a thread of this process until this is dropped.
struct Agent {
    report: watch::Receiver<AddressReport>,
    /// Makes the controller give the Lease up.
    release: watch::Sender<bool>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl World {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("{}addresses", unique_prefix()));
        let cleanup = Cleanup::of(Resource::Folder(folder.clone()));
        fs::create_dir_all(&folder).unwrap();
        let server = ApiServer::start(None);
        let kubeconfig = folder.join("kubeconfig");
        fs::write(&kubeconfig, server.kubeconfig()).unwrap();
        let cluster = Cluster::outside(&server.kubeconfig());
        Self { server, cluster, kubeconfig, reassign: false, _folder: cleanup }
    }

    fn agent(&self, node: &str) -> Agent {
        let options = AddressOptions {
            node_name: node.to_owned(),
            class: None,
            reassign: self.reassign,
            reserved: vec!["10.96.0.0/12".parse().unwrap()],
            timing: TIMING,
        };
        let (report_sender, report) = watch::channel(AddressReport::default());
        let (stop, stopped) = oneshot::channel();
        let (release, released) = watch::channel(false);
        let kubeconfig = self.kubeconfig.clone();
        let thread = thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let server = kubernetes::ApiServer::Kubeconfig(kubeconfig);
                let (events, outbox) = kubernetes::Events::channel();
                let (_cidrs, cidrs) = watch::channel(Vec::new());
                let node = options.node_name.clone();
                let run = kubernetes::addresses::run;
                tokio::select! {
                    ended = run(server.clone(), options, cidrs, events, report_sender, released) => ended.unwrap(),
                    ended = events::run(server, &node, outbox) => panic!("{ended:?}"),
                    _ = stopped => {}
                }
            });
        });
        Agent { report, release, stop: Some(stop), thread: Some(thread) }
    }

    fn pool(&self, addresses: &str) {
        self.cluster.apply(&pool(addresses));
    }

    fn balancer(&self, name: &str) {
        self.cluster.apply(&balancer(name));
    }

    fn service(&self, name: &str) -> Value {
        self.server.object("services", "default", name).unwrap()
    }

    /// The entries in `status.loadBalancer.ingress` of a Service.
    fn ingress(&self, name: &str) -> Vec<Value> {
        self.service(name)["status"]["loadBalancer"]["ingress"].as_array().cloned().unwrap_or_default()
    }

    fn has(&self, name: &str, ip: &str) -> bool {
        self.ingress(name).iter().any(|entry| entry["ip"] == ip)
    }

    /// The Events about a Service, each as `REASON: NOTE`.
    fn events(&self, name: &str) -> Vec<String> {
        let events = self.server.events().into_iter().filter(|event| event["regarding"]["name"] == name);
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        events.map(|event| format!("{}: {}", text(&event["reason"]), text(&event["note"]))).collect()
    }

    #[track_caller]
    fn wait_until(&self, what: &str, probe: impl Fn(&Self) -> bool) {
        if wait_for(LIMIT, || probe(self).then_some(())).is_none() {
            let services: Vec<_> =
                ["web", "db", "x"].map(|name| self.server.object("services", "default", name)).into();
            panic!("not within {LIMIT:?}: {what}; {services:?}; {:?}", self.server.events());
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.server.stop();
    }
}

impl Agent {
    fn leads(&self) -> bool {
        self.report.borrow().is_here
    }

    /// Waits until exactly one of the agents leads; returns its index.
    fn leader(agents: &[Self]) -> usize {
        let leader = || {
            let leaders: Vec<usize> = (0..agents.len()).filter(|index| agents[*index].leads()).collect();
            if let [leader] = leaders[..] { Some(leader) } else { None }
        };
        wait_for(LIMIT, leader).expect("exactly one agent leads")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

fn pool(addresses: &str) -> Value {
    json!({
        "apiVersion": "metallb.io/v1beta1", "kind": "IPAddressPool",
        "metadata": {"namespace": "metallb-system", "name": "production"}, "spec": {"addresses": [addresses]},
    })
}

fn balancer(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "default", "name": name},
        "spec": {"type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ports": [{"port": 80}]},
    })
}

#[test]
fn service_gets_an_address_with_its_mode_and_an_event() {
    let world = World::new();
    world.pool("192.0.2.1-192.0.2.9");
    let agent = world.agent("a");
    world.balancer("web");
    world.wait_until("an address", |world| world.has("web", "192.0.2.1"));
    assert_eq!(world.ingress("web"), [json!({"ip": "192.0.2.1", "ipMode": "VIP"})]);
    world.wait_until("an Event", |world| {
        world.events("web") == ["IPAllocated: assigned 192.0.2.1 from pool \"production\""]
    });
    let event = &world.server.events()[0];
    assert_eq!(
        event["regarding"]["uid"],
        world.service("web")["metadata"]["uid"],
        "kubectl describe finds it by uid"
    );
    world.wait_until("a report", |_| {
        agent.report.borrow().pools.first().is_some_and(|pool| (pool.used, pool.total) == (1, 9))
    });
    world.cluster.apply(&{
        let mut service = balancer("web");
        service["spec"]["type"] = json!("ClusterIP");
        service
    });
    world.wait_until("its release", |world| world.ingress("web").is_empty());
}

#[test]
fn leader_that_stops_releases_the_lease() {
    let world = World::new();
    world.pool("192.0.2.1-192.0.2.9");
    let agents = [world.agent("a"), world.agent("b")];
    let leader = Agent::leader(&agents);
    agents[leader].release.send_replace(true);
    let lease = || world.server.object("leases", "default", "lb-agent-addresses").unwrap();
    world.wait_until("its release", |_| !agents[leader].leads() && agents[leader].release.is_closed());
    let holder = lease()["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned();
    assert!(holder.is_empty() || holder.starts_with(["b", "a"][leader]), "{holder}");
    world.balancer("web");
    world.wait_until("an address by the next leader", |world| world.has("web", "192.0.2.1"));
    world.wait_until("the next leader", |_| agents[1 - leader].leads());
}

#[test]
fn next_leader_changes_no_address() {
    let world = World::new();
    world.pool("192.0.2.1-192.0.2.9");
    let mut agents = vec![world.agent("a"), world.agent("b")];
    ["web", "db"].iter().for_each(|name| world.balancer(name));
    world.wait_until("addresses", |world| ["web", "db"].iter().all(|name| world.ingress(name).len() == 1));
    let before = ["web", "db"].map(|name| world.service(name));
    let leader = Agent::leader(&agents);
    drop(agents.remove(leader));
    // If the next leader assigned all addresses again, "a", the first Service by name, would get 192.0.2.1.
    world.balancer("a");
    world.wait_until("an address by the next leader", |world| world.has("a", "192.0.2.3"));
    world.wait_until("the next leader", |_| agents[0].leads());
    assert_eq!(["web", "db"].map(|name| world.service(name)), before);
}

#[test]
fn restarted_agent_changes_no_address() {
    let world = World::new();
    world.pool("192.0.2.1-192.0.2.2");
    let agent = world.agent("a");
    world.balancer("web");
    world.wait_until("an address", |world| world.has("web", "192.0.2.1"));
    drop(agent);
    let before = world.service("web");
    world.balancer("a");
    let _agent = world.agent("a");
    world.wait_until("another address", |world| world.has("a", "192.0.2.2"));
    assert_eq!(world.service("web"), before);
}

#[test]
fn exhausted_pool_is_reported_and_a_freed_address_is_assigned() {
    let world = World::new();
    world.pool("192.0.2.1/32");
    let agent = world.agent("a");
    world.balancer("web");
    world.wait_until("an address", |world| world.has("web", "192.0.2.1"));
    world.balancer("x");
    world.wait_until("an Event", |world| {
        world.events("x") == ["AllocationFailed: no address: no free address (IPv4) in pool \"production\""]
    });
    let condition = "Service default/x: no address: no free address (IPv4) in pool \"production\"";
    world.wait_until("a condition", |_| agent.report.borrow().conditions == [condition]);
    world.cluster.delete(&balancer("web"));
    world.wait_until("the freed address", |world| world.has("x", "192.0.2.1"));
    world.wait_until("no condition", |_| agent.report.borrow().conditions.is_empty());
}

#[test]
fn refused_write_is_retried() {
    let world = World::new();
    world.pool("192.0.2.1/32");
    world.server.set_fault("services", Fault { status_patch: Some(409), ..Fault::default() });
    let _agent = world.agent("a");
    world.balancer("web");
    world.wait_until("two attempts", |world| world.server.refused_writes() >= 2);
    assert_eq!(world.ingress("web"), [] as [Value; 0]);
    world.server.set_fault("services", Fault::default());
    world.wait_until("an address", |world| world.has("web", "192.0.2.1"));
}

#[test]
fn write_that_keeps_failing_is_a_condition_and_is_not_sent_at_each_event() {
    let world = World::new();
    world.pool("192.0.2.1/32");
    world.server.set_fault("services", Fault { status_patch: Some(403), ..Fault::default() });
    let agent = world.agent("a");
    world.balancer("web");
    let told = |agent: &Agent| {
        let conditions = agent.report.borrow().conditions.clone();
        conditions.iter().any(|text| text.contains("Service default/web") && text.contains("403"))
    };
    world.wait_until("a condition", |_| told(&agent));
    let before = world.server.refused_writes();
    for turn in 0..50 {
        let mut pool = pool("192.0.2.1/32");
        pool["metadata"]["labels"] = json!({"turn": turn.to_string()});
        world.cluster.apply(&pool);
        thread::sleep(Duration::from_millis(10));
    }
    assert!(world.server.refused_writes() - before <= 3, "{before} and {}", world.server.refused_writes());
    world.server.set_fault("services", Fault::default());
    world.wait_until("an address", |world| world.has("web", "192.0.2.1"));
    world.wait_until("no condition", |_| agent.report.borrow().conditions.is_empty());
}

#[test]
fn service_that_keeps_changing_gets_its_address_and_loses_no_change() {
    let world = World::new();
    let _agent = world.agent("a");
    world.balancer("web");
    world.pool("192.0.2.1/32");
    world.wait_until("an address", |world| {
        let mut service = balancer("web");
        service["metadata"]["labels"] = json!({"turn": "first"});
        world.cluster.apply(&service);
        world.has("web", "192.0.2.1")
    });
    for turn in 0..20 {
        let mut service = balancer("web");
        service["metadata"]["labels"] = json!({"turn": turn.to_string()});
        world.cluster.apply(&service);
    }
    thread::sleep(A_WHILE);
    assert!(world.has("web", "192.0.2.1"));
    assert_eq!(world.service("web")["metadata"]["labels"]["turn"], "19");
}

#[test]
fn services_of_other_controllers_are_not_touched() {
    let world = World::new();
    world.pool("192.0.2.1-192.0.2.9");
    let mut classed = balancer("classed");
    classed["spec"]["loadBalancerClass"] = json!("example.com/lb");
    classed["status"] = json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}});
    let mut cloud = balancer("cloud");
    cloud["status"] = json!({"loadBalancer": {"ingress": [{"ip": "203.0.113.7", "ipMode": "Proxy"}]}});
    [&classed, &cloud].iter().for_each(|service| world.cluster.apply(service));
    let before = ["classed", "cloud"].map(|name| world.service(name));
    let _agent = world.agent("a");
    world.balancer("web");
    // The controller never assigns an address of its pool that another controller has assigned.
    world.wait_until("an address", |world| world.has("web", "192.0.2.2"));
    assert_eq!(["classed", "cloud"].map(|name| world.service(name)), before);
}

#[test]
fn services_are_neither_listed_nor_written_before_the_pool_crd_exists() {
    let world = World::new();
    world.server.set_fault("ipaddresspools", Fault { status: Some(404), ..Fault::default() });
    let agent = world.agent("a");
    world.balancer("web");
    world.wait_until("a leader", |_| agent.leads());
    thread::sleep(A_WHILE);
    assert_eq!(world.server.counts("services"), (0, 0), "without pools it costs nothing");
    assert_eq!(agent.report.borrow().conditions, [""; 0]);
    world.pool("192.0.2.1/32");
    world.server.set_fault("ipaddresspools", Fault::default());
    world.wait_until("an address", |world| world.has("web", "192.0.2.1"));
}

#[test]
fn service_keeps_its_address_when_its_pool_is_deleted() {
    let world = World::new();
    world.pool("192.0.2.1/32");
    let _agent = world.agent("a");
    world.balancer("web");
    world.wait_until("an address", |world| world.has("web", "192.0.2.1"));
    world.cluster.delete(&pool(""));
    world.wait_until("an Event", |world| {
        world.events("web").iter().any(|event| event.starts_with("PoolGone: 192.0.2.1 is in no pool"))
    });
    assert!(world.has("web", "192.0.2.1"));
}

#[test]
fn pool_in_the_pod_networks_of_a_node_is_refused() {
    let world = World::new();
    let node = |name: &str, network: &str| {
        let spec = json!({"podCIDRs": ["fd00:1::/64", network]});
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": spec})
    };
    world.cluster.apply(&node("n1", "192.0.2.0/24"));
    world.cluster.apply(&node("n2", "198.51.100.0/24"));
    world.pool("192.0.2.1/32");
    let agent = world.agent("a");
    world.balancer("web");
    let refused = "pool \"production\" is not used: its 192.0.2.1-192.0.2.1 overlaps 192.0.2.0-192.0.2.255, \
                   which is a network of cluster IPs or pods";
    world.wait_until("a condition", |_| agent.report.borrow().conditions.iter().any(|it| it == refused));
    assert_eq!(world.ingress("web"), Vec::<Value>::new());
    world.cluster.delete(&node("n1", ""));
    world.wait_until("an address", |world| world.has("web", "192.0.2.1"));
    // A Node that comes later makes the pool unusable, and the Service keeps the address that it has.
    world.cluster.apply(&node("n3", "192.0.2.0/25"));
    world.wait_until("a condition again", |_| {
        agent.report.borrow().conditions.iter().any(|it| it.contains("192.0.2.0-192.0.2.127"))
    });
    assert!(world.has("web", "192.0.2.1"));
}

#[test]
fn addresses_of_nodes_in_a_pool_are_named_and_not_given() {
    let world = World::new();
    let node = |name: &str, type_: &str, address: &str| {
        let addresses = json!([{"type": "Hostname", "address": name}, {"type": type_, "address": address}]);
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": {"addresses": addresses}})
    };
    world.cluster.apply(&node("n1", "InternalIP", "192.0.2.1"));
    world.cluster.apply(&node("n2", "ExternalIP", "192.0.2.2"));
    world.pool("192.0.2.1-192.0.2.3");
    let agent = world.agent("a");
    world.balancer("web");
    world.wait_until("an address", |world| world.has("web", "192.0.2.3"));
    let condition = "pool \"production\" contains addresses of Nodes: 192.0.2.1 (n1), 192.0.2.2 (n2);";
    world.wait_until("a condition", |_| {
        agent.report.borrow().conditions.iter().any(|it| it.starts_with(condition))
    });
}

#[test]
fn service_whose_pool_changes_gets_another_address_with_reassign() {
    let mut world = World::new();
    world.reassign = true;
    world.pool("192.0.2.1/32");
    let agent = world.agent("a");
    world.balancer("web");
    world.wait_until("an address", |world| world.has("web", "192.0.2.1"));
    let mut invalid = pool("x");
    invalid["metadata"]["name"] = json!("invalid");
    world.server.put(invalid.clone());
    world.wait_until("a condition", |_| agent.report.borrow().conditions.len() == 1);
    world.pool("198.51.100.1/32");
    world.wait_until("an Event", |world| {
        world.events("web").iter().any(|event| event.starts_with("PoolGone: 192.0.2.1 is in no pool"))
    });
    assert!(world.has("web", "192.0.2.1"), "its address may be in the invalid pool");
    world.cluster.delete(&invalid);
    world.wait_until("another address", |world| world.has("web", "198.51.100.1"));
    assert_eq!(world.ingress("web").len(), 1);
    world.wait_until("an Event about that", |world| {
        let note = "ClearAssignment: took 192.0.2.1 away: no pool contains it; now 198.51.100.1";
        world.events("web").iter().any(|event| event == note)
    });
}

#[test]
fn agent_serves_the_address_that_it_assigned() {
    let mut bed = Bed::with_faults();
    let mut service = bed.service("a", 1);
    service["spec"]["type"] = json!("LoadBalancer");
    bed.cluster.apply(&service);
    bed.cluster.apply(&bed.slice("a", 1));
    bed.cluster.apply(&pool("192.0.2.1/32"));
    bed.start_agent_with(&["--load-balancer-controller"]);
    bed.wait_until("the frontend", LIMIT, |bed| {
        let services = bed.json(&["service", "list"]).unwrap_or_default();
        let frontends = services[0]["frontends"].as_array().cloned().unwrap_or_default();
        frontends
            .iter()
            .any(|frontend| frontend["kind"] == "LoadBalancer" && frontend["address"] == "192.0.2.1")
    });
    let shown = || bed.json(&["status"]).unwrap()["agent"]["loadBalancers"].clone();
    let expected =
        json!({"leader": "a", "isHere": true, "pools": [{"name": "production", "used": 1, "total": 1}]});
    bed.wait_until("the report", LIMIT, |_| shown() == expected);
}
