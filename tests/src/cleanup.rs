//! Cleanup of namespaces, processes, control groups, and folders with the mounts in them. Each is registered before it
//! is created, except processes: [`Cleanup::spawn`] starts and registers a process under one lock.
//!
//! Guards remove their resource when they are dropped. SIGINT, SIGTERM and SIGHUP remove all registered resources
//! ([`on_interrupt`]); [`remove_stale`] finds the leftovers of killed processes by their names.

use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, exit},
    sync::{Mutex, MutexGuard, Once, PoisonError},
};

use anyhow::{Context as _, Result};
use nix::{
    mount::{MntFlags, umount2},
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::cgroup;

/// Folder in which `ip netns` stores names of namespaces.
pub(crate) const NETNS_FOLDER: &str = "/run/netns";

/// Folder of the agents' sockets and records.
const AGENT_FILES: &str = "/run/lb-agent";

/// A resource of this machine that can outlive the process that created it.
#[derive(Clone, Debug)]
pub enum Resource {
    /// A network namespace with a name below `/run/netns`.
    Netns(String),
    /// A process, by its id.
    Process(u32),
    /// A folder, with all mounts at or below it.
    Folder(PathBuf),
    /// A cgroup without child groups.
    Cgroup(PathBuf),
}

impl Resource {
    /// Removes the resource; a missing resource is no error.
    fn remove(&self) -> io::Result<()> {
        match self {
            Self::Netns(name) => remove_netns(name),
            Self::Process(pid) => absent_is_fine(kill_now(*pid)),
            Self::Folder(path) => remove_folder(path),
            Self::Cgroup(path) => absent_is_fine(cgroup::remove(path)),
        }
    }
}

/// Removes the name of a namespace. The kernel frees the namespace when no process, socket or open file refers to it
/// any more.
fn remove_netns(name: &str) -> io::Result<()> {
    let path = Path::new(NETNS_FOLDER).join(name);
    // EINVAL: no namespace is mounted on the name, which is then an ordinary file.
    match umount2(&path, MntFlags::MNT_DETACH) {
        Ok(()) | Err(nix::Error::EINVAL | nix::Error::ENOENT) => {}
        Err(error) => return Err(error.into()),
    }
    absent_is_fine(fs::remove_file(path))
}

/// Removes a folder, all mounts in it, and the files of the agents whose pins are in it.
fn remove_folder(path: &Path) -> io::Result<()> {
    for mount in mounts_below(path)?.iter().rev() {
        agent_files(mount).into_iter().try_for_each(|file| absent_is_fine(fs::remove_file(file)))?;
        umount2(mount, MntFlags::MNT_DETACH)?;
    }
    absent_is_fine(fs::remove_dir_all(path))
}

/// The start of the names of the files that the agent with this BPF file system keeps in `/run/lb-agent`: device and
/// inode of the directory of pins. `None` without that directory.
fn agent_identity(bpffs: &Path) -> Option<String> {
    let pins = fs::metadata(bpffs.join("lb")).ok()?;
    Some(format!("{:x}-{:x}", pins.dev(), pins.ino()))
}

/// The file in `/run/lb-agent` of the agent with this BPF file system whose name has this ending, such as `.sock`.
/// Panics if there is no directory of pins.
pub fn agent_file(bpffs: &Path, ending: &str) -> PathBuf {
    let identity = agent_identity(bpffs).expect("the directory of pins");
    Path::new(AGENT_FILES).join(identity + ending)
}

/// All files in `/run/lb-agent` of the agent with this BPF file system; none without a directory of pins.
pub fn agent_files(bpffs: &Path) -> Vec<PathBuf> {
    let Some(identity) = agent_identity(bpffs) else { return Vec::new() };
    let is_own = |name: &str| name.strip_prefix(&identity).is_some_and(|rest| rest.starts_with(['.', '-']));
    let entries = fs::read_dir(AGENT_FILES).into_iter().flatten().filter_map(Result::ok);
    let own = entries.filter(|entry| entry.file_name().to_str().is_some_and(is_own));
    own.map(|entry| entry.path()).collect()
}

/// Mount points at or below `path`, in the order in which they were mounted.
pub fn mounts_below(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(1)).map(PathBuf::from);
    Ok(points.filter(|point| point.starts_with(path)).collect())
}

