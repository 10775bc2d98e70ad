//! Tests of announcements at layer 2: nodes and clients on one bridge, without a router. Each node runs its own server
//! at the addresses, so an answer shows which node a client has reached.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    net::{IpAddr, SocketAddr, TcpStream},
    ops::ControlFlow,
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use lb_common::LAYOUT_VERSION;
use lb_tests::{
    StopOnDrop,
    agent::{self, Agent, Settings},
    cleanup::{self, Cleanup, Resource},
    client::{Connection, ask_http, ask_until},
    guest, http,
    lan::{self, Lan, Web, mac},
    manifests::Manifests,
    netns::{self, Netns},
    one_of_three, patience,
    pump::{self, Layer},
    server::Server,
    skip,
    sniffer::{Claim, Form, Sniffer, Turn, turns},
    stopwatch::Stopwatch,
    wait_for,
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// The addresses of the Service. MetalLB's hash ranks three nodes in the same order for both: n3, n2, n1.
const VIP: &str = "192.0.2.100";
const VIP6: &str = "2001:db8::6d";
/// The number of the node that MetalLB's hash ranks first of three nodes.
const BEST: usize = 3;
const ADVERTISEMENT: &str = "{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: all, namespace: metallb-system}}\n";
/// How long to wait for an announcement or a takeover. This time also suffices if an agent waits for a CPU longer than
/// its node's right to announce lasts: another node then takes over, and gives the addresses back only after it has
/// heard the first node for 5 s in a row. Tests that limit the time of a takeover measure it themselves.
const SOON: Duration = Duration::from_secs(30);

/// Nodes and clients on one bridge. Agents are dropped first.
struct Segment {
    agents: Vec<Option<Agent>>,
    _servers: Vec<Server>,
    nodes: Vec<Netns>,
    clients: [Netns; 2],
    lan: Lan,
    folders: Vec<Manifests>,
    dir: PathBuf,
    _cleanup: Cleanup,
}

impl Segment {
    /// Creates `count` nodes, each with the device `eth0` on the bridge.
    fn new(count: usize) -> Self {
        cleanup::on_interrupt();
        cleanup::remove_stale().unwrap();
        let prefix = netns::unique_prefix();
        let create = |name: &str| Netns::create(&format!("{prefix}-{name}")).unwrap();
        let lan = Lan::new(create("lan")).unwrap();
        let attach = |netns: &Netns, number: usize, port: usize| {
            let addresses = [format!("192.0.2.{number}/24"), format!("2001:db8::{number:x}/64")];
            lan.attach(netns, port, &addresses).unwrap();
        };
        let nodes: Vec<Netns> = (1..=count).map(|number| create(&format!("n{number}"))).collect();
        nodes.iter().enumerate().for_each(|(index, node)| attach(node, index + 1, index + 1));
        let clients = [create("c1"), create("c2")];
        clients.iter().enumerate().for_each(|(index, client)| attach(client, 201 + index, 101 + index));
        let servers = lan::serve(&nodes).unwrap();
        let dir = std::env::temp_dir().join(&prefix);
        let cleanup = Cleanup::of(Resource::Folder(dir.clone()));
        let folder = |number| Manifests::create(dir.join(format!("manifests-{number}"))).unwrap();
        let folders = (1..=count).map(folder).collect();
        Self { agents: Vec::new(), _servers: servers, nodes, clients, lan, folders, dir, _cleanup: cleanup }
    }

    /// Writes the manifests of a pool and a Service with the addresses, and starts an agent on each node.
    fn start(&mut self, arguments: &[&str]) {
        for number in 1..=self.nodes.len() {
            self.folders[number - 1].write("web", &manifests(number)).unwrap();
            let agent = Agent::start(&self.nodes[number - 1], self.settings(number, arguments)).unwrap();
            self.agents.push(Some(agent));
        }
    }

    fn settings(&self, number: usize, arguments: &[&str]) -> Settings {
        let path = |name: &str| -> PathBuf { self.dir.join(format!("{name}-{number}")) };
        let fixed = ["--socket-lb", "off", "--wire-device", "eth0*"];
        Settings {
            node_name: format!("n{number}"),
            manifests: self.folders[number - 1].folder().to_owned(),
            bpffs: path("bpffs"),
            cgroup: None,
            log: path("log"),
            arguments: fixed.iter().chain(arguments).map(ToString::to_string).collect(),
            binary: None,
        }
    }

    /// The flags that make the agents agree on which node answers for each address.
    fn members(&self) -> Vec<String> {
        let key = self.dir.join("key");
        fs::write(&key, "a key of more than sixteen bytes\n").unwrap();
        let member = |number| format!("n{number}=192.0.2.{number}:7947");
        let all: Vec<String> = (1..=self.nodes.len()).map(member).collect();
        vec![format!("--announce-member={}", all.join(",")), format!("--announce-key-file={}", key.display())]
    }

    fn advertise(&self) {
        self.folders.iter().for_each(|folder| folder.write("advertisement", ADVERTISEMENT).unwrap());
    }

    /// MAC addresses that answer an ARP request of a client within a second.
    fn arping(&self, client: usize, address: &str) -> BTreeSet<String> {
        self.arping_on("eth0", client, address)
    }

    /// Like [`arping`](Self::arping), on another device of the client.
    fn arping_on(&self, device: &str, client: usize, address: &str) -> BTreeSet<String> {
        let arguments = ["-I", device, "-c", "1", "-w", "1", address];
        let output = self.clients[client].command("arping").args(arguments).output().expect("arping");
        let text = String::from_utf8(output.stdout).unwrap();
        let replies = text.lines().filter(|line| line.contains("reply from"));
        replies.filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0.to_lowercase())).collect()
    }

    /// MAC addresses in the neighbour advertisements that answer a client's solicitation.
    fn ndisc(&self, client: usize, address: &str) -> BTreeSet<String> {
        self.ndisc_on("eth0", client, address)
    }

    /// Like [`ndisc`](Self::ndisc), on another device of the client.
    fn ndisc_on(&self, device: &str, client: usize, address: &str) -> BTreeSet<String> {
        let arguments = ["-m", "-w", "500", "-r", "2", address, device];
        let output = self.clients[client].command("ndisc6").args(arguments).output().expect("ndisc6");
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text.lines().filter_map(|line| line.split_once("link-layer address:"));
        lines.map(|(_, mac)| mac.trim().to_lowercase()).collect()
    }

    /// Waits until a node for which `accept` returns `true` answers for the address. Returns the number of that node,
    /// and the time that passed.
    fn owner(&self, patience: Duration, accept: impl Fn(usize) -> bool) -> (usize, Duration) {
        let start = Instant::now();
        let answering = || {
            let macs = self.arping(0, VIP);
            assert!(macs.len() < 2, "{macs:?} answer");
            let number = (1..=self.nodes.len()).find(|number| macs.contains(&mac(*number)))?;
            accept(number).then_some(number)
        };
        let owner = wait_for(patience, answering).expect("no node answers");
        (owner, start.elapsed())
    }

    fn list(&self, number: usize) -> Vec<Value> {
        let mut all = self.list_all(number);
        all.retain(|it| it["by"] != "nothing");
        all
    }

    /// Like [`Self::list`], but also with the addresses that no advertisement covers.
    fn list_all(&self, number: usize) -> Vec<Value> {
        let agent = self.agents[number - 1].as_ref().unwrap();
        serde_json::from_value(agent.json(&["announce", "list"]).unwrap()).unwrap()
    }

    /// A metric of the agent on a node.
    fn metric(&self, number: usize, name: &str) -> u64 {
        let address = SocketAddr::from(([127, 0, 0, 1], 10_249));
        let metrics = http::get(&self.nodes[number - 1], address, "/metrics").unwrap();
        metrics.metric(name).unwrap_or_else(|| panic!("no {name} in {metrics:?}"))
    }

    /// Whether the program that answers for announced addresses is attached to the node's `eth0`: by a pinned link, or
    /// by a filter on kernels without tcx.
    fn has_program(&self, number: usize) -> bool {
        let bpffs = self.settings(number, &[]).bpffs;
        let pins = agent::run(Command::new("find").arg(bpffs).args(["-name", "*-announce"])).unwrap();
        let show = ["filter", "show", "dev", "eth0", "ingress"];
        let filters = agent::run(self.nodes[number - 1].command("tc").args(show)).unwrap();
        !pins.stdout.is_empty() || String::from_utf8(filters.stdout).unwrap().contains("tc_announce")
    }

    /// Whether the node announces no address, as its agent reports.
    fn is_silent(&self, number: usize) -> bool {
        let list = self.list(number);
        !list.is_empty() && list.iter().all(|address| address["here"] == false)
    }

    /// Divides the nodes into groups, which may overlap: each node drops the messages of the nodes with which it shares
    /// no group, and nothing else.
    fn split(&self, groups: &[&[usize]]) {
        let numbers = 1..=self.nodes.len();
        for number in numbers.clone() {
            let share =
                |other: usize| groups.iter().any(|group| group.contains(&number) && group.contains(&other));
            let mut rules = String::new();
            for other in numbers.clone().filter(|other| !share(*other)) {
                writeln!(rules, "ip saddr 192.0.2.{other} udp dport 7947 drop").unwrap();
            }
            // The first line makes sure that the table to delete exists.
            let table = format!(
                "table inet apart\ndelete table inet apart\ntable inet apart {{ chain input {{\n\
                 type filter hook input priority 0;\n{rules}}}\n}}\n"
            );
            self.nodes[number - 1].feed("nft", &["-f", "-"], &table).unwrap();
        }
    }

    /// Opens connections to the address until a server answers. Returns the server's name. The client's kernel sends
    /// the packets to the MAC address in its neighbour table.
    fn reach(&self, address: &str) -> Option<String> {
        let to = SocketAddr::new(address.parse().unwrap(), 80);
        let connect = || {
            let stream = TcpStream::connect_timeout(&to, Duration::from_millis(100) * patience())?;
            Connection::on(stream, to)?.ask()
        };
        wait_for(SOON, || Some(self.clients[0].run(connect).ok()?.server))
    }

    /// The MAC address that the first client's neighbour table has for the address.
    fn neighbour(&self, address: &str) -> Option<String> {
        let output = self.clients[0].command("ip").args(["neigh", "show", "to", address]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        Some(text.split_once("lladdr ")?.1.split_whitespace().next()?.to_owned())
    }

    fn forget_neighbours(&self) {
        self.clients.iter().for_each(|client| client.ip("neigh flush all\n").unwrap());
    }

    fn ask(&self, address: &str) -> String {
        let to = SocketAddr::new(address.parse().unwrap(), 80);
        ask_http(&self.clients[0], to).map_or_else(|error| error.to_string(), |answer| answer.server)
    }
}

