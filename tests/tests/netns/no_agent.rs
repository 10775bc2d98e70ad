//! Clients whose device has no programs, because no agent has run since they started: the catch device serves them.

use std::{
    fs, io,
    net::{IpAddr, SocketAddr},
};

use lb_common::{Address, LAYOUT_VERSION, conntrack::Tuple, protocol};
use lb_datapath::Pinned;
use lb_tests::{
    agent::{self, run},
    client::{Connection, PATIENCE, ask_http, ask_udp},
    cluster::{self, ClientLink, PodLink, Wiring},
    manifests::Endpoint,
    skip,
    traffic::{Kind, Traffic},
    wait_for,
};
use nix::libc;

use crate::bed::{Bed, RANGES, WEB, ask_briefly, http, udp, vips};

/// Strict reverse path filters, as some distributions set them.
const STRICT: Wiring = Wiring { link: ClientLink::Ethernet, pods: PodLink::PointToPoint, strict: true };
/// Like [`STRICT`], with pods behind a bridge.
const BRIDGED: Wiring = Wiring { link: ClientLink::Ethernet, pods: PodLink::Bridge, strict: true };

/// For each kind of backend: the number that [`vips`] turns into its service's addresses, and the backend's name.
const KINDS: [(u8, &str); 5] = [(10, "pod2"), (11, "pod3"), (12, "node1"), (13, "pod6"), (14, "pod5")];

/// An endpoint on node1: a pod that does not exist yet, or processes of node1 itself.
fn endpoint(name: &str) -> Endpoint {
    let addresses = match name {
        "node1" => ["172.18.0.1".to_owned(), "fd00:172:18::1".to_owned()],
        pod => {
            let number: u8 = pod.trim_start_matches("pod").parse().unwrap();
            [format!("10.244.1.{}", 10 + number), format!("fd00:10:244:1::{}", 10 + number)]
        }
    };
    Endpoint {
        pod: name.to_owned(),
        node: "node1".to_owned(),
        addresses: addresses.map(|address| address.parse().unwrap()).to_vec(),
        ready: true,
        ..Endpoint::default()
    }
}

/// The number of routes of node1 to its catch device.
fn caught_networks(bed: &Bed) -> usize {
    let list = |family| {
        let shown = ["route", "show", "proto", "108", "dev", "lb-catch"];
        let output = bed.cluster.node1.command("ip").arg(family).args(shown).output().unwrap();
        String::from_utf8(output.stdout).unwrap().lines().count()
    };
    list("-4") + list("-6")
}

/// A cluster whose agent was killed before the pods `pod5` and `pod6` started on node1, with a service for each kind of
/// backend.
fn orphaned(wiring: Wiring) -> Bed {
    let mut bed = Bed { agent: None, cluster: cluster::Cluster::for_test(wiring).unwrap() };
    for (number, name) in KINDS {
        let mut service = bed.service(&format!("of-{name}"), vips(number), &[]);
        let known = bed.cluster.pod(name).map(cluster::Pod::endpoint);
        service.endpoints = vec![known.unwrap_or_else(|| endpoint(name))];
        bed.cluster.manifests.put(&service).unwrap();
    }
    bed.start_agent_with(&RANGES);
    wait_for(PATIENCE, || caught_networks(&bed).eq(&2).then_some(())).unwrap();
    wait_for(PATIENCE, || has_programs(&bed, "lb-catch").then_some(())).unwrap();
    wait_for(PATIENCE, || ask_briefly(bed.netns("pod1"), WEB[0])).unwrap();
    bed.agent.take().unwrap().kill().unwrap();
    bed.cluster.add_pod("pod5", 1, 5).unwrap();
    bed.cluster.add_pod("pod6", 1, 6).unwrap();
    bed
}

/// Whether both hooks of a device of node1 have programs.
pub(crate) fn has_programs(bed: &Bed, device: &str) -> bool {
    let status = bed.status();
    status["programs"].as_array().unwrap().iter().filter(|hook| hook["device"] == device).count() == 2
}

/// Number of packets with this outcome, as node1's data plane has counted them.
fn count_of(bed: &Bed, outcome: &str) -> u64 {
    let outcomes = &bed.status()["outcomes"];
    let count = outcomes.as_array().unwrap().iter().find(|count| count["outcome"] == outcome).unwrap();
    count["packets"].as_u64().unwrap()
}

fn assert_reaches_every_kind(bed: &Bed) {
    for (number, name) in KINDS {
        for vip in vips(number) {
            let pod = bed.netns("pod5");
            let answer = ask_http(pod, http(vip)).unwrap_or_else(|error| panic!("{name} at {vip}: {error}"));
            assert_eq!(answer.server, name, "{vip}");
            // A UDP server that is bound to no address answers from the source address of its route to the client.
            if name == "node1" {
                continue;
            }
            let answer =
                ask_udp(pod, udp(vip), 64).unwrap_or_else(|error| panic!("{name} at {vip}: {error}"));
            assert_eq!(answer.server, name, "{vip}");
        }
    }
}

