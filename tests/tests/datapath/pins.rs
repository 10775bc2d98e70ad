//! Tests of pinned maps, programs and links: across restarts, with a second agent, and after a cleanup.

use std::{
    ffi::CString,
    fs, io,
    os::fd::{FromRawFd as _, OwnedFd},
    path::Path,
    thread,
    time::Duration,
};

use aya::{maps::MapInfo, programs::TcAttachType};
use lb_datapath::{AttachMode, Capacities, Datapath, DatapathError, Device, Layer, Options, Pinned, cleanup};
use lb_tests::wait_for;
use nix::{
    libc,
    mount::{MsFlags, mount},
};

use super::{
    contents::steps,
    sandbox::{Sandbox, eventually, layout_folder, link_inodes, sync, tcx, wire},
};

/// Creates and pins an LRU map, which aya cannot create.
fn pin_lru_map(path: &Path, key_size: u32, value_size: u32, entries: u32) {
    const MAP_CREATE: libc::c_int = 0;
    const OBJ_PIN: libc::c_int = 6;
    const LRU_HASH: u32 = 9;
    let create = [LRU_HASH, key_size, value_size, entries, 0];
    // SAFETY: the kernel reads at most as many bytes of the attributes as the given size.
    let map = unsafe { libc::syscall(libc::SYS_bpf, MAP_CREATE, create.as_ptr(), size_of_val(&create)) };
    assert!(map >= 0, "{}", io::Error::last_os_error());
    let path = CString::new(path.to_str().unwrap()).unwrap();
    let pin = [path.as_ptr() as u64, u64::try_from(map).unwrap()];
    // SAFETY: the kernel reads at most as many bytes of the attributes as the given size; the path outlives the call.
    let pinned = unsafe { libc::syscall(libc::SYS_bpf, OBJ_PIN, pin.as_ptr(), size_of_val(&pin)) };
    assert_eq!(pinned, 0, "{}", io::Error::last_os_error());
    // SAFETY: the descriptor has no other owner.
    drop(unsafe { OwnedFd::from_raw_fd(libc::c_int::try_from(map).unwrap()) });
}

/// Earlier agents created a smaller fragment map. An upgrade may lose the entries of that map.
#[test]
fn upgrade_enlarges_the_fragment_map() {
    let sandbox = Sandbox::new();
    drop(sandbox.open());
    let path = sandbox.pin("FRAGMENTS");
    let wanted = MapInfo::from_pin(&path).unwrap();
    fs::remove_file(&path).unwrap();
    pin_lru_map(&path, wanted.key_size(), wanted.value_size(), 1_024);
    drop(sandbox.open());
    assert_eq!(MapInfo::from_pin(&path).unwrap().max_entries(), wanted.max_entries());
    assert!(wanted.max_entries() > 1_024);
}

#[test]
fn pinned_map_of_another_shape_is_rejected() {
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
    assert!(cleanup(&sandbox.bpffs()).unwrap().maps > 0, "cleanup works with maps of any shape");
}

#[test]
fn second_agent_fails_and_names_the_pid_of_the_first() {
    let sandbox = Sandbox::new();
    let first = sandbox.open();
    let error = Datapath::open(&sandbox.options()).unwrap_err().to_string();
    assert!(error.contains(&format!("pid {} ", std::process::id())), "{error}");
    let error = cleanup(&sandbox.bpffs()).unwrap_err().to_string();
    assert!(error.contains("another lb-agent"), "{error}");
    assert!(Pinned::open(&sandbox.bpffs()).unwrap().agent().is_some());
    drop(first);
    // A child process that another test has forked holds a duplicate of the descriptor with the lock until the child
    // executes its program.
    let is_free = || Pinned::open(&sandbox.bpffs()).unwrap().agent().is_none().then_some(());
    wait_for(Duration::from_secs(3), is_free).expect("the lock is free");
    drop(sandbox.open());
}

#[test]
fn command_without_a_data_plane_fails_with_advice() {
    let sandbox = Sandbox::new();
    let error = Pinned::open(&sandbox.bpffs()).unwrap_err().to_string();
    assert!(error.contains("lb-agent run"), "{error}");
    assert!(!sandbox.bpffs().exists(), "opening creates nothing");
}

#[test]
fn restart_keeps_maps_and_links_and_replaces_programs() {
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

#[test]
fn cleanup_removes_everything() {
    let sandbox = Sandbox::new();
    let wire = wire("wire0", 50);
    let datapath = sandbox.open();
    sync(&mut datapath.attacher().unwrap(), std::slice::from_ref(&wire));
    drop(datapath);
    fs::create_dir_all(sandbox.bpffs().join("lb/v9/links")).unwrap();
    fs::rename(sandbox.pin("links/50-egress"), sandbox.bpffs().join("lb/v9/links/50-egress")).unwrap();
    let removed = cleanup(&sandbox.bpffs()).unwrap();
    // Only the two programs of an Ethernet device had to be loaded. Two maps are not part of the layout: its
    // description, and the constants of the programs.
    assert_eq!((removed.attachments, removed.programs, removed.maps, removed.unmounted), (2, 2, 37, true));
    eventually(|| tcx("wire0", TcAttachType::Ingress).is_empty());
    eventually(|| tcx("wire0", TcAttachType::Egress).is_empty());
    assert_eq!(fs::read_dir(sandbox.bpffs()).unwrap().count(), 0);
    assert_eq!(cleanup(&sandbox.bpffs()).unwrap().attachments, 0, "a second cleanup is no error");
}

/// Processes that have the file system open are `lb-agent status`, and a child of a process with an open pin, until the
/// child executes its program.
#[test]
fn cleanup_waits_for_a_process_that_has_the_file_system_open() {
    let sandbox = Sandbox::new();
    drop(sandbox.open());
    let user = fs::File::open(sandbox.bpffs()).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(300));
            drop(user);
        });
        assert!(cleanup(&sandbox.bpffs()).unwrap().unmounted);
    });
}

#[test]
fn folder_in_an_existing_bpffs_keeps_its_mount() {
    let sandbox = Sandbox::new();
    let outer = sandbox.bpffs();
    fs::create_dir(&outer).unwrap();
    let none: Option<&str> = None;
    mount(Some("bpf"), &outer, Some("bpf"), MsFlags::empty(), none).unwrap();
    let inner = outer.join("nodes/a");
    drop(Datapath::open(&Options { bpffs: inner.clone(), ..sandbox.options() }).unwrap());
    assert!(outer.join("nodes/a").join(layout_folder()).join("SERVICES").exists());
    assert!(!cleanup(&inner).unwrap().unmounted);
    drop(sandbox.open());
    assert!(!cleanup(&outer).unwrap().unmounted, "an administrator's mount stays");
}
