//! Tests of the flow log: each connection has a line with the packets and bytes that were on the wire.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::net::UnixListener,
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use lb_tests::{
    StopOnDrop,
    agent::Agent,
    client::{Connection, echo, udp_socket, udp_socket_from},
    cluster::{CLIENT, ClientLink, Cluster, PodLink, Wiring},
    manifests::Service,
    netns::Netns,
    wait_for,
};
use nix::{
    libc,
    sys::{
        signal::Signal,
        socket::{setsockopt, sockopt::Linger},
    },
    unistd::mkfifo,
};
use serde_json::Value;

use crate::{
    bed::{Bed, WEB, ask_briefly, http, udp, vips},
    dsr::PEERS,
    flood::{self, Forged},
    lan::{
        CLUSTER_CIDR,
        Frontend::{self, ClusterIp, NodePort},
        Lan, Protocol,
    },
};

/// How long to wait until the lines of ended connections are written: more than two GC passes.
const SOON: Duration = Duration::from_secs(20);
const SHOP: [IpAddr; 2] = vips(20);
/// A client's port outside of the range of ephemeral ports, so that no other connection has it.
const PORT: u16 = 20_000;

/// The annotation of AWS that includes a Service in the flow log, or excludes it.
const ACCESS_LOG: &str = "service.beta.kubernetes.io/aws-load-balancer-access-log-enabled";

/// The flow log of the agent on node 1.
fn log(cluster: &Cluster) -> PathBuf {
    cluster.bpffs(1).with_file_name("flows.json")
}

/// A cluster whose agent writes a flow log, started with these further arguments.
fn bed(pods: &[&str], arguments: &[&str]) -> Bed {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, pods);
    let web = bed.service("web", WEB, pods);
    start(&mut bed, &web, arguments);
    bed
}

/// Writes the manifest of a Service and starts an agent that writes a flow log, with these further arguments.
fn start(bed: &mut Bed, service: &Service, arguments: &[&str]) {
    bed.cluster.manifests.put(service).unwrap();
    let path = log(&bed.cluster);
    let target = ["--flow-log", path.to_str().unwrap()];
    bed.start_agent_with(&[&target[..], arguments].concat());
}

/// The complete lines that the log has so far.
fn lines(cluster: &Cluster) -> Vec<Value> {
    lines_in(&log(cluster))
}

/// The complete lines of a file; none if it does not exist.
fn lines_in(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.split_inclusive('\n')
        .filter(|line| line.ends_with('\n'))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The lines of ended connections; waits until there are `count`.
fn ended(cluster: &Cluster, count: usize) -> Vec<Value> {
    let ends = || {
        let ends: Vec<Value> = lines(cluster).into_iter().filter(|line| line["event"] == "end").collect();
        (ends.len() >= count).then_some(ends)
    };
    let found = wait_for(SOON, ends);
    found.unwrap_or_else(|| panic!("not {count} connections have ended: {:#?}", lines(cluster)))
}

/// Packets and bytes from the client, then packets and bytes to the client.
type Traffic = [u64; 4];

fn traffic(line: &Value) -> Traffic {
    ["packets_sent", "bytes_sent", "packets_answered", "bytes_answered"]
        .map(|field| line[field].as_u64().unwrap())
}

/// A packet socket that captures what the namespace sends and receives, to count IP packets by local socket address.
struct Capture(OwnedFd);

impl Capture {
    fn start(netns: &Netns) -> Self {
        let open = || -> io::Result<OwnedFd> {
            let protocol = i32::from(u16::try_from(libc::ETH_P_ALL).unwrap().to_be());
            let kind = libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
            // SAFETY: the call takes numbers and returns a new descriptor, or -1.
            let fd = nix::Error::result(unsafe { libc::socket(libc::AF_PACKET, kind, protocol) })?;
            // SAFETY: the descriptor is open and has no other owner.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        };
        Self(netns.run(open).unwrap())
    }

    fn traffic(&self) -> BTreeMap<SocketAddr, Traffic> {
        let mut clients = BTreeMap::new();
        let mut packet = vec![0; 70_000];
        loop {
            // SAFETY: the kernel writes at most `packet.len()` bytes to `packet`, which has that length.
            let length =
                unsafe { libc::recv(self.0.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), 0) };
            let Ok(length) = usize::try_from(length) else {
                assert_eq!(io::Error::last_os_error().kind(), io::ErrorKind::WouldBlock);
                return clients;
            };
            let Some((source, destination, bytes)) = parse(&packet[..length]) else { continue };
            let is_sent = CLIENT.contains(&source.ip());
            let client = if is_sent { source } else { destination };
            let counts: &mut Traffic = clients.entry(client).or_default();
            let at = if is_sent { 0 } else { 2 };
            counts[at] += 1;
            counts[at + 1] += bytes;
        }
    }
}

/// Source, destination and size in bytes of a TCP or UDP packet without IP options.
fn parse(packet: &[u8]) -> Option<(SocketAddr, SocketAddr, u64)> {
    let word = |at: usize| packet.get(at..at + 2).map(|word| u16::from_be_bytes([word[0], word[1]]));
    let v6 = |at: usize| Some(Ipv6Addr::from(<[u8; 16]>::try_from(packet.get(at..at + 16)?).ok()?));
    let v4 = |at: usize| Some(Ipv4Addr::from(<[u8; 4]>::try_from(packet.get(at..at + 4)?).ok()?));
    let (source, destination, protocol, ports, bytes) = match packet.first()? >> 4 {
        4 => (v4(12)?.into(), v4(16)?.into(), packet.get(9)?, 20, u64::from(word(2)?)),
        6 => (v6(8)?.into(), v6(24)?.into(), packet.get(6)?, 40, u64::from(word(4)?) + 40),
        _ => return None,
    };
    let is_counted = [libc::IPPROTO_TCP, libc::IPPROTO_UDP].contains(&i32::from(*protocol));
    let socket = |ip: IpAddr, port| SocketAddr::new(ip, port);
    is_counted.then_some((socket(source, word(ports)?), socket(destination, word(ports + 2)?), bytes))
}

/// Closes a connection with a RST.
fn reset(connection: Connection) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    setsockopt(connection.stream(), Linger, &linger).unwrap();
}

