//! Processes of the node: the programs translate their system calls, so that no packet carries a virtual address.

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
};

use lb_tests::{
    client::{
        Connection, PATIENCE, REFUSED, any_address, ask_http, ask_http_by_first_syn, ask_udp, echo,
        udp_socket,
    },
    socket::{begin_connect, disconnect},
    wait_for,
};

use crate::bed::{Bed, HTTP, WEB, ask_briefly, http, udp, vips};

/// The v4-mapped form of the address, as IPv6 sockets use it.
pub(crate) fn mapped(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(v4) => SocketAddr::new(v4.to_ipv6_mapped().into(), address.port()),
        IpAddr::V6(_) => address,
    }
}

/// The frontends in the forms in which IPv4 and IPv6 sockets address them.
pub(crate) fn names(of: fn(IpAddr) -> SocketAddr) -> [SocketAddr; 3] {
    [of(WEB[0]), of(WEB[1]), mapped(of(WEB[0]))]
}

#[test]
fn processes_of_the_node_reach_local_and_remote_backends() {
    for pod in ["pod1", "pod3"] {
        let bed = Bed::with_web(&[pod]);
        for to in names(http) {
            let mut connection = Connection::open(&bed.cluster.node1, to).unwrap();
            assert_eq!(connection.ask().unwrap().server, pod, "{to}");
            assert_eq!(connection.stream().peer_addr().unwrap(), to, "getpeername");
            connection.upload(1 << 20).unwrap();
            connection.download(1 << 20).unwrap();
        }
        for to in names(udp) {
            let socket = udp_socket(&bed.cluster.node1, to).unwrap();
            for _ in 0..3 {
                assert_eq!(echo(&socket, b"?").unwrap().server, pod, "{to}");
            }
            assert_eq!(socket.peer_addr().unwrap(), to, "getpeername");
            socket.send(b"?").unwrap();
            assert_eq!(socket.recv_from(&mut [0; 128]).unwrap().1, to, "recvmsg on a connected socket");
        }
    }
}

