//! Reads the memory of maps in the kernel.

use std::{
    fs,
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
};

use anyhow::Context as _;
use aya::maps::MapData;

use lb_tests::bench::machine::field;

/// Names of the maps pinned in a folder, and their kernel memory in bytes.
pub(crate) fn of_maps(folder: &Path) -> anyhow::Result<Vec<(String, u64)>> {
    let mut maps = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            maps.push((entry.file_name().to_string_lossy().into_owned(), of_map(&entry.path())?));
        }
    }
    maps.sort();
    Ok(maps)
}

fn of_map(path: &Path) -> anyhow::Result<u64> {
    let map = MapData::from_pin(path).with_context(|| format!("opening the map {}", path.display()))?;
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", map.fd().as_fd().as_raw_fd()))?;
    // The kernel's own figure. Since Linux 6.4, for a map that is not preallocated, it counts only existing elements.
    let bytes = field(&info, "memlock").context("the kernel does not tell the memory of a map")?;
    bytes.parse().with_context(|| format!("the memory of the map {} is {bytes}", path.display()))
}