/// Opens connections of each kind. Returns, for the address of each client socket, the value of `end` that the log
/// should have.
fn connections(bed: &Bed) -> BTreeMap<SocketAddr, &'static str> {
    let client = &bed.cluster.client;
    let mut expected = BTreeMap::new();
    for vip in WEB {
        for is_reset in [false, true] {
            let mut connection = Connection::open(client, http(vip)).unwrap();
            let answer = connection.ask().unwrap();
            expected.insert(answer.local, if is_reset { "reset" } else { "closed" });
            if is_reset {
                reset(connection);
            }
        }
        let socket = udp_socket(client, udp(vip)).unwrap();
        for payload in [&b"a"[..], b"some more bytes"] {
            echo(&socket, payload).unwrap();
        }
        expected.insert(socket.local_addr().unwrap(), "deleted");
    }
    expected
}

/// Asserts that the lines of all kinds of connections have the packets and bytes that the client has sent and received.
fn assert_exact(pods: &[&str], arguments: &[&str], verdict: &str) {
    let bed = bed(pods, arguments);
    let capture = Capture::start(&bed.cluster.client);
    let expected = connections(&bed);
    // Waits for the lines of the four TCP connections, which end by themselves. The flush then ends the UDP flows.
    ended(&bed.cluster, 4);
    bed.agent.as_ref().unwrap().ask(&["conntrack", "flush"]).unwrap();
    let ends = ended(&bed.cluster, expected.len());
    let wire = capture.traffic();
    assert_eq!(ends.len(), expected.len(), "{ends:#?}");
    for line in &ends {
        let port = u16::try_from(line["client_port"].as_u64().unwrap()).unwrap();
        let client = SocketAddr::new(line["client"].as_str().unwrap().parse().unwrap(), port);
        assert_eq!(line["end"], expected[&client], "{line:#}");
        assert_eq!(traffic(line), wire[&client], "{line:#}");
        assert_eq!(line["verdict"], verdict, "{line:#}");
        assert_eq!(line.get("masqueraded_as").is_some(), verdict == "masquerade", "{line:#}");
        assert_eq!(
            [&line["node"], &line["namespace"], &line["service"]],
            ["node1", "default", "web"],
            "{line:#}"
        );
        assert_eq!(line["reason"], "random", "{line:#}");
        let pod = line["pod"].as_str().unwrap();
        assert!(pods.contains(&pod), "{line:#}");
        let backend = bed.cluster.pod(pod).unwrap();
        let address: IpAddr = line["backend"].as_str().unwrap().parse().unwrap();
        assert_eq!(address, backend.address(address), "{line:#}");
        assert_eq!(line["backend_node"], backend.node.as_str(), "{line:#}");
        let vip: IpAddr = line["vip"].as_str().unwrap().parse().unwrap();
        assert!(WEB.contains(&vip), "{line:#}");
        let duration = line["duration"].as_f64().unwrap();
        assert!((0.0..60.0).contains(&duration) && line["start"].is_string(), "{line:#}");
    }
    let file = log(&bed.cluster);
    let sums = bed.json(&["flows", "--file", file.to_str().unwrap(), "--top", "services"]);
    let sums = sums.as_array().unwrap();
    assert_eq!(sums.iter().map(|sum| sum["ended"].as_u64().unwrap()).sum::<u64>(), 6, "{sums:#?}");
    let sent: u64 = wire.values().map(|traffic| traffic[1]).sum();
    assert_eq!(sums.iter().map(|sum| sum["bytes_sent"].as_u64().unwrap()).sum::<u64>(), sent, "{sums:#?}");
}

