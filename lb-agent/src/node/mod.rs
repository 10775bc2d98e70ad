//! Derives settings of the data plane from facts about the node. Pure: nothing here reads the kernel or the API server.

mod addresses;
mod detect;
mod overlap;
mod settings;

pub use self::{
    addresses::{Addresses, NodePortAddresses, Primary},
    detect::DetectLocal,
    overlap::overlaps,
    settings::{SettingsInputs, networks},
};
