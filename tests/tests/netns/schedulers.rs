//! Distribution of connections by each scheduler, as clients observe it.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr, UdpSocket},
    process::Command,
    time::Duration,
};

use lb_tests::{
    agent::run,
    client::{Connection, PATIENCE, any_address, ask_http, echo, udp_socket, udp_socket_from},
    cluster::ClientLink,
    netns::Netns,
    socket::{closing_connections, inode},
    wait_for,
};

use crate::{
    bed::{Bed, WEB, http, udp, vips},
    lan::{Frontend, Lan, Protocol},
};

pub(crate) const PODS: [&str; 3] = ["pod1", "pod2", "pod3"];

/// Adds a service with this scheduler, waits until the agent serves it and returns its addresses.
pub(crate) fn put(bed: &Bed, number: u8, scheduler: &str, weights: &str) -> [IpAddr; 2] {
    let mut service = bed.service(&format!("{scheduler}-{number}"), vips(number), &PODS);
    service.annotations =
        vec![("lb.dev/scheduler", scheduler.to_owned()), ("lb.dev/weights", weights.to_owned())];
    bed.cluster.manifests.put(&service).unwrap();
    let knows = || {
        let shown = bed.agent.as_ref()?.ask(&["service", "show", &service.name, "-o", "wide"]).ok()?;
        String::from_utf8_lossy(&shown.stdout).contains(&format!("Scheduler  {scheduler}\n")).then_some(())
    };
    wait_for(PATIENCE, knows).unwrap();
    vips(number)
}

fn shares<'a>(names: impl IntoIterator<Item = &'a str>) -> [u32; 3] {
    let mut shares: BTreeMap<&str, u32> = BTreeMap::new();
    names.into_iter().for_each(|name| *shares.entry(name).or_default() += 1);
    PODS.map(|pod| shares.get(pod).copied().unwrap_or(0))
}

/// Shares of the pods in 60 sequential connections.
fn short(bed: &Bed, vip: IpAddr) -> [u32; 3] {
    let names: Vec<String> =
        (0..60).map(|_| ask_http(&bed.cluster.client, http(vip)).unwrap().server).collect();
    shares(names.iter().map(String::as_str))
}

/// Open connections, with the pod of each.
pub(crate) struct Held(Vec<(String, Connection)>);

impl Held {
    pub(crate) const fn none() -> Self {
        Self(Vec::new())
    }

    /// Opens more connections and returns the shares of the pods in these new connections.
    pub(crate) fn more(&mut self, client: &Netns, vip: IpAddr, count: usize) -> [u32; 3] {
        let before = self.0.len();
        for _ in 0..count {
            let mut connection = Connection::open(client, http(vip)).unwrap();
            self.0.push((connection.ask().unwrap().server, connection));
        }
        shares(self.0[before..].iter().map(|(name, _)| name.as_str()))
    }

    pub(crate) fn all(&self) -> [u32; 3] {
        shares(self.0.iter().map(|(name, _)| name.as_str()))
    }

    /// Closes the connections to a pod and waits until the client has received the FIN of each: then both FINs have
    /// passed the node.
    pub(crate) fn end(&mut self, client: &Netns, pod: &str) {
        let ended = self.0.extract_if(.., |(name, _)| name == pod);
        let inodes: Vec<u64> = ended.map(|(_, connection)| inode(connection.stream()).unwrap()).collect();
        let closed = || (closing_connections(client, &inodes).unwrap() == 0).then_some(());
        wait_for(PATIENCE, closed).expect("the pod closes its side of the connections");
    }
}

/// Whether the shares differ from the wanted ones by at most `off`. Round robin keeps a position per CPU, and SYNs of
/// the client may arrive on several CPUs.
fn is_about(found: [u32; 3], wanted: [u32; 3], off: u32) -> bool {
    found.iter().zip(wanted).all(|(found, wanted)| found.abs_diff(wanted) <= off)
}