#[test]
fn lines_have_the_packets_on_the_wire() {
    assert_exact(&["pod1", "pod2"], &[], "forward");
}

#[test]
fn lines_of_masqueraded_connections_have_the_packets_on_the_wire() {
    assert_exact(&["pod1", "pod3"], &["--masquerade-all"], "masquerade");
}

/// A connection of a test: the client, the number of the Service, the kind of its address, and the verdict.
type Expected = (&'static str, u8, Frontend, &'static str);

/// Asserts that the lines of these connections have the expected verdicts, and that node 1 has counted most packets of
/// the clients under these verdicts.
fn assert_verdicts(lan: &Lan, connections: &[Expected]) {
    let counted = |outcome: &str| lan.agents[0].as_ref().unwrap().counted(outcome).unwrap();
    let verdicts: BTreeSet<&str> = connections.iter().map(|(.., verdict)| *verdict).collect();
    let before: BTreeMap<&str, u64> = verdicts.iter().map(|verdict| (*verdict, counted(verdict))).collect();
    let mut expected = BTreeMap::new();
    for (source, number, frontend, verdict) in connections {
        for family in [0, 1] {
            let to = frontend.of(*number, (Protocol::Tcp, family));
            let mut connection = Connection::open(lan.netns(source), to).unwrap();
            let local = connection.upload(4 << 20).unwrap().local;
            expected.insert((local.ip().to_string(), local.port()), *verdict);
        }
    }
    // The log also has lines of the connections that `Lan::apply` opens to the marker Service; `found` leaves these
    // lines out.
    let mut sent: BTreeMap<&str, u64> = BTreeMap::new();
    let found = wait_for(SOON * 2, || {
        sent.clear();
        let ends = lines(&lan.cluster).into_iter().filter(|line| line["event"] == "end");
        let found = ends.filter(|line| {
            let port = line["client_port"].as_u64().unwrap().try_into().unwrap();
            let Some(verdict) = expected.get(&(line["client"].as_str().unwrap().to_owned(), port)) else {
                return false;
            };
            assert_eq!(line["verdict"], *verdict, "{line:#}");
            *sent.entry(verdict).or_default() += traffic(line)[0];
            true
        });
        (found.count() == expected.len()).then_some(())
    });
    assert!(found.is_some(), "{expected:?}: {:#?}", lines(&lan.cluster));
    for (verdict, sent) in sent {
        let grown = counted(verdict) - before[verdict];
        assert!(grown * 2 > sent, "{grown} of {sent} packets count as {verdict}");
    }
}

#[test]
fn verdict_is_the_outcome_of_the_packets() {
    let dsr = [&["--north-south-mode", "dsr"][..], &PEERS, &CLUSTER_CIDR].concat();
    for (arguments, connections) in [
        (
            &[][..],
            &[
                ("pod1", 1, ClusterIp, "forward"),
                ("pod2", 1, ClusterIp, "hairpin"),
                ("client", 1, NodePort(1), "masquerade"),
            ][..],
        ),
        (
            &["--forwarding", "direct"],
            &[
                ("pod1", 1, ClusterIp, "direct"),
                ("pod2", 1, ClusterIp, "hairpin"),
                ("client", 1, NodePort(1), "masquerade"),
                ("client", 2, NodePort(1), "routed"),
            ],
        ),
        (&dsr, &[("client", 2, NodePort(1), "tunnelled")]),
    ] {
        let wiring = Wiring { link: ClientLink::Lan, pods: PodLink::PointToPoint, strict: false };
        let mut lan = Lan::without_agents(wiring);
        let path = log(&lan.cluster);
        lan.start_agent(1, &[arguments, &["--flow-log", path.to_str().unwrap()]].concat());
        lan.start_agent(2, arguments);
        lan.apply(&[lan.service(1, &["pod2"]), lan.service(2, &["pod3"])]);
        assert_verdicts(&lan, connections);
    }
}

