//! Tests of the DNS names of Services.

mod clients;
mod follow;
mod intercept;
mod load;
mod stub;

use std::{
    fs,
    net::{Ipv4Addr, TcpListener, UdpSocket},
    time::Duration,
};

use etherparse::PacketBuilder;
use lb_tests::{agent::Agent, dns, resolver::Resolver, wait_for};

use crate::{
    bed::{Bed, vips},
    flood,
};

/// Arguments that start the DNS server at a loopback address, with an upstream server that never answers.
const DNS: [&str; 4] = ["--dns-bind-address", "127.0.0.1", "--dns-upstream", "127.0.0.9"];

const HEADLESS: &str = "\
apiVersion: v1
kind: Service
metadata: {name: db}
spec: {clusterIP: None, ports: [{name: sql, port: 5432}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-1, labels: {kubernetes.io/service-name: db}}
addressType: IPv4
ports: [{name: sql, port: 5432}]
endpoints:
- {addresses: [10.244.9.1], hostname: db-0}
- {addresses: [10.244.9.2], conditions: {ready: false}}
---
apiVersion: v1
kind: Service
metadata: {name: alias}
spec: {type: ExternalName, externalName: web.default.svc.cluster.local}
";

/// A cluster in which processes of node 1 resolve names with the agent's DNS server.
struct Names {
    bed: Bed,
    resolver: Resolver,
}

impl Names {
    fn new() -> Self {
        let mut bed = Bed::with_web(&["pod2"]);
        bed.agent = None;
        bed.start_agent_with(&DNS);
        let resolver = Resolver::new(bed.cluster.node1.clone(), bed.cluster.folder()).unwrap();
        Self { bed, resolver }
    }

    fn getent(&self, database: &str, name: &str) -> String {
        self.resolver.getent(database, name).unwrap()
    }

    fn addresses(&self, database: &str, name: &str) -> Vec<String> {
        self.resolver.addresses(database, name).unwrap()
    }

    fn wait_for(&self, name: &str, wanted: &[&str]) {
        let has = || (self.addresses("ahosts", name) == wanted).then_some(());
        wait_for(Duration::from_secs(3), has).unwrap_or_else(|| {
            panic!("{name} has {:?}, not {wanted:?}", self.addresses("ahosts", name));
        });
    }
}

#[test]
fn glibc_resolves_services_by_short_and_full_names() {
    let names = Names::new();
    for name in ["web", "web.default", "web.default.svc", "WEB.default.svc.cluster.local."] {
        assert_eq!(names.addresses("ahostsv4", name), ["10.96.0.10"], "{name}");
        assert_eq!(names.addresses("ahosts", name), ["10.96.0.10", "fd00:10:96::a"], "{name}");
    }
    assert_eq!(names.addresses("ahosts", "nothing.default"), [""; 0]);
    assert!(names.getent("hosts", "10.96.0.10").contains("web.default.svc.cluster.local"));
    assert!(names.getent("hosts", "fd00:10:96::a").contains("web.default.svc.cluster.local"));
}

#[test]
fn names_follow_the_manifests() {
    let names = Names::new();
    names.bed.cluster.manifests.write("db", HEADLESS).unwrap();
    names.wait_for("db", &["10.244.9.1"]);
    assert_eq!(names.addresses("ahosts", "db-0.db"), ["10.244.9.1"]);
    assert!(names.getent("hosts", "10.244.9.1").contains("db-0.db.default.svc.cluster.local"));
    assert_eq!(names.addresses("ahostsv4", "alias"), ["10.96.0.10"]);
    assert!(names.getent("ahosts", "alias").contains("web.default.svc.cluster.local"), "the canonical name");
    names.bed.put("second", vips(20), &[]);
    names.wait_for("second", &["10.96.0.20", "fd00:10:96::14"]);
    names.bed.cluster.manifests.remove("second").unwrap();
    names.wait_for("second", &[]);
}

#[test]
fn names_return_after_the_agent_was_killed() {
    let mut names = Names::new();
    let report = names.bed.status();
    assert_eq!(report["agent"]["dns"]["addresses"][0], "127.0.0.1:53", "{report}");
    names.bed.agent.take().unwrap().kill().unwrap();
    assert_eq!(names.addresses("ahosts", "web"), [""; 0]);
    names.bed.start_agent_with(&DNS);
    assert_eq!(names.addresses("ahostsv4", "web"), ["10.96.0.10"]);
}

/// Asserts that the agent starts and serves packets while another socket has the address of the agent's DNS server, and
/// that the DNS server answers queries once the address is free.
fn assert_waits_for_its_address<T>(holder: impl FnOnce(&Bed) -> T, transport: &str) {
    let mut bed = Bed::with_web(&["pod2"]);
    bed.agent = None;
    let held = holder(&bed);
    bed.start_agent_with(&DNS);
    let unserved = || bed.status()["agent"]["dns"]["unserved"]["127.0.0.1:53"].as_str().map(str::to_owned);
    let error = wait_for(Duration::from_secs(3), unserved).expect("status names the address");
    assert!(error.contains(transport), "{error}");
    let traffic = bed.traffic();
    traffic.progresses().unwrap();
    drop(held);
    let resolver = Resolver::new(bed.cluster.node1.clone(), bed.cluster.folder()).unwrap();
    let has = || (resolver.addresses("ahostsv4", "web").unwrap() == ["10.96.0.10"]).then_some(());
    wait_for(Duration::from_secs(8), has).expect("names are answered once the address is free");
    assert_eq!(unserved(), None);
    traffic.stop().assert_unharmed();
}

#[test]
fn taken_address_stops_neither_the_agent_nor_names_for_long() {
    assert_waits_for_its_address(
        |bed| bed.cluster.node1.run(|| UdpSocket::bind("127.0.0.1:53")).unwrap(),
        "UDP",
    );
    assert_waits_for_its_address(
        |bed| bed.cluster.node1.run(|| TcpListener::bind("127.0.0.1:53")).unwrap(),
        "TCP",
    );
}

/// The forged queries come from neighbours that do not exist. The kernel keeps the agent's answers to such a neighbour
/// for three seconds, while it tries to resolve the neighbour's MAC address.
#[test]
fn answers_to_neighbours_that_do_not_exist_delay_no_others() {
    const NODE: [u8; 4] = [198, 51, 100, 1];
    let mut bed = Bed::with_web(&["pod2"]);
    bed.agent = None;
    let allow = ["--dns-allow", "198.51.100.0/24"];
    bed.start_agent_with(&[&["--dns-bind-address", "198.51.100.1"], &DNS[2..], &allow].concat());
    let client = &bed.cluster.client;
    let query = dns::query(1, "web.default.svc.cluster.local");
    let socket = client.run(|| UdpSocket::bind("0.0.0.0:0")).unwrap();
    socket.connect((Ipv4Addr::from(NODE), 53)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let ask = || {
        let mut answer = [0; 512];
        let length = socket.send(&query).and_then(|_| socket.recv(&mut answer)).ok()?;
        dns::address(&answer[..length])
    };
    assert_eq!(wait_for(Duration::from_secs(3), ask), Some(Ipv4Addr::new(10, 96, 0, 10)));
    let raw = client.run(|| flood::open(false)).unwrap();
    for (host, port) in [250, 251].into_iter().flat_map(|host| (2_000..3_000).map(move |port| (host, port))) {
        let mut packet = Vec::new();
        let forged = PacketBuilder::ipv4([198, 51, 100, host], NODE, 64).udp(port, 53);
        forged.write(&mut packet, &query).unwrap();
        flood::send(&raw, (Ipv4Addr::from(NODE), 53).into(), &packet).unwrap();
    }
    assert_eq!(ask(), Some(Ipv4Addr::new(10, 96, 0, 10)));
}

#[test]
fn agent_raises_its_limit_of_open_files() {
    let mut bed = Bed::with_web(&["pod2"]);
    bed.agent = None;
    let starter = ["prlimit", "--nofile=256:4096"].map(str::to_owned);
    let agent = Agent::spawn_by(&bed.cluster.node1, bed.cluster.agent_settings(1), &starter).unwrap();
    agent.wait_until_healthy().unwrap();
    let limits = fs::read_to_string(format!("/proc/{}/limits", agent.pid())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(line.split_whitespace().skip(3).take(2).collect::<Vec<_>>(), ["4096", "4096"], "soft, hard");
}

#[test]
fn restart_with_a_bad_manifest_denies_no_name_that_it_may_define() {
    let mut names = Names::new();
    names.bed.cluster.manifests.write("db", HEADLESS).unwrap();
    names.wait_for("db", &["10.244.9.1"]);
    let stop = |bed: &mut Bed| bed.agent.take().unwrap().kill().unwrap();
    stop(&mut names.bed);
    // The agent cannot find out which objects this document defines.
    let bad = HEADLESS
        .replace("spec: {clusterIP: None, ports: [{name: sql, port: 5432}]}", "spec: {clusterIP: None");
    names.bed.cluster.manifests.write("db", &bad).unwrap();
    names.bed.start_agent_with(&DNS);
    let status = |names: &Names, name: &str| {
        let text = names.resolver.dig(&[&*format!("{name}.cluster.local.")]).unwrap();
        let status = text.split_once("status: ").and_then(|(_, rest)| rest.split_once(','));
        status.unwrap_or_else(|| panic!("{name}: {text}")).0.to_owned()
    };
    assert_eq!(status(&names, "web.default.svc"), "NOERROR");
    for name in ["db.default.svc", "db-0.db.default.svc", "_sql._tcp.db.default.svc"] {
        assert_eq!(status(&names, name), "SERVFAIL", "{name}");
    }
    assert_eq!(status(&names, "www.example.com.default.svc"), "NXDOMAIN");
    names.bed.cluster.manifests.write("db", HEADLESS).unwrap();
    names.wait_for("db", &["10.244.9.1"]);
    // The agent has read the whole folder before, so it still answers NXDOMAIN when a new bad document appears.
    names.bed.cluster.manifests.write("other", &bad.replace("db", "other")).unwrap();
    assert_eq!(status(&names, "nothing.default.svc"), "NXDOMAIN");
}
