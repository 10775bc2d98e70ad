//! A socket of the node and a masqueraded or hairpin flow to the same endpoint never share a source port at the node's
//! address, whichever begins first.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
};

use lb_tests::{
    client::{Answer, Connection, any_address, echo, udp_socket_from},
    netns::Netns,
};

use crate::lan::{EVERY, Frontend::NodePort, Lan, Protocol, node_addresses};

/// A socket that is connected to a server, or to a Service.
enum Socket {
    Tcp(Connection),
    Udp(UdpSocket),
}

impl Socket {
    fn open(netns: &Netns, source: SocketAddr, to: SocketAddr, protocol: Protocol) -> io::Result<Self> {
        match protocol {
            Protocol::Tcp => Connection::open_from(netns, source, to).map(Self::Tcp),
            Protocol::Udp => netns.run(|| udp_socket_from(source, to)).map(Self::Udp),
        }
    }

    fn ask(&mut self) -> io::Result<Answer> {
        match self {
            Self::Tcp(connection) => connection.ask(),
            Self::Udp(socket) => echo(socket, b"?"),
        }
    }
}

/// A client of the node port of service `number`. Its flow has a source port at the node's address.
struct Case {
    client: &'static str,
    number: u8,
    server: &'static str,
}

/// A masqueraded client, and a hairpin.
const CASES: [Case; 2] = [
    Case { client: "client", number: 1, server: "pod3" },
    Case { client: "pod1", number: 2, server: "pod1" },
];

impl Case {
    fn client(&self, lan: &Lan, how: (Protocol, usize)) -> Socket {
        let to = NodePort(1).of(self.number, how);
        let source = SocketAddr::new(any_address(to.ip()), 0);
        Socket::open(lan.netns(self.client), source, to, how.0).unwrap()
    }

    /// A socket of the node that is connected to the server itself.
    fn socket(&self, lan: &Lan, port: u16, (protocol, family): (Protocol, usize)) -> Socket {
        let (pod, source) = (lan.cluster.pod(self.server).unwrap(), node_addresses(1)[family]);
        let to = match protocol {
            Protocol::Tcp => pod.http(source),
            Protocol::Udp => pod.udp(source),
        };
        Socket::open(lan.cluster.node(1), SocketAddr::new(source, port), to, protocol).unwrap()
    }
}

fn each(ports: &str, test: impl Fn(&Lan, &Case, (Protocol, usize))) {
    for xdp in ["off", "generic"] {
        let lan = Lan::with(&["--xdp", xdp, "--masquerade-ports", ports]);
        lan.apply(&[lan.service(1, &["pod3"]), lan.service(2, &["pod1"])]);
        for case in &CASES {
            EVERY.into_iter().for_each(|how| test(&lan, case, how));
        }
    }
}

#[test]
fn flow_takes_no_source_port_that_a_socket_of_the_node_has() {
    const LAST: u16 = 20_007;
    each("20000-20007", |lan, case, how| {
        let mut sockets: Vec<Socket> = (20_000..LAST).map(|port| case.socket(lan, port, how)).collect();
        let seen = case.client(lan, how).ask().unwrap().seen;
        assert_eq!(seen, SocketAddr::new(node_addresses(1)[how.1], LAST), "{} by {how:?}", case.client);
        for (socket, port) in sockets.iter_mut().zip(20_000..) {
            assert_eq!(socket.ask().unwrap().seen.port(), port, "{how:?}");
        }
    });
}

#[test]
fn socket_of_the_node_shares_no_source_port_with_a_flow() {
    each("20000-20001", |lan, case, how| {
        let what = format!("{} by {how:?}", case.client);
        let mut client = case.client(lan, how);
        let of_client = client.ask().unwrap().seen;
        let mut socket = case.socket(lan, of_client.port(), how);
        let of_socket = socket.ask().unwrap().seen;
        assert_eq!(of_socket.ip(), of_client.ip(), "{what}");
        assert_ne!(of_socket.port(), of_client.port(), "{what}");
        for _ in 0..3 {
            assert_eq!(client.ask().unwrap().seen, of_client, "{what}");
            assert_eq!(socket.ask().unwrap().seen, of_socket, "{what}");
        }
    });
}
