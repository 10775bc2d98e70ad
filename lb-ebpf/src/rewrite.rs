//! Rewriting packets in place: addresses, ports, hop limit, and the checksums over them.

use lb_common::{
    Outcome,
    checksum::Sum,
    conntrack::{Flow, Tuple},
};
use network_types::{
    ip::{Ipv4Hdr, Ipv6Hdr},
    udp::UdpHdr,
};

use crate::{
    headers::pseudo_header,
    parse::{
        Body, Headers, Packet,
        frame::{Frame, Header, TcpHeader, half_word, range_of, set_half_word, set_word, set_words},
    },
};

/// A packet that may be written to in place.
pub trait FrameMut: Frame {
    /// The header that starts `offset` bytes into the frame; see [`Frame::header`].
    ///
    /// # Errors
    ///
    /// As [`Frame::header`].
    fn header_mut<T: Header>(&mut self, offset: u32) -> Result<&mut T, Outcome>;
}

impl FrameMut for [u8] {
    fn header_mut<T: Header>(&mut self, offset: u32) -> Result<&mut T, Outcome> {
        const { assert!(align_of::<T>() == 1) };
        let bytes = self.get_mut(range_of::<T>(offset)?).ok_or(Outcome::Malformed)?;
        // SAFETY: `bytes` stays mutably borrowed for the lifetime of the result and has exactly the size of `T`; `T`
        // has alignment 1 and is valid for every bit pattern.
        Ok(unsafe { &mut *bytes.as_mut_ptr().cast::<T>() })
    }
}

/// Whether the checksum of a TCP or UDP packet is still to be computed: senders on the same machine leave the
/// computation to the device. The only sign in the frame is the checksum field, which then holds the sum over the
/// pseudo header. (One in 65,536 valid checksums has the same value by accident.) `length` is the size of the packet in
/// bytes, from its network header on.
///
/// # Errors
///
/// [`Outcome::Malformed`] if the transport header is truncated.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the sum uses 16 bits of the length")]
pub fn lacks_checksum<F: Frame + ?Sized>(frame: &F, packet: &Packet, length: u32) -> Result<bool, Outcome> {
    let headers = &packet.headers;
    let length = length.saturating_sub(headers.l4 - headers.l3) as u16;
    let offset = if packet.body == Body::Tcp { 16 } else { 6 };
    let found = half_word(frame.header(headers.l4 + offset)?);
    Ok(found == pseudo_header(&packet.tuple, length).fold())
}

/// Whether a transport header has a checksum, which then compensates the change of ports and addresses in a sum over
/// the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportChecksum {
    /// The checksum is updated.
    Updated,
    /// A UDP datagram without a checksum (RFC 768).
    Absent,
}

/// Gives a TCP or UDP packet the ports of `flow.to`, and updates the checksum in its transport header for the new ports
/// and addresses. ([`network`] writes the addresses.)
///
/// # Errors
///
/// [`Outcome::Malformed`] if the transport header is truncated.
#[inline(always)]
pub fn transport<F: FrameMut + ?Sized>(
    frame: &mut F,
    packet: &Packet,
    flow: &Flow,
) -> Result<TransportChecksum, Outcome> {
    let l4 = packet.headers.l4;
    if packet.body == Body::Tcp {
        let header: &mut TcpHeader = frame.header_mut(l4)?;
        set_ports(&mut header.source, &mut header.destination, &flow.to);
        let checksum = updated(half_word(&header.checksum), flow.address_delta, flow.port_delta);
        set_half_word(&mut header.checksum, checksum);
        return Ok(TransportChecksum::Updated);
    }
    let header: &mut UdpHdr = frame.header_mut(l4)?;
    set_ports(&mut header.src, &mut header.dst, &flow.to);
    // A UDP checksum of 0 means "no checksum" and stays 0; a computed 0 is written as 0xffff (RFC 768).
    let before = half_word(&header.check);
    if before == 0 {
        return Ok(TransportChecksum::Absent);
    }
    let after = updated(before, flow.address_delta, flow.port_delta);
    set_half_word(&mut header.check, if after == 0 { u16::MAX } else { after });
    Ok(TransportChecksum::Updated)
}

