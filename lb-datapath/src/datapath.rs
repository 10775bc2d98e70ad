//! The data plane of this node, opened for writing.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use lb_common::handover::OVER;
use tracing::info;

use crate::{
    attach::{attacher::Attacher, cleanup, clsact, sockets, xdp::XdpAttacher},
    bpf::{
        anchor::Anchor,
        bpffs::{Folder, Lock},
        loader::{self, BpfLogger, Loaded},
        options::{AttachMode, Forwarding, Options, XdpOption},
        program::{LoadedProgram, Programs},
    },
    error::DatapathError,
    net::ports::PortReservation,
    state::{
        affinity::AffinityTable,
        conntrack::Conntrack,
        device_map::DeviceMap,
        handover::{self, Handover},
        internal_devices::InternalDevices,
        maps::ServiceMaps,
        settings::SettingsMap,
        stats::Stats,
        udp_sockets::UdpSockets,
    },
};

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
    pub fn internal_devices(&self) -> Result<InternalDevices, DatapathError> {
        InternalDevices::open(&self.folder)
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
