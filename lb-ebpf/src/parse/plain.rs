//! The parser of the fast path: plain headers, at constant offsets.

use lb_common::{conntrack::Tuple, protocol};
use network_types::{
    ip::{Ipv4Hdr, Ipv6Hdr},
    udp::UdpHdr,
};

use super::{
    frame::{Frame, TcpHeader, half_word, lengths, v4_address, v6_address},
    ip::{Ip, ether_type},
    packet::{Fragment, Headers, Packet, Part},
    transport::{tcp, udp},
};

/// The offset of the network header.
const L3: u32 = lengths::ETHERNET;
const WHOLE: Fragment = Fragment { part: Part::Whole, identification: 0 };

/// Parses the frame of an Ethernet device if its headers are plain: TCP or UDP without tags, IP options, extension
/// headers or fragments. All offsets are then constants. `None` for any other frame: [`super::parse`] handles it.
#[inline(always)]
pub fn parse_plain<F: Frame + ?Sized>(frame: &F) -> Option<Packet> {
    let ether_type = half_word(frame.header(L3 - 2).ok()?);
    let ip = if ether_type == ether_type::IPV4 {
        plain_v4(frame.header(L3).ok()?)?
    } else if ether_type == ether_type::IPV6 {
        plain_v6(frame.header(L3).ok()?)?
    } else {
        return None;
    };
    let tuple = ip.tuple();
    match ip.protocol {
        protocol::TCP => tcp(frame, &ip, tuple).ok(),
        protocol::UDP => udp(frame, &ip, tuple).ok(),
        _ => None,
    }
}

/// Whether the headers of the frame are plain, as for [`parse_plain`], and `decide` applies to the packet's tuple.
/// Takes fewer registers than [`parse_plain`]. Each family has its own code, with constant offsets.
#[inline(always)]
pub fn is_plain_and<F: Frame + ?Sized>(frame: &F, decide: impl TupleRule) -> bool {
    let Ok(ether_type) = frame.header(L3 - 2).map(half_word) else { return false };
    if ether_type == ether_type::IPV4 {
        let Some(ip) = frame.header(L3).ok().and_then(plain_v4) else { return false };
        return plain_ports(frame, &ip).is_some_and(|tuple| decide.applies(&tuple));
    }
    ether_type == ether_type::IPV6 && is_plain_v6_and(frame, &decide)
}

/// [`is_plain_and`] for IPv6. (A subprogram: the addresses do not fit into registers, and a caller's stack frame would
/// hold them as long as the program runs.)
#[inline(never)]
fn is_plain_v6_and<F: Frame + ?Sized>(frame: &F, decide: &impl TupleRule) -> bool {
    let Some(ip) = frame.header(L3).ok().and_then(plain_v6) else { return false };
    plain_ports(frame, &ip).is_some_and(|tuple| decide.applies(&tuple))
}

/// A decision by the tuple of a packet. (A trait, because a closure cannot be marked `inline(always)`.)
pub trait TupleRule {
    /// Whether the rule applies to packets with this tuple. Mark implementations of this function `inline(always)`.
    fn applies(&self, tuple: &Tuple) -> bool;
}

/// The tuple of a TCP or UDP packet whose transport header lies within the frame.
#[inline(always)]
fn plain_ports<F: Frame + ?Sized>(frame: &F, ip: &Ip) -> Option<Tuple> {
    let [source, destination] = match ip.protocol {
        protocol::TCP => {
            let header: &TcpHeader = frame.header(ip.headers.l4).ok()?;
            [&header.source, &header.destination]
        }
        protocol::UDP => {
            let header: &UdpHdr = frame.header(ip.headers.l4).ok()?;
            [&header.src, &header.dst]
        }
        _ => return None,
    };
    let mut tuple = ip.tuple();
    tuple.source_port = u16::from_be(half_word(source));
    tuple.destination_port = u16::from_be(half_word(destination));
    Some(tuple)
}

/// Reads an IPv4 header; `None` if the header is invalid or has options, or if the packet is a fragment.
#[inline(always)]
fn plain_v4(header: &Ipv4Hdr) -> Option<Ip> {
    let length = u32::from(u16::from_be(half_word(&header.tot_len)));
    // In the field with the fragment offset, only the flag "don't fragment" may be set.
    if header.vihl != 0x45
        || half_word(&header.frags) & !0x4000_u16.to_be() != 0
        || (length != 0 && length < lengths::IPV4)
    {
        return None;
    }
    Some(Ip {
        source: v4_address(&header.src_addr),
        destination: v4_address(&header.dst_addr),
        protocol: header.proto,
        headers: Headers { l3: L3, l4: L3 + lengths::IPV4, is_v4: true },
        fragment: WHOLE,
        length,
    })
}

/// Reads an IPv6 header; `None` if the header is invalid, or if its payload length is 0 (a jumbogram or a BIG TCP
/// packet).
#[inline(always)]
fn plain_v6(header: &Ipv6Hdr) -> Option<Ip> {
    let (source, destination) = (v6_address(&header.src_addr), v6_address(&header.dst_addr));
    let payload = u32::from(u16::from_be(half_word(&header.payload_len)));
    if header.vcf[0] >> 4 != 6 || source.is_v4() || destination.is_v4() || payload == 0 {
        return None;
    }
    Some(Ip {
        source,
        destination,
        protocol: header.next_hdr,
        headers: Headers { l3: L3, l4: L3 + lengths::IPV6, is_v4: false },
        fragment: WHOLE,
        length: payload + lengths::IPV6,
    })
}
