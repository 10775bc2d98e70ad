//! Parsed packets.

use lb_common::{
    Outcome, Span,
    conntrack::{Segment, Tuple},
};
use network_types::ip::{Ipv4Hdr, Ipv6Hdr};

use super::frame::{Frame, half_word, lengths};

/// The position of the network header in frames of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// After an Ethernet header, and VLAN tags if there are any.
    Ethernet,
    /// At the beginning: the device has no link-layer header (tun, WireGuard, IPIP, …).
    Ip,
}

/// A packet with a transport protocol that has ports, a later fragment, an ICMP error, or an ICMP echo request.
///
/// No field is an enum with a payload: in variants without payload, the bytes of the payload would be undefined. LLVM
/// would store whatever a register happens to hold, and if that is a pointer, the verifier would reject the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    /// The five-tuple. The parser sets its ports to 0 for an ICMP message or a later fragment.
    pub tuple: Tuple,
    /// Offsets of the packet's headers.
    pub headers: Headers,
    /// Which part of its datagram the packet is.
    pub fragment: Fragment,
    /// The kind of payload.
    pub body: Body,
    /// The TCP segment, or an SCTP packet expressed as a TCP segment ([`Segment::of_chunk`]); all fields are 0 for
    /// other packets.
    pub segment: Segment,
    /// Length of the IP packet in bytes, from its header: without padding of the link layer; 0 if it is too large for
    /// the header field. For a packet from a tunnel, the length of the inner packet.
    pub length: u32,
}

impl Packet {
    /// Whether the packet is a UDP datagram, or a TCP segment with ACK and without SYN, FIN and RST. If an entry has
    /// the tuple of such a packet, the packet continues the flow of that entry, and the programs need no other entry
    /// for the packet. The result means nothing for any other [`Body`].
    #[inline(always)]
    pub fn continues_flow(&self) -> bool {
        self.body != Body::Tcp || self.segment.continues()
    }

    /// Whether XDP and direct forwarding may send on the packet, bypassing the stack: it is a TCP or UDP packet, in an
    /// Ethernet frame without VLAN tag (a tagged frame is for a VLAN device on top of this device), and not fragmented.
    #[inline(always)]
    pub fn may_bypass_stack(&self) -> bool {
        self.body.may_bypass_stack()
            && self.headers.l3 == lengths::ETHERNET
            && self.fragment.part == Part::Whole
    }

    /// The part of its datagram that a fragment carries; `None` if the frame ends within the header that holds the
    /// fragment offset, or if further IPv6 headers follow the fragment header. (The function reads the header again: if
    /// the parser returned the part, the verifier would follow many more states.)
    #[inline(always)]
    pub fn span<F: Frame + ?Sized>(&self, frame: &F) -> Option<Span> {
        let Headers { l3, l4, is_v4 } = self.headers;
        let (start, more_follow) = if is_v4 {
            let header: &Ipv4Hdr = frame.header(l3).ok()?;
            let fields = u16::from_be(half_word(&header.frags));
            (fields & 0x1fff, fields & 0x2000)
        } else {
            let [_, _, o0, o1, i0, i1, i2, i3] = *frame.header::<[u8; 8]>(l4.wrapping_sub(8)).ok()?;
            if u32::from_ne_bytes([i0, i1, i2, i3]) != self.fragment.identification {
                return None;
            }
            let fields = u16::from_be_bytes([o0, o1]);
            (fields >> 3, fields & 1)
        };
        let bytes = (l3 + self.length).wrapping_sub(l4);
        let end = u32::from(start) + bytes.wrapping_add(7) / 8;
        Some(Span { start, end, is_last: more_follow == 0 })
    }

    /// Whether this is a TCP segment with flags that no TCP sends together: see [`Segment::is_valid`].
    #[inline(always)]
    pub fn has_invalid_flags(&self) -> bool {
        self.body == Body::Tcp && !self.segment.is_valid()
    }
}

/// Offsets of the headers of a packet, in bytes from the start of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// Offset of the network header.
    pub l3: u32,
    /// Offset of the transport header.
    pub l4: u32,
    /// Whether the network header is IPv4; otherwise it is IPv6.
    pub is_v4: bool,
}

impl Headers {
    /// Like [`Packet::length`], except that the length of an IPv6 packet that is too large for the header field is 40
    /// instead of 0. (The length is read from the packet again, which makes it an unknown number to the verifier.
    /// Otherwise the verifier would follow each case of parsing.)
    ///
    /// # Errors
    ///
    /// [`Outcome::Malformed`] if the frame ends before the header does.
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
    /// The position of the packet in its datagram.
    pub part: Part,
    /// The identification of the datagram as on the wire: 16 bits in IPv4, 32 in IPv6. 0 for an IPv6 packet without a
    /// fragment header, or if [`parse_plain`](super::parse_plain) has parsed the packet.
    pub identification: u32,
}

/// The position of a fragment in its datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The datagram is not fragmented.
    Whole,
    /// The first fragment: it carries the transport header.
    First,
    /// A later fragment: *no* transport header follows the network header.
    Later,
}

impl Part {
    #[inline(always)]
    pub(super) const fn of(offset: u16, more_follow: u16) -> Self {
        match (offset, more_follow) {
            (0, 0) => Self::Whole,
            (0, _) => Self::First,
            _ => Self::Later,
        }
    }
}

/// The payload of the IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// A TCP segment, or its first fragment.
    Tcp,
    /// A UDP datagram, or its first fragment.
    Udp,
    /// An SCTP packet (RFC 9260 §3). The programs do not translate fragmented SCTP packets: a fragment has neither the
    /// length of the packet nor all bytes that its checksum covers. SCTP itself avoids fragments.
    Sctp,
    /// A fragment without transport header.
    LaterFragment,
    /// An ICMP error about another packet.
    IcmpError,
    /// An ICMP echo request.
    Echo,
}

impl Body {
    /// Whether a packet with this kind of payload may bypass the stack: one of the conditions of
    /// [`Packet::may_bypass_stack`]. SCTP may not: its checksum covers the whole packet, and
    /// [`transport`](crate::rewrite::transport) cannot update it.
    #[inline(always)]
    pub const fn may_bypass_stack(self) -> bool {
        matches!(self, Self::Tcp | Self::Udp)
    }
}

/// The packet that an ICMP error quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quoted {
    /// The five-tuple of the quoted packet.
    pub tuple: Tuple,
    /// Offsets of the quoted packet's headers.
    pub headers: Headers,
}
