//! Tests of garbage collection, purge and flush of the flow table.

use std::{
    sync::atomic::{AtomicI64, Ordering},
    thread,
    time::Instant,
};

use aya::maps::{HashMap, Map, MapData};
use lb_common::{
    Address,
    conntrack::{Flow, Phase, Tick, Tuple, flow_flags, seen},
    protocol,
};
use lb_core::earlier_flows::EarlierFlows;
use lb_datapath::{Conntrack, Datapath, GcReport, Options, Recount};

use super::{
    cost::cpu_time,
    flow_table::{insert_into_overflow_only, open},
    flows::{NOW, ago, counted, flow, insert, tunnelled},
    sandbox::Sandbox,
};

/// Maximum CPU time of a GC, as a multiple of the time that it takes to fill the table. (Without optimisation, a GC
/// took about 9 times as long as filling when measured.)
const COST_LIMIT: u32 = 60;

/// Two ticks at which flows of this phase were last seen: the first flow expires in a third of its timeout or in 10 s,
/// whichever is shorter; the second one expired 10 s ago.
fn around_timeout(phase: Phase) -> [Tick; 2] {
    let timeout = u64::from(phase.timeout_seconds());
    [ago(timeout - (timeout / 3).min(10)), ago(timeout + 10)]
}

#[test]
fn idle_flows_expire_after_their_timeout() {
    let [live_tcp, expired_tcp] = around_timeout(Phase::Established);
    let [live_udp, expired_udp] = around_timeout(Phase::Replied);
    for batches in [true, false] {
        let sandbox = Sandbox::new();
        let conntrack = sandbox.open().conntrack();
        conntrack.table().use_batches(batches);
        insert(&conntrack, &flow(protocol::TCP, 1, live_tcp));
        insert(&conntrack, &flow(protocol::TCP, 2, expired_tcp));
        insert(&conntrack, &flow(protocol::UDP, 3, live_udp));
        insert(&conntrack, &flow(protocol::UDP, 4, expired_udp));
        let [mut forward, reply] = flow(protocol::UDP, 5, expired_udp);
        forward.1.last_seen = ago(1);
        insert(&conntrack, &[forward, reply]);
        let gc = conntrack.expire(NOW).unwrap();
        assert_eq!((gc.entries, gc.expired, gc.restored, gc.orphans), (10, 2, 0, 0));
        let left = conntrack.list().unwrap();
        let ports: Vec<u16> = left.iter().map(|connection| connection.from.source_port).collect();
        assert_eq!(ports, [1, 3, 5]);
        assert!(left.iter().all(|connection| connection.reply.is_some()));
        assert_eq!(conntrack.table().count().unwrap(), 6);
    }
}

/// Tunnelled flows have no reverse entry, and GC must not restore one. If GC deletes such a flow, it must not delete an
/// entry of another flow, even at the key of the missing reverse entry.
#[test]
fn tunnelled_flows_expire_by_their_only_entry() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    let [live, expired] = around_timeout(Phase::Established);
    insert(&conntrack, &[tunnelled(protocol::TCP, 1, live), tunnelled(protocol::TCP, 2, expired)]);
    let [live, expired] = around_timeout(Phase::Unreplied);
    insert(&conntrack, &[tunnelled(protocol::UDP, 3, live), tunnelled(protocol::UDP, 4, expired)]);
    // Another flow has the key that a reverse entry would have.
    let stranger = tunnelled(protocol::UDP, 3, ago(1)).1.to.reversed();
    let other = Flow::new(&stranger, &stranger, 8, 0, ago(1));
    insert(&conntrack, &[(stranger, other)]);
    insert(&conntrack, &[(other.to.reversed(), Flow { flags: flow_flags::REPLY, ..other })]);
    conntrack.set_active_flows(5, 4);
    let gc = conntrack.expire(NOW).unwrap();
    assert_eq!((gc.entries, gc.expired, gc.restored, gc.orphans), (6, 2, 0, 0));
    assert_eq!((gc.entries_left(), gc.flows_left()), (4, 3));
    assert_eq!(conntrack.active_flows().get(5), 2);
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
    assert_eq!(
        (conntrack.active_flows().get(5), conntrack.table().get(&stranger).unwrap()),
        (1, Some(other))
    );
    assert_eq!(conntrack.table().count().unwrap(), 3);
}

