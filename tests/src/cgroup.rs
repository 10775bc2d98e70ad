//! Control groups: what socket hooks are attached to. Each node of a test has one of its own, with its processes and
//! those of its pods, so that the hooks of one node never meet another's.
//!
//! The groups are *threaded* (cgroups(7)): the threads of a test move between them one by one, as they move between
//! network namespaces. A socket belongs to the group of the thread that made it, for ever.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    thread::sleep,
    time::Duration,
};

use anyhow::{Context as _, Result};

use crate::cleanup::{Cleanup, Resource};

/// How often, and how long apart, a group is removed that threads are just leaving.
const ATTEMPTS: u32 = 200;
const PAUSE: Duration = Duration::from_millis(5);

/// A control group below that of this process. Clones are handles of the same group; the last one removes it.
#[derive(Clone, Debug)]
pub struct Cgroup {
    path: Arc<Path>,
    _cleanup: Arc<Cleanup>,
}

impl Cgroup {
    /// Makes a group.
    pub fn create(name: &str) -> Result<Self> {
        let path = own_group().context("finding the cgroup2 folder of this process")?.join(name);
        let cleanup = Cleanup::of(Resource::Cgroup(path.clone()));
        let make = || {
            fs::create_dir(&path)?;
            fs::write(path.join("cgroup.type"), "threaded")
        };
        make().with_context(|| format!("making control group {} (are you root?)", path.display()))?;
        Ok(Self { path: path.into(), _cleanup: Arc::new(cleanup) })
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file that moves the thread that writes `0` to it.
    pub(crate) fn threads(&self) -> PathBuf {
        self.path.join("cgroup.threads")
    }

    /// Moves this thread into the group.
    pub fn enter(&self) -> io::Result<()> {
        fs::write(self.threads(), "0")
    }
}

/// The cgroup2 folder of this process.
pub(crate) fn own_group() -> io::Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let mount = mounts.find(|fields| fields.get(2) == Some(&"cgroup2"));
    let mount = mount.and_then(|fields| fields.get(1).copied().map(PathBuf::from));
    let mount = mount.ok_or_else(|| {
        io::Error::other("no cgroup2 is mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")
    })?;
    let groups = fs::read_to_string("/proc/self/cgroup")?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    Ok(mount.join(group.ok_or_else(|| io::Error::other("/proc/self/cgroup names no cgroup2 folder"))?))
}

/// The threads in a group; what ends one ends its process.
pub(crate) fn members(path: &Path) -> Vec<u32> {
    let threads = fs::read_to_string(path.join("cgroup.threads")).unwrap_or_default();
    threads.lines().filter_map(|line| line.parse().ok()).collect()
}

/// Removes a group. A thread that has ended is still in it for a moment.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    for _ in 0..ATTEMPTS {
        match fs::remove_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => sleep(PAUSE),
            result => return result,
        }
    }
    fs::remove_dir(path)
}
