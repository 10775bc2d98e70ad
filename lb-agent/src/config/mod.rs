//! The effective configuration, from the arguments ([`crate::cli`]). A flag overrides the environment (clap implements
//! that part), the environment overrides the file, and the file overrides the default. Two exceptions: a flag without a
//! value, such as `--masquerade-all`, is on if any of the three sets it, and the file's source of Services is used only
//! if neither a flag nor the environment names one.

mod check;
mod configz;
mod error;
mod file;
mod flagz;
mod kube_proxy;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    path::{self, PathBuf},
    sync::Arc,
};

use ipnet::IpNet;
use lb_common::{Scheduler, hash::DEFAULT_SEED};
use lb_core::{
    allocate::OutsideRanges,
    announce::lease::Prefer,
    dns::Zone,
    model::{ObjectName, Policy},
    north_south::NorthSouthMode,
    tables::Maglev,
};

pub use self::error::ConfigError;
pub(crate) use self::error::refused;
use self::file::File;
use crate::{
    announce::bgp,
    cli::{KernelArgs, LogFormat, RunArgs},
    flow_log::FlowLogConfig,
    kubernetes::ApiServer,
};
pub use crate::{
    cli::{DsrEncapsulation, ServiceMetrics, SocketLb},
    node::{DetectLocal, NodePortAddresses},
};
use lb_datapath::{BpfLogLevel, Capacities, DevicePatterns, Forwarding, XdpOption};
use lb_dns::Access;

/// Conventional mount point of a BPF file system.
const DEFAULT_BPFFS: &str = "/sys/fs/bpf";
/// Environment variable that Kubernetes sets in the containers of every Pod.
const IN_CLUSTER: &str = "KUBERNETES_SERVICE_HOST";

/// Paths that every command needs to find the data plane in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelPaths {
    /// Mount point of the BPF file system.
    pub bpffs: PathBuf,
    /// Directory of the cgroup whose sockets the agent serves; `None` is the root of the cgroup2 mount.
    pub cgroup: Option<PathBuf>,
}

