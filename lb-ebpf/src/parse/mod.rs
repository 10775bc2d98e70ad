//! From octets to what the load balancer wants to know of a packet.

use lb_common::{
    Address, Outcome,
    conntrack::{Segment, Tuple},
    protocol,
};
use network_types::{
    ip::{Ipv4Hdr, Ipv6Hdr},
    udp::UdpHdr,
};

pub mod bounds;
pub mod frame;

use self::frame::{Frame, TcpHeader, half_word, lengths, v4_address, v6_address, word};

/// Where the network header begins in the frames of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// Behind an Ethernet header, and VLAN tags if there are any.
    Ethernet,
    /// At once: a device without link-layer header (tun, WireGuard, IPIP, …).
    Ip,
}

/// A packet with a transport protocol that has ports, an ICMP error about one, or an ICMP echo request.
///
/// No field is an enum with a payload: the payload of the other variants would be undefined, LLVM then stores whatever a
/// register happens to hold, and the verifier refuses that where it is a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The five-tuple; without ports where this is an ICMP message or a later fragment.
    pub tuple: Tuple,
    /// Where the headers are.
    pub headers: Headers,
    /// Which part of a datagram it is.
    pub fragment: Fragment,
    /// What it carries.
    pub body: Body,
    /// The TCP segment, or the SCTP packet in its terms; zeros in anything else.
    pub segment: Segment,
    /// Octets of the IP packet as its header says: without padding of the link layer, and 0 where they are more than a header can
    /// say. Of what came out of a tunnel, those of the packet in there.
    pub length: u32,
}

/// Where the headers of a packet are; octets from the start of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// The network header.
    pub l3: u32,
    /// The transport header.
    pub l4: u32,
    /// IPv4, else IPv6.
    pub is_v4: bool,
}

impl Headers {
    /// As [`Packet::length`], but 40 in place of 0 for IPv6. (Read anew, it is any number to the verifier, which would follow each
    /// case of parsing otherwise.)
    ///
    /// # Errors
    ///
    /// [`Outcome::Malformed`] where the frame ends before the header does.
    #[inline(always)]
    pub fn length<F: Frame + ?Sized>(&self, frame: &F) -> Result<u32, Outcome> {
        if self.is_v4 {
            let header: &Ipv4Hdr = frame.header(self.l3)?;
            return Ok(u32::from(u16::from_be(half_word(&header.tot_len))));
        }
        let header: &Ipv6Hdr = frame.header(self.l3)?;
        Ok(u32::from(u16::from_be(half_word(&header.payload_len))) + lengths::IPV6)
    }
}

/// Which part of a datagram a packet is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Where in the datagram it stands.
    pub part: Part,
    /// The identification of the datagram as on the wire: 16 bits in IPv4, 32 in IPv6.
    pub identification: u32,
}

/// Where in a datagram a fragment stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// It is all of it.
    Whole,
    /// The first fragment: it carries the transport header.
    First,
    /// A later fragment: what follows the network header is *not* a transport header.
    Later,
}

impl Part {
    #[inline(always)]
    const fn of(offset: u16, more_follow: u16) -> Self {
        match (offset, more_follow) {
            (0, 0) => Self::Whole,
            (0, _) => Self::First,
            _ => Self::Later,
        }
    }
}

/// What a packet carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// A TCP segment.
    Tcp,
    /// A UDP datagram, or its first fragment.
    Udp,
    /// An SCTP packet.
    Sctp,
    /// A fragment without transport header.
    LaterFragment,
    /// An ICMP error about another packet.
    IcmpError,
    /// An ICMP echo request.
    Echo,
}

/// The packet that an ICMP error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quoted {
    /// Its five-tuple.
    pub tuple: Tuple,
    /// Where its headers are.
    pub headers: Headers,
}

/// `EtherType`s as they lie in memory.
mod ether_type {
    pub(super) const IPV4: u16 = 0x0800_u16.to_be();
    pub(super) const IPV6: u16 = 0x86dd_u16.to_be();
    pub(super) const VLAN: u16 = 0x8100_u16.to_be();
    pub(super) const QINQ: u16 = 0x88a8_u16.to_be();
}

