//! Direct server return: packets of external clients go to backends on other nodes through tunnels, and the backends
//! reply directly. The router forwards packets for services to the first or the second of three nodes; the third node
//! has only backends.

use std::{fs, net::SocketAddr, ops::Deref, thread, time::Duration};

use aya::Ebpf;
use lb_common::conntrack::flow_slots;
use lb_tests::{
    agent::Agent,
    cleanup::{Cleanup, Resource},
    client::{Connection, PATIENCE, ask_udp, echo, udp_socket},
    cluster::{CLIENT, ClientLink, PodLink, Wiring},
    manifests::Service,
    netns::{Netns, unique_prefix},
    offload::{self, Offload},
    pattern, pump,
    socket::{next_error, path_mtu, queue_errors},
    wait_for,
};
use nix::errno::Errno;

use crate::{
    attack::route_forged,
    flood::{self, Forged},
    lan::{
        CLUSTER_CIDR, EXTERNAL, Expect,
        Frontend::{self, ClusterIp, ExternalIp, LoadBalancer, NodePort},
        Lan, Observation, Protocol, Seen, probe, probe_briefly,
    },
    xdp::passing_program,
};

/// Arguments that make an agent accept tunnelled packets from all nodes.
pub(crate) const PEERS: [&str; 2] = ["--dsr-peers", "172.18.0.0/24,fd00:172:18::/64"];

/// Three nodes with agents. Dropping this ends the agents first, then the programs at the other ends of the wires.
struct Nodes {
    third: Option<Agent>,
    lan: Lan,
    _ends: Vec<Ebpf>,
}

impl Deref for Nodes {
    type Target = Lan;

    fn deref(&self) -> &Lan {
        &self.lan
    }
}

impl Nodes {
    /// Creates the nodes. The agents of nodes 1 and 2 get the arguments `arguments`, the agent of node 3 gets `third`.
    /// Pods 5 and 6 are on node 3. With `xdp`, the router's ends of the wires accept frames that XDP programs send.
    fn new(arguments: &[&str], third: &[&str], xdp: bool) -> Self {
        let wiring = Wiring { link: ClientLink::Lan, pods: PodLink::PointToPoint, strict: true };
        let mut lan = Lan::without_agents(wiring);
        lan.cluster.add_node().unwrap();
        for number in [5, 6] {
            lan.cluster.add_pod(&format!("pod{number}"), 3, number).unwrap();
        }
        let router = lan.cluster.router.as_ref().unwrap();
        let end = |port| {
            router.run(|| offload::set(port, Offload::TransmitChecksum, false)).unwrap();
            passing_program(router, port)
        };
        let ends = if xdp { ["node1", "node2", "node3"].map(end).into() } else { Vec::new() };
        for node in [1, 2] {
            lan.start_agent(node, arguments);
        }
        let mut settings = lan.cluster.agent_settings(3);
        settings.arguments.extend(third.iter().map(ToString::to_string));
        let third = Agent::spawn(lan.cluster.node(3), settings).unwrap();
        third.wait_until_healthy().unwrap();
        Self { third: Some(third), lan, _ends: ends }
    }

    fn alike(arguments: &[&str], xdp: bool) -> Self {
        let arguments = [arguments, &PEERS, &CLUSTER_CIDR].concat();
        Self::new(&arguments, &arguments, xdp)
    }

    /// Like [`Lan::apply`], and also waits for the agent of the third node.
    fn serve(&self, services: &[Service]) {
        self.apply(services);
        for service in services {
            let seen = || {
                let shown = self.agent(3).ask(&["service", "show", &service.name]).ok()?;
                let text = String::from_utf8_lossy(&shown.stdout).into_owned();
                service.endpoints.iter().all(|endpoint| text.contains(&endpoint.pod)).then_some(())
            };
            wait_for(PATIENCE, seen).unwrap();
        }
    }

