//! Surviving the unmount of the BPF file system under a running agent.
//!
//! While the agent has a folder there open, the kernel refuses all but a lazy unmount (`umount -l`). After that the
//! pinned objects live on, programs on devices included, but no other process finds them, and they end with the last
//! process that has the folder open. So the agent pins everything again before it ends.

use std::{
    fs,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::fs::{Mode, OFlags};

use crate::{
    bpf::{
        bpffs::{self, Folder, Lock},
        sys,
    },
    error::DatapathError,
};

/// The folder of the data plane, held open: it stays reachable when its path is unmounted or covered.
#[derive(Debug)]
pub struct Anchor {
    folder: Folder,
    root: OwnedFd,
}

/// The result of [`Anchor::rescue`].
#[derive(Debug)]
pub struct Rescued {
    /// Number of pins.
    pub pins: usize,
    /// Keeps other agents out as long as it lives.
    _lock: Lock,
}

impl Anchor {
    pub(crate) fn new(folder: Folder) -> Result<Self, DatapathError> {
        let root = folder.root();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&root, flags, Mode::empty())
            .map_err(|error| DatapathError::file("open", &root, error))?;
        Ok(Self { folder, root })
    }

    /// The BPF file system.
    pub fn bpffs(&self) -> &Path {
        self.folder.bpffs()
    }

    /// Whether the path still leads to the folder.
    pub fn holds(&self) -> bool {
        let ours = rustix::fs::fstat(&self.root).map(|status| (status.st_dev, status.st_ino));
        let found = rustix::fs::stat(self.folder.root()).map(|status| (status.st_dev, status.st_ino));
        ours.is_ok() && ours == found
    }

    /// Pins everything on the file system that is at the path now; mounts one if there is none.
    ///
    /// # Errors
    /// No file system can be mounted, another agent uses it, or an object cannot be pinned. Pins that were made stay;
    /// the call can be repeated.
    pub fn rescue(&self) -> Result<Rescued, DatapathError> {
        let folder = Folder::create(self.folder.bpffs())?;
        let lock = folder.lock()?;
        // The only path that still leads to the open folder.
        let lost = PathBuf::from(format!("/proc/self/fd/{}", self.root.as_raw_fd()));
        Ok(Rescued { pins: pin_again(&lost, &folder.root())?, _lock: lock })
    }
}

/// Pins every object that is pinned below `from` also below `to`. Returns the number of pins below `to`.
fn pin_again(from: &Path, to: &Path) -> Result<usize, DatapathError> {
    let mut pins = 0;
    for path in bpffs::entries(from)? {
        let Some(name) = path.file_name() else { continue };
        let target = to.join(name);
        if path.is_dir() {
            fs::create_dir_all(&target).map_err(|error| DatapathError::file("create", &target, error))?;
            pins += pin_again(&path, &target)?;
        } else {
            if !target.exists() {
                let object =
                    sys::open_pin(&path).map_err(|error| DatapathError::file("open", &path, error))?;
                sys::pin(object.as_fd(), &target)
                    .map_err(|error| DatapathError::file("pin", &target, error))?;
            }
            pins += 1;
        }
    }
    Ok(pins)
}
