//! Writing the addresses, ports and checksums of a flow straight into a packet.

use lb_common::{Outcome, checksum::Sum, conntrack::Flow};
use network_types::{
    ip::{Ipv4Hdr, Ipv6Hdr},
    udp::UdpHdr,
};

use crate::{
    parse::{
        Body, Headers, Packet,
        frame::{Frame, Header, TcpHeader, half_word},
    },
    reject::pseudo_header,
};

/// A packet that may be written to where it lies.
pub trait FrameMut: Frame {
    /// The header that starts `offset` octets into the frame; see [`Frame::header`].
    ///
    /// # Errors
    ///
    /// [`Outcome::Malformed`] where the frame ends before the header does.
    fn header_mut<T: Header>(&mut self, offset: u32) -> Result<&mut T, Outcome>;
}

impl FrameMut for [u8] {
    fn header_mut<T: Header>(&mut self, offset: u32) -> Result<&mut T, Outcome> {
        let header: *const T = self.header(offset)?;
        // SAFETY: within bounds, and borrowed as mutably as the slice that it is a part of.
        Ok(unsafe { &mut *header.cast_mut() })
    }
}

/// Whether the checksum of a TCP or UDP packet of `length` octets, from its network header on, is still to be computed, which
/// frames of the same machine leave to the device. Nobody tells; but then the field holds the sum over the pseudo header. (Of
/// the checksums that are right, one in 65,536 looks like that.)
///
/// # Errors
///
/// [`Outcome::Malformed`] where there is no whole transport header.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the length is 16 bits in the pseudo header, too")]
pub fn lacks_checksum<F: Frame + ?Sized>(frame: &F, packet: &Packet, length: u32) -> Result<bool, Outcome> {
    let headers = &packet.headers;
    let length = length.saturating_sub(headers.l4 - headers.l3) as u16;
    let offset = if packet.body == Body::Tcp { 16 } else { 6 };
    let found = half_word(frame.header(headers.l4 + offset)?);
    Ok(found == pseudo_header(&packet.tuple, length).fold())
}

/// Gives a TCP or UDP packet the ports that packets of `flow` go on with, and the checksum that goes with them and with the
/// addresses.
///
/// # Errors
///
/// [`Outcome::Malformed`] where there is no whole transport header.
#[inline(always)]
pub fn transport<F: FrameMut + ?Sized>(frame: &mut F, packet: &Packet, flow: &Flow) -> Result<(), Outcome> {
    let l4 = packet.headers.l4;
    let ports = [flow.to.source_port.to_be_bytes(), flow.to.destination_port.to_be_bytes()];
    if packet.body == Body::Tcp {
        let header: &mut TcpHeader = frame.header_mut(l4)?;
        [header.source, header.destination] = ports;
        let checksum = updated(half_word(&header.checksum), flow.address_delta, flow.port_delta);
        header.checksum = checksum.to_ne_bytes();
        return Ok(());
    }
    let header: &mut UdpHdr = frame.header_mut(l4)?;
    [header.src, header.dst] = ports;
    // A checksum of 0 is none and stays so; one that becomes 0 is written as 0xffff (RFC 768).
    let before = half_word(&header.check);
    if before != 0 {
        let after = updated(before, flow.address_delta, flow.port_delta);
        header.check = if after == 0 { u16::MAX } else { after }.to_ne_bytes();
    }
    Ok(())
}

/// Gives a packet the addresses that packets of `flow` go on with, and takes `hops` (0 or 1) from its life. The caller has
/// seen to it that it has more than that.
///
/// # Errors
///
/// [`Outcome::Malformed`] where there is no whole network header.
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
        (header.src_addr, header.dst_addr) = (to.source.v4_bytes(), to.destination.v4_bytes());
        header.check = updated(half_word(&header.check), flow.address_delta, fewer(hops)).to_ne_bytes();
        header.ttl -= hops;
    } else {
        let header: &mut Ipv6Hdr = frame.header_mut(headers.l3)?;
        (header.src_addr, header.dst_addr) = (*to.source.bytes(), *to.destination.bytes());
        header.hop_limit -= hops;
    }
    Ok(())
}

/// Takes a hop from the life of the packet with this network header and more than one hop left.
///
/// # Errors
///
/// [`Outcome::Malformed`] where there is no whole network header.
#[inline(always)]
pub fn take_hop<F: FrameMut + ?Sized>(frame: &mut F, l3: u32, is_v4: bool) -> Result<(), Outcome> {
    if is_v4 {
        let header: &mut Ipv4Hdr = frame.header_mut(l3)?;
        header.check = updated(half_word(&header.check), fewer(1), 0).to_ne_bytes();
        header.ttl -= 1;
    } else {
        let header: &mut Ipv6Hdr = frame.header_mut(l3)?;
        header.hop_limit -= 1;
    }
    Ok(())
}

