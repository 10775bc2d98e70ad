//! Removes everything that agents of any version have left on a BPF file system and in this network namespace.

use std::{
    fs, io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use tracing::debug;

use crate::{
    attach::{clsact, sockets},
    bpf::{
        bpffs::{self, Folder},
        sys,
    },
    error::DatapathError,
    net::{
        announced_routes::AnnouncedRoutes, catch::CatchDevice, ports::PortReservation,
        unreachable::UnreachableRoutes,
    },
    state::filter,
};

/// What [`cleanup`] has removed.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Removed {
    /// Number of removed links (tcx, XDP and cgroup) and clsact filters.
    pub attachments: usize,
    /// Number of pinned programs that were removed.
    pub programs: usize,
    /// Number of pinned maps that were removed.
    pub maps: usize,
    /// Number of ports whose reservation was removed, so that the kernel may give them to sockets again.
    pub ports: usize,
    /// Whether the BPF file system was unmounted, because an agent had mounted it.
    pub unmounted: bool,
}

/// Removes all programs, links, maps and pins of the data plane on `bpffs`; in this network namespace, also our
/// reserved ports, our routes and rules, our catch device, our filters on all devices, and the qdiscs that agents have
/// created and that have no other filters. (Without pins on `bpffs` there is no record of ports and qdiscs; they stay.)
/// Unmounts the file system if an agent has mounted it and no other software has pins on it.
///
/// # Errors
/// An agent runs ([`DatapathError::Locked`]), with pins on `bpffs` or, in this network namespace, on another BPF file
/// system; or something cannot be removed.
pub fn cleanup(bpffs: &Path) -> Result<Removed, DatapathError> {
    bpffs::check_no_agent_runs()?;
    let Some(folder) = Folder::find(bpffs)? else {
        release_routes()?;
        return Ok(Removed { attachments: clsact::remove_everywhere()?, ..Removed::default() });
    };
    // The lock comes first, because a running agent would add its routes again.
    let lock = folder.lock()?;
    // First lets all programs pass plain packets (see `filter::pass_all`): the kernel detaches one program after the
    // other, which takes seconds on a busy machine. If only some hooks translated packets meanwhile, connections would
    // break, also those that kube-proxy's rules could serve already.
    for version in folder.versions()? {
        filter::pass_all(&version)?;
    }
    release_routes()?;
    let mut removed = Removed { attachments: clsact::remove_everywhere()?, ..Removed::default() };
    clsact::release_qdiscs(&folder)?;
    removed.ports = PortReservation::new(folder.clone()).release()?;
    for version in folder.versions()? {
        detach_links(&version)?;
        let of_version = remove_version(&version)?;
        removed.attachments += of_version.attachments;
        removed.programs += of_version.programs;
        removed.maps += of_version.maps;
    }
    remove_folder(&folder.root())?;
    drop(lock);
    removed.unmounted = folder.unmount()?;
    Ok(removed)
}

/// Removes the announced routes with their rules, and the unreachable routes and the catch device, which keep
/// untranslated packets to cluster IPs from leaving the node.
fn release_routes() -> Result<(), DatapathError> {
    AnnouncedRoutes::release_all()?;
    UnreachableRoutes::release()?;
    CatchDevice::release()
}

/// Detaches the programs of all pinned links, one right after the other. When only the pins are removed, the kernel
/// detaches the programs seconds later on a busy machine.
fn detach_links(version: &Path) -> Result<(), DatapathError> {
    let mut links = bpffs::entries(&version.join("links"))?;
    links.sort_by_key(|link| sockets::detach_order(link));
    for path in links {
        if let Err(error) = sys::open_pin(&path).and_then(|link| sys::detach_link(link.as_fd())) {
            debug!(link = %path.display(), %error, "removing the pin of a link that cannot be detached at once");
        }
    }
    Ok(())
}

/// Removes the pins of one layout version (`DIR/lb/vN`): first those of links, which detaches their programs, and last
/// those of maps. The version's clsact filters stay.
pub(crate) fn remove_version(version: &Path) -> Result<Removed, DatapathError> {
    let mut removed = Removed::default();
    for link in bpffs::entries(&version.join("links"))? {
        removed.attachments += usize::from(bpffs::unpin(&link)?);
    }
    for program in bpffs::entries(&version.join("programs"))? {
        removed.programs += usize::from(bpffs::unpin(&program)?);
    }
    let is_file = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file());
    for map in bpffs::entries(version)?.into_iter().filter(is_file) {
        removed.maps += usize::from(bpffs::unpin(&map)?);
    }
    remove_folder(version)?;
    Ok(removed)
}

fn remove_folder(folder: &Path) -> Result<(), DatapathError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(DatapathError::file("remove", folder, error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}
