//! Everything that touches the kernel: maps, programs, pins, devices.
//!
//! ```text
//! Datapath::open ─ maps (pinned) ──── ServiceMaps: contents(), apply()      the one writer
//!                │                    Conntrack: list(), expire(), purge()  beside it
//!                └ programs (pinned)  Attacher: sync(devices)               beside it, driven by DeviceWatcher
//! ```
//!
//! What is pinned works without the agent. Opening again reuses the maps after checking their shape, and replaces
//! the programs on each device in one step.

mod active;
mod affinity;
mod anchor;
mod attach;
mod bpffs;
mod check;
mod cleanup;
mod clsact;
mod conntrack;
mod device_map;
mod devices;
mod error;
mod globals;
pub mod grace;
mod handover;
mod inside;
mod layout;
mod loader;
mod looked_up;
mod maps;
mod monitor;
mod netlink;
mod network;
mod objects;
mod pinned;
mod ports;
mod probe;
mod raw_map;
mod route;
mod run_time;
mod settings;
mod sockets;
mod stats;
mod sys;
mod table;
mod udp_sockets;
mod watch;
mod xdp;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use lb_common::{handover::OVER, hash::DEFAULT_SEED};
use tracing::info;

/// A name or glob of devices.
pub use glob::Pattern as DevicePattern;

pub use self::{
    active::{ActiveFlows, Recount},
    affinity::{AffinitySweep, AffinityTable},
    anchor::{Anchor, Rescued},
    attach::{AttachMode, Attacher, Direction, Place, SyncReport},
    check::{Probe, ProbeResult, check, degraded, forwards},
    cleanup::{Removed, cleanup},
    conntrack::{Connection, Conntrack, Ledger, Sweep, monotonic_nanoseconds},
    device_map::{DeviceMap, Forwarding},
    devices::{Device, DeviceKind, DevicePatterns, Layer, classify},
    error::DatapathError,
    globals::Globals,
    inside::InsideDevices,
    loader::{BpfLogger, OBJECT},
    looked_up::LookedUp,
    maps::{ApplyError, ServiceMaps},
    monitor::Monitor,
    network::{DefaultRoute, Link, LinkAddress, Network, device_name},
    objects::{LinkObject, MapObject, Objects, ProgramObject},
    pinned::{Attachment, MapFill, Pinned, ProgramStatus, XdpAttachment},
    ports::{DEFAULT_MASQUERADE_PORTS, PortReservation},
    route::{Route, Routes},
    run_time::{RunTime, Work, work},
    settings::SettingsMap,
    sockets::{SocketAttachment, SocketOptions, SocketScope, cgroup_root},
    stats::Stats,
    table::Table,
    udp_sockets::UdpSockets,
    watch::{DeviceWatcher, detect_devices},
    xdp::{XdpAttacher, XdpMode, XdpOption},
};
use self::{
    bpffs::{Folder, Lock},
    handover::Handover,
    layout::MapSpec,
    loader::{Loaded, LoadedProgram, Programs},
};

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
    fn of(&self, spec: &MapSpec) -> u32 {
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

/// The data plane of this node, opened for writing. There is one at a time; dropping it changes nothing in the
/// kernel.
#[derive(Debug)]
pub struct Datapath {
    folder: Folder,
    programs: Arc<Programs>,
    xdp: (XdpOption, Arc<Vec<LoadedProgram>>),
    forwarding: Forwarding,
    maps: ServiceMaps,
    conntrack: Conntrack,
    attach: AttachMode,
    /// The control group and its programs.
    sockets: Option<(PathBuf, Vec<LoadedProgram>)>,
    logger: Logger,
    handover: Option<Handover>,
    _lock: Lock,
}

struct Logger(Option<BpfLogger>);

impl std::fmt::Debug for Logger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Logger").field(&self.0.is_some()).finish()
    }
}

impl Datapath {
    /// Creates the maps or takes those that are pinned, and loads the programs. Devices keep the programs they have
    /// until [`Attacher::sync`]; what an agent of another layout has left is taken over by [`Self::finish_handover`].
    pub fn open(options: &Options) -> Result<Self, DatapathError> {
        let folder = Folder::create(&options.bpffs)?;
        let lock = folder.lock()?;
        let mut handover = Handover::begin(&folder, &options.capacities)?;
        let Loaded { programs, xdp_programs, socket_programs, logger } = loader::load(&folder, options)?;
        let attach = options.attach.map_or_else(AttachMode::probe, Ok)?;
        match &mut handover {
            Some(handover) => handover.fill()?,
            None => {
                handover::set_mode(&folder, OVER)?;
                handover::describe(&folder)?;
            }
        }
        Ok(Self {
            maps: ServiceMaps::open(&folder)?,
            conntrack: Conntrack::open(&folder)?,
            programs: Arc::new(programs),
            xdp: (options.xdp, Arc::new(xdp_programs)),
            forwarding: options.forwarding,
            attach,
            sockets: options.sockets.as_ref().map(|sockets| (sockets.cgroup.clone(), socket_programs)),
            logger: Logger(logger),
            handover,
            folder,
            _lock: lock,
        })
    }