fn manifests(number: usize) -> String {
    Web {
        pool: ["192.0.2.100-192.0.2.109", &format!("{VIP6}/124")],
        vips: [VIP, VIP6],
        policy: "Cluster",
        endpoint: [&format!("192.0.2.{number}"), &format!("2001:db8::{number:x}")],
        node: number,
    }
    .yaml()
}

fn of_node(number: usize) -> BTreeSet<String> {
    BTreeSet::from([mac(number)])
}

#[test]
fn lone_node_answers_for_the_addresses_of_its_services_only() {
    let mut segment = Segment::new(1);
    segment.start(&[]);
    assert_eq!(segment.arping(0, VIP), BTreeSet::new(), "nothing is announced");
    assert_eq!(segment.list(1), Vec::<Value>::new());
    let unannounced =
        || (segment.list_all(1).iter().filter(|it| it["node"].is_null()).count() == 2).then_some(());
    wait_for(SOON, unannounced).expect("the list has the addresses that nothing announces");
    assert!(!segment.has_program(1), "nothing is attached as long as there is nothing to announce");

    segment.advertise();
    assert_eq!(segment.owner(SOON, |_| true).0, 1);
    assert!(segment.has_program(1));
    assert_eq!(segment.list_all(1).len(), 2, "the advertisement covers both");
    assert_eq!(segment.ndisc(0, VIP6), of_node(1));
    assert_eq!((segment.ask(VIP), segment.ask(VIP6)), ("n1".to_owned(), "n1".to_owned()));
    // The kernel answers for the node's own address. No machine answers for a free address of the pool, or for an
    // address in no pool.
    assert_eq!(segment.arping(0, "192.0.2.1"), of_node(1));
    assert_eq!(segment.ndisc(0, "2001:db8::1"), of_node(1));
    for nobody in ["192.0.2.101", "192.0.2.77"] {
        assert_eq!(segment.arping(0, nobody), BTreeSet::new(), "{nobody}");
    }
    assert_eq!(segment.ndisc(0, "2001:db8::65"), BTreeSet::new());
    // The client's duplicate address detection must find that the address is in use.
    let probe = ["-D", "-I", "eth0", "-c", "1", "-w", "1", VIP];
    assert!(!segment.clients[0].command("arping").args(probe).output().unwrap().status.success());
    segment.clients[1].ip(&format!("address add {VIP6}/64 dev eth0\n")).unwrap();
    let has_failed = || {
        let output =
            segment.clients[1].command("ip").args(["-6", "address", "show", "dev", "eth0"]).output().ok()?;
        String::from_utf8(output.stdout).ok()?.contains("dadfailed").then_some(())
    };
    wait_for(Duration::from_secs(5), has_failed).expect("the client must not get the address");

    let list = segment.list(1);
    assert_eq!(list.len(), 2, "{list:?}");
    assert_eq!((&list[0]["address"], &list[0]["here"]), (&Value::from(VIP), &Value::from(true)));
    assert_eq!((&list[0]["node"], &list[0]["interfaces"][0]), (&Value::from("n1"), &Value::from("eth0")));
    assert!(list[0]["answers"].as_u64().unwrap() > 0 && list[0]["expiresInMs"].is_null(), "{list:?}");

    // Without its agent, a lone node continues to answer for the addresses, because it also still serves its Services.
    let agent = segment.agents[0].take().unwrap();
    agent.kill().unwrap();
    assert_eq!(segment.arping(0, VIP), of_node(1));
    segment.agents[0] = Some(Agent::start(&segment.nodes[0], segment.settings(1, &[])).unwrap());
    assert_eq!(segment.owner(SOON, |_| true).0, 1);
    segment.folders[0].remove("advertisement").unwrap();
    let is_silent = || segment.arping(0, VIP).is_empty().then_some(());
    wait_for(SOON, is_silent).expect("an address that is not advertised must not be answered");
    let log = || segment.agents[0].as_ref().unwrap().log();
    for address in [VIP, VIP6] {
        let line = format!("no longer announcing the address address={address}");
        wait_for(SOON, || log().contains(&line).then_some(()))
            .unwrap_or_else(|| panic!("{line}:\n{}", log()));
    }
}

