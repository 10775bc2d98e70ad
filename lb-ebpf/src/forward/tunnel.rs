//! Tunnels between nodes: the headers of a client's packet on the way to the backend's node.
//!
//! A tunnel is either IP in IP (RFC 2003, RFC 2473), or variant 1 of GUE (draft-ietf-intarea-gue §4): a datagram whose
//! payload is the packet, without a GUE header. The outer header is always of the same family as the packet.

use lb_common::{
    Address, GUE_PORT, Outcome,
    checksum::Sum,
    conntrack::{Flow, Tuple, flow_flags},
    hash, protocol,
};
use network_types::{
    ip::{Ipv4Hdr, Ipv6Hdr},
    udp::UdpHdr,
};

use crate::{
    headers::HOP_LIMIT,
    parse::{
        Ip, Layer, Part,
        frame::{Frame, half_word, lengths},
        network_offset,
    },
    reject::{host_unreachable, is_too_big, too_big},
};

/// The tunnel that a packet came through, or that an ICMP error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// The address of the node that sent the packet into the tunnel.
    pub source: Address,
    /// The destination of the outer header: in a tunnel of this cluster, the address of a backend.
    pub destination: Address,
    /// Offset of the outer header in the frame.
    pub outer: u32,
    /// Offset of the packet in the frame.
    pub inner: u32,
}

/// The tunnel around the packet in a frame of this `layer`.
///
/// # Errors
///
/// The [`Outcome`] of a packet that is in no tunnel.
#[inline(always)]
pub fn find<F: Frame + ?Sized>(frame: &F, layer: Layer) -> Result<Tunnel, Outcome> {
    find_at(frame, network_offset(frame, layer)?)
}

/// The tunnel whose outer header begins `outer` bytes into the frame, for example in the quote of an ICMP error.
///
/// # Errors
///
/// The [`Outcome`] of a packet that is in no tunnel.
#[inline(always)]
pub fn find_at<F: Frame + ?Sized>(frame: &F, outer: u32) -> Result<Tunnel, Outcome> {
    let ip = Ip::read(frame, outer)?;
    let is_v4 = ip.headers.is_v4;
    if ip.fragment.part != Part::Whole {
        return Err(Outcome::NotTransport);
    }
    let inner = match ip.protocol {
        protocol::IPIP if is_v4 => ip.headers.l4,
        protocol::IPV6 if !is_v4 => ip.headers.l4,
        protocol::UDP => {
            let header: &UdpHdr = frame.header(ip.headers.l4)?;
            if u16::from_be(half_word(&header.dst)) != GUE_PORT {
                return Err(Outcome::NotTransport);
            }
            ip.headers.l4 + lengths::UDP
        }
        _ => return Err(Outcome::NotTransport),
    };
    let [version, _] = *frame.header::<[u8; 2]>(inner)?;
    if (version >> 4 == 4) != is_v4 || (version >> 4 == 6) == is_v4 {
        return Err(Outcome::NotTransport);
    }
    Ok(Tunnel { source: ip.source, destination: ip.destination, outer, inner })
}

/// Number of bytes that a tunnel adds to a packet.
#[inline(always)]
pub const fn overhead(is_v4: bool, is_gue: bool) -> u32 {
    let network = if is_v4 { lengths::IPV4 } else { lengths::IPV6 };
    network + if is_gue { lengths::UDP } else { 0 }
}

