//! Reads the pinned data plane for commands, whether an agent runs or not.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    os::fd::AsFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use aya::programs::{ProgramError, ProgramInfo, loaded_programs};
use lb_common::{Address, Affinity, ServiceClient, Settings};
use lb_core::plan::{slices_of, tables_of};

use crate::{
    attach::{
        clsact,
        direction::{Direction, parse_pin},
        sockets::{self, SocketAttachment},
        xdp::{self, XdpMode},
    },
    bpf::{
        bpffs::{self, Folder},
        layout::{self, CATCH_PROGRAMS, MAPS, PROGRAMS, PROGRAMS_WITHOUT_LINK_LAYER},
        options::AttachMode,
        sys,
        table::Table,
    },
    error::{DatapathError, with_causes},
    inspect::{missing, program_view::ProgramView},
    net::{
        netlink::Netlink,
        network,
        xfrm::{self, OutPolicy},
    },
    state::{
        affinity,
        conntrack::Conntrack,
        filter::Filter,
        key_set::{InternalDevices, PeerAddresses},
        maps::ServiceMaps,
        monitor::Monitor,
        settings::SettingsMap,
        stats::Stats,
    },
};

/// The pinned data plane, opened for reading. Opening it changes nothing and needs no lock.
#[derive(Debug)]
pub struct Pinned {
    folder: Folder,
    filter: Arc<Filter>,
    maps: ServiceMaps,
    conntrack: Conntrack,
    affinity: Table<ServiceClient, Affinity>,
    stats: Stats,
}

/// How full one map is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapFill {
    /// Name of the map.
    pub name: &'static str,
    /// Number of elements; for `BACKENDS` and `TABLES`, only those that a frontend refers to.
    pub entries: usize,
    /// Maximum number of elements. `FLOWS` and its overflow `CONNTRACK` both have the number of entries for which the
    /// flow table was made: two for each connection of `--max-connections`.
    pub capacity: u32,
}

/// A BPF program in the kernel, with its statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramStatus {
    /// Name of the program, or why it is unknown.
    pub name: String,
    /// The kernel's id of the program.
    pub id: u32,
    /// Digest of the program's instructions, as a number.
    pub tag: u64,
    /// When the program was loaded; `None` if unknown.
    pub loaded_at: Option<SystemTime>,
    /// Number of runs of the program, counted while the sysctl `kernel.bpf_stats_enabled` is 1 or a process has enabled
    /// statistics by `BPF_ENABLE_STATS`.
    pub run_count: u64,
    /// Total time of the program's runs, counted like `run_count`.
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

    /// The status of a program of which only the id is known.
    fn unknown(id: u32, error: &ProgramError) -> Self {
        let name = format!("unknown: cannot open program {id}: {}", with_causes(error));
        Self { name, id, tag: 0, loaded_at: None, run_count: 0, run_time: Duration::ZERO }
    }
}

/// A tc program that serves Services, attached to a device of this network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Index of the interface.
    pub index: u32,
    /// Name of the interface.
    pub device: String,
    /// Whether the program gets arriving or leaving packets.
    pub direction: Direction,
    /// How the program is attached: by tcx or clsact.
    pub mode: AttachMode,
    /// The program that is attached.
    pub program: ProgramStatus,
}

/// An XDP program of the agent, attached to a device of this network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpAttachment {
    /// Index of the interface.
    pub index: u32,
    /// Name of the interface.
    pub device: String,
    /// Whether the driver or the network stack runs the program.
    pub mode: XdpMode,
    /// The program that is attached.
    pub program: ProgramStatus,
}

/// The IPsec policies of this network namespace that replies from the data plane's virtual addresses bypass.
///
/// # Errors
/// The policies, or the map of frontends, cannot be read.
pub fn bypassed_policies(bpffs: &Path) -> Result<Vec<OutPolicy>, DatapathError> {
    let found = xfrm::bypassed(xfrm::out_policies()?, || Pinned::open(bpffs)?.virtual_addresses())?;
    Ok(found.into_iter().map(|(policy, _)| policy).collect())
}