/// By how much fewer hops change the checksum of an IPv4 header, which has them in the upper octet of a word.
#[inline(always)]
fn fewer(hops: u8) -> u16 {
    Sum::ZERO.sub_word((u16::from(hops) << 8).to_be()).fold()
}

/// The checksum after two changes (RFC 1624).
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

    /// A packet between two endpoints of one family, with checksums.
    fn frame(tuple: &Tuple, payload: &[u8]) -> Vec<u8> {
        let ethernet = PacketBuilder::ethernet2(MACS[0], MACS[1]);
        let (source, destination) = (&tuple.source, &tuple.destination);
        let network = if source.is_v4() {
            ethernet.ipv4(source.v4_bytes(), destination.v4_bytes(), 64)
        } else {
            ethernet.ipv6(*source.bytes(), *destination.bytes(), 64)
        };
        let mut octets = Vec::new();
        if tuple.protocol == 6 {
            let tcp = network.tcp(tuple.source_port, tuple.destination_port, 1, 512);
            tcp.write(&mut octets, payload).unwrap();
        } else {
            let udp = network.udp(tuple.source_port, tuple.destination_port);
            udp.write(&mut octets, payload).unwrap();
        }
        octets
    }

    fn addresses() -> impl Strategy<Value = [Address; 4]> {
        prop_oneof![
            any::<[[u8; 4]; 4]>().prop_map(|octets| octets.map(Address::from_v4)),
            any::<[[u8; 15]; 4]>().prop_map(|octets| octets.map(|rest| {
                let mut octets = [0x20; 16];
                octets[1..].copy_from_slice(&rest);
                Address::from_v6(octets)
            })),
        ]
    }

    proptest! {
        #[test]
        fn a_rewritten_packet_is_the_one_that_would_have_been_made(
            [a, b, c, d] in addresses(), ports in any::<[u16; 4]>(), protocol in prop_oneof![Just(6u8), Just(17)],
            payload in proptest::collection::vec(any::<u8>(), 0..40), hops in 0..2u8,
        ) {
            let from = Tuple::new(a, b, ports[0], ports[1], protocol);
            let to = Tuple::new(c, d, ports[2], ports[3], protocol);
            let flow = Flow::new(&from, &to, 1, 0, Tick(1));
            let mut octets = frame(&from, &payload);
            let packet = parse(octets.as_slice(), Layer::Ethernet).unwrap();
            prop_assert_eq!(packet.tuple, from);
            transport(octets.as_mut_slice(), &packet, &flow).unwrap();
            network(octets.as_mut_slice(), &packet.headers, &flow, hops).unwrap();

            let hops_at = packet.headers.l3 as usize + if packet.headers.is_v4 { 8 } else { 7 };
            prop_assert_eq!(octets[hops_at], 64 - hops);
            if hops == 0 {
                prop_assert_eq!(&octets, &frame(&to, &payload));
            } else if packet.headers.is_v4 {
                let sliced = SlicedPacket::from_ethernet(&octets).unwrap();
                let header = sliced.net.as_ref().and_then(|net| net.ipv4_ref()).unwrap().header().to_header();
                prop_assert_eq!(header.calc_header_checksum(), header.header_checksum);
            }
        }

        #[test]
        fn only_what_holds_the_pseudo_header_lacks_its_checksum(
            [a, b, ..] in addresses(), payload in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let tuple = Tuple::new(a, b, 1, 2, 6);
            let mut octets = frame(&tuple, &payload);
            let packet = parse(octets.as_slice(), Layer::Ethernet).unwrap();
            let length = packet.length;
            let sum = pseudo_header(&tuple, u16::try_from(20 + payload.len()).unwrap()).fold();
            let at = packet.headers.l4 as usize + 16;
            let complete = u16::from_ne_bytes([octets[at], octets[at + 1]]);
            prop_assert_eq!(lacks_checksum(octets.as_slice(), &packet, length), Ok(complete == sum));
            octets[at..at + 2].copy_from_slice(&sum.to_ne_bytes());
            prop_assert_eq!(lacks_checksum(octets.as_slice(), &packet, length), Ok(true));
        }
    }

    #[test]
    fn a_datagram_without_checksum_stays_so() {
        let [client, vip, pod] = [1, 2, 3].map(|last| Address::from_v4([192, 0, 2, last]));
        let (from, to) = (Tuple::new(client, vip, 1, 2, 17), Tuple::new(client, pod, 1, 3, 17));
        let mut octets = frame(&from, b"question");
        octets[40..42].fill(0);
        let packet = parse(octets.as_slice(), Layer::Ethernet).unwrap();
        transport(octets.as_mut_slice(), &packet, &Flow::new(&from, &to, 1, 0, Tick(1))).unwrap();
        let sliced = SlicedPacket::from_ethernet(&octets).unwrap();
        let Some(TransportSlice::Udp(udp)) = sliced.transport else { panic!("no UDP") };
        assert_eq!((udp.destination_port(), udp.checksum()), (3, 0));
    }
}
