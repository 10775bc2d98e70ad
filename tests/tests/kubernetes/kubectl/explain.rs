//! Tests that `kubectl lb explain` agrees with real connections of Pods on two nodes with agents. Each part of the
//! answer of `explain` shows how one program handles a packet; the tests compare the part with what that program does.

use std::{fs, io, net::SocketAddr, process::Output};

use lb_tests::{
    agent::counted,
    client::{Answer, Connection, REFUSED, ask_http, ask_udp},
    cluster::{ClientLink, Cluster, HTTP_PORT, Pod, UDP_PORT},
    wait_for,
};
use serde_json::{Value, json};

use super::{SOON, linux_node, plugin_from, pod, rows};
use crate::{
    api_server::ApiServer,
    pod_exec::PodExec,
    running_agent::{Files, RunningAgent},
};

/// Address of the router, where the API server listens: both nodes reach it, as do users of the plugin.
const ROUTER: &str = "172.18.0.254";
/// The outcomes under which the programs count packets that they translate. On a node that leaves the packets of a
/// connection untouched, none of these counters rises.
const TRANSLATED: [&str; 6] = ["new_flow", "forward", "reply", "masquerade", "new_direct_flow", "direct"];

/// A Service of namespace `shop` in these tests. All these Services have a TCP port `http` and a UDP port `echo`.
struct Shop {
    name: &'static str,
    /// Last part of the Service's cluster IPs.
    number: u8,
    /// Names of the Pods that are the Service's backends.
    pods: &'static [&'static str],
    /// The `internalTrafficPolicy`.
    policy: &'static str,
}

/// `web` and `local` are served by a Pod on node 2, `local` only to clients on node 2. `empty` has no Pod.
const SHOPS: [Shop; 3] = [
    Shop { name: "web", number: 7, pods: &["pod3"], policy: "Cluster" },
    Shop { name: "empty", number: 8, pods: &[], policy: "Cluster" },
    Shop { name: "local", number: 9, pods: &["pod3"], policy: "Local" },
];

impl Shop {
    /// The cluster IPs.
    fn vips(&self) -> [String; 2] {
        [format!("10.96.0.{}", self.number), format!("fd00:10:96::{}", self.number)]
    }
}

/// The address family of the connections. Each Service has a cluster IP of each family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    /// The family of the first cluster IP, which `explain` uses by default.
    V4,
    /// The family that the tests select by `--ip-family`.
    V6,
}

impl Family {
    fn vip(self, shop: &Shop, port: u16) -> SocketAddr {
        let [v4, v6] = shop.vips();
        SocketAddr::new(if self == Self::V4 { v4 } else { v6 }.parse().unwrap(), port)
    }
}

/// The cluster, the API server, and an agent on each node. Agents are dropped first.
struct Site {
    family: Family,
    agents: Vec<RunningAgent>,
    server: ApiServer,
    cluster: Cluster,
}

impl Site {
    /// Starts the agents with these additional flags, and waits until pod1 and pod4 reach the Service `web`.
    fn start(family: Family, flags: &[&str]) -> Self {
        let cluster = Cluster::for_test(ClientLink::Lan).unwrap();
        let server = ApiServer::start_at(cluster.router.as_ref(), ROUTER.parse().unwrap());
        fs::write(cluster.folder().join("kubeconfig"), server.kubeconfig()).unwrap();
        let mut site = Self { family, agents: Vec::new(), server, cluster };
        site.put_objects();
        (1..=2).for_each(|number| site.start_agent(number, flags));
        for client in ["pod1", "pod4"] {
            let to = family.vip(&SHOPS[0], 80);
            let reached = || ask_and_close(site.pod(client), to).ok();
            wait_for(SOON, reached).unwrap_or_else(|| panic!("{client}\n{}", site.logs()));
        }
        site
    }