impl Pinned {
    /// Opens the maps pinned on `bpffs`.
    ///
    /// # Errors
    /// No BPF file system is mounted there, no data plane is pinned there, pins of maps are missing, or a map cannot be
    /// opened or has another type or size.
    pub fn open(bpffs: &Path) -> Result<Self, DatapathError> {
        let Some(folder) = Folder::find(bpffs)? else {
            return Err(match bpffs::is_bpffs(bpffs) {
                Ok(false) => DatapathError::NotMounted(bpffs.to_owned()),
                Ok(true) => DatapathError::Absent(bpffs.join("lb")),
                Err(DatapathError::File { source, .. }) if bpffs::is_absent(&source) => {
                    DatapathError::Absent(bpffs.join("lb"))
                }
                Err(error) => error,
            });
        };
        let opened = Self::open_maps(folder.clone());
        if !matches!(opened, Err(DatapathError::Absent(_))) {
            return opened;
        }
        let (folder, missing) = (folder.current(), missing::maps(&folder)?);
        Err(if missing.len() == MAPS.len() {
            DatapathError::Absent(folder)
        } else {
            DatapathError::Unpinned { folder, maps: missing.join(", ") }
        })
    }

    /// Opens the maps pinned on `bpffs`; `None` if no data plane is pinned there.
    ///
    /// # Errors
    /// The errors of [`Self::open`], except a missing BPF file system or data plane.
    pub fn find(bpffs: &Path) -> Result<Option<Self>, DatapathError> {
        match Self::open(bpffs) {
            Err(DatapathError::Absent(_) | DatapathError::NotMounted(_)) => Ok(None),
            opened => opened.map(Some),
        }
    }

    fn open_maps(folder: Folder) -> Result<Self, DatapathError> {
        let filter = Arc::new(Filter::open(&folder)?);
        Ok(Self {
            filter: Arc::clone(&filter),
            maps: ServiceMaps::open(&folder, &filter)?,
            conntrack: Conntrack::open(&folder, &filter)?,
            affinity: affinity::open(&folder)?,
            stats: Stats::open(&folder)?,
            folder,
        })
    }

    /// The maps that the control plane writes.
    pub const fn maps(&self) -> &ServiceMaps {
        &self.maps
    }

    /// The addresses of all frontends, each once.
    ///
    /// # Errors
    /// The map of frontends cannot be read.
    pub fn virtual_addresses(&self) -> Result<BTreeSet<IpAddr>, DatapathError> {
        let frontends = self.maps.contents()?.frontends;
        Ok(frontends.into_keys().map(|key| key.address.into()).collect())
    }

    /// The node's settings in force.
    pub fn settings(&self) -> Result<Settings, DatapathError> {
        SettingsMap::open(&self.folder, &self.filter)?.get()
    }

    /// The interface indices of the devices of internal clients.
    pub fn internal_devices(&self) -> Result<BTreeSet<u32>, DatapathError> {
        InternalDevices::open(&layout::INSIDE_DEVICES, &self.folder)?.get()
    }

    /// The addresses of other nodes that may send tunnelled packets, in addition to the networks in the settings.
    pub fn peers(&self) -> Result<BTreeSet<Address>, DatapathError> {
        PeerAddresses::open(&layout::PEERS, &self.folder)?.get()
    }

    /// The maps and constants by which programs decide about packets.
    pub fn program_view(&self) -> Result<ProgramView, DatapathError> {
        ProgramView::open(&self.folder, &self.filter)
    }

    /// The flow table, with its overflow.
    pub const fn conntrack(&self) -> &Conntrack {
        &self.conntrack
    }

    /// Starts to monitor: the programs emit events about flows, drops and rejections as long as the result exists.
    pub fn monitor(&self) -> Result<Monitor, DatapathError> {
        Monitor::open(&self.folder)
    }

    /// The packet counters.
    pub const fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The folder of the pins, which gives the path of every pin.
    pub(super) const fn pins(&self) -> &Folder {
        &self.folder
    }

    /// Path of the folder of the pins, `DIR/lb/vN`.
    pub fn folder(&self) -> PathBuf {
        self.folder.current()
    }

    /// The process of the agent that has locked this data plane, such as `pid 17 lb-agent`; `None` if no process has
    /// the lock, or the folder cannot be opened.
    pub fn agent(&self) -> Option<String> {
        self.folder.holder()
    }

