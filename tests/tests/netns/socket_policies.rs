//! Processes of the node: every kind of virtual address, traffic policies and source ranges.

use std::{
    io,
    net::{IpAddr, SocketAddr},
};

use lb_tests::{
    client::{PATIENCE, REFUSED, ask_http, ask_udp},
    cluster::ClientLink,
    manifests::{Service, Type},
    netns::Netns,
    socket::begin_connect,
    wait_for,
};

use crate::{
    bed::{Bed, HTTP, RANGES, WEB, http, udp, vips},
    sockets::{exchange, free_socket, mapped},
};

const NODE_PORTS: [u16; 2] = [30_080, 30_053];
/// Addresses of node1, then loopback addresses.
const ADDRESSES: [&str; 6] =
    ["198.51.100.1", "172.18.0.1", "fd00:198:51:100::1", "fd00:172:18::1", "127.0.0.1", "::1"];
const EXTERNAL: [&str; 2] = ["192.0.2.10", "2001:db8::10"];

/// The service `web` with this type and with node ports.
fn exposed(bed: &Bed, pods: &[&str], kind: Type) -> Service {
    let mut service = bed.service("web", WEB, pods);
    for (port, node_port) in service.ports.iter_mut().zip(NODE_PORTS) {
        port.node_port = Some(node_port);
    }
    service.exposure.kind = kind;
    service
}

fn put(bed: &Bed, service: &Service) {
    bed.cluster.manifests.put(service).unwrap();
}

/// Waits for an answer and returns the server.
fn eventually(netns: &Netns, to: SocketAddr) -> String {
    let mut last = None;
    wait_for(PATIENCE, || match ask_http(netns, to) {
        Ok(answer) => Some(answer.server),
        Err(error) => {
            last = Some(error);
            None
        }
    })
    .unwrap_or_else(|| panic!("{to}: {last:?}"))
}

/// Waits until `connect()` itself fails with this error, before any packet.
fn eventually_fails(bed: &Bed, to: SocketAddr, with: io::ErrorKind) {
    let attempt = || {
        let error = bed.cluster.node1.run(|| begin_connect(to)).err()?;
        (error.kind() == with).then_some(())
    };
    wait_for(PATIENCE, attempt).unwrap_or_else(|| panic!("{to} does not fail with {with:?}"));
}

#[test]
fn node_reaches_node_ports_on_all_its_addresses_and_loopback() {
    for pod in ["pod1", "pod3"] {
        let bed = Bed::with_web(&[pod]);
        put(&bed, &exposed(&bed, &[pod], Type::NodePort));
        for address in ADDRESSES.map(|text| text.parse::<IpAddr>().unwrap()) {
            let [tcp, udp] = NODE_PORTS.map(|port| SocketAddr::new(address, port));
            for to in [tcp, mapped(tcp)] {
                assert_eq!(eventually(&bed.cluster.node1, to), pod, "{to}");
            }
            for to in [udp, mapped(udp)] {
                assert_eq!(ask_udp(&bed.cluster.node1, to, 64).unwrap().server, pod, "{to}");
                let answer = exchange(&free_socket(&bed, to), to).unwrap();
                assert_eq!(answer, (pod.to_owned(), to));
            }
        }
    }
}

#[test]
fn node_ports_are_not_served_on_loopback_of_pods() {
    let mut bed = Bed::with_web(&["pod2"]);
    put(&bed, &exposed(&bed, &["pod2"], Type::NodePort));
    let loopback = SocketAddr::from(([127, 0, 0, 1], NODE_PORTS[0]));
    for arguments in [&[][..], &["--socket-lb", "all"]] {
        bed.agent.take().unwrap().terminate().unwrap();
        bed.start_agent_with(arguments);
        assert_eq!(eventually(&bed.cluster.node1, loopback), "pod2");
        assert_eq!(ask_http(bed.netns("pod1"), loopback).unwrap_err().kind(), REFUSED);
    }
}

#[test]
fn node_reaches_load_balancer_and_external_ips() {
    let bed = Bed::with_web(&["pod1"]);
    let mut service = exposed(&bed, &["pod3"], Type::LoadBalancer);
    service.exposure.external_ips = vec!["192.0.2.20".parse().unwrap()];
    service.exposure.load_balancer_ips = EXTERNAL.map(|text| text.parse().unwrap()).to_vec();
    put(&bed, &service);
    for text in [EXTERNAL[0], EXTERNAL[1], "192.0.2.20"] {
        let to = http(text.parse().unwrap());
        assert_eq!(eventually(&bed.cluster.node1, to), "pod3", "{to}");
    }
}

