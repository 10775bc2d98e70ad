use bytemuck::{Pod, Zeroable};

use crate::conntrack::Tuple;

/// An element of the ring buffer `EVENTS`. While a monitor runs (see [`monitor`]), the programs emit an event for the
/// first packet of each flow of a Service, for each packet that they drop, and for each packet that they reject with a
/// RST or an ICMP port unreachable. For system calls, they emit an event when they choose a backend, and when the call
/// fails.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Event {
    /// When the program emitted the event, in nanoseconds of `CLOCK_MONOTONIC`.
    pub time: u64,
    /// The tuple of the packet before its translation; zeros for [`crate::Outcome::RewriteFailed`]. At a system call,
    /// the connection has no source yet: the port is 0, and the address is the node's or, for a socket of another
    /// network namespace, one of `100::/64`.
    pub from: Tuple,
    /// For a new flow, the tuple of its packets when they leave the node towards the backend (in a tunnel, the ends of
    /// the tunnel); otherwise zeros.
    pub to: Tuple,
    /// For a new flow, its [`crate::Service::id`]; otherwise 0.
    pub service: u32,
    /// Interface index of the packet's device; for a system call, the process id.
    pub origin: u32,
    /// For a new flow, [`crate::Outcome::NewFlow`] or [`crate::Outcome::NewRoutedFlow`], even if the packet itself is
    /// counted under another outcome; otherwise, the outcome under which it is counted.
    pub outcome: u8,
    /// Why this backend was chosen: a [`Choice`].
    pub choice: u8,
    /// For a new flow, the [`crate::Service::scheduler`].
    pub scheduler: u8,
    /// The hook that emitted the event: an [`EventHook`].
    pub hook: u8,
    /// For a new flow, its [`crate::conntrack::flow_flags`].
    pub flags: u8,
    /// Padding, always 0.
    pub zeros: [u8; 3],
}

const _: () = assert!(size_of::<Event>() == 104);

/// Why a backend was chosen.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// No backend was chosen.
    None = 0,
    /// The scheduler of the service chose the backend.
    Scheduler = 1,
    /// The service has affinity, and the client is pinned to the backend.
    Affinity = 2,
    /// The client's previous backend did not answer, so the next one was chosen.
    Retry = 3,
    /// Another node chose the backend and sent the packet to this node in a tunnel.
    Peer = 4,
}

impl Choice {
    /// All reasons, in the order of their values.
    pub const ALL: [Self; 5] = [Self::None, Self::Scheduler, Self::Affinity, Self::Retry, Self::Peer];
}

/// The hook that emitted an event.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventHook {
    /// The packet was at tc ingress.
    Ingress = 0,
    /// The packet was at tc egress.
    Egress = 1,
    /// The packet was at XDP.
    Xdp = 2,
    /// A system call on a socket.
    Socket = 3,
}

impl EventHook {
    /// All hooks, in the order of their values.
    pub const ALL: [Self; 4] = [Self::Ingress, Self::Egress, Self::Xdp, Self::Socket];

    /// The name used in JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
            Self::Xdp => "xdp",
            Self::Socket => "socket",
        }
    }
}

/// Elements of the array `MONITOR`, of 64 bits each.
pub mod monitor {
    /// The [`Tick`](crate::conntrack::Tick) until which the programs emit events; 0 is off. A running monitor keeps
    /// extending it, so that events stop when the monitor is killed.
    pub const UNTIL: u32 = 0;
    /// Events lost since the map was created, because the ring buffer was full.
    pub const LOST: u32 = 1;
    /// Number of elements of the map `MONITOR`.
    pub const SIZE: usize = 2;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_in_all_is_the_value() {
        for (index, choice) in Choice::ALL.into_iter().enumerate() {
            assert_eq!(choice as usize, index);
        }
        for (index, hook) in EventHook::ALL.into_iter().enumerate() {
            assert_eq!(hook as usize, index, "{}", hook.as_str());
        }
    }
}
