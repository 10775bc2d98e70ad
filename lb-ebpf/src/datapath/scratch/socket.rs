//! The key of a socket lookup: a value of `SCRATCH`.

use aya_ebpf::bindings::bpf_sock_tuple;
use lb_common::conntrack::Tuple;

/// The addresses and ports of a packet that the node receives: `struct bpf_sock_tuple`.
#[derive(Clone, Copy)]
pub(crate) struct SocketTuple([u32; 9]);

impl SocketTuple {
    /// Writes the tuple in the form that the helper reads; returns its length in bytes.
    #[inline(always)]
    pub(crate) fn set(&mut self, received: &Tuple) -> u32 {
        let Tuple { source, destination, source_port, destination_port, .. } = received;
        let ([a, b], [c, d]) = (source_port.to_be_bytes(), destination_port.to_be_bytes());
        let ports = u32::from_ne_bytes([a, b, c, d]);
        if source.is_v4() {
            [self.0[0], self.0[1], self.0[2]] = [source.v4_word(), destination.v4_word(), ports];
            return 12;
        }
        let ([a, b, c, d], [e, f, g, h]) = (source.words(), destination.words());
        self.0 = [a, b, c, d, e, f, g, h, ports];
        36
    }

    #[inline(always)]
    pub(crate) const fn as_ptr(&mut self) -> *mut bpf_sock_tuple {
        (&raw mut self.0).cast()
    }
}
