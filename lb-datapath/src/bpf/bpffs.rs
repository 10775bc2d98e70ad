//! The pins: `DIR/lb/vN/` on a BPF file system, one `N` for each layout of the maps.
//!
//! ```text
//! DIR/lb/v1/SERVICES …             maps
//! DIR/lb/v1/LAYOUT                 a map that describes them, see `state/handover.rs`
//! DIR/lb/v1/CONSTANTS              a map with the constants of the programs, see `bpf/globals.rs`
//! DIR/lb/v1/programs/tc_ingress …  programs, so that commands can read them while no device runs them
//! DIR/lb/v1/links/7-ingress …      tcx links, by interface index and direction; also XDP and socket links
//! DIR/lb/clsact/7                  a folder: an agent created the clsact qdisc of device 7
//! DIR/lb/ports/10000-29999         a folder: an agent added these ports to ip_local_reserved_ports
//! ```

use std::{
    fs, io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use lb_common::LAYOUT_VERSION;
use rustix::{
    fs::{FlockOperation, Mode, OFlags},
    io::Errno,
    mount::MountFlags,
};
use tracing::info;

use crate::error::DatapathError;

/// File system type of a BPF file system: `BPF_FS_MAGIC` of include/uapi/linux/magic.h.
const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
/// Mount source of a BPF file system that the agent has mounted, as `/proc/thread-self/mountinfo` shows it.
const MOUNT_SOURCE: &str = "lb-agent";

/// The file systems of this mount namespace, as proc_pid_mountinfo(5) describes them.
const MOUNTS: &str = "/proc/thread-self/mountinfo";

/// Number of attempts to get the lock or to unmount, and the pause between two attempts: together a second, because on
/// an overloaded machine a command may lose its CPU while it holds the lock or has a folder open.
const ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(10);

/// The folder `DIR/lb` with the pins of one data plane.
#[derive(Clone, Debug)]
pub(crate) struct Folder {
    bpffs: PathBuf,
}

/// A lock on a [`Folder`] that excludes other agents, or other monitors, as long as this value exists. The kernel
/// releases it when the process ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _folder: OwnedFd,
}

impl Folder {
    /// The folder `lb` on the BPF file system at `bpffs`. Mounts a BPF file system there if there is none.
    pub(crate) fn create(bpffs: &Path) -> Result<Self, DatapathError> {
        fs::create_dir_all(bpffs).map_err(|error| DatapathError::file("create", bpffs, error))?;
        if !is_bpffs(bpffs)? {
            rustix::mount::mount(MOUNT_SOURCE, bpffs, "bpf", MountFlags::empty(), c"mode=0700")
                .map_err(|error| DatapathError::file("mount a BPF file system at", bpffs, error))?;
            info!(path = %bpffs.display(), "mounted a BPF file system");
        }
        let folder = Self { bpffs: bpffs.to_owned() };
        folder.create_folders()?;
        Ok(folder)
    }

    /// Creates the folders of this layout version, and the folder `DIR/lb/clsact`, if they do not exist.
    pub(crate) fn create_folders(&self) -> Result<(), DatapathError> {
        for path in [self.programs(), self.links(), self.clsact()] {
            fs::create_dir_all(&path).map_err(|error| DatapathError::file("create", &path, error))?;
        }
        Ok(())
    }

    /// The folder `lb` on `bpffs`; `None` if no agent of any layout version has created it.
    ///
    /// # Errors
    /// It is unknown whether the folder exists, for example because this process may not look into `bpffs`.
    pub(crate) fn find(bpffs: &Path) -> Result<Option<Self>, DatapathError> {
        let folder = Self { bpffs: bpffs.to_owned() };
        match fs::metadata(folder.root()) {
            Ok(found) => Ok(found.is_dir().then_some(folder)),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(DatapathError::file("look for", folder.root(), error)),
        }
    }

    pub(crate) fn bpffs(&self) -> &Path {
        &self.bpffs
    }

    /// The path `DIR/lb`.
    pub(crate) fn root(&self) -> PathBuf {
        self.bpffs.join("lb")
    }