    fn agent(&self, node: u8) -> &Agent {
        let agent = if node == 3 { &self.third } else { &self.lan.agents[usize::from(node) - 1] };
        agent.as_ref().unwrap()
    }

    fn json(&self, node: u8, arguments: &[&str]) -> serde_json::Value {
        self.agent(node).json(arguments).unwrap()
    }

    fn counted(&self, node: u8, outcome: &str) -> u64 {
        self.agent(node).counted(outcome).unwrap()
    }

    fn assert_nothing_was_lost(&self) {
        for node in 1..=3 {
            for outcome in ["rewrite_failed", "no_route", "tunnel_refused", "no_backend"] {
                assert_eq!(self.counted(node, outcome), 0, "{outcome} on node {node}");
            }
        }
    }
}

fn annotated(mut service: Service, name: &'static str, value: &str) -> Service {
    service.annotations.push((name, value.to_owned()));
    service
}

#[test]
fn dsr_backends_on_other_nodes_receive_the_client_address_and_reply_directly() {
    for (tunnel, xdp) in
        [("ipip", "off"), ("gue", "off"), ("ipip", "native"), ("gue", "native"), ("gue", "generic")]
    {
        let arguments = ["--north-south-mode", "dsr", "--dsr-encapsulation", tunnel, "--xdp", xdp];
        let nodes = Nodes::alike(&arguments, xdp != "off");
        nodes.serve(&[
            nodes.service(1, &["pod5"]),
            nodes.service(2, &["pod3", "pod6"]),
            nodes.service(3, &["pod1"]),
        ]);
        let count = || nodes.counted(1, "reply") + nodes.counted(1, "routed");
        // The last segments of the connections that `serve` has opened may still pass.
        let settled = || {
            let before = count();
            thread::sleep(Duration::from_millis(300));
            (count() == before).then_some(before)
        };
        let replies = wait_for(PATIENCE, settled).expect("the connections of `serve` end");
        nodes.check(&["client", "client2"], 1, &EXTERNAL, Expect::Answer(&["pod5"], Seen::Client));
        nodes.check(&["client"], 1, &[NodePort(2)], Expect::Answer(&["pod5"], Seen::Client));
        nodes.check(
            &["client"],
            2,
            &[LoadBalancer, NodePort(2)],
            Expect::Answer(&["pod3", "pod6"], Seen::Client),
        );
        // No reply passes node 1: the flows have no entry for replies. (The limit below tolerates two packets, because
        // a server that gets a CPU late may still close a connection of `serve`. If replies passed node 1, each
        // connection of a client would add several packets.)
        for service in ["service1", "service2"] {
            let flows = nodes.json(1, &["conntrack", "list", "--service", service]);
            let flows = flows.as_array().unwrap();
            assert!(!flows.is_empty() && flows.iter().all(|flow| flow["tunnelled"] == true), "{flows:#?}");
        }
        assert!(count() < replies + 3, "{} replies, {replies} before", count());
        nodes.check(&["client"], 3, &EXTERNAL, Expect::Answer(&["pod1"], Seen::Client));
        // Packets of internal clients, and packets to cluster IPs, do not go through tunnels.
        nodes.check(&["client"], 1, &[ClusterIp], Expect::Answer(&["pod5"], Seen::Node(1)));
        nodes.check(&["pod1"], 1, &[ClusterIp], Expect::Answer(&["pod5"], Seen::Client));
        nodes.check(&["pod1"], 1, &EXTERNAL, Expect::Answer(&["pod5"], Seen::Node(1)));
        let sent = nodes.counted(1, "new_tunnelled_flow") + nodes.counted(2, "new_tunnelled_flow");
        assert!(sent >= 24, "{sent} flows through tunnels, {tunnel}, --xdp {xdp}");
        assert!(nodes.counted(3, "decapsulated") > 20);
        nodes.assert_nothing_was_lost();
        let flows = nodes.json(1, &["conntrack", "list", "--service", "service1"]);
        let flows = flows.as_array().unwrap();
        assert!(flows.iter().filter(|flow| flow["tunnelled"] == true).count() >= 12, "{flows:#?}");
        assert!(flows.iter().all(|flow| flow["half"] == false));
        assert_eq!(nodes.json(1, &["status"])["agent"]["node"]["northSouthMode"], "dsr");
        assert_eq!(nodes.json(1, &["service", "show", "service1"])[0]["northSouthMode"], "dsr");
    }
}