/// Turns an ICMP error about a tunnel into an error for the sender of the packet in the tunnel. `about_tunnel` is the
/// first 8 bytes of the given error. Returns the first 8 bytes of the new error, checksum still 0; `None` if the given
/// error says nothing usable about the path. `overhead` is the number of bytes that the tunnel adds.
///
/// An MTU becomes the MTU inside the tunnel. Every other failure becomes "host unreachable" or "address unreachable",
/// because the sender knows neither the tunnel's protocol nor its hop limit (RFC 2003 §4, RFC 2473 §8).
#[inline(always)]
pub fn error_for_sender(about_tunnel: &[u8; 8], is_v4: bool, overhead: u32) -> Option<[u8; 8]> {
    let [kind, _, _, _, a, b, c, d] = *about_tunnel;
    if is_too_big(about_tunnel, is_v4) {
        let mtu =
            if is_v4 { u32::from(u16::from_be_bytes([c, d])) } else { u32::from_be_bytes([a, b, c, d]) };
        let room = mtu.saturating_sub(overhead);
        let room = if is_v4 { room } else { room.max(LEAST_MTU_V6) };
        return (room >= LEAST_MTU_V4).then(|| too_big(is_v4, room));
    }
    match (is_v4, kind) {
        (true, UNREACHABLE_V4 | TIME_EXCEEDED_V4) | (false, UNREACHABLE_V6 | TIME_EXCEEDED_V6) => {
            Some(host_unreachable(is_v4))
        }
        _ => None,
    }
}

/// ICMP types (RFC 792, RFC 4443 §3).
const UNREACHABLE_V4: u8 = 3;
const TIME_EXCEEDED_V4: u8 = 11;
const UNREACHABLE_V6: u8 = 1;
const TIME_EXCEEDED_V6: u8 = 3;

/// The smallest MTU of an IPv4 link in bytes (RFC 791 §3.2). A router that reports less does not know the MTU.
const LEAST_MTU_V4: u32 = 68;
/// The smallest MTU of an IPv6 link in bytes (RFC 8200 §5). Senders treat a smaller MTU as this one.
const LEAST_MTU_V6: u32 = 1280;

/// The source port of the GUE datagrams that carry a flow: a dynamic port (RFC 6335 §6) that a hash of the flow's
/// client and ports chooses. So routers and network cards that hash ports spread flows over paths, and keep the packets
/// of each flow in order.
#[inline(always)]
pub fn source_port(from: &Tuple) -> u16 {
    let ports = u32::from(from.source_port) << 16 | u32::from(from.destination_port);
    0xc000 | (hash::of_endpoint(0, &from.source, ports) >> 50) as u16
}

/// The ends of a tunnel, and the fields that its headers take from the packet.
#[derive(Clone, Copy, Debug)]
pub struct Outer {
    /// The address of this node, which sends the tunnel's packets.
    pub source: Address,
    /// The address of the backend, at which the tunnel ends.
    pub destination: Address,
    /// The source port if the tunnel is GUE; else 0.
    pub port: u16,
    /// Size in bytes of the packet with all headers of the tunnel; 0 if the packet's own header does not contain its
    /// length, or if the sum exceeds 65,535.
    pub length: u16,
    /// The first four bytes of the packet's header.
    pub start: [u8; 4],
}

impl Outer {
    /// The outer header for a packet of `flow`. `start` is the first four bytes of the packet's own header. `length` is
    /// the packet's length in bytes, or 0 if its own header cannot hold the length, as with BIG TCP inside a host.
    #[inline(always)]
    pub fn new(flow: &Flow, start: [u8; 4], length: u32) -> Self {
        let Tuple { source, destination, source_port, .. } = flow.to;
        let is_gue = flow.flags & flow_flags::GUE != 0;
        let whole = if length == 0 { 0 } else { length + overhead(source.is_v4(), is_gue) };
        let port = if is_gue { source_port } else { 0 };
        Self { source, destination, port, length: u16::try_from(whole).unwrap_or(0), start }
    }

    /// Whether the tunnel is GUE.
    #[inline(always)]
    pub const fn is_gue(&self) -> bool {
        self.port != 0
    }