/// The configuration of `run`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Paths to the data plane in the kernel.
    pub kernel: KernelPaths,
    /// Where the agent reads Services from.
    pub source: Source,
    /// Name of this node, as endpoints and Nodes have it.
    pub node_name: String,
    /// The zone of this node; `None` if the node has no zone, or if the Node object names the zone.
    pub zone: Option<String>,
    /// The address of this node, see [`Self::node_ip`]. An unspecified address only selects the family of the default
    /// addresses of the health and metrics servers.
    pub bind_address: IpAddr,
    /// Name patterns of wire and workload interfaces; an empty list means that the agent detects them.
    pub devices: DevicePatterns,
    /// Ranges of cluster IPs, at most one for each family; `None` to use those that the API server names.
    pub service_ranges: Option<Vec<IpNet>>,
    /// Whether a Service of a manifest gets the cluster IP that it requests if this address is outside
    /// `service_ranges`. The agent refuses such a request only if the user has set the ranges, because the default
    /// ranges are a guess.
    pub other_cluster_ips: OutsideRanges,
    /// Whether packets to unassigned addresses in the ranges of cluster IPs are dropped. False for the default ranges,
    /// which may contain addresses of other machines.
    pub drops_unknown_vips: bool,
    /// Networks from which Services of type LoadBalancer get addresses, in addition to the pools in the folder of
    /// manifests.
    pub load_balancer_pool: Vec<IpNet>,
    /// The `loadBalancerClass` of the Services that get addresses; `None` for Services without a class.
    pub load_balancer_class: Option<String>,
    /// Whether the agent assigns addresses from the API server's pools while it is elected.
    pub load_balancer_controller: bool,
    /// Whether a Service gets another address once the pools no longer permit its current one.
    pub load_balancer_reassign: bool,
    /// Which nodes share load balancer addresses at layer 2, and how.
    pub announce: AnnounceConfig,
    /// How the agent announces load balancer addresses by BGP; `None` if it does not.
    pub bgp: Option<bgp::Options>,
    /// How the agent recognises internal clients.
    pub detect_local: DetectLocal,
    /// Whether internal clients of cluster IPs are masqueraded as well.
    pub masquerade_all: bool,
    /// Range of source ports for masqueraded packets.
    pub masquerade_ports: RangeInclusive<u16>,
    /// Which addresses of the node serve node ports.
    pub nodeport_addresses: NodePortAddresses,
    /// Networks (`--deny-source`) whose external clients may use no Service.
    pub denied_sources: Vec<IpNet>,
    /// Whether the agent serves no external IPs (`--ignore-external-ips`).
    pub ignore_external_ips: bool,
    /// Scheduler of Services without an annotation that names one.
    pub scheduler: Scheduler,
    /// Size of Maglev tables, and the hash seed of the schedulers `mh`, `sh` and `dh`.
    pub maglev: Maglev,
    /// How packets of external clients reach backends on other nodes by default.
    pub north_south: NorthSouthMode,
    /// Tunnel to backends on other nodes under direct server return.
    pub dsr_encapsulation: DsrEncapsulation,
    /// Networks (`--dsr-peers`) of machines, other than the nodes, that may send tunnelled packets to backends on this
    /// node.
    pub dsr_peers: Vec<IpNet>,
    /// Which processes have their socket system calls translated: those of the node, those of pods as well, or none.
    pub socket_lb: SocketLb,
    /// Which wire devices get XDP programs.
    pub xdp: XdpOption,
    /// How packets of Services get from one interface to another: through the stack, or bypassing it.
    pub forwarding: Forwarding,
    /// Number of retransmissions of a SYN after which a connection moves to another backend; 0 means never.
    pub syn_retries: u16,
    /// Address that the health server listens on; `None` for no server.
    pub healthz: Option<SocketAddr>,
    /// Address that the metrics server listens on; `None` for no server.
    pub metrics: Option<SocketAddr>,
    /// The server of the web pages; `None` for no server.
    pub web: Option<WebConfig>,
    /// The DNS server's settings.
    pub dns: DnsConfig,
    /// How detailed the traffic metrics are: nothing, service ports, or also their backends.
    pub service_metrics: ServiceMetrics,
    /// The flow log's settings; `None` for no flow log.
    pub flow_log: Option<FlowLogConfig>,
    /// Log filter in the syntax of `RUST_LOG`, if one is configured.
    pub log_filter: Option<String>,
    /// Format of log lines.
    pub log_format: LogFormat,
    /// Log level of the BPF programs; `None` is off.
    pub bpf_log: Option<BpfLogLevel>,
    /// Sizes, in entries, of the BPF maps that the agent creates.
    pub capacities: Capacities,
    /// Fields of a KubeProxyConfiguration to warn about: unknown ones, and requests for something that the agent does
    /// not do.
    pub without_effect: Vec<String>,
}

/// The members that share load balancer addresses: the configured `members`, or with `port` the Nodes of the cluster.
/// With neither, this node shares its addresses with no other node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnnounceConfig {
    /// UDP address of each configured member, including this node, by node name.
    pub members: BTreeMap<Arc<str>, SocketAddr>,
    /// UDP port of every member if these are the Nodes of the cluster.
    pub port: Option<u16>,
    /// File with the key that authenticates the members' messages; `Some` if there are `members` or a `port`.
    pub key_file: Option<PathBuf>,
    /// What two members do while they receive no messages from each other.
    pub prefer: Prefer,
}

/// Settings of the server of the web pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebConfig {
    /// Address and port that the web server listens on.
    pub address: SocketAddr,
    /// File with the token that users log in with; may be `None` only on a loopback address.
    pub token_file: Option<PathBuf>,
}

