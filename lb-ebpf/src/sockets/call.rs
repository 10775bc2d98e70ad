//! The system call that a hook runs on, with one interface for IPv4 and IPv6.

use aya_ebpf::{
    EbpfContext as _,
    bindings::BPF_TCP_ESTABLISHED,
    btf_maps::SkStorage,
    helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_set_retval},
    programs::SockAddrContext,
};
use lb_common::{Address, Endpoint, Outcome, ServiceKey, SocketConnection, SocketKey, protocol};

use super::maps::{NODE_NETNS, SERVE_PODS, SOCKETS};

/// The family of the fields that hold the address of a call. In the fields for IPv6, IPv4 addresses are v4-mapped, as
/// in [`Address`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    V4,
    V6,
}

/// A call on a socket, with an address that the hook may replace.
pub(super) struct Call {
    ctx: SockAddrContext,
    family: Family,
    /// The cookie of the socket's network namespace.
    pub(super) netns: u64,
}

impl Call {
    #[inline(always)]
    pub(super) fn new(ctx: SockAddrContext, family: Family) -> Self {
        // SAFETY: the helper takes the context of this program type, which is valid for the whole run.
        let netns = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
        Self { ctx, family, netns }
    }

    /// The remote address and port that the call names or returns.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the upper half of `user_port` is 0")]
    pub(super) fn remote(&self) -> Endpoint {
        let call = self.ctx.sock_addr;
        // SAFETY: the context is valid for the whole run of the program. Reads are volatile, so that they stay as wide
        // as the field: the verifier accepts no other width.
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

    /// Replaces the address and port by others of the same family.
    #[inline(always)]
    pub(super) fn set_remote(&self, remote: &Endpoint) {
        let call = self.ctx.sock_addr;
        // SAFETY: the context is valid for the whole run of the program. Accesses are volatile, so that they stay as
        // wide as the field: the verifier accepts no other width.
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

    /// The key under which `SERVICES` would hold this address as a frontend.
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

    /// Whether the socket is in the node's network namespace.
    #[inline(always)]
    pub(super) fn is_on_node(&self) -> bool {
        self.netns == NODE_NETNS.load()
    }

    /// Whether the hooks serve the socket's network namespace.
    #[inline(always)]
    pub(super) fn is_served(&self) -> bool {
        SERVE_PODS.load() != 0 || self.is_on_node()
    }

    /// The cookie of the socket, which no other socket has until the machine reboots.
    #[inline(always)]
    pub(super) fn cookie(&self) -> u64 {
        // SAFETY: the helper takes the context of this program type.
        unsafe { bpf_get_socket_cookie(self.ctx.as_ptr()) }
    }

    /// The key of this socket and a remote address in `SOCKET_BACKENDS` and `SOCKET_VIPS`.
    #[inline(always)]
    pub(super) fn socket(&self, remote: &Endpoint) -> SocketKey {
        SocketKey::new(self.cookie(), *remote)
    }

    /// The lower 16 bits of the socket's cookie, which few other sockets share.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the lower part differs most")]
    pub(super) fn number(&self) -> u16 {
        // SAFETY: the helper takes the context of this program type.
        (unsafe { bpf_get_socket_cookie(self.ctx.as_ptr()) }) as u16
    }

    /// The connection that the socket has made through a virtual address, if there is such a connection. (The process
    /// may have disconnected the socket since, or connected it to another address: the caller compares the addresses.)
    #[inline(always)]
    pub(super) fn connection(&self) -> Option<SocketConnection> {
        // SAFETY: the storage lives as long as the socket, which outlives the call. The value is copied at once.
        unsafe { self.stored(&SOCKETS).as_ref() }.copied()
    }

    /// Whether the UDP socket is connected to any address.
    #[inline(always)]
    pub(super) fn is_connected(&self) -> bool {
        // SAFETY: the context is valid for the whole run of the program, and so is its socket.
        unsafe {
            let socket = (*self.ctx.sock_addr).__bindgen_anon_1.sk;
            (&raw const (*socket).state).read_volatile() == BPF_TCP_ESTABLISHED
        }
    }

    /// Stores the connection of the socket. If there is no memory for it, the connection still works, but getpeername
    /// shows the backend. (The reference is mutable because the helper demands writable memory.)
    #[inline(always)]
    pub(super) fn set_connection(&self, connection: &mut SocketConnection) {
        self.store(&SOCKETS, connection);
    }

    /// The value that the socket stores in this map; null if there is none.
    #[inline(always)]
    pub(super) fn stored<T>(&self, map: &SkStorage<T>) -> *mut T {
        // SAFETY: the context is valid for the whole run of the program, and so is its socket.
        unsafe { map.get_ptr_mut(&self.ctx) }
    }

    /// Makes the socket store this value in the map; returns false if there is no memory for it. (The helper demands
    /// writable memory.)
    #[inline(always)]
    pub(super) fn store<T: Copy>(&self, map: &SkStorage<T>, value: &mut T) -> bool {
        // SAFETY: the storage lives as long as the socket, which outlives the call. The helper does not replace an
        // existing value, so the program does.
        match unsafe { map.get_or_insert_ptr_mut(&self.ctx, Some(value)).as_mut() } {
            Some(stored) => {
                *stored = *value;
                true
            }
            None => false,
        }
    }

    #[inline(always)]
    pub(super) fn delete_connection(&self) {
        // SAFETY: the context is valid for the whole run of the program, and so is its socket. The helper fails if the
        // socket has no connection, which is harmless.
        unsafe {
            SOCKETS.delete((*self.ctx.sock_addr).__bindgen_anon_1.sk).unwrap_or_default();
        }
    }
}

/// Makes the system call fail with this error number.
#[inline(always)]
pub(super) fn fail(errno: i32) {
    // SAFETY: the helper takes a number, and is allowed in the hooks that use it. It cannot fail for a negative
    // number.
    unsafe { bpf_set_retval(-errno) };
}
