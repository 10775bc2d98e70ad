//! Network headers, and the link-layer headers before them.

use lb_common::{
    Address, Outcome,
    conntrack::{Segment, Tuple},
};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

use super::{
    frame::{Frame, half_word, lengths, v4_address, v6_address},
    packet::{Body, Fragment, Headers, Layer, Packet, Part},
};

/// `EtherType` values in network byte order.
pub(super) mod ether_type {
    pub(in crate::parse) const IPV4: u16 = 0x0800_u16.to_be();
    pub(in crate::parse) const IPV6: u16 = 0x86dd_u16.to_be();
    pub(in crate::parse) const VLAN: u16 = 0x8100_u16.to_be();
    pub(in crate::parse) const QINQ: u16 = 0x88a8_u16.to_be();
}

/// IPv6 extension headers (RFC 8200 §4) that may precede the transport header.
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

/// The most extension headers that the parser steps over: each kind once, destination options twice (RFC 8200 §4.1).
const MAX_EXTENSIONS: u32 = 6;

#[inline(always)]
pub(crate) fn network_offset<F: Frame + ?Sized>(frame: &F, layer: Layer) -> Result<u32, Outcome> {
    match layer {
        Layer::Ethernet => skip_ethernet(frame),
        Layer::Ip => Ok(0),
    }
}

/// The offset of the network header after an Ethernet header and up to two VLAN tags (802.1Q, 802.1ad). A tag that the
/// device has taken out of the frame does not count.
#[inline(always)]
fn skip_ethernet<F: Frame + ?Sized>(frame: &F) -> Result<u32, Outcome> {
    // The EtherType is the last field of the Ethernet header and of a VLAN tag; `EthHdr` itself needs an aligned
    // address.
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
    /// Length of the packet in bytes, from the network header on, without link-layer padding; 0 if the length is too
    /// large for the header field.
    pub(super) length: u32,
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
            // A v4-mapped address is not allowed on the wire; it would match the services and flows of IPv4.
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

    /// Steps over the extension header at `headers.l4`, if there is one. Returns whether another extension header may
    /// follow.
    #[inline(always)]
    fn skip_extension<F: Frame + ?Sized>(&mut self, frame: &F) -> Result<bool, Outcome> {
        if !extension::is_one(self.protocol) {
            return Ok(false);
        }
        // Every extension header has at least 8 bytes and begins with the next header and its own length; the fragment
        // header has a reserved byte in place of the length.
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
        // In a later fragment, payload follows the fragment header, whatever next header the fragment header names.
        Ok(self.fragment.part != Part::Later)
    }

    /// The tuple, without ports.
    #[inline(always)]
    pub(super) fn tuple(&self) -> Tuple {
        Tuple::new(self.source, self.destination, 0, 0, self.protocol)
    }

    #[inline(always)]
    pub(super) fn packet(&self, tuple: Tuple, body: Body) -> Packet {
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

/// The contents of an IPv6 fragment header (RFC 8200 §4.5).
#[inline(always)]
fn v6_fragment(header: &[u8; 8]) -> Fragment {
    let [_, _, o0, o1, i0, i1, i2, i3] = *header;
    let offset_and_flags = u16::from_be_bytes([o0, o1]);
    let identification = u32::from_ne_bytes([i0, i1, i2, i3]);
    // An "atomic" fragment (RFC 6946) is a whole datagram.
    Fragment { part: Part::of(offset_and_flags & 0xfff8, offset_and_flags & 1), identification }
}
