//! Services without backends: the packet becomes its own rejection.

use etherparse::{IpNumber, Ipv6RawExtHeader};
use lb_common::{Outcome, Outcome::*};

use super::{
    bench::{Bench, Device, Hook, TCP, UDP},
    packets::{Packet, QINQ, VLAN, fragments},
    stage::{Family, each, each_on},
};

/// What Linux gives packets of its own.
const HOP_LIMIT: u8 = 64;

/// The kernel forgets the sum over a frame whose length changes, but the test run would want it.
const RESIZED: [Device; 2] = [Device::Ethernet, Device::Bare];

fn empty_services(bench: &mut Bench, family: Family) {
    for protocol in [TCP, UDP] {
        bench.service(family.empty_vip(), protocol, &[]);
    }
}

fn segment(family: Family, payload: &[u8]) -> Packet {
    Packet::tcp(family.client(), family.empty_vip(), 1000, payload)
}

fn datagram(family: Family, payload: &[u8]) -> Packet {
    Packet::udp(family.client(), family.empty_vip(), payload)
}

/// As the host behind the VIP would send it.
pub(super) fn our_own(mut answer: Packet) -> Packet {
    match &mut answer.ip {
        etherparse::IpHeaders::Ipv4(header, _) => {
            header.time_to_live = HOP_LIMIT;
            header.identification = 0;
        }
        etherparse::IpHeaders::Ipv6(header, _) => header.hop_limit = HOP_LIMIT,
    }
    answer.bounced()
}

/// The RST that the client gets (RFC 9293 §3.10.7.1).
fn reset(family: Family, seq: u32) -> Packet {
    let mut packet = Packet::tcp(family.empty_vip(), family.client(), seq, b"").rst();
    packet.tcp_header().window_size = 0;
    our_own(packet)
}

/// The port unreachable that the client gets, quoting `octets` of its packet.
fn unreachable(family: Family, packet: &Packet, octets: usize) -> Packet {
    let kind = if family == Family::V4 { [3, 3] } else { [1, 4] };
    let (from, to) = (family.empty_vip().ip(), family.client().ip());
    our_own(Packet::icmp(from, to, kind, [0; 4], &packet.network()[..octets]))
}

#[track_caller]
fn rejected(bench: &mut Bench, packet: &Packet, outcome: Outcome, answer: &Packet) {
    bench.send(Hook::Ingress, packet).bounces(outcome, answer);
    bench.assert_flows(0);
}

#[test]
fn tcp() {
    each_on(&RESIZED, "reject TCP", |bench, family| {
        empty_services(bench, family);
        let cases = [
            ("SYN", segment(family, b"").syn(), reset(family, 0).ack(1001)),
            ("SYN with data", segment(family, b"early").syn(), reset(family, 0).ack(1006)),
            ("ACK", segment(family, b"").ack(5001), reset(family, 5001)),
            ("data", segment(family, &[0xa5; 1400]).ack(5001), reset(family, 5001)),
            ("FIN", segment(family, b"").fin().ack(u32::MAX), reset(family, u32::MAX)),
            ("FIN without ACK", segment(family, b"x").fin(), reset(family, 0).ack(1002)),
            ("no flags", segment(family, b"xyz"), reset(family, 0).ack(1003)),
            ("SYN-ACK", segment(family, b"").syn().ack(7), reset(family, 7)),
        ];
        for (name, packet, answer) in cases {
            bench.label(name);
            rejected(bench, &packet, RejectTcp, &answer);
            bench.label(&format!("{name}, padded"));
            rejected(bench, &packet.padded(), RejectTcp, &answer);
        }
        bench.label("options of the SYN");
        let packet = segment(family, b"").syn().with(|packet| {
            packet.tcp_header().set_options_raw(&[2, 4, 5, 0xb4, 4, 2, 1, 3, 3, 7, 1, 1]).unwrap();
        });
        rejected(bench, &packet, RejectTcp, &reset(family, 0).ack(1001));
    });
}

#[test]
fn udp() {
    each_on(&RESIZED, "reject UDP", |bench, family| {
        empty_services(bench, family);
        let network = if family == Family::V4 { 20 } else { 40 };
        for payload in [&[0xa5; 1400][..], b"", b"x", b"odd", b"even"] {
            bench.label(&format!("{} octets", payload.len()));
            let packet = datagram(family, payload);
            rejected(bench, &packet, RejectUdp, &unreachable(family, &packet, network + 8));
            bench.label(&format!("{} octets, padded", payload.len()));
            let answer = unreachable(family, &packet, network + 8);
            rejected(bench, &packet.padded(), RejectUdp, &answer);
        }
    });
}