    /// The header of a tunnel over IPv4. The header sets "don't fragment", because its identification is always 0 and a
    /// receiver could not tell fragments of different packets apart. A router whose MTU is too small sends an ICMP
    /// error to this node. The header clears the ECN bits, so drops are the only congestion signal (RFC 6040 §4.1,
    /// compatibility mode).
    #[inline(always)]
    pub fn ipv4(&self) -> Ipv4Hdr {
        let mut header = Ipv4Hdr {
            vihl: 0x45,
            tos: self.start[1] & !ECN,
            tot_len: self.length.to_be_bytes(),
            id: [0; 2],
            frags: 0x4000_u16.to_be_bytes(),
            ttl: HOP_LIMIT,
            proto: if self.is_gue() { protocol::UDP } else { protocol::IPIP },
            check: [0; 2],
            src_addr: self.source.v4_bytes(),
            dst_addr: self.destination.v4_bytes(),
        };
        let sum = Sum::ZERO
            .add_word(u16::from_ne_bytes([header.vihl, header.tos]))
            .add_word(u16::from_ne_bytes(header.tot_len))
            .add_word(u16::from_ne_bytes(header.frags))
            .add_word(u16::from_ne_bytes([header.ttl, header.proto]))
            .add_wide(self.source.v4_word())
            .add_wide(self.destination.v4_word());
        header.check = (!sum.fold()).to_ne_bytes();
        header
    }

    /// The header of a tunnel over IPv6, with the flow label of the packet, by which routers spread flows.
    #[inline(always)]
    pub fn ipv6(&self) -> Ipv6Hdr {
        const HEADER: u16 = 40;
        let [version, class, label, more] = self.start;
        Ipv6Hdr {
            vcf: [version, class & !(ECN << 4), label, more],
            payload_len: self.length.saturating_sub(HEADER).to_be_bytes(),
            next_hdr: if self.is_gue() { protocol::UDP } else { protocol::IPV6 },
            hop_limit: HOP_LIMIT,
            src_addr: *self.source.bytes(),
            dst_addr: *self.destination.bytes(),
        }
    }

    /// The UDP header of a GUE tunnel. The header has no checksum, which a tunnel may omit (RFC 6935 §5): the packet
    /// inside has its own checksum.
    #[inline(always)]
    pub fn udp(&self) -> UdpHdr {
        let network: u16 = if self.source.is_v4() { 20 } else { 40 };
        UdpHdr {
            src: self.port.to_be_bytes(),
            dst: GUE_PORT.to_be_bytes(),
            len: self.length.saturating_sub(network).to_be_bytes(),
            check: [0; 2],
        }
    }
}

/// The bits of the traffic class for explicit congestion notification (RFC 3168).
const ECN: u8 = 3;

/// Length of the packet in bytes, from its header, which begins with `start`; 0 if the header does not contain the
/// length.
#[inline(always)]
pub fn length(start: &[u8; 8], is_v4: bool) -> u32 {
    let [_, _, total, total_low, payload, payload_low, ..] = *start;
    if is_v4 {
        return u32::from(u16::from_be_bytes([total, total_low]));
    }
    match u16::from_be_bytes([payload, payload_low]) {
        0 => 0,
        payload => u32::from(payload) + lengths::IPV6,
    }
}

#[cfg(test)]
mod tests {
    use std::{vec, vec::Vec};

    use etherparse::PacketBuilder;
    use lb_common::conntrack::Tick;

    use super::*;

    fn flow(v4: bool, gue: bool) -> Flow {
        let (source, destination) = if v4 {
            (Address::from_v4([192, 0, 2, 1]), Address::from_v4([10, 1, 0, 5]))
        } else {
            (Address::from_v6([0xfd; 16]), Address::from_v6([0xfe; 16]))
        };
        let to = Tuple::new(source, destination, 50_000, 8080, protocol::TCP);
        let flags = flow_flags::ROUTED | flow_flags::TUNNEL | if gue { flow_flags::GUE } else { 0 };
        Flow::new(&to, &to, 1, flags, Tick(1))
    }

