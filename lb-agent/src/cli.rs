//! What can be typed: the grammar of the command line. [`crate::config`] checks and completes it.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use clap::{Args, Parser, Subcommand, ValueEnum};
use ipnet::IpNet;
use lb_core::model::Protocol;

use crate::commands::{Client, EventVerdict, ServiceFilter, parse_network};

/// Kubernetes Services in the kernel: an eBPF load balancer for a node, with or without Kubernetes.
///
/// Exit codes: 0 ok, 1 runtime failure, 2 bad usage or configuration.
#[derive(Debug, Parser)]
#[command(name = "lb-agent", version, max_term_width = 110)]
pub struct Cli {
    /// Where in the kernel.
    #[command(flatten)]
    pub place: PlaceArgs,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Settings of every command that touches the kernel.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Settings of every command")]
pub struct PlaceArgs {
    /// BPF file system that holds the pinned maps and programs; mounted by `run` where there is none
    /// [default: /sys/fs/bpf]
    #[arg(long, global = true, value_name = "DIR", env = "LB_AGENT_BPFFS", hide_env_values = true)]
    pub bpffs: Option<PathBuf>,
    /// Control group whose sockets are served, see --socket-lb [default: the root of the cgroup2 mount]
    #[arg(long, global = true, value_name = "DIR", env = "LB_AGENT_CGROUP", hide_env_values = true)]
    pub cgroup: Option<PathBuf>,
    /// YAML file with the same settings, each named as its flag, or a KubeProxyConfiguration. A flag wins over the
    /// environment, that over the file
    #[arg(long, global = true, value_name = "FILE", env = "LB_AGENT_CONFIG", hide_env_values = true)]
    pub config: Option<PathBuf>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the agent: keep the kernel's Services in step with the source. SIGTERM stops it and leaves the data
    /// plane in place
    ///
    /// The source is a folder (--manifests), an API server (--kubeconfig), or, in a Pod and without either, the API
    /// server of the cluster
    Run(Box<RunArgs>),
    /// Show attached programs, devices, map fill, outcome counters and the state of synchronisation
    Status(StatusArgs),
    /// Show the Services the kernel holds
    #[command(subcommand)]
    Service(ServiceCommand),
    /// Show or forget the connections the kernel tracks
    #[command(subcommand)]
    Conntrack(ConntrackCommand),
    /// Say what becomes of a packet, and why: every step of the data plane, on what its maps hold now
    Explain(ExplainArgs),
    /// Count for some seconds how often each of our programs runs, and for how long
    Profile(ProfileArgs),
    /// Write an archive with what a maintainer needs to know of this node: state, network, kernel; no credentials
    Bugreport(BugreportArgs),
    /// Show flows as they begin, with the chosen backend, and packets that are dropped or rejected, until a signal comes.
    /// While nobody listens this costs nothing
    Monitor(MonitorArgs),
    /// Show new flows, packets and octets of Services and their backends each second, and how many flows are active
    ///
    /// Keys: Enter shows the backends of a Service, Esc goes back; s, n, p, b, a sort by a column, / filters, q quits
    Top(TopArgs),
    /// Say whether this kernel and machine can run the agent, and what is missing
    Check(CheckArgs),
    /// Remove every program, map and device that any version of the agent ever made; or what kube-proxy has left
    Cleanup(CleanupArgs),
    /// Print the completions for a shell
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

/// Settings of `run`. Lists may be given as several values, by repeating the flag or with commas.
#[derive(Debug, Clone, Default, Args)]
pub struct RunArgs {
    /// Folder of YAML manifests with Services, EndpointSlices and Endpoints; watched for changes
    #[arg(long, value_name = "DIR", env = "LB_AGENT_MANIFESTS", hide_env_values = true)]
    pub manifests: Option<PathBuf>,
    /// Kubeconfig of the API server whose Services and EndpointSlices are served [default, in a Pod: the service
    /// account]
    #[arg(long, value_name = "FILE", env = "LB_AGENT_KUBECONFIG", hide_env_values = true)]
    pub kubeconfig: Option<PathBuf>,
    /// Name of this node, as endpoints name it [default: the host name]
    #[arg(long, value_name = "NAME", env = "LB_AGENT_NODE_NAME", hide_env_values = true)]
    pub node_name: Option<String>,
    /// Address by which others know this node; 0.0.0.0 and :: leave it to the Node object and only say where health and
    /// metrics are served by default [default: 0.0.0.0]
    #[arg(long, value_name = "ADDR", env = "LB_AGENT_BIND_ADDRESS", hide_env_values = true)]
    pub bind_address: Option<String>,
    /// Devices towards other machines [default: those with a default route or a global address of the node]
    #[arg(long, value_name = "NAME|GLOB", num_args = 1.., value_delimiter = ',',
        env = "LB_AGENT_WIRE_DEVICE", hide_env_values = true)]
    pub wire_device: Option<Vec<String>>,
    /// Host side of pods' devices [default: veths whose peer is in another namespace]
    #[arg(long, value_name = "NAME|GLOB", num_args = 1.., value_delimiter = ',',
        env = "LB_AGENT_WORKLOAD_DEVICE", hide_env_values = true)]
    pub workload_device: Option<Vec<String>>,
    /// Ranges from which cluster IPs are allocated, one of each family at most. In ranges that are given or that the API
    /// server names, packets to addresses that nobody has are dropped
    /// [default: with --manifests 10.96.0.0/12,fd00:10:96::/112, else what the API server names]
    #[arg(long, value_name = "CIDR", num_args = 1.., value_delimiter = ',',
        env = "LB_AGENT_SERVICE_CLUSTER_IP_RANGE", hide_env_values = true)]
    pub service_cluster_ip_range: Option<Vec<String>>,
    /// How clients inside the cluster are told from others, who are masqueraded when they use cluster IPs
    /// [default: ClusterCIDR]
    #[arg(long, value_name = "MODE", env = "LB_AGENT_DETECT_LOCAL_MODE", hide_env_values = true)]
    pub detect_local_mode: Option<DetectLocalMode>,
    /// Pod addresses, for the mode ClusterCIDR [default: none, and then nobody counts as outside]
    #[arg(long, value_name = "CIDR", num_args = 1.., value_delimiter = ',',
        env = "LB_AGENT_CLUSTER_CIDR", hide_env_values = true)]
    pub cluster_cidr: Option<Vec<String>>,
    /// The bridge of pods' devices, for the mode BridgeInterface
    #[arg(long, value_name = "NAME", env = "LB_AGENT_POD_BRIDGE_INTERFACE", hide_env_values = true)]
    pub pod_bridge_interface: Option<String>,
    /// How the names of pods' devices begin, for the mode InterfaceNamePrefix
    #[arg(long, value_name = "PREFIX", env = "LB_AGENT_POD_INTERFACE_NAME_PREFIX", hide_env_values = true)]
    pub pod_interface_name_prefix: Option<String>,
    /// Masquerade every client of a cluster IP
    #[arg(long, env = "LB_AGENT_MASQUERADE_ALL", hide_env_values = true)]
    pub masquerade_all: bool,
    /// Source ports of masqueraded packets; no socket of the node may use them [default: 10000-29999]
    #[arg(long, value_name = "FIRST-LAST", env = "LB_AGENT_MASQUERADE_PORTS", hide_env_values = true)]
    pub masquerade_ports: Option<String>,
    /// Node addresses that serve node ports: those in networks, or "primary" [default: all]
    #[arg(long, value_name = "CIDR|primary", num_args = 1.., value_delimiter = ',',
        env = "LB_AGENT_NODEPORT_ADDRESSES", hide_env_values = true)]
    pub nodeport_addresses: Option<Vec<String>>,
    /// How backends are chosen where a Service has no annotation lb.dev/scheduler: random, rr, wrr, lc, wlc, sed, nq, sh, dh
    /// or mh [default: random]
    #[arg(long, value_name = "NAME", env = "LB_AGENT_SCHEDULER", hide_env_values = true)]
    pub scheduler: Option<String>,
    /// Entries of the table of each Service with the scheduler mh: 251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521 or
    /// 131071; a hundred for each of its backends spread flows evenly [default: 16381]
    #[arg(long, value_name = "PRIME", env = "LB_AGENT_MAGLEV_TABLE_SIZE", hide_env_values = true)]
    pub maglev_table_size: Option<u32>,
    /// What the schedulers mh, sh and dh hash with; all nodes need the same for the same choice [default: a fixed number]
    #[arg(long, value_name = "NUMBER", env = "LB_AGENT_MAGLEV_SEED", hide_env_values = true)]
    pub maglev_seed: Option<u64>,
    /// How clients from outside reach backends on other nodes where a Service has no annotation lb.dev/north-south-mode: snat
    /// (with the node's address), dsr (through a tunnel; the backend answers directly) or hybrid (TCP as dsr, the rest as
    /// snat) [default: snat]
    #[arg(long, value_name = "MODE", env = "LB_AGENT_NORTH_SOUTH_MODE", hide_env_values = true)]
    pub north_south_mode: Option<String>,
    /// The tunnel of the mode dsr [default: ipip]
    #[arg(long, value_name = "KIND", env = "LB_AGENT_DSR_ENCAPSULATION", hide_env_values = true)]
    pub dsr_encapsulation: Option<DsrEncapsulation>,
    /// Nodes that may send packets through a tunnel to backends here, whatever the mode [default: none]
    #[arg(long, value_name = "CIDR", num_args = 1.., value_delimiter = ',',
        env = "LB_AGENT_DSR_PEERS", hide_env_values = true)]
    pub dsr_peers: Option<Vec<String>>,
    /// Whose sockets are served by system call, so that they reach every virtual address [default: host]
    #[arg(long, value_name = "WHOSE", env = "LB_AGENT_SOCKET_LB", hide_env_values = true)]
    pub socket_lb: Option<SocketLb>,
    /// Which wire devices are served at XDP, before there is an skb [default: auto]
    #[arg(long, value_name = "MODE", env = "LB_AGENT_XDP", hide_env_values = true)]
    pub xdp: Option<Xdp>,
    /// After so many retransmissions of a SYN that its backend does not answer, another one is tried; 0: never [default: 0]
    #[arg(long, value_name = "NUMBER", env = "LB_AGENT_SYN_RETRIES", hide_env_values = true)]
    pub syn_retries: Option<u16>,
    /// How packets of Services get from device to device [default: stack]
    #[arg(long, value_name = "HOW", env = "LB_AGENT_FORWARDING", hide_env_values = true)]
    pub forwarding: Option<Forwarding>,
    /// Where /healthz and /livez are served; empty: nowhere [default: 0.0.0.0:10256]
    #[arg(long, value_name = "HOST:PORT", env = "LB_AGENT_HEALTHZ_BIND_ADDRESS", hide_env_values = true)]
    pub healthz_bind_address: Option<String>,
    /// Where /metrics and /proxyMode are served; empty: nowhere [default: 127.0.0.1:10249]
    #[arg(long, value_name = "HOST:PORT", env = "LB_AGENT_METRICS_BIND_ADDRESS", hide_env_values = true)]
    pub metrics_bind_address: Option<String>,
    /// Of what /metrics counts flows, packets and octets [default: service]
    #[arg(long, value_name = "WHAT", env = "LB_AGENT_SERVICE_METRICS", hide_env_values = true)]
    pub service_metrics: Option<ServiceMetrics>,
    /// What is logged: a level or a filter as in RUST_LOG, which is the next in line [default: info]
    #[arg(long, value_name = "FILTER", env = "LB_AGENT_LOG_LEVEL", hide_env_values = true)]
    pub log_level: Option<String>,
    /// How log lines look [default: human]
    #[arg(long, value_name = "FORMAT", env = "LB_AGENT_LOG_FORMAT", hide_env_values = true)]
    pub log_format: Option<LogFormat>,
    /// Frontends there is room for, a virtual address and port each [default: 262144]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..),
        env = "LB_AGENT_MAX_FRONTENDS", hide_env_values = true)]
    pub max_frontends: Option<u32>,
    /// Backends there is room for, counted for each service port; replaced ones need room beside the new ones
    /// [default: 524288]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..),
        env = "LB_AGENT_MAX_BACKENDS", hide_env_values = true)]
    pub max_backends: Option<u32>,
    /// Entries there is room for in the tables of schedulers; replaced ones need room beside the new ones
    /// [default: 1048576]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..),
        env = "LB_AGENT_MAX_TABLE_SLOTS", hide_env_values = true)]
    pub max_table_slots: Option<u32>,
    /// Connections there is room for; further ones are dropped until others end [default: 262144]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=1 << 30),
        env = "LB_AGENT_MAX_CONNECTIONS", hide_env_values = true)]
    pub max_connections: Option<u32>,
    /// Clients of Services with session affinity there is room for; with more, those that have not come for the longest time
    /// are balanced anew [default: 65536]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..),
        env = "LB_AGENT_MAX_AFFINITY_CLIENTS", hide_env_values = true)]
    pub max_affinity_clients: Option<u32>,
    /// Let the BPF programs log, down to this level; costs time for every packet [default: off]
    #[arg(long, value_name = "LEVEL", env = "LB_AGENT_BPF_LOG", hide_env_values = true)]
    pub bpf_log: Option<BpfLog>,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people
    Human,
    /// One JSON object a line
    Json,
}