#[test]
fn multicast_group_that_cannot_be_joined_is_logged_once() {
    let mut segment = Segment::new(1);
    // Below an MTU of 1,280 bytes the kernel takes IPv6 off the device, so that the device can join no IPv6 multicast
    // group.
    segment.nodes[0].ip("link set eth0 mtu 1200\n").unwrap();
    segment.start(&[]);
    segment.advertise();
    segment.owner(SOON, |_| true);
    let log = || segment.agents[0].as_ref().unwrap().log();
    let times = || log().matches("cannot receive the multicast group").count();
    wait_for(SOON, || (times() > 0).then_some(())).unwrap_or_else(|| panic!("{}", log()));
    // The agent tries again every 200 ms.
    thread::sleep(Duration::from_secs(1) * patience());
    assert_eq!(times(), 1, "{}", log());
}

/// Something else has the path at which the agent pins the link of its program.
#[test]
fn node_whose_program_cannot_be_attached_leaves_its_addresses_to_another() {
    one_of_three(restart_without_program, ControlFlow::is_continue);
}

fn restart_without_program() -> ControlFlow<String> {
    let (mut segment, sniffer, owner) = three();
    segment.agents[owner - 1].take().unwrap().kill().unwrap();
    wait_for_takeover(&sniffer);
    let (next, _) = segment.owner(SOON, |number| number != owner);
    let members = segment.members();
    let settings = segment.settings(owner, &members.iter().map(String::as_str).collect::<Vec<_>>());
    let links = settings.bpffs.join(format!("lb/v{LAYOUT_VERSION}/links"));
    let pins = fs::read_dir(links).unwrap().map(|entry| entry.unwrap().path());
    let pin = pins.filter(|path| path.to_str().unwrap().ends_with("-announce")).min().unwrap();
    fs::remove_file(&pin).unwrap();
    fs::create_dir(&pin).unwrap();
    let agent = Agent::start(&segment.nodes[owner - 1], settings).unwrap();
    let problems = || {
        let status = agent.json(&["status"]).unwrap()["agent"]["problems"].to_string();
        status.contains("no address is announced at layer 2 on device").then_some(())
    };
    wait_for(SOON, problems).unwrap_or_else(|| panic!("{}", agent.log()));
    // Waits longer than an owner waits before it yields to a better node.
    thread::sleep(Duration::from_secs(10));
    assert_eq!(segment.owner(SOON, |_| true).0, next, "{}", agent.log());
    check_turns(&sniffer, &[(owner, false), (next, true)])
}

#[test]
fn lone_node_answers_for_a_service_that_became_invalid_before_a_restart() {
    restart_with_an_invalid_service(None);
}

