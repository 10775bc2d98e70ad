//! Fuzzes the rewriters: a packet with right checksums has right checksums afterwards, as etherparse computes them, and
//! nothing but addresses, ports, hop limit and checksums has changed. The same holds for packets with partial
//! checksums.
#![no_main]

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use lb_common::{
    Address,
    conntrack::{Flow, Tick, Tuple},
};
use lb_ebpf::{
    parse::{Body, Layer, Packet, parse},
    rewrite,
};
use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    addresses: [[u8; 16]; 2],
    ports: [u16; 2],
    takes_hop: bool,
    is_partial: bool,
    has_no_checksum: bool,
    /// Whether to choose the source port so that the new checksum is 0, which UDP writes as 0xffff.
    aims_at_zero: bool,
    frame: &'a [u8],
}

fuzz_target!(|input: Input<'_>| {
    let mut before = input.frame.to_vec();
    let Ok(packet) = parse(before.as_slice(), Layer::Ethernet) else { return };
    let Some(mut to) = target(&input, &packet) else { return };
    let hop_limit = before[hop_limit_at(&packet)];
    if !matches!(packet.body, Body::Tcp | Body::Udp) || hop_limit <= u8::from(input.takes_hop) {
        return;
    }
    if input.aims_at_zero {
        aim_at_zero(&before, &packet, &mut to);
    }
    let has_checksums = if input.is_partial {
        set_partial_checksum(&mut before, &packet, &packet.tuple);
        rewrite::lacks_checksum(before.as_slice(), &packet, packet.length) == Ok(true)
    } else {
        set_checksums(&mut before, &packet, input.has_no_checksum)
    };
    let after = rewritten(&before, &packet, &to, &input);
    if has_checksums {
        let mut expected = before;
        write_tuple(&mut expected, &packet, &to);
        expected[hop_limit_at(&packet)] -= u8::from(input.takes_hop);
        if input.is_partial {
            set_partial_checksum(&mut expected, &packet, &to);
        } else {
            assert!(set_checksums(&mut expected, &packet, input.has_no_checksum));
        }
        assert_eq!(after, expected);
    }
});

/// The tuple of the rewritten packet: the input's addresses, in the packet's family, and ports. `None` if an IPv6
/// packet would get a v4-mapped address.
fn target(input: &Input<'_>, packet: &Packet) -> Option<Tuple> {
    let is_v4 = packet.headers.is_v4;
    let [source, destination] = input.addresses.map(|bytes| match bytes {
        [a, b, c, d, ..] if is_v4 => Address::from_v4([a, b, c, d]),
        bytes => Address::from_v6(bytes),
    });
    let [from, to] = input.ports;
    // On the wire there are no v4-mapped addresses.
    (source.is_v4() == is_v4 && destination.is_v4() == is_v4)
        .then(|| Tuple::new(source, destination, from, to, packet.tuple.protocol))
}

/// Adds to the source port the checksum that the packet would get, so that the packet's checksum becomes 0.
fn aim_at_zero(before: &[u8], packet: &Packet, to: &mut Tuple) {
    let mut after = before.to_vec();
    write_tuple(&mut after, packet, to);
    if let Some((_, checksum)) = checksums(&after) {
        to.source_port = sum(&[to.source_port.to_be_bytes(), checksum.to_be_bytes()].concat());
    }
}

fn rewritten(before: &[u8], packet: &Packet, to: &Tuple, input: &Input<'_>) -> Vec<u8> {
    let flow = Flow::new(&packet.tuple, to, 1, 0, Tick(1));
    let mut bytes = before.to_vec();
    let frame = bytes.as_mut_slice();
    let transport = match input.is_partial {
        true => rewrite::unfinished_transport(frame, packet, &flow),
        false => rewrite::transport(frame, packet, &flow).map(drop),
    };
    assert_eq!(transport, Ok(()), "what parses can be rewritten");
    assert_eq!(rewrite::network(frame, &packet.headers, &flow, input.takes_hop.into()), Ok(()));
    bytes
}

fn hop_limit_at(packet: &Packet) -> usize {
    packet.headers.l3 as usize + if packet.headers.is_v4 { 8 } else { 7 }
}

fn checksum_at(packet: &Packet) -> usize {
    packet.headers.l4 as usize + if packet.body == Body::Tcp { 16 } else { 6 }
}

fn write(bytes: &mut [u8], at: usize, new: &[u8]) {
    bytes[at..at + new.len()].copy_from_slice(new);
}

