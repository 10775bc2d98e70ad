//! Tests of node ports and other addresses for external clients, without traffic policies.

use std::net::{SocketAddr, TcpListener, UdpSocket};

use lb_tests::{
    client::{Connection, ask_udp, echo, udp_socket},
    cluster::{CLIENT, CLOSED_PORT, ClientLink, HTTP_PORT, PodLink, UDP_PORT, Wiring},
    icmp::ping,
    manifests::{Endpoint, Port},
    netns::Netns,
    pattern, server,
    socket::{lengthen_headers, never_fragment, path_mtu},
};

use nix::errno::Errno;

use crate::lan::{
    EVERY, EXTERNAL, Expect, FRONTENDS,
    Frontend::{self, ClusterIp, ExternalIp, LoadBalancer, NodePort},
    Lan, Observation, Protocol, Seen, external, names, node_addresses, node_port, probe,
};

/// Service 1 has a backend on node 1, service 2 has one on node 2, and service 3 has backends on both nodes.
fn lan(wiring: Wiring) -> Lan {
    let lan = Lan::wired(wiring, &[]);
    let services = [(1, &["pod2"][..]), (2, &["pod3"]), (3, &["pod1", "pod2", "pod3", "pod4"])];
    lan.apply(&services.map(|(number, pods)| lan.service(number, pods)));
    lan
}

const POINT_TO_POINT: Wiring = Wiring { link: ClientLink::Lan, pods: PodLink::PointToPoint, strict: false };

/// Asserts the results that depend neither on reverse path filters nor on the wiring of pods.
fn assert_main_paths(lan: &Lan) {
    for (number, pod) in [(1, "pod2"), (2, "pod3")] {
        for node in [1, 2] {
            let expected = Expect::Answer(&[pod], Seen::Node(node));
            lan.check(&["client", "client2", "pod1", "pod4"], number, &[NodePort(node)], expected);
        }
        let of_node1 = [LoadBalancer, ExternalIp];
        lan.check(&["client", "pod1"], number, &of_node1, Expect::Answer(&[pod], Seen::Node(1)));
        // A pod is served by its own node, whatever the router's routes are.
        lan.check(&["pod4"], number, &of_node1, Expect::Answer(&[pod], Seen::Node(2)));
        lan.check(&["pod1", "pod4"], number, &[ClusterIp], Expect::Answer(&[pod], Seen::Client));
        // To node 2, a process of node 1 is a client like any other.
        lan.check(&["node1"], number, &[NodePort(2)], Expect::Answer(&[pod], Seen::Node(2)));
    }
}

/// Asserts that a node port of node 1 carries large TCP transfers in both directions, and datagrams of every size, also
/// with IP options or an extension header.
fn assert_transfers(lan: &Lan, source: &str, number: u8, pod: &str) {
    for family in [0, 1] {
        let http = NodePort(1).of(number, (Protocol::Tcp, family));
        let mut connection = Connection::open(lan.netns(source), http).unwrap();
        assert_eq!(connection.download(16 << 20).unwrap(), pod, "{source} ← {http}");
        assert_eq!(connection.upload(16 << 20).unwrap().server, pod, "{source} → {http}");
        for bytes in [0, 1_500, 8_192, 60_000] {
            let udp = NodePort(1).of(number, (Protocol::Udp, family));
            let answer = ask_udp(lan.netns(source), udp, bytes);
            assert_eq!(answer.unwrap().server, pod, "{bytes} bytes, {source} → {udp}");
            // Sends packets with IP options, or with an extension header.
            let socket = udp_socket(lan.netns(source), udp).unwrap();
            lengthen_headers(&socket).unwrap();
            assert_eq!(
                echo(&socket, pattern::at(0, bytes.min(8_192))).unwrap().server,
                pod,
                "{source} → {udp}"
            );
        }
    }
}

#[test]
fn every_kind_of_address_masquerades_clients_of_local_and_remote_backends() {
    let lan = lan(POINT_TO_POINT);
    assert_main_paths(&lan);
    for frontend in [NodePort(1), NodePort(2), LoadBalancer, ExternalIp] {
        assert_eq!(lan.servers("client", 3, frontend), names(&["pod1", "pod2", "pod3", "pod4"]));
    }
    // Node ports are served only at node addresses; load balancer addresses have only the ports of the Service.
    let address = external(1)[0];
    let elsewhere = SocketAddr::new(address, node_port(1));
    assert!(ask_udp(lan.netns("pod1"), elsewhere, 8).is_err());
}

