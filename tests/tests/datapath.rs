//! The agent's side of the kernel: pins, maps, attachment, devices, conntrack. Needs root.
//!
//! Each test runs in network and mount namespaces of its own, so nothing it makes outlives it.
#![expect(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    net::IpAddr,
    os::{fd::FromRawFd as _, unix::fs::MetadataExt as _},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use aya::{
    maps::MapInfo,
    programs::{SchedClassifier, TcAttachType},
};
use bytemuck::Zeroable as _;
use lb_common::{
    Address, Backend, LAYOUT_VERSION, Outcome, Service, ServiceKey,
    conntrack::{Flow, Phase, Segment, Tick, Tuple, flow_flags, seen, tcp_flags},
    protocol, service_flags,
};
use lb_core::{
    model::{ObjectName, Protocol, ServicePortName},
    plan::{Contents, EndpointLabels, ServiceLabels, Step},
    tables::Digest,
};
use lb_datapath::{
    AttachMode, Attacher, Capacities, Conntrack, Datapath, DatapathError, Device, DeviceKind, DevicePatterns,
    DeviceWatcher, Direction, Layer, Options, Pinned, ProbeResult, Recount, XdpMode, XdpOption, check,
    cleanup, detect_devices, grace,
};
use lb_tests::skip;
use nix::{
    libc,
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};

// ---- the stage

/// A folder for pins, in namespaces of this thread alone.
struct Sandbox {
    folder: PathBuf,
}

