//! Arguments of the commands other than `run`.

use std::{
    ffi::OsString,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use clap::{Args, Subcommand, ValueEnum};
use ipnet::IpNet;
use lb_common::conntrack::Phase;
use lb_core::model::Protocol;
pub use lb_output::TableOrJson;

use super::values::{
    Client, Destination, EventVerdict, ServiceFilter, parse_interval, parse_listener, parse_network,
    parse_phase, parse_protocol,
};
use crate::explain::HookPoint;

/// Arguments of `status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
    /// Also show counters that are 0, empty maps, and all devices of long lists; JSON always has them
    #[arg(long)]
    pub all: bool,
}

/// Arguments of `ready`.
#[derive(Debug, Args)]
pub struct ReadyArgs {
    /// Ask only whether the agent is alive, as /livez does: the agent answers, and no change of a Service or endpoint
    /// has waited for longer than a minute
    #[arg(long)]
    pub live: bool,
}

/// The commands of `announce`.
#[derive(Debug, Subcommand)]
pub enum AnnounceCommand {
    /// List load balancers' addresses that are announced: by which protocol, advertisements and node, since when
    List {
        /// Output format
        #[arg(short, long, value_name = "FORMAT", default_value = "table")]
        output: TableOrJson,
    },
    /// List the routes by which this node announces load balancers' addresses to its BGP daemon
    Routes {
        /// Output format
        #[arg(short, long, value_name = "FORMAT", default_value = "table")]
        output: TableOrJson,
    },
    /// List the nodes that vote on announcements at layer 2 in a cluster, and whether their Nodes exist
    Voters {
        /// Replace all voters, if a majority of them has no Node any more. Use it only if no agent of these nodes runs:
        /// otherwise two nodes may announce one address
        #[arg(long)]
        replace: bool,
        /// Voters that also count as gone: their Nodes exist, but run no agent any more
        #[arg(long, value_name = "NODE", value_delimiter = ',', requires = "replace")]
        without_agent: Vec<String>,
        /// The API server [default: that of the cluster that runs this Pod]
        #[arg(long, value_name = "FILE")]
        kubeconfig: Option<PathBuf>,
    },
    /// Print the configuration of BIRD that the agent makes from BGPPeers and BGPAdvertisements, without passwords
    BirdConfig,
    /// Remove the agent's routes to load balancers' addresses if the agent hangs or dies; runs until a signal ends it
    ///
    /// Routes outlive the agent that wrote them, and BGP daemons go on announcing them. Run this beside the agent, in
    /// the same network namespace, as a service or container of its own. It needs CAP_NET_ADMIN. After SIGTERM it goes
    /// on for 8 s at most, until no agent sends heartbeats any more: an agent that stops meanwhile leaves its routes.
    Fence {
        /// Routing table that has the routes: --announce-table of `lb-agent run`
        #[arg(long, value_name = "NUMBER", env = "LB_AGENT_ANNOUNCE_TABLE", hide_env_values = true)]
        announce_table: u32,
        /// Seconds from the agent's last heartbeat to the removal; give more than a restart of the agent takes
        #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(5..=3600))]
        lifetime: u64,
    },
    /// Remove the routes that a stopped agent has left, so that the node's BGP daemon stops announcing load balancers'
    /// addresses
    ///
    /// While `lb-agent announce fence` runs, an agent that stops leaves its routes for the next agent. To drain a node,
    /// stop the agent, then run this: a running agent would add the routes again. It needs CAP_NET_ADMIN.
    Withdraw {
        /// Routing table that has the routes: --announce-table of `lb-agent run`
        #[arg(long, value_name = "NUMBER", env = "LB_AGENT_ANNOUNCE_TABLE", hide_env_values = true)]
        announce_table: u32,
    },
}

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Source of the packet. Without a port the packet is the first one of a new connection
    #[arg(long, value_name = "ADDR[:PORT]")]
    pub from: Client,
    /// Destination of the packet, such as a virtual address and its port, and the protocol: 10.96.0.10:53/udp
    #[arg(long, value_name = "ADDR:PORT[/PROTO]")]
    pub to: Destination,
    /// Protocol of the packet. A TCP packet is a SYN, an SCTP packet an INIT [default: that of --to, else tcp]
    #[arg(long, value_name = "tcp|udp|sctp", value_parser = parse_protocol)]
    pub protocol: Option<Protocol>,
    /// Hook that handles the packet [default: the first one that the packet meets: socket for processes of this node,
    /// xdp on devices with an XDP program, else tc-ingress]
    #[arg(long, value_name = "HOOK")]
    pub at: Option<HookPoint>,
    /// Interface that the packet arrives on [default: the one that the route to its source uses]
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
}

/// Arguments of `profile`.
#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// Duration of the measurement. Meanwhile each run of any BPF program takes some nanoseconds longer
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
}

/// Arguments of `monitor`. An event is shown if it meets every condition.
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
    /// Output format: one line for each event, as text (times are UTC) or as a JSON object
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
}

