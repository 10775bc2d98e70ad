//! The standard cluster: an external client, two nodes, two pods on each.
//!
//! | link | IPv4 | IPv6 |
//! |---|---|---|
//! | client — node1 | 198.51.100.2 — 198.51.100.1 | fd00:198:51:100::2 — ::1 |
//! | node1 — node2 | 172.18.0.1 — 172.18.0.2 | fd00:172:18::1 — ::2 |
//! | pods of node N | 10.244.N.0/24, gateway .1 | fd00:10:244:N::/64, gateway ::1 |
//!
//! Pods are wired like those of the CNI plugin `ptp` or `bridge`, see [`PodLink`]. The client's route to the service
//! ranges leads through node1. [`ClientLink::Routed`] and [`ClientLink::Lan`] describe other wirings.

use std::{
    fmt::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};

use crate::{
    agent::{Agent, Settings},
    cgroup::Cgroup,
    cleanup::{self, Cleanup, Resource},
    manifests::{Endpoint, Manifests},
    netns::{self, Netns},
    pump::{self, Layer, Pump},
    server::{self, Server},
    wait_for,
};

/// How long to wait for the carrier of a new device, on a fast machine.
const CARRIER: Duration = Duration::from_secs(5);

/// TCP port of the pods' HTTP servers, as in the examples of the Kubernetes documentation.
pub const HTTP_PORT: u16 = 9376;
/// UDP port of the pods' echo servers.
pub const UDP_PORT: u16 = 5353;
/// A port on which no server of a pod listens.
pub const CLOSED_PORT: u16 = 9999;

/// Addresses of the external client, IPv4 first.
pub const CLIENT: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(198, 51, 100, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x198, 0x51, 0x100, 0, 0, 0, 2)),
];

/// Addresses of the second external client, IPv4 first.
pub const OTHER_CLIENT: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(203, 0, 113, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x203, 0, 0x113, 0, 0, 0, 2)),
];

/// Networks of load balancer addresses and external IPs in a cluster with [`ClientLink::Lan`].
pub const EXTERNAL: [&str; 2] = ["192.0.2.0/24", "2001:db8::/64"];

/// How the machines of a cluster are connected.
#[derive(Clone, Copy, Debug)]
pub struct Wiring {
    /// How the external client is connected.
    pub link: ClientLink,
    /// How pods are connected to their nodes.
    pub pods: PodLink,
    /// Whether the nodes have strict reverse path filters (`rp_filter=1`), or none.
    pub strict: bool,
}

impl From<ClientLink> for Wiring {
    fn from(link: ClientLink) -> Self {
        Self { link, pods: PodLink::PointToPoint, strict: false }
    }
}

/// How pods are connected to their nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodLink {
    /// Like the CNI plugin `ptp`: a veth whose host side has the gateway's address, and a host route to the pod.
    PointToPoint,
    /// Like the CNI plugin `bridge`: the host sides are ports of the bridge `cni0`, which has the gateway's address.
    /// Pods of one node reach each other without the node's routing.
    Bridge,
}

/// How the external client is connected to node1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientLink {
    /// By a veth.
    Ethernet,
    /// By a veth to a router, and another veth from there to node1.
    Routed,
    /// By a VLAN device (802.1Q, with this VLAN id) on a veth.
    Vlan(u16),
    /// By a TAP device; the client's frames carry an 802.1p priority tag (VLAN 0).
    PriorityTagged,
    /// By a TUN device, whose packets have no Ethernet header.
    Layer3,
    /// By a veth to a router, which also connects the nodes by a bridge, as in a rack. Each node has one device to
    /// other machines, `eth0`, with the default route. The client's route to node2 bypasses node1. A second client is
    /// connected to the router.
    Lan,
}

/// A pod: a network namespace with servers.
#[derive(Debug)]
pub struct Pod {
    /// Name of the pod, which its servers put into their answers.
    pub name: String,
    /// Name of the node that runs the pod.
    pub node: String,
    /// Network namespace of the pod.
    pub netns: Netns,
    /// Addresses of the pod: IPv4, then IPv6.
    pub addresses: [IpAddr; 2],
    servers: Vec<Server>,
}