    fn packet(v4: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        let builder = if v4 {
            PacketBuilder::ipv4([192, 0, 2, 9], [198, 51, 100, 1], 20)
        } else {
            PacketBuilder::ipv6([1; 16], [2; 16], 20)
        };
        builder.tcp(40_000, 80, 1, 1000).write(&mut bytes, b"hello").unwrap();
        if v4 {
            bytes[1] |= 0xbb;
        } else {
            // Traffic class 0x0b, flow label 0xabcde.
            bytes[1..4].copy_from_slice(&[0xba, 0xbc, 0xde]);
        }
        bytes
    }

    /// A packet with the headers of its tunnel.
    fn sent(v4: bool, gue: bool) -> Vec<u8> {
        let inner = packet(v4);
        let start: [u8; 8] = inner[..8].try_into().unwrap();
        let outer = Outer::new(&flow(v4, gue), inner[..4].try_into().unwrap(), length(&start, v4));
        let mut bytes = if v4 {
            let Ipv4Hdr { vihl, tos, tot_len, id, frags, ttl, proto, check, src_addr, dst_addr } =
                outer.ipv4();
            [&[vihl, tos][..], &tot_len, &id, &frags, &[ttl, proto], &check, &src_addr, &dst_addr].concat()
        } else {
            let Ipv6Hdr { vcf, payload_len, next_hdr, hop_limit, src_addr, dst_addr } = outer.ipv6();
            [&vcf[..], &payload_len, &[next_hdr, hop_limit], &src_addr, &dst_addr].concat()
        };
        if gue {
            let UdpHdr { src, dst, len, check } = outer.udp();
            bytes.extend([src, dst, len, check].concat());
        }
        assert_eq!(bytes.len(), overhead(v4, gue) as usize);
        bytes.extend(inner);
        bytes
    }

    const EVERY: [(bool, bool); 4] = [(true, false), (true, true), (false, false), (false, true)];

    #[test]
    fn encapsulated_packet_is_found_in_its_tunnel() {
        for (v4, gue) in EVERY {
            let Tuple { source, destination, .. } = flow(v4, gue).to;
            let inner = overhead(v4, gue);
            let expected = Tunnel { source, destination, outer: 0, inner };
            assert_eq!(find(sent(v4, gue).as_slice(), Layer::Ip), Ok(expected), "{v4} {gue}");
            let framed = [&[0; 12][..], if v4 { &[8, 0] } else { &[0x86, 0xdd] }, &sent(v4, gue)].concat();
            let expected = Tunnel { outer: 14, inner: inner + 14, ..expected };
            assert_eq!(find(framed.as_slice(), Layer::Ethernet), Ok(expected), "{v4} {gue}");
        }
    }

    #[test]
    fn outer_header_is_valid_and_copies_the_traffic_class_without_ecn_and_the_flow_label() {
        for (v4, gue) in EVERY {
            let bytes = sent(v4, gue);
            let sliced = etherparse::SlicedPacket::from_ip(&bytes).unwrap();
            match sliced.net.unwrap() {
                etherparse::NetSlice::Ipv4(ip) => {
                    let header = ip.header().to_header();
                    assert_eq!(header.header_checksum, header.calc_header_checksum());
                    assert_eq!(usize::from(header.total_len), bytes.len());
                    assert!(header.dont_fragment && header.time_to_live == HOP_LIMIT);
                }
                etherparse::NetSlice::Ipv6(ip) => {
                    let header = ip.header().to_header();
                    assert_eq!(usize::from(header.payload_length) + 40, bytes.len());
                    assert_eq!(header.hop_limit, HOP_LIMIT);
                }
                etherparse::NetSlice::Arp(_) => unreachable!(),
            }
            assert_eq!(&bytes[1..4], if v4 { [0xb8, bytes[2], bytes[3]] } else { [0x8a, 0xbc, 0xde] });
            if gue {
                let udp = &bytes[overhead(v4, false) as usize..];
                let port = |at: usize| u16::from_be_bytes([udp[at], udp[at + 1]]);
                assert_eq!([port(0), port(2), port(6)], [50_000, GUE_PORT, 0]);
                assert_eq!(usize::from(port(4)), udp.len());
            }
        }
    }