#[test]
fn deleted_flows_leave_the_active_count() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    let mut recount = Recount::default();
    let [_, expired] = around_timeout(Phase::Replied);
    insert(&conntrack, &counted(protocol::UDP, 1, expired));
    for port in 2..6 {
        insert(&conntrack, &counted(protocol::UDP, port, ago(1)));
    }
    // When a program ends a flow, it clears `active_flows_slot` only in the forward entry; the reverse entry keeps its
    // slot.
    let [_, expired] = around_timeout(Phase::Established);
    let [(key, forward), reply] = counted(protocol::TCP, 9, expired);
    insert(&conntrack, &[(key, Flow { active_flows_slot: 0, ..forward }), reply]);
    conntrack.set_active_flows(5, 5);
    let gc = conntrack.expire_and_recount(NOW, &mut recount, None, None).unwrap();
    assert_eq!((gc.expired, conntrack.active_flows().get(5)), (2, 4));
    assert_eq!(conntrack.purge(|key, _| key.source_port == 2).unwrap(), 1);
    assert_eq!(conntrack.active_flows().get(5), 3);
    let slots = conntrack.earlier_flows().unwrap().active_flows_slots;
    assert_eq!(slots.into_keys().collect::<Vec<_>>(), [5]);
    assert_eq!(conntrack.flush().unwrap(), 6);
    assert_eq!(conntrack.active_flows().get(5), 0);
}

#[test]
fn earlier_flows_have_the_highest_service_id_whether_counted_or_not() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    assert_eq!(conntrack.earlier_flows().unwrap(), EarlierFlows::default());
    insert(&conntrack, &counted(protocol::TCP, 1, ago(1)));
    let of_another = |(key, entry)| (key, Flow { service: 9, ..entry });
    insert(&conntrack, &flow(protocol::UDP, 2, ago(1)).map(of_another));
    let EarlierFlows { active_flows_slots, highest_service } = conntrack.earlier_flows().unwrap();
    assert_eq!((active_flows_slots.into_keys().collect(), highest_service), (vec![5], 9));
}

/// The second GC after a start of the agent corrects wrong counts, also those of slots that no flow uses.
#[test]
fn gc_corrects_wrong_active_counts() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    (1..4).for_each(|port| insert(&conntrack, &counted(protocol::TCP, port, ago(60))));
    conntrack.set_active_flows(5, -2);
    conntrack.set_active_flows(6, 7);
    let mut recount = Recount::default();
    for (five, six) in [(-2, 7), (3, 0), (3, 0)] {
        conntrack.expire_and_recount(NOW, &mut recount, None, None).unwrap();
        assert_eq!((conntrack.active_flows().get(5), conntrack.active_flows().get(6)), (five, six));
    }
    assert_eq!(recount.in_flows(), &[5].into());
}

#[test]
fn gc_rebuilds_the_lost_entry_of_a_flow() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    let flows = [1, 2].map(|port| flow(protocol::TCP, port, ago(3600)));
    insert(&conntrack, &[flows[0][0], flows[1][1]]);
    let orphan = flow(protocol::UDP, 3, ago(3600));
    insert(&conntrack, &orphan[1..]);
    let gc = conntrack.expire(NOW).unwrap();
    assert_eq!((gc.expired, gc.restored, gc.orphans), (0, 2, 1));
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
    let gc = conntrack.expire(NOW).unwrap();
    assert_eq!((gc.entries, gc.restored), (4, 0), "a second GC finds nothing to do");
}

/// Both entries of the first flow of a masqueraded connection.
fn first_of(protocol: u8, port: u16, last_seen: Tick) -> [(Tuple, Flow); 2] {
    flow(protocol, port, last_seen).map(|(key, flow)| {
        let flags = flow.flags | flow_flags::MASQUERADED;
        (key, Flow { flags, ..flow })
    })
}

