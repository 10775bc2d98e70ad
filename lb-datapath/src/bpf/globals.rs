//! Reads the constants that the loader wrote into the programs: their section `.rodata`, a frozen array in the kernel.
//! The agent pins this array, so that commands can read it without `CAP_SYS_ADMIN`, which they would need to find a map
//! by its id.

use std::{io, os::fd::AsFd as _};

use aya::{
    Ebpf,
    maps::{Map, MapInfo},
    programs::ProgramInfo,
};
use lb_common::hash;
use object::{Object as _, ObjectSection as _, ObjectSymbol as _};

use crate::{
    bpf::{
        bpffs::{self, Folder},
        layout::{PROGRAMS, Shape},
        loader::OBJECT,
        raw_map::RawMap,
        sys,
    },
    error::{DatapathError, with_causes},
};

/// Name of the section, which is also the name of the map that the loader creates from it.
const SECTION: &str = ".rodata";

/// Name of the pin of that map.
pub(crate) const PIN: &str = "CONSTANTS";

/// Pins the constants of the programs that were just loaded, in place of those of an earlier agent.
pub(crate) fn pin(ebpf: &Ebpf, folder: &Folder) -> Result<(), DatapathError> {
    let Some(Map::Array(map)) = ebpf.map(SECTION) else {
        return Err(DatapathError::Object(format!("section {SECTION} is missing")));
    };
    let path = folder.map(PIN);
    bpffs::unpin(&path)?;
    sys::pin(map.fd().as_fd(), &path).map_err(|error| DatapathError::file("pin the map at", path, error))
}

/// The options that `explain` needs, read from the constants that the agent wrote into the programs when it loaded
/// these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Globals {
    /// Hash seed of the schedulers `mh`, `sh` and `dh`.
    pub hash_seed: u64,
    /// Number of retransmissions of a SYN after which another backend is selected; 0 means never.
    pub syn_retries: u16,
    /// Whether packets bypass the stack wherever their route is known (`--forwarding direct`).
    pub direct: bool,
}

impl Default for Globals {
    fn default() -> Self {
        Self { hash_seed: hash::DEFAULT_SEED, syn_retries: 0, direct: false }
    }
}

impl Globals {
    /// Reads the constants of the pinned programs; the defaults if none are pinned.
    ///
    /// # Errors
    /// The map of the constants cannot be opened (if the map is not pinned, opening it takes `CAP_SYS_ADMIN`), or the
    /// programs are of a build whose `.rodata` has another size.
    pub(crate) fn read(folder: &Folder) -> Result<Self, DatapathError> {
        let Some(section) = Section::read(folder)? else { return Ok(Self::default()) };
        let [direct] = section.constant("DIRECT")?;
        Ok(Self {
            hash_seed: u64::from_ne_bytes(section.constant("HASH_SEED")?),
            syn_retries: u16::from_ne_bytes(section.constant("SYN_RETRIES")?),
            direct: direct != 0,
        })
    }
}

/// The bytes of `.rodata` in the kernel, and the BPF object, which has the offset of each constant.
struct Section {
    object: object::File<'static>,
    bytes: Vec<u8>,
}

impl Section {
    fn read(folder: &Folder) -> Result<Option<Self>, DatapathError> {
        if let Some(map) = RawMap::open(SECTION, &folder.map(PIN))? {
            return Self::of_map(&map).map(Some);
        }
        let path = folder.programs().join(PROGRAMS[0]);
        if !path.exists() {
            return Ok(None);
        }
        let failed = |error: &dyn std::error::Error| {
            DatapathError::file("read the constants of", &path, io::Error::other(with_causes(error)))
        };
        let program = ProgramInfo::from_pin(&path).map_err(|error| failed(&error))?;
        let maps = program.map_ids().map_err(|error| failed(&error))?.unwrap_or_default();
        for id in maps {
            let info = MapInfo::from_id(id).map_err(|error| failed(&error))?;
            if info.name_as_str() == Some(SECTION) {
                let fd = info.fd().map_err(|error| failed(&error))?.as_fd().try_clone_to_owned();
                let fd = fd.map_err(|error| failed(&error))?;
                let map = RawMap::new(SECTION, fd, Shape::of(&info).map_err(|error| failed(&error))?);
                return Self::of_map(&map).map(Some);
            }
        }
        Err(DatapathError::file("find the constants of", &path, io::Error::other("no map is named .rodata")))
    }

    fn of_map(map: &RawMap) -> Result<Self, DatapathError> {
        let object = object::File::parse(OBJECT).map_err(|error| DatapathError::Object(error.to_string()))?;
        let size = object.section_by_name(SECTION).and_then(|section| usize::try_from(section.size()).ok());
        let size = size.ok_or_else(|| DatapathError::Object(format!("section {SECTION} is missing")))?;
        // The map is an array with one element. The read fails if the element has another size than this build's
        // section.
        let mut bytes = vec![0; size];
        map.get(&0u32.to_ne_bytes(), &mut bytes)?;
        Ok(Self { object, bytes })
    }

    /// The bytes of the constant with this name, in this machine's byte order.
    fn constant<const N: usize>(&self, name: &str) -> Result<[u8; N], DatapathError> {
        let symbol = self.object.symbols().find(|symbol| symbol.name() == Ok(name));
        let start = symbol.and_then(|symbol| usize::try_from(symbol.address()).ok());
        let bytes = start.and_then(|start| self.bytes.get(start..start.checked_add(N)?));
        bytes
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or_else(|| DatapathError::Object(format!("constant {name} is missing")))
    }
}
