//! Tests of fragments of UDP datagrams, in any order, between real sockets.

use std::{
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering},
    thread,
    time::Duration,
};

use etherparse::{IpNumber, Ipv4Header, Ipv6Header, UdpHeader};
use lb_tests::{
    StopOnDrop,
    client::{PATIENCE, ask_http, ask_udp, echo, udp_socket, udp_socket_from},
    cluster::{CLIENT, ClientLink, PodLink, UDP_PORT, Wiring},
    netns::Netns,
    pattern, server, wait_for,
};

use crate::{
    bed::{Bed, WEB, http, udp},
    flood,
    ipvs::on_one_cpu,
    lan::{
        Frontend::{LoadBalancer, NodePort},
        Lan, Protocol,
    },
    sockets::outcome,
};

/// Number of bytes of data in each fragment except the last.
const SIZE: usize = 1000;
/// Number of bytes of a payload that makes a datagram of three fragments.
const PAYLOAD: usize = 2500;
const ORDERS: [[usize; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

/// The identification for the next datagram; it repeats after 65,536 datagrams.
fn next_identification() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The fragments of a datagram, each with an IP header.
fn fragments(from: SocketAddr, to: SocketAddr, payload: &[u8], identification: u16) -> Vec<Vec<u8>> {
    let (ports, mut datagram) = ((from.port(), to.port()), Vec::new());
    let checksummed = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let header = Ipv4Header::new(0, 64, IpNumber::UDP, from.octets(), to.octets()).unwrap();
            UdpHeader::with_ipv4_checksum(ports.0, ports.1, &header, payload)
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let header =
                Ipv6Header { source: from.octets(), destination: to.octets(), ..Ipv6Header::default() };
            UdpHeader::with_ipv6_checksum(ports.0, ports.1, &header, payload)
        }
        _ => panic!("{from} and {to} are of different families"),
    };
    checksummed.unwrap().write(&mut datagram).unwrap();
    datagram.extend(payload);
    let last = (datagram.len() - 1) / SIZE;
    let part = |(n, part)| fragment((from.ip(), to.ip()), identification, n * SIZE / 8, n < last, part);
    datagram.chunks(SIZE).enumerate().map(part).collect()
}

fn fragment(ends: (IpAddr, IpAddr), identification: u16, offset: usize, more: bool, part: &[u8]) -> Vec<u8> {
    let offset = u16::try_from(offset).unwrap();
    let mut bytes = Vec::new();
    match ends {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let length = u16::try_from(part.len()).unwrap();
            let header = Ipv4Header {
                identification,
                dont_fragment: false,
                more_fragments: more,
                fragment_offset: offset.try_into().unwrap(),
                ..Ipv4Header::new(length, 64, IpNumber::UDP, from.octets(), to.octets()).unwrap()
            };
            header.write(&mut bytes).unwrap();
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let header = Ipv6Header {
                payload_length: u16::try_from(part.len() + 8).unwrap(),
                next_header: IpNumber::IPV6_FRAGMENTATION_HEADER,
                hop_limit: 64,
                source: from.octets(),
                destination: to.octets(),
                ..Ipv6Header::default()
            };
            header.write(&mut bytes).unwrap();
            bytes.extend([IpNumber::UDP.0, 0]);
            bytes.extend((offset << 3 | u16::from(more)).to_be_bytes());
            bytes.extend(u32::from(identification).to_be_bytes());
        }
        _ => panic!("{ends:?} are of different families"),
    }
    bytes.extend(part);
    bytes
}

/// Sends these fragments from a namespace, in the order of the indices `order`.
fn send(netns: &Netns, to: SocketAddr, parts: &[Vec<u8>], order: &[usize]) {
    let raw = netns.run(|| flood::open(to.is_ipv6())).unwrap();
    for part in order {
        flood::send(&raw, to, &parts[*part]).unwrap();
    }
}

/// Sends the payload from a connected socket's address, in fragments in this order.
fn send_from(netns: &Netns, socket: &UdpSocket, identification: u16, order: &[usize]) {
    let (from, to) = (socket.local_addr().unwrap(), socket.peer_addr().unwrap());
    send(netns, to, &fragments(from, to, pattern::at(0, PAYLOAD), identification), order);
}

/// Name of the server that answers the socket's datagram.
fn answer(socket: &UdpSocket) -> io::Result<String> {
    let mut buffer = vec![0; 65_536];
    let len = socket.recv(&mut buffer)?;
    let line = buffer[..len].iter().position(|byte| *byte == b'\n').unwrap();
    assert_eq!(&buffer[line + 1..len], pattern::at(0, PAYLOAD), "the payload");
    Ok(String::from_utf8_lossy(&buffer[..line]).split(' ').next().unwrap().to_owned())
}