/// Clients of a VPN may be behind a device without Ethernet header.
#[test]
fn dsr_serves_clients_behind_a_device_without_ethernet_header() {
    for tunnel in ["ipip", "gue"] {
        let nodes = Nodes::alike(&["--north-south-mode", "dsr", "--dsr-encapsulation", tunnel], false);
        let node1 = &nodes.cluster.node1;
        let far = Netns::create(&unique_prefix()).unwrap();
        let _pump = pump::connect((&far, "vpn0"), (node1, "vpn0"), pump::Layer::Ip).unwrap();
        for (netns, host) in [(node1, 1), (&far, 2)] {
            netns
                .ip(&format!(
                    "address add 10.99.0.{host}/24 dev vpn0\naddress add fd00:10:99::{host}/64 dev vpn0 nodad\n\
                     link set vpn0 up\n"
                ))
                .unwrap();
        }
        far.ip("route add default via 10.99.0.1\nroute add default via fd00:10:99::1\n").unwrap();
        let back = "route add 10.99.0.0/24 via 172.18.0.1\nroute add fd00:10:99::/64 via fd00:172:18::1\n";
        nodes.cluster.node(3).ip(back).unwrap();
        nodes.serve(&[nodes.service(1, &["pod5"])]);
        for (protocol, family) in [Protocol::Tcp, Protocol::Udp].map(|p| [(p, 0), (p, 1)]).concat() {
            let to = LoadBalancer.of(1, (protocol, family));
            let ask = || {
                if let Observation::Answered(answer) = probe_briefly(&far, to, protocol) {
                    Some(answer)
                } else {
                    None
                }
            };
            // The agent attaches programs to the device some time after it has appeared.
            let answer = wait_for(PATIENCE, ask).unwrap_or_else(|| panic!("{to} {protocol:?}, {tunnel}"));
            assert_eq!(
                (answer.seen, answer.server.as_str()),
                (answer.local, "pod5"),
                "{to} {protocol:?}, {tunnel}"
            );
        }
        assert!(nodes.counted(1, "new_tunnelled_flow") >= 4);
        nodes.assert_nothing_was_lost();
    }
}

#[test]
fn hybrid_mode_uses_dsr_for_tcp_only_and_annotations_override_it() {
    let nodes = Nodes::alike(&["--north-south-mode", "hybrid"], false);
    let snat = annotated(nodes.service(2, &["pod5"]), "lb.dev/north-south-mode", "snat");
    let dsr = annotated(nodes.service(3, &["pod5"]), "lb.dev/north-south-mode", "dsr");
    nodes.serve(&[nodes.service(1, &["pod5"]), snat, dsr]);
    let seen = |number, protocol, seen: Seen| {
        for family in [0, 1] {
            for frontend in [NodePort(1), LoadBalancer, ExternalIp] {
                let to = frontend.of(number, (protocol, family));
                let Observation::Answered(answer) = probe(nodes.netns("client"), to, protocol) else {
                    panic!("{to} {protocol:?} does not answer")
                };
                let source = nodes.source(1, &answer.server, to.ip());
                let expected = if seen == Seen::Client { answer.local.ip() } else { source };
                assert_eq!(answer.seen.ip(), expected, "{to} {protocol:?}");
            }
        }
    };
    seen(1, Protocol::Tcp, Seen::Client);
    seen(1, Protocol::Udp, Seen::Node(1));
    seen(2, Protocol::Tcp, Seen::Node(1));
    seen(2, Protocol::Udp, Seen::Node(1));
    seen(3, Protocol::Tcp, Seen::Client);
    seen(3, Protocol::Udp, Seen::Client);
    nodes.assert_nothing_was_lost();
}

