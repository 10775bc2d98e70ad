//! Tests of the flow table and its overflow.

use std::{collections::BTreeSet, fs, thread};

use aya::maps::{Array, Map, MapData};
use lb_common::{
    conntrack::{Flow, Tuple},
    flow_table::{Header, Slot},
    protocol,
};
use lb_datapath::{Capacities, Datapath, FlowTable, Options};

use super::{
    flows::{NOW, ago, flow, insert},
    sandbox::Sandbox,
};

/// Opens a data plane whose flow table is made for `entries` entries.
pub(crate) fn open(sandbox: &Sandbox, entries: u32) -> Datapath {
    let options = sandbox.options();
    let capacities = Capacities { conntrack: entries, ..options.capacities };
    Datapath::open(&Options { capacities, ..options }).unwrap()
}

/// The forward entries, with their keys, of `count` flows that differ in the client's port.
fn entries(count: u16) -> Vec<(Tuple, Flow)> {
    (1..=count).map(|port| flow(protocol::TCP, port, ago(1))[0]).collect()
}

#[test]
fn entries_without_a_free_slot_are_put_into_the_overflow() {
    let sandbox = Sandbox::new();
    let conntrack = open(&sandbox, 32).conntrack();
    let table = conntrack.table();
    assert_eq!((table.capacity(), table.slots()), (32, 64));
    let mut inserted = BTreeSet::new();
    let mut refused = None;
    for (key, flow) in entries(200) {
        match table.insert_new(&key, &flow) {
            Ok(is_new) => assert!(is_new && inserted.insert(key)),
            Err(error) => refused = Some(error.to_string()),
        }
    }
    assert!(refused.is_some_and(|error| error.contains("CONNTRACK")), "the overflow is full");
    assert_eq!((inserted.len(), table.count().unwrap(), table.overflowed()), (96, 96, 32));
    let mut seen = BTreeSet::new();
    table
        .for_each(|key, _| {
            seen.insert(*key);
            Ok(())
        })
        .unwrap();
    assert_eq!(seen, inserted);
    for (key, flow) in entries(200) {
        let expected = inserted.contains(&key).then_some(flow);
        assert_eq!(table.get(&key).unwrap(), expected);
        if expected.is_some() {
            assert!(!table.insert_new(&key, &flow).unwrap(), "it exists");
        }
        assert_eq!(table.remove(&key).unwrap(), expected.is_some());
    }
    assert_eq!((table.count().unwrap(), table.overflowed()), (0, 0));
    assert_eq!(table.get(&entries(1)[0].0).unwrap(), None);
}

/// Makes all new entries go to the overflow, by the flag `takes_all` in the header of the flow table.
pub(crate) fn insert_into_overflow_only(sandbox: &Sandbox) {
    let map = Map::Array(MapData::from_pin(sandbox.pin("FLOW_TABLE")).unwrap());
    let mut headers = Array::<_, Header>::try_from(map).unwrap();
    let header = headers.get(&0, 0).unwrap();
    headers.set(0, Header { takes_all: 1, ..header }, 0).unwrap();
}

/// After GC has read an entry, and before GC deletes it, a program replaces the entry by that of another flow.
#[test]
fn entry_that_another_flow_has_taken_over_is_not_removed() {
    let sandbox = Sandbox::new();
    let conntrack = open(&sandbox, 1024).conntrack();
    assert_only_judged_entries_are_removed(conntrack.table());
    insert_into_overflow_only(&sandbox);
    assert_only_judged_entries_are_removed(conntrack.table());
}

fn assert_only_judged_entries_are_removed(table: &FlowTable) {
    let (key, old) = entries(1)[0];
    let new = Flow { service: 8, ..old };
    assert!(table.insert_new(&key, &old).unwrap());
    let judged = table.read(&key).unwrap().unwrap();
    assert!(table.remove(&key).unwrap() && table.insert_new(&key, &new).unwrap());
    assert!(!table.remove_read(&key, &judged).unwrap());
    assert_eq!(table.get(&key).unwrap(), Some(new));
    let judged = table.read(&key).unwrap().unwrap();
    assert!(table.remove_read(&key, &judged).unwrap());
    assert_eq!((table.get(&key).unwrap(), table.overflowed()), (None, 0));
}

/// After GC has read an entry, and before GC deletes it, a program counts a packet in the entry.
#[test]
fn entry_of_the_overflow_that_a_packet_has_changed_is_not_removed() {
    let sandbox = Sandbox::new();
    let conntrack = open(&sandbox, 1024).conntrack();
    insert_into_overflow_only(&sandbox);
    let table = conntrack.table();
    let (key, idle) = entries(1)[0];
    let used = Flow { packets: 2, ..idle };
    assert!(table.insert_new(&key, &idle).unwrap());
    let judged = table.read(&key).unwrap().unwrap();
    let map = Map::HashMap(MapData::from_pin(sandbox.pin("CONNTRACK")).unwrap());
    aya::maps::HashMap::<_, Tuple, Flow>::try_from(map).unwrap().insert(key, used, 0).unwrap();
    assert!(!table.remove_read(&key, &judged).unwrap());
    assert_eq!((table.get(&key).unwrap(), table.overflowed()), (Some(used), 1));
}

