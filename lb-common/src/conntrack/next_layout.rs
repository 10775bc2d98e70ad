//! The layout of the feature `next-layout`, for tests of upgrades and downgrades: the structs that it changes. The
//! fields are those of the normal layout, where they are documented; their offsets differ.
#![expect(missing_docs, reason = "the normal layout documents these fields")]

use bytemuck::{Pod, Zeroable};

use super::Tick;
use crate::{Address, layout::describe};

/// In this layout, `protocol` follows the padding byte `zero`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Tuple {
    pub source: Address,
    pub destination: Address,
    pub source_port: u16,
    pub destination_port: u16,
    pub zero: u8,
    pub protocol: u8,
    pub zeros: u16,
}

const _: () = assert!(size_of::<Tuple>() == 40);

describe!(Tuple { source, destination, source_port, destination_port, zero, protocol, zeros });

/// In this layout, padding that is always 0 precedes the fields, so that entries also have another size.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Flow {
    pub ahead: [u32; 16],
    pub to: Tuple,
    pub service: u32,
    pub last_seen: Tick,
    pub next_seq: u32,
    pub last_ack: u32,
    pub address_delta: u16,
    pub port_delta: u16,
    pub seen: u8,
    pub flags: u8,
    pub syns: u16,
    pub active_flows_slot: u32,
    pub packets: u32,
    pub traffic: u64,
}

const _: () = assert!(size_of::<Flow>() == 144);

describe!(Flow {
    ahead,
    to.source,
    to.destination,
    to.source_port,
    to.destination_port,
    to.zero,
    to.protocol,
    to.zeros,
    service,
    last_seen,
    next_seq,
    last_ack,
    address_delta,
    port_delta,
    seen,
    flags,
    syns = "asked",
    active_flows_slot = "counter",
    packets,
    traffic,
});
