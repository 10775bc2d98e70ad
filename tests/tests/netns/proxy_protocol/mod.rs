//! Services with the PROXY protocol: the backend learns the client's address although the node masquerades the client.

mod segments;

use std::{
    fs,
    io::{self, BufRead, BufReader, ErrorKind, Read as _, Write as _},
    net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
    time::Duration,
};

use lb_tests::{
    client::PATIENCE,
    cluster::ClientLink,
    daemon::Daemon,
    manifests::{Exposure, Port, Service, Type},
    netns::Netns,
    patience, wait_for,
};
use ppp::v2::{Addresses, Header};

use crate::bed::{Bed, HTTP, RANGES, WEB, http};

/// The port of the server that expects a header.
const SERVER: u16 = 9090;

/// A Service with the PROXY protocol, whose backend is `pod1`.
fn service(bed: &Bed, target_port: u16) -> Service {
    let port = Port { name: "http", protocol: "TCP", port: HTTP, target_port, node_port: Some(30_080) };
    Service {
        annotations: vec![("lb.dev/proxy-protocol", "v2".to_owned())],
        ports: vec![port],
        exposure: Exposure { kind: Type::NodePort, ..Exposure::default() },
        ..bed.service("web", WEB, &["pod1"])
    }
}

/// Starts an agent that serves the Service, to processes of the node as well.
fn start(target_port: u16) -> Bed {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1"]);
    bed.cluster.manifests.put(&service(&bed, target_port)).unwrap();
    bed.start_agent_with(&RANGES);
    wait_for_catch_device(&bed);
    bed
}

/// Waits until the catch device serves processes of the node. That is some tenths of a second after `/healthz` answers,
/// because the agent loads this device's program last. Until then the node has no route to cluster IPs.
fn wait_for_catch_device(bed: &Bed) {
    let is_reachable = |to| match connect(&bed.cluster.node1, to) {
        Ok(_) => true,
        // The server may not listen yet.
        Err(error) => error.kind() == ErrorKind::ConnectionRefused,
    };
    let serves = || WEB.map(http).into_iter().all(is_reachable).then_some(());
    wait_for(PATIENCE, serves).expect("the catch device serves the node");
}

fn listen(netns: &Netns) -> TcpListener {
    netns.run(|| TcpListener::bind(("::", SERVER))).unwrap()
}

/// Starts a server in a namespace, see [`serve_on`].
fn serve(netns: &Netns) {
    serve_on(listen(netns));
}

/// Starts a server. The server runs until the test ends, and sends each client a line with the addresses of the header,
/// then all bytes that it receives after the header.
fn serve_on(listener: TcpListener) {
    thread::spawn(move || {
        for stream in listener.incoming() {
            thread::spawn(move || answer(stream.unwrap()));
        }
    });
}

/// Answers one client. Reads the header in one read, as nginx and HAProxy do. [`serve_on`] ignores errors, because a
/// client may go away at any time.
fn answer(mut stream: TcpStream) -> io::Result<()> {
    let mut bytes = vec![0; 1024];
    let length = stream.read(&mut bytes)?;
    let text = match Header::try_from(&bytes[..length]) {
        Ok(header) => match header.addresses {
            Addresses::IPv4(a) => format!(
                "{}:{} {}:{}\n",
                a.source_address, a.source_port, a.destination_address, a.destination_port
            ),
            Addresses::IPv6(a) => {
                format!(
                    "[{}]:{} [{}]:{}\n",
                    a.source_address, a.source_port, a.destination_address, a.destination_port
                )
            }
            other @ (Addresses::Unspecified | Addresses::Unix(_)) => format!("{other:?}\n"),
        },
        Err(error) => format!("{length} bytes are no header: {error}\n"),
    };
    stream.write_all(text.as_bytes())?;
    // Bytes of the client may have come with the header.
    let header = Header::try_from(&bytes[..length]).map_or(0, |header| header.length() + 16);
    stream.write_all(&bytes[header..length])?;
    while let Ok(length @ 1..) = stream.read(&mut bytes) {
        stream.write_all(&bytes[..length])?;
    }
    stream.shutdown(Shutdown::Write)
}

