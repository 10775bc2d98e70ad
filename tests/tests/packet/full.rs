//! A full `CONNTRACK`, and no free source port.

use lb_common::{
    Outcome,
    conntrack::{Flow, Phase, Tick, Tuple, flow_flags},
};

use super::{
    packets::Packet,
    stage::Family,
    testbed::{Device, Hook, Testbed, UDP},
};

/// An existing flow continues. A flow that does not fit leaves no entry.
#[test]
fn full_conntrack_drops_new_flows_and_keeps_existing_ones() {
    // A map of 2 entries has no room for a second flow, one of 3 entries none for its second entry.
    for (entries, flows) in [(1, 0), (2, 1), (3, 1)] {
        let mut bed = Testbed::with_size("CONNTRACK", entries);
        for family in Family::BOTH {
            bed.start(&format!("room for {entries} entries, {family:?}"), Device::Ethernet);
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

/// Other flows to the same backend have taken every port that the client could get.
#[test]
fn flow_without_a_free_source_port_is_dropped() {
    let mut bed = Testbed::with_size("CONNTRACK", 70_000);
    for family in Family::BOTH {
        bed.start(&format!("no source port, {family:?}"), Device::Ethernet);
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bed.service(vip, UDP, &[backend]);
        let from_other_vip = Packet::udp(family.other_vip(), client, b"").tuple();
        for port in 1024..=u16::MAX {
            let reply = Packet::udp(backend, (client.ip(), port).into(), b"").tuple();
            let to = Tuple { destination_port: port, ..from_other_vip };
            let flags = flow_flags::REPLY | flow_flags::AT_EGRESS;
            let flow = Flow::new(&reply, &to, 1, flags, Tick(0));
            bed.insert_entry(&reply, &flow);
        }
        let before = bed.flows();
        let packet = Packet::udp(client, vip, b"x");
        bed.send(Hook::Ingress, &packet).drops(Outcome::NoSourcePort);
        assert_eq!(bed.flows(), before, "no entry is left");

        // The client's own port suffices if it is free.
        let free = Packet::udp((client.ip(), 1023).into(), vip, b"x");
        bed.send(Hook::Ingress, &free).passes(Outcome::NewFlow, &free.clone().to(backend));
    }
}
