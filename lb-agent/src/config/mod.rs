//! From what was typed ([`crate::cli`]) to what holds: a flag wins over the environment (clap does that part),
//! the environment over the file, the file over the default. Everything is checked here, before anything is done.

mod check;
mod configz;
mod error;
mod file;
mod flagz;
mod kube_proxy;
#[cfg(test)]
mod tests;

use std::{
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    ops::RangeInclusive,
    path::PathBuf,
};

use ipnet::IpNet;
use lb_common::{Scheduler, hash::DEFAULT_SEED};
use lb_core::{model::Policy, north_south::NorthSouthMode, tables::Maglev};

pub use self::error::ConfigError;
use self::{check::Detect, error::refused, file::File};
pub use crate::{
    cli::{DsrEncapsulation, ServiceMetrics, SocketLb},
    node::{DetectLocal, NodePortAddresses},
};
use crate::{
    cli::{KernelArgs, List, LogFormat, RunArgs},
    kubernetes::ApiServer,
};
use lb_datapath::{BpfLogLevel, Capacities, DEFAULT_MASQUERADE_PORTS, DevicePatterns, Forwarding, XdpOption};

/// Where a BPF file system is mounted by convention.
const DEFAULT_BPFFS: &str = "/sys/fs/bpf";
/// Where cluster IPs come from when nothing else is said: what kubeadm uses, and a unique local range beside it.
const DEFAULT_SERVICE_RANGES: &str = "10.96.0.0/12,fd00:10:96::/112";
/// Kubernetes sets it in every Pod.
const IN_CLUSTER: &str = "KUBERNETES_SERVICE_HOST";

/// What every command needs to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelPaths {
    /// Mount point of the BPF file system.
    pub bpffs: PathBuf,
    /// Control group of the sockets to serve; `None` is the root of the cgroup2 mount.
    pub cgroup: Option<PathBuf>,
}

/// What `run` needs to know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// What every command needs to know.
    pub kernel: KernelPaths,
    /// Where Services come from.
    pub source: Source,
    /// Name of this node.
    pub node_name: String,
    /// The address by which others know this node, see [`Self::node_ip`]; an unspecified one is only a family.
    pub bind_address: IpAddr,
    /// Which devices are served; what is empty is detected.
    pub devices: DevicePatterns,
    /// Ranges of cluster IPs, one of each family at most; `None` are those that the API server names.
    pub service_ranges: Option<Vec<IpNet>>,
    /// Whether what is sent to an address of these ranges that no Service has is dropped. Nobody has said of the default
    /// ranges that there are no other machines in them.
    pub drops_unknown_vips: bool,
    /// How clients inside the cluster are told from others.
    pub detect_local: DetectLocal,
    /// Whether every client of a cluster IP is masqueraded.
    pub masquerade_all: bool,
    /// Source ports of masqueraded packets.
    pub masquerade_ports: RangeInclusive<u16>,
    /// Which addresses of the node serve node ports.
    pub nodeport_addresses: NodePortAddresses,
    /// How backends are chosen where a Service says nothing.
    pub scheduler: Scheduler,
    /// How Maglev tables are made, and what all schedulers that hash do that with.
    pub maglev: Maglev,
    /// How clients from outside reach backends on other nodes where a Service says nothing.
    pub north_south: NorthSouthMode,
    /// Through which tunnel, if any.
    pub dsr_encapsulation: DsrEncapsulation,
    /// Who may send packets through such a tunnel.
    pub dsr_peers: Vec<IpNet>,
    /// Whose sockets are served.
    pub socket_lb: SocketLb,
    /// Which wire devices are served at XDP.
    pub xdp: XdpOption,
    /// How packets get from device to device.
    pub forwarding: Forwarding,
    /// Retransmissions of a SYN after which another backend is tried; 0 is never.
    pub syn_retries: u16,
    /// Where health is served.
    pub healthz: Option<SocketAddr>,
    /// Where metrics are served.
    pub metrics: Option<SocketAddr>,
    /// Of what traffic is counted there.
    pub service_metrics: ServiceMetrics,
    /// Filter of the log as in `RUST_LOG`; `None` where nothing was said.
    pub log_filter: Option<String>,
    /// How log lines look.
    pub log_format: LogFormat,
    /// How much the BPF programs log; `None` is nothing.
    pub bpf_log: Option<BpfLogLevel>,
    /// Sizes of new maps.
    pub capacities: Capacities,
    /// Fields of a KubeProxyConfiguration that ask for something that is not done.
    pub without_effect: Vec<String>,
}

