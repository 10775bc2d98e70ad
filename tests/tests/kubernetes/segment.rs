//! A cluster on one bridge, without pods: nodes with an agent and an HTTP server each, a client, and the API server.

use std::{fs, net::IpAddr, path::PathBuf};

use anyhow::Result;

use lb_tests::{
    agent::ask_json,
    cleanup::{self, Cleanup, Resource},
    lan::{self, Lan},
    netns::{self, Netns},
    server::Server,
};
use serde_json::{Value, json};

use crate::{
    api_server::ApiServer,
    running_agent::{Files, RunningAgent},
};

const SERVER: &str = "192.0.2.250";

/// The nodes, client and API server. Agents are dropped first.
pub(crate) struct Segment {
    pub(crate) agents: Vec<RunningAgent>,
    pub(crate) server: ApiServer,
    _servers: Vec<Server>,
    pub(crate) nodes: Vec<Netns>,
    pub(crate) client: Netns,
    _lan: Lan,
    pub(crate) folder: PathBuf,
    _cleanup: Cleanup,
}

impl Segment {
    /// Creates `count` nodes, and the files that their agents read.
    pub(crate) fn new(count: usize) -> Self {
        cleanup::on_interrupt();
        cleanup::remove_stale().unwrap();
        let prefix = netns::unique_prefix();
        let create = |name: &str| Netns::create(&format!("{prefix}-{name}")).unwrap();
        let lan = Lan::new(create("lan")).unwrap();
        lan.bridge.ip(&format!("address add {SERVER}/24 dev br0\n")).unwrap();
        let attach = |netns: &Netns, number: usize| {
            lan.attach(netns, number, &[format!("192.0.2.{number}/24")]).unwrap();
        };
        let nodes: Vec<Netns> = (1..=count).map(|number| create(&format!("n{number}"))).collect();
        nodes.iter().enumerate().for_each(|(index, node)| attach(node, index + 1));
        let client = create("c");
        attach(&client, 99);
        let servers = lan::serve(&nodes).unwrap();
        let folder = std::env::temp_dir().join(&prefix);
        let cleanup = Cleanup::of(Resource::Folder(folder.clone()));
        fs::create_dir_all(&folder).unwrap();
        let server = ApiServer::start_at(Some(&lan.bridge), SERVER.parse::<IpAddr>().unwrap());
        fs::write(folder.join("kubeconfig"), server.kubeconfig()).unwrap();
        fs::write(folder.join("key"), "a key of more than sixteen bytes\n").unwrap();
        let (agents, _servers, _lan, _cleanup) = (Vec::new(), servers, lan, cleanup);
        Self { agents, server, _servers, nodes, client, _lan, folder, _cleanup }
    }

    /// Starts an agent on each node; `flags` returns the agent's flags for the number of a node.
    pub(crate) fn start_with(&mut self, flags: impl Fn(usize) -> Vec<String>) {
        for number in 1..=self.nodes.len() {
            let agent = self.agent(number, flags(number));
            self.agents.push(agent);
        }
    }

    /// Starts an agent on the node with this number.
    pub(crate) fn agent(&self, number: usize, flags: Vec<String>) -> RunningAgent {
        let [kubeconfig, log] = ["kubeconfig", &format!("log-{number}")].map(|name| self.folder.join(name));
        let files = Files { kubeconfig: &kubeconfig, bpffs: &self.bpffs(number), log: &log };
        let common = ["--socket-lb", "off", "--wire-device", "eth*"].map(str::to_owned);
        let arguments = flags.into_iter().chain(common);
        RunningAgent::start(&self.nodes[number - 1], &format!("n{number}"), &files, arguments)
    }

    pub(crate) fn bpffs(&self, number: usize) -> PathBuf {
        self.folder.join(format!("bpf-{number}"))
    }

    /// The parsed output of `lb-agent` with these arguments and `-o json`, for the agent of the node with this number.
    pub(crate) fn json(&self, number: usize, arguments: &[&str]) -> Result<Value> {
        ask_json(&self.nodes[number - 1], &self.bpffs(number), arguments)
    }

    /// Creates the Service `web` of type LoadBalancer with this address and `externalTrafficPolicy`.
    pub(crate) fn service(&self, vip: &str, policy: &str) {
        self.server.put(json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"namespace": "default", "name": "web"},
            "spec": {
                "type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"],
                "externalTrafficPolicy": policy,
                "ports": [{"port": 80, "protocol": "TCP", "targetPort": 8080}],
            },
            "status": {"loadBalancer": {"ingress": [{"ip": vip, "ipMode": "VIP"}]}},
        }));
    }

    /// Gives the Service `web` an endpoint on each node with one of these numbers.
    pub(crate) fn endpoints(&self, numbers: &[usize]) {
        let endpoint = |number: &usize| {
            let conditions = json!({"ready": true});
            json!({"addresses": [format!("192.0.2.{number}")], "nodeName": format!("n{number}"), "conditions": conditions})
        };
        self.server.put(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"namespace": "default", "name": "web", "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4", "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
            "endpoints": numbers.iter().map(endpoint).collect::<Vec<_>>(),
        }));
    }

    pub(crate) fn logs(&self) -> String {
        let log = |number| fs::read_to_string(self.folder.join(format!("log-{number}"))).unwrap_or_default();
        (1..=self.nodes.len()).map(|number| format!("---- n{number}\n{}", log(number))).collect()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.agents.clear();
        self.server.stop();
    }
}

/// The Node object of the node with this number, with these labels.
pub(crate) fn node(number: usize, labels: Value) -> Value {
    let addresses = json!([{"type": "InternalIP", "address": format!("192.0.2.{number}")}]);
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": format!("n{number}"), "labels": labels}, "status": {"addresses": addresses},
    })
}
