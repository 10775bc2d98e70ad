//! Services with the PROXY protocol: segments of unusual sizes, keepalives, TCP Fast Open, and links that reorder and
//! duplicate segments.

use std::{
    fs,
    io::{self, BufReader, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    os::fd::{AsFd, AsRawFd as _},
    thread,
    time::Duration,
};

use lb_tests::{netns::Netns, pattern};
use nix::sys::socket::{
    self, AddressFamily, SockFlag, SockType, SockaddrStorage, getsockopt, setsockopt, sockopt,
};

use super::{OUT, SERVER, connect_within, listen, lose, named, serve, serve_on, start, transfer};
use crate::bed::{Bed, WEB, http};

/// Limit of each connect and each read. It has room for several retransmissions.
const LIMIT: Duration = Duration::from_secs(60);
/// Number of bytes of a large transfer.
const LARGE: usize = 200_000;

/// Drops the first ACK of each connection of the namespace, so that the first bytes complete the handshake.
const LOSE_HANDSHAKE_ACK: &str = "tcp dport 80 tcp flags & (syn|ack|psh|fin) == ack \
                                  add @ports { tcp sport limit rate 1/hour burst 1 packets } drop";

/// Sends bytes in writes of `size` bytes and closes the sending direction, without waiting for the server. Expects the
/// addresses of the connection, then the same bytes, then the end of the stream.
#[track_caller]
fn send_at_once(stream: &TcpStream, vip: SocketAddr, bytes: &[u8], size: usize) {
    let mut received = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut writer = stream;
            for piece in bytes.chunks(size) {
                writer.write_all(piece).unwrap();
            }
            writer.shutdown(Shutdown::Write).unwrap();
        });
        let mut reader = BufReader::new(stream);
        let (found, expected) = named(stream, &mut reader, vip);
        assert_eq!(found, expected);
        reader.read_to_end(&mut received).unwrap();
    });
    assert!(received == bytes, "{} of {} bytes came back from {vip}", received.len(), bytes.len());
}

/// Sends a greeting. Expects the addresses of the connection, then the same greeting.
#[track_caller]
fn greet(mut stream: &TcpStream, vip: SocketAddr, greeting: &[u8]) {
    stream.write_all(greeting).unwrap();
    let mut reader = BufReader::new(stream);
    let (found, expected) = named(stream, &mut reader, vip);
    assert_eq!(found, expected);
    let mut returned = vec![0; greeting.len()];
    reader.read_exact(&mut returned).unwrap();
    assert!(returned == greeting, "{vip} changed the greeting");
}

/// A counter of TCP in a namespace, in the group `TcpExt`, which `nstat` shows too.
fn tcp_counter(netns: &Netns, field: &str) -> u64 {
    let text = netns.run(|| fs::read_to_string("/proc/thread-self/net/netstat")).unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let mut columns = names.split(' ').zip(values.split(' '));
    let (_, value) = columns.find(|(name, _)| *name == field).unwrap_or_else(|| panic!("no counter {field}"));
    value.parse().unwrap()
}

/// The kernel sends each write as a segment of its own, until the congestion window is full.
#[test]
fn single_bytes_reach_the_backend_once_and_in_order() {
    let bed = start(SERVER);
    serve(bed.netns("pod1"));
    for client in [&bed.cluster.client, bed.netns("pod2"), &bed.cluster.node1] {
        for rule in ["accept", LOSE_HANDSHAKE_ACK] {
            lose(client, OUT, rule);
            for vip in WEB.map(http) {
                let stream = connect_within(client, vip, LIMIT).unwrap();
                stream.set_nodelay(true).unwrap();
                send_at_once(&stream, vip, pattern::at(0, 500), 1);
            }
        }
        lose(client, OUT, "accept");
    }
}

/// The MTU of links with jumbo frames.
const JUMBO: u32 = 9000;