impl Pod {
    /// The pod's address in the family of `like`.
    pub fn address(&self, like: IpAddr) -> IpAddr {
        self.addresses[usize::from(like.is_ipv6())]
    }

    /// Address and port of the pod's HTTP server, in the family of `like`.
    pub fn http(&self, like: IpAddr) -> SocketAddr {
        SocketAddr::new(self.address(like), HTTP_PORT)
    }

    /// Address and port of the pod's UDP server, in the family of `like`.
    pub fn udp(&self, like: IpAddr) -> SocketAddr {
        SocketAddr::new(self.address(like), UDP_PORT)
    }

    /// The pod as a ready endpoint of a service.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint {
            pod: self.name.clone(),
            node: self.node.clone(),
            addresses: self.addresses.to_vec(),
            ready: true,
            ..Endpoint::default()
        }
    }

    /// Starts the pod's servers.
    pub fn serve(&mut self) -> Result<()> {
        self.servers = serve_pod(&self.netns, &self.name, self.addresses)?;
        Ok(())
    }

    /// Stops the pod's servers; the pod's namespace stays.
    pub fn stop_serving(&mut self) {
        self.servers.clear();
    }
}

/// Starts the servers of a pod (HTTP and UDP) at all addresses of a namespace.
pub fn serve(netns: &Netns, name: &str) -> Result<Vec<Server>> {
    Ok(vec![server::http(netns, name, HTTP_PORT)?, server::udp_echo(netns, name, UDP_PORT)?])
}

/// Starts the servers of a pod (HTTP and UDP); the UDP servers are bound to the pod's addresses. The kernel may miss a
/// socket that is bound to no address: when another UDP socket of the machine connects, the kernel moves the connecting
/// socket to another chain of its hash table (`udp_lib_rehash` in net/ipv4/udp.c). A lookup that has just reached the
/// connecting socket continues in the other chain, and the kernel answers the datagram with "port unreachable". Since
/// Linux 6.14 the kernel then looks again, but only for sockets that are bound to the packet's destination address.
fn serve_pod(netns: &Netns, name: &str, addresses: [IpAddr; 2]) -> Result<Vec<Server>> {
    let [v4, v6] = addresses.map(|address| server::udp_echo_at(netns, name, (address, UDP_PORT).into()));
    Ok(vec![server::http(netns, name, HTTP_PORT)?, v4?, v6?])
}

/// The client, nodes and pods of a test. Dropping this removes all of them.
#[derive(Debug)]
pub struct Cluster {
    /// Network namespace of the external client.
    pub client: Netns,
    /// Network namespace of a second external client, with [`ClientLink::Lan`]; its addresses are [`OTHER_CLIENT`].
    pub other_client: Option<Netns>,
    /// Network namespace of the router between client and node1, with [`ClientLink::Routed`] or [`ClientLink::Lan`].
    pub router: Option<Netns>,
    /// The node that receives the client's packets for Services, unless [`Self::route_services_to`],
    /// [`Self::spread_services_over`] or [`Self::spread_services_resiliently`] changes that.
    pub node1: Netns,
    /// The second node: connected to node1, or with [`ClientLink::Lan`] to the router.
    pub node2: Netns,
    /// The nodes from node3 on, which [`Self::add_node`] has added.
    more_nodes: Vec<Netns>,
    /// pod1 and pod2 on node1, pod3 and pod4 on node2, then the pods that were added later.
    pub pods: Vec<Pod>,
    /// The folder of manifests, which the agents of all nodes read.
    pub manifests: Manifests,
    prefix: String,
    folder: PathBuf,
    wiring: Wiring,
    /// A cgroup for each node and its pods, in the order of the nodes; `None` in a demo.
    cgroups: Option<Vec<Cgroup>>,
    _pump: Option<Pump>,
    _folder: Cleanup,
}

impl Cluster {
    /// Creates a cluster. Its namespaces are called `PREFIX-client`, `PREFIX-node1` and so on; manifests, logs and the
    /// agents' bpffs are below `folder`.
    pub fn create(prefix: &str, folder: &Path, wiring: impl Into<Wiring>) -> Result<Self> {
        Self::create_in(None, prefix, folder, wiring.into())
    }

