//! Headers that the programs build: network headers, and the sum over a pseudo header.

use lb_common::{Address, checksum::Sum, conntrack::Tuple, protocol};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

use crate::parse::frame::lengths;

/// Size of an IPv4 header without options, in bytes.
const IPV4_HEADER: u16 = 20;
const _: () = assert!(IPV4_HEADER as u32 == lengths::IPV4);

/// Hop limit of packets that the programs build: the default of Linux.
pub const HOP_LIMIT: u8 = 64;

/// The network header of a packet with `payload` bytes from `tuple.source` to `tuple.destination`.
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
        src_addr: tuple.source.v4_bytes(),
        dst_addr: tuple.destination.v4_bytes(),
    };
    let sum = add_v4(Sum::ZERO, &tuple.source, &tuple.destination)
        .add_word(u16::from_ne_bytes([header.vihl, header.tos]))
        .add_word(u16::from_ne_bytes(header.tot_len))
        .add_word(u16::from_ne_bytes(header.frags))
        .add_word(u16::from_ne_bytes([header.ttl, header.proto]));
    header.check = (!sum.fold()).to_ne_bytes();
    header
}

/// The network header of a packet with `payload` bytes from `tuple.source` to `tuple.destination`.
#[inline(always)]
pub fn ipv6_header(tuple: &Tuple, payload: u16) -> Ipv6Hdr {
    Ipv6Hdr {
        vcf: [0x60, 0, 0, 0],
        payload_len: payload.to_be_bytes(),
        next_hdr: tuple.protocol,
        hop_limit: HOP_LIMIT,
        src_addr: *tuple.source.bytes(),
        dst_addr: *tuple.destination.bytes(),
    }
}

/// The sum over the pseudo header (RFC 9293 §3.1, RFC 8200 §8.1) for `length` bytes of transport header and payload.
#[inline(always)]
pub fn pseudo_header(tuple: &Tuple, length: u16) -> Sum {
    let sum = Sum::ZERO.add_word(length.to_be()).add_word(u16::from(tuple.protocol).to_be());
    if tuple.source.is_v4() {
        add_v4(sum, &tuple.source, &tuple.destination)
    } else {
        sum.add_16(tuple.source.bytes()).add_16(tuple.destination.bytes())
    }
}

#[inline(always)]
fn add_v4(sum: Sum, source: &Address, destination: &Address) -> Sum {
    sum.add_wide(source.v4_word()).add_wide(destination.v4_word())
}

/// The ICMP protocol of the address family.
#[inline(always)]
pub const fn icmp_protocol(is_v4: bool) -> u8 {
    if is_v4 { protocol::ICMP } else { protocol::ICMPV6 }
}
