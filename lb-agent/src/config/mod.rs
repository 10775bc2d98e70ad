//! The effective configuration, from the arguments ([`crate::cli`]). A flag overrides the environment (clap implements
//! that part), the environment overrides the file, and the file overrides the default. Two exceptions: a flag without a
//! value, such as `--masquerade-all`, is on if any of the three sets it, and the file names the source of Services only
//! if neither flags nor the environment name one.

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
    num::NonZeroU32,
    ops::RangeInclusive,
    path::PathBuf,
    sync::Arc,
};

use ipnet::IpNet;
use lb_common::{Scheduler, hash::DEFAULT_SEED};
use lb_core::{
    announce::lease::Prefer,
    dns::Zone,
    model::{ObjectName, Policy},
    north_south::NorthSouthMode,
    tables::Maglev,
};

pub use self::error::ConfigError;
use self::{
    check::{Detect, Dns, FlowLogSettings},
    error::refused,
    file::File,
};
use crate::{
    announce::bgp,
    cli::{KernelArgs, List, LogFormat, RunArgs},
    flow_log::FlowLogConfig,
    kubernetes::ApiServer,
};
pub use crate::{
    cli::{DsrEncapsulation, ServiceMetrics, SocketLb},
    node::{DetectLocal, NodePortAddresses},
};
use lb_datapath::{BpfLogLevel, Capacities, DEFAULT_MASQUERADE_PORTS, DevicePatterns, Forwarding, XdpOption};
use lb_dns::Access;

/// Conventional mount point of a BPF file system.
const DEFAULT_BPFFS: &str = "/sys/fs/bpf";
/// Default ranges of cluster IPs: that of kubeadm, and a unique local IPv6 range.
const DEFAULT_SERVICE_RANGES: &str = "10.96.0.0/12,fd00:10:96::/112";
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
    /// The address of this node, see [`Self::node_ip`]; an unspecified address only selects a family.
    pub bind_address: IpAddr,
    /// Name patterns of wire and workload interfaces; an empty list means that the agent detects them.
    pub devices: DevicePatterns,
    /// Ranges of cluster IPs, at most one for each family; `None` to use those that the API server names.
    pub service_ranges: Option<Vec<IpNet>>,
    /// Whether packets to unassigned addresses in the ranges of cluster IPs are dropped. False for the default ranges,
    /// which may contain addresses of other machines.
    pub drops_unknown_vips: bool,
    /// Networks from which load balancers get addresses, in addition to the pools in the directory of manifests.
    pub load_balancer_pool: Vec<IpNet>,
    /// The `loadBalancerClass` of the Services that get addresses; `None` for Services without a class.
    pub load_balancer_class: Option<String>,
    /// Whether the agent assigns addresses from the API server's pools while it is elected.
    pub load_balancer_controller: bool,
    /// Whether a Service gets another address if the pools do not give it its own any more.
    pub load_balancer_reassign: bool,
    /// Which nodes share load balancers' addresses at layer 2, and how.
    pub announce: AnnounceConfig,
    /// How load balancers' addresses are announced by BGP; `None` if they are not.
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
    /// Scheduler of Services without an annotation that names one.
    pub scheduler: Scheduler,
    /// Size of Maglev tables, and the hash seed of the schedulers `mh`, `sh` and `dh`.
    pub maglev: Maglev,
    /// How packets of external clients reach backends on other nodes by default.
    pub north_south: NorthSouthMode,
    /// Tunnel to backends on other nodes under direct server return.
    pub dsr_encapsulation: DsrEncapsulation,
    /// Nodes that may send packets to backends on this node through a tunnel.
    pub dsr_peers: Vec<IpNet>,
    /// Whose socket system calls are translated: processes of the node, also pods, or none.
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
    /// Numbers of entries with which the agent creates new BPF maps.
    pub capacities: Capacities,
    /// Fields of a KubeProxyConfiguration to warn about: unknown ones, and requests for something that the agent does
    /// not do.
    pub without_effect: Vec<String>,
}

/// The members that share load balancers' addresses: the configured `members`, or with `port` the Nodes of the cluster.
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
    /// Addresses and ports that the DNS server listens on; empty for no server.
    pub bind: Vec<SocketAddr>,
    /// The DNS domain that contains the names of Services.
    pub zone: Zone,
    /// DNS servers for names outside `zone`; empty for those in `/etc/resolv.conf`.
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
    /// A directory of YAML manifests.
    Manifests(PathBuf),
    /// An API server of Kubernetes.
    ApiServer(ApiServer),
}