/// An unconnected UDP socket of the node, in the family of `like`.
pub(crate) fn free_socket(bed: &Bed, like: SocketAddr) -> UdpSocket {
    let socket = bed.cluster.node1.run(|| UdpSocket::bind((any_address(like.ip()), 0))).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Sends a datagram to an address and returns the server's name and the source of the reply.
pub(crate) fn exchange(socket: &UdpSocket, to: SocketAddr) -> io::Result<(String, SocketAddr)> {
    socket.send_to(b"?", to)?;
    let mut buffer = [0; 128];
    let (length, from) = socket.recv_from(&mut buffer)?;
    let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
    Ok((text.split(' ').next().unwrap_or_default().to_owned(), from))
}

#[test]
fn unconnected_udp_sockets_get_replies_from_the_virtual_address_and_keep_their_backend() {
    let bed = Bed::with_web(&["pod1", "pod2", "pod3", "pod4"]);
    for to in names(udp) {
        let servers: BTreeSet<String> = (0..100)
            .map(|_| {
                let socket = free_socket(&bed, to);
                let first = exchange(&socket, to).unwrap();
                assert_eq!(first.1, to);
                for _ in 0..5 {
                    assert_eq!(exchange(&socket, to).unwrap(), first);
                }
                first.0
            })
            .collect();
        assert_eq!(servers.len(), 4, "100 sockets of 4 backends: {servers:?}");
    }
}

#[test]
fn replies_of_a_shared_backend_come_from_the_last_used_virtual_address() {
    let bed = Bed::with_web(&["pod2"]);
    bed.put("also-web", vips(11), &["pod2"]);
    for (one, other) in WEB.into_iter().zip(vips(11)) {
        wait_for(PATIENCE, || ask_http(&bed.cluster.node1, http(other)).ok()).unwrap();
        let socket = free_socket(&bed, udp(one));
        for vip in [one, other, one, other] {
            assert_eq!(exchange(&socket, udp(vip)).unwrap().1, udp(vip));
        }
    }
}

#[test]
fn replies_on_a_disconnected_socket_come_from_the_last_used_virtual_address() {
    let bed = Bed::with_web(&["pod2"]);
    bed.put("also-web", vips(11), &["pod2"]);
    for (one, other) in WEB.into_iter().zip(vips(11)) {
        wait_for(PATIENCE, || ask_http(&bed.cluster.node1, http(other)).ok()).unwrap();
        let socket = udp_socket(&bed.cluster.node1, udp(one)).unwrap();
        echo(&socket, b"?").unwrap();
        disconnect(&socket).unwrap();
        assert_eq!(exchange(&socket, udp(other)).unwrap().1, udp(other));
        assert_eq!(exchange(&socket, udp(one)).unwrap().1, udp(one));
    }
}

/// For the kernel, connections from one source port through two virtual addresses to the same backend would be the same
/// connection. (With kube-proxy the second one also works: netfilter gives its packets another source port.)
#[test]
fn one_source_port_reaches_a_backend_through_one_virtual_address_only() {
    const PORT: u16 = 61_000;
    let bed = Bed::with_web(&["pod2"]);
    bed.put("also-web", vips(11), &["pod2"]);
    for (one, other) in WEB.into_iter().zip(vips(11)) {
        wait_for(PATIENCE, || ask_http(&bed.cluster.node1, http(other)).ok()).unwrap();
        let mut first = Connection::open_from_port(&bed.cluster.node1, PORT, http(one)).unwrap();
        let second = Connection::open_from_port(&bed.cluster.node1, PORT, http(other));
        assert_eq!(second.unwrap_err().kind(), io::ErrorKind::AddrNotAvailable);
        assert_eq!(first.ask().unwrap().server, "pod2");
    }
}

#[test]
fn replies_to_direct_datagrams_are_left_untouched() {
    let bed = Bed::with_web(&["pod2"]);
    let pod = bed.cluster.pod("pod2").unwrap();
    for vip in WEB {
        let through_the_service = free_socket(&bed, udp(vip));
        exchange(&through_the_service, udp(vip)).unwrap();
        let directly = free_socket(&bed, udp(vip));
        assert_eq!(exchange(&directly, pod.udp(vip)).unwrap().1, pod.udp(vip));
    }
}

#[test]
fn service_without_backends_refuses_sockets_at_once() {
    let bed = Bed::with_web(&[]);
    for to in names(http) {
        let call = bed.cluster.node1.run(|| begin_connect(to));
        assert_eq!(call.unwrap_err().kind(), REFUSED, "{to}: connect() itself fails");
        assert_eq!(ask_http(&bed.cluster.node1, to).unwrap_err().kind(), REFUSED, "{to}");
    }
    for to in names(udp) {
        assert_eq!(udp_socket(&bed.cluster.node1, to).unwrap_err().kind(), REFUSED, "{to}");
        let call = free_socket(&bed, to).send_to(b"?", to);
        assert_eq!(call.unwrap_err().kind(), REFUSED, "{to}: sendmsg() itself fails");
    }
}

#[test]
fn unconnected_udp_socket_follows_its_service() {
    let bed = Bed::with_web(&["pod1"]);
    let sockets = names(udp).map(|to| (free_socket(&bed, to), to));
    let all_hear_from = |pod: &str| {
        for (socket, to) in &sockets {
            let heard = || exchange(socket, *to).ok().filter(|answer| *answer == (pod.to_owned(), *to));
            wait_for(PATIENCE, heard).unwrap_or_else(|| panic!("{to} does not lead to {pod}"));
        }
    };
    all_hear_from("pod1");
    // The endpoint is replaced; then removed and another one added; then the service is deleted and created again.
    bed.put("web", WEB, &["pod3"]);
    all_hear_from("pod3");
    bed.put("web", WEB, &[]);
    for (socket, to) in &sockets {
        let refused = || exchange(socket, *to).err().filter(|error| error.kind() == REFUSED);
        wait_for(PATIENCE, refused).unwrap();
    }
    bed.put("web", WEB, &["pod2"]);
    all_hear_from("pod2");
    bed.cluster.manifests.remove("web").unwrap();
    for (socket, to) in &sockets {
        wait_for(PATIENCE, || exchange(socket, *to).is_err().then_some(())).unwrap();
    }
    bed.put("web", WEB, &["pod4"]);
    all_hear_from("pod4");
}

#[test]
fn affinity_pins_the_whole_node() {
    let bed = Bed::with_web(&["pod1", "pod2", "pod3", "pod4"]);
    let servers = |port: fn(IpAddr) -> SocketAddr| -> BTreeSet<String> {
        let ask = || match port(WEB[0]).port() {
            HTTP => ask_http(&bed.cluster.node1, port(WEB[0])).unwrap().server,
            _ => ask_udp(&bed.cluster.node1, port(WEB[0]), 64).unwrap().server,
        };
        (0..30).map(|_| ask()).collect()
    };
    assert!(servers(http).len() > 1 && servers(udp).len() > 1);
    let yaml = bed.service("web", WEB, &["pod1", "pod2", "pod3", "pod4"]).yaml();
    let sticky = yaml.replacen("spec:\n", "spec:\n  sessionAffinity: ClientIP\n", 1);
    bed.cluster.manifests.write("web", &sticky).unwrap();
    for port in [http, udp] {
        let one = wait_for(PATIENCE, || Some(servers(port)).filter(|servers| servers.len() == 1)).unwrap();
        assert_eq!(servers(port), one);
    }
}

#[test]
fn pod_sockets_are_translated_only_with_socket_lb_all() {
    let mut bed = Bed::with_web(&["pod2"]);
    let peer_seen_by_packets = |bed: &Bed| outcome(bed, "new_flow");
    for everybody in [false, true] {
        if everybody {
            bed.agent.take().unwrap().terminate().unwrap();
            bed.start_agent_with(&["--socket-lb", "all"]);
        }
        for to in names(http) {
            let before = (peer_seen_by_packets(&bed), conntrack(&bed));
            let mut connection = Connection::open(bed.netns("pod1"), to).unwrap();
            assert_eq!(connection.ask().unwrap().server, "pod2");
            assert_eq!(connection.stream().peer_addr().unwrap(), to);
            assert_eq!(peer_seen_by_packets(&bed), before.0 + 1, "each connection counts once");
            assert_eq!(conntrack(&bed) > before.1, !everybody, "translated packet by packet, {to}");
        }
    }
}

/// The socket hooks do not know a pod's source address, which only its packets show. So with a deny list the hooks
/// translate no calls of pods, and tc checks their packets.
#[test]
fn denied_pods_reach_no_service_through_their_sockets() {
    let mut bed = Bed::with_web(&["pod2"]);
    let [v4, v6] = bed.cluster.pod("pod1").unwrap().addresses;
    bed.agent.take().unwrap().terminate().unwrap();
    bed.start_agent_with(&["--socket-lb", "all", "--deny-source", &format!("{v4}/32,{v6}/128")]);
    for vip in WEB {
        assert_eq!(ask_briefly(bed.netns("pod1"), vip), None, "{vip}");
        for served in [bed.netns("pod2"), &bed.cluster.node1, &bed.cluster.client] {
            assert_eq!(ask_http_by_first_syn(served, http(vip)).unwrap().server, "pod2", "{vip}");
        }
    }
    assert!(outcome(&bed, "source_not_allowed") >= 2);
}

/// Number of packets with this outcome, from `status`.
pub(crate) fn outcome(bed: &Bed, name: &str) -> u64 {
    let outcomes = &bed.status()["outcomes"];
    let entry = outcomes.as_array().unwrap().iter().find(|entry| entry["outcome"] == name).unwrap();
    entry["packets"].as_u64().unwrap()
}

/// Number of flows in the flow table.
fn conntrack(bed: &Bed) -> usize {
    bed.json(&["conntrack", "list"]).as_array().unwrap().len()
}
