//! The checksum that a device computes when it sends an ICMP error.
//!
//! An ICMP error is written over the packet that it answers. If the device that sends that TCP or UDP packet is to
//! compute its checksum (`CHECKSUM_PARTIAL`: a socket of this machine sent it, or GRO merged it), the task stays with
//! the buffer, and no BPF helper ends it. When the error leaves, the device sums everything from where the packet had
//! its transport header (`csum_start`), and writes the complement to where that header had its checksum
//! (`csum_offset`). Those would be bytes of the quote.
//!
//! So the error is such that the device writes what is there already:
//!
//! 1. The frame loses bytes at its front ([`ChecksumTask::surplus`]), so that the field that the device writes is the
//!    checksum of the ICMP message. The device then also sums the last bytes of the network header.
//! 2. A right ICMP message sums up to a known value, so the network header alone decides what the device writes. That
//!    is what the ICMP checksum must be ([`ChecksumTask::checksum`]).
//! 3. One word of the message makes it right with that checksum: that of the quoted transport checksum
//!    ([`quoted_checksum`]), which no receiver reads. (The packet's own was not computed yet.)
//!
//! The error is valid whether the device computes the checksum, leaves all but TCP and UDP as they are, or passes the
//! packet on with the task to a receiver that does not look at the checksum (veth).

use lb_common::{checksum::Sum, conntrack::Tuple};

use crate::{
    headers::{ipv4_header, pseudo_header},
    parse::{Body, Headers, frame::lengths},
    reject::MESSAGE,
};

/// Bytes from the start of an ICMP message to its checksum.
const ICMP_CHECKSUM: u32 = 2;

/// Where the checksum lies in the transport header of a packet whose checksum the device is to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ChecksumTask {
    /// In a UDP header.
    Udp = 6,
    /// In a TCP header.
    Tcp = 16,
}

impl ChecksumTask {
    /// The task of a packet that is left to the device. `None` if it has no transport header of TCP or UDP, or if
    /// network headers are so long that the quote would not contain the transport checksum.
    #[inline(always)]
    pub const fn of(body: Body, headers: &Headers) -> Option<Self> {
        let task = match body {
            Body::Tcp => Self::Tcp,
            Body::Udp => Self::Udp,
            _ => return None,
        };
        if task.quoted(headers) as usize + 2 > MESSAGE { None } else { Some(task) }
    }

    /// Bytes from the start of the ICMP message to the checksum of the quoted transport header.
    #[inline(always)]
    pub const fn quoted(self, headers: &Headers) -> u32 {
        lengths::ICMP + headers.l4 - headers.l3 + self as u32
    }

    /// Bytes at the end of the error's network header that the device sums.
    const fn summed_before(self) -> u32 {
        self as u32 - ICMP_CHECKSUM
    }

    /// Bytes that the frame loses at its front; `network` is the length of the error's network header.
    #[inline(always)]
    pub const fn surplus(self, headers: &Headers, network: u32) -> u32 {
        headers.l4 - headers.l3 - network + self.summed_before()
    }

    /// The checksum that the device computes for an error with the tuple `answer` and a right ICMP message of `message`
    /// bytes: the sum over the pseudo header that the message includes (ICMPv6 only), minus that over the bytes of the
    /// network header that the device includes.
    #[inline(always)]
    pub fn checksum(self, answer: &Tuple, message: u16) -> u16 {
        let destination = &answer.destination;
        let sum = match (self, destination.is_v4()) {
            (Self::Udp, true) => Sum::ZERO.add_wide(!destination.v4_word()),
            // An IPv4 header sums up to 0, so minus its last 14 bytes are its first 6. The identification is 0.
            (Self::Tcp, true) => {
                let header = ipv4_header(answer, message);
                Sum::ZERO
                    .add_word(u16::from_ne_bytes([header.vihl, header.tos]))
                    .add_word(u16::from_ne_bytes(header.tot_len))
            }
            (Self::Udp, false) => pseudo_header(answer, message).add_wide(!destination.words()[3]),
            (Self::Tcp, false) => {
                let [a, b, ..] = *destination.bytes();
                pseudo_header(answer, message)
                    .sub_16(destination.bytes())
                    .add_word(u16::from_ne_bytes([a, b]))
            }
        };
        sum.fold()
    }
}