/// IPv6 extension headers (RFC 8200 §4) that may stand before the transport header.
mod extension {
    pub(super) const HOP_BY_HOP: u8 = 0;
    pub(super) const ROUTING: u8 = 43;
    pub(super) const FRAGMENT: u8 = 44;
    pub(super) const AUTHENTICATION: u8 = 51;
    pub(super) const DESTINATION: u8 = 60;

    #[inline(always)]
    pub(super) const fn is_one(next_header: u8) -> bool {
        matches!(next_header, HOP_BY_HOP | ROUTING | FRAGMENT | AUTHENTICATION | DESTINATION)
    }
}

const NO_SEGMENT: Segment = Segment { flags: 0, seq: 0, ack: 0, payload: 0 };

/// How many extension headers are walked: each kind once, destination options twice (RFC 8200 §4.1).
const MAX_EXTENSIONS: u32 = 6;

/// Parses the frame of a device of this `layer`.
///
/// # Errors
///
/// The [`Outcome`] of a packet that is none of our business.
#[inline(always)]
pub fn parse<F: Frame + ?Sized>(frame: &F, layer: Layer) -> Result<Packet, Outcome> {
    parse_at(frame, network_offset(frame, layer)?)
}

/// Parses the packet whose network header begins `l3` octets into the frame.
///
/// # Errors
///
/// As [`parse`].
#[inline(always)]
pub fn parse_at<F: Frame + ?Sized>(frame: &F, l3: u32) -> Result<Packet, Outcome> {
    let ip = Ip::read(frame, l3)?;
    let tuple = ip.tuple();
    if ip.fragment.part == Part::Later {
        return Ok(ip.packet(tuple, Body::LaterFragment));
    }
    match ip.protocol {
        protocol::TCP => tcp(frame, &ip, tuple),
        protocol::UDP => udp(frame, &ip, tuple),
        protocol::SCTP => sctp(frame, &ip, tuple),
        protocol::ICMP if ip.headers.is_v4 => icmp(frame, &ip, tuple),
        protocol::ICMPV6 if !ip.headers.is_v4 => icmp(frame, &ip, tuple),
        _ => Err(Outcome::NotTransport),
    }
}

/// Parses the frame of an Ethernet device if its headers are of the usual kind: no tags, options, extension headers or
/// fragments, TCP or UDP. The offsets are constants then.
///
/// # Errors
///
/// [`Outcome::OtherHook`] for any other, [`Outcome::Malformed`] where it is too short: [`parse`] tells more.
#[inline(always)]
pub fn parse_plain<F: Frame + ?Sized>(frame: &F) -> Result<Packet, Outcome> {
    const L3: u32 = lengths::ETHERNET;
    let ether_type = half_word(frame.header(L3 - 2)?);
    let ip = if ether_type == ether_type::IPV4 {
        let header: &Ipv4Hdr = frame.header(L3)?;
        let length = u32::from(u16::from_be(half_word(&header.tot_len)));
        // Of the fragment field, the flag that forbids fragments may be there.
        if header.vihl != 0x45
            || half_word(&header.frags) & !0x4000_u16.to_be() != 0
            || (length != 0 && length < lengths::IPV4)
        {
            return Err(Outcome::OtherHook);
        }
        Ip {
            source: v4_address(&header.src_addr),
            destination: v4_address(&header.dst_addr),
            protocol: header.proto,
            headers: Headers { l3: L3, l4: L3 + lengths::IPV4, is_v4: true },
            fragment: WHOLE,
            length,
        }
    } else if ether_type == ether_type::IPV6 {
        let header: &Ipv6Hdr = frame.header(L3)?;
        let (source, destination) = (v6_address(&header.src_addr), v6_address(&header.dst_addr));
        let payload = u32::from(u16::from_be(half_word(&header.payload_len)));
        if header.vcf[0] >> 4 != 6 || source.is_v4() || destination.is_v4() || payload == 0 {
            return Err(Outcome::OtherHook);
        }
        Ip {
            source,
            destination,
            protocol: header.next_hdr,
            headers: Headers { l3: L3, l4: L3 + lengths::IPV6, is_v4: false },
            fragment: WHOLE,
            length: payload + lengths::IPV6,
        }
    } else {
        return Err(Outcome::OtherHook);
    };
    let tuple = ip.tuple();
    match ip.protocol {
        protocol::TCP => tcp(frame, &ip, tuple),
        protocol::UDP => udp(frame, &ip, tuple),
        _ => Err(Outcome::OtherHook),
    }
}

