//! Control groups, to which the agent attaches its socket hooks. Each node of a test has its own group, for its
//! processes and those of its pods, so that the hooks of one node do not run for sockets of another node.
//!
//! The groups are *threaded* (cgroups(7)): the threads of a test move between them one by one, as they move between
//! network namespaces. A socket permanently belongs to the group of the thread that created it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    thread::sleep,
    time::Duration,
};

use anyhow::{Context as _, Result};

use crate::cleanup::{Cleanup, Resource};

/// Maximum number of attempts of [`remove`], and the pause between them, while threads are still leaving the group.
const ATTEMPTS: u32 = 200;
const PAUSE: Duration = Duration::from_millis(5);

/// A cgroup below the cgroup of this process. Clones share it; dropping the last clone removes it.
#[derive(Clone, Debug)]
pub struct Cgroup {
    path: Arc<Path>,
    _cleanup: Arc<Cleanup>,
}

impl Cgroup {
    /// Creates a cgroup with this name.
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

    /// Path of the cgroup's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the file `cgroup.threads`: a thread that writes `0` to it moves into the cgroup.
    pub(crate) fn threads(&self) -> PathBuf {
        self.path.join("cgroup.threads")
    }

    /// Moves this thread into the cgroup.
    pub fn enter(&self) -> io::Result<()> {
        fs::write(self.threads(), "0")
    }
}

/// Path of the folder of this process's own cgroup.
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

/// Ids of the threads in a cgroup; empty if they cannot be read. SIGKILL to the id of a thread kills its whole process.
pub(crate) fn members(path: &Path) -> Vec<u32> {
    let threads = fs::read_to_string(path.join("cgroup.threads")).unwrap_or_default();
    threads.lines().filter_map(|line| line.parse().ok()).collect()
}

/// Removes a cgroup. The kernel keeps an exited thread in its cgroup for a moment, so this retries.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    for _ in 0..ATTEMPTS {
        match fs::remove_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => sleep(PAUSE),
            result => return result,
        }
    }
    fs::remove_dir(path)
}
