//! A site whose agents can announce addresses: three nodes with two pods each, and two clients.
//!
//! ```text
//!  far ─── router ═══ lan: node1 (pod1, pod2)   node2 (pod3, pod4)   node3 (pod5, pod6)
//!          (ECMP)      │
//!                    near
//! ```
//!
//! The router spreads packets to [`FAR`] over the nodes, by static routes or by routes that it learns by BGP. If the
//! agents announce addresses, one node answers for [`NEAR`] at layer 2. The Services `far` and `near` have these
//! addresses; all pods are their endpoints until [`Site::serve_from`] selects nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

use crate::{
    agent::{Agent, Settings},
    bird::{self, NODES_AS, ROUTER_AS, Router},
    cluster::{ClientLink, Cluster, HTTP_PORT, Pod, PodLink, Wiring, veth},
    daemon::Daemon,
    manifests::{Exposure, Port, Service, Type},
    netns::Netns,
    wait_for,
};

/// Load balancer addresses that the router spreads over the nodes, IPv4 first.
pub const FAR: [&str; 2] = ["192.0.2.1", "2001:db8::1"];
/// Load balancer addresses that one node answers for at layer 2, IPv4 first. The agents rank the nodes by MetalLB's
/// hash, which gives the same order for both addresses, so both move to another node together.
pub const NEAR: [&str; 2] = ["172.18.0.100", "fd00:172:18::6f"];
/// Numbers of the nodes.
pub const NODES: [u8; 3] = [1, 2, 3];
/// Number of the node that MetalLB's hash ranks first for [`NEAR`]. Another node that announces the addresses first
/// yields once this node has been alive for 5 s.
pub const BEST: u8 = 3;
/// Number of the routing table with the routes that BIRD announces.
const TABLE: &str = "1080";
/// How long to wait for BGP sessions, and for another node to take an address over.
const SOON: Duration = Duration::from_secs(30);

/// How the machines of a site are connected.
pub const WIRING: Wiring = Wiring { link: ClientLink::Lan, pods: PodLink::PointToPoint, strict: false };

/// Agent flags that let another node continue a connection: Maglev, and direct server return.
pub const MAGLEV_AND_DSR: [&str; 6] =
    ["--scheduler", "mh", "--north-south-mode", "dsr", "--dsr-peers", "172.18.0.0/24,fd00:172:18::/64"];

/// Which addresses agents announce, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Announcement {
    /// None: the router has static routes.
    None,
    /// The addresses [`NEAR`], at layer 2.
    Layer2,
    /// The addresses [`NEAR`] at layer 2, and [`FAR`] by BGP through BIRD.
    Both,
}

/// The nodes, clients and router of a site. `agents` must stay the first field, so that agents are dropped first.
#[derive(Debug)]
pub struct Site {
    agents: BTreeMap<u8, Agent>,
    daemons: BTreeMap<u8, Daemon>,
    router: Option<Daemon>,
    /// Network namespace of the client in the nodes' network.
    pub near: Netns,
    /// The nodes, pods and router, and the client behind the router.
    pub cluster: Cluster,
    announcement: Announcement,
    arguments: Vec<String>,
    /// Numbers of the nodes whose pods are endpoints.
    serving: Vec<u8>,
}

impl Site {
    /// A site without agents: adds node3 with its pods, and the near client, to a cluster with [`WIRING`]. `near` is
    /// the name of the near client's namespace. The agents get `flags` in addition to those that a site needs.
    ///
    /// # Errors
    /// A namespace or a link cannot be created.
    pub fn new(mut cluster: Cluster, near: &str, announcement: Announcement, flags: &[&str]) -> Result<Self> {
        let node = cluster.add_node()?;
        for number in [5, 6] {
            cluster.add_pod(&format!("pod{number}"), node, number)?;
        }
        let near = Netns::create(near)?;
        let router = cluster.router.as_ref().context("the cluster has no router")?;
        veth((&near, "eth0"), (router, "near"))?;
        router.ip("link set near master lan up\n")?;
        near.ip("link set eth0 up\naddress add 172.18.0.201/24 dev eth0\naddress add fd00:172:18::c9/64 dev eth0 nodad\n")?;
        router.sysctls(&[
            ("ipv4/fib_multipath_hash_policy", "1"),
            ("ipv6/fib_multipath_hash_policy", "1"),
            // The default is 30 s. While the router considers a neighbour reachable, it sends packets to that neighbour
            // even if the neighbour is dead.
            ("ipv4/neigh/lan/base_reachable_time_ms", "5000"),
            ("ipv6/neigh/lan/base_reachable_time_ms", "5000"),
        ])?;
        let arguments = flags.iter().map(ToString::to_string).collect();
        let mut site = Self {
            agents: BTreeMap::new(),
            daemons: BTreeMap::new(),
            router: None,
            near,
            cluster,
            announcement,
            arguments,
            serving: NODES.to_vec(),
        };
        site.write_manifests()?;
        if announcement == Announcement::Both {
            site.start_router()?;
        } else {
            site.cluster.spread_services_over(&NODES)?;
        }
        Ok(site)
    }

