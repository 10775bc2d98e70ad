//! Services without backends: the program turns the packet into its rejection.

use bytemuck::Zeroable as _;
use etherparse::{IpNumber, Ipv6RawExtHeader};
use lb_common::{Outcome, Outcome::*, Service, service_flags};

use super::{
    packets::{Packet, fragments},
    stage::{Family, RESIZED, each, each_on},
    testbed::{Hook, TCP, Testbed, UDP},
};

/// The TTL or hop limit with which Linux sends packets by default.
const HOP_LIMIT: u8 = 64;

fn empty_services(bed: &mut Testbed, family: Family) {
    for protocol in [TCP, UDP] {
        bed.service(family.empty_vip(), protocol, &[]);
    }
}

fn segment(family: Family, payload: &[u8]) -> Packet {
    Packet::tcp(family.client(), family.empty_vip(), 1000, payload)
}

fn datagram(family: Family, payload: &[u8]) -> Packet {
    Packet::udp(family.client(), family.empty_vip(), payload)
}

/// The packet `answer` as the host of the VIP would send it.
pub(super) fn our_own(mut answer: Packet) -> Packet {
    match &mut answer.ip {
        etherparse::IpHeaders::Ipv4(header, _) => {
            header.time_to_live = HOP_LIMIT;
            header.identification = 0;
        }
        etherparse::IpHeaders::Ipv6(header, _) => header.hop_limit = HOP_LIMIT,
    }
    answer.swapped_macs()
}

/// The RST that the client gets (RFC 9293 §3.10.7.1).
fn reset(family: Family, seq: u32) -> Packet {
    let mut packet = Packet::tcp(family.empty_vip(), family.client(), seq, b"").rst();
    packet.tcp_header().window_size = 0;
    our_own(packet)
}

/// The ICMP error "port unreachable" that the client gets. It quotes the first `bytes` bytes of the client's packet.
fn unreachable(family: Family, packet: &Packet, bytes: usize) -> Packet {
    let kind = if family == Family::V4 { [3, 3] } else { [1, 4] };
    let (from, to) = (family.empty_vip().ip(), family.client().ip());
    our_own(Packet::icmp(from, to, kind, [0; 4], &packet.network()[..bytes]))
}

#[track_caller]
fn rejected(bed: &mut Testbed, packet: &Packet, outcome: Outcome, answer: &Packet) {
    bed.send(Hook::Ingress, packet).redirects(outcome, answer);
    bed.assert_flows(0);
}

#[test]
fn tcp_segment_is_answered_by_a_rst() {
    each_on(&RESIZED, "reject TCP", |bed, family| {
        empty_services(bed, family);
        let cases = [
            ("SYN", segment(family, b"").syn(), reset(family, 0).ack(1001)),
            ("SYN with data", segment(family, b"early").syn(), reset(family, 0).ack(1006)),
            ("ACK", segment(family, b"").ack(5001), reset(family, 5001)),
            ("data", segment(family, &[0xa5; 1400]).ack(5001), reset(family, 5001)),
            ("FIN", segment(family, b"").fin().ack(u32::MAX), reset(family, u32::MAX)),
            ("SYN-ACK", segment(family, b"").syn().ack(7), reset(family, 7)),
        ];
        for (name, packet, answer) in cases {
            bed.label(name);
            rejected(bed, &packet, RejectTcp, &answer);
            bed.label(&format!("{name}, padded"));
            rejected(bed, &packet.padded(), RejectTcp, &answer);
        }
        for packet in [segment(family, b"x").fin(), segment(family, b"xyz")] {
            bed.label("invalid flags");
            bed.send(Hook::Ingress, &packet).drops(InvalidFlags);
        }
        bed.label("options of the SYN");
        let packet = segment(family, b"").syn().with(|packet| {
            packet.tcp_header().set_options_raw(&[2, 4, 5, 0xb4, 4, 2, 1, 3, 3, 7, 1, 1]).unwrap();
        });
        rejected(bed, &packet, RejectTcp, &reset(family, 0).ack(1001));
    });
}

#[test]
fn datagram_is_answered_by_port_unreachable() {
    each_on(&RESIZED, "reject UDP", |bed, family| {
        empty_services(bed, family);
        let network = if family == Family::V4 { 20 } else { 40 };
        for payload in [&[0xa5; 1400][..], b"", b"x", b"odd", b"even"] {
            bed.label(&format!("{} bytes", payload.len()));
            let packet = datagram(family, payload);
            rejected(bed, &packet, RejectUdp, &unreachable(family, &packet, network + 8));
            bed.label(&format!("{} bytes, padded", payload.len()));
            let answer = unreachable(family, &packet, network + 8);
            rejected(bed, &packet.padded(), RejectUdp, &answer);
        }
    });
}