impl Sandbox {
    fn new() -> Self {
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

    fn bpffs(&self) -> PathBuf {
        self.folder.join("bpffs")
    }

    /// Small maps, so that the tests need little memory.
    fn options(&self) -> Options {
        let capacities =
            Capacities { services: 1024, backends: 4096, tables: 4096, conntrack: 1024, affinity: 1024 };
        Options { capacities, ..Options::new(self.bpffs()) }
    }

    fn open(&self) -> Datapath {
        Datapath::open(&self.options()).unwrap()
    }

    fn pin(&self, path: &str) -> PathBuf {
        self.bpffs().join(current()).join(path)
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

/// A network namespace that lives as long as this value.
struct OtherNamespace(Child);

impl OtherNamespace {
    fn new() -> Self {
        let child = Command::new("unshare").args(["--net", "sleep", "600"]).spawn().unwrap();
        let namespace = |pid: &str| fs::metadata(format!("/proc/{pid}/ns/net")).map(|file| file.ino()).ok();
        let (pid, own) = (child.id().to_string(), namespace("thread-self"));
        let start = Instant::now();
        while namespace(&pid).is_none() || namespace(&pid) == own {
            assert!(start.elapsed() < Duration::from_secs(10), "unshare does not start");
            std::thread::sleep(Duration::from_millis(1));
        }
        Self(child)
    }

    fn pid(&self) -> u32 {
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

fn run(program: &str, arguments: &str) -> String {
    let output = Command::new(program).args(arguments.split(' ')).stderr(Stdio::piped()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn ip(arguments: &str) {
    run("ip", arguments);
}

fn tc(arguments: &str) -> String {
    run("tc", arguments)
}

/// One end of a pair of devices that both stay here. (Not every kernel has dummy devices.)
fn wire(name: &str, index: u32) -> Device {
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
    }
}

/// The programs on a tcx hook by id, in the order they run.
fn tcx(device: &str, direction: TcAttachType) -> Vec<u32> {
    SchedClassifier::query_tcx(device, direction).unwrap().1.iter().map(|info| info.id()).collect()
}

/// Linux before 6.6 has none and does not know the question.
fn has_tcx() -> bool {
    AttachMode::probe().unwrap() == AttachMode::Tcx
}

/// The folder of the data plane of this version, on its BPF file system.
fn current() -> String {
    format!("lb/v{LAYOUT_VERSION}")
}

/// Waits for the kernel, which frees links and programs in the background.
fn eventually(mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(5), "this never became true");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn program_id(datapath: &Pinned, name: &str) -> u32 {
    datapath.programs().unwrap().iter().find(|program| program.name == name).unwrap().id
}

fn sync(attacher: &mut Attacher, devices: &[Device]) -> (usize, usize) {
    let report = attacher.sync(devices).unwrap();
    assert!(report.failed.is_empty(), "{:?}", report.failed);
    (report.attached.len(), report.detached.len())
}

// ---- maps

fn key(number: u32) -> ServiceKey {
    ServiceKey::new(Address::from(IpAddr::from((0x0a60_0000 + number).to_be_bytes())), 80, protocol::TCP)
}

fn backend(number: u32) -> Backend {
    let address = Address::from(IpAddr::from((0x0af4_0000 + number).to_be_bytes()));
    Backend { address, port: 8080, flags: 0, weight: 1, active_flows_slot: 0 }
}

fn endpoint(number: u32) -> IpAddr {
    backend(number).address.into()
}

fn service(id: u32, base: u32, count: u32) -> Service {
    Service { id, backends_base: base, backends_count: count, ..Service::zeroed() }.sealed(&key(id))
}

fn service_labels(id: u32) -> ServiceLabels {
    ServiceLabels {
        name: ServicePortName {
            service: ObjectName::new("default", &format!("service-{id}")),
            port: "http".into(),
            protocol: Protocol::Tcp,
        },
        node_port: id.is_multiple_of(2).then_some(30_000),
    }
}

fn endpoint_labels(number: u32) -> EndpointLabels {
    EndpointLabels { node: Some("a".into()), zone: None, pod: Some(format!("pod-{number}").into()) }
}

/// The steps that make `services` services with `size` endpoints each, and what the kernel holds after them.
fn steps(services: u32, size: u32) -> (Vec<Step>, Contents) {
    let (mut steps, mut contents) = (Vec::new(), Contents::default());
    let ids = 1..=services;
    let slice =
        |id: u32| ((id - 1) * (size + 3), (id * size..(id + 1) * size).map(backend).collect::<Vec<_>>());
    for id in ids.clone() {
        let (base, backends) = slice(id);
        contents.backends.extend((base..).zip(backends.iter().copied()));
        steps.push(Step::WriteBackends { base, backends });
    }
    for id in ids.clone() {
        contents.service_labels.insert(id, service_labels(id));
        steps.push(Step::PutServiceLabels(id, service_labels(id)));
    }
    for number in size..(services + 1) * size {
        contents.endpoint_labels.insert(endpoint(number), endpoint_labels(number));
        steps.push(Step::PutEndpointLabels(endpoint(number), endpoint_labels(number)));
    }
    for id in ids {
        let record = service(id, slice(id).0, size);
        contents.frontends.insert(key(id), record);
        steps.push(Step::PutFrontend(key(id), record));
    }
    (steps, contents)
}

#[test]
fn what_is_applied_is_read_back() {
    for batches in [true, false] {
        let sandbox = Sandbox::new();
        let datapath = sandbox.open();
        datapath.maps().use_batches(batches);
        let (steps, mut contents) = steps(50, 3);
        datapath.maps().apply(&steps).unwrap();
        assert_eq!(datapath.maps().contents().unwrap(), contents, "batches: {batches}");

        contents.frontends.remove(&key(7));
        contents.service_labels.remove(&7);
        contents.endpoint_labels.remove(&endpoint(21));
        let base = contents.frontends[&key(8)].backends_base;
        contents.backends.retain(|slot, _| !(base - 6..base).contains(slot));
        let deletions = [
            Step::DeleteFrontend(key(7)),
            Step::DeleteFrontend(key(600)),
            Step::DeleteFrontend(key(601)),
            Step::ReleaseBackends { base: base - 6, count: 3 },
            Step::DeleteServiceLabels(7),
            Step::DeleteEndpointLabels(endpoint(21)),
        ];
        datapath.maps().apply(&deletions).unwrap();
        assert_eq!(datapath.maps().contents().unwrap(), contents, "batches: {batches}");
        datapath.maps().apply(&deletions).unwrap();
        assert_eq!(datapath.maps().contents().unwrap(), contents, "what is gone may be deleted again");
    }
}

#[test]
fn tables_are_read_back() {
    for batches in [true, false] {
        let sandbox = Sandbox::new();
        let datapath = sandbox.open();
        datapath.maps().use_batches(batches);
        let tables: [Vec<u32>; 2] = [(0..251).collect(), vec![7, u32::MAX]];
        let record = Service { id: 1, table_base: 10, table_count: 251, ..Service::zeroed() };
        let inside = Service { internal_table_base: 500, internal_table_count: 2, ..record };
        let inside = Service { flags: service_flags::SHORT_CIRCUIT, ..inside };
        let steps = [
            Step::WriteTable { base: 10, entries: tables[0].clone() },
            Step::WriteTable { base: 500, entries: tables[1].clone() },
            Step::PutFrontend(key(1), record.sealed(&key(1))),
            Step::PutFrontend(key(2), inside.sealed(&key(2))),
            Step::ReleaseTable { base: 900, count: 9 },
        ];
        datapath.maps().apply(&steps).unwrap();
        let wanted = [(10, Digest::of(&tables[0])), (500, Digest::of(&tables[1]))];
        assert_eq!(datapath.maps().contents().unwrap().tables, wanted.into(), "batches: {batches}");
        let beyond = Step::WriteTable { base: 4095, entries: vec![1, 2] };
        let error = datapath.maps().apply(&[beyond]).unwrap_err();
        assert!(error.to_string().contains("a table of 2 entries at slot 4095"), "{error}");
    }
}

#[test]
fn a_failure_tells_which_steps_are_in_the_kernel() {
    for batches in [true, false] {
        let sandbox = Sandbox::new();
        let datapath = sandbox.open();
        datapath.maps().use_batches(batches);
        let slots = datapath.maps().room().backends;
        let steps = [
            Step::PutServiceLabels(1, service_labels(1)),
            Step::WriteBackends { base: 0, backends: vec![backend(1)] },
            Step::WriteBackends { base: slots - 1, backends: vec![backend(2), backend(3)] },
            Step::PutFrontend(key(1), service(1, 0, 1)),
        ];
        let error = datapath.maps().apply(&steps).unwrap_err();
        assert_eq!(error.applied, 2, "batches: {batches}");
        assert!(error.to_string().contains("2 backends at slot"), "{error}");
        let contents = datapath.maps().contents().unwrap();
        assert!(contents.frontends.is_empty(), "no step after the one that failed");

        let many: Vec<Step> = (1..=2000).map(|id| Step::PutFrontend(key(id), service(id, 0, 1))).collect();
        let error = datapath.maps().apply(&many).unwrap_err();
        assert_eq!(datapath.maps().contents().unwrap().frontends.len(), error.applied, "batches: {batches}");
        assert!(error.to_string().contains("the map is full"), "{error}");
    }
}

#[test]
fn ten_thousand_services_are_programmed_quickly() {
    let sandbox = Sandbox::new();
    let datapath = Datapath::open(&Options::new(sandbox.bpffs())).unwrap();
    let (steps, contents) = steps(10_000, 5);
    let start = Instant::now();
    datapath.maps().apply(&steps).unwrap();
    let applied = start.elapsed();
    let start = Instant::now();
    assert!(datapath.maps().contents().unwrap() == contents);
    println!("{} steps in {applied:?}, read back in {:?}", steps.len(), start.elapsed());
    // An unoptimised build on a busy machine needs half a second, an optimised one a tenth.
    assert!(applied < Duration::from_secs(3), "{applied:?}");
}

#[test]
fn a_grace_period_ends() {
    let _sandbox = Sandbox::new();
    let start = Instant::now();
    grace::wait().unwrap();
    println!("grace period: {:?}", start.elapsed());
}

// ---- pins

/// Makes an LRU map and pins it. (aya makes none.)
fn pin_lru_map(path: &std::path::Path, key_size: u32, value_size: u32, entries: u32) {
    const MAP_CREATE: libc::c_int = 0;
    const OBJ_PIN: libc::c_int = 6;
    const LRU_HASH: u32 = 9;
    let create = [LRU_HASH, key_size, value_size, entries, 0];
    // SAFETY: the kernel reads as much of the attributes as there is.
    let map = unsafe { libc::syscall(libc::SYS_bpf, MAP_CREATE, create.as_ptr(), size_of_val(&create)) };
    assert!(map >= 0, "{}", std::io::Error::last_os_error());
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    let pin = [path.as_ptr() as u64, u64::try_from(map).unwrap()];
    // SAFETY: as above; the path outlives the call.
    let pinned = unsafe { libc::syscall(libc::SYS_bpf, OBJ_PIN, pin.as_ptr(), size_of_val(&pin)) };
    assert_eq!(pinned, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: nobody else has the descriptor.
    drop(unsafe { std::os::fd::OwnedFd::from_raw_fd(libc::c_int::try_from(map).unwrap()) });
}

/// An agent of before had fewer entries; nobody would miss those that are lost.
#[test]
fn a_map_of_fragments_grows_with_an_upgrade() {
    let sandbox = Sandbox::new();
    drop(sandbox.open());
    let path = sandbox.pin("FRAGMENTS");
    let wanted = MapInfo::from_pin(&path).unwrap();
    fs::remove_file(&path).unwrap();
    pin_lru_map(&path, wanted.key_size(), wanted.value_size(), 8_192);
    drop(sandbox.open());
    assert_eq!(MapInfo::from_pin(&path).unwrap().max_entries(), wanted.max_entries());
    assert!(wanted.max_entries() > 8_192);
}

#[test]
fn a_map_of_another_shape_is_refused() {
    let sandbox = Sandbox::new();
    drop(sandbox.open());
    let path = sandbox.pin("SERVICES");
    fs::remove_file(&path).unwrap();
    let map = aya::maps::HashMap::<_, [u8; 20], [u8; 16]>::create(8, 0).unwrap();
    map.pin(&path).unwrap();
    let datapath = Datapath::open(&sandbox.options()).unwrap_err();
    let pinned = Pinned::open(&sandbox.bpffs()).unwrap_err();
    for error in [datapath, pinned] {
        assert!(matches!(error, DatapathError::Layout { .. }), "{error}");
        for part in ["SERVICES", "16-byte values", "48-byte values", "lb-agent cleanup"] {
            assert!(error.to_string().contains(part), "{part} is missing in: {error}");
        }
    }
    assert!(cleanup(&sandbox.bpffs()).unwrap().maps > 0, "cleanup needs no fitting maps");
}

#[test]
fn a_second_agent_is_told_who_is_there() {
    let sandbox = Sandbox::new();
    let first = sandbox.open();
    let error = Datapath::open(&sandbox.options()).unwrap_err().to_string();
    assert!(error.contains(&format!("pid {} ", std::process::id())), "{error}");
    let error = cleanup(&sandbox.bpffs()).unwrap_err().to_string();
    assert!(error.contains("another lb-agent"), "{error}");
    assert!(Pinned::open(&sandbox.bpffs()).unwrap().agent().is_some());
    drop(first);
    assert_eq!(Pinned::open(&sandbox.bpffs()).unwrap().agent(), None);
    drop(sandbox.open());
}

#[test]
fn a_command_without_a_data_plane_says_so() {
    let sandbox = Sandbox::new();
    let error = Pinned::open(&sandbox.bpffs()).unwrap_err().to_string();
    assert!(error.contains("lb-agent run"), "{error}");
    assert!(!sandbox.bpffs().exists(), "looking makes nothing");
}

#[test]
fn a_restart_keeps_maps_and_replaces_programs() {
    let sandbox = Sandbox::new();
    let devices = [wire("wire0", 50), Device { layer: Layer::Ip, ..wire("tun0", 51) }];
    let (steps, contents) = steps(10, 2);
    let datapath = sandbox.open();
    datapath.maps().apply(&steps).unwrap();
    assert_eq!(sync(&mut datapath.attacher().unwrap(), &devices), (4, 0));
    drop(datapath);
    let before = Pinned::open(&sandbox.bpffs()).unwrap().attachments().unwrap();
    let names: Vec<&str> = before.iter().map(|attachment| attachment.program.name.as_str()).collect();
    assert_eq!(names, ["tc_ingress", "tc_egress", "tc_ingress_l3", "tc_egress_l3"]);
    assert!(before.iter().all(|attachment| attachment.mode == AttachMode::Tcx));
    let links = link_inodes(&sandbox);

    let options = Options { capacities: Capacities::default(), ..sandbox.options() };
    let datapath = Datapath::open(&options).unwrap();
    assert_eq!(datapath.maps().room().backends, 4096, "a pinned map keeps its size");
    assert_eq!(datapath.maps().contents().unwrap(), contents);
    let mut attacher = datapath.attacher().unwrap();
    assert_eq!(sync(&mut attacher, &devices), (4, 0));
    assert_eq!(sync(&mut attacher, &devices), (0, 0), "nothing is left to do");
    assert_eq!(link_inodes(&sandbox), links, "the links stay, so no packet passed without a program");
    let after = Pinned::open(&sandbox.bpffs()).unwrap().attachments().unwrap();
    for (before, after) in before.iter().zip(&after) {
        assert_ne!(before.program.id, after.program.id);
        assert_eq!(before.program.tag, after.program.tag);
    }
}

/// The pins of links; a new link would be a new file.
fn link_inodes(sandbox: &Sandbox) -> Vec<u64> {
    let mut paths: Vec<PathBuf> =
        fs::read_dir(sandbox.pin("links")).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::symlink_metadata(path).unwrap().ino()).collect()
}

#[test]
fn cleanup_leaves_nothing() {
    let sandbox = Sandbox::new();
    let wire = wire("wire0", 50);
    let datapath = sandbox.open();
    sync(&mut datapath.attacher().unwrap(), std::slice::from_ref(&wire));
    drop(datapath);
    fs::create_dir_all(sandbox.bpffs().join("lb/v9/links")).unwrap();
    fs::rename(sandbox.pin("links/50-egress"), sandbox.bpffs().join("lb/v9/links/50-egress")).unwrap();
    let removed = cleanup(&sandbox.bpffs()).unwrap();
    assert_eq!((removed.attachments, removed.programs, removed.maps, removed.unmounted), (2, 4, 24, true));
    eventually(|| tcx("wire0", TcAttachType::Ingress).is_empty());
    eventually(|| tcx("wire0", TcAttachType::Egress).is_empty());
    assert_eq!(fs::read_dir(sandbox.bpffs()).unwrap().count(), 0);
    assert_eq!(cleanup(&sandbox.bpffs()).unwrap().attachments, 0, "cleaning up twice is no error");
}

#[test]
fn a_folder_within_a_bpffs_is_used_and_the_mount_stays() {
    let sandbox = Sandbox::new();
    let outer = sandbox.bpffs();
    fs::create_dir(&outer).unwrap();
    let none: Option<&str> = None;
    mount(Some("bpf"), &outer, Some("bpf"), MsFlags::empty(), none).unwrap();
    let inner = outer.join("nodes/a");
    drop(Datapath::open(&Options { bpffs: inner.clone(), ..sandbox.options() }).unwrap());
    assert!(outer.join("nodes/a").join(current()).join("SERVICES").exists());
    assert!(!cleanup(&inner).unwrap().unmounted);
    drop(sandbox.open());
    assert!(!cleanup(&outer).unwrap().unmounted, "an administrator's mount stays");
}

#[test]
fn another_version_is_retired() {
    let sandbox = Sandbox::new();
    let wire = wire("wire0", 50);
    let old = sandbox.open();
    sync(&mut old.attacher().unwrap(), std::slice::from_ref(&wire));
    drop(old);
    fs::rename(sandbox.pin(""), sandbox.bpffs().join("lb/v0")).unwrap();
    // As before version 5: then it cannot be taken over.
    fs::remove_file(sandbox.bpffs().join("lb/v0/LAYOUT")).unwrap();

    let datapath = sandbox.open();
    sync(&mut datapath.attacher().unwrap(), std::slice::from_ref(&wire));
    assert_eq!(tcx("wire0", TcAttachType::Ingress).len(), 2);
    datapath.retire_other_versions().unwrap();
    let pinned = Pinned::open(&sandbox.bpffs()).unwrap();
    eventually(|| tcx("wire0", TcAttachType::Ingress) == [program_id(&pinned, "tc_ingress")]);
    assert!(!sandbox.bpffs().join("lb/v0").exists());
}

#[test]
fn another_layout_that_describes_itself_is_taken_over() {
    let sandbox = Sandbox::new();
    let wire = [wire("wire0", 50)];
    let old = sandbox.open();
    sync(&mut old.attacher().unwrap(), &wire);
    let (client, vip) = (Address::from_v4([192, 0, 2, 1]), Address::from_v4([10, 96, 0, 1]));
    let key = Tuple::new(client, vip, 40_000, 80, protocol::TCP);
    let flow = Flow::new(&key, &key, 7, 0, Tick(1));
    assert!(old.conntrack().table().insert_new(&key, &flow).unwrap());
    let theirs = [TcAttachType::Ingress, TcAttachType::Egress].map(|hook| tcx("wire0", hook)[0]);
    drop(old);
    let earlier = sandbox.bpffs().join("lb/v0");
    fs::rename(sandbox.pin(""), &earlier).unwrap();
    // Whoever is killed before it has taken over leaves both behind, and the next one begins anew.
    let mut datapath = sandbox.open();
    for _ in 0..2 {
        sync(&mut datapath.attacher().unwrap(), &wire);
        let pinned = Pinned::open(&sandbox.bpffs()).unwrap();
        let ours = ["tc_ingress", "tc_egress"].map(|name| program_id(&pinned, name));
        eventually(|| tcx("wire0", TcAttachType::Ingress) == [ours[0], theirs[0]]);
        eventually(|| tcx("wire0", TcAttachType::Egress) == [ours[1], theirs[1]]);
        drop(datapath);
        datapath = sandbox.open();
    }
    let mut attacher = datapath.attacher().unwrap();
    sync(&mut attacher, &wire);
    datapath.finish_handover().unwrap();
    eventually(|| tcx("wire0", TcAttachType::Egress).len() == 1);
    assert!(!earlier.exists());
    assert_eq!(datapath.conntrack().table().get(&key).unwrap(), Some(flow));
    // And one that was killed when flows had begun in its maps goes on from there.
    drop((attacher, datapath));
    fs::create_dir(&earlier).unwrap();
    for pin in fs::read_dir(sandbox.pin("")).unwrap().map(|entry| entry.unwrap()) {
        if pin.file_type().unwrap().is_file() {
            fs::hard_link(pin.path(), earlier.join(pin.file_name())).unwrap();
        }
    }
    let mut datapath = sandbox.open();
    datapath.finish_handover().unwrap();
    assert!(!earlier.exists());
    assert_eq!(datapath.conntrack().table().get(&key).unwrap(), Some(flow));
    assert_eq!(tcx("wire0", TcAttachType::Egress).len(), 1);
}

// ---- attachment

#[test]
fn we_come_first_at_ingress_and_last_at_egress() {
    let sandbox = Sandbox::new();
    let wire = [wire("wire0", 50)];
    if !has_tcx() {
        return skip::whole("the kernel has no tcx");
    }
    // Another program: that of a data plane with other pins.
    let other = sandbox.folder.join("other");
    let options = Options { bpffs: other.clone(), ..sandbox.options() };
    sync(&mut Datapath::open(&options).unwrap().attacher().unwrap(), &wire);
    sync(&mut sandbox.open().attacher().unwrap(), &wire);

    let (ours, theirs) = (Pinned::open(&sandbox.bpffs()).unwrap(), Pinned::open(&other).unwrap());
    let ids = |name| [program_id(&ours, name), program_id(&theirs, name)];
    assert_eq!(tcx("wire0", TcAttachType::Ingress), ids("tc_ingress"));
    let [our_egress, their_egress] = ids("tc_egress");
    assert_eq!(tcx("wire0", TcAttachType::Egress), [their_egress, our_egress]);

    let [_, their_ingress] = ids("tc_ingress");
    cleanup(&sandbox.bpffs()).unwrap();
    eventually(|| tcx("wire0", TcAttachType::Ingress) == [their_ingress]);
    while umount2(&other, MntFlags::MNT_DETACH).is_ok() {}
}

#[test]
fn without_tcx_filters_are_used_beside_those_of_others() {
    let sandbox = Sandbox::new();
    let wire = [wire("wire0", 50)];
    let options = Options { attach: Some(AttachMode::Clsact), ..sandbox.options() };
    tc("qdisc add dev wire0 clsact");
    tc("filter add dev wire0 ingress prio 1 protocol ip u32 match u32 0 0 flowid 1:1");
    let mut ids = Vec::new();
    for _ in 0..2 {
        let datapath = Datapath::open(&options).unwrap();
        let mut attacher = datapath.attacher().unwrap();
        assert_eq!(sync(&mut attacher, &wire), (2, 0));
        assert_eq!(sync(&mut attacher, &wire), (0, 0));
        let pinned = Pinned::open(&sandbox.bpffs()).unwrap();
        let attachments = pinned.attachments().unwrap();
        assert_eq!(attachments.len(), 2);
        assert!(attachments.iter().all(|attachment| attachment.mode == AttachMode::Clsact));
        ids.push(attachments[0].program.id);
        for direction in ["ingress", "egress"] {
            let filters = tc(&format!("filter show dev wire0 {direction}"));
            assert_eq!(filters.matches("lb:tc_").count(), 1, "{filters}");
            assert!(filters.contains("direct-action"), "{filters}");
        }
        assert!(!has_tcx() || tcx("wire0", TcAttachType::Ingress).is_empty());
    }
    assert_ne!(ids[0], ids[1], "a new agent puts its own programs in");

    let removed = cleanup(&sandbox.bpffs()).unwrap();
    assert_eq!(removed.attachments, 2);
    let filters = tc("filter show dev wire0 ingress");
    assert!(filters.contains("u32") && !filters.contains("lb:"), "{filters}");
    assert!(tc("qdisc show dev wire0").contains("clsact"), "a qdisc of others stays");
}

#[test]
fn our_own_qdisc_goes_with_us() {
    let sandbox = Sandbox::new();
    let wire = [wire("wire0", 50), wire("wire1", 51)];
    let options = Options { attach: Some(AttachMode::Clsact), ..sandbox.options() };
    let datapath = Datapath::open(&options).unwrap();
    let mut attacher = datapath.attacher().unwrap();
    sync(&mut attacher, &wire);
    assert_eq!(sync(&mut attacher, &wire[..1]), (0, 2));
    assert!(!tc("qdisc show dev wire1").contains("clsact"));
    tc("filter add dev wire0 egress prio 9 protocol ip u32 match u32 0 0 flowid 1:1");
    drop((attacher, datapath));
    cleanup(&sandbox.bpffs()).unwrap();
    assert!(tc("qdisc show dev wire0").contains("clsact"), "somebody else uses it now");
}

#[test]
fn a_change_of_mode_leaves_one_program_on_a_device() {
    let sandbox = Sandbox::new();
    let wire = [wire("wire0", 50)];
    for mode in [AttachMode::Tcx, AttachMode::Clsact, AttachMode::Tcx] {
        let datapath = Datapath::open(&Options { attach: Some(mode), ..sandbox.options() }).unwrap();
        sync(&mut datapath.attacher().unwrap(), &wire);
        let filters = tc("filter show dev wire0 egress").matches("lb:tc_egress").count();
        let (links, expected) = if mode == AttachMode::Tcx { (1, 0) } else { (0, 1) };
        assert_eq!(filters, expected);
        eventually(|| tcx("wire0", TcAttachType::Egress).len() == links);
    }
}

#[test]
fn an_index_that_another_device_got_is_noticed() {
    let sandbox = Sandbox::new();
    let first = [wire("wire0", 50)];
    let datapath = sandbox.open();
    let mut attacher = datapath.attacher().unwrap();
    sync(&mut attacher, &first);
    ip("link del wire0");
    let second = [wire("wire1", 50)];
    assert_eq!(sync(&mut attacher, &second), (2, 0));
    assert_eq!(tcx("wire1", TcAttachType::Ingress).len(), 1);
    ip("link del wire1");
    assert_eq!(sync(&mut attacher, &[]), (0, 2));
    assert!(link_inodes(&sandbox).is_empty());
}

#[test]
fn a_link_into_another_network_namespace_is_not_taken_over() {
    let sandbox = Sandbox::new();
    sync(&mut sandbox.open().attacher().unwrap(), &[wire("wire0", 50)]);
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    let here = [wire("wire0", 50)];
    assert_eq!(sync(&mut sandbox.open().attacher().unwrap(), &here), (2, 0));
    assert_eq!(tcx("wire0", TcAttachType::Ingress).len(), 1);
}

#[test]
fn what_others_detach_is_attached_again() {
    let sandbox = Sandbox::new();
    let wire = [wire("wire0", 50)];
    let datapath = sandbox.open();
    let mut attacher = datapath.attacher().unwrap();
    sync(&mut attacher, &wire);
    fs::remove_file(sandbox.pin("links/50-ingress")).unwrap();
    eventually(|| tcx("wire0", TcAttachType::Ingress).is_empty());
    assert_eq!(sync(&mut attacher, &wire), (1, 0));
    assert_eq!(tcx("wire0", TcAttachType::Ingress).len(), 1);
}

// ---- devices

fn found(devices: &[Device]) -> Vec<(&str, DeviceKind, Layer)> {
    devices.iter().map(|device| (device.name.as_str(), device.kind, device.layer)).collect()
}

#[test]
fn devices_are_detected_from_the_kernel() {
    let _sandbox = Sandbox::new();
    let pod = OtherNamespace::new();
    wire("wire0", 50);
    ip("addr add 192.0.2.1/24 dev wire0");
    wire("idle0", 51);
    wire("up0", 52);
    ip("route add default dev up0");
    ip(&format!("link add pod0 index 53 type veth peer name eth0 netns {}", pod.pid()));
    ip("link add here0 index 54 type veth peer name here1");
    ip(&format!("link add node0 index 56 type veth peer name uplink netns {}", pod.pid()));
    ip("addr add 2001:db8::1/64 dev node0 nodad");
    ip("tuntap add tun0 mode tun");
    ip("addr add 192.0.2.9/32 dev tun0");

    use DeviceKind::{Wire, Workload};
    let devices = detect_devices(&DevicePatterns::default()).unwrap();
    let mut devices = found(&devices);
    devices.sort_unstable();
    let expected = [
        ("node0", Wire, Layer::Ethernet),
        ("pod0", Workload, Layer::Ethernet),
        ("tun0", Wire, Layer::Ip),
        ("up0", Wire, Layer::Ethernet),
        ("wire0", Wire, Layer::Ethernet),
    ];
    assert_eq!(devices, expected);
}

#[test]
fn a_late_device_gets_its_programs_at_once() {
    let sandbox = Sandbox::new();
    let pod = OtherNamespace::new();
    let datapath = sandbox.open();
    let mut attacher = datapath.attacher().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut watcher = DeviceWatcher::open(DevicePatterns::default()).unwrap();
        assert_eq!(sync(&mut attacher, &watcher.devices().unwrap()), (0, 0));
        let start = Instant::now();
        let mut create = Command::new("ip")
            .args(format!("link add pod0 index 53 type veth peer name eth0 netns {}", pod.pid()).split(' '))
            .spawn()
            .unwrap();
        let limit = Duration::from_secs(1);
        while sync(&mut attacher, &watcher.devices().unwrap()) != (2, 0) {
            tokio::time::timeout(limit, watcher.changed()).await.expect("an event").unwrap();
        }
        println!("programs {:?} after `ip link add` was started", start.elapsed());
        assert!(create.wait().unwrap().success());
        assert_eq!(tcx("pod0", TcAttachType::Ingress).len(), 1);
        assert!(start.elapsed() < limit);

        ip("link set pod0 name renamed0");
        ip("addr add 192.0.2.1/24 dev renamed0");
        until(&mut watcher, |devices| found(devices) == [("renamed0", DeviceKind::Wire, Layer::Ethernet)])
            .await;
        ip("addr del 192.0.2.1/24 dev renamed0");
        until(&mut watcher, |devices| devices.iter().all(|device| device.kind == DeviceKind::Workload)).await;
        drop(pod);
        until(&mut watcher, |devices| devices.is_empty()).await;
        assert_eq!(sync(&mut attacher, &watcher.devices().unwrap()), (0, 2));
        assert!(link_inodes(&sandbox).is_empty(), "a device that is gone is forgotten");
    });
}

async fn until(watcher: &mut DeviceWatcher, wanted: impl Fn(&[Device]) -> bool) {
    while !wanted(&watcher.devices().unwrap()) {
        tokio::time::timeout(Duration::from_secs(5), watcher.changed()).await.expect("an event").unwrap();
    }
}

#[test]
fn lost_events_do_not_lose_devices() {
    let _sandbox = Sandbox::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut watcher = DeviceWatcher::open(DevicePatterns::default()).unwrap();
        assert!(watcher.devices().unwrap().is_empty());
        wire("wire0", 50);
        // More events than a socket holds.
        let batch: String =
            (0..3000).map(|n| format!("addr add 10.1.{}.{}/32 dev wire0\n", n / 250, n % 250 + 1)).collect();
        let file = std::env::temp_dir().join(format!("lb-datapath-{}-batch", std::process::id()));
        fs::write(&file, batch).unwrap();
        run("ip", &format!("-batch {}", file.display()));
        fs::remove_file(&file).unwrap();
        until(&mut watcher, |devices| devices.len() == 1).await;
    });
}

// ---- conntrack

const NOW: Tick = Tick(1_000_000);

fn ago(seconds: u64) -> Tick {
    Tick(NOW.0 - u32::try_from((seconds * 1_000_000_000) >> 30).unwrap())
}

/// Both entries of a flow of a client port, last seen at `last`, and their keys.
fn flow(protocol: u8, port: u16, last: Tick) -> [(Tuple, Flow); 2] {
    let address = |last| Address::from_v4([192, 0, 2, last]);
    let from = Tuple::new(address(1), address(10), port, 80, protocol);
    let to = Tuple::new(address(1), address(20), port, 8080, protocol);
    let mut forward = Flow::new(&from, &to, 7, 0, last);
    let mut reply =
        Flow::new(&to.reversed(), &from.reversed(), 7, flow_flags::REPLY | flow_flags::AT_EGRESS, last);
    let segment = |flags, seq, ack| Segment { flags, seq, ack, payload: 0 };
    if protocol == protocol::TCP {
        forward.observe_segment(&segment(tcp_flags::SYN, 100, 0), last);
        reply.observe_segment(&segment(tcp_flags::SYN | tcp_flags::ACK, 500, 101), last);
        forward.observe_segment(&segment(tcp_flags::ACK, 101, 501), last);
    } else {
        forward.observe_datagram(last);
        reply.observe_datagram(last);
    }
    [(from, forward), (to.reversed(), reply)]
}

fn insert(conntrack: &Conntrack, entries: &[(Tuple, Flow)]) {
    for (key, entry) in entries {
        assert!(conntrack.table().insert_new(key, entry).unwrap());
    }
}

#[test]
fn flows_are_forgotten_when_their_time_is_over() {
    for batches in [true, false] {
        let sandbox = Sandbox::new();
        let conntrack = sandbox.open().conntrack();
        conntrack.table().use_batches(batches);
        insert(&conntrack, &flow(protocol::TCP, 1, ago(23 * 3600)));
        insert(&conntrack, &flow(protocol::TCP, 2, ago(25 * 3600)));
        insert(&conntrack, &flow(protocol::UDP, 3, ago(20)));
        insert(&conntrack, &flow(protocol::UDP, 4, ago(180)));
        let [mut forward, reply] = flow(protocol::UDP, 5, ago(180));
        forward.1.last_seen = ago(1);
        insert(&conntrack, &[forward, reply]);
        let sweep = conntrack.expire(NOW).unwrap();
        assert_eq!((sweep.entries, sweep.expired, sweep.rebuilt, sweep.orphans), (10, 2, 0, 0));
        let left = conntrack.list().unwrap();
        let ports: Vec<u16> = left.iter().map(|connection| connection.from.source_port).collect();
        assert_eq!(ports, [1, 3, 5]);
        assert!(left.iter().all(|connection| connection.reply.is_some()));
        assert_eq!(conntrack.table().count().unwrap(), 6);
    }
}

/// The only entry of a flow in a tunnel, whose ends are this node and the backend.
fn tunnelled(protocol: u8, port: u16, last: Tick) -> (Tuple, Flow) {
    let [(from, mut forward), _] = counted(protocol, port, last);
    forward.flags = flow_flags::ROUTED | flow_flags::TUNNEL;
    forward.to.source = Address::from_v4([192, 0, 2, 99]);
    (from, forward)
}

/// They are no halves of something: nothing is given back to them, and nothing is taken from others with them.
#[test]
fn flows_in_tunnels_are_kept_and_forgotten_by_their_only_entry() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    insert(
        &conntrack,
        &[tunnelled(protocol::TCP, 1, ago(23 * 3600)), tunnelled(protocol::TCP, 2, ago(25 * 3600))],
    );
    insert(&conntrack, &[tunnelled(protocol::UDP, 3, ago(20)), tunnelled(protocol::UDP, 4, ago(40))]);
    // What the reply of one would be, if there were one, is that of somebody else.
    let stranger = tunnelled(protocol::UDP, 3, ago(1)).1.to.reversed();
    let other = Flow::new(&stranger, &stranger, 8, 0, ago(1));
    insert(&conntrack, &[(stranger, other)]);
    insert(&conntrack, &[(other.to.reversed(), Flow { flags: flow_flags::REPLY, ..other })]);
    conntrack.set_active(5, 4);
    let sweep = conntrack.expire(NOW).unwrap();
    assert_eq!((sweep.entries, sweep.expired, sweep.rebuilt, sweep.orphans), (6, 2, 0, 0));
    assert_eq!((sweep.entries_left(), sweep.flows_left()), (4, 3));
    assert_eq!(conntrack.active().get(5), 2);
    let tunnelled: Vec<_> = conntrack
        .list()
        .unwrap()
        .into_iter()
        .filter(|connection| connection.forward.is_tunnelled())
        .collect();
    let ports: Vec<u16> = tunnelled.iter().map(|connection| connection.from.source_port).collect();
    assert_eq!(ports, [1, 3]);
    assert!(tunnelled.iter().all(|connection| connection.reply.is_none()));
    assert_eq!(conntrack.purge(|key, _| key.source_port == 3 && key.protocol == protocol::UDP).unwrap(), 1);
    assert_eq!((conntrack.active().get(5), conntrack.table().get(&stranger).unwrap()), (1, Some(other)));
    assert_eq!(conntrack.table().count().unwrap(), 3);
}

/// As programs do it, but for the numbers.
fn counted(protocol: u8, port: u16, last: Tick) -> [(Tuple, Flow); 2] {
    flow(protocol, port, last).map(|(key, entry)| (key, Flow { active_flows_slot: 5, ..entry }))
}

#[test]
fn forgotten_flows_are_not_counted_any_more() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    let mut recount = Recount::default();
    insert(&conntrack, &counted(protocol::UDP, 1, ago(180)));
    for port in 2..6 {
        insert(&conntrack, &counted(protocol::UDP, port, ago(1)));
    }
    // One that has ended: only the copy knows where it was counted.
    let [(key, forward), reply] = counted(protocol::TCP, 9, ago(25 * 3600));
    insert(&conntrack, &[(key, Flow { active_flows_slot: 0, ..forward }), reply]);
    conntrack.set_active(5, 5);
    let sweep = conntrack.expire_and_recount(NOW, &mut recount, None).unwrap();
    assert_eq!((sweep.expired, conntrack.active().get(5)), (2, 4));
    assert_eq!(conntrack.purge(|key, _| key.source_port == 2).unwrap(), 1);
    assert_eq!(conntrack.active().get(5), 3);
    assert_eq!(conntrack.counters().unwrap().into_keys().collect::<Vec<_>>(), [5]);
    assert_eq!(conntrack.flush().unwrap(), 6);
    assert_eq!(conntrack.active().get(5), 0);
}

