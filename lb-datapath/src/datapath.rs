//! The data plane of this node, opened for writing.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use lb_common::handover::OVER;
use tracing::info;

use crate::{
    attach::{
        self, announcer::AnnounceAttacher, attacher::Attacher, cleanup, clsact, sockets::SocketAttacher,
        xdp::XdpAttacher,
    },
    bpf::{
        anchor::Anchor,
        bpffs::{Folder, Lock},
        flow_events::FlowEvents,
        layout,
        loader::{self, BpfLogger, Loaded},
        options::{AttachMode, Forwarding, Options, XdpOption},
        program::Programs,
    },
    error::DatapathError,
    net::ports::PortReservation,
    state::{
        affinity::AffinityTable,
        announcements::Announcements,
        conntrack::Conntrack,
        device_map::DeviceMap,
        dns_intercept::DnsIntercepts,
        filter::Filter,
        handover::{self, Handover},
        key_set::{InternalDevices, PeerAddresses, UnansweredBackends},
        maps::ServiceMaps,
        node_sockets::NodeSockets,
        settings::SettingsMap,
        stats::Stats,
    },
};

/// The data plane of this node, opened for writing. Only one instance may exist at a time; dropping it changes nothing
/// in the kernel.
#[derive(Debug)]
pub struct Datapath {
    folder: Folder,
    programs: Arc<Programs>,
    xdp: XdpOption,
    forwarding: Forwarding,
    maps: ServiceMaps,
    conntrack: Conntrack,
    filter: Arc<Filter>,
    attach: AttachMode,
    /// Folder of the cgroup whose sockets are served; `None` for no sockets.
    cgroup: Option<PathBuf>,
    logger: Logger,
    flow_events: Option<FlowEvents>,
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
    /// Creates the maps or reuses the pinned ones, and loads the programs that are needed now. Devices keep their
    /// programs until [`Attacher::sync`]. If an agent with another map layout has left a data plane,
    /// [`Self::finish_handover`] completes the takeover of that data plane.
    pub fn open(options: &Options) -> Result<Self, DatapathError> {
        let folder = Folder::create(&options.bpffs)?;
        let lock = folder.lock()?;
        let mut handover = Handover::begin(&folder, &options.capacities)?;
        let capacities = handover.as_ref().map_or(options.capacities, Handover::capacities);
        let of_devices = attach::programs_of_devices(options);
        let Loaded { programs, logger, flow_events } =
            loader::load(&folder, options, &capacities, &of_devices)?;
        let attach = options.attach.map_or_else(AttachMode::probe, Ok)?;
        let filter = Arc::new(Filter::open(&folder)?);
        filter.flows().prepare()?;
        // Turns the filter off until the agent has rebuilt it: programs of another build may have inserted flow table
        // entries without marking them in the filter.
        filter.turn_off();
        match &mut handover {
            Some(handover) => handover.fill(&filter)?,
            None => {
                handover::set_mode(&folder, OVER)?;
                handover::describe(&folder)?;
            }
        }
        Ok(Self {
            maps: ServiceMaps::open(&folder, &filter)?,
            conntrack: Conntrack::open(&folder, &filter)?,
            filter,
            programs: Arc::new(programs),
            xdp: options.xdp,
            forwarding: options.forwarding,
            attach,
            cgroup: options.sockets.as_ref().map(|sockets| sockets.cgroup.clone()),
            logger: Logger(logger),
            flow_events,
            handover,
            folder,
            _lock: lock,
        })
    }

    /// The maps that the control plane writes.
    pub const fn maps(&self) -> &ServiceMaps {
        &self.maps
    }

    /// A handle of the flow table, which stays valid without this [`Datapath`].
    pub fn conntrack(&self) -> Conntrack {
        self.conntrack.clone()
    }

    /// Opens the map of clients with session affinity. The handle stays valid without this [`Datapath`]. Only one may
    /// be used at a time: a GC pass compares the map with what the previous pass of the same handle found.
    pub fn affinity(&self) -> Result<AffinityTable, DatapathError> {
        AffinityTable::open(&self.folder, self.maps.clone())
    }

    /// Opens the maps of sockets that are connected to Services. The handle stays valid without this [`Datapath`].
    pub fn node_sockets(&self) -> Result<NodeSockets, DatapathError> {
        NodeSockets::open(&self.folder, self.cgroup.is_some())
    }

    /// Opens the packet counters. The handle stays valid without this [`Datapath`].
    pub fn stats(&self) -> Result<Stats, DatapathError> {
        Stats::open(&self.folder)
    }

    /// Opens the settings of the node. The handle stays valid without this [`Datapath`].
    pub fn settings(&self) -> Result<SettingsMap, DatapathError> {
        SettingsMap::open(&self.folder, &self.filter)
    }

    /// Opens the map of devices of internal clients. The handle stays valid without this [`Datapath`].
    pub fn internal_devices(&self) -> Result<InternalDevices, DatapathError> {
        InternalDevices::open(&layout::INSIDE_DEVICES, &self.folder)
    }

    /// Opens the map of other nodes that may send tunnelled packets. The handle stays valid without this [`Datapath`].
    pub fn peers(&self) -> Result<PeerAddresses, DatapathError> {
        PeerAddresses::open(&layout::PEERS, &self.folder)
    }

