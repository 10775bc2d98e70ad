//! ICMP errors through the translation: path MTU discovery and closed ports.

use std::net::IpAddr;

use lb_tests::{
    client::{Connection, PATIENCE, REFUSED, ask_http, udp_socket},
    cluster::{CLIENT, CLOSED_PORT, ClientLink},
    manifests::Port,
    netns::Netns,
    pattern,
    socket::{QueuedError, never_fragment, next_error, path_mtu, queue_errors},
    wait_for,
};
use nix::errno::Errno;

use crate::bed::{Bed, HTTP, UDP, WEB, http, udp, vips};

/// Sets the MTU of the route from `hop` to `to`: 1400 bytes.
fn narrow(hop: &Netns, to: IpAddr, via: &str) {
    let length = if to.is_ipv4() { 32 } else { 128 };
    hop.ip(&format!("route replace {to}/{length} {via} mtu lock 1400\n")).unwrap();
}

/// The path MTU to `to` that the kernel has cached for `netns`.
fn known_mtu(netns: &Netns, to: IpAddr) -> u32 {
    path_mtu(&udp_socket(netns, udp(to)).unwrap()).unwrap()
}

#[test]
fn tcp_uploads_discover_a_smaller_mtu_before_the_backend() {
    let bed = Bed::with_web(&["pod3"]);
    for source in ["client", "pod1"] {
        for vip in WEB {
            let netns = bed.netns(source);
            assert_eq!(known_mtu(netns, vip), 1500);
            narrow(&bed.cluster.node2, bed.cluster.pod("pod3").unwrap().address(vip), "dev pod3");
            assert_eq!(Connection::open(netns, http(vip)).unwrap().upload(4 << 20).unwrap().server, "pod3");
            assert_eq!(known_mtu(netns, vip), 1400, "{source} has learned the path MTU to {vip}");
        }
    }
}

#[test]
fn tcp_downloads_discover_a_smaller_mtu_before_the_client() {
    let bed = Bed::with_link_and_web(ClientLink::Routed, &["pod1", "pod3"]);
    let router = bed.cluster.router.as_ref().unwrap();
    for (vip, client) in WEB.into_iter().zip(CLIENT) {
        narrow(router, client, "dev eth0");
        let mut connection = Connection::open(&bed.cluster.client, http(vip)).unwrap();
        let server = connection.download(4 << 20).unwrap();
        let pod = bed.cluster.pod(&server).unwrap();
        assert_eq!(
            known_mtu(&pod.netns, client),
            1400,
            "{server} has learned the MTU of the way to {client}"
        );
    }
}

#[test]
fn path_mtu_of_the_virtual_address_reaches_udp_sockets() {
    let bed = Bed::with_web(&["pod3"]);
    for vip in WEB {
        narrow(&bed.cluster.node2, bed.cluster.pod("pod3").unwrap().address(vip), "dev pod3");
        let socket = udp_socket(&bed.cluster.client, udp(vip)).unwrap();
        never_fragment(&socket).unwrap();
        queue_errors(&socket).unwrap();
        let too_big = pattern::at(0, 1_450);
        socket.send(too_big).unwrap();
        let error = wait_for(PATIENCE, || next_error(&socket).unwrap()).unwrap();
        let expected = QueuedError {
            errno: Errno::EMSGSIZE,
            from_icmp: true,
            info: 1400,
            // The client sends to the virtual address, so the error must come from that address, not from the hop.
            offender: Some(vip),
            destination: udp(vip),
        };
        assert_eq!(error, expected);
        assert_eq!(path_mtu(&socket).unwrap(), 1400);
        let refused = socket.send(too_big).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(Errno::EMSGSIZE as i32), "{refused}");
        assert_eq!(lb_tests::client::echo(&socket, pattern::at(0, 1_300)).unwrap().server, "pod3");
    }
}

#[test]
fn closed_target_port_refuses_clients_of_the_virtual_address() {
    let bed = Bed::with_web(&["pod2"]);
    let mut service = bed.service("closed", vips(11), &["pod2", "pod3"]);
    service.ports = vec![
        Port { name: "tcp", protocol: "TCP", port: HTTP, target_port: CLOSED_PORT, node_port: None },
        Port { name: "udp", protocol: "UDP", port: UDP, target_port: CLOSED_PORT, node_port: None },
    ];
    bed.cluster.manifests.put(&service).unwrap();
    for source in ["client", "pod1"] {
        for vip in vips(11) {
            let netns = bed.netns(source);
            let refused = || ask_http(netns, http(vip)).is_err_and(|error| error.kind() == REFUSED);
            assert!(wait_for(PATIENCE, || refused().then_some(())).is_some(), "TCP from {source} to {vip}");
            let socket = udp_socket(netns, udp(vip)).unwrap();
            queue_errors(&socket).unwrap();
            socket.send(b"?").unwrap();
            assert_eq!(socket.recv(&mut [0; 8]).unwrap_err().kind(), REFUSED);
            let error = next_error(&socket).unwrap().unwrap();
            assert_eq!((error.errno, error.destination), (Errno::ECONNREFUSED, udp(vip)));
            assert_eq!(error.offender, Some(vip));
        }
    }
}
