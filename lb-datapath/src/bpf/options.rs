//! How the data plane is to be opened: [`Options`] and the choices in it.

use std::path::PathBuf;

use lb_common::hash::DEFAULT_SEED;

use crate::bpf::layout::{self, MapSpec};

/// How much the programs log; every level includes those before it. The values are those of `aya_log::Level`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum BpfLogLevel {
    /// What should never happen.
    Error = 1,
    /// What an administrator should know.
    Warn = 2,
    /// What happens now and then.
    Info = 3,
    /// New flows.
    Debug = 4,
    /// Everything there is.
    Trace = 5,
}

/// Sizes of the maps in entries; they count only for maps that are not pinned yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacities {
    /// Frontends.
    pub services: u32,
    /// Slots of the backend arena.
    pub backends: u32,
    /// Slots of the arena of schedulers' tables.
    pub tables: u32,
    /// Entries of connection tracking, two for each flow.
    pub conntrack: u32,
    /// Clients of services with affinity.
    pub affinity: u32,
}

impl Default for Capacities {
    fn default() -> Self {
        Self {
            services: layout::SERVICES.shape.max_entries,
            backends: layout::BACKENDS.shape.max_entries,
            tables: layout::TABLES.shape.max_entries,
            conntrack: layout::CONNTRACK.shape.max_entries,
            affinity: layout::AFFINITY.shape.max_entries,
        }
    }
}

impl Capacities {
    pub(crate) fn of(&self, spec: &MapSpec) -> u32 {
        match spec.name {
            "SERVICES" | "SERVICE_NAMES" => self.services,
            "BACKENDS" | "ACTIVE" | "ENDPOINT_NAMES" => self.backends,
            "TABLES" => self.tables,
            "CONNTRACK" => self.conntrack,
            "AFFINITY" => self.affinity,
            _ => spec.shape.max_entries,
        }
    }
}

/// How to open the data plane.
#[derive(Clone, Debug)]
pub struct Options {
    /// The BPF file system; mounted there if there is none.
    pub bpffs: PathBuf,
    /// What the programs log; nothing costs nothing.
    pub bpf_log: Option<BpfLogLevel>,
    /// Sizes of new maps.
    pub capacities: Capacities,
    /// How to attach; otherwise what the kernel does best.
    pub attach: Option<AttachMode>,
    /// Which sockets are served; none, if nothing is said.
    pub sockets: Option<SocketOptions>,
    /// Which wire devices get the XDP program; none, if nothing is said.
    pub xdp: XdpOption,
    /// How packets get from device to device.
    pub forwarding: Forwarding,
    /// Retransmissions of a SYN after which another backend is tried; 0 is never.
    pub syn_retries: u16,
    /// What schedulers hash flows with; nodes that share the work of a service need the same.
    pub hash_seed: u64,
}

impl Options {
    /// The defaults, on this BPF file system.
    pub fn new(bpffs: impl Into<PathBuf>) -> Self {
        Self {
            bpffs: bpffs.into(),
            bpf_log: None,
            capacities: Capacities::default(),
            attach: None,
            sockets: None,
            xdp: XdpOption::Off,
            forwarding: Forwarding::Stack,
            syn_retries: 0,
            hash_seed: DEFAULT_SEED,
        }
    }
}

/// What holds programs on devices.
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

/// Which wire devices get the XDP program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum XdpOption {
    /// Those whose drivers run it themselves, but no veth: what is sent out there is lost unless the other end has an XDP
    /// program, too.
    Auto,
    /// Those whose drivers run it themselves.
    Native,
    /// All: where the driver does not run it, the kernel does, on copies of packets.
    Generic,
    /// None.
    #[default]
    Off,
}

/// Whose sockets are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketScope {
    /// Those of the agent's network namespace: processes of the node, and pods in its network.
    Node,
    /// Those of every network namespace, which are in the control group.
    All,
}

/// Which sockets are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// The folder of the control group.
    pub cgroup: PathBuf,
    /// Which of its sockets.
    pub scope: SocketScope,
}

/// How packets of services get from device to device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Forwarding {
    /// Through the stack, as those of other connections; between wires that XDP serves, past it.
    #[default]
    Stack,
    /// Past the stack wherever the way is known.
    Direct,
}