/// Without DSR, backends on a third node see the address of the node that forwards the client's packets.
#[test]
fn default_mode_masquerades_external_clients() {
    for xdp in ["off", "native"] {
        let nodes = Nodes::alike(&["--xdp", xdp], xdp != "off");
        nodes.serve(&[nodes.service(1, &["pod5"])]);
        nodes.check(&["client"], 1, &EXTERNAL, Expect::Answer(&["pod5"], Seen::Node(1)));
        nodes.check(&["client"], 1, &[NodePort(2)], Expect::Answer(&["pod5"], Seen::Node(2)));
        assert_eq!(nodes.counted(1, "new_tunnelled_flow"), 0);
    }
}

/// Large transfers in both directions: the node must send ICMP "too big" for packets that do not fit into the tunnel,
/// and for GSO packets whose segments would not fit.
#[test]
fn tunnel_mtu_is_reported_to_clients() {
    for (tunnel, xdp, overheads) in [
        ("ipip", "off", [20, 40]),
        ("gue", "off", [28, 48]),
        ("ipip", "native", [20, 40]),
        ("gue", "native", [28, 48]),
    ] {
        let arguments = ["--north-south-mode", "dsr", "--dsr-encapsulation", tunnel, "--xdp", xdp];
        let nodes = Nodes::alike(&arguments, xdp != "off");
        nodes.serve(&[nodes.service(1, &["pod5"])]);
        for (family, overhead) in [0, 1].into_iter().zip(overheads) {
            let client = nodes.netns("client");
            let http = LoadBalancer.of(1, (Protocol::Tcp, family));
            let mut connection = Connection::open(client, http).unwrap();
            assert_eq!(connection.download(16 << 20).unwrap(), "pod5", "{http}");
            assert_eq!(connection.upload(16 << 20).unwrap().server, "pod5", "{http}");
            assert_eq!(connection.ask().unwrap().seen.ip(), CLIENT[family]);
            let udp = ExternalIp.of(1, (Protocol::Udp, family));
            let socket = udp_socket(client, udp).unwrap();
            queue_errors(&socket).unwrap();
            socket.send(pattern::at(0, 1_460)).unwrap();
            let error = wait_for(PATIENCE, || next_error(&socket).unwrap()).unwrap();
            assert_eq!((error.info, error.offender), (1500 - overhead, Some(udp.ip())), "{udp}");
            assert_eq!(path_mtu(&socket).unwrap(), 1500 - overhead);
            assert_eq!(echo(&socket, pattern::at(0, 1_460)).unwrap().server, "pod5", "in parts");
            for bytes in [0, 1_400, 8_192, 60_000] {
                assert_eq!(ask_udp(client, udp, bytes).unwrap().server, "pod5", "{udp}, {bytes}");
            }
        }
        let answered = nodes.counted(1, "too_big");
        assert!(answered >= 4, "{answered} answers");
        nodes.assert_nothing_was_lost();
    }
}

/// Node 1 answers through a device without checksum offload, so the kernel completes checksums that are otherwise left
/// to the device: those of packets that were split or merged, and those of datagrams from sockets. The programs write
/// an ICMP error in place of such a packet, and the kernel must not write the packet's checksum into the quote.
#[test]
fn icmp_errors_about_packets_without_checksum_are_valid() {
    let nodes = Nodes::alike(&["--north-south-mode", "dsr"], false);
    nodes.serve(&[nodes.service(1, &["pod5"]), nodes.service(2, &[])]);
    nodes.cluster.node(1).run(|| offload::set("eth0", Offload::TransmitChecksum, false)).unwrap();
    let client = nodes.netns("client");
    for (family, overhead) in [0, 1].into_iter().zip([20, 40]) {
        let http = LoadBalancer.of(1, (Protocol::Tcp, family));
        let mut connection = Connection::open(client, http).unwrap();
        assert_eq!(connection.upload(4 << 20).unwrap().server, "pod5", "{http}");
        let other_port = SocketAddr::new(http.ip(), 9);
        assert_eq!(path_mtu(&udp_socket(client, other_port).unwrap()).unwrap(), 1500 - overhead, "{http}");
    }
    nodes.check(&["client"], 2, &[LoadBalancer], Expect::Refused);
    assert!(nodes.counted(1, "too_big") >= 2);
    nodes.assert_nothing_was_lost();
}

