//! Tests of announcements at layer 2: nodes and clients on one bridge, without a router. Each node runs its own server
//! at the addresses, so an answer shows which node a client has reached.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use lb_tests::{
    agent::{Agent, Settings},
    cleanup::{self, Cleanup, Resource},
    client::{ask_here, ask_http},
    lan::{self, Lan, Web, mac},
    manifests::Manifests,
    netns::{self, Netns},
    server::Server,
    skip, wait_for,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

const VIP6: &str = "2001:db8::64";
const ADVERTISEMENT: &str = "{apiVersion: metallb.io/v1beta1, kind: L2Advertisement, metadata: {name: all, namespace: metallb-system}}\n";
/// How long to wait for an announcement or a takeover. A voter that has just started grants nothing for 1.2 s.
const SOON: Duration = Duration::from_secs(10);

/// Nodes and clients on one bridge. Agents are dropped first.
struct Segment {
    agents: Vec<Option<Agent>>,
    _servers: Vec<Server>,
    nodes: Vec<Netns>,
    clients: [Netns; 2],
    _lan: Lan,
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
        Self {
            agents: Vec::new(),
            _servers: servers,
            nodes,
            clients,
            _lan: lan,
            folders,
            dir,
            _cleanup: cleanup,
        }
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

    /// The flags by which agents share the addresses with each other.
    fn members(&self) -> Vec<String> {
        let key = self.dir.join("key");
        std::fs::write(&key, "a key of more than sixteen bytes\n").unwrap();
        let member = |number| format!("n{number}=192.0.2.{number}:7947");
        let all: Vec<String> = (1..=self.nodes.len()).map(member).collect();
        vec![format!("--announce-member={}", all.join(",")), format!("--announce-key-file={}", key.display())]
    }

    fn advertise(&self) {
        self.folders.iter().for_each(|folder| folder.write("advertisement", ADVERTISEMENT).unwrap());
    }

    /// MAC addresses that answer an ARP request of a client within a second.
    fn arping(&self, client: usize, address: &str) -> BTreeSet<String> {
        let arguments = ["-I", "eth0", "-c", "1", "-w", "1", address];
        let output = self.clients[client].command("arping").args(arguments).output().expect("arping");
        let text = String::from_utf8(output.stdout).unwrap();
        let replies = text.lines().filter(|line| line.contains("reply from"));
        replies.filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0.to_lowercase())).collect()
    }

    /// MAC addresses in the neighbour advertisements that answer a client's solicitation.
    fn ndisc(&self, client: usize, address: &str) -> BTreeSet<String> {
        let arguments = ["-m", "-w", "500", "-r", "2", address, "eth0"];
        let output = self.clients[client].command("ndisc6").args(arguments).output().expect("ndisc6");
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text.lines().filter_map(|line| line.split_once("link-layer address:"));
        lines.map(|(_, mac)| mac.trim().to_lowercase()).collect()
    }

    /// Waits until a node that `accept` accepts answers for the address; returns its number, and how long it took.
    fn owner(&self, patience: Duration, accept: impl Fn(usize) -> bool) -> (usize, Duration) {
        let start = Instant::now();
        let answering = || {
            let macs = self.arping(0, "192.0.2.100");
            assert!(macs.len() < 2, "{macs:?} answer");
            let number = (1..=self.nodes.len()).find(|number| macs.contains(&mac(*number)))?;
            accept(number).then_some(number)
        };
        let owner = wait_for(patience, answering).expect("no node answers");
        (owner, start.elapsed())
    }

    fn list(&self, number: usize) -> Vec<Value> {
        let agent = self.agents[number - 1].as_ref().unwrap();
        let output = agent.ask(&["announce", "list", "-o", "json"]).unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
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
        vips: ["192.0.2.100", VIP6],
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
    assert_eq!(segment.arping(0, "192.0.2.100"), BTreeSet::new(), "nothing is announced");
    assert_eq!(segment.list(1), Vec::<Value>::new());

    segment.advertise();
    assert_eq!(segment.owner(SOON, |_| true).0, 1);
    assert_eq!(segment.ndisc(0, VIP6), of_node(1));
    assert_eq!((segment.ask("192.0.2.100"), segment.ask(VIP6)), ("n1".to_owned(), "n1".to_owned()));
    // The kernel answers for the node's own address. No machine answers for a free address of the pool, or for an
    // address in no pool.
    assert_eq!(segment.arping(0, "192.0.2.1"), of_node(1));
    assert_eq!(segment.ndisc(0, "2001:db8::1"), of_node(1));
    for nobody in ["192.0.2.101", "192.0.2.77"] {
        assert_eq!(segment.arping(0, nobody), BTreeSet::new(), "{nobody}");
    }
    assert_eq!(segment.ndisc(0, "2001:db8::65"), BTreeSet::new());
    // The client's duplicate address detection must find that the address is in use.
    let probe = ["-D", "-I", "eth0", "-c", "1", "-w", "1", "192.0.2.100"];
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
    assert_eq!((&list[0]["address"], &list[0]["here"]), (&Value::from("192.0.2.100"), &Value::from(true)));
    assert_eq!((&list[0]["node"], &list[0]["interfaces"][0]), (&Value::from("n1"), &Value::from("eth0")));
    assert!(list[0]["answers"].as_u64().unwrap() > 0 && list[0]["expiresInMs"].is_null(), "{list:?}");

    // After its agent has ended, a lone node still answers for the addresses, as it still serves its Services.
    let agent = segment.agents[0].take().unwrap();
    agent.kill().unwrap();
    assert_eq!(segment.arping(0, "192.0.2.100"), of_node(1));
    segment.agents[0] = Some(Agent::start(&segment.nodes[0], segment.settings(1, &[])).unwrap());
    assert_eq!(segment.owner(SOON, |_| true).0, 1);
    segment.folders[0].remove("advertisement").unwrap();
    let is_silent = || segment.arping(0, "192.0.2.100").is_empty().then_some(());
    wait_for(SOON, is_silent).expect("an address that is not advertised must not be answered");
}

