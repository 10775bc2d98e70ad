use bytemuck::{Pod, Zeroable};

use crate::{
    Address,
    conntrack::{Phase, Tick},
    layout::describe,
};

/// An address and port that a socket speaks to: a virtual one, or that of a backend.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Endpoint {
    /// The address.
    pub address: Address,
    /// The port, host byte order.
    pub port: u16,
    /// Always 0.
    pub zeros: u16,
}

const _: () = assert!(size_of::<Endpoint>() == 20);

describe!(Endpoint { address, port, zeros });

impl Endpoint {
    /// An address and a port.
    #[inline(always)]
    pub const fn new(address: Address, port: u16) -> Self {
        Self { address, port, zeros: 0 }
    }
}

/// Value of `SOCKETS`, storage of a connected socket, and of `CONNECTED_SOCKETS`: what it was connected to, and what that
/// became.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SocketConnection {
    /// What the application asked for.
    pub vip: Endpoint,
    /// Where the socket is connected to.
    pub backend: Endpoint,
}

const _: () = assert!(size_of::<SocketConnection>() == 40);

describe!(SocketConnection {
    vip.address,
    vip.port,
    vip.zeros,
    backend.address,
    backend.port,
    backend.zeros,
});

/// Key of `SOCKET_BACKENDS` and `SOCKET_VIPS`: a UDP socket and one of those it speaks to without being connected.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct SocketKey {
    /// The kernel's number of the socket, which no other socket ever has until the machine is started again.
    pub cookie: u64,
    /// The virtual address in `SOCKET_BACKENDS`, the backend's in `SOCKET_VIPS`.
    pub remote: Endpoint,
    zeros: u32,
}

const _: () = assert!(size_of::<SocketKey>() == 32);

describe!(SocketKey { cookie, remote.address, remote.port, remote.zeros, zeros });

impl SocketKey {
    /// The key of a socket and one of those it speaks to.
    #[inline(always)]
    pub const fn new(cookie: u64, remote: Endpoint) -> Self {
        Self { cookie, remote, zeros: 0 }
    }
}

/// Value of `SOCKET_BACKENDS`: where a socket's datagrams to a virtual address go.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SocketBackend {
    /// The backend.
    pub backend: Endpoint,
    /// When the last datagram was sent to it.
    pub last_used: Tick,
}

const _: () = assert!(size_of::<SocketBackend>() == 24);

describe!(SocketBackend { backend.address, backend.port, backend.zeros, last_used });

impl SocketBackend {
    /// Whether the next datagram goes to the same backend, if the service still has it: a pause as long as that after which a
    /// UDP flow of packets is forgotten ends what belongs together.
    #[inline(always)]
    pub const fn holds(&self, now: Tick) -> bool {
        now.0.wrapping_sub(self.last_used.0) <= Tick::in_seconds(Phase::Stream.timeout_seconds())
    }
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::Endpoint {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SocketConnection {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SocketKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for super::SocketBackend {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_keeps_its_backend_as_long_as_a_flow_of_datagrams_lasts() {
        let at = |seconds: u64| Tick::from_nanos(seconds * 1_000_000_000);
        let backend = SocketBackend { last_used: at(1_000), ..SocketBackend::zeroed() };
        assert!(backend.holds(at(1_000)) && backend.holds(at(1_120)));
        assert!(!backend.holds(at(1_123)));
    }
}
