//! The move of a node from kube-proxy to the agent by a label, and back, with the commands of `deploy/README.md`.
//!
//! The API server is the mock. The tests play the DaemonSet controller and the kubelet. Instead of running kube-proxy,
//! they write the rules of kube-proxy and listen on its port. The tests run the agent in the container that the
//! rendered chart asks for.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use lb_tests::{
    agent::{ask, binary, run},
    cleanup::Cleanup,
    cluster::{CLIENT, ClientLink, Cluster as Machines, HTTP_PORT, UDP_PORT},
    container::{Container, setpriv},
    kube_proxy::{self, Port, Service, iptables, nftables},
    netns::Netns,
    skip,
    traffic::{Kind, Traffic},
    wait_for,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{api_server::ApiServer, bed::LIMIT, cluster::Cluster};

const README: &str = include_str!("../../../deploy/README.md");
/// The manifests that Helm installs by the command of `deploy/README.md`.
const RENDERED: &str = include_str!("../../../deploy/lint/migration.yaml");
/// The ConfigMap and the DaemonSet that kubeadm creates for kube-proxy.
const OF_KUBEADM: &str = include_str!("../../../lb-agent/src/config/testdata/kubeadm-objects.yaml");

const CLUSTER_CIDR: [&str; 2] = ["10.244.0.0/16", "fd00:10:244::/48"];
const VIPS: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10)), IpAddr::V6(Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 10))];
/// The pods behind the Service: one on each node.
const PODS: [&str; 2] = ["pod2", "pod3"];
static PORTS: [Port; 2] = [
    Port { protocol: "tcp", port: 80, target: HTTP_PORT, node_port: 0 },
    Port { protocol: "udp", port: 53, target: UDP_PORT, node_port: 0 },
];

/// The text of `deploy/README.md` between the first `before` and the next `after`.
fn documented(before: &str, after: &str) -> &'static str {
    let (_, rest) = README.split_once(before).unwrap_or_else(|| panic!("no {before:?} in deploy/README.md"));
    rest.split_once(after).unwrap().0
}

/// The arguments of lb-agent in a command of `deploy/README.md`.
fn documented_arguments(before: &str, after: &str) -> Vec<&'static str> {
    documented(before, after).split(' ').collect()
}

/// The object of this kind in a file of YAML documents.
fn object(file: &str, kind: &str) -> Value {
    let documents = file.split("\n---\n").map(|document| serde_saphyr::from_str::<Value>(document).unwrap());
    documents.into_iter().find(|document| document["kind"] == kind).unwrap()
}

fn node(name: &str, system: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/os": system, "kubernetes.io/hostname": name}},
    })
}

/// The API server of a kubeadm cluster, and a client that also reaches a server that listens in a namespace.
struct Api {
    server: ApiServer,
    client: Cluster,
}

impl Api {
    /// Starts a server in `netns`, and creates these Nodes and the DaemonSet of kube-proxy. Then patches kube-proxy and
    /// installs the chart's DaemonSet, as `deploy/README.md` says.
    fn prepared(netns: Option<&Netns>, nodes: &[Value]) -> Self {
        let server = ApiServer::start(netns);
        let kubeconfig = server.kubeconfig();
        let client = match netns {
            Some(netns) => Cluster::inside(&kubeconfig, netns),
            None => Cluster::outside(&kubeconfig),
        };
        let kube_proxy = object(OF_KUBEADM, "DaemonSet");
        nodes.iter().chain([&kube_proxy]).for_each(|object| client.apply(object));
        let api = Self { server, client };
        assert!(nodes.iter().all(|node| api.runs("kube-proxy", node) == is_linux(node)));
        let patch = documented("patch daemonset kube-proxy --patch '", "'");
        api.client.patch(&kube_proxy, serde_json::from_str(patch).unwrap());
        api.client.apply(&object(RENDERED, "DaemonSet"));
        api
    }

    /// Changes a label of a node by the argument of `kubectl label`: `NAME=VALUE`, or `NAME-` to remove it.
    fn label(&self, node: &Value, change: &str) {
        let (name, value) = match change.split_once('=') {
            Some((name, value)) => (name, Value::from(value)),
            None => (change.strip_suffix('-').unwrap(), Value::Null),
        };
        self.client.patch(node, json!({"metadata": {"labels": {name: value}}}));
    }

