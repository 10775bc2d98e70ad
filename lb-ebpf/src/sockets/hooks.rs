//! Entry points of the socket hooks, one for each address family.

use aya_ebpf::{
    macros::{cgroup_sock, cgroup_sock_addr},
    programs::{SockAddrContext, SockContext},
};
use lb_common::Outcome;
use lb_ebpf::rules::socket::{self, SocketVerdict};

use super::{
    call::{self, Call, Family},
    connect, frontend, name_peer, receive, release, send,
};
use crate::datapath::stats;

/// The return value that lets the call continue.
const ALLOW: i32 = 1;
/// The return value that makes the call fail.
const REFUSE: i32 = 0;

/// Runs when a process connects a socket to an IPv4 address.
#[cgroup_sock_addr(connect4)]
fn sock_connect4(ctx: SockAddrContext) -> i32 {
    run_connect(&Call::new(ctx, Family::V4))
}

/// Runs when a process connects a socket to an IPv6 address, including v4-mapped ones.
#[cgroup_sock_addr(connect6)]
fn sock_connect6(ctx: SockAddrContext) -> i32 {
    run_connect(&Call::new(ctx, Family::V6))
}

/// Runs when a process sends a datagram in a call that names an IPv4 address.
#[cgroup_sock_addr(sendmsg4)]
fn sock_sendmsg4(ctx: SockAddrContext) -> i32 {
    run_send(&Call::new(ctx, Family::V4))
}

/// Runs when a process sends a datagram in a call that names an IPv6 address. (`sock_sendmsg4` handles v4-mapped
/// addresses.)
#[cgroup_sock_addr(sendmsg6)]
fn sock_sendmsg6(ctx: SockAddrContext) -> i32 {
    run_send(&Call::new(ctx, Family::V6))
}

/// Runs when a process receives a datagram on an AF_INET socket and asks for the sender's address.
#[cgroup_sock_addr(recvmsg4)]
fn sock_recvmsg4(ctx: SockAddrContext) -> i32 {
    run_receive(&Call::new(ctx, Family::V4))
}

/// Runs when a process receives a datagram on an AF_INET6 socket and asks for the sender's address, which may be
/// v4-mapped.
#[cgroup_sock_addr(recvmsg6)]
fn sock_recvmsg6(ctx: SockAddrContext) -> i32 {
    run_receive(&Call::new(ctx, Family::V6))
}

/// Runs at `getpeername(2)` of an AF_INET socket.
#[cgroup_sock_addr(getpeername4)]
fn sock_peername4(ctx: SockAddrContext) -> i32 {
    run_name_peer(&Call::new(ctx, Family::V4))
}

/// Runs at `getpeername(2)` of an AF_INET6 socket, perhaps connected to a v4-mapped address.
#[cgroup_sock_addr(getpeername6)]
fn sock_peername6(ctx: SockAddrContext) -> i32 {
    run_name_peer(&Call::new(ctx, Family::V6))
}

/// Runs when the kernel releases a socket: no process has it open any more.
#[cgroup_sock(sock_release)]
fn sock_release(ctx: SockContext) -> i32 {
    release(&ctx);
    ALLOW
}

#[inline(always)]
fn run_connect(call: &Call) -> i32 {
    if call.is_served() { verdict(call, connect(call)) } else { ALLOW }
}

#[inline(always)]
fn run_send(call: &Call) -> i32 {
    if call.is_served() { verdict(call, send(call)) } else { ALLOW }
}

/// Translates the sender's address. This hook cannot make the call fail: the kernel accepts only [`ALLOW`] from it.
#[inline(always)]
fn run_receive(call: &Call) -> i32 {
    if call.is_served() {
        count(receive(call).unwrap_or_else(|early| early));
    }
    ALLOW
}

/// Translates the peer's address. This hook cannot make the call fail: the kernel accepts only [`ALLOW`] from it.
#[inline(always)]
fn run_name_peer(call: &Call) -> i32 {
    if call.is_served() {
        name_peer(call);
    }
    ALLOW
}

/// Counts the outcome of a call, and returns whether the call continues or fails.
#[inline(always)]
fn verdict(call: &Call, result: Result<Outcome, Outcome>) -> i32 {
    let outcome = result.unwrap_or_else(|early| early);
    count(outcome);
    let verdict = socket::verdict(outcome);
    if verdict == SocketVerdict::Continue {
        return ALLOW;
    }
    frontend::emit_rejected(call, outcome);
    call::fail(verdict as i32);
    REFUSE
}

/// Counts an outcome. Calls to addresses of no service, the most frequent ones, are not counted, nor are calls for
/// protocols other than TCP and UDP.
#[inline(always)]
fn count(outcome: Outcome) {
    if !matches!(outcome, Outcome::NoService | Outcome::NotTransport) {
        stats::count_preempted(outcome);
    }
}