#[test]
fn masquerade_carries_large_transfers_and_fragments() {
    let lan = lan(POINT_TO_POINT);
    for source in ["client", "pod1", "pod4"] {
        assert_transfers(&lan, source, 2, "pod3");
    }
    assert_transfers(&lan, "client", 1, "pod2");
}

#[test]
fn node_ports_work_with_strict_reverse_path_filters() {
    let lan = lan(Wiring { strict: true, ..POINT_TO_POINT });
    assert_main_paths(&lan);
    assert_hairpins(&lan);
    assert_transfers(&lan, "client", 2, "pod3");
}

#[test]
fn node_ports_work_with_bridged_pods() {
    for strict in [false, true] {
        let lan = lan(Wiring { pods: PodLink::Bridge, strict, ..POINT_TO_POINT });
        assert_main_paths(&lan);
        assert_hairpins(&lan);
        // Pods on one bridge reply to each other without the node's routing.
        for (source, number, pod) in [("pod1", 1, "pod2"), ("client", 2, "pod3"), ("client", 1, "pod2")] {
            assert_transfers(&lan, source, number, pod);
        }
        // The backends are the pod itself, its neighbour and others.
        for frontend in FRONTENDS {
            assert_eq!(lan.servers("pod1", 3, frontend), names(&["pod1", "pod2", "pod3", "pod4"]));
        }
    }
}

#[test]
fn host_network_pods_serve_as_backends() {
    let lan = lan(POINT_TO_POINT);
    let on_node = |number: u8, node: u8| {
        let name = format!("node{node}");
        let mut service = lan.service(number, &[]);
        let addresses = node_addresses(node).to_vec();
        let endpoint =
            Endpoint { pod: name.clone(), node: name, addresses, ready: true, ..Endpoint::default() };
        service.endpoints.push(endpoint);
        service
    };
    let serve = |node: u8| {
        let (netns, name) = (lan.cluster.node(node), format!("node{node}"));
        let udp = |address| server::udp_echo_at(netns, &name, (address, UDP_PORT).into()).unwrap();
        (server::http(netns, &name, HTTP_PORT).unwrap(), node_addresses(node).map(udp))
    };
    let _servers = [1, 2].map(serve);
    lan.apply(&[on_node(4, 1), on_node(5, 2)]);
    // A node does not masquerade connections to a backend in its own network namespace.
    lan.check(&["client", "pod1"], 4, &EXTERNAL, Expect::Answer(&["node1"], Seen::Client));
    lan.check(&["pod1", "pod4"], 4, &[ClusterIp], Expect::Answer(&["node1"], Seen::Client));
    lan.check(&["client", "pod1", "pod4"], 4, &[NodePort(2)], Expect::Answer(&["node1"], Seen::Node(2)));
    // A process of node 1 reaches its own node, directly or through node 2.
    lan.check(&["node1"], 4, &FRONTENDS, Expect::Answer(&["node1"], Seen::Client));
    lan.check(&["node1"], 4, &[NodePort(2)], Expect::Answer(&["node1"], Seen::Node(2)));
    lan.check(&["client", "pod1"], 5, &EXTERNAL, Expect::Answer(&["node2"], Seen::Node(1)));
    lan.check(&["client", "pod1"], 5, &[NodePort(2)], Expect::Answer(&["node2"], Seen::Client));
    for number in [4, 5] {
        let http = NodePort(1).of(number, (Protocol::Tcp, 0));
        let mut connection = Connection::open(lan.netns("client"), http).unwrap();
        connection.download(4 << 20).unwrap();
        connection.upload(4 << 20).unwrap();
    }
}

