//! Links that an earlier agent has pinned: a new agent replaces their programs.

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd},
    path::Path,
};

use crate::{
    bpf::{bpffs, program::LoadedProgram, sys},
    error::DatapathError,
};

/// Puts `program` into the link pinned at `path`, if `is_current` accepts what `info` returns for the link, that is, if
/// the link is on the hook that `path` names. Returns that info. Removes a stale pin, for example one of a device whose
/// index another device has now.
pub(crate) fn adopt<I>(
    path: &Path,
    program: &LoadedProgram,
    info: impl Fn(BorrowedFd<'_>) -> io::Result<I>,
    is_current: impl Fn(&I) -> bool,
) -> Result<Option<I>, DatapathError> {
    let link = match sys::open_pin(path) {
        Ok(link) => link,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(DatapathError::file("open the pinned link", path, error)),
    };
    let info =
        info(link.as_fd()).map_err(|error| DatapathError::file("inspect the pinned link", path, error))?;
    if !is_current(&info) {
        bpffs::unpin(path)?;
        return Ok(None);
    }
    // If the link has this program already, the kernel ignores the update of a tcx or XDP link; a cgroup link stores the
    // same program again.
    sys::update_link(link.as_fd(), program.fd())
        .map_err(|error| DatapathError::file("replace the program of the pinned link", path, error))?;
    Ok(Some(info))
}
