//! Entry points of the socket hooks, in pairs.

use aya_ebpf::{macros::cgroup_sock_addr, programs::SockAddrContext};

use super::{
    call::{self, Call, Family},
    conclude, connect, name_peer, receive, send,
};

/// The call goes on.
const ALLOW: i32 = 1;
/// The call fails.
const REFUSE: i32 = 0;

/// A socket is connected to an IPv4 address.
#[cgroup_sock_addr(connect4)]
fn sock_connect4(ctx: SockAddrContext) -> i32 {
    run_connect(&Call::new(ctx, Family::V4))
}

/// A socket is connected to an IPv6 address, or to a v4-mapped one.
#[cgroup_sock_addr(connect6)]
fn sock_connect6(ctx: SockAddrContext) -> i32 {
    run_connect(&Call::new(ctx, Family::V6))
}

/// A datagram is sent to an IPv4 address.
#[cgroup_sock_addr(sendmsg4)]
fn sock_sendmsg4(ctx: SockAddrContext) -> i32 {
    run_send(&Call::new(ctx, Family::V4))
}

/// A datagram is sent to an IPv6 address. (One to a v4-mapped address comes to `sock_sendmsg4`.)
#[cgroup_sock_addr(sendmsg6)]
fn sock_sendmsg6(ctx: SockAddrContext) -> i32 {
    run_send(&Call::new(ctx, Family::V6))
}

/// A datagram is received by a socket of AF_INET.
#[cgroup_sock_addr(recvmsg4)]
fn sock_recvmsg4(ctx: SockAddrContext) -> i32 {
    run_receive(&Call::new(ctx, Family::V4))
}

/// A datagram is received by a socket of AF_INET6, perhaps from a v4-mapped address.
#[cgroup_sock_addr(recvmsg6)]
fn sock_recvmsg6(ctx: SockAddrContext) -> i32 {
    run_receive(&Call::new(ctx, Family::V6))
}

/// A socket of AF_INET is asked for its peer.
#[cgroup_sock_addr(getpeername4)]
fn sock_peername4(ctx: SockAddrContext) -> i32 {
    run_name_peer(&Call::new(ctx, Family::V4))
}

/// A socket of AF_INET6 is asked for its peer, perhaps a v4-mapped one.
#[cgroup_sock_addr(getpeername6)]
fn sock_peername6(ctx: SockAddrContext) -> i32 {
    run_name_peer(&Call::new(ctx, Family::V6))
}

#[inline(always)]
fn run_connect(call: &Call) -> i32 {
    if !call.is_served() {
        return ALLOW;
    }
    answer(conclude(call, connect(call)))
}

#[inline(always)]
fn run_send(call: &Call) -> i32 {
    if !call.is_served() {
        return ALLOW;
    }
    answer(conclude(call, send(call)))
}

/// The kernel takes no refusal from this hook.
#[inline(always)]
fn run_receive(call: &Call) -> i32 {
    if call.is_served() {
        conclude(call, receive(call)).unwrap_or_default();
    }
    ALLOW
}

/// The kernel takes no refusal from this hook.
#[inline(always)]
fn run_name_peer(call: &Call) -> i32 {
    if call.is_served() {
        name_peer(call);
    }
    ALLOW
}

#[inline(always)]
fn answer(conclusion: Result<(), i32>) -> i32 {
    match conclusion {
        Ok(()) => ALLOW,
        Err(errno) => {
            call::fail(errno);
            REFUSE
        }
    }
}
