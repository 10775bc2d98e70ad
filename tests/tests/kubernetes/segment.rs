//! A cluster without pods on one bridge: nodes with an agent and an HTTP server each, a client, and the API server.

use std::{
    fs::{self, File},
    net::IpAddr,
    path::PathBuf,
    process::{Child, Stdio},
};

use lb_tests::{
    agent::binary,
    cleanup::{self, Cleanup, Resource},
    lan::{self, Lan},
    netns::{self, Netns},
    server::Server,
};
use serde_json::{Value, json};

use crate::api_server::ApiServer;

const SERVER: &str = "192.0.2.250";

/// The nodes, client and API server. Agents are dropped first.
pub(crate) struct Segment {
    pub(crate) agents: Vec<(Child, Cleanup)>,
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

    /// Starts an agent on each node; `flags` returns its flags, given the node's number.
    pub(crate) fn start_with(&mut self, flags: impl Fn(usize) -> Vec<String>) {
        for number in 1..=self.nodes.len() {
            let log = File::create(self.folder.join(format!("log-{number}"))).unwrap();
            let mut command = self.nodes[number - 1].command(binary());
            command.arg("run").arg("--kubeconfig").arg(self.folder.join("kubeconfig"));
            command.args(flags(number));
            command.arg("--bpffs").arg(self.bpffs(number)).args(["--node-name", &format!("n{number}")]);
            command.args(["--socket-lb", "off", "--wire-device", "eth*"]);
            command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
            self.agents.push(Cleanup::spawn(&mut command).unwrap());
        }
    }

    pub(crate) fn bpffs(&self, number: usize) -> PathBuf {
        self.folder.join(format!("bpf-{number}"))
    }

    pub(crate) fn logs(&self) -> String {
        let log = |number| fs::read_to_string(self.folder.join(format!("log-{number}"))).unwrap_or_default();
        (1..=self.nodes.len()).map(|number| format!("---- n{number}\n{}", log(number))).collect()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        for (mut child, cleanup) in self.agents.drain(..) {
            _ = child.kill();
            _ = child.wait();
            cleanup.disarm();
        }
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
