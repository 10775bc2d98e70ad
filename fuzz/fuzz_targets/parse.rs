//! The parsers: see `lb_ebpf::parse::properties`.
#![no_main]

use lb_ebpf::parse::{
    Layer,
    properties::{check, compare},
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|frame: &[u8]| {
    for layer in [Layer::Ethernet, Layer::Ip] {
        check(frame, layer);
    }
    compare(frame);
});
