use bytemuck::{Pod, Zeroable};

use crate::{
    Address,
    conntrack::{Phase, Tick},
    layout::describe,
};

/// The remote address and port of a socket: those of a VIP, or those of a backend.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct Endpoint {
    /// The address of the endpoint.
    pub address: Address,
    /// The port, host byte order.
    pub port: u16,
    /// Padding, always 0.
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

/// Value of `SOCKETS` (storage of a connected socket) and of `CONNECTED_SOCKETS`: the VIP that the application
/// connected to, and the backend that replaced the VIP.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SocketConnection {
    /// The address that the application passed to `connect(2)`.
    pub vip: Endpoint,
    /// The address that the socket is connected to.
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

/// Key of `SOCKET_COUNTS`, and value of `COUNTED_SOCKETS` (storage of a connected socket): identifies the counters that
/// include the socket's connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct SocketCounter {
    /// Id of the service port.
    pub service: u32,
    /// Slot of the backend's counter in `ACTIVE`; 0 if the scheduler needs no count of active flows.
    pub active_flows_slot: u32,
    /// The address that the socket is connected to.
    pub backend: Endpoint,
}

const _: () = assert!(size_of::<SocketCounter>() == 28);

describe!(SocketCounter { service, active_flows_slot, backend.address, backend.port, backend.zeros });

/// Value of `SOCKET_COUNTS`: how many connections of sockets to a backend have begun and ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct SocketCounts {
    /// Connections that `connect(2)` has begun.
    pub begun: u64,
    /// Connections whose socket was closed, or connected again.
    pub ended: u64,
}

const _: () = assert!(size_of::<SocketCounts>() == 16);

describe!(SocketCounts { begun, ended });

impl SocketCounts {
    /// The number of connections that have not ended.
    pub const fn active(&self) -> u64 {
        self.begun.saturating_sub(self.ended)
    }
}

/// Key of `SOCKET_BACKENDS` and `SOCKET_VIPS`: an unconnected UDP socket and one of its destinations.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
pub struct SocketKey {
    /// The kernel's socket cookie, unique until the machine reboots.
    pub cookie: u64,
    /// The virtual address in `SOCKET_BACKENDS`, the backend's address in `SOCKET_VIPS`.
    pub remote: Endpoint,
    zeros: u32,
}

const _: () = assert!(size_of::<SocketKey>() == 32);

describe!(SocketKey { cookie, remote.address, remote.port, remote.zeros, zeros });

impl SocketKey {
    /// The key of a socket and one of its destinations.
    #[inline(always)]
    pub const fn new(cookie: u64, remote: Endpoint) -> Self {
        Self { cookie, remote, zeros: 0 }
    }
}

/// Value of `SOCKET_BACKENDS`: the backend of a socket's datagrams to one virtual address.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct SocketBackend {
    /// The backend that the socket talks to.
    pub backend: Endpoint,
    /// When the socket last sent a datagram to the backend.
    pub last_used: Tick,
}

const _: () = assert!(size_of::<SocketBackend>() == 24);

describe!(SocketBackend { backend.address, backend.port, backend.zeros, last_used });

impl SocketBackend {
    /// Whether the next datagram goes to the same backend, if the service still has it. The entry expires after the
    /// timeout of a UDP stream ([`Phase::Stream`]).
    #[inline(always)]
    pub const fn is_valid(&self, now: Tick) -> bool {
        // Negative if another thread has used the socket since `now` was read.
        let ago = now.0.wrapping_sub(self.last_used.0).cast_signed();
        ago <= Tick::ticks_in(Phase::Stream.timeout_seconds()).cast_signed()
    }
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::Endpoint {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::SocketConnection {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::SocketCounter {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::SocketCounts {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::SocketKey {}
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::SocketBackend {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_keeps_its_backend_as_long_as_a_udp_stream_lives() {
        let at = |seconds: u64| Tick::from_nanos(seconds * 1_000_000_000);
        let backend = SocketBackend { last_used: at(1_000), ..SocketBackend::zeroed() };
        assert!(backend.is_valid(at(1_000)) && backend.is_valid(at(1_120)));
        assert!(backend.is_valid(Tick(backend.last_used.0 - 1)), "another thread has used it meanwhile");
        assert!(!backend.is_valid(at(1_123)));
    }
}
