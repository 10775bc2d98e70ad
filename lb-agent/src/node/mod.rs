//! What the agent knows of its node, and what it makes of that for the data plane. Nothing here asks the kernel or the
//! API server.

mod addresses;
mod detect;
mod overlap;
mod settings;

pub use self::{
    addresses::{Addresses, NodePortAddresses, Primary},
    detect::DetectLocal,
    overlap::overlaps,
    settings::{Known, networks},
};