/// Settings of the DNS server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsConfig {
    /// Addresses and ports (`--dns-bind-address`) that the DNS server listens on, in addition to those of node-local
    /// DNS.
    pub bind: Vec<SocketAddr>,
    /// The DNS domain that contains the names of Services.
    pub zone: Zone,
    /// DNS servers for names outside `zone`. If empty, the agent uses the endpoints of the DNS Service if node-local
    /// DNS is configured, else the servers in `/etc/resolv.conf`.
    pub upstreams: Vec<SocketAddr>,
    /// Which clients the server answers, and at what rate.
    pub access: Access,
    /// Node-local DNS; `None` if queries to the DNS Service go to its endpoints.
    pub intercept: Option<InterceptConfig>,
}

/// Settings of node-local DNS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterceptConfig {
    /// The DNS Service.
    pub service: ObjectName,
    /// The port on which the server listens at the node's addresses.
    pub port: u16,
}

/// Where the agent reads Services from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A folder of YAML manifests.
    Manifests(PathBuf),
    /// An API server of Kubernetes.
    ApiServer(ApiServer),
}

impl KernelPaths {
    /// The paths for a command other than `run`. Reads the file only if it may give one of them, so that the commands
    /// also work while the file is invalid.
    ///
    /// # Errors
    /// The file is unreadable or invalid, or the path of the BPF file system is relative and there is no current
    /// folder.
    pub fn new(typed: KernelArgs) -> Result<Self, ConfigError> {
        if typed.bpffs.is_some() && typed.cgroup.is_some() {
            return Self::checked(typed);
        }
        let mut file = File::read(typed.config.as_deref())?;
        Self::checked(typed.or_in_file(&mut file.settings))
    }

    /// The path of the BPF file system, for a command that must also work while the file is invalid: reads the file
    /// only if neither a flag nor the environment gives the path.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn only_bpffs(typed: KernelArgs) -> Result<PathBuf, ConfigError> {
        let paths = if typed.bpffs.is_some() { Self::checked(typed) } else { Self::new(typed) };
        paths.map(|paths| paths.bpffs)
    }

    fn checked(given: KernelArgs) -> Result<Self, ConfigError> {
        let bpffs = given.bpffs.unwrap_or_else(|| DEFAULT_BPFFS.into());
        // The kernel and other commands name the folder by its absolute path.
        let bpffs =
            path::absolute(&bpffs).map_err(|error| refused("--bpffs", bpffs.display(), error.to_string()))?;
        Ok(Self { bpffs, cgroup: given.cgroup })
    }
}

impl Config {
    /// The configuration for `run`.
    ///
    /// # Errors
    /// The file is unreadable or invalid, a setting is invalid, there is no source of Services or there are two, or the
    /// host name cannot be read.
    pub fn new(kernel: KernelArgs, run: RunArgs) -> Result<Self, ConfigError> {
        let File { settings: mut file, without_effect } = File::read(kernel.config.as_deref())?;
        if run.manifests.is_some() || run.kubeconfig.is_some() {
            (file.manifests, file.kubeconfig) = (None, None);
        }
        let kernel = KernelPaths::checked(kernel.or_in_file(&mut file))?;
        if let Some(cgroup) = &kernel.cgroup {
            check::cgroup(cgroup)?;
        }
        let checked = Self::checked(kernel, run.or_in_file(&mut file))?;
        Ok(Self { without_effect, ..checked })
    }

