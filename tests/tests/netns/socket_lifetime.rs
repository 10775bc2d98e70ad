//! Sockets of processes on the node through changes of services, backends and agents.

use std::{
    fs::File,
    io,
    net::{IpAddr, SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
    process::Command,
    time::Duration,
};

use aya::{
    Ebpf, EbpfLoader,
    programs::{CgroupAttachMode, CgroupSockAddr},
};
use lb_common::capacity;
use lb_datapath::load_program;
use lb_tests::{
    agent::{self, run},
    client::{Connection, PATIENCE, REFUSED, ask_http, ask_udp, echo, limit, udp_socket},
    manifests::{Port, Type},
    wait_for,
};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, sendto, socket};

use crate::{
    bed::{Bed, UDP, WEB, ask_briefly, http, udp, vips},
    sockets::{exchange, free_socket, names},
};

#[test]
fn connected_udp_socket_gets_an_error_when_its_backend_is_removed() {
    let bed = Bed::with_web(&["pod1"]);
    let connect = |to| udp_socket(&bed.cluster.node1, to).unwrap();
    let sockets = names(udp).map(connect);
    let others = WEB.map(|vip| connect(bed.cluster.pod("pod1").unwrap().udp(vip)));
    let mut connections = WEB.map(|vip| Connection::open(&bed.cluster.node1, http(vip)).unwrap());
    for socket in sockets.iter().chain(&others) {
        assert_eq!(echo(socket, b"?").unwrap().server, "pod1");
    }
    bed.put("web", WEB, &["pod3"]);
    for (socket, to) in sockets.iter().zip(names(udp)) {
        expect_closed(socket, to);
        // The application can reconnect the socket.
        socket.connect(to).unwrap();
        assert_eq!(echo(socket, b"?").unwrap().server, "pod3", "{to}");
    }
    for socket in &others {
        assert_eq!(echo(socket, b"?").unwrap().server, "pod1", "connected without a service");
    }
    for connection in &mut connections {
        assert_eq!(connection.ask().unwrap().server, "pod1", "TCP connections stay while the pod lives");
    }
}

/// The agent closes UDP sockets of the node that were connected before their Service or its port existed: the kernel
/// runs no hook when such a socket sends, so its datagrams would never reach the Service.
#[test]
fn udp_socket_connected_before_its_service_exists_gets_an_error_when_it_does() {
    const LATER: u16 = 5_300;
    const NODE_PORT: u16 = 30_300;
    let bed = Bed::with_web(&["pod1"]);
    let node = &bed.cluster.node1;
    // Without a route, no socket could be connected to an address that nobody has.
    node.ip("route add default via 198.51.100.2\nroute add default via fd00:198:51:100::2\n").unwrap();
    let own: [IpAddr; 2] = ["198.51.100.1", "fd00:198:51:100::1"].map(|address| address.parse().unwrap());
    let node_port = own.map(|address| SocketAddr::new(address, NODE_PORT));
    let early = [vips(12).map(udp), WEB.map(|vip| SocketAddr::new(vip, LATER)), node_port].concat();
    let sockets: Vec<_> = early.iter().map(|&to| udp_socket(node, to).unwrap()).collect();
    let others = WEB.map(|vip| udp_socket(node, bed.cluster.pod("pod1").unwrap().udp(vip)).unwrap());

    let mut web = bed.service("web", WEB, &["pod1"]);
    let port = Port { name: "later", port: LATER, node_port: Some(NODE_PORT), ..web.ports[1] };
    web.ports.push(port);
    web.exposure.kind = Type::NodePort;
    bed.cluster.manifests.put(&web).unwrap();
    bed.put("later", vips(12), &["pod3"]);
    for (socket, to) in sockets.iter().zip(early) {
        expect_closed(socket, to);
        socket.connect(to).unwrap();
        let server = echo(socket, b"?").unwrap().server;
        assert_eq!(server, if to.port() == UDP { "pod3" } else { "pod1" }, "{to}");
    }
    for socket in &others {
        assert_eq!(echo(socket, b"?").unwrap().server, "pod1", "connected to no Service");
    }
}

