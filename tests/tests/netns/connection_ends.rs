//! Tests how connections of Services with an idle or drain timeout end.

use std::{
    io::{self, Write as _},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use lb_tests::{
    client::{Answer, Connection, PATIENCE, echo, udp_socket},
    cluster::ClientLink,
    manifests::{Exposure, Port, Service, Type},
    netns::Netns,
    patience, wait_for,
};

use crate::bed::{Bed, WEB, http, udp};

const PODS: [&str; 2] = ["pod1", "pod2"];
/// Interval at which the agent looks for connections that it must end.
const LOOK: Duration = Duration::from_secs(5);

/// The annotations of AWS for an idle and a drain timeout of 4 s.
const IDLE: [(&str, &str); 1] =
    [("service.beta.kubernetes.io/aws-load-balancer-connection-idle-timeout", "4")];
const DRAIN: [(&str, &str); 2] = [
    ("service.beta.kubernetes.io/aws-load-balancer-connection-draining-enabled", "true"),
    ("service.beta.kubernetes.io/aws-load-balancer-connection-draining-timeout", "4"),
];

fn web(bed: &Bed, pods: &[&str], annotations: &[(&'static str, &str)]) -> Service {
    let annotations = annotations.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
    // The annotations of AWS apply to this type only.
    let exposure = Exposure { kind: Type::LoadBalancer, ..Exposure::default() };
    Service { annotations, exposure, ..bed.service("web", WEB, pods) }
}

fn start_with(annotations: &[(&'static str, &str)]) -> Bed {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    bed.cluster.manifests.put(&web(&bed, &PODS, annotations)).unwrap();
    bed.start_agent();
    bed
}

/// Connections of the external client and of a pod, in both families, with the server of each.
fn connections(bed: &Bed) -> Vec<(String, Connection)> {
    let clients = [&bed.cluster.client, bed.netns("pod2")];
    let connection = |(client, vip)| {
        let mut connection = Connection::open(client, http(vip)).unwrap();
        (connection.ask().unwrap().server, connection)
    };
    clients.into_iter().flat_map(|client| WEB.map(|vip| (client, vip))).map(connection).collect()
}

fn is_reset(asked: &io::Result<Answer>) -> bool {
    let ends = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
    asked.as_ref().is_err_and(|error| ends.contains(&error.kind()))
}

fn tracks_udp(bed: &Bed) -> bool {
    let shown = bed.agent.as_ref().unwrap().ask(&["conntrack", "list", "-o", "json"]).unwrap();
    String::from_utf8(shown.stdout).unwrap().to_lowercase().contains("udp")
}

/// Connections of a process of the node have no flows, so the agent closes their sockets.
#[test]
fn sockets_of_the_node_end_by_the_timeouts_of_the_service() {
    // So many connections that each pod surely gets some.
    const BUSY: usize = 24;
    let (idle, drain) = ("lb.dev/idle-timeout", "lb.dev/drain-timeout");
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    let put = |bed: &Bed, pods: &[&str]| {
        bed.cluster.manifests.put(&web(bed, pods, &[(idle, "4s"), (drain, "10s")])).unwrap();
    };
    put(&bed, &PODS);
    bed.start_agent();
    let node = bed.cluster.node1.clone();
    let open = || -> Vec<(String, Connection)> {
        let vips = WEB.into_iter().cycle().take(BUSY);
        let open = |vip| Connection::open(&node, http(vip)).unwrap();
        vips.map(open).map(|mut connection| (connection.ask().unwrap().server, connection)).collect()
    };
    let is_ended = |asked: &io::Result<Answer>| {
        let ends =
            [io::ErrorKind::ConnectionAborted, io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
        asked.as_ref().is_err_and(|error| ends.contains(&error.kind()))
    };
    let (mut quiet, mut busy) = (open(), open());
    let mut keep_busy = |time: Duration| {
        let begin = Instant::now();
        let mut ended = Vec::new();
        while begin.elapsed() < time {
            ended.extend(busy.extract_if(.., |(server, connection)| match connection.ask() {
                Ok(answer) => {
                    assert_eq!(&answer.server, server);
                    false
                }
                asked => {
                    assert!(is_ended(&asked), "{server}: {asked:?}");
                    true
                }
            }));
            thread::sleep(Duration::from_millis(500));
        }
        (ended.into_iter().map(|(server, _)| server).collect::<Vec<_>>(), busy.len())
    };
    assert_eq!(keep_busy(3 * LOOK), (Vec::new(), BUSY), "a busy connection goes on");
    for (server, connection) in &mut quiet {
        let asked = connection.ask();
        assert!(is_ended(&asked), "{server}: {asked:?}");
    }
    put(&bed, &PODS[1..]);
    assert_eq!(keep_busy(Duration::from_secs(7)), (Vec::new(), BUSY), "the drain timeout has not passed");
    // The agent looks at the connections every 5 s. The drain timeout of 10 s begins with the look that notices that
    // pod1 is no longer a backend. The agent measures this timeout in ticks of 1.07 s, rounded down, so the second look
    // after the first may come too early, and the third look ends the connections.
    let (ended, left) = keep_busy(3 * LOOK + PATIENCE);
    assert!(!ended.is_empty() && ended.iter().all(|server| server == "pod1"), "{ended:?}");
    assert_eq!(ended.len() + left, BUSY);
}

/// The agent computes a connection's idle time from times that the kernel sets only once the connection is established.
#[test]
fn connecting_socket_of_the_node_is_not_idle() {
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    bed.cluster.manifests.put(&web(&bed, &PODS[1..], &[("lb.dev/idle-timeout", "1s")])).unwrap();
    bed.start_agent();
    bed.silence("pod2");
    let node = bed.cluster.node1.clone();
    let error = node.run(|| TcpStream::connect_timeout(&http(WEB[0]), LOOK + PATIENCE)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
}

#[test]
fn idle_connection_is_reset_and_a_busy_one_goes_on() {
    let bed = start_with(&IDLE);
    let (mut idle, mut busy) = (connections(&bed), connections(&bed));
    let socket = udp_socket(&bed.cluster.client, udp(WEB[0])).unwrap();
    echo(&socket, b"first").unwrap();
    assert!(tracks_udp(&bed));
    let begin = Instant::now();
    while begin.elapsed() < 3 * LOOK {
        for (_, connection) in &mut busy {
            connection.ask().unwrap();
        }
        thread::sleep(Duration::from_millis(500));
    }
    assert!(!tracks_udp(&bed), "the idle UDP flow");
    for (server, connection) in &mut idle {
        let asked = connection.ask();
        assert!(is_reset(&asked), "{server}: {asked:?}");
    }
    echo(&socket, b"a new flow").unwrap();
}

/// The server of an ended connection gets a RST when it sends its next segment, because the receiver has no connection
/// with these addresses and ports. The receiver is the client, or the node if the connection was masqueraded.
#[test]
fn server_of_an_ended_connection_is_reset_when_it_sends() {
    const TARGET: u16 = 9_000;
    let mut bed = Bed::without_agent(ClientLink::Ethernet, &PODS);
    let put = |bed: &Bed, pods: &[&str]| {
        let raw = Port { name: "raw", protocol: "TCP", port: 81, target_port: TARGET, node_port: None };
        bed.cluster.manifests.put(&Service { ports: vec![raw], ..web(bed, pods, &DRAIN) }).unwrap();
    };
    put(&bed, &PODS[..1]);
    bed.start_agent();
    let listener = bed.netns("pod1").run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, TARGET))).unwrap();
    let clients = [&bed.cluster.client, bed.netns("pod2")];
    let connect = |(client, vip): (&Netns, IpAddr)| {
        let stream = client.run(|| TcpStream::connect_timeout(&SocketAddr::new(vip, 81), PATIENCE)).unwrap();
        (stream, listener.accept().unwrap().0)
    };
    let pairs = clients.into_iter().flat_map(|client| WEB.map(|vip| (client, vip)));
    let mut held: Vec<(TcpStream, TcpStream)> = pairs.map(connect).collect();
    put(&bed, &PODS[1..]);
    let all_end = || {
        held.retain_mut(|(_, server)| match server.write_all(b"x") {
            Ok(()) => true,
            Err(error) => {
                let ends = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
                assert!(ends.contains(&error.kind()), "{error}");
                false
            }
        });
        held.is_empty().then_some(())
    };
    let removed = Instant::now();
    wait_for(Duration::from_secs(4) + 2 * LOOK + PATIENCE * patience(), all_end).expect("resets");
    assert!(removed.elapsed() >= Duration::from_secs(3), "a server was reset before the drain timeout");
}

#[test]
fn connection_to_a_removed_backend_is_reset_after_the_drain_timeout() {
    let bed = start_with(&DRAIN);
    let mut held: Vec<_> = (0..6).flat_map(|_| connections(&bed)).collect();
    let mut leaving: Vec<_> = held.extract_if(.., |(server, _)| server == "pod1").collect();
    assert!(!leaving.is_empty() && !held.is_empty());
    let removed = Instant::now();
    bed.cluster.manifests.put(&web(&bed, &PODS[1..], &DRAIN)).unwrap();
    let mut first_end = None;
    let all_end = || {
        leaving.retain_mut(|(_, connection)| match connection.ask() {
            Ok(answer) => answer.server == "pod1",
            asked => {
                // If the flow ended after the request's ACK and before the answer, only the client's next segment is
                // answered with a RST.
                let waits = asked.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
                let asked = if waits { connection.ask() } else { asked };
                assert!(is_reset(&asked), "{asked:?}");
                first_end.get_or_insert_with(|| removed.elapsed());
                false
            }
        });
        leaving.is_empty().then_some(())
    };
    wait_for(Duration::from_secs(4) + 2 * LOOK + PATIENCE * patience(), all_end).expect("resets");
    let first_end = first_end.expect("a reset");
    assert!(first_end >= Duration::from_secs(4), "{first_end:?}");
    for (server, connection) in &mut held {
        assert_eq!(&connection.ask().unwrap().server, server);
    }
    assert!(connections(&bed).iter().all(|(server, _)| server == "pod2"));
}