#[test]
fn claim_of_another_machine_silences_the_node() {
    let mut segment = Segment::new(1);
    segment.start(&[]);
    segment.advertise();
    segment.owner(SOON, |_| true);
    segment.clients[1].ip("address add 192.0.2.100/32 dev eth0\n").unwrap();
    let claim = ["-A", "-c", "1", "-I", "eth0", "192.0.2.100"];
    assert!(segment.clients[1].command("arping").args(claim).output().unwrap().status.success());
    assert_eq!(
        segment.arping(0, "192.0.2.100"),
        BTreeSet::from([mac(102)]),
        "only the other machine answers"
    );
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
        let arguments = ["-I", "eth0.5", "-c", "1", "-w", "1", "192.0.2.100"];
        let output = segment.clients[0].command("arping").args(arguments).output().ok()?;
        output.status.success().then_some(String::from_utf8(output.stdout).ok()?)
    };
    let answer = wait_for(SOON, tagged).expect("no answer with a tag");
    assert!(answer.to_lowercase().contains(&mac(1)), "{answer}");
    assert_eq!(segment.ask("192.0.2.100"), "n1");
    assert_eq!(segment.arping(1, "192.0.2.100"), BTreeSet::new(), "a request without the tag");
}

/// Starts three nodes; returns the segment, and the number of the node that answers.
fn three() -> (Segment, usize) {
    let mut segment = Segment::new(3);
    let members = segment.members();
    segment.start(&members.iter().map(String::as_str).collect::<Vec<_>>());
    segment.advertise();
    let (owner, _) = segment.owner(SOON, |_| true);
    (segment, owner)
}