/// The path to the client has a smaller MTU: the ICMP error that a router sends to the virtual address must reach the
/// pod on the other node.
#[test]
fn path_mtu_errors_reach_dsr_backends() {
    let nodes = Nodes::alike(&["--north-south-mode", "dsr"], false);
    nodes.serve(&[nodes.service(1, &["pod5"])]);
    let router = nodes.cluster.router.as_ref().unwrap();
    for (family, client) in CLIENT.into_iter().enumerate() {
        let length = if client.is_ipv4() { 32 } else { 128 };
        router.ip(&format!("route replace {client}/{length} dev eth0 mtu lock 1400\n")).unwrap();
        let http = LoadBalancer.of(1, (Protocol::Tcp, family));
        let mut connection = Connection::open(nodes.netns("client"), http).unwrap();
        assert_eq!(connection.download(4 << 20).unwrap(), "pod5");
        let pod = &nodes.cluster.pod("pod5").unwrap().netns;
        let known = path_mtu(&udp_socket(pod, SocketAddr::new(client, 9)).unwrap()).unwrap();
        assert_eq!(known, 1400, "pod5 has learned the MTU of the way to {client}");
    }
}

/// The path MTU between the nodes is smaller than the MTU of their devices. The router sends its ICMP error about a
/// tunnelled packet to node 1, which must send an ICMP error to the client.
#[test]
fn path_mtu_between_nodes_reaches_dsr_clients() {
    for (tunnel, xdp, overheads) in [("ipip", "off", [20, 40]), ("gue", "native", [28, 48])] {
        let arguments = ["--north-south-mode", "dsr", "--dsr-encapsulation", tunnel, "--xdp", xdp];
        let nodes = Nodes::alike(&arguments, xdp != "off");
        nodes.serve(&[nodes.service(1, &["pod5"])]);
        let pod = nodes.cluster.pod("pod5").unwrap();
        let node = nodes.cluster.node(1);
        let router = nodes.cluster.router.as_ref().unwrap();
        // Node 1 and node 3 are on one network, so the router would send ICMP redirects to node 1.
        let silent = [("ipv4/conf/all/send_redirects", "0"), ("ipv4/conf/lan/send_redirects", "0")];
        router.sysctls(&silent).unwrap();
        for (family, overhead) in [0, 1].into_iter().zip(overheads) {
            let address = pod.address(CLIENT[family]);
            let (length, from, to) = if family == 0 {
                (32, "172.18.0.254", "172.18.0.3")
            } else {
                (128, "fd00:172:18::fe", "fd00:172:18::3")
            };
            node.ip(&format!("route replace {address}/{length} via {from}\n")).unwrap();
            router.ip(&format!("route replace {address}/{length} via {to} mtu lock 1400\n")).unwrap();
            let client = nodes.netns("client");
            let http = LoadBalancer.of(1, (Protocol::Tcp, family));
            let mut connection = Connection::open(client, http).unwrap();
            assert_eq!(connection.upload(4 << 20).unwrap().server, "pod5", "{tunnel}, {xdp}, {http}");
            let known = path_mtu(&udp_socket(client, http).unwrap()).unwrap();
            assert_eq!(known, 1400 - overhead, "the client has learned the MTU of the tunnel to {http}");

            router.ip(&format!("route replace unreachable {address}/{length}\n")).unwrap();
            let udp = ExternalIp.of(1, (Protocol::Udp, family));
            let socket = udp_socket(client, udp).unwrap();
            queue_errors(&socket).unwrap();
            socket.send(b"?").unwrap();
            let error = wait_for(PATIENCE, || next_error(&socket).unwrap()).unwrap();
            assert_eq!((error.errno, error.offender), (Errno::EHOSTUNREACH, Some(udp.ip())), "{udp}");
            router.ip(&format!("route replace {address}/{length} via {to}\n")).unwrap();
            assert_eq!(echo(&socket, b"?").unwrap().server, "pod5", "{udp}");
        }
        assert!(nodes.counted(1, "tunnel_error") >= 4);
        nodes.assert_nothing_was_lost();
    }
}