    /// Whether the DaemonSet with this name runs a Pod on the node.
    fn runs(&self, daemon_set: &str, node: &Value) -> bool {
        let name = node["metadata"]["name"].as_str().unwrap();
        let daemon_set = self.server.object("daemonsets", "kube-system", daemon_set).unwrap();
        fits(&daemon_set["spec"]["template"]["spec"], &self.server.object("nodes", "", name).unwrap())
    }
}

fn is_linux(node: &Value) -> bool {
    node["metadata"]["labels"]["kubernetes.io/os"] == "linux"
}

/// Whether node selector and required node affinity of a Pod allow a node.
fn fits(pod: &Value, node: &Value) -> bool {
    let labels = &node["metadata"]["labels"];
    let mut selector = pod["nodeSelector"].as_object().into_iter().flatten();
    let terms = &pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
    // A node fits if it has all labels of the selector and fulfils one of the terms.
    selector.all(|(label, value)| labels[label] == *value)
        && terms.as_array().is_none_or(|terms| terms.iter().any(|term| holds(term, labels)))
}

/// Whether all expressions of a term of node affinity hold for labels.
fn holds(term: &Value, labels: &Value) -> bool {
    let fields: Vec<_> = term.as_object().unwrap().keys().collect();
    assert_eq!(fields, ["matchExpressions"], "the only field that this function knows");
    term["matchExpressions"].as_array().unwrap().iter().all(|expression| {
        let label = labels.get(expression["key"].as_str().unwrap());
        let is_in = || expression["values"].as_array().unwrap().contains(label.unwrap_or(&Value::Null));
        match expression["operator"].as_str().unwrap() {
            "Exists" => label.is_some(),
            "DoesNotExist" => label.is_none(),
            "In" => is_in(),
            "NotIn" => !is_in(),
            other => panic!("unknown operator {other}"),
        }
    })
}

#[test]
fn label_moves_only_its_node_from_kube_proxy_to_lb_agent_and_back() {
    let nodes = [node("a", "linux"), node("b", "linux"), node("w", "windows")];
    let api = Api::prepared(None, &nodes);
    let runs = |daemon_set| nodes.each_ref().map(|node| api.runs(daemon_set, node));
    assert_eq!((runs("kube-proxy"), runs("lb-agent")), ([true, true, false], [false; 3]));
    // Moves the node and moves it back, twice. Only this label of the node changes.
    for _ in 0..2 {
        api.label(&nodes[0], documented("kubectl label node NODE ", " "));
        assert_eq!((runs("kube-proxy"), runs("lb-agent")), ([false, true, false], [true, false, false]));
        api.label(&nodes[0], documented("**Back.** `kubectl label node NODE ", "`"));
        assert_eq!((runs("kube-proxy"), runs("lb-agent")), ([true, true, false], [false; 3]));
    }
}

/// The mode of kube-proxy, which decides what rules the tests write in its place.
#[derive(Clone, Copy)]
enum Mode {
    Iptables,
    Nftables,
}

impl Mode {
    /// Writes the rules for the Service `web` in both families.
    fn write(self, machines: &Machines) {
        for (vip, cluster_cidr) in VIPS.into_iter().zip(CLUSTER_CIDR) {
            let service = Service {
                name: "web".to_owned(),
                cluster_ip: vip,
                load_balancer: None,
                ports: &PORTS,
                endpoints: PODS.map(|name| machines.pod(name).unwrap().address(vip)).to_vec(),
                is_local: false,
            };
            let is_ipv6 = vip.is_ipv6();
            let service_cidr = if is_ipv6 { "fd00:10:96::/112" } else { "10.96.0.0/12" };
            let services = &[service];
            let cluster =
                kube_proxy::Cluster { is_ipv6, cluster_cidr, service_cidr, node_addresses: &[], services };
            let restore = if is_ipv6 { "ip6tables-restore" } else { "iptables-restore" };
            let node = &machines.node1;
            match self {
                Self::Iptables => {
                    node.feed(restore, &["--noflush"], &with_kept_ports(&iptables::rules(&cluster)))
                }
                Self::Nftables => {
                    node.feed("nft", &["-f", "-"], &with_kept_ports(&nftables::rules(&cluster)))
                }
            }
            .unwrap();
        }
    }
}