#[test]
fn pod_that_starts_without_an_agent_reaches_every_kind_of_backend() {
    for wiring in [STRICT, BRIDGED] {
        let bed = orphaned(wiring);
        let _servers = cluster::serve(&bed.cluster.node1, "node1").unwrap();
        assert_reaches_every_kind(&bed);
    }
}

/// If an agent is killed before the catch device has its programs, no route leads to the device. Without programs the
/// device would drop packets that the `unreachable` routes answer with an error.
#[test]
fn routes_lead_to_the_catch_device_only_once_it_has_programs() {
    if skip::is_older_than(6, 6) {
        return skip::whole("the kernel has no tcx, whose pins the test blocks");
    }
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod2"]);
    bed.start_agent_with(&RANGES);
    wait_for(PATIENCE, || caught_networks(&bed).eq(&2).then_some(())).unwrap();
    bed.agent.take().unwrap().kill().unwrap();
    // Replaces the catch device by one with a known index. A folder at the path where the next agent pins a link makes
    // the pinning fail.
    let node = &bed.cluster.node1;
    node.ip("link delete lb-catch\nlink add lb-catch index 4242 type bridge").unwrap();
    let pin = bed.cluster.bpffs(1).join(format!("lb/v{LAYOUT_VERSION}/links/4242-egress"));
    fs::create_dir(&pin).unwrap();
    bed.start_agent_with(&RANGES);
    let device =
        || bed.cluster.node1.command("ip").args(["-o", "link", "show", "lb-catch"]).output().unwrap();
    let is_kept = || String::from_utf8_lossy(&device().stdout).contains("mtu 65535").then_some(());
    wait_for(PATIENCE, is_kept).unwrap();
    wait_for(PATIENCE, || ask_briefly(bed.netns("pod1"), WEB[0])).unwrap();
    bed.agent.take().unwrap().kill().unwrap();
    bed.cluster.add_pod("pod5", 1, 5).unwrap();
    for vip in WEB {
        let error = ask_http(bed.netns("pod5"), http(vip)).unwrap_err();
        let unreachable =
            matches!(error.kind(), io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable);
        assert!(unreachable, "{vip}: {error}");
    }
    fs::remove_dir(&pin).unwrap();
    bed.start_agent_with(&RANGES);
    wait_for(PATIENCE, || caught_networks(&bed).eq(&2).then_some(())).unwrap();
    assert!(has_programs(&bed, "lb-catch"));
}

/// The kernel's connection tracking processes packets to cluster IPs before and after their translation. CNI plugins
/// masquerade packets from pods to addresses outside the pods' network, and cluster IPs are outside.
#[test]
fn catch_device_works_beside_netfilter_rules() {
    let bed = orphaned(STRICT);
    let _servers = cluster::serve(&bed.cluster.node1, "node1").unwrap();
    let rules = "table inet cni {
        chain forward {
            type filter hook forward priority 0; policy drop;
            ct state invalid drop
            ct state established,related accept
            ip saddr 10.244.0.0/16 accept
            ip daddr 10.244.0.0/16 accept
            ip6 saddr fd00:10:244::/48 accept
            ip6 daddr fd00:10:244::/48 accept
        }
        chain prerouting {
            type filter hook prerouting priority -300;
            meta nfproto ipv6 fib saddr . iif oif missing icmpv6 type != { nd-neighbor-solicit, nd-neighbor-advert } drop
        }
        chain postrouting {
            type nat hook postrouting priority 100;
            ip saddr 10.244.0.0/16 ip daddr != 10.244.0.0/16 masquerade
            ip6 saddr fd00:10:244::/48 ip6 daddr != fd00:10:244::/48 masquerade
        }
    }";
    bed.cluster.node1.feed("nft", &["-f", "-"], rules).unwrap();
    assert_reaches_every_kind(&bed);
}

#[test]
fn connections_begun_without_an_agent_survive_its_start() {
    let mut bed = orphaned(STRICT);
    let pod = bed.netns("pod5").clone();
    let mut clients = Vec::new();
    for number in [10, 11, 13] {
        for vip in vips(number) {
            clients.extend(Kind::TCP.map(|kind| (&pod, kind, http(vip))));
            clients.extend(Kind::UDP.map(|kind| (&pod, kind, udp(vip))));
        }
    }
    let traffic = Traffic::start(clients).unwrap();
    traffic.progresses().unwrap();
    bed.start_agent_with(&RANGES);
    traffic.progresses().unwrap();
    bed.agent.take().unwrap().kill().unwrap();
    traffic.progresses().unwrap();
    bed.start_agent_with(&RANGES);
    wait_for(PATIENCE, || has_programs(&bed, "pod5").then_some(())).unwrap();
    traffic.progresses().unwrap();
    traffic.stop().assert_unharmed();
}

