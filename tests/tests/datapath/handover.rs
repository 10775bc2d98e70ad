//! Tests of upgrades: an agent takes over a data plane with another layout, or removes it.

use std::fs;

use aya::programs::TcAttachType;
use lb_common::{
    Address,
    conntrack::{Flow, Tick, Tuple},
    protocol,
};
use lb_core::plan::Step;
use lb_datapath::{Capacities, Datapath, Options, Pinned};

use super::{
    contents::{backend, key, service, steps},
    sandbox::{Sandbox, eventually, program_id, sync, tcx, wire},
};

#[test]
fn layout_without_a_description_is_retired() {
    let sandbox = Sandbox::new();
    let wire = wire("wire0", 50);
    let old = sandbox.open();
    sync(&mut old.attacher().unwrap(), std::slice::from_ref(&wire));
    drop(old);
    fs::rename(sandbox.pin(""), sandbox.bpffs().join("lb/v0")).unwrap();
    // Layouts before version 5 have no description, and so cannot be taken over.
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
fn layout_with_a_description_is_taken_over() {
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
    // An agent that is killed during the handover leaves both layouts; the next agent starts the handover again.
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
    // If an agent is killed before it removes the earlier layout, its own maps may already have flows; the next agent
    // keeps them.
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

/// Backends may have free slots between them, so the new map must have room for the highest used slot, not only for the
/// number of backends.
#[test]
fn maps_with_smaller_defaults_take_over_all_elements() {
    let sandbox = Sandbox::new();
    let old = sandbox.open();
    let (steps, mut contents) = steps(20, 3);
    old.maps().apply(&steps).unwrap();
    let (last, record) = (backend(1000), service(7, 4095, 1));
    let switch = [
        Step::WriteBackends { base: 4095, backends: vec![last] },
        Step::PutFrontend(key(7), Box::new(record)),
    ];
    old.maps().apply(&switch).unwrap();
    let base = contents.frontends.insert(key(7), record).unwrap().backends_base;
    contents.backends.retain(|slot, _| !(base..base + 3).contains(slot));
    contents.backends.insert(4095, last);
    drop(old);
    fs::rename(sandbox.pin(""), sandbox.bpffs().join("lb/v0")).unwrap();

    let options = sandbox.options();
    let capacities = Capacities { services: 16, backends: 1024, tables: 64, ..options.capacities };
    let datapath = Datapath::open(&Options { capacities, ..options }).unwrap();
    assert_eq!(datapath.maps().contents().unwrap(), contents);
    let sizes = datapath.maps().room();
    assert_eq!((sizes.frontends, sizes.backends, sizes.tables), (1024, 4096, 64));
}
