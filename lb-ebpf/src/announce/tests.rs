//! Tests of the frames that this module builds, against etherparse, and of the meaning of frames from other machines.

use std::{net::Ipv6Addr, vec::Vec};

use etherparse::{
    ArpEthIpv4Packet, ArpHardwareId, ArpOperation, ArpPacket, EtherType, Ethernet2Header, Icmpv6Header,
    Icmpv6Type, IpNumber, Ipv6Header, icmpv6::NeighborAdvertisementHeader,
};
use lb_common::Address;
use proptest::prelude::*;

use super::{
    BROADCAST, arp,
    neighbour::{self, Advertisement, Audience, HEADERS, Headers, MESSAGE},
};
use crate::rules::announce::Message;

const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];
const VIP: [u8; 4] = [192, 0, 2, 10];
const CLIENT: [u8; 4] = [192, 0, 2, 99];
const VIP6: [u8; 16] = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xaa, 0xbb, 0xcc];
const CLIENT6: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9];
const GROUP_MAC: [u8; 6] = [0x33, 0x33, 0xff, 0xaa, 0xbb, 0xcc];

fn arp(to: [u8; 6], operation: ArpOperation, (mac, sender): ([u8; 6], [u8; 4]), target: [u8; 4]) -> Vec<u8> {
    let mut frame =
        Ethernet2Header { source: mac, destination: to, ether_type: EtherType::ARP }.to_bytes().to_vec();
    let packet = ArpEthIpv4Packet {
        operation,
        sender_mac: mac,
        sender_ipv4: sender,
        target_mac: [0; 6],
        target_ipv4: target,
    };
    frame.extend(ArpPacket::from(packet).to_bytes());
    frame
}

fn read_arp(bytes: &[u8]) -> arp::Frame {
    let bytes: [u8; arp::FRAME] = bytes.try_into().unwrap();
    // SAFETY: a `Header` is valid for every bit pattern; both types have the same size and alignment.
    unsafe { core::mem::transmute(bytes) }
}

/// The claim and the ARP request of the frame, each with its address.
fn said(bytes: &[u8]) -> [Option<(Address, Message)>; 2] {
    let frame = read_arp(bytes);
    let claim = frame.claimed().map(|address| (address, frame.claim(OWN)));
    [claim, frame.asked().map(|address| (address, frame.question(OWN)))]
}

#[test]
fn arp_frames_say_what_rfc_826_and_5227_define() {
    const REQUEST: ArpOperation = ArpOperation::REQUEST;
    const REPLY: ArpOperation = ArpOperation::REPLY;
    let (vip, client) = (Address::from_v4(VIP), Address::from_v4(CLIENT));
    let claims = |address, message| Some((address, message));
    let (from_client, probe) = ((OTHER, CLIENT), (OTHER, [0; 4]));
    let third = [2, 0, 0, 0, 0, 3];
    for (name, frame, expected) in [
        (
            "request",
            arp(BROADCAST, REQUEST, from_client, VIP),
            [claims(client, Message::Claims), claims(vip, Message::Asks)],
        ),
        (
            "unicast request",
            arp(OWN, REQUEST, from_client, VIP),
            [claims(client, Message::Claims), claims(vip, Message::Asks)],
        ),
        (
            "request to a third machine",
            arp(third, REQUEST, from_client, VIP),
            [claims(client, Message::Claims), claims(vip, Message::Other)],
        ),
        ("probe", arp(BROADCAST, REQUEST, probe, VIP), [None, claims(vip, Message::Asks)]),
        ("announcement", arp(BROADCAST, REQUEST, (OTHER, VIP), VIP), [claims(vip, Message::Claims), None]),
        ("own announcement", arp(BROADCAST, REQUEST, (OWN, VIP), VIP), [claims(vip, Message::Other), None]),
        (
            "own request",
            arp(BROADCAST, REQUEST, (OWN, CLIENT), VIP),
            [claims(client, Message::Other), claims(vip, Message::Other)],
        ),
        ("reply", arp(OTHER, REPLY, (third, VIP), CLIENT), [claims(vip, Message::Claims), None]),
        ("reverse ARP", arp(BROADCAST, ArpOperation(3), from_client, VIP), [None, None]),
    ] {
        assert_eq!(said(&frame), expected, "{name}");
    }
    let valid = arp(BROADCAST, REQUEST, from_client, VIP);
    for at in 12..20 {
        let mut frame = valid.clone();
        frame[at] ^= 1;
        assert_eq!(said(&frame), [None, None], "byte {at} changed");
    }
}