const WHOLE: Fragment = Fragment { part: Part::Whole, identification: 0 };

/// Where the network header begins.
#[inline(always)]
pub(crate) fn network_offset<F: Frame + ?Sized>(frame: &F, layer: Layer) -> Result<u32, Outcome> {
    match layer {
        Layer::Ethernet => skip_ethernet(frame),
        Layer::Ip => Ok(0),
    }
}

/// The offset of the network header behind an Ethernet header and up to two VLAN tags (802.1Q, 802.1ad). Tags that
/// the device has taken out of the frame are not seen and need not be.
#[inline(always)]
fn skip_ethernet<F: Frame + ?Sized>(frame: &F) -> Result<u32, Outcome> {
    // The EtherType is the last field of both headers; `EthHdr` itself wants to be aligned.
    let mut offset = lengths::ETHERNET;
    let mut ether_type = half_word(frame.header(offset - 2)?);
    for _ in 0..2 {
        if ether_type != ether_type::VLAN && ether_type != ether_type::QINQ {
            break;
        }
        offset += lengths::VLAN;
        ether_type = half_word(frame.header(offset - 2)?);
    }
    match ether_type {
        ether_type::IPV4 | ether_type::IPV6 => Ok(offset),
        _ => Err(Outcome::NotIp),
    }
}

/// A network header of either version.
pub(crate) struct Ip {
    pub(crate) source: Address,
    pub(crate) destination: Address,
    pub(crate) protocol: u8,
    pub(crate) headers: Headers,
    pub(crate) fragment: Fragment,
    /// Octets of the packet, from the network header on; without link-layer padding.
    length: u32,
}

impl Ip {
    #[inline(always)]
    pub(crate) fn read<F: Frame + ?Sized>(frame: &F, l3: u32) -> Result<Self, Outcome> {
        let [first, _] = *frame.header::<[u8; 2]>(l3)?;
        match first >> 4 {
            4 => Self::read_v4(frame, l3),
            6 => Self::read_v6(frame, l3),
            _ => Err(Outcome::NotIp),
        }
    }

    #[inline(always)]
    fn read_v4<F: Frame + ?Sized>(frame: &F, l3: u32) -> Result<Self, Outcome> {
        let header: &Ipv4Hdr = frame.header(l3)?;
        let header_length = u32::from(header.vihl & 0xf) * 4;
        let length = u32::from(u16::from_be(half_word(&header.tot_len)));
        if header_length < lengths::IPV4 || (length != 0 && length < header_length) {
            return Err(Outcome::Malformed);
        }
        let flags = u16::from_be(half_word(&header.frags));
        let part = Part::of(flags & 0x1fff, flags & 0x2000);
        let fragment = Fragment { part, identification: u32::from(half_word(&header.id)) };
        Ok(Self {
            source: v4_address(&header.src_addr),
            destination: v4_address(&header.dst_addr),
            protocol: header.proto,
            headers: Headers { l3, l4: l3 + header_length, is_v4: true },
            fragment,
            length,
        })
    }