#[test]
fn lone_node_answers_for_a_service_that_became_invalid_before_an_upgrade_to_another_layout() {
    restart_with_an_invalid_service(Some(agent::next_binary()));
}

/// Makes the Service invalid while no agent runs, and starts the agent from the executable `binary`. The kernel
/// continues to serve the Service as the earlier agent has read it, so the node must continue to answer for the
/// Service's addresses.
fn restart_with_an_invalid_service(binary: Option<PathBuf>) {
    let mut segment = Segment::new(1);
    segment.start(&[]);
    segment.advertise();
    segment.owner(SOON, |_| true);
    segment.agents[0].take().unwrap().terminate().unwrap();
    segment.folders[0].write("web", &manifests(1).replace("port: 80,", "port: 0,")).unwrap();
    let settings = Settings { binary, ..segment.settings(1, &[]) };
    let agent = Agent::start(&segment.nodes[0], settings).unwrap();
    // Waits longer than the agent needs to read the folder and to update the records.
    thread::sleep(Duration::from_secs(3) * patience());
    let answers = |segment: &Segment| (segment.arping(0, VIP), segment.ndisc(0, VIP6));
    assert_eq!(answers(&segment), (of_node(1), of_node(1)), "{}", agent.log());
    segment.folders[0].remove("web").unwrap();
    let is_silent = || (answers(&segment) == (BTreeSet::new(), BTreeSet::new())).then_some(());
    wait_for(SOON, is_silent).unwrap_or_else(|| panic!("the Service is deleted\n{}", agent.log()));
}

/// The map `SERVICES` has no room for the Service, so the node would drop the packets of clients.
#[test]
fn lone_node_does_not_answer_for_an_address_that_it_cannot_serve() {
    let mut segment = Segment::new(1);
    segment.start(&["--max-frontends", "1"]);
    segment.advertise();
    let list = wait_for(SOON, || Some(segment.list(1)).filter(|list| list.len() == 2));
    let list = list.expect("the addresses should be announced");
    assert!(list.iter().all(|it| it["node"].is_null() && it["here"] == false), "{list:?}");
    assert_eq!((segment.arping(0, VIP), segment.ndisc(0, VIP6)), (BTreeSet::new(), BTreeSet::new()));
    let conditions = conditions(&segment);
    assert!(conditions.iter().any(|it| it.contains("--max-frontends")), "{conditions:?}");
}

/// The multicast groups for IPv6 that the device `eth0` of a node receives.
fn groups(node: &Netns) -> String {
    let output = node.command("ip").args(["-6", "maddress", "show", "dev", "eth0"]).output().expect("ip");
    String::from_utf8(output.stdout).unwrap()
}

/// A network card or a switch may drop solicitations to a group that the node has not joined. Each candidate joins,
/// because it may have to announce at any time.
#[test]
fn candidates_receive_the_solicited_node_group_until_the_address_is_withdrawn() {
    const GROUP: &str = "ff02::1:ff00:6d";
    let mut segment = Segment::new(3);
    let members = segment.members();
    segment.start(&members.iter().map(String::as_str).collect::<Vec<_>>());
    let have_joined = |segment: &Segment, expected: bool| {
        let all = segment.nodes.iter().all(|node| groups(node).contains(GROUP) == expected);
        all.then_some(())
    };
    assert!(have_joined(&segment, false).is_some(), "nothing is announced");
    segment.advertise();
    wait_for(SOON, || have_joined(&segment, true)).expect("all candidates join the group");
    segment.folders.iter().for_each(|folder| folder.remove("advertisement").unwrap());
    wait_for(SOON, || have_joined(&segment, false)).expect("all nodes leave the group");
}

#[test]
fn claim_of_another_machine_silences_the_node() {
    let mut segment = Segment::new(1);
    segment.start(&[]);
    segment.advertise();
    segment.owner(SOON, |_| true);
    segment.clients[1].ip("address add 192.0.2.100/32 dev eth0\n").unwrap();
    let claim = ["-A", "-c", "1", "-I", "eth0", VIP];
    assert!(segment.clients[1].command("arping").args(claim).output().unwrap().status.success());
    assert_eq!(segment.arping(0, VIP), BTreeSet::from([mac(102)]), "only the other machine answers");
    let noted = || {
        let list = segment.list(1);
        (list[0]["here"] == false).then_some(list)
    };
    let list = wait_for(SOON, noted).expect("`announce list` must show the conflict");
    assert!(list[0]["conflicts"].as_u64() >= Some(1), "{list:?}");
    assert_eq!(list[0]["conflictMac"], mac(102));
    assert_eq!(list[1]["here"], true, "the other address is announced");
}

#[test]
fn request_with_a_vlan_tag_is_answered_on_the_vlan_device_only() {
    let mut segment = Segment::new(1);
    // `ip` makes the kernel load the module for VLANs, if it exists.
    if let Err(error) = segment.clients[1].ip("link add link eth0 name probe type vlan id 9\n") {
        return skip::whole(&format!("no 802.1Q devices: {error:#}"));
    }
    for (netns, number) in [(&segment.nodes[0], 1), (&segment.clients[0], 201)] {
        netns
            .ip(&format!(
                "address flush dev eth0\nlink add link eth0 name eth0.5 type vlan id 5\nlink set eth0.5 up\n\
                 address add 192.0.2.{number}/24 dev eth0.5\naddress add 2001:db8::{number:x}/64 dev eth0.5 nodad\n"
            ))
            .unwrap();
    }
    segment.start(&[]);
    segment.advertise();
    let tagged = || {
        let arguments = ["-I", "eth0.5", "-c", "1", "-w", "1", VIP];
        let output = segment.clients[0].command("arping").args(arguments).output().ok()?;
        output.status.success().then_some(String::from_utf8(output.stdout).ok()?)
    };
    let answer = wait_for(SOON, tagged).expect("no answer with a tag");
    assert!(answer.to_lowercase().contains(&mac(1)), "{answer}");
    assert_eq!(segment.ask(VIP), "n1");
    assert_eq!(segment.arping(1, VIP), BTreeSet::new(), "a request without the tag");
}