/// If the answer is as long as the packet, the kernel keeps the sum over the frame, which must be correct.
#[test]
fn checksum_complete_stays_correct_for_an_answer_of_the_same_length() {
    each("reject, same length", |bed, family| {
        empty_services(bed, family);
        rejected(bed, &segment(family, b"").syn(), RejectTcp, &reset(family, 0).ack(1001));
        rejected(bed, &segment(family, b"").ack(5001), RejectTcp, &reset(family, 5001));
        let quote = if family == Family::V4 { 28 } else { 48 };
        let packet = datagram(family, &vec![0xa5; quote]);
        rejected(bed, &packet, RejectUdp, &unreachable(family, &packet, quote));
    });
}

#[test]
fn ipv4_options_are_quoted_and_not_copied() {
    each_on(&RESIZED, "reject, IPv4 options", |bed, family| {
        if family == Family::V6 {
            return;
        }
        empty_services(bed, family);
        for length in [4, 20, 40] {
            bed.label(&format!("{length} bytes of options"));
            let options = |packet: &mut Packet| {
                packet.v4().options = vec![1; length].as_slice().try_into().unwrap();
            };
            let syn = segment(family, b"").syn().with(options);
            rejected(bed, &syn, RejectTcp, &reset(family, 0).ack(1001));
            let packet = datagram(family, b"question").with(options);
            rejected(bed, &packet, RejectUdp, &unreachable(family, &packet, 20 + length + 8));
        }
    });
}

#[test]
fn ipv6_extension_headers_are_quoted_and_not_copied() {
    each_on(&RESIZED, "reject, IPv6 extensions", |bed, family| {
        if family == Family::V4 {
            return;
        }
        empty_services(bed, family);
        // The quote has at most 120 bytes: network header, 72 bytes of extensions, 8 of UDP.
        for (length, quote) in [(8, 56), (72, 120), (80, 120), (400, 120)] {
            bed.label(&format!("{length} bytes of options"));
            let options = |packet: &mut Packet| {
                let header = Ipv6RawExtHeader::new_raw(IpNumber::TCP, &vec![0; length - 2]).unwrap();
                packet.extensions().hop_by_hop_options = Some(header);
            };
            let syn = segment(family, b"").syn().with(options);
            rejected(bed, &syn, RejectTcp, &reset(family, 0).ack(1001));
            let packet = datagram(family, b"question").with(options);
            rejected(bed, &packet, RejectUdp, &unreachable(family, &packet, quote));
        }
    });
}

/// Only the first fragment is answered (RFC 1122 §3.2.2).
#[test]
fn first_fragment_is_rejected_and_later_ones_are_dropped() {
    each_on(&RESIZED, "reject, fragments", |bed, family| {
        empty_services(bed, family);
        let parts = fragments(&datagram(family, &[0xa5; 100]), 77, 64);
        let quote = if family == Family::V4 { 28 } else { 56 };
        rejected(bed, &parts[0], RejectUdp, &unreachable(family, &parts[0], quote));
        bed.send(Hook::Ingress, &parts[1]).drops(FragmentDropped);
        bed.assert_flows(0);
    });
}

/// At egress the answer would leave through a device that the packet did not arrive on.
#[test]
fn egress_rejects_nothing() {
    each("reject at egress", |bed, family| {
        empty_services(bed, family);
        for packet in [segment(family, b"").syn(), datagram(family, b"x")] {
            bed.send(Hook::Egress, &packet).passes_untouched(NoService);
        }
    });
}

/// The agent ends some connections of a Service with `RESET_UNKNOWN`: later segments of such a connection must not
/// begin a new flow.
#[test]
fn segment_of_an_unknown_connection_is_reset_if_the_service_says_so() {
    each_on(&RESIZED, "unknown connection", |bed, family| {
        let (client, vip, backend) = (family.client(), family.vip(), family.backend());
        let record = Service { id: 1, flags: service_flags::RESET_UNKNOWN, ..Service::zeroed() };
        bed.service_with(vip, TCP, &[backend], record);
        for segment in [
            Packet::tcp(client, vip, 5001, b"data").ack(1001),
            Packet::tcp(client, vip, 5001, b"").fin().ack(1001),
        ] {
            bed.send(Hook::Ingress, &segment).redirects_any(RejectTcp);
            bed.assert_flows(0);
        }
        let reset = Packet::tcp(client, vip, 5001, b"").rst();
        bed.send(Hook::Ingress, &reset).drops(StrayReset);
        let syn = Packet::tcp(client, vip, 1000, b"").syn();
        bed.send(Hook::Ingress, &syn).passes(NewFlow, &syn.clone().to(backend));
        let segment = Packet::tcp(client, vip, 1001, b"data").ack(1);
        bed.send(Hook::Ingress, &segment).passes(Forward, &segment.clone().to(backend));
    });
}
