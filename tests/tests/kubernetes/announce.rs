//! Tests of announcements at layer 2 in a cluster: three nodes, a client and the API server on one bridge. Each node
//! serves the address with a server of its own, so an answer shows which node the client has reached.

use std::{collections::BTreeSet, fs, net::SocketAddr, thread::sleep, time::Duration};

use lb_tests::{
    agent::{ask, binary},
    client::ask_http,
    lan::mac,
    wait_for,
};
use serde_json::{Value, json};

use crate::{
    api_server::Fault,
    segment::{Segment, node},
};

const VIP: &str = "192.0.2.100";
/// How long to wait until agents have started, or until a change has taken effect. An agent that has just started votes
/// for no node at first.
const SOON: Duration = Duration::from_secs(20);
/// A time that is longer than the best node for an address needs to start, and to take the address over from another
/// node.
const SETTLED: Duration = Duration::from_secs(10);

impl Segment {
    /// Creates the Nodes, a pool, and a Service under `externalTrafficPolicy: Local` with an endpoint on each node.
    fn fill(&self) {
        (1..=self.nodes.len()).for_each(|number| self.server.put(node(number, json!({}))));
        self.server.put(json!({
            "apiVersion": "metallb.io/v1beta1", "kind": "IPAddressPool",
            "metadata": {"namespace": "metallb-system", "name": "production"},
            "spec": {"addresses": ["192.0.2.100-192.0.2.109"]},
        }));
        self.service(VIP, "Local");
        self.endpoints(&(1..=self.nodes.len()).collect::<Vec<_>>());
    }

    fn advertise(&self, spec: &Value) {
        self.server.put(json!({
            "apiVersion": "metallb.io/v1beta1", "kind": "L2Advertisement",
            "metadata": {"namespace": "metallb-system", "name": "production"}, "spec": spec,
        }));
    }

    /// Three nodes that announce the address at layer 2, once all of them vote.
    fn announcing() -> Self {
        let mut segment = Self::new(3);
        segment.fill();
        segment.advertise(&json!({}));
        segment.start();
        segment.wait_for_voters("n1 n2 n3");
        segment
    }

    fn start(&mut self) {
        let flags = self.flags();
        self.start_with(|_| flags.clone());
    }

    fn flags(&self) -> Vec<String> {
        let key = self.folder.join("key").display().to_string();
        vec!["--announce".to_owned(), format!("--announce-key-file={key}")]
    }

    /// MAC addresses that answer an ARP request within a second.
    fn arping(&self) -> BTreeSet<String> {
        let arguments = ["-I", "eth0", "-c", "1", "-w", "1", VIP];
        let output = self.client.command("arping").args(arguments).output().expect("arping");
        let text = String::from_utf8(output.stdout).unwrap();
        let replies = text.lines().filter(|line| line.contains("reply from"));
        replies.filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0.to_lowercase())).collect()
    }

    /// Waits until `accept` returns `true` for the number of the node that answers for the address, or for `None` if no
    /// node answers; returns that value. Asserts that two nodes never answer at once.
    #[track_caller]
    fn owner(&self, what: &str, accept: impl Fn(Option<usize>) -> bool) -> Option<usize> {
        let answering = || {
            let macs = self.arping();
            assert!(macs.len() < 2, "{macs:?} answer: {what}");
            let number = (1..=self.nodes.len()).find(|number| macs.contains(&mac(*number)));
            accept(number).then_some(number)
        };
        wait_for(SOON, answering).unwrap_or_else(|| panic!("{what}\n{}", self.logs()))
    }

    /// The number of the live node that should announce the address.
    fn best_node(&self) -> usize {
        let list = self.json(1, &["announce", "list"]).unwrap();
        let name = list[0]["node"].as_str().unwrap_or_else(|| panic!("no node in {list}"));
        name.trim_start_matches('n').parse().unwrap()
    }

    fn voters(&self) -> Value {
        let object = self.server.object("configmaps", "default", "lb-agent-announce").unwrap_or_default();
        object["data"]["voters"].clone()
    }

    #[track_caller]
    fn wait_for_voters(&self, expected: &str) {
        let reached = wait_for(SOON, || (self.voters() == expected).then_some(()));
        reached.unwrap_or_else(|| panic!("voters {}, not {expected}\n{}", self.voters(), self.logs()));
    }
}