#[test]
fn request_with_a_priority_tag_is_answered_on_the_device_itself() {
    const MAC: &str = "02:00:00:00:00:77";
    let mut segment = Segment::new(1);
    let ends = (&segment.clients[0], &segment.nodes[0]);
    // Priority 5 in the upper bits, and no VLAN.
    let _pump = pump::connect((ends.0, "eth1"), (ends.1, "eth1"), Layer::Tagged(5 << 13)).unwrap();
    ends.0.ip("address add 198.51.100.2/24 dev eth1\nlink set eth1 up\n").unwrap();
    ends.1
        .ip(&format!("link set eth1 address {MAC}\naddress add 198.51.100.1/24 dev eth1\nlink set eth1 up\n"))
        .unwrap();
    segment.start(&["--wire-device", "eth1"]);
    let advertisement = ADVERTISEMENT.replace("}\n", ", spec: {interfaces: [eth1]}}\n");
    segment.folders[0].write("advertisement", &advertisement).unwrap();
    let expected = BTreeSet::from([MAC.to_owned()]);
    let answered = |answers: BTreeSet<String>| (answers == expected).then_some(());
    wait_for(SOON, || answered(segment.arping_on("eth1", 0, VIP))).expect("no ARP reply");
    wait_for(SOON, || answered(segment.ndisc_on("eth1", 0, VIP6))).expect("no neighbour advertisement");
}

#[test]
#[ignore = "only in a guest: `cargo xtask vm` runs it"]
fn address_on_a_bond_is_answered_after_its_active_port_has_failed() {
    guest::only();
    let mut segment = Segment::new(1);
    let (node, bridge) = (segment.nodes[0].clone(), segment.lan.bridge.clone());
    netns::ip(&format!(
        "link add p11 netns {} type veth peer name eth1 netns {}\n",
        bridge.name(),
        node.name()
    ))
    .unwrap();
    bridge.ip("link set p11 master br0 up\n").unwrap();
    node.ip(
        "address flush dev eth0\nlink add bond0 type bond mode active-backup miimon 50\nlink set eth0 down\n\
         link set eth1 down\nlink set eth0 master bond0\nlink set eth1 master bond0\nlink set bond0 up\n\
         address add 192.0.2.1/24 dev bond0\naddress add 2001:db8::1/64 dev bond0 nodad\n",
    )
    .unwrap();
    segment.folders[0].write("web", &manifests(1)).unwrap();
    // The agent itself finds the device that leads to other machines.
    let settings = Settings { arguments: vec!["--socket-lb=off".into()], ..segment.settings(1, &[]) };
    segment.agents.push(Some(Agent::start(&node, settings).unwrap()));
    segment.advertise();
    assert_eq!(segment.owner(SOON, |_| true).0, 1);
    assert_eq!(segment.ndisc(0, VIP6), of_node(1), "a bond has the MAC address of its first port");
    assert_eq!(segment.list(1)[0]["interfaces"], json!(["bond0"]));
    for (fails, works) in [("p1", "p11"), ("p11", "p1")] {
        bridge.ip(&format!("link set {works} up\nlink set {fails} down\n")).unwrap();
        for address in [VIP, VIP6] {
            assert_eq!(segment.reach(address).as_deref(), Some("n1"), "{address} while {fails} is down");
        }
    }
}

/// Starts three nodes, and waits until the best candidate, the node [`BEST`], answers for both addresses. Returns the
/// segment, a sniffer of the frames that announce the addresses from then on, and the number of that node.
fn three() -> (Segment, Sniffer, usize) {
    let mut segment = Segment::new(3);
    let members = segment.members();
    segment.start(&members.iter().map(String::as_str).collect::<Vec<_>>());
    segment.advertise();
    segment.owner(SOON, |number| number == BEST);
    let answers = || (segment.ndisc(0, VIP6) == of_node(BEST)).then_some(());
    wait_for(SOON, answers).expect("the best node must answer for both addresses");
    let sniffer = segment.lan.watch(&both()).unwrap();
    (segment, sniffer, BEST)
}

fn both() -> [IpAddr; 2] {
    [VIP, VIP6].map(|address| address.parse().unwrap())
}

/// Minimum time during which no node answers, after a node's right to announce has expired and before the next node
/// takes over. The right lasts 0.9 s from when the node sent its request. The members' grants to the node last 1.2 s
/// from when the request arrived; until these grants end, the members grant the address to no other node.
const SILENCE: Duration = Duration::from_millis(300);

/// Asserts that exactly these nodes have claimed each address, one after the other: a node that was replaced claims
/// nothing until its next turn, so two nodes never alternate. `true` stands for a node that took the address over by
/// itself, `false` for a node that got the address by a planned hand-over. Before a node with `true` claims the
/// address, no node claims it for [`SILENCE`]. The first node's flag has no effect.
///
/// If there are more turns than expected, and each of them began as the protocol allows, returns `Break` with the
/// turns: the owner has lost its right during a stall, and another node has taken over. The test may then make another
/// attempt.
#[track_caller]
fn check_turns(sniffer: &Sniffer, expected: &[(usize, bool)]) -> ControlFlow<String> {
    let mut longer = Vec::new();
    for address in both() {
        let turns = turns(&sniffer.claims(address));
        let macs: Vec<&str> = turns.iter().map(|turn| &*turn.mac).collect();
        let wanted: Vec<String> = expected.iter().map(|(number, _)| mac(*number)).collect();
        if turns.len() > wanted.len() && turns.windows(2).all(|pair| is_allowed(pair, expected)) {
            longer.push(format!("{address}: {turns:?}"));
            continue;
        }
        assert_eq!(macs, wanted, "{address}: {turns:?}");
        for (pair, (number, was_silent)) in turns.windows(2).zip(&expected[1..]) {
            let silence = pair[1].first - pair[0].last;
            println!("{address}: no node answers for {silence:?}, then n{number} does");
            assert!(!was_silent || silence >= SILENCE, "{address}: {silence:?} before n{number}");
        }
    }
    if longer.is_empty() { ControlFlow::Continue(()) } else { ControlFlow::Break(longer.join("; ")) }
}