    fn put_objects(&self) {
        for number in 1..=2_u8 {
            let mut node = linux_node(number.into());
            let addresses = [format!("172.18.0.{number}"), format!("fd00:172:18::{number}")];
            node["status"]["addresses"] =
                addresses.iter().map(|address| json!({"type": "InternalIP", "address": address})).collect();
            self.server.put(node);
            self.server.put(pod(number.into()));
            let (netns, bpffs) = (self.cluster.node(number).clone(), self.cluster.bpffs(number));
            self.server.set_exec(&format!("lb-agent-{number}"), PodExec::Runs { netns, bpffs });
        }
        self.cluster.pods.iter().for_each(|pod| self.server.put(pod_object(pod)));
        for shop in &SHOPS {
            self.server.put(self.service(shop));
            ["IPv4", "IPv6"].into_iter().for_each(|family| self.server.put(self.slice(shop, family)));
        }
    }

    fn service(&self, shop: &Shop) -> Value {
        let vips = shop.vips();
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "shop", "name": shop.name},
            "spec": {
                "type": "ClusterIP", "clusterIP": vips[0], "clusterIPs": vips, "ipFamilyPolicy": "RequireDualStack",
                "internalTrafficPolicy": shop.policy,
                "ports": [
                    {"name": "http", "port": 80, "protocol": "TCP", "targetPort": HTTP_PORT},
                    {"name": "echo", "port": 53, "protocol": "UDP", "targetPort": UDP_PORT},
                ],
            },
        })
    }

    fn slice(&self, shop: &Shop, family: &str) -> Value {
        let endpoint = |name: &&str| {
            let pod = self.pod(name);
            let address = pod.addresses[usize::from(family == "IPv6")];
            json!({
                "addresses": [address], "nodeName": node_of(pod), "conditions": {"ready": true},
                "targetRef": {"kind": "Pod", "namespace": "shop", "name": pod.name},
            })
        };
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family,
            "metadata": {
                "namespace": "shop", "name": format!("{}-{}", shop.name, family.to_lowercase()),
                "labels": {"kubernetes.io/service-name": shop.name},
            },
            "ports": [
                {"name": "http", "port": HTTP_PORT, "protocol": "TCP"},
                {"name": "echo", "port": UDP_PORT, "protocol": "UDP"},
            ],
            "endpoints": shop.pods.iter().map(endpoint).collect::<Vec<_>>(),
        })
    }

    fn start_agent(&mut self, number: u8, flags: &[&str]) {
        let settings = self.cluster.agent_settings(number);
        let kubeconfig = self.cluster.folder().join("kubeconfig");
        let files = Files { kubeconfig: &kubeconfig, bpffs: &settings.bpffs, log: &settings.log };
        let cgroup = format!("--cgroup={}", settings.cgroup.unwrap().display());
        let arguments = flags.iter().copied().chain([&*cgroup]);
        let node = self.cluster.node(number);
        self.agents.push(RunningAgent::start(node, &format!("n{number}"), &files, arguments));
    }

    fn pod(&self, name: &str) -> &Pod {
        self.cluster.pod(name).unwrap()
    }

    fn logs(&self) -> String {
        let log = |number| fs::read_to_string(self.cluster.agent_settings(number).log).unwrap_or_default();
        (1..=2).map(|number| format!("---- n{number}\n{}", log(number))).collect()
    }

    /// Runs `explain` for a connection from a Pod to a port of a Service: a new connection, or with `client_port` the
    /// open connection from this port of the Pod.
    fn run(&self, client: &str, service: &str, client_port: Option<u16>) -> Output {
        let [pod, service] = [format!("pod/shop/{client}"), format!("svc/shop/{service}")];
        let port = client_port.map(|port| port.to_string());
        let mut arguments = vec!["explain", &pod, &service, "-o", "json"];
        arguments.extend(port.iter().flat_map(|port| ["--client-port", port]));
        if self.family == Family::V6 {
            arguments.extend(["--ip-family", "ipv6"]);
        }
        let router = self.cluster.router.as_ref().unwrap();
        plugin_from(router, self.cluster.folder(), &arguments)
    }

    fn explain(&self, client: &str, service: &str, client_port: Option<u16>) -> Vec<Value> {
        let output = self.run(client, service, client_port);
        assert!(output.status.success(), "{output:?}\n{}", self.logs());
        rows(&output)
    }

    /// Number of packets that the programs of a node have counted under an outcome.
    fn counted(&self, node: &str, outcome: &str) -> u64 {
        let number = node.trim_start_matches('n').parse().unwrap();
        counted(self.cluster.node(number), &self.cluster.bpffs(number), outcome).unwrap()
    }

    /// Asserts that, while `connect` runs, the node of each part counts packets under the outcome that the part names,
    /// and that a node that leaves the packets untouched translates none.
    fn assert_counted<T>(&self, parts: &[Value], connect: impl FnOnce() -> T) -> T {
        let count = |part: &Value| self.counted(part["node"].as_str().unwrap(), outcome(part));
        let translated = |node: &str| TRANSLATED.map(|outcome| self.counted(node, outcome));
        let untouched = |node: &str| {
            let mut of_node = parts.iter().filter(|part| part["node"] == node).peekable();
            of_node.peek().is_some() && of_node.all(|part| part["page"]["verdict"] == "untouched")
        };
        let quiet: Vec<&str> = ["n1", "n2"].into_iter().filter(|node| untouched(node)).collect();
        let before: Vec<u64> = parts.iter().map(count).collect();
        let quiet_before: Vec<_> = quiet.iter().map(|node| translated(node)).collect();
        let answer = connect();
        for (part, before) in parts.iter().zip(before) {
            assert!(count(part) > before, "{} never counts: {part:#}", outcome(part));
        }
        assert_eq!(quiet.iter().map(|node| translated(node)).collect::<Vec<_>>(), quiet_before, "{quiet:?}");
        answer
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.agents.clear();
        self.server.stop();
    }
}

