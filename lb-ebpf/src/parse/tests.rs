//! Tests of the parser: samples by etherparse, truncated and changed, and random bytes.

use std::{vec, vec::Vec};

use etherparse::{
    EtherType, IpHeaders, IpNumber, Ipv4Extensions, Ipv4Header, Ipv6Extensions, Ipv6Header, Ipv6RawExtHeader,
    PacketBuilder, PacketBuilderStep, TcpHeader as EtherTcp,
};
use lb_common::{Address, Span, conntrack::Segment};
use proptest::{prelude::*, sample::Index};

use super::{
    ip::ether_type,
    properties::{check, compare},
    *,
};

const ETHERNET: usize = 14;
const CLIENT: [u8; 16] = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10];
const VIP: [u8; 16] = [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

fn v4() -> IpHeaders {
    let header = Ipv4Header {
        source: [192, 0, 2, 10],
        destination: [203, 0, 113, 1],
        time_to_live: 64,
        ..Ipv4Header::default()
    };
    IpHeaders::Ipv4(header, Ipv4Extensions::default())
}

fn v6() -> IpHeaders {
    let header = Ipv6Header { source: CLIENT, destination: VIP, hop_limit: 64, ..Ipv6Header::default() };
    IpHeaders::Ipv6(header, Ipv6Extensions::default())
}

fn v6_with_options() -> IpHeaders {
    let options = Ipv6RawExtHeader::new_raw(IpNumber::UDP, &[0; 14]).unwrap();
    let extensions = Ipv6Extensions {
        hop_by_hop_options: Some(options.clone()),
        destination_options: Some(options),
        ..Ipv6Extensions::default()
    };
    let IpHeaders::Ipv6(header, _) = v6() else { unreachable!() };
    IpHeaders::Ipv6(header, extensions)
}

fn link() -> PacketBuilderStep<etherparse::Ethernet2Header> {
    PacketBuilder::ethernet2([0, 0, 0x5e, 0, 0x53, 1], [0, 0, 0x5e, 0, 0x53, 2])
}

fn tcp(ip: IpHeaders, header: EtherTcp, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    link().ip(ip).tcp_header(header).write(&mut bytes, payload).unwrap();
    bytes
}

fn syn() -> EtherTcp {
    let mut header = EtherTcp::new(40_000, 80, 1000, 512);
    header.syn = true;
    header
}

fn udp(ip: IpHeaders, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    link().ip(ip).udp(40_000, 53).write(&mut bytes, payload).unwrap();
    bytes
}

fn icmp(ip: IpHeaders, quoted: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let is_v4 = matches!(ip, IpHeaders::Ipv4(..));
    let network = link().ip(ip);
    if is_v4 {
        network.icmpv4_raw(3, 4, [0; 4]).write(&mut bytes, quoted).unwrap();
    } else {
        network.icmpv6_raw(2, 0, [0; 4]).write(&mut bytes, quoted).unwrap();
    }
    bytes
}

/// The packet with `count` VLAN tags inserted.
fn tagged(mut bytes: Vec<u8>, count: usize) -> Vec<u8> {
    for _ in 0..count {
        bytes.splice(12..12, [0x81, 0, 0, 5]);
    }
    bytes
}

/// Packets of every kind that [`parse`] accepts, except fragments.
fn samples() -> Vec<Vec<u8>> {
    let (segment, datagram) = (tcp(v4(), syn(), b""), udp(v6(), b"question"));
    vec![
        icmp(v4(), &segment[ETHERNET..]),
        icmp(v6(), &datagram[ETHERNET..]),
        icmp(v6(), &udp(v6_with_options(), b"question")[ETHERNET..]),
        segment,
        datagram,
        tcp(v6(), syn(), b"early data"),
        udp(v4(), b"question"),
        udp(v6_with_options(), b"question"),
        sctp_init(v4()),
        sctp_init(v6_with_options()),
        ping(v4(), ECHO_REQUEST_V4),
        ping(v6(), ECHO_REQUEST_V6),
        tagged(udp(v4(), b""), 1),
        tagged(tcp(v6(), syn(), b""), 2),
    ]
}

fn raw(ip: IpHeaders, protocol: IpNumber, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    link().ip(ip).write(&mut bytes, protocol, payload).unwrap();
    bytes
}

/// A packet that ends after the header of its INIT chunk.
fn sctp_init(ip: IpHeaders) -> Vec<u8> {
    raw(ip, IpNumber::SCTP, &[0x9c, 0x40, 0, 80, 0, 0, 0, 0, 1, 2, 3, 4, 1, 0, 0, 4])
}

fn ping(ip: IpHeaders, kind: u8) -> Vec<u8> {
    let protocol = if kind == ECHO_REQUEST_V4 { IpNumber::ICMP } else { IpNumber::IPV6_ICMP };
    raw(ip, protocol, &[kind, 0, 0, 0, 0, 1, 0, 1])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn parser_survives_random_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        check(&bytes, Layer::Ethernet);
        check(&bytes, Layer::Ip);
        compare(&bytes);
    }

    #[test]
    fn parser_survives_changed_packets(
        sample: Index, length: Index, changes in proptest::collection::vec((any::<Index>(), any::<u8>()), 0..6),
    ) {
        let samples = samples();
        let mut bytes = sample.get(&samples).clone();
        for (place, value) in changes {
            // The first bytes affect parsing most, so all changes are within the first 60.
            let place = place.index(bytes.len()).min(place.index(60));
            bytes[place] = value;
        }
        compare(&bytes);
        bytes.truncate(bytes.len() - length.index(bytes.len()).saturating_sub(bytes.len() / 2));
        check(&bytes, Layer::Ethernet);
        check(&bytes[ETHERNET..], Layer::Ip);
    }
}

