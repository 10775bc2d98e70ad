//! Neighbour discovery for IPv6: RFC 4861, and RFC 4862 for the detection of duplicate addresses.

use lb_common::{Address, checksum::Sum, protocol};

use super::{IPV6, arp::same};
use crate::{
    parse::frame::{v6_address, word},
    rules::announce::Message,
};

/// Size in bytes of the longest message that the program reads; the program leaves longer messages to the kernel.
pub const MESSAGE: usize = LONGEST as usize;
/// [`MESSAGE`] as a `u32`.
pub const LONGEST: u32 = 128;
/// Size in bytes of the shortest solicitation and advertisement: without options.
pub const SHORTEST: u32 = 24;
/// Size in bytes of the frame with an advertisement: Ethernet and IPv6 headers, and an advertisement with one option,
/// the link-layer address of the target.
pub const FRAME: usize = HEADERS + ADVERTISEMENT as usize;
const ADVERTISEMENT: u32 = 32;

/// ICMPv6 types, RFC 4861 §4.3 and §4.4.
const SOLICITATION: u8 = 135;
const ADVERTISED: u8 = 136;
/// Hop limit of every neighbour discovery packet; it shows that no router has forwarded the packet.
const HOP_LIMIT: u8 = 255;
/// Options of link-layer addresses, RFC 4861 §4.6.1.
const SOURCE_LINK: u8 = 1;
const TARGET_LINK: u8 = 2;
/// The most options that fit into [`MESSAGE`].
const OPTIONS: u32 = (LONGEST - SHORTEST) / 8;

/// The multicast address of all nodes of the link, RFC 4291 §2.7.1.
pub const ALL_NODES: [u8; 16] = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

/// Flags of an advertisement, RFC 4861 §4.4: in the upper byte of the word that holds them.
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;

/// The Ethernet and IPv6 headers of a packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// Destination of the frame.
    pub to: [u8; 6],
    /// Source of the frame.
    pub from: [u8; 6],
    ether_type: [u8; 2],
    version: [u8; 4],
    /// Payload length: number of bytes after the IPv6 header, big-endian.
    payload: [u8; 2],
    next_header: u8,
    hop_limit: u8,
    /// Source address of the packet.
    pub source: [u8; 16],
    /// Destination address of the packet.
    pub destination: [u8; 16],
}

/// Size of [`Headers`] in bytes.
pub const HEADERS: usize = 54;
const _: () = assert!(size_of::<Headers>() == HEADERS && align_of::<Headers>() == 1);

// SAFETY: all fields are bytes, so any bit pattern is valid, and the alignment is 1.
unsafe impl crate::parse::frame::Header for Headers {}

impl Headers {
    /// Length of the ICMPv6 message in bytes, if the packet may be neighbour discovery: it has no extension headers, no
    /// router has forwarded it, and the length is one that the program supports.
    #[inline(always)]
    pub fn message(&self) -> Option<u32> {
        let length = u32::from(u16::from_be_bytes(self.payload));
        let plain = u16::from_be_bytes(self.ether_type) == IPV6
            && self.version[0] >> 4 == 6
            && self.next_header == protocol::ICMPV6
            && self.hop_limit == HOP_LIMIT;
        (plain && (SHORTEST..=LONGEST).contains(&length)).then_some(length)
    }

    #[inline(always)]
    fn is_unspecified(&self) -> bool {
        v6_address(&self.source) == Address::from_v6([0; 16])
    }
}

/// The address that a message is about: the target of a solicitation or an advertisement.
#[inline(always)]
pub fn target(message: &[u8; MESSAGE]) -> Option<Address> {
    let [kind, code, ..] = *message;
    let concerns = (kind == SOLICITATION || kind == ADVERTISED) && code == 0;
    concerns.then(|| v6_address(target_bytes(message)))
}

#[inline(always)]
fn target_bytes(message: &[u8; MESSAGE]) -> &[u8; 16] {
    // SAFETY: bytes 8 to 23 of the message; the alignment of the result is 1.
    unsafe { &*message.as_ptr().add(8).cast() }
}

/// The meaning of a message about its target, for the machine with the MAC address `own`. `message` is `length` bytes,
/// followed by zeros. A message from `own`, or with a wrong checksum or malformed options, is [`Message::Other`], and
/// so is a solicitation that is sent neither to the target nor to its [`group`], or that contradicts RFC 4861 §7.1.1.
#[inline(always)]
pub fn meaning(headers: &Headers, message: &[u8; MESSAGE], length: u32, own: [u8; 6]) -> Message {
    if same(headers.from, own) || sum(headers, message, length) != 0xffff {
        return Message::Other;
    }
    let Some(has_link) = source_link(message, length) else { return Message::Other };
    if message[0] == ADVERTISED {
        return Message::Claims;
    }
    let target = *target_bytes(message);
    let to_group = is_group_of(&headers.destination, &target) && same(headers.to, group_mac(&target));
    let to_us = v6_address(&headers.destination) == Address::from_v6(target) && same(headers.to, own);
    if headers.is_unspecified() {
        return if to_group && !has_link { Message::Detects } else { Message::Other };
    }
    if to_group || to_us { Message::Asks } else { Message::Other }
}

