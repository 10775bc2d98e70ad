//! Tests that the agent follows changes of its node: addresses, sysctls, internal devices, reserved ports.

use std::{
    collections::BTreeSet,
    fs, io,
    net::{IpAddr, SocketAddr, TcpStream},
    path::Path,
    time::Duration,
};

use lb_common::{Address, Settings};
use lb_datapath::{Pinned, PolicyWatcher};
use lb_tests::{
    agent::{self, Agent},
    client::{Connection, PATIENCE, REFUSED, ask_http, ask_http_by_first_syn, limit},
    cluster::{CLIENT, ClientLink, Cluster, PodLink, Wiring},
    icmp::ping,
    manifests::{Exposure, Type},
    netns::Netns,
    wait_for, within,
};
use serde_json::Value;
use tokio::time::timeout;

use crate::bed::{Bed, RANGES, WEB, ask_briefly, http};

const NODE_PORT: u16 = 30_080;
/// Time limit until the agent has applied a change of the node.
const SOON: Duration = Duration::from_secs(1);

/// A cluster whose service `web` has a node port, and an agent with these arguments.
fn bed(wiring: impl Into<Wiring>, arguments: &[&str]) -> Bed {
    let cluster = Cluster::for_test(wiring).unwrap();
    let mut bed = Bed { agent: None, cluster };
    let mut service = bed.service("web", WEB, &["pod2"]);
    service.exposure = Exposure { kind: Type::NodePort, ..Exposure::default() };
    service.ports[0].node_port = Some(NODE_PORT);
    bed.cluster.manifests.put(&service).unwrap();
    start(&mut bed, arguments);
    bed
}

fn start(bed: &mut Bed, arguments: &[&str]) {
    let mut settings = bed.cluster.agent_settings(1);
    settings.arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
    bed.agent = Some(Agent::start(&bed.cluster.node1, settings).unwrap());
}

/// The addresses in the kernel's maps that serve the node port.
fn node_ports(bed: &Bed) -> BTreeSet<String> {
    let services = bed.json(&["service", "list"]);
    let frontends =
        services.as_array().unwrap().iter().flat_map(|service| service["frontends"].as_array().unwrap());
    frontends
        .filter(|frontend| frontend["kind"] == "NodePort" && frontend["port"] == NODE_PORT)
        .map(|frontend| frontend["address"].as_str().unwrap().to_owned())
        .collect()
}

fn texts(addresses: &[&str]) -> BTreeSet<String> {
    addresses.iter().map(|&address| address.to_owned()).collect()
}

/// Waits until exactly these addresses serve the node port.
fn assert_soon_served_at(bed: &Bed, addresses: &[&str], why: &str) {
    let expected = texts(addresses);
    let reached = within(SOON, || (node_ports(bed) == expected).then_some(()));
    assert!(reached.is_some(), "{why}: {:?} instead of {expected:?}", node_ports(bed));
}

const OF_NODE1: [&str; 6] =
    ["10.244.1.1", "172.18.0.1", "198.51.100.1", "fd00:10:244:1::1", "fd00:172:18::1", "fd00:198:51:100::1"];