/// Sets the access log annotation of `shop` to `logged`, and opens connections to `shop` and to these addresses.
/// Asserts that the log has `count` connections, all of them to `service`.
fn assert_logged(arguments: &[&str], logged: &str, vips: &[IpAddr], service: &str, count: usize) {
    let bed = bed(&["pod1"], arguments);
    let mut shop = bed.service("shop", SHOP, &["pod1"]);
    shop.annotations.push((ACCESS_LOG, logged.to_owned()));
    bed.cluster.manifests.put(&shop).unwrap();
    let client = &bed.cluster.client;
    wait_for(SOON, || ask_briefly(client, SHOP[0])).unwrap();
    for vip in vips {
        Connection::open(client, http(*vip)).unwrap().ask().unwrap();
    }
    let ends = ended(&bed.cluster, count);
    assert!(ends.iter().all(|line| line["service"] == service), "{ends:#?}");
}

#[test]
fn annotation_selects_services() {
    // `shop` has three connections: two from `ask_briefly`, and the one to `SHOP[1]`.
    assert_logged(&["--flow-log-services", "annotated"], "true", &[WEB[0], SHOP[1], WEB[1]], "shop", 3);
}

#[test]
fn annotation_excludes_a_service() {
    // The connections to `web` end last, so if the agent logged the connection to `shop`, the log would already have
    // the line of that connection.
    assert_logged(&[], "false", &[SHOP[1], WEB[0], WEB[1]], "web", 2);
}

/// The programs emit events from their attachment on, before the agent has read the Services and their annotations.
#[test]
fn annotations_apply_to_each_connection_after_a_restart() {
    let annotated = ["--flow-log-services", "annotated"];
    let mut bed = bed(&["pod1"], &annotated);
    let mut shop = bed.service("shop", SHOP, &["pod1"]);
    shop.annotations.push((ACCESS_LOG, "true".to_owned()));
    bed.cluster.manifests.put(&shop).unwrap();
    let client = bed.cluster.client.clone();
    wait_for(SOON, || ask_briefly(&client, SHOP[0])).unwrap();
    bed.agent.take().unwrap().kill().unwrap();

    let stop = AtomicBool::new(false);
    let (ready, connections) = thread::scope(|scope| {
        let end = StopOnDrop(&stop);
        let connecting = scope.spawn(|| {
            let mut connections = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let answer = Connection::open(&client, http(SHOP[0])).unwrap().ask().unwrap();
                connections.push((begun, answer.local.port()));
                thread::sleep(Duration::from_millis(5));
            }
            connections
        });
        start(&mut bed, &shop, &annotated);
        let ready = Instant::now();
        thread::sleep(Duration::from_secs(1));
        drop(end);
        (ready, connecting.join().unwrap())
    });
    let later = connections.iter().filter(|(begun, _)| *begun > ready).map(|(_, port)| u64::from(*port));
    let later: BTreeSet<u64> = later.collect();
    assert!(!later.is_empty(), "{connections:?}");
    let left = || {
        let lines = lines(&bed.cluster);
        let ended: BTreeSet<u64> = lines
            .iter()
            .filter(|line| line["event"] == "end")
            .filter_map(|line| line["client_port"].as_u64())
            .collect();
        later.difference(&ended).copied().collect::<Vec<_>>()
    };
    let all = wait_for(SOON, || left().is_empty().then_some(()));
    assert!(all.is_some(), "of {} connections these have no line: {:?}", later.len(), left());
}

#[test]
fn later_connections_of_an_affine_client_have_the_reason_affinity() {
    const PODS: [&str; 4] = ["pod1", "pod2", "pod3", "pod4"];
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    let mut affine = bed.service("web", WEB, &PODS);
    affine.exposure.affinity = Some(600);
    start(&mut bed, &affine, &[]);
    let ask = |_| {
        let answer = Connection::open(&bed.cluster.client, http(WEB[0])).unwrap().ask().unwrap();
        (answer.local.port(), answer.server)
    };
    let asked = [0; 3].map(ask);
    let ends = ended(&bed.cluster, asked.len());
    assert_eq!(ends.len(), asked.len(), "{ends:#?}");
    for ((port, server), reason) in asked.iter().zip(["random", "affinity", "affinity"]) {
        let line = ends.iter().find(|line| line["client_port"] == *port).unwrap();
        assert_eq!((&line["reason"], &line["pod"]), (&reason.into(), &server.as_str().into()), "{line:#}");
        assert_eq!(server, &asked[0].1, "{line:#}");
    }
}

