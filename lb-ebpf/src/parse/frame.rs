//! Access to the headers of a packet.

use core::ops::Range;

use lb_common::{Address, Outcome};
use network_types::{
    ip::{Ipv4Hdr, Ipv6Hdr},
    udp::UdpHdr,
};

/// A header that may be borrowed at any address.
///
/// # Safety
///
/// The type must be `repr(C)` with alignment 1, and valid for every bit pattern.
pub unsafe trait Header: Copy {}

// SAFETY: `repr(C)` of bytes and byte arrays.
unsafe impl Header for Ipv4Hdr {}
// SAFETY: `repr(C)` of bytes and byte arrays.
unsafe impl Header for Ipv6Hdr {}
// SAFETY: `repr(C)` of bytes and byte arrays.
unsafe impl Header for TcpHeader {}
// SAFETY: `repr(C)` of bytes and byte arrays.
unsafe impl Header for UdpHdr {}
// SAFETY: a byte has alignment 1 and is valid for every bit pattern.
unsafe impl Header for u8 {}
// SAFETY: an array has the alignment and the valid bit patterns of its elements.
unsafe impl<T: Header, const N: usize> Header for [T; N] {}

/// The bytes as one word in network byte order.
///
/// Headers have alignment 1, so LLVM would load byte by byte. The kernel allows unaligned loads from packets where the
/// CPU does (x86-64 and arm64 do), so the function loads the word by one instruction.
#[inline(always)]
pub fn word(bytes: &[u8; 4]) -> u32 {
    #[cfg(target_arch = "bpf")]
    {
        let word: u32;
        // SAFETY: the block loads exactly the four bytes that are borrowed.
        unsafe {
            core::arch::asm!(
                "{word} = *(u32 *)({bytes} + 0)",
                bytes = in(reg) bytes.as_ptr(),
                word = out(reg) word,
                options(pure, readonly, nostack, preserves_flags),
            );
        }
        word
    }
    #[cfg(not(target_arch = "bpf"))]
    u32::from_ne_bytes(*bytes)
}

/// The bytes as one 16-bit word in network byte order; see [`word`].
#[inline(always)]
pub fn half_word(bytes: &[u8; 2]) -> u16 {
    #[cfg(target_arch = "bpf")]
    {
        let half: u32;
        // SAFETY: the block loads exactly the two bytes that are borrowed.
        unsafe {
            core::arch::asm!(
                "{half} = *(u16 *)({bytes} + 0)",
                bytes = in(reg) bytes.as_ptr(),
                half = out(reg) half,
                options(pure, readonly, nostack, preserves_flags),
            );
        }
        half as u16
    }
    #[cfg(not(target_arch = "bpf"))]
    u16::from_ne_bytes(*bytes)
}

