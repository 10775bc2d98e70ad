//! Forwarding: the headers of tunnels.

pub mod tunnel;