/// With `sh`, the scheduler chooses the same backend for all connections of a client, also after this backend has
/// become silent. Only a retransmitted SYN goes to another backend.
#[test]
fn connection_that_a_silent_backend_leaves_unanswered_has_the_reason_retry() {
    const PODS: [&str; 2] = ["pod1", "pod2"];
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    let mut hashed = bed.service("web", WEB, &PODS);
    hashed.annotations.push(("lb.dev/scheduler", "sh".to_owned()));
    start(&mut bed, &hashed, &["--syn-retries", "1"]);
    let client = &bed.cluster.client;
    let silent = Connection::open(client, http(WEB[0])).unwrap().ask().unwrap().server;
    bed.silence(&silent);
    // Unlike `open`, `open_from_port` connects without a time limit, so it waits until a retransmitted SYN goes to the
    // other backend.
    let answer = Connection::open_from_port(client, PORT, http(WEB[0])).unwrap().ask().unwrap();
    assert_ne!(answer.server, silent);
    let ends = ended(&bed.cluster, 3);
    let of_port: Vec<[&Value; 3]> = ends
        .iter()
        .filter(|line| line["client_port"] == PORT)
        .map(|line| [&line["reason"], &line["pod"], &line["end"]])
        .collect();
    let expected = [["sh", &*silent, "replaced"], ["retry", &*answer.server, "closed"]];
    assert_eq!(of_port, expected, "{ends:#?}");
}

/// The node has a single port for masqueraded flows. A flow that has got no answer for more than five seconds loses the
/// port to the next flow.
#[test]
fn flow_whose_source_port_another_one_takes_is_replaced() {
    let bed = bed(&["pod1"], &["--masquerade-all", "--masquerade-ports", "20000-20000"]);
    bed.silence("pod1");
    let send = |port| {
        let from = SocketAddr::new(CLIENT[0], port);
        let socket = bed.cluster.client.run(|| udp_socket_from(from, udp(WEB[0]))).unwrap();
        socket.send(b"unanswered").unwrap();
    };
    send(PORT);
    thread::sleep(Duration::from_secs(7));
    send(PORT + 1);
    let ends = ended(&bed.cluster, 1);
    assert_eq!(ends.len(), 1, "{ends:#?}");
    assert_eq!((&ends[0]["client_port"], &ends[0]["end"]), (&PORT.into(), &"replaced".into()), "{ends:#?}");
}

#[test]
fn evicted_flows_have_lines_with_exact_counts() {
    const FLOWS: u16 = 100;
    let bed = bed(&["pod1"], &["--max-connections", "32"]);
    for port in 1..=FLOWS {
        let socket = bed.cluster.client.run(|| {
            let from = SocketAddr::new(CLIENT[0], 20_000 + port);
            udp_socket_from(from, udp(WEB[0]))
        });
        let socket = socket.unwrap();
        echo(&socket, b"123456").unwrap();
        // Pauses so that the first flows become older than three seconds: younger ones are not evicted.
        thread::sleep(Duration::from_millis(80));
    }
    let ends = ended(&bed.cluster, 40);
    let mut seen = BTreeMap::new();
    for line in &ends {
        *seen.entry(line["client_port"].as_u64().unwrap()).or_insert(0) += 1;
        assert!(["evicted", "expired"].contains(&line["end"].as_str().unwrap()), "{line:#}");
        assert_eq!(traffic(line)[..2], [1, 20 + 8 + 6], "{line:#}");
        assert!(traffic(line)[2] == 1, "{line:#}");
    }
    assert!(seen.values().all(|lines| *lines == 1), "{seen:?}");
    assert!(ends.iter().any(|line| line["end"] == "evicted"), "no flow was evicted");
}

#[test]
fn full_disk_loses_lines_that_are_counted_and_delays_nothing() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1"]);
    bed.start_agent_with(&["--flow-log", "/dev/full"]);
    let client = &bed.cluster.client;
    Connection::open(client, http(WEB[0])).unwrap().ask().unwrap();
    wait_for(SOON, || (bed.metric("lb_flow_log_dropped_lines_total") >= 1).then_some(())).unwrap();
    assert_eq!(bed.metric("lb_flow_log_lines_total"), 0);
    bed.put("shop", SHOP, &["pod1"]);
    wait_for(SOON, || ask_briefly(client, SHOP[0])).unwrap();
}

