//! Reading headers out of a packet.

use lb_common::{Address, Outcome};
use network_types::{
    ip::{Ipv4Hdr, Ipv6Hdr},
    udp::UdpHdr,
};

/// A header that may be looked at wherever it begins.
///
/// # Safety
///
/// The type must be `repr(C)` with alignment 1, and valid for every bit pattern.
pub unsafe trait Header: Copy {}

// SAFETY: `repr(C)` of octets and octet arrays.
unsafe impl Header for Ipv4Hdr {}
// SAFETY: as above.
unsafe impl Header for Ipv6Hdr {}
// SAFETY: as above.
unsafe impl Header for TcpHeader {}
// SAFETY: as above.
unsafe impl Header for UdpHdr {}
// SAFETY: octets.
unsafe impl Header for u8 {}
// SAFETY: an array is as its elements are.
unsafe impl<T: Header, const N: usize> Header for [T; N] {}

/// The octets as one word in memory order.
///
/// Headers have alignment 1, for which LLVM would load octet by octet. The kernel allows unaligned loads from packets
/// where the CPU does (x86-64 and arm64 do), so one instruction says what is meant.
#[inline(always)]
pub fn word(octets: &[u8; 4]) -> u32 {
    #[cfg(target_arch = "bpf")]
    {
        let word: u32;
        // SAFETY: loads exactly the four octets that are borrowed.
        unsafe {
            core::arch::asm!(
                "{word} = *(u32 *)({octets} + 0)",
                octets = in(reg) octets.as_ptr(),
                word = out(reg) word,
                options(pure, readonly, nostack, preserves_flags),
            );
        }
        word
    }
    #[cfg(not(target_arch = "bpf"))]
    u32::from_ne_bytes(*octets)
}

/// The octets as one 16-bit word in memory order; see [`word`].
#[inline(always)]
pub fn half_word(octets: &[u8; 2]) -> u16 {
    #[cfg(target_arch = "bpf")]
    {
        let half: u32;
        // SAFETY: loads exactly the two octets that are borrowed.
        unsafe {
            core::arch::asm!(
                "{half} = *(u16 *)({octets} + 0)",
                octets = in(reg) octets.as_ptr(),
                half = out(reg) half,
                options(pure, readonly, nostack, preserves_flags),
            );
        }
        half as u16
    }
    #[cfg(not(target_arch = "bpf"))]
    u16::from_ne_bytes(*octets)
}

/// The address in an IPv6 header.
#[inline(always)]
pub fn v6_address(octets: &[u8; 16]) -> Address {
    let words: &[[u8; 4]; 4] = bytemuck::must_cast_ref(octets);
    Address::from_words([word(&words[0]), word(&words[1]), word(&words[2]), word(&words[3])])
}

/// The address in an IPv4 header, v4-mapped.
#[inline(always)]
pub fn v4_address(octets: &[u8; 4]) -> Address {
    Address::from_v4_word(word(octets))
}

/// A TCP header (RFC 9293 §3.1), multi-octet fields in network byte order. That of `network-types` hides the flags in a
/// bit field that is read bit by bit.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TcpHeader {
    /// Source port.
    pub source: [u8; 2],
    /// Destination port.
    pub destination: [u8; 2],
    /// Sequence number.
    pub seq: [u8; 4],
    /// Acknowledgement number.
    pub ack: [u8; 4],
    /// Length of the header in units of 4 octets, in the upper four bits.
    pub data_offset: u8,
    /// See [`lb_common::conntrack::tcp_flags`].
    pub flags: u8,
    /// Receive window.
    pub window: [u8; 2],
    /// Checksum.
    pub checksum: [u8; 2],
    /// Urgent pointer.
    pub urgent: [u8; 2],
}

/// Lengths of headers without options, in octets.
pub mod lengths {
    use network_types::{
        eth::EthHdr,
        ip::{Ipv4Hdr, Ipv6Hdr},
        vlan::VlanHdr,
    };

