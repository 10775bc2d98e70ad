//! Limits on new connections of Services.

use core::fmt;

use bytemuck::{Pod, Zeroable};

use crate::layout::describe;

/// A limit on new connections: a number per second or per minute.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct ConnectionRate {
    /// Maximum number of new connections; 0 sets no limit.
    pub connections: u32,
    /// The period of the limit in seconds: 1 or 60; 0 if there is no limit.
    pub seconds: u32,
}

impl ConnectionRate {
    /// No limit.
    pub const NONE: Self = Self { connections: 0, seconds: 0 };

    /// Whether new connections have a limit.
    #[inline(always)]
    pub const fn is_limit(&self) -> bool {
        self.connections > 0 && self.seconds > 0
    }
}

/// As the annotations write it: `20/s`, `60/m`.
impl fmt::Display for ConnectionRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.connections, if self.seconds == 60 { "m" } else { "s" })
    }
}

/// Value of `LIMITS`, keyed by [`Service::id`](crate::Service::id): the limits on new connections of one service port,
/// on this node. The programs look up the limits only for frontends with the flag
/// [`service_flags::LIMITED`](crate::service_flags::LIMITED).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
pub struct ConnectionLimits {
    /// The limit for all clients together.
    pub service: ConnectionRate,
    /// The limit for each client.
    pub client: ConnectionRate,
}

const _: () = assert!(size_of::<ConnectionLimits>() == 16);

describe!(ConnectionLimits {
    service.connections,
    service.seconds,
    client.connections,
    client.seconds,
});

impl ConnectionLimits {
    /// No limits.
    pub const NONE: Self = Self { service: ConnectionRate::NONE, client: ConnectionRate::NONE };

    /// Whether any of the limits is set.
    pub const fn is_any(&self) -> bool {
        self.service.is_limit() || self.client.is_limit()
    }
}

#[cfg(feature = "user")]
mod pod {
    // SAFETY: `repr(C)`, any bit pattern is valid and there is no padding (derive(bytemuck::Pod) checks both).
    unsafe impl aya::Pod for super::ConnectionLimits {}
}