/// Rules of kube-proxy that masquerade without random ports, like those of a node whose iptables has no
/// `--random-fully`. netfilter then keeps the port of the node's socket, which is never one of the agent's
/// `--masquerade-ports`. A random port could be one that the agent has given to an external client, because the agent
/// does not see the ports that netfilter chooses for connections of the node (docs/datapath.md).
fn with_kept_ports(rules: &str) -> String {
    rules.replace(" --random-fully", "").replace(" fully-random", "")
}

/// Two nodes with the Service `web`. Tests move the first, node1, from kube-proxy to the agent and back. The API server
/// runs on node1; `agent` and `kube_proxy` stand for the Pods that a kubelet would run there.
struct Site {
    agent: Option<(Child, Cleanup)>,
    /// The port that kube-proxy listens on while it runs.
    kube_proxy: Option<TcpListener>,
    mode: Mode,
    api: Api,
    nodes: [Value; 2],
    machines: Machines,
}

impl Site {
    fn new(mode: Mode) -> Self {
        let machines = Machines::for_test(ClientLink::Ethernet).unwrap();
        // netfilter translates packets of the node's own processes only after routing, so the VIPs need a route.
        let [v4, v6] = CLIENT;
        machines.node1.ip(&format!("route add default via {v4}\nroute add default via {v6}\n")).unwrap();
        let nodes = ["node1", "node2"].map(|name| node(name, "linux"));
        let api = Api::prepared(Some(&machines.node1), &nodes);
        let mut site = Self { agent: None, kube_proxy: None, mode, api, nodes, machines };
        site.put_masquerading();
        site.put_service();
        let bpffs = site.machines.bpffs(1);
        fs::create_dir_all(&bpffs).unwrap();
        fs::create_dir_all(site.machines.folder().join("run")).unwrap();
        run(Command::new("mount").args(["-t", "bpf", "-o", "mode=0700", "none"]).arg(&bpffs)).unwrap();
        site.write_config_map();
        site.reconcile();
        site
    }

    /// Writes NAT rules for pods of the node, as CNI plugins do. These rules stay when the agent removes the rules of
    /// kube-proxy: in a namespace without NAT rules, the kernel tracks and translates no connection, not even
    /// established connections.
    fn put_masquerading(&self) {
        let pods = ["10.244.1.0/24", "fd00:10:244:1::/64"];
        let families = ["iptables-restore", "ip6tables-restore"].into_iter().zip(pods).zip(CLUSTER_CIDR);
        for ((restore, pods), cluster) in families {
            let rule = format!("-A POSTROUTING -s {pods} ! -d {cluster} -j MASQUERADE");
            let rules = format!("*nat\n:POSTROUTING ACCEPT [0:0]\n{rule}\nCOMMIT\n");
            self.machines.node1.feed(restore, &["--noflush"], &rules).unwrap();
        }
    }

