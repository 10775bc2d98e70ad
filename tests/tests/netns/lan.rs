//! The setup of tests of exposed services: a router that connects clients and nodes, an agent on each node, and
//! services with every kind of address.

use std::{
    collections::BTreeSet,
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::Duration,
};

use lb_tests::{
    agent::Agent,
    client::{Answer, Connection, PATIENCE, REFUSED, echo, limit, udp_socket},
    cluster::{ClientLink, Cluster, HTTP_PORT, PodLink, UDP_PORT, Wiring},
    manifests::{Exposure, Port, Service, Type},
    netns::Netns,
    patience,
    socket::connect_by_first_syn,
    wait_for,
};

use crate::bed::{HTTP, UDP, vips};

/// How long [`probe_briefly`] waits for an answer. It multiplies this time by [`patience`], at most by 4.
const SHORT: Duration = Duration::from_millis(700);
/// `--cluster-cidr` of the testbed's pods.
pub(crate) const CLUSTER_CIDR: [&str; 2] = ["--cluster-cidr", "10.244.0.0/16,fd00:10:244::/48"];
/// The service whose changes show that the agents have processed all files; see [`Lan::settle`].
const MARKER: u8 = 90;

/// Clients, a router, and nodes with agents. Dropping this value drops the agents first.
pub(crate) struct Lan {
    pub(crate) agents: [Option<Agent>; 2],
    pub(crate) cluster: Cluster,
    generation: AtomicU16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

/// TCP and UDP over IPv4 (0) and IPv6 (1).
pub(crate) const EVERY: [(Protocol, usize); 4] =
    [(Protocol::Tcp, 0), (Protocol::Tcp, 1), (Protocol::Udp, 0), (Protocol::Udp, 1)];

/// A kind of address of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frontend {
    ClusterIp,
    /// The node port, at the address of node 1 or 2 on the LAN.
    NodePort(u8),
    LoadBalancer,
    ExternalIp,
}

use Frontend::{ClusterIp, ExternalIp, LoadBalancer, NodePort};

/// Every kind of address, with node ports at node 1.
pub(crate) const FRONTENDS: [Frontend; 4] = [ClusterIp, NodePort(1), LoadBalancer, ExternalIp];
/// The kinds to which the external traffic policy applies.
pub(crate) const EXTERNAL: [Frontend; 3] = [NodePort(1), LoadBalancer, ExternalIp];

/// The addresses of a node on the LAN.
pub(crate) fn node_addresses(node: u8) -> [IpAddr; 2] {
    [IpAddr::from([172, 18, 0, node]), IpAddr::from([0xfd00, 0x172, 0x18, 0, 0, 0, 0, u16::from(node)])]
}

/// The IPv4 and IPv6 address with this number in the networks of load balancer addresses and external IPs, which the
/// router routes to a node.
pub(crate) fn external(number: u8) -> [IpAddr; 2] {
    [IpAddr::from([192, 0, 2, number]), IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(number)])]
}

/// The node port of service `number`, the same for TCP and UDP.
pub(crate) fn node_port(number: u8) -> u16 {
    30_000 + u16::from(number)
}

impl Frontend {
    /// The address and port of service `number` for this protocol and family (0 is IPv4, 1 is IPv6).
    pub(crate) fn of(self, number: u8, (protocol, family): (Protocol, usize)) -> SocketAddr {
        let port = match protocol {
            Protocol::Tcp => HTTP,
            Protocol::Udp => UDP,
        };
        match self {
            ClusterIp => SocketAddr::new(vips(number)[family], port),
            NodePort(node) => SocketAddr::new(node_addresses(node)[family], node_port(number)),
            LoadBalancer => SocketAddr::new(external(number)[family], port),
            ExternalIp => SocketAddr::new(external(100 + number)[family], port),
        }
    }
}

/// The result of a client's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Observation {
    Answered(Answer),
    Refused,
    Silent,
    Failed(String),
}

impl From<io::Result<Answer>> for Observation {
    fn from(result: io::Result<Answer>) -> Self {
        match result {
            Ok(answer) => Self::Answered(answer),
            Err(error) if error.kind() == REFUSED => Self::Refused,
            Err(error) if matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock) => {
                Self::Silent
            }
            Err(error) => Self::Failed(error.to_string()),
        }
    }
}

/// The result of a client's single request. Detects a lost SYN by its retransmission, and a lost datagram by the
/// missing answer.
pub(crate) fn probe(netns: &Netns, to: SocketAddr, protocol: Protocol) -> Observation {
    probe_for(limit(), netns, to, protocol)
}

/// Like [`probe`] with a short limit: for clients that expect no answer, and for clients that retry.
pub(crate) fn probe_briefly(netns: &Netns, to: SocketAddr, protocol: Protocol) -> Observation {
    probe_for(SHORT * patience().min(4), netns, to, protocol)
}

