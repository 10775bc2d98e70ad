//! Packets that are left alone: one case for each early way out of the programs, on all four of them.

use etherparse::{IpNumber, Ipv6RawExtHeader};
use lb_common::{Address, Outcome, Outcome::*};

use super::{
    bench::{Bench, Device, Hook, TCP, UDP},
    packets::{Packet, V6Fragment, VLAN},
    stage::{Family, each, each_ethernet},
};

const ETHERNET: usize = 14;

/// A SYN to a service: it would be translated, were it not for the one thing that the case changes.
fn syn(family: Family) -> Packet {
    Packet::tcp(family.client(), family.vip(), 1000, b"").syn()
}

fn datagram(family: Family) -> Packet {
    Packet::udp(family.client(), family.vip(), b"a question")
}

/// The stage of all these cases.
fn services(bench: &mut Bench, family: Family) {
    for protocol in [TCP, UDP] {
        bench.service(family.vip(), protocol, &[family.backend()]);
    }
}

/// `octets` go on as they are, at both hooks, and leave nothing behind.
#[track_caller]
fn untouched(bench: &mut Bench, octets: &[u8], outcome: Outcome) {
    for hook in Hook::BOTH {
        bench.send_octets(hook, octets).passes_untouched(outcome);
    }
    bench.assert_flows(0);
}

type Spoil = fn(&mut Vec<u8>);

/// Changes to the octets of a SYN. The network header begins at 14, TCP behind it.
const SPOILED_V4: [(&str, Spoil, Outcome); 9] = [
    ("version 5", |octets| octets[ETHERNET] = 0x55, NotIp),
    ("version 0", |octets| octets[ETHERNET] = 0x05, NotIp),
    ("header length 0", |octets| octets[ETHERNET] = 0x40, Malformed),
    ("header length 16", |octets| octets[ETHERNET] = 0x44, Malformed),
    ("header longer than the frame", |octets| octets[ETHERNET] = 0x4f, Malformed),
    ("total length 19", |octets| octets[ETHERNET + 3] = 19, Malformed),
    ("ESP", |octets| octets[ETHERNET + 9] = 50, NotTransport),
    ("ICMPv6 in IPv4", |octets| octets[ETHERNET + 9] = 58, NotTransport),
    ("AH, which we do not walk in IPv4", |octets| octets[ETHERNET + 9] = 51, NotTransport),
];

const SPOILED_V6: [(&str, Spoil, Outcome); 6] = [
    ("version 7", |octets| octets[ETHERNET] = 0x70, NotIp),
    ("ESP", |octets| octets[ETHERNET + 6] = 50, NotTransport),
    ("no next header", |octets| octets[ETHERNET + 6] = 59, NotTransport),
    ("DCCP", |octets| octets[ETHERNET + 6] = 33, NotTransport),
    ("ICMP in IPv6", |octets| octets[ETHERNET + 6] = 1, NotTransport),
    // The source port, 40000 = 0x9c40, is taken for "next header 0x9c, 65 * 8 octets".
    ("hop-by-hop options that end behind the frame", |octets| octets[ETHERNET + 6] = 0, NotTransport),
];

#[test]
fn spoiled_octets() {
    let table = |family| match family {
        Family::V4 => &SPOILED_V4[..],
        Family::V6 => &SPOILED_V6[..],
    };
    each("spoiled", |bench, family| {
        services(bench, family);
        for (name, spoil, outcome) in table(family) {
            bench.label(name);
            let mut octets = syn(family).bytes();
            spoil(&mut octets);
            untouched(bench, &octets, *outcome);
        }
    });
}

