//! Options for opening the data plane.

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
    /// Conditions that should never occur.
    Error = 1,
    /// Conditions that an administrator should know.
    Warn = 2,
    /// Rare events.
    Info = 3,
    /// New flows.
    Debug = 4,
    /// Everything.
    Trace = 5,
}

/// Sizes of the maps in entries. A map that is pinned already keeps its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacities {
    /// Frontends.
    pub services: u32,
    /// Slots of the backend arena.
    pub backends: u32,
    /// Slots of the arena of scheduler tables.
    pub tables: u32,
    /// Entries of connection tracking: two for each flow, one for a flow in a tunnel.
    pub conntrack: u32,
    /// Clients of Services with session affinity.
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
    /// Raises the size of the map, and of the maps whose size the same setting determines, to at least this number of
    /// entries. Does nothing for a map that no such setting sizes.
    pub(crate) fn raise(&mut self, spec: &MapSpec, entries: u32) {
        let size = match spec.name {
            "SERVICES" | "SERVICE_NAMES" | "VIPS" => &mut self.services,
            "BACKENDS" | "ACTIVE" | "ENDPOINT_NAMES" => &mut self.backends,
            "TABLES" => &mut self.tables,
            _ => return,
        };
        *size = entries.max(*size);
    }

    /// The size of the map, in entries.
    pub(crate) fn of(&self, spec: &MapSpec) -> u32 {
        match spec.name {
            "SERVICES" | "SERVICE_NAMES" => self.services,
            "VIPS" => self.services.max(capacity::MIN_VIPS),
            "BACKENDS" | "ACTIVE" | "ENDPOINT_NAMES" => self.backends,
            "TABLES" => self.tables,
            "FLOWS" => flow_slots(self.conntrack.div_ceil(2)),
            "CONNTRACK" => self.conntrack,
            "AFFINITY" => self.affinity,
            "FRAGMENTS" | "SOCKET_BACKENDS" | "SOCKET_VIPS" | "CONNECTED_SOCKETS" => {
                spec.shape.max_entries.max(entries_of_lru(aya::util::nr_cpus().unwrap_or(1)))
            }
            _ => spec.shape.max_entries,
        }
    }
}

/// The number of CPUs that run. (Some virtual machines also have many CPUs that may be added later.)
fn online_cpus() -> u32 {
    aya::util::online_cpus().map_or(1, |cpus| u32::try_from(cpus.len()).unwrap_or(u32::MAX))
}

/// The smallest size of an LRU map on a machine with that many CPUs.
fn entries_of_lru(cpus: usize) -> u32 {
    u32::try_from(cpus).unwrap_or(u32::MAX).saturating_mul(capacity::LRU_PER_CPU)
}

/// Options for opening the data plane.
#[derive(Clone, Debug)]
pub struct Options {
    /// Mount point of the BPF file system. The agent mounts one there if none is mounted.
    pub bpffs: PathBuf,
    /// The log level of the programs. With `None` the verifier removes all logging code.
    pub bpf_log: Option<BpfLogLevel>,
    /// Sizes of new maps.
    pub capacities: Capacities,
    /// How to attach to tc; by default with tcx if the kernel has it.
    pub attach: Option<AttachMode>,
    /// Which sockets are served; `None`: no sockets.
    pub sockets: Option<SocketOptions>,
    /// Which wire devices get the XDP program.
    pub xdp: XdpOption,
    /// How packets of Services are forwarded between devices.
    pub forwarding: Forwarding,
    /// Whether the programs decapsulate packets in tunnels from other nodes. If not, they lack that code, and such
    /// packets pass.
    pub decapsulate: bool,
    /// Retransmissions of a SYN after which another backend is selected; 0 means never.
    pub syn_retries: u16,
    /// Whether the programs emit events for a flow log.
    pub flow_log: bool,
    /// Seed of hashing schedulers. Nodes that share the flows of a Service need the same seed.
    pub hash_seed: u64,
    /// The devices that get programs first. The agent loads their programs in parallel at the start, and others when a
    /// device needs them.
    pub devices: Vec<Device>,
}

impl Options {
    /// The default options for this BPF file system.
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
    /// tcx links, kernel 6.6 and newer.
    Tcx,
    /// Filters of the clsact qdisc.
    Clsact,
}

impl AttachMode {
    /// The name used in tables and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }
}

/// Which wire devices with an Ethernet header get the XDP program. A device with VLANs that strips the tags from frames
/// does not get it in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum XdpOption {
    /// Devices whose drivers run XDP, except veth devices: the other end of a veth may drop the frames that the program
    /// sends.
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

/// Which processes the socket hooks serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketScope {
    /// Sockets of the agent's network namespace: processes of the node and hostNetwork pods.
    Node,
    /// Sockets of all network namespaces.
    All,
}

/// Which sockets the hooks serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// Folder of the control group (cgroup v2); only its processes are served.
    pub cgroup: PathBuf,
    /// Which sockets of those processes are served.
    pub scope: SocketScope,
}

/// How packets of Services are forwarded between devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Forwarding {
    /// Through the stack, like packets of other connections; between wire devices that run XDP, bypassing the stack.
    #[default]
    Stack,
    /// Bypassing the stack wherever the route is known.
    Direct,
}