    #[inline(always)]
    fn read_v6<F: Frame + ?Sized>(frame: &F, l3: u32) -> Result<Self, Outcome> {
        let header: &Ipv6Hdr = frame.header(l3)?;
        let payload = u32::from(u16::from_be(half_word(&header.payload_len)));
        let (source, destination) = (v6_address(&header.src_addr), v6_address(&header.dst_addr));
        if source.is_v4() || destination.is_v4() {
            // A v4-mapped address on the wire, where none belongs, would lead to the services and flows of IPv4.
            return Err(Outcome::Malformed);
        }
        let mut ip = Self {
            source,
            destination,
            protocol: header.next_hdr,
            headers: Headers { l3, l4: l3 + lengths::IPV6, is_v4: false },
            fragment: Fragment { part: Part::Whole, identification: 0 },
            // A length of 0 is a jumbogram (RFC 2675) or, inside a host, a BIG TCP packet.
            length: if payload == 0 { 0 } else { payload + lengths::IPV6 },
        };
        for _ in 0..MAX_EXTENSIONS {
            if !ip.skip_extension(frame)? {
                break;
            }
        }
        Ok(ip)
    }

    /// Steps over the extension header at `headers.l4`; false where there is none.
    #[inline(always)]
    fn skip_extension<F: Frame + ?Sized>(&mut self, frame: &F) -> Result<bool, Outcome> {
        if !extension::is_one(self.protocol) {
            return Ok(false);
        }
        // Every extension header has at least 8 octets, and the first two mean the same in all but the fragment header.
        let header: &[u8; 8] = frame.header(self.headers.l4)?;
        let [next_header, length, ..] = *header;
        let length = match self.protocol {
            extension::AUTHENTICATION => (u32::from(length) + 2) * 4,
            extension::FRAGMENT => 8,
            _ => (u32::from(length) + 1) * 8,
        };
        if self.protocol == extension::FRAGMENT {
            self.fragment = v6_fragment(header);
        }
        self.protocol = next_header;
        self.headers.l4 += length;
        // What follows the header of a later fragment is payload, whatever the header says.
        Ok(self.fragment.part != Part::Later)
    }

    /// The tuple, without ports.
    #[inline(always)]
    fn tuple(&self) -> Tuple {
        Tuple::new(self.source, self.destination, 0, 0, self.protocol)
    }

    #[inline(always)]
    fn packet(&self, tuple: Tuple, body: Body) -> Packet {
        Packet {
            tuple,
            headers: self.headers,
            fragment: self.fragment,
            body,
            segment: NO_SEGMENT,
            length: self.length,
        }
    }
}

/// What an IPv6 fragment header (RFC 8200 §4.5) says.
#[inline(always)]
fn v6_fragment(header: &[u8; 8]) -> Fragment {
    let [_, _, o0, o1, i0, i1, i2, i3] = *header;
    let offset_and_flags = u16::from_be_bytes([o0, o1]);
    let identification = u32::from_ne_bytes([i0, i1, i2, i3]);
    // An "atomic" fragment (RFC 6946) is a whole datagram.
    Fragment { part: Part::of(offset_and_flags & 0xfff8, offset_and_flags & 1), identification }
}

#[inline(always)]
fn tcp<F: Frame + ?Sized>(frame: &F, ip: &Ip, mut tuple: Tuple) -> Result<Packet, Outcome> {
    let header: &TcpHeader = frame.header(ip.headers.l4)?;
    tuple.source_port = u16::from_be(half_word(&header.source));
    tuple.destination_port = u16::from_be(half_word(&header.destination));
    let end = if ip.length == 0 { frame.length() } else { ip.headers.l3 + ip.length };
    let payload_start = ip.headers.l4 + u32::from(header.data_offset >> 4) * 4;
    let segment = Segment {
        flags: header.flags,
        seq: u32::from_be(word(&header.seq)),
        ack: u32::from_be(word(&header.ack)),
        payload: end.saturating_sub(payload_start),
    };
    Ok(Packet { segment, ..ip.packet(tuple, Body::Tcp) })
}