/// Gives all devices between the clients and the backend the MTU [`JUMBO`].
fn enlarge_frames(bed: &Bed) {
    for (netns, devices) in [
        (&bed.cluster.client, &["eth0"][..]),
        (&bed.cluster.node1, &["eth0", "pod1", "pod2"]),
        (bed.netns("pod1"), &["eth0"]),
        (bed.netns("pod2"), &["eth0"]),
    ] {
        let commands: String =
            devices.iter().map(|device| format!("link set {device} mtu {JUMBO}\n")).collect();
        netns.ip(&commands).unwrap();
    }
}

/// With segmentation offload, the client's first segment is larger than any MTU; without, it fills a frame.
#[test]
fn first_write_larger_than_a_jumbo_frame_reaches_the_backend_unchanged() {
    let bed = start(SERVER);
    serve(bed.netns("pod1"));
    enlarge_frames(&bed);
    for client in [&bed.cluster.client, bed.netns("pod2")] {
        for segments in [65_535, 1] {
            client.ip(&format!("link set eth0 gso_max_segs {segments}\n")).unwrap();
            for rule in ["accept", LOSE_HANDSHAKE_ACK] {
                lose(client, OUT, rule);
                for vip in WEB.map(http) {
                    let stream = connect_within(client, vip, LIMIT).unwrap();
                    let maximum = getsockopt(&stream, sockopt::TcpMaxSeg).unwrap();
                    assert!(maximum > JUMBO - 200, "segments to {vip} have at most {maximum} bytes");
                    send_at_once(&stream, vip, pattern::at(0, LARGE), LARGE);
                }
            }
        }
    }
}

/// How long connections are silent. An end that gets no answer to its keepalives closes its connection earlier: 4 s
/// after the last data.
const SILENCE: Duration = Duration::from_secs(6);

/// Makes a socket, or the sockets that a listener accepts, send keepalives after a second without data.
fn keep_alive(socket: &impl AsFd) {
    setsockopt(socket, sockopt::KeepAlive, &true).unwrap();
    setsockopt(socket, sockopt::TcpKeepIdle, &1).unwrap();
    setsockopt(socket, sockopt::TcpKeepInterval, &1).unwrap();
    setsockopt(socket, sockopt::TcpKeepCount, &3).unwrap();
}

/// Opens connections of these clients in both families. On half of the connections, clients send nothing after the handshake.
fn open_all(clients: &[&Netns]) -> Vec<TcpStream> {
    let mut streams = Vec::new();
    for client in clients {
        for (vip, greeting) in WEB.into_iter().flat_map(|vip| [(http(vip), ""), (http(vip), "hello")]) {
            let stream = connect_within(client, vip, LIMIT).unwrap();
            greet(&stream, vip, greeting.as_bytes());
            streams.push(stream);
        }
    }
    streams
}

/// A keepalive has the sequence number before the next one, and the other end answers it with an ACK. Only one end of
/// each connection sends keepalives, because each keepalive postpones those of the other end.
#[test]
fn keepalives_of_either_end_hold_silent_connections() {
    let bed = start(SERVER);
    let pod = bed.netns("pod1");
    let clients = [&bed.cluster.client, bed.netns("pod2"), &bed.cluster.node1];
    let listener = listen(pod);
    serve_on(listener.try_clone().unwrap());
    let held_by_clients = open_all(&clients);
    held_by_clients.iter().for_each(keep_alive);
    keep_alive(&listener);
    let held_by_the_server = open_all(&clients);
    thread::sleep(SILENCE);
    for netns in clients.into_iter().chain([pod]) {
        assert!(tcp_counter(netns, "TCPKeepAlive") > 0, "{} has sent no keepalive", netns.name());
    }
    for stream in held_by_clients.iter().chain(&held_by_the_server) {
        transfer(stream, &mut BufReader::new(stream), 20_000);
    }
}