/// Both entries of the second flow of a masqueraded connection. The second flow replaces the client's address by the
/// node's address.
fn second_of(first: &[(Tuple, Flow); 2], last_seen: Tick) -> [(Tuple, Flow); 2] {
    let to = first[0].1.to;
    let outside = Tuple { source: Address::from_v4([192, 0, 2, 254]), ..to };
    let [(_, forward), (_, reply)] = flow(to.protocol, to.source_port, last_seen);
    let flags = flow_flags::SECOND_OF_MASQUERADED;
    [
        (to, Flow { to: outside, flags: flags | flow_flags::AT_EGRESS, ..forward }),
        (outside.reversed(), Flow { to: to.reversed(), flags: flags | flow_flags::REPLY, ..reply }),
    ]
}

/// The client sends, but no packet reaches the egress hook, because the neighbour does not answer or a policy drops the
/// packets.
#[test]
fn masqueraded_flow_keeps_its_masquerade_while_its_packets_are_lost() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    let first = first_of(protocol::UDP, 1, ago(1));
    let second = second_of(&first, ago(3600));
    let outside = second[0].1.to;
    for halves in [&second[..], &second[..1], &second[1..]] {
        conntrack.flush().unwrap();
        insert(&conntrack, &first);
        insert(&conntrack, halves);
        let gc = conntrack.expire(NOW).unwrap();
        assert_eq!((gc.expired, gc.restored, gc.orphans), (0, 2 - halves.len(), 0));
        assert_eq!(conntrack.list().unwrap()[0].masqueraded, Some(outside));
        // One GC may delete only the first flow; the next GC then deletes the second flow.
        let later = Tick(NOW.0 + 1_000);
        let expired = conntrack.expire(later).unwrap().expired + conntrack.expire(later).unwrap().expired;
        assert_eq!((expired, conntrack.table().count().unwrap()), (2, 0));
    }
}

/// A backend leaves its Service: the agent deletes the first flow, and no FIN reaches the second one.
#[test]
fn second_flow_without_a_first_one_is_deleted_after_a_minute() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    let first = first_of(protocol::TCP, 1, ago(3600));
    // If one entry of the first flow is lost, GC restores that entry, and the second flow stays.
    for (of_first, silent, left) in
        [(&first[..], 3600, 4), (&first[..1], 3600, 4), (&first[1..], 3600, 4), (&[], 50, 2), (&[], 70, 0)]
    {
        conntrack.flush().unwrap();
        insert(&conntrack, &second_of(&first, ago(silent)));
        insert(&conntrack, of_first);
        let gc = conntrack.expire(NOW).unwrap();
        assert_eq!(conntrack.table().count().unwrap(), left, "silent for {silent} s: {gc:?}");
        assert_eq!(gc.evicted, 0, "nothing had to make room");
    }
}

#[test]
fn expired_masqueraded_connection_counts_once() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    let [_, expired] = around_timeout(Phase::Established);
    let first = flow(protocol::TCP, 1, expired);
    insert(&conntrack, &first);
    insert(&conntrack, &second_of(&first, expired));
    let passes = [NOW, Tick(NOW.0 + 100_000)].map(|now| conntrack.expire(now).unwrap());
    let sum = |of: fn(&GcReport) -> usize| passes.iter().map(of).sum::<usize>();
    assert_eq!((sum(|gc| gc.expired), sum(|gc| gc.expired_connections)), (2, 1), "{passes:?}");
}

