//! Tests of upgrades: an agent takes over a data plane with another layout, or removes it.

use std::fs;

use aya::programs::TcAttachType;
use lb_common::{
    Address,
    conntrack::{Flow, Tick, Tuple, flow_flags},
    protocol,
};
use lb_core::plan::Step;
use lb_datapath::{AttachMode, Capacities, Conntrack, Datapath, Options, Pinned};

use super::{
    contents::{backend, key, service, steps},
    sandbox::{Sandbox, eventually, program_id, sync, tc, tcx, wire},
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
    assert!(datapath.replaces_another().unwrap());
    sync(&mut datapath.attacher().unwrap(), std::slice::from_ref(&wire));
    assert_eq!(tcx("wire0", TcAttachType::Ingress).len(), 2);
    datapath.retire_other_versions().unwrap();
    assert!(!datapath.replaces_another().unwrap());
    let pinned = Pinned::open(&sandbox.bpffs()).unwrap();
    eventually(|| tcx("wire0", TcAttachType::Ingress) == [program_id(&pinned, "tc_ingress")]);
    assert!(!sandbox.bpffs().join("lb/v0").exists());
}

/// A newer version with the same layout has a program at a hook that this version does not know.
#[test]
fn downgrade_detaches_programs_that_this_version_does_not_know() {
    let sandbox = Sandbox::new();
    let wire = [wire("wire0", 50)];
    sync(&mut sandbox.open().attacher().unwrap(), &wire);
    let unknown = ["links/sock_sendmsg_unix", "programs/sock_sendmsg_unix"].map(|pin| sandbox.pin(pin));
    fs::rename(sandbox.pin("links/50-egress"), &unknown[0]).unwrap();
    fs::rename(sandbox.pin("programs/tc_egress"), &unknown[1]).unwrap();

    let datapath = sandbox.open();
    sync(&mut datapath.attacher().unwrap(), &wire);
    assert_eq!(tcx("wire0", TcAttachType::Egress).len(), 2);
    datapath.retire_other_versions().unwrap();
    let pinned = Pinned::open(&sandbox.bpffs()).unwrap();
    eventually(|| tcx("wire0", TcAttachType::Egress) == [program_id(&pinned, "tc_egress")]);
    assert!(unknown.iter().all(|pin| !pin.exists()));
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

/// The earlier agent served a device that the new agent does not serve: only the earlier agent's filters are on this
/// device.
#[test]
fn takeover_removes_the_clsact_qdisc_of_a_device_that_is_no_longer_served() {
    let sandbox = Sandbox::new();
    let wires = [wire("wire0", 50), wire("wire1", 51)];
    let options = Options { attach: Some(AttachMode::Clsact), ..sandbox.options() };
    sync(&mut Datapath::open(&options).unwrap().attacher().unwrap(), &wires);
    // tc names a filter after the file of its program. The handle begins with the number of another layout.
    let program = sandbox.bpffs().join("lb:tc_ingress");
    fs::hard_link(sandbox.pin("programs/tc_ingress"), &program).unwrap();
    for hook in ["ingress", "egress"] {
        tc(&format!("filter del dev wire1 {hook}"));
        let filter = format!("bpf da object-pinned {}", program.display());
        tc(&format!("filter add dev wire1 {hook} prio 1 handle 0x16c62 {filter}"));
    }
    fs::rename(sandbox.pin(""), sandbox.bpffs().join("lb/v0")).unwrap();

    let mut datapath = Datapath::open(&options).unwrap();
    sync(&mut datapath.attacher().unwrap(), &wires[..1]);
    assert!(
        tc("filter show dev wire1 ingress").contains("lb:tc_ingress"),
        "the earlier programs still serve"
    );
    datapath.finish_handover().unwrap();
    assert!(!tc("qdisc show dev wire1").contains("clsact"));
    assert!(tc("qdisc show dev wire0").contains("clsact"), "our filters use the qdisc");
}

/// A routed flow of a client: its forward entry and its reverse entry, with keys. `port` is the node's source port.
fn routed(client_port: u16, port: u16) -> [(Tuple, Flow); 2] {
    let address = |last| Address::from_v4([192, 0, 2, last]);
    let from = Tuple::new(address(1), address(2), client_port, 30_000, protocol::UDP);
    let to = Tuple::new(address(3), address(4), port, 8080, protocol::UDP);
    let flags = flow_flags::ROUTED;
    let forward = Flow::new(&from, &to, 7, flags, Tick(1));
    let reply = Flow::new(&to.reversed(), &from.reversed(), 7, flow_flags::reverse(flags), Tick(1));
    [(from, forward), (to.reversed(), reply)]
}

fn insert(conntrack: &Conntrack, flow: [(Tuple, Flow); 2]) {
    for (key, flow) in flow {
        assert!(conntrack.table().insert_new(&key, &flow).unwrap());
    }
}

/// The client ports and source ports of the flows that have both entries, and the number of all entries.
fn flows(datapath: &Datapath) -> (Vec<(u16, u16)>, usize) {
    let (conntrack, mut found, mut entries) = (datapath.conntrack(), Vec::new(), 0);
    for client_port in 1..=5 {
        for port in 10..=13 {
            let [forward, reply] = routed(client_port, port);
            let is_there = |(key, flow): (Tuple, Flow)| {
                conntrack.table().get(&key).unwrap().is_some_and(|there| there.to == flow.to)
            };
            let there = [is_there(forward), is_there(reply)];
            entries += there.iter().filter(|there| **there).count();
            if there == [true; 2] {
                found.push((client_port, port));
            }
        }
    }
    (found, entries)
}

/// Programs of both versions create flows while an agent copies them, and each version chooses source ports without
/// knowing which ports the other version's flow table uses. If the agent copied a forward entry whose source port
/// belongs to another flow, programs would take the replies of that flow for replies of the copied one.
#[test]
fn taken_over_flows_share_no_source_port() {
    let sandbox = Sandbox::new();
    let old = sandbox.open().conntrack();
    insert(&old, routed(1, 10));
    insert(&old, routed(2, 11));
    fs::rename(sandbox.pin(""), sandbox.bpffs().join("lb/v0")).unwrap();
    // Maps of another size are copied, not shared.
    let options = sandbox.options();
    let capacities = Capacities { conntrack: options.capacities.conntrack * 2, ..options.capacities };
    let mut new = Datapath::open(&Options { capacities, ..options }).unwrap();
    assert_eq!(flows(&new), (vec![(1, 10), (2, 11)], 4));

    // The earlier programs end the first client's flow, give its source port to the third client, and begin a flow of
    // the fourth client.
    for (key, _) in routed(1, 10) {
        assert!(old.table().remove(&key).unwrap());
    }
    insert(&old, routed(3, 10));
    insert(&old, routed(4, 12));
    // The new programs have given the source port of the fourth client's flow, 12, to a flow of their own.
    insert(&new.conntrack(), routed(5, 12));
    new.finish_handover().unwrap();
    assert_eq!(flows(&new), (vec![(2, 11), (3, 10), (5, 12)], 6), "the fourth client begins again");
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