    fn create_in(cgroups: Option<Vec<Cgroup>>, prefix: &str, folder: &Path, wiring: Wiring) -> Result<Self> {
        let registered = Cleanup::of(Resource::Folder(folder.to_owned()));
        let manifests = Manifests::create(folder.join("manifests"))
            .with_context(|| format!("making {}", folder.join("manifests").display()))?;
        let host = |name: &str| host(&format!("{prefix}-{name}"));
        let node = |name, index: usize| -> Result<Netns> {
            Ok(router(&host(name)?)?.within(cgroups.as_ref().map(|cgroups| &cgroups[index])))
        };
        let (client, node1, node2) = (host("client")?, node("node1", 0)?, node("node2", 1)?);
        if wiring.strict {
            for node in [&node1, &node2] {
                node.sysctl("ipv4/conf/all/rp_filter", "1")?;
            }
        }
        let is_lan = wiring.link == ClientLink::Lan;
        let has_router = is_lan || wiring.link == ClientLink::Routed;
        let router = if has_router { Some(router(&host("router")?)?) } else { None };
        let other_client = if is_lan { Some(host("client2")?) } else { None };
        let mut cluster = Self {
            client,
            other_client,
            router,
            node1,
            node2,
            more_nodes: Vec::new(),
            pods: Vec::new(),
            manifests,
            prefix: prefix.to_owned(),
            folder: folder.to_owned(),
            wiring,
            cgroups,
            _pump: None,
            _folder: registered,
        };
        if !is_lan {
            cluster.connect_nodes()?;
        }
        cluster.connect_client(wiring.link)?;
        if wiring.pods == PodLink::Bridge {
            cluster.bridge_pods()?;
        }
        for (pod, node) in [(1, 1), (2, 1), (3, 2), (4, 2)] {
            cluster.add_pod(&format!("pod{pod}"), node, pod)?;
        }
        Ok(cluster)
    }

    /// Creates a cluster for a test: with unique names, a temporary folder, and a cgroup for each node. Before that,
    /// removes the leftovers of killed tests, and makes signals clean up ([`cleanup::on_interrupt`]).
    pub fn for_test(wiring: impl Into<Wiring>) -> Result<Self> {
        cleanup::on_interrupt();
        cleanup::remove_stale()?;
        let prefix = netns::unique_prefix();
        let cgroup = |node: &str| Cgroup::create(&format!("{prefix}-{node}"));
        let cgroups = vec![cgroup("node1")?, cgroup("node2")?];
        Self::create_in(Some(cgroups), &prefix, &std::env::temp_dir().join(&prefix), wiring.into())
    }

    /// Path of the folder with manifests, logs and BPF file systems.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Finds a pod of any node by its name; `None` if the cluster has no such pod.
    pub fn pod(&self, name: &str) -> Option<&Pod> {
        self.pods.iter().find(|pod| pod.name == name)
    }

    /// Default settings for an agent on node number `node`.
    pub fn agent_settings(&self, node: u8) -> Settings {
        Settings {
            node_name: format!("node{node}"),
            manifests: self.manifests.folder().to_owned(),
            bpffs: self.bpffs(node),
            cgroup: self.cgroup(node).map(|cgroup| cgroup.path().to_owned()),
            log: self.folder.join(format!("agent{node}.log")),
            arguments: Vec::new(),
            binary: None,
        }
    }

    /// Mount point of the BPF file system for the agent on node number `node`.
    pub fn bpffs(&self, node: u8) -> PathBuf {
        self.folder.join(format!("bpffs{node}"))
    }

    /// The cgroup of node number `node` and its pods; `None` in a demo.
    pub fn cgroup(&self, node: u8) -> Option<&Cgroup> {
        self.cgroups.as_ref().map(|cgroups| &cgroups[usize::from(node) - 1])
    }

    /// The namespace of node number `node`.
    pub fn node(&self, node: u8) -> &Netns {
        match node {
            1 => &self.node1,
            2 => &self.node2,
            later => &self.more_nodes[usize::from(later) - 3],
        }
    }