#[test]
fn service_wins_over_a_listener_at_its_node_port() {
    let lan = lan(POINT_TO_POINT);
    let at = |address| SocketAddr::new(address, node_port(1));
    let listen = |address| lan.cluster.node1.run(|| TcpListener::bind(at(address))).unwrap();
    let bind = |address| lan.cluster.node1.run(|| UdpSocket::bind(at(address))).unwrap();
    let _local = node_addresses(1).map(|address| (listen(address), bind(address)));
    lan.check(&["client", "pod1"], 1, &[NodePort(1)], Expect::Answer(&["pod2"], Seen::Node(1)));
}

#[test]
fn node_address_serves_as_external_ip() {
    let lan = lan(POINT_TO_POINT);
    let mut service = lan.service(4, &["pod3"]);
    service.exposure.external_ips = node_addresses(1).to_vec();
    lan.apply(&[service]);
    for (protocol, family) in EVERY {
        let to = SocketAddr::new(node_addresses(1)[family], LoadBalancer.of(4, (protocol, family)).port());
        for source in ["client", "pod1", "pod4"] {
            let verdict = probe(lan.netns(source), to, protocol);
            assert!(matches!(verdict, Observation::Answered(_)), "{source} → {to}: {verdict:?}");
            // Other ports of the address remain the node's own.
            assert_eq!(ping(lan.netns(source), to.ip(), 56).unwrap(), to.ip());
            let unlisted = SocketAddr::new(to.ip(), 79);
            assert_eq!(
                probe(lan.netns(source), unlisted, protocol),
                Observation::Refused,
                "{source} → {unlisted}"
            );
        }
    }
}

/// Asserts that a pod that is the only backend of a service reaches itself through each address of the service.
fn assert_hairpins(lan: &Lan) {
    lan.apply(&[lan.service(4, &["pod1"])]);
    lan.check(&["pod1"], 4, &FRONTENDS, Expect::Answer(&["pod1"], Seen::Vip));
    // Through the other node the pod's request arrives like that of any other client.
    lan.check(&["pod1"], 4, &[NodePort(2)], Expect::Answer(&["pod1"], Seen::Node(2)));
    for frontend in EXTERNAL {
        for family in [0, 1] {
            let http = frontend.of(4, (Protocol::Tcp, family));
            let mut connection = Connection::open(lan.netns("pod1"), http).unwrap();
            assert_eq!(connection.upload(4 << 20).unwrap().server, "pod1");
            let udp = frontend.of(4, (Protocol::Udp, family));
            assert_eq!(ask_udp(lan.netns("pod1"), udp, 8_192).unwrap().server, "pod1");
        }
    }
}

#[test]
fn pod_reaches_itself_through_every_kind_of_address() {
    assert_hairpins(&lan(POINT_TO_POINT));
}

#[test]
fn services_share_a_backend_and_protocols_share_a_port() {
    let lan = lan(POINT_TO_POINT);
    // Service 2 already has the backend pod3. Adds services 4 and 5 with the same backend. In addition, the TCP and the
    // UDP port of service 5 have the same number.
    let mut shared = lan.service(5, &["pod3"]);
    for port in &mut shared.ports {
        port.port = 7;
    }
    lan.apply(&[lan.service(4, &["pod3"]), shared]);
    for family in [0, 1] {
        let open = |number| {
            let to = NodePort(1).of(number, (Protocol::Tcp, family));
            Connection::open_from_port(lan.netns("client"), 40_001, to).unwrap()
        };
        let mut connections = [2, 4, 5].map(open);
        for connection in connections.iter_mut().chain([&mut open(1)]) {
            assert!(["pod2", "pod3"].contains(&&*connection.ask().unwrap().server));
        }
        let seen: Vec<u16> = connections.iter_mut().map(|c| c.ask().unwrap().seen.port()).collect();
        assert!(seen[0] != seen[1] && seen[1] != seen[2] && seen[0] != seen[2], "{seen:?}");
    }
    for (protocol, family) in EVERY {
        let to = SocketAddr::new(external(5)[family], 7);
        let verdict = probe(lan.netns("client"), to, protocol);
        assert!(matches!(verdict, Observation::Answered(_)), "{protocol:?} {to}: {verdict:?}");
    }
}