/// Also right after a start of the agent, and for a counter that no flow has.
#[test]
fn numbers_of_active_flows_that_are_wrong_are_put_right() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    (1..4).for_each(|port| insert(&conntrack, &counted(protocol::TCP, port, ago(60))));
    conntrack.set_active(5, -2);
    conntrack.set_active(6, 7);
    let mut recount = Recount::default();
    for (five, six) in [(-2, 7), (3, 0), (3, 0)] {
        conntrack.expire_and_recount(NOW, &mut recount, None).unwrap();
        assert_eq!((conntrack.active().get(5), conntrack.active().get(6)), (five, six));
    }
    assert_eq!(recount.in_flows(), &[5].into());
}

#[test]
fn a_flow_gets_its_lost_half_back() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    let flows = [1, 2].map(|port| flow(protocol::TCP, port, ago(3600)));
    insert(&conntrack, &[flows[0][0], flows[1][1]]);
    let orphan = flow(protocol::UDP, 3, ago(3600));
    insert(&conntrack, &orphan[1..]);
    let sweep = conntrack.expire(NOW).unwrap();
    assert_eq!((sweep.expired, sweep.rebuilt, sweep.orphans), (0, 2, 1));
    for [(key, forward), (reply_key, reply)] in flows {
        let now = conntrack.table().get(&key).unwrap().unwrap();
        let reply_now = conntrack.table().get(&reply_key).unwrap().unwrap();
        assert_eq!(
            (now.to, now.flags, now.address_delta),
            (forward.to, forward.flags, forward.address_delta)
        );
        assert_eq!((reply_now.to, reply_now.flags), (reply.to, reply.flags));
        assert_eq!(Phase::of(&now, &reply_now), Phase::Established);
        assert_ne!(now.seen & reply_now.seen & seen::ACK, 0);
    }
    let sweep = conntrack.expire(NOW).unwrap();
    assert_eq!((sweep.entries, sweep.rebuilt), (4, 0), "a second sweep finds nothing to do");
}