#[inline(always)]
fn udp<F: Frame + ?Sized>(frame: &F, ip: &Ip, mut tuple: Tuple) -> Result<Packet, Outcome> {
    let header: &UdpHdr = frame.header(ip.headers.l4)?;
    tuple.source_port = u16::from_be(half_word(&header.src));
    tuple.destination_port = u16::from_be(half_word(&header.dst));
    Ok(ip.packet(tuple, Body::Udp))
}

/// An SCTP packet (RFC 9260 §3). A fragment tells neither how long the packet is nor what its checksum covers, so
/// fragmented ones are none of our business; SCTP itself avoids them.
#[inline(always)]
fn sctp<F: Frame + ?Sized>(frame: &F, ip: &Ip, mut tuple: Tuple) -> Result<Packet, Outcome> {
    if ip.fragment.part != Part::Whole {
        return Err(Outcome::NotTransport);
    }
    // The common header (ports, verification tag, checksum) and that of the first chunk.
    let [ports, tag, _checksum, chunk]: &[[u8; 4]; 4] = frame.header(ip.headers.l4)?;
    let [s0, s1, d0, d1] = *ports;
    tuple.source_port = u16::from_be_bytes([s0, s1]);
    tuple.destination_port = u16::from_be_bytes([d0, d1]);
    let end = if ip.length == 0 { frame.length() } else { ip.headers.l3 + ip.length };
    let length = end.saturating_sub(ip.headers.l4);
    let segment = Segment::of_chunk(chunk[0], u32::from_be(word(tag)), length);
    Ok(Packet { segment, ..ip.packet(tuple, Body::Sctp) })
}

/// An ICMP error (RFC 792, RFC 4443 §3), whose quoted packet is left to [`parse_quoted`], or an echo request.
#[inline(always)]
fn icmp<F: Frame + ?Sized>(frame: &F, ip: &Ip, tuple: Tuple) -> Result<Packet, Outcome> {
    let [kind, _] = *frame.header::<[u8; 2]>(ip.headers.l4)?;
    let body = match (kind, ip.headers.is_v4) {
        // Unreachable, source quench, redirect, time exceeded, parameter problem.
        (3 | 4 | 5 | 11 | 12, true) => Body::IcmpError,
        // Unreachable, packet too big, time exceeded, parameter problem.
        (1..=4, false) => Body::IcmpError,
        (ECHO_REQUEST_V4, true) | (ECHO_REQUEST_V6, false) if ip.fragment.part == Part::Whole => Body::Echo,
        _ => return Err(Outcome::NotTransport),
    };
    Ok(ip.packet(tuple, body))
}

/// The ICMP type of an echo request, RFC 792.
pub const ECHO_REQUEST_V4: u8 = 8;
/// The ICMPv6 type of an echo request, RFC 4443 §4.1.
pub const ECHO_REQUEST_V6: u8 = 128;

/// The packet that an ICMP error with these `headers` quotes. Its transport header may be cut after 8 octets.
///
/// # Errors
///
/// The [`Outcome`] where the quote is too short, or of a packet that is of no flow: a later fragment, another ICMP
/// message.
#[inline(always)]
pub fn parse_quoted<F: Frame + ?Sized>(frame: &F, headers: &Headers) -> Result<Quoted, Outcome> {
    let ip = Ip::read(frame, headers.l4 + lengths::ICMP)?;
    let has_ports = matches!(ip.protocol, protocol::TCP | protocol::UDP | protocol::SCTP);
    if ip.fragment.part == Part::Later || !has_ports || ip.headers.is_v4 != headers.is_v4 {
        return Err(Outcome::UnknownIcmpError);
    }
    let [source, destination] = frame.header::<[[u8; 2]; 2]>(ip.headers.l4)?;
    let mut tuple = ip.tuple();
    tuple.source_port = u16::from_be(half_word(source));
    tuple.destination_port = u16::from_be(half_word(destination));
    Ok(Quoted { tuple, headers: ip.headers })
}

#[cfg(test)]
mod tests {
    use std::{vec, vec::Vec};