#[test]
fn every_sample_parses_and_truncated_ones_do_not() {
    for bytes in samples() {
        let packet = parse(bytes.as_slice(), Layer::Ethernet).unwrap();
        check(&bytes, Layer::Ethernet);
        let last = match packet.body {
            Body::Tcp => packet.headers.l4 + 20,
            Body::Udp => packet.headers.l4 + 8,
            Body::Sctp => packet.headers.l4 + 16,
            Body::IcmpError | Body::Echo => packet.headers.l4 + 2,
            Body::LaterFragment => unreachable!("no sample is one"),
        };
        for length in 0..last as usize {
            let result = parse(&bytes[..length], Layer::Ethernet);
            assert_eq!(result, Err(Outcome::Malformed), "{length} bytes of {bytes:x?}");
        }
        assert_eq!(parse(&bytes[..last as usize], Layer::Ethernet).unwrap().body, packet.body);
    }
}

#[test]
fn packet_without_link_layer_parses_the_same_at_offset_0() {
    let bytes = tcp(v6(), syn(), b"early data");
    let ethernet = parse(bytes.as_slice(), Layer::Ethernet).unwrap();
    let bare = parse(&bytes[ETHERNET..], Layer::Ip).unwrap();
    let headers = Headers { l3: 14, l4: 54, is_v4: false };
    assert_eq!(ethernet, Packet { headers, ..bare });
    assert_eq!(bare.headers, Headers { l3: 0, l4: 40, is_v4: false });
    assert_eq!(bare.segment, Segment { flags: 2, seq: 1000, ack: 0, payload: 10 });
}

#[test]
fn payload_length_comes_from_the_network_header() {
    for ip in [v4(), v6()] {
        let mut bytes = tcp(ip.clone(), syn(), b"data");
        bytes.resize(bytes.len() + 9, 0);
        assert_eq!(parse(bytes.as_slice(), Layer::Ethernet).unwrap().segment.payload, 4, "padding is none");
        // BIG TCP: the length does not fit into the field, so the field is 0.
        let length = if matches!(ip, IpHeaders::Ipv4(..)) { ETHERNET + 2 } else { ETHERNET + 4 };
        bytes[length..length + 2].fill(0);
        let parsed = parse(bytes.as_slice(), Layer::Ethernet).unwrap();
        assert_eq!((parsed.length, parsed.segment.payload), (0, 13));
        let plain = parse_plain(bytes.as_slice());
        assert!(plain == Some(parsed) || plain.is_none(), "{plain:?}");
        // If the length field does not match the frame, the parser still computes the payload's length from the field.
        bytes[length + 1] = 41;
        assert_eq!(
            parse(bytes.as_slice(), Layer::Ethernet).map(|packet| packet.segment.payload > 40),
            Ok(false)
        );
    }
}