    /// Adds a node without pods; returns its number. Only with [`ClientLink::Lan`].
    pub fn add_node(&mut self) -> Result<u8> {
        let number = u8::try_from(self.more_nodes.len() + 3)?;
        let name = format!("{}-node{number}", self.prefix);
        if let Some(cgroups) = &mut self.cgroups {
            cgroups.push(Cgroup::create(&name)?);
        }
        let node = router(&host(&name)?)?.within(self.cgroup(number));
        if self.wiring.strict {
            node.sysctl("ipv4/conf/all/rp_filter", "1")?;
        }
        self.more_nodes.push(node);
        self.connect_lan_node(number)?;
        for other in 1..number {
            self.add_pod_routes(number, other)?;
            self.add_pod_routes(other, number)?;
        }
        Ok(number)
    }

    /// Starts an agent on node number `node`, and waits until it has synchronised.
    pub fn start_agent(&self, node: u8) -> Result<Agent> {
        Agent::start(self.node(node), self.agent_settings(node))
    }

    /// Adds a pod with servers to node number `node`; `number` (1 to 89) determines the pod's addresses.
    pub fn add_pod(&mut self, name: &str, node: u8, number: u8) -> Result<()> {
        let netns = host(&format!("{}-{name}", self.prefix))?.within(self.cgroup(node));
        let on = self.node(node);
        let (v4, v6) =
            (format!("10.244.{node}.{}", 10 + number), format!("fd00:10:244:{node}::{}", 10 + number));
        veth((on, name), (&netns, "eth0"))?;
        let (gateway4, gateway6) = gateways(node);
        match self.wiring.pods {
            PodLink::PointToPoint => {
                on.ip(&format!(
                    "address add {gateway4}/32 dev {name}\naddress add {gateway6}/128 dev {name} nodad\n\
                     link set {name} up\nroute add {v4}/32 dev {name}\nroute add {v6}/128 dev {name}\n"
                ))?;
                netns.ip(&format!(
                    "address add {v4}/32 dev eth0\naddress add {v6}/128 dev eth0 nodad\nlink set eth0 up\n\
                     route add {gateway4} dev eth0\nroute add {gateway6} dev eth0\n"
                ))?;
            }
            PodLink::Bridge => {
                on.ip(&format!("link set {name} master cni0 up\n"))?;
                netns.ip(&format!(
                    "address add {v4}/24 dev eth0\naddress add {v6}/64 dev eth0 nodad\nlink set eth0 up\n"
                ))?;
            }
        }
        netns.ip(&format!("route add default via {gateway4}\nroute add default via {gateway6}\n"))?;
        wait_for_carrier(on, name)?;
        wait_for_carrier(&netns, "eth0")?;
        let addresses = [v4.parse()?, v6.parse()?];
        let servers = serve_pod(&netns, name, addresses)?;
        let node = format!("node{node}");
        self.pods.push(Pod { name: name.to_owned(), node, netns, addresses, servers });
        Ok(())
    }

    fn connect_nodes(&self) -> Result<()> {
        veth((&self.node1, "eth1"), (&self.node2, "eth0"))?;
        self.node1.ip(
            "address add 172.18.0.1/24 dev eth1\naddress add fd00:172:18::1/64 dev eth1 nodad\n\
             link set eth1 up\n\
             route add 10.244.2.0/24 via 172.18.0.2\nroute add fd00:10:244:2::/64 via fd00:172:18::2\n",
        )?;
        self.node2.ip("address add 172.18.0.2/24 dev eth0\naddress add fd00:172:18::2/64 dev eth0 nodad\n\
             link set eth0 up\n\
             route add default via 172.18.0.1\nroute add default via fd00:172:18::1\n")
    }

    /// Creates a bridge for the pods on each node.
    fn bridge_pods(&self) -> Result<()> {
        for node in [1, 2] {
            let (gateway4, gateway6) = gateways(node);
            self.node(node).ip(&format!(
                "link add cni0 type bridge\naddress add {gateway4}/24 dev cni0\n\
                 address add {gateway6}/64 dev cni0 nodad\nlink set cni0 up\n"
            ))?;
        }
        Ok(())
    }

