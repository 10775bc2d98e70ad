//! Frames that must not reach a Service: those for another host on the link, those of a VLAN that the node does not
//! have, and tunnels that a pod forges.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use etherparse::{IpNumber, PacketBuilder};
use lb_tests::{
    client::{PATIENCE, ask_http},
    cluster::{CLIENT, ClientLink, PodLink, Wiring},
    netns::Netns,
    pump::{self, Layer},
    wait_for,
};

use crate::{
    bed::{Bed, WEB, http, udp, vips},
    flood,
    lan::{Frontend::LoadBalancer, Lan, Observation, Protocol, probe_briefly},
};

/// MAC address of node 1's device towards the client.
const NODE: &str = "02:00:00:00:00:01";
/// MAC address of no host.
const NOBODY: &str = "02:00:00:00:00:99";
/// A Service without endpoints, which rejects clients.
const EMPTY: [IpAddr; 2] = vips(11);

/// A cluster with the Services `web` and `empty`. Node 1's device towards the client has the MAC address [`NODE`].
fn bed() -> Bed {
    let bed = Bed::without_agent(ClientLink::Ethernet, &["pod2", "pod3"]);
    bed.put("empty", EMPTY, &[]);
    bed.cluster.node1.ip(&format!("link set eth0 address {NODE}\n")).unwrap();
    bed
}

/// Makes the client send packets for Services through `device` to this MAC address, from its usual addresses. (No host
/// has the IP address of the next hop.)
fn address_frames(client: &Netns, mac: &str, device: &str) {
    let mut commands = String::new();
    for (network, via, source) in
        [("10.96.0.0/12", "198.51.99.1", CLIENT[0]), ("fd00:10:96::/112", "fd00:198:51:99::1", CLIENT[1])]
    {
        commands += &format!("neighbour replace {via} lladdr {mac} nud permanent dev {device}\n");
        commands += &format!("route replace {network} via {via} dev {device} onlink src {source}\n");
    }
    client.ip(&commands).unwrap();
}

#[track_caller]
fn assert_served(bed: &Bed) {
    for vip in WEB {
        ask_http(&bed.cluster.client, http(vip)).unwrap();
    }
}

#[track_caller]
fn assert_silent(bed: &Bed) {
    for vip in WEB.into_iter().chain(EMPTY) {
        for (to, protocol) in [(http(vip), Protocol::Tcp), (udp(vip), Protocol::Udp)] {
            assert_eq!(
                probe_briefly(&bed.cluster.client, to, protocol),
                Observation::Silent,
                "{to} {protocol:?}"
            );
        }
    }
}

#[test]
fn frames_for_another_host_are_neither_answered_nor_forwarded() {
    let mut bed = bed();
    bed.start_agent();
    for (mac, is_served) in [(NODE, true), (NOBODY, false), (NODE, true)] {
        address_frames(&bed.cluster.client, mac, "eth0");
        if is_served { assert_served(&bed) } else { assert_silent(&bed) }
    }
}

/// The client has two more links to node 1. On one link, frames have a tag with only a priority; on the other, the tag
/// names VLAN 7.
#[test]
fn frames_of_a_vlan_that_the_node_lacks_reach_no_service() {
    let mut bed = bed();
    let (client, node) = (bed.cluster.client.clone(), bed.cluster.node1.clone());
    let _pumps = [("priority", 5 << 13), ("vlan7", 7)].map(|(device, tag)| {
        let pump = pump::connect((&client, device), (&node, device), Layer::Tagged(tag)).unwrap();
        client.ip(&format!("link set {device} up\n")).unwrap();
        node.ip(&format!("link set {device} address {NODE}\nlink set {device} up\n")).unwrap();
        pump
    });
    let wires = ["eth0", "eth1", "priority", "vlan7"].map(|device| ["--wire-device", device]).concat();
    bed.start_agent_with(&wires);
    address_frames(&client, NODE, "priority");
    assert_served(&bed);
    address_frames(&client, NODE, "vlan7");
    assert_silent(&bed);
}

/// An IP in IP packet from node 2 to a pod, with a datagram for `vip` from a client.
fn tunnelled(pod: IpAddr, vip: SocketAddr) -> Vec<u8> {
    let (IpAddr::V4(pod), IpAddr::V4(address)) = (pod, vip.ip()) else { panic!("{pod} and {vip} are IPv4") };
    let (mut inner, mut packet) = (Vec::new(), Vec::new());
    PacketBuilder::ipv4([203, 0, 113, 77], address.octets(), 64)
        .udp(5_555, vip.port())
        .write(&mut inner, b"?")
        .unwrap();
    PacketBuilder::ipv4([172, 18, 0, 2], pod.octets(), 64)
        .write(&mut packet, IpNumber::IPV4, &inner)
        .unwrap();
    packet
}

/// A pod with `CAP_NET_RAW` sends a tunnelled packet that looks like one of a peer.
#[test]
fn tunnel_that_a_pod_forges_reaches_no_backend() {
    const PORT: u16 = 5_454;
    let wiring = Wiring { link: ClientLink::Lan, pods: PodLink::PointToPoint, strict: false };
    let peers = ["--north-south-mode", "dsr", "--dsr-peers", "172.18.0.0/24,fd00:172:18::/64"];
    let lan = Lan::wired(wiring, &peers);
    let mut service = lan.service(1, &["pod2"]);
    service.ports[1].target_port = PORT;
    lan.apply(&[service]);
    let backend = lan.netns("pod2").run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT))).unwrap();
    backend.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let to = LoadBalancer.of(1, (Protocol::Udp, 0));
    let pod = lan.cluster.pod("pod2").unwrap().address(to.ip());
    let send = |netns: &Netns| {
        let socket = netns.run(|| flood::open(false)).unwrap();
        flood::send(&socket, SocketAddr::new(pod, 0), &tunnelled(pod, to)).unwrap();
        backend.recv_from(&mut [0; 8]).ok()
    };
    let from_peer = wait_for(PATIENCE, || send(lan.cluster.node(2)));
    assert!(from_peer.is_some(), "a peer's tunnel reaches the backend");
    // An earlier packet of the peer may arrive late.
    while backend.recv_from(&mut [0; 8]).is_ok() {}
    assert_eq!(send(lan.netns("pod1")), None);
}