/// A routed flow is masqueraded without a second flow: its forward entry also replaces the source. The VIP of a
/// NodePort is an address of the node, and often also the source of masqueraded packets; the second round tests this.
#[test]
fn masquerading_of_a_routed_flow_is_listed_and_purged_by_address() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    let [(key, forward), _] = flow(protocol::UDP, 1, ago(1));
    for node in [Address::from_v4([192, 0, 2, 254]), key.destination] {
        let outside = Tuple { source: node, source_port: 10_017, ..forward.to };
        let routed = |key: &Tuple, to: &Tuple, flags| {
            (*key, Flow::new(key, to, 7, flow_flags::ROUTED | flags, ago(1)))
        };
        insert(
            &conntrack,
            &[routed(&key, &outside, 0), routed(&outside.reversed(), &key.reversed(), flow_flags::REPLY)],
        );
        let listed = conntrack.list().unwrap();
        assert_eq!((listed.len(), listed[0].masqueraded), (1, Some(outside)));
        let mut seen = Vec::new();
        conntrack.for_each_connection(|connection| seen.push(connection.masqueraded)).unwrap();
        assert_eq!(seen, [Some(outside)], "without a list");
        let sources = conntrack.masquerade_sources().unwrap();
        assert_eq!(sources, [node.into()].into());
        assert_eq!(conntrack.purge_masqueraded(&sources).unwrap(), 1);
        assert_eq!(conntrack.table().count().unwrap(), 0);
    }
}

