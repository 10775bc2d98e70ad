//! The agent's report on itself, which it sends to clients of the status socket. The serialised field names are part of
//! the JSON interface.

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::shortage::ShortageReport;
use crate::{
    announce::{AnnouncementReport, bgp::BgpReport},
    http_server,
    probe::CheckReport,
};

/// The agent's answer at the status socket, which `lb-agent status` shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Process id of the agent.
    pub pid: u32,
    /// Version of the agent.
    pub version: String,
    /// Name of the node.
    pub node_name: String,
    /// When the agent started.
    pub started: Timestamp,
    /// Whether at least one synchronisation has completed: the Services are in the kernel.
    pub synchronised: bool,
    /// Whether the agent has synchronised at least once, and no change has waited for too long. If the node is also
    /// eligible, `/healthz` answers 200.
    pub healthy: bool,
    /// Whether no change has waited for too long: `/livez` answers 200. Older agents do not report it.
    #[serde(default = "yes")]
    pub alive: bool,
    /// State of the server of `/healthz` and `/livez`; `None` without `--healthz-bind-address`. Older agents do not
    /// report it.
    #[serde(default)]
    pub healthz: Option<HealthzReport>,
    /// Whether load balancers may send traffic to the node: it is neither being deleted nor about to be removed.
    #[serde(default = "yes")]
    pub node_eligible: bool,
    /// Time of the last complete synchronisation.
    pub last_sync: Option<Timestamp>,
    /// Number of service ports in the kernel.
    pub services: usize,
    /// Number of backends of all service ports in the kernel.
    pub endpoints: usize,
    /// The work that remained after the last synchronisation: the number of map updates, plus the number of Services
    /// that it did not plan or that wait for room in a map.
    pub pending: usize,
    /// Arrival time of the oldest change that is not in the kernel yet.
    pub pending_since: Option<Timestamp>,
    /// Errors of the last synchronisation.
    pub failures: Vec<String>,
    /// All conditions, such as invalid manifests, addresses that two Services claim, or a node that does not forward
    /// packets. Includes those of `advice`, which need no attention; `failures` and `shortages` are separate.
    pub problems: Vec<String>,
    /// Those of `problems` that only give advice: these can stay, and do not mean that anything is wrong. Older agents
    /// do not report which these are.
    #[serde(default)]
    pub advice: Vec<String>,
    /// The interfaces on which the agent keeps BPF programs, including those on which it cannot attach them now.
    pub devices: Vec<DeviceReport>,
    /// Addresses and settings of the node.
    pub node: NodeReport,
    /// The addresses that members announce, or should announce, at layer 2, and those that this node announces by BGP,
    /// or would announce if their routes were in the table. Older agents do not report them.
    #[serde(default)]
    pub announcements: Vec<AnnouncementReport>,
    /// Load balancer addresses that no advertisement covers. Older agents do not report them.
    #[serde(default)]
    pub unannounced: Vec<AnnouncementReport>,
    /// The state of the announcement by BGP; `None` without `--announce-table`. Older agents do not report it.
    #[serde(default)]
    pub bgp: Option<BgpReport>,
    /// Full or nearly full maps, exhausted ports, and lost pins. Older agents do not report them.
    #[serde(default)]
    pub shortages: Vec<ShortageReport>,
    /// State of the controller that assigns addresses to Services of type LoadBalancer; `None` without
    /// `--load-balancer-controller`. Older agents do not report it.
    #[serde(default)]
    pub load_balancers: Option<LoadBalancerReport>,
    /// State of the DNS server; `None` without `--dns-bind-address` and `--dns-intercept`. Older agents do not report
    /// it.
    #[serde(default)]
    pub dns: Option<DnsReport>,
    /// The health checks of endpoints, with their results on this node. Older agents do not report them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub health_checks: Vec<CheckReport>,
}

/// State of the server of `/healthz` and `/livez`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthzReport {
    /// The address of `--healthz-bind-address`.
    pub address: SocketAddr,
    /// Whether this agent listens at the address.
    pub listens: bool,
    /// Why the agent cannot listen there, and what to do; `None` if it listens or has not tried yet.
    pub problem: Option<String>,
}

impl HealthzReport {
    /// The state before the first attempt to listen.
    pub(super) const fn untried(address: SocketAddr) -> Self {
        Self { address, listens: false, problem: None }
    }

    /// The state after an attempt to listen.
    pub(super) fn after(address: SocketAddr, attempt: Result<(), &io::Error>) -> Self {
        let problem = attempt.err().map(|error| Listener::Healthz.refused(address, error));
        Self { address, listens: problem.is_none(), problem }
    }
}

/// An HTTP server of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Listener {
    /// `/healthz` and `/livez`.
    Healthz,
    /// `/metrics`, and pages such as `/configz` at the same address.
    Metrics,
    /// The pages for a browser.
    Web,
}

impl Listener {
    /// The name of what the server serves, for messages.
    pub(super) const fn served(self) -> &'static str {
        match self {
            Self::Healthz => "/healthz",
            Self::Metrics => "/metrics",
            Self::Web => "the pages for a browser",
        }
    }

    /// Maximum number of connections of the server.
    pub(super) const fn most_connections(self) -> usize {
        match self {
            Self::Healthz => http_server::MOST_OF_PROBES,
            Self::Metrics | Self::Web => http_server::MOST_OF_PAGES,
        }
    }

    /// The flag that sets the server's address.
    const fn flag(self) -> &'static str {
        match self {
            Self::Healthz => "--healthz-bind-address",
            Self::Metrics => "--metrics-bind-address",
            Self::Web => "--web-bind-address",
        }
    }

    /// Why the server does not listen at the address, and what to do.
    pub(super) fn refused(self, address: SocketAddr, error: &io::Error) -> String {
        let (what, flag) = (self.served(), self.flag());
        let kind = error.kind();
        let advice = if kind == io::ErrorKind::AddrInUse {
            format!(
                "another process, for example kube-proxy, has the port: stop it, or set {flag} to a free port"
            )
        } else if kind == io::ErrorKind::AddrNotAvailable {
            format!("set {flag} to an address of this node")
        } else {
            format!("set {flag} to a port that this process may use")
        };
        format!("{what}: cannot listen on {address}: {error}: {advice}; the agent keeps trying")
    }
}