#[test]
fn restarted_agent_keeps_all_flows() {
    let sandbox = Sandbox::new();
    let all = entries(80);
    insert(&open(&sandbox, 32).conntrack(), &all);
    let conntrack = open(&sandbox, 32).conntrack();
    assert!(conntrack.table().overflowed() >= 16);
    for (key, flow) in all {
        assert_eq!(conntrack.table().get(&key).unwrap(), Some(flow));
    }
}

/// A killed agent may leave claimed slots; the next agent frees them.
#[test]
fn claims_of_a_killed_agent_are_released() {
    const CLAIMED_BY_AN_AGENT: u64 = 1 << 32 | 8 | 1;
    let sandbox = Sandbox::new();
    drop(open(&sandbox, 32));
    let map = Map::Array(MapData::from_pin(sandbox.pin("FLOWS")).unwrap());
    let mut slots = Array::<_, Slot>::try_from(map).unwrap();
    let claimed = Slot { control: CLAIMED_BY_AN_AGENT, ..bytemuck::Zeroable::zeroed() };
    (0..64).for_each(|index| slots.set(index, claimed, 0).unwrap());
    let conntrack = open(&sandbox, 32).conntrack();
    insert(&conntrack, &entries(16));
    assert_eq!((conntrack.table().count().unwrap(), conntrack.table().overflowed()), (16, 0));
}

/// The possible slots of an entry depend on the table's size, so the agent copies the entries to a new table.
#[test]
fn table_of_another_size_takes_over_all_flows() {
    for (earlier, ours) in [(32, 1024), (1024, 64)] {
        let sandbox = Sandbox::new();
        let all = entries(90);
        insert(&open(&sandbox, earlier).conntrack(), &all);
        fs::rename(sandbox.pin(""), sandbox.bpffs().join("lb/v0")).unwrap();
        let mut datapath = open(&sandbox, ours);
        datapath.finish_handover().unwrap();
        let conntrack = datapath.conntrack();
        assert_eq!(conntrack.table().slots(), 2 * ours);
        assert_eq!(conntrack.table().count().unwrap(), all.len());
        for (key, flow) in all {
            assert_eq!(conntrack.table().get(&key).unwrap(), Some(flow));
        }
        assert!(!sandbox.bpffs().join("lb/v0").exists());
    }
}

/// Leaves the pins of a version that had no flow table: all flows are in `CONNTRACK`.
fn leave_without_flow_table(sandbox: &Sandbox, flows: &[(Tuple, Flow)]) {
    drop(open(sandbox, 1024));
    let map = Map::HashMap(MapData::from_pin(sandbox.pin("CONNTRACK")).unwrap());
    let mut conntrack = aya::maps::HashMap::<_, Tuple, Flow>::try_from(map).unwrap();
    flows.iter().for_each(|(key, flow)| conntrack.insert(key, flow, 0).unwrap());
    ["FLOWS", "FLOW_TABLE"].iter().for_each(|name| fs::remove_file(sandbox.pin(name)).unwrap());
}

#[test]
fn flows_of_a_layout_without_flow_table_are_taken_over() {
    let sandbox = Sandbox::new();
    let all = entries(90);
    leave_without_flow_table(&sandbox, &all);
    fs::rename(sandbox.pin(""), sandbox.bpffs().join("lb/v0")).unwrap();
    let mut datapath = open(&sandbox, 1024);
    datapath.finish_handover().unwrap();
    let conntrack = datapath.conntrack();
    assert_eq!((conntrack.table().count().unwrap(), conntrack.table().overflowed()), (90, 0));
    for (key, flow) in all {
        assert_eq!(conntrack.table().get(&key).unwrap(), Some(flow));
    }
}

#[test]
fn flows_of_a_build_without_flow_table_become_the_overflow() {
    let sandbox = Sandbox::new();
    let all = entries(90);
    leave_without_flow_table(&sandbox, &all);
    let conntrack = open(&sandbox, 1024).conntrack();
    assert_eq!((conntrack.table().count().unwrap(), conntrack.table().overflowed()), (90, 90));
    for (key, flow) in all {
        assert_eq!(conntrack.table().get(&key).unwrap(), Some(flow));
        assert!(conntrack.table().remove(&key).unwrap());
    }
    assert_eq!((conntrack.table().count().unwrap(), conntrack.table().overflowed()), (0, 0));
}

/// Several threads insert the same keys: for each key, exactly one insert succeeds, and no entry is lost.
#[test]
fn concurrent_inserts_create_each_entry_once() {
    const THREADS: usize = 4;
    let sandbox = Sandbox::new();
    let conntrack = open(&sandbox, 256).conntrack();
    let all = entries(600);
    let inserted: usize = thread::scope(|scope| {
        let table = conntrack.table();
        let all = &all;
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(move || {
                    all.iter().filter(|(key, flow)| table.insert_new(key, flow).unwrap()).count()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!((inserted, conntrack.table().count().unwrap()), (all.len(), all.len()));
    assert!(conntrack.table().overflowed() > 0);
    assert_eq!(conntrack.flush().unwrap(), all.len());
    assert_eq!(conntrack.expire(NOW).unwrap().entries, 0);
    assert_eq!(conntrack.table().overflowed(), 0);
}