#[inline(always)]
fn set_ports(source: &mut [u8; 2], destination: &mut [u8; 2], to: &Tuple) {
    set_half_word(source, to.source_port.to_be());
    set_half_word(destination, to.destination_port.to_be());
}

/// As [`transport`], for a packet whose checksum is still to be computed: the field holds the sum over the pseudo
/// header, which has addresses but no ports.
///
/// # Errors
///
/// [`Outcome::Malformed`] if the transport header is truncated.
#[inline(always)]
pub fn unfinished_transport<F: FrameMut + ?Sized>(
    frame: &mut F,
    packet: &Packet,
    flow: &Flow,
) -> Result<(), Outcome> {
    let l4 = packet.headers.l4;
    let sum = |before: &[u8; 2]| Sum::ZERO.add_word(half_word(before)).add_word(flow.address_delta).fold();
    if packet.body == Body::Tcp {
        let header: &mut TcpHeader = frame.header_mut(l4)?;
        set_ports(&mut header.source, &mut header.destination, &flow.to);
        let sum = sum(&header.checksum);
        set_half_word(&mut header.checksum, sum);
    } else {
        let header: &mut UdpHdr = frame.header_mut(l4)?;
        set_ports(&mut header.src, &mut header.dst, &flow.to);
        // A checksum of 0 means "no checksum" and stays 0: the device then completes the checksum of a packet inside
        // the datagram. Otherwise the field becomes the sum over the new pseudo header. That sum is never 0, because it
        // contains the protocol.
        if half_word(&header.check) != 0 {
            let sum = sum(&header.check);
            set_half_word(&mut header.check, sum);
        }
    }
    Ok(())
}

/// Gives a packet the addresses of `flow.to`, and subtracts `hops` (0 or 1) from its hop limit, which the caller has
/// checked to be larger than `hops`.
///
/// # Errors
///
/// [`Outcome::Malformed`] if the network header is truncated.
#[inline(always)]
pub fn network<F: FrameMut + ?Sized>(
    frame: &mut F,
    headers: &Headers,
    flow: &Flow,
    hops: u8,
) -> Result<(), Outcome> {
    let to = &flow.to;
    if headers.is_v4 {
        let header: &mut Ipv4Hdr = frame.header_mut(headers.l3)?;
        set_word(&mut header.src_addr, to.source.v4_word());
        set_word(&mut header.dst_addr, to.destination.v4_word());
        let checksum = updated(half_word(&header.check), flow.address_delta, fewer(hops));
        set_half_word(&mut header.check, checksum);
        header.ttl -= hops;
    } else {
        let header: &mut Ipv6Hdr = frame.header_mut(headers.l3)?;
        set_words::<4>(bytemuck::must_cast_mut(&mut header.src_addr), to.source.words());
        set_words::<4>(bytemuck::must_cast_mut(&mut header.dst_addr), to.destination.words());
        header.hop_limit -= hops;
    }
    Ok(())
}

/// Subtracts 1 from the hop limit of the packet whose network header is at `l3`. The hop limit must be at least 2.
///
/// # Errors
///
/// [`Outcome::Malformed`] if the network header is truncated.
#[inline(always)]
pub fn take_hop<F: FrameMut + ?Sized>(frame: &mut F, l3: u32, is_v4: bool) -> Result<(), Outcome> {
    if is_v4 {
        let header: &mut Ipv4Hdr = frame.header_mut(l3)?;
        let checksum = updated(half_word(&header.check), fewer(1), 0);
        set_half_word(&mut header.check, checksum);
        header.ttl -= 1;
    } else {
        let header: &mut Ipv6Hdr = frame.header_mut(l3)?;
        header.hop_limit -= 1;
    }
    Ok(())
}

/// The change of the sum over an IPv4 header when the hop limit, the upper byte of a word, decreases by `hops`.
#[inline(always)]
fn fewer(hops: u8) -> u16 {
    Sum::ZERO.sub_word((u16::from(hops) << 8).to_be()).fold()
}