/// Asserts that the server answers datagrams in every order of their fragments.
#[track_caller]
fn assert_every_order(netns: &Netns, to: SocketAddr, server: &str) {
    assert_orders(netns, to, server, &ORDERS);
}

/// Asserts that the server answers datagrams in these orders of their fragments. Reports all failures together.
#[track_caller]
fn assert_orders<const N: usize>(netns: &Netns, to: SocketAddr, server: &str, orders: &[[usize; N]]) {
    let ask = |order: &[usize; N]| {
        let socket = udp_socket(netns, to).unwrap();
        send_from(netns, &socket, next_identification(), order);
        let got = answer(&socket);
        (!matches!(&got, Ok(name) if name == server)).then(|| format!("{order:?}: {got:?}"))
    };
    let failed: Vec<String> = orders.iter().filter_map(ask).collect();
    assert!(failed.is_empty(), "from {} to {to}: {failed:?}", netns.name());
}

#[test]
fn fragments_in_every_order_reach_the_backend_of_a_cluster_ip() {
    for backend in ["pod2", "pod3"] {
        let bed = Bed::with_web(&[backend]);
        for source in ["client", "pod1"] {
            for vip in WEB {
                assert_every_order(bed.netns(source), udp(vip), backend);
            }
        }
    }
}

#[test]
fn fragments_in_every_order_pass_a_device_without_ethernet() {
    let bed = Bed::with_link_and_web(ClientLink::Layer3, &["pod3"]);
    for vip in WEB {
        assert_every_order(&bed.cluster.client, udp(vip), "pod3");
    }
}

/// The flows are masqueraded; under `--forwarding direct` their packets also bypass the stack.
#[test]
fn fragments_in_every_order_reach_the_backends_of_node_ports_and_load_balancers() {
    const WIRING: Wiring = Wiring { link: ClientLink::Lan, pods: PodLink::PointToPoint, strict: false };
    for arguments in [&[][..], &["--forwarding", "direct"]] {
        let lan = Lan::wired(WIRING, arguments);
        let backends = [(1, "pod2"), (2, "pod3")];
        lan.apply(&backends.map(|(number, pod)| lan.service(number, &[pod])));
        for (number, pod) in backends {
            for family in [0, 1] {
                for frontend in [NodePort(1), LoadBalancer] {
                    let to = frontend.of(number, (Protocol::Udp, family));
                    assert_every_order(lan.netns("client"), to, pod);
                }
            }
        }
    }
}

/// The answers come from a backend on the agent's node, and from one on another node.
#[test]
fn fragments_of_answers_reach_the_client_in_every_order() {
    for backend in ["pod2", "pod3"] {
        let bed = Bed::with_web(&[backend]);
        let pod = bed.cluster.pod(backend).unwrap();
        for source in ["client", "pod1"] {
            for vip in WEB {
                let socket = udp_socket(bed.netns(source), udp(vip)).unwrap();
                let client = echo(&socket, b"?").unwrap().local;
                let failed: Vec<_> = ORDERS
                    .iter()
                    .filter(|order| {
                        let from = SocketAddr::new(pod.address(vip), UDP_PORT);
                        let parts = fragments(from, client, pattern::at(0, PAYLOAD), next_identification());
                        send(&pod.netns, client, &parts, *order);
                        let mut buffer = vec![0; 65_536];
                        !socket.recv(&mut buffer).is_ok_and(|len| buffer[..len] == *pattern::at(0, PAYLOAD))
                    })
                    .collect();
                assert!(failed.is_empty(), "from {backend} to {source} by {vip}: {failed:?}");
            }
        }
    }
}

/// These datagrams are for a socket of the node, not for a Service.
#[test]
fn fragments_in_every_order_reach_sockets_of_the_node() {
    const PORT: u16 = 4444;
    let bed = Bed::with_web(&["pod2"]);
    for node in [IpAddr::from([198, 51, 100, 1]), "fd00:198:51:100::1".parse().unwrap()] {
        let to = SocketAddr::new(node, PORT);
        let _server = server::udp_echo_at(&bed.cluster.node1, "node1", to).unwrap();
        assert_every_order(&bed.cluster.client, to, "node1");
    }
}

/// A repeated fragment passes, or is dropped because its datagram is complete and the socket has received it.
#[test]
fn repeated_fragments_lose_no_datagram() {
    const PORT: u16 = 4444;
    const REPEATED: [[usize; 5]; 6] = [
        [0, 1, 2, 2, 1],
        [0, 0, 1, 1, 2],
        [2, 2, 1, 1, 0],
        [2, 1, 0, 2, 1],
        [1, 0, 0, 1, 2],
        [2, 0, 2, 0, 1],
    ];
    let bed = Bed::with_web(&["pod2"]);
    for vip in WEB {
        assert_orders(&bed.cluster.client, udp(vip), "pod2", &REPEATED);
    }
    for node in [IpAddr::from([198, 51, 100, 1]), "fd00:198:51:100::1".parse().unwrap()] {
        let to = SocketAddr::new(node, PORT);
        let _server = server::udp_echo_at(&bed.cluster.node1, "node1", to).unwrap();
        assert_orders(&bed.cluster.client, to, "node1", &REPEATED);
    }
}