/// Whether the message is a solicitation with a source link-layer address option; `None` if its options are malformed.
#[inline(always)]
fn source_link(message: &[u8; MESSAGE], length: u32) -> Option<bool> {
    const MASK: usize = MESSAGE - 1;
    const { assert!(MESSAGE.is_power_of_two()) };
    let (mut at, mut found) = (SHORTEST, false);
    for _ in 0..OPTIONS {
        if at >= length {
            break;
        }
        let kind = message[at as usize & MASK];
        let units = u32::from(message[(at as usize + 1) & MASK]);
        if units == 0 {
            return None;
        }
        found |= message[0] == SOLICITATION && kind == SOURCE_LINK;
        at += 8 * units;
    }
    (at == length).then_some(found)
}

/// The sum over the pseudo header and the message: 0xffff if the checksum in the message is right.
#[inline(always)]
fn sum(headers: &Headers, message: &[u8; MESSAGE], length: u32) -> u16 {
    let words: &[[u8; 4]; MESSAGE / 4] = bytemuck::must_cast_ref(message);
    let pseudo_header = pseudo_header(v6_address(&headers.source), v6_address(&headers.destination), length);
    words.iter().fold(pseudo_header, |sum, bytes| sum.add_wide(word(bytes))).fold()
}

#[inline(always)]
fn pseudo_header(source: Address, destination: Address, length: u32) -> Sum {
    #[expect(clippy::cast_possible_truncation, reason = "messages are short")]
    let length = length as u16;
    add_address(add_address(Sum::ZERO, source), destination)
        .add_word(length.to_be())
        .add_word(u16::from(protocol::ICMPV6).to_be())
}

#[inline(always)]
fn add_address(sum: Sum, address: Address) -> Sum {
    let [a, b, c, d] = address.words();
    sum.add_wide(a).add_wide(b).add_wide(c).add_wide(d)
}

/// Whether `address` is the solicited-node group of `target`: ff02::1:ff, and the last 24 bits of the target (RFC 4291
/// §2.7.1).
#[inline(always)]
fn is_group_of(address: &[u8; 16], target: &[u8; 16]) -> bool {
    v6_address(address) == Address::from_v6(group(target))
}

/// The solicited-node group of an address.
#[inline(always)]
pub const fn group(target: &[u8; 16]) -> [u8; 16] {
    let [.., a, b, c] = *target;
    [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c]
}

/// The MAC address of the target's [`group`]: 33:33 and the last 32 bits of the group (RFC 2464 §7).
#[inline(always)]
const fn group_mac(target: &[u8; 16]) -> [u8; 6] {
    let [.., a, b, c] = *target;
    [0x33, 0x33, 0xff, a, b, c]
}

/// The receivers of an advertisement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Audience {
    /// All nodes: the advertisement is unsolicited, or the sender of the solicitation has no address yet.
    All = 0,
    /// Only the sender of the solicitation.
    Asker = 1,
}

/// A frame with a neighbour advertisement.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advertisement {
    headers: Headers,
    kind: u8,
    code: u8,
    checksum: [u8; 2],
    flags: [u8; 4],
    target: [u8; 16],
    option: [u8; 2],
    link: [u8; 6],
}

const _: () = assert!(size_of::<Advertisement>() == FRAME && align_of::<Advertisement>() == 1);

impl Advertisement {
    /// The answer of `own` to a solicitation for `target`.
    #[inline(always)]
    pub fn answer(asked: &Headers, target: [u8; 16], own: [u8; 6], audience: Audience) -> Self {
        match audience {
            Audience::All => Self::announcement(target, own),
            Audience::Asker => Self::new(target, own, asked.from, asked.source, SOLICITED | OVERRIDE),
        }
    }

    /// The advertisement to all nodes that `own` has the address.
    #[inline(always)]
    pub fn announcement(address: [u8; 16], own: [u8; 6]) -> Self {
        Self::new(address, own, [0x33, 0x33, 0, 0, 0, 1], ALL_NODES, OVERRIDE)
    }

    #[inline(always)]
    fn new(target: [u8; 16], own: [u8; 6], to: [u8; 6], destination: [u8; 16], flags: u8) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "a constant below 256")]
        let headers = Headers {
            to,
            from: own,
            ether_type: IPV6.to_be_bytes(),
            version: [0x60, 0, 0, 0],
            payload: [0, ADVERTISEMENT as u8],
            next_header: protocol::ICMPV6,
            hop_limit: HOP_LIMIT,
            source: target,
            destination,
        };
        let [a, b, c, d, e, f] = own;
        let (about, whom) = (Address::from_v6(target), Address::from_v6(destination));
        let sum = add_address(pseudo_header(about, whom, ADVERTISEMENT), about)
            .add_word(u16::from_ne_bytes([ADVERTISED, 0]))
            .add_word(u16::from_ne_bytes([flags, 0]))
            .add_word(u16::from_ne_bytes([TARGET_LINK, 1]))
            .add_wide(u32::from_ne_bytes([a, b, c, d]))
            .add_word(u16::from_ne_bytes([e, f]));
        Self {
            headers,
            kind: ADVERTISED,
            code: 0,
            checksum: (!sum.fold()).to_ne_bytes(),
            flags: [flags, 0, 0, 0],
            target,
            option: [TARGET_LINK, 1],
            link: own,
        }
    }

    /// The bytes of the frame.
    #[inline(always)]
    pub const fn bytes(&self) -> &[u8; FRAME] {
        // SAFETY: the struct has this size, alignment 1 and no padding.
        unsafe { &*core::ptr::from_ref(self).cast() }
    }
}
