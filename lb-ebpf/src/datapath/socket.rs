//! Lookup of sockets of the node: a flow must not take a source port that a socket uses, and a DNS query goes to the
//! agent's server only if the server has a socket.

use aya_ebpf::helpers::generated::{bpf_sk_lookup_udp, bpf_sk_release, bpf_skc_lookup_tcp};
use lb_common::{conntrack::Tuple, protocol};
use lb_ebpf::rules::{dns::ServerSocket, source_port};

use super::{
    context::HookContext,
    scratch::{scratch, socket::SocketTuple},
};

/// `BPF_F_CURRENT_NETNS`: the network namespace of the device.
const THIS_NETNS: u64 = u64::MAX;

/// Whether a socket of the node may receive packets with this tuple: any UDP socket with the address and port, or a TCP
/// socket of this connection.
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

/// The socket of the DNS server that would receive packets with this tuple.
#[inline(never)]
pub(super) fn of_server(context: &HookContext, received: &Tuple) -> ServerSocket {
    let Ok(scratch) = scratch() else { return ServerSocket::None };
    let tuple = scratch.socket();
    let length = tuple.set(received);
    if received.protocol == protocol::UDP {
        return if has_udp_socket(context, tuple, length) { ServerSocket::Open } else { ServerSocket::None };
    }
    tcp_state(context, tuple, length).map_or(ServerSocket::None, ServerSocket::of_tcp)
}

#[inline(always)]
fn has_connection(context: &HookContext, tuple: &mut SocketTuple, length: u32) -> bool {
    tcp_state(context, tuple, length).is_some_and(source_port::is_used_by_socket)
}

/// The state of the TCP socket for the tuple (`BPF_TCP_…`).
#[inline(always)]
fn tcp_state(context: &HookContext, tuple: &mut SocketTuple, length: u32) -> Option<u32> {
    // SAFETY: the context is that of this program, and the tuple has at least `length` bytes, which the helper copies.
    let socket = unsafe { bpf_skc_lookup_tcp(context.raw, tuple.as_ptr(), length, THIS_NETNS, 0) };
    if socket.is_null() {
        return None;
    }
    // SAFETY: the helper has returned a socket, which stays valid until the program releases it, here and only once.
    unsafe {
        let state = (&raw const (*socket).state).read_volatile();
        bpf_sk_release(socket.cast());
        Some(state)
    }
}

#[inline(always)]
fn has_udp_socket(context: &HookContext, tuple: &mut SocketTuple, length: u32) -> bool {
    // SAFETY: the context is that of this program, and the tuple has at least `length` bytes, which the helper copies.
    // A socket that the helper returns stays valid until the program releases it, here and only once.
    unsafe {
        let socket = bpf_sk_lookup_udp(context.raw, tuple.as_ptr(), length, THIS_NETNS, 0);
        if !socket.is_null() {
            bpf_sk_release(socket.cast());
        }
        !socket.is_null()
    }
}
