//! What the BPF programs of the packet benchmark and the benchmark itself agree on. Nothing of this crate is shipped.
//!
//! `restore` writes a packet anew and hands it to the program that is measured; `floors` are the least that a load
//! balancer could do, to compare with.
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

use bytemuck::{Pod, Zeroable};

#[cfg(target_arch = "bpf")]
pub mod octets;

/// The packet that a program gets, again and again: global `TEMPLATE` of `restore`.
///
/// Packets of different flows differ in the address and port of the client, and in 16 bits that make up for that, so
/// that all checksums stay right: see [`Variation`].
#[repr(C, align(8))]
#[derive(Clone, Copy, Pod, Zeroable)]
pub struct Template {
    /// How the frame begins; the rest of it stays as the test run has it.
    pub octets: [u8; 80],
    /// 1 for IPv6, 0 for IPv4.
    pub is_v6: u32,
    /// 1 where the client is the destination, 0 where it is the source.
    pub is_reply: u32,
    /// Number of flows in rotation, less one; that number is a power of two, at most [`MAX_FLOWS`].
    pub mask: u32,
    /// 1 where flows come in the order of [`mixed`], 0 where they come in their own: it must not be the order in which their
    /// entries were made, or caches foresee the next one.
    pub is_mixed: u32,
}

/// Flows that [`Variation`] tells apart.
pub const MAX_FLOWS: u32 = 1 << 16;

/// Octets that `restore` writes: Ethernet, IP and TCP header, the last of which is longer than that of UDP.
pub const RESTORED_V4: usize = 14 + 20 + 20;
/// The same for IPv6.
pub const RESTORED_V6: usize = 14 + 40 + 20;

/// What the packets of one flow have in place of the template's, as bits to flip in little-endian words. The flipped
/// octets of an address must be 0 and 255 in the template, those of the port and of what balances it, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variation {
    /// In the last word of the client's address: its second octet goes up as its fourth goes down, which are octets of
    /// the same weight in a checksum.
    pub address: u32,
    /// In the client's port and in the word 8 octets into the transport header: one goes up as the other goes down.
    pub port: u16,
}

impl Variation {
    /// Of this flow, below [`MAX_FLOWS`].
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "8 bits each")]
    pub const fn of(flow: u32) -> Self {
        let (address, port) = (flow >> 8 & 0xff, flow & 0xff);
        Self { address: address << 8 | address << 24, port: (port << 8) as u16 }
    }
}

/// A permutation of the numbers up to `mask`, which is one less than a power of two, at most [`MAX_FLOWS`]: shifting and
/// multiplying by an odd number can both be undone.
#[inline(always)]
pub const fn mixed(number: u32, mask: u32) -> u32 {
    let number = number ^ number >> 7;
    let number = number.wrapping_mul(0x2c1b) & mask;
    let number = number ^ number >> 5;
    let number = number.wrapping_mul(0x9e35) & mask;
    number ^ number >> 8
}

/// A flow of the minimal load balancers, which know IPv4 only. As in the packet, in memory order.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct FloorFlow {
    /// Source address.
    pub source: u32,
    /// Destination address.
    pub destination: u32,
    /// Source port, then destination port.
    pub ports: u32,
    /// IP protocol number.
    pub protocol: u32,
}

/// A frontend of the minimal load balancers.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct FloorService {
    /// Address, in memory order.
    pub address: u32,
    /// Port, in memory order.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u16,
}

/// Where packets of a flow go, and what that changes.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct FloorTarget {
    /// Address, in memory order.
    pub address: u32,
    /// Port, in memory order.
    pub port: u16,
    /// By how much the address changes a checksum; one's complement, memory order.
    pub address_delta: u16,
    /// By how much the address and the port do.
    pub delta: u16,
    /// Always 0.
    pub zero: u16,
}

/// Entries of the maps: as many as the real ones have.
pub mod capacity {
    /// Frontends.
    pub const SERVICES: usize = 262_144;
    /// Flows.
    pub const CONNTRACK: usize = 524_288;
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_flow_comes_once_in_a_turn() {
        for flows in [1, 2, 16_384, MAX_FLOWS] {
            let order: BTreeSet<u32> = (0..flows).map(|number| mixed(number, flows - 1)).collect();
            assert_eq!(order, (0..flows).collect());
        }
    }

    #[test]
    fn no_two_flows_have_the_same_client() {
        let clients = (0..MAX_FLOWS).map(|flow| {
            let Variation { address, port } = Variation::of(flow);
            (address, port)
        });
        assert_eq!(clients.collect::<BTreeSet<_>>().len(), MAX_FLOWS as usize);
    }
}
