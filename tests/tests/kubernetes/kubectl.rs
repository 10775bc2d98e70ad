//! `kubectl lb`: the plugin asks the agents of two nodes through the API server's `exec`.

use std::{
    fs::{self, File},
    net::IpAddr,
    path::PathBuf,
    process::{Child, Output, Stdio},
    time::Duration,
};

use lb_tests::{
    agent::{ask, binary},
    cleanup::{self, Cleanup, Resource},
    lan::Lan,
    netns::{self, Netns},
    wait_for,
};
use serde_json::{Value, json};

use crate::{api_server::ApiServer, pod_exec::PodExec};

const SERVER: &str = "192.0.2.250";
/// Agents load their programs first, which takes seconds on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// Two nodes and the API server on one bridge, and a user beside the API server.
struct Clusters {
    agents: Vec<(Child, Cleanup)>,
    server: ApiServer,
    nodes: Vec<Netns>,
    lan: Lan,
    folder: PathBuf,
    _cleanup: Cleanup,
}

impl Clusters {
    fn new() -> Self {
        cleanup::on_interrupt();
        cleanup::remove_stale().unwrap();
        let prefix = netns::unique_prefix();
        let create = |name: &str| Netns::create(&format!("{prefix}-{name}")).unwrap();
        let lan = Lan::new(create("lan")).unwrap();
        lan.bridge.ip(&format!("address add {SERVER}/24 dev br0\n")).unwrap();
        let nodes: Vec<Netns> = (1..=2).map(|number| create(&format!("n{number}"))).collect();
        for (number, node) in (1..).zip(&nodes) {
            lan.attach(node, number, &[format!("192.0.2.{number}/24")]).unwrap();
        }
        let folder = std::env::temp_dir().join(&prefix);
        let cleanup = Cleanup::of(Resource::Folder(folder.clone()));
        fs::create_dir_all(&folder).unwrap();
        let server = ApiServer::start_at(Some(&lan.bridge), SERVER.parse::<IpAddr>().unwrap());
        fs::write(folder.join("kubeconfig"), server.kubeconfig()).unwrap();
        Self { agents: Vec::new(), server, nodes, lan, folder, _cleanup: cleanup }
    }

    /// Creates the Nodes and the agents' Pods, and starts the agents.
    fn with_agents() -> Self {
        let mut clusters = Self::new();
        for number in 1..=clusters.nodes.len() {
            clusters.server.put(node(number));
            clusters.server.put(pod(number));
            let (netns, bpffs) = (clusters.nodes[number - 1].clone(), clusters.bpffs(number));
            clusters.server.set_exec(&format!("lb-agent-{number}"), PodExec::Runs { netns, bpffs });
            clusters.start(number);
        }
        for number in 1..=clusters.nodes.len() {
            let is_synchronised = || {
                let output =
                    ask(&clusters.nodes[number - 1], &clusters.bpffs(number), &["status", "-o", "json"])
                        .ok()?;
                let status: Value = serde_json::from_slice(&output.stdout).ok()?;
                (status["agent"]["synchronised"] == true).then_some(())
            };
            wait_for(SOON, is_synchronised).unwrap_or_else(|| panic!("n{number}: {}", clusters.log(number)));
        }
        clusters
    }

    fn start(&mut self, number: usize) {
        let log = File::create(self.folder.join(format!("log-{number}"))).unwrap();
        let mut command = self.nodes[number - 1].command(binary());
        command.arg("run").arg("--kubeconfig").arg(self.folder.join("kubeconfig"));
        command.arg("--bpffs").arg(self.bpffs(number)).args(["--node-name", &format!("n{number}")]);
        command.args(["--socket-lb", "off", "--wire-device", "eth*"]);
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        self.agents.push(Cleanup::spawn(&mut command).unwrap());
    }

    fn bpffs(&self, number: usize) -> PathBuf {
        self.folder.join(format!("bpf-{number}"))
    }

    fn log(&self, number: usize) -> String {
        fs::read_to_string(self.folder.join(format!("log-{number}"))).unwrap()
    }

    /// Runs the plugin under the name by which kubectl finds it.
    fn plugin(&self, arguments: &[&str]) -> Output {
        let link = self.folder.join("kubectl-lb");
        if !link.exists() {
            std::os::unix::fs::symlink(binary(), &link).unwrap();
        }
        let mut command = self.lan.bridge.command(link);
        command.arg("--kubeconfig").arg(self.folder.join("kubeconfig")).args(arguments).output().unwrap()
    }
}

