//! Nodes with a BGP daemon each, a router that spreads connections over them, and a client behind the router.

use std::{
    collections::BTreeSet,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use lb_tests::{
    agent::{self, Agent, Settings},
    bird::{self, Router},
    cleanup::{self, Cleanup, Resource},
    client::ask_http,
    daemon::Daemon,
    http,
    lan::{self, Web},
    manifests::Manifests,
    netns::{self, Netns},
    patience,
    server::Server,
    snmp, wait_for,
};
use serde_json::Value;

pub(super) const VIP: &str = "203.0.113.1";
pub(super) const VIP6: &str = "2001:db8:100::1";
/// How long to wait until a session is established, or until a change of routes has arrived.
pub(super) const SOON: Duration = Duration::from_secs(15);
/// Time without heartbeats after which a fence (`lb-agent announce fence`) removes the routes of its agent.
pub(super) fn lifetime() -> Duration {
    Duration::from_secs(5) * patience()
}

/// Manifests that say what the nodes announce by BGP, and to whom.
pub(super) const OBJECTS: &str = "
apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata: {name: hosts, namespace: metallb-system}
spec: {communities: [gold, 'large:64500:1:2'], localPref: 200}
---
apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata: {name: aggregate, namespace: metallb-system}
spec: {aggregationLength: 28, aggregationLengthV6: 124, communities: ['64500:28']}
---
apiVersion: metallb.io/v1beta1
kind: Community
metadata: {name: names, namespace: metallb-system}
spec: {communities: [{name: gold, value: '64500:100'}]}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: router, namespace: metallb-system}
spec: {myASN: 64500, peerASN: 64501, peerAddress: 10.9.0.254, peerPort: 1790, password: secret}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: router6, namespace: metallb-system}
spec: {myASN: 64500, peerASN: 64501, peerAddress: 'fd00:9::fe', peerPort: 1790, holdTime: 9s}
";

const FAST: &str = "---
apiVersion: metallb.io/v1beta1
kind: BFDProfile
metadata: {name: fast, namespace: metallb-system}
spec: {receiveInterval: 100, transmitInterval: 100, detectMultiplier: 3}
";

/// The manifests [`OBJECTS`], with BFD for all sessions.
fn objects_with_bfd() -> String {
    OBJECTS.replace("peerPort: 1790", "peerPort: 1790, bfdProfile: fast") + FAST
}

/// A running `ip monitor route`, which prints changes of routes in a namespace.
pub(super) struct Monitor {
    _daemon: Daemon,
    file: PathBuf,
}

impl Monitor {
    /// The output of `ip monitor route` so far.
    pub(super) fn text(&self) -> String {
        fs::read_to_string(&self.file).unwrap()
    }
}

/// The nodes (numbered from 1), the router and the client. Agents are dropped first.
pub(super) struct Bed {
    pub(super) agents: Vec<Option<Agent>>,
    pub(super) daemons: Vec<Daemon>,
    _servers: Vec<Server>,
    pub(super) nodes: Vec<Netns>,
    pub(super) router: Netns,
    client: Netns,
    pub(super) folders: Vec<Manifests>,
    pub(super) dir: PathBuf,
    pub(super) table: u32,
    /// Time without heartbeats after which a fence removes the routes of its agent.
    lifetime: Duration,
    bfd: bool,
    _cleanup: Cleanup,
}

impl Bed {
    /// Creates nodes with agents that write routes to `table`, and a router that runs BIRD.
    pub(super) fn new(count: usize, table: u32) -> Self {
        Self::prepare(count, table, false).with_router_and_agents()
    }

    /// Like [`Self::new`], but with BFD for all sessions. On a busy machine BFD ends sessions although all nodes are
    /// alive.
    pub(super) fn with_bfd(count: usize, table: u32) -> Self {
        Self::prepare(count, table, true).with_router_and_agents()
    }

    /// Like [`Self::new`], but the fences remove the routes after `lifetime` without heartbeats.
    pub(super) fn with_lifetime(count: usize, table: u32, lifetime: Duration) -> Self {
        Self { lifetime, ..Self::prepare(count, table, false) }.with_router_and_agents()
    }