    fn put_service(&self) {
        let ports = |field: &str| {
            let port = |port: &Port| {
                let number = if field == "targetPort" { port.port } else { port.target };
                json!({"name": port.protocol, "protocol": port.protocol.to_uppercase(), "port": number})
            };
            PORTS.iter().map(port).collect::<Vec<_>>()
        };
        self.api.server.put(json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "default", "name": "web"},
            "spec": {
                "type": "ClusterIP", "clusterIP": VIPS[0], "clusterIPs": VIPS,
                "ipFamilies": ["IPv4", "IPv6"], "ports": ports("targetPort"),
            },
        }));
        for (vip, family) in VIPS.into_iter().zip(["IPv4", "IPv6"]) {
            let endpoint = |name: &str| {
                let pod = self.machines.pod(name).unwrap();
                json!({"addresses": [pod.address(vip)], "nodeName": pod.node, "conditions": {"ready": true}})
            };
            self.api.server.put(json!({
                "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
                "metadata": {
                    "namespace": "default", "name": format!("web-{}", family.to_lowercase()),
                    "labels": {"kubernetes.io/service-name": "web"},
                },
                "addressType": family, "ports": ports("port"), "endpoints": PODS.map(endpoint),
            }));
        }
    }

    /// Writes the ConfigMap of kubeadm and the token of the Pod's service account to files, as the kubelet does. The
    /// ConfigMap names the test's API server in place of kubeadm's. It names no CA certificate, because the test's API
    /// server uses plain HTTP.
    fn write_config_map(&self) {
        let [config, account] = ["config", "account"].map(|name| self.machines.folder().join(name));
        fs::create_dir_all(&config).unwrap();
        fs::create_dir_all(&account).unwrap();
        fs::write(account.join("token"), "a token").unwrap();
        let kubeconfig: Value = serde_json::from_str(&self.api.server.kubeconfig()).unwrap();
        let server = kubeconfig["clusters"][0]["cluster"]["server"].as_str().unwrap();
        for (key, text) in object(OF_KUBEADM, "ConfigMap")["data"].as_object().unwrap() {
            let text = text.as_str().unwrap().replace("https://control-plane.example:6443", server);
            let text = text.replace(
                &format!("clusterCIDR: {}", CLUSTER_CIDR[0]),
                &format!("clusterCIDR: {}", CLUSTER_CIDR.join(",")),
            );
            let lines = text.lines().filter(|line| !line.contains("certificate-authority"));
            fs::write(config.join(key), lines.collect::<Vec<_>>().join("\n")).unwrap();
        }
    }

    /// Ends the Pods on node1 that the DaemonSets no longer ask for, then starts those that they newly ask for.
    fn reconcile(&mut self) {
        let [kube_proxy, agent] = ["kube-proxy", "lb-agent"].map(|name| self.api.runs(name, &self.nodes[0]));
        if !kube_proxy {
            self.kube_proxy = None;
        }
        if !agent && let Some((child, cleanup)) = self.agent.take() {
            end(child);
            cleanup.disarm();
        }
        if kube_proxy && self.kube_proxy.is_none() {
            self.mode.write(&self.machines);
            let bind = || TcpListener::bind((Ipv4Addr::UNSPECIFIED, 10_256));
            self.kube_proxy = Some(self.machines.node1.run(bind).unwrap());
        }
        if agent && self.agent.is_none() {
            self.start_agent();
        }
    }

    /// The container of the agent's Pod, and the folders of its volumes.
    fn container(&self) -> (Container, Vec<(&'static str, PathBuf)>) {
        let mut daemon_set = self.api.server.object("daemonsets", "kube-system", "lb-agent").unwrap();
        // The API server adds the service account to each Pod.
        let pod = &mut daemon_set["spec"]["template"]["spec"];
        let account = "kube-api-access";
        pod["volumes"].as_array_mut().unwrap().push(json!({"name": account, "projected": {}}));
        let path = "/var/run/secrets/kubernetes.io/serviceaccount";
        let mounts = pod["containers"][0]["volumeMounts"].as_array_mut().unwrap();
        mounts.push(json!({"name": account, "mountPath": path, "readOnly": true}));
        let folder = self.machines.folder();
        let volumes = vec![
            ("config", folder.join("config")),
            (account, folder.join("account")),
            ("bpffs", self.machines.bpffs(1)),
            ("cgroup", self.machines.cgroup(1).unwrap().path().to_owned()),
            ("run", folder.join("run")),
        ];
        (Container::new(&daemon_set), volumes)
    }

    /// Starts the container of the agent's Pod on node1, and waits until its readiness probe succeeds.
    fn start_agent(&mut self) {
        let (container, volumes) = self.container();
        let node = &self.machines.node1;
        let starter = container.starter(&volumes).unwrap();
        let log = File::options().create(true).append(true).open(self.log_path()).unwrap();
        let mut command = node.command(&starter[0]);
        command.args(&starter[1..]).arg(binary()).args(container.arguments());
        command.envs(container.variables("node1").unwrap());
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let (child, cleanup) = Cleanup::spawn(&mut command).unwrap();
        let pid = child.id();
        self.agent = Some((child, cleanup));
        let is_ready = || {
            let mut probe = container.exec(node, pid, &setpriv(&container.capabilities()));
            probe.arg(binary()).args(container.probe("readinessProbe"));
            run(probe.envs(container.variables("node1").unwrap())).ok()
        };
        assert!(wait_for(LIMIT, is_ready).is_some(), "not ready; its log:\n{}", self.log());
    }

    fn log_path(&self) -> PathBuf {
        self.machines.folder().join("agent.log")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Traffic of every kind and family to `web` from these namespaces.
    fn traffic(&self, sources: &[&Netns]) -> Traffic {
        let mut clients = Vec::new();
        for (netns, vip) in sources.iter().flat_map(|netns| VIPS.map(|vip| (*netns, vip))) {
            clients.extend(Kind::TCP.map(|kind| (netns, kind, SocketAddr::new(vip, 80))));
            clients.extend(Kind::UDP.map(|kind| (netns, kind, SocketAddr::new(vip, 53))));
        }
        Traffic::start(clients).unwrap()
    }

    /// Traffic of a pod of the node and of an external client.
    fn traffic_of_others(&self) -> Traffic {
        self.traffic(&[&self.machines.pod("pod1").unwrap().netns, &self.machines.client])
    }

    /// The entries at the top of node1's BPF file system.
    fn pinned(&self) -> BTreeSet<PathBuf> {
        let entries = fs::read_dir(self.machines.bpffs(1)).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    /// Runs a command of lb-agent on node1, outside of the container.
    fn ask(&self, arguments: &[&str]) {
        ask(&self.machines.node1, &self.machines.bpffs(1), arguments).unwrap();
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some((mut child, cleanup)) = self.agent.take() {
            _ = child.kill();
            _ = child.wait();
            cleanup.disarm();
        }
        self.api.server.stop();
        if std::thread::panicking() {
            eprintln!("---- log of the agent ----\n{}----", self.log());
        }
    }
}

/// Ends a process as the kubelet does, and waits for it.
fn end(mut child: Child) {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
    let status = wait_for(LIMIT, || child.try_wait().unwrap());
    assert!(status.is_some_and(|status| status.success()), "{status:?}");
}

/// Stops clients after some more transactions, and asserts that each client failed at most twice. A client may lose
/// the connection that was open when the translation passed from kube-proxy's rules to the agent's programs or back. On
/// a busy machine, a client may also lose a connection that it opened while only some devices had programs.
#[track_caller]
fn assert_at_most_two_failures_each(traffic: Traffic) {
    traffic.progresses().unwrap();
    let report = traffic.stop();
    assert!(report.0.values().all(|tally| tally.failures <= 2), "{report}");
    println!("{} transactions, {} failures", report.transactions(), report.failures());
}

/// Moves node1 from kube-proxy to the agent and back. Traffic of the node's own processes must continue meanwhile.
fn node_moves_and_comes_back(mode: Mode) {
    if ["iptables-restore", "nft"].iter().any(|tool| Command::new(tool).arg("-V").output().is_err()) {
        return skip::whole("there is no iptables or no nft");
    }
    let mut site = Site::new(mode);
    let node1 = site.nodes[0].clone();
    let before = site.pinned();
    let of_node = site.traffic(&[&site.machines.node1]);

    let others = site.traffic_of_others();
    site.api.label(&node1, documented("kubectl label node NODE ", " "));
    site.reconcile();
    assert!(site.agent.is_some() && site.kube_proxy.is_none() && site.pinned() != before);
    assert_at_most_two_failures_each(others);

    let others = site.traffic_of_others();
    site.ask(&documented_arguments("or run `lb-agent ", "`"));
    for traffic in [&of_node, &others] {
        traffic.progresses().unwrap();
    }

    site.api.label(&node1, documented("**Back.** `kubectl label node NODE ", "`"));
    site.reconcile();
    assert!(site.agent.is_none() && site.kube_proxy.is_some());
    others.progresses().unwrap();
    others.stop().assert_unharmed();

    let others = site.traffic_of_others();
    let arguments = documented_arguments("/usr/local/bin/lb-agent ", "\n");
    let [cleanup @ .., "--bpffs", "/host/sys/fs/bpf"] = &arguments[..] else { panic!("{arguments:?}") };
    site.ask(cleanup);
    assert_eq!(site.pinned(), before, "the data plane is gone");
    assert_at_most_two_failures_each(others);

    let others = site.traffic_of_others();
    others.progresses().unwrap();
    others.stop().assert_unharmed();
    of_node.progresses().unwrap();
    of_node.stop().assert_unharmed();
}

#[test]
fn node_moves_from_kube_proxy_in_mode_iptables_and_comes_back() {
    node_moves_and_comes_back(Mode::Iptables);
}

#[test]
fn node_moves_from_kube_proxy_in_mode_nftables_and_comes_back() {
    node_moves_and_comes_back(Mode::Nftables);
}