impl KernelPaths {
    /// The paths for a command other than `run`.
    ///
    /// # Errors
    /// The file is unreadable or invalid, or the path of the BPF file system is relative.
    pub fn new(typed: KernelArgs) -> Result<Self, ConfigError> {
        let file = File::read(typed.config.as_deref())?;
        Self::merge(typed, file.settings.bpffs, file.settings.cgroup)
    }

    fn merge(
        typed: KernelArgs,
        bpffs: Option<PathBuf>,
        cgroup: Option<PathBuf>,
    ) -> Result<Self, ConfigError> {
        let bpffs = typed.bpffs.or(bpffs).unwrap_or_else(|| DEFAULT_BPFFS.into());
        if !bpffs.is_absolute() {
            return Err(refused("--bpffs", bpffs.display(), "set an absolute path"));
        }
        Ok(Self { bpffs, cgroup: typed.cgroup.or(cgroup) })
    }
}

impl Config {
    /// The configuration for `run`.
    ///
    /// # Errors
    /// The file is unreadable or invalid, a setting is invalid, there is no source of Services or there are two, or the
    /// host name cannot be read.
    pub fn new(kernel: KernelArgs, run: RunArgs) -> Result<Self, ConfigError> {
        let File { settings: file, without_effect } = File::read(kernel.config.as_deref())?;
        let kernel = KernelPaths::merge(kernel, file.bpffs, file.cgroup)?;
        if let Some(cgroup) = &kernel.cgroup {
            check::cgroup(cgroup)?;
        }
        let typed = (run.manifests, run.kubeconfig);
        let sources = if typed == (None, None) { (file.manifests, file.kubeconfig) } else { typed };
        let source = check::source(sources, std::env::var_os(IN_CLUSTER).is_some())?;
        let node_name = check::node_name(run.node_name.or(file.node_name))?;
        let detect = Detect {
            mode: run.detect_local_mode.or(file.detect_local_mode),
            cluster_cidr: list(run.cluster_cidr, file.cluster_cidr),
            bridge: run.pod_bridge_interface.or(file.pod_bridge_interface),
            prefix: run.pod_interface_name_prefix.or(file.pod_interface_name_prefix),
        };
        let dns = check::dns(Dns {
            bind: list(run.dns_bind_address, file.dns_bind_address),
            domain: run.cluster_domain.or(file.cluster_domain),
            upstreams: list(run.dns_upstream, file.dns_upstream),
            allow: list(run.dns_allow, file.dns_allow),
            rate: run.dns_rate_limit.or(file.dns_rate_limit),
            intercept: run.dns_intercept.or(file.dns_intercept),
            intercept_port: run.dns_intercept_port.or(file.dns_intercept_port),
            pods: detect.cluster_cidr.clone(),
        })?;
        let given_ranges = list(run.service_cluster_ip_range, file.service_cluster_ip_range);
        let has_api_server = matches!(source, Source::ApiServer(_));
        let default_ranges =
            || (!has_api_server).then(|| List::Text(DEFAULT_SERVICE_RANGES.to_owned()).items());
        let drops_unknown_vips = has_api_server || given_ranges.is_some();
        let service_ranges = given_ranges.or_else(default_ranges).map(check::service_ranges).transpose()?;
        let ports = run.masquerade_ports.or(file.masquerade_ports);
        let bind = check::bind(run.bind_address.or(file.bind_address))?;
        let defaults = Capacities::default();
        let connections = size(run.max_connections, file.max_connections);
        let controller = run.load_balancer_controller || file.load_balancer_controller;
        let reassign = run.load_balancer_reassign || file.load_balancer_reassign;
        Ok(Self {
            kernel,
            detect_local: check::detect_local(detect, &source)?,
            load_balancer_pool: check::load_balancer_pool(
                list(run.load_balancer_pool, file.load_balancer_pool),
                &source,
                service_ranges.as_deref().unwrap_or_default(),
            )?,
            load_balancer_class: run
                .load_balancer_class
                .or(file.load_balancer_class)
                .filter(|class| !class.is_empty()),
            load_balancer_controller: check::load_balancer_controller(controller, &source)?,
            load_balancer_reassign: check::load_balancer_reassign(reassign, controller, &source)?,
            announce: check::announce(
                (run.announce || file.announce, run.announce_port.or(file.announce_port)),
                list(run.announce_member, file.announce_member),
                run.announce_key_file.or(file.announce_key_file),
                run.announce_prefer.or(file.announce_prefer),
                &source,
                &node_name,
            )?,
            bgp: check::announce_by_bgp(
                run.announce_table.or(file.announce_table),
                run.bird_config.or(file.bird_config),
                run.bird_socket.or(file.bird_socket),
            )?,
            source,
            node_name,
            bind_address: bind,
            devices: DevicePatterns {
                wire: check::patterns("--wire-device", list(run.wire_device, file.wire_device))?,
                workload: check::patterns(
                    "--workload-device",
                    list(run.workload_device, file.workload_device),
                )?,
            },
            drops_unknown_vips,
            service_ranges,
            masquerade_all: run.masquerade_all || file.masquerade_all,
            masquerade_ports: ports.map_or(Ok(DEFAULT_MASQUERADE_PORTS), |text| check::ports(&text))?,
            nodeport_addresses: check::nodeport_addresses(list(
                run.nodeport_addresses,
                file.nodeport_addresses,
            ))?,
            denied_sources: check::denied_sources(list(run.deny_source, file.deny_source))?,
            scheduler: check::scheduler(run.scheduler.or(file.scheduler))?,
            maglev: Maglev {
                size: check::table_size(run.maglev_table_size.or(file.maglev_table_size))?,
                seed: run.maglev_seed.or(file.maglev_seed).unwrap_or(DEFAULT_SEED),
            },
            north_south: check::north_south(run.north_south_mode.or(file.north_south_mode))?,
            dsr_encapsulation: run
                .dsr_encapsulation
                .or(file.dsr_encapsulation)
                .unwrap_or(DsrEncapsulation::Ipip),
            dsr_peers: check::peers(list(run.dsr_peers, file.dsr_peers))?,
            socket_lb: run.socket_lb.or(file.socket_lb).unwrap_or(SocketLb::Host),
            xdp: check::xdp(run.xdp.or(file.xdp)),
            forwarding: check::forwarding(run.forwarding.or(file.forwarding)),
            syn_retries: run.syn_retries.or(file.syn_retries).unwrap_or(0),
            healthz: check::healthz(run.healthz_bind_address.or(file.healthz_bind_address), bind)?,
            metrics: check::metrics(run.metrics_bind_address.or(file.metrics_bind_address), bind)?,
            web: check::web(
                run.web_bind_address.or(file.web_bind_address),
                run.web_token_file.or(file.web_token_file),
            )?,
            dns,
            service_metrics: run.service_metrics.or(file.service_metrics).unwrap_or(ServiceMetrics::Service),
            flow_log: check::flow_log(FlowLogSettings {
                target: run.flow_log.or(file.flow_log),
                interval: size(run.flow_log_interval, file.flow_log_interval),
                sample: run.flow_log_sample.or(file.flow_log_sample),
                services: run.flow_log_services.or(file.flow_log_services),
                max_size: run.flow_log_max_size.or(file.flow_log_max_size),
                keep: run.flow_log_keep.or(file.flow_log_keep),
            })?,
            log_filter: check::log_filter(run.log_level.or(file.log_level))?,
            log_format: run.log_format.or(file.log_format).unwrap_or(LogFormat::Human),
            bpf_log: run.bpf_log.or(file.bpf_log).and_then(check::bpf_log_level),
            capacities: Capacities {
                services: size(run.max_frontends, file.max_frontends).unwrap_or(defaults.services),
                backends: size(run.max_backends, file.max_backends).unwrap_or(defaults.backends),
                tables: size(run.max_table_slots, file.max_table_slots).unwrap_or(defaults.tables),
                // A connection takes two entries. One that is masqueraded through the stack takes four entries, and so
                // counts as two connections.
                conntrack: connections.map_or(defaults.conntrack, |count| count.saturating_mul(2)),
                affinity: size(run.max_affinity_clients, file.max_affinity_clients)
                    .unwrap_or(defaults.affinity),
            },
            without_effect,
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
            scheduler: self.scheduler,
            north_south: self.north_south,
            maglev: self.maglev,
        }
    }
}

fn list(typed: Option<Vec<String>>, file: Option<List>) -> Option<Vec<String>> {
    typed.or_else(|| file.map(List::items))
}

fn size(typed: Option<u32>, file: Option<NonZeroU32>) -> Option<u32> {
    typed.or(file.map(NonZeroU32::get))
}
