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

use crate::frame::{Frame, TcpHeader, half_word, lengths, v4_address, v6_address, word};

/// Where the network header begins in the frames of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// Behind an Ethernet header, and VLAN tags if there are any.
    Ethernet,
    /// At once: a device without link-layer header (tun, WireGuard, IPIP, …).
    Ip,
}

/// A packet with a transport protocol that has ports, or an ICMP error about one.
///
/// No field is an enum with a payload: the payload of the other variants would be undefined, LLVM then stores whatever a
/// register happens to hold, and the verifier refuses that where it is a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The five-tuple; without ports where this is an ICMP error or a later fragment.
    pub tuple: Tuple,
    /// Where the headers are.
    pub headers: Headers,
    /// Which part of a datagram it is.
    pub fragment: Fragment,
    /// What it carries.
    pub body: Body,
    /// The TCP segment; zeros in anything else.
    pub segment: Segment,
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
    /// A fragment without transport header.
    LaterFragment,
    /// An ICMP error about another packet.
    IcmpError,
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
    let l3 = match layer {
        Layer::Ethernet => skip_ethernet(frame)?,
        Layer::Ip => 0,
    };
    let ip = Ip::read(frame, l3)?;
    let tuple = ip.tuple();
    if ip.fragment.part == Part::Later {
        return Ok(ip.packet(tuple, Body::LaterFragment));
    }
    match ip.protocol {
        protocol::TCP => tcp(frame, &ip, tuple),
        protocol::UDP => udp(frame, &ip, tuple),
        protocol::ICMP if ip.headers.is_v4 => icmp_error(frame, &ip, tuple),
        protocol::ICMPV6 if !ip.headers.is_v4 => icmp_error(frame, &ip, tuple),
        _ => Err(Outcome::NotTransport),
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
struct Ip {
    source: Address,
    destination: Address,
    protocol: u8,
    headers: Headers,
    fragment: Fragment,
    /// Octets of the packet, from the network header on; without link-layer padding.
    length: u32,
}

impl Ip {
    #[inline(always)]
    fn read<F: Frame + ?Sized>(frame: &F, l3: u32) -> Result<Self, Outcome> {
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
        let mut ip = Self {
            source: v6_address(&header.src_addr),
            destination: v6_address(&header.dst_addr),
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
        Packet { tuple, headers: self.headers, fragment: self.fragment, body, segment: NO_SEGMENT }
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

/// An ICMP error (RFC 792, RFC 4443 §3); the packet that it quotes is left to [`parse_quoted`].
#[inline(always)]
fn icmp_error<F: Frame + ?Sized>(frame: &F, ip: &Ip, tuple: Tuple) -> Result<Packet, Outcome> {
    let [kind, _] = *frame.header::<[u8; 2]>(ip.headers.l4)?;
    let is_error = if ip.headers.is_v4 {
        // Unreachable, source quench, redirect, time exceeded, parameter problem.
        matches!(kind, 3 | 4 | 5 | 11 | 12)
    } else {
        // Unreachable, packet too big, time exceeded, parameter problem.
        matches!(kind, 1..=4)
    };
    if is_error { Ok(ip.packet(tuple, Body::IcmpError)) } else { Err(Outcome::NotTransport) }
}

/// The packet that an ICMP error with these `headers` quotes. Its transport header may be cut after 8 octets.
///
/// # Errors
///
/// The [`Outcome`] where the quote is too short, or of a packet that is of no flow: a later fragment, another ICMP
/// message.
#[inline(always)]
pub fn parse_quoted<F: Frame + ?Sized>(frame: &F, headers: &Headers) -> Result<Quoted, Outcome> {
    let ip = Ip::read(frame, headers.l4 + lengths::ICMP)?;
    let has_ports = matches!(ip.protocol, protocol::TCP | protocol::UDP);
    if ip.fragment.part == Part::Later || !has_ports || ip.headers.is_v4 != headers.is_v4 {
        return Err(Outcome::UnknownIcmpError);
    }
    let [source, destination] = frame.header::<[[u8; 2]; 2]>(ip.headers.l4)?;
    let mut tuple = ip.tuple();
    tuple.source_port = u16::from_be(half_word(source));
    tuple.destination_port = u16::from_be(half_word(destination));
    Ok(Quoted { tuple, headers: ip.headers })
}