fn probe_for(limit: Duration, netns: &Netns, to: SocketAddr, protocol: Protocol) -> Observation {
    match protocol {
        Protocol::Tcp => {
            let stream = netns.run(|| connect_by_first_syn(to, limit));
            stream.and_then(|stream| Connection::on(stream, to)?.ask()).into()
        }
        Protocol::Udp => {
            let ask = || {
                let socket = udp_socket(netns, to)?;
                socket.set_read_timeout(Some(limit))?;
                echo(&socket, b"?")
            };
            ask().into()
        }
    }
}

/// The client address that a backend receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// The client's own address. (Its port changes only if two of its flows would otherwise be equal for the backend.)
    Client,
    /// The address of node 1 or 2 towards the backend.
    Node(u8),
    /// The virtual address that the client connects to.
    Vip,
}

/// The expected result of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expect<'a> {
    /// An answer of one of these servers, which received the request from this source address.
    Answer(&'a [&'a str], Seen),
    Refused,
    Silence,
}

impl Lan {
    /// Clients and nodes; the agent on each node has these arguments.
    pub(crate) fn with(arguments: &[&str]) -> Self {
        let wiring = Wiring { link: ClientLink::Lan, pods: PodLink::PointToPoint, strict: false };
        Self::wired(wiring, arguments)
    }

    /// Like [`Self::with`], with nodes and pods connected by `wiring`.
    pub(crate) fn wired(wiring: Wiring, arguments: &[&str]) -> Self {
        let mut lan = Self::without_agents(wiring);
        lan.agents = [1, 2].map(|node| Some(lan.spawn_agent(node, arguments)));
        lan.agents.iter().flatten().for_each(|agent| agent.wait_until_healthy().unwrap());
        lan
    }

    /// Clients and nodes without agents.
    pub(crate) fn without_agents(wiring: Wiring) -> Self {
        let cluster = Cluster::for_test(wiring).unwrap();
        Self { agents: [None, None], cluster, generation: AtomicU16::new(1) }
    }

    /// Starts the agent on a node; kills a running one first.
    pub(crate) fn start_agent(&mut self, node: u8, arguments: &[&str]) {
        self.agents[usize::from(node - 1)] = None;
        let agent = self.spawn_agent(node, arguments);
        agent.wait_until_healthy().unwrap();
        self.agents[usize::from(node - 1)] = Some(agent);
    }

    fn spawn_agent(&self, node: u8, arguments: &[&str]) -> Agent {
        let mut settings = self.cluster.agent_settings(node);
        settings.arguments.extend(arguments.iter().map(ToString::to_string));
        Agent::spawn(self.cluster.node(node), settings).unwrap()
    }

    /// Service `number` with these pods and every kind of address.
    pub(crate) fn service(&self, number: u8, pods: &[&str]) -> Service {
        let node_port = Some(node_port(number));
        Service {
            annotations: Vec::new(),
            name: format!("service{number}"),
            cluster_ips: vips(number).to_vec(),
            ports: vec![
                Port { name: "http", protocol: "TCP", port: HTTP, target_port: HTTP_PORT, node_port },
                Port { name: "echo", protocol: "UDP", port: UDP, target_port: UDP_PORT, node_port },
            ],
            endpoints: pods.iter().map(|name| self.cluster.pod(name).unwrap().endpoint()).collect(),
            exposure: Exposure {
                kind: Type::LoadBalancer,
                load_balancer_ips: external(number).to_vec(),
                external_ips: external(100 + number).to_vec(),
                ..Exposure::default()
            },
        }
    }

    /// Writes the services and waits until the agents have written them to the kernel.
    pub(crate) fn apply(&self, services: &[Service]) {
        for service in services {
            self.cluster.manifests.put(service).unwrap();
        }
        self.settle();
    }

    /// Removes the file of service `number` and waits until the agents have removed the service. They delay the removal
    /// in case the file reappears.
    pub(crate) fn remove(&self, number: u8) {
        let name = format!("service{number}");
        self.cluster.manifests.remove(&name).unwrap();
        for agent in self.agents.iter().flatten() {
            let list = || agent.ask(&["service", "list", "-o", "json"]).unwrap().stdout;
            let quoted = format!("\"{name}\"");
            let gone = || (!String::from_utf8(list()).unwrap().contains(&quoted)).then_some(());
            wait_for(PATIENCE, gone).unwrap();
        }
    }

    /// Waits until the agents have written all files to the kernel. An agent never reads a file before one that was
    /// written earlier. So once a change of the marker file is visible, the agent has read the other files, in the same
    /// round of changes or in an earlier one. But the round with the marker file may still be in progress. The agent
    /// writes one round after the other, so this function changes the marker file a second time: when the second change
    /// is visible, the round with the first change has ended.
    pub(crate) fn settle(&self) {
        self.pass_marker();
        self.pass_marker();
    }

