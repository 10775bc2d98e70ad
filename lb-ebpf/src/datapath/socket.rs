//! Sockets of the node, as far as a flow must not take the source port of one.

use aya_ebpf::{
    bindings::bpf_sock_tuple,
    helpers::generated::{bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp},
};
use lb_common::{conntrack::Tuple, protocol};
use lb_ebpf::rules::source_port;

use super::{context::HookContext, scratch::scratch};

/// `BPF_F_CURRENT_NETNS`: the network namespace of the device.
const THIS_NETNS: u64 = u64::MAX;

/// The addresses and ports of a packet that the node receives: `struct bpf_sock_tuple`.
#[derive(Clone, Copy)]
pub(super) struct SocketTuple([u32; 9]);

impl SocketTuple {
    /// Writes the tuple; returns how many bytes of it count.
    #[inline(always)]
    fn set(&mut self, received: &Tuple) -> u32 {
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
    const fn as_ptr(&mut self) -> *mut bpf_sock_tuple {
        (&raw mut self.0).cast()
    }
}

/// Whether a socket of the node waits for such packets: any UDP socket, and a TCP socket with this connection.
#[inline(never)]
pub(super) fn awaits(context: &HookContext, received: &Tuple) -> bool {
    let Ok(scratch) = scratch() else { return false };
    let tuple = scratch.socket();
    let length = tuple.set(received);
    match received.protocol {
        protocol::TCP => has_connection(context, tuple, length),
        protocol::UDP => has_udp_socket(context, tuple, length),
        _ => false,
    }
}

#[inline(always)]
fn has_connection(context: &HookContext, tuple: &mut SocketTuple, length: u32) -> bool {
    // SAFETY: the context is that of this program, and the tuple has at least `length` bytes, which the helper copies.
    let socket = unsafe { bpf_skc_lookup_tcp(context.raw, tuple.as_ptr(), length, THIS_NETNS, 0) };
    if socket.is_null() {
        return false;
    }
    // SAFETY: the helper has returned a socket, which stays valid until it is released, here and only once.
    let state = unsafe {
        let state = (&raw const (*socket).state).read_volatile();
        bpf_sk_release(socket.cast());
        state
    };
    source_port::is_used_by_socket(state)
}

#[inline(always)]
fn has_udp_socket(context: &HookContext, tuple: &mut SocketTuple, length: u32) -> bool {
    // SAFETY: the context is that of this program, and the tuple has at least `length` bytes, which the helper copies. A
    // socket that it returns stays valid until it is released, here and only once.
    unsafe {
        let socket = bpf_sk_lookup_udp(context.raw, tuple.as_ptr(), length, THIS_NETNS, 0);
        if !socket.is_null() {
            bpf_sk_release(socket.cast());
        }
        !socket.is_null()
    }
}
