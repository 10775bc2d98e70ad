//! What commands look at: the pinned data plane, whether an agent runs or not.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use aya::programs::{ProgramInfo, loaded_programs};
use lb_common::{Affinity, AffinityKey, Settings};
use lb_core::plan::tables_of;

use crate::{
    attach::{
        clsact,
        direction::{Direction, parse_pin},
        sockets::{self, SocketAttachment},
        xdp::{self, XdpMode},
    },
    bpf::{
        bpffs::{self, Folder},
        layout::PROGRAMS,
        options::AttachMode,
        sys,
        table::Table,
    },
    error::DatapathError,
    inspect::looked_up::LookedUp,
    net::{netlink::Netlink, network},
    state::{
        affinity,
        conntrack::Conntrack,
        inside_devices::InsideDevices,
        maps::{ServiceMaps, slices_of},
        monitor::Monitor,
        settings::SettingsMap,
        stats::Stats,
    },
};

/// The pinned data plane. Opening it changes nothing and needs no lock.
#[derive(Debug)]
pub struct Pinned {
    folder: Folder,
    maps: ServiceMaps,
    conntrack: Conntrack,
    affinity: Table<AffinityKey, Affinity>,
    stats: Stats,
}

/// How full a map is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapFill {
    /// Its name.
    pub name: &'static str,
    /// Elements in it; of `BACKENDS` and `TABLES` those that a frontend refers to.
    pub entries: usize,
    /// Elements it can hold.
    pub capacity: u32,
}

/// A program in the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramStatus {
    /// Its name.
    pub name: String,
    /// The kernel's number for it.
    pub id: u32,
    /// Digest of its instructions.
    pub tag: u64,
    /// When it was loaded.
    pub loaded_at: Option<SystemTime>,
    /// How often it ran, counted while the sysctl `kernel.bpf_stats_enabled` is 1.
    pub run_count: u64,
    /// For how long it ran, counted as [`Self::run_count`].
    pub run_time: Duration,
}

impl ProgramStatus {
    pub(crate) fn new(info: &ProgramInfo) -> Self {
        Self {
            name: info.name_as_str().unwrap_or_default().to_owned(),
            id: info.id(),
            tag: info.tag(),
            loaded_at: info.loaded_at(),
            run_count: info.run_count(),
            run_time: info.run_time(),
        }
    }
}

/// A program of ours on a device of this network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Interface index.
    pub index: u32,
    /// Interface name.
    pub device: String,
    /// Side of the device.
    pub direction: Direction,
    /// What holds the program.
    pub mode: AttachMode,
    /// The program.
    pub program: ProgramStatus,
}

/// The XDP program of ours on a device of this network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpAttachment {
    /// Interface index.
    pub index: u32,
    /// Interface name.
    pub device: String,
    /// Who runs the program.
    pub mode: XdpMode,
    /// The program.
    pub program: ProgramStatus,
}

impl Pinned {
    /// Opens the maps pinned on `bpffs`.
    pub fn open(bpffs: &Path) -> Result<Self, DatapathError> {
        let absent = || DatapathError::Absent(bpffs.join("lb"));
        let folder = Folder::find(bpffs).ok_or_else(absent)?;
        Ok(Self {
            maps: ServiceMaps::open(&folder)?,
            conntrack: Conntrack::open(&folder)?,
            affinity: affinity::open(&folder)?,
            stats: Stats::open(&folder)?,
            folder,
        })
    }

    /// The maps of the control plane.
    pub const fn maps(&self) -> &ServiceMaps {
        &self.maps
    }

    /// What holds for every packet.
    pub fn settings(&self) -> Result<Settings, DatapathError> {
        SettingsMap::open(&self.folder)?.get()
    }

    /// The interface indices of the devices whose senders are inside the cluster.
    pub fn inside_devices(&self) -> Result<BTreeSet<u32>, DatapathError> {
        InsideDevices::open(&self.folder)?.get()
    }

    /// The maps as programs see them.
    pub fn looked_up(&self) -> Result<LookedUp, DatapathError> {
        LookedUp::open(&self.folder)
    }

    /// Connection tracking.
    pub const fn conntrack(&self) -> &Conntrack {
        &self.conntrack
    }

    /// Begins to listen to what the programs tell of flows, drops and rejections.
    pub fn monitor(&self) -> Result<Monitor, DatapathError> {
        Monitor::open(&self.folder)
    }

    /// The counters.
    pub const fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The folder of the pins, `DIR/lb/vN`.
    pub fn folder(&self) -> PathBuf {
        self.folder.current()
    }

    /// The agent that works with this data plane, such as `pid 17 lb-agent`.
    pub fn agent(&self) -> Option<String> {
        self.folder.holder()
    }