    /// Changes the marker service and waits until each agent serves it. Each client must reach the endpoint on its own
    /// node (policy Local). Other endpoints would not show that this node's agent serves the marker: packets that the
    /// node leaves untranslated go to the router, and from there to node 1, whose agent may serve them.
    fn pass_marker(&self) {
        let port = self.generation.fetch_add(1, Ordering::Relaxed);
        let mut marker = self.service(MARKER, &["pod2", "pod3"]);
        let exposure = Exposure { internal_local: true, ..Exposure::default() };
        (marker.name, marker.exposure) = ("zz-marker".to_owned(), exposure);
        marker.ports.truncate(1);
        (marker.ports[0].port, marker.ports[0].node_port) = (port, None);
        self.cluster.manifests.put(&marker).unwrap();
        let to = SocketAddr::new(vips(MARKER)[0], port);
        for (agent, (client, local)) in self.agents.iter().zip([("pod1", "pod2"), ("pod4", "pod3")]) {
            let connect = || TcpStream::connect_timeout(&to, Duration::from_millis(100));
            let ask = || Connection::on(self.netns(client).run(connect)?, to)?.ask();
            let seen = || ask().is_ok_and(|answer| answer.server == local).then_some(());
            let seen = agent.is_none() || wait_for(PATIENCE, seen).is_some();
            assert!(seen, "the agent on the node of {client} does not see the changes");
        }
    }

    /// The namespace of `client`, `client2`, `node1`, `node2` or a pod.
    pub(crate) fn netns(&self, source: &str) -> &Netns {
        match source {
            "client" => &self.cluster.client,
            "client2" => self.cluster.other_client.as_ref().unwrap(),
            "node1" => self.cluster.node(1),
            "node2" => self.cluster.node(2),
            pod => &self.cluster.pod(pod).unwrap().netns,
        }
    }

    /// Asserts that each client of `source` gets the expected result from the service in both protocols and families.
    #[track_caller]
    pub(crate) fn check(&self, source: &[&str], number: u8, frontends: &[Frontend], expected: Expect<'_>) {
        let wrong: Vec<String> = thread::scope(|scope| {
            let mut threads = Vec::new();
            for source in source {
                for frontend in frontends {
                    for how in EVERY {
                        let ask = move || self.try_one(source, number, *frontend, how, expected);
                        threads.push(scope.spawn(ask));
                    }
                }
            }
            threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect()
        });
        assert!(wrong.is_empty(), "expected {expected:?}, but\n{}", wrong.join("\n"));
    }

    /// Makes one request; returns a description of the result if it is not the expected one.
    fn try_one(
        &self,
        source: &str,
        number: u8,
        frontend: Frontend,
        how: (Protocol, usize),
        expected: Expect<'_>,
    ) -> Option<String> {
        let to = frontend.of(number, how);
        let probe = if expected == Expect::Silence { probe_briefly } else { probe };
        let verdict = probe(self.netns(source), to, how.0);
        let right = match (&verdict, expected) {
            (Observation::Refused, Expect::Refused) | (Observation::Silent, Expect::Silence) => true,
            (Observation::Answered(answer), Expect::Answer(servers, seen)) => {
                servers.contains(&answer.server.as_str()) && self.is_seen(answer, to, seen)
            }
            _ => false,
        };
        (!right).then(|| format!("{source} → {frontend:?} {to} {:?}: {verdict:?}", how.0))
    }

    fn is_seen(&self, answer: &Answer, to: SocketAddr, seen: Seen) -> bool {
        match seen {
            Seen::Client => answer.seen.ip() == answer.local.ip(),
            Seen::Vip => answer.seen.ip() == to.ip(),
            Seen::Node(node) => answer.seen.ip() == self.source(node, &answer.server, to.ip()),
        }
    }

    /// The source address of a node towards a pod.
    pub(crate) fn source(&self, node: u8, server: &str, like: IpAddr) -> IpAddr {
        let is_local = self.cluster.pod(server).is_some_and(|pod| pod.node == format!("node{node}"));
        let gateway = [
            IpAddr::from([10, 244, node, 1]),
            IpAddr::from([0xfd00, 0x10, 0x244, u16::from(node), 0, 0, 0, 1]),
        ];
        let addresses = if is_local { gateway } else { node_addresses(node) };
        addresses[usize::from(like.is_ipv6())]
    }

    /// Servers that answer 30 requests of each protocol and family.
    pub(crate) fn servers(&self, source: &str, number: u8, frontend: Frontend) -> BTreeSet<String> {
        (0..120).map(|n| self.server(source, number, frontend, EVERY[n % 4])).collect()
    }

    /// The server that answers; fails if none does.
    pub(crate) fn server(
        &self,
        source: &str,
        number: u8,
        frontend: Frontend,
        how: (Protocol, usize),
    ) -> String {
        let verdict = probe(self.netns(source), frontend.of(number, how), how.0);
        let Observation::Answered(answer) = verdict else {
            panic!("{source} → {frontend:?} {how:?}: {verdict:?}")
        };
        answer.server
    }
}

/// A set of names, to compare with [`Lan::servers`].
pub(crate) fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(ToString::to_string).collect()
}