#[test]
fn exactly_one_of_three_nodes_answers_and_another_replaces_it_within_two_seconds() {
    let (mut segment, owner) = three();
    for _ in 0..3 {
        assert_eq!(segment.owner(SOON, |_| true).0, owner);
    }
    assert_eq!(segment.ask("192.0.2.100"), format!("n{owner}"));
    let agrees = |number| {
        move |list: &Vec<Value>| {
            list[0]["node"] == format!("n{owner}") && list[0]["here"] == (number == owner)
        }
    };
    for number in 1..=3 {
        let list = segment.list(number);
        assert!(agrees(number)(&list), "n{number} says {list:?}");
    }
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
    let start = Instant::now();
    // `arping` waits a whole second for an answer, so `announce list` is used to measure the takeover.
    let others = || (1..=3).filter(|number| *number != owner);
    let answering = || others().find(|number| segment.list(*number)[0]["here"] == true);
    let next = wait_for(SOON, answering).expect("no other node has the right to answer");
    let took = start.elapsed();
    assert_eq!(segment.owner(SOON, |number| number != owner).0, next);
    println!("n{next} answers {took:?} after n{owner} died");
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(segment.ask("192.0.2.100"), format!("n{next}"), "the client follows the announcement");
}

/// Opens connections at a steady rate until `stop` is set; returns their number, and the errors.
fn connections_until(stop: &AtomicBool, to: SocketAddr) -> std::io::Result<(usize, Vec<String>)> {
    let (mut count, mut lost) = (0, Vec::new());
    let start = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        if let Err(error) = ask_here(to) {
            lost.push(format!("after {:?}: {error}", start.elapsed()));
        }
        count += 1;
        thread::sleep((start + count * CONNECTION_INTERVAL).saturating_duration_since(Instant::now()));
    }
    Ok((count as usize, lost))
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Interval between two new connections, 500 per second, unless the machine is too slow.
const CONNECTION_INTERVAL: Duration = Duration::from_millis(2);

/// A connection ends if it is open while its packets move to another node, which has no flow for it. The client has one
/// connection at a time, and the packets move twice.
#[test]
fn planned_handover_ends_only_connections_that_are_open_at_that_moment() {
    let (mut segment, _) = three();
    // The best candidate takes the address over once it has been alive for long enough.
    thread::sleep(Duration::from_secs(6));
    let (owner, _) = segment.owner(SOON, |_| true);
    let stop = AtomicBool::new(false);
    let client = segment.clients[0].clone();
    let to = SocketAddr::new("192.0.2.100".parse().unwrap(), 80);
    let (took, (count, lost)) = thread::scope(|scope| {
        // Even if the test fails, `stop` must be set, because the scope waits for the connections.
        let _stop = StopOnDrop(&stop);
        let connections = scope.spawn(|| client.run(|| connections_until(&stop, to)).unwrap());
        thread::sleep(Duration::from_secs(1));
        let agent = segment.agents[owner - 1].take().unwrap();
        let start = Instant::now();
        let others: Vec<usize> = (1..=3).filter(|number| *number != owner).collect();
        let ended = scope.spawn(|| agent.terminate().unwrap());
        let answering = || others.iter().any(|number| segment.list(*number)[0]["here"] == true).then_some(());
        wait_for(SOON, answering).expect("no other node has the right to answer");
        let took = start.elapsed();
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
        (took, connections.join().unwrap())
    });
    println!("another node answers {took:?} after SIGTERM; {count} connections, {} lost", lost.len());
    let were_reset = lost.iter().all(|error| error.contains("reset by peer"));
    assert!(lost.len() <= 2 && were_reset, "{lost:?} of {count}");
    assert!(count > 1_000 && took < Duration::from_secs(1), "{count} {took:?}");
}

#[test]
fn hung_owner_stops_answering_before_another_begins() {
    let (segment, owner) = three();
    let pid = Pid::from_raw(i32::try_from(segment.agents[owner - 1].as_ref().unwrap().pid()).unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    let start = Instant::now();
    // `owner` asserts that no request gets answers from two nodes.
    let (next, _) = segment.owner(SOON, |number| number != owner);
    println!("n{next} answers {:?} after the agent of n{owner} hung", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(3));
    for _ in 0..5 {
        assert_eq!(segment.arping(1, "192.0.2.100"), of_node(next));
    }
    segment.forget_neighbours();
    assert_eq!(segment.ask("192.0.2.100"), format!("n{next}"));
    kill(pid, Signal::SIGCONT).unwrap();
    segment.owner(SOON, |_| true);
}