/// The checksum to quote in a message that must have the checksum `own`; `without` is its checksum if the quoted one
/// is 0.
#[inline(always)]
pub fn quoted_checksum(without: u16, own: u16) -> u16 {
    Sum::ZERO.add_word(without).sub_word(own).fold()
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use lb_common::{Address, conntrack::Tuple, protocol};
    use proptest::prelude::*;

    use super::*;
    use crate::{
        headers::{icmp_protocol, ipv6_header},
        parse::frame::Header,
        reject::too_big,
    };

    fn bytes<T: Header>(header: &T) -> &[u8] {
        // SAFETY: a `Header` is bytes only, and the slice borrows it.
        unsafe { core::slice::from_raw_parts(core::ptr::from_ref(header).cast(), size_of::<T>()) }
    }

    fn sum(bytes: &[u8]) -> Sum {
        bytes.chunks(2).fold(Sum::ZERO, |sum, pair| {
            sum.add_word(u16::from_ne_bytes([pair[0], *pair.get(1).unwrap_or(&0)]))
        })
    }

    /// An ICMP error about a packet of `tuple`, which has `options` bytes of options or extension headers: as the
    /// programs build it, from the network header on, with the place of `csum_start`.
    fn error(task: ChecksumTask, tuple: &Tuple, quote: &[u8], options: u32) -> (Vec<u8>, u32) {
        let is_v4 = tuple.source.is_v4();
        let answer = Tuple { protocol: icmp_protocol(is_v4), ..tuple.reversed() };
        let network = if is_v4 { lengths::IPV4 } else { lengths::IPV6 };
        let headers = Headers { l3: 14, l4: 14 + network + options, is_v4 };
        let mut message = [&too_big(is_v4, 1480)[..], quote].concat();
        let length = u16::try_from(message.len()).unwrap();
        let quoted = task.quoted(&headers) as usize;
        message[quoted..quoted + 2].fill(0);
        let pseudo = if is_v4 { Sum::ZERO } else { pseudo_header(&answer, length) };
        let without = !sum(&message).add_word(pseudo.fold()).fold();
        let own = task.checksum(&answer, length);
        message[2..4].copy_from_slice(&own.to_ne_bytes());
        message[quoted..quoted + 2].copy_from_slice(&quoted_checksum(without, own).to_ne_bytes());
        let start = headers.l4 - headers.l3 - task.surplus(&headers, network);
        let header = if is_v4 {
            bytes(&ipv4_header(&answer, length)).to_vec()
        } else {
            bytes(&ipv6_header(&answer, length)).to_vec()
        };
        ([header, message].concat(), start)
    }

    /// What a device does: it sums from `csum_start` on, and writes the complement (0 as 0xffff).
    fn complete(packet: &mut [u8], start: u32, field: u32) {
        let at = (start + field) as usize;
        let checksum = match !sum(&packet[start as usize..]).fold() {
            0 => 0xffff,
            other => other,
        };
        packet[at..at + 2].copy_from_slice(&checksum.to_ne_bytes());
    }

    /// Whether the ICMP checksum of the packet is right.
    fn is_right(packet: &[u8], tuple: &Tuple) -> bool {
        let is_v4 = tuple.source.is_v4();
        let (_, message) = packet.split_at(if is_v4 { 20 } else { 40 });
        let answer = Tuple { protocol: icmp_protocol(is_v4), ..tuple.reversed() };
        let pseudo =
            if is_v4 { Sum::ZERO } else { pseudo_header(&answer, u16::try_from(message.len()).unwrap()) };
        sum(message).add_word(pseudo.fold()).fold() == 0xffff
    }

    fn addresses() -> impl Strategy<Value = [Address; 2]> {
        prop_oneof![
            any::<[[u8; 4]; 2]>().prop_map(|pair| pair.map(Address::from_v4)),
            any::<[[u8; 16]; 2]>()
                .prop_map(|pair| pair.map(Address::from_v6))
                .prop_filter("no mapped addresses", |[a, b]| !a.is_v4() && !b.is_v4()),
        ]
    }

    proptest! {
        #[test]
        fn icmp_error_is_right_before_and_after_the_device_computes_a_checksum(
            [source, destination] in addresses(),
            [from, to]: [u16; 2],
            is_tcp: bool,
            options in (0u32..10).prop_map(|words| words * 4),
            quoted in proptest::collection::vec(any::<u8>(), 120),
        ) {
            let (task, protocol) =
                if is_tcp { (ChecksumTask::Tcp, protocol::TCP) } else { (ChecksumTask::Udp, protocol::UDP) };
            let tuple = Tuple::new(source, destination, from, to, protocol);
            let network = if source.is_v4() { 20 } else { 40 };
            let quote = &quoted[..network + options as usize + if is_tcp { 20 } else { 8 }];
            let (mut packet, start) = error(task, &tuple, quote, options);
            prop_assert!(is_right(&packet, &tuple), "before");
            let before = packet.clone();
            complete(&mut packet, start, task as u32);
            prop_assert!(is_right(&packet, &tuple), "after");
            let field = network + 2;
            prop_assert_eq!(&packet[..field], &before[..field]);
            prop_assert_eq!(&packet[field + 2..], &before[field + 2..]);
        }
    }

    #[test]
    fn packet_whose_transport_checksum_does_not_fit_into_a_quote_has_no_task() {
        let headers = |network: u32| Headers { l3: 14, l4: 14 + network, is_v4: false };
        assert_eq!(ChecksumTask::of(Body::Tcp, &headers(102)), Some(ChecksumTask::Tcp));
        assert_eq!(ChecksumTask::of(Body::Tcp, &headers(104)), None);
        assert_eq!(ChecksumTask::of(Body::Udp, &headers(112)), Some(ChecksumTask::Udp));
        assert_eq!(ChecksumTask::of(Body::Sctp, &headers(40)), None);
        assert_eq!(ChecksumTask::of(Body::IcmpError, &headers(40)), None);
    }
}