impl Drop for Clusters {
    fn drop(&mut self) {
        for (mut child, cleanup) in self.agents.drain(..) {
            child.kill().unwrap();
            child.wait().unwrap();
            cleanup.disarm();
        }
        self.server.stop();
    }
}

fn node(number: usize) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": format!("n{number}"), "labels": {"kubernetes.io/os": "linux"}},
        "status": {
            "addresses": [{"type": "InternalIP", "address": format!("192.0.2.{number}")}],
            "nodeInfo": {
                "architecture": "", "bootID": "", "containerRuntimeVersion": "", "kernelVersion": "6.1.0-test",
                "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "", "operatingSystem": "linux",
                "osImage": "", "systemUUID": "",
            },
        },
    })
}

/// The Pod of the agent of a node, with the labels of the chart.
fn pod(number: usize) -> Value {
    let labels =
        json!({"app.kubernetes.io/name": "lb-agent", "app.kubernetes.io/component": "service-proxy"});
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": "kube-system", "name": format!("lb-agent-{number}"), "labels": labels},
        "spec": {"nodeName": format!("n{number}"), "containers": [{"name": "lb-agent"}]},
        "status": {"phase": "Running"},
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The nodes in the JSON of `status`, in order.
fn rows(output: &Output) -> Vec<Value> {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn kubectl_status_shows_all_nodes_and_those_that_do_not_answer_first() {
    let clusters = Clusters::with_agents();
    let output = clusters.plugin(&["status", "-o", "json"]);
    assert!(output.status.success(), "{output:?}");
    let all = rows(&output);
    assert_eq!(all.len(), 2);
    for row in &all {
        assert_eq!((&row["version"], &row["kernel"]), (&json!("0.1.0"), &json!("6.1.0-test")), "{row}");
        assert!(
            row["lastSync"].is_string() && row["conditions"].is_array() && row["error"].is_null(),
            "{row}"
        );
    }

    clusters.server.set_exec("lb-agent-2", PodExec::Silent);
    let output = clusters.plugin(&["status", "--timeout", "3"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let (table, errors) = (text(&output.stdout), text(&output.stderr));
    let lines: Vec<&str> = table.lines().collect();
    assert!(
        lines[0].starts_with("NODE") && lines[1].starts_with("n2") && lines[1].ends_with("no answer"),
        "{table}"
    );
    assert!(lines[2].starts_with("n1") && lines[2].contains("0.1.0"), "{table}");
    let error = "error: 1 of 2 nodes have not answered\n  n2: Pod lb-agent-2 has not answered within 3 s";
    assert!(errors.starts_with(error), "{errors}");

    // A command that fails shows its own error.
    let (netns, bpffs) = (clusters.nodes[1].clone(), clusters.folder.join("nothing"));
    clusters.server.set_exec("lb-agent-2", PodExec::Runs { netns, bpffs });
    let errors = text(&clusters.plugin(&["status"]).stderr);
    assert!(errors.contains("n2: `lb-agent status -o json` has failed in Pod lb-agent-2: "), "{errors}");
}

#[test]
fn kubectl_names_missing_rights_and_missing_pods() {
    let clusters = Clusters::new();
    let fails = |arguments: &[&str]| {
        let output = clusters.plugin(arguments);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        (text(&output.stdout), text(&output.stderr))
    };
    let (table, errors) = fails(&["status"]);
    assert!(
        table.is_empty() && errors.contains("no Pod in namespace kube-system has the labels"),
        "{errors}"
    );

    (1..=2).for_each(|number| clusters.server.put(node(number)));
    clusters.server.put(pod(1));
    clusters.server.set_exec("lb-agent-1", PodExec::Forbidden);
    let (table, errors) = fails(&["status"]);
    assert_eq!(table.lines().filter(|line| line.ends_with("no answer")).count(), 2, "{table}");
    assert!(
        errors.contains("n1: you may not run commands in Pod lb-agent-1: a fault 403; ask for a Role"),
        "{errors}"
    );
    assert!(errors.contains("n2: no agent's Pod runs on the node"), "{errors}");

    let fault = crate::api_server::Fault { status: Some(403), ..Default::default() };
    clusters.server.set_fault("pods", fault);
    let (_, errors) = fails(&["status"]);
    assert!(
        errors.starts_with("error: you may not list Pods in namespace kube-system: a fault 403"),
        "{errors}"
    );
}

/// A Service with two ports and one backend, on the second node, and a Pod on the first one.
fn put_shop(server: &ApiServer) {
    let metadata = json!({"namespace": "shop", "name": "web"});
    server.put(json!({
        "apiVersion": "v1", "kind": "Service", "metadata": metadata,
        "spec": {
            "type": "ClusterIP", "clusterIP": "10.96.0.7", "clusterIPs": ["10.96.0.7"],
            "ports": [
                {"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080},
                {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 5353},
            ],
        },
    }));
    server.put(json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"namespace": "shop", "name": "web", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4",
        "ports": [
            {"name": "http", "port": 8080, "protocol": "TCP"}, {"name": "dns", "port": 5353, "protocol": "UDP"},
        ],
        "endpoints": [{"addresses": ["192.0.2.22"], "nodeName": "n2", "conditions": {"ready": true}}],
    }));
    server.put(json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "shop", "name": "client"},
        "spec": {"nodeName": "n1", "containers": []},
        "status": {"phase": "Running", "podIP": "192.0.2.11", "podIPs": [{"ip": "192.0.2.11"}]},
    }));
}