/// The client sends, but nothing reaches the way out of the node: the neighbour is away, or a policy drops it.
#[test]
fn a_masqueraded_connection_keeps_its_masquerade_while_its_packets_are_lost_on_the_way() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    let first = flow(protocol::UDP, 1, ago(1));
    let to = first[0].1.to;
    let outside = Tuple { source: Address::from_v4([192, 0, 2, 254]), ..to };
    let half = |key: &Tuple, to: &Tuple, flags| {
        (*key, Flow::new(key, to, 7, flow_flags::MASQUERADE | flags, ago(3600)))
    };
    let second = [
        half(&to, &outside, flow_flags::AT_EGRESS),
        half(&outside.reversed(), &to.reversed(), flow_flags::REPLY),
    ];
    for halves in [&second[..], &second[..1], &second[1..]] {
        conntrack.flush().unwrap();
        insert(&conntrack, &first);
        insert(&conntrack, halves);
        let sweep = conntrack.expire(NOW).unwrap();
        assert_eq!((sweep.expired, sweep.rebuilt, sweep.orphans), (0, 2 - halves.len(), 0));
        assert_eq!(conntrack.list().unwrap()[0].masqueraded, Some(outside));
        // The first flow goes before the second one, which then goes with the next sweep at the latest.
        let later = Tick(NOW.0 + 1_000);
        let expired = conntrack.expire(later).unwrap().expired + conntrack.expire(later).unwrap().expired;
        assert_eq!((expired, conntrack.table().count().unwrap()), (2, 0));
    }
}