#[test]
fn arp_frames_match_etherparse() {
    let request = read_arp(&arp(BROADCAST, ArpOperation::REQUEST, (OTHER, CLIENT), VIP));
    let reply = |frame: &arp::Frame| frame.bytes().to_vec();
    let expected = |to, operation, target_mac, target_ipv4| {
        let mut frame =
            Ethernet2Header { source: OWN, destination: to, ether_type: EtherType::ARP }.to_bytes().to_vec();
        let packet =
            ArpEthIpv4Packet { operation, sender_mac: OWN, sender_ipv4: VIP, target_mac, target_ipv4 };
        let packet = ArpPacket::from(packet);
        assert_eq!(packet.hw_addr_type, ArpHardwareId::ETHERNET);
        frame.extend(packet.to_bytes());
        frame
    };
    assert_eq!(reply(&request.reply(OWN)), expected(OTHER, ArpOperation::REPLY, OTHER, CLIENT));
    let announcement = |operation| arp::Frame::announcement(VIP, OWN, operation);
    assert_eq!(
        reply(&announcement(arp::Operation::Request)),
        expected(BROADCAST, ArpOperation::REQUEST, [0; 6], VIP)
    );
    assert_eq!(
        reply(&announcement(arp::Operation::Reply)),
        expected(BROADCAST, ArpOperation::REPLY, BROADCAST, VIP)
    );
}

/// A frame with an ICMPv6 message, built with etherparse.
struct Icmp {
    to: [u8; 6],
    from: [u8; 6],
    source: [u8; 16],
    destination: [u8; 16],
    kind: Icmpv6Type,
    payload: Vec<u8>,
    hop_limit: u8,
}

impl Icmp {
    /// A solicitation for the virtual address with these options.
    fn solicitation(source: [u8; 16], options: &[u8]) -> Self {
        Self {
            to: GROUP_MAC,
            from: OTHER,
            source,
            destination: neighbour::group(&VIP6),
            kind: Icmpv6Type::NeighborSolicitation,
            payload: [&VIP6[..], options].concat(),
            hop_limit: 255,
        }
    }

    fn frame(&self) -> Vec<u8> {
        let header = Icmpv6Header::with_checksum(self.kind, self.source, self.destination, &self.payload);
        let header = header.unwrap();
        let ip = Ipv6Header {
            payload_length: u16::try_from(header.header_len() + self.payload.len()).unwrap(),
            next_header: IpNumber::IPV6_ICMP,
            hop_limit: self.hop_limit,
            source: self.source,
            destination: self.destination,
            ..Ipv6Header::default()
        };
        let link = Ethernet2Header { source: self.from, destination: self.to, ether_type: EtherType::IPV6 };
        [&link.to_bytes()[..], &ip.to_bytes(), &header.to_bytes(), &self.payload].concat()
    }
}

/// The target of a frame, and the meaning of the frame as the program reads it.
fn meaning(frame: &[u8]) -> Option<(Address, Message)> {
    let headers: [u8; HEADERS] = frame[..HEADERS].try_into().unwrap();
    // SAFETY: a `Header` is valid for every bit pattern; both types have the same size and alignment.
    let headers: Headers = unsafe { core::mem::transmute(headers) };
    let length = headers.message()?;
    let mut message = [0; MESSAGE];
    message[..length as usize].copy_from_slice(&frame[HEADERS..][..length as usize]);
    Some((neighbour::target(&message)?, neighbour::meaning(&headers, &message, length, OWN)))
}

const LINK: [u8; 8] = [1, 1, 2, 0, 0, 0, 0, 2];
const NONCE: [u8; 8] = [14, 1, 1, 2, 3, 4, 5, 6];

