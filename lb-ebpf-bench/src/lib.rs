//! Types that the packet benchmark shares with its BPF programs. Nothing of this crate is shipped.
//!
//! The binary `restore` writes a fresh packet and tail-calls the measured program. The binary `baselines` has minimal
//! programs, with which the benchmark compares the data plane.
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

use bytemuck::{Pod, Zeroable};

#[cfg(target_arch = "bpf")]
pub mod bytes;

/// The packet that every repetition starts from: global `TEMPLATE` of `restore`.
///
/// Packets of different flows differ in the client's address and port, and in 16 bits that compensate the difference,
/// so that one checksum is correct for all: see [`Variation`].
#[repr(C, align(8))]
#[derive(Clone, Copy, Pod, Zeroable)]
pub struct Template {
    /// The first bytes of the frame. The input of the test run supplies the other bytes.
    pub bytes: [u8; 80],
    /// 1 for IPv6, 0 for IPv4.
    pub is_v6: u32,
    /// 1 if the client is the destination, 0 if it is the source.
    pub is_reply: u32,
    /// Number of distinct flows minus one, a mask of low bits: the packets rotate through the flows from `first` to
    /// `first + mask`.
    pub mask: u32,
    /// The first flow of the rotation; 0 unless two CPUs send packets of different flows.
    pub first: u32,
    /// 1 for the order of [`mixed`], 0 for the flows' own order. Measured packets must not come in the order in which
    /// the entries were created, or caches predict the next one.
    pub is_mixed: u32,
    /// Padding, always 0.
    pub zero: u32,
}

/// The number of flows that [`Variation`] can distinguish.
pub const MAX_FLOWS: u32 = 1 << 23;

/// Number of bytes that `restore` writes for IPv4: Ethernet, IP and TCP header. (UDP's header is shorter.)
pub const RESTORED_V4: usize = 14 + 20 + 20;
/// Number of bytes that `restore` writes for IPv6.
pub const RESTORED_V6: usize = 14 + 40 + 20;

/// How the packets of one flow differ from the template: bits to flip in little-endian words. Each flip from 0 to 1
/// goes with one from 1 to 0 of the same weight, so that checksums stay valid. So in the template, the bits to flip
/// must be 0 in the second byte of the address and in the port, and 1 in the fourth byte of the address and in the word
/// at byte 8 of the transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variation {
    /// Bits to flip in the last word of the client's address: the second byte increases as the fourth decreases. Both
    /// have the same weight in a checksum.
    pub address: u32,
    /// Bits to flip in the client's port and in the word at byte 8 of the transport header: one increases as the other
    /// decreases.
    pub port: u16,
}

impl Variation {
    /// The variation of the flow with the number `flow`, which is below [`MAX_FLOWS`].
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "8 and 15 bits")]
    pub const fn of(flow: u32) -> Self {
        let (address, low, high) = (flow >> 8 & 0xff, flow & 0xff, flow >> 16 & 0x7f);
        Self { address: address << 8 | address << 24, port: (low << 8 | high) as u16 }
    }
}

/// A permutation of the numbers from 0 to `mask`, where `mask + 1` is a power of two, at most [`MAX_FLOWS`]: XOR with a
/// shifted copy and multiplication by an odd number are both invertible.
#[inline(always)]
pub const fn mixed(number: u32, mask: u32) -> u32 {
    let number = number ^ number >> 7;
    let number = number.wrapping_mul(0x2c1b) & mask;
    let number = number ^ number >> 5;
    let number = number.wrapping_mul(0x9e35) & mask;
    number ^ number >> 8
}

/// Key of a flow of the baselines, which support IPv4 only. Fields are in network byte order, as in the packet.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct BaselineFlow {
    /// Source address of the packet, in network byte order.
    pub source: u32,
    /// Destination address of the packet, in network byte order.
    pub destination: u32,
    /// Source port, then destination port.
    pub ports: u32,
    /// IP protocol number of the packet.
    pub protocol: u32,
}

/// Key of a Service port of the baselines.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct BaselineService {
    /// Address, in network byte order.
    pub address: u32,
    /// Port, in network byte order.
    pub port: u16,
    /// IP protocol number of the packet.
    pub protocol: u16,
}

/// Destination of a flow's packets, and the change of their checksums.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct BaselineTarget {
    /// Address, in network byte order.
    pub address: u32,
    /// Port, in network byte order.
    pub port: u16,
    /// Change of the IPv4 header's checksum: one's complement, network byte order.
    pub address_delta: u16,
    /// The change that the translation of address and port makes to the transport checksum.
    pub delta: u16,
    /// Padding, always 0.
    pub zero: u16,
}

/// Map sizes, in entries: the data plane's defaults, so that its lookups and those of the baselines touch tables of
/// equal size.
pub mod capacity {
    /// How many service ports the baseline has room for.
    pub const SERVICES: usize = lb_common::capacity::SERVICES;
    /// How many flows of one direction the baseline has room for: the slots of the flow table.
    pub const CONNTRACK: usize = lb_common::capacity::FLOWS;
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_flow_comes_once_in_a_turn() {
        for flows in [1, 2, 16_384, 65_536, 131_072, 1 << 20] {
            let order: BTreeSet<u32> = (0..flows).map(|number| mixed(number, flows - 1)).collect();
            assert_eq!(order, (0..flows).collect());
        }
    }

    #[test]
    fn no_two_flows_have_the_same_client() {
        // An odd step samples numbers that differ in every bit.
        let flows = (0..MAX_FLOWS).step_by(7);
        let clients = flows.clone().map(|flow| {
            let Variation { address, port } = Variation::of(flow);
            (address, port)
        });
        assert_eq!(clients.collect::<BTreeSet<_>>().len(), flows.count());
    }
}