#[test]
fn fragments_are_whole_first_or_later() {
    let identified = |bytes: &[u8]| {
        let packet = parse(bytes, Layer::Ip).unwrap();
        (packet.fragment.part, packet.fragment.identification.to_ne_bytes(), packet.body)
    };
    let mut bytes = udp(v4(), b"question").split_off(ETHERNET);
    bytes[4..6].copy_from_slice(&[0xab, 0xcd]);
    let id = u32::from(u16::from_ne_bytes([0xab, 0xcd])).to_ne_bytes();
    for (flags, part, body) in [
        ([0x40, 0], Part::Whole, Body::Udp),
        ([0x20, 0], Part::First, Body::Udp),
        ([0x20, 1], Part::Later, Body::LaterFragment),
        ([0x00, 1], Part::Later, Body::LaterFragment),
        ([0x1f, 0xff], Part::Later, Body::LaterFragment),
    ] {
        bytes[6..8].copy_from_slice(&flags);
        assert_eq!(identified(&bytes), (part, id, body), "{flags:x?}");
    }
    let mut bytes = udp(v6(), b"question").split_off(ETHERNET);
    bytes[6] = 44;
    bytes.splice(40..40, [17, 0, 0, 0, 1, 2, 3, 4]);
    for (offset, part, body) in [
        ([0, 0], Part::Whole, Body::Udp),
        ([0, 6], Part::Whole, Body::Udp),
        ([0, 1], Part::First, Body::Udp),
        ([0, 8], Part::Later, Body::LaterFragment),
        ([0xff, 0xf9], Part::Later, Body::LaterFragment),
    ] {
        bytes[42..44].copy_from_slice(&offset);
        assert_eq!(identified(&bytes), (part, [1, 2, 3, 4], body), "{offset:x?}");
    }
}

#[test]
fn fragments_know_their_place_in_the_datagram() {
    let span = |bytes: &[u8]| parse(bytes, Layer::Ip).unwrap().span(bytes);
    // UDP header and payload are 16 bytes: two units.
    let of = |start: u16, is_last| Some(Span { start, end: u32::from(start) + 2, is_last });
    let mut v4 = udp(v4(), b"question").split_off(ETHERNET);
    let mut v6 = udp(v6(), b"question").split_off(ETHERNET);
    v6[6] = 44;
    v6[5] += 8;
    v6.splice(40..40, [17, 0, 0, 0, 1, 2, 3, 4]);
    for (start, more) in [(0, true), (2, true), (185, false), (8191, false)] {
        v4[6..8].copy_from_slice(&(start | u16::from(more) << 13).to_be_bytes());
        v6[42..44].copy_from_slice(&(start << 3 | u16::from(more)).to_be_bytes());
        assert_eq!((span(&v4), span(&v6)), (of(start, !more), of(start, !more)), "{start}");
    }
    // A last fragment may end within a unit.
    v4.pop();
    v4[3] -= 1;
    assert_eq!(span(&v4), of(8191, true));
    assert_eq!(parse(v4.as_slice(), Layer::Ip).unwrap().span(&v4[..8]), None);
}

/// A packet with v4-mapped addresses would match the flows and services of IPv4.
#[test]
fn v4_mapped_addresses_on_the_wire_are_malformed() {
    let mapped = *Address::from_v4([203, 0, 113, 1]).bytes();
    for place in [8, 24] {
        let mut bytes = udp(v6(), b"question").split_off(ETHERNET);
        bytes[place..place + 16].copy_from_slice(&mapped);
        assert_eq!(parse(bytes.as_slice(), Layer::Ip), Err(Outcome::Malformed));
        let error = icmp(v6(), &bytes);
        let headers = parse(error.as_slice(), Layer::Ethernet).unwrap().headers;
        assert_eq!(parse_quoted(error.as_slice(), &headers), Err(Outcome::Malformed));
    }
}

#[test]
fn only_ip_ether_types_parse() {
    assert_eq!(u16::from_be(ether_type::IPV4), EtherType::IPV4.0);
    assert_eq!(u16::from_be(ether_type::IPV6), EtherType::IPV6.0);
    assert_eq!(u16::from_be(ether_type::VLAN), EtherType::VLAN_TAGGED_FRAME.0);
    assert_eq!(u16::from_be(ether_type::QINQ), EtherType::PROVIDER_BRIDGING.0);
}