    /// The maps of the control plane.
    pub const fn maps(&self) -> &ServiceMaps {
        &self.maps
    }

    /// Connection tracking; a handle of its own.
    pub fn conntrack(&self) -> Conntrack {
        self.conntrack.clone()
    }

    /// Backends of clients whose service has affinity; a handle of its own. Have one at a time.
    pub fn affinity(&self) -> Result<AffinityTable, DatapathError> {
        AffinityTable::open(&self.folder, self.maps.clone())
    }

    /// Connected UDP sockets of this network namespace; a handle of its own.
    pub fn udp_sockets(&self) -> Result<UdpSockets, DatapathError> {
        UdpSockets::open(&self.folder)
    }

    /// The counters; a handle of its own.
    pub fn stats(&self) -> Result<Stats, DatapathError> {
        Stats::open(&self.folder)
    }

    /// What holds for every packet; a handle of its own.
    pub fn settings(&self) -> Result<SettingsMap, DatapathError> {
        SettingsMap::open(&self.folder)
    }

    /// The devices whose senders are inside the cluster; a handle of its own.
    pub fn inside_devices(&self) -> Result<InsideDevices, DatapathError> {
        InsideDevices::open(&self.folder)
    }

    /// What keeps the kernel from giving our ports to sockets; a handle of its own.
    pub fn port_reservation(&self) -> PortReservation {
        PortReservation::new(self.folder.clone())
    }

    /// What puts the programs on devices, in the network namespace of this thread. Have one at a time.
    pub fn attacher(&self) -> Result<Attacher, DatapathError> {
        Attacher::new(self.folder.clone(), Arc::clone(&self.programs), self.attach)
    }

    /// What puts the XDP program on devices, in the network namespace of this thread. Have one at a time.
    pub fn xdp_attacher(&self) -> XdpAttacher {
        let (option, programs) = &self.xdp;
        XdpAttacher::new(self.folder.clone(), Arc::clone(programs), *option)
    }

    /// What packets may do past the stack; a handle of its own. Have one at a time.
    pub fn device_map(&self) -> Result<DeviceMap, DatapathError> {
        DeviceMap::open(&self.folder, self.forwarding)
    }

    /// Puts the programs on the sockets that [`Options::sockets`] names, and takes them from all others. Call it when the
    /// maps are complete: what they do not know is refused to processes of the node.
    pub fn attach_sockets(&self) -> Result<(), DatapathError> {
        match &self.sockets {
            Some((cgroup, programs)) => sockets::attach(&self.folder, programs, cgroup),
            None => sockets::detach(&self.folder),
        }
    }

    /// The log records of the programs, if [`Options::bpf_log`] asks for them: to be flushed whenever it is readable.
    pub const fn take_logger(&mut self) -> Option<BpfLogger> {
        self.logger.0.take()
    }

    /// Takes over what an agent of another layout has left, connections and all. Call it once, when the own programs are on
    /// all devices.
    pub fn finish_handover(&mut self) -> Result<(), DatapathError> {
        let Some(handover) = self.handover.take() else { return Ok(()) };
        handover.finish(|| self.attach_sockets())?;
        clsact::remove_earlier()
    }

    /// Removes what agents with other layouts of the maps have left that do not describe them (before version 5). Call it when the
    /// maps are complete and the own programs attached, so that no packet passes without a program. Connections that
    /// only the old data plane knows are cut.
    pub fn retire_other_versions(&self) -> Result<(), DatapathError> {
        let current = self.folder.current();
        for version in self.folder.versions()?.into_iter().filter(|version| *version != current) {
            info!(version = %version.display(), "removing the data plane of another version");
            cleanup::remove_version(&version)?;
        }
        clsact::remove_earlier()
    }

    /// What notices that the folder is not where it was.
    pub fn anchor(&self) -> Result<Anchor, DatapathError> {
        Anchor::new(self.folder.clone())
    }

    /// The BPF file system it is pinned on.
    pub fn bpffs(&self) -> &Path {
        self.folder.bpffs()
    }
}