/// Where Services come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A folder of manifests.
    Manifests(PathBuf),
    /// An API server.
    ApiServer(ApiServer),
}

impl KernelPaths {
    /// What holds for a command that only looks at the kernel or cleans up.
    ///
    /// # Errors
    /// The file is unreadable, or any of its settings is refused.
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
            return Err(refused("--bpffs", bpffs.display(), "give an absolute path"));
        }
        Ok(Self { bpffs, cgroup: typed.cgroup.or(cgroup) })
    }
}

impl Config {
    /// What holds for `run`.
    ///
    /// # Errors
    /// The file is unreadable, a setting is refused, or there is no source of Services.
    pub fn new(kernel: KernelArgs, run: RunArgs) -> Result<Self, ConfigError> {
        let File { settings: file, without_effect } = File::read(kernel.config.as_deref())?;
        let kernel = KernelPaths::merge(kernel, file.bpffs, file.cgroup)?;
        if let Some(cgroup) = &kernel.cgroup {
            check::cgroup(cgroup)?;
        }
        let typed = (run.manifests, run.kubeconfig);
        let sources = if typed == (None, None) { (file.manifests, file.kubeconfig) } else { typed };
        let source = check::source(sources, std::env::var_os(IN_CLUSTER).is_some())?;
        let detect = Detect {
            mode: run.detect_local_mode.or(file.detect_local_mode),
            cluster_cidr: list(run.cluster_cidr, file.cluster_cidr),
            bridge: run.pod_bridge_interface.or(file.pod_bridge_interface),
            prefix: run.pod_interface_name_prefix.or(file.pod_interface_name_prefix),
        };
        let given_ranges = list(run.service_cluster_ip_range, file.service_cluster_ip_range);
        let has_api_server = matches!(source, Source::ApiServer(_));
        let default_ranges =
            || (!has_api_server).then(|| List::Text(DEFAULT_SERVICE_RANGES.to_owned()).items());
        let ports = run.masquerade_ports.or(file.masquerade_ports);
        let bind = check::bind(run.bind_address.or(file.bind_address))?;
        let defaults = Capacities::default();
        let connections = size(run.max_connections, file.max_connections);
        Ok(Self {
            kernel,
            detect_local: check::detect_local(detect, &source)?,
            source,
            node_name: check::node_name(run.node_name.or(file.node_name))?,
            bind_address: bind,
            devices: DevicePatterns {
                wire: check::patterns("--wire-device", list(run.wire_device, file.wire_device))?,
                workload: check::patterns(
                    "--workload-device",
                    list(run.workload_device, file.workload_device),
                )?,
            },
            drops_unknown_vips: has_api_server || given_ranges.is_some(),
            service_ranges: given_ranges.or_else(default_ranges).map(check::service_ranges).transpose()?,
            masquerade_all: run.masquerade_all || file.masquerade_all,
            masquerade_ports: ports.map_or(Ok(DEFAULT_MASQUERADE_PORTS), |text| check::ports(&text))?,
            nodeport_addresses: check::nodeport_addresses(list(
                run.nodeport_addresses,
                file.nodeport_addresses,
            ))?,
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
            service_metrics: run.service_metrics.or(file.service_metrics).unwrap_or(ServiceMetrics::Service),
            log_filter: check::log_filter(run.log_level.or(file.log_level))?,
            log_format: run.log_format.or(file.log_format).unwrap_or(LogFormat::Human),
            bpf_log: run.bpf_log.or(file.bpf_log).and_then(check::bpf_log_level),
            capacities: Capacities {
                services: size(run.max_frontends, file.max_frontends).unwrap_or(defaults.services),
                backends: size(run.max_backends, file.max_backends).unwrap_or(defaults.backends),
                tables: size(run.max_table_slots, file.max_table_slots).unwrap_or(defaults.tables),
                // One entry for each direction.
                conntrack: connections.map_or(defaults.conntrack, |count| count.saturating_mul(2)),
                affinity: size(run.max_affinity_clients, file.max_affinity_clients)
                    .unwrap_or(defaults.affinity),
            },
            without_effect,
        })
    }

    /// The address by which others know this node, if it was given; else the Node object says it.
    pub fn node_ip(&self) -> Option<IpAddr> {
        (!self.bind_address.is_unspecified()).then_some(self.bind_address)
    }

    /// What the plan wants to know.
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