#[test]
fn node_ports_follow_node_addresses_within_a_second() {
    let bed = bed(ClientLink::Ethernet, &[]);
    let node1 = &bed.cluster.node1;
    let all = |more: &[&'static str]| [&OF_NODE1[..], &["127.0.0.1", "::1"], more].concat();
    assert_eq!(node_ports(&bed), texts(&all(&[])));

    node1
        .ip("address add 198.51.100.9/24 dev eth0\naddress add fd00:198:51:100::9/64 dev eth0 nodad\n")
        .unwrap();
    let new = ["198.51.100.9", "fd00:198:51:100::9"];
    assert_soon_served_at(&bed, &all(&new), "new addresses");
    for address in new {
        let node_port = SocketAddr::new(address.parse().unwrap(), NODE_PORT);
        assert_eq!(ask_http(&bed.cluster.client, node_port).unwrap().server, "pod2", "{address}");
    }

    node1.ip("address add 192.0.2.7/32 dev lo\n").unwrap();
    assert_soon_served_at(&bed, &all(&[&new[..], &["192.0.2.7"]].concat()), "one of the loopback device");
    node1.ip("address del 198.51.100.9/24 dev eth0\naddress del 192.0.2.7/32 dev lo\n").unwrap();
    assert_soon_served_at(&bed, &all(&new[1..]), "addresses that are gone");
    node1.ip("link set eth0 down\n").unwrap();
    let left = ["10.244.1.1", "127.0.0.1", "172.18.0.1", "::1", "fd00:10:244:1::1", "fd00:172:18::1"];
    assert_soon_served_at(&bed, &left, "a device that is switched off");
}

#[test]
fn nodeport_addresses_restricts_node_ports_to_listed_networks() {
    let mut bed = bed(ClientLink::Ethernet, &["--nodeport-addresses", "172.16.0.0/12,127.0.0.0/8,::1/128"]);
    assert_eq!(node_ports(&bed), texts(&["172.18.0.1", "127.0.0.1", "::1"]));
    bed.cluster.node1.ip("address add 172.20.0.1/32 dev eth1\n").unwrap();
    assert_soon_served_at(&bed, &["127.0.0.1", "172.18.0.1", "172.20.0.1", "::1"], "one in the networks");

    bed.agent.take().unwrap().terminate().unwrap();
    let node1 = bed.cluster.node1.clone();
    node1.ip("route add default via 198.51.100.2\nroute add default via fd00:198:51:100::2\n").unwrap();
    start(&mut bed, &["--nodeport-addresses", "primary"]);
    assert_eq!(node_ports(&bed), texts(&["198.51.100.1", "fd00:198:51:100::1"]));
    node1.ip("route replace default via 172.18.0.2\n").unwrap();
    assert_soon_served_at(&bed, &["172.18.0.1", "fd00:198:51:100::1"], "the default route leads elsewhere");
}

fn settings(bpffs: &Path) -> Settings {
    Pinned::open(bpffs).unwrap().settings().unwrap()
}

fn address(text: &str) -> Address {
    text.parse::<IpAddr>().unwrap().into()
}

#[test]
fn kernel_settings_follow_the_node() {
    let bed = bed(
        ClientLink::Lan,
        &["--cluster-cidr", "10.244.0.0/16,fd00:10:244::/48", "--masquerade-ports", "15000-15999"],
    );
    let bpffs = bed.cluster.bpffs(1);
    let now = settings(&bpffs);
    assert_eq!((now.source_v4, now.source_v6), (address("172.18.0.1"), address("fd00:172:18::1")));
    assert_eq!((now.first_port, now.ports), (15_000, 1_000));
    for (list, inside, outside) in [
        (&now.internal, ["10.244.9.9", "fd00:10:244:9::9"], ["10.245.0.1", "fd00:10:245::1"]),
        (&now.service_ranges, ["10.96.0.99", "fd00:10:96::99"], ["10.112.0.1", "fd00:10:97::1"]),
    ] {
        assert!(inside.iter().all(|ip| list.contains(&address(ip))), "{inside:?}");
        assert!(!outside.iter().any(|ip| list.contains(&address(ip))), "{outside:?}");
    }
    let node = bed.json(&["status"])["agent"]["node"].clone();
    assert_eq!(node["primary"], serde_json::json!(["172.18.0.1", "fd00:172:18::1"]));
    assert_eq!(node["internalNetworks"], serde_json::json!(["10.244.0.0/16", "fd00:10:244::/48"]));
    assert_eq!(node["masqueradeFirstPort"], 15_000);

    bed.cluster
        .node1
        .ip("address add 172.18.0.11/24 dev eth0\naddress add fd00:172:18::11/64 dev eth0 nodad\n\
             address del fd00:172:18::1/64 dev eth0\naddress del 172.18.0.1/24 dev eth0\n\
             address add 172.18.0.12/24 dev eth0\n")
        .unwrap();
    // The kernel removes secondary IPv4 addresses with the first address of their network.
    let expected = (address("172.18.0.12"), address("fd00:172:18::11"));
    let moved = || {
        let now = settings(&bpffs);
        ((now.source_v4, now.source_v6) == expected).then_some(())
    };
    assert!(within(SOON, moved).is_some(), "{:?}", settings(&bpffs));
}

/// The interface index of a device.
fn index(netns: &Netns, device: &str) -> u32 {
    let read = || fs::read_to_string("/proc/thread-self/net/dev_snmp6/".to_owned() + device);
    let text = netns.run(read).unwrap();
    text.lines().next().unwrap().trim_start_matches("ifIndex").trim().parse().unwrap()
}

fn assert_soon_inside(bed: &Bed, devices: &[&str]) {
    let expected: BTreeSet<u32> = devices.iter().map(|device| index(&bed.cluster.node1, device)).collect();
    let pinned = Pinned::open(&bed.cluster.bpffs(1)).unwrap();
    let reached = within(SOON, || (pinned.internal_devices().unwrap() == expected).then_some(()));
    assert!(reached.is_some(), "{:?} instead of {devices:?}: {expected:?}", pinned.internal_devices());
}

#[test]
fn devices_of_internal_clients_follow_the_node() {
    let mut by_name = bed(
        ClientLink::Ethernet,
        &["--detect-local-mode", "InterfaceNamePrefix", "--pod-interface-name-prefix", "pod"],
    );
    assert_soon_inside(&by_name, &["pod1", "pod2"]);
    by_name.cluster.add_pod("pod5", 1, 5).unwrap();
    assert_soon_inside(&by_name, &["pod1", "pod2", "pod5"]);
    by_name.cluster.node1.ip("link del pod1\n").unwrap();
    assert_soon_inside(&by_name, &["pod2", "pod5"]);
    drop(by_name);

    let wiring = Wiring { pods: PodLink::Bridge, ..ClientLink::Lan.into() };
    let mut by_bridge =
        bed(wiring, &["--detect-local-mode", "BridgeInterface", "--pod-bridge-interface", "cni0"]);
    assert_soon_inside(&by_bridge, &["cni0", "pod1", "pod2"]);
    by_bridge.cluster.add_pod("pod5", 1, 5).unwrap();
    assert_soon_inside(&by_bridge, &["cni0", "pod1", "pod2", "pod5"]);
}

fn reserved_ports(netns: &Netns) -> String {
    let read = || fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports");
    netns.run(read).unwrap().trim().to_owned()
}

#[test]
fn masquerade_ports_are_reserved_until_cleanup() {
    let mut bed = bed(ClientLink::Ethernet, &[]);
    let node1 = bed.cluster.node1.clone();
    assert_eq!(reserved_ports(&node1), "", "ranges that do not overlap need no reservation");
    bed.agent.take().unwrap().terminate().unwrap();

    node1.sysctl("ipv4/ip_local_reserved_ports", "8080,25000-25010").unwrap();
    node1.sysctl("ipv4/ip_local_port_range", "20000 60999").unwrap();
    start(&mut bed, &[]);
    assert_eq!(reserved_ports(&node1), "8080,10000-29999");
    bed.agent.take().unwrap().kill().unwrap();
    start(&mut bed, &["--masquerade-ports", "25001-26000"]);
    assert_eq!(reserved_ports(&node1), "8080,25000-26000", "another range replaces the one before");

    bed.agent.take().unwrap().terminate().unwrap();
    assert_eq!(reserved_ports(&node1), "8080,25000-26000", "the data plane stays");
    agent::ask(&node1, &bed.cluster.bpffs(1), &["cleanup"]).unwrap();
    assert_eq!(reserved_ports(&node1), "8080,25000-25010");
}

#[test]
fn disabled_forwarding_is_reported() {
    let mut bed = bed(ClientLink::Ethernet, &[]);
    let problems = |bed: &Bed| bed.json(&["status"])["agent"]["problems"].to_string();
    assert_eq!(problems(&bed), "[]");
    bed.agent.take().unwrap().terminate().unwrap();
    bed.cluster.node1.sysctl("ipv4/ip_forward", "0").unwrap();
    start(&mut bed, &[]);
    let reported = || problems(&bed).contains("net.ipv4.ip_forward is 0").then_some(());
    wait_for(PATIENCE, reported).unwrap_or_else(|| panic!("{}", problems(&bed)));
    assert!(!problems(&bed).contains("ipv6"), "{}", problems(&bed));
    assert!(bed.agent.as_ref().unwrap().log().contains("net.ipv4.ip_forward is 0"));
    let probes = bed.json(&["check"]);
    let probe = probes.as_array().unwrap().iter().find(|probe| probe["name"] == "IPv4 forwarding").unwrap();
    assert_eq!(probe["result"], "degraded");
    bed.cluster.node1.sysctl("ipv4/ip_forward", "1").unwrap();
}

/// An administrator has given the node addresses inside the cluster IP range.
#[test]
fn node_network_inside_the_cluster_ip_range_stays_reachable() {
    for arguments in [&[][..], &RANGES] {
        let mut bed = bed(ClientLink::Ethernet, arguments);
        let problems = |bed: &Bed| bed.json(&["status"])["agent"]["problems"].to_string();
        assert_eq!(problems(&bed), "[]");
        bed.agent.take().unwrap().terminate().unwrap();
        let (node1, client) = (bed.cluster.node1.clone(), bed.cluster.client.clone());
        node1.ip("address add 10.100.0.1/24 dev eth0\naddress add 10.100.1.1/32 dev lo\n").unwrap();
        client.ip("address add 10.100.0.2/24 dev eth0\nroute add 10.100.1.0/24 via 10.100.0.1\n").unwrap();
        start(&mut bed, arguments);
        let problems = problems(&bed);
        assert!(
            problems.contains("10.100.0.0/24 of device eth0") && problems.contains("10.96.0.0/12"),
            "{problems}"
        );
        assert!(!problems.contains("10.100.1.1"), "a lone address: {problems}");

        let fails = |netns: &Netns, to: SocketAddr| {
            netns.run(|| TcpStream::connect_timeout(&to, limit())).unwrap_err().kind()
        };
        for address in ["10.100.0.1", "10.100.1.1"] {
            let to = SocketAddr::new(address.parse().unwrap(), 9);
            assert_eq!(fails(&client, to), REFUSED, "{address} is the node's, from outside");
            assert_eq!(fails(&node1, to), REFUSED, "{address} is the node's, by itself");
            assert_eq!(ping(&client, to.ip(), 56).unwrap(), to.ip());
        }
        // If no flag gives the range, the agent does not assume that the range contains only cluster IPs.
        let other = SocketAddr::new("10.100.0.2".parse().unwrap(), 9);
        let expected = if arguments.is_empty() { REFUSED } else { io::ErrorKind::HostUnreachable };
        assert_eq!(fails(&node1, other), expected, "another machine, {arguments:?}");
    }
}

/// Rules like those of a blocklist, of firewalld, and of the AWS VPC CNI.
#[test]
fn check_and_start_list_rules_that_service_packets_bypass() {
    let mut bed = bed(ClientLink::Ethernet, &[]);
    let probe = |bed: &Bed| {
        let probes = bed.json(&["check"]);
        probes.as_array().unwrap().iter().find(|probe| probe["name"] == "netfilter rules").unwrap().clone()
    };
    let node1 = bed.cluster.node1.clone();
    let run = |program: &str, arguments: &[&str]| {
        let status = node1.command(program).args(arguments).status().unwrap();
        assert!(status.success(), "{program} {arguments:?}");
    };
    run(
        "nft",
        &["add table inet t; add chain inet t p { type filter hook prerouting priority raw; }; \
           add rule inet t p tcp dport 8080 drop"],
    );
    assert_eq!(probe(&bed)["result"], "ok", "{}", probe(&bed));
    run(
        "nft",
        &["add rule inet t p tcp dport { 30080, 31000-31005 } drop; \
           add chain inet t f { type filter hook forward priority 0; policy drop; }; \
           add rule inet t f ct status dnat accept"],
    );
    let marks =
        ["-t", "mangle", "-A", "PREROUTING", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "CONNMARK"];
    run("iptables", &[&marks[..], &["--set-xmark", "0x80/0x80"]].concat());
    let named = ["nft inet t p, rule with handle", "nft inet t f, rule with handle", "--dst-type LOCAL"];
    let found = probe(&bed);
    assert_eq!(found["result"], "degraded");
    let detail = found["detail"].as_str().unwrap();
    assert_eq!(detail.lines().count(), named.len(), "{detail}");
    assert!(named.iter().all(|rule| detail.contains(rule)), "{detail}");

    bed.agent.take().unwrap().terminate().unwrap();
    start(&mut bed, &[]);
    let log = || bed.agent.as_ref().unwrap().log();
    let all = || named.iter().all(|rule| log().contains(rule)).then_some(());
    assert!(wait_for(PATIENCE, all).is_some(), "{}", log());
}

/// Replies are translated after the kernel has looked up xfrm policies.
#[test]
fn check_and_status_list_ipsec_policies_for_virtual_addresses() {
    let bed = bed(ClientLink::Ethernet, &[]);
    let policy = |source: &str| {
        let command = format!(
            "xfrm policy add src {source} dst 203.0.113.0/24 dir out \
             tmpl src 172.18.0.1 dst 172.18.0.2 proto esp mode tunnel\n"
        );
        bed.cluster.node1.ip(&command).unwrap();
    };
    let find = |probes: &Value| {
        probes.as_array().unwrap().iter().find(|probe| probe["name"] == "IPsec policies").cloned()
    };
    policy(&format!("{}/32", bed.cluster.pod("pod2").unwrap().addresses[0]));
    assert_eq!(find(&bed.json(&["check"])).unwrap()["result"], "ok", "endpoints are encrypted");
    policy("10.96.0.0/12");
    let expected = "src 10.96.0.0/12 dst 203.0.113.0/24 dir out: 10.96.0.10";
    assert_eq!(find(&bed.json(&["check"])).unwrap()["detail"], expected);
    assert_eq!(find(&bed.json(&["status"])["degraded"]).unwrap()["detail"], expected);
}

/// The kernel drops events for a socket whose buffer is full, until the socket is read to its end.
#[test]
fn watch_of_ipsec_policies_survives_an_overflow() {
    let cluster = Cluster::for_test(ClientLink::Ethernet).unwrap();
    let node = cluster.node1.clone();
    let policy = |number: u32| {
        format!(
            "xfrm policy add src 10.{}.{}.0/24 dst 203.0.113.0/24 dir out \
             tmpl src 172.18.0.1 dst 172.18.0.2 proto esp mode tunnel\n",
            number / 256,
            number % 256
        )
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let seen = node.run(|| {
        let _context = runtime.enter();
        let watcher = PolicyWatcher::open().map_err(io::Error::other)?.expect("a kernel with xfrm");
        let changes = || runtime.block_on(async { timeout(PATIENCE, watcher.changed()).await.is_ok() });
        let overflow: String = (0..2000).map(policy).collect();
        node.ip(&overflow).map_err(io::Error::other)?;
        let of_many = changes();
        node.ip(&policy(2000)).map_err(io::Error::other)?;
        Ok([of_many, changes()])
    });
    assert_eq!(seen.unwrap(), [true, true]);
}

/// The kernel looks up the policy while the source of a reply is still the address of its pod, so the reply would leave
/// in clear text.
#[test]
fn no_reply_bypasses_an_ipsec_policy_for_its_virtual_address() {
    let bed = Bed::with_web(&["pod2"]);
    let client = &bed.cluster.client;
    let mut connections = WEB.map(|vip| Connection::open(client, http(vip)).unwrap());
    for connection in &mut connections {
        assert_eq!(connection.ask().unwrap().server, "pod2");
        connection.stream().set_read_timeout(Some(SOON)).unwrap();
    }
    let change = |verb, rest: [&str; 2]| {
        for ((vip, client), rest) in WEB.into_iter().zip(CLIENT).zip(rest) {
            let bits = if vip.is_ipv4() { 32 } else { 128 };
            let policy = format!("xfrm policy {verb} src {vip}/{bits} dst {client}/{bits} dir out {rest}\n");
            bed.cluster.node1.ip(&policy).unwrap();
        }
    };
    let through = ["172.18.0.1 dst 172.18.0.9", "fd00:172:18::1 dst fd00:172:18::9"]
        .map(|ends| format!("tmpl src {ends} proto esp mode tunnel"));
    change("add", through.each_ref().map(String::as_str));
    let conditions = || bed.json(&["status"])["agent"]["problems"].to_string();
    let named = || CLIENT.iter().all(|client| conditions().contains(&format!("{client}/"))).then_some(());
    assert!(wait_for(PATIENCE, named).is_some(), "{}", conditions());
    for (vip, connection) in WEB.into_iter().zip(&mut connections) {
        assert!(connection.ask().is_err(), "a reply of a connection from before, {vip}");
        assert_eq!(ask_briefly(client, vip), None, "{vip}");
        let other = ask_http_by_first_syn(bed.netns("pod1"), http(vip)).unwrap();
        assert_eq!(other.server, "pod2", "the policy is for others");
    }
    change("delete", ["", ""]);
    let served = || WEB.into_iter().all(|vip| ask_briefly(client, vip).is_some()).then_some(());
    assert!(wait_for(PATIENCE, served).is_some(), "{}", conditions());
}