    /// Connects the clients to the router, and the nodes to the router's bridge `lan`, where the router has the
    /// addresses 172.18.0.254 and fd00:172:18::fe.
    fn connect_lan(&self) -> Result<()> {
        let (Some(router), Some(other)) = (&self.router, &self.other_client) else { return Ok(()) };
        veth((&self.client, "eth0"), (router, "eth0"))?;
        veth((other, "eth0"), (router, "eth1"))?;
        router.ip("link add lan type bridge\naddress add 172.18.0.254/24 dev lan\n\
             address add fd00:172:18::fe/64 dev lan nodad\nlink set lan up\n\
             address add 198.51.100.1/24 dev eth0\naddress add fd00:198:51:100::1/64 dev eth0 nodad\n\
             address add 203.0.113.1/24 dev eth1\naddress add fd00:203:0:113::1/64 dev eth1 nodad\n\
             link set eth0 up\nlink set eth1 up\n")?;
        for (client, network4, network6) in
            [(&self.client, "198.51.100", "fd00:198:51:100:"), (other, "203.0.113", "fd00:203:0:113:")]
        {
            client.ip(&format!(
                "address add {network4}.2/24 dev eth0\naddress add {network6}:2/64 dev eth0 nodad\n\
                 link set eth0 up\nroute add default via {network4}.1\nroute add default via {network6}:1\n"
            ))?;
        }
        for number in [1, 2] {
            self.connect_lan_node(number)?;
            self.add_pod_routes(number, 3 - number)?;
        }
        self.route_services_to(1)
    }

    fn connect_lan_node(&self, number: u8) -> Result<()> {
        self.wire_lan_node(number, veth)
    }

    /// Replaces the veth between a node and the router by the link that `connect` creates. `connect` receives the two
    /// ends, each as namespace and device name. Only with [`ClientLink::Lan`].
    pub fn rewire_lan_node(
        &self,
        number: u8,
        connect: impl FnOnce((&Netns, &str), (&Netns, &str)) -> Result<()>,
    ) -> Result<()> {
        self.node(number).ip("link delete eth0\n")?;
        self.wire_lan_node(number, connect)?;
        self.all_nodes()
            .filter(|other| *other != number)
            .try_for_each(|other| self.add_pod_routes(number, other))
    }

    fn all_nodes(&self) -> impl Iterator<Item = u8> {
        (1..).take(2 + self.more_nodes.len())
    }

    fn wire_lan_node(
        &self,
        number: u8,
        connect: impl FnOnce((&Netns, &str), (&Netns, &str)) -> Result<()>,
    ) -> Result<()> {
        let router = self.router.as_ref().context("there is no wire that connects nodes")?;
        let (node, port) = (self.node(number), format!("node{number}"));
        connect((node, "eth0"), (router, &port))?;
        node.ip(&format!(
            "address add 172.18.0.{number}/24 dev eth0\naddress add fd00:172:18::{number}/64 dev eth0 nodad\n\
             link set eth0 up\n{}",
            default_routes()
        ))?;
        router.ip(&format!(
            "link set {port} master lan up\n\
             route replace 10.244.{number}.0/24 via 172.18.0.{number}\n\
             route replace fd00:10:244:{number}::/64 via fd00:172:18::{number}\n"
        ))
    }

    /// Adds routes on node `node` to the pods of node `other`.
    fn add_pod_routes(&self, node: u8, other: u8) -> Result<()> {
        self.node(node).ip(&format!(
            "route add 10.244.{other}.0/24 via 172.18.0.{other}\n\
             route add fd00:10:244:{other}::/64 via fd00:172:18::{other}\n"
        ))
    }

    /// Makes the router send packets to cluster IPs and [`EXTERNAL`] addresses to `node`, as a load balancer would.
    /// Only with [`ClientLink::Lan`].
    pub fn route_services_to(&self, node: u8) -> Result<()> {
        let router = self.router.as_ref().context("the clients have no router")?;
        let mut commands = String::new();
        for (networks, via) in [
            (["10.96.0.0/12", EXTERNAL[0]], format!("172.18.0.{node}")),
            (["fd00:10:96::/112", EXTERNAL[1]], format!("fd00:172:18::{node}")),
        ] {
            for network in networks {
                writeln!(commands, "route replace {network} via {via}")?;
            }
        }
        router.ip(&commands)
    }

