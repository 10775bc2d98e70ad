//! Transport headers, and the packets that ICMP errors quote.

use lb_common::{
    Outcome,
    conntrack::{Segment, Tuple},
    protocol,
};
use network_types::udp::UdpHdr;

use super::{
    frame::{Frame, TcpHeader, half_word, lengths, word},
    ip::Ip,
    packet::{Body, Headers, Packet, Part, Quoted},
};

#[inline(always)]
pub(super) fn tcp<F: Frame + ?Sized>(frame: &F, ip: &Ip, mut tuple: Tuple) -> Result<Packet, Outcome> {
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
pub(super) fn udp<F: Frame + ?Sized>(frame: &F, ip: &Ip, mut tuple: Tuple) -> Result<Packet, Outcome> {
    let header: &UdpHdr = frame.header(ip.headers.l4)?;
    tuple.source_port = u16::from_be(half_word(&header.src));
    tuple.destination_port = u16::from_be(half_word(&header.dst));
    Ok(ip.packet(tuple, Body::Udp))
}

/// Parses an SCTP packet that is not fragmented: see [`Body::Sctp`].
#[inline(always)]
pub(super) fn sctp<F: Frame + ?Sized>(frame: &F, ip: &Ip, mut tuple: Tuple) -> Result<Packet, Outcome> {
    if ip.fragment.part != Part::Whole {
        return Err(Outcome::NotTransport);
    }
    // The common header (ports, verification tag, checksum) and the header of the first chunk.
    let [ports, tag, _checksum, chunk]: &[[u8; 4]; 4] = frame.header(ip.headers.l4)?;
    let [s0, s1, d0, d1] = *ports;
    tuple.source_port = u16::from_be_bytes([s0, s1]);
    tuple.destination_port = u16::from_be_bytes([d0, d1]);
    let end = if ip.length == 0 { frame.length() } else { ip.headers.l3 + ip.length };
    let length = end.saturating_sub(ip.headers.l4);
    let segment = Segment::of_chunk(chunk[0], u32::from_be(word(tag)), length);
    Ok(Packet { segment, ..ip.packet(tuple, Body::Sctp) })
}

/// Parses an ICMP error (RFC 792, RFC 4443 §3) or an echo request. [`parse_quoted`] parses the packet that an error
/// quotes.
#[inline(always)]
pub(super) fn icmp<F: Frame + ?Sized>(frame: &F, ip: &Ip, tuple: Tuple) -> Result<Packet, Outcome> {
    let [kind, _] = *frame.header::<[u8; 2]>(ip.headers.l4)?;
    let body = match (kind, ip.headers.is_v4) {
        // ICMP: unreachable, source quench, redirect, time exceeded, parameter problem.
        (3 | 4 | 5 | 11 | 12, true) => Body::IcmpError,
        // ICMPv6: unreachable, packet too big, time exceeded, parameter problem.
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

/// Parses the packet that an ICMP error with these `headers` quotes. The quoted transport header may be cut after 8
/// bytes.
///
/// # Errors
///
/// The [`Outcome`] of a quote that is too short, or of a packet that has no flow: a later fragment, a packet without
/// ports (such as another ICMP message), or a packet of the other address family.
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
