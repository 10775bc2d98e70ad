//! Answers in place of a backend: RSTs and ICMP errors, and how much of a packet an error quotes.

use lb_common::{
    checksum::Sum,
    conntrack::{Segment, Tuple, tcp_flags},
};

use crate::parse::frame::{TcpHeader, lengths};

/// The most bytes of the offending packet that an ICMP error quotes. The quote is the network header and 8 bytes (RFC
/// 792). 120 bytes are enough for any IPv4 header, and for an IPv6 header with a few extension headers.
pub const QUOTE: u32 = 120;
/// Length in bytes of the shortest quote: an IPv4 header without options, and 8 bytes.
pub const SHORTEST_QUOTE: u32 = 28;
/// Size in bytes of the largest ICMP error that the programs build, without its network header.
pub const MESSAGE: usize = (lengths::ICMP + QUOTE) as usize;

/// The TCP header of the RST that answers `segment` (RFC 9293 §3.10.7.1), checksum still 0; `tuple` is the tuple of the
/// RST.
#[inline(always)]
pub fn reset(tuple: &Tuple, segment: &Segment) -> TcpHeader {
    let (seq, ack, flags) = if segment.flags & tcp_flags::ACK != 0 {
        (segment.ack, 0, tcp_flags::RST)
    } else {
        (0, segment.end(), tcp_flags::RST | tcp_flags::ACK)
    };
    TcpHeader {
        source: tuple.source_port.to_be_bytes(),
        destination: tuple.destination_port.to_be_bytes(),
        seq: seq.to_be_bytes(),
        ack: ack.to_be_bytes(),
        data_offset: 5 << 4,
        flags,
        window: [0; 2],
        checksum: [0; 2],
        urgent: [0; 2],
    }
}

/// The sum over a header that [`reset`] has built.
#[inline(always)]
pub fn reset_sum(header: &TcpHeader) -> Sum {
    let words = [header.seq, header.ack].map(u32::from_ne_bytes);
    Sum::ZERO
        .add_word(u16::from_ne_bytes(header.source))
        .add_word(u16::from_ne_bytes(header.destination))
        .add_wide(words[0])
        .add_wide(words[1])
        .add_word(u16::from_ne_bytes([header.data_offset, header.flags]))
}

/// The first 8 bytes of an ICMP port unreachable, checksum still 0 (RFC 792; RFC 4443 §3.1).
#[inline(always)]
pub const fn port_unreachable(is_v4: bool) -> [u8; 8] {
    if is_v4 { [3, 3, 0, 0, 0, 0, 0, 0] } else { [1, 4, 0, 0, 0, 0, 0, 0] }
}

/// The first 8 bytes of an ICMP host unreachable (RFC 792) or address unreachable (RFC 4443 §3.1), checksum still 0.
#[inline(always)]
pub const fn host_unreachable(is_v4: bool) -> [u8; 8] {
    if is_v4 { [3, 1, 0, 0, 0, 0, 0, 0] } else { [1, 3, 0, 0, 0, 0, 0, 0] }
}

/// The first 8 bytes of an ICMP time exceeded in transit, checksum still 0 (RFC 792; RFC 4443 §3.3).
#[inline(always)]
pub const fn time_exceeded(is_v4: bool) -> [u8; 8] {
    if is_v4 { [11, 0, 0, 0, 0, 0, 0, 0] } else { [3, 0, 0, 0, 0, 0, 0, 0] }
}

/// The first 8 bytes of an ICMP error that carries the `mtu` in bytes, checksum still 0: fragmentation needed (RFC 1191
/// §4) or packet too big (RFC 4443 §3.2).
#[inline(always)]
pub const fn too_big(is_v4: bool, mtu: u32) -> [u8; 8] {
    let [a, b, c, d] = mtu.to_be_bytes();
    if is_v4 { [3, 4, 0, 0, 0, 0, c, d] } else { [2, 0, 0, 0, a, b, c, d] }
}

/// Whether an ICMP error that begins with `start` is one of [`too_big`].
#[inline(always)]
pub const fn is_too_big(start: &[u8; 8], is_v4: bool) -> bool {
    matches!((is_v4, start[0], start[1]), (true, 3, 4) | (false, 2, _))
}

#[cfg(test)]
mod tests {
    use etherparse::{IpNumber, Ipv4Header as V4, Ipv6Header as V6, TcpHeader as Tcp};
    use lb_common::{Address, protocol};
    use network_types::ip::{Ipv4Hdr, Ipv6Hdr};
    use proptest::prelude::*;

    use super::*;
    use crate::headers::{icmp_protocol, ipv4_header, ipv6_header, pseudo_header};

    fn bytes<T: crate::parse::frame::Header>(header: &T) -> &[u8] {
        // SAFETY: a `Header` is bytes only, and the slice borrows it.
        unsafe { core::slice::from_raw_parts(core::ptr::from_ref(header).cast(), size_of::<T>()) }
    }

