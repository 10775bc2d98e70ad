//! A full flow table, a full overflow, and no free source port.

use std::{thread, time::Duration};

use lb_common::{
    Outcome,
    conntrack::{Flow, Phase, Tick, Tuple, flow_flags, seen},
};

use super::{
    packets::Packet,
    stage::Family,
    testbed::{Device, Hook, TCP, Testbed, UDP},
};

/// An existing flow continues. A flow that does not fit leaves no entry.
#[test]
fn full_conntrack_drops_new_flows_and_keeps_existing_ones() {
    // Each flow needs two entries, so a map of 3 has room for one flow, and for only one entry of a second flow.
    for (entries, flows) in [(1, 0), (2, 1), (3, 1)] {
        let mut bed = Testbed::with_size("CONNTRACK", entries);
        for family in Family::BOTH {
            bed.start(&format!("room for {entries} entries, {family:?}"), Device::Ethernet);
            bed.take_all_into_overflow(true);
            bed.service(family.vip(), UDP, &[family.backend()]);
            let packet = Packet::udp(family.client(), family.vip(), b"x");
            let translated = packet.clone().to(family.backend());
            if flows == 1 {
                bed.send(Hook::Ingress, &packet).passes(Outcome::NewFlow, &translated);
            }
            let another = Packet::udp(family.stranger(), family.vip(), b"x");
            for _ in 0..2 {
                bed.send(Hook::Ingress, &another).drops(Outcome::ConntrackFull);
                bed.assert_flows(flows);
            }
            if flows == 1 {
                bed.send(Hook::Ingress, &packet).passes(Outcome::Forward, &translated);
                bed.assert_flow(&packet, &translated, Phase::Unreplied);
            }
        }
    }
}

const ESTABLISHED: u8 = seen::PACKET | seen::SYN | seen::ACK;

/// The most ticks for which [`fill_places`] makes a flow idle.
const MOST_IDLE: u32 = Phase::Opening.timeout_seconds() + 10;

/// Fills all places of the tuple with forward entries of other TCP connections, inserts their reverse entries, and
/// returns the keys of the forward entries. `seen` has the flags of both directions; `idle` returns for how many ticks
/// the connection of a place has been idle.
fn fill_places(bed: &mut Testbed, tuple: &Tuple, seen: [u8; 2], idle: impl Fn(usize) -> u32) -> Vec<Tuple> {
    // Ticks count from boot, and a guest may have booted just now.
    while lb_datapath::Conntrack::now().0 <= MOST_IDLE {
        thread::sleep(Duration::from_secs(1));
    }
    let (now, places) = (lb_datapath::Conntrack::now(), bed.places(tuple));
    let fill = |(nth, index): (usize, u32)| {
        let port = 50_000 + u16::try_from(nth).unwrap();
        let from = Tuple { source_port: port, protocol: TCP, ..*tuple };
        let to = Tuple { destination_port: 9999, ..from };
        let last_seen = Tick(now.0 - idle(nth));
        let flow = Flow::new(&from, &to, 1, 0, last_seen);
        let flags = flow_flags::reverse(0);
        let reply = Flow::new(&to.reversed(), &from.reversed(), 1, flags, last_seen);
        bed.put_into_slot(index, &from, &Flow { seen: seen[0], ..flow });
        bed.insert_entry(&to.reversed(), &Flow { seen: seen[1], ..reply });
        from
    };
    places.into_iter().enumerate().map(fill).collect()
}

/// A flow whose places all have established connections goes to the overflow, and works like any other.
#[test]
fn flow_without_a_free_slot_enters_the_overflow_and_evicts_no_established_connection() {
    let mut bed = Testbed::new();
    for family in Family::BOTH {
        bed.start(&format!("no place, {family:?}"), Device::Ethernet);
        bed.service(family.vip(), UDP, &[family.backend()]);
        let packet = Packet::udp(family.client(), family.vip(), b"x");
        let translated = packet.clone().to(family.backend());
        fill_places(&mut bed, &packet.tuple(), [ESTABLISHED; 2], |_| 20);
        let before = bed.flows();
        bed.send(Hook::Ingress, &packet).passes(Outcome::NewFlow, &translated);
        assert!(bed.overflow().get(&packet.tuple(), 0).is_ok(), "the entry is in the overflow");
        bed.send(Hook::Ingress, &packet).passes(Outcome::Forward, &translated);
        bed.assert_flow(&packet, &translated, Phase::Unreplied);
        let reply = Packet::udp(family.backend(), family.client(), b"y");
        let from_vip = Packet::udp(family.vip(), family.client(), b"y");
        bed.send(Hook::Egress, &reply).passes(Outcome::Reply, &from_vip);
        bed.assert_flow(&packet, &translated, Phase::Replied);
        let after = bed.flows();
        assert_eq!(after.len(), before.len() + 2);
        assert!(before.iter().all(|(key, flow)| after.get(key) == Some(flow)), "all connections stay");
    }
}

