//! What of ours is in the kernel: programs, maps and links, with their ids and what they cost.

use std::{collections::BTreeSet, fs, io, os::fd::AsFd as _, os::fd::AsRawFd as _, path::Path};

use aya::{
    maps::MapInfo,
    programs::{ProgramInfo, loaded_programs},
};
use serde::Serialize;

use crate::{
    bpf::{bpffs, sys},
    error::DatapathError,
    inspect::pinned::{Pinned, ProgramStatus},
};

/// Everything of ours in the kernel.
#[derive(Clone, Debug, Serialize)]
pub struct Objects {
    /// Programs, by id.
    pub programs: Vec<ProgramObject>,
    /// The maps that they use, by id.
    pub maps: Vec<MapObject>,
    /// Pinned links.
    pub links: Vec<LinkObject>,
}

/// A program.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProgramObject {
    /// Its name, of 15 characters at most.
    pub name: String,
    /// The kernel's number for it.
    pub id: u32,
    /// Digest of its instructions.
    pub tag: String,
    /// Instructions that the verifier walked.
    pub verified_instructions: Option<u32>,
    /// Octets of instructions.
    pub size: Option<u32>,
    /// Octets of memory that are charged for it.
    pub memory: Option<u32>,
    /// Ids of its maps.
    pub maps: Vec<u32>,
}

/// A map.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MapObject {
    /// Its name, of 15 characters at most.
    pub name: String,
    /// The kernel's number for it.
    pub id: u32,
    /// What kind of map.
    pub kind: String,
    /// Octets of a key.
    pub key_size: u32,
    /// Octets of a value.
    pub value_size: u32,
    /// Elements that it can hold.
    pub max_entries: u32,
    /// Octets of memory that are charged for it, as far as the kernel tells.
    pub memory: Option<u64>,
}

/// A pinned link.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LinkObject {
    /// Name of the pin.
    pub pin: String,
    /// The kernel's number for it.
    pub id: u32,
    /// That of its program.
    pub program_id: u32,
}

impl Pinned {
    /// Everything of ours in the kernel.
    ///
    /// # Errors
    /// The pins cannot be read.
    pub fn objects(&self) -> Result<Objects, DatapathError> {
        let ids: BTreeSet<u32> = self.all_programs()?.iter().map(|program| program.id).collect();
        let infos = loaded_programs().filter_map(Result::ok).filter(|info| ids.contains(&info.id()));
        let programs: Vec<ProgramObject> = infos.map(|info| program(&info)).collect();
        let maps: BTreeSet<u32> = programs.iter().flat_map(|program| program.maps.iter().copied()).collect();
        Ok(Objects {
            maps: maps
                .into_iter()
                .filter_map(|id| MapInfo::from_id(id).ok())
                .map(|info| map(&info))
                .collect(),
            links: links(&self.folder().join("links"))?,
            programs,
        })
    }

    /// Every program of ours: those that are pinned, and those of earlier agents that are still attached somewhere.
    ///
    /// # Errors
    /// The pins or the attachments cannot be read.
    pub fn all_programs(&self) -> Result<Vec<ProgramStatus>, DatapathError> {
        let pins = bpffs::entries(&self.folder().join("programs"))?;
        let mut ids: BTreeSet<u32> =
            pins.iter().filter_map(|pin| ProgramInfo::from_pin(pin).ok()).map(|info| info.id()).collect();
        ids.extend(self.attachments()?.iter().map(|attachment| attachment.program.id));
        ids.extend(self.xdp_attachments()?.iter().map(|attachment| attachment.program.id));
        ids.extend(self.socket_attachments()?.iter().map(|attachment| attachment.program_id));
        let infos = loaded_programs().filter_map(Result::ok).filter(|info| ids.contains(&info.id()));
        Ok(infos.map(|info| ProgramStatus::new(&info)).collect())
    }
}

fn program(info: &ProgramInfo) -> ProgramObject {
    ProgramObject {
        name: info.name_as_str().unwrap_or_default().to_owned(),
        id: info.id(),
        tag: format!("{:016x}", info.tag()),
        verified_instructions: info.verified_instruction_count(),
        size: info.size_translated(),
        memory: info.memory_locked().ok(),
        maps: info.map_ids().ok().flatten().unwrap_or_default(),
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

/// What the kernel charges for the map; `/proc` tells it of a descriptor.
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
        .map(|path| of(path).map_err(|error| DatapathError::file("look at the pinned link", path, error)))
        .collect()
}