#[test]
fn pipe_without_reader_delays_nothing() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1"]);
    let path = log(&bed.cluster);
    mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    bed.start_agent_with(&["--flow-log", path.to_str().unwrap()]);
    let client = &bed.cluster.client;
    Connection::open(client, http(WEB[0])).unwrap().ask().unwrap();
    bed.put("shop", SHOP, &["pod1"]);
    wait_for(SOON, || ask_briefly(client, SHOP[0])).unwrap();
    // A reader that opens the pipe later gets the lines that have waited.
    let reader = thread::spawn(move || {
        let mut text = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(fs::File::open(path)?), &mut text)?;
        io::Result::Ok(text)
    });
    wait_for(SOON, || reader.is_finished().then_some(())).unwrap();
    let line: Value = serde_json::from_str(&reader.join().unwrap().unwrap()).unwrap();
    assert_eq!(line["end"], "closed", "{line:#}");
}

/// Sums of `lb-agent flows --top WHAT`: for each name, how many connections have ended.
fn top(bed: &Bed, what: &str) -> BTreeMap<String, u64> {
    let file = log(&bed.cluster);
    let sums = bed.json(&["flows", "--file", file.to_str().unwrap(), "--top", what, "--limit", "0"]);
    let row = |sum: &Value| (sum["name"].as_str().unwrap().to_owned(), sum["ended"].as_u64().unwrap());
    sums.as_array().unwrap().iter().map(row).collect()
}

#[test]
fn open_connection_has_a_line_for_each_interval() {
    let bed = bed(&["pod1"], &["--flow-log-interval", "5"]);
    let mut connection = Connection::open(&bed.cluster.client, http(WEB[0])).unwrap();
    let open = || {
        connection.ask().unwrap();
        let open = lines(&bed.cluster).into_iter().filter(|line| line["event"] == "open").count();
        (open >= 2).then_some(())
    };
    wait_for(SOON * 2, open).unwrap();
    drop(connection);
    let [end] = &ended(&bed.cluster, 1)[..] else { panic!("one connection") };
    let all = lines(&bed.cluster);
    assert!(all.iter().all(|line| line["flow"] == end["flow"] && line["start"] == end["start"]), "{all:#?}");
    assert!(all.iter().all(|line| line["verdict"] == "forward"), "{all:#?}");
    // The lines together have the traffic of the connection, each byte once.
    let since = |line: &Value| traffic(line.get("since_last").unwrap_or(line));
    let sum = all.iter().map(since).fold([0; 4], |sum, line| [0, 1, 2, 3].map(|at| sum[at] + line[at]));
    assert_eq!(sum, traffic(end), "{all:#?}");
}

/// A cluster with the Services `web` and `shop`. The agent's `--flow-log-interval` is `interval`, in seconds; an
/// annotation gives `shop` an interval of five minutes. The agent's clock, but not the clock of the programs, is
/// `ahead` seconds ahead. So to the agent, each connection seems `ahead` seconds older.
fn bed_with_interval_of_shop(interval: &str, ahead: u32) -> Bed {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1"]);
    let mut shop = bed.service("shop", SHOP, &["pod1"]);
    let name = "service.beta.kubernetes.io/aws-load-balancer-access-log-emit-interval";
    shop.annotations.push((name, "5".to_owned()));
    bed.cluster.manifests.put(&shop).unwrap();
    let mut settings = bed.cluster.agent_settings(1);
    let path = log(&bed.cluster);
    settings.arguments.extend(["--flow-log", path.to_str().unwrap()].map(str::to_owned));
    settings.arguments.extend(["--flow-log-interval", interval].map(str::to_owned));
    let ahead = ahead.to_string();
    let starter = ["unshare", "--time", "--monotonic", &ahead, "--fork", "--kill-child"].map(str::to_owned);
    let agent = Agent::spawn_by(&bed.cluster.node1, settings, &starter).unwrap();
    agent.wait_until_healthy().unwrap();
    bed.agent = Some(agent);
    bed
}

/// Keeps a connection to `web` and one to `shop` busy until the log has this number of intermediate lines; returns
/// these lines.
fn intermediate(bed: &Bed, count: usize) -> Vec<Value> {
    let open = |vip| Connection::open(&bed.cluster.client, http(vip)).unwrap();
    let mut connections = [SHOP[0], WEB[0]].map(open);
    let found = wait_for(SOON * 2, || {
        connections.iter_mut().for_each(|connection| drop(connection.ask().unwrap()));
        thread::sleep(Duration::from_millis(50));
        let open: Vec<Value> =
            lines(&bed.cluster).into_iter().filter(|line| line["event"] == "open").collect();
        (open.len() >= count).then_some(open)
    });
    drop(connections);
    // Both connections are in the log.
    let ends = ended(&bed.cluster, 2);
    found.unwrap_or_else(|| panic!("not {count} intermediate lines: {ends:#?}"))
}