/// The name under which the API server knows the node of a Pod of the testbed.
fn node_of(pod: &Pod) -> String {
    pod.node.replace("node", "n")
}

fn pod_object(pod: &Pod) -> Value {
    let ips: Vec<_> = pod.addresses.iter().map(|ip| json!({"ip": ip})).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "shop", "name": pod.name},
        "spec": {"nodeName": node_of(pod), "containers": []},
        "status": {"phase": "Running", "podIP": pod.addresses[0], "podIPs": ips},
    })
}

/// The outcome that a part names: that of the packet, or that of the flow that the packet begins.
fn outcome(part: &Value) -> &str {
    let page = &part["page"];
    page["outcome"].as_str().or_else(|| page["backends"][0]["outcome"].as_str()).unwrap()
}

/// The node and the verdict of each part, as `NODE VERDICT`.
fn verdicts(parts: &[Value]) -> Vec<String> {
    let word = |value: &Value| value.as_str().unwrap().to_owned();
    parts.iter().map(|part| format!("{} {}", word(&part["node"]), word(&part["page"]["verdict"]))).collect()
}

/// The only backend of a part whose packet begins a flow.
fn backend(part: &Value) -> SocketAddr {
    let backends = part["page"]["backends"].as_array().unwrap();
    assert_eq!(backends.len(), 1, "{part:#}");
    backends[0]["backend"].as_str().unwrap().parse().unwrap()
}

/// Like [`ask_http`], but returns only when both ends have closed the connection, so that a later count of packets
/// contains none of this connection.
fn ask_and_close(client: &Pod, to: SocketAddr) -> io::Result<Answer> {
    let mut connection = Connection::open(&client.netns, to)?;
    let answer = connection.ask()?;
    connection.close()?;
    Ok(answer)
}

fn kind(answer: io::Result<Answer>) -> io::ErrorKind {
    answer.expect_err("no answer").kind()
}