fn settled_sum(nodes: &Nodes, outcome: &str) -> u64 {
    (1..=3).map(|node| nodes.counted(node, outcome)).sum()
}

/// The router switches to node 2, which has no state of the connections but continues them for every backend.
#[test]
fn dsr_node_failover_keeps_established_connections() {
    const PODS: [&str; 5] = ["pod1", "pod3", "pod4", "pod5", "pod6"];
    for (tunnel, xdp) in [("ipip", "off"), ("gue", "native")] {
        let arguments = ["--north-south-mode", "dsr", "--dsr-encapsulation", tunnel, "--xdp", xdp];
        let nodes = Nodes::alike(&arguments, xdp != "off");
        nodes.serve(&[annotated(nodes.service(1, &PODS), "lb.dev/scheduler", "mh")]);
        let mut connections = Vec::new();
        for number in 0..60 {
            let frontend: Frontend = if number % 4 < 2 { LoadBalancer } else { ExternalIp };
            let to = frontend.of(1, (Protocol::Tcp, number % 2));
            let mut connection = Connection::open(nodes.netns("client"), to).unwrap();
            let server = connection.ask().unwrap().server;
            connections.push((server, connection));
        }
        for pod in PODS {
            assert!(connections.iter().any(|(server, _)| server == pod), "no connection has reached {pod}");
        }
        let transfers: Vec<_> = [0, 1]
            .map(|family| {
                let to = LoadBalancer.of(1, (Protocol::Tcp, family));
                Connection::open(nodes.netns("client"), to).unwrap().download_slowly(64 << 20)
            })
            .into();
        let started = || transfers.iter().all(|transfer| transfer.received() > 0).then_some(());
        wait_for(PATIENCE, started).unwrap();
        nodes.cluster.route_services_to(2).unwrap();
        for (server, connection) in &mut connections {
            let answer = connection.ask().unwrap();
            assert_eq!((&answer.server, answer.seen.ip()), (&*server, answer.local.ip()));
            assert_eq!(connection.upload(100_000).unwrap().server, *server);
        }
        for transfer in transfers {
            transfer.hurry();
            transfer.join().unwrap();
        }
        // The router switches back to node 1, and the connections continue.
        nodes.cluster.route_services_to(1).unwrap();
        for (server, connection) in &mut connections {
            assert_eq!(connection.ask().unwrap().server, *server);
        }
        assert!(nodes.counted(2, "new_tunnelled_flow") >= 20, "node 2 has picked connections up");
        nodes.assert_nothing_was_lost();
    }
}

