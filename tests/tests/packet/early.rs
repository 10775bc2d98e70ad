//! Packets that pass untouched: one case for each early return, at tc ingress and egress.

use etherparse::{IpNumber, Ipv6RawExtHeader};
use lb_common::{Address, Outcome, Outcome::*};

use super::{
    packets::{Packet, V6Fragment, VLAN},
    stage::{Family, each, each_ethernet},
    testbed::{Device, Hook, TCP, Testbed, UDP},
};

const ETHERNET: usize = 14;

/// A SYN to a Service. The programs translate it unless the case changes it.
fn syn(family: Family) -> Packet {
    Packet::tcp(family.client(), family.vip(), 1000, b"").syn()
}

fn datagram(family: Family) -> Packet {
    Packet::udp(family.client(), family.vip(), b"a question")
}

/// Writes the Services that most cases use.
fn services(bed: &mut Testbed, family: Family) {
    for protocol in [TCP, UDP] {
        bed.service(family.vip(), protocol, &[family.backend()]);
    }
}

/// Asserts that both hooks pass `bytes` unchanged and create no entry.
#[track_caller]
fn untouched(bed: &mut Testbed, bytes: &[u8], outcome: Outcome) {
    for hook in Hook::BOTH {
        bed.send_bytes(hook, bytes).passes_untouched(outcome);
    }
    bed.assert_flows(0);
}

type Spoil = fn(&mut Vec<u8>);

/// Changes to the bytes of a SYN. The network header begins at byte 14; TCP follows it.
const SPOILED_V4: [(&str, Spoil, Outcome); 9] = [
    ("version 5", |bytes| bytes[ETHERNET] = 0x55, NotIp),
    ("version 0", |bytes| bytes[ETHERNET] = 0x05, NotIp),
    ("header length 0", |bytes| bytes[ETHERNET] = 0x40, Malformed),
    ("header length 16", |bytes| bytes[ETHERNET] = 0x44, Malformed),
    ("header longer than the frame", |bytes| bytes[ETHERNET] = 0x4f, Malformed),
    ("total length 19", |bytes| bytes[ETHERNET + 3] = 19, Malformed),
    ("ESP", |bytes| bytes[ETHERNET + 9] = 50, NotTransport),
    ("ICMPv6 in IPv4", |bytes| bytes[ETHERNET + 9] = 58, NotTransport),
    ("AH, which is not parsed in IPv4", |bytes| bytes[ETHERNET + 9] = 51, NotTransport),
];

const SPOILED_V6: [(&str, Spoil, Outcome); 6] = [
    ("version 7", |bytes| bytes[ETHERNET] = 0x70, NotIp),
    ("ESP", |bytes| bytes[ETHERNET + 6] = 50, NotTransport),
    ("no next header", |bytes| bytes[ETHERNET + 6] = 59, NotTransport),
    ("DCCP", |bytes| bytes[ETHERNET + 6] = 33, NotTransport),
    ("ICMP in IPv6", |bytes| bytes[ETHERNET + 6] = 1, NotTransport),
    // The source port, 40000 = 0x9c40, is read as "next header 0x9c, 65 * 8 bytes".
    ("hop-by-hop options that end after the frame", |bytes| bytes[ETHERNET + 6] = 0, NotTransport),
];

#[test]
fn malformed_headers_pass_untouched() {
    let table = |family| match family {
        Family::V4 => &SPOILED_V4[..],
        Family::V6 => &SPOILED_V6[..],
    };
    each("spoiled", |bed, family| {
        services(bed, family);
        for (name, spoil, outcome) in table(family) {
            bed.label(name);
            let mut bytes = syn(family).bytes();
            spoil(&mut bytes);
            untouched(bed, &bytes, *outcome);
        }
    });
}

#[test]
fn other_ethertypes_pass_untouched() {
    each_ethernet("not IP", |bed, family| {
        services(bed, family);
        let ether_types: [(&str, u16); 5] =
            [("ARP", 0x0806), ("LLDP", 0x88cc), ("MPLS", 0x8847), ("PPPoE", 0x8864), ("802.3 length", 46)];
        for (name, ether_type) in ether_types {
            bed.label(name);
            let mut bytes = syn(family).bytes();
            bytes[12..14].copy_from_slice(&ether_type.to_be_bytes());
            untouched(bed, &bytes, NotIp);
        }
        bed.label("three VLAN tags");
        let tagged = syn(family).with(|packet| *packet.tags() = vec![(VLAN, 1), (VLAN, 2), (VLAN, 3)]);
        untouched(bed, &tagged.bytes(), NotIp);
    });
}

