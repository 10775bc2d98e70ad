//! The setup of most tests: the standard cluster, a Service and an agent on node1.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    time::Duration,
};

use lb_tests::{
    agent::{self, Agent},
    client::ask_http,
    cluster::{ClientLink, Cluster, HTTP_PORT, UDP_PORT},
    http::get,
    manifests::{Port, Service},
    netns::Netns,
    traffic::{Kind, Traffic},
};
use serde_json::Value;

/// Port of test Services that leads to the pods' HTTP servers.
pub(crate) const HTTP: u16 = 80;
/// Port of test Services that leads to the pods' UDP servers.
pub(crate) const UDP: u16 = 53;
/// The cluster IPs of the Service `web`.
pub(crate) const WEB: [IpAddr; 2] = vips(10);

/// Arguments that declare the networks of the cluster IPs in tests as ranges, so that other addresses in them count as
/// unassigned.
pub(crate) const RANGES: [&str; 2] = ["--service-cluster-ip-range", "10.96.0.0/12,fd00:10:96::/112"];

/// Cluster IPs for a test Service, one of each family; `number` is their last part.
pub(crate) const fn vips(number: u8) -> [IpAddr; 2] {
    [
        IpAddr::V4(Ipv4Addr::new(10, 96, 0, number)),
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, number as u16)),
    ]
}

/// The standard cluster with an agent on node1. The agent is dropped first.
pub(crate) struct Bed {
    pub(crate) agent: Option<Agent>,
    pub(crate) cluster: Cluster,
}

/// Address of the agent's `/metrics`, in its namespace.
pub(crate) const METRICS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 10_249);

impl Bed {
    /// The value of one of the agent's counters; `name` includes the labels.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        self.find_metric(name).unwrap_or_else(|| panic!("no {name}"))
    }

    /// Like [`Self::metric`], for a metric that may not exist.
    pub(crate) fn find_metric(&self, name: &str) -> Option<u64> {
        get(&self.cluster.node1, METRICS, "/metrics").unwrap().metric(name)
    }

    /// A cluster with an agent, in which the Service `web` has these pods as backends.
    pub(crate) fn with_web(pods: &[&str]) -> Self {
        Self::with_link_and_web(ClientLink::Ethernet, pods)
    }

    /// Like [`Self::with_web`], but the client is connected by `link`.
    pub(crate) fn with_link_and_web(link: ClientLink, pods: &[&str]) -> Self {
        let mut bed = Self::without_agent(link, pods);
        bed.start_agent();
        bed
    }

    /// Like [`Self::with_link_and_web`], without starting the agent.
    pub(crate) fn without_agent(link: ClientLink, pods: &[&str]) -> Self {
        let bed = Self { agent: None, cluster: Cluster::for_test(link).unwrap() };
        bed.put("web", WEB, pods);
        bed
    }

    /// Starts the agent on node1.
    pub(crate) fn start_agent(&mut self) {
        self.agent = Some(self.cluster.start_agent(1).unwrap());
    }

    /// Starts the agent on node1 with these additional arguments.
    pub(crate) fn start_agent_with(&mut self, arguments: &[&str]) {
        let mut settings = self.cluster.agent_settings(1);
        settings.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self.agent = Some(Agent::start(&self.cluster.node1, settings).unwrap());
    }

    /// Starts traffic of every kind and family to `web`: from the external client, from a pod and from the node itself.
    pub(crate) fn traffic(&self) -> Traffic {
        let mut clients = Vec::new();
        for netns in [&self.cluster.client, self.netns("pod1"), &self.cluster.node1] {
            for vip in WEB {
                clients.extend(Kind::TCP.map(|kind| (netns, kind, http(vip))));
                clients.extend(Kind::UDP.map(|kind| (netns, kind, udp(vip))));
            }
        }
        Traffic::start(clients).unwrap()
    }

    /// Writes the manifest of a Service with the ports HTTP and UDP.
    pub(crate) fn put(&self, name: &str, cluster_ips: [IpAddr; 2], pods: &[&str]) {
        self.cluster.manifests.put(&self.service(name, cluster_ips, pods)).unwrap();
    }

    /// A Service with the ports HTTP and UDP, whose backends are these pods.
    pub(crate) fn service(&self, name: &str, cluster_ips: [IpAddr; 2], pods: &[&str]) -> Service {
        Service {
            name: name.to_owned(),
            cluster_ips: cluster_ips.to_vec(),
            ports: vec![
                Port { name: "http", protocol: "TCP", port: HTTP, target_port: HTTP_PORT, node_port: None },
                Port { name: "echo", protocol: "UDP", port: UDP, target_port: UDP_PORT, node_port: None },
            ],
            endpoints: pods.iter().map(|name| self.cluster.pod(name).unwrap().endpoint()).collect(),
            ..Service::default()
        }
    }

    /// The output of a command of the agent with `-o json`, parsed.
    pub(crate) fn json(&self, arguments: &[&str]) -> Value {
        self.agent.as_ref().unwrap().json(arguments).unwrap()
    }

    /// The JSON output of `lb-agent status`, which works without a running agent.
    pub(crate) fn status(&self) -> Value {
        let bpffs = self.cluster.bpffs(1);
        let output = agent::ask(&self.cluster.node1, &bpffs, &["status", "-o", "json"]).unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Lets a pod drop every packet that it receives.
    pub(crate) fn silence(&self, pod: &str) {
        let rules =
            "add table inet t; add chain inet t input { type filter hook input priority 0; policy drop; }";
        agent::run(self.netns(pod).command("nft").arg(rules)).unwrap();
    }

    /// The namespace of `client`, or of the pod with this name.
    pub(crate) fn netns(&self, source: &str) -> &Netns {
        if source == "client" { &self.cluster.client } else { &self.cluster.pod(source).unwrap().netns }
    }
}

/// The address `vip` with the port [`HTTP`].
pub(crate) fn http(vip: IpAddr) -> SocketAddr {
    SocketAddr::new(vip, HTTP)
}

/// The address `vip` with the port [`UDP`].
pub(crate) fn udp(vip: IpAddr) -> SocketAddr {
    SocketAddr::new(vip, UDP)
}

/// Sends a request; returns the name of the server, if one answers at once. A SYN that arrives before the kernel holds
/// the Service, or before the device has programs, is lost: to wait for its retransmission would measure TCP's timer.
pub(crate) fn ask_briefly(netns: &Netns, vip: IpAddr) -> Option<String> {
    let connect = || TcpStream::connect_timeout(&http(vip), Duration::from_millis(100));
    netns.run(connect).ok()?;
    Some(ask_http(netns, http(vip)).ok()?.server)
}