#[test]
fn purge_deletes_matching_flows_and_flush_deletes_all() {
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

/// Replaces both entries of the flow from client port `port` by those of a newer flow that has the same tuple, but
/// another Service and another counter.
fn replace_flow(conntrack: &Conntrack, port: u16, service: u32, active_flows_slot: u32) {
    for (key, entry) in counted(protocol::TCP, port, ago(1)) {
        assert!(conntrack.table().remove(&key).unwrap());
        insert(conntrack, &[(key, Flow { service, active_flows_slot, ..entry })]);
    }
}

/// After purge has read a flow, and before purge deletes it, a program replaces the flow by a newer one.
#[test]
fn purge_keeps_a_flow_that_replaced_the_matching_one() {
    for overflow_only in [false, true] {
        let sandbox = Sandbox::new();
        let conntrack = sandbox.open().conntrack();
        if overflow_only {
            insert_into_overflow_only(&sandbox);
        }
        insert(&conntrack, &counted(protocol::TCP, 1, ago(1)));
        conntrack.set_active_flows(5, 1);
        conntrack.set_active_flows(6, 1);
        let mut judged = 0;
        let purged = conntrack.purge(|_, flow| {
            judged += usize::from(flow.service == 7);
            if flow.service == 7 {
                replace_flow(&conntrack, 1, 8, 6);
            }
            flow.service == 7
        });
        assert_eq!((purged.unwrap(), judged), (0, 1), "overflow only: {overflow_only}");
        let left: Vec<_> = conntrack.list().unwrap();
        assert_eq!((left.len(), left[0].forward.service, left[0].reply.unwrap().service), (1, 8, 8));
        assert_eq!((conntrack.active_flows().get(5), conntrack.active_flows().get(6)), (1, 1));
    }
}

/// A program counts a packet in an entry and ends the flow of that entry after purge has read the entry.
#[test]
fn purge_deletes_a_flow_that_packets_changed_after_it_matched() {
    let sandbox = Sandbox::new();
    let conntrack = sandbox.open().conntrack();
    insert_into_overflow_only(&sandbox);
    let [(key, forward), reply] = counted(protocol::TCP, 1, ago(1));
    insert(&conntrack, &[(key, forward), reply]);
    conntrack.set_active_flows(5, 1);
    let map = Map::HashMap(MapData::from_pin(sandbox.pin("CONNTRACK")).unwrap());
    let mut overflow = HashMap::<_, Tuple, Flow>::try_from(map).unwrap();
    // An eBPF program that ends a flow decrements the flow's counter in the map `ACTIVE`, and sets `active_flows_slot`
    // to 0.
    let ended = Flow { packets: 9, last_seen: NOW, active_flows_slot: 0, ..forward };
    let purged = conntrack.purge(|_, _| overflow.insert(key, ended, 0).is_ok());
    assert_eq!((purged.unwrap(), conntrack.table().count().unwrap()), (1, 0));
    assert_eq!(conntrack.active_flows().get(5), 1, "the program has subtracted the flow");
}

/// A thread inserts and removes flows of one tuple, each with its own counter. If the thread cannot remove a flow, a
/// flush has deleted it. Flushes must subtract exactly the flows that they deleted.
#[test]
fn flush_subtracts_exactly_the_flows_that_it_deletes() {
    const COUNTERS: u32 = 1000;
    /// Number of entries in the table: enough that the walk of a flush takes milliseconds.
    const ENTRIES: u32 = 1 << 16;
    /// Number of flows that flushes must delete before the test ends.
    const DELETED: i64 = 20;
    /// Maximum number of flows that the thread inserts.
    const FLOWS: usize = 2_000;
    for overflow_only in [false, true] {
        let sandbox = Sandbox::new();
        let conntrack = open(&sandbox, ENTRIES).conntrack();
        if overflow_only {
            insert_into_overflow_only(&sandbox);
        }
        let lost = (0..COUNTERS).map(|_| AtomicI64::new(0)).collect::<Vec<_>>();
        let total = AtomicI64::new(0);
        let start = Instant::now();
        conntrack.flush().unwrap();
        let flush = start.elapsed();
        thread::scope(|scope| {
            let churn = scope.spawn(|| {
                let table = conntrack.table();
                let [(key, forward), _] = counted(protocol::TCP, 1, ago(1));
                for slot in (1..COUNTERS).cycle().take(FLOWS) {
                    let flow = Flow { service: slot, active_flows_slot: slot, ..forward };
                    let inserted = table.insert_new(&key, &flow).unwrap();
                    // Every fourth flow stays for twice the time of a flush, so that flushes delete some flows, no
                    // matter how the two threads are scheduled. The other flows are replaced while a flush walks the
                    // table.
                    if slot % 4 == 0 {
                        thread::sleep(2 * flush);
                    }
                    if inserted && !table.remove(&key).unwrap() {
                        lost[slot as usize].fetch_add(1, Ordering::Relaxed);
                        if total.fetch_add(1, Ordering::Relaxed) + 1 == DELETED {
                            break;
                        }
                    }
                }
            });
            while !churn.is_finished() {
                conntrack.flush().unwrap();
            }
        });
        let deleted: Vec<i64> = (0..COUNTERS).map(|slot| -conntrack.active_flows().get(slot)).collect();
        assert_eq!(total.into_inner(), DELETED, "flows that flushes deleted, of {FLOWS}");
        let lost: Vec<i64> = lost.into_iter().map(AtomicI64::into_inner).collect();
        assert_eq!(deleted, lost, "overflow only: {overflow_only}");
    }
}

/// The limit is a multiple of the time that filling the table takes, because a slow machine takes longer for both.
#[test]
fn gc_of_200_000_entries_costs_little_cpu_time() {
    let sandbox = Sandbox::new();
    let conntrack = Datapath::open(&Options::new(sandbox.bpffs())).unwrap().conntrack();
    let entries: Vec<_> = (0..100_000u32)
        .flat_map(|number| {
            let port = u16::try_from(number % 50_000 + 1).unwrap();
            flow(if number < 50_000 { protocol::TCP } else { protocol::UDP }, port, ago(1))
        })
        .collect();
    let ((), reference) = cpu_time(|| insert(&conntrack, &entries));
    let (gc, cost) = cpu_time(|| conntrack.expire(NOW).unwrap());
    assert_eq!((gc.entries, gc.expired), (200_000, 0));
    let (gc_of_all, cost_of_all) = cpu_time(|| conntrack.expire(Tick(NOW.0 + 100_000)).unwrap());
    assert_eq!((gc_of_all.expired, gc_of_all.orphans), (100_000, 0));
    println!("200,000 entries: filled in {reference:?}, GC {cost:?}, GC that expires all {cost_of_all:?}");
    assert_eq!(conntrack.table().count().unwrap(), 0);
    assert!(cost < reference * COST_LIMIT, "GC took {cost:?}, filling the table {reference:?}");
}