    /// Ethernet.
    pub const ETHERNET: u32 = 14;
    /// A VLAN tag.
    pub const VLAN: u32 = 4;
    /// IPv4.
    pub const IPV4: u32 = 20;
    /// IPv6.
    pub const IPV6: u32 = 40;
    /// TCP.
    pub const TCP: u32 = 20;
    /// UDP.
    pub const UDP: u32 = 8;
    /// ICMP of both versions, up to the packet that an error quotes.
    pub const ICMP: u32 = 8;

    const _: () = assert!(ETHERNET as usize == EthHdr::LEN && VLAN as usize == VlanHdr::LEN);
    const _: () = assert!(IPV4 as usize == Ipv4Hdr::LEN && IPV6 as usize == Ipv6Hdr::LEN);
    const _: () = assert!(UDP as usize == network_types::udp::UdpHdr::LEN);
    const _: () = assert!(TCP as usize == size_of::<super::TcpHeader>());
}

/// A packet as a hook shows it: an `skb`, an XDP frame, or a slice in a test.
///
/// Headers are borrowed, not copied. Whatever may move the packet takes `&mut self`, so that the borrow checker refuses
/// what the verifier would refuse: a header used after that.
pub trait Frame {
    /// The length in octets, including what is not linear.
    fn length(&self) -> u32;

    /// The header that starts `offset` octets into the frame.
    ///
    /// Take two octets at least, and look at each part of a packet through *one* header: the verifier loses track of
    /// bounds that the compiler has found to be implied by others.
    ///
    /// # Errors
    ///
    /// [`Outcome::Malformed`] where the frame ends before the header does.
    fn header<T: Header>(&self, offset: u32) -> Result<&T, Outcome>;
}

/// The last offset at which a header may begin. Bounds what the verifier has to know of a packet offset; real
/// headers end long before.
pub const MAX_OFFSET: u32 = 0x3ff;

impl Frame for [u8] {
    fn length(&self) -> u32 {
        u32::try_from(self.len()).unwrap_or(u32::MAX)
    }

    fn header<T: Header>(&self, offset: u32) -> Result<&T, Outcome> {
        const { assert!(align_of::<T>() == 1) };
        let start = offset as usize;
        let bytes = self.get(start..start + size_of::<T>()).filter(|_| offset <= MAX_OFFSET);
        let bytes = bytes.ok_or(Outcome::Malformed)?;
        // SAFETY: `bytes` is exactly as long as `T`, which needs no alignment and is valid for every bit pattern.
        Ok(unsafe { &*bytes.as_ptr().cast::<T>() })
    }
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;

    #[test]
    fn a_header_is_where_it_was_asked_for_or_the_frame_is_too_short() {
        let octets = [0u8, 1, 2, 3, 4, 5, 6, 7];
        let frame = octets.as_slice();
        for offset in 0..=4u32 {
            let start = offset as usize;
            assert_eq!(frame.header::<[u8; 4]>(offset), Ok(&octets[start..start + 4].try_into().unwrap()));
        }
        for offset in [5, 7, 8, 9, MAX_OFFSET, MAX_OFFSET + 1, u32::MAX] {
            assert_eq!(frame.header::<[u8; 4]>(offset), Err(Outcome::Malformed), "offset {offset}");
        }
        assert_eq!(frame.length(), 8);
    }

    #[test]
    fn no_header_begins_behind_the_last_offset() {
        let octets = vec![0u8; 2 * MAX_OFFSET as usize];
        assert!(octets.header::<[u8; 4]>(MAX_OFFSET).is_ok());
        assert_eq!(octets.header::<[u8; 4]>(MAX_OFFSET + 1), Err(Outcome::Malformed));
    }

    #[test]
    fn words_are_in_memory_order() {
        assert_eq!(word(&[192, 0, 2, 1]).to_ne_bytes(), [192, 0, 2, 1]);
        assert_eq!(half_word(&[0x12, 0x34]).to_ne_bytes(), [0x12, 0x34]);
        assert_eq!(v4_address(&[192, 0, 2, 1]), Address::from_v4([192, 0, 2, 1]));
        let octets = [0x20, 1, 0xd, 0xb8, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
        assert_eq!(v6_address(&octets), Address::from_v6(octets));
    }
}