/// Checks a new connection to a backend on the other node, and a new connection to a backend on the client's node.
fn new_connections_agree(site: &Site) {
    let (pod1, pod3) = (site.pod("pod1"), site.pod("pod3"));
    let [tcp, udp] = [80, 53].map(|port| site.family.vip(&SHOPS[0], port));
    let connect_tcp = |client: &Pod| ask_and_close(client, tcp).unwrap();
    let connect_udp = |client: &Pod| ask_udp(&client.netns, udp, 100).unwrap();
    let expected = ["n1 begins", "n2 untouched"];

    let parts = site.explain("pod1", "web:http", None);
    assert_eq!(
        (verdicts(&parts), backend(&parts[0])),
        (expected.map(str::to_owned).into(), pod3.http(tcp.ip()))
    );
    assert_eq!(parts[0]["to"], json!(tcp));
    let answer = site.assert_counted(&parts, || connect_tcp(pod1));
    assert_eq!((&*answer.server, answer.seen), ("pod3", answer.local), "the backend sees the Pod");
    assert_eq!(parts[1]["from"], json!(answer.seen.ip()), "node 2 was asked about what arrives there");

    let parts = site.explain("pod1", "web:echo", None);
    assert_eq!(
        (verdicts(&parts), backend(&parts[0])),
        (expected.map(str::to_owned).into(), pod3.udp(udp.ip()))
    );
    let answer = site.assert_counted(&parts, || connect_udp(pod1));
    assert_eq!((&*answer.server, answer.seen), ("pod3", answer.local));

    let parts = site.explain("pod4", "web:http", None);
    assert_eq!(verdicts(&parts), ["n2 begins"], "client and backend are on node 2");
    let answer = site.assert_counted(&parts, || connect_tcp(site.pod("pod4")));
    assert_eq!(answer.server, "pod3");
}

/// Checks both directions of an open connection. Node 1 translates a reply where the reply leaves the node for the Pod.
fn open_connection_agrees(site: &Site) {
    let (client, vip) = (site.pod("pod1"), site.family.vip(&SHOPS[0], 80));
    let mut connection = Connection::open(&client.netns, vip).unwrap();
    let local = connection.ask().unwrap().local;
    let parts = site.explain("pod1", "web:http", Some(local.port()));
    let expected = ["n1 translated", "n2 untouched", "n2 untouched", "n1 untouched", "n1 translated"];
    assert_eq!(verdicts(&parts), expected, "{parts:#?}");
    let answer = site.assert_counted(&parts, || connection.ask().unwrap());
    assert_eq!((&*answer.server, answer.seen), ("pod3", local));

    let (to, reply) = (json!([local, backend_of(vip, site)]), json!([backend_of(vip, site), local]));
    let ends = |part: &Value| json!([part["from"], part["to"]]);
    assert_eq!(ends(&parts[0]), json!([local, vip]));
    assert_eq!(translated(&parts[0]), to);
    assert_eq!(
        parts[1..].iter().map(ends).collect::<Vec<_>>(),
        [&to, &reply, &reply, &reply].map(Clone::clone)
    );
    let stream = connection.stream();
    let of_socket = json!([stream.peer_addr().unwrap(), stream.local_addr().unwrap()]);
    assert_eq!(translated(&parts[4]), of_socket, "the reply has the addresses of the Pod's socket");
    assert_eq!((&parts[4]["page"]["at"], &parts[4]["page"]["device"]), (&json!("tc-egress"), &json!("pod1")));
}

/// The backend of the Service `web` in the family of `vip`.
fn backend_of(vip: SocketAddr, site: &Site) -> SocketAddr {
    site.pod("pod3").http(vip.ip())
}

/// Source and destination into which a program translates the packet of a part.
fn translated(part: &Value) -> Value {
    json!([part["page"]["ends"]["from"], part["page"]["ends"]["to"]])
}