    /// The path `DIR/lb/vN` of this layout version.
    pub(crate) fn current(&self) -> PathBuf {
        self.root().join(format!("v{LAYOUT_VERSION}"))
    }

    /// The existing paths `DIR/lb/v*`, of every layout version, sorted by name.
    pub(crate) fn versions(&self) -> Result<Vec<PathBuf>, DatapathError> {
        let is_version = |path: &PathBuf| {
            let name =
                path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix('v'));
            name.is_some_and(|number| number.parse::<u32>().is_ok())
        };
        Ok(entries(&self.root())?.into_iter().filter(is_version).collect())
    }

    pub(crate) fn map(&self, name: &str) -> PathBuf {
        self.current().join(name)
    }

    pub(crate) fn programs(&self) -> PathBuf {
        self.current().join("programs")
    }

    pub(crate) fn links(&self) -> PathBuf {
        self.current().join("links")
    }

    pub(crate) fn clsact(&self) -> PathBuf {
        self.root().join("clsact")
    }

    pub(crate) fn ports(&self) -> PathBuf {
        self.root().join("ports")
    }

    /// The process that holds the lock, such as `pid 17 lb-agent`; `None` if no process holds the lock, or if the
    /// holder is unknown.
    pub(crate) fn holder(&self) -> Option<String> {
        // If the folder cannot be opened or locked for another reason, the holder is unknown; code that uses the folder
        // reports the error.
        match self.try_lock(FlockOperation::NonBlockingLockShared) {
            Err(DatapathError::Locked { holder, .. }) => Some(holder),
            Ok(_) | Err(_) => None,
        }
    }

    /// Locks the events for one monitor. Monitors lock the folder of this layout version, agents the folder above it.
    ///
    /// # Errors
    /// [`DatapathError::Watched`] if another monitor has the lock.
    pub(crate) fn lock_monitor(&self) -> Result<Lock, DatapathError> {
        match try_lock(&self.current(), FlockOperation::NonBlockingLockExclusive) {
            Err(DatapathError::Locked { holder, .. }) => Err(DatapathError::Watched(holder)),
            result => result,
        }
    }

    /// Locks the folder for one agent. A command that checks whether an agent runs holds the lock for a moment, so this
    /// function tries several times.
    ///
    /// # Errors
    /// [`DatapathError::Locked`] if another agent has the lock.
    pub(crate) fn lock(&self) -> Result<Lock, DatapathError> {
        let is_locked = |error: &DatapathError| matches!(error, DatapathError::Locked { .. });
        repeat(|| self.try_lock(FlockOperation::NonBlockingLockExclusive), is_locked)
    }

    fn try_lock(&self, operation: FlockOperation) -> Result<Lock, DatapathError> {
        try_lock(&self.root(), operation)
    }

    /// Unmounts the BPF file system if an agent has mounted it and it has no pins of other software. Returns whether it
    /// was unmounted.
    pub(crate) fn unmount(&self) -> Result<bool, DatapathError> {
        // The kernel itself may pin iterators (`maps.debug`, `progs.debug`) on the file system.
        let is_iterator = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "debug");
        if !is_our_mount(&self.bpffs)? || !entries(&self.bpffs)?.iter().all(is_iterator) {
            return Ok(false);
        }
        let unmount = || {
            rustix::mount::unmount(&self.bpffs, rustix::mount::UnmountFlags::empty())
                .map_err(|error| DatapathError::file("unmount", &self.bpffs, error))
        };
        // Another process has a folder of the file system open, such as `lb-agent status`.
        let is_busy = |error: &DatapathError| matches!(error, DatapathError::File { source, .. } if source.kind() == io::ErrorKind::ResourceBusy);
        repeat(unmount, is_busy)?;
        Ok(true)
    }
}

/// Repeats the attempt for about a second, as long as it fails with an error that may pass.
fn repeat<T>(
    mut attempt: impl FnMut() -> Result<T, DatapathError>,
    may_pass: impl Fn(&DatapathError) -> bool,
) -> Result<T, DatapathError> {
    for _ in 0..ATTEMPTS {
        match attempt() {
            Err(error) if may_pass(&error) => thread::sleep(PAUSE),
            result => return result,
        }
    }
    attempt()
}