#[test]
fn rr_wrr_random_and_mh_follow_the_weights() {
    let bed = Bed::with_web(&PODS);
    for (number, scheduler, weights, wanted, off) in [
        (20, "rr", "{}", [20, 20, 20], 4),
        (21, "rr", r#"{"pod1": 9}"#, [20, 20, 20], 4),
        (22, "wrr", r#"{"pod1": 3, "pod3": 2}"#, [30, 10, 20], 5),
        // The largest share has a standard deviation of 3.9; the tolerance of 23 is about 6 times that.
        (23, "random", r#"{"pod1": 3, "pod3": 2}"#, [30, 10, 20], 23),
        (24, "mh", r#"{"pod1": 3, "pod3": 2}"#, [30, 10, 20], 23),
        (25, "rr", r#"{"pod2": 0}"#, [30, 0, 30], 4),
    ] {
        for vip in put(&bed, number, scheduler, weights) {
            let found = short(&bed, vip);
            assert!(is_about(found, wanted, off), "{scheduler} {weights} {vip}: {found:?}");
            assert!(weights != r#"{"pod2": 0}"# || found[1] == 0);
        }
    }
}

#[test]
fn sh_and_dh_pin_a_client_address_to_one_backend() {
    let bed = Bed::with_web(&PODS);
    for (number, scheduler) in [(30, "sh"), (31, "dh")] {
        for vip in put(&bed, number, scheduler, "{}") {
            assert!(short(&bed, vip).contains(&60), "{scheduler} {vip}");
        }
    }
}

#[test]
fn least_connection_schedulers_count_open_connections() {
    let bed = Bed::with_web(&PODS);
    for (number, scheduler, weights, wanted) in [
        (40, "lc", r#"{"pod1": 9}"#, [4, 4, 4]),
        (41, "wlc", r#"{"pod1": 2}"#, [6, 3, 3]),
        (42, "sed", r#"{"pod1": 2}"#, [6, 3, 3]),
        (43, "nq", r#"{"pod1": 2}"#, [6, 3, 3]),
        (44, "wlc", r#"{"pod2": 0}"#, [6, 0, 6]),
    ] {
        for vip in put(&bed, number, scheduler, weights) {
            let mut held = Held::none();
            held.more(&bed.cluster.client, vip, 12);
            assert_eq!(held.all(), wanted, "{scheduler} {weights} {vip}");
            // New connections go to the pod whose connections have ended.
            held.end(&bed.cluster.client, "pod3");
            let missing = wanted[2];
            let more = held.more(&bed.cluster.client, vip, missing as usize);
            assert_eq!(more, [0, 0, missing], "{scheduler} {weights} {vip}");
        }
    }
}

/// The sockets of the node's processes are connected directly to backends. Socket hooks count the connections when they
/// begin and when they end.
#[test]
fn connections_of_the_node_processes_count_as_those_of_clients() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    bed.start_agent_with(&["--metrics-bind-address", "127.0.0.1:10249"]);
    let schedulers = [(45, "lc"), (47, "wlc"), (48, "sed"), (49, "nq")];
    for vip in schedulers.into_iter().flat_map(|(number, scheduler)| put(&bed, number, scheduler, "{}")) {
        let (node, client) = (bed.cluster.node1.clone(), bed.cluster.client.clone());
        let (mut own, mut others) = (Held::none(), Held::none());
        assert_eq!(own.more(&node, vip, 6), [2, 2, 2], "{vip}");
        // The client's connections go to the pod whose connections from the node have ended, and the other way round.
        own.end(&node, "pod2");
        assert_eq!(others.more(&client, vip, 2), [0, 2, 0], "{vip}");
        others.end(&client, "pod2");
        assert_eq!(own.more(&node, vip, 2), [0, 2, 0], "{vip}");
    }
    let active = |bed: &Bed, count: u64| {
        let name =
            r#"lb_service_active_flows{namespace="default",service="lc-45",port="http",protocol="TCP"}"#;
        let settled = || (bed.find_metric(name) == Some(count)).then_some(());
        wait_for(PATIENCE * 4, settled).unwrap_or_else(|| panic!("{:?}, not {count}", bed.find_metric(name)));
    };
    active(&bed, 0);
    let [vip, _] = vips(45);
    let node = bed.cluster.node1.clone();
    let mut held = Held::none();
    let begun =
        r#"lb_service_new_flows_total{namespace="default",service="lc-45",port="http",protocol="TCP"}"#;
    let before = bed.find_metric(begun).expect("the connections of before");
    held.more(&node, vip, 6);
    active(&bed, 6);
    assert_eq!(bed.find_metric(begun), Some(before + 6));
    let shown = bed.json(&["service", "show", "lc-45"]);
    let port = shown.as_array().unwrap().iter().find(|port| port["portName"] == "http").unwrap();
    let flows: Vec<_> =
        port["backends"].as_array().unwrap().iter().map(|it| it["flows"].as_u64().unwrap()).collect();
    assert_eq!(flows, [2, 2, 2, 0, 0, 0], "IPv4, then IPv6: {shown:#}");
    let top = bed.json(&["top", "--interval", "1"]);
    let row = top.as_array().unwrap().iter().find(|row| row["name"] == "default/lc-45:http/TCP");
    assert_eq!(row.unwrap()["activeFlows"], 6, "{top:#}");
    // The hooks also count while no agent runs, and the next agent keeps their counts.
    bed.agent.take().unwrap().kill().unwrap();
    held.end(&node, "pod3");
    assert_eq!(held.more(&node, vip, 2), [0, 0, 2]);
    held.end(&node, "pod1");
    bed.start_agent_with(&["--metrics-bind-address", "127.0.0.1:10249"]);
    active(&bed, 4);
    assert_eq!(held.more(&node, vip, 2), [2, 0, 0]);
    // An agent that attaches no hooks discards the counts of sockets: nothing would count the ends of their
    // connections.
    bed.agent.take().unwrap().terminate().unwrap();
    bed.start_agent_with(&["--metrics-bind-address", "127.0.0.1:10249", "--socket-lb", "off"]);
    drop(held);
    active(&bed, 0);
}

/// Shares of the pods that answer these sockets.
fn answered(sockets: &[UdpSocket]) -> [u32; 3] {
    let pods: Vec<String> = sockets.iter().map(|socket| echo(socket, b"?").unwrap().server).collect();
    shares(pods.iter().map(String::as_str))
}

/// A socket that is connected again counts for its last backend only.
#[test]
fn reconnected_udp_socket_counts_once() {
    let bed = Bed::with_web(&PODS);
    let [vip, other] = put(&bed, 46, "lc", "{}");
    let node = bed.cluster.node1.clone();
    for (vip, nowhere) in [(vip, "192.0.2.200:9"), (other, "[2001:db8::200]:9")] {
        let three = || -> Vec<_> { (0..3).map(|_| udp_socket(&node, udp(vip)).unwrap()).collect() };
        let sockets = three();
        assert_eq!(answered(&sockets), [1, 1, 1], "{vip}");
        // When a socket connects again, the hook counts the end of the old connection before it chooses a backend.
        for _ in 0..5 {
            sockets.iter().for_each(|socket| socket.connect(udp(vip)).unwrap());
            assert_eq!(answered(&sockets), [1, 1, 1], "{vip}");
        }
        // Sockets that are connected to no service no longer count: three other sockets get one backend each.
        let nowhere: SocketAddr = nowhere.parse().unwrap();
        sockets.iter().for_each(|socket| drop(socket.connect(nowhere)));
        assert_eq!(answered(&three()), [1, 1, 1], "{vip}");
        // Once all sockets are closed, the map contains none of them. A child process that another test forks holds the
        // same sockets until it executes its program, so the kernel may release them a little later.
        drop(sockets);
        let path = bed.cluster.bpffs(1).join(format!("lb/v{}/CONNECTED_SOCKETS", lb_common::LAYOUT_VERSION));
        let dump =
            || run(Command::new("bpftool").args(["-j", "map", "dump", "pinned"]).arg(&path)).unwrap().stdout;
        wait_for(PATIENCE, || (dump().trim_ascii() == b"[]").then_some(()))
            .expect("a socket is left in the map");
    }
}

#[test]
fn connection_counts_survive_agent_restarts_and_backend_changes() {
    let mut bed = Bed::with_web(&PODS);
    let [vip, _] = put(&bed, 50, "lc", "{}");
    let mut held = Held::none();
    held.more(&bed.cluster.client, vip, 9);
    assert_eq!(held.all(), [3, 3, 3]);
    bed.agent.take().unwrap().kill().unwrap();
    held.end(&bed.cluster.client, "pod2");
    bed.start_agent();
    assert_eq!(held.more(&bed.cluster.client, vip, 3), [0, 3, 0], "connections that ended without an agent");
    // Connections of a removed backend are still counted when it returns.
    let mut service = bed.service("lc-50", vips(50), &PODS[..2]);
    service.annotations = vec![("lb.dev/scheduler", "lc".to_owned())];
    let followed = |count: &str| {
        let services = bed.json(&["service", "show", "lc-50"]);
        (services[0]["backends"].as_array()?.len().to_string() == count).then_some(())
    };
    bed.cluster.manifests.put(&service).unwrap();
    wait_for(PATIENCE, || followed("4")).unwrap();
    assert_eq!(held.more(&bed.cluster.client, vip, 2), [1, 1, 0]);
    service.endpoints = PODS.iter().map(|name| bed.cluster.pod(name).unwrap().endpoint()).collect();
    bed.cluster.manifests.put(&service).unwrap();
    wait_for(PATIENCE, || followed("6")).unwrap();
    assert_eq!(held.more(&bed.cluster.client, vip, 1), [0, 0, 1], "4, 4 and 3");
    assert_eq!(held.more(&bed.cluster.client, vip, 3), [1, 1, 1]);
}

#[test]
fn scheduler_flag_applies_to_services_without_a_valid_annotation() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    bed.start_agent_with(&["--scheduler", "lc"]);
    let mut held = Held::none();
    assert_eq!(held.more(&bed.cluster.client, WEB[0], 9), [3, 3, 3]);
    let mut service = bed.service("web", WEB, &PODS);
    service.annotations = vec![("lb.dev/scheduler", "fastest".to_owned())];
    bed.cluster.manifests.put(&service).unwrap();
    let said = || {
        let status = bed.agent.as_ref()?.ask(&["status"]).ok()?;
        String::from_utf8_lossy(&status.stdout).contains("annotation lb.dev/scheduler").then_some(())
    };
    wait_for(PATIENCE, said).expect("the mistake in status");
    assert_eq!(held.more(&bed.cluster.client, WEB[0], 3), [1, 1, 1], "served as if it said nothing");
}

#[test]
fn share_of_a_returning_backend_grows_during_its_slow_start() {
    let bed = Bed::with_web(&PODS[..2]);
    let put = |pods: &[&str], slow_start: &str| {
        let mut service = bed.service("web", WEB, pods);
        service.annotations =
            vec![("lb.dev/scheduler", "wrr".to_owned()), ("lb.dev/slow-start", slow_start.to_owned())];
        bed.cluster.manifests.put(&service).unwrap();
    };
    let wait_for_shares = |longest: Duration, is_right: &dyn Fn([u32; 3]) -> bool| {
        let shares = || Some(short(&bed, WEB[0])).filter(|shares| is_right(*shares));
        wait_for(longest, shares).unwrap_or_else(|| panic!("{:?}", short(&bed, WEB[0])))
    };
    let is_even = |shares| is_about(shares, [30, 30, 0], 5);
    put(&PODS[..1], "15m");
    wait_for_shares(PATIENCE, &|shares| shares == [60, 0, 0]);
    put(&PODS[..2], "15m");
    let warms = || {
        let services = bed.agent.as_ref()?.json(&["service", "show", "web"]).ok()?;
        services[0]["weights"].as_object()?.values().any(|weight| weight == 100).then_some(())
    };
    wait_for(PATIENCE, warms).expect("a hundredfold weight");
    // The backend begins with 1 % of its weight, so it gets about one flow in 100. The agent first raises the weight
    // after 45 s, a twentieth of the slow start.
    for _ in 0..5 {
        assert!(short(&bed, WEB[0])[1] <= 3);
    }
    put(&PODS[..2], "1s");
    wait_for_shares(Duration::from_secs(1) + PATIENCE, &is_even);
    put(&PODS[..1], "4s");
    wait_for_shares(PATIENCE, &|shares| shares == [60, 0, 0]);
    put(&PODS[..2], "4s");
    wait_for_shares(Duration::from_secs(4) + PATIENCE, &is_even);
}

/// Returns the server that answers a datagram from this port.
fn from_port(client: &Netns, port: u16, to: SocketAddr) -> String {
    from(client, SocketAddr::new(any_address(to.ip()), port), to)
}

/// Returns the server that answers a datagram from this address.
pub(crate) fn from(client: &Netns, source: SocketAddr, to: SocketAddr) -> String {
    let socket = client.run(|| udp_socket_from(source, to)).unwrap();
    echo(&socket, b"?").unwrap().server
}

#[test]
fn mh_chooses_the_same_backend_on_every_node() {
    let lan = Lan::with(&[]);
    let mut service = lan.service(7, &["pod1", "pod2", "pod3", "pod4"]);
    service.annotations = vec![("lb.dev/scheduler", "mh".to_owned())];
    lan.apply(&[service]);
    for family in [0, 1] {
        let to = Frontend::LoadBalancer.of(7, (Protocol::Udp, family));
        let ask = |node: u8| {
            lan.cluster.route_services_to(node).unwrap();
            (2000..2040).map(|port| from_port(&lan.cluster.client, port, to)).collect::<Vec<_>>()
        };
        let (by_node1, by_node2) = (ask(1), ask(2));
        assert_eq!(by_node1, by_node2, "{to}");
        let names: std::collections::BTreeSet<_> = by_node1.iter().collect();
        assert_eq!(names.len(), 4, "{by_node1:?}");
    }
}