/// Writes a word in network byte order, by one instruction: see [`word`].
#[inline(always)]
pub fn set_word(bytes: &mut [u8; 4], word: u32) {
    #[cfg(target_arch = "bpf")]
    // SAFETY: the block writes exactly the four bytes that are borrowed.
    unsafe {
        core::arch::asm!(
            "*(u32 *)({bytes} + 0) = {word}",
            bytes = in(reg) bytes.as_mut_ptr(),
            word = in(reg) u64::from(word),
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        *bytes = word.to_ne_bytes();
    }
}

/// Writes a 16-bit word in network byte order; see [`set_word`].
#[inline(always)]
pub fn set_half_word(bytes: &mut [u8; 2], half: u16) {
    #[cfg(target_arch = "bpf")]
    // SAFETY: the block writes exactly the two bytes that are borrowed.
    unsafe {
        core::arch::asm!(
            "*(u16 *)({bytes} + 0) = {half}",
            bytes = in(reg) bytes.as_mut_ptr(),
            half = in(reg) u64::from(half),
            options(nostack, preserves_flags),
        );
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        *bytes = half.to_ne_bytes();
    }
}

/// Writes bytes word by word; see [`set_word`].
#[inline(always)]
pub fn set_words<const N: usize>(bytes: &mut [[u8; 4]; N], words: [u32; N]) {
    for (bytes, word) in bytes.iter_mut().zip(words) {
        set_word(bytes, word);
    }
}

/// The address in an IPv6 header.
#[inline(always)]
pub fn v6_address(bytes: &[u8; 16]) -> Address {
    let words: &[[u8; 4]; 4] = bytemuck::must_cast_ref(bytes);
    Address::from_words([word(&words[0]), word(&words[1]), word(&words[2]), word(&words[3])])
}

/// The address in an IPv4 header, v4-mapped.
#[inline(always)]
pub fn v4_address(bytes: &[u8; 4]) -> Address {
    Address::from_v4_word(word(bytes))
}

/// A TCP header (RFC 9293 §3.1), multi-byte fields in network byte order. (The type in `network-types` is not used,
/// because it hides the flags in a bit field, from which they are read bit by bit.)
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TcpHeader {
    /// Source port, in network byte order.
    pub source: [u8; 2],
    /// Destination port, in network byte order.
    pub destination: [u8; 2],
    /// Sequence number, in network byte order.
    pub seq: [u8; 4],
    /// Acknowledgement number, in network byte order.
    pub ack: [u8; 4],
    /// Length of the header in units of 4 bytes, in the upper four bits.
    pub data_offset: u8,
    /// Bits of [`lb_common::conntrack::tcp_flags`].
    pub flags: u8,
    /// Receive window, in network byte order.
    pub window: [u8; 2],
    /// Checksum over pseudo header, header and payload.
    pub checksum: [u8; 2],
    /// Urgent pointer, in network byte order.
    pub urgent: [u8; 2],
}

/// Lengths of headers without options, in bytes.
pub mod lengths {
    use network_types::{
        eth::EthHdr,
        ip::{Ipv4Hdr, Ipv6Hdr},
        vlan::VlanHdr,
    };

    /// An Ethernet header without VLAN tags.
    pub const ETHERNET: u32 = 14;
    /// A VLAN tag.
    pub const VLAN: u32 = 4;
    /// An IPv4 header without options.
    pub const IPV4: u32 = 20;
    /// An IPv6 header without extension headers.
    pub const IPV6: u32 = 40;
    /// A TCP header without options.
    pub const TCP: u32 = 20;
    /// A UDP header.
    pub const UDP: u32 = 8;
    /// An ICMP header of either version, without the packet that an error quotes.
    pub const ICMP: u32 = 8;

    const _: () = assert!(ETHERNET as usize == EthHdr::LEN && VLAN as usize == VlanHdr::LEN);
    const _: () = assert!(IPV4 as usize == Ipv4Hdr::LEN && IPV6 as usize == Ipv6Hdr::LEN);
    const _: () = assert!(UDP as usize == network_types::udp::UdpHdr::LEN);
    const _: () = assert!(TCP as usize == size_of::<super::TcpHeader>());
}

/// A packet as a hook receives it: an `skb`, an XDP frame, or a slice in a test.
///
/// Headers are borrowed, not copied. A function that may move the packet takes `&mut self`, so the borrow checker
/// rejects the use of a header after the call, as the verifier would.
pub trait Frame {
    /// The length in bytes: of an `skb`, the whole packet; of an XDP frame, only its linear part.
    fn length(&self) -> u32;

    /// The header that starts `offset` bytes into the frame.
    ///
    /// Read at least two bytes, and read each part of a packet through *one* header: the verifier loses track of bounds
    /// that the compiler derives from other bounds.
    ///
    /// # Errors
    ///
    /// [`Outcome::Malformed`] if `offset` exceeds [`MAX_OFFSET`], or if the frame (of an `skb`, its linear part) ends
    /// before the header does.
    fn header<T: Header>(&self, offset: u32) -> Result<&T, Outcome>;
}

/// The last offset at which a header may begin. It bounds packet offsets for the verifier; the headers of real packets
/// end far below it.
pub const MAX_OFFSET: u32 = 0x3ff;

/// The range of bytes, within a slice, of the header at `offset`.
pub(crate) fn range_of<T: Header>(offset: u32) -> Result<Range<usize>, Outcome> {
    let start = offset as usize;
    if offset > MAX_OFFSET { Err(Outcome::Malformed) } else { Ok(start..start + size_of::<T>()) }
}

impl Frame for [u8] {
    fn length(&self) -> u32 {
        u32::try_from(self.len()).unwrap_or(u32::MAX)
    }

    fn header<T: Header>(&self, offset: u32) -> Result<&T, Outcome> {
        const { assert!(align_of::<T>() == 1) };
        let bytes = self.get(range_of::<T>(offset)?).ok_or(Outcome::Malformed)?;
        // SAFETY: `bytes` is borrowed for the lifetime of the result and has the size of `T`; `T` has alignment 1 and
        // is valid for every bit pattern.
        Ok(unsafe { &*bytes.as_ptr().cast::<T>() })
    }
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;

    #[test]
    fn header_is_borrowed_at_its_offset_or_the_frame_is_malformed() {
        let bytes = [0u8, 1, 2, 3, 4, 5, 6, 7];
        let frame = bytes.as_slice();
        for offset in 0..=4u32 {
            let start = offset as usize;
            assert_eq!(frame.header::<[u8; 4]>(offset), Ok(&bytes[start..start + 4].try_into().unwrap()));
        }
        for offset in [5, 7, 8, 9, MAX_OFFSET, MAX_OFFSET + 1, u32::MAX] {
            assert_eq!(frame.header::<[u8; 4]>(offset), Err(Outcome::Malformed), "offset {offset}");
        }
        assert_eq!(frame.length(), 8);
    }

    #[test]
    fn no_header_begins_after_max_offset() {
        let bytes = vec![0u8; 2 * MAX_OFFSET as usize];
        assert!(bytes.header::<[u8; 4]>(MAX_OFFSET).is_ok());
        assert_eq!(bytes.header::<[u8; 4]>(MAX_OFFSET + 1), Err(Outcome::Malformed));
    }

    #[test]
    fn words_are_in_memory_order() {
        assert_eq!(word(&[192, 0, 2, 1]).to_ne_bytes(), [192, 0, 2, 1]);
        assert_eq!(half_word(&[0x12, 0x34]).to_ne_bytes(), [0x12, 0x34]);
        assert_eq!(v4_address(&[192, 0, 2, 1]), Address::from_v4([192, 0, 2, 1]));
        let bytes = [0x20, 1, 0xd, 0xb8, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
        assert_eq!(v6_address(&bytes), Address::from_v6(bytes));
    }
}
