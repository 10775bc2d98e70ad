//! Fuzzes the answers that the programs send in place of a packet that they do not forward: the RST of RFC 9293
//! §3.10.7.1 and ICMP errors. etherparse parses the answers, and computes the checksums of the RST.
#![no_main]

use etherparse::{Icmpv4Type, Icmpv6Type, NetSlice, SlicedPacket, TransportSlice, icmpv4, icmpv6};
use lb_common::conntrack::{Segment, Tuple};
use lb_ebpf::{
    headers,
    parse::{
        Body, Layer, Packet,
        frame::{Header, TcpHeader, lengths},
        parse,
    },
    reject,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|frame: &[u8]| {
    let Ok(packet) = parse(frame, Layer::Ethernet) else { return };
    if packet.body == Body::Tcp {
        answer_with_reset(&packet);
    }
    for error in Error::ALL {
        answer_with(error, frame, &packet);
    }
});

/// The bytes of a header.
fn bytes<T: Header>(header: &T) -> &[u8] {
    // SAFETY: a `Header` is bytes only, and the slice borrows it.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(header).cast(), size_of::<T>()) }
}

/// An IP packet with this payload.
fn ip(tuple: &Tuple, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).expect("a short answer");
    let mut packet = match tuple.source.is_v4() {
        true => bytes(&headers::ipv4_header(tuple, length)).to_vec(),
        false => bytes(&headers::ipv6_header(tuple, length)).to_vec(),
    };
    packet.extend(payload);
    packet
}

fn answer_with_reset(packet: &Packet) {
    let tuple = packet.tuple.reversed();
    let mut header = reject::reset(&tuple, &packet.segment);
    let length = u16::try_from(size_of::<TcpHeader>()).expect("20 bytes");
    let sum = headers::pseudo_header(&tuple, length).add_word(reject::reset_sum(&header).fold());
    header.checksum = (!sum.fold()).to_ne_bytes();

    let answer = ip(&tuple, bytes(&header));
    let sliced = SlicedPacket::from_ip(&answer).expect("a packet");
    let Some(TransportSlice::Tcp(tcp)) = &sliced.transport else { panic!("no TCP: {answer:x?}") };
    assert_eq!((tcp.source_port(), tcp.destination_port()), (tuple.source_port, tuple.destination_port));
    let sum = match sliced.net.as_ref().expect("a network header") {
        NetSlice::Ipv4(ip) => {
            let header = ip.header().to_header();
            assert_eq!(header.calc_header_checksum(), header.header_checksum);
            tcp.to_header().calc_checksum_ipv4_raw(header.source, header.destination, &[])
        }
        NetSlice::Ipv6(ip) => {
            tcp.to_header().calc_checksum_ipv6_raw(ip.header().source(), ip.header().destination(), &[])
        }
        NetSlice::Arp(_) => panic!("ARP"),
    };
    assert_eq!(sum, Ok(tcp.checksum()));
    let Segment { seq, payload, .. } = packet.segment;
    let sent = |bit: u8| u32::from(packet.segment.flags & bit != 0);
    let expected = match packet.segment.flags & 16 {
        // The acknowledgement covers the data, a SYN and a FIN.
        0 => (true, 0, seq.wrapping_add(payload).wrapping_add(sent(1)).wrapping_add(sent(2))),
        _ => (false, packet.segment.ack, 0),
    };
    assert_eq!((tcp.ack(), tcp.sequence_number(), tcp.acknowledgment_number()), expected);
    assert!(tcp.rst() && !tcp.syn() && !tcp.fin());
}

#[derive(Clone, Copy)]
enum Error {
    PortUnreachable,
    TimeExceeded,
    TooBig(u16),
}

impl Error {
    const ALL: [Self; 3] = [Self::PortUnreachable, Self::TimeExceeded, Self::TooBig(1280)];
}

/// Builds an ICMP error that quotes the start of the packet, and checks its length and type.
fn answer_with(error: Error, frame: &[u8], packet: &Packet) {
    let is_v4 = packet.headers.is_v4;
    let mut message = match error {
        Error::PortUnreachable => reject::port_unreachable(is_v4),
        Error::TimeExceeded => reject::time_exceeded(is_v4),
        Error::TooBig(mtu) => reject::too_big(is_v4, mtu.into()),
    }
    .to_vec();
    let quote = &frame[packet.headers.l3 as usize..];
    message.extend(&quote[..quote.len().min(reject::QUOTE as usize)]);
    assert!(message.len() <= reject::MESSAGE && message.len() > lengths::ICMP as usize);

    let tuple = Tuple { protocol: headers::icmp_protocol(is_v4), ..packet.tuple.reversed() };
    let answer = ip(&tuple, &message);
    let sliced = SlicedPacket::from_ip(&answer).expect("a packet");
    match sliced.transport.expect("a message") {
        TransportSlice::Icmpv4(icmp) => assert_eq!(icmp.icmp_type(), expected_v4(error)),
        TransportSlice::Icmpv6(icmp) => assert_eq!(icmp.icmp_type(), expected_v6(error)),
        other @ (TransportSlice::Tcp(_) | TransportSlice::Udp(_)) => panic!("{other:?}"),
    }
}

fn expected_v4(error: Error) -> Icmpv4Type {
    use icmpv4::DestUnreachableHeader::{FragmentationNeeded, Port};
    match error {
        Error::PortUnreachable => Icmpv4Type::DestinationUnreachable(Port),
        Error::TimeExceeded => Icmpv4Type::TimeExceeded(icmpv4::TimeExceededCode::TtlExceededInTransit),
        Error::TooBig(mtu) => Icmpv4Type::DestinationUnreachable(FragmentationNeeded { next_hop_mtu: mtu }),
    }
}

fn expected_v6(error: Error) -> Icmpv6Type {
    match error {
        Error::PortUnreachable => Icmpv6Type::DestinationUnreachable(icmpv6::DestUnreachableCode::Port),
        Error::TimeExceeded => Icmpv6Type::TimeExceeded(icmpv6::TimeExceededCode::HopLimitExceeded),
        Error::TooBig(mtu) => Icmpv6Type::PacketTooBig { mtu: mtu.into() },
    }
}