/// How clients inside the cluster are told from others: kube-proxy's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Deserialize)]
pub enum DetectLocalMode {
    /// By their address, which is in --cluster-cidr
    #[value(name = "ClusterCIDR")]
    #[serde(rename = "ClusterCIDR", alias = "")]
    ClusterCidr,
    /// By their address, which is in a pod network of this node; the Node object names them
    #[value(name = "NodeCIDR")]
    #[serde(rename = "NodeCIDR")]
    NodeCidr,
    /// By --pod-bridge-interface, through which their packets come
    #[value(name = "BridgeInterface")]
    BridgeInterface,
    /// By --pod-interface-name-prefix: the device through which their packets come has such a name
    #[value(name = "InterfaceNamePrefix")]
    InterfaceNamePrefix,
}

/// Whose sockets are served by system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SocketLb {
    /// Processes of the node, and pods in its network
    Host,
    /// Those of pods in networks of their own too: no packet of theirs is translated, or masqueraded
    All,
    /// Nobody's: processes of the node reach no Service
    Off,
}

/// The tunnel through which packets of clients get to backends on other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DsrEncapsulation {
    /// IP in IP: IPv4 in IPv4, IPv6 in IPv6
    Ipip,
    /// IP in UDP to port 6080, with a source port for each flow, so that network cards and routers spread flows
    Gue,
}