/// Whether the second turn may follow the first one: after [`SILENCE`], by a hand-over to the best candidate, or by one
/// of the expected hand-overs.
fn is_allowed(pair: &[Turn], expected: &[(usize, bool)]) -> bool {
    let [first, second] = pair else { return false };
    let hand_over =
        |two: &[(usize, bool)]| !two[1].1 && (&first.mac, &second.mac) == (&mac(two[0].0), &mac(two[1].0));
    let silence = second.first - first.last;
    silence >= SILENCE || second.mac == mac(BEST) || expected.windows(2).any(hand_over)
}

/// Waits until a node other than the last claimant claims both addresses.
fn wait_for_takeover(sniffer: &Sniffer) {
    let before = both().map(|address| turns(&sniffer.claims(address)).len());
    let has_moved = || {
        let now = both().map(|address| turns(&sniffer.claims(address)).len());
        (now[0] > before[0] && now[1] > before[1]).then_some(())
    };
    wait_for(SOON, has_moved).expect("no other node claims the addresses");
}

/// The times at which a node announces an address to all machines, in milliseconds after its first announcement.
const BURST: [u64; 5] = [0, 1_100, 2_200, 3_300, 5_000];
/// How much earlier than in [`BURST`] a frame may follow: the agent counts these times from the takeover, and sends the
/// first frame some time after the takeover.
const EARLY: Duration = Duration::from_millis(100);
/// How much later a frame may follow: the agent checks every 200 ms which frames are due.
const LATE: Duration = Duration::from_millis(500);

/// Asserts that the node announces both addresses at the times of [`BURST`]: the IPv4 address by an ARP request and an
/// ARP reply each time, the IPv6 address by an unsolicited neighbour advertisement that overrides other entries. In
/// addition to [`EARLY`] and [`LATE`], allows for the time that tasks have waited for a CPU, I/O or memory since the
/// start of `stopwatch`, which is before the takeover.
fn assert_burst(sniffer: &Sniffer, number: usize, stopwatch: Stopwatch) {
    let [request, reply] = [Form::ArpRequest, Form::ArpReply];
    let advertisement = Form::Advertisement { solicited: false, overrides: true };
    for (address, forms) in both().into_iter().zip([&[request, reply][..], &[advertisement]]) {
        let is_announcement = |claim: &Claim| claim.to_all && claim.mac == mac(number);
        let burst = || {
            let claims: Vec<Claim> = sniffer.claims(address).into_iter().filter(is_announcement).collect();
            (claims.len() >= BURST.len() * forms.len()).then_some(claims)
        };
        let burst = wait_for(SOON, burst).expect("the node does not repeat its announcement often enough");
        let (early, late) = (EARLY * patience() + stopwatch.waited(), LATE * patience() + stopwatch.waited());
        let sent: Vec<Form> = burst.iter().map(|claim| claim.form).collect();
        assert_eq!(sent, forms.repeat(BURST.len()), "{address}: {burst:?}");
        for (claims, due) in burst.chunks(forms.len()).zip(BURST.map(Duration::from_millis)) {
            let at = claims[0].at - burst[0].at;
            println!("{address}: announced after {at:?}");
            assert!(at + early >= due && at <= due + late, "{address}: {at:?}, not {due:?}");
        }
    }
}

#[test]
fn exactly_one_of_three_nodes_answers_and_another_replaces_it_within_two_seconds() {
    one_of_three(kill_owner, ControlFlow::is_continue);
}

fn kill_owner() -> ControlFlow<String> {
    let (mut segment, sniffer, owner) = three();
    for _ in 0..3 {
        assert_eq!(segment.owner(SOON, |_| true).0, owner);
    }
    for address in [VIP, VIP6] {
        assert_eq!(segment.ask(address), format!("n{owner}"));
        assert_eq!(segment.neighbour(address), Some(mac(owner)), "the client remembers the node");
    }
    let agrees = |number| {
        move |list: &Vec<Value>| {
            list[0]["node"] == format!("n{owner}") && list[0]["here"] == (number == owner)
        }
    };
    let takeovers = |segment: &Segment, number| segment.metric(number, "lb_announce_takeovers_total");
    for number in 1..=3 {
        let list = segment.list(number);
        assert!(agrees(number)(&list), "n{number} says {list:?}");
        // The right of the owner lasts 0.9 s unless the owner renews it.
        let right_ends = list[0]["expiresInMs"].as_u64();
        assert_eq!(right_ends.is_some_and(|ms| ms <= 900), number == owner, "{list:?}");
        let announced = segment.metric(number, "lb_announced_addresses");
        assert_eq!(announced, if number == owner { 2 } else { 0 }, "n{number}");
    }
    let before: Vec<u64> = (1..=3).map(|number| takeovers(&segment, number)).collect();
    for number in 1..=3 {
        let agent = segment.agents[number - 1].as_ref().unwrap();
        let output = |arguments: &[&str]| String::from_utf8(agent.ask(arguments).unwrap().stdout).unwrap();
        let here = if number == owner { " (this node, since " } else { "" };
        let page = output(&["service", "show", "default/web"]);
        assert!(page.contains(&format!("Announced  192.0.2.100 by n{owner}{here}")), "{page}");
        let explained = output(&["explain", "--from", "192.0.2.201:40000", "--to", "192.0.2.100:80"]);
        assert!(explained.contains(&format!("announcement: n{owner}{here}")), "{explained}");
    }
    // As if the machine had died: its link goes down, and its agent is killed.
    segment.nodes[owner - 1].ip("link set eth0 down\n").unwrap();
    segment.agents[owner - 1].take().unwrap().kill().unwrap();
    let stopwatch = Stopwatch::start();
    // The client still has the dead node's MAC address for both addresses, and follows the announcement.
    let reached = [VIP6, VIP].map(|address| segment.reach(address));
    let took = stopwatch.elapsed();
    let (next, _) = segment.owner(SOON, |number| number != owner);
    println!("the client reaches n{next} {took:?} after n{owner} died");
    for (address, server) in [VIP6, VIP].into_iter().zip(reached) {
        assert_eq!(server, Some(format!("n{next}")), "{address}");
        assert_eq!(segment.neighbour(address), Some(mac(next)), "{address}");
    }
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(takeovers(&segment, next), before[next - 1] + 2, "n{next} has taken both addresses over");
    assert_burst(&sniffer, next, stopwatch);
    check_turns(&sniffer, &[(owner, false), (next, true)])
}