    /// Makes the router spread packets to cluster IPs and [`EXTERNAL`] addresses over these nodes: by connection if the
    /// router's sysctl `fib_multipath_hash_policy` is 1. Only with [`ClientLink::Lan`].
    pub fn spread_services_over(&self, nodes: &[u8]) -> Result<()> {
        let router = self.router.as_ref().context("the clients have no router")?;
        let mut commands = String::new();
        for (networks, via) in [
            (["10.96.0.0/12", EXTERNAL[0]], "172.18.0."),
            (["fd00:10:96::/112", EXTERNAL[1]], "fd00:172:18::"),
        ] {
            let hops: String = nodes.iter().map(|node| format!(" nexthop via {via}{node}")).collect();
            for network in networks {
                writeln!(commands, "route replace {network}{hops}")?;
            }
        }
        router.ip(&commands)
    }

    /// Like [`Self::spread_services_over`], but with resilient nexthop groups, as routers with resilient hashing do: an
    /// added node gets only hash buckets through which no packet has gone for `idle`.
    pub fn spread_services_resiliently(&self, nodes: &[u8], idle: Duration) -> Result<()> {
        let router = self.router.as_ref().context("the clients have no router")?;
        let mut commands = String::new();
        for (group, networks, via) in [
            (40, ["10.96.0.0/12", EXTERNAL[0]], "172.18.0."),
            (60, ["fd00:10:96::/112", EXTERNAL[1]], "fd00:172:18::"),
        ] {
            for node in nodes {
                writeln!(commands, "nexthop replace id {} via {via}{node} dev lan", group + node)?;
            }
            let hops: Vec<String> = nodes.iter().map(|node| (group + node).to_string()).collect();
            let (hops, idle) = (hops.join("/"), idle.as_secs());
            writeln!(
                commands,
                "nexthop replace id {group} group {hops} type resilient buckets 256 idle_timer {idle}"
            )?;
            for network in networks {
                writeln!(commands, "route replace {network} nhid {group}")?;
            }
        }
        router.ip(&commands)
    }

    /// Sets the device `eth0` of a node up again, and restores the IPv6 address and the routes that the kernel deleted
    /// when the device went down. Only with [`ClientLink::Lan`].
    pub fn reconnect_lan_node(&self, number: u8) -> Result<()> {
        let node = self.node(number);
        node.ip(&format!(
            "link set eth0 up\naddress replace fd00:172:18::{number}/64 dev eth0 nodad\n{}",
            default_routes()
        ))?;
        let others = (1..).take(2 + self.more_nodes.len()).filter(|other| *other != number);
        others.into_iter().try_for_each(|other| self.add_pod_routes(number, other))
    }

    /// Connects the client to node1 or to its router, and sets the addresses of the link.
    fn connect_client(&mut self, link: ClientLink) -> Result<()> {
        let (client, node1) = (&self.client, &self.node1);
        let mut device = "eth0".to_owned();
        match link {
            ClientLink::Lan => return self.connect_lan(),
            ClientLink::Ethernet => veth((client, "eth0"), (node1, "eth0"))?,
            ClientLink::Routed => return self.connect_routed_client(),
            ClientLink::Vlan(id) => {
                veth((client, "eth0"), (node1, "eth0"))?;
                device = format!("eth0.{id}");
                for side in [client, node1] {
                    side.ip(&format!(
                        "link set eth0 up\nlink add link eth0 name {device} type vlan id {id}\n"
                    ))?;
                }
            }
            ClientLink::PriorityTagged => {
                // The priority tag: priority 5 in the upper bits, VLAN 0.
                self._pump = Some(pump::connect((client, "eth0"), (node1, "eth0"), Layer::Tagged(5 << 13))?);
            }
            ClientLink::Layer3 => {
                self._pump = Some(pump::connect((client, "eth0"), (node1, "eth0"), Layer::Ip)?);
            }
        }
        address_client(client, &device)?;
        node1.ip(&format!(
            "address add 198.51.100.1/24 dev {device}\naddress add fd00:198:51:100::1/64 dev {device} nodad\n\
             link set {device} up\n"
        ))
    }