/// EtherTypes that are not IP.
#[test]
fn not_ip() {
    each_ethernet("not IP", |bench, family| {
        services(bench, family);
        let ether_types: [(&str, u16); 5] =
            [("ARP", 0x0806), ("LLDP", 0x88cc), ("MPLS", 0x8847), ("PPPoE", 0x8864), ("802.3 length", 46)];
        for (name, ether_type) in ether_types {
            bench.label(name);
            let mut octets = syn(family).bytes();
            octets[12..14].copy_from_slice(&ether_type.to_be_bytes());
            untouched(bench, &octets, NotIp);
        }
        bench.label("three VLAN tags");
        let tagged = syn(family).with(|packet| *packet.tags() = vec![(VLAN, 1), (VLAN, 2), (VLAN, 3)]);
        untouched(bench, &tagged.bytes(), NotIp);
    });
}

/// The frame ends before a header does: every length up to the last octet that is looked at.
///
/// The kernel runs nothing on frames of less than 15 octets, nor on those whose EtherType is IP and which have no whole
/// IP header; so these have a VLAN tag.
#[test]
fn cut_short() {
    each("cut short", |bench, family| {
        services(bench, family);
        let (link, shortest) =
            if bench.device() == Device::Bare { (ETHERNET, 15) } else { (ETHERNET + 4, 1) };
        let network = if family == Family::V4 { 20 } else { 40 };
        for (name, packet, transport) in [("SYN", syn(family), 20), ("datagram", datagram(family), 8)] {
            let tagged = packet.clone().with(|packet| *packet.tags() = vec![(VLAN, 1)]);
            let packet = if bench.device() == Device::Bare { packet } else { tagged };
            let octets = packet.bytes();
            for length in shortest..network + transport {
                bench.label(&format!("{name} of {length} octets"));
                untouched(bench, &octets[..link + length], Malformed);
            }
        }
    });
}

#[test]
fn cut_within_a_vlan_tag() {
    each_ethernet("cut within a tag", |bench, family| {
        services(bench, family);
        let octets = syn(family).with(|packet| *packet.tags() = vec![(VLAN, 1), (VLAN, 2)]).bytes();
        for length in ETHERNET + 1..ETHERNET + 8 {
            bench.label(&format!("{length} octets"));
            untouched(bench, &octets[..length], Malformed);
        }
    });
}

#[test]
fn icmp_that_is_no_error() {
    each("ICMP", |bench, family| {
        services(bench, family);
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
            bench.label(name);
            let (from, to) = (family.client().ip(), family.vip().ip());
            let packet = Packet::icmp(from, to, [*kind, 0], [0, 1, 0, 2], &[0xa5; 32]);
            untouched(bench, &packet.bytes(), NotTransport);
        }
        bench.label("cut before its code");
        let octets = Packet::raw(family.client().ip(), family.vip().ip(), IpNumber::ICMP, &[8]).bytes();
        if family == Family::V4 {
            untouched(bench, &octets, Malformed);
        }
    });
}

#[test]
fn ipv6_extension_headers_that_lead_nowhere() {
    each("IPv6 extensions", |bench, family| {
        if family == Family::V4 {
            return;
        }
        services(bench, family);
        let octets =
            syn(family).with(|packet| packet.extensions().hop_by_hop_options = Some(options(6))).bytes();
        for length in ETHERNET + 40..ETHERNET + 48 + 20 {
            bench.label(&format!("hop-by-hop options, {length} octets"));
            untouched(bench, &octets[..length], Malformed);
        }
        bench.label("options that reach beyond what we look at");
        let packet = syn(family).with(|packet| packet.extensions().destination_options = Some(options(2046)));
        untouched(bench, &packet.bytes(), Malformed);
        bench.label("seven extension headers");
        let chain = [60, 0, 0, 0, 0, 0, 0, 0].repeat(7);
        let packet = Packet::raw(family.client().ip(), family.vip().ip(), IpNumber(60), &chain);
        untouched(bench, &packet.bytes(), NotTransport);
    });
}

fn options(length: usize) -> Ipv6RawExtHeader {
    Ipv6RawExtHeader::new_raw(IpNumber::TCP, &vec![0; length]).unwrap()
}