#[test]
fn kubectl_explain_follows_a_packet_to_the_second_node_and_back() {
    let clusters = Clusters::with_agents();
    put_shop(&clusters.server);
    let is_served = || {
        let output = ask(&clusters.nodes[0], &clusters.bpffs(1), &["service", "list", "-o", "json"]).ok()?;
        text(&output.stdout).contains("\"192.0.2.22\"").then_some(())
    };
    wait_for(SOON, is_served).unwrap_or_else(|| panic!("{}", clusters.log(1)));

    let output = clusters.plugin(&["explain", "pod/shop/client", "svc/shop/web:http"]);
    let page = text(&output.stdout);
    assert!(output.status.success(), "{page}{output:?}");
    assert!(
        page.starts_with("Node n1: from the Pod to the Service\nTCP 192.0.2.11 -> 10.96.0.7:80, at "),
        "{page}"
    );
    assert!(page.contains("\n  => sent to 192.0.2.22:8080"), "{page}");
    assert!(
        page.contains("\nNode n2: arrives at the backend's node\nTCP 192.0.2.11 -> 192.0.2.22:8080, at "),
        "{page}"
    );
    assert!(
        page.contains("\nBackend 192.0.2.22:8080 is on node n2. --client-port PORT shows the way back"),
        "{page}"
    );

    let typed = ["explain", "pod/shop/client", "svc/shop/web:53", "--client-port", "4000", "-o", "json"];
    let output = clusters.plugin(&typed);
    let parts = rows(&output);
    let nodes: Vec<_> = parts.iter().map(|part| part["node"].as_str().unwrap()).collect();
    assert_eq!(nodes, ["n1", "n2", "n2", "n1"], "there and back: {output:?}");
    assert_eq!(
        (&parts[0]["page"]["protocol"], &parts[0]["page"]["verdict"]),
        (&json!("UDP"), &json!("begins"))
    );
    assert_eq!((&parts[3]["from"], &parts[3]["to"]), (&json!("192.0.2.22:5353"), &json!("192.0.2.11:4000")));

    clusters.server.set_exec("lb-agent-2", PodExec::Forbidden);
    let output = clusters.plugin(&typed);
    assert_eq!((output.status.code(), rows(&output).len()), (Some(1), 1), "the first node has answered");
    let errors = text(&output.stderr);
    assert!(errors.contains("node n2, arrives at the backend's node: you may not run commands"), "{errors}");

    let errors = text(&clusters.plugin(&["explain", "pod/shop/client", "svc/shop/web"]).stderr);
    assert!(errors.contains("name a port of the Service: 80 (http), 53 (dns)"), "{errors}");
    let errors = text(&clusters.plugin(&["explain", "pod/shop/none", "svc/shop/web:80"]).stderr);
    assert!(errors.contains("cannot read Pod shop/none"), "{errors}");
}