    /// Like [`Self::new`], with one node that has no IPv4 address.
    pub(super) fn without_ipv4(table: u32) -> Self {
        let bed = Self::prepare(1, table, false);
        bed.nodes[0].ip("address del 10.9.0.1/24 dev eth0\n").unwrap();
        bed.with_router_and_agents()
    }

    fn prepare(count: usize, table: u32, bfd: bool) -> Self {
        cleanup::on_interrupt();
        cleanup::remove_stale().unwrap();
        let prefix = netns::unique_prefix();
        let create = |name: &str| Netns::create(&format!("{prefix}-{name}")).unwrap();
        let (router, client) = (create("r"), create("c"));
        let nodes: Vec<Netns> = (1..=count).map(|number| create(&format!("n{number}"))).collect();
        connect(&router, &nodes, &client);
        let servers = lan::serve(&nodes).unwrap();
        let dir = std::env::temp_dir().join(&prefix);
        let cleanup = Cleanup::of(Resource::Folder(dir.clone()));
        let folder = |number| Manifests::create(dir.join(format!("manifests-{number}"))).unwrap();
        let folders: Vec<Manifests> = (1..=count).map(folder).collect();
        let bed = Self {
            agents: Vec::new(),
            daemons: Vec::new(),
            _servers: servers,
            nodes,
            router,
            client,
            folders,
            dir,
            table,
            lifetime: lifetime(),
            bfd,
            _cleanup: cleanup,
        };
        (1..=count).for_each(|number| bed.serve(number, "Cluster", number));
        bed
    }

    fn with_router_and_agents(mut self) -> Self {
        fs::write(self.path("router.conf"), router_config(self.nodes.len(), self.bfd)).unwrap();
        let objects = if self.bfd { objects_with_bfd() } else { OBJECTS.to_owned() };
        let daemon = self.bird(&self.router, "router");
        self.daemons.push(daemon);
        for number in 1..=self.nodes.len() {
            // The fence starts first; otherwise the agent would report that no fence runs.
            let fence = self.fence(number);
            self.daemons.push(fence);
            self.folders[number - 1].write("bgp", &objects).unwrap();
            let agent = Agent::start(&self.nodes[number - 1], self.settings(number)).unwrap();
            self.agents.push(Some(agent));
        }
        self
    }

    /// Starts BIRD on each node, once the node's agent has written BIRD's configuration.
    pub(super) fn start_birds(&mut self) {
        for number in 1..=self.nodes.len() {
            let file = self.path(&format!("bird-{number}.conf"));
            wait_for(SOON, || file.exists().then_some(()))
                .expect("the agent must write BIRD's configuration");
            let daemon = self.bird(&self.nodes[number - 1], &format!("bird-{number}"));
            self.daemons.push(daemon);
        }
    }

    fn bird(&self, netns: &Netns, name: &str) -> Daemon {
        bird::start(netns, &self.dir, name).unwrap()
    }