#[test]
fn node_reaches_remote_endpoints_despite_a_local_external_policy() {
    let bed = Bed::with_web(&["pod1"]);
    let mut service = exposed(&bed, &["pod3"], Type::NodePort);
    service.exposure.external_local = true;
    put(&bed, &service);
    for address in ["198.51.100.1", "127.0.0.1", "::1"] {
        let to = SocketAddr::new(address.parse().unwrap(), NODE_PORTS[0]);
        assert_eq!(eventually(&bed.cluster.node1, to), "pod3", "{to}");
    }
}

#[test]
fn local_internal_policy_makes_remote_endpoints_unreachable_from_the_node() {
    let bed = Bed::with_web(&["pod1"]);
    let mut service = bed.service("web", WEB, &["pod3"]);
    service.exposure.internal_local = true;
    put(&bed, &service);
    for vip in WEB {
        eventually_fails(&bed, http(vip), io::ErrorKind::HostUnreachable);
        let error = exchange(&free_socket(&bed, udp(vip)), udp(vip)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::HostUnreachable, "{vip}");
    }
    service.endpoints.push(bed.cluster.pod("pod2").unwrap().endpoint());
    put(&bed, &service);
    for vip in WEB {
        assert_eq!(eventually(&bed.cluster.node1, http(vip)), "pod2");
    }
}

#[test]
fn source_ranges_check_the_nodes_own_address_as_client() {
    let bed = Bed::with_web(&["pod1"]);
    let mut service = exposed(&bed, &["pod1"], Type::LoadBalancer);
    service.exposure.load_balancer_ips = EXTERNAL.map(|text| text.parse().unwrap()).to_vec();
    service.exposure.source_ranges = vec!["203.0.113.0/24".to_owned(), "2001:db8:7::/64".to_owned()];
    put(&bed, &service);
    for text in EXTERNAL {
        eventually_fails(&bed, http(text.parse().unwrap()), io::ErrorKind::HostUnreachable);
    }
    // The hooks check the node's primary address of each family, whatever source address the packets get. The source
    // ranges below contain the primary addresses.
    service.exposure.source_ranges =
        ["198.51.100.1/32", "172.18.0.1/32", "fd00:198:51:100::1/128", "fd00:172:18::1/128"]
            .map(str::to_owned)
            .to_vec();
    put(&bed, &service);
    for text in EXTERNAL {
        assert_eq!(eventually(&bed.cluster.node1, http(text.parse().unwrap())), "pod1");
    }
}

#[test]
fn unlisted_ports_are_refused_and_unassigned_cluster_ips_are_unreachable() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1"]);
    bed.start_agent_with(&RANGES);
    for vip in WEB {
        eventually_fails(&bed, SocketAddr::new(vip, 81), REFUSED);
    }
    for vip in vips(77) {
        eventually_fails(&bed, SocketAddr::new(vip, HTTP), io::ErrorKind::HostUnreachable);
    }
}

/// getaddrinfo(3) sorts addresses by the source that connect() gives a UDP socket (RFC 6724).
#[test]
fn udp_connect_to_any_port_of_a_cluster_ip_yields_a_source_address() {
    let bed = Bed::with_web(&["pod1"]);
    let node1 = &bed.cluster.node1;
    for vip in WEB {
        // Port 0, the discard port, the port of a TCP service, the last port.
        for port in [0, 9, HTTP, 65_535] {
            for to in [SocketAddr::new(vip, port), mapped(SocketAddr::new(vip, port))] {
                let socket = free_socket(&bed, to);
                socket.connect(to).unwrap_or_else(|error| panic!("{to}: {error}"));
                let source = socket.local_addr().unwrap().ip().to_canonical();
                assert!(ADDRESSES[..4].contains(&&*source.to_string()), "{to} from {source}");
                let error = socket.send(b"?").and_then(|_| socket.recv(&mut [0; 8])).unwrap_err();
                // The hook has connected the socket to port 0 of the node. Linux itself fails a send from an IPv6
                // socket to port 0 of an IPv4 address.
                let is_mapped = vip.is_ipv4() && to.is_ipv6();
                assert_eq!(
                    error.kind(),
                    if is_mapped { io::ErrorKind::InvalidInput } else { REFUSED },
                    "{to}"
                );
                if port != 0 {
                    let error = free_socket(&bed, to).send_to(b"?", to).unwrap_err();
                    assert_eq!(error.kind(), REFUSED, "{to}");
                }
            }
        }
        assert_eq!(ask_http(node1, http(vip)).unwrap().server, "pod1");
    }
}
