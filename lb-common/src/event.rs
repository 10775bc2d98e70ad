use bytemuck::{Pod, Zeroable};

use crate::conntrack::Tuple;

/// What the programs tell a monitor of: an element of the ring buffer `EVENTS`. They do so for first packets of flows, and for
/// packets that are dropped or rejected, while somebody listens (see [`monitor`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Event {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub time: u64,
    /// What the client sends; zeros where the packet was half rewritten. The source of a system call is the node's address and
    /// port 0, as nobody knows a better one yet.
    pub from: Tuple,
    /// Of a new flow, what leaves the node towards the backend (of one in a tunnel, the ends of that); else zeros.
    pub to: Tuple,
    /// [`crate::Service::id`] of a new flow; else 0.
    pub service: u32,
    /// Interface index of the device where the packet was; the process that made the system call.
    pub origin: u32,
    /// The [`crate::Outcome`].
    pub outcome: u8,
    /// Why this backend: a [`Choice`].
    pub choice: u8,
    /// Of a new flow, [`crate::Service::scheduler`].
    pub scheduler: u8,
    /// Where: an [`EventHook`].
    pub hook: u8,
    /// Of a new flow, its [`crate::conntrack::flow_flags`].
    pub flags: u8,
    /// Always 0.
    pub zeros: [u8; 3],
}

const _: () = assert!(size_of::<Event>() == 104);

/// Why a backend was chosen.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// None was.
    None = 0,
    /// The service's scheduler says so.
    Scheduler = 1,
    /// The client was there before, and the service has affinity.
    Affinity = 2,
    /// The backend that the client has asked did not answer, so this is the next one.
    Retry = 3,
    /// Another node has chosen it, and sent the packet here in a tunnel.
    Peer = 4,
}

impl Choice {
    /// All of them, in the order of their values.
    pub const ALL: [Self; 5] = [Self::None, Self::Scheduler, Self::Affinity, Self::Retry, Self::Peer];
}

/// Where an event was made.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventHook {
    /// tc, where packets enter the node.
    Ingress = 0,
    /// tc, where they leave it.
    Egress = 1,
    /// XDP.
    Xdp = 2,
    /// A system call on a socket.
    Socket = 3,
}

impl EventHook {
    /// All of them, in the order of their values.
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
    /// The [`Tick`](crate::conntrack::Tick) before which events are made. A monitor keeps putting it off, so that nothing is
    /// left on by one that was killed; 0 is off.
    pub const UNTIL: u32 = 0;
    /// How many events were lost since the map was made, because the ring buffer had no room.
    pub const LOST: u32 = 1;
    /// How many elements there are.
    pub const SIZE: usize = 2;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_in_all_is_the_value() {
        for (index, choice) in Choice::ALL.into_iter().enumerate() {
            assert_eq!(choice as usize, index);
        }
        for (index, hook) in EventHook::ALL.into_iter().enumerate() {
            assert_eq!(hook as usize, index, "{}", hook.as_str());
        }
    }
}