fn write_tuple(bytes: &mut [u8], packet: &Packet, to: &Tuple) {
    let (l3, l4) = (packet.headers.l3 as usize, packet.headers.l4 as usize);
    if packet.headers.is_v4 {
        write(bytes, l3 + 12, &to.source.v4_bytes());
        write(bytes, l3 + 16, &to.destination.v4_bytes());
    } else {
        write(bytes, l3 + 8, to.source.bytes());
        write(bytes, l3 + 24, to.destination.bytes());
    }
    write(bytes, l4, &to.source_port.to_be_bytes());
    write(bytes, l4 + 2, &to.destination_port.to_be_bytes());
}

/// Writes the checksums that etherparse computes; returns false if etherparse finds no TCP or UDP packet. With
/// `has_none`, a UDP packet gets the checksum 0, which means no checksum.
fn set_checksums(bytes: &mut [u8], packet: &Packet, has_none: bool) -> bool {
    let Some((network, transport)) = checksums(bytes) else { return false };
    let transport = if has_none && packet.body == Body::Udp { 0 } else { transport };
    if let Some(network) = network {
        write(bytes, packet.headers.l3 as usize + 10, &network.to_be_bytes());
    }
    write(bytes, checksum_at(packet), &transport.to_be_bytes());
    true
}

/// The checksums that etherparse computes for the IPv4 header, if there is one, and for the TCP or UDP header. `None`
/// for anything but TCP or UDP.
fn checksums(bytes: &[u8]) -> Option<(Option<u16>, u16)> {
    let sliced = SlicedPacket::from_ethernet(bytes).ok()?;
    let transport = sliced.transport.as_ref()?;
    Some(match sliced.net.as_ref()? {
        NetSlice::Ipv4(ip) => {
            let header = ip.header().to_header();
            let (source, destination) = (header.source, header.destination);
            let sum = match transport {
                TransportSlice::Tcp(tcp) => {
                    tcp.to_header().calc_checksum_ipv4_raw(source, destination, tcp.payload())
                }
                TransportSlice::Udp(udp) => {
                    udp.to_header().calc_checksum_ipv4_raw(source, destination, udp.payload())
                }
                TransportSlice::Icmpv4(_) | TransportSlice::Icmpv6(_) => return None,
            };
            (Some(header.calc_header_checksum()), sum.ok()?)
        }
        NetSlice::Ipv6(ip) => {
            let (source, destination) = (ip.header().source(), ip.header().destination());
            let sum = match transport {
                TransportSlice::Tcp(tcp) => {
                    tcp.to_header().calc_checksum_ipv6_raw(source, destination, tcp.payload())
                }
                TransportSlice::Udp(udp) => {
                    udp.to_header().calc_checksum_ipv6_raw(source, destination, udp.payload())
                }
                TransportSlice::Icmpv4(_) | TransportSlice::Icmpv6(_) => return None,
            };
            (None, sum.ok()?)
        }
        NetSlice::Arp(_) => return None,
    })
}

/// Writes the checksums of a packet with a partial transport checksum, which a device would complete: the transport
/// header gets the sum over the pseudo header only, an IPv4 header its complete header checksum.
#[expect(
    clippy::cast_possible_truncation,
    reason = "sums are folded; the length has 16 bits in the pseudo header"
)]
fn set_partial_checksum(bytes: &mut [u8], packet: &Packet, tuple: &Tuple) {
    let length = packet.length.saturating_sub(packet.headers.l4 - packet.headers.l3) as u16;
    let mut pseudo = [[0, tuple.protocol], length.to_be_bytes()].concat();
    for address in [tuple.source, tuple.destination] {
        if packet.headers.is_v4 {
            pseudo.extend(address.v4_bytes());
        } else {
            pseudo.extend(address.bytes());
        }
    }
    write(bytes, checksum_at(packet), &sum(&pseudo).to_be_bytes());
    if packet.headers.is_v4 {
        let l3 = packet.headers.l3 as usize;
        write(bytes, l3 + 10, &[0, 0]);
        let header = &bytes[l3..packet.headers.l4 as usize];
        let checksum = !sum(header);
        write(bytes, l3 + 10, &checksum.to_be_bytes());
    }
}

/// The one's complement sum of RFC 1071, two bytes at a time.
#[expect(clippy::cast_possible_truncation, reason = "folded to 16 bits before")]
fn sum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    words.fold(0, |sum, word| (sum + word) % 0x1_0000 + (sum + word) / 0x1_0000) as u16
}