    /// How full the maps are. Reads them through.
    pub fn fill(&self) -> Result<Vec<MapFill>, DatapathError> {
        let ServiceMaps { services, backends, tables, service_names, endpoint_names, vips, source_ranges } =
            &self.maps;
        let (mut slices, mut used_tables) = (BTreeMap::new(), BTreeMap::new());
        let mut frontends = 0;
        services.for_each(|_, service| {
            frontends += 1;
            slices.extend(slices_of(service));
            used_tables.extend(tables_of(service).map(|range| (range.base, range.count)));
            Ok(())
        })?;
        let used = |slices: &BTreeMap<u32, u32>| slices.values().map(|count| *count as usize).sum();
        let conntrack = self.conntrack.table();
        let fill = |name, entries, capacity| MapFill { name, entries, capacity };
        Ok(vec![
            fill("SERVICES", frontends, services.capacity()),
            fill("BACKENDS", used(&slices), backends.capacity()),
            fill("TABLES", used(&used_tables), tables.capacity()),
            fill("CONNTRACK", conntrack.count()?, conntrack.capacity()),
            fill("AFFINITY", self.affinity.count()?, self.affinity.capacity()),
            fill("SERVICE_NAMES", service_names.count()?, service_names.capacity()),
            fill("VIPS", vips.count()?, vips.capacity()),
            fill("SOURCE_RANGES", source_ranges.count()?, source_ranges.capacity()),
            fill("ENDPOINT_NAMES", endpoint_names.count()?, endpoint_names.capacity()),
        ])
    }

    /// The programs of the last agent.
    pub fn programs(&self) -> Result<Vec<ProgramStatus>, DatapathError> {
        let mut programs = Vec::new();
        for name in PROGRAMS {
            let path = self.folder.programs().join(name);
            if !path.exists() {
                continue;
            }
            let info = ProgramInfo::from_pin(&path).map_err(|error| {
                DatapathError::file("look at the pinned program", &path, std::io::Error::other(error))
            })?;
            programs.push(ProgramStatus::new(&info));
        }
        Ok(programs)
    }

    /// Our programs on the devices of this network namespace, by index and direction.
    pub fn attachments(&self) -> Result<Vec<Attachment>, DatapathError> {
        let mut netlink = Netlink::open().map_err(|error| DatapathError::netlink("open a socket", error))?;
        let devices =
            network::names(&mut netlink).map_err(|error| DatapathError::netlink("list devices", error))?;
        let links = self.links()?;
        let mut infos: BTreeMap<u32, ProgramStatus> = BTreeMap::new();
        for info in loaded_programs().filter_map(Result::ok) {
            infos.insert(info.id(), ProgramStatus::new(&info));
        }
        let mut attachments = Vec::new();
        for (index, device) in devices {
            for direction in Direction::BOTH {
                let found = match links.get(&(index, direction)) {
                    Some(link) => tcx_program(index, direction, *link).map(|id| (AttachMode::Tcx, id)),
                    None => None,
                };
                let found = match found {
                    Some(found) => Some(found),
                    None => clsact::find(&mut netlink, index, direction)
                        .map_err(|error| DatapathError::netlink("list filters", error))?
                        .map(|filter| (AttachMode::Clsact, filter.program_id)),
                };
                let Some((mode, id)) = found else { continue };
                let Some(program) = infos.get(&id).cloned() else { continue };
                attachments.push(Attachment { index, device: device.clone(), direction, mode, program });
            }
        }
        Ok(attachments)
    }

    /// Our XDP programs on the devices of this network namespace.
    pub fn xdp_attachments(&self) -> Result<Vec<XdpAttachment>, DatapathError> {
        let mut netlink = Netlink::open().map_err(|error| DatapathError::netlink("open a socket", error))?;
        let devices =
            network::names(&mut netlink).map_err(|error| DatapathError::netlink("list devices", error))?;
        let mut attachments = Vec::new();
        for (index, mode, program_id) in xdp::links(&self.folder)? {
            let Some(device) = devices.get(&index) else { continue };
            let info = loaded_programs().filter_map(Result::ok).find(|info| info.id() == program_id);
            let Some(program) = info.as_ref().map(ProgramStatus::new) else { continue };
            attachments.push(XdpAttachment { index, device: device.clone(), mode, program });
        }
        Ok(attachments)
    }

    /// Our programs on sockets.
    pub fn socket_attachments(&self) -> Result<Vec<SocketAttachment>, DatapathError> {
        sockets::attachments(&self.folder)
    }

    /// The ids of the pinned links by their places.
    fn links(&self) -> Result<BTreeMap<(u32, Direction), u32>, DatapathError> {
        let mut links = BTreeMap::new();
        for path in bpffs::entries(&self.folder.links())? {
            let Some(place) = parse_pin(&path) else { continue };
            let info = sys::open_pin(&path).and_then(|link| sys::link_info(link.as_fd()));
            let info = info.map_err(|error| DatapathError::file("look at the pinned link", &path, error))?;
            links.insert(place, info.id);
        }
        Ok(links)
    }
}

/// The program of a link, if it is on this device of this network namespace.
fn tcx_program(index: u32, direction: Direction, link: u32) -> Option<u32> {
    let present = sys::query_tcx(index, direction.tcx()).ok()?;
    present.iter().find(|place| place.link_id == link).map(|place| place.program_id)
}