/// The frame ends within a header: every length up to the last byte that the programs read.
///
/// A test run rejects frames of less than 15 bytes, and those with an IP EtherType and an incomplete IP header. So the
/// Ethernet frames have a VLAN tag, and the packets of a bare device at least 15 bytes.
#[test]
fn truncated_headers_pass_untouched() {
    each("truncated", |bed, family| {
        services(bed, family);
        let (link, shortest) = if bed.device() == Device::Bare { (ETHERNET, 15) } else { (ETHERNET + 4, 1) };
        let network = if family == Family::V4 { 20 } else { 40 };
        for (name, packet, transport) in [("SYN", syn(family), 20), ("datagram", datagram(family), 8)] {
            let tagged = packet.clone().with(|packet| *packet.tags() = vec![(VLAN, 1)]);
            let packet = if bed.device() == Device::Bare { packet } else { tagged };
            let bytes = packet.bytes();
            for length in shortest..network + transport {
                bed.label(&format!("{name} of {length} bytes"));
                untouched(bed, &bytes[..link + length], Malformed);
            }
        }
    });
}

#[test]
fn truncated_vlan_tags_pass_untouched() {
    each_ethernet("truncated within a tag", |bed, family| {
        services(bed, family);
        let bytes = syn(family).with(|packet| *packet.tags() = vec![(VLAN, 1), (VLAN, 2)]).bytes();
        for length in ETHERNET + 1..ETHERNET + 8 {
            bed.label(&format!("{length} bytes"));
            untouched(bed, &bytes[..length], Malformed);
        }
    });
}

#[test]
fn icmp_messages_other_than_errors_pass_untouched() {
    each("ICMP", |bed, family| {
        services(bed, family);
        let kinds: &[(&str, u8)] = match family {
            Family::V4 => &[("echo reply", 0), ("echo", 8), ("router advertisement", 9), ("timestamp", 13)],
            Family::V6 => &[
                ("echo", 128),
                ("echo reply", 129),
                ("router solicitation", 133),
                ("router advertisement", 134),
                ("neighbour solicitation", 135),
                ("neighbour advertisement", 136),
                ("redirect", 137),
            ],
        };
        for (name, kind) in kinds {
            bed.label(name);
            let (from, to) = (family.client().ip(), family.vip().ip());
            let packet = Packet::icmp(from, to, [*kind, 0], [0, 1, 0, 2], &[0xa5; 32]);
            untouched(bed, &packet.bytes(), NotTransport);
        }
        bed.label("truncated before its code");
        let bytes = Packet::raw(family.client().ip(), family.vip().ip(), IpNumber::ICMP, &[8]).bytes();
        if family == Family::V4 {
            untouched(bed, &bytes, Malformed);
        }
    });
}

#[test]
fn invalid_ipv6_extension_headers_pass_untouched() {
    each("IPv6 extensions", |bed, family| {
        if family == Family::V4 {
            return;
        }
        services(bed, family);
        let bytes =
            syn(family).with(|packet| packet.extensions().hop_by_hop_options = Some(options(6))).bytes();
        for length in ETHERNET + 40..ETHERNET + 48 + 20 {
            bed.label(&format!("hop-by-hop options, {length} bytes"));
            untouched(bed, &bytes[..length], Malformed);
        }
        bed.label("options longer than the programs parse");
        let packet = syn(family).with(|packet| packet.extensions().destination_options = Some(options(2046)));
        untouched(bed, &packet.bytes(), Malformed);
        bed.label("seven extension headers");
        let chain = [60, 0, 0, 0, 0, 0, 0, 0].repeat(7);
        let packet = Packet::raw(family.client().ip(), family.vip().ip(), IpNumber(60), &chain);
        untouched(bed, &packet.bytes(), NotTransport);
    });
}

fn options(length: usize) -> Ipv6RawExtHeader {
    Ipv6RawExtHeader::new_raw(IpNumber::TCP, &vec![0; length]).unwrap()
}