/// Node 1 rejects packets to a Service without endpoints. It drops packets to a Service with the policy Local that has
/// endpoints only on the other node.
fn refused_connections_agree(site: &Site) {
    let client = &site.pod("pod1").netns;
    for (shop, verdict, tcp, udp) in [
        (&SHOPS[1], "rejected", REFUSED, REFUSED),
        (&SHOPS[2], "dropped", io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock),
    ] {
        for (port, name, error) in [(80, "http", tcp), (53, "echo", udp)] {
            let to = site.family.vip(shop, port);
            let parts = site.explain("pod1", &format!("{}:{name}", shop.name), None);
            assert_eq!(verdicts(&parts), [format!("n1 {verdict}")], "{parts:#?}");
            let connect = || if port == 80 { ask_http(client, to) } else { ask_udp(client, to, 100) };
            assert_eq!(kind(site.assert_counted(&parts, connect)), error, "{to}");
        }
    }
    // On the node of the endpoint, the Service with the policy Local answers.
    let parts = site.explain("pod4", "local:http", None);
    assert_eq!(verdicts(&parts), ["n2 begins"]);
    let to = site.family.vip(&SHOPS[2], 80);
    let answer = site.assert_counted(&parts, || ask_http(&site.pod("pod4").netns, to).unwrap());
    assert_eq!(answer.server, "pod3");
}

fn verdicts_agree(family: Family) {
    let site = Site::start(family, &[]);
    new_connections_agree(&site);
    open_connection_agrees(&site);
    refused_connections_agree(&site);
}

#[test]
fn kubectl_explain_agrees_with_real_connections_over_ipv4() {
    verdicts_agree(Family::V4);
}

#[test]
fn kubectl_explain_agrees_with_real_connections_over_ipv6() {
    verdicts_agree(Family::V6);
}

/// Node 1 masquerades the Pod, so node 2 sees node 1 as the client.
fn masqueraded_connection_agrees(site: &Site, node1: &str) {
    let (client, vip) = (site.pod("pod1"), site.family.vip(&SHOPS[0], 80));
    let parts = site.explain("pod1", "web:http", None);
    assert_eq!(verdicts(&parts), ["n1 begins", "n2 untouched"]);
    assert_eq!(parts[1]["from"], node1, "a packet of the node arrives");
    let mut connection = site.assert_counted(&parts, || Connection::open(&client.netns, vip).unwrap());
    let Answer { server, seen, local } = connection.ask().unwrap();
    assert_eq!((server.as_str(), seen.ip().to_string().as_str()), ("pod3", node1));

    let parts = site.explain("pod1", "web:http", Some(local.port()));
    let n1 = |verdict: &str| format!("n1 {verdict}");
    let n2 = || "n2 untouched".to_owned();
    let (there, back) =
        ([n1("translated"), n1("translated"), n2()], [n2(), n1("translated"), n1("translated")]);
    assert_eq!(verdicts(&parts), [there, back].concat(), "{parts:#?}");
    site.assert_counted(&parts, || connection.ask().unwrap());
    let backend = backend_of(vip, site);
    let [first, leaves, arrives, .., from_node, to_pod] = &parts[..] else { panic!("{parts:#?}") };
    // The program at the Pod's device already replaces the source port; the program at `eth0` then replaces the source
    // address.
    let masqueraded = SocketAddr::new(local.ip(), seen.port());
    assert_eq!(translated(first), json!([masqueraded, backend]));
    assert_eq!((translated(leaves), &leaves["page"]["device"]), (json!([seen, backend]), &json!("eth0")));
    assert_eq!(arrives["from"], json!(seen), "the server sees what node 2 was asked about");
    assert_eq!((&from_node["to"], translated(from_node)), (&json!(seen), json!([backend, masqueraded])));
    assert_eq!(translated(to_pod), json!([vip, local]), "the reply has the addresses of the Pod's socket");
}

#[test]
fn kubectl_explain_agrees_with_masqueraded_connections() {
    let mut site = Site::start(Family::V4, &["--masquerade-all"]);
    masqueraded_connection_agrees(&site, "172.18.0.1");
    site.family = Family::V6;
    masqueraded_connection_agrees(&site, "fd00:172:18::1");
}