    /// How full the maps of Services, flows and session affinity are. Reads every entry.
    pub fn fill(&self) -> Result<Vec<MapFill>, DatapathError> {
        let ServiceMaps {
            services,
            backends,
            tables,
            service_names,
            endpoint_names,
            vips,
            source_ranges,
            limits,
            ..
        } = &self.maps;
        let (mut slices, mut used_tables) = (BTreeMap::new(), BTreeMap::new());
        let mut frontends = 0;
        services.for_each(|_, service| {
            frontends += 1;
            slices.extend(slices_of(service).map(|range| (range.base, range.count)));
            used_tables.extend(tables_of(service).map(|range| (range.base, range.count)));
            Ok(())
        })?;
        let used = |slices: &BTreeMap<u32, u32>| slices.values().map(|count| *count as usize).sum();
        let flows = self.conntrack.table();
        let overflowed = flows.overflowed();
        let fill = |name, entries, capacity| MapFill { name, entries, capacity };
        Ok(vec![
            fill("SERVICES", frontends, services.capacity()),
            fill("BACKENDS", used(&slices), backends.capacity()),
            fill("TABLES", used(&used_tables), tables.capacity()),
            fill("FLOWS", flows.count()?.saturating_sub(overflowed), flows.capacity()),
            fill("CONNTRACK", overflowed, flows.capacity()),
            fill("AFFINITY", self.affinity.count()?, self.affinity.capacity()),
            fill("SERVICE_NAMES", service_names.count()?, service_names.capacity()),
            fill("VIPS", vips.count()?, vips.capacity()),
            fill("SOURCE_RANGES", source_ranges.count()?, source_ranges.capacity()),
            fill("LIMITS", limits.count()?, limits.capacity()),
            fill("ENDPOINT_NAMES", endpoint_names.count()?, endpoint_names.capacity()),
        ])
    }

    /// The pinned tc programs that serve Services, as the last agent left them.
    pub fn programs(&self) -> Result<Vec<ProgramStatus>, DatapathError> {
        let mut programs = Vec::new();
        let names = PROGRAMS.into_iter().chain(PROGRAMS_WITHOUT_LINK_LAYER);
        for name in names.chain(CATCH_PROGRAMS.into_iter().skip(1)) {
            let path = self.folder.programs().join(name);
            if !path.exists() {
                continue;
            }
            let info = ProgramInfo::from_pin(&path).map_err(|error| {
                DatapathError::file("inspect the pinned program", &path, io::Error::other(error))
            })?;
            programs.push(ProgramStatus::new(&info));
        }
        Ok(programs)
    }

    /// The tc programs that serve Services on the devices of this network namespace, sorted by index and direction.
    pub fn attachments(&self) -> Result<Vec<Attachment>, DatapathError> {
        let mut netlink = Netlink::open().map_err(|error| DatapathError::netlink("open a socket", error))?;
        let devices =
            network::names(&mut netlink).map_err(|error| DatapathError::netlink("list devices", error))?;
        let links = self.links()?;
        let mut found = Vec::new();
        for (index, device) in devices {
            for direction in Direction::BOTH {
                let link = links.get(&(index, direction)).copied();
                let of_link =
                    link.map(|link| tcx_program(index, &device, direction, link)).transpose()?.flatten();
                let (mode, id) = if let Some(id) = of_link {
                    (AttachMode::Tcx, id)
                } else {
                    let filter = clsact::find(&mut netlink, (index, direction, clsact::Role::Serve))
                        .map_err(|error| DatapathError::netlink("list filters", error))?;
                    let Some(filter) = filter else { continue };
                    (AttachMode::Clsact, filter.program_id)
                };
                found.push((index, device.clone(), direction, mode, id));
            }
        }
        let programs = ProgramInfos::open(&self.folder, found.iter().map(|(.., id)| *id))?;
        let attachment = |(index, device, direction, mode, id)| {
            Some(Attachment { index, device, direction, mode, program: programs.status(id)? })
        };
        Ok(found.into_iter().filter_map(attachment).collect())
    }

    /// The agent's XDP programs on the devices of this network namespace.
    pub fn xdp_attachments(&self) -> Result<Vec<XdpAttachment>, DatapathError> {
        let mut netlink = Netlink::open().map_err(|error| DatapathError::netlink("open a socket", error))?;
        let devices =
            network::names(&mut netlink).map_err(|error| DatapathError::netlink("list devices", error))?;
        let links = xdp::links(&self.folder)?;
        let programs = ProgramInfos::open(&self.folder, links.iter().map(|(.., id)| *id))?;
        let attachment = |(index, mode, id)| {
            let device = devices.get(&index)?.clone();
            Some(XdpAttachment { index, device, mode, program: programs.status(id)? })
        };
        Ok(links.into_iter().filter_map(attachment).collect())
    }