/// Arguments of `flows`.
#[derive(Debug, Args)]
pub struct FlowsArgs {
    /// File of `run --flow-log`, read with its rotated files (FILE.N and FILE.N.gz); - reads standard input
    #[arg(long, value_name = "FILE|-")]
    pub file: PathBuf,
    /// Sum the traffic of clients, Services or backends, the largest first [default: list the last connections]
    #[arg(long, value_name = "WHAT")]
    pub top: Option<TopFlows>,
    /// Number of rows; 0: all
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: usize,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
}

/// What `flows --top` sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TopFlows {
    /// Addresses of clients
    Clients,
    /// Service ports
    Services,
    /// Addresses and ports of backends
    Backends,
}

/// Arguments of `bugreport`.
#[derive(Debug, Args)]
pub struct BugreportArgs {
    /// Archive to write, or `-` for standard output; a file must not exist yet [default:
    /// lb-agent-bugreport-TIME.tar.gz in the current directory]
    #[arg(short, long, value_name = "FILE|-")]
    pub output: Option<PathBuf>,
    /// Address where the agent serves its metrics
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:10249")]
    pub metrics_address: String,
}

/// Arguments of `top`.
#[derive(Debug, Clone, Args)]
pub struct TopArgs {
    /// Seconds between two updates
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_interval)]
    pub interval: f64,
    /// Print one table for one interval and exit; the default if the output is not a terminal
    #[arg(long)]
    pub once: bool,
    /// Output format; json implies --once
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
}

/// Arguments of `web`.
#[derive(Debug, Clone, Args)]
pub struct WebArgs {
    /// Address to serve the pages on. One that is no loopback address requires a token
    #[arg(long, value_name = "ADDR:PORT", value_parser = parse_listener, default_value = "127.0.0.1:8088")]
    pub listen: SocketAddr,
    /// File with the token that users log in with, at least 16 characters [default: on loopback none is required,
    /// elsewhere a new one is printed]
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

/// Arguments of `cleanup`.
#[derive(Debug, Args)]
pub struct CleanupArgs {
    /// Remove only the rules that a stopped kube-proxy left behind (iptables, nftables, IPVS). The agent may be running
    #[arg(long)]
    pub kube_proxy: bool,
    /// Only list what would be removed
    #[arg(long, requires = "kube_proxy")]
    pub dry_run: bool,
}

/// Arguments of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: TableOrJson,
}

/// The commands of `service`.
#[derive(Debug, Subcommand)]
pub enum ServiceCommand {
    /// List every service port with its frontends
    List {
        /// Output format
        #[arg(short, long, value_name = "FORMAT", default_value = "table")]
        output: ServiceOutput,
        /// Only Services in this namespace
        #[arg(short, long)]
        namespace: Option<String>,
    },
    /// Show all ports of one Service with their backends
    Show {
        /// [NAMESPACE/]NAME; the default namespace is `default`
        name: String,
        /// Output format; wide adds ids, slots and weights
        #[arg(short, long, value_name = "FORMAT", default_value = "table")]
        output: ServiceOutput,
    },
    /// Print the environment variables by which processes find Services, such as WEB_SERVICE_HOST
    ///
    /// They are those that kubelet gives to containers. The agent must be running.
    Env(EnvironmentArgs),
}

/// Arguments of `service env`.
#[derive(Debug, Args)]
pub struct EnvironmentArgs {
    /// Namespace of the Services. The Service of the API server, `default/kubernetes`, is always included
    #[arg(short, long, default_value = "default")]
    pub namespace: String,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "shell")]
    pub format: EnvironmentFormat,
}

/// Formats of `service env`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EnvironmentFormat {
    /// Lines `export NAME='VALUE'`, for `eval "$(lb-agent service env)"`
    Shell,
    /// Lines `NAME=VALUE`, for `docker run --env-file`
    Docker,
    /// Lines `NAME="VALUE"`, for `EnvironmentFile=` of a systemd unit
    Systemd,
    /// An object of names and values
    Json,
}

/// Arguments of `exec`.
#[derive(Debug, Args)]
pub struct ExecArgs {
    /// Namespace of the Services. The Service of the API server, `default/kubernetes`, is always included
    #[arg(short, long, default_value = "default")]
    pub namespace: String,
    /// Program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// The commands of `conntrack`.
#[derive(Debug, Subcommand)]
pub enum ConntrackCommand {
    /// List the flows, one on each line
    List {
        /// Output format
        #[arg(short, long, value_name = "FORMAT", default_value = "table")]
        output: TableOrJson,
        /// Conditions that the listed flows meet.
        #[command(flatten)]
        filter: FlowFilter,
    },
    /// Delete all flows. Established connections through virtual addresses break
    Flush {
        /// Output format of the summary
        #[arg(short, long, value_name = "FORMAT", default_value = "table")]
        output: TableOrJson,
    },
}

/// Conditions of `conntrack list`. A flow is shown if it meets every condition.
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
    /// Only flows of this Service: [NAMESPACE/]NAME; the default namespace is `default`
    #[arg(long, value_name = "NAME")]
    pub service: Option<String>,
    /// Only flows in this phase, such as `established`
    #[arg(long, value_name = "PHASE", value_parser = parse_phase)]
    pub phase: Option<Phase>,
}

/// Output formats of `service`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ServiceOutput {
    /// Text for people
    Table,
    /// Text with all columns
    Wide,
    /// JSON for programs
    Json,
    /// The content of json as YAML
    Yaml,
}