/// Whether the error means that a path does not exist.
pub(crate) fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn try_lock(path: &Path, operation: FlockOperation) -> Result<Lock, DatapathError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| DatapathError::file("open", path, error))?;
    match rustix::fs::flock(&folder, operation) {
        Ok(()) => Ok(Lock { _folder: folder }),
        Err(Errno::WOULDBLOCK) => {
            Err(DatapathError::Locked { holder: holder(&folder), folder: path.to_owned() })
        }
        Err(error) => Err(DatapathError::file("lock", path, error)),
    }
}

/// The paths of the entries of a folder, sorted; empty if the folder does not exist.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>, DatapathError> {
    let read = |folder: &Path| -> io::Result<Vec<PathBuf>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
    };
    match read(folder) {
        Ok(mut paths) => {
            paths.sort();
            Ok(paths)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(DatapathError::file("list", folder, error)),
    }
}

pub(crate) fn is_pinned(path: &Path) -> Result<bool, DatapathError> {
    path.try_exists().map_err(|error| DatapathError::file("look for the pin", path, error))
}

/// Removes a pin. Returns whether the pin existed.
pub(crate) fn unpin(path: &Path) -> Result<bool, DatapathError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(DatapathError::file("remove the pin", path, error)),
    }
}

/// Whether `path` is on a BPF file system.
pub(crate) fn is_bpffs(path: &Path) -> Result<bool, DatapathError> {
    let statistics = rustix::fs::statfs(path)
        .map_err(|error| DatapathError::file("find the type of the file system at", path, error))?;
    // `f_type` is signed on some architectures and unsigned on others.
    Ok(u64::try_from(statistics.f_type).is_ok_and(|magic| magic == BPF_FS_MAGIC))
}

/// Checks that no agent runs in this network namespace, as far as this process can see: the BPF file system with the
/// agent's pins must be mounted in this mount namespace, and the agent must be in this PID namespace.
///
/// # Errors
/// [`DatapathError::Locked`] if an agent runs.
pub(crate) fn check_no_agent_runs() -> Result<(), DatapathError> {
    // An agent that has just been told to stop may need a moment.
    repeat(check_locks, |error| matches!(error, DatapathError::Locked { .. }))
}

fn check_locks() -> Result<(), DatapathError> {
    let mounts = fs::read_to_string(MOUNTS).map_err(|error| DatapathError::file("read", MOUNTS, error))?;
    for point in mounts_of_kind(&mounts, "bpf") {
        let root = Folder { bpffs: point.into() }.root();
        // If the folder does not exist or cannot be locked for another reason, no agent is known to use it.
        if let Err(error @ DatapathError::Locked { .. }) =
            try_lock(&root, FlockOperation::NonBlockingLockShared)
            && fs::File::open(&root)
                .ok()
                .and_then(|folder| locked_by(folder.as_fd()))
                .is_some_and(shares_netns)
        {
            return Err(error);
        }
    }
    Ok(())
}

/// Whether the process is in the network namespace of this thread; false if that is unknown.
fn shares_netns(pid: u32) -> bool {
    let netns = |process: &str| {
        fs::metadata(format!("/proc/{process}/ns/net")).ok().map(|file| (file.dev(), file.ino()))
    };
    netns(&pid.to_string()).is_some_and(|theirs| Some(theirs) == netns("thread-self"))
}

/// Whether the topmost file system that is mounted at `path` is one that the agent has mounted.
fn is_our_mount(path: &Path) -> Result<bool, DatapathError> {
    let path = fs::canonicalize(path).map_err(|error| DatapathError::file("resolve", path, error))?;
    let mounts = fs::read_to_string(MOUNTS).map_err(|error| DatapathError::file("read", MOUNTS, error))?;
    Ok(mounts
        .lines()
        .filter_map(Mount::parse)
        .rfind(|mount| Path::new(mount.point) == path)
        .is_some_and(|mount| mount.kind == "bpf" && mount.source == MOUNT_SOURCE))
}