/// Prepares a connection with TCP Fast Open. If the kernel sends bytes in the SYN, it sends the SYN with the first
/// write.
fn connect_with_fast_open(to: SocketAddr) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let socket = socket::socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, sockopt::TcpFastOpenConnect, &true)?;
    socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(to))?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(LIMIT))?;
    Ok(stream)
}

/// With the setting 1, a client asks for a cookie of the server in its SYN. With 5, it sends its first bytes in the SYN
/// without a cookie, which the server would accept (1538: it serves TCP Fast Open on each listener, without cookies).
#[test]
fn fast_open_falls_back_to_a_handshake_without_loss() {
    let bed = start(SERVER);
    let pod = bed.netns("pod1");
    pod.sysctl("ipv4/tcp_fastopen", "1538").unwrap();
    serve(pod);
    for client in [&bed.cluster.client, bed.netns("pod2"), &bed.cluster.node1] {
        for setting in ["1", "5"] {
            client.sysctl("ipv4/tcp_fastopen", setting).unwrap();
            for vip in WEB.map(http) {
                let stream = client.run(|| connect_with_fast_open(vip)).unwrap();
                greet(&stream, vip, pattern::at(0, 3_000));
                transfer(&stream, &mut BufReader::new(&stream), 20_000);
            }
        }
        let refused = tcp_counter(client, "TCPFastOpenActiveFail");
        assert!(refused > 0, "{} has sent no bytes in a SYN", client.name());
    }
    assert_eq!(tcp_counter(pod, "TCPFastOpenPassive"), 0, "a SYN with bytes has reached the server");
}

/// Makes `eth0` of a namespace send some TCP segments late, so that later ones overtake them, and some twice. (Kernels
/// may lack netem. A class of HTB with a low rate delays segments, and netfilter duplicates them.)
fn disturb(netns: &Netns, gateways: [&str; 2]) {
    // Without this limit, a few large segments would hold all bytes of a transfer.
    netns.ip("link set eth0 gso_max_segs 1\n").unwrap();
    let classes = "qdisc add dev eth0 root handle 1: htb default 1\n\
                   class add dev eth0 parent 1: classid 1:1 htb rate 10gbit quantum 60000\n\
                   class add dev eth0 parent 1: classid 1:2 htb rate 1mbit burst 100 cburst 100 quantum 1514\n";
    netns.feed("tc", &["-batch", "-"], classes).unwrap();
    for (family, gateway) in ["ip", "ip6"].into_iter().zip(gateways) {
        let rules = format!(
            "table {family} disturb {{
               chain out {{
                 type filter hook output priority 0;
                 meta l4proto tcp numgen inc mod 5 0 meta priority set 1:2
                 meta l4proto tcp numgen inc mod 3 0 dup to {gateway} device \"eth0\"
               }}
             }}
"
        );
        netns.feed("nft", &["-f", "-"], &rules).unwrap();
    }
}

/// Clients and backend send every fifth segment late and every third one twice, those of the handshake as well.
#[test]
fn transfers_survive_reordered_and_duplicated_segments() {
    let bed = start(SERVER);
    let pod = bed.netns("pod1");
    serve(pod);
    let clients = [&bed.cluster.client, bed.netns("pod2")];
    let of_pods = ["10.244.1.1", "fd00:10:244:1::1"];
    disturb(&bed.cluster.client, ["198.51.100.1", "fd00:198:51:100::1"]);
    disturb(bed.netns("pod2"), of_pods);
    disturb(pod, of_pods);
    for client in clients {
        for vip in WEB.map(http) {
            let stream = connect_within(client, vip, LIMIT).unwrap();
            send_at_once(&stream, vip, pattern::at(0, LARGE), LARGE);
        }
    }
    for netns in clients.into_iter().chain([pod]) {
        for (counter, what) in [("TCPOFOQueue", "out of order"), ("TCPDSACKOldSent", "twice")] {
            assert!(tcp_counter(netns, counter) > 0, "{} got no segment {what}", netns.name());
        }
    }
}