    /// Connects client, router and node1 in a row. The router's address towards the client ends with .1; 203.0.113.0/24
    /// is between router and node1.
    fn connect_routed_client(&self) -> Result<()> {
        let Some(router) = &self.router else { return Ok(()) };
        veth((&self.client, "eth0"), (router, "eth0"))?;
        veth((router, "eth1"), (&self.node1, "eth0"))?;
        address_client(&self.client, "eth0")?;
        router.ip(
            "address add 198.51.100.1/24 dev eth0\naddress add fd00:198:51:100::1/64 dev eth0 nodad\n\
             address add 203.0.113.2/24 dev eth1\naddress add fd00:203:0:113::2/64 dev eth1 nodad\n\
             link set eth0 up\nlink set eth1 up\n\
             route add default via 203.0.113.1\nroute add default via fd00:203:0:113::1\n",
        )?;
        self.node1.ip(
            "address add 203.0.113.1/24 dev eth0\naddress add fd00:203:0:113::1/64 dev eth0 nodad\n\
             link set eth0 up\n\
             route add 198.51.100.0/24 via 203.0.113.2\nroute add fd00:198:51:100::/64 via fd00:203:0:113::2\n",
        )
    }
}

/// The pods' gateways on a node: IPv4, IPv6.
fn gateways(node: u8) -> (String, String) {
    (format!("10.244.{node}.1"), format!("fd00:10:244:{node}::1"))
}

/// `ip` commands that set a node's default routes, which lead to the router of the LAN.
const fn default_routes() -> &'static str {
    "route add default via 172.18.0.254\nroute add default via fd00:172:18::fe\n"
}

fn address_client(client: &Netns, device: &str) -> Result<()> {
    client.ip(&format!(
        "address add 198.51.100.2/24 dev {device}\naddress add fd00:198:51:100::2/64 dev {device} nodad\n\
         link set {device} up\n\
         route add 10.96.0.0/12 via 198.51.100.1\nroute add fd00:10:96::/112 via fd00:198:51:100::1\n\
         route add 10.244.0.0/16 via 198.51.100.1\nroute add fd00:10:244::/48 via fd00:198:51:100::1\n"
    ))
}

/// Creates a namespace without reverse path filters. Duplicate address detection and the rate limits for ICMP errors to
/// one destination are off, so that tests need not wait for them.
fn host(name: &str) -> Result<Netns> {
    let netns = Netns::create(name)?;
    netns.sysctls(&[
        ("ipv4/icmp_ratelimit", "0"),
        ("ipv6/icmp/ratelimit", "0"),
        // Also turns off the limit on errors to all destinations together: the limits apply only to types in these
        // masks, the first mask is empty, and 255 is no type of error. The token bucket of that limit is empty at
        // first, so if two errors were due at once, the kernel would send only one of them.
        ("ipv4/icmp_ratemask", "0"),
        ("ipv6/icmp/ratemask", "255"),
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
        ("ipv6/conf/all/accept_dad", "0"),
        ("ipv6/conf/default/accept_dad", "0"),
        ("ipv6/conf/default/dad_transmits", "0"),
        ("ipv6/conf/default/router_solicitations", "0"),
    ])?;
    Ok(netns)
}

/// Makes a namespace forward packets; returns it.
fn router(netns: &Netns) -> Result<Netns> {
    netns.sysctls(&[("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")])?;
    Ok(netns.clone())
}

/// Waits until the kernel has noticed the carrier of a device that is up: until then, the kernel drops what the device
/// sends. On a busy machine, this takes longer than a TCP connection waits before it sends its SYN again.
fn wait_for_carrier(netns: &Netns, device: &str) -> Result<()> {
    let is_up = || {
        let shown = netns.command("ip").args(["link", "show", "dev", device]).output().ok()?;
        String::from_utf8_lossy(&shown.stdout).contains("state UP").then_some(())
    };
    wait_for(CARRIER, is_up).with_context(|| format!("{device} in {} gets no carrier", netns.name()))
}

/// Creates a veth pair between two namespaces, with the kernel's default offloads.
pub fn veth((first, name): (&Netns, &str), (second, peer): (&Netns, &str)) -> Result<()> {
    let (first, second) = (first.name(), second.name());
    netns::ip(&format!("link add {name} netns {first} type veth peer name {peer} netns {second}\n"))
}