/// A SYN flood on another Service has filled node 1's flow table. With the scheduler `mh`, node 1 forwards connections
/// without entries.
#[test]
fn dsr_connections_begin_and_continue_while_the_flow_table_is_full() {
    const ROOM: u32 = 1000;
    let settings = [&["--north-south-mode", "dsr"][..], &PEERS, &CLUSTER_CIDR].concat();
    let few = [&settings[..], &["--max-connections", "1000"]].concat();
    let nodes = Nodes::new(&few, &settings, false);
    let service = annotated(nodes.service(1, &["pod5", "pod6"]), "lb.dev/scheduler", "mh");
    nodes.serve(&[service, nodes.service(2, &["pod5"])]);
    let to = |service, family| LoadBalancer.of(service, (Protocol::Tcp, family));
    let client = nodes.netns("client");
    let (mut first, mut connections) = (0, Vec::new());
    // Entries of the flood can be evicted after 3 s, so in a slow round every connection may find room.
    let without_entry = (0..5).any(|_| {
        for family in [0, 1] {
            flood::syns(client, to(2, family), first, 6 * ROOM).unwrap();
            first += 6 * ROOM;
        }
        let [dropped, stateless] = ["conntrack_full", "stateless"].map(|outcome| nodes.counted(1, outcome));
        assert!(dropped > 0, "the flood has filled the flow table");
        for number in 0..8 {
            let mut connection = Connection::open(client, to(1, number % 2)).unwrap();
            let server = connection.ask().unwrap().server;
            connections.push((server, connection));
        }
        assert_eq!(nodes.counted(1, "conntrack_full"), dropped, "no packet of a connection was dropped");
        nodes.counted(1, "stateless") > stateless
    });
    assert!(without_entry, "each connection has found a place");
    for (server, connection) in &mut connections {
        assert_eq!(connection.ask().unwrap().server, *server);
        assert_eq!(connection.upload(100_000).unwrap().server, *server);
    }
    nodes.assert_nothing_was_lost();
}

/// Under DSR node 1 sees no replies, so it takes a forged SYN and any ACK for a complete handshake.
#[test]
fn forged_handshakes_with_dsr_hold_no_entry_for_long() {
    const ROOM: u32 = 400;
    /// Number of forged handshakes: several times the number of entries of the flow table and its overflow. (A
    /// tunnelled flow has one entry.)
    const FLOOD: u32 = 20 * ROOM;
    /// Number of handshakes whose SYNs are sent before their ACKs.
    const WAVE: u32 = 50;
    /// How long to wait for room. Entries of established one-way flows can be evicted after 10 s without a packet. The
    /// limit is twice as long, for slow machines.
    const RECOVERY: Duration = Duration::from_secs(20);
    let dsr = [&["--north-south-mode", "dsr"][..], &PEERS, &CLUSTER_CIDR].concat();
    let wiring = Wiring { link: ClientLink::Lan, pods: PodLink::PointToPoint, strict: true };
    let mut lan = Lan::without_agents(wiring);
    lan.start_agent(1, &[&dsr[..], &["--max-connections", &ROOM.to_string()]].concat());
    lan.start_agent(2, &dsr);
    lan.apply(&[lan.service(1, &["pod3"])]);
    // Without these routes, the router would send ICMP errors about the backend's answers to node 1, and node 1 counts
    // such an error as `tunnelled`.
    route_forged(lan.cluster.router.as_ref().unwrap());
    let (client, to) = (lan.netns("client"), LoadBalancer.of(1, (Protocol::Tcp, 0)));
    for first in (0..FLOOD).step_by(WAVE as usize) {
        for kind in [Forged::Syn, Forged::Ack] {
            flood::forge(client, to, first..first + WAVE, kind).unwrap();
        }
    }
    let counted = |outcome| lan.agents[0].as_ref().unwrap().counted(outcome).unwrap();
    assert!(counted("conntrack_full") > 0, "the flood fills the flow table");
    let handshakes = counted("tunnelled");
    assert!(
        handshakes >= u64::from(flow_slots(ROOM)),
        "the table has tracked {handshakes} forged handshakes"
    );
    let is_served =
        || matches!(probe_briefly(client, to, Protocol::Tcp), Observation::Answered(_)).then_some(());
    assert!(wait_for(RECOVERY, is_served).is_some(), "no new client gets in within {RECOVERY:?}");
}