    #[test]
    fn length_that_does_not_fit_is_0() {
        for (length, expected) in [(0, 0), (1, 21), (65_515, 65_535), (65_516, 0), (70_000, 0)] {
            assert_eq!(Outer::new(&flow(true, false), [0x45, 0, 0, 0], length).length, expected);
        }
    }

    #[test]
    fn packets_in_no_tunnel_are_not_found() {
        let changed = |v4, gue, change: fn(&mut Vec<u8>)| {
            let mut bytes = sent(v4, gue);
            change(&mut bytes);
            find(bytes.as_slice(), Layer::Ip)
        };
        let not: Result<Tunnel, Outcome> = Err(Outcome::NotTransport);
        assert_eq!(changed(true, false, |o| o[9] = 6), not, "TCP");
        assert_eq!(changed(true, false, |o| o[9] = 41), not, "IPv6 in IPv4");
        assert_eq!(changed(true, false, |o| o[20] = 0x60), not, "another family");
        assert_eq!(changed(false, true, |o| o[48] = 0x45), not, "another family");
        assert_eq!(changed(true, false, |o| o[7] = 9), not, "a fragment");
        assert_eq!(changed(true, false, |o| o[6] = 0x20), not, "a first fragment");
        assert_eq!(changed(true, true, |o| o[23] = 1), not, "another port");
        assert_eq!(changed(true, true, |o| o[28] = 0), not, "GUE with a header of its own");
        assert_eq!(changed(true, false, |o| o.truncate(20)), Err(Outcome::Malformed));
    }

    #[test]
    fn error_about_a_tunnel_becomes_one_about_the_packet_inside() {
        let v4 = |kind, code, mtu: u16| {
            let [a, b] = mtu.to_be_bytes();
            error_for_sender(&[kind, code, 9, 9, 0, 0, a, b], true, 20)
        };
        assert_eq!(v4(3, 4, 1400), Some(too_big(true, 1380)));
        assert_eq!(v4(3, 4, 88), Some(too_big(true, 68)));
        assert_eq!([v4(3, 4, 87), v4(3, 4, 0)], [None, None], "no MTU");
        for (kind, code) in [(3, 0), (3, 1), (3, 2), (3, 3), (3, 13), (11, 0)] {
            assert_eq!(v4(kind, code, 0), Some([3, 1, 0, 0, 0, 0, 0, 0]), "{kind}, {code}");
        }
        assert_eq!([v4(4, 0, 0), v4(5, 1, 0), v4(12, 0, 0)], [None; 3], "source quench, redirect, parameter");

        let v6 = |kind, code, mtu: u32| {
            let [a, b, c, d] = mtu.to_be_bytes();
            error_for_sender(&[kind, code, 9, 9, a, b, c, d], false, 40)
        };
        assert_eq!(v6(2, 0, 1400), Some(too_big(false, 1360)));
        assert_eq!([v6(2, 0, 1300), v6(2, 0, 0)], [Some(too_big(false, 1280)); 2]);
        for (kind, code) in [(1, 0), (1, 4), (3, 0)] {
            assert_eq!(v6(kind, code, 0), Some([1, 3, 0, 0, 0, 0, 0, 0]), "{kind}, {code}");
        }
        assert_eq!(v6(4, 0, 0), None, "parameter problem");
    }

    #[test]
    fn gue_source_ports_are_dynamic_and_differ_by_flow() {
        let tuple = |port| Tuple { source_port: port, ..flow(true, true).to };
        let mut ports: Vec<u16> = (0..1000).map(|port| source_port(&tuple(port))).collect();
        assert!(ports.iter().all(|port| *port >= 0xc000));
        ports.sort_unstable();
        ports.dedup();
        assert!(ports.len() > 940, "{} of about 970", ports.len());
        assert_eq!(vec![source_port(&tuple(7)); 2], [source_port(&tuple(7)), source_port(&tuple(7))]);
    }
}