#[test]
fn flows_can_be_purged_and_flushed() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    for port in 1..=100 {
        insert(&conntrack, &flow(if port % 2 == 0 { protocol::UDP } else { protocol::TCP }, port, ago(1)));
    }
    assert_eq!(conntrack.purge(|from, _| from.protocol == protocol::UDP).unwrap(), 50);
    let left = conntrack.list().unwrap();
    assert_eq!(left.len(), 50);
    assert!(left.iter().all(|connection| connection.from.protocol == protocol::TCP));
    assert_eq!(conntrack.flush().unwrap(), 100);
    assert_eq!(conntrack.table().count().unwrap(), 0);
}

#[test]
fn a_large_conntrack_table_is_swept_quickly() {
    let sandbox = Sandbox::new();
    let conntrack = Datapath::open(&Options::new(sandbox.bpffs())).unwrap().conntrack();
    let (mut keys, mut entries) = (Vec::new(), Vec::new());
    for number in 0..100_000u32 {
        let port = u16::try_from(number % 50_000 + 1).unwrap();
        for (key, entry) in flow(if number < 50_000 { protocol::TCP } else { protocol::UDP }, port, ago(1)) {
            keys.push(key);
            entries.push(entry);
        }
    }
    conntrack.table().update(&keys, &entries).map_err(|(_, error)| error).unwrap();
    let start = Instant::now();
    let sweep = conntrack.expire(NOW).unwrap();
    let swept = start.elapsed();
    assert_eq!((sweep.entries, sweep.expired), (200_000, 0));
    let start = Instant::now();
    let sweep = conntrack.expire(Tick(NOW.0 + 100_000)).unwrap();
    assert_eq!((sweep.expired, sweep.orphans), (100_000, 0));
    println!("200,000 entries: sweep {swept:?}, expiry of all {:?}", start.elapsed());
    assert_eq!(conntrack.table().count().unwrap(), 0);
    // An optimised build needs a quarter of a second.
    assert!(swept < Duration::from_secs(10), "{swept:?}");
}