/// Makes the connection end with a RST when it is closed, which frees the port at once on both sides.
fn reset(connection: &Connection) {
    let at_once = libc::linger { l_onoff: 1, l_linger: 0 };
    nix::sys::socket::setsockopt(connection.stream(), nix::sys::socket::sockopt::Linger, &at_once).unwrap();
}

/// The number of entries of node1's flow table.
fn entries(bed: &Bed) -> u64 {
    let status = bed.status();
    let maps = status["maps"].as_array().unwrap().iter();
    let of_flows = maps.filter(|map| map["name"] == "FLOWS" || map["name"] == "CONNTRACK");
    of_flows.map(|map| map["entries"].as_u64().unwrap()).sum()
}

/// The number of earlier flows that have used the flow table entry of this client's connection to the VIP.
fn earlier_flows(bed: &Bed, client: SocketAddr, vip: SocketAddr) -> u16 {
    let pinned = Pinned::open(&bed.cluster.bpffs(1)).unwrap();
    let [from, to] = [client, vip].map(|end| Address::from(end.ip()));
    let key = Tuple::new(from, to, client.port(), vip.port(), protocol::TCP);
    pinned.conntrack().table().get(&key).unwrap().unwrap().generation()
}

/// The next connection from a port reuses the entries of the ended connection. The new flow begins at the ingress hook
/// of the catch device, when the SYN enters the node again through that device. (A flow that began at the egress hook
/// would take a source port, and be replaced at once.)
#[test]
fn client_port_can_be_reused_after_a_caught_connection() {
    const PORT: u16 = 40_001;
    let bed = orphaned(STRICT);
    let pod = bed.netns("pod5");
    let ask_and_reset = |vip| {
        let mut connection = Connection::open_from_port(pod, PORT, http(vip)).unwrap();
        connection.ask().unwrap_or_else(|error| panic!("{vip}: {error}"));
        reset(&connection);
        connection.stream().local_addr().unwrap()
    };
    for vip in vips(10) {
        let client = ask_and_reset(vip);
        let first = entries(&bed);
        for connections in 1..=3 {
            ask_and_reset(vip);
            assert_eq!(entries(&bed), first, "{vip}");
            assert_eq!(earlier_flows(&bed, client, http(vip)), connections, "{vip}");
        }
    }
}

#[test]
fn explain_shows_the_source_address_that_a_backend_of_a_caught_client_receives() {
    let bed = orphaned(STRICT);
    for vip in WEB {
        let client = bed.cluster.pod("pod5").unwrap().http(vip).ip().to_string();
        let to = http(vip).to_string();
        let question = ["explain", "--from", &client, "--to", &to, "--device", "lb-catch"];
        let explained = agent::ask(&bed.cluster.node1, &bed.cluster.bpffs(1), &question).unwrap();
        let text = String::from_utf8(explained.stdout).unwrap();
        assert!(text.contains(&format!("the backend sees the virtual address {vip}")), "{text}");
    }
}

#[test]
fn catch_device_rejects_and_drops_as_other_devices_do() {
    let bed = orphaned(STRICT);
    let pod = bed.netns("pod5");
    for vip in WEB {
        let error = ask_http(pod, SocketAddr::new(vip, 81)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{vip}: {error}");
        let ping = |vip: IpAddr| {
            let output = pod.command("ping").args(["-c1", "-W2", &vip.to_string()]).output().unwrap();
            output.status.success()
        };
        assert!(ping(vip), "{vip} does not answer a ping");
    }
    let before = count_of(&bed, "unknown_vip");
    for vip in vips(99) {
        assert_eq!(ask_briefly(pod, vip), None);
    }
    assert!(count_of(&bed, "unknown_vip") >= before + 2, "an unassigned address");
}

/// IP protocol 253 has no ports, so no program translates its packets.
#[test]
fn untranslated_packet_never_loops_through_the_catch_device() {
    let bed = orphaned(Wiring { strict: false, ..STRICT });
    let before = count_of(&bed, "untranslated");
    let script = "import socket,sys
s=socket.socket(socket.AF_INET,socket.SOCK_RAW,253)
s.sendto(b'x'*8,('10.96.0.10',0))
s=socket.socket(socket.AF_INET6,socket.SOCK_RAW,253)
s.sendto(b'x'*8,('fd00:10:96::a',0))";
    run(bed.netns("pod5").command("python3").args(["-c", script])).unwrap();
    let counted = || (count_of(&bed, "untranslated") >= before + 2).then_some(());
    wait_for(PATIENCE, counted).unwrap();
    assert_eq!(count_of(&bed, "untranslated"), before + 2, "each of them once");
}
