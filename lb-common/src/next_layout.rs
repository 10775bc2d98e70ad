//! The layout of the feature `next-layout`, for tests of upgrades and downgrades: the struct that the feature changes.
//! The struct has the fields of the normal layout, which documents them, but their offsets differ.
#![expect(missing_docs, reason = "the normal layout documents these fields")]

use bytemuck::{Pod, Zeroable};

use crate::layout::describe;

/// In this layout, `seal` is the first field.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Service {
    pub seal: u32,
    pub id: u32,
    pub backends_base: u32,
    pub backends_count: u32,
    pub internal_base: u32,
    pub internal_count: u32,
    pub table_base: u32,
    pub table_count: u32,
    pub internal_table_base: u32,
    pub internal_table_count: u32,
    pub affinity_seconds: u32,
    pub scheduler: u8,
    pub kind: u8,
    pub flags: u16,
}

const _: () = assert!(size_of::<Service>() == 48);

describe!(Service {
    seal,
    id,
    backends_base,
    backends_count,
    internal_base = "inside_base",
    internal_count = "inside_count",
    table_base,
    table_count,
    internal_table_base = "inside_table_base",
    internal_table_count = "inside_table_count",
    affinity_seconds,
    scheduler,
    kind,
    flags,
});