fn connect(netns: &Netns, to: SocketAddr) -> io::Result<TcpStream> {
    connect_within(netns, to, PATIENCE * patience())
}

fn connect_within(netns: &Netns, to: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let stream = netns.run(|| TcpStream::connect_timeout(&to, limit))?;
    stream.set_read_timeout(Some(limit))?;
    Ok(stream)
}

/// The line in which the server names the addresses of the connection, and the line that is expected.
fn named(stream: &TcpStream, reader: &mut impl BufRead, vip: SocketAddr) -> (String, String) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    (line.trim_end().to_owned(), format!("{} {vip}", stream.local_addr().unwrap()))
}

/// Sends `bytes` bytes and closes the sending direction; expects the same bytes back, and then the end of the stream.
fn transfer(stream: &TcpStream, reader: &mut impl BufRead, bytes: usize) {
    let sent: Vec<u8> = (0..=250).cycle().take(bytes).collect();
    let mut received = Vec::new();
    thread::scope(|scope| {
        let (mut writer, sent) = (stream.try_clone().unwrap(), &sent);
        scope.spawn(move || {
            writer.write_all(sent).unwrap();
            writer.shutdown(Shutdown::Write).unwrap();
        });
        reader.read_to_end(&mut received).unwrap();
    });
    assert!(received == sent, "{} of {} bytes came back", received.len(), sent.len());
}

/// Four clients: the external one, which is masqueraded; a pod, which is not; the backend itself; and a process of the
/// node, whose packets pass the catch device.
#[test]
fn backend_learns_the_address_of_every_client() {
    let bed = start(SERVER);
    serve(bed.netns("pod1"));
    let shown = bed.json(&["service", "show", "web"]);
    assert_eq!(shown[0]["proxyProtocol"], "v2");
    for client in [&bed.cluster.client, bed.netns("pod2"), bed.netns("pod1"), &bed.cluster.node1] {
        for vip in WEB.map(http) {
            let stream =
                connect(client, vip).unwrap_or_else(|error| panic!("{} to {vip}: {error}", client.name()));
            let mut reader = BufReader::new(&stream);
            let (found, expected) = named(&stream, &mut reader, vip);
            assert_eq!(found, expected, "{}", client.name());
            transfer(&stream, &mut reader, 3_000_000);
        }
    }
}

/// Clients whose kernel delays the ACK of the handshake send it with their first bytes.
#[test]
fn client_that_sends_at_once_keeps_its_bytes() {
    let bed = start(SERVER);
    serve(bed.netns("pod1"));
    for client in [&bed.cluster.client, bed.netns("pod2")] {
        for vip in WEB.map(http) {
            for _ in 0..20 {
                let mut stream = connect(client, vip).unwrap();
                stream.write_all(b"hello").unwrap();
                let mut reader = BufReader::new(&stream);
                let (found, expected) = named(&stream, &mut reader, vip);
                assert_eq!(found, expected, "{}", client.name());
                let mut greeting = [0; 5];
                reader.read_exact(&mut greeting).unwrap();
                assert_eq!(&greeting, b"hello");
            }
        }
    }
}

/// The chain for packets that a namespace receives, and the chain for packets that it sends.
const IN: &str = "in";
const OUT: &str = "out";

/// Replaces the packet-loss rules of a namespace with `rule`, in this chain.
fn lose(netns: &Netns, chain: &str, rule: &str) {
    let hook = if chain == IN { "prerouting" } else { "output" };
    let rules = format!(
        "table inet loss
         delete table inet loss
         table inet loss {{
           set ports {{ type inet_service; flags dynamic; }}
           chain {chain} {{ type filter hook {hook} priority 0; {rule}; }}
         }}
"
    );
    netns.feed("nft", &["-f", "-"], &rules).unwrap();
}

