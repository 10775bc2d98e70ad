//! The answers to packets for services without backends, as headers.

use lb_common::{
    Address,
    checksum::Sum,
    conntrack::{Segment, Tuple, tcp_flags},
    protocol,
};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

use crate::frame::TcpHeader;

/// Octets of an IPv4 header, as its length field counts them.
const IPV4_HEADER: u16 = 20;

/// Hop limit of our answers: what Linux uses.
const HOP_LIMIT: u8 = 64;

/// The network header of an answer with `payload` octets from `tuple.source` to `tuple.destination`.
#[inline(always)]
pub fn ipv4_header(tuple: &Tuple, payload: u16) -> Ipv4Hdr {
    let mut header = Ipv4Hdr {
        vihl: 0x45,
        tos: 0,
        tot_len: (payload + IPV4_HEADER).to_be_bytes(),
        id: [0; 2],
        frags: 0x4000_u16.to_be_bytes(),
        ttl: HOP_LIMIT,
        proto: tuple.protocol,
        check: [0; 2],
        src_addr: tuple.source.v4_octets(),
        dst_addr: tuple.destination.v4_octets(),
    };
    let sum = add_v4(Sum::ZERO, &tuple.source, &tuple.destination)
        .add_word(u16::from_ne_bytes([header.vihl, header.tos]))
        .add_word(u16::from_ne_bytes(header.tot_len))
        .add_word(u16::from_ne_bytes(header.frags))
        .add_word(u16::from_ne_bytes([header.ttl, header.proto]));
    header.check = (!sum.fold()).to_ne_bytes();
    header
}

/// The network header of an answer with `payload` octets from `tuple.source` to `tuple.destination`.
#[inline(always)]
pub fn ipv6_header(tuple: &Tuple, payload: u16) -> Ipv6Hdr {
    Ipv6Hdr {
        vcf: [0x60, 0, 0, 0],
        payload_len: payload.to_be_bytes(),
        next_hdr: tuple.protocol,
        hop_limit: HOP_LIMIT,
        src_addr: *tuple.source.octets(),
        dst_addr: *tuple.destination.octets(),
    }
}

/// The sum over the pseudo header (RFC 9293 §3.1, RFC 8200 §8.1) of `length` octets of transport.
#[inline(always)]
pub fn pseudo_header(tuple: &Tuple, length: u16) -> Sum {
    let sum = Sum::ZERO.add_word(length.to_be()).add_word(u16::from(tuple.protocol).to_be());
    if tuple.source.is_v4() {
        add_v4(sum, &tuple.source, &tuple.destination)
    } else {
        sum.add_16(tuple.source.octets()).add_16(tuple.destination.octets())
    }
}

#[inline(always)]
fn add_v4(sum: Sum, source: &Address, destination: &Address) -> Sum {
    sum.add_wide(source.v4_word()).add_wide(destination.v4_word())
}

/// The TCP header of the RST that answers `segment` (RFC 9293 §3.10.7.1), checksum still 0; `tuple` is the answer's.
#[inline(always)]
pub fn reset(tuple: &Tuple, segment: &Segment) -> TcpHeader {
    let (seq, ack, flags) = if segment.flags & tcp_flags::ACK != 0 {
        (segment.ack, 0, tcp_flags::RST)
    } else {
        (0, segment.end(), tcp_flags::RST | tcp_flags::ACK)
    };
    TcpHeader {
        source: tuple.source_port.to_be_bytes(),
        destination: tuple.destination_port.to_be_bytes(),
        seq: seq.to_be_bytes(),
        ack: ack.to_be_bytes(),
        data_offset: 5 << 4,
        flags,
        window: [0; 2],
        checksum: [0; 2],
        urgent: [0; 2],
    }
}

/// The sum over the header that [`reset`] makes.
#[inline(always)]
pub fn reset_sum(header: &TcpHeader) -> Sum {
    let words = [header.seq, header.ack].map(u32::from_ne_bytes);
    Sum::ZERO
        .add_word(u16::from_ne_bytes(header.source))
        .add_word(u16::from_ne_bytes(header.destination))
        .add_wide(words[0])
        .add_wide(words[1])
        .add_word(u16::from_ne_bytes([header.data_offset, header.flags]))
}

/// The first 8 octets of an ICMP port unreachable, checksum still 0 (RFC 792; RFC 4443 §3.1).
#[inline(always)]
pub const fn port_unreachable(is_v4: bool) -> [u8; 8] {
    if is_v4 { [3, 3, 0, 0, 0, 0, 0, 0] } else { [1, 4, 0, 0, 0, 0, 0, 0] }
}

/// The ICMP of the version that goes with the address family.
#[inline(always)]
pub const fn icmp_protocol(is_v4: bool) -> u8 {
    if is_v4 { protocol::ICMP } else { protocol::ICMPV6 }
}