    use etherparse::{
        EtherType, IpHeaders, IpNumber, Ipv4Extensions, Ipv4Header, Ipv6Extensions, Ipv6Header,
        Ipv6RawExtHeader, LaxNetSlice, LaxSlicedPacket, PacketBuilder, PacketBuilderStep,
        TcpHeader as EtherTcp, TransportSlice,
    };
    use proptest::{prelude::*, sample::Index};

    use super::*;

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
        let mut octets = Vec::new();
        link().ip(ip).tcp_header(header).write(&mut octets, payload).unwrap();
        octets
    }

    fn syn() -> EtherTcp {
        let mut header = EtherTcp::new(40_000, 80, 1000, 512);
        header.syn = true;
        header
    }

    fn udp(ip: IpHeaders, payload: &[u8]) -> Vec<u8> {
        let mut octets = Vec::new();
        link().ip(ip).udp(40_000, 53).write(&mut octets, payload).unwrap();
        octets
    }

    fn icmp(ip: IpHeaders, quoted: &[u8]) -> Vec<u8> {
        let mut octets = Vec::new();
        let is_v4 = matches!(ip, IpHeaders::Ipv4(..));
        let network = link().ip(ip);
        if is_v4 {
            network.icmpv4_raw(3, 4, [0; 4]).write(&mut octets, quoted).unwrap();
        } else {
            network.icmpv6_raw(2, 0, [0; 4]).write(&mut octets, quoted).unwrap();
        }
        octets
    }

    /// The packet with `count` VLAN tags.
    fn tagged(mut octets: Vec<u8>, count: usize) -> Vec<u8> {
        for _ in 0..count {
            octets.splice(12..12, [0x81, 0, 0, 5]);
        }
        octets
    }

    /// Packets of every kind that [`parse`] knows.
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
        let mut octets = Vec::new();
        link().ip(ip).write(&mut octets, protocol, payload).unwrap();
        octets
    }

    /// An INIT chunk with nothing behind its header.
    fn sctp_init(ip: IpHeaders) -> Vec<u8> {
        raw(ip, IpNumber::SCTP, &[0x9c, 0x40, 0, 80, 0, 0, 0, 0, 1, 2, 3, 4, 1, 0, 0, 4])
    }

    fn ping(ip: IpHeaders, kind: u8) -> Vec<u8> {
        let protocol = if kind == ECHO_REQUEST_V4 { IpNumber::ICMP } else { IpNumber::IPV6_ICMP };
        raw(ip, protocol, &[kind, 0, 0, 0, 0, 1, 0, 1])
    }

    /// What everything behind the parser relies on: headers that will be written to lie within the frame, and
    /// families do not mix.
    fn check(frame: &[u8], layer: Layer) -> Result<(), TestCaseError> {
        let Ok(packet) = parse(frame, layer) else { return Ok(()) };
        let Headers { l3, l4, is_v4 } = packet.headers;
        let end = frame.length();
        let network = if is_v4 { 20 } else { 40 };
        prop_assert!(l3 + network <= end && l3 + network <= l4, "{:?} in {} octets", packet, end);
        let transport = match packet.body {
            Body::Tcp => 20,
            Body::Udp => 8,
            Body::Sctp => 16,
            Body::IcmpError | Body::Echo => 2,
            Body::LaterFragment => 0,
        };
        prop_assert!(transport == 0 || l4 + transport <= end, "{:?} in {} octets", packet, end);
        prop_assert_eq!(packet.tuple.source.is_v4(), is_v4);
        prop_assert_eq!(packet.tuple.destination.is_v4(), is_v4);
        if packet.body == Body::IcmpError
            && let Ok(quoted) = parse_quoted(frame, &packet.headers)
        {
            let Headers { l3, l4, is_v4: quotes_v4 } = quoted.headers;
            prop_assert_eq!((l3, quotes_v4), (packet.headers.l4 + lengths::ICMP, is_v4));
            prop_assert!(l3 + network <= l4 && l4 + 4 <= end, "{:?} in {} octets", quoted, end);
        }
        Ok(())
    }

    /// Where we and etherparse both find ports, they are the same, and so are the addresses.
    fn compare(octets: &[u8]) -> Result<(), TestCaseError> {
        let Ok(packet) = parse(octets, Layer::Ethernet) else { return Ok(()) };
        let Ok(theirs) = LaxSlicedPacket::from_ethernet(octets) else { return Ok(()) };
        let ports = match (&theirs.transport, packet.body) {
            (Some(TransportSlice::Tcp(tcp)), Body::Tcp) => (tcp.source_port(), tcp.destination_port()),
            (Some(TransportSlice::Udp(udp)), Body::Udp) => (udp.source_port(), udp.destination_port()),
            _ => return Ok(()),
        };
        prop_assert_eq!((packet.tuple.source_port, packet.tuple.destination_port), ports);
        let addresses = match &theirs.net {
            Some(LaxNetSlice::Ipv4(ip)) => {
                [ip.header().source(), ip.header().destination()].map(Address::from_v4)
            }
            Some(LaxNetSlice::Ipv6(ip)) => {
                [ip.header().source(), ip.header().destination()].map(Address::from_v6)
            }
            other => return Err(TestCaseError::fail(std::format!("{other:?}"))),
        };
        prop_assert_eq!([packet.tuple.source, packet.tuple.destination], addresses);
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn any_octets(octets in proptest::collection::vec(any::<u8>(), 0..200)) {
            check(&octets, Layer::Ethernet)?;
            check(&octets, Layer::Ip)?;
            compare(&octets)?;
        }

        #[test]
        fn changed_packets(
            sample: Index, length: Index, changes in proptest::collection::vec((any::<Index>(), any::<u8>()), 0..6),
        ) {
            let samples = samples();
            let mut octets = sample.get(&samples).clone();
            for (place, value) in changes {
                // Early octets decide more.
                let place = place.index(octets.len()).min(place.index(60));
                octets[place] = value;
            }
            compare(&octets)?;
            octets.truncate(octets.len() - length.index(octets.len()).saturating_sub(octets.len() / 2));
            check(&octets, Layer::Ethernet)?;
            check(&octets[ETHERNET..], Layer::Ip)?;
        }
    }

    #[test]
    fn every_sample_is_parsed_and_none_that_is_cut_short() {
        for octets in samples() {
            let packet = parse(octets.as_slice(), Layer::Ethernet).unwrap();
            check(&octets, Layer::Ethernet).unwrap();
            let last = match packet.body {
                Body::Tcp => packet.headers.l4 + 20,
                Body::Udp => packet.headers.l4 + 8,
                Body::Sctp => packet.headers.l4 + 16,
                Body::IcmpError | Body::Echo => packet.headers.l4 + 2,
                Body::LaterFragment => unreachable!("no sample is one"),
            };
            for length in 0..last as usize {
                let result = parse(&octets[..length], Layer::Ethernet);
                assert_eq!(result, Err(Outcome::Malformed), "{length} octets of {octets:x?}");
            }
            assert_eq!(parse(&octets[..last as usize], Layer::Ethernet).unwrap().body, packet.body);
        }
    }

    #[test]
    fn a_segment_without_link_layer_is_the_same_packet_earlier() {
        let octets = tcp(v6(), syn(), b"early data");
        let ethernet = parse(octets.as_slice(), Layer::Ethernet).unwrap();
        let bare = parse(&octets[ETHERNET..], Layer::Ip).unwrap();
        let headers = Headers { l3: 14, l4: 54, is_v4: false };
        assert_eq!(ethernet, Packet { headers, ..bare });
        assert_eq!(bare.headers, Headers { l3: 0, l4: 40, is_v4: false });
        assert_eq!(bare.segment, Segment { flags: 2, seq: 1000, ack: 0, payload: 10 });
    }

    #[test]
    fn payload_is_what_the_network_header_says() {
        for ip in [v4(), v6()] {
            let mut octets = tcp(ip.clone(), syn(), b"data");
            octets.resize(octets.len() + 9, 0);
            assert_eq!(
                parse(octets.as_slice(), Layer::Ethernet).unwrap().segment.payload,
                4,
                "padding is none"
            );
            // BIG TCP: the length does not fit, so it is 0.
            let length = if matches!(ip, IpHeaders::Ipv4(..)) { ETHERNET + 2 } else { ETHERNET + 4 };
            octets[length..length + 2].fill(0);
            let parsed = parse(octets.as_slice(), Layer::Ethernet).unwrap();
            assert_eq!((parsed.length, parsed.segment.payload), (0, 13));
            let plain = parse_plain(octets.as_slice());
            assert!(plain == Ok(parsed) || plain == Err(Outcome::OtherHook), "{plain:?}");
            // A length within the headers.
            octets[length + 1] = 41;
            assert_eq!(
                parse(octets.as_slice(), Layer::Ethernet).map(|packet| packet.segment.payload > 40),
                Ok(false)
            );
        }
    }

    #[test]
    fn parts_of_datagrams() {
        let identified = |octets: &[u8]| {
            let packet = parse(octets, Layer::Ip).unwrap();
            (packet.fragment.part, packet.fragment.identification.to_ne_bytes(), packet.body)
        };
        let mut octets = udp(v4(), b"question").split_off(ETHERNET);
        octets[4..6].copy_from_slice(&[0xab, 0xcd]);
        let id = u32::from(u16::from_ne_bytes([0xab, 0xcd])).to_ne_bytes();
        for (flags, part, body) in [
            ([0x40, 0], Part::Whole, Body::Udp),
            ([0x20, 0], Part::First, Body::Udp),
            ([0x20, 1], Part::Later, Body::LaterFragment),
            ([0x00, 1], Part::Later, Body::LaterFragment),
            ([0x1f, 0xff], Part::Later, Body::LaterFragment),
        ] {
            octets[6..8].copy_from_slice(&flags);
            assert_eq!(identified(&octets), (part, id, body), "{flags:x?}");
        }
        let mut octets = udp(v6(), b"question").split_off(ETHERNET);
        octets[6] = 44;
        octets.splice(40..40, [17, 0, 0, 0, 1, 2, 3, 4]);
        for (offset, part, body) in [
            ([0, 0], Part::Whole, Body::Udp),
            ([0, 6], Part::Whole, Body::Udp),
            ([0, 1], Part::First, Body::Udp),
            ([0, 8], Part::Later, Body::LaterFragment),
            ([0xff, 0xf9], Part::Later, Body::LaterFragment),
        ] {
            octets[42..44].copy_from_slice(&offset);
            assert_eq!(identified(&octets), (part, [1, 2, 3, 4], body), "{offset:x?}");
        }
    }

    /// Such a packet would share flows and services with those of IPv4.
    #[test]
    fn mapped_addresses_on_the_wire_are_not_ours() {
        let mapped = *Address::from_v4([203, 0, 113, 1]).bytes();
        for place in [8, 24] {
            let mut octets = udp(v6(), b"question").split_off(ETHERNET);
            octets[place..place + 16].copy_from_slice(&mapped);
            assert_eq!(parse(octets.as_slice(), Layer::Ip), Err(Outcome::Malformed));
            let error = icmp(v6(), &octets);
            let headers = parse(error.as_slice(), Layer::Ethernet).unwrap().headers;
            assert_eq!(parse_quoted(error.as_slice(), &headers), Err(Outcome::Malformed));
        }
    }

    #[test]
    fn ether_types() {
        assert_eq!(u16::from_be(ether_type::IPV4), EtherType::IPV4.0);
        assert_eq!(u16::from_be(ether_type::IPV6), EtherType::IPV6.0);
        assert_eq!(u16::from_be(ether_type::VLAN), EtherType::VLAN_TAGGED_FRAME.0);
        assert_eq!(u16::from_be(ether_type::QINQ), EtherType::PROVIDER_BRIDGING.0);
    }
}
