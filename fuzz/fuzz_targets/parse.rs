//! Fuzzes the packet parsers: `lb_ebpf::parse::properties` defines what must hold.
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