/// Path of the first mount of a file system of type `kind`, in the text of `/proc/thread-self/mountinfo`.
pub(crate) fn mount_of_kind<'a>(mounts: &'a str, kind: &str) -> Option<&'a str> {
    mounts_of_kind(mounts, kind).next()
}

fn mounts_of_kind<'a>(mounts: &'a str, kind: &str) -> impl Iterator<Item = &'a str> {
    mounts.lines().filter_map(Mount::parse).filter(move |mount| mount.kind == kind).map(|mount| mount.point)
}

/// A line of `/proc/thread-self/mountinfo`, as proc_pid_mountinfo(5) describes it.
struct Mount<'a> {
    point: &'a str,
    kind: &'a str,
    source: &'a str,
}

impl<'a> Mount<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (head, tail) = line.split_once(" - ")?;
        let mut tail = tail.split(' ');
        Some(Self { point: head.split(' ').nth(4)?, kind: tail.next()?, source: tail.next()? })
    }
}

/// Describes the process that holds the lock of a folder, by `/proc/locks`. A holder that is not listed there is taken
/// to be in another PID namespace.
fn holder(folder: &OwnedFd) -> String {
    let Some(pid) = locked_by(folder.as_fd()) else { return "a process in another PID namespace".to_owned() };
    let command = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    format!("pid {pid} {}", command.trim()).trim_end().to_owned()
}

/// The process that holds the lock of a folder; `None` if `/proc/locks` does not list it.
fn locked_by(folder: BorrowedFd<'_>) -> Option<u32> {
    let inode = rustix::fs::fstat(folder).ok()?.st_ino;
    holder_pid(&fs::read_to_string("/proc/locks").ok()?, inode)
}

/// The process with an exclusive `flock` on the file with this inode number, from lines such as `3: FLOCK  ADVISORY
/// WRITE 1234 00:1f:17 0 EOF`. The function does not compare the device, because the kernel does not show the same
/// number everywhere for a file system without a disk.
fn holder_pid(locks: &str, inode: u64) -> Option<u32> {
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, "WRITE", pid, file, ..] = fields.as_slice() else { return None };
        (file.rsplit(':').next()? == inode.to_string()).then(|| pid.parse().ok()).flatten()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_is_absent_only_if_nothing_is_there() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Folder::find(&folder.path().join("nowhere")).unwrap().is_none());
        assert!(Folder::find(folder.path()).unwrap().is_none());
        fs::create_dir(folder.path().join("lb")).unwrap();
        assert!(Folder::find(folder.path()).unwrap().is_some());
        // The kernel refuses to look up a name of 300 bytes, as it refuses any name in a folder without permission.
        let refused = Folder::find(Path::new(&"x".repeat(300))).unwrap_err().to_string();
        assert!(refused.contains("cannot look for"), "{refused}");
    }

    #[test]
    fn lock_holder_is_the_writer_of_this_inode() {
        let locks = "1: POSIX  ADVISORY  WRITE 77 00:1f:17 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 88 00:1f:16 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 99 00:1f:17 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 100 00:1f:17 0 EOF\n";
        assert_eq!(holder_pid(locks, 17), Some(99));
        assert_eq!(holder_pid(locks, 18), None);
    }

    #[test]
    fn mountinfo_line_gives_point_type_and_source() {
        let line = "36 35 0:33 / /sys/fs/bpf rw,nosuid shared:9 - bpf lb-agent rw,mode=700";
        let mount = Mount::parse(line).unwrap();
        assert_eq!((mount.point, mount.kind, mount.source), ("/sys/fs/bpf", "bpf", "lb-agent"));
        let all = format!("{line}\n37 35 0:34 / /run rw - tmpfs tmpfs rw\n38 35 0:35 / /b rw - bpf bpf rw\n");
        assert_eq!(mounts_of_kind(&all, "bpf").collect::<Vec<_>>(), ["/sys/fs/bpf", "/b"]);
    }
}