/// How packets of Services get from device to device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Forwarding {
    /// Through the stack of the node, with its routing and netfilter; between wires that XDP serves, past it
    Stack,
    /// Past the stack wherever the way is known, which is faster; what netfilter rules of the node forbid, such as network
    /// policies written with them, is not forbidden to these packets
    Direct,
}

/// Of what flows, packets and octets are counted in /metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServiceMetrics {
    /// Of nothing
    None,
    /// Of service ports
    Service,
    /// Of service ports and of each of their backends, which may be many series
    Backend,
}

/// Which wire devices are served at XDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Xdp {
    /// Those whose drivers have a native mode, but no veth, whose other end needs an XDP program too
    Auto,
    /// Those whose drivers have a native mode, veth too
    Native,
    /// All: in native mode where there is one, else in generic mode, on copies of packets
    Generic,
    /// None: everything is served at tc
    Off,
}

/// The level of the BPF programs' log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[expect(missing_docs, reason = "the names say it")]
pub enum BpfLog {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// Options of `status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// How to print it
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
}

/// Options of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Who sends it; without a port it is the first packet of a new connection
    #[arg(long, value_name = "ADDR[:PORT]")]
    pub from: Client,
    /// Where it is sent to, such as a virtual address and its port
    #[arg(long, value_name = "ADDR:PORT")]
    pub to: SocketAddr,
    /// Its protocol; of TCP and SCTP it is a packet that asks for a connection
    #[arg(long, value_name = "tcp|udp|sctp", value_parser = parse_protocol, default_value = "tcp")]
    pub protocol: Protocol,
    /// Where it is looked at [default: where it would be first: in the system call of a process of this node, at XDP, or where
    /// it enters the node]
    #[arg(long, value_name = "HOOK")]
    pub at: Option<At>,
    /// The device that it comes in through [default: the one that leads to who sends it]
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// How to print it
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
}