/// A new flow evicts an expired entry, or else one of an unproven connection, together with its reverse entry.
#[test]
fn flow_without_a_free_slot_evicts_an_expired_or_else_an_unproven_connection() {
    const OPENING: [u8; 2] = [seen::PACKET | seen::SYN, 0];
    for (case, idle, expected) in [
        ("the fifth has expired, all others are unproven", [20, 20, 20, 20, MOST_IDLE, 20, 20, 20], 4),
        ("the seventh alone is unproven", [0, 0, 0, 0, 0, 0, 20, 0], 6),
    ] {
        let mut bed = Testbed::new();
        for family in Family::BOTH {
            bed.start(&format!("{case}, {family:?}"), Device::Ethernet);
            bed.service(family.vip(), UDP, &[family.backend()]);
            let packet = Packet::udp(family.client(), family.vip(), b"x");
            let translated = packet.clone().to(family.backend());
            let others = fill_places(&mut bed, &packet.tuple(), OPENING, |nth| idle[nth]);
            let before = bed.flows();
            bed.send(Hook::Ingress, &packet).passes(Outcome::NewFlow, &translated);
            bed.assert_flow(&packet, &translated, Phase::Unreplied);
            assert_eq!(bed.header().overflow, 0, "{case}");
            let after = bed.flows();
            let evicted: Vec<_> = before.keys().filter(|key| !after.contains_key(key)).copied().collect();
            let reverse = before[&others[expected]].to.reversed();
            let mut wanted = vec![others[expected], reverse];
            wanted.sort();
            assert_eq!(evicted, wanted, "{case}");
        }
    }
}

/// If the overflow has no room either, the program drops the packet and leaves no entry.
#[test]
fn flow_without_free_slot_and_overflow_is_dropped() {
    let mut bed = Testbed::with_size("CONNTRACK", 1);
    for family in Family::BOTH {
        bed.start(&format!("no place and no overflow, {family:?}"), Device::Ethernet);
        bed.service(family.vip(), UDP, &[family.backend()]);
        let packet = Packet::udp(family.client(), family.vip(), b"x");
        fill_places(&mut bed, &packet.tuple(), [ESTABLISHED; 2], |_| 0);
        let unrelated = Tuple { source_port: 1, ..packet.tuple() };
        bed.take_all_into_overflow(true);
        bed.insert_entry(&unrelated, &Flow::new(&unrelated, &unrelated, 1, 0, Tick(0)));
        bed.take_all_into_overflow(false);
        let before = bed.flows();
        bed.send(Hook::Ingress, &packet).drops(Outcome::ConntrackFull);
        assert_eq!(bed.flows(), before);
    }
}

/// Other flows to the same backend have taken every port that the client could get.
#[test]
fn flow_without_a_free_source_port_is_dropped() {
    let mut bed = Testbed::with_size("CONNTRACK", 70_000);
    for family in Family::BOTH {
        bed.start(&format!("no source port, {family:?}"), Device::Ethernet);
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        let from_other_vip = Packet::udp(family.other_vip(), client, b"").tuple();
        // These reverse entries have no forward entries. They do not expire during the test.
        let later = Tick(lb_datapath::Conntrack::now().0 + 3600);
        for port in 1024..=u16::MAX {
            let reply = Packet::udp(backend, (client.ip(), port).into(), b"").tuple();
            let to = Tuple { destination_port: port, ..from_other_vip };
            let flags = flow_flags::REPLY | flow_flags::AT_EGRESS;
            let flow = Flow::new(&reply, &to, 1, flags, later);
            bed.insert_entry(&reply, &flow);
        }
        let before = bed.flows();
        let packet = Packet::udp(client, vip, b"x");
        bed.send(Hook::Ingress, &packet).drops(Outcome::NoSourcePort);
        assert_eq!(bed.flows(), before, "no entry is left");

        // A client whose own port is free needs no other port, so its flow begins.
        let free = Packet::udp((client.ip(), 1023).into(), vip, b"x");
        bed.send(Hook::Ingress, &free).passes(Outcome::NewFlow, &free.clone().to(backend));
    }
}