    /// Starts FRR on a node; returns the folder of FRR's sockets.
    pub(super) fn start_frr(&mut self, number: usize) -> PathBuf {
        let dir = self.path("frr");
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("zebra.conf"), format!("ip import-table {}\n", self.table)).unwrap();
        fs::write(dir.join("bgpd.conf"), frr_config(self.table)).unwrap();
        // FRR's daemons run as the user `frr`, and read and write files in this folder.
        agent::run(Command::new("chown").args(["-R", "frr:frr"]).arg(&dir)).unwrap();
        for daemon in ["zebra", "bgpd"] {
            let path = |end: &str| dir.join(format!("{daemon}.{end}"));
            let mut command = self.nodes[number - 1].command(Path::new("/usr/lib/frr").join(daemon));
            command.args(["-u", "frr", "-g", "frr", "-A", "127.0.0.1", "-P", "0", "--vty_socket"]).arg(&dir);
            command
                .arg("-f")
                .arg(path("conf"))
                .arg("-i")
                .arg(path("pid"))
                .arg("-z")
                .arg(dir.join("zserv.api"));
            let log = self.path(&format!("{daemon}.log"));
            self.daemons.push(Daemon::start_with_log(&mut command, &log).unwrap());
            // Waits until zebra listens, because bgpd then reads the routes of the table from zebra.
            wait_for(SOON, || dir.join("zserv.api").exists().then_some(())).expect("zebra must listen");
        }
        dir
    }

    fn fence(&self, number: usize) -> Daemon {
        let mut command = self.nodes[number - 1].command(agent::binary());
        let table = self.table.to_string();
        command.args([
            "announce",
            "fence",
            "--announce-table",
            &table,
            "--lifetime",
            &self.lifetime.as_secs().to_string(),
        ]);
        Daemon::start_with_log(&mut command, &self.path(&format!("fence-{number}.log"))).unwrap()
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub(super) fn settings(&self, number: usize) -> Settings {
        let text = |name: &str| self.path(&format!("{name}-{number}")).display().to_string();
        let arguments = [
            "--socket-lb=off".to_owned(),
            "--wire-device=eth0".to_owned(),
            format!("--announce-table={}", self.table),
            format!("--bird-config={}.conf", text("bird")),
            format!("--bird-socket={}.ctl", text("bird")),
        ];
        Settings {
            node_name: format!("n{number}"),
            manifests: self.folders[number - 1].folder().to_owned(),
            bpffs: self.path(&format!("bpffs-{number}")),
            cgroup: None,
            log: self.path(&format!("log-{number}")),
            arguments: arguments.to_vec(),
            binary: None,
        }
    }

    /// Writes the manifest of the Service on a node, with this traffic policy, and an endpoint on node `on`.
    pub(super) fn serve(&self, number: usize, policy: &str, on: usize) {
        let web = Web {
            pool: ["203.0.113.0/28", "2001:db8:100::/124"],
            vips: [VIP, VIP6],
            policy,
            endpoint: [&format!("10.9.0.{on}"), &format!("fd00:9::{on:x}")],
            node: on,
        };
        self.folders[number - 1].write("web", &web.yaml()).unwrap();
    }

    /// Numbers of the nodes that are next hops of the router's routes to exactly this address or prefix.
    pub(super) fn next_hops(&self, destination: &str) -> BTreeSet<usize> {
        let family = if destination.contains(':') { "-6" } else { "-4" };
        let arguments = ["-j", family, "route", "show", destination];
        let output = self.router.command("ip").args(arguments).output().unwrap();
        let routes: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let hops = routes.iter().flat_map(|route| {
            let several = route["nexthops"].as_array().cloned().unwrap_or_default();
            several
                .into_iter()
                .chain([route.clone()])
                .filter_map(|hop| Some(hop["gateway"].as_str()?.to_owned()))
        });
        hops.filter_map(|gateway| self.number_of(&gateway)).collect()
    }

    /// Number of the node with this address, which may be a link-local one: BGP also sends the link-local address of a
    /// node as the next hop of IPv6 routes.
    fn number_of(&self, gateway: &str) -> Option<usize> {
        (1..=self.nodes.len()).find(|number| {
            [format!("10.9.0.{number}"), format!("fd00:9::{number:x}"), format!("fe80::{number:x}")]
                .contains(&gateway.to_owned())
        })
    }

    /// Waits until the router forwards packets for both VIPs to exactly these nodes.
    pub(super) fn wait_for_hops(&self, limit: Duration, nodes: &[usize]) {
        let wanted: BTreeSet<usize> = nodes.iter().copied().collect();
        let reached = || [VIP, VIP6].iter().all(|vip| self.next_hops(vip) == wanted).then_some(());
        let hops = || (self.next_hops(VIP), self.next_hops(VIP6));
        assert!(wait_for(limit, reached).is_some(), "{:?} instead of {nodes:?}\n{}", hops(), self.logs());
    }

    pub(super) fn logs(&self) -> String {
        let log = |name: String| fs::read_to_string(self.path(&name)).unwrap_or_default();
        let of_node =
            |number: usize| format!("{}{}", log(format!("log-{number}")), log(format!("bird-{number}.log")));
        (1..=self.nodes.len()).map(of_node).collect::<String>() + &log("router.log".to_owned())
    }

    /// Runs a command of `birdc` on the router or on a node; returns the answer.
    pub(super) fn birdc(&self, name: &str, command: &[&str]) -> String {
        let socket = self.path(&format!("{name}.ctl"));
        let output = Command::new("birdc").arg("-r").arg("-s").arg(socket).args(command).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    /// Both ends of the TCP connection of the IPv4 BGP session between the router and a node. A session that was reset
    /// has another connection. (BIRD shows since when a session has been up, but computes that time again for each
    /// answer, and may be a millisecond off.)
    pub(super) fn session(&self, number: usize) -> String {
        let node = format!("10.9.0.{number}");
        let mut command = self.router.command("ss");
        command.args(["-H", "-n", "-t", "state", "established", "dst", &node]);
        let output = agent::run(&mut command).unwrap();
        let sockets = String::from_utf8(output.stdout).unwrap();
        // Columns: received and unsent bytes, the local and the remote end.
        let ends = sockets.lines().map(|line| line.split_whitespace().skip(2).collect::<Vec<_>>().join(" "));
        let ends: Vec<String> = ends.collect();
        assert_eq!(ends.len(), 1, "one session with {node}: {sockets}");
        ends.concat()
    }

    /// Name of the server that answers the client at the VIP; the text of the error if none answers.
    pub(super) fn ask(&self, vip: &str) -> String {
        let to = SocketAddr::new(vip.parse().unwrap(), 80);
        ask_http(&self.client, to).map_or_else(|error| error.to_string(), |answer| answer.server)
    }

    pub(super) fn curl(&self, vip: &str) -> String {
        let arguments = ["-s", "-m", "5", &format!("http://{vip}/")];
        let output = self.client.command("curl").args(arguments).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    /// The routes in the table that the agent of a node writes, as `ip route` prints them.
    pub(super) fn table(&self, number: usize) -> String {
        let show = |family: &str| {
            let mut command = self.nodes[number - 1].command("ip");
            let output =
                command.args([family, "route", "show", "table", &self.table.to_string()]).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        show("-4") + &show("-6")
    }

    /// Stops the agent of a node by SIGTERM, and starts another one.
    pub(super) fn restart(&mut self, number: usize) {
        self.agents[number - 1].take().unwrap().terminate().unwrap();
        let agent = Agent::start(&self.nodes[number - 1], self.settings(number)).unwrap();
        self.agents[number - 1] = Some(agent);
    }

    /// Starts `ip monitor route` on a node; returns once it listens.
    pub(super) fn monitor(&self, number: usize) -> Monitor {
        let file = self.path(&format!("monitor-{number}"));
        let mut command = self.nodes[number - 1].command("ip");
        let daemon = Daemon::start_with_log(command.args(["monitor", "route"]), &file).unwrap();
        let monitor = Monitor { _daemon: daemon, file };
        // Causes a change, to see when the monitor listens.
        let node = &self.nodes[number - 1];
        let shows = || {
            node.ip("route replace blackhole 198.18.0.1\nroute del blackhole 198.18.0.1\n").unwrap();
            monitor.text().contains("198.18.0.1").then_some(())
        };
        wait_for(SOON, shows).expect("`ip monitor` must listen");
        monitor
    }

    /// Number of packets, of the family of `vip`, that the router has forwarded.
    pub(super) fn forwarded(&self, vip: &str) -> u64 {
        let is_ipv6 = vip.contains(':');
        let field = if is_ipv6 { "OutForwDatagrams" } else { "ForwDatagrams" };
        snmp::counter(&self.router, is_ipv6, "Ip", field).unwrap()
    }

    /// Sends datagrams from the client to a port of the VIP.
    pub(super) fn send(&self, vip: &str, port: u16, count: usize) {
        let to = SocketAddr::new(vip.parse().unwrap(), port);
        let unspecified = if vip.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
        self.client
            .run(|| {
                let socket = std::net::UdpSocket::bind(unspecified)?;
                (0..count).try_for_each(|_| socket.send_to(b"anyone?", to).map(drop))
            })
            .unwrap();
    }

    pub(super) fn agent(&self, number: usize) -> &Agent {
        self.agents[number - 1].as_ref().unwrap()
    }

    /// The page `/metrics` of the agent of a node.
    pub(super) fn metrics(&self, number: usize) -> String {
        let address = SocketAddr::from(([127, 0, 0, 1], 10_249));
        http::get(&self.nodes[number - 1], address, "/metrics").unwrap().body
    }

    pub(super) fn problems(&self, number: usize) -> Vec<String> {
        let status = self.agent(number).json(&["status"]).unwrap();
        let problems = status["agent"]["problems"].as_array().cloned().unwrap_or_default();
        problems.iter().map(|problem| problem.as_str().unwrap().to_owned()).collect()
    }
}

/// Connects nodes and router by a bridge of the router, and the client to the router.
fn connect(router: &Netns, nodes: &[Netns], client: &Netns) {
    router
        .sysctls(&[
            ("ipv4/ip_forward", "1"),
            ("ipv6/conf/all/forwarding", "1"),
            ("ipv4/fib_multipath_hash_policy", "1"),
            ("ipv6/fib_multipath_hash_policy", "1"),
        ])
        .unwrap();
    let (router_name, client_name) = (router.name(), client.name());
    netns::ip(&format!("link add eth1 netns {router_name} type veth peer name eth0 netns {client_name}\n"))
        .unwrap();
    router
        .ip("link add br0 type bridge mcast_snooping 0\nlink set br0 up\naddress add 10.9.0.254/24 dev br0\n\
             address add fd00:9::fe/64 dev br0 nodad\nlink set eth1 up\naddress add 198.51.100.1/24 dev eth1\n\
             address add fd00:c::1/64 dev eth1 nodad\n")
        .unwrap();
    client
        .ip("link set eth0 up\naddress add 198.51.100.2/24 dev eth0\naddress add fd00:c::2/64 dev eth0 nodad\n\
             route add default via 198.51.100.1\nroute add default via fd00:c::1\n")
        .unwrap();
    for (index, node) in nodes.iter().enumerate() {
        let (number, name) = (index + 1, node.name());
        netns::ip(&format!("link add p{number} netns {router_name} type veth peer name eth0 netns {name}\n"))
            .unwrap();
        router.ip(&format!("link set p{number} master br0 up\n")).unwrap();
        node.ip(&format!(
            "link set eth0 addrgenmode none\nlink set eth0 up\naddress add 10.9.0.{number}/24 dev eth0\n\
             address add fd00:9::{number:x}/64 dev eth0 nodad\naddress add fe80::{number:x}/64 dev eth0 nodad\n\
             route add default via 10.9.0.254\nroute add default via fd00:9::fe\n"
        ))
        .unwrap();
    }
}

/// BIRD's configuration for the router.
fn router_config(nodes: usize, bfd: bool) -> String {
    let router = Router {
        addresses: ["10.9.0.254", "fd00:9::fe"],
        networks: ["10.9.0.", "fd00:9::"],
        nodes,
        port: 1790,
        password: Some("secret"),
        bfd,
    };
    router.config()
}

/// FRR's configuration for a node. It sets communities in the route map towards the router, not where FRR imports
/// routes from the table.
fn frr_config(table: u32) -> String {
    format!(
        "router bgp 64500\n bgp router-id 10.9.0.1\n no bgp ebgp-requires-policy\n neighbor 10.9.0.254 remote-as 64501\n \
         neighbor 10.9.0.254 port 1790\n neighbor 10.9.0.254 password secret\n neighbor 10.9.0.254 timers connect 1\n \
         address-family ipv4 unicast\n  redistribute table {table}\n  neighbor 10.9.0.254 route-map out out\n \
         exit-address-family\n!\nroute-map out permit 10\n set community 64500:100\n"
    )
}

/// Runs a command of `vtysh`; returns FRR's answer.
pub(super) fn vtysh(dir: &Path, command: &str) -> String {
    let output = Command::new("vtysh").arg("--vty_socket").arg(dir).args(["-c", command]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}