#[test]
fn neighbour_messages_say_what_rfc_4861_and_4862_define() {
    let advertised = Icmpv6Type::NeighborAdvertisement(NeighborAdvertisementHeader::from_bytes([0; 4]));
    let base = || Icmp::solicitation(CLIENT6, &LINK);
    let detection = || Icmp::solicitation([0; 16], &NONCE);
    for (name, packet, says) in [
        ("solicitation to the group", base(), Message::Asks),
        ("without an option", Icmp::solicitation(CLIENT6, &[]), Message::Asks),
        (
            "unicast probe",
            Icmp { to: OWN, destination: VIP6, payload: VIP6.to_vec(), ..base() },
            Message::Asks,
        ),
        ("to another group", Icmp { destination: neighbour::ALL_NODES, ..base() }, Message::Other),
        ("to another machine", Icmp { to: [2; 6], destination: VIP6, ..base() }, Message::Other),
        ("duplicate address detection", detection(), Message::Detects),
        ("detection with a source option", Icmp::solicitation([0; 16], &LINK), Message::Other),
        ("detection by unicast", Icmp { to: OWN, destination: VIP6, ..detection() }, Message::Other),
        ("own solicitation", Icmp { from: OWN, ..base() }, Message::Other),
        ("option of length 0", Icmp::solicitation(CLIENT6, &[1, 0, 0, 0, 0, 0, 0, 0]), Message::Other),
        ("option beyond the end", Icmp::solicitation(CLIENT6, &[1, 2, 0, 0, 0, 0, 0, 0]), Message::Other),
        ("longest options", Icmp::solicitation(CLIENT6, &NONCE.repeat(13)), Message::Asks),
        ("advertisement", Icmp { kind: advertised, ..base() }, Message::Claims),
        ("own advertisement", Icmp { kind: advertised, from: OWN, ..base() }, Message::Other),
    ] {
        assert_eq!(meaning(&packet.frame()), Some((Address::from_v6(VIP6), says)), "{name}");
    }
    assert_eq!(meaning(&Icmp { hop_limit: 254, ..base() }.frame()), None);
    assert_eq!(meaning(&Icmp::solicitation(CLIENT6, &NONCE.repeat(14)).frame()), None);
    let echo = Icmpv6Type::EchoRequest(etherparse::IcmpEchoHeader { id: 1, seq: 1 });
    assert_eq!(meaning(&Icmp { kind: echo, ..base() }.frame()), None);
}

#[test]
fn solicitation_with_a_wrong_checksum_says_nothing() {
    let frame = Icmp::solicitation(CLIENT6, &LINK).frame();
    for at in HEADERS..frame.len() {
        let mut changed = frame.clone();
        changed[at] ^= 0x10;
        let says = meaning(&changed).map_or(Message::Other, |(_, says)| says);
        assert_eq!(says, Message::Other, "byte {at} changed");
    }
}

fn headers(packet: &Icmp) -> Headers {
    let bytes: [u8; HEADERS] = packet.frame()[..HEADERS].try_into().unwrap();
    // SAFETY: a `Header` is valid for every bit pattern; both types have the same size and alignment.
    unsafe { core::mem::transmute(bytes) }
}

fn advertisement(
    to: [u8; 6],
    own: [u8; 6],
    target: [u8; 16],
    destination: [u8; 16],
    solicited: bool,
) -> Vec<u8> {
    let flags = NeighborAdvertisementHeader { router: false, solicited, r#override: true };
    let kind = Icmpv6Type::NeighborAdvertisement(flags);
    let payload = [&target[..], &[2, 1], &own].concat();
    Icmp { to, from: own, source: target, destination, kind, payload, hop_limit: 255 }.frame()
}

proptest! {
    #[test]
    fn advertisements_match_etherparse(target: [u8; 16], own: [u8; 6], client: [u8; 16], mac: [u8; 6]) {
        let asked = headers(&Icmp { from: mac, ..Icmp::solicitation(client, &LINK) });
        let answer = Advertisement::answer(&asked, target, own, Audience::Asker);
        prop_assert_eq!(answer.bytes().to_vec(), advertisement(mac, own, target, client, true));
        let to_all = advertisement([0x33, 0x33, 0, 0, 0, 1], own, target, neighbour::ALL_NODES, false);
        prop_assert_eq!(Advertisement::announcement(target, own).bytes().to_vec(), to_all.clone());
        prop_assert_eq!(Advertisement::answer(&asked, target, own, Audience::All).bytes().to_vec(), to_all);
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 182), length in 24u32..=128) {
        let headers: [u8; HEADERS] = bytes[..HEADERS].try_into().unwrap();
        // SAFETY: a `Header` is valid for every bit pattern; both types have the same size and alignment.
        let headers: Headers = unsafe { core::mem::transmute(headers) };
        let message: [u8; MESSAGE] = bytes[HEADERS..].try_into().unwrap();
        let read = neighbour::meaning(&headers, &message, length, OWN);
        let right = neighbour::target(&message).is_some() && read != Message::Other;
        // Random bytes have the right checksum once in 65,536 times.
        prop_assert!(!right || read != Message::Detects || headers.source == [0; 16]);
    }
}

#[test]
fn group_is_that_of_the_address() {
    let group = Ipv6Addr::from(neighbour::group(&VIP6));
    assert_eq!(group, "ff02::1:ffaa:bbcc".parse::<Ipv6Addr>().unwrap());
}
