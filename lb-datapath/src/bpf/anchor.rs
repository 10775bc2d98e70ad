//! Keeps the pins when the BPF file system is unmounted under a running agent.
//!
//! While the agent has a folder of the file system open, the kernel refuses all but a lazy unmount (`umount -l`). After
//! a lazy unmount, the pinned objects, including programs on devices, still exist, but no other process can find them,
//! and the kernel frees them when the last process that has the folder open ends. So the agent pins everything again
//! before it ends.
//!
//! Any process with access to the file system can also remove single pins. The agent still has the maps and programs,
//! and pins them again; otherwise no command would find them, and the next agent would begin with empty maps.

use std::{
    fs,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::fs::{Mode, OFlags};

use crate::{
    bpf::{
        bpffs::{self, Folder, Lock},
        layout::DESCRIPTION,
        program::Programs,
        sys,
    },
    error::DatapathError,
};

/// The open folder of the data plane's pins: it stays reachable when its path is unmounted or covered.
#[derive(Debug)]
pub struct Anchor {
    folder: Folder,
    programs: Arc<Programs>,
    /// The map `LAYOUT`, which describes the other maps, held open.
    description: OwnedFd,
    root: OwnedFd,
}

/// What [`Anchor::rescue`] has pinned again.
#[derive(Debug)]
pub struct Rescued {
    /// Number of rescued objects: those that this call has pinned, and those that an earlier call had pinned already.
    pub pins: usize,
    /// Locks out other agents as long as this value exists.
    _lock: Lock,
}

impl Anchor {
    pub(crate) fn new(folder: Folder, programs: Arc<Programs>) -> Result<Self, DatapathError> {
        let root = folder.root();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&root, flags, Mode::empty())
            .map_err(|error| DatapathError::file("open", &root, error))?;
        let description = folder.map(DESCRIPTION);
        let description = sys::open_pin(&description)
            .map_err(|error| DatapathError::file("open the pinned map", description, error))?;
        Ok(Self { folder, programs, description, root })
    }

    /// Path of the BPF file system on which the pins are.
    pub fn bpffs(&self) -> &Path {
        self.folder.bpffs()
    }

    /// Whether the path of the pins still leads to the open folder.
    pub fn holds(&self) -> bool {
        let ours = rustix::fs::fstat(&self.root).map(|status| (status.st_dev, status.st_ino));
        let found = rustix::fs::stat(self.folder.root()).map(|status| (status.st_dev, status.st_ino));
        ours.is_ok() && ours == found
    }

    /// Pins the maps and programs of this agent whose pins another process has removed. Returns their names.
    ///
    /// # Errors
    /// A pin cannot be created. Pins that were created stay; the call can be repeated.
    pub fn restore(&self) -> Result<Vec<&'static str>, DatapathError> {
        self.folder.create_folders()?;
        let mut restored = self.programs.restore_pins()?;
        let path = self.folder.map(DESCRIPTION);
        if !bpffs::is_pinned(&path)? {
            sys::pin(self.description.as_fd(), &path)
                .map_err(|error| DatapathError::file("pin the map at", path, error))?;
            restored.push(DESCRIPTION);
        }
        Ok(restored)
    }

    /// Pins everything again, on the BPF file system that is now mounted at [`Self::bpffs`]; mounts one there if there
    /// is none.
    ///
    /// # Errors
    /// No file system can be mounted, another agent has locked the folder, or an object cannot be pinned. Pins that
    /// were created stay; the call can be repeated.
    pub fn rescue(&self) -> Result<Rescued, DatapathError> {
        let folder = Folder::create(self.folder.bpffs())?;
        let lock = folder.lock()?;
        // After an unmount, this is the only path that leads to the open folder.
        let lost = PathBuf::from(format!("/proc/self/fd/{}", self.root.as_raw_fd()));
        let pins = pin_again(&lost, &folder.root())? + self.restore()?.len();
        Ok(Rescued { pins, _lock: lock })
    }
}

/// Pins every object below `from` at the same place below `to`, unless something is pinned there. Returns the number of
/// objects below `from`.
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