/// The routes that the agent on a node offers its BGP daemon.
fn routes(segment: &Segment, number: usize) -> String {
    let mut command = segment.nodes[number - 1].command("ip");
    let output = command.args(["-4", "route", "show", "table", "1080"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn routes_and_the_configuration_of_bird_follow_the_objects_of_the_api_server() {
    let mut segment = Segment::new(2);
    segment.fill();
    let folder = segment.folder.clone();
    segment.start_with(|number| {
        let path = |end: &str| folder.join(format!("bird-{number}.{end}")).display().to_string();
        let (file, socket) = (path("conf"), path("ctl"));
        ["--announce-table", "1080", "--bird-config", &file, "--bird-socket", &socket]
            .map(str::to_owned)
            .to_vec()
    });
    let config =
        |number| fs::read_to_string(segment.folder.join(format!("bird-{number}.conf"))).unwrap_or_default();
    let waits = |what: &str, probe: &dyn Fn() -> bool| {
        let reached = wait_for(SOON, || probe().then_some(()));
        reached.unwrap_or_else(|| {
            let tables = (routes(&segment, 1), routes(&segment, 2));
            panic!("{what}: {tables:?}\n{}\n{}", config(1), segment.logs())
        });
    };
    let put = |kind: &str, version: &str, name: &str, spec: Value| {
        segment.server.put(json!({
            "apiVersion": format!("metallb.io/{version}"), "kind": kind,
            "metadata": {"namespace": "metallb-system", "name": name}, "spec": spec,
        }));
    };
    let peer = |more: Value| {
        let mut spec = json!({
            "myASN": 64500, "peerASN": 64501, "peerAddress": "192.0.2.250", "bfdProfile": "fast",
            "nodeSelectors": [{"matchLabels": {"rack": "a"}}],
        });
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        put("BGPPeer", "v1beta2", "tor", spec);
    };
    peer(json!({"password": "secret"}));
    put("BFDProfile", "v1beta1", "fast", json!({"receiveInterval": 120}));
    put("Community", "v1beta1", "names", json!({"communities": [{"name": "gold", "value": "64500:7"}]}));
    put("BGPAdvertisement", "v1beta1", "all", json!({"communities": ["gold"]}));
    let has_route = |number| routes(&segment, number).contains(&format!("blackhole {VIP} "));
    waits("both nodes offer a route", &|| has_route(1) && has_route(2));
    assert!(!config(1).contains("neighbor"), "{}", config(1));
    // The agent uses the labels of the Node object.
    segment.server.put(node(1, json!({"rack": "a"})));
    let statements = [
        "neighbor 192.0.2.250 port 179 as 64501",
        "min rx interval 120 ms",
        "bgp_community.add((64500,7))",
        "password \"secret\"",
    ];
    waits("the peer of the rack", &|| statements.iter().all(|statement| config(1).contains(statement)));
    assert!(!config(2).contains("neighbor"), "{}", config(2));
    // The agent reports a configuration after it has written the file and told BIRD to read it.
    let shown = || {
        let shown = ask(&segment.nodes[0], &segment.bpffs(1), &["announce", "bird-config"]).unwrap();
        String::from_utf8(shown.stdout).unwrap()
    };
    waits("the command shows the peer", &|| shown().contains("neighbor 192.0.2.250"));
    assert!(!shown().contains("secret"), "{}", shown());

    // The password may be in a Secret. While that Secret is missing, the session stays as it is.
    peer(json!({"passwordSecret": {"name": "key"}}));
    let status_of = |number: usize| {
        let status = ask(&segment.nodes[number - 1], &segment.bpffs(number), &["status"]).unwrap();
        String::from_utf8(status.stdout).unwrap()
    };
    waits("the missing Secret is named", &|| status_of(1).contains("the Secret metallb-system/key"));
    assert!(config(1).contains("password \"secret\""), "{}", config(1));
    segment.server.put(json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/basic-auth",
        "metadata": {"namespace": "metallb-system", "name": "key"}, "data": {"password": "c2Vzc2FtZQ=="},
    }));
    waits("the password of the Secret", &|| config(1).contains("password \"sessame\""));
    waits("no missing Secret", &|| !status_of(1).contains("Secret"));

    let excluded = json!({"rack": "a", "node.kubernetes.io/exclude-from-external-load-balancers": ""});
    segment.server.put(node(1, excluded));
    waits("an excluded node withdraws", &|| !has_route(1) && has_route(2));
    segment.server.put(node(1, json!({"rack": "a"})));
    waits("and comes back", &|| has_route(1));
    segment.endpoints(&[2]);
    waits("a node without an endpoint withdraws", &|| !has_route(1) && has_route(2));
    // `status` names an error in an object, and the last good state stays in force.
    put("BGPAdvertisement", "v1beta1", "all", json!({"aggregationLength": 99}));
    waits("the mistake is named", &|| status_of(2).contains("spec.aggregationLength"));
    assert!(has_route(2));
    put("BGPAdvertisement", "v1beta1", "all", json!({"nodeSelectors": [{"matchLabels": {"rack": "a"}}]}));
    waits("a node that is not selected withdraws", &|| !has_route(2));
}

#[test]
fn route_to_an_unreadable_service_stays_over_a_restart() {
    let mut segment = Segment::new(1);
    segment.fill();
    segment.server.put(json!({
        "apiVersion": "metallb.io/v1beta1", "kind": "BGPAdvertisement",
        "metadata": {"namespace": "metallb-system", "name": "all"}, "spec": {},
    }));
    let path = |end: &str| segment.folder.join(end).display().to_string();
    let (file, socket) = (path("bird.conf"), path("bird.ctl"));
    let start = |segment: &mut Segment| {
        let flags = ["--announce-table", "1080", "--bird-config", &file, "--bird-socket", &socket];
        segment.start_with(|_| flags.map(str::to_owned).to_vec());
    };
    let peer = |name: &str, address: &str| {
        json!({
            "apiVersion": "metallb.io/v1beta2", "kind": "BGPPeer",
            "metadata": {"namespace": "metallb-system", "name": name},
            "spec": {"myASN": 64500, "peerASN": 64501, "peerAddress": address},
        })
    };
    let has_session = |address: &str| {
        fs::read_to_string(&file).is_ok_and(|text| text.contains(&format!("neighbor {address} ")))
    };
    let (old, new) = (peer("old", "192.0.2.251"), peer("new", "192.0.2.252"));
    segment.server.put(old.clone());
    let waits = |segment: &Segment, what: &str, probe: &dyn Fn() -> bool| {
        let reached = wait_for(SOON, || probe().then_some(()));
        reached.unwrap_or_else(|| panic!("{what}: {}\n{}", routes(segment, 1), segment.logs()));
    };
    let has_route = |segment: &Segment| routes(segment, 1).contains(&format!("blackhole {VIP} "));
    start(&mut segment);
    waits(&segment, "the route and the session", &|| has_route(&segment) && has_session("192.0.2.251"));
    drop(segment.agents.remove(0));
    let mut service = segment.server.object("services", "default", "web").unwrap();
    let ports = std::mem::replace(&mut service["spec"]["ports"], "none".into());
    segment.server.put(service.clone());
    segment.server.delete(&old);
    segment.server.put(new);
    start(&mut segment);
    let status = |segment: &Segment| {
        ask(&segment.nodes[0], &segment.bpffs(1), &["status"])
            .map_or_else(|_| String::new(), |shown| String::from_utf8(shown.stdout).unwrap())
    };
    let kept = format!("route {VIP}/32: stays as an earlier agent left it");
    waits(&segment, "`status` names the route", &|| status(&segment).contains(&kept));
    // The unreadable Service affects only its own route, which stays as it was: the agent still replaces the session.
    waits(&segment, "the new session", &|| has_session("192.0.2.252") && !has_session("192.0.2.251"));
    assert!(has_route(&segment), "{}", segment.logs());
    service["spec"]["ports"] = ports;
    segment.server.put(service.clone());
    waits(&segment, "the Service is readable", &|| !status(&segment).contains(&kept));
    assert!(has_route(&segment), "{}", segment.logs());
    segment.server.delete(&service);
    waits(&segment, "the Service is gone", &|| !has_route(&segment));
}

/// The conditions that `lb-agent status` on node 1 lists; empty while no agent runs there.
fn problems(segment: &Segment) -> Vec<String> {
    let status = segment.json(1, &["status"]).unwrap_or_default();
    let problems = status["agent"]["problems"].as_array().cloned().unwrap_or_default();
    problems.iter().map(|problem| problem.as_str().unwrap().to_owned()).collect()
}

/// Whether `lb-agent status` on node 1 lists a condition that contains `part` and ends with `end`.
fn is_listed(segment: &Segment, part: &str, end: &str) -> bool {
    problems(segment).iter().any(|problem| problem.contains(part) && problem.ends_with(end))
}

/// An edit of an object for BGP that makes the object invalid.
struct Edit {
    valid: Value,
    invalid: Value,
    /// The field that is invalid.
    field: &'static str,
    /// Whether the object asks for routes.
    has_routes: bool,
}

/// A pool, a BGPAdvertisement and a BGPPeer.
fn edits() -> [Edit; 3] {
    let object = |kind: &str, version: &str, name: &str, spec: Value| {
        json!({
            "apiVersion": format!("metallb.io/{version}"), "kind": kind,
            "metadata": {"namespace": "metallb-system", "name": name}, "spec": spec,
        })
    };
    let pool = |range: &str| object("IPAddressPool", "v1beta1", "production", json!({"addresses": [range]}));
    let advertisement =
        |length: u8| object("BGPAdvertisement", "v1beta1", "all", json!({"aggregationLength": length}));
    let peer = |address: &str| {
        let (id, asn) = ("192.0.2.9", 64500);
        let spec = json!({"myASN": asn, "peerASN": 64501, "peerAddress": address, "routerID": id});
        object("BGPPeer", "v1beta2", "tor", spec)
    };
    let edit = |valid, invalid, field, has_routes| Edit { valid, invalid, field, has_routes };
    [
        edit(pool("192.0.2.100-192.0.2.109"), pool("192.0.2"), "spec.addresses[0]", true),
        edit(advertisement(32), advertisement(99), "spec.aggregationLength", true),
        edit(peer("192.0.2.251"), peer("tor"), "spec.peerAddress", false),
    ]
}

#[test]
fn object_for_bgp_that_an_edit_makes_invalid_withdraws_nothing_over_a_restart() {
    let mut segment = Segment::new(1);
    segment.fill();
    let edits = edits();
    edits.iter().for_each(|edit| segment.server.put(edit.valid.clone()));
    let [file, socket] = ["conf", "ctl"].map(|end| segment.folder.join(format!("bird.{end}")));
    let [to_file, to_socket] = [&file, &socket].map(|path| path.display().to_string());
    let flags = ["--announce-table", "1080", "--bird-config", &to_file, "--bird-socket", &to_socket];
    let flags = flags.map(str::to_owned).to_vec();
    let config = || fs::read_to_string(&file).unwrap_or_default();
    let has_route = |segment: &Segment| routes(segment, 1).contains(&format!("blackhole {VIP} "));
    let waits = |segment: &Segment, what: &str, probe: &dyn Fn() -> bool| {
        let reached = wait_for(SOON, || probe().then_some(()));
        reached.unwrap_or_else(|| panic!("{what}: {:#?}\n{}", problems(segment), segment.logs()));
    };
    let edit_and_restart = |segment: &mut Segment, edit: &Edit| {
        segment.server.put(edit.invalid.clone());
        let of_first: &Segment = segment;
        waits(of_first, "the agent names the object", &|| is_listed(of_first, edit.field, ""));
        drop(segment.agents.remove(0));
        segment.start_with(|_| flags.clone());
        // Unlike its predecessor, the new agent does not know the last good state of the object.
        let of_next: &Segment = segment;
        let is_left_out = || is_listed(of_next, edit.field, "that an earlier agent made from it stay");
        waits(of_next, "the next agent names the object", &is_left_out);
    };
    segment.start_with(|_| flags.clone());
    let has_session = || ["neighbor 192.0.2.251 ", "export filter"].iter().all(|it| config().contains(it));
    waits(&segment, "the route and the session", &|| has_route(&segment) && has_session());
    let before = config();
    let stays = format!("route {VIP}/32: stays as an earlier agent left it");
    for edit in &edits {
        edit_and_restart(&mut segment, edit);
        let names_route = || is_listed(&segment, &stays, "") == edit.has_routes;
        waits(&segment, "the next agent names the route", &names_route);
        // Waits longer than the agent takes to remove a route and to replace the file.
        sleep(Duration::from_secs(3));
        assert!(has_route(&segment), "{}: {}", edit.field, segment.logs());
        assert_eq!(config(), before, "{}", edit.field);
        segment.server.put(edit.valid.clone());
        let is_sound = || !is_listed(&segment, edit.field, "") && !is_listed(&segment, &stays, "");
        waits(&segment, "the object is valid again", &is_sound);
        assert!(has_route(&segment), "{}: {}", edit.field, segment.logs());
        assert_eq!(config(), before, "{}", edit.field);
    }
    // Once the invalid object is deleted, the agent removes the routes and the part of the session that it had kept for
    // that object.
    let advertisement = &edits[1];
    edit_and_restart(&mut segment, advertisement);
    assert!(has_route(&segment), "{}", segment.logs());
    segment.server.delete(&advertisement.invalid);
    let is_withdrawn = || !has_route(&segment) && !config().contains("BGPAdvertisement");
    waits(&segment, "nothing is announced", &is_withdrawn);
}

#[test]
fn pool_that_cannot_be_read_is_named_once_by_each_node_that_announces() {
    let mut segment = Segment::new(2);
    segment.fill();
    segment.server.put(json!({
        "apiVersion": "metallb.io/v1beta1", "kind": "IPAddressPool",
        "metadata": {"namespace": "metallb-system", "name": "invalid"}, "spec": {"addresses": ["192.0.2"]},
    }));
    let key = segment.folder.join("key").display().to_string();
    let at_layer_2 = ["--announce".to_owned(), format!("--announce-key-file={key}")];
    let by_bgp = ["--announce-table".to_owned(), "1080".to_owned()];
    segment.start_with(|number| if number == 1 { at_layer_2.to_vec() } else { by_bgp.to_vec() });
    for number in [1, 2] {
        let is_named = || {
            let status = segment.json(number, &["status"]).ok()?;
            let problems = status["agent"]["problems"].as_array()?;
            let of_pool = problems.iter().filter(|it| it.to_string().contains("spec.addresses[0]"));
            (of_pool.count() == 1).then_some(())
        };
        wait_for(SOON, is_named).unwrap_or_else(|| panic!("n{number} names no pool\n{}", segment.logs()));
    }
}

#[test]
fn nodes_share_an_address_as_advertisements_and_labels_say() {
    let mut segment = Segment::new(3);
    segment.fill();
    segment.start();
    assert_eq!(segment.owner("nothing is advertised", |number| number.is_none()), None);
    segment.advertise(&json!({}));
    let first = segment.owner("a node answers", |number| number.is_some()).unwrap();
    let to = SocketAddr::new(VIP.parse().unwrap(), 80);
    assert_eq!(ask_http(&segment.client, to).unwrap().server, format!("n{first}"));
    segment.wait_for_voters("n1 n2 n3");
    let first = segment.owner("the best node answers", |number| number.is_some()).unwrap();
    let list = segment.json(1, &["announce", "list"]).unwrap();
    assert_eq!((&list[0]["address"], &list[0]["pool"]), (&json!(VIP), &json!("production")));

    let excluded = json!({"node.kubernetes.io/exclude-from-external-load-balancers": ""});
    segment.server.put(node(first, excluded));
    let second = segment.owner("a node that is not excluded", |number| number.is_some_and(|is| is != first));
    let second = second.unwrap();
    segment.server.put(node(first, json!({"zone": "a"})));
    segment.advertise(&json!({"nodeSelectors": [{"matchLabels": {"zone": "a"}}]}));
    segment.owner("the selected node", |number| number == Some(first));
    segment.endpoints(&[second]);
    segment.owner("no node: the selected one has no endpoint", |number| number.is_none());
    segment.endpoints(&[first, second]);
    segment.owner("it has one again", |number| number == Some(first));
    segment.advertise(&json!({"interfaces": ["eth9"]}));
    segment.owner("no node has the interface", |number| number.is_none());
    // Another node gets a device `eth9`; the best candidate has none.
    let device =
        "link add eth9 link eth0 address 02:00:00:00:09:09 type macvlan mode bridge\nlink set eth9 up\n";
    segment.nodes[second - 1].ip(device).unwrap();
    let answers = || segment.arping().contains("02:00:00:00:09:09").then_some(());
    wait_for(SOON, answers).unwrap_or_else(|| panic!("n{second} has the interface\n{}", segment.logs()));
    segment.advertise(&json!({"interfaces": ["eth0", "eth9"]}));
    segment.owner("the nodes have one of the interfaces", |number| number.is_some());
}

#[test]
fn address_is_announced_without_an_api_server_and_by_nodes_that_come_and_go() {
    let mut segment = Segment::new(3);
    segment.fill();
    segment.advertise(&json!({}));
    segment.start();
    segment.owner("a node answers", |number| number.is_some());
    segment.wait_for_voters("n1 n2 n3");
    segment.server.stop();
    let owner = segment.owner("the API server is gone", |number| number.is_some()).unwrap();
    drop(segment.agents.remove(owner - 1));
    let next = segment.owner("another takes over without it", |number| number.is_some_and(|is| is != owner));
    segment.server.delete(&node(owner, json!({})));
    segment.server.listen();
    let left: Vec<String> =
        (1..=3).filter(|number| *number != owner).map(|number| format!("n{number}")).collect();
    segment.wait_for_voters(&left.join(" "));
    assert!(next.is_some());
    segment.owner("the others go on", |number| number.is_some_and(|is| is != owner));
}

#[test]
fn agent_that_does_not_know_the_services_takes_no_address_over() {
    let mut segment = Segment::announcing();
    let best = segment.best_node();
    segment.owner("the best node answers", |number| number == Some(best));
    drop(segment.agents.remove(best - 1));
    let is_another = |number: Option<usize>| number.is_some_and(|is| is != best);
    segment.owner("another takes over", is_another);
    segment.server.set_fault("endpointslices", Fault { held: true, ..Fault::default() });
    let agent = segment.agent(best, segment.flags());
    segment.agents.insert(best - 1, agent);
    let runs = wait_for(SOON, || segment.json(best, &["announce", "list"]).ok());
    runs.unwrap_or_else(|| panic!("the agent of n{best} does not run\n{}", segment.logs()));
    sleep(SETTLED);
    segment.owner("the best node waits for the EndpointSlices, so another one answers", is_another);
    segment.server.set_fault("endpointslices", Fault::default());
    segment.owner("the best node knows the Services", |number| number == Some(best));
}

#[test]
fn voters_that_were_deleted_or_replaced_return() {
    let segment = Segment::announcing();
    let object = || segment.server.object("configmaps", "default", "lb-agent-announce").unwrap_or_default();
    let generation = || object()["data"]["generation"].as_str().unwrap_or("0").parse::<u64>().unwrap();
    let written = |generation: &str| {
        json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"namespace": "default", "name": "lb-agent-announce"},
            "data": {"generation": generation, "voters": "n1"},
        })
    };
    for other in [Some("7"), Some("18446744073709551615"), Some("many"), None] {
        let before = generation();
        match other {
            Some(generation) => segment.server.put(written(generation)),
            None => segment.server.delete(&written("7")),
        }
        let is_restored = || {
            let data = object()["data"].clone();
            let generation = data["generation"].as_str().and_then(|text| text.parse::<u64>().ok());
            (data["voters"] == "n1 n2 n3" && generation == Some(before + 1)).then_some(())
        };
        wait_for(SOON, is_restored).unwrap_or_else(|| panic!("{other:?}: {}\n{}", object(), segment.logs()));
        segment.owner("a node answers", |number| number.is_some());
    }
}