    fn v4_tuple() -> impl Strategy<Value = Tuple> {
        any::<([u8; 4], [u8; 4], u16, u16)>().prop_map(|(source, destination, from, to)| {
            Tuple::new(Address::from_v4(source), Address::from_v4(destination), from, to, protocol::TCP)
        })
    }

    fn v6_tuple() -> impl Strategy<Value = Tuple> {
        any::<([u8; 16], [u8; 16], u16, u16)>().prop_map(|(source, destination, from, to)| {
            Tuple::new(Address::from_v6(source), Address::from_v6(destination), from, to, protocol::TCP)
        })
    }

    fn segments() -> impl Strategy<Value = Segment> {
        any::<(u8, u32, u32, u16)>().prop_map(|(flags, seq, ack, payload)| Segment {
            flags,
            seq,
            ack,
            payload: u32::from(payload),
        })
    }

    /// The RST of RFC 9293 §3.10.7.1, built with etherparse; checksum 0.
    fn expected_reset(tuple: &Tuple, segment: &Segment) -> Tcp {
        let mut header = Tcp::new(tuple.source_port, tuple.destination_port, 0, 0);
        header.rst = true;
        if segment.flags & 0x10 != 0 {
            header.sequence_number = segment.ack;
        } else {
            let [fin, syn] = [1, 2].map(|bit| u32::from(segment.flags & bit != 0));
            header.ack = true;
            header.acknowledgment_number =
                segment.seq.wrapping_add(segment.payload).wrapping_add(syn).wrapping_add(fin);
        }
        header
    }

    /// The valid checksum of the packet.
    fn checksum(tuple: &Tuple, header: &TcpHeader) -> u16 {
        let sum = reset_sum(header).fold();
        let pseudo = pseudo_header(tuple, 20).fold();
        u16::from_be(!Sum::ZERO.add_word(sum).add_word(pseudo).fold())
    }

    proptest! {
        #[test]
        fn ipv4_header_matches_etherparse(tuple in v4_tuple(), payload in 0u16..2000) {
            let ours = ipv4_header(&tuple, payload);
            let (source, destination) = (tuple.source.v4_bytes(), tuple.destination.v4_bytes());
            let mut theirs = V4::new(payload, 64, IpNumber::TCP, source, destination).unwrap();
            theirs.header_checksum = theirs.calc_header_checksum();
            prop_assert_eq!(bytes::<Ipv4Hdr>(&ours), &theirs.to_bytes()[..]);
        }

        #[test]
        fn ipv6_header_matches_etherparse(tuple in v6_tuple(), payload: u16) {
            let ours = ipv6_header(&tuple, payload);
            let theirs = V6 {
                payload_length: payload,
                next_header: IpNumber::TCP,
                hop_limit: 64,
                source: *tuple.source.bytes(),
                destination: *tuple.destination.bytes(),
                ..V6::default()
            };
            prop_assert_eq!(bytes::<Ipv6Hdr>(&ours), &theirs.to_bytes()[..]);
        }

        #[test]
        fn reset_follows_rfc_9293(tuple in v4_tuple(), segment in segments()) {
            let ours = reset(&tuple, &segment);
            let theirs = expected_reset(&tuple, &segment);
            prop_assert_eq!(bytes(&ours), &theirs.to_bytes()[..]);
            let (source, destination) = (tuple.source.v4_bytes(), tuple.destination.v4_bytes());
            let scratch = theirs.calc_checksum_ipv4_raw(source, destination, &[]).unwrap();
            prop_assert_eq!(checksum(&tuple, &ours), scratch);
        }

        #[test]
        fn checksum_of_reset_is_valid_over_ipv6(tuple in v6_tuple(), segment in segments()) {
            let ours = reset(&tuple, &segment);
            let theirs = expected_reset(&tuple, &segment);
            let (source, destination) = (*tuple.source.bytes(), *tuple.destination.bytes());
            let scratch = theirs.calc_checksum_ipv6_raw(source, destination, &[]).unwrap();
            prop_assert_eq!(checksum(&tuple, &ours), scratch);
        }
    }

    #[test]
    fn port_unreachable_matches_etherparse() {
        use etherparse::{
            Icmpv4Header, Icmpv4Type, Icmpv6Header, Icmpv6Type, icmpv4::DestUnreachableHeader,
            icmpv6::DestUnreachableCode,
        };
        let v4 = Icmpv4Header::new(Icmpv4Type::DestinationUnreachable(DestUnreachableHeader::Port));
        assert_eq!(port_unreachable(true), v4.to_bytes()[..]);
        let v6 = Icmpv6Header::new(Icmpv6Type::DestinationUnreachable(DestUnreachableCode::Port));
        assert_eq!(port_unreachable(false), v6.to_bytes()[..]);
        assert_eq!((icmp_protocol(true), icmp_protocol(false)), (IpNumber::ICMP.0, IpNumber::IPV6_ICMP.0));
    }
}
