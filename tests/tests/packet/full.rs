//! No room: a full `CONNTRACK`, and source ports that are all taken.

use lb_common::{
    Outcome,
    conntrack::{Flow, Phase, Tick, Tuple, flow_flags},
};

use super::{
    bench::{Bench, Device, Hook, UDP},
    packets::Packet,
    stage::Family,
};

/// Whatever fits: a flow that exists goes on, one that does not fit leaves nothing behind.
#[test]
fn conntrack_full() {
    // With 2 entries there is no room for the reply direction of a second flow, with 3 none for its own.
    for (entries, flows) in [(1, 0), (2, 1), (3, 1)] {
        let mut bench = Bench::with_size("CONNTRACK", entries);
        for family in Family::BOTH {
            bench.start(&format!("room for {entries} entries, {family:?}"), Device::Ethernet);
            bench.service(family.vip(), UDP, &[family.backend()]);
            let packet = Packet::udp(family.client(), family.vip(), b"x");
            let translated = packet.clone().to(family.backend());
            if flows == 1 {
                bench.send(Hook::Ingress, &packet).passes(Outcome::NewFlow, &translated);
            }
            let another = Packet::udp(family.stranger(), family.vip(), b"x");
            for _ in 0..2 {
                bench.send(Hook::Ingress, &another).drops(Outcome::ConntrackFull);
                bench.assert_flows(flows);
            }
            if flows == 1 {
                bench.send(Hook::Ingress, &packet).passes(Outcome::Forward, &translated);
                bench.assert_flow(&packet, &translated, Phase::Unreplied);
            }
        }
    }
}

/// Every port of the client is taken by somebody's flow to the same backend.
#[test]
fn no_source_port() {
    let mut bench = Bench::with_size("CONNTRACK", 70_000);
    for family in Family::BOTH {
        bench.start(&format!("no source port, {family:?}"), Device::Ethernet);
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        bench.service(vip, UDP, &[backend]);
        let from_other_vip = Packet::udp(family.other_vip(), client, b"").tuple();
        for port in 1024..=u16::MAX {
            let reply = Packet::udp(backend, (client.ip(), port).into(), b"").tuple();
            let to = Tuple { destination_port: port, ..from_other_vip };
            let flags = flow_flags::REPLY | flow_flags::AT_EGRESS;
            let flow = Flow::new(&reply, &to, 1, flags, Tick(0));
            bench.conntrack().insert(reply, flow, 0).unwrap();
        }
        let before = bench.flows();
        let packet = Packet::udp(client, vip, b"x");
        bench.send(Hook::Ingress, &packet).drops(Outcome::NoSourcePort);
        assert_eq!(bench.flows(), before, "nothing is left behind");

        // One that is the client's own and free is enough.
        let free = Packet::udp((client.ip(), 1023).into(), vip, b"x");
        bench.send(Hook::Ingress, &free).passes(Outcome::NewFlow, &free.clone().to(backend));
    }
}
