//! Options with which the data plane is opened.

use std::path::PathBuf;

use lb_common::{
    capacity,
    conntrack::{default_connections, flow_slots},
    hash::DEFAULT_SEED,
};

use crate::{
    bpf::layout::{self, MapSpec},
    net::devices::Device,
};

/// How much the programs log; every level includes the ones before it. The values are those of `aya_log::Level`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum BpfLogLevel {
    /// Logs conditions that should never occur.
    Error = 1,
    /// Also conditions that an administrator should know.
    Warn = 2,
    /// Also rare events.
    Info = 3,
    /// Also new flows.
    Debug = 4,
    /// Also everything else.
    Trace = 5,
}

/// Numbers of entries with which maps are created. A map that is pinned already keeps its size, unless it is one of the
/// maps that the loader replaces if they are too small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacities {
    /// Number of entries of `SERVICES` and `SERVICE_NAMES`, and of `VIPS` unless the minimum size of `VIPS` is larger.
    pub services: u32,
    /// Number of slots of `BACKENDS` and `ACTIVE`, and of entries of `ENDPOINT_NAMES`.
    pub backends: u32,
    /// Number of slots of `TABLES`.
    pub tables: u32,
    /// Number of flow table entries: a flow takes two, a tunnelled flow one.
    pub conntrack: u32,
    /// Number of clients with session affinity in `AFFINITY`.
    pub affinity: u32,
}

impl Default for Capacities {
    fn default() -> Self {
        Self {
            services: layout::SERVICES.shape.max_entries,
            backends: layout::BACKENDS.shape.max_entries,
            tables: layout::TABLES.shape.max_entries,
            conntrack: 2 * default_connections(online_cpus()),
            affinity: layout::AFFINITY.shape.max_entries,
        }
    }
}

impl Capacities {
    /// Raises the size of the map, and of maps whose size follows the same setting, to at least this number of entries.
    /// Changes only `services`, `backends` and `tables`: does nothing for other maps.
    pub(crate) fn raise(&mut self, spec: &MapSpec, entries: u32) {
        let size = match spec.name {
            "SERVICES" | "SERVICE_NAMES" | "VIPS" => &mut self.services,
            "BACKENDS" | "ACTIVE" | "ENDPOINT_NAMES" => &mut self.backends,
            "TABLES" => &mut self.tables,
            _ => return,
        };
        *size = entries.max(*size);
    }

    /// Number of entries with which the map is created.
    pub(crate) fn of(&self, spec: &MapSpec) -> u32 {
        match spec.name {
            "SERVICES" | "SERVICE_NAMES" => self.services,
            "VIPS" => self.services.max(capacity::MIN_VIPS),
            "BACKENDS" | "ACTIVE" | "ENDPOINT_NAMES" => self.backends,
            "TABLES" => self.tables,
            "FLOWS" => flow_slots(self.conntrack.div_ceil(2)),
            "CONNTRACK" => self.conntrack,
            "AFFINITY" => self.affinity,
            "FRAGMENTS" | "LIMIT_BUCKETS" | "UNANSWERED" | "SOCKET_BACKENDS" | "SOCKET_VIPS"
            | "CONNECTED_SOCKETS" => {
                spec.shape.max_entries.max(entries_of_lru(aya::util::nr_cpus().unwrap_or(1)))
            }
            _ => spec.shape.max_entries,
        }
    }
}

/// Number of CPUs that are online. (Some virtual machines have many more possible CPUs.)
fn online_cpus() -> u32 {
    aya::util::online_cpus().map_or(1, |cpus| u32::try_from(cpus.len()).unwrap_or(u32::MAX))
}

/// Minimal number of entries of an LRU map on a machine with this many CPUs.
fn entries_of_lru(cpus: usize) -> u32 {
    u32::try_from(cpus).unwrap_or(u32::MAX).saturating_mul(capacity::LRU_PER_CPU)
}

/// Options for opening the data plane.
#[derive(Clone, Debug)]
pub struct Options {
    /// Mount point of the BPF file system. The agent mounts one there if none is mounted.
    pub bpffs: PathBuf,
    /// Log level of the programs. With `None` the verifier removes all logging code.
    pub bpf_log: Option<BpfLogLevel>,
    /// Numbers of entries of new maps.
    pub capacities: Capacities,
    /// How programs are attached at tc; `None` uses tcx if the kernel has it.
    pub attach: Option<AttachMode>,
    /// Sockets whose Service addresses the socket programs translate; `None`: no socket programs are loaded.
    pub sockets: Option<SocketOptions>,
    /// Which wire devices get the XDP program.
    pub xdp: XdpOption,
    /// How packets of Services are forwarded between devices.
    pub forwarding: Forwarding,
    /// Whether the programs decapsulate packets in tunnels from other nodes. If not, the programs do not contain the
    /// code for this, and pass such packets on to the network stack.
    pub decapsulate: bool,
    /// Number of retransmissions of a SYN after which another backend is selected; 0 means never.
    pub syn_retries: u16,
    /// Whether the programs emit events for a flow log.
    pub flow_log: bool,
    /// Hash seed of the schedulers `mh`, `sh` and `dh`. Nodes that share the flows of a Service must have the same
    /// seed.
    pub hash_seed: u64,
    /// Devices whose programs the agent loads in parallel at the start; it loads others when a device needs them.
    pub devices: Vec<Device>,
}

impl Options {
    /// Default options for the data plane on this BPF file system.
    pub fn new(bpffs: impl Into<PathBuf>) -> Self {
        Self {
            bpffs: bpffs.into(),
            bpf_log: None,
            capacities: Capacities::default(),
            attach: None,
            sockets: None,
            xdp: XdpOption::Off,
            forwarding: Forwarding::Stack,
            decapsulate: true,
            syn_retries: 0,
            flow_log: false,
            hash_seed: DEFAULT_SEED,
            devices: Vec::new(),
        }
    }
}

/// How programs are attached to the tc hooks of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AttachMode {
    /// By tcx links, on kernel 6.6 and newer.
    Tcx,
    /// As filters of the clsact qdisc, on older kernels.
    Clsact,
}

impl AttachMode {
    /// The mode's name in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }
}

/// Which wire devices with an Ethernet header get the XDP program. A device with VLANs that strips the tags from frames
/// never gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum XdpOption {
    /// Devices whose drivers run XDP, except ends of pairs (veth, netkit): the other end of a veth may drop the frames
    /// that the program sends.
    Auto,
    /// Devices whose drivers run XDP, except veth devices whose other end would drop every frame that the program
    /// sends.
    Native,
    /// All wire devices: if the driver does not run XDP, the kernel does, on skbs.
    Generic,
    /// No device.
    #[default]
    Off,
}

/// Which network namespaces' sockets the hooks serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketScope {
    /// Only sockets in the agent's network namespace: those of the node's processes and of hostNetwork pods.
    Node,
    /// Sockets in every network namespace.
    All,
}

/// Which sockets the hooks serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// Folder of the cgroup (cgroup2) whose processes are served.
    pub cgroup: PathBuf,
    /// Which of these processes' sockets are served.
    pub scope: SocketScope,
}

/// How packets of Services are forwarded between devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Forwarding {
    /// Through the network stack, like packets of other connections; XDP between wire devices bypasses it.
    #[default]
    Stack,
    /// Bypassing the network stack wherever the route is known.
    Direct,
}
