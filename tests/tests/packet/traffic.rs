//! The packet and byte counts of flows, at tc and at XDP.

use bytemuck::Zeroable as _;
use lb_common::{Service, conntrack::Flow, service_flags};

use super::{
    packets::Packet,
    stage::{Family, PORTS, each, each_on, masquerade_settings},
    testbed::{Device, Hook, TCP, Testbed, UDP},
    wire::{Mode, each_on_wires},
};

/// Packets and bytes.
type Counted = (u32, u64);

fn counted(flow: &Flow) -> Counted {
    (flow.packets, flow.bytes())
}

fn sum(packets: &[Packet]) -> Counted {
    let bytes = packets.iter().map(|packet| packet.network().len() as u64).sum();
    (u32::try_from(packets.len()).unwrap(), bytes)
}

/// A flow over TCP or UDP: the client's packets and the backend's.
fn conversation(family: Family, protocol: u8) -> (Vec<Packet>, Vec<Packet>) {
    let (client, vip, backend) = (family.client(), family.vip(), family.backend());
    if protocol == UDP {
        let there = [&b"a"[..], b"question", b""].map(|data| Packet::udp(client, vip, data)).to_vec();
        return (there, vec![Packet::udp(backend, client, b"an answer"); 2]);
    }
    let there = vec![
        Packet::tcp(client, vip, 1000, b"").syn(),
        Packet::tcp(client, vip, 1001, b"GET / HTTP/1.1").ack(5001),
        Packet::tcp(client, vip, 1015, b"").fin().ack(6001),
    ];
    let back = vec![
        Packet::tcp(backend, client, 5000, b"").syn().ack(1001),
        Packet::tcp(backend, client, 5001, &[7; 1000]).ack(1015),
    ];
    (there, back)
}

#[test]
fn flow_counts_its_packets_and_bytes() {
    each("counted", |bed, family| {
        for protocol in [TCP, UDP] {
            bed.clear_flows();
            bed.service(family.vip(), protocol, &[family.backend()]);
            let (there, back) = conversation(family, protocol);
            for packet in &there {
                let _sent = bed.send(Hook::Ingress, packet);
            }
            for packet in &back {
                let _sent = bed.send(Hook::Egress, packet);
            }
            let flows = bed.flows();
            assert_eq!(counted(&flows[&there[0].tuple()]), sum(&there));
            assert_eq!(counted(&flows[&back[0].tuple()]), sum(&back));
        }
    });
}

/// Ethernet frames have at least 60 bytes. Padding is not part of the packet.
#[test]
fn padding_is_not_counted() {
    each_on(&[Device::Ethernet], "counted, padded", |bed, family| {
        bed.service(family.vip(), UDP, &[family.backend()]);
        let packet = Packet::udp(family.client(), family.vip(), b"x");
        let mut bytes = packet.bytes();
        bytes.resize(bytes.len() + 17, 0);
        let _sent = bed.send_bytes(Hook::Ingress, &bytes);
        let _sent = bed.send_bytes(Hook::Ingress, &bytes);
        assert_eq!(counted(&bed.flows()[&packet.tuple()]), sum(&[packet.clone(), packet]));
    });
}

#[test]
fn xdp_counts_as_tc_does() {
    each_on_wires("counted at XDP", |bed, family| {
        for (mode, protocol) in [(Mode::Native, TCP), (Mode::Native, UDP), (Mode::Generic, TCP)] {
            bed.clear_flows();
            let record = Service { id: 1, flags: service_flags::MASQUERADE, ..Service::zeroed() };
            bed.service_with(family.vip(), protocol, &[family.backend()], record);
            bed.settings(&masquerade_settings(PORTS));
            let (there, back) = conversation(family, protocol);
            for packet in &there {
                let _run = bed.arrive(mode, packet);
            }
            let to = bed.flows()[&there[0].tuple()].to;
            let node = to.source_socket();
            let back: Vec<Packet> = back.into_iter().map(|packet| packet.to(node)).collect();
            for packet in &back {
                let _run = bed.arrive(mode, packet);
            }
            let flows = bed.flows();
            assert_eq!(counted(&flows[&there[0].tuple()]), sum(&there));
            assert_eq!(counted(&flows[&back[0].tuple()]), sum(&back));
        }
    });
}

/// A periodic reader of the entry must see the packets of both connections.
#[test]
fn flow_that_replaces_another_continues_its_counts() {
    each("counted on", |bed, family| {
        bed.service(family.vip(), TCP, &[family.backend()]);
        let (there, back) = conversation(family, TCP);
        let mut sent = Vec::new();
        for generation in 0..3 {
            connect_and_reset(bed, &there, &back);
            sent.extend_from_slice(&there[..2]);
            sent.push(reset(family));
            let flow = bed.flows()[&there[0].tuple()];
            assert_eq!((counted(&flow), flow.generation()), (sum(&sent), generation));
        }
    });
}

fn connect_and_reset(bed: &mut Testbed, there: &[Packet], back: &[Packet]) {
    let _sent = bed.send(Hook::Ingress, &there[0]);
    let _sent = bed.send(Hook::Egress, &back[0]);
    let _sent = bed.send(Hook::Ingress, &there[1]);
    let family = if there[0].is_v4() { Family::V4 } else { Family::V6 };
    let _sent = bed.send(Hook::Ingress, &reset(family));
}

fn reset(family: Family) -> Packet {
    Packet::tcp(family.client(), family.vip(), 1015, b"").rst()
}
