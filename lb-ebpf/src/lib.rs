//! The part of the BPF programs that needs no kernel: it is compiled and tested on the host like any library.
//!
//! The binary in the same crate (`main.rs`) adds entry points, maps and helpers. Both use the same names for the stages
//! of a packet: [`parse`], [`service`] (choice of a backend), [`forward`], [`rewrite`], [`reject`]. The binary has its
//! part of a stage in `datapath/`, for example `datapath/service`. The decisions of all stages are in [`rules`].
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch, core_intrinsics))]
#![cfg_attr(
    target_arch = "bpf",
    expect(internal_features, reason = "there is no other way to ask what the compiler knows")
)]

#[cfg(test)]
extern crate std;

pub mod announce;
pub mod forward;
pub mod headers;
pub mod parse;
pub mod proxy_protocol;
pub mod reject;
pub mod rewrite;
pub mod rules;
pub mod service;
