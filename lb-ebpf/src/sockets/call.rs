//! A system call as the hooks see it, the same for both families.

use aya_ebpf::{
    EbpfContext as _,
    bindings::BPF_TCP_ESTABLISHED,
    helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_set_retval},
    programs::SockAddrContext,
};
use lb_common::{Address, Endpoint, Outcome, ServiceKey, SocketConnection, SocketKey, protocol};

use super::maps::{NODE_NETNS, SERVE_PODS, SOCKETS};

/// The family of the address that a call is about. A socket of AF_INET6 speaks IPv4 through v4-mapped addresses, which
/// are what [`Address`] holds anyway.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    V6,
}

/// A call on a socket, about an address that the hook may exchange.
pub(super) struct Call {
    ctx: SockAddrContext,
    family: Family,
    /// The cookie of the socket's network namespace.
    pub(super) netns: u64,
}

impl Call {
    #[inline(always)]
    pub(super) fn new(ctx: SockAddrContext, family: Family) -> Self {
        // SAFETY: takes the context of such a program.
        let netns = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
        Self { ctx, family, netns }
    }

    /// The address and port that the call is about.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the upper half of `user_port` is 0")]
    pub(super) fn remote(&self) -> Endpoint {
        let call = self.ctx.sock_addr;
        // SAFETY: the context is valid while the program runs. Reads are volatile since the verifier takes those that
        // are as wide as the field.
        let (address, port) = unsafe {
            let address = match self.family {
                Family::V4 => Address::from_v4_word((&raw const (*call).user_ip4).read_volatile()),
                Family::V6 => {
                    let word = |at: usize| (&raw const (*call).user_ip6[at]).read_volatile();
                    Address::from_words([word(0), word(1), word(2), word(3)])
                }
            };
            (address, (&raw const (*call).user_port).read_volatile())
        };
        Endpoint::new(address, u16::from_be(port as u16))
    }

    /// Exchanges the address and port for others of the same family.
    #[inline(always)]
    pub(super) fn set_remote(&self, remote: &Endpoint) {
        let call = self.ctx.sock_addr;
        // SAFETY: as in `remote`.
        unsafe {
            match self.family {
                Family::V4 => (&raw mut (*call).user_ip4).write_volatile(remote.address.v4_word()),
                Family::V6 => {
                    let [a, b, c, d] = remote.address.words();
                    (&raw mut (*call).user_ip6[0]).write_volatile(a);
                    (&raw mut (*call).user_ip6[1]).write_volatile(b);
                    (&raw mut (*call).user_ip6[2]).write_volatile(c);
                    (&raw mut (*call).user_ip6[3]).write_volatile(d);
                }
            }
            (&raw mut (*call).user_port).write_volatile(u32::from(remote.port.to_be()));
        }
    }

    /// What the call is for, if the address is a frontend.
    #[inline(always)]
    pub(super) fn key(&self, remote: &Endpoint) -> Result<ServiceKey, Outcome> {
        // SAFETY: as in `remote`.
        let protocol = unsafe { (&raw const (*self.ctx.sock_addr).protocol).read_volatile() };
        if protocol == u32::from(protocol::TCP) {
            Ok(ServiceKey::new(remote.address, remote.port, protocol::TCP))
        } else if protocol == u32::from(protocol::UDP) {
            Ok(ServiceKey::new(remote.address, remote.port, protocol::UDP))
        } else {
            Err(Outcome::NotTransport)
        }
    }

    /// Whether the socket is one of the node itself.
    #[inline(always)]
    pub(super) fn is_of_node(&self) -> bool {
        self.netns == NODE_NETNS.load()
    }

    /// Whether the socket is served at all.
    #[inline(always)]
    pub(super) fn is_served(&self) -> bool {
        SERVE_PODS.load() != 0 || self.is_of_node()
    }

    /// The kernel's number of the socket, which no other one ever has.
    #[inline(always)]
    pub(super) fn cookie(&self) -> u64 {
        // SAFETY: takes the context of such a program.
        unsafe { bpf_get_socket_cookie(self.ctx.as_ptr()) }
    }

    /// The key of the socket and one of those it speaks to.
    #[inline(always)]
    pub(super) fn socket(&self, remote: &Endpoint) -> SocketKey {
        SocketKey::new(self.cookie(), *remote)
    }

    /// A number that few other sockets have.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the lower part differs most")]
    pub(super) fn number(&self) -> u16 {
        // SAFETY: takes the context of such a program.
        (unsafe { bpf_get_socket_cookie(self.ctx.as_ptr()) }) as u16
    }

    /// What the socket was connected to through a virtual address, if it was. (It may have been disconnected since, or
    /// connected to something else: compare.)
    #[inline(always)]
    pub(super) fn connection(&self) -> Option<SocketConnection> {
        // SAFETY: the storage lives as long as the socket, which outlives the call. It is copied at once.
        unsafe { SOCKETS.get_ptr_mut(&self.ctx).as_ref() }.copied()
    }

    /// Whether the socket, which is one of UDP, is connected to anything.
    #[inline(always)]
    pub(super) fn is_connected(&self) -> bool {
        // SAFETY: the context is valid while the program runs, and so is its socket.
        unsafe {
            let socket = (*self.ctx.sock_addr).__bindgen_anon_1.sk;
            (&raw const (*socket).state).read_volatile() == BPF_TCP_ESTABLISHED
        }
    }

    /// Notes what the socket is connected to. Without memory for it the connection works all the same, and getpeername
    /// shows the backend. (The helper wants a pointer that could be written to.)
    #[inline(always)]
    pub(super) fn set_connection(&self, connection: &mut SocketConnection) {
        // SAFETY: as in `connection`. What is there already is not replaced by the helper, hence the second step.
        unsafe {
            if let Some(stored) = SOCKETS.get_or_insert_ptr_mut(&self.ctx, Some(connection)).as_mut() {
                *stored = *connection;
            }
        }
    }

    /// Forgets what the socket was connected to.
    #[inline(always)]
    pub(super) fn forget_connection(&self) {
        // SAFETY: the context is valid while the program runs, and so is its socket. That there was nothing to forget
        // is no error.
        unsafe {
            SOCKETS.delete((*self.ctx.sock_addr).__bindgen_anon_1.sk).unwrap_or_default();
        }
    }
}

/// Makes the system call fail with this error number.
#[inline(always)]
pub(super) fn fail(errno: i32) {
    // SAFETY: takes a number; the hooks that use it are among those that may. It cannot fail for a negative number.
    unsafe { bpf_set_retval(-errno) };
}