/// Options of `profile`.
#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// For how long; meanwhile each run of any BPF program on this machine costs some nanoseconds more
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// How to print it
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
}

/// Which events to show, every condition given must hold, and how.
#[derive(Debug, Clone, Args)]
pub struct MonitorArgs {
    /// Only events of this Service or virtual address: [NAMESPACE/]NAME[:PORT] or ADDR[:PORT]
    #[arg(long, value_name = "NAME|ADDR")]
    pub service: Option<ServiceFilter>,
    /// Only events of this client, or of clients in this network
    #[arg(long, value_name = "ADDR|CIDR", value_parser = parse_network)]
    pub client: Option<IpNet>,
    /// Only events with this verdict
    #[arg(long, value_name = "VERDICT")]
    pub verdict: Option<EventVerdict>,
    /// How to print them: a line each, for people (times are UTC) or as JSON objects
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
}

/// Options of `bugreport`.
#[derive(Debug, Args)]
pub struct BugreportArgs {
    /// The archive, which must not exist yet [default: lb-agent-bugreport-TIME.tar.gz here]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Where the agent serves its metrics
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:10249")]
    pub metrics_address: String,
}

/// Where a packet is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "kebab-case")]
pub enum At {
    /// Where it enters the node
    TcIngress,
    /// Where it leaves the node
    TcEgress,
    /// Where it enters the node through a wire with an XDP program
    Xdp,
    /// In a system call of a process of this node
    Socket,
}

