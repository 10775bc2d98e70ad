//! What the BPF programs compute, apart from the kernel: it is compiled and tested on the host like any library.
//! The programs (`main.rs` and the modules beside it) add maps, helpers and entry points.
//!
//! A packet's way: [`packet::parse`] → a lookup → [`schedule`] for a new flow → rewrite, or [`reject`].
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch, core_intrinsics))]
#![cfg_attr(
    target_arch = "bpf",
    expect(internal_features, reason = "there is no other way to ask what the compiler knows")
)]

#[cfg(test)]
extern crate std;

pub mod bounds;
pub mod frame;
pub mod packet;
pub mod reject;
pub mod rewrite;
pub mod schedule;
pub mod tunnel;
