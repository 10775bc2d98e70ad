//! Lists the agent's objects in the kernel: programs, maps and links, with ids and memory.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::fd::AsFd as _,
    os::fd::AsRawFd as _,
    path::Path,
};

use aya::{maps::MapInfo, programs::ProgramInfo};
use serde::Serialize;

use crate::{
    bpf::{bpffs, sys},
    error::{DatapathError, with_causes},
    inspect::pinned::{Pinned, ProgramInfos, ProgramStatus},
};

/// All objects of the agent in the kernel.
#[derive(Clone, Debug, Serialize)]
pub struct Objects {
    /// The programs, sorted by id.
    pub programs: Vec<ProgramObject>,
    /// The maps that the programs use, sorted by id.
    pub maps: Vec<MapObject>,
    /// The pinned links.
    pub links: Vec<LinkObject>,
    /// Objects that could not be read, each with the reason: to open an object that is not pinned takes CAP_SYS_ADMIN.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
}

/// A BPF program in the kernel.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProgramObject {
    /// Name of the program, at most 15 characters.
    pub name: String,
    /// The kernel's id of the program.
    pub id: u32,
    /// Digest of the program's instructions, in hexadecimal.
    pub tag: String,
    /// Number of instructions that the verifier has processed.
    pub verified_instructions: Option<u32>,
    /// Size of the program's translated instructions, in bytes.
    pub size: Option<u32>,
    /// Memory that the kernel charges for the program, in bytes.
    pub memory: Option<u32>,
    /// Ids of the maps that the program uses.
    pub maps: Vec<u32>,
}

/// A BPF map in the kernel.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MapObject {
    /// Name of the map, at most 15 characters.
    pub name: String,
    /// The kernel's id of the map.
    pub id: u32,
    /// Type of the map, as text.
    pub kind: String,
    /// Size of a key in bytes.
    pub key_size: u32,
    /// Size of a value in bytes.
    pub value_size: u32,
    /// Maximum number of elements in the map.
    pub max_entries: u32,
    /// Memory that the kernel charges for the map, in bytes; `None` if the size cannot be read.
    pub memory: Option<u64>,
}

/// A pinned BPF link.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LinkObject {
    /// Name of the link's pin.
    pub pin: String,
    /// The kernel's id of the link.
    pub id: u32,
    /// The kernel's id of the program that the link attaches.
    pub program_id: u32,
}

impl Pinned {
    /// All our objects in the kernel.
    ///
    /// # Errors
    /// The pins or the attachments cannot be read.
    pub fn objects(&self) -> Result<Objects, DatapathError> {
        let infos = self.program_infos()?;
        let mut missing: Vec<String> =
            infos.refused.iter().map(|error| format!("programs: {}", with_causes(error))).collect();
        let mut programs = Vec::new();
        for info in infos.infos() {
            let maps = info
                .map_ids()
                .map_err(|error| format!("maps of program {}: {}", info.id(), with_causes(&error)));
            let maps = maps.map_err(|error| missing.push(error)).ok().flatten().unwrap_or_default();
            programs.push(program(info, maps));
        }
        let mut maps = self.pinned_maps()?;
        let ids: BTreeSet<u32> = programs.iter().flat_map(|program| program.maps.iter().copied()).collect();
        for id in ids.iter().copied().filter(|id| !maps.contains_key(id)).collect::<Vec<_>>() {
            match MapInfo::from_id(id) {
                Ok(info) => _ = maps.insert(id, map(&info)),
                Err(error) => missing.push(format!("map {id}: {}", with_causes(&error))),
            }
        }
        maps.retain(|id, _| ids.contains(id));
        let links = links(&self.folder().join("links"))?;
        Ok(Objects { programs, maps: maps.into_values().collect(), links, missing })
    }

    /// All our programs: the pinned programs, and the attached programs of earlier agents.
    ///
    /// # Errors
    /// The pins, the attachments or a program cannot be read.
    pub fn all_programs(&self) -> Result<Vec<ProgramStatus>, DatapathError> {
        let programs = self.program_infos()?;
        match programs.refused {
            Some(error) => Err(DatapathError::Programs(error)),
            None => Ok(programs.infos().map(ProgramStatus::new).collect()),
        }
    }

    fn program_infos(&self) -> Result<ProgramInfos, DatapathError> {
        let mut attached: BTreeSet<u32> = self.attachments()?.iter().map(|it| it.program.id).collect();
        attached.extend(self.xdp_attachments()?.iter().map(|it| it.program.id));
        attached.extend(self.socket_attachments()?.iter().map(|it| it.program_id));
        self.open_programs(attached)
    }

    /// The pinned maps, by the kernel's id.
    fn pinned_maps(&self) -> Result<BTreeMap<u32, MapObject>, DatapathError> {
        let mut maps = BTreeMap::new();
        for path in bpffs::entries(&self.folder())?.into_iter().filter(|path| !path.is_dir()) {
            let info = MapInfo::from_pin(&path).map_err(|error| {
                DatapathError::file("inspect the pinned map", &path, io::Error::other(error))
            })?;
            maps.insert(info.id(), map(&info));
        }
        Ok(maps)
    }
}

fn program(info: &ProgramInfo, maps: Vec<u32>) -> ProgramObject {
    ProgramObject {
        name: info.name_as_str().unwrap_or_default().to_owned(),
        id: info.id(),
        tag: format!("{:016x}", info.tag()),
        verified_instructions: info.verified_instruction_count(),
        size: info.size_translated(),
        memory: info.memory_locked().ok(),
        maps,
    }
}

fn map(info: &MapInfo) -> MapObject {
    MapObject {
        name: info.name_as_str().unwrap_or_default().to_owned(),
        id: info.id(),
        kind: info.map_type().map_or_else(|_| "unknown".to_owned(), |kind| format!("{kind:?}")),
        key_size: info.key_size(),
        value_size: info.value_size(),
        max_entries: info.max_entries(),
        memory: memory(info),
    }
}

/// Memory in bytes that the kernel charges for the map, from `/proc/thread-self/fdinfo`. `None` if the file cannot be
/// read: commands still show the map's other properties.
fn memory(info: &MapInfo) -> Option<u64> {
    let fd = info.fd().ok()?;
    let text = fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", fd.as_fd().as_raw_fd())).ok()?;
    text.lines().find_map(|line| line.strip_prefix("memlock:"))?.trim().parse().ok()
}

fn links(folder: &Path) -> Result<Vec<LinkObject>, DatapathError> {
    let of = |path: &Path| -> io::Result<LinkObject> {
        let info = sys::link_info(sys::open_pin(path)?.as_fd())?;
        let pin = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(LinkObject { pin, id: info.id, program_id: info.program_id })
    };
    bpffs::entries(folder)?
        .iter()
        .map(|path| of(path).map_err(|error| DatapathError::file("inspect the pinned link", path, error)))
        .collect()
}