/// Waits until the agent has closed the socket, which is connected to `to`, and removes the time limit of reads.
fn expect_closed(socket: &UdpSocket, to: SocketAddr) {
    socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    // A read that is pending, or a later one, fails with `ECONNABORTED`.
    let told = || {
        let error = socket.recv(&mut [0; 128]).err()?;
        (error.kind() == io::ErrorKind::ConnectionAborted).then_some(())
    };
    wait_for(PATIENCE, told).unwrap_or_else(|| panic!("{to}: the socket got no error"));
    socket.set_read_timeout(Some(limit())).unwrap();
}

/// If `connect(2)` fails, a UDP socket stays connected to its previous peer.
#[test]
fn connected_udp_socket_keeps_its_backend_if_another_connect_fails() {
    let bed = Bed::with_web(&["pod1"]);
    bed.put("empty", vips(40), &[]);
    let mut idle = bed.service("weightless", vips(41), &["pod1"]);
    idle.annotations =
        vec![("lb.dev/scheduler", "wrr".to_owned()), ("lb.dev/weights", r#"{"pod1": 0}"#.to_owned())];
    bed.cluster.manifests.put(&idle).unwrap();
    let node = &bed.cluster.node1;
    let sockets: Vec<_> =
        WEB.map(|vip| udp_socket(node, udp(vip)).unwrap()).into_iter().zip([0, 1]).collect();
    for number in [40, 41] {
        for (socket, family) in &sockets {
            let other = udp(vips(number)[*family]);
            let refused = || udp_socket(node, other).err().filter(|error| error.kind() == REFUSED);
            wait_for(PATIENCE, refused).expect("the Service refuses sockets");
            assert_eq!(socket.connect(other).unwrap_err().kind(), REFUSED, "{other}");
            assert_eq!(socket.peer_addr().unwrap(), udp(WEB[*family]), "getpeername");
            assert_eq!(echo(socket, b"?").unwrap().server, "pod1");
        }
        // If all backends of the other Service have weight 0, the program stops counting the old connection before it
        // looks for a backend.
        let counted = if number == 40 { [1, 1] } else { [0, 0] };
        let shown = bed.json(&["service", "show", "web"]);
        let services = shown.as_array().unwrap().iter().filter(|it| it["protocol"] == "UDP");
        let backends = services.flat_map(|it| it["backends"].as_array().unwrap());
        assert_eq!(backends.map(|it| &it["flows"]).collect::<Vec<_>>(), counted, "{shown}");
    }
    bed.put("web", WEB, &["pod3"]);
    for (socket, _) in &sockets {
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let told =
            || socket.recv(&mut [0; 128]).err().filter(|it| it.kind() == io::ErrorKind::ConnectionAborted);
        wait_for(PATIENCE, told).expect("the agent closes the socket when its backend is gone");
    }
}

#[test]
fn connected_udp_socket_stays_with_a_serving_terminating_backend() {
    let bed = Bed::with_web(&["pod1"]);
    let sockets = names(udp).map(|to| udp_socket(&bed.cluster.node1, to).unwrap());
    let mut service = bed.service("web", WEB, &["pod1", "pod3"]);
    service.endpoints[0] = service.endpoints[0].clone().terminating();
    bed.cluster.manifests.put(&service).unwrap();
    // New flows go to the other pod once the agent has read the change.
    let other = || (ask_briefly(&bed.cluster.node1, WEB[0])? == "pod3").then_some(());
    wait_for(PATIENCE, other).unwrap();
    for socket in &sockets {
        assert_eq!(echo(socket, b"?").unwrap().server, "pod1");
    }
    bed.put("web", WEB, &["pod3"]);
    for (socket, to) in sockets.iter().zip(names(udp)) {
        let told = || socket.send(b"?").and_then(|_| socket.recv(&mut [0; 128])).err();
        wait_for(PATIENCE, told).unwrap_or_else(|| panic!("{to}: the socket got no error"));
    }
}

#[test]
fn sockets_survive_an_agent_restart() {
    let mut bed = Bed::with_web(&["pod2", "pod3"]);
    let node = bed.cluster.node1.clone();
    let mut connections = names(http).map(|to| Connection::open(&node, to).unwrap());
    let connected = names(udp).map(|to| udp_socket(&node, to).unwrap());
    let free = names(udp).map(|to| free_socket(&bed, to));
    let mut all = |bed: &Bed| -> Vec<String> {
        let mut servers = Vec::new();
        for (connection, to) in connections.iter_mut().zip(names(http)) {
            assert_eq!(connection.stream().peer_addr().unwrap(), to);
            servers.push(connection.ask().unwrap().server);
        }
        for ((connected, free), to) in connected.iter().zip(&free).zip(names(udp)) {
            assert_eq!(connected.peer_addr().unwrap(), to);
            servers.push(echo(connected, b"?").unwrap().server);
            let (server, from) = exchange(free, to).unwrap();
            assert_eq!(from, to);
            servers.push(server);
        }
        for to in names(http) {
            ask_http(&bed.cluster.node1, to).unwrap();
        }
        servers
    };
    let before = all(&bed);
    bed.agent.take().unwrap().kill().unwrap();
    assert_eq!(all(&bed), before, "without an agent");
    bed.start_agent();
    assert_eq!(all(&bed), before, "with the next one");
}

/// Names of the programs in the control group of node1.
fn programs(bed: &Bed) -> Vec<String> {
    let cgroup = bed.cluster.cgroup(1).unwrap().path();
    let output = run(Command::new("bpftool").args(["-j", "cgroup", "show"]).arg(cgroup)).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let list: serde_json::Value =
        serde_json::from_str(if text.trim().is_empty() { "[]" } else { &text }).unwrap();
    let mut names: Vec<String> =
        list.as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

/// Attaches a foreign program to the control group. (The simplest program available is a copy of the agent's program.
/// The copy has maps of its own and no namespace to serve, so it translates no call.)
fn others_program(bed: &Bed) -> Ebpf {
    let mut ebpf = EbpfLoader::new().load(lb_datapath::OBJECT).unwrap();
    let program = ebpf.program_mut("sock_connect4").unwrap();
    load_program(program).unwrap();
    let program: &mut CgroupSockAddr = program.try_into().unwrap();
    let cgroup = File::open(bed.cluster.cgroup(1).unwrap().path()).unwrap();
    program.attach(cgroup, CgroupAttachMode::Single).unwrap();
    ebpf
}

#[test]
fn cleanup_detaches_only_our_socket_programs() {
    let mut bed = Bed::with_web(&["pod2"]);
    let attached = programs(&bed);
    assert_eq!(attached.len(), 9, "{attached:?}");
    assert_eq!(bed.status()["socketPrograms"].as_array().unwrap().len(), 9);
    let others = others_program(&bed);
    bed.agent.take().unwrap().terminate().unwrap();
    bed.start_agent();
    assert_eq!(programs(&bed).len(), 10, "a restart replaces programs and adds none");
    assert_eq!(ask_http(&bed.cluster.node1, http(WEB[0])).unwrap().server, "pod2");
    bed.agent.take().unwrap().terminate().unwrap();
    agent::ask(&bed.cluster.node1, &bed.cluster.bpffs(1), &["cleanup"]).unwrap();
    // The kernel releases unreferenced links asynchronously.
    wait_for(PATIENCE, || (programs(&bed) == ["sock_connect4"]).then_some(())).unwrap();
    drop(others);
    wait_for(PATIENCE, || programs(&bed).is_empty().then_some(())).unwrap();
    for vip in WEB {
        assert!(udp_socket(&bed.cluster.node1, udp(vip)).and_then(|socket| echo(&socket, b"?")).is_err());
    }
}

#[test]
fn socket_lb_off_attaches_no_socket_programs() {
    let mut bed = Bed::with_web(&["pod2"]);
    bed.agent.take().unwrap().terminate().unwrap();
    bed.start_agent_with(&["--socket-lb", "off"]);
    // The kernel releases an unreferenced link asynchronously.
    wait_for(PATIENCE, || programs(&bed).is_empty().then_some(())).unwrap();
    assert_eq!(bed.status()["socketPrograms"].as_array().unwrap().len(), 0);
    assert_eq!(
        ask_http(bed.netns("pod1"), http(WEB[0])).unwrap().server,
        "pod2",
        "packets are served all the same"
    );
}

#[test]
fn agents_of_two_nodes_do_not_interfere() {
    let bed = Bed::with_web(&["pod2", "pod3"]);
    let second = bed.cluster.start_agent(2).unwrap();
    for node in [&bed.cluster.node1, &bed.cluster.node2] {
        for to in names(http) {
            ask_http(node, to).unwrap();
        }
        for to in names(udp) {
            ask_udp(node, to, 64).unwrap();
        }
    }
    second.terminate().unwrap();
    agent::ask(&bed.cluster.node2, &bed.cluster.bpffs(2), &["cleanup"]).unwrap();
    ask_http(&bed.cluster.node1, http(WEB[0])).unwrap();
    assert_eq!(programs(&bed).len(), 9);
}

/// Disconnects a socket: `connect(2)` with AF_UNSPEC.
fn disconnect(socket: &UdpSocket) {
    let nowhere = nix::libc::sockaddr { sa_family: 0, sa_data: [0; 14] };
    // SAFETY: the kernel reads 16 bytes of `nowhere`, which has that length.
    let result = unsafe { nix::libc::connect(socket.as_raw_fd(), &raw const nowhere, 16) };
    nix::Error::result(result).unwrap();
}

#[test]
fn udp_socket_can_be_disconnected_and_reconnected() {
    let bed = Bed::with_web(&["pod2"]);
    bed.put("other", vips(11), &["pod1"]);
    for (one, other) in WEB.into_iter().zip(vips(11)) {
        wait_for(PATIENCE, || ask_udp(&bed.cluster.node1, udp(other), 8).ok()).unwrap();
        let socket = udp_socket(&bed.cluster.node1, udp(one)).unwrap();
        assert_eq!(echo(&socket, b"?").unwrap().server, "pod2");
        // sendto() with the address of the connected peer reaches the same backend.
        assert_eq!(exchange(&socket, udp(one)).unwrap(), ("pod2".to_owned(), udp(one)));
        socket.connect(udp(other)).unwrap();
        assert_eq!(echo(&socket, b"?").unwrap().server, "pod1");
        assert_eq!(socket.peer_addr().unwrap(), udp(other));
        let directly = bed.cluster.pod("pod2").unwrap().udp(one);
        socket.connect(directly).unwrap();
        assert_eq!(socket.peer_addr().unwrap(), directly, "through no service");
        let socket = udp_socket(&bed.cluster.node1, udp(one)).unwrap();
        disconnect(&socket);
        assert!(socket.peer_addr().is_err());
        // In Linux 6.18 a disconnected IPv6 socket still receives only from its last peer, with or without the agent's
        // programs.
        let heard: &[_] = if one.is_ipv4() { &[one, other, one] } else { &[one, one] };
        for &vip in heard {
            let answer = exchange(&socket, udp(vip))
                .unwrap_or_else(|error| panic!("{vip} from {}: {error}", socket.local_addr().unwrap()));
            assert_eq!(answer.1, udp(vip));
        }
    }
}

/// A socket that sends directly to a backend gets replies from the backend's own address, also after the socket has
/// used a service.
#[test]
fn replies_to_direct_datagrams_keep_the_backend_address() {
    let bed = Bed::with_web(&["pod2"]);
    let node = &bed.cluster.node1;
    let sockets = WEB.map(|vip| {
        let directly = bed.cluster.pod("pod2").unwrap().udp(vip);
        let free = free_socket(&bed, udp(vip));
        for to in [udp(vip), directly, udp(vip), directly] {
            assert_eq!(exchange(&free, to).unwrap(), ("pod2".to_owned(), to));
        }
        free.send_to(b"?", udp(vip)).unwrap();
        free.connect(directly).unwrap();
        let connected = udp_socket(node, udp(vip)).unwrap();
        assert_eq!(echo(&connected, b"?").unwrap().server, "pod2");
        disconnect(&connected);
        assert_eq!(exchange(&connected, directly).unwrap(), ("pod2".to_owned(), directly));
        connected.connect(directly).unwrap();
        (directly, [free, connected])
    });
    let heard = |socket: &UdpSocket| {
        socket.send(b"?").unwrap();
        socket.recv_from(&mut [0; 128]).map(|(_, from)| from)
    };
    for (directly, sockets) in &sockets {
        for socket in sockets {
            assert_eq!(heard(socket).unwrap(), *directly);
        }
    }
    // These sockets are also unaffected when the service loses the backend.
    let through_the_service = udp_socket(node, udp(WEB[0])).unwrap();
    through_the_service.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    bed.put("web", WEB, &["pod3"]);
    let told = || through_the_service.recv(&mut [0; 128]).err();
    wait_for(PATIENCE, || told().filter(|error| error.kind() == io::ErrorKind::ConnectionAborted)).unwrap();
    for (directly, sockets) in &sockets {
        for socket in sockets {
            assert_eq!(heard(socket).unwrap(), *directly, "through no service");
        }
    }
}

/// A DNS client may open one connected socket per query.
#[test]
fn flood_of_connected_sockets_evicts_no_socket_awaiting_a_reply() {
    let bed = Bed::with_web(&["pod2"]);
    let to = udp(WEB[0]);
    // More sockets than entries in the per-CPU free list of an LRU map.
    let patient: Vec<UdpSocket> = (0..500).map(|_| free_socket(&bed, to)).collect();
    for socket in &patient {
        socket.send_to(b"?", to).unwrap();
        // The reply now waits in the socket.
        socket.peek_from(&mut [0; 128]).unwrap();
    }
    let flood =
        || (0..capacity::SOCKETS + 10_000).try_for_each(|_| UdpSocket::bind("0.0.0.0:0")?.connect(to));
    bed.cluster.node1.run(flood).unwrap();
    for socket in &patient {
        assert_eq!(socket.recv_from(&mut [0; 128]).unwrap().1, to);
    }
}

/// Sends a request by sendto() with `MSG_FASTOPEN` (TCP Fast Open), without connect().
fn send_unconnected(bed: &Bed, to: SocketAddr) -> io::Result<std::net::TcpStream> {
    bed.cluster.node1.run(|| {
        let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let socket = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        let address = SockaddrStorage::from(to);
        sendto(
            socket.as_raw_fd(),
            b"GET / HTTP/1.1\r\n\r\n",
            &address,
            MsgFlags::from_bits_retain(nix::libc::MSG_FASTOPEN),
        )?;
        Ok(socket.into())
    })
}

#[test]
fn tcp_fast_open_reaches_the_service() {
    let bed = Bed::with_web(&["pod2"]);
    for to in names(http) {
        let mut stream = send_unconnected(&bed, to).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut answer = [0; 12];
        io::Read::read_exact(&mut stream, &mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 200");
        assert_eq!(stream.peer_addr().unwrap(), to);
    }
}