/// Opens connections of both clients in both families, all at once: half of them send first, half wait for the server.
fn use_connections(bed: &Bed) {
    thread::scope(|scope| {
        for client in [&bed.cluster.client, bed.netns("pod2")] {
            for (vip, sends_first) in WEB.into_iter().flat_map(|vip| [(http(vip), true), (http(vip), false)])
            {
                scope.spawn(move || {
                    let mut stream = connect_within(client, vip, Duration::from_secs(60)).unwrap();
                    if sends_first {
                        stream.write_all(b"hello").unwrap();
                    }
                    let mut reader = BufReader::new(&stream);
                    let (found, expected) = named(&stream, &mut reader, vip);
                    assert_eq!(found, expected, "{} to {vip}, sends first: {sends_first}", client.name());
                    if sends_first {
                        let mut greeting = [0; 5];
                        reader.read_exact(&mut greeting).unwrap();
                        assert_eq!(&greeting, b"hello");
                    }
                    transfer(&stream, &mut reader, 20_000);
                });
            }
        }
    });
}

/// The first segment of each kind is lost, between client and node or between node and backend.
#[test]
fn connections_survive_the_loss_of_each_first_segment() {
    let bed = start(SERVER);
    serve(bed.netns("pod1"));
    let clients = || [&bed.cluster.client, bed.netns("pod2")];
    let pod = || [bed.netns("pod1"); 1];
    const TO_VIP: &str = "tcp dport 80";
    const TO_POD: &str = "tcp dport 9090";
    for (lost, at, chain, rule) in [
        ("SYN", &clients()[..], OUT, [TO_VIP, "tcp flags & (syn|ack) == syn", "tcp sport"]),
        ("SYN-ACK", &clients(), IN, ["tcp sport 80", "tcp flags & (syn|ack) == syn|ack", "tcp dport"]),
        (
            "ACK of the handshake",
            &clients(),
            OUT,
            [TO_VIP, "tcp flags & (syn|ack|psh|fin) == ack", "tcp sport"],
        ),
        ("first bytes", &clients(), OUT, [TO_VIP, "tcp flags & psh == psh", "tcp sport"]),
        ("header", &pod(), IN, [TO_POD, "tcp flags & psh == psh", "tcp sport"]),
        (
            "acknowledgement of the header",
            &pod(),
            OUT,
            ["tcp sport 9090", "tcp flags & (syn|ack|fin) == ack", "tcp dport"],
        ),
    ] {
        let [packets, kind, port] = rule;
        // Only the first packet of each connection is within the limit, and thus dropped.
        let first = format!("add @ports {{ {port} limit rate 1/hour burst 1 packets }}");
        for netns in at {
            lose(netns, chain, &format!("{packets} {kind} {first} counter drop"));
        }
        use_connections(&bed);
        for netns in at {
            let output =
                netns.command("nft").args(["list", "chain", "inet", "loss", chain]).output().unwrap();
            let shown = String::from_utf8(output.stdout).unwrap();
            assert!(shown.contains("counter packets") && !shown.contains("packets 0 "), "{lost}: {shown}");
            lose(netns, chain, "accept");
        }
    }
}

/// First every tenth segment to the backend is lost, then every twelfth segment from it.
#[test]
fn connections_survive_the_loss_of_many_segments() {
    let bed = start(SERVER);
    let pod = bed.netns("pod1");
    serve(pod);
    lose(pod, IN, "tcp dport 9090 numgen inc mod 10 0 drop");
    use_connections(&bed);
    lose(pod, OUT, "tcp sport 9090 numgen inc mod 12 0 drop");
    use_connections(&bed);
}

/// Starts a third-party server, which must stay in the foreground.
fn run(netns: &Netns, program: &str, arguments: &[&str]) -> Daemon {
    Daemon::start(netns.command(program).args(arguments)).unwrap()
}