/// All datagrams have the same addresses and the same identification. Each must reach the backend of its own flow,
/// although the previous datagram was sent a moment ago.
#[test]
fn reused_identification_leads_to_the_backend_of_the_new_datagram() {
    let bed = Bed::with_web(&["pod2", "pod3"]);
    for vip in WEB {
        let identification = next_identification();
        let failed = (0..16).filter(|round| {
            let socket = udp_socket(&bed.cluster.client, udp(vip)).unwrap();
            let order = if round % 2 == 0 { [0, 1, 2] } else { [2, 1, 0] };
            send_from(&bed.cluster.client, &socket, identification, &order);
            answer(&socket).is_err()
        });
        assert_eq!(failed.count(), 0, "to {vip}");
    }
}

/// The programs send held fragments into the node again. If such a fragment is a duplicate and arrives after its
/// datagram is complete, the programs must drop it. If they held it again, each further datagram with this
/// identification would release all duplicates again.
#[test]
fn fragment_is_held_only_once() {
    const REPEATED: usize = 99;
    let bed = Bed::with_web(&["pod2"]);
    for vip in WEB {
        let count = |name| outcome(&bed, name);
        let (held, dropped) = (count("fragment_held"), count("fragment_dropped"));
        let socket = udp_socket(&bed.cluster.client, udp(vip)).unwrap();
        let identification = next_identification();
        // The programs send held fragments back in reverse order, so the duplicates come back after the datagram is
        // complete.
        let all = [&[1; REPEATED][..], &[2, 1, 0]].concat();
        for order in [&all[..], &[2, 1, 0], &[2, 1, 0], &[2, 1, 0]] {
            on_one_cpu(|| send_from(&bed.cluster.client, &socket, identification, order));
            assert_eq!(answer(&socket).unwrap(), "pod2");
        }
        let counted = || (count("fragment_held") - held, count("fragment_dropped") - dropped);
        let expected = (REPEATED as u64 + 4 * 2, REPEATED as u64);
        let reached = wait_for(Duration::from_secs(2), || (counted() == expected).then_some(()));
        assert!(reached.is_some(), "held and dropped fragments to {vip}: {:?}, not {expected:?}", counted());
    }
}

/// A flood of later fragments, whose first fragment never comes, must affect neither whole packets nor datagrams whose
/// fragments are in order.
#[test]
fn flood_of_early_fragments_loses_no_other_traffic() {
    let bed = Bed::with_web(&["pod2", "pod3"]);
    let (stop, sent) = (AtomicBool::new(false), AtomicU32::new(0));
    let floods = |vip: IpAddr| {
        let client = CLIENT[usize::from(vip.is_ipv6())];
        let (from, to) = (SocketAddr::new(client, 9), udp(vip));
        let raw = bed.cluster.client.run(|| flood::open(to.is_ipv6())).unwrap();
        while !stop.load(Ordering::Relaxed) {
            let parts = fragments(from, to, pattern::at(0, PAYLOAD), next_identification());
            flood::send(&raw, to, &parts[1]).unwrap();
            sent.fetch_add(1, Ordering::Relaxed);
        }
    };
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        WEB.iter().for_each(|vip| drop(scope.spawn(|| floods(*vip))));
        let fills_the_ring_twice = || (sent.load(Ordering::Relaxed) > 2_048).then_some(());
        wait_for(PATIENCE, fills_the_ring_twice).expect("too few early fragments");
        for _ in 0..10 {
            for vip in WEB {
                ask_http(&bed.cluster.client, http(vip)).unwrap();
                for bytes in [8, 8_192] {
                    ask_udp(bed.netns("pod1"), udp(vip), bytes).unwrap();
                }
            }
        }
    });
    println!("{} early fragments", sent.into_inner());
    for vip in WEB {
        assert_every_order_of_one(&bed, vip);
    }
}

/// Asserts that a server answers a datagram in every order of its fragments. This shows that the programs still hold
/// early fragments after the flood.
fn assert_every_order_of_one(bed: &Bed, vip: IpAddr) {
    let from = SocketAddr::new(CLIENT[usize::from(vip.is_ipv6())], 40_000);
    let socket = bed.cluster.client.run(|| udp_socket_from(from, udp(vip))).unwrap();
    for order in ORDERS {
        send_from(&bed.cluster.client, &socket, next_identification(), &order);
        answer(&socket).unwrap();
    }
}
