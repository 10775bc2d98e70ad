//! Tests of tc attachments: order of the programs, tcx and clsact, and changes of devices, links and the attach mode.

use std::{collections::BTreeSet, fs};

use aya::programs::TcAttachType;
use lb_datapath::{AttachMode, Datapath, Device, Layer, Options, Pinned, cleanup};
use lb_tests::skip;
use nix::{
    mount::{MntFlags, umount2},
    sched::{CloneFlags, unshare},
};

use super::sandbox::{Sandbox, eventually, has_tcx, ip, link_inodes, program_id, sync, tc, tcx, wire};

#[test]
fn tcx_programs_run_first_at_ingress_and_last_at_egress() {
    let sandbox = Sandbox::new();
    let wire = [wire("wire0", 50)];
    if !has_tcx() {
        return skip::whole("the kernel has no tcx");
    }
    // The foreign program is that of a second data plane, which is pinned elsewhere.
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
    assert_eq!(tcx("wire0", TcAttachType::Ingress), [their_ingress], "cleanup detaches before it returns");
    while umount2(&other, MntFlags::MNT_DETACH).is_ok() {}
}

#[test]
fn clsact_filters_coexist_with_foreign_filters() {
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
    assert_ne!(ids[0], ids[1], "a new agent attaches its own programs");

    let removed = cleanup(&sandbox.bpffs()).unwrap();
    assert_eq!(removed.attachments, 2);
    let filters = tc("filter show dev wire0 ingress");
    assert!(filters.contains("u32") && !filters.contains("lb:"), "{filters}");
    assert!(tc("qdisc show dev wire0").contains("clsact"), "the qdisc was there before the agent");
}

/// On the qdisc `ingress`, the kernel would accept a filter for egress, and run that filter at ingress.
#[test]
fn device_with_the_qdisc_ingress_gets_no_filters_and_is_named() {
    let sandbox = Sandbox::new();
    let wire = [wire("wire0", 50)];
    let options = Options { attach: Some(AttachMode::Clsact), ..sandbox.options() };
    tc("qdisc add dev wire0 ingress");
    let datapath = Datapath::open(&options).unwrap();
    let mut attacher = datapath.attacher().unwrap();
    let failed: Vec<String> =
        attacher.sync(&wire).unwrap().failed.iter().map(|failure| format!("{failure:?}")).collect();
    assert_eq!(failed.len(), 2, "{failed:?}");
    assert!(failed.iter().all(|text| text.contains("kind ingress")), "{failed:?}");
    let filters = tc("filter show dev wire0 ingress");
    assert!(!filters.contains("lb:"), "{filters}");
    tc("qdisc del dev wire0 ingress");
    assert_eq!(sync(&mut attacher, &wire), (2, 0));
}

#[test]
fn clsact_qdisc_is_removed_unless_others_use_it() {
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
    assert!(tc("qdisc show dev wire0").contains("clsact"), "a foreign filter uses the qdisc");
}

#[test]
fn clsact_qdisc_goes_with_our_last_filter() {
    let sandbox = Sandbox::new();
    let wire = [wire("wire0", 50)];
    let options = Options { attach: Some(AttachMode::Clsact), ..sandbox.options() };
    let datapath = Datapath::open(&options).unwrap();
    let (mut attacher, mut announcer) = (datapath.attacher().unwrap(), datapath.announce_attacher().unwrap());
    for announcer_is_last in [true, false] {
        sync(&mut attacher, &wire);
        announcer.sync(&[wire[0].index].into()).unwrap();
        for detach_announcer in [!announcer_is_last, announcer_is_last] {
            assert!(tc("qdisc show dev wire0").contains("clsact"), "a filter of ours uses the qdisc");
            if detach_announcer {
                announcer.sync(&BTreeSet::new()).unwrap();
            } else {
                sync(&mut attacher, &[]);
            }
        }
        assert!(!tc("qdisc show dev wire0").contains("clsact"), "announcer last: {announcer_is_last}");
    }
}

#[test]
fn attach_mode_change_leaves_one_program_per_hook() {
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
fn attach_mode_change_leaves_one_program_that_answers_for_announced_addresses() {
    let sandbox = Sandbox::new();
    let index = wire("wire0", 50).index;
    for mode in [AttachMode::Tcx, AttachMode::Clsact, AttachMode::Tcx] {
        let datapath = Datapath::open(&Options { attach: Some(mode), ..sandbox.options() }).unwrap();
        let failed = datapath.announce_attacher().unwrap().sync(&[index].into()).unwrap();
        assert!(failed.is_empty(), "{failed:?}");
        let filters = tc("filter show dev wire0 ingress").matches("lb:tc_announce").count();
        let (links, expected) = if mode == AttachMode::Tcx { (1, 0) } else { (0, 1) };
        assert_eq!(filters, expected, "{mode:?}");
        eventually(|| tcx("wire0", TcAttachType::Ingress).len() == links);
    }
}

/// While a pin's path is taken, the kernel accepts the program, and the agent cannot pin it.
#[test]
fn program_is_attached_once_the_path_of_its_pin_is_free() {
    let sandbox = Sandbox::new();
    let tunnel = [Device { layer: Layer::Ip, ..wire("tun0", 50) }];
    let datapath = sandbox.open();
    let mut attacher = datapath.attacher().unwrap();
    let taken = sandbox.pin("programs/tc_ingress_l3");
    fs::create_dir(&taken).unwrap();
    for _ in 0..2 {
        let failed = attacher.sync(&tunnel).unwrap().failed;
        let points: Vec<String> = failed.iter().map(|(point, _)| point.to_string()).collect();
        assert_eq!(points, ["tun0 ingress"], "{failed:?}");
    }
    fs::remove_dir(&taken).unwrap();
    assert_eq!(sync(&mut attacher, &tunnel), (1, 0));
}

#[test]
fn reused_ifindex_gets_new_links() {
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
fn link_in_another_network_namespace_is_not_reused() {
    let sandbox = Sandbox::new();
    sync(&mut sandbox.open().attacher().unwrap(), &[wire("wire0", 50)]);
    unshare(CloneFlags::CLONE_NEWNET).unwrap();
    let here = [wire("wire0", 50)];
    assert_eq!(sync(&mut sandbox.open().attacher().unwrap(), &here), (2, 0));
    assert_eq!(tcx("wire0", TcAttachType::Ingress).len(), 1);
}

#[test]
fn detached_program_is_attached_again() {
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