// ---- status and checks

#[test]
fn status_shows_what_the_kernel_holds() {
    let sandbox = Sandbox::new();
    let datapath = sandbox.open();
    datapath.maps().apply(&steps(10, 4).0).unwrap();
    insert(&datapath.conntrack(), &flow(protocol::TCP, 1, NOW));
    sync(&mut datapath.attacher().unwrap(), &[wire("wire0", 50)]);
    let pinned = Pinned::open(&sandbox.bpffs()).unwrap();
    let fill: Vec<_> =
        pinned.fill().unwrap().iter().map(|map| (map.name, map.entries, map.capacity)).collect();
    let expected = [
        ("SERVICES", 10, 1024),
        ("BACKENDS", 40, 4096),
        ("TABLES", 0, 4096),
        ("CONNTRACK", 2, 1024),
        ("AFFINITY", 0, 1024),
        ("SERVICE_NAMES", 10, 1024),
        ("VIPS", 0, 262_144),
        ("SOURCE_RANGES", 0, 262_144),
        ("ENDPOINT_NAMES", 40, 4096),
    ];
    assert_eq!(fill, expected);
    let attachments = pinned.attachments().unwrap();
    let places: Vec<_> = attachments.iter().map(|at| (at.device.as_str(), at.direction)).collect();
    assert_eq!(places, [("wire0", Direction::Ingress), ("wire0", Direction::Egress)]);
}