    /// Opens the map of node-local DNS. The handle stays valid without this [`Datapath`].
    pub fn dns_intercepts(&self) -> Result<DnsIntercepts, DatapathError> {
        DnsIntercepts::open(&self.folder, &self.filter)
    }

    /// Opens the map of backends that do not answer. The handle stays valid without this [`Datapath`].
    pub fn unanswered(&self) -> Result<UnansweredBackends, DatapathError> {
        UnansweredBackends::open(&layout::UNANSWERED, &self.folder)
    }

    /// A handle that reserves the source ports of masqueraded packets. It stays valid without this [`Datapath`].
    pub fn port_reservation(&self) -> PortReservation {
        PortReservation::new(self.folder.clone())
    }

    /// A handle that attaches the tc programs to devices, in the network namespace of this thread. Only one may be used
    /// at a time.
    pub fn attacher(&self) -> Result<Attacher, DatapathError> {
        Attacher::new(self.folder.clone(), Arc::clone(&self.programs), self.attach)
    }

    /// A handle that attaches the XDP program to devices, in the network namespace of this thread. Only one may be used
    /// at a time.
    pub fn xdp_attacher(&self) -> XdpAttacher {
        XdpAttacher::new(self.folder.clone(), Arc::clone(&self.programs), self.xdp)
    }

    /// A handle that attaches `tc_announce`, the program that answers for announced addresses, to devices in the
    /// network namespace of this thread. Only one may be used at a time.
    pub fn announce_attacher(&self) -> Result<AnnounceAttacher, DatapathError> {
        AnnounceAttacher::new(self.folder.clone(), Arc::clone(&self.programs), self.attach)
    }

    /// Opens the maps of announced addresses. The handle stays valid without this [`Datapath`]. Only one may be used at
    /// a time.
    pub fn announcements(&self) -> Result<Announcements, DatapathError> {
        Announcements::open(&self.folder)
    }

    /// Opens the map of devices: which frames are for the node, and on which devices packets may bypass the stack. The
    /// handle stays valid without this [`Datapath`]. Only one may be used at a time.
    pub fn device_map(&self) -> Result<DeviceMap, DatapathError> {
        DeviceMap::open(&self.folder, self.forwarding)
    }

    /// Attaches the socket programs to the cgroup of [`Options::sockets`], or detaches them if that is `None`. Must not
    /// be called before the maps are complete: the programs reject system calls to Services that are not in the maps
    /// yet.
    pub fn attach_sockets(&self) -> Result<(), DatapathError> {
        self.socket_attacher().sync()
    }

    /// A handle that attaches the socket programs, as [`Self::attach_sockets`] does. It stays valid without this
    /// [`Datapath`].
    pub fn socket_attacher(&self) -> SocketAttacher {
        SocketAttacher::new(self.folder.clone(), Arc::clone(&self.programs), self.cgroup.clone())
    }

    /// The log of the programs, if [`Options::bpf_log`] is set; `None` after the first call. Must be flushed whenever
    /// its descriptor is readable.
    pub const fn take_logger(&mut self) -> Option<BpfLogger> {
        self.logger.0.take()
    }

    /// The events for a flow log, if [`Options::flow_log`] is set; `None` after the first call.
    pub const fn take_flow_events(&mut self) -> Option<FlowEvents> {
        self.flow_events.take()
    }

    /// Whether a data plane with another map layout exists. [`Self::finish_handover`] or
    /// [`Self::retire_other_versions`] will remove it, also from devices that have no programs of this agent.
    pub fn replaces_another(&self) -> Result<bool, DatapathError> {
        let current = self.folder.current();
        Ok(self.folder.versions()?.iter().any(|version| *version != current))
    }

    /// Takes over the flows of an agent with another map layout, and removes the data plane of that agent. Must be
    /// called once, after our programs are attached to all devices.
    pub fn finish_handover(&mut self) -> Result<(), DatapathError> {
        let Some(handover) = self.handover.take() else { return Ok(()) };
        handover.finish(&self.filter, || self.attach_sockets())?;
        clsact::remove_earlier(&self.folder)
    }

    /// Removes what other versions have left: links and programs that this version does not know, and every data plane
    /// with another map layout. Such a data plane remains if it was not taken over, for example because it has no
    /// description of its maps (before version 5). Call this function when the maps are complete and our programs are
    /// attached, so that no packet passes without a program. Connections that only the old data plane tracks are cut.
    pub fn retire_other_versions(&self) -> Result<(), DatapathError> {
        let current = self.folder.current();
        for version in self.folder.versions()?.into_iter().filter(|version| *version != current) {
            info!(version = %version.display(), "removing the data plane of another version");
            cleanup::remove_version(&version)?;
        }
        attach::remove_unknown(&self.folder)?;
        clsact::remove_earlier(&self.folder)
    }

    /// A handle that detects that the BPF file system was unmounted or covered, or that pins were removed, and can pin
    /// everything again.
    pub fn anchor(&self) -> Result<Anchor, DatapathError> {
        Anchor::new(self.folder.clone(), Arc::clone(&self.programs))
    }

    /// Path of the BPF file system with the pins.
    pub fn bpffs(&self) -> &Path {
        self.folder.bpffs()
    }
}
