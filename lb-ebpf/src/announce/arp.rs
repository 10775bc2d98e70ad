//! ARP for IPv4 over Ethernet: RFC 826, and RFC 5227 for probes and announcements.

use lb_common::Address;

use super::{ARP, BROADCAST};
use crate::rules::announce::Message;

/// Size in bytes of an Ethernet frame with an ARP packet, without padding.
pub const FRAME: usize = 42;

/// Hardware type Ethernet, protocol type IPv4, and the lengths of their addresses.
const ETHERNET_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];

/// Operation of an ARP packet, RFC 826.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Operation {
    /// Asks for the MAC address of the target.
    Request = 1,
    /// Reports the MAC address of the sender.
    Reply = 2,
}

/// An Ethernet frame with an ARP packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Destination of the frame.
    pub to: [u8; 6],
    /// Source of the frame.
    pub from: [u8; 6],
    ether_type: [u8; 2],
    format: [u8; 6],
    operation: [u8; 2],
    /// The sender's MAC address.
    pub sender_mac: [u8; 6],
    /// The sender's IPv4 address; zeros in a probe.
    pub sender: [u8; 4],
    /// The target's MAC address; without meaning in a request.
    pub target_mac: [u8; 6],
    /// The target's IPv4 address.
    pub target: [u8; 4],
}

const _: () = assert!(size_of::<Frame>() == FRAME && align_of::<Frame>() == 1);

// SAFETY: all fields are bytes, so any bit pattern is valid, and the alignment is 1.
unsafe impl crate::parse::frame::Header for Frame {}

impl Frame {
    /// The operation, if this is ARP for IPv4 over Ethernet.
    #[inline(always)]
    fn operation(&self) -> Option<Operation> {
        let [a, b, c, d, e, f] = self.format;
        let [g, h, i, j, k, l] = ETHERNET_IPV4;
        if u16::from_be_bytes(self.ether_type) != ARP || (a ^ g | b ^ h | c ^ i | d ^ j | e ^ k | f ^ l) != 0
        {
            return None;
        }
        match u16::from_be_bytes(self.operation) {
            1 => Some(Operation::Request),
            2 => Some(Operation::Reply),
            _ => None,
        }
    }

    /// The address that the frame claims, if any. Every ARP request and reply claims an address, except probes.
    #[inline(always)]
    pub fn claimed(&self) -> Option<Address> {
        let claims = self.operation().is_some() && u32::from_ne_bytes(self.sender) != 0;
        claims.then(|| Address::from_v4(self.sender))
    }

    /// The address that the frame asks for. An announcement asks for nothing: its target is the sender's own address.
    #[inline(always)]
    pub fn asked(&self) -> Option<Address> {
        let asks = self.operation() == Some(Operation::Request)
            && u32::from_ne_bytes(self.sender) != u32::from_ne_bytes(self.target);
        asks.then(|| Address::from_v4(self.target))
    }

    /// The meaning of the frame's claim, for the machine with the MAC address `own`.
    #[inline(always)]
    pub fn claim(&self, own: [u8; 6]) -> Message {
        if same(self.sender_mac, own) { Message::Other } else { Message::Claims }
    }

    /// The meaning of the frame's ARP request, for the machine with the MAC address `own`.
    #[inline(always)]
    pub fn question(&self, own: [u8; 6]) -> Message {
        let for_us = same(self.to, BROADCAST) || same(self.to, own);
        if for_us && !same(self.sender_mac, own) { Message::Asks } else { Message::Other }
    }

    /// The reply to this request: `own` has the requested address. As in the kernel's replies, the target fields repeat
    /// the sender fields of the request; in the reply to a probe (RFC 5227 §2.1.1), the target address is therefore
    /// zeros.
    #[inline(always)]
    pub fn reply(&self, own: [u8; 6]) -> Self {
        Self {
            to: self.sender_mac,
            from: own,
            ether_type: ARP.to_be_bytes(),
            format: ETHERNET_IPV4,
            operation: [0, Operation::Reply as u8],
            sender_mac: own,
            sender: self.target,
            target_mac: self.sender_mac,
            target: self.sender,
        }
    }

    /// The announcement that `own` has the address (RFC 5227 §3). Some machines process only requests and others only
    /// replies, so the agent sends both.
    pub fn announcement(address: [u8; 4], own: [u8; 6], operation: Operation) -> Self {
        Self {
            to: BROADCAST,
            from: own,
            ether_type: ARP.to_be_bytes(),
            format: ETHERNET_IPV4,
            operation: [0, operation as u8],
            sender_mac: own,
            sender: address,
            target_mac: if operation == Operation::Request { [0; 6] } else { BROADCAST },
            target: address,
        }
    }

    /// The bytes of the frame.
    #[inline(always)]
    pub const fn bytes(&self) -> &[u8; FRAME] {
        // SAFETY: the struct has this size, alignment 1 and no padding.
        unsafe { &*core::ptr::from_ref(self).cast() }
    }
}

/// Whether two MAC addresses are equal. Comparing words keeps the BPF programs free of calls to `memcmp`.
#[inline(always)]
pub fn same(left: [u8; 6], right: [u8; 6]) -> bool {
    let words = |[a, b, c, d, e, f]: [u8; 6]| (u32::from_ne_bytes([a, b, c, d]), u16::from_ne_bytes([e, f]));
    let ((a, b), (c, d)) = (words(left), words(right));
    a == c && b == d
}