#[test]
fn packets_are_counted() {
    let sandbox = Sandbox::new();
    let datapath = sandbox.open();
    let stats = datapath.stats().unwrap();
    assert_eq!(stats.read().unwrap(), [0; Outcome::COUNT]);
    sync(&mut datapath.attacher().unwrap(), &[wire("wire0", 50)]);
    ip("addr add 192.0.2.1/24 dev wire0");
    let socket = std::net::UdpSocket::bind("192.0.2.1:0").unwrap();
    ip("neigh add 192.0.2.2 lladdr 02:00:00:00:00:02 dev wire0");
    for _ in 0..5 {
        socket.send_to(b"datagram", "192.0.2.2:9").unwrap();
    }
    let counters = stats.read().unwrap();
    assert_eq!(counters[Outcome::NoService as usize], 5, "{counters:?}");
}

#[test]
fn this_machine_can_run_it() {
    let sandbox = Sandbox::new();
    let probes = check(&sandbox.bpffs());
    for probe in &probes {
        println!("{:<16} {:<9} {} {}", probe.name, probe.result.as_str(), probe.detail, probe.advice);
    }
    assert!(probes.iter().all(|probe| probe.result != ProbeResult::Missing));
    assert!(!sandbox.bpffs().exists(), "checking makes nothing");
}