/// Interval between two new connections, 500 per second, unless the machine is too slow.
const CONNECTION_INTERVAL: Duration = Duration::from_millis(2);

/// A connection ends if it is open while its packets move to another node, which has no flow for it. The client has one
/// connection at a time, and the packets move twice, so at most two connections end.
#[test]
fn planned_handover_ends_only_connections_that_are_open_at_that_moment() {
    one_of_three(hand_over_twice, ControlFlow::is_continue);
}

fn hand_over_twice() -> ControlFlow<String> {
    let (mut segment, sniffer, owner) = three();
    let stop = AtomicBool::new(false);
    let client = segment.clients[0].clone();
    let to = SocketAddr::new(VIP.parse().unwrap(), 80);
    let (next, took, (count, lost)) = thread::scope(|scope| {
        // Even if the test fails, `stop` must be set, because the scope waits for the connections.
        let _stop = StopOnDrop(&stop);
        let connections = scope.spawn(|| ask_until(&client, to, CONNECTION_INTERVAL, &stop).unwrap());
        thread::sleep(Duration::from_secs(1));
        let agent = segment.agents[owner - 1].take().unwrap();
        let stopwatch = Stopwatch::start();
        let others: Vec<usize> = (1..=3).filter(|number| *number != owner).collect();
        let ended = scope.spawn(|| agent.terminate().unwrap());
        let answering = || others.iter().find(|number| segment.list(**number)[0]["here"] == true).copied();
        let next = wait_for(SOON, answering).expect("no other node has the right to answer");
        let took = stopwatch.elapsed();
        assert!(ended.join().unwrap().success());
        thread::sleep(Duration::from_secs(2));
        // A new agent of the best candidate takes the address back.
        let members = segment.members();
        let settings = segment.settings(owner, &members.iter().map(String::as_str).collect::<Vec<_>>());
        segment.agents[owner - 1] = Some(Agent::start(&segment.nodes[owner - 1], settings).unwrap());
        let is_here = |list: &[Value]| list.first().is_some_and(|address| address["here"] == true);
        let is_back = || is_here(&segment.list(owner)).then_some(());
        wait_for(Duration::from_secs(20), is_back).expect("the owner must come back");
        thread::sleep(Duration::from_secs(2));
        stop.store(true, Ordering::Relaxed);
        (next, took, connections.join().unwrap())
    });
    println!("another node answers {took:?} after SIGTERM; {count} connections, {} lost", lost.len());
    // Each further turn also ends a connection.
    check_turns(&sniffer, &[(owner, false), (next, false), (owner, false)])?;
    let were_reset = lost.iter().all(|error| error.contains("reset by peer"));
    assert!(lost.len() <= 2 && were_reset, "{lost:?} of {count}");
    if count > 500 && took < Duration::from_secs(1) {
        ControlFlow::Continue(())
    } else {
        ControlFlow::Break(format!("{count} connections, {took:?}"))
    }
}

#[test]
fn hung_owner_stops_answering_before_another_begins() {
    one_of_three(hang_owner, ControlFlow::is_continue);
}

fn hang_owner() -> ControlFlow<String> {
    let (segment, sniffer, owner) = three();
    let agent = segment.agents[owner - 1].as_ref().unwrap();
    agent.signal(Signal::SIGSTOP).unwrap();
    let stopwatch = Stopwatch::start();
    // `owner` asserts that no request gets answers from two nodes.
    let (next, _) = segment.owner(SOON, |number| number != owner);
    println!("n{next} answers {:?} after the agent of n{owner} hung", stopwatch.wall());
    assert!(stopwatch.elapsed() < Duration::from_secs(3));
    for _ in 0..5 {
        assert_eq!(segment.arping(1, VIP), of_node(next));
    }
    segment.forget_neighbours();
    assert_eq!(segment.ask(VIP), format!("n{next}"));
    check_turns(&sniffer, &[(owner, false), (next, true)])?;
    // The agent wakes up with a right that has expired, and gets the addresses back by a planned hand-over.
    agent.signal(Signal::SIGCONT).unwrap();
    wait_for_takeover(&sniffer);
    thread::sleep(Duration::from_secs(1));
    check_turns(&sniffer, &[(owner, false), (next, true), (owner, false)])
}

/// Tests situations from the table in docs/announce.md, with agents that do not receive each other's messages. (The
/// simulation in `lb-core/src/announce/simulation.rs` tests more of these situations.)
#[test]
fn one_of_three_nodes_apart_stops_and_without_a_majority_no_node_announces() {
    one_of_three(set_nodes_apart, ControlFlow::is_continue);
}