/// Options of `top`.
#[derive(Debug, Clone, Args)]
pub struct TopArgs {
    /// Seconds from one look to the next
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_interval)]
    pub interval: f64,
    /// Print one table, of one interval, as where there is no terminal
    #[arg(long)]
    pub once: bool,
    /// How to print it; JSON is printed once
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
}

/// Options of `cleanup`.
#[derive(Debug, Args)]
pub struct CleanupArgs {
    /// Remove the rules that a kube-proxy which is gone has left (iptables, nftables, IPVS), and nothing else; the agent may run
    #[arg(long)]
    pub kube_proxy: bool,
    /// Only list what would be removed
    #[arg(long, requires = "kube_proxy")]
    pub dry_run: bool,
}

/// Options of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// How to print it
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
}

/// What to do with Services.
#[derive(Debug, Subcommand)]
pub enum ServiceCommand {
    /// List every service port with its frontends
    List {
        /// How to print it
        #[arg(short, long, value_name = "FORMAT", default_value = "table")]
        output: ServiceOutput,
        /// Only Services of this namespace
        #[arg(short, long)]
        namespace: Option<String>,
    },
    /// Show all ports of one Service with their backends
    Show {
        /// NAMESPACE/NAME, or NAME in the namespace `default`
        name: String,
        /// How to print it; `wide` adds ids, slots and weights
        #[arg(short, long, value_name = "FORMAT", default_value = "table")]
        output: ServiceOutput,
    },
}

/// What to do with tracked connections.
#[derive(Debug, Subcommand)]
pub enum ConntrackCommand {
    /// List the flows, one a line
    List {
        /// How to print it
        #[arg(short, long, value_name = "FORMAT", default_value = "table")]
        output: TableOrJson,
        /// Which flows
        #[command(flatten)]
        filter: FlowFilter,
    },
    /// Forget flows: established connections through a VIP break
    Flush {
        /// How to print what was done
        #[arg(short, long, value_name = "FORMAT", default_value = "table")]
        output: TableOrJson,
    },
}

/// Which flows to show; every condition given must hold.
#[derive(Debug, Clone, Default, Args)]
pub struct FlowFilter {
    /// Only flows of this client
    #[arg(long, value_name = "ADDR")]
    pub client: Option<IpAddr>,
    /// Only flows to this virtual address
    #[arg(long, value_name = "ADDR")]
    pub vip: Option<IpAddr>,
    /// Only flows to this backend
    #[arg(long, value_name = "ADDR")]
    pub backend: Option<IpAddr>,
    /// Only flows of this protocol
    #[arg(long, value_name = "tcp|udp|sctp", value_parser = parse_protocol)]
    pub protocol: Option<Protocol>,
    /// Only flows of this Service: NAMESPACE/NAME, or NAME in the namespace `default`
    #[arg(long, value_name = "NAME")]
    pub service: Option<String>,
}

/// Output formats of most commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TableOrJson {
    /// For people
    Table,
    /// For programs
    Json,
}

/// Output formats of `service`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ServiceOutput {
    /// For people
    Table,
    /// A table with everything
    Wide,
    /// For programs
    Json,
    /// The same as YAML
    Yaml,
}

fn parse_interval(text: &str) -> Result<f64, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.ok_or_else(|| "expected a number from 0.1 to 3600".to_owned())
}

fn parse_protocol(text: &str) -> Result<Protocol, String> {
    match text.to_ascii_lowercase().as_str() {
        "tcp" => Ok(Protocol::Tcp),
        "udp" => Ok(Protocol::Udp),
        "sctp" => Ok(Protocol::Sctp),
        _ => Err("expected tcp, udp or sctp".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_grammar_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn lists_are_repeated_or_separated() {
        let typed = ["lb-agent", "run", "--wire-device", "eth0,bond*", "--wire-device", "wg0", "eth1"];
        let cli = Cli::try_parse_from(typed).unwrap();
        let Command::Run(run) = cli.command else { panic!("parsed as {:?}", cli.command) };
        assert_eq!(run.wire_device.unwrap(), ["eth0", "bond*", "wg0", "eth1"]);
    }

    #[test]
    fn the_place_may_stand_before_or_after_the_command() {
        for typed in [["lb-agent", "--bpffs", "/b", "cleanup"], ["lb-agent", "cleanup", "--bpffs", "/b"]] {
            assert_eq!(Cli::try_parse_from(typed).unwrap().place.bpffs.unwrap().to_str(), Some("/b"));
        }
    }
}
