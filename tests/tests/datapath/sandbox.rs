//! The namespaces, BPF file system and devices of a test, and queries of their state in the kernel.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use aya::programs::{SchedClassifier, TcAttachType};
use lb_common::LAYOUT_VERSION;
use lb_datapath::{AttachMode, Attacher, Capacities, Datapath, Device, DeviceKind, Layer, Options, Pinned};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};

/// How long to wait for the kernel and child processes; only a hang takes so long.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// A folder for pins, and a network and a mount namespace of this thread.
pub(crate) struct Sandbox {
    pub(crate) folder: PathBuf,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).expect("these tests need root");
        let none: Option<&str> = None;
        mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none).unwrap();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("lb-datapath-{}-{number}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        ip("link set lo up");
        Self { folder }
    }

    pub(crate) fn bpffs(&self) -> PathBuf {
        self.folder.join("bpffs")
    }

    /// Options with small maps, so that the tests need little memory.
    pub(crate) fn options(&self) -> Options {
        let capacities =
            Capacities { services: 1024, backends: 4096, tables: 4096, conntrack: 1024, affinity: 1024 };
        Options { capacities, ..Options::new(self.bpffs()) }
    }

    pub(crate) fn open(&self) -> Datapath {
        Datapath::open(&self.options()).unwrap()
    }

    pub(crate) fn pin(&self, path: &str) -> PathBuf {
        self.bpffs().join(layout_folder()).join(path)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        while umount2(&self.bpffs(), MntFlags::MNT_DETACH).is_ok() {}
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            eprintln!("cannot remove {}: {error}", self.folder.display());
        }
    }
}

/// A network namespace that a child process keeps open as long as this value exists.
pub(crate) struct OtherNamespace(Child);

impl OtherNamespace {
    pub(crate) fn new() -> Self {
        let child = Command::new("unshare").args(["--net", "sleep", "600"]).spawn().unwrap();
        let namespace = |pid: &str| fs::metadata(format!("/proc/{pid}/ns/net")).map(|file| file.ino()).ok();
        let (pid, own) = (child.id().to_string(), namespace("thread-self"));
        let start = Instant::now();
        while namespace(&pid).is_none() || namespace(&pid) == own {
            assert!(start.elapsed() < LIMIT, "unshare does not start");
            std::thread::sleep(Duration::from_millis(1));
        }
        Self(child)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for OtherNamespace {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait().map(drop)) {
            eprintln!("cannot end {}: {error}", self.0.id());
        }
    }
}

pub(crate) fn run(program: &str, arguments: &str) -> String {
    let output = Command::new(program).args(arguments.split(' ')).stderr(Stdio::piped()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn ip(arguments: &str) {
    run("ip", arguments);
}

pub(crate) fn tc(arguments: &str) -> String {
    run("tc", arguments)
}

/// A wire device: one end of a veth pair that has both ends in this namespace. (Not every kernel has dummy devices.)
pub(crate) fn wire(name: &str, index: u32) -> Device {
    ip(&format!("link add {name} index {index} type veth peer name {name}-far"));
    ip(&format!("link set {name} up"));
    ip(&format!("link set {name}-far up"));
    Device {
        index,
        name: name.to_owned(),
        kind: DeviceKind::Wire,
        layer: Layer::Ethernet,
        mtu: 1500,
        is_pair: true,
        peer_elsewhere: false,
        loses_xdp_tx: false,
        has_vlans: false,
        is_bond: false,
        mac: None,
        controller: None,
    }
}

/// Ids of the programs on a tcx hook, in the order in which they run.
pub(crate) fn tcx(device: &str, direction: TcAttachType) -> Vec<u32> {
    SchedClassifier::query_tcx(device, direction).unwrap().1.iter().map(|info| info.id()).collect()
}

/// Whether the kernel has tcx (Linux 6.6 and newer).
pub(crate) fn has_tcx() -> bool {
    AttachMode::probe().unwrap() == AttachMode::Tcx
}

/// Path of the folder `lb/vN` of the present layout.
pub(crate) fn layout_folder() -> String {
    format!("lb/v{LAYOUT_VERSION}")
}

/// Waits until `holds` is true: the kernel frees links and programs in the background.
pub(crate) fn eventually(mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LIMIT, "the condition never became true");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn program_id(datapath: &Pinned, name: &str) -> u32 {
    datapath.programs().unwrap().iter().find(|program| program.name == name).unwrap().id
}

/// Attaches programs to exactly these devices; returns how many were attached and detached.
pub(crate) fn sync(attacher: &mut Attacher, devices: &[Device]) -> (usize, usize) {
    let report = attacher.sync(devices).unwrap();
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    (report.attached.len(), report.detached.len())
}

/// Inode numbers of the pinned links, sorted by the links' names. A link that is replaced gets a new inode.
pub(crate) fn link_inodes(sandbox: &Sandbox) -> Vec<u64> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(sandbox.pin("links")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::symlink_metadata(path).unwrap().ino()).collect()
}
