//! Reuses links that an earlier agent has pinned, by replacing their programs.

use std::{io, os::fd::AsFd as _, path::Path};

use crate::{
    bpf::{bpffs, program::LoadedProgram, sys},
    error::DatapathError,
};

/// Puts `program` into the link pinned at `path`, if `is_current` finds that the link is on the hook that `path` names.
/// Returns the kernel's description of the link. Otherwise returns `None`, and removes the pin, if there is one: such a
/// pin is stale, for example because the link's device is gone.
pub(crate) fn adopt(
    path: &Path,
    program: &LoadedProgram,
    is_current: impl Fn(&sys::LinkInfo) -> bool,
) -> Result<Option<sys::LinkInfo>, DatapathError> {
    let link = match sys::open_pin(path) {
        Ok(link) => link,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(DatapathError::file("open the pinned link", path, error)),
    };
    let info = sys::link_info(link.as_fd())
        .map_err(|error| DatapathError::file("inspect the pinned link", path, error))?;
    if !is_current(&info) {
        bpffs::unpin(path)?;
        return Ok(None);
    }
    // If the link has this program already, the kernel ignores the update of a tcx or XDP link; a cgroup link stores
    // the same program again.
    sys::update_link(link.as_fd(), program.fd())
        .map_err(|error| DatapathError::file("replace the program of the pinned link", path, error))?;
    Ok(Some(info))
}