    fn write_manifests(&self) -> Result<()> {
        let manifests = &self.cluster.manifests;
        self.write_services()?;
        if self.announcement != Announcement::None {
            manifests.write("layer2", LAYER2)?;
        }
        if self.announcement == Announcement::Both {
            let peers = format!(
                "{BGP}---\n{}---\n{}",
                peer("router", "172.18.0.254"),
                peer("router6", "fd00:172:18::fe")
            );
            manifests.write("bgp", &peers)?;
        }
        Ok(())
    }

    fn write_services(&self) -> Result<()> {
        let manifests = &self.cluster.manifests;
        manifests.put(&self.far())?;
        Ok(manifests.put(&self.service("near", NEAR, 2))?)
    }

    /// Makes the pods of these nodes the endpoints of both Services, and waits until each running agent serves them.
    ///
    /// # Errors
    /// A file cannot be written, or an agent does not follow in time.
    pub fn serve_from(&mut self, nodes: &[u8]) -> Result<()> {
        self.serving = nodes.to_vec();
        self.write_services()?;
        self.wait_for_services()
    }

    fn serves(&self, pod: &Pod) -> bool {
        self.node_of(&pod.name).is_some_and(|node| self.serving.contains(&node))
    }

    /// The Service that has the addresses [`FAR`].
    pub fn far(&self) -> Service {
        self.service("far", FAR, 1)
    }