fn set_nodes_apart() -> ControlFlow<String> {
    let (segment, sniffer, owner) = three();
    let others: Vec<usize> = (1..=3).filter(|number| *number != owner).collect();
    // The owner is apart from the two others, one of which takes over.
    segment.split(&[&[owner], &others]);
    wait_for_takeover(&sniffer);
    let (next, _) = segment.owner(SOON, |number| number != owner);
    thread::sleep(Duration::from_secs(1));
    check_turns(&sniffer, &[(owner, false), (next, true)])?;
    assert!(segment.is_silent(owner) && !segment.is_silent(next));

    // No node hears another one, so no node answers.
    segment.split(&[&[1], &[2], &[3]]);
    wait_until_quiet(&sniffer);
    assert!((1..=3).all(|number| segment.is_silent(number)));
    check_turns(&sniffer, &[(owner, false), (next, true)])?;
    let misses = |conditions: Vec<String>| conditions.iter().any(|text| text.contains("2 of the 3 voters"));
    wait_for(SOON, || misses(conditions(&segment)).then_some(())).expect("a condition names the voters");

    // The owner and each of the two other nodes hear each other again. The two other nodes must not hear each other:
    // until both have received a message of the owner, they could grant the addresses to each other.
    segment.split(&[&[owner, others[0]], &[owner, others[1]]]);
    wait_for_takeover(&sniffer);
    check_turns(&sniffer, &[(owner, false), (next, true), (owner, true)])?;
    wait_for(SOON, || (!misses(conditions(&segment))).then_some(())).expect("the condition ends");

    // All nodes hear each other again, which changes nothing.
    segment.split(&[&[1, 2, 3]]);
    thread::sleep(Duration::from_secs(1));
    check_turns(&sniffer, &[(owner, false), (next, true), (owner, true)])?;

    // A node that does not announce is apart: the owner continues to announce.
    let (apart, rest) = (others[0], [owner, others[1]]);
    segment.split(&[&[apart], &rest]);
    thread::sleep(Duration::from_secs(3));
    let claimed = || sniffer.claims(both()[0]).len();
    let before = claimed();
    wait_for(SOON, || (claimed() > before).then_some(())).expect("the owner must go on");
    check_turns(&sniffer, &[(owner, false), (next, true), (owner, true)])?;
    assert!(segment.is_silent(apart));
    ControlFlow::Continue(())
}

/// Waits until no node has claimed the addresses for 2 s, longer than a grant lasts.
fn wait_until_quiet(sniffer: &Sniffer) {
    let claimed = || both().map(|address| sniffer.claims(address).len());
    let mut last = (claimed(), Instant::now());
    let is_quiet = || {
        if claimed() != last.0 {
            last = (claimed(), Instant::now());
        }
        (last.1.elapsed() > Duration::from_secs(2)).then_some(())
    };
    wait_for(SOON, is_quiet).expect("a node without a majority answers");
}

/// The conditions that `status` of the agent on the first node lists.
fn conditions(segment: &Segment) -> Vec<String> {
    let agent = segment.agents[0].as_ref().unwrap();
    let status = agent.json(&["status"]).unwrap();
    serde_json::from_value(status["agent"]["problems"].clone()).unwrap()
}

#[test]
fn announced_address_on_a_device_of_the_node_is_a_condition_until_it_is_removed() {
    let mut segment = Segment::new(1);
    segment.start(&[]);
    segment.advertise();
    segment.owner(SOON, |_| true);
    let advice = |device: &str| format!("remove it with `ip address del {VIP}/32 dev {device}`");
    let is_named = |device: &str| conditions(&segment).iter().any(|it| it.contains(&advice(device)));
    assert!(!is_named("lo") && !is_named("leftover"));
    // Creates a device that is down, as `kube-ipvs0` is.
    segment.nodes[0].ip("link add leftover type bridge\n").unwrap();
    for device in ["lo", "leftover"] {
        segment.nodes[0].ip(&format!("address add {VIP}/32 dev {device}\n")).unwrap();
        let named = wait_for(SOON, || is_named(device).then_some(()));
        assert!(named.is_some(), "{device}: {:?}", conditions(&segment));
        // Shows why such an address is a condition: the kernel answers for it even without an announcement.
        segment.folders[0].remove("advertisement").unwrap();
        let gone = wait_for(SOON, || (!is_named(device)).then_some(()));
        assert!(gone.is_some(), "{:?}", conditions(&segment));
        wait_for(SOON, || segment.list(1).is_empty().then_some(())).expect("nothing is announced");
        assert_eq!(segment.arping(0, VIP), of_node(1), "{device}");
        segment.advertise();
        wait_for(SOON, || is_named(device).then_some(())).expect("it is announced again");
        segment.nodes[0].ip(&format!("address del {VIP}/32 dev {device}\n")).unwrap();
        let gone = wait_for(SOON, || (!is_named(device)).then_some(()));
        assert!(gone.is_some(), "{:?}", conditions(&segment));
    }
}

#[test]
fn address_that_no_advertisement_covers_is_a_condition() {
    let mut segment = Segment::new(1);
    segment.start(&[]);
    let uncovered =
        || conditions(&segment).into_iter().find(|it| it.contains("no L2Advertisement covers it"));
    let metric = || segment.metric(1, "lb_announce_uncovered_addresses");
    let listed = || (!conditions(&segment).is_empty() && uncovered().is_some()).then_some(());
    assert!(uncovered().is_none(), "without advertisements, nothing shall be announced");
    let of_other = ADVERTISEMENT.replace("}}", "}, spec: {ipAddressPools: [other]}}");
    segment.folders[0].write("advertisement", &of_other).unwrap();
    assert!(wait_for(SOON, listed).is_some(), "{:?}", conditions(&segment));
    let text = uncovered().unwrap();
    assert!(text.starts_with("pool \"pool\"") && text.contains("192.0.2.100 (default/web)"), "{text}");
    assert_eq!(metric(), 2);
    segment.advertise();
    wait_for(SOON, || uncovered().is_none().then_some(())).expect("the advertisement covers all pools");
    assert_eq!(metric(), 0);
}