fn kill_now(pid: u32) -> io::Result<()> {
    let pid = i32::try_from(pid).map_err(io::Error::other)?;
    match kill(Pid::from_raw(pid), Signal::SIGKILL) {
        Ok(()) | Err(nix::Error::ESRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Resources that are registered, in the order of registration.
struct Live {
    next: u64,
    resources: BTreeMap<u64, Resource>,
}

static LIVE: Mutex<Live> = Mutex::new(Live { next: 0, resources: BTreeMap::new() });

fn live() -> MutexGuard<'static, Live> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Live {
    fn add(&mut self, resource: Resource) -> Cleanup {
        self.next += 1;
        self.resources.insert(self.next, resource);
        Cleanup { id: self.next }
    }
}

/// A guard that removes a resource when it is dropped.
#[derive(Debug)]
pub struct Cleanup {
    id: u64,
}

impl Cleanup {
    /// Registers a resource that the caller is about to create.
    pub fn of(resource: Resource) -> Self {
        live().add(resource)
    }

    /// Starts a process and registers it, under one lock, so that the handler of [`on_interrupt`] cannot miss the
    /// process.
    pub fn spawn(command: &mut Command) -> io::Result<(Child, Self)> {
        let mut live = live();
        let child = command.spawn()?;
        let cleanup = live.add(Resource::Process(child.id()));
        Ok((child, cleanup))
    }

    /// Unregisters the resource without removing it: the caller has removed it or wants to keep it.
    pub fn disarm(self) {
        live().resources.remove(&self.id);
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        let resource = live().resources.remove(&self.id);
        if let Some(resource) = resource {
            remove_or_say(&resource);
        }
    }
}

fn remove_or_say(resource: &Resource) {
    if let Err(error) = resource.remove() {
        eprintln!("could not remove {resource:?}: {error}");
    }
}

/// Installs a handler of SIGINT, SIGTERM and SIGHUP that removes all registered resources and exits with code 130.
pub fn on_interrupt() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let handler = || {
            eprintln!("interrupted: cleaning up");
            // Holds the lock until the exit, so that no thread registers another resource.
            let live = live();
            live.resources.values().rev().for_each(remove_or_say);
            exit(130);
        };
        if let Err(error) = ctrlc::set_handler(handler) {
            eprintln!("Ctrl-C will not clean up: {error}");
        }
    });
}

/// Unregisters all resources, so that they outlive the process.
pub fn keep_everything() {
    live().resources.clear();
}

/// Removes the leftovers of test processes that no longer exist: namespaces with their processes, folders, cgroups.
pub fn remove_stale() -> Result<()> {
    for name in names_in(Path::new(NETNS_FOLDER)).filter(|name| is_stale(name)) {
        remove_namespace_and_processes(&name)?;
    }
    let temporary = std::env::temp_dir();
    for name in names_in(&temporary).filter(|name| is_stale(name)) {
        remove_folder_and_mounts(&temporary.join(name))?;
    }
    // Without cgroup2 there are no cgroups to remove.
    let Ok(groups) = cgroup::own_group() else { return Ok(()) };
    for name in names_in(&groups).filter(|name| is_stale(name)) {
        let path = groups.join(name);
        // Kills the processes that are left in the cgroup: the loop over namespaces above has missed processes whose
        // namespace has lost its name.
        for pid in cgroup::members(&path) {
            kill_now(pid).with_context(|| format!("ending process {pid} in {}", path.display()))?;
        }
        cgroup::remove(&path).with_context(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}

fn names_in(folder: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned())
}

/// Whether the name begins with a prefix of [`crate::netns::unique_prefix`] for a process that no longer exists.
fn is_stale(name: &str) -> bool {
    let mut parts = name.split('-');
    let (Some("lb"), Some(pid), Some(number)) = (parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    let numbers = pid.parse::<u32>().is_ok() && number.parse::<u32>().is_ok();
    numbers && !Path::new("/proc").join(pid).exists()
}

/// Kills the processes of a namespace and removes its name.
pub fn remove_namespace_and_processes(name: &str) -> Result<()> {
    let output =
        Command::new("ip").args(["netns", "pids", name]).output().context("running `ip netns pids`")?;
    for pid in String::from_utf8_lossy(&output.stdout).split_whitespace() {
        let pid = pid.parse().with_context(|| format!("`ip netns pids {name}` printed {pid:?}"))?;
        kill_now(pid).with_context(|| format!("ending process {pid} in namespace {name}"))?;
    }
    remove_netns(name).with_context(|| format!("removing namespace {name}"))
}

/// Removes a folder and all mounts in it.
pub fn remove_folder_and_mounts(path: &Path) -> Result<()> {
    remove_folder(path).with_context(|| format!("removing {}", path.display()))
}