/// The maps hold IPv4 addresses as v4-mapped ones. On the wire v4-mapped addresses are invalid.
#[test]
fn v4_mapped_addresses_on_the_wire_are_malformed() {
    each("mapped addresses", |bed, family| {
        if family == Family::V4 {
            return;
        }
        services(bed, Family::V4);
        let mapped = |address: std::net::SocketAddr| Address::from(address.ip()).bytes().to_owned();
        let (client, vip) = (mapped(Family::V4.client()), mapped(Family::V4.vip()));
        for (name, places) in [("destination", &[(24, vip)][..]), ("both", &[(8, client), (24, vip)])] {
            bed.label(name);
            for mut bytes in [syn(family).bytes(), datagram(family).bytes()] {
                for (place, address) in places {
                    bytes[ETHERNET + place..][..16].copy_from_slice(address);
                }
                untouched(bed, &bytes, Malformed);
            }
        }
    });
}

#[test]
fn packets_of_no_service_pass_untouched() {
    each("no service", |bed, family| {
        services(bed, family);
        let (client, vip, stranger) = (family.client(), family.vip(), family.stranger());
        let other_port = std::net::SocketAddr::new(vip.ip(), vip.port() + 1);
        let cases = [
            ("another address", syn(family).to(stranger)),
            ("another port", syn(family).to(other_port)),
            ("another port, UDP", datagram(family).to(other_port)),
            ("from a VIP instead of to it", syn(family).from(vip).to(client)),
            ("reply of no flow", Packet::tcp(family.backend(), client, 1, b"data").ack(5)),
            ("RST of no flow", Packet::tcp(family.backend(), client, 1, b"").rst()),
        ];
        for (name, packet) in cases {
            bed.label(name);
            untouched(bed, &packet.bytes(), NoService);
        }
        bed.label("leaves the node for a VIP");
        bed.send(Hook::Egress, &syn(family)).passes_untouched(NoService);
        bed.assert_flows(0);
    });
    each("service of the other protocol", |bed, family| {
        bed.service(family.vip(), UDP, &[family.backend()]);
        untouched(bed, &syn(family).bytes(), NoService);
    });
}

/// Each direction of a flow is translated at one hook only.
#[test]
fn flow_is_translated_at_its_own_hook_only() {
    each("other hook", |bed, family| {
        services(bed, family);
        for packet in [syn(family), datagram(family)] {
            bed.send(Hook::Ingress, &packet).passes(NewFlow, &packet.clone().to(family.backend()));
            let before = bed.flows();
            bed.send(Hook::Egress, &packet).passes_untouched(OtherHook);
            let translated = packet.clone().to(family.backend());
            bed.send(Hook::Egress, &translated).passes_untouched(NoService);
            let reply = packet.from(family.backend()).to(family.client());
            bed.send(Hook::Ingress, &reply).passes_untouched(OtherHook);
            assert_eq!(bed.flows(), before, "the wrong hook changes no flow");
        }
    });
}

#[test]
fn unknown_later_fragment_passes_untouched() {
    each("later fragment", |bed, family| {
        services(bed, family);
        for protocol in [IpNumber::TCP, IpNumber::UDP, IpNumber::IPV6_ICMP, IpNumber(50)] {
            let whole = Packet::raw(family.client().ip(), family.vip().ip(), protocol, &[0x50; 64]);
            let later = &super::packets::fragments(&whole, 77, 32)[1];
            bed.label(&format!("protocol {}", protocol.0));
            untouched(bed, &later.bytes(), UnknownFragment);
        }
    });
}

/// The bytes after the header of a later fragment are payload, even if they look like an extension header.
#[test]
fn payload_of_a_later_fragment_is_not_parsed_as_an_extension_header() {
    each("later fragment, destination options", |bed, family| {
        if family == Family::V4 {
            return;
        }
        services(bed, family);
        let later = V6Fragment { offset: 4, more: false, identification: 77 };
        let packet = Packet::raw(family.client().ip(), family.vip().ip(), IpNumber(60), &[6; 40])
            .with(|packet| packet.v6_fragment = Some(later));
        untouched(bed, &packet.bytes(), UnknownFragment);
    });
}