/// The new value of `checksum`, the complement of a sum, after `one` and `other` are added to that sum (RFC 1624).
#[inline(always)]
fn updated(checksum: u16, one: u16, other: u16) -> u16 {
    !Sum::ZERO.add_word(!checksum).add_word(one).add_word(other).fold()
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
    use lb_common::{
        Address,
        conntrack::{Tick, Tuple},
    };
    use proptest::prelude::*;

    use super::*;
    use crate::parse::{Layer, parse};

    const MACS: [[u8; 6]; 2] = [[0, 0, 0x5e, 0, 0x53, 1], [0, 0, 0x5e, 0, 0x53, 2]];

    /// A packet between two endpoints of one family, with valid checksums.
    fn frame(tuple: &Tuple, payload: &[u8]) -> Vec<u8> {
        let ethernet = PacketBuilder::ethernet2(MACS[0], MACS[1]);
        let (source, destination) = (&tuple.source, &tuple.destination);
        let network = if source.is_v4() {
            ethernet.ipv4(source.v4_bytes(), destination.v4_bytes(), 64)
        } else {
            ethernet.ipv6(*source.bytes(), *destination.bytes(), 64)
        };
        let mut bytes = Vec::new();
        if tuple.protocol == 6 {
            let tcp = network.tcp(tuple.source_port, tuple.destination_port, 1, 512);
            tcp.write(&mut bytes, payload).unwrap();
        } else {
            let udp = network.udp(tuple.source_port, tuple.destination_port);
            udp.write(&mut bytes, payload).unwrap();
        }
        bytes
    }

    fn addresses() -> impl Strategy<Value = [Address; 4]> {
        prop_oneof![
            any::<[[u8; 4]; 4]>().prop_map(|bytes| bytes.map(Address::from_v4)),
            any::<[[u8; 15]; 4]>().prop_map(|bytes| bytes.map(|rest| {
                let mut bytes = [0x20; 16];
                bytes[1..].copy_from_slice(&rest);
                Address::from_v6(bytes)
            })),
        ]
    }

    proptest! {
        #[test]
        fn rewritten_packet_equals_one_built_from_scratch(
            [a, b, c, d] in addresses(), ports in any::<[u16; 4]>(), protocol in prop_oneof![Just(6u8), Just(17)],
            payload in proptest::collection::vec(any::<u8>(), 0..40), hops in 0..2u8,
        ) {
            let from = Tuple::new(a, b, ports[0], ports[1], protocol);
            let to = Tuple::new(c, d, ports[2], ports[3], protocol);
            let flow = Flow::new(&from, &to, 1, 0, Tick(1));
            let mut bytes = frame(&from, &payload);
            let packet = parse(bytes.as_slice(), Layer::Ethernet).unwrap();
            prop_assert_eq!(packet.tuple, from);
            transport(bytes.as_mut_slice(), &packet, &flow).unwrap();
            network(bytes.as_mut_slice(), &packet.headers, &flow, hops).unwrap();

            let hops_at = packet.headers.l3 as usize + if packet.headers.is_v4 { 8 } else { 7 };
            prop_assert_eq!(bytes[hops_at], 64 - hops);
            if hops == 0 {
                prop_assert_eq!(&bytes, &frame(&to, &payload));
            } else if packet.headers.is_v4 {
                let sliced = SlicedPacket::from_ethernet(&bytes).unwrap();
                let header = sliced.net.as_ref().and_then(|net| net.ipv4_ref()).unwrap().header().to_header();
                prop_assert_eq!(header.calc_header_checksum(), header.header_checksum);
            }
        }

        #[test]
        fn only_pseudo_header_sum_marks_a_missing_checksum(
            [a, b, ..] in addresses(), payload in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let tuple = Tuple::new(a, b, 1, 2, 6);
            let mut bytes = frame(&tuple, &payload);
            let packet = parse(bytes.as_slice(), Layer::Ethernet).unwrap();
            let length = packet.length;
            let sum = pseudo_header(&tuple, u16::try_from(20 + payload.len()).unwrap()).fold();
            let at = packet.headers.l4 as usize + 16;
            let complete = u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
            prop_assert_eq!(lacks_checksum(bytes.as_slice(), &packet, length), Ok(complete == sum));
            bytes[at..at + 2].copy_from_slice(&sum.to_ne_bytes());
            prop_assert_eq!(lacks_checksum(bytes.as_slice(), &packet, length), Ok(true));
        }
    }

    proptest! {
        #[test]
        fn unfinished_checksum_stays_the_sum_over_the_pseudo_header(
            [a, b, c, d] in addresses(), ports in any::<[u16; 4]>(), protocol in prop_oneof![Just(6u8), Just(17)],
            payload in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let from = Tuple::new(a, b, ports[0], ports[1], protocol);
            let to = Tuple::new(c, d, ports[2], ports[3], protocol);
            let flow = Flow::new(&from, &to, 1, 0, Tick(1));
            let unfinished = |tuple: &Tuple| {
                let mut bytes = frame(tuple, &payload);
                let packet = parse(bytes.as_slice(), Layer::Ethernet).unwrap();
                let l4 = packet.headers.l4;
                let sum = pseudo_header(tuple, u16::try_from(packet.length - (l4 - packet.headers.l3)).unwrap());
                let at = l4 as usize + if protocol == 6 { 16 } else { 6 };
                bytes[at..at + 2].copy_from_slice(&sum.fold().to_ne_bytes());
                (bytes, packet)
            };
            let (mut bytes, packet) = unfinished(&from);
            unfinished_transport(bytes.as_mut_slice(), &packet, &flow).unwrap();
            network(bytes.as_mut_slice(), &packet.headers, &flow, 0).unwrap();
            prop_assert_eq!(bytes, unfinished(&to).0);
        }
    }

    /// No bounds check of the rewrite may fail after the programs have counted a packet in its flow.
    #[test]
    fn every_frame_that_parses_can_be_rewritten() {
        let v4 = [1, 2, 3].map(|last| Address::from_v4([192, 0, 2, last]));
        let v6 = [1, 2, 3]
            .map(|last| Address::from_v6([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]));
        for ([client, vip, pod], protocol) in [(v4, 6), (v4, 17), (v6, 6), (v6, 17)] {
            let from = Tuple::new(client, vip, 1, 2, protocol);
            let flow = Flow::new(&from, &Tuple::new(client, pod, 1, 3, protocol), 1, 0, Tick(1));
            let whole = frame(&from, b"question");
            let mut rewritten = 0;
            for length in 0..=whole.len() {
                let mut bytes = whole[..length].to_vec();
                let Ok(packet) = parse(bytes.as_slice(), Layer::Ethernet) else { continue };
                assert!(lacks_checksum(bytes.as_slice(), &packet, packet.length).is_ok(), "{length}");
                let checksum = transport(bytes.as_mut_slice(), &packet, &flow);
                assert_eq!(checksum, Ok(TransportChecksum::Updated), "{length}");
                assert_eq!(network(bytes.as_mut_slice(), &packet.headers, &flow, 1), Ok(()), "{length}");
                rewritten += 1;
            }
            assert_eq!(rewritten, b"question".len() + 1, "all that reach to the end of the transport header");
        }
    }

    #[test]
    fn udp_checksum_0_stays_0() {
        let [client, vip, pod] = [1, 2, 3].map(|last| Address::from_v4([192, 0, 2, last]));
        let (from, to) = (Tuple::new(client, vip, 1, 2, 17), Tuple::new(client, pod, 1, 3, 17));
        let mut bytes = frame(&from, b"question");
        bytes[40..42].fill(0);
        let packet = parse(bytes.as_slice(), Layer::Ethernet).unwrap();
        let checksum = transport(bytes.as_mut_slice(), &packet, &Flow::new(&from, &to, 1, 0, Tick(1)));
        assert_eq!(checksum, Ok(TransportChecksum::Absent));
        let sliced = SlicedPacket::from_ethernet(&bytes).unwrap();
        let Some(TransportSlice::Udp(udp)) = sliced.transport else { panic!("no UDP") };
        assert_eq!((udp.destination_port(), udp.checksum()), (3, 0));
    }
}