#[test]
fn emit_interval_makes_lines_of_a_service_rarer() {
    let bed = bed_with_interval_of_shop("5", 0);
    let open = intermediate(&bed, 3);
    assert!(open.iter().all(|line| line["service"] == "web"), "{open:#?}");
}

#[test]
fn emit_interval_makes_lines_of_a_service_more_frequent() {
    // The first intermediate line of a connection is due 10 s after its start if the connection is to `shop`, and after
    // 40 s if it is to `web`.
    let bed = bed_with_interval_of_shop("330", 290);
    let open = intermediate(&bed, 1);
    assert!(open.iter().all(|line| line["service"] == "shop"), "{open:#?}");
    // Five minutes by the agent's clock.
    let duration = open[0]["duration"].as_f64().unwrap();
    assert!(duration >= 300.0, "{open:#?}");
}

/// Opens a connection from [`PORT`] and resets it. The agent writes the line of this connection when the next
/// connection from [`PORT`] replaces this connection's entry in the flow table, not in a later GC pass.
fn connect_and_reset(bed: &Bed) {
    let mut connection = Connection::open_from_port(&bed.cluster.client, PORT, http(WEB[0])).unwrap();
    connection.ask().unwrap();
    reset(connection);
}

/// Sends SIGHUP to the agent and waits until one of the agent's threads has taken the signal.
fn hang_up(agent: &Agent) {
    agent.signal(Signal::SIGHUP).unwrap();
    let pid = agent.pid();
    let is_taken = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:\t")).unwrap();
        let pending = u64::from_str_radix(pending, 16).unwrap();
        (pending & 1 << (libc::SIGHUP - 1) == 0).then_some(())
    };
    wait_for(SOON, is_taken).unwrap();
}

/// Without SIGHUP, the agent notices within a second that its file has been renamed; until then it writes to the
/// renamed file.
#[test]
fn sighup_after_a_rename_moves_the_next_line_to_a_new_file() {
    const ROUNDS: u32 = 6;
    let bed = bed(&["pod1"], &["--flow-log-max-size", "0"]);
    let file = log(&bed.cluster);
    let (mut connections, mut moved): (usize, Vec<(Vec<Value>, PathBuf)>) = (0, Vec::new());
    for round in 0..ROUNDS {
        let to = file.with_file_name(format!("flows-{round}.json"));
        fs::rename(&file, &to).unwrap();
        hang_up(bed.agent.as_ref().unwrap());
        moved.push((lines_in(&to), to));
        let has_lines = || {
            connect_and_reset(&bed);
            connections += 1;
            thread::sleep(Duration::from_millis(100));
            (!lines_in(&file).is_empty()).then_some(())
        };
        wait_for(SOON, has_lines).unwrap();
        // Waits until only the last connection has no line: then the agent writes no line around the next SIGHUP.
        let before: usize = moved.iter().map(|(before, _)| before.len()).sum();
        let are_written = || (before + lines(&bed.cluster).len() + 1 >= connections).then_some(());
        wait_for(SOON, are_written).unwrap();
    }
    // The last connection has no successor, so a GC pass writes its line.
    let all = || {
        let mut all: Vec<Value> = moved.iter().flat_map(|(_, file)| lines_in(file)).collect();
        all.extend(lines(&bed.cluster));
        (all.len() >= connections).then_some(all)
    };
    let all = wait_for(SOON, all).unwrap_or_else(|| panic!("not {connections} lines"));
    for (before, file) in &moved {
        assert_eq!(&lines_in(file), before, "{} has got lines after SIGHUP", file.display());
    }
    let flows: BTreeSet<&str> = all.iter().map(|line| line["flow"].as_str().unwrap()).collect();
    assert_eq!((flows.len(), all.len()), (connections, connections), "each connection has one line");
    assert!(all.iter().all(|line| line["end"] == "reset"), "{all:#?}");
}