/// State of the DNS server, as `status` shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DnsReport {
    /// The addresses of `--dns-bind-address`. The server listens at those that are not in `unserved`.
    pub addresses: Vec<SocketAddr>,
    /// The addresses of `--dns-bind-address` at which the server cannot listen, each with the error.
    #[serde(default)]
    pub unserved: BTreeMap<SocketAddr, String>,
    /// The DNS domain that contains the names of Services.
    pub domain: String,
    /// The upstream servers that the agent asks for names outside `domain`.
    pub upstreams: Vec<SocketAddr>,
    /// Upstream servers that the agent does not ask, because they lead back to the agent.
    pub loops: Vec<SocketAddr>,
    /// State of node-local DNS; `None` without `--dns-intercept`. Older agents do not report it.
    #[serde(default)]
    pub intercept: Option<InterceptReport>,
}

impl DnsReport {
    /// The conditions of the DNS server: the addresses at which it cannot listen, and why pods are not answered.
    pub(super) fn conditions(&self) -> impl Iterator<Item = &String> {
        let intercept = self.intercept.iter().filter_map(|intercept| intercept.problem.as_ref());
        self.unserved.values().chain(intercept)
    }
}

/// State of node-local DNS, as `status` shows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InterceptReport {
    /// The DNS Service, as `NAMESPACE/NAME`.
    pub service: String,
    /// The cluster IPs of the Service, if it has a UDP port 53; else none.
    pub cluster_ips: Vec<IpAddr>,
    /// The addresses of this agent to which the programs redirect queries now; without any, queries go to the endpoints
    /// of the Service.
    pub servers: Vec<SocketAddr>,
    /// Why this agent, or its server at one of the node's addresses, gets no queries of pods, and what the user can do
    /// about it. `None` if no reason is known.
    pub problem: Option<String>,
}

/// State of the controller that assigns addresses to the cluster's Services of type LoadBalancer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadBalancerReport {
    /// Node of the elected agent; `None` while no agent is elected.
    pub leader: Option<String>,
    /// Whether the reporting agent is the elected one, and its term has begun.
    pub is_here: bool,
    /// Use of each address pool; empty unless the reporting agent is elected.
    pub pools: Vec<PoolReport>,
}

/// How many addresses of a pool are in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolReport {
    /// The name of the pool.
    pub name: String,
    /// Number of the pool's addresses that are assigned to Services.
    pub used: u64,
    /// Number of addresses that the pool can assign.
    pub total: u64,
}

/// Addresses and settings of the node, as `status` shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeReport {
    /// Addresses of the node on interfaces that are up, without loopback and IPv6 link-local ones, and without those of
    /// an interface that kube-proxy (mode ipvs) or kube-router has left.
    pub addresses: Vec<IpAddr>,
    /// Addresses that serve node ports; may include `127.0.0.1` and `::1`.
    #[serde(rename = "nodePortAddresses")]
    pub nodeport_addresses: Vec<IpAddr>,
    /// Source of masqueraded packets if the routing table names none; at most one address of each family.
    pub primary: Vec<IpAddr>,
    /// How the agent recognises internal clients: kube-proxy's name of the mode, or `none`.
    pub detect_local: String,
    /// Networks whose clients are internal.
    #[serde(default, alias = "insideNetworks")]
    pub internal_networks: Vec<String>,
    /// Interfaces through which packets of internal clients enter.
    #[serde(default, alias = "insideDevices")]
    pub internal_devices: Vec<String>,
    /// Ranges of cluster IPs.
    pub service_ranges: Vec<String>,
    /// Whether packets to unassigned addresses in `service_ranges` are dropped.
    pub drops_unknown_vips: bool,
    /// How packets of external clients reach backends on other nodes by default: a value of `--north-south-mode`.
    pub north_south_mode: String,
    /// Tunnel of the modes dsr and hybrid: a value of `--dsr-encapsulation`.
    pub dsr_encapsulation: String,
    /// Networks and addresses of the machines that may send tunnelled packets to backends on this node.
    pub dsr_peers: Vec<String>,
    /// Networks whose external clients may use no frontend: those of `--deny-source`, and those behind IPsec policies
    /// that replies would bypass. Older agents do not report them.
    #[serde(default)]
    pub denied_sources: Vec<String>,
    /// First port of the range of source ports for masqueraded packets.
    pub masquerade_first_port: u16,
    /// Last port of the range of source ports for masqueraded packets.
    pub masquerade_last_port: u16,
}

/// The default of `alive` and `node_eligible`, which older agents do not report.
const fn yes() -> bool {
    true
}

/// An interface of the node on which the agent keeps BPF programs. The interface may lack some of these programs while
/// the agent cannot attach them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceReport {
    /// Interface index in the agent's network namespace.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// Kind of the interface: `wire`, `workload` or `catch`.
    pub kind: String,
    /// Mode of the XDP program: `native` (the driver runs it) or `generic` (the kernel's network stack runs it); `None`
    /// if the interface is served at tc only.
    pub xdp: Option<String>,
}