/// Where the answer has the length of the packet, the kernel keeps its sum over the frame: it must be right.
#[test]
fn answers_of_the_same_length() {
    each("reject, same length", |bench, family| {
        empty_services(bench, family);
        rejected(bench, &segment(family, b"").syn(), RejectTcp, &reset(family, 0).ack(1001));
        rejected(bench, &segment(family, b"").ack(5001), RejectTcp, &reset(family, 5001));
        let quote = if family == Family::V4 { 28 } else { 48 };
        let packet = datagram(family, &vec![0xa5; quote]);
        rejected(bench, &packet, RejectUdp, &unreachable(family, &packet, quote));
    });
}

#[test]
fn ipv4_options_are_quoted_but_not_answered() {
    each_on(&RESIZED, "reject, IPv4 options", |bench, family| {
        if family == Family::V6 {
            return;
        }
        empty_services(bench, family);
        for length in [4, 20, 40] {
            bench.label(&format!("{length} octets of options"));
            let options = |packet: &mut Packet| {
                packet.v4().options = vec![1; length].as_slice().try_into().unwrap();
            };
            let syn = segment(family, b"").syn().with(options);
            rejected(bench, &syn, RejectTcp, &reset(family, 0).ack(1001));
            let packet = datagram(family, b"question").with(options);
            rejected(bench, &packet, RejectUdp, &unreachable(family, &packet, 20 + length + 8));
        }
    });
}

#[test]
fn ipv6_extension_headers_are_quoted_but_not_answered() {
    each_on(&RESIZED, "reject, IPv6 extensions", |bench, family| {
        if family == Family::V4 {
            return;
        }
        empty_services(bench, family);
        // The quote has at most 120 octets: the network header, 72 of extensions, 8 of UDP.
        for (length, quote) in [(8, 56), (72, 120), (80, 120), (400, 120)] {
            bench.label(&format!("{length} octets of options"));
            let options = |packet: &mut Packet| {
                let header = Ipv6RawExtHeader::new_raw(IpNumber::TCP, &vec![0; length - 2]).unwrap();
                packet.extensions().hop_by_hop_options = Some(header);
            };
            let syn = segment(family, b"").syn().with(options);
            rejected(bench, &syn, RejectTcp, &reset(family, 0).ack(1001));
            let packet = datagram(family, b"question").with(options);
            rejected(bench, &packet, RejectUdp, &unreachable(family, &packet, quote));
        }
    });
}

#[test]
fn vlan_tags_stay() {
    each_on(&[Device::Ethernet], "reject, tagged", |bench, family| {
        empty_services(bench, family);
        for tags in [vec![(VLAN, 7)], vec![(QINQ, 8), (VLAN, 7)]] {
            let tagged = |packet: &mut Packet| *packet.tags() = tags.clone();
            let syn = segment(family, b"").syn().with(tagged);
            rejected(bench, &syn, RejectTcp, &reset(family, 0).ack(1001).with(tagged));
            let packet = datagram(family, b"question").with(tagged);
            let quote = if family == Family::V4 { 28 } else { 48 };
            rejected(bench, &packet, RejectUdp, &unreachable(family, &packet, quote).with(tagged));
        }
    });
}

/// The first fragment says what there is to say (RFC 1122 §3.2.2); the others find no flow.
#[test]
fn fragments_of_a_datagram() {
    each_on(&RESIZED, "reject, fragments", |bench, family| {
        empty_services(bench, family);
        let parts = fragments(&datagram(family, &[0xa5; 100]), 77, 64);
        let quote = if family == Family::V4 { 28 } else { 56 };
        rejected(bench, &parts[0], RejectUdp, &unreachable(family, &parts[0], quote));
        bench.send(Hook::Ingress, &parts[1]).passes_untouched(UnknownFragment);
        bench.assert_flows(0);
    });
}

/// Nothing is answered on the way out: the packet would go to where it did not come from.
#[test]
fn egress_rejects_nothing() {
    each("reject at egress", |bench, family| {
        empty_services(bench, family);
        for packet in [segment(family, b"").syn(), datagram(family, b"x")] {
            bench.send(Hook::Egress, &packet).passes_untouched(NoService);
        }
    });
}