#[test]
fn each_service_port_leads_to_its_own_target_port() {
    let lan = lan(POINT_TO_POINT);
    let mut service = lan.service(6, &["pod3"]);
    let port = |name, protocol, port, target_port, node_port| Port {
        name,
        protocol,
        port,
        target_port,
        node_port: Some(node_port),
    };
    service.ports = vec![
        port("http", "TCP", 80, HTTP_PORT, 30_080),
        port("also-http", "TCP", 8080, HTTP_PORT, 30_081),
        port("echo", "UDP", 53, UDP_PORT, 30_080),
    ];
    lan.apply(&[service]);
    for family in [0, 1] {
        for node in [1, 2] {
            let at = |port| {
                let mut address = NodePort(node).of(6, (Protocol::Tcp, family));
                address.set_port(port);
                address
            };
            for port in [30_080, 30_081] {
                let answer = lb_tests::client::ask_http(lan.netns("client"), at(port)).unwrap();
                assert_eq!(answer.server, "pod3");
            }
            assert_eq!(ask_udp(lan.netns("client"), at(30_080), 8).unwrap().server, "pod3");
        }
    }
}

#[test]
fn closed_target_port_refuses_clients() {
    let lan = lan(POINT_TO_POINT);
    let closed = |number, pod| {
        let mut service = lan.service(number, &[pod]);
        service.ports.iter_mut().for_each(|port| port.target_port = CLOSED_PORT);
        service
    };
    lan.apply(&[closed(4, "pod2"), closed(5, "pod3")]);
    for number in [4, 5] {
        lan.check(&["client", "pod1"], number, &EXTERNAL, Expect::Refused);
        lan.check(&["client", "pod4"], number, &[NodePort(2)], Expect::Refused);
    }
}

/// Limits the MTU of the route from `hop` to `to` to 1400 bytes.
fn narrow(hop: &Netns, to: std::net::IpAddr, device: &str) {
    let length = if to.is_ipv4() { 32 } else { 128 };
    hop.ip(&format!("route replace {to}/{length} dev {device} mtu lock 1400\n")).unwrap();
}

fn known_mtu(netns: &Netns, to: SocketAddr) -> u32 {
    path_mtu(&udp_socket(netns, to).unwrap()).unwrap()
}

#[test]
fn path_mtu_discovery_works_through_the_masquerade_in_both_directions() {
    let lan = lan(POINT_TO_POINT);
    let pod3 = lan.cluster.pod("pod3").unwrap();
    for (family, client) in CLIENT.into_iter().enumerate() {
        let at = |frontend: Frontend, protocol| frontend.of(2, (protocol, family));
        for source in ["client", "pod1"] {
            narrow(&lan.cluster.node2, pod3.address(client), "pod3");
            for frontend in [NodePort(1), LoadBalancer] {
                let http = at(frontend, Protocol::Tcp);
                let mut connection = Connection::open(lan.netns(source), http).unwrap();
                assert_eq!(connection.upload(4 << 20).unwrap().server, "pod3", "{source} → {http}");
                assert_eq!(known_mtu(lan.netns(source), http), 1400, "{source} → {http}");
            }
        }
        // A datagram with "don't fragment": the sender's connected socket gets the ICMP error.
        let socket = udp_socket(lan.netns("client2"), at(NodePort(1), Protocol::Udp)).unwrap();
        never_fragment(&socket).unwrap();
        socket.send(pattern::at(0, 1_450)).unwrap();
        let told = || (path_mtu(&socket).unwrap() == 1400).then_some(());
        assert!(lb_tests::wait_for(lb_tests::client::PATIENCE, told).is_some());
        assert_eq!(socket.take_error().unwrap().unwrap().raw_os_error(), Some(Errno::EMSGSIZE as i32));
        assert_eq!(echo(&socket, pattern::at(0, 1_300)).unwrap().server, "pod3");

        narrow(lan.cluster.router.as_ref().unwrap(), client, "eth0");
        // The client has no cached MTU for this address yet; with a small cached MTU, the client would announce a small
        // MSS.
        let mut connection = Connection::open(lan.netns("client"), at(ExternalIp, Protocol::Tcp)).unwrap();
        assert_eq!(connection.download(4 << 20).unwrap(), "pod3");
        let node1 = SocketAddr::new(lan.source(1, "pod3", client), 1);
        assert_eq!(known_mtu(&pod3.netns, node1), 1400, "pod3 has learned the MTU of the way to node1");
    }
}