#[test]
fn unix_socket_gets_the_lines_also_after_the_reader_restarts() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1"]);
    let path = bed.cluster.bpffs(1).with_file_name("flows.sock");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    bed.start_agent_with(&["--flow-log", &format!("unix:{}", path.display())]);
    for _ in 0..2 {
        let ask = || Connection::open(&bed.cluster.client, http(WEB[0])).unwrap().ask().unwrap().local.port();
        // Each attempt opens a connection: the agent notices that the socket's reader has gone only when the agent
        // writes a line.
        let mut ports = Vec::new();
        let reader = wait_for(SOON * 2, || {
            ports.push(ask());
            thread::sleep(Duration::from_secs(1));
            listener.accept().ok()
        });
        let (reader, _) = reader.unwrap();
        reader.set_nonblocking(false).unwrap();
        reader.set_read_timeout(Some(SOON)).unwrap();
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(reader), &mut line).unwrap();
        let line: Value = serde_json::from_str(&line).unwrap();
        let port = line["client_port"].as_u64().unwrap();
        assert!(line["event"] == "end" && ports.iter().any(|known| u64::from(*known) == port), "{line:#}");
    }
}

#[test]
fn standard_output_gets_the_lines() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &["pod1"]);
    bed.start_agent_with(&["--flow-log", "-"]);
    let port = Connection::open(&bed.cluster.client, http(WEB[0])).unwrap().ask().unwrap().local.port();
    // The file receives both outputs of the agent. Standard error has the agent's own log, which is not JSON.
    let output = bed.cluster.agent_settings(1).log;
    let found = || {
        let text = fs::read_to_string(&output).unwrap();
        let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.find(|line| line["event"] == "end")
    };
    let line = wait_for(SOON, found).unwrap();
    assert_eq!(
        (&line["client_port"], &line["service"]),
        (&Value::from(port), &Value::from("web")),
        "{line:#}"
    );
}

#[test]
fn rotated_files_have_every_sampled_connection() {
    const FLOWS: u32 = 10_000;
    let sampled = ["--flow-log-sample", "0.5"];
    let bed = bed(&["pod1"], &[&sampled[..], &["--flow-log-max-size", "1", "--flow-log-keep", "3"]].concat());
    flood::forge(&bed.cluster.client, udp(WEB[0]), 0..FLOWS, Forged::Datagram).unwrap();
    bed.agent.as_ref().unwrap().ask(&["conntrack", "flush"]).unwrap();
    // 5,000 lines are expected, with a standard deviation of 50.
    let written = || Some(bed.metric("lb_flow_log_lines_total")).filter(|lines| *lines > 4700);
    wait_for(SOON * 2, written).unwrap();
    // Waits for two more GC passes, so that lines that come late count as well.
    thread::sleep(Duration::from_secs(11));
    let written = bed.metric("lb_flow_log_lines_total");
    assert!(written < 5300, "{written} of {FLOWS} are half of them");
    let file = log(&bed.cluster);
    let sizes = [1, 2, 3].map(|number| {
        let name = format!("{}.{number}", file.display());
        fs::metadata(name).map_or(0, |rotated| rotated.len())
    });
    assert!(sizes[0] > 900_000 && sizes.iter().all(|size| *size <= 1 << 20), "{sizes:?}");
    let clients = top(&bed, "clients");
    assert_eq!(clients.values().sum::<u64>(), written, "each line is in one of the files");
    assert_eq!(clients.len() as u64, written, "each flow has another client");
    let backends: Vec<(String, u64)> = top(&bed, "backends").into_iter().collect();
    assert!(backends.len() == 1 && backends[0].1 == written, "{backends:?}");
}

/// Prints how many of 20,000 new flows per second get a line.
#[test]
#[ignore = "measures: cargo test -p lb-tests --test netns -- --ignored --nocapture flow_log::throughput"]
fn throughput() {
    const RATE: u32 = 20_000;
    const SECONDS: u32 = 10;
    let bed = bed(&["pod1"], &[]);
    let begun = Instant::now();
    for number in 0..SECONDS * 100 {
        let first = number * RATE / 100;
        flood::forge(&bed.cluster.client, udp(WEB[0]), first..first + RATE / 100, Forged::Datagram).unwrap();
        thread::sleep((Duration::from_millis(10) * (number + 1)).saturating_sub(begun.elapsed()));
    }
    let took = begun.elapsed();
    let flows = u64::from(SECONDS * RATE);
    let (lines, lost) = ("lb_flow_log_lines_total", "lb_flow_log_lost_events_total");
    let logged = || (bed.metric(lines) >= flows).then_some(());
    let is_complete = wait_for(Duration::from_secs(60), logged).is_some();
    println!(
        "{flows} flows in {took:.1?}: {} lines (complete: {is_complete}), {} dropped, {} events lost, {} bytes",
        bed.metric(lines),
        bed.metric("lb_flow_log_dropped_lines_total"),
        bed.metric(lost),
        fs::metadata(log(&bed.cluster)).unwrap().len(),
    );
    assert!(is_complete || bed.metric(lost) > 0, "lines are missing, and nothing says so");
}