    /// All pinned programs, and those programs of `attached` (by id) that are not pinned.
    pub(super) fn open_programs(
        &self,
        attached: impl IntoIterator<Item = u32>,
    ) -> Result<ProgramInfos, DatapathError> {
        ProgramInfos::open(&self.folder, attached)
    }

    /// The agent's socket programs that are attached to control groups, from the pinned links.
    pub fn socket_attachments(&self) -> Result<Vec<SocketAttachment>, DatapathError> {
        sockets::attachments(&self.folder)
    }

    /// The ids of the pinned tcx links, by interface index and direction.
    fn links(&self) -> Result<BTreeMap<(u32, Direction), u32>, DatapathError> {
        let mut links = BTreeMap::new();
        for path in bpffs::entries(&self.folder.links())? {
            let Some(hook) = parse_pin(&path) else { continue };
            let info = sys::open_pin(&path).and_then(|link| sys::link_info(link.as_fd()));
            let info = info.map_err(|error| DatapathError::file("inspect the pinned link", &path, error))?;
            links.insert(hook, info.id);
        }
        Ok(links)
    }
}

/// The id of the program that `link` attaches; `None` if the link is not on this hook in this network namespace.
fn tcx_program(
    index: u32,
    device: &str,
    direction: Direction,
    link: u32,
) -> Result<Option<u32>, DatapathError> {
    match sys::query_tcx(index, direction.tcx()) {
        Ok(present) => {
            Ok(present.iter().find(|program| program.link_id == link).map(|program| program.program_id))
        }
        // The device has disappeared since the devices were listed.
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(source) => Err(DatapathError::Attach {
            action: "list the programs on",
            hook: format!("tcx {}", direction.as_str()),
            device: device.to_owned(),
            source,
        }),
    }
}

/// Opened programs, by id. To open a program by its id takes CAP_SYS_ADMIN; to open the pin of a program does not.
pub(super) struct ProgramInfos {
    found: BTreeMap<u32, ProgramInfo>,
    /// Why programs that are not pinned could not be opened; `None` if all could.
    pub(super) refused: Option<ProgramError>,
}

impl ProgramInfos {
    /// Opens all pinned programs. Also opens, by their ids, the programs in `wanted` that are not pinned.
    pub(super) fn open(
        folder: &Folder,
        wanted: impl IntoIterator<Item = u32>,
    ) -> Result<Self, DatapathError> {
        let mut found = BTreeMap::new();
        for path in bpffs::entries(&folder.programs())? {
            let info = ProgramInfo::from_pin(&path).map_err(|error| {
                DatapathError::file("inspect the pinned program", &path, io::Error::other(error))
            })?;
            found.insert(info.id(), info);
        }
        let others: BTreeSet<u32> = wanted.into_iter().filter(|id| !found.contains_key(id)).collect();
        let mut refused = None;
        for info in (!others.is_empty()).then(loaded_programs).into_iter().flatten() {
            match info {
                Ok(info) if others.contains(&info.id()) => _ = found.insert(info.id(), info),
                Ok(_) => {}
                Err(error) if has_gone(&error) => {}
                Err(error) => refused = Some(error),
            }
        }
        Ok(Self { found, refused })
    }

    /// The status of a program; `None` if it is no longer loaded.
    fn status(&self, id: u32) -> Option<ProgramStatus> {
        match (self.found.get(&id), &self.refused) {
            (Some(info), _) => Some(ProgramStatus::new(info)),
            (None, Some(error)) => Some(ProgramStatus::unknown(id, error)),
            (None, None) => None,
        }
    }

    /// What the kernel reports about each program that could be opened.
    pub(super) fn infos(&self) -> impl Iterator<Item = &ProgramInfo> {
        self.found.values()
    }
}

/// Whether the error means that the program was unloaded since it was listed.
fn has_gone(error: &ProgramError) -> bool {
    if let ProgramError::SyscallError(error) = error {
        return error.io_error.raw_os_error() == Some(libc::ENOENT);
    }
    false
}