// ---- XDP

/// What `ip` says of the XDP program of a device: mode and id.
fn xdp_on(device: &str) -> Option<(String, u64)> {
    let text = run("ip", &format!("-j -d link show dev {device}"));
    let links: serde_json::Value = serde_json::from_str(&text).unwrap();
    let xdp = links[0].get("xdp")?;
    let mode = match xdp["mode"].as_u64()? {
        1 => "native",
        2 => "generic",
        other => panic!("mode {other}"),
    };
    Some((mode.to_owned(), xdp["prog"]["id"].as_u64()?))
}

fn open_with(sandbox: &Sandbox, xdp: XdpOption) -> Datapath {
    Datapath::open(&Options { xdp, ..sandbox.options() }).unwrap()
}

#[test]
fn xdp_serves_wires_in_the_mode_that_they_can_have_and_may() {
    let sandbox = Sandbox::new();
    let pair = wire("wire0", 50);
    let workload = Device { kind: DeviceKind::Workload, ..wire("pod0", 51) };
    let bare = Device { layer: Layer::Ip, ..wire("wg0", 52) };
    ip("link add name br0 index 53 type bridge");
    let bridge = Device { index: 53, name: "br0".to_owned(), is_pair: false, ..pair.clone() };
    let devices = [pair, workload, bare, bridge];
    for (option, on_pair, on_bridge) in [
        (XdpOption::Auto, None, None),
        (XdpOption::Native, Some("native"), None),
        (XdpOption::Generic, Some("native"), Some("generic")),
        (XdpOption::Off, None, None),
    ] {
        let datapath = open_with(&sandbox, option);
        let mut attacher = datapath.xdp_attacher();
        for _again in 0..2 {
            attacher.sync(&devices).unwrap();
            for (device, expected) in [("wire0", on_pair), ("pod0", None), ("wg0", None), ("br0", on_bridge)]
            {
                let right = || xdp_on(device).map(|(mode, _)| mode).as_deref() == expected;
                eventually(right);
            }
        }
        let told: Vec<_> = devices.iter().map(|device| attacher.mode_of(device.index)).collect();
        let told: Vec<_> = told.into_iter().map(|mode| mode.map(XdpMode::as_str)).collect();
        assert_eq!(told, [on_pair, None, None, on_bridge], "{option:?}");
        let shown = Pinned::open(&sandbox.bpffs()).unwrap().xdp_attachments().unwrap();
        assert_eq!(shown.len(), on_pair.iter().chain(&on_bridge).count(), "{shown:?}");
    }
}

#[test]
fn the_next_agent_takes_over_the_link_and_cleanup_ends_it() {
    let sandbox = Sandbox::new();
    let wire = wire("wire0", 50);
    let open = || {
        let datapath = open_with(&sandbox, XdpOption::Native);
        datapath.xdp_attacher().sync(std::slice::from_ref(&wire)).unwrap();
    };
    open();
    let (mode, first) = xdp_on("wire0").expect("the link outlives its agent");
    let inode = || fs::symlink_metadata(sandbox.pin("links/50-xdp-native")).unwrap().ino();
    let link = inode();
    open();
    assert_eq!(inode(), link, "the same link");
    let (_, second) = xdp_on("wire0").unwrap();
    assert!(mode == "native" && second != first, "another program in it");
    // A device of the same number that is another one.
    ip("link del wire0");
    let wire = wire_again(&wire);
    let datapath = open_with(&sandbox, XdpOption::Native);
    datapath.xdp_attacher().sync(std::slice::from_ref(&wire)).unwrap();
    assert!(xdp_on("wire0").is_some());
    drop(datapath);
    cleanup(&sandbox.bpffs()).unwrap();
    eventually(|| xdp_on("wire0").is_none());
}

/// The device made anew.
fn wire_again(device: &Device) -> Device {
    wire(&device.name, device.index)
}

#[test]
fn a_device_with_somebody_elses_xdp_program_is_served_at_tc() {
    let sandbox = Sandbox::new();
    let wire = wire("wire0", 50);
    let others = open_with(&sandbox, XdpOption::Native);
    others.xdp_attacher().sync(std::slice::from_ref(&wire)).unwrap();
    let (_, program) = xdp_on("wire0").unwrap();
    let second = Options { xdp: XdpOption::Native, bpffs: sandbox.folder.join("other"), ..sandbox.options() };
    fs::create_dir(&second.bpffs).unwrap();
    let ours = Datapath::open(&second).unwrap();
    let mut attacher = ours.xdp_attacher();
    attacher.sync(std::slice::from_ref(&wire)).unwrap();
    assert_eq!(attacher.mode_of(50), None);
    assert_eq!(xdp_on("wire0").unwrap().1, program, "theirs stays");
    drop(ours);
    umount2(&second.bpffs, MntFlags::MNT_DETACH).unwrap();
}
