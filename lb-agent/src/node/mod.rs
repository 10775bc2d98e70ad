//! What the agent knows of its node, and what it makes of that for the data plane. Nothing here asks the kernel or the
//! API server.

mod addresses;
mod detect;
mod overlap;
mod settings;

use std::ops::RangeInclusive;

pub use self::{
    addresses::{Addresses, NodePortAddresses, Primary},
    detect::DetectLocal,
    overlap::overlaps,
    settings::{Known, networks},
};

/// Source ports of masqueraded packets: below the range that Linux gives to sockets by default, and outside of the one
/// that Kubernetes gives to node ports by default.
pub const DEFAULT_MASQUERADE_PORTS: RangeInclusive<u16> = 10_000..=29_999;