    fn checked(kernel: KernelPaths, given: RunArgs) -> Result<Self, ConfigError> {
        let in_cluster = std::env::var_os(IN_CLUSTER).is_some();
        let source = check::source((given.manifests.clone(), given.kubeconfig.clone()), in_cluster)?;
        let node_name = check::node_name(given.node_name.clone())?;
        let service_ranges = check::service_ranges(&given, &source)?;
        let ranges = service_ranges.as_deref().unwrap_or_default();
        let bind = check::bind(given.bind_address.as_deref())?;
        Ok(Self {
            kernel,
            detect_local: check::detect_local(&given, &source)?,
            load_balancer_pool: check::load_balancer_pool(&given, &source, ranges)?,
            load_balancer_class: given.load_balancer_class.clone().filter(|class| !class.is_empty()),
            load_balancer_controller: check::load_balancer_controller(&given, &source)?,
            load_balancer_reassign: check::load_balancer_reassign(&given, &source)?,
            announce: check::announce(&given, &source, &node_name)?,
            bgp: check::announce_by_bgp(&given)?,
            zone: check::zone(given.zone.as_deref(), &source)?,
            other_cluster_ips: match given.service_cluster_ip_range {
                Some(_) => OutsideRanges::Refused,
                None => OutsideRanges::Accepted,
            },
            drops_unknown_vips: given.service_cluster_ip_range.is_some()
                || matches!(source, Source::ApiServer(_)),
            source,
            node_name,
            bind_address: bind,
            devices: DevicePatterns {
                wire: check::patterns("--wire-device", given.wire_device.as_deref())?,
                workload: check::patterns("--workload-device", given.workload_device.as_deref())?,
            },
            service_ranges,
            masquerade_all: given.masquerade_all,
            masquerade_ports: check::masquerade_ports(given.masquerade_ports.as_deref())?,
            nodeport_addresses: check::nodeport_addresses(given.nodeport_addresses.as_deref())?,
            denied_sources: check::denied_sources(given.deny_source.as_deref())?,
            ignore_external_ips: given.ignore_external_ips,
            scheduler: check::scheduler(given.scheduler.as_deref())?,
            maglev: Maglev {
                size: check::table_size(given.maglev_table_size)?,
                seed: given.maglev_seed.unwrap_or(DEFAULT_SEED),
            },
            north_south: check::north_south(given.north_south_mode.as_deref())?,
            dsr_encapsulation: given.dsr_encapsulation.unwrap_or(DsrEncapsulation::Ipip),
            dsr_peers: check::peers(given.dsr_peers.as_deref())?,
            socket_lb: given.socket_lb.unwrap_or(SocketLb::Host),
            xdp: check::xdp(given.xdp),
            forwarding: check::forwarding(given.forwarding),
            syn_retries: given.syn_retries.unwrap_or(0),
            healthz: check::healthz(given.healthz_bind_address.as_deref(), bind)?,
            metrics: check::metrics(given.metrics_bind_address.as_deref(), bind)?,
            web: check::web(given.web_bind_address.as_deref(), given.web_token_file.clone())?,
            dns: check::dns(&given)?,
            service_metrics: given.service_metrics.unwrap_or(ServiceMetrics::Service),
            flow_log: check::flow_log(&given)?,
            capacities: capacities(&given),
            log_filter: check::log_filter(given.log_level)?,
            log_format: given.log_format.unwrap_or(LogFormat::Human),
            bpf_log: given.bpf_log.and_then(check::bpf_log_level),
            without_effect: Vec::new(),
        })
    }

    /// The address of this node, if `--bind-address` gives one; `None` for an unspecified address.
    pub fn node_ip(&self) -> Option<IpAddr> {
        (!self.bind_address.is_unspecified()).then_some(self.bind_address)
    }

    /// Whether the programs decapsulate packets that arrive through tunnels from other nodes.
    pub fn decapsulates(&self) -> bool {
        self.north_south != NorthSouthMode::Snat || !self.dsr_peers.is_empty()
    }

    /// The part of the configuration that decides the desired state of Services.
    pub fn policy(&self) -> Policy {
        Policy {
            node_name: self.node_name.as_str().into(),
            masquerade_all: self.masquerade_all,
            ignore_external_ips: self.ignore_external_ips,
            scheduler: self.scheduler,
            north_south: self.north_south,
            maglev: self.maglev,
        }
    }
}

/// The sizes of the maps that the agent creates.
fn capacities(given: &RunArgs) -> Capacities {
    let defaults = Capacities::default();
    Capacities {
        services: given.max_frontends.unwrap_or(defaults.services),
        backends: given.max_backends.unwrap_or(defaults.backends),
        tables: given.max_table_slots.unwrap_or(defaults.tables),
        // A connection takes two entries. A connection that is masqueraded through the stack takes four entries, and so
        // counts as two connections.
        conntrack: given.max_connections.map_or(defaults.conntrack, |count| count.saturating_mul(2)),
        affinity: given.max_affinity_clients.unwrap_or(defaults.affinity),
    }
}
