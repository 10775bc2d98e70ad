//! The BPF programs: logic that is tested on the host.
#![no_std]
