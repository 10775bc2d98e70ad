//! What was written into the programs when they were loaded: their `.rodata`, which the kernel keeps as a frozen array.

use std::os::fd::AsFd as _;

use aya::{maps::MapInfo, programs::ProgramInfo};
use lb_common::hash;
use object::{Object as _, ObjectSymbol as _};

use crate::bpf::{
    bpffs::Folder,
    layout::{PROGRAMS, Shape},
    loader::OBJECT,
    raw_map::RawMap,
};

/// The name of the section, and of the map that it becomes.
const SECTION: &str = ".rodata";

/// What the agent wrote into the programs when it loaded them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Globals {
    /// What hashing schedulers hash with.
    pub hash_seed: u64,
    /// Retransmissions of a SYN after which another backend is tried; 0 is never.
    pub syn_retries: u16,
    /// Whether packets go past the stack wherever the way is known.
    pub direct: bool,
}

impl Default for Globals {
    fn default() -> Self {
        Self { hash_seed: hash::DEFAULT_SEED, syn_retries: 0, direct: false }
    }
}

/// The constants of the programs in the kernel.
#[derive(Debug)]
pub(crate) struct Constants {
    octets: Vec<u8>,
}

impl Constants {
    /// Those of the pinned programs; nothing where there are none, or where they are another version's, whose constants lie
    /// elsewhere.
    pub(crate) fn read(folder: &Folder) -> Option<Self> {
        let path = folder.programs().join(PROGRAMS[0]);
        let ids = ProgramInfo::from_pin(&path).ok()?.map_ids().ok()??;
        let info = ids
            .into_iter()
            .filter_map(|id| MapInfo::from_id(id).ok())
            .find(|info| info.name_as_str() == Some(SECTION))?;
        let fd = info.fd().ok()?.as_fd().try_clone_to_owned().ok()?;
        let map = RawMap::new(SECTION, fd, Shape::of(&info).ok()?);
        // An array of one.
        let mut octets = vec![0; section_size()?];
        map.get(&0u32.to_ne_bytes(), &mut octets).ok().filter(|found| *found)?;
        Some(Self { octets })
    }

    /// The octets of a constant.
    pub(crate) fn get<const N: usize>(&self, name: &str) -> Option<[u8; N]> {
        let object = object::File::parse(OBJECT).ok()?;
        let symbol = object.symbols().find(|symbol| symbol.name() == Ok(name))?;
        let start = usize::try_from(symbol.address()).ok()?;
        self.octets.get(start..start.checked_add(N)?)?.try_into().ok()
    }
}

fn section_size() -> Option<usize> {
    use object::ObjectSection as _;

    let object = object::File::parse(OBJECT).ok()?;
    usize::try_from(object.section_by_name(SECTION)?.size()).ok()
}