    fn service(&self, name: &str, vips: [&str; 2], number: u8) -> Service {
        let parsed = |text: &str| -> Option<IpAddr> { text.parse().ok() };
        let mut exposure =
            Exposure { kind: Type::LoadBalancer, without_node_ports: true, ..Exposure::default() };
        let mut annotations = Vec::new();
        if self.announcement == Announcement::None {
            exposure.load_balancer_ips = vips.iter().filter_map(|vip| parsed(vip)).collect();
        } else {
            annotations.push(("metallb.io/loadBalancerIPs", vips.join(",")));
        }
        let cluster_ips = [format!("10.96.0.{number}"), format!("fd00:10:96::{number}")];
        Service {
            name: name.to_owned(),
            annotations,
            cluster_ips: cluster_ips.iter().filter_map(|ip| parsed(ip)).collect(),
            ports: vec![Port {
                name: "http",
                protocol: "TCP",
                port: 80,
                target_port: HTTP_PORT,
                node_port: None,
            }],
            endpoints: self.cluster.pods.iter().filter(|pod| self.serves(pod)).map(Pod::endpoint).collect(),
            exposure,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.cluster.folder().join(name)
    }

    /// Starts the agents of these nodes, and BIRD beside them if they announce by BGP. Waits until the agents are
    /// healthy.
    ///
    /// # Errors
    /// An agent does not become healthy, or BIRD cannot be started.
    pub fn start(&mut self, nodes: &[u8]) -> Result<()> {
        for node in nodes {
            let agent = Agent::spawn(self.cluster.node(*node), self.settings(*node)?)?;
            self.agents.insert(*node, agent);
        }
        for node in nodes {
            self.agent(*node)?.wait_until_healthy()?;
            if self.announcement == Announcement::Both {
                let file = self.path(&format!("bird{node}.conf"));
                wait_for(SOON, || file.exists().then_some(()))
                    .context("the agent writes no configuration of BIRD")?;
                let bird =
                    bird::start(self.cluster.node(*node), self.cluster.folder(), &format!("bird{node}"))?;
                self.daemons.insert(*node, bird);
            }
        }
        Ok(())
    }

    fn settings(&self, node: u8) -> Result<Settings> {
        let mut settings = self.cluster.agent_settings(node);
        let mut add = |flags: &[&str]| settings.arguments.extend(flags.iter().map(ToString::to_string));
        add(&["--cluster-cidr", "10.244.0.0/16,fd00:10:244::/48"]);
        add(&self.arguments.iter().map(String::as_str).collect::<Vec<_>>());
        if self.announcement != Announcement::None {
            let key = self.path("key");
            fs::write(&key, "a key of more than sixteen bytes\n")?;
            let members = NODES.map(|node| format!("node{node}=172.18.0.{node}:7947")).join(",");
            add(&["--announce-member", &members, "--announce-key-file", &key.display().to_string()]);
        }
        if self.announcement == Announcement::Both {
            let path = |end: &str| self.path(&format!("bird{node}.{end}")).display().to_string();
            add(&["--announce-table", TABLE, "--bird-config", &path("conf"), "--bird-socket", &path("ctl")]);
        }
        Ok(settings)
    }

    fn start_router(&mut self) -> Result<()> {
        let netns = self.cluster.router.as_ref().context("the cluster has no router")?;
        netns.ip("route del 192.0.2.0/24\nroute del 2001:db8::/64\n")?;
        let router = Router {
            addresses: ["172.18.0.254", "fd00:172:18::fe"],
            networks: ["172.18.0.", "fd00:172:18::"],
            nodes: NODES.len(),
            port: 179,
            password: None,
            bfd: true,
        };
        fs::write(self.path("router.conf"), router.config())?;
        self.router = Some(bird::start(netns, self.cluster.folder(), "router")?);
        Ok(())
    }

    /// The agent of a node.
    ///
    /// # Errors
    /// No agent runs on the node.
    pub fn agent(&self, node: u8) -> Result<&Agent> {
        self.agents.get(&node).with_context(|| format!("no agent runs on node{node}"))
    }

    /// Numbers of the nodes on which an agent runs.
    pub fn live(&self) -> Vec<u8> {
        self.agents.keys().copied().collect()
    }

    /// Removes the agent of a node from the site, so that the caller can end it.
    pub fn take_agent(&mut self, node: u8) -> Option<Agent> {
        self.agents.remove(&node)
    }

    /// Simulates a crash of a node: sets its link down, and kills its agent and BIRD with SIGKILL. Its pods keep
    /// running, but no packet from another machine reaches them.
    ///
    /// # Errors
    /// `ip` fails, or the agent cannot be killed.
    pub fn kill(&mut self, node: u8) -> Result<()> {
        self.cluster.node(node).ip("link set eth0 down\n")?;
        if let Some(agent) = self.agents.remove(&node) {
            agent.kill()?;
        }
        self.daemons.remove(&node);
        Ok(())
    }

    /// Sets the link of a killed node up again, restores its routes, and starts its agent.
    ///
    /// # Errors
    /// `ip` fails, or the agent does not become healthy.
    pub fn revive(&mut self, node: u8) -> Result<()> {
        self.cluster.reconnect_lan_node(node)?;
        self.start(&[node])
    }

    /// The parsed output of an `lb-agent` command, run with `-o json` for the agent of a node.
    ///
    /// # Errors
    /// The command fails, or prints no JSON.
    pub fn json(&self, node: u8, arguments: &[&str]) -> Result<Value> {
        self.agent(node)?.json(arguments)
    }

    /// The node that announces both addresses of [`NEAR`]; `None` while no node does.
    ///
    /// # Errors
    /// `announce list` fails.
    pub fn announcer(&self) -> Result<Option<u8>> {
        for node in self.live() {
            let list = self.json(node, &["announce", "list"])?;
            let entries = || list.as_array().into_iter().flatten();
            let is_here =
                |vip: &&str| entries().any(|entry| entry["address"] == *vip && entry["here"] == true);
            if NEAR.iter().all(is_here) {
                return Ok(Some(node));
            }
        }
        Ok(None)
    }

    /// Waits until a node for which `accept` returns `true` announces [`NEAR`]; returns its number.
    ///
    /// # Errors
    /// No such node announces both addresses in time.
    pub fn wait_for_announcer(&self, accept: impl Fn(u8) -> bool) -> Result<u8> {
        let announcer = || self.announcer().ok().flatten().filter(|node| accept(*node));
        wait_for(SOON, announcer).context("no node announces the address")
    }

    /// The routes of the router to an address of [`FAR`], as `ip route` prints them.
    fn routes(&self, family: &str, address: &str) -> Result<String> {
        let router = self.cluster.router.as_ref().context("the cluster has no router")?;
        let output = router.command("ip").args([family, "route", "show", "to", "match", address]).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The nodes to which the router forwards packets for the IPv4 address of [`FAR`].
    ///
    /// # Errors
    /// `ip` fails.
    pub fn next_hops(&self) -> Result<Vec<u8>> {
        let text = self.routes("-4", FAR[0])?;
        let is_hop = |node: &u8| text.contains(&format!("via 172.18.0.{node} "));
        Ok(NODES.into_iter().filter(is_hop).collect())
    }

    /// Whether the router forwards packets to exactly these nodes, for both addresses of [`FAR`]. (Next hops of IPv6
    /// are link-local addresses, so only their number is compared.)
    ///
    /// # Errors
    /// `ip` fails.
    pub fn has_hops(&self, nodes: &[u8]) -> Result<bool> {
        let hops = self.routes("-6", FAR[1])?.matches("via ").count();
        Ok(self.next_hops()? == nodes && hops == nodes.len())
    }

    /// Waits until the router forwards packets to exactly these nodes, see [`Self::has_hops`].
    ///
    /// # Errors
    /// The router does not do so in time.
    pub fn wait_for_hops(&self, nodes: &[u8]) -> Result<()> {
        let reached = || self.has_hops(nodes).is_ok_and(|it| it).then_some(());
        if wait_for(SOON, reached).is_none() {
            let (v4, v6) = (self.routes("-4", FAR[0])?, self.routes("-6", FAR[1])?);
            bail!("the router does not forward to {nodes:?}, but has the routes\n{v4}{v6}");
        }
        Ok(())
    }

    /// Waits until each running agent serves both Services with exactly the pods that are their endpoints now.
    ///
    /// # Errors
    /// An agent does not do so in time.
    pub fn wait_for_services(&self) -> Result<()> {
        for node in self.live() {
            for service in ["near", "far"] {
                let agent = self.agent(node)?;
                let shown = || {
                    let output = agent.ask(&["service", "show", service]).ok()?;
                    let text = String::from_utf8_lossy(&output.stdout).into_owned();
                    let as_wanted = |pod: &Pod| text.contains(&pod.name) == self.serves(pod);
                    self.cluster.pods.iter().all(as_wanted).then_some(())
                };
                wait_for(SOON, shown).with_context(|| format!("node{node} does not serve {service}"))?;
            }
        }
        Ok(())
    }

    /// Number of the node that runs the pod with this name.
    pub fn node_of(&self, pod: &str) -> Option<u8> {
        self.cluster.pod(pod)?.node.strip_prefix("node")?.parse().ok()
    }

    /// For each client connection that a node forwards through a tunnel: the client's address and port, and the number
    /// of that node. Connections whose pod is on the node that receives them from the router are not included.
    ///
    /// # Errors
    /// `conntrack list` fails.
    pub fn forwarders(&self) -> Result<BTreeMap<SocketAddr, u8>> {
        let mut forwarders = BTreeMap::new();
        for node in self.live() {
            let list = self.json(node, &["conntrack", "list"])?;
            for flow in list.as_array().into_iter().flatten().filter(|flow| flow["tunnelled"] == true) {
                if let Some(client) = flow["client"].as_str().and_then(|text| text.parse().ok()) {
                    forwarders.insert(client, node);
                }
            }
        }
        Ok(forwarders)
    }
}

impl Site {
    /// For each client connection to [`FAR`]: the addresses and ports of the pods to which nodes forward it.
    ///
    /// # Errors
    /// `conntrack list` fails.
    pub fn backends(&self) -> Result<BTreeMap<SocketAddr, BTreeSet<String>>> {
        let mut backends: BTreeMap<SocketAddr, BTreeSet<String>> = BTreeMap::new();
        let is_far = |text: &str| {
            text.parse::<SocketAddr>().is_ok_and(|vip| FAR.contains(&vip.ip().to_string().as_str()))
        };
        for node in self.live() {
            let list = self.json(node, &["conntrack", "list"])?;
            for flow in list.as_array().into_iter().flatten() {
                let text = |field: &str| flow[field].as_str().unwrap_or_default();
                if let (true, Ok(client)) = (is_far(text("vip")), text("client").parse()) {
                    backends.entry(client).or_default().insert(text("backend").to_owned());
                }
            }
        }
        Ok(backends)
    }
}

const LAYER2: &str = "
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: near, namespace: metallb-system}
spec: {addresses: [172.18.0.96/28, 'fd00:172:18::60/124']}
---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: far, namespace: metallb-system}
spec: {addresses: [192.0.2.0/28, '2001:db8::/124']}
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata: {name: near, namespace: metallb-system}
spec: {ipAddressPools: [near]}
";

const BGP: &str = "
apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata: {name: far, namespace: metallb-system}
spec: {ipAddressPools: [far]}
---
apiVersion: metallb.io/v1beta1
kind: BFDProfile
metadata: {name: fast, namespace: metallb-system}
spec: {receiveInterval: 100, transmitInterval: 100, detectMultiplier: 3}
";

fn peer(name: &str, address: &str) -> String {
    format!(
        "apiVersion: metallb.io/v1beta2\nkind: BGPPeer\nmetadata: {{name: {name}, namespace: metallb-system}}\n\
         spec: {{myASN: {NODES_AS}, peerASN: {ROUTER_AS}, peerAddress: '{address}', bfdProfile: fast}}\n"
    )
}