/// Runs `lb-agent announce voters` on n3; returns whether it succeeds, and its output.
fn voters(segment: &Segment, arguments: &[&str]) -> (bool, String) {
    let mut command = segment.nodes[2].command(binary());
    command
        .args(["announce", "voters", "--kubeconfig"])
        .arg(segment.folder.join("kubeconfig"))
        .args(arguments);
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

/// The agents end, but their Nodes remain, for example because the DaemonSet's node selector no longer selects them.
#[test]
fn voters_whose_nodes_run_no_agent_any_more_are_replaced_by_command() {
    let mut segment = Segment::announcing();
    drop(segment.agents.drain(..2));
    segment.owner("one of three voters is no majority", |number| number.is_none());
    for (arguments, reason) in [
        (&["--replace"][..], "name Nodes that run no agent any more by --without-agent"),
        (&["--replace", "--without-agent", "n1"], "a majority of the voters has Nodes"),
        (&["--replace", "--without-agent", "n1,n9"], "n9 is no voter"),
    ] {
        let (is_done, text) = voters(&segment, arguments);
        assert!(!is_done && text.contains(reason), "{arguments:?}: {text}");
    }
    let (is_done, text) = voters(&segment, &["--replace", "--without-agent", "n1,n2"]);
    assert!(is_done, "{text}");
    segment.wait_for_voters("n3");
    segment.owner("the node that is left answers", |number| number == Some(3));
}

#[test]
fn voters_that_have_lost_their_majority_are_replaced_by_command() {
    let mut segment = Segment::announcing();
    let (is_done, text) = voters(&segment, &["--replace"]);
    assert!(!is_done && text.contains("a majority of the voters has Nodes"), "{text}");
    drop(segment.agents.drain(..2));
    (1..=2).for_each(|number| segment.server.delete(&node(number, json!({}))));
    segment.owner("one of three voters is no majority", |number| number.is_none());
    let status = || {
        let status = ask(&segment.nodes[2], &segment.bpffs(3), &["status"]).unwrap();
        let text = String::from_utf8(status.stdout).unwrap();
        text.contains("2 of the 3 voters on announcements have no Node any more (n1, n2)").then_some(())
    };
    wait_for(SOON, status).unwrap_or_else(|| panic!("the status names the lost voters\n{}", segment.logs()));
    let is_reported = |event: &Value| event["reason"] == "VotersLost" && event["regarding"]["name"] == "n3";
    let reported = || segment.server.events().iter().any(is_reported).then_some(());
    wait_for(SOON, reported).expect("an Event names the lost voters");
    let (_, text) = voters(&segment, &[]);
    assert!(text.contains("is gone") && text.contains("exists"), "{text}");
    let (is_done, text) = voters(&segment, &["--replace"]);
    assert!(is_done, "{text}");
    segment.wait_for_voters("n3");
    segment.owner("the node that is left answers", |number| number == Some(3));
}