/// Sends an HTTP request; returns the body of the answer, and the client's address and port.
fn body(client: &Netns, vip: SocketAddr) -> io::Result<(String, SocketAddr)> {
    let mut stream = connect(client, vip)?;
    stream.write_all(b"GET / HTTP/1.0\r\nHost: web\r\n\r\n")?;
    let local = stream.local_addr()?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let body = text.split_once("\r\n\r\n").map(|(_, body)| body.trim().to_owned());
    Ok((body.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, text))?, local))
}

/// Waits for the server, then asserts that it names each client.
fn assert_names_clients(bed: &Bed) {
    for client in [&bed.cluster.client, bed.netns("pod2")] {
        for vip in WEB.map(http) {
            let asked = wait_for(PATIENCE * patience(), || body(client, vip).ok());
            let (found, local) = asked.unwrap_or_else(|| panic!("{:?}", body(client, vip)));
            assert_eq!(found, format!("{} {} {}", local.ip(), local.port(), vip.ip()), "{}", client.name());
        }
    }
}

#[test]
fn nginx_names_the_client() {
    let bed = start(SERVER);
    let folder = bed.cluster.folder();
    let config = format!(
        "daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/nginx.log; events {{}}\n\
         http {{ access_log off; server {{ listen [::]:{SERVER} ipv6only=off proxy_protocol;\n\
         location / {{ return 200 '$proxy_protocol_addr $proxy_protocol_port $proxy_protocol_server_addr'; }} }} }}\n",
        folder = folder.display()
    );
    let path = folder.join("nginx.conf");
    fs::write(&path, config).unwrap();
    let _server =
        run(bed.netns("pod1"), "nginx", &["-c", path.to_str().unwrap(), "-p", folder.to_str().unwrap()]);
    assert_names_clients(&bed);
}

#[test]
fn haproxy_names_the_client() {
    let bed = start(SERVER);
    let config = format!(
        "defaults\n mode http\n timeout client 10s\n timeout connect 10s\n timeout server 10s\n\
         frontend web\n bind :::{SERVER} v4v6 accept-proxy\n \
         http-request return status 200 content-type text/plain lf-string \"%[src] %[src_port] %[dst]\"\n"
    );
    let path = bed.cluster.folder().join("haproxy.cfg");
    fs::write(&path, config).unwrap();
    let _server = run(bed.netns("pod1"), "haproxy", &["-db", "-f", path.to_str().unwrap()]);
    assert_names_clients(&bed);
}

/// A process of the node that connects to a node port: its packets would bypass the programs that send the header.
#[test]
fn socket_of_the_node_is_refused_at_a_node_port() {
    let bed = start(SERVER);
    serve(bed.netns("pod1"));
    let node: IpAddr = bed
        .cluster
        .node1
        .run(|| {
            let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
            socket.connect(SocketAddr::new(bed.cluster.pod("pod1").unwrap().addresses[0], 9))?;
            Ok(socket.local_addr()?.ip())
        })
        .unwrap();
    let refused = connect(&bed.cluster.node1, SocketAddr::new(node, 30_080)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::HostUnreachable, "{refused}");
    assert!(crate::sockets::outcome(&bed, "no_proxy_header") > 0);
}

/// The endpoint expects a header on each connection, so probes of its health send one as well.
#[test]
fn health_check_sends_a_header_of_its_own() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1"]);
    let mut web = service(&bed, SERVER);
    web.annotations.push(("lb.dev/health-check", "tcp".to_owned()));
    web.annotations.push(("lb.dev/health-check-interval", "1s".to_owned()));
    bed.cluster.manifests.put(&web).unwrap();
    let listener = listen(bed.netns("pod1"));
    bed.start_agent_with(&RANGES);
    let (mut stream, _) = listener.accept().unwrap();
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    let header = Header::try_from(&header[..]).unwrap();
    assert_eq!((header.command, header.addresses), (ppp::v2::Command::Local, Addresses::Unspecified));
}