/// One map holds both families, with IPv4 addresses as v4-mapped ones: on the wire these are nobody's.
#[test]
fn ipv6_packets_with_mapped_addresses() {
    each("mapped addresses", |bench, family| {
        if family == Family::V4 {
            return;
        }
        services(bench, Family::V4);
        let mapped = |address: std::net::SocketAddr| Address::from(address.ip()).bytes().to_owned();
        let (client, vip) = (mapped(Family::V4.client()), mapped(Family::V4.vip()));
        for (name, places) in [("destination", &[(24, vip)][..]), ("both", &[(8, client), (24, vip)])] {
            bench.label(name);
            for mut octets in [syn(family).bytes(), datagram(family).bytes()] {
                for (place, address) in places {
                    octets[ETHERNET + place..][..16].copy_from_slice(address);
                }
                untouched(bench, &octets, Malformed);
            }
        }
    });
}

#[test]
fn no_service() {
    each("no service", |bench, family| {
        services(bench, family);
        let (client, vip, stranger) = (family.client(), family.vip(), family.stranger());
        let other_port = std::net::SocketAddr::new(vip.ip(), vip.port() + 1);
        let cases = [
            ("another address", syn(family).to(stranger)),
            ("another port", syn(family).to(other_port)),
            ("another port, UDP", datagram(family).to(other_port)),
            ("from a VIP, not to it", syn(family).from(vip).to(client)),
            ("no flow", Packet::tcp(family.backend(), client, 1, b"data").ack(5)),
            ("RST of no flow", Packet::tcp(family.backend(), client, 1, b"").rst()),
        ];
        for (name, packet) in cases {
            bench.label(name);
            untouched(bench, &packet.bytes(), NoService);
        }
        bench.label("leaves the node for a VIP");
        bench.send(Hook::Egress, &syn(family)).passes_untouched(NoService);
        bench.assert_flows(0);
    });
    each("service of the other protocol", |bench, family| {
        bench.service(family.vip(), UDP, &[family.backend()]);
        untouched(bench, &syn(family).bytes(), NoService);
    });
}

/// Each direction of a flow is translated at one hook only.
#[test]
fn other_hook() {
    each("other hook", |bench, family| {
        services(bench, family);
        for packet in [syn(family), datagram(family)] {
            bench.send(Hook::Ingress, &packet).passes(NewFlow, &packet.clone().to(family.backend()));
            let before = bench.flows();
            bench.send(Hook::Egress, &packet).passes_untouched(OtherHook);
            let translated = packet.clone().to(family.backend());
            bench.send(Hook::Egress, &translated).passes_untouched(NoService);
            let reply = packet.from(family.backend()).to(family.client());
            bench.send(Hook::Ingress, &reply).passes_untouched(OtherHook);
            assert_eq!(bench.flows(), before, "nothing is noted at the wrong hook");
        }
    });
}

#[test]
fn a_fragment_of_nothing_known() {
    each("later fragment", |bench, family| {
        services(bench, family);
        for protocol in [IpNumber::TCP, IpNumber::UDP, IpNumber::IPV6_ICMP, IpNumber(50)] {
            let whole = Packet::raw(family.client().ip(), family.vip().ip(), protocol, &[0x50; 64]);
            let later = &super::packets::fragments(&whole, 77, 32)[1];
            bench.label(&format!("protocol {}", protocol.0));
            untouched(bench, &later.bytes(), UnknownFragment);
        }
    });
}

/// What follows the header of a later fragment is payload, even where it looks like an extension header.
#[test]
fn a_later_fragment_that_names_an_extension_header() {
    each("later fragment, destination options", |bench, family| {
        if family == Family::V4 {
            return;
        }
        services(bench, family);
        let later = V6Fragment { offset: 4, more: false, identification: 77 };
        let packet = Packet::raw(family.client().ip(), family.vip().ip(), IpNumber(60), &[6; 40])
            .with(|packet| packet.v6_fragment = Some(later));
        untouched(bench, &packet.bytes(), UnknownFragment);
    });
}
