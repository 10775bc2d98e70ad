//! Programs on the sockets of a control group.
//!
//! Links are pinned: they outlive the agent, and the next agent replaces their programs. Programs that other software
//! has attached to the group also run.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsFd, unix::fs::MetadataExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use tracing::info;

use crate::{
    attach::pinned_link::adopt,
    bpf::{
        bpffs::{self, Folder, is_pinned},
        layout::{SOCKET_HOOKS, SocketHook},
        program::Programs,
        sys,
    },
    error::DatapathError,
};

/// A program that is attached to a cgroup and serves the sockets of that cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketAttachment {
    /// Name of the program.
    pub program: &'static str,
    /// The kernel's id of the program.
    pub program_id: u32,
    /// Inode number of the cgroup's folder; 0 if the cgroup, and with it the attachment, is gone.
    pub cgroup: u64,
}

/// Path at which cgroup2 is mounted in this mount namespace; `None` if it is not mounted.
pub fn cgroup_root() -> io::Result<Option<PathBuf>> {
    let mounts = fs::read_to_string("/proc/thread-self/mountinfo")?;
    Ok(bpffs::mount_of_kind(&mounts, "cgroup2").map(PathBuf::from))
}

/// Attaches the socket programs to a cgroup, and keeps them attached.
#[derive(Clone, Debug)]
pub struct SocketAttacher {
    folder: Folder,
    programs: Arc<Programs>,
    /// Path of the cgroup whose sockets are served; `None` for no sockets.
    cgroup: Option<PathBuf>,
}

impl SocketAttacher {
    pub(crate) const fn new(folder: Folder, programs: Arc<Programs>, cgroup: Option<PathBuf>) -> Self {
        Self { folder, programs, cgroup }
    }

    /// Attaches the socket programs; if no sockets are served, detaches those of an earlier agent.
    pub fn sync(&self) -> Result<(), DatapathError> {
        match &self.cgroup {
            Some(cgroup) => attach(&self.folder, &self.programs, cgroup),
            None => detach(&self.folder),
        }
    }

    /// Attaches again the programs that were detached because another process removed their pinned links. Returns their
    /// names.
    pub fn restore(&self) -> Result<Vec<&'static str>, DatapathError> {
        let Some(cgroup) = &self.cgroup else { return Ok(Vec::new()) };
        let missing = missing(&self.folder)?;
        if !missing.is_empty() {
            attach(&self.folder, &self.programs, cgroup)?;
        }
        Ok(missing)
    }
}

/// Names of the socket programs whose link is not pinned.
pub(crate) fn missing(folder: &Folder) -> Result<Vec<&'static str>, DatapathError> {
    let mut missing = Vec::new();
    for hook in &SOCKET_HOOKS {
        if !is_pinned(&pin_of(folder, hook))? {
            missing.push(hook.program);
        }
    }
    Ok(missing)
}

/// Attaches the socket programs to the cgroup, in place of those of an earlier agent.
fn attach(folder: &Folder, programs: &Programs, cgroup: &Path) -> Result<(), DatapathError> {
    let failed = |action| move |source| DatapathError::Cgroup { action, path: cgroup.to_owned(), source };
    let group = File::open(cgroup).map_err(failed("open"))?;
    let inode = group.metadata().map_err(failed("read the inode number of"))?.ino();
    for hook in &SOCKET_HOOKS {
        let program = &*programs.get(hook.program)?;
        let path = pin_of(folder, hook);
        let is_current = |info: &sys::LinkInfo| info.cgroup() == inode;
        if adopt(&path, program, is_current)?.is_some() {
            continue;
        }
        let link = sys::attach_cgroup(program.fd(), group.as_fd(), hook.attach_type)
            .map_err(failed("attach programs to"))?;
        sys::pin(link.as_fd(), &path)
            .map_err(|error| DatapathError::file("pin the link at", &path, error))?;
    }
    info!(cgroup = %cgroup.display(), "serving sockets of a control group");
    Ok(())
}

/// Detaches the socket programs of an earlier agent from their cgroup, and removes their pins.
fn detach(folder: &Folder) -> Result<(), DatapathError> {
    // In reverse order, because replies must be translated as long as hooks connect sockets to backends.
    for hook in SOCKET_HOOKS.iter().rev() {
        bpffs::unpin(&pin_of(folder, hook))?;
        bpffs::unpin(&folder.programs().join(hook.program))?;
    }
    Ok(())
}

/// Whether a pin in the folder of links has the name of a socket program of this version.
pub(super) fn is_pin(link: &Path) -> bool {
    detach_order(link) < SOCKET_HOOKS.len()
}

/// The position of a pinned link in the order in which [`cleanup`](super::cleanup) detaches links. The links of socket
/// programs come first, in the order of [`detach`].
pub(super) fn detach_order(link: &Path) -> usize {
    let is_link = |hook: &SocketHook| link.file_name().is_some_and(|name| name == hook.program);
    SOCKET_HOOKS.iter().rev().position(is_link).unwrap_or(SOCKET_HOOKS.len())
}

/// The socket programs that are attached, according to the pinned links.
pub(crate) fn attachments(folder: &Folder) -> Result<Vec<SocketAttachment>, DatapathError> {
    let mut attachments = Vec::new();
    for hook in &SOCKET_HOOKS {
        let path = pin_of(folder, hook);
        let info = match sys::open_pin(&path).and_then(|link| sys::link_info(link.as_fd())) {
            Ok(info) => info,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(DatapathError::file("inspect the pinned link", path, error)),
        };
        let (program_id, cgroup) = (info.program_id, info.cgroup());
        attachments.push(SocketAttachment { program: hook.program, program_id, cgroup });
    }
    Ok(attachments)
}

fn pin_of(folder: &Folder, hook: &SocketHook) -> PathBuf {
    folder.links().join(hook.program)
}
