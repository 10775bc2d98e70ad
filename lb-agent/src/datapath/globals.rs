//! What was written into the programs when they were loaded: their `.rodata`, which the kernel keeps as a frozen array.

use std::os::fd::AsFd as _;

use aya::{maps::MapInfo, programs::ProgramInfo};
use bytemuck::Zeroable as _;
use object::{Object as _, ObjectSymbol as _};

use super::{
    bpffs::Folder,
    layout::PROGRAMS,
    loader::OBJECT,
    sys::{self, Command, Element},
};

/// The name of the section, and of the map that it becomes.
const SECTION: &str = ".rodata";

/// The constants of the programs in the kernel.
#[derive(Debug)]
pub(super) struct Constants {
    octets: Vec<u8>,
}

impl Constants {
    /// Those of the pinned programs; nothing where there are none, or where they are another version's, whose constants lie
    /// elsewhere.
    pub(super) fn read(folder: &Folder) -> Option<Self> {
        let path = folder.programs().join(PROGRAMS[0]);
        let ids = ProgramInfo::from_pin(&path).ok()?.map_ids().ok()??;
        let info = ids
            .into_iter()
            .filter_map(|id| MapInfo::from_id(id).ok())
            .find(|info| info.name_as_str() == Some(SECTION))?;
        let mut octets = vec![0; section_size()?];
        if info.value_size() as usize != octets.len() {
            return None;
        }
        let first = 0u32;
        let fd = info.fd().ok()?;
        let mut attr = Element {
            map: sys::raw(fd.as_fd()),
            key: sys::pointer(&raw const first),
            value: sys::pointer(octets.as_mut_ptr()),
            ..Element::zeroed()
        };
        // SAFETY: the key has 4 octets as that of any array, the value as many as the map says.
        unsafe { sys::bpf(Command::MapLookup, &mut attr) }.ok()?;
        Some(Self { octets })
    }

    /// The octets of a constant.
    pub(super) fn get<const N: usize>(&self, name: &str) -> Option<[u8; N]> {
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