#[test]
fn tunnel_packets_from_other_senders_than_peers_are_refused() {
    let arguments = [&["--north-south-mode", "dsr"][..], &CLUSTER_CIDR].concat();
    let nodes = Nodes::new(&arguments, &arguments, false);
    nodes.serve(&[nodes.service(1, &["pod5"])]);
    nodes.check(&["client"], 1, &[LoadBalancer], Expect::Silence);
    assert!(settled_sum(&nodes, "tunnel_refused") >= 4);
    assert_eq!(nodes.counted(3, "decapsulated"), 0);
}

/// Without an API server, the members that share the addresses of Services of type `LoadBalancer` are peers of each
/// other. Each member is listed with its IPv4 address only, so `--dsr-peers` names the IPv6 addresses.
#[test]
fn members_that_announce_addresses_are_peers_without_a_flag() {
    let folder = std::env::temp_dir().join(format!("{}dsr", unique_prefix()));
    let _cleanup = Cleanup::of(Resource::Folder(folder.clone()));
    fs::create_dir(&folder).unwrap();
    let key = folder.join("key");
    fs::write(&key, "a key that all members share").unwrap();
    let key = key.to_str().unwrap();
    let members = "node1=172.18.0.1:7947,node2=172.18.0.2:7947,node3=172.18.0.3:7947";
    let announce = ["--announce-member", members, "--announce-key-file", key];
    let others = ["--north-south-mode", "dsr", "--dsr-peers", "fd00:172:18::/64"];
    let arguments = [&others, &announce[..], &CLUSTER_CIDR].concat();
    let nodes = Nodes::new(&arguments, &arguments, false);
    nodes.serve(&[nodes.service(1, &["pod5"])]);
    nodes.check(&["client"], 1, &[LoadBalancer], Expect::Answer(&["pod5"], Seen::Client));
    assert!(nodes.counted(3, "decapsulated") > 0);
    nodes.assert_nothing_was_lost();
}

/// Node 1's agent restarts twice, each time with another mode; open connections must continue.
#[test]
fn dsr_connections_survive_agent_restarts_and_mode_changes() {
    let mut nodes = Nodes::alike(&["--north-south-mode", "dsr"], false);
    nodes.serve(&[nodes.service(1, &["pod5"])]);
    // Opens connections; returns each with the client's address that the backend sees.
    let open = |nodes: &Nodes| -> Vec<(Connection, SocketAddr)> {
        let to = |family| LoadBalancer.of(1, (Protocol::Tcp, family));
        let open = |family| {
            let mut connection = Connection::open(nodes.netns("client"), to(family)).unwrap();
            let seen = connection.ask().unwrap().seen;
            (connection, seen)
        };
        [0, 1].map(open).into()
    };
    let mut connections = open(&nodes);
    for (mode, seen) in [("snat", Seen::Node(1)), ("dsr", Seen::Client)] {
        let arguments = [&["--north-south-mode", mode][..], &PEERS, &CLUSTER_CIDR].concat();
        nodes.lan.start_agent(1, &arguments);
        for (connection, seen) in &mut connections {
            let answer = connection.ask().unwrap();
            assert_eq!((answer.server.as_str(), answer.seen), ("pod5", *seen), "{mode}");
            assert_eq!(connection.upload(1 << 20).unwrap().server, "pod5", "{mode}");
        }
        nodes.check(&["client"], 1, &[LoadBalancer], Expect::Answer(&["pod5"], seen));
        connections.extend(open(&nodes));
    }
    // After pod5 is removed from the Service, the connections to pod5 continue, and new connections go to pod6.
    nodes.serve(&[nodes.service(1, &["pod6"])]);
    for (connection, seen) in &mut connections {
        let answer = connection.ask().unwrap();
        assert_eq!((answer.server.as_str(), answer.seen), ("pod5", *seen));
    }
    nodes.check(&["client"], 1, &[LoadBalancer], Expect::Answer(&["pod6"], Seen::Client));
}
